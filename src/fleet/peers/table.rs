//! Who else is there, by what was heard. No clock, no I/O.
//!
//! What is heard is a claim of whoever may publish on the peers' subject: the table is bounded, and an entry stands for all
//! that was claimed at once, so that one peer can't be talked into being another.

use std::mem;
use std::time::Duration;

use crate::clock::BootTime;
use crate::protocol::Sender;
use crate::protocol::ksuid::Ksuid;
use crate::protocol::peer::{Heartbeat, Role};

/// Peers that are known at most: ten times as many as a fleet has use for.
pub const PEERS_MAX: usize = 64;
/// A peer that was not heard for so long is gone: three heartbeats.
pub const GONE_AFTER: Duration = Duration::from_secs(6);
/// How long after that it is reckoned with all the same: by then it has noticed, too, that nobody hears it.
pub const HOLD_OFF: Duration = Duration::from_secs(6);

/// All that were heard a short while ago.
#[derive(Debug, Clone, Default)]
pub struct Table {
    peers: Vec<Peer>,
}

/// Another provisioner of the account.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Peer {
    /// Which process it is.
    pub instance: Ksuid,
    /// Who it is to nodes.
    pub sender: Sender,
    /// Its part.
    pub role: Role,
    /// When it was last heard.
    pub heard: BootTime,
}

impl Peer {
    /// Whether it was heard a moment ago. Until it is forgotten it is reckoned with, heard or not.
    pub fn is_heard(&self, now: BootTime) -> bool {
        now.since(self.heard) < GONE_AFTER
    }

    fn is_forgotten(&self, now: BootTime) -> bool {
        now.since(self.heard) >= GONE_AFTER + HOLD_OFF
    }
}

/// What a heartbeat has changed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// Nothing but when it was last heard.
    Nothing,
    /// There is one more, or one plays another part.
    Joined(Peer),
    /// It said that it leaves.
    Left(Peer),
    /// There is no room for one more.
    Full,
}

impl Table {
    /// Takes what another said.
    pub fn hear(&mut self, beat: &Heartbeat, now: BootTime) -> Change {
        let Heartbeat { instance, sender, role, leaving, .. } = beat;
        let known =
            self.peers.iter().position(|peer| peer.instance == *instance && peer.sender == *sender);
        match known {
            Some(at) if *leaving => Change::Left(self.peers.swap_remove(at)),
            Some(at) => {
                let peer = &mut self.peers[at];
                peer.heard = peer.heard.max(now);
                if peer.role == *role {
                    return Change::Nothing;
                }
                peer.role = *role;
                Change::Joined(peer.clone())
            }
            None if *leaving => Change::Nothing,
            None if self.peers.len() >= PEERS_MAX => Change::Full,
            None => {
                let (instance, sender) = (*instance, sender.clone());
                let peer = Peer { instance, sender, role: *role, heard: now };
                self.peers.push(peer.clone());
                Change::Joined(peer)
            }
        }
    }

    /// Forgets those that were silent for too long, and says who they were.
    pub fn forget(&mut self, now: BootTime) -> Vec<Peer> {
        if !self.peers.iter().any(|peer| peer.is_forgotten(now)) {
            return Vec::new();
        }
        let peers = mem::take(&mut self.peers).into_iter();
        let (forgotten, known) = peers.partition(|peer| peer.is_forgotten(now));
        self.peers = known;
        forgotten
    }

    /// All of them.
    pub fn peers(&self) -> &[Peer] {
        &self.peers
    }

    /// Those that have a share of the nodes beside `us`, each once.
    pub fn sharers(&self, us: &Sender) -> Vec<&Sender> {
        let mut sharers: Vec<&Sender> = Vec::new();
        for peer in self.peers.iter().filter(|peer| peer.role == Role::Active) {
            if peer.sender != *us && !sharers.contains(&&peer.sender) {
                sharers.push(&peer.sender);
            }
        }
        sharers
    }

    /// One that is to nodes who we are, and has been for longer.
    pub fn older_twin(&self, instance: &Ksuid, us: &Sender) -> Option<&Peer> {
        self.peers.iter().find(|peer| peer.sender == *us && peer.instance < *instance)
    }

    /// One that is elected.
    pub fn leader(&self) -> Option<&Peer> {
        self.peers.iter().find(|peer| peer.role == Role::Leader)
    }

    /// When somebody is gone or forgotten next, if nobody is heard.
    pub fn next_change(&self, now: BootTime) -> Option<BootTime> {
        let change = |peer: &Peer| {
            let after = if peer.is_heard(now) { GONE_AFTER } else { GONE_AFTER + HOLD_OFF };
            peer.heard + after
        };
        self.peers.iter().map(change).min()
    }
}

/// Peers for tests.
#[cfg(test)]
pub mod testing {
    use crate::protocol::Identity;

    use super::*;

    /// The process that began as the `number`th of all.
    pub fn instance(number: u8) -> Ksuid {
        Ksuid::new(1_750_000_000 + i64::from(number), [number; 16])
    }

