//! Looks at every request and notes what a correct provisioner never does.

use std::collections::HashSet;

use parking_lot::Mutex;
use serde_json::Value;

use super::envelope::Request;
use super::fault::Action;
use super::keys;

/// The notes, and what they are made from.
#[derive(Debug, Default)]
pub struct Watch(Mutex<Notes>);

#[derive(Debug, Default)]
struct Notes {
    ids: HashSet<String>,
    nonces: HashSet<String>,
    senders: HashSet<(String, String)>,
    provisioners: usize,
    violations: Vec<String>,
}

/// More notes than this help nobody.
const VIOLATIONS_MAX: usize = 1_000;

impl Watch {
    /// Allows this many different senders.
    pub fn new(provisioners: usize) -> Watch {
        Watch(Mutex::new(Notes { provisioners, ..Notes::default() }))
    }

    /// What was noted so far.
    pub fn violations(&self) -> Vec<String> {
        self.0.lock().violations.clone()
    }

    /// Notes that a request could not be read at all.
    pub fn unreadable(&self, subject: &str, why: &str) {
        self.0.lock().note(format!("{subject}: {why}"));
    }

    /// Looks at a discovery request.
    pub fn discovery(&self, request: &Request) {
        let mut notes = self.0.lock();
        if request.agent == "discovery" && request.filter.agent != ["choria_provision"] {
            notes.note(format!("discovery with the agent filter {:?}", request.filter.agent));
        }
        if request.agent == "discovery" && request.body != b"ping" {
            notes.note(format!(
                "discovery with the body {:?}",
                String::from_utf8_lossy(&request.body)
            ));
        }
        notes.sender(request);
        notes.reply_subject(request);
    }

    /// Looks at a request that came on the subject of `identity`.
    pub fn directed(&self, identity: &str, nats_reply: &str, request: &Request) {
        let mut notes = self.0.lock();
        if !notes.ids.insert(request.id.clone()) {
            notes.note(format!("{identity}: request id {} for the second time", request.id));
        }
        notes.sender(request);
        notes.reply_subject(request);
        if !nats_reply.is_empty() && nats_reply != request.reply_to {
            notes.note(format!(
                "{identity}: NATS reply {nats_reply}, reply-to {}",
                request.reply_to
            ));
        }
        if request.filter.agent != [request.agent.as_str()] {
            notes.note(format!(
                "{identity}: agent {} with the agent filter {:?}",
                request.agent, request.filter.agent
            ));
        }
        let Ok(body) = serde_json::from_slice::<Value>(&request.body) else {
            return notes.note(format!("{identity}: a body that is no JSON"));
        };
        let action = body["action"].as_str().and_then(|name| Action::find(&request.agent, name));
        let Some(action) = action else {
            return notes.note(format!("{identity}: unknown action {}", body["action"]));
        };
        let data = &body["data"];
        let text = |key: &str| data[key].as_str().unwrap_or_default();
        match action {
            Action::Gen25519 if !notes.nonces.insert(text("nonce").to_owned()) => {
                notes.note(format!("{identity}: nonce {} for the second time", text("nonce")));
            }
            Action::Gen25519 if text("nonce").len() != 32 => {
                notes.note(format!("{identity}: nonce {:?} is not 32 long", text("nonce")));
            }
            Action::GenCsr if text("cn") != identity => {
                notes.note(format!("{identity}: asked for a CSR of {:?}", text("cn")));
            }
            Action::Restart if data["splay"].as_i64() != Some(1) => {
                notes.note(format!("{identity}: splay {}", data["splay"]));
            }
            Action::Configure => notes.configure(identity, data),
            _ => {}
        }
    }
}

impl Notes {
    fn note(&mut self, text: String) {
        if self.violations.len() < VIOLATIONS_MAX {
            self.violations.push(text);
        }
    }

    fn sender(&mut self, request: &Request) {
        let sender = (request.sender.clone(), request.caller.clone());
        if self.senders.insert(sender) && self.senders.len() > self.provisioners {
            self.note(format!("another sender: {}, {}", request.sender, request.caller));
        }
    }

    fn reply_subject(&mut self, request: &Request) {
        let caller = keys::hex(&keys::md5(&[request.caller.as_bytes()]));
        let right = request.reply_to.strip_prefix("provisioning.reply.").is_some_and(|rest| {
            rest.strip_prefix(&caller).is_some_and(|rest| rest.starts_with('.'))
                && rest.ends_with(&request.id)
        });
        if !right {
            self.note(format!("reply-to {} of {}", request.reply_to, request.caller));
        }
    }

    fn configure(&mut self, identity: &str, data: &Value) {
        let inputs = [
            "action_policies",
            "ca",
            "certificate",
            "config",
            "ecdh_public",
            "key",
            "opa_policies",
            "server_jwt",
            "ssldir",
            "token",
        ];
        for input in inputs.into_iter().filter(|input| data.get(input).is_none()) {
            self.note(format!("{identity}: configure without {input}"));
        }
        let config = data["config"].as_str().unwrap_or_default();
        match serde_json::from_str::<Value>(config) {
            Ok(Value::Object(settings)) if settings.values().all(Value::is_string) => {}
            _ => self.note(format!("{identity}: settings that are no object of texts")),
        }
        let key = data["key"].as_str().unwrap_or_default();
        if !key.is_empty() && !key.contains("Proc-Type: 4,ENCRYPTED") {
            self.note(format!("{identity}: a private key in clear"));
        }
    }
}
