//! What the original makes of settings, client files, commands and versions, against what we make of them.
//!
//! The tables in `tests/vectors/differential` hold inputs and what the original's own code answered to each. A row in which
//! we differ on purpose holds our answer too, and why; every other one demands the same of us. A table begins with what
//! its columns mean.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::collections::{BTreeMap, HashSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use choria_provisioner::config::choria::values::setting;
use choria_provisioner::config::choria::{ChoriaConfig, Network};
use choria_provisioner::config::duration::duration;
use choria_provisioner::config::file::File;
use choria_provisioner::config::report::Report;
use choria_provisioner::config::surroundings::Surroundings;
use choria_provisioner::config::{Config, Cooperation, Enrollment};
use choria_provisioner::helper;
use choria_provisioner::transport::servers::Brokers;
use choria_provisioner::version::Version;
use serde::Deserialize;
use serde_json::{Map, Value, json};

#[test]
fn durations_are_the_original_s() {
    compare("durations", |row| match duration(row.text()) {
        Ok(duration) => Ok(seconds(duration)).into(),
        Err(error) => Err(error.to_string()).into(),
    });
}

#[test]
fn commands_are_split_as_by_the_original() {
    compare("commands", |row| match helper::split(row.text()) {
        Ok(words) => Ok(json!(words)).into(),
        Err(error) => Err(error.to_string()).into(),
    });
}

#[test]
fn versions_are_ordered_as_by_the_original() {
    compare("versions", |row| {
        let [a, b] = [&row.a, &row.b].map(|text| Version::parse(text.as_deref().unwrap()));
        Ok(json!(a.cmp(&b) as i8)).into()
    });
}

#[test]
fn names_are_denied_as_by_the_original() {
    compare("denies", |row| {
        // JSON is YAML, too.
        let pattern = json!([row.pattern]);
        let yaml =
            format!("{YAML_BASE}token: x\nfeatures: {{pki: on}}\ncert_deny_list: {pattern}\n");
        let mut report = Report::new("file");
        let config = Config::parse(yaml.as_bytes(), &mut report);
        let denied = config.map(|config| {
            let name = row.name.as_deref().unwrap();
            json!(config.cert_deny_list.iter().any(|deny| deny.is_match(name)))
        });
        Answer::new(denied, report)
    });
}

#[test]
fn settings_are_read_as_by_the_original() {
    let defaults = settings(YAML_BASE.as_bytes()).made.unwrap();
    compare("yaml", |row| settings(&row.content(YAML_BASE)).without(&defaults, row.all));
}

#[test]
fn lines_of_the_client_file_are_read_as_by_the_original() {
    compare("lines", |row| {
        let pair = setting(row.text()).map(|(key, value)| [key, value]);
        Ok(json!(pair)).into()
    });
}

#[test]
fn client_files_are_read_as_by_the_original() {
    let root = scratch();
    let bare = Row { lines: Some(Vec::new()), ..Row::default() };
    let defaults = client(&bare, &root.join("bare")).made.unwrap();
    let mut count = 0;
    compare("client", |row| {
        count += 1;
        client(row, &root.join(count.to_string())).without(&defaults, row.all)
    });
    fs::remove_dir_all(root).unwrap();
}

/// What we make of a YAML file, by key.
fn settings(bytes: &[u8]) -> Answer {
    let mut report = Report::new("file");
    let config = Config::parse(bytes, &mut report);
    // Rows are about one setting, not about the others that it would take.
    let of_others = ["has no effect without", "token: not set"];
    report.warnings.retain(|warning| !of_others.iter().any(|text| warning.text.contains(text)));
    Answer::new(config.map(|config| by_key(&config, bytes)), report)
}

fn by_key(config: &Config, bytes: &[u8]) -> Value {
    // Settings without a check or a default of our own are taken as they are written.
    let file = File::parse(bytes, &mut Report::new("file")).unwrap();
    macro_rules! written {
        ($key:ident or $default:expr) => {
            file.$key.as_ref().map_or($default, |at| at.value.clone())
        };
        ($key:ident) => {
            written!($key or String::new())
        };
    }
    let denied: Vec<String> = match &file.cert_deny_list {
        Some(list) if !list.value.is_empty() => {
            list.value.iter().map(|at| at.value.clone()).collect()
        }
        _ => config.cert_deny_list.iter().map(|regex| regex.as_str().to_string()).collect(),
    };
    let password = config.broker_provisioning_password.as_ref().map(|secret| secret.expose());
    let validity = written!(server_jwt_validity or Duration::from_secs(365 * 24 * 3600));
    json!({
        "workers": config.workers,
        "interval": seconds(config.interval),
        "logfile": written!(logfile),
        "loglevel": written!(loglevel),
        "helper": config.helper.as_str(),
        "token": config.token.expose(),
        "lifecycle_component": config.lifecycle_component,
        "choria_insecure": config.choria_insecure,
        "site": config.site,
        "monitor_port": config.monitor_port,
        "broker_port": written!(broker_port or 0),
        "broker_provisioning_password": password.unwrap_or_default(),
        "cert_deny_list": denied,
        "jwt_verify_cert": written!(jwt_verify_cert),
        "jwt_signing_key": written!(jwt_signing_key),
        "jwt_signing_token": written!(jwt_signing_token),
        "server_jwt_validity": seconds(validity),
        "rego_policy": written!(rego_policy),
        "leader_election": config.cooperation == Cooperation::Elected,
        "upgrades_repository": written!(upgrades_repository),
        "upgrades_optional": written!(upgrades_optional or false),
        "features.pki": config.features.enrollment == Enrollment::Pki,
        "features.jwt": config.features.jwt,
        "features.ed25519": config.features.enrollment == Enrollment::OrganizationIssuer,
        "features.upgrades": config.features.upgrades,
    })
}

