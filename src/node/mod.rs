//! Every step for one node, in order, on one screen.
//!
//! What a step needs from the one before, and when a node or an answer is refused, is in [`step`]; tries, pauses and which answer counts
//! are `rpc`'s. What an outcome means for the node's future is the registry's.

pub mod claims;
pub mod lint;
pub mod proof;
pub mod server_jwt;
pub mod stand_in;
pub mod step;
#[cfg(test)]
mod tests;
pub mod upgrade;

use std::fmt;
use std::io;
use std::mem;
use std::path::PathBuf;
use std::sync::{Arc, Once};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, never};
use openssl::error::ErrorStack;
use openssl::rand::rand_bytes;
use openssl::sha::sha256;
use parking_lot::Mutex;
use zeroize::Zeroizing;

use crate::clock::unix_time;
use crate::config::signing::{LastPair, SigningError};
use crate::config::{self, Config, Enrollment, HelperMode, VerifyKeySource};
use crate::errors::chain;
use crate::gate::{Closed, Gate, Reason, Term};
use crate::helper::{self, Answer, CsrInput, Ed25519Input, Helper};
use crate::jwt::provisioning::{self, Doubt};
use crate::jwt::server::{IssueError, Issued};
use crate::jwt::{self, KeyError, VerifyKey};
use crate::metrics::Metrics;
use crate::pki::ecdh::{self, Ephemeral, Sealed};
use crate::protocol::{Identity, random_bytes};
use crate::rpc::actions::{
    Action, Call, Configure, GenCsr, Inventory, Jwt, ReleaseUpdate, Restart, Shutdown,
};
use crate::rpc::{
    self, Arrival, Attempt, Checked, Contradiction, Patience, Registration, Rpc, SendError,
    Unhurried,
};
use crate::shutdown::Never;
use crate::transport::PublishError;

use self::proof::Challenge;
use self::server_jwt::Signer;
use self::step::{BadAnswer, Decision, Described, Keyed, Plan, Ready, Refusal, Verified};
use self::upgrade::{Policy, Problem};

/// What every attempt needs.
#[derive(Debug)]
pub struct Context {
    /// Talks to nodes.
    pub rpc: Arc<Rpc>,
    /// Runs the site's helper.
    pub helper: Arc<Helper>,
    /// Says whether the next step may be taken.
    pub gate: Arc<Gate>,
    /// Counts.
    pub metrics: Arc<Metrics>,
    /// The settings; an attempt keeps those it began with.
    pub config: Arc<Config>,
    /// The key that verifies provisioning JWTs, as it was last.
    pub last_key: LastKey,
    /// What signs server JWTs, as it was last.
    pub last_pair: LastPair,
    /// What each request is given for the way, beside the time the node may take.
    pub discovery_timeout: Duration,
    /// Disconnects when everything must end.
    pub abort: Receiver<Never>,
}

impl Context {
    /// The same with other settings, and the helper for them in the place of this one's.
    pub fn with(&self, config: Config) -> Context {
        let (command, limits) = (config.helper.clone(), config.helper_limits());
        let helper = self.helper.replaced(command, limits, config.workers);
        Context {
            rpc: self.rpc.clone(),
            helper: Arc::new(helper),
            gate: self.gate.clone(),
            metrics: self.metrics.clone(),
            config: Arc::new(config),
            last_key: LastKey::default(),
            last_pair: LastPair::default(),
            discovery_timeout: self.discovery_timeout,
            abort: self.abort.clone(),
        }
    }
}

/// The site's helper, run as configured.
pub fn helper(config: &Config, metrics: &Arc<Metrics>) -> Helper {
    let limits = config.helper_limits();
    let (command, metrics) = (config.helper.clone(), metrics.clone());
    match config.helper_mode {
        HelperMode::Exec => Helper::new(command, limits, metrics),
        HelperMode::Persistent => Helper::persistent(command, limits, config.workers, metrics),
    }
}

/// A node that answered its first request, or is asked again.
#[derive(Debug)]
pub struct Probed {
    /// The node.
    pub identity: Identity,
    /// The term in which it was begun.
    pub term: Term,
    /// The request for its inventory.
    pub registration: Option<Registration>,
    /// The answer to it, unread; without, the node is asked again.
    pub inventory: Option<Arrival>,
    /// When its time is up.
    pub deadline: Instant,
    /// The upgrade it was sent last, if any.
    pub upgrade: Option<upgrade::Tries>,
    /// Told of each step.
    pub progress: Arc<Progress>,
}

/// The step a node is at, for whoever asks what takes so long.
#[derive(Default)]
pub struct Progress {
    at: Mutex<Option<(&'static str, Instant)>>,
    listener: Option<Listener>,
}

/// Whoever is told of each step as it begins.
pub type Listener = Box<dyn Fn(&'static str) + Send + Sync>;

impl Progress {
    /// Tells `listener` of each step.
    pub fn told_to(listener: Listener) -> Progress {
        Progress { at: Mutex::default(), listener: Some(listener) }
    }

    /// The step and since when; nothing before the first.
    pub fn step(&self) -> Option<(&'static str, Instant)> {
        *self.at.lock()
    }

    fn begins(&self, step: &'static str, now: Instant) {
        *self.at.lock() = Some((step, now));
        if let Some(listener) = &self.listener {
            listener(step);
        }
    }
}

impl fmt::Debug for Progress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Progress").field(&*self.at.lock()).finish()
    }
}

