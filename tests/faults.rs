//! What can be wrong with a node, one by one: what becomes of it, what is counted, and what the log says.
//!
//! The nodes of a test share a broker and a daemon. Each is tried as often as its row says, since it announces itself and
//! the next discovery is far away; so the counters must be the sums over the rows, no more and no less.

mod common;
mod fleet;

use std::collections::BTreeMap;
use std::time::Duration;

use common::{Builder, Daemon, NatsServer, SOON, wait_until, within};
use fleet::issuer::Organization;
use fleet::{Action, Csr, Damage, Envelope, Fault, Fleet, Token, unix_now};

/// A node that falls silent in the middle has the time of all its tries.
const SILENT: Duration = Duration::from_secs(100);

#[test]
fn nodes_that_are_silent_late_or_gone() {
    let silent = "Could not provision NODE: no answer to the inventory request, asked twice";
    let jwt = "Could not provision NODE: could not fetch and validate JWT: NODE: the node's time was up, after 3 tries: no answer";
    let gone =
        "NODE was configured and did not answer restart: nobody listens on the node's subject";
    let configure = "Could not provision NODE: configuration failed: the node's time was up, after 3 tries: no answer";
    let crowd = Crowd::start(
        [
            // Nobody is there, or nobody says a word.
            case("gone", Fault::Gone)
                .ends("unreachable")
                .gives_up(Action::Inventory)
                .says("Could not provision NODE: no responders: nobody listens on the node's subject"),
            case("silent", Fault::Silent).ends("unreachable").gives_up(Action::Inventory).says(silent),
            // So it looks when a clock is off, and when an answer is too large for the broker.
            case("skewed", Fault::Skewed).ends("unreachable").gives_up(Action::Inventory).says(silent),
            case("huge", Fault::HugeInventory(2_000_000))
                .ends("unreachable")
                .gives_up(Action::Inventory)
                .says(silent),
            case("inventory", Fault::SilentFrom(Action::Inventory))
                .ends("unreachable")
                .gives_up(Action::Inventory)
                .says(silent),
            case("garbage", Fault::Envelope(Envelope::Garbage, None, false))
                .ends("failed")
                .gives_up(Action::Jwt)
                .says(jwt),
            case("base64", Fault::Envelope(Envelope::Base64, None, false))
                .ends("failed")
                .gives_up(Action::Jwt)
                .says(jwt),
            case("slowest", Fault::Slow(None, Duration::from_secs(30)))
                .ends("unreachable")
                .gives_up(Action::Inventory)
                .says(silent),
            // One request is not answered.
            case("jwt", Fault::SilentFrom(Action::Jwt)).ends("failed").gives_up(Action::Jwt).says(jwt),
            case("gencsr", Fault::SilentFrom(Action::GenCsr))
                .ends("failed")
                .gives_up(Action::GenCsr)
                .says("Could not provision NODE: could not fetch CSR: no answer, after 1 try"),
            case("configure", Fault::SilentFrom(Action::Configure))
                .ends("failed")
                .gives_up(Action::Configure)
                .says(configure),
            case("restart", Fault::SilentFrom(Action::Restart)).gives_up(Action::Restart).says(gone),
            case("lost", Fault::RestartLost).gives_up(Action::Restart).says(gone),
            // What is no answer of this node leaves it silent.
            case("forged", Fault::Envelope(Envelope::Sender, Some(Action::Jwt), false))
                .ends("failed")
                .gives_up(Action::Jwt)
                .says(jwt),
            case("hash", Fault::Envelope(Envelope::Hash, Some(Action::Jwt), false))
                .ends("failed")
                .gives_up(Action::Jwt)
                .says(jwt),
            case("id", Fault::Envelope(Envelope::Id, Some(Action::Jwt), false))
                .ends("failed")
                .gives_up(Action::Jwt)
                .says(jwt),
            // A late answer is not taken for one to a later try.
            case("late", Fault::Slow(Some(Action::Jwt), Duration::from_secs(23)))
                .ends("failed")
                .gives_up(Action::Jwt)
                .says(jwt),
            case("slow", Fault::Slow(Some(Action::GenCsr), Duration::from_secs(2))),
            // It disappears in the middle of a cycle.
            case("quiet", Fault::SilentAfter(Action::Inventory))
                .ends("failed")
                .gives_up(Action::Jwt)
                .says(jwt),
            case("off", Fault::GoneAfter(Action::Inventory))
                .ends("unreachable")
                .gives_up(Action::Jwt)
                .says("Could not provision NODE: could not fetch and validate JWT: NODE: nobody listens on the node's subject"),
            case("quiet-jwt", Fault::SilentAfter(Action::Jwt))
                .ends("failed")
                .gives_up(Action::GenCsr)
                .says("Could not provision NODE: could not fetch CSR: no answer, after 1 try"),
            case("quiet-gencsr", Fault::SilentAfter(Action::GenCsr))
                .ends("failed")
                .gives_up(Action::Configure)
                .says(configure),
            case("off-gencsr", Fault::GoneAfter(Action::GenCsr))
                .ends("unreachable")
                .gives_up(Action::Configure)
                .says("Could not provision NODE: configuration failed: nobody listens on the node's subject"),
            // Once configured it has all it needs.
            case("quiet-configure", Fault::SilentAfter(Action::Configure))
                .gives_up(Action::Restart)
                .says("NODE was configured and did not answer restart: no answer, after 3 tries"),
            case("quiet-restart", Fault::SilentAfter(Action::Restart)),
            case("off-restart", Fault::GoneAfter(Action::Restart)),
            case("restarted", Fault::GoneAfter(Action::Configure)).gives_up(Action::Restart).says(gone),
        ],
        fleet::Builder::pki,
        |daemon| daemon.feature("pki", "true"),
    );
    let (_fleet, daemon) = crowd.judge(SILENT);
    for kind in ["hash", "other_sender"] {
        assert_eq!(unexpected(&daemon, kind), 3.0, "{kind}, one for each try");
    }
    assert!(unexpected(&daemon, "late") >= 1.0);
}

