//! Nodes of an organization: they prove a key and get a server JWT for it, which their brokers and they themselves accept.
//!
//! Over a plain broker: what a server JWT says does not depend on how it travels.

mod common;
mod fleet;

use std::collections::HashSet;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use serde_json::{Value, json};

use common::{Builder, Daemon, NatsServer, SOON, wait_until, within};
use fleet::issuer::{ChainIssuer, Organization, check_server_jwt};
use fleet::{Action, Fault, Fleet, State, unix_now};

const DAY: i64 = 86_400;

/// A helper for nodes of an organization; it keeps what it was told of each.
const HELPER: &str = r#"#!/bin/sh
IFS= read -r input
identity=${input#*'"identity":"'}
identity=${identity%%'"'*}
printf '%s' "$input" >"${0%/*}/input-$identity"
cat <<ANSWER
{
  "configuration": {
    "identity": "$identity",
    "plugin.choria.server.provision": "0",
    "plugin.security.provider": "choria",
    "plugin.security.choria.token_file": "/etc/choria/server.jwt",
    "plugin.security.choria.seed_file": "/etc/choria/server.seed"
  },
  "server_claims": {"permissions": {"streams": true}, "pub_subjects": ["site.>"]}
}
ANSWER
"#;

#[test]
fn nodes_get_a_server_jwt_that_brokers_and_nodes_accept() {
    let (broker, organization) = (NatsServer::start(), Organization::new());
    let signer = organization.chain_issuer(unix_now());
    let fleet = Fleet::builder(&broker.url()).nodes(20).organization(&organization).start();
    let daemon = builder(&broker, &organization, &signer).start();
    fleet.wait_all_provisioned(within(SOON)).expect("provisioned");
    wait_until(SOON, "all are on the production network", || {
        fleet.iter().all(|node| node.state() == State::Provisioned)
    });
    assert_eq!(fleet.violations(), [""; 0]);

    let mut ids = HashSet::new();
    for node in fleet.iter() {
        let token = node.received().expect("it was configured").server_jwt;
        let claims = claims(&token);
        assert_eq!(claims["collectives"], json!(["choria"]));
        assert_eq!(claims["permissions"], json!({"streams": true}));
        assert_eq!(claims["pub_subjects"], json!(["site.>"]));
        let time = |name: &str| claims[name].as_i64().expect("a time");
        let validity = time("exp") - time("iat");
        assert!((0..=2).contains(&(365 * DAY - validity)), "{validity}");
        assert!(ids.insert(claims["jti"].to_string()), "{claims}");
        assert_eq!(node.times_asked(Action::Gen25519), 1);
        assert!(!daemon.log().contains(&token), "a server JWT is in the log");

        let path = daemon.dir().join(format!("input-{}", node.identity()));
        let input = fs::read_to_string(path).expect("the helper kept it");
        let input: Value = serde_json::from_str(&input).expect("JSON");
        let key = &input["ed25519_pubkey"];
        assert_eq!(key["public_key"], claims["public_key"]);
        assert_eq!(key["directory"], "/etc/choria");
        assert_eq!(key["signature"].as_str().map(str::len), Some(128));
        assert_eq!((&input["csr"], &input["jwt"]["cht"]), (&Value::Null, &json!("s3cret")));
    }
    let expires = claims(&signer.token)["exp"].as_f64().expect("a time");
    let metrics = daemon.metrics();
    assert_eq!(metrics.with("token_expiry_timestamp_seconds", "token=\"signing\""), expires);
    for secret in [&signer.seed, &signer.token, &organization.seed()] {
        assert!(!daemon.log().contains(secret), "a secret is in the log");
    }
    for trouble in ["The helper's answer for", "jwt_signing"] {
        assert!(!daemon.logged(&[trouble]), "{}", daemon.log());
    }
}

#[test]
fn brokers_may_know_the_issuers_own_key() {
    let (broker, organization) = (NatsServer::start(), Organization::new());
    let signer = organization.chain_issuer(unix_now());
    let fleet = Fleet::builder(&broker.url()).nodes(1).organization(&organization).start();
    let alone = ChainIssuer { seed: organization.seed(), ..signer };
    let _daemon = builder(&broker, &organization, &alone).without("jwt_signing_token").start();
    fleet.wait_all_provisioned(within(SOON)).expect("provisioned");
    assert_eq!(fleet.violations(), [""; 0]);
}

#[test]
fn nodes_that_do_not_prove_a_key_are_not_configured() {
    let (broker, organization) = (NatsServer::start(), Organization::new());
    let signer = organization.chain_issuer(unix_now());
    let unproved = [Fault::NonceSignature, Fault::WeakKey];
    let mut unusable = vec![Fault::ShortKey, Fault::KeyLength(0), Fault::KeyLength(31)];
    unusable.extend([Fault::KeyLength(33), Fault::KeyLength(1_000)]);
    unusable.extend(Fault::every_damage(Action::Gen25519));
    let twice = Fault::TwoAnswers(Action::Gen25519);

    let mut nodes = Fleet::builder(&broker.url()).organization(&organization).nodes(5);
    let faults = || unproved.iter().chain(&unusable).chain([&twice]);
    for (at, fault) in faults().enumerate() {
        nodes = nodes.broken(&format!("bad{at}.example.net"), fault.clone());
    }
    let fleet = nodes.start();
    let mut daemon = builder(&broker, &organization, &signer).set("workers", 64).start();

    for (at, fault) in faults().enumerate() {
        let name = format!("bad{at}.example.net");
        let why = match fault {
            Fault::NonceSignature | Fault::WeakKey => {
                "could not fetch ed25519 public key: invalid nonce signature"
            }
            Fault::TwoAnswers(_) => {
                "two different answers to one request for choria_provision#gen25519"
            }
            _ => "could not fetch ed25519 public key: unusable answer, after 5 tries",
        };
        daemon.wait_logged(SOON, &["Could not provision", &name, why]);
        let node = fleet.named(&name);
        assert_eq!(node.times_configured(), 0, "{fault}");
        // A second answer may come while the helper runs already, but never too late for `configure`.
        if *fault != twice {
            assert!(
                !daemon.dir().join(format!("input-{name}")).exists(),
                "{fault}: the helper ran"
            );
        }
    }
    fleet
        .wait(within(SOON), |fleet| match fleet.provisioned() {
            5 => Ok(()),
            count => Err(format!("{count} provisioned")),
        })
        .expect("the healthy ones");
    // Which also says that no nonce was used twice.
    assert_eq!(fleet.violations(), [""; 0]);
    daemon.assert_alive();
}

#[test]
fn a_token_that_can_not_sign_is_named_at_the_start() {
    let (broker, organization) = (NatsServer::start(), Organization::new());
    let now = unix_now();
    let good = organization.chain_issuer(now);
    let but =
        |edit: fn(&mut Value, i64)| organization.chain_issuer_but(now, |claims| edit(claims, now));
    let other = organization.chain_issuer(now);
    let stranger = Organization::new().chain_issuer_but(now, |claims| {
        claims["iss"] = json!(format!("I-{}", organization.public_key()));
    });
    for (signer, expected) in [
        (but(|claims, now| claims["exp"] = json!(now - 1)), "the token expired on "),
        (
            ChainIssuer { seed: other.seed, ..good.clone() },
            "the seed does not belong to the token: another public_key is in it",
        ),
        (
            but(|claims, _| drop(claims.as_object_mut().expect("claims").remove("tcs"))),
            "no Trust Chain Signature claim in JWT Signing Token: it was not made with --issuer",
        ),
        (
            but(|claims, _| claims["jti"] = json!("33p35A32s2nvG7P1eyW3rzyAYfS")),
            "the token's trust chain signature is not valid: ",
        ),
        (
            but(|claims, _| claims["purpose"] = json!("choria_server")),
            "not a client token: its purpose is \"choria_server\"",
        ),
        (
            but(|claims, _| drop(claims.as_object_mut().expect("claims").remove("exp"))),
            "the token has no expiry",
        ),
        (stranger, "the token's trust chain signature is not valid: "),
        (ChainIssuer { token: String::new(), ..good.clone() }, "the token file is empty"),
        (ChainIssuer { seed: "abc".to_owned(), ..good.clone() }, "invalid seed length: 3 hex"),
    ] {
        let (code, said) = builder(&broker, &organization, &signer).run_to_its_end();
        assert_eq!(code, 78, "{expected}: {said}");
        let errors: Vec<&str> = said.lines().filter(|line| line.contains("error: ")).collect();
        assert_eq!(errors.len(), 1, "{said}");
        assert!(errors[0].contains(": jwt_signing_") && errors[0].contains(expected), "{said}");
        assert!(!said.contains(&good.seed), "a secret was shown");
    }
}

#[test]
fn a_token_that_expires_soon_or_belongs_elsewhere_is_a_warning() {
    let (broker, organization) = (NatsServer::start(), Organization::new());
    let now = unix_now();
    let signer = organization.chain_issuer_but(now, |claims| claims["exp"] = json!(now + 29 * DAY));
    let mut daemon = builder(&broker, &organization, &signer).start();
    daemon.wait_logged(SOON, &["warning", "jwt_signing_token", "expires on", "replace it"]);
    daemon.stop();

    let other = Organization::new();
    let daemon = builder(&broker, &other, &organization.chain_issuer(now)).start();
    daemon.wait_logged(
        SOON,
        &["warning", "jwt_signing_token", &organization.public_key(), "another organization"],
    );
}

#[test]
fn replaced_credentials_sign_for_the_next_node_and_broken_ones_for_none() {
    let (broker, organization) = (NatsServer::start(), Organization::new());
    let now = unix_now();
    let [first, second] = [0, 1].map(|_| organization.chain_issuer(now));
    let daemon = builder(&broker, &organization, &first).start();
    let node = |name: &str| Fleet::builder(&broker.url()).node(name).organization(&organization);
    let signed_by = |fleet: &Fleet, signer: &ChainIssuer| {
        fleet.wait_all_provisioned(within(SOON)).expect("provisioned");
        let token = fleet.node(0).received().expect("it was configured").server_jwt;
        let issuer = claims(&token)["iss"].to_string();
        assert!(issuer.contains(&signer.public_key), "{issuer} is not {}", signer.public_key);
        assert_eq!(fleet.violations(), [""; 0]);
    };
    signed_by(&node("a.example.net").start(), &first);
    write(daemon.dir(), &second);
    signed_by(&node("b.example.net").start(), &second);

    // An operator forgot half of it.
    write(daemon.dir(), &ChainIssuer { token: first.token.clone(), ..second.clone() });
    let fleet = node("c.example.net").start();
    daemon.wait_logged(
        SOON,
        &[
            "Could not provision c.example.net",
            "could not use jwt_signing_token",
            "the seed does not belong to the token",
        ],
    );
    let expired = organization.chain_issuer_but(now, |claims| claims["exp"] = json!(now - 1));
    write(daemon.dir(), &expired);
    daemon.wait_logged(SOON, &["Could not provision c.example.net", "the token expired on"]);
    let node = fleet.node(0);
    assert_eq!((node.times_asked(Action::Gen25519), node.times_configured()), (0, 0));
    let metrics = daemon.metrics();
    assert_eq!(metrics.with("helper_time_count", ""), 2.0, "it was not asked about this node");
    assert!(metrics.with("outcomes_total", "outcome=\"misconfigured\"") >= 2.0);
    write(daemon.dir(), &first);
    signed_by(&fleet, &first);
}

#[test]
fn practice_brokers_take_a_recorded_token_and_no_spoilt_one() {
    const AT: i64 = 1_795_996_000;
    let organization = include_str!("vectors/captures/issuer/issuer.public").trim();
    let token = include_str!("vectors/captures/issuer/server.jwt").trim();
    let key = claims(token)["public_key"].as_str().expect("a key").to_owned();
    let check = |token: &str, identity: &str, key: &str, at: i64| {
        check_server_jwt(organization, token, identity, key, at).map(drop)
    };
    let node = "n0.fleet.example.net";
    assert_eq!(check(token, node, &key, AT), Ok(()));
    let failed = |result: Result<(), String>, expected: &str| {
        let error = result.expect_err(expected);
        assert!(error.starts_with(expected), "{error}");
    };
    failed(check(token, "n1.fleet.example.net", &key, AT), "for another identity");
    failed(check(token, node, organization, AT), "for another key");
    failed(check(token, node, &key, AT + 400 * DAY), "issuer is expired");
    let (signed, signature) = token.rsplit_once('.').expect("a token has three parts");
    let spoilt: String = signature.chars().rev().skip(2).chain("AA".chars()).collect();
    failed(check(&format!("{signed}.{spoilt}"), node, &key, AT), "token signature is invalid");
    failed(check(&format!("{token}.x"), node, &key, AT), "4 parts");
    failed(check("", node, &key, AT), "1 parts");
    let stranger = Organization::new().public_key();
    failed(
        check_server_jwt(&stranger, token, node, &key, AT).map(drop),
        "chain issuer not signed by organization issuer",
    );
}

/// A daemon for the nodes of `organization` that signs as `signer`.
fn builder(broker: &NatsServer, organization: &Organization, signer: &ChainIssuer) -> Builder {
    let builder = Daemon::builder(&broker.address())
        .feature("jwt", "false")
        .feature("ed25519", "true")
        .set("jwt_verify_cert", organization.public_key())
        .helper(HELPER);
    write(builder.dir(), signer);
    let path = |name: &str| builder.dir().join(name).display().to_string();
    let (key, token) = (path("signer.seed"), path("signer.jwt"));
    builder.set("jwt_signing_key", key).set("jwt_signing_token", token)
}

fn write(dir: &Path, signer: &ChainIssuer) {
    for (name, content) in [("signer.seed", &signer.seed), ("signer.jwt", &signer.token)] {
        let path = dir.join(name);
        fs::write(&path, content).expect("the daemon's folder is writable");
        let mode = fs::Permissions::from_mode(0o600);
        fs::set_permissions(path, mode).expect("the file is ours");
    }
}

/// What a token says.
fn claims(token: &str) -> Value {
    use base64::Engine as _;
    let claims = token.split('.').nth(1).expect("a token has three parts");
    let claims = base64::engine::general_purpose::URL_SAFE_NO_PAD.decode(claims);
    serde_json::from_slice(&claims.expect("base64")).expect("JSON")
}
