//! Which nodes we know, in which state, and what is due.
//!
//! One entry per identity. A *sighting* (a discovery reply, a startup event, an operator's `retry`) is all that ever
//! queues a node; the outcome of an attempt decides when the next sighting may. No lock, no I/O, no clock: `now` is an
//! argument and queues are reached through a `push` that must not block. Callers hold the registry in one lock.
//!
//! ```text
//!            sighting            taken             configured, upgraded, shut down
//!   absent ───────────► Queued ────────► Working ──────────────────────────────────► Settling ──► absent
//!                         ▲  │ unreachable  │ anything else                             │
//!                         │  └──────────► Waiting ◄─────────────────────────────────────┘ came back again
//!                         └────────────────┘ sighting, when due
//! ```
//!
//! An entry's generation names the one queue element that stands for it: whoever holds a [`Key`] whose generation has
//! passed holds nothing. Returns and upgrade tries outlive the entry and are kept in a table of their own.
//!
//! Every operation costs O(log n) at most, but for [`Registry::reload`] and [`Registry::clear`]; whoever wants to see all
//! nodes reads them in parts with [`Registry::visit`]. A known node costs less than 400 bytes, its last error included.

mod entry;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Bound;
use std::time::{Duration, Instant};

use crate::fleet::tally::Tally;
use crate::gate::Closed;
use crate::node::upgrade::Tries;
use crate::node::{Outcome, Report};
use crate::protocol::Identity;

use self::entry::{Discoveries, Entry, Kept, Settled, State, last_error};

/// How long a configured node is left alone: it restarts after a few seconds, and what it said before may come late.
pub const SETTLING: Duration = Duration::from_secs(60);

/// The same for an upgraded node, which downloads its new version first.
pub const SETTLING_UPGRADE: Duration = Duration::from_secs(600);

/// A node waits at least this long after it answered `restart`, so an event before that is from before the restart.
pub const RESTART_SPLAY: Duration = Duration::from_secs(2);

/// How long another provisioner may hold a node's lock before we ask again.
pub const BUSY_WAIT: Duration = Duration::from_secs(120);

/// A queued node missed by two completed discoveries is not given up before this.
pub const STALE_AFTER: Duration = Duration::from_secs(120);

/// How long a waiting node stays known without being seen, and how long returns and upgrade tries are kept.
pub const KEPT_FOR: Duration = Duration::from_secs(24 * 60 * 60);

/// Failures in a row that cost no wait, since a node that just came up may fail once or twice.
pub const FAILURES_FREE: u16 = 2;

/// Times one queued entry is asked again because of events; more would let a flood of events keep it from being worked.
const ASKS_AGAIN_MAX: u8 = 3;

/// Nodes that wait, settle, or are remembered; the default of each bound in [`Limits`]. Twice the usual work queue.
const KNOWN_MAX: usize = 100_000;

/// Nodes an operator may deny at a time: what a person types or a script of theirs lists.
pub const DENIED_MAX: usize = 10_000;

/// Bytes of all errors that are longer than a line and kept whole: thousands of ordinary ones. A fleet that fails as one must not
/// cost more than that; the log has all.
const LONG_ERRORS_BYTES_MAX: usize = 1 << 20;

/// Names one queue element: a node, and which of its times in the queue.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key {
    /// The node.
    pub identity: Identity,
    /// From one counter for the whole process, so no two elements have the same.
    pub generation: u64,
}

/// Which queue an element goes to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Queue {
    /// The work queue: nodes never tried before, which go first.
    First,
    /// The retry queue.
    Retry,
}

/// How a node was noticed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sighting<'a> {
    /// It answered a discovery.
    Discovery,
    /// It published a startup event.
    Event {
        /// The event's own id.
        id: &'a str,
    },
    /// It answered a request that we had given up.
    LateAnswer,
    /// An operator wants it tried.
    Operator,
}

