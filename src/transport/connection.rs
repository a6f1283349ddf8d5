//! The connection to a broker: it comes back by itself, for ever, and its subscriptions with it.
//!
//! | Thread | What it does |
//! | --- | --- |
//! | keeper | connects, greets, sends PINGs, flushes what the reader left, and begins again when a connection ends |
//! | reader | one for each connection; does all its reads after the greeting and calls the handlers |
//! | any | `publish` writes itself, see `outbox` |
//!
//! Locks are taken in the order subscriptions, outbox; handlers and [`Options::on_link`] run under none.
//!
//! Behaviour towards the broker follows nats.go with the options of go-choria's connector.

mod keeper;
mod reader;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, at, bounded, never, select_biased};
use parking_lot::{Mutex, RwLock};

use crate::metrics::Metrics;
use crate::protocol::subject::Pattern;
use crate::pulse::Pulses;
use crate::shutdown::Never;
use crate::transport::address::ServerAddress;
use crate::transport::backoff::{Backoff, FIVE_SEC, TWENTY_SEC};
use crate::transport::connection::keeper::Keeper;
use crate::transport::dial::{self, Slot};
use crate::transport::errors::{BrokerError, ErrorKind, Errors};
use crate::transport::login::{self, Credentials};
use crate::transport::outbox::{Gone, Unsent, Wire};
use crate::transport::servers::{Brokers, Pool};
use crate::transport::wire::{self, Info};
use crate::transport::{Handler, Link, Publish, PublishError, Subscription, Transport};

/// `max_payload` of a broker that doesn't say, and before the first connection.
const MAX_PAYLOAD_DEFAULT: usize = 1024 * 1024;
/// The account of a Choria Broker that is for provisioned nodes and their users.
///
/// Source: `setupAccounts` in go-choria's `broker/network/network_accounts.go`.
const FLEET_ACCOUNT: &str = "choria";
/// `component` of our log messages.
const COMPONENT: &str = "broker";

/// How to connect.
pub struct Options {
    /// Brokers to try; at least one.
    pub brokers: Brokers,
    /// Our name in the broker's list of connections.
    pub name: String,
    /// Where our credentials come from; none by default.
    pub credentials: login::Source,
    /// For the look-up of a name, and for the connection to each of its addresses; 2 s by default.
    pub connect_timeout: Duration,
    /// How long what DNS says of brokers is used again; 5 s by default.
    pub srv_fresh: Duration,
    /// From the connection until the broker has accepted us, and then until it has our subscriptions; 5 s by default.
    pub handshake_timeout: Duration,
    /// For what is written at once; a broker that reads nothing that long is gone; 10 s by default.
    pub write_timeout: Duration,
    /// Between two PINGs; a connection with two unanswered at the next one is dead; 30 s by default.
    pub ping_interval: Duration,
    /// Waits between tries until the first connection.
    pub first_backoff: Backoff,
    /// Waits between tries to connect again.
    pub again_backoff: Backoff,
    /// Told of every change, in order, on the keeper's thread: it must not wait for the connection.
    pub on_link: Box<dyn Fn(Link) + Send + Sync>,
    /// Told of all that goes wrong with a broker, on the keeper's or the reader's thread: it must not wait.
    pub on_error: Box<dyn Fn(&BrokerError) + Send + Sync>,
    /// Counts connections and errors.
    pub metrics: Arc<Metrics>,
    /// Looks after keeper and reader.
    pub pulses: Arc<Pulses>,
}

impl Options {
    /// Defaults for all but the arguments.
    pub fn new(brokers: impl Into<Brokers>, name: &str, metrics: Arc<Metrics>) -> Options {
        Options {
            brokers: brokers.into(),
            name: name.to_owned(),
            credentials: Box::new(|| Ok(Credentials::default())),
            connect_timeout: Duration::from_secs(2),
            srv_fresh: Duration::from_secs(5),
            handshake_timeout: Duration::from_secs(5),
            write_timeout: Duration::from_secs(10),
            ping_interval: Duration::from_secs(30),
            first_backoff: FIVE_SEC,
            again_backoff: TWENTY_SEC,
            on_link: Box::new(|_| {}),
            on_error: Box::new(|_| {}),
            metrics,
            pulses: Arc::default(),
        }
    }
}

impl fmt::Debug for Options {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Options").field("brokers", &self.brokers).finish_non_exhaustive()
    }
}

/// Why a connection could not even be begun.
#[derive(Debug)]
pub enum StartError {
    /// The list of brokers is empty.
    NoServers,
    /// The keeper's thread could not be started.
    Thread(io::Error),
}

impl fmt::Display for StartError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StartError::NoServers => f.write_str("there is no broker to connect to"),
            StartError::Thread(_) => f.write_str("could not start the connection's thread"),
        }
    }
}

