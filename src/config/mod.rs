//! Settings already checked: the only form in which other modules see them.
//!
//! `file` reads the YAML as written and `yaml` what it is made of, `choria` reads Choria's client file. All errors are
//! collected in a `report`, since an operator wants to see them at once. Meanings and defaults are those of the Go
//! provisioner's `config/config.go`; README lists where we differ on purpose.

pub mod duration;
pub mod file;
pub mod report;
pub mod yaml;

use std::fmt;
use std::fs::File as OpenFile;
use std::io::{self, Read};
use std::net::IpAddr;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use log::LevelFilter;
use regex::Regex;

pub use crate::config::duration::duration;
use crate::config::duration::words;
use crate::config::file::{At, Features as WrittenFeatures, File};
use crate::config::report::Report;
use crate::helper::HelperCommand;

/// The provisioner's own settings; every field is named after its key.
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
    /// Log in to the broker as user `provisioner` with this password.
    pub broker_provisioning_password: Option<Secret>,
    /// Names no node may get a certificate for.
    pub cert_deny_list: Vec<Regex>,
    /// What provisioning JWTs are verified with; always there with `features.jwt`.
    pub jwt_verify_cert: Option<VerifyKeySource>,
    /// What is done for a node beyond configuring it.
    pub features: Features,
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
    /// Longest run of the helper.
    pub helper_timeout: Duration,
    /// Largest answer of the helper, in bytes.
    pub helper_output_max: usize,
    /// Pause before `configure`, in which a second answer can betray a forger.
    pub contradiction_wait: Duration,
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

impl Config {
    /// Reads and checks the YAML in `bytes`; what is wrong or strange goes to `report`.
    ///
    /// `None` exactly if there was an error.
    pub fn parse(bytes: &[u8], report: &mut Report) -> Option<Config> {
        let errors = report.errors.len();
        let file = File::parse(bytes, report);
        let config = Config::check(file, report);
        config.filter(|_| report.errors.len() == errors)
    }

    fn check(file: File, report: &mut Report) -> Option<Config> {
        refuse_what_is_not_there_yet(&file, report);
        warn_about_unused(&file, report);
        let features = features(file.features.as_ref(), report);
        let interval = interval(file.interval, report);
        let helper_timeout =
            bounded("helper_timeout", file.helper_timeout, secs(10), ms(100)..=secs(600), report);
        Some(Config {
            workers: workers(file.workers, report),
            interval,
            logfile: log_target(file.logfile),
            loglevel: log_level(file.loglevel, report),
            log_format: log_format(file.log_format, report),
            token: file.token.map_or_else(|| Secret::new(""), |token| token.value),
            lifecycle_component: lifecycle_component(file.lifecycle_component, report),
            choria_insecure: file.choria_insecure.is_some_and(|at| at.value),
            site: file.site.map_or_else(String::new, |at| at.value),
            monitor_port: bounded("monitor_port", file.monitor_port, 0, 0..=65_535, report) as u16,
            monitor_address: monitor_address(file.monitor_address, report),
            broker_provisioning_password: file
                .broker_provisioning_password
                .map(|at| at.value)
                .filter(|password| !password.expose().is_empty()),
            cert_deny_list: cert_deny_list(file.cert_deny_list, report),
            jwt_verify_cert: jwt_verify_cert(file.jwt_verify_cert, features.jwt, report),
            features,
            node_timeout: node_timeout(file.node_timeout, helper_timeout, report),
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
            retry_max: retry_max(file.retry_max, interval, report),
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
            // Last, since only this one has no default: everything above has been checked by now.
            helper: helper(file.helper, report)?,
        })
    }
}

/// Silence about these would be worse than no start: nodes would get other credentials than the operator asked for.
fn refuse_what_is_not_there_yet(file: &File, report: &mut Report) {
    let mut refuse = |key: &str, line: usize| {
        report.error(line, format!("{key}: not supported by this version yet"));
    };
    let flags =
        [("leader_election", &file.leader_election), ("active_active", &file.active_active)];
    for (key, flag) in flags {
        if let Some(At { line, value: true }) = flag {
            refuse(key, *line);
        }
    }
    let texts = [("admin_socket", &file.admin_socket), ("audit_log", &file.audit_log)];
    for (key, text) in texts {
        if let Some(At { line, value }) = text
            && !value.is_empty()
        {
            refuse(key, *line);
        }
    }
    if let Some(At { line, value }) = &file.helper_mode
        && value != "exec"
    {
        let line = *line;
        match value.as_str() {
            "persistent" => refuse("helper_mode: persistent", line),
            _ => report.error(line, format!("helper_mode: found {value:?}, wanted \"exec\"")),
        }
    }
    match &file.choria_insecure {
        Some(At { value: true, .. }) => {}
        Some(At { line, .. }) => report.error(*line, SECURE_UNSUPPORTED),
        None => report.error(None, SECURE_UNSUPPORTED),
    }
}

fn warn_about_unused(file: &File, report: &mut Report) {
    if let Some(At { line, .. }) = file.broker_port {
        report.warn(line, "broker_port: has no effect, as in the original");
    }
    if let Some(At { line, .. }) = file.rego_policy {
        report.warn(line, "rego_policy: has no effect, as in the original");
    }
    if let Some(At { line, value }) = &file.server_jwt_validity
        && value.is_zero()
    {
        report.error(*line, "server_jwt_validity: must not be zero");
    }
}

