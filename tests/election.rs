//! Of several daemons one provisions: a real broker with the accounts of Choria's and a bucket for the election.

mod common;
mod fleet;

use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use common::admin::{say, say_json};
use common::cluster::{SLOW_HELPER, Scene, WORKERS};
use common::{Daemon, SOON, wait_until, within};
use fleet::streams::{self, Heard, Member};

/// Longer than any test waits: whoever leads before that was handed the key.
const LONG: Duration = Duration::from_secs(600);
/// The shortest that leaves a daemon room to be late on a busy machine.
const SHORT: Duration = Duration::from_secs(5);

#[test]
fn of_two_daemons_one_leads_and_the_other_is_ready_to() {
    let scene = Scene::start(SHORT);
    let first = scene.leader("p1");
    let second = scene.candidate("p2");
    assert!(second.metrics().with("gate_closed", "standby") > 0.0);
    assert!(second.metric("paused") > 0.0);
    assert!(second.metric("lease_remaining_seconds") == 0.0);
    wait_until(SOON, "it has a lease", || first.metric("lease_remaining_seconds") > 0.0);
    assert_eq!(second.get("/readyz").unwrap().0, 200, "it stands by on purpose");
    let fleet = scene.fleet(20);
    fleet.wait_all_provisioned(within(SOON)).unwrap();
    wait_until(SOON, "all are counted", || first.metric("provisioned") >= 20.0);
    assert!(second.metric("provisioned") == 0.0 && second.metric("discover_cycles") == 0.0);
    let scrape = first.get("/metrics").unwrap().1;
    let identity = "election=\"provisioner\",identity=\"p1.example.net\"";
    assert!(scrape.contains(&format!("choria_election_leader{{{identity}}} 1")), "{scrape}");
    for state in ["candidate", "leader"] {
        let campaigns = format!("choria_election_campaigns{{{identity},state=\"{state}\"}}");
        assert!(scrape.contains(&campaigns), "{scrape}");
    }
}

#[test]
fn a_leader_that_is_stopped_finishes_its_nodes_and_hands_over() {
    let scene = Scene::start(LONG);
    let mut first = scene.leader_with("p1", |daemon| daemon.helper(SLOW_HELPER));
    let second = scene.candidate("p2");
    let fleet = scene.fleet(40);
    wait_until(SOON, "it is in the middle", || {
        first.metric("provisioned") > 0.0 && first.metric("busy_workers") > 0.0
    });
    assert!(first.stop().success());
    let stopped = Instant::now();
    scene.wait_leads(&second);
    eprintln!("led {:?} after the former leader's end", stopped.elapsed());
    fleet.wait_all_provisioned(within(SOON)).unwrap();
    for node in fleet.iter() {
        assert_eq!(node.times_configured(), 1, "{}", node.describe());
    }
}

#[test]
fn a_leader_that_is_killed_is_followed_when_its_key_has_died() {
    let scene = Scene::start(SHORT);
    let first = scene.leader("p1");
    let second = scene.candidate("p2");
    signal(&first, Signal::KILL);
    let killed = Instant::now();
    scene.wait_leads(&second);
    eprintln!("led {:?} after the former leader was killed", killed.elapsed());
    scene.fleet(20).wait_all_provisioned(within(SOON)).unwrap();
}

#[test]
fn a_leader_that_was_frozen_sends_nothing_as_leader_when_it_wakes_up() {
    let scene = Scene::start(SHORT);
    let first = scene.leader_with("p1", |daemon| daemon.helper(SLOW_HELPER));
    let second = scene.candidate("p2");
    let fleet = scene.fleet(200);
    wait_until(SOON, "it is in the middle", || {
        first.metric("provisioned") > 0.0 && first.metric("busy_workers") > 0.0
    });
    signal(&first, Signal::STOP);
    scene.wait_leads(&second);
    let provisioners = Member::of_provisioners(&scene.streams.broker.address());
    let (_subscription, requests) = provisioners.watch("provisioning.>");
    signal(&first, Signal::CONT);
    first.wait_logged(SOON, &["Lost leadership"]);
    // A node in hand keeps its lock for two minutes.
    fleet.wait_provisioned(200 - WORKERS, within(SOON)).unwrap();
    assert!(first.metric("leader") == 0.0);
    let senders: Vec<String> =
        requests.try_iter().filter_map(|heard: Heard| heard.sender()).collect();
    assert!(senders.iter().any(|sender| sender == "p2.example.net"), "{senders:?}");
    assert!(!senders.iter().any(|sender| sender == "p1.example.net"), "the woken one acted");
}