    /// Somebody of that name.
    pub fn sender(name: &str) -> Sender {
        let identity = Identity::parse(&format!("{name}.example.net")).unwrap();
        Sender { identity, caller: format!("choria={name}") }
    }

    /// What the `number`th says that is called `name`.
    pub fn beat(number: u8, name: &str, role: Role) -> Heartbeat {
        let (instance, sender) = (instance(number), sender(name));
        Heartbeat { instance, sender, role, leaving: false, number: 1 }
    }
}

#[cfg(test)]
mod tests {
    use super::testing::{beat, instance, sender};
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn at(secs: u32) -> BootTime {
        BootTime::START + SECOND * (100 + secs)
    }

    fn names(peers: &[Peer]) -> Vec<&str> {
        peers.iter().map(|peer| peer.sender.identity.as_str()).collect()
    }

    #[test]
    fn whoever_is_silent_is_gone_after_three_heartbeats_and_forgotten_after_six() {
        let mut table = Table::default();
        assert_eq!(table.next_change(at(0)), None);
        let joined = table.hear(&beat(1, "a", Role::Active), at(0));
        assert!(matches!(joined, Change::Joined(_)));
        assert_eq!(table.hear(&beat(1, "a", Role::Active), at(2)), Change::Nothing);
        assert!(table.peers()[0].is_heard(at(7)));
        assert_eq!(table.next_change(at(7)), Some(at(8)));
        assert!(!table.peers()[0].is_heard(at(8)));
        assert_eq!(table.next_change(at(8)), Some(at(14)));
        assert_eq!(table.forget(at(13)), []);
        assert_eq!(table.sharers(&sender("us")), [&sender("a")], "it is reckoned with");
        assert_eq!(names(&table.forget(at(14))), ["a.example.net"]);
        assert_eq!(table.sharers(&sender("us")), Vec::<&Sender>::new());
    }

    #[test]
    fn whoever_leaves_is_forgotten_at_once() {
        let mut table = Table::default();
        let leaving = Heartbeat { leaving: true, ..beat(1, "a", Role::Active) };
        assert_eq!(table.hear(&leaving, at(0)), Change::Nothing, "nobody has heard of it");
        table.hear(&beat(1, "a", Role::Active), at(0));
        let other = Heartbeat { instance: instance(2), ..leaving.clone() };
        assert_eq!(table.hear(&other, at(1)), Change::Nothing, "that is another process");
        assert!(matches!(table.hear(&leaving, at(1)), Change::Left(_)));
        assert_eq!(table.peers(), []);
    }

    #[test]
    fn ten_thousand_that_claim_to_be_there_take_no_more_room_than_the_most_there_may_be() {
        let mut table = Table::default();
        let mut full = 0;
        for number in 0..10_000_i64 {
            let instance = Ksuid::new(1_750_000_000 + number, [7; 16]);
            let beat = Heartbeat { instance, ..beat(1, "a", Role::Active) };
            full += usize::from(table.hear(&beat, at(0)) == Change::Full);
        }
        assert_eq!((table.peers().len(), full), (PEERS_MAX, 10_000 - PEERS_MAX));
        assert_eq!(table.sharers(&sender("us")).len(), 1, "they all claim to be one");
        table.forget(at(12));
        assert!(matches!(table.hear(&beat(1, "b", Role::Active), at(12)), Change::Joined(_)));
    }

    #[test]
    fn one_process_under_two_names_is_two_peers() {
        let mut table = Table::default();
        table.hear(&beat(1, "a", Role::Active), at(0));
        table.hear(&beat(1, "b", Role::Active), at(1));
        assert_eq!(table.sharers(&sender("us")), [&sender("a"), &sender("b")]);
        assert_eq!(names(&table.forget(at(12))), ["a.example.net"], "nobody speaks for it");
    }

    #[test]
    fn knows_twins_and_leaders_and_who_shares() {
        let mut table = Table::default();
        let us = sender("us");
        table.hear(&beat(3, "us", Role::Active), at(0));
        assert_eq!(table.older_twin(&instance(2), &us), None, "it is younger");
        assert!(table.older_twin(&instance(4), &us).is_some());
        assert!(table.sharers(&us).is_empty(), "its share is ours");
        table.hear(&beat(5, "a", Role::Candidate), at(0));
        assert!(table.leader().is_none() && table.sharers(&us).is_empty());
        assert!(matches!(table.hear(&beat(5, "a", Role::Leader), at(1)), Change::Joined(_)));
        assert!(table.leader().is_some() && table.sharers(&us).is_empty());
    }

    #[test]
    fn a_heartbeat_of_the_past_takes_nothing_back() {
        let mut table = Table::default();
        table.hear(&beat(1, "a", Role::Active), at(5));
        table.hear(&beat(1, "a", Role::Active), at(4));
        assert_eq!(table.peers()[0].heard, at(5));
    }
}
