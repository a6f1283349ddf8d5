//! The demonstration behind `dist/demo`: a broker, a practice fleet and the daemon on one machine, then a table of what
//! became of every node. It leaves no process and no file behind.

#[path = "mod.rs"]
mod fleet;
#[path = "rig.rs"]
mod rig;

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::{self, BufRead as _, BufReader, IsTerminal as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use argh::FromArgs;
use fleet::fault::parse_list;
use fleet::network::{Network, Setup};
use fleet::{Expected, Fleet};
use rig::{Broker, Folder, Process, Settings, interrupted, say, text};

/// Provisions a practice fleet on this machine and shows what became of its nodes.
#[derive(FromArgs)]
struct Arguments {
    /// the daemon's program
    #[argh(option)]
    daemon: PathBuf,

    /// where the sample helpers are
    #[argh(option)]
    examples: PathBuf,

    /// the helper's command line; paths count from the project's folder, and the sample in examples/helper.rs is the default, with
    /// --setup x509 the one in examples/signing.rs, which gives certificates
    #[argh(option)]
    helper: Option<String>,

    /// how many nodes, 50 by default
    #[argh(option, default = "50")]
    nodes: usize,

    /// how many the daemon works on at once, 8 by default
    #[argh(option, default = "8")]
    workers: usize,

    /// what is wrong with how many nodes, such as gone=3,silent=2; some of each kind by default, none if empty
    #[argh(option)]
    faults: Option<String>,

    /// secure the network, all of it in TLS: x509, with certificates for everybody, or issuer, with tokens of an organization and
    /// protocol version 2; without security by default
    #[argh(option)]
    setup: Option<Setup>,

    /// let nodes ask for certificates too, as they do with --setup x509
    #[argh(switch)]
    pki: bool,

    /// keep the helper running from node to node
    #[argh(switch)]
    persistent: bool,

    /// give up after so many seconds, 300 by default
    #[argh(option, default = "300")]
    timeout: u64,
}

/// What is wrong with one node in fifty each, as in a real fleet.
const USUAL_FAULTS: [&str; 8] = [
    "gone",
    "silent",
    "bad-jwt",
    "expired-jwt",
    "wrong-token",
    "locked",
    "configure-refused",
    "data-null:jwt.jwt",
];

/// How many broken nodes are listed one by one; more are shown by kind.
const LISTED_MAX: usize = 60;

/// How long nothing may happen before it is said why.
const STALL: Duration = Duration::from_secs(3);

/// How often the screen is brought up to date.
const REFRESH: Duration = Duration::from_millis(50);

fn main() -> ExitCode {
    rig::exit("demo", run(&rig::arguments()))
}

/// Runs it all; `false` when a node did not end as it should.
fn run(arguments: &Arguments) -> Result<bool, String> {
    if arguments.setup == Some(Setup::X509) && arguments.persistent && arguments.helper.is_none() {
        return Err(
            "the sample helper that gives certificates does not stay: name another with --helper"
                .to_owned(),
        );
    }
    let interrupted = interrupted()?;
    let folder = Folder::create("choria-demo")?;
    let network = arguments.setup.map(|setup| Network::create(&folder.path, setup));
    let network = network.transpose().map_err(text)?;
    let broker = match &network {
        None => Broker::start(&folder)?,
        Some(network) => Broker::configured(&folder, &network.broker())?,
    };
    let faults = match &arguments.faults {
        Some(list) => list.clone(),
        None => usual_faults(arguments.nodes),
    };
    let builder = match &network {
        None => Fleet::builder(&broker.url),
        Some(network) => network.fleet(&broker.url),
    };
    let mut builder = builder.nodes(arguments.nodes);
    for (count, fault) in parse_list(&faults)? {
        builder = builder.fault(count, fault);
    }
    if arguments.pki {
        builder = builder.pki();
    }
    let fleet = builder.start_quietly();
    let settings = Settings {
        helper: &helper(arguments, network.as_ref()),
        workers: arguments.workers,
        interval: Duration::from_secs(10),
        loglevel: "info",
        persistent: arguments.persistent,
        work_queue: None,
        counted: false,
        pki: arguments.pki,
        network: network.as_ref(),
        candidate: None,
        monitor_port: None,
    };
    let daemon = settings.start(&arguments.daemon, &folder, &broker)?;
    let mut log = Log::open(&folder.path.join("daemon.log"));
    let deadline = Instant::now() + Duration::from_secs(arguments.timeout);
    // Nodes that are not there can be known by their startup event only, and nobody keeps an event for a daemon that is late.
    while !log.is_connected {
        log.read()?;
        if interrupted() {
            return Ok(false);
        }
        if !daemon.is_running() && log.last_lines.is_empty() {
            return Err("the daemon did not start; its reason is above".to_owned());
        }
        if !daemon.is_running() || Instant::now() > deadline {
            return Err(format!("the daemon did not connect; its log:\n{}", log.tail()));
        }
        std::thread::sleep(REFRESH);
    }
    fleet.announce();
    let mut screen = Screen::new(&fleet);
    loop {
        log.read()?;
        let progress = screen.update(&fleet, &log);
        if progress.is_done() || Instant::now() > deadline || interrupted() {
            break;
        }
        if !daemon.is_running() {
            return Err(format!("the daemon ended early; its log:\n{}", log.tail()));
        }
        std::thread::sleep(REFRESH);
    }
    screen.finish();
    let cost = Cost::of(&daemon, &broker.process);
    daemon.stop();
    log.read()?;
    let good = screen.report(&fleet, &log, &cost);
    for violation in fleet.violations() {
        say(&format!("the daemon did what it must not: {violation}"));
    }
    Ok(good && fleet.violations().is_empty())
}

/// The helper's command line.
fn helper(arguments: &Arguments, network: Option<&Network>) -> String {
    let sample = |name: &str| arguments.examples.join(name).display().to_string();
    match (&arguments.helper, network) {
        (Some(helper), _) => helper.clone(),
        (None, Some(network)) if network.setup == Setup::X509 => {
            format!("{} {}", sample("signing"), network.path("ca").display())
        }
        (None, _) => sample("helper"),
    }
}

/// One in fifty nodes of each kind, at least one where the fleet is large enough to have healthy ones beside them.
fn usual_faults(nodes: usize) -> String {
    let count = (nodes / 50).max(1);
    let kinds = USUAL_FAULTS.len().min(nodes / (4 * count));
    let list: Vec<String> =
        USUAL_FAULTS[..kinds].iter().map(|kind| format!("{kind}={count}")).collect();
    list.join(",")
}

/// The daemon's log, read as it grows: the last reason given for each node.
struct Log {
    path: PathBuf,
    file: Option<BufReader<File>>,
    partial: String,
    is_connected: bool,
    reasons: HashMap<String, String>,
    last_lines: Vec<String>,
}

impl Log {
    fn open(path: &Path) -> Log {
        Log {
            path: path.to_owned(),
            file: None,
            partial: String::new(),
            is_connected: false,
            reasons: HashMap::new(),
            last_lines: Vec::new(),
        }
    }

    /// Takes in what was written since.
    fn read(&mut self) -> Result<(), String> {
        if self.file.is_none() {
            self.file = File::open(&self.path).ok().map(BufReader::new);
        }
        let Some(file) = &mut self.file else { return Ok(()) };
        while file.read_line(&mut self.partial).map_err(text)? > 0 {
            if !self.partial.ends_with('\n') {
                break;
            }
            let line = std::mem::take(&mut self.partial);
            let message = message(&line);
            self.is_connected |= message.starts_with("Connected to ");
            if let Some((node, reason)) = reason(&message) {
                self.reasons.insert(node.to_owned(), reason.to_owned());
            }
            if self.last_lines.len() == 10 {
                self.last_lines.remove(0);
            }
            self.last_lines.push(line);
        }
        Ok(())
    }

    fn tail(&self) -> String {
        self.last_lines.concat()
    }
}

/// The message of a line of the log.
fn message(line: &str) -> String {
    let line = serde_json::from_str::<serde_json::Value>(line).unwrap_or_default();
    line["msg"].as_str().unwrap_or_default().to_owned()
}

/// Node and reason of a message that says why a node could not be provisioned.
fn reason(message: &str) -> Option<(&str, &str)> {
    message.strip_prefix("Could not provision ")?.split_once(": ")
}

/// How far it is.
struct Progress {
    healthy: usize,
    served: usize,
    broken: usize,
    explained: usize,
}

impl Progress {
    fn is_done(&self) -> bool {
        self.served == self.healthy && self.explained == self.broken
    }
}

/// Shows progress: a bar on a terminal, lines elsewhere.
struct Screen {
    is_terminal: bool,
    begun: Instant,
    first: Option<Instant>,
    last: Option<(Instant, usize)>,
    told: Option<(Instant, usize, usize)>,
    /// How many were served when it was said why the others are not.
    explained: Option<usize>,
}

impl Screen {
    fn new(fleet: &Fleet) -> Screen {
        say(&format!("{} practice nodes wait to be provisioned", fleet.len()));
        Screen {
            is_terminal: io::stdout().is_terminal(),
            begun: Instant::now(),
            first: None,
            last: None,
            told: None,
            explained: None,
        }
    }

    fn update(&mut self, fleet: &Fleet, log: &Log) -> Progress {
        let mut progress = Progress { healthy: 0, served: 0, broken: 0, explained: 0 };
        for node in fleet.iter() {
            if node.expected() == Expected::Broken {
                progress.broken += 1;
                progress.explained += usize::from(log.reasons.contains_key(&node.identity()));
            } else {
                progress.healthy += 1;
                progress.served += usize::from(node.is_provisioned());
            }
        }
        let now = Instant::now();
        if progress.served > 0 && self.first.is_none() {
            self.first = Some(now);
        }
        if self.last.is_none_or(|(_, served)| served != progress.served) {
            self.last = Some((now, progress.served));
        }
        self.show(&progress, now);
        self.explain(&progress, now, fleet, log);
        progress
    }

    /// Says once why healthy nodes wait, if they do for long: what is wrong is then usually wrong with all.
    fn explain(&mut self, progress: &Progress, now: Instant, fleet: &Fleet, log: &Log) {
        let Some((since, served)) = self.last else { return };
        if now.duration_since(since) < STALL
            || served == progress.healthy
            || self.explained == Some(served)
        {
            return;
        }
        let mut waiting = fleet.iter().filter(|node| node.expected() != Expected::Broken);
        let reason = waiting.find_map(|node| {
            let reason = log.reasons.get(&node.identity()).filter(|_| !node.is_provisioned())?;
            Some(format!("{} is healthy and waits: {reason}", node.identity()))
        });
        self.finish();
        say(&reason.unwrap_or_else(|| {
            let tail = log.tail();
            format!("healthy nodes wait, and the daemon does not say why; its log:\n{tail}")
        }));
        self.explained = Some(served);
    }

    fn show(&mut self, progress: &Progress, now: Instant) {
        let Progress { healthy, served, broken, explained } = *progress;
        if self.is_terminal {
            const WIDTH: usize = 40;
            let filled = (WIDTH * served).checked_div(healthy).unwrap_or(WIDTH);
            let (done, open) = ("█".repeat(filled), "░".repeat(WIDTH - filled));
            let line =
                format!("\r{done}{open} {served}/{healthy} healthy, {explained}/{broken} broken ");
            let mut out = io::stdout().lock();
            let _ = out.write_all(line.as_bytes()).and_then(|()| out.flush());
            return;
        }
        let changed = self.told.is_none_or(|(_, was, knew)| (was, knew) != (served, explained));
        let due = self.told.is_none_or(|(at, ..)| now.duration_since(at) >= Duration::from_secs(1));
        if changed && (due || progress.is_done()) {
            let secs = now.duration_since(self.begun).as_secs_f64();
            say(&format!(
                "{secs:5.1} s: {served} of {healthy} healthy nodes provisioned, {explained} of {broken} broken ones found"
            ));
            self.told = Some((now, served, explained));
        }
    }

    fn finish(&self) {
        if self.is_terminal {
            say("");
        }
    }

    /// Prints the table and the figures; `false` when a node did not end as it should.
    fn report(&self, fleet: &Fleet, log: &Log, cost: &Cost) -> bool {
        let (mut served, mut lost, mut broken) = (0, Vec::new(), Vec::new());
        for node in fleet.iter() {
            let name = node.identity();
            let reason = log.reasons.get(&name).cloned();
            match (node.expected(), node.is_provisioned()) {
                (Expected::Broken, is_served) => {
                    let fault = node.fault().map(|fault| fault.to_string()).unwrap_or_default();
                    let reason =
                        if is_served { Some("provisioned all the same".into()) } else { reason };
                    broken.push((name, fault, reason));
                }
                (_, true) => served += 1,
                (_, false) => lost.push((name, reason)),
            }
        }
        say(&format!("\n{served} healthy nodes are provisioned."));
        for (name, reason) in &lost {
            say(&format!("{name} is healthy and not provisioned: {}", shown(reason.as_deref())));
        }
        if !broken.is_empty() {
            say(&format!("{} broken ones are not, and this is why:\n", broken.len()));
            table(&broken);
        }
        cost.print(served, self.first.zip(self.last.map(|(at, _)| at)));
        let unexplained = broken.iter().any(|(_, _, reason)| reason.is_none());
        lost.is_empty() && !unexplained
    }
}

/// Broken nodes one by one, or by kind where they are many.
fn table(broken: &[(String, String, Option<String>)]) {
    let mut rows: Vec<[String; 3]> =
        vec![["node", "what is wrong with it", "what the daemon says"].map(String::from)];
    if broken.len() <= LISTED_MAX {
        rows.extend(broken.iter().map(|(name, fault, reason)| {
            [name.clone(), fault.clone(), shown(reason.as_deref()).to_owned()]
        }));
    } else {
        let mut kinds: BTreeMap<(String, String), Vec<&String>> = BTreeMap::new();
        for (name, fault, reason) in broken {
            let reason = shown(reason.as_deref()).replace(name.as_str(), "NODE");
            kinds.entry((fault.clone(), reason)).or_default().push(name);
        }
        rows.extend(kinds.into_iter().map(|((fault, reason), names)| {
            let more = if names.len() > 1 {
                format!(" and {} more", names.len() - 1)
            } else {
                String::new()
            };
            [format!("{}{more}", names[0]), fault, reason]
        }));
    }
    let width = |at: usize| rows.iter().map(|row| row[at].chars().count()).max().unwrap_or(0);
    let (name, fault) = (width(0), width(1));
    for row in &rows {
        say(&format!("  {:name$}  {:fault$}  {}", row[0], row[1], row[2]));
    }
}

fn shown(reason: Option<&str>) -> &str {
    reason.unwrap_or("nothing yet")
}

/// What the daemon and the broker used.
struct Cost {
    daemon_secs: f64,
    daemon_peak: u64,
    broker_secs: f64,
}

impl Cost {
    fn of(daemon: &Process, broker: &Process) -> Cost {
        let usage = daemon.usage();
        Cost {
            daemon_secs: usage.cpu_secs,
            daemon_peak: usage.peak_bytes,
            broker_secs: broker.usage().cpu_secs,
        }
    }

    fn print(&self, served: usize, span: Option<(Instant, Instant)>) {
        let Some((first, last)) = span.filter(|_| served > 0) else { return };
        let secs = last.duration_since(first).as_secs_f64().max(REFRESH.as_secs_f64());
        let per_node = |total: f64| total * 1000.0 / served as f64;
        say(&format!(
            "\nFrom the first to the last healthy node: {secs:.2} s, {:.0} nodes/s. Daemon: {:.2} ms of processor a node, {:.1} MB at most. \
             Broker: {:.2} ms a node.",
            served as f64 / secs,
            per_node(self.daemon_secs),
            self.daemon_peak as f64 / 1e6,
            per_node(self.broker_secs),
        ));
    }
}
