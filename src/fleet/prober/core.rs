//! Whom the prober has asked and who has answered: a core without clock and I/O.
//!
//! Every node is here from the moment it leaves a queue until it is taken for provisioning or its probe has ended. It is
//! in one of three states: to be asked (again), asked, or answered and not yet taken. The bounds are those of `Limits`;
//! whoever drives the core asks [`Core::has_room`] before it asks a node.

#[cfg(test)]
mod tests;

use std::collections::{HashMap, VecDeque};
use std::hash::Hash;
use std::time::{Duration, Instant};

use crate::fleet::registry::Key;
use crate::protocol::Identity;

/// A node asked longer ago than this is silent and counts against `silent_max`, not against `quick_max`.
pub const QUICK: Duration = Duration::from_millis(50);
/// How often a silent node is asked before it is unreachable.
pub const ASKS_MAX: u8 = 2;
/// An answer that comes later than this after its request is nobody's: no node works on a request for longer.
pub const LATE_MAX: Duration = Duration::from_secs(22);
/// Requests remembered for a late answer; the oldest are forgotten first. A minute's worth of silent nodes by default.
pub const LATE_LEN_MAX: usize = 16_384;
/// An answer held for longer, while nobody may take it, is too old to decide a node's configuration from.
pub const HELD_FOR_MAX: Duration = Duration::from_secs(60);
/// The retry queue gets one turn in so many while first-time nodes wait too.
pub const RETRY_TURN: u32 = 20;

/// Outdated entries tolerated in a list before it is gone through.
const TIDY_LEN: usize = 64;

/// The bounds of the prober.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Nodes asked less than [`QUICK`] ago, or answered and not yet taken.
    pub quick_max: usize,
    /// Nodes asked longer ago that have not answered.
    pub silent_max: usize,
    /// How long one request waits for its answer.
    pub timeout: Duration,
    /// Bytes of answers held.
    pub held_bytes_max: usize,
}

/// The state of all probes. `I` names a request, `R` keeps it registered while it lives, `A` is an answer.
#[derive(Debug)]
pub struct Core<I, R, A> {
    limits: Limits,
    probes: HashMap<Identity, Probe<I, R, A>>,
    requests: HashMap<I, Request>,
    /// Serial of the latest change of any probe; tells entries of the lists below that are out of date.
    serial: u64,
    to_ask: VecDeque<Ticket>,
    /// By the time of the first request.
    quick: VecDeque<(Instant, Ticket)>,
    /// By the time of the last request.
    asked: VecDeque<(Instant, Ticket)>,
    /// By the time of the answer.
    answered: VecDeque<Ticket>,
    late: VecDeque<(Instant, I, R)>,
    asked_quick_len: usize,
    asked_silent_len: usize,
    answered_len: usize,
    held_bytes: usize,
    turn: u32,
}

/// What a request id that is still registered belongs to.
#[derive(Debug)]
enum Request {
    Live(Identity),
    Late(Identity),
}

/// A probe at a certain state: out of date as soon as the probe's serial is another.
#[derive(Debug, Clone)]
struct Ticket {
    identity: Identity,
    serial: u64,
}

#[derive(Debug)]
struct Probe<I, R, A> {
    key: Key,
    serial: u64,
    asks: u8,
    /// Each request with its time, oldest first; at most [`ASKS_MAX`].
    sent: Vec<(Instant, I, R)>,
    state: State<I, A>,
}

#[derive(Debug)]
enum State<I, A> {
    ToAsk,
    /// `silent` once the first request is older than [`QUICK`].
    Asked {
        silent: bool,
    },
    Answered {
        at: Instant,
        /// The request that was answered, the answer and its size, unless the worker is to ask again.
        held: Option<(I, A, usize)>,
    },
}

/// What an expired request means.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Expired {
    /// The node is to be asked once more.
    Again(Key),
    /// The node did not answer at all; its probe has ended.
    Unreachable(Key),
}

/// What became of an answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Heard<A> {
    /// It is held for a worker.
    Held,
    /// There is no room for it: the worker asks again.
    TooMuchHeld,
    /// Another one counts already. `rpc` keeps this one for whoever works on the node, who sees whether they differ.
    Further,
    /// Its probe has ended already. If it is the node's, the node is alive after all, see [`Core::forget_late`].
    Late {
        /// The node that was asked.
        identity: Identity,
        /// What came.
        answer: A,
    },
    /// It belongs to no probe.
    Unknown,
}

/// A node that answered, taken for provisioning.
#[derive(Debug)]
pub struct Taken<I, R, A> {
    /// The queue entry it came from.
    pub key: Key,
    /// The request's id and registration and the answer, unless the node has to be asked again.
    pub held: Option<(I, R, A)>,
    /// When it answered.
    pub answered_at: Instant,
}

