//! How long nobody leads when a leader goes, behind `dist/failover`: several daemons, a broker with the accounts of a Choria
//! Broker, and somebody who writes down what is on the wire. It leaves no process and no file behind.

#[path = "mod.rs"]
mod fleet;
#[path = "rig.rs"]
mod rig;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

use argh::FromArgs;
use choria_provisioner::transport::Subscription;
use crossbeam_channel::Receiver;
use fleet::envelope::{Protocol, Request};
use fleet::streams::{self, Heard, Member};
use fleet::{Action, Fleet};
use rig::{Broker, Folder, Process, Settings, free_port, interrupted, median, say, scrape};
use rustix::process::Signal;

/// Measures how long nobody leads when a leader is stopped, dies, or is frozen, and when the broker is restarted.
#[derive(FromArgs)]
struct Arguments {
    /// the daemon's program
    #[argh(option)]
    daemon: PathBuf,

    /// the helper's command line
    #[argh(option)]
    helper: String,

    /// how often each is measured, 5 by default
    #[argh(option, default = "5")]
    rounds: usize,

    /// how long the key lives, in seconds, 10 by default
    #[argh(option, default = "10")]
    ttl: u64,

    /// only what has this in its title; everything by default
    #[argh(option, default = "String::new()")]
    only: String,

    /// another daemon's program: measures mixed pairs instead, one of each, while nodes appear
    #[argh(option)]
    beside: Option<PathBuf>,

    /// how many nodes appear around the death of a leader in a mixed pair, 300 by default
    #[argh(option, default = "300")]
    nodes: usize,

    /// the longest to wait for anything, in seconds, 300 by default
    #[argh(option, default = "300")]
    timeout: u64,
}

/// What is measured.
struct Scenario {
    title: &'static str,
    /// What its figure counts.
    figure: &'static str,
    /// The most it may be, beside the life of a key where it has to be waited for.
    goal: f64,
    waits_for_key: bool,
    measure: fn(&Arguments) -> Result<f64, String>,
}

const SCENARIOS: [Scenario; 4] = [
    Scenario {
        title: "the leader is stopped",
        figure: "seconds from the hand-over to the successor's first discovery",
        goal: 2.5,
        waits_for_key: false,
        measure: stopped,
    },
    Scenario {
        title: "the leader is killed",
        figure: "seconds to the successor's first discovery",
        goal: 3.0,
        waits_for_key: true,
        measure: killed,
    },
    Scenario {
        title: "the leader is frozen for two lives of the key, and woken",
        figure: "its messages to nodes after it was woken",
        goal: 0.0,
        waits_for_key: false,
        measure: frozen,
    },
    Scenario {
        title: "the broker is restarted",
        figure: "seconds from its end until the leader leads again",
        goal: 5.0,
        waits_for_key: false,
        measure: restarted,
    },
];

/// Nodes that are being provisioned when their leader is frozen: it must be in the middle of them.
const CROWD: usize = 3_000;
/// So many of them are provisioned before.
const UNDER_WAY: usize = 100;
/// How long is looked at what a woken leader sends: it has all of its threads do something.
const WOKEN: Duration = Duration::from_secs(5);
/// How many portions of nodes appear around a leader's death, and how far apart.
const PORTIONS: usize = 10;
const PORTION_EVERY: Duration = Duration::from_millis(1_500);
/// How often something is looked at that nobody tells us about.
const REFRESH: Duration = Duration::from_millis(5);

/// Takes over from the other, or leads first.
const FIRST: &str = "p1.example.net";
const SECOND: &str = "p2.example.net";

fn main() -> ExitCode {
    let arguments: Arguments = rig::arguments();
    let reached = match &arguments.beside {
        None => measure(&arguments),
        Some(other) => measure_mixed(&arguments, other),
    };
    rig::exit("failover", reached)
}

/// Prints a line for each scenario; `false` when one missed its goal.
fn measure(arguments: &Arguments) -> Result<bool, String> {
    let interrupted = interrupted()?;
    say("| what happens | figure | median | all | goal | load |");
    say("| --- | --- | --- | --- | --- | --- |");
    let mut reached = true;
    for scenario in SCENARIOS.iter().filter(|each| each.title.contains(&arguments.only)) {
        let mut figures = Vec::new();
        for _ in 0..arguments.rounds.max(1) {
            if interrupted() {
                return Err("interrupted".to_owned());
            }
            figures.push((scenario.measure)(arguments)?);
        }
        let key = if scenario.waits_for_key { arguments.ttl as f64 } else { 0.0 };
        let (goal, middle) = (scenario.goal + key, median(&figures));
        let is_reached = middle <= goal;
        reached &= is_reached;
        let all: Vec<String> = figures.iter().map(|figure| format!("{figure:.2}")).collect();
        say(&format!(
            "| {} | {} | {middle:.2} | {} | {goal}{} | {} |",
            scenario.title,
            scenario.figure,
            all.join(", "),
            if is_reached { "" } else { ", **missed**" },
            load()
        ));
    }
    Ok(reached)
}

