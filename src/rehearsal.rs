//! `try`: what would be done to one node, without doing it.
//!
//! The node is asked for its inventory and its provisioning JWT, verified, and the helper is run for it, by the very steps of an attempt
//! ([`node::rehearse`]), after a probe as the daemon makes it. What would be sent then is shown instead, without its secrets. `jwt` takes the node's lock for us, as the
//! daemon's own request does, and begins another key exchange; so a node that the daemon here is at work on is left alone, and so is one
//! that it has just served. Whoever waits is told what for.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fmt;
use std::io::ErrorKind;
use std::iter;
use std::sync::Arc;
use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD_NO_PAD, URL_SAFE_NO_PAD};
use crossbeam_channel::{Receiver, at, bounded, select_biased};
use openssl::pkey::PKey;
use serde::Serialize;
use serde_json::{Map, Value};

use crate::config::security::Problem;
use crate::config::{AdminSocket, Config, Settings};
use crate::errors::chain;
use crate::fleet::prober::{GONE, SILENT};
use crate::gate::{Gate, Reason};
use crate::keychain::Keychain;
use crate::metrics::Metrics;
use crate::node::{self, Context, Intended, Intent, Listener, Probed, Progress, Rehearsal};
use crate::ops::client;
use crate::ops::command::Command;
use crate::ops::socket;
use crate::ops::status::{Known, Listed, Outcome, Which};
use crate::ops::text::{Count, Plain, Span};
use crate::protocol::{Identity, RequestId};
use crate::rpc::actions::{Action, Call as _, Inventory};
use crate::rpc::{self, Arrival, Registration, Rpc, RpcError};
use crate::shutdown::Never;
use crate::transport::errors::BrokerError;
use crate::transport::visit::{Call, Visit};

/// What everything but the helper may take, if nobody says otherwise: more than a node needs that answers, and less than anybody waits
/// for one that does not.
const BESIDE_HELPER: Duration = Duration::from_secs(20);

/// How often a node is asked that says nothing, as by the daemon.
const PROBES: u32 = 2;

/// Answers that wait to be read; each of them is read at once.
const ARRIVALS_MAX: usize = 16;

/// How long it may take until a broker has let us in.
const CONNECT_MAX: Duration = Duration::from_secs(30);

/// What stands for a secret.
const HIDDEN: &str = "***";

/// Shorter texts are no secrets that could be recognised.
const SECRET_LEN_MIN: usize = 4;

/// What was found out.
#[derive(Debug, Serialize)]
pub struct Shown {
    /// The node.
    pub node: String,
    /// What would be done to it.
    pub would: Would,
    /// Why, in the helper's words; or why it would fail.
    pub reason: String,
    /// What the daemon of this machine has to do with it, following on "the daemon"; empty if there is none.
    pub daemon: String,
    /// What is strange, and what stood for something else.
    pub remarks: Vec<String>,
    /// How long each step took, in milliseconds.
    pub steps: BTreeMap<&'static str, u64>,
    /// What would be sent, without secrets.
    pub requests: Vec<Request>,
}

/// What would be done to a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Would {
    /// It would be configured and restarted.
    Configure,
    /// It would become another version first.
    Upgrade,
    /// It would be shut down.
    ShutDown,
    /// It would be left alone for now.
    Defer,
    /// The attempt would fail.
    Fail,
    /// Nobody knows: the node was not asked.
    Unknown,
}

/// One request that would be sent.
#[derive(Debug, Serialize)]
pub struct Request {
    /// What it asks for.
    pub action: &'static str,
    /// With what; texts that hold JSON are shown as what they hold.
    pub data: Value,
}

/// Why nothing could be found out.
#[derive(Debug)]
pub enum Failed {
    /// One of our keys can't be read or used.
    Keys(Problem),
    /// No broker lets us in: what each has against us.
    NoBroker(Vec<BrokerError>),
    /// The subject of replies can't be made.
    Rpc(rpc::StartError),
    /// The daemon here is at work on it, at this step.
    AtWork(String),
    /// The daemon here has just served it.
    Served(String),
    /// The daemon here is there and does not say whether it is.
    Unsaid(client::Error),
}

