//! The world around the daemons: time, messages on their way, and what happens next.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

use fastrand::Rng;

use crate::fleet::election::core as election;
use crate::fleet::simulation::broker::{self, Brokers};
use crate::fleet::simulation::checks::Actors;
use crate::fleet::simulation::daemon::{Daemon, Voice};
use crate::fleet::simulation::network::PEACE;
use crate::fleet::simulation::node::{Ask, Node};
use crate::fleet::simulation::process::{Id, Input, News, Post, Process, Sent};
use crate::fleet::simulation::{MS, SECOND, Scene, Seen, Setup, Time, say};
use crate::protocol::ksuid::Ksuid;
use crate::protocol::peer::Role;

/// The longest until somebody who lost its broker is back.
pub const RECONNECT_MAX: Time = 20 * SECOND;
/// A thread is late now and then, and never early.
const LATE_MAX: Time = 30 * MS;
/// How late a startup event is at most.
const EVENT_LATE_MAX: Time = 1_500 * MS;
/// How long a way is slow.
const CONGESTION: Time = 5 * SECOND;
/// How long running nodes get when a daemon drains.
const DRAIN_TIMEOUT: Time = 30 * SECOND;

/// When the first process began, as Unix time.
const FIRST_START: i64 = 1_750_000_000;

/// Far more than happens in any run.
const STEPS_MAX: u64 = 1_000_000;

/// One run.
pub struct World {
    pub seed: u64,
    pub is_traced: bool,
    pub rng: Rng,
    pub now: Time,
    pub events: BinaryHeap<Reverse<Scheduled>>,
    serial: u64,
    pub setup: Setup,
    pub brokers: Brokers,
    pub nodes: Vec<Node>,
    pub daemons: Vec<Daemon>,
    pub phase: Phase,
    pub actors: Actors,
    /// When a daemon, the first, last took a heartbeat of another, and what that was then, unless it has left since.
    pub heard: BTreeMap<(usize, usize), (Time, Role)>,
    pub disturbed_at: Time,
    sent: Vec<Sent>,
    pub seen: Seen,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Phase {
    Trouble,
    /// Since when, and until when each node must be provisioned.
    Peace {
        since: Time,
        until: Vec<Time>,
    },
    /// All drain.
    Ending {
        until: Time,
    },
}

/// An event, by its time and then by its turn.
pub struct Scheduled {
    at: Time,
    serial: u64,
    pub event: Event,
}

impl PartialEq for Scheduled {
    fn eq(&self, other: &Scheduled) -> bool {
        self.serial == other.serial
    }
}

impl Eq for Scheduled {}

impl PartialOrd for Scheduled {
    fn partial_cmp(&self, other: &Scheduled) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Scheduled {
    fn cmp(&self, other: &Scheduled) -> std::cmp::Ordering {
        (self.at, self.serial).cmp(&(other.at, other.serial))
    }
}

/// Where an answer goes.
#[derive(Debug, Clone, Copy)]
pub struct Back {
    daemon: usize,
    incarnation: u32,
    link: u32,
}

#[derive(Debug, Clone)]
pub enum Event {
    /// Something for a process that is still the same.
    Process {
        daemon: usize,
        incarnation: u32,
        input: Input,
    },
    /// Something that comes over a connection.
    Delivery {
        back: Back,
        news: News,
    },
    /// A request reaches a node.
    Request {
        node: usize,
        boot: u32,
        id: Id,
        ask: Ask,
        back: Back,
    },
    /// A request reaches the bucket.
    Bucket {
        back: Back,
        ticket: election::Ticket,
        request: broker::Request,
    },
    NodeBoots(usize),
    NodeGoesDown {
        node: usize,
        boot: u32,
    },
    NodeReconnects {
        node: usize,
        boot: u32,
    },
    Reconnect {
        daemon: usize,
        incarnation: u32,
    },
    Freeze {
        daemon: usize,
        sleeps: bool,
    },
    Thaw {
        daemon: usize,
        slept: Time,
    },
    Start(usize),
    Kill(usize),
    BrokerStops(usize),
    BrokerStarts(usize),
    CutOff(Option<usize>),
    BucketGoes,
    BucketComes,
    /// Somebody writes to the key, as an operator does who evicts the leader.
    ForeignWrite,
    /// The key is deleted, which makes it free for all.
    Purge,
    LinkEnds(usize),
    /// The way between a daemon and its broker is slow for a while.
    Congestion(usize),
    NodeLosesBroker(usize),
    Trouble,
    Peace,
    /// Somebody looks whether all is done.
    Look,
}

impl World {
    pub fn new(seed: u64, is_traced: bool) -> World {
        let mut rng = Rng::with_seed(seed);
        let setup = Setup::new(&mut rng);
        let actions = setup.actions();
        let nodes = (0..rng.usize(1..=7)).map(|n| Node::new(n, &actions, &mut rng)).collect();
        let brokers = Brokers::new(
            [1, 1, 2, 3][rng.usize(..4)],
            [4, 4, 5, 10][rng.usize(..4)] * SECOND,
            setup.is_quiet || rng.u8(..4) > 0,
        );
        // Where every message may be late or lost, nobody leads for long.
        let is_smooth = rng.bool();
        let name = |n| if setup.has_twins && n == 1 { 0 } else { n };
        let daemons = (0..setup.ways.len())
            .map(|n| Daemon::new(name(n), setup.ways[n], is_smooth, &mut rng))
            .collect();
        let mut world = World {
            seed,
            is_traced,
            rng,
            now: SECOND,
            events: BinaryHeap::new(),
            serial: 0,
            setup,
            brokers,
            nodes,
            daemons,
            phase: Phase::Trouble,
            actors: Actors::default(),
            heard: BTreeMap::new(),
            disturbed_at: 0,
            sent: Vec::new(),
            seen: Seen::default(),
        };
        world.plan();
        world
    }

