//! The messages we send and read, whatever their version.
//!
//! Bytes in, values out, and back: nothing here does I/O or reads a clock. Sending, waiting and deciding which reply
//! counts is left to `rpc`. All text that comes from the network is hostile until one of these types holds it.

pub mod election;
pub mod json;
pub mod ksuid;
pub mod lifecycle;
pub mod peer;
pub mod subject;
pub mod v1;
pub mod v2;

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use openssl::sha::Sha256;
use rustix::rand::{GetRandomFlags, getrandom};
use serde::Deserialize;

use crate::protocol::json::{JsonError, Object, push_string};
use crate::protocol::ksuid::Ksuid;
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

/// The name of one request, in the form its version of the protocol wants.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(Id);

#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Id {
    /// A version 4 UUID as 32 lower-case hexadecimal digits without dashes: protocol version 1.
    Uuid([u8; 32]),
    /// Protocol version 2.
    Ksuid(Ksuid),
}

impl RequestId {
    /// A new UUID that nobody can guess.
    pub fn random() -> RequestId {
        RequestId::uuid(random_bytes())
    }

    /// The version 4 UUID made of these random bytes.
    fn uuid(mut random: [u8; 16]) -> RequestId {
        random[6] = random[6] & 0x0f | 0x40;
        random[8] = random[8] & 0x3f | 0x80;
        let mut digits = [0; 32];
        for (pair, byte) in digits.chunks_exact_mut(2).zip(random) {
            pair[0] = HEX_DIGITS[usize::from(byte >> 4)];
            pair[1] = HEX_DIGITS[usize::from(byte & 15)];
        }
        RequestId(Id::Uuid(digits))
    }

    /// Reads 32 lower-case hexadecimal digits, or a KSUID.
    pub fn parse(text: &str) -> Option<RequestId> {
        if let Some(ksuid) = Ksuid::parse(text) {
            return Some(RequestId(Id::Ksuid(ksuid)));
        }
        let digits: [u8; 32] = text.as_bytes().try_into().ok()?;
        let hex = digits.iter().all(|c| matches!(c, b'0'..=b'9' | b'a'..=b'f'));
        hex.then_some(RequestId(Id::Uuid(digits)))
    }

    /// The text.
    pub fn as_str(&self) -> &str {
        match &self.0 {
            Id::Uuid(digits) => std::str::from_utf8(digits).expect("holds hexadecimal digits only"),
            Id::Ksuid(ksuid) => ksuid.as_str(),
        }
    }
}

