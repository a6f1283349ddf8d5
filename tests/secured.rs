//! Files that prove who we are and whom we believe: what is wrong with them is said at the start, and what is wrong with a broker when
//! we meet it.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;
mod fleet;

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt as _;

use common::choria_broker::{ChoriaBroker, Rules};
use common::{Builder, Daemon, NatsServer, SOON, TempDir, wait_until, within};
use fleet::certificates::{Certified, Wanted};
use fleet::network::{CERTNAME, Network, Setup, broker_of, provisioner_of};
use fleet::{Fleet, unix_now};
use openssl::symm::Cipher;

#[test]
fn what_is_wrong_with_a_file_is_said_at_the_start() {
    use Setup::{Issuer, X509};
    let check = |setup: Setup, setting: &str, spoil: &dyn Fn(&Network), expected: &str| {
        let site = Site::new(setup);
        spoil(&site.network);
        let secrets: Vec<String> = ["own.key", "signer.seed", "signer.jwt"]
            .into_iter()
            .filter_map(|name| fs::read_to_string(site.network.path(name)).ok())
            .filter(|text| !text.is_empty())
            .collect();
        let (code, said) = site.daemon("127.0.0.1:1").run_to_its_end();
        assert_eq!(code, 78, "{said}");
        let errors: Vec<&str> = said.lines().filter(|line| line.contains("error: ")).collect();
        let setting = format!("choria.cfg:{setting}");
        let named: Vec<_> = errors.iter().filter(|line| line.contains(&setting)).collect();
        assert!(named.len() == 1 && named[0].contains(expected), "{said}");
        // Token and seed serve a second purpose, which has a setting of its own.
        let purposes = if setup == X509 { 1 } else { 2 };
        assert_eq!(errors.len(), purposes, "{said}");
        for secret in secrets {
            assert!(!said.contains(secret.trim()), "a secret is shown");
        }
    };
    let folder = |name: &'static str| {
        move |network: &Network| {
            fs::remove_file(network.path(name)).unwrap();
            fs::create_dir(network.path(name)).unwrap();
        }
    };
    let text = |name: &'static str, text: &'static str| {
        move |network: &Network| network.write_text(name, text).unwrap()
    };

    let certificate = "4: plugin.security.file.certificate: ";
    let key = "5: plugin.security.file.key: ";
    let ca = "3: plugin.security.file.ca: ";
    check(X509, certificate, &text("own.pem", ""), "could not read the certificate: it is empty");
    check(X509, certificate, &folder("own.pem"), "own.pem: Is a directory");
    check(X509, key, &text("own.key", ""), "could not read the private key: it is empty");
    check(X509, key, &folder("own.key"), "own.key: Is a directory");
    check(X509, ca, &text("ca.pem", ""), "it is empty");
    check(X509, ca, &folder("ca.pem"), "ca.pem: Is a directory");
    let another = |network: &Network| {
        let other = provisioner_of(&network.authority);
        network.write_text("own.key", &other.key_pem()).unwrap();
    };
    check(X509, key, &another, "the private key does not belong to the certificate");
    let encrypted = |network: &Network| {
        let key = provisioner_of(&network.authority).key;
        let pem = key.private_key_to_pem_pkcs8_passphrase(Cipher::aes_256_cbc(), b"x").unwrap();
        network.write_text("own.key", std::str::from_utf8(&pem).unwrap()).unwrap();
    };
    check(X509, key, &encrypted, "the private key is encrypted");

    let token = "5: plugin.security.choria.token_file: ";
    let seed = "4: plugin.security.choria.seed_file: ";
    check(Issuer, token, &text("signer.jwt", ""), "the token file is empty");
    check(Issuer, token, &folder("signer.jwt"), "signer.jwt: Is a directory");
    check(Issuer, seed, &text("signer.seed", ""), "could not read the token's seed");
    check(Issuer, seed, &folder("signer.seed"), "signer.seed: Is a directory");
    let another = |network: &Network| {
        let other = network.organization.chain_issuer(unix_now());
        network.write_text("signer.seed", &other.seed).unwrap();
    };
    check(Issuer, seed, &another, "the seed does not belong to the token");
}

#[test]
fn what_is_doubtful_about_a_file_is_a_warning() {
    let check = |setup: Setup, spoil: &dyn Fn(&Network), expected: &[&str]| {
        let site = Site::new(setup);
        let broker = ChoriaBroker::start(Rules::of(&site.network));
        spoil(&site.network);
        let daemon = site.daemon(&broker.url()).start();
        assert!(daemon.logged(expected), "{expected:?}: {}", daemon.log());
    };
    let open = |name: &'static str| {
        move |network: &Network| {
            fs::set_permissions(network.path(name), Permissions::from_mode(0o644)).unwrap();
        }
    };
    check(
        Setup::X509,
        &open("own.key"),
        &["warn", "plugin.security.file.key: everybody on this machine can read", "own.key"],
    );
    check(
        Setup::Issuer,
        &open("signer.seed"),
        &["warn", "plugin.security.choria.seed_file: everybody on this machine can read"],
    );
    let expired = |network: &Network| {
        let ours = Wanted::new(CERTNAME).rsa().valid(-7_200, -3_600).signed_by(&network.authority);
        network.write("own", &ours).unwrap();
    };
    check(Setup::X509, &expired, &["warn", "plugin.security.file.certificate", "expired on"]);
}

