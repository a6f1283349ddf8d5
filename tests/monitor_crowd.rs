//! The monitor port in a crowd of 2,000 idle and 200 slow clients and some that talk garbage: provisioning goes on, and so do
//! scrapes.

mod common;
mod fleet;

use std::fs;
use std::time::Duration;

use common::{Daemon, NatsServer, SOON, wait_until};
use fleet::Fleet;
use fleet::crowd::{Crowd, SLOW};

/// Connections the port has at a time, and what the daemon has open otherwise, roughly doubled.
const DESCRIPTORS_MAX: usize = 100;

/// Bytes, in the build that tests use.
const MEMORY_MAX: u64 = 64 << 20;

#[test]
fn a_crowd_at_the_monitor_port_stops_neither_scrapes_nor_provisioning() {
    let broker = NatsServer::start();
    let builder = Daemon::builder(&broker.address());
    let port = builder.monitor_port();
    let mut daemon = builder.start();
    daemon.wait_ready();
    let crowd = Crowd::gather(port).expect("there are descriptors for them");
    wait_until(SOON, "the port is crowded", || {
        daemon.metrics().with("monitor_refused_total", "connections") > SLOW as f64
    });

    let fleet = Fleet::builder(&broker.url()).nodes(300).start();
    wait_until(Duration::from_secs(60), "all are provisioned", || {
        // Each scrape is answered, and a probe and the page are, too.
        let provisioned = daemon.metric("provisioned");
        for path in ["/livez", "/readyz", "/"] {
            let (status, _) = daemon.get(path).expect("it is answered");
            assert_eq!(status, 200, "{path}");
        }
        let descriptors = descriptors(&daemon);
        assert!(descriptors <= DESCRIPTORS_MAX, "{descriptors} descriptors");
        provisioned == 300.0
    });
    assert!(crowd.turned_out() > SLOW as u64, "it was no crowd");
    drop(crowd);
    assert_eq!(fleet.violations(), [""; 0]);
    assert!(daemon.peak_memory() < MEMORY_MAX, "{} bytes", daemon.peak_memory());
    wait_until(SOON, "nobody is left", || descriptors(&daemon) < 32);
    assert!(daemon.stop().success());
}

/// How many files and sockets it has open.
fn descriptors(daemon: &Daemon) -> usize {
    fs::read_dir(format!("/proc/{}/fd", daemon.pid())).map_or(0, Iterator::count)
}
