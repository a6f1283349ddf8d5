//! Protocol v2 as a node speaks it.
//!
//! What a request must look like is fixed by the schemas in go-choria `internal/fs/schemas/choria/protocol/v2`, and the order of keys in
//! replies by its `protocol/v2`.

use std::borrow::Cow;
use std::fmt::Write as _;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;

use super::{Filters, NANOS_PER_SEC, Proof, Protocol, Reply, Request, parse, quote, wants};

#[derive(Deserialize)]
struct Transport<'a> {
    #[serde(borrow)]
    protocol: Cow<'a, str>,
    #[serde(borrow)]
    data: Cow<'a, str>,
    #[serde(default)]
    headers: Headers,
}

#[derive(Deserialize, Default)]
struct Headers {
    reply: Option<String>,
}

#[derive(Deserialize)]
struct Secure<'a> {
    #[serde(borrow)]
    protocol: Cow<'a, str>,
    #[serde(borrow)]
    request: Cow<'a, str>,
    #[serde(borrow)]
    signature: Cow<'a, str>,
    caller: String,
}

#[derive(Deserialize)]
struct Document {
    protocol: String,
    message: String,
    id: String,
    sender: String,
    caller: String,
    collective: String,
    agent: String,
    ttl: i64,
    time: i64,
    filter: Filters,
}

/// Reads a request, or says why a node would drop it without a word.
pub(super) fn decode(payload: &[u8]) -> Result<Request, String> {
    let bytes = |what: &str, text: &str| {
        STANDARD.decode(text.as_bytes()).map_err(|error| format!("{what}: {error}"))
    };
    let transport: Transport<'_> = parse("transport", payload)?;
    wants(&transport.protocol, Protocol::V2.transport())?;
    let secure = bytes("transport data", &transport.data)?;
    let secure: Secure<'_> = parse("secure request", &secure)?;
    wants(&secure.protocol, "io.choria.protocol.v2.secure_request")?;
    if [&*secure.request, &secure.signature, &secure.caller].contains(&"") {
        return Err("secure request: an empty text".to_owned());
    }
    let signature = bytes("signature", &secure.signature)?;
    let signed = bytes("request", &secure.request)?;
    let document: Document = parse("request", &signed)?;
    wants(&document.protocol, "io.choria.protocol.v2.request")?;
    let texts = [
        &document.message,
        &document.id,
        &document.sender,
        &document.caller,
        &document.collective,
        &document.agent,
    ];
    if texts.into_iter().any(String::is_empty) {
        return Err("request: an empty text".to_owned());
    }
    if document.ttl < 1 || document.time < 1 {
        return Err(format!("ttl {} and time {}", document.ttl, document.time));
    }
    let reply_to = transport.headers.reply.unwrap_or_default();
    if reply_to.is_empty() {
        return Err("no reply".to_owned());
    }
    let body = bytes("message", &document.message)?;
    Ok(Request {
        id: document.id,
        sender: document.sender,
        caller: document.caller,
        collective: document.collective,
        agent: document.agent,
        ttl: document.ttl,
        time: document.time / NANOS_PER_SEC,
        filter: document.filter.into(),
        // The one of discovery is encoded once more.
        body: STANDARD.decode(&body).unwrap_or(body),
        reply_to,
        proof: Proof { credential: secure.caller, signature, signed },
    })
}

/// The bytes to publish, keys in the order a Choria Server writes them.
pub(super) fn encode(reply: &Reply<'_>) -> Vec<u8> {
    let mut document = String::with_capacity(reply.body.len() * 4 / 3 + 256);
    document.push_str(r#"{"protocol":"io.choria.protocol.v2.reply","message":""#);
    STANDARD.encode_string(reply.body, &mut document);
    document.push_str(r#"","request":"#);
    quote(&mut document, reply.id);
    document.push_str(r#","sender":"#);
    quote(&mut document, reply.sender);
    document.push_str(r#","agent":"#);
    quote(&mut document, reply.agent);
    let _ = write!(document, r#","time":{}}}"#, reply.nanos);

    let mut secure = String::with_capacity(document.len() * 4 / 3 + 256);
    secure.push_str(r#"{"protocol":"io.choria.protocol.v2.secure_reply","reply":""#);
    STANDARD.encode_string(&document, &mut secure);
    secure.push_str(r#"","hash":""#);
    STANDARD.encode_string(reply.hash_of(&document), &mut secure);
    secure.push_str(r#""}"#);

    let mut transport = String::with_capacity(secure.len() * 4 / 3 + 256);
    transport.push_str(r#"{"protocol":"io.choria.protocol.v2.transport","data":""#);
    STANDARD.encode_string(secure, &mut transport);
    transport.push_str(r#"","headers":{"sender":"#);
    quote(&mut transport, reply.transport_sender);
    transport.push_str(r#","trace":"#);
    reply.push_hop(&mut transport);
    transport.into_bytes()
}
