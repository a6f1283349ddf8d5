//! What a reload may change while the daemon runs, and what only a restart can.

use std::collections::BTreeSet;

use regex::Regex;

use crate::config::choria::ChoriaConfig;
use crate::config::signing::SigningFiles;
use crate::config::{Config, Cooperation, Enrollment, Features};

/// The keys whose settings differ between what is in force and what the files say now.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Changes {
    /// Those that follow a reload.
    pub followed: Vec<&'static str>,
    /// Those that are read at start only.
    pub needs_restart: Vec<&'static str>,
}

/// Whether a setting follows a reload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Follows {
    /// It does.
    Reload,
    /// It is read at start only.
    Restart,
}

impl Changes {
    /// From `old` to `new`.
    pub fn between(old: &Config, new: &Config) -> Changes {
        let mut changes = Changes::default();
        for (key, follows, differs) in compare(old, new) {
            match follows {
                _ if !differs => {}
                Follows::Reload => changes.followed.push(key),
                Follows::Restart => changes.needs_restart.push(key),
            }
        }
        changes
    }
}

/// Every key that has an effect, and whether it follows a reload.
pub fn keys(any: &Config) -> impl Iterator<Item = (&'static str, Follows)> {
    compare(any, any).into_iter().map(|(key, follows, _)| (key, follows))
}

/// Every key, whether it follows a reload, and whether its settings differ.
fn compare(old: &Config, new: &Config) -> Vec<(&'static str, Follows, bool)> {
    // Named one by one, so that a setting added there can't be forgotten here.
    let Config {
        workers,
        interval,
        logfile,
        loglevel,
        log_format,
        helper,
        token,
        lifecycle_component,
        choria_insecure,
        site,
        monitor_port,
        monitor_address,
        admin_socket,
        audit_log,
        broker_provisioning_password,
        cert_deny_list,
        jwt_verify_cert,
        signing,
        server_jwt_validity,
        features,
        upgrades_repository,
        upgrades_optional,
        node_timeout,
        probe_timeout,
        probe_window,
        work_queue,
        drain_timeout,
        rate_limit,
        retry_max,
        helper_mode,
        helper_timeout,
        helper_output_max,
        contradiction_wait,
        cooperation,
    } = old;
    let texts = |list: &[Regex]| list.iter().map(Regex::as_str).map(str::to_owned).collect();
    let (denied, denied_now): (Vec<_>, Vec<_>) =
        (texts(cert_deny_list), texts(&new.cert_deny_list));
    let key = |files: &Option<SigningFiles>| files.as_ref().map(|files| files.key.clone());
    let chain = |files: &Option<SigningFiles>| files.as_ref()?.token.clone();
    let Features { jwt, upgrades, enrollment } = *features;
    let has_changed = |kind| (enrollment == kind) != (new.features.enrollment == kind);
    let becomes = |kind| (*cooperation == kind) != (new.cooperation == kind);
    use Follows::{Reload, Restart};
    vec![
        ("workers", Reload, *workers != new.workers),
        ("interval", Reload, *interval != new.interval),
        ("loglevel", Reload, *loglevel != new.loglevel),
        ("helper", Reload, *helper != new.helper),
        ("token", Reload, *token != new.token),
        ("audit_log", Reload, *audit_log != new.audit_log),
        ("cert_deny_list", Reload, denied != denied_now),
        ("jwt_verify_cert", Reload, *jwt_verify_cert != new.jwt_verify_cert),
        ("jwt_signing_key", Reload, key(signing) != key(&new.signing)),
        ("jwt_signing_token", Reload, chain(signing) != chain(&new.signing)),
        ("server_jwt_validity", Reload, *server_jwt_validity != new.server_jwt_validity),
        ("features.jwt", Reload, jwt != new.features.jwt),
        ("features.pki", Reload, has_changed(Enrollment::Pki)),
        ("features.ed25519", Reload, has_changed(Enrollment::OrganizationIssuer)),
        ("features.upgrades", Reload, upgrades != new.features.upgrades),
        ("upgrades_repository", Reload, *upgrades_repository != new.upgrades_repository),
        ("upgrades_optional", Reload, *upgrades_optional != new.upgrades_optional),
        ("node_timeout", Reload, *node_timeout != new.node_timeout),
        ("probe_timeout", Reload, *probe_timeout != new.probe_timeout),
        ("drain_timeout", Reload, *drain_timeout != new.drain_timeout),
        ("rate_limit", Reload, *rate_limit != new.rate_limit),
        ("retry_max", Reload, *retry_max != new.retry_max),
        ("helper_timeout", Reload, *helper_timeout != new.helper_timeout),
        ("helper_output_max", Reload, *helper_output_max != new.helper_output_max),
        ("contradiction_wait", Reload, *contradiction_wait != new.contradiction_wait),
        ("logfile", Restart, *logfile != new.logfile),
        ("log_format", Restart, *log_format != new.log_format),
        ("lifecycle_component", Restart, *lifecycle_component != new.lifecycle_component),
        ("choria_insecure", Restart, *choria_insecure != new.choria_insecure),
        ("site", Restart, *site != new.site),
        ("monitor_port", Restart, *monitor_port != new.monitor_port),
        ("monitor_address", Restart, *monitor_address != new.monitor_address),
        ("admin_socket", Restart, *admin_socket != new.admin_socket),
        (
            "broker_provisioning_password",
            Restart,
            *broker_provisioning_password != new.broker_provisioning_password,
        ),
        ("probe_window", Restart, *probe_window != new.probe_window),
        ("work_queue", Restart, *work_queue != new.work_queue),
        ("helper_mode", Restart, *helper_mode != new.helper_mode),
        ("leader_election", Restart, becomes(Cooperation::Elected)),
        ("active_active", Restart, becomes(Cooperation::ActiveActive)),
    ]
}

