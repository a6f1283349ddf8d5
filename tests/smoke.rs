//! The main job: nodes of a practice fleet become configured. Quick enough to run against every broker and binary.

mod common;
mod fleet;

use std::time::Duration;

use common::{Daemon, NatsServer, SOON, wait_until, within};
use fleet::{Action, Csr, Encoding, Fault, Fleet, State, Token};

#[test]
fn a_healthy_node_is_configured_once_and_restarted() {
    let broker = NatsServer::start();
    let fleet =
        Fleet::builder(&broker.url()).nodes(1).pki().facts(r#"{"rack":"r12 <b&c>"}"#).start();
    let daemon = Daemon::builder(&broker.address()).feature("pki", "true").start();

    fleet.wait_all_provisioned(within(SOON)).expect("provisioned");
    let node = fleet.node(0);
    assert_eq!(node.configuration()["identity"], "n0.fleet.example.net");
    assert_eq!(node.configuration()["plugin.choria.server.provision"], "0");
    wait_until(SOON, "it has left the network", || node.state() == State::Provisioned);
    assert_eq!(node.times_configured(), 1);
    for action in
        [Action::Jwt, Action::Inventory, Action::GenCsr, Action::Configure, Action::Restart]
    {
        assert_eq!(node.times_asked(action), 1, "{}", action.name());
    }
    assert_eq!(fleet.violations(), [""; 0]);
    wait_until(SOON, "it is counted", || daemon.metric("provisioned") == 1.0);
    let metrics = daemon.metrics();
    assert_eq!(metrics.sum("provision_errors"), 0.0);
    assert_eq!(metrics.sum("helper_errors"), 0.0);
    assert_eq!(metrics.with("rpc_time_count", "choria_provision#configure"), 1.0);
    assert!(daemon.logged(&["Provisioned n0.fleet.example.net"]), "{}", daemon.log());
}

#[test]
fn nodes_are_found_by_discovery_alone_and_by_either_form_of_event_alone() {
    let broker = NatsServer::start();
    let mut daemon = Daemon::builder(&broker.address()).start();
    daemon.wait_ready();
    for (announce, encoding) in
        [(true, Encoding::Cloud), (true, Encoding::Legacy), (false, Encoding::Cloud)]
    {
        let fleet = Fleet::builder(&broker.url())
            .node(
                &format!(
                    "{}-{encoding:?}.example.net",
                    if announce { "event" } else { "discovery" }
                )
                .to_lowercase(),
            )
            .announce(announce)
            .discoverable(!announce)
            .events(encoding)
            .start();
        fleet.wait_all_provisioned(within(SOON)).expect("provisioned");
        assert_eq!(fleet.violations(), [""; 0]);
    }
    let metrics = daemon.metrics();
    assert_eq!(metrics.sum("event_discovered"), 2.0);
    assert_eq!(metrics.sum("discovered"), 1.0);
    assert!(daemon.stop().success());
}

#[test]
fn of_fifty_nodes_the_healthy_are_served_and_each_broken_one_has_its_reason_in_the_log() {
    // What is wrong, and what the log says of it.
    let broken = [
        ("gone.example.net", Fault::Gone, "no responders"),
        ("silent.example.net", Fault::Silent, "no answer"),
        ("locked.example.net", Fault::Locked, "Could not obtain provisioning lock"),
        ("wrong-token.example.net", Fault::WrongToken, "Incorrect provision token supplied"),
        ("forged-jwt.example.net", Fault::Token(Token::Foreign), "JWT"),
        ("expired-jwt.example.net", Fault::Token(Token::Expired), "expired"),
        ("other-cn.example.net", Fault::Csr(Csr::OtherCn), "other.example.net"),
        ("denied.example.net", Fault::Csr(Csr::DeniedDns), "matches denied certificate pattern"),
        ("no-pem.example.net", Fault::Csr(Csr::NotPem), "could not parse CSR"),
        ("full-disk.example.net", Fault::ConfigureRefused, "no space left on device"),
    ];
    let broker = NatsServer::start();
    let mut builder = Fleet::builder(&broker.url()).nodes(40).pki();
    for (name, fault, _) in &broken {
        builder = builder.broken(name, fault.clone());
    }
    let fleet = builder.start_quietly();
    let mut daemon = Daemon::builder(&broker.address())
        .feature("pki", "true")
        .set("probe_timeout", "300ms")
        .start();
    // Those that are gone or silent are known by their startup events alone.
    daemon.wait_ready();
    fleet.announce();

    fleet.wait_all_provisioned(within(SOON)).expect("the healthy ones are provisioned");
    for (name, fault, reason) in &broken {
        daemon.wait_logged(SOON, &["Could not provision", name, reason]);
        assert!(!fleet.named(name).is_provisioned(), "{fault} was provisioned");
    }
    for node in fleet.iter().filter(|node| node.fault().is_none()) {
        assert_eq!(node.times_configured(), 1, "{}", node.describe());
        assert_eq!(node.configuration()["identity"], node.identity());
    }
    wait_until(SOON, "all are counted", || daemon.metric("provisioned") == 40.0);
    for outcome in ["provisioned", "busy", "wrong_token", "unreachable", "refused", "failed"] {
        wait_until(SOON, &format!("an outcome {outcome}"), || {
            daemon.metrics().with("outcomes_total", &format!("outcome=\"{outcome}\"")) >= 1.0
        });
    }
    let metrics = daemon.metrics();
    assert!(metrics.sum("provision_errors") >= 8.0, "{metrics:?}");
    assert_eq!(fleet.violations(), [""; 0]);
    daemon.assert_alive();
    assert!(daemon.stop().success());
}

#[test]
fn a_deferred_node_waits_and_an_unwanted_one_is_shut_down() {
    let broker = NatsServer::start();
    let fleet = Fleet::builder(&broker.url())
        .node("wanted.example.net")
        .node("later.example.net")
        .node("unwanted.example.net")
        .restart_delay(Duration::from_millis(50))
        .start();
    let daemon = Daemon::builder(&broker.address())
        .helper(
            r#"#!/bin/sh
IFS= read -r input
identity=${input#*'"identity":"'}
case ${identity%%'"'*} in
later.*) echo '{"defer":true,"msg":"the rack is not ready"}' ;;
unwanted.*) echo '{"shutdown":true,"msg":"not one of ours"}' ;;
*) echo '{"configuration":{"plugin.choria.server.provision":"0"}}' ;;
esac
"#,
        )
        .start();

    fleet.wait_provisioned(1, within(SOON)).expect("the wanted one is provisioned");
    let unwanted = fleet.named("unwanted.example.net");
    wait_until(SOON, "the unwanted one has stopped", || unwanted.state() == State::Stopped);
    let later = fleet.named("later.example.net");
    // It is asked for again with each discovery.
    wait_until(SOON, "the deferred one was tried again", || later.times_asked(Action::Jwt) > 1);
    assert_eq!(later.times_configured() + unwanted.times_configured(), 0);
    daemon.wait_logged(SOON, &["later.example.net", "the rack is not ready"]);
    daemon.wait_logged(SOON, &["unwanted.example.net", "not one of ours"]);
    let metrics = daemon.metrics();
    assert_eq!(metrics.sum("helper_shutdown_requests"), 1.0);
    assert_eq!(metrics.sum("provision_errors"), 0.0, "to defer is no error");
}
