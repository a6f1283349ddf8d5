//! Whether our clock is off, by what nodes say of the time when they announce themselves.
//!
//! A node ignores a request whose time is too far from its own clock, and says nothing. So while our clock is off every node
//! is silent, and only the events that nodes publish by themselves still tell. Anybody can forge those: what is found here is
//! for people to look at, and nothing is decided by it.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::config::duration;
use crate::protocol::Identity;
use crate::seldom::Seldom;

/// So many nodes must agree, so that one whose own clock is off proves nothing.
const WITNESSES: usize = 3;
/// What a node said is worth nothing after this.
const HEARD_FOR: Duration = Duration::from_secs(3_600);
/// How often it is logged.
const LOG_EVERY: Duration = Duration::from_secs(600);

/// Our clock against the nodes', for all threads.
#[derive(Debug)]
pub struct Skew {
    core: Mutex<(Core, Seldom)>,
}

impl Skew {
    /// Nobody was heard yet; nodes take requests that are less than `tolerance_secs` off.
    pub fn new(tolerance_secs: u32) -> Arc<Skew> {
        let core = Core { tolerance_secs: i64::from(tolerance_secs), heard: VecDeque::new() };
        Arc::new(Skew { core: Mutex::new((core, Seldom::every(LOG_EVERY))) })
    }

    /// A node says that it is `theirs` when it is `ours` here, both in seconds since 1970.
    pub fn note(&self, node: &Identity, theirs: i64, ours: i64) {
        let now = Instant::now();
        let (off, suppressed) = {
            let (core, seldom) = &mut *self.core.lock();
            core.note(node, ours.saturating_sub(theirs), now);
            let Some(off) = core.off(now) else {
                // The next time is another story.
                *seldom = Seldom::every(LOG_EVERY);
                return;
            };
            (off, seldom.now(now))
        };
        if let Some(suppressed) = suppressed {
            log::warn!(component = "events", suppressed; "{off}");
        }
    }

    /// How far our clock is off, if it is.
    pub fn off(&self) -> Option<Off> {
        self.core.lock().0.off(Instant::now())
    }
}

/// Our clock is off.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Off {
    /// Ahead if positive.
    secs: i64,
    tolerance_secs: i64,
}

impl fmt::Display for Off {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let by = duration::words(Duration::from_secs(self.secs.unsigned_abs()));
        let way = if self.secs > 0 { "ahead of" } else { "behind" };
        let Off { tolerance_secs, .. } = self;
        write!(
            f,
            "our clock is {by} {way} that of the last {WITNESSES} nodes that announced themselves: nodes ignore requests that are {tolerance_secs} s off"
        )
    }
}

#[derive(Debug)]
struct Core {
    tolerance_secs: i64,
    /// How far we are ahead of the last [`WITNESSES`] nodes, each by its last word.
    heard: VecDeque<(Identity, i64, Instant)>,
}

impl Core {
    fn note(&mut self, node: &Identity, ahead_secs: i64, now: Instant) {
        self.heard.retain(|(known, ..)| known != node);
        if self.heard.len() >= WITNESSES {
            self.heard.pop_front();
        }
        self.heard.push_back((node.clone(), ahead_secs, now));
    }

    /// By the nearest of them, if all say the same.
    fn off(&self, now: Instant) -> Option<Off> {
        let is_fresh = |at: &Instant| now.saturating_duration_since(*at) < HEARD_FOR;
        let fresh = self.heard.iter().filter(|(.., at)| is_fresh(at)).map(|(_, ahead, _)| *ahead);
        let ahead: Vec<i64> = fresh.collect();
        let (least, most) = (*ahead.iter().min()?, *ahead.iter().max()?);
        let tolerance_secs = self.tolerance_secs;
        let secs = if least >= tolerance_secs {
            least
        } else if most <= -tolerance_secs {
            most
        } else {
            return None;
        };
        if ahead.len() < WITNESSES {
            return None;
        }
        Some(Off { secs, tolerance_secs })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn our_clock_is_off_if_three_nodes_say_so_in_one_voice() {
        check(&[], None);
        check(&[("n1", 3_600), ("n2", 3_600)], None); // Too few.
        check(&[("n1", 3_600), ("n1", 3_600), ("n1", 3_600)], None); // One is one.
        check(&[("n1", 3_600), ("n2", 3_601), ("n3", 3_605)], Some("is 1h ahead of"));
        check(&[("n1", -7_200), ("n2", -90), ("n3", -61)], Some("is 1m1s behind"));
        check(&[("n1", 3_600), ("n2", 59), ("n3", 3_600)], None); // One of them hears us.
        check(&[("n1", 3_600), ("n2", -3_600), ("n3", 3_600)], None); // Theirs are off.
        check(&[("n1", 0), ("n2", 60), ("n3", 60), ("n4", 60)], Some("is 1m ahead of"));
        check(&[("n1", 60), ("n2", 60), ("n3", 60), ("n4", 0)], None); // It was put right.
        check(&[("n1", i64::MIN), ("n2", i64::MIN), ("n3", i64::MIN)], Some("behind"));
    }

    #[track_caller]
    fn check(heard: &[(&str, i64)], expected: Option<&str>) {
        let (mut core, now) = (Core { tolerance_secs: 60, heard: VecDeque::new() }, Instant::now());
        for (node, ahead_secs) in heard {
            core.note(&Identity::parse(node).unwrap(), *ahead_secs, now);
        }
        assert_eq!(core.off(now + HEARD_FOR), None, "that is long ago");
        let off = core.off(now).map(|off| off.to_string());
        match expected {
            None => assert_eq!(off, None),
            Some(part) => assert!(off.as_ref().is_some_and(|off| off.contains(part)), "{off:?}"),
        }
    }
}
