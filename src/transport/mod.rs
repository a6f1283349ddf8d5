//! The only door to the network: publish and subscribe over one connection to a broker.
//!
//! | Module | What it holds |
//! | --- | --- |
//! | `wire` | NATS protocol lines to and from bytes; pure |
//! | `connection` | the connection as others see it, and its two threads, `keeper` and `reader` |
//! | `outbox` | how many threads write to one socket without a thread of its own |
//! | `session`, `tls` | what stands between frames and the bytes on the socket |
//! | `login` | what a broker is told about us |
//! | `address`, `servers`, `srv`, `dial`, `backoff` | where to, a socket, and when to try again |
//! | `errors` | what goes wrong between us and a broker |
//! | `visit` | a connection that is waited for and given up |

pub mod address;
pub mod backoff;
pub mod connection;
mod dial;
pub mod errors;
pub mod login;
#[cfg(test)]
pub mod memory;
mod outbox;
pub mod servers;
mod session;
pub mod srv;
pub mod tls;
pub mod visit;
pub mod wire;

use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use crate::clock::BootTime;
use crate::protocol::subject::{Pattern, Subject};

/// What a broker delivered to one of our subscriptions.
#[derive(Debug, Clone, Default)]
pub struct Message {
    /// The subject it was published to.
    pub subject: String,
    /// Where the sender wants an answer, if it said so.
    pub reply: Option<String>,
    /// The status of the header line, such as 503 for "no responders".
    pub status: Option<u16>,
    /// Headers in the order received.
    pub headers: Vec<(String, String)>,
    /// The body.
    pub payload: Vec<u8>,
}

impl Message {
    /// Whether it is the broker's word that nobody listens where a request was sent.
    pub fn is_no_responders(&self) -> bool {
        self.status == Some(NO_RESPONDERS_STATUS) && self.payload.is_empty()
    }
}

/// The status with which a broker says that nobody listens.
const NO_RESPONDERS_STATUS: u16 = 503;

/// One message to send.
#[derive(Debug, Clone, Copy)]
pub struct Publish<'a> {
    /// Where it goes.
    pub subject: &'a Subject,
    /// The NATS reply subject; with one, a broker without interest answers "no responders".
    pub reply: Option<&'a Subject>,
    /// Headers, their names written exactly as given.
    pub headers: &'a [(&'a str, &'a str)],
    /// The body.
    pub payload: &'a [u8],
    /// From then on it must not reach the wire any more; what of it waits is dropped with the connection.
    pub until: Option<BootTime>,
}

impl<'a> Publish<'a> {
    /// A message without anything else.
    pub fn new(subject: &'a Subject, payload: &'a [u8]) -> Publish<'a> {
        Publish { subject, reply: None, headers: &[], payload, until: None }
    }
}

/// Why a message was not sent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PublishError {
    /// There is no connection; nothing is queued.
    Disconnected,
    /// The broker takes at most `max` bytes.
    TooLarge {
        /// Size of the body with its headers, in bytes.
        size: usize,
        /// The broker's `max_payload`, in bytes.
        max: usize,
    },
    /// A header name or value holds a line break.
    BadHeader,
    /// Its time was up before it could be sent.
    Late,
    /// The connection is being closed for good.
    Closed,
}

impl fmt::Display for PublishError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PublishError::Disconnected => f.write_str("not connected to a broker"),
            PublishError::TooLarge { size, max } => {
                write!(f, "message of {size} bytes exceeds the broker's limit of {max}")
            }
            PublishError::BadHeader => f.write_str("a header holds a line break"),
            PublishError::Late => f.write_str("it was too late to send it"),
            PublishError::Closed => f.write_str("the connection was closed"),
        }
    }
}

impl std::error::Error for PublishError {}

/// A change of the connection's state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Link {
    /// Connected, and all subscriptions are in place.
    Up {
        /// URL of the broker, without credentials.
        broker: String,
        /// Whether this is the first connection of the process.
        first: bool,
    },
    /// The connection was lost.
    Down {
        /// What happened.
        reason: String,
    },
}

/// Runs on the reader thread for each message: it must be quick and must not block.
pub type Handler = Arc<dyn Fn(Message) + Send + Sync>;

/// A subscription; it ends when this is dropped.
pub struct Subscription {
    end: Option<Box<dyn FnOnce() + Send + Sync>>,
}

impl Subscription {
    /// A subscription that `end` ends.
    pub fn new(end: impl FnOnce() + Send + Sync + 'static) -> Subscription {
        Subscription { end: Some(Box::new(end)) }
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        if let Some(end) = self.end.take() {
            end();
        }
    }
}

impl fmt::Debug for Subscription {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Subscription")
    }
}

/// Publishes and subscribes; shared by all threads.
pub trait Transport: Send + Sync {
    /// Sends one message; an uncontended one is on the wire on return.
    ///
    /// # Errors
    ///
    /// [`PublishError`]; nothing is queued while disconnected.
    fn publish(&self, message: &Publish<'_>) -> Result<(), PublishError>;

    /// Delivers what matches `pattern` to `handler`, also after reconnects, until the subscription is dropped.
    fn subscribe(&self, pattern: &Pattern, handler: Handler) -> Subscription;

    /// Waits until the broker has taken all that was sent before.
    ///
    /// # Errors
    ///
    /// [`PublishError::Disconnected`] when that did not happen by `deadline`.
    fn flush(&self, deadline: Instant) -> Result<(), PublishError>;

    /// URL of the broker in use without credentials, empty while disconnected.
    fn broker_url(&self) -> Arc<str>;

    /// Largest body the broker takes, in bytes.
    fn max_payload(&self) -> usize;
}