/// What became of a sighting.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Sighted {
    /// It was pushed to a queue.
    Queued(Key),
    /// Nothing to do: it is queued, worked on, or settling.
    Known,
    /// It waits and its time has not come.
    NotDue,
    /// It should be queued but the queue is full. A node not known before leaves no entry.
    QueueFull,
    /// It restarted while queued: an answer held for this key is of the past, it must be asked again.
    AskAgain(Key),
    /// An operator wants it left alone.
    Denied,
    /// Another instance provisions it.
    Others,
}

/// A node taken from a queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Taken {
    /// Which attempt this is since the node was last provisioned or unknown; the first is 1.
    pub attempt: u32,
    /// How long it was queued.
    pub queued_for: Duration,
    /// When it last announced itself while queued. An answer that arrived before is of the past.
    pub announced_at: Option<Instant>,
    /// The upgrade tried last, if any within [`KEPT_FOR`].
    pub upgrade: Option<Tries>,
}

/// What became of a finished attempt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finished {
    /// What to count.
    pub tally: Tally,
    /// Where the node is now.
    pub next: Next,
}

/// The state after an attempt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Next {
    /// Unknown again.
    Absent,
    /// Pushed to a queue.
    Queued(Key),
    /// Left alone for a while.
    Settling,
    /// To be taken again by a sighting from then on.
    Waiting {
        /// From when on.
        due: Instant,
    },
    /// The key's time had passed; nothing changed.
    NotCurrent,
}

/// A node that came back unprovisioned soon after it was configured.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Returned {
    /// Its name.
    pub identity: Identity,
    /// How often it has done so within [`KEPT_FOR`].
    pub times: u32,
}

/// What a sweep removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Swept {
    /// Nodes that have settled.
    pub settled: usize,
    /// Waiting nodes unseen for [`KEPT_FOR`].
    pub unseen: usize,
}

/// How many nodes are in each state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counts {
    /// On a queue, at the prober or ready.
    pub queued: usize,
    /// In a worker.
    pub working: usize,
    /// Left alone after success.
    pub settling: usize,
    /// To be taken again later.
    pub waiting: usize,
}

impl Counts {
    /// The original's `waiting_nodes`, which counted every node it had not finished with.
    pub fn waiting_nodes(&self) -> usize {
        self.queued + self.working + self.settling
    }
}

/// One known node, for people.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Node<'a> {
    /// Its name.
    pub identity: &'a Identity,
    /// Its state.
    pub state: NodeState,
    /// The generation of its queue element, or of the last it had.
    pub generation: u64,
    /// When it was last noticed.
    pub seen: Instant,
    /// Attempts since it was last provisioned or unknown.
    pub attempts: u32,
    /// Failures in a row, whosever fault they were.
    pub failures: u16,
    /// Why it was not provisioned the last time; empty if it was not tried.
    pub last_error: &'a str,
}

impl<'a> Node<'a> {
    fn of(identity: &'a Identity, entry: &'a Entry) -> Node<'a> {
        Node {
            identity,
            state: match entry.state {
                State::Queued { since, .. } => NodeState::Queued { since },
                State::Working { since, .. } => NodeState::Working { since },
                State::Settling { until, .. } => NodeState::Settling { until },
                State::Waiting { due, .. } => NodeState::Waiting { due },
            },
            generation: entry.generation,
            seen: entry.seen,
            attempts: entry.attempts,
            failures: entry.failures,
            last_error: entry.last_error.as_deref().unwrap_or_default(),
        }
    }
}

/// A node's state, for people.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NodeState {
    /// On a queue, at the prober or ready.
    Queued {
        /// Since when.
        since: Instant,
    },
    /// In a worker.
    Working {
        /// Since when.
        since: Instant,
    },
    /// Left alone after success.
    Settling {
        /// Until when.
        until: Instant,
    },
    /// To be taken again by a sighting.
    Waiting {
        /// From when on.
        due: Instant,
    },
}

/// A node's state without its times.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    /// See [`NodeState::Working`].
    Working,
    /// See [`NodeState::Queued`].
    Queued,
    /// See [`NodeState::Waiting`].
    Waiting,
    /// See [`NodeState::Settling`].
    Settling,
}

impl Kind {
    /// All of them.
    pub const ALL: [Kind; 4] = [Kind::Working, Kind::Queued, Kind::Waiting, Kind::Settling];
}

