//! The admin socket: commands in, answers out, one JSON object a line each way.
//!
//! Who may open it is said by its file: mode 0660, owner and group of the daemon. Each client has a thread of its own
//! that it alone can hold up, for ten seconds at most; there are eight at a time, and the next ones wait for a moment, all at once. Of
//! those that neither send nor take anything the one that has been waited for the longest makes room, so that hung ones don't lock an
//! operator out; of those that read a long answer, one that still does so after five seconds, if by then nobody else has. A file that
//! a dead daemon left is replaced; one that is listened on is another daemon's, and no start.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::fs::{self, Permissions};
use std::io::{self, BufWriter, Read, Write};
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FlockOperation, OFlags, flock};
use rustix::io::Errno;
use rustix::net::{self, AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use serde::Serialize;

use crate::config::AdminSocket;
use crate::ops::command::{Answer, Command, Obey};
use crate::ops::stop::{Stop, Stoppable};

/// Where the socket is if nothing else is said and the directory exists.
pub const USUAL: &str = "/run/choria-provisioner/admin.sock";

/// Where commands find a daemon with this setting, if it listens.
pub fn path_of(setting: &AdminSocket) -> Option<&Path> {
    match setting {
        AdminSocket::Usual => Some(Path::new(USUAL)),
        AdminSocket::Off => None,
        AdminSocket::At(path) => Some(path),
    }
}

/// Clients at a time: a few operators and their scripts.
const CLIENTS_MAX: usize = 8;

/// How long a client may take to send a line, or to take an answer.
const PATIENCE: Duration = Duration::from_secs(10);

/// A client that has moved no byte for this part of its time is hung. One that reads takes a part of its answer every few
/// milliseconds.
const STILL_PART: u32 = 10;

/// Clients that wait for a place, each since it came: a crowd must not cost the last of it the waits of all before.
const NEWCOMERS_MAX: usize = 32;

/// How long the next one waits itself, as a part of that time, before it gets the place of one that is not hung.
const WAIT_PART: u32 = 2;

/// How often is looked whether there is room for the next one, and how long one that is not hung is safe after another has
/// lost its place: enough to answer whoever got it, before that is the next to lose it.
const LOOK_AGAIN: Duration = Duration::from_millis(10);

/// How long the thread that lets clients in may be held up by one that it turns away.
const TURN_AWAY_TIME: Duration = Duration::from_millis(100);

/// Longest line of a client, in bytes.
const LINE_MAX: usize = 64 << 10;

/// Clients that wait to be accepted.
const BACKLOG: i32 = 16;

/// Who may talk to us: owner and group.
const MODE: u32 = 0o660;

/// How long another daemon that starts at the same moment is waited for, and how often it is looked for.
const LOCK_TRIES: u32 = 50;
const LOCK_PAUSE: Duration = Duration::from_millis(20);

/// How long nobody is accepted after the system could not give us one.
const CLOSED_TIME: Duration = Duration::from_millis(250);

/// Part of an answer that is written at once.
const CHUNK: usize = 16 << 10;

/// Stack of a thread, in bytes: untouched pages cost nothing.
const STACK: usize = 256 << 10;

/// The socket, bound and not served yet; its file goes away with this.
#[derive(Debug)]
pub struct Socket {
    listener: UnixListener,
    stop: Stop,
    file: SocketFile,
}

impl Socket {
    /// Makes the socket at `path`.
    ///
    /// # Errors
    ///
    /// [`BindError`], also if another process listens there, or the file is no socket.
    pub fn bind(path: &Path) -> Result<Socket, BindError> {
        bind(path).map_err(|source| BindError { path: path.to_path_buf(), source })
    }

    /// Follows commands on threads of its own until the result is dropped.
    ///
    /// # Errors
    ///
    /// Only if the first thread can't be started.
    pub fn serve(self, operator: Arc<dyn Obey>) -> io::Result<Running> {
        self.serve_within(PATIENCE, operator)
    }

    fn serve_within(self, patience: Duration, operator: Arc<dyn Obey>) -> io::Result<Running> {
        let door = Door {
            listener: self.listener,
            stop: self.stop.clone(),
            patience,
            operator,
            places: Arc::default(),
            threads: Vec::new(),
            newcomers: VecDeque::new(),
            last_ousted: None,
            next: 0,
        };
        let builder = thread::Builder::new().name("admin".to_owned()).stack_size(STACK);
        let thread = self.stop.spawn(builder, move || door.run())?;
        Ok(Running { _thread: thread, _file: self.file })
    }
}

/// Why there is no admin socket.
#[derive(Debug)]
pub struct BindError {
    path: PathBuf,
    source: io::Error,
}

impl fmt::Display for BindError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cannot listen on admin socket {}", self.path.display())
    }
}