#[test]
fn nodes_that_answer_wrongly_or_refuse() {
    let jwt = "Could not provision NODE: could not fetch and validate JWT: NODE: ";
    let invalid = "Could not provision NODE: could not validate JWT: NODE: ";
    let gone =
        "NODE was configured and did not answer restart: nobody listens on the node's subject";
    let contradicted = "two different answers to one request for choria_provision#jwt: another machine has this name, or somebody forges";
    let unusable = |name, action, reason| {
        let fault = Fault::Data(action, None, Damage::Null);
        case(name, fault).ends("failed").gives_up(action).says(reason)
    };
    let cases = [
        // Second answers.
        case("twice", Fault::Twice),
        case("forger", Fault::Envelope(Envelope::Sender, Some(Action::Jwt), true)),
        case("hasher", Fault::Envelope(Envelope::Hash, Some(Action::Jwt), true)),
        case("another", Fault::TwoAnswers(Action::Jwt)).ends("refused").says(contradicted),
        // Bodies that are no reply, and replies whose data is not what it should be.
        case("body", Fault::Envelope(Envelope::Body, Some(Action::Jwt), false))
            .ends("failed")
            .gives_up(Action::Jwt)
            .says(jwt)
            .says("unusable answer, after 3 tries: body is no RPC reply"),
        case("body-configure", Fault::Envelope(Envelope::Body, Some(Action::Configure), false))
            .ends("failed")
            .gives_up(Action::Configure)
            .says("Could not provision NODE: configuration failed: unusable answer, after 5 tries: body is no RPC reply"),
        case("body-restart", Fault::Envelope(Envelope::Body, Some(Action::Restart), false))
            .gives_up(Action::Restart)
            .says(gone),
        unusable("null-inventory", Action::Inventory, "could not retrieve inventory: unusable answer, after 5 tries: data is missing"),
        unusable("null-jwt", Action::Jwt, "unusable answer, after 3 tries: data is missing"),
        unusable("null-gencsr", Action::GenCsr, "could not fetch CSR: unusable answer, after 1 try: data is missing"),
        unusable("null-configure", Action::Configure, "configuration failed: unusable answer, after 5 tries: data is missing"),
        case("version", Fault::Data(Action::Inventory, Some("version"), Damage::Number))
            .ends("failed")
            .gives_up(Action::Inventory)
            .says("malformed outputs: invalid type: integer `7`, expected a string"),
        case("upgradable", Fault::Data(Action::Inventory, Some("upgradable"), Damage::Boolean))
            .ends("failed")
            .gives_up(Action::Inventory)
            .says("expected a boolean"),
        case("number-jwt", Fault::Data(Action::Jwt, Some("jwt"), Damage::Number))
            .ends("failed")
            .gives_up(Action::Jwt)
            .says(jwt)
            .says("malformed outputs: invalid type: integer `7`, expected a string"),
        case("list-jwt", Fault::Data(Action::Jwt, Some("ecdh_public"), Damage::List))
            .ends("failed")
            .gives_up(Action::Jwt)
            .says("malformed outputs: invalid type: sequence, expected a string"),
        case("number-configure", Fault::Data(Action::Configure, Some("message"), Damage::Number))
            .ends("failed")
            .gives_up(Action::Configure)
            .says("configuration failed: unusable answer, after 5 tries: malformed outputs"),
        case("number-restart", Fault::Data(Action::Restart, Some("message"), Damage::Number))
            .gives_up(Action::Restart)
            .says(gone),
        // The message is for people only.
        case("mute-configure", Fault::Data(Action::Configure, Some("message"), Damage::Missing)),
        case("mute-restart", Fault::Data(Action::Restart, Some("message"), Damage::Missing)),
        case("unwanted-mute", Fault::Data(Action::Shutdown, Some("message"), Damage::Missing))
            .ends("shutdown"),
        case("unwanted-stays", Fault::Status(Action::Shutdown, 1))
            .ends("shutdown")
            .gives_up(Action::Shutdown)
            .says("NODE did not shut down: refused with status 1: practice fault"),
        // Certificate requests.
        case("no-pem", Fault::Csr(Csr::NotPem)).ends("refused").says("could not parse CSR: no PEM block found"),
        case("no-der", Fault::Csr(Csr::NotDer)).ends("refused").says("could not parse CSR: its structure"),
        case("no-csr", Fault::Csr(Csr::Empty)).ends("refused").says("Could not provision NODE: no CSR received"),
        case("other-cn", Fault::Csr(Csr::OtherCn))
            .ends("refused")
            .says("common name other.example.net does not match identity NODE"),
        case("denied", Fault::Csr(Csr::DeniedDns))
            .ends("refused")
            .says("admin.privileged.mcollective matches denied certificate pattern"),
        case("denied-email", Fault::Csr(Csr::DeniedEmail))
            .ends("refused")
            .says("admin.privileged.mcollective matches denied certificate pattern"),
        case("unsigned", Fault::Csr(Csr::BrokenSignature))
            .ends("refused")
            .says("CSR is not signed by its own key"),
        // Refusals. Those that another try will not change get none.
        case("token", Fault::WrongToken)
            .ends("wrong_token")
            .gives_up(Action::Jwt)
            .says(jwt)
            .says("Incorrect provision token supplied (1 try)")
            .says("Nodes do not know our provisioning token"),
        case("locked", Fault::Locked)
            .ends("busy")
            .gives_up(Action::Jwt)
            .says("Could not obtain provisioning lock (1 try)"),
        case("not-provisioning", Fault::NotProvisioning)
            .ends("not_provisioning")
            .gives_up(Action::Jwt)
            .says("Cannot reconfigure a server that is not in provisioning mode (1 try)"),
        case("status-2", Fault::Status(Action::Jwt, 2))
            .ends("failed")
            .gives_up(Action::Jwt)
            .says("refused with status 2: practice fault with status 2 (1 try)"),
        case("status-3", Fault::Status(Action::Jwt, 3))
            .ends("failed")
            .gives_up(Action::Jwt)
            .says("refused with status 3: practice fault with status 3 (3 tries)"),
        case("status-4", Fault::Status(Action::Jwt, 4))
            .ends("failed")
            .gives_up(Action::Jwt)
            .says("refused with status 4: practice fault with status 4 (1 try)"),
        case("status-5", Fault::Status(Action::Jwt, 5))
            .ends("failed")
            .gives_up(Action::Jwt)
            .says("refused with status 5: practice fault with status 5 (3 tries)"),
        case("full-disk", Fault::ConfigureRefused)
            .ends("failed")
            .gives_up(Action::Configure)
            .says("configuration failed: refused with status 1: Could not write config: ")
            .says("no space left on device (5 tries)"),
        // Provisioning JWTs.
        case("foreign", Fault::Token(Token::Foreign))
            .ends("refused")
            .says(invalid)
            .says("token signature is invalid: crypto/rsa: verification error"),
        case("expired", Fault::Token(Token::Expired))
            .ends("refused")
            .says(invalid)
            .says("token has invalid claims: token is expired"),
        case("purpose", Fault::Token(Token::Purpose))
            .ends("refused")
            .says(invalid)
            .says("not a provisioning token"),
        case("no-jwt", Fault::Token(Token::Empty)).ends("refused").says(invalid).says("no JWT received"),
        case("garbage", Fault::Token(Token::Garbage))
            .ends("refused")
            .says(invalid)
            .says("token is malformed"),
        case("newline", Fault::Token(Token::Newline)),
        // Restarts in the middle of a cycle, and after its end.
        case("reboots", Fault::RebootsAfter(Action::Jwt)),
        case("reboots-late", Fault::RebootsAfter(Action::Configure)).gives_up(Action::Restart).says(gone),
        case("returns", Fault::Returns(1)).ends("provisioned").ends("provisioned").says(
            "NODE came back unprovisioned after it was configured: does its configuration set plugin.choria.server.provision to 0?",
        ),
        // Large, deep and loud ones.
        case("large", Fault::HugeInventory(300_000)),
        case("nested", Fault::DeepInventory(50)),
        case("deep", Fault::DeepInventory(100_000))
            .ends("failed")
            .gives_up(Action::Inventory)
            .says("inventory is nested too deeply"),
        case("storm", Fault::EventStorm(500)),
        // Nothing is wrong with these.
        case("broken-helper", HEALTHY)
            .ends("helper_failed")
            .says("could not invoke configure helper: ")
            .says("zero bytes received (exit status 3")
            .says("no database"),
        case("later", HEALTHY).ends("deferred").says("Deferred NODE: configuration defered: the rack is not ready"),
    ];
    let nodes = cases.len() as f64;
    let crowd = Crowd::start(cases, fleet::Builder::pki, |daemon| daemon.feature("pki", "true"));
    let (_fleet, daemon) = crowd.judge(SILENT);

    let metrics = daemon.metrics();
    // The storm was one node; one came back.
    assert_eq!(metrics.sum("event_discovered"), nodes + 1.0);
    let added = daemon.log().matches("Adding storm.fleet.example.net to the work queue").count();
    assert_eq!(added, 1);
    assert_eq!(metrics.sum("returns_total"), 1.0);
    assert_eq!(metrics.sum("helper_shutdown_requests"), 1.0, "one of two did as it was told");
    for kind in ["duplicate", "hash", "other_sender"] {
        assert!(unexpected(&daemon, kind) >= 1.0, "{kind}");
    }
}