impl From<Ksuid> for RequestId {
    fn from(ksuid: Ksuid) -> RequestId {
        RequestId(Id::Ksuid(ksuid))
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

/// Sixteen bytes that nobody can guess.
///
/// The kernel's own: OpenSSL's generator costs ten times as much for so few, and memory for each thread.
pub fn random_bytes() -> [u8; 16] {
    let mut bytes = [0; 16];
    let filled = rustix::io::retry_on_intr(|| getrandom(&mut bytes[..], GetRandomFlags::empty()));
    // The kernel gives up to 256 bytes at once.
    assert_eq!(filled, Ok(bytes.len()), "Linux has had this call since 3.17");
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
    /// Now, as Unix time in nanoseconds; version 1 has room for the seconds only.
    pub unix_nanos: i64,
    /// Where the node sends its reply.
    pub reply_to: &'a Subject,
    /// URL of the broker in use, without credentials; for the trace of hops.
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
    /// Version 2: signed with the Ed25519 key of a client JWT.
    V2(v2::Codec),
}

impl Codec {
    /// Who we are in its requests.
    pub fn sender(&self) -> &Sender {
        match self {
            Codec::V1(codec) => codec.sender(),
            Codec::V2(codec) => codec.sender(),
        }
    }

    /// A new id for a request, made at `unix_time`, in seconds, of random bytes.
    pub fn request_id(&self, unix_time: i64, random: [u8; 16]) -> RequestId {
        match self {
            Codec::V1(_) => RequestId::uuid(random),
            Codec::V2(_) => RequestId::from(Ksuid::new(unix_time, random)),
        }
    }

    /// The bytes to publish for `request`.
    pub fn encode(&self, request: &Request<'_>) -> Vec<u8> {
        match self {
            Codec::V1(codec) => codec.encode(request),
            Codec::V2(codec) => codec.encode(request),
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
            Codec::V2(codec) => codec.decode_reply(payload),
        }
    }
}

/// What [`Request::unix_nanos`] counts to a second.
pub const NANOS_PER_SEC: i64 = 1_000_000_000;

/// Reads one of the nested documents.
fn read<'a, T: Deserialize<'a>>(json: &'a [u8], layer: Layer) -> Result<T, DecodeError> {
    let Object(document) = serde_json::from_slice(json)
        .map_err(|source| DecodeError::Json { layer, source: source.into() })?;
    Ok(document)
}

/// The secure document inside a transport document of this protocol: alike in both versions.
fn open_transport(payload: &[u8], protocol: &str) -> Result<Vec<u8>, DecodeError> {
    if payload.len() > REPLY_BYTES_MAX {
        return Err(DecodeError::TooLarge { size: payload.len() });
    }
    let transport: TransportDocument = read(payload, Layer::Transport)?;
    expect_protocol(&transport.protocol, protocol, Layer::Transport)?;
    decode_base64(&transport.data, Layer::Secure)
}

#[derive(Deserialize)]
struct TransportDocument<'a> {
    #[serde(borrow)]
    protocol: Cow<'a, str>,
    #[serde(borrow)]
    data: Cow<'a, str>,
}

fn decode_base64(text: &str, layer: Layer) -> Result<Vec<u8>, DecodeError> {
    STANDARD.decode(text.as_bytes()).map_err(|_| DecodeError::Base64 { layer })
}

/// The trace of hops that ends a transport document: from the broker, through us, to the broker.
fn push_trace(out: &mut Vec<u8>, broker_url: &str, identity: &Identity) {
    out.extend_from_slice(b"[[");
    push_string(out, broker_url);
    out.push(b',');
    push_string(out, identity.as_str());
    out.push(b',');
    push_string(out, broker_url);
    out.extend_from_slice(b"]]}}");
}

fn expect_protocol(found: &str, expected: &str, layer: Layer) -> Result<(), DecodeError> {
    if found == expected { Ok(()) } else { Err(DecodeError::Protocol { layer }) }
}

/// Compares the text of the hash, as Choria does: one that decodes to the same bytes in another spelling is refused.
fn verify_hash(reply: &[u8], hash: &str) -> Result<(), DecodeError> {
    let mut text = [0; 44];
    // OpenSSL's `sha256` looks its algorithm up by name at each call.
    let mut sum = Sha256::new();
    sum.update(reply);
    STANDARD.encode_slice(sum.finish(), &mut text).expect("32 bytes are 44 characters of base64");
    if hash.as_bytes() == text { Ok(()) } else { Err(DecodeError::Hash) }
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
    /// A layer inside another one is not base64.
    Base64 {
        /// Which one.
        layer: Layer,
    },
    /// The body is not base64, or not of a text.
    Body,
    /// The hash does not fit the text.
    Hash,
    /// The request id is of no form that we know.
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
            DecodeError::Base64 { layer } => write!(f, "{layer} is not base64"),
            DecodeError::Body => f.write_str("body of a reply is not base64 of a text"),
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
            | DecodeError::Base64 { .. }
            | DecodeError::Body
            | DecodeError::Hash
            | DecodeError::RequestId => None,
        }
    }
}

/// Recorded messages for the tests of this module.
#[cfg(test)]
mod testing {
    use serde_json::Value;

    pub const INSECURE: &str = include_str!("../../tests/vectors/captures/insecure/messages.jsonl");
    pub const X509: &str = include_str!("../../tests/vectors/captures/x509/messages.jsonl");
    pub const ISSUER: &str = include_str!("../../tests/vectors/captures/issuer/messages.jsonl");

