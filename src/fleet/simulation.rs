//! Scheduling under one virtual clock and a seeded generator of trouble, with its invariants checked after every step.
//!
//! Registry and gate are the real ones; queues, prober, workers and finisher are models of the threads around them, and
//! the nodes are a model of a fleet that reboots, fails, dies and comes back. A time of trouble is followed by a calm one,
//! in which every node that can be provisioned must be, or by a drain or an abort. `SIM_SEED=n cargo test --lib simulat --
//! --nocapture` replays one seed with a trace.

use std::collections::{BTreeMap, HashSet, VecDeque};
use std::env;
use std::fmt;
use std::thread;
use std::time::{Duration, Instant};

use fastrand::Rng;

use crate::clock::BootTime;
use crate::fleet::registry::{
    self, Key, Limits, Next, NodeState, Queue, Registry, Sighted, Sighting,
};
use crate::gate::{self, Closed, Reason, Step, Term};
use crate::node::{Outcome, Report};
use crate::protocol::Identity;

const SEEDS: u64 = 2_000;

#[test]
fn simulated_fleets_keep_every_invariant_and_become_provisioned() {
    if let Ok(seed) = env::var("SIM_SEED") {
        Simulation::new(seed.parse().expect("SIM_SEED is a number"), true).run();
        return;
    }
    // The machine's cores share the seeds.
    let threads = thread::available_parallelism().map_or(2, |cores| cores.get()) as u64;
    let totals = thread::scope(|scope| {
        let runs: Vec<_> = (0..threads)
            .map(|first| {
                scope.spawn(move || {
                    let mut total = Seen::default();
                    for seed in (first..SEEDS).step_by(threads as usize) {
                        total.add(&Simulation::new(seed, false).run());
                    }
                    total
                })
            })
            .collect();
        let mut total = Seen::default();
        for run in runs {
            total.add(&run.join().expect("the seed that failed is printed above"));
        }
        total
    });
    eprintln!("{} steps, {} nodes provisioned", totals.steps, totals.provisioned);
    totals.check_that_all_happened();
}

/// How long trouble lasts, at most.
const TROUBLE_MAX: u64 = 15 * MINUTE;
const SECOND: u64 = 1_000;
const MINUTE: u64 = 60 * SECOND;
/// A node's time, but for what follows `configure`.
const NODE_TIMEOUT: u64 = 2 * MINUTE;
/// The longest a link stays down.
const OUTAGE_MAX: u64 = 3 * MINUTE;
/// How long nobody knows whether we lead.
const LAPSE_MAX: u64 = 10 * SECOND;
/// How long peace is watched, at least.
const CALM_MIN: u64 = 20 * MINUTE;
/// The longest a node is switched off.
const OFF_MAX: u64 = 10 * MINUTE;
/// How many steps an attempt has.
const STEPS: u64 = 5;
const SWEEP_EVERY: u64 = 5 * SECOND;
/// The prober gives up after silence for twice its time-out.
const SILENCE: u64 = 6 * SECOND;

/// One run.
struct Simulation {
    seed: u64,
    trace: bool,
    rng: Rng,
    start: Instant,
    now: u64,
    events: BTreeMap<(u64, u64), Event>,
    serial: u64,
    setup: Setup,
    phase: Phase,
    gate: gate::Core,
    /// Counts connections, so that an answer asked for over an earlier one is known to be lost.
    link: u64,
    registry: Registry,
    first: VecDeque<Key>,
    retry: VecDeque<Key>,
    turn: u32,
    asked: Vec<Asked>,
    ready: VecDeque<(Key, u64)>,
    workers: Vec<Option<Job>>,
    done: VecDeque<(Key, Report)>,
    discovery: u64,
    nodes: Vec<Node>,
    seen: Seen,
}

/// What a run is like.
#[derive(Debug)]
struct Setup {
    interval: u64,
    retry_max: u64,
    queue_max: usize,
    window: usize,
    ready_max: usize,
    /// The longest a step of a node takes.
    pace: u64,
    /// Whether its registry forgets nodes for want of room.
    forgets: bool,
    end: End,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Calm,
    Drain,
    Abort,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Trouble,
    Calm { since: u64, until: u64 },
    Ending,
}

#[derive(Debug, Clone)]
enum Event {
    /// A node comes up in provisioning mode.
    Boots(usize),
    /// It goes down, if it is still in this boot.
    GoesDown(usize, u32),
    SwitchedOff(usize),
    /// It finds the broker again after that was gone.
    Reconnects(usize),
    /// Its startup event arrives.
    Announces {
        node: usize,
        id: u64,
    },
    Discover,
    DiscoveryReply {
        node: usize,
    },
    DiscoveryEnds {
        discovery: u64,
        link: u64,
    },
    ProbeEnds {
        serial: u64,
    },
    AnswersLate(usize),
    JobStep {
        worker: usize,
        serial: u64,
    },
    Finish,
    Sweep,
    Link(bool),
    Operator(bool),
    Standby(bool),
    /// The lease, and not the term, is over.
    Lapse(bool),
    RetryWanted(usize),
    /// An operator wants it left alone, or no longer.
    Denied(usize, bool),
    Reload,
    TroubleEnds,
}

