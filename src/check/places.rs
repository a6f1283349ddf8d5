//! Files we write, the monitor port and the admin socket: whether we could use them. Nothing is made or written.

use std::fs::{self, OpenOptions};
use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream};
use std::os::unix::fs::{FileTypeExt as _, OpenOptionsExt as _};
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::fs::{Access, AtFlags, CWD, OFlags, accessat};
use rustix::net::SocketAddrUnix;

use crate::config::{AdminSocket, Config, LogTarget};
use crate::errors::chain;
use crate::ops::http::Monitor;

use super::{Findings, Kind};

/// How long whoever listens on our port may take to say who it is.
const PATIENCE: Duration = Duration::from_secs(3);

/// Bytes read of what it says.
const ANSWER_MAX: u64 = 4 << 20;

/// `identity` is ours, if we know it.
pub(super) fn check(
    config: &Config,
    pid: Option<&Path>,
    identity: Option<&str>,
    findings: &mut Findings,
) {
    if let LogTarget::File(path) = &config.logfile {
        check_file("logfile", path, findings);
    }
    if let Some(path) = &config.audit_log {
        check_file("audit_log", path, findings);
    }
    if let Some(path) = pid {
        check_pid(path, findings);
    }
    if let AdminSocket::At(path) = &config.admin_socket
        && let Err(error) = check_socket(path)
    {
        findings.error(kind(&error), format!("admin_socket: {}: {error}", path.display()));
    }
    check_port(config, identity, findings);
}

pub(super) fn check_pid(path: &Path, findings: &mut Findings) {
    check_file("--pid", path, findings);
}

/// Whether a file could be written.
fn check_file(setting: &str, path: &Path, findings: &mut Findings) {
    // What our own streams are says nothing about the daemon's.
    if path.starts_with("/dev") || path.starts_with("/proc") {
        return;
    }
    let shown = path.display();
    match writable(path) {
        Ok(kind) if kind.is_fifo() => {
            findings.warn(format!(
                "{setting}: {shown} is a pipe, and the daemon starts only once somebody reads it"
            ));
        }
        Ok(_) => {}
        Err(error) => findings.error(kind(&error), format!("{setting}: {shown}: {error}")),
    }
}

/// What kind of file it is, or would be.
fn writable(path: &Path) -> io::Result<fs::FileType> {
    match fs::metadata(path) {
        Ok(metadata) if metadata.file_type().is_fifo() => {
            accessat(CWD, path, Access::WRITE_OK, AtFlags::EACCESS)?;
            Ok(metadata.file_type())
        }
        Ok(metadata) => {
            let flags = OFlags::NONBLOCK.bits() as i32;
            OpenOptions::new().append(true).custom_flags(flags).open(path)?;
            Ok(metadata.file_type())
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let folder = folder_of(path);
            let access = Access::WRITE_OK | Access::EXEC_OK;
            accessat(CWD, folder, access, AtFlags::EACCESS)
                .map_err(|error| in_folder(folder, error.into()))?;
            let folder = fs::metadata(folder)?;
            match folder.is_dir() {
                true => Ok(folder.file_type()),
                false => Err(io::ErrorKind::NotADirectory.into()),
            }
        }
        Err(error) => Err(error),
    }
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

fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

fn in_folder(folder: &Path, error: io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("folder {}: {error}", folder.display()))
}

/// Whether the port is free, or a daemon with our identity has it: that one is ours, and its successor will get the port.
fn check_port(config: &Config, identity: Option<&str>, findings: &mut Findings) {
    if config.monitor_port == 0 {
        return;
    }
    let Err(error) = Monitor::bind(config.monitor_address, config.monitor_port) else { return };
    if error.is_in_use()
        && identity
            .is_some_and(|identity| serves(config.monitor_address, config.monitor_port, identity))
    {
        return;
    }
    let kind = if error.is_denied() { Kind::NotPermitted } else { Kind::Surroundings };
    findings.error(kind, format!("monitor_port: {}", chain(&error)));
}

/// Whether a daemon that calls itself `identity` listens there.
fn serves(address: IpAddr, port: u16, identity: &str) -> bool {
    let address = if address.is_unspecified() { Ipv4Addr::LOCALHOST.into() } else { address };
    let Ok(answer) = status(SocketAddr::new(address, port)) else { return false };
    let name = serde_json::json!(identity);
    answer.contains(&format!("\"identity\":{name},"))
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
