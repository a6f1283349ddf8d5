//! Every key of Choria's client file, and what becomes of it here.
//!
//! A provisioner is a client of a few actions, so most keys mean nothing to it: they belong to servers, brokers and other
//! commands. They are named all the same, so that README can say of each what it does.
//!
//! Source: go-choria's `config/config.go` and `config/choria.go`.

use crate::config::report::nearest;

/// What becomes of a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    /// It has its effect.
    Honoured,
    /// It has no effect on a provisioner, here as in the original.
    Ignored,
    /// It has an effect in the original and none here, which is worth a warning that says why.
    Dropped(&'static str),
    /// We can't do as it says; this says what to do instead.
    Refused(&'static str),
}

/// Every key with its fate; one that ends in `*` stands for all that begin alike.
pub const KEYS: &[(&str, Fate)] = &[
    ("identity", Fate::Honoured),
    ("ttl", Fate::Honoured),
    ("discovery_timeout", Fate::Honoured),
    ("plugin.choria.middleware_hosts", Fate::Honoured),
    ("plugin.choria.use_srv", Fate::Honoured),
    ("plugin.choria.srv_domain", Fate::Honoured),
    ("plugin.choria.network.connect_timeout", Fate::Honoured),
    ("plugin.nats.user", Fate::Honoured),
    ("plugin.nats.pass", Fate::Honoured),
    ("plugin.security.provider", Fate::Honoured),
    ("plugin.security.file.certificate", Fate::Honoured),
    ("plugin.security.file.key", Fate::Honoured),
    ("plugin.security.file.ca", Fate::Honoured),
    ("plugin.choria.ssldir", Fate::Honoured),
    ("plugin.security.support_legacy_certificates", Fate::Honoured),
    ("plugin.security.choria.token_file", Fate::Honoured),
    ("plugin.security.choria.seed_file", Fate::Honoured),
    ("plugin.security.choria.ca", Fate::Honoured),
    ("plugin.security.choria.certificate", Fate::Honoured),
    ("plugin.security.choria.key", Fate::Honoured),
    ("plugin.security.cipher_suites", Fate::Honoured),
    ("plugin.security.ecc_curves", Fate::Honoured),
    ("plugin.choria.security.request_signer.token_file", Fate::Honoured),
    // What is refused.
    (
        "plugin.nats.credentials",
        Fate::Refused(
            "a credentials file of NATS is not supported; use plugin.nats.user and plugin.nats.pass, or `broker_provisioning_password` in the YAML file",
        ),
    ),
    (
        "plugin.choria.require_client_filter",
        Fate::Refused("must be false: a discovery asks every node, and so has no filter"),
    ),
    ("plugin.choria.security.request_signer.url", Fate::Refused(NO_SIGNER)),
    ("plugin.choria.security.request_signer.service", Fate::Refused(NO_SIGNER)),
    ("plugin.security.client_anon_tls", Fate::Refused(NO_ANONYMOUS_TLS)),
    // What the original acts on.
    ("plugin.choria.federation.collectives", Fate::Dropped(NO_FEDERATION)),
    ("plugin.choria.federation_middleware_hosts", Fate::Dropped(NO_FEDERATION)),
    ("plugin.security.server_anon_tls", Fate::Dropped("ignored: it is for servers")),
    ("rpclimitmethod", Fate::Dropped(NO_LIMIT)),
    // The provisioner has its own.
    ("collectives", Fate::Ignored),
    ("main_collective", Fate::Ignored),
    ("logfile", Fate::Ignored),
    ("loglevel", Fate::Ignored),
    // For brokers and nodes, and for providers we don't have.
    ("plugin.security.issuer.*", Fate::Ignored),
    ("plugin.security.choria.trusted_signers", Fate::Ignored),
    ("plugin.security.choria.sign_replies", Fate::Ignored),
    ("plugin.security.certmanager.*", Fate::Ignored),
    ("plugin.security.pkcs11.*", Fate::Ignored),
    ("plugin.choria.security.request_signer.seed_file", Fate::Ignored),
    // For other commands.
    ("color", Fate::Ignored),
    ("libdir", Fate::Ignored),
    ("default_discovery_method", Fate::Ignored),
    ("default_discovery_options", Fate::Ignored),
    ("plugin.choria.discovery.*", Fate::Ignored),
    ("plugin.choria.federation.cluster", Fate::Ignored),
    ("plugin.choria.legacy_lifecycle_format", Fate::Ignored),
    ("plugin.choria.puppetserver_*", Fate::Ignored),
    ("plugin.choria.puppetca_*", Fate::Ignored),
    ("plugin.choria.puppetdb_*", Fate::Ignored),
    ("plugin.login.aaasvc.*", Fate::Ignored),
    // For servers and brokers.
    ("classesfile", Fate::Ignored),
    ("registration", Fate::Ignored),
    ("registration_collective", Fate::Ignored),
    ("registration_splay", Fate::Ignored),
    ("registerinterval", Fate::Ignored),
    ("rpcaudit", Fate::Ignored),
    ("rpcauthorization", Fate::Ignored),
    ("rpcauthprovider", Fate::Ignored),
    ("soft_shutdown_timeout", Fate::Ignored),
    ("plugin.yaml", Fate::Ignored),
    ("plugin.rpcaudit.*", Fate::Ignored),
    ("plugin.scout.*", Fate::Ignored),
    ("plugin.machines.*", Fate::Ignored),
    ("plugin.choria.adapter*", Fate::Ignored),
    ("plugin.choria.agent_provider.*", Fate::Ignored),
    ("plugin.choria.broker_*", Fate::Ignored),
    ("plugin.choria.executor.*", Fate::Ignored),
    ("plugin.choria.machine.*", Fate::Ignored),
    ("plugin.choria.network.*", Fate::Ignored),
    ("plugin.choria.prometheus_textfile_directory", Fate::Ignored),
    ("plugin.choria.registration.*", Fate::Ignored),
    ("plugin.choria.security.certname_whitelist", Fate::Ignored),
    ("plugin.choria.security.privileged_users", Fate::Ignored),
    ("plugin.choria.security.server.*", Fate::Ignored),
    ("plugin.choria.server.*", Fate::Ignored),
    ("plugin.choria.services.*", Fate::Ignored),
    ("plugin.choria.stats_*", Fate::Ignored),
    ("plugin.choria.status_*", Fate::Ignored),
    ("plugin.choria.submission.*", Fate::Ignored),
];

pub(super) const NO_FEDERATION: &str =
    "ignored: provisioning knows no federation, and the original's requests would not reach nodes";
const NO_SIGNER: &str =
    "nobody else signs the requests of a provisioner; use a certificate or a token of its own";
const NO_ANONYMOUS_TLS: &str = "we never connect without knowing the broker and saying who we are; use a certificate or a token of our own";
const NO_LIMIT: &str =
    "ignored: only first and random are known, and with others no request of the original leaves";

/// What becomes of `key`.
///
/// # Errors
///
/// Choria doesn't know it; the key that matters here and that was probably meant, if there is one.
pub fn fate(key: &str) -> Result<Fate, Option<&'static str>> {
    if let Some((_, fate)) = KEYS.iter().find(|(name, _)| *name == key) {
        return Ok(*fate);
    }
    // First, since a slip in a key that matters must not pass for one of a family that doesn't.
    let matter = KEYS.iter().filter(|(_, fate)| *fate != Fate::Ignored);
    if let Some(meant) = nearest(key, matter.map(|(name, _)| *name)) {
        return Err(Some(meant));
    }
    let family = KEYS.iter().find(|(name, _)| {
        name.strip_suffix('*').is_some_and(|begin| key.starts_with(begin) && key != begin)
    });
    family.map(|(_, fate)| *fate).ok_or(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_key_of_choria_has_its_fate() {
        for key in ALL.split_ascii_whitespace() {
            assert!(fate(key).is_ok(), "{key}: {:?}", fate(key));
        }
    }

    #[test]
    fn no_name_stands_twice_or_stands_for_nothing() {
        for (at, (name, _)) in KEYS.iter().enumerate() {
            assert!(KEYS[at + 1..].iter().all(|(other, _)| other != name), "{name}");
            let stem = name.strip_suffix('*').unwrap_or(name);
            let known = ALL.split_ascii_whitespace().any(|key| key.starts_with(stem));
            assert!(known, "{name} is no key of Choria");
        }
    }

    #[test]
    fn a_slip_is_no_member_of_a_family() {
        assert_eq!(
            fate("plugin.choria.network.connect_timeouts"),
            Err(Some("plugin.choria.network.connect_timeout"))
        );
        assert_eq!(fate("plugin.choria.network."), Err(None));
        assert_eq!(fate("plugin.choria.network.new"), Ok(Fate::Ignored));
        assert_eq!(fate("something.else"), Err(None));
    }

    /// Every key of go-choria 0.30, and those that its plugins read without declaring them.
    const ALL: &str = "
        registration registration_collective registerinterval registration_splay collectives main_collective logfile loglevel
        libdir identity color classesfile discovery_timeout rpcaudit rpcauthorization rpcauthprovider rpclimitmethod ttl
        default_discovery_method plugin.yaml default_discovery_options soft_shutdown_timeout
        plugin.choria.puppetserver_host plugin.choria.puppetserver_port plugin.choria.puppetca_host plugin.choria.puppetca_port
        plugin.choria.puppetdb_host plugin.choria.puppetdb_port plugin.choria.use_srv plugin.choria.srv_domain
        plugin.choria.server.provision plugin.choria.server.provision.allow_update plugin.choria.discovery.external.command
        plugin.choria.discovery.inventory.source plugin.choria.discovery.broadcast.windowed_timeout
        plugin.choria.federation.collectives plugin.choria.federation_middleware_hosts plugin.choria.federation.cluster
        plugin.choria.stats_address plugin.choria.stats_port plugin.choria.legacy_lifecycle_format plugin.nats.user
        plugin.nats.pass plugin.nats.credentials plugin.choria.middleware_hosts plugin.choria.network.client_hosts
        plugin.choria.network.public_url plugin.choria.network.client_port
        plugin.choria.network.client_tls_force_required plugin.choria.network.client_signer_cert
        plugin.choria.network.deny_server_connections plugin.choria.network.stream.executor_retention
        plugin.choria.network.stream.executor_replicas plugin.choria.network.stream.event_retention
        plugin.choria.network.stream.event_replicas plugin.choria.network.gateway_name plugin.choria.network.gateway_port
        plugin.choria.network.gateway_remotes plugin.choria.network.stream.leader_election_replicas
        plugin.choria.network.stream.leader_election_ttl plugin.choria.network.leafnode_port
        plugin.choria.network.leafnode_remotes plugin.choria.network.listen_address
        plugin.choria.network.stream.machine_retention plugin.choria.network.stream.machine_replicas
        plugin.choria.network.mapping.names plugin.choria.network.peer_password plugin.choria.network.peer_port
        plugin.choria.network.peer_user plugin.choria.network.peers plugin.choria.network.pprof_port
        plugin.choria.network.provisioning.client_password plugin.choria.network.provisioning.provisioner_without_token
        plugin.choria.network.provisioning.signer_cert plugin.choria.network.server_signer_cert
        plugin.choria.network.stream.advisory_retention plugin.choria.network.stream.advisory_replicas
        plugin.choria.network.stream.manage_streams plugin.choria.network.stream.store plugin.choria.network.system.password
        plugin.choria.network.system.user plugin.choria.network.tls_timeout plugin.choria.network.auth_timeout
        plugin.choria.network.connect_timeout plugin.choria.network.websocket_advertise
        plugin.choria.network.websocket_port plugin.choria.network.write_deadline
        plugin.choria.network.soft_shutdown_timeout plugin.choria.broker_network plugin.choria.broker_federation
        plugin.choria.adapters plugin.choria.adapter.x.type plugin.choria.registration.file_content.data
        plugin.choria.registration.file_content.target plugin.choria.registration.file_content.compression
        plugin.choria.registration.inventory_content.compression plugin.choria.registration.inventory_content.target
        plugin.choria.registration.size_trigger plugin.choria.registration.size_interval
        plugin.choria.agent_provider.mcorpc.agent_shim plugin.choria.agent_provider.mcorpc.config
        plugin.choria.agent_provider.mcorpc.libdir plugin.security.provider plugin.security.server_anon_tls
        plugin.security.client_anon_tls plugin.login.aaasvc.login.url plugin.security.cipher_suites
        plugin.security.ecc_curves plugin.security.issuer.names plugin.security.issuer.x.public
        plugin.choria.security.server.token_file plugin.choria.security.server.seed_file plugin.choria.ssldir
        plugin.choria.security.privileged_users plugin.choria.security.certname_whitelist
        plugin.security.support_legacy_certificates plugin.choria.security.request_signer.seed_file
        plugin.choria.security.request_signer.token_file plugin.choria.security.request_signer.url
        plugin.choria.security.request_signer.service plugin.security.choria.trusted_signers
        plugin.security.choria.certificate plugin.security.choria.key plugin.security.choria.ca
        plugin.security.choria.token_file plugin.security.choria.seed_file plugin.security.choria.sign_replies
        plugin.security.file.certificate plugin.security.file.key plugin.security.file.ca
        plugin.security.certmanager.namespace plugin.security.certmanager.issuer plugin.security.certmanager.replace
        plugin.security.certmanager.alt_names plugin.security.certmanager.api_version plugin.security.pkcs11.driver_file
        plugin.security.pkcs11.slot plugin.choria.machine.store plugin.choria.machine.signing_key
        plugin.choria.machine.http_port plugin.choria.status_file_path plugin.choria.status_update_interval
        plugin.choria.prometheus_textfile_directory plugin.scout.overrides plugin.scout.tags plugin.scout.agent_disabled
        plugin.scout.goss.denied_local_resources plugin.scout.goss.denied_remote_resources
        plugin.choria.require_client_filter plugin.choria.services.registry.store plugin.choria.services.registry.cache
        plugin.choria.submission.spool plugin.choria.submission.max_spool_size plugin.rpcaudit.logfile
        plugin.rpcaudit.logfile.group plugin.rpcaudit.logfile.mode plugin.choria.executor.enabled
        plugin.choria.executor.spool plugin.machines.download plugin.machines.bucket plugin.machines.key
        plugin.machines.purge plugin.machines.poll_interval plugin.machines.check_interval plugin.machines.signing_key
    ";
}
