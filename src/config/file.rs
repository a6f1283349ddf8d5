//! The YAML file as written: every key, its type and its default.
//!
//! Reading checks types only and keeps lines; what values may be is checked by `config::Config`.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use crate::config::duration::{DurationError, duration};
use crate::config::report::{Report, nearest};
use crate::config::yaml::{self, Entry, Kind, Node, Scalar, Value};
use crate::secret::Secret;

/// A value and the line of its key.
#[derive(Debug, Clone)]
pub struct At<T> {
    /// Line in the file, from 1.
    pub line: usize,
    /// What is written there.
    pub value: T,
}

/// An unknown key that is probably meant to be another one.
#[derive(Debug, Clone)]
pub struct Misspelt {
    /// Its line, from 1.
    pub line: usize,
    /// The key as it is written.
    pub written: String,
    /// The key that was meant.
    pub meant: &'static str,
    /// Its value is `true`.
    pub is_on: bool,
}

/// Declares a map of the file: one optional field a key, and the list of all keys.
macro_rules! settings {
    ($(#[$about:meta])* $name:ident { $($(#[$doc:meta])* $key:ident: $kind:ty,)* }) => {
        $(#[$about])*
        #[derive(Debug, Default)]
        pub struct $name {
            $($(#[$doc])* pub $key: Option<At<$kind>>,)*
            /// Keys that are written there, with a value that has been reported as wrong: what they would say is not known.
            pub unread: Vec<&'static str>,
            /// Keys that are written there and not known.
            pub misspelt: Vec<Misspelt>,
        }

        impl $name {
            /// Every key, in the order of the documentation.
            pub const KEYS: &[&str] = &[$(stringify!($key)),*];

            /// The line of each key that is written there, as far as its value is known.
            pub fn lines(&self) -> BTreeMap<&'static str, usize> {
                let all = [$((stringify!($key), self.$key.as_ref().map(|at| at.line))),*];
                all.into_iter().filter_map(|(key, line)| Some((key, line?))).collect()
            }

            /// Takes one setting; `false` when there is none of that name.
            fn take(&mut self, path: &str, key: &str, line: usize, node: &Rc<Node>, report: &mut Report) -> bool {
                $(if key.eq_ignore_ascii_case(stringify!($key)) {
                    let path = format!("{path}{}", stringify!($key));
                    if !is_null(node) {
                        let errors = report.errors.len();
                        self.$key = <$kind>::read(&path, line, node, report).map(|value| At { line, value });
                        if self.$key.is_none() && report.errors.len() > errors {
                            self.unread.push(stringify!($key));
                        }
                    }
                    return true;
                })*
                false
            }
        }
    };
}

settings! {
    /// The top level of the file. `None` means that the key is absent or empty, so its default holds.
    File {
        /// Nodes worked on at once, 1 to 1,024. Default: the number of CPUs, also for 0.
        workers: i64,
        /// Time from one discovery to the next, at least 1s. Default: 1m.
        interval: Duration,
        /// Where the log goes: `stdout`, `stderr`, `discard` or a file. Default: stdout, also for an empty text.
        logfile: String,
        /// Least severe level that is logged: debug, info, warn, error or fatal. Default: info, also for an empty text.
        loglevel: String,
        /// The site's program that decides about a node, with its arguments. Required.
        helper: String,
        /// The provisioning token, sent with every provisioning request. Default: none.
        token: Secret,
        /// The component whose startup events announce a node. Default: `provision_mode_server`, also for an empty text.
        lifecycle_component: String,
        /// Protocol v1 without TLS and signatures. Default: false.
        choria_insecure: bool,
        /// The installation's name, a label on every metric. Default: empty.
        site: String,
        /// Port for metrics and health, 0 for none. Default: 0.
        monitor_port: i64,
        /// Not used, kept for existing files.
        broker_port: i64,
        /// Log in to the broker as user `provisioner` with this password. Default: none.
        broker_provisioning_password: Secret,
        /// Names no node may get a certificate for, regular expressions. Default: those of privileged and other clients, also for an empty list.
        cert_deny_list: Vec<At<String>>,
        /// File of the certificate or public key that provisioning JWTs are verified with, or an Ed25519 public key in hex. Required by `features.jwt` and `features.ed25519`.
        jwt_verify_cert: String,
        /// File of the key that server JWTs are signed with: an Ed25519 seed in hex, or an RSA key in PEM. Required by `features.ed25519`.
        jwt_signing_key: String,
        /// File of the client JWT that makes the holder of `jwt_signing_key` a chain issuer. Default: none, so brokers must know the key itself.
        jwt_signing_token: String,
        /// How long a server JWT is valid, unless the helper wishes otherwise. Default: 1y.
        server_jwt_validity: Duration,
        /// Not used, kept for existing files.
        rego_policy: String,
        /// One of several provisioners acts. Default: false. Not available in this version.
        leader_election: bool,
        /// Where nodes find other versions of Choria: a URL. Required by `features.upgrades`, unless `upgrades_optional`.
        upgrades_repository: String,
        /// Whether a node that cannot be upgraded is provisioned as it is. Default: false.
        upgrades_optional: bool,
        /// What is done for a node beyond configuring it.
        features: Features,
        /// Address of the monitor port. Default: all addresses.
        monitor_address: String,
        /// Unix socket for commands, empty for none. Default: `/run/choria-provisioner/admin.sock`, if its directory exists.
        admin_socket: String,
        /// Nodes that wait for their turn, new ones and those tried before each, 1 to 1,000,000. Default: 50,000.
        work_queue: i64,
        /// Nodes asked and silent so far, 1 to 100,000. Default: 1,024.
        probe_window: i64,
        /// How long a first question waits for its answer, 100ms to 1m. Default: 3s.
        probe_timeout: Duration,
        /// Longest time for one node, from a minute more than `helper_timeout` to 1h. Default: 2m.
        node_timeout: Duration,
        /// Pause before `configure`, in which a second answer can betray a forger, 0 to 10s. Default: 0.
        contradiction_wait: Duration,
        /// How long running nodes may take to finish when we are told to stop, 0 to 10m. Default: 30s.
        drain_timeout: Duration,
        /// Nodes begun per second, 0 for no limit, up to 10,000. Default: 0.
        rate_limit: i64,
        /// Longest wait of a node that keeps failing, from `interval` to 24h. Default: 30m, or `interval` if that is longer.
        retry_max: Duration,
        /// Longest run of the helper, 100ms to 10m. Default: 10s.
        helper_timeout: Duration,
        /// Largest answer of the helper in bytes, 1 KiB to 64 MiB. Default: 4 MiB.
        helper_output_max: i64,
        /// How the helper is run: `exec`, once for each node, or `persistent`, once for many. Default: exec.
        helper_mode: String,
        /// Several provisioners share the work. Default: false. Not available in this version.
        active_active: bool,
        /// File that one JSON line is appended to for each attempt, empty for none. Default: none.
        audit_log: String,
        /// `auto`, `text` or `json`. Default: auto, which is JSON in a file and text elsewhere.
        log_format: String,
    }
}

settings! {
    /// The map `features`.
    Features {
        /// Nodes get an x509 certificate by CSR. Default: false.
        pki: bool,
        /// Nodes show a provisioning JWT, and it is verified. Default: false.
        jwt: bool,
        /// Nodes get a server JWT for an Ed25519 key they make; includes `jwt`, excludes `pki`. Default: false.
        ed25519: bool,
        /// Nodes get another version of Choria first when the helper says so. Default: false.
        upgrades: bool,
    }
}

impl File {
    /// Reads the settings in `bytes`, the contents of a file; what is wrong goes to `report`.
    ///
    /// `None` if there are none at all.
    pub fn parse(bytes: &[u8], report: &mut Report) -> Option<File> {
        let mut file = File::default();
        let errors = report.errors.len();
        let root = yaml::parse(bytes, report);
        let root = root.filter(|root| !is_null(root));
        let Some(root) = root else {
            if report.errors.len() == errors {
                report.error(None, "is empty; at least `helper` must be set");
            }
            return None;
        };
        let Some(entries) = root.entries(report) else {
            let found = root.describe(false);
            report.error(root.line, format!("found {found}, wanted settings such as `workers: 4`"));
            return None;
        };
        for entry in entries {
            if !file.take("", &entry.key, entry.line, &entry.value, report) {
                file.misspelt.extend(unknown("", &entry, File::KEYS, report));
            }
        }
        Some(file)
    }
}

/// Warns of an unknown key.
fn unknown(
    path: &str,
    entry: &Entry,
    known: &[&'static str],
    report: &mut Report,
) -> Option<Misspelt> {
    let Entry { key, line, value, .. } = entry;
    let shown: String = key.chars().take(60).collect();
    let shown = format!("{path}{}", shown.escape_debug());
    let mut text = format!("{shown}: unknown key, ignored");
    let feature = key.to_ascii_lowercase();
    let feature = feature.strip_prefix("features.").unwrap_or(&feature);
    let mut meant = None;
    if path.is_empty() && Features::KEYS.contains(&feature) {
        text += &format!("; did you mean `{feature}` below `features:`?");
    } else {
        meant = nearest(key, known.iter().copied());
        if let Some(meant) = meant {
            text += &format!("; did you mean `{path}{meant}`?");
        }
    }
    report.warn(*line, text);
    let is_on = matches!(value.value, Value::Scalar(Scalar { kind: Kind::Bool(true), .. }));
    meant.map(|meant| Misspelt { line: *line, written: shown, meant, is_on })
}

fn is_null(node: &Node) -> bool {
    matches!(node.value, Value::Scalar(Scalar { kind: Kind::Null, .. }))
}

/// A type that settings have. `path` is the whole key, for messages.
trait Read: Sized {
    fn read(path: &str, line: usize, node: &Rc<Node>, report: &mut Report) -> Option<Self>;
}

impl Read for bool {
    fn read(path: &str, line: usize, node: &Rc<Node>, report: &mut Report) -> Option<bool> {
        match &node.value {
            Value::Scalar(Scalar { kind: Kind::Bool(value), .. }) => Some(*value),
            _ => wrong(path, line, node, "true or false", report),
        }
    }
}

impl Read for i64 {
    fn read(path: &str, line: usize, node: &Rc<Node>, report: &mut Report) -> Option<i64> {
        const WANTED: &str = "a whole number";
        let number = match &node.value {
            Value::Scalar(Scalar { kind: Kind::Integer(number), .. }) => {
                i64::try_from(*number).ok()
            }
            // `4.0` and `1e2` are whole; beyond 2^53 a float does not say which number was meant.
            Value::Scalar(Scalar { kind: Kind::Float(number), .. })
                if number.fract() == 0.0 && number.abs() < 9e15 =>
            {
                Some(*number as i64)
            }
            _ => None,
        };
        number.or_else(|| wrong(path, line, node, WANTED, report))
    }
}

impl Read for String {
    fn read(path: &str, line: usize, node: &Rc<Node>, report: &mut Report) -> Option<String> {
        text(path, line, node, false, report)
    }
}

impl Read for Secret {
    fn read(path: &str, line: usize, node: &Rc<Node>, report: &mut Report) -> Option<Secret> {
        text(path, line, node, true, report).map(Secret::new)
    }
}

impl Read for Duration {
    fn read(path: &str, line: usize, node: &Rc<Node>, report: &mut Report) -> Option<Duration> {
        let raw = match &node.value {
            Value::Scalar(Scalar { raw, kind, .. }) if !matches!(kind, Kind::Bool(_)) => raw,
            _ => return wrong(path, line, node, "a duration such as 90s, 10m or 1h30m", report),
        };
        if raw.is_empty() {
            report.warn(line, format!("{path}: is empty, so its default holds"));
            return None;
        }
        // Nothing is nothing in every unit.
        if raw == "0" {
            return Some(Duration::ZERO);
        }
        duration(raw)
            .map_err(|error| {
                let wanted = match &error {
                    // That is said with the missing unit.
                    DurationError::Unit(unit) if unit.is_empty() => "",
                    DurationError::Unit(_) | DurationError::Number(_) => {
                        "; wanted is one such as 90s, 10m, 1h30m or 2d"
                    }
                    DurationError::Negative | DurationError::TooLong => "",
                };
                // A text that was quoted need not be quoted again.
                let found = match &error {
                    DurationError::Number(_) if error.to_string().contains(raw.as_str()) => {
                        String::new()
                    }
                    _ => format!(", found {raw:?}"),
                };
                report.error(line, format!("{path}: {error}{found}{wanted}"));
            })
            .ok()
    }
}

impl Read for Vec<At<String>> {
    fn read(path: &str, line: usize, node: &Rc<Node>, report: &mut Report) -> Option<Self> {
        let Value::List(members) = &node.value else {
            return wrong(path, line, node, "a list of texts", report);
        };
        let mut texts = Vec::new();
        for member in members {
            // A member's own line, as long as it is not an alias for something far above.
            let line = member.line.max(line);
            if is_null(member) {
                report.error(line, format!("{path}: found nothing in the list, wanted a text"));
            } else if let Some(value) = text(path, line, member, false, report) {
                texts.push(At { line, value });
            }
        }
        Some(texts)
    }
}

impl Read for Features {
    fn read(path: &str, line: usize, node: &Rc<Node>, report: &mut Report) -> Option<Features> {
        let Some(entries) = node.entries(report) else {
            return wrong(path, line, node, "a map such as `{jwt: true}`", report);
        };
        let (mut features, path) = (Features::default(), format!("{path}."));
        for entry in entries {
            if !features.take(&path, &entry.key, entry.line, &entry.value, report) {
                features.misspelt.extend(unknown(&path, &entry, Features::KEYS, report));
            }
        }
        Some(features)
    }
}

/// A text; numbers and booleans are taken as they are written, which the original refuses.
fn text(path: &str, line: usize, node: &Node, secret: bool, report: &mut Report) -> Option<String> {
    let Value::Scalar(Scalar { raw, kind, is_plain }) = &node.value else {
        return wrong(path, line, node, "a text", report);
    };
    if *kind != Kind::Text {
        let found = node.describe(secret);
        report.warn(line, format!("{path}: {found} is taken as a text; quotes would say so"));
    }
    // Word processors and web pages make them.
    if *is_plain && raw.starts_with(['“', '”', '„', '«', '‘', '’', '‚']) {
        let text = format!(
            "{path}: its typographic quotes are a part of the text; those of YAML are \" and '"
        );
        report.warn(line, text);
    }
    Some(raw.clone())
}

fn wrong<T>(path: &str, line: usize, node: &Node, wanted: &str, report: &mut Report) -> Option<T> {
    let found = node.describe(matches!(path, "token" | "broker_provisioning_password"));
    report.error(line, format!("{path}: found {found}, wanted {wanted}"));
    None
}
