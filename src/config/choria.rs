//! Choria's own client file: lines of `key = value`, and what of them this daemon honours.
//!
//! The parser never fails in the original: a wrong value is dropped without a word. Here it is a warning with its line,
//! and where the original would then misbehave for ever, an error. The `choria.conf` files of the working directory and
//! those above it are not read: a daemon's configuration must not depend on where it starts.
//!
//! Source: go-choria's `config/util.go`, `config/config.go` and `confkey/confkey.go`.

use std::collections::HashMap;
use std::env;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::config::duration::words;
use crate::config::report::{Report, nearest};
use crate::config::{Secret, duration, read_file};
use crate::protocol::Identity;
use crate::transport::servers::ServerAddress;

/// Who we are on the network, and where it is.
#[derive(Debug, Clone)]
pub struct ChoriaConfig {
    /// The sender of our messages, and the identity in our own lifecycle event.
    pub identity: Identity,
    /// The caller of our requests. With the identity it names the lock that nodes hold for us.
    pub caller: String,
    /// What the broker lists our connection as.
    pub connection_name: String,
    /// The brokers; at least one.
    pub servers: Vec<ServerAddress>,
    /// How long a request stays valid, in seconds; nodes ignore requests with less than 30.
    pub ttl_secs: u32,
    /// Window of a discovery, and part of every request's time-out.
    pub discovery_timeout: Duration,
    /// Longest wait for a connection to a broker.
    pub connect_timeout: Duration,
    /// User and password for the broker.
    pub user: Option<(String, Secret)>,
}

/// What Choria's settings depend on beside their file.
#[derive(Debug, Clone, Default)]
pub struct Surroundings {
    /// The environment.
    pub variables: HashMap<String, String>,
    /// The operating system's name for this machine.
    pub host_name: String,
    /// Whether we run as root.
    pub is_root: bool,
}

impl Surroundings {
    /// Those of this process.
    pub fn of_process() -> Surroundings {
        let text = |text: std::ffi::OsString| text.into_string().ok();
        Surroundings {
            variables: env::vars_os().filter_map(|(k, v)| Some((text(k)?, text(v)?))).collect(),
            host_name: rustix::system::uname().nodename().to_string_lossy().into_owned(),
            is_root: rustix::process::geteuid().is_root(),
        }
    }

    fn variable(&self, name: &str) -> Option<&str> {
        self.variables.get(name).map(String::as_str)
    }
}

/// The client file that is read when none is named: the first that exists, else the last place to look.
///
/// Source: `UserConfig` in go-choria's `internal/util/util.go`.
pub fn default_file(surroundings: &Surroundings) -> PathBuf {
    let home = surroundings.variable("HOME").filter(|home| !home.is_empty()).map(Path::new);
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
    /// `provisioning_password` replaces the file's user and password. `None` exactly if there was an error.
    pub fn load(
        path: &Path,
        provisioning_password: Option<&Secret>,
        surroundings: &Surroundings,
        report: &mut Report,
    ) -> Option<ChoriaConfig> {
        let errors = report.errors.len();
        let mut draft = Draft::default();
        match read_file(path) {
            Ok(bytes) => draft.take(&bytes, "", surroundings, report),
            Err(error) => {
                report.unreadable(&error);
                return None;
            }
        }
        if let Some((plugin, bytes)) = plugin_file(path, surroundings) {
            let mut plugin_report = Report::new(plugin.display().to_string());
            match bytes {
                Ok(bytes) => draft.take(&bytes, "plugin.choria.", surroundings, &mut plugin_report),
                Err(error) => plugin_report.unreadable(&error),
            }
            report.append(plugin_report);
        }
        let config = draft.check(provisioning_password, surroundings, report);
        config.filter(|_| report.errors.len() == errors)
    }
}

