//! The writing half of one connection: many threads write, no thread is there to do it for them.
//!
//! A frame goes into the outbox under one lock, which is never held across a system call. Whoever then gets the wire,
//! the second lock, writes what the outbox holds, frames of others included, so that writes under contention become one.
//! The reader takes the first lock only: what it has to say waits in the outbox for the keeper. So a peer that stops
//! reading stops those who publish, for the write time-out at most, and never the reader.

use std::collections::VecDeque;
use std::io;
use std::mem;
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::Sender;
use parking_lot::{Mutex, MutexGuard};
use rustix::io::Errno;
use rustix::net::SendFlags;

use crate::clock::BootTime;
use crate::transport::dial;
use crate::transport::errors::{Ending, ErrorKind};
use crate::transport::session::Session;
use crate::transport::wire::{self, Parser};

/// Bytes that may wait to be written; a frame that begins below it fits, and whoever finds more waits for the wire.
const OUTBOX_MAX: usize = 256 * 1024;
/// Bytes of PONG, SUB and UNSUB that may wait, however full the outbox is: whoever leaves them can't wait for room.
const CONTROL_MAX: usize = 64 * 1024;
/// Most PINGs of ours without an answer, whoever sent them.
const PINGS_MAX: usize = 256;
/// Times one thread writes for others before it leaves the rest to the keeper.
const ROUNDS_MAX: usize = 16;
/// Capacity the outbox keeps.
const BUFFER_KEPT: usize = 2 * OUTBOX_MAX;

/// The connection is over; [`Wire::ending`] says why.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Gone;

/// Why a frame was not sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Unsent {
    /// The connection is over.
    Gone,
    /// Its time was up.
    Late,
}

impl From<Gone> for Unsent {
    fn from(Gone: Gone) -> Unsent {
        Unsent::Gone
    }
}

/// The writing half of one connection.
#[derive(Debug)]
pub(super) struct Wire {
    socket: Arc<TcpStream>,
    out: Mutex<Out>,
    /// Who holds it writes; it is the buffer being written.
    turn: Mutex<Vec<u8>>,
    /// Tells the keeper to flush.
    wake: Sender<()>,
    write_timeout: Duration,
}

#[derive(Debug)]
struct Out {
    session: Session,
    bytes: Vec<u8>,
    /// How many of them [`Wire::leave`] left.
    left: usize,
    /// From then on they must not reach the wire any more.
    until: Option<BootTime>,
    /// Our PINGs without an answer, oldest first, with those who wait for one.
    pings: VecDeque<Option<Sender<()>>>,
    ending: Option<Ending>,
}

impl Wire {
    /// Writes to `socket`; `wake` reaches whoever calls [`Wire::flush`] for those that must not.
    pub(super) fn new(
        socket: Arc<TcpStream>,
        session: Session,
        wake: Sender<()>,
        write_timeout: Duration,
    ) -> Wire {
        let out = Out {
            session,
            bytes: Vec::new(),
            left: 0,
            until: None,
            pings: VecDeque::new(),
            ending: None,
        };
        Wire { socket, out: Mutex::new(out), turn: Mutex::new(Vec::new()), wake, write_timeout }
    }

    /// The socket, for the reader.
    pub(super) fn socket(&self) -> &TcpStream {
        &self.socket
    }

    /// Sends one frame. It is on the wire on return, unless another thread is just writing: then that one goes on with it.
    ///
    /// If that one is not done `until` then, the connection ends, with all that waits: an encrypted frame can't be left out.
    pub(super) fn send(
        &self,
        until: Option<BootTime>,
        frame: impl FnOnce(&mut Vec<u8>),
    ) -> Result<(), Unsent> {
        let mut out = self.out.lock();
        while out.bytes.len() >= OUTBOX_MAX && out.ending.is_none() {
            drop(out);
            // Whoever writes now ends within the write time-out, or the connection does.
            let written = self.write(&mut self.turn.lock());
            written?;
            self.flush()?;
            out = self.out.lock();
        }
        if is_over(until) {
            return Err(Unsent::Late);
        }
        let mut out = self.put(out, frame)?;
        out.until = [out.until, until].into_iter().flatten().min();
        drop(out);
        Ok(self.flush()?)
    }

    /// Leaves a small frame for the keeper: for the reader, and for those who hold a lock.
    pub(super) fn leave(&self, frame: impl FnOnce(&mut Vec<u8>)) -> Result<(), Gone> {
        let out = self.out.lock();
        if out.left >= CONTROL_MAX {
            drop(out);
            let Ending { kind, reason } = demanding();
            self.end(kind, reason);
            return Err(Gone);
        }
        let before = out.bytes.len();
        let mut out = self.put(out, frame)?;
        out.left += out.bytes.len() - before;
        drop(out);
        self.wake();
        Ok(())
    }

    /// Leaves a PING; its answer reaches `waiter`, which is dropped without one when the connection ends.
    pub(super) fn ping(&self, waiter: Option<Sender<()>>) -> Result<(), Gone> {
        let mut out = self.out.lock();
        if out.pings.len() >= PINGS_MAX {
            return Err(Gone);
        }
        out.pings.push_back(waiter);
        let out = self.put(out, |bytes| bytes.extend_from_slice(wire::PING))?;
        drop(out);
        self.wake();
        Ok(())
    }

