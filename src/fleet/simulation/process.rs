//! One process of a daemon: its cores, and models of the threads around them.

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;
use std::time::{Duration, Instant};

use crate::clock::BootTime;
use crate::fleet::discoverer::next_after_reconnect;
use crate::fleet::election::core as election;
use crate::fleet::election::part;
use crate::fleet::peers::core as peers;
use crate::fleet::peers::presence::Presence;
use crate::fleet::peers::shares::Owners;
use crate::fleet::prober;
use crate::fleet::registry::{Key, Next, Queue, Registry, Sighted, Sighting};
use crate::fleet::simulation::attempt::Attempt;
use crate::fleet::simulation::broker;
use crate::fleet::simulation::node::Answer;
use crate::fleet::simulation::{Scene, Setup, Way, duration};
use crate::fleet::worker::permits::{Permits, Seat};
use crate::fleet::worker::rate::RateLimit;
use crate::gate::{self, Closed, Reason};
use crate::node::{Outcome, Report};
use crate::protocol::ksuid::Ksuid;
use crate::protocol::peer::{Heartbeat, Role};
use crate::protocol::{Identity, Sender};
use crate::rpc::actions::Action;

/// Names a request.
pub type Id = u64;

/// How long a discovery takes answers.
pub const WINDOW: Duration = Duration::from_secs(2);
/// How often expired entries are looked for.
const SWEEP_EVERY: Duration = Duration::from_secs(5);
/// How late the finisher is, in milliseconds.
const FINISHER_LATE_MAX: u64 = 50;
/// How late a write is that waits for the socket, in microseconds.
const STALL_MAX: u64 = 1_800_000;
/// Nodes to ask again that wait to be looked at.
const AGAIN_MAX: usize = 2;

/// What comes to a process.
#[derive(Debug, Clone)]
pub enum Input {
    /// Over its connection.
    News(News),
    /// There is a connection of this number, or none.
    Link(Option<u32>),
    /// Something is due in the fleet's threads, or in the election's.
    Fleet,
    Election,
    Pause(bool),
    StepDown,
    Drain,
    Abort,
    Retry(usize),
    Deny(usize, bool),
    Reload,
}

#[derive(Debug, Clone)]
pub enum News {
    Answer(Id, Answer),
    NoResponders(Id),
    Discovered(usize),
    Announced(usize, u64),
    Election(election::Ticket, election::Answer),
    Offer(u64),
    /// A daemon says that it is there.
    Said(usize, Heartbeat),
}

/// What leaves a process.
#[derive(Debug, Clone)]
pub enum Post {
    Request { node: usize, id: Id, action: Action },
    Discovery,
    Election(election::Ticket, broker::Request),
    Offer(u64),
    Beat(Heartbeat),
}

impl Post {
    /// Whether only a leader may send it.
    pub fn is_leaders(&self) -> bool {
        matches!(self, Post::Request { .. } | Post::Discovery)
    }
}

/// A message on the wire, and whether we led, and in which term, when it left.
#[derive(Debug)]
pub struct Sent {
    pub post: Post,
    pub term: u32,
    pub leads: bool,
}

/// Who gets the answers to a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sink {
    Prober,
    Attempt(Seat),
}

/// All requests whose answers somebody wants.
#[derive(Debug, Default)]
pub struct Table {
    pub sinks: BTreeMap<Id, (Sink, Key)>,
    last: Id,
}

/// Keeps a request in the table.
#[derive(Debug)]
pub struct Registration {
    pub id: Id,
    table: Rc<RefCell<Table>>,
}

impl Registration {
    pub fn redirect(&self, seat: Seat) {
        if let Some((sink, _)) = self.table.borrow_mut().sinks.get_mut(&self.id) {
            *sink = Sink::Attempt(seat);
        }
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        self.table.borrow_mut().sinks.remove(&self.id);
    }
}

/// An answer as the prober holds it.
pub type Held = Answer;