/// Where [`Registry::visit`] stopped.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mark(Instant, Identity);

/// Why a node can't be denied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TooManyDenied;

/// The bounds and waits of a registry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// The wait after a third failure in a row, or after a fault of ours.
    pub interval: Duration,
    /// The longest wait of a failing node.
    pub retry_max: Duration,
    /// Waiting nodes; beyond this the longest unseen is forgotten.
    pub waiting_max: usize,
    /// Settling nodes; beyond this the one nearest its end is forgotten.
    pub settling_max: usize,
    /// Nodes whose returns and upgrade tries are kept; beyond this the oldest are forgotten.
    pub kept_max: usize,
}

impl Limits {
    /// The given waits, and the usual bounds.
    pub fn new(interval: Duration, retry_max: Duration) -> Limits {
        Limits {
            interval,
            retry_max,
            waiting_max: KNOWN_MAX,
            settling_max: KNOWN_MAX,
            kept_max: KNOWN_MAX,
        }
    }
}

/// Puts an element on a queue without waiting; false if it does not fit.
pub type Push<'a> = &'a mut dyn FnMut(Queue, &Key) -> bool;

/// All the nodes we know.
#[derive(Debug)]
pub struct Registry {
    limits: Limits,
    generation: u64,
    entries: HashMap<Identity, Box<Entry>>,
    /// Queued and Waiting ones by when they were seen, Settling ones by when they end, Working ones by when they began.
    queued: BTreeSet<(Instant, Identity)>,
    waiting: BTreeSet<(Instant, Identity)>,
    settling: BTreeSet<(Instant, Identity)>,
    working: BTreeSet<(Instant, Identity)>,
    /// Nodes an operator wants left alone, and since when.
    denied: BTreeMap<Identity, Instant>,
    kept: HashMap<Identity, Kept>,
    kept_by_age: BTreeSet<(Instant, Identity)>,
    discoveries: Discoveries,
    returned: Option<Returned>,
    /// Of all entries.
    long_errors_bytes: usize,
}

impl Registry {
    /// Knows nobody.
    pub fn new(limits: Limits) -> Registry {
        Registry {
            limits,
            generation: 0,
            entries: HashMap::new(),
            queued: BTreeSet::new(),
            waiting: BTreeSet::new(),
            settling: BTreeSet::new(),
            working: BTreeSet::new(),
            denied: BTreeMap::new(),
            kept: HashMap::new(),
            kept_by_age: BTreeSet::new(),
            discoveries: Discoveries::default(),
            returned: None,
            long_errors_bytes: 0,
        }
    }

    /// A node was noticed: queues it if it is new or due.
    pub fn sight(
        &mut self,
        identity: &Identity,
        what: Sighting<'_>,
        now: Instant,
        push: Push<'_>,
    ) -> Sighted {
        if self.is_denied(identity) {
            return Sighted::Denied;
        }
        self.settle_if_over(identity, now);
        let Some((identity, mut entry)) = self.leave(identity) else {
            return self.sight_newcomer(identity, what, now, push);
        };
        entry.seen = now;
        let news = News::of(what, &mut entry);
        let sighted = match (&mut entry.state, news) {
            (State::Queued { announced, asks_again, .. }, News::Announced) => {
                *announced = Some(now);
                if *asks_again < ASKS_AGAIN_MAX {
                    *asks_again += 1;
                    let generation = entry.generation;
                    Sighted::AskAgain(Key { identity: identity.clone(), generation })
                } else {
                    Sighted::Known
                }
            }
            (State::Working { announced, .. }, News::Announced) => {
                *announced = Some(now);
                Sighted::Known
            }
            (State::Settling { settled, .. }, News::Announced) => {
                let settled = *settled;
                self.came_back(&identity, &mut entry, settled, now, now, push)
            }
            (State::Queued { .. } | State::Working { .. } | State::Settling { .. }, _) => {
                Sighted::Known
            }
            (State::Waiting { due, firm }, news) => {
                let early = match news {
                    News::Seen => false,
                    News::Announced => !*firm && entry.own_failures <= FAILURES_FREE,
                    News::Wanted => true,
                };
                if early || *due <= now {
                    self.queue_known(&identity, &mut entry, now, push)
                } else {
                    Sighted::NotDue
                }
            }
        };
        self.enter(identity, entry);
        sighted
    }

