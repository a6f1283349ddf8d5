//! `try`: what would be done to one node, without doing it.
//!
//! The node is asked for its inventory and its provisioning JWT, verified, and the helper is run for it, by the very steps of an attempt
//! ([`node::rehearse`]). What would be sent then is shown instead, without its secrets. `jwt` takes the node's lock for us, as the
//! daemon's own request does, and begins another key exchange; so a node that the daemon here is at work on is left alone.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fmt;
use std::io::ErrorKind;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use crossbeam_channel::Receiver;
use serde::Serialize;
use serde_json::{Map, Value};

use crate::config::security::Problem;
use crate::config::{AdminSocket, Config, Settings};
use crate::errors::chain;
use crate::gate::{Gate, Reason};
use crate::keychain::Keychain;
use crate::metrics::Metrics;
use crate::node::{self, Context, Intended, Intent, Probed, Progress, Rehearsal};
use crate::ops::client;
use crate::ops::command::Command;
use crate::ops::socket;
use crate::ops::status::{Limit, NODES_MAX, Query, Which};
use crate::ops::text::Plain;
use crate::protocol::{Identity, RequestId};
use crate::rpc::{self, Rpc};
use crate::shutdown::Never;
use crate::transport::errors::BrokerError;
use crate::transport::visit::{Call, Visit};

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
    /// The daemon here is at work on it.
    AtWork,
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
            Failed::AtWork => f.write_str(
                "the daemon is at work on it, and would be disturbed: try again in a moment",
            ),
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
            Failed::NoBroker(_) | Failed::AtWork => None,
        }
    }
}

/// Finds out what would be done to `node`; at most until its time is up, or `abort` disconnects.
///
/// # Errors
///
/// [`Failed`], before the node was asked for anything.
pub fn run(node: &Identity, settings: Settings, abort: &Receiver<Never>) -> Result<Shown, Failed> {
    let Settings { config, choria, .. } = settings;
    let unknown = leave_to_the_daemon(&config.admin_socket, node)?;
    let (keychain, codec) = Keychain::open(&choria).map_err(Failed::Keys)?;
    let visit = Visit::begin(Call {
        servers: choria.brokers.now().found,
        name: &format!("{}-try", choria.connection_name),
        credentials: Box::new(move || keychain.credentials()),
        connect_timeout: choria.connect_timeout,
        patience: CONNECT_MAX,
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
    let helper = Arc::new(node::helper(&config, &metrics));
    let deadline = Instant::now() + config.node_timeout;
    let context = Context {
        rpc,
        helper: helper.clone(),
        gate,
        metrics,
        config: Arc::new(config),
        last_key: Default::default(),
        discovery_timeout: choria.discovery_timeout,
        abort: abort.clone(),
    };
    let probed = Probed {
        identity: node.clone(),
        term,
        registration: None,
        inventory: None,
        deadline,
        upgrade: None,
        progress: Arc::new(Progress::default()),
    };
    let mut rehearsal = node::rehearse(&context, probed);
    rehearsal.remarks.extend(unknown);
    helper.stop(abort);
    Ok(Shown::new(node, rehearsal, &Secrets::of(&context.config)))
}

/// Fails if the daemon of this machine, if there is one, has the node in hand or doesn't say. What is known of none is a remark.
fn leave_to_the_daemon(socket: &AdminSocket, node: &Identity) -> Result<Option<String>, Failed> {
    let path = match socket {
        AdminSocket::Off => return Ok(None),
        AdminSocket::Usual => Path::new(socket::USUAL),
        AdminSocket::At(path) => path,
    };
    // All of them: the names of many may hold this one.
    let limit = Some(Limit::near(NODES_MAX));
    let query = Query { state: Which::Working, name: node.to_string(), limit, ..Query::default() };
    let answer = match client::ask(path, &Command::Nodes(query), true) {
        Ok(answer) => answer,
        Err(client::Error::Unreachable { source, .. })
            if matches!(source.kind(), ErrorKind::NotFound | ErrorKind::ConnectionRefused) =>
        {
            return Ok(None);
        }
        Err(error @ client::Error::Unreachable { .. }) => {
            let error = chain(&error);
            return Ok(Some(format!(
                "Whether a daemon is at work on {node} is not known: {error}"
            )));
        }
        Err(error) => return Err(Failed::Unsaid(error)),
    };
    let listed = serde_json::from_str::<Value>(&answer).unwrap_or_default();
    let nodes = listed["nodes"].as_array().map(Vec::as_slice).unwrap_or_default();
    match nodes.iter().any(|listed| listed["node"] == node.as_str()) {
        true => Err(Failed::AtWork),
        false => Ok(None),
    }
}

impl Shown {
    fn new(node: &Identity, rehearsal: Rehearsal, secrets: &Secrets) -> Shown {
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
            remarks: remarks.into_iter().map(|remark| secrets.out_of(remark)).collect(),
            steps: steps.into_iter().map(|(name, took)| (name, ms(took))).collect(),
            requests: intended.iter().map(|intended| secrets.request(intended)).collect(),
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
        self.0.iter().fold(text, |text, secret| text.replace(secret, HIDDEN))
    }
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
    fn people_see_each_part_on_its_own_line_and_nothing_that_acts() {
        let shown = Shown {
            node: "n1\u{1b}".to_owned(),
            would: Would::Configure,
            reason: String::new(),
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
