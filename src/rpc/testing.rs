//! What the tests of this module share: nodes that answer in memory.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use openssl::sha::sha256;
use serde_json::{Value, json};

use crate::gate::Lease;
use crate::metrics::Metrics;
use crate::protocol::{Codec, Identity, Sender, v1};
use crate::rpc::Rpc;
use crate::rpc::actions::Action;
use crate::transport::Message;
use crate::transport::memory::{Memory, Published};

pub(crate) const NODE: &str = "n0.fleet.example.net";

/// A client, and the network on which its nodes are.
pub(crate) struct Net {
    pub(crate) memory: Arc<Memory>,
    pub(crate) rpc: Arc<Rpc>,
    pub(crate) metrics: Arc<Metrics>,
}

impl Net {
    pub(crate) fn new() -> Net {
        let memory = Memory::new();
        let metrics = Metrics::new("testing");
        let sender = Sender {
            identity: Identity::parse("prov1.example.net").unwrap(),
            caller: "choria=prov1.example.net".to_owned(),
        };
        let codec = Codec::V1(v1::Codec::insecure(sender));
        let rpc =
            Rpc::start(memory.clone(), Lease::endless(), codec, "i1", 60, metrics.clone()).unwrap();
        Net { memory, rpc, metrics }
    }

    /// Lets `answer` say for each request, numbered from 1, which messages come back.
    pub(crate) fn answer(
        &self,
        mut answer: impl FnMut(u32, &Asked) -> Vec<Message> + Send + 'static,
    ) {
        let count = AtomicU32::new(0);
        self.memory.on_publish(move |published| {
            let n = count.fetch_add(1, Ordering::Relaxed) + 1;
            answer(n, &Asked::sent(published))
        });
    }

    /// The requests sent so far.
    pub(crate) fn asked(&self) -> Vec<Asked> {
        self.memory.published().iter().map(Asked::sent).collect()
    }

    /// How many replies were dropped as `kind`.
    pub(crate) fn unexpected(&self, kind: &str) -> u64 {
        self.metrics.unexpected_replies.with_label_values(&[kind]).get()
    }

    /// The value of a series of the metrics page, without the site.
    #[track_caller]
    pub(crate) fn series(&self, name: &str) -> Option<String> {
        let page = self.metrics.render();
        let line = page.lines().find_map(|line| line.strip_prefix(name));
        line.map(|value| value.trim().to_owned())
    }
}

/// A request as a node sees it.
#[derive(Debug, Clone)]
pub(crate) struct Asked {
    pub(crate) subject: String,
    /// The subject for the reply, which the transport document and the NATS message must agree on.
    pub(crate) reply_to: String,
    pub(crate) envelope: Value,
    pub(crate) body: String,
}

impl Asked {
    /// One of ours, whose two subjects for the reply are one.
    pub(crate) fn sent(published: &Published) -> Asked {
        let asked = Asked::read(published);
        let is_broadcast = published.subject.contains(".broadcast.");
        let expected = if is_broadcast { None } else { Some(asked.reply_to.as_str()) };
        assert_eq!(published.reply.as_deref(), expected);
        asked
    }

    /// One of anybody's.
    pub(crate) fn read(published: &Published) -> Asked {
        let transport: Value = serde_json::from_slice(&published.payload).unwrap();
        let secure = STANDARD.decode(transport["data"].as_str().unwrap()).unwrap();
        let secure: Value = serde_json::from_slice(&secure).unwrap();
        let request: Value = serde_json::from_str(secure["message"].as_str().unwrap()).unwrap();
        Asked {
            subject: published.subject.clone(),
            reply_to: transport["headers"]["reply-to"].as_str().unwrap().to_owned(),
            envelope: request["envelope"].clone(),
            body: request["message"].as_str().unwrap().to_owned(),
        }
    }

    pub(crate) fn id(&self) -> String {
        self.envelope["requestid"].as_str().unwrap().to_owned()
    }

    pub(crate) fn action(&self) -> String {
        let request: Value = serde_json::from_str(&self.body).unwrap();
        request["action"].as_str().unwrap().to_owned()
    }

    /// What the node is to sign.
    pub(crate) fn nonce(&self) -> &str {
        self.body.split(r#""nonce":""#).nth(1).unwrap().split('"').next().unwrap()
    }

    /// The node's answer, whose body is `body`.
    pub(crate) fn reply(&self, body: &str) -> Message {
        self.reply_from(NODE, &self.id(), body)
    }

    /// An answer that says it is from `sender`, to the request `id`.
    pub(crate) fn reply_from(&self, sender: &str, id: &str, body: &str) -> Message {
        self.raw(payload(sender, id, body))
    }

    /// Any bytes on the reply subject.
    pub(crate) fn raw(&self, payload: Vec<u8>) -> Message {
        Message { subject: self.reply_to.clone(), payload, ..Message::default() }
    }

    pub(crate) fn no_responders(&self) -> Message {
        Message { subject: self.reply_to.clone(), status: Some(503), ..Message::default() }
    }
}

/// A reply as nodes send it.
pub(crate) fn payload(sender: &str, id: &str, body: &str) -> Vec<u8> {
    let envelope =
        json!({"requestid": id, "senderid": sender, "agent": "x", "time": 1_795_996_000});
    let reply = json!({"protocol": "choria:reply:1", "message": body, "envelope": envelope});
    let reply = reply.to_string();
    let hash = STANDARD.encode(sha256(reply.as_bytes()));
    transport(sender, &reply, &hash)
}

/// A reply whose body was changed on the way, but not its hash.
pub(crate) fn tampered(sender: &str, id: &str, body: &str) -> Vec<u8> {
    let envelope =
        json!({"requestid": id, "senderid": sender, "agent": "x", "time": 1_795_996_000});
    let reply = json!({"protocol": "choria:reply:1", "message": body, "envelope": envelope});
    transport(sender, &reply.to_string(), &STANDARD.encode(sha256(b"what was sent")))
}

fn transport(sender: &str, reply: &str, hash: &str) -> Vec<u8> {
    let secure = json!({"protocol": "choria:secure:reply:1", "message": reply, "hash": hash});
    let data = STANDARD.encode(secure.to_string());
    let headers = json!({"mc_sender": sender});
    json!({"protocol": "choria:transport:1", "data": data, "headers": headers})
        .to_string()
        .into_bytes()
}

/// The body of a refusal.
pub(crate) fn refusal(action: Action, code: u8, message: &str) -> String {
    json!({"action": action.name(), "statuscode": code, "statusmsg": message, "data": {}})
        .to_string()
}

/// What a real node said when it agreed to `action`.
pub(crate) fn good_body(action: Action) -> String {
    if matches!(action, Action::ReleaseUpdate | Action::Restart) {
        // Not recorded for the first, recorded with these words for the second.
        let data = json!({"message": "Restarting Choria Server after 2s"});
        let body = json!({
            "action": action.name(), "statuscode": 0, "statusmsg": "OK", "data": data
        });
        return body.to_string();
    }
    let answers = recorded_answers();
    let good = |body: &&Value| body["action"] == action.name() && body["statuscode"] == json!(0);
    answers.iter().find(good).unwrap().to_string()
}

/// All RPC replies that were recorded.
pub(crate) fn recorded_answers() -> Vec<Value> {
    let recorded = include_str!("../../tests/vectors/captures/node-answers.jsonl");
    let lines = recorded.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    lines.map(|line| line["answer"]["body"].clone()).filter(Value::is_object).collect()
}
