//! Envelopes of protocol version 1, to and from bytes.
//!
//! A message is three JSON documents inside one another: the transport carries the secure document as base64, and that
//! one carries the request or reply as a string. A signature or hash covers the bytes of that string as they are, so a
//! receiver must never write it anew. Layout and key order as in go-choria `protocol/v1`, which makes our requests equal
//! to the original's byte for byte. Version 1 replies are never signed: their hash protects against accidents only.

use std::borrow::Cow;
use std::io::Write;
use std::sync::Arc;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;
use serde_json::value::RawValue;

use crate::pki::x509;
use crate::protocol::json::{self, Object, push_string};
use crate::protocol::{
    COLLECTIVE, DecodeError, Layer, NANOS_PER_SEC, Reply, Request, RequestId, Sender,
    expect_protocol, open_transport, push_trace, read, verify_hash,
};

/// Wraps what `sender` says, unwraps what nodes answer.
#[derive(Debug, Clone)]
pub struct Codec {
    sender: Sender,
    signer: Signer,
}

/// What vouches for a request.
#[derive(Debug, Clone)]
pub enum Signer {
    /// Nothing: requests say `insecure` in place of signature and certificate.
    Insecure,
    /// Our RSA key and its certificate.
    X509(Arc<x509::Signer>),
}

impl Codec {
    /// For requests by `sender`, whom `signer` vouches for.
    pub fn new(sender: Sender, signer: Signer) -> Codec {
        Codec { sender, signer }
    }

