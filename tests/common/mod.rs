//! What black-box tests need around the daemon: a broker, a temporary folder, the daemon itself, its metrics and its log.
//!
//! `NATS_SERVER` names another broker program, `PROVISIONER_UNDER_TEST` another daemon. With `PROVISIONER_IS_ORIGINAL`
//! set too, settings that the Go daemon refuses (an interval under a minute) are replaced by ones it takes.
//! `KEEP_TEST_FILES` leaves the temporary folders where they are.

// Each test binary uses its own part of this.
#![allow(dead_code)]

pub mod admin;
pub mod choria_broker;
pub mod cluster;
pub mod streams;

use std::collections::BTreeMap;
use std::env;
use std::fmt::{self, Write as _};
use std::fs::{self, File};
use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use crate::fleet::Fleet;
use crate::fleet::network::Network;

/// How long something may take that normally takes no time at all: the machine may be busy.
pub const SOON: Duration = Duration::from_secs(20);

/// Waits until `condition` holds.
///
/// # Panics
///
/// With `what` when it does not within `patience`.
#[track_caller]
pub fn wait_until(patience: Duration, what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + patience;
    while !condition() {
        assert!(Instant::now() < deadline, "not within {patience:?}: {what}");
        thread::sleep(Duration::from_millis(10));
    }
}

/// The processes that work in `folder`, which may be gone by now.
pub fn processes_in(folder: &Path) -> Vec<u32> {
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    processes
        .filter(|process| {
            let cwd = fs::read_link(process.path().join("cwd")).unwrap_or_default();
            cwd.to_string_lossy().starts_with(&*folder.to_string_lossy())
        })
        .filter_map(|process| process.file_name().to_str()?.parse().ok())
        .collect()
}

/// `patience` from now.
pub fn within(patience: Duration) -> Instant {
    Instant::now() + patience
}

