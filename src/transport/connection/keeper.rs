//! Connects, greets, keeps the connection alive, and begins again when it ends.

use std::io::{self, Read};
use std::net::TcpStream;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, at, bounded, never, select_biased, tick};
use zeroize::Zeroizing;

use crate::dns;
use crate::pulse::{self, PIECE_MAX};
use crate::shutdown::Never;
use crate::transport::Link;
use crate::transport::address::ServerAddress;
use crate::transport::connection::reader::Reader;
use crate::transport::connection::{COMPONENT, Current, Shared};
use crate::transport::dial::{self, Resolver};
use crate::transport::errors::{Ending, ErrorKind};
use crate::transport::login::{Credentials, NoCredentials};
use crate::transport::outbox::{self, Wire};
use crate::transport::servers::Brokers;
use crate::transport::session::Session;
use crate::transport::srv::{self, Choice, Srv};
use crate::transport::tls;
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
        let options = &self.shared.options;
        // A connection and its greeting have a time of their own.
        let limit = PIECE_MAX + options.connect_timeout + options.handshake_timeout;
        options.pulses.attend("broker-keeper", limit);
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
        pulse::waits();
        select_biased! {
            recv(self.stopped) -> _ => false,
            recv(at(Instant::now() + wait)) -> _ => true,
        }
    }

    /// Tries every broker until one accepts us, and stays with it to its end; true if it was a good while.
    fn round(&mut self) -> bool {
        pulse::works();
        let credentials = match (self.shared.options.credentials)() {
            Ok(credentials) => credentials,
            Err(NoCredentials(text)) => {
                self.shared.error(ErrorKind::Credentials, format!("could not connect: {text}"));
                return false;
            }
        };
        for server in self.servers() {
            pulse::works();
            let begun = Instant::now();
            match self.greet(&server, &credentials) {
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
    fn greet(&self, server: &ServerAddress, credentials: &Credentials) -> Result<Greeted, Ending> {
        let options = &self.shared.options;
        let no_connection = |error: io::Error| Ending::new(ErrorKind::Connect, error.to_string());

        if server.is_tls() && credentials.tls.is_none() {
            return Err(needs_tls());
        }
        let deadline = Instant::now() + options.connect_timeout;
        let addresses =
            self.resolver.resolve(server, deadline, &self.stopped).map_err(no_connection)?;

        let mut last = no_connection(io::ErrorKind::AddrNotAvailable.into());
        for address in addresses {
            pulse::works();
            let deadline = Instant::now() + options.connect_timeout;
            let attempt = dial::connect(address, deadline, &self.shared.slot)
                .map_err(no_connection)
                .and_then(|socket| self.greet_on(socket, server, credentials));
            match attempt {
                Ok(greeted) => return Ok(greeted),
                Err(ending) if self.shared.is_stopped() => return Err(ending),
                Err(ending) => last = ending,
            }
        }
        Err(last)
    }

    /// Exchanges the first lines: its INFO, TLS if there is to be any, our CONNECT and PING, its PONG.
    fn greet_on(
        &self,
        socket: Arc<TcpStream>,
        server: &ServerAddress,
        credentials: &Credentials,
    ) -> Result<Greeted, Ending> {
        let options = &self.shared.options;
        let deadline = Instant::now() + options.handshake_timeout;
        let mut lines = Lines::new(&socket, deadline);
        let mut info = Info::default();
        lines.until(|op, _| match op {
            Op::Info(json) => {
                info = Info::parse(json)?;
                Ok(true)
            }
            Op::Err(text) => Err(Ending::complaint(text)),
            _ => Err(Ending::new(ErrorKind::Protocol, "it did not begin with INFO")),
        })?;
        match &credentials.tls {
            None if info.tls_required => return Err(needs_tls()),
            // Nobody can have changed it more than all that follows.
            None => self.shared.learn(&info, server),
            Some(_) if !(info.tls_required || info.tls_available) => {
                return Err(offers_no_tls());
            }
            Some(tls) => {
                lines.encrypt(tls, server.tls_name())?;
                // Its addresses of other brokers are taken from an INFO that only it can have sent.
                self.shared.learn_limits(&info);
            }
        }

        // It holds password and token.
        let mut hello = Zeroizing::new(Vec::new());
        credentials.connect(&mut hello, &options.name, &info);
        hello.extend_from_slice(wire::PING);
        lines.say(&hello)?;
        lines.until(|op, answer| match op {
            Op::Pong => Ok(true),
            // The second INFO comes before the PONG or after it.
            Op::Info(json) => {
                self.shared.learn(&Info::parse(json)?, server);
                Ok(false)
            }
            Op::Ok => Ok(false),
            Op::Ping => {
                answer.extend_from_slice(wire::PONG);
                Ok(false)
            }
            Op::Err(text) => Err(explained(Ending::complaint(text), credentials, &info)),
            Op::Msg(_) | Op::Skipped { .. } => {
                Err(Ending::new(ErrorKind::Protocol, "it sent a message before anybody asked"))
            }
        })?;

        let Lines { parser, session, .. } = lines;
        socket.set_read_timeout(None).map_err(broken_greeting)?;
        Ok(Greeted { socket, parser, session, server: server.clone() })
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
            pulse::waits();
            select_biased! {
                recv(self.stopped) -> _ => wire.end(ErrorKind::Lost, "closed by us"),
                recv(ended) -> _ => break,
                recv(in_place) -> answered => {
                    in_place = never();
                    if answered.is_ok() {
                        pulse::works();
                        late = never();
                        is_up = true;
                        self.up(&wire, &server, begun);
                    }
                }
                recv(late) -> _ => wire.end(ErrorKind::Handshake, "no answer to our subscriptions"),
                recv(pings) -> _ => {
                    pulse::works();
                    if wire.keepalives_unanswered() >= KEEPALIVES_MAX {
                        wire.end(ErrorKind::Stale, "it does not answer PING");
                    } else {
                        // Whoever it fails for, the reader ends with it.
                        let _ = wire.ping(None);
                    }
                }
                recv(woken) -> _ => {
                    pulse::works();
                    // As above.
                    let _ = wire.flush();
                }
            }
            if wire.ending().is_some() {
                break;
            }
        }
        pulse::works();
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
        (options.on_link)(Link::Up { broker: url, first });
    }
}

/// The lines of a greeting, read until a deadline.
struct Lines<'a> {
    socket: &'a TcpStream,
    parser: Parser,
    session: Session,
    deadline: Instant,
    /// What it would mean if the broker said nothing more.
    if_it_ends: Option<&'static str>,
}

