//! What became of nodes lately: how many a minute, the last outcomes one by one, and what fails at every node.
//!
//! The finisher notes each outcome here, which costs one short lock; everything else is computed when somebody asks. All of
//! it is bounded: the log and the metrics keep what is older.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::fleet::tally::Tally;
use crate::node::{Outcome, Report};
use crate::protocol::Identity;

/// Outcomes kept one by one: more than anybody reads on a page.
const OUTCOMES_MAX: usize = 100;

/// The longest time that rates are kept for, and the steps in which it passes.
const RATES_KEPT: Duration = Duration::from_secs(15 * 60);
const BUCKET: Duration = Duration::from_secs(10);
const BUCKETS: usize = (RATES_KEPT.as_secs() / BUCKET.as_secs()) as usize + 1;

/// Shared by the finisher, which writes, and whoever shows it.
#[derive(Debug)]
pub struct History(Mutex<Core>);

impl History {
    /// Nothing has happened yet.
    pub fn new(now: Instant) -> History {
        History(Mutex::new(Core::new(now)))
    }

    /// Notes an attempt that has ended at `now`.
    pub fn note(&self, ended: Ended, tally: &Tally, report: &Report, now: Instant) {
        self.0.lock().note(ended, tally, report, now);
    }

    /// The attempts that ended last, the latest first.
    pub fn outcomes(&self) -> Vec<Ended> {
        self.0.lock().outcomes.iter().rev().cloned().collect()
    }

    /// How the helper has done.
    pub fn helper(&self) -> Health {
        self.0.lock().helper.clone()
    }

    /// How nodes have taken our provisioning token.
    pub fn token(&self) -> Health {
        self.0.lock().token.clone()
    }

    /// How what every node needs of us has done, such as our key files.
    pub fn own(&self) -> Health {
        self.0.lock().own.clone()
    }

    /// What was done in the last `window`.
    pub fn rate(&self, window: Duration, now: Instant) -> Rate {
        self.0.lock().rates.last(window, now)
    }
}

/// One attempt that has ended.
#[derive(Debug, Clone)]
pub struct Ended {
    /// When.
    pub at: Instant,
    /// The node.
    pub node: Identity,
    /// What became of it, by the word of the metric `outcomes`.
    pub outcome: &'static str,
    /// Why, for people; empty on success.
    pub reason: String,
    /// Which attempt it was, from 1.
    pub attempt: u32,
    /// How long a worker had it.
    pub took: Duration,
}

/// How something has done that every node needs.
#[derive(Debug, Clone, Default)]
pub struct Health {
    /// Failures since it was last good.
    pub failures_in_row: u32,
    /// The last failure and why.
    pub last_failure: Option<(Instant, String)>,
}

impl Health {
    fn failed(&mut self, reason: &str, now: Instant) {
        self.failures_in_row = self.failures_in_row.saturating_add(1);
        self.last_failure = Some((now, reason.to_owned()));
    }

    fn is_good(&mut self) {
        self.failures_in_row = 0;
    }
}

/// What was done in a while.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Rate {
    /// Nodes provisioned in a minute.
    pub provisioned_per_minute: f64,
    /// Attempts that ended with an error in a minute.
    pub errors_per_minute: f64,
}

#[derive(Debug)]
struct Core {
    outcomes: VecDeque<Ended>,
    helper: Health,
    token: Health,
    own: Health,
    rates: Rates,
}

impl Core {
    fn new(now: Instant) -> Core {
        Core {
            outcomes: VecDeque::with_capacity(OUTCOMES_MAX),
            helper: Health::default(),
            token: Health::default(),
            own: Health::default(),
            rates: Rates::new(now),
        }
    }

    fn note(&mut self, ended: Ended, tally: &Tally, report: &Report, now: Instant) {
        self.rates.note(tally, now);
        let Report { outcome, reason, steps, .. } = report;
        let asked_helper = steps.iter().any(|(step, _)| *step == "helper");
        match outcome {
            Outcome::HelperFailed => self.helper.failed(reason, now),
            _ if asked_helper => self.helper.is_good(),
            _ => {}
        }
        match outcome {
            Outcome::WrongToken => self.token.failed(reason, now),
            // Whoever goes on after `jwt` took the token there; without that step `configure` and the like are the first to ask for it.
            _ if tally.provisioned || steps.windows(2).any(|pair| pair[0].0 == "jwt") => {
                self.token.is_good();
            }
            _ => {}
        }
        match outcome {
            Outcome::Misconfigured => self.own.failed(reason, now),
            // Our files are read before the helper is asked.
            _ if asked_helper => self.own.is_good(),
            _ => {}
        }
        if self.outcomes.len() == OUTCOMES_MAX {
            self.outcomes.pop_front();
        }
        self.outcomes.push_back(ended);
    }
}

