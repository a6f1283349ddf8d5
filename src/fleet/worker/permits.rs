//! How many nodes are worked on at once: a core without clock and I/O.
//!
//! `active_max` permits, one for each node that is worked on. A node that we wait for gives its permit back and asks for
//! one when it has answered; those that ask are served first, in their order. There are `nodes_max` seats for nodes in
//! any state; when a node waits for one and all are used up, the longest silent node is given up. One that merely rests,
//! because it is a little slow or is to be asked again in a moment, is not.

use std::collections::{BTreeMap, VecDeque};
use std::iter;
use std::time::Instant;

/// Names one node in hand; never used twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Seat(u64);

/// Who is worked on, who is silent, and who waits for a permit.
#[derive(Debug)]
pub struct Permits {
    active_max: usize,
    nodes_max: usize,
    seats: BTreeMap<Seat, State>,
    active_len: usize,
    returning: VecDeque<Seat>,
    next: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Active,
    Resting,
    Silent(Instant),
    Returning,
    GivenUp,
}

/// Whether one more node may be taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// It may, and has this seat and a permit.
    Taken(Seat),
    /// All permits are in use.
    Full,
    /// All seats are in use: this node has been given up for the one that waits. Its seat is free when it has ended.
    GiveUp(Seat),
}

/// Whether a node that was silent may go on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answered {
    /// It has a permit again.
    GoOn,
    /// It waits until a permit is free.
    Wait,
    /// It has been given up.
    GivenUp,
}

impl Permits {
    /// `active_max` permits and `nodes_max` seats, at least one of each.
    pub fn new(active_max: usize, nodes_max: usize) -> Permits {
        let active_max = active_max.max(1);
        Permits {
            active_max,
            nodes_max: nodes_max.max(active_max),
            seats: BTreeMap::new(),
            active_len: 0,
            returning: VecDeque::new(),
            next: 0,
        }
    }

    /// Changes the number of permits; those in use beyond it are not taken away, but not passed on either. Returns whom free
    /// ones go to.
    pub fn resize(&mut self, active_max: usize) -> Vec<Seat> {
        self.active_max = active_max.max(1);
        iter::from_fn(|| self.pass_on()).collect()
    }

    /// Changes the number of seats; nodes that have one keep it.
    pub fn limit(&mut self, nodes_max: usize) {
        self.nodes_max = nodes_max;
    }

    /// Whether [`Permits::take`] would give a seat if there were `nodes_max`.
    pub fn could_take(&self, nodes_max: usize) -> bool {
        self.active_len < self.active_max && self.seats.len() < nodes_max
    }

    /// Asks for a permit and a seat for a node that waits to be taken.
    pub fn take(&mut self) -> Verdict {
        if self.active_len >= self.active_max {
            return Verdict::Full;
        }
        if self.seats.len() < self.nodes_max {
            let seat = Seat(self.next);
            self.next += 1;
            self.seats.insert(seat, State::Active);
            self.active_len += 1;
            return Verdict::Taken(seat);
        }
        // One at a time: the seat comes free within moments, and more may not be needed.
        if self.seats.values().any(|state| *state == State::GivenUp) {
            return Verdict::Full;
        }
        let silent = self.seats.iter().filter_map(|(seat, state)| match state {
            State::Silent(since) => Some((*since, *seat)),
            State::Active | State::Resting | State::Returning | State::GivenUp => None,
        });
        let Some((_, longest)) = silent.min() else { return Verdict::Full };
        self.seats.insert(longest, State::GivenUp);
        Verdict::GiveUp(longest)
    }

    /// There is nothing to do for the node right now: it gives its permit back. Returns whom the permit goes to.
    pub fn rest(&mut self, seat: Seat) -> Option<Seat> {
        self.leave(seat, State::Resting)
    }

    /// The node has been silent for a while and may be given up. Returns whom its permit goes to, if it had one.
    pub fn silent(&mut self, seat: Seat, now: Instant) -> Option<Seat> {
        self.leave(seat, State::Silent(now))
    }

    fn leave(&mut self, seat: Seat, to: State) -> Option<Seat> {
        let state = self.seats.get_mut(&seat)?;
        match *state {
            State::Active => {
                *state = to;
                self.active_len -= 1;
                self.pass_on()
            }
            State::Resting => {
                *state = to;
                None
            }
            State::Silent(_) | State::Returning | State::GivenUp => None,
        }
    }

    /// The node has answered, or is to be called again.
    pub fn answered(&mut self, seat: Seat) -> Answered {
        let Some(state) = self.seats.get_mut(&seat) else { return Answered::GivenUp };
        match state {
            State::Active => Answered::GoOn,
            State::GivenUp => Answered::GivenUp,
            State::Returning => Answered::Wait,
            State::Resting | State::Silent(_) if self.active_len < self.active_max => {
                *state = State::Active;
                self.active_len += 1;
                Answered::GoOn
            }
            State::Resting | State::Silent(_) => {
                *state = State::Returning;
                self.returning.push_back(seat);
                Answered::Wait
            }
        }
    }

