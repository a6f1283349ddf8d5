//! `/metrics`, `/livez`, `/readyz`, `/status.json` and the status page `/` on the monitor port, behind a front door with
//! bounds.
//!
//! Anyone can reach this port, so nothing may depend on the good will of a client. One thread serves all connections
//! without ever blocking on one: a complete head within five seconds and 8 KiB, GET and HEAD only, the
//! answer taken within ten seconds, then the connection is closed. At most 32 are open, and their answers have a bound in
//! bytes, too. Whoever comes when all places are taken gets one at once, from the address that holds the most: a request
//! that is meant to be served comes with its connection and needs no place for longer than a moment, so no number of idle
//! and slow clients keeps a scrape out. The thread never takes more than a fifth of one processor, whatever is asked of
//! it; what comes meanwhile waits in the kernel.
//!
//! `tiny_http` reads requests and writes responses here, over memory. Its own listener is not used: it has no bounds,
//! and ends the process when file descriptors run out.

use std::cmp::Reverse;
use std::fmt;
use std::fs::File;
use std::io::{self, Read, Write};
use std::iter;
use std::net::{IpAddr, Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::str::FromStr;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::sockopt;
use rustix::time::{ClockId, clock_gettime};
use serde::Serialize;
use tiny_http::{HTTPVersion, Header, Method, Response, StatusCode};

use crate::metrics::{self, Metrics};
use crate::ops::page;
use crate::ops::status::{Nodes, Readiness, Show, Status};
use crate::ops::stop::{Stop, Stoppable};

/// The monitor port, bound and not served yet.
#[derive(Debug)]
pub struct Monitor {
    listener: TcpListener,
    stop: Stop,
    address: SocketAddr,
}

impl Monitor {
    /// Binds `port` of `address`; port 0 takes a free one.
    ///
    /// On a machine without IPv6 the unspecified IPv6 address means all of IPv4.
    ///
    /// # Errors
    ///
    /// [`BindError`], which names address and port.
    pub fn bind(address: IpAddr, port: u16) -> Result<Monitor, BindError> {
        let wanted = SocketAddr::new(address, port);
        let bind = || {
            let listener = match TcpListener::bind(wanted) {
                Err(error) if address.is_unspecified() && is_without_ipv6(&error) => {
                    TcpListener::bind((Ipv4Addr::UNSPECIFIED, port))
                }
                bound => bound,
            }?;
            listener.set_nonblocking(true)?;
            // Its connections inherit these, so they hold before the first one is there.
            sockopt::set_socket_recv_buffer_size(&listener, RECEIVE_BUFFER)?;
            sockopt::set_socket_send_buffer_size(&listener, SEND_BUFFER)?;
            // A second time, since the standard library has no word on how many may wait.
            rustix::net::listen(&listener, BACKLOG)?;
            let stop = Stop::new()?;
            let address = listener.local_addr()?;
            Ok(Monitor { listener, stop, address })
        };
        bind().map_err(|source| BindError { address: wanted, source })
    }

    /// The address in use.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Serves requests on a thread of its own until [`Running::stop`].
    ///
    /// # Errors
    ///
    /// Only if the thread can't be started.
    pub fn serve(self, metrics: Arc<Metrics>, shown: Arc<dyn Show>) -> io::Result<Running> {
        self.serve_within(PATIENCE, metrics, shown)
    }

    fn serve_within(
        self,
        patience: Patience,
        metrics: Arc<Metrics>,
        shown: Arc<dyn Show>,
    ) -> io::Result<Running> {
        let door = Door {
            listener: self.listener,
            stop: self.stop.clone(),
            spare: spare(),
            closed_until: None,
            guests: Vec::new(),
            admitted: 0,
            patience,
            pages: Pages { metrics, shown },
        };
        let builder = thread::Builder::new().name("monitor".to_owned()).stack_size(STACK);
        let thread = self.stop.spawn(builder, move || door.run())?;
        Ok(Running { _thread: thread, address: self.address })
    }
}

/// Why the monitor port can't be used.
#[derive(Debug)]
pub struct BindError {
    address: SocketAddr,
    source: io::Error,
}

impl BindError {
    /// Whether somebody else listens there.
    pub fn is_in_use(&self) -> bool {
        self.source.kind() == io::ErrorKind::AddrInUse
    }

    /// Whether the address is none of this machine's.
    pub fn is_elsewhere(&self) -> bool {
        self.source.kind() == io::ErrorKind::AddrNotAvailable
    }

    /// Whether we may not listen there.
    pub fn is_denied(&self) -> bool {
        self.source.kind() == io::ErrorKind::PermissionDenied
    }
}

impl fmt::Display for BindError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cannot listen on monitor port {}", self.address)
    }
}

impl std::error::Error for BindError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.source)
    }
}

fn is_without_ipv6(error: &io::Error) -> bool {
    is_any(error, &[Errno::AFNOSUPPORT, Errno::ADDRNOTAVAIL])
}

fn is_any(error: &io::Error, kinds: &[Errno]) -> bool {
    error.raw_os_error().is_some_and(|code| kinds.contains(&Errno::from_raw_os_error(code)))
}

/// The monitor port being served; it is stopped when this is dropped.
#[derive(Debug)]
pub struct Running {
    _thread: Stoppable,
    address: SocketAddr,
}

impl Running {
    /// The address in use.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Closes all connections and ends the thread.
    pub fn stop(self) {
        // `drop` does it.
    }
}

/// The thread: waits for all sockets at once and does what each of them allows.
struct Door {
    listener: TcpListener,
    stop: Stop,
    /// A file descriptor to give up when there are no others, so that a connection can be accepted and closed:
    /// otherwise it would wait in the kernel, and wake us without end.
    spare: Option<File>,
    /// No connection is accepted before.
    closed_until: Option<Instant>,
    guests: Vec<Guest>,
    /// How many there have been.
    admitted: u64,
    patience: Patience,
    pages: Pages,
}

impl Door {
    fn run(mut self) {
        loop {
            let woken = self.wait();
            if woken.stop {
                return;
            }
            let begun = worked();
            let now = Instant::now();
            for place in 0..self.guests.len() {
                if woken.guests.get(place).is_some_and(|is_woken| *is_woken) {
                    self.step(place, now);
                }
            }
            self.guests.retain_mut(|guest| guest.is_within_time(now, &self.pages));
            if woken.listener {
                self.accept(now);
                // Those that had to make room are closed now: nothing may wake us for them.
                self.guests.retain(|guest| !matches!(guest.state, State::Gone));
            }
            if self.rest(worked().saturating_sub(begun)) {
                return;
            }
        }
    }