impl std::error::Error for BindError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.source)
    }
}

fn bind(path: &Path) -> io::Result<Socket> {
    let address = SocketAddrUnix::new(path)?;
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    // Between two that start at once, one must not take the other's new file for a dead one's.
    let _lock = lock(folder.unwrap_or(Path::new(".")))?;
    make_room(path, &address)?;
    let socket = socket()?;
    net::bind(&socket, &address)?;
    let file = SocketFile::at(path)?;
    // Nobody can connect before it listens, so nobody slips in before this.
    fs::set_permissions(path, Permissions::from_mode(MODE))?;
    net::listen(&socket, BACKLOG)?;
    Ok(Socket { listener: socket.into(), stop: Stop::new()?, file })
}

fn socket() -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    Ok(net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?)
}

/// Holds the folder for as long as the result lives.
fn lock(folder: &Path) -> io::Result<fs::File> {
    // Whatever else it is would be waited for: a pipe, until somebody writes into it.
    let flags = OFlags::DIRECTORY.bits() as i32;
    let file = fs::File::options().read(true).custom_flags(flags).open(folder)?;
    for _ in 0..LOCK_TRIES {
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(file),
            Err(Errno::WOULDBLOCK | Errno::INTR) => thread::sleep(LOCK_PAUSE),
            Err(error) => return Err(error.into()),
        }
    }
    Err(io::Error::new(io::ErrorKind::ResourceBusy, "its folder is locked by another process"))
}

/// Removes what a dead daemon left at `path`.
fn make_room(path: &Path, address: &SocketAddrUnix) -> io::Result<()> {
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
        Ok(known) if !known.file_type().is_socket() => {
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, "it is there and no socket"));
        }
        Ok(_) => {}
    }
    match net::connect(socket()?, address) {
        Err(Errno::CONNREFUSED) => fs::remove_file(path),
        // With so many clients waiting that none is let in, somebody is there all the more.
        Ok(()) | Err(Errno::AGAIN) => {
            Err(io::Error::new(io::ErrorKind::AddrInUse, "another process listens there"))
        }
        Err(error) => Err(error.into()),
    }
}

/// Our file, removed when this is dropped unless another has taken its place.
#[derive(Debug)]
struct SocketFile {
    path: PathBuf,
    identity: (u64, u64),
}

