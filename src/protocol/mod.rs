//! The messages we send and read, whatever their version.
//!
//! Bytes in, values out, and back: nothing here does I/O or reads a clock. Sending, waiting and deciding which reply
//! counts is left to `rpc`. All text that comes from the network is hostile until one of these types holds it.

pub mod json;
pub mod lifecycle;
pub mod subject;
pub mod v1;

use std::fmt;
use std::sync::Arc;

use crate::protocol::json::JsonError;
use crate::protocol::subject::Subject;

/// The collective in which unprovisioned nodes wait; part of every subject and of every request.
pub const COLLECTIVE: &str = "provisioning";

/// Longest identity taken, in bytes: the longest name DNS knows.
pub const IDENTITY_BYTES_MAX: usize = 253;

/// Largest reply looked at, in bytes. Brokers take 1 MiB unless told otherwise.
pub const REPLY_BYTES_MAX: usize = 4 << 20;

/// A node's name, safe to be used as a part of a subject.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Identity(Arc<str>);

/// Why a text is no identity.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InvalidIdentity {
    /// There is no text.
    Empty,
    /// It is longer than [`IDENTITY_BYTES_MAX`].
    TooLong,
    /// White space or a control character.
    Blank,
    /// `*` or `>`, which would address other nodes.
    Wildcard,
    /// A leading, trailing or doubled dot.
    EmptyPart,
}

impl Identity {
    /// Takes `text` as an identity if it can stand in a subject without changing its meaning.
    ///
    /// # Errors
    ///
    /// [`InvalidIdentity`]: the original puts any identity into a subject unchecked.
    pub fn parse(text: &str) -> Result<Identity, InvalidIdentity> {
        if text.is_empty() {
            return Err(InvalidIdentity::Empty);
        }
        if text.len() > IDENTITY_BYTES_MAX {
            return Err(InvalidIdentity::TooLong);
        }
        if text.chars().any(|c| c.is_whitespace() || c.is_control()) {
            return Err(InvalidIdentity::Blank);
        }
        if text.contains(['*', '>']) {
            return Err(InvalidIdentity::Wildcard);
        }
        if text.split('.').any(str::is_empty) {
            return Err(InvalidIdentity::EmptyPart);
        }
        Ok(Identity(text.into()))
    }

    /// The text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

impl fmt::Display for InvalidIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            InvalidIdentity::Empty => f.write_str("identity is empty"),
            InvalidIdentity::TooLong => {
                write!(f, "identity is longer than {IDENTITY_BYTES_MAX} bytes")
            }
            InvalidIdentity::Blank => {
                f.write_str("identity holds white space or a control character")
            }
            InvalidIdentity::Wildcard => f.write_str("identity holds a wildcard"),
            InvalidIdentity::EmptyPart => f.write_str("identity has an empty part between dots"),
        }
    }
}

impl std::error::Error for InvalidIdentity {}

/// The name of one request: a version 4 UUID as 32 lower-case hexadecimal digits without dashes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId([u8; 32]);

impl RequestId {
    /// A new one that nobody can guess.
    pub fn random() -> RequestId {
        let mut digits = [0; 32];
        for (pair, byte) in digits.chunks_exact_mut(2).zip(random_uuid()) {
            pair[0] = HEX_DIGITS[usize::from(byte >> 4)];
            pair[1] = HEX_DIGITS[usize::from(byte & 15)];
        }
        RequestId(digits)
    }

    /// Reads 32 lower-case hexadecimal digits.
    pub fn parse(text: &str) -> Option<RequestId> {
        let digits: [u8; 32] = text.as_bytes().try_into().ok()?;
        let hex = digits.iter().all(|c| matches!(c, b'0'..=b'9' | b'a'..=b'f'));
        hex.then_some(RequestId(digits))
    }

    /// The text.
    pub fn as_str(&self) -> &str {
        std::str::from_utf8(&self.0).expect("holds hexadecimal digits only")
    }
}

