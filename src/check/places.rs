//! Files we write, the monitor port and the admin socket: whether we could use them. Nothing is made or written.

use std::fmt;
use std::fs::{self, FileType};
use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream};
use std::os::unix::fs::FileTypeExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{Access, AtFlags, CWD, accessat};
use rustix::net::SocketAddrUnix;
use serde::Deserialize;

use crate::appending;
use crate::cli::PROGRAM;
use crate::config::{AdminSocket, Config, Places, VerifyKeySource};
use crate::errors::chain;
use crate::ops::client;
use crate::ops::command::Command;
use crate::ops::http::{BindError, Monitor};
use crate::ops::socket;
use crate::pidfile;
use crate::protocol::Identity;

use super::{Findings, Kind};

/// How long whoever listens on our port or admin socket may take to say who it is.
const PATIENCE: Duration = Duration::from_secs(3);

/// Links in a row, as the system follows them.
const LINKS_MAX: usize = 40;

/// Bytes read of what it says.
const ANSWER_MAX: u64 = 4 << 20;

/// `identity` is ours, if we know it.
pub(super) fn check(
    config: &Config,
    places: &Places,
    pid: Option<&Path>,
    identity: Option<&Identity>,
    findings: &mut Findings,
) {
    let files = [("logfile", config.logfile.path()), ("audit_log", config.audit_log.as_deref())];
    for (setting, path) in files {
        let Some(path) = path else { continue };
        let shown = path.display();
        match writable(path, appending::fits) {
            Ok(Some(there)) if there.is_fifo() => {
                let text = format!(
                    "{shown} is a pipe, and the daemon only starts while somebody reads it"
                );
                findings.warn(places.finding(setting, text).to_string());
            }
            Ok(_) => {}
            Err(error) => {
                let text = format!("{shown}: {error}");
                findings.error(kind(&error), places.finding(setting, text).to_string());
            }
        }
    }
    if let Some(path) = pid {
        check_pid(path, findings);
    }
    warn_of_relative_paths(config, places, findings);
    warn_of_shared_files(config, places, pid, findings);
    if let AdminSocket::At(path) = &config.admin_socket
        && let Err(error) = check_socket(path)
    {
        let text = format!("{}: {error}", path.display());
        findings.error(kind(&error), places.finding("admin_socket", text).to_string());
    }
    check_port(config, places, pid, identity, findings);
}

/// Where a daemon starts is up to whoever starts it: a service manager does so in `/`.
fn warn_of_relative_paths(config: &Config, places: &Places, findings: &mut Findings) {
    for (setting, path) in files(config).into_iter().filter(|(_, path)| path.is_relative()) {
        let shown = path.display();
        let text = match path.starts_with("~") {
            true => format!("{shown}: `~` stands for nothing here; write the whole path"),
            false => {
                format!("{shown} depends on where the daemon is started; write the whole path")
            }
        };
        findings.warn(places.finding(setting, text).to_string());
    }
}

/// What we write goes over what others read or write there.
fn warn_of_shared_files(
    config: &Config,
    places: &Places,
    pid: Option<&Path>,
    findings: &mut Findings,
) {
    let mut known = places.files();
    known.extend(files(config));
    known.extend(pid.map(|path| ("--pid", path)));
    let real = |path: &Path| fs::canonicalize(path).or_else(|_| std::path::absolute(path)).ok();
    let is_written = |setting: &str| matches!(setting, "logfile" | "audit_log" | "--pid");
    for (at, (setting, path)) in known.iter().enumerate() {
        // There is one of each device.
        if path.starts_with("/dev") || path.starts_with("/proc") {
            continue;
        }
        let others =
            known[..at].iter().filter(|(other, _)| is_written(setting) || is_written(other));
        for (other, _) in others.filter(|(_, other)| real(other) == real(path)) {
            let text = format!("{} is the file of {other}, too", path.display());
            findings.warn(places.finding(setting, text).to_string());
        }
    }
}