#[test]
fn two_nodes_of_one_name() {
    let twin = || case("twin", HEALTHY);
    let crowd = Crowd::start_quietly(
        [twin().ends("refused").says("Could not provision NODE: ").says(
            "two different answers to one request for choria_provision#jwt: another machine has this name, or somebody forges",
        )],
        fleet::Builder::pki,
        // The slower one must have had its say.
        |daemon| daemon.feature("pki", "true").set("contradiction_wait", "5s"),
    );
    let other =
        Fleet::builder(&crowd.broker.url()).pki().node(&twin().name).announce(false).start();
    crowd.fleet.announce();
    let (fleet, daemon) = crowd.judge(SOON);
    assert_eq!(daemon.metric("event_discovered"), 1.0);
    for node in [fleet.node(0), other.node(0)] {
        assert_eq!(node.times_configured(), 0, "{}", node.describe());
    }
}

#[test]
fn nodes_that_do_not_prove_their_key() {
    let organization = Organization::new();
    let signer = organization.chain_issuer(unix_now());
    let unproved =
        "Could not provision NODE: could not fetch ed25519 public key: invalid nonce signature";
    let length = "Could not provision NODE: could not fetch ed25519 public key: unusable answer, after 5 tries: public_key is not the right number of hexadecimal digits";
    let crowd = Crowd::start(
        [
            case("nonce", Fault::NonceSignature).ends("refused").says(unproved),
            case("weak", Fault::WeakKey).ends("refused").says(unproved),
            case("short", Fault::ShortKey).ends("failed").gives_up(Action::Gen25519).says(length),
            case("31", Fault::KeyLength(31)).ends("failed").gives_up(Action::Gen25519).says(length),
            case("33", Fault::KeyLength(33)).ends("failed").gives_up(Action::Gen25519).says(length),
            case("number", Fault::Data(Action::Gen25519, Some("signature"), Damage::Number))
                .ends("failed")
                .gives_up(Action::Gen25519)
                .says("malformed outputs: invalid type: integer `7`, expected a string"),
            case("reboots", Fault::RebootsAfter(Action::Gen25519)),
            case("healthy", HEALTHY),
        ],
        |fleet| fleet.organization(&organization),
        |daemon| {
            let write = |name: &str, text: &str| {
                let path = daemon.dir().join(name);
                std::fs::write(&path, text).expect("the daemon's folder is writable");
                path.display().to_string()
            };
            let (key, token) = (write("seed", &signer.seed), write("token", &signer.token));
            daemon
                .feature("ed25519", "true")
                .set("jwt_verify_cert", organization.public_key())
                .set("jwt_signing_key", key)
                .set("jwt_signing_token", token)
        },
    );
    crowd.judge(SOON);
}

