//! Asks many nodes for their inventory at once, so that those that are gone or silent cost no worker.
//!
//! Takes nodes from the queues, keeps the answers raw until a worker may take their node, and ends the silent ones as
//! unreachable. Whom to ask and what an answer means is decided in [`core`]; this thread waits, sends, and hands on. A
//! node is handed on only with a permit and within the rate limit, and is Working from that moment.

pub mod core;

use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, at, never, select_biased};

use crate::config::Config;
use crate::fleet::current::Current;
use crate::fleet::finisher::Done;
use crate::fleet::prober::core::{Core, Expired, Heard, Limits, Turn};
use crate::fleet::registry::{Key, Sighting};
use crate::fleet::roster::{Queues, Roster, gauge};
use crate::fleet::worker::rate::RateLimit;
use crate::fleet::worker::{Job, Workers};
use crate::gate::{Gate, Term};
use crate::metrics::Metrics;
use crate::node::{Outcome, Probed, Report};
use crate::protocol::{Identity, RequestId};
use crate::pulse;
use crate::rpc::actions::{Action, Call, Inventory};
use crate::rpc::{Answer, Arrival, Registration, Rpc, RpcError, SendError};
use crate::seldom::Seldom;
use crate::shutdown::{Never, is_over};

/// Answers that wait to be looked at; more than can come while the thread sends one request. One that does not fit is
/// asked for again. Memory is taken for all of them, as for those below.
pub const ARRIVALS_MAX: usize = 256;
/// Answers looked at before a node is asked or handed on.
const ARRIVALS_BATCH: usize = 64;
/// How long answers wait to be looked at while all permits are taken and the next nodes have answered: nobody needs them
/// sooner, and few things cost as much as to wake a thread.
const ARRIVALS_WAIT: Duration = Duration::from_millis(20);
/// Nodes to ask again that wait to be looked at.
pub const AGAIN_MAX: usize = 128;
/// Bytes of answers held in all: thousands of ordinary inventories.
pub const HELD_BYTES_MAX: usize = 64 << 20;
/// Quick and answered nodes for each worker: enough to have the next one ready, few enough to be fresh.
pub const QUICK_PER_WORKER: usize = 4;
/// Quick and answered nodes at least, so that a few silent ones leave room for others when there are few workers.
pub const QUICK_MIN: usize = 32;

/// Why a node is unreachable that the broker doesn't know.
pub const GONE: &str = "no responders: nobody listens on the node's subject";
/// Why one is that says nothing.
pub const SILENT: &str = "no answer to the inventory request, asked twice";

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
    /// What nodes are provisioned with.
    pub current: Arc<Current>,
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
    settings_changed: Receiver<()>,
    /// Disconnects when the connection ends over which the nodes were asked.
    connection: Receiver<Never>,
    inventory: String,
    cannot_ask: Seldom,
}

impl Limits {
    /// Those of `config`.
    pub fn of(config: &Config) -> Limits {
        Limits {
            quick_max: (config.workers * QUICK_PER_WORKER).max(QUICK_MIN),
            silent_max: config.probe_window,
            timeout: config.probe_timeout,
            held_bytes_max: HELD_BYTES_MAX,
        }
    }
}

impl Prober {
    /// Ready to run.
    pub fn new(setup: Setup) -> Prober {
        let core = Core::new(setup.limits);
        let (sink, arrivals) = crossbeam_channel::bounded(ARRIVALS_MAX);
        let (gate_changed, connection) = (setup.gate.watch(), setup.gate.lost());
        let settings_changed = setup.current.watch();
        let inventory = Inventory {}.body();
        let cannot_ask = Seldom::every(CANNOT_ASK_LOG);
        Prober {
            setup,
            core,
            sink,
            arrivals,
            gate_changed,
            settings_changed,
            connection,
            inventory,
            cannot_ask,
        }
    }

    /// Runs until it is told to stop, then waits for the workers to finish what they have.
    pub fn run(mut self) {
        while self.step() {}
        // From now on it waits for others.
        pulse::waits();
        let Prober { setup, core, .. } = self;
        // The requests must be gone before anybody waits: nobody reads their answers any more.
        drop(core);
        setup.workers.join();
    }

