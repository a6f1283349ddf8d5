//! What a daemon with an election says to its peers, and what it makes of theirs. No clock, no I/O.
//!
//! It says who it is at the start and when its role changes, and answers those for whom that matters: daemons without an
//! election, which must not provision beside a leader, and a younger one with its own identity and caller. Whoever is the
//! younger one goes on saying that it is there, to hear whether the older one still is. Everybody says so now and then all
//! the same: brokers that lost each other for a moment pass nothing on, and two that are the same must not miss each other
//! for good.

use std::time::Duration;

use crate::clock::BootTime;
use crate::fleet::peers::core::BEAT_EVERY;
use crate::fleet::peers::table::{Change, Peer, Table};
use crate::protocol::Sender;
use crate::protocol::ksuid::Ksuid;
use crate::protocol::peer::{Heartbeat, Role};

/// Least time between two answers: anyone may ask for one.
const ANSWER_EVERY: Duration = Duration::from_secs(1);

/// How often we say who we are though nothing has changed and nobody asks.
const REMIND_EVERY: Duration = Duration::from_secs(10);

/// One candidate among its peers.
#[derive(Debug)]
pub struct Presence {
    instance: Ksuid,
    us: Sender,
    role: Role,
    table: Table,
    is_connected: bool,
    last_number: u64,
    last_beat: Option<BootTime>,
    next_beat: Option<BootTime>,
}

impl Presence {
    /// A candidate without a connection.
    pub fn new(instance: Ksuid, us: Sender) -> Presence {
        Presence {
            instance,
            us,
            role: Role::Candidate,
            table: Table::default(),
            is_connected: false,
            last_number: 0,
            last_beat: None,
            next_beat: None,
        }
    }

    /// There is a connection, and this is who we are, or there is none.
    pub fn link(&mut self, sender: Option<Sender>, now: BootTime) {
        self.is_connected = sender.is_some();
        if let Some(sender) = sender {
            self.us = sender;
            self.next_beat = Some(now);
        }
    }

    /// What we are from now on.
    pub fn play(&mut self, role: Role, now: BootTime) {
        if role != self.role {
            self.role = role;
            self.next_beat = Some(now);
        }
    }

    /// Takes what was heard. Tells of a peer that shares the nodes with others instead of being elected, the first time.
    pub fn hear(&mut self, beat: &Heartbeat, now: BootTime) -> Option<Peer> {
        if beat.instance == self.instance {
            return None;
        }
        let change = self.table.hear(beat, now);
        let is_younger_twin = beat.sender == self.us && beat.instance > self.instance;
        if (is_younger_twin || beat.role == Role::Active) && !beat.leaving {
            let answer = self.last_beat.map_or(now, |last| now.max(last + ANSWER_EVERY));
            self.next_beat = Some(self.next_beat.map_or(answer, |next| next.min(answer)));
        }
        match change {
            Change::Joined(peer) if peer.role == Role::Active => Some(peer),
            _ => None,
        }
    }

    /// What is due at `now`, if there is something to say.
    pub fn advance(&mut self, now: BootTime) -> Option<Heartbeat> {
        self.table.forget(now);
        if !self.is_connected || self.next_beat().is_none_or(|next| now < next) {
            return None;
        }
        self.last_number += 1;
        (self.last_beat, self.next_beat) = (Some(now), None);
        Some(Heartbeat {
            instance: self.instance,
            sender: self.us.clone(),
            role: self.role,
            leaving: false,
            number: self.last_number,
        })
    }

    /// One that is to nodes who we are, and has been for longer: it goes first.
    pub fn older_twin(&self) -> Option<&Peer> {
        self.table.older_twin(&self.instance, &self.us)
    }

    /// When to call [`Presence::advance`], whatever else happens.
    pub fn wake(&self, now: BootTime) -> Option<BootTime> {
        let beat = self.next_beat().filter(|_| self.is_connected);
        [beat, self.table.next_change(now)].into_iter().flatten().min()
    }

