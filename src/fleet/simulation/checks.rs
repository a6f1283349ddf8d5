//! What must hold after every step, and in the end.

use std::fmt;

use crate::fleet::election::core as election;
use crate::fleet::peers::core as peers;
use crate::fleet::prober::core::ASKS_MAX;
use crate::fleet::registry::{self, Counts, Key, NodeState};
use crate::fleet::simulation::attempt::HELPER_MAX;
use crate::fleet::simulation::daemon::Daemon;
use crate::fleet::simulation::node::{DOWN_MAX, Kind, LOCK, THINKS_MAX};
use crate::fleet::simulation::process::{Process, Sent, Sink};
use crate::fleet::simulation::trouble::{OFF_MAX, SETTLED_AFTER};
use crate::fleet::simulation::world::{Phase, RECONNECT_MAX, World};
use crate::fleet::simulation::{LEADERLESS_MAX, MINUTE, MS, SECOND, Time, Way, duration, micros};
use crate::protocol::Identity;
use crate::protocol::peer::Role;

/// From a restart of a daemon to its connection, and before it the end of the one before.
const RESTART_MAX: Time = 45 * SECOND;
/// The longest an attempt takes once its node has all the time in the world: `configure` was sent, the connection comes and
/// goes, and then nothing answers `restart`.
const RESTARTS_MAX: Time = 3 * MINUTE;
/// The longest until all know whose a node is and its lock has ended.
const SHARED_MAX: Time = 20 * SECOND + LOCK + 2 * MINUTE;
/// A peer is reckoned with for twelve seconds after it was heard, by clocks that may be fast.
const RECKONED: Time = 11_800 * MS;
/// When nothing was in the way for so long, everybody has heard of everybody.
const HEARD_WITHIN: Time = 15 * SECOND;
/// The longest a node is queued behind a broken one, at the prober and in front of it.
const BEHIND_MAX: Time = 10 * SECOND;

/// Who has acted as leader: a daemon, its process and its term.
#[derive(Debug, Default)]
pub struct Actors {
    current: Option<(usize, u32, u32)>,
    former: Vec<(usize, u32, u32)>,
}

impl Actors {
    /// A bucket made anew gives numbers again that another gave before. To whoever writes with one of those its key looks like
    /// its own all the time: its term then goes on behind another's, later and never beside it.
    pub fn forget(&mut self) {
        *self = Actors::default();
    }

    /// A term that another has followed is over for good.
    fn act(&mut self, actor: (usize, u32, u32)) {
        if self.current == Some(actor) {
            return;
        }
        assert!(!self.former.contains(&actor), "{actor:?} acts again after {:?}", self.current);
        self.former.extend(self.current.replace(actor));
    }
}

impl World {
    /// What concerns all daemons.
    pub fn check(&self) {
        if self.setup.has(Way::Elected) {
            let leaders = self.daemons.iter().filter(|daemon| daemon.leads(self.now)).count();
            assert!(leaders < 2, "{self:?}: two lead");
            self.check_confirmed();
        }
        // Whoever has not noticed yet that its connection is gone acts upon nobody.
        let is_awake = |it: &&Daemon| !it.is_frozen && it.connection.is_some();
        for daemon in self.daemons.iter().filter(|it| it.way == Way::Shares).filter(is_awake) {
            let process = daemon.process.as_ref();
            if process.is_some_and(|it| it.gate.begin(daemon.clock.boot(self.now)).is_some()) {
                self.check_heard(daemon);
            }
        }
        self.check_mixture();
        self.check_twins();
    }

    /// A message leaves a daemon.
    pub fn check_act(&mut self, daemon: usize, sent: &Sent) {
        let it = &self.daemons[daemon];
        if it.way == Way::Shares && sent.post.is_leaders() && it.connection.is_some() {
            self.check_heard(it);
        }
        if it.way != Way::Elected || !sent.post.is_leaders() {
            return;
        }
        assert!(sent.leads, "{self:?}: {daemon} sends {:?} and does not lead", sent.post);
        let others = self.daemons.iter().enumerate().filter(|(other, _)| *other != daemon);
        for (other, it) in others {
            assert!(!it.leads(self.now), "{self:?}: {daemon} acts while {other} leads");
        }
        self.actors.act((daemon, self.daemons[daemon].incarnation, sent.term));
    }

