//! Asks many nodes for their inventory at once, so that those that are gone or silent cost no worker.
//!
//! Takes nodes from the queues, keeps the answers raw until a worker may take their node, and ends the silent ones as
//! unreachable. Whom to ask and what an answer means is decided in [`core`]; this thread waits, sends, and hands on. A
//! node is handed on only with a permit and within the rate limit, and is Working from that moment.

pub mod core;

use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, at, never, select_biased};

use crate::fleet::finisher::Done;
use crate::fleet::prober::core::{Core, Expired, Heard, Limits, Turn};
use crate::fleet::registry::{Key, Sighting};
use crate::fleet::roster::{Queues, Roster, gauge};
use crate::fleet::seldom::Seldom;
use crate::fleet::worker::rate::RateLimit;
use crate::fleet::worker::{Job, Workers};
use crate::gate::{Gate, Term};
use crate::metrics::Metrics;
use crate::node::{Outcome, Probed, Report};
use crate::protocol::RequestId;
use crate::rpc::actions::Inventory;
use crate::rpc::{Action, Answer, Arrival, Call, Registration, Rpc, SendError};
use crate::shutdown::Never;

/// Answers that wait to be looked at; more than can come while the thread sends one request. One that does not fit is
/// asked for again.
pub const ARRIVALS_MAX: usize = 1024;
/// Answers looked at before a node is asked or handed on.
const ARRIVALS_BATCH: usize = 64;
/// Nodes to ask again that wait to be looked at.
pub const AGAIN_MAX: usize = 1024;
/// Bytes of answers held in all: thousands of ordinary inventories.
pub const HELD_BYTES_MAX: usize = 64 << 20;
/// Quick and answered nodes for each worker: enough to have the next one ready, few enough to be fresh.
pub const QUICK_PER_WORKER: usize = 4;

/// How often a failure to send is logged; the connection says why.
const CANNOT_ASK_LOG: Duration = Duration::from_secs(1);
/// When a node that could not be asked is tried again, if the gate has not changed meanwhile.
const CANNOT_ASK_WAIT: Duration = Duration::from_secs(1);

/// What the prober works with.
pub struct Setup {
    /// Who asks.
    pub rpc: Arc<Rpc>,
    /// What we know of the nodes.
    pub roster: Arc<Roster>,
    /// Asked before each request and each node.
    pub gate: Arc<Gate>,
    /// Gauges.
    pub metrics: Arc<Metrics>,
    /// Where nodes come from.
    pub queues: Queues,
    /// Nodes that started anew while they were here.
    pub again: Receiver<Key>,
    /// A message when the connection was lost.
    pub lost: Receiver<()>,
    /// A message when a permit may be free.
    pub freed: Receiver<()>,
    /// Where the unreachable nodes go.
    pub done: Sender<Done>,
    /// Who provisions.
    pub workers: Workers,
    /// How fast.
    pub rate: RateLimit,
    /// The bounds of the probes.
    pub limits: Limits,
    /// The time a worker has for a node.
    pub node_timeout: Duration,
    /// Ends the thread; its nodes are forgotten.
    pub stop: Receiver<Never>,
}

/// The thread.
pub struct Prober {
    setup: Setup,
    core: Core<RequestId, Registration, Vec<u8>>,
    sink: Sender<Arrival>,
    arrivals: Receiver<Arrival>,
    gate_changed: Receiver<()>,
    inventory: String,
    cannot_ask: Seldom,
}

impl Prober {
    /// Ready to run.
    pub fn new(setup: Setup) -> Prober {
        let core = Core::new(setup.limits);
        let (sink, arrivals) = crossbeam_channel::bounded(ARRIVALS_MAX);
        let gate_changed = setup.gate.watch();
        let inventory = Inventory {}.body();
        let cannot_ask = Seldom::every(CANNOT_ASK_LOG);
        Prober { setup, core, sink, arrivals, gate_changed, inventory, cannot_ask }
    }

    /// Runs until it is told to stop, then waits for the workers to finish what they have.
    pub fn run(mut self) {
        while self.step() {}
        let Prober { setup, core, .. } = self;
        // The requests must be gone before anybody waits: nobody reads their answers any more.
        drop(core);
        setup.workers.join();
    }

    /// Does what is due, then waits for whatever comes first. False when it is time to end.
    fn step(&mut self) -> bool {
        let now = Instant::now();
        let open = self.setup.gate.begin().ok();
        self.expire(open, now);
        self.ask_again(open, now);
        let next_token = self.hand_on(open, now);
        self.measure();

        let none = never();
        let may_ask = open.is_some() && self.core.has_room();
        let could_not = may_ask && self.core.next_to_ask().is_some();
        let asks = may_ask && !could_not;
        let queues = &self.setup.queues;
        let (favoured, other) = match self.core.turn() {
            _ if !asks => (&none, &none),
            Turn::First => (&queues.first, &queues.retry),
            Turn::Retry => (&queues.retry, &queues.first),
        };
        let try_again = could_not.then(|| now + CANNOT_ASK_WAIT);
        let wake = [self.core.next_due(), next_token, try_again].into_iter().flatten().min();
        let timer = wake.map_or_else(never, at);
        select_biased! {
            recv(self.setup.stop) -> _ => return false,
            recv(self.setup.lost) -> _ => self.core.reset(),
            recv(self.setup.again) -> key => if let Ok(key) = key {
                self.core.ask_again(&key);
            },
            recv(self.arrivals) -> arrival => if let Ok(arrival) = arrival {
                self.hear(arrival);
                for _ in 1..ARRIVALS_BATCH {
                    let Ok(arrival) = self.arrivals.try_recv() else { break };
                    self.hear(arrival);
                }
            },
            recv(self.gate_changed) -> _ => {}
            recv(self.setup.freed) -> _ => {}
            recv(favoured) -> key => if let Ok(key) = key {
                self.take_up(&key);
            },
            recv(other) -> key => if let Ok(key) = key {
                self.take_up(&key);
            },
            recv(timer) -> _ => {}
        }
        true
    }