/// Which queue is looked at first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Turn {
    /// Nodes seen for the first time.
    First,
    /// Nodes that failed before.
    Retry,
}

impl<I: Copy + Eq + Hash, R, A> Core<I, R, A> {
    /// No probe yet.
    pub fn new(limits: Limits) -> Core<I, R, A> {
        Core {
            limits,
            probes: HashMap::new(),
            requests: HashMap::new(),
            serial: 0,
            to_ask: VecDeque::new(),
            quick: VecDeque::new(),
            asked: VecDeque::new(),
            answered: VecDeque::new(),
            late: VecDeque::new(),
            asked_quick_len: 0,
            asked_silent_len: 0,
            answered_len: 0,
            held_bytes: 0,
            turn: 0,
        }
    }

    /// Changes the bounds, also for those that have been asked.
    pub fn limit(&mut self, limits: Limits) {
        self.limits = limits;
    }

    /// Whether one more node may be asked.
    ///
    /// Silent nodes beyond their own bound count as quick ones: they stop new requests until some of them have ended.
    pub fn has_room(&self) -> bool {
        let overflow = self.asked_silent_len.saturating_sub(self.limits.silent_max);
        self.asked_quick_len + self.answered_len + overflow < self.limits.quick_max
    }

    /// The next node that has left its queue already and is to be asked (again), before any from the queues.
    pub fn next_to_ask(&mut self) -> Option<Key> {
        while let Some(ticket) = self.to_ask.front() {
            match self.probes.get(&ticket.identity) {
                Some(probe) if probe.serial == ticket.serial => return Some(probe.key.clone()),
                _ => drop(self.to_ask.pop_front()),
            }
        }
        None
    }

    /// Which queue the next node should come from; the other one if that is empty.
    pub fn turn(&self) -> Turn {
        if self.turn + 1 == RETRY_TURN { Turn::Retry } else { Turn::First }
    }

    /// A node was taken from a queue, whichever it was.
    pub fn turn_taken(&mut self) {
        self.turn = (self.turn + 1) % RETRY_TURN;
    }

    /// A node that could not be asked now, from a queue or after [`Expired::Again`]; it is asked before any from the queues.
    ///
    /// Returns an older entry of the same node that is dropped for it.
    pub fn put_back(&mut self, key: &Key, now: Instant) -> Option<Key> {
        let dropped = self.forget_other(key, now);
        match self.probes.get(&key.identity).map(|probe| &probe.state) {
            None => self.insert_to_ask(key.clone()),
            // It keeps its place, so that whoever tries one after the other sees that it got nowhere.
            Some(State::ToAsk) => {}
            Some(State::Asked { .. } | State::Answered { .. }) => self.ask_afresh(&key.identity),
        }
        dropped
    }

    /// A request was sent to the node `key` names: its first, or after [`Expired::Again`] its second.
    ///
    /// Returns an older entry of the same node that is dropped for it.
    pub fn asked(&mut self, key: &Key, id: I, registration: R, now: Instant) -> Option<Key> {
        let dropped = self.forget_other(key, now);
        let serial = self.next_serial();
        let probe = self.probes.entry(key.identity.clone()).or_insert_with(|| Probe {
            key: key.clone(),
            serial,
            asks: 0,
            sent: Vec::new(),
            state: State::ToAsk,
        });
        probe.serial = serial;
        probe.asks = probe.asks.saturating_add(1);
        probe.sent.push((now, id, registration));
        let ticket = Ticket { identity: key.identity.clone(), serial };
        match probe.state {
            State::Asked { silent: true } => {}
            State::Asked { silent: false } => {
                // A new serial needs a new entry; it goes by the first request.
                let since = probe.sent[0].0;
                let at = self.quick.partition_point(|(other, _)| *other <= since);
                self.quick.insert(at, (since, ticket.clone()));
            }
            State::ToAsk => {
                probe.state = State::Asked { silent: false };
                self.asked_quick_len += 1;
                self.quick.push_back((now, ticket.clone()));
            }
            // Nobody asks a node that has answered; if it happens, the answer stays.
            State::Answered { .. } => {
                self.answered.push_back(ticket.clone());
            }
        }
        self.asked.push_back((now, ticket));
        self.requests.insert(id, Request::Live(key.identity.clone()));
        dropped
    }