    /// Takes the answer to the oldest PING.
    pub(super) fn pong(&self) {
        let answered = self.out.lock().pings.pop_front();
        if let Some(Some(waiter)) = answered {
            // Its time may have been up.
            let _ = waiter.try_send(());
        }
    }

    /// PINGs that nobody waits for and nobody answered.
    pub(super) fn keepalives_unanswered(&self) -> usize {
        self.out.lock().pings.iter().filter(|waiter| waiter.is_none()).count()
    }

    /// Gives what `bytes` from the socket hold to `parser`.
    pub(super) fn open(&self, bytes: &[u8], parser: &mut Parser) -> Result<(), Ending> {
        let mut out = self.out.lock();
        let Out { session, bytes: outbox, left, .. } = &mut *out;
        let before = outbox.len();
        let opened = session.open(bytes, outbox, parser);
        // TLS answers some of what it hears by itself, and has no bound of its own for that.
        let answers = outbox.len() - before;
        *left += answers;
        let is_flooded = *left > CONTROL_MAX;
        drop(out);
        if answers > 0 {
            self.wake();
        }
        if is_flooded { Err(demanding()) } else { opened }
    }

    /// Writes what waits, unless another thread is at it.
    pub(super) fn flush(&self) -> Result<(), Gone> {
        loop {
            let Some(mut turn) = self.turn.try_lock() else { return Ok(()) };
            if !self.write(&mut turn)? {
                return Ok(());
            }
            drop(turn);
            // What came since we looked last was left to us, because the wire was still taken.
            if self.out.lock().bytes.is_empty() {
                return Ok(());
            }
        }
    }

    /// Ends the connection, for the first reason given, and wakes all who wait for it.
    pub(super) fn end(&self, kind: ErrorKind, reason: impl Into<String>) {
        let mut out = self.out.lock();
        if out.ending.is_some() {
            return;
        }
        out.ending = Some(Ending::new(kind, reason));
        out.bytes = Vec::new();
        let waiters = mem::take(&mut out.pings);
        drop(out);
        drop(waiters);
        // It may be gone already.
        let _ = self.socket.shutdown(Shutdown::Both);
    }

    /// Why it ended, if it did.
    pub(super) fn ending(&self) -> Option<Ending> {
        self.out.lock().ending.clone()
    }

    fn put<'a>(
        &self,
        mut out: MutexGuard<'a, Out>,
        frame: impl FnOnce(&mut Vec<u8>),
    ) -> Result<MutexGuard<'a, Out>, Gone> {
        if out.ending.is_some() {
            return Err(Gone);
        }
        let Out { session, bytes, .. } = &mut *out;
        if let Err(Ending { kind, reason }) = session.seal(bytes, frame) {
            drop(out);
            self.end(kind, reason);
            return Err(Gone);
        }
        Ok(out)
    }

    fn wake(&self) {
        // Full means that the keeper is about to look anyway.
        let _ = self.wake.try_send(());
    }

    /// Writes what waits and what comes meanwhile; false if the keeper has to go on.
    fn write(&self, turn: &mut Vec<u8>) -> Result<bool, Gone> {
        for _ in 0..ROUNDS_MAX {
            let mut out = self.out.lock();
            if out.ending.is_some() {
                return Err(Gone);
            }
            if out.bytes.is_empty() {
                return Ok(true);
            }
            mem::swap(&mut out.bytes, turn);
            out.left = 0;
            let until = out.until.take();
            drop(out);

            let written = write_all(&self.socket, turn, self.write_timeout, until);
            turn.clear();
            turn.shrink_to(BUFFER_KEPT);
            if let Err(error) = written {
                self.end(ErrorKind::Write, format!("writing failed: {error}"));
                return Err(Gone);
            }
        }
        self.wake();
        Ok(false)
    }
}

/// Writes `bytes` within `timeout`, and none of them after `until`.
///
/// Never waits in the system's own call: that would go on writing when the peer reads again, however late that is, and one
/// that takes a little now and then would keep it for ever.
pub(super) fn write_all(
    socket: &TcpStream,
    mut bytes: &[u8],
    timeout: Duration,
    until: Option<BootTime>,
) -> io::Result<()> {
    let deadline = Instant::now() + timeout;
    loop {
        if is_over(until) {
            return Err(io::Error::new(io::ErrorKind::TimedOut, "it was too late for what waited"));
        }
        match rustix::net::send(socket, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(len) => bytes = &bytes[len..],
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => wait_writable(socket, deadline, until)?,
            Err(error) => return Err(error.into()),
        }
        if bytes.is_empty() {
            return Ok(());
        }
        if Instant::now() >= deadline {
            return Err(takes_nothing());
        }
    }
}

/// Waits for room, at most until one of the two; the caller looks which.
fn wait_writable(socket: &TcpStream, deadline: Instant, until: Option<BootTime>) -> io::Result<()> {
    let now = Instant::now();
    let left = until.map_or(Duration::MAX, |until| until.since(BootTime::now()));
    let first = now.checked_add(left).map_or(deadline, |until| until.min(deadline));
    match dial::wait_writable(socket, first) {
        Err(error) if error.kind() == io::ErrorKind::TimedOut => Ok(()),
        waited => waited,
    }
}

fn is_over(until: Option<BootTime>) -> bool {
    until.is_some_and(|until| BootTime::now() >= until)
}

fn demanding() -> Ending {
    Ending::new(ErrorKind::Write, "the broker reads nothing and demands answers")
}

fn takes_nothing() -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, "the broker takes nothing")
}