impl fmt::Display for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl fmt::Debug for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A new version 4 UUID with dashes, as lifecycle events carry it.
pub fn event_id() -> String {
    let id = RequestId::random();
    let digits = id.as_str();
    [&digits[..8], &digits[8..12], &digits[12..16], &digits[16..20], &digits[20..]].join("-")
}

fn random_uuid() -> [u8; 16] {
    let mut bytes = [0; 16];
    openssl::rand::rand_bytes(&mut bytes).expect("OpenSSL has randomness once the process runs");
    bytes[6] = bytes[6] & 0x0f | 0x40;
    bytes[8] = bytes[8] & 0x3f | 0x80;
    bytes
}

const HEX_DIGITS: &[u8; 16] = b"0123456789abcdef";

/// Who we are on the wire. Nodes lock themselves to this pair, so it stays the same for the life of the process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sender {
    /// Our own identity.
    pub identity: Identity,
    /// Our caller id, such as `choria=prov1.example.net`.
    pub caller: String,
}

/// One request, before it is wrapped.
#[derive(Debug, Clone, Copy)]
pub struct Request<'a> {
    /// The id that comes back with the reply.
    pub id: RequestId,
    /// The agent that shall answer.
    pub agent: &'a str,
    /// The agent a node must have to answer at all.
    pub filter_agent: &'a str,
    /// The body: RPC JSON, or the discovery body.
    pub body: &'a str,
    /// How far a node's clock may be away from ours, in seconds; nodes refuse less than 30.
    pub ttl_secs: u32,
    /// Now, as Unix time in seconds.
    pub unix_time: i64,
    /// Where the node sends its reply.
    pub reply_to: &'a Subject,
    /// URL of the broker in use, without credentials; for the `seen-by` trace.
    pub broker_url: &'a str,
}

/// A reply whose hash is right; whether it is the one that was asked for is for `rpc` to say.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reply {
    /// The request it answers.
    pub request_id: RequestId,
    /// The identity its sender claims.
    pub sender: String,
    /// The agent that answered.
    pub agent: String,
    /// When it was made, by the node's clock, as Unix time in seconds.
    pub unix_time: i64,
    /// The body: RPC JSON, or `pong`.
    pub body: String,
}

/// Wraps requests and unwraps replies in one version of the protocol.
#[derive(Debug, Clone)]
pub enum Codec {
    /// Version 1: signed with an x509 key, or not at all.
    V1(v1::Codec),
}

impl Codec {
    /// The bytes to publish for `request`.
    pub fn encode(&self, request: &Request<'_>) -> Vec<u8> {
        match self {
            Codec::V1(codec) => codec.encode(request),
        }
    }

    /// Unwraps a reply and verifies its hash over the text as received.
    ///
    /// # Errors
    ///
    /// [`DecodeError`], for anything at all that can be wrong with bytes from a stranger.
    pub fn decode_reply(&self, payload: &[u8]) -> Result<Reply, DecodeError> {
        match self {
            Codec::V1(codec) => codec.decode_reply(payload),
        }
    }
}

/// One of the nested documents of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Layer {
    /// The outermost: return address and trace.
    Transport,
    /// What signature or hash cover.
    Secure,
    /// Envelope and body.
    Reply,
}

impl fmt::Display for Layer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Layer::Transport => "transport",
            Layer::Secure => "secure reply",
            Layer::Reply => "reply",
        })
    }
}

/// Why bytes are no reply.
#[derive(Debug)]
pub enum DecodeError {
    /// More than [`REPLY_BYTES_MAX`].
    TooLarge {
        /// Size in bytes.
        size: usize,
    },
    /// A layer is not the JSON document it should be.
    Json {
        /// Which one.
        layer: Layer,
        /// What is wrong with it.
        source: JsonError,
    },
    /// A layer says it is another kind of document, or of another version.
    Protocol {
        /// Which one.
        layer: Layer,
    },
    /// The secure reply is not base64.
    Base64,
    /// The hash does not fit the text.
    Hash,
    /// The request id is not 32 hexadecimal digits.
    RequestId,
}

