//! Several candidates, one bucket and everything that can go wrong between them, under a virtual clock and a seeded
//! generator of trouble. `ELECTION_SEED=n cargo test --lib election::simulation -- --nocapture` replays one seed with a trace.
//!
//! After every event: at most one of them leads. At the end trouble ceases, and one must.

use std::collections::BTreeMap;
use std::fmt;

use fastrand::Rng;

use crate::clock::BootTime;
use crate::fleet::election::core::{Answer, Core, Input, Output, Ticket};
use crate::fleet::simulation::broker::{Bucket, Request};
use crate::fleet::simulation::network::{Network, PEACE};
use crate::fleet::simulation::{LEADERLESS_MAX, MS, SECOND, Time, duration, micros, seeds};

const SEEDS: u64 = 1_000;

/// How long trouble lasts.
const TROUBLE: Time = 60 * SECOND;
/// How long peace is watched.
const CALM: Time = 5 * SECOND;

#[test]
fn of_two_or_three_candidates_never_two_lead_and_one_does_in_peace() {
    let run = |seed, is_traced| Simulation::new(seed, is_traced).run();
    let ran = seeds::run("ELECTION", "election::simulation", SEEDS, run, Seen::add);
    let Some((seeds, seen)) = ran else { return };
    // A simulation in which nothing happens proves nothing.
    let Seen { terms, losses, handovers, taken_back, regained, frozen_leaders } = seen;
    for (what, count) in [
        ("terms", terms),
        ("losses", losses),
        ("keys taken over from whoever offered them", handovers),
        ("offered keys taken back", taken_back),
        ("terms that outlived a connection", regained),
        ("leaders frozen", frozen_leaders),
    ] {
        assert!(count > seeds / 10, "only {count} {what}");
    }
}

#[derive(Debug, Clone, Copy, Default)]
struct Seen {
    terms: u64,
    losses: u64,
    handovers: u64,
    taken_back: u64,
    regained: u64,
    frozen_leaders: u64,
}

impl Seen {
    fn add(&mut self, other: &Seen) {
        self.terms += other.terms;
        self.losses += other.losses;
        self.handovers += other.handovers;
        self.taken_back += other.taken_back;
        self.regained += other.regained;
        self.frozen_leaders += other.frozen_leaders;
    }
}

struct Simulation {
    seed: u64,
    trace: bool,
    rng: Rng,
    now: Time,
    events: BTreeMap<(Time, u64), Event>,
    serial: u64,
    bucket: Bucket,
    /// Who handed over a key last, and its number, until somebody takes it.
    offered: Option<(usize, u64)>,
    daemons: Vec<Daemon>,
    is_calm: bool,
    seen: Seen,
}

struct Daemon {
    core: Core,
    network: Network,
    /// Counts the processes that were this daemon, and within one of them its connections.
    process: u64,
    link: u64,
    is_connected: bool,
    is_frozen: bool,
    is_gone: bool,
    /// What came while it was frozen.
    waiting: Vec<Input>,
    /// What the gate was told: until when it may act, by its own clock.
    lease: Option<BootTime>,
    has_term: bool,
    /// Its nodes need until then after it wants to leave.
    busy_until: Option<Time>,
    /// Its clock, in parts of 1,000 of the true one.
    rate: u64,
    wakes_at: Option<Time>,
}

#[derive(Debug, Clone)]
enum Event {
    /// The core wants to be called.
    Wake {
        daemon: usize,
        process: u64,
    },
    /// A request reaches the broker.
    Request {
        daemon: usize,
        process: u64,
        link: u64,
        ticket: Ticket,
        request: Request,
    },
    /// An answer reaches the daemon.
    Answer {
        daemon: usize,
        process: u64,
        link: u64,
        ticket: Ticket,
        answer: Answer,
    },
    Offer {
        daemon: usize,
        number: u64,
    },
    Link {
        daemon: usize,
        is_up: bool,
    },
    Freeze(usize),
    Thaw(usize),
    Pause {
        daemon: usize,
        is_paused: bool,
    },
    StepDown(usize),
    /// The process ends, and another takes its place.
    Kill(usize),
    Drain(usize),
    Start(usize),
    BucketGoes,
    BucketComes,
    /// Somebody writes to the key, as an operator does who evicts the leader.
    ForeignWrite,
    /// The key is deleted, which makes it free for all.
    Purge,
    Trouble,
    Calm,
    /// From now on somebody must lead.
    MustLead,
    End,
}