/// What a process knows and does.
pub struct Process {
    pub gate: gate::Core,
    pub is_aborted: bool,
    pub registry: Registry,
    pub first: VecDeque<Key>,
    pub retry: VecDeque<Key>,
    pub again: VecDeque<Key>,
    pub prober: prober::core::Core<Id, Registration, Held>,
    /// The connection over which the prober's nodes were asked.
    pub probed_over: Option<u32>,
    pub table: Rc<RefCell<Table>>,
    pub permits: Permits,
    pub attempts: Vec<Attempt>,
    /// Nodes that were just given the permit they waited for.
    pub woken: Vec<Seat>,
    pub rate: RateLimit,
    /// Outcomes and when the finisher comes to them.
    pub done: VecDeque<(Instant, Key, Report)>,
    pub election: Option<election::Core>,
    /// What one with an election says to its peers, and makes of theirs.
    presence: Option<Presence>,
    /// On an operator's wish.
    is_paused: bool,
    /// An older process is to nodes who we are: we stay out of the election.
    has_older_twin: bool,
    pub peers: Option<peers::Core>,
    pub owners: Option<Owners>,
    /// Counts our terms, by what the election says, not by the gate.
    pub term: u32,
    pub has_term: bool,
    /// Until when we lead, by what the election says; none without one.
    pub lease: Option<BootTime>,
    pub instance: Ksuid,
    sender: Sender,
    /// It had to listen again.
    was_interrupted: bool,
    pub is_draining: bool,
    pub link: Option<u32>,
    reconnected_at: Option<Instant>,
    has_connected: bool,
    /// What waits for the socket, and the term in which it was sent.
    outbox: Vec<(Post, u32)>,
    /// From then on it must not be written any more.
    outbox_until: Option<BootTime>,
    pub outbox_due: Option<Instant>,
    next_discovery: Instant,
    is_triggered: bool,
    discovery: Option<Discovery>,
    looked_at: Instant,
    sweep_at: Instant,
    /// Something has changed that a thread may be waiting for.
    pub is_stirred: bool,
    /// The fleet's threads have run since somebody looked.
    pub has_run: bool,
}

/// A discovery that is running.
struct Discovery {
    started: Instant,
    link: Option<u32>,
}

impl Process {
    pub fn new(
        setup: &Setup,
        way: Way,
        instance: Ksuid,
        sender: Sender,
        now: Instant,
        boot: BootTime,
        rng: fastrand::Rng,
    ) -> Process {
        let mut gate = gate::Core::new();
        let election = (way == Way::Elected).then(|| {
            gate.stand_by();
            election::Core::new(boot, rng)
        });
        let presence = election.is_some().then(|| Presence::new(instance, sender.clone()));
        let peers = (way == Way::Shares).then(|| {
            gate.stand_by();
            gate.listen();
            peers::Core::new(instance, sender.clone())
        });
        let has_term = way == Way::Alone;
        let election_lease = (!has_term).then_some(BootTime::START);
        Process {
            gate,
            is_aborted: false,
            registry: Registry::new(setup.limits),
            first: VecDeque::new(),
            retry: VecDeque::new(),
            again: VecDeque::new(),
            prober: prober::core::Core::new(setup.probes),
            probed_over: None,
            table: Rc::default(),
            permits: Permits::new(setup.permits, setup.seats),
            attempts: Vec::new(),
            woken: Vec::new(),
            rate: RateLimit::new(setup.rate),
            done: VecDeque::new(),
            election,
            presence,
            is_paused: false,
            has_older_twin: false,
            peers,
            owners: None,
            instance,
            sender,
            was_interrupted: false,
            term: 0,
            lease: election_lease,
            has_term,
            is_draining: false,
            link: None,
            reconnected_at: None,
            has_connected: false,
            outbox: Vec::new(),
            outbox_until: None,
            outbox_due: None,
            next_discovery: now + setup.limits.interval,
            is_triggered: false,
            discovery: None,
            looked_at: now,
            sweep_at: now + SWEEP_EVERY,
            is_stirred: false,
            has_run: false,
        }
    }

