//! Which counters an outcome adds to: what became of nodes, as the metrics and the page say it.

use crate::node::Outcome;

/// The `outcome` label of a node that discovery finds no more.
pub const STALE: &str = "stale";

/// The counters an outcome adds one to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Tally {
    /// `provisioned`.
    pub provisioned: bool,
    /// `provision_errors`.
    pub provision_errors: bool,
    /// The `outcome` label of `outcomes`.
    pub outcome: Option<&'static str>,
}

impl Tally {
    /// What `outcome` counts as.
    pub fn of(outcome: &Outcome) -> Tally {
        let good =
            |label| Tally { provisioned: true, provision_errors: false, outcome: Some(label) };
        let bad =
            |label| Tally { provisioned: false, provision_errors: true, outcome: Some(label) };
        let own =
            |label| Tally { provisioned: false, provision_errors: false, outcome: Some(label) };
        match outcome {
            Outcome::Provisioned { .. } => good("provisioned"),
            Outcome::UpgradeSent { .. } => good("upgrade_sent"),
            Outcome::UpgradeStuck { .. } => bad("upgrade_stuck"),
            Outcome::ShutDown => good("shutdown"),
            Outcome::Deferred => own("deferred"),
            Outcome::Busy => own("busy"),
            Outcome::HelperFailed => bad("helper_failed"),
            Outcome::WrongToken => bad("wrong_token"),
            Outcome::Misconfigured => bad("misconfigured"),
            Outcome::Unreachable => bad("unreachable"),
            Outcome::Refused => bad("refused"),
            Outcome::Failed => bad("failed"),
            Outcome::NotProvisioning => own("not_provisioning"),
            Outcome::Stopped(_) => Tally::default(),
        }
    }
}