    /// Runs to the end, or panics at the first broken invariant.
    pub fn run(mut self) -> Seen {
        while let Some(Reverse(Scheduled { at, event, .. })) = self.events.pop() {
            self.now = at;
            self.seen.steps += 1;
            assert!(self.seen.steps < STEPS_MAX, "{self:?}: it never ends");
            if self.is_traced {
                say(at, &format_args!("{event:?}"));
            }
            self.happen(event);
            self.check();
            if self.is_over() {
                break;
            }
        }
        self.check_end();
        self.seen.provisioned +=
            self.nodes.iter().filter(|node| node.is_provisioned).count() as u64;
        self.seen
    }

    pub fn at(&mut self, at: Time, event: Event) {
        self.serial += 1;
        self.events.push(Reverse(Scheduled { at: at.max(self.now), serial: self.serial, event }));
    }

    /// Lets something happen at some time within `at_most`.
    pub fn within(&mut self, at_most: Time, event: Event) {
        let at = self.now + self.rng.u64(..at_most.max(1));
        self.at(at, event);
    }

    pub fn is_peaceful(&self) -> bool {
        self.phase != Phase::Trouble
    }

    /// Something is in somebody's way until then.
    pub fn disturb(&mut self, until: Time) {
        self.disturbed_at = self.disturbed_at.max(until);
    }

    /// For the process that a daemon is now.
    pub fn input(&mut self, at: Time, daemon: usize, input: Input) {
        let incarnation = self.daemons[daemon].incarnation;
        self.at(at, Event::Process { daemon, incarnation, input });
    }