/// Where a simulated node stands.
struct Node {
    identity: Identity,
    is_up: bool,
    is_connected: bool,
    boot: u32,
    /// What goes wrong in its next attempts, one each; afterwards it is healthy.
    troubles: VecDeque<Trouble>,
    /// What goes wrong in every attempt.
    broken: Option<Trouble>,
    /// It answered `restart` in this boot.
    is_restarting: bool,
    is_provisioned: bool,
    is_shut_down: bool,
    was_configured: bool,
    /// It started again after it was configured; or nobody can know.
    may_have_come_back: bool,
    attempts_in_calm: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Trouble {
    Gone,
    Silent,
    Fails,
    Refused,
    WrongToken,
    Misconfigured,
    HelperFails,
    Deferred,
    Busy,
    NotProvisioning,
    Reboots,
    Upgrades,
    ShutsDown,
    RestartUnanswered,
    ComesBack,
}

impl Trouble {
    const ALL: [Trouble; 15] = [
        Trouble::Gone,
        Trouble::Silent,
        Trouble::Fails,
        Trouble::Refused,
        Trouble::WrongToken,
        Trouble::Misconfigured,
        Trouble::HelperFails,
        Trouble::Deferred,
        Trouble::Busy,
        Trouble::NotProvisioning,
        Trouble::Reboots,
        Trouble::Upgrades,
        Trouble::ShutsDown,
        Trouble::RestartUnanswered,
        Trouble::ComesBack,
    ];
}

/// An inventory request on its way.
struct Asked {
    key: Key,
    node: usize,
    serial: u64,
    answer: Option<Answer>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Answer {
    Inventory,
    NoResponders,
    Silence,
}

/// A node in a worker.
struct Job {
    key: Key,
    node: usize,
    term: Term,
    deadline: u64,
    started: u64,
    trouble: Option<Trouble>,
    action: Action,
    configured_at: Option<u64>,
    /// The step on its way, and the link it was sent over; none while the gate makes it wait.
    on_its_way: Option<(u64, u64)>,
    was_running_at_drain: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Action {
    Inventory,
    Jwt,
    Helper,
    Configure,
    Restart,
}

/// What happened at least once, so that a generator that stopped making trouble is noticed.
#[derive(Debug, Default)]
struct Seen {
    steps: u64,
    provisioned: u64,
    things: HashSet<&'static str>,
}

impl Seen {
    fn add(&mut self, other: &Seen) {
        self.steps += other.steps;
        self.provisioned += other.provisioned;
        self.things.extend(&other.things);
    }

    fn check_that_all_happened(&self) {
        for thing in [
            "provisioned",
            "upgrade_sent",
            "shutdown",
            "deferred",
            "busy",
            "helper_failed",
            "wrong_token",
            "misconfigured",
            "unreachable",
            "refused",
            "failed",
            "not_provisioning",
            "stale",
            "queue full",
            "denied",
            "not due",
            "ask again",
            "came back",
            "term ended",
            "deadline",
            "aborted",
            "excused",
            "answered late",
            "finished while draining",
            "link lost during a step",
        ] {
            assert!(self.things.contains(thing), "no seed saw: {thing}");
        }
        assert!(self.provisioned > SEEDS, "{self:?}");
    }
}

impl Simulation {
    fn new(seed: u64, trace: bool) -> Simulation {
        let mut rng = Rng::with_seed(seed);
        let interval = rng.u64(10..=60) * SECOND;
        let mut setup = Setup {
            interval,
            retry_max: interval * rng.u64(1..=8),
            queue_max: rng.usize(1..=8),
            window: rng.usize(1..=6),
            ready_max: rng.usize(1..=3),
            pace: if rng.u8(0..4) == 0 { MINUTE } else { SECOND },
            forgets: false,
            end: match rng.u8(0..10) {
                0..=6 => End::Calm,
                7..=8 => End::Drain,
                _ => End::Abort,
            },
        };
        let mut limits = Limits::new(millis(setup.interval), millis(setup.retry_max));
        // Small bounds are met by small fleets; forgetting is no fault as long as nodes are found again.
        if rng.u8(0..4) == 0 {
            limits.waiting_max = rng.usize(1..=4);
            limits.settling_max = rng.usize(4..=8);
            limits.kept_max = rng.usize(1..=4);
            setup.forgets = true;
        }
        let workers = (0..rng.usize(1..=3)).map(|_| None).collect();
        let nodes = (0..rng.usize(1..=12)).map(|i| Node::new(i, &mut rng)).collect();
        let mut simulation = Simulation {
            seed,
            trace,
            rng,
            start: Instant::now(),
            now: 0,
            events: BTreeMap::new(),
            serial: 0,
            setup,
            phase: Phase::Trouble,
            gate: gate::Core::new(),
            link: 0,
            registry: Registry::new(limits),
            first: VecDeque::new(),
            retry: VecDeque::new(),
            turn: 0,
            asked: Vec::new(),
            ready: VecDeque::new(),
            workers,
            done: VecDeque::new(),
            discovery: 0,
            nodes,
            seen: Seen::default(),
        };
        simulation.plan();
        simulation
    }

