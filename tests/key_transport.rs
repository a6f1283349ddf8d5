//! Private keys that a site's CA makes: they reach their node, its disk, and nobody else.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;
mod fleet;

use std::fs;
use std::time::{SystemTime, UNIX_EPOCH};

use openssl::asn1::{Asn1Integer, Asn1Time};
use openssl::bn::BigNum;
use openssl::ec::{EcGroup, EcKey};
use openssl::hash::MessageDigest;
use openssl::nid::Nid;
use openssl::pkey::{PKey, PKeyRef, Private};
use openssl::rsa::Rsa;
use openssl::x509::extension::BasicConstraints;
use openssl::x509::{X509, X509Builder, X509Name};
use serde_json::json;

use common::{Builder, Daemon, NatsServer, SOON, within};
use fleet::fault::{Action, Damage, Fault};
use fleet::{Fleet, Received};

/// Answers with the file called after the node, in the folder of the daemon.
const HELPER: &str = r#"#!/bin/sh
IFS= read -r input
identity=${input#*'"identity":"'}
identity=${identity%%'"'*}
cat "${0%/*}/$identity.json"
"#;

#[test]
fn a_key_made_by_the_helper_arrives_as_it_was_made() {
    let broker = NatsServer::start();
    let fleet = Fleet::builder(&broker.url()).nodes(4).start();
    let builder = Daemon::builder(&broker.address()).helper(HELPER);
    let ca = Ca::new();
    let rsa = PKey::from_rsa(Rsa::generate(2048).unwrap()).unwrap();
    let ec = ec_key();
    let keys = [
        (rsa.clone(), rsa.rsa().unwrap().private_key_to_pem().unwrap()),
        (rsa.clone(), rsa.private_key_to_pem_pkcs8().unwrap()),
        (ec.clone(), ec.ec_key().unwrap().private_key_to_pem().unwrap()),
        {
            let key = PKey::generate_ed25519().unwrap();
            let pem = key.private_key_to_pem_pkcs8().unwrap();
            (key, pem)
        },
    ];
    for (at, (key, pem)) in keys.iter().enumerate() {
        let node = fleet.node(at).identity();
        answer(&builder, &ca, &node, key, std::str::from_utf8(pem).unwrap());
    }
    let mut daemon = builder.start();
    fleet.wait_all_provisioned(within(SOON)).unwrap();

    for (at, (key, pem)) in keys.iter().enumerate() {
        let received = fleet.node(at).received().unwrap();
        let arrived = PKey::private_key_from_der(received.key.as_ref().unwrap()).unwrap();
        assert!(arrived.public_eq(key), "node {at}");
        // No request was made for one, so the helper's directory is the only one.
        assert_eq!(received.ssldir, "/helper/ssl");
        let secret = std::str::from_utf8(pem).unwrap().lines().nth(1).unwrap();
        assert!(!daemon.log().contains(secret));
    }
    assert_eq!(fleet.violations(), [""; 0]);
    daemon.assert_alive();
}

#[test]
fn the_directory_of_the_nodes_request_goes_before_the_helpers() {
    let broker = NatsServer::start();
    let fleet = Fleet::builder(&broker.url()).pki().nodes(1).start();
    let builder = Daemon::builder(&broker.address()).feature("pki", "true").helper(HELPER);
    let (ca, key) = (Ca::new(), ec_key());
    let pem = key.private_key_to_pem_pkcs8().unwrap();
    let node = fleet.node(0).identity();
    answer(&builder, &ca, &node, &key, std::str::from_utf8(&pem).unwrap());
    let daemon = builder.start();
    fleet.wait_all_provisioned(within(SOON)).unwrap();

    let Received { key: arrived, ssldir, certificate, .. } = fleet.node(0).received().unwrap();
    assert_eq!(ssldir, "/etc/choria/ssl");
    // It replaces the one the node made for its request.
    let arrived = PKey::private_key_from_der(&arrived.unwrap()).unwrap();
    assert!(arrived.public_eq(&key));
    let certificate = X509::from_pem(certificate.as_bytes()).unwrap();
    assert!(certificate.public_key().unwrap().public_eq(&key));
    assert_eq!(fleet.node(0).times_asked(Action::GenCsr), 1);
    drop(daemon);
}

#[test]
fn no_key_is_sent_where_no_exchange_was_begun() {
    let broker = NatsServer::start();
    let fault = Fault::Data(Action::Jwt, Some("ecdh_public"), Damage::Empty);
    let fleet = Fleet::builder(&broker.url()).broken("n0.fleet.example.net", fault).start();
    let original =
        "private key received from helper but server did not start Diffie-Hellman exchange";

    let keyless = Daemon::builder(&broker.address()).helper(HELPER);
    refuses(keyless, &fleet, &[original, "its jwt reply holds no ecdh_public"], "refused");

    let without_jwt = Daemon::builder(&broker.address()).helper(HELPER).feature("jwt", "false");
    refuses(without_jwt, &fleet, &[original, "turn on the feature jwt"], "helper_failed");
    assert_eq!(fleet.node(0).times_asked(Action::Configure), 0);
}

#[test]
fn a_node_that_restarts_after_the_exchange_gets_its_key_by_another_one() {
    let broker = NatsServer::start();
    let builder = Daemon::builder(&broker.address()).helper(HELPER);
    let (ca, key, node) = (Ca::new(), ec_key(), "n0.fleet.example.net");
    let pem = key.private_key_to_pem_pkcs8().unwrap();
    answer(&builder, &ca, node, &key, std::str::from_utf8(&pem).unwrap());
    let daemon = builder.start();
    daemon.wait_ready();
    let fault = Fault::RebootsAfter(Action::Jwt);
    let fleet = Fleet::builder(&broker.url()).broken(node, fault).start();
    fleet.wait_all_provisioned(within(2 * SOON)).unwrap();

    let reason = "configuration failed: refused with status 1: TLS Setup Failed: could not decrypt private key: private key not set (5 tries)";
    assert!(daemon.logged(&[&format!("Could not provision {node}: {reason}")]), "{}", daemon.log());
    let arrived = fleet.node(0).received().unwrap().key.unwrap();
    assert!(PKey::private_key_from_der(&arrived).unwrap().public_eq(&key));
    for outcome in ["failed", "provisioned"] {
        common::wait_until(SOON, outcome, || {
            let label = format!("outcome=\"{outcome}\"");
            daemon.metrics().with("outcomes_total", &label) == 1.0
        });
    }
}

#[track_caller]
fn refuses(builder: Builder, fleet: &Fleet, parts: &[&str], outcome: &str) {
    let (ca, key) = (Ca::new(), ec_key());
    let pem = key.private_key_to_pem_pkcs8().unwrap();
    let pem = std::str::from_utf8(&pem).unwrap();
    answer(&builder, &ca, &fleet.node(0).identity(), &key, pem);
    let daemon = builder.start();
    daemon.wait_logged(SOON, parts);
    common::wait_until(SOON, "the outcome is counted", || {
        daemon.metrics().with("outcomes_total", &format!("outcome=\"{outcome}\"")) >= 1.0
    });
    assert!(!daemon.log().contains(pem.lines().nth(1).unwrap()));
}

/// Has the helper give `node` this key, as `pem`, and a certificate for it.
fn answer(builder: &Builder, ca: &Ca, node: &str, key: &PKeyRef<Private>, pem: &str) {
    let answer = json!({
        "configuration": {"identity": node, "plugin.choria.server.provision": "0"},
        "certificate": ca.issue(node, key),
        "ca": ca.pem(),
        "key": pem,
        "ssldir": "/helper/ssl",
    });
    fs::write(builder.dir().join(format!("{node}.json")), answer.to_string()).unwrap();
}

struct Ca {
    key: PKey<Private>,
    certificate: X509,
}

impl Ca {
    fn new() -> Ca {
        let (key, name) = (ec_key(), named("Practice CA"));
        let mut builder = certificate(&name, &name, &key);
        let constraints = BasicConstraints::new().critical().ca().build().unwrap();
        builder.append_extension(constraints).unwrap();
        builder.sign(&key, MessageDigest::sha256()).unwrap();
        Ca { key, certificate: builder.build() }
    }

    fn issue(&self, node: &str, key: &PKeyRef<Private>) -> String {
        let mut builder = certificate(&named(node), &named("Practice CA"), key);
        builder.sign(&self.key, MessageDigest::sha256()).unwrap();
        String::from_utf8(builder.build().to_pem().unwrap()).unwrap()
    }

    fn pem(&self) -> String {
        String::from_utf8(self.certificate.to_pem().unwrap()).unwrap()
    }
}

fn certificate(subject: &X509Name, issuer: &X509Name, key: &PKeyRef<Private>) -> X509Builder {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    let now = i64::try_from(now.as_secs()).unwrap();
    let mut builder = X509Builder::new().unwrap();
    builder.set_version(2).unwrap();
    let serial = Asn1Integer::from_bn(&BigNum::from_u32(1).unwrap()).unwrap();
    builder.set_serial_number(&serial).unwrap();
    builder.set_subject_name(subject).unwrap();
    builder.set_issuer_name(issuer).unwrap();
    builder.set_pubkey(key).unwrap();
    builder.set_not_before(&Asn1Time::from_unix(now - 60).unwrap()).unwrap();
    builder.set_not_after(&Asn1Time::from_unix(now + 86_400).unwrap()).unwrap();
    builder
}

fn named(name: &str) -> X509Name {
    let mut builder = X509Name::builder().unwrap();
    builder.append_entry_by_nid(Nid::COMMONNAME, name).unwrap();
    builder.build()
}

fn ec_key() -> PKey<Private> {
    let group = EcGroup::from_curve_name(Nid::X9_62_PRIME256V1).unwrap();
    PKey::from_ec_key(EcKey::generate(&group).unwrap()).unwrap()
}