impl<'a> Lines<'a> {
    fn new(socket: &'a TcpStream, deadline: Instant) -> Lines<'a> {
        let (parser, session) = (Parser::default(), Session::Plain);
        Lines { socket, parser, session, deadline, if_it_ends: None }
    }

    /// Reads until `take` has what it wants; what it answers on the way is sent.
    fn until(
        &mut self,
        mut take: impl FnMut(Op<'_>, &mut Vec<u8>) -> Result<bool, Ending>,
    ) -> Result<(), Ending> {
        let mut piece = [0; 4096];
        let mut opened = Ok(());
        loop {
            while let Some(op) = self.parser.next()? {
                self.if_it_ends = None;
                let mut answer = Vec::new();
                let is_enough = take(op, &mut answer)?;
                if !answer.is_empty() {
                    self.say(&answer)?;
                }
                if is_enough {
                    return Ok(());
                }
            }
            opened?;
            let len = read(self.socket, &mut piece, self.deadline)
                .map_err(|broken| self.explained(broken))?;
            let mut answers = Vec::new();
            opened = self.session.open(&piece[..len], &mut answers, &mut self.parser);
            self.send(&answers)?;
        }
    }

    /// Goes on in TLS with a broker that must prove to be `host`.
    fn encrypt(&mut self, tls: &tls::Connector, host: &str) -> Result<(), Ending> {
        // Whoever put something after INFO would have it taken for the broker's word in TLS.
        if !self.parser.is_empty() {
            return Err(Ending::new(ErrorKind::Tls, "it went on after INFO, in the clear"));
        }
        let mut handshake = tls.begin(host)?;
        let mut piece = [0; 4096];
        let mut len = 0;
        loop {
            let mut outbox = Vec::new();
            let progress = handshake.go_on(&piece[..len], &mut outbox);
            // Also if it failed: this tells the broker why.
            let sent = self.send(&outbox);
            if progress? {
                sent?;
                break;
            }
            sent?;
            len = read(self.socket, &mut piece, self.deadline).map_err(during_handshake)?;
        }
        let mut session = handshake.into_session();
        // What came along with the end of the handshake is not on the socket any more.
        let mut answers = Vec::new();
        let opened = session.open(&[], &mut answers, &mut self.parser);
        self.session = Session::Tls(session);
        // In TLS 1.3 a broker looks at our certificate after the handshake has ended for us. When it closes the connection
        // with our next words unread, the system throws its alert away.
        self.if_it_ends = Some(match tls.has_identity() {
            true => "it refuses our certificate, as it seems",
            false => "it demands a certificate, and we have none, as it seems",
        });
        self.send(&answers)?;
        opened
    }

    /// What ended the greeting, in the light of what came before.
    fn explained(&self, Broken(error): Broken) -> Ending {
        match self.if_it_ends {
            Some(why) if error.kind() != io::ErrorKind::TimedOut => {
                let reason = format!("{why}: it closed the connection after the TLS handshake");
                Ending { kind: ErrorKind::Tls, reason }
            }
            _ => broken_greeting(error),
        }
    }

    fn say(&mut self, frame: &[u8]) -> Result<(), Ending> {
        let mut outbox = Zeroizing::new(Vec::new());
        self.session.seal(&mut outbox, |plain| plain.extend_from_slice(frame))?;
        self.send(&outbox)
    }

    fn send(&self, bytes: &[u8]) -> Result<(), Ending> {
        if bytes.is_empty() {
            return Ok(());
        }
        let left = self.deadline.saturating_duration_since(Instant::now());
        outbox::write_all(self.socket, bytes, left, None)
            .map_err(|error| self.explained(Broken(error)))
    }
}

/// The socket's last word.
struct Broken(io::Error);

/// Reads what comes until `deadline`; at least one byte.
fn read(mut socket: &TcpStream, piece: &mut [u8], deadline: Instant) -> Result<usize, Broken> {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(Broken(io::ErrorKind::TimedOut.into()));
        }
        socket.set_read_timeout(Some(left)).map_err(Broken)?;
        match socket.read(piece) {
            Ok(0) => return Err(Broken(io::ErrorKind::UnexpectedEof.into())),
            Ok(len) => return Ok(len),
            Err(error) => match error.kind() {
                // Its time is up, or a signal came: the loop looks.
                io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => {}
                _ => return Err(Broken(error)),
            },
        }
    }
}

