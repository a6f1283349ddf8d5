//! How we get into brokers that let in whom a Choria Broker would, and what becomes of a refusal.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;
mod fleet;

use std::env;
use std::fs;
use std::thread;
use std::time::Duration;

use common::choria_broker::{Account, Rules, Site};
use common::{SOON, wait_until, within};
use fleet::certificates::Wanted;
use fleet::issuer::{ChainIssuer, Organization};
use fleet::network::{Setup, broker_of, provisioner_of};
use fleet::unix_now;
use serde_json::{Value, json};

const YEAR: i64 = 365 * 86_400;

#[test]
fn certificates_get_provisioner_and_nodes_in() {
    let site = Site::new(Setup::X509);
    let fleet = site.fleet(20).start();
    let daemon = site.daemon().start();
    fleet.wait_all_provisioned(within(SOON)).expect("provisioned");
    assert_eq!(fleet.violations(), [""; 0]);

    let login = site.broker.login(0);
    assert_eq!(login.account, Account::Provisioning);
    assert_eq!(login.connect["user"], "provisioner");
    for absent in ["auth_token", "jwt", "sig"] {
        assert_eq!(login.connect[absent], Value::Null, "{}", login.connect);
    }
    let ours = login.certificate.unwrap().to_pem().unwrap();
    assert_eq!(ours, fs::read(site.network.path("own.pem")).unwrap());
    assert_eq!(daemon.metric("broker_errors_total"), 0.0);
}

#[test]
fn tokens_get_provisioner_and_nodes_in() {
    let site = Site::new(Setup::Issuer);
    let fleet = site.fleet(20).start();
    let daemon = site.daemon().start();
    fleet.wait_all_provisioned(within(SOON)).expect("provisioned");
    assert_eq!(fleet.violations(), [""; 0]);

    let login = site.broker.login(0);
    assert_eq!(login.account, Account::Provisioning);
    assert!(login.is_proved, "the nonce is signed: {}", login.connect);
    assert_eq!(login.connect["auth_token"], login.connect["jwt"]);
    assert!(login.certificate.is_none());
    let metrics = daemon.metrics();
    assert_eq!(metrics.sum("broker_errors_total"), 0.0);
    let expires = metrics.with("token_expiry_timestamp_seconds", "token=\"login\"");
    assert!(expires > (unix_now() + YEAR) as f64, "{expires}");
}

#[test]
fn every_refusal_of_a_broker_with_certificates_is_explained() {
    let check = |edit: &dyn Fn(&mut Rules), reason: &str, usual: &str| {
        let said = Refused::new(Setup::X509).rules(edit).check(reason);
        let shown = "it was shown user provisioner with a password, a certificate; ";
        assert!(said.contains(shown) && said.contains(usual), "{said}");
    };
    let password = "the password is not its plugin.choria.network.provisioning.client_password";
    check(&|rules| rules.password = None, "provisioning user password not enabled", password);
    check(&another_password, "invalid provisioner password supplied", password);
    // It asks for none, and so sees none.
    check(
        &|rules| rules.authority = None,
        "provisioning user is only allowed over verified TLS connections",
        password,
    );
    check(
        &|rules| issue(rules, &Organization::new()),
        "no token provided in connection",
        "(security provider choria)",
    );
}

