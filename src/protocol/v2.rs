//! Envelopes of protocol version 2, to and from bytes.
//!
//! As in version 1, a message is three JSON documents inside one another, but each carries the next one, and the last one the body, as
//! base64. Signature and hash cover the bytes of the inner document as they are. Layout and key order as in go-choria `protocol/v2`, which
//! makes our requests equal to the original's byte for byte. Nodes that wait to be provisioned don't sign their replies: as with version 1, the
//! hash protects against accidents only.

use std::borrow::Cow;
use std::fmt;
use std::io::Write;
use std::sync::Arc;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use ed25519_dalek::{Signer as _, SigningKey};
use serde::Deserialize;
use zeroize::Zeroizing;

use crate::protocol::json::push_string;
use crate::protocol::{
    COLLECTIVE, DecodeError, Layer, NANOS_PER_SEC, Reply, Request, RequestId, Sender,
    decode_base64, expect_protocol, open_transport, push_trace, read, verify_hash,
};

/// Wraps what `sender` says, unwraps what nodes answer.
#[derive(Debug, Clone)]
pub struct Codec {
    sender: Sender,
    signer: Arc<Signer>,
}

/// What vouches for a request: our client JWT, and the key it names.
pub struct Signer {
    token: Zeroizing<String>,
    key: SigningKey,
}

impl Signer {
    /// Takes the text of the token, and the key whose public half it names; whether it does is for the caller to check.
    pub fn new(token: &str, key: SigningKey) -> Signer {
        Signer { token: Zeroizing::new(token.trim().to_owned()), key }
    }
}

/// The token lets its holder into the broker.
impl fmt::Debug for Signer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Signer").finish_non_exhaustive()
    }
}

impl Codec {
    /// For requests by `sender`, whose caller id must be the one in the token of `signer`.
    pub fn new(sender: Sender, signer: Signer) -> Codec {
        Codec { sender, signer: Arc::new(signer) }
    }

    /// Who we are in its requests.
    pub fn sender(&self) -> &Sender {
        &self.sender
    }

