//! Something said at most once in a while, with the number of times it was not said.

use std::time::{Duration, Instant};

/// Bounds how often a thing is logged: what a node can cause must not fill a disk.
#[derive(Debug)]
pub struct Seldom {
    every: Duration,
    next: Option<Instant>,
    more: u64,
}

impl Seldom {
    /// At most once in `every`.
    pub fn every(every: Duration) -> Seldom {
        Seldom { every, next: None, more: 0 }
    }

    /// Whether it may be said now; if so, how many times it was not since the last.
    pub fn now(&mut self, now: Instant) -> Option<u64> {
        if self.next.is_some_and(|next| now < next) {
            self.more += 1;
            return None;
        }
        self.next = Some(now + self.every);
        Some(std::mem::take(&mut self.more))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn says_it_once_in_a_while_and_how_often_it_kept_silent() {
        let start = Instant::now();
        let second = Duration::from_secs(1);
        let mut seldom = Seldom::every(second);
        assert_eq!(seldom.now(start), Some(0));
        assert_eq!(seldom.now(start), None);
        assert_eq!(seldom.now(start + second / 2), None);
        assert_eq!(seldom.now(start + second), Some(2));
        assert_eq!(seldom.now(start + 3 * second), Some(0));
    }
}
