//! Every step for one node, in order, on one screen.
//!
//! What a step needs from the one before, and when a node or an answer is refused, is in [`step`]; tries, pauses and which answer counts
//! are `rpc`'s. What an outcome means for the node's future is the registry's.

pub mod step;

use std::fmt;
use std::fs::File;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crossbeam_channel::Receiver;

use crate::config::{Config, Enrollment, VerifyKeySource};
use crate::gate::{Closed, Gate, Reason, Term};
use crate::helper::{self, Answer, CsrInput, Helper};
use crate::jwt::{KeyError, VerifyKey};
use crate::metrics::Metrics;
use crate::protocol::Identity;
use crate::rpc::actions::{Configure, GenCsr, Inventory, Jwt, Restart, Shutdown};
use crate::rpc::{
    self, Action, Arrival, Attempt, Call, Checked, Contradiction, Patience, Registration, Rpc,
    SendError,
};
use crate::shutdown::Never;
use crate::transport::PublishError;

use self::step::{BadAnswer, Decision, Described, Plan, Ready, Refusal, Verified};

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
    /// What each request is given for the way, beside the time the node may take.
    pub discovery_timeout: Duration,
    /// Disconnects when everything must end.
    pub abort: Receiver<Never>,
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
}

/// Makes one attempt to provision a node. Blocks until there is an outcome.
pub fn provision(context: &Context, node: Probed, patience: &mut dyn Patience) -> Report {
    let Probed { identity, term, registration, inventory, deadline } = node;
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

    let mut node =
        Node { context, identity: &identity, term, deadline, attempt, steps: Vec::new() };
    let result = node.provision();
    let steps = node.steps;
    match result {
        Ok(outcome) => Report { outcome, reason: String::new(), steps },
        Err(error) => {
            Report { outcome: error.outcome(&context.gate), reason: reason(&error), steps }
        }
    }
}

/// A node in hand.
struct Node<'a> {
    context: &'a Context,
    identity: &'a Identity,
    term: Term,
    deadline: Instant,
    attempt: Attempt<'a>,
    steps: Vec<(&'static str, Duration)>,
}

impl Node<'_> {
    fn provision(&mut self) -> Result<Outcome, Error> {
        let features = self.context.config.features;
        let verified = match features.jwt {
            true => self.step("jwt", Node::verify)?,
            false => Verified::unasked(self.identity.clone()),
        };
        let described = self.step("inventory", |node| node.describe(verified))?;
        let ready = match features.enrollment {
            Enrollment::Off => described.without_csr(),
            Enrollment::Pki => self.step("gencsr", |node| node.enroll(described))?,
            Enrollment::OrganizationIssuer => return Err(Error::NoIssuer),
        };
        let answer = self.step("helper", |node| node.ask_helper(&ready))?;
        let plan = match ready.decide(answer, &mut |warning| self.warn(&warning))? {
            Decision::Configure(plan) => plan,
            Decision::Defer { reason } => return Err(Error::Deferred { reason }),
            Decision::ShutDown { reason } => {
                self.step("shutdown", |node| node.shut_down(&reason))?;
                return Ok(Outcome::ShutDown);
            }
        };
        self.hear_contradictions()?;
        let configured_at = self.step("configure", |node| node.configure(&plan))?;
        let restarted_at = self.step("restart", Node::restart)?;
        Ok(Outcome::Provisioned { configured_at, restarted_at })
    }

    /// Asks for the provisioning JWT and checks it. Our own key is read first: without it the node need not be asked.
    fn verify(&mut self) -> Result<Verified, Error> {
        let Context { config, .. } = self.context;
        let key = verify_key(config.jwt_verify_cert.as_ref())?;
        let reply = self.call(Jwt { token: config.token.expose() })?;
        let verified = Verified::by_jwt(self.identity.clone(), &reply.jwt, &key, unix_time())?;
        if let Some(token) = verified.token() {
            let (node, jwt_id) = (self.identity.as_str(), token.id());
            log::debug!(component = node, node, jwt_id; "Verified the provisioning JWT of {node}");
        }
        Ok(verified)
    }

    /// Reads the inventory the prober holds, or asks for it again. Only now: a stranger's JSON is not parsed.
    fn describe(&mut self, verified: Verified) -> Result<Described, Error> {
        let reply = self.call(Inventory {})?;
        Ok(verified.described(reply.data))
    }

    /// Asks for a certificate request and checks it.
    fn enroll(&mut self, described: Described) -> Result<Ready, Error> {
        let Context { config, .. } = self.context;
        let (cn, token) = (self.identity.as_str(), config.token.expose());
        let sent = self.call(GenCsr { cn, token })?;
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
        let input = helper::Input {
            identity: self.identity,
            csr,
            ed25519: None,
            inventory: ready.inventory(),
            jwt: ready.claims(),
        };
        self.context.helper.run(&input, self.deadline, &self.context.abort).map_err(Error::Helper)
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
            Err(error) => Err(error),
        }
    }

    /// Sends the configuration; returns when that was answered.
    fn configure(&mut self, plan: &Plan) -> Result<Instant, Error> {
        let config = serde_json::to_string(&plan.configuration)
            .expect("an object of texts can be written as JSON");
        let reply = self.call(Configure {
            action_policies: &plan.action_policies,
            ca: &plan.ca,
            certificate: &plan.certificate,
            config: &config,
            ecdh_public: "",
            key: "",
            opa_policies: &plan.opa_policies,
            server_jwt: "",
            ssldir: &plan.ssldir,
            token: self.context.config.token.expose(),
        })?;
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
        let wait = self.context.config.contradiction_wait;
        if !wait.is_zero() {
            self.step("contradiction_wait", |node| {
                let listened = node.attempt.listen(wait);
                listened.map_err(|source| Error::Rpc {
                    action: Action::Configure,
                    node: node.identity.clone(),
                    source,
                })
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
            .map_err(|source| Error::Rpc { action: C::ACTION, node: self.identity.clone(), source })
    }

    /// Takes one step and notes how long it took.
    fn step<T>(&mut self, name: &'static str, step: impl FnOnce(&mut Self) -> T) -> T {
        let started = Instant::now();
        let result = step(self);
        let took = started.elapsed();
        let seconds = self.context.metrics.step_duration_seconds.with_label_values(&[name]);
        seconds.observe(took.as_secs_f64());
        self.steps.push((name, took));
        result
    }

    fn warn(&self, warning: &dyn fmt::Display) {
        let node = self.identity.as_str();
        log::warn!(component = node, node; "{warning}");
    }
}

/// Upper bound of the random wait before a node restarts: it waits exactly 2 s with this, as with the original.
const RESTART_SPLAY_SECS: u32 = 1;

/// Whether nobody answered because node or broker were gone.
fn is_gone(error: &rpc::Error) -> bool {
    match error {
        rpc::Error::Unreachable { .. }
        | rpc::Error::Silent { .. }
        | rpc::Error::GivenUp { .. }
        | rpc::Error::Deadline { .. }
        | rpc::Error::Send(SendError(PublishError::Disconnected | PublishError::Closed)) => true,
        rpc::Error::Contradicted(_)
        | rpc::Error::Stopped(_)
        | rpc::Error::Refused { .. }
        | rpc::Error::BadReply { .. }
        | rpc::Error::Send(SendError(PublishError::TooLarge { .. } | PublishError::BadHeader)) => {
            false
        }
    }
}

/// The key for provisioning JWTs; files are read for every node, so that they can be replaced.
fn verify_key(source: Option<&VerifyKeySource>) -> Result<VerifyKey, Error> {
    match source {
        None => Err(Error::NoVerifyKey),
        Some(VerifyKeySource::Ed25519(bytes)) => {
            VerifyKey::from_ed25519(bytes).map_err(|source| Error::VerifyKey { path: None, source })
        }
        Some(VerifyKeySource::File(path)) => {
            let content = read_file(path)
                .map_err(|source| Error::VerifyKeyFile { path: path.clone(), source })?;
            VerifyKey::from_file(&content)
                .map_err(|source| Error::VerifyKey { path: Some(path.clone()), source })
        }
    }
}

/// Largest key file, in bytes; a chain of certificates stays well below.
const KEY_FILE_MAX: u64 = 64 * 1024;

fn read_file(path: &Path) -> io::Result<String> {
    let mut content = String::new();
    File::open(path)?.take(KEY_FILE_MAX).read_to_string(&mut content)?;
    Ok(content)
}

/// Seconds since 1970.
fn unix_time() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_secs()).unwrap_or(i64::MAX)
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
    /// The helper wants the node later.
    Deferred { reason: String },
    /// There is no key for provisioning JWTs.
    NoVerifyKey,
    /// The file with the key for provisioning JWTs is not readable.
    VerifyKeyFile { path: PathBuf, source: io::Error },
    /// The key for provisioning JWTs is none.
    VerifyKey { path: Option<PathBuf>, source: KeyError },
    /// The node needs a server JWT, which nothing here makes.
    NoIssuer,
}

