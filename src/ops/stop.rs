//! How the threads that serve a port or a socket are ended: they wait for their clients and for this at once.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::thread::{Builder, JoinHandle};

use rustix::event::{EventfdFlags, eventfd};

/// A descriptor that can be read as soon as it is time to end.
#[derive(Debug, Clone)]
pub(super) struct Stop(Arc<OwnedFd>);

impl Stop {
    /// Not yet.
    pub(super) fn new() -> io::Result<Stop> {
        Ok(Stop(Arc::new(eventfd(0, EventfdFlags::CLOEXEC)?)))
    }

    /// Starts a thread, which has to end when its own copy of `self` can be read.
    pub(super) fn spawn(
        self,
        thread: Builder,
        run: impl FnOnce() + Send + 'static,
    ) -> io::Result<Stoppable> {
        Ok(Stoppable { thread: Some(thread.spawn(run)?), stop: self })
    }
}

impl AsFd for Stop {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// A thread; it is told to end when this is dropped, and waited for.
#[derive(Debug)]
pub(super) struct Stoppable {
    stop: Stop,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Stoppable {
    fn drop(&mut self) {
        // A counter that is only ever raised by one can't be full.
        let _ = rustix::io::write(&self.stop, &1u64.to_ne_bytes());
        if let Some(thread) = self.thread.take() {
            // A panic there has ended the process already, or is a test's own.
            let _ = thread.join();
        }
    }
}
