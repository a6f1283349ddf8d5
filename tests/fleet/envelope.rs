//! Protocol v1, and what it has in common with v2, as a node speaks it: requests in, replies out.
//!
//! Written apart from the daemon's own codec on purpose, so that one mistake is not made twice.
//! What a request must look like is fixed by the schemas in go-choria `internal/fs/schemas/choria/protocol/v1`.

mod v2;

use std::borrow::Cow;
use std::fmt::Write as _;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;
use serde_json::Value;

/// The version of the protocol that a node understands; another one it drops without a word.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Protocol {
    /// With certificates, or without security.
    #[default]
    V1,
    /// With tokens.
    V2,
}

impl Protocol {
    /// What its outermost document is called.
    pub fn transport(self) -> &'static str {
        match self {
            Protocol::V1 => "choria:transport:1",
            Protocol::V2 => "io.choria.protocol.v2.transport",
        }
    }
}

/// Both versions know the time, in units of their own.
pub const NANOS_PER_SEC: i64 = 1_000_000_000;

/// What vouches for a request. A node that waits to be provisioned does not look at it.
#[derive(Debug, Clone, Default)]
pub struct Proof {
    /// The caller's certificate in PEM, or his client JWT.
    pub credential: String,
    /// By his key; empty if it is not even base64.
    pub signature: Vec<u8>,
    /// What was signed.
    pub signed: Vec<u8>,
}

/// A request that passed every schema.
#[derive(Debug, Clone)]
pub struct Request {
    /// What names this one try: 32 characters, in v2 a KSUID.
    pub id: String,
    /// Identity of the machine that asks.
    pub sender: String,
    /// Who asks, such as `choria=provisioner.example.net`.
    pub caller: String,
    /// The collective it is meant for.
    pub collective: String,
    /// The agent it is meant for.
    pub agent: String,
    /// How far its time may be from ours, in seconds.
    pub ttl: i64,
    /// When it was made, in Unix seconds.
    pub time: i64,
    /// Which nodes are meant.
    pub filter: Filter,
    /// The body, after the base64 that discovery puts around it was taken off.
    pub body: Vec<u8>,
    /// Where the answer goes.
    pub reply_to: String,
    /// What vouches for it.
    pub proof: Proof,
}

/// Which nodes a request is meant for.
#[derive(Debug, Clone, Default)]
pub struct Filter {
    /// Tests on facts; all must hold.
    pub fact: Vec<Value>,
    /// Classes; all must match.
    pub class: Vec<Value>,
    /// Agents; all must match.
    pub agent: Vec<Value>,
    /// Identities; one must match.
    pub identity: Vec<Value>,
    /// Expressions.
    pub compound: Vec<Value>,
}

#[derive(Deserialize)]
struct Transport<'a> {
    #[serde(borrow)]
    protocol: Cow<'a, str>,
    #[serde(borrow)]
    data: Cow<'a, str>,
    #[serde(borrow)]
    headers: Headers<'a>,
}

#[derive(Deserialize)]
struct Headers<'a> {
    #[serde(rename = "reply-to", borrow)]
    reply_to: Option<Cow<'a, str>>,
}

#[derive(Deserialize)]
struct Secure<'a> {
    #[serde(borrow)]
    protocol: Cow<'a, str>,
    message: String,
    #[serde(borrow)]
    signature: Cow<'a, str>,
    #[serde(borrow)]
    pubcert: Cow<'a, str>,
}

#[derive(Deserialize)]
struct Document {
    protocol: String,
    message: String,
    envelope: Envelope,
}

#[derive(Deserialize)]
struct Envelope {
    requestid: String,
    senderid: String,
    callerid: String,
    collective: String,
    agent: String,
    ttl: i64,
    time: i64,
    filter: Filters,
}

#[derive(Deserialize)]
struct Filters {
    fact: Vec<Value>,
    cf_class: Vec<Value>,
    #[serde(default)]
    agent: Vec<Value>,
    identity: Vec<Value>,
    compound: Vec<Value>,
}

impl From<Filters> for Filter {
    fn from(filters: Filters) -> Filter {
        Filter {
            fact: filters.fact,
            class: filters.cf_class,
            agent: filters.agent,
            identity: filters.identity,
            compound: filters.compound,
        }
    }
}

impl Request {
    /// Reads what arrived on a node's subject.
    ///
    /// # Errors
    ///
    /// Why a node would drop it without a word.
    pub fn decode(protocol: Protocol, payload: &[u8]) -> Result<Request, String> {
        match protocol {
            Protocol::V1 => Request::decode_v1(payload),
            Protocol::V2 => v2::decode(payload),
        }
    }

