//! Asks the fleet who is there: once an interval, and at once after each connect.
//!
//! After a reconnect the nodes are still coming back too, each in its own time, so it is asked a few times more.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, at, never, select_biased};
use parking_lot::Mutex;

use crate::clock::unix_time;
use crate::fleet::current::Current;
use crate::fleet::election;
use crate::fleet::registry::{Sighted, Sighting};
use crate::fleet::roster::Roster;
use crate::fleet::tally::STALE;
use crate::gate::{Gate, RECONNECT_GRACE, Reason};
use crate::metrics::Metrics;
use crate::protocol::Identity;
use crate::pulse;
use crate::rpc::{self, DiscoveryError, Rpc};
use crate::shutdown::{Never, is_over};

/// When the fleet is asked once more after a reconnect. A node waits up to 20 s between two tries to connect.
const AFTER_RECONNECT: [Duration; 3] =
    [Duration::from_secs(2), Duration::from_secs(8), RECONNECT_GRACE];

/// What the thread works with.
pub struct Setup {
    /// Who asks.
    pub rpc: Arc<Rpc>,
    /// Where found nodes go.
    pub roster: Arc<Roster>,
    /// A closed gate stops discoveries.
    pub gate: Arc<Gate>,
    /// Who leads, if that is decided by an election; for people.
    pub election: Option<Arc<election::View>>,
    /// Counts.
    pub metrics: Arc<Metrics>,
    /// Says how long it is from one discovery to the next.
    pub current: Arc<Current>,
    /// How long the first answer may take.
    pub window: Duration,
    /// A message starts a discovery at once.
    pub trigger: Receiver<()>,
    /// Ends the thread, and a discovery that is running.
    pub stop: Receiver<Never>,
    /// Told of every discovery that succeeded.
    pub last: Arc<LastSuccess>,
}

/// When a discovery succeeded last, for readiness.
#[derive(Debug)]
pub struct LastSuccess(Mutex<Instant>);

impl LastSuccess {
    /// Counts from now on.
    pub fn new() -> LastSuccess {
        LastSuccess(Mutex::new(Instant::now()))
    }

    /// How long ago the last one was; without any, how long we have been running.
    pub fn age(&self) -> Duration {
        self.0.lock().elapsed()
    }
}

impl Default for LastSuccess {
    fn default() -> LastSuccess {
        LastSuccess::new()
    }
}

/// The thread; one discovery at a time.
pub struct Discoverer {
    setup: Setup,
    /// When it last looked for nodes, or would have.
    looked_at: Instant,
    skipping: Skipping,
}

impl Discoverer {
    /// Ready to run.
    pub fn new(setup: Setup) -> Discoverer {
        Discoverer { setup, looked_at: Instant::now(), skipping: Skipping::default() }
    }

    /// Runs until it is told to stop.
    pub fn run(mut self) {
        let settings_changed = self.setup.current.watch();
        let mut interval = self.setup.current.config().interval;
        let mut next = Instant::now() + interval;
        let late = self.setup.rpc.late_finds();
        loop {
            pulse::waits();
            let again = next_after_reconnect(self.setup.gate.reconnected_at(), self.looked_at);
            select_biased! {
                recv(self.setup.stop) -> _ => return,
                recv(self.setup.trigger) -> trigger => match trigger {
                    Ok(()) => self.look(),
                    Err(_) => return,
                },
                recv(at(next)) -> _ => {
                    self.look();
                    // As even as a clock; what was missed meanwhile is not made up for.
                    next = (next + interval).max(Instant::now());
                }
                recv(settings_changed) -> _ => {
                    interval = self.setup.current.config().interval;
                    next = self.looked_at + interval;
                }
                recv(again.map_or_else(never, at)) -> _ => self.look(),
                recv(late) -> found => match found {
                    Ok(identity) => {
                        pulse::works();
                        self.setup.found(&identity);
                    }
                    Err(_) => return,
                },
            }
        }
    }

    fn look(&mut self) {
        pulse::works();
        self.looked_at = Instant::now();
        match self.setup.gate.begin() {
            Ok(_) => {
                self.skipping = Skipping::default();
                self.setup.discover();
            }
            Err(reasons) if self.skipping.is_news(&reasons) => {
                let why = |reason: &Reason| election::why(*reason, self.setup.election.as_deref());
                let reasons: Vec<String> = reasons.iter().map(why).collect();
                log::warn!(component = "discovery", reasons = reasons.join(", ").as_str(); "Skipping discovery while paused");
            }
            Err(_) => {}
        }
    }
}

/// When the fleet is to be asked once more because of a reconnect, if it was last asked at `looked_at`.
pub(super) fn next_after_reconnect(
    reconnected_at: Option<Instant>,
    looked_at: Instant,
) -> Option<Instant> {
    let reconnected_at = reconnected_at?;
    AFTER_RECONNECT.into_iter().map(|after| reconnected_at + after).find(|at| *at > looked_at)
}

/// Why discoveries are being skipped, so that it is said once a pause and not once an interval.
#[derive(Debug, Default)]
struct Skipping(Vec<Reason>);