    /// Takes what came, and does all that follows from it.
    pub fn take(&mut self, input: Input, scene: &mut Scene<'_>) {
        match input {
            Input::News(News::Election(ticket, answer)) => {
                return self.elect(election::Input::Answer(ticket, answer), scene);
            }
            Input::News(News::Offer(number)) => {
                return self.elect(election::Input::Offer(number), scene);
            }
            Input::News(News::Said(_, beat)) if self.election.is_some() => {
                return self.hear_peer(&beat, scene);
            }
            Input::News(News::Said(_, beat)) => {
                return self.share(peers::Input::Heard(beat), scene);
            }
            Input::Election if self.peers.is_some() => {
                return self.share(peers::Input::Time, scene);
            }
            Input::Election => return self.elect(election::Input::Time, scene),
            Input::News(news) => self.hear(news, scene),
            Input::Link(link) => self.link(link, scene),
            Input::Fleet => {}
            Input::Pause(true) => {
                self.gate.close(Reason::Operator);
                self.is_paused = true;
                self.stay_out(scene);
                self.share(peers::Input::Pause(true), scene);
            }
            Input::Pause(false) => {
                self.gate.open(Reason::Operator, scene.mono);
                self.is_triggered = true;
                self.is_paused = false;
                self.stay_out(scene);
                self.share(peers::Input::Pause(false), scene);
            }
            Input::StepDown => self.step_down(scene),
            Input::Drain => self.drain(scene),
            Input::Abort => {
                if !self.is_draining {
                    self.drain(scene);
                }
                self.is_aborted = true;
                self.gate.abort();
            }
            Input::Retry(node) => {
                if self.gate.begin(scene.boot).is_some() {
                    let identity = scene.nodes[node].identity.clone();
                    self.sight(&identity, Sighting::Operator, scene);
                }
            }
            Input::Deny(node, true) => {
                let denied = self.registry.deny(&scene.nodes[node].identity, scene.mono);
                assert!(denied.is_ok(), "few are denied");
            }
            Input::Deny(node, false) => {
                self.registry.allow(&scene.nodes[node].identity);
            }
            Input::Reload => self.registry.reload(scene.setup.limits, scene.mono),
        }
        self.run(scene);
    }

    /// Whether the lease of an election is over.
    pub fn is_lease_over(&self, now: BootTime) -> bool {
        self.lease.is_some_and(|lease| now >= lease)
    }

    /// Whether all threads have ended.
    pub fn is_over(&self) -> bool {
        self.is_draining
            && self.attempts.is_empty()
            && self.done.is_empty()
            && self.election.as_ref().is_none_or(|core| core.is_gone() || self.is_aborted)
            && self.peers.as_ref().is_none_or(|core| core.is_gone() || self.is_aborted)
    }

    /// Whether it has left its share to others.
    pub fn has_left(&self) -> bool {
        self.peers.as_ref().is_some_and(|core| core.part() == peers::Part::Out)
    }

    /// When the fleet's threads have something to do.
    pub fn wake(&self, scene: &Scene<'_>) -> Option<Instant> {
        let open = self.gate.begin(scene.boot).is_some();
        let discoverer = (!self.is_draining).then(|| {
            let again = next_after_reconnect(self.reconnected_at, self.looked_at);
            let ends = self.discovery.as_ref().map(|running| running.started + WINDOW);
            ends.unwrap_or_else(|| {
                again.map_or(self.next_discovery, |at| at.min(self.next_discovery))
            })
        });
        let token =
            (open && self.prober.has_answered()).then(|| self.rate.wait(scene.mono)).flatten();
        let attempts = self.attempts.iter().filter_map(|attempt| attempt.wake(scene.mono)).min();
        let done = self.done.front().map(|(due, ..)| *due);
        let others = [self.prober.next_due(), attempts, done, token, discoverer, self.outbox_due];
        others.into_iter().flatten().chain([self.sweep_at]).min()
    }

