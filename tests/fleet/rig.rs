//! What a run of everything on one machine is made of: a folder, a broker, a daemon with its settings, and what they use.

// Each program uses its own part of this.
#![allow(dead_code)]

use std::fmt::Write as _;
use std::fs;
use std::io::{self, Read as _, Write as _};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use argh::FromArgs;
use rustix::process::{Pid, Signal, kill_process};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use crate::fleet::Fleet;
use crate::fleet::network::{CERTNAME, Network};
use crate::fleet::streams::PASSWORD;

/// How long a process may take to end after it was asked to.
const STOP_TIMEOUT: Duration = Duration::from_secs(40);

/// How often something is looked at that nobody tells us about.
const REFRESH: Duration = Duration::from_millis(10);

/// The arguments of this process, with `--flag value` and `--flag=value`; wrong ones and `--help` end it.
pub fn arguments<T: FromArgs>() -> T {
    let words = std::env::args().flat_map(|word| match word.split_once('=') {
        Some((flag, value)) if flag.starts_with("--") => vec![flag.to_owned(), value.to_owned()],
        _ => vec![word],
    });
    let words: Vec<String> = words.collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let (name, words) = words.split_first().unwrap_or((&"", &[]));
    T::from_args(&[name], words).unwrap_or_else(|exit| match exit.status {
        Ok(()) => {
            say(&exit.output);
            std::process::exit(0)
        }
        Err(()) => {
            let _ = writeln!(io::stderr(), "{}", exit.output);
            std::process::exit(2)
        }
    })
}

/// How a tool of this name ends: 1 when what it measured is not as it should be, 2 when it could not measure.
pub fn exit(name: &str, reached: Result<bool, String>) -> ExitCode {
    match reached {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(problem) => {
            // Not among the figures: somebody may be reading them.
            let _ = writeln!(io::stderr(), "{name}: {problem}");
            ExitCode::from(2)
        }
    }
}

/// Tells whether we were asked to end, by SIGTERM or SIGINT.
pub fn interrupted() -> Result<impl Fn() -> bool, String> {
    let flag = Arc::new(AtomicBool::new(false));
    // The broker and the daemon stay when their terminal goes.
    for signal in [SIGTERM, SIGINT, SIGHUP] {
        signal_hook::flag::register(signal, Arc::clone(&flag)).map_err(text)?;
    }
    Ok(move || flag.load(Ordering::Relaxed))
}

/// A folder that goes with this value.
pub struct Folder {
    /// Where it is.
    pub path: PathBuf,
}

impl Folder {
    /// A new one; `name` begins its name.
    pub fn create(name: &str) -> Result<Folder, String> {
        let name = format!("{name}-{}-{:x}", std::process::id(), fastrand::u32(..));
        let path = std::env::temp_dir().join(name);
        fs::create_dir(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        Ok(Folder { path })
    }

    /// Writes a file in it.
    pub fn write(&self, name: &str, content: &str) -> Result<PathBuf, String> {
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
pub struct Process {
    child: parking_lot::Mutex<Child>,
}

impl Process {
    /// Starts it, with nothing to read.
    pub fn start(command: &mut Command) -> Result<Process, String> {
        let name = command.get_program().to_string_lossy().into_owned();
        let child =
            command.stdin(Stdio::null()).spawn().map_err(|error| format!("{name}: {error}"))?;
        Ok(Process { child: parking_lot::Mutex::new(child) })
    }

    /// Whether it still runs.
    pub fn is_running(&self) -> bool {
        matches!(self.child.lock().try_wait(), Ok(None))
    }

    fn id(&self) -> u32 {
        self.child.lock().id()
    }

    /// Sends it a signal.
    pub fn signal(&self, signal: Signal) -> Result<(), String> {
        let pid = i32::try_from(self.id()).ok().and_then(Pid::from_raw);
        kill_process(pid.ok_or("a process has a number")?, signal).map_err(text)
    }

    /// Asks the process to end, and ends it if it does not.
    pub fn stop(&self) {
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

    /// What it has used so far; zero where the system does not tell.
    pub fn usage(&self) -> Usage {
        let id = self.id();
        let stat = fs::read_to_string(format!("/proc/{id}/stat")).unwrap_or_default();
        // The name in brackets may hold blanks; user and system time are the 12th and 13th fields after it, and those of
        // children that have ended the 14th and 15th.
        let fields: Vec<u64> = stat
            .rsplit(')')
            .next()
            .unwrap_or_default()
            .split_whitespace()
            .map(|field| field.parse().unwrap_or_default())
            .collect();
        // Linux counts in hundredths of a second whatever the kernel's own tick is.
        let secs = |first: usize| fields.iter().skip(first).take(2).sum::<u64>() as f64 / 100.0;
        let status = fs::read_to_string(format!("/proc/{id}/status")).unwrap_or_default();
        let bytes = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name));
            let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
            kib.unwrap_or_default() * 1024
        };
        Usage {
            cpu_secs: secs(11),
            children_secs: secs(13),
            peak_bytes: bytes("VmHWM:"),
            bytes: bytes("VmRSS:"),
        }
    }
}

/// What a process has used.
#[derive(Debug, Clone, Copy, Default)]
pub struct Usage {
    /// Processor seconds.
    pub cpu_secs: f64,
    /// Processor seconds of its children that have ended.
    pub children_secs: f64,
    /// The largest memory it ever had.
    pub peak_bytes: u64,
    /// The memory it has now.
    pub bytes: u64,
}

impl Drop for Process {
    fn drop(&mut self) {
        self.stop();
    }
}

/// A nats-server on a free port.
pub struct Broker {
    /// The process.
    pub process: Process,
    /// Where it listens.
    pub url: String,
}

impl Broker {
    /// Starts one and waits until it listens. `NATS_SERVER` names another program.
    pub fn start(folder: &Folder) -> Result<Broker, String> {
        Broker::with(folder, &[], -1)
    }