impl fmt::Display for Failed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Failed::Keys(_) => f.write_str("could not use our keys"),
            Failed::NoBroker(errors) => {
                let texts: Vec<&str> = errors.iter().map(|error| error.text.as_str()).collect();
                f.write_str(&texts.join("; "))
            }
            Failed::Rpc(_) => f.write_str("could not subscribe to replies"),
            Failed::AtWork(at) => write!(
                f,
                "the daemon is at work on it{}, and would be disturbed: try again in a moment",
                Plain(at)
            ),
            Failed::Served(what) => {
                write!(f, "there is nothing to try: the daemon {}", Plain(what))
            }
            Failed::Unsaid(_) => f.write_str(
                "the daemon may be at work on it, and would be disturbed: try again in a moment",
            ),
        }
    }
}

impl std::error::Error for Failed {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Failed::Keys(source) => Some(source),
            Failed::Rpc(source) => Some(source),
            Failed::Unsaid(source) => Some(source),
            Failed::NoBroker(_) | Failed::AtWork(_) | Failed::Served(_) => None,
        }
    }
}

/// How whoever waits is told what is being done.
pub type Tell = fn(fmt::Arguments<'_>);

/// Begins to find out what would be done to `node`: asks the daemon of this machine, if there is one, what it knows of it.
/// `timeout` is for all of it, beginning now.
///
/// # Errors
///
/// [`Failed`], if the daemon has the node in hand, has just served it, or doesn't say.
pub fn begin(
    node: &Identity,
    settings: Settings,
    timeout: Option<Duration>,
    tell: Tell,
) -> Result<Begun, Failed> {
    let timeout = timeout.unwrap_or(settings.config.helper_timeout + BESIDE_HELPER);
    let deadline = Instant::now() + timeout;
    let daemon = ask_the_daemon(&settings.config.admin_socket, node, timeout, tell)?;
    Ok(Begun { node: node.clone(), settings, timeout, deadline, daemon, tell })
}

/// A node that may be asked.
pub struct Begun {
    node: Identity,
    settings: Settings,
    timeout: Duration,
    deadline: Instant,
    daemon: Daemon,
    tell: Tell,
}

impl Begun {
    /// Finds out what would be done to it; at most until the time is up, or `abort` disconnects.
    ///
    /// # Errors
    ///
    /// [`Failed`], before the node was asked for anything.
    pub fn run(self, abort: &Receiver<Never>) -> Result<Shown, Failed> {
        let Begun { node, settings, timeout, deadline, daemon, tell } = self;
        let Settings { config, choria, .. } = settings;
        let (keychain, codec) = Keychain::open(&choria).map_err(Failed::Keys)?;
        let servers = choria.brokers.now().found;
        let patience = left(deadline).min(CONNECT_MAX);
        let list: Vec<String> = servers.iter().map(ToString::to_string).collect();
        let list = list.join(", ");
        tell(format_args!("connecting to {} ({} at most)", Plain(&list), Span::of(patience)));
        let visit = Visit::begin(Call {
            servers,
            name: &format!("{}-try", choria.connection_name),
            credentials: Box::new(move || keychain.credentials()),
            connect_timeout: choria.connect_timeout,
            patience,
            abort,
        })
        .map_err(Failed::NoBroker)?;
        let metrics = Metrics::new(&config.site);
        let gate = Arc::new(Gate::new());
        gate.open(Reason::Disconnected);
        // Nobody leads here: what is asked concerns no other provisioner.
        let term = gate.begin().expect("there is no reason left not to");
        // A reply subject of its own: the daemon doesn't hear what we are answered.
        let instance = RequestId::random();
        let rpc = Rpc::start(
            visit.connection.clone(),
            gate.lease(),
            codec,
            instance.as_str(),
            choria.ttl_secs,
            metrics.clone(),
        )
        .map_err(Failed::Rpc)?;
        let probe =
            Probe { rpc: &rpc, node: &node, timeout: config.probe_timeout, deadline, abort };
        let (registration, inventory) = match probe.run(tell) {
            Ok(answered) => answered,
            Err(reason) => {
                let mut remarks = daemon.remarks;
                remarks.extend(hint(reason, choria.ttl_secs));
                remarks.extend(time_is_up(timeout, deadline, &config));
                let (intent, steps) = (Err(reason.to_owned()), Vec::new());
                let rehearsal = Rehearsal { intent, steps, remarks };
                return Ok(Shown::new(&node, daemon.text, rehearsal, &Secrets::of(&config)));
            }
        };
        let helper = Arc::new(node::helper(&config, &metrics));
        let context = Context {
            rpc,
            helper: helper.clone(),
            gate,
            metrics,
            config: Arc::new(config),
            last_key: Default::default(),
            last_pair: Default::default(),
            discovery_timeout: choria.discovery_timeout,
            abort: abort.clone(),
        };
        let probed = Probed {
            identity: node.clone(),
            term,
            registration: Some(registration),
            inventory: Some(inventory),
            deadline,
            upgrade: None,
            progress: Arc::new(Progress::told_to(teller(&context.config, deadline, tell))),
        };
        let mut rehearsal = node::rehearse(&context, probed);
        rehearsal.remarks.extend(daemon.remarks);
        if rehearsal.intent.is_err() {
            rehearsal.remarks.extend(time_is_up(timeout, deadline, &context.config));
        }
        helper.stop(abort);
        Ok(Shown::new(&node, daemon.text, rehearsal, &Secrets::of(&context.config)))
    }
}

/// Where to look for the cause of what the probe found.
fn hint(reason: &str, ttl_secs: u32) -> Option<String> {
    match reason {
        GONE => Some(
            "No node of this name waits to be provisioned: it is off, was provisioned already, or has another name"
                .to_owned(),
        ),
        SILENT => Some(format!(
            "Somebody listens on its subject and says nothing: it hangs, or its clock and ours are {} or more apart",
            Span(ttl_secs.into())
        )),
        _ => None,
    }
}

/// That nobody knows what would have come of it later, if that is so.
fn time_is_up(timeout: Duration, deadline: Instant, config: &Config) -> Option<String> {
    left(deadline).is_zero().then(|| {
        format!(
            "That was all the time there was, {}: --timeout gives it more, and the daemon gives a node {}",
            Span::of(timeout),
            Span::of(config.node_timeout)
        )
    })
}

/// Says what each step waits for.
fn teller(config: &Config, deadline: Instant, tell: Tell) -> Listener {
    let (helper, helper_timeout) = (config.helper.as_str().to_owned(), config.helper_timeout);
    Box::new(move |step| {
        let left = left(deadline);
        match step {
            "jwt" => tell(format_args!(
                "asking it for its provisioning JWT ({} at most)",
                Span::of(left)
            )),
            "helper" => tell(format_args!(
                "running the helper {} ({} at most)",
                Plain(&helper),
                Span::of(left.min(helper_timeout))
            )),
            // They wait for nobody: the inventory is there, and a key of ours stands for the node's.
            _ => {}
        }
    })
}

/// The first request, as the daemon's prober makes it: a node that is gone or silent costs little time.
struct Probe<'a> {
    rpc: &'a Arc<Rpc>,
    node: &'a Identity,
    timeout: Duration,
    deadline: Instant,
    abort: &'a Receiver<Never>,
}

