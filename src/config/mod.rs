//! Settings already checked: the only form in which other modules see them.
//!
//! `file` reads the YAML as written and `yaml` what it is made of, `choria` reads Choria's client file. All errors are
//! collected in a `report`, since an operator wants to see them at once. Meanings and defaults are those of the Go
//! provisioner's `config/config.go`; README lists where we differ on purpose.

pub mod choria;
pub mod duration;
pub mod file;
pub mod moving;
pub mod pattern;
pub mod reload;
pub mod report;
pub mod security;
pub mod signing;
pub mod surroundings;
pub mod yaml;

use std::collections::BTreeMap;
use std::fmt;
use std::fs::File as OpenFile;
use std::io::{self, Read, Seek as _};
use std::net::{IpAddr, SocketAddr};
use std::ops::RangeInclusive;
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use log::LevelFilter;
use regex::Regex;
use rustix::fs::OFlags;
use zeroize::Zeroizing;

use crate::clock::unix_time;
use crate::config::choria::{ChoriaConfig, Network};
use crate::config::duration::words;
use crate::config::file::{At, File, Misspelt};
use crate::config::pattern::from_go;
use crate::config::report::{Finding, Report};
use crate::config::signing::SigningFiles;
use crate::config::surroundings::Surroundings;
use crate::file_kind;
use crate::helper::{self, CommandError, HelperCommand};
use crate::jwt::VerifyKey;
use crate::secret::Secret;

/// The provisioner's own settings; every field but `signing` is named after its key.
#[derive(Debug, Clone)]
pub struct Config {
    /// Nodes worked on at once.
    pub workers: usize,
    /// Time from one discovery to the next.
    pub interval: Duration,
    /// Where the log goes.
    pub logfile: LogTarget,
    /// Least severe level that is logged.
    pub loglevel: LevelFilter,
    /// How log lines look.
    pub log_format: LogFormat,
    /// The site's program that decides about a node.
    pub helper: HelperCommand,
    /// The provisioning token; may be empty.
    pub token: Secret,
    /// The component whose startup events announce a node; no wildcards, no white space.
    pub lifecycle_component: String,
    /// Protocol v1 without TLS and signatures.
    pub choria_insecure: bool,
    /// The installation's name, a label on every metric.
    pub site: String,
    /// Port for metrics and health, 0 for none.
    pub monitor_port: u16,
    /// Address of the monitor port.
    pub monitor_address: IpAddr,
    /// Where operators give their commands.
    pub admin_socket: AdminSocket,
    /// Where each attempt is written down.
    pub audit_log: Option<PathBuf>,
    /// Log in to the broker as user `provisioner` with this password.
    pub broker_provisioning_password: Option<Secret>,
    /// Names no node may get a certificate for.
    pub cert_deny_list: Vec<Regex>,
    /// What provisioning JWTs are verified with; always there with `features.jwt`.
    pub jwt_verify_cert: Option<VerifyKeySource>,
    /// What server JWTs are signed with; there exactly with `features.ed25519`.
    pub signing: Option<SigningFiles>,
    /// How long a server JWT is valid, unless the helper wishes otherwise or our own token ends before.
    pub server_jwt_validity: Duration,
    /// What is done for a node beyond configuring it.
    pub features: Features,
    /// Where nodes find other versions of Choria; empty for nowhere. Checked with `features.upgrades`.
    pub upgrades_repository: String,
    /// A node that cannot be upgraded is configured as it is.
    pub upgrades_optional: bool,
    /// Longest time for one node.
    pub node_timeout: Duration,
    /// How long a first question waits for its answer.
    pub probe_timeout: Duration,
    /// Nodes asked and silent so far, at most.
    pub probe_window: usize,
    /// Nodes that wait for their turn, at most.
    pub work_queue: usize,
    /// How long running nodes may take to finish when we are told to stop.
    pub drain_timeout: Duration,
    /// Nodes begun per second; `None` for no limit.
    pub rate_limit: Option<u32>,
    /// Longest wait of a node that keeps failing.
    pub retry_max: Duration,
    /// How the helper is run.
    pub helper_mode: HelperMode,
    /// Longest run of the helper.
    pub helper_timeout: Duration,
    /// Largest answer of the helper, in bytes.
    pub helper_output_max: usize,
    /// Pause before `configure`, in which a second answer can betray a forger.
    pub contradiction_wait: Duration,
    /// Who of several daemons in one account provisions.
    pub cooperation: Cooperation,
}

/// Who of several daemons in one account provisions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cooperation {
    /// There is but one.
    Alone,
    /// The one that is elected.
    Elected,
    /// All, each its share of the nodes.
    ActiveActive,
}

/// What is done for a node beyond configuring it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Features {
    /// It shows a provisioning JWT, and that is verified.
    pub jwt: bool,
    /// It is upgraded first when the helper says so.
    pub upgrades: bool,
    /// Which credentials it gets.
    pub enrollment: Enrollment,
}

/// Which credentials a node gets from us.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Enrollment {
    /// None, or those the helper makes up.
    Off,
    /// A certificate for its CSR.
    Pki,
    /// A server JWT for its Ed25519 key.
    OrganizationIssuer,
}

/// What provisioning JWTs are verified with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum VerifyKeySource {
    /// A file that holds a certificate, a public key or a hex Ed25519 key; read for every node, so that it can be replaced.
    File(PathBuf),
    /// An Ed25519 public key.
    Ed25519([u8; 32]),
}

/// Where the log goes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LogTarget {
    /// Standard output.
    Stdout,
    /// Standard error.
    Stderr,
    /// Nowhere.
    Discard,
    /// A file, appended to.
    File(PathBuf),
}

impl LogTarget {
    /// The file, if it is one.
    pub fn path(&self) -> Option<&Path> {
        match self {
            LogTarget::File(path) => Some(path),
            LogTarget::Stdout | LogTarget::Stderr | LogTarget::Discard => None,
        }
    }
}

/// Where operators give their commands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AdminSocket {
    /// Nothing was said: where our package makes a directory for it, if there is one.
    Usual,
    /// Nowhere.
    Off,
    /// There.
    At(PathBuf),
}

/// How the helper is run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HelperMode {
    /// Started for each node.
    Exec,
    /// Started once and asked about many nodes.
    Persistent,
}

/// How log lines look.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogFormat {
    /// JSON in a file, text elsewhere.
    Auto,
    /// `key=value` pairs.
    Text,
    /// One JSON object a line.
    Json,
}

/// Everything that is configured, and what may not be meant as it is written.
#[derive(Debug)]
pub struct Settings {
    /// From the YAML file.
    pub config: Config,
    /// From Choria's client file.
    pub choria: ChoriaConfig,
    /// Worth a line in the log.
    pub warnings: Vec<Finding>,
    /// Where the settings of the YAML file are written.
    pub places: Places,
}

/// Where settings come from: at the start, and at each reload.
#[derive(Debug, Clone)]
pub struct Source {
    /// The provisioner's own file.
    pub yaml: PathBuf,
    /// Choria's client file.
    pub client: PathBuf,
    /// What they depend on beside.
    pub surroundings: Surroundings,
    /// Everything is to be logged, whatever the file says.
    pub is_debug: bool,
}

impl Source {
    /// Reads and checks what is there now.
    ///
    /// # Errors
    ///
    /// [`Report`] with all errors of both files, not the first only.
    pub fn load(&self) -> Result<Settings, Report> {
        let mut settings = load(&self.yaml, &self.client, &self.surroundings)?;
        if self.is_debug {
            settings.config.loglevel = LevelFilter::Debug;
        }
        Ok(settings)
    }
}

/// Reads and checks both files: the YAML at `yaml`, and Choria's at `client`.
///
/// # Errors
///
/// [`Report`] with all errors of both, not the first only.
pub fn load(yaml: &Path, client: &Path, surroundings: &Surroundings) -> Result<Settings, Report> {
    inspect(yaml, client, surroundings).settings()
}

/// Does the same for a site whose helper is this one, whatever its file says of it.
///
/// # Errors
///
/// [`Report`] with all other errors.
pub fn load_with_helper(
    yaml: &Path,
    client: &Path,
    helper: HelperCommand,
    surroundings: &Surroundings,
) -> Result<Settings, Report> {
    read(yaml, client, Some(helper), surroundings).settings()
}

/// What can be made of both files, whatever is wrong with them. Not to be run with unless nothing is: a default stands in for
/// each setting that is wrong.
#[derive(Debug)]
pub struct Inspected {
    /// From the YAML file, if it is one of ours.
    pub config: Option<Config>,
    /// From Choria's client file, if it can be read.
    pub choria: Option<choria::Inspected>,
    /// Where the settings of the YAML file are written.
    pub places: Places,
    /// All that is wrong or strange.
    pub report: Report,
}

/// Where settings are written.
#[derive(Debug, Default)]
pub struct Places {
    yaml: PathBuf,
    client: PathBuf,
    lines: BTreeMap<&'static str, usize>,
}

impl Places {
    /// The files themselves, by the flags that name them.
    pub fn files(&self) -> Vec<(&'static str, &Path)> {
        vec![("--config", &self.yaml), ("--choria-config", &self.client)]
    }

    /// What is to be said of the setting `key`, with its place.
    pub fn finding(&self, key: &str, text: impl fmt::Display) -> Finding {
        Finding {
            file: self.yaml.display().to_string(),
            line: self.lines.get(key).copied(),
            text: format!("{key}: {text}"),
            is_grave: false,
        }
    }
}

impl Inspected {
    fn settings(self) -> Result<Settings, Report> {
        let Inspected { config, choria, places, report } = self;
        match (config, choria.and_then(|inspected| inspected.config)) {
            (Some(config), Some(choria)) if report.errors.is_empty() => {
                Ok(Settings { config, choria, warnings: report.warnings, places })
            }
            _ => Err(report),
        }
    }
}

