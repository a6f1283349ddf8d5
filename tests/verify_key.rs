//! The file that provisioning JWTs are verified with, replaced while the daemon runs.

mod common;
mod fleet;

use std::fs;

use common::{Daemon, NatsServer, SOON, wait_until, within};
use fleet::{Action, Fleet};

#[test]
fn a_key_file_that_is_gone_for_a_while_is_our_fault_and_no_nodes() {
    let broker = NatsServer::start();
    let mut daemon = Daemon::builder(&broker.address()).start();
    let key = daemon.dir().join("verify.pem");
    let away = key.with_extension("away");
    fs::rename(&key, &away).expect("the daemon's folder is writable");

    let fleet = Fleet::builder(&broker.url()).nodes(2).start();
    // More often than a node may fail without its wait growing.
    wait_until(SOON, "both nodes were tried five times", || {
        daemon.metrics().with("outcomes_total", "outcome=\"misconfigured\"") >= 10.0
    });
    let reason = "could not read validation certificate: ";
    assert!(daemon.logged(&["error", "No node can be provisioned: ", reason]), "{}", daemon.log());
    assert!(daemon.logged(&["Could not provision n1.fleet.example.net: ", reason]));
    let said = daemon.log().lines().filter(|line| line.contains("No node can")).count();
    assert_eq!(said, 1, "one line a minute is enough");
    assert!(fleet.iter().all(|node| node.times_asked(Action::Jwt) == 0));
    let (code, body) = daemon.get("/readyz").expect("the monitor port answers");
    assert_eq!(code, 200, "{body}");
    assert!(body.contains("times in a row by a mistake of ours, the last time: "), "{body}");
    assert!(body.contains(reason), "{body}");

    fs::rename(&away, &key).expect("the daemon's folder is writable");
    fleet.wait_all_provisioned(within(SOON)).expect("the file is read again for every node");
    assert_eq!(daemon.metrics().with("outcomes_total", "outcome=\"failed\""), 0.0);
    daemon.assert_alive();
}