    /// Lets every thread do what it can. A machine runs them in any order.
    fn run(&mut self, scene: &mut Scene<'_>) {
        let first = scene.rng.u8(..4);
        self.has_run = true;
        self.write(scene);
        loop {
            self.is_stirred = false;
            for thread in 0..4 {
                match (first + thread) % 4 {
                    0 => self.discover(scene),
                    1 => self.probe(scene),
                    2 => self.work(scene),
                    _ => self.finish(scene),
                }
            }
            if !self.is_stirred {
                break;
            }
        }
        self.leave(scene);
    }

    fn hear(&mut self, news: News, scene: &mut Scene<'_>) {
        match news {
            News::Answer(id, _) | News::NoResponders(id) => {
                let sink = self.table.borrow().sinks.get(&id).cloned();
                let answer = if let News::Answer(_, answer) = news { Some(answer) } else { None };
                match sink {
                    None => {}
                    Some((Sink::Prober, key)) => self.hear_probed(id, &key, answer, scene),
                    Some((Sink::Attempt(seat), _)) => {
                        let attempt = self.attempts.iter_mut().find(|one| one.seat == seat);
                        attempt.expect("an attempt keeps its requests").arrives(id, answer);
                    }
                }
            }
            // The prober has no part in it, and those that come late are no worse.
            News::Discovered(node) if !self.is_draining => {
                let identity = scene.nodes[node].identity.clone();
                self.sight(&identity, Sighting::Discovery, scene);
            }
            News::Announced(node, event) if !self.is_draining => {
                if self.gate.begin(scene.boot).is_some() {
                    let (identity, id) = (scene.nodes[node].identity.clone(), event.to_string());
                    self.sight(&identity, Sighting::Event { id: &id }, scene);
                }
            }
            News::Discovered(_) | News::Announced(..) => {}
            News::Election(..) | News::Offer(_) | News::Said(..) => {
                unreachable!("those have threads of their own")
            }
        }
    }

    pub fn sight(&mut self, identity: &Identity, what: Sighting<'_>, scene: &mut Scene<'_>) {
        if !self.is_ours(identity) {
            return scene.note("another's");
        }
        let Process { registry, first, retry, .. } = self;
        let max = scene.setup.queue_max;
        let sighted = registry.sight(identity, what, scene.mono, &mut |queue, key| {
            push(first, retry, max, queue, key)
        });
        scene.say(&format_args!("{identity} {what:?}: {sighted:?}"));
        let known = self.registry.node(identity);
        if known.is_some_and(|known| known.last_error.starts_with("came back")) {
            scene.note("came back");
        }
        match sighted {
            Sighted::Queued(_) | Sighted::Known => {}
            Sighted::NotDue => scene.note("not due"),
            Sighted::QueueFull => scene.note("queue full"),
            Sighted::Denied => scene.note("denied"),
            Sighted::Others => unreachable!("it was asked"),
            Sighted::AskAgain(key) => {
                scene.note("ask again");
                if self.again.len() < AGAIN_MAX {
                    self.again.push_back(key);
                }
            }
        }
    }

    /// The discoverer.
    fn discover(&mut self, scene: &mut Scene<'_>) {
        if self.is_draining {
            return;
        }
        let now = scene.mono;
        if let Some(Discovery { started, link }) = &self.discovery {
            if now < *started + WINDOW {
                return;
            }
            let is_whole = *link == self.link && link.is_some();
            if is_whole && !self.gate.just_reconnected(*started) {
                for identity in self.registry.discovery_completed(now) {
                    scene.note("stale");
                    assert!(self.registry.node(&identity).is_none());
                }
            }
            self.discovery = None;
        }
        let again = next_after_reconnect(self.reconnected_at, self.looked_at);
        if !self.is_triggered && now < self.next_discovery && again.is_none_or(|at| now < at) {
            return;
        }
        if now >= self.next_discovery {
            self.next_discovery = now + scene.setup.limits.interval;
        }
        self.is_triggered = false;
        self.looked_at = now;
        if self.gate.begin(scene.boot).is_none() {
            return;
        }
        self.registry.discovery_started(now);
        if self.send(Post::Discovery, scene) {
            self.discovery = Some(Discovery { started: now, link: self.link });
        }
    }

