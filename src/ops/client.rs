//! The other end of the admin socket: sends one command and shows the answer.

use std::fmt::{self, Write as _};
use std::fs;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::iter;
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{self, AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use serde::Deserialize;
use serde_json::value::RawValue;

use crate::errors::without_middle;
use crate::ops::command::{Change, Command, Reload};
use crate::ops::socket::left;
use crate::ops::status::{Listed, Nodes, Peer, Peers, Query, Status, Which};
use crate::ops::text::{Count, Number, Plain, Span};

/// How long the daemon may take for an answer, if nobody says otherwise.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// Longest answer, in bytes: ten times what the most nodes take.
const ANSWER_MAX: u64 = 64 << 20;

/// Stuck nodes and outcomes that `status` shows; `nodes` and the page have all.
const SHOWN: usize = 10;

/// Why there is no answer.
#[derive(Debug)]
pub enum Error {
    /// Nobody listens there.
    Unreachable {
        /// The socket.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The daemon broke off, or took too long.
    Broken(io::Error),
    /// The daemon said something we don't understand.
    Garbled(serde_json::Error),
    /// The daemon did not follow the command; its own words.
    Refused(String),
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Unreachable { path, source }
                if source.kind() == io::ErrorKind::PermissionDenied =>
            {
                let group = group_of(path).map_or_else(String::new, |name| format!(", {name}"));
                write!(
                    f,
                    "may not open {}: run as root or as a member of the group that owns it{group}",
                    path.display()
                )
            }
            Error::Unreachable { path, .. } => {
                write!(f, "no daemon answers on {}", path.display())
            }
            Error::Broken(_) => f.write_str("the daemon gave no whole answer"),
            Error::Garbled(_) => f.write_str("the daemon's answer makes no sense"),
            Error::Refused(text) => {
                let mut lines = text.lines();
                Plain(lines.next().unwrap_or_default()).fmt(f)?;
                lines.try_for_each(|line| write!(f, "\n{}", Plain(line)))
            }
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Error::Unreachable { source, .. } | Error::Broken(source) => Some(source),
            Error::Garbled(source) => Some(source),
            Error::Refused(_) => None,
        }
    }
}

/// The group that a file belongs to, if the machine's own list names it.
fn group_of(path: &Path) -> Option<String> {
    let id = fs::metadata(path).ok()?.gid().to_string();
    let groups = fs::read_to_string("/etc/group").ok()?;
    groups.lines().find_map(|line| {
        let mut fields = line.split(':');
        let name = fields.next()?;
        (fields.nth(1) == Some(id.as_str())).then(|| Plain(name).to_string())
    })
}

/// Has the daemon at `path` follow `command`, and returns its answer: the JSON as it came, or as text for people.
///
/// # Errors
///
/// [`Error`]; a daemon that refused has changed nothing.
pub fn ask(path: &Path, command: &Command, as_json: bool) -> Result<String, Error> {
    ask_within(PATIENCE, path, command, as_json)
}

/// The same for those who have no more time than `patience` for all of it.
///
/// # Errors
///
/// As [`ask`].
pub fn ask_within(
    patience: Duration,
    path: &Path,
    command: &Command,
    as_json: bool,
) -> Result<String, Error> {
    let line = exchange(path, command, patience)?;
    let answer: Reply<'_> = serde_json::from_str(&line).map_err(Error::Garbled)?;
    if let Some(error) = answer.error {
        return Err(Error::Refused(error));
    }
    let result = answer.result.map_or("null", RawValue::get);
    if as_json {
        return Ok(format!("{result}\n"));
    }
    let text = match command {
        Command::Status {} => serde_json::from_str(result).map(|status| status_text(&status)),
        Command::Nodes(query) => {
            // Who names one wants to know all of it.
            let is_whole = !query.name.is_empty();
            serde_json::from_str(result).map(|nodes: Nodes| match nodes.nodes.is_empty() {
                true => nobody_text(query) + &idle_text(path),
                false => nodes_text(&nodes, is_whole),
            })
        }
        Command::Reload {} => serde_json::from_str(result).map(|reload| reload_text(&reload)),
        _ => serde_json::from_str(result)
            .map(|Change { message, .. }| format!("{}\n", Plain(&message))),
    };
    text.map_err(Error::Garbled)
}

