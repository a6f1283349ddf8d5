//! What becomes of a node when something happens to the daemon, at every step of the node's way: one table.
//!
//! One daemon for each event: at the moment of it there is a node at every step, each held there until the event has
//! happened. They have one permit among them, which the helper's node uses, so that others wait in front of it.

mod common;
mod fleet;

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use choria_provisioner::fleet::prober::QUICK_MIN;
use serde_json::Value;

use common::admin::say;
use common::cluster::Scene;
use common::{Builder, Daemon, SOON, wait_until};
use fleet::issuer::Organization;
use fleet::{Action, Fault, Fleet, streams, unix_now};

use End::{Dropped, Finished, Kept};
use Event::{ConnectionLost, LeadershipLost, Pause, SecondSigterm, Sigterm};
use Step::{Asked, Helper, Probed, Queued, Ready, Settling, Waiting};

/// Where a node is on its way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    /// Behind others in front of the prober.
    Queued,
    /// The prober has asked it for its inventory.
    Probed,
    /// It has told its inventory and waits for a permit.
    Ready,
    /// A worker has asked it for this.
    Asked(Action),
    /// The helper has been asked about it.
    Helper,
    /// It was configured a moment ago.
    Settling,
    /// Another provisioner has its lock, and it is left alone for a while.
    Waiting,
}

/// What happens to the daemon.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Event {
    Sigterm,
    /// The first one came a moment before.
    SecondSigterm,
    /// An operator's.
    Pause,
    LeadershipLost,
    /// The broker is killed, and comes back.
    ConnectionLost,
}

/// What becomes of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    /// It is provisioned, or updates itself, all the same.
    Finished,
    /// It stays where it is, and goes on from there when the cause is gone.
    Kept,
    /// Nothing is asked of it any more, and it is not known any more.
    Dropped,
}

const EVENTS: [Event; 5] = [Sigterm, SecondSigterm, Pause, LeadershipLost, ConnectionLost];

#[rustfmt::skip]
const TABLE: [(Step, [End; EVENTS.len()]); 12] = [
    //                              SIGTERM,  a second, a pause,  leader no more, no connection
    (Queued,                       [Dropped,  Dropped,  Kept,     Dropped,        Kept]),
    (Probed,                       [Dropped,  Dropped,  Kept,     Dropped,        Kept]),
    (Ready,                        [Dropped,  Dropped,  Kept,     Dropped,        Kept]),
    (Asked(Action::Jwt),           [Finished, Dropped,  Finished, Dropped,        Finished]),
    (Asked(Action::Gen25519),      [Finished, Dropped,  Finished, Dropped,        Finished]),
    (Asked(Action::GenCsr),        [Finished, Dropped,  Finished, Dropped,        Finished]),
    (Helper,                       [Finished, Dropped,  Finished, Dropped,        Finished]),
    (Asked(Action::ReleaseUpdate), [Finished, Dropped,  Finished, Finished,       Finished]),
    (Asked(Action::Configure),     [Finished, Dropped,  Finished, Dropped,        Finished]),
    (Asked(Action::Restart),       [Finished, Dropped,  Finished, Finished,       Finished]),
    (Settling,                     [Dropped,  Dropped,  Kept,     Dropped,        Kept]),
    (Waiting,                      [Dropped,  Dropped,  Kept,     Dropped,        Kept]),
];

#[test]
fn the_first_sigterm_lets_running_nodes_finish_and_drops_the_others() {
    check(Sigterm, |moment| {
        moment.daemon.terminate();
        moment.daemon.wait_logged(SOON, &["Shutting down"]);
        moment.let_go();
        assert!(moment.daemon.wait(SOON).success());
    });
}

#[test]
fn a_second_sigterm_drops_every_node() {
    check(SecondSigterm, |moment| {
        moment.daemon.terminate();
        moment.daemon.wait_logged(SOON, &["Shutting down"]);
        moment.daemon.terminate();
        moment.daemon.wait(SOON);
        moment.let_go();
    });
}

#[test]
fn an_operators_pause_lets_running_nodes_finish_and_keeps_the_others() {
    check(Pause, |moment| {
        say(&moment.daemon, &["pause"]);
        moment.let_go();
        moment.wait_for_workers();
    });
}

