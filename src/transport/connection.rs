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

use std::collections::BTreeMap;
use std::fmt;
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, at, bounded, never, select_biased, tick};
use parking_lot::{Mutex, RwLock};

use crate::config::Secret;
use crate::metrics::Metrics;
use crate::protocol::subject::Pattern;
use crate::shutdown::Never;
use crate::transport::backoff::{Backoff, FIVE_SEC, TWENTY_SEC};
use crate::transport::dial::{self, Resolver, Slot};
use crate::transport::outbox::{Ending, Gone, Wire};
use crate::transport::servers::{Pool, ServerAddress};
use crate::transport::session::Session;
use crate::transport::wire::{self, Headers, Info, Msg, Op, Parser, ProtocolError};
use crate::transport::{Handler, Link, Message, Publish, PublishError, Subscription, Transport};

/// `max_payload` of a broker that doesn't say, and before the first connection.
const MAX_PAYLOAD_DEFAULT: usize = 1024 * 1024;
/// Bytes read at once.
const READ_SIZE: usize = 64 * 1024;
/// PINGs without an answer after which a connection is dead.
const KEEPALIVES_MAX: usize = 2;
/// A connection that lived shorter was no success: the wait before the next one goes on growing.
const STABLE_AFTER: Duration = Duration::from_secs(10);
/// Least time between two warnings of one kind; those between are debug messages.
const WARNING_PAUSE: Duration = Duration::from_secs(1);
/// Length of a broker's complaint that we keep, in characters.
const COMPLAINT_MAX: usize = 256;
/// `component` of our log messages.
const COMPONENT: &str = "broker";

/// How to connect.
pub struct Options {
    /// Brokers to try; at least one.
    pub servers: Vec<ServerAddress>,
    /// Our name in the broker's list of connections.
    pub name: String,
    /// User and password.
    pub user: Option<(String, Secret)>,
    /// For the look-up of a name, and for the connection to each of its addresses; 2 s by default.
    pub connect_timeout: Duration,
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
    /// Counts connections and errors.
    pub metrics: Arc<Metrics>,
}

impl Options {
    /// Defaults for all but the arguments.
    pub fn new(servers: Vec<ServerAddress>, name: &str, metrics: Arc<Metrics>) -> Options {
        Options {
            servers,
            name: name.to_owned(),
            user: None,
            connect_timeout: Duration::from_secs(2),
            handshake_timeout: Duration::from_secs(5),
            write_timeout: Duration::from_secs(10),
            ping_interval: Duration::from_secs(30),
            first_backoff: FIVE_SEC,
            again_backoff: TWENTY_SEC,
            on_link: Box::new(|_| {}),
            metrics,
        }
    }
}

impl fmt::Debug for Options {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Options").field("servers", &self.servers).finish_non_exhaustive()
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

/// What went wrong between us and a broker; the `kind` of the error counter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum ErrorKind {
    /// No TCP connection: name, address, port or time.
    Connect,
    /// The broker didn't greet us, or not in time.
    Handshake,
    /// One side insists on TLS and the other can't.
    Tls,
    /// It doesn't know us, or no longer.
    Authorization,
    /// We may not publish or subscribe there.
    Permissions,
    /// One of its limits: connections, subscriptions, sizes.
    Limit,
    /// We read too slowly for it.
    SlowConsumer,
    /// One side thought the other dead.
    Stale,
    /// One side didn't understand the other.
    Protocol,
    /// It is going away.
    Shutdown,
    /// The connection broke.
    Lost,
    /// It took nothing of what we wrote.
    Write,
    /// A message's headers could not be read; it was delivered without.
    BadHeader,
    /// A message was too large to hold; it was dropped.
    TooLarge,
    /// A complaint we don't know.
    Other,
}

