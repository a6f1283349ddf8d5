//! Probes under a clock of the test's own.

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

const LIMITS: Limits =
    Limits { quick_max: 2, silent_max: 3, timeout: Duration::from_secs(3), held_bytes_max: 100 };

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
