//! The broker dies in the middle of the work and comes back.

mod common;
mod fleet;

use std::collections::HashSet;
use std::time::Duration;

use common::{Daemon, NatsServer, SOON, wait_until, within};
use fleet::Fleet;

#[test]
fn a_killed_broker_costs_no_node_no_thread_and_no_second_configuration() {
    let mut broker = NatsServer::start();
    let mut daemon = Daemon::builder(&broker.address()).set("interval", "2s").start();
    let fleet = Fleet::builder(&broker.url()).nodes(200).start();
    fleet.wait_provisioned(60, within(SOON)).expect("a third is done");
    let threads = daemon.threads();

    broker.kill();
    // What was handled on the node but whose answer the daemon cannot have seen may be done again.
    let open: HashSet<String> = fleet
        .iter()
        .filter(|node| node.times_configured() == 1 && !node.is_provisioned())
        .map(|node| node.identity())
        .collect();
    let before = fleet.provisioned();
    assert!(before < 200, "the broker was killed too late");
    wait_until(SOON, "the daemon notices", || daemon.metric("broker_connected") == 0.0);
    broker.restart();

    fleet.wait_all_provisioned(within(Duration::from_secs(30))).expect("all are provisioned");
    for node in fleet.iter() {
        let most = if open.contains(&node.identity()) { 2 } else { 1 };
        assert!(node.times_configured() <= most, "{}", node.describe());
    }
    wait_until(SOON, "all are counted", || daemon.metric("provisioned") >= 200.0);
    let metrics = daemon.metrics();
    assert_eq!(metrics.sum("provisioned"), 200.0, "{metrics:?}");
    assert_eq!(metrics.sum("broker_reconnects_total"), 1.0);
    let connected = format!("Connected to {}", broker.url());
    assert_eq!(daemon.log().matches(&connected).count(), 2, "once more than at the start");
    assert_eq!(metrics.sum("waiting_retry_nodes"), 0.0, "nobody waits because of it");
    let mut lost = threads;
    for name in daemon.threads() {
        if let Some(at) = lost.iter().position(|known| *known == name) {
            lost.swap_remove(at);
        }
    }
    assert_eq!(lost, [""; 0], "threads that ended");
    assert_eq!(fleet.violations(), [""; 0]);
    assert!(daemon.stop().success());
}

#[test]
fn a_daemon_started_before_its_broker_waits_for_it() {
    let mut broker = NatsServer::start();
    broker.kill();
    let mut daemon = Daemon::builder(&broker.address()).start();
    assert_eq!(daemon.metric("broker_connected"), 0.0);
    let (status, reasons) = daemon.get("/readyz").expect("the monitor port answers");
    assert_eq!(status, 503, "{reasons}");
    assert_eq!(daemon.get("/livez").expect("the monitor port answers").0, 200);

    broker.restart();
    let fleet = Fleet::builder(&broker.url()).nodes(1).start();
    fleet.wait_all_provisioned(within(SOON)).expect("provisioned");
    assert_eq!(daemon.get("/readyz").expect("the monitor port answers").0, 200);
    assert!(daemon.stop().success());
}

#[test]
fn a_broker_that_comes_back_during_the_drain_finds_the_running_node_finished() {
    let mut broker = NatsServer::start();
    let daemon = Daemon::builder(&broker.address());
    let dir = daemon.dir().to_owned();
    let mut daemon = daemon
        .helper(&format!(
            "#!/bin/sh\n: > {dir}/runs\nwhile [ ! -e {dir}/go ]; do sleep 0.05; done\necho '{{\"configuration\":{{\"plugin.choria.server.provision\":\"0\"}}}}'\n",
            dir = dir.display()
        ))
        .start();
    let fleet = Fleet::builder(&broker.url()).nodes(1).start();
    wait_until(SOON, "the helper runs", || dir.join("runs").exists());
    broker.kill();
    wait_until(SOON, "the daemon notices", || daemon.metric("broker_connected") == 0.0);
    daemon.terminate();
    daemon.wait_logged(SOON, &["Shutting down"]);
    broker.restart();
    wait_until(SOON, "it is connected again", || daemon.metric("broker_connected") == 1.0);
    std::fs::write(dir.join("go"), "").expect("the daemon's folder is writable");
    assert!(daemon.wait(SOON).success());
    let node = fleet.node(0);
    assert!(node.is_provisioned(), "{}", node.describe());
    assert_eq!(node.times_configured(), 1);
}

#[test]
fn stops_at_once_while_the_broker_is_away() {
    let mut broker = NatsServer::start();
    let mut daemon = Daemon::builder(&broker.address()).start();
    wait_until(SOON, "it is connected", || daemon.metric("broker_connected") == 1.0);
    broker.kill();
    wait_until(SOON, "it notices", || daemon.metric("broker_connected") == 0.0);
    daemon.terminate();
    assert!(daemon.wait(Duration::from_secs(5)).success());
}