    /// Takes in an answer of `bytes` bytes to the request `id`.
    pub fn answered(&mut self, id: I, answer: A, bytes: usize, now: Instant) -> Heard<A> {
        let identity = match self.requests.get(&id) {
            None => return Heard::Unknown,
            Some(Request::Live(identity)) => identity.clone(),
            Some(Request::Late(identity)) => {
                return Heard::Late { identity: identity.clone(), answer };
            }
        };
        let Some(probe) = self.probes.get_mut(&identity) else { return Heard::Unknown };
        match &mut probe.state {
            State::ToAsk => Heard::Unknown,
            State::Asked { silent } => {
                let too_much = bytes > self.limits.held_bytes_max.saturating_sub(self.held_bytes);
                let held = (!too_much).then_some((id, answer, bytes));
                self.held_bytes += held.as_ref().map_or(0, |(_, _, bytes)| *bytes);
                if *silent {
                    self.asked_silent_len -= 1;
                } else {
                    self.asked_quick_len -= 1;
                }
                self.answered_len += 1;
                probe.state = State::Answered { at: now, held };
                self.serial += 1;
                probe.serial = self.serial;
                self.answered.push_back(Ticket { identity, serial: self.serial });
                self.tidy();
                if too_much { Heard::TooMuchHeld } else { Heard::Held }
            }
            State::Answered { .. } => Heard::Further,
        }
    }

    /// A late answer was the node's: that tells all, so no other one is waited for.
    pub fn forget_late(&mut self, id: I) {
        if let Some(Request::Late(_)) = self.requests.get(&id) {
            self.requests.remove(&id);
            // Drops the registration.
            if let Some(at) = self.late.iter().position(|(_, other, _)| *other == id) {
                self.late.remove(at);
            }
        }
    }

    /// The broker says that nobody listens on the node's subject: its probe ends at once.
    pub fn no_responders(&mut self, id: I, now: Instant) -> Option<Key> {
        let Some(Request::Live(identity)) = self.requests.get(&id) else { return None };
        let identity = identity.clone();
        match self.probes.get(&identity)?.state {
            State::Asked { .. } => self.end(&identity, now),
            State::ToAsk | State::Answered { .. } => None,
        }
    }

    /// An answer held for this node is dropped and the node is asked again, and so is one that is silent.
    ///
    /// One asked less than [`QUICK`] ago is not: its second request comes soon enough, and a storm of events must not
    /// become a storm of requests. Nor is an entry of another generation: the one that `key` names is still in its queue, and
    /// must not be in two places. Returns whether it was here.
    pub fn ask_again(&mut self, key: &Key) -> bool {
        let probe = self.probes.get(&key.identity).filter(|probe| probe.key == *key);
        let Some(probe) = probe else { return false };
        match probe.state {
            State::ToAsk | State::Asked { silent: false } => {}
            State::Asked { silent: true } | State::Answered { .. } => {
                self.ask_afresh(&key.identity);
            }
        }
        true
    }

    /// Every node that was asked and has not answered is to be asked afresh, in the order it was: the connection was lost
    /// meanwhile.
    pub fn reset(&mut self) {
        let mut asked: Vec<(u64, Identity)> = self
            .probes
            .values()
            .filter(|probe| matches!(probe.state, State::Asked { .. }))
            .map(|probe| (probe.serial, probe.key.identity.clone()))
            .collect();
        asked.sort_unstable();
        for (_, identity) in asked {
            self.ask_afresh(&identity);
        }
    }

    /// Whatever became due by `now`. While the gate is closed (`open` is false) nothing expires: those nodes are to be
    /// asked afresh.
    pub fn expire(&mut self, open: bool, now: Instant) -> Vec<Expired> {
        self.age(now);
        let mut expired = Vec::new();
        while let Some((sent, ticket)) = self.asked.front() {
            let current = self.probes.get(&ticket.identity).is_some_and(|probe| {
                probe.serial == ticket.serial && matches!(probe.state, State::Asked { .. })
            });
            if current && *sent + self.limits.timeout > now {
                break;
            }
            let Some((_, ticket)) = self.asked.pop_front() else { break };
            if !current {
                continue;
            }
            let Some(probe) = self.probes.get(&ticket.identity) else { continue };
            if !open {
                self.ask_afresh(&ticket.identity);
            } else if probe.asks < ASKS_MAX {
                expired.push(Expired::Again(probe.key.clone()));
            } else {
                expired.extend(self.end(&ticket.identity, now).map(Expired::Unreachable));
            }
        }
        while self.late.front().is_some_and(|(until, ..)| *until <= now)
            || self.late.len() > LATE_LEN_MAX
        {
            if let Some((_, id, _)) = self.late.pop_front() {
                self.requests.remove(&id);
            }
        }
        expired
    }

    /// Whether a node can be taken.
    pub fn has_answered(&self) -> bool {
        self.answered_len > 0
    }