#[test]
fn lost_leadership_stops_running_nodes_before_their_next_step_and_drops_the_others() {
    check(LeadershipLost, |moment| {
        moment.scene.streams.ask(streams::KEY, b"");
        moment.daemon.wait_logged(SOON, &["Lost leadership"]);
        moment.let_go();
        moment.wait_for_workers();
    });
}

#[test]
fn a_lost_connection_is_waited_out() {
    check(ConnectionLost, |moment| {
        moment.scene.streams.broker.kill();
        wait_until(SOON, "it is noticed", || moment.daemon.metric("broker_connected") == 0.0);
        // What nodes had said went with the connection.
        moment.fleet.go_on_without();
        moment.let_the_helper_go();
    });
}

/// A daemon with a node at every step.
struct Moment {
    scene: Scene,
    daemon: Daemon,
    fleet: Fleet,
    /// The rows of the table that are looked at.
    steps: Vec<Step>,
    /// How often each node had been asked for anything.
    asked: Vec<u32>,
}

/// Lets `happen` happen with a node at every step, and looks what becomes of each.
fn check(event: Event, happen: impl Fn(&mut Moment) + Sync) {
    // Nodes are enrolled one way or the other.
    let happen: &(dyn Fn(&mut Moment) + Sync) = &happen;
    thread::scope(|scope| {
        for enrollment in [Action::GenCsr, Action::Gen25519] {
            scope.spawn(move || Moment::come(event, enrollment).check_all(event, happen));
        }
    });
}

impl Moment {
    /// Brings a node to each step, the ones that keep others out last.
    fn come(event: Event, enrollment: Action) -> Moment {
        let others =
            [Action::GenCsr, Action::Gen25519].into_iter().find(|other| *other != enrollment);
        let is_there = |step: &Step| *step != Asked(others.expect("there are two"));
        let steps: Vec<Step> = TABLE.iter().map(|(step, _)| *step).filter(is_there).collect();

        let scene = Scene::start(LONG);
        let organization = Organization::new();
        // A paused leader would leave all others to another.
        let builder = settings(scene.daemon("p1").set("leader_election", event != Pause));
        let builder = match enrollment {
            Action::Gen25519 => of(&organization, builder),
            _ => builder.feature("pki", "true"),
        };
        let daemon = builder.start();
        daemon.wait_ready();
        let mut fleet = Fleet::builder(&scene.streams.broker.url()).version("0.30.2").upgradable();
        fleet = fleet.discoverable(false).restart_delay(Duration::ZERO);
        fleet = match enrollment {
            Action::Gen25519 => fleet.organization(&organization),
            _ => fleet.pki(),
        };
        for step in &steps {
            fleet = match *step {
                Probed => fleet.broken(&name(Probed), Fault::Holds(Action::Inventory)),
                Asked(action) => fleet.broken(&name(*step), Fault::Holds(action)),
                Waiting => fleet.broken(&name(Waiting), Fault::Locked),
                Helper | Settling => fleet.node(&name(*step)),
                Queued | Ready => fleet,
            };
        }
        for number in 0..CROWD {
            fleet = fleet.node(&crowd(number));
        }
        let moment = Moment { scene, daemon, fleet: fleet.start_quietly(), steps, asked: vec![] };
        moment.arrive()
    }

    fn arrive(mut self) -> Moment {
        let Moment { daemon, fleet, .. } = &self;
        for (step, state) in [(Settling, "settling"), (Waiting, "waiting")] {
            fleet.announce_identities([name(step).as_str()]);
            wait_until(SOON, state, || self.state(&name(step)).as_deref() == Some(state));
        }
        for step in self.steps.iter().filter(|step| matches!(step, Asked(_) | Probed)) {
            fleet.announce_identities([name(*step).as_str()]);
            wait_until(SOON, "it is asked", || fleet.named(&name(*step)).is_holding());
        }
        fleet.announce_identities([name(Helper).as_str()]);
        wait_until(SOON, "the helper runs", || daemon.dir().join(BEGUN).exists());
        // Of those that come now some have told their inventory before there is no more room.
        let crowd: Vec<String> = (0..CROWD).map(crowd).collect();
        fleet.announce_identities(crowd.iter().map(String::as_str));
        wait_until(SOON, "all are known", || {
            crowd.iter().all(|name| self.state(name).as_deref() == Some("queued"))
        });
        wait_until(SOON, "the prober has no more room", || {
            daemon.metric("ready_nodes") == READY as f64
        });
        assert_eq!((self.at(Ready).len(), self.at(Queued).len()), (READY, CROWD - READY));
        let asked = fleet.iter().map(|node| node.times_asked_at_all()).collect();
        self.asked = asked;
        self
    }

