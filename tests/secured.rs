//! Networks with TLS: who we are, whom we believe, and what becomes of renewed files.
//!
//! The nodes speak to the broker in the clear, which it allows here: it makes no difference to what the daemon does.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;
mod fleet;

use std::fs::{self, Permissions};
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::time::Duration;

use common::{Builder, Daemon, NatsServer, SOON, TempDir, wait_until, within};
use fleet::Fleet;
use fleet::certificates::{Certified, Wanted};

/// The chain issuer's token and seed that were recorded with real brokers and nodes.
const RECORDED: &str = "tests/vectors/captures/issuer";

#[test]
fn a_certificate_gets_us_in_and_nodes_are_provisioned_through_tls() {
    let site = Site::new();
    let broker = site.broker("verify: true");
    let fleet = Fleet::builder(&broker.url()).nodes(50).pki().start();
    let mut daemon = site.with_certificate(&broker).feature("pki", "true").start();
    fleet.wait_all_provisioned(within(SOON)).expect("provisioned");
    assert_eq!(fleet.violations(), [""; 0]);
    let metrics = daemon.metrics();
    assert_eq!(metrics.sum("provision_errors"), 0.0, "{metrics:?}");
    assert_eq!(metrics.sum("broker_errors_total"), 0.0, "{metrics:?}");
    assert!(daemon.stop().success());
    for secret in ["provSecret", "s3cret", "PRIVATE KEY"] {
        assert!(!daemon.log().contains(secret), "{secret:?} is in the log");
    }
}