    /// For networks without security (`choria_insecure`).
    pub fn insecure(sender: Sender) -> Codec {
        Codec::new(sender, Signer::Insecure)
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

        let mut out = String::with_capacity(secure.len() / 3 * 4 + 640);
        out.push_str(r#"{"protocol":"choria:transport:1","data":""#);
        STANDARD.encode_string(&secure, &mut out);
        let mut out = out.into_bytes();
        out.extend_from_slice(br#"","headers":{"reply-to":"#);
        push_string(&mut out, request.reply_to.as_str());
        out.extend_from_slice(br#","mc_sender":"#);
        push_string(&mut out, identity);
        out.extend_from_slice(br#","seen-by":"#);
        push_trace(&mut out, request.broker_url, &self.sender.identity);
        out
    }

    fn request_document(&self, request: &Request<'_>) -> String {
        let mut out = Vec::with_capacity(request.body.len() / 4 * 5 + 640);
        out.extend_from_slice(br#"{"protocol":"choria:request:1","message":"#);
        push_string(&mut out, request.body);
        out.extend_from_slice(br#","envelope":{"requestid":"#);
        push_string(&mut out, request.id.as_str());
        out.extend_from_slice(br#","senderid":"#);
        push_string(&mut out, self.sender.identity.as_str());
        out.extend_from_slice(br#","callerid":"#);
        push_string(&mut out, &self.sender.caller);
        out.extend_from_slice(br#","collective":"#);
        push_string(&mut out, COLLECTIVE);
        out.extend_from_slice(br#","agent":"#);
        push_string(&mut out, request.agent);
        let unix_time = request.unix_nanos.div_euclid(NANOS_PER_SEC);
        write!(out, r#","ttl":{},"time":{unix_time}"#, request.ttl_secs)
            .expect("a vector takes all that is written");
        // Nodes refuse a filter without one of these lists.
        out.extend_from_slice(br#","filter":{"fact":[],"cf_class":[],"agent":["#);
        push_string(&mut out, request.filter_agent);
        out.extend_from_slice(br#"],"identity":[],"compound":[]}}}"#);
        String::from_utf8(out).expect("made of strings")
    }

    /// Unwraps a transport document.
    ///
    /// # Errors
    ///
    /// [`DecodeError`].
    pub fn decode_reply(&self, payload: &[u8]) -> Result<Reply, DecodeError> {
        let bytes = open_transport(payload, "choria:transport:1")?;
        let secure: SecureDocument = read(&bytes, Layer::Secure)?;
        expect_protocol(&secure.protocol, "choria:secure:reply:1", Layer::Secure)?;
        let message = text(secure.message, Layer::Secure)?;
        verify_hash(message.as_bytes(), &secure.hash)?;

        let reply: ReplyDocument = read(message.as_bytes(), Layer::Reply)?;
        expect_protocol(&reply.protocol, "choria:reply:1", Layer::Reply)?;
        let envelope = reply.envelope.0;
        Ok(Reply {
            request_id: RequestId::parse(&envelope.requestid).ok_or(DecodeError::RequestId)?,
            sender: envelope.senderid.into_owned(),
            agent: envelope.agent.into_owned(),
            unix_time: envelope.time,
            body: text(reply.message, Layer::Reply)?.into_owned(),
        })
    }
}

/// A long text within a document, which serde would put together bit by bit.
fn text(value: &RawValue, layer: Layer) -> Result<Cow<'_, str>, DecodeError> {
    json::text(value).map_err(|source| DecodeError::Json { layer, source: source.into() })
}

impl Signer {
    fn secure_document(&self, request: &str) -> Vec<u8> {
        let (signature, certificate) = match self {
            Signer::Insecure => (Cow::Borrowed("insecure"), "insecure"),
            Signer::X509(signer) => {
                let signature = STANDARD.encode(signer.sign(request.as_bytes()));
                (Cow::Owned(signature), signer.certificate())
            }
        };
        let mut out = Vec::with_capacity(request.len() / 2 * 3 + certificate.len() + 512);
        out.extend_from_slice(br#"{"protocol":"choria:secure:request:1","message":"#);
        push_string(&mut out, request);
        out.extend_from_slice(br#","signature":"#);
        push_string(&mut out, &signature);
        out.extend_from_slice(br#","pubcert":"#);
        push_string(&mut out, certificate);
        out.push(b'}');
        out
    }
}

#[derive(Deserialize)]
struct SecureDocument<'a> {
    #[serde(borrow)]
    protocol: Cow<'a, str>,
    #[serde(borrow)]
    message: &'a RawValue,
    #[serde(borrow)]
    hash: Cow<'a, str>,
}

#[derive(Deserialize)]
struct ReplyDocument<'a> {
    #[serde(borrow)]
    protocol: Cow<'a, str>,
    #[serde(borrow)]
    message: &'a RawValue,
    #[serde(borrow)]
    envelope: Object<Envelope<'a>>,
}

#[derive(Deserialize)]
struct Envelope<'a> {
    #[serde(borrow)]
    requestid: Cow<'a, str>,
    #[serde(borrow)]
    senderid: Cow<'a, str>,
    #[serde(borrow)]
    agent: Cow<'a, str>,
    time: i64,
}

#[cfg(test)]
mod tests {
    use openssl::sha::sha256;
    use serde_json::{Value, json};

    use super::*;
    use crate::protocol::subject::Subject;
    use crate::protocol::testing::{INSECURE, X509, recorded};
    use crate::protocol::{Identity, REPLY_BYTES_MAX};

    fn secure(payload: &str) -> Value {
        let transport: Value = serde_json::from_str(payload).unwrap();
        let bytes = STANDARD.decode(transport["data"].as_str().unwrap()).unwrap();
        serde_json::from_slice(&bytes).unwrap()
    }

    #[test]
    fn writes_requests_as_the_original_does() {
        for (messages, signer) in [(INSECURE, Signer::Insecure), (X509, recorded_signer())] {
            let mut checked = 0;
            for prefix in ["provisioning.broadcast.", "provisioning.node."] {
                for payload in recorded(messages, prefix) {
                    check_same_bytes(&payload, &signer);
                    checked += 1;
                }
            }
            assert_eq!(checked, 6, "all recorded requests were compared");
        }
        check_same_bytes(DISCOVERY, &Signer::Insecure);
        check_same_bytes(INVENTORY, &Signer::Insecure);
    }

    #[test]
    fn signs_as_the_original_does() {
        let Signer::X509(signer) = recorded_signer() else { unreachable!() };
        for payload in recorded(X509, "provisioning.node.") {
            let secure = secure(&payload);
            let message = secure["message"].as_str().unwrap();
            let signature = STANDARD.decode(secure["signature"].as_str().unwrap()).unwrap();
            assert_eq!(signer.sign(message.as_bytes()), signature);
            assert_ne!(signer.sign(format!("{message} ").as_bytes()), signature);
            assert_eq!(signer.certificate(), secure["pubcert"].as_str().unwrap());
        }
    }

    fn recorded_signer() -> Signer {
        let certificate = include_str!("../../tests/vectors/captures/x509/prov.pem").to_owned();
        let key = include_str!("../../tests/vectors/captures/x509/prov-key.pem");
        Signer::X509(Arc::new(x509::Signer::new(certificate, key).unwrap()))
    }

    /// Takes a recorded request apart and checks that we put it together the same way.
    #[track_caller]
    fn check_same_bytes(payload: &str, signer: &Signer) {
        let transport: Value = serde_json::from_str(payload).unwrap();
        let request: Value =
            serde_json::from_str(secure(payload)["message"].as_str().unwrap()).unwrap();
        let envelope = &request["envelope"];
        let text = |value: &Value| value.as_str().unwrap().to_owned();

        let sender = Sender {
            identity: Identity::parse(&text(&envelope["senderid"])).unwrap(),
            caller: text(&envelope["callerid"]),
        };
        let codec = Codec::new(sender, signer.clone());
        let encoded = codec.encode(&Request {
            id: RequestId::parse(&text(&envelope["requestid"])).unwrap(),
            agent: &text(&envelope["agent"]),
            filter_agent: &text(&envelope["filter"]["agent"][0]),
            body: &text(&request["message"]),
            ttl_secs: envelope["ttl"].as_u64().unwrap().try_into().unwrap(),
            unix_nanos: envelope["time"].as_i64().unwrap() * NANOS_PER_SEC + 999_999_999,
            reply_to: &Subject::new(&text(&transport["headers"]["reply-to"])).unwrap(),
            broker_url: &text(&transport["headers"]["seen-by"][0][0]),
        });
        assert_eq!(String::from_utf8(encoded).unwrap(), payload);
    }

    #[test]
    fn survives_text_that_needs_escaping_at_every_level() {
        let codec = codec();
        let body = "\"\\\n\r\t\u{8}\u{1}\u{7f}<&>\u{2028}ö\u{1f600}".repeat(3);
        let id = RequestId::random();
        let encoded = codec.encode(&Request {
            id,
            agent: "a\"b",
            filter_agent: "c\\d",
            body: &body,
            ttl_secs: 60,
            unix_nanos: -1,
            reply_to: &Subject::new("a.\"b").unwrap(),
            broker_url: "nats://\"x\":4222",
        });
        let payload = String::from_utf8(encoded).unwrap();
        let transport: Value = serde_json::from_str(&payload).unwrap();
        assert_eq!(transport["headers"]["reply-to"], "a.\"b");
        assert_eq!(transport["headers"]["seen-by"][0][2], "nats://\"x\":4222");
        let request: Value =
            serde_json::from_str(secure(&payload)["message"].as_str().unwrap()).unwrap();
        assert_eq!(request["message"], body);
        assert_eq!(request["envelope"]["agent"], "a\"b");
        assert_eq!(request["envelope"]["filter"]["agent"], json!(["c\\d"]));
        assert_eq!(request["envelope"]["time"], json!(-1));
    }

    #[test]
    fn reads_recorded_replies() {
        for messages in [INSECURE, X509] {
            let replies = recorded(messages, "provisioning.reply.");
            assert_eq!(replies.len(), 6);
            for payload in replies {
                let inner: Value =
                    serde_json::from_str(secure(&payload)["message"].as_str().unwrap()).unwrap();
                let reply = codec().decode_reply(payload.as_bytes()).unwrap();
                assert_eq!(reply.request_id.as_str(), inner["envelope"]["requestid"]);
                assert_eq!(reply.sender, "n0.fleet.example.net");
                assert_eq!(reply.agent, inner["envelope"]["agent"].as_str().unwrap());
                assert_eq!(reply.unix_time, inner["envelope"]["time"].as_i64().unwrap());
                assert_eq!(reply.body, inner["message"].as_str().unwrap());
            }
        }
    }

    #[test]
    fn reads_a_discovery_reply() {
        let reply = codec().decode_reply(PONG.as_bytes()).unwrap();
        assert_eq!(
            reply,
            Reply {
                request_id: RequestId::parse("6c1f0d5e0b8a4f0f9a3d2b7c4e5f6a71").unwrap(),
                sender: "n1.fleet.example.net".to_owned(),
                agent: "discovery".to_owned(),
                unix_time: 1_767_225_601,
                body: "pong".to_owned(),
            }
        );
    }

    #[test]
    fn refuses_a_hash_that_does_not_fit() {
        let message = reply_document();
        let good = STANDARD.encode(sha256(message.as_bytes()));
        assert!(codec().decode_reply(&wrapped(&message, &good)).is_ok());
        // The same document written with other blanks is another text.
        check_hash(&message.replace(":{", ": {"), &good);
        check_hash(&message, "");
        check_hash(&message, &good[..43]);
        check_hash(&message, &format!("{good}\n"));
        check_hash(&message, &good.to_lowercase());
        // Bits behind the end of the last byte: lax decoders take it, it is not canonical.
        let last = char::from(good.as_bytes()[42]);
        let alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
        let next = alphabet.chars().nth(alphabet.find(last).unwrap() + 1).unwrap();
        check_hash(&message, &format!("{}{next}=", &good[..42]));
    }

    #[track_caller]
    fn check_hash(message: &str, hash: &str) {
        let error = codec().decode_reply(&wrapped(message, hash)).unwrap_err();
        assert!(matches!(error, DecodeError::Hash), "{error:?}");
    }

    #[test]
    fn refuses_documents_of_another_kind() {
        check_protocol(&PONG.replace("choria:transport:1", "choria:transport:2"), Layer::Transport);
        check_protocol(
            &PONG.replace("choria:transport:1", "choria:transport:1 "),
            Layer::Transport,
        );
        // A request of ours is no reply, even though it is well-formed.
        let request = codec().encode(&Request {
            id: RequestId::random(),
            agent: "a",
            filter_agent: "a",
            body: "b",
            ttl_secs: 60,
            unix_nanos: 1,
            reply_to: &Subject::new("x").unwrap(),
            broker_url: "",
        });
        assert!(codec().decode_reply(&request).is_err());
        let inner = reply_document().replace("choria:reply:1", "choria:request:1");
        let payload = wrapped(&inner, &STANDARD.encode(sha256(inner.as_bytes())));
        check_protocol(std::str::from_utf8(&payload).unwrap(), Layer::Reply);
    }

    #[track_caller]
    fn check_protocol(payload: &str, expected: Layer) {
        let error = codec().decode_reply(payload.as_bytes()).unwrap_err();
        assert!(matches!(error, DecodeError::Protocol { layer } if layer == expected), "{error:?}");
    }

    #[test]
    fn refuses_every_field_that_is_missing_null_or_of_another_type() {
        let transport: Value = serde_json::from_str(PONG).unwrap();
        check_fields(&transport, "", &|document| document.to_string().into_bytes());
        let secure = secure(PONG);
        check_fields(&secure, "", &|document| transport_of(&document.to_string()));
        let reply: Value = serde_json::from_str(&reply_document()).unwrap();
        let wrap = |document: &Value| {
            let text = document.to_string();
            wrapped(&text, &STANDARD.encode(sha256(text.as_bytes())))
        };
        check_fields(&reply, "", &wrap);
        check_fields(&reply, "/envelope", &wrap);
    }

    /// Spoils each field of the object at `pointer`, one after the other.
    fn check_fields(document: &Value, pointer: &str, wrap: &dyn Fn(&Value) -> Vec<u8>) {
        assert!(codec().decode_reply(&wrap(document)).is_ok(), "unspoilt {document}");
        let fields = document.pointer(pointer).unwrap().as_object().unwrap();
        // The trace in the transport's headers is the only thing not looked at.
        for key in fields.keys().filter(|key| *key != "headers") {
            let mut spoilt = document.clone();
            spoilt.pointer_mut(pointer).unwrap().as_object_mut().unwrap().remove(key);
            let result = codec().decode_reply(&wrap(&spoilt));
            assert!(result.is_err(), "{pointer}/{key} missing");
            for wrong in
                [json!(null), json!(true), json!(1.5), json!([]), json!([["x"]]), json!({})]
            {
                let mut spoilt = document.clone();
                spoilt.pointer_mut(pointer).unwrap()[key] = wrong.clone();
                let result = codec().decode_reply(&wrap(&spoilt));
                assert!(result.is_err(), "{pointer}/{key}: {wrong}");
            }
        }
    }

    #[test]
    fn refuses_lists_in_the_place_of_objects() {
        let secure = secure(PONG);
        let list = json!(["choria:transport:1", transport_data(&secure.to_string())]).to_string();
        assert!(codec().decode_reply(list.as_bytes()).is_err());
    }

    #[test]
    fn refuses_oversized_replies_unread() {
        let payload = vec![b' '; REPLY_BYTES_MAX + 1];
        let error = codec().decode_reply(&payload).unwrap_err();
        assert!(matches!(error, DecodeError::TooLarge { .. }), "{error:?}");
    }

    #[test]
    fn survives_documents_nested_a_hundred_thousand_deep() {
        let deep = "[".repeat(100_000);
        let reply = format!(r#"{{"protocol":"choria:reply:1","message":{deep}"#);
        for payload in [
            deep.as_bytes().to_vec(),
            format!(r#"{{"protocol":"choria:transport:1","data":{deep}"#).into_bytes(),
            format!(r#"{{"x":{deep}"#).into_bytes(),
            wrapped(&reply, &STANDARD.encode(sha256(reply.as_bytes()))),
        ] {
            assert!(codec().decode_reply(&payload).is_err());
        }
    }

    #[test]
    fn answers_flipped_bytes_with_an_error_or_the_same_reply() {
        let mut random = fastrand::Rng::with_seed(7);
        for payload in recorded(INSECURE, "provisioning.reply.") {
            let original = codec().decode_reply(payload.as_bytes()).unwrap();
            for _ in 0..500 {
                let mut bytes = payload.clone().into_bytes();
                for _ in 0..random.usize(1..4) {
                    let at = random.usize(..bytes.len());
                    bytes[at] ^= 1 << random.u8(..8);
                }
                if let Ok(reply) = codec().decode_reply(&bytes) {
                    assert_eq!(reply, original, "the hash covers all that is read");
                }
                bytes.truncate(random.usize(..bytes.len()));
                assert!(codec().decode_reply(&bytes).is_err());
            }
        }
    }

    fn codec() -> Codec {
        Codec::insecure(Sender {
            identity: Identity::parse("prov1.example.net").unwrap(),
            caller: "choria=prov1.example.net".to_owned(),
        })
    }

    fn reply_document() -> String {
        secure(PONG)["message"].as_str().unwrap().to_owned()
    }

    /// A transport document around the reply document `message`.
    fn wrapped(message: &str, hash: &str) -> Vec<u8> {
        let secure = json!({"protocol": "choria:secure:reply:1", "message": message, "hash": hash});
        transport_of(&secure.to_string())
    }

    fn transport_of(secure: &str) -> Vec<u8> {
        let headers = json!({"mc_sender": "n1.fleet.example.net"});
        json!({"protocol": "choria:transport:1", "data": transport_data(secure), "headers": headers})
            .to_string()
            .into_bytes()
    }

    fn transport_data(secure: &str) -> String {
        STANDARD.encode(secure)
    }

    const DISCOVERY: &str = r#"{"protocol":"choria:transport:1","data":"eyJwcm90b2NvbCI6ImNob3JpYTpzZWN1cmU6cmVxdWVzdDoxIiwibWVzc2FnZSI6IntcInByb3RvY29sXCI6XCJjaG9yaWE6cmVxdWVzdDoxXCIsXCJtZXNzYWdlXCI6XCJjR2x1Wnc9PVwiLFwiZW52ZWxvcGVcIjp7XCJyZXF1ZXN0aWRcIjpcIjZjMWYwZDVlMGI4YTRmMGY5YTNkMmI3YzRlNWY2YTcxXCIsXCJzZW5kZXJpZFwiOlwicHJvdjEuZXhhbXBsZS5uZXRcIixcImNhbGxlcmlkXCI6XCJjaG9yaWE9cHJvdjEuZXhhbXBsZS5uZXRcIixcImNvbGxlY3RpdmVcIjpcInByb3Zpc2lvbmluZ1wiLFwiYWdlbnRcIjpcImRpc2NvdmVyeVwiLFwidHRsXCI6NjAsXCJ0aW1lXCI6MTc2NzIyNTYwMCxcImZpbHRlclwiOntcImZhY3RcIjpbXSxcImNmX2NsYXNzXCI6W10sXCJhZ2VudFwiOltcImNob3JpYV9wcm92aXNpb25cIl0sXCJpZGVudGl0eVwiOltdLFwiY29tcG91bmRcIjpbXX19fSIsInNpZ25hdHVyZSI6Imluc2VjdXJlIiwicHViY2VydCI6Imluc2VjdXJlIn0=","headers":{"reply-to":"provisioning.reply.f233e84b1879ff8f207108d2dda253a5.6c1f0d5e0b8a4f0f9a3d2b7c4e5f6a71","mc_sender":"prov1.example.net","seen-by":[["nats://broker.example.net:4222","prov1.example.net","nats://broker.example.net:4222"]]}}"#;
    const INVENTORY: &str = r#"{"protocol":"choria:transport:1","data":"eyJwcm90b2NvbCI6ImNob3JpYTpzZWN1cmU6cmVxdWVzdDoxIiwibWVzc2FnZSI6IntcInByb3RvY29sXCI6XCJjaG9yaWE6cmVxdWVzdDoxXCIsXCJtZXNzYWdlXCI6XCJ7XFxcImFnZW50XFxcIjpcXFwicnBjdXRpbFxcXCIsXFxcImFjdGlvblxcXCI6XFxcImludmVudG9yeVxcXCIsXFxcImRhdGFcXFwiOnt9fVwiLFwiZW52ZWxvcGVcIjp7XCJyZXF1ZXN0aWRcIjpcIjBiNWQzYzdmNGExZTRkOGNiMmY2OTA3ZTFjM2E1ZDQyXCIsXCJzZW5kZXJpZFwiOlwicHJvdjEuZXhhbXBsZS5uZXRcIixcImNhbGxlcmlkXCI6XCJjaG9yaWE9cHJvdjEuZXhhbXBsZS5uZXRcIixcImNvbGxlY3RpdmVcIjpcInByb3Zpc2lvbmluZ1wiLFwiYWdlbnRcIjpcInJwY3V0aWxcIixcInR0bFwiOjYwLFwidGltZVwiOjE3NjcyMjU2MDAsXCJmaWx0ZXJcIjp7XCJmYWN0XCI6W10sXCJjZl9jbGFzc1wiOltdLFwiYWdlbnRcIjpbXCJycGN1dGlsXCJdLFwiaWRlbnRpdHlcIjpbXSxcImNvbXBvdW5kXCI6W119fX0iLCJzaWduYXR1cmUiOiJpbnNlY3VyZSIsInB1YmNlcnQiOiJpbnNlY3VyZSJ9","headers":{"reply-to":"provisioning.reply.f233e84b1879ff8f207108d2dda253a5.0b5d3c7f4a1e4d8cb2f6907e1c3a5d42","mc_sender":"prov1.example.net","seen-by":[["nats://broker.example.net:4222","prov1.example.net","nats://broker.example.net:4222"]]}}"#;
    const PONG: &str = r#"{"protocol":"choria:transport:1","data":"eyJwcm90b2NvbCI6ImNob3JpYTpzZWN1cmU6cmVwbHk6MSIsIm1lc3NhZ2UiOiJ7XCJwcm90b2NvbFwiOlwiY2hvcmlhOnJlcGx5OjFcIixcIm1lc3NhZ2VcIjpcInBvbmdcIixcImVudmVsb3BlXCI6e1wicmVxdWVzdGlkXCI6XCI2YzFmMGQ1ZTBiOGE0ZjBmOWEzZDJiN2M0ZTVmNmE3MVwiLFwic2VuZGVyaWRcIjpcIm4xLmZsZWV0LmV4YW1wbGUubmV0XCIsXCJhZ2VudFwiOlwiZGlzY292ZXJ5XCIsXCJ0aW1lXCI6MTc2NzIyNTYwMX19IiwiaGFzaCI6InpsK2FBWmh3V0tRdk9JSkRWMjJ2TGZnbjlIQXgrTlgxZUlXTGJQTlhrUzg9In0=","headers":{"mc_sender":"n1.fleet.example.net","seen-by":[["nats://broker.example.net:4222","n1.fleet.example.net","nats://broker.example.net:4222"]]}}"#;
}