    /// Decides what will happen to the fleet from outside.
    fn plan(&mut self) {
        let end = self.rng.u64(2 * MINUTE..TROUBLE_MAX);
        self.after(0, Event::Link(true));
        self.after(SWEEP_EVERY, Event::Sweep);
        self.after(self.setup.interval, Event::Discover);
        for node in 0..self.nodes.len() {
            let at = self.rng.u64(0..end);
            self.after(at, Event::Boots(node));
        }
        // Each kind of trouble comes in pairs, so that what was taken away is given back.
        type Make = fn(bool) -> Event;
        let makes: [(Make, u64); 4] = [
            (|bad| Event::Link(!bad), OUTAGE_MAX),
            (|bad| Event::Operator(bad), OUTAGE_MAX),
            (|bad| Event::Standby(bad), OUTAGE_MAX),
            (|bad| Event::Lapse(bad), LAPSE_MAX),
        ];
        for (make, longest) in makes {
            for _ in 0..self.rng.u8(0..3) {
                let at = self.rng.u64(0..end);
                let lasts = self.rng.u64(0..longest);
                self.after(at, make(true));
                self.after(at + lasts, make(false));
            }
        }
        for _ in 0..self.rng.u8(0..3) {
            let (node, at) = (self.rng.usize(..self.nodes.len()), self.rng.u64(0..end));
            self.after(at, Event::RetryWanted(node));
        }
        if self.rng.u8(0..3) == 0 {
            let (node, at) = (self.rng.usize(..self.nodes.len()), self.rng.u64(0..end));
            self.after(at, Event::Denied(node, true));
            let lasts = self.rng.u64(0..OUTAGE_MAX);
            self.after(at + lasts, Event::Denied(node, false));
        }
        for _ in 0..self.rng.u8(0..6) {
            let (node, at) = (self.rng.usize(..self.nodes.len()), self.rng.u64(0..end));
            self.after(at, Event::Boots(node));
        }
        for _ in 0..self.rng.u8(0..4) {
            let (node, at) = (self.rng.usize(..self.nodes.len()), self.rng.u64(0..end));
            self.after(at, Event::SwitchedOff(node));
            let lasts = self.rng.u64(0..OFF_MAX);
            self.after(at + lasts, Event::Boots(node));
        }
        if self.rng.u8(0..4) == 0 {
            let at = self.rng.u64(0..end);
            self.after(at, Event::Reload);
        }
        self.after(end, Event::TroubleEnds);
    }

    /// Runs to the end, or panics at the first broken invariant.
    fn run(mut self) -> Seen {
        let _replay = Replay(self.seed);
        while let Some(((at, _), event)) = self.events.pop_first() {
            self.now = at;
            if self.trace {
                self.say(&format_args!("{event:?}"));
            }
            self.seen.steps += 1;
            self.happen(event);
            self.pump();
            self.check();
            if self.is_over() {
                break;
            }
        }
        self.check_end();
        self.seen
    }

    fn is_over(&self) -> bool {
        match self.phase {
            Phase::Trouble => false,
            Phase::Calm { since, until } => {
                if self.nodes.iter().all(Node::is_served) {
                    return self.now >= since + CALM_MIN;
                }
                assert!(self.now < until, "not provisioned in time: {:?}", self.unserved());
                false
            }
            Phase::Ending => self.workers.iter().all(Option::is_none) && self.done.is_empty(),
        }
    }

    fn happen(&mut self, event: Event) {
        match event {
            Event::Boots(node) => self.boots(node),
            Event::GoesDown(node, boot) => {
                if self.nodes[node].boot == boot {
                    self.nodes[node].is_up = false;
                }
            }
            Event::SwitchedOff(node) => self.nodes[node].is_up = false,
            Event::Reconnects(node) => self.nodes[node].is_connected = self.is_linked(),
            Event::Announces { node, id } => {
                if self.is_linked() && self.may_begin() {
                    let id = format!("event {id}");
                    self.sight(node, Sighting::Event { id: &id });
                }
            }
            Event::Discover => {
                self.after(self.setup.interval, Event::Discover);
                self.discover();
            }
            Event::DiscoveryReply { node } => {
                if self.nodes[node].answers() && self.may_begin() {
                    self.sight(node, Sighting::Discovery);
                }
            }
            Event::DiscoveryEnds { discovery, link } => {
                if discovery == self.discovery && link == self.link && self.may_begin() {
                    let now = self.instant();
                    for identity in self.registry.discovery_completed(now) {
                        self.note("stale");
                        assert!(self.registry.node(&identity).is_none());
                    }
                }
            }
            Event::ProbeEnds { serial } => self.probe_ends(serial),
            Event::AnswersLate(node) => {
                if self.nodes[node].answers() && self.may_begin() {
                    self.note("answered late");
                    self.sight(node, Sighting::LateAnswer);
                }
            }
            Event::JobStep { worker, serial } => self.step_ends(worker, serial),
            Event::Finish => self.finish(),
            Event::Sweep => {
                self.after(SWEEP_EVERY, Event::Sweep);
                self.registry.sweep(self.instant());
            }
            Event::Link(up) => self.set_link(up),
            Event::Operator(paused) => {
                self.set(Reason::Operator, paused);
                if !paused {
                    self.discover();
                }
            }
            Event::Standby(true) => {
                self.gate.end_term();
                self.forget_all();
            }
            Event::Lapse(true) => {
                if !self.gate.is_lost() {
                    self.gate.lapse();
                }
            }
            Event::Lapse(false) if self.gate.is_lost() => {}
            Event::Standby(false) | Event::Lapse(false) => self.lead(),
            Event::RetryWanted(node) => {
                if self.may_begin() {
                    self.sight(node, Sighting::Operator);
                }
            }
            Event::Denied(node, true) => {
                let now = self.instant();
                let denied = self.registry.deny(&self.nodes[node].identity, now);
                assert_eq!(denied, Ok(true), "each is denied once");
            }
            Event::Denied(node, false) => {
                self.registry.allow(&self.nodes[node].identity);
            }
            Event::Reload => {
                let mut limits =
                    Limits::new(millis(self.setup.interval), millis(self.setup.retry_max));
                limits.waiting_max = self.nodes.len();
                self.registry.reload(limits, self.instant());
            }
            Event::TroubleEnds => self.trouble_ends(),
        }
    }