    /// What concerns one daemon that has just done something.
    pub fn check_process(&self, daemon: usize) {
        let it = &self.daemons[daemon];
        let Some(process) = &it.process else { return };
        process.check_elements();
        process.check_permits();
        process.check_bounds(&self.setup);
        for attempt in process.attempts.iter().filter(|attempt| attempt.started == self.now) {
            self.check_shares(daemon, &attempt.key.identity);
        }
        let now = it.clock.mono(self.now);
        let longest_wait = self.setup.limits.retry_max.max(registry::BUSY_WAIT);
        for node in process.registry.nodes() {
            match node.state {
                NodeState::Queued { .. } | NodeState::Working { .. } => {}
                NodeState::Settling { until } => {
                    assert!(until <= now + registry::SETTLING_UPGRADE);
                }
                NodeState::Waiting { due } => {
                    assert!(due <= now + longest_wait, "{} waits too long", node.identity);
                    assert_ne!(node.last_error, "", "{} waits without a reason", node.identity);
                }
            }
            if node.last_error.starts_with("came back") {
                let index = self.nodes.iter().position(|known| known.identity == *node.identity);
                let is_real = index.is_some_and(|index| self.nodes[index].was_configured);
                assert!(is_real, "{} never was away", node.identity);
            }
        }
        if let Phase::Peace { since, .. } = self.phase {
            for attempt in &process.attempts {
                let began = attempt.started.max(since);
                let longest = micros(self.setup.node_timeout) + RESTARTS_MAX;
                assert!(self.now - began <= longest, "{:?} is stuck in a worker", attempt.key);
            }
        }
    }

    /// A daemon begins a node: no other that it hears, and that hears it, may begin it as well.
    fn check_shares(&self, daemon: usize, node: &Identity) {
        if self.daemons[daemon].way != Way::Shares {
            return;
        }
        let hears = |to: usize, from: usize| self.reckons_with(to, from).is_some();
        let others = self.daemons.iter().enumerate().filter(|(other, _)| *other != daemon);
        for (other, it) in others.filter(|(_, it)| it.way == Way::Shares) {
            let Some(process) = it.process.as_ref().filter(|_| !it.is_frozen) else { continue };
            let may_begin = process.gate.begin(it.clock.boot(self.now)).is_some()
                && process.owners.as_ref().is_none_or(|owners| owners.is_ours(node));
            assert!(
                !may_begin || !hears(daemon, other) || !hears(other, daemon),
                "{self:?}: {node} is {daemon}'s and {other}'s"
            );
        }
    }

    /// As what a daemon knows another that it has heard a short while ago.
    fn reckons_with(&self, daemon: usize, other: usize) -> Option<Role> {
        let (at, role) = self.heard.get(&(daemon, other)).copied()?;
        (self.now - at < RECKONED).then_some(role)
    }

    /// Whoever leads wrote the key a moment ago, and knows it.
    fn check_confirmed(&self) {
        let leads = |it: &&Daemon| it.leads(self.now) && !it.is_frozen && it.connection.is_some();
        for daemon in self.daemons.iter().filter(leads) {
            let written = daemon.writes.age(daemon.clock.boot(self.now));
            assert!(
                written.is_some_and(|ago| ago <= election::LEASE),
                "{self:?}: {} leads {written:?} after its last write",
                daemon.sender.identity
            );
        }
    }

    /// A daemon acts: it has been saying for long that it is there, and has heard itself.
    fn check_heard(&self, daemon: &Daemon) {
        let now = daemon.clock.boot(self.now);
        let spoken = daemon.voice.spoken_for(now);
        let heard = daemon.voice.beats.age(now);
        let is_heard = spoken.is_some_and(|spoken| spoken >= peers::LISTEN)
            && heard.is_some_and(|ago| ago <= peers::LEASE);
        assert!(
            is_heard,
            "{self:?}: {} acts {spoken:?} after its first word, and {heard:?} after the last that came back",
            daemon.sender.identity
        );
    }

    /// Where some hold an election and others share the nodes, a leader goes first.
    fn check_mixture(&self) {
        if !self.setup.is_mixed() {
            return;
        }
        let is_leader = |other: usize| self.daemons[other].leads(self.now);
        let leader = (0..self.daemons.len()).find(|other| is_leader(*other));
        let is_calm = !self.is_disturbed_since(self.now.saturating_sub(HEARD_WITHIN));
        let sharing = self.daemons.iter().enumerate().filter(|(_, it)| it.way == Way::Shares);
        for (daemon, it) in sharing.filter(|(_, it)| !it.is_frozen) {
            let Some(process) = &it.process else { continue };
            if process.gate.begin(it.clock.boot(self.now)).is_none() {
                continue;
            }
            let heard = (0..self.daemons.len())
                .find(|other| self.reckons_with(daemon, *other) == Some(Role::Leader));
            assert_eq!(heard, None, "{self:?}: {daemon} acts beside a leader that it hears");
            assert!(
                !is_calm || leader.is_none(),
                "{self:?}: {daemon} acts beside {leader:?}, of which it should have heard"
            );
        }
    }