/// Counts by time, in a ring of buckets.
#[derive(Debug)]
struct Rates {
    start: Instant,
    /// The number of the bucket that is being filled, counted from the start.
    current: u64,
    ring: [Bucket; BUCKETS],
}

#[derive(Debug, Clone, Copy, Default)]
struct Bucket {
    provisioned: u32,
    errors: u32,
}

impl Rates {
    fn new(start: Instant) -> Rates {
        Rates { start, current: 0, ring: [Bucket::default(); BUCKETS] }
    }

    fn note(&mut self, tally: &Tally, now: Instant) {
        self.advance(now);
        let bucket = &mut self.ring[(self.current % BUCKETS as u64) as usize];
        bucket.provisioned += u32::from(tally.provisioned);
        bucket.errors += u32::from(tally.provision_errors);
    }

    /// The rates of the last `window`, or of the time since the start while that is shorter.
    fn last(&mut self, window: Duration, now: Instant) -> Rate {
        self.advance(now);
        let whole = (window.as_secs() / BUCKET.as_secs()).min(BUCKETS as u64 - 1);
        let (mut provisioned, mut errors) = (0_u64, 0_u64);
        for back in 0..=whole.min(self.current) {
            let bucket = self.ring[((self.current - back) % BUCKETS as u64) as usize];
            provisioned += u64::from(bucket.provisioned);
            errors += u64::from(bucket.errors);
        }
        let age = now.saturating_duration_since(self.start);
        let filling = age.as_secs_f64() % BUCKET.as_secs_f64();
        let seconds = (filling + (whole * BUCKET.as_secs()) as f64).min(age.as_secs_f64());
        // A minute at least: one node in the first second is not sixty a minute.
        let minutes = seconds.max(60.0) / 60.0;
        Rate {
            provisioned_per_minute: provisioned as f64 / minutes,
            errors_per_minute: errors as f64 / minutes,
        }
    }

