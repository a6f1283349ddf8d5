//! One simulated node: what it answers, in the order in which a Choria Server makes its checks.
//!
//! It does no I/O and reads no clock; what it wants done comes out as effects. Texts and order follow
//! go-choria `providers/agent/mcorpc/golang/provision` and `server/processor.go`.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use ed25519_dalek::{Signer as _, SigningKey};
use openssl::x509::X509;
use regex::Regex;
use serde_json::{Map, Value};

use super::authority;
use super::envelope::{Filter, NANOS_PER_SEC, Protocol, Reply, Request, quoted};
use super::event::{Encoding, Event, Kind, uuid};
use super::fault::{Action, Csr, Damage, Envelope, Fault, On, Token};
use super::issuer::{Organization, check_server_jwt};
use super::keys::{self, Tokens};
use super::watch::Checks;

/// What all nodes of a fleet have in common.
#[derive(Debug)]
pub struct Site {
    /// The provisioning token in every node's JWT.
    pub token: String,
    /// The provisioning JWTs.
    pub tokens: Tokens,
    /// Component of lifecycle events.
    pub component: String,
    /// How events are written.
    pub encoding: Encoding,
    /// The version nodes report at first.
    pub version: String,
    /// Whether the JWT allows upgrades.
    pub upgradable: bool,
    /// Facts, as JSON text.
    pub facts: String,
    /// From an accepted `restart` until the node is off the network.
    pub restart_delay: Duration,
    /// How long an answer takes.
    pub delay: Duration,
    /// The broker as seen by the nodes.
    pub broker_url: String,
    /// What nodes speak.
    pub protocol: Protocol,
    /// What gets nodes that were configured into the production network.
    pub admission: Admission,
    /// When that is checked.
    pub checks: Checks,
}

/// What brokers of the production network want to see.
#[derive(Debug, Clone)]
pub enum Admission {
    /// Nothing.
    Anybody,
    /// A server JWT of this organization.
    ServerJwt(Organization),
    /// What certificate a node was given must be one of this authority; it may have been given none.
    Certificate(X509),
}

/// The two clocks a node looks at.
#[derive(Debug, Clone, Copy)]
pub struct Now {
    /// For locks and delays.
    pub instant: Instant,
    /// In seconds, for what is written.
    pub unix: i64,
}

/// Where a node is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum State {
    /// Waits for a provisioner.
    Provisioning,
    /// Has its configuration; still runs without it.
    Configured,
    /// Accepted `restart` and is about to go.
    Restarting,
    /// Left for the production network.
    Provisioned,
    /// Left for the production network, whose brokers keep it out.
    LockedOut,
    /// Accepted `shutdown` or `release_update` and is about to go.
    Stopping,
    /// Stopped for good.
    Stopped,
}

impl State {
    /// One word for a report.
    pub fn word(self) -> &'static str {
        match self {
            State::Provisioning => "provisioning",
            State::Configured => "configured",
            State::Restarting => "restarting",
            State::Provisioned => "provisioned",
            State::LockedOut => "locked out",
            State::Stopping => "stopping",
            State::Stopped => "stopped",
        }
    }
}

/// What `configure` brought.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Received {
    /// The settings.
    pub configuration: BTreeMap<String, String>,
    /// The certificate, if it was written.
    pub certificate: String,
    /// The CA, if it was written.
    pub ca: String,
    /// The decrypted private key.
    pub key: Option<Vec<u8>>,
    /// Where these went.
    pub ssldir: String,
    /// The server JWT.
    pub server_jwt: String,
    /// Action policies.
    pub action_policies: BTreeMap<String, String>,
    /// Open Policy Agent policies.
    pub opa_policies: BTreeMap<String, String>,
}

/// What a node wants done.
#[derive(Debug)]
pub enum Effect {
    /// Publish this after a while.
    Publish {
        /// Where.
        subject: String,
        /// What.
        payload: Vec<u8>,
        /// When.
        after: Duration,
    },
    /// Leave the network after a while; what comes then is asked of [`Node::left`].
    Leave {
        /// When.
        after: Duration,
        /// Whether a `shutdown` event goes out right before.
        announced: bool,
    },
}

/// One node.
#[derive(Debug)]
pub struct Node {
    /// Its name.
    pub identity: String,
    /// What is wrong with it.
    pub fault: Option<Fault>,
    /// Where it is in its life.
    pub state: State,
    /// Whether it is on the network.
    pub online: bool,
    /// What `configure` brought last.
    pub received: Option<Box<Received>>,
    /// Why brokers would keep it out with what `configure` brought last.
    pub lockout: Option<String>,
    /// How often `configure` succeeded.
    pub times_configured: u32,
    /// How often `restart` was accepted.
    pub times_restarted: u32,
    /// Requests per action, in the order of [`Action::ALL`], answered or not.
    pub asked: [u32; Action::ALL.len()],
    /// Whether it ever got a request it did not answer because of its fault.
    muted: bool,
    rebooted: bool,
    returned: u32,
    version: Option<String>,
    /// The version it will have when it is back.
    next_version: Option<String>,
    lock: Option<(String, Instant)>,
    busy_until: Option<Instant>,
    exchange: Option<usize>,
    /// The public half of the seed on its disk, in hex.
    public_key: String,
    /// The CSR that was made ahead, until it is asked for.
    pub prepared_csr: Option<Box<keys::Request>>,
    /// The public key of its last CSR.
    csr_key: String,
    /// Answers it keeps back, and where they go.
    held: Vec<(String, Vec<u8>)>,
}