impl fmt::Display for DecodeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DecodeError::TooLarge { size } => {
                write!(f, "reply of {size} bytes is over {REPLY_BYTES_MAX}")
            }
            DecodeError::Json { layer, .. } => write!(f, "malformed {layer} document"),
            DecodeError::Protocol { layer } => write!(f, "unknown kind of {layer} document"),
            DecodeError::Base64 => f.write_str("secure reply is not base64"),
            DecodeError::Hash => f.write_str("hash does not fit the reply"),
            DecodeError::RequestId => f.write_str("malformed request id in a reply"),
        }
    }
}

impl std::error::Error for DecodeError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            DecodeError::Json { source, .. } => Some(source),
            DecodeError::TooLarge { .. }
            | DecodeError::Protocol { .. }
            | DecodeError::Base64
            | DecodeError::Hash
            | DecodeError::RequestId => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn takes_the_names_nodes_have() {
        for name in ["n1", "n1.example.net", "N1_x-y.example.net", "knoten.österreich.example"] {
            assert_eq!(Identity::parse(name).unwrap().as_str(), name);
        }
        assert!(Identity::parse(&"x".repeat(IDENTITY_BYTES_MAX)).is_ok());
    }

    #[test]
    fn refuses_names_that_would_change_a_subject() {
        check_refused("", InvalidIdentity::Empty);
        check_refused(&"x".repeat(IDENTITY_BYTES_MAX + 1), InvalidIdentity::TooLong);
        for name in
            ["a b", "a\tb", "a\r\nPUB x 0", "a\0b", " a", "a\u{7f}", "a\u{a0}b", "a\u{2028}"]
        {
            check_refused(name, InvalidIdentity::Blank);
        }
        for name in ["*", ">", "n1.>", "n*.example.net", "n1.*.net"] {
            check_refused(name, InvalidIdentity::Wildcard);
        }
        for name in [".", ".n1", "n1.", "n1..net", "..."] {
            check_refused(name, InvalidIdentity::EmptyPart);
        }
    }

    #[track_caller]
    fn check_refused(name: &str, reason: InvalidIdentity) {
        assert_eq!(Identity::parse(name), Err(reason), "{name:?}");
    }

    #[test]
    fn makes_request_ids_that_are_version_4_uuids() {
        let first = RequestId::random();
        let second = RequestId::random();
        assert_ne!(first, second);
        for id in [first, second] {
            let text = id.as_str();
            assert_eq!(RequestId::parse(text), Some(id));
            assert_eq!(text.as_bytes()[12], b'4', "{text}");
            assert!(b"89ab".contains(&text.as_bytes()[16]), "{text}");
        }
    }

    #[test]
    fn takes_only_32_lower_case_digits_as_a_request_id() {
        assert!(RequestId::parse("6c1f0d5e0b8a4f0f9a3d2b7c4e5f6a71").is_some());
        assert_eq!(RequestId::parse("6C1F0D5E0B8A4F0F9A3D2B7C4E5F6A71"), None);
        assert_eq!(RequestId::parse("6c1f0d5e0b8a4f0f9a3d2b7c4e5f6a7"), None);
        assert_eq!(RequestId::parse("6c1f0d5e0b8a4f0f9a3d2b7c4e5f6a711"), None);
        assert_eq!(RequestId::parse("6c1f0d5e-0b8a4f0f9a3d2b7c4e5f6a7"), None);
        assert_eq!(RequestId::parse(""), None);
    }

    #[test]
    fn makes_event_ids_with_dashes() {
        let id = event_id();
        let lengths: Vec<usize> = id.split('-').map(str::len).collect();
        assert_eq!(lengths, [8, 4, 4, 4, 12]);
    }
}
