//! Of several daemons one provisions: a real broker with the accounts of Choria's and a bucket for the election.

mod common;
mod fleet;

use std::sync::Arc;
use std::time::{Duration, Instant};

use choria_provisioner::protocol::subject::Pattern;
use choria_provisioner::transport::connection::Connection;
use choria_provisioner::transport::{Subscription, Transport};
use crossbeam_channel::{Receiver, unbounded};
use rustix::process::{Pid, Signal, kill_process};

use common::admin::{say, with_socket};
use common::streams::{Streams, connect};
use common::{Daemon, SOON, wait_until, within};
use fleet::Fleet;

/// Longer than any test waits: whoever leads before that was handed the key.
const LONG: Duration = Duration::from_secs(600);
/// How many nodes a daemon has in hand.
const WORKERS: usize = 4;
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
    let (_subscription, requests) = scene.watch("provisioning.>");
    signal(&first, Signal::CONT);
    first.wait_logged(SOON, &["Lost leadership"]);
    // A node in hand keeps its lock for two minutes.
    fleet.wait_provisioned(200 - WORKERS, within(SOON)).unwrap();
    assert!(first.metric("leader") == 0.0);
    let senders: Vec<String> = requests.try_iter().filter_map(|payload| sender(&payload)).collect();
    assert!(senders.iter().any(|sender| sender == "p2.example.net"), "{senders:?}");
    assert!(!senders.iter().any(|sender| sender == "p1.example.net"), "the woken one acted");
}

#[test]
fn a_bucket_that_comes_later_is_found_and_its_lack_shows_in_readiness() {
    let scene = Scene::without_bucket();
    let daemon = scene.daemon("p1").start();
    wait_until(SOON, "readiness says why", || {
        let (status, body) = daemon.get("/readyz").unwrap();
        status == 503 && body.contains("stream not found")
    });
    daemon.wait_logged(SOON, &["The election can't be held", "stream not found"]);
    scene.streams.make_bucket(SHORT);
    scene.wait_leads(&daemon);
    assert_eq!(daemon.get("/readyz").unwrap().0, 200);
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
    scene.streams.ask("$KV.CHORIA_LEADER_ELECTION.provisioner", b"");
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
        said.starts_with("It steps down when ") && said.ends_with(" are finished.\n"),
        "{said}"
    );
    scene.wait_leads(&second);
    fleet.wait_all_provisioned(within(SOON)).unwrap();
    for node in fleet.iter() {
        assert_eq!(node.times_configured(), 1, "{}", node.describe());
    }
    assert!(first.metric("leader") == 0.0 && second.metric("provisioned") > 0.0);
    // And back again.
    assert_eq!(say(&second, &["step-down"]), "It steps down; no node is in work.\n");
    scene.wait_leads(&first);
}

#[test]
fn a_candidate_that_is_stopped_ends_at_once_and_takes_no_key() {
    let scene = Scene::start(SHORT);
    let first = scene.leader("p1");
    let mut second = scene.candidate("p2");
    assert!(second.stop().success());
    assert!(first.metric("leader") > 0.0 && !first.logged(&["Lost leadership"]));
}

/// Gives a stop something to wait for.
const SLOW_HELPER: &str = r#"#!/bin/sh
IFS= read -r input
identity=${input#*'"identity":"'}
identity=${identity%%'"'*}
sleep 0.2
printf '{"configuration":{"identity":"%s","plugin.choria.server.provision":"0"}}\n' "$identity"
"#;

/// A broker with the two accounts of a Choria Broker and Choria Streams.
struct Scene {
    streams: Streams,
}

impl Scene {
    fn start(ttl: Duration) -> Scene {
        let scene = Scene::without_bucket();
        scene.streams.make_bucket(ttl);
        scene
    }

    fn without_bucket() -> Scene {
        Scene { streams: Streams::start() }
    }

    /// What is sent to these subjects of the provisioning account from now on.
    fn watch(&self, pattern: &str) -> ((Subscription, Arc<Connection>), Receiver<Vec<u8>>) {
        let connection = connect(&self.streams.broker, "provisioner", "provSecret");
        let (sender, messages) = unbounded();
        let subscription = connection.subscribe(
            &Pattern::new(pattern).expect("a pattern"),
            Arc::new(move |message| drop(sender.send(message.payload))),
        );
        connection.flush(within(SOON)).expect("the broker is there");
        ((subscription, connection), messages)
    }

    fn daemon(&self, name: &str) -> common::Builder {
        let identity = format!("{name}.example.net");
        with_socket(Daemon::builder(&self.streams.broker.address()))
            .set("leader_election", true)
            .set("workers", WORKERS)
            .set("broker_provisioning_password", "provSecret")
            .choria("identity", &identity)
            .env("MCOLLECTIVE_CERTNAME", &identity)
    }

    fn leader(&self, name: &str) -> Daemon {
        self.leader_with(name, |daemon| daemon)
    }

    fn leader_with(
        &self,
        name: &str,
        more: impl FnOnce(common::Builder) -> common::Builder,
    ) -> Daemon {
        let daemon = more(self.daemon(name)).start();
        self.wait_leads(&daemon);
        daemon
    }

    /// One that knows that another leads.
    fn candidate(&self, name: &str) -> Daemon {
        let daemon = self.daemon(name).start();
        wait_until(SOON, "it is a candidate", || {
            let status = daemon.get("/status.json");
            status.is_ok_and(|(_, status)| status.contains("\"election\":\"candidate\""))
        });
        daemon
    }

    fn wait_leads(&self, daemon: &Daemon) {
        wait_until(SOON, "it leads", || daemon.metric("leader") > 0.0);
    }

    fn fleet(&self, nodes: usize) -> Fleet {
        let fleet = Fleet::builder(&self.streams.broker.url()).provisioners(2);
        fleet.nodes(nodes).start()
    }
}

/// Who sent a request, if it is one.
fn sender(payload: &[u8]) -> Option<String> {
    let transport: serde_json::Value = serde_json::from_slice(payload).ok()?;
    Some(transport["headers"]["mc_sender"].as_str()?.to_owned())
}

fn signal(daemon: &Daemon, signal: Signal) {
    let pid = i32::try_from(daemon.pid()).ok().and_then(Pid::from_raw);
    kill_process(pid.expect("a process has a number"), signal).expect("it is our child");
}