    /// Takes the node that answered first.
    pub fn take(&mut self, now: Instant) -> Option<Taken<I, R, A>> {
        loop {
            let ticket = self.answered.pop_front()?;
            match self.probes.get(&ticket.identity) {
                Some(probe) if probe.serial == ticket.serial => {}
                _ => continue,
            }
            let probe = self.remove(&ticket.identity)?;
            let State::Answered { at: answered_at, held } = probe.state else { continue };
            let mut sent = probe.sent;
            let held = held.filter(|_| now.saturating_duration_since(answered_at) <= HELD_FOR_MAX);
            let held = held.and_then(|(id, answer, _)| {
                let at = sent.iter().position(|(_, other, _)| *other == id)?;
                Some((id, sent.swap_remove(at).2, answer))
            });
            return Some(Taken { key: probe.key, held, answered_at });
        }
    }

    /// When [`Core::expire`] has something to do next.
    pub fn next_due(&self) -> Option<Instant> {
        let asked = self.asked.front().map(|(sent, _)| *sent + self.limits.timeout);
        let quick = self.quick.front().map(|(since, _)| *since + QUICK);
        let late = self.late.front().map(|(until, ..)| *until);
        [asked, quick, late].into_iter().flatten().min()
    }

    /// Nodes asked that have not answered.
    pub fn asked_len(&self) -> usize {
        self.asked_quick_len + self.asked_silent_len
    }

    /// Nodes that have answered and are not yet taken.
    pub fn answered_len(&self) -> usize {
        self.answered_len
    }

    /// Counts as silent whoever was asked longer than [`QUICK`] ago.
    fn age(&mut self, now: Instant) {
        while let Some((since, _)) = self.quick.front() {
            if *since + QUICK > now {
                break;
            }
            let Some((_, ticket)) = self.quick.pop_front() else { break };
            let Some(probe) = self.probes.get_mut(&ticket.identity) else { continue };
            if probe.serial != ticket.serial {
                continue;
            }
            if let State::Asked { silent: silent @ false } = &mut probe.state {
                *silent = true;
                self.asked_quick_len -= 1;
                self.asked_silent_len += 1;
            }
        }
    }

    /// Drops the entry of the same node if it has another key.
    fn forget_other(&mut self, key: &Key, now: Instant) -> Option<Key> {
        match self.probes.get(&key.identity) {
            Some(probe) if probe.key != *key => self.end(&key.identity, now),
            _ => None,
        }
    }

    /// Back to the start: whatever was sent or held for this node counts no more.
    ///
    /// Its requests leave the map at once: an answer to one says nothing about the node as it is now.
    fn ask_afresh(&mut self, identity: &Identity) {
        if let Some(probe) = self.remove(identity) {
            self.insert_to_ask(probe.key);
        }
    }

    fn insert_to_ask(&mut self, key: Key) {
        let serial = self.next_serial();
        self.to_ask.push_back(Ticket { identity: key.identity.clone(), serial });
        let probe = Probe { key, serial, asks: 0, sent: Vec::new(), state: State::ToAsk };
        self.probes.insert(probe.key.identity.clone(), probe);
    }

    /// Ends a probe; its requests stay registered for a while, for an answer that comes late.
    fn end(&mut self, identity: &Identity, now: Instant) -> Option<Key> {
        let probe = self.remove(identity)?;
        for (sent, id, registration) in probe.sent {
            let until = sent + LATE_MAX;
            if until > now {
                self.requests.insert(id, Request::Late(identity.clone()));
                let at = self.late.partition_point(|(other, ..)| *other <= until);
                self.late.insert(at, (until, id, registration));
            }
        }
        Some(probe.key)
    }

    /// Takes a probe out of all counts and its requests off the map.
    fn remove(&mut self, identity: &Identity) -> Option<Probe<I, R, A>> {
        let probe = self.probes.remove(identity)?;
        match &probe.state {
            State::ToAsk => {}
            State::Asked { silent: true } => self.asked_silent_len -= 1,
            State::Asked { silent: false } => self.asked_quick_len -= 1,
            State::Answered { held, .. } => {
                self.answered_len -= 1;
                self.held_bytes -= held.as_ref().map_or(0, |(_, _, bytes)| *bytes);
            }
        }
        for (_, id, _) in &probe.sent {
            self.requests.remove(id);
        }
        Some(probe)
    }

    /// Keeps the one list that nothing else empties while no node is taken from growing with a node that is asked again
    /// and again.
    fn tidy(&mut self) {
        if self.answered.len() > 2 * self.answered_len + TIDY_LEN {
            let probes = &self.probes;
            self.answered.retain(|ticket| {
                probes.get(&ticket.identity).is_some_and(|probe| probe.serial == ticket.serial)
            });
        }
    }

    fn next_serial(&mut self) -> u64 {
        self.serial += 1;
        self.serial
    }
}