/// Makes one attempt to provision a node. Blocks until there is an outcome.
pub fn provision(context: &Context, node: Probed, patience: &mut dyn Patience) -> Report {
    with_node(context, node, patience, Manner::InEarnest, |node| {
        let result = node.provision();
        let (outcome, reason) = match result {
            Ok(outcome) => (outcome, String::new()),
            Err(error) => (error.outcome(&context.gate), reason(&error)),
        };
        let (steps, facts) = (mem::take(&mut node.steps), mem::take(&mut node.facts));
        Report { outcome, reason, steps, facts }
    })
}

/// Takes every step of an attempt up to what would be sent to the node, but asks it for nothing that changes it: stand-ins take the place
/// of keys that it would make. The helper runs as it always does.
pub fn rehearse(context: &Context, node: Probed) -> Rehearsal {
    with_node(context, node, &mut Unhurried(never()), Manner::Rehearsed, |node| {
        let intent = node.rehearse().map_err(|error| {
            node.remarks.extend(remedy(&error).map(str::to_owned));
            reason(&error)
        });
        let (steps, remarks) = (mem::take(&mut node.steps), mem::take(&mut node.remarks));
        Rehearsal { intent, steps, remarks }
    })
}

/// What can be done about a failure whose words don't say it.
fn remedy(error: &Error) -> Option<&'static str> {
    match error {
        Error::Rpc { source, .. } if source.is_wrong_token() => Some(
            "The setting `token` must be the claim `cht` of the node's provisioning JWT, and is not",
        ),
        Error::Rpc { source, .. } if source.is_busy() => Some(
            "Another provisioner holds the node's lock, for two minutes at most: try again then, or ask there",
        ),
        Error::Refused(Refusal::Jwt { source: provisioning::Error::Token(source), .. }) => {
            match source {
                jwt::Error::BadSignature(_)
                | jwt::Error::Unverifiable(_)
                | jwt::Error::Chain(_) => Some(
                    "The setting `jwt_verify_cert` must be of whoever signed the node's provisioning JWT, and may be of another",
                ),
                jwt::Error::Malformed(_)
                | jwt::Error::Expired
                | jwt::Error::NotYetValid
                | jwt::Error::NeverValid => None,
            }
        }
        _ => None,
    }
}

/// How a node is treated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Manner {
    /// It becomes what the helper says.
    InEarnest,
    /// It stays what it is.
    Rehearsed,
}