#[derive(Deserialize)]
struct Reply<'a> {
    #[serde(borrow)]
    result: Option<&'a RawValue>,
    error: Option<String>,
}

fn exchange(path: &Path, command: &Command, patience: Duration) -> Result<String, Error> {
    let deadline = Instant::now() + patience;
    let broken = |error: io::Error| {
        Error::Broken(match error.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
                let text = format!("it took more than {}", Span::of(patience));
                io::Error::new(io::ErrorKind::TimedOut, text)
            }
            _ => error,
        })
    };
    let mut stream = connect(path, patience).map_err(|source| match source.kind() {
        // Somebody listens, and lets nobody in.
        io::ErrorKind::WouldBlock => broken(source),
        _ => Error::Unreachable { path: path.to_path_buf(), source },
    })?;
    let mut line = serde_json::to_string(command).map_err(Error::Garbled)?;
    line.push('\n');
    stream.write_all(line.as_bytes()).map_err(broken)?;
    let mut answer = String::new();
    let until = Until { stream, deadline };
    BufReader::new(until).take(ANSWER_MAX).read_line(&mut answer).map_err(broken)?;
    match answer.ends_with('\n') {
        true => Ok(answer),
        false => Err(Error::Broken(io::ErrorKind::UnexpectedEof.into())),
    }
}

/// Connects, and gives each write the same time. A daemon that hangs lets only so many wait; the next one would for ever.
fn connect(path: &Path, patience: Duration) -> io::Result<UnixStream> {
    let address = SocketAddrUnix::new(path)?;
    let flags = SocketFlags::CLOEXEC;
    let socket = net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    // None at all is for ever to the system.
    let patience = patience.max(Duration::from_millis(1));
    set_socket_timeout(&socket, Timeout::Send, Some(patience))?;
    net::connect(&socket, &address)?;
    Ok(socket.into())
}

/// A stream that gives until the deadline.
struct Until {
    stream: UnixStream,
    deadline: Instant,
}

impl Read for Until {
    fn read(&mut self, room: &mut [u8]) -> io::Result<usize> {
        self.stream.set_read_timeout(Some(left(self.deadline)?))?;
        self.stream.read(room)
    }
}

/// What a reload has changed, for a terminal.
fn reload_text(reload: &Reload) -> String {
    let warnings = reload.warnings.iter().map(|warning| format!("warning: {}\n", Plain(warning)));
    let message = format!("{}\n", Plain(&reload.message));
    iter::once(message).chain(warnings).collect()
}

/// What the daemon does, for a terminal.
fn status_text(status: &Status) -> String {
    let mut out = String::new();
    // Writing to memory can't fail.
    let _ = write_status(&mut out, status);
    out
}

