//! Choria's own client file: lines of `key = value`, and what of them this daemon honours.
//!
//! The parser never fails in the original: a wrong value is dropped without a word. Here it is a warning with its line,
//! and where the original would then misbehave for ever, an error. The `choria.conf` files of the working directory and
//! those above it are not read: a daemon's configuration must not depend on where it starts.
//!
//! How lines and values are written is in [`values`], what becomes of each key in [`keys`].
//!
//! Source: go-choria's `config/util.go`, `config/config.go` and `confkey/confkey.go`.

pub mod keys;
pub mod values;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::clock::unix_time;
use crate::config::choria::keys::{Fate, fate};
use crate::config::choria::values::{boolean, lines, path, setting};
use crate::config::duration::{self, words};
use crate::config::read_file;
use crate::config::report::Report;
use crate::config::security::{Checked, Given, Security, Written};
use crate::config::surroundings::Surroundings;
use crate::dns;
use crate::jwt::client;
use crate::protocol::Identity;
use crate::secret::{PASSWORD_VARIABLE, Secret};
use crate::transport::address::ServerAddress;
use crate::transport::servers::Brokers;
use crate::transport::srv::Srv;

/// Who we are on the network, and where it is.
#[derive(Debug, Clone)]
pub struct ChoriaConfig {
    /// The sender of our messages, and the identity in our own lifecycle event.
    pub identity: Identity,
    /// The caller of our requests. With the identity it names the lock that nodes hold for us.
    pub caller: String,
    /// What the broker lists our connection as.
    pub connection_name: String,
    /// Where the brokers are.
    pub brokers: Brokers,
    /// How long a request stays valid, in seconds; nodes ignore requests with less than 30.
    pub ttl_secs: u32,
    /// Window of a discovery, and part of every request's time-out.
    pub discovery_timeout: Duration,
    /// Longest wait for a connection to a broker.
    pub connect_timeout: Duration,
    /// User and password for the broker.
    pub user: Option<(String, Secret)>,
    /// How we prove who we are, and whom we believe.
    pub security: Security,
    /// What the file says, by key, of what we honour: to see what it says later.
    pub written: BTreeMap<String, Secret>,
}

/// What the provisioner's own settings say about the network.
#[derive(Debug, Clone, Copy, Default)]
pub struct Network<'n> {
    /// `choria_insecure`
    pub is_insecure: bool,
    /// `leader_election`
    pub is_elected: bool,
    /// `broker_provisioning_password`, which replaces user and password of the client file.
    pub password: Option<&'n Secret>,
}

/// The client file that is read when none is named: the first that exists, else the last place to look.
///
/// Source: `UserConfig` in go-choria's `internal/util/util.go`.
pub fn default_file(surroundings: &Surroundings) -> PathBuf {
    let home = surroundings.variable("HOME").map(Path::new);
    let homely =
        [".choriarc", ".mcollective"].into_iter().filter_map(|name| Some(home?.join(name)));
    homely
        .chain(["/etc/choria/client.conf", "/usr/local/etc/choria/client.conf"].map(PathBuf::from))
        // What can't be looked at counts as existing: it is there to be used.
        .find(|path| path.try_exists().unwrap_or(true))
        .unwrap_or_else(|| PathBuf::from("/etc/puppetlabs/mcollective/client.cfg"))
}

impl ChoriaConfig {
    /// Reads the client file at `path` and `plugin.d/choria.cfg` beside it; what is wrong or strange goes to `report`.
    ///
    /// `None` exactly if there was an error.
    pub fn load(
        path: &Path,
        network: Network<'_>,
        surroundings: &Surroundings,
        report: &mut Report,
    ) -> Option<ChoriaConfig> {
        let errors = report.errors.len();
        let inspected = ChoriaConfig::inspect(path, network, surroundings, report);
        inspected?.config.filter(|_| report.errors.len() == errors)
    }

    /// Does the same, and goes on with what is right; `None` only if the file can't be read.
    pub fn inspect(
        path: &Path,
        network: Network<'_>,
        surroundings: &Surroundings,
        report: &mut Report,
    ) -> Option<Inspected> {
        let mut draft = Draft::default();
        match read_file(path) {
            Ok(bytes) if is_utf16(&bytes) => {
                report.error(None, "is UTF-16, in which no setting is found: save it as UTF-8");
                return None;
            }
            Ok(bytes) => draft.take(&bytes, "", surroundings, report),
            Err(error) => {
                report.unreadable(&error);
                return None;
            }
        }
        if let Some(dir) = plugin_dir(path, surroundings) {
            draft.take_plugins(&dir, surroundings, report);
        }
        warn_of_project_files(surroundings, report);
        let plugins = std::mem::take(&mut draft.plugins);
        let mut own = Report::new(path.display().to_string());
        let inspected = draft.check(network, surroundings, &mut own);
        if let Some((file, lines)) = plugins {
            // What is found out at the end only knows the line.
            own.move_to(&file, |finding| {
                let key = finding.text.split([':', ',']).next().unwrap_or_default();
                finding.line.is_some() && lines.get(key) == finding.line.as_ref()
            });
        }
        report.append(own);
        Some(inspected)
    }
}

/// What can be made of a client file, whatever is wrong with it.
#[derive(Debug)]
pub struct Inspected {
    /// Where the brokers are; none where none is named rightly.
    pub brokers: Brokers,
    /// Longest wait for a connection to a broker, within its bounds.
    pub connect_timeout: Duration,
    /// Who we are.
    pub identity: Option<Identity>,
    /// All of it, unless we don't know who we are or with which files we prove it. Good for use only if there was no error.
    pub config: Option<ChoriaConfig>,
}

/// `plugin.d` beside the client file, which the original reads unless the client file is a user's own.
fn plugin_dir(path: &Path, surroundings: &Surroundings) -> Option<PathBuf> {
    let path = std::path::absolute(path).ok()?;
    // Compared as text, as in the original.
    if let Some(home) = surroundings.variable("HOME")
        && path.to_string_lossy().starts_with(home)
    {
        return None;
    }
    Some(path.parent()?.join("plugin.d"))
}

