//! More nodes than there is room for: what does not fit is counted and found again.

mod common;
mod fleet;

use std::time::Duration;

use common::{Daemon, NatsServer, SOON, wait_until, within};
use fleet::{Fault, Fleet};

/// A helper that takes its time, so that the queue fills behind the one worker.
const SLOW_HELPER: &str = r#"#!/bin/sh
sleep 0.2
echo '{"configuration":{"plugin.choria.server.provision":"0"}}'
"#;

#[test]
fn five_nodes_pass_a_queue_of_two() {
    let broker = NatsServer::start();
    let mut daemon = crowded(&broker).start();
    daemon.wait_ready();
    let fleet = Fleet::builder(&broker.url()).nodes(5).start();
    fleet.wait_all_provisioned(within(SOON)).expect("all are provisioned");
    for node in fleet.iter() {
        assert_eq!(node.times_configured(), 1, "{}", node.describe());
    }
    assert!(daemon.stop().success());
}

#[test]
fn what_a_queue_of_two_refuses_is_counted_and_found_again() {
    let broker = NatsServer::start();
    let mut daemon = crowded(&broker).start();
    daemon.wait_ready();
    let fleet = Fleet::builder(&broker.url()).nodes(30).start();
    wait_until(SOON, "some are refused", || daemon.metric("queue_refused_total") >= 1.0);
    fleet
        .wait_all_provisioned(within(Duration::from_secs(40)))
        .expect("all are provisioned in the end");
    wait_until(SOON, "all are counted", || daemon.metric("provisioned") == 30.0);
    for node in fleet.iter() {
        assert_eq!(node.times_configured(), 1, "{}", node.describe());
    }
    assert!(daemon.stop().success());
}

fn crowded(broker: &NatsServer) -> common::Builder {
    Daemon::builder(&broker.address()).set("work_queue", 2).set("workers", 1).helper(SLOW_HELPER)
}

#[test]
fn sixty_thousand_identities_at_once_fill_the_queue_and_no_more() {
    let broker = NatsServer::start();
    let identities: Vec<String> = (0..60_000).map(|at| format!("ghost-{at}.example.net")).collect();
    let fleet = Fleet::builder(&broker.url()).nodes(1).start_quietly();
    let mut daemon = Daemon::builder(&broker.address()).set("loglevel", "error").start();
    daemon.wait_ready();
    fleet.announce_identities(identities.iter().map(String::as_str));

    let all = Duration::from_secs(60);
    wait_until(all, "each is either taken or refused", || {
        let metrics = daemon.metrics();
        assert!(metrics.sum("work_queue_entries") <= 50_000.0, "{metrics:?}");
        let counted = metrics.sum("event_discovered") + metrics.sum("queue_refused_total");
        // The real node may be found by discovery in the meantime, and refused.
        assert!(counted <= 60_001.0, "{metrics:?}");
        counted >= 60_000.0
    });
    assert!(daemon.peak_memory() < 200 << 20, "{} bytes", daemon.peak_memory());

    // The one that is there finds its way past all those ghosts.
    fleet.announce();
    fleet.wait_all_provisioned(within(all)).expect("the real node is provisioned");
    wait_until(SOON, "it is counted", || daemon.metric("provisioned") == 1.0);
    daemon.assert_alive();
    assert!(daemon.stop().success());
}

#[test]
fn a_quarter_of_the_nodes_gone_costs_the_others_next_to_nothing() {
    let broker = NatsServer::start();
    let mut daemon = Daemon::builder(&broker.address()).start();
    daemon.wait_ready();
    let fleet = Fleet::builder(&broker.url())
        .nodes(200)
        .fault(40, Fault::Gone)
        .fault(10, Fault::Silent)
        .start();
    fleet.wait_all_provisioned(within(SOON)).expect("the live ones are provisioned");
    assert_eq!(fleet.provisioned(), 150);
    assert!(daemon.stop().success());
}
