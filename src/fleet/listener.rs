//! Turns startup events into nodes.
//!
//! Every node of the provisioning account may publish events with any identity in them, as fast as it likes: the buffer
//! is bounded in number and bytes, identities are validated, and what is wrong is counted and logged at a bounded rate. An
//! event that is dropped costs nothing but time: the next discovery finds its node.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, select_biased, unbounded};

use crate::clock::unix_time;
use crate::fleet::registry::{Key, Sighted, Sighting};
use crate::fleet::roster::Roster;
use crate::fleet::skew::Skew;
use crate::gate::Gate;
use crate::metrics::Metrics;
use crate::protocol::Identity;
use crate::protocol::json::excerpt;
use crate::protocol::lifecycle::{self, EventKind};
use crate::protocol::subject::Pattern;
use crate::pulse;
use crate::seldom::Seldom;
use crate::shutdown::Never;
use crate::transport::{Handler, Message, Subscription, Transport};

/// Events that wait to be read: what a fleet that starts all at once sends while we look away for a moment.
pub const EVENTS_MAX: usize = 65_536;
/// Bytes of all events that wait: so many real ones, which have 600 at most.
pub const EVENT_BYTES_MAX: usize = 40 << 20;
/// Bytes of one event; a longer one is none.
pub const EVENT_LEN_MAX: usize = 64 << 10;
/// Characters shown of an identity that no node may have.
const IDENTITY_CHARS_SHOWN: usize = 100;
/// How often a bad event is logged, at most.
const LOG_EVERY: Duration = Duration::from_secs(1);

/// What the listener works with.
pub struct Setup {
    /// What we know of the nodes.
    pub roster: Arc<Roster>,
    /// Asked before each event.
    pub gate: Arc<Gate>,
    /// Counts.
    pub metrics: Arc<Metrics>,
    /// Takes the nodes that started anew while an answer of theirs is held.
    pub again: Sender<Key>,
    /// Takes what they say of the time.
    pub skew: Arc<Skew>,
    /// Ends the thread.
    pub stop: Receiver<Never>,
}

/// The thread; reads events in their order.
pub struct Listener {
    buffer: Arc<Buffer>,
    events: Receiver<Vec<u8>>,
    /// Ends with the thread.
    subscription: Subscription,
    setup: Setup,
    bad: Seldom,
    paused: bool,
}

/// Between the connection's reader and this thread. Only the reader adds to it, so checking its length first is exact;
/// a channel with a bound of its own would claim all its memory at the start.
struct Buffer {
    events: Sender<Vec<u8>>,
    bytes: AtomicUsize,
    metrics: Arc<Metrics>,
}

impl Buffer {
    /// On the reader's thread: never waits.
    fn push(&self, payload: Vec<u8>) {
        let len = payload.len();
        if len > EVENT_LEN_MAX {
            return self.ignored("oversized");
        }
        if self.bytes.fetch_add(len, Ordering::Relaxed) + len > EVENT_BYTES_MAX
            || self.events.len() >= EVENTS_MAX
            || self.events.send(payload).is_err()
        {
            self.bytes.fetch_sub(len, Ordering::Relaxed);
            self.ignored("overflow");
        }
    }

    fn ignored(&self, kind: &str) {
        self.metrics.events_ignored.with_label_values(&[kind]).inc();
    }
}

impl Listener {
    /// Subscribes.
    pub fn subscribe(transport: &dyn Transport, pattern: &Pattern, setup: Setup) -> Listener {
        let (sender, events) = unbounded();
        let (bytes, metrics) = (AtomicUsize::new(0), setup.metrics.clone());
        let buffer = Arc::new(Buffer { events: sender, bytes, metrics });
        let handler: Handler = {
            let buffer = buffer.clone();
            Arc::new(move |message: Message| buffer.push(message.payload))
        };
        let subscription = transport.subscribe(pattern, handler);
        let bad = Seldom::every(LOG_EVERY);
        Listener { buffer, events, subscription, setup, bad, paused: false }
    }

    /// Runs until it is told to stop.
    pub fn run(mut self) {
        loop {
            pulse::waits();
            select_biased! {
                recv(self.setup.stop) -> _ => break,
                recv(self.events) -> event => match event {
                    Ok(payload) => {
                        pulse::works();
                        self.buffer.bytes.fetch_sub(payload.len(), Ordering::Relaxed);
                        self.hear(&payload);
                    }
                    Err(_) => break,
                },
            }
        }
        drop(self.subscription);
    }

