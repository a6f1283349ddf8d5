//! What each worker has in hand, for people who ask.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;

use crate::fleet::registry::Key;
use crate::node::Progress;
use crate::protocol::Identity;

/// Nodes in hand, by the generation of their queue entry, which no two have in common.
#[derive(Debug, Default)]
pub struct Desks(Mutex<BTreeMap<u64, Desk>>);

/// One node in hand.
#[derive(Debug, Clone)]
pub struct Desk {
    /// The node.
    pub identity: Identity,
    /// Which attempt it is, from 1.
    pub attempt: u32,
    /// When a worker took it.
    pub since: Instant,
    /// When its time is up.
    pub deadline: Instant,
    /// Who has it.
    pub thread: String,
    /// How far it has come.
    pub progress: Arc<Progress>,
}

impl Desks {
    /// Shows a node for as long as the result lives.
    pub fn show(&self, key: &Key, desk: Desk) -> Shown<'_> {
        self.0.lock().insert(key.generation, desk);
        Shown { desks: self, generation: key.generation }
    }

    /// The nodes in hand, the longest first.
    pub fn all(&self) -> Vec<Desk> {
        let mut desks: Vec<Desk> = self.0.lock().values().cloned().collect();
        desks.sort_by_key(|desk| desk.since);
        desks
    }
}

/// A node that is in hand until this is dropped.
pub struct Shown<'a> {
    desks: &'a Desks,
    generation: u64,
}

impl Drop for Shown<'_> {
    fn drop(&mut self) {
        self.desks.0.lock().remove(&self.generation);
    }
}