    /// The nodes that are, or were, at this step.
    fn at(&self, step: Step) -> Vec<String> {
        let is_asked = |name: &String| self.fleet.named(name).times_asked_at_all() > 0;
        match step {
            Ready => (0..CROWD).map(crowd).filter(is_asked).collect(),
            Queued => (0..CROWD).map(crowd).filter(|name| !is_asked(name)).collect(),
            step => vec![name(step)],
        }
    }

    /// What must become of the node at each step.
    fn rows(&self, event: Event) -> Vec<(Step, End)> {
        let column = EVENTS.iter().position(|it| *it == event).expect("it has a column");
        let rows = TABLE.iter().filter(|(step, _)| self.steps.contains(step));
        rows.map(|(step, ends)| (*step, ends[column])).collect()
    }
}

impl Moment {
    fn check_all(mut self, event: Event, happen: &dyn Fn(&mut Moment)) {
        happen(&mut self);
        let rows = self.rows(event);
        let is_while_it_lasts = |end: End| event != ConnectionLost || end == Kept;
        for (step, end) in rows.iter().filter(|(_, end)| is_while_it_lasts(*end)) {
            self.check(*step, *end);
        }
        match event {
            Sigterm | SecondSigterm | LeadershipLost => return,
            Pause => drop(say(&self.daemon, &["resume"])),
            ConnectionLost => self.scene.streams.broker.restart(),
        }
        for (step, _) in rows {
            self.check_afterwards(step);
        }
    }

    /// Whether that has become of the node, while what has happened lasts.
    #[track_caller]
    fn check(&mut self, step: Step, end: End) {
        for name in self.at(step) {
            let what = format!("{step:?}, {end:?}: {}", self.fleet.named(&name).describe());
            let is_alive = self.daemon.is_alive();
            match end {
                Finished => self.daemon.wait_logged(SOON, &[&format!("Provisioned {name}")]),
                Dropped | Kept => {
                    assert_eq!(self.times_asked(&name), self.asked_before(&name), "{what}");
                    let is_done = self.daemon.logged(&[&format!("Provisioned {name}")]);
                    assert_eq!(is_done, step == Settling, "{what}");
                    let state = is_alive.then(|| self.state(&name)).flatten();
                    let expected = (end == Kept).then(|| state_at(step).to_owned());
                    assert_eq!(state, expected, "{what}");
                }
            }
        }
    }

    /// Whether the node is where it belongs when what has happened is over.
    #[track_caller]
    fn check_afterwards(&self, step: Step) {
        for name in self.at(step) {
            match step {
                Settling | Waiting => {
                    assert_eq!(self.state(&name).as_deref(), Some(state_at(step)), "{step:?}");
                }
                _ => self.daemon.wait_logged(UPDATE_MAX, &[&format!("Provisioned {name}")]),
            }
        }
    }

    fn times_asked(&self, name: &str) -> u32 {
        self.fleet.named(name).times_asked_at_all()
    }

    fn asked_before(&self, name: &str) -> u32 {
        let mut nodes = self.fleet.iter().zip(&self.asked);
        let asked = nodes.find_map(|(node, asked)| (node.identity() == name).then_some(*asked));
        asked.expect("it is one of ours")
    }