#[test]
fn a_broker_that_is_not_who_it_should_be_is_told_nothing() {
    let good = || Wanted::new("broker").name("localhost").address("127.0.0.1");
    let check = |certificate: &dyn Fn(&Certified) -> Certified, expected: &str| {
        let site = Site::new(Setup::Issuer);
        let mut rules = Rules::of(&site.network);
        rules.certificate = certificate(&site.network.authority);
        let broker = ChoriaBroker::start(rules);
        let daemon = site.daemon(&broker.url()).start();
        daemon.wait_logged(SOON, &["warn", "could not connect", expected]);
        let (status, body) = daemon.get("/readyz").unwrap();
        assert!(status == 503 && body.contains(expected), "{body}");
        let refusals = broker.refusals(1);
        assert!(refusals.iter().all(|reason| reason.starts_with("TLS: ")), "{refusals:?}");
    };
    let stranger = Wanted::new("their CA").authority().self_signed();
    check(
        &|_| good().signed_by(&stranger),
        "its certificate (broker) was issued by their CA, which",
    );
    check(
        &|ours| Wanted::new("broker").name("broker.example.net").signed_by(ours),
        "its certificate (broker) is for broker.example.net, not for 127.0.0.1",
    );
    check(
        &|ours| good().valid(-7_200, -3_600).signed_by(ours),
        "its certificate (broker) expired on",
    );
    check(
        &|ours| good().valid(3_600, 7_200).signed_by(ours),
        "its certificate (broker) is not valid before",
    );
}

#[test]
fn a_broker_that_demands_certificates_of_everybody_gets_ours() {
    let site = Site::new(Setup::X509);
    let broker = site.demanding();
    let fleet = Fleet::builder(&broker.url()).nodes(20).pki().start();
    let mut daemon = site.daemon(&broker.address()).start();
    fleet.wait_all_provisioned(within(SOON)).expect("provisioned");
    assert_eq!(fleet.violations(), [""; 0]);
    let metrics = daemon.metrics();
    assert_eq!(metrics.sum("provision_errors"), 0.0, "{metrics:?}");
    assert_eq!(metrics.sum("broker_errors_total"), 0.0, "{metrics:?}");
    assert!(daemon.stop().success());
}

#[test]
fn a_certificate_that_a_broker_does_not_know_any_more_is_renewed_without_a_restart() {
    let site = Site::new(Setup::X509);
    let mut broker = site.demanding();
    let daemon = site.daemon(&broker.address()).start();
    wait_until(SOON, "connected", || daemon.metric("broker_connected") == 1.0);

    // Everybody gets another authority; what is left of the old one is good for nothing.
    broker.kill();
    let authority = Wanted::new("new CA").authority().self_signed();
    site.network.write("ca", &authority).unwrap();
    site.network.write("broker", &broker_of(&authority)).unwrap();
    broker.restart();
    daemon.wait_logged(SOON, &["could not connect", "it refuses our certificate"]);
    site.network.write("own", &provisioner_of(&authority)).unwrap();
    wait_until(SOON, "connected again", || daemon.metric("broker_connected") == 1.0);
}

/// A network's files.
struct Site {
    network: Network,
    _dir: TempDir,
}

impl Site {
    fn new(setup: Setup) -> Site {
        let dir = TempDir::new("secured");
        Site { network: Network::create(dir.path(), setup).unwrap(), _dir: dir }
    }

    fn daemon(&self, broker: &str) -> Builder {
        Daemon::builder(broker).network(&self.network)
    }

    /// A nats-server that asks everybody in TLS for a certificate; the nodes speak to it in the clear, which it allows.
    fn demanding(&self) -> NatsServer {
        let path = |name: &str| self.network.path(name).display().to_string();
        let config = format!(
            "allow_non_tls: true\n\
             tls {{ cert_file: \"{}\", key_file: \"{}\", ca_file: \"{}\", verify: true }}\n\
             accounts: {{ provisioning: {{ users: [\n\
             {{user: provisioner, password: provSecret}}, {{user: node, password: node}}\n\
             ] }} }}\nno_auth_user: node\n",
            path("broker.pem"),
            path("broker.key"),
            path("ca.pem")
        );
        self.network.write_text("demanding.conf", &config).unwrap();
        NatsServer::configured(&self.network.path("demanding.conf"))
    }
}