/// A port nobody listens on, outside the range from which outgoing connections get theirs.
pub fn free_port() -> u16 {
    loop {
        let port = fastrand::u16(15_000..32_000);
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}

/// A folder that goes away with this value.
#[derive(Debug)]
pub struct TempDir(PathBuf);

impl TempDir {
    /// Makes one.
    pub fn new(what: &str) -> TempDir {
        let name = format!("choria-provisioner-{what}-{}", fastrand::u64(..));
        let path = env::temp_dir().join(name);
        fs::create_dir_all(&path).expect("the temporary folder is writable");
        TempDir(path)
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Writes a file in it.
    pub fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.0.join(name);
        fs::write(&path, text).expect("the temporary folder is writable");
        path
    }

    /// Writes a program in it.
    pub fn write_program(&self, name: &str, text: &str) -> PathBuf {
        let path = self.write(name, text);
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("the file is ours");
        path
    }
}

impl Drop for TempDir {
    fn drop(&mut self) {
        if env::var_os("KEEP_TEST_FILES").is_none() {
            let _ = fs::remove_dir_all(&self.0);
        }
    }
}

/// A stock `nats-server` on a port of its own, killed when dropped.
#[derive(Debug)]
pub struct NatsServer {
    port: u16,
    child: Option<Child>,
    dir: TempDir,
    config: Option<PathBuf>,
}

impl NatsServer {
    /// Starts one and waits until it takes connections.
    pub fn start() -> NatsServer {
        NatsServer::with_config(None)
    }

    /// Starts one with the configuration file at `config`, which is read again at each start.
    pub fn configured(config: &Path) -> NatsServer {
        NatsServer::with_config(Some(config.to_path_buf()))
    }

    fn with_config(config: Option<PathBuf>) -> NatsServer {
        let dir = TempDir::new("nats-server");
        let mut server = NatsServer { port: free_port(), child: None, dir, config };
        // Another test may have taken the port in the meantime.
        while !server.try_start() {
            server.port = free_port();
        }
        server
    }

    /// Where it listens.
    pub fn url(&self) -> String {
        format!("nats://127.0.0.1:{}", self.port)
    }

    /// Where it listens, as host and port.
    pub fn address(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    /// Kills it, as a power cut would.
    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    /// Starts it again on the same port.
    pub fn restart(&mut self) {
        self.kill();
        wait_until(SOON, "the broker is back on its port", || self.try_start());
    }

    fn try_start(&mut self) -> bool {
        let program = env::var("NATS_SERVER").unwrap_or_else(|_| "nats-server".to_owned());
        let log = self.dir.path().join("nats-server.log");
        let mut child = Command::new(&program)
            .args(["--addr", "127.0.0.1", "--port", &self.port.to_string()])
            .arg("--log")
            .arg(&log)
            .args(self.config.iter().flat_map(|config| [Path::new("--config"), config]))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap_or_else(|error| panic!("{program} cannot be started: {error}"));
        let deadline = Instant::now() + SOON;
        loop {
            if child.try_wait().expect("it is our child").is_some() {
                return false;
            }
            if self.greets() {
                self.child = Some(child);
                return true;
            }
            assert!(Instant::now() < deadline, "{program} does not listen");
            thread::sleep(Duration::from_millis(5));
        }
    }

    fn greets(&self) -> bool {
        let Ok(mut stream) = TcpStream::connect(("127.0.0.1", self.port)) else { return false };
        let mut start = [0; 4];
        let _ = stream.set_read_timeout(Some(Duration::from_secs(2)));
        stream.read_exact(&mut start).is_ok() && &start == b"INFO"
    }
}

impl Drop for NatsServer {
    fn drop(&mut self) {
        self.kill();
    }
}

/// A helper that gives every node its own identity and ends provisioning. It uses nothing but the shell.
pub const HELPER: &str = r#"#!/bin/sh
IFS= read -r input
identity=${input#*'"identity":"'}
identity=${identity%%'"'*}
printf '{"configuration":{"identity":"%s","plugin.choria.server.provision":"0"}}\n' "$identity"
"#;

/// A helper that says that it has begun, and answers when it may go on.
pub fn waiting_helper(begun: &Path, go_on: &Path) -> String {
    format!(
        "#!/bin/sh\n: >{}\nwhile [ ! -e {} ]; do sleep 0.05; done\n\
         echo '{{\"configuration\":{{\"plugin.choria.server.provision\":\"0\"}}}}'\n",
        begun.display(),
        go_on.display()
    )
}

/// How a daemon is going to be started.
#[derive(Debug)]
pub struct Builder {
    dir: TempDir,
    settings: BTreeMap<String, String>,
    features: BTreeMap<String, String>,
    choria: BTreeMap<String, String>,
    raw: String,
    arguments: Vec<String>,
    environment: Vec<(String, String)>,
    monitor_port: u16,
}

/// The daemon, killed when dropped.
#[derive(Debug)]
pub struct Daemon {
    child: Child,
    dir: TempDir,
    monitor_port: u16,
    started: Instant,
}

impl Daemon {
    /// A daemon for the broker at `address`, with the JWT feature and a helper that provisions every node.
    pub fn builder(address: &str) -> Builder {
        let dir = TempDir::new("daemon");
        let monitor_port = free_port();
        let verify = dir.write("verify.pem", &Fleet::verify_key_pem());
        let helper = dir.write_program("helper", HELPER);
        let texts = |pairs: &[(&str, &str)]| {
            pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
        };
        let builder = Builder {
            settings: texts(&[
                ("workers", "4"),
                ("interval", "1s"),
                ("loglevel", "debug"),
                ("token", "s3cret"),
                ("site", "test"),
                ("choria_insecure", "true"),
                ("monitor_address", "127.0.0.1"),
            ]),
            features: texts(&[("jwt", "true")]),
            choria: texts(&[
                ("identity", "provisioner.example.net"),
                ("plugin.choria.middleware_hosts", address),
            ]),
            raw: String::new(),
            arguments: Vec::new(),
            // The certificate name, and so the caller, must not depend on who runs the tests.
            environment: vec![(
                "MCOLLECTIVE_CERTNAME".to_owned(),
                "provisioner.example.net".to_owned(),
            )],
            monitor_port,
            dir,
        };
        let log = builder.dir.path().join("provisioner.log");
        builder
            .set("monitor_port", monitor_port)
            .set("logfile", log.display())
            .set("jwt_verify_cert", verify.display())
            .set("helper", helper.display())
    }

    /// The number of the process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Where its files are.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// All it wrote so far: the log file, stdout and stderr.
    pub fn log(&self) -> String {
        read_log(&self.dir)
    }

    /// Whether some line of the log has all of these parts.
    pub fn logged(&self, parts: &[&str]) -> bool {
        self.log().lines().any(|line| parts.iter().all(|part| line.contains(part)))
    }

    /// Waits for a line of the log that has all of these parts.
    #[track_caller]
    pub fn wait_logged(&self, patience: Duration, parts: &[&str]) {
        let deadline = Instant::now() + patience;
        while !self.logged(parts) {
            let end = Instant::now() >= deadline;
            assert!(!end, "no line with {parts:?} within {patience:?} in\n{}", tail(&self.log()));
            thread::sleep(Duration::from_millis(20));
        }
    }

    /// Asks the monitor port for `path`; status and body.
    ///
    /// # Errors
    ///
    /// When nothing answers there.
    pub fn get(&self, path: &str) -> std::io::Result<(u16, String)> {
        let mut stream = TcpStream::connect(("127.0.0.1", self.monitor_port))?;
        stream.set_read_timeout(Some(SOON))?;
        write!(stream, "GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")?;
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer)?;
        let answer = String::from_utf8_lossy(&answer);
        let (head, body) = answer.split_once("\r\n\r\n").unwrap_or((&answer, ""));
        let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or(0);
        let chunked = head.to_ascii_lowercase().contains("transfer-encoding: chunked");
        let body = if chunked { unchunk(body) } else { body.to_owned() };
        Ok((status, body))
    }

    /// All metrics as they are now.
    #[track_caller]
    pub fn metrics(&self) -> Metrics {
        let (status, text) = self.get("/metrics").expect("the monitor port answers");
        assert_eq!(status, 200, "{text}");
        Metrics::parse(&text)
    }

    /// Waits until it has begun its first discovery: from then on it hears startup events too.
    #[track_caller]
    pub fn wait_ready(&self) {
        wait_until(SOON, "the first discovery", || self.metric("discover_cycles") >= 1.0);
    }

    /// The value of one metric, all its series added; zero when there is none.
    #[track_caller]
    pub fn metric(&self, name: &str) -> f64 {
        self.metrics().sum(name)
    }

    /// Names of its threads, sorted.
    pub fn threads(&self) -> Vec<String> {
        let tasks = fs::read_dir(format!("/proc/{}/task", self.pid())).into_iter().flatten();
        let mut names: Vec<String> = tasks
            .filter_map(|task| fs::read_to_string(task.ok()?.path().join("comm")).ok())
            .map(|name| name.trim().to_owned())
            .collect();
        names.sort();
        names
    }

    /// Most memory it ever held, in bytes.
    pub fn peak_memory(&self) -> u64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.pid())).unwrap_or_default();
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let kib = line.and_then(|line| line.trim().split(' ').next()?.parse::<u64>().ok());
        kib.unwrap_or(0) * 1024
    }

    /// Whether it still runs.
    pub fn is_alive(&mut self) -> bool {
        self.child.try_wait().expect("it is our child").is_none()
    }

    /// Fails the test with the end of the log when the daemon does not run any more.
    #[track_caller]
    pub fn assert_alive(&mut self) {
        if let Some(status) = self.child.try_wait().expect("it is our child") {
            panic!("the daemon ended with {status}:\n{}", tail(&self.log()));
        }
    }

    /// Writes another value of a key into the YAML file, as it is.
    #[track_caller]
    pub fn write_setting(&self, key: &str, value: impl fmt::Display) {
        let path = self.dir.path().join("choria-provisioner.yaml");
        let yaml = fs::read_to_string(&path).expect("it was written at the start");
        let is_it = |line: &str| line.starts_with(&format!("{key}:"));
        let others: String =
            yaml.lines().filter(|line| !is_it(line)).map(|line| format!("{line}\n")).collect();
        // Whole at once: the daemon may be reading it.
        let new = self.dir.write("new.yaml", &format!("{key}: {value}\n{others}"));
        fs::rename(new, path).expect("the folder is ours");
    }

    /// Sends SIGTERM.
    pub fn terminate(&self) {
        self.signal(rustix::process::Signal::TERM);
    }

    /// Sends a signal.
    pub fn signal(&self, signal: rustix::process::Signal) {
        let pid = i32::try_from(self.pid()).ok().and_then(rustix::process::Pid::from_raw);
        let pid = pid.expect("a process has a number");
        rustix::process::kill_process(pid, signal).expect("it is our child");
    }

    /// Waits for its end.
    #[track_caller]
    pub fn wait(&mut self, patience: Duration) -> ExitStatus {
        let deadline = Instant::now() + patience;
        loop {
            if let Some(status) = self.child.try_wait().expect("it is our child") {
                return status;
            }
            let end = Instant::now() >= deadline;
            assert!(!end, "the daemon did not end within {patience:?}:\n{}", tail(&self.log()));
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// SIGTERM, then waits for its end.
    #[track_caller]
    pub fn stop(&mut self) -> ExitStatus {
        self.terminate();
        self.wait(SOON)
    }

    /// Since it was started.
    pub fn age(&self) -> Duration {
        self.started.elapsed()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        // What a helper put out of our reach on purpose would sleep on.
        for pid in processes_in(self.dir()) {
            if let Some(pid) = i32::try_from(pid).ok().and_then(rustix::process::Pid::from_raw) {
                let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
            }
        }
        if thread::panicking() {
            let _ = writeln!(std::io::stderr(), "end of the daemon's log:\n{}", tail(&self.log()));
        }
    }
}

impl Builder {
    /// Sets a key of the YAML file; the value is written as it is.
    pub fn set(mut self, key: &str, value: impl ToString) -> Builder {
        self.settings.insert(key.to_owned(), value.to_string());
        self
    }

    /// Leaves out a key of the YAML file.
    pub fn without(mut self, key: &str) -> Builder {
        self.settings.remove(key);
        self
    }

    /// Switches a feature; the value is written as it is.
    pub fn feature(mut self, name: &str, value: &str) -> Builder {
        self.features.insert(name.to_owned(), value.to_owned());
        self
    }

    /// Adds lines to the YAML file.
    pub fn yaml(mut self, lines: &str) -> Builder {
        self.raw.push_str(lines);
        self.raw.push('\n');
        self
    }

    /// Sets a key of the Choria client file.
    pub fn choria(mut self, key: &str, value: &str) -> Builder {
        self.choria.insert(key.to_owned(), value.to_owned());
        self
    }

    /// Settings, features and credentials for `network`.
    pub fn network(mut self, network: &Network) -> Builder {
        self.settings
            .extend(network.settings().into_iter().map(|(key, value)| (key.to_owned(), value)));
        self.choria.extend(network.client_settings());
        let features = network.features().map(|name| (name.to_owned(), "true".to_owned()));
        self.features.extend(features);
        self
    }

    /// Uses this program text as the helper.
    pub fn helper(self, script: &str) -> Builder {
        self.dir.write_program("helper", script);
        self
    }

    /// Adds an argument.
    pub fn argument(mut self, argument: &str) -> Builder {
        self.arguments.push(argument.to_owned());
        self
    }

    /// Sets an environment variable.
    pub fn env(mut self, name: &str, value: &str) -> Builder {
        self.environment.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Where the daemon's files are.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// The port of its metrics.
    pub fn monitor_port(&self) -> u16 {
        self.monitor_port
    }

    /// Starts it and waits until its metrics can be read.
    ///
    /// # Panics
    ///
    /// When it ends instead.
    #[track_caller]
    pub fn start(self) -> Daemon {
        let mut daemon = self.spawn();
        let deadline = Instant::now() + SOON;
        while daemon.get("/metrics").is_err() {
            daemon.assert_alive();
            assert!(Instant::now() < deadline, "no metrics:\n{}", tail(&daemon.log()));
            thread::sleep(Duration::from_millis(5));
        }
        daemon
    }

    /// Starts it and waits for its end: exit code and all it wrote.
    #[track_caller]
    pub fn run_to_its_end(self) -> (i32, String) {
        let mut daemon = self.spawn();
        let status = daemon.wait(SOON);
        (status.code().unwrap_or(-1), daemon.log())
    }

    /// Writes its files: settings and client file.
    pub fn write_files(&self) -> (PathBuf, PathBuf) {
        let mut yaml = String::new();
        for (key, value) in &self.settings {
            let _ = writeln!(yaml, "{key}: {value}");
        }
        yaml.push_str("features:\n");
        for (name, value) in &self.features {
            let _ = writeln!(yaml, "  {name}: {value}");
        }
        yaml.push_str(&self.raw);
        let config = self.dir.write("choria-provisioner.yaml", &yaml);
        let mut choria = String::new();
        for (key, value) in &self.choria {
            let _ = writeln!(choria, "{key} = {value}");
        }
        let client = self.dir.write("choria.cfg", &choria);
        (config, client)
    }

    /// Another command of the program, on the same files and in the same surroundings.
    pub fn command(&self, word: &str) -> Command {
        let (config, client) = self.write_files();
        let mut command = Command::new(env!("CARGO_BIN_EXE_choria-provisioner"));
        command.arg(word).arg("--config").arg(config).arg("--choria-config").arg(client);
        command.args(&self.arguments).envs(self.environment.iter().cloned());
        command.current_dir(self.dir.path()).stdin(Stdio::null());
        command
    }

    /// Starts it.
    pub fn spawn(mut self) -> Daemon {
        if env::var_os("PROVISIONER_IS_ORIGINAL").is_some() {
            self = self.set("interval", "1m");
        }
        let (config, client) = self.write_files();
        let program = env::var("PROVISIONER_UNDER_TEST")
            .unwrap_or_else(|_| env!("CARGO_BIN_EXE_choria-provisioner").to_owned());
        let output = |name: &str| {
            File::create(self.dir.path().join(name)).expect("the temporary folder is writable")
        };
        let child = Command::new(&program)
            .arg("run")
            .arg("--config")
            .arg(&config)
            .arg("--choria-config")
            .arg(&client)
            .args(&self.arguments)
            .envs(self.environment)
            .current_dir(self.dir.path())
            .stdin(Stdio::null())
            .stdout(output("stdout"))
            .stderr(output("stderr"))
            .spawn()
            .unwrap_or_else(|error| panic!("{program} cannot be started: {error}"));
        let (dir, monitor_port) = (self.dir, self.monitor_port);
        Daemon { child, dir, monitor_port, started: Instant::now() }
    }
}

fn read_log(dir: &TempDir) -> String {
    let mut log = String::new();
    for name in ["provisioner.log", "stdout", "stderr"] {
        let bytes = fs::read(dir.path().join(name)).unwrap_or_default();
        log.push_str(&String::from_utf8_lossy(&bytes));
    }
    log
}

/// The last lines of a log, enough to see why a test failed.
pub fn tail(log: &str) -> String {
    let lines: Vec<&str> = log.lines().collect();
    lines[lines.len().saturating_sub(60)..].join("\n")
}

fn unchunk(mut body: &str) -> String {
    let mut whole = String::new();
    while let Some((size, rest)) = body.split_once("\r\n") {
        let size = usize::from_str_radix(size.trim(), 16).unwrap_or(0);
        let Some(chunk) = rest.get(..size).filter(|_| size > 0) else { break };
        whole.push_str(chunk);
        body = rest[size..].trim_start_matches("\r\n");
    }
    whole
}

/// One reading of the metrics: series as written → value.
pub struct Metrics(BTreeMap<String, f64>);

impl fmt::Debug for Metrics {
    /// All but buckets and zeros, which would bury the rest.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let series =
            self.0.iter().filter(|(name, value)| !name.contains("_bucket{") && **value != 0.0);
        f.debug_map().entries(series).finish()
    }
}

impl Metrics {
    /// Reads the text format.
    pub fn parse(text: &str) -> Metrics {
        let lines = text.lines().filter(|line| !line.starts_with('#'));
        let series = lines.filter_map(|line| {
            let (name, value) = line.rsplit_once(' ')?;
            Some((name.to_owned(), value.parse().ok()?))
        });
        Metrics(series.collect())
    }

    /// All series of `name`, without the prefix `choria_provisioner_`, added.
    pub fn sum(&self, name: &str) -> f64 {
        self.with(name, "")
    }

    /// All series of `name` that have this label, such as `outcome="busy"`, added.
    pub fn with(&self, name: &str, label: &str) -> f64 {
        let full = format!("choria_provisioner_{name}");
        let series = self.0.iter().filter(|(series, _)| {
            let (series, labels) = series.split_once('{').unwrap_or((series, ""));
            series == full && labels.contains(label)
        });
        series.map(|(_, value)| value).sum()
    }
}
