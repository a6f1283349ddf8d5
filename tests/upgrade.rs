//! Nodes become another version of Choria before they are configured.

mod common;
mod fleet;

use std::time::Duration;

use common::{Builder, Daemon, NatsServer, SOON, wait_until, within};
use fleet::{Action, Encoding, Fault, Fleet};

const REPOSITORY: &str = "https://repo.example.net/choria";

#[test]
fn a_node_becomes_the_version_wished_and_is_then_configured() {
    // A lower version is a wish too.
    for (from, to, encoding) in
        [("0.29.4", "0.30.2", Encoding::Cloud), ("0.30.2", "0.29.10", Encoding::Legacy)]
    {
        let broker = NatsServer::start();
        let mut daemon = upgrading(&broker, to).start();
        daemon.wait_ready();
        let fleet = fleet(&broker).version(from).upgradable().events(encoding).nodes(3).start();
        fleet.wait_all_provisioned(within(SOON)).expect("all come back and are configured");

        for node in fleet.iter() {
            assert_eq!(node.version(), to);
            assert_eq!(node.times_asked(Action::ReleaseUpdate), 1, "{}", node.describe());
            assert_eq!(node.times_asked(Action::Jwt), 2, "{}", node.describe());
            assert_eq!(node.times_configured(), 1, "{}", node.describe());
        }
        counted(&daemon, &[("upgrade_sent", 3.0), ("provisioned", 3.0)]);
        // As the original counts.
        assert_eq!(daemon.metric("provisioned"), 6.0);
        assert_eq!(daemon.metric("provision_errors"), 0.0);
        let parts = ["Provisioned n0.fleet.example.net: it updates itself to ", to];
        assert!(daemon.logged(&parts), "{}", daemon.log());
        assert_eq!(fleet.violations(), [""; 0]);
        daemon.assert_alive();
    }
}

#[test]
fn a_node_that_has_the_version_wished_is_configured_at_once() {
    let broker = NatsServer::start();
    let daemon = upgrading(&broker, "0:0.30.2").start();
    let fleet = fleet(&broker).version("0.30.2").nodes(1).upgradable().start();
    fleet.wait_all_provisioned(within(SOON)).expect("nothing is in its way");
    assert_eq!(fleet.node(0).times_asked(Action::ReleaseUpdate), 0);
    counted(&daemon, &[("upgrade_sent", 0.0), ("provisioned", 1.0)]);
}

#[test]
fn an_update_that_changes_nothing_is_sent_twice_and_no_more() {
    let broker = NatsServer::start();
    let daemon = upgrading(&broker, "0.30.2-1").start();
    daemon.wait_ready();
    let fleet =
        fleet(&broker).version("0.29.4").nodes(2).fault(0..1, Fault::UpdateInVain).upgradable();
    let fleet = fleet.start();
    fleet.wait_provisioned(1, within(SOON)).expect("the other node is not held up");
    wait_counted(&daemon, "upgrade_stuck", 1.0);
    let reason = [
        "Could not provision n0.fleet.example.net: ",
        "update to 0.30.2-1 was sent before and the node still reports 0.29.4: ",
        "the helper must wish for the version exactly as the node will report it",
    ];
    assert!(daemon.logged(&reason), "{}", daemon.log());
    assert_eq!(fleet.node(0).times_asked(Action::ReleaseUpdate), 2);
    assert_eq!(fleet.node(0).times_configured(), 0);
    // What can never be reached is said before anything is sent.
    assert!(daemon.logged(&["warning", "holds a release"]), "{}", daemon.log());
}

#[test]
fn where_upgrades_are_optional_a_node_is_configured_as_it_is() {
    let broker = NatsServer::start();
    let daemon = upgrading(&broker, "0.30.2").set("upgrades_optional", true).start();
    daemon.wait_ready();
    let fleet = fleet(&broker)
        .version("0.29.4")
        .upgradable()
        .broken("vain.example.net", Fault::UpdateInVain)
        .broken("refuses.example.net", Fault::Status(Action::ReleaseUpdate, 1))
        .start();
    fleet.wait_provisioned(2, within(SOON)).expect("both are configured in the end");
    let vain = fleet.named("vain.example.net");
    assert_eq!((vain.version().as_str(), vain.times_asked(Action::ReleaseUpdate)), ("0.29.4", 2));
    assert!(daemon.logged(&[
        "vain.example.net",
        "Could not upgrade to 0.30.2, continuing: update to 0.30.2 was sent before",
    ]));
    assert_eq!(fleet.named("refuses.example.net").times_asked(Action::ReleaseUpdate), 1);
    assert!(daemon.logged(&[
        "refuses.example.net",
        "Could not upgrade to 0.30.2, continuing: update to 0.30.2 failed: refused with status 1: practice fault",
    ]));
    counted(&daemon, &[("upgrade_sent", 2.0), ("provisioned", 2.0), ("upgrade_stuck", 0.0)]);
}