/// Says of every file that the original would read beside ours that we don't.
fn warn_of_project_files(surroundings: &Surroundings, report: &mut Report) {
    let above = surroundings.directory.iter().flat_map(|directory| directory.ancestors());
    for file in above.map(|directory| directory.join("choria.conf")).filter(|file| file.exists()) {
        let mut project = Report::new(file.display().to_string());
        project.warn(None, "not read: settings must not depend on where we are started");
        report.append(project);
    }
}

/// The honoured settings as far as they are known, with the original's defaults.
struct Draft {
    identity: Option<(usize, String)>,
    hosts: Option<(usize, String)>,
    use_srv: bool,
    srv_domain: Option<(usize, String)>,
    ttl: (Option<usize>, i64),
    discovery_timeout: (Option<usize>, i64),
    connect_timeout: (Option<usize>, Duration),
    user: Option<String>,
    password: Option<Secret>,
    token: Option<(usize, PathBuf)>,
    signer_token: Option<(usize, PathBuf)>,
    security: Written,
    written: BTreeMap<String, Secret>,
    /// The name of `plugin.d/choria.cfg`, if it is there, and the line of each key that it sets.
    plugins: Option<(String, BTreeMap<String, usize>)>,
}

impl Default for Draft {
    fn default() -> Draft {
        Draft {
            identity: None,
            hosts: None,
            use_srv: true,
            srv_domain: None,
            ttl: (None, 60),
            discovery_timeout: (None, 2),
            connect_timeout: (None, Duration::from_secs(2)),
            user: None,
            password: None,
            token: None,
            signer_token: None,
            security: Written::default(),
            written: BTreeMap::new(),
            plugins: None,
        }
    }
}

impl Draft {
    /// Reads `choria.cfg` in `dir`, and says of the other files there what of them has no effect.
    fn take_plugins(&mut self, dir: &Path, surroundings: &Surroundings, report: &mut Report) {
        // The original looks no further than this, either, when it can't list it.
        let Ok(entries) = fs::read_dir(dir) else { return };
        let mut names: Vec<_> = entries.flatten().map(|entry| entry.file_name()).collect();
        names.sort();
        for name in names {
            let path = dir.join(&name);
            let mut plugin = Report::new(path.display().to_string());
            match name.to_str().and_then(|name| name.rsplit_once('.')) {
                Some(("choria", "cfg")) => match read_file(&path) {
                    Ok(bytes) => {
                        self.plugins = Some((path.display().to_string(), BTreeMap::new()));
                        self.take(&bytes, "plugin.choria.", surroundings, &mut plugin);
                    }
                    Err(error) => plugin.unreadable(&error),
                },
                Some((stem, "cfg")) => {
                    // One that can't be read has no effect all the more.
                    let bytes = read_file(&path).unwrap_or_default();
                    warn_of_lost_settings(&bytes, &format!("plugin.{stem}."), &mut plugin);
                }
                Some((stem, "conf")) if !dir.join(format!("{stem}.cfg")).exists() => {
                    plugin.warn(None, "not read, as in the original: its name must end in .cfg");
                }
                _ => {}
            }
            report.append(plugin);
        }
    }

    fn take(
        &mut self,
        bytes: &[u8],
        prefix: &str,
        surroundings: &Surroundings,
        report: &mut Report,
    ) {
        for (line, written) in lines(&String::from_utf8_lossy(without_mark(bytes))) {
            match (setting(written), written.trim().strip_suffix('=')) {
                (Some((key, value)), _) => {
                    let key = format!("{prefix}{key}");
                    self.set(line, &key, value, surroundings, report);
                    if let Some((_, lines)) = &mut self.plugins {
                        lines.insert(key, line);
                    }
                }
                (None, Some(key)) if is_word(key.trim_end()) => {
                    let text =
                        format!("{prefix}{}: ignored, since it has no value", key.trim_end());
                    report.warn(line, text);
                }
                // Not shown: it may hold a password.
                (None, _) => report.warn(line, "ignored: it is no setting such as `key = value`"),
            }
        }
    }

    fn set(
        &mut self,
        line: usize,
        key: &str,
        value: &str,
        surroundings: &Surroundings,
        report: &mut Report,
    ) {
        // The environment speaks only when the file does: the original asks it while it assigns a value.
        let or_variable = |name: &str| surroundings.variable(name).unwrap_or(value).to_string();
        if matches!(fate(key), Ok(Fate::Honoured)) {
            self.written.insert(key.to_owned(), Secret::new(value));
        }
        if matches!(fate(key), Ok(Fate::Honoured)) && key != HOSTS && is_quoted(value) {
            report.warn(line, format!("{key}: its quotes are a part of the value: leave them out"));
        }
        if Written::is_about(key) {
            self.security.take(line, key, value);
        }
        match key {
            "identity" => self.identity = Some((line, value.to_string())),
            "plugin.choria.middleware_hosts" => self.hosts = Some((line, value.to_string())),
            "plugin.choria.use_srv" => {
                self.use_srv = boolean_or_false(line, key, value, report);
            }
            "plugin.choria.srv_domain" => self.srv_domain = Some((line, value.to_string())),
            "ttl" => integer(line, key, value, &mut self.ttl, report),
            "discovery_timeout" => integer(line, key, value, &mut self.discovery_timeout, report),
            "plugin.choria.network.connect_timeout" => match seconds_or_duration(value) {
                Ok(timeout) => self.connect_timeout = (Some(line), timeout),
                Err(error) => {
                    report.warn(line, format!("{key}: ignored: {error}, found {value:?}"))
                }
            },
            "plugin.nats.user" => self.user = Some(or_variable(USER_VARIABLE)),
            "plugin.nats.pass" => {
                self.password = Some(Secret::new(or_variable(PASSWORD_VARIABLE)));
            }
            "plugin.security.choria.token_file" => {
                self.token = Some((line, path(value, surroundings)));
            }
            "plugin.choria.security.request_signer.token_file" => {
                self.signer_token = Some((line, path(value, surroundings)));
            }
            // What is honoured in part, or only has to be checked.
            "plugin.choria.require_client_filter" => {
                if boolean_or_false(line, key, value, report)
                    && let Ok(Fate::Refused(why)) = fate(key)
                {
                    report.error(line, format!("{key}: {why}"));
                }
            }
            "rpclimitmethod" if matches!(value, "first" | "random") => {}
            _ => match fate(key) {
                Ok(Fate::Honoured | Fate::Ignored) | Err(None) => {}
                // How bad that is depends on the others.
                Ok(_) if Written::is_about(key) => {}
                // Switched off it changes nothing.
                Ok(Fate::Dropped(_)) if boolean(value) == Some(false) => {}
                Ok(Fate::Dropped(why)) => report.warn(line, format!("{key}: {why}")),
                Ok(Fate::Refused(why)) => report.error(line, format!("{key}: {why}")),
                Err(Some(meant)) => {
                    let text = format!("{key}: unknown key, ignored; did you mean `{meant}`?");
                    report.warn(line, text);
                }
            },
        }
    }