/// What we make of a client file and those around it, written to `dir`.
fn client(row: &Row, dir: &Path) -> Answer {
    let path = dir.join("client.cfg");
    fs::create_dir_all(dir.join("plugin.d")).unwrap();
    fs::write(&path, row.content(CLIENT_BASE)).unwrap();
    let files = [
        ("plugin.d/choria.cfg", &row.plugin),
        ("plugin.d/choria.conf", &row.plugin_conf),
        ("plugin.d/nats.cfg", &row.plugin_nats),
        // For the original in the working directory, which tests share and leave alone; we look nowhere for it.
        ("choria.conf", &row.project),
    ];
    for (name, lines) in files {
        if let Some(lines) = lines {
            fs::write(dir.join(name), lines.join("\n") + "\n").unwrap();
        }
    }
    let here = dir.display().to_string();
    let variables = row.env.iter().map(|(k, v)| (k.clone(), v.replace("<dir>", &here)));
    let mut surroundings = Surroundings {
        variables: variables.collect(),
        host_name: "host".to_string(),
        is_root: row.root.unwrap_or(true),
        ..Surroundings::default()
    };
    // What facter said to the original.
    let domain = "example.net".to_string();
    surroundings.variables.entry("CHORIA_SRV_DOMAIN".to_string()).or_insert(domain);
    let mut report = Report::new("file");
    // What the original was asked about has no TLS.
    let network = Network { is_insecure: true, ..Network::default() };
    let config = ChoriaConfig::load(&path, network, &surroundings, &mut report);
    report.warnings.retain(|warning| !warning.text.contains(": no effect, since "));
    let settings = config.map(|config| {
        let servers = match &config.brokers {
            Brokers::Listed(servers) => {
                servers.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ")
            }
            Brokers::Srv(_) => "SRV".to_string(),
        };
        let mut settings = json!({
            "identity": config.identity.as_str(),
            "caller": config.caller,
            "ttl": config.ttl_secs,
            "discovery_timeout": config.discovery_timeout.as_secs(),
            "connect_timeout": seconds(config.connect_timeout),
            "servers": servers,
        });
        if let Some((user, password)) = &config.user {
            settings["user"] = json!(format!("{user} {}", password.expose()));
        }
        settings
    });
    Answer::new(settings, report)
}

/// One row of a table: an input, in the columns that its subject has, and what is made of it.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Row {
    text: Option<String>,
    pattern: Option<String>,
    name: Option<String>,
    a: Option<String>,
    b: Option<String>,
    lines: Option<Vec<String>>,
    file: Option<Vec<String>>,
    bytes: Option<String>,
    long: usize,
    #[serde(rename = "plugin.d/choria.cfg")]
    plugin: Option<Vec<String>>,
    #[serde(rename = "plugin.d/choria.conf")]
    plugin_conf: Option<Vec<String>>,
    #[serde(rename = "plugin.d/nats.cfg")]
    plugin_nats: Option<Vec<String>>,
    #[serde(rename = "./choria.conf")]
    project: Option<Vec<String>>,
    env: BTreeMap<String, String>,
    root: Option<bool>,
    all: bool,
    original: Value,
    ours: Option<Value>,
    warning: Option<String>,
    why: Option<String>,
}

impl Row {
    fn text(&self) -> &str {
        self.text.as_deref().unwrap()
    }

    /// The bytes of the file that this row is about; `base` comes before bare lines.
    fn content(&self, base: &str) -> Vec<u8> {
        if let Some(bytes) = &self.bytes {
            return bytes.chars().map(|c| u8::try_from(u32::from(c)).unwrap()).collect();
        }
        let text = match (&self.text, &self.file, &self.lines) {
            (Some(text), None, None) => text.clone(),
            (None, Some(lines), None) => lines.join("\n") + "\n",
            (None, None, Some(lines)) => format!("{base}{}\n", lines.join("\n")),
            _ => panic!("{self:?}"),
        };
        text.replace("<long>", &"x".repeat(self.long)).into_bytes()
    }