/// Files that settings name, but for those that are made and read by others.
fn files(config: &Config) -> Vec<(&'static str, &Path)> {
    let verify = match &config.jwt_verify_cert {
        Some(VerifyKeySource::File(path)) if config.features.jwt => Some(path.as_path()),
        _ => None,
    };
    let socket = match &config.admin_socket {
        AdminSocket::At(path) => Some(path.as_path()),
        AdminSocket::Usual | AdminSocket::Off => None,
    };
    let signing = config.signing.as_ref();
    let all = [
        ("helper", Some(config.helper.program()).filter(|_| !config.helper.is_nothing())),
        ("logfile", config.logfile.path()),
        ("audit_log", config.audit_log.as_deref()),
        ("admin_socket", socket),
        ("jwt_verify_cert", verify),
        ("jwt_signing_key", signing.map(|files| files.key.as_path())),
        ("jwt_signing_token", signing.and_then(|files| files.token.as_deref())),
    ];
    all.into_iter().filter_map(|(setting, path)| Some((setting, path?))).collect()
}

pub(super) fn check_pid(path: &Path, findings: &mut Findings) {
    if let Err(error) = writable(path, pidfile::fits) {
        findings.error(kind(&error), format!("--pid: {}: {error}", path.display()));
    }
}

/// Whether a file could be written, and what is there, if anything.
fn writable(
    path: &Path,
    fits: impl FnOnce(FileType) -> io::Result<()>,
) -> io::Result<Option<FileType>> {
    // What our own streams are says nothing about the daemon's.
    if is_stream(path) {
        return Ok(None);
    }
    match fs::metadata(path) {
        // It is not opened: whoever reads a pipe would see its end.
        Ok(there) => {
            let there = there.file_type();
            fits(there)?;
            accessat(CWD, path, Access::WRITE_OK, AtFlags::EACCESS)?;
            Ok(Some(there))
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            // It is made where its links end.
            let path = &end_of_links(path);
            let folder = folder_of(path);
            let access = Access::WRITE_OK | Access::EXEC_OK;
            accessat(CWD, folder, access, AtFlags::EACCESS)
                .map_err(|error| in_folder(folder, error.into()))?;
            match fs::metadata(folder)?.is_dir() {
                true => Ok(None),
                false => Err(io::ErrorKind::NotADirectory.into()),
            }
        }
        Err(error) => Err(error),
    }
}

/// Whether each process has another file under this name: one that it was started with.
fn is_stream(path: &Path) -> bool {
    ["/dev/stdin", "/dev/stdout", "/dev/stderr", "/dev/fd", "/proc/self", "/proc/thread-self"]
        .into_iter()
        .any(|stream| path.starts_with(stream))
}

/// Whether a socket could be made there; one that a daemon listens on is left alone.
fn check_socket(path: &Path) -> io::Result<()> {
    SocketAddrUnix::new(path).map_err(|error| {
        io::Error::new(io::ErrorKind::InvalidInput, format!("no name for a socket: {error}"))
    })?;
    let folder = folder_of(path);
    // It is locked for a moment, and therefore opened.
    let access = Access::READ_OK | Access::WRITE_OK | Access::EXEC_OK;
    accessat(CWD, folder, access, AtFlags::EACCESS)
        .map_err(|error| in_folder(folder, error.into()))?;
    match fs::symlink_metadata(path) {
        Ok(metadata) if !metadata.file_type().is_socket() => {
            Err(io::Error::new(io::ErrorKind::AlreadyExists, "there is a file that is no socket"))
        }
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        Ok(_) | Err(_) => Ok(()),
    }
}

/// What a link stands for, whether it is there or not.
fn end_of_links(path: &Path) -> PathBuf {
    let mut path = path.to_path_buf();
    for _ in 0..LINKS_MAX {
        let Ok(to) = fs::read_link(&path) else { break };
        path = folder_of(&path).join(to);
    }
    path
}

fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

fn in_folder(folder: &Path, error: io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("folder {}: {error}", folder.display()))
}

/// Whether the port is free, or a daemon of ours has it: its successor will get the port.
fn check_port(
    config: &Config,
    places: &Places,
    pid: Option<&Path>,
    identity: Option<&Identity>,
    findings: &mut Findings,
) {
    if config.monitor_port == 0 {
        return;
    }
    let Err(error) = listen(config, places) else { return };
    if error.holder.as_ref().is_some_and(|holder| holder.is_ours(config, pid, identity)) {
        return;
    }
    let kind = if error.is_denied() { Kind::NotPermitted } else { Kind::Surroundings };
    findings.error(kind, chain(&error));
}

