//! Whole attempts, with a node that follows a script over a network in memory and a helper that is a real program.

use std::fs::File;
use std::io::Write as _;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;

use crossbeam_channel::{Sender, at, bounded};
use ed25519_dalek::Signer as _;
use openssl::derive::Deriver;
use openssl::pkey::{Id, PKey, Private};
use parking_lot::Mutex;
use serde_json::{Value, json};

use super::*;
use crate::config::report::Report as Findings;
use crate::gate::Lease;
use crate::helper::Limits;
use crate::jwt::{VerifyKind, server, testing};
use crate::node::lint::testing::{self as certificates, Ca};
use crate::protocol::{self, Codec, v1};
use crate::rpc::testing::Asked;
use crate::transport::Message;
use crate::transport::memory::{Memory, Published};

const NODE: &str = "n0.fleet.example.net";
const SUBJECT: &str = "provisioning.node.n0.fleet.example.net";
const LONG: Duration = Duration::from_secs(60);
/// Time in which a helper has certainly run, for tests that need a node's time to end after that.
const HELPER_RUNS: Duration = Duration::from_secs(3);
/// Time in which a node whose own is up has certainly ended.
const SHORT_WHILE: Duration = Duration::from_millis(500);
const ALL_FEATURES: &str = "features: {jwt: true, pki: true}";
const CONFIGURE: &str = r#"echo '{"configuration":{"plugin.choria.server.provision":"0"}}'"#;

#[test]
fn provisions_a_node_with_the_requests_the_original_sends() {
    let site = Site::new(ALL_FEATURES, "cat >input; cat answer");
    let sent = recorded_configure();
    let recorded: Value = serde_json::from_str(&sent).unwrap();
    let settings = recorded["data"]["config"].as_str().unwrap();
    let settings: Value = serde_json::from_str(settings).unwrap();
    let answer = json!({
        "configuration": settings,
        "ca": recorded["data"]["ca"],
        "certificate": recorded["data"]["certificate"],
        "ssldir": "/elsewhere",
    });
    site.write("answer", &answer.to_string());

    let report = site.provision();
    assert_eq!(report.reason, "");
    let Outcome::Provisioned { configured_at, restarted_at: Some(restarted_at) } = report.outcome
    else {
        panic!("{report:?}")
    };
    assert!(configured_at <= restarted_at);
    let steps: Vec<_> = report.steps.iter().map(|(name, _)| *name).collect();
    assert_eq!(steps, ["jwt", "inventory", "gencsr", "helper", "configure", "restart"]);
    assert!(site.context.metrics.render().contains(
        r#"choria_provisioner_step_duration_seconds_count{site="test",step="gencsr"} 1"#
    ));

    let bodies: Vec<_> = site.asked().into_iter().map(|asked| asked.body).collect();
    assert_eq!(
        bodies,
        [
            r#"{"agent":"rpcutil","action":"inventory","data":{}}"#,
            r#"{"agent":"choria_provision","action":"jwt","data":{"token":"s3cret"}}"#,
            r#"{"agent":"choria_provision","action":"gencsr","data":{"cn":"n0.fleet.example.net","token":"s3cret"}}"#,
            &sent,
            r#"{"agent":"choria_provision","action":"restart","data":{"splay":1,"token":"s3cret"}}"#,
        ]
    );

    let input: Value = serde_json::from_str(&site.read("input")).unwrap();
    let mut expected = recorded_input();
    expected["jwt"] = json!({
        "cht": "s3cret", "chs": false, "chpd": true, "extensions": null, "ou": "choria",
        "purpose": "choria_provisioning",
    });
    assert_eq!(input, expected);
}

#[test]
fn a_node_of_an_organization_gets_a_server_jwt_for_the_key_it_proved() {
    let site = Site::issuer("cat >input; cat answer");
    site.write(
            "answer",
            r#"{"configuration":{"plugin.security.provider":"choria","plugin.choria.server.provision":"0"},"server_claims":{"permissions":{"streams":true}}}"#,
        );
    let report = site.provision();
    assert!(matches!(report.outcome, Outcome::Provisioned { .. }), "{report:?}");
    let steps: Vec<_> = report.steps.iter().map(|(name, _)| *name).collect();
    assert_eq!(steps, ["jwt", "gen25519", "inventory", "helper", "configure", "restart"]);
    assert_eq!(site.actions(), ["inventory", "jwt", "gen25519", "configure", "restart"]);

    // What the helper gets is what the original gives it, but for what this node made for itself.
    let asked = site.asked();
    let nonce = asked[2].nonce();
    assert_eq!(
        asked[2].body,
        format!(
            r#"{{"agent":"choria_provision","action":"gen25519","data":{{"nonce":"{nonce}","token":"s3cret"}}}}"#
        )
    );
    let key = testing::node();
    let mut expected: Value =
        serde_json::from_str(&testing::recorded("issuer/helper-input.json")).unwrap();
    expected["jwt"] = json!({
        "cht": "s3cret", "chs": false, "chpd": true, "extensions": null, "ou": "choria",
        "purpose": "choria_provisioning",
    });
    let public_key = hex(key.verifying_key().as_bytes());
    expected["ed25519_pubkey"]["public_key"] = json!(public_key);
    expected["ed25519_pubkey"]["signature"] = json!(hex(&key.sign(nonce.as_bytes()).to_bytes()));
    let input = site.read("input");
    assert_eq!(serde_json::from_str::<Value>(&input).unwrap(), expected);
    let places = [
        "{\"identity\":",
        "\"csr\":null,",
        "\"ed25519_pubkey\":{\"public_key\":",
        ",\"directory\":",
        ",\"signature\":",
        ",\"inventory\":",
        ",\"jwt\":{",
    ]
    .map(|key| input.find(key).unwrap_or_else(|| panic!("{key} is not in {input}")));
    assert!(places.is_sorted(), "{input}");

    let body: Value = serde_json::from_str(&asked[3].body).unwrap();
    let token = body["data"]["server_jwt"].as_str().unwrap();
    let organization = testing::issuer().verifying_key();
    let token = server::verify(token, &organization, unix_time()).unwrap();
    assert_eq!(token.own.identity, NODE);
    assert_eq!(token.own.collectives, ["choria"]);
    assert!(token.own.permissions.unwrap().streams);
    assert_eq!(token.standard.public_key, public_key);
    let validity = token.standard.exp.unwrap() - token.standard.iat.unwrap();
    assert!((0..=1).contains(&(365 * 24 * 3_600 - validity)), "{validity}");
    assert!(site.context.metrics.render().contains(
            r#"choria_provisioner_token_expiry_timestamp_seconds{site="test",token="signing"} 2051222400"#
        ));
}