#[test]
fn nodes_that_are_wrong_about_updates() {
    let crowd = Crowd::start(
        [
            case("healthy", HEALTHY)
                .ends("upgrade_sent")
                .ends("provisioned")
                .says("Provisioned NODE: it updates itself to 0.30.2"),
            // It is back while its answer is waited for.
            case("early", Fault::SlowUpdate(Duration::from_secs(1)))
                .ends("upgrade_sent")
                .ends("provisioned")
                .gives_up(Action::ReleaseUpdate)
                .says("NODE did not answer release_update and may be at it: no answer, after 1 try"),
            // Longer than its answer is waited for.
            case("slow", Fault::SlowUpdate(Duration::from_secs(22)))
                .ends("upgrade_sent")
                .ends("provisioned")
                .gives_up(Action::ReleaseUpdate)
                .says("NODE did not answer release_update and may be at it: no answer, after 1 try"),
            case("mute", Fault::Data(Action::ReleaseUpdate, Some("message"), Damage::Missing))
                .ends("upgrade_sent")
                .ends("provisioned"),
            // It updates itself all the same, and is taken again when it is back.
            case("number", Fault::Data(Action::ReleaseUpdate, Some("message"), Damage::Number))
                .ends("failed")
                .ends("provisioned")
                .gives_up(Action::ReleaseUpdate)
                .says("Could not provision NODE: update to 0.30.2 failed: unusable answer, after 1 try: malformed outputs"),
            case("refuses", Fault::Status(Action::ReleaseUpdate, 1))
                .ends("failed")
                .gives_up(Action::ReleaseUpdate)
                .says("Could not provision NODE: update to 0.30.2 failed: refused with status 1: practice fault with status 1 (1 try)"),
        ],
        |fleet| fleet.upgradable().version("0.29.4"),
        |daemon| {
            let repository = "https://repo.example.net/choria";
            daemon.feature("upgrades", "true").set("upgrades_repository", repository)
        },
    );
    let (fleet, _) = crowd.judge(SILENT);
    for name in ["early.fleet.example.net", "slow.fleet.example.net"] {
        let node = fleet.named(name);
        assert_eq!(node.version(), "0.30.2");
        assert_eq!(node.times_asked(Action::ReleaseUpdate), 1, "{}", node.describe());
        assert_eq!(node.times_configured(), 1, "{}", node.describe());
    }
}