    fn trouble_ends(&mut self) {
        // What is still planned would only disturb the peace.
        self.events.retain(|_, event| {
            !matches!(
                event,
                Event::Link(_)
                    | Event::Operator(_)
                    | Event::Standby(_)
                    | Event::Lapse(_)
                    | Event::RetryWanted(_)
                    | Event::Denied(..)
            )
        });
        for node in &self.nodes {
            self.registry.allow(&node.identity);
        }
        match self.setup.end {
            End::Calm => {
                self.set(Reason::Operator, false);
                self.lead();
                if !self.is_linked() {
                    self.set_link(true);
                }
                let (since, until) = (self.now, self.now + self.time_to_serve_all());
                self.phase = Phase::Calm { since, until };
                self.discover();
            }
            End::Drain | End::Abort => {
                for job in self.workers.iter_mut().flatten() {
                    job.was_running_at_drain = true;
                }
                match self.setup.end {
                    End::Abort => self.gate.abort(),
                    _ => self.gate.close(Reason::Draining),
                }
                self.forget_all();
                self.phase = Phase::Ending;
                self.after(0, Event::Sweep);
            }
        }
    }

    /// How long it may take, once there is peace, until the last healthy node is provisioned.
    fn time_to_serve_all(&self) -> u64 {
        let longest_wait = [
            self.setup.retry_max,
            as_millis(registry::BUSY_WAIT),
            as_millis(registry::SETTLING_UPGRADE),
        ];
        let longest_wait = longest_wait.into_iter().max().unwrap_or_default();
        // Every attempt of a node is preceded by its longest wait, a discovery, and the work of all the others before it.
        let nodes = self.nodes.len() as u64;
        let attempt = SILENCE + STEPS * self.setup.pace;
        let round = longest_wait + 2 * self.setup.interval + nodes * attempt + 2 * MINUTE;
        let attempts = self.nodes.iter().map(|node| node.troubles.len()).max().unwrap_or(0) as u64;
        // One more round for what was under way, one for good; and small queues may turn nodes away for a while.
        OFF_MAX + round * (attempts + 2) + nodes * self.setup.interval
    }

    fn boots(&mut self, node: usize) {
        let id = self.rng.u64(..);
        let this = &mut self.nodes[node];
        if this.is_provisioned || this.is_shut_down {
            return;
        }
        this.boot += 1;
        this.may_have_come_back |= this.was_configured;
        this.is_up = this.broken != Some(Trouble::Gone);
        this.is_connected = self.link % 2 == 1;
        this.is_restarting = false;
        // The event may come after the node has answered a discovery, twice, or not at all.
        for _ in 0..self.rng.u8(0..3) {
            let late = self.rng.u64(0..1_500);
            self.after(late, Event::Announces { node, id });
        }
    }

    fn discover(&mut self) {
        if !self.may_begin() {
            return;
        }
        self.discovery += 1;
        self.registry.discovery_started(self.instant());
        for node in 0..self.nodes.len() {
            let is_lost = self.phase == Phase::Trouble && self.rng.u8(0..20) == 0;
            if self.nodes[node].answers() && !is_lost {
                let late = self.rng.u64(1..400);
                self.after(late, Event::DiscoveryReply { node });
            }
        }
        let ends = Event::DiscoveryEnds { discovery: self.discovery, link: self.link };
        let lasts = self.rng.u64(300..2_000);
        self.after(lasts, ends);
    }

    fn sight(&mut self, node: usize, what: Sighting<'_>) {
        let now = self.instant();
        let queue_max = self.setup.queue_max;
        let Simulation { registry, first, retry, nodes, .. } = self;
        let sighted = registry.sight(&nodes[node].identity, what, now, &mut |queue, key| {
            push(first, retry, queue_max, queue, key)
        });
        if self.trace {
            self.say(&format_args!("  {sighted:?}"));
        }
        let known = self.registry.node(&self.nodes[node].identity);
        if known.is_some_and(|known| known.last_error.starts_with("came back")) {
            self.note("came back");
        }
        match sighted {
            Sighted::Queued(_) | Sighted::Known => {}
            Sighted::NotDue => self.note("not due"),
            Sighted::QueueFull => self.note("queue full"),
            Sighted::Denied => self.note("denied"),
            Sighted::AskAgain(key) => {
                self.note("ask again");
                if let Some(at) = self.ready.iter().position(|(ready, _)| *ready == key) {
                    self.ready.remove(at);
                    self.ask(key);
                } else if let Some(at) = self.asked.iter().position(|asked| asked.key == key) {
                    self.asked.remove(at);
                    self.ask(key);
                }
            }
        }
    }