fn write_status(out: &mut String, status: &Status) -> fmt::Result {
    let Status { identity, site, version, counts, broker, discovery, helper, .. } = status;
    writeln!(out, "State       {} for {}", status.state.words(), Span(status.state_secs))?;
    // What the state says need not be said again.
    let rest = status.problems.iter().filter(|problem| *problem != status.state.words());
    for problem in rest {
        // That it stands by, or was paused, is as it should be.
        let is_why = status.closed_by.iter().any(|closed| closed.text == *problem);
        let label = if is_why { "Why" } else { "Problem" };
        writeln!(out, "{label:<11} {}", Plain(problem))?;
    }
    write!(out, "Daemon      {}, version {}", Plain(identity), Plain(version))?;
    if !site.is_empty() {
        write!(out, ", site {}", Plain(site))?;
    }
    writeln!(out, ", process {}, up {}", status.pid, Span(status.uptime_secs))?;
    writeln!(out, "Settings    read {} ago", Span(status.settings.read_secs))?;
    match &broker.server {
        Some(server) => {
            writeln!(out, "Broker      {} for {}", Plain(server), Span(broker.for_secs))?
        }
        None => writeln!(out, "Broker      none for {}", Span(broker.for_secs))?,
    }
    if let Some(error) = &broker.last_error {
        writeln!(out, "            {} ago: {}", Span(error.ago_secs), Plain(&error.text))?;
    }
    if let Some(words) = status.election.words() {
        writeln!(out, "Election    {words}")?;
    }
    if let Some(Peers { part, share, others }) = &status.peers {
        writeln!(out, "Share       {}: {:.0} %", part.words(), share * 100.0)?;
        for Peer { identity, role, heard_secs, .. } in others {
            let (identity, role) = (Plain(identity), Plain(role));
            writeln!(out, "            {identity}, {role}, heard {} ago", Span(*heard_secs))?;
        }
    }
    match discovery.last_secs {
        Some(ago) => writeln!(
            out,
            "Discovery   {} ago, {} answered; every {}",
            Span(ago),
            discovery.replies,
            Span(discovery.interval_secs)
        )?,
        None => writeln!(
            out,
            "Discovery   none has succeeded; every {}",
            Span(discovery.interval_secs)
        )?,
    }
    writeln!(out, "Helper      {}, {} failed", Count(helper.runs, "run"), Number(helper.errors))?;
    if let Some(failure) = &helper.last_failure {
        writeln!(out, "            {} ago: {}", Span(failure.ago_secs), Plain(&failure.text))?;
    }
    for token in &status.tokens {
        let (token, expires) = (Plain(&token.token), Plain(&token.expires));
        writeln!(out, "Token       {token} expires {expires}")?;
    }
    let number = |count: usize| Number(count as u64);
    writeln!(
        out,
        "Nodes       {} queued ({} asked, {} ready), {} working, {} to be retried, {} settling, {} denied",
        number(counts.queued),
        number(counts.asked),
        number(counts.ready),
        number(counts.working),
        number(counts.waiting),
        number(counts.settling),
        number(counts.denied)
    )?;
    for rate in &status.rates {
        writeln!(
            out,
            "Last {:>2} min {:.1} provisioned and {:.1} errors a minute",
            rate.minutes, rate.provisioned_per_minute, rate.errors_per_minute
        )?;
    }
    writeln!(
        out,
        "In all      {} provisioned, {}",
        Number(status.totals.provisioned),
        Count(status.totals.errors, "error")
    )?;
    if !status.workers.is_empty() {
        let rows = status.workers.iter().map(|worker| {
            let step = worker.step.clone().unwrap_or_else(|| "begins".into());
            [
                worker.node.clone(),
                step,
                Span(worker.step_secs).to_string(),
                Span(worker.for_secs).to_string(),
            ]
        });
        out.push('\n');
        table(out, ["WORKING ON", "STEP", "FOR", "IN ALL"], rows)?;
    }
    if !status.outcomes.is_empty() {
        let rows = status.outcomes.iter().take(SHOWN).map(|ended| {
            [
                format!("{} ago", Span(ended.ago_secs)),
                ended.node.clone(),
                ended.outcome.clone(),
                ended.reason.clone(),
            ]
        });
        out.push('\n');
        table(out, ["LAST OUTCOMES", "NODE", "OUTCOME", "WHY"], rows)?;
    }
    Ok(())
}

/// Why a daemon that knows no node may be none the wiser; nothing if it does its work, or does not say.
fn idle_text(path: &Path) -> String {
    let answer = ask(path, &Command::Status {}, true);
    let status = answer.ok().and_then(|answer| serde_json::from_str::<Status>(&answer).ok());
    let closed_by = status.map(|status| status.closed_by).unwrap_or_default();
    let why: Vec<&str> = closed_by.iter().map(|closed| closed.text.as_str()).collect();
    if why.is_empty() {
        return String::new();
    }
    format!("The daemon begins nothing: {}.\n", Plain(&why.join(", ")))
}

/// That there is no node as it was asked for, for a terminal.
fn nobody_text(query: &Query) -> String {
    let named = match query.name.as_str() {
        "" => String::new(),
        name => format!(" with \"{}\" in its name", Plain(name)),
    };
    let is = match query.state {
        Which::All => "is known",
        Which::Stuck => "is stuck",
        Which::Working => "is being worked on",
        Which::Queued => "is queued",
        Which::Waiting => "waits to be retried",
        Which::Settling => "is settling",
        Which::Denied => "is denied",
    };
    format!("No node{named} {is}.\n")
}