    /// The node's attempt has ended, whatever its state. Returns whom its permit goes to.
    pub fn end(&mut self, seat: Seat) -> Option<Seat> {
        match self.seats.remove(&seat)? {
            State::Active => self.active_len -= 1,
            State::Returning => self.returning.retain(|other| *other != seat),
            State::Resting | State::Silent(_) | State::GivenUp => {}
        }
        self.pass_on()
    }

    /// Nodes with a permit.
    pub fn active_len(&self) -> usize {
        self.active_len
    }

    /// Nodes with a seat: so many threads are needed.
    pub fn nodes_len(&self) -> usize {
        self.seats.len()
    }

    /// A permit is free for whoever waits longest for one.
    fn pass_on(&mut self) -> Option<Seat> {
        if self.active_len >= self.active_max {
            return None;
        }
        let seat = self.returning.pop_front()?;
        self.seats.insert(seat, State::Active);
        self.active_len += 1;
        Some(seat)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[track_caller]
    fn taken(permits: &mut Permits) -> Seat {
        match permits.take() {
            Verdict::Taken(seat) => seat,
            other => panic!("not taken: {other:?}"),
        }
    }

    #[test]
    fn no_more_nodes_are_worked_on_than_there_are_permits() {
        let mut permits = Permits::new(2, 16);
        let first = taken(&mut permits);
        taken(&mut permits);
        assert_eq!(permits.take(), Verdict::Full);
        assert_eq!(permits.end(first), None);
        taken(&mut permits);
        assert_eq!(permits.take(), Verdict::Full);
    }

    #[test]
    fn a_silent_node_makes_room_and_comes_back_when_a_permit_is_free() {
        let now = Instant::now();
        let mut permits = Permits::new(1, 8);
        let slow = taken(&mut permits);
        assert_eq!(permits.silent(slow, now), None);
        let quick = taken(&mut permits);
        assert_eq!(permits.answered(slow), Answered::Wait);
        assert_eq!(permits.take(), Verdict::Full);
        assert_eq!(permits.end(quick), Some(slow), "who waits with a node in hand goes first");
        assert_eq!(permits.answered(slow), Answered::GoOn);
        assert_eq!(permits.take(), Verdict::Full);
    }

    #[test]
    fn a_resting_node_makes_room_and_is_not_given_up_for_it() {
        let mut permits = Permits::new(1, 2);
        let resting = taken(&mut permits);
        assert_eq!(permits.rest(resting), None);
        let other = taken(&mut permits);
        assert_eq!(permits.rest(other), None);
        assert_eq!(permits.take(), Verdict::Full, "all seats are used, and nobody is silent");
        permits.silent(other, Instant::now());
        assert_eq!(permits.active_len(), 0, "its permit was given back before");
        assert_eq!(permits.take(), Verdict::GiveUp(other));
        assert_eq!(permits.answered(resting), Answered::GoOn);
    }

    #[test]
    fn a_silent_node_goes_on_at_once_while_a_permit_is_free() {
        let mut permits = Permits::new(1, 8);
        let seat = taken(&mut permits);
        permits.silent(seat, Instant::now());
        assert_eq!(permits.answered(seat), Answered::GoOn);
        assert_eq!(permits.active_len(), 1);
    }

    #[test]
    fn nodes_that_answered_get_permits_in_their_order() {
        let now = Instant::now();
        let mut permits = Permits::new(1, 8);
        let a = taken(&mut permits);
        permits.silent(a, now);
        let b = taken(&mut permits);
        permits.silent(b, now);
        let c = taken(&mut permits);
        assert_eq!(permits.answered(b), Answered::Wait);
        assert_eq!(permits.answered(a), Answered::Wait);
        assert_eq!(permits.silent(c, now), Some(b));
        assert_eq!(permits.end(b), Some(a));
    }

    #[test]
    fn the_longest_silent_node_is_given_up_when_all_seats_are_used_and_one_waits() {
        let start = Instant::now();
        let mut permits = Permits::new(1, 3);
        let seats: Vec<Seat> = (0..3)
            .map(|n| {
                let seat = taken(&mut permits);
                // The second one fell silent first.
                permits.silent(seat, start + Duration::from_secs([2, 1, 3][n]));
                seat
            })
            .collect();
        assert_eq!(permits.take(), Verdict::GiveUp(seats[1]));
        assert_eq!(permits.take(), Verdict::Full, "one is given up at a time");
        assert_eq!(permits.answered(seats[1]), Answered::GivenUp);
        assert_eq!(permits.end(seats[1]), None);
        taken(&mut permits);
    }

    #[test]
    fn nobody_is_given_up_while_all_permits_are_in_use() {
        let mut permits = Permits::new(1, 2);
        let silent = taken(&mut permits);
        permits.silent(silent, Instant::now());
        taken(&mut permits);
        assert_eq!(permits.take(), Verdict::Full);
        assert_eq!(permits.answered(silent), Answered::Wait);
    }

    #[test]
    fn an_attempt_may_end_in_any_state() {
        let now = Instant::now();
        let mut permits = Permits::new(1, 8);
        let silent = taken(&mut permits);
        permits.silent(silent, now);
        let waiting = taken(&mut permits);
        permits.silent(waiting, now);
        let active = taken(&mut permits);
        permits.answered(waiting);
        assert_eq!(permits.end(waiting), None);
        assert_eq!(permits.end(silent), None);
        assert_eq!(permits.end(active), None, "nobody waits any more");
        assert_eq!(permits.end(active), None, "an end counts once");
        assert_eq!((permits.active_len(), permits.nodes_len()), (0, 0));
    }

    #[test]
    fn more_permits_go_to_those_who_wait_and_fewer_are_not_taken_away() {
        let now = Instant::now();
        let mut permits = Permits::new(1, 8);
        let slow = [(); 3].map(|()| {
            let seat = taken(&mut permits);
            permits.silent(seat, now);
            seat
        });
        let busy = taken(&mut permits);
        for seat in slow {
            assert_eq!(permits.answered(seat), Answered::Wait);
        }
        assert_eq!(permits.resize(3), slow[..2]);
        assert_eq!(permits.take(), Verdict::Full);
        assert_eq!(permits.resize(1), []);
        assert_eq!(permits.active_len(), 3, "they go on");
        assert_eq!(permits.end(busy), None);
        assert_eq!(permits.end(slow[0]), None, "one works still");
        assert_eq!(permits.end(slow[1]), Some(slow[2]));
    }

    /// Random nodes under a virtual clock, checked after every step.
    #[test]
    fn bounds_hold_and_nobody_waits_beside_a_free_permit() {
        for seed in 0..300 {
            let mut random = fastrand::Rng::with_seed(seed);
            let mut active_max = random.usize(1..5);
            let nodes_max = active_max * random.usize(1..9);
            let mut permits = Permits::new(active_max, nodes_max);
            let mut now = Instant::now();
            let mut nodes: BTreeMap<Seat, Believed> = BTreeMap::new();
            for _ in 0..500 {
                now += Duration::from_millis(random.u64(1..2000));
                let before = nodes.values().filter(|node| **node == Believed::Active).count();
                if random.u8(0..50) == 0 {
                    active_max = random.usize(1..=nodes_max);
                    for seat in permits.resize(active_max) {
                        assert_eq!(nodes.insert(seat, Believed::Active), Some(Believed::Waits));
                    }
                }
                let any = random.usize(0..nodes.len().max(1));
                let pick = nodes.keys().copied().nth(any);
                let granted = match (random.u8(0..8), pick) {
                    (0 | 1, _) | (_, None) => {
                        match permits.take() {
                            Verdict::Taken(seat) => {
                                assert_eq!(nodes.insert(seat, Believed::Active), None);
                            }
                            Verdict::Full => {}
                            Verdict::GiveUp(seat) => {
                                let Some(Believed::Silent(since)) = nodes.get(&seat).copied()
                                else {
                                    panic!("seed {seed}: gave up a node that is not silent");
                                };
                                for other in nodes.values() {
                                    if let Believed::Silent(other) = other {
                                        assert!(since <= *other, "seed {seed}: not the longest");
                                    }
                                }
                                assert_eq!(nodes.len(), nodes_max, "seed {seed}: seats were free");
                                nodes.insert(seat, Believed::GivenUp);
                            }
                        }
                        None
                    }
                    (2 | 3, Some(seat))
                        if matches!(nodes[&seat], Believed::Active | Believed::Resting) =>
                    {
                        nodes.insert(seat, Believed::Silent(now));
                        permits.silent(seat, now)
                    }
                    (4 | 5, Some(seat)) if nodes[&seat] == Believed::Active => {
                        nodes.insert(seat, Believed::Resting);
                        permits.rest(seat)
                    }
                    (6, Some(seat))
                        if matches!(nodes[&seat], Believed::Silent(_) | Believed::Resting) =>
                    {
                        match permits.answered(seat) {
                            Answered::GoOn => nodes.insert(seat, Believed::Active),
                            Answered::Wait => nodes.insert(seat, Believed::Waits),
                            Answered::GivenUp => panic!("seed {seed}: given up in silence"),
                        };
                        None
                    }
                    (_, Some(seat)) => {
                        nodes.remove(&seat);
                        permits.end(seat)
                    }
                };
                if let Some(seat) = granted {
                    assert_eq!(nodes.insert(seat, Believed::Active), Some(Believed::Waits));
                }
                let active = nodes.values().filter(|node| **node == Believed::Active).count();
                let waits = nodes.values().any(|node| *node == Believed::Waits);
                assert_eq!(active, permits.active_len(), "seed {seed}");
                assert_eq!(nodes.len(), permits.nodes_len(), "seed {seed}");
                // After there were more permits, there may be more active nodes for a while, but never another one.
                assert!(active <= active_max.max(before), "seed {seed}");
                assert!(nodes.len() <= nodes_max, "seed {seed}");
                assert!(!waits || active >= active_max, "seed {seed}: a permit lies idle");
            }
        }
    }

    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    enum Believed {
        Active,
        Resting,
        Silent(Instant),
        Waits,
        GivenUp,
    }
}
