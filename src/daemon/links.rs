//! What a change of the connection means for the gate.

use std::sync::Arc;

use crossbeam_channel::{Receiver, Sender, bounded};
use parking_lot::Mutex;

use crate::gate::{Gate, Reason};
use crate::transport::Link;

/// The last change of the connection, for the main thread, and what it means for the gate.
///
/// Changes that come faster than it wakes up are one: only where we are now matters.
pub struct Links {
    gate: Arc<Gate>,
    /// Locked while the gate is opened or closed, so that the last change has the last word.
    latest: Mutex<Option<Link>>,
    changed: Sender<()>,
}

impl Links {
    pub fn new(gate: Arc<Gate>) -> (Arc<Links>, Receiver<()>) {
        let (changed, receiver) = bounded(1);
        (Arc::new(Links { gate, latest: Mutex::new(None), changed }), receiver)
    }

    /// Notes a change. A lost connection closes the gate at once: every request until the main thread wakes up would fail.
    pub fn put(&self, link: Link) {
        let mut latest = self.latest.lock();
        if let Link::Down { .. } = link {
            self.gate.close(Reason::Disconnected);
        }
        *latest = Some(link);
        drop(latest);
        let _ = self.changed.try_send(());
    }

    pub fn take(&self) -> Option<Link> {
        self.latest.lock().take()
    }

    /// Opens the gate after what was taken, unless there was another change since.
    pub fn open(&self) -> bool {
        let latest = self.latest.lock();
        let is_last = latest.is_none();
        if is_last {
            self.gate.open(Reason::Disconnected);
        }
        is_last
    }
}