#[test]
fn a_key_that_is_not_proved_is_asked_for_once_more_and_then_refused() {
    for (answers, outcome) in [(1, None), (2, Some(Outcome::Refused))] {
        let site = Site::issuer("touch ran; cat answer");
        site.write("answer", r#"{"configuration":{"a":"b"}}"#);
        site.answers("gen25519", move |site, asked| {
            let times = site.actions().iter().filter(|action| *action == "gen25519").count();
            let nonce = if times <= answers { "another nonce" } else { asked.nonce() };
            vec![asked.reply(&key_answer(nonce))]
        });
        let report = site.provision();
        let asked: Vec<_> =
            site.asked().into_iter().filter(|asked| asked.action() == "gen25519").collect();
        assert_eq!(asked.len(), 2);
        assert_ne!(asked[0].nonce(), asked[1].nonce());
        match outcome {
            None => {
                assert!(matches!(report.outcome, Outcome::Provisioned { .. }), "{report:?}")
            }
            Some(outcome) => {
                assert_eq!(report.outcome, outcome);
                assert_eq!(
                    report.reason,
                    "could not fetch ed25519 public key: invalid nonce signature"
                );
                assert!(!site.has("ran"));
            }
        }
    }
}

#[test]
fn what_we_sign_with_is_read_for_every_node_and_before_it_makes_a_key() {
    let site = Site::issuer("touch ran; cat answer");
    site.write("answer", r#"{"configuration":{"a":"b"}}"#);
    site.write("key", &"ab".repeat(32));
    let token = site.path("token").display().to_string();
    check(
        &site,
        Outcome::Misconfigured,
        &format!(
            "could not use jwt_signing_token {token}: the seed does not belong to the token: another public_key is in it"
        ),
    );
    std::fs::remove_file(site.path("key")).unwrap();
    check_start(&site, Outcome::Misconfigured, "could not read jwt_signing_key ");
    assert_eq!(site.actions(), ["inventory", "jwt", "inventory", "jwt"]);
    assert!(!site.has("ran"));

    site.write("key", testing::SIGNER_SEED);
    let report = site.provision();
    assert!(matches!(report.outcome, Outcome::Provisioned { .. }), "{report:?}");

    let mut site = Site::issuer("");
    Arc::get_mut(&mut site.context.config).unwrap().signing = None;
    check(&site, Outcome::Misconfigured, "no jwt signing key configured using jwt_signing_key");
}

#[test]
fn claims_that_make_no_token_are_a_fault_of_the_helper() {
    for (claims, expected) in [
        (r#"{"exp":"soon"}"#, "cannot decode exp in server_claims of the helper: "),
        (
            r#"{"collectives":[" "]}"#,
            "collectives in server_claims of the helper names no collective",
        ),
    ] {
        let site = Site::issuer("cat answer");
        site.write(
            "answer",
            &format!(r#"{{"configuration":{{"a":"b"}},"server_claims":{claims}}}"#),
        );
        let expected = format!("configuration failed: {expected}");
        check_start(&site, Outcome::HelperFailed, &expected);
        assert_eq!(site.actions(), ["inventory", "jwt", "gen25519"]);
    }
}

#[test]
fn leaves_out_the_steps_of_features_that_are_off() {
    let site = Site::new("", "cat >input; cat answer");
    site.write("answer", r#"{"configuration":{"a":"b"}}"#);
    let report = site.provision();
    assert!(matches!(report.outcome, Outcome::Provisioned { .. }), "{report:?}");
    assert_eq!(site.actions(), ["inventory", "configure", "restart"]);
    let steps: Vec<_> = report.steps.iter().map(|(name, _)| *name).collect();
    assert_eq!(steps, ["inventory", "helper", "configure", "restart"]);
    let input: Value = serde_json::from_str(&site.read("input")).unwrap();
    assert_eq!((&input["jwt"], &input["csr"]), (&Value::Null, &Value::Null));
}

#[test]
fn asks_for_the_inventory_when_no_answer_is_held() {
    let site = Site::new(ALL_FEATURES, CONFIGURE);
    let probed = Probed { registration: None, inventory: None, ..site.probed(LONG) };
    site.memory.take_published();
    let report = provision(&site.context, probed, &mut Unhurried(never()));
    assert!(matches!(report.outcome, Outcome::Provisioned { .. }), "{report:?}");
    assert_eq!(site.actions(), ["jwt", "inventory", "gencsr", "configure", "restart"]);
}

#[test]
fn a_refused_jwt_ends_the_attempt_before_anything_else_is_read() {
    let site = Site::new(ALL_FEATURES, CONFIGURE);
    site.answer("inventory", "no JSON at all");
    site.answer("jwt", &good("jwt", &json!({"jwt": "a.b", "ecdh_public": ""})));
    check(
        &site,
        Outcome::Refused,
        "could not validate JWT: n0.fleet.example.net: could not parse provisioner token: token is malformed: token contains an invalid number of segments",
    );
    assert_eq!(site.actions(), ["inventory", "jwt"]);
}

#[test]
fn without_our_own_key_no_node_is_asked() {
    for (source, expected) in [
        (
            Some(VerifyKeySource::File("/no/such/key".into())),
            "could not read validation certificate: /no/such/key: No such file or directory (os error 2)",
        ),
        (
            Some(VerifyKeySource::File("Cargo.toml".into())),
            "could not use validation certificate Cargo.toml: could not parse ed25519 public data: invalid byte: '['",
        ),
        (
            Some(VerifyKeySource::Ed25519([2; 32])),
            "could not use jwt_verify_cert: invalid ed25519 public key",
        ),
        (None, "no JWT verification certificate configured, cannot validate JWT"),
    ] {
        let mut site = Site::new(ALL_FEATURES, CONFIGURE);
        Arc::get_mut(&mut site.context.config).unwrap().jwt_verify_cert = source;
        check(&site, Outcome::Misconfigured, expected);
        assert_eq!(site.actions(), ["inventory"]);
    }
}

#[test]
fn a_key_file_that_was_replaced_counts_at_once() {
    let (rsa, hex) =
        (testing::recorded("insecure/jwt-signer.pem"), testing::recorded("issuer/issuer.public"));
    let last = LastKey::default();
    let read = |content: &str| {
        let key = last.of(content.as_bytes(), || VerifyKey::from_file(content))?;
        Ok::<_, KeyError>(key.kind().clone())
    };
    for _ in 0..2 {
        assert!(matches!(read(&rsa), Ok(VerifyKind::Rsa(_))));
        assert!(matches!(read(&rsa), Ok(VerifyKind::Rsa(_))));
        assert!(matches!(read(&hex), Ok(VerifyKind::Ed25519(_))));
        // A broken one does not leave the one before in force.
        assert!(read(&hex[1..]).is_err());
    }
}

#[test]
fn a_refused_csr_ends_the_attempt() {
    let site = Site::new(ALL_FEATURES, "touch ran");
    let other = json!({"csr": "no PEM", "public_key": "", "ssldir": ""});
    site.answer("gencsr", &good("gencsr", &other));
    check(&site, Outcome::Refused, "could not parse CSR: no PEM block found");
    assert!(!site.has("ran"));
}

#[test]
fn every_refusal_by_the_node_has_its_outcome() {
    let none = "Cannot reconfigure a server that is not in provisioning mode";
    for (action, code, message, outcome, prefix) in [
        ("jwt", 1, "Could not obtain provisioning lock", Outcome::Busy, JWT_FAILED),
        ("jwt", 1, "Incorrect provision token supplied", Outcome::WrongToken, JWT_FAILED),
        ("gencsr", 1, none, Outcome::NotProvisioning, "could not fetch CSR"),
        ("gencsr", 1, "Could not create CSR: x", Outcome::Failed, "could not fetch CSR"),
        (
            "configure",
            1,
            "Could not obtain provisioning lock",
            Outcome::Busy,
            "configuration failed",
        ),
        ("configure", 4, "x", Outcome::Failed, "configuration failed"),
        ("restart", 2, "x", Outcome::Failed, "restart failed"),
    ] {
        let site = Site::new(ALL_FEATURES, CONFIGURE);
        site.answer(action, &refusal(action, code, message));
        let expected = format!("{prefix}: refused with status {code}: {message} (1 try)");
        check(&site, outcome, &expected);
        assert_eq!(site.actions().last().unwrap(), action);
    }
}

const JWT_FAILED: &str = "could not fetch and validate JWT: n0.fleet.example.net";

#[test]
fn an_unusable_answer_fails_the_attempt() {
    let site = Site::new(ALL_FEATURES, CONFIGURE);
    site.answer("gencsr", &good("gencsr", &json!({"csr": 1, "public_key": "", "ssldir": ""})));
    let report = site.provision();
    assert_eq!(report.outcome, Outcome::Failed);
    let expected = "could not fetch CSR: unusable answer, after 1 try";
    assert!(report.reason.starts_with(expected), "{}", report.reason);
}

#[test]
fn a_node_nobody_hears_is_unreachable() {
    let site = Site::new(ALL_FEATURES, CONFIGURE);
    let probed = site.probed(LONG);
    site.memory.no_responders_for(SUBJECT);
    let report = provision(&site.context, probed, &mut Unhurried(never()));
    assert_eq!(report.outcome, Outcome::Unreachable);
    assert_eq!(
        report.reason,
        format!("{JWT_FAILED}: nobody listens on the node's subject, after 2 tries")
    );
}

#[test]
fn a_node_whose_time_is_up_failed() {
    let site = Site::new(ALL_FEATURES, CONFIGURE);
    site.silence("jwt");
    let report =
        provision(&site.context, site.probed(Duration::from_millis(50)), &mut Unhurried(never()));
    assert_eq!(report.outcome, Outcome::Failed);
    let expected = format!("{JWT_FAILED}: the node's time was up, after ");
    assert!(report.reason.starts_with(&expected), "{}", report.reason);
}

#[test]
fn a_silent_node_whose_place_is_needed_failed_or_was_never_there() {
    for (action, outcome, what) in [
        ("inventory", Outcome::Unreachable, "could not retrieve inventory"),
        ("gencsr", Outcome::Failed, "could not fetch CSR"),
        ("configure", Outcome::Failed, "configuration failed"),
    ] {
        let site = Site::new("features: {pki: true}", CONFIGURE);
        let mut patience = site.gives_up_at(action);
        let probed = Probed {
            identity: identity(),
            term: site.context.gate.begin().unwrap(),
            registration: None,
            inventory: None,
            deadline: Instant::now() + LONG,
            upgrade: None,
            progress: Arc::default(),
        };
        let report = provision(&site.context, probed, &mut patience);
        assert_eq!(report.outcome, outcome, "{action}");
        let expected = format!("{what}: given up while the node was silent, after 1 try");
        assert_eq!(report.reason, expected);
    }
}

#[test]
fn a_configured_node_that_is_given_up_before_it_answers_restart_is_provisioned() {
    let site = Site::new("", CONFIGURE);
    let mut patience = site.gives_up_at("restart");
    let report = provision(&site.context, site.probed(LONG), &mut patience);
    let Outcome::Provisioned { restarted_at: None, .. } = report.outcome else {
        panic!("{report:?}")
    };
}

#[test]
fn a_helper_that_fails_or_answers_what_would_hurt_is_a_fault_of_ours() {
    for (script, expected) in [
        ("echo broken >&2; exit 3", "could not invoke configure helper: "),
        ("exit 0", "could not invoke configure helper: "),
        ("echo '{'", "could not invoke configure helper: cannot decode output from "),
        ("echo '{}'", "configuration failed: empty configuration"),
        (
            r#"printf '{"configuration":{"a":"b\\nc"}}'"#,
            r#"configuration failed: the value of setting "a" holds a line break"#,
        ),
        (
            r#"echo '{"configuration":{"plugin.choria.server.provision":"true"}}'"#,
            "configuration failed: plugin.choria.server.provision is true",
        ),
    ] {
        let site = Site::new(ALL_FEATURES, script);
        let report = site.provision();
        assert_eq!(report.outcome, Outcome::HelperFailed, "{script}: {}", report.reason);
        assert!(report.reason.starts_with(expected), "{script}: {}", report.reason);
        assert_eq!(site.actions(), ["inventory", "jwt", "gencsr"], "{script}");
    }
}

#[test]
fn the_helper_may_defer_a_node_or_shut_it_down() {
    let site = Site::new(ALL_FEATURES, r#"echo '{"defer":true,"msg":"at night"}'"#);
    check(&site, Outcome::Deferred, "configuration defered: at night");
    assert_eq!(site.actions(), ["inventory", "jwt", "gencsr"]);

    for (answer, positive) in [
        (good("shutdown", &json!({"message": "bye"})), 1),
        (refusal("shutdown", 1, "no"), 0),
        (refusal("shutdown", 5, "no"), 0),
    ] {
        let site = Site::new("", r#"echo '{"shutdown":true,"msg":"old"}'"#);
        site.answer("shutdown", &answer);
        check(&site, Outcome::ShutDown, "");
        assert_eq!(site.actions(), ["inventory", "shutdown"]);
        assert_eq!(site.context.metrics.helper_shutdown_requests.get(), positive);
    }
}

#[test]
fn a_node_that_is_gone_before_it_answers_shutdown_has_shut_down() {
    let site = Site::new("", r#"echo '{"shutdown":true,"msg":"old"}'"#);
    let probed = site.probed(LONG);
    site.memory.no_responders_for(SUBJECT);
    let report = provision(&site.context, probed, &mut Unhurried(never()));
    assert_eq!((report.outcome, report.reason.as_str()), (Outcome::ShutDown, ""));
    assert_eq!(site.actions(), ["inventory", "shutdown", "shutdown"]);
}

#[test]
fn the_words_of_a_helper_are_kept_only_in_part() {
    let script = r#"printf '{"defer":true,"msg":"%05000d"}' 0"#;
    let report = Site::new("", script).provision();
    assert_eq!(report.outcome, Outcome::Deferred);
    assert_eq!(report.reason.len(), REASON_MAX + " ...".len());
}

#[test]
fn a_private_key_of_the_helper_reaches_only_its_node_encrypted() {
    let node = PKey::generate_x25519().unwrap();
    let site = Site::new("features: {jwt: true}", "cat answer");
    let key = with_key(&site);
    let half = hex(&node.raw_public_key().unwrap());
    site.answer("jwt", &jwt_answer(&half));

    let (mut keys, mut halves) = (Vec::new(), Vec::new());
    for _ in 0..2 {
        let report = site.provision();
        assert!(matches!(report.outcome, Outcome::Provisioned { .. }), "{report:?}");
        let asked = site.asked();
        let configure = asked.iter().rfind(|asked| asked.action() == "configure").unwrap();
        let body: Value = serde_json::from_str(&configure.body).unwrap();
        let text = |field: &str| body["data"][field].as_str().unwrap().to_owned();
        let opened = open(&node, &text("key"), &text("ecdh_public"));
        assert!(opened.public_eq(&key));
        assert_eq!(text("ssldir"), "/helper");
        keys.push(text("key"));
        halves.push(text("ecdh_public"));
    }
    // A pair of ours, and so a secret, serves one attempt only.
    assert_ne!(halves[0], halves[1]);
    assert_ne!(keys[0], keys[1]);
    let clear = key.private_key_to_pem_pkcs8().unwrap();
    let clear = std::str::from_utf8(&clear).unwrap().lines().nth(1).unwrap();
    assert!(site.asked().iter().all(|asked| !asked.body.contains(clear)));
}

#[test]
fn a_node_without_a_half_of_the_exchange_gets_no_private_key() {
    for (half, expected) in [
        (
            "",
            "private key received from helper but server did not start Diffie-Hellman exchange: its jwt reply holds no ecdh_public",
        ),
        ("x", "the node's ecdh_public is not hex"),
        ("00", "the node's ecdh_public has 1 bytes instead of 32"),
        (
            &"00".repeat(32),
            "the node's ecdh_public is a low order point, which would make the secret public",
        ),
    ] {
        let site = Site::new("features: {jwt: true}", "cat answer");
        with_key(&site);
        site.answer("jwt", &jwt_answer(half));
        check(&site, Outcome::Refused, expected);
        assert_eq!(site.actions(), ["inventory", "jwt"]);
    }

    // Without the feature no node was asked to begin an exchange.
    let site = Site::new("", "cat answer");
    with_key(&site);
    check(
        &site,
        Outcome::HelperFailed,
        "configuration failed: private key received from helper but server did not start Diffie-Hellman exchange: turn on the feature jwt",
    );
    assert_eq!(site.actions(), ["inventory"]);
}

/// Has the helper give a key with its certificate.
fn with_key(site: &Site) -> PKey<Private> {
    let validity = unix_time() - 10..unix_time() + 10_000;
    let (ca, key) = (Ca::new("CA", validity.clone()), certificates::key());
    let answer = json!({
        "configuration": {"plugin.choria.server.provision": "0"},
        "certificate": ca.issue(NODE, &key, validity),
        "ca": ca.pem(),
        "key": String::from_utf8(key.private_key_to_pem_pkcs8().unwrap()).unwrap(),
        "ssldir": "/helper",
    });
    site.write("answer", &answer.to_string());
    key
}

/// What the node does with an encrypted key and our half of the exchange.
fn open(node: &PKey<Private>, key: &str, half: &str) -> PKey<Private> {
    let half: Vec<u8> = (0..half.len())
        .step_by(2)
        .map(|at| u8::from_str_radix(&half[at..at + 2], 16).unwrap())
        .collect();
    let ours = PKey::public_key_from_raw_bytes(&half, Id::X25519).unwrap();
    let mut deriver = Deriver::new(node).unwrap();
    deriver.set_peer(&ours).unwrap();
    let secret = deriver.derive_to_vec().unwrap();
    // OpenSSL goes by the label, nodes by the bytes.
    let key = key.replace("RSA PRIVATE KEY", "EC PRIVATE KEY");
    // A passphrase proper must not hold a NUL.
    PKey::private_key_from_pem_callback(key.as_bytes(), |passphrase| {
        passphrase[..secret.len()].copy_from_slice(&secret);
        Ok(secret.len())
    })
    .unwrap()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

const UPGRADES: &str = "features: {upgrades: true}\nupgrades_repository: https://repo.example.net";
const OPTIONAL: &str = "features: {upgrades: true}\nupgrades_repository: https://repo.example.net\nupgrades_optional: true";
/// The version that the recorded node reports.
const VERSION: &str = "0.30.2";

fn upgrade_to(version: &str) -> String {
    let settings = r#"{"plugin.choria.server.provision":"0"}"#;
    format!(r#"echo '{{"upgrade":"{version}","configuration":{settings}}}'"#)
}

#[test]
fn another_version_is_sent_before_any_configuration() {
    for wish in ["0.31.0", "0.28.0"] {
        let site = Site::new(UPGRADES, &upgrade_to(wish));
        site.answer("inventory", &upgradable());
        let before = Instant::now();
        let report = site.provision();
        let Outcome::UpgradeSent { version, from, sent_at } = report.outcome else {
            panic!("{report:?}")
        };
        assert_eq!((version.as_str(), from.as_str()), (wish, VERSION));
        assert!(before <= sent_at && sent_at <= Instant::now());
        assert_eq!(report.reason, "");
        assert_eq!(site.actions(), ["inventory", "release_update"]);
        assert_eq!(
            site.asked()[1].body,
            format!(
                r#"{{"agent":"choria_provision","action":"release_update","data":{{"repository":"https://repo.example.net","token":"s3cret","version":"{wish}"}}}}"#
            )
        );
        let steps: Vec<_> = report.steps.iter().map(|(name, _)| *name).collect();
        assert_eq!(steps, ["inventory", "helper", "release_update"]);
    }
}

#[test]
fn a_node_that_has_the_version_wished_is_configured() {
    for settings in [UPGRADES, OPTIONAL] {
        let site = Site::new(settings, &upgrade_to(VERSION));
        site.answer("inventory", &upgradable());
        check_configured(&site);
    }
    // Without the feature a wish is only a warning.
    check_configured(&Site::new("", &upgrade_to("0.31.0")));
}

#[test]
fn a_node_that_takes_no_upgrades_fails_or_is_configured_as_it_is() {
    let fixed = good("inventory", &json!({"version": VERSION, "upgradable": false}));
    let unknown = good("inventory", &json!({"version": "", "upgradable": true}));
    for (inventory, expected) in [
        (&fixed, "does not support upgrades"),
        (&unknown, "did not receive a version in inventory"),
    ] {
        let site = Site::new(UPGRADES, &upgrade_to("0.31.0"));
        site.answer("inventory", inventory);
        check(&site, Outcome::Failed, expected);
        assert_eq!(site.actions(), ["inventory"]);

        let site = Site::new(OPTIONAL, &upgrade_to("0.31.0"));
        site.answer("inventory", inventory);
        check_configured(&site);
    }
}

#[test]
fn a_refused_update_is_not_repeated() {
    let words = "Update to version 0.31.0 failed, release rolled back: not found";
    let failed = refusal("release_update", 1, words);
    let no_use = good("release_update", &json!({"message": 1}));
    for answer in [&failed, &no_use] {
        let site = Site::new(UPGRADES, &upgrade_to("0.31.0"));
        site.answer("inventory", &upgradable());
        site.answer("release_update", answer);
        check_start(&site, Outcome::Failed, "update to 0.31.0 failed: ");
        assert_eq!(site.actions(), ["inventory", "release_update"]);

        let site = Site::new(OPTIONAL, &upgrade_to("0.31.0"));
        site.answer("inventory", &upgradable());
        site.answer("release_update", answer);
        let report = site.provision();
        assert!(matches!(report.outcome, Outcome::Provisioned { .. }), "{report:?}");
        assert_eq!(site.actions(), ["inventory", "release_update", "configure", "restart"]);
    }

    // These say something else than that there is no upgrade.
    for (words, outcome) in [
        ("Could not obtain provisioning lock", Outcome::Busy),
        ("Incorrect provision token supplied", Outcome::WrongToken),
        ("Cannot update a server that is not in provisioning mode", Outcome::NotProvisioning),
    ] {
        let site = Site::new(OPTIONAL, &upgrade_to("0.31.0"));
        site.answer("inventory", &upgradable());
        site.answer("release_update", &refusal("release_update", 1, words));
        check_start(&site, outcome, "update to 0.31.0 failed: ");
        assert_eq!(site.actions(), ["inventory", "release_update"]);
    }
}

#[test]
fn an_update_that_nobody_answers_may_be_under_way() {
    for settings in [UPGRADES, OPTIONAL] {
        let site = Site::new(settings, &upgrade_to("0.31.0"));
        site.answer("inventory", &upgradable());
        let mut patience = site.gives_up_at("release_update");
        let report = provision(&site.context, site.probed(LONG), &mut patience);
        assert!(matches!(report.outcome, Outcome::UpgradeSent { .. }), "{report:?}");
        assert_eq!(site.actions(), ["inventory", "release_update"]);
    }

    let site = Site::new(UPGRADES, &upgrade_to("0.31.0"));
    site.answer("inventory", &upgradable());
    site.silence("release_update");
    let report = provision(&site.context, site.probed(HELPER_RUNS), &mut Unhurried(never()));
    assert!(matches!(report.outcome, Outcome::UpgradeSent { .. }), "{report:?}");
}

#[test]
fn an_update_that_nobody_received_is_not_under_way() {
    for settings in [UPGRADES, OPTIONAL] {
        let site = Site::new(settings, &upgrade_to("0.31.0"));
        site.answer("inventory", &upgradable());
        let probed = site.probed(LONG);
        site.memory.no_responders_for(SUBJECT);
        let report = provision(&site.context, probed, &mut Unhurried(never()));
        assert_eq!(report.outcome, Outcome::Unreachable, "{report:?}");
        assert!(report.reason.starts_with("update to 0.31.0 failed: "), "{report:?}");
    }
}

#[test]
fn an_update_that_changed_nothing_twice_is_not_sent_again() {
    let tried = |count| {
        (0..count).fold(None, |before, _| Some(upgrade::Tries::after(before, "0.31.0", VERSION)))
    };
    let provision_after = |settings, count| {
        let site = Site::new(settings, &upgrade_to("0.31.0"));
        site.answer("inventory", &upgradable());
        let probed = Probed { upgrade: tried(count), ..site.probed(LONG) };
        (provision(&site.context, probed, &mut Unhurried(never())), site.actions())
    };
    let (report, _) = provision_after(UPGRADES, 1);
    assert!(matches!(report.outcome, Outcome::UpgradeSent { .. }), "{report:?}");
    let (report, actions) = provision_after(UPGRADES, 2);
    assert_eq!(report.outcome, Outcome::UpgradeStuck { version: "0.31.0".to_owned() });
    assert_eq!(
        report.reason,
        "update to 0.31.0 was sent before and the node still reports 0.30.2: \
             the helper must wish for the version exactly as the node will report it"
    );
    assert_eq!(actions, ["inventory"]);
    let (report, actions) = provision_after(OPTIONAL, 2);
    assert!(matches!(report.outcome, Outcome::Provisioned { .. }), "{report:?}");
    assert_eq!(actions, ["inventory", "configure", "restart"]);
}

#[track_caller]
fn check_configured(site: &Site) {
    let report = site.provision();
    assert!(matches!(report.outcome, Outcome::Provisioned { .. }), "{report:?}");
    assert_eq!(site.actions(), ["inventory", "configure", "restart"]);
}

fn upgradable() -> String {
    good("inventory", &json!({"version": VERSION, "upgradable": true}))
}

#[test]
fn a_second_answer_that_differs_keeps_the_helper_from_running() {
    let site = Site::new(ALL_FEATURES, "touch ran");
    site.answers("gencsr", |site, asked| {
        let first = site.asked().remove(0);
        assert_eq!(first.action(), "inventory");
        let forged = good("inventory", &json!({"version": "6.6.6", "upgradable": true}));
        vec![asked.reply(&site.usual("gencsr")), first.reply(&forged)]
    });
    check(
        &site,
        Outcome::Refused,
        "two different answers to one request for rpcutil#inventory: another machine has this name, or somebody forges",
    );
    assert!(!site.has("ran"));
}

#[test]
fn a_second_answer_while_the_helper_runs_keeps_the_node_from_being_configured() {
    for wait in ["0", "10s"] {
        let settings = format!("{ALL_FEATURES}\ncontradiction_wait: {wait}");
        let site = Site::new(&settings, &format!("cat go; {CONFIGURE}"));
        let made = std::process::Command::new("mkfifo").arg(site.path("go")).status().unwrap();
        assert!(made.success());
        let started = Instant::now();
        thread::scope(|scope| {
            scope.spawn(|| {
                // Opens once the helper reads.
                let mut go = File::options().write(true).open(site.path("go")).unwrap();
                let asked = site.asked();
                let jwt = asked.iter().find(|asked| asked.action() == "jwt").unwrap();
                site.memory.deliver_message(jwt.reply(&refusal("jwt", 1, "forged")));
                go.write_all(b" ").unwrap();
            });
            check_start(
                &site,
                Outcome::Refused,
                "two different answers to one request for choria_provision#jwt",
            );
        });
        assert_eq!(site.actions(), ["inventory", "jwt", "gencsr"]);
        // What is known already is not waited for.
        assert!(started.elapsed() < Duration::from_secs(10));
    }
}

#[test]
fn waits_for_a_second_answer_as_long_as_the_site_wants() {
    let site = Site::new("contradiction_wait: 20ms", CONFIGURE);
    let report = site.provision();
    assert!(matches!(report.outcome, Outcome::Provisioned { .. }), "{report:?}");
    let waited = report.steps.iter().find(|(name, _)| *name == "contradiction_wait");
    assert!(waited.unwrap().1 >= Duration::from_millis(20));
    let names: Vec<_> = report.steps.iter().map(|(name, _)| *name).collect();
    assert_eq!(names, ["inventory", "helper", "contradiction_wait", "configure", "restart"]);
}

#[test]
fn a_configured_node_that_is_gone_before_it_answers_restart_is_provisioned() {
    let site = Site::new("", CONFIGURE);
    site.answers("configure", |site, asked| {
        site.memory.no_responders_for(SUBJECT);
        vec![asked.reply(&site.usual("configure"))]
    });
    let report = site.provision();
    let Outcome::Provisioned { restarted_at: None, .. } = report.outcome else {
        panic!("{report:?}")
    };
    assert_eq!(report.reason, "");
    assert_eq!(site.actions(), ["inventory", "configure", "restart", "restart"]);
}

#[test]
fn a_configured_node_is_restarted_though_its_time_is_up() {
    let site = Site::new("", CONFIGURE);
    let probed = site.probed(HELPER_RUNS);
    let deadline = probed.deadline;
    site.answers("configure", move |site, asked| {
        at(deadline).recv().unwrap();
        vec![asked.reply(&site.usual("configure"))]
    });
    let report = provision(&site.context, probed, &mut Unhurried(never()));
    let Outcome::Provisioned { restarted_at: Some(_), .. } = report.outcome else {
        panic!("{report:?}")
    };
    assert!(Instant::now() > deadline);
}

#[test]
fn a_configuration_too_large_for_the_broker_fails_with_the_sizes() {
    let site = Site::new("", CONFIGURE);
    site.memory.set_max_payload(1_000);
    let report = site.provision();
    assert_eq!(report.outcome, Outcome::HelperFailed);
    let (_, sizes) = report.reason.split_once("configuration failed: ").unwrap();
    assert!(sizes.contains("and the broker takes 1000: shorten the configuration"), "{sizes}");
}

#[test]
fn what_the_gate_stops_is_no_failure() {
    // The term ended.
    let site = Site::new("", "touch ran");
    let probed = site.probed(LONG);
    site.context.gate.end_term();
    let report = provision(&site.context, probed, &mut Unhurried(never()));
    assert_eq!(report.outcome, Outcome::Stopped(Closed::TermEnded));

    // The process aborts while the helper runs.
    let mut site = Site::new("", "echo started >go; cat go");
    let (keep, abort) = bounded(0);
    site.context.abort = abort;
    let made = std::process::Command::new("mkfifo").arg(site.path("go")).status().unwrap();
    assert!(made.success());
    thread::scope(|scope| {
        let go = site.path("go");
        scope.spawn(move || {
            let started = std::fs::read(go).unwrap();
            assert_eq!(started, b"started\n");
            drop(keep);
        });
        let report = site.provision();
        assert_eq!(report.outcome, Outcome::Stopped(Closed::Aborted), "{report:?}");
    });
}

/// Of a connection that is lost at one step and not made again while the node has time. Whoever is configured has all
/// the time it needs.
#[test]
fn a_node_that_had_no_connection_for_all_its_time_is_not_to_blame_at_any_step() {
    let plain = || Site::new(ALL_FEATURES, CONFIGURE);
    let upgrading = || {
        let site = Site::new(UPGRADES, &upgrade_to("0.31.0"));
        site.answer("inventory", &upgradable());
        site
    };
    let asked: [(&str, &(dyn Fn() -> Site + Sync)); 6] = [
        ("jwt", &plain),
        ("gen25519", &|| Site::issuer(CONFIGURE)),
        ("gencsr", &plain),
        ("release_update", &upgrading),
        ("configure", &plain),
        ("restart", &plain),
    ];
    thread::scope(|scope| {
        for (action, site) in asked {
            scope.spawn(move || check_without_connection_at(action, &site()));
        }
    });
}

fn check_without_connection_at(action: &str, site: &Site) {
    let (lost, is_lost) = bounded(1);
    site.answers(action, move |site, asked| {
        // The second time there is a connection.
        if lost.try_send(()).is_err() {
            return vec![asked.reply(&site.usual(&asked.action()))];
        }
        site.context_gate().close(Reason::Disconnected);
        Vec::new()
    });
    let probed = site.probed(HELPER_RUNS);
    let deadline = probed.deadline;
    let report = thread::scope(|scope| {
        scope.spawn(|| {
            at(deadline + SHORT_WHILE).recv().unwrap();
            site.context_gate().open(Reason::Disconnected);
        });
        provision(&site.context, probed, &mut Unhurried(never()))
    });
    assert_eq!(is_lost.len(), 1, "{action} was asked");
    let is_as_expected = match (action, &report.outcome) {
        ("restart", Outcome::Provisioned { .. }) => true,
        // It may have heard it, and be at it.
        ("release_update", Outcome::UpgradeSent { .. }) => true,
        ("restart" | "release_update", _) => false,
        (_, outcome) => *outcome == Outcome::Stopped(Closed::Deadline),
    };
    assert!(is_as_expected, "{action}: {report:?}");
    let times = site.actions().iter().filter(|asked| *asked == action).count();
    assert_eq!(times, if action == "restart" { 2 } else { 1 }, "{action}");
}

#[test]
fn a_node_that_had_no_connection_since_its_helper_ran_is_not_to_blame() {
    let site = Site::new("", &format!("echo started >go; cat back; {CONFIGURE}"));
    for name in ["go", "back"] {
        let made = std::process::Command::new("mkfifo").arg(site.path(name)).status().unwrap();
        assert!(made.success());
    }
    let probed = site.probed(HELPER_RUNS);
    let report = thread::scope(|scope| {
        scope.spawn(|| {
            site.read("go");
            site.context_gate().close(Reason::Disconnected);
            site.write("back", "");
        });
        provision(&site.context, probed, &mut Unhurried(never()))
    });
    assert_eq!(report.outcome, Outcome::Stopped(Closed::Deadline), "{report:?}");
    assert_eq!(site.actions(), ["inventory"]);
}

#[test]
fn what_the_broker_took_is_not_the_nodes_fault() {
    let gate = Gate::new();
    gate.open(Reason::Disconnected);
    let lost = rpc::Error::Lost { tries: 2 };
    let unreachable = rpc::Error::Unreachable { tries: 2 };
    let silent = rpc::Error::Silent { tries: 2 };
    let late =
        |last: &rpc::Error| rpc::Error::Deadline { tries: 3, last: Some(Box::new(last.clone())) };
    let stopped = Outcome::Stopped(Closed::Deadline);
    for (error, expected) in [
        (&lost, &stopped),
        (&late(&lost), &stopped),
        (&late(&unreachable), &Outcome::Unreachable),
        (&late(&silent), &Outcome::Failed),
    ] {
        assert_eq!(rpc_outcome(Action::Configure, error, &gate), *expected, "{error:?}");
    }
}

#[test]
fn an_operators_pause_lets_a_running_node_finish() {
    let site = Site::new("", CONFIGURE);
    let probed = site.probed(LONG);
    site.context.gate.close(Reason::Operator);
    site.context.gate.close(Reason::Draining);
    let report = provision(&site.context, probed, &mut Unhurried(never()));
    assert!(matches!(report.outcome, Outcome::Provisioned { .. }), "{report:?}");
}

#[track_caller]
fn check(site: &Site, outcome: Outcome, reason: &str) {
    let report = site.provision();
    assert_eq!((report.outcome, report.reason.as_str()), (outcome, reason));
}

#[track_caller]
fn check_start(site: &Site, outcome: Outcome, reason: &str) {
    let report = site.provision();
    assert_eq!(report.outcome, outcome, "{}", report.reason);
    assert!(report.reason.starts_with(reason), "{}", report.reason);
}

/// A provisioner with one node, which answers as a real one does unless told otherwise.
struct Site {
    context: Context,
    network: Network,
    directory: PathBuf,
    _abort: Sender<Never>,
}

impl Site {
    /// With `settings` beside the necessary ones, and a helper that runs `script` in its own directory.
    fn new(settings: &str, script: &str) -> Site {
        static LAST: AtomicU32 = AtomicU32::new(0);
        let number = LAST.fetch_add(1, Ordering::Relaxed);
        let name = format!("node-test-{}-{number}", std::process::id());
        let directory = std::env::temp_dir().join(name);
        std::fs::create_dir(&directory).unwrap();
        std::fs::write(directory.join("key"), testing::SIGNER_SEED).unwrap();
        std::fs::write(directory.join("token"), testing::SIGNER).unwrap();
        let settings = settings.replace("DIRECTORY", &directory.display().to_string());
        let helper = directory.join("helper");
        std::fs::write(&helper, format!("cd {}\n{script}\n", directory.display())).unwrap();

        let yaml = format!(
            "helper: /bin/sh {}\ntoken: s3cret\nsite: test\nchoria_insecure: true\n\
                 jwt_verify_cert: tests/vectors/captures/insecure/jwt-signer.pem\n{settings}\n",
            helper.display()
        );
        let mut findings = Findings::new("test");
        let config = Config::parse(yaml.as_bytes(), &mut findings);
        let config = config.unwrap_or_else(|| panic!("{findings:?}"));

        let memory = Memory::new();
        let metrics = Metrics::new("test");
        let sender = protocol::Sender {
            identity: Identity::parse("prov1.example.net").unwrap(),
            caller: "choria=prov1.example.net".to_owned(),
        };
        let codec = Codec::V1(v1::Codec::insecure(sender));
        let rpc =
            Rpc::start(memory.clone(), Lease::endless(), codec, "i1", 60, metrics.clone()).unwrap();
        let limits = Limits { timeout: LONG, output_max: 1 << 20 };
        let helper = Helper::new(config.helper.clone(), limits, metrics.clone());
        let gate = Arc::new(Gate::new());
        gate.open(Reason::Disconnected);
        let (keep, abort) = bounded(0);

        let network = Network { memory, gate: gate.clone(), special: Arc::default() };
        network.listen();
        Site {
            context: Context {
                rpc,
                helper: Arc::new(helper),
                gate,
                metrics,
                config: Arc::new(config),
                last_key: Default::default(),
                last_pair: Default::default(),
                discovery_timeout: Duration::from_secs(2),
                abort,
            },
            network,
            directory,
            _abort: keep,
        }
    }

    /// Of an organization whose nodes get a server JWT.
    fn issuer(script: &str) -> Site {
        let settings = "features: {ed25519: true}\n\
                jwt_signing_key: DIRECTORY/key\njwt_signing_token: DIRECTORY/token";
        Site::new(settings, script)
    }

    fn provision(&self) -> Report {
        provision(&self.context, self.probed(LONG), &mut Unhurried(never()))
    }

    /// What the prober would hand over.
    fn probed(&self, time: Duration) -> Probed {
        let (sink, arrivals) = bounded(1);
        let body = Inventory {}.body();
        let registration =
            self.context.rpc.send(&identity(), Action::Inventory, &body, &sink).unwrap();
        Probed {
            identity: identity(),
            term: self.context.gate.begin().unwrap(),
            registration: Some(registration),
            inventory: arrivals.try_recv().ok(),
            deadline: Instant::now() + time,
            upgrade: None,
            progress: Arc::default(),
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    fn has(&self, name: &str) -> bool {
        self.path(name).exists()
    }

    fn read(&self, name: &str) -> String {
        std::fs::read_to_string(self.path(name)).unwrap()
    }

    fn write(&self, name: &str, content: &str) {
        std::fs::write(self.path(name), content).unwrap();
    }
}

impl std::ops::Deref for Site {
    type Target = Network;

    fn deref(&self) -> &Network {
        &self.network
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        drop(std::fs::remove_dir_all(&self.directory));
    }
}

type Special = Arc<dyn Fn(&Network, &Asked) -> Vec<Message> + Send + Sync>;

/// The broker, and the node behind it.
#[derive(Clone)]
struct Network {
    memory: Arc<Memory>,
    gate: Arc<Gate>,
    /// Answers by action, before the usual ones.
    special: Arc<Mutex<Vec<(String, Special)>>>,
}

impl Network {
    fn listen(&self) {
        // The memory must not own itself.
        let memory = Arc::downgrade(&self.memory);
        let (gate, special) = (self.gate.clone(), self.special.clone());
        self.memory.on_publish(move |published| {
            let Some(memory) = memory.upgrade() else { return Vec::new() };
            let network = Network { memory, gate: gate.clone(), special: special.clone() };
            let asked = Asked::sent(published);
            let special =
                special.lock().iter().find(|(action, _)| *action == asked.action()).cloned();
            match special {
                Some((_, answers)) => answers(&network, &asked),
                None if asked.action() == "gen25519" => {
                    vec![asked.reply(&key_answer(asked.nonce()))]
                }
                None => vec![asked.reply(&network.usual(&asked.action()))],
            }
        });
    }

    fn answers(
        &self,
        action: &str,
        answers: impl Fn(&Network, &Asked) -> Vec<Message> + Send + Sync + 'static,
    ) {
        self.special.lock().push((action.to_owned(), Arc::new(answers)));
    }

    /// Whoever works on the node gives it up when it is asked this, which it does not answer.
    fn gives_up_at(&self, action: &str) -> Unhurried {
        let (keep, given_up) = bounded(0);
        let keep: Mutex<Option<Sender<Never>>> = Mutex::new(Some(keep));
        self.answers(action, move |_, _| {
            drop(keep.lock().take());
            Vec::new()
        });
        Unhurried(given_up)
    }

    fn answer(&self, action: &str, body: &str) {
        let body = body.to_owned();
        self.answers(action, move |_, asked| vec![asked.reply(&body)]);
    }

    fn silence(&self, action: &str) {
        self.answers(action, |_, _| Vec::new());
    }

    fn context_gate(&self) -> &Gate {
        &self.gate
    }

    fn asked(&self) -> Vec<Asked> {
        self.memory.published().iter().map(Asked::sent).collect()
    }

    fn actions(&self) -> Vec<String> {
        self.asked().into_iter().map(|asked| asked.action()).collect()
    }

    /// What the node says to `action` when all is well.
    fn usual(&self, action: &str) -> String {
        let input = recorded_input();
        let data = match action {
            "inventory" => {
                let inventory = input["inventory"].as_str().unwrap();
                serde_json::from_str(inventory).unwrap()
            }
            "jwt" => return jwt_answer(""),
            "gencsr" => input["csr"].clone(),
            _ => json!({"message": "as you wish"}),
        };
        good(action, &data)
    }
}

fn identity() -> Identity {
    Identity::parse(NODE).unwrap()
}

fn jwt_answer(ecdh_public: &str) -> String {
    // The recorded one has a date, and we have a clock.
    let claims = r#"{"cht":"s3cret","chpd":true,"purpose":"choria_provisioning"}"#;
    let jwt = testing::rsa(r#"{"alg":"RS256"}"#, claims);
    good("jwt", &json!({"jwt": jwt, "ecdh_public": ecdh_public}))
}

/// The node's key, and its signature over `nonce`.
fn key_answer(nonce: &str) -> String {
    let key = testing::node();
    let data = json!({
        "public_key": hex(key.verifying_key().as_bytes()),
        "directory": "/etc/choria",
        "signature": hex(&key.sign(nonce.as_bytes()).to_bytes()),
    });
    good("gen25519", &data)
}

fn good(action: &str, data: &Value) -> String {
    json!({"action": action, "statuscode": 0, "statusmsg": "OK", "data": data}).to_string()
}

fn refusal(action: &str, code: u8, message: &str) -> String {
    json!({"action": action, "statuscode": code, "statusmsg": message, "data": {}}).to_string()
}

fn recorded_input() -> Value {
    serde_json::from_str(&testing::recorded("insecure/helper-input.json")).unwrap()
}

/// The body of the `configure` request that the original sent.
fn recorded_configure() -> String {
    let messages = testing::recorded("insecure/messages.jsonl");
    let published = messages.lines().map(|line| {
        let message: Value = serde_json::from_str(line).unwrap();
        let payload = message["payload"].as_str().unwrap().as_bytes().to_vec();
        let subject = message["subject"].as_str().unwrap().to_owned();
        Published { subject, reply: None, headers: Vec::new(), payload }
    });
    let mut requests = published.filter(|message| message.subject == SUBJECT);
    let configure = requests.find_map(|published| {
        let asked = Asked::read(&published);
        (asked.action() == "configure").then_some(asked)
    });
    configure.unwrap().body
}