impl Error {
    /// What became of the node. An attempt that ended for want of a connection says nothing about it.
    fn outcome(&self, gate: &Gate) -> Outcome {
        match self {
            Error::Rpc { action, source, .. } => rpc_outcome(*action, source, gate),
            Error::Refused(_) | Error::Contradicted(_) => Outcome::Refused,
            Error::Stopped(closed) => Outcome::Stopped(*closed),
            Error::Helper(error) if error.is_aborted() => Outcome::Stopped(Closed::Aborted),
            Error::Helper(_) | Error::BadAnswer(_) => Outcome::HelperFailed,
            Error::Deferred { .. } => Outcome::Deferred,
            Error::TimeUp
            | Error::NoVerifyKey
            | Error::VerifyKeyFile { .. }
            | Error::VerifyKey { .. }
            | Error::NoIssuer => Outcome::Failed,
        }
    }
}

fn rpc_outcome(action: Action, error: &rpc::Error, gate: &Gate) -> Outcome {
    match error {
        rpc::Error::Contradicted(_) => Outcome::Refused,
        rpc::Error::Stopped(closed) => Outcome::Stopped(*closed),
        rpc::Error::Unreachable { .. } => Outcome::Unreachable,
        rpc::Error::Deadline { .. } if gate.reasons().contains(&Reason::Disconnected) => {
            Outcome::Stopped(Closed::Deadline)
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
            PublishError::Disconnected => Outcome::Stopped(Closed::Deadline),
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
            Error::NoIssuer => f.write_str("server JWTs are not supported by this version yet"),
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Error::Rpc { source, .. } => Some(source),
            Error::Refused(refusal) => refusal.source(),
            Error::Helper(source) => Some(source),
            Error::BadAnswer(source) => Some(source),
            Error::VerifyKeyFile { source, .. } => Some(source),
            Error::VerifyKey { source, .. } => Some(source),
            Error::Contradicted(_)
            | Error::Stopped(_)
            | Error::TimeUp
            | Error::Deferred { .. }
            | Error::NoVerifyKey
            | Error::NoIssuer => None,
        }
    }
}

/// Longest reason kept, in characters: a helper's words may have megabytes, and the registry keeps one reason for every node.
const REASON_MAX: usize = 1_000;

/// An error and all its causes, for people.
fn reason(error: &Error) -> String {
    let mut text = error.to_string();
    let mut next = std::error::Error::source(error);
    while let Some(cause) = next {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        next = cause.source();
    }
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
}