fn with_node<T>(
    context: &Context,
    node: Probed,
    patience: &mut dyn Patience,
    manner: Manner,
    attempt_it: impl FnOnce(&mut Node<'_>) -> T,
) -> T {
    let Probed { identity, term, registration, inventory, deadline, upgrade, progress } = node;
    let mut attempt = Attempt::new(
        &context.rpc,
        &identity,
        &context.gate,
        term,
        &context.abort,
        deadline,
        context.discovery_timeout,
        patience,
    );
    if let (Some(registration), Some(arrival)) = (registration, inventory) {
        attempt.adopt(registration, arrival);
    }

    attempt_it(&mut Node {
        context,
        identity: &identity,
        manner,
        term,
        deadline,
        upgrade,
        attempt,
        steps: Vec::new(),
        facts: Facts::default(),
        remarks: Vec::new(),
        progress: &progress,
    })
}

/// A node in hand.
struct Node<'a> {
    context: &'a Context,
    identity: &'a Identity,
    manner: Manner,
    term: Term,
    deadline: Instant,
    upgrade: Option<upgrade::Tries>,
    attempt: Attempt<'a>,
    steps: Vec<(&'static str, Duration)>,
    facts: Facts,
    /// What is strange; logged at once unless this is a rehearsal.
    remarks: Vec<String>,
    progress: &'a Progress,
}

impl Node<'_> {
    fn provision(&mut self) -> Result<Outcome, Error> {
        let Prepared { plan, credentials } = match self.prepare()? {
            Decided::Configure(prepared) => *prepared,
            Decided::Defer { reason } => return Err(Error::Deferred { reason }),
            Decided::ShutDown { reason } => {
                self.step("shutdown", |node| node.shut_down(&reason))?;
                return Ok(Outcome::ShutDown);
            }
        };
        if let Some(sent) = self.upgrade(&plan)? {
            return Ok(sent);
        }
        self.hear_contradictions()?;
        let configured_at = self.step("configure", |node| node.configure(&plan, &credentials))?;
        let restarted_at = self.step("restart", Node::restart)?;
        Ok(Outcome::Provisioned { configured_at, restarted_at })
    }

    /// Says what would be sent now, and sends nothing.
    fn rehearse(&mut self) -> Result<Intent, Error> {
        let token = self.context.config.token.expose();
        let Prepared { plan, credentials } = match self.prepare()? {
            Decided::Configure(prepared) => *prepared,
            Decided::Defer { reason } => return Ok(Intent::Defer { reason }),
            Decided::ShutDown { reason } => {
                let request = Intended::of(&Shutdown { token });
                return Ok(Intent::ShutDown { reason, request });
            }
        };
        if let Some(version) = self.version_to_send(&plan)? {
            let repository = &self.context.config.upgrades_repository;
            let request = ReleaseUpdate { repository, token, version: &version };
            let request = Intended::of(&request);
            return Ok(Intent::Upgrade { from: plan.version, version, request });
        }
        self.check_contradictions()?;
        let config = plan.configuration_json();
        let configure = Intended::of(&request_to_configure(&plan, &credentials, &config, token));
        let restart = Intended::of(&Restart { splay_secs: RESTART_SPLAY_SECS, token });
        Ok(Intent::Configure { requests: [configure, restart] })
    }

    /// Asks the node and the helper, checks what they say, and makes what is to be sent: all that comes before the node is changed for
    /// good.
    fn prepare(&mut self) -> Result<Decided, Error> {
        let features = self.context.config.features;
        let verified = match features.jwt {
            true => self.step("jwt", Node::verify)?,
            false => Verified::unasked(self.identity.clone()),
        };
        let keyed = match features.enrollment {
            Enrollment::OrganizationIssuer => self.step("gen25519", |node| node.prove(verified))?,
            Enrollment::Off | Enrollment::Pki => verified.without_key(),
        };
        let described = self.step("inventory", |node| node.describe(keyed))?;
        let ready = match features.enrollment {
            Enrollment::Pki => self.step("gencsr", |node| node.enroll(described))?,
            Enrollment::Off | Enrollment::OrganizationIssuer => described.without_csr(),
        };
        let answer = self.step("helper", |node| node.ask_helper(&ready))?;
        let plan = match self.decide(ready, answer)? {
            Decision::Configure(plan) => *plan,
            Decision::Defer { reason } => return Ok(Decided::Defer { reason }),
            Decision::ShutDown { reason } => return Ok(Decided::ShutDown { reason }),
        };
        plan.certificate.clone_into(&mut self.facts.certificate);
        let credentials = Credentials { server_jwt: self.sign(&plan)?, key: seal(&plan)? };
        Ok(Decided::Configure(Box::new(Prepared { plan, credentials })))
    }

    /// Asks for the provisioning JWT and checks it. Our own key is read first: without it the node need not be asked.
    fn verify(&mut self) -> Result<Verified, Error> {
        let Context { config, .. } = self.context;
        let key = verify_key(config.jwt_verify_cert.as_ref(), &self.context.last_key)?;
        let reply = self.call(Jwt { token: config.token.expose() })?;
        let verified = Verified::by_jwt(self.identity.clone(), reply, &key, unix_time())?;
        if let Some(token) = verified.token() {
            let (node, jwt_id) = (self.identity.as_str(), token.id());
            jwt_id.clone_into(&mut self.facts.jwt_id);
            token.organization().clone_into(&mut self.facts.organization);
            log::debug!(component = node, node, jwt_id; "Verified the provisioning JWT of {node}");
            for doubt in token.doubts(config.token.expose()) {
                self.doubt(&doubt);
            }
        }
        Ok(verified)
    }

    /// Asks for a key, with another nonce at each try, and for the proof that the node holds it. What we sign with is read first: without
    /// it the node need not make one, nor the helper be asked.
    fn prove(&mut self, verified: Verified) -> Result<Keyed, Error> {
        let signer = self.signer()?;
        let ours = signer.issuer.organization();
        if let Some(doubt) = verified.token().and_then(|token| token.organization_doubt(ours)) {
            self.doubt(&doubt);
        }
        let token = self.context.config.token.expose();
        let key = match self.manner {
            Manner::Rehearsed => {
                let challenge = Challenge::new(random_bytes(), token);
                self.remark(format!(
                    "an Ed25519 key of ours, and {}, stand for those of the node: it is not asked to make another key",
                    stand_in::DIRECTORY
                ));
                challenge.check(stand_in::gen25519(challenge.nonce().as_str()))
            }
            Manner::InEarnest => {
                let answer = self.attempt.call(
                    &mut |_| Challenge::new(random_bytes(), token),
                    &mut |challenge, reply| match challenge.check(reply) {
                        Ok(key) => Checked::Done(Ok(key)),
                        // Once may be an answer to another provisioner's request.
                        Err(error) => Checked::OnceMore(Err(error)),
                    },
                );
                answer.map_err(|source| self.rpc_error(Action::Gen25519, source))?
            }
        };
        let key = key.map_err(Refusal::Key)?;
        self.facts.public_key = Some(key.public_key().to_bytes());
        Ok(verified.with_key(key, signer))
    }

    /// What signs server JWTs, from files that are read for every node, so that they can be replaced.
    fn signer(&self) -> Result<Signer, Error> {
        let Context { config, metrics, last_pair, .. } = self.context;
        let files = config.signing.as_ref().ok_or(Error::NoSigningKey)?;
        let issuer = files.read_again(unix_time(), last_pair).map_err(Error::Signing)?;
        if let Some(expires) = issuer.expires() {
            metrics.token_expires("signing", expires);
        }
        Ok(Signer { issuer, validity: config.server_jwt_validity })
    }

    /// Reads the inventory the prober holds, or asks for it again. Only now: a stranger's JSON is not parsed.
    fn describe(&mut self, keyed: Keyed) -> Result<Described, Error> {
        let reply = self.call(Inventory {})?;
        reply.version.clone_into(&mut self.facts.version);
        Ok(keyed.described(reply))
    }

    /// Asks for a certificate request and checks it.
    fn enroll(&mut self, described: Described) -> Result<Ready, Error> {
        let Context { config, .. } = self.context;
        let (cn, token) = (self.identity.as_str(), config.token.expose());
        let sent = match self.manner {
            Manner::InEarnest => self.call(GenCsr { cn, token })?,
            Manner::Rehearsed => {
                self.remark(format!(
                    "a certificate request of ours, and {}, stand for those of the node: it is not asked to make another key",
                    stand_in::SSLDIR
                ));
                stand_in::gencsr(cn).map_err(Error::StandIn)?
            }
        };
        sent.csr.clone_into(&mut self.facts.csr);
        Ok(described.with_csr(sent, &config.cert_deny_list)?)
    }

    fn ask_helper(&mut self, ready: &Ready) -> Result<Answer, Error> {
        self.check_contradictions()?;
        self.context.gate.proceed(self.term, self.deadline).map_err(Error::Stopped)?;
        if Instant::now() >= self.deadline {
            return Err(Error::TimeUp);
        }
        let csr = ready.csr().map(|sent| CsrInput {
            csr: sent.csr.pem(),
            public_key: &sent.public_key,
            ssldir: &sent.ssldir,
        });
        let key =
            ready.key().map(|key| (key.public_key_hex(), key.signature_hex(), key.directory()));
        let ed25519 = key.as_ref().map(|(public_key, signature, directory)| Ed25519Input {
            public_key,
            directory,
            signature,
        });
        let input = helper::Input {
            identity: self.identity,
            csr,
            ed25519,
            inventory: ready.inventory(),
            jwt: ready.claims(),
        };
        self.context.helper.run(&input, self.deadline, &self.context.abort).map_err(Error::Helper)
    }

    /// Decides what the answer means for the node, and says what will hurt.
    fn decide(&mut self, ready: Ready, answer: Answer) -> Result<Decision, Error> {
        let Context { rpc, config, .. } = self.context;
        let size_of = |body: &str| rpc.message_size(self.identity, Action::Configure, body);
        let site = lint::Site {
            features: config.features,
            unix_time: unix_time(),
            room: lint::Room { max_payload: rpc.max_payload(), size_of: &size_of },
        };
        let (node, mut found) = (self.identity, Vec::new());
        let decision = ready.decide(answer, site, &mut |finding| found.push(finding));
        for finding in found {
            self.remark(format!("The helper's answer for {node}: {finding}"));
        }
        Ok(decision?)
    }

    /// A node that declines has been told; whether it stops is its own affair, as in the original.
    fn shut_down(&mut self, reason: &str) -> Result<(), Error> {
        let node = self.identity.as_str();
        log::info!(component = node, node; "Shutting down {node} on the helper's wish: {reason}");
        match self.call(Shutdown { token: self.context.config.token.expose() }) {
            Ok(reply) => {
                self.context.metrics.helper_shutdown_requests.inc();
                log::debug!(component = node, node; "{node} on shutdown: {}", reply.message);
                Ok(())
            }
            Err(Error::Rpc { source: source @ rpc::Error::Refused { .. }, .. }) => {
                log::warn!(component = node, node; "{node} did not shut down: {source}");
                Ok(())
            }
            // It waits up to 9 s, and one that waits for none is gone before its answer gets out.
            Err(Error::Rpc { source: source @ rpc::Error::Unreachable { .. }, .. }) => {
                log::info!(component = node, node; "{node} did not answer shutdown and is gone: {source}");
                Ok(())
            }
            Err(error) => Err(error),
        }
    }

    /// Signs the server JWT, if the node made a key for one.
    fn sign(&mut self, plan: &Plan) -> Result<Option<Issued>, Error> {
        let Some(unsigned) = &plan.server_jwt else { return Ok(None) };
        let issued = unsigned.sign(unix_time(), random_bytes()).map_err(Error::Sign)?;
        issued.id.as_str().clone_into(&mut self.facts.server_jwt_id);
        unsigned.organization().clone_into(&mut self.facts.organization);
        let (node, jwt_id, expires) = (self.identity.as_str(), issued.id.as_str(), issued.expires);
        log::debug!(component = node, node, jwt_id, expires; "Signed a server JWT for {node}");
        Ok(Some(issued))
    }

    /// Has the node become another version first, if the helper wishes so. That ends the attempt: the node comes back by its startup
    /// event.
    fn upgrade(&mut self, plan: &Plan) -> Result<Option<Outcome>, Error> {
        match self.version_to_send(plan)? {
            None => Ok(None),
            Some(version) => self.step("release_update", |node| node.release_update(plan, version)),
        }
    }

    fn policy(&self) -> Policy<'_> {
        let Config { features, upgrades_optional, upgrades_repository, .. } = &*self.context.config;
        Policy {
            is_on: features.upgrades,
            is_optional: *upgrades_optional,
            repository: upgrades_repository,
        }
    }

    /// The version that the node has to become first, if any.
    fn version_to_send(&mut self, plan: &Plan) -> Result<Option<String>, Error> {
        let is_stuck = |target: &str, from: &str| {
            self.upgrade.is_some_and(|tries| tries.is_stuck(target, from))
        };
        match upgrade::decide(self.policy(), plan.reported(), &plan.upgrade, is_stuck) {
            upgrade::Decision::GoOn => Ok(None),
            upgrade::Decision::Send { version } => Ok(Some(version)),
            upgrade::Decision::Skip(skipped) => {
                self.remark(skipped.to_string());
                Ok(None)
            }
            upgrade::Decision::Fail(problem) => Err(Error::Upgrade(problem)),
            upgrade::Decision::Stuck(stuck) => Err(Error::UpgradeStuck(stuck)),
        }
    }

    /// Sends one update, and only once: silence may be a slow download, which a second request would repeat.
    fn release_update(&mut self, plan: &Plan, version: String) -> Result<Option<Outcome>, Error> {
        let sent_at = Instant::now();
        let config = &self.context.config;
        let (repository, token) = (&config.upgrades_repository, config.token.expose());
        let request = ReleaseUpdate { repository, token, version: &version };
        let result = self.attempt.call(&mut |_| request, &mut |_, reply| Checked::Done(reply));
        let node = self.identity.as_str();
        match result {
            Ok(reply) => {
                log::debug!(component = node, node; "{node} on release_update: {}", reply.message);
            }
            Err(source) if is_unanswered(&source) => {
                log::info!(component = node, node; "{node} did not answer release_update and may be at it: {source}");
            }
            Err(source) if config.upgrades_optional && says_no_to_upgrade(&source) => {
                let error = Error::Update { version: version.clone(), source };
                let reason = reason(&error);
                self.remark(format!("Could not upgrade to {version}, continuing: {reason}"));
                return Ok(None);
            }
            Err(source) => return Err(Error::Update { version, source }),
        }
        Ok(Some(Outcome::UpgradeSent { version, from: plan.version.clone(), sent_at }))
    }

    /// Sends the configuration; returns when that was answered.
    fn configure(&mut self, plan: &Plan, credentials: &Credentials) -> Result<Instant, Error> {
        let config = plan.configuration_json();
        self.facts.config_sha256 = Some(sha256(config.as_bytes()));
        let token = self.context.config.token.expose();
        let reply = self.call(request_to_configure(plan, credentials, &config, token))?;
        let node = self.identity.as_str();
        log::debug!(component = node, node; "{node} on configure: {}", reply.message);
        Ok(Instant::now())
    }

    /// Restarts the configured node, however long it has taken by now; returns when that was answered, if it was. A node that is gone
    /// has its configuration: it restarted before it answered, or will start with it.
    fn restart(&mut self) -> Result<Option<Instant>, Error> {
        self.attempt.ignore_deadline();
        let token = self.context.config.token.expose();
        let node = self.identity.as_str();
        match self.call(Restart { splay_secs: RESTART_SPLAY_SECS, token }) {
            Ok(reply) => {
                log::debug!(component = node, node; "{node} on restart: {}", reply.message);
                Ok(Some(Instant::now()))
            }
            Err(Error::Rpc { source, .. }) if is_gone(&source) => {
                log::info!(component = node, node; "{node} was configured and did not answer restart: {source}");
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// Waits as long as the site wants to, so that a second answer can show itself, then looks for one.
    fn hear_contradictions(&mut self) -> Result<(), Error> {
        self.check_contradictions()?;
        let wait = self.context.config.contradiction_wait;
        if !wait.is_zero() {
            self.step("contradiction_wait", |node| {
                let listened = node.attempt.listen(wait);
                listened.map_err(|source| node.rpc_error(Action::Configure, source))
            })?;
        }
        self.check_contradictions()
    }

    fn check_contradictions(&mut self) -> Result<(), Error> {
        match self.attempt.contradicted() {
            None => Ok(()),
            Some(contradiction) => Err(Error::Contradicted(*contradiction)),
        }
    }

    /// One action, with its tries; the same request each time.
    fn call<C: Call + Copy>(&mut self, request: C) -> Result<C::Reply, Error> {
        self.attempt
            .call(&mut |_| request, &mut |_, reply| Checked::Done(reply))
            .map_err(|source| self.rpc_error(C::ACTION, source))
    }

    fn rpc_error(&self, action: Action, source: rpc::Error) -> Error {
        Error::Rpc { action, node: self.identity.clone(), source }
    }

    /// Takes one step and notes how long it took.
    fn step<T>(&mut self, name: &'static str, step: impl FnOnce(&mut Self) -> T) -> T {
        let started = Instant::now();
        self.progress.begins(name, started);
        let result = step(self);
        let took = started.elapsed();
        let seconds = self.context.metrics.step_duration_seconds.with_label_values(&[name]);
        seconds.observe(took.as_secs_f64());
        self.steps.push((name, took));
        result
    }

    /// Says what is strange about the node's provisioning JWT.
    fn doubt(&mut self, doubt: &Doubt) {
        // One token serves a fleet, and this is true of it until it is replaced.
        static SAID: Once = Once::new();
        let text = format!("The provisioning JWT of {}: {doubt}", self.identity);
        match doubt {
            Doubt::NeverExpires => SAID.call_once(|| self.remark(text)),
            Doubt::OtherToken | Doubt::OtherOrganization { .. } => self.remark(text),
        }
    }

    /// Says what is strange about the node or the helper's answer for it, where people look for it.
    fn remark(&mut self, text: String) {
        let (node, text) = (self.identity.as_str(), shortened(text));
        match self.manner {
            Manner::InEarnest => log::warn!(component = node, node; "{text}"),
            Manner::Rehearsed => self.remarks.push(text),
        }
    }
}

/// What is to become of a node, with all that has to be made for it.
enum Decided {
    Defer { reason: String },
    ShutDown { reason: String },
    Configure(Box<Prepared>),
}

/// What a node is to be sent.
struct Prepared {
    plan: Plan,
    credentials: Credentials,
}

/// What a rehearsal came to.
#[derive(Debug)]
pub struct Rehearsal {
    /// What would be sent, or the reason why nothing would.
    pub intent: Result<Intent, String>,
    /// Steps taken, in order.
    pub steps: Vec<(&'static str, Duration)>,
    /// What is strange, and what stood for something else.
    pub remarks: Vec<String>,
}

/// What would be done to a node.
#[derive(Debug)]
pub enum Intent {
    /// Nothing, until it is seen again.
    Defer {
        /// Why, in the helper's words.
        reason: String,
    },
    /// It would be shut down.
    ShutDown {
        /// Why, in the helper's words.
        reason: String,
        /// With this.
        request: Intended,
    },
    /// It would become another version first.
    Upgrade {
        /// The version it has.
        from: String,
        /// The version it would get.
        version: String,
        /// With this.
        request: Intended,
    },
    /// It would be configured and restarted.
    Configure {
        /// With these, one after the other.
        requests: [Intended; 2],
    },
}

/// A request that was not sent. It holds secrets, so its body is not for people.
pub struct Intended {
    /// What it asks for.
    pub action: Action,
    /// The RPC body.
    pub body: Zeroizing<String>,
}

impl Intended {
    fn of<C: Call>(request: &C) -> Intended {
        Intended { action: C::ACTION, body: Zeroizing::new(request.body()) }
    }
}

impl fmt::Debug for Intended {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Intended({})", self.action)
    }
}

/// `config` is the plan's configuration as JSON.
fn request_to_configure<'a>(
    plan: &'a Plan,
    credentials: &'a Credentials,
    config: &'a str,
    token: &'a str,
) -> Configure<'a> {
    let key = credentials.key.as_ref();
    Configure {
        action_policies: &plan.action_policies,
        ca: &plan.ca,
        certificate: &plan.certificate,
        config,
        ecdh_public: key.map_or("", |sealed| &sealed.ecdh_public),
        key: key.map_or("", |sealed| &sealed.key),
        opa_policies: &plan.opa_policies,
        server_jwt: credentials.server_jwt.as_ref().map_or("", |issued| &issued.text),
        ssldir: &plan.ssldir,
        token,
    }
}

