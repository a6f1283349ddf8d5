//! Nodes that lie, stammer, shout or forge: the daemon lives, and the good node beside each is served.
//!
//! Many hostile nodes share one broker and one daemon, since waiting is most of what a test of them does.

mod common;
mod fleet;

use std::time::{Duration, Instant};

use common::{Daemon, NatsServer, SOON, within};
use fleet::{Action, Csr, Envelope, Expected, Fault, Fleet, Token};

/// The steps of a cycle with the features `jwt` and `pki`.
const STEPS: [Action; 5] =
    [Action::Inventory, Action::Jwt, Action::GenCsr, Action::Configure, Action::Restart];

#[test]
fn survives_every_spoiled_field_of_every_reply() {
    let mut faults: Vec<Fault> = STEPS.into_iter().flat_map(Fault::every_damage).collect();
    for action in STEPS {
        faults.extend([1, 2, 3, 4, 5, 200, 256, 70_000].map(|code| Fault::Status(action, code)));
        let bodies = [Envelope::Body, Envelope::HalfBody, Envelope::ListBody];
        faults.extend(bodies.map(|body| Fault::Envelope(body, Some(action), false)));
    }
    let csrs = [
        Csr::OtherCn,
        Csr::DeniedDns,
        Csr::DeniedEmail,
        Csr::NotPem,
        Csr::NotDer,
        Csr::Empty,
        Csr::BrokenSignature,
    ];
    faults.extend(csrs.map(Fault::Csr));
    let tokens = [
        Token::Foreign,
        Token::Expired,
        Token::Purpose,
        Token::Empty,
        Token::Garbage,
        Token::Newline,
    ];
    faults.extend(tokens.map(Fault::Token));
    faults.extend([
        Fault::Locked,
        Fault::WrongToken,
        Fault::NotProvisioning,
        Fault::ConfigureRefused,
    ]);
    // Each failing node is tried up to five times, with pauses: more workers, less waiting.
    Crowd::start(faults, |daemon| daemon.set("workers", 48)).judge(Duration::from_secs(90));
}

#[test]
fn survives_forged_late_and_doubled_answers() {
    let mut faults = vec![Fault::Twice, Fault::Silent, Fault::Skewed, Fault::Gone];
    let forgeries =
        [Envelope::Hash, Envelope::Sender, Envelope::Id, Envelope::Garbage, Envelope::Base64];
    for forgery in forgeries {
        // It must not hide the right one.
        faults.push(Fault::Envelope(forgery, None, true));
        faults.push(Fault::Envelope(forgery, Some(Action::Configure), true));
    }
    faults.extend(STEPS.map(Fault::TwoAnswers));
    for action in [Action::Inventory, Action::Jwt, Action::GenCsr, Action::Configure] {
        faults.push(Fault::RebootsAfter(action));
    }
    // Later than the probe's patience, and than that after which others go first.
    faults.push(Fault::Slow(Some(Action::Inventory), Duration::from_secs(2)));
    faults.push(Fault::Slow(Some(Action::Jwt), Duration::from_secs(4)));
    faults.extend([Fault::RestartLost, Fault::Returns(1)]);
    Crowd::start(faults, |daemon| daemon).judge(Duration::from_secs(60));
}

#[test]
fn survives_huge_and_deep_inventories() {
    let faults = vec![
        Fault::HugeInventory(300_000),
        Fault::HugeInventory(2_000_000),
        Fault::DeepInventory(50),
        Fault::DeepInventory(1_000),
        Fault::DeepInventory(100_000),
    ];
    let crowd = Crowd::start(faults, |daemon| daemon);
    crowd
        .fleet
        .wait_provisioned(crowd.good() + 2, within(SOON))
        .expect("large and nested is no crime");
    let large = crowd.fleet.iter().find(|node| node.fault() == Some(Fault::HugeInventory(300_000)));
    assert!(large.is_some_and(|node| node.is_provisioned()), "300 kB fit into a message");
    assert!(crowd.fleet.too_large() > 0, "2 MB do not");
    crowd.judge(SOON);
}