    /// Registers a request and sends it; nothing if there is no connection.
    pub fn ask(
        &mut self,
        key: &Key,
        action: Action,
        sink: Sink,
        scene: &mut Scene<'_>,
    ) -> Option<Registration> {
        let id = {
            let mut table = self.table.borrow_mut();
            table.last += 1;
            let id = table.last;
            table.sinks.insert(id, (sink, key.clone()));
            id
        };
        let registration = Registration { id, table: self.table.clone() };
        let node = scene.index(&key.identity);
        self.send(Post::Request { node, id, action }, scene).then_some(registration)
    }

    /// Sends a message, at once or when the socket takes it. False if it can't be.
    fn send(&mut self, post: Post, scene: &mut Scene<'_>) -> bool {
        if self.link.is_none() {
            return false;
        }
        let until = self.lease.filter(|_| post.is_leaders());
        if until.is_some_and(|until| scene.boot >= until) {
            return false;
        }
        let stalls = scene.setup.stalls && !scene.peace && scene.rng.u8(..30) == 0;
        if stalls || !self.outbox.is_empty() {
            if self.outbox.is_empty() {
                let stall = scene.rng.u64(..STALL_MAX);
                *scene.disturbed_at = (*scene.disturbed_at).max(scene.now + stall);
                self.outbox_due = Some(scene.mono + duration(stall));
            }
            self.outbox_until = [self.outbox_until, until].into_iter().flatten().min();
            self.outbox.push((post, self.term));
        } else {
            let leads = self.has_term;
            self.leaves(post, self.term, leads, scene);
        }
        true
    }

    /// What waited is written, or it is too late for it and the connection ends.
    fn write(&mut self, scene: &mut Scene<'_>) {
        if self.outbox_due.is_none_or(|due| scene.mono < due) {
            return;
        }
        self.outbox_due = None;
        let until = self.outbox_until.take();
        let posts = std::mem::take(&mut self.outbox);
        if until.is_some_and(|until| scene.boot >= until) {
            scene.note("too late for what waited");
            *scene.drops_connection = true;
            return;
        }
        // The lease it was sent in is good until its end, even if leadership was lost meanwhile.
        for (post, term) in posts {
            self.leaves(post, term, true, scene);
        }
    }

    fn leaves(&self, post: Post, term: u32, leads: bool, scene: &mut Scene<'_>) {
        scene.say(&format_args!("sends {post:?}"));
        scene.sent.push(Sent { post, term, leads });
    }

    /// The connection came or went.
    fn link(&mut self, link: Option<u32>, scene: &mut Scene<'_>) {
        if link == self.link {
            return;
        }
        self.link = link;
        self.outbox.clear();
        (self.outbox_until, self.outbox_due) = (None, None);
        if link.is_some() {
            self.gate.open(Reason::Disconnected, scene.mono);
            if self.has_connected {
                self.reconnected_at = Some(scene.mono);
            }
            self.has_connected = true;
            self.is_triggered = true;
        } else {
            self.gate.close(Reason::Disconnected);
        }
        let us = link.map(|_| self.sender.clone());
        if let Some(presence) = &mut self.presence {
            presence.link(us.clone(), scene.boot);
        }
        self.elect(election::Input::Link(link.is_some()), scene);
        self.share(peers::Input::Link(us), scene);
    }