#[test]
fn events_that_announce_no_node() {
    let broker = NatsServer::start();
    let daemon = Daemon::builder(&broker.address()).start();
    daemon.wait_ready();
    let fleet = Fleet::builder(&broker.url()).nodes(1).announce(false).start();
    let subject = "choria.lifecycle.event.startup.provision_mode_server";
    let protocol = r#"{"protocol":"io.choria.lifecycle.v1."#;
    for (kind, event, reason) in [
        ("malformed", "{".to_owned(), "could not handle message: "),
        ("malformed", format!("{protocol}nonsense\"}}"), "could not handle message: "),
        (
            "identity",
            format!(
                "{protocol}startup\",\"id\":\"x\",\"identity\":\"a b\",\"component\":\"provision_mode_server\",\"timestamp\":1}}"
            ),
            r#"event of \"a b\": "#,
        ),
    ] {
        let label = format!("kind=\"{kind}\"");
        let count = || daemon.metrics().with("events_ignored_total", &label);
        let before = count();
        // One line a second is enough for all of them, so it takes as many as it takes.
        wait_until(SOON, reason, || {
            fleet.publish(subject, event.as_bytes());
            fleet.settle();
            count() > before && daemon.logged(&["Ignoring an event: ", reason])
        });
    }
    assert!(daemon.metric("invalid_identities_total") >= 1.0);
    // One of another kind is no fault of anybody.
    let shutdown = format!(
        "{protocol}shutdown\",\"id\":\"x\",\"identity\":\"n9.fleet.example.net\",\"component\":\"provision_mode_server\",\"timestamp\":1}}"
    );
    fleet.publish(subject, shutdown.as_bytes());
    fleet.settle();
    wait_until(SOON, "it is counted", || {
        daemon.metrics().with("events_ignored_total", "kind=\"kind\"") == 1.0
    });
    assert_eq!(daemon.metric("event_discovered"), 0.0);
    assert!(!daemon.logged(&["n9.fleet.example.net"]));
    fleet.wait_all_provisioned(within(SOON)).expect("discovery finds the one that is there");
}

