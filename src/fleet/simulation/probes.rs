//! The prober's thread.

use std::collections::VecDeque;

use crate::fleet::prober::core::{Expired, Heard, Turn};
use crate::fleet::registry::{Key, Sighting};
use crate::fleet::simulation::Scene;
use crate::fleet::simulation::attempt::Attempt;
use crate::fleet::simulation::node::Answer;
use crate::fleet::simulation::process::{Id, Process, Sink};
use crate::fleet::worker::permits::Verdict;
use crate::gate::Term;
use crate::node::Outcome;
use crate::rpc::actions::Action;

/// Bytes of an answer, by what it says: enough that a few fill what may be held.
pub fn bytes(answer: &Answer) -> usize {
    20 + usize::try_from(answer.content % 60).expect("small")
}

impl Process {
    /// Does all that the prober can do now.
    pub fn probe(&mut self, scene: &mut Scene<'_>) {
        if self.is_draining {
            return;
        }
        let open = self.gate.begin(scene.boot);
        if open.is_some() && self.probed_over != self.link {
            self.probed_over = self.link;
            self.prober.reset();
        }
        while let Some(key) = self.again.pop_front() {
            self.prober.ask_again(&key);
        }
        for expired in self.prober.expire(open.is_some(), scene.mono) {
            match expired {
                Expired::Again(key) => self.probe_node(&key, scene),
                Expired::Unreachable(key) => self.unreachable(key, "silent", scene),
            }
        }
        let Some(term) = open else { return };
        while self.prober.has_room() {
            let Some(key) = self.prober.next_to_ask() else { break };
            self.probe_node(&key, scene);
            if self.prober.next_to_ask().as_ref() == Some(&key) {
                return;
            }
        }
        self.hand_on(term, scene);
        while self.prober.has_room() && self.prober.next_to_ask().is_none() {
            let Process { first, retry, .. } = self;
            let (favoured, other): (&mut VecDeque<Key>, &mut VecDeque<Key>) =
                match self.prober.turn() {
                    Turn::First => (first, retry),
                    Turn::Retry => (retry, first),
                };
            let Some(key) = favoured.pop_front().or_else(|| other.pop_front()) else { break };
            self.prober.turn_taken();
            if self.is_ours(&key.identity) && self.registry.is_current(&key) {
                self.probe_node(&key, scene);
            }
        }
    }

    fn probe_node(&mut self, key: &Key, scene: &mut Scene<'_>) {
        match self.ask(key, Action::Inventory, Sink::Prober, scene) {
            Some(registration) => {
                drop(self.prober.asked(key, registration.id, registration, scene.mono));
            }
            None => drop(self.prober.put_back(key, scene.mono)),
        }
    }

    /// An answer to a request for which `key` was asked.
    pub fn hear_probed(
        &mut self,
        id: Id,
        key: &Key,
        answer: Option<Answer>,
        scene: &mut Scene<'_>,
    ) {
        let Some(answer) = answer else {
            if let Some(key) = self.prober.no_responders(id, scene.mono) {
                self.unreachable(key, "no responders", scene);
            }
            return;
        };
        match self.prober.answered(id, answer, bytes(&answer), scene.mono) {
            Heard::Late { identity, .. } => {
                scene.note("answered late");
                self.prober.forget_late(id);
                self.sight(&identity, Sighting::LateAnswer, scene);
            }
            Heard::Held | Heard::TooMuchHeld => {
                let is_its_own = self.prober.keys().any(|other| other == key);
                assert!(is_its_own, "an answer to {key:?} counts for another time in the queue");
            }
            Heard::Further => scene.note("two answers to a probe"),
            Heard::Unknown => {}
        }
    }

    /// Hands on who has answered, as permits and the rate limit allow.
    fn hand_on(&mut self, term: Term, scene: &mut Scene<'_>) {
        let now = scene.mono;
        while self.prober.has_answered() {
            if self.rate.wait(now).is_some() {
                return;
            }
            let seat = match self.permits.take() {
                Verdict::Taken(seat) => seat,
                Verdict::Full => return,
                Verdict::GiveUp(silent) => {
                    scene.note("given up");
                    let attempt = self.attempts.iter_mut().find(|one| one.seat == silent);
                    attempt.expect("every seat is somebody's").is_given_up = true;
                    self.is_stirred = true;
                    return;
                }
            };
            let taken = self.prober.take(now).expect("one has answered");
            let key = taken.key;
            let is_ours = self.is_ours(&key.identity);
            let entry = if is_ours { self.registry.take(&key, now) } else { None };
            let Some(entry) = entry else {
                let woken = self.permits.end(seat);
                self.grant(woken);
                continue;
            };
            self.rate.spend(now);
            let is_old = entry.announced_at.is_some_and(|at| at > taken.answered_at);
            let held = taken.held.filter(|_| !is_old);
            if let Some((id, registration, _)) = &held {
                let (_, asked) = self.table.borrow().sinks[id].clone();
                assert_eq!(asked, key, "it was not asked for this time in the queue");
                registration.redirect(seat);
            }
            let attempt = Attempt::new(key, seat, term, self, held, scene);
            self.attempts.push(attempt);
            self.is_stirred = true;
        }
    }

    fn unreachable(&mut self, key: Key, reason: &str, scene: &mut Scene<'_>) {
        let node = scene.index(&key.identity);
        let patience = 2 * scene.setup.probe_timeout() + crate::fleet::simulation::SECOND;
        let since = scene.now.saturating_sub(patience);
        let is_explained = scene.nodes[node].explains(&Outcome::Unreachable, since)
            || scene.is_disturbed_since(since);
        assert!(is_explained, "{} is reachable", key.identity);
        scene.count_attempt(node);
        self.report(key, Outcome::Unreachable, reason, scene);
    }
}