    fn hear(&mut self, payload: &[u8]) {
        // A standby would fill its queue with nodes that the leader provisions.
        if self.setup.gate.begin().is_err() {
            if !self.paused {
                log::warn!(component = "events"; "Skipping event processing while paused");
            }
            self.paused = true;
            return self.buffer.ignored("paused");
        }
        self.paused = false;
        let event = match lifecycle::read_event(payload) {
            Ok(event) => event,
            Err(error) => {
                self.complain("malformed", &format_args!("could not handle message: {error}"));
                return;
            }
        };
        if event.kind != EventKind::Startup {
            return self.buffer.ignored("kind");
        }
        let identity = match Identity::parse(&event.identity) {
            Ok(identity) => identity,
            Err(error) => {
                self.setup.metrics.invalid_identities.inc();
                let named = excerpt(&event.identity, IDENTITY_CHARS_SHOWN);
                self.complain("identity", &format_args!("event of \"{named}\": {error}"));
                return;
            }
        };
        // One that tells no time has none.
        if event.timestamp > 0 {
            self.setup.skew.note(&identity, event.timestamp, unix_time());
        }
        match self.setup.roster.sight(&identity, Sighting::Event { id: &event.id }) {
            Sighted::Queued(_) => self.setup.metrics.event_discovered.inc(),
            // If that is full, the registry still knows that an answer from before is of no use.
            Sighted::AskAgain(key) => drop(self.setup.again.try_send(key)),
            Sighted::Denied => self.buffer.ignored("denied"),
            Sighted::Others => self.buffer.ignored("others"),
            Sighted::Known | Sighted::NotDue | Sighted::QueueFull => {}
        }
    }

