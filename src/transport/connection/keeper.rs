//! Connects, greets, keeps the connection alive, and begins again when it ends.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, at, bounded, never, select_biased, tick};

use crate::dns;
use crate::shutdown::Never;
use crate::transport::Link;
use crate::transport::connection::reader::Reader;
use crate::transport::connection::{COMPONENT, Current, Shared};
use crate::transport::dial::{self, Resolver};
use crate::transport::errors::{Ending, ErrorKind};
use crate::transport::outbox::Wire;
use crate::transport::servers::{Brokers, ServerAddress};
use crate::transport::session::Session;
use crate::transport::srv::{self, Choice, Srv};
use crate::transport::wire::{self, Info, Op, Parser};

/// A connection that lived shorter was no success: the wait before the next one goes on growing.
const STABLE_AFTER: Duration = Duration::from_secs(10);
/// PINGs without an answer after which a connection is dead.
const KEEPALIVES_MAX: usize = 2;

/// Connects, keeps the connection alive, and connects again.
pub(super) struct Keeper {
    shared: Arc<Shared>,
    /// Disconnects when we must stop.
    stopped: Receiver<Never>,
    resolver: Resolver,
    random: fastrand::Rng,
    connected_before: bool,
    /// When DNS last named the brokers.
    looked_up: Option<Instant>,
}

/// A broker that has accepted us.
struct Greeted {
    socket: Arc<TcpStream>,
    parser: Parser,
    session: Session,
    server: ServerAddress,
}

impl Keeper {
    pub(super) fn new(
        shared: Arc<Shared>,
        stopped: Receiver<Never>,
        random: fastrand::Rng,
    ) -> Keeper {
        Keeper {
            shared,
            stopped,
            resolver: Resolver::default(),
            random,
            connected_before: false,
            looked_up: None,
        }
    }