    fn check(
        self,
        network: Network<'_>,
        surroundings: &Surroundings,
        report: &mut Report,
    ) -> Inspected {
        if surroundings.variable("CHORIA_FED_COLLECTIVE").is_some() {
            report.warn(None, format!("CHORIA_FED_COLLECTIVE: {}", keys::NO_FEDERATION));
        }
        if let (Some((line, _)), true) = (&self.srv_domain, self.hosts.is_some() || !self.use_srv) {
            let reason = match self.hosts {
                Some(_) => "plugin.choria.middleware_hosts names the brokers",
                None => "plugin.choria.use_srv is off",
            };
            let text = format!("plugin.choria.srv_domain: no effect, since {reason}");
            report.warn(*line, text);
        }
        let domain = srv_domain(self.srv_domain, surroundings, report);
        let brokers =
            brokers(self.hosts, self.use_srv, domain, network.is_insecure, surroundings, report);
        let ttl_secs = match u32::try_from(self.ttl.1) {
            Ok(ttl) if ttl >= TTL_LEAST_SECS => ttl,
            _ => {
                let (line, ttl) = self.ttl;
                let reason = if ttl < i64::from(TTL_LEAST_SECS) {
                    format!("is not at least {TTL_LEAST_SECS}; nodes ignore such requests")
                } else {
                    format!("is more than {} seconds", u32::MAX)
                };
                report.error(line, format!("ttl: {ttl} {reason}"));
                TTL_LEAST_SECS
            }
        };
        let (line, discovery_timeout) = self.discovery_timeout;
        if !(1..=DISCOVERY_TIMEOUT_MAX_SECS).contains(&discovery_timeout) {
            report.error(
                line,
                format!("discovery_timeout: {discovery_timeout} is not within 1 and {DISCOVERY_TIMEOUT_MAX_SECS} seconds"),
            );
        }
        let (line, connect_timeout) = self.connect_timeout;
        if !(CONNECT_TIMEOUT_LEAST..=CONNECT_TIMEOUT_MAX).contains(&connect_timeout) {
            let found = words(connect_timeout);
            let (least, most) = (words(CONNECT_TIMEOUT_LEAST), words(CONNECT_TIMEOUT_MAX));
            report.error(
                line,
                format!(
                    "plugin.choria.network.connect_timeout: {found} is not within {least} and {most}"
                ),
            );
        }
        let (has_user, has_password) = (self.user.is_some(), self.password.is_some());
        let user = match (network.password, self.user, self.password) {
            (Some(password), user, other) => {
                if user.is_some() || other.is_some() {
                    report.warn(
                        None,
                        "plugin.nats.user, plugin.nats.pass: no effect, since `broker_provisioning_password` is set in the YAML file",
                    );
                }
                Some((PROVISIONING_USER.to_string(), password.clone()))
            }
            (None, Some(user), Some(password)) => Some((user, password)),
            (None, None, None) => None,
            (None, user, _) => {
                let (given, missing) =
                    if user.is_some() { ("user", "pass") } else { ("pass", "user") };
                report.warn(
                    None,
                    format!(
                        "plugin.nats.{given}: not used, since plugin.nats.{missing} is not set"
                    ),
                );
                None
            }
        };
        for (variable, is_used, key) in [
            (USER_VARIABLE, has_user, "plugin.nats.user"),
            (PASSWORD_VARIABLE, has_password, "plugin.nats.pass"),
        ] {
            if surroundings.variable(variable).is_some() && !is_used {
                let text = format!("{variable}: no effect, since {key} is not in the file");
                report.warn(None, text);
            }
        }
        let connect_timeout = connect_timeout.clamp(CONNECT_TIMEOUT_LEAST, CONNECT_TIMEOUT_MAX);
        let identity = identity(self.identity, surroundings, report);
        let checked = identity.clone().and_then(|identity| {
            let given = Given {
                is_off: network.is_insecure,
                is_elected: network.is_elected,
                identity: &identity,
                user: user.as_ref().map(|(user, _)| user.as_str()),
                surroundings,
                now: unix_time(),
            };
            let checked = self.security.check(&given, report)?;
            Some((identity, checked))
        });
        let Some((own, Checked { security, certname, caller })) = checked else {
            return Inspected { brokers, connect_timeout, identity, config: None };
        };
        let caller = caller.or_else(|| {
            // The original takes the caller from a token without using it for anything else, too.
            let (line, path) = self.token.or(self.signer_token)?;
            match security {
                // What is wrong with the one we log in with has been said.
                Security::Issuer(_) => None,
                Security::Off | Security::X509(_) => caller_of_token(line, &path, report),
            }
        });
        let config = ChoriaConfig {
            caller: caller.unwrap_or_else(|| format!("choria={certname}")),
            connection_name: certname,
            identity: own,
            brokers: brokers.clone(),
            ttl_secs,
            discovery_timeout: Duration::from_secs(discovery_timeout.unsigned_abs()),
            connect_timeout,
            user,
            security,
            written: self.written,
        };
        Inspected { brokers, connect_timeout, identity, config: Some(config) }
    }
}

/// Says of settings that Choria doesn't look for in this file, though it honours them elsewhere, that they have no effect.
fn warn_of_lost_settings(bytes: &[u8], prefix: &str, report: &mut Report) {
    for (line, written) in lines(&String::from_utf8_lossy(bytes)) {
        let Some((key, _)) = setting(written) else { continue };
        let key = format!("{prefix}{key}");
        if matches!(fate(&key), Ok(Fate::Honoured | Fate::Refused(_) | Fate::Dropped(_))) {
            let text =
                format!("{key}: no effect here, as in the original; write it into the client file");
            report.warn(line, text);
        }
    }
}