/// Listens at the monitor port that the settings name.
///
/// # Errors
///
/// [`PortError`].
pub fn listen(config: &Config, places: &Places) -> Result<Monitor, PortError> {
    Monitor::bind(config.monitor_address, config.monitor_port).map_err(|bind| {
        let setting = if bind.is_elsewhere() { "monitor_address" } else { "monitor_port" };
        let holder = bind
            .is_in_use()
            .then(|| Holder::of(config.monitor_address, config.monitor_port))
            .flatten();
        let mut text = chain(&bind);
        if let Some(Holder { identity, pid, .. }) = &holder {
            text += &format!(" by a {PROGRAM} that calls itself {identity}, process {pid}");
        } else if bind.is_in_use() {
            text += "; `ss -ltnp` shows who listens there";
        }
        PortError {
            text: places.finding(setting, text).to_string(),
            holder: holder.map(Box::new),
            bind,
        }
    })
}

/// Why we can't listen at the monitor port: where it is set, what is wrong, and who has it if that is a daemon like ours.
#[derive(Debug)]
pub struct PortError {
    text: String,
    holder: Option<Box<Holder>>,
    bind: BindError,
}

impl PortError {
    /// Whether we may not listen there.
    pub fn is_denied(&self) -> bool {
        self.bind.is_denied()
    }
}

impl fmt::Display for PortError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

// What the system said is in the text, where who has the port comes after it.
impl std::error::Error for PortError {}

/// A daemon like ours that has the port.
#[derive(Debug, Deserialize)]
struct Holder {
    identity: String,
    instance: String,
    pid: u32,
}

impl Holder {
    fn of(address: IpAddr, port: u16) -> Option<Holder> {
        let address = if address.is_unspecified() { Ipv4Addr::LOCALHOST.into() } else { address };
        let answer = status(SocketAddr::new(address, port)).ok()?;
        let (_, body) = answer.split_once("\r\n\r\n")?;
        serde_json::from_str(body).ok()
    }

    /// Whether it is the one that these settings are for: by its name, which may be about to change; by the number in the pid
    /// file; or since it is the one at the admin socket.
    fn is_ours(&self, config: &Config, pid: Option<&Path>, identity: Option<&Identity>) -> bool {
        // Where our own name can't be made out, that has been said, and this may follow from it.
        let is_named = identity.is_none_or(|ours| ours.as_str() == self.identity);
        is_named
            || pid.and_then(pidfile::read).is_some_and(|pid| pid == self.pid)
            || self.is_at_socket(&config.admin_socket)
    }

    fn is_at_socket(&self, socket: &AdminSocket) -> bool {
        let answer = socket::path_of(socket)
            .and_then(|path| client::ask_within(PATIENCE, path, &Command::Status {}, true).ok());
        let there = answer.and_then(|answer| serde_json::from_str::<Holder>(&answer).ok());
        there.is_some_and(|there| there.instance == self.instance)
    }
}

/// What is said there about who it is.
fn status(address: SocketAddr) -> io::Result<String> {
    let deadline = Instant::now() + PATIENCE;
    let mut stream = TcpStream::connect_timeout(&address, PATIENCE)?;
    stream.set_write_timeout(Some(PATIENCE))?;
    stream.write_all(b"GET /status.json?limit=1 HTTP/1.0\r\n\r\n")?;
    let (mut answer, mut piece) = (Vec::new(), [0; 4096]);
    while (answer.len() as u64) < ANSWER_MAX {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        stream.set_read_timeout(Some(left))?;
        match stream.read(&mut piece)? {
            0 => break,
            len => answer.extend_from_slice(&piece[..len]),
        }
    }
    Ok(String::from_utf8_lossy(&answer).into_owned())
}

fn kind(error: &io::Error) -> Kind {
    match error.kind() {
        io::ErrorKind::PermissionDenied => Kind::NotPermitted,
        _ => Kind::Configuration,
    }
}