    /// Empties the buckets that have come round since the last time.
    fn advance(&mut self, now: Instant) {
        let age = now.saturating_duration_since(self.start);
        let number = age.as_secs() / BUCKET.as_secs();
        if number <= self.current {
            return;
        }
        let passed = (number - self.current).min(BUCKETS as u64);
        for back in 0..passed {
            self.ring[((number - back) % BUCKETS as u64) as usize] = Bucket::default();
        }
        self.current = number;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINUTE: Duration = Duration::from_secs(60);
    const GOOD: Tally =
        Tally { provisioned: true, provision_errors: false, outcome: Some("provisioned") };
    const BAD: Tally =
        Tally { provisioned: false, provision_errors: true, outcome: Some("failed") };

    #[test]
    fn rates_are_those_of_their_window() {
        let start = Instant::now();
        let mut rates = Rates::new(start);
        let at = |secs: u64| start + Duration::from_secs(secs);
        let good = |rates: &mut Rates, window: u32, secs| {
            rates.last(window * MINUTE, at(secs)).provisioned_per_minute
        };
        assert_eq!(rates.last(MINUTE, start), Rate::default());
        for _ in 0..30 {
            rates.note(&GOOD, at(1));
        }
        rates.note(&BAD, at(2));
        assert_eq!(good(&mut rates, 1, 2), 30.0, "not 900 a minute after two seconds");
        assert_eq!(rates.last(MINUTE, at(2)).errors_per_minute, 1.0);
        assert_eq!(good(&mut rates, 1, 60), 30.0);
        assert_eq!(good(&mut rates, 5, 120), 15.0);
        assert_eq!(good(&mut rates, 1, 120), 0.0);
        assert_eq!(good(&mut rates, 15, 600), 3.0);
        assert_eq!(good(&mut rates, 5, 600), 0.0);
        assert_eq!(good(&mut rates, 15, 1000), 0.0);
    }

    #[test]
    fn a_ring_that_was_left_alone_for_days_is_empty() {
        let start = Instant::now();
        let mut rates = Rates::new(start);
        rates.note(&GOOD, start);
        let days = start + Duration::from_secs(5 * 24 * 3_600 + 3);
        assert_eq!(rates.last(RATES_KEPT, days), Rate::default());
        rates.note(&GOOD, days);
        assert!(rates.last(MINUTE, days).provisioned_per_minute > 0.0);
    }

    #[test]
    fn the_last_outcomes_are_kept_and_no_more() {
        let start = Instant::now();
        let history = History::new(start);
        for attempt in 1..=250 {
            note(&history, attempt, Outcome::Failed, &[]);
        }
        let outcomes = history.outcomes();
        let attempts: Vec<u32> = outcomes.iter().map(|ended| ended.attempt).collect();
        assert_eq!(attempts, (151..=250).rev().collect::<Vec<_>>());
    }

    #[test]
    fn failures_of_the_helper_count_until_it_answers() {
        let history = History::new(Instant::now());
        note(&history, 1, Outcome::HelperFailed, &["jwt", "helper"]);
        note(&history, 2, Outcome::HelperFailed, &["jwt", "helper"]);
        note(&history, 3, Outcome::Refused, &["jwt"]);
        let health = history.helper();
        assert_eq!(health.failures_in_row, 2, "a node that never came that far says nothing");
        assert_eq!(health.last_failure.unwrap().1, "because");
        note(&history, 4, Outcome::Deferred, &["jwt", "helper"]);
        let health = history.helper();
        assert_eq!(health.failures_in_row, 0);
        assert!(health.last_failure.is_some(), "it is still worth knowing");
    }

    #[test]
    fn refusals_of_our_token_count_until_a_node_takes_it() {
        let history = History::new(Instant::now());
        let in_row = || history.token().failures_in_row;
        note(&history, 1, Outcome::WrongToken, &["jwt"]);
        note(&history, 2, Outcome::WrongToken, &["inventory", "helper", "configure"]);
        assert_eq!(in_row(), 2);
        note(&history, 3, Outcome::Failed, &["jwt"]);
        note(&history, 4, Outcome::Unreachable, &["inventory"]);
        note(&history, 5, Outcome::Failed, &["inventory", "helper", "configure"]);
        assert_eq!(in_row(), 2, "these say nothing about it");
        note(&history, 6, Outcome::Failed, &["jwt", "inventory"]);
        assert_eq!(in_row(), 0);
        note(&history, 7, Outcome::WrongToken, &["inventory", "helper", "configure"]);
        let provisioned =
            Outcome::Provisioned { configured_at: Instant::now(), restarted_at: None };
        note(&history, 8, provisioned, &["inventory", "helper", "configure", "restart"]);
        assert_eq!(in_row(), 0);
    }

    #[test]
    fn mistakes_of_ours_count_until_a_node_comes_to_the_helper() {
        let history = History::new(Instant::now());
        note(&history, 1, Outcome::Misconfigured, &["jwt"]);
        note(&history, 2, Outcome::Misconfigured, &["inventory", "helper"]);
        note(&history, 3, Outcome::Refused, &["jwt"]);
        let own = history.own();
        assert_eq!((own.failures_in_row, &*own.last_failure.unwrap().1), (2, "because"));
        note(&history, 4, Outcome::HelperFailed, &["jwt", "inventory", "helper"]);
        assert_eq!(history.own().failures_in_row, 0);
    }

    fn note(history: &History, attempt: u32, outcome: Outcome, steps: &[&'static str]) {
        let now = Instant::now();
        let steps = steps.iter().map(|step| (*step, Duration::ZERO)).collect();
        let tally = Tally::of(&outcome);
        let report = Report { steps, ..Report::new(outcome, "because") };
        let ended = Ended {
            at: now,
            node: Identity::parse("n1.example.net").unwrap(),
            outcome: tally.outcome.unwrap(),
            reason: report.reason.clone(),
            attempt,
            took: Duration::ZERO,
        };
        history.note(ended, &tally, &report, now);
    }
}