    fn drain(&mut self, scene: &mut Scene<'_>) {
        self.is_draining = true;
        self.gate.close(Reason::Draining);
        // The prober ends, and with it what it had.
        self.prober = prober::core::Core::new(scene.setup.probes);
        self.forget();
        self.elect(election::Input::Drain, scene);
        self.share(peers::Input::Drain, scene);
    }

    fn forget(&mut self) {
        self.registry.clear();
        self.first.clear();
        self.retry.clear();
    }

    /// The election.
    fn elect(&mut self, input: election::Input, scene: &mut Scene<'_>) {
        let Some(core) = &mut self.election else { return };
        let outputs = core.step(scene.boot, input);
        self.obey(outputs, scene);
        self.speak(scene);
        self.leave(scene);
    }

    /// The election takes what a peer said.
    fn hear_peer(&mut self, beat: &Heartbeat, scene: &mut Scene<'_>) {
        if let Some(presence) = &mut self.presence {
            presence.hear(beat, scene.boot);
        }
        if beat.role == Role::Active {
            scene.note("answered one without an election");
        }
        self.elect(election::Input::Time, scene);
    }

    /// The election says who we are if that is due, and sees whether another is.
    fn speak(&mut self, scene: &mut Scene<'_>) {
        let (Some(core), Some(presence)) = (&self.election, &mut self.presence) else { return };
        if core.is_gone() {
            return;
        }
        presence.play(part(core.role(scene.boot)), scene.boot);
        let beat = presence.advance(scene.boot);
        let has_older_twin = presence.older_twin().is_some();
        if let Some(beat) = beat {
            self.send(Post::Beat(beat), scene);
        }
        if has_older_twin != self.has_older_twin {
            self.has_older_twin = has_older_twin;
            if has_older_twin {
                scene.note("stayed out beside an older one");
                self.step_down(scene);
            }
            self.stay_out(scene);
        }
    }

    fn stay_out(&mut self, scene: &mut Scene<'_>) {
        let is_out = self.is_paused || self.has_older_twin;
        self.elect(election::Input::Pause(is_out), scene);
    }

    fn step_down(&mut self, scene: &mut Scene<'_>) {
        if self.election.is_some() {
            self.gate.close(Reason::Standby);
        }
        self.elect(election::Input::StepDown, scene);
    }

    /// When the election has something to do though nothing comes.
    pub fn wake_election(&self, boot: BootTime) -> Option<BootTime> {
        let core = self.election.as_ref().filter(|core| !core.is_gone())?;
        let presence = self.presence.as_ref().and_then(|presence| presence.wake(boot));
        [core.wake(), presence].into_iter().flatten().min()
    }

    fn obey(&mut self, outputs: Vec<election::Output>, scene: &mut Scene<'_>) {
        let is_news = |output: &election::Output| {
            !matches!(
                output,
                election::Output::AskStatus(_)
                    | election::Output::Write { .. }
                    | election::Output::HandOver(_)
            )
        };
        let has_changed = outputs.iter().any(is_news);
        for output in outputs {
            scene.say(&format_args!("{output:?}"));
            match output {
                election::Output::AskStatus(ticket) => {
                    self.write_election(ticket, broker::Request::Status, scene);
                }
                election::Output::Write { ticket, expected } => {
                    self.write_election(ticket, broker::Request::Write { expected }, scene);
                }
                election::Output::Lead(until) => {
                    if self.has_term {
                        scene.note("a term outlived a connection");
                    } else {
                        self.term += 1;
                        scene.note("elected");
                    }
                    self.has_term = true;
                    self.lease = Some(until);
                    self.gate.lead(until);
                    self.is_triggered = true;
                }
                election::Output::Renew(until) => {
                    assert!(self.has_term, "renews nothing");
                    self.lease = Some(until);
                    self.gate.renew(until);
                }
                election::Output::Lapse => {
                    self.lease = Some(BootTime::START);
                    self.gate.lapse();
                }
                election::Output::Lost(_) => {
                    assert!(self.has_term, "lost what it never had");
                    scene.note("leadership lost");
                    self.has_term = false;
                    self.lease = Some(BootTime::START);
                    self.gate.end_term();
                    self.forget();
                }
                election::Output::HandOver(number) => {
                    assert!(!self.has_term, "hands over what it uses");
                    scene.note("handed over");
                    self.send(Post::Offer(number), scene);
                }
            }
        }
        if has_changed {
            self.run(scene);
        }
    }