    /// The payloads of the recorded messages whose subject starts with `prefix`.
    pub fn recorded(messages: &str, prefix: &str) -> Vec<String> {
        let lines = messages.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        lines
            .filter(|message| message["subject"].as_str().unwrap().starts_with(prefix))
            .map(|message| message["payload"].as_str().unwrap().to_owned())
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use ed25519_dalek::SigningKey;
    use openssl::sha::sha256;

    use super::json::hostile;
    use super::*;

    /// Each kind has its own tests, here and in `rpc`, which compare as many as these.
    #[test]
    fn every_recorded_message_is_of_a_kind_that_is_compared() {
        let kinds = |messages: &str| {
            let mut counts = [0; 4];
            for line in messages.lines() {
                let message: serde_json::Value = serde_json::from_str(line).unwrap();
                let text = |key: &str| message[key].as_str().unwrap_or_default();
                let subject = text("subject");
                let has = |prefix| subject.starts_with(prefix);
                let is_request = has("provisioning.broadcast.") || has("provisioning.node.");
                // An election's answers come to an inbox, and nodes' to a subject that ends in the request's id.
                let last = subject.rsplit('.').next().unwrap();
                let kind = if is_request {
                    0
                } else if has("provisioning.reply.") && RequestId::parse(last).is_some() {
                    1
                } else if has("choria.lifecycle.event.") {
                    2
                } else {
                    assert!(has("choria.streams.") || has("provisioning.reply."), "{subject}");
                    3
                };
                counts[kind] += 1;
            }
            counts
        };
        assert_eq!(kinds(testing::INSECURE), [6, 6, 5, 0]);
        assert_eq!(kinds(testing::X509), [6, 6, 4, 0]);
        assert_eq!(kinds(testing::ISSUER), [6, 6, 5, 40]);
    }

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
    fn makes_request_ids_in_the_form_each_version_wants() {
        let sender = || Sender { identity: Identity::parse("p").unwrap(), caller: "p".to_owned() };
        let key = ed25519_dalek::SigningKey::from_bytes(&[1; 32]);
        let v1 = Codec::V1(v1::Codec::insecure(sender()));
        let v2 = Codec::V2(v2::Codec::new(sender(), v2::Signer::new("a.b.c", key)));
        let id = v1.request_id(1_760_000_000, [0xff; 16]);
        assert_eq!(id.as_str(), "ffffffffffff4fffbfffffffffffffff");
        let id = v2.request_id(1_760_000_000, [0x44; 16]);
        assert_eq!(id.as_str(), "33p35B5SD0RIs35nMKULZiWCeU0");
        assert_eq!(RequestId::parse(id.as_str()), Some(id));
    }

    #[test]
    fn takes_only_32_lower_case_digits_or_a_ksuid_as_a_request_id() {
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

    #[test]
    fn survives_any_nesting_in_every_layer_of_a_reply() {
        hostile::on_a_small_stack(|| {
            let key = SigningKey::from_bytes(&[7; 32]);
            let identity = Identity::parse("provisioner.example.net").unwrap();
            let sender = Sender { identity, caller: "choria=provisioner".to_owned() };
            let codecs = [
                Codec::V1(v1::Codec::insecure(sender.clone())),
                Codec::V2(v2::Codec::new(sender, v2::Signer::new("a.b.c", key))),
            ];
            for value in hostile::values(40_000) {
                for codec in &codecs {
                    for payload in replies_with(codec, &value) {
                        codec.decode_reply(payload.as_bytes()).unwrap_err();
                    }
                }
            }
        });
    }

    /// Replies with `value` as each of their documents, and as each field of these.
    fn replies_with(codec: &Codec, value: &str) -> Vec<String> {
        let (prefix, inner) = match codec {
            Codec::V1(_) => ("choria:", "message"),
            Codec::V2(_) => ("io.choria.protocol.v2.", "reply"),
        };
        let name = |layer: &str| match codec {
            Codec::V1(_) => format!("{prefix}{layer}:1").replace("secure_reply", "secure:reply"),
            Codec::V2(_) => format!("{prefix}{layer}"),
        };
        let transport = |secure: &str| {
            let (protocol, data) = (name("transport"), STANDARD.encode(secure));
            format!(r#"{{"protocol":"{protocol}","data":"{data}","headers":{{}}}}"#)
        };
        let secure = |reply: &str| {
            let hash = STANDARD.encode(sha256(reply.as_bytes()));
            let reply = match codec {
                Codec::V1(_) => serde_json::to_string(reply).unwrap(),
                Codec::V2(_) => format!(r#""{}""#, STANDARD.encode(reply)),
            };
            let protocol = name("secure_reply");
            format!(r#"{{"protocol":"{protocol}","{inner}":{reply},"hash":"{hash}"}}"#)
        };
        let with =
            |layer: &str, key: &str| format!(r#"{{"protocol":"{}","{key}":{value}}}"#, name(layer));
        let mut payloads = vec![value.to_owned(), transport(value), transport(&secure(value))];
        payloads.extend(["data", "headers", "x"].map(|key| with("transport", key)));
        payloads.extend([inner, "hash", "x"].map(|key| transport(&with("secure_reply", key))));
        let fields = ["message", "envelope", "request", "sender", "time", "x"];
        payloads.extend(fields.map(|key| transport(&secure(&with("reply", key)))));
        payloads
    }
}