#[test]
fn every_refusal_of_a_broker_with_an_issuer_is_explained() {
    let check = |refused: Refused, reason: &str| {
        let said = refused.check(reason);
        assert!(
            said.contains(
                "it was shown user provisioner with a password, the token of provisioner_signer, a signature of its nonce, "
            ),
            "{said}"
        );
        for usual in [
            "the password is not its plugin.choria.network.provisioning",
            "the token lacks the provisioner permission",
            "has expired by the broker's clock",
            "hangs on an issuer the broker doesn't know",
        ] {
            assert!(said.contains(usual), "{said}");
        }
    };
    let plain = || Refused::new(Setup::Issuer);
    check(plain().rules(&another_password), "invalid provisioner password supplied");
    check(
        plain().rules(&|rules| rules.ahead = 2 * YEAR),
        "failed to parse client token issued by the choria chain: token is expired",
    );
    check(
        plain().rules(&|rules| issue(rules, &Organization::new())),
        "failed to parse client token issued by the choria chain: token signature is invalid",
    );
    check(plain().token(|claims| claims["ou"] = json!("x")), "no issuer configured for ou 'x'");
    // A certificate may be what the broker goes by, so with one it is tried.
    let powerless =
        plain().token(|claims| claims["permissions"]["provisioner"] = json!(false)).certificate();
    check(powerless, "provisioner claim is false in token with caller id \"provisioner_signer\"");
    // One without issuers, which shows in its INFO.
    let said = plain()
        .rules(&|rules| rules.issuers.clear())
        .check("provisioning user is only allowed over verified TLS connections");
    assert!(said.contains("the token of provisioner_signer, no certificate; "), "{said}");
    assert!(said.contains("wants a certificate of its authority"), "{said}");
}

#[test]
fn a_refusal_without_a_password_asks_for_one() {
    let check = |edit: &dyn Fn(&mut Rules), reason: &str| {
        let said = Refused::new(Setup::X509).rules(edit).without_password().check(reason);
        assert!(said.contains("it was shown a certificate; "), "{said}");
        assert!(said.contains("is broker_provisioning_password set?"), "{said}");
    };
    check(&|rules| rules.authority = None, "unverified connection without JWT token");
    check(
        &|rules| issue(rules, &Organization::new()),
        "unknown connection received in issuer mode",
    );
}

#[test]
fn without_a_password_we_are_let_in_where_no_nodes_are_and_were_warned() {
    for setup in [Setup::X509, Setup::Issuer] {
        let site = Site::new(setup);
        let daemon = site.daemon().without("broker_provisioning_password").start();
        assert_eq!(site.broker.login(0).account, Account::Choria);
        assert!(daemon.logged(&["warn", "broker_provisioning_password"]), "{}", daemon.log());
        daemon.wait_logged(SOON, &["warn", "let us into its account choria"]);
    }
}

#[test]
fn a_broker_that_changes_its_mind_gets_us_back() {
    let site = Site::new(Setup::Issuer);
    site.broker.change(another_password);
    let fleet = site.fleet(5).start();
    let daemon = site.daemon().start();
    // By default as long as it takes to see that it is tried again.
    if env::var_os("SLOW_TESTS").is_some() {
        thread::sleep(Duration::from_secs(20));
    }
    site.broker.refusals(3);
    let (status, body) = daemon.get("/readyz").unwrap();
    assert!(status == 503 && body.contains("Authorization Violation"), "{body}");
    assert!(daemon.metrics().with("broker_errors_total", "kind=\"authorization\"") >= 2.0);
    site.broker.change(|rules| rules.password = Rules::of(&site.network).password);
    fleet.wait_all_provisioned(within(SOON * 2)).expect("provisioned");
    let (status, body) = daemon.get("/readyz").unwrap();
    assert!(status == 200, "{body}");
}

#[test]
fn a_renewed_token_and_seed_are_shown_at_the_next_connection() {
    let site = Site::new(Setup::Issuer);
    let daemon = site.daemon().start();
    let shown = |before: usize| {
        let login = site.broker.login(before);
        assert!(login.is_proved, "the seed fits: {}", login.connect);
        let token = fs::read_to_string(site.network.path("signer.jwt")).unwrap();
        assert_eq!(login.connect["auth_token"], token);
        token
    };
    let first = shown(0);
    site.network.renew_token().unwrap();
    site.broker.hang_up();
    assert_ne!(shown(1), first);
    let fleet = site.fleet(5).start();
    fleet.wait_all_provisioned(within(SOON)).expect("provisioned");
    assert_eq!(fleet.violations(), [""; 0], "requests are vouched for by the new one");

    // Half of a renewal gets nobody in, and nobody is shown it.
    let other = site.network.organization.chain_issuer(unix_now());
    site.network.write_text("signer.jwt", &other.token).unwrap();
    site.broker.hang_up();
    daemon.wait_logged(SOON, &["could not connect", "the seed does not belong to the token"]);
    site.network.write_text("signer.seed", &other.seed).unwrap();
    shown(2);
}

