//! Several daemons share the nodes: a real broker with the accounts of Choria's.

mod common;
mod fleet;

use std::env;
use std::thread;
use std::time::{Duration, Instant};

use choria_provisioner::protocol::peer::{self, Heartbeat, Said};
use choria_provisioner::protocol::subject::peers;
use rustix::process::Signal;

use common::admin::say;
use common::cluster::{SLOW_HELPER, WORKERS, member};
use common::streams::Streams;
use common::{Daemon, SOON, wait_until, within};
use fleet::Fleet;
use fleet::streams::{Heard, Member};

/// From the start of a daemon to the end of its listening, and from the end of one to the hold-off of its share.
const LISTENED: Duration = Duration::from_secs(40);
/// How many it may have in hand at most, with those that take a moment to answer. They keep their lock for two minutes.
const IN_HAND_MAX: usize = 8 * WORKERS;
/// Nodes enough for something to happen in the middle of them.
const MANY: usize = 160;

#[test]
fn two_daemons_share_the_nodes_and_provision_each_once() {
    let scene = Scene::start();
    let daemons = scene.daemons(&["p1", "p2"]);
    let fleet = scene.fleet(300);
    fleet.wait_all_provisioned(within(SOON)).unwrap();
    check_once(&fleet);
    check_shared(&daemons, 300);
    for daemon in &daemons {
        assert_eq!(daemon.metric("peers"), 1.0);
        assert_eq!(daemon.metric("share_ratio"), 0.5);
        assert!(daemon.metric("lease_remaining_seconds") > 0.0);
        let status: serde_json::Value =
            serde_json::from_str(&daemon.get("/status.json").unwrap().1).unwrap();
        let peers = &status["peers"];
        assert_eq!((&peers["part"], &peers["share"]), (&"acting".into(), &0.5.into()), "{peers}");
        assert_eq!(peers["others"][0]["role"], "active", "{peers}");
        assert_eq!(daemon.get("/readyz").unwrap().0, 200);
    }
}

#[test]
fn a_daemon_that_joins_gets_its_share() {
    let scene = Scene::start();
    let first = scene.daemons_with(&["p1"], |daemon| daemon.helper(SLOW_HELPER)).remove(0);
    let fleet = scene.fleet(240);
    wait_until(SOON, "it is in the middle", || first.metric("provisioned") > 0.0);
    let second = scene.daemons_with(&["p2"], |daemon| daemon.helper(SLOW_HELPER)).remove(0);
    fleet.wait_all_provisioned(within(3 * SOON)).unwrap();
    check_once(&fleet);
    check_shared(&[first, second], 240);
}

#[test]
fn the_nodes_of_a_daemon_that_is_killed_are_the_others_and_only_those_in_flight_are_done_twice() {
    let scene = Scene::start();
    let mut daemons = scene.daemons_with(&["p1", "p2"], |daemon| daemon.helper(SLOW_HELPER));
    let fleet = scene.fleet(MANY);
    wait_until(SOON, "it is in the middle", || daemons[0].metric("provisioned") > 0.0);
    drop(daemons.remove(0));
    fleet.wait_provisioned(MANY - IN_HAND_MAX, within(3 * SOON)).unwrap();
    daemons[0].wait_logged(SOON, &["Looking for the nodes of an instance that is gone"]);
    if is_slow() {
        fleet.wait_all_provisioned(within(Duration::from_secs(180))).unwrap();
    }
    let twice = fleet.iter().filter(|node| node.times_configured() > 1).count();
    assert!(twice <= IN_HAND_MAX, "{twice} were configured twice");
}