/// Reads and checks both files as [`load`] does, and goes on with what is right in them.
pub fn inspect(yaml: &Path, client: &Path, surroundings: &Surroundings) -> Inspected {
    read(yaml, client, None, surroundings)
}

/// `helper` takes the place of the one in the file.
fn read(
    yaml: &Path,
    client: &Path,
    helper: Option<HelperCommand>,
    surroundings: &Surroundings,
) -> Inspected {
    let mut report = Report::new(yaml.display().to_string());
    let file = read_yaml(yaml, &mut report);
    let lines = file.as_ref().map(File::lines).unwrap_or_default();
    let places = Places { yaml: yaml.to_path_buf(), client: client.to_path_buf(), lines };
    let choria = read_client(client, file.as_ref(), surroundings, &mut report);
    let config = file.map(|file| Config::check(file, helper, &mut report));
    report.append(choria.1);
    Inspected { config, choria: choria.0, places, report }
}

/// Reads the client file at `path` for the kind of network that the YAML says it is, whatever else is wrong with that.
fn read_client(
    path: &Path,
    yaml: Option<&File>,
    surroundings: &Surroundings,
    yaml_report: &mut Report,
) -> (Option<choria::Inspected>, Report) {
    let is_unread = |key: &str| yaml.is_none_or(|file| file.unread.contains(&key));
    let is_login_unread = is_unread("broker_provisioning_password");
    let password = match yaml {
        // There is one.
        Some(_) if is_login_unread => Some(Secret::new("unread")),
        _ => yaml.and_then(File::password),
    };
    let inspect = |is_insecure| {
        let network = Network {
            is_insecure,
            is_elected: yaml
                .and_then(|file| file.leader_election.as_ref())
                .is_some_and(|at| at.value),
            password: password.as_ref(),
        };
        let mut report = Report::new(path.display().to_string());
        let mut inspected = ChoriaConfig::inspect(path, network, surroundings, &mut report);
        // Without it no broker would let us in, which is no news.
        if let (true, Some(inspected)) = (is_login_unread, &mut inspected) {
            inspected.config = None;
        }
        (inspected, report)
    };
    // What a secure network lacks would be news of a mistake that may not have been made, and so would be what has no effect in
    // an insecure one.
    let inspect_neither = || {
        let (mut inspected, mut report) = inspect(true);
        report.warnings.clear();
        if let Some(inspected) = &mut inspected {
            inspected.config = None;
        }
        (inspected, report)
    };
    if is_unread("choria_insecure") {
        return inspect_neither();
    }
    let (found, report) = inspect(yaml.is_some_and(File::is_insecure));
    let misspelt = yaml.into_iter().flat_map(|file| &file.misspelt);
    let Some(misspelt) =
        misspelt.into_iter().find(|key| key.meant == "choria_insecure" && key.is_on)
    else {
        return (found, report);
    };
    let (found_unsecured, unsecured) = inspect_neither();
    match report.errors.iter().find(|error| !unsecured.errors.contains(error)) {
        None => (found, report),
        Some(follows) => {
            // One mistake, said once.
            let Misspelt { line, written, .. } = misspelt;
            yaml_report.warnings.retain(|warning| warning.line != Some(*line));
            let text = format!(
                "{written}: unknown key; did you mean `choria_insecure`? Without that {follows}"
            );
            yaml_report.error(*line, text);
            (found_unsecured, unsecured)
        }
    }
}

/// Reads where operators give their commands from the YAML at `path`, and nothing else: whoever gives one need not be able to
/// read all that the daemon reads.
///
/// # Errors
///
/// [`Report`] if the file can't be read, or is no YAML of ours.
pub fn admin_socket_of(path: &Path) -> Result<AdminSocket, Report> {
    let mut report = Report::new(path.display().to_string());
    let file = read_yaml(path, &mut report);
    file.map(|file| admin_socket(file.admin_socket)).ok_or(report)
}

/// Reads the YAML at `path` as it is written; `None` only with an error.
fn read_yaml(path: &Path, report: &mut Report) -> Option<File> {
    match read_file(path) {
        Ok(bytes) => File::parse(&bytes, report),
        Err(error) => {
            report.unreadable(&error);
            None
        }
    }
}

impl Config {
    /// The bounds of the helper's runs.
    pub fn helper_limits(&self) -> helper::Limits {
        helper::Limits { timeout: self.helper_timeout, output_max: self.helper_output_max }
    }

    /// Reads and checks the YAML in `bytes`; what is wrong or strange goes to `report`.
    ///
    /// `None` exactly if there was an error.
    pub fn parse(bytes: &[u8], report: &mut Report) -> Option<Config> {
        let errors = report.errors.len();
        // Where there are no settings, none is missing.
        let file = File::parse(bytes, report)?;
        let config = Config::check(file, None, report);
        (report.errors.len() == errors).then_some(config)
    }

    /// A default stands in for what is wrong, and `given` for the helper in the file.
    fn check(file: File, given: Option<HelperCommand>, report: &mut Report) -> Config {
        let choria_insecure = file.is_insecure();
        let broker_provisioning_password = file.password();
        let wanted = Wanted::of(&file, report);
        check_unused(&file, wanted, report);
        let features = wanted.features();
        // What can't be read is there, and what depends on it may be right.
        let is_known = |key: &str| !file.unread.contains(&key);
        warn_of_margins("token", file.token.as_ref(), report);
        let password = file.broker_provisioning_password.as_ref();
        warn_of_margins("broker_provisioning_password", password, report);
        if is_known("token") {
            check_token(file.token.as_ref(), wanted.verified(), report);
        }
        let jwt_verify_cert =
            jwt_verify_cert(file.jwt_verify_cert, wanted, is_known("jwt_verify_cert"), report);
        let signing = signing::Written {
            key: file.jwt_signing_key,
            token: file.jwt_signing_token,
            validity: file.server_jwt_validity,
        };
        let upgrades_optional = file.upgrades_optional.is_some_and(|at| at.value);
        let interval = interval(file.interval, report);
        let retry_least = if is_known("interval") { interval } else { secs(1) };
        let helper_timeout =
            bounded("helper_timeout", file.helper_timeout, secs(10), ms(100)..=secs(600), report);
        let helper_least = if is_known("helper_timeout") { helper_timeout } else { secs(0) };
        Config {
            workers: workers(file.workers, report),
            interval,
            logfile: log_target(file.logfile),
            loglevel: log_level(file.loglevel, report),
            log_format: log_format(file.log_format, report),
            token: file.token.map_or_else(|| Secret::new(""), |token| token.value),
            lifecycle_component: lifecycle_component(file.lifecycle_component, report),
            choria_insecure,
            site: file.site.map_or_else(String::new, |at| at.value),
            monitor_port: bounded("monitor_port", file.monitor_port, 0, 0..=65_535, report) as u16,
            monitor_address: monitor_address(file.monitor_address, report),
            admin_socket: admin_socket(file.admin_socket),
            audit_log: file
                .audit_log
                .map(|at| PathBuf::from(at.value))
                .filter(|path| !path.as_os_str().is_empty()),
            broker_provisioning_password,
            cert_deny_list: cert_deny_list(file.cert_deny_list, report),
            server_jwt_validity: signing::validity(&signing, wanted.ed25519 == Switch::On, report),
            signing: match wanted.ed25519 {
                Switch::Off => None,
                Switch::Unknown if signing.key.is_none() => None,
                Switch::On if !is_known("jwt_signing_key") => None,
                Switch::On | Switch::Unknown => {
                    signing::signing(signing, jwt_verify_cert.as_ref(), unix_time(), report)
                }
            },
            jwt_verify_cert,
            features,
            upgrades_repository: upgrades_repository(
                file.upgrades_repository,
                features.upgrades && is_known("upgrades_repository"),
                upgrades_optional,
                report,
            ),
            upgrades_optional,
            node_timeout: node_timeout(file.node_timeout, helper_least, report),
            probe_timeout: bounded(
                "probe_timeout",
                file.probe_timeout,
                secs(3),
                ms(100)..=secs(60),
                report,
            ),
            probe_window: bounded("probe_window", file.probe_window, 1_024, 1..=100_000, report)
                as usize,
            work_queue: bounded("work_queue", file.work_queue, 50_000, 1..=1_000_000, report)
                as usize,
            drain_timeout: bounded(
                "drain_timeout",
                file.drain_timeout,
                secs(30),
                secs(0)..=secs(600),
                report,
            ),
            rate_limit: match bounded("rate_limit", file.rate_limit, 0, 0..=10_000, report) {
                0 => None,
                limit => Some(limit as u32),
            },
            retry_max: retry_max(file.retry_max, retry_least, report),
            helper_mode: helper_mode(file.helper_mode, report),
            helper_timeout,
            helper_output_max: bounded(
                "helper_output_max",
                file.helper_output_max,
                4 << 20,
                1 << 10..=64 << 20,
                report,
            ) as usize,
            contradiction_wait: bounded(
                "contradiction_wait",
                file.contradiction_wait,
                secs(0),
                secs(0)..=secs(10),
                report,
            ),
            cooperation: cooperation(file.leader_election, file.active_active, wanted, report),
            helper: given
                .or_else(|| helper(file.helper, is_known("helper"), report))
                .unwrap_or_else(HelperCommand::nothing),
        }
    }
}

impl File {
    fn is_insecure(&self) -> bool {
        self.choria_insecure.as_ref().is_some_and(|at| at.value)
    }

    /// `broker_provisioning_password`, if there is one.
    fn password(&self) -> Option<Secret> {
        let password = self.broker_provisioning_password.as_ref().map(|at| at.value.clone());
        password.filter(|password| !password.expose().is_empty())
    }
}