    fn happen(&mut self, event: Event) {
        match event {
            Event::Process { daemon, incarnation, input } => {
                let it = &mut self.daemons[daemon];
                if it.incarnation != incarnation {
                    return;
                }
                // Whoever wakes up is woken once.
                let wakes = match input {
                    Input::Fleet => &mut it.fleet_wakes,
                    Input::Election => &mut it.election_wakes,
                    _ => return self.tell(daemon, input),
                };
                if wakes.take_if(|at| *at == self.now).is_some() {
                    self.tell(daemon, input);
                }
            }
            Event::Delivery { back: Back { daemon, incarnation, link }, news } => {
                let it = &self.daemons[daemon];
                let is_there = it.connection.is_some_and(|(_, number)| number == link);
                if it.incarnation == incarnation && is_there {
                    self.tell(daemon, Input::News(news));
                }
            }
            Event::Request { node, boot, id, ask, back } => self.request(node, boot, id, ask, back),
            Event::Bucket { back, ticket, request } => self.ask_bucket(back, ticket, request),
            Event::NodeBoots(node) => self.node_boots(node),
            Event::NodeGoesDown { node, boot } => {
                if self.nodes[node].boot == boot {
                    self.nodes[node].goes_down(self.now);
                }
            }
            Event::NodeReconnects { node, boot } => self.node_reconnects(node, boot),
            Event::NodeLosesBroker(node) => {
                self.nodes[node].loses_broker(self.now);
                let boot = self.nodes[node].boot;
                self.within(RECONNECT_MAX, Event::NodeReconnects { node, boot });
            }
            Event::Reconnect { daemon, incarnation } => self.connect(daemon, incarnation),
            Event::LinkEnds(daemon) => self.disconnect(daemon, 10 * MS),
            Event::Congestion(daemon) => {
                self.daemons[daemon].congested_until = self.now + CONGESTION;
            }
            Event::Freeze { daemon, sleeps } => self.freeze(daemon, sleeps),
            Event::Thaw { daemon, slept } => self.thaw(daemon, slept),
            Event::Start(daemon) => self.start(daemon),
            Event::Kill(daemon) => {
                if self.daemons[daemon].leads(self.now) {
                    self.seen.note("leader killed");
                }
                self.daemons[daemon].ends();
                self.within(10 * SECOND, Event::Start(daemon));
            }
            Event::BrokerStops(broker) => self.broker_stops(broker),
            Event::BrokerStarts(broker) => self.brokers.is_up[broker] = true,
            Event::CutOff(broker) => self.brokers.cut_off = broker,
            Event::BucketGoes => self.brokers.bucket.exists = false,
            Event::BucketComes => self.brokers.bucket.comes(&mut self.rng),
            Event::ForeignWrite => {
                self.brokers.bucket.write(self.now);
            }
            Event::Purge => self.brokers.bucket.key = None,
            Event::Trouble => self.trouble(),
            Event::Peace => self.make_peace(),
            Event::Look => self.within(SECOND, Event::Look),
        }
    }

    /// Gives something to a process, now or when it is awake again.
    fn tell(&mut self, daemon: usize, input: Input) {
        if self.daemons[daemon].is_frozen {
            self.daemons[daemon].waiting.push(input);
            return;
        }
        let now = self.now;
        let peace = self.is_peaceful();
        let World { daemons, nodes, rng, seen, setup, sent, disturbed_at, is_traced, .. } = self;
        let it = &mut daemons[daemon];
        let Some(process) = &mut it.process else { return };
        let is_draining = matches!(input, Input::Drain);
        if let Input::News(News::Election(ticket, election::Answer::Stored(_))) = &input {
            it.writes.comes_back(*ticket);
        }
        if let Input::News(News::Said(from, beat)) = &input {
            if *from == daemon {
                it.voice.beats.comes_back(beat.number);
            }
            match beat.leaving {
                true => drop(self.heard.remove(&(daemon, *from))),
                false => drop(self.heard.insert((daemon, *from), (self.now, beat.role))),
            }
        }
        let mut drops_connection = false;
        let mut scene = Scene {
            now,
            mono: it.clock.mono(now),
            boot: it.clock.boot(now),
            rng,
            setup,
            nodes,
            seen,
            sent,
            drops_connection: &mut drops_connection,
            peace,
            disturbed_at,
            trace: is_traced.then_some(daemon),
        };
        process.take(input, &mut scene);
        let has_run = std::mem::take(&mut process.has_run);
        let fleet_wakes = has_run.then(|| process.wake(&scene)).flatten();
        self.post_all(daemon);
        if has_run {
            self.check_process(daemon);
        }
        self.set_timers(daemon, fleet_wakes);
        if is_draining {
            self.input(now + DRAIN_TIMEOUT, daemon, Input::Abort);
        }
        if drops_connection {
            self.disconnect(daemon, 1);
        }
        let it = &mut self.daemons[daemon];
        if it.process.as_ref().is_some_and(Process::is_over) {
            self.check_gone(daemon);
            self.daemons[daemon].ends();
            if !matches!(self.phase, Phase::Ending { .. }) {
                self.within(10 * SECOND, Event::Start(daemon));
            }
        }
    }