    /// Starts one with the configuration file at `config`.
    pub fn configured(folder: &Folder, config: &Path) -> Result<Broker, String> {
        Broker::with(folder, &[Path::new("--config"), config], -1)
    }

    /// Kills it, as a power cut would, and starts it again on its port.
    pub fn restart(&mut self, folder: &Folder, config: &Path) -> Result<(), String> {
        let port = self.url.rsplit(':').next().and_then(|port| port.parse().ok());
        self.process.signal(Signal::KILL)?;
        while self.process.is_running() {
            std::thread::sleep(REFRESH);
        }
        for entry in fs::read_dir(&folder.path).map_err(text)?.filter_map(Result::ok) {
            if entry.path().extension().is_some_and(|ending| ending == "ports") {
                fs::remove_file(entry.path()).map_err(text)?;
            }
        }
        let config = [Path::new("--config"), config];
        *self = Broker::with(folder, &config, port.ok_or("a broker has a port")?)?;
        Ok(())
    }

    /// On `port`, or a free one if that is -1.
    fn with(folder: &Folder, arguments: &[&Path], port: i32) -> Result<Broker, String> {
        let program = std::env::var("NATS_SERVER").unwrap_or_else(|_| "nats-server".to_owned());
        let mut command = Command::new(program);
        command.args(["--addr", "127.0.0.1", "--port", &port.to_string()]);
        command.arg("--ports_file_dir").arg(&folder.path);
        command.args(arguments);
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
                // With TLS it names another scheme, which Choria's files don't.
                let url = url.replace("tls://", "nats://");
                return Ok(Broker { process, url });
            }
            if !process.is_running() || Instant::now() > deadline {
                return Err("nats-server did not start".to_owned());
            }
            std::thread::sleep(REFRESH);
        }
    }
}

/// The file in its folder in which the instructions of a daemon are counted.
pub const COUNTS: &str = "callgrind.out";

/// Settings of a daemon.
pub struct Settings<'a> {
    /// The helper's command line.
    pub helper: &'a str,
    /// How many nodes it works on at once.
    pub workers: usize,
    /// Time from one discovery to the next.
    pub interval: Duration,
    /// Least severe level of its log.
    pub loglevel: &'a str,
    /// Whether its helper stays from node to node.
    pub persistent: bool,
    /// How many nodes may wait; the default if nothing.
    pub work_queue: Option<usize>,
    /// Whether its instructions are counted, into [`COUNTS`]; it is many times slower then.
    pub counted: bool,
    /// Whether nodes ask for certificates.
    pub pki: bool,
    /// How the network is secured, if it is.
    pub network: Option<&'a Network>,
    /// Its identity among several, if one of them is elected.
    pub candidate: Option<&'a str>,
    /// The port of its metrics, if it has one.
    pub monitor_port: Option<u16>,
}