    fn wait(&self) -> Woken {
        let now = Instant::now();
        let opens = self.closed_until.filter(|&until| until > now);
        let mut fds = Vec::with_capacity(2 + self.guests.len());
        fds.push(PollFd::new(&self.stop, PollFlags::IN));
        let listens = if opens.is_none() { PollFlags::IN } else { PollFlags::empty() };
        fds.push(PollFd::new(&self.listener, listens));
        fds.extend(self.guests.iter().map(|guest| PollFd::new(&guest.stream, guest.interest())));
        let next = self.guests.iter().map(|guest| guest.deadline).chain(opens).min();
        let time = next
            .map(|at| at.saturating_duration_since(now))
            // A time that does not fit is longer than any of ours.
            .and_then(|time| Timespec::try_from(time).ok());
        if poll(&mut fds, time.as_ref()).is_err() {
            // An interruption: nothing is known of any socket, so the deadlines are looked at and all is asked again.
            return Woken { stop: false, listener: false, guests: Vec::new() };
        }
        let is_woken = |fd: &PollFd<'_>| !fd.revents().is_empty();
        Woken {
            stop: is_woken(&fds[0]),
            listener: is_woken(&fds[1]),
            guests: fds[2..].iter().map(is_woken).collect(),
        }
    }

    /// Does nothing for as long as makes `work` our share of a processor; true when it is time to end.
    fn rest(&self, work: Duration) -> bool {
        let time = Timespec::try_from(work * (PROCESSOR_SHARE - 1)).ok();
        let mut fds = [PollFd::new(&self.stop, PollFlags::IN)];
        // Interrupted, it was a short rest.
        poll(&mut fds, time.as_ref()).is_ok() && !fds[0].revents().is_empty()
    }

    /// Does for one guest what its socket allows without blocking.
    fn step(&mut self, place: usize, now: Instant) {
        if let Some(answer) = self.guests[place].hear(&self.pages) {
            let answer = self.fitted(answer);
            self.guests[place].answer(answer, now, self.patience);
        }
        self.guests[place].talk(now, self.patience);
    }

    /// Makes room for `answer` where all answers that wait are too many bytes: the largest ones go. In the place of one
    /// that is too large by itself comes a refusal.
    fn fitted(&mut self, answer: Answer) -> Vec<u8> {
        if answer.bytes.len() > ANSWERS_BYTES_MAX {
            self.pages.refuse(Refusal::Memory);
            return Refusal::Memory.response(answer.head_only);
        }
        let held = |guests: &[Guest]| guests.iter().map(Guest::held).sum::<usize>();
        while held(&self.guests) > ANSWERS_BYTES_MAX - answer.bytes.len() {
            let largest = self.guests.iter_mut().max_by_key(|guest| guest.held());
            // Those that hold too much are at least one.
            let Some(largest) = largest else { break };
            largest.refuse(Refusal::Memory, &self.pages);
        }
        answer.bytes
    }

    /// Lets in those who wait at the door, a bounded number of them before the guests are looked after again.
    fn accept(&mut self, now: Instant) {
        for _ in 0..ACCEPTS_MAX {
            let accepted = match self.listener.accept() {
                Ok((stream, peer)) => {
                    self.admit(stream, peer.ip(), now);
                    Ok(())
                }
                Err(error) if is_any(&error, &[Errno::MFILE, Errno::NFILE]) => {
                    self.turn_away_on_spare()
                }
                Err(error) => Err(error),
            };
            match accepted {
                Ok(()) => {}
                Err(error) if is_any(&error, &[Errno::AGAIN]) => return,
                // The client is gone already, or a signal came in between.
                Err(error) if is_any(&error, &[Errno::CONNABORTED, Errno::INTR, Errno::PROTO]) => {}
                Err(error) => {
                    log::warn!(component = "monitor"; "Cannot accept connections to the monitor port: {error}");
                    // The reason is still there at once, and would wake us without end.
                    self.closed_until = Some(now + CLOSED_TIME);
                    return;
                }
            }
        }
    }

    fn admit(&mut self, stream: TcpStream, peer: IpAddr, now: Instant) {
        if let Err(error) = stream.set_nonblocking(true) {
            log::debug!(component = "monitor"; "Cannot use a connection: {error}");
            return;
        }
        let state = State::Reading(Vec::new());
        let deadline = now + self.patience.head;
        self.admitted += 1;
        let guest =
            Guest { stream, network: network(peer), state, deadline, number: self.admitted };
        let place = if self.guests.len() < CONNECTIONS_MAX {
            self.guests.push(guest);
            self.guests.len() - 1
        } else {
            let place = self.make_room(now);
            self.guests[place] = guest;
            place
        };
        // Its request is usually there already.
        self.step(place, now);
    }

    /// Ends the connection that can be done without best, and says which place it had: one that has been answered, else one
    /// from where most come, and of these the oldest.
    fn make_room(&mut self, now: Instant) -> usize {
        let dispensable = |guest: &Guest| {
            let crowd = self.guests.iter().filter(|other| other.network == guest.network).count();
            (guest.is_answered(), crowd, Reverse(guest.number))
        };
        let ranked = self.guests.iter().enumerate();
        let place = ranked.max_by_key(|(_, guest)| dispensable(guest)).map_or(0, |(at, _)| at);
        // Its request may have come since it was looked at.
        self.step(place, now);
        self.guests[place].crowded_out(&self.pages);
        place
    }

    /// Accepts one connection on the spare descriptor and turns it away.
    fn turn_away_on_spare(&mut self) -> io::Result<()> {
        drop(self.spare.take());
        // Without a descriptor Linux doesn't even look whether somebody waits: it may be nobody.
        let accepted = self.listener.accept();
        if accepted.is_ok() {
            self.pages.refuse(Refusal::Descriptors);
        }
        let result = accepted.map(drop);
        self.spare = spare();
        result
    }
}

/// Processor time that this thread has used.
fn worked() -> Duration {
    // A clock that runs forward from zero has no other values.
    Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).unwrap_or_default()
}

/// What counts as one place that clients come from: whoever has an IPv6 address has as many as it likes.
fn network(peer: IpAddr) -> IpAddr {
    match peer.to_canonical() {
        IpAddr::V6(address) => {
            let network = u128::from(address) & (u128::MAX << 64);
            IpAddr::V6(network.into())
        }
        address @ IpAddr::V4(_) => address,
    }
}

/// What a wait found out.
struct Woken {
    stop: bool,
    listener: bool,
    guests: Vec<bool>,
}

fn spare() -> Option<File> {
    File::open("/dev/null").ok()
}

/// One connection.
struct Guest {
    stream: TcpStream,
    /// Where it comes from.
    network: IpAddr,
    state: State,
    deadline: Instant,
    /// Counts up from guest to guest.
    number: u64,
}