/// Says of every setting that does nothing in this file what would make it count.
fn check_unused(file: &File, wanted: Wanted, report: &mut Report) {
    const OF_THE_ORIGINAL: &str = ", as in the original";
    const NO_JWT: &str = " without `features.jwt`: nodes show no provisioning JWT, and anybody may claim to be one of them; `jwt: true` below `features:` verifies them";
    const NO_SERVER_JWT: &str = " without `features.ed25519`: nodes get no server JWT";
    const NO_CSR: &str = " without `features.pki`: nodes make no certificate request";
    const NO_UPGRADE: &str = " without `features.upgrades`: no node is upgraded";
    const NO_MONITOR: &str = " without `monitor_port`: nothing listens there";

    fn is_written<T>(setting: &Option<At<T>>, is_something: impl Fn(&T) -> bool) -> Option<usize> {
        setting.as_ref().filter(|at| is_something(&at.value)).map(|at| at.line)
    }
    let text = |setting| is_written(setting, |text: &String| !text.is_empty());
    let counts = |feature: Switch| feature != Switch::Off;
    let (has_jwt, is_issuer) = (counts(wanted.verified()), counts(wanted.ed25519));
    let (has_csr, has_upgrade) = (counts(wanted.pki), counts(wanted.upgrades));
    let has_monitor = is_written(&file.monitor_port, |port| *port != 0).is_some()
        || file.unread.contains(&"monitor_port");
    let validity = is_written(&file.server_jwt_validity, |_| true);
    let deny = is_written(&file.cert_deny_list, |list| !list.is_empty());
    let optional = is_written(&file.upgrades_optional, |is_optional| *is_optional);
    for (counts, key, line, why) in [
        (false, "broker_port", is_written(&file.broker_port, |_| true), OF_THE_ORIGINAL),
        (false, "rego_policy", is_written(&file.rego_policy, |_| true), OF_THE_ORIGINAL),
        (has_jwt, "jwt_verify_cert", text(&file.jwt_verify_cert), NO_JWT),
        (is_issuer, "jwt_signing_key", text(&file.jwt_signing_key), NO_SERVER_JWT),
        (is_issuer, "jwt_signing_token", text(&file.jwt_signing_token), NO_SERVER_JWT),
        (is_issuer, "server_jwt_validity", validity, NO_SERVER_JWT),
        (has_csr, "cert_deny_list", deny, NO_CSR),
        (has_upgrade, "upgrades_repository", text(&file.upgrades_repository), NO_UPGRADE),
        (has_upgrade, "upgrades_optional", optional, NO_UPGRADE),
        (has_monitor, "monitor_address", text(&file.monitor_address), NO_MONITOR),
    ] {
        let (false, Some(line)) = (counts, line) else { continue };
        let text = format!("{key}: has no effect{why}");
        match key {
            // Whoever names one relies on it.
            "jwt_verify_cert" => report.warn_gravely(line, text),
            _ => report.warn(line, text),
        }
    }
}

/// Warns of a provisioning token that is missing. An empty one says that there is none, which is so where nodes were built without.
///
/// Source: `util.go` in go-choria's `providers/agent/mcorpc/golang/provision`.
fn check_token(written: Option<&At<Secret>>, verified: Switch, report: &mut Report) {
    if written.is_some_and(|at| !at.value.expose().is_empty()) {
        return;
    }
    let line = written.map(|at| at.line);
    let none = match (verified, line) {
        (Switch::On, _) => "",
        (Switch::Off, None) => "; if yours know none, `token: ''` says so",
        (Switch::Off, Some(_)) | (Switch::Unknown, _) => return,
    };
    report.warn(
        line,
        format!(
            "token: not set; nodes with a provisioning JWT refuse every request without the token in its claim `cht`: set it to that{none}"
        ),
    );
}

/// Warns of a secret that begins or ends with what nobody sees.
fn warn_of_margins(key: &str, written: Option<&At<Secret>>, report: &mut Report) {
    if let Some(At { line, value }) = written
        && value.expose().trim() != value.expose()
    {
        let text = format!("{key}: white space at its beginning or end is a part of it");
        report.warn(*line, text);
    }
}

/// What a switch says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Switch {
    On,
    Off,
    /// Nobody knows: what is written there is wrong. That has been said, and what would follow from it must not be.
    Unknown,
}

/// The features as they are wanted.
#[derive(Debug, Clone, Copy)]
struct Wanted {
    jwt: Switch,
    pki: Switch,
    ed25519: Switch,
    upgrades: Switch,
}

impl Wanted {
    fn of(file: &File, report: &mut Report) -> Wanted {
        let Some(At { value: written, .. }) = &file.features else {
            let all = if file.unread.contains(&"features") { Switch::Unknown } else { Switch::Off };
            return Wanted { jwt: all, pki: all, ed25519: all, upgrades: all };
        };
        let switch = |key: &str, flag: &Option<At<bool>>| match flag {
            Some(At { value: true, .. }) => Switch::On,
            None if written.unread.contains(&key) => Switch::Unknown,
            Some(At { value: false, .. }) | None => Switch::Off,
        };
        let mut wanted = Wanted {
            jwt: switch("jwt", &written.jwt),
            pki: switch("pki", &written.pki),
            ed25519: switch("ed25519", &written.ed25519),
            upgrades: switch("upgrades", &written.upgrades),
        };
        if (wanted.pki, wanted.ed25519) == (Switch::On, Switch::On) {
            let line = written.ed25519.as_ref().map(|flag| flag.line);
            report.error(line, "features: can only enable one of `pki` and `ed25519`");
            (wanted.pki, wanted.ed25519) = (Switch::Unknown, Switch::Unknown);
        }
        wanted
    }

    /// Whether provisioning JWTs are verified. Without that anybody could have a server JWT made, so one feature brings the other.
    fn verified(self) -> Switch {
        match (self.jwt, self.ed25519) {
            (Switch::On, _) | (_, Switch::On) => Switch::On,
            (Switch::Off, Switch::Off) => Switch::Off,
            (Switch::Unknown, _) | (_, Switch::Unknown) => Switch::Unknown,
        }
    }

    /// What is not known is off: then there is an error, and nobody runs with these.
    fn features(self) -> Features {
        Features {
            jwt: self.verified() == Switch::On,
            upgrades: self.upgrades == Switch::On,
            enrollment: match (self.pki, self.ed25519) {
                (Switch::On, _) => Enrollment::Pki,
                (_, Switch::On) => Enrollment::OrganizationIssuer,
                (Switch::Off | Switch::Unknown, Switch::Off | Switch::Unknown) => Enrollment::Off,
            },
        }
    }
}

fn cooperation(
    leader_election: Option<At<bool>>,
    active_active: Option<At<bool>>,
    wanted: Wanted,
    report: &mut Report,
) -> Cooperation {
    let is_on = |written: Option<At<bool>>| written.filter(|at| at.value).map(|at| at.line);
    match (is_on(leader_election), is_on(active_active)) {
        (None, None) => Cooperation::Alone,
        (Some(_), None) => Cooperation::Elected,
        (None, Some(line)) => {
            if [wanted.jwt, wanted.pki, wanted.ed25519].iter().all(|one| *one == Switch::Off) {
                let text = "active_active: without `features.jwt`, `features.pki` and `features.ed25519` a node is not locked before it is configured: the helper may run twice for one that changes hands";
                report.warn(line, text.to_owned());
            }
            Cooperation::ActiveActive
        }
        (Some(_), Some(line)) => {
            let text =
                "active_active: excludes `leader_election`: either one daemon provisions or all do";
            report.error(line, text.to_owned());
            Cooperation::Elected
        }
    }
}

fn workers(written: Option<At<i64>>, report: &mut Report) -> usize {
    let cpus = thread::available_parallelism().map_or(1, |cpus| cpus.get());
    match bounded("workers", written, 0, 0..=WORKERS_MAX, report) {
        0 => cpus.min(WORKERS_MAX as usize),
        workers => workers as usize,
    }
}

fn interval(written: Option<At<Duration>>, report: &mut Report) -> Duration {
    let line = written.as_ref().map(|at| at.line);
    let interval = written.map_or(secs(60), |at| at.value);
    if interval < secs(1) {
        report.error(line, format!("interval: {} is less than 1s", words(interval)));
    } else if interval < secs(60) {
        let text = format!(
            "interval: {} is less than the minute that the original demands; every discovery makes every waiting node answer",
            words(interval)
        );
        report.warn(line, text);
    }
    interval
}

fn log_target(written: Option<At<String>>) -> LogTarget {
    let text = written.map_or_else(String::new, |at| at.value);
    match text.to_ascii_lowercase().as_str() {
        "" | "stdout" => LogTarget::Stdout,
        "stderr" => LogTarget::Stderr,
        "discard" => LogTarget::Discard,
        _ => LogTarget::File(PathBuf::from(text)),
    }
}

fn admin_socket(written: Option<At<String>>) -> AdminSocket {
    match written {
        None => AdminSocket::Usual,
        Some(At { value, .. }) if value.is_empty() => AdminSocket::Off,
        Some(At { value, .. }) => AdminSocket::At(PathBuf::from(value)),
    }
}

fn log_level(written: Option<At<String>>, report: &mut Report) -> LevelFilter {
    let Some(At { line, value }) = written else { return LevelFilter::Info };
    match value.to_ascii_lowercase().as_str() {
        "debug" => LevelFilter::Debug,
        "" | "info" => LevelFilter::Info,
        "warn" | "warning" => LevelFilter::Warn,
        "error" => LevelFilter::Error,
        // What is fatal goes to standard error and ends the process; nothing less is wanted.
        "fatal" => LevelFilter::Off,
        _ => {
            let wanted = "debug, info, warn, error or fatal";
            report.error(line, format!("loglevel: found {value:?}, wanted {wanted}"));
            LevelFilter::Info
        }
    }
}

fn helper_mode(written: Option<At<String>>, report: &mut Report) -> HelperMode {
    let Some(At { line, value }) = written else { return HelperMode::Exec };
    match value.to_ascii_lowercase().as_str() {
        "" | "exec" => HelperMode::Exec,
        "persistent" => HelperMode::Persistent,
        _ => {
            let wanted = "exec or persistent";
            report.error(line, format!("helper_mode: found {value:?}, wanted {wanted}"));
            HelperMode::Exec
        }
    }
}