impl Settings<'_> {
    /// Starts `program` for the nodes of `broker`; its log is `daemon.log` in `folder`.
    pub fn start(
        &self,
        program: &Path,
        folder: &Folder,
        broker: &Broker,
    ) -> Result<Process, String> {
        let key = folder.write("jwt-signer.pem", &Fleet::verify_key_pem())?;
        let mut yaml = String::new();
        let mut set = |key: &str, value: &dyn std::fmt::Display| {
            let _ = writeln!(yaml, "{key}: {value}");
        };
        set("helper", &serde_json::json!(self.helper));
        set("workers", &self.workers);
        set("interval", &format_args!("{}s", self.interval.as_secs()));
        set("logfile", &folder.path.join("daemon.log").display());
        set("loglevel", &self.loglevel);
        set("token", &"s3cret");
        set("site", &"practice");
        match self.network {
            None => {
                set("choria_insecure", &true);
                set("jwt_verify_cert", &key.display());
                set("features", &format_args!("{{jwt: true, pki: {}}}", self.pki));
            }
            Some(network) => {
                for (key, value) in network.settings() {
                    set(key, &value);
                }
                set("features", &format_args!("{{{}: true}}", network.features().join(": true, ")));
            }
        }
        // Other daemons know nothing of it.
        if self.persistent {
            set("helper_mode", &"persistent");
        }
        if let Some(entries) = self.work_queue {
            set("work_queue", &entries);
        }
        if let Some(port) = self.monitor_port {
            set("monitor_port", &port);
        }
        if self.candidate.is_some() {
            set("leader_election", &true);
            set("broker_provisioning_password", &PASSWORD);
        }
        let identity = self.candidate.unwrap_or(CERTNAME);
        let settings = folder.write("choria-provisioner.yaml", &yaml)?;
        let mut client =
            format!("identity = {identity}\nplugin.choria.middleware_hosts = {}\n", broker.url);
        for (key, value) in self.network.iter().flat_map(|network| network.client_settings()) {
            let _ = writeln!(client, "{key} = {value}");
        }
        let client = folder.write("choria.cfg", &client)?;
        let mut command = if self.counted {
            let mut valgrind = Command::new("valgrind");
            valgrind.args(["--quiet", "--tool=callgrind"]);
            valgrind.arg(format!("--callgrind-out-file={}", folder.path.join(COUNTS).display()));
            // It has remarks about system calls that it does not know.
            valgrind.arg(program).stderr(Stdio::null());
            valgrind
        } else {
            Command::new(program)
        };
        // The caller must be the one in the certificate, whoever runs this.
        command.env("MCOLLECTIVE_CERTNAME", identity);
        command.arg("run").arg("--config").arg(settings).arg("--choria-config").arg(client);
        Process::start(&mut command)
    }
}

/// The longest a scrape may take, whatever happens.
pub const SCRAPE_MAX: Duration = Duration::from_secs(2);

/// The metrics of the daemon that has them on this port.
pub fn scrape(port: u16) -> io::Result<String> {
    let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port))?;
    stream.set_read_timeout(Some(SCRAPE_MAX))?;
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    if answer.starts_with("HTTP/1.1 200 ") { Ok(answer) } else { Err(io::ErrorKind::Other.into()) }
}

/// A port that nobody has, for the moment.
pub fn free_port() -> Result<u16, String> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).map_err(text)?;
    Ok(listener.local_addr().map_err(text)?.port())
}

/// One line on standard output; nobody reading it is no reason to stop.
pub fn say(line: &str) {
    let mut out = io::stdout().lock();
    let _ = writeln!(out, "{line}").and_then(|()| out.flush());
}

/// An error as its text.
pub fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

/// How long a daemon may take to its first discovery.
const START_MAX: Duration = Duration::from_secs(20);

/// How long after its first discovery a daemon surely listens to events.
pub const LISTENS: Duration = Duration::from_millis(300);

/// Waits for the first discovery request, and says when it came.
pub fn first_discovery(fleet: &Fleet, daemon: &Process) -> Result<Instant, String> {
    let deadline = Instant::now() + START_MAX;
    loop {
        if let Some(at) = fleet.first_discovery() {
            return Ok(at);
        }
        if !daemon.is_running() || Instant::now() > deadline {
            return Err("the daemon sends no discovery request".to_owned());
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// The one in the middle, or between the two there; of none, no number.
pub fn median(figures: &[f64]) -> f64 {
    let mut sorted = figures.to_vec();
    sorted.sort_by(f64::total_cmp);
    match sorted.len() {
        0 => f64::NAN,
        len if len % 2 == 1 => sorted[len / 2],
        len => (sorted[len / 2 - 1] + sorted[len / 2]) / 2.0,
    }
}