    fn write_election(
        &mut self,
        ticket: election::Ticket,
        request: broker::Request,
        scene: &mut Scene<'_>,
    ) {
        if !self.send(Post::Election(ticket, request), scene) {
            self.elect(election::Input::Unsent(ticket), scene);
        }
    }

    /// Whose a node is; one that is another's is forgotten.
    pub fn is_ours(&mut self, identity: &Identity) -> bool {
        let is_ours = self.owners.as_ref().is_none_or(|owners| owners.is_ours(identity));
        if !is_ours {
            self.registry.disown(identity);
        }
        is_ours
    }

    /// The peers.
    fn share(&mut self, input: peers::Input, scene: &mut Scene<'_>) {
        let Some(core) = &mut self.peers else { return };
        let outputs = core.step(scene.boot, input);
        self.obey_peers(outputs, scene);
        self.leave(scene);
    }

    fn obey_peers(&mut self, outputs: Vec<peers::Output>, scene: &mut Scene<'_>) {
        let mut has_changed = false;
        for output in outputs {
            scene.say(&format_args!("{output:?}"));
            has_changed |= !matches!(output, peers::Output::Beat(_) | peers::Output::Renew(_));
            match output {
                peers::Output::Beat(beat) => {
                    if beat.leaving {
                        scene.note("left its share");
                    }
                    let number = beat.number;
                    if !self.send(Post::Beat(beat), scene) {
                        self.share(peers::Input::Unsent(number), scene);
                    }
                }
                peers::Output::Owners(owners) => self.owners = Some(owners),
                peers::Output::Act(until) => {
                    scene.note("provisions its share");
                    match (self.has_term, std::mem::take(&mut self.was_interrupted)) {
                        (true, true) => scene.note("a term outlived a silence"),
                        (false, true) => scene.note("listened after it woke up"),
                        _ => {}
                    }
                    self.term += u32::from(!self.has_term);
                    self.has_term = true;
                    self.lease = Some(until);
                    self.gate.lead(until);
                    self.is_triggered = true;
                }
                peers::Output::Renew(until) => {
                    self.lease = Some(until);
                    self.gate.renew(until);
                }
                peers::Output::Listen => {
                    self.was_interrupted |= self.has_term;
                    self.lease = Some(BootTime::START);
                    self.gate.listen();
                }
                peers::Output::StandBy(why) => {
                    scene.note(match why {
                        peers::Why::Twin(_) => "stood by beside an older one",
                        peers::Why::Leader(_) => "stood by beside a leader",
                    });
                    self.lease = Some(BootTime::START);
                    self.gate.stand_by();
                }
                peers::Output::EndTerm => {
                    assert!(self.has_term, "ended what never began");
                    self.has_term = false;
                    self.lease = Some(BootTime::START);
                    self.gate.end_term();
                    self.forget();
                }
                peers::Output::Gained => {
                    scene.note("a share was gained");
                    self.is_triggered = true;
                }
                peers::Output::Joined(_) | peers::Output::Gone(..) | peers::Output::Ignored(_) => {}
            }
        }
        if has_changed {
            self.run(scene);
        }
    }

    /// Tells election or peers when nobody is worked on any more, if they wait for that.
    fn leave(&mut self, scene: &mut Scene<'_>) {
        self.leave_peers(scene);
        let is_idle = self.is_idle();
        let Some(core) = &mut self.election else { return };
        if core.is_leaving() && is_idle {
            let outputs = core.step(scene.boot, election::Input::Idle);
            self.obey(outputs, scene);
        }
    }