impl ErrorKind {
    /// Its label in metrics.
    pub fn label(self) -> &'static str {
        match self {
            ErrorKind::Connect => "connect",
            ErrorKind::Handshake => "handshake",
            ErrorKind::Tls => "tls",
            ErrorKind::Authorization => "authorization",
            ErrorKind::Permissions => "permissions",
            ErrorKind::Limit => "limit",
            ErrorKind::SlowConsumer => "slow_consumer",
            ErrorKind::Stale => "stale",
            ErrorKind::Protocol => "protocol",
            ErrorKind::Shutdown => "shutdown",
            ErrorKind::Lost => "lost",
            ErrorKind::Write => "write",
            ErrorKind::BadHeader => "bad_header",
            ErrorKind::TooLarge => "too_large",
            ErrorKind::Other => "other",
        }
    }

    /// The kind of a broker's complaint.
    ///
    /// Source: the errors of nats-server's `server/errors.go`.
    fn of_complaint(text: &str) -> ErrorKind {
        let text = text.to_ascii_lowercase();
        let has = |words: &[&str]| words.iter().any(|word| text.contains(word));
        // The order matters: a subject named in a permissions violation may hold any word.
        if has(&["permissions violation"]) {
            ErrorKind::Permissions
        } else if has(&["authorization", "authentication"]) {
            ErrorKind::Authorization
        } else if has(&["stale connection"]) {
            ErrorKind::Stale
        } else if has(&["slow consumer"]) {
            ErrorKind::SlowConsumer
        } else if has(&["maximum"]) {
            ErrorKind::Limit
        } else if has(&["tls"]) {
            ErrorKind::Tls
        } else if has(&["server shutdown"]) {
            ErrorKind::Shutdown
        } else if has(&["protocol", "parser", "invalid"]) {
            ErrorKind::Protocol
        } else {
            ErrorKind::Other
        }
    }
}

/// An error of the connection, for people.
#[derive(Debug, Clone)]
pub struct BrokerError {
    /// What it was.
    pub kind: ErrorKind,
    /// Which broker, and what it said.
    pub text: String,
    /// When.
    pub at: Instant,
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
        if options.servers.is_empty() {
            return Err(StartError::NoServers);
        }
        let mut random = fastrand::Rng::new();
        let pool = Pool::new(options.servers.clone(), &mut random);
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
        let keeper = Keeper {
            shared: Arc::clone(&shared),
            stopped,
            resolver: Resolver::default(),
            random,
            connected_before: false,
        };
        let keeper = thread::Builder::new()
            .name("broker-keeper".to_owned())
            .spawn(move || keeper.run())
            .map_err(StartError::Thread)?;
        Ok(Arc::new(Connection { shared, keeper: Mutex::new(Some(keeper)) }))
    }

    /// Takes nothing more, waits until the broker has what was sent before, at most until `deadline`, and closes for good.
    pub fn drain(&self, deadline: Instant) {
        self.shared.closing.store(true, Ordering::Release);
        // Whether it got there or not: there is nothing left to do about it.
        let _ = self.shared.flush(deadline);
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

    /// The last error of this connection, or while there is none, of the tries to make one.
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
        let Publish { subject, reply, headers, payload } = *message;
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
            .send(|frame| wire::publish(frame, subject, reply, headers, payload))
            .map_err(|Gone| self.shared.offline())
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
        self.shared.flush(deadline)
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

    fn flush(&self, deadline: Instant) -> Result<(), PublishError> {
        let link = self.current.read().clone().ok_or_else(|| self.offline())?;
        let (answered, answer) = bounded(1);
        link.wire.ping(Some(answered)).map_err(|Gone| self.offline())?;
        answer.recv_deadline(deadline).map_err(|_| PublishError::Disconnected)
    }

    fn abort(&self) {
        self.closing.store(true, Ordering::Release);
        drop(self.stop.lock().take());
        self.slot.abort();
    }

    /// Takes what the broker says of itself, in the greeting and later.
    fn learn(&self, info: &Info, server: &ServerAddress) {
        let max_payload = match usize::try_from(info.max_payload) {
            Ok(max) if max > 0 => max.min(wire::SKIPPED_MAX),
            _ => MAX_PAYLOAD_DEFAULT,
        };
        self.max_payload.store(max_payload, Ordering::Relaxed);
        self.pool.lock().learn(info.connect_urls.as_deref().unwrap_or_default(), server);
        if info.lame_duck {
            log::info!(component = COMPONENT; "{server} is about to shut down");
        }
    }

    /// Counts an error, keeps it for readiness and logs it.
    fn error(&self, kind: ErrorKind, text: String) {
        self.options.metrics.broker_errors.with_label_values(&[kind.label()]).inc();
        let is_news = self.errors.lock().note(kind, text.clone(), Instant::now());
        let level = if is_news { log::Level::Warn } else { log::Level::Debug };
        log::log!(level, component = COMPONENT, kind = kind.label(); "{text}");
    }
}

