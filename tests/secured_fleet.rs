//! Whole fleets through TLS, in both kinds of secured networks: nodes log in with their provisioning JWT, and every request must be
//! signed by somebody they can believe.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;
mod fleet;

use std::collections::HashSet;
use std::fs;

use common::{Daemon, NatsServer, SOON, TempDir, wait_until, within};
use fleet::certificates::{Certified, Wanted};
use fleet::network::{Network, Setup};
use fleet::{Action, Fleet, State, View};
use openssl::pkey::{PKey, Private};
use openssl::rsa::Rsa;
use openssl::x509::X509Req;
use serde_json::json;

const NODES: usize = 200;

/// Hands out what was prepared for each node.
const PREPARED: &str = r#"#!/bin/sh
IFS= read -r input
identity=${input#*'"identity":"'}
identity=${identity%%'"'*}
exec cat "${0%/*}/answers/$identity"
"#;

#[test]
fn two_hundred_nodes_are_given_certificates() {
    let (dir, broker, network) = start(Setup::X509);
    let fleet = network.fleet(&broker.url()).nodes(NODES).start_quietly();
    let builder = Daemon::builder(&broker.address()).network(&network).helper(PREPARED);
    // Every other node keeps the key it made, and the rest get one from the authority, which nobody on the way can read.
    let keys: Vec<PKey<Private>> =
        (0..2).map(|_| PKey::from_rsa(Rsa::generate(2048).unwrap()).unwrap()).collect();
    let answers = builder.dir().join("answers");
    fs::create_dir(&answers).unwrap();
    for (at, node) in fleet.iter().enumerate() {
        let key = (at % 2 == 1).then(|| &keys[at % 4 / 2]);
        let answer = answer(&network.authority, &node, key);
        fs::write(answers.join(node.identity()), answer).unwrap();
    }
    let daemon = builder.set("workers", 8).start();
    daemon.wait_ready();
    fleet.announce();

    all_join(&fleet, &daemon);
    for (at, node) in fleet.iter().enumerate() {
        let received = node.received().unwrap();
        assert_eq!(received.ca, network.authority.certificate_pem());
        assert_eq!(received.ssldir, "/etc/choria/ssl");
        assert_eq!(received.key.is_some(), at % 2 == 1);
        assert_eq!(received.action_policies["rpcutil.policy"], "policy default deny\n");
        assert_eq!(received.opa_policies["site.rego"], "package choria.mcorpc.authpolicy\n");
        assert_eq!(node.times_asked(Action::GenCsr), 1);
    }
    drop(dir);
}

#[test]
fn two_hundred_nodes_of_an_organization_are_given_tokens() {
    let (dir, broker, network) = start(Setup::Issuer);
    let fleet = network.fleet(&broker.url()).nodes(NODES).start_quietly();
    let daemon = Daemon::builder(&broker.address()).network(&network).set("workers", 8).start();
    daemon.wait_ready();
    fleet.announce();

    all_join(&fleet, &daemon);
    let tokens: HashSet<String> =
        fleet.iter().map(|node| node.received().unwrap().server_jwt).collect();
    assert_eq!(tokens.len(), NODES);
    assert!(fleet.iter().all(|node| node.times_asked(Action::Gen25519) == 1));
    drop(dir);
}

#[test]
fn spoilt_envelopes_of_version_2_spoil_nothing_but_their_node() {
    let (_dir, broker, network) = start(Setup::Issuer);
    let dropped = ["wrong-hash", "forged-sender", "wrong-id", "garbage", "bad-base64"];
    let unusable = ["undecodable-body", "half-body", "list-body"];
    let name = |fault: &str| format!("{fault}.example.net");
    let mut nodes = network.fleet(&broker.url()).nodes(5);
    for fault in dropped.iter().chain(&unusable) {
        nodes = nodes.broken(&name(fault), format!("{fault}:inventory").parse().unwrap());
    }
    let fleet = nodes.start_quietly();
    let mut daemon = Daemon::builder(&broker.address()).network(&network).start();
    daemon.wait_ready();
    fleet.announce();
    fleet.wait_all_provisioned(within(SOON)).expect("the healthy ones");
    for fault in unusable {
        daemon.wait_logged(SOON, &["Could not provision", &name(fault), "unusable answer"]);
    }
    wait_until(SOON, "every other answer is dropped at least once", || {
        daemon.metric("unexpected_replies_total") >= dropped.len() as f64
            && dropped
                .iter()
                .all(|fault| fleet.named(&name(fault)).times_asked(Action::Inventory) > 1)
    });
    for fault in dropped.iter().chain(&unusable) {
        assert_eq!(fleet.named(&name(fault)).times_configured(), 0, "{fault}");
    }
    assert_eq!(fleet.violations(), [""; 0]);
    daemon.assert_alive();
}

#[test]
fn nodes_of_the_other_version_hear_nothing_they_understand() {
    let (_dir, broker, network) = start(Setup::Issuer);
    let old = Fleet::builder(&broker.url()).tls().user("node", "node").nodes(1).start_quietly();
    let _daemon = Daemon::builder(&broker.address()).network(&network).start();
    old.wait(within(SOON), |old| match old.violations().first() {
        Some(first) if first.contains("is not choria:transport:1") => Ok(()),
        other => Err(format!("{other:?}")),
    })
    .expect("it cannot read what it hears");
    assert_eq!(old.provisioned(), 0);
}

fn start(setup: Setup) -> (TempDir, NatsServer, Network) {
    let dir = TempDir::new("network");
    let network = Network::create(dir.path(), setup).unwrap();
    let broker = NatsServer::configured(&network.broker());
    (dir, broker, network)
}

/// All are configured once, without a flaw, and let into the production network.
#[track_caller]
fn all_join(fleet: &Fleet, daemon: &Daemon) {
    fleet.wait_all_provisioned(within(SOON * 2)).expect("provisioned");
    wait_until(SOON, "all are on the production network", || {
        fleet.iter().all(|node| node.state() == State::Provisioned)
    });
    assert_eq!(fleet.violations(), [""; 0]);
    assert!(fleet.iter().all(|node| node.times_configured() == 1));
    let metrics = daemon.metrics();
    assert_eq!(metrics.sum("provision_errors"), 0.0, "{metrics:?}");
    assert_eq!(metrics.sum("broker_errors_total"), 0.0, "{metrics:?}");
    assert_eq!(metrics.sum("provisioned"), fleet.len() as f64, "{metrics:?}");
}

/// What the helper says of `node`: a certificate for `key`, or else for the one in its request.
fn answer(authority: &Certified, node: &View<'_>, key: Option<&PKey<Private>>) -> String {
    let name = node.identity();
    let wanted = Wanted::new(&name).name(&name);
    let (certificate, key) = match key {
        Some(key) => {
            let certified = wanted.key(key.clone()).signed_by(authority);
            let key = key.rsa().unwrap().private_key_to_pem().unwrap();
            (certified.certificate_pem(), Some(String::from_utf8(key).unwrap()))
        }
        None => {
            let request = node.prepared_csr().unwrap();
            let request = X509Req::from_pem(request.csr.as_bytes()).unwrap();
            let certificate = wanted.certificate_for(&request.public_key().unwrap(), authority);
            (String::from_utf8(certificate.to_pem().unwrap()).unwrap(), None)
        }
    };
    let mut answer = json!({
        "configuration": {
            "identity": name,
            "plugin.choria.server.provision": "0",
            "plugin.security.provider": "file",
        },
        "certificate": certificate,
        "ca": authority.certificate_pem(),
        "action_policies": {"rpcutil.policy": "policy default deny\n"},
        "opa_policies": {"site.rego": "package choria.mcorpc.authpolicy\n"},
    });
    if let Some(key) = key {
        answer["key"] = json!(key);
        answer["ssldir"] = json!("/etc/choria/ssl");
    }
    answer.to_string()
}
