//! Every step for one node, in order, on one screen.

pub mod step;

use std::time::{Duration, Instant};

use crate::gate::Closed;

/// What became of one attempt to provision a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// Configured and restarted; or configured, and gone before it answered `restart`.
    Provisioned {
        /// When `configure` was answered.
        configured_at: Instant,
        /// When `restart` was answered, if it was.
        restarted_at: Option<Instant>,
    },
    /// An update was sent; the node comes back by its startup event.
    UpgradeSent {
        /// The version asked for.
        version: String,
        /// The version the node reported before.
        from: String,
        /// When it was sent; a startup event after this may be the upgraded node.
        sent_at: Instant,
    },
    /// The same update was tried twice and the version did not change.
    UpgradeStuck {
        /// The version asked for.
        version: String,
    },
    /// Shut down on the helper's wish.
    ShutDown,
    /// The helper wants it later.
    Deferred,
    /// Another provisioner holds the node's lock.
    Busy,
    /// The helper failed.
    HelperFailed,
    /// The node does not know our provisioning token.
    WrongToken,
    /// Nobody listens on the node's subject, or it never answered the inventory.
    Unreachable,
    /// A check of ours refused the node.
    Refused,
    /// A request failed on its last try.
    Failed,
    /// The node is not in provisioning mode any more.
    NotProvisioning,
    /// The gate closed before the next step.
    Stopped(Closed),
}

/// One attempt: its outcome, the reason in words, and how long each step took.
#[derive(Debug, Clone)]
pub struct Report {
    /// What became of it.
    pub outcome: Outcome,
    /// Why, for people; empty on success.
    pub reason: String,
    /// Steps taken, in order.
    pub steps: Vec<(&'static str, Duration)>,
}