impl Probe<'_> {
    /// The answer and the request it is for; or why the node is unreachable.
    fn run(self, tell: Tell) -> Result<(Registration, Arrival), &'static str> {
        let Probe { rpc, node, timeout, deadline, abort } = self;
        let time = left(deadline).min(timeout * PROBES);
        tell(format_args!("asking {node} for its inventory ({} at most)", Span::of(time)));
        let (sink, arrivals) = bounded(ARRIVALS_MAX);
        let mut asked: Vec<Registration> = Vec::new();
        for _ in 0..PROBES {
            let sent = rpc.send(node, Action::Inventory, &Inventory {}.body(), &sink);
            asked.push(sent.map_err(|_| "the inventory request could not be sent")?);
            let until = deadline.min(Instant::now() + timeout);
            loop {
                let arrival = select_biased! {
                    recv(abort) -> _ => return Err("interrupted"),
                    recv(arrivals) -> arrival => arrival.expect("we hold a sender ourselves"),
                    recv(at(until)) -> _ => break,
                };
                match rpc.read(node, Action::Inventory, &arrival) {
                    Err(RpcError::NoResponders) => return Err(GONE),
                    // Somebody else said it.
                    Err(RpcError::Unexpected(_)) => {}
                    Ok(_) | Err(RpcError::BadReply(_)) => {
                        let position = asked.iter().position(|sent| sent.id() == arrival.id);
                        let Some(position) = position else { continue };
                        return Ok((asked.swap_remove(position), arrival));
                    }
                }
            }
        }
        Err(SILENT)
    }
}