    /// Lets everything move that can: prober, workers, and jobs that wait at the gate.
    fn pump(&mut self) {
        while self.may_begin()
            && self.asked.len() < self.setup.window
            && self.ready.len() < self.setup.ready_max
        {
            self.turn += 1;
            let is_retrys_turn = self.turn % 20 == 0;
            let next = match is_retrys_turn {
                true => self.retry.pop_front().or_else(|| self.first.pop_front()),
                false => self.first.pop_front().or_else(|| self.retry.pop_front()),
            };
            let Some(key) = next else { break };
            if self.registry.is_current(&key) {
                self.ask(key);
            }
        }
        // What was asked before the gate closed is asked again once it opens.
        if self.may_begin() {
            let unsent = |asked: &Asked| asked.answer.is_none();
            while let Some(at) = self.asked.iter().position(unsent) {
                let key = self.asked.remove(at).key;
                self.ask(key);
            }
        }
        for worker in 0..self.workers.len() {
            while self.workers[worker].is_none() && !self.ready.is_empty() {
                let Some(term) = self.gate.begin(self.boot()) else { break };
                let Some((key, answered_at)) = self.ready.pop_front() else { break };
                self.take(worker, key, answered_at, term);
            }
            self.advance(worker);
        }
    }

    /// Sends a node its inventory request, and decides what will come of it.
    fn ask(&mut self, key: Key) {
        let node = self.index(&key);
        self.serial += 1;
        let serial = self.serial;
        let answer = if !self.nodes[node].answers() {
            Answer::NoResponders
        } else if self.nodes[node].next_trouble() == Some(Trouble::Silent) {
            Answer::Silence
        } else {
            Answer::Inventory
        };
        let lasts = match answer {
            Answer::Inventory => self.rng.u64(1..200),
            Answer::NoResponders => 1,
            Answer::Silence => SILENCE,
        };
        self.asked.push(Asked { key, node, serial, answer: Some(answer) });
        self.after(lasts, Event::ProbeEnds { serial });
    }

    fn probe_ends(&mut self, serial: u64) {
        let Some(at) = self.asked.iter().position(|asked| asked.serial == serial) else { return };
        // A lost link took the answer with it.
        let Some(answer) = self.asked[at].answer else { return };
        let Asked { key, node, .. } = self.asked.remove(at);
        if !self.registry.is_current(&key) {
            return;
        }
        match answer {
            Answer::Inventory => self.ready.push_back((key, self.now)),
            Answer::NoResponders => self.report(key, Outcome::Unreachable, "no responders"),
            Answer::Silence => {
                self.nodes[node].spend_trouble();
                self.count_attempt(node);
                self.report(key, Outcome::Unreachable, "Silent");
                if self.rng.bool() {
                    let late = self.rng.u64(0..22 * SECOND);
                    self.after(late, Event::AnswersLate(node));
                }
            }
        }
    }

    fn take(&mut self, worker: usize, key: Key, answered_at: u64, term: Term) {
        let Some(taken) = self.registry.take(&key, self.instant()) else { return };
        let node = self.index(&key);
        let answered = self.start + millis(answered_at);
        let is_outdated = taken.announced_at.is_some_and(|announced| announced > answered);
        let trouble = self.nodes[node].next_trouble();
        self.count_attempt(node);
        self.workers[worker] = Some(Job {
            key,
            node,
            term,
            deadline: self.now + NODE_TIMEOUT,
            started: self.now,
            trouble,
            action: if is_outdated { Action::Inventory } else { Action::Jwt },
            configured_at: None,
            on_its_way: None,
            was_running_at_drain: false,
        });
    }

    /// Takes a job's next step if it is at a step's beginning and the gate lets it.
    fn advance(&mut self, worker: usize) {
        let (now, boot) = (self.instant(), self.boot());
        let Some(job) = &mut self.workers[worker] else { return };
        if job.on_its_way.is_some() {
            return;
        }
        let deadline = match job.configured_at {
            Some(_) => now + Duration::from_secs(3600),
            None => self.start + millis(job.deadline),
        };
        match self.gate.proceed(job.term, deadline, now, boot) {
            Step::Wait => {
                let left = as_millis(deadline.saturating_duration_since(now));
                self.after(left.clamp(1, 30 * SECOND), Event::JobStep { worker, serial: 0 });
            }
            Step::End(closed) => {
                match closed {
                    Closed::TermEnded => self.note("term ended"),
                    Closed::Deadline => self.note("deadline"),
                    Closed::Aborted => self.note("aborted"),
                }
                self.job_ends(worker, Outcome::Stopped(closed), "");
            }
            Step::Go => {
                let reasons: Vec<Reason> = self.gate.reasons(boot).collect();
                let lets_pass =
                    |reason: &Reason| matches!(reason, Reason::Operator | Reason::Draining);
                assert!(reasons.iter().all(lets_pass), "a step was sent though {reasons:?}");
                self.serial += 1;
                let serial = self.serial;
                job.on_its_way = Some((serial, self.link));
                let (action, node) = (job.action, job.node);
                self.arrives(node, action);
                let lasts = self.rng.u64(1..self.setup.pace);
                self.after(lasts, Event::JobStep { worker, serial });
            }
        }
    }

    /// A request reaches its node.
    fn arrives(&mut self, node: usize, action: Action) {
        let node = &self.nodes[node];
        if node.answers() && action == Action::Configure {
            assert!(!node.is_restarting, "{} is configured again while it restarts", node.identity);
        }
    }

