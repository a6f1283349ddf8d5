//! What goes wrong between us and a broker: kinds to count, texts for people.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::transport::wire::ProtocolError;

/// Least time between two warnings of one kind; those between are debug messages.
const WARNING_PAUSE: Duration = Duration::from_secs(1);
/// Length of a broker's complaint that we keep, in characters.
const COMPLAINT_MAX: usize = 256;

/// What went wrong between us and a broker; the `kind` of the error counter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum ErrorKind {
    /// No TCP connection: name, address, port or time.
    Connect,
    /// The broker didn't greet us, or not in time.
    Handshake,
    /// TLS could not be agreed upon, or was broken off.
    Tls,
    /// Our certificate, key, token or seed can't be read or used.
    Credentials,
    /// It doesn't know us, or no longer.
    Authorization,
    /// We may not publish or subscribe there.
    Permissions,
    /// One of its limits: connections, subscriptions, sizes.
    Limit,
    /// We read too slowly for it.
    SlowConsumer,
    /// One side thought the other dead.
    Stale,
    /// One side didn't understand the other.
    Protocol,
    /// It is going away.
    Shutdown,
    /// The connection broke.
    Lost,
    /// It took nothing of what we wrote.
    Write,
    /// A message's headers could not be read; it was delivered without.
    BadHeader,
    /// A message was too large to hold; it was dropped.
    TooLarge,
    /// A complaint we don't know.
    Other,
}

impl ErrorKind {
    /// Its label in metrics.
    pub fn label(self) -> &'static str {
        match self {
            ErrorKind::Connect => "connect",
            ErrorKind::Handshake => "handshake",
            ErrorKind::Tls => "tls",
            ErrorKind::Credentials => "credentials",
            ErrorKind::Authorization => "authorization",
            ErrorKind::Permissions => "permissions",
            ErrorKind::Limit => "limit",
            ErrorKind::SlowConsumer => "slow_consumer",
            ErrorKind::Stale => "stale",
            ErrorKind::Protocol => "protocol",
            ErrorKind::Shutdown => "shutdown",
            ErrorKind::Lost => "lost",
            ErrorKind::Write => "write",
            ErrorKind::BadHeader => "bad_header",
            ErrorKind::TooLarge => "too_large",
            ErrorKind::Other => "other",
        }
    }

    /// Whether it may go away by itself: the broker is not there, or too busy.
    pub fn is_passing(self) -> bool {
        match self {
            ErrorKind::Connect
            | ErrorKind::Handshake
            | ErrorKind::Limit
            | ErrorKind::SlowConsumer
            | ErrorKind::Stale
            | ErrorKind::Shutdown
            | ErrorKind::Lost
            | ErrorKind::Write => true,
            ErrorKind::Tls
            | ErrorKind::Credentials
            | ErrorKind::Authorization
            | ErrorKind::Permissions
            | ErrorKind::Protocol
            | ErrorKind::BadHeader
            | ErrorKind::TooLarge
            | ErrorKind::Other => false,
        }
    }

    /// The kind of a broker's complaint.
    ///
    /// Source: the errors of nats-server's `server/errors.go`.
    fn of_complaint(text: &str) -> ErrorKind {
        let text = text.to_ascii_lowercase();
        let has = |words: &[&str]| words.iter().any(|word| text.contains(word));
        // The order matters: a subject named in a permissions violation may hold any word.
        if has(&["permissions violation"]) {
            ErrorKind::Permissions
        } else if has(&["authorization", "authentication"]) {
            ErrorKind::Authorization
        } else if has(&["stale connection"]) {
            ErrorKind::Stale
        } else if has(&["slow consumer"]) {
            ErrorKind::SlowConsumer
        } else if has(&["maximum"]) {
            ErrorKind::Limit
        } else if has(&["tls"]) {
            ErrorKind::Tls
        } else if has(&["server shutdown"]) {
            ErrorKind::Shutdown
        } else if has(&["protocol", "parser", "invalid"]) {
            ErrorKind::Protocol
        } else {
            ErrorKind::Other
        }
    }
}

/// An error of the connection, for people.
#[derive(Debug, Clone)]
pub struct BrokerError {
    /// What it was.
    pub kind: ErrorKind,
    /// Which broker, and what it said.
    pub text: String,
    /// When.
    pub at: Instant,
}

/// Why a connection, or the try to make one, ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Ending {
    pub(super) kind: ErrorKind,
    pub(super) reason: String,
}

impl Ending {
    pub(super) fn new(kind: ErrorKind, reason: impl Into<String>) -> Ending {
        Ending { kind, reason: reason.into() }
    }

