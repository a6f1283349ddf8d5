//! From an address to a TCP connection, within a time, and ended at once by an abort.

use std::io;
use std::net::{IpAddr, Shutdown, SocketAddr, TcpStream, ToSocketAddrs};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, at, bounded, select_biased};
use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::sockopt::{set_socket_linger, socket_error};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};

use crate::shutdown::Never;
use crate::transport::address::ServerAddress;

/// Most addresses of one name that are tried.
const ADDRESSES_MAX: usize = 8;
/// Most look-ups under way. The system's resolver can't be interrupted, so those nobody waits for any more may pile up.
const LOOKUPS_MAX: usize = 4;

/// The one socket in use, so that whoever aborts can end all that waits for it.
#[derive(Debug, Default)]
pub(super) struct Slot {
    held: Mutex<Held>,
}

#[derive(Debug, Default)]
struct Held {
    aborted: bool,
    socket: Option<Arc<TcpStream>>,
}

impl Slot {
    /// Takes the place of the socket before.
    fn hold(&self, socket: &Arc<TcpStream>) {
        self.held.lock().socket = Some(Arc::clone(socket));
    }

    fn check(&self) -> io::Result<()> {
        if self.held.lock().aborted { Err(aborted()) } else { Ok(()) }
    }

    /// Lets go of the socket, which closes once nobody else holds it.
    pub(super) fn release(&self) {
        self.held.lock().socket = None;
    }

    /// Whether there is a socket.
    #[cfg(test)]
    pub(super) fn is_held(&self) -> bool {
        self.held.lock().socket.is_some()
    }

    /// Ends every wait for the socket, and for those to come.
    pub(super) fn abort(&self) {
        let mut held = self.held.lock();
        held.aborted = true;
        if let Some(socket) = &held.socket {
            // It may not be connected any more, or not yet: the dialer looks at `aborted` too.
            let _ = socket.shutdown(Shutdown::Both);
        }
    }
}

/// Looks names up in threads of their own, because the system's resolver knows no time-out.
#[derive(Debug, Default)]
pub(super) struct Resolver {
    /// One more reference for each look-up under way.
    lookups: Arc<()>,
}

impl Resolver {
    /// Addresses of `server`, asked anew each time.
    ///
    /// A look-up that is not done by `deadline` is left to itself; it holds nothing but the name.
    pub(super) fn resolve(
        &self,
        server: &ServerAddress,
        deadline: Instant,
        stopped: &Receiver<Never>,
    ) -> io::Result<Vec<SocketAddr>> {
        if let Ok(address) = server.host().parse::<IpAddr>() {
            return Ok(vec![SocketAddr::new(address, server.port())]);
        }
        let server = server.clone();
        let look_up = move || -> io::Result<Vec<SocketAddr>> {
            let all = (server.host(), server.port()).to_socket_addrs()?;
            Ok(all.take(ADDRESSES_MAX).collect())
        };
        match self.in_time(look_up, deadline, stopped)?? {
            none if none.is_empty() => Err(io::Error::other("the name has no address")),
            some => Ok(some),
        }
    }

    /// What `look_up` finds; it is left to itself when it is not done by `deadline`.
    pub(super) fn in_time<T: Send + 'static>(
        &self,
        look_up: impl FnOnce() -> T + Send + 'static,
        deadline: Instant,
        stopped: &Receiver<Never>,
    ) -> io::Result<T> {
        if Arc::strong_count(&self.lookups) > LOOKUPS_MAX {
            return Err(io::Error::new(io::ErrorKind::TimedOut, "earlier look-ups still hang"));
        }
        let (found, result) = bounded(1);
        let under_way = Arc::clone(&self.lookups);
        thread::Builder::new().name("resolver".to_owned()).spawn(move || {
            let result = look_up();
            drop(under_way);
            // Nobody may be waiting any more.
            let _ = found.send(result);
        })?;
        select_biased! {
            recv(stopped) -> _ => Err(aborted()),
            // It is dropped without a word only by a panic, which ends the process.
            recv(result) -> result => result.map_err(|_| aborted()),
            recv(at(deadline)) -> _ => {
                Err(io::Error::new(io::ErrorKind::TimedOut, "the name was not resolved in time"))
            }
        }
    }
}

/// Connects to `address` until `deadline`; the socket is in `slot` from its beginning.
///
/// Closing it drops what is not sent yet: the system would go on for minutes, and what we gave up might still arrive.
/// [`close_gently`] undoes that.
pub(super) fn connect(
    address: SocketAddr,
    deadline: Instant,
    slot: &Slot,
) -> io::Result<Arc<TcpStream>> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = Arc::new(TcpStream::from(socket_with(family, SocketType::STREAM, flags, None)?));
    slot.hold(&socket);
    match rustix::net::connect(&*socket, &address) {
        Ok(()) | Err(Errno::INPROGRESS) => {}
        Err(error) => return Err(error.into()),
    }
    // An abort before this line is seen here; a later one shuts a socket down that is connecting, which wakes `poll`.
    slot.check()?;
    wait_writable(&socket, deadline)?;
    socket_error(&*socket)??;
    slot.check()?;

    // A port of this machine that nobody listens on may be the very one the socket was given: it then talks to itself,
    // and keeps the broker from listening there.
    if socket.local_addr()? == socket.peer_addr()? {
        return Err(io::ErrorKind::ConnectionRefused.into());
    }
    socket.set_nonblocking(false)?;
    socket.set_nodelay(true)?;
    set_socket_linger(&*socket, Some(Duration::ZERO))?;
    Ok(socket)
}

/// Lets the system send the rest when `socket` is closed.
pub(super) fn close_gently(socket: &TcpStream) {
    // If it fails, the connection is gone, and the rest with it.
    let _ = set_socket_linger(socket, None);
}

/// Waits until something can be written to `socket`, or it has failed.
pub(super) fn wait_writable(socket: &TcpStream, deadline: Instant) -> io::Result<()> {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let left = Timespec::try_from(left).map_err(io::Error::other)?;
        match poll(&mut [PollFd::new(socket, PollFlags::OUT)], Some(&left)) {
            Ok(0) => return Err(io::ErrorKind::TimedOut.into()),
            Ok(_) => return Ok(()),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

fn aborted() -> io::Error {
    io::Error::new(io::ErrorKind::Interrupted, "stopped")
}