    /// The answer to a job's step arrives, or doesn't.
    fn step_ends(&mut self, worker: usize, serial: u64) {
        let Some(job) = &mut self.workers[worker] else { return };
        let Some((sent, link)) = job.on_its_way else { return };
        if sent != serial {
            return;
        }
        job.on_its_way = None;
        let (index, action, trouble) = (job.node, job.action, job.trouble);
        let is_lost = link != self.link && action != Action::Helper;
        if is_lost {
            self.note("link lost during a step");
            if action == Action::Restart {
                // The node may have heard it all the same.
                if self.rng.bool() && self.nodes[index].is_up {
                    self.restarts(index);
                }
                self.provisioned(worker, None);
            }
            // Anything else is sent again.
            return;
        }
        let boot = self.nodes[index].boot;
        if !self.nodes[index].answers() && action != Action::Helper {
            return match action {
                Action::Restart => self.provisioned(worker, None),
                Action::Configure => self.job_ends(worker, Outcome::Failed, "configure failed"),
                _ => self.job_ends(worker, Outcome::Unreachable, "no responders"),
            };
        }
        let node = &mut self.nodes[index];
        let next = match (action, trouble) {
            (Action::Inventory, _) => Ok(Action::Jwt),
            (Action::Jwt, Some(Trouble::Fails)) => Err(Outcome::Failed),
            (Action::Jwt, Some(Trouble::Refused)) => Err(Outcome::Refused),
            (Action::Jwt, Some(Trouble::WrongToken)) => Err(Outcome::WrongToken),
            (Action::Jwt, Some(Trouble::Misconfigured)) => Err(Outcome::Misconfigured),
            (Action::Jwt, Some(Trouble::NotProvisioning)) => Err(Outcome::NotProvisioning),
            (Action::Jwt, Some(Trouble::Reboots)) => {
                node.is_up = false;
                let lasts = self.rng.u64(1..10 * SECOND);
                self.after(lasts, Event::Boots(index));
                Err(Outcome::Failed)
            }
            (Action::Jwt, _) => Ok(Action::Helper),
            (Action::Helper, Some(Trouble::HelperFails)) => Err(Outcome::HelperFailed),
            (Action::Helper, Some(Trouble::Deferred)) => Err(Outcome::Deferred),
            (Action::Helper, Some(Trouble::ShutsDown)) if node.answers() => {
                node.is_up = false;
                node.is_shut_down = true;
                Err(Outcome::ShutDown)
            }
            (Action::Helper, Some(Trouble::Upgrades)) if node.answers() => {
                let down = self.rng.u64(1..5 * SECOND);
                self.after(down, Event::GoesDown(index, boot));
                let lasts = self.rng.u64(5 * SECOND..5 * MINUTE);
                self.after(lasts, Event::Boots(index));
                let sent_at = self.instant();
                let (version, from) = ("0.31.0".into(), "0.30.0".into());
                Err(Outcome::UpgradeSent { version, from, sent_at })
            }
            (Action::Helper, _) => Ok(Action::Configure),
            (Action::Configure, Some(Trouble::Busy)) => Err(Outcome::Busy),
            (Action::Configure, _) => {
                node.was_configured = true;
                if let Some(job) = &mut self.workers[worker] {
                    job.configured_at = Some(self.now);
                }
                Ok(Action::Restart)
            }
            (Action::Restart, Some(Trouble::RestartUnanswered)) => {
                self.restarts(index);
                return self.provisioned(worker, None);
            }
            (Action::Restart, _) => {
                self.nodes[index].is_restarting = true;
                self.restarts(index);
                return self.provisioned(worker, Some(self.now));
            }
        };
        match next {
            Ok(action) => {
                if let Some(job) = &mut self.workers[worker] {
                    job.action = action;
                }
            }
            Err(outcome) => {
                let reason = trouble.map(|trouble| format!("{trouble:?}")).unwrap_or_default();
                self.job_ends(worker, outcome, &reason);
            }
        }
    }

    /// A node that heard `restart` goes down after its splay, for good or to come back as it was.
    fn restarts(&mut self, node: usize) {
        let this = &mut self.nodes[node];
        let boot = this.boot;
        let comes_back = this.next_trouble() == Some(Trouble::ComesBack);
        let down = self.rng.u64(2 * SECOND..3 * SECOND);
        self.after(down, Event::GoesDown(node, boot));
        if comes_back {
            let lasts = self.rng.u64(3 * SECOND..40 * SECOND);
            self.after(lasts, Event::Boots(node));
        } else {
            self.nodes[node].is_provisioned = true;
        }
    }

    fn provisioned(&mut self, worker: usize, restarted_at: Option<u64>) {
        let configured_at = self.workers[worker].as_ref().and_then(|job| job.configured_at);
        let outcome = Outcome::Provisioned {
            configured_at: self.start + millis(configured_at.expect("restart follows configure")),
            restarted_at: restarted_at.map(|at| self.start + millis(at)),
        };
        self.seen.provisioned += 1;
        if let (Some(job), None) = (&self.workers[worker], restarted_at) {
            self.nodes[job.node].may_have_come_back = true;
        }
        self.job_ends(worker, outcome, "");
    }

    fn job_ends(&mut self, worker: usize, outcome: Outcome, reason: &str) {
        let Some(job) = self.workers[worker].take() else { return };
        if !matches!(outcome, Outcome::Stopped(_)) {
            self.nodes[job.node].spend_trouble();
            if job.was_running_at_drain {
                self.note("finished while draining");
            }
        }
        self.report(job.key, outcome, reason);
    }