const LOCK_WINDOW: Duration = Duration::from_secs(120);
const AGENT_TIMEOUT: Duration = Duration::from_secs(20);
const CONFIG_DIR: &str = "/etc/choria";
const AGENTS: [&str; 4] = ["choria_provision", "choria_util", "discovery", "rpcutil"];

impl Node {
    /// A node called `identity` that is not on the network yet.
    pub fn new(identity: String, fault: Option<Fault>) -> Node {
        Node {
            identity,
            fault,
            state: State::Provisioning,
            online: false,
            received: None,
            lockout: None,
            times_configured: 0,
            times_restarted: 0,
            asked: [0; Action::ALL.len()],
            muted: false,
            rebooted: false,
            returned: 0,
            version: None,
            next_version: None,
            lock: None,
            busy_until: None,
            exchange: None,
            public_key: String::new(),
            prepared_csr: None,
            csr_key: String::new(),
            held: Vec::new(),
        }
    }

    /// Whether it keeps an answer back.
    pub fn is_holding(&self) -> bool {
        !self.held.is_empty()
    }

    /// It keeps nothing back any more: where that goes, and what it is.
    pub fn go_on(&mut self) -> Vec<(String, Vec<u8>)> {
        self.fault = self.fault.take().filter(|fault| !matches!(fault, Fault::Holds(_)));
        std::mem::take(&mut self.held)
    }

    /// Makes the first CSR ahead of time.
    pub fn prepare_csr(&mut self) {
        let request = keys::csr(&[("CN", &self.identity)], self.csr_fault());
        self.prepared_csr = Some(Box::new(request));
    }

    /// An event of this node.
    pub fn event(&self, site: &Site, kind: Kind, now: Now) -> (String, Vec<u8>) {
        let event = Event {
            kind,
            identity: &self.identity,
            component: &site.component,
            id: &uuid(),
            time: now.unix,
            version: self.version(site),
            new_version: None,
        };
        (kind.subject(&site.component), event.encode(site.encoding))
    }

    /// Handles one request that reached this node, on its own subject or a broadcast.
    pub fn receive(&mut self, site: &Site, request: &Request, now: Now, out: &mut Vec<Effect>) {
        if !self.online || self.muted || self.fault == Some(Fault::Silent) {
            return;
        }
        let skew = if self.fault == Some(Fault::Skewed) { 86_400 } else { 0 };
        let clock = now.unix + skew;
        if !matches(&request.filter, &self.identity)
            || request.collective != "provisioning"
            || request.time <= clock - request.ttl
            || request.time >= clock + request.ttl
        {
            return;
        }
        match request.agent.as_str() {
            "discovery" => {
                let ping = request.body.windows(4).any(|part| part == b"ping");
                // Its agent is not loaded any more.
                let loaded = self.fault != Some(Fault::NotProvisioning);
                if ping && loaded {
                    self.pong(site, request, now, out);
                }
            }
            "rpcutil" | "choria_util" | "choria_provision" => self.rpc(site, request, now, out),
            _ => {}
        }
    }

    /// The node has left the network; the answer is whether it comes back unprovisioned.
    pub fn left(&mut self) -> bool {
        self.online = false;
        self.lock = None;
        self.exchange = None;
        self.busy_until = None;
        match self.state {
            State::Restarting => {
                let forced = match self.fault {
                    Some(Fault::Returns(times)) => self.returned < times,
                    _ => false,
                };
                if forced || self.provisions_again() {
                    self.returned += 1;
                    self.state = State::Provisioning;
                } else {
                    self.state = self.admission();
                }
            }
            State::Stopping if self.next_version.is_some() => {
                self.version = self.next_version.take();
                self.state = State::Provisioning;
            }
            State::Stopping => self.state = State::Stopped,
            // A reboot in the middle of a cycle; with a configuration it has the effect of a restart.
            State::Configured if !self.provisions_again() => self.state = self.admission(),
            State::Provisioning | State::Configured => self.state = State::Provisioning,
            State::Provisioned | State::LockedOut | State::Stopped => {}
        }
        self.state == State::Provisioning
    }

    /// How often it was asked for `action`.
    pub fn times_asked(&self, action: Action) -> u32 {
        self.asked[action as usize]
    }

    /// Whether it is configured and on its way, or there already.
    pub fn is_provisioned(&self) -> bool {
        self.times_configured > 0
            && self.lockout.is_none()
            && matches!(self.state, State::Restarting | State::Provisioned)
    }

