//! Signals: the first lets running nodes finish, the second ends everything.

mod common;
mod fleet;

use std::path::Path;
use std::time::Duration;

use common::{Daemon, NatsServer, SOON, wait_until};
use fleet::{Action, Fault, Fleet};

#[test]
fn sigterm_lets_a_running_node_finish() {
    let scene = Scene::start("sleep 2");
    let mut daemon = scene.daemon;
    daemon.terminate();
    let status = daemon.wait(SOON);
    assert!(status.success(), "{status}");
    let node = scene.fleet.node(0);
    assert!(node.is_provisioned(), "{}", node.describe());
    assert_eq!(node.times_configured(), 1);
    let second = scene.fleet.node(1);
    assert_eq!(second.times_configured(), 0, "no new node is begun: {}", second.describe());
}

#[test]
fn a_second_sigterm_kills_the_helper_and_leaves_the_node_alone() {
    let scene = Scene::start("sleep 60");
    let mut daemon = scene.daemon;
    let helper = scene.helper;
    daemon.terminate();
    daemon.wait_logged(SOON, &["Shutting down"]);
    assert!(
        Path::new(&format!("/proc/{helper}")).exists(),
        "the first signal leaves the helper alone"
    );
    assert!(daemon.is_alive());
    daemon.terminate();
    daemon.wait(Duration::from_secs(5));
    wait_until(SOON, "the helper is gone", || is_gone(&helper));
    assert_eq!(scene.fleet.node(0).times_configured(), 0);
    assert_eq!(scene.fleet.node(0).times_asked(Action::Configure), 0);
}

#[test]
fn drain_timeout_ends_a_helper_that_takes_too_long() {
    let scene = Scene::start_with("sleep 60", |daemon| daemon.set("drain_timeout", "1s"));
    let mut daemon = scene.daemon;
    daemon.terminate();
    daemon.wait(SOON);
    wait_until(SOON, "the helper is gone", || is_gone(&scene.helper));
    assert_eq!(scene.fleet.node(0).times_configured(), 0);
}

#[test]
fn stops_at_once_when_nothing_runs_but_silent_nodes_are_probed() {
    let broker = NatsServer::start();
    let mut daemon = Daemon::builder(&broker.address()).start();
    daemon.wait_ready();
    let _fleet = Fleet::builder(&broker.url()).nodes(20).fault(20, Fault::Silent).start();
    wait_until(SOON, "they are being probed", || daemon.metric("probes_outstanding") > 0.0);
    daemon.terminate();
    assert!(daemon.wait(Duration::from_secs(5)).success());
}

/// A daemon with one worker whose helper is at work on the first of two nodes.
struct Scene {
    daemon: Daemon,
    fleet: Fleet,
    /// Process number of the helper.
    helper: String,
    _broker: NatsServer,
}

impl Scene {
    fn start(pause: &str) -> Scene {
        Scene::start_with(pause, |daemon| daemon)
    }

    fn start_with(pause: &str, more: impl FnOnce(common::Builder) -> common::Builder) -> Scene {
        let broker = NatsServer::start();
        let daemon = Daemon::builder(&broker.address())
            .set("workers", 1)
            .set("helper_timeout", "1m")
            .set("node_timeout", "5m");
        let mark = daemon.dir().join("helper-pid");
        let daemon = daemon.helper(&format!(
            "#!/bin/sh\necho $$ > {mark}.new\nmv {mark}.new {mark}\n{pause}\necho '{{\"configuration\":{{\"plugin.choria.server.provision\":\"0\"}}}}'\n",
            mark = mark.display()
        ));
        let daemon = more(daemon).start();
        daemon.wait_ready();
        let fleet = Fleet::builder(&broker.url()).nodes(2).discoverable(false).start_quietly();
        let event = |at: usize| fleet.node(at).identity();
        fleet.announce_identities([event(0).as_str()]);
        wait_until(SOON, "the helper runs", || mark.exists());
        fleet.announce_identities([event(1).as_str()]);
        let helper = std::fs::read_to_string(&mark).expect("it was written").trim().to_owned();
        Scene { daemon, fleet, helper, _broker: broker }
    }
}

/// Whether a process has ended; one that nobody waited for yet has ended too.
fn is_gone(pid: &str) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.is_empty() || stat.contains(") Z ")
}