/// What was made for one node, to go with its configuration.
struct Credentials {
    server_jwt: Option<Issued>,
    key: Option<Sealed>,
}

/// Upper bound of the random wait before a node restarts: it waits exactly 2 s with this, as with the original.
const RESTART_SPLAY_SECS: u32 = 1;

/// Whether nobody answered because node or broker were gone.
fn is_gone(error: &rpc::Error) -> bool {
    match error {
        rpc::Error::Unreachable { .. }
        | rpc::Error::Silent { .. }
        | rpc::Error::Lost { .. }
        | rpc::Error::GivenUp { .. }
        | rpc::Error::Deadline { .. }
        | rpc::Error::Send(SendError(
            PublishError::Disconnected | PublishError::Late | PublishError::Closed,
        )) => true,
        rpc::Error::Contradicted(_)
        | rpc::Error::Stopped(_)
        | rpc::Error::Refused { .. }
        | rpc::Error::BadReply { .. }
        | rpc::Error::Send(SendError(PublishError::TooLarge { .. } | PublishError::BadHeader)) => {
            false
        }
    }
}

/// Whether an update went out and nobody can know what became of it.
fn is_unanswered(error: &rpc::Error) -> bool {
    match error {
        rpc::Error::Silent { .. } | rpc::Error::Lost { .. } => true,
        rpc::Error::GivenUp { tries } | rpc::Error::Deadline { tries, last: None } => *tries > 0,
        rpc::Error::Deadline { last: Some(_), .. }
        | rpc::Error::Contradicted(_)
        | rpc::Error::Stopped(_)
        | rpc::Error::Unreachable { .. }
        | rpc::Error::Refused { .. }
        | rpc::Error::BadReply { .. }
        | rpc::Error::Send(_) => false,
    }
}

