//! The connection to the broker ends under requests that are on their way, or grants less than we need.

mod common;
mod fleet;

use std::collections::HashSet;
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::TcpListener;
use std::time::{Duration, Instant};

use common::{Daemon, NatsServer, SOON, TempDir, wait_until, within};
use fleet::{Action, Fleet};

/// The nodes take their time, so that most of those in hand wait for an answer when the broker dies.
const DELAY: Duration = Duration::from_millis(200);

/// Without a wait of its own, what is left of the work takes two or three seconds.
const SHORT: Duration = Duration::from_secs(12);

#[test]
fn nobody_waits_for_an_answer_that_went_with_the_broker() {
    let mut broker = NatsServer::start();
    let mut daemon = Daemon::builder(&broker.address())
        .set("workers", "16")
        // Nothing but what a reconnect does by itself.
        .set("interval", "1h")
        .feature("pki", "true")
        .start();
    wait_until(SOON, "it has begun", || daemon.metric("discover_cycles") >= 1.0);
    let fleet = Fleet::builder(&broker.url()).nodes(200).delay(DELAY).pki().start();
    fleet.wait_provisioned(60, within(SOON)).expect("a third is done");

    broker.kill();
    // What was handled on the node but whose answer the daemon cannot have seen may be done again.
    let open: HashSet<String> = fleet
        .iter()
        .filter(|node| node.times_configured() == 1 && node.times_restarted() == 0)
        .map(|node| node.identity())
        .collect();
    assert!(fleet.provisioned() < 200, "the broker was killed too late");
    wait_until(SOON, "the daemon notices", || daemon.metric("broker_connected") == 0.0);
    broker.restart();
    wait_until(SOON, "the daemon is back", || daemon.metric("broker_connected") == 1.0);
    let back = Instant::now();

    fleet.wait_all_provisioned(back + SHORT).expect("all are provisioned");
    wait_until(SHORT, "all are counted", || daemon.metric("provisioned") >= 200.0);
    let metrics = daemon.metrics();
    assert_eq!(metrics.sum("provisioned"), 200.0, "{metrics:?}");
    assert_eq!(metrics.sum("provision_errors"), 0.0, "{metrics:?}");
    assert_eq!(metrics.sum("waiting_retry_nodes"), 0.0, "nobody waits because of it");
    for node in fleet.iter() {
        let most = if open.contains(&node.identity()) { 2 } else { 1 };
        assert!(node.times_configured() <= most, "{}", node.describe());
        assert!(node.times_asked(Action::GenCsr) <= 2, "{}", node.describe());
    }
    assert_eq!(fleet.violations(), [""; 0]);
    assert!(daemon.stop().success());
}

#[test]
fn what_we_may_not_do_is_seen_in_readiness() {
    let dir = TempDir::new("link");
    let config = dir.write(
        "broker.conf",
        r#"authorization: { users: [ {
            user: provisioner, password: s3cret, permissions: { subscribe: { deny: ["choria.lifecycle.>"] } }
        } ] }"#,
    );
    let broker = NatsServer::configured(&config);
    let daemon = Daemon::builder(&broker.address()).set("broker_provisioning_password", "s3cret");
    let daemon = daemon.start();
    let complaint = "Permissions Violation for Subscription to \"choria.lifecycle.";
    wait_until(SOON, "it says so while it is connected", || {
        let (_, body) = daemon.get("/readyz").unwrap();
        daemon.metric("broker_connected") == 1.0 && body.contains(complaint)
    });
}

#[test]
fn a_broker_that_says_again_and_again_that_it_will_shut_down_is_quoted_once() {
    let listener = TcpListener::bind(("127.0.0.1", 0)).expect("there are free ports");
    let address = listener.local_addr().expect("it is bound").to_string();
    let daemon = Daemon::builder(&address).start();
    let (mut peer, _) = listener.accept().expect("the daemon connects");
    let mut heard = BufReader::new(peer.try_clone().expect("a second handle")).lines();
    let mut hears_ping = || heard.any(|line| line.is_ok_and(|line| line == "PING"));
    peer.write_all(b"INFO {}\r\n").expect("it reads");
    assert!(hears_ping(), "it greets");
    peer.write_all(b"PONG\r\n").expect("it reads");
    assert!(hears_ping(), "it asks whether its subscriptions are in place");
    // What comes before the answer is dealt with before it.
    let farewells = "INFO {\"ldm\":true}\r\nINFO {}\r\n".repeat(200);
    peer.write_all(format!("{farewells}PONG\r\n").as_bytes()).expect("it reads");
    wait_until(SOON, "connected", || daemon.metric("broker_connected") == 1.0);
    let said = daemon.log().matches("is about to shut down").count();
    assert_eq!(said, 1, "{}", common::tail(&daemon.log()));
}
