//! What stands between NATS frames and the bytes on the socket.
//!
//! It works on memory and never sees the socket, and it lives under the lock of the outbox: one whole frame after the
//! other goes in, so their order is the order on the wire, and the reader holds the lock only while bytes pass through,
//! never while it waits for them.

use crate::transport::errors::Ending;
use crate::transport::tls;
use crate::transport::wire::Parser;

/// One connection's session.
#[derive(Debug)]
pub(super) enum Session {
    /// No encryption.
    Plain,
    /// TLS, agreed upon.
    Tls(tls::Session),
}

impl Session {
    /// Appends the frame that `write` writes, as it goes over the wire, to `outbox`.
    pub(super) fn seal(
        &mut self,
        outbox: &mut Vec<u8>,
        write: impl FnOnce(&mut Vec<u8>),
    ) -> Result<(), Ending> {
        match self {
            Session::Plain => {
                write(outbox);
                Ok(())
            }
            Session::Tls(session) => session.seal(outbox, write),
        }
    }

    /// Gives what `bytes` from the socket hold to `parser`, also if it ends with them. What the session itself has to
    /// answer goes to `outbox`.
    pub(super) fn open(
        &mut self,
        bytes: &[u8],
        outbox: &mut Vec<u8>,
        parser: &mut Parser,
    ) -> Result<(), Ending> {
        match self {
            Session::Plain => {
                parser.feed(bytes);
                Ok(())
            }
            Session::Tls(session) => session.open(bytes, outbox, parser),
        }
    }
}