fn log_format(written: Option<At<String>>, report: &mut Report) -> LogFormat {
    let Some(At { line, value }) = written else { return LogFormat::Auto };
    match value.to_ascii_lowercase().as_str() {
        "" | "auto" => LogFormat::Auto,
        "text" => LogFormat::Text,
        "json" => LogFormat::Json,
        _ => {
            report.error(line, format!("log_format: found {value:?}, wanted auto, text or json"));
            LogFormat::Auto
        }
    }
}

fn lifecycle_component(written: Option<At<String>>, report: &mut Report) -> String {
    match written {
        Some(At { line, value }) if !value.is_empty() => {
            let is_bad =
                |c: char| matches!(c, '.' | '>' | '*') || c.is_whitespace() || c.is_control();
            if value.contains(is_bad) {
                report.error(
                    line,
                    format!(
                        "lifecycle_component: {value:?} must not hold `.`, `>`, `*` or white space"
                    ),
                );
            }
            value
        }
        _ => "provision_mode_server".to_string(),
    }
}

fn monitor_address(written: Option<At<String>>, report: &mut Report) -> IpAddr {
    // The unspecified IPv6 address takes IPv4 as well; whoever binds falls back where there is no IPv6.
    const ALL: IpAddr = IpAddr::V6(std::net::Ipv6Addr::UNSPECIFIED);
    let Some(At { line, value }) = written else { return ALL };
    let bare = value.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(&value);
    match bare {
        "" => ALL,
        bare => bare.parse().unwrap_or_else(|_| {
            let remedy = match bare.parse::<SocketAddr>().or_else(|_| value.parse()) {
                Ok(_) => "its port belongs to `monitor_port`",
                Err(_) => "wanted one such as 127.0.0.1 or ::1",
            };
            report.error(line, format!("monitor_address: {value:?} is no address; {remedy}"));
            ALL
        }),
    }
}

fn cert_deny_list(written: Option<At<Vec<At<String>>>>, report: &mut Report) -> Vec<Regex> {
    let written = written.map(|at| at.value).filter(|list| !list.is_empty());
    let written = written.unwrap_or_else(|| {
        let default = |pattern: &&str| At { line: 0, value: pattern.to_string() };
        DENY_DEFAULT.iter().map(default).collect()
    });
    let mut patterns = Vec::new();
    for At { line, value } in written {
        // The original takes `/x/` and `//x//` for `x`, but leaves `//` and `/` alone.
        let inner = value.strip_prefix('/').and_then(|rest| rest.strip_suffix('/'));
        let pattern = match inner {
            Some(inner) if !inner.is_empty() && !inner.contains('\n') => value.trim_matches('/'),
            _ => &value,
        };
        if pattern.is_empty() {
            report.error(line, "cert_deny_list: an empty expression would deny every node");
            continue;
        }
        match Regex::new(&from_go(pattern)) {
            Ok(regex) => patterns.push(regex),
            Err(error) => {
                // The crate draws a picture over several lines; its last line says what is wrong.
                let error = error.to_string();
                let reason = error.lines().last().unwrap_or_default().trim_start_matches("error: ");
                let remedy = match pattern {
                    _ if pattern.starts_with('*') => "; any text is `.*`",
                    // Go knows it.
                    _ if pattern.contains(r"\Q") => {
                        r"; instead of \Q and \E a backslash goes before each sign, as in \."
                    }
                    _ => "",
                };
                // As it is written, or each backslash in it would be two.
                let value = value.replace(char::is_control, "?");
                report.error(
                    line,
                    format!(
                        "cert_deny_list: \"{value}\" is no regular expression: {reason}{remedy}"
                    ),
                );
            }
        }
    }
    patterns
}

fn jwt_verify_cert(
    written: Option<At<String>>,
    wanted: Wanted,
    is_known: bool,
    report: &mut Report,
) -> Option<VerifyKeySource> {
    let Some(At { line, value }) = written.filter(|at| !at.value.is_empty()) else {
        if wanted.verified() == Switch::On && is_known {
            let feature = if wanted.ed25519 == Switch::On { "ed25519" } else { "jwt" };
            let text = format!("jwt_verify_cert: must be set when `features.{feature}` is on");
            report.error(None, text);
        }
        return None;
    };
    let path = Path::new(&value);
    let is_looked_at = wanted.verified() != Switch::Off;
    // A file wins over a key, as in the original.
    if !path.exists()
        && let Some(key) = hex_key(&value)
    {
        if is_looked_at && let Err(error) = VerifyKey::from_ed25519(&key) {
            report.error(line, format!("jwt_verify_cert: {value} is no key: {error}"));
        }
        return Some(VerifyKeySource::Ed25519(key));
    }
    // An unused key file may be missing: the original never looks at it.
    if is_looked_at && let Err(why) = check_verify_key(path, report) {
        report.error(line, format!("jwt_verify_cert: {value} {why}"));
    }
    Some(VerifyKeySource::File(path.to_path_buf()))
}

/// What is wrong with the key in the file at `path`. It is read again for every node, but a wrong one would fail each of
/// them.
fn check_verify_key(path: &Path, report: &mut Report) -> Result<(), String> {
    let content = read_file(path).map_err(|error| {
        report.denied |= error.kind() == io::ErrorKind::PermissionDenied;
        format!("is no readable file ({error}), nor 64 hex digits")
    })?;
    match VerifyKey::from_file(&String::from_utf8_lossy(&content)) {
        Ok(_) => Ok(()),
        Err(error) => Err(format!(
            "holds no key ({error}); wanted is the certificate or public key of whoever signed the provisioning JWTs: RSA in PEM, or Ed25519 in hex"
        )),
    }
}

fn upgrades_repository(
    written: Option<At<String>>,
    is_needed: bool,
    is_optional: bool,
    report: &mut Report,
) -> String {
    let Some(At { line, value }) = written.filter(|at| !at.value.is_empty()) else {
        if is_needed && is_optional {
            report.warn(None, "upgrades_repository: is not set, so no node is upgraded");
        } else if is_needed {
            report.error(
                None,
                "upgrades_repository: must be set when `features.upgrades` is on and `upgrades_optional` is not",
            );
        }
        return String::new();
    };
    let scheme = value.split_once("://").map_or("", |(scheme, _)| scheme);
    let is_http = ["http", "https"].iter().any(|known| scheme.eq_ignore_ascii_case(known));
    if is_needed && (!is_http || value.contains(|c: char| c.is_whitespace() || c.is_control())) {
        report.error(
            line,
            format!("upgrades_repository: found {value:?}, wanted a URL such as https://repo.example.net/choria"),
        );
    }
    value
}

fn hex_key(text: &str) -> Option<[u8; 32]> {
    if text.len() != 64 || !text.bytes().all(|c| c.is_ascii_hexdigit()) {
        return None;
    }
    let mut key = [0; 32];
    for (byte, digits) in key.iter_mut().zip(text.as_bytes().chunks(2)) {
        let digits = std::str::from_utf8(digits).ok()?;
        *byte = u8::from_str_radix(digits, 16).ok()?;
    }
    Some(key)
}

fn node_timeout(
    written: Option<At<Duration>>,
    helper_timeout: Duration,
    report: &mut Report,
) -> Duration {
    let least = helper_timeout + secs(60);
    let line = written.as_ref().map(|at| at.line);
    let value = written.map_or(secs(120), |at| at.value);
    if value < least {
        let default = if line.is_none() { ", its default," } else { "" };
        report.error(
            line,
            format!(
                "node_timeout: {}{default} must be at least `helper_timeout` and a minute, {}",
                words(value),
                words(least)
            ),
        );
    } else if value > secs(3600) {
        report.error(line, format!("node_timeout: {} is more than 1h", words(value)));
    }
    value
}

fn retry_max(written: Option<At<Duration>>, interval: Duration, report: &mut Report) -> Duration {
    // Existing files know nothing of this setting, and may have an interval of days.
    let default = secs(30 * 60).max(interval);
    bounded("retry_max", written, default, interval..=secs(24 * 3600).max(interval), report)
}

fn helper(
    written: Option<At<String>>,
    is_known: bool,
    report: &mut Report,
) -> Option<HelperCommand> {
    let Some(At { line, value }) = written.filter(|at| !at.value.trim().is_empty()) else {
        if is_known {
            report.error(None, "helper: must be set; it decides what nodes become");
        }
        return None;
    };
    match HelperCommand::parse(&value) {
        Ok(command) => Some(command),
        Err(error) => {
            report.denied |= matches!(error, CommandError::Denied { .. });
            report.error(line, format!("helper: {error}"));
            None
        }
    }
}

/// The value written, or the default; a value out of bounds is an error, and the default stands in for it.
fn bounded<T: PartialOrd + Shown>(
    key: &str,
    written: Option<At<T>>,
    default: T,
    bounds: RangeInclusive<T>,
    report: &mut Report,
) -> T {
    let Some(At { line, value }) = written else { return default };
    if bounds.contains(&value) {
        return value;
    }
    let (least, most) = (bounds.start().shown(), bounds.end().shown());
    report.error(line, format!("{key}: {} is not within {least} and {most}", value.shown()));
    default
}

/// How a bound is written in a message.
trait Shown {
    fn shown(&self) -> String;
}

impl Shown for i64 {
    fn shown(&self) -> String {
        self.to_string()
    }
}

impl Shown for Duration {
    fn shown(&self) -> String {
        words(*self)
    }
}

fn secs(count: u64) -> Duration {
    Duration::from_secs(count)
}

fn ms(count: u64) -> Duration {
    Duration::from_millis(count)
}

/// Reads a file that people write; one that is larger than any of these ever is, is an error.
pub(crate) fn read_file(path: &Path) -> io::Result<Vec<u8>> {
    // Room for a key or a token.
    let mut bytes = Vec::with_capacity(4096);
    open(path)?.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > FILE_BYTES_MAX {
        return Err(io::Error::other(format!("larger than {FILE_BYTES_MAX} bytes")));
    }
    Ok(bytes)
}