/// Whether the node is there and ours, and will not become the version wished.
fn says_no_to_upgrade(error: &rpc::Error) -> bool {
    match error {
        rpc::Error::Refused { .. } => {
            !(error.is_busy() || error.is_wrong_token() || error.is_not_provisioning())
        }
        rpc::Error::BadReply { .. } => true,
        _ => false,
    }
}

/// Encrypts the private key that the helper gave, if it did, under a pair of ours that serves this node alone.
fn seal(plan: &Plan) -> Result<Option<Sealed>, Error> {
    let Some(key) = &plan.key else { return Ok(None) };
    let random = ephemeral().map_err(|error| Error::Key(error.into()))?;
    key.seal(&random).map(Some).map_err(Error::Key)
}

fn ephemeral() -> Result<Ephemeral, ErrorStack> {
    let (mut private, mut iv) = (Zeroizing::new([0; 32]), [0; 16]);
    rand_bytes(&mut *private)?;
    rand_bytes(&mut iv)?;
    Ok(Ephemeral::new(*private, iv))
}

/// The key for provisioning JWTs; files are read for every node, so that they can be replaced.
fn verify_key(source: Option<&VerifyKeySource>, last: &LastKey) -> Result<VerifyKey, Error> {
    match source {
        None => Err(Error::NoVerifyKey),
        Some(VerifyKeySource::Ed25519(bytes)) => last
            .of(bytes, || VerifyKey::from_ed25519(bytes))
            .map_err(|source| Error::VerifyKey { path: None, source }),
        Some(VerifyKeySource::File(path)) => {
            let content = config::read_file(path)
                .and_then(|bytes| String::from_utf8(bytes).map_err(io::Error::other))
                .map_err(|source| Error::VerifyKeyFile { path: path.clone(), source })?;
            last.of(content.as_bytes(), || VerifyKey::from_file(&content))
                .map_err(|source| Error::VerifyKey { path: Some(path.clone()), source })
        }
    }
}