    /// Of two that are one and the same to nodes the younger begins nothing.
    fn check_twins(&self) {
        if !self.setup.has_twins || self.is_disturbed_since(self.now.saturating_sub(HEARD_WITHIN)) {
            return;
        }
        let is_there = |daemon: &&Daemon| {
            !daemon.is_frozen
                && daemon.connection.is_some_and(|_| self.now >= daemon.connected_at + HEARD_WITHIN)
        };
        let mut twins: Vec<(&Daemon, &Process)> = self.daemons[..2]
            .iter()
            .filter(is_there)
            .filter_map(|daemon| Some((daemon, daemon.process.as_ref()?)))
            .collect();
        twins.sort_by_key(|(_, process)| process.instance);
        let [(_, older), (daemon, younger)] = twins[..] else { return };
        let has_left = older.is_draining || older.has_left();
        let begins = younger.gate.begin(daemon.clock.boot(self.now)).is_some();
        assert!(has_left || !begins, "{self:?}: {} acts beside an older one", daemon.sender.caller);
    }

    fn is_disturbed_since(&self, since: Time) -> bool {
        self.disturbed_at >= since
    }

    /// A process that has ended leaves nothing behind.
    pub fn check_gone(&self, daemon: usize) {
        let Some(process) = &self.daemons[daemon].process else { return };
        assert_eq!(process.registry.counts(), Counts::default(), "something was kept");
        assert_eq!((process.permits.active_len(), process.permits.nodes_len()), (0, 0));
        assert!(process.table.borrow().sinks.is_empty(), "requests stay registered");
    }

    /// Whether the run is over; a time that is up is a failure.
    pub fn is_over(&mut self) -> bool {
        match &self.phase {
            Phase::Trouble => false,
            Phase::Ending { until } => {
                assert!(self.now < *until, "{self:?}: a daemon does not end");
                self.daemons.iter().all(|daemon| daemon.process.is_none())
            }
            Phase::Peace { since, until } => {
                let mut unserved =
                    self.nodes.iter().zip(until).filter(|(node, _)| !node.is_served());
                if let Some((node, _)) = unserved.clone().find(|(_, until)| self.now >= **until) {
                    panic!("{self:?}: {} is not provisioned in time", node.identity);
                }
                if unserved.next().is_none() && self.now >= since + self.least_peace() {
                    self.make_an_end();
                }
                false
            }
        }
    }

    /// What fails for good is watched for a while, where that costs little.
    fn least_peace(&self) -> Time {
        let setup = &self.setup;
        if setup.is_alone() && self.nodes.iter().any(|node| node.broken.is_some()) {
            10 * micros(setup.limits.retry_max)
        } else if setup.is_mixed() || setup.has_twins {
            SETTLED_AFTER + RECONNECT_MAX + 2 * HEARD_WITHIN
        } else {
            5 * SECOND
        }
    }

    pub fn check_end(&self) {
        assert!(matches!(self.phase, Phase::Ending { .. }), "{self:?}: nothing happens any more");
        // What fails for good is tried less and less: thrice at once, then with growing waits.
        for node in &self.nodes {
            let fails = node.broken.is_some_and(|broken| {
                matches!(
                    broken.kind,
                    Kind::Silent | Kind::Fails | Kind::Garbage | Kind::BadJwt | Kind::Lies
                )
            });
            if fails && !self.setup.forgets && self.setup.is_alone() && self.daemons.len() == 1 {
                let attempts_max = 12 + self.now / micros(self.setup.limits.retry_max);
                assert!(
                    node.attempts <= attempts_max,
                    "{} was tried {} times",
                    node.identity,
                    node.attempts
                );
            }
        }
    }

    /// Until when a node must be provisioned, if there is peace from now on.
    pub fn must_be_provisioned(&self, node: usize) -> Time {
        let limits = self.setup.limits;
        let it = &self.nodes[node];
        let others = self.nodes.len() as u64;
        // Until everybody is there, has a leader and a connection, and has looked.
        let is_elected = self.setup.has(Way::Elected);
        let mut election = if is_elected { self.brokers.bucket.ttl + LEADERLESS_MAX } else { 0 };
        // The younger of two that are the same finishes its nodes before it makes room for the older.
        if is_elected && self.setup.has_twins {
            election += self.longest_attempt();
        }
        // Those that share the nodes listen, and one whose node it is may find it locked by the one whose it was.
        let sharing = if self.setup.has(Way::Shares) { SHARED_MAX } else { 0 };
        let begin =
            RESTART_MAX + SETTLED_AFTER + RECONNECT_MAX + election + sharing + OFF_MAX + DOWN_MAX;
        // The longest that is still to be waited for what was: each wait by its kind.
        let mut first = 0;
        for daemon in &self.daemons {
            let Some(process) = &daemon.process else { continue };
            let now = daemon.clock.mono(self.now);
            let state = process.registry.node(&it.identity).map(|known| known.state);
            first = first.max(match state {
                Some(NodeState::Waiting { due: at } | NodeState::Settling { until: at }) => {
                    micros(at.saturating_duration_since(now)) * 102 / 100
                }
                Some(NodeState::Working { .. }) => self.longest_attempt() + self.longest_wait(node),
                Some(NodeState::Queued { .. }) | None => 0,
            });
        }
        // Another that led before may have locked it, which is asked about once more just before the lock ends.
        let locked = if self.daemons.len() > 1 { LOCK + micros(registry::BUSY_WAIT) } else { 0 };
        // Small queues turn nodes away, those that are silent take the prober's places, and permits are shared.
        let steps = self.setup.plan.len() as u64;
        let behind = others * (BEHIND_MAX + HELPER_MAX + steps * (THINKS_MAX + SECOND));
        let round = 2 * micros(limits.interval) + behind + 5 * SECOND;
        let failures = it.failures_left();
        let again = failures * (self.longest_attempt() + self.longest_wait(node) + round);
        self.now + begin + first + locked + round + again
    }

