//! Turns startup events into nodes.
//!
//! Every node of the provisioning account may publish events with any identity in them, as fast as it likes: the buffer
//! is bounded in number and bytes, identities are validated, and what is wrong is counted and logged at a bounded rate. An
//! event that is dropped costs nothing but time: the next discovery finds its node.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, select_biased, unbounded};

use crate::fleet::registry::{Key, Sighted, Sighting};
use crate::fleet::roster::Roster;
use crate::fleet::seldom::Seldom;
use crate::gate::Gate;
use crate::metrics::Metrics;
use crate::protocol::Identity;
use crate::protocol::lifecycle::{self, EventKind};
use crate::protocol::subject::Pattern;
use crate::shutdown::Never;
use crate::transport::{Handler, Message, Subscription, Transport};

/// Events that wait to be read: what a fleet that starts all at once sends while we look away for a moment.
pub const EVENTS_MAX: usize = 65_536;
/// Bytes of all events that wait; a real one has 500.
pub const EVENT_BYTES_MAX: usize = 16 << 20;
/// Bytes of one event; a longer one is none.
pub const EVENT_LEN_MAX: usize = 64 << 10;
/// How often a bad event is logged, and a pause mentioned.
const LOG_EVERY: Duration = Duration::from_secs(1);

/// The thread; reads events in their order.
pub struct Listener {
    buffer: Arc<Buffer>,
    events: Receiver<Vec<u8>>,
    /// Ends with the thread.
    subscription: Subscription,
    roster: Arc<Roster>,
    gate: Arc<Gate>,
    metrics: Arc<Metrics>,
    again: Sender<Key>,
    stop: Receiver<Never>,
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
    /// Subscribes. `again` takes the nodes that started anew while an answer of theirs is held; the thread ends when
    /// `stop` disconnects.
    pub fn subscribe(
        transport: &dyn Transport,
        pattern: &Pattern,
        roster: Arc<Roster>,
        gate: Arc<Gate>,
        metrics: Arc<Metrics>,
        again: Sender<Key>,
        stop: Receiver<Never>,
    ) -> Listener {
        let (sender, events) = unbounded();
        let bytes = AtomicUsize::new(0);
        let buffer = Arc::new(Buffer { events: sender, bytes, metrics: metrics.clone() });
        let handler: Handler = {
            let buffer = buffer.clone();
            Arc::new(move |message: Message| buffer.push(message.payload))
        };
        let subscription = transport.subscribe(pattern, handler);
        let bad = Seldom::every(LOG_EVERY);
        let paused = false;
        Listener { buffer, events, subscription, roster, gate, metrics, again, stop, bad, paused }
    }

    /// Runs until it is told to stop.
    pub fn run(mut self) {
        loop {
            select_biased! {
                recv(self.stop) -> _ => break,
                recv(self.events) -> event => match event {
                    Ok(payload) => {
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
        if self.gate.begin().is_err() {
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
                self.metrics.invalid_identities.inc();
                self.complain("identity", &format_args!("event of {:?}: {error}", event.identity));
                return;
            }
        };
        match self.roster.sight(&identity, Sighting::Event { id: &event.id }) {
            Sighted::Queued(_) => self.metrics.event_discovered.inc(),
            // If that is full, the registry still knows that an answer from before is of no use.
            Sighted::AskAgain(key) => drop(self.again.try_send(key)),
            Sighted::Known | Sighted::NotDue | Sighted::QueueFull => {}
        }
    }

    fn complain(&mut self, kind: &str, what: &dyn std::fmt::Display) {
        self.buffer.ignored(kind);
        if let Some(more) = self.bad.now(Instant::now()) {
            log::warn!(component = "events", kind, more; "Ignoring an event: {what}");
        }
    }
}