    /// Ends or asks again whoever has been silent for too long.
    fn expire(&mut self, open: Option<Term>, now: Instant) {
        for expired in self.core.expire(open.is_some(), now) {
            self.setup.metrics.rpc_time(Action::Inventory.label(), self.setup.limits.timeout);
            match expired {
                Expired::Again(key) => self.ask(&key, now),
                Expired::Unreachable(key) => {
                    self.unreachable(key, "no answer to the inventory request, asked twice");
                }
            }
        }
    }

    /// Asks those that have left their queue already, while there is room.
    fn ask_again(&mut self, open: Option<Term>, now: Instant) {
        if open.is_none() {
            return;
        }
        while self.core.has_room() {
            let Some(key) = self.core.next_to_ask() else { return };
            self.ask(&key, now);
            if self.core.next_to_ask().as_ref() == Some(&key) {
                // It could not be sent: the gate is about to close.
                return;
            }
        }
    }

    /// Takes a node from a queue.
    fn take_up(&mut self, key: &Key) {
        self.core.turn_taken();
        if self.setup.roster.registry().is_current(key) {
            self.ask(key, Instant::now());
        }
    }

    /// Sends one inventory request. A node that can't be asked now is kept for later.
    fn ask(&mut self, key: &Key, now: Instant) {
        let sent =
            self.setup.rpc.send(&key.identity, Action::Inventory, &self.inventory, &self.sink);
        let replaced = match sent {
            Ok(registration) => self.core.asked(key, registration.id(), registration, now),
            Err(SendError(error)) => {
                if let Some(more) = self.cannot_ask.now(now) {
                    let node = key.identity.as_str();
                    log::warn!(component = "prober", node, more; "Could not ask {node} for its inventory: {error}");
                }
                self.core.put_back(key, now)
            }
        };
        // The registry has but one current entry of a node: the older one is nobody's.
        drop(replaced);
    }

    fn hear(&mut self, arrival: Arrival) {
        let Arrival { id, at, answer } = arrival;
        match answer {
            Answer::NoResponders => {
                if let Some(key) = self.core.no_responders(id, at) {
                    self.unreachable(key, "no responders: nobody listens on the node's subject");
                }
            }
            Answer::Payload(payload) => {
                let bytes = payload.len();
                if let Heard::Late(identity) = self.core.answered(id, payload, bytes, at) {
                    self.setup.roster.sight(&identity, Sighting::LateAnswer);
                }
            }
        }
    }

    /// Hands on who has answered, as permits and the rate limit allow; says when there may be another token.
    fn hand_on(&mut self, open: Option<Term>, now: Instant) -> Option<Instant> {
        let term = open?;
        while self.core.has_answered() {
            if let Some(until) = self.setup.rate.wait(now) {
                return Some(until);
            }
            let deadline = now + self.setup.node_timeout;
            let permit = self.setup.workers.permit(deadline)?;
            let taken = self.core.take(now)?;
            let key = taken.key;
            let Some(entry) = self.setup.roster.registry().take(&key, now) else { continue };
            self.setup.rate.spend(now);
            self.setup.metrics.queue_wait_seconds.observe(entry.queued_for.as_secs_f64());
            // What it said before it announced itself again says nothing about it now.
            let is_old = entry.announced_at.is_some_and(|at| at > taken.answered_at);
            let (registration, inventory) = match taken.held {
                Some((id, registration, payload)) if !is_old => {
                    let (at, answer) = (taken.answered_at, Answer::Payload(payload));
                    (Some(registration), Some(Arrival { id, at, answer }))
                }
                _ => (None, None),
            };
            let identity = key.identity.clone();
            let probed = Probed { identity, term, registration, inventory, deadline };
            self.setup.workers.hand(Job { key, attempt: entry.attempt, probed, permit });
        }
        None
    }

    fn unreachable(&self, key: Key, reason: &str) {
        self.setup.metrics.rpc_error(Action::Inventory.label());
        let report =
            Report { outcome: Outcome::Unreachable, reason: reason.to_owned(), steps: Vec::new() };
        let node = key.identity.as_str();
        log::warn!(component = node, node; "Could not provision {node}: {reason}");
        // The finisher outlives us.
        drop(self.setup.done.send(Done { key, report }));
    }

    fn measure(&self) {
        self.setup.metrics.ready_nodes.set(gauge(self.core.answered_len()));
        self.setup.metrics.probes_outstanding.set(gauge(self.core.asked_len()));
    }
}