fn left(deadline: Instant) -> Duration {
    deadline.saturating_duration_since(Instant::now())
}

/// What the daemon of this machine says of a node that may be asked.
#[derive(Default)]
struct Daemon {
    /// For people; empty if there is none.
    text: String,
    /// What is to be remembered with the result.
    remarks: Vec<String>,
}

/// Fails if the daemon of this machine, if there is one, has the node in hand, has just served it, or doesn't say.
fn ask_the_daemon(
    socket: &AdminSocket,
    node: &Identity,
    timeout: Duration,
    tell: Tell,
) -> Result<Daemon, Failed> {
    let Some(path) = socket::path_of(socket) else { return Ok(Daemon::default()) };
    let command = Command::Node { node: node.to_string() };
    let answer = match client::ask_within(timeout.min(client::PATIENCE), path, &command, true) {
        Ok(answer) => answer,
        Err(client::Error::Unreachable { source, .. })
            if matches!(source.kind(), ErrorKind::NotFound | ErrorKind::ConnectionRefused) =>
        {
            return Ok(Daemon::default());
        }
        Err(error @ client::Error::Unreachable { .. }) => {
            let error = chain(&error);
            let remark = format!("Whether a daemon is at work on {node} is not known: {error}");
            return Ok(Daemon { remarks: vec![remark], ..Daemon::default() });
        }
        Err(error) => return Err(Failed::Unsaid(error)),
    };
    let known: Known = serde_json::from_str(&answer)
        .map_err(|error| Failed::Unsaid(client::Error::Garbled(error)))?;
    let text = standing(&known)?;
    tell(format_args!("the daemon {}", Plain(&text)));
    let remarks = Vec::new();
    Ok(Daemon { text, remarks })
}

/// What a daemon has to do with a node that may be asked: what follows on "the daemon".
fn standing(known: &Known) -> Result<String, Failed> {
    let Known { listed, worker, last, denied_secs, owner, closed_by } = known;
    let state = listed.as_ref().map_or("", |listed| listed.state.as_str());
    if state == Which::Working.word() || worker.is_some() {
        let at = worker.as_ref().map_or_else(String::new, |worker| {
            let step = worker.step.as_deref().unwrap_or("begins");
            format!(" ({step} for {})", Span(worker.step_secs))
        });
        return Err(Failed::AtWork(at));
    }
    let mut clauses = Vec::new();
    match listed {
        Some(listed) if state == Which::Settling.word() => {
            return Err(Failed::Served(served(listed, last.as_ref())));
        }
        Some(Listed { next_secs: Some(next), failures, reason, .. }) => {
            let when = match *next {
                0.0 => "tries it when it is seen next".to_owned(),
                next => format!("waits for another {} before it tries it again", Span(next)),
            };
            let failed = match failures {
                0 => String::new(),
                times => format!(", after {}", Count((*times).into(), "failure")),
            };
            let why = if reason.is_empty() { String::new() } else { format!(": {reason}") };
            clauses.push(format!("{when}{failed}{why}"));
        }
        Some(listed) => {
            let time = Span(listed.for_secs.unwrap_or_default());
            clauses.push(format!("has had it queued for {time}"));
        }
        None if denied_secs.is_none() && owner.is_none() => {
            clauses.push("does not know it".to_owned());
        }
        None => {}
    }
    if let Some(since) = denied_secs {
        let since = Span(*since);
        clauses.push(format!("leaves it alone, since an operator denied it {since} ago"));
    }
    if let Some(owner) = owner {
        clauses.push(format!("leaves it to {owner}, which may be at work on it"));
    }
    if !closed_by.is_empty() {
        clauses.push(format!("begins nothing: {}", closed_by.join(", ")));
    }
    Ok(clauses.join("; "))
}