    fn decode_v1(payload: &[u8]) -> Result<Request, String> {
        let transport: Transport<'_> = parse("transport", payload)?;
        wants(&transport.protocol, Protocol::V1.transport())?;
        let secure = STANDARD
            .decode(transport.data.as_bytes())
            .map_err(|error| format!("transport data: {error}"))?;
        let secure: Secure<'_> = parse("secure request", &secure)?;
        wants(&secure.protocol, "choria:secure:request:1")?;
        if secure.message.is_empty() || secure.signature.is_empty() || secure.pubcert.is_empty() {
            return Err("secure request: an empty text".to_owned());
        }
        let document: Document = parse("request", secure.message.as_bytes())?;
        wants(&document.protocol, "choria:request:1")?;
        let envelope = document.envelope;
        if envelope.requestid.chars().count() != 32 {
            return Err(format!("request id {:?} is not 32 long", envelope.requestid));
        }
        if envelope.ttl < 30 {
            return Err(format!("ttl {} is under 30", envelope.ttl));
        }
        if document.message.is_empty()
            || envelope.callerid.is_empty()
            || envelope.collective.is_empty()
            || envelope.agent.is_empty()
        {
            return Err("request: an empty text".to_owned());
        }
        let reply_to = transport.headers.reply_to.unwrap_or_default().into_owned();
        if reply_to.is_empty() {
            return Err("no reply-to".to_owned());
        }
        let body = STANDARD
            .decode(document.message.as_bytes())
            .unwrap_or_else(|_| document.message.into_bytes());
        Ok(Request {
            id: envelope.requestid,
            sender: envelope.senderid,
            caller: envelope.callerid,
            collective: envelope.collective,
            agent: envelope.agent,
            ttl: envelope.ttl,
            time: envelope.time,
            filter: envelope.filter.into(),
            body,
            reply_to,
            proof: Proof {
                signature: STANDARD.decode(secure.signature.as_bytes()).unwrap_or_default(),
                credential: secure.pubcert.into_owned(),
                signed: secure.message.into_bytes(),
            },
        })
    }
}

fn parse<'a, T: Deserialize<'a>>(what: &str, text: &'a [u8]) -> Result<T, String> {
    serde_json::from_slice(text).map_err(|error| format!("{what}: {error}"))
}

fn wants(found: &str, wanted: &str) -> Result<(), String> {
    if found == wanted { Ok(()) } else { Err(format!("protocol {found:?} is not {wanted}")) }
}

/// What differs from node to node and from answer to answer in a reply.
#[derive(Debug, Clone, Copy)]
pub struct Reply<'a> {
    /// How it is written.
    pub protocol: Protocol,
    /// The id of the request it answers.
    pub id: &'a str,
    /// The identity inside the reply.
    pub sender: &'a str,
    /// The identity in the transport's header.
    pub transport_sender: &'a str,
    /// The agent that answers.
    pub agent: &'a str,
    /// When, in Unix nanoseconds; v1 has seconds only.
    pub nanos: i64,
    /// The body.
    pub body: &'a str,
    /// The broker's URL, for the hop in `seen-by`.
    pub broker_url: &'a str,
    /// Whether the hash fits.
    pub good_hash: bool,
}

impl Reply<'_> {
    /// The bytes to publish, keys in the order a Choria Server writes them.
    pub fn encode(&self) -> Vec<u8> {
        match self.protocol {
            Protocol::V1 => self.encode_v1(),
            Protocol::V2 => v2::encode(self),
        }
    }

    fn hash_of(&self, document: &str) -> [u8; 32] {
        let good = openssl::sha::sha256(document.as_bytes());
        if self.good_hash { good } else { openssl::sha::sha256(b"something else") }
    }

    fn encode_v1(&self) -> Vec<u8> {
        let mut document = String::with_capacity(self.body.len() * 9 / 8 + 256);
        document.push_str(r#"{"protocol":"choria:reply:1","message":"#);
        quote(&mut document, self.body);
        document.push_str(r#","envelope":{"requestid":"#);
        quote(&mut document, self.id);
        document.push_str(r#","senderid":"#);
        quote(&mut document, self.sender);
        document.push_str(r#","agent":"#);
        quote(&mut document, self.agent);
        let _ = write!(document, r#","time":{}}}}}"#, self.nanos / NANOS_PER_SEC);

        let mut secure = String::with_capacity(document.len() * 5 / 4 + 256);
        secure.push_str(r#"{"protocol":"choria:secure:reply:1","message":"#);
        quote(&mut secure, &document);
        secure.push_str(r#","hash":""#);
        STANDARD.encode_string(self.hash_of(&document), &mut secure);
        secure.push_str(r#""}"#);

        let mut transport = String::with_capacity(secure.len() * 4 / 3 + 256);
        transport.push_str(r#"{"protocol":"choria:transport:1","data":""#);
        STANDARD.encode_string(secure, &mut transport);
        transport.push_str(r#"","headers":{"mc_sender":"#);
        quote(&mut transport, self.transport_sender);
        transport.push_str(r#","seen-by":"#);
        self.push_hop(&mut transport);
        transport.into_bytes()
    }

    /// The only hop, and the end of the document.
    fn push_hop(&self, transport: &mut String) {
        transport.push_str("[[");
        quote(transport, self.broker_url);
        transport.push(',');
        quote(transport, self.transport_sender);
        transport.push(',');
        quote(transport, self.broker_url);
        transport.push_str("]]}}");
    }
}

/// Appends `text` as a JSON string, escaped as Go's `encoding/json` does.
pub fn quote(out: &mut String, text: &str) {
    out.push('"');
    let mut plain = 0;
    for (at, byte) in text.bytes().enumerate() {
        let escaped: Cow<'static, str> = match byte {
            b'"' => "\\\"".into(),
            b'\\' => "\\\\".into(),
            b'\n' => "\\n".into(),
            b'\r' => "\\r".into(),
            b'\t' => "\\t".into(),
            b'<' => "\\u003c".into(),
            b'>' => "\\u003e".into(),
            b'&' => "\\u0026".into(),
            0..0x20 => format!("\\u{byte:04x}").into(),
            _ => continue,
        };
        out.push_str(&text[plain..at]);
        out.push_str(&escaped);
        plain = at + 1;
    }
    out.push_str(&text[plain..]);
    out.push('"');
}

/// `text` as a JSON string.
pub fn quoted(text: &str) -> String {
    let mut out = String::with_capacity(text.len() + 2);
    quote(&mut out, text);
    out
}