    /// A worker takes a queued node; nothing if the key's time has passed.
    pub fn take(&mut self, key: &Key, now: Instant) -> Option<Taken> {
        let State::Queued { since, announced, .. } = self.current(key)?.state else { return None };
        let (identity, mut entry) = self.leave(&key.identity)?;
        let taken = Taken {
            attempt: entry.attempts.saturating_add(1),
            queued_for: now.saturating_duration_since(since),
            announced_at: announced,
            upgrade: self.kept(&identity, now).and_then(|kept| kept.upgrade),
        };
        // Nobody is taken before it has answered.
        entry.is_heard = true;
        entry.state = State::Working { since: now, announced: None };
        self.enter(identity, entry);
        Some(taken)
    }

    /// Whether `key` names a queued or running node as it is now.
    pub fn is_current(&self, key: &Key) -> bool {
        self.current(key).is_some()
    }

    /// A node turned out to be another instance's: it is forgotten if it was to be begun. One in a worker is finished, and
    /// one that settles was ours a moment ago and may be again.
    pub fn disown(&mut self, identity: &Identity) {
        let state = self.entries.get(identity).map(|entry| entry.state);
        if let Some(State::Queued { .. } | State::Waiting { .. }) = state {
            self.leave(identity);
        }
    }

    /// An attempt, or the probe before it, ended. `just_reconnected` excuses a node that is out of reach; `gate_lost`,
    /// lost leadership or draining, means that nothing is to be kept for later. Nor is a node that was never heard: nothing would
    /// make it due but the operator who named it.
    pub fn finish(
        &mut self,
        key: &Key,
        report: &Report,
        now: Instant,
        just_reconnected: bool,
        gate_lost: bool,
        push: Push<'_>,
    ) -> Finished {
        let Some(state) = self.current(key).map(|entry| entry.state) else {
            return Finished { tally: Tally::default(), next: Next::NotCurrent };
        };
        let Some((identity, mut entry)) = self.leave(&key.identity) else {
            return Finished { tally: Tally::default(), next: Next::NotCurrent };
        };
        let rebooted_at = match state {
            State::Working { announced, .. } => announced,
            _ => None,
        };
        let is_excused = just_reconnected && report.outcome == Outcome::Unreachable;
        let tally = if is_excused { Tally::default() } else { Tally::of(&report.outcome) };
        if tally.outcome.is_some() {
            entry.attempts = entry.attempts.saturating_add(1);
        }
        if !matches!(report.outcome, Outcome::Stopped(_)) {
            let room = LONG_ERRORS_BYTES_MAX.saturating_sub(self.long_errors_bytes);
            entry.last_error = last_error(report, &identity, room);
        }
        if let Outcome::UpgradeSent { version, from, .. } = &report.outcome {
            self.keep_upgrade(&identity, version, from, now);
        }
        if gate_lost || self.is_denied(&identity) {
            return Finished { tally, next: Next::Absent };
        }

        match &report.outcome {
            Outcome::Provisioned { configured_at, restarted_at } => {
                let late_until = restarted_at.map(|at| at + RESTART_SPLAY);
                let settled = Settled::Configured { late_until };
                entry.settle(now + SETTLING, settled);
                if let Some(at) = rebooted_at.filter(|at| at > configured_at) {
                    self.came_back(&identity, &mut entry, settled, at, now, push);
                }
            }
            Outcome::UpgradeSent { sent_at, .. } => {
                entry.settle(now + SETTLING_UPGRADE, Settled::Upgraded);
                if let Some(at) = rebooted_at.filter(|at| at > sent_at) {
                    self.came_back(&identity, &mut entry, Settled::Upgraded, at, now, push);
                }
            }
            Outcome::ShutDown => {
                // Nothing that was shut down a moment ago has started again yet.
                let late_until = Some(now + RESTART_SPLAY);
                entry.settle(now + SETTLING, Settled::Configured { late_until });
            }
            Outcome::UpgradeStuck { .. } => {
                entry.failures = entry.failures.saturating_add(1);
                entry.wait(now + self.limits.retry_max);
            }
            Outcome::Deferred => {
                (entry.failures, entry.own_failures) = (0, 0);
                entry.wait(now);
            }
            Outcome::Busy => entry.wait(now + BUSY_WAIT),
            // One fault of ours must not punish the fleet.
            Outcome::HelperFailed | Outcome::WrongToken | Outcome::Misconfigured => {
                entry.failures = entry.failures.saturating_add(1);
                entry.wait(now + self.limits.interval);
            }
            Outcome::Unreachable if is_excused => entry.wait(now),
            Outcome::Unreachable | Outcome::Refused | Outcome::Failed => {
                entry.failures = entry.failures.saturating_add(1);
                entry.own_failures = entry.own_failures.saturating_add(1);
                // A reboot explains one failure, not a row: a node that reboots in every attempt is a broken one.
                let wait = self.wait_after(entry.own_failures);
                entry.is_excused = !wait.is_zero() && rebooted_at.is_some() && !entry.is_excused;
                entry.wait(if entry.is_excused { now } else { now + wait });
            }
            Outcome::Stopped(Closed::Deadline) => {
                self.queue_known(&identity, &mut entry, now, push);
            }
            Outcome::NotProvisioning | Outcome::Stopped(Closed::Aborted | Closed::TermEnded) => {
                return Finished { tally, next: Next::Absent };
            }
        }
        if matches!(entry.state, State::Waiting { .. }) && !entry.is_heard {
            return Finished { tally, next: Next::Absent };
        }
        let next = match entry.state {
            State::Queued { .. } | State::Working { .. } => {
                Next::Queued(Key { identity: identity.clone(), generation: entry.generation })
            }
            State::Settling { .. } => Next::Settling,
            State::Waiting { due, .. } => Next::Waiting { due },
        };
        self.enter(identity, entry);
        Finished { tally, next }
    }