/// What was done to a node that settles.
fn served(listed: &Listed, last: Option<&Outcome>) -> String {
    let what = match last.map(|last| (last.outcome.as_str(), Span(last.ago_secs))) {
        Some(("provisioned", ago)) => format!("provisioned it {ago} ago and it restarts"),
        Some(("upgrade_sent", ago)) => format!("sent it another version {ago} ago"),
        Some(("shutdown", ago)) => format!("shut it down {ago} ago on the helper's wish"),
        Some(_) | None => "served it a moment ago".to_owned(),
    };
    let left = Span(listed.next_secs.unwrap_or_default());
    format!("{what}; unless it comes back it is left alone for another {left}")
}

impl Shown {
    fn new(node: &Identity, daemon: String, rehearsal: Rehearsal, secrets: &Secrets) -> Shown {
        let Rehearsal { intent, steps, remarks } = rehearsal;
        let (would, reason, intended) = match intent {
            Err(reason) => (Would::Fail, reason, Vec::new()),
            Ok(Intent::Defer { reason }) => (Would::Defer, reason, Vec::new()),
            Ok(Intent::ShutDown { reason, request }) => (Would::ShutDown, reason, vec![request]),
            Ok(Intent::Upgrade { from, version, request }) => {
                (Would::Upgrade, format!("{from} to {version}"), vec![request])
            }
            Ok(Intent::Configure { requests }) => {
                (Would::Configure, String::new(), requests.into())
            }
        };
        let ms = |took: Duration| u64::try_from(took.as_millis()).unwrap_or(u64::MAX);
        Shown {
            node: node.to_string(),
            would,
            reason: secrets.out_of(reason),
            daemon: secrets.out_of(daemon),
            remarks: remarks.into_iter().map(|remark| secrets.out_of(remark)).collect(),
            steps: steps.into_iter().map(|(name, took)| (name, ms(took))).collect(),
            requests: intended.iter().map(|intended| secrets.request(intended)).collect(),
        }
    }

    /// That `node` was not asked, and why.
    pub fn untried(node: &Identity, failed: &Failed) -> Shown {
        Shown {
            node: node.to_string(),
            would: Would::Unknown,
            reason: chain(failed),
            daemon: String::new(),
            remarks: Vec::new(),
            steps: BTreeMap::new(),
            requests: Vec::new(),
        }
    }

    /// As JSON, on one line.
    pub fn json(&self) -> String {
        let json = serde_json::to_string(self).expect("texts and words can be written as JSON");
        format!("{json}\n")
    }
}

/// For people.
impl fmt::Display for Shown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Shown { node, would, reason, remarks, requests, .. } = self;
        let (node, reason) = (Plain(node), Plain(reason));
        match would {
            Would::Configure => writeln!(f, "{node} would be configured and restarted.")?,
            Would::Upgrade => writeln!(f, "{node} would be upgraded first: {reason}.")?,
            Would::ShutDown => writeln!(f, "{node} would be shut down: {reason}")?,
            Would::Defer => writeln!(f, "{node} would be left alone for now: {reason}")?,
            Would::Fail => writeln!(f, "{node} would not be provisioned: {reason}")?,
            Would::Unknown => writeln!(f, "{node} was not tried: {reason}")?,
        }
        for remark in remarks {
            writeln!(f, "remark: {}", Plain(remark))?;
        }
        for Request { action, data } in requests {
            writeln!(f, "\n{action}")?;
            write_value(f, data, 1)?;
        }
        match requests.is_empty() {
            true => Ok(()),
            false => writeln!(f, "\nNothing was sent."),
        }
    }
}