/// Nodes, for a terminal; their reasons on a line each, or whole.
fn nodes_text(nodes: &Nodes, is_whole: bool) -> String {
    let mut out = String::new();
    let rows = nodes.nodes.iter().map(|node| {
        let Listed { node, state, for_secs, next_secs, failures, reason, .. } = node;
        let time = match (for_secs, next_secs) {
            (Some(since), _) => format!("for {}", Span(*since)),
            (None, Some(0.0)) => "when seen".to_owned(),
            (None, Some(left)) if *state == Which::Settling.word() => {
                format!("for another {}", Span(*left))
            }
            (None, Some(next)) => format!("in {}", Span(*next)),
            (None, None) => String::new(),
        };
        let reason = if is_whole { reason.clone() } else { without_middle(reason) };
        [node.clone(), state.clone(), time, failures.to_string(), reason]
    });
    // Writing to memory can't fail.
    let _ = table(&mut out, ["NODE", "STATE", "TIME", "FAILURES", "WHY"], rows);
    if nodes.nodes.len() < nodes.matching {
        let (shown, all) = (Number(nodes.nodes.len() as u64), Number(nodes.matching as u64));
        let _ = writeln!(out, "The first {shown} of {all}.");
    }
    out
}

/// Columns as wide as what stands in them; the last one ends where it ends.
fn table<const N: usize>(
    out: &mut String,
    titles: [&str; N],
    rows: impl Iterator<Item = [String; N]>,
) -> fmt::Result {
    let rows: Vec<[String; N]> = rows.map(|row| row.map(|cell| Plain(&cell).to_string())).collect();
    let mut widths = titles.map(|title| title.chars().count());
    for row in &rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = cell.chars().count().max(*width);
        }
    }
    let titles = titles.map(str::to_owned);
    for row in std::iter::once(&titles).chain(&rows) {
        let mut line = String::new();
        for (width, cell) in widths.iter().zip(row) {
            write!(line, "{cell:<width$}  ")?;
        }
        writeln!(out, "{}", line.trim_end())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::env;
    use std::os::fd::OwnedFd;

    use super::*;
    use crate::errors::chain;

    /// A daemon that lets one client wait, and does nothing else.
    struct Hung {
        path: PathBuf,
        _listener: OwnedFd,
    }

    impl Hung {
        fn new() -> Hung {
            let path = env::temp_dir().join(format!("provisioner-hung-{}", fastrand::u64(..)));
            let (family, kind) = (AddressFamily::UNIX, SocketType::STREAM);
            let listener = net::socket_with(family, kind, SocketFlags::CLOEXEC, None).unwrap();
            net::bind(&listener, &SocketAddrUnix::new(&path).unwrap()).unwrap();
            net::listen(&listener, 0).unwrap();
            Hung { path, _listener: listener }
        }
    }

    impl Drop for Hung {
        fn drop(&mut self) {
            let _ = fs::remove_file(&self.path);
        }
    }

    #[test]
    fn whoever_may_not_open_the_socket_is_told_who_may() {
        // The files of the system belong to the first group.
        let path = PathBuf::from("/etc/group");
        let error = Error::Unreachable { path, source: io::ErrorKind::PermissionDenied.into() };
        let text = error.to_string();
        let expected =
            "may not open /etc/group: run as root or as a member of the group that owns it";
        assert_eq!(text, format!("{expected}, root"));
        let path = PathBuf::from("/nowhere/admin.sock");
        let error = Error::Unreachable { path, source: io::ErrorKind::PermissionDenied.into() };
        assert!(error.to_string().ends_with("the group that owns it"), "{error}");
    }

    #[test]
    fn a_daemon_that_hangs_is_given_up_whether_it_lets_us_in_or_not() {
        let daemon = Hung::new();
        for _ in 0..3 {
            let patience = Duration::from_millis(100);
            let error = ask_within(patience, &daemon.path, &Command::Status {}, false).unwrap_err();
            assert_eq!(chain(&error), "the daemon gave no whole answer: it took more than 0.1 s");
        }
    }
}