    fn report(&mut self, key: Key, outcome: Outcome, reason: &str) {
        let report = Report::new(outcome, reason);
        self.done.push_back((key, report));
        let late = self.rng.u64(0..50);
        self.after(late, Event::Finish);
    }

    fn finish(&mut self) {
        let Some((key, report)) = self.done.pop_front() else { return };
        let now = self.instant();
        let just_reconnected = self.gate.just_reconnected(now);
        let gate_lost = self.gate.is_lost();
        let before = self.registry.node(&key.identity).map(|node| node.failures);
        let queue_max = self.setup.queue_max;
        let Simulation { registry, first, retry, .. } = self;
        let finished =
            registry.finish(&key, &report, now, just_reconnected, gate_lost, &mut |queue, key| {
                push(first, retry, queue_max, queue, key)
            });
        if self.trace {
            self.say(&format_args!("  {:?} -> {finished:?}", report.outcome));
        }
        if let Some(label) = finished.tally.outcome {
            self.note(label);
        }
        let after = self.registry.node(&key.identity).map(|node| node.failures);
        if finished.next != Next::NotCurrent
            && just_reconnected
            && report.outcome == Outcome::Unreachable
        {
            self.note("excused");
            assert!(after.is_none() || after == before, "a node out of reach was blamed");
        }
    }

    fn set_link(&mut self, up: bool) {
        if self.is_linked() == up {
            return;
        }
        self.link += 1;
        self.set(Reason::Disconnected, !up);
        for node in 0..self.nodes.len() {
            self.nodes[node].is_connected = false;
            if up {
                let late = self.rng.u64(0..20 * SECOND);
                self.after(late, Event::Reconnects(node));
            }
        }
        // Requests under way are lost with the link, and are sent again when it is back.
        for asked in &mut self.asked {
            asked.answer = None;
        }
        if up {
            self.discover();
        }
    }

    fn set(&mut self, reason: Reason, closed: bool) {
        let now = self.instant();
        match closed {
            true => self.gate.close(reason),
            false => self.gate.open(reason, now),
        }
    }

    /// Leadership was lost, or we drain.
    fn forget_all(&mut self) {
        self.registry.clear();
        self.first.clear();
        self.retry.clear();
        self.asked.clear();
        self.ready.clear();
    }

    /// What must hold after every step.
    fn check(&self) {
        self.registry.check();
        let counts = self.registry.counts();

        // Where each element is: a Queued entry has exactly one, a Working entry one job or report.
        let mut elements: Vec<&Key> = self.first.iter().chain(&self.retry).collect();
        elements.extend(self.asked.iter().map(|asked| &asked.key));
        elements.extend(self.ready.iter().map(|(key, _)| key));
        elements.extend(self.done.iter().map(|(key, _)| key));
        elements.extend(self.workers.iter().flatten().map(|job| &job.key));
        let mut current = 0;
        for (i, key) in elements.iter().enumerate() {
            assert!(!elements[i + 1..].contains(key), "{key:?} has two elements");
            if self.registry.is_current(key) {
                current += 1;
            }
        }
        assert_eq!(current, counts.queued + counts.working, "an entry has no element");

        // One identity is in at most one worker, and the registry knows it.
        for (i, job) in self.workers.iter().enumerate() {
            let Some(job) = job else { continue };
            let is_twice =
                self.workers[i + 1..].iter().flatten().any(|other| other.node == job.node);
            assert!(!is_twice, "{} is in two workers", job.key.identity);
            let state = self.registry.node(&job.key.identity).map(|node| node.state);
            assert!(
                matches!(state, Some(NodeState::Working { .. })),
                "{} is {state:?}",
                job.key.identity
            );
            let outages = OUTAGE_MAX + 2 * LAPSE_MAX;
            let longest = NODE_TIMEOUT + outages + 2 * STEPS * self.setup.pace;
            assert!(self.now - job.started <= longest, "{} is stuck in a worker", job.key.identity);
        }

        assert!(
            self.first.len() <= self.setup.queue_max && self.retry.len() <= self.setup.queue_max
        );
        assert!(self.asked.len() <= self.setup.window.max(1) + 1);

        let now = self.instant();
        let mut recount = registry::Counts::default();
        let longest_wait = millis(self.setup.retry_max).max(registry::BUSY_WAIT);
        for node in self.registry.nodes() {
            match node.state {
                NodeState::Queued { .. } => recount.queued += 1,
                NodeState::Working { .. } => recount.working += 1,
                NodeState::Settling { until } => {
                    recount.settling += 1;
                    assert!(until <= now + registry::SETTLING_UPGRADE);
                    assert!(until + millis(SWEEP_EVERY) >= now, "{} never settles", node.identity);
                }
                NodeState::Waiting { due } => {
                    recount.waiting += 1;
                    assert!(due <= now + longest_wait, "{} waits too long", node.identity);
                    assert_ne!(node.last_error, "", "{} waits without a reason", node.identity);
                }
            }
            if node.last_error.starts_with("came back") {
                let index = self.nodes.iter().position(|known| known.identity == *node.identity);
                let is_real = index.is_some_and(|index| self.nodes[index].may_have_come_back);
                assert!(is_real, "{} never came back", node.identity);
            }
        }
        assert_eq!(recount, counts);
        assert_eq!(counts.waiting_nodes(), recount.queued + recount.working + recount.settling);
    }