impl std::error::Error for StartError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            StartError::NoServers => None,
            StartError::Thread(error) => Some(error),
        }
    }
}

/// The connection to a broker, shared by all threads.
#[derive(Debug)]
pub struct Connection {
    shared: Arc<Shared>,
    keeper: Mutex<Option<JoinHandle<()>>>,
}

impl Connection {
    /// Begins to connect, and goes on for ever; returns at once.
    ///
    /// # Errors
    ///
    /// [`StartError`].
    pub fn start(options: Options) -> Result<Arc<Connection>, StartError> {
        let listed = match &options.brokers {
            Brokers::Listed(none) if none.is_empty() => return Err(StartError::NoServers),
            Brokers::Listed(servers) => servers.clone(),
            Brokers::Srv(_) => Vec::new(),
        };
        let mut random = fastrand::Rng::new();
        let pool = Pool::new(listed, &mut random);
        let (stop, stopped) = bounded(0);
        let shared = Arc::new(Shared {
            options,
            pool: Mutex::new(pool),
            subscriptions: Mutex::default(),
            current: RwLock::new(None),
            max_payload: AtomicUsize::new(MAX_PAYLOAD_DEFAULT),
            slot: Slot::default(),
            errors: Mutex::default(),
            closing: AtomicBool::new(false),
            stop: Mutex::new(Some(stop)),
        });
        let keeper = Keeper::new(Arc::clone(&shared), stopped, random);
        let keeper = keeper.start().map_err(StartError::Thread)?;
        Ok(Arc::new(Connection { shared, keeper: Mutex::new(Some(keeper)) }))
    }

    /// Takes nothing more, waits until the broker has what was sent before, at most until `deadline` or until `abort`
    /// disconnects, and closes for good.
    pub fn drain(&self, deadline: Instant, abort: &Receiver<Never>) {
        self.shared.closing.store(true, Ordering::Release);
        let link = self.shared.current.read().clone();
        if self.shared.flush(deadline, abort).is_ok()
            && let Some(link) = link
        {
            dial::close_gently(link.wire.socket());
        }
        self.abort();
    }

    /// Closes for good, at once; every wait ends.
    pub fn abort(&self) {
        self.shared.abort();
    }

    /// Waits for the threads, after [`Connection::drain`] or [`Connection::abort`]; not for use in a handler.
    pub fn join(&self) {
        let keeper = self.keeper.lock().take();
        if let Some(keeper) = keeper
            && keeper.join().is_err()
        {
            log::error!(component = COMPONENT; "The connection's thread has panicked");
        }
    }

    /// Whether messages can be sent right now.
    pub fn is_connected(&self) -> bool {
        self.shared.current.read().is_some()
    }

    /// The broker's last error on this connection, or while there is none, of the tries to make one.
    pub fn last_error(&self) -> Option<BrokerError> {
        self.shared.errors.lock().last.clone()
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        // Not joined: this may be the keeper's or the reader's own thread.
        self.shared.abort();
    }
}

impl Transport for Connection {
    fn publish(&self, message: &Publish<'_>) -> Result<(), PublishError> {
        let Publish { subject, reply, headers, payload, until } = *message;
        if !headers.iter().all(|(name, value)| wire::is_header(name, value)) {
            return Err(PublishError::BadHeader);
        }
        let link = self.shared.current()?;
        let size = wire::header_size(headers) + payload.len();
        let max = self.max_payload();
        if size > max {
            return Err(PublishError::TooLarge { size, max });
        }
        let (subject, reply) = (subject.as_str(), reply.map(|reply| reply.as_str()));
        link.wire
            .send(until, |frame| wire::publish(frame, subject, reply, headers, payload))
            .map_err(|unsent| match unsent {
                Unsent::Gone => self.shared.offline(),
                Unsent::Late => PublishError::Late,
            })
    }

    fn subscribe(&self, pattern: &Pattern, handler: Handler) -> Subscription {
        let sid = self.shared.subscriptions.lock().add(pattern.clone(), handler);
        let shared: Weak<Shared> = Arc::downgrade(&self.shared);
        Subscription::new(move || {
            if let Some(shared) = shared.upgrade() {
                // The handler is dropped after the lock: it may hold what ends another subscription.
                let removed = shared.subscriptions.lock().remove(sid);
                drop(removed);
            }
        })
    }

    fn flush(&self, deadline: Instant) -> Result<(), PublishError> {
        self.shared.flush(deadline, &never())
    }

    fn broker_url(&self) -> Arc<str> {
        match &*self.shared.current.read() {
            Some(link) => Arc::clone(&link.url),
            None => Arc::from(""),
        }
    }

    fn max_payload(&self) -> usize {
        self.shared.max_payload.load(Ordering::Relaxed)
    }
}