#[test]
fn a_daemon_that_is_stopped_finishes_its_nodes_and_leaves_its_share_to_the_other() {
    let scene = Scene::start();
    let mut daemons = scene.daemons_with(&["p1", "p2"], |daemon| daemon.helper(SLOW_HELPER));
    let fleet = scene.fleet(MANY);
    wait_until(SOON, "it is in the middle", || {
        daemons[0].metric("provisioned") > 0.0 && daemons[0].metric("busy_workers") > 0.0
    });
    let member = scene.member();
    let (_subscription, heard) = member.watch(peers().as_str());
    assert!(daemons[0].stop().success());
    wait_until(SOON, "it says that it leaves", || {
        let mut beats = heard.try_iter().filter_map(|heard| beat_of(&heard, "p1"));
        beats.any(|beat| beat.leaving)
    });
    daemons[1].wait_logged(SOON, &["Instance p1.example.net is leaving"]);
    fleet.wait_all_provisioned(within(3 * SOON)).unwrap();
    check_once(&fleet);
    assert_eq!(daemons[1].metric("peers"), 0.0);
    assert_eq!(daemons[1].metric("share_ratio"), 1.0);
}

#[test]
fn a_daemon_that_an_operator_pauses_leaves_its_share_to_the_other_until_it_is_resumed() {
    let scene = Scene::start();
    let daemons = scene.daemons(&["p1", "p2"]);
    say(&daemons[0], &["pause"]);
    wait_until(SOON, "all is the other's", || daemons[1].metric("share_ratio") == 1.0);
    assert_eq!(daemons[0].metric("share_ratio"), 0.0);
    scene.fleet(50).wait_all_provisioned(within(SOON)).unwrap();
    say(&daemons[0], &["resume"]);
    scene.wait_acts(&daemons[0]);
    wait_until(SOON, "they share again", || daemons[1].metric("share_ratio") == 0.5);
    let before = daemons[0].metric("provisioned");
    scene.more(50).wait_all_provisioned(within(SOON)).unwrap();
    wait_until(SOON, "it has a part in it", || daemons[0].metric("provisioned") > before);
}

#[test]
fn a_daemon_that_was_frozen_acts_on_nothing_before_it_has_listened() {
    let scene = Scene::start();
    let daemons = scene.daemons_with(&["p1", "p2"], |daemon| daemon.helper(SLOW_HELPER));
    let fleet = scene.fleet(MANY);
    wait_until(SOON, "it is in the middle", || {
        daemons[0].metric("provisioned") > 0.0 && daemons[0].metric("busy_workers") > 0.0
    });
    daemons[0].signal(Signal::STOP);
    let frozen = Instant::now();
    daemons[1].wait_logged(LISTENED, &["Looking for the nodes of an instance that is gone"]);
    if is_slow() {
        wait_until(LISTENED, "30 s are over", || frozen.elapsed() > Duration::from_secs(30));
    }
    let member = scene.member();
    let (_subscription, heard) = member.watch(">");
    daemons[0].signal(Signal::CONT);
    daemons[0].wait_logged(SOON, &["Listening for other instances"]);
    fleet.wait_provisioned(MANY - IN_HAND_MAX, within(3 * SOON)).unwrap();
    wait_until(LISTENED, "it acts again", || daemons[0].metric("share_ratio") > 0.0);
    let later = scene.more(50);
    later.wait_all_provisioned(within(2 * SOON)).unwrap();

    let (mut beats, mut requests) = (0, 0);
    for heard in heard.try_iter() {
        beats += u32::from(beat_of(&heard, "p1").is_some());
        if heard.sender().as_deref() == Some("p1.example.net") {
            assert!(beats >= 3, "it acted after {beats} heartbeats");
            requests += 1;
        }
    }
    assert!(requests > 0, "it never acted again");
}

#[test]
fn of_two_with_one_identity_the_younger_stands_by_until_the_older_leaves() {
    let scene = Scene::start();
    let mut older = scene.daemons(&["p1"]).remove(0);
    // Their instances begin with the second they were started in.
    wait_until(SOON, "a second", || older.age() > Duration::from_secs(1));
    let younger = scene.daemon("p1").start();
    younger.wait_logged(SOON, &["has our identity p1.example.net and caller", "is older"]);
    older.wait_logged(SOON, &["has our identity and caller too, and stands by"]);
    let fleet = scene.fleet(50);
    fleet.wait_all_provisioned(within(SOON)).unwrap();
    assert_eq!(younger.metrics().with("gate_closed", "standby"), 1.0);
    assert_eq!(younger.metric("discover_cycles"), 0.0);
    let (status, body) = younger.get("/readyz").unwrap();
    assert!(status == 200 && body.contains("give each daemon an identity of its own"), "{body}");
    assert!(older.stop().success());
    scene.wait_acts(&younger);
    scene.more(20).wait_all_provisioned(within(SOON)).unwrap();
}