/// What editors of Windows begin a file with.
fn without_mark(bytes: &[u8]) -> &[u8] {
    bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(bytes)
}

fn is_utf16(bytes: &[u8]) -> bool {
    matches!(bytes, [0xff, 0xfe, ..] | [0xfe, 0xff, ..])
}

fn is_word(text: &str) -> bool {
    let is_part = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    !text.is_empty() && text.chars().all(is_part)
}

/// Whether there are quotes around it, which no value here has.
fn is_quoted(value: &str) -> bool {
    let ends = [('"', '"'), ('\'', '\''), ('“', '”'), ('„', '“'), ('‘', '’'), ('«', '»')];
    let has = |(first, last)| value.len() > 1 && value.starts_with(first) && value.ends_with(last);
    ends.into_iter().any(has)
}

/// Where the brokers are.
const HOSTS: &str = "plugin.choria.middleware_hosts";

/// Takes the place of `plugin.nats.user`.
const USER_VARIABLE: &str = "MCOLLECTIVE_NATS_USERNAME";

fn boolean_or_false(line: usize, key: &str, value: &str, report: &mut Report) -> bool {
    boolean(value).unwrap_or_else(|| {
        report.warn(line, format!("{key}: {value:?} is no boolean, taken as false"));
        false
    })
}

fn integer(
    line: usize,
    key: &str,
    value: &str,
    into: &mut (Option<usize>, i64),
    report: &mut Report,
) {
    match value.parse() {
        Ok(number) => *into = (Some(line), number),
        Err(_) => report.warn(line, format!("{key}: ignored: {value:?} is no whole number")),
    }
}

fn seconds_or_duration(value: &str) -> Result<Duration, duration::DurationError> {
    if value.bytes().all(|c| c.is_ascii_digit()) {
        let secs = value.parse().map_err(|_| duration::DurationError::TooLong)?;
        return Ok(Duration::from_secs(secs));
    }
    duration::duration(value)
}

fn brokers(
    hosts: Option<(usize, String)>,
    use_srv: bool,
    domain: Option<String>,
    is_insecure: bool,
    surroundings: &Surroundings,
    report: &mut Report,
) -> Brokers {
    const KEY: &str = HOSTS;
    let customary = || Brokers::Listed(vec![ServerAddress::customary()]);
    let Some((line, list)) = hosts else {
        if !use_srv {
            return customary();
        }
        // Facter takes its time, so it is asked only when it matters.
        let Some(domain) = domain.or_else(|| surroundings.fact("networking.domain")) else {
            report.warn(
                None,
                format!("plugin.choria.srv_domain: not set, and facter knows no domain; {} is tried and no other broker", ServerAddress::customary()),
            );
            return customary();
        };
        // Without anybody to ask there is no answer.
        let nobody = || dns::Servers::Fixed(Vec::new());
        let dns = surroundings.names.as_ref().map_or_else(nobody, |names| names.dns.clone());
        return Brokers::Srv(Srv { domain, dns });
    };
    if is_quoted(&list) {
        report.error(line, format!("{KEY}: its quotes are a part of the value: leave them out"));
        return Brokers::Listed(Vec::new());
    }
    if list.split(',').all(|host| host.trim().is_empty()) {
        report.error(line, format!("{KEY}: names no broker"));
    }
    let mut servers = Vec::new();
    // The original gives up for ever, and in silence, on a list with an empty part in it.
    for host in list.split(',').map(str::trim).filter(|host| !host.is_empty()) {
        match ServerAddress::parse(host) {
            Ok(server) => {
                if server.credentials_dropped() {
                    report.warn(line, format!("{KEY}: user and password of {server} are not used"));
                }
                if let Some(text) = scheme_fault(host, &server, is_insecure) {
                    report.warn(line, format!("{KEY}: {text}"));
                }
                servers.push(server);
            }
            Err(error) => report.error(line, format!("{KEY}: {error}")),
        }
    }
    Brokers::Listed(servers)
}

/// What is strange about the scheme of `server`, written as `host`.
fn scheme_fault(host: &str, server: &ServerAddress, is_insecure: bool) -> Option<String> {
    let (scheme, _) = host.split_once("://")?;
    if server.is_tls() && is_insecure {
        return Some(format!(
            "{server} demands TLS, which choria_insecure turns off: it is never connected to"
        ));
    }
    // As in the original; `puppet`, of old, is a name for it as well.
    scheme.eq_ignore_ascii_case("http").then(|| {
        format!("brokers don't speak HTTP: the address is taken for {server}, which would say so")
    })
}

/// The domain that is asked for brokers, as far as it is written anywhere.
fn srv_domain(
    written: Option<(usize, String)>,
    surroundings: &Surroundings,
    report: &mut Report,
) -> Option<String> {
    // Here the environment always speaks: the key has a default, and the original assigns that, too.
    let (line, key, domain) = match (surroundings.variable("CHORIA_SRV_DOMAIN"), written) {
        (Some(domain), _) => (None, "CHORIA_SRV_DOMAIN", domain.to_string()),
        (None, Some((line, domain))) => (Some(line), "plugin.choria.srv_domain", domain),
        (None, None) => return None,
    };
    let domain = domain.trim_end_matches('.');
    let is_part = |part: &str| {
        let is_good = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_');
        (1..=63).contains(&part.len()) && part.chars().all(is_good)
    };
    if domain.len() > DOMAIN_LEN_MAX || !domain.split('.').all(is_part) {
        report.error(line, format!("{key}: {domain:?} is no domain"));
    }
    Some(domain.to_string())
}

fn identity(
    written: Option<(usize, String)>,
    surroundings: &Surroundings,
    report: &mut Report,
) -> Option<Identity> {
    let (line, text) = match written {
        Some((line, text)) => (Some(line), text),
        None => {
            let (name, may_be_short) = surroundings.full_name();
            if may_be_short {
                report.warn(
                    None,
                    format!("identity: not set, and neither DNS nor facter knows a full name; the host name {name:?} is used"),
                );
            }
            (None, name)
        }
    };
    match Identity::parse(&text) {
        Ok(identity) => Some(identity),
        Err(error) => {
            report.error(line, format!("identity: {error}"));
            None
        }
    }
}