    fn set_timers(&mut self, daemon: usize, fleet: Option<std::time::Instant>) {
        let late_max = if self.is_peaceful() { MS } else { LATE_MAX };
        let it = &self.daemons[daemon];
        let Some(process) = &it.process else { return };
        let boot = it.clock.boot(self.now);
        let peers = process.peers.as_ref().and_then(|core| core.wake(boot));
        let election = process.wake_election(boot).or(peers);
        let election = election.map(|at| it.clock.when_boot(at));
        let fleet = fleet.map(|at| it.clock.when_mono(at));
        for (at, input) in [(election, Input::Election), (fleet, Input::Fleet)] {
            let Some(at) = at else { continue };
            let at = at.max(self.now + 1);
            let is_fleet = matches!(input, Input::Fleet);
            let wakes = match is_fleet {
                true => &mut self.daemons[daemon].fleet_wakes,
                false => &mut self.daemons[daemon].election_wakes,
            };
            if wakes.is_none_or(|other| at + late_max < other) {
                let at = at + self.rng.u64(..late_max);
                *wakes = Some(at);
                self.input(at, daemon, input);
            }
        }
    }

    /// Sends what a process sent.
    fn post_all(&mut self, daemon: usize) {
        for sent in std::mem::take(&mut self.sent) {
            self.check_act(daemon, &sent);
            if let Post::Beat(beat) = &sent.post {
                let it = &mut self.daemons[daemon];
                it.voice.speaks(it.clock.boot(self.now), beat);
            }
            let it = &self.daemons[daemon];
            let Some((broker, link)) = it.connection else { continue };
            let back = Back { daemon, incarnation: it.incarnation, link };
            match sent.post {
                Post::Request { node, id, action } => {
                    let to = &self.nodes[node];
                    let is_reached = to.is_there()
                        && to.broker.is_some_and(|to| self.brokers.reaches(broker, to));
                    if is_reached {
                        let (boot, ask) = (to.boot, Ask { daemon, action });
                        self.convey(daemon, Event::Request { node, boot, id, ask, back });
                    } else if self.is_peaceful() || self.rng.u8(..4) > 0 {
                        self.carry(back, News::NoResponders(id));
                    } else {
                        // The brokers have not noticed yet.
                        self.disturb(self.now);
                    }
                }
                Post::Discovery => self.discovery(broker, back),
                Post::Election(ticket, request) => {
                    let it = &mut self.daemons[daemon];
                    it.writes.sends(ticket, it.clock.boot(self.now));
                    if self.brokers.reaches(broker, self.brokers.bucket.at) {
                        self.convey(daemon, Event::Bucket { back, ticket, request });
                    } else if self.rng.bool() {
                        self.carry(back, News::Election(ticket, election::Answer::NoResponders));
                    }
                }
                Post::Beat(beat) => {
                    // The sender hears it, too.
                    for other in 0..self.daemons.len() {
                        let it = &self.daemons[other];
                        let Some((at, link)) = it.connection else { continue };
                        let back = Back { daemon: other, incarnation: it.incarnation, link };
                        if self.brokers.reaches(broker, at) {
                            self.carry(back, News::Said(daemon, beat.clone()));
                        }
                    }
                }
                Post::Offer(number) => {
                    for other in (0..self.daemons.len()).filter(|other| *other != daemon) {
                        let it = &self.daemons[other];
                        let Some((at, link)) = it.connection else { continue };
                        let back = Back { daemon: other, incarnation: it.incarnation, link };
                        if self.brokers.reaches(broker, at) {
                            self.carry(back, News::Offer(number));
                        }
                    }
                }
            }
        }
    }

    fn discovery(&mut self, broker: usize, back: Back) {
        for node in 0..self.nodes.len() {
            let it = &self.nodes[node];
            let is_reached = it.broker.is_some_and(|to| self.brokers.reaches(broker, to));
            if it.is_found() && is_reached && (self.is_peaceful() || self.rng.u8(..20) > 0) {
                self.carry(back, News::Discovered(node));
            }
        }
    }

    /// Brings an answer to a daemon.
    fn carry(&mut self, back: Back, news: News) {
        self.convey(back.daemon, Event::Delivery { back, news });
    }