/// Reads a file that holds a secret, which is wiped from memory when it is no longer needed.
pub(crate) fn read_secret(path: &Path) -> io::Result<Zeroizing<String>> {
    let mut file = open(path)?;
    let known = file.metadata()?.len().min(SECRET_BYTES_MAX);
    // Some file systems don't know how large it is, and it may just have been replaced.
    for len_max in [known, SECRET_BYTES_MAX] {
        // Room for all of it, since the old place is not wiped when a text grows, and for no more: to wipe costs as much as to fill.
        let room = len_max + 1;
        let mut text = Zeroizing::new(String::with_capacity(room as usize));
        file.rewind()?;
        (&file).take(room).read_to_string(&mut text)?;
        if text.len() as u64 <= len_max {
            return Ok(text);
        }
    }
    Err(io::Error::other(format!("larger than {SECRET_BYTES_MAX} bytes")))
}

/// Opens a file to be read, and nothing else: a pipe would hold us until somebody writes into it, and most of our files are
/// read more than once.
fn open(path: &Path) -> io::Result<OpenFile> {
    // Opening a pipe waits, too.
    let flags = OFlags::NONBLOCK.bits() as i32;
    let file = OpenFile::options().read(true).custom_flags(flags).open(path)?;
    match file.metadata()?.file_type() {
        kind if kind.is_file() => Ok(file),
        kind if kind.is_dir() => Err(io::Error::from(rustix::io::Errno::ISDIR)),
        // Most files are read more than once, which no pipe stands.
        kind => Err(file_kind::refused(kind, "a regular file")),
    }
}

/// Nobody but us needs the key; a group that reads it may be ours.
pub(crate) fn is_open_to_all(path: &Path) -> bool {
    path.metadata().is_ok_and(|metadata| metadata.permissions().mode() & 0o007 != 0)
}

/// Bytes of a file with a token, a key or a seed, as for the tokens themselves.
const SECRET_BYTES_MAX: u64 = 64 * 1024;

/// Bytes of a configuration or key file.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// Nodes worked on at once, at most: each may cost eight threads when nodes fall silent.
const WORKERS_MAX: i64 = 1_024;

/// Names of people and of privileged programs, which no node may take.
const DENY_DEFAULT: &[&str] =
    &[r"\.privileged.mcollective$", r"\.privileged.choria$", r"\.mcollective$", r"\.choria$"];

#[cfg(test)]
mod tests {
    use std::fmt::Debug;

    use super::*;
    use crate::jwt::testing;

    #[test]
    fn has_the_defaults_of_the_documentation() {
        let (config, warnings) = good("");
        assert!(warnings.is_empty(), "{warnings:?}");
        assert!(config.workers >= 1);
        assert_eq!(config.interval, secs(60));
        assert_eq!(config.logfile, LogTarget::Stdout);
        assert_eq!(config.loglevel, LevelFilter::Info);
        assert_eq!(config.log_format, LogFormat::Auto);
        assert_eq!(config.token.expose(), "s3cret");
        assert_eq!(config.lifecycle_component, "provision_mode_server");
        assert_eq!(config.site, "");
        assert_eq!(config.monitor_port, 0);
        assert!(config.monitor_address.is_unspecified());
        assert_eq!(config.broker_provisioning_password, None);
        let deny: Vec<_> = config.cert_deny_list.iter().map(|regex| regex.as_str()).collect();
        assert_eq!(deny, DENY_DEFAULT);
        assert_eq!(config.jwt_verify_cert, None);
        assert_eq!(config.signing, None);
        assert_eq!(config.server_jwt_validity, secs(365 * 24 * 3_600));
        let off = Features { jwt: false, upgrades: false, enrollment: Enrollment::Off };
        assert_eq!(config.features, off);
        assert_eq!(config.node_timeout, secs(120));
        assert_eq!(config.probe_timeout, secs(3));
        assert_eq!(config.probe_window, 1_024);
        assert_eq!(config.work_queue, 50_000);
        assert_eq!(config.drain_timeout, secs(30));
        assert_eq!(config.rate_limit, None);
        assert_eq!(config.retry_max, secs(1_800));
        assert_eq!(config.helper_timeout, secs(10));
        assert_eq!(config.helper_output_max, 4_194_304);
        assert_eq!(config.contradiction_wait, secs(0));
    }

    #[test]
    fn takes_numbers_in_every_notation() {
        check("workers: 4", |c| c.workers, 4);
        check("workers: 4.0", |c| c.workers, 4);
        check("workers: 0x10", |c| c.workers, 16);
        check("workers: 010", |c| c.workers, 8);
        check("workers: 1e2", |c| c.workers, 100);
        check("workers: !!int '7'", |c| c.workers, 7);
        check("WORKERS: 5", |c| c.workers, 5);
        check("Monitor_Port: 9_900", |c| c.monitor_port, 9900);
        check("monitor_port: 0o23254", |c| c.monitor_port, 9900);
        check("monitor_port: 65535", |c| c.monitor_port, 65_535);
        check("rate_limit: 10000", |c| c.rate_limit, Some(10_000));
        check("rate_limit: 0", |c| c.rate_limit, None);
        check("work_queue: 1", |c| c.work_queue, 1);
        check("probe_window: 100_000", |c| c.probe_window, 100_000);
        check("helper_output_max: 1024", |c| c.helper_output_max, 1_024);
    }

    #[test]
    fn keeps_the_default_for_nothing() {
        check("workers: 0", |c| c.workers >= 1, true);
        check("workers:", |c| c.workers >= 1, true);
        check("interval:", |c| c.interval, secs(60));
        check("interval: ~", |c| c.interval, secs(60));
        check("logfile: null", |c| c.logfile.clone(), LogTarget::Stdout);
        check("features:", |c| c.features.jwt, false);
        check("features: {}", |c| c.features.jwt, false);
        check("features: {jwt: }", |c| c.features.jwt, false);
        check("cert_deny_list: []", |c| c.cert_deny_list.len(), 4);
        check("cert_deny_list:", |c| c.cert_deny_list.len(), 4);
        check(
            "lifecycle_component: ''",
            |c| c.lifecycle_component == "provision_mode_server",
            true,
        );
        check("broker_provisioning_password: ''", |c| c.broker_provisioning_password.clone(), None);
        check("jwt_verify_cert: ''", |c| c.jwt_verify_cert.clone(), None);
        check("admin_socket: ''", |c| c.admin_socket == AdminSocket::Off, true);
        check("admin_socket: /run/x", |c| c.admin_socket == AdminSocket::At("/run/x".into()), true);
        check("audit_log: ''", |c| c.audit_log.is_none(), true);
        check("audit_log: /var/log/x", |c| c.audit_log == Some("/var/log/x".into()), true);
        check("admin_socket:", |c| c.admin_socket == AdminSocket::Usual, true);
        check("", |c| c.helper_mode, HelperMode::Exec);
        check("helper_mode: exec", |c| c.helper_mode, HelperMode::Exec);
        check("helper_mode: Persistent", |c| c.helper_mode, HelperMode::Persistent);
        check("leader_election: no", |c| c.cooperation, Cooperation::Alone);
        check("leader_election: yes", |c| c.cooperation, Cooperation::Elected);
        let off = "active_active: no\nleader_election: yes";
        check(off, |c| c.cooperation, Cooperation::Elected);
        check("active_active: off", |c| c.workers >= 1, true);
        check("features: {ed25519: n, upgrades: false}", |c| c.features.upgrades, false);
    }

    #[test]
    fn takes_booleans_of_yaml_1_1() {
        for word in ["true", "yes", "on", "y", "Y", "YES", "On"] {
            check(
                &format!("features: {{pki: {word}}}"),
                |c| c.features.enrollment,
                Enrollment::Pki,
            );
        }
        for word in ["false", "no", "off", "n", "N", "NO", "Off"] {
            check(
                &format!("features: {{pki: {word}}}"),
                |c| c.features.enrollment,
                Enrollment::Off,
            );
        }
    }

    #[test]
    fn takes_durations() {
        check("interval: 10m", |c| c.interval, secs(600));
        check("interval: \"1h30m\"", |c| c.interval, secs(5_400));
        check("interval: 1d", |c| c.interval, secs(86_400));
        check("interval: 10h", |c| c.retry_max, secs(36_000));
        check("interval: 2w", |c| c.retry_max, secs(14 * 86_400));
        check("probe_timeout: 100ms", |c| c.probe_timeout, ms(100));
        check("drain_timeout: 0", |c| c.drain_timeout, secs(0));
        check("drain_timeout: 0s", |c| c.drain_timeout, secs(0));
        check("contradiction_wait: 10s", |c| c.contradiction_wait, secs(10));
        check("retry_max: 60s", |c| c.retry_max, secs(60));
        check("helper_timeout: 10m\nnode_timeout: 11m", |c| c.node_timeout, secs(660));
        check("node_timeout: 1h", |c| c.node_timeout, secs(3_600));
    }