/// The last key that provisioning JWTs were verified with, and what it was made of. Another one is made when that has changed:
/// reading a small file costs a few microseconds, making OpenSSL's key of it a third of all that we do for a node, and with the
/// key goes what it remembers.
#[derive(Debug, Default)]
pub struct LastKey(Mutex<Option<(Vec<u8>, VerifyKey)>>);

impl LastKey {
    /// The key that `make` makes of `content`.
    fn of(
        &self,
        content: &[u8],
        make: impl FnOnce() -> Result<VerifyKey, KeyError>,
    ) -> Result<VerifyKey, KeyError> {
        if let Some((known, key)) = &*self.0.lock()
            && known == content
        {
            return Ok(key.clone());
        }
        let key = make()?;
        *self.0.lock() = Some((content.to_vec(), key.clone()));
        Ok(key)
    }
}

/// Why an attempt ended early.
#[derive(Debug)]
enum Error {
    /// A request failed on its last try.
    Rpc { action: Action, node: Identity, source: rpc::Error },
    /// The node, or something it showed us, failed a check.
    Refused(Refusal),
    /// The node's answers contradict each other.
    Contradicted(Contradiction),
    /// The gate closed before the helper was started.
    Stopped(Closed),
    /// The node's time was up before the helper was started.
    TimeUp,
    /// The helper failed.
    Helper(helper::Error),
    /// The helper's answer must not be sent.
    BadAnswer(BadAnswer),
    /// The node's private key could not be encrypted.
    Key(ecdh::Error),
    /// The node cannot be upgraded.
    Upgrade(upgrade::Problem),
    /// The node was upgraded in vain.
    UpgradeStuck(upgrade::Stuck),
    /// The node did not take an update.
    Update { version: String, source: rpc::Error },
    /// The helper wants the node later.
    Deferred { reason: String },
    /// There is no key for provisioning JWTs.
    NoVerifyKey,
    /// The file with the key for provisioning JWTs is not readable.
    VerifyKeyFile { path: PathBuf, source: io::Error },
    /// The key for provisioning JWTs is none.
    VerifyKey { path: Option<PathBuf>, source: KeyError },
    /// There is no key for server JWTs.
    NoSigningKey,
    /// The files that server JWTs are signed with can't be read, or are no use.
    Signing(SigningError),
    /// The server JWT could not be signed.
    Sign(IssueError),
    /// Nothing could be made to stand for the node's keys.
    StandIn(ErrorStack),
}