/// The last error, and when each kind was last worth a warning.
#[derive(Debug, Default)]
struct Errors {
    last: Option<BrokerError>,
    warned: BTreeMap<ErrorKind, Instant>,
}

impl Errors {
    /// Whether the last warning of its kind is long enough ago.
    fn note(&mut self, kind: ErrorKind, text: String, now: Instant) -> bool {
        self.last = Some(BrokerError { kind, text, at: now });
        let last = self.warned.get(&kind);
        let is_news = last.is_none_or(|last| now.duration_since(*last) >= WARNING_PAUSE);
        if is_news {
            self.warned.insert(kind, now);
        }
        is_news
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

/// Connects, keeps the connection alive, and connects again.
struct Keeper {
    shared: Arc<Shared>,
    /// Disconnects when we must stop.
    stopped: Receiver<Never>,
    resolver: Resolver,
    random: fastrand::Rng,
    connected_before: bool,
}

/// A broker that has accepted us.
struct Greeted {
    socket: Arc<TcpStream>,
    parser: Parser,
    session: Session,
    server: ServerAddress,
}

impl Keeper {
    fn run(mut self) {
        let mut failures = 0;
        while self.pause(failures) {
            failures = if self.round() { 0 } else { failures + 1 };
        }
        // Handlers may hold what holds us.
        let forgotten = std::mem::take(&mut *self.shared.subscriptions.lock());
        drop(forgotten);
    }

    /// Waits before the next round; false when we must stop.
    fn pause(&mut self, failures: usize) -> bool {
        let table = match self.connected_before {
            true => self.shared.options.again_backoff,
            false => self.shared.options.first_backoff,
        };
        let wait = match failures {
            0 => Duration::ZERO,
            _ => table.wait(failures, &mut self.random),
        };
        select_biased! {
            recv(self.stopped) -> _ => false,
            recv(at(Instant::now() + wait)) -> _ => true,
        }
    }

    /// Tries every broker until one accepts us, and stays with it to its end; true if it was a good while.
    fn round(&mut self) -> bool {
        let servers = self.shared.pool.lock().round();
        for server in servers {
            let begun = Instant::now();
            match self.greet(&server) {
                Ok(greeted) => {
                    let ending = self.keep(greeted, begun);
                    self.shared.slot.release();
                    self.shared.pool.lock().try_last(&server);
                    if !self.is_stopped() {
                        self.shared.error(ending.kind, format!("{server}: {}", ending.reason));
                    }
                    return begun.elapsed() >= STABLE_AFTER;
                }
                Err(_) if self.is_stopped() => return false,
                Err(Ending { kind, reason }) => {
                    self.shared.slot.release();
                    self.shared.error(kind, format!("could not connect to {server}: {reason}"));
                }
            }
        }
        false
    }

    fn is_stopped(&self) -> bool {
        self.shared.stop.lock().is_none()
    }

    /// Connects to the first address of `server` that accepts us.
    fn greet(&self, server: &ServerAddress) -> Result<Greeted, Ending> {
        let options = &self.shared.options;
        let no_connection =
            |error: io::Error| Ending { kind: ErrorKind::Connect, reason: error.to_string() };

        if server.is_tls() {
            return Err(needs_tls());
        }
        let deadline = Instant::now() + options.connect_timeout;
        let addresses =
            self.resolver.resolve(server, deadline, &self.stopped).map_err(no_connection)?;

        let mut last = no_connection(io::ErrorKind::AddrNotAvailable.into());
        for address in addresses {
            let deadline = Instant::now() + options.connect_timeout;
            let attempt = dial::connect(address, deadline, &self.shared.slot)
                .map_err(no_connection)
                .and_then(|socket| self.greet_on(socket, server));
            match attempt {
                Ok(greeted) => return Ok(greeted),
                Err(ending) if self.is_stopped() => return Err(ending),
                Err(ending) => last = ending,
            }
        }
        Err(last)
    }

    /// Exchanges the first lines: its INFO, our CONNECT and PING, its PONG.
    fn greet_on(&self, socket: Arc<TcpStream>, server: &ServerAddress) -> Result<Greeted, Ending> {
        let options = &self.shared.options;
        let deadline = Instant::now() + options.handshake_timeout;
        socket.set_write_timeout(Some(options.write_timeout)).map_err(broken_greeting)?;

        let mut lines = Lines { socket: &socket, parser: Parser::default(), deadline };
        lines.until(|op| match op {
            Op::Info(json) => {
                let info = Info::parse(json)?;
                self.shared.learn(&info, server);
                if info.tls_required { Err(needs_tls()) } else { Ok(true) }
            }
            Op::Err(text) => Err(complaint(text)),
            _ => Err(Ending {
                kind: ErrorKind::Protocol,
                reason: "it did not begin with INFO".to_owned(),
            }),
        })?;

        let mut hello = Vec::new();
        let (user, password) = match &options.user {
            Some((user, password)) => (Some(user.as_str()), Some(password.expose())),
            None => (None, None),
        };
        wire::connect(
            &mut hello,
            &wire::Connect {
                verbose: false,
                pedantic: false,
                tls_required: false,
                name: &options.name,
                lang: "rust",
                version: env!("CARGO_PKG_VERSION"),
                protocol: 1,
                headers: true,
                no_responders: true,
                user,
                password,
            },
        );
        hello.extend_from_slice(wire::PING);
        lines.write(&hello)?;
        lines.until(|op| match op {
            Op::Pong => Ok(true),
            // The second INFO comes before the PONG or after it.
            Op::Info(json) => {
                self.shared.learn(&Info::parse(json)?, server);
                Ok(false)
            }
            Op::Ok => Ok(false),
            Op::Ping => lines_pong(&socket).map(|()| false),
            Op::Err(text) => Err(complaint(text)),
            Op::Msg(_) | Op::Skipped { .. } => Err(Ending {
                kind: ErrorKind::Protocol,
                reason: "it sent a message before anybody asked".to_owned(),
            }),
        })?;

        let parser = lines.parser;
        socket.set_read_timeout(None).map_err(broken_greeting)?;
        Ok(Greeted { socket, parser, session: Session::Plain, server: server.clone() })
    }

    /// Stays with one connection to its end.
    fn keep(&mut self, greeted: Greeted, begun: Instant) -> Ending {
        let Greeted { socket, parser, session, server } = greeted;
        let shared = Arc::clone(&self.shared);
        let options = &shared.options;
        let (wake, woken) = bounded(1);
        let wire = Arc::new(Wire::new(socket, session, wake, options.write_timeout));
        let (end, ended) = bounded(0);
        let reader = Reader {
            shared: Arc::clone(&self.shared),
            wire: Arc::clone(&wire),
            server: server.clone(),
            parser,
            end,
        };
        let reader =
            thread::Builder::new().name("broker-reader".to_owned()).spawn(move || reader.run());
        let reader = match reader {
            Ok(reader) => reader,
            Err(error) => {
                wire.end(ErrorKind::Other, format!("could not start the reader: {error}"));
                return wire.ending().unwrap_or_else(unexplained);
            }
        };

        // The broker takes lines in order: when it answers this PING, it has the SUBs before it.
        let (answer, mut in_place) = bounded(1);
        let attached = self.shared.subscriptions.lock().attach(Arc::clone(&wire));
        // A connection that is gone ends the loop below.
        let _ = attached.and_then(|()| wire.ping(Some(answer)));
        let mut late = at(Instant::now() + options.handshake_timeout);
        let pings = tick(options.ping_interval);
        let mut is_up = false;
        loop {
            select_biased! {
                recv(self.stopped) -> _ => wire.end(ErrorKind::Lost, "closed by us"),
                recv(ended) -> _ => break,
                recv(in_place) -> answered => {
                    in_place = never();
                    if answered.is_ok() {
                        late = never();
                        is_up = true;
                        self.up(&wire, &server, begun);
                    }
                }
                recv(late) -> _ => wire.end(ErrorKind::Handshake, "no answer to our subscriptions"),
                recv(woken) -> _ => {
                    // Whoever it fails for, the reader ends with it.
                    let _ = wire.flush();
                }
                recv(pings) -> _ => {
                    if wire.keepalives_unanswered() >= KEEPALIVES_MAX {
                        wire.end(ErrorKind::Stale, "it does not answer PING");
                    } else {
                        // As above.
                        let _ = wire.ping(None);
                    }
                }
            }
            if wire.ending().is_some() {
                break;
            }
        }
        let ending = wire.ending().unwrap_or_else(unexplained);
        if is_up {
            *self.shared.current.write() = None;
            options.metrics.broker_connected.set(0);
        }
        self.shared.subscriptions.lock().wire = None;
        if reader.join().is_err() {
            log::error!(component = COMPONENT; "The reader has panicked");
        }
        if is_up {
            (options.on_link)(Link::Down { reason: ending.reason.clone() });
        }
        ending
    }

    fn up(&mut self, wire: &Arc<Wire>, server: &ServerAddress, begun: Instant) {
        let options = &self.shared.options;
        let first = !std::mem::replace(&mut self.connected_before, true);
        let url = server.to_string();
        {
            // What went wrong before is over.
            let mut errors = self.shared.errors.lock();
            if errors.last.as_ref().is_some_and(|error| error.at < begun) {
                errors.last = None;
            }
        }
        *self.shared.current.write() =
            Some(Current { wire: Arc::clone(wire), url: Arc::from(url.as_str()) });
        options.metrics.broker_connected.set(1);
        if !first {
            options.metrics.broker_reconnects.inc();
        }
        log::info!(component = COMPONENT; "Connected to {url}");
        (options.on_link)(Link::Up { server: url, first });
    }
}

/// The lines of a greeting, read until a deadline.
struct Lines<'a> {
    socket: &'a TcpStream,
    parser: Parser,
    deadline: Instant,
}

impl Lines<'_> {
    /// Reads until `take` has what it wants.
    fn until(&mut self, take: impl Fn(Op<'_>) -> Result<bool, Ending>) -> Result<(), Ending> {
        let mut piece = [0; 4096];
        loop {
            while let Some(op) = self.parser.next()? {
                if take(op)? {
                    return Ok(());
                }
            }
            let left = self.deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(broken_greeting(io::ErrorKind::TimedOut.into()));
            }
            self.socket.set_read_timeout(Some(left)).map_err(broken_greeting)?;
            match self.socket.read(&mut piece) {
                Ok(0) => return Err(broken_greeting(io::ErrorKind::UnexpectedEof.into())),
                Ok(len) => self.parser.feed(&piece[..len]),
                // Its time is up, or a signal came: the loop looks.
                Err(error) if is_retry(&error) => {}
                Err(error) => return Err(broken_greeting(error)),
            }
        }
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), Ending> {
        self.socket.write_all(bytes).map_err(broken_greeting)
    }
}