enum State {
    /// Collects the head of the request.
    Reading(Vec<u8>),
    /// Sends the answer.
    Writing { answer: Vec<u8>, written: usize },
    /// Answered; reads and forgets until the client closes, since closing on unread data would take the answer back.
    Leaving { left: usize },
    /// To be closed.
    Gone,
}

/// What a request is answered with, whole.
struct Answer {
    bytes: Vec<u8>,
    /// Whether the request was for the head alone.
    head_only: bool,
}

impl Guest {
    fn interest(&self) -> PollFlags {
        match self.state {
            State::Writing { .. } => PollFlags::OUT,
            State::Reading(_) | State::Leaving { .. } | State::Gone => PollFlags::IN,
        }
    }

    /// Bytes of its answer.
    fn held(&self) -> usize {
        match &self.state {
            State::Writing { answer, .. } => answer.len(),
            State::Reading(_) | State::Leaving { .. } | State::Gone => 0,
        }
    }

    /// Whether the kernel has all of the answer.
    fn is_answered(&self) -> bool {
        matches!(self.state, State::Leaving { .. } | State::Gone)
    }

    /// Reads what the client has sent; the answer, when that is a request or can't become one.
    fn hear(&mut self, pages: &Pages) -> Option<Answer> {
        let State::Reading(head) = &mut self.state else { return None };
        match read_head(&mut self.stream, head) {
            Progress::Blocked => None,
            Progress::Lost => {
                self.state = State::Gone;
                None
            }
            // What it asked can be read when it is gone already, and answers are most of the work.
            Progress::Done(_) if !matches!(self.stream.take_error(), Ok(None)) => {
                self.state = State::Gone;
                None
            }
            Progress::Done(request) => Some(pages.answer(&request)),
            Progress::Refused(refusal, head_only) => {
                pages.refuse(refusal);
                Some(Answer { bytes: refusal.response(head_only), head_only })
            }
        }
    }

    fn answer(&mut self, answer: Vec<u8>, now: Instant, patience: Patience) {
        self.state = State::Writing { answer, written: 0 };
        self.deadline = now + patience.answer;
    }

    /// Writes what the client takes, and lets it leave.
    fn talk(&mut self, now: Instant, patience: Patience) {
        if let State::Writing { answer, written } = &mut self.state {
            match write_some(&mut self.stream, answer, written) {
                Progress::Done(()) => {
                    self.state = match self.stream.shutdown(Shutdown::Write) {
                        Ok(()) => State::Leaving { left: LEAVING_MAX },
                        Err(_) => State::Gone,
                    };
                    self.deadline = now + patience.leaving;
                }
                Progress::Blocked => {}
                Progress::Lost | Progress::Refused(..) => self.state = State::Gone,
            }
        }
        if let State::Leaving { left } = &mut self.state {
            if !forget_some(&mut self.stream, left) {
                self.state = State::Gone;
            }
        }
    }

    /// Whether the connection stays open; counts those that took too long.
    fn is_within_time(&mut self, now: Instant, pages: &Pages) -> bool {
        if matches!(self.state, State::Gone) {
            return false;
        }
        let is_within = now < self.deadline;
        if !is_within {
            match self.state {
                State::Reading(_) => self.refuse(Refusal::Slow, pages),
                State::Writing { .. } => self.refuse(Refusal::Unread, pages),
                State::Leaving { .. } | State::Gone => {}
            }
        }
        is_within
    }

    /// Makes room for another.
    fn crowded_out(&mut self, pages: &Pages) {
        if !self.is_answered() {
            self.refuse(Refusal::Connections, pages);
        }
    }

    /// Counts a connection that is closed on its client, and tells it if it can be told.
    fn refuse(&mut self, refusal: Refusal, pages: &Pages) {
        pages.refuse(refusal);
        match &self.state {
            State::Reading(head) if !head.is_empty() => {
                // Whatever the socket takes at once; a client that is too slow is owed no more.
                let _ = self.stream.write(&refusal.response(false));
                let _ = self.stream.shutdown(Shutdown::Write);
            }
            State::Writing { .. } => {
                // What the kernel holds of the answer is worth nothing without the rest, and would stay there for
                // minutes. Where that can't be set it does.
                let _ = sockopt::set_socket_linger(&self.stream, Some(Duration::ZERO));
            }
            State::Reading(_) | State::Leaving { .. } | State::Gone => {}
        }
        self.state = State::Gone;
    }
}

/// How far a step came.
enum Progress<T> {
    /// The socket has no more to give, or takes no more, for now.
    Blocked,
    Done(T),
    Refused(Refusal, bool),
    /// The client is gone.
    Lost,
}

fn read_head(stream: &mut TcpStream, head: &mut Vec<u8>) -> Progress<Request> {
    let mut chunk = [0; CHUNK];
    loop {
        let length = match stream.read(&mut chunk) {
            Ok(0) => return Progress::Lost,
            Ok(length) => length,
            Err(error) => return after(&error),
        };
        // Its last bytes may be the beginning of what ends the head.
        let searched = head.len().saturating_sub(3);
        head.extend_from_slice(&chunk[..length]);
        // What no method begins with, such as TLS, is not worth waiting for.
        if !head[0].is_ascii_uppercase() {
            return Progress::Refused(Refusal::Malformed, false);
        }
        if let Some(end) = end_of_head(head, searched) {
            return match Request::parse(&head[..end]) {
                _ if end > HEAD_MAX => Progress::Refused(Refusal::Head, false),
                Ok(request) => Progress::Done(request),
                Err(refusal) => Progress::Refused(refusal, head.starts_with(b"HEAD ")),
            };
        }
        if head.len() > HEAD_MAX {
            return Progress::Refused(Refusal::Head, false);
        }
    }
}

fn write_some(stream: &mut TcpStream, answer: &[u8], written: &mut usize) -> Progress<()> {
    while *written < answer.len() {
        match stream.write(&answer[*written..]) {
            Ok(0) => return Progress::Lost,
            Ok(length) => *written += length,
            Err(error) => return after(&error),
        }
    }
    Progress::Done(())
}

/// Reads and drops what the client still sends; false when the connection can be closed.
fn forget_some(stream: &mut TcpStream, left: &mut usize) -> bool {
    let mut chunk = [0; CHUNK];
    while *left > 0 {
        match stream.read(&mut chunk) {
            Ok(0) => return false,
            Ok(length) => *left = left.saturating_sub(length),
            Err(error) => return matches!(after::<()>(&error), Progress::Blocked),
        }
    }
    false
}

fn after<T>(error: &io::Error) -> Progress<T> {
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Progress::Blocked,
        _ => Progress::Lost,
    }
}