    /// A broker's complaint, safe to log.
    pub(super) fn complaint(text: &[u8]) -> Ending {
        let reason: String = String::from_utf8_lossy(text)
            .chars()
            .map(|c| if c.is_control() { '?' } else { c })
            .take(COMPLAINT_MAX)
            .collect();
        Ending { kind: ErrorKind::of_complaint(&reason), reason }
    }
}

impl From<ProtocolError> for Ending {
    fn from(error: ProtocolError) -> Ending {
        Ending::new(ErrorKind::Protocol, format!("it is not understood: {error}"))
    }
}

/// The last error, and when each kind was last worth a warning.
#[derive(Debug, Default)]
pub(super) struct Errors {
    pub(super) last: Option<BrokerError>,
    warned: BTreeMap<ErrorKind, Instant>,
}

impl Errors {
    /// Whether the last warning of its kind is long enough ago.
    pub(super) fn note(&mut self, error: &BrokerError) -> bool {
        let BrokerError { kind, at: now, .. } = *error;
        let is_kept = match kind {
            // Any node can cause these two, and must not hide what the broker says.
            ErrorKind::BadHeader | ErrorKind::TooLarge => false,
            // What else we may not do on the same connection: the first says most, such as a wrong account.
            ErrorKind::Permissions => self.last.as_ref().is_none_or(|last| last.kind != kind),
            _ => true,
        };
        if is_kept {
            self.last = Some(error.clone());
        }
        let last = self.warned.get(&kind);
        let is_news = last.is_none_or(|last| now.duration_since(*last) >= WARNING_PAUSE);
        if is_news {
            self.warned.insert(kind, now);
        }
        is_news
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn complaints_are_told_apart() {
        for (text, kind) in [
            ("Authorization Violation", ErrorKind::Authorization),
            ("Authentication Timeout", ErrorKind::Authorization),
            ("User Authentication Expired", ErrorKind::Authorization),
            ("Permissions Violation for Subscription to \"a\"", ErrorKind::Permissions),
            ("Stale Connection", ErrorKind::Stale),
            ("Slow Consumer", ErrorKind::SlowConsumer),
            ("maximum connections exceeded", ErrorKind::Limit),
            ("Maximum Payload Violation", ErrorKind::Limit),
            ("Secure Connection - TLS Required", ErrorKind::Tls),
            ("Server Shutdown", ErrorKind::Shutdown),
            ("Unknown Protocol Operation", ErrorKind::Protocol),
            ("Invalid Subject", ErrorKind::Protocol),
            ("Something New", ErrorKind::Other),
            ("", ErrorKind::Other),
        ] {
            assert_eq!(ErrorKind::of_complaint(text), kind, "{text}");
        }
        assert_eq!(Ending::complaint(&[b'\xff'; 10_000]).reason.chars().count(), COMPLAINT_MAX);
    }

    #[test]
    fn warnings_of_one_kind_keep_a_distance() {
        let mut errors = Errors::default();
        let now = Instant::now();
        assert!(note(&mut errors, ErrorKind::Permissions, "a", now));
        assert!(!note(&mut errors, ErrorKind::Permissions, "b", now));
        assert!(note(&mut errors, ErrorKind::Lost, "c", now));
        assert!(note(&mut errors, ErrorKind::Permissions, "d", now + WARNING_PAUSE));
        assert_eq!(errors.last.unwrap().text, "d");
    }

    #[test]
    fn of_all_that_is_not_permitted_the_first_is_kept() {
        let mut errors = Errors::default();
        let now = Instant::now();
        for (kind, text) in [
            (ErrorKind::Permissions, "the wrong account"),
            (ErrorKind::Permissions, "so not this subject"),
        ] {
            note(&mut errors, kind, text, now);
        }
        assert_eq!(errors.last.as_ref().unwrap().text, "the wrong account");
        // Another connection.
        note(&mut errors, ErrorKind::Lost, "gone", now);
        note(&mut errors, ErrorKind::Permissions, "another", now);
        assert_eq!(errors.last.unwrap().text, "another");
    }

    #[test]
    fn what_a_node_can_cause_hides_no_error_of_the_broker() {
        let mut errors = Errors::default();
        let now = Instant::now();
        note(&mut errors, ErrorKind::Permissions, "a", now);
        assert!(note(&mut errors, ErrorKind::BadHeader, "b", now));
        assert!(note(&mut errors, ErrorKind::TooLarge, "c", now));
        assert_eq!(errors.last.unwrap().text, "a");
    }

    fn note(errors: &mut Errors, kind: ErrorKind, text: &str, at: Instant) -> bool {
        errors.note(&BrokerError { kind, text: text.to_owned(), at })
    }
}