#[test]
fn a_bucket_that_comes_later_is_found_and_its_lack_shows_in_readiness() {
    let scene = Scene::without_bucket();
    let daemon = scene.daemon("p1").start();
    wait_until(SOON, "readiness says why", || {
        let (status, body) = daemon.get("/readyz").unwrap();
        status == 503
            && body.contains("stream not found")
            && body.contains("there is no bucket CHORIA_LEADER_ELECTION: ")
            && body.contains("`nats kv add CHORIA_LEADER_ELECTION ")
    });
    daemon.wait_logged(SOON, &["The election can't be held", "there is no bucket "]);
    let why = "standing by until the election can be held";
    daemon.wait_logged(SOON, &["Skipping discovery while paused", why]);
    let another = "while another instance provisions";
    assert!(!daemon.logged(&[another]), "there is none: {}", daemon.log());
    scene.streams.make_bucket(SHORT);
    scene.wait_leads(&daemon);
    assert_eq!(daemon.get("/readyz").unwrap().0, 200);
    scene.fleet(5).wait_all_provisioned(within(SOON)).unwrap();
}

#[test]
fn a_broker_that_forbids_the_key_is_named_in_readiness_until_it_allows_it() {
    let mut scene = Scene::start(SHORT);
    scene.streams.edit(|config| {
        config.replace(
            "{user: provisioner, ",
            "{user: provisioner, permissions: {publish: {deny: \"choria.streams.$KV.>\"}}, ",
        )
    });
    let daemon = scene.daemon("p1").start();
    wait_until(SOON, "readiness says why", || {
        let (status, body) = daemon.get("/readyz").unwrap();
        status == 503 && body.contains("Permissions Violation for Publish to \"choria.streams.")
    });
    daemon
        .wait_logged(SOON, &["The election can't be held", "the broker did not answer within 2s"]);
    assert!(daemon.metric("leader") == 0.0 && daemon.metric("discover_cycles") == 0.0);
    scene.streams.edit(str::to_owned);
    scene.wait_leads(&daemon);
}

#[test]
fn an_operators_pause_gives_leadership_away_and_outlives_elections_and_reconnects() {
    let mut scene = Scene::start(SHORT);
    let first = scene.leader("p1");
    let mut second = scene.candidate("p2");
    say(&first, &["pause"]);
    scene.wait_leads(&second);
    // The key is free again, and nobody else is there to take it.
    assert!(second.stop().success());
    scene.streams.broker.restart();
    wait_until(SOON, "it is connected again", || first.metric("broker_reconnects_total") >= 1.0);
    let third = scene.daemon("p3").start();
    scene.wait_leads(&third);
    assert!(first.metric("leader") == 0.0 && first.metrics().with("gate_closed", "operator") > 0.0);
    signal(&third, Signal::KILL);
    say(&first, &["resume"]);
    scene.wait_leads(&first);
    scene.fleet(5).wait_all_provisioned(within(SOON)).unwrap();
}