#[test]
fn beside_a_leader_one_that_would_share_the_nodes_stands_by() {
    let scene = Scene::start();
    scene.streams.make_bucket(Duration::from_secs(5));
    let mut leader =
        scene.daemon("p1").without("active_active").set("leader_election", true).start();
    wait_until(SOON, "it leads", || leader.metric("leader") > 0.0);
    let active = scene.daemon("p2").start();
    active.wait_logged(SOON, &["p1.example.net leads an election"]);
    leader.wait_logged(SOON, &["p2.example.net provisions without an election"]);
    let fleet = scene.fleet(50);
    fleet.wait_all_provisioned(within(SOON)).unwrap();
    assert_eq!(active.metric("discover_cycles"), 0.0, "it has done nothing");
    assert_eq!(active.metrics().with("gate_closed", "standby"), 1.0);
    assert!(leader.stop().success());
    scene.wait_acts(&active);
}

#[test]
fn what_is_no_message_of_a_peer_is_counted_and_changes_nothing() {
    let scene = Scene::start();
    let daemons = scene.daemons(&["p1"]);
    let member = scene.member();
    let say = |payload: &[u8]| member.publish(&peers(), payload);
    let (_subscription, heard) = member.watch(peers().as_str());
    let heard = heard.recv_timeout(SOON).expect("it says that it is there");
    let own = beat_of(&heard, "p1").expect("nobody else is there");
    let mut random = fastrand::Rng::with_seed(7);
    for _ in 0..2_000 {
        let mut garbage = heard.payload.clone();
        for _ in 0..random.usize(1..5) {
            let at = random.usize(..garbage.len());
            garbage[at] = random.u8(..);
        }
        say(&garbage);
    }
    say(&vec![b'x'; 100_000]);
    say(b"");
    say(&"[".repeat(4_000).into_bytes());
    // Somebody claims to be this very process, with heartbeats it never sent.
    for number in 1_000..1_100 {
        say(&Heartbeat { number, leaving: true, ..own.clone() }.encode());
    }
    member.settle();
    wait_until(SOON, "they are counted", || {
        let metrics = daemons[0].metrics();
        let ignored = |kind| metrics.with("peer_messages_ignored_total", kind);
        ignored("malformed") > 100.0 && ignored("oversized") == 1.0 && ignored("forged") >= 100.0
    });
    assert!(daemons[0].metric("peers") <= 64.0);
    // Whoever it was made to believe in is forgotten.
    wait_until(LISTENED, "it is alone", || daemons[0].metric("share_ratio") == 1.0);
    scene.fleet(20).wait_all_provisioned(within(SOON)).unwrap();
}

#[test]
fn a_daemon_whose_heartbeats_the_broker_does_not_pass_on_begins_nothing_and_says_why() {
    let scene = Scene::start();
    let daemon = scene
        .daemon("p1")
        .without("broker_provisioning_password")
        .choria("plugin.nats.user", "node")
        .choria("plugin.nats.pass", "node")
        .start();
    daemon.wait_logged(SOON, &["our own heartbeats don't come back"]);
    let (status, body) = daemon.get("/readyz").unwrap();
    assert!(status == 503 && body.contains("choria.provisioner.peer"), "{body}");
    assert_eq!(daemon.metric("discover_cycles"), 0.0);
}

#[test]
fn with_each_daemon_more_all_is_done_sooner_where_the_helper_takes_the_time() {
    // The slow ones are measured, one after the other; the others show that all of it works.
    let nodes = if is_slow() { 2_000 } else { 120 };
    let cases = [&["p1"][..], &["p1", "p2"], &["p1", "p2", "p3"]];
    if is_slow() {
        cases.into_iter().for_each(|names| check_speed(names, nodes));
    } else {
        thread::scope(|scope| {
            for names in cases {
                scope.spawn(move || check_speed(names, nodes));
            }
        });
    }
}

