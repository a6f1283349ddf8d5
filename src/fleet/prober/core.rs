//! Whom the prober has asked and who has answered: a core without clock and I/O.
//!
//! Every node is here from the moment it leaves a queue until it is taken for provisioning or its probe has ended. It is
//! in one of three states: to be asked (again), asked, or answered and not yet taken. The bounds are those of `Limits`;
//! whoever drives the core asks [`Core::has_room`] before it asks a node.

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

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::collections::BTreeMap;
    use std::rc::Rc;

    use super::*;

    type Probes = Core<u32, Registered, &'static str>;

    /// Counts how many requests are registered, as the real thing would.
    #[derive(Debug)]
    struct Registered(Rc<RefCell<usize>>);

    impl Drop for Registered {
        fn drop(&mut self) {
            *self.0.borrow_mut() -= 1;
        }
    }

    /// A core with a clock and a book of registrations.
    struct Bench {
        core: Probes,
        start: Instant,
        registered: Rc<RefCell<usize>>,
        next_id: u32,
    }

    impl Bench {
        fn new(limits: Limits) -> Bench {
            let registered = Rc::new(RefCell::new(0));
            Bench { core: Core::new(limits), start: Instant::now(), registered, next_id: 0 }
        }

        fn at(&self, seconds: f64) -> Instant {
            self.start + Duration::from_secs_f64(seconds)
        }

        fn ask(&mut self, key: &Key, now: Instant) -> u32 {
            self.next_id += 1;
            *self.registered.borrow_mut() += 1;
            let registration = Registered(self.registered.clone());
            self.core.asked(key, self.next_id, registration, now);
            self.next_id
        }

        fn registered(&self) -> usize {
            *self.registered.borrow()
        }
    }

    fn key(name: &str, generation: u64) -> Key {
        Key { identity: Identity::parse(name).unwrap(), generation }
    }

    const LIMITS: Limits = Limits {
        quick_max: 2,
        silent_max: 3,
        timeout: Duration::from_secs(3),
        held_bytes_max: 100,
    };

    #[test]
    fn an_answer_is_held_until_the_node_is_taken() {
        let mut bench = Bench::new(LIMITS);
        let now = bench.start;
        let id = bench.ask(&key("a", 1), now);
        assert!(!bench.core.has_answered());
        assert_eq!(bench.core.answered(id, "inventory", 9, now), Heard::Held);
        assert!(bench.core.has_answered());
        let taken = bench.core.take(now).unwrap();
        assert_eq!(taken.key, key("a", 1));
        assert_eq!(taken.held.as_ref().unwrap().2, "inventory");
        assert_eq!(bench.registered(), 1, "the request stays registered in the worker's hands");
        assert!(bench.core.take(now).is_none());
        assert_eq!(bench.core.answered(id, "inventory", 9, now), Heard::Unknown);
    }

    #[test]
    fn nodes_are_taken_in_the_order_of_their_answers() {
        let mut bench = Bench::new(Limits { quick_max: 9, ..LIMITS });
        let now = bench.start;
        let ids: Vec<u32> = ["a", "b", "c"].iter().map(|n| bench.ask(&key(n, 1), now)).collect();
        for id in [ids[2], ids[0], ids[1]] {
            bench.core.answered(id, "x", 1, now);
        }
        let order: Vec<Key> =
            std::iter::from_fn(|| bench.core.take(now)).map(|taken| taken.key).collect();
        assert_eq!(order, [key("c", 1), key("a", 1), key("b", 1)]);
    }

    #[test]
    fn a_silent_node_is_asked_once_more_and_is_then_unreachable() {
        let mut bench = Bench::new(LIMITS);
        bench.ask(&key("a", 1), bench.at(0.0));
        assert_eq!(bench.core.expire(true, bench.at(2.9)), []);
        assert_eq!(bench.core.expire(true, bench.at(3.0)), [Expired::Again(key("a", 1))]);
        bench.ask(&key("a", 1), bench.at(3.0));
        assert_eq!(bench.core.expire(true, bench.at(5.9)), []);
        assert_eq!(bench.core.expire(true, bench.at(6.0)), [Expired::Unreachable(key("a", 1))]);
        assert_eq!(bench.core.asked_len(), 0);
    }

    #[test]
    fn the_answer_to_either_request_counts() {
        for first in [true, false] {
            let mut bench = Bench::new(LIMITS);
            let one = bench.ask(&key("a", 1), bench.at(0.0));
            bench.core.expire(true, bench.at(3.0));
            let two = bench.ask(&key("a", 1), bench.at(3.0));
            let id = if first { one } else { two };
            assert_eq!(bench.core.answered(id, "x", 1, bench.at(4.0)), Heard::Held);
            assert!(bench.core.take(bench.at(4.0)).unwrap().held.is_some());
            assert_eq!(bench.core.expire(true, bench.at(60.0)), []);
        }
    }

    #[test]
    fn an_answer_after_the_end_is_late_for_22_seconds_and_counts_once() {
        let mut bench = Bench::new(LIMITS);
        let one = bench.ask(&key("a", 1), bench.at(0.0));
        bench.core.expire(true, bench.at(3.0));
        let two = bench.ask(&key("a", 1), bench.at(3.0));
        bench.core.expire(true, bench.at(6.0));
        assert_eq!(bench.registered(), 2);
        let identity = key("a", 1).identity;
        let late = |answer| Heard::Late { identity: identity.clone(), answer };
        assert_eq!(bench.core.answered(one, "forged", 6, bench.at(21.0)), late("forged"));
        assert_eq!(bench.core.answered(one, "x", 1, bench.at(21.0)), late("x"));
        bench.core.forget_late(one);
        assert_eq!(bench.core.answered(one, "x", 1, bench.at(21.0)), Heard::Unknown);
        bench.core.expire(true, bench.at(24.9));
        assert_eq!(bench.registered(), 1);
        bench.core.expire(true, bench.at(25.0));
        assert_eq!(bench.registered(), 0);
        assert_eq!(bench.core.answered(two, "x", 1, bench.at(25.0)), Heard::Unknown);
    }

    #[test]
    fn no_responders_ends_a_probe_at_once_but_not_one_that_was_answered() {
        let mut bench = Bench::new(LIMITS);
        let now = bench.start;
        let gone = bench.ask(&key("gone", 1), now);
        assert_eq!(bench.core.no_responders(gone, now), Some(key("gone", 1)));
        assert_eq!(bench.core.no_responders(gone, now), None);
        let here = bench.ask(&key("here", 1), now);
        bench.core.answered(here, "x", 1, now);
        assert_eq!(bench.core.no_responders(here, now), None);
        assert_eq!(bench.core.no_responders(99, now), None);
    }

    #[test]
    fn quick_and_answered_nodes_share_one_bound_and_silent_ones_have_their_own() {
        let mut bench = Bench::new(LIMITS);
        let one = bench.ask(&key("one", 1), bench.at(0.0));
        assert!(bench.core.has_room());
        bench.ask(&key("two", 1), bench.at(0.0));
        assert!(!bench.core.has_room());
        bench.core.answered(one, "x", 1, bench.at(0.1));
        assert!(!bench.core.has_room(), "an answered node counts until it is taken");
        bench.core.take(bench.at(0.2));
        assert!(bench.core.has_room());
        bench.ask(&key("three", 1), bench.at(0.5));
        assert!(!bench.core.has_room());
        bench.core.expire(true, bench.at(1.0));
        assert!(bench.core.has_room(), "`two` is silent now");
        bench.ask(&key("four", 1), bench.at(1.0));
        bench.core.expire(true, bench.at(2.0));
        bench.ask(&key("five", 1), bench.at(2.0));
        bench.ask(&key("six", 1), bench.at(2.0));
        bench.core.expire(true, bench.at(2.9));
        assert!(!bench.core.has_room());
        // `two`, `three`, `four`, `five` and `six` are all silent: two more than there may be.
        assert_eq!(bench.core.expire(true, bench.at(3.0)), [Expired::Again(key("two", 1))]);
        assert!(!bench.core.has_room(), "the overflow of silent nodes stops new requests");
    }

    #[test]
    fn a_second_request_to_a_silent_node_takes_no_room_from_quick_ones() {
        let mut bench = Bench::new(Limits { quick_max: 1, ..LIMITS });
        bench.ask(&key("a", 1), bench.at(0.0));
        bench.core.expire(true, bench.at(3.0));
        bench.ask(&key("a", 1), bench.at(3.0));
        assert!(bench.core.has_room());
    }

    #[test]
    fn answers_beyond_the_memory_for_them_are_dropped_and_asked_for_again() {
        let mut bench = Bench::new(Limits { quick_max: 9, ..LIMITS });
        let now = bench.start;
        let (a, b) = (bench.ask(&key("a", 1), now), bench.ask(&key("b", 1), now));
        assert_eq!(bench.core.answered(a, "x", 60, now), Heard::Held);
        assert_eq!(bench.core.answered(b, "x", 41, now), Heard::TooMuchHeld);
        assert!(bench.core.take(now).unwrap().held.is_some());
        let taken = bench.core.take(now).unwrap();
        assert_eq!((taken.key, taken.held.is_none()), (key("b", 1), true));
        let c = bench.ask(&key("c", 1), now);
        assert_eq!(bench.core.answered(c, "x", 100, now), Heard::Held, "the memory is free again");
    }

    #[test]
    fn an_answer_held_too_long_is_asked_for_again() {
        let mut bench = Bench::new(LIMITS);
        let id = bench.ask(&key("a", 1), bench.at(0.0));
        bench.core.answered(id, "x", 1, bench.at(0.0));
        let taken = bench.core.take(bench.at(61.0)).unwrap();
        assert!(taken.held.is_none());
        assert_eq!(bench.registered(), 0);
    }

    #[test]
    fn the_first_answer_counts_and_further_ones_are_no_news() {
        let mut bench = Bench::new(LIMITS);
        let now = bench.start;
        let id = bench.ask(&key("a", 1), now);
        bench.core.answered(id, "x", 90, now);
        assert_eq!(bench.core.answered(id, "y", 90, now), Heard::Further);
        assert_eq!(bench.core.take(now).unwrap().held.unwrap().2, "x");
    }

    #[test]
    fn a_node_that_started_anew_is_asked_again_before_any_other() {
        let mut bench = Bench::new(LIMITS);
        let now = bench.start;
        let old = bench.ask(&key("a", 1), now);
        bench.core.answered(old, "old", 100, now);
        assert!(bench.core.ask_again(&key("a", 1)));
        assert!(bench.core.ask_again(&key("a", 1)));
        assert!(!bench.core.ask_again(&key("stranger", 1)));
        assert!(!bench.core.has_answered());
        assert_eq!(bench.registered(), 0);
        assert_eq!(bench.core.next_to_ask(), Some(key("a", 1)));
        let new = bench.ask(&key("a", 1), now);
        assert_eq!(bench.core.next_to_ask(), None);
        assert_eq!(bench.core.answered(old, "old", 3, now), Heard::Unknown);
        assert_eq!(bench.core.answered(new, "new", 3, now), Heard::Held);
        assert_eq!(bench.core.take(now).unwrap().held.unwrap().2, "new");
    }

    #[test]
    fn a_storm_of_events_is_no_storm_of_requests() {
        let mut bench = Bench::new(LIMITS);
        bench.ask(&key("a", 1), bench.at(0.0));
        assert!(bench.core.ask_again(&key("a", 1)));
        assert_eq!(bench.core.next_to_ask(), None, "asked a moment ago");
        bench.core.expire(true, bench.at(1.0));
        assert!(bench.core.ask_again(&key("a", 1)));
        assert_eq!(bench.core.next_to_ask(), Some(key("a", 1)));
    }

    #[test]
    fn what_a_node_that_restarts_for_ever_leaves_behind_is_bounded() {
        let mut bench = Bench::new(LIMITS);
        for n in 0..10_000 {
            let now = bench.at(f64::from(n) / 1000.0);
            bench.core.expire(true, now);
            let id = bench.ask(&key("a", 1), now);
            bench.core.answered(id, "x", 1, now);
            bench.core.ask_again(&key("a", 1));
            assert_eq!(bench.core.next_to_ask(), Some(key("a", 1)));
        }
        let core = &bench.core;
        let lens = [core.answered.len(), core.to_ask.len(), core.late.len(), core.requests.len()];
        assert!(lens.iter().all(|len| *len < 200), "{lens:?}");
        assert!(core.asked.len() <= 3001 && core.quick.len() <= 3001);
    }

    #[test]
    fn silence_behind_a_closed_gate_counts_for_nothing() {
        let mut bench = Bench::new(LIMITS);
        bench.ask(&key("a", 1), bench.at(0.0));
        bench.core.expire(true, bench.at(3.0));
        bench.ask(&key("a", 1), bench.at(3.0));
        assert_eq!(bench.core.expire(false, bench.at(6.0)), []);
        assert_eq!(bench.core.next_to_ask(), Some(key("a", 1)));
        bench.ask(&key("a", 1), bench.at(7.0));
        assert_eq!(bench.core.expire(true, bench.at(10.0)), [Expired::Again(key("a", 1))]);
    }

    #[test]
    fn after_a_lost_connection_all_that_were_asked_are_asked_afresh() {
        let mut bench = Bench::new(Limits { quick_max: 9, ..LIMITS });
        let now = bench.start;
        bench.ask(&key("a", 1), now);
        let held = bench.ask(&key("b", 1), now);
        bench.core.answered(held, "x", 1, now);
        bench.core.reset();
        assert_eq!(bench.core.next_to_ask(), Some(key("a", 1)));
        assert_eq!((bench.core.asked_len(), bench.core.answered_len()), (0, 1));
    }

    #[test]
    fn a_node_that_could_not_be_asked_goes_first() {
        let mut bench = Bench::new(LIMITS);
        let now = bench.start;
        assert_eq!(bench.core.put_back(&key("a", 1), now), None);
        assert_eq!(bench.core.put_back(&key("b", 1), now), None);
        assert_eq!(bench.core.put_back(&key("a", 1), now), None);
        assert_eq!(bench.core.next_to_ask(), Some(key("a", 1)));
        bench.ask(&key("b", 1), now);
        assert_eq!(bench.core.next_to_ask(), Some(key("a", 1)));
        bench.ask(&key("a", 1), now);
        assert_eq!(bench.core.next_to_ask(), None);
    }

    #[test]
    fn an_entry_that_is_still_in_its_queue_is_not_here_as_well() {
        let mut bench = Bench::new(LIMITS);
        let id = bench.ask(&key("a", 1), bench.start);
        assert!(!bench.core.ask_again(&key("a", 2)));
        bench.core.answered(id, "x", 1, bench.start);
        assert!(!bench.core.ask_again(&key("a", 2)));
        assert_eq!(bench.core.take(bench.start).unwrap().key, key("a", 1));
    }

    #[test]
    fn a_newer_entry_of_a_node_replaces_the_older() {
        let mut bench = Bench::new(LIMITS);
        let now = bench.start;
        let old = bench.ask(&key("a", 1), now);
        bench.next_id += 1;
        *bench.registered.borrow_mut() += 1;
        let registration = Registered(bench.registered.clone());
        let new = bench.next_id;
        assert_eq!(bench.core.asked(&key("a", 2), new, registration, now), Some(key("a", 1)));
        let late = Heard::Late { identity: key("a", 1).identity, answer: "x" };
        assert_eq!(bench.core.answered(old, "x", 1, now), late);
        assert_eq!(bench.core.answered(new, "x", 1, now), Heard::Held);
        assert_eq!(bench.core.take(now).unwrap().key, key("a", 2));
    }

    #[test]
    fn retries_get_every_twentieth_turn() {
        let mut core = Bench::new(LIMITS).core;
        let turns: Vec<Turn> = (0..40)
            .map(|_| {
                let turn = core.turn();
                core.turn_taken();
                turn
            })
            .collect();
        let retries: Vec<usize> = (0..40).filter(|n| turns[*n] == Turn::Retry).collect();
        assert_eq!(retries, [19, 39]);
    }

    /// What the world did with a key so far.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    enum Fate {
        Inside,
        Taken,
        Unreachable,
        Dropped,
    }

    /// Random answers, silences, restarts, pauses and lost connections; checked after every step.
    #[test]
    fn bounds_hold_and_every_node_ends_exactly_once() {
        for seed in 0..400 {
            let mut random = fastrand::Rng::with_seed(seed);
            let limits = Limits {
                quick_max: random.usize(1..9),
                silent_max: random.usize(1..9),
                timeout: Duration::from_millis(random.u64(100..4000)),
                held_bytes_max: random.usize(50..200),
            };
            let mut bench = Bench::new(limits);
            let mut fates: BTreeMap<(String, u64), Fate> = BTreeMap::new();
            let name = |key: &Key| (format!("{:?}", key.identity), key.generation);
            let end = |fates: &mut BTreeMap<(String, u64), Fate>, key: &Key, fate: Fate| {
                let before = fates.insert(name(key), fate);
                assert_eq!(before, Some(Fate::Inside), "seed {seed}: {key:?} ended twice");
            };
            let mut now = bench.start;
            let (mut generation, mut open) = (0, true);
            // The last steps only let time pass, so that everything ends.
            for step in 0..600 {
                let ending = step > 400;
                now += Duration::from_millis(random.u64(1..if ending { 3000 } else { 400 }));
                open = if ending { true } else { open ^ (random.u8(0..20) == 0) };
                for expired in bench.core.expire(open, now) {
                    match expired {
                        Expired::Unreachable(key) => end(&mut fates, &key, Fate::Unreachable),
                        Expired::Again(key) if random.bool() => drop(bench.ask(&key, now)),
                        Expired::Again(key) => assert_eq!(bench.core.put_back(&key, now), None),
                    }
                }
                while open && bench.core.has_room() {
                    let again = bench.core.next_to_ask();
                    if again.is_none() && (ending || random.bool()) {
                        break;
                    }
                    let key = again.unwrap_or_else(|| {
                        generation += 1;
                        let key = key(&format!("n{}", random.u8(0..30)), generation);
                        fates.insert(name(&key), Fate::Inside);
                        key
                    });
                    let dropped = if random.u8(0..8) == 0 {
                        let dropped = bench.core.put_back(&key, now);
                        if let Some(dropped) = dropped {
                            end(&mut fates, &dropped, Fate::Dropped);
                        }
                        break;
                    } else {
                        bench.next_id += 1;
                        *bench.registered.borrow_mut() += 1;
                        let registration = Registered(bench.registered.clone());
                        bench.core.asked(&key, bench.next_id, registration, now)
                    };
                    if let Some(dropped) = dropped {
                        end(&mut fates, &dropped, Fate::Dropped);
                    }
                }
                let id = bench.next_id.saturating_sub(random.u32(0..20));
                match random.u8(0..8) {
                    _ if ending => {}
                    0..=3 => {
                        bench.core.answered(id, "x", random.usize(0..60), now);
                    }
                    4 => {
                        if let Some(key) = bench.core.no_responders(id, now) {
                            end(&mut fates, &key, Fate::Unreachable);
                        }
                    }
                    5 => {
                        let inside: Vec<_> =
                            fates.iter().filter(|(_, fate)| **fate == Fate::Inside).collect();
                        if let Some(((_, generation), _)) = random.choice(inside) {
                            let generation = *generation;
                            let found = bench
                                .core
                                .probes
                                .values()
                                .find(|probe| probe.key.generation == generation)
                                .map(|probe| probe.key.clone());
                            assert!(bench.core.ask_again(&found.unwrap()), "seed {seed}");
                        }
                    }
                    6 if random.u8(0..5) == 0 => bench.core.reset(),
                    _ => {}
                }
                if random.bool() || ending {
                    if let Some(taken) = bench.core.take(now) {
                        end(&mut fates, &taken.key, Fate::Taken);
                    }
                }
                bench.check(seed, &fates);
            }
            assert!(fates.values().all(|fate| *fate != Fate::Inside), "seed {seed}: nodes lost");
            bench.core.expire(true, now + LATE_MAX);
            assert_eq!(bench.registered(), 0, "seed {seed}: requests stay registered");
            assert!(bench.core.requests.is_empty(), "seed {seed}");
            assert_eq!(bench.core.next_due(), None, "seed {seed}");
        }
    }

    impl<I: Copy + Eq + Hash, R, A> Core<I, R, A> {
        /// Panics unless probes, counts and bounds agree.
        #[track_caller]
        pub fn check(&self) {
            let (mut quick, mut silent, mut answered, mut bytes) = (0, 0, 0, 0);
            for probe in self.probes.values() {
                assert!(probe.sent.len() <= usize::from(ASKS_MAX));
                match &probe.state {
                    State::ToAsk => {}
                    State::Asked { silent: false } => quick += 1,
                    State::Asked { silent: true } => silent += 1,
                    State::Answered { held, .. } => {
                        answered += 1;
                        bytes += held.as_ref().map_or(0, |(.., bytes)| *bytes);
                    }
                }
            }
            let counted = (self.asked_quick_len, self.asked_silent_len, self.answered_len);
            assert_eq!((quick, silent, answered), counted);
            assert_eq!(bytes, self.held_bytes);
            // A silent node that answers moves over without being asked anew, so only the sum is bounded.
            let most = self.limits.quick_max + self.limits.silent_max;
            assert!(quick + silent + answered <= most);
            assert!(bytes <= self.limits.held_bytes_max);
            self.check_memory();
        }

        /// Whatever has ended is forgotten, and the lists hold little that is out of date.
        fn check_memory(&self) {
            let live: usize = self.probes.values().map(|probe| probe.sent.len()).sum();
            assert_eq!(self.requests.len(), live + self.late.len(), "requests that nobody has");
            assert!(self.late.len() <= LATE_LEN_MAX);
            let answered_max = 2 * self.limits.quick_max + TIDY_LEN;
            assert!(self.answered.len() <= answered_max, "{} answers", self.answered.len());
        }

        /// The queue elements that are here.
        pub fn keys(&self) -> impl Iterator<Item = &Key> {
            self.probes.values().map(|probe| &probe.key)
        }

        /// Requests remembered for a late answer.
        pub fn late_len(&self) -> usize {
            self.late.len()
        }
    }

    impl Bench {
        #[track_caller]
        fn check(&self, seed: u64, fates: &BTreeMap<(String, u64), Fate>) {
            let core = &self.core;
            let inside = fates.values().filter(|fate| **fate == Fate::Inside).count();
            assert_eq!(core.probes.len(), inside, "seed {seed}: a node was lost");
            core.check();
            assert!(core.requests.len() <= self.registered(), "seed {seed}");
        }
    }
}