/// A value of JSON, its parts below each other.
fn write_value(f: &mut fmt::Formatter<'_>, value: &Value, depth: usize) -> fmt::Result {
    let indent = "  ".repeat(depth);
    let Value::Object(parts) = value else {
        return writeln!(f, "{indent}{}", Plain(&value.to_string()));
    };
    for (key, value) in parts {
        let key = Plain(key);
        match value {
            Value::Object(parts) if parts.is_empty() => {}
            Value::String(text) if text.is_empty() => {}
            Value::Object(_) => {
                writeln!(f, "{indent}{key}")?;
                write_value(f, value, depth + 1)?;
            }
            Value::String(text) if text.trim_end().contains('\n') => {
                writeln!(f, "{indent}{key}")?;
                for line in text.lines() {
                    writeln!(f, "{indent}  {}", Plain(line))?;
                }
            }
            Value::String(text) => writeln!(f, "{indent}{key} = {}", Plain(text.trim_end()))?,
            other => writeln!(f, "{indent}{key} = {}", Plain(&other.to_string()))?,
        }
    }
    Ok(())
}

/// What must not be shown, wherever a helper puts it.
struct Secrets(Vec<String>);

impl Secrets {
    fn of(config: &Config) -> Secrets {
        let password = config.broker_provisioning_password.as_ref();
        let all = [Some(&config.token), password].into_iter().flatten();
        Secrets::new(all.map(|secret| secret.expose()))
    }

    fn new<'a>(all: impl Iterator<Item = &'a str>) -> Secrets {
        // A text within a text is quoted: by JSON, or by a message of ours.
        let spellings = |text: &'a str| {
            let json = Value::from(text).to_string();
            let debug = format!("{text:?}");
            [text.to_owned(), json[1..json.len() - 1].into(), debug[1..debug.len() - 1].into()]
        };
        let all = all.filter(|text| text.len() >= SECRET_LEN_MIN);
        let mut spelled: Vec<String> = all.flat_map(spellings).collect();
        // One that begins with another would keep its end.
        spelled.sort_by_key(|text| Reverse(text.len()));
        Secrets(spelled)
    }

    fn request(&self, Intended { action, body }: &Intended) -> Request {
        let mut body: Value = serde_json::from_str(body).unwrap_or_default();
        let mut data = body["data"].take();
        if let Value::Object(parts) = &mut data {
            for (key, value) in parts.iter_mut() {
                *value = self.shown(key, value.take());
            }
        }
        Request { action: action.name(), data }
    }

    /// One part of a request.
    fn shown(&self, key: &str, value: Value) -> Value {
        match (key, value) {
            ("token" | "key", Value::String(text)) if !text.is_empty() => HIDDEN.into(),
            ("config", Value::String(text)) => {
                let settings: Map<String, Value> = serde_json::from_str(&text).unwrap_or_default();
                let settings = settings.into_iter().map(|(key, value)| {
                    let value = if is_secret(&key) { HIDDEN.into() } else { self.hidden(value) };
                    (self.out_of(key), value)
                });
                Value::Object(settings.collect())
            }
            ("server_jwt", Value::String(token)) if !token.is_empty() => {
                self.hidden(claims_of(&token))
            }
            (_, value) => self.hidden(value),
        }
    }

    /// Without secrets in its texts.
    fn hidden(&self, value: Value) -> Value {
        match value {
            Value::String(text) if text.contains("PRIVATE KEY-----") => HIDDEN.into(),
            Value::String(text) => self.out_of(text).into(),
            Value::Object(parts) => {
                let hidden = |(key, value)| (self.out_of(key), self.hidden(value));
                Value::Object(parts.into_iter().map(hidden).collect())
            }
            Value::Array(items) => items.into_iter().map(|item| self.hidden(item)).collect(),
            other => other,
        }
    }

    fn out_of(&self, text: String) -> String {
        let text = self.out_of_base64(text);
        self.0.iter().fold(text, |text, secret| text.replace(secret, HIDDEN))
    }

    /// Without what is a secret in base64: a key that was packed into one line, or the password of an `Authorization` header.
    fn out_of_base64(&self, text: String) -> String {
        let whole: String = text.split_ascii_whitespace().collect();
        if self.is_packed_secret(&whole) {
            return HIDDEN.to_owned();
        }
        let is_digit = |c: char| c.is_ascii_alphanumeric() || "+/-_=".contains(c);
        let words = text.split(|c: char| !is_digit(c));
        // `NAME=VALUE`, where the value may be padded with more of these.
        let words = words.flat_map(|word| iter::once(value_of(word)).chain(word.split('=')));
        let secrets: Vec<&str> = words.filter(|word| self.is_packed_secret(word)).collect();
        secrets.into_iter().fold(text.clone(), |text, secret| text.replace(secret, HIDDEN))
    }

    /// Whether it is base64 of either kind, padded or not, of a private key or of a text with a secret of ours in it.
    fn is_packed_secret(&self, text: &str) -> bool {
        let digits = text.trim_end_matches('=').replace('-', "+").replace('_', "/");
        let Ok(bytes) = STANDARD_NO_PAD.decode(digits) else { return false };
        let unpacked = String::from_utf8_lossy(&bytes);
        unpacked.contains("PRIVATE KEY-----")
            || self.0.iter().any(|secret| unpacked.contains(secret))
            || PKey::private_key_from_der(&bytes).is_ok()
    }
}