#[test]
fn a_refused_update_fails_the_attempt() {
    let broker = NatsServer::start();
    let daemon = upgrading(&broker, "0.30.2").start();
    daemon.wait_ready();
    let fault = Fault::Status(Action::ReleaseUpdate, 1);
    let fleet = fleet(&broker).version("0.29.4").upgradable().broken("n0.example.net", fault);
    let fleet = fleet.start();
    wait_counted(&daemon, "failed", 2.0);
    let node = fleet.node(0);
    // Each attempt sends it once.
    assert!(node.times_asked(Action::ReleaseUpdate) <= node.times_asked(Action::Jwt));
    assert!(daemon.logged(&[
        "Could not provision n0.example.net: update to 0.30.2 failed: refused with status 1: ",
        "(1 try)",
    ]));
    assert_eq!(node.times_configured(), 0);
    counted(&daemon, &[("upgrade_sent", 0.0)]);
}

#[test]
fn a_node_that_takes_no_upgrades_fails_or_is_configured_as_it_is() {
    let broker = NatsServer::start();
    let fleet = fleet(&broker).version("0.29.4").nodes(1).start();
    {
        let daemon = upgrading(&broker, "0.30.2").start();
        wait_counted(&daemon, "failed", 1.0);
        let reason = "Could not provision n0.fleet.example.net: does not support upgrades";
        assert!(daemon.logged(&[reason]), "{}", daemon.log());
        assert_eq!(fleet.node(0).times_configured(), 0);
    }
    let optional = upgrading(&broker, "0.30.2").set("upgrades_optional", true);
    let daemon = optional.without("upgrades_repository").start();
    fleet.wait_all_provisioned(within(SOON)).expect("it is configured as it is");
    let warning = "Could not upgrade to 0.30.2, continuing: does not support upgrades";
    assert!(daemon.logged(&["n0.fleet.example.net", warning]), "{}", daemon.log());
    assert!(daemon.logged(&["upgrades_repository: is not set, so no node is upgraded"]));
    assert_eq!(fleet.node(0).times_asked(Action::ReleaseUpdate), 0);
}

#[test]
fn upgrades_without_a_repository_are_refused_at_the_start() {
    let builder = upgrading_at("127.0.0.1:1", "0.30.2").without("upgrades_repository");
    let (code, log) = builder.run_to_its_end();
    assert_eq!(code, 78, "{log}");
    let reason = "upgrades_repository: must be set when `features.upgrades` is on";
    assert!(log.contains(reason), "{log}");
}

#[test]
fn an_upgraded_node_that_comes_back_unprovisioned_is_not_upgraded_again() {
    let broker = NatsServer::start();
    let daemon = upgrading(&broker, "0.30.2").start();
    daemon.wait_ready();
    let fleet = fleet(&broker)
        .version("0.29.4")
        .upgradable()
        .broken("n0.example.net", Fault::Returns(1))
        // An event within 2 s of its answer would be taken for an older one that comes late.
        .restart_delay(Duration::from_millis(2_500))
        .start();
    let back = |fleet: &Fleet| match fleet.node(0).times_restarted() {
        2 => Ok(()),
        _ => Err(fleet.node(0).describe()),
    };
    fleet.wait(within(SOON), back).expect("it is configured twice");
    assert_eq!(fleet.node(0).times_asked(Action::ReleaseUpdate), 1);
    wait_counted(&daemon, "provisioned", 2.0);
}

/// Nodes that restart in no time.
fn fleet(broker: &NatsServer) -> fleet::Builder {
    Fleet::builder(&broker.url()).restart_delay(Duration::from_millis(100))
}

/// A daemon whose helper wishes for `version`.
fn upgrading(broker: &NatsServer, version: &str) -> Builder {
    upgrading_at(&broker.address(), version)
}

fn upgrading_at(address: &str, version: &str) -> Builder {
    Daemon::builder(address)
        .feature("upgrades", "true")
        .set("upgrades_repository", REPOSITORY)
        .helper(&format!(
            r#"#!/bin/sh
cat >/dev/null
printf '{{"upgrade":"{version}","configuration":{{"plugin.choria.server.provision":"0"}}}}\n'
"#
        ))
}

#[track_caller]
fn wait_counted(daemon: &Daemon, outcome: &str, least: f64) {
    wait_until(SOON, outcome, || outcomes(daemon, outcome) >= least);
}

/// A node is known to be on its way a moment before its outcome is counted.
#[track_caller]
fn counted(daemon: &Daemon, expected: &[(&str, f64)]) {
    for (outcome, count) in expected {
        wait_until(SOON, outcome, || outcomes(daemon, outcome) >= *count);
        assert_eq!(outcomes(daemon, outcome), *count, "{outcome}");
    }
}

fn outcomes(daemon: &Daemon, outcome: &str) -> f64 {
    daemon.metrics().with("outcomes_total", &format!("outcome=\"{outcome}\""))
}