#[test]
fn odd_facts_reach_the_helper_as_they_are() {
    let broker = NatsServer::start();
    let many: String = (0..20_000).map(|at| format!(r#""k{at}":{at},"#)).collect();
    let odd = r#""big":12345678901234567890123,"small":-0.000000000000000000001,"text":"é\u2028<b>&\"\\\u0000""#;
    let fleet = Fleet::builder(&broker.url()).facts(&format!("{{{many}{odd}}}")).nodes(1).start();
    let daemon = Daemon::builder(&broker.address()).helper(
        "#!/bin/sh\ncat >\"${0%/*}/input\"\necho '{\"configuration\":{\"plugin.choria.server.provision\":\"0\"}}'\n",
    );
    let daemon = daemon.start();
    fleet.wait_all_provisioned(within(SOON)).expect("odd is no fault");
    let input = std::fs::read_to_string(daemon.dir().join("input")).expect("the helper kept it");
    let input: serde_json::Value = serde_json::from_str(&input).expect("JSON");
    let inventory = input["inventory"].as_str().expect("a text");
    for digits in ["\"big\":12345678901234567890123,", "\"small\":-0.000000000000000000001,"] {
        assert!(inventory.contains(digits), "{digits}");
    }
    let inventory: serde_json::Value = serde_json::from_str(inventory).expect("JSON in a text");
    let facts = inventory["facts"].as_object().expect("an object");
    assert_eq!(facts.len(), 20_003);
    assert_eq!(facts["text"], "é\u{2028}<b>&\"\\\u{0}");
    wait_until(SOON, "it is counted", || daemon.metric("provisioned") == 1.0);
    assert_eq!(daemon.metric("provision_errors"), 0.0);
}

/// Decides by the name; it uses nothing but the shell.
const HELPER: &str = r#"#!/bin/sh
IFS= read -r input
identity=${input#*'"identity":"'}
identity=${identity%%'"'*}
case $identity in
unwanted-*) echo '{"shutdown":true,"msg":"not one of ours"}' ;;
later.*) echo '{"defer":true,"msg":"the rack is not ready"}' ;;
broken-*) echo 'no database' >&2; exit 3 ;;
*) echo '{"upgrade":"0.30.2","configuration":{"plugin.choria.server.provision":"0"}}' ;;
esac
"#;