/// Where the head ends, looked for from `from` on: an empty line. Bare line feeds are taken as line ends, too.
fn end_of_head(bytes: &[u8], from: usize) -> Option<usize> {
    (from..bytes.len()).find_map(|at| match &bytes[at..] {
        [b'\n', b'\n', ..] => Some(at + 2),
        [b'\n', b'\r', b'\n', ..] => Some(at + 3),
        _ => None,
    })
}

/// A request we answer.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Request {
    method: Method,
    path: String,
    /// What stands behind the question mark.
    query: String,
}

impl Request {
    /// Reads a complete head.
    fn parse(head: &[u8]) -> Result<Request, Refusal> {
        let head = std::str::from_utf8(head).map_err(|_| Refusal::Malformed)?;
        let mut lines = head.lines();
        let mut words = lines.next().unwrap_or_default().split(' ');
        let (Some(method), Some(target), Some(version), None) =
            (words.next(), words.next(), words.next(), words.next())
        else {
            return Err(Refusal::Malformed);
        };
        for line in lines.take_while(|line| !line.is_empty()) {
            Header::from_str(line).map_err(|()| Refusal::Malformed)?;
        }
        if !matches!(version, "HTTP/1.0" | "HTTP/1.1") || !target.starts_with('/') {
            return Err(Refusal::Malformed);
        }
        let method = match Method::from_str(method) {
            Ok(method @ (Method::Get | Method::Head)) => method,
            _ => return Err(Refusal::Method),
        };
        let (path, query) = target.split_once('?').unwrap_or((target, ""));
        Ok(Request { method, path: path.to_owned(), query: query.to_owned() })
    }
}

/// Why a connection or request was turned away.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Refusal {
    Connections,
    Descriptors,
    Slow,
    Head,
    Malformed,
    Method,
    Unread,
    Memory,
}

impl Refusal {
    /// The label `reason` of the metric.
    fn label(self) -> &'static str {
        match self {
            Refusal::Connections => "connections",
            Refusal::Descriptors => "descriptors",
            Refusal::Slow => "slow",
            Refusal::Head => "head",
            Refusal::Malformed => "malformed",
            Refusal::Method => "method",
            Refusal::Unread => "unread",
            Refusal::Memory => "memory",
        }
    }

    /// What the client is told, if it can be told anything.
    fn response(self, head_only: bool) -> Vec<u8> {
        let (status, text) = match self {
            Refusal::Connections | Refusal::Descriptors => (503, "too many connections\n"),
            Refusal::Slow | Refusal::Unread => (408, "too slow\n"),
            Refusal::Head => (431, "request head too large\n"),
            Refusal::Malformed => (400, "bad request\n"),
            Refusal::Method => (405, "method not allowed\n"),
            Refusal::Memory => (503, "too many answers wait to be read\n"),
        };
        response(status, PLAIN, &[], text, head_only)
    }
}

/// What is served.
struct Pages {
    metrics: Arc<Metrics>,
    shown: Arc<dyn Show>,
}

impl Pages {
    fn answer(&self, request: &Request) -> Answer {
        let head_only = request.method == Method::Head;
        let bytes = match request.path.as_str() {
            "/metrics" => {
                response(200, metrics::CONTENT_TYPE, &[], &self.metrics.render(), head_only)
            }
            "/livez" => {
                let stuck = self.shown.stuck();
                let (status, word) = if stuck.is_empty() { (200, "alive") } else { (503, "stuck") };
                let lines = iter::once(word).chain(stuck.iter().map(String::as_str));
                let text: String = lines.map(|line| format!("{line}\n")).collect();
                response(status, PLAIN, &[], &text, head_only)
            }
            "/" => match page::query(&request.query) {
                Err(wrong) => response(400, PLAIN, &[], &format!("{wrong}\n"), head_only),
                Ok(query) => {
                    let nodes = self.shown.nodes(&page::shown(&query));
                    let page = page::render(&self.shown.status(), &nodes, &query);
                    let headers =
                        [("Content-Security-Policy", page::policy()), FRESH, AS_TYPED, SILENT];
                    response(200, "text/html; charset=utf-8", &headers, &page, head_only)
                }
            },
            "/status.json" => match page::query(&request.query) {
                Err(wrong) => response(400, PLAIN, &[], &format!("{wrong}\n"), head_only),
                Ok(query) => {
                    let nodes = self.shown.nodes(&query);
                    let document = Document { status: self.shown.status(), nodes };
                    let mut text = serde_json::to_string(&document).unwrap_or_default();
                    text.push('\n');
                    response(200, "application/json", &[FRESH, AS_TYPED], &text, head_only)
                }
            },
            "/readyz" => {
                let Readiness { ready, reasons } = self.shown.readiness();
                let mut text = String::from(if ready { "ready\n" } else { "not ready\n" });
                for reason in reasons {
                    text.push_str(&reason);
                    text.push('\n');
                }
                response(if ready { 200 } else { 503 }, PLAIN, &[], &text, head_only)
            }
            _ => response(404, PLAIN, &[], "404 page not found\n", head_only),
        };
        Answer { bytes, head_only }
    }

    fn refuse(&self, refusal: Refusal) {
        self.metrics.monitor_refused.with_label_values(&[refusal.label()]).inc();
    }
}

/// What `/status.json` holds.
#[derive(Serialize)]
struct Document {
    #[serde(flatten)]
    status: Status,
    nodes: Nodes,
}

/// A whole response, after which the connection is closed.
fn response(
    status: u16,
    content_type: &str,
    more: &[(&str, &str)],
    body: &str,
    head_only: bool,
) -> Vec<u8> {
    let headers =
        [("Content-Type", content_type), ("Server", "choria-provisioner"), ("Allow", "GET, HEAD")];
    let headers = headers
        .into_iter()
        .chain(more.iter().copied())
        .filter(|&(name, _)| name != "Allow" || status == 405)
        .filter_map(|(name, value)| Header::from_bytes(name, value).ok())
        .collect();
    let mut bytes = Vec::with_capacity(body.len() + 256);
    let response =
        Response::new(StatusCode(status), headers, body.as_bytes(), Some(body.len()), None)
            .with_chunked_threshold(usize::MAX);
    if let Err(error) = response.raw_print(&mut bytes, HTTPVersion(1, 1), &[], head_only, None) {
        // Writing to memory can't fail; an empty answer is at least closed.
        log::error!(component = "monitor"; "Cannot write a response: {error}");
        return Vec::new();
    }
    // The crate keeps this header for itself, and would only write it for a connection of its own.
    if let Some(end) = bytes.iter().position(|&b| b == b'\n') {
        bytes.splice(end + 1..end + 1, *b"Connection: close\r\n");
    }
    bytes
}

const PLAIN: &str = "text/plain; charset=utf-8";

