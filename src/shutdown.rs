//! Signals become drain, abort, reload and reopen.
//!
//! SIGTERM or SIGINT starts the drain: no new work, what runs may finish. A second one aborts: every wait ends. SIGHUP
//! asks for the configuration to be read again, SIGUSR2 for the log file to be opened again. Drain and abort are channels
//! that carry no message and only disconnect, so any number of threads can wait for them. How long a drain may take before
//! it turns into an abort is decided by `fleet`, which knows the setting and when the last node has ended.

use std::io;
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use crossbeam_channel::{Receiver, Sender, bounded};
use parking_lot::Mutex;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR2};
use signal_hook::iterator::{Handle, Signals as Delivered};

/// The type of a channel that carries no message and only disconnects.
#[derive(Debug)]
pub enum Never {}

/// What the process was told to do, as channels to wait on.
#[derive(Debug)]
pub struct Signals {
    /// Disconnects when no new work may begin.
    pub drain: Receiver<Never>,
    /// Disconnects when every wait must end.
    pub abort: Receiver<Never>,
    /// One message when the configuration is to be read again; requests that come faster are merged.
    pub hangup: Receiver<()>,
    /// One message when the log file is to be opened again; requests that come faster are merged.
    pub reopen: Receiver<()>,
    stop: Stop,
    thread: Option<(Handle, JoinHandle<()>)>,
}

/// Starts the drain and the abort; all clones act on the same [`Signals`].
#[derive(Debug, Clone)]
pub struct Stop(Arc<Mutex<Open>>);

/// The sending ends; a channel is disconnected by dropping its one.
#[derive(Debug)]
struct Open {
    drain: Option<Sender<Never>>,
    abort: Option<Sender<Never>>,
}

impl Signals {
    /// Takes over the process's signals, which a thread of its own then turns into messages.
    ///
    /// Signals of one kind that arrive faster than that thread wakes up are one signal, as everywhere on Unix.
    ///
    /// # Errors
    ///
    /// The system's error if a handler or the thread can't be set up.
    pub fn install() -> io::Result<Signals> {
        let mut delivered = Delivered::new([SIGTERM, SIGINT, SIGHUP, SIGUSR2])?;
        let handle = delivered.handle();
        let (mut signals, hangup, reopen) = Signals::unattended();
        let stop = signals.stop.clone();
        let thread = thread::Builder::new().name("signals".to_owned()).spawn(move || {
            for signal in &mut delivered {
                match signal {
                    SIGTERM | SIGINT => stop.next(),
                    // A full channel holds the same request already.
                    SIGHUP => drop(hangup.try_send(())),
                    SIGUSR2 => drop(reopen.try_send(())),
                    _ => {}
                }
            }
        })?;
        signals.thread = Some((handle, thread));
        Ok(signals)
    }

    /// Listens to no signal: only [`Signals::stop`] starts a drain or an abort.
    pub fn manual() -> Signals {
        Signals::unattended().0
    }

    /// A handle that starts the drain and the abort from anywhere.
    pub fn stop(&self) -> Stop {
        self.stop.clone()
    }

    fn unattended() -> (Signals, Sender<()>, Sender<()>) {
        let (drain_open, drain) = bounded(0);
        let (abort_open, abort) = bounded(0);
        let (hangup_tx, hangup) = bounded(1);
        let (reopen_tx, reopen) = bounded(1);
        let open = Open { drain: Some(drain_open), abort: Some(abort_open) };
        let stop = Stop(Arc::new(Mutex::new(open)));
        (Signals { drain, abort, hangup, reopen, stop, thread: None }, hangup_tx, reopen_tx)
    }
}

impl Drop for Signals {
    fn drop(&mut self) {
        if let Some((handle, thread)) = self.thread.take() {
            handle.close();
            // A panic there has ended the process already.
            drop(thread.join());
        }
    }
}

impl Stop {
    /// No new work from now on.
    pub fn drain(&self) {
        self.0.lock().drain = None;
    }

    /// Every wait ends now; includes the drain.
    pub fn abort(&self) {
        *self.0.lock() = Open { drain: None, abort: None };
    }

    /// Drains the first time, aborts the second.
    fn next(&self) {
        let mut open = self.0.lock();
        if open.drain.take().is_none() {
            open.abort = None;
        }
    }
}

/// Whether `channel` has been disconnected.
pub fn is_over(channel: &Receiver<Never>) -> bool {
    matches!(channel.try_recv(), Err(crossbeam_channel::TryRecvError::Disconnected))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use signal_hook::low_level::raise;

    use super::*;

    const SOON: Duration = Duration::from_secs(10);

    #[test]
    fn first_request_drains_and_second_aborts() {
        let signals = Signals::manual();
        assert!(!is_over(&signals.drain) && !is_over(&signals.abort));
        signals.stop().next();
        assert!(is_over(&signals.drain) && !is_over(&signals.abort));
        signals.stop().next();
        assert!(is_over(&signals.abort));
        signals.stop().next();
    }

    #[test]
    fn abort_includes_the_drain() {
        let signals = Signals::manual();
        signals.stop().abort();
        assert!(is_over(&signals.drain) && is_over(&signals.abort));
    }

    #[test]
    fn drain_alone_never_aborts() {
        let signals = Signals::manual();
        signals.stop().drain();
        signals.stop().drain();
        assert!(is_over(&signals.drain) && !is_over(&signals.abort));
    }

    // One test for all signals: they belong to the whole process.
    #[test]
    fn real_signals_become_messages() {
        let signals = Signals::install().unwrap();
        raise(SIGHUP).unwrap();
        signals.hangup.recv_timeout(SOON).unwrap();
        raise(SIGUSR2).unwrap();
        signals.reopen.recv_timeout(SOON).unwrap();
        assert!(!is_over(&signals.drain));
        raise(SIGTERM).unwrap();
        assert!(signals.drain.recv_timeout(SOON).unwrap_err().is_disconnected());
        assert!(!is_over(&signals.abort));
        raise(SIGINT).unwrap();
        assert!(signals.abort.recv_timeout(SOON).unwrap_err().is_disconnected());
    }
}