#[test]
fn refuses_bad_identities_in_discovery_and_events() {
    let long = "a.".repeat(5_000) + "a";
    let bad = [
        "",
        " ",
        "*",
        ">",
        "a.*.b",
        "a.>",
        ".a",
        "a.",
        "a..b",
        "a b",
        "a\tb",
        "a\r\nPUB x 0\r\n",
        "a\u{0}b",
        "a\u{7f}",
        "a\u{a0}b",
        "a\u{2028}b",
        &long,
    ];
    let broker = NatsServer::start();
    let mut builder = Fleet::builder(&broker.url()).nodes(3);
    for (at, identity) in bad.iter().enumerate() {
        let name = format!("liar-{at}.example.net");
        builder = builder.broken(&name, Fault::DiscoveredAs((*identity).to_owned()));
    }
    // The liars are good nodes otherwise, so only the answers to discovery are wrong.
    let fleet = builder.announce(false).start();
    let mut daemon = Daemon::builder(&broker.address()).start();
    fleet.wait_provisioned(3, within(SOON)).expect("the good ones are provisioned");
    let refused = wait_refused(&daemon, bad.len() as f64);

    fleet.announce_identities(bad);
    let subject = "choria.lifecycle.event.startup.provision_mode_server";
    let deep = format!("{{\"data\":{}{}}}", "[".repeat(200_000), "]".repeat(200_000));
    let wrong = [
        "",
        "{",
        "null",
        "[]",
        "\u{0}",
        r#"{"protocol":"io.choria.lifecycle.v1.startup"}"#,
        r#"{"protocol":"io.choria.lifecycle.v1.startup","identity":7,"id":"x","component":"y","timestamp":1}"#,
        r#"{"protocol":"io.choria.lifecycle.v1.startup","identity":"t.example.net","id":"x","component":"y","timestamp":"now"}"#,
        r#"{"protocol":"io.choria.lifecycle.v9.startup","identity":"v.example.net"}"#,
        r#"{"protocol":"io.choria.lifecycle.v1.nonsense","identity":"n.example.net"}"#,
        r#"{"protocol":"choria:lifecycle:startup:1","identity":"o.example.net"}"#,
        r#"{"specversion":"1.0","source":"io.choria.lifecycle"}"#,
        r#"{"specversion":"1.0","source":"io.choria.lifecycle","data":null}"#,
        r#"{"specversion":"1.0","source":"io.choria.lifecycle","data":"text"}"#,
        &deep,
    ];
    for event in wrong {
        fleet.publish(subject, event.as_bytes());
    }
    fleet.publish(subject, &[0xff; 500_000]);
    // An event of another kind on this subject concerns nobody.
    let shutdown = r#"{"protocol":"io.choria.lifecycle.v1.shutdown","id":"x","identity":"s.example.net","component":"provision_mode_server","timestamp":1}"#;
    fleet.publish(subject, shutdown.as_bytes());
    fleet.settle();
    // An empty identity may be counted as an ignored event or as an invalid identity.
    wait_refused(&daemon, refused + bad.len() as f64 - 1.0);

    let after = Fleet::builder(&broker.url()).node("after.example.net").start();
    after
        .wait_all_provisioned(within(SOON))
        .expect("a node that comes after all that is provisioned");
    for name in ["liar-2.", "s.example.net", "t.example.net", "v.example.net", "o.example.net"] {
        assert!(!daemon.logged(&[&format!("Provisioned {name}")]), "{name} was provisioned");
    }
    assert_eq!(fleet.violations(), [""; 0]);
    daemon.assert_alive();
}