    /// The transport document for `request`.
    pub fn encode(&self, request: &Request<'_>) -> Vec<u8> {
        let inner = self.request_document(request);
        let secure = self.signer.secure_document(&inner);
        let identity = self.sender.identity.as_str();

        let mut out = Vec::with_capacity(base64_len(secure.len()) + 640);
        out.extend_from_slice(br#"{"protocol":"io.choria.protocol.v2.transport","data":"#);
        push_base64(&mut out, &secure);
        out.extend_from_slice(br#","headers":{"reply":"#);
        push_string(&mut out, request.reply_to.as_str());
        out.extend_from_slice(br#","sender":"#);
        push_string(&mut out, identity);
        out.extend_from_slice(br#","trace":"#);
        push_trace(&mut out, request.broker_url, &self.sender.identity);
        out
    }

    fn request_document(&self, request: &Request<'_>) -> Vec<u8> {
        let mut out = Vec::with_capacity(base64_len(request.body.len()) + 640);
        out.extend_from_slice(br#"{"protocol":"io.choria.protocol.v2.request","message":"#);
        push_base64(&mut out, request.body.as_bytes());
        out.extend_from_slice(br#","id":"#);
        push_string(&mut out, request.id.as_str());
        out.extend_from_slice(br#","sender":"#);
        push_string(&mut out, self.sender.identity.as_str());
        out.extend_from_slice(br#","caller":"#);
        push_string(&mut out, &self.sender.caller);
        out.extend_from_slice(br#","collective":"#);
        push_string(&mut out, COLLECTIVE);
        out.extend_from_slice(br#","agent":"#);
        push_string(&mut out, request.agent);
        write!(out, r#","ttl":{},"time":{}"#, request.ttl_secs, request.unix_nanos)
            .expect("a vector takes all that is written");
        // Nodes refuse a filter without one of these lists.
        out.extend_from_slice(br#","filter":{"fact":[],"cf_class":[],"agent":["#);
        push_string(&mut out, request.filter_agent);
        out.extend_from_slice(br#"],"identity":[],"compound":[]}}"#);
        out
    }

    /// Unwraps a transport document.
    ///
    /// A signature, which only nodes that are provisioned make, is not looked at.
    ///
    /// # Errors
    ///
    /// [`DecodeError`].
    pub fn decode_reply(&self, payload: &[u8]) -> Result<Reply, DecodeError> {
        let bytes = open_transport(payload, "io.choria.protocol.v2.transport")?;
        let secure: SecureDocument = read(&bytes, Layer::Secure)?;
        expect_protocol(&secure.protocol, "io.choria.protocol.v2.secure_reply", Layer::Secure)?;
        let bytes = decode_base64(&secure.reply, Layer::Reply)?;
        verify_hash(&bytes, &secure.hash)?;

        let reply: ReplyDocument = read(&bytes, Layer::Reply)?;
        expect_protocol(&reply.protocol, "io.choria.protocol.v2.reply", Layer::Reply)?;
        let body = STANDARD.decode(reply.message.as_bytes()).map_err(|_| DecodeError::Body)?;
        Ok(Reply {
            request_id: RequestId::parse(&reply.request).ok_or(DecodeError::RequestId)?,
            sender: reply.sender.into_owned(),
            agent: reply.agent.into_owned(),
            unix_time: reply.time.div_euclid(NANOS_PER_SEC),
            body: String::from_utf8(body).map_err(|_| DecodeError::Body)?,
        })
    }
}

impl Signer {
    fn secure_document(&self, request: &[u8]) -> Vec<u8> {
        let signature = self.key.sign(request).to_bytes();
        let mut out = Vec::with_capacity(base64_len(request.len()) + self.token.len() + 256);
        out.extend_from_slice(br#"{"protocol":"io.choria.protocol.v2.secure_request","request":"#);
        push_base64(&mut out, request);
        out.extend_from_slice(br#","signature":"#);
        push_base64(&mut out, &signature);
        out.extend_from_slice(br#","caller":"#);
        push_string(&mut out, &self.token);
        out.push(b'}');
        out
    }
}

/// Writes `bytes` as a JSON string of base64, quotes included, to the end of `out`.
fn push_base64(out: &mut Vec<u8>, bytes: &[u8]) {
    out.push(b'"');
    let start = out.len();
    out.resize(start + base64_len(bytes.len()), 0);
    STANDARD.encode_slice(bytes, &mut out[start..]).expect("the room was made to measure");
    out.push(b'"');
}

/// Characters of padded base64 for this many bytes.
fn base64_len(bytes: usize) -> usize {
    bytes.div_ceil(3) * 4
}

#[derive(Deserialize)]
struct SecureDocument<'a> {
    #[serde(borrow)]
    protocol: Cow<'a, str>,
    #[serde(borrow)]
    reply: Cow<'a, str>,
    #[serde(borrow)]
    hash: Cow<'a, str>,
}

#[derive(Deserialize)]
struct ReplyDocument<'a> {
    #[serde(borrow)]
    protocol: Cow<'a, str>,
    #[serde(borrow)]
    message: Cow<'a, str>,
    #[serde(borrow)]
    request: Cow<'a, str>,
    #[serde(borrow)]
    sender: Cow<'a, str>,
    #[serde(borrow)]
    agent: Cow<'a, str>,
    time: i64,
}

#[cfg(test)]
mod tests {
    use ed25519_dalek::Signature;
    use openssl::sha::sha256;
    use serde_json::{Value, json};

    use super::*;
    use crate::protocol::ksuid::Ksuid;
    use crate::protocol::subject::Subject;
    use crate::protocol::testing::{ISSUER, recorded};
    use crate::protocol::{Identity, REPLY_BYTES_MAX};

    const TOKEN: &str = include_str!("../../tests/vectors/captures/issuer/signer.jwt");
    const SEED: &str = include_str!("../../tests/vectors/captures/issuer/signer.seed");

    #[test]
    fn writes_requests_as_the_original_does() {
        let mut checked = 0;
        for prefix in ["provisioning.broadcast.", "provisioning.node."] {
            for payload in recorded(ISSUER, prefix) {
                check_same_bytes(&payload);
                checked += 1;
            }
        }
        assert_eq!(checked, 6, "all recorded requests were compared");
    }

    /// Takes a recorded request apart and checks that we put it together the same way.
    #[track_caller]
    fn check_same_bytes(payload: &str) {
        let transport: Value = serde_json::from_str(payload).unwrap();
        let request = inner(&secure(payload), "request");
        let text = |value: &Value| value.as_str().unwrap().to_owned();
        let sender = Sender {
            identity: Identity::parse(&text(&request["sender"])).unwrap(),
            caller: text(&request["caller"]),
        };
        let encoded = codec(sender).encode(&Request {
            id: RequestId::parse(&text(&request["id"])).unwrap(),
            agent: &text(&request["agent"]),
            filter_agent: &text(&request["filter"]["agent"][0]),
            body: &String::from_utf8(STANDARD.decode(text(&request["message"])).unwrap()).unwrap(),
            ttl_secs: request["ttl"].as_u64().unwrap().try_into().unwrap(),
            unix_nanos: request["time"].as_i64().unwrap(),
            reply_to: &Subject::new(&text(&transport["headers"]["reply"])).unwrap(),
            broker_url: &text(&transport["headers"]["trace"][0][0]),
        });
        assert_eq!(String::from_utf8(encoded).unwrap(), payload);
    }

    #[test]
    fn writes_the_documented_request() {
        // The same request made by another implementation of the protocol: its signature, size and SHA-256.
        let token = "eyJhbGciOiJFZERTQSIsInR5cCI6IkpXVCJ9.eyJjYWxsZXJpZCI6InByb3Zpc2lvbmVyX3NpZ25lciIsIm91IjoiY2hvcmlhIiwicGVybWlzc2lvbnMiOnsic3RyZWFtc191c2VyIjp0cnVlLCJlbGVjdGlvbl91c2VyIjp0cnVlLCJmbGVldF9tYW5hZ2VtZW50Ijp0cnVlLCJwcm92aXNpb25lciI6dHJ1ZX0sInB1cnBvc2UiOiJjaG9yaWFfY2xpZW50X2lkIiwidGNzIjoiYmZmZmU0NWMzNTgwMTU3Y2M0YzkyYjc1ZjZiMjM3OTZiNTMzZTc1YmEzZWZmMGRhYzU5MTgxNzVlNzFiYjYwMmZjMTI3NjcwODhjMDM0MTA3Y2Q1NzNlYzM1NzBiMjAzNTI4ZGEyMTFiNmU3NzAzMDEyYjljNGFhM2FiZDNkMDIiLCJwdWJsaWNfa2V5IjoiMjlhY2JhZTE0MWJjY2FmMGIyMmUxYTk0ZDM0ZDBiYzczNjFlNTI2ZDBiZmUxMmM4OTc5NGJjOTMyMjk2NmRkNyIsImlzcyI6IkktMDNhMTA3YmZmM2NlMTBiZTFkNzBkZDE4ZTc0YmMwOTk2N2U0ZDYzMDliYTUwZDVmMWRkYzg2NjQxMjU1MzFiOCIsImV4cCI6MjA1MTIyMjQwMCwibmJmIjoxNzUwMDAwMDAwLCJpYXQiOjE3NTAwMDAwMDAsImp0aSI6IjJ5WThBQjA2S0Z0bHhsN1p2RmpsNElYb2JxYiJ9.Fi2JnupyDI32PyCBHGkbPEVBucsHjNqI-ukgpe_6oCrDtmj28IAWdMnxLc61SfMJ6_rZk6iJdr_qj4VgGgDoCg";
        let key = SigningKey::from_bytes(&std::array::from_fn(|at| 0x20 + at as u8));
        let codec = Codec::new(
            Sender {
                identity: Identity::parse("provisioner.example.net").unwrap(),
                caller: "provisioner_signer".to_owned(),
            },
            Signer::new(&format!("{token}\n"), key),
        );
        let id = RequestId::from(Ksuid::new(1_760_000_000, [0x44; 16]));
        let reply_to = format!("provisioning.reply.22ec67b1822edddbee1f71725ee3827c.{id}");
        let payload = codec.encode(&Request {
            id,
            agent: "choria_provision",
            filter_agent: "choria_provision",
            body: r#"{"agent":"choria_provision","action":"gen25519","data":{"nonce":"0f6b1c2d3e4f4a5b8c9d0e1f2a3b4c5d","token":"s3cret"}}"#,
            ttl_secs: 60,
            unix_nanos: 1_760_000_000_000_000_000,
            reply_to: &Subject::new(&reply_to).unwrap(),
            broker_url: "nats://broker.example.net:4222",
        });
        let text = std::str::from_utf8(&payload).unwrap();
        let secure = secure(text);
        assert_eq!(secure["caller"], token, "without the newline of the file");
        assert_eq!(
            secure["signature"],
            "vR0enBvyCs+ObtxqnIJMd4GBwNN7SUnYtEO/vIkpikNTaNZ/4Q1+znOuEtnSRTO3G334VBgvOOP2b8e125YmAw=="
        );
        assert_eq!(payload.len(), 2573);
        let sum: String = sha256(&payload).iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(sum, "6babce98c4c34c1ef52d82f76ccbadfa3e56269f47fb15f507e302314ca0d5d4");
    }

    #[test]
    fn signs_the_bytes_it_sends() {
        let payload = codec(sender()).encode(&Request {
            id: RequestId::from(Ksuid::new(1, [0; 16])),
            agent: "a\"b",
            filter_agent: "c\\d",
            body: "\"\\\n\u{1}<&>ö\u{1f600}",
            ttl_secs: 60,
            unix_nanos: -1,
            reply_to: &Subject::new("a.\"b").unwrap(),
            broker_url: "nats://\"x\":4222",
        });
        let payload = String::from_utf8(payload).unwrap();
        let transport: Value = serde_json::from_str(&payload).unwrap();
        assert_eq!(transport["headers"]["reply"], "a.\"b");
        assert_eq!(transport["headers"]["trace"][0][2], "nats://\"x\":4222");
        let secure = secure(&payload);
        let request = inner(&secure, "request");
        assert_eq!(request["agent"], "a\"b");
        assert_eq!(request["filter"]["agent"], json!(["c\\d"]));
        assert_eq!(request["time"], json!(-1));

        let bytes = |key: &str| STANDARD.decode(secure[key].as_str().unwrap()).unwrap();
        let signature = Signature::from_slice(&bytes("signature")).unwrap();
        key().verifying_key().verify_strict(&bytes("request"), &signature).unwrap();
    }

    #[test]
    fn reads_recorded_replies() {
        let replies: Vec<String> = replies().collect();
        assert_eq!(replies.len(), 6);
        for payload in replies {
            let recorded = inner(&secure(&payload), "reply");
            let reply = codec(sender()).decode_reply(payload.as_bytes()).unwrap();
            assert_eq!(reply.request_id.as_str(), recorded["request"]);
            assert_eq!(reply.sender, "n0.fleet.example.net");
            assert_eq!(reply.agent, recorded["agent"].as_str().unwrap());
            let nanos = recorded["time"].as_i64().unwrap();
            assert_eq!(reply.unix_time, nanos / NANOS_PER_SEC);
            assert_eq!(STANDARD.encode(reply.body), recorded["message"].as_str().unwrap());
        }
    }

    #[test]
    fn reads_a_discovery_reply() {
        let secure = r#"{"protocol":"io.choria.protocol.v2.secure_reply","reply":"eyJwcm90b2NvbCI6ImlvLmNob3JpYS5wcm90b2NvbC52Mi5yZXBseSIsIm1lc3NhZ2UiOiJjRzl1Wnc9PSIsInJlcXVlc3QiOiIzM3AzNUI1U0QwUklzMzVuTUtVTFppV0NlVTAiLCJzZW5kZXIiOiJuMS5leGFtcGxlLm5ldCIsImFnZW50IjoiZGlzY292ZXJ5IiwidGltZSI6MTc2MDAwMDAwMDUwMDAwMDAwMH0=","hash":"lmbb3I5jS1MKVkLMnQAzaomZ7ZmSh56+caI7LgB+PtE="}"#;
        let reply = codec(sender()).decode_reply(&transport_of(secure)).unwrap();
        assert_eq!(
            reply,
            Reply {
                request_id: RequestId::from(Ksuid::new(1_760_000_000, [0x44; 16])),
                sender: "n1.example.net".to_owned(),
                agent: "discovery".to_owned(),
                unix_time: 1_760_000_000,
                body: "pong".to_owned(),
            }
        );
    }

    #[test]
    fn reads_signed_replies_of_nodes_that_are_provisioned() {
        let payload = replies().next().unwrap();
        let mut secure = secure(&payload);
        secure["signature"] = json!("AAAA");
        secure["sender"] = json!("a.b.c");
        let reply = codec(sender()).decode_reply(&transport_of(&secure.to_string())).unwrap();
        assert_eq!(reply, codec(sender()).decode_reply(payload.as_bytes()).unwrap());
    }

    #[test]
    fn refuses_a_hash_that_does_not_fit() {
        let document = reply_document().to_string();
        let good = STANDARD.encode(sha256(document.as_bytes()));
        assert!(codec(sender()).decode_reply(&wrapped(&document, &good)).is_ok());
        // The same document written with other blanks is another text.
        check_hash(&document.replace(':', ": "), &good);
        check_hash(&document, "");
        check_hash(&document, &good[..43]);
        check_hash(&document, &format!("{good}\n"));
        check_hash(&document, &good.to_lowercase());
    }

    #[track_caller]
    fn check_hash(document: &str, hash: &str) {
        let error = codec(sender()).decode_reply(&wrapped(document, hash)).unwrap_err();
        assert!(matches!(error, DecodeError::Hash), "{error:?}");
    }

    #[test]
    fn refuses_documents_of_another_kind() {
        let payload = replies().next().unwrap();
        check(
            &payload.replace(".v2.transport", ".v3.transport"),
            "unknown kind of transport document",
        );
        let request = recorded(ISSUER, "provisioning.node.").swap_remove(0);
        check(&request, "malformed secure reply document");
        let mut spoilt = secure(&payload);
        spoilt["protocol"] = json!("io.choria.protocol.v2.secure_request");
        check_bytes(&transport_of(&spoilt.to_string()), "unknown kind of secure reply document");
        let mut spoilt = reply_document();
        spoilt["protocol"] = json!("io.choria.protocol.v2.request");
        check_bytes(&hashed(&spoilt), "unknown kind of reply document");
        for version_1 in recorded(crate::protocol::testing::INSECURE, "provisioning.reply.") {
            check(&version_1, "unknown kind of transport document");
        }
    }

    #[test]
    fn refuses_what_is_not_base64_or_no_text() {
        check(
            r#"{"protocol":"io.choria.protocol.v2.transport","data":"e30"}"#,
            "secure reply is not base64",
        );
        let spoilt =
            json!({"protocol": "io.choria.protocol.v2.secure_reply", "reply": "!", "hash": ""});
        check_bytes(&transport_of(&spoilt.to_string()), "reply is not base64");
        for message in ["!", "cG9uZw", "/w==", "cG9u\nZw=="] {
            let mut spoilt = reply_document();
            spoilt["message"] = json!(message);
            check_bytes(&hashed(&spoilt), "body of a reply is not base64 of a text");
        }
        for id in ["", "3MnolWk8M44MdBHvvLxHYtH5ka", "zzzzzzzzzzzzzzzzzzzzzzzzzzz", ">"] {
            let mut spoilt = reply_document();
            spoilt["request"] = json!(id);
            check_bytes(&hashed(&spoilt), "malformed request id in a reply");
        }
    }

    #[track_caller]
    fn check(payload: &str, expected: &str) {
        check_bytes(payload.as_bytes(), expected);
    }

    #[track_caller]
    fn check_bytes(payload: &[u8], expected: &str) {
        let error = codec(sender()).decode_reply(payload).unwrap_err();
        assert_eq!(error.to_string(), expected);
    }

    #[test]
    fn refuses_every_field_that_is_missing_null_or_of_another_type() {
        let payload = replies().next().unwrap();
        let transport: Value = serde_json::from_str(&payload).unwrap();
        check_fields(&transport, &|document| document.to_string().into_bytes());
        check_fields(&secure(&payload), &|document| transport_of(&document.to_string()));
        check_fields(&reply_document(), &hashed);
    }

    /// Spoils each field of the object, one after the other.
    fn check_fields(document: &Value, wrap: &dyn Fn(&Value) -> Vec<u8>) {
        let decode = |document: &Value| codec(sender()).decode_reply(&wrap(document));
        assert!(decode(document).is_ok(), "unspoilt {document}");
        // The trace in the transport's headers is the only thing not looked at.
        for key in document.as_object().unwrap().keys().filter(|key| *key != "headers") {
            let mut spoilt = document.clone();
            spoilt.as_object_mut().unwrap().remove(key);
            assert!(decode(&spoilt).is_err(), "{key} missing");
            for wrong in [json!(null), json!(true), json!(1.5), json!([]), json!({})] {
                spoilt[key] = wrong.clone();
                assert!(decode(&spoilt).is_err(), "{key}: {wrong}");
            }
        }
    }

    #[test]
    fn refuses_oversized_and_deeply_nested_replies() {
        let payload = vec![b' '; REPLY_BYTES_MAX + 1];
        let error = codec(sender()).decode_reply(&payload).unwrap_err();
        assert!(matches!(error, DecodeError::TooLarge { .. }), "{error:?}");

        let deep = "[".repeat(100_000);
        let reply = format!(r#"{{"protocol":"io.choria.protocol.v2.reply","message":{deep}"#);
        for payload in [
            deep.as_bytes().to_vec(),
            format!(r#"{{"x":{deep}"#).into_bytes(),
            transport_of(&format!(r#"{{"x":{deep}"#)),
            wrapped(&reply, &STANDARD.encode(sha256(reply.as_bytes()))),
        ] {
            assert!(codec(sender()).decode_reply(&payload).is_err());
        }
    }

    #[test]
    fn answers_flipped_bytes_with_an_error_or_the_same_reply() {
        let mut random = fastrand::Rng::with_seed(7);
        let codec = codec(sender());
        for payload in replies() {
            let original = codec.decode_reply(payload.as_bytes()).unwrap();
            let secure = secure(&payload).to_string();
            for _ in 0..500 {
                let mut bytes = payload.clone().into_bytes();
                flip(&mut bytes, &mut random);
                if let Ok(reply) = codec.decode_reply(&bytes) {
                    assert_eq!(reply, original, "the hash covers all that is read");
                }
                bytes.truncate(random.usize(..bytes.len()));
                assert!(codec.decode_reply(&bytes).is_err());

                // The same one layer further in, behind the base64.
                let mut bytes = secure.clone().into_bytes();
                flip(&mut bytes, &mut random);
                if let Ok(reply) = codec.decode_reply(&transport_of_bytes(&bytes)) {
                    assert_eq!(reply, original, "the hash covers all that is read");
                }

                // And in the reply, with a hash that fits.
                let mut bytes = inner(&serde_json::from_str(&secure).unwrap(), "reply")
                    .to_string()
                    .into_bytes();
                flip(&mut bytes, &mut random);
                let secure = json!({
                    "protocol": "io.choria.protocol.v2.secure_reply",
                    "reply": STANDARD.encode(&bytes),
                    "hash": STANDARD.encode(sha256(&bytes)),
                });
                let _ = codec.decode_reply(&transport_of(&secure.to_string()));
            }
        }
    }

    fn flip(bytes: &mut [u8], random: &mut fastrand::Rng) {
        for _ in 0..random.usize(1..4) {
            let at = random.usize(..bytes.len());
            bytes[at] ^= 1 << random.u8(..8);
        }
    }

    #[test]
    fn shows_no_secret_in_debug_output() {
        let shown = format!("{:?}", codec(sender()));
        assert!(!shown.contains("eyJ") && shown.contains("Signer { .. }"), "{shown}");
    }

    fn replies() -> impl Iterator<Item = String> {
        // Election answers come to the same subjects.
        recorded(ISSUER, "provisioning.reply.")
            .into_iter()
            .filter(|payload| payload.contains("v2.transport"))
    }

    fn codec(sender: Sender) -> Codec {
        Codec::new(sender, Signer::new(TOKEN, key()))
    }

    fn key() -> SigningKey {
        let byte = |at: usize| u8::from_str_radix(&SEED[2 * at..2 * at + 2], 16).unwrap();
        SigningKey::from_bytes(&std::array::from_fn(byte))
    }

    fn sender() -> Sender {
        Sender {
            identity: Identity::parse("provisioner.example.net").unwrap(),
            caller: "provisioner_signer".to_owned(),
        }
    }

    fn reply_document() -> Value {
        inner(&secure(&replies().next().unwrap()), "reply")
    }

    /// A transport document around `reply`, with a hash that fits.
    fn hashed(reply: &Value) -> Vec<u8> {
        let text = reply.to_string();
        wrapped(&text, &STANDARD.encode(sha256(text.as_bytes())))
    }

    fn wrapped(reply: &str, hash: &str) -> Vec<u8> {
        let secure = json!({
            "protocol": "io.choria.protocol.v2.secure_reply",
            "reply": STANDARD.encode(reply),
            "hash": hash,
        });
        transport_of(&secure.to_string())
    }

    fn transport_of(secure: &str) -> Vec<u8> {
        transport_of_bytes(secure.as_bytes())
    }

    fn transport_of_bytes(secure: &[u8]) -> Vec<u8> {
        json!({
            "protocol": "io.choria.protocol.v2.transport",
            "data": STANDARD.encode(secure),
            "headers": {"sender": "n0.fleet.example.net"},
        })
        .to_string()
        .into_bytes()
    }

    fn secure(payload: &str) -> Value {
        let transport: Value = serde_json::from_str(payload).unwrap();
        let bytes = STANDARD.decode(transport["data"].as_str().unwrap()).unwrap();
        serde_json::from_slice(&bytes).unwrap()
    }

    fn inner(secure: &Value, key: &str) -> Value {
        let bytes = STANDARD.decode(secure[key].as_str().unwrap()).unwrap();
        serde_json::from_slice(&bytes).unwrap()
    }
}
