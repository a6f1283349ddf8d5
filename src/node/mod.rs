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
use crate::config::signing::SigningError;
use crate::config::{self, Config, Enrollment, HelperMode, VerifyKeySource};
use crate::errors::chain;
use crate::gate::{Closed, Gate, Reason, Term};
use crate::helper::{self, Answer, CsrInput, Ed25519Input, Helper};
use crate::jwt::provisioning::Doubt;
use crate::jwt::server::{IssueError, Issued};
use crate::jwt::{KeyError, VerifyKey};
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
        let intent = node.rehearse().map_err(|error| reason(&error));
        let (steps, remarks) = (mem::take(&mut node.steps), mem::take(&mut node.remarks));
        Rehearsal { intent, steps, remarks }
    })
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
        let Context { config, metrics, .. } = self.context;
        let files = config.signing.as_ref().ok_or(Error::NoSigningKey)?;
        let issuer = files.read(unix_time()).map_err(Error::Signing)?;
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

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Write as _;
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::thread;

    use base64::Engine as _;
    use base64::engine::general_purpose::STANDARD;
    use crossbeam_channel::{Sender, at, bounded};
    use ed25519_dalek::Signer as _;
    use openssl::derive::Deriver;
    use openssl::pkey::{Id, PKey, Private};
    use openssl::sha::sha256;
    use parking_lot::Mutex;
    use serde_json::{Value, json};

    use super::*;
    use crate::config::report::Report as Findings;
    use crate::gate::Lease;
    use crate::helper::Limits;
    use crate::jwt::{VerifyKind, server, testing};
    use crate::node::lint::testing::{self as certificates, Ca};
    use crate::protocol::{self, Codec, v1};
    use crate::transport::Message;
    use crate::transport::memory::{Memory, Published};

    const NODE: &str = "n0.fleet.example.net";
    const SUBJECT: &str = "provisioning.node.n0.fleet.example.net";
    const LONG: Duration = Duration::from_secs(60);
    /// Time in which a helper has certainly run, for tests that need a node's time to end after that.
    const HELPER_RUNS: Duration = Duration::from_secs(3);
    /// Time in which a node whose own is up has certainly ended.
    const SHORT_WHILE: Duration = Duration::from_millis(500);
    const ALL_FEATURES: &str = "features: {jwt: true, pki: true}";
    const CONFIGURE: &str = r#"echo '{"configuration":{"plugin.choria.server.provision":"0"}}'"#;

    #[test]
    fn provisions_a_node_with_the_requests_the_original_sends() {
        let site = Site::new(ALL_FEATURES, "cat >input; cat answer");
        let sent = recorded_configure();
        let recorded: Value = serde_json::from_str(&sent).unwrap();
        let settings = recorded["data"]["config"].as_str().unwrap();
        let settings: Value = serde_json::from_str(settings).unwrap();
        let answer = json!({
            "configuration": settings,
            "ca": recorded["data"]["ca"],
            "certificate": recorded["data"]["certificate"],
            "ssldir": "/elsewhere",
        });
        site.write("answer", &answer.to_string());

        let report = site.provision();
        assert_eq!(report.reason, "");
        let Outcome::Provisioned { configured_at, restarted_at: Some(restarted_at) } =
            report.outcome
        else {
            panic!("{report:?}")
        };
        assert!(configured_at <= restarted_at);
        let steps: Vec<_> = report.steps.iter().map(|(name, _)| *name).collect();
        assert_eq!(steps, ["jwt", "inventory", "gencsr", "helper", "configure", "restart"]);
        assert!(site.context.metrics.render().contains(
            r#"choria_provisioner_step_duration_seconds_count{site="test",step="gencsr"} 1"#
        ));

        let bodies: Vec<_> = site.asked().into_iter().map(|asked| asked.body).collect();
        assert_eq!(
            bodies,
            [
                r#"{"agent":"rpcutil","action":"inventory","data":{}}"#,
                r#"{"agent":"choria_provision","action":"jwt","data":{"token":"s3cret"}}"#,
                r#"{"agent":"choria_provision","action":"gencsr","data":{"cn":"n0.fleet.example.net","token":"s3cret"}}"#,
                &sent,
                r#"{"agent":"choria_provision","action":"restart","data":{"splay":1,"token":"s3cret"}}"#,
            ]
        );

        let input: Value = serde_json::from_str(&site.read("input")).unwrap();
        let mut expected = recorded_input();
        expected["jwt"] = json!({
            "cht": "s3cret", "chs": false, "chpd": true, "extensions": null, "ou": "choria",
            "purpose": "choria_provisioning",
        });
        assert_eq!(input, expected);
    }

    #[test]
    fn a_node_of_an_organization_gets_a_server_jwt_for_the_key_it_proved() {
        let site = Site::issuer("cat >input; cat answer");
        site.write(
            "answer",
            r#"{"configuration":{"plugin.security.provider":"choria","plugin.choria.server.provision":"0"},"server_claims":{"permissions":{"streams":true}}}"#,
        );
        let report = site.provision();
        assert!(matches!(report.outcome, Outcome::Provisioned { .. }), "{report:?}");
        let steps: Vec<_> = report.steps.iter().map(|(name, _)| *name).collect();
        assert_eq!(steps, ["jwt", "gen25519", "inventory", "helper", "configure", "restart"]);
        assert_eq!(site.actions(), ["inventory", "jwt", "gen25519", "configure", "restart"]);

        // What the helper gets is what the original gives it, but for what this node made for itself.
        let asked = site.asked();
        let nonce = asked[2].nonce();
        assert_eq!(
            asked[2].body,
            format!(
                r#"{{"agent":"choria_provision","action":"gen25519","data":{{"nonce":"{nonce}","token":"s3cret"}}}}"#
            )
        );
        let key = testing::node();
        let mut expected: Value =
            serde_json::from_str(&testing::recorded("issuer/helper-input.json")).unwrap();
        expected["jwt"] = json!({
            "cht": "s3cret", "chs": false, "chpd": true, "extensions": null, "ou": "choria",
            "purpose": "choria_provisioning",
        });
        let public_key = hex(key.verifying_key().as_bytes());
        expected["ed25519_pubkey"]["public_key"] = json!(public_key);
        expected["ed25519_pubkey"]["signature"] =
            json!(hex(&key.sign(nonce.as_bytes()).to_bytes()));
        let input = site.read("input");
        assert_eq!(serde_json::from_str::<Value>(&input).unwrap(), expected);
        let places = [
            "{\"identity\":",
            "\"csr\":null,",
            "\"ed25519_pubkey\":{\"public_key\":",
            ",\"directory\":",
            ",\"signature\":",
            ",\"inventory\":",
            ",\"jwt\":{",
        ]
        .map(|key| input.find(key).unwrap_or_else(|| panic!("{key} is not in {input}")));
        assert!(places.is_sorted(), "{input}");

        let body: Value = serde_json::from_str(&asked[3].body).unwrap();
        let token = body["data"]["server_jwt"].as_str().unwrap();
        let organization = testing::issuer().verifying_key();
        let token = server::verify(token, &organization, unix_time()).unwrap();
        assert_eq!(token.own.identity, NODE);
        assert_eq!(token.own.collectives, ["choria"]);
        assert!(token.own.permissions.unwrap().streams);
        assert_eq!(token.standard.public_key, public_key);
        let validity = token.standard.exp.unwrap() - token.standard.iat.unwrap();
        assert!((0..=1).contains(&(365 * 24 * 3_600 - validity)), "{validity}");
        assert!(site.context.metrics.render().contains(
            r#"choria_provisioner_token_expiry_timestamp_seconds{site="test",token="signing"} 2051222400"#
        ));
    }

    #[test]
    fn a_key_that_is_not_proved_is_asked_for_once_more_and_then_refused() {
        for (answers, outcome) in [(1, None), (2, Some(Outcome::Refused))] {
            let site = Site::issuer("touch ran; cat answer");
            site.write("answer", r#"{"configuration":{"a":"b"}}"#);
            site.answers("gen25519", move |site, asked| {
                let times = site.actions().iter().filter(|action| *action == "gen25519").count();
                let nonce = if times <= answers { "another nonce" } else { asked.nonce() };
                vec![asked.reply(&key_answer(nonce))]
            });
            let report = site.provision();
            let asked: Vec<_> =
                site.asked().into_iter().filter(|asked| asked.action == "gen25519").collect();
            assert_eq!(asked.len(), 2);
            assert_ne!(asked[0].nonce(), asked[1].nonce());
            match outcome {
                None => {
                    assert!(matches!(report.outcome, Outcome::Provisioned { .. }), "{report:?}")
                }
                Some(outcome) => {
                    assert_eq!(report.outcome, outcome);
                    assert_eq!(
                        report.reason,
                        "could not fetch ed25519 public key: invalid nonce signature"
                    );
                    assert!(!site.has("ran"));
                }
            }
        }
    }

    #[test]
    fn what_we_sign_with_is_read_for_every_node_and_before_it_makes_a_key() {
        let site = Site::issuer("touch ran; cat answer");
        site.write("answer", r#"{"configuration":{"a":"b"}}"#);
        site.write("key", &"ab".repeat(32));
        let token = site.path("token").display().to_string();
        check(
            &site,
            Outcome::Misconfigured,
            &format!(
                "could not use jwt_signing_token {token}: the seed does not belong to the token: another public_key is in it"
            ),
        );
        std::fs::remove_file(site.path("key")).unwrap();
        check_start(&site, Outcome::Misconfigured, "could not read jwt_signing_key ");
        assert_eq!(site.actions(), ["inventory", "jwt", "inventory", "jwt"]);
        assert!(!site.has("ran"));

        site.write("key", testing::SIGNER_SEED);
        let report = site.provision();
        assert!(matches!(report.outcome, Outcome::Provisioned { .. }), "{report:?}");

        let mut site = Site::issuer("");
        Arc::get_mut(&mut site.context.config).unwrap().signing = None;
        check(&site, Outcome::Misconfigured, "no jwt signing key configured using jwt_signing_key");
    }

    #[test]
    fn claims_that_make_no_token_are_a_fault_of_the_helper() {
        for (claims, expected) in [
            (r#"{"exp":"soon"}"#, "cannot decode exp in server_claims of the helper: "),
            (
                r#"{"collectives":[" "]}"#,
                "collectives in server_claims of the helper names no collective",
            ),
        ] {
            let site = Site::issuer("cat answer");
            site.write(
                "answer",
                &format!(r#"{{"configuration":{{"a":"b"}},"server_claims":{claims}}}"#),
            );
            let expected = format!("configuration failed: {expected}");
            check_start(&site, Outcome::HelperFailed, &expected);
            assert_eq!(site.actions(), ["inventory", "jwt", "gen25519"]);
        }
    }

    #[test]
    fn leaves_out_the_steps_of_features_that_are_off() {
        let site = Site::new("", "cat >input; cat answer");
        site.write("answer", r#"{"configuration":{"a":"b"}}"#);
        let report = site.provision();
        assert!(matches!(report.outcome, Outcome::Provisioned { .. }), "{report:?}");
        assert_eq!(site.actions(), ["inventory", "configure", "restart"]);
        let steps: Vec<_> = report.steps.iter().map(|(name, _)| *name).collect();
        assert_eq!(steps, ["inventory", "helper", "configure", "restart"]);
        let input: Value = serde_json::from_str(&site.read("input")).unwrap();
        assert_eq!((&input["jwt"], &input["csr"]), (&Value::Null, &Value::Null));
    }

    #[test]
    fn asks_for_the_inventory_when_no_answer_is_held() {
        let site = Site::new(ALL_FEATURES, CONFIGURE);
        let probed = Probed { registration: None, inventory: None, ..site.probed(LONG) };
        site.memory.take_published();
        let report = provision(&site.context, probed, &mut Unhurried(never()));
        assert!(matches!(report.outcome, Outcome::Provisioned { .. }), "{report:?}");
        assert_eq!(site.actions(), ["jwt", "inventory", "gencsr", "configure", "restart"]);
    }

    #[test]
    fn a_refused_jwt_ends_the_attempt_before_anything_else_is_read() {
        let site = Site::new(ALL_FEATURES, CONFIGURE);
        site.answer("inventory", "no JSON at all");
        site.answer("jwt", &good("jwt", &json!({"jwt": "a.b", "ecdh_public": ""})));
        check(
            &site,
            Outcome::Refused,
            "could not validate JWT: n0.fleet.example.net: could not parse provisioner token: token is malformed: token contains an invalid number of segments",
        );
        assert_eq!(site.actions(), ["inventory", "jwt"]);
    }

    #[test]
    fn without_our_own_key_no_node_is_asked() {
        for (source, expected) in [
            (
                Some(VerifyKeySource::File("/no/such/key".into())),
                "could not read validation certificate: /no/such/key: No such file or directory (os error 2)",
            ),
            (
                Some(VerifyKeySource::File("Cargo.toml".into())),
                "could not use validation certificate Cargo.toml: could not parse ed25519 public data: invalid byte: '['",
            ),
            (
                Some(VerifyKeySource::Ed25519([2; 32])),
                "could not use jwt_verify_cert: invalid ed25519 public key",
            ),
            (None, "no JWT verification certificate configured, cannot validate JWT"),
        ] {
            let mut site = Site::new(ALL_FEATURES, CONFIGURE);
            Arc::get_mut(&mut site.context.config).unwrap().jwt_verify_cert = source;
            check(&site, Outcome::Misconfigured, expected);
            assert_eq!(site.actions(), ["inventory"]);
        }
    }

    #[test]
    fn a_key_file_that_was_replaced_counts_at_once() {
        let (rsa, hex) = (
            testing::recorded("insecure/jwt-signer.pem"),
            testing::recorded("issuer/issuer.public"),
        );
        let last = LastKey::default();
        let read = |content: &str| {
            let key = last.of(content.as_bytes(), || VerifyKey::from_file(content))?;
            Ok::<_, KeyError>(key.kind().clone())
        };
        for _ in 0..2 {
            assert!(matches!(read(&rsa), Ok(VerifyKind::Rsa(_))));
            assert!(matches!(read(&rsa), Ok(VerifyKind::Rsa(_))));
            assert!(matches!(read(&hex), Ok(VerifyKind::Ed25519(_))));
            // A broken one does not leave the one before in force.
            assert!(read(&hex[1..]).is_err());
        }
    }

    #[test]
    fn a_refused_csr_ends_the_attempt() {
        let site = Site::new(ALL_FEATURES, "touch ran");
        let other = json!({"csr": "no PEM", "public_key": "", "ssldir": ""});
        site.answer("gencsr", &good("gencsr", &other));
        check(&site, Outcome::Refused, "could not parse CSR: no PEM block found");
        assert!(!site.has("ran"));
    }

    #[test]
    fn every_refusal_by_the_node_has_its_outcome() {
        let none = "Cannot reconfigure a server that is not in provisioning mode";
        for (action, code, message, outcome, prefix) in [
            ("jwt", 1, "Could not obtain provisioning lock", Outcome::Busy, JWT_FAILED),
            ("jwt", 1, "Incorrect provision token supplied", Outcome::WrongToken, JWT_FAILED),
            ("gencsr", 1, none, Outcome::NotProvisioning, "could not fetch CSR"),
            ("gencsr", 1, "Could not create CSR: x", Outcome::Failed, "could not fetch CSR"),
            (
                "configure",
                1,
                "Could not obtain provisioning lock",
                Outcome::Busy,
                "configuration failed",
            ),
            ("configure", 4, "x", Outcome::Failed, "configuration failed"),
            ("restart", 2, "x", Outcome::Failed, "restart failed"),
        ] {
            let site = Site::new(ALL_FEATURES, CONFIGURE);
            site.answer(action, &refusal(action, code, message));
            let expected = format!("{prefix}: refused with status {code}: {message} (1 try)");
            check(&site, outcome, &expected);
            assert_eq!(site.actions().last().unwrap(), action);
        }
    }

    const JWT_FAILED: &str = "could not fetch and validate JWT: n0.fleet.example.net";

    #[test]
    fn an_unusable_answer_fails_the_attempt() {
        let site = Site::new(ALL_FEATURES, CONFIGURE);
        site.answer("gencsr", &good("gencsr", &json!({"csr": 1, "public_key": "", "ssldir": ""})));
        let report = site.provision();
        assert_eq!(report.outcome, Outcome::Failed);
        let expected = "could not fetch CSR: unusable answer, after 1 try";
        assert!(report.reason.starts_with(expected), "{}", report.reason);
    }

    #[test]
    fn a_node_nobody_hears_is_unreachable() {
        let site = Site::new(ALL_FEATURES, CONFIGURE);
        let probed = site.probed(LONG);
        site.memory.no_responders_for(SUBJECT);
        let report = provision(&site.context, probed, &mut Unhurried(never()));
        assert_eq!(report.outcome, Outcome::Unreachable);
        assert_eq!(
            report.reason,
            format!("{JWT_FAILED}: nobody listens on the node's subject, after 2 tries")
        );
    }

    #[test]
    fn a_node_whose_time_is_up_failed() {
        let site = Site::new(ALL_FEATURES, CONFIGURE);
        site.silence("jwt");
        let report = provision(
            &site.context,
            site.probed(Duration::from_millis(50)),
            &mut Unhurried(never()),
        );
        assert_eq!(report.outcome, Outcome::Failed);
        let expected = format!("{JWT_FAILED}: the node's time was up, after ");
        assert!(report.reason.starts_with(&expected), "{}", report.reason);
    }

    #[test]
    fn a_silent_node_whose_place_is_needed_failed_or_was_never_there() {
        for (action, outcome, what) in [
            ("inventory", Outcome::Unreachable, "could not retrieve inventory"),
            ("gencsr", Outcome::Failed, "could not fetch CSR"),
            ("configure", Outcome::Failed, "configuration failed"),
        ] {
            let site = Site::new("features: {pki: true}", CONFIGURE);
            let mut patience = site.gives_up_at(action);
            let probed = Probed {
                identity: identity(),
                term: site.context.gate.begin().unwrap(),
                registration: None,
                inventory: None,
                deadline: Instant::now() + LONG,
                upgrade: None,
                progress: Arc::default(),
            };
            let report = provision(&site.context, probed, &mut patience);
            assert_eq!(report.outcome, outcome, "{action}");
            let expected = format!("{what}: given up while the node was silent, after 1 try");
            assert_eq!(report.reason, expected);
        }
    }

    #[test]
    fn a_configured_node_that_is_given_up_before_it_answers_restart_is_provisioned() {
        let site = Site::new("", CONFIGURE);
        let mut patience = site.gives_up_at("restart");
        let report = provision(&site.context, site.probed(LONG), &mut patience);
        let Outcome::Provisioned { restarted_at: None, .. } = report.outcome else {
            panic!("{report:?}")
        };
    }

    #[test]
    fn a_helper_that_fails_or_answers_what_would_hurt_is_a_fault_of_ours() {
        for (script, expected) in [
            ("echo broken >&2; exit 3", "could not invoke configure helper: "),
            ("exit 0", "could not invoke configure helper: "),
            ("echo '{'", "could not invoke configure helper: cannot decode output from "),
            ("echo '{}'", "configuration failed: empty configuration"),
            (
                r#"printf '{"configuration":{"a":"b\\nc"}}'"#,
                r#"configuration failed: the value of setting "a" holds a line break"#,
            ),
            (
                r#"echo '{"configuration":{"plugin.choria.server.provision":"true"}}'"#,
                "configuration failed: plugin.choria.server.provision is true",
            ),
        ] {
            let site = Site::new(ALL_FEATURES, script);
            let report = site.provision();
            assert_eq!(report.outcome, Outcome::HelperFailed, "{script}: {}", report.reason);
            assert!(report.reason.starts_with(expected), "{script}: {}", report.reason);
            assert_eq!(site.actions(), ["inventory", "jwt", "gencsr"], "{script}");
        }
    }

    #[test]
    fn the_helper_may_defer_a_node_or_shut_it_down() {
        let site = Site::new(ALL_FEATURES, r#"echo '{"defer":true,"msg":"at night"}'"#);
        check(&site, Outcome::Deferred, "configuration defered: at night");
        assert_eq!(site.actions(), ["inventory", "jwt", "gencsr"]);

        for (answer, positive) in [
            (good("shutdown", &json!({"message": "bye"})), 1),
            (refusal("shutdown", 1, "no"), 0),
            (refusal("shutdown", 5, "no"), 0),
        ] {
            let site = Site::new("", r#"echo '{"shutdown":true,"msg":"old"}'"#);
            site.answer("shutdown", &answer);
            check(&site, Outcome::ShutDown, "");
            assert_eq!(site.actions(), ["inventory", "shutdown"]);
            assert_eq!(site.context.metrics.helper_shutdown_requests.get(), positive);
        }
    }

    #[test]
    fn a_node_that_is_gone_before_it_answers_shutdown_has_shut_down() {
        let site = Site::new("", r#"echo '{"shutdown":true,"msg":"old"}'"#);
        let probed = site.probed(LONG);
        site.memory.no_responders_for(SUBJECT);
        let report = provision(&site.context, probed, &mut Unhurried(never()));
        assert_eq!((report.outcome, report.reason.as_str()), (Outcome::ShutDown, ""));
        assert_eq!(site.actions(), ["inventory", "shutdown", "shutdown"]);
    }

    #[test]
    fn the_words_of_a_helper_are_kept_only_in_part() {
        let script = r#"printf '{"defer":true,"msg":"%05000d"}' 0"#;
        let report = Site::new("", script).provision();
        assert_eq!(report.outcome, Outcome::Deferred);
        assert_eq!(report.reason.len(), REASON_MAX + " ...".len());
    }

    #[test]
    fn a_private_key_of_the_helper_reaches_only_its_node_encrypted() {
        let node = PKey::generate_x25519().unwrap();
        let site = Site::new("features: {jwt: true}", "cat answer");
        let key = with_key(&site);
        let half = hex(&node.raw_public_key().unwrap());
        site.answer("jwt", &jwt_answer(&half));

        let (mut keys, mut halves) = (Vec::new(), Vec::new());
        for _ in 0..2 {
            let report = site.provision();
            assert!(matches!(report.outcome, Outcome::Provisioned { .. }), "{report:?}");
            let asked = site.asked();
            let configure = asked.iter().rfind(|asked| asked.action == "configure").unwrap();
            let body: Value = serde_json::from_str(&configure.body).unwrap();
            let text = |field: &str| body["data"][field].as_str().unwrap().to_owned();
            let opened = open(&node, &text("key"), &text("ecdh_public"));
            assert!(opened.public_eq(&key));
            assert_eq!(text("ssldir"), "/helper");
            keys.push(text("key"));
            halves.push(text("ecdh_public"));
        }
        // A pair of ours, and so a secret, serves one attempt only.
        assert_ne!(halves[0], halves[1]);
        assert_ne!(keys[0], keys[1]);
        let clear = key.private_key_to_pem_pkcs8().unwrap();
        let clear = std::str::from_utf8(&clear).unwrap().lines().nth(1).unwrap();
        assert!(site.asked().iter().all(|asked| !asked.body.contains(clear)));
    }

    #[test]
    fn a_node_without_a_half_of_the_exchange_gets_no_private_key() {
        for (half, expected) in [
            (
                "",
                "private key received from helper but server did not start Diffie-Hellman exchange: its jwt reply holds no ecdh_public",
            ),
            ("x", "the node's ecdh_public is not hex"),
            ("00", "the node's ecdh_public has 1 bytes instead of 32"),
            (
                &"00".repeat(32),
                "the node's ecdh_public is a low order point, which would make the secret public",
            ),
        ] {
            let site = Site::new("features: {jwt: true}", "cat answer");
            with_key(&site);
            site.answer("jwt", &jwt_answer(half));
            check(&site, Outcome::Refused, expected);
            assert_eq!(site.actions(), ["inventory", "jwt"]);
        }

        // Without the feature no node was asked to begin an exchange.
        let site = Site::new("", "cat answer");
        with_key(&site);
        check(
            &site,
            Outcome::HelperFailed,
            "configuration failed: private key received from helper but server did not start Diffie-Hellman exchange: turn on the feature jwt",
        );
        assert_eq!(site.actions(), ["inventory"]);
    }

    /// Has the helper give a key with its certificate.
    fn with_key(site: &Site) -> PKey<Private> {
        let validity = unix_time() - 10..unix_time() + 10_000;
        let (ca, key) = (Ca::new("CA", validity.clone()), certificates::key());
        let answer = json!({
            "configuration": {"plugin.choria.server.provision": "0"},
            "certificate": ca.issue(NODE, &key, validity),
            "ca": ca.pem(),
            "key": String::from_utf8(key.private_key_to_pem_pkcs8().unwrap()).unwrap(),
            "ssldir": "/helper",
        });
        site.write("answer", &answer.to_string());
        key
    }

    /// What the node does with an encrypted key and our half of the exchange.
    fn open(node: &PKey<Private>, key: &str, half: &str) -> PKey<Private> {
        let half: Vec<u8> = (0..half.len())
            .step_by(2)
            .map(|at| u8::from_str_radix(&half[at..at + 2], 16).unwrap())
            .collect();
        let ours = PKey::public_key_from_raw_bytes(&half, Id::X25519).unwrap();
        let mut deriver = Deriver::new(node).unwrap();
        deriver.set_peer(&ours).unwrap();
        let secret = deriver.derive_to_vec().unwrap();
        // OpenSSL goes by the label, nodes by the bytes.
        let key = key.replace("RSA PRIVATE KEY", "EC PRIVATE KEY");
        // A passphrase proper must not hold a NUL.
        PKey::private_key_from_pem_callback(key.as_bytes(), |passphrase| {
            passphrase[..secret.len()].copy_from_slice(&secret);
            Ok(secret.len())
        })
        .unwrap()
    }

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    const UPGRADES: &str =
        "features: {upgrades: true}\nupgrades_repository: https://repo.example.net";
    const OPTIONAL: &str = "features: {upgrades: true}\nupgrades_repository: https://repo.example.net\nupgrades_optional: true";
    /// The version that the recorded node reports.
    const VERSION: &str = "0.30.2";

    fn upgrade_to(version: &str) -> String {
        let settings = r#"{"plugin.choria.server.provision":"0"}"#;
        format!(r#"echo '{{"upgrade":"{version}","configuration":{settings}}}'"#)
    }

    #[test]
    fn another_version_is_sent_before_any_configuration() {
        for wish in ["0.31.0", "0.28.0"] {
            let site = Site::new(UPGRADES, &upgrade_to(wish));
            site.answer("inventory", &upgradable());
            let before = Instant::now();
            let report = site.provision();
            let Outcome::UpgradeSent { version, from, sent_at } = report.outcome else {
                panic!("{report:?}")
            };
            assert_eq!((version.as_str(), from.as_str()), (wish, VERSION));
            assert!(before <= sent_at && sent_at <= Instant::now());
            assert_eq!(report.reason, "");
            assert_eq!(site.actions(), ["inventory", "release_update"]);
            assert_eq!(
                site.asked()[1].body,
                format!(
                    r#"{{"agent":"choria_provision","action":"release_update","data":{{"repository":"https://repo.example.net","token":"s3cret","version":"{wish}"}}}}"#
                )
            );
            let steps: Vec<_> = report.steps.iter().map(|(name, _)| *name).collect();
            assert_eq!(steps, ["inventory", "helper", "release_update"]);
        }
    }

    #[test]
    fn a_node_that_has_the_version_wished_is_configured() {
        for settings in [UPGRADES, OPTIONAL] {
            let site = Site::new(settings, &upgrade_to(VERSION));
            site.answer("inventory", &upgradable());
            check_configured(&site);
        }
        // Without the feature a wish is only a warning.
        check_configured(&Site::new("", &upgrade_to("0.31.0")));
    }

    #[test]
    fn a_node_that_takes_no_upgrades_fails_or_is_configured_as_it_is() {
        let fixed = good("inventory", &json!({"version": VERSION, "upgradable": false}));
        let unknown = good("inventory", &json!({"version": "", "upgradable": true}));
        for (inventory, expected) in [
            (&fixed, "does not support upgrades"),
            (&unknown, "did not receive a version in inventory"),
        ] {
            let site = Site::new(UPGRADES, &upgrade_to("0.31.0"));
            site.answer("inventory", inventory);
            check(&site, Outcome::Failed, expected);
            assert_eq!(site.actions(), ["inventory"]);

            let site = Site::new(OPTIONAL, &upgrade_to("0.31.0"));
            site.answer("inventory", inventory);
            check_configured(&site);
        }
    }

    #[test]
    fn a_refused_update_is_not_repeated() {
        let words = "Update to version 0.31.0 failed, release rolled back: not found";
        let failed = refusal("release_update", 1, words);
        let no_use = good("release_update", &json!({"message": 1}));
        for answer in [&failed, &no_use] {
            let site = Site::new(UPGRADES, &upgrade_to("0.31.0"));
            site.answer("inventory", &upgradable());
            site.answer("release_update", answer);
            check_start(&site, Outcome::Failed, "update to 0.31.0 failed: ");
            assert_eq!(site.actions(), ["inventory", "release_update"]);

            let site = Site::new(OPTIONAL, &upgrade_to("0.31.0"));
            site.answer("inventory", &upgradable());
            site.answer("release_update", answer);
            let report = site.provision();
            assert!(matches!(report.outcome, Outcome::Provisioned { .. }), "{report:?}");
            assert_eq!(site.actions(), ["inventory", "release_update", "configure", "restart"]);
        }

        // These say something else than that there is no upgrade.
        for (words, outcome) in [
            ("Could not obtain provisioning lock", Outcome::Busy),
            ("Incorrect provision token supplied", Outcome::WrongToken),
            ("Cannot update a server that is not in provisioning mode", Outcome::NotProvisioning),
        ] {
            let site = Site::new(OPTIONAL, &upgrade_to("0.31.0"));
            site.answer("inventory", &upgradable());
            site.answer("release_update", &refusal("release_update", 1, words));
            check_start(&site, outcome, "update to 0.31.0 failed: ");
            assert_eq!(site.actions(), ["inventory", "release_update"]);
        }
    }

    #[test]
    fn an_update_that_nobody_answers_may_be_under_way() {
        for settings in [UPGRADES, OPTIONAL] {
            let site = Site::new(settings, &upgrade_to("0.31.0"));
            site.answer("inventory", &upgradable());
            let mut patience = site.gives_up_at("release_update");
            let report = provision(&site.context, site.probed(LONG), &mut patience);
            assert!(matches!(report.outcome, Outcome::UpgradeSent { .. }), "{report:?}");
            assert_eq!(site.actions(), ["inventory", "release_update"]);
        }

        let site = Site::new(UPGRADES, &upgrade_to("0.31.0"));
        site.answer("inventory", &upgradable());
        site.silence("release_update");
        let report = provision(&site.context, site.probed(HELPER_RUNS), &mut Unhurried(never()));
        assert!(matches!(report.outcome, Outcome::UpgradeSent { .. }), "{report:?}");
    }

    #[test]
    fn an_update_that_nobody_received_is_not_under_way() {
        for settings in [UPGRADES, OPTIONAL] {
            let site = Site::new(settings, &upgrade_to("0.31.0"));
            site.answer("inventory", &upgradable());
            let probed = site.probed(LONG);
            site.memory.no_responders_for(SUBJECT);
            let report = provision(&site.context, probed, &mut Unhurried(never()));
            assert_eq!(report.outcome, Outcome::Unreachable, "{report:?}");
            assert!(report.reason.starts_with("update to 0.31.0 failed: "), "{report:?}");
        }
    }

    #[test]
    fn an_update_that_changed_nothing_twice_is_not_sent_again() {
        let tried = |count| {
            (0..count)
                .fold(None, |before, _| Some(upgrade::Tries::after(before, "0.31.0", VERSION)))
        };
        let provision_after = |settings, count| {
            let site = Site::new(settings, &upgrade_to("0.31.0"));
            site.answer("inventory", &upgradable());
            let probed = Probed { upgrade: tried(count), ..site.probed(LONG) };
            (provision(&site.context, probed, &mut Unhurried(never())), site.actions())
        };
        let (report, _) = provision_after(UPGRADES, 1);
        assert!(matches!(report.outcome, Outcome::UpgradeSent { .. }), "{report:?}");
        let (report, actions) = provision_after(UPGRADES, 2);
        assert_eq!(report.outcome, Outcome::UpgradeStuck { version: "0.31.0".to_owned() });
        assert_eq!(
            report.reason,
            "update to 0.31.0 was sent before and the node still reports 0.30.2: \
             the helper must wish for the version exactly as the node will report it"
        );
        assert_eq!(actions, ["inventory"]);
        let (report, actions) = provision_after(OPTIONAL, 2);
        assert!(matches!(report.outcome, Outcome::Provisioned { .. }), "{report:?}");
        assert_eq!(actions, ["inventory", "configure", "restart"]);
    }

    #[track_caller]
    fn check_configured(site: &Site) {
        let report = site.provision();
        assert!(matches!(report.outcome, Outcome::Provisioned { .. }), "{report:?}");
        assert_eq!(site.actions(), ["inventory", "configure", "restart"]);
    }

    fn upgradable() -> String {
        good("inventory", &json!({"version": VERSION, "upgradable": true}))
    }

    #[test]
    fn a_second_answer_that_differs_keeps_the_helper_from_running() {
        let site = Site::new(ALL_FEATURES, "touch ran");
        site.answers("gencsr", |site, asked| {
            let first = site.asked().remove(0);
            assert_eq!(first.action, "inventory");
            let forged = good("inventory", &json!({"version": "6.6.6", "upgradable": true}));
            vec![asked.reply(&site.usual("gencsr")), first.reply(&forged)]
        });
        check(
            &site,
            Outcome::Refused,
            "two different answers to one request for rpcutil#inventory: another machine has this name, or somebody forges",
        );
        assert!(!site.has("ran"));
    }

    #[test]
    fn a_second_answer_while_the_helper_runs_keeps_the_node_from_being_configured() {
        for wait in ["0", "10s"] {
            let settings = format!("{ALL_FEATURES}\ncontradiction_wait: {wait}");
            let site = Site::new(&settings, &format!("cat go; {CONFIGURE}"));
            let made = std::process::Command::new("mkfifo").arg(site.path("go")).status().unwrap();
            assert!(made.success());
            let started = Instant::now();
            thread::scope(|scope| {
                scope.spawn(|| {
                    // Opens once the helper reads.
                    let mut go = File::options().write(true).open(site.path("go")).unwrap();
                    let asked = site.asked();
                    let jwt = asked.iter().find(|asked| asked.action == "jwt").unwrap();
                    site.memory.deliver_message(jwt.reply(&refusal("jwt", 1, "forged")));
                    go.write_all(b" ").unwrap();
                });
                check_start(
                    &site,
                    Outcome::Refused,
                    "two different answers to one request for choria_provision#jwt",
                );
            });
            assert_eq!(site.actions(), ["inventory", "jwt", "gencsr"]);
            // What is known already is not waited for.
            assert!(started.elapsed() < Duration::from_secs(10));
        }
    }

    #[test]
    fn waits_for_a_second_answer_as_long_as_the_site_wants() {
        let site = Site::new("contradiction_wait: 20ms", CONFIGURE);
        let report = site.provision();
        assert!(matches!(report.outcome, Outcome::Provisioned { .. }), "{report:?}");
        let waited = report.steps.iter().find(|(name, _)| *name == "contradiction_wait");
        assert!(waited.unwrap().1 >= Duration::from_millis(20));
        let names: Vec<_> = report.steps.iter().map(|(name, _)| *name).collect();
        assert_eq!(names, ["inventory", "helper", "contradiction_wait", "configure", "restart"]);
    }

    #[test]
    fn a_configured_node_that_is_gone_before_it_answers_restart_is_provisioned() {
        let site = Site::new("", CONFIGURE);
        site.answers("configure", |site, asked| {
            site.memory.no_responders_for(SUBJECT);
            vec![asked.reply(&site.usual("configure"))]
        });
        let report = site.provision();
        let Outcome::Provisioned { restarted_at: None, .. } = report.outcome else {
            panic!("{report:?}")
        };
        assert_eq!(report.reason, "");
        assert_eq!(site.actions(), ["inventory", "configure", "restart", "restart"]);
    }

    #[test]
    fn a_configured_node_is_restarted_though_its_time_is_up() {
        let site = Site::new("", CONFIGURE);
        let probed = site.probed(HELPER_RUNS);
        let deadline = probed.deadline;
        site.answers("configure", move |site, asked| {
            at(deadline).recv().unwrap();
            vec![asked.reply(&site.usual("configure"))]
        });
        let report = provision(&site.context, probed, &mut Unhurried(never()));
        let Outcome::Provisioned { restarted_at: Some(_), .. } = report.outcome else {
            panic!("{report:?}")
        };
        assert!(Instant::now() > deadline);
    }

    #[test]
    fn a_configuration_too_large_for_the_broker_fails_with_the_sizes() {
        let site = Site::new("", CONFIGURE);
        site.memory.set_max_payload(1_000);
        let report = site.provision();
        assert_eq!(report.outcome, Outcome::HelperFailed);
        let (_, sizes) = report.reason.split_once("configuration failed: ").unwrap();
        assert!(sizes.contains("and the broker takes 1000: shorten the configuration"), "{sizes}");
    }

    #[test]
    fn what_the_gate_stops_is_no_failure() {
        // The term ended.
        let site = Site::new("", "touch ran");
        let probed = site.probed(LONG);
        site.context.gate.end_term();
        let report = provision(&site.context, probed, &mut Unhurried(never()));
        assert_eq!(report.outcome, Outcome::Stopped(Closed::TermEnded));

        // The process aborts while the helper runs.
        let mut site = Site::new("", "echo started >go; cat go");
        let (keep, abort) = bounded(0);
        site.context.abort = abort;
        let made = std::process::Command::new("mkfifo").arg(site.path("go")).status().unwrap();
        assert!(made.success());
        thread::scope(|scope| {
            let go = site.path("go");
            scope.spawn(move || {
                let started = std::fs::read(go).unwrap();
                assert_eq!(started, b"started\n");
                drop(keep);
            });
            let report = site.provision();
            assert_eq!(report.outcome, Outcome::Stopped(Closed::Aborted), "{report:?}");
        });
    }

    /// Of a connection that is lost at one step and not made again while the node has time. Whoever is configured has all
    /// the time it needs.
    #[test]
    fn a_node_that_had_no_connection_for_all_its_time_is_not_to_blame_at_any_step() {
        let plain = || Site::new(ALL_FEATURES, CONFIGURE);
        let upgrading = || {
            let site = Site::new(UPGRADES, &upgrade_to("0.31.0"));
            site.answer("inventory", &upgradable());
            site
        };
        let asked: [(&str, &(dyn Fn() -> Site + Sync)); 6] = [
            ("jwt", &plain),
            ("gen25519", &|| Site::issuer(CONFIGURE)),
            ("gencsr", &plain),
            ("release_update", &upgrading),
            ("configure", &plain),
            ("restart", &plain),
        ];
        thread::scope(|scope| {
            for (action, site) in asked {
                scope.spawn(move || check_without_connection_at(action, &site()));
            }
        });
    }

    fn check_without_connection_at(action: &str, site: &Site) {
        let (lost, is_lost) = bounded(1);
        site.answers(action, move |site, asked| {
            // The second time there is a connection.
            if lost.try_send(()).is_err() {
                return vec![asked.reply(&site.usual(&asked.action))];
            }
            site.context_gate().close(Reason::Disconnected);
            Vec::new()
        });
        let probed = site.probed(HELPER_RUNS);
        let deadline = probed.deadline;
        let report = thread::scope(|scope| {
            scope.spawn(|| {
                at(deadline + SHORT_WHILE).recv().unwrap();
                site.context_gate().open(Reason::Disconnected);
            });
            provision(&site.context, probed, &mut Unhurried(never()))
        });
        assert_eq!(is_lost.len(), 1, "{action} was asked");
        let is_as_expected = match (action, &report.outcome) {
            ("restart", Outcome::Provisioned { .. }) => true,
            // It may have heard it, and be at it.
            ("release_update", Outcome::UpgradeSent { .. }) => true,
            ("restart" | "release_update", _) => false,
            (_, outcome) => *outcome == Outcome::Stopped(Closed::Deadline),
        };
        assert!(is_as_expected, "{action}: {report:?}");
        let times = site.actions().iter().filter(|asked| *asked == action).count();
        assert_eq!(times, if action == "restart" { 2 } else { 1 }, "{action}");
    }

    #[test]
    fn a_node_that_had_no_connection_since_its_helper_ran_is_not_to_blame() {
        let site = Site::new("", &format!("echo started >go; cat back; {CONFIGURE}"));
        for name in ["go", "back"] {
            let made = std::process::Command::new("mkfifo").arg(site.path(name)).status().unwrap();
            assert!(made.success());
        }
        let probed = site.probed(HELPER_RUNS);
        let report = thread::scope(|scope| {
            scope.spawn(|| {
                site.read("go");
                site.context_gate().close(Reason::Disconnected);
                site.write("back", "");
            });
            provision(&site.context, probed, &mut Unhurried(never()))
        });
        assert_eq!(report.outcome, Outcome::Stopped(Closed::Deadline), "{report:?}");
        assert_eq!(site.actions(), ["inventory"]);
    }

    #[test]
    fn what_the_broker_took_is_not_the_nodes_fault() {
        let gate = Gate::new();
        gate.open(Reason::Disconnected);
        let lost = rpc::Error::Lost { tries: 2 };
        let unreachable = rpc::Error::Unreachable { tries: 2 };
        let silent = rpc::Error::Silent { tries: 2 };
        let late = |last: &rpc::Error| rpc::Error::Deadline {
            tries: 3,
            last: Some(Box::new(last.clone())),
        };
        let stopped = Outcome::Stopped(Closed::Deadline);
        for (error, expected) in [
            (&lost, &stopped),
            (&late(&lost), &stopped),
            (&late(&unreachable), &Outcome::Unreachable),
            (&late(&silent), &Outcome::Failed),
        ] {
            assert_eq!(rpc_outcome(Action::Configure, error, &gate), *expected, "{error:?}");
        }
    }

    #[test]
    fn an_operators_pause_lets_a_running_node_finish() {
        let site = Site::new("", CONFIGURE);
        let probed = site.probed(LONG);
        site.context.gate.close(Reason::Operator);
        site.context.gate.close(Reason::Draining);
        let report = provision(&site.context, probed, &mut Unhurried(never()));
        assert!(matches!(report.outcome, Outcome::Provisioned { .. }), "{report:?}");
    }

    #[track_caller]
    fn check(site: &Site, outcome: Outcome, reason: &str) {
        let report = site.provision();
        assert_eq!((report.outcome, report.reason.as_str()), (outcome, reason));
    }

    #[track_caller]
    fn check_start(site: &Site, outcome: Outcome, reason: &str) {
        let report = site.provision();
        assert_eq!(report.outcome, outcome, "{}", report.reason);
        assert!(report.reason.starts_with(reason), "{}", report.reason);
    }

    /// A provisioner with one node, which answers as a real one does unless told otherwise.
    struct Site {
        context: Context,
        network: Network,
        directory: PathBuf,
        _abort: Sender<Never>,
    }

    impl Site {
        /// With `settings` beside the necessary ones, and a helper that runs `script` in its own directory.
        fn new(settings: &str, script: &str) -> Site {
            static LAST: AtomicU32 = AtomicU32::new(0);
            let number = LAST.fetch_add(1, Ordering::Relaxed);
            let name = format!("node-test-{}-{number}", std::process::id());
            let directory = std::env::temp_dir().join(name);
            std::fs::create_dir(&directory).unwrap();
            std::fs::write(directory.join("key"), testing::SIGNER_SEED).unwrap();
            std::fs::write(directory.join("token"), testing::SIGNER).unwrap();
            let settings = settings.replace("DIRECTORY", &directory.display().to_string());
            let helper = directory.join("helper");
            std::fs::write(&helper, format!("cd {}\n{script}\n", directory.display())).unwrap();

            let yaml = format!(
                "helper: /bin/sh {}\ntoken: s3cret\nsite: test\nchoria_insecure: true\n\
                 jwt_verify_cert: tests/vectors/captures/insecure/jwt-signer.pem\n{settings}\n",
                helper.display()
            );
            let mut findings = Findings::new("test");
            let config = Config::parse(yaml.as_bytes(), &mut findings);
            let config = config.unwrap_or_else(|| panic!("{findings:?}"));

            let memory = Memory::new();
            let metrics = Metrics::new("test");
            let sender = protocol::Sender {
                identity: Identity::parse("prov1.example.net").unwrap(),
                caller: "choria=prov1.example.net".to_owned(),
            };
            let codec = Codec::V1(v1::Codec::insecure(sender));
            let rpc =
                Rpc::start(memory.clone(), Lease::endless(), codec, "i1", 60, metrics.clone())
                    .unwrap();
            let limits = Limits { timeout: LONG, output_max: 1 << 20 };
            let helper = Helper::new(config.helper.clone(), limits, metrics.clone());
            let gate = Arc::new(Gate::new());
            gate.open(Reason::Disconnected);
            let (keep, abort) = bounded(0);

            let network = Network { memory, gate: gate.clone(), special: Arc::default() };
            network.listen();
            Site {
                context: Context {
                    rpc,
                    helper: Arc::new(helper),
                    gate,
                    metrics,
                    config: Arc::new(config),
                    last_key: Default::default(),
                    discovery_timeout: Duration::from_secs(2),
                    abort,
                },
                network,
                directory,
                _abort: keep,
            }
        }

        /// Of an organization whose nodes get a server JWT.
        fn issuer(script: &str) -> Site {
            let settings = "features: {ed25519: true}\n\
                jwt_signing_key: DIRECTORY/key\njwt_signing_token: DIRECTORY/token";
            Site::new(settings, script)
        }

        fn provision(&self) -> Report {
            provision(&self.context, self.probed(LONG), &mut Unhurried(never()))
        }

        /// What the prober would hand over.
        fn probed(&self, time: Duration) -> Probed {
            let (sink, arrivals) = bounded(1);
            let body = Inventory {}.body();
            let registration =
                self.context.rpc.send(&identity(), Action::Inventory, &body, &sink).unwrap();
            Probed {
                identity: identity(),
                term: self.context.gate.begin().unwrap(),
                registration: Some(registration),
                inventory: arrivals.try_recv().ok(),
                deadline: Instant::now() + time,
                upgrade: None,
                progress: Arc::default(),
            }
        }

        fn path(&self, name: &str) -> PathBuf {
            self.directory.join(name)
        }

        fn has(&self, name: &str) -> bool {
            self.path(name).exists()
        }

        fn read(&self, name: &str) -> String {
            std::fs::read_to_string(self.path(name)).unwrap()
        }

        fn write(&self, name: &str, content: &str) {
            std::fs::write(self.path(name), content).unwrap();
        }
    }

    impl std::ops::Deref for Site {
        type Target = Network;

        fn deref(&self) -> &Network {
            &self.network
        }
    }

    impl Drop for Site {
        fn drop(&mut self) {
            drop(std::fs::remove_dir_all(&self.directory));
        }
    }

    type Special = Arc<dyn Fn(&Network, &Asked) -> Vec<Message> + Send + Sync>;

    /// The broker, and the node behind it.
    #[derive(Clone)]
    struct Network {
        memory: Arc<Memory>,
        gate: Arc<Gate>,
        /// Answers by action, before the usual ones.
        special: Arc<Mutex<Vec<(String, Special)>>>,
    }

    impl Network {
        fn listen(&self) {
            // The memory must not own itself.
            let memory = Arc::downgrade(&self.memory);
            let (gate, special) = (self.gate.clone(), self.special.clone());
            self.memory.on_publish(move |published| {
                let Some(memory) = memory.upgrade() else { return Vec::new() };
                let network = Network { memory, gate: gate.clone(), special: special.clone() };
                let asked = Asked::read(published);
                let special =
                    special.lock().iter().find(|(action, _)| *action == asked.action).cloned();
                match special {
                    Some((_, answers)) => answers(&network, &asked),
                    None if asked.action == "gen25519" => {
                        vec![asked.reply(&key_answer(asked.nonce()))]
                    }
                    None => vec![asked.reply(&network.usual(&asked.action))],
                }
            });
        }

        fn answers(
            &self,
            action: &str,
            answers: impl Fn(&Network, &Asked) -> Vec<Message> + Send + Sync + 'static,
        ) {
            self.special.lock().push((action.to_owned(), Arc::new(answers)));
        }

        /// Whoever works on the node gives it up when it is asked this, which it does not answer.
        fn gives_up_at(&self, action: &str) -> Unhurried {
            let (keep, given_up) = bounded(0);
            let keep: Mutex<Option<Sender<Never>>> = Mutex::new(Some(keep));
            self.answers(action, move |_, _| {
                drop(keep.lock().take());
                Vec::new()
            });
            Unhurried(given_up)
        }

        fn answer(&self, action: &str, body: &str) {
            let body = body.to_owned();
            self.answers(action, move |_, asked| vec![asked.reply(&body)]);
        }

        fn silence(&self, action: &str) {
            self.answers(action, |_, _| Vec::new());
        }

        fn context_gate(&self) -> &Gate {
            &self.gate
        }

        fn asked(&self) -> Vec<Asked> {
            self.memory.published().iter().map(Asked::read).collect()
        }

        fn actions(&self) -> Vec<String> {
            self.asked().into_iter().map(|asked| asked.action).collect()
        }

        /// What the node says to `action` when all is well.
        fn usual(&self, action: &str) -> String {
            let input = recorded_input();
            let data = match action {
                "inventory" => {
                    let inventory = input["inventory"].as_str().unwrap();
                    serde_json::from_str(inventory).unwrap()
                }
                "jwt" => return jwt_answer(""),
                "gencsr" => input["csr"].clone(),
                _ => json!({"message": "as you wish"}),
            };
            good(action, &data)
        }
    }

    /// A request as the node sees it.
    #[derive(Debug, Clone)]
    struct Asked {
        reply_to: String,
        id: String,
        action: String,
        body: String,
    }

    impl Asked {
        fn read(published: &Published) -> Asked {
            let transport: Value = serde_json::from_slice(&published.payload).unwrap();
            let secure = STANDARD.decode(transport["data"].as_str().unwrap()).unwrap();
            let secure: Value = serde_json::from_slice(&secure).unwrap();
            let request: Value = serde_json::from_str(secure["message"].as_str().unwrap()).unwrap();
            let text = |value: &Value| value.as_str().unwrap().to_owned();
            let body = text(&request["message"]);
            Asked {
                reply_to: text(&transport["headers"]["reply-to"]),
                id: text(&request["envelope"]["requestid"]),
                action: text(&serde_json::from_str::<Value>(&body).unwrap()["action"]),
                body,
            }
        }

        /// What the node is to sign.
        fn nonce(&self) -> &str {
            self.body.split(r#""nonce":""#).nth(1).unwrap().split('"').next().unwrap()
        }

        /// The node's reply with `body`.
        fn reply(&self, body: &str) -> Message {
            let envelope = json!({"requestid": self.id, "senderid": NODE, "agent": "x", "time": 1});
            let reply =
                json!({"protocol": "choria:reply:1", "message": body, "envelope": envelope});
            let reply = reply.to_string();
            let hash = STANDARD.encode(sha256(reply.as_bytes()));
            let secure =
                json!({"protocol": "choria:secure:reply:1", "message": reply, "hash": hash});
            let transport = json!({
                "protocol": "choria:transport:1",
                "data": STANDARD.encode(secure.to_string()),
                "headers": {"mc_sender": NODE},
            });
            Message {
                subject: self.reply_to.clone(),
                payload: transport.to_string().into_bytes(),
                ..Message::default()
            }
        }
    }

    fn identity() -> Identity {
        Identity::parse(NODE).unwrap()
    }

    fn jwt_answer(ecdh_public: &str) -> String {
        // The recorded one has a date, and we have a clock.
        let claims = r#"{"cht":"s3cret","chpd":true,"purpose":"choria_provisioning"}"#;
        let jwt = testing::rsa(r#"{"alg":"RS256"}"#, claims);
        good("jwt", &json!({"jwt": jwt, "ecdh_public": ecdh_public}))
    }

    /// The node's key, and its signature over `nonce`.
    fn key_answer(nonce: &str) -> String {
        let key = testing::node();
        let data = json!({
            "public_key": hex(key.verifying_key().as_bytes()),
            "directory": "/etc/choria",
            "signature": hex(&key.sign(nonce.as_bytes()).to_bytes()),
        });
        good("gen25519", &data)
    }

    fn good(action: &str, data: &Value) -> String {
        json!({"action": action, "statuscode": 0, "statusmsg": "OK", "data": data}).to_string()
    }

    fn refusal(action: &str, code: u8, message: &str) -> String {
        json!({"action": action, "statuscode": code, "statusmsg": message, "data": {}}).to_string()
    }

    fn recorded_input() -> Value {
        serde_json::from_str(&testing::recorded("insecure/helper-input.json")).unwrap()
    }

    /// The body of the `configure` request that the original sent.
    fn recorded_configure() -> String {
        let messages = testing::recorded("insecure/messages.jsonl");
        let published = messages.lines().map(|line| {
            let message: Value = serde_json::from_str(line).unwrap();
            let payload = message["payload"].as_str().unwrap().as_bytes().to_vec();
            let subject = message["subject"].as_str().unwrap().to_owned();
            Published { subject, reply: None, headers: Vec::new(), payload }
        });
        let mut requests = published.filter(|message| message.subject == SUBJECT);
        let configure = requests.find_map(|published| {
            let asked = Asked::read(&published);
            (asked.action == "configure").then_some(asked)
        });
        configure.unwrap().body
    }
}