/// What is behind the last sign of equality that does not pad.
fn value_of(word: &str) -> &str {
    let padded_at = word.trim_end_matches('=').len();
    word[..padded_at].rfind('=').map_or(word, |at| &word[at + 1..])
}

/// What a token says; its signature makes it one, and stays out.
fn claims_of(token: &str) -> Value {
    let claims = token.split('.').nth(1).unwrap_or_default();
    let claims = URL_SAFE_NO_PAD.decode(claims).unwrap_or_default();
    serde_json::from_slice(&claims).unwrap_or_else(|_| HIDDEN.into())
}

/// Whether a setting of a node is likely to be a secret, as its name has it. A file that holds one is none.
fn is_secret(key: &str) -> bool {
    let word = key.rsplit('.').next().unwrap_or_default().to_ascii_lowercase();
    let has_end = |end: &str| word.ends_with(end);
    ["passw", "secret"].into_iter().any(|part| word.contains(part))
        || ["pass", "passphrase", "token", "seed", "private_key", "api_key", "apikey"]
            .into_iter()
            .any(has_end)
}

#[cfg(test)]
mod tests {
    use std::fmt::Write as _;

    use base64::engine::general_purpose::STANDARD;
    use serde_json::json;
    use zeroize::Zeroizing;

    use super::*;
    use crate::rpc::actions::Action;

