//! The rate limit: how many nodes may be taken in a second, to protect whoever signs for them.

use std::time::{Duration, Instant};

/// Nodes that may be taken together after a pause, as the share of a second they stand for.
const BURST: Duration = Duration::from_millis(100);

/// Spaces nodes evenly; at a high rate a few may come together, since no thread wakes up so exactly.
#[derive(Debug)]
pub struct RateLimit {
    spacing: Duration,
    /// When the next node would be taken if all were evenly spaced.
    next: Option<Instant>,
}

impl RateLimit {
    /// At most `per_second` nodes a second; nothing and 0 are no limit.
    pub fn new(per_second: Option<u32>) -> RateLimit {
        RateLimit { spacing: spacing(per_second), next: None }
    }

    /// Changes the limit; what was taken before still counts, by the new one.
    pub fn change(&mut self, per_second: Option<u32>, now: Instant) {
        let spacing = spacing(per_second);
        self.next = self.next.map(|next| next.min(now + spacing));
        self.spacing = spacing;
    }

    /// Until when the next node has to wait, if it has to.
    pub fn wait(&self, now: Instant) -> Option<Instant> {
        let earliest = self.next?.checked_sub(BURST.saturating_sub(self.spacing))?;
        (earliest > now).then_some(earliest)
    }

    /// A node is taken.
    pub fn spend(&mut self, now: Instant) {
        if !self.spacing.is_zero() {
            self.next = Some(self.next.map_or(now, |next| next.max(now)) + self.spacing);
        }
    }
}

fn spacing(per_second: Option<u32>) -> Duration {
    match per_second {
        None | Some(0) => Duration::ZERO,
        Some(per_second) => Duration::from_secs(1) / per_second,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_are_spaced_evenly_and_slow_rates_know_no_burst() {
        check(0, 1000, 1000);
        check(1, 1000, 10);
        check(2, 1000, 20);
        check(100, 5000, 1010);
        check(10_000, 200_000, 101_000);
    }

    /// Offers far more than allowed for ten seconds and counts what passes.
    #[track_caller]
    fn check(per_second: u32, offered: u32, most: u32) {
        let start = Instant::now();
        let mut limit = RateLimit::new(Some(per_second));
        let mut passed = 0;
        for n in 0..offered {
            let now = start + Duration::from_secs(10) * n / offered;
            if limit.wait(now).is_none() {
                limit.spend(now);
                passed += 1;
            }
        }
        assert!(passed <= most, "{passed} of {most} at {per_second}/s");
        assert!(passed >= most - most / 50, "only {passed} of {most} at {per_second}/s");
    }

    #[test]
    fn the_wait_says_when_the_next_one_may_come() {
        let start = Instant::now();
        let mut limit = RateLimit::new(Some(1));
        assert_eq!(limit.wait(start), None);
        limit.spend(start);
        assert_eq!(limit.wait(start), Some(start + Duration::from_secs(1)));
        assert_eq!(limit.wait(start + Duration::from_secs(1)), None);
    }

    #[test]
    fn a_changed_limit_holds_at_once() {
        let start = Instant::now();
        let mut limit = RateLimit::new(Some(1));
        limit.spend(start);
        limit.change(Some(4), start);
        assert_eq!(limit.wait(start), Some(start + Duration::from_millis(250)));
        limit.change(None, start);
        assert_eq!(limit.wait(start), None);
        limit.change(Some(1), start);
        limit.spend(start);
        assert_eq!(limit.wait(start), Some(start + Duration::from_secs(1)));
    }
}