    pub(super) fn start(self) -> io::Result<JoinHandle<()>> {
        thread::Builder::new().name("broker-keeper".to_owned()).spawn(move || self.run())
    }

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
        for server in self.servers() {
            let begun = Instant::now();
            match self.greet(&server) {
                Ok(greeted) => {
                    self.keep(greeted, begun);
                    self.shared.slot.release();
                    self.shared.pool.lock().try_last(&server);
                    return begun.elapsed() >= STABLE_AFTER;
                }
                Err(_) if self.shared.is_stopped() => return false,
                Err(Ending { kind, reason }) => {
                    self.shared.slot.release();
                    self.shared.error(kind, format!("could not connect to {server}: {reason}"));
                }
            }
        }
        false
    }

    /// The brokers to try, in order.
    fn servers(&mut self) -> Vec<ServerAddress> {
        let shared = Arc::clone(&self.shared);
        if let Brokers::Srv(srv) = &shared.options.brokers
            && self.looked_up.is_none_or(|at| at.elapsed() >= shared.options.srv_fresh)
        {
            self.look_up(srv);
        }
        shared.pool.lock().round()
    }

    /// Asks DNS for the brokers; those known before stay when it knows none.
    fn look_up(&mut self, srv: &Srv) {
        let shared = Arc::clone(&self.shared);
        let failed = |reason: String| {
            let text = format!("no brokers found in DNS for {}: {reason}", srv.domain);
            shared.error(ErrorKind::Connect, text);
        };
        let question = srv.clone();
        let deadline = Instant::now() + srv::LOOKUP_MAX;
        let found = self.resolver.in_time(move || question.look_up(), deadline, &self.stopped);
        let mut choices = Vec::new();
        match found {
            Err(_) if shared.is_stopped() => return,
            Err(error) => failed(error.to_string()),
            Ok(Err(dns::Error::Io(error))) => failed(error.to_string()),
            Ok(Err(error)) => failed(error.to_string()),
            Ok(Ok(services)) => {
                let bad;
                (choices, bad) = srv::in_order(services, &mut self.random);
                for error in bad {
                    log::warn!(component = COMPONENT; "Broker in DNS left out: {error}");
                }
                if choices.is_empty() {
                    failed("there are no SRV records".to_owned());
                } else {
                    self.looked_up = Some(Instant::now());
                }
            }
        }
        let mut pool = shared.pool.lock();
        if choices.is_empty() {
            if !pool.is_empty() {
                return;
            }
            choices.push(Choice { priority: 0, server: ServerAddress::customary() });
        }
        let names: Vec<String> = choices.iter().map(|choice| choice.server.to_string()).collect();
        if pool.configure(choices) {
            log::info!(component = COMPONENT; "Brokers of {}: {}", srv.domain, names.join(", "));
        }
    }

    /// Connects to the first address of `server` that accepts us.
    fn greet(&self, server: &ServerAddress) -> Result<Greeted, Ending> {
        let options = &self.shared.options;
        let no_connection = |error: io::Error| Ending::new(ErrorKind::Connect, error.to_string());

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
                Err(ending) if self.shared.is_stopped() => return Err(ending),
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
            Op::Err(text) => Err(Ending::complaint(text)),
            _ => Err(Ending::new(ErrorKind::Protocol, "it did not begin with INFO")),
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
        say(&socket, &hello)?;
        lines.until(|op| match op {
            Op::Pong => Ok(true),
            // The second INFO comes before the PONG or after it.
            Op::Info(json) => {
                self.shared.learn(&Info::parse(json)?, server);
                Ok(false)
            }
            Op::Ok => Ok(false),
            Op::Ping => say(&socket, wire::PONG).map(|()| false),
            Op::Err(text) => Err(Ending::complaint(text)),
            Op::Msg(_) | Op::Skipped { .. } => {
                Err(Ending::new(ErrorKind::Protocol, "it sent a message before anybody asked"))
            }
        })?;

        let parser = lines.parser;
        socket.set_read_timeout(None).map_err(broken_greeting)?;
        Ok(Greeted { socket, parser, session: Session::Plain, server: server.clone() })
    }

    /// Stays with one connection to its end.
    fn keep(&mut self, greeted: Greeted, begun: Instant) {
        let Greeted { socket, parser, session, server } = greeted;
        let shared = Arc::clone(&self.shared);
        let options = &shared.options;
        let (wake, woken) = bounded(1);
        let wire = Arc::new(Wire::new(socket, session, wake, options.write_timeout));
        let (end, ended) = bounded(0);
        let reader =
            Reader::new(Arc::clone(&shared), Arc::clone(&wire), server.clone(), parser, end);
        let reader = match reader.start() {
            Ok(reader) => reader,
            Err(error) => {
                let text = format!("{server}: could not start the reader: {error}");
                return shared.error(ErrorKind::Other, text);
            }
        };

        // The broker takes lines in order: when it answers this PING, it has the SUBs before it.
        let (answer, mut in_place) = bounded(1);
        let attached = shared.subscriptions.lock().attach(Arc::clone(&wire));
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
                recv(pings) -> _ => {
                    if wire.keepalives_unanswered() >= KEEPALIVES_MAX {
                        wire.end(ErrorKind::Stale, "it does not answer PING");
                    } else {
                        // Whoever it fails for, the reader ends with it.
                        let _ = wire.ping(None);
                    }
                }
                recv(woken) -> _ => {
                    // As above.
                    let _ = wire.flush();
                }
            }
            if wire.ending().is_some() {
                break;
            }
        }
        let Ending { kind, reason } = wire.ending().unwrap_or_else(unexplained);
        if is_up {
            *shared.current.write() = None;
            options.metrics.broker_connected.set(0);
        }
        shared.subscriptions.lock().wire = None;
        if reader.join().is_err() {
            log::error!(component = COMPONENT; "The reader has panicked");
        }
        let reason = if shared.is_stopped() {
            "closed by us".to_owned()
        } else {
            shared.error(kind, format!("{server}: {reason}"));
            reason
        };
        if is_up {
            (options.on_link)(Link::Down { reason });
        }
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
                Err(error) => match error.kind() {
                    // Its time is up, or a signal came: the loop looks.
                    io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => {}
                    _ => return Err(broken_greeting(error)),
                },
            }
        }
    }
}

fn say(mut socket: &TcpStream, bytes: &[u8]) -> Result<(), Ending> {
    socket.write_all(bytes).map_err(broken_greeting)
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
    Ending::new(ErrorKind::Tls, "it demands TLS")
}

fn unexplained() -> Ending {
    Ending::new(ErrorKind::Lost, "the connection ended")
}