    fn check_end(&self) {
        match self.phase {
            Phase::Trouble => panic!("the trouble never ended"),
            Phase::Ending => {
                assert_eq!(
                    self.registry.counts(),
                    registry::Counts::default(),
                    "something was kept"
                );
            }
            Phase::Calm { since, .. } => {
                for node in self.nodes.iter().filter(|node| node.broken.is_some()) {
                    let known = self.registry.node(&node.identity);
                    let Some(NodeState::Waiting { .. }) = known.map(|known| known.state) else {
                        continue;
                    };
                    let error = known.map(|known| known.last_error).unwrap_or_default();
                    let expected = match node.broken {
                        Some(Trouble::Gone) => "no responders".to_owned(),
                        broken => broken.map(|broken| format!("{broken:?}")).unwrap_or_default(),
                    };
                    let is_real = error == expected
                        || error.starts_with("came back")
                        || ["no responders", "configure failed", "the queue was full"]
                            .contains(&error);
                    assert!(is_real, "{}: {error} instead of {expected}", node.identity);
                    // What fails for good is tried less and less: thrice at once, then with growing waits.
                    if !self.setup.forgets
                        && matches!(node.broken, Some(Trouble::Fails | Trouble::Refused))
                    {
                        let attempts_max = 8 + (self.now - since) / self.setup.retry_max;
                        let attempts = node.attempts_in_calm;
                        assert!(
                            attempts <= attempts_max,
                            "{} was tried {attempts} times",
                            node.identity
                        );
                    }
                }
            }
        }
    }

    fn unserved(&self) -> Vec<(&Identity, Option<registry::Node<'_>>)> {
        let unserved = self.nodes.iter().filter(|node| !node.is_served());
        unserved.map(|node| (&node.identity, self.registry.node(&node.identity))).collect()
    }

    fn count_attempt(&mut self, node: usize) {
        if matches!(self.phase, Phase::Calm { .. }) {
            self.nodes[node].attempts_in_calm += 1;
        }
    }

    fn note(&mut self, thing: &'static str) {
        self.seen.things.insert(thing);
    }

    fn say(&self, what: &fmt::Arguments<'_>) {
        eprintln!("{:>8.3} {what}", self.now as f64 / 1000.0);
    }

    fn is_linked(&self) -> bool {
        self.link % 2 == 1
    }

    fn index(&self, key: &Key) -> usize {
        let is_it = |node: &Node| node.identity == key.identity;
        self.nodes.iter().position(is_it).expect("all keys are of our nodes")
    }

    fn boot(&self) -> BootTime {
        BootTime::after_boot(millis(self.now))
    }

    fn may_begin(&self) -> bool {
        self.gate.begin(self.boot()).is_some()
    }

    fn lead(&mut self) {
        self.gate.lead(BootTime::after_boot(Duration::MAX));
        self.discover();
    }

    fn instant(&self) -> Instant {
        self.start + millis(self.now)
    }

    fn after(&mut self, delay: u64, event: Event) {
        self.serial += 1;
        self.events.insert((self.now + delay, self.serial), event);
    }
}

impl Node {
    fn new(index: usize, rng: &mut Rng) -> Node {
        let any = |rng: &mut Rng| Trouble::ALL[rng.usize(..Trouble::ALL.len())];
        // A healthy node may fail a few times, but not in ways that end it.
        let troubles = (0..rng.usize(0..4))
            .map(|_| any(rng))
            .filter(|trouble| !matches!(trouble, Trouble::Gone | Trouble::ShutsDown))
            .collect();
        let broken = (rng.u8(0..4) == 0).then(|| any(rng));
        Node {
            identity: Identity::parse(&format!("n{index}")).expect("an identity"),
            is_up: false,
            is_connected: false,
            boot: 0,
            troubles,
            broken,
            is_restarting: false,
            is_provisioned: false,
            is_shut_down: false,
            was_configured: false,
            may_have_come_back: false,
            attempts_in_calm: 0,
        }
    }

    fn answers(&self) -> bool {
        self.is_up && self.is_connected
    }

    /// Whether it is provisioned, or never can be.
    fn is_served(&self) -> bool {
        self.is_provisioned || self.broken.is_some()
    }

    fn next_trouble(&self) -> Option<Trouble> {
        self.broken.or_else(|| self.troubles.front().copied())
    }

    fn spend_trouble(&mut self) {
        self.troubles.pop_front();
    }
}

/// Says how to see a failure again.
struct Replay(u64);

impl Drop for Replay {
    fn drop(&mut self) {
        if thread::panicking() {
            let seed = self.0;
            eprintln!("replay with: SIM_SEED={seed} cargo test --lib simulat -- --nocapture");
        }
    }
}

fn push(
    first: &mut VecDeque<Key>,
    retry: &mut VecDeque<Key>,
    max: usize,
    queue: Queue,
    key: &Key,
) -> bool {
    let queue = match queue {
        Queue::First => first,
        Queue::Retry => retry,
    };
    let fits = queue.len() < max;
    if fits {
        queue.push_back(key.clone());
    }
    fits
}

fn millis(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

fn as_millis(duration: Duration) -> u64 {
    duration.as_millis() as u64
}