    fn next_beat(&self) -> Option<BootTime> {
        let pause = if self.older_twin().is_some() { BEAT_EVERY } else { REMIND_EVERY };
        let again = self.last_beat.map(|last| last + pause);
        [again, self.next_beat].into_iter().flatten().min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fleet::peers::table::testing::{beat, instance, sender};
    use crate::fleet::peers::table::{GONE_AFTER, HOLD_OFF};

    /// The second process of all, connected since second 0 and heard once.
    struct Bench(Presence);

    impl Bench {
        fn new() -> Bench {
            let mut presence = Presence::new(instance(2), sender("us"));
            assert!(presence.advance(at(0)).is_none(), "there is no connection");
            presence.link(Some(sender("us")), at(0));
            let mut bench = Bench(presence);
            assert_eq!(bench.says(0), Some(Role::Candidate));
            assert_eq!(bench.says(1), None);
            bench
        }

        fn hear(&mut self, number: u8, name: &str, role: Role, secs: u64) -> bool {
            self.0.hear(&beat(number, name, role), at(secs)).is_some()
        }

        fn says(&mut self, secs: u64) -> Option<Role> {
            self.0.advance(at(secs)).map(|beat| beat.role)
        }
    }

    fn at(secs: u64) -> BootTime {
        BootTime::START + Duration::from_secs(100 + secs)
    }

    #[test]
    fn says_what_it_is_when_that_changes_and_after_a_reconnect() {
        let mut bench = Bench::new();
        bench.0.play(Role::Candidate, at(9));
        assert_eq!((bench.says(9), bench.0.wake(at(9))), (None, Some(at(10))));
        bench.0.play(Role::Leader, at(9));
        assert_eq!(bench.says(9), Some(Role::Leader));
        bench.0.link(None, at(12));
        bench.0.play(Role::Candidate, at(12));
        assert_eq!((bench.says(12), bench.0.wake(at(12))), (None, None));
        bench.0.link(Some(sender("us")), at(13));
        assert_eq!(bench.says(13), Some(Role::Candidate));
    }

    #[test]
    fn says_so_again_now_and_then_for_those_that_missed_it() {
        let mut bench = Bench::new();
        assert_eq!((bench.says(9), bench.0.wake(at(9))), (None, Some(at(10))));
        assert_eq!(bench.says(10), Some(Role::Candidate));
        assert_eq!((bench.says(19), bench.says(20)), (None, Some(Role::Candidate)));
    }

    #[test]
    fn answers_those_that_share_their_nodes_and_tells_of_each_once() {
        let mut bench = Bench::new();
        assert!(bench.hear(1, "a", Role::Active, 10));
        assert_eq!(bench.says(10), Some(Role::Candidate));
        assert!(!bench.hear(1, "a", Role::Active, 12));
        assert_eq!(bench.says(12), Some(Role::Candidate));
        assert!(!bench.hear(3, "b", Role::Candidate, 20));
        assert_eq!(bench.says(20), None, "candidates don't mind one another");
    }

    #[test]
    fn however_often_it_is_asked_it_answers_once_a_second() {
        let mut bench = Bench::new();
        let mut said = 0;
        for ms in 0..10_000_u64 {
            let now = at(10) + Duration::from_millis(ms);
            let beat = Heartbeat { number: ms, ..beat(1, "a", Role::Active) };
            bench.0.hear(&beat, now);
            said += u32::from(bench.0.advance(now).is_some());
        }
        assert_eq!(said, 10);
    }

    #[test]
    fn the_older_of_two_answers_and_the_younger_asks_until_there_is_no_answer() {
        let mut older = Bench::new();
        older.hear(3, "us", Role::Candidate, 5);
        assert_eq!(older.0.older_twin(), None);
        assert_eq!(older.says(5), Some(Role::Candidate));

        let mut younger = Bench::new();
        younger.hear(1, "us", Role::Leader, 5);
        assert!(younger.0.older_twin().is_some());
        assert_eq!(younger.says(5), Some(Role::Candidate), "the last word was long ago");
        assert_eq!(younger.says(6), None);
        assert_eq!(younger.says(7), Some(Role::Candidate));
        let gone = 5 + (GONE_AFTER + HOLD_OFF).as_secs();
        younger.says(gone);
        assert_eq!(younger.0.older_twin(), None);
        assert_eq!(
            (younger.says(gone + 2), younger.says(gone + 10)),
            (None, Some(Role::Candidate))
        );
    }

    #[test]
    fn its_own_words_and_those_of_who_leaves_are_none() {
        let mut bench = Bench::new();
        bench.hear(2, "us", Role::Active, 9);
        let leaving = Heartbeat { leaving: true, ..beat(1, "us", Role::Active) };
        bench.0.hear(&leaving, at(9));
        assert_eq!((bench.says(9), bench.0.older_twin()), (None, None));
    }
}