impl Skipping {
    fn is_news(&mut self, reasons: &[Reason]) -> bool {
        if self.0 == reasons {
            return false;
        }
        reasons.clone_into(&mut self.0);
        true
    }
}

impl Setup {
    fn discover(&self) {
        log::info!(component = "discovery"; "Looking for nodes to provision");
        self.metrics.discover_cycles.inc();
        let started = Instant::now();
        let connection = self.gate.lost();
        self.roster.registry().discovery_started(started);
        let result = rpc::discover(&self.rpc, self.window, &self.stop, &mut |identity| {
            self.found(&identity)
        });
        match result {
            Ok(found) => {
                self.metrics
                    .discovery_replies
                    .set(i64::try_from(found.replies).unwrap_or(i64::MAX));
                self.metrics.last_discovery_timestamp_seconds.set(unix_time());
                *self.last.0.lock() = Instant::now();
                log::debug!(component = "discovery", replies = found.replies, invalid = found.invalid; "Discovery ended");
                // While connections come and go, theirs or ours, who is missing may well be there.
                if !is_over(&connection) && !self.gate.just_reconnected(started) {
                    self.forget_stale();
                }
            }
            // We are ending, and nobody asks for its result.
            Err(DiscoveryError::Aborted) => {}
            Err(DiscoveryError::Send(error)) => {
                self.metrics.discovery_errors.inc();
                // The connection says what is wrong, and the next discovery follows soon.
                log::warn!(component = "discovery"; "Could not discover nodes: {}", error.0);
            }
        }
        self.roster.measure();
    }

    fn found(&self, identity: &Identity) {
        match self.roster.sight(identity, Sighting::Discovery) {
            Sighted::Queued(_) => self.metrics.discovered.inc(),
            Sighted::Known
            | Sighted::NotDue
            | Sighted::QueueFull
            | Sighted::AskAgain(_)
            | Sighted::Denied
            | Sighted::Others => {}
        }
    }

    fn forget_stale(&self) {
        let stale = self.roster.registry().discovery_completed(Instant::now());
        for identity in stale {
            let node = identity.as_str();
            log::info!(component = node, node; "Forgetting {node}: two discoveries have missed it");
            self.metrics.outcomes.with_label_values(&[STALE]).inc();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use crossbeam_channel::bounded;

    use super::*;
    use crate::fleet::registry;
    use crate::rpc::testing::Net;

    const SOON: Duration = Duration::from_secs(20);

    #[test]
    fn the_fleet_is_asked_again_while_its_nodes_come_back_after_a_reconnect() {
        let net = Net::new();
        let (sent, asked) = bounded(10);
        net.answer(move |_, _| {
            sent.send(Instant::now()).unwrap();
            Vec::new()
        });
        let limits = registry::Limits::new(SOON, SOON);
        let (roster, _queues) = Roster::new(limits, 10, net.metrics.clone());
        let gate = Arc::new(Gate::new());
        let (keep, stop) = bounded(0);
        let (trigger, triggered) = bounded(1);
        let discoverer = Discoverer::new(Setup {
            rpc: net.rpc.clone(),
            roster: Arc::new(roster),
            gate: gate.clone(),
            election: None,
            metrics: net.metrics.clone(),
            current: Current::testing("helper: /bin/true\ninterval: 1h\n", &net, &gate),
            window: Duration::from_millis(1),
            trigger: triggered,
            stop,
            last: Arc::new(LastSuccess::new()),
        });
        let thread = thread::spawn(move || discoverer.run());
        gate.open(Reason::Disconnected);
        trigger.send(()).unwrap();
        asked.recv_timeout(SOON).unwrap();
        gate.close(Reason::Disconnected);
        gate.open(Reason::Disconnected);
        trigger.send(()).unwrap();
        asked.recv_timeout(SOON).unwrap();
        // Nobody asks for this one.
        let again = asked.recv_timeout(SOON).unwrap();
        assert!(again >= gate.reconnected_at().unwrap() + AFTER_RECONNECT[0]);
        drop(keep);
        thread.join().unwrap();
    }

    #[test]
    fn asks_again_at_set_times_after_a_reconnect_only() {
        let start = Instant::now();
        let at = |secs: u64| start + Duration::from_secs(secs);
        let next = |looked_at| next_after_reconnect(Some(start), looked_at);
        assert_eq!(next_after_reconnect(None, start), None);
        assert_eq!(next(at(0)), Some(at(2)));
        assert_eq!(next(at(2)), Some(at(8)));
        assert_eq!(next(at(7)), Some(at(8)));
        assert_eq!(next(at(29)), Some(at(30)));
        assert_eq!(next(at(30)), None);
    }

    #[test]
    fn a_pause_is_told_once_and_another_reason_too() {
        let mut skipping = Skipping::default();
        assert!(skipping.is_news(&[Reason::Disconnected]));
        assert!(!skipping.is_news(&[Reason::Disconnected]));
        assert!(skipping.is_news(&[Reason::Operator, Reason::Disconnected]));
        assert!(!skipping.is_news(&[Reason::Operator, Reason::Disconnected]));
        assert!(skipping.is_news(&[Reason::Operator]));
    }
}