/// From the moment a stopped leader says that its key is free.
fn stopped(arguments: &Arguments) -> Result<f64, String> {
    let scene = Scene::start(arguments)?;
    let [first, _second] = scene.pair([&arguments.daemon, &arguments.daemon])?;
    first.process.signal(Signal::TERM)?;
    let offer = scene.wire.wait("the key is not handed over", |heard| {
        heard.subject == "choria.provisioner.peer"
            && String::from_utf8_lossy(&heard.payload).contains(".handover")
    })?;
    Ok(scene.wire.discovery(SECOND)?.duration_since(offer).as_secs_f64())
}

/// From the moment a leader is killed.
fn killed(arguments: &Arguments) -> Result<f64, String> {
    let scene = Scene::start(arguments)?;
    let [first, _second] = scene.pair([&arguments.daemon, &arguments.daemon])?;
    first.process.signal(Signal::KILL)?;
    let killed = Instant::now();
    Ok(scene.wire.discovery(SECOND)?.duration_since(killed).as_secs_f64())
}

/// What a leader sends to nodes when it is woken after its key is another's.
fn frozen(arguments: &Arguments) -> Result<f64, String> {
    let scene = Scene::start(arguments)?;
    let [first, _second] = scene.pair([&arguments.daemon, &arguments.daemon])?;
    let fleet = scene.fleet(CROWD);
    wait(scene.deadline, "nodes are not provisioned", || fleet.provisioned() >= UNDER_WAY)?;
    first.process.signal(Signal::STOP)?;
    let stopped = Instant::now();
    if fleet.provisioned() >= CROWD {
        return Err("the leader was done before it could be frozen".to_owned());
    }
    scene.wire.discovery(SECOND)?;
    thread::sleep((stopped + 2 * scene.ttl).saturating_duration_since(Instant::now()));
    let woken = Instant::now();
    first.process.signal(Signal::CONT)?;
    thread::sleep(WOKEN);
    let late = scene.wire.all().into_iter().filter(|heard| {
        heard.at >= woken
            && heard.subject.starts_with("provisioning.")
            && heard.sender().as_deref() == Some(FIRST)
    });
    Ok(late.count() as f64)
}

/// From the end of a broker that comes back at once.
fn restarted(arguments: &Arguments) -> Result<f64, String> {
    let mut scene = Scene::start(arguments)?;
    let [first, _second] = scene.pair([&arguments.daemon, &arguments.daemon])?;
    let ended = Instant::now();
    scene.broker.restart(&scene.folder, &scene.config)?;
    // It does not lead before it has noticed, and then leads again.
    for leads in [false, true] {
        wait(scene.deadline, "the leader does not lead again", || first.leads() == Some(leads))?;
    }
    Ok(ended.elapsed().as_secs_f64())
}

/// Measures pairs of ours and another, each as the leader that dies; `false` when ours took too long, or a node was
/// configured twice.
fn measure_mixed(arguments: &Arguments, other: &Path) -> Result<bool, String> {
    let interrupted = interrupted()?;
    let ours = &arguments.daemon;
    let pairs = [("ours", "the other", ours.as_path(), other), ("the other", "ours", other, ours)];
    say(
        "| killed | takes over | seconds to its first discovery: median | all | goal | nodes | provisioned | configured twice | of those that the killed one had not restarted yet | load |",
    );
    say("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |");
    let mut reached = true;
    for (killed, successor, first, second) in pairs {
        let (mut figures, mut provisioned, mut twice, mut in_hand) = (Vec::new(), 0, Vec::new(), 0);
        for _ in 0..arguments.rounds.max(1) {
            if interrupted() {
                return Err("interrupted".to_owned());
            }
            let run = mixed(arguments, [first, second])?;
            figures.push(run.took);
            provisioned += run.provisioned;
            twice.extend(run.twice);
            in_hand += run.in_hand;
        }
        let (middle, goal) = (median(&figures), arguments.ttl as f64 + 3.0);
        // What another takes is its own affair.
        let is_ours = successor == "ours";
        let is_reached = (!is_ours || middle <= goal) && twice.is_empty();
        reached &= is_reached;
        let all: Vec<String> = figures.iter().map(|figure| format!("{figure:.2}")).collect();
        say(&format!(
            "| {killed} | {successor} | {middle:.2} | {} | {}{} | {} | {provisioned} | {} | {in_hand} | {} |",
            all.join(", "),
            if is_ours { goal.to_string() } else { "none".to_owned() },
            if is_reached { "" } else { ", **missed**" },
            arguments.nodes * arguments.rounds.max(1),
            if twice.is_empty() { "none".to_owned() } else { twice.join("; ") },
            load()
        ));
    }
    Ok(reached)
}