#[test]
fn a_leader_keeps_its_term_while_its_broker_is_restarted() {
    let mut scene = Scene::start(LONG);
    let first = scene.leader_with("p1", |daemon| daemon.helper(SLOW_HELPER));
    let second = scene.candidate("p2");
    let fleet = scene.fleet(40);
    wait_until(SOON, "it is in the middle", || {
        first.metric("provisioned") > 0.0 && first.metric("busy_workers") > 0.0
    });
    scene.streams.broker.restart();
    let back = Instant::now();
    first.wait_logged(SOON, &["Leadership has to be confirmed"]);
    scene.wait_leads(&first);
    eprintln!("led {:?} after the broker's restart", back.elapsed());
    fleet.wait_all_provisioned(within(LONG)).unwrap();
    assert!(!first.logged(&["Lost leadership"]), "the key was its own all the time");
    assert!(second.metric("leader") == 0.0);
}

#[test]
fn a_key_that_an_operator_takes_away_ends_the_leadership() {
    let scene = Scene::start(SHORT);
    let daemon = scene.leader("p1");
    scene.streams.ask(streams::KEY, b"");
    daemon.wait_logged(SOON, &["Lost leadership", "wrong last sequence"]);
    assert_eq!(daemon.get("/readyz").unwrap().0, 200, "that is how an election goes");
    scene.wait_leads(&daemon);
}

#[test]
fn a_leader_steps_down_on_an_operators_wish_when_its_nodes_are_finished() {
    let scene = Scene::start(LONG);
    let first = scene.leader_with("p1", |daemon| daemon.helper(SLOW_HELPER));
    let second = scene.candidate("p2");
    assert_eq!(say(&second, &["step-down"]), "It does not lead.\n");
    let fleet = scene.fleet(40);
    wait_until(SOON, "it is in the middle", || {
        first.metric("provisioned") > 0.0 && first.metric("busy_workers") > 0.0
    });
    let said = say(&first, &["step-down"]);
    assert!(
        said.starts_with("It steps down when ") && said.contains(" are finished. If no other "),
        "{said}"
    );
    scene.wait_leads(&second);
    fleet.wait_all_provisioned(within(SOON)).unwrap();
    for node in fleet.iter() {
        assert_eq!(node.times_configured(), 1, "{}", node.describe());
    }
    assert!(first.metric("leader") == 0.0 && second.metric("provisioned") > 0.0);
    // And back again. Of the last node it may not have been written down yet that it is done.
    let said = say(&second, &["step-down"]);
    assert!(said.starts_with("It steps down"), "{said}");
    scene.wait_leads(&first);
}

#[test]
fn a_leader_that_steps_down_with_nobody_there_says_so_and_leads_again_long_before_its_key_dies() {
    let scene = Scene::start(LONG);
    let daemon = scene.leader("p1");
    let said = say(&daemon, &["step-down"]);
    assert!(said.contains("If no other daemon takes over within 3s, it leads again."), "{said}");
    wait_until(SOON, "it tells that it stepped down", || {
        let status = say_json(&daemon, &["status"]);
        let why = status["closed_by"][0]["text"].as_str().unwrap_or_default();
        status["election"] == "stepped_down"
            && why.starts_with("stepped down: takes the lead back in ")
            && why.ends_with(" unless another takes over")
    });
    scene.wait_leads(&daemon);
    let status = say(&daemon, &["status"]);
    assert!(status.contains("\nElection    leader\n"), "{status}");
    let second = scene.candidate("p2");
    let status = say(&second, &["status"]);
    let why = "\nWhy         standing by while another instance provisions\n";
    assert!(status.contains(why), "{status}");
    assert!(
        status.contains("\nElection    candidate, another instance has the lead\n"),
        "{status}"
    );
}

#[test]
fn a_candidate_that_is_stopped_ends_at_once_and_takes_no_key() {
    let scene = Scene::start(SHORT);
    let first = scene.leader("p1");
    let mut second = scene.candidate("p2");
    assert!(second.stop().success());
    assert!(first.metric("leader") > 0.0 && !first.logged(&["Lost leadership"]));
}

fn signal(daemon: &Daemon, signal: Signal) {
    let pid = i32::try_from(daemon.pid()).ok().and_then(Pid::from_raw);
    kill_process(pid.expect("a process has a number"), signal).expect("it is our child");
}
