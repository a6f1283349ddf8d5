//! Whether threads make progress: one that waits does, one that has been at one piece of work for too long does not.
//!
//! A thread says when it begins to wait and when it begins to work, each a store to an atomic; nothing else is asked of it,
//! so that it need not wake up to prove that it is alive. Threads that nobody looks after, such as those of a test, say it
//! to nobody.

use std::cell::RefCell;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// How long a piece of work may take that waits for nobody: some seconds on a machine that swaps.
pub const PIECE_MAX: Duration = Duration::from_secs(60);

/// All threads that are looked after.
#[derive(Debug)]
pub struct Pulses {
    started: Instant,
    threads: Mutex<Vec<Arc<Beat>>>,
}

#[derive(Debug)]
struct Beat {
    name: &'static str,
    limit: Duration,
    started: Instant,
    /// Milliseconds from the start when it began to work, and one; zero while it waits.
    works_since: AtomicU64,
}

/// Shows the pulse of a thread for as long as it lives.
struct Pulse(Arc<Beat>);

thread_local! {
    static OWN: RefCell<Option<Pulse>> = const { RefCell::new(None) };
}

/// A thread that makes no progress.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stuck {
    /// Its name.
    pub thread: &'static str,
    /// How long it has been at one piece of work.
    pub time: Duration,
}

impl fmt::Display for Stuck {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "thread {} makes no progress for {} s", self.thread, self.time.as_secs())
    }
}

impl Pulses {
    /// Of no thread yet.
    pub fn new() -> Pulses {
        Pulses { started: Instant::now(), threads: Mutex::default() }
    }

    /// Looks after the thread that calls this, until it ends; its pieces of work may take up to `limit`.
    pub fn attend(&self, name: &'static str, limit: Duration) {
        let pulse = self.pulse(name, limit);
        OWN.set(Some(pulse));
    }

    fn pulse(&self, name: &'static str, limit: Duration) -> Pulse {
        let works_since = AtomicU64::new(0);
        let beat = Arc::new(Beat { name, limit, started: self.started, works_since });
        let mut threads = self.threads.lock();
        // Those of threads that have ended are nobody's.
        threads.retain(|beat| Arc::strong_count(beat) > 1);
        threads.push(beat.clone());
        Pulse(beat)
    }

    /// The threads that make no progress at `now`.
    pub fn stuck(&self, now: Instant) -> Vec<Stuck> {
        let threads = self.threads.lock();
        threads.iter().filter_map(|beat| beat.stuck(now)).collect()
    }
}

impl Default for Pulses {
    fn default() -> Pulses {
        Pulses::new()
    }
}

/// This thread begins a piece of work.
pub fn works() {
    tell(|beat| beat.works_at(Instant::now()));
}

/// This thread waits for something to do.
pub fn waits() {
    tell(Beat::waits);
}

fn tell(what: impl FnOnce(&Beat)) {
    OWN.with_borrow(|own| {
        if let Some(Pulse(beat)) = own {
            what(beat);
        }
    });
}

impl Beat {
    fn works_at(&self, now: Instant) {
        self.works_since.store(self.millis(now).saturating_add(1), Ordering::Relaxed);
    }

    fn waits(&self) {
        self.works_since.store(0, Ordering::Relaxed);
    }

    fn stuck(&self, now: Instant) -> Option<Stuck> {
        let began = self.works_since.load(Ordering::Relaxed).checked_sub(1)?;
        let time = Duration::from_millis(self.millis(now).saturating_sub(began));
        (time > self.limit).then_some(Stuck { thread: self.name, time })
    }

    fn millis(&self, now: Instant) -> u64 {
        let time = now.saturating_duration_since(self.started);
        u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
    }
}

impl Drop for Pulse {
    fn drop(&mut self) {
        // A thread that has ended is not stuck.
        self.0.waits();
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use crossbeam_channel::bounded;

    use super::*;

    #[test]
    fn a_thread_is_stuck_that_works_on_one_piece_for_too_long() {
        let pulses = Pulses::new();
        let at = |secs| pulses.started + Duration::from_secs(secs);
        let quick = pulses.pulse("quick", Duration::from_secs(60));
        let slow = pulses.pulse("slow", Duration::from_secs(300));
        assert_eq!(pulses.stuck(at(1_000)), [], "they wait");
        quick.0.works_at(at(1_000));
        slow.0.works_at(at(1_000));
        assert_eq!(pulses.stuck(at(1_060)), []);
        let stuck = Stuck { thread: "quick", time: Duration::from_secs(61) };
        assert_eq!(stuck.to_string(), "thread quick makes no progress for 61 s");
        assert_eq!(pulses.stuck(at(1_061)), [stuck]);
        quick.0.works_at(at(1_061));
        assert_eq!(pulses.stuck(at(1_062)), [], "another piece");
        assert_eq!(pulses.stuck(at(1_302)).len(), 2);
        quick.0.waits();
        drop(slow);
        assert_eq!(pulses.stuck(at(9_999)), []);
    }

    #[test]
    fn each_thread_tells_for_itself_until_it_ends() {
        works();
        waits();
        let pulses = Arc::new(Pulses::new());
        let (works_now, is_working) = bounded(0);
        let (go_on, may_go_on) = bounded::<()>(0);
        let thread = {
            let pulses = pulses.clone();
            thread::spawn(move || {
                pulses.attend("one", Duration::ZERO);
                works();
                works_now.send(()).unwrap();
                let _ = may_go_on.recv();
            })
        };
        is_working.recv().unwrap();
        let later = Instant::now() + Duration::from_secs(1);
        assert_eq!(pulses.stuck(later).first().map(|stuck| stuck.thread), Some("one"));
        drop(go_on);
        thread.join().unwrap();
        assert_eq!(pulses.stuck(later), []);
        drop(pulses.pulse("another", Duration::ZERO));
        pulses.pulse("a third", Duration::ZERO);
        assert_eq!(pulses.threads.lock().len(), 1, "what has ended is forgotten");
    }
}
