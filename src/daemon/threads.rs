//! Starting threads and waiting for their end.

use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, bounded};

use crate::daemon::RunError;
use crate::pulse::Pulses;
use crate::shutdown::Never;

/// Threads that end by themselves, and a channel that tells when all have.
pub struct Threads {
    handles: Vec<JoinHandle<()>>,
    alive: Option<Sender<Never>>,
    ended: Receiver<Never>,
}

impl Threads {
    pub fn new() -> Threads {
        let (alive, ended) = bounded(0);
        Threads { handles: Vec::new(), alive: Some(alive), ended }
    }

    pub fn start(
        &mut self,
        name: &'static str,
        work: impl FnOnce() + Send + 'static,
    ) -> Result<(), RunError> {
        let alive = self.alive.clone();
        let run = move || {
            work();
            drop(alive);
        };
        let builder = thread::Builder::new().name(name.to_owned());
        self.handles.push(builder.spawn(run).map_err(|error| RunError::Thread { name, error })?);
        Ok(())
    }

    /// Starts a thread that `pulses` looks after; its pieces of work may take up to `limit`.
    pub fn start_attended(
        &mut self,
        pulses: &Arc<Pulses>,
        name: &'static str,
        limit: Duration,
        work: impl FnOnce() + Send + 'static,
    ) -> Result<(), RunError> {
        let pulses = Arc::clone(pulses);
        self.start(name, move || {
            pulses.attend(name, limit);
            work();
        })
    }

    /// Disconnects when all threads have ended; no other can be started.
    pub fn ended(&mut self) -> Receiver<Never> {
        self.alive = None;
        self.ended.clone()
    }

    pub fn join(self) {
        for handle in self.handles {
            // A panic there has ended the process already.
            drop(handle.join());
        }
    }
}