    /// Brings a message to or from `daemon`: late, not at all, or twice.
    fn convey(&mut self, daemon: usize, event: Event) {
        let network = match self.is_peaceful() || self.setup.is_quiet {
            true => PEACE,
            false => self.daemons[daemon].network(self.now),
        };
        if self.rng.u64(..network.lost_one_in) == 0 {
            self.disturb(self.now);
            return;
        }
        let is_doubled = self.rng.u64(..network.doubled_one_in) == 0;
        for _ in 0..=u8::from(is_doubled) {
            let is_slow = self.rng.u64(..network.slow_one_in) == 0;
            let at_most = if is_slow { network.slow_max } else { network.usual };
            let at = self.now + self.rng.u64(..at_most);
            if is_slow || is_doubled {
                self.disturb(at);
            }
            self.at(at, event.clone());
        }
    }

    fn ask_bucket(&mut self, back: Back, ticket: election::Ticket, request: broker::Request) {
        let peace = self.is_peaceful() || self.setup.is_quiet;
        let answer = self.brokers.bucket.serve(request, self.now, peace, &mut self.rng);
        if let (broker::Request::Write { expected }, Some(election::Answer::Stored(number))) =
            (request, &answer)
        {
            self.stored(back, expected, *number);
        }
        if let Some(answer) = answer {
            self.carry(back, News::Election(ticket, answer));
        }
    }

    /// A write of a daemon's to the key was good.
    fn stored(&mut self, back: Back, expected: u64, number: u64) {
        let it = &mut self.daemons[back.daemon];
        if it.incarnation != back.incarnation {
            return;
        }
        let made = self.brokers.bucket.made;
        let is_of_another = it.numbers.get(&expected).is_some_and(|of| *of != made);
        it.numbers.insert(number, made);
        // A key that changes hands while the answer is under way shows who counts its time from when.
        let one_in = if self.now < it.congested_until { 2 } else { 30 };
        let changes_hands = it.leads(self.now) && self.rng.u8(..one_in) == 0;
        if changes_hands && !self.is_peaceful() && !self.setup.is_quiet {
            self.at(self.now + MS, Event::Purge);
        }
        if is_of_another {
            self.seen.note("a number of another bucket");
            self.actors.forget();
        }
    }

    fn request(&mut self, node: usize, boot: u32, id: Id, ask: Ask, back: Back) {
        if self.nodes[node].boot != boot {
            return;
        }
        let reaction = self.nodes[node].hear(ask, self.now, &mut self.rng);
        for (thinks, answer) in reaction.answers {
            let network = PEACE.usual;
            let at = self.now + thinks + self.rng.u64(..network);
            self.at(at, Event::Delivery { back, news: News::Answer(id, answer) });
        }
        if let Some((goes, back)) = reaction.goes {
            self.at(self.now + goes, Event::NodeGoesDown { node, boot });
            if let Some(down) = back {
                self.at(self.now + goes + down, Event::NodeBoots(node));
            }
        }
    }

    fn node_boots(&mut self, node: usize) {
        let broker = self.brokers.any(&mut self.rng);
        if self.nodes[node].is_up {
            self.nodes[node].goes_down(self.now);
        }
        if !self.nodes[node].boots(broker) {
            return;
        }
        let boot = self.nodes[node].boot;
        let Some(broker) = broker else {
            return self.within(RECONNECT_MAX, Event::NodeReconnects { node, boot });
        };
        // The event may come after the node has answered a discovery, twice, or not at all.
        let id = self.rng.u64(..);
        for _ in 0..self.rng.u8(..3) {
            for daemon in 0..self.daemons.len() {
                let it = &self.daemons[daemon];
                let Some((at, link)) = it.connection else { continue };
                if self.brokers.reaches(broker, at) {
                    let back = Back { daemon, incarnation: it.incarnation, link };
                    let news = News::Announced(node, id);
                    self.within(EVENT_LATE_MAX, Event::Delivery { back, news });
                }
            }
        }
    }

    fn node_reconnects(&mut self, node: usize, boot: u32) {
        let it = &self.nodes[node];
        if it.boot != boot || !it.is_up || it.broker.is_some() {
            return;
        }
        let broker = self.brokers.any(&mut self.rng);
        self.nodes[node].broker = broker;
        if broker.is_none() {
            self.within(RECONNECT_MAX, Event::NodeReconnects { node, boot });
        }
    }