/// What the threads share.
struct Shared {
    options: Options,
    pool: Mutex<Pool>,
    subscriptions: Mutex<Subscriptions>,
    /// The connection in use, once all subscriptions are in place.
    current: RwLock<Option<Current>>,
    /// Of the last INFO.
    max_payload: AtomicUsize,
    slot: Slot,
    errors: Mutex<Errors>,
    closing: AtomicBool,
    /// Dropped to stop.
    stop: Mutex<Option<Sender<Never>>>,
}

#[derive(Debug, Clone)]
struct Current {
    wire: Arc<Wire>,
    url: Arc<str>,
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared").field("current", &self.current).finish_non_exhaustive()
    }
}

impl Shared {
    fn current(&self) -> Result<Current, PublishError> {
        if self.closing.load(Ordering::Acquire) {
            return Err(PublishError::Closed);
        }
        self.current.read().clone().ok_or(PublishError::Disconnected)
    }

    /// Why nothing could be sent.
    fn offline(&self) -> PublishError {
        if self.closing.load(Ordering::Acquire) {
            PublishError::Closed
        } else {
            PublishError::Disconnected
        }
    }

    fn flush(&self, deadline: Instant, abort: &Receiver<Never>) -> Result<(), PublishError> {
        let link = self.current.read().clone().ok_or_else(|| self.offline())?;
        let (answered, answer) = bounded(1);
        link.wire.ping(Some(answered)).map_err(|Gone| self.offline())?;
        select_biased! {
            recv(answer) -> answered => answered.map_err(|_| PublishError::Disconnected),
            recv(abort) -> _ => Err(PublishError::Disconnected),
            recv(at(deadline)) -> _ => Err(PublishError::Disconnected),
        }
    }

    fn abort(&self) {
        self.closing.store(true, Ordering::Release);
        drop(self.stop.lock().take());
        self.slot.abort();
    }

    /// Takes what the broker says of itself, in the greeting and later.
    fn learn(&self, info: &Info, server: &ServerAddress) {
        self.learn_limits(info);
        self.pool.lock().learn(info.connect_urls.as_deref().unwrap_or_default(), server);
        if info.remote_account.as_deref() == Some(FLEET_ACCOUNT) {
            let text = format!(
                "{server} let us into its account {FLEET_ACCOUNT}, and nodes to be provisioned are in another: is broker_provisioning_password set?"
            );
            self.error(ErrorKind::Permissions, text);
        }
    }

    fn learn_limits(&self, info: &Info) {
        let max_payload = match usize::try_from(info.max_payload) {
            Ok(max) if max > 0 => max.min(wire::SKIPPED_MAX),
            _ => MAX_PAYLOAD_DEFAULT,
        };
        self.max_payload.store(max_payload, Ordering::Relaxed);
    }

    fn is_stopped(&self) -> bool {
        self.stop.lock().is_none()
    }

    /// Counts an error, keeps it for readiness and logs it.
    fn error(&self, kind: ErrorKind, text: String) {
        self.options.metrics.broker_errors.with_label_values(&[kind.label()]).inc();
        let error = BrokerError { kind, text, at: Instant::now() };
        let is_news = self.errors.lock().note(&error);
        let level = if is_news { log::Level::Warn } else { log::Level::Debug };
        log::log!(level, component = COMPONENT, kind = kind.label(); "{}", error.text);
        (self.options.on_error)(&error);
    }
}

/// What we are subscribed to, whether connected or not.
#[derive(Default)]
struct Subscriptions {
    last_sid: u64,
    by_sid: BTreeMap<u64, (Pattern, Handler)>,
    /// The connection that knows them; every change goes there as well.
    wire: Option<Arc<Wire>>,
}

impl Subscriptions {
    fn add(&mut self, pattern: Pattern, handler: Handler) -> u64 {
        self.last_sid += 1;
        let sid = self.last_sid;
        if let Some(wire) = &self.wire {
            // A connection that is gone needs no SUB: the next one gets them all.
            let _ = wire.leave(|frame| wire::subscribe(frame, pattern.as_str(), sid));
        }
        self.by_sid.insert(sid, (pattern, handler));
        sid
    }

    fn remove(&mut self, sid: u64) -> Option<(Pattern, Handler)> {
        let removed = self.by_sid.remove(&sid)?;
        if let Some(wire) = &self.wire {
            // As in `add`.
            let _ = wire.leave(|frame| wire::unsubscribe(frame, sid));
        }
        Some(removed)
    }

    /// Tells a new connection of all of them, and of every change from now on.
    fn attach(&mut self, wire: Arc<Wire>) -> Result<(), Gone> {
        for (sid, (pattern, _)) in &self.by_sid {
            wire.leave(|frame| wire::subscribe(frame, pattern.as_str(), *sid))?;
        }
        self.wire = Some(wire);
        Ok(())
    }

    fn handler(&self, sid: u64) -> Option<Handler> {
        self.by_sid.get(&sid).map(|(_, handler)| Arc::clone(handler))
    }
}