/// Headers of what is true for a moment, is what it says it is, and tells others nothing of its address.
const FRESH: (&str, &str) = ("Cache-Control", "no-store");
const AS_TYPED: (&str, &str) = ("X-Content-Type-Options", "nosniff");
const SILENT: (&str, &str) = ("Referrer-Policy", "no-referrer");

/// Connections open at a time: Prometheus, its understudy, probes, and a few people with curl.
const CONNECTIONS_MAX: usize = 32;

/// Connections that wait in the kernel: whoever finds no place there either is heard again only after a second.
const BACKLOG: i32 = 4_096;

/// The thread works for one part in so many of the time, at most.
const PROCESSOR_SHARE: u32 = 5;

/// Bytes of a connection that the kernel takes before we read them, about: a whole head.
const RECEIVE_BUFFER: usize = HEAD_MAX;

/// Bytes of an answer that the kernel takes before the client does, about: what nobody takes then waits with us, where it is
/// counted.
const SEND_BUFFER: usize = 128 * 1024;

/// Bytes of all answers that wait to be taken. One with 10,000 nodes has four million.
const ANSWERS_BYTES_MAX: usize = 64 << 20;

/// Connections accepted before the others get their turn.
const ACCEPTS_MAX: usize = 64;

/// Longest head of a request, in bytes.
const HEAD_MAX: usize = 8 * 1024;

/// Bytes a client may still send after its answer.
const LEAVING_MAX: usize = 64 * 1024;

/// How long no connection is accepted after the system could not give us one.
const CLOSED_TIME: Duration = Duration::from_millis(250);

/// How long a client may take.
#[derive(Debug, Clone, Copy)]
struct Patience {
    /// To send the head of its request.
    head: Duration,
    /// To take its answer.
    answer: Duration,
    /// To close after its answer.
    leaving: Duration,
}

const PATIENCE: Patience = Patience {
    head: Duration::from_secs(5),
    answer: Duration::from_secs(10),
    leaving: Duration::from_secs(1),
};

/// One read from a socket.
const CHUNK: usize = 4 * 1024;

/// Stack of the thread, in bytes: rendering needs a few KiB.
const STACK: usize = 256 * 1024;

#[cfg(test)]
mod tests {
    use parking_lot::Mutex;
    use rustix::net::{self, AddressFamily, SocketType};

    use super::*;
    use crate::ops::status::{self, Limit, Query, Sort, Which};

    #[test]
    fn answers_get_and_head_on_its_paths() {
        let site = Site::start();
        let metrics = site.ask("GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n");
        assert_eq!(metrics.status, "HTTP/1.1 200 OK");
        assert_eq!(
            metrics.header("Content-Type"),
            Some("text/plain; version=0.0.4; charset=utf-8")
        );
        assert_eq!(metrics.header("Connection"), Some("close"));
        assert_eq!(metrics.header("Content-Length"), Some(&*metrics.body.len().to_string()));
        assert!(metrics.body.contains("choria_provisioner_paused{site=\"lon\"} 0\n"));
        assert!(metrics.body.ends_with('\n'));

        site.answers("GET /metrics?debug=1 HTTP/1.1\r\n\r\n", 200, None);
        site.answers("GET /livez HTTP/1.1\r\n\r\n", 200, Some("alive\n"));
        site.answers("GET /livez HTTP/1.0\r\n\r\n", 200, Some("alive\n"));
        site.answers("GET /livez HTTP/1.0\n\n", 200, Some("alive\n"));
        site.answers("HEAD /livez HTTP/1.1\r\n\r\n", 200, Some(""));
        site.answers("HEAD /metrics HTTP/1.1\r\n\r\n", 200, Some(""));
        for path in [
            "/index.html",
            "/metrics/",
            "/metricsx",
            "/METRICS",
            "//metrics",
            "/%6detrics",
            "/../metrics",
        ] {
            let request = format!("GET {path} HTTP/1.1\r\n\r\n");
            site.answers(&request, 404, Some("404 page not found\n"));
        }
        site.answers("HEAD /nowhere HTTP/1.1\r\n\r\n", 404, Some(""));
        assert_eq!(site.refused(), "");
    }

    #[test]
    fn a_head_answer_tells_the_length_of_the_body_it_leaves_out() {
        let site = Site::start();
        let answer = site.ask("HEAD /livez HTTP/1.1\r\n\r\n");
        assert_eq!((answer.header("Content-Length"), answer.body.as_str()), (Some("6"), ""));
    }

    #[test]
    fn whoever_makes_no_progress_is_named() {
        let site = Site::start();
        site.answers("GET /livez HTTP/1.1\r\n\r\n", 200, Some("alive\n"));
        site.fake.stuck.lock().push("thread prober makes no progress for 61 s".into());
        let stuck = "stuck\nthread prober makes no progress for 61 s\n";
        site.answers("GET /livez HTTP/1.1\r\n\r\n", 503, Some(stuck));
    }

    #[test]
    fn readiness_lists_every_reason() {
        let site = Site::start();
        site.answers("GET /readyz HTTP/1.1\r\n\r\n", 200, Some("ready\n"));
        site.set(true, &["standing by: another instance leads"]);
        let standby = "ready\nstanding by: another instance leads\n";
        site.answers("GET /readyz HTTP/1.1\r\n\r\n", 200, Some(standby));
        site.set(false, &["not connected to a broker", "paused by an operator"]);
        let reasons = "not ready\nnot connected to a broker\npaused by an operator\n";
        site.answers("GET /readyz HTTP/1.1\r\n\r\n", 503, Some(reasons));
        site.answers("GET /livez HTTP/1.1\r\n\r\n", 200, Some("alive\n"));
    }

    #[test]
    fn the_page_is_html_under_a_policy_and_asks_for_stuck_nodes() {
        let site = Site::start();
        site.fake.names.lock().push("<script>alert(1)</script>".into());
        let page = site.ask("GET / HTTP/1.1\r\n\r\n");
        assert_eq!(page.status, "HTTP/1.1 200 OK");
        assert_eq!(page.header("Content-Type"), Some("text/html; charset=utf-8"));
        assert_eq!(page.header("Cache-Control"), Some("no-store"));
        let policy = page.header("Content-Security-Policy").unwrap();
        assert!(
            policy.starts_with("default-src 'none'; ") && !policy.contains("unsafe"),
            "{policy}"
        );
        assert!(page.body.contains("&lt;script&gt;alert(1)&lt;/script&gt;"));
        assert!(!page.body.contains("<script>alert"));
        let asked = || site.fake.asked.lock().clone().unwrap();
        let (state, sort, limit) = (Which::Stuck, Sort::Failures, Some(Limit::near(50)));
        let stuck = Query { state, sort, limit, ..Query::default() };
        assert_eq!(asked(), stuck);
        site.answers("GET /?state=all&name=a%26b&sort=seen&limit=7 HTTP/1.1\r\n\r\n", 200, None);
        let name = "a&b".to_owned();
        let limit = Some(Limit::near(7));
        assert_eq!(asked(), Query { state: Which::All, name, sort: Sort::Seen, limit });
        for path in ["/", "/status.json"] {
            let request = format!("GET {path}?state=<x HTTP/1.1\r\n\r\n");
            let wrong = "state: found \"<x\", wanted one of all, stuck, working, queued, waiting, settling, denied\n";
            site.answers(&request, 400, Some(wrong));
            let request = format!("GET {path}?x=y HTTP/1.1\r\n\r\n");
            let wrong = "found \"x\", wanted state, name, sort or limit\n";
            site.answers(&request, 400, Some(wrong));
        }
        site.answers("HEAD / HTTP/1.1\r\n\r\n", 200, Some(""));
    }