/// The keys of Choria's client file that say something else; none of them follows a reload.
pub fn client_changes(old: &ChoriaConfig, new: &ChoriaConfig) -> Vec<String> {
    let keys = old.written.keys().chain(new.written.keys()).collect::<BTreeSet<_>>();
    let differs = |key: &&String| old.written.get(*key) != new.written.get(*key);
    keys.into_iter().filter(differs).cloned().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::file::{Features as WrittenFeatures, File};
    use crate::config::report::Report;

    const HEX: &str = "03a107bff3ce10be1d70dd18e74bc09967e4d6309ba50d5f1ddc8664125531b8";

    fn config(yaml: &str) -> Config {
        let mut report = Report::default();
        let yaml = format!("helper: /bin/true\n{yaml}");
        Config::parse(yaml.as_bytes(), &mut report).unwrap_or_else(|| panic!("{report:?}"))
    }

    #[test]
    fn every_key_follows_a_reload_or_needs_a_restart() {
        let mut known: Vec<&str> = keys(&config("")).map(|(key, _)| key).collect();
        known.sort_unstable();
        // Those of the original that do nothing, and the key of a part whose own keys are compared.
        let without_effect = ["broker_port", "rego_policy", "features"];
        let own = File::KEYS.iter().filter(|key| !without_effect.contains(key));
        let mut keys: Vec<String> = own.map(|key| (*key).to_owned()).collect();
        keys.extend(WrittenFeatures::KEYS.iter().map(|key| format!("features.{key}")));
        keys.sort_unstable();
        assert_eq!(known, keys);
    }

    #[test]
    fn names_the_keys_that_say_something_else() {
        same("", "");
        same("interval: 60s", "# The default.\ninterval: 1m");
        same("cert_deny_list: []", "");
        follows("workers: 3", "workers: 4", &["workers"]);
        follows("cert_deny_list: ['^a']", "cert_deny_list: ['^b']", &["cert_deny_list"]);
        follows("token: a", "token: b", &["token"]);
        let pki = "features: {pki: true}";
        follows("", pki, &["features.pki"]);
        let jwt = format!("jwt_verify_cert: {HEX}\nfeatures: {{jwt: true}}");
        follows("", &jwt, &["jwt_verify_cert", "features.jwt"]);
        follows("helper_timeout: 20s", "node_timeout: 3m", &["node_timeout", "helper_timeout"]);
        needs_restart("", "site: lon", &["site"]);
        needs_restart("workers: 3", "logfile: stderr\nwork_queue: 9", &["logfile", "work_queue"]);
        needs_restart("", "broker_provisioning_password: x", &["broker_provisioning_password"]);
    }

    #[track_caller]
    fn same(old: &str, new: &str) {
        assert_eq!(Changes::between(&config(old), &config(new)), Changes::default());
    }

    #[track_caller]
    fn follows(old: &str, new: &str, keys: &[&str]) {
        let changes = Changes::between(&config(old), &config(new));
        assert_eq!(
            (changes.followed.as_slice(), changes.needs_restart.as_slice()),
            (keys, &[][..])
        );
    }

    #[track_caller]
    fn needs_restart(old: &str, new: &str, keys: &[&str]) {
        assert_eq!(Changes::between(&config(old), &config(new)).needs_restart, keys);
    }
}