    fn leave_peers(&mut self, scene: &mut Scene<'_>) {
        let is_idle = self.is_idle();
        let Some(core) = &mut self.peers else { return };
        if core.is_leaving() && is_idle {
            let outputs = core.step(scene.boot, peers::Input::Idle);
            self.obey_peers(outputs, scene);
        }
    }

    fn is_idle(&self) -> bool {
        match self.is_draining {
            true => self.attempts.is_empty() && self.done.is_empty(),
            false => self.registry.counts().working == 0,
        }
    }

    /// The workers.
    fn work(&mut self, scene: &mut Scene<'_>) {
        loop {
            let mut attempts = std::mem::take(&mut self.attempts);
            attempts.retain_mut(|attempt| match attempt.advance(self, scene) {
                None => true,
                Some((outcome, reason)) => {
                    attempt.check_blame(&outcome, scene);
                    // It may have been given its permit back a moment ago.
                    self.woken.retain(|seat| *seat != attempt.seat);
                    let woken = self.permits.end(attempt.seat);
                    self.grant(woken);
                    self.report(attempt.key.clone(), outcome, reason, scene);
                    false
                }
            });
            let has_seat = |seat: &Seat| attempts.iter().any(|attempt| attempt.seat == *seat);
            assert!(self.woken.iter().all(has_seat), "a permit went to a node that has ended");
            self.attempts = attempts;
            if self.woken.is_empty() {
                break;
            }
        }
    }

    /// A permit was given back: it goes to a node that waits for one, or the prober hears that there is one.
    pub fn grant(&mut self, seat: Option<Seat>) {
        match seat {
            Some(seat) => self.woken.push(seat),
            None => self.is_stirred = true,
        }
    }

    pub fn report(&mut self, key: Key, outcome: Outcome, reason: &str, scene: &mut Scene<'_>) {
        scene.say(&format_args!("{} ends: {outcome:?} {reason}", key.identity));
        let late = Duration::from_millis(scene.rng.u64(..FINISHER_LATE_MAX));
        let report = Report::new(outcome, reason);
        self.done.push_back((scene.mono + late, key, report));
    }

    /// The finisher.
    fn finish(&mut self, scene: &mut Scene<'_>) {
        let now = scene.mono;
        if now >= self.sweep_at {
            self.registry.sweep(now);
            self.sweep_at = now + SWEEP_EVERY;
        }
        while self.done.front().is_some_and(|(due, ..)| *due <= now) {
            let Some((_, key, report)) = self.done.pop_front() else { break };
            let just_reconnected = self.gate.just_reconnected(now);
            let gate_lost = self.gate.is_lost();
            let before = self.registry.node(&key.identity).map(|node| node.failures);
            let Process { registry, first, retry, .. } = self;
            let max = scene.setup.queue_max;
            let finished = registry.finish(
                &key,
                &report,
                now,
                just_reconnected,
                gate_lost,
                &mut |queue, key| push(first, retry, max, queue, key),
            );
            self.is_stirred = true;
            scene.say(&format_args!("{} is now {:?}", key.identity, finished.next));
            scene.note(finished.tally.outcome.unwrap_or(match report.outcome {
                Outcome::Stopped(Closed::Aborted) => "aborted",
                Outcome::Stopped(Closed::TermEnded) => "term ended",
                Outcome::Stopped(Closed::Deadline) => "deadline",
                _ if finished.next == Next::NotCurrent => "not current",
                _ => "excused",
            }));
            if gate_lost {
                let is_known = self
                    .registry
                    .node(&key.identity)
                    .is_some_and(|node| node.generation == key.generation);
                assert!(!is_known, "{key:?} was kept although all is lost");
            }
            let after = self.registry.node(&key.identity).map(|node| node.failures);
            if finished.next != Next::NotCurrent
                && just_reconnected
                && report.outcome == Outcome::Unreachable
            {
                assert!(after.is_none() || after == before, "a node out of reach was blamed");
            }
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