    fn complain(&mut self, kind: &str, what: &dyn std::fmt::Display) {
        self.buffer.ignored(kind);
        if let Some(suppressed) = self.bad.now(Instant::now()) {
            log::warn!(component = "events", kind, suppressed; "Ignoring an event: {what}");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use crossbeam_channel::bounded;

    use super::*;
    use crate::fleet::registry::Limits;
    use crate::fleet::roster::Queues;
    use crate::gate::Reason;
    use crate::protocol::subject::startup_events;
    use crate::transport::memory::Memory;

    const SUBJECT: &str = "choria.lifecycle.event.startup.provision_mode_server";

    /// A listener whose events are read only when the test says so.
    struct Bench {
        transport: Arc<Memory>,
        listener: Listener,
        queues: Queues,
        again: Receiver<Key>,
        metrics: Arc<Metrics>,
        gate: Arc<Gate>,
        stop: Option<Sender<Never>>,
    }

    impl Bench {
        fn new(queue_max: usize) -> Bench {
            let transport = Memory::new();
            let metrics = Metrics::new("test");
            let limits = Limits::new(Duration::from_secs(60), Duration::from_secs(1800));
            let (roster, queues) = Roster::new(limits, queue_max, metrics.clone());
            let gate = Arc::new(Gate::new());
            gate.open(Reason::Disconnected);
            let (again_tx, again) = bounded(1);
            let (stop, stopped) = bounded(0);
            let listener = Listener::subscribe(
                transport.as_ref(),
                &startup_events("provision_mode_server").unwrap(),
                Setup {
                    roster: Arc::new(roster),
                    gate: gate.clone(),
                    metrics: metrics.clone(),
                    again: again_tx,
                    skew: Skew::new(60),
                    stop: stopped,
                },
            );
            let stop = Some(stop);
            Bench { transport, listener, queues, again, metrics, gate, stop }
        }

        fn publish(&self, payload: impl Into<Vec<u8>>) {
            assert_eq!(self.transport.deliver(SUBJECT, payload), 1);
        }

        /// Reads all events published so far, on this thread.
        fn read(&mut self) {
            while let Ok(payload) = self.listener.events.try_recv() {
                self.listener.buffer.bytes.fetch_sub(payload.len(), Ordering::Relaxed);
                self.listener.hear(&payload);
            }
        }

        fn queued(&self) -> Vec<String> {
            self.queues.first.try_iter().map(|key| key.identity.to_string()).collect()
        }

        fn ignored(&self, kind: &str) -> u64 {
            self.metrics.events_ignored.with_label_values(&[kind]).get()
        }
    }

    fn event(kind: &str, identity: &str, id: &str) -> String {
        format!(
            r#"{{"protocol":"io.choria.lifecycle.v1.{kind}","id":"{id}","identity":"{identity}","component":"provision_mode_server","timestamp":1781519508,"version":"0.30.2"}}"#
        )
    }

    #[test]
    fn a_startup_event_queues_its_node_once() {
        let mut bench = Bench::new(10);
        bench.publish(event("startup", "n1.example.net", "1"));
        bench.publish(event("startup", "n1.example.net", "1"));
        bench.read();
        assert_eq!(bench.queued(), ["n1.example.net"]);
        assert_eq!(bench.metrics.event_discovered.get(), 1);
    }

    #[test]
    fn a_queued_node_that_starts_anew_is_asked_again() {
        let mut bench = Bench::new(10);
        bench.publish(event("startup", "n1.example.net", "1"));
        bench.publish(event("startup", "n1.example.net", "2"));
        bench.read();
        assert_eq!(bench.queued().len(), 1);
        assert_eq!(bench.again.try_recv().unwrap().identity.as_str(), "n1.example.net");
    }

    #[test]
    fn what_is_no_startup_event_of_a_proper_node_is_counted_and_dropped() {
        let mut bench = Bench::new(10);
        for identity in ["", "a b", "a.*", "a.>", "a..b", "a\\nb"] {
            bench.publish(event("startup", identity, "1"));
        }
        bench.publish(event("shutdown", "n1.example.net", "1"));
        bench.publish("no JSON");
        bench.publish(vec![0xff; 100]);
        bench.publish("[".repeat(50_000));
        bench.publish(vec![b'x'; EVENT_LEN_MAX + 1]);
        bench.read();
        assert_eq!(bench.queued(), Vec::<String>::new());
        assert_eq!(bench.metrics.invalid_identities.get(), 6);
        assert_eq!(bench.ignored("identity"), 6);
        assert_eq!(bench.ignored("kind"), 1);
        assert_eq!(bench.ignored("malformed"), 3);
        assert_eq!(bench.ignored("oversized"), 1);
    }

    #[test]
    fn events_behind_a_closed_gate_are_skipped() {
        let mut bench = Bench::new(10);
        bench.gate.close(Reason::Operator);
        bench.publish(event("startup", "n1.example.net", "1"));
        bench.read();
        assert_eq!(bench.queued(), Vec::<String>::new());
        assert_eq!(bench.ignored("paused"), 1);
        bench.gate.open(Reason::Operator);
        bench.publish(event("startup", "n1.example.net", "1"));
        bench.read();
        assert_eq!(bench.queued(), ["n1.example.net"]);
    }

    #[test]
    fn a_storm_fills_the_buffer_and_the_queue_and_nothing_else() {
        let mut bench = Bench::new(50_000);
        let storm: usize = 70_000;
        for n in 0..storm {
            bench.publish(event("startup", &format!("n{n}.example.net"), "1"));
        }
        let dropped = bench.ignored("overflow");
        assert!(dropped >= (storm - EVENTS_MAX) as u64);
        bench.read();
        let queued = bench.queued().len();
        let refused = bench.metrics.queue_refused.with_label_values(&["work"]).get();
        assert_eq!(queued as u64 + refused + dropped, storm as u64);
        assert!(queued <= 50_000 && queued > 30_000);
        assert_eq!(bench.listener.buffer.bytes.load(Ordering::Relaxed), 0);
        // And it goes on.
        bench.publish(event("startup", "after.example.net", "1"));
        bench.read();
        assert_eq!(bench.queued(), ["after.example.net"]);
    }

    #[test]
    fn few_large_events_are_bounded_by_their_bytes() {
        let mut bench = Bench::new(10);
        let large = EVENT_LEN_MAX;
        for _ in 0..2 * EVENT_BYTES_MAX / large {
            bench.publish(vec![b'x'; large]);
        }
        assert!(bench.listener.events.len() * large <= EVENT_BYTES_MAX);
        bench.read();
        assert_eq!(bench.ignored("overflow") as usize, EVENT_BYTES_MAX / large);
    }

    #[test]
    fn the_thread_ends_and_unsubscribes_when_told() {
        let mut bench = Bench::new(10);
        let (listener, transport) = (bench.listener, bench.transport);
        let thread = thread::spawn(move || listener.run());
        bench.stop = None;
        thread.join().unwrap();
        assert_eq!(transport.deliver(SUBJECT, "late"), 0);
    }
}