    #[test]
    fn takes_texts() {
        check("site: 'no'", |c| c.site.clone(), "no".to_string());
        check("site: \"a: b\"", |c| c.site.clone(), "a: b".to_string());
        check("token: s3cr3t", |c| c.token.clone(), Secret::new("s3cr3t"));
        check("logfile: ''", |c| c.logfile.clone(), LogTarget::Stdout);
        check("logfile: STDOUT", |c| c.logfile.clone(), LogTarget::Stdout);
        check("logfile: stderr", |c| c.logfile.clone(), LogTarget::Stderr);
        check("logfile: Discard", |c| c.logfile.clone(), LogTarget::Discard);
        check("logfile: /var/log/X", |c| c.logfile.clone(), LogTarget::File("/var/log/X".into()));
        check("loglevel: debug", |c| c.loglevel, LevelFilter::Debug);
        check("loglevel: ''", |c| c.loglevel, LevelFilter::Info);
        check("loglevel: INFO", |c| c.loglevel, LevelFilter::Info);
        check("loglevel: warn", |c| c.loglevel, LevelFilter::Warn);
        check("loglevel: warning", |c| c.loglevel, LevelFilter::Warn);
        check("loglevel: error", |c| c.loglevel, LevelFilter::Error);
        check("loglevel: fatal", |c| c.loglevel, LevelFilter::Off);
        check("log_format: json", |c| c.log_format, LogFormat::Json);
        check("log_format: TEXT", |c| c.log_format, LogFormat::Text);
        check(
            "monitor_port: 9\nmonitor_address: 127.0.0.1",
            |c| c.monitor_address.to_string(),
            "127.0.0.1".into(),
        );
        check(
            "monitor_port: 9\nmonitor_address: '::1'",
            |c| c.monitor_address.to_string(),
            "::1".into(),
        );
        check(
            "monitor_port: 9\nmonitor_address: '[::1]'",
            |c| c.monitor_address.to_string(),
            "::1".into(),
        );
        check("{site: x, token: z}", |c| c.site.clone(), "x".into());
    }

    #[test]
    fn takes_bare_numbers_and_booleans_for_texts_with_a_warning() {
        let said = |text: &str, value: &str| {
            let (config, warnings) = good(text);
            assert_eq!(config.site, value, "{text}");
            assert_eq!(
                warnings,
                [format!("t.yaml:3: site: {}", warnings[0].split_once("site: ").unwrap().1)]
            );
            warnings[0].clone()
        };
        assert_eq!(
            said("site: 12345", "12345"),
            "t.yaml:3: site: the number 12345 is taken as a text; quotes would say so"
        );
        assert_eq!(
            said("site: no", "no"),
            "t.yaml:3: site: the boolean no is taken as a text; quotes would say so"
        );
        said("site: 010", "010");
        said("site: 4.50", "4.50");
        said("site: 1_000", "1_000");
        said("site: .inf", ".inf");
    }

    #[test]
    fn never_shows_a_secret() {
        let (config, warnings) = good("token: 12345\nbroker_provisioning_password: 0x77");
        assert_eq!(config.token.expose(), "12345");
        let shown = format!("{config:?} {warnings:?}");
        assert!(!shown.contains("12345") && !shown.contains("0x77"), "{shown}");
        assert_eq!(
            warnings[0],
            "t.yaml:3: token: a number is taken as a text; quotes would say so"
        );
        wrong("token: [12345]", &["t.yaml:3: token: found a list, wanted a text"]);
    }

    #[test]
    fn says_what_was_found_and_what_is_wanted() {
        wrong(
            "workers: four",
            &["t.yaml:3: workers: found the text \"four\", wanted a whole number"],
        );
        wrong(
            "workers: \"4\"",
            &["t.yaml:3: workers: found the text \"4\", wanted a whole number"],
        );
        wrong("workers: 4.5", &["t.yaml:3: workers: found the number 4.5, wanted a whole number"]);
        wrong(
            "workers: 1e300",
            &["t.yaml:3: workers: found the number 1e300, wanted a whole number"],
        );
        wrong(
            "workers: .nan",
            &["t.yaml:3: workers: found the number .nan, wanted a whole number"],
        );
        wrong("workers: yes", &["t.yaml:3: workers: found the boolean yes, wanted a whole number"]);
        wrong("workers: [4]", &["t.yaml:3: workers: found a list, wanted a whole number"]);
        wrong(
            "leader_election: 1",
            &["t.yaml:3: leader_election: found the number 1, wanted true or false"],
        );
        wrong(
            "active_active: \"true\"",
            &["t.yaml:3: active_active: found the text \"true\", wanted true or false"],
        );
        wrong(
            "features: true",
            &["t.yaml:3: features: found the boolean true, wanted a map such as `{jwt: true}`"],
        );
        wrong(
            "features: {jwt: x}",
            &["t.yaml:3: features.jwt: found the text \"x\", wanted true or false"],
        );
        wrong(
            "cert_deny_list: foo",
            &["t.yaml:3: cert_deny_list: found the text \"foo\", wanted a list of texts"],
        );
        wrong(
            "cert_deny_list: [{a: b}]",
            &["t.yaml:3: cert_deny_list: found a map, wanted a text"],
        );
        wrong(
            "cert_deny_list: [~]",
            &["t.yaml:3: cert_deny_list: found nothing in the list, wanted a text"],
        );
        wrong("site: {a: b}", &["t.yaml:3: site: found a map, wanted a text"]);
        wrong(
            "interval: [1m]",
            &["t.yaml:3: interval: found a list, wanted a duration such as 90s, 10m or 1h30m"],
        );
    }

    #[test]
    fn refuses_durations_without_meaning() {
        wrong(
            "interval: 60",
            &[
                "t.yaml:3: interval: a duration needs a unit, such as 90s, 10m, 1h30m or 2d, found \"60\"",
            ],
        );
        wrong("interval: 1:30", &["a duration needs a unit"]);
        wrong("interval: soon", &["t.yaml:3: interval: invalid time unit \"soon\""]);
        wrong("interval: 5 min", &["found \"5 min\"; wanted is one such as 90s, 10m, 1h30m or 2d"]);
        wrong("interval: 1year", &["interval: invalid time unit \"year\", known are"]);
        wrong("interval: 5 sec", &["interval: invalid time unit \"sec\", known are"]);
        wrong(
            "interval: 1 m",
            &[
                "t.yaml:3: interval: a duration holds no white space, found \"1 m\"; wanted is one such as",
            ],
        );
        wrong(
            "interval: 1d12h",
            &["t.yaml:3: interval: invalid number \"1d12h\" in a duration; wanted is one such as"],
        );
        wrong("interval: -5m", &["t.yaml:3: interval: a duration must not be negative"]);
        wrong("interval: 999ms", &["t.yaml:3: interval: 999ms is less than 1s"]);
        wrong("interval: 0", &["t.yaml:3: interval: 0s is less than 1s"]);
        wrong(
            "server_jwt_validity: 300y",
            &["t.yaml:3: server_jwt_validity: a duration must be less than 292 years"],
        );
        wrong("server_jwt_validity: 0", &["t.yaml:3: server_jwt_validity: must not be zero"]);
    }

    #[test]
    fn holds_to_the_bounds() {
        wrong("workers: -1", &["t.yaml:3: workers: -1 is not within 0 and 1024"]);
        wrong("workers: 1025", &["workers: 1025 is not within"]);
        wrong("monitor_port: 65536", &["monitor_port: 65536 is not within 0 and 65535"]);
        wrong("monitor_port: -1", &["monitor_port: -1 is not within"]);
        wrong("work_queue: 0", &["work_queue: 0 is not within 1 and 1000000"]);
        wrong("work_queue: 1000001", &["work_queue: 1000001 is not within"]);
        wrong("probe_window: 0", &["probe_window: 0 is not within 1 and 100000"]);
        wrong("probe_timeout: 99ms", &["probe_timeout: 99ms is not within 100ms and 1m"]);
        wrong("probe_timeout: 61s", &["probe_timeout: 1m1s is not within"]);
        wrong("contradiction_wait: 11s", &["contradiction_wait: 11s is not within 0s and 10s"]);
        wrong("drain_timeout: 601s", &["drain_timeout: 10m1s is not within 0s and 10m"]);
        wrong("rate_limit: -1", &["rate_limit: -1 is not within 0 and 10000"]);
        wrong("rate_limit: 10001", &["rate_limit: 10001 is not within"]);
        wrong("retry_max: 59s", &["retry_max: 59s is not within 1m and 24h"]);
        wrong("retry_max: 25h", &["retry_max: 25h is not within 1m and 24h"]);
        wrong("helper_timeout: 99ms", &["helper_timeout: 99ms is not within 100ms and 10m"]);
        wrong(
            "helper_output_max: 1023",
            &["helper_output_max: 1023 is not within 1024 and 67108864"],
        );
        wrong("helper_output_max: 67108865", &["helper_output_max: 67108865 is not within"]);
        wrong(
            "node_timeout: 69s",
            &["t.yaml:3: node_timeout: 1m9s must be at least `helper_timeout` and a minute, 1m10s"],
        );
        wrong("node_timeout: 61m", &["t.yaml:3: node_timeout: 1h1m is more than 1h"]);
        wrong(
            "helper_timeout: 5m",
            &[
                "t.yaml: node_timeout: 2m, its default, must be at least `helper_timeout` and a minute, 6m",
            ],
        );
    }

    #[test]
    fn refuses_values_that_mean_nothing() {
        wrong(
            "loglevel: verbose",
            &["t.yaml:3: loglevel: found \"verbose\", wanted debug, info, warn, error or fatal"],
        );
        wrong(
            "log_format: xml",
            &["t.yaml:3: log_format: found \"xml\", wanted auto, text or json"],
        );
        wrong(
            "lifecycle_component: a.b",
            &["t.yaml:3: lifecycle_component: \"a.b\" must not hold"],
        );
        wrong("lifecycle_component: '>'", &["lifecycle_component: \">\" must not hold"]);
        wrong("lifecycle_component: 'a b'", &["lifecycle_component: \"a b\" must not hold"]);
        wrong("lifecycle_component: \"a\\r\"", &["lifecycle_component: \"a\\r\" must not hold"]);
        wrong(
            "monitor_address: localhost",
            &["t.yaml:3: monitor_address: \"localhost\" is no address"],
        );
        wrong(
            "helper_mode: fast",
            &["t.yaml:3: helper_mode: found \"fast\", wanted exec or persistent"],
        );
        wrong(
            "cert_deny_list: ['(']",
            &["t.yaml:3: cert_deny_list: \"(\" is no regular expression: unclosed group"],
        );
        wrong(
            r"cert_deny_list: ['^foo\Q.bar\E']",
            &[
                r#"cert_deny_list: "^foo\Q.bar\E" is no regular expression: unrecognized escape sequence; instead of \Q and \E a backslash goes before each sign"#,
            ],
        );
        wrong("cert_deny_list: ['*.x']", &["missing expression; any text is `.*`"]);
        wrong(
            "cert_deny_list: ['']",
            &["t.yaml:3: cert_deny_list: an empty expression would deny every node"],
        );
        wrong(
            "cert_deny_list:\n- a\n- '['",
            &["t.yaml:5: cert_deny_list: \"[\" is no regular expression"],
        );
    }