impl Simulation {
    fn new(seed: u64, trace: bool) -> Simulation {
        let mut rng = Rng::with_seed(seed);
        let ttl = [4, 4, 5, 10][rng.usize(..4)] * SECOND;
        let bucket = Bucket::new(ttl, rng.u8(..4) > 0);
        let candidates = rng.usize(2..4);
        let mut simulation = Simulation {
            seed,
            trace,
            rng,
            now: SECOND,
            events: BTreeMap::new(),
            serial: 0,
            bucket,
            offered: None,
            daemons: Vec::new(),
            is_calm: false,
            seen: Seen::default(),
        };
        for daemon in 0..candidates {
            let rate = simulation.rng.u64(980..=1_020);
            let network = Network::new(5..500, 10..500, &mut simulation.rng);
            let (now, rng) = (simulation.now, simulation.rng.fork());
            simulation.daemons.push(Daemon::new(rate, network, now, rng));
            simulation.after(5 * SECOND, Event::Start(daemon));
        }
        simulation.after(SECOND, Event::Trouble);
        simulation.at(simulation.now + TROUBLE, Event::Calm);
        simulation
    }

    fn run(mut self) -> Seen {
        while let Some(((at, _), event)) = self.events.pop_first() {
            self.now = at;
            if self.trace {
                eprintln!("{:>12} {event:?}", at);
            }
            if matches!(event, Event::End) {
                break;
            }
            self.happen(event);
            self.check();
        }
        self.seen
    }

    fn at(&mut self, at: Time, event: Event) {
        self.serial += 1;
        self.events.insert((at.max(self.now), self.serial), event);
    }

    /// Lets something happen at some time within `at_most`.
    fn after(&mut self, at_most: Time, event: Event) {
        let at = self.now + self.rng.u64(..at_most.max(1));
        self.at(at, event);
    }

    fn one_in(&mut self, many: u64) -> bool {
        self.rng.u64(..many) == 0
    }

    /// Brings `event` to or from `daemon`: late, not at all, or twice.
    fn carry(&mut self, daemon: usize, event: Event) {
        let Network { usual, slow_one_in, slow_max, lost_one_in, doubled_one_in } =
            self.daemons[daemon].network;
        if self.one_in(lost_one_in) {
            return;
        }
        let copies = if self.one_in(doubled_one_in) { 2 } else { 1 };
        for _ in 0..copies {
            let at_most = if self.one_in(slow_one_in) { slow_max } else { usual };
            self.after(at_most, event.clone());
        }
    }

    fn happen(&mut self, event: Event) {
        match event {
            Event::Wake { daemon, process } => {
                if self.daemons[daemon].process == process {
                    self.daemons[daemon].wakes_at = None;
                    self.step(daemon, Input::Time);
                }
            }
            // What was sent over a connection that is gone may arrive, but its answer has nowhere to go.
            Event::Request { daemon, process, link, ticket, request } => {
                let answer = self.bucket.serve(request, self.now, self.is_calm, &mut self.rng);
                let Some(answer) = answer else { return };
                if let (Request::Write { expected }, Answer::Stored(_)) = (request, &answer) {
                    if let Some((by, _)) = self.offered.take_if(|(_, number)| *number == expected) {
                        self.seen.handovers += u64::from(by != daemon);
                        self.seen.taken_back += u64::from(by == daemon);
                    }
                }
                self.carry(daemon, Event::Answer { daemon, process, link, ticket, answer });
            }
            Event::Answer { daemon, process, link, ticket, answer } => {
                let to = &self.daemons[daemon];
                if to.process == process && to.link == link && to.is_connected {
                    self.step(daemon, Input::Answer(ticket, answer));
                }
            }
            Event::Offer { daemon, number } => {
                if self.daemons[daemon].is_connected {
                    self.step(daemon, Input::Offer(number));
                }
            }
            Event::Link { daemon, is_up } => self.link(daemon, is_up),
            Event::Freeze(daemon) => {
                let is_leader = self.leads(daemon);
                self.seen.frozen_leaders += u64::from(is_leader);
                self.daemons[daemon].is_frozen = true;
            }
            Event::Thaw(daemon) => self.thaw(daemon),
            Event::Pause { daemon, is_paused } => {
                self.step(daemon, Input::Pause(is_paused));
            }
            Event::StepDown(daemon) => self.step(daemon, Input::StepDown),
            Event::Kill(daemon) => {
                self.daemons[daemon].end();
                self.after(10 * SECOND, Event::Start(daemon));
            }
            Event::Drain(daemon) => self.step(daemon, Input::Drain),
            Event::Start(daemon) => self.start(daemon),
            Event::BucketGoes => {
                self.bucket.exists = false;
                self.after(10 * SECOND, Event::BucketComes);
            }
            Event::BucketComes => self.bucket.comes(&mut self.rng),
            Event::Purge => self.bucket.key = None,
            Event::ForeignWrite => {
                self.bucket.write(self.now);
            }
            Event::Trouble => self.trouble(),
            Event::Calm => self.calm(),
            Event::MustLead => {
                let leaders = (0..self.daemons.len()).filter(|daemon| self.leads(*daemon)).count();
                assert_eq!(leaders, 1, "{self:?}: nobody leads in peace");
                self.after(SECOND, Event::MustLead);
            }
            Event::End => {}
        }
    }