    /// The longest that a node is left alone after an attempt.
    fn longest_wait(&self, node: usize) -> Time {
        let mut wait = self.setup.limits.retry_max.max(registry::SETTLING);
        if self.nodes[node].upgrades {
            wait = wait.max(registry::SETTLING_UPGRADE);
        }
        if self.daemons.len() > 1 {
            wait = wait.max(registry::BUSY_WAIT).max(duration(LOCK));
        }
        micros(wait)
    }

    fn longest_attempt(&self) -> Time {
        micros(self.setup.node_timeout) + RESTARTS_MAX
    }
}

impl Process {
    /// Where each element is: a Queued entry has exactly one, a Working entry one attempt or outcome.
    fn check_elements(&self) {
        self.registry.check();
        self.prober.check();
        let mut elements: Vec<&Key> = self.first.iter().chain(&self.retry).collect();
        elements.extend(self.prober.keys());
        elements.extend(self.done.iter().map(|(_, key, _)| key));
        elements.extend(self.attempts.iter().map(|attempt| &attempt.key));
        let mut current = 0;
        for (i, key) in elements.iter().enumerate() {
            assert!(!elements[i + 1..].contains(key), "{key:?} has two elements");
            current += usize::from(self.registry.is_current(key));
        }
        let counts = self.registry.counts();
        assert_eq!(current, counts.queued + counts.working, "an entry has no element");
        for (i, attempt) in self.attempts.iter().enumerate() {
            let identity = &attempt.key.identity;
            let mut others = self.attempts[i + 1..].iter();
            assert!(
                others.all(|other| other.key.identity != *identity),
                "{identity} is in two workers"
            );
            let state = self.registry.node(identity).map(|node| node.state);
            assert!(matches!(state, Some(NodeState::Working { .. })), "{identity} is {state:?}");
        }
    }

    fn check_permits(&self) {
        let (mut active, mut waiting) = (0, 0);
        for attempt in &self.attempts {
            let (is_active, waits) = attempt.permit();
            active += usize::from(is_active);
            waiting += usize::from(waits);
        }
        assert!(self.woken.is_empty(), "a permit went to nobody");
        let counted = (self.permits.active_len(), self.permits.nodes_len());
        assert_eq!(counted, (active, self.attempts.len()), "permits were lost or invented");
        assert!(
            waiting == 0 || !self.permits.could_take(usize::MAX),
            "nodes wait beside a free permit"
        );
    }

    fn check_bounds(&self, setup: &crate::fleet::simulation::Setup) {
        assert!(self.first.len() <= setup.queue_max && self.retry.len() <= setup.queue_max);
        assert!(self.attempts.len() <= setup.seats, "too many nodes in hand");
        assert!(self.permits.active_len() <= setup.permits, "too many nodes are worked on");
        let probes = setup.probes.quick_max + setup.probes.silent_max;
        assert!(self.prober.asked_len() + self.prober.answered_len() <= probes);
        // Every request is kept for somebody who wants its answers.
        let table = self.table.borrow();
        let by_attempts = table.sinks.values().filter(|(sink, _)| *sink != Sink::Prober).count();
        let wanted: usize = self.attempts.iter().map(|attempt| attempt.requests_len()).sum();
        assert_eq!(by_attempts, wanted, "requests of attempts");
        let late = self.prober.late_len();
        let probing = (table.sinks.len() - by_attempts).saturating_sub(late);
        assert!(
            probing <= self.prober.keys().count() * usize::from(ASKS_MAX),
            "requests of the prober"
        );
    }
}

impl fmt::Debug for World {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SIM_SEED={} at {} s", self.seed, self.now as f64 / SECOND as f64)
    }
}
