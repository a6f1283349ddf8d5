//! Looks at every request and notes what a correct provisioner never does.

use std::collections::{HashMap, HashSet};

use openssl::x509::X509;
use parking_lot::Mutex;
use serde_json::Value;

use super::authority;
use super::envelope::{Proof, Protocol, Request};
use super::fault::Action;
use super::issuer::{check_client_jwt, is_signed, ksuid_time};
use super::keys;

/// What must vouch for requests. Nodes that wait to be provisioned listen to everybody, and others don't.
#[derive(Debug, Clone, Default)]
pub enum Trust {
    /// Nothing.
    #[default]
    Anybody,
    /// A certificate of this authority.
    Authority(X509),
    /// A token of the issuer with this public key, in hex.
    Issuer(String),
}

/// When what takes long is checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Checks {
    /// When it comes.
    #[default]
    AtOnce,
    /// When somebody asks what was noted.
    Later,
}

/// The notes, and what they are made from.
#[derive(Debug, Default)]
pub struct Watch {
    protocol: Protocol,
    trust: Trust,
    checks: Checks,
    notes: Mutex<Notes>,
    /// What is still to be checked.
    unchecked: Mutex<Vec<Claim>>,
    /// The tokens that were found good, each with whose it is.
    tokens: Mutex<HashMap<String, Bearer>>,
}

/// That a request is by somebody.
#[derive(Debug, Clone)]
struct Claim {
    /// What the request was about.
    about: String,
    caller: String,
    proof: Proof,
    /// When it came, in Unix seconds.
    now: i64,
}

/// Who shows a token, in whose name it may be shown, and until when.
#[derive(Debug, Clone)]
struct Bearer {
    caller: String,
    /// In hex.
    public_key: String,
    /// In Unix seconds.
    expires: i64,
}

#[derive(Debug, Default)]
struct Notes {
    ids: HashSet<String>,
    nonces: HashSet<String>,
    senders: HashSet<(String, String)>,
    /// How reply subjects begin, by caller.
    reply_starts: HashMap<String, String>,
    provisioners: usize,
    violations: Vec<String>,
}

/// Most requests whose check may be put off: a hundred megabytes of them.
const UNCHECKED_MAX: usize = 50_000;

/// More notes than this help nobody.
const VIOLATIONS_MAX: usize = 1_000;

impl Watch {
    /// Allows this many different senders, whom `trust` vouches for.
    pub fn new(provisioners: usize, protocol: Protocol, trust: Trust, checks: Checks) -> Watch {
        let notes = Mutex::new(Notes { provisioners, ..Notes::default() });
        Watch { protocol, trust, checks, notes, ..Watch::default() }
    }

    /// What was noted so far.
    pub fn violations(&self) -> Vec<String> {
        let unchecked = std::mem::take(&mut *self.unchecked.lock());
        for Claim { about, caller, proof, now } in unchecked {
            if let Err(doubt) = self.check_proof(&proof, &caller, now) {
                self.notes.lock().note(format!("{about}: {doubt}"));
            }
        }
        self.notes.lock().violations.clone()
    }

    /// Notes that a request could not be read at all.
    pub fn unreadable(&self, subject: &str, why: &str) {
        self.notes.lock().note(format!("{subject}: {why}"));
    }

    /// Looks at a discovery request.
    pub fn discovery(&self, request: &Request, now: i64) {
        let doubt = self.doubt("a broadcast", request, now);
        let mut notes = self.notes.lock();
        if let Some(doubt) = doubt {
            notes.note(format!("a broadcast: {doubt}"));
        }
        // The other one is the question that no node answers, of a provisioner that is only looking around.
        let agents = ["choria_provision", "choria_provisioner_check"];
        if request.agent == "discovery"
            && !agents.iter().any(|agent| request.filter.agent == [*agent])
        {
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
    pub fn directed(&self, identity: &str, nats_reply: &str, request: &Request, now: i64) {
        let doubt = self.doubt(identity, request, now);
        let mut notes = self.notes.lock();
        if let Some(doubt) = doubt {
            notes.note(format!("{identity}: {doubt}"));
        }
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

impl Watch {
    /// Why a node that looks at who asks would not listen, if that is to be known at once.
    fn doubt(&self, about: &str, request: &Request, now: i64) -> Option<String> {
        if self.protocol == Protocol::V2 {
            let age = ksuid_time(&request.id).map(|made| request.time - made);
            if age.is_none_or(|age| age < 0 || age > request.ttl) {
                return Some(format!("{} is no KSUID of about {}", request.id, request.time));
            }
        }
        let (proof, caller) = (&request.proof, &request.caller);
        if self.checks == Checks::Later && !matches!(self.trust, Trust::Anybody) {
            let mut unchecked = self.unchecked.lock();
            if unchecked.len() < UNCHECKED_MAX {
                let (about, caller, proof) = (about.to_owned(), caller.clone(), proof.clone());
                unchecked.push(Claim { about, caller, proof, now });
                return None;
            }
        }
        self.check_proof(proof, caller, now).err()
    }

    fn check_proof(&self, proof: &Proof, caller: &str, now: i64) -> Result<(), String> {
        match &self.trust {
            Trust::Anybody => Ok(()),
            Trust::Authority(authority) => authority::check_request(authority, proof, caller, now),
            Trust::Issuer(issuer) => {
                let bearer = self
                    .bearer(issuer, &proof.credential, caller, now)
                    .map_err(|why| format!("the token of {caller}: {why}"))?;
                let signature = keys::hex(&proof.signature);
                match is_signed(&bearer.public_key, &proof.signed, &signature) {
                    true => Ok(()),
                    false => Err("the signature is invalid".to_owned()),
                }
            }
        }
    }

    /// Who shows `token`. One that was found good is not verified again: thousands of nodes, each of which would look for
    /// itself, share one machine with whoever is measured.
    fn bearer(&self, issuer: &str, token: &str, caller: &str, now: i64) -> Result<Bearer, String> {
        let mut tokens = self.tokens.lock();
        if let Some(known) = tokens.get(token) {
            if known.caller == caller && now < known.expires {
                return Ok(known.clone());
            }
        }
        let claims = check_client_jwt(issuer, token, caller, now)?;
        let bearer = Bearer {
            caller: caller.to_owned(),
            public_key: claims["public_key"].as_str().unwrap_or_default().to_owned(),
            expires: claims["exp"].as_i64().unwrap_or_default(),
        };
        tokens.insert(token.to_owned(), bearer.clone());
        Ok(bearer)
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
        if !self.reply_starts.contains_key(&request.caller) {
            let caller = keys::hex(&keys::md5(&[request.caller.as_bytes()]));
            let start = format!("provisioning.reply.{caller}.");
            self.reply_starts.insert(request.caller.clone(), start);
        }
        let rest = request.reply_to.strip_prefix(self.reply_starts[&request.caller].as_str());
        if !rest.is_some_and(|rest| rest.ends_with(&request.id)) {
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