#[test]
fn a_renewed_certificate_is_shown_at_the_next_connection() {
    let site = Site::new(Setup::X509);
    let _daemon = site.daemon().start();
    let shown = |before: usize| {
        let certificate = site.broker.login(before).certificate.unwrap();
        let certificate = String::from_utf8(certificate.to_pem().unwrap()).unwrap();
        assert_eq!(certificate, fs::read_to_string(site.network.path("own.pem")).unwrap());
        certificate
    };
    let first = shown(0);
    let authority = Wanted::new("new CA").authority().self_signed();
    site.network.write("ca", &authority).unwrap();
    site.network.write("own", &provisioner_of(&authority)).unwrap();
    site.broker.change(|rules| {
        rules.certificate = broker_of(&authority);
        rules.authority = Some(authority.certificate.clone());
    });
    site.broker.hang_up();
    assert_ne!(shown(1), first);
    // Nodes that look at who asks have the new authority, too.
    let fleet = site.fleet(5).authority(&authority.certificate).start();
    fleet.wait_all_provisioned(within(SOON)).expect("provisioned");
    assert_eq!(fleet.violations(), [""; 0]);
}

/// A daemon that is not let in.
struct Refused {
    site: Site,
    certificate: bool,
    password: bool,
}

impl Refused {
    fn new(setup: Setup) -> Refused {
        Refused { site: Site::new(setup), certificate: false, password: true }
    }

    fn rules(self, edit: &dyn Fn(&mut Rules)) -> Refused {
        self.site.broker.change(edit);
        self
    }

    fn token(self, edit: impl FnOnce(&mut Value)) -> Refused {
        let network = &self.site.network;
        let signer = network.organization.chain_issuer_but(unix_now(), edit);
        let ChainIssuer { seed, token, .. } = signer;
        network.write_text("signer.seed", &seed).unwrap();
        network.write_text("signer.jwt", &token).unwrap();
        self
    }

    fn certificate(mut self) -> Refused {
        self.certificate = true;
        self
    }

    fn without_password(mut self) -> Refused {
        self.password = false;
        self
    }

    /// The daemon's words for what the broker calls `reason`, which it keeps to itself.
    #[track_caller]
    fn check(self, reason: &str) -> String {
        let Site { network, broker, .. } = &self.site;
        let mut builder = self.site.daemon();
        if self.certificate {
            let path = |name: &str| network.path(name).display().to_string();
            builder = builder
                .choria("plugin.security.choria.certificate", &path("own.pem"))
                .choria("plugin.security.choria.key", &path("own.key"));
        }
        if !self.password {
            builder = builder.without("broker_provisioning_password");
        }
        let daemon = builder.start();
        let reasons = broker.refusals(1);
        assert!(reasons[0].starts_with(reason), "{reason}: {reasons:?}");
        let mut said = String::new();
        wait_until(SOON, "readiness says it", || {
            let (status, body) = daemon.get("/readyz").unwrap();
            said = body;
            status == 503 && said.contains("Authorization Violation: ")
        });
        assert!(daemon.logged(&["warn", "could not connect", "Authorization Violation: "]));
        for secret in ["signer.seed", "signer.jwt", "own.key"] {
            let secret = fs::read_to_string(network.path(secret)).unwrap();
            assert!(!said.contains(secret.trim()) && !daemon.log().contains(secret.trim()));
        }
        assert!(!daemon.log().contains(fleet::network::PASSWORD));
        said
    }
}

fn another_password(rules: &mut Rules) {
    rules.password = Some("another".to_owned());
}

fn issue(rules: &mut Rules, organization: &Organization) {
    rules.issuers.insert("choria".to_owned(), organization.public_key());
}