    /// What becomes of it on the production network.
    fn admission(&self) -> State {
        if self.lockout.is_some() { State::LockedOut } else { State::Provisioned }
    }

    /// What brokers will say to the credentials it has, if they want any.
    pub fn check_credentials(&self, site: &Site, now: Now) -> Option<String> {
        let received = self.received.as_ref()?;
        match &site.admission {
            Admission::Anybody => None,
            Admission::ServerJwt(organization) => {
                let (token, issuer) = (&received.server_jwt, organization.public_key());
                check_server_jwt(&issuer, token, &self.identity, &self.public_key, now.unix).err()
            }
            Admission::Certificate(_) if received.certificate.is_empty() => None,
            Admission::Certificate(ca) => {
                let (name, key) = (&self.identity, &self.csr_key);
                authority::check_received(ca, received, name, key, now.unix).err()
            }
        }
    }

    /// The version it reports.
    pub fn version<'a>(&'a self, site: &'a Site) -> &'a str {
        self.version.as_deref().unwrap_or(&site.version)
    }

    /// A new process provisions again unless its configuration switches that off.
    fn provisions_again(&self) -> bool {
        let setting = self.setting("plugin.choria.server.provision");
        !matches!(setting.as_deref(), Some("0" | "no" | "false" | "n" | "f"))
    }

    fn setting(&self, key: &str) -> Option<String> {
        let value = self.received.as_ref()?.configuration.get(key)?;
        Some(value.trim().to_lowercase())
    }

    fn pong(&mut self, site: &Site, request: &Request, now: Now, out: &mut Vec<Effect>) {
        let name = match &self.fault {
            Some(Fault::DiscoveredAs(name)) => name,
            _ => &self.identity,
        };
        let reply = Reply {
            protocol: site.protocol,
            id: &request.id,
            sender: name,
            transport_sender: name,
            agent: &request.agent,
            nanos: now.unix * NANOS_PER_SEC,
            body: "pong",
            broker_url: &site.broker_url,
            good_hash: true,
        };
        let payload = reply.encode();
        out.push(Effect::Publish {
            subject: request.reply_to.clone(),
            payload,
            after: Duration::ZERO,
        });
    }

