//! The demonstration behind `dist/demo`: a broker, a practice fleet and the daemon on one machine, then a table of what
//! became of every node. It leaves no process and no file behind.

#[path = "mod.rs"]
mod fleet;

use std::collections::{BTreeMap, HashMap};
use std::fs::{self, File};
use std::io::{self, BufRead as _, BufReader, IsTerminal as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use argh::FromArgs;
use fleet::fault::parse_list;
use fleet::{Expected, Fleet};
use rustix::process::{Pid, Signal, kill_process};

/// Provisions a practice fleet on this machine and shows what became of its nodes.
#[derive(FromArgs)]
struct Arguments {
    /// the daemon's program
    #[argh(option)]
    daemon: PathBuf,

    /// the helper's command line
    #[argh(option)]
    helper: String,

    /// how many nodes, 50 by default
    #[argh(option, default = "50")]
    nodes: usize,

    /// how many the daemon works on at once, 8 by default
    #[argh(option, default = "8")]
    workers: usize,

    /// what is wrong with how many nodes, such as gone=3,silent=2; some of each kind by default, none if empty
    #[argh(option)]
    faults: Option<String>,

    /// let nodes ask for certificates too
    #[argh(switch)]
    pki: bool,

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

/// How often the screen is brought up to date.
const REFRESH: Duration = Duration::from_millis(50);

/// How long a process may take to end after it was asked to.
const STOP_TIMEOUT: Duration = Duration::from_secs(40);

fn main() -> ExitCode {
    match run(&argh::from_env()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(problem) => {
            let _ = writeln!(io::stderr(), "demo: {problem}");
            ExitCode::from(2)
        }
    }
}

/// Runs it all; `false` when a node did not end as it should.
fn run(arguments: &Arguments) -> Result<bool, String> {
    let interrupted = Arc::new(AtomicBool::new(false));
    for signal in [signal_hook::consts::SIGTERM, signal_hook::consts::SIGINT] {
        signal_hook::flag::register(signal, Arc::clone(&interrupted)).map_err(text)?;
    }
    let folder = Folder::create()?;
    let broker = Broker::start(&folder)?;
    let faults = match &arguments.faults {
        Some(list) => list.clone(),
        None => usual_faults(arguments.nodes),
    };
    let mut builder = Fleet::builder(&broker.url).nodes(arguments.nodes);
    for (count, fault) in parse_list(&faults)? {
        builder = builder.fault(count, fault);
    }
    if arguments.pki {
        builder = builder.pki();
    }
    let fleet = builder.start_quietly();
    let daemon = Daemon::start(arguments, &folder, &broker)?;
    let mut log = Log::open(&folder.path.join("daemon.log"));
    let deadline = Instant::now() + Duration::from_secs(arguments.timeout);
    // Nodes that are not there can be known by their startup event only, and nobody keeps an event for a daemon that is late.
    while !log.is_connected {
        log.read()?;
        if !daemon.0.is_running() || Instant::now() > deadline {
            return Err(format!("the daemon did not connect; its log:\n{}", log.tail()));
        }
        std::thread::sleep(REFRESH);
    }
    fleet.announce();
    let mut screen = Screen::new(&fleet);
    loop {
        log.read()?;
        let progress = screen.update(&fleet, &log);
        if progress.is_done() || Instant::now() > deadline || interrupted.load(Ordering::Relaxed) {
            break;
        }
        if !daemon.0.is_running() {
            return Err(format!("the daemon ended early; its log:\n{}", log.tail()));
        }
        std::thread::sleep(REFRESH);
    }
    screen.finish();
    let cost = Cost::of(&daemon.0, &broker.process);
    daemon.0.stop();
    log.read()?;
    let good = screen.report(&fleet, &log, &cost);
    for violation in fleet.violations() {
        say(&format!("the daemon did what it must not: {violation}"));
    }
    Ok(good && fleet.violations().is_empty())
}

/// One in fifty nodes of each kind, at least one where the fleet is large enough to have healthy ones beside them.
fn usual_faults(nodes: usize) -> String {
    let count = (nodes / 50).max(1);
    let kinds = USUAL_FAULTS.len().min(nodes / (4 * count));
    let list: Vec<String> =
        USUAL_FAULTS[..kinds].iter().map(|kind| format!("{kind}={count}")).collect();
    list.join(",")
}

/// A folder that goes when the demonstration ends.
struct Folder {
    path: PathBuf,
}

impl Folder {
    fn create() -> Result<Folder, String> {
        let path = std::env::temp_dir().join(format!("choria-demo-{}", std::process::id()));
        fs::create_dir(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        Ok(Folder { path })
    }

    fn write(&self, name: &str, content: &str) -> Result<PathBuf, String> {
        let path = self.path.join(name);
        fs::write(&path, content).map_err(|error| format!("{}: {error}", path.display()))?;
        Ok(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.path);
    }
}

/// A process of ours, ended when dropped.
struct Process {
    child: parking_lot::Mutex<Child>,
}

impl Process {
    fn start(command: &mut Command) -> Result<Process, String> {
        let name = command.get_program().to_string_lossy().into_owned();
        let child =
            command.stdin(Stdio::null()).spawn().map_err(|error| format!("{name}: {error}"))?;
        Ok(Process { child: parking_lot::Mutex::new(child) })
    }

    fn is_running(&self) -> bool {
        matches!(self.child.lock().try_wait(), Ok(None))
    }

    fn id(&self) -> u32 {
        self.child.lock().id()
    }

    /// Asks the process to end, and ends it if it does not.
    fn stop(&self) {
        let mut child = self.child.lock();
        if let Ok(None) = child.try_wait() {
            let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
            if let Some(pid) = pid {
                let _ = kill_process(pid, Signal::TERM);
            }
            let deadline = Instant::now() + STOP_TIMEOUT;
            while let Ok(None) = child.try_wait() {
                if Instant::now() > deadline {
                    let _ = child.kill();
                    let _ = child.wait();
                    return;
                }
                std::thread::sleep(REFRESH);
            }
        }
    }

    /// Processor seconds used so far, and the largest memory in bytes; zero where the system does not tell.
    fn usage(&self) -> (f64, u64) {
        let id = self.id();
        let stat = fs::read_to_string(format!("/proc/{id}/stat")).unwrap_or_default();
        // The name in brackets may hold blanks; user and system time are the 12th and 13th fields after it.
        let fields: Vec<&str> =
            stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
        let ticks: u64 =
            fields.iter().skip(11).take(2).filter_map(|field| field.parse::<u64>().ok()).sum();
        let status = fs::read_to_string(format!("/proc/{id}/status")).unwrap_or_default();
        let peak = status
            .lines()
            .find_map(|line| line.strip_prefix("VmHWM:"))
            .and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok())
            .unwrap_or_default();
        // Linux counts in hundredths of a second whatever the kernel's own tick is.
        (ticks as f64 / 100.0, peak * 1024)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.stop();
    }
}

/// A nats-server on a free port.
struct Broker {
    process: Process,
    url: String,
}

impl Broker {
    fn start(folder: &Folder) -> Result<Broker, String> {
        let program = std::env::var("NATS_SERVER").unwrap_or_else(|_| "nats-server".to_owned());
        let mut command = Command::new(program);
        command.args(["--addr", "127.0.0.1", "--port", "-1", "--ports_file_dir"]).arg(&folder.path);
        command.stdout(Stdio::null()).stderr(Stdio::null());
        let process = Process::start(&mut command)?;
        let deadline = Instant::now() + Duration::from_secs(10);
        loop {
            let written = fs::read_dir(&folder.path)
                .map_err(text)?
                .filter_map(Result::ok)
                .find(|entry| entry.path().extension().is_some_and(|ending| ending == "ports"));
            let ports = written.and_then(|entry| fs::read(entry.path()).ok());
            let ports =
                ports.and_then(|file| serde_json::from_slice::<serde_json::Value>(&file).ok());
            if let Some(url) = ports.as_ref().and_then(|ports| ports["nats"][0].as_str()) {
                return Ok(Broker { process, url: url.to_owned() });
            }
            if !process.is_running() || Instant::now() > deadline {
                return Err("nats-server did not start".to_owned());
            }
            std::thread::sleep(REFRESH);
        }
    }
}

/// The daemon, with settings for this broker.
struct Daemon(Process);

impl Daemon {
    fn start(arguments: &Arguments, folder: &Folder, broker: &Broker) -> Result<Daemon, String> {
        let key = folder.write("jwt-signer.pem", &Fleet::verify_key_pem())?;
        let settings = folder.write(
            "choria-provisioner.yaml",
            &format!(
                "helper: {helper}\nworkers: {workers}\ninterval: 10s\nlogfile: {log}\nloglevel: info\ntoken: s3cret\n\
                 choria_insecure: true\nsite: demo\njwt_verify_cert: {key}\nfeatures:\n  jwt: true\n  pki: {pki}\n",
                helper = serde_json::json!(arguments.helper),
                workers = arguments.workers,
                log = folder.path.join("daemon.log").display(),
                key = key.display(),
                pki = arguments.pki,
            ),
        )?;
        let client = folder.write(
            "choria.cfg",
            &format!(
                "identity = provisioner.example.net\nplugin.choria.middleware_hosts = {}\n",
                broker.url
            ),
        )?;
        let mut command = Command::new(&arguments.daemon);
        command.arg("run").arg("--config").arg(settings).arg("--choria-config").arg(client);
        Process::start(&mut command).map(Daemon)
    }
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
        progress
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
        let (daemon_secs, daemon_peak) = daemon.usage();
        Cost { daemon_secs, daemon_peak, broker_secs: broker.usage().0 }
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

/// One line on standard output; nobody reading it is no reason to stop.
fn say(line: &str) {
    let mut out = io::stdout().lock();
    let _ = writeln!(out, "{line}").and_then(|()| out.flush());
}

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}