impl Error {
    /// What became of the node. An attempt that ended for want of a connection says nothing about it.
    fn outcome(&self, gate: &Gate) -> Outcome {
        match self {
            Error::Rpc { action, source, .. } => rpc_outcome(*action, source, gate),
            Error::Update { source, .. } => rpc_outcome(Action::ReleaseUpdate, source, gate),
            Error::UpgradeStuck(stuck) => Outcome::UpgradeStuck { version: stuck.version.clone() },
            Error::Refused(_) | Error::Contradicted(_) => Outcome::Refused,
            Error::Key(error) if error.is_of_node() => Outcome::Refused,
            Error::Stopped(closed) => Outcome::Stopped(*closed),
            Error::Helper(error) if error.is_aborted() => Outcome::Stopped(Closed::Aborted),
            Error::Helper(_) | Error::BadAnswer(_) => Outcome::HelperFailed,
            Error::Deferred { .. } => Outcome::Deferred,
            Error::Key(_)
            | Error::Upgrade(Problem::NoRepository)
            | Error::NoVerifyKey
            | Error::VerifyKeyFile { .. }
            | Error::VerifyKey { .. }
            | Error::NoSigningKey
            | Error::Signing(_)
            | Error::Sign(_)
            | Error::StandIn(_) => Outcome::Misconfigured,
            Error::TimeUp | Error::Upgrade(Problem::NoVersion | Problem::NotUpgradable) => {
                Outcome::Failed
            }
        }
    }
}

fn rpc_outcome(action: Action, error: &rpc::Error, gate: &Gate) -> Outcome {
    match error {
        rpc::Error::Contradicted(_) => Outcome::Refused,
        rpc::Error::Stopped(closed) => Outcome::Stopped(*closed),
        rpc::Error::Unreachable { .. } => Outcome::Unreachable,
        rpc::Error::Lost { .. } => Outcome::Stopped(Closed::Deadline),
        rpc::Error::Deadline { .. }
            if gate
                .reasons()
                .iter()
                .any(|reason| matches!(reason, Reason::Disconnected | Reason::Standby)) =>
        {
            Outcome::Stopped(Closed::Deadline)
        }
        // Its time went by while the broker or the node was away.
        rpc::Error::Deadline { last: Some(last), .. }
            if matches!(
                **last,
                rpc::Error::Lost { .. }
                    | rpc::Error::Unreachable { .. }
                    | rpc::Error::Send(SendError(PublishError::Disconnected | PublishError::Late))
            ) =>
        {
            rpc_outcome(action, last, gate)
        }
        rpc::Error::Silent { .. } | rpc::Error::GivenUp { .. } | rpc::Error::Deadline { .. } => {
            if action == Action::Inventory {
                Outcome::Unreachable
            } else {
                Outcome::Failed
            }
        }
        rpc::Error::Refused { .. } if error.is_busy() => Outcome::Busy,
        rpc::Error::Refused { .. } if error.is_wrong_token() => Outcome::WrongToken,
        rpc::Error::Refused { .. } if error.is_not_provisioning() => Outcome::NotProvisioning,
        rpc::Error::Refused { .. } | rpc::Error::BadReply { .. } => Outcome::Failed,
        rpc::Error::Send(SendError(sending)) => match sending {
            PublishError::Disconnected | PublishError::Late => Outcome::Stopped(Closed::Deadline),
            PublishError::Closed => Outcome::Stopped(Closed::Aborted),
            PublishError::TooLarge { .. } | PublishError::BadHeader => Outcome::Failed,
        },
    }
}

impl From<Refusal> for Error {
    fn from(refusal: Refusal) -> Error {
        Error::Refused(refusal)
    }
}