/// A refusal says more when it says what was refused.
fn explained(ending: Ending, credentials: &Credentials, info: &Info) -> Ending {
    // A time-out or an account that has expired is no refusal of what was shown.
    if ending.reason.eq_ignore_ascii_case("authorization violation") {
        return Ending { reason: credentials.refusal(&ending.reason, info), ..ending };
    }
    ending
}

fn broken_greeting(error: io::Error) -> Ending {
    let reason = match error.kind() {
        io::ErrorKind::TimedOut => "it did not greet us in time".to_owned(),
        io::ErrorKind::UnexpectedEof => "it closed the connection during the greeting".to_owned(),
        _ => format!("the greeting failed: {error}"),
    };
    Ending { kind: ErrorKind::Handshake, reason }
}

fn during_handshake(Broken(error): Broken) -> Ending {
    let reason = match error.kind() {
        io::ErrorKind::TimedOut => "it takes too long over the TLS handshake".to_owned(),
        io::ErrorKind::UnexpectedEof => {
            "it closed the connection during the TLS handshake".to_owned()
        }
        _ => format!("the TLS handshake failed: {error}"),
    };
    Ending { kind: ErrorKind::Tls, reason }
}

fn needs_tls() -> Ending {
    Ending::new(ErrorKind::Tls, "it demands TLS, which choria_insecure turns off")
}

fn offers_no_tls() -> Ending {
    let remedy = "set TLS up there, or turn it off here with choria_insecure, whereupon all is said in the clear and nothing is signed";
    Ending::new(ErrorKind::Tls, format!("it does not offer TLS: {remedy}"))
}

fn unexplained() -> Ending {
    Ending::new(ErrorKind::Lost, "the connection ended")
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn a_broker_that_reads_nothing_of_our_greeting_is_given_up_in_time() {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (_peer, _) = listener.accept().unwrap();
        // Should the deadline not count, this ends the test.
        socket.set_write_timeout(Some(Duration::from_secs(20))).unwrap();
        let mut lines = Lines::new(&socket, Instant::now() + Duration::from_millis(100));
        // More than the system holds for us.
        let ending = lines.say(&vec![b'x'; 64 << 20]).unwrap_err();
        assert_eq!(ending, Ending::new(ErrorKind::Handshake, "it did not greet us in time"));
    }
}