/// Each of several daemons does its share; says how fast they are together.
fn check_speed(names: &[&str], nodes: usize) {
    let helper = SLOW_HELPER.replace("sleep 0.2", "sleep 0.1");
    let scene = Scene::start();
    let fleet = scene.fleet(nodes);
    let start = |name: &&str| scene.daemon(name).helper(&helper).start();
    let daemons: Vec<Daemon> = names.iter().map(start).collect();
    wait_until(LISTENED, "the first one acts", || {
        daemons.iter().any(|daemon| daemon.metric("share_ratio") > 0.0)
    });
    let listened = Instant::now();
    fleet.wait_all_provisioned(within(10 * SOON)).expect("nothing keeps them from it");
    let took = listened.elapsed();
    let speed = nodes as f64 / took.as_secs_f64();
    eprintln!("{} daemons: {nodes} nodes in {took:.1?}, {speed:.1} a second", names.len());
    check_once(&fleet);
    check_shared(&daemons, nodes);
}

/// Whether the slow tests run, too.
fn is_slow() -> bool {
    env::var_os("SLOW_TESTS").is_some()
}

/// Nobody was configured more than once.
#[track_caller]
fn check_once(fleet: &Fleet) {
    for node in fleet.iter() {
        assert_eq!(node.times_configured(), 1, "{}", node.describe());
    }
}

/// Each of them did something, and together they did all.
#[track_caller]
fn check_shared(daemons: &[Daemon], nodes: usize) {
    let done = || daemons.iter().map(|daemon| daemon.metric("provisioned"));
    wait_until(SOON, "all are counted", || done().sum::<f64>() >= nodes as f64);
    let done: Vec<f64> = done().collect();
    assert!(done.iter().sum::<f64>() == nodes as f64, "{done:?}");
    assert!(done.iter().all(|done| *done > 0.0), "{done:?}");
}

struct Scene {
    streams: Streams,
}

impl Scene {
    fn start() -> Scene {
        Scene { streams: Streams::start() }
    }

    fn daemon(&self, name: &str) -> common::Builder {
        member(&self.streams, name).set("active_active", true)
    }

    /// Daemons that know one another, and act.
    fn daemons(&self, names: &[&str]) -> Vec<Daemon> {
        self.daemons_with(names, |daemon| daemon)
    }

    fn daemons_with(
        &self,
        names: &[&str],
        more: impl Fn(common::Builder) -> common::Builder,
    ) -> Vec<Daemon> {
        let daemons: Vec<Daemon> =
            names.iter().map(|name| more(self.daemon(name)).start()).collect();
        for daemon in &daemons {
            self.wait_acts(daemon);
        }
        daemons
    }

    fn wait_acts(&self, daemon: &Daemon) {
        wait_until(LISTENED, "it acts", || daemon.metric("share_ratio") > 0.0);
        daemon.wait_ready();
    }

    /// Somebody who may do what provisioners may.
    fn member(&self) -> Member {
        Member::of_provisioners(&self.streams.broker.address())
    }

    fn fleet(&self, nodes: usize) -> Fleet {
        Fleet::builder(&self.streams.broker.url()).provisioners(3).nodes(nodes).start()
    }

    /// Nodes that were not there before.
    fn more(&self, nodes: usize) -> Fleet {
        let mut fleet = Fleet::builder(&self.streams.broker.url()).provisioners(3);
        for number in 0..nodes {
            fleet = fleet.node(&format!("later{number}.example.net"));
        }
        fleet.start()
    }
}

/// The heartbeat of the daemon of that name, if it is one.
fn beat_of(heard: &Heard, name: &str) -> Option<Heartbeat> {
    let Ok(Said::Heartbeat(beat)) = peer::read(&heard.payload) else { return None };
    let identity = format!("{name}.example.net");
    (heard.subject == peers().as_str() && beat.sender.identity.as_str() == identity).then_some(beat)
}
