//! Our wall clock jumps: nodes ignore requests of another time, an operator is told, and nothing else goes wrong.
//!
//! The clock is that of `libfaketime` (Debian package `faketime`), which shows a real daemon another wall clock and leaves
//! the others alone.

mod common;
mod fleet;

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use common::cluster::Scene;
use common::{Daemon, SOON, wait_until, within};
use fleet::Fleet;

/// The shortest that leaves a daemon room to be late on a busy machine.
const SHORT: Duration = Duration::from_secs(5);

#[test]
fn a_clock_that_jumps_by_an_hour_silences_the_nodes_shows_in_status_and_ends_no_leadership() {
    let scene = Scene::start(SHORT);
    let builder = scene.daemon("p1");
    let clock = builder.dir().join("clock");
    let set = |by: &str| fs::write(&clock, by).expect("the folder is ours");
    set("+0");
    let daemon = builder
        .env("LD_PRELOAD", &library())
        .env("FAKETIME_TIMESTAMP_FILE", &clock.to_string_lossy())
        .env("FAKETIME_NO_CACHE", "1")
        .env("FAKETIME_DONT_FAKE_MONOTONIC", "1")
        .start();
    scene.wait_leads(&daemon);
    nodes(&scene, "early").wait_all_provisioned(within(SOON)).expect("the clock is right");
    for (name, by, said) in [
        ("ahead", "+3600", "our clock is 1h ahead of"),
        ("behind", "-3600", "behind that of the last 3 nodes"),
    ] {
        set(by);
        let fleet = nodes(&scene, name);
        daemon.wait_logged(SOON, &[said]);
        assert!(status(&daemon).contains(said), "{}", status(&daemon));
        assert_eq!(fleet.provisioned(), 0, "they ignore what comes from another time");
        set("+0");
        fleet.wait_all_provisioned(within(2 * SOON)).expect("the clock is right again");
        // Nodes that announce themselves now say that it is.
        nodes(&scene, &format!("after-{name}")).wait_all_provisioned(within(SOON)).expect("it is");
        wait_until(SOON, "nobody complains", || !status(&daemon).contains("our clock"));
    }
    assert!(!daemon.logged(&["Lost leadership"]) && daemon.metric("leader") > 0.0);
}

/// Three nodes, as many as must agree.
fn nodes(scene: &Scene, name: &str) -> Fleet {
    let builder = Fleet::builder(&scene.streams.broker.url());
    let named = |fleet: fleet::Builder, n| fleet.node(&format!("{name}{n}.example.net"));
    (0..3).fold(builder, named).start()
}

fn status(daemon: &Daemon) -> String {
    daemon.get("/status.json").expect("the port answers").1
}

/// Where the library is.
fn library() -> String {
    let folders = fs::read_dir("/usr/lib").into_iter().flatten().filter_map(Result::ok);
    let files = folders.map(|folder| folder.path().join("faketime/libfaketimeMT.so.1"));
    let found: Option<PathBuf> = files.into_iter().find(|file| file.exists());
    let found = found.expect("the Debian package faketime is installed");
    found.to_string_lossy().into_owned()
}