    fn link(&mut self, daemon: usize, is_up: bool) {
        let it = &mut self.daemons[daemon];
        if it.is_connected == is_up || it.is_gone {
            return;
        }
        it.is_connected = is_up;
        it.link += 1;
        self.step(daemon, Input::Link(is_up));
        if !is_up && !self.is_calm {
            self.after(15 * SECOND, Event::Link { daemon, is_up: true });
        }
    }

    fn start(&mut self, daemon: usize) {
        let Daemon { rate, network, process, .. } = self.daemons[daemon];
        let rng = self.rng.fork();
        let new = Daemon::new(rate, network, self.now, rng);
        self.daemons[daemon] = Daemon { process: process + 1, is_gone: false, ..new };
        self.after(200 * MS, Event::Link { daemon, is_up: true });
    }

    /// The machine sees to its threads in any order.
    fn thaw(&mut self, daemon: usize) {
        let it = &mut self.daemons[daemon];
        if !it.is_frozen || it.is_gone {
            return;
        }
        it.is_frozen = false;
        let mut waiting = std::mem::take(&mut it.waiting);
        if self.rng.bool() {
            waiting.insert(0, Input::Time);
        }
        waiting.push(Input::Time);
        for input in waiting {
            self.check();
            self.step(daemon, input);
        }
    }

    fn step(&mut self, daemon: usize, input: Input) {
        let now = self.now;
        let it = &mut self.daemons[daemon];
        if it.is_gone {
            return;
        }
        if it.is_frozen {
            it.waiting.push(input);
            return;
        }
        let outputs = it.core.step(it.clock(now), input);
        for output in outputs {
            self.obey(daemon, output);
        }
        self.leave(daemon);
        self.wake(daemon);
    }

    fn obey(&mut self, daemon: usize, output: Output) {
        if self.trace {
            eprintln!("{:>12}   {daemon}: {output:?}", self.now);
        }
        let it = &mut self.daemons[daemon];
        let (process, link) = (it.process, it.link);
        match output {
            // It has not heard of it yet.
            Output::AskStatus(ticket) | Output::Write { ticket, .. } if !it.is_connected => {
                self.step(daemon, Input::Unsent(ticket));
            }
            Output::AskStatus(ticket) => {
                let request = Request::Status;
                self.carry(daemon, Event::Request { daemon, process, link, ticket, request });
            }
            Output::Write { ticket, expected } => {
                let request = Request::Write { expected };
                self.carry(daemon, Event::Request { daemon, process, link, ticket, request });
            }
            Output::Lead(until) => {
                assert!(it.lease.is_none(), "leads already");
                self.seen.regained += u64::from(it.has_term);
                self.seen.terms += u64::from(!it.has_term);
                it.has_term = true;
                it.lease = Some(until);
            }
            Output::Renew(until) => {
                // Whoever steps down goes on with what it has, and does not lead again for that.
                let goes_on = it.has_term && (it.lease.is_some() || it.core.is_leaving());
                assert!(goes_on, "goes on from nothing");
                assert!(it.lease.is_none_or(|lease| lease <= until), "goes back");
                it.lease = Some(until);
            }
            Output::Lapse => it.lease = None,
            Output::Lost(_) => {
                assert!(it.has_term, "{self:?}: lost what it never had");
                self.seen.losses += 1;
                it.has_term = false;
                it.lease = None;
            }
            Output::HandOver(number) => {
                assert!(it.lease.is_none() && !it.has_term, "{self:?}: hands over what it uses");
                self.offered = Some((daemon, number));
                for other in (0..self.daemons.len()).filter(|other| *other != daemon) {
                    self.carry(other, Event::Offer { daemon: other, number });
                }
            }
        }
    }