/// Waits until this many identities were refused; how many there were then.
#[track_caller]
fn wait_refused(daemon: &Daemon, count: f64) -> f64 {
    let mut seen = 0.0;
    common::wait_until(SOON, "bad identities are refused and counted", || {
        seen = daemon.metric("invalid_identities_total");
        seen >= count
    });
    seen
}

#[test]
fn an_event_storm_of_one_node_is_one_node() {
    let broker = NatsServer::start();
    let mut daemon = Daemon::builder(&broker.address()).start();
    daemon.wait_ready();
    let fleet = Fleet::builder(&broker.url())
        .nodes(1)
        .broken("storm.example.net", Fault::EventStorm(5_000))
        .start();
    fleet.wait_all_provisioned(within(SOON)).expect("provisioned");
    assert_eq!(fleet.named("storm.example.net").times_configured(), 1);
    daemon.assert_alive();
    assert!(daemon.stop().success());
}

/// Hostile nodes with a good one beside each, one broker, one daemon.
struct Crowd {
    fleet: Fleet,
    daemon: Daemon,
    _broker: NatsServer,
}

impl Crowd {
    fn start(faults: Vec<Fault>, more: impl FnOnce(common::Builder) -> common::Builder) -> Crowd {
        let broker = NatsServer::start();
        let mut builder = Fleet::builder(&broker.url()).pki();
        for (at, fault) in faults.into_iter().enumerate() {
            let name = format!("bad-{at}.example.net");
            builder = builder.node(&format!("good-{at}.example.net")).broken(&name, fault);
        }
        let fleet = builder.start_quietly();
        let daemon = Daemon::builder(&broker.address())
            .feature("pki", "true")
            .set("workers", "16")
            .set("drain_timeout", "1s")
            .set("probe_timeout", "300ms");
        let daemon = more(daemon).start();
        // Those that are gone or silent are known by their startup events alone.
        daemon.wait_ready();
        fleet.announce();
        Crowd { fleet, daemon, _broker: broker }
    }

    fn good(&self) -> usize {
        self.fleet.iter().filter(|node| node.fault().is_none()).count()
    }

    /// The good are served while the bad are still being dealt with; each bad one ends with a reason.
    fn judge(mut self, patience: Duration) {
        let begun = Instant::now();
        let fleet = &self.fleet;
        let served = fleet.wait(within(Duration::from_secs(40)), |fleet| {
            let missing =
                fleet.iter().find(|node| node.fault().is_none() && !node.is_provisioned());
            missing.map_or(Ok(()), |node| Err(node.describe()))
        });
        self.daemon.assert_alive();
        served.expect("each good node is provisioned");
        fleet.wait_all_provisioned(within(patience)).expect("and so is each that only seems bad");
        for node in fleet.iter().filter(|node| node.fault().is_none()) {
            assert_eq!(node.times_configured(), 1, "{}", node.describe());
        }
        let broken = || fleet.iter().filter(|node| node.expected() == Expected::Broken);
        let mut unexplained: Vec<String>;
        loop {
            let log = self.daemon.log();
            let without_reason = broken().filter(|node| {
                let reason = format!("Could not provision {}: ", node.identity());
                !log.contains(&reason)
            });
            unexplained = without_reason.map(|node| node.describe()).collect();
            if unexplained.is_empty() || begun.elapsed() > patience {
                break;
            }
            std::thread::sleep(Duration::from_millis(200));
        }
        assert_eq!(unexplained, [""; 0], "no reason in the log");
        let served: Vec<String> =
            broken().filter(|node| node.is_provisioned()).map(|node| node.describe()).collect();
        assert_eq!(served, [""; 0], "provisioned in spite of their faults");
        assert_eq!(fleet.violations(), [""; 0]);
        self.daemon.assert_alive();
        // Some are still being tried, so the end may come by the drain's limit; but it comes by itself.
        let status = self.daemon.stop();
        assert!(status.code().is_some(), "{status}: {}", common::tail(&self.daemon.log()));
    }
}