/// Announces itself once, as every node does.
const HEALTHY: Fault = Fault::EventStorm(1);

/// What becomes of attempts, and whether it counts as provisioned or as an error.
const OUTCOMES: [(&str, bool, bool); 14] = [
    ("provisioned", true, false),
    ("upgrade_sent", true, false),
    ("shutdown", true, false),
    ("deferred", false, false),
    ("busy", false, false),
    ("not_provisioning", false, false),
    ("stale", false, false),
    ("upgrade_stuck", false, true),
    ("helper_failed", false, true),
    ("wrong_token", false, true),
    ("misconfigured", false, true),
    ("unreachable", false, true),
    ("refused", false, true),
    ("failed", false, true),
];

fn unexpected(daemon: &Daemon, kind: &str) -> f64 {
    daemon.metrics().with("unexpected_replies_total", &format!("kind=\"{kind}\""))
}

/// One node, and what must become of it.
struct Case {
    name: String,
    fault: Fault,
    /// One for each attempt.
    outcomes: Vec<&'static str>,
    given_up: Option<Action>,
    /// Each is in a line about the node.
    said: Vec<String>,
}

/// A node with a fault that is provisioned all the same, at once and without a word, unless more is said.
fn case(name: &str, fault: Fault) -> Case {
    let name = format!("{name}.fleet.example.net");
    Case { name, fault, outcomes: Vec::new(), given_up: None, said: Vec::new() }
}

impl Case {
    /// How an attempt ends.
    fn ends(mut self, outcome: &'static str) -> Case {
        self.outcomes.push(outcome);
        self
    }

    /// The request that was made in vain.
    fn gives_up(mut self, action: Action) -> Case {
        self.given_up = Some(action);
        self
    }

    /// What the log says; `NODE` stands for the name.
    fn says(mut self, part: &str) -> Case {
        self.said.push(part.replace("NODE", &self.name));
        self
    }

    fn outcomes(&self) -> &[&'static str] {
        if self.outcomes.is_empty() { &["provisioned"] } else { &self.outcomes }
    }

    /// The lines with which its attempts end.
    fn ends_in<'l>(&self, log: &'l str) -> Vec<&'l str> {
        let is_end = |line: &&str| {
            ["Provisioned", "Could not provision", "Deferred"].iter().any(|word| {
                let begin = format!("\"msg\":\"{word} {}", self.name);
                line.split_once(&begin).is_some_and(|(_, rest)| rest.starts_with(['"', ':']))
            })
        };
        log.lines().filter(is_end).collect()
    }

    /// What is not as it should be in the log.
    fn fault_of(&self, log: &str) -> Option<String> {
        let (name, fault, ends) = (&self.name, &self.fault, self.ends_in(log));
        if ends.len() != self.outcomes().len() {
            return Some(format!(
                "{name} ({fault}): {} was expected: {ends:#?}",
                self.outcomes().join(", ")
            ));
        }
        let is_said =
            |part: &&String| log.lines().any(|line| line.contains(name) && line.contains(*part));
        let missing = self.said.iter().find(|part| !is_said(part))?;
        Some(format!("{name} ({fault}): {missing:?} is not in the log: {ends:#?}"))
    }
}