    /// What the daemon says where the node is; nothing if it does not know it.
    fn state(&self, name: &str) -> Option<String> {
        let status = self.status(&format!("?state=all&limit=1000&name={name}"));
        let nodes = status["nodes"]["nodes"].as_array().expect("a list");
        let node = nodes.iter().find(|node| node["node"] == name)?;
        Some(node["state"].as_str().expect("a word").to_owned())
    }

    fn status(&self, query: &str) -> Value {
        let (code, text) = self.daemon.get(&format!("/status.json{query}")).expect("it answers");
        assert_eq!(code, 200, "{text}");
        serde_json::from_str(&text).expect("it is JSON")
    }

    /// Nothing is held any more, neither at nodes nor in the helper.
    fn let_go(&self) {
        self.fleet.go_on();
        self.let_the_helper_go();
    }

    fn let_the_helper_go(&self) {
        fs::write(self.daemon.dir().join(GO_ON), "").expect("the folder is ours");
    }

    fn wait_for_workers(&self) {
        wait_until(SOON, "no node is in hand", || self.status("")["counts"]["working"] == 0);
    }
}

/// The settings that all need.
fn settings(builder: Builder) -> Builder {
    let helper = helper(builder.dir());
    builder
        .helper(&helper)
        .set("workers", 1)
        // Nothing is given up while the test looks on.
        .set("probe_timeout", "1m")
        .set("helper_timeout", "5m")
        .set("node_timeout", "10m")
        .set("upgrades_repository", "https://repo.example.net/choria")
        .feature("upgrades", "true")
}

/// More of them, for nodes of an organization.
fn of(organization: &Organization, builder: Builder) -> Builder {
    let signer = organization.chain_issuer(unix_now());
    let write = |name: &str, content: &str| -> PathBuf {
        let path = builder.dir().join(name);
        fs::write(&path, content).expect("the folder is ours");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).expect("the file is ours");
        path
    };
    let key = write("signer.seed", &signer.seed);
    let token = write("signer.jwt", &signer.token);
    builder
        .feature("ed25519", "true")
        .set("jwt_verify_cert", organization.public_key())
        .set("jwt_signing_key", key.display())
        .set("jwt_signing_token", token.display())
}

/// Wants an update for one node, and waits when it is asked about another.
fn helper(folder: &Path) -> String {
    let (begun, go_on) = (folder.join(BEGUN), folder.join(GO_ON));
    let (begun, go_on) = (begun.display(), go_on.display());
    let (waits, updates) = (name(Helper), name(Asked(Action::ReleaseUpdate)));
    format!(
        r#"#!/bin/sh
IFS= read -r input
case $input in
*'"identity":"{waits}"'*)
    : >{begun}
    while [ ! -e {go_on} ]; do sleep 0.05; done ;;
*'"identity":"{updates}"'*)
    update='"upgrade":"0.31.0",' ;;
esac
printf '{{%s"configuration":{{"plugin.choria.server.provision":"0"}}}}\n' "$update"
"#
    )
}

/// The node at a step; those in front of the prober and behind it are of a crowd.
fn name(step: Step) -> String {
    let word = match step {
        Asked(action) => action.name(),
        Probed => "probed",
        Helper => "helper",
        Settling => "settling",
        Waiting => "waiting",
        Queued | Ready => unreachable!("there are many"),
    };
    format!("{}.example.net", word.replace('_', "-"))
}

fn crowd(number: usize) -> String {
    format!("crowd-{number}.example.net")
}

/// The word for where a node is that stays at this step.
fn state_at(step: Step) -> &'static str {
    match step {
        Queued | Probed | Ready => "queued",
        Settling => "settling",
        Waiting => "waiting",
        Asked(_) | Helper => "working",
    }
}

/// Longer than any test waits: a key that was taken away comes to nobody else.
const LONG: Duration = Duration::from_secs(600);
/// A node that does not say what became of an update is given the time of a slow download, twice of it on a busy machine.
const UPDATE_MAX: Duration = Duration::from_secs(60);
/// As many as may have told their inventory and wait.
const READY: usize = QUICK_MIN;
/// More than that.
const CROWD: usize = 36;

/// In the daemon's folder: what tells that the helper has begun, and that it may go on.
const BEGUN: &str = "begun";
const GO_ON: &str = "go-on";