    #[test]
    fn upgrades_need_a_repository_unless_they_are_optional() {
        let url = "https://repo.example.net/choria";
        let on = "features: {upgrades: true}";
        check(&format!("{on}\nupgrades_repository: {url}"), |c| c.upgrades_repository == url, true);
        check(&format!("{on}\nupgrades_repository: HTTP://repo"), |c| c.features.upgrades, true);
        let both = format!("{on}\nupgrades_repository: {url}\nupgrades_optional: yes");
        check(&both, |c| c.upgrades_optional, true);
        wrong(
            on,
            &[
                "t.yaml: upgrades_repository: must be set when `features.upgrades` is on and `upgrades_optional` is not",
            ],
        );
        for bad in ["/srv/choria", "file:///srv/choria", "repo.example.net", "'https://a b'"] {
            wrong(
                &format!("{on}\nupgrades_optional: true\nupgrades_repository: {bad}"),
                &["t.yaml:5: upgrades_repository: found "],
            );
        }
        let (config, warnings) = good(&format!("{on}\nupgrades_optional: true"));
        assert!(config.features.upgrades && config.upgrades_repository.is_empty());
        assert_eq!(warnings.len(), 1, "{warnings:?}");
        assert!(warnings[0].contains("no node is upgraded"), "{warnings:?}");
    }

    #[test]
    fn daemons_share_their_nodes_or_elect_one_of_them() {
        wrong(
            "active_active: yes\nleader_election: yes",
            &["t.yaml:3: active_active: excludes `leader_election`: "],
        );
        let active = "active_active: yes";
        warns(active, "t.yaml:3: active_active: without `features.jwt`, ");
        assert_eq!(good(active).0.cooperation, Cooperation::ActiveActive);
        check(
            &format!("{active}\nfeatures: {{pki: yes}}"),
            |c| c.cooperation,
            Cooperation::ActiveActive,
        );
    }

    #[test]
    fn a_secret_is_read_whole_where_the_system_does_not_know_its_size() {
        let path = Path::new("/proc/version");
        assert_eq!(path.metadata().unwrap().len(), 0);
        assert_eq!(*read_secret(path).unwrap(), std::fs::read_to_string(path).unwrap());
    }

    #[test]
    fn a_value_that_cannot_be_read_is_one_error_and_nothing_follows_from_it() {
        for text in [
            "features: [jwt]\njwt_verify_cert: tests/vectors/captures/insecure/jwt-signer.pem",
            "features: {jwt: ture}",
            "features: {ed25519: ture}\njwt_verify_cert: tests/vectors/captures/issuer/issuer.public",
            "features: {upgrades: ture}\nupgrades_repository: /srv",
            "features: {jwt: on}\njwt_verify_cert: [x]",
            "features: {upgrades: on}\nupgrades_repository: [x]",
            "monitor_port: '9100'\nmonitor_address: '::1'",
            "interval: 5\nretry_max: 30s",
            "helper_timeout: 1\nnode_timeout: 65s",
            "token: [x]",
        ] {
            let mut report = Report::new("t.yaml");
            let config = Config::parse(format!("{}{text}\n", base(text)).as_bytes(), &mut report);
            assert!(config.is_none() && report.errors.len() == 1, "{text}: {report:?}");
            assert_eq!(report.warnings, [], "{text}");
        }
        let mut report = Report::new("t.yaml");
        assert!(Config::parse(b"helper: [a]\ntoken: x\n", &mut report).is_none());
        assert_eq!(report.errors.len(), 1, "{report:?}");
        // What is there can be looked at all the same.
        wrong(
            "features: {ed25519: ture}\njwt_signing_key: /nowhere\njwt_verify_cert: /nowhere",
            &["features.ed25519: found", "jwt_verify_cert: /nowhere", "jwt_signing_key: /nowhere"],
        );
    }

    #[test]
    fn features_that_exclude_each_other_leave_no_setting_without_effect() {
        let text = "features: {ed25519: on, pki: on}\njwt_verify_cert: tests/vectors/captures/issuer/issuer.public\n\
             jwt_signing_key: /nowhere\njwt_signing_token: /nowhere\nserver_jwt_validity: 90d\ncert_deny_list: [a]";
        let mut report = Report::new("t.yaml");
        assert!(Config::parse(format!("{}{text}\n", base(text)).as_bytes(), &mut report).is_none());
        let lines: Vec<_> = report.errors.iter().map(|error| error.line).collect();
        assert_eq!(lines, [Some(3), Some(5), Some(6)], "{report:?}");
        assert_eq!(report.warnings, []);
        // None of them must be set before it is known which one is meant.
        wrong("features: {ed25519: on, pki: on}", &["can only enable one of"]);
    }

    #[test]
    fn a_missing_provisioning_token_is_a_warning_unless_it_is_said_that_there_is_none() {
        let jwt =
            "features: {jwt: on}\njwt_verify_cert: tests/vectors/captures/insecure/jwt-signer.pem";
        let said = |text: &str| {
            let mut report = Report::new("t.yaml");
            Config::parse(format!("helper: /bin/true\n{text}\n").as_bytes(), &mut report).unwrap();
            report.warnings.iter().map(ToString::to_string).collect::<Vec<_>>()
        };
        assert_eq!(said("token: ''"), [""; 0]);
        assert_eq!(said(&format!("token: x\n{jwt}")), [""; 0]);
        for (text, expected) in [
            (String::new(), "t.yaml: token: not set; nodes with a provisioning JWT refuse"),
            (jwt.to_owned(), "t.yaml: token: not set; nodes with a provisioning JWT refuse"),
            (
                format!("token: ''\n{jwt}"),
                "t.yaml:2: token: not set; nodes with a provisioning JWT",
            ),
        ] {
            let warnings = said(&text);
            assert_eq!(warnings.len(), 1, "{warnings:?}");
            assert!(warnings[0].starts_with(expected), "{warnings:?}");
            assert!(warnings[0].contains("`cht`: set it to that"), "{warnings:?}");
        }
    }

    #[test]
    fn a_secret_with_white_space_at_an_end_is_a_warning_that_does_not_show_it() {
        for key in ["token", "broker_provisioning_password"] {
            for value in ["'s3cret '", "' s3cret'", "\"s3cret\\n\""] {
                let mut report = Report::new("t.yaml");
                let token = if key == "token" { "" } else { "token: x\n" };
                let text = format!("helper: /bin/true\n{token}{key}: {value}\n");
                Config::parse(text.as_bytes(), &mut report).unwrap();
                let warnings: Vec<_> = report.warnings.iter().map(ToString::to_string).collect();
                assert_eq!(warnings.len(), 1, "{warnings:?}");
                let expected = format!("{key}: white space at its beginning or end");
                assert!(warnings[0].contains(&expected), "{warnings:?}");
                assert!(!warnings[0].contains("s3cret"), "{warnings:?}");
            }
        }
        assert_eq!(good("broker_provisioning_password: s3 cret").1, [""; 0]);
    }

    #[test]
    fn a_network_is_secure_unless_it_is_said_not_to_be() {
        let mut report = Report::new("t.yaml");
        let yaml = b"helper: /bin/true\ntoken: x\n";
        assert!(!Config::parse(yaml, &mut report).unwrap().choria_insecure);
        let yaml = b"helper: /bin/true\ntoken: x\nchoria_insecure: no\n";
        assert!(!Config::parse(yaml, &mut report).unwrap().choria_insecure);
        assert!(report.errors.is_empty() && report.warnings.is_empty(), "{report:?}");
    }

    #[test]
    fn warns_about_keys_nobody_reads() {
        warns(
            "intervall: 5m",
            "t.yaml:3: intervall: unknown key, ignored; did you mean `interval`?",
        );
        warns(
            "monitor-port: 1",
            "t.yaml:3: monitor-port: unknown key, ignored; did you mean `monitor_port`?",
        );
        warns("Tokne: 1", "t.yaml:3: Tokne: unknown key, ignored; did you mean `token`?");
        warns("whatever: {a: [b]}", "t.yaml:3: whatever: unknown key, ignored");
        warns(
            "features: {jtw: on}",
            "t.yaml:3: features.jtw: unknown key, ignored; did you mean `features.jwt`?",
        );
        warns(
            "PKI: on",
            "t.yaml:3: PKI: unknown key, ignored; did you mean `pki` below `features:`?",
        );
        warns(
            "features.jwt: on",
            "t.yaml:3: features.jwt: unknown key, ignored; did you mean `jwt` below `features:`?",
        );
        warns("broker_port: 4222", "t.yaml:3: broker_port: has no effect, as in the original");
        warns("rego_policy: x", "t.yaml:3: rego_policy: has no effect, as in the original");
        warns("site: “x”", "t.yaml:3: site: its typographic quotes are a part of the text");
        warns("interval: ''", "t.yaml:3: interval: is empty, so its default holds");
        warns("server_jwt_validity: ''", "t.yaml:3: server_jwt_validity: is empty, so");
        warns("interval: 5s", "t.yaml:3: interval: 5s is less than the minute");
        warns("site: x\n---\nsite: y", "t.yaml:4: more documents follow; only the first is read");
    }