impl SocketFile {
    fn at(path: &Path) -> io::Result<SocketFile> {
        let known = fs::symlink_metadata(path)?;
        Ok(SocketFile { path: path.to_path_buf(), identity: (known.dev(), known.ino()) })
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        let known = fs::symlink_metadata(&self.path);
        if known.is_ok_and(|known| (known.dev(), known.ino()) == self.identity) {
            // There is nobody left to tell.
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// The socket being served; closed with all its clients when this is dropped.
#[derive(Debug)]
pub struct Running {
    // Dropped first: as long as somebody listens, the file is there.
    _thread: Stoppable,
    _file: SocketFile,
}

/// The thread that lets clients in.
struct Door {
    listener: UnixListener,
    stop: Stop,
    patience: Duration,
    operator: Arc<dyn Obey>,
    places: Arc<Places>,
    threads: Vec<JoinHandle<()>>,
    /// In the order in which they came; others wait in the backlog.
    newcomers: VecDeque<Newcomer>,
    /// When one lost its place that was not hung, or one was turned away for want of such a one.
    last_ousted: Option<Instant>,
    next: u64,
}

/// A client that waits for a place.
struct Newcomer {
    stream: UnixStream,
    since: Instant,
}

impl Door {
    fn run(mut self) {
        let mut closed_until = None;
        while !self.waits_for_stop(closed_until.is_none()) {
            self.admit();
            let is_closed = closed_until.is_some_and(|until| Instant::now() < until);
            if is_closed || self.newcomers.len() >= NEWCOMERS_MAX {
                continue;
            }
            closed_until = match self.listener.accept() {
                Ok((stream, _)) => {
                    self.newcomers.push_back(Newcomer { stream, since: Instant::now() });
                    self.admit();
                    None
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => None,
                Err(error) => {
                    log::warn!(component = "admin"; "Cannot accept a client of the admin socket: {error}");
                    Some(Instant::now() + CLOSED_TIME)
                }
            };
        }
        self.places.clear();
        for thread in self.threads {
            // A panic there has ended the process already, or is a test's own.
            let _ = thread.join();
        }
    }

    /// Waits for a client, or for a while if it could not let one in; true when it is time to end.
    fn waits_for_stop(&self, is_open: bool) -> bool {
        let mut fds = vec![PollFd::new(&self.stop, PollFlags::IN)];
        let mut time = None;
        if is_open && self.newcomers.len() < NEWCOMERS_MAX {
            fds.push(PollFd::new(&self.listener, PollFlags::IN));
        }
        if !self.newcomers.is_empty() {
            time = Timespec::try_from(LOOK_AGAIN).ok();
        } else if !is_open {
            time = Timespec::try_from(CLOSED_TIME).ok();
        }
        // Interrupted, nothing is known: it is asked again.
        poll(&mut fds, time.as_ref()).is_ok() && !fds[0].revents().is_empty()
    }

    /// Gives places to those that have waited the longest, as long as there are any.
    fn admit(&mut self) {
        self.threads.retain(|thread| !thread.is_finished());
        while let Some(newcomer) = self.newcomers.pop_front() {
            let (number, waiting) = (self.next, self.newcomers.len());
            self.next += 1;
            if let Err(error) = self.serve(number, newcomer) {
                self.places.leave(number);
                log::warn!(component = "admin"; "Cannot serve a client of the admin socket: {error}");
            }
            if self.newcomers.len() > waiting {
                // It goes on waiting, and those behind it.
                return;
            }
        }
    }

    fn serve(&mut self, number: u64, newcomer: Newcomer) -> io::Result<()> {
        let Newcomer { stream, since } = newcomer;
        stream.set_nonblocking(false)?;
        let now = Instant::now();
        let place = Place { stream: stream.try_clone()?, waits_since: Some(now), moved: now };
        let may_oust = now.saturating_duration_since(since) >= self.patience / WAIT_PART
            && self
                .last_ousted
                .is_none_or(|last| now.saturating_duration_since(last) >= LOOK_AGAIN);
        let still = if may_oust { Duration::ZERO } else { self.patience / STILL_PART };
        let taken = self.places.take(number, place, still);
        if may_oust && !matches!(taken, Taken::Free) {
            self.last_ousted = Some(now);
        }
        if taken == Taken::Not {
            if may_oust {
                let turned_away = Client::new(stream, TURN_AWAY_TIME);
                let _ = turned_away.answer(&Bad::new("too many clients"), &|| {});
            } else {
                self.newcomers.push_front(Newcomer { stream, since });
            }
            return Ok(());
        }
        let client = Client::new(stream, self.patience);
        let (operator, places) = (self.operator.clone(), self.places.clone());
        let builder = thread::Builder::new().name("admin-client".to_owned()).stack_size(STACK);
        let thread = builder.spawn(move || {
            client.serve(&*operator, &places, number);
            places.leave(number);
        })?;
        self.threads.push(thread);
        Ok(())
    }
}

/// The clients that are being served.
#[derive(Default)]
struct Places(Mutex<HashMap<u64, Place>>);

/// What became of the wish for a place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Taken {
    /// It was nobody's.
    Free,
    /// It was another's, who has lost it.
    Anothers,
    /// There is none.
    Not,
}

struct Place {
    /// To end it.
    stream: UnixStream,
    /// Since when it has had to send a line or to take its answer; nothing while its command is followed.
    waits_since: Option<Instant>,
    /// When it last sent or took a byte, or we began to wait for one.
    moved: Instant,
}

impl Places {
    /// Gives a client a place, if need be that of the one that we have waited for the longest of those that have moved nothing for
    /// `still`.
    fn take(&self, number: u64, place: Place, still: Duration) -> Taken {
        let mut places = self.0.lock();
        let mut taken = Taken::Free;
        if places.len() >= CLIENTS_MAX {
            let is_still = |of: &Place| place.moved.saturating_duration_since(of.moved) >= still;
            let waits = places.iter().filter(|(_, of)| is_still(of));
            let waits = waits.filter_map(|(number, place)| place.waits_since.zip(Some(*number)));
            let Some((_, longest)) = waits.min() else { return Taken::Not };
            taken = Taken::Anothers;
            if let Some(place) = places.remove(&longest) {
                // One that is gone needs no end.
                let _ = place.stream.shutdown(Shutdown::Both);
            }
        }
        places.insert(number, place);
        taken
    }

    /// From now on the client has to do something, or we have; false when it has lost its place.
    fn waits(&self, number: u64, waits: bool) -> bool {
        let mut places = self.0.lock();
        let place = places.get_mut(&number);
        let has_place = place.is_some();
        if let Some(place) = place {
            place.moved = Instant::now();
            place.waits_since = waits.then_some(place.moved);
        }
        has_place
    }

    /// The client has sent or taken something.
    fn moves(&self, number: u64) {
        if let Some(place) = self.0.lock().get_mut(&number) {
            place.moved = Instant::now();
        }
    }

    fn leave(&self, number: u64) {
        self.0.lock().remove(&number);
    }

    /// Ends all.
    fn clear(&self) {
        for (_, place) in self.0.lock().drain() {
            let _ = place.stream.shutdown(Shutdown::Both);
        }
    }
}

/// One connection.
struct Client {
    stream: UnixStream,
    patience: Duration,
    /// What was read behind the last line.
    held: Vec<u8>,
}

impl Client {
    fn new(stream: UnixStream, patience: Duration) -> Client {
        Client { stream, patience, held: Vec::new() }
    }

    /// Follows commands until the client leaves, is silent for too long, says what is no line, or has lost its place.
    fn serve(mut self, operator: &dyn Obey, places: &Places, number: u64) {
        let moved = || places.moves(number);
        loop {
            let line = match self.line(&moved) {
                Ok(Some(line)) => line,
                Ok(None) => return,
                Err(error) => {
                    if error.kind() == io::ErrorKind::InvalidData {
                        let _ = self.answer(&Bad::new(&error.to_string()), &moved);
                    }
                    return;
                }
            };
            // Nobody would hear what came of it.
            if !places.waits(number, false) {
                return;
            }
            let obeyed = match serde_json::from_slice::<Command>(&line) {
                Ok(command) => operator.obey(command).map_err(|refused| refused.0),
                Err(error) => Err(format!("no command: {error}")),
            };
            places.waits(number, true);
            let answered = match obeyed {
                Ok(answer) => self.answer(&Good { ok: true, result: answer }, &moved),
                Err(error) => self.answer(&Bad::new(&error), &moved),
            };
            // It has all its time for the next line.
            if answered.is_err() || !places.waits(number, true) {
                return;
            }
        }
    }

    /// The next line; nothing when the client has ended its side. `moved` is told of each part.
    fn line(&mut self, moved: &dyn Fn()) -> io::Result<Option<Vec<u8>>> {
        let deadline = Instant::now() + self.patience;
        let mut searched = 0;
        loop {
            if let Some(end) = self.held[searched..].iter().position(|byte| *byte == b'\n') {
                let rest = self.held.split_off(searched + end + 1);
                return Ok(Some(std::mem::replace(&mut self.held, rest)));
            }
            searched = self.held.len();
            if searched > LINE_MAX {
                let text = format!("a line has {LINE_MAX} bytes at most");
                return Err(io::Error::new(io::ErrorKind::InvalidData, text));
            }
            self.stream.set_read_timeout(Some(left(deadline)?))?;
            let mut chunk = [0; 4 << 10];
            match (&self.stream).read(&mut chunk) {
                Ok(0) => return Ok(None),
                Ok(length) => {
                    self.held.extend_from_slice(&chunk[..length]);
                    moved();
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Writes one line, as the client takes it. `moved` is told of each part.
    fn answer(&self, answer: &impl Serialize, moved: &dyn Fn()) -> io::Result<()> {
        let deadline = Instant::now() + self.patience;
        let until = Until { stream: &self.stream, deadline, moved };
        let mut out = BufWriter::with_capacity(CHUNK, until);
        serde_json::to_writer(&mut out, answer)?;
        out.write_all(b"\n")?;
        out.flush()
    }
}

/// A stream that takes what is written until the deadline.
struct Until<'a> {
    stream: &'a UnixStream,
    deadline: Instant,
    moved: &'a dyn Fn(),
}

impl Write for Until<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.stream.set_write_timeout(Some(left(self.deadline)?))?;
        let mut stream = self.stream;
        // Part by part, since each shows that the client reads.
        stream.write(&bytes[..bytes.len().min(CHUNK)]).inspect(|_| (self.moved)())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The time until `deadline`, which is more than none.
pub(super) fn left(deadline: Instant) -> io::Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(left) }
}

#[derive(Serialize)]
struct Good {
    ok: bool,
    result: Answer,
}

#[derive(Serialize)]
struct Bad<'a> {
    ok: bool,
    error: &'a str,
}

impl<'a> Bad<'a> {
    fn new(error: &'a str) -> Bad<'a> {
        Bad { ok: false, error }
    }
}

#[cfg(test)]
mod tests {
    use std::io::BufRead;
    use std::io::BufReader;

    use crossbeam_channel::{Receiver, Sender, bounded, never};

    use super::*;
    use crate::appending::testing::make_pipe;
    use crate::ops::command::{Change, Refused};
    use crate::ops::status::{Nodes, testing};
    use crate::shutdown::Never;

    const LONG: Duration = Duration::from_secs(60);

    /// Follows commands as tests want it.
    struct Fake {
        begun: Sender<()>,
        go_on: Receiver<Never>,
    }

    impl Obey for Fake {
        fn obey(&self, command: Command) -> Result<Answer, Refused> {
            match command {
                // More than a socket takes at once.
                Command::Nodes(_) => {
                    let node = testing::stuck("n1.example.net", &"x".repeat(1 << 20));
                    Ok(Answer::Nodes(Nodes { matching: 20, nodes: vec![node; 20] }))
                }
                Command::Pause {} => Err(Refused("not \"now\"".into())),
                // As long as the test likes.
                Command::Retry { all: true, .. } => {
                    let _ = self.begun.send(());
                    let _ = self.go_on.recv();
                    Ok(Answer::Change(Change { changed: true, message: "Retried".into() }))
                }
                other => {
                    Ok(Answer::Change(Change { changed: true, message: format!("{other:?}") }))
                }
            }
        }
    }

    /// A socket in a folder of its own.
    struct Site {
        folder: PathBuf,
        running: Option<Running>,
        /// Tells of each command that takes as long as the test likes.
        begun: Receiver<()>,
        /// Such commands end with this.
        go_on: Option<Sender<Never>>,
    }

    impl Site {
        fn start(patience: Duration) -> Site {
            let mut site = Site::folder();
            let socket = Socket::bind(&site.path()).unwrap();
            let (begin, begun) = bounded(CLIENTS_MAX);
            let (go_on, goes_on) = bounded(0);
            let fake = Arc::new(Fake { begun: begin, go_on: goes_on });
            (site.begun, site.go_on) = (begun, Some(go_on));
            site.running = Some(socket.serve_within(patience, fake).unwrap());
            site
        }

        fn folder() -> Site {
            let name = format!("provisioner-admin-{}", fastrand::u64(..));
            let folder = std::env::temp_dir().join(name);
            fs::create_dir_all(&folder).unwrap();
            Site { folder, running: None, begun: never(), go_on: None }
        }

        fn path(&self) -> PathBuf {
            self.folder.join("admin.sock")
        }

        fn connect(&self) -> BufReader<UnixStream> {
            let stream = UnixStream::connect(self.path()).unwrap();
            stream.set_read_timeout(Some(LONG)).unwrap();
            BufReader::new(stream)
        }

        /// One command on a connection of its own.
        fn ask(&self, line: &str) -> String {
            let mut stream = self.connect();
            // One that is turned away may be closed already.
            let _ = stream.get_mut().write_all(line.as_bytes());
            read(&mut stream)
        }
    }

    impl Drop for Site {
        fn drop(&mut self) {
            drop((self.go_on.take(), self.running.take()));
            let _ = fs::remove_dir_all(&self.folder);
        }
    }

    /// The next line, or what there is before the end.
    fn read(stream: &mut BufReader<UnixStream>) -> String {
        let mut line = String::new();
        let _ = stream.read_line(&mut line);
        line
    }

    const DISCOVER: &str = "{\"command\":\"discover\"}\n";
    const DONE: &str = "{\"ok\":true,\"result\":{\"changed\":true,\"message\":\"Discover\"}}\n";

    #[test]
    fn answers_line_by_line_whatever_comes_in_between() {
        let site = Site::start(LONG);
        let mut stream = site.connect();
        stream.get_mut().write_all(DISCOVER.repeat(2).as_bytes()).unwrap();
        assert_eq!((read(&mut stream), read(&mut stream)), (DONE.into(), DONE.into()));
        stream.get_mut().write_all(b"{\"command\":\"pause\"}\r\n").unwrap();
        assert_eq!(read(&mut stream), "{\"ok\":false,\"error\":\"not \\\"now\\\"\"}\n");
        for nonsense in ["\n", "dance\n", "{\"command\":\"dance\"}\n", "\u{0}\u{1}\n", "[[[[\n"] {
            stream.get_mut().write_all(nonsense.as_bytes()).unwrap();
            let answer = read(&mut stream);
            assert!(answer.starts_with("{\"ok\":false,\"error\":\"no command: "), "{answer}");
        }
        stream.get_mut().write_all(b"\xff\xfe\n").unwrap();
        assert!(read(&mut stream).starts_with("{\"ok\":false"));
        stream.get_mut().write_all(DISCOVER.as_bytes()).unwrap();
        assert_eq!(read(&mut stream), DONE);
    }

    #[test]
    fn a_line_without_end_is_refused() {
        let site = Site::start(LONG);
        let long = format!("{}{}", " ".repeat(LINE_MAX - DISCOVER.len()), DISCOVER);
        assert_eq!(site.ask(&long), DONE);
        let answer = site.ask(&"x".repeat(LINE_MAX + 1));
        assert_eq!(answer, "{\"ok\":false,\"error\":\"a line has 65536 bytes at most\"}\n");
    }

    #[test]
    fn a_client_that_says_nothing_or_takes_nothing_is_ended_and_holds_up_nobody() {
        let site = Site::start(Duration::from_millis(300));
        let mut silent = site.connect();
        let mut dripping = site.connect();
        dripping.get_mut().write_all(b"{").unwrap();
        let mut hung = site.connect();
        hung.get_mut().write_all(b"{\"command\":\"nodes\"}\n").unwrap();
        // The first bytes are there: it writes.
        assert_eq!(hung.fill_buf().unwrap().first(), Some(&b'{'));
        assert_eq!(site.ask(DISCOVER), DONE);
        assert_eq!(read(&mut silent), "");
        assert_eq!(read(&mut dripping), "");
        assert_eq!(site.ask(DISCOVER), DONE);
        let mut rest = Vec::new();
        // What was on its way comes; the rest never does.
        let _ = hung.read_to_end(&mut rest);
        assert!(rest.len() < 20 << 20 && rest.last() != Some(&b'\n'), "{} bytes", rest.len());
    }

    #[test]
    fn an_answer_of_megabytes_arrives_whole() {
        let site = Site::start(LONG);
        let answer = site.ask("{\"command\":\"nodes\"}\n");
        assert!(answer.len() > 20 << 20 && answer.ends_with("]}}\n"), "{} bytes", answer.len());
    }

    #[test]
    fn of_more_than_eight_clients_the_one_that_keeps_us_waiting_longest_makes_room() {
        let site = Site::start(PATIENCE);
        let mut clients: Vec<_> = (0..CLIENTS_MAX).map(|_| site.connect()).collect();
        // The last one is asked first, so that all are in when the first one is.
        for at in [CLIENTS_MAX - 1, 0] {
            clients[at].get_mut().write_all(DISCOVER.as_bytes()).unwrap();
            assert_eq!(read(&mut clients[at]), DONE);
        }
        assert_eq!(site.ask(DISCOVER), DONE);
        assert_eq!(read(&mut clients.remove(1)), "");
        for client in &mut clients {
            client.get_mut().write_all(DISCOVER.as_bytes()).unwrap();
            assert_eq!(read(client), DONE);
        }
    }

    #[test]
    fn more_clients_than_there_are_places_all_get_their_whole_answers() {
        let site = Site::start(LONG);
        let ends = thread::scope(|scope| {
            let ask = || {
                let answer = site.ask("{\"command\":\"nodes\"}\n");
                answer[answer.len().saturating_sub(60)..].to_owned()
            };
            let clients: Vec<_> = (0..3 * CLIENTS_MAX).map(|_| scope.spawn(ask)).collect();
            clients.into_iter().map(|client| client.join().unwrap()).collect::<Vec<_>>()
        });
        assert!(ends.iter().all(|end| end.ends_with("]}}\n")), "{ends:?}");
    }

    #[test]
    fn hung_clients_lock_nobody_out() {
        let site = Site::start(Duration::from_secs(2));
        let mut hung = Vec::new();
        for number in 0..5 * CLIENTS_MAX {
            let mut client = site.connect();
            // One half says nothing, the other takes nothing.
            if number % 2 == 0 {
                let _ = client.get_mut().write_all(b"{\"command\":\"nodes\"}\n");
            }
            hung.push(client);
            assert_eq!(site.ask(DISCOVER), DONE);
        }
    }

    #[test]
    fn whoever_comes_last_of_a_crowd_does_not_wait_for_the_waits_of_the_others() {
        let patience = Duration::from_secs(2);
        let mut site = Site::start(patience);
        let mut busy: Vec<_> = (0..CLIENTS_MAX).map(|_| site.connect()).collect();
        for client in &mut busy {
            client.get_mut().write_all(b"{\"command\":\"retry\",\"all\":true}\n").unwrap();
            site.begun.recv().unwrap();
        }
        let mut crowd: Vec<_> = (0..NEWCOMERS_MAX).map(|_| site.connect()).collect();
        let last = crowd.last_mut().unwrap();
        // One after the other would take three times as long.
        let all = patience / WAIT_PART * NEWCOMERS_MAX as u32;
        last.get_ref().set_read_timeout(Some(all / 3)).unwrap();
        assert_eq!(read(last), "{\"ok\":false,\"error\":\"too many clients\"}\n");
        drop(site.go_on.take());
    }

    #[test]
    fn a_client_whose_command_is_followed_keeps_its_place() {
        // It is turned away after half of that.
        let mut site = Site::start(Duration::from_secs(2));
        let mut busy: Vec<_> = (0..CLIENTS_MAX).map(|_| site.connect()).collect();
        for client in &mut busy {
            client.get_mut().write_all(b"{\"command\":\"retry\",\"all\":true}\n").unwrap();
            site.begun.recv().unwrap();
        }
        assert_eq!(site.ask(DISCOVER), "{\"ok\":false,\"error\":\"too many clients\"}\n");
        drop(site.go_on.take());
        for client in &mut busy {
            assert!(read(client).starts_with("{\"ok\":true"));
        }
    }

    #[test]
    fn its_end_closes_every_client_and_takes_the_file_away() {
        let mut site = Site::start(LONG);
        let mut silent = site.connect();
        let mut hung = site.connect();
        hung.get_mut().write_all(b"{\"command\":\"nodes\"}\n").unwrap();
        assert!(!hung.fill_buf().unwrap().is_empty());
        drop(site.running.take());
        assert_eq!(read(&mut silent), "");
        assert!(!site.path().exists());
    }

    #[test]
    fn only_owner_and_group_may_open_it() {
        let site = Site::start(LONG);
        let mode = fs::metadata(site.path()).unwrap().mode();
        assert_eq!(mode & 0o777, MODE);
    }

    #[test]
    fn the_file_of_a_dead_daemon_is_replaced_and_that_of_a_live_one_is_an_error() {
        let site = Site::folder();
        drop(UnixListener::bind(site.path()).unwrap());
        assert!(site.path().exists(), "nobody listens, the file is there");
        let socket = Socket::bind(&site.path()).unwrap();
        let error = Socket::bind(&site.path()).unwrap_err();
        let source = std::error::Error::source(&error).unwrap().to_string();
        assert_eq!(source, "another process listens there");
        assert!(error.to_string().ends_with("admin.sock"), "{error}");
        assert!(site.path().exists());
        drop(socket);
        assert!(!site.path().exists());
        fs::write(site.path(), "mine").unwrap();
        assert!(Socket::bind(&site.path()).is_err());
        assert_eq!(fs::read_to_string(site.path()).unwrap(), "mine", "it is no socket of anybody");
        assert!(Socket::bind(&site.folder.join("nowhere/admin.sock")).is_err());
        assert!(Socket::bind(&site.folder.join("x".repeat(200))).is_err());
    }

    #[test]
    fn a_pipe_in_the_place_of_its_folder_is_not_waited_for() {
        let site = Site::folder();
        let pipe = site.folder.join("pipe");
        make_pipe(&pipe);
        let error = Socket::bind(&pipe.join("admin.sock")).unwrap_err();
        let source = std::error::Error::source(&error).unwrap().to_string();
        assert!(source.starts_with("Not a directory"), "{source}");
    }

    #[test]
    fn a_file_that_took_its_place_stays() {
        let mut site = Site::start(LONG);
        fs::remove_file(site.path()).unwrap();
        let other = Socket::bind(&site.path()).unwrap();
        drop(site.running.take());
        assert!(site.path().exists());
        drop(other);
    }
}