fn features(written: Option<&At<WrittenFeatures>>, report: &mut Report) -> Features {
    let Some(At { value: written, .. }) = written else {
        return Features { jwt: false, upgrades: false, enrollment: Enrollment::Off };
    };
    let is_on = |flag: &Option<At<bool>>| flag.as_ref().is_some_and(|flag| flag.value);
    for (key, flag) in [("ed25519", &written.ed25519), ("upgrades", &written.upgrades)] {
        if let Some(At { line, value: true }) = flag {
            report.error(*line, format!("features.{key}: not supported by this version yet"));
        }
    }
    let enrollment = match (is_on(&written.pki), is_on(&written.ed25519)) {
        (true, true) => {
            let line = written.ed25519.as_ref().map(|flag| flag.line);
            report.error(line, "features: can only enable one of `pki` and `ed25519`");
            Enrollment::Off
        }
        (true, false) => Enrollment::Pki,
        (false, true) => Enrollment::OrganizationIssuer,
        (false, false) => Enrollment::Off,
    };
    Features {
        // Without a verified JWT anybody could have a server JWT made, so one feature brings the other.
        jwt: is_on(&written.jwt) || enrollment == Enrollment::OrganizationIssuer,
        upgrades: is_on(&written.upgrades),
        enrollment,
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

fn log_level(written: Option<At<String>>, report: &mut Report) -> LevelFilter {
    let Some(At { line, value }) = written else { return LevelFilter::Info };
    match value.to_ascii_lowercase().as_str() {
        "debug" => LevelFilter::Debug,
        "info" => LevelFilter::Info,
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
            report.error(
                line,
                format!(
                    "monitor_address: {value:?} is no address; wanted one such as 127.0.0.1 or ::1"
                ),
            );
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
        // The original takes `/x/` for `x`, but leaves `//` and `/` alone.
        let pattern = match value.strip_prefix('/').and_then(|rest| rest.strip_suffix('/')) {
            Some(inner) if !inner.is_empty() => inner,
            _ => &value,
        };
        if pattern.is_empty() {
            report.error(line, "cert_deny_list: an empty expression would deny every node");
            continue;
        }
        match Regex::new(pattern) {
            Ok(regex) => patterns.push(regex),
            Err(error) => {
                // The crate draws a picture over several lines; its last line says what is wrong.
                let error = error.to_string();
                let reason = error.lines().last().unwrap_or_default().trim_start_matches("error: ");
                report.error(
                    line,
                    format!("cert_deny_list: {value:?} is no regular expression: {reason}"),
                );
            }
        }
    }
    patterns
}

fn jwt_verify_cert(
    written: Option<At<String>>,
    is_needed: bool,
    report: &mut Report,
) -> Option<VerifyKeySource> {
    let Some(At { line, value }) = written.filter(|at| !at.value.is_empty()) else {
        if is_needed {
            report.error(None, "jwt_verify_cert: must be set when `features.jwt` is on");
        }
        return None;
    };
    let path = Path::new(&value);
    // A file wins over a key, as in the original.
    if !path.exists()
        && let Some(key) = hex_key(&value)
    {
        return Some(VerifyKeySource::Ed25519(key));
    }
    // An unused key file may be missing: the original never looks at it.
    if is_needed && let Err(error) = read_file(path) {
        report.denied |= error.kind() == io::ErrorKind::PermissionDenied;
        report.error(
            line,
            format!("jwt_verify_cert: {value} is no readable file ({error}), nor 64 hex digits"),
        );
    }
    Some(VerifyKeySource::File(path.to_path_buf()))
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

fn helper(written: Option<At<String>>, report: &mut Report) -> Option<HelperCommand> {
    let Some(At { line, value }) = written.filter(|at| !at.value.trim().is_empty()) else {
        report.error(None, "helper: must be set; it decides what nodes become");
        return None;
    };
    match HelperCommand::parse(&value) {
        Ok(command) => Some(command),
        Err(error) => {
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
    let mut bytes = Vec::new();
    OpenFile::open(path)?.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > FILE_BYTES_MAX {
        return Err(io::Error::other(format!("larger than {FILE_BYTES_MAX} bytes")));
    }
    Ok(bytes)
}

/// Bytes of a configuration or key file.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// Nodes worked on at once, at most: each may cost eight threads when nodes fall silent.
const WORKERS_MAX: i64 = 1_024;

/// Names of people and of privileged programs, which no node may take.
const DENY_DEFAULT: &[&str] =
    &[r"\.privileged.mcollective$", r"\.privileged.choria$", r"\.mcollective$", r"\.choria$"];

const SECURE_UNSUPPORTED: &str =
    "choria_insecure: must be true, TLS and signatures are not supported by this version yet";

/// A text that must not be shown: a password, a token, a key.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    /// Takes `text` out of sight.
    pub fn new(text: impl Into<String>) -> Secret {
        Secret(text.into())
    }

    /// The text itself, for the one place that has to send it.
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}