    fn rpc(&mut self, site: &Site, request: &Request, now: Now, out: &mut Vec<Effect>) {
        let body: Value = match serde_json::from_slice(&request.body) {
            Ok(body @ Value::Object(_)) => body,
            wrong => {
                let problem = match wrong {
                    Ok(value) => format!(
                        "json: cannot unmarshal {} into Go value of type mcorpc.Request",
                        go_kind(&value)
                    ),
                    Err(_) => go_syntax_error(&request.body),
                };
                let text = format!(
                    "Could not process request: could not parse incoming message as a MCollective SimpleRPC Request: {problem}"
                );
                return self.answer(site, request, None, refusal("", 4, &text), now, out);
            }
        };
        let name = body.get("action").and_then(Value::as_str).unwrap_or_default();
        let Some(action) = Action::find(&request.agent, name) else {
            let text = format!("Unknown action {name} for agent {}", request.agent);
            return self.answer(site, request, None, refusal(name, 2, &text), now, out);
        };
        self.asked[action as usize] += 1;
        if let Some(Fault::Deaf(deaf, times)) = self.fault {
            if deaf == action && self.times_asked(action) <= times {
                return;
            }
        }
        if action.agent() == "choria_provision" {
            if is_locked_action(action) && !self.take_lock(request, now) {
                let text = "Could not obtain provisioning lock";
                return self.answer(site, request, None, refusal(name, 1, text), now, out);
            }
            // The restart holds the mutex until the process is replaced, so what comes now dies with it.
            if matches!(self.state, State::Restarting | State::Stopping) {
                return;
            }
        }
        let empty = Value::Object(Map::new());
        let data = body.get("data").unwrap_or(&empty);
        let done = self.run(site, request, action, data, now, out);
        let body = match done {
            Ok(data) => {
                format!(r#"{{"action":"{name}","statuscode":0,"statusmsg":"OK","data":{data}}}"#)
            }
            Err((code, text)) => refusal(name, code, &text),
        };
        self.answer(site, request, Some(action), body, now, out);
    }

    /// Whether the sender holds the lock now; its window is renewed whatever becomes of the call.
    fn take_lock(&mut self, request: &Request, now: Now) -> bool {
        if self.fault == Some(Fault::Locked) {
            return false;
        }
        let owner = format!("{}.{}", request.sender, request.caller);
        match &self.lock {
            Some((holder, until)) if *until > now.instant && *holder != owner => false,
            _ => {
                self.lock = Some((owner, now.instant + LOCK_WINDOW));
                true
            }
        }
    }

    /// Runs an action; `Ok` is the JSON of `data`.
    fn run(
        &mut self,
        site: &Site,
        request: &Request,
        action: Action,
        data: &Value,
        now: Now,
        out: &mut Vec<Effect>,
    ) -> Result<String, (u64, String)> {
        let refuse = |text: &str| Err((1, text.to_owned()));
        let provisioning = self.fault != Some(Fault::NotProvisioning);
        match action {
            Action::Inventory => {
                self.forced_status(action)?;
                return Ok(self.inventory(site));
            }
            Action::Ping => {
                self.forced_status(action)?;
                return Ok(format!(r#"{{"pong":{}}}"#, now.unix));
            }
            Action::Jwt | Action::Gen25519 | Action::GenCsr | Action::Configure
                if !provisioning =>
            {
                return refuse("Cannot reconfigure a server that is not in provisioning mode");
            }
            Action::ReleaseUpdate if !provisioning => {
                return refuse("Cannot update a server that is not in provisioning mode");
            }
            Action::ReleaseUpdate if !site.upgradable => {
                return refuse("Version updates is not enabled in the configuration");
            }
            Action::Reprovision if provisioning => {
                return refuse(
                    "Server is already in provisioning mode, cannot enable provisioning mode again",
                );
            }
            _ => {}
        }
        let inputs = Inputs::read(action, data).map_err(|text| (4, text))?;
        let wrong_token = self.fault == Some(Fault::WrongToken);
        if wrong_token || inputs.text("token") != site.token {
            return refuse("Incorrect provision token supplied");
        }
        self.forced_status(action)?;
        match action {
            Action::Jwt => Ok(self.jwt(site)),
            Action::Gen25519 => Ok(self.gen25519(inputs.text("nonce"))),
            Action::GenCsr => Ok(self.gencsr(&inputs)),
            Action::Configure => {
                let lines = self.configure(&inputs).map_err(|text| (1, text))?;
                self.lockout = match site.checks {
                    Checks::AtOnce => self.check_credentials(site, now),
                    Checks::Later => None,
                };
                self.publish_event(site, Kind::Provisioned, now, out);
                Ok(message(&format!("Wrote {lines} lines to {CONFIG_DIR}/server.conf")))
            }
            Action::Restart => {
                let Some(_) = &self.received else {
                    return refuse(&format!(
                        "Configuration {CONFIG_DIR}/server.conf could not be parsed, restart cannot continue: open {CONFIG_DIR}/server.conf: no such file or directory"
                    ));
                };
                let provision = self.setting("plugin.choria.server.provision");
                if matches!(provision.as_deref(), Some("1" | "yes" | "true" | "y" | "t")) {
                    return refuse(&format!(
                        "Configuration {CONFIG_DIR}/server.conf enables provisioning, restart cannot continue"
                    ));
                }
                let splay = match inputs.integer("splay") {
                    0 => 10,
                    splay => splay.max(1),
                };
                let secs = fastrand::i64(0..splay) + 2;
                self.state = State::Restarting;
                self.times_restarted += 1;
                self.publish_event(site, Kind::Shutdown, now, out);
                let delay = site.restart_delay * u32::try_from(secs - 1).unwrap_or(1);
                out.push(Effect::Leave { after: delay, announced: false });
                Ok(message(&format!("Restarting Choria Server after {secs}s")))
            }
            Action::Shutdown => {
                let secs = fastrand::u64(0..10);
                self.state = State::Stopping;
                // As much faster than a real node as its restart is.
                let after = site.restart_delay.mul_f64(secs as f64 / 2.0);
                out.push(Effect::Leave { after, announced: true });
                Ok(message(&format!("Shutting Choria Server down after {secs}s")))
            }
            Action::ReleaseUpdate => {
                let (version, old) = (inputs.text("version"), self.version(site).to_owned());
                let event = Event {
                    kind: Kind::Upgraded,
                    identity: &self.identity,
                    component: &site.component,
                    id: &uuid(),
                    time: now.unix,
                    version: &old,
                    new_version: Some(version),
                };
                let subject = Kind::Upgraded.subject(&site.component);
                let payload = event.encode(site.encoding);
                let after = match self.fault {
                    Some(Fault::SlowUpdate(time)) => time,
                    _ => Duration::ZERO,
                };
                out.push(Effect::Publish { subject, payload, after });
                let (subject, payload) = self.event(site, Kind::Shutdown, now);
                out.push(Effect::Publish { subject, payload, after });
                self.next_version = match self.fault {
                    Some(Fault::UpdateInVain) => Some(old),
                    _ => Some(version.to_owned()),
                };
                self.state = State::Stopping;
                out.push(Effect::Leave { after: after + site.restart_delay, announced: false });
                Ok(message("Restarting Choria Server after 2s"))
            }
            Action::Reprovision => {
                let secs = fastrand::u64(2..=11);
                self.received = None;
                self.state = State::Restarting;
                out.push(Effect::Leave { after: site.restart_delay, announced: false });
                Ok(message(&format!("Restarting after {secs}s")))
            }
            Action::Inventory | Action::Ping => unreachable!("answered above, {}", request.id),
        }
    }

    fn forced_status(&self, action: Action) -> Result<(), (u64, String)> {
        match self.fault {
            Some(Fault::Status(wanted, code)) if wanted == action => {
                Err((code, format!("practice fault with status {code}")))
            }
            Some(Fault::ConfigureRefused) if action == Action::Configure => Err((
                1,
                format!(
                    "Could not write config: could not write to temp file {CONFIG_DIR}/provision123: no space left on device"
                ),
            )),
            _ => Ok(()),
        }
    }

    fn publish_event(&self, site: &Site, kind: Kind, now: Now, out: &mut Vec<Effect>) {
        let (subject, payload) = self.event(site, kind, now);
        out.push(Effect::Publish { subject, payload, after: Duration::ZERO });
    }

    fn inventory(&self, site: &Site) -> String {
        let facts = match self.fault {
            Some(Fault::HugeInventory(size)) => format!(r#"{{"blob":"{}"}}"#, "x".repeat(size)),
            Some(Fault::DeepInventory(depth)) => {
                format!(r#"{{"deep":{}{}}}"#, "[".repeat(depth), "]".repeat(depth))
            }
            _ => site.facts.clone(),
        };
        format!(
            r#"{{"agents":["choria_provision","choria_util","discovery","rpcutil"],"classes":[],"collectives":["provisioning"],"data_plugins":[],"facts":{facts},"machines":[],"main_collective":"provisioning","version":{},"upgradable":{}}}"#,
            quoted(self.version(site)),
            site.upgradable,
        )
    }

    fn jwt(&mut self, site: &Site) -> String {
        let (at, exchange) = keys::next_exchange();
        self.exchange = Some(at);
        let newline;
        let token = match &self.fault {
            Some(Fault::Token(Token::Foreign)) => site.tokens.foreign(),
            Some(Fault::Token(Token::Expired)) => &site.tokens.expired,
            Some(Fault::Token(Token::Purpose)) => &site.tokens.other_purpose,
            Some(Fault::Token(Token::Empty)) => "",
            Some(Fault::Token(Token::Garbage)) => "this.is.no-token",
            Some(Fault::Token(Token::Newline)) => {
                newline = format!("{}\n", site.tokens.good);
                &newline
            }
            _ => &site.tokens.good,
        };
        format!(r#"{{"jwt":{},"ecdh_public":"{}"}}"#, quoted(token), exchange.public)
    }

    fn gen25519(&mut self, nonce: &str) -> String {
        let key = keys::node_key();
        let signed = match self.fault {
            Some(Fault::NonceSignature) => "another nonce",
            _ => nonce,
        };
        let mut public = keys::hex(key.verifying_key().as_bytes());
        let mut signature = keys::hex(&key.sign(signed.as_bytes()).to_bytes());
        self.public_key.clone_from(&public);
        match self.fault {
            Some(Fault::ShortKey) => public.truncate(20),
            Some(Fault::KeyLength(bytes)) => {
                public = public.chars().cycle().take(2 * bytes).collect();
            }
            Some(Fault::WeakKey) => {
                // The neutral element of the curve; as a commitment too, it fits every message.
                public = format!("01{}", "00".repeat(31));
                signature = format!("01{}", "00".repeat(63));
            }
            _ => {}
        }
        // The one for an earlier key is deleted.
        if let Some(received) = &mut self.received {
            received.server_jwt.clear();
        }
        format!(
            r#"{{"public_key":"{public}","directory":"{CONFIG_DIR}","signature":"{signature}"}}"#
        )
    }

    fn gencsr(&mut self, inputs: &Inputs<'_>) -> String {
        let cn = match inputs.text("cn") {
            "" => self.identity.clone(),
            cn => cn.to_owned(),
        };
        let plain = cn == self.identity;
        let request = match self.prepared_csr.take() {
            Some(request) if plain => *request,
            _ => {
                let mut subject: Vec<(&'static str, &str)> = ["C", "L", "O", "OU"]
                    .into_iter()
                    .map(|part| (part, inputs.text(part)))
                    .collect();
                subject.push(("CN", &cn));
                keys::csr(&subject, self.csr_fault())
            }
        };
        self.csr_key.clone_from(&request.public_key);
        format!(
            r#"{{"csr":{},"public_key":{},"ssldir":"{CONFIG_DIR}/ssl"}}"#,
            quoted(&request.csr),
            quoted(&request.public_key)
        )
    }

    fn csr_fault(&self) -> Option<Csr> {
        match self.fault {
            Some(Fault::Csr(fault)) => Some(fault),
            _ => None,
        }
    }

    /// Writes the configuration; the answer is the number of lines in the file.
    fn configure(&mut self, inputs: &Inputs<'_>) -> Result<usize, String> {
        let config = inputs.text("config");
        if config.is_empty() {
            return Err(
                "Did not receive any configuration to write, cannot write a empty configuration file"
                    .to_owned(),
            );
        }
        let (key, peer) = (inputs.text("key"), inputs.text("ecdh_public"));
        if !key.is_empty() && peer.is_empty() {
            return Err("EDCH Public Key not supplied while providing a private key".to_owned());
        }
        let configuration = read_settings(config)
            .map_err(|text| format!("Could not decode configuration data: {text}"))?;
        let mut received = Received { configuration, ..Received::default() };
        let tls = ["certificate", "ssldir", "ca"].map(|name| inputs.text(name));
        if tls.iter().all(|text| !text.is_empty()) {
            let [certificate, ssldir, ca] = tls.map(str::to_owned);
            if !key.is_empty() {
                let exchange =
                    self.exchange.map(keys::exchange).ok_or("private key not set".to_owned());
                let plain =
                    exchange.and_then(|exchange| exchange.decrypt(key, peer)).map_err(|text| {
                        format!("TLS Setup Failed: could not decrypt private key: {text}")
                    })?;
                received.key = Some(plain);
            }
            (received.certificate, received.ssldir, received.ca) = (certificate, ssldir, ca);
        }
        received.server_jwt = inputs.text("server_jwt").to_owned();
        let policies = |input: &str, what: &str, suffix: &str| {
            let policies = inputs.texts(input);
            match policies.keys().find(|name| !name.ends_with(suffix)) {
                Some(name) => Err(format!(
                    "Could not save {what} Policies: expected {name:?} to have {suffix} extension"
                )),
                None => Ok(policies),
            }
        };
        received.action_policies = policies("action_policies", "Action", ".policy")?;
        received.opa_policies = policies("opa_policies", "Open Policy Agent", ".rego")?;
        let lines = received.configuration.len() + 1;
        self.received = Some(Box::new(received));
        self.times_configured += 1;
        self.state = State::Configured;
        Ok(lines)
    }

    /// Sends `body`, after everything the node's fault does to it.
    fn answer(
        &mut self,
        site: &Site,
        request: &Request,
        action: Option<Action>,
        body: String,
        now: Now,
        out: &mut Vec<Effect>,
    ) {
        let ok = body.contains(r#""statuscode":0,"#);
        let mut after = site.delay;
        if let Some(Fault::Slow(on, delay)) = self.fault {
            if concerns(on, action) {
                after = delay;
            }
        }
        if action.is_some_and(|action| action.agent() == "choria_provision") && !after.is_zero() {
            // One action at a time; the agent gives up after its time-out, though the action goes on.
            let start = self.busy_until.filter(|until| *until > now.instant).unwrap_or(now.instant);
            after = start + after - now.instant;
            self.busy_until = Some(now.instant + after);
            if after > AGENT_TIMEOUT && !matches!(self.fault, Some(Fault::Slow(..))) {
                return;
            }
        }
        if self.fault.as_ref().is_some_and(|fault| action.map(Fault::Holds).as_ref() == Some(fault))
        {
            let payload = self.encode(site, request, now, None, &body);
            return self.held.push((request.reply_to.clone(), payload));
        }
        let mut send = |envelope: Option<Envelope>, body: &str| {
            let payload = self.encode(site, request, now, envelope, body);
            let subject = request.reply_to.clone();
            out.push(Effect::Publish { subject, payload, after });
        };
        match &self.fault {
            Some(Fault::SilentFrom(first))
                if action.is_some_and(|action| step(action) >= step(*first)) => {}
            Some(Fault::SlowUpdate(_)) if action == Some(Action::ReleaseUpdate) && ok => {}
            Some(Fault::RestartLost) if action == Some(Action::Restart) && ok => {}
            Some(Fault::Envelope(envelope, on, right)) if concerns(*on, action) => {
                send(Some(*envelope), &body);
                if *right {
                    send(None, &body);
                }
            }
            Some(Fault::TwoAnswers(two)) if action == Some(*two) && ok => {
                send(None, &body);
                send(None, &other_answer(*two, &body));
            }
            Some(Fault::Twice) => {
                send(None, &body);
                send(None, &body);
            }
            Some(Fault::Data(damaged, field, damage)) if action == Some(*damaged) && ok => {
                send(None, &spoil(&body, *field, *damage));
            }
            _ => send(None, &body),
        }
        if !ok {
            return;
        }
        match self.fault {
            Some(Fault::SilentAfter(last)) if action == Some(last) => self.muted = true,
            Some(Fault::GoneAfter(last)) if action == Some(last) => {
                self.muted = true;
                self.state = match self.state {
                    State::Restarting => State::Restarting,
                    _ => State::Stopping,
                };
                out.push(Effect::Leave { after, announced: false });
            }
            Some(Fault::RebootsAfter(last)) if action == Some(last) && !self.rebooted => {
                // Once is enough: the next cycle goes through.
                self.rebooted = true;
                out.push(Effect::Leave { after, announced: false });
            }
            _ => {}
        }
    }

    fn encode(
        &self,
        site: &Site,
        request: &Request,
        now: Now,
        fault: Option<Envelope>,
        body: &str,
    ) -> Vec<u8> {
        let half = body.get(..body.len() / 2).unwrap_or("{");
        let mut reply = Reply {
            protocol: site.protocol,
            id: &request.id,
            sender: &self.identity,
            transport_sender: &self.identity,
            agent: &request.agent,
            nanos: now.unix * NANOS_PER_SEC,
            body,
            broker_url: &site.broker_url,
            good_hash: true,
        };
        match fault {
            None => {}
            Some(Envelope::Hash) => reply.good_hash = false,
            Some(Envelope::Sender) => {
                reply.sender = "forger.example.net";
                reply.transport_sender = "forger.example.net";
            }
            Some(Envelope::Id) => reply.id = "0123456789abcdef0123456789abcdef",
            Some(Envelope::Garbage) => {
                return format!(r#"{{"protocol":"{}""#, site.protocol.transport()).into_bytes();
            }
            Some(Envelope::Base64) => {
                let protocol = site.protocol.transport();
                return format!(
                    r#"{{"protocol":"{protocol}","data":"***","headers":{{"mc_sender":"x"}}}}"#
                )
                .into_bytes();
            }
            Some(Envelope::Body) => reply.body = "this is no JSON",
            Some(Envelope::HalfBody) => reply.body = half,
            Some(Envelope::ListBody) => reply.body = "[1,2,3]",
        }
        reply.encode()
    }
}

fn concerns(on: On, action: Option<Action>) -> bool {
    on.is_none() || on == action
}

/// Where an action stands in a cycle.
fn step(action: Action) -> usize {
    match action {
        Action::Ping | Action::Reprovision => 0,
        Action::Inventory => 1,
        Action::Jwt => 2,
        Action::Gen25519 => 3,
        Action::GenCsr => 4,
        Action::ReleaseUpdate => 5,
        Action::Configure => 6,
        Action::Restart | Action::Shutdown => 7,
    }
}

fn is_locked_action(action: Action) -> bool {
    matches!(
        action,
        Action::Configure | Action::Gen25519 | Action::GenCsr | Action::Jwt | Action::ReleaseUpdate
    )
}

fn refusal(action: &str, code: u64, text: &str) -> String {
    format!(
        r#"{{"action":{},"statuscode":{code},"statusmsg":{},"data":{{}}}}"#,
        quoted(action),
        quoted(text)
    )
}

fn message(text: &str) -> String {
    format!(r#"{{"message":{}}}"#, quoted(text))
}

/// What another machine of the same name would answer.
fn other_answer(action: Action, body: &str) -> String {
    let mut value: Value = serde_json::from_str(body).expect("we wrote it");
    let other = match action {
        Action::Inventory => ("version", "9.9.9"),
        Action::Jwt => {
            ("ecdh_public", "00ff00ff00ff00ff00ff00ff00ff00ff00ff00ff00ff00ff00ff00ff00ff00ff")
        }
        Action::Gen25519 => ("directory", "/etc/other"),
        Action::GenCsr => ("ssldir", "/etc/other"),
        _ => ("message", "this is the other machine"),
    };
    value["data"][other.0] = Value::String(other.1.to_owned());
    value.to_string()
}

fn spoil(body: &str, field: Option<&str>, damage: Damage) -> String {
    let mut value: Value = serde_json::from_str(body).expect("we wrote it");
    let (object, key) = match field {
        None => (&mut value, "data"),
        Some(field) => (&mut value["data"], field),
    };
    let object = object.as_object_mut().expect("replies and their data are objects");
    let text = object.get(key).is_some_and(Value::is_string);
    let wrong = match damage {
        Damage::Missing => {
            object.remove(key);
            return value.to_string();
        }
        Damage::Null => Value::Null,
        Damage::Number => Value::from(7),
        Damage::Boolean if text => Value::Bool(true),
        Damage::Boolean => Value::from("true"),
        Damage::List => Value::Array(vec![Value::from("x")]),
        Damage::Object => serde_json::json!({"x": "y"}),
        Damage::Empty if text => Value::from(""),
        Damage::Empty => Value::from("{}"),
    };
    object.insert(key.to_owned(), wrong);
    value.to_string()
}

/// Whether a node without facts and classes is meant.
fn matches(filter: &Filter, identity: &str) -> bool {
    let is = |entry: &Value, name: &str| match entry.as_str() {
        None => false,
        Some(text) => match text.strip_prefix('/').and_then(|text| text.strip_suffix('/')) {
            Some(pattern) => Regex::new(pattern).is_ok_and(|pattern| pattern.is_match(name)),
            None => text == name,
        },
    };
    (filter.identity.is_empty() || filter.identity.iter().any(|entry| is(entry, identity)))
        && filter.agent.iter().all(|entry| AGENTS.iter().any(|agent| is(entry, agent)))
        && filter.class.is_empty()
        && filter.fact.is_empty()
        && filter.compound.is_empty()
}

/// The inputs of one request, their types checked.
struct Inputs<'a>(Option<&'a Map<String, Value>>);

impl<'a> Inputs<'a> {
    /// Checks types as Go's decoder does for the structure of `action`.
    fn read(action: Action, data: &'a Value) -> Result<Inputs<'a>, String> {
        let (structure, fields): (&str, &[&str]) = match action {
            Action::Jwt => ("JWTRequest", &["token"]),
            Action::Gen25519 => ("ED25519Request", &["token", "nonce"]),
            Action::GenCsr => ("CSRRequest", &["token", "cn", "C", "L", "O", "OU", "ST"]),
            Action::Configure => (
                "ConfigureRequest",
                &[
                    "token",
                    "config",
                    "ca",
                    "certificate",
                    "key",
                    "ssldir",
                    "ecdh_public",
                    "server_jwt",
                ],
            ),
            Action::Restart => ("RestartRequest", &["token"]),
            Action::ReleaseUpdate => ("ReleaseUpdateRequest", &["token", "repository", "version"]),
            Action::Shutdown => ("ShutdownRequest", &["token"]),
            _ => ("ReprovisionRequest", &["token"]),
        };
        let fail = |problem: String| {
            format!(
                "Could not parse request data for choria_provision#{}: json: {problem}",
                action.name()
            )
        };
        let map = match data {
            Value::Object(map) => Some(map),
            Value::Null => None,
            other => {
                return Err(fail(format!(
                    "cannot unmarshal {} into Go value of type provision.{structure}",
                    go_kind(other)
                )));
            }
        };
        let inputs = Inputs(map);
        let wrong = |field: &str, value: &Value, kind: &str| {
            let found = go_kind(value);
            fail(format!(
                "cannot unmarshal {found} into Go struct field {structure}.{field} of type {kind}"
            ))
        };
        for field in fields {
            match inputs.find(field) {
                None | Some(Value::String(_) | Value::Null) => {}
                Some(other) => return Err(wrong(field, other, "string")),
            }
        }
        if action == Action::Restart {
            match inputs.find("splay") {
                None | Some(Value::Null) => {}
                Some(Value::Number(number)) if number.as_i64().is_some() => {}
                Some(Value::Number(number)) => {
                    return Err(fail(format!(
                        "cannot unmarshal number {number} into Go struct field {structure}.splay of type int"
                    )));
                }
                Some(other) => return Err(wrong("splay", other, "int")),
            }
        }
        if action == Action::Configure {
            for field in ["action_policies", "opa_policies"] {
                match inputs.find(field) {
                    None | Some(Value::Null) => {}
                    Some(Value::Object(map)) => {
                        if let Some(value) = map.values().find(|value| !value.is_string()) {
                            return Err(wrong(field, value, "string"));
                        }
                    }
                    Some(other) => return Err(wrong(field, other, "map[string]string")),
                }
            }
        }
        Ok(inputs)
    }

    /// Go's decoder matches keys whatever their case.
    fn find(&self, field: &str) -> Option<&'a Value> {
        let inputs = self.0?;
        inputs.get(field).or_else(|| {
            let mut entries = inputs.iter();
            entries.find(|(key, _)| key.eq_ignore_ascii_case(field)).map(|(_, value)| value)
        })
    }

    fn text(&self, field: &str) -> &'a str {
        self.find(field).and_then(Value::as_str).unwrap_or_default()
    }

    fn integer(&self, field: &str) -> i64 {
        self.find(field).and_then(Value::as_i64).unwrap_or_default()
    }

    fn texts(&self, field: &str) -> BTreeMap<String, String> {
        let texts = self.find(field).and_then(Value::as_object);
        let texts = texts.into_iter().flatten();
        texts
            .map(|(key, value)| (key.clone(), value.as_str().unwrap_or_default().to_owned()))
            .collect()
    }
}

/// Reads the text of `config`: an object of texts.
fn read_settings(text: &str) -> Result<BTreeMap<String, String>, String> {
    let value: Value = serde_json::from_str(text).map_err(|_| go_syntax_error(text.as_bytes()))?;
    let Value::Object(map) = &value else {
        let found = go_kind(&value);
        return Err(format!(
            "json: cannot unmarshal {found} into Go value of type map[string]string"
        ));
    };
    map.iter()
        .map(|(key, value)| match value {
            Value::String(value) => Ok((key.clone(), value.clone())),
            Value::Null => Ok((key.clone(), String::new())),
            other => Err(format!(
                "json: cannot unmarshal {} into Go value of type string",
                go_kind(other)
            )),
        })
        .collect()
}

fn go_kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "bool",
        Value::Number(_) => "number",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    }
}

/// Nearly what Go says of broken JSON; clients must not read more than the text before it.
fn go_syntax_error(text: &[u8]) -> String {
    let text = String::from_utf8_lossy(text);
    match text.trim_start().chars().find(|&character| character != '{') {
        None => "unexpected end of JSON input".to_owned(),
        Some(character) if text.trim_start().starts_with('{') => {
            format!("invalid character '{character}' looking for beginning of object key string")
        }
        Some(character) => {
            format!("invalid character '{character}' looking for beginning of value")
        }
    }
}