struct Mixed {
    took: f64,
    provisioned: usize,
    /// Nodes that were configured more than once, and what they were asked by whom.
    twice: Vec<String>,
    /// How many more were, which the one that was killed had configured and not restarted yet.
    in_hand: usize,
}

/// Kills the first of two daemons while nodes appear, and waits until the second has provisioned all of them.
fn mixed(arguments: &Arguments, programs: [&Path; 2]) -> Result<Mixed, String> {
    let scene = Scene::start(arguments)?;
    let [first, second] = scene.pair(programs)?;
    let mut fleets = Vec::new();
    let mut killed = None;
    for portion in 0..PORTIONS {
        if portion == 2 {
            first.process.signal(Signal::KILL)?;
            killed = Some(Instant::now());
        }
        let from = arguments.nodes * portion / PORTIONS;
        let to = arguments.nodes * (portion + 1) / PORTIONS;
        let builder = scene.fleet_builder();
        let named = (from..to).fold(builder, |fleet, n| fleet.node(&format!("n{n}.example.net")));
        fleets.push(named.start());
        // The leader dies in the middle of a portion, not before it.
        let pause = if portion == 1 { Duration::from_millis(20) } else { PORTION_EVERY };
        thread::sleep(pause);
    }
    let took = scene.wire.discovery(SECOND)?.duration_since(killed.expect("it was killed"));
    let provisioned = || fleets.iter().map(Fleet::provisioned).sum::<usize>();
    // What the dead one had in hand stays locked for two minutes.
    let deadline = Instant::now() + Duration::from_secs(arguments.timeout);
    let is_done = || provisioned() >= arguments.nodes;
    wait(deadline, "nodes are not provisioned", || is_done() || !second.process.is_running())?;
    if !is_done() {
        return Err(format!("{} has ended", programs[1].display()));
    }
    let asked = scene.wire.last_steps();
    let (mut twice, mut in_hand) = (Vec::new(), 0);
    for node in fleets.iter().flat_map(Fleet::iter).filter(|node| node.times_configured() > 1) {
        let asked = asked.get(&node.identity()).map_or(&[][..], Vec::as_slice);
        let restarted = (FIRST.to_owned(), Action::Restart);
        // One that was configured and not restarted yet looks to everybody like any other that waits.
        if asked.contains(&(FIRST.to_owned(), Action::Configure)) && !asked.contains(&restarted) {
            in_hand += 1;
            continue;
        }
        let asked: Vec<String> =
            asked.iter().map(|(who, what)| format!("{} by {who}", what.name())).collect();
        twice.push(format!("{}: {}", node.identity(), asked.join(", ")));
    }
    Ok(Mixed { took: took.as_secs_f64(), provisioned: provisioned(), twice, in_hand })
}

/// A broker with a bucket, and all that is said there.
struct Scene<'a> {
    arguments: &'a Arguments,
    wire: Wire,
    broker: Broker,
    config: PathBuf,
    ttl: Duration,
    deadline: Instant,
    folder: Folder,
}

/// A daemon that takes part in the election.
struct Daemon {
    process: Process,
    port: u16,
    _folder: Folder,
}