/// `plugin.d/choria.cfg` beside the client file, which the original reads unless the client file is a user's own.
fn plugin_file(path: &Path, surroundings: &Surroundings) -> Option<(PathBuf, io::Result<Vec<u8>>)> {
    let path = std::path::absolute(path).ok()?;
    // Compared as text, as in the original.
    let home = surroundings.variable("HOME").filter(|home| !home.is_empty());
    if home.is_some_and(|home| path.to_string_lossy().starts_with(home)) {
        return None;
    }
    let plugin = path.parent()?.join("plugin.d/choria.cfg");
    match read_file(&plugin) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        bytes => Some((plugin, bytes)),
    }
}

/// The honoured settings as far as they are known, with the original's defaults.
struct Draft {
    identity: Option<(usize, String)>,
    hosts: Option<(usize, String)>,
    use_srv: bool,
    ttl: (Option<usize>, i64),
    discovery_timeout: (Option<usize>, i64),
    connect_timeout: (Option<usize>, Duration),
    user: Option<String>,
    password: Option<Secret>,
}

impl Default for Draft {
    fn default() -> Draft {
        Draft {
            identity: None,
            hosts: None,
            use_srv: true,
            ttl: (None, 60),
            discovery_timeout: (None, 2),
            connect_timeout: (None, Duration::from_secs(2)),
            user: None,
            password: None,
        }
    }
}