/// The caller that the client token in the file at `path` names.
///
/// Source: `CallerID` and `SignerToken` in go-choria's `choria/framework.go`.
fn caller_of_token(line: usize, path: &Path, report: &mut Report) -> Option<String> {
    let shown = path.display();
    let mut unusable = |why: String| {
        report.warn(line, format!("{shown}: the caller is not taken from this token: {why}"));
        None
    };
    let bytes = match read_file(path) {
        Ok(bytes) => bytes,
        Err(error) => return unusable(error.to_string()),
    };
    match client::caller(&String::from_utf8_lossy(&bytes), unix_time()) {
        Ok(caller) => Some(caller),
        Err(error) => unusable(error.to_string()),
    }
}

/// The user that a provisioning password belongs to.
const PROVISIONING_USER: &str = "provisioner";

/// Longest domain to which the names of brokers can be added, in bytes.
const DOMAIN_LEN_MAX: usize = 220;

/// Nodes check requests against a schema with this bound.
const TTL_LEAST_SECS: u32 = 30;

/// A discovery ends after two seconds whatever the window, and every request waits this much longer.
const DISCOVERY_TIMEOUT_MAX_SECS: i64 = 3_600;

/// With less no broker can answer in time.
const CONNECT_TIMEOUT_LEAST: Duration = Duration::from_millis(1);

