//! Asks the fleet who is there: once an interval, and at once after each connect.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crossbeam_channel::{Receiver, select_biased, tick};
use parking_lot::Mutex;

use crate::fleet::registry::{self, Sighted, Sighting};
use crate::fleet::roster::Roster;
use crate::gate::Gate;
use crate::metrics::Metrics;
use crate::protocol::Identity;
use crate::rpc::{self, DiscoveryError, Rpc};
use crate::shutdown::Never;

/// The thread; one discovery at a time.
pub struct Discoverer {
    /// Who asks.
    pub rpc: Arc<Rpc>,
    /// Where found nodes go.
    pub roster: Arc<Roster>,
    /// A closed gate stops discoveries.
    pub gate: Arc<Gate>,
    /// Counts.
    pub metrics: Arc<Metrics>,
    /// From one discovery to the next.
    pub interval: Duration,
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

impl Discoverer {
    /// Runs until it is told to stop.
    pub fn run(self) {
        let interval = tick(self.interval);
        let late = self.rpc.late_finds();
        loop {
            select_biased! {
                recv(self.stop) -> _ => return,
                recv(self.trigger) -> trigger => match trigger {
                    Ok(()) => self.discover(),
                    Err(_) => return,
                },
                recv(interval) -> _ => self.discover(),
                recv(late) -> found => match found {
                    Ok(identity) => self.found(&identity),
                    Err(_) => return,
                },
            }
        }
    }

    fn discover(&self) {
        if let Err(reasons) = self.gate.begin() {
            let reasons: Vec<String> = reasons.iter().map(ToString::to_string).collect();
            log::warn!(component = "discovery", reasons = reasons.join(", ").as_str(); "Skipping discovery while paused");
            return;
        }
        log::info!(component = "discovery"; "Looking for nodes to provision");
        self.metrics.discover_cycles.inc();
        self.roster.registry().discovery_started(Instant::now());
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
                self.forget_stale();
            }
            // We are ending, and nobody asks for its result.
            Err(DiscoveryError::Aborted) => {}
            Err(DiscoveryError::Send(error)) => {
                self.metrics.discovery_errors.inc();
                log::error!(component = "discovery"; "Could not discover nodes: {}", error.0);
            }
        }
        self.roster.measure();
    }

    fn found(&self, identity: &Identity) {
        match self.roster.sight(identity, Sighting::Discovery) {
            Sighted::Queued(_) => self.metrics.discovered.inc(),
            Sighted::Known | Sighted::NotDue | Sighted::QueueFull | Sighted::AskAgain(_) => {}
        }
    }

    fn forget_stale(&self) {
        let stale = self.roster.registry().discovery_completed(Instant::now());
        for identity in stale {
            let node = identity.as_str();
            log::info!(component = node, node; "Forgetting {node}: two discoveries have missed it");
            self.metrics.outcomes.with_label_values(&[registry::STALE]).inc();
        }
    }
}

/// Seconds since 1970.
pub fn unix_time() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_secs()).unwrap_or(i64::MAX)
}
