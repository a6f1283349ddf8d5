//! Signals become drain, abort, reload and reopen.
//!
//! SIGTERM or SIGINT starts the drain: no new work, what runs may finish. A second one aborts: every wait ends. One that
//! comes when the abort has had its time ends the process where it stands: there are waits that nothing ends, such as that
//! for a log nobody reads. SIGHUP
//! asks for the configuration to be read again, SIGUSR2 for the log file to be opened again. Drain and abort are channels
//! that carry no message and only disconnect, so any number of threads can wait for them. How long a drain may take before
//! it turns into an abort is decided by `daemon`, which knows the setting and when the last node has ended.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, bounded};
use parking_lot::Mutex;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR2};
use signal_hook::iterator::{Handle, Signals as Delivered};
use signal_hook::low_level::exit;

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
    /// The first signal that wanted an end, or 0.
    ended_by: Arc<AtomicI32>,
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
    aborted_at: Option<Instant>,
}

/// How long an abort may take before the next signal ends the process; it takes milliseconds.
const ABORT_MAX: Duration = Duration::from_secs(2);

/// The exit code then.
const ENDED_BY_FORCE: i32 = 1;

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
        let (stop, ended_by) = (signals.stop.clone(), signals.ended_by.clone());
        let thread = thread::Builder::new().name("signals".to_owned()).spawn(move || {
            for signal in &mut delivered {
                match signal {
                    SIGTERM | SIGINT => {
                        // That there was one before is all that can be wrong.
                        let _ = ended_by.compare_exchange(
                            0,
                            signal,
                            Ordering::Relaxed,
                            Ordering::Relaxed,
                        );
                        match stop.next(Instant::now()) {
                            Next::Wait => {}
                            // Nothing may be waited for, so no destructors and no exit handlers.
                            Next::End => exit(ENDED_BY_FORCE),
                        }
                    }
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

    /// Whether it was an interrupt, as from a terminal, that wanted an end first.
    pub fn is_interrupted(&self) -> bool {
        self.ended_by.load(Ordering::Relaxed) == SIGINT
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
        let open = Open { drain: Some(drain_open), abort: Some(abort_open), aborted_at: None };
        let stop = Stop(Arc::new(Mutex::new(open)));
        (
            Signals { drain, abort, hangup, reopen, stop, ended_by: Arc::default(), thread: None },
            hangup_tx,
            reopen_tx,
        )
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
        self.0.lock().abort(Instant::now());
    }

    /// Drains the first time, aborts the second.
    fn next(&self, now: Instant) -> Next {
        let mut open = self.0.lock();
        if open.drain.take().is_some() {
            return Next::Wait;
        }
        match open.aborted_at {
            Some(at) if now.saturating_duration_since(at) >= ABORT_MAX => Next::End,
            _ => {
                open.abort(now);
                Next::Wait
            }
        }
    }
}

impl Open {
    fn abort(&mut self, now: Instant) {
        self.drain = None;
        self.abort = None;
        self.aborted_at.get_or_insert(now);
    }
}

/// What a signal leaves to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Next {
    /// The threads end by themselves.
    Wait,
    /// They have not.
    End,
}

/// Whether `channel` has been disconnected.
pub fn is_over(channel: &Receiver<Never>) -> bool {
    matches!(channel.try_recv(), Err(crossbeam_channel::TryRecvError::Disconnected))
}

#[cfg(test)]
mod tests {
    use signal_hook::low_level::raise;

    use super::*;

    const SOON: Duration = Duration::from_secs(10);

    #[test]
    fn first_request_drains_and_second_aborts() {
        let signals = Signals::manual();
        assert!(!is_over(&signals.drain) && !is_over(&signals.abort));
        let now = Instant::now();
        assert_eq!(signals.stop().next(now), Next::Wait);
        assert!(is_over(&signals.drain) && !is_over(&signals.abort));
        assert_eq!(signals.stop().next(now), Next::Wait);
        assert!(is_over(&signals.abort));
    }

    #[test]
    fn an_abort_that_does_not_end_is_ended_by_the_next_request() {
        let signals = Signals::manual();
        signals.stop().abort();
        let aborted = Instant::now();
        assert_eq!(signals.stop().next(aborted), Next::Wait);
        assert_eq!(signals.stop().next(aborted + ABORT_MAX / 2), Next::Wait);
        assert_eq!(signals.stop().next(aborted + ABORT_MAX), Next::End);
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
        assert!(!is_over(&signals.abort) && !signals.is_interrupted());
        raise(SIGINT).unwrap();
        assert!(signals.abort.recv_timeout(SOON).unwrap_err().is_disconnected());
    }
}