    #[test]
    fn secrets_are_hidden_wherever_they_are() {
        let config = json!({
            "identity": "n1", "plugin.nats.pass": "x1", "plugin.choria.network.provisioning.client_password": "x2",
            "plugin.x.api_token": "x3", "plugin.security.choria.token_file": "/etc/choria/server.jwt",
            "plugin.x.passwd": "x8", "plugin.x.apikey": "x9", "s3cret": "a",
            "plugin.x.url": "https://u:s3cret@x/", "plugin.x.json": json!(["s3cret", "s3cret\\n2", "s3cret\\n"]).to_string(),
            "plugin.x.pem": "-----BEGIN RSA PRIVATE KEY-----\nx4",
        });
        let claims = URL_SAFE_NO_PAD
            .encode(r#"{"identity":"n1","collectives":["s3cret"],"x":{"s3cret":[1]}}"#);
        let body = json!({"agent": "choria_provision", "action": "configure", "data": {
            "token": "s3cret", "key": "x5", "certificate": "CERT", "config": config.to_string(),
            "server_jwt": format!("x6.{claims}.x7"), "action_policies": {"s3cret.policy": "t s3cret\\n2"}, "ssldir": "",
        }});
        let intended =
            Intended { action: Action::Configure, body: Zeroizing::new(body.to_string()) };
        let secrets = Secrets::new(["s3cret", "s3cret\\n2", "abc"].into_iter());
        let Request { action, data } = secrets.request(&intended);
        assert_eq!(action, "configure");
        assert_eq!(
            data,
            json!({
                "token": "***", "key": "***", "certificate": "CERT", "ssldir": "",
                "server_jwt": {"identity": "n1", "collectives": ["***"], "x": {"***": [1]}},
                "action_policies": {"***.policy": "t ***"},
                "config": {
                    "identity": "n1", "plugin.nats.pass": "***",
                    "plugin.choria.network.provisioning.client_password": "***", "plugin.x.api_token": "***",
                    "plugin.security.choria.token_file": "/etc/choria/server.jwt",
                    "plugin.x.passwd": "***", "plugin.x.apikey": "***", "***": "a",
                    "plugin.x.url": "https://u:***@x/", "plugin.x.json": "[\"***\",\"***\",\"***\\\\n\"]",
                    "plugin.x.pem": "***",
                },
            })
        );
        let quoted = |secret: &str| secrets.out_of(format!("abc {secret} {secret:?}"));
        assert_eq!(quoted("s3cret\\n2"), "abc *** \"***\"");
    }

    #[test]
    fn secrets_are_hidden_in_base64_too() {
        let secrets = Secrets::new(["s3cret"].into_iter());
        let check = |text: &str, expected: &str| {
            assert_eq!(secrets.hidden(text.into()), expected, "{text}");
        };
        let pem = "-----BEGIN PRIVATE KEY-----\nMC4CAQ==\n-----END PRIVATE KEY-----\n";
        for packed in [STANDARD.encode(pem), URL_SAFE_NO_PAD.encode(pem)] {
            check(&packed, HIDDEN);
            check(&format!("tls.key: \"{packed}\"\n"), "tls.key: \"***\"\n");
            // As `base64` wraps it.
            let (first, rest) = packed.split_at(40);
            check(&format!("{first}\n{rest}\n"), HIDDEN);
        }
        check(&format!("Basic {}", STANDARD.encode("me:s3cret")), "Basic ***");
        let basic = STANDARD.encode("you:s3cret");
        assert!(basic.ends_with('='), "{basic}");
        check(&format!("auth={basic}"), "auth=***");
        check(
            &format!("a={basic}&b={basic},c={}=d", basic.trim_end_matches('=')),
            "a=***&b=***,c=***=d",
        );
        // A key without the lines around it.
        let key = PKey::generate_ed25519().unwrap();
        check(&STANDARD.encode(key.private_key_to_pkcs8().unwrap()), HIDDEN);
        let public = STANDARD.encode(key.public_key_to_der().unwrap());
        for harmless in
            [public.as_str(), &STANDARD.encode("no s-cret"), "web-03.example.net", "", "=="]
        {
            check(harmless, harmless);
        }
    }

    #[test]
    fn people_see_each_part_on_its_own_line_and_nothing_that_acts() {
        let shown = Shown {
            node: "n1\u{1b}".to_owned(),
            would: Would::Configure,
            reason: String::new(),
            daemon: String::new(),
            remarks: vec!["r\n".to_owned()],
            steps: BTreeMap::new(),
            requests: vec![Request {
                action: "configure",
                data: json!({"ca": "a\nb\n", "config": {"x": "y\u{1b}"}, "key": "", "splay": 1}),
            }],
        };
        let mut text = String::new();
        write!(text, "{shown}").unwrap();
        assert_eq!(
            text,
            "n1\\u{1b} would be configured and restarted.\nremark: r\\u{a}\n\nconfigure\n  ca\n    a\n    b\n  \
             config\n    x = y\\u{1b}\n  splay = 1\n\nNothing was sent.\n"
        );
    }
}
