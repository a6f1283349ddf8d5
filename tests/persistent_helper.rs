//! A helper that stays, between the real daemon and a practice fleet.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;
mod fleet;

use std::fs;
use std::path::Path;

use common::{Builder, Daemon, NatsServer, SOON, wait_until, within};
use fleet::Fleet;

/// Answers every line. `$dir` is where its files are; what a test adds runs for each node, with `id` and `identity` set.
fn helper(dir: &Path, for_each: &str) -> String {
    format!(
        r#"#!/bin/sh
dir={dir}
echo $$ >>$dir/pids
while IFS= read -r line; do
    id=${{line#'{{"id":"'}}
    id=${{id%%\"*}}
    identity=${{line#*'"identity":"'}}
    identity=${{identity%%\"*}}
    {for_each}
    printf '{{"id":"%s","reply":{{"configuration":{{"identity":"%s","plugin.choria.server.provision":"0"}}}}}}\n' "$id" "$identity"
done
"#,
        dir = dir.display()
    )
}

fn daemon(broker: &NatsServer, for_each: &str) -> Builder {
    let builder = Daemon::builder(&broker.address());
    let script = helper(builder.dir(), for_each);
    builder.helper(&script).set("helper_mode", "persistent")
}

/// The processes the helper ever had.
fn processes(daemon: &Daemon) -> Vec<String> {
    let pids = fs::read_to_string(daemon.dir().join("pids")).unwrap_or_default();
    pids.lines().map(str::to_owned).collect()
}

#[track_caller]
fn no_process_lives(daemon: &Daemon) {
    for pid in processes(daemon) {
        assert!(!Path::new("/proc").join(&pid).exists(), "helper process {pid} lives");
    }
}

#[track_caller]
fn mkfifo(path: &Path) {
    let status = std::process::Command::new("mkfifo").arg(path).status().unwrap();
    assert!(status.success());
}

#[test]
fn a_fleet_is_provisioned_by_a_few_processes_that_end_with_the_daemon() {
    let broker = NatsServer::start();
    let mut daemon = daemon(&broker, "").set("workers", 4).start();
    let fleet = Fleet::builder(&broker.url()).nodes(100).start();
    fleet.wait_all_provisioned(within(SOON)).unwrap();
    let running = daemon.metric("helper_processes");
    assert!((1.0..=4.0).contains(&running), "{running}");
    assert_eq!(processes(&daemon).len() as f64, running);
    assert_eq!(daemon.metric("helper_restarts_total"), 0.0);
    assert_eq!(daemon.metric("helper_errors"), 0.0);
    assert!(daemon.stop().success());
    no_process_lives(&daemon);
    assert!(fleet.violations().is_empty(), "{:?}", fleet.violations());
}

#[test]
fn a_crash_costs_nodes_one_attempt_and_is_explained() {
    let broker = NatsServer::start();
    let crash = "[ $identity = n3.fleet.example.net ] && mkdir $dir/crashed 2>/dev/null && { echo no database >&2; exit 3; }";
    let daemon = daemon(&broker, crash).set("workers", 2).start();
    let fleet = Fleet::builder(&broker.url()).nodes(20).start();
    fleet.wait_all_provisioned(within(SOON)).unwrap();
    // The fleet knows of the last one before the daemon has counted it.
    wait_until(SOON, "every node is counted", || {
        daemon.metrics().with("outcomes_total", "outcome=\"provisioned\"") == 20.0
    });
    assert_eq!(daemon.metric("helper_errors"), 1.0);
    daemon.wait_logged(
        SOON,
        &[
            "Could not provision n3.fleet.example.net",
            "ended without an answer (exit status 3",
            "no database",
        ],
    );
}

#[test]
fn a_node_that_is_asked_about_is_finished_before_the_daemon_stops() {
    let broker = NatsServer::start();
    let builder = daemon(&broker, "echo $identity >$dir/began; read x <$dir/go");
    let (began, go) = (builder.dir().join("began"), builder.dir().join("go"));
    mkfifo(&began);
    mkfifo(&go);
    let mut daemon = builder.set("workers", 1).start();
    let fleet = Fleet::builder(&broker.url()).nodes(3).start();
    let asked = fs::read_to_string(began).unwrap();
    daemon.terminate();
    daemon.wait_logged(SOON, &["Shutting down"]);
    fs::write(go, "on\n").unwrap();
    assert!(daemon.wait(SOON).success());
    let provisioned: Vec<_> =
        fleet.iter().filter(|node| node.is_provisioned()).map(|node| node.identity()).collect();
    assert_eq!(provisioned, [asked.trim()]);
    no_process_lives(&daemon);
}

#[test]
fn an_abort_kills_a_helper_that_does_not_answer() {
    let broker = NatsServer::start();
    let builder =
        daemon(&broker, "trap '' TERM HUP; echo $identity >$dir/began; sleep 1000 & wait");
    let began = builder.dir().join("began");
    mkfifo(&began);
    let mut daemon = builder.set("workers", 1).set("helper_timeout", "1m").start();
    let fleet = Fleet::builder(&broker.url()).nodes(1).start();
    fs::read_to_string(began).unwrap();
    daemon.terminate();
    daemon.wait_logged(SOON, &["Shutting down"]);
    daemon.terminate();
    daemon.wait(SOON);
    assert_eq!(fleet.provisioned(), 0);
    wait_until(SOON, "no helper process lives", || {
        processes(&daemon).iter().all(|pid| !Path::new("/proc").join(pid).exists())
    });
}