    /// What is wrong with our answer, or with the row.
    fn fault(&self, answer: &Answer) -> Option<&'static str> {
        let is_original = match (error(&self.original), &answer.made) {
            (Some(_), Err(_)) => true,
            (None, Ok(made)) => *made == self.original,
            _ => false,
        };
        let is_ours = match (&self.ours, &answer.made) {
            (None, _) => is_original,
            (Some(ours), Ok(made)) => ours == made,
            (Some(ours), Err(text)) => error(ours).is_some_and(|part| text.contains(part)),
        };
        let is_said = match (&self.warning, &answer.made) {
            (Some(part), _) => answer.warnings.contains(part),
            (None, Ok(_)) => answer.warnings.is_empty(),
            // Beside an error a warning does not matter.
            (None, Err(_)) => true,
        };
        if !is_ours {
            Some("another answer")
        } else if !is_said {
            Some("other warnings")
        } else if is_original && self.ours.is_some() {
            Some("the row tells of a difference that there is not")
        } else if !is_original && self.why.is_none() {
            Some("the row does not tell why we differ")
        } else {
            None
        }
    }
}

/// What we make of an input.
struct Answer {
    /// Or all that is wrong with it.
    made: Result<Value, String>,
    warnings: String,
}

impl Answer {
    fn new(made: Option<Value>, report: Report) -> Answer {
        let [errors, warnings] = [report.errors, report.warnings].map(|findings| {
            findings.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
        });
        Answer { made: made.ok_or(errors), warnings }
    }

    /// Leaves out the settings that have their `defaults`, unless `all` are asked for.
    fn without(mut self, defaults: &Value, all: bool) -> Answer {
        if let (Ok(Value::Object(settings)), false) = (&mut self.made, all) {
            settings.retain(|key, value| defaults.get(key) != Some(value));
        }
        self
    }
}

impl From<Result<Value, String>> for Answer {
    fn from(made: Result<Value, String>) -> Answer {
        Answer { made, warnings: String::new() }
    }
}

/// The text of an error in a table.
fn error(value: &Value) -> Option<&str> {
    value.get("error").and_then(Value::as_str)
}

/// Holds our answers against the table of `subject`.
#[track_caller]
fn compare(subject: &str, mut make: impl FnMut(&Row) -> Answer) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join(format!("tests/vectors/differential/{subject}.jsonl"));
    let table = fs::read_to_string(&path).unwrap();
    let (mut faults, mut inputs) = (Vec::new(), HashSet::new());
    for (number, line) in table.lines().enumerate().filter(|(_, line)| !line.starts_with('#')) {
        let place = format!("{subject}.jsonl:{}", number + 1);
        let row: Row = serde_json::from_str(line).unwrap_or_else(|e| panic!("{place}: {e}"));
        let mut input: Map<String, Value> = serde_json::from_str(line).unwrap();
        assert!(input.contains_key("original"), "{place}: nothing to compare with");
        input.retain(|key, _| !["original", "ours", "warning", "why"].contains(&key.as_str()));
        assert!(inputs.insert(Value::from(input).to_string()), "{place}: comes twice");
        let answer = make(&row);
        if let Some(fault) = row.fault(&answer) {
            let warnings = json!(answer.warnings);
            let made = answer.made.unwrap_or_else(|text| json!({ "error": text }));
            faults.push(format!("{place}: {fault}\n  {line}\n  ours {made}\n  warning {warnings}"));
        }
    }
    assert!(inputs.len() > 100, "{subject}: {} rows", inputs.len());
    assert!(faults.is_empty(), "{} of {}:\n{}", faults.len(), inputs.len(), faults.join("\n"));
}

/// Seconds as the tables have them: `90s`, `0.5s`.
fn seconds(duration: Duration) -> Value {
    let (whole, nanos) = (duration.as_secs(), duration.subsec_nanos());
    match nanos {
        0 => json!(format!("{whole}s")),
        _ => json!(format!("{whole}.{}s", format!("{nanos:09}").trim_end_matches('0'))),
    }
}

/// A new directory for this run.
fn scratch() -> PathBuf {
    let dir = std::env::temp_dir().join(format!("provisioner-differential-{}", std::process::id()));
    fs::create_dir_all(&dir).unwrap();
    dir
}

/// What comes before the lines of a YAML row, since no file is complete without.
const YAML_BASE: &str = "helper: /bin/true\nchoria_insecure: true\n";

/// The same for a client file.
const CLIENT_BASE: &str =
    "identity = prov.example.net\nplugin.choria.middleware_hosts = broker:4222\n";
