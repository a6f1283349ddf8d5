//! Starting threads and waiting for their end.

use std::thread::{self, JoinHandle};

use crossbeam_channel::{Receiver, Sender, bounded};

use crate::fleet::RunError;
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