    #[test]
    fn the_status_is_there_for_scripts() {
        let site = Site::start();
        site.fake.names.lock().push("n1.example.net".into());
        let answer = site.ask("GET /status.json HTTP/1.1\r\n\r\n");
        assert_eq!(answer.header("Content-Type"), Some("application/json"));
        let status: Status = serde_json::from_str(&answer.body).unwrap();
        assert_eq!(status, status::testing::status());
        let document: serde_json::Value = serde_json::from_str(&answer.body).unwrap();
        assert_eq!(document["nodes"]["nodes"][0]["node"], "n1.example.net");
    }

    #[test]
    fn answers_that_nobody_takes_have_a_bound_in_bytes() {
        let site = Site::start();
        site.set(true, &[&"x".repeat(ANSWERS_BYTES_MAX - (1 << 20))]);
        let mut idle = site.connect();
        idle.write_all(b"GET /readyz HTTP/1.1\r\n\r\n").unwrap();
        // Wait for the first bytes: the answer has begun.
        assert_eq!(idle.peek(&mut [0]).unwrap(), 1);
        // The next one is answered all the same, and the one that takes nothing loses its answer.
        site.set(true, &[&"y".repeat(2 << 20)]);
        let answer = site.ask("GET /readyz HTTP/1.1\r\n\r\n");
        assert_eq!(answer.status, "HTTP/1.1 200 OK");
        assert_eq!(site.refused(), "memory=1");
        assert!(idle.read_to_end(&mut Vec::new()).is_err(), "its answer was cut off");
        // One that is too large by itself is refused.
        site.set(true, &[&"z".repeat(ANSWERS_BYTES_MAX)]);
        let refused = site.ask("GET /readyz HTTP/1.1\r\n\r\n");
        assert_eq!(refused.status, "HTTP/1.1 503 Service Unavailable");
        assert_eq!(site.refused(), "memory=2");
        site.answers("GET /livez HTTP/1.1\r\n\r\n", 200, Some("alive\n"));
    }

    #[test]
    fn refuses_what_is_no_request_for_reading() {
        let site = Site::start();
        for method in
            ["POST", "PUT", "DELETE", "OPTIONS", "CONNECT", "TRACE", "PATCH", "GETX", "get"]
        {
            let request = format!("{method} /metrics HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc");
            let expected = if method == "get" { 400 } else { 405 };
            site.answers(&request, expected, None);
        }
        let answer = site.ask("POST /metrics HTTP/1.1\r\n\r\n");
        assert_eq!(answer.header("Allow"), Some("GET, HEAD"));
        for malformed in [
            "GET /metrics\r\n\r\n",
            "GET  /metrics HTTP/1.1\r\n\r\n",
            "GET /metrics HTTP/1.1 x\r\n\r\n",
            "GET /metrics HTTP/2.0\r\n\r\n",
            "GET /metrics HTTP/0.9\r\n\r\n",
            "GET metrics HTTP/1.1\r\n\r\n",
            "GET http://x/metrics HTTP/1.1\r\n\r\n",
            "GET /metrics HTTP/1.1\r\nno colon\r\n\r\n",
            "GET /metrics HTTP/1.1\r\nA B: c\r\n\r\n",
            "GET /metrics HTTP/1.1\r\nA: \u{e9}\r\n\r\n",
            "GET\r\n\r\n",
            "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            "\r\n\r\n",
            "\0\0\0\0",
            "\u{16}\u{3}\u{1}\u{2}\0\u{1}\0\u{1}\u{fc}\u{3}\u{3}",
            "{}",
        ] {
            site.answers(malformed, 400, None);
        }
        assert_eq!(site.refused(), "malformed=17 method=9");
        // And nothing of that keeps the next one from being served.
        site.answers("GET /livez HTTP/1.1\r\n\r\n", 200, Some("alive\n"));
    }

    #[test]
    fn refuses_a_head_of_more_than_eight_kib() {
        let site = Site::start();
        let padded = |length: usize| {
            let (start, end) = ("GET /livez HTTP/1.1\r\nA: ", "\r\n\r\n");
            format!("{start}{}{end}", "x".repeat(length - start.len() - end.len()))
        };
        site.answers(&padded(HEAD_MAX), 200, Some("alive\n"));
        site.answers(&padded(HEAD_MAX + 1), 431, None);
        // One that never ends is told before it has ended, and what it still sends is not held against it.
        site.answers(&"A".repeat(3 * HEAD_MAX), 431, None);
        site.answers(&format!("GET {}", "/".repeat(LEAVING_MAX)), 431, None);
        assert_eq!(site.refused(), "head=3");
    }

    #[test]
    fn a_slow_client_blocks_nobody_and_is_served_in_the_end() {
        let site = Site::start();
        let mut slow = site.connect();
        for byte in b"GET /livez HTTP/1.1\r\nHost: x\r\n\r" {
            slow.write_all(&[*byte]).unwrap();
            site.answers("GET /livez HTTP/1.1\r\n\r\n", 200, Some("alive\n"));
        }
        slow.write_all(b"\n").unwrap();
        assert_eq!(Received::read(&mut slow).body, "alive\n");
        assert_eq!(site.refused(), "");
    }

    #[test]
    fn a_head_that_takes_too_long_is_refused_however_it_drips() {
        let site = Site::within(Patience { head: Duration::from_millis(200), ..PATIENCE });
        let mut silent = site.connect();
        let mut half = site.connect();
        half.write_all(b"GET /livez HTTP/1.1\r\n").unwrap();
        let mut dripping = site.connect();
        dripping.write_all(b"GET /").unwrap();
        // Another request after each byte, so that bytes don't come fast enough to fill a head.
        while dripping.write_all(b"A").is_ok() {
            site.answers("GET /livez HTTP/1.1\r\n\r\n", 200, Some("alive\n"));
        }
        assert_eq!(Received::read(&mut half).status, "HTTP/1.1 408 Request Timeout");
        let mut nothing = Vec::new();
        assert_eq!(silent.read_to_end(&mut nothing).unwrap(), 0);
        assert_eq!(site.refused(), "slow=3");
    }