    /// The node that has just come back unprovisioned after it was configured, if one has; said once.
    pub fn take_returned(&mut self) -> Option<Returned> {
        self.returned.take()
    }

    /// A discovery begins.
    pub fn discovery_started(&mut self, now: Instant) {
        self.discoveries.running = Some(now);
    }

    /// The discovery that began last has ended without a fault. Forgets the queued nodes that this one and the one
    /// before have missed, and returns them.
    pub fn discovery_completed(&mut self, now: Instant) -> Vec<Identity> {
        let mut stale = Vec::new();
        let Some(missed_since) = self.discoveries.complete() else { return stale };
        let is_stale = |seen: Instant| {
            seen < missed_since && now.saturating_duration_since(seen) >= STALE_AFTER
        };
        while let Some(identity) = first(&self.queued, is_stale) {
            self.leave(&identity);
            stale.push(identity);
        }
        stale
    }

    /// Forgets what has expired. Sightings don't depend on how often this is called.
    pub fn sweep(&mut self, now: Instant) -> Swept {
        let mut swept = Swept::default();
        let is_over = |at: Instant, after| now.saturating_duration_since(at) >= after;
        while let Some(identity) = first(&self.settling, |until| until <= now) {
            self.leave(&identity);
            swept.settled += 1;
        }
        while let Some(identity) = first(&self.waiting, |seen| is_over(seen, KEPT_FOR)) {
            self.leave(&identity);
            swept.unseen += 1;
        }
        while first(&self.kept_by_age, |changed| is_over(changed, KEPT_FOR)).is_some() {
            self.forget_oldest_kept();
        }
        swept
    }

    /// Leadership was lost, or we drain: forgets all but the running nodes, which end by themselves. The caller empties
    /// the queues.
    pub fn clear(&mut self) -> usize {
        let before = self.entries.len();
        self.entries.retain(|_, entry| matches!(entry.state, State::Working { .. }));
        self.long_errors_bytes = self.entries.values().map(|entry| entry.long_error_bytes()).sum();
        self.queued.clear();
        self.waiting.clear();
        self.settling.clear();
        self.discoveries = Discoveries::default();
        before - self.entries.len()
    }