impl Draft {
    fn take(
        &mut self,
        bytes: &[u8],
        prefix: &str,
        surroundings: &Surroundings,
        report: &mut Report,
    ) {
        let text = String::from_utf8_lossy(bytes);
        for (line, text) in text.split('\n').enumerate() {
            if let Some((key, value)) = setting(text) {
                self.set(line + 1, &format!("{prefix}{key}"), value, surroundings, report);
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
        let or_variable =
            |name: &str| surroundings.variable(name).filter(|v| !v.is_empty()).unwrap_or(value);
        match key {
            "identity" => self.identity = Some((line, value.to_string())),
            "plugin.choria.middleware_hosts" => self.hosts = Some((line, value.to_string())),
            "plugin.choria.use_srv" => {
                self.use_srv = boolean(value).unwrap_or_else(|| {
                    report.warn(line, format!("{key}: {value:?} is no boolean, taken as false"));
                    false
                });
            }
            "ttl" => integer(line, key, value, &mut self.ttl, report),
            "discovery_timeout" => integer(line, key, value, &mut self.discovery_timeout, report),
            "plugin.choria.network.connect_timeout" => match seconds_or_duration(value) {
                Ok(timeout) => self.connect_timeout = (Some(line), timeout),
                Err(error) => {
                    report.warn(line, format!("{key}: ignored: {error}, found {value:?}"))
                }
            },
            "plugin.nats.user" => {
                self.user = Some(or_variable("MCOLLECTIVE_NATS_USERNAME").to_string());
            }
            "plugin.nats.pass" => {
                self.password = Some(Secret::new(or_variable("MCOLLECTIVE_NATS_PASSWORD")));
            }
            _ if NOT_HONOURED.contains(&key) => {
                // Switched off it changes nothing.
                if boolean(value) != Some(false) {
                    report.warn(line, format!("{key}: not honoured by this version"));
                }
            }
            _ => {
                if let Some(meant) = nearest(key, HONOURED.iter().copied()) {
                    report.warn(
                        line,
                        format!("{key}: unknown key, ignored; did you mean `{meant}`?"),
                    );
                }
            }
        }
    }

    fn check(
        self,
        provisioning_password: Option<&Secret>,
        surroundings: &Surroundings,
        report: &mut Report,
    ) -> Option<ChoriaConfig> {
        if surroundings.variable("CHORIA_FED_COLLECTIVE").is_some_and(|value| !value.is_empty()) {
            report.warn(
                None,
                "CHORIA_FED_COLLECTIVE: not honoured, provisioning knows no federation",
            );
        }
        let servers = servers(self.hosts, self.use_srv, report);
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
        let user = match (provisioning_password, self.user, self.password) {
            (Some(password), _, _) => Some((PROVISIONING_USER.to_string(), password.clone())),
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
        let identity = identity(self.identity, surroundings, report)?;
        let certname = certname(&identity, surroundings);
        Some(ChoriaConfig {
            caller: format!("choria={certname}"),
            connection_name: certname,
            identity,
            servers,
            ttl_secs,
            discovery_timeout: Duration::from_secs(discovery_timeout.unsigned_abs()),
            connect_timeout,
            user,
        })
    }
}

/// One line of the file.
///
/// The original searches it for the regular expression `(.+?)\s*=\s*(.+)`, so the key has at least one character,
/// whatever that is, and so has the value.
pub fn setting(line: &str) -> Option<(&str, &str)> {
    let line = line.trim();
    if line.starts_with('#') {
        return None;
    }
    let is_space = |c: char| matches!(c, ' ' | '\t' | '\x0c' | '\r');
    line.char_indices().skip(1).filter(|(_, c)| *c == '=').find_map(|(at, _)| {
        let value = line[at + 1..].trim_start_matches(is_space);
        (!value.is_empty()).then(|| (line[..at].trim_end_matches(is_space), value))
    })
}

fn boolean(value: &str) -> Option<bool> {
    match value.trim().to_ascii_lowercase().as_str() {
        "1" | "yes" | "true" | "y" | "t" => Some(true),
        "0" | "no" | "false" | "n" | "f" => Some(false),
        _ => None,
    }
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

fn servers(
    hosts: Option<(usize, String)>,
    use_srv: bool,
    report: &mut Report,
) -> Vec<ServerAddress> {
    const KEY: &str = "plugin.choria.middleware_hosts";
    let hosts = hosts.filter(|(_, list)| list.split(',').any(|host| !host.trim().is_empty()));
    let Some((line, list)) = hosts else {
        if use_srv {
            report.error(
                None,
                format!("{KEY}: must be set, such as broker1.example.net:4222; SRV records are not looked up by this version"),
            );
            return Vec::new();
        }
        return ServerAddress::parse(BROKER_DEFAULT).into_iter().collect();
    };
    let mut servers = Vec::new();
    // The original gives up for ever, and in silence, on a list with an empty part in it.
    for host in list.split(',').map(str::trim).filter(|host| !host.is_empty()) {
        match ServerAddress::parse(host) {
            Ok(server) => {
                if server.credentials_dropped() {
                    report.warn(line, format!("{KEY}: user and password of {server} are not used"));
                }
                servers.push(server);
            }
            Err(error) => report.error(line, format!("{KEY}: {error}")),
        }
    }
    servers
}

fn identity(
    written: Option<(usize, String)>,
    surroundings: &Surroundings,
    report: &mut Report,
) -> Option<Identity> {
    let (line, text) = match written {
        Some((line, text)) => (Some(line), text),
        None => {
            let name = surroundings.host_name.clone();
            if name.matches('.').count() < 2 {
                report.warn(
                    None,
                    format!("identity: not set, the host name {name:?} is used; the original may have found a longer one in DNS or with facter"),
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

/// The name of the certificate we would have, also where there are none.
///
/// Source: `certname` in go-choria's `providers/security/filesec/option.go`.
fn certname(identity: &Identity, surroundings: &Surroundings) -> String {
    if let Some(name) =
        surroundings.variable("MCOLLECTIVE_CERTNAME").filter(|name| !name.is_empty())
    {
        return name.to_string();
    }
    match surroundings.variable("USER") {
        // An empty one counts, too: the original makes ".mcollective" of it.
        Some(user) if !surroundings.is_root => format!("{user}.mcollective"),
        _ => identity.as_str().to_string(),
    }
}

/// Keys that have an effect here.
pub const HONOURED: &[&str] = &[
    "identity",
    "ttl",
    "discovery_timeout",
    "plugin.choria.middleware_hosts",
    "plugin.choria.use_srv",
    "plugin.choria.network.connect_timeout",
    "plugin.nats.user",
    "plugin.nats.pass",
];

/// Keys that would have an effect in the original, even without TLS. Others have none there either.
const NOT_HONOURED: &[&str] = &[
    "plugin.choria.srv_domain",
    "plugin.choria.federation.collectives",
    "plugin.choria.federation_middleware_hosts",
    "plugin.nats.credentials",
    "plugin.security.client_anon_tls",
    "plugin.security.server_anon_tls",
    "plugin.security.choria.token_file",
    "plugin.choria.security.request_signer.url",
    "plugin.choria.security.request_signer.service",
    "plugin.choria.security.request_signer.token_file",
];

/// The user that a provisioning password belongs to.
const PROVISIONING_USER: &str = "provisioner";

/// The broker of a network that names none.
const BROKER_DEFAULT: &str = "nats://puppet:4222";

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
    use super::*;

    #[test]
    fn reads_lines_as_choria_does() {
        check_line("a=b", Some(("a", "b")));
        check_line("a = b", Some(("a", "b")));
        check_line("a\t=\tb", Some(("a", "b")));
        check_line("a = b = c", Some(("a", "b = c")));
        check_line("a==b", Some(("a", "=b")));
        check_line("==b", Some(("=", "b")));
        check_line("a = \"q\"", Some(("a", "\"q\"")));
        check_line("a = b # c", Some(("a", "b # c")));
        check_line("; a=b", Some(("; a", "b")));
        check_line("  a=b  ", Some(("a", "b")));
        check_line("a=b\r", Some(("a", "b")));
        check_line("\u{feff}a = b", Some(("\u{feff}a", "b")));
        check_line("\u{b}a=b\u{85}", Some(("a", "b"))); // Trimmed by Unicode ...
        check_line("a\u{a0}=\u{a0}b", Some(("a\u{a0}", "\u{a0}b"))); // ... but not around the sign.
        check_line("é = b", Some(("é", "b")));
        check_line("= = b", Some(("=", "b")));
        check_line("a =", None);
        check_line("=b", None);
        check_line("==", None);
        check_line("=", None);
        check_line("[x]", None);
        check_line("# a=b", None);
        check_line("   # a=b", None);
        check_line("", None);
        check_line("a", None);
    }

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
        let servers = |text: &str| {
            let config = load(text, &surroundings()).unwrap();
            config.0.servers.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ")
        };
        let key = "plugin.choria.middleware_hosts";
        assert_eq!(servers(&format!("{key} = a:1, b:2")), "nats://a:1 nats://b:2");
        assert_eq!(servers(&format!("{key} = ,a:1,, b:2,")), "nats://a:1 nats://b:2");
        assert_eq!(servers(&format!("{key} = a:1\n{key} = nats://b:2")), "nats://b:2");
        assert_eq!(servers(&format!("{key} = [::1]:4222")), "nats://[::1]:4222");
        assert_eq!(servers("plugin.choria.use_srv = false"), "nats://puppet:4222");
        assert_eq!(servers(&format!("{key} = ,\nplugin.choria.use_srv = 0")), "nats://puppet:4222");

        bad("", "c.cfg: plugin.choria.middleware_hosts: must be set");
        bad("plugin.choria.use_srv = true", "plugin.choria.middleware_hosts: must be set");
        bad(&format!("\n{key} = a:1, b"), "c.cfg:2: plugin.choria.middleware_hosts: ");
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
            "c.cfg:2: plugin.choria.network.connect_timeout: ignored: invalid time unit 'n'",
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
    fn warns_about_keys_it_does_not_honour() {
        for key in NOT_HONOURED {
            warns(&format!("{key} = x"), &format!("c.cfg:2: {key}: not honoured by this version"));
            let (_, warnings) = good(&format!("{key} = false"));
            assert!(warnings.is_empty(), "{warnings:?}");
        }
        warns("identify = x", "c.cfg:2: identify: unknown key, ignored; did you mean `identity`?");
        warns(
            "plugin.choria.middleware_host = x:1",
            "c.cfg:2: plugin.choria.middleware_host: unknown key, ignored; did you mean `plugin.choria.middleware_hosts`?",
        );
        warns("Identity = x", "c.cfg:2: Identity: unknown key, ignored; did you mean `identity`?");
        let mut around = surroundings();
        around.variables.insert("CHORIA_FED_COLLECTIVE".into(), "x".into());
        let (_, report) = load(HOSTS, &around).unwrap();
        assert!(report.warnings[0].text.starts_with("CHORIA_FED_COLLECTIVE: not honoured"));
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
        let config = draft.check(Some(&Secret::new("pw")), &surroundings(), &mut report).unwrap();
        assert_eq!(config.user, Some(("provisioner".into(), Secret::new("pw"))));
        assert!(report.warnings.is_empty());
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
    fn says_when_the_host_name_may_be_too_short() {
        let around = Surroundings { host_name: "prov1".into(), ..surroundings() };
        let (config, report) = load(HOSTS, &around).unwrap();
        assert_eq!(config.identity.as_str(), "prov1");
        assert!(
            report.warnings[0]
                .text
                .starts_with("identity: not set, the host name \"prov1\" is used")
        );
        let around = Surroundings { host_name: String::new(), ..surroundings() };
        assert!(load(HOSTS, &around).is_err());
    }

    #[test]
    fn reads_the_plugin_file_beside_it() {
        let dir = env::temp_dir().join(format!("provisioner-choria-{}", std::process::id()));
        std::fs::create_dir_all(dir.join("plugin.d")).unwrap();
        let path = dir.join("client.cfg");
        std::fs::write(&path, "identity = p.example.net\nplugin.choria.middleware_hosts = a:1\n")
            .unwrap();
        let plugin = "middleware_hosts = b:2\nidentity = ignored\nsrv_domain = x\n";
        std::fs::write(dir.join("plugin.d/choria.cfg"), plugin).unwrap();

        let read = |home: &str| {
            let mut around = surroundings();
            around.variables.insert("HOME".into(), home.into());
            let mut report = Report::new("c.cfg");
            let config = ChoriaConfig::load(&path, None, &around, &mut report).unwrap();
            (config.servers[0].to_string(), report.warnings)
        };
        let (server, warnings) = read("/nowhere");
        assert_eq!(server, "nats://b:2");
        let place =
            dir.join("plugin.d/choria.cfg:3: plugin.choria.srv_domain").display().to_string();
        assert!(warnings[0].to_string().starts_with(&place), "{warnings:?}");
        // A user's own file stands alone.
        assert_eq!(read(dir.to_str().unwrap()).0, "nats://a:1");

        let mut report = Report::new("c.cfg");
        assert!(ChoriaConfig::load(&dir, None, &surroundings(), &mut report).is_none());
        assert!(ChoriaConfig::load(&dir.join("no"), None, &surroundings(), &mut report).is_none());
        assert_eq!(report.errors.len(), 2);
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
            draft.check(None, &surroundings(), &mut report);
        }
    }

    const HOSTS: &str = "plugin.choria.middleware_hosts = broker:4222\n";

    fn surroundings() -> Surroundings {
        Surroundings {
            variables: HashMap::new(),
            host_name: "prov1.example.net".into(),
            is_root: true,
        }
    }

    fn load(text: &str, surroundings: &Surroundings) -> Result<(ChoriaConfig, Report), Report> {
        let (mut draft, mut report) = (Draft::default(), Report::new("c.cfg"));
        draft.take(text.as_bytes(), "", surroundings, &mut report);
        match draft.check(None, surroundings, &mut report) {
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

    #[track_caller]
    fn check_line(line: &str, expected: Option<(&str, &str)>) {
        assert_eq!(setting(line), expected, "{line:?}");
    }
}