    #[test]
    fn a_client_that_does_not_read_blocks_nobody_and_is_cut_off() {
        let site = Site::within(Patience { answer: Duration::from_millis(300), ..PATIENCE });
        // More than the sockets between us hold.
        site.set(true, &[&"x".repeat(30 << 20)]);
        let mut idle = site.connect();
        idle.write_all(b"GET /readyz HTTP/1.1\r\n\r\n").unwrap();
        // Wait for the first bytes: the answer has begun.
        assert_eq!(idle.peek(&mut [0]).unwrap(), 1);
        site.answers("GET /livez HTTP/1.1\r\n\r\n", 200, Some("alive\n"));
        site.wait_for("unread=1");
        let mut received = Vec::new();
        let end = idle.read_to_end(&mut received);
        assert!(end.is_err() || received.len() < 30 << 20, "all of it came");
    }

    #[test]
    fn a_large_answer_arrives_whole() {
        let site = Site::start();
        let reason = "x".repeat(30 << 20);
        site.set(true, &[&reason]);
        let answer = site.ask("GET /readyz HTTP/1.1\r\n\r\n");
        assert_eq!(answer.body.len(), "ready\n\n".len() + reason.len());
    }

    #[test]
    fn the_oldest_of_more_than_32_connections_makes_room() {
        let site = Site::within(NO_HURRY);
        let mut open: Vec<TcpStream> = (0..CONNECTIONS_MAX).map(|_| site.connect()).collect();
        open[0].write_all(b"GET /").unwrap();
        site.answers("GET /livez HTTP/1.1\r\n\r\n", 200, Some("alive\n"));
        let told = Received::read(&mut open.remove(0));
        assert_eq!(told.status, "HTTP/1.1 503 Service Unavailable");
        assert_eq!(site.refused(), "connections=1");
        // The others are as good as before.
        for stream in &mut open {
            stream.write_all(b"GET /livez HTTP/1.1\r\n\r\n").unwrap();
            assert_eq!(Received::read(stream).body, "alive\n");
        }
        assert_eq!(site.refused(), "connections=1");
    }

    #[test]
    fn no_number_of_idle_and_slow_clients_keeps_a_request_out() {
        let site = Site::within(NO_HURRY);
        let mut slow: Vec<TcpStream> = Vec::new();
        for number in 0..20 * CONNECTIONS_MAX {
            let mut stream = site.connect();
            if number % 2 == 0 {
                // One whose place is gone already.
                let _ = stream.write_all(b"GET /livez HTTP/1.1\r\n");
            }
            slow.push(stream);
            site.answers("GET /livez HTTP/1.1\r\n\r\n", 200, Some("alive\n"));
        }
    }

    #[test]
    fn who_comes_alone_keeps_its_place_against_any_number_from_elsewhere() {
        let site = Site::within(NO_HURRY);
        let mut alone = site.connect_from(Ipv4Addr::new(127, 0, 0, 2));
        alone.write_all(b"GET /livez HTTP/1.1\r\n").unwrap();
        let _crowd: Vec<TcpStream> = (0..5 * CONNECTIONS_MAX).map(|_| site.connect()).collect();
        site.wait_for("connections=");
        alone.write_all(b"\r\n").unwrap();
        assert_eq!(Received::read(&mut alone).body, "alive\n");
    }

    #[test]
    fn all_addresses_of_one_ipv6_network_are_one_place_to_come_from() {
        let network = |text: &str| network(text.parse().unwrap());
        assert_eq!(network("2001:db8::1"), network("2001:db8::ffff:2"));
        assert_ne!(network("2001:db8::1"), network("2001:db8:0:1::1"));
        assert_ne!(network("192.0.2.1"), network("192.0.2.2"));
        assert_eq!(network("::ffff:192.0.2.1"), network("192.0.2.1"));
    }

    #[test]
    fn of_200_connections_at_once_each_is_served_or_turned_away() {
        let site = Arc::new(Site::start());
        let clients: Vec<_> = (0..200)
            .map(|_| {
                let site = Arc::clone(&site);
                thread::Builder::new()
                    .stack_size(STACK)
                    .spawn(move || {
                        let mut stream = site.connect();
                        let mut text = String::new();
                        // One that is turned away may find its connection reset.
                        let _ = stream.write_all(b"GET /livez HTTP/1.1\r\n\r\n");
                        let _ = stream.read_to_string(&mut text);
                        text.starts_with("HTTP/1.1 200 OK") && text.ends_with("alive\n")
                    })
                    .unwrap()
            })
            .collect();
        let served =
            clients.into_iter().filter_map(|client| client.join().ok()).filter(|&ok| ok).count();
        let refused = site.metrics.monitor_refused.with_label_values(&["connections"]).get();
        assert_eq!(served as u64 + refused, 200);
        assert!(served >= CONNECTIONS_MAX, "only {served} were served");
        site.answers("GET /livez HTTP/1.1\r\n\r\n", 200, Some("alive\n"));
    }

    #[test]
    fn only_the_first_of_several_requests_is_answered() {
        let site = Site::start();
        let request = "GET /livez HTTP/1.1\r\n\r\n".repeat(20);
        let answer = site.ask(&request);
        assert_eq!((answer.status.as_str(), answer.body.as_str()), ("HTTP/1.1 200 OK", "alive\n"));
    }

    #[test]
    fn a_client_that_shuts_its_side_after_the_request_is_answered() {
        let site = Site::start();
        let mut stream = site.connect();
        stream.write_all(b"GET /livez HTTP/1.1\r\n\r\n").unwrap();
        stream.shutdown(Shutdown::Write).unwrap();
        assert_eq!(Received::read(&mut stream).body, "alive\n");
    }

    #[test]
    fn no_answer_is_made_for_a_client_that_is_gone() {
        let monitor = Monitor::bind(IpAddr::V4(Ipv4Addr::LOCALHOST), 0).unwrap();
        let mut gone = TcpStream::connect(monitor.address()).unwrap();
        gone.write_all(b"GET /status.json HTTP/1.1\r\n\r\n").unwrap();
        sockopt::set_socket_linger(&gone, Some(Duration::ZERO)).unwrap();
        drop(gone);
        // They are served in their order.
        let mut next = TcpStream::connect(monitor.address()).unwrap();
        let fake = Arc::new(Fake::new());
        let running = monitor.serve(Metrics::new(""), fake.clone()).unwrap();
        next.write_all(b"GET /livez HTTP/1.1\r\n\r\n").unwrap();
        assert_eq!(Received::read(&mut next).body, "alive\n");
        assert_eq!(*fake.asked.lock(), None);
        running.stop();
    }