/// The nodes of a table, their broker and their daemon.
struct Crowd {
    cases: Vec<Case>,
    fleet: Fleet,
    daemon: Daemon,
    broker: NatsServer,
}

impl Crowd {
    fn start(
        cases: impl IntoIterator<Item = Case>,
        nodes: impl FnOnce(fleet::Builder) -> fleet::Builder,
        daemon: impl FnOnce(Builder) -> Builder,
    ) -> Crowd {
        let crowd = Crowd::start_quietly(cases, nodes, daemon);
        crowd.fleet.announce();
        crowd
    }

    fn start_quietly(
        cases: impl IntoIterator<Item = Case>,
        nodes: impl FnOnce(fleet::Builder) -> fleet::Builder,
        daemon: impl FnOnce(Builder) -> Builder,
    ) -> Crowd {
        let cases: Vec<Case> = cases.into_iter().collect();
        let broker = NatsServer::start();
        let builder = Daemon::builder(&broker.address())
            .set("workers", 64)
            .set("interval", "10m")
            .set("helper_timeout", "1s")
            .set("node_timeout", "61s")
            .choria("discovery_timeout", "1")
            .helper(HELPER);
        let daemon = daemon(builder).start();
        // From now on it hears events, and has asked all that are there.
        daemon.wait_ready();
        // An event within 2 s of a restart's answer would be taken for an older one that comes late.
        let nodes =
            nodes(Fleet::builder(&broker.url())).restart_delay(Duration::from_millis(2_500));
        let add = |fleet: fleet::Builder, case: &Case| fleet.broken(&case.name, case.fault.clone());
        let fleet = cases.iter().fold(nodes, add).start_quietly();
        Crowd { cases, fleet, daemon, broker }
    }

    /// Waits until all attempts have ended; then each line and each counter must be there, and no other.
    #[track_caller]
    fn judge(mut self, patience: Duration) -> (Fleet, Daemon) {
        let is_over = |log: &str| {
            self.cases.iter().all(|case| case.ends_in(log).len() >= case.outcomes().len())
        };
        let deadline = within(patience);
        while !is_over(&self.daemon.log()) && std::time::Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(100));
        }
        self.daemon.assert_alive();
        let log = self.daemon.log();
        let faults: Vec<String> =
            self.cases.iter().filter_map(|case| case.fault_of(&log)).collect();
        assert!(faults.is_empty(), "{}", faults.join("\n"));

        let mut expected: BTreeMap<String, f64> = BTreeMap::new();
        let mut add =
            |series: String, count: usize| *expected.entry(series).or_default() += count as f64;
        for (outcome, is_provisioned, is_error) in OUTCOMES {
            let ends = self.cases.iter().flat_map(Case::outcomes);
            let count = ends.filter(|end| **end == outcome).count();
            add(format!("outcomes_total {outcome}"), count);
            add("provisioned ".to_owned(), count * usize::from(is_provisioned));
            add("provision_errors ".to_owned(), count * usize::from(is_error));
            add("helper_errors ".to_owned(), count * usize::from(outcome == "helper_failed"));
        }
        for action in Action::ALL {
            let count = self.cases.iter().filter(|case| case.given_up == Some(action)).count();
            add(format!("rpc_errors {}#{}", action.agent(), action.name()), count);
        }
        let counted = || -> BTreeMap<String, f64> {
            let metrics = self.daemon.metrics();
            let value = |series: &String| {
                let (name, label) = series.split_once(' ').expect("a name and a label");
                let label = if label.is_empty() { String::new() } else { format!("=\"{label}\"") };
                metrics.with(name, &label)
            };
            expected.keys().map(|series| (series.clone(), value(series))).collect()
        };
        // What is in the log is counted in a moment.
        let deadline = within(SOON);
        while counted() != expected && std::time::Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(20));
        }
        assert_eq!(counted(), expected);
        assert_eq!(self.fleet.violations(), [""; 0]);
        (self.fleet, self.daemon)
    }
}