    /// Takes new settings and makes all waiting nodes due: what they failed of may be what was changed.
    pub fn reload(&mut self, limits: Limits, now: Instant) {
        self.limits = limits;
        self.make_due(now);
    }

    /// Makes all waiting nodes due, so that their next sighting queues them.
    pub fn make_due(&mut self, now: Instant) {
        for entry in self.entries.values_mut() {
            if let State::Waiting { due, firm } = &mut entry.state {
                *due = now.min(*due);
                *firm = false;
            }
        }
    }

    /// How many nodes are in each state.
    pub fn counts(&self) -> Counts {
        Counts {
            queued: self.queued.len(),
            working: self.working.len(),
            settling: self.settling.len(),
            waiting: self.waiting.len(),
        }
    }

    /// What is known about one node.
    pub fn node(&self, identity: &Identity) -> Option<Node<'_>> {
        self.entries.get_key_value(identity).map(|(identity, entry)| Node::of(identity, entry))
    }

    /// Shows some nodes of one state, at most `max`, those behind `after` in an order that stays the same while nodes come
    /// and go. Returns where to go on, so that the lock need not be held for as long as all of them take.
    pub fn visit(
        &self,
        kind: Kind,
        after: Option<&Mark>,
        max: usize,
        visitor: &mut dyn FnMut(Node<'_>),
    ) -> Option<Mark> {
        let index = match kind {
            Kind::Working => &self.working,
            Kind::Queued => &self.queued,
            Kind::Waiting => &self.waiting,
            Kind::Settling => &self.settling,
        };
        let from = match after {
            Some(Mark(at, identity)) => Bound::Excluded((*at, identity.clone())),
            None => Bound::Unbounded,
        };
        let (mut last, mut shown) = (None, 0);
        for element in index.range((from, Bound::Unbounded)).take(max) {
            if let Some(node) = self.node(&element.1) {
                visitor(node);
            }
            (last, shown) = (Some(element), shown + 1);
        }
        let (at, identity) = last.filter(|_| shown == max)?;
        Some(Mark(*at, identity.clone()))
    }

    /// Leaves a node alone until it is allowed again: it is forgotten, and sightings of it are ignored. One that is being
    /// worked on is finished. False if it was denied already.
    ///
    /// # Errors
    ///
    /// [`TooManyDenied`] if there are [`DENIED_MAX`].
    pub fn deny(&mut self, identity: &Identity, now: Instant) -> Result<bool, TooManyDenied> {
        if self.is_denied(identity) {
            return Ok(false);
        }
        if self.denied.len() >= DENIED_MAX {
            return Err(TooManyDenied);
        }
        self.denied.insert(identity.clone(), now);
        // Whatever stands for it in a queue, or at the prober, is nobody's from now on.
        if !matches!(self.entries.get(identity).map(|e| e.state), Some(State::Working { .. })) {
            self.leave(identity);
        }
        Ok(true)
    }

    /// Takes the denial of a node back, so that its next sighting counts. False if it was not denied.
    pub fn allow(&mut self, identity: &Identity) -> bool {
        self.denied.remove(identity).is_some()
    }

    /// The denied nodes by name, and since when.
    pub fn denied(&self) -> impl ExactSizeIterator<Item = (&Identity, Instant)> {
        self.denied.iter().map(|(identity, since)| (identity, *since))
    }

    fn is_denied(&self, identity: &Identity) -> bool {
        self.denied.contains_key(identity)
    }

    /// All known nodes, in no order.
    pub fn nodes(&self) -> impl Iterator<Item = Node<'_>> {
        self.entries.iter().map(|(identity, entry)| Node::of(identity, entry))
    }

    fn sight_newcomer(
        &mut self,
        identity: &Identity,
        what: Sighting<'_>,
        now: Instant,
        push: Push<'_>,
    ) -> Sighted {
        let mut entry = Box::new(Entry::new(now));
        // Whatever it is, it is news; its id is noted to know a copy.
        News::of(what, &mut entry);
        match self.queue(identity, &mut entry, now, push) {
            Some(key) => {
                self.enter(identity.clone(), entry);
                Sighted::Queued(key)
            }
            None => Sighted::QueueFull,
        }
    }

    /// A node that was `settled` announced itself at `at`.
    fn came_back(
        &mut self,
        identity: &Identity,
        entry: &mut Entry,
        settled: Settled,
        at: Instant,
        now: Instant,
        push: Push<'_>,
    ) -> Sighted {
        match settled {
            // This is what an upgraded node was waited for.
            Settled::Upgraded => return self.queue_known(identity, entry, now, push),
            Settled::Configured { late_until: Some(until) } if at < until => {
                return Sighted::Known;
            }
            Settled::Configured { .. } => {}
        }
        let returns = self.keep_return(identity, now);
        self.returned = Some(Returned { identity: identity.clone(), times: returns });
        entry.last_error = Some(match returns {
            1 => "came back unprovisioned after it was configured".into(),
            _ => format!("came back unprovisioned {returns} times after it was configured").into(),
        });
        if returns == 1 {
            return self.queue_known(identity, entry, now, push);
        }
        let due = now + self.growing_wait(returns - 2);
        entry.state = State::Waiting { due, firm: true };
        Sighted::NotDue
    }

    /// Queues a node that has an entry; if it doesn't fit, it waits for its next sighting.
    fn queue_known(
        &mut self,
        identity: &Identity,
        entry: &mut Entry,
        now: Instant,
        push: Push<'_>,
    ) -> Sighted {
        match self.queue(identity, entry, now, push) {
            Some(key) => Sighted::Queued(key),
            None => {
                if entry.last_error.is_none() {
                    entry.last_error = Some("the queue was full".into());
                }
                entry.wait(now);
                Sighted::QueueFull
            }
        }
    }

    fn queue(
        &mut self,
        identity: &Identity,
        entry: &mut Entry,
        now: Instant,
        push: Push<'_>,
    ) -> Option<Key> {
        let queue = match self.kept(identity, now) {
            None if entry.attempts == 0 => Queue::First,
            _ => Queue::Retry,
        };
        self.generation += 1;
        let key = Key { identity: identity.clone(), generation: self.generation };
        if !push(queue, &key) {
            return None;
        }
        entry.generation = key.generation;
        entry.state = State::Queued { since: now, announced: None, asks_again: 0 };
        Some(key)
    }

    /// The wait after the given number of failures in a row.
    fn wait_after(&self, failures: u16) -> Duration {
        match failures.checked_sub(FAILURES_FREE + 1) {
            None => Duration::ZERO,
            Some(doublings) => self.growing_wait(u32::from(doublings)),
        }
    }

    fn growing_wait(&self, doublings: u32) -> Duration {
        let factor = 1_u32.checked_shl(doublings).unwrap_or(u32::MAX);
        self.limits.interval.saturating_mul(factor).min(self.limits.retry_max)
    }

    /// The queued or running entry that `key` names.
    fn current(&self, key: &Key) -> Option<&Entry> {
        self.entries.get(&key.identity).map(Box::as_ref).filter(|entry| {
            entry.generation == key.generation
                && matches!(entry.state, State::Queued { .. } | State::Working { .. })
        })
    }

    /// Takes an entry out, so that its state may change; [`enter`](Registry::enter) puts it back.
    fn leave(&mut self, identity: &Identity) -> Option<(Identity, Box<Entry>)> {
        let (identity, entry) = self.entries.remove_entry(identity)?;
        self.long_errors_bytes -= entry.long_error_bytes();
        let (identity, removed) = match entry.state {
            State::Working { since, .. } => remove(&mut self.working, since, identity),
            State::Queued { .. } => remove(&mut self.queued, entry.seen, identity),
            State::Waiting { .. } => remove(&mut self.waiting, entry.seen, identity),
            State::Settling { until, .. } => remove(&mut self.settling, until, identity),
        };
        debug_assert!(removed, "every entry is in the index of its state");
        Some((identity, entry))
    }

    fn enter(&mut self, identity: Identity, entry: Box<Entry>) {
        match entry.state {
            State::Working { since, .. } => {
                self.working.insert((since, identity.clone()));
            }
            State::Queued { .. } => {
                self.queued.insert((entry.seen, identity.clone()));
            }
            State::Waiting { .. } => {
                self.waiting.insert((entry.seen, identity.clone()));
            }
            State::Settling { until, .. } => {
                self.settling.insert((until, identity.clone()));
            }
        }
        self.long_errors_bytes += entry.long_error_bytes();
        self.entries.insert(identity, entry);
        let (waiting_max, settling_max) = (self.limits.waiting_max, self.limits.settling_max);
        let surplus = [
            first(&self.waiting, |_| self.waiting.len() > waiting_max),
            first(&self.settling, |_| self.settling.len() > settling_max),
        ];
        for oldest in surplus.iter().flatten() {
            self.leave(oldest);
        }
    }

    fn settle_if_over(&mut self, identity: &Identity, now: Instant) {
        let state = self.entries.get(identity).map(|entry| entry.state);
        if matches!(state, Some(State::Settling { until, .. }) if until <= now) {
            self.leave(identity);
        }
    }

    fn kept(&self, identity: &Identity, now: Instant) -> Option<&Kept> {
        self.kept
            .get(identity)
            .filter(|kept| now.saturating_duration_since(kept.changed) < KEPT_FOR)
    }

    /// Counts a return, and says how many there have been.
    fn keep_return(&mut self, identity: &Identity, now: Instant) -> u32 {
        let mut kept = self.kept(identity, now).copied().unwrap_or(Kept::new(now));
        kept.returns = kept.returns.saturating_add(1);
        self.keep(identity, kept, now);
        kept.returns
    }

    fn keep_upgrade(&mut self, identity: &Identity, target: &str, from: &str, now: Instant) {
        let mut kept = self.kept(identity, now).copied().unwrap_or(Kept::new(now));
        kept.upgrade = Some(Tries::after(kept.upgrade, target, from));
        self.keep(identity, kept, now);
    }

    fn keep(&mut self, identity: &Identity, mut kept: Kept, now: Instant) {
        kept.changed = now;
        if let Some(before) = self.kept.insert(identity.clone(), kept) {
            self.kept_by_age.remove(&(before.changed, identity.clone()));
        }
        self.kept_by_age.insert((now, identity.clone()));
        if self.kept.len() > self.limits.kept_max {
            self.forget_oldest_kept();
        }
    }

    fn forget_oldest_kept(&mut self) {
        if let Some((_, identity)) = self.kept_by_age.pop_first() {
            self.kept.remove(&identity);
        }
    }
}