/// The original refuses to connect with more.
const CONNECT_TIMEOUT_MAX: Duration = Duration::from_secs(120);

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::env;

    use super::*;
    use crate::config::choria::keys::KEYS;
    use crate::config::report::Finding;

    const INSECURE: Network = Network { is_insecure: true, is_elected: false, password: None };

    #[test]
    fn has_the_defaults_of_choria() {
        let (config, warnings) = good("");
        assert!(warnings.is_empty(), "{warnings:?}");
        assert_eq!(config.identity.as_str(), "prov1.example.net");
        assert_eq!(config.caller, "choria=prov1.example.net");
        assert_eq!(config.connection_name, "prov1.example.net");
        assert_eq!(config.ttl_secs, 60);
        assert_eq!(config.discovery_timeout, Duration::from_secs(2));
        assert_eq!(config.connect_timeout, Duration::from_secs(2));
        assert_eq!(config.user, None);
    }

    #[test]
    fn takes_the_settings_it_honours() {
        let (config, warnings) = good(
            "# a comment\nidentity = p.example.net\nttl = 120\ndiscovery_timeout=5\nplugin.choria.network.connect_timeout = 1m\n\
             plugin.nats.user = u\nplugin.nats.pass = p = q\ncolor = maybe\nsomething.else = 1\n",
        );
        assert!(warnings.is_empty(), "{warnings:?}");
        assert_eq!(config.identity.as_str(), "p.example.net");
        assert_eq!(config.ttl_secs, 120);
        assert_eq!(config.discovery_timeout, Duration::from_secs(5));
        assert_eq!(config.connect_timeout, Duration::from_secs(60));
        assert_eq!(config.user, Some(("u".into(), Secret::new("p = q"))));
        let (config, _) = good("plugin.choria.network.connect_timeout = 7\nttl = 40\nttl = 50");
        assert_eq!((config.connect_timeout, config.ttl_secs), (Duration::from_secs(7), 50));
    }

    #[test]
    fn finds_its_brokers() {
        let brokers = |text: &str| load(text, &surroundings()).unwrap().0.brokers.to_string();
        let key = "plugin.choria.middleware_hosts";
        assert_eq!(brokers(&format!("{key} = a:1, b:2")), "nats://a:1, nats://b:2");
        assert_eq!(brokers(&format!("{key} = ,a:1,, b:2,")), "nats://a:1, nats://b:2");
        assert_eq!(brokers(&format!("{key} = a:1\n{key} = nats://b:2")), "nats://b:2");
        assert_eq!(brokers(&format!("{key} = [::1]:4222")), "nats://[::1]:4222");
        assert_eq!(brokers("plugin.choria.use_srv = false"), "nats://puppet:4222");
        bad(&format!("\n{key} = a:1, b"), "c.cfg:2: plugin.choria.middleware_hosts: ");
        bad(&format!("{key} = ,"), "c.cfg:1: plugin.choria.middleware_hosts: names no broker");
        for list in ["10.0.0.1:4222 10.0.0.2:4222", "a:4222; b:4222"] {
            let expected = "is more than one broker address; commas separate them";
            bad(&format!("{key} = {list}"), &format!("middleware_hosts: {list:?} {expected}"));
        }
        // The original takes it for the same.
        warns(
            &format!("{key} = http://b:2"),
            "brokers don't speak HTTP: the address is taken for nats://b:2",
        );
        warns(
            &format!("{key} = tls://b:2"),
            "tls://b:2 demands TLS, which choria_insecure turns off",
        );
        assert_eq!(good(&format!("{key} = nats://b:2, puppet://c:3")).1, [""; 0]);
        bad(&format!("{key} = ,\nplugin.choria.use_srv = 0"), "middleware_hosts: names no broker");
    }

    #[test]
    fn looks_for_brokers_in_the_domain() {
        let with = |variable: Option<&str>, text: &str| {
            let mut around = surroundings();
            around.variables.extend(variable.map(|v| ("CHORIA_SRV_DOMAIN".into(), v.into())));
            let (config, report) = load(text, &around).unwrap();
            assert!(report.warnings.is_empty(), "{:?}", report.warnings);
            config.brokers.to_string()
        };
        let key = "plugin.choria.srv_domain";
        assert_eq!(with(None, &format!("{key} = example.net")), "SRV records of example.net");
        assert_eq!(with(None, &format!("{key} = example.net.")), "SRV records of example.net");
        // The environment speaks whether the file does or not, but never with nothing.
        assert_eq!(with(Some("e.org"), &format!("{key} = a.net")), "SRV records of e.org");
        assert_eq!(with(Some("e.org"), ""), "SRV records of e.org");
        assert_eq!(with(Some(""), &format!("{key} = a.net")), "SRV records of a.net");
        // Brokers that are named need no looking for.
        assert_eq!(with(Some("e.org"), HOSTS), "nats://broker:4222");
        assert_eq!(with(Some("e.org"), "plugin.choria.use_srv = no"), "nats://puppet:4222");
        let unused = "c.cfg:2: plugin.choria.srv_domain: no effect, since plugin.choria.";
        warns(&format!("{key} = example.net"), &format!("{unused}middleware_hosts names"));
        let text = format!("plugin.choria.use_srv = no\n{key} = example.net");
        let (_, report) = load(&text, &surroundings()).unwrap();
        let warnings: Vec<_> = report.warnings.iter().map(ToString::to_string).collect();
        assert_eq!(warnings, [format!("{unused}use_srv is off")]);

        let (config, report) = load("", &surroundings()).unwrap();
        assert_eq!(config.brokers.to_string(), "nats://puppet:4222");
        let warning = report.warnings[0].to_string();
        assert!(warning.starts_with("c.cfg: plugin.choria.srv_domain: not set"), "{warning}");

        for domain in ["a..b", ".", "a b", "a/b", "bröker.net", &"a".repeat(64)] {
            let report = load(&format!("{key} = {domain}"), &surroundings()).unwrap_err();
            assert!(report.errors[0].to_string().starts_with("c.cfg:1: plugin.choria.srv_domain"));
        }
        let mut around = surroundings();
        around.variables.insert("CHORIA_SRV_DOMAIN".into(), "a..b".into());
        let report = load("", &around).unwrap_err();
        assert_eq!(report.errors[0].to_string(), "c.cfg: CHORIA_SRV_DOMAIN: \"a..b\" is no domain");
    }

    #[test]
    fn warns_about_values_that_choria_drops_silently() {
        warns("ttl = soon", "c.cfg:2: ttl: ignored: \"soon\" is no whole number");
        warns("ttl = 60s", "c.cfg:2: ttl: ignored: \"60s\" is no whole number");
        warns(
            "discovery_timeout = 2.5",
            "c.cfg:2: discovery_timeout: ignored: \"2.5\" is no whole number",
        );
        warns(
            "plugin.choria.use_srv = maybe",
            "c.cfg:2: plugin.choria.use_srv: \"maybe\" is no boolean, taken as false",
        );
        warns(
            "plugin.choria.network.connect_timeout = 5 min",
            "c.cfg:2: plugin.choria.network.connect_timeout: ignored: invalid time unit \"min\"",
        );
        warns(
            "plugin.choria.network.connect_timeout = -5s",
            "c.cfg:2: plugin.choria.network.connect_timeout: ignored: ",
        );
        warns(
            "plugin.choria.network.connect_timeout = 99999999999999999999",
            "plugin.choria.network.connect_timeout: ignored: ",
        );
        warns(
            "plugin.nats.user = u",
            "c.cfg: plugin.nats.user: not used, since plugin.nats.pass is not set",
        );
        warns(
            "plugin.nats.pass = p",
            "c.cfg: plugin.nats.pass: not used, since plugin.nats.user is not set",
        );
    }

    #[test]
    fn treats_every_key_as_the_list_says() {
        for (key, fate) in KEYS.iter().filter(|(key, _)| !key.ends_with('*')) {
            let text = format!("{HOSTS}{key} = 1\n");
            match fate {
                Fate::Honoured => {}
                Fate::Ignored => {
                    let (_, warnings) = good(&format!("{key} = x"));
                    assert!(warnings.is_empty(), "{warnings:?}");
                }
                Fate::Dropped(why) => {
                    warns(&format!("{key} = x"), &format!("c.cfg:2: {key}: {why}"));
                    let (_, warnings) = good(&format!("{key} = false"));
                    assert!(warnings.is_empty(), "{warnings:?}");
                }
                // Without security there is nothing to refuse.
                Fate::Refused(why) if Written::is_about(key) => {
                    warns(&format!("{key} = x"), &format!("c.cfg:2: {key}: ignored: {why}"));
                }
                Fate::Refused(why) => {
                    let report = load(&text, &surroundings()).unwrap_err();
                    let expected = format!("c.cfg:2: {key}: {why}");
                    assert_eq!(report.errors[0].to_string(), expected);
                }
            }
        }
        good("rpclimitmethod = random");
        good("plugin.choria.require_client_filter = no");
        warns(
            "plugin.choria.require_client_filter = maybe",
            "plugin.choria.require_client_filter: \"maybe\" is no boolean, taken as false",
        );
    }

    #[test]
    fn warns_about_keys_nobody_knows() {
        warns("identify = x", "c.cfg:2: identify: unknown key, ignored; did you mean `identity`?");
        warns(
            "plugin.choria.middleware_host = x:1",
            "c.cfg:2: plugin.choria.middleware_host: unknown key, ignored; did you mean `plugin.choria.middleware_hosts`?",
        );
        warns("identity: x", "c.cfg:2: ignored: it is no setting such as `key = value`");
        warns("ttl =", "c.cfg:2: ttl: ignored, since it has no value");
        warns("Identity = x", "c.cfg:2: Identity: unknown key, ignored; did you mean `identity`?");
        let mut around = surroundings();
        around.variables.insert("CHORIA_FED_COLLECTIVE".into(), "x".into());
        let (_, report) = load(HOSTS, &around).unwrap();
        assert!(report.warnings[0].text.starts_with("CHORIA_FED_COLLECTIVE: ignored"));
    }

    #[test]
    fn refuses_what_can_never_work() {
        bad("ttl = 29", "c.cfg:1: ttl: 29 is not at least 30");
        bad("ttl = -1", "ttl: -1 is not at least 30");
        bad("ttl = 99999999999", "ttl: 99999999999 is more than 4294967295 seconds");
        bad(
            "discovery_timeout = 0",
            "c.cfg:1: discovery_timeout: 0 is not within 1 and 3600 seconds",
        );
        bad("discovery_timeout = 3601", "discovery_timeout: 3601 is not within");
        bad(
            "plugin.choria.network.connect_timeout = 121s",
            "connect_timeout: 2m1s is not within 1ms and 2m",
        );
        bad("plugin.choria.network.connect_timeout = 0", "connect_timeout: 0s is not within");
        bad("identity = a b", "c.cfg:1: identity: ");
        bad("identity = a.>", "c.cfg:1: identity: ");
    }

    #[test]
    fn takes_the_environment_where_the_file_names_the_key() {
        let mut around = surroundings();
        for (name, value) in
            [("MCOLLECTIVE_NATS_USERNAME", "eu"), ("MCOLLECTIVE_NATS_PASSWORD", "ep")]
        {
            around.variables.insert(name.into(), value.into());
        }
        let user = |text: &str| load(&format!("{HOSTS}{text}"), &around).unwrap().0.user;
        assert_eq!(user(""), None);
        let both = "plugin.nats.user = u\nplugin.nats.pass = p\n";
        assert_eq!(user(both), Some(("eu".into(), Secret::new("ep"))));
    }

    #[test]
    fn logs_in_with_the_provisioning_password_if_there_is_one() {
        let mut report = Report::new("c.cfg");
        let mut draft = Draft::default();
        let text = format!("{HOSTS}plugin.nats.user = u\n");
        draft.take(text.as_bytes(), "", &surroundings(), &mut report);
        let config = draft
            .check(
                Network { password: Some(&Secret::new("pw")), ..INSECURE },
                &surroundings(),
                &mut report,
            )
            .config
            .unwrap();
        assert_eq!(config.user, Some(("provisioner".into(), Secret::new("pw"))));
        let expected = "c.cfg: plugin.nats.user, plugin.nats.pass: no effect, since `broker_provisioning_password` is set in the YAML file";
        let warnings: Vec<_> = report.warnings.iter().map(ToString::to_string).collect();
        assert_eq!(warnings, [expected]);
    }

    #[test]
    fn names_the_caller_as_choria_does() {
        let caller = |is_root, variables: &[(&str, &str)]| {
            let mut around = Surroundings { is_root, ..surroundings() };
            around.variables =
                variables.iter().map(|(k, v)| (k.to_string(), v.to_string())).collect();
            load(&format!("{HOSTS}identity = p.example.net\n"), &around).unwrap().0.caller
        };
        assert_eq!(caller(true, &[]), "choria=p.example.net");
        assert_eq!(caller(true, &[("USER", "root")]), "choria=p.example.net");
        assert_eq!(caller(false, &[]), "choria=p.example.net");
        assert_eq!(caller(false, &[("USER", "svc")]), "choria=svc.mcollective");
        assert_eq!(caller(false, &[("USER", "")]), "choria=.mcollective");
        let certname = ("MCOLLECTIVE_CERTNAME", "bob.choria");
        assert_eq!(caller(true, &[certname]), "choria=bob.choria");
        assert_eq!(caller(false, &[certname, ("USER", "svc")]), "choria=bob.choria");
        assert_eq!(caller(true, &[("MCOLLECTIVE_CERTNAME", "")]), "choria=p.example.net");
    }

    #[test]
    fn takes_the_caller_from_a_client_token() {
        let dir = env::temp_dir().join(format!("provisioner-caller-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let mut around = surroundings();
        around.variables.insert("HOME".into(), dir.display().to_string());
        let token = |name: &str, claims: &str| {
            let text = crate::jwt::testing::ed25519(r#"{"alg":"EdDSA","typ":"JWT"}"#, claims);
            std::fs::write(dir.join(name), text).unwrap();
        };
        token("good", r#"{"purpose":"choria_client_id","callerid":"choria=signer"}"#);
        token("other", r#"{"purpose":"choria_client_id","callerid":"choria=other"}"#);
        token("old", r#"{"purpose":"choria_client_id","callerid":"choria=signer","exp":1}"#);
        token("server", r#"{"purpose":"choria_server","identity":"n"}"#);
        token("nobody", r#"{"purpose":"choria_client_id"}"#);
        let key = "plugin.security.choria.token_file";
        let signer = "plugin.choria.security.request_signer.token_file";
        let read = |text: &str| {
            let (config, report) = load(&format!("{HOSTS}{text}"), &around).unwrap();
            let warnings: Vec<_> = report.warnings.iter().map(ToString::to_string).collect();
            (config.caller, warnings.join(" "), config.connection_name)
        };
        let mine = "prov1.example.net".to_string();
        let good = ("choria=signer".to_string(), String::new(), mine.clone());
        assert_eq!(read(&format!("{key} = ~/good")), good);
        assert_eq!(read(&format!("{signer} = {}/good ", dir.display())), good);
        assert_eq!(read(&format!("{signer} = ~/other\n{key} = ~/good")), good);
        for (name, why) in [
            ("old", "the token expired on 1970-01-01"),
            ("server", "not a client token"),
            ("nobody", "the token has no callerid"),
            ("missing", "No such file"),
        ] {
            let (caller, warnings, _) = read(&format!("{key} = ~/{name}"));
            assert_eq!(caller, format!("choria={mine}"), "{name}");
            assert!(warnings.starts_with("c.cfg:2: ") && warnings.contains(why), "{warnings}");
        }
        // Where it is what we log in with it is an error, which is enough.
        std::fs::write(dir.join("seed"), crate::jwt::testing::SIGNER_SEED).unwrap();
        let (mut draft, mut report) = (Draft::default(), Report::new("c.cfg"));
        let text = format!("{HOSTS}plugin.security.provider = choria\n{key} = ~/old\n");
        draft.take(text.as_bytes(), "", &around, &mut report);
        draft.take(b"plugin.security.choria.seed_file = ~/seed\n", "", &around, &mut report);
        draft.check(Network::default(), &around, &mut report);
        let expired = |found: &[Finding]| {
            found.iter().filter(|finding| finding.text.contains("expired on 1970-01-01")).count()
        };
        assert_eq!((expired(&report.errors), expired(&report.warnings)), (1, 0), "{report:?}");
        std::fs::remove_dir_all(&dir).unwrap();
        assert_eq!(path("~x/y", &surroundings()), Path::new("~x/y"));
    }

    #[test]
    fn says_when_the_host_name_may_be_too_short() {
        let around = Surroundings { host_name: "prov1".into(), ..surroundings() };
        let (config, report) = load(HOSTS, &around).unwrap();
        assert_eq!(config.identity.as_str(), "prov1");
        assert!(report.warnings[0].text.ends_with("the host name \"prov1\" is used"));
        let around = Surroundings { host_name: String::new(), ..surroundings() };
        assert!(load(HOSTS, &around).is_err());
    }

    #[test]
    fn reads_the_plugin_file_beside_it() {
        let dir = env::temp_dir().join(format!("provisioner-choria-{}", std::process::id()));
        std::fs::create_dir_all(dir.join("plugin.d")).unwrap();
        let file = dir.join("client.cfg");
        std::fs::write(&file, "identity = p.example.net\nplugin.choria.middleware_hosts = a:1\n")
            .unwrap();
        let plugin = |name: &str, text: &str| {
            std::fs::write(dir.join("plugin.d").join(name), text).unwrap();
        };
        plugin("choria.cfg", "middleware_hosts = b:2\nidentity = ignored\nsrv_domaim = x\n");
        plugin("nats.cfg", "# ours\nuser = u\nother = x\n");
        plugin("package.cfg", "provider = x\n");
        plugin("lost.conf", "a = b\n");
        plugin("nats.conf", "pass = p\n");
        plugin("README", "user = u\n");

        let read = |home: &str| {
            let mut around = surroundings();
            around.variables.insert("HOME".into(), home.into());
            let mut report = Report::new("c.cfg");
            let config = ChoriaConfig::load(&file, INSECURE, &around, &mut report).unwrap();
            let place = format!("{}/plugin.d/", dir.display());
            let warnings = report.warnings.iter().map(|w| w.to_string().replace(&place, ""));
            (config.brokers.to_string(), warnings.collect::<Vec<_>>())
        };
        let (broker, warnings) = read("/nowhere");
        assert_eq!(broker, "nats://b:2");
        assert_eq!(
            warnings,
            [
                "choria.cfg:3: plugin.choria.srv_domaim: unknown key, ignored; did you mean `plugin.choria.srv_domain`?",
                "lost.conf: not read, as in the original: its name must end in .cfg",
                "nats.cfg:2: plugin.nats.user: no effect here, as in the original; write it into the client file",
            ]
        );
        // A user's own file stands alone.
        let own = (String::from("nats://a:1"), Vec::new());
        assert_eq!(read(dir.to_str().unwrap()), own);

        let mut report = Report::new("c.cfg");
        assert!(ChoriaConfig::load(&dir, INSECURE, &surroundings(), &mut report).is_none());
        assert!(
            ChoriaConfig::load(&dir.join("no"), INSECURE, &surroundings(), &mut report).is_none()
        );
        assert_eq!(report.errors.len(), 2);
        std::fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn says_of_project_files_that_they_are_not_read() {
        let dir = env::temp_dir().join(format!("provisioner-project-{}", std::process::id()));
        let below = dir.join("a/b");
        std::fs::create_dir_all(&below).unwrap();
        let file = dir.join("client.cfg");
        std::fs::write(&file, "plugin.choria.middleware_hosts = a:1\n").unwrap();
        let project = dir.join("a/choria.conf");
        std::fs::write(&project, "plugin.choria.middleware_hosts = evil:1\n").unwrap();
        let around = Surroundings { directory: Some(below), ..surroundings() };
        let mut report = Report::new("c.cfg");
        let config = ChoriaConfig::load(&file, INSECURE, &around, &mut report).unwrap();
        assert_eq!(config.brokers.to_string(), "nats://a:1");
        let expected = format!("{}: not read: ", project.display());
        let warnings: Vec<_> = report.warnings.iter().map(ToString::to_string).collect();
        assert!(warnings.iter().any(|warning| warning.starts_with(&expected)), "{warnings:?}");
        std::fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn looks_for_the_file_where_choria_does() {
        let dir = env::temp_dir().join(format!("provisioner-home-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let mut around = surroundings();
        around.variables.insert("HOME".into(), dir.display().to_string());
        let elsewhere = default_file(&around);
        assert!(!elsewhere.starts_with(&dir));
        std::fs::write(dir.join(".mcollective"), "").unwrap();
        assert_eq!(default_file(&around), dir.join(".mcollective"));
        std::fs::write(dir.join(".choriarc"), "").unwrap();
        assert_eq!(default_file(&around), dir.join(".choriarc"));
        around.variables.insert("HOME".into(), String::new());
        assert_eq!(default_file(&around), elsewhere);
        std::fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn never_panics_on_damaged_input() {
        let good = b"identity = p\nttl = 60\nplugin.choria.middleware_hosts = nats://a:1, [::1]:2\nplugin.choria.network.connect_timeout = 1.5h\n";
        let mut rng = fastrand::Rng::with_seed(7);
        for _ in 0..5_000 {
            let mut bytes = good.to_vec();
            for _ in 0..rng.usize(1..4) {
                let at = rng.usize(..bytes.len());
                bytes[at] = rng.u8(..);
            }
            let mut draft = Draft::default();
            let mut report = Report::new("c.cfg");
            draft.take(&bytes, "", &surroundings(), &mut report);
            draft.check(INSECURE, &surroundings(), &mut report);
        }
    }

    const HOSTS: &str = "plugin.choria.middleware_hosts = broker:4222\n";

    fn surroundings() -> Surroundings {
        Surroundings {
            variables: HashMap::new(),
            host_name: "prov1.example.net".into(),
            is_root: true,
            ..Surroundings::default()
        }
    }

    fn load(text: &str, surroundings: &Surroundings) -> Result<(ChoriaConfig, Report), Report> {
        let (mut draft, mut report) = (Draft::default(), Report::new("c.cfg"));
        draft.take(text.as_bytes(), "", surroundings, &mut report);
        match draft.check(INSECURE, surroundings, &mut report).config {
            Some(config) if report.errors.is_empty() => Ok((config, report)),
            _ => Err(report),
        }
    }

    #[track_caller]
    fn good(text: &str) -> (ChoriaConfig, Vec<String>) {
        let (config, report) = load(&format!("{HOSTS}{text}"), &surroundings()).unwrap();
        (config, report.warnings.iter().map(ToString::to_string).collect())
    }

    #[track_caller]
    fn warns(text: &str, expected: &str) {
        let (_, warnings) = good(text);
        assert_eq!(warnings.len(), 1, "{text:?}: {warnings:?}");
        assert!(warnings[0].contains(expected), "{text:?}: {warnings:?}");
    }

    #[track_caller]
    fn bad(text: &str, expected: &str) {
        let is_about_hosts = expected.contains("middleware_hosts");
        let text = if is_about_hosts { text.to_string() } else { format!("{text}\n{HOSTS}") };
        let report = load(&text, &surroundings()).unwrap_err();
        assert_eq!(report.errors.len(), 1, "{text:?}: {:?}", report.errors);
        let error = report.errors[0].to_string();
        assert!(error.contains(expected), "{text:?}: {error}");
    }
}