fn lines_pong(mut socket: &TcpStream) -> Result<(), Ending> {
    socket.write_all(wire::PONG).map_err(broken_greeting)
}

fn is_retry(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut | io::ErrorKind::Interrupted
    )
}

fn broken_greeting(error: io::Error) -> Ending {
    let reason = match error.kind() {
        io::ErrorKind::TimedOut => "it did not greet us in time".to_owned(),
        io::ErrorKind::UnexpectedEof => "it closed the connection during the greeting".to_owned(),
        _ => format!("the greeting failed: {error}"),
    };
    Ending { kind: ErrorKind::Handshake, reason }
}

fn needs_tls() -> Ending {
    Ending { kind: ErrorKind::Tls, reason: "it demands TLS".to_owned() }
}

fn unexplained() -> Ending {
    Ending { kind: ErrorKind::Lost, reason: "the connection ended".to_owned() }
}

impl From<ProtocolError> for Ending {
    fn from(error: ProtocolError) -> Ending {
        Ending { kind: ErrorKind::Protocol, reason: format!("it is not understood: {error}") }
    }
}

/// A broker's complaint as an error, safe to log.
fn complaint(text: &[u8]) -> Ending {
    let reason: String = String::from_utf8_lossy(text)
        .chars()
        .map(|c| if c.is_control() { '?' } else { c })
        .take(COMPLAINT_MAX)
        .collect();
    Ending { kind: ErrorKind::of_complaint(&reason), reason }
}