    /// Does what is due, then waits for whatever comes first. False when it is time to end.
    fn step(&mut self) -> bool {
        pulse::works();
        let now = Instant::now();
        let open = self.setup.gate.begin().ok();
        if open.is_some() && is_over(&self.connection) {
            self.connection = self.setup.gate.lost();
            self.core.reset();
        }
        self.hear_all();
        self.expire(open, now);
        self.ask_again(open, now);
        let next_token = self.hand_on(open, now);
        self.measure();

        let no_permit = open.is_some() && next_token.is_none() && self.core.has_answered();
        let (none, no_arrivals) = (never(), never());
        let arrivals = if no_permit { &no_arrivals } else { &self.arrivals };
        let look = no_permit.then(|| now + ARRIVALS_WAIT);
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
        let due = [self.core.next_due(), next_token, try_again, look];
        let wake = due.into_iter().flatten().min();
        let timer = wake.map_or_else(never, at);
        pulse::waits();
        select_biased! {
            recv(self.setup.stop) -> _ => return false,
            recv(self.setup.again) -> key => if let Ok(key) = key {
                self.core.ask_again(&key);
            },
            recv(arrivals) -> arrival => if let Ok(arrival) = arrival {
                self.hear(arrival);
            },
            recv(self.settings_changed) -> _ => self.adapt(now),
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

    /// Keeps to the settings as they are now.
    fn adapt(&mut self, now: Instant) {
        pulse::works();
        let config = self.setup.current.config();
        self.setup.limits = Limits::of(&config);
        self.core.limit(self.setup.limits);
        self.setup.rate.change(config.rate_limit, now);
        self.setup.workers.resize(config.workers);
    }

    /// Takes what has come by now, up to a bound.
    fn hear_all(&mut self) {
        for _ in 0..ARRIVALS_BATCH {
            let Ok(arrival) = self.arrivals.try_recv() else { return };
            self.hear(arrival);
        }
    }

    /// Ends or asks again whoever has been silent for too long.
    fn expire(&mut self, open: Option<Term>, now: Instant) {
        for expired in self.core.expire(open.is_some(), now) {
            self.setup.metrics.rpc_time(Action::Inventory.label(), self.setup.limits.timeout);
            match expired {
                Expired::Again(key) => self.ask(&key, now),
                Expired::Unreachable(key) => {
                    self.unreachable(key, SILENT);
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
        pulse::works();
        self.core.turn_taken();
        if !self.setup.roster.is_wanted(key) {
            return;
        }
        let now = Instant::now();
        // It may have closed while this thread waited for the queue.
        if self.setup.gate.begin().is_ok() {
            self.ask(key, now);
        } else {
            drop(self.core.put_back(key, now));
        }
    }

    /// Sends one inventory request. A node that can't be asked now is kept for later.
    fn ask(&mut self, key: &Key, now: Instant) {
        let sent =
            self.setup.rpc.send(&key.identity, Action::Inventory, &self.inventory, &self.sink);
        let replaced = match sent {
            Ok(registration) => self.core.asked(key, registration.id(), registration, now),
            Err(SendError(error)) => {
                if let Some(suppressed) = self.cannot_ask.now(now) {
                    let node = key.identity.as_str();
                    log::warn!(component = "prober", node, suppressed; "Could not ask {node} for its inventory: {error}");
                }
                self.core.put_back(key, now)
            }
        };
        // The registry has but one current entry of a node: the older one is nobody's.
        drop(replaced);
    }

    fn hear(&mut self, arrival: Arrival) {
        pulse::works();
        let Arrival { id, at, answer, .. } = arrival;
        match answer {
            Answer::NoResponders => {
                if let Some(key) = self.core.no_responders(id, at) {
                    self.unreachable(key, GONE);
                }
            }
            Answer::Payload(payload) => {
                let bytes = payload.len();
                if let Heard::Late { identity, answer } = self.core.answered(id, payload, bytes, at)
                {
                    let arrival = Arrival::new(id, at, Answer::Payload(answer));
                    self.hear_late(&identity, &arrival);
                }
            }
        }
    }

    /// A node that answers after all is alive, whatever it says, if it was the node.
    fn hear_late(&mut self, identity: &Identity, arrival: &Arrival) {
        match self.setup.rpc.read(identity, Action::Inventory, arrival) {
            Ok(_) | Err(RpcError::BadReply(_)) => {
                self.core.forget_late(arrival.id);
                self.setup.roster.sight(identity, Sighting::LateAnswer);
            }
            Err(RpcError::NoResponders | RpcError::Unexpected(_)) => {}
        }
    }

    /// Hands on who has answered, as permits and the rate limit allow; says when there may be another token.
    fn hand_on(&mut self, open: Option<Term>, now: Instant) -> Option<Instant> {
        let term = open?;
        while self.core.has_answered() {
            if let Some(until) = self.setup.rate.wait(now) {
                return Some(until);
            }
            let context = self.setup.current.context();
            let deadline = now + context.config.node_timeout;
            let permit = self.setup.workers.permit(deadline)?;
            let taken = self.core.take(now)?;
            let key = taken.key;
            let Some(entry) = self.setup.roster.take(&key, now) else { continue };
            self.setup.rate.spend(now);
            self.setup.metrics.queue_wait_seconds.observe(entry.queued_for.as_secs_f64());
            // What it said before it announced itself again says nothing about it now.
            let is_old = entry.announced_at.is_some_and(|at| at > taken.answered_at);
            let (registration, inventory) = match taken.held {
                Some((id, registration, payload)) if !is_old => {
                    let (at, answer) = (taken.answered_at, Answer::Payload(payload));
                    (Some(registration), Some(Arrival::new(id, at, answer)))
                }
                _ => (None, None),
            };
            let identity = key.identity.clone();
            let probed = Probed {
                identity,
                term,
                registration,
                inventory,
                deadline,
                upgrade: entry.upgrade,
                progress: Arc::default(),
            };
            let attempt = entry.attempt;
            self.setup.workers.hand(Job { key, attempt, probed, permit, context });
        }
        None
    }

    fn unreachable(&self, key: Key, reason: &str) {
        self.setup.metrics.rpc_error(Action::Inventory.label());
        let report = Box::new(Report::new(Outcome::Unreachable, reason));
        let node = key.identity.as_str();
        log::warn!(component = node, node; "Could not provision {node}: {reason}");
        let attempt =
            self.setup.roster.registry().node(&key.identity).map_or(0, |known| known.attempts);
        let attempt = attempt.saturating_add(1);
        // The finisher outlives us.
        drop(self.setup.done.send(Done { key, attempt, took: Duration::ZERO, report }));
    }

    fn measure(&self) {
        self.setup.metrics.ready_nodes.set(gauge(self.core.answered_len()));
        self.setup.metrics.probes_outstanding.set(gauge(self.core.asked_len()));
    }
}

#[cfg(test)]
mod tests {
    use std::thread::{self, JoinHandle};

    use crossbeam_channel::bounded;

    use super::*;
    use crate::fleet::registry;
    use crate::gate::Reason;
    use crate::rpc::testing::{Net, good_body};

    const SOON: Duration = Duration::from_secs(10);
    /// The helper says nothing, so a node that reaches a worker ends as its fault.
    const SETTINGS: &str = "helper: /bin/true\ntoken: s3cret\nchoria_insecure: true\nsite: test\n";

    /// Prober and workers, with nodes in memory: those called `good` answer, those called `gone` are not there.
    struct Bench {
        net: Net,
        roster: Arc<Roster>,
        gate: Arc<Gate>,
        done: Receiver<Done>,
        again: Sender<Key>,
        stop: Option<Sender<Never>>,
        prober: Option<JoinHandle<()>>,
    }

    impl Bench {
        fn new(timeout: Duration, rate: Option<u32>) -> Bench {
            let net = Net::new();
            net.answer(|_, asked| {
                let identity = asked.subject.trim_start_matches("provisioning.node.").to_owned();
                match identity.split('.').next() {
                    Some("good") => {
                        let body = good_body(Action::Inventory);
                        vec![asked.reply_from(&identity, &asked.id(), &body)]
                    }
                    Some("gone") => vec![asked.no_responders()],
                    _ => Vec::new(),
                }
            });
            let gate = Arc::new(Gate::new());
            gate.open(Reason::Disconnected);
            let current = Current::testing(SETTINGS, &net, &gate);
            let config = current.config();
            let limits = registry::Limits::new(config.interval, config.retry_max);
            let (roster, queues) = Roster::new(limits, 100, net.metrics.clone());
            let roster = Arc::new(roster);
            let (done_tx, done) = bounded(100);
            let (freed_tx, freed) = bounded(1);
            let (again, again_rx) = bounded(10);
            let (stop, stopped) = bounded(0);
            let workers = Workers::start(
                2,
                never(),
                done_tx.clone(),
                freed_tx,
                net.metrics.clone(),
                Arc::default(),
            )
            .unwrap();
            let prober = Prober::new(Setup {
                rpc: net.rpc.clone(),
                roster: roster.clone(),
                gate: gate.clone(),
                metrics: net.metrics.clone(),
                queues,
                again: again_rx,
                freed,
                done: done_tx,
                workers,
                rate: RateLimit::new(rate),
                limits: Limits { quick_max: 8, silent_max: 8, timeout, held_bytes_max: 10_000 },
                current,
                stop: stopped,
            });
            let prober = Some(thread::spawn(move || prober.run()));
            let stop = Some(stop);
            Bench { net, roster, gate, done, again, stop, prober }
        }

        fn sight(&self, name: &str) {
            self.roster.sight(&Identity::parse(name).unwrap(), Sighting::Discovery);
        }

        #[track_caller]
        fn ended(&self) -> (String, Outcome) {
            let Done { key, report, .. } = self.done.recv_timeout(SOON).unwrap();
            (key.identity.to_string(), report.outcome)
        }

        fn asked(&self, name: &str) -> usize {
            let asked = self.net.asked();
            asked.iter().filter(|asked| asked.subject.ends_with(name)).count()
        }
    }

    impl Drop for Bench {
        fn drop(&mut self) {
            self.stop = None;
            if let Some(prober) = self.prober.take() {
                prober.join().unwrap();
            }
        }
    }

    #[test]
    fn a_node_that_answers_is_provisioned_and_asked_for_its_inventory_once() {
        let bench = Bench::new(SOON, None);
        bench.sight("good.example.net");
        assert_eq!(bench.ended(), ("good.example.net".to_owned(), Outcome::HelperFailed));
        assert_eq!(bench.asked("good.example.net"), 1);
    }

    #[test]
    fn gone_and_silent_nodes_end_as_unreachable_and_leave_no_request_behind() {
        let bench = Bench::new(Duration::from_millis(50), None);
        bench.sight("gone.example.net");
        assert_eq!(bench.ended(), ("gone.example.net".to_owned(), Outcome::Unreachable));
        assert_eq!(bench.asked("gone.example.net"), 1);
        bench.sight("silent.example.net");
        assert_eq!(bench.ended(), ("silent.example.net".to_owned(), Outcome::Unreachable));
        assert_eq!(bench.asked("silent.example.net"), 2);
        let rpc = bench.net.rpc.clone();
        drop(bench);
        assert_eq!(rpc.pending(), 0);
    }

    #[test]
    fn nobody_is_asked_while_the_gate_is_closed() {
        let bench = Bench::new(SOON, None);
        bench.gate.close(Reason::Operator);
        bench.sight("good.example.net");
        assert!(bench.done.recv_timeout(Duration::from_millis(100)).is_err());
        assert_eq!(bench.asked("good.example.net"), 0);
        bench.gate.open(Reason::Operator);
        assert_eq!(bench.ended(), ("good.example.net".to_owned(), Outcome::HelperFailed));
    }

    #[test]
    fn a_node_that_could_not_be_asked_is_asked_when_the_connection_is_back() {
        let bench = Bench::new(SOON, None);
        // The gate hears of it a moment later, as it does in life.
        bench.net.memory.set_connected(false);
        bench.sight("good.example.net");
        bench.sight("gone.example.net");
        assert!(bench.done.recv_timeout(Duration::from_millis(50)).is_err());
        bench.gate.close(Reason::Disconnected);
        bench.net.memory.set_connected(true);
        bench.gate.open(Reason::Disconnected);
        let mut ended = [bench.ended(), bench.ended()];
        ended.sort_by(|left, right| left.0.cmp(&right.0));
        assert_eq!(ended[0], ("gone.example.net".to_owned(), Outcome::Unreachable));
        assert_eq!(ended[1], ("good.example.net".to_owned(), Outcome::HelperFailed));
    }

    #[test]
    fn a_node_asked_before_the_connection_was_lost_is_asked_afresh_without_a_count() {
        let bench = Bench::new(Duration::from_millis(500), None);
        bench.sight("silent.example.net");
        wait_until(|| bench.asked("silent.example.net") == 1);
        bench.gate.close(Reason::Disconnected);
        bench.gate.open(Reason::Disconnected);
        assert_eq!(bench.ended(), ("silent.example.net".to_owned(), Outcome::Unreachable));
        assert!(bench.asked("silent.example.net") > 2);
    }

    #[test]
    fn only_a_late_answer_of_the_node_itself_shows_that_it_is_alive() {
        let bench = Bench::new(Duration::from_millis(50), None);
        bench.sight("silent.example.net");
        let Done { key, report, .. } = bench.done.recv_timeout(SOON).unwrap();
        bench.roster.change(|registry, push| {
            registry.finish(&key, &report, Instant::now(), false, false, push)
        });
        let [first, second] = &bench.net.asked()[..] else { panic!("not asked twice") };
        let body = good_body(Action::Inventory);
        let other = RequestId::random();
        for (kind, forged) in [
            ("malformed", first.raw(b"x".to_vec())),
            ("other_sender", first.reply_from("silent.example.com", &first.id(), &body)),
            ("other_request", first.reply_from("silent.example.net", other.as_str(), &body)),
        ] {
            bench.net.memory.deliver_message(forged);
            wait_until(|| bench.net.unexpected(kind) == 1);
        }
        assert_eq!(bench.asked("silent.example.net"), 2);
        // What it says does not matter.
        bench.net.memory.deliver_message(second.reply_from(
            "silent.example.net",
            &second.id(),
            "x",
        ));
        wait_until(|| bench.asked("silent.example.net") == 3);
    }

    #[test]
    fn the_rate_limit_spaces_nodes() {
        let bench = Bench::new(SOON, Some(10));
        let start = Instant::now();
        for n in 0..4 {
            bench.sight(&format!("good.n{n}.example.net"));
        }
        for _ in 0..4 {
            bench.ended();
        }
        assert!(start.elapsed() >= Duration::from_millis(300), "{:?}", start.elapsed());
    }

    #[test]
    fn draining_forgets_who_waits_and_ends_the_threads() {
        let mut bench = Bench::new(SOON, None);
        for n in 0..50 {
            bench.sight(&format!("silent-{n}.example.net"));
        }
        wait_until(|| bench.net.rpc.pending() > 0);
        bench.stop = None;
        bench.prober.take().unwrap().join().unwrap();
        assert_eq!(bench.net.rpc.pending(), 0);
        // Nobody is left who could report.
        assert!(bench.done.recv_timeout(SOON).unwrap_err().is_disconnected());
    }

    #[test]
    fn a_strange_key_to_ask_again_is_ignored() {
        let bench = Bench::new(SOON, None);
        let identity = Identity::parse("stranger.example.net").unwrap();
        bench.again.send(Key { identity, generation: 7 }).unwrap();
        bench.sight("good.example.net");
        bench.ended();
        assert_eq!(bench.asked("stranger.example.net"), 0);
    }

    /// Waits for what another thread does.
    #[track_caller]
    fn wait_until(condition: impl Fn() -> bool) {
        let deadline = Instant::now() + SOON;
        while !condition() {
            assert!(Instant::now() < deadline, "it never happened");
            thread::sleep(Duration::from_millis(1));
        }
    }
}