#[test]
fn a_token_gets_us_in_and_makes_us_speak_version_2() {
    let site = Site::new();
    let broker = site.broker("verify: false");
    let heard = Ear::new(&broker, "provisioning.broadcast.agent.discovery");
    let daemon = site.with_token(&broker).start();
    let request = heard.message();
    assert!(request.contains(r#"{"protocol":"io.choria.protocol.v2.transport","data":""#));
    // The caller's name is in the subject for replies.
    assert!(request.contains("provisioning.reply."), "{request}");
    let token = fs::read_to_string(format!("{RECORDED}/signer.jwt")).unwrap();
    let seed = fs::read_to_string(format!("{RECORDED}/signer.seed")).unwrap();
    let metrics = daemon.metrics();
    assert!(metrics.with("token_expiry_timestamp_seconds", "token=\"login\"") > 1.8e9);
    for secret in [token.trim(), seed.trim(), "provSecret"] {
        assert!(!daemon.log().contains(secret), "a secret is in the log");
    }
}

#[test]
fn a_refusal_is_explained_until_the_broker_changes_its_mind() {
    let site = Site::new();
    site.write_broker("verify: true", "another");
    let mut broker = NatsServer::configured(&site.path("broker.conf"));
    let daemon = site.with_certificate(&broker).start();
    daemon.wait_logged(
        SOON,
        &[
            "Authorization Violation",
            "it was shown user provisioner with a password, a certificate",
        ],
    );
    wait_until(SOON, "readiness says it too", || {
        let (status, body) = daemon.get("/readyz").unwrap();
        status == 503 && body.contains("plugin.choria.network.provisioning.client_password")
    });
    site.write_broker("verify: true", "provSecret");
    broker.restart();
    wait_until(SOON, "it is let in", || daemon.metric("broker_connected") == 1.0);
    assert!(!daemon.log().contains("provSecret"));
}

#[test]
fn renewed_files_are_used_by_the_next_connection() {
    let site = Site::new();
    let mut broker = site.broker("verify: true");
    let daemon = site.with_certificate(&broker).start();
    wait_until(SOON, "connected", || daemon.metric("broker_connected") == 1.0);

    // Everybody gets another authority; what is left of the old one is good for nothing.
    broker.kill();
    let authority = Wanted::new("new CA").authority().self_signed();
    site.write("broker.pem", &broker_of(&authority));
    site.write("ca.pem", &authority);
    broker.restart();
    daemon.wait_logged(SOON, &["could not connect", "it refuses our certificate"]);
    site.write("own.pem", &ours(&authority));
    wait_until(SOON, "connected again", || daemon.metric("broker_connected") == 1.0);
    let fleet = Fleet::builder(&broker.url()).nodes(5).start();
    fleet.wait_all_provisioned(within(SOON)).expect("provisioned");
}

#[test]
fn a_start_with_files_that_cannot_be_used_names_every_one_of_them() {
    let site = Site::new();
    fs::write(site.path("own.pem.key"), "").unwrap();
    fs::remove_file(site.path("ca.pem")).unwrap();
    let (code, said) = site.with_certificate_of("127.0.0.1:1").run_to_its_end();
    assert_eq!(code, 78, "{said}");
    assert!(said.contains("plugin.security.file.key: "), "{said}");
    assert!(said.contains("own.pem.key: could not read the private key: it is empty"), "{said}");
    assert!(said.contains("ca.pem: No such file or directory"), "{said}");
}

#[test]
fn a_broker_that_is_not_who_it_should_be_is_not_talked_to() {
    let site = Site::new();
    let broker = site.broker("verify: false");
    let stranger = Wanted::new("their CA").authority().self_signed();
    site.write("ca.pem", &stranger);
    let daemon = site.with_certificate(&broker).start();
    daemon.wait_logged(
        SOON,
        &["its certificate (broker) was issued by our CA", "does not vouch for"],
    );
    let (status, body) = daemon.get("/readyz").unwrap();
    assert!(status == 503 && body.contains("does not vouch for"), "{body}");
}

/// A network's files: the broker's and the daemon's.
struct Site {
    dir: TempDir,
    authority: Certified,
}

impl Site {
    fn new() -> Site {
        let authority = Wanted::new("our CA").authority().self_signed();
        let site = Site { dir: TempDir::new("secured"), authority };
        site.write("ca.pem", &site.authority);
        site.write("broker.pem", &broker_of(&site.authority));
        site.write("own.pem", &ours(&site.authority));
        site
    }

    /// The certificate as `name`, and the key beside it.
    fn write(&self, name: &str, certified: &Certified) {
        self.dir.write(name, &certified.certificate_pem());
        let key = self.dir.write(&format!("{name}.key"), &certified.key_pem());
        fs::set_permissions(key, Permissions::from_mode(0o600)).unwrap();
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn broker(&self, tls: &str) -> NatsServer {
        self.write_broker(tls, "provSecret");
        NatsServer::configured(&self.path("broker.conf"))
    }

    fn write_broker(&self, tls: &str, password: &str) {
        let (broker, ca) = (self.path("broker.pem"), self.path("ca.pem"));
        let (broker, ca) = (broker.display(), ca.display());
        let config = format!(
            "allow_non_tls: true\n\
             tls {{ cert_file: \"{broker}\", key_file: \"{broker}.key\", ca_file: \"{ca}\", {tls} }}\n\
             accounts: {{ provisioning: {{ users: [\n\
             {{user: provisioner, password: {password}}}, {{user: node, password: node}}\n\
             ] }} }}\nno_auth_user: node\n"
        );
        self.dir.write("broker.conf", &config);
    }

    fn secured(&self, broker: &str) -> Builder {
        Daemon::builder(broker)
            .set("choria_insecure", "false")
            .set("broker_provisioning_password", "provSecret")
    }

    fn with_certificate(&self, broker: &NatsServer) -> Builder {
        self.with_certificate_of(&broker.address())
    }

    fn with_certificate_of(&self, broker: &str) -> Builder {
        let path = |name| self.path(name).display().to_string();
        self.secured(broker)
            .choria("plugin.security.provider", "file")
            .choria("plugin.security.file.certificate", &path("own.pem"))
            .choria("plugin.security.file.key", &path("own.pem.key"))
            .choria("plugin.security.file.ca", &path("ca.pem"))
    }

    fn with_token(&self, broker: &NatsServer) -> Builder {
        let current = std::env::current_dir().unwrap();
        let recorded = |name| current.join(RECORDED).join(name).display().to_string();
        self.secured(&broker.address())
            .choria("plugin.security.provider", "choria")
            .choria("plugin.security.choria.token_file", &recorded("signer.jwt"))
            .choria("plugin.security.choria.seed_file", &recorded("signer.seed"))
            .choria("plugin.security.choria.ca", &self.path("ca.pem").display().to_string())
    }
}

fn broker_of(authority: &Certified) -> Certified {
    Wanted::new("broker").name("localhost").address("127.0.0.1").signed_by(authority)
}

fn ours(authority: &Certified) -> Certified {
    Wanted::new("provisioner").rsa().days(90).signed_by(authority)
}

/// Hears what nodes hear.
struct Ear(BufReader<TcpStream>);

impl Ear {
    fn new(broker: &NatsServer, subject: &str) -> Ear {
        let mut stream = TcpStream::connect(broker.address()).unwrap();
        stream.set_read_timeout(Some(SOON + Duration::from_secs(5))).unwrap();
        write!(stream, "CONNECT {{\"verbose\":false}}\r\nSUB {subject} 1\r\nPING\r\n").unwrap();
        let mut ear = Ear(BufReader::new(stream));
        while ear.line().trim_end() != "PONG" {}
        ear
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        assert!(self.0.read_line(&mut line).unwrap() > 0, "the broker closed the connection");
        line
    }

    fn message(mut self) -> String {
        while !self.line().starts_with("MSG ") {}
        self.line()
    }
}
