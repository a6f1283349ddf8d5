//! Writes each outcome into the registry, counts it, and sweeps what has expired.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use chrono::Utc;
use crossbeam_channel::{Receiver, select_biased, tick};

use crate::fleet::audit::{Entry, Trail};
use crate::fleet::history::{Ended, History};
use crate::fleet::registry::{Key, Next};
use crate::fleet::roster::Roster;
use crate::fleet::tally::Tally;
use crate::gate::Gate;
use crate::metrics::Metrics;
use crate::node::Report;
use crate::pulse;

/// How often expired entries are looked for and gauges brought up to date; no decision waits for it.
const SWEEP: Duration = Duration::from_secs(1);

/// How long an outcome may wait for the next ones, so that the thread wakes up for many at once: few things cost as much.
const TOGETHER: Duration = Duration::from_millis(5);

/// Outcomes written before the sweep is looked at.
const BATCH: usize = 256;

/// An attempt, or the probe before it, that has ended.
#[derive(Debug)]
pub struct Done {
    /// The queue entry it came from.
    pub key: Key,
    /// Which attempt it was, from 1.
    pub attempt: u32,
    /// How long a worker had it; nothing if none had.
    pub took: Duration,
    /// What became of it; apart, since the places of a queue take their memory from the start.
    pub report: Box<Report>,
}

/// The thread; ends when nobody is left who could finish a node.
pub struct Finisher {
    /// From prober and workers.
    pub done: Receiver<Done>,
    /// Where outcomes go.
    pub roster: Arc<Roster>,
    /// Tells whether an outcome is the node's fault.
    pub gate: Arc<Gate>,
    /// Counts.
    pub metrics: Arc<Metrics>,
    /// Remembers for people.
    pub history: Arc<History>,
    /// Writes down for good, if somebody wants that.
    pub audit: Arc<Trail>,
}

impl Finisher {
    /// Runs until the last sender of `done` is gone.
    pub fn run(self) {
        let sweep = tick(SWEEP);
        loop {
            pulse::waits();
            // Biased: the sweep comes seldom, and where outcomes never cease it would never have its turn.
            select_biased! {
                recv(sweep) -> _ => self.sweep(),
                recv(self.done) -> done => match done {
                    Ok(done) => {
                        pulse::works();
                        self.finish(done);
                        let more = self.done.try_iter().take(BATCH).map(|done| self.finish(done));
                        // Whoever can't keep up must not rest.
                        if more.count() < BATCH {
                            thread::sleep(TOGETHER);
                        }
                    }
                    Err(_) => return,
                },
            }
        }
    }

    fn finish(&self, done: Done) {
        let now = Instant::now();
        let just_reconnected = self.gate.just_reconnected(now);
        // Whoever stops for one of these leaves nothing behind.
        let gate_lost = self.gate.is_lost();
        let finished = self.roster.change(|registry, push| {
            registry.finish(&done.key, &done.report, now, just_reconnected, gate_lost, push)
        });
        self.count(&finished.tally);
        let node = done.key.identity.as_str();
        match finished.next {
            Next::Waiting { due } => {
                let wait = due.saturating_duration_since(now).as_secs();
                log::debug!(component = node, node; "{node} waits for {wait} s");
            }
            Next::Queued(_) | Next::Settling | Next::Absent | Next::NotCurrent => {}
        }
        self.remember(done, &finished.tally, now);
        // While there is a backlog the next sweep is soon enough.
        if self.done.is_empty() {
            self.roster.measure();
        }
    }

    /// An attempt that counts for nothing is none to show either.
    fn remember(&self, done: Done, tally: &Tally, now: Instant) {
        let Some(outcome) = tally.outcome else { return };
        let Done { key, attempt, took, report } = done;
        let (node, reason) = (key.identity, report.reason.clone());
        let ended = Ended { at: now, node: node.clone(), outcome, reason, attempt, took };
        self.history.note(ended, tally, &report, now);
        if let Some(audit) = self.audit.current() {
            let Report { reason, steps, facts, .. } = *report;
            let time = Utc::now();
            audit.note(Entry { time, node, outcome, reason, attempt, took, steps, facts });
        }
    }

    fn count(&self, tally: &Tally) {
        // Named one by one, so that a counter added there can't be forgotten here.
        let Tally { provisioned, provision_errors, outcome } = *tally;
        if provisioned {
            self.metrics.provisioned.inc();
        }
        if provision_errors {
            self.metrics.provision_errors.inc();
        }
        if let Some(outcome) = outcome {
            self.metrics.outcomes.with_label_values(&[outcome]).inc();
        }
    }

    fn sweep(&self) {
        pulse::works();
        let swept = self.roster.registry().sweep(Instant::now());
        if swept.settled + swept.unseen > 0 {
            log::debug!(component = "finisher", settled = swept.settled, unseen = swept.unseen; "Forgot nodes");
        }
        self.roster.measure();
    }
}

#[cfg(test)]
mod tests {
    use crossbeam_channel::bounded;

    use super::*;
    use crate::fleet::registry::{Limits, Sighted, Sighting};
    use crate::node::Outcome;
    use crate::protocol::Identity;

    #[test]
    fn what_has_expired_goes_also_while_outcomes_never_cease() {
        let metrics = Metrics::new("test");
        let limits = Limits::new(Duration::from_secs(60), Duration::from_secs(1800));
        let (roster, _queues) = Roster::new(limits, 10, metrics.clone());
        let roster = Arc::new(roster);
        let identity = Identity::parse("n1.example.net").unwrap();
        let shut_down = Report::new(Outcome::ShutDown, "");
        let earlier = Instant::now() - Duration::from_secs(3_600);
        let key = roster.change(|registry, push| {
            let sighted = registry.sight(&identity, Sighting::Discovery, earlier, push);
            let Sighted::Queued(key) = sighted else { panic!("{sighted:?}") };
            registry.take(&key, earlier).unwrap();
            registry.finish(&key, &shut_down, earlier, false, false, push);
            key
        });
        assert!(roster.registry().node(&identity).is_some());

        // More than the finisher takes before it looks around.
        let (outcomes, done) = bounded(16 * BATCH);
        let finisher = Finisher {
            done,
            roster: roster.clone(),
            gate: Arc::new(Gate::new()),
            metrics,
            history: Arc::new(History::new(Instant::now())),
            audit: Arc::default(),
        };
        let again = || Done {
            key: key.clone(),
            attempt: 1,
            took: Duration::ZERO,
            report: Box::new(shut_down.clone()),
        };
        while !outcomes.is_full() {
            outcomes.send(again()).unwrap();
        }
        let thread = thread::spawn(move || finisher.run());
        let deadline = Instant::now() + Duration::from_secs(20);
        while roster.registry().node(&identity).is_some() {
            assert!(Instant::now() < deadline, "nothing was swept");
            outcomes.send(again()).unwrap();
        }
        drop(outcomes);
        thread.join().unwrap();
    }
}