    /// Ends the nodes of one that wants to leave, each in its time, and the process that has left.
    fn leave(&mut self, daemon: usize) {
        let now = self.now;
        if !self.daemons[daemon].core.is_leaving() {
            self.daemons[daemon].busy_until = None;
        } else {
            let until = now + self.rng.u64(..4 * SECOND);
            let it = &mut self.daemons[daemon];
            if now >= *it.busy_until.get_or_insert(until) {
                for output in it.core.step(it.clock(now), Input::Idle) {
                    self.obey(daemon, output);
                }
            }
        }
        if self.daemons[daemon].core.is_gone() {
            self.daemons[daemon].end();
            self.after(10 * SECOND, Event::Start(daemon));
        }
    }

    fn wake(&mut self, daemon: usize) {
        let it = &self.daemons[daemon];
        let Some(wake) = it.core.wake() else { return };
        // A thread is late now and then, and never early.
        let at = it.true_time(wake).max(self.now) + MS;
        if it.wakes_at.is_none_or(|wakes| at < wakes) {
            let process = it.process;
            self.daemons[daemon].wakes_at = Some(at);
            let late = if self.is_calm { MS } else { 30 * MS };
            let at = at + self.rng.u64(..late);
            self.at(at, Event::Wake { daemon, process });
        }
    }

    fn trouble(&mut self) {
        if self.is_calm {
            return;
        }
        let daemon = self.rng.usize(..self.daemons.len());
        match self.rng.u8(..32) {
            0..6 => self.at(self.now, Event::Link { daemon, is_up: false }),
            6..12 => {
                self.at(self.now, Event::Freeze(daemon));
                let longest = [SECOND, 3 * SECOND, 20 * SECOND][self.rng.usize(..3)];
                self.after(longest, Event::Thaw(daemon));
            }
            12..14 => {
                self.at(self.now, Event::Pause { daemon, is_paused: true });
                self.after(8 * SECOND, Event::Pause { daemon, is_paused: false });
            }
            14..16 => self.at(self.now, Event::StepDown(daemon)),
            16 => self.at(self.now, Event::Kill(daemon)),
            17..19 => self.at(self.now, Event::Drain(daemon)),
            19 => self.at(self.now, Event::BucketGoes),
            20..22 => self.at(self.now, Event::ForeignWrite),
            22..27 => self.at(self.now, Event::Purge),
            _ => {
                self.bucket.exists = false;
                self.at(self.now, Event::BucketComes);
            }
        }
        self.after(3 * SECOND, Event::Trouble);
    }

    /// From now on nothing goes wrong any more.
    fn calm(&mut self) {
        self.is_calm = true;
        // What is on its way may arrive yet.
        let settled = self.now + 12 * SECOND;
        self.at(self.now, Event::BucketComes);
        for daemon in 0..self.daemons.len() {
            self.daemons[daemon].network = PEACE;
            self.at(settled, Event::Thaw(daemon));
            self.at(settled, Event::Link { daemon, is_up: true });
            self.at(settled, Event::Pause { daemon, is_paused: false });
        }
        let must = settled + self.bucket.ttl + LEADERLESS_MAX;
        self.at(must, Event::MustLead);
        self.at(must + CALM, Event::End);
    }

    fn leads(&self, daemon: usize) -> bool {
        let it = &self.daemons[daemon];
        !it.is_gone && it.lease.is_some_and(|lease| it.clock(self.now) < lease)
    }

    fn check(&self) {
        let leaders: Vec<usize> =
            (0..self.daemons.len()).filter(|daemon| self.leads(*daemon)).collect();
        assert!(leaders.len() < 2, "{self:?}: {leaders:?} lead");
    }
}

impl Daemon {
    /// Not started yet.
    fn new(rate: u64, network: Network, now: Time, rng: Rng) -> Daemon {
        let clock = clock(rate, now);
        Daemon {
            core: Core::new(clock, rng),
            network,
            process: 0,
            link: 0,
            is_connected: false,
            is_frozen: false,
            is_gone: true,
            waiting: Vec::new(),
            lease: None,
            has_term: false,
            busy_until: None,
            rate,
            wakes_at: None,
        }
    }

    fn end(&mut self) {
        self.is_gone = true;
        self.is_connected = false;
        self.process += 1;
    }

    fn clock(&self, now: Time) -> BootTime {
        clock(self.rate, now)
    }

    fn true_time(&self, time: BootTime) -> Time {
        micros(time.since(BootTime::START)) * 1_000 / self.rate
    }
}

fn clock(rate: u64, now: Time) -> BootTime {
    BootTime::after_boot(duration(now * rate / 1_000))
}

impl fmt::Debug for Simulation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ELECTION_SEED={} at {} µs", self.seed, self.now)
    }
}