/// Reads one connection to its end.
struct Reader {
    shared: Arc<Shared>,
    wire: Arc<Wire>,
    server: ServerAddress,
    parser: Parser,
    /// Dropped with the reader, which tells the keeper.
    end: Sender<Never>,
}

impl Reader {
    fn run(mut self) {
        let Ending { kind, reason } = match self.read() {
            Ok(never) => match never {},
            Err(ending) => ending,
        };
        self.wire.end(kind, reason);
        drop(self.end);
    }

    fn read(&mut self) -> Result<Never, Ending> {
        let mut piece = vec![0; READ_SIZE];
        let mut parser = std::mem::take(&mut self.parser);
        loop {
            while let Some(op) = parser.next()? {
                self.take(op)?;
            }
            let lost = |reason: String| Ending { kind: ErrorKind::Lost, reason };
            match self.wire.socket().read(&mut piece) {
                Ok(0) => return Err(lost("it closed the connection".to_owned())),
                Ok(len) => self
                    .wire
                    .open(&piece[..len], &mut parser)
                    .map_err(|error| lost(format!("reading failed: {error}")))?,
                Err(error) if is_retry(&error) => {}
                Err(error) => return Err(lost(format!("reading failed: {error}"))),
            }
        }
    }

    fn take(&self, op: Op<'_>) -> Result<(), Ending> {
        match op {
            Op::Msg(message) => self.deliver(message),
            Op::Ping => {
                // If it is gone, the next read says so.
                let _ = self.wire.leave(|frame| frame.extend_from_slice(wire::PONG));
            }
            Op::Pong => self.wire.pong(),
            Op::Ok => {}
            Op::Err(text) => {
                // If it is one of those that end the connection, the broker ends it.
                let Ending { kind, reason } = complaint(text);
                self.shared.error(kind, format!("{} says: {reason}", self.server));
            }
            Op::Info(json) => self.shared.learn(&Info::parse(json)?, &self.server),
            Op::Skipped { size, .. } => {
                let max = wire::MESSAGE_MAX;
                let text = format!("a message of {size} bytes exceeds our limit of {max}");
                self.shared.error(ErrorKind::TooLarge, text);
            }
        }
        Ok(())
    }

    fn deliver(&self, message: Msg<'_>) {
        // A message that was on its way when its subscription ended has none.
        let Some(handler) = self.shared.subscriptions.lock().handler(message.sid) else { return };
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let subject = text(message.subject);
        let headers = match message.headers.map(Headers::parse) {
            None => Headers::default(),
            Some(Ok(headers)) => headers,
            Some(Err(bad)) => {
                self.shared.error(ErrorKind::BadHeader, format!("{bad} on {subject:?}"));
                Headers::default()
            }
        };
        handler(Message {
            subject,
            reply: message.reply.map(text),
            status: headers.status,
            headers: headers.list,
            payload: message.payload.to_vec(),
        });
    }
}