impl From<BadAnswer> for Error {
    fn from(answer: BadAnswer) -> Error {
        Error::BadAnswer(answer)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Rpc { action, node, .. } => match action {
                Action::Jwt => write!(f, "could not fetch and validate JWT: {node}"),
                Action::Inventory => f.write_str("could not retrieve inventory"),
                Action::GenCsr => f.write_str("could not fetch CSR"),
                Action::Gen25519 => f.write_str("could not fetch ed25519 public key"),
                Action::ReleaseUpdate => f.write_str("update failed"),
                Action::Configure => f.write_str("configuration failed"),
                Action::Restart => f.write_str("restart failed"),
                Action::Shutdown => write!(f, "{action} failed"),
            },
            Error::Refused(refusal) => write!(f, "{refusal}"),
            Error::Contradicted(contradiction) => write!(f, "{contradiction}"),
            Error::Stopped(closed) => write!(f, "stopped before the helper: {closed}"),
            Error::TimeUp => f.write_str("the node's time was up before the helper was started"),
            Error::Helper(_) => f.write_str("could not invoke configure helper"),
            Error::BadAnswer(_) => f.write_str("configuration failed"),
            Error::Key(error) => error.fmt(f),
            Error::Upgrade(problem) => problem.fmt(f),
            Error::UpgradeStuck(stuck) => stuck.fmt(f),
            Error::Update { version, .. } => write!(f, "update to {version} failed"),
            // The original's spelling, which operators search for.
            Error::Deferred { reason } => write!(f, "configuration defered: {reason}"),
            Error::NoVerifyKey => {
                f.write_str("no JWT verification certificate configured, cannot validate JWT")
            }
            Error::VerifyKeyFile { path, .. } => {
                write!(f, "could not read validation certificate: {}", path.display())
            }
            Error::VerifyKey { path: Some(path), .. } => {
                write!(f, "could not use validation certificate {}", path.display())
            }
            Error::VerifyKey { path: None, .. } => f.write_str("could not use jwt_verify_cert"),
            // The original's words.
            Error::NoSigningKey => {
                f.write_str("no jwt signing key configured using jwt_signing_key")
            }
            Error::Signing(error) => error.fmt(f),
            Error::Sign(error) => error.fmt(f),
            Error::StandIn(_) => f.write_str("no certificate request could be made for this name"),
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Error::Rpc { source, .. } | Error::Update { source, .. } => Some(source),
            Error::Refused(refusal) => refusal.source(),
            Error::Helper(source) => Some(source),
            Error::BadAnswer(source) => Some(source),
            Error::Signing(error) => error.source(),
            Error::Sign(error) => error.source(),
            Error::Key(error) => error.source(),
            Error::VerifyKeyFile { source, .. } => Some(source),
            Error::VerifyKey { source, .. } => Some(source),
            Error::StandIn(source) => Some(source),
            Error::Contradicted(_)
            | Error::Stopped(_)
            | Error::TimeUp
            | Error::Upgrade(_)
            | Error::UpgradeStuck(_)
            | Error::Deferred { .. }
            | Error::NoVerifyKey
            | Error::NoSigningKey => None,
        }
    }
}

/// Longest reason kept, in characters: a helper's words may have megabytes, and the registry keeps one reason for every node.
const REASON_MAX: usize = 1_000;

/// An error and all its causes, for people.
fn reason(error: &Error) -> String {
    shortened(chain(error))
}

fn shortened(text: String) -> String {
    match text.char_indices().nth(REASON_MAX) {
        Some((end, _)) => format!("{} ...", &text[..end]),
        None => text,
    }
}

/// What became of one attempt to provision a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// Configured and restarted; or configured, and gone before it answered `restart`.
    Provisioned {
        /// When `configure` was answered.
        configured_at: Instant,
        /// When `restart` was answered, if it was.
        restarted_at: Option<Instant>,
    },
    /// An update was sent; the node comes back by its startup event.
    UpgradeSent {
        /// The version asked for.
        version: String,
        /// The version the node reported before.
        from: String,
        /// When it was sent; a startup event after this may be the upgraded node.
        sent_at: Instant,
    },
    /// The same update was tried twice and the version did not change.
    UpgradeStuck {
        /// The version asked for.
        version: String,
    },
    /// Shut down on the helper's wish.
    ShutDown,
    /// The helper wants it later.
    Deferred,
    /// Another provisioner holds the node's lock.
    Busy,
    /// The helper failed.
    HelperFailed,
    /// The node does not know our provisioning token.
    WrongToken,
    /// We lack something that every node needs, such as a key file.
    Misconfigured,
    /// Nobody listens on the node's subject, or it never answered the inventory.
    Unreachable,
    /// A check of ours refused the node.
    Refused,
    /// A request failed on its last try.
    Failed,
    /// The node is not in provisioning mode any more.
    NotProvisioning,
    /// The gate closed before the next step.
    Stopped(Closed),
}

/// One attempt: its outcome, the reason in words, and how long each step took.
#[derive(Debug, Clone)]
pub struct Report {
    /// What became of it.
    pub outcome: Outcome,
    /// Why, for people; empty on success.
    pub reason: String,
    /// Steps taken, in order.
    pub steps: Vec<(&'static str, Duration)>,
    /// What was learned of the node and made for it.
    pub facts: Facts,
}

impl Report {
    /// An attempt of which nothing else is known.
    pub fn new(outcome: Outcome, reason: impl Into<String>) -> Report {
        Report { outcome, reason: reason.into(), steps: Vec::new(), facts: Facts::default() }
    }
}

/// What was learned of a node and made for it in one attempt, for the audit log; empty where it did not come so far. No secrets.
#[derive(Debug, Clone, Default)]
pub struct Facts {
    /// Its version, as it said.
    pub version: String,
    /// The id of its provisioning JWT.
    pub jwt_id: String,
    /// The organization its server JWT is for; without one, that of its provisioning JWT.
    pub organization: String,
    /// The Ed25519 key it proved to hold.
    pub public_key: Option<[u8; 32]>,
    /// Its certificate request, in PEM.
    pub csr: String,
    /// The certificate the helper gave it, in PEM.
    pub certificate: String,
    /// The id of the server JWT it was sent.
    pub server_jwt_id: String,
    /// SHA-256 of the configuration it was sent.
    pub config_sha256: Option<[u8; 32]>,
}