    #[test]
    fn stopping_closes_the_port_and_every_connection() {
        let site = Site::start();
        let mut open = site.connect();
        let address = site.running.address();
        site.running.stop();
        let mut nothing = Vec::new();
        // Closed, or reset when it was still waiting to be accepted.
        assert!(matches!(open.read_to_end(&mut nothing), Ok(0) | Err(_)));
        assert!(TcpStream::connect(address).is_err());
    }

    #[test]
    fn a_port_in_use_is_named() {
        let site = Site::start();
        let address = site.running.address();
        let error = Monitor::bind(address.ip(), address.port()).unwrap_err();
        assert_eq!(error.to_string(), format!("cannot listen on monitor port {address}"));
        let source = std::error::Error::source(&error).unwrap().to_string();
        assert!(source.contains("in use"), "{source}");
    }

    #[test]
    fn all_addresses_means_those_of_ipv4_too() {
        let monitor = Monitor::bind(IpAddr::V6(std::net::Ipv6Addr::UNSPECIFIED), 0).unwrap();
        let port = monitor.address().port();
        let running = monitor.serve(Metrics::new(""), Arc::new(Fake::new())).unwrap();
        let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).unwrap();
        stream.write_all(b"GET /livez HTTP/1.1\r\n\r\n").unwrap();
        assert_eq!(Received::read(&mut stream).body, "alive\n");
        running.stop();
    }

    /// So much time that nothing ends because of it.
    const NO_HURRY: Patience = Patience {
        head: Duration::from_secs(3_600),
        answer: Duration::from_secs(3_600),
        leaving: Duration::from_secs(3_600),
    };

    /// A monitor port with its metrics and a readiness that tests set.
    struct Site {
        metrics: Arc<Metrics>,
        fake: Arc<Fake>,
        running: Running,
    }

    /// A daemon that does what tests say.
    struct Fake {
        readiness: Mutex<Readiness>,
        names: Mutex<Vec<String>>,
        asked: Mutex<Option<Query>>,
        stuck: Mutex<Vec<String>>,
    }

    impl Fake {
        fn new() -> Fake {
            let readiness = Readiness { ready: true, reasons: Vec::new() };
            Fake {
                readiness: Mutex::new(readiness),
                names: Mutex::default(),
                asked: Mutex::default(),
                stuck: Mutex::default(),
            }
        }
    }

    impl Show for Fake {
        fn stuck(&self) -> Vec<String> {
            self.stuck.lock().clone()
        }

        fn readiness(&self) -> Readiness {
            self.readiness.lock().clone()
        }

        fn status(&self) -> Status {
            status::testing::status()
        }

        fn nodes(&self, query: &Query) -> Nodes {
            *self.asked.lock() = Some(query.clone());
            let nodes: Vec<_> =
                self.names.lock().iter().map(|name| status::testing::stuck(name, name)).collect();
            Nodes { matching: nodes.len(), nodes }
        }
    }

    impl Site {
        fn start() -> Site {
            Site::within(PATIENCE)
        }

        fn within(patience: Patience) -> Site {
            let metrics = Metrics::new("lon");
            let fake = Arc::new(Fake::new());
            let monitor = Monitor::bind(IpAddr::V4(Ipv4Addr::LOCALHOST), 0).unwrap();
            let running =
                monitor.serve_within(patience, Arc::clone(&metrics), fake.clone()).unwrap();
            Site { metrics, fake, running }
        }

        fn set(&self, ready: bool, reasons: &[&str]) {
            let reasons = reasons.iter().map(|&reason| reason.to_owned()).collect();
            *self.fake.readiness.lock() = Readiness { ready, reasons };
        }

        fn connect(&self) -> TcpStream {
            let stream = TcpStream::connect(self.running.address()).unwrap();
            stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
            stream
        }

        /// A client with another address than most.
        fn connect_from(&self, address: Ipv4Addr) -> TcpStream {
            let socket = net::socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
            net::bind(&socket, &SocketAddr::new(address.into(), 0)).unwrap();
            net::connect(&socket, &self.running.address()).unwrap();
            socket.into()
        }

        #[track_caller]
        fn ask(&self, request: &str) -> Received {
            let mut stream = self.connect();
            stream.write_all(request.as_bytes()).unwrap();
            Received::read(&mut stream)
        }

        #[track_caller]
        fn answers(&self, request: &str, status: u16, body: Option<&str>) {
            let answer = self.ask(request);
            let shown = &request[..request.len().min(80)];
            let found = answer.status.split(' ').nth(1).unwrap_or_default();
            assert_eq!(found, status.to_string(), "{shown:?}");
            if let Some(body) = body {
                assert_eq!(answer.body, body, "{shown:?}");
            }
        }

        /// What was refused, such as `head=1 slow=2`.
        fn refused(&self) -> String {
            let text = self.metrics.render();
            let series = text.lines().filter_map(|line| {
                let rest =
                    line.strip_prefix("choria_provisioner_monitor_refused_total{reason=\"")?;
                let (reason, rest) = rest.split_once('"')?;
                Some(format!("{reason}={}", rest.split(' ').nth(1)?))
            });
            series.collect::<Vec<_>>().join(" ")
        }

        /// Waits until `refused` was counted: asking is an event for the thread that counts.
        fn wait_for(&self, refused: &str) {
            let deadline = Instant::now() + Duration::from_secs(60);
            while !self.refused().contains(refused) {
                assert!(Instant::now() < deadline, "{refused} in {}", self.refused());
                self.answers("GET /livez HTTP/1.1\r\n\r\n", 200, Some("alive\n"));
            }
        }
    }

    /// What a client received until the connection was closed.
    struct Received {
        status: String,
        headers: Vec<(String, String)>,
        body: String,
    }

    impl Received {
        #[track_caller]
        fn read(stream: &mut TcpStream) -> Received {
            let mut text = String::new();
            stream.read_to_string(&mut text).unwrap();
            let (head, body) = text.split_once("\r\n\r\n").unwrap();
            let mut lines = head.lines();
            let status = lines.next().unwrap().to_owned();
            let headers = lines
                .map(|line| line.split_once(": ").unwrap())
                .map(|(name, value)| (name.to_owned(), value.to_owned()))
                .collect();
            Received { status, headers, body: body.to_owned() }
        }

        fn header(&self, name: &str) -> Option<&str> {
            self.headers.iter().find(|(each, _)| each == name).map(|(_, value)| value.as_str())
        }
    }
}