/// What a sighting tells about the node.
#[derive(Debug, Clone, Copy)]
enum News {
    /// It is there.
    Seen,
    /// It has started since we last heard of it.
    Announced,
    /// An operator wants it.
    Wanted,
}

impl News {
    /// What `sighting` tells about the node of `entry`, which notes it; a copy of the last event is no news.
    fn of(sighting: Sighting<'_>, entry: &mut Entry) -> News {
        entry.is_heard |= sighting != Sighting::Operator;
        match sighting {
            Sighting::Discovery | Sighting::LateAnswer => News::Seen,
            Sighting::Operator => News::Wanted,
            Sighting::Event { id } if entry.hear(id) => News::Announced,
            Sighting::Event { .. } => News::Seen,
        }
    }
}

/// The first of an index, if its time passes `test`.
fn first(
    index: &BTreeSet<(Instant, Identity)>,
    test: impl FnOnce(Instant) -> bool,
) -> Option<Identity> {
    index.first().filter(|(at, _)| test(*at)).map(|(_, identity)| identity.clone())
}

/// Takes an element out of an index, and says whether it was there.
fn remove(
    index: &mut BTreeSet<(Instant, Identity)>,
    at: Instant,
    identity: Identity,
) -> (Identity, bool) {
    let element = (at, identity);
    let was_there = index.remove(&element);
    (element.1, was_there)
}