    #[test]
    fn warns_of_settings_that_do_nothing_here_and_says_what_would_make_them_count() {
        // What is not used may name what is not there.
        for (text, feature) in [
            ("jwt_verify_cert: /nowhere", "features.jwt"),
            ("jwt_signing_key: /nowhere", "features.ed25519"),
            ("jwt_signing_token: /nowhere", "features.ed25519"),
            ("server_jwt_validity: 90d", "features.ed25519"),
            ("cert_deny_list: [x]", "features.pki"),
            ("upgrades_repository: /srv", "features.upgrades"),
            ("upgrades_optional: yes", "features.upgrades"),
            ("monitor_address: '::1'", "monitor_port"),
        ] {
            let (key, _) = text.split_once(':').unwrap();
            warns(text, &format!("t.yaml:3: {key}: has no effect without `{feature}`: "));
        }
        // Nothing is written, or what holds anyway.
        for text in [
            "jwt_verify_cert: ''",
            "jwt_signing_key:",
            "cert_deny_list: []",
            "upgrades_repository: ''",
            "upgrades_optional: no",
            "monitor_address: ''",
        ] {
            assert_eq!(good(text).1, [""; 0], "{text}");
        }
        assert_eq!(good("features: {pki: on}\ncert_deny_list: [x]").1, [""; 0]);
    }

    #[test]
    fn strips_the_slashes_of_deny_expressions() {
        let patterns = |text: &str| {
            let (config, _) = good(text);
            config.cert_deny_list.iter().map(|regex| regex.as_str().to_string()).collect::<Vec<_>>()
        };
        assert_eq!(patterns(r"cert_deny_list: ['/\.x$/', y, //, /]"), [r"\.x$", "y", "//", "/"]);
        assert_eq!(patterns("cert_deny_list: [//x//, /x, x/]"), ["x", "/x", "x/"]);
        assert_eq!(patterns("cert_deny_list: [5]"), ["5"]);
    }

    #[test]
    fn finds_the_key_for_provisioning_tokens() {
        let hex = testing::ISSUER_PUBLIC;
        let (config, _) = good(&format!("features: {{jwt: on}}\njwt_verify_cert: {hex}"));
        let Some(VerifyKeySource::Ed25519(key)) = config.jwt_verify_cert else { panic!() };
        assert_eq!(key, testing::bytes(hex));
        let file = "tests/vectors/captures/insecure/jwt-signer.pem";
        let (config, _) = good(&format!("features: {{jwt: on}}\njwt_verify_cert: {file}"));
        assert_eq!(config.jwt_verify_cert, Some(VerifyKeySource::File(file.into())));
        wrong(
            "features: {jwt: on}",
            &["t.yaml: jwt_verify_cert: must be set when `features.jwt` is on"],
        );
        wrong(
            "features: {jwt: on}\njwt_verify_cert: /nowhere",
            &["t.yaml:4: jwt_verify_cert: /nowhere is no readable file (No such file or directory"],
        );
        let short = "0".repeat(63);
        wrong(
            &format!("features: {{jwt: on}}\njwt_verify_cert: '{short}'"),
            &["nor 64 hex digits"],
        );
        wrong("features: {jwt: on}\njwt_verify_cert: /", &["/ is no readable file"]);
        for (file, why) in [
            ("/etc/passwd", "could not parse ed25519 public data"),
            (
                "tests/vectors/captures/insecure/jwt-signer.key",
                "could not parse validation certificate",
            ),
            ("tests/vectors/captures/insecure/provisioning.jwt", "could not parse ed25519"),
        ] {
            let expected = format!("t.yaml:4: jwt_verify_cert: {file} holds no key ({why}");
            let (text, remedy) =
                (format!("features: {{jwt: on}}\njwt_verify_cert: {file}"), "RSA in PEM");
            wrong(&text, &[&expected]);
            wrong(&text, &[remedy]);
        }
        // No point on the curve.
        let none = format!("02{}", "0".repeat(62));
        wrong(
            &format!("features: {{jwt: on}}\njwt_verify_cert: '{none}'"),
            &["is no key: invalid ed25519 public key"],
        );
    }

    #[test]
    fn a_server_jwt_needs_a_verified_node_and_something_to_sign_with() {
        let features = |text: &str| good(text).0.features;
        let seed = "tests/vectors/captures/issuer/signer.seed";
        let with = "jwt_verify_cert: tests/vectors/captures/insecure/jwt-signer.pem\njwt_signing_key: {seed}".replace("{seed}", seed);
        let on =
            Features { jwt: true, upgrades: false, enrollment: Enrollment::OrganizationIssuer };
        assert_eq!(features(&format!("features: {{ed25519: on}}\n{with}")), on);
        assert_eq!(features(&format!("features: {{ed25519: on, jwt: off}}\n{with}")), on);
        let (config, _) = good(&format!("features: {{ed25519: on}}\n{with}"));
        assert_eq!(config.signing, Some(SigningFiles { key: seed.into(), token: None }));

        wrong(
            "features: {ed25519: true}",
            &[
                "t.yaml: jwt_verify_cert: must be set when `features.ed25519` is on",
                "t.yaml: jwt_signing_key: must be set when `features.ed25519` is on",
            ],
        );
        wrong(
            "features: {ed25519: true, pki: true}",
            &["t.yaml:3: features: can only enable one of `pki` and `ed25519`"],
        );
        let validity = format!("features: {{ed25519: on}}\n{with}\nserver_jwt_validity: 90d");
        assert_eq!(good(&validity).0.server_jwt_validity, secs(90 * 24 * 3_600));
    }

    #[test]
    fn demands_a_helper_that_can_be_run() {
        for text in ["", "helper: ''\n", "helper:\n", "helper: '  '\n"] {
            let mut report = Report::new("t.yaml");
            let text = format!("{text}choria_insecure: true\n");
            assert!(Config::parse(text.as_bytes(), &mut report).is_none());
            assert_eq!(report.errors[0].text, "helper: must be set; it decides what nodes become");
        }
        for text in ["/nowhere/helper", "/etc/passwd", "\"'open\""] {
            let mut report = Report::new("t.yaml");
            let text = format!("choria_insecure: true\nhelper: {text}\n");
            assert!(Config::parse(text.as_bytes(), &mut report).is_none());
            assert_eq!((report.errors.len(), report.errors[0].line), (1, Some(2)), "{text}");
        }
    }

    #[test]
    fn lists_all_errors_at_once() {
        let mut report = Report::new("t.yaml");
        let text = b"token: x\nworkers: four\ninterval: 60\nsite: a\nsite: b\nfeatures: {jwt: on, x: y}\nlogevel: info\n";
        assert!(Config::parse(text, &mut report).is_none());
        let errors: Vec<_> = report.errors.iter().map(|error| error.to_string()).collect();
        for expected in [
            "t.yaml:2: workers",
            "t.yaml:3: interval",
            "t.yaml:5: site: given twice",
            "helper",
            "jwt_verify_cert",
        ] {
            assert!(errors.iter().any(|error| error.contains(expected)), "{expected}: {errors:#?}");
        }
        assert_eq!(errors.len(), 5);
        assert_eq!(report.warnings.len(), 2);
    }

    #[test]
    fn refuses_files_that_hold_no_settings() {
        for text in ["", "# nothing\n", "---\n", "null\n", "\u{feff}"] {
            let mut report = Report::new("t.yaml");
            assert!(Config::parse(text.as_bytes(), &mut report).is_none());
            assert_eq!(
                report.errors[0].to_string(),
                "t.yaml: is empty; at least `helper` must be set",
                "{text:?}"
            );
        }
        for (text, found) in [("[a]", "a list"), ("a", "the text \"a\""), ("5", "the number 5")] {
            let mut report = Report::new("t.yaml");
            assert!(Config::parse(text.as_bytes(), &mut report).is_none());
            let expected = format!("t.yaml:1: found {found}, wanted settings such as `workers: 4`");
            assert_eq!(report.errors[0].to_string(), expected);
            assert_eq!(report.errors.len(), 1, "{text:?}");
        }
    }

    /// Two lines that every file needs, so that those of a test begin on the third; there is a token unless a test is about it.
    fn base(text: &str) -> &'static str {
        match text.lines().any(|line| line.starts_with("token:")) {
            true => "helper: /bin/true\n\n",
            false => "helper: /bin/true\ntoken: s3cret\n",
        }
    }

    #[track_caller]
    fn good(text: &str) -> (Config, Vec<String>) {
        let mut report = Report::new("t.yaml");
        // A file in JSON style stands alone.
        let whole = match text.strip_prefix('{') {
            Some(rest) => format!("{{helper: /bin/true, {rest}"),
            None => format!("{}{text}\n", base(text)),
        };
        let config = Config::parse(whole.as_bytes(), &mut report);
        assert!(report.errors.is_empty(), "{text:?}: {:?}", report.errors);
        (config.unwrap(), report.warnings.iter().map(|warning| warning.to_string()).collect())
    }

    #[track_caller]
    fn check<T: PartialEq + Debug>(text: &str, value: impl FnOnce(&Config) -> T, expected: T) {
        let (config, warnings) = good(text);
        assert!(warnings.is_empty(), "{text:?}: {warnings:?}");
        assert_eq!(value(&config), expected, "{text:?}");
    }

    #[track_caller]
    fn warns(text: &str, expected: &str) {
        let (_, warnings) = good(text);
        assert_eq!(warnings.len(), 1, "{text:?}: {warnings:?}");
        assert!(warnings[0].starts_with(expected), "{text:?}: {warnings:?}");
    }

    /// Each of `expected` is part of an error, and there are no others.
    #[track_caller]
    fn wrong(text: &str, expected: &[&str]) {
        let mut report = Report::new("t.yaml");
        let config = Config::parse(format!("{}{text}\n", base(text)).as_bytes(), &mut report);
        let errors: Vec<_> = report.errors.iter().map(|error| error.to_string()).collect();
        assert!(config.is_none() && errors.len() == expected.len(), "{text:?}: {errors:#?}");
        for (error, expected) in errors.iter().zip(expected) {
            assert!(error.contains(expected), "{text:?}: {error:?}");
        }
    }
}
