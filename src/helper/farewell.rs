//! The end of helper processes that are not needed any more: their input is closed and they may end by themselves; those that
//! don't are killed with all they started. Nobody waits for that but threads of its own, and the end of all.

use std::mem;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, bounded, select_biased};
use parking_lot::Mutex;

use super::process::{Cause, Stderr, Strays};
use super::session::Session;
use crate::metrics::Metrics;
use crate::shutdown::Never;

/// How long processes may take to end once their input is closed.
pub(super) const LEAVE_MAX: Duration = Duration::from_secs(5);

/// Threads that wait for processes at once. Each is there for [`LEAVE_MAX`]; more of them come only of processes that are
/// replaced again and again, and those are killed.
pub(super) const THREADS_MAX: usize = 16;

/// Sees processes off.
pub(super) struct Farewell {
    /// Those that were killed and have not ended.
    pub strays: Strays,
    metrics: Arc<Metrics>,
    waiting: Mutex<Waiting>,
    /// Disconnects when the last of them has ended.
    ended: Receiver<Never>,
    /// Disconnects when nothing is waited for any longer.
    hurry: Receiver<Never>,
}

/// The threads that wait for processes which were let go.
struct Waiting {
    threads: Vec<JoinHandle<()>>,
    /// Each thread holds one; ours is dropped when there will be no more.
    alive: Option<Sender<Never>>,
    patience: Option<Sender<Never>>,
}

impl Farewell {
    pub fn new(metrics: Arc<Metrics>) -> Arc<Farewell> {
        let (alive, ended) = bounded(0);
        let (patience, hurry) = bounded(0);
        let waiting = Waiting { threads: Vec::new(), alive: Some(alive), patience: Some(patience) };
        let waiting = Mutex::new(waiting);
        Arc::new(Farewell { strays: Strays::default(), metrics, waiting, ended, hurry })
    }

    /// Lets processes end while the caller goes on.
    pub fn let_go(self: &Arc<Farewell>, sessions: Vec<Session>) {
        if sessions.is_empty() {
            return;
        }
        let mut waiting = self.waiting.lock();
        waiting.threads.retain(|thread| !thread.is_finished());
        if waiting.threads.len() >= THREADS_MAX {
            drop(waiting);
            log::warn!(component = "helper"; "Killing helper processes: {THREADS_MAX} threads wait for others to end");
            return self.kill(sessions);
        }
        let alive = waiting.alive.clone();
        let (hand, handed) = bounded::<Vec<Session>>(1);
        let ours = Arc::clone(self);
        let wait = move || {
            if let Ok(sessions) = handed.recv() {
                ours.see_off(sessions, Instant::now() + LEAVE_MAX, &ours.hurry);
            }
            drop(alive);
        };
        let started = thread::Builder::new().name("helper-end".to_owned()).spawn(wait);
        match started {
            Ok(thread) => {
                waiting.threads.push(thread);
                drop(waiting);
                // There is room for it, and the thread receives it.
                let _ = hand.send(sessions);
            }
            Err(error) => {
                drop(waiting);
                log::warn!(component = "helper"; "Killing helper processes for want of a thread that waits for them: {error}");
                self.kill(sessions);
            }
        }
    }

    /// How many threads wait.
    #[cfg(test)]
    pub fn threads_len(&self) -> usize {
        self.waiting.lock().threads.len()
    }

    /// Waits for processes to end, all together until `deadline` or until `hurry` disconnects, and kills the others.
    pub fn see_off(&self, mut sessions: Vec<Session>, deadline: Instant, hurry: &Receiver<Never>) {
        for session in &mut sessions {
            session.close_input();
        }
        for mut session in sessions {
            let id = session.id();
            if !session.let_go(deadline, hurry) {
                log::warn!(component = "helper"; "Helper process {id} has not ended with its input and is killed");
            }
            // Kills what it started and left behind, too.
            let (_, _, stderr) = session.into_process().end(Cause::Gone, &self.strays);
            self.metrics.helper_processes.dec();
            log_idle(id, &stderr);
        }
    }

    /// Ends processes at once.
    pub fn kill(&self, sessions: impl IntoIterator<Item = Session>) {
        for session in sessions {
            session.into_process().end(Cause::Aborted, &self.strays);
            self.metrics.helper_processes.dec();
        }
    }

    /// Waits for all that were let go, until `abort` disconnects at most.
    pub fn wait(&self, abort: &Receiver<Never>) {
        let threads = {
            let mut waiting = self.waiting.lock();
            waiting.alive = None;
            mem::take(&mut waiting.threads)
        };
        select_biased! {
            recv(self.ended) -> _ => {}
            recv(abort) -> _ => {}
        }
        self.waiting.lock().patience = None;
        for thread in threads {
            // A panic there has ended the process already.
            drop(thread.join());
        }
    }
}

/// Logs what a process wrote to stderr while it was asked about no node.
pub(super) fn log_idle(id: u32, stderr: &Stderr) {
    if log::log_enabled!(log::Level::Info) {
        for line in stderr.lines() {
            log::info!(component = "helper"; "Helper process {id} on stderr: {line}");
        }
    }
}