    fn broker_stops(&mut self, broker: usize) {
        self.seen.note("broker restart");
        self.brokers.stop(broker);
        for node in 0..self.nodes.len() {
            if self.nodes[node].broker == Some(broker) {
                self.happen(Event::NodeLosesBroker(node));
            }
        }
        for daemon in 0..self.daemons.len() {
            if self.daemons[daemon].connection.is_some_and(|(at, _)| at == broker) {
                // One that dies without a word is missed later.
                let notices = if self.rng.bool() { 10 * MS } else { 6 * SECOND };
                self.disconnect(daemon, notices);
            }
        }
    }

    /// A daemon's connection ends, which it notices within some time.
    fn disconnect(&mut self, daemon: usize, notices: Time) {
        if self.daemons[daemon].connection.take().is_none() {
            return;
        }
        self.daemons[daemon].voice = Voice::default();
        let at = self.now + self.rng.u64(..notices);
        self.input(at, daemon, Input::Link(None));
        let incarnation = self.daemons[daemon].incarnation;
        let back = at + self.rng.u64(..RECONNECT_MAX / 2) + 1;
        self.disturb(back + RECONNECT_MAX);
        self.at(back, Event::Reconnect { daemon, incarnation });
    }

    pub fn connect(&mut self, daemon: usize, incarnation: u32) {
        let it = &mut self.daemons[daemon];
        if it.incarnation != incarnation || it.connection.is_some() || it.process.is_none() {
            return;
        }
        // A frozen process connects when it goes on.
        let broker = self.brokers.any(&mut self.rng).filter(|_| !it.is_frozen);
        let Some(broker) = broker else {
            return self.within(RECONNECT_MAX / 2, Event::Reconnect { daemon, incarnation });
        };
        it.links += 1;
        let link = it.links;
        it.connection = Some((broker, link));
        it.connected_at = self.now;
        self.tell(daemon, Input::Link(Some(link)));
    }

    fn freeze(&mut self, daemon: usize, sleeps: bool) {
        let it = &mut self.daemons[daemon];
        if it.is_frozen || it.process.is_none() {
            return;
        }
        it.is_frozen = true;
        if it.leads(self.now) {
            self.seen.note("woke up as former leader");
            // By the time it wakes up another leads, and the key may have the number again that it had then.
            if self.rng.bool() {
                self.brokers.bucket.exists = false;
                self.at(self.now + MS, Event::BucketComes);
            }
        }
        let longest = [SECOND, 6 * SECOND, 20 * SECOND][self.rng.usize(..3)];
        let lasts = self.rng.u64(..longest);
        self.disturb(self.now + lasts + SECOND);
        let slept = if sleeps { lasts } else { 0 };
        self.at(self.now + lasts, Event::Thaw { daemon, slept });
    }

    /// The machine sees to its threads in any order.
    pub fn thaw(&mut self, daemon: usize, slept: Time) {
        let it = &mut self.daemons[daemon];
        if !it.is_frozen {
            return;
        }
        it.is_frozen = false;
        it.clock.sleeps(slept);
        let mut waiting = std::mem::take(&mut it.waiting);
        match self.rng.u8(..3) {
            0 => waiting.insert(0, Input::Fleet),
            1 => waiting.insert(0, Input::Election),
            _ => {}
        }
        waiting.extend([Input::Fleet, Input::Election]);
        for input in waiting {
            self.check();
            self.tell(daemon, input);
        }
    }

    pub fn start(&mut self, daemon: usize) {
        let now = self.now;
        let rng = self.rng.fork();
        let it = &mut self.daemons[daemon];
        if it.process.is_some() || matches!(self.phase, Phase::Ending { .. }) {
            return;
        }
        let sender = it.sender.clone();
        let instance = Ksuid::new(FIRST_START + (now / SECOND) as i64, rng_bytes(&mut self.rng));
        let (mono, boot) = (it.clock.mono(now), it.clock.boot(now));
        let way = it.way;
        it.process = Some(Process::new(&self.setup, way, instance, sender, mono, boot, rng));
        self.heard.retain(|(to, from), _| *to != daemon && *from != daemon);
        let incarnation = it.incarnation;
        self.within(SECOND, Event::Reconnect { daemon, incarnation });
    }
}

fn rng_bytes(rng: &mut Rng) -> [u8; 16] {
    std::array::from_fn(|_| rng.u8(..))
}