impl<'a> Scene<'a> {
    fn start(arguments: &'a Arguments) -> Result<Scene<'a>, String> {
        let folder = Folder::create("choria-failover")?;
        let store = folder.path.join("store");
        let config = folder.write("broker.conf", &streams::config(&store))?;
        let broker = Broker::configured(&folder, &config)?;
        let address = broker.url.trim_start_matches("nats://");
        let ttl = Duration::from_secs(arguments.ttl);
        Member::of_streams(address).make_bucket(ttl);
        let deadline = Instant::now() + Duration::from_secs(arguments.timeout);
        let wire = Wire::tap(address, deadline);
        Ok(Scene { arguments, wire, broker, config, ttl, deadline, folder })
    }

    /// Two daemons, of which the first leads and the second would.
    fn pair(&self, [first, second]: [&Path; 2]) -> Result<[Daemon; 2], String> {
        let first = self.daemon(first, FIRST)?;
        self.wire.discovery(FIRST)?;
        let second = self.daemon(second, SECOND)?;
        wait(self.deadline, "it is no candidate", || second.is_candidate())?;
        Ok([first, second])
    }

    fn daemon(&self, program: &Path, identity: &str) -> Result<Daemon, String> {
        let folder = Folder::create("choria-failover")?;
        let port = free_port()?;
        let settings = Settings {
            helper: &self.arguments.helper,
            workers: 4,
            // The shortest that the original takes.
            interval: Duration::from_secs(60),
            loglevel: "info",
            persistent: false,
            work_queue: None,
            counted: false,
            pki: false,
            network: None,
            candidate: Some(identity),
            monitor_port: Some(port),
        };
        let process = settings.start(program, &folder, &self.broker)?;
        Ok(Daemon { process, port, _folder: folder })
    }

    fn fleet(&self, nodes: usize) -> Fleet {
        self.fleet_builder().nodes(nodes).start()
    }

    fn fleet_builder(&self) -> fleet::Builder {
        Fleet::builder(&self.broker.url).provisioners(2)
    }
}

impl Daemon {
    /// Whether it says that it leads; nothing while it says nothing.
    fn leads(&self) -> Option<bool> {
        self.value("choria_election_leader{", "").map(|leads| leads > 0.0)
    }

    fn is_candidate(&self) -> bool {
        self.value("choria_election_campaigns{", "state=\"candidate\"").is_some_and(|n| n > 0.0)
    }

    fn value(&self, name: &str, label: &str) -> Option<f64> {
        let metrics = scrape(self.port).ok()?;
        let mut lines = metrics.lines();
        let line = lines.find(|line| line.starts_with(name) && line.contains(label))?;
        line.rsplit(' ').next()?.parse().ok()
    }
}

/// All messages of the account in which nodes wait.
struct Wire {
    heard: Receiver<Heard>,
    /// What was taken from there.
    kept: parking_lot::Mutex<Vec<Heard>>,
    deadline: Instant,
    _subscription: Subscription,
    _member: Member,
}

impl Wire {
    fn tap(address: &str, deadline: Instant) -> Wire {
        let member = Member::of_provisioners(address);
        let (subscription, heard) = member.watch(">");
        let kept = parking_lot::Mutex::default();
        Wire { heard, kept, deadline, _subscription: subscription, _member: member }
    }

    /// Waits for the next message of this kind, and says when it came.
    fn wait(&self, missing: &str, is_it: impl Fn(&Heard) -> bool) -> Result<Instant, String> {
        loop {
            let heard = self.heard.recv_deadline(self.deadline).map_err(|_| missing.to_owned())?;
            let found = is_it(&heard).then_some(heard.at);
            self.kept.lock().push(heard);
            if let Some(at) = found {
                return Ok(at);
            }
        }
    }

    /// Waits for the next discovery of this daemon, and says when it began.
    fn discovery(&self, identity: &str) -> Result<Instant, String> {
        self.wait(&format!("{identity} does not lead"), |heard| {
            heard.subject == "provisioning.broadcast.agent.discovery"
                && heard.sender().as_deref() == Some(identity)
        })
    }

    /// Everything so far.
    fn all(&self) -> Vec<Heard> {
        let mut all = std::mem::take(&mut *self.kept.lock());
        all.extend(self.heard.try_iter());
        all
    }

    /// Who asked which node for its last two steps, in order.
    fn last_steps(&self) -> BTreeMap<String, Vec<(String, Action)>> {
        let (mut by_node, mut seen) = (BTreeMap::<_, Vec<_>>::new(), BTreeSet::new());
        for heard in self.all() {
            let Some(node) = heard.subject.strip_prefix("provisioning.node.") else { continue };
            let Ok(request) = Request::decode(Protocol::V1, &heard.payload) else { continue };
            let body: serde_json::Value = serde_json::from_slice(&request.body).unwrap_or_default();
            let steps = [Action::Configure, Action::Restart];
            let step = steps.into_iter().find(|step| body["action"] == step.name());
            if let Some(step) = step.filter(|_| seen.insert(request.id)) {
                by_node.entry(node.to_owned()).or_default().push((request.sender, step));
            }
        }
        by_node
    }
}

/// Waits until something is so.
fn wait(deadline: Instant, what: &str, done: impl Fn() -> bool) -> Result<(), String> {
    while !done() {
        if Instant::now() > deadline {
            return Err(format!("{what} in time"));
        }
        thread::sleep(REFRESH);
    }
    Ok(())
}

/// How busy the machine was in the last minute: figures are worth little where others work too.
fn load() -> String {
    let load = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    load.split(' ').next().unwrap_or_default().to_owned()
}
