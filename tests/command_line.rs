//! Starting and ending: arguments, exit codes, log targets, pid file and signals.
//!
//! No broker is needed: the daemon waits for one for ever.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::fs;
use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{self, Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

#[test]
fn help_and_version_go_to_standard_output() {
    let output = program().arg("--help").output().unwrap();
    assert_eq!(output.status.code(), Some(0));
    assert!(stdout(&output).contains("--choria-config") && output.stderr.is_empty());
    let output = program().arg("--version").output().unwrap();
    assert_eq!(output.status.code(), Some(0));
    assert_eq!(stdout(&output), concat!(env!("CARGO_PKG_VERSION"), "\n"));
}

#[test]
fn wrong_arguments_end_with_2() {
    for arguments in
        [&["--nonsense"][..], &["run"], &["--config"], &["--config=a", "--config=b"], &[]]
    {
        let output = program().args(arguments).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        assert!(output.stdout.is_empty(), "{arguments:?}");
        assert!(stderr(&output).starts_with("choria-provisioner: error: "), "{arguments:?}");
    }
}

#[test]
fn exit_codes_do_not_depend_on_whether_the_error_can_be_written() {
    let full = || fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    for (arguments, code) in [(&["--nonsense"][..], 2), (&["--config", "/nowhere"], 78)] {
        let status = program().args(arguments).stderr(full()).status().unwrap();
        assert_eq!(status.code(), Some(code), "{arguments:?}");
    }
}

#[test]
fn a_wrong_configuration_ends_with_78_and_names_every_error() {
    let site = Site::new("workers: many\nhelper: /nowhere\nintervall: 5m\nchoria_insecure: true\n");
    let output = site.command().output().unwrap();
    assert_eq!(output.status.code(), Some(78));
    let said = stderr(&output);
    for part in [
        "p.yaml:1: workers: found the text \"many\"",
        "p.yaml:2: helper: ",
        "warning: ",
        "did you mean `interval`?",
    ] {
        assert!(said.contains(part), "{part:?} is not in {said}");
    }
    assert_eq!(said.lines().filter(|line| line.contains(": error: ")).count(), 2, "{said}");
    assert!(output.stdout.is_empty());
}

#[test]
fn a_missing_file_ends_with_78_and_is_named() {
    let site = Site::new(GOOD);
    fs::remove_file(site.path("p.yaml")).unwrap();
    let output = site.command().output().unwrap();
    assert_eq!(output.status.code(), Some(78));
    assert!(
        stderr(&output).contains("p.yaml: cannot be read: No such file"),
        "{}",
        stderr(&output)
    );
    let output = program().args(["--config", "/", "--choria-config", "/nowhere"]).output().unwrap();
    assert_eq!(output.status.code(), Some(78));
    assert_eq!(stderr(&output).lines().count(), 2, "{}", stderr(&output));
}

#[test]
fn a_pipe_in_the_place_of_a_file_is_refused_at_once() {
    let site = Site::new(GOOD);
    let pipe = site.path("pipe");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let pipe = pipe.display().to_string();
    let refused = |command: &mut Command, code: i32, place: &str| {
        let (status, said) = end_of(command);
        assert_eq!(status, Some(code), "{place}: {said}");
        let expected = format!("{place}it is a pipe, and a regular file is wanted");
        assert!(said.contains(&expected), "{expected:?} is not in {said}");
    };
    refused(program().arg(format!("@{pipe}")), 2, &format!("arguments file {pipe:?}: "));
    let unreadable = format!("{pipe}: cannot be read: ");
    refused(program().args(["--config", &pipe]), 78, &unreadable);
    let settings = site.path("p.yaml");
    let mut command = program();
    command.arg("--config").arg(&settings);
    refused(command.args(["--choria-config", &pipe]), 78, &unreadable);

    let key = format!("jwt_verify_cert: {pipe}");
    fs::write(&settings, format!("{GOOD}features: {{jwt: on}}\n{key}\n")).unwrap();
    refused(&mut site.command(), 78, &format!("{key} is no readable file ("));
    let [key, token] = ["key", "token"].map(|what| format!("jwt_signing_{what}: {pipe}"));
    fs::write(&settings, format!("{GOOD}features: {{ed25519: on}}\n{key}\n{token}\n")).unwrap();
    refused(&mut site.command(), 78, &format!("{key}: "));
    refused(&mut site.command(), 78, &format!("{token}: "));

    fs::write(&settings, "helper: /bin/true\n").unwrap();
    let family = "plugin.security.choria";
    let client = format!(
        "identity = p.example.net\nplugin.security.provider = choria\n\
         {family}.token_file = {pipe}\n{family}.seed_file = {pipe}\n"
    );
    fs::write(site.path("c.cfg"), client).unwrap();
    refused(&mut site.command(), 78, &format!("{family}.token_file: {pipe}: "));
    refused(&mut site.command(), 78, &format!("{family}.seed_file: {pipe}: "));
}

#[test]
fn a_pipe_that_nobody_reads_is_not_waited_for() {
    let site = Site::new(GOOD);
    let pipe = site.path("pipe");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let pipe = pipe.display();
    for (setting, others) in [("logfile", ""), ("audit_log", "logfile: stderr\n")] {
        fs::write(site.path("p.yaml"), format!("{GOOD}{others}{setting}: {pipe}\n")).unwrap();
        let (status, said) = end_of(&mut site.command());
        // It may have a reader the next time.
        assert_eq!(status, Some(1), "{said}");
        let expected = format!("{setting}: cannot open {pipe}: it is a pipe that nobody reads: ");
        assert!(said.contains(&expected), "{said}");
    }
    // The number of a process is looked up, not listened to.
    fs::write(site.path("p.yaml"), format!("{GOOD}logfile: stderr\n")).unwrap();
    let (status, said) = end_of(site.command().arg(format!("--pid={pipe}")));
    assert_eq!(status, Some(1), "{said}");
    assert!(said.contains(&format!("--pid: cannot write {pipe}: it is a pipe, and ")), "{said}");
}

#[test]
fn a_log_file_that_cannot_be_opened_ends_with_78() {
    let site = Site::new(&format!("{GOOD}logfile: /nowhere/x.log\n"));
    let output = site.command().output().unwrap();
    assert_eq!(output.status.code(), Some(78));
    let expected = "choria-provisioner: error: logfile: cannot open /nowhere/x.log: No such file or directory (os error 2)\n";
    assert_eq!(stderr(&output), expected);
}

#[test]
fn a_monitor_port_in_use_ends_with_1_before_any_work() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let site = Site::new(&format!("{GOOD}monitor_address: 127.0.0.1\nmonitor_port: {port}\n"));
    let output = site.command().arg("--pid").arg(site.path("pid")).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let expected = format!(
        "monitor_port: cannot listen on monitor port 127.0.0.1:{port}: Address already in use"
    );
    let said = stdout(&output);
    assert!(said.contains(&expected), "{said}");
    assert!(said.contains("p.yaml:"), "the place of the setting: {said}");
    assert!(said.contains("; `ss -ltnp` shows who listens there"), "{said}");
    assert!(output.stderr.is_empty(), "said once: {}", stderr(&output));
    assert!(!site.path("pid").exists());
}

#[test]
fn standard_error_gets_the_log_if_it_shall() {
    let site = Site::new(&format!("{GOOD}logfile: stderr\n"));
    let output = site.command().args(["--pid", "/nowhere/pid"]).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(output.stdout.is_empty());
    let said = stderr(&output);
    assert!(said.contains("level=error msg=\"--pid: cannot write /nowhere/pid: "), "{said}");
    assert_eq!(said.matches("/nowhere/pid").count(), 1, "said once: {said}");
}

#[test]
fn an_error_is_shown_where_the_log_is_not() {
    let site = Site::new(&format!("{GOOD}logfile: discard\n"));
    let output = site.command().args(["--pid", "/nowhere/pid"]).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(output.stdout.is_empty());
    assert!(stderr(&output).contains("--pid: cannot write /nowhere/pid: "), "{}", stderr(&output));
}

#[test]
fn sigterm_ends_it_well_and_takes_the_pid_file_away() {
    let site = Site::new(GOOD);
    let pid_file = site.path("pid");
    let mut daemon = site.start(&["--pid", pid_file.to_str().unwrap()]);
    daemon.wait_for("Starting with");
    let pid = daemon.child.id().to_string();
    assert_eq!(fs::read_to_string(&pid_file).unwrap(), pid);
    daemon.stop();
    assert!(!pid_file.exists());
}

#[test]
fn a_crash_leaves_no_secret_on_disk() {
    let site = Site::new(GOOD);
    let mut shell = Command::new("sh");
    shell.args(["-c", "ulimit -Sc \"$(ulimit -Hc)\" && exec \"$@\"", "sh"]);
    shell.arg(env!("CARGO_BIN_EXE_choria-provisioner"));
    shell.arg("--config").arg(site.path("p.yaml"));
    shell.arg("--choria-config").arg(site.path("c.cfg"));
    let mut daemon = Daemon::start(shell);
    daemon.wait_for("Starting with");
    let limits = fs::read_to_string(format!("/proc/{}/limits", daemon.child.id())).unwrap();
    let line = limits.lines().find(|line| line.starts_with("Max core file size")).unwrap();
    assert!(line["Max core file size".len()..].trim_start().starts_with("0 "), "{line}");
    daemon.stop();
}

#[test]
fn the_limit_on_file_descriptors_is_raised_for_many_workers() {
    for (most, raised, warned) in [(700, "696 ", false), (100, "100 ", true)] {
        let site = Site::new(&format!("{GOOD}workers: 75\n"));
        let program = env!("CARGO_BIN_EXE_choria-provisioner");
        let mut shell = Command::new("sh");
        shell.args(["-c", &format!("ulimit -n {most} && ulimit -Sn 50 && exec \"$@\""), "sh"]);
        shell.arg(program).arg("--config").arg(site.path("p.yaml"));
        shell.arg("--choria-config").arg(site.path("c.cfg"));
        let mut daemon = Daemon::start(shell);
        if warned {
            daemon.wait_for("75 workers may need 696 file descriptors and the system allows 100");
        }
        daemon.wait_for("Starting with");
        let limits = fs::read_to_string(format!("/proc/{}/limits", daemon.child.id())).unwrap();
        let line = limits.lines().find(|line| line.starts_with("Max open files")).unwrap();
        assert!(line["Max open files".len()..].trim_start().starts_with(raised), "{line}");
        daemon.stop();
    }
}

#[test]
fn a_third_sigterm_ends_it_when_it_waits_for_whoever_reads_its_log() {
    let site = Site::new(GOOD);
    let mut child = site.command().stdout(Stdio::piped()).spawn().unwrap();
    let (pid, log) = (Pid::from_child(&child), child.stdout.take().unwrap());
    let waiting = || rustix::io::ioctl_fionread(&log).unwrap();
    until(|| waiting() > 0);
    // Each is worth a line, until the pipe is full.
    let (mut last, mut same) = (0, 0);
    until(|| {
        kill_process(pid, Signal::HUP).unwrap();
        let now = waiting();
        same = if now == last { same + 1 } else { 0 };
        last = now;
        same == 50
    });
    let mut status = None;
    until(|| {
        kill_process(pid, Signal::TERM).unwrap();
        status = child.try_wait().unwrap();
        status.is_some()
    });
    assert_eq!(status.and_then(|status| status.code()), Some(1));
}

#[test]
fn standard_output_gets_text_with_the_originals_keys() {
    let site = Site::new(&format!("{GOOD}interval: 5s\n"));
    let mut daemon = site.start(&[]);
    let warning = daemon.wait_for("interval: 5s");
    assert!(
        warning.starts_with("time=\"20") && warning.contains("\" level=warning msg=\""),
        "{warning}"
    );
    assert!(warning.ends_with("\" component=config"), "{warning}");
    let start = daemon.wait_for("Starting with");
    assert!(
        start.contains(" level=info ") && start.contains(" component=provisioner version="),
        "{start}"
    );
    daemon.stop();
}

#[test]
fn a_file_gets_json_and_is_opened_again_on_sigusr2() {
    let site = Site::new(GOOD);
    let log = site.path("log");
    fs::write(site.path("p.yaml"), format!("{GOOD}logfile: {}\nmonitor_port: 0\n", log.display()))
        .unwrap();
    let mut daemon = site.start(&[]);
    until(|| fs::read_to_string(&log).is_ok_and(|log| log.ends_with('\n')));
    let first = fs::read_to_string(&log).unwrap();
    let first: serde_json::Value = serde_json::from_str(first.lines().next().unwrap()).unwrap();
    assert_eq!((&first["component"], &first["level"]), (&"provisioner".into(), &"info".into()));
    assert!(first["msg"].as_str().unwrap().starts_with("Starting with "));

    fs::rename(&log, site.path("log.1")).unwrap();
    daemon.signal(Signal::USR2);
    until(|| log.exists());
    daemon.stop();
}

#[test]
fn debug_on_the_command_line_wins_over_the_file() {
    let site = Site::new(&format!("{GOOD}loglevel: error\n"));
    let mut daemon = site.start(&["--debug"]);
    daemon.wait_for("Starting with");
    daemon.stop();
}

/// How long something may take that normally takes no time at all.
const SOON: Duration = Duration::from_secs(20);

const GOOD: &str = "helper: /bin/true\ntoken: s3cret\nchoria_insecure: true\n";

/// The two files of one daemon, in a folder of their own.
struct Site(PathBuf);

impl Site {
    fn new(yaml: &str) -> Site {
        // Tests run side by side.
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let dir = std::env::temp_dir().join(format!("provisioner-cli-{}-{count}", process::id()));
        fs::create_dir_all(&dir).unwrap();
        fs::write(dir.join("p.yaml"), yaml).unwrap();
        // Nobody listens on this port of this machine.
        let client = "plugin.choria.middleware_hosts = 127.0.0.1:1\nidentity = p.example.net\n";
        fs::write(dir.join("c.cfg"), client).unwrap();
        Site(dir)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    fn command(&self) -> Command {
        let mut command = program();
        command.arg("--config").arg(self.path("p.yaml"));
        command.arg("--choria-config").arg(self.path("c.cfg"));
        command
    }

    fn start(&self, arguments: &[&str]) -> Daemon {
        let mut command = self.command();
        command.args(arguments);
        Daemon::start(command)
    }
}

/// A running daemon, killed when dropped, and what it writes to standard output.
struct Daemon {
    child: Child,
    lines: Receiver<String>,
}

impl Daemon {
    fn start(mut command: Command) -> Daemon {
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let log = BufReader::new(child.stdout.take().unwrap());
        let (sender, lines) = mpsc::channel();
        thread::spawn(move || {
            log.lines().map_while(Result::ok).try_for_each(|line| sender.send(line))
        });
        Daemon { child, lines }
    }

    /// The next line with `part` in it.
    #[track_caller]
    fn wait_for(&mut self, part: &str) -> String {
        let mut seen = Vec::new();
        loop {
            match self.lines.recv_timeout(SOON) {
                Ok(line) if line.contains(part) => return line,
                Ok(line) => seen.push(line),
                Err(_) => panic!("{part:?} was not logged: {seen:#?}"),
            }
        }
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// SIGTERM, and a good end.
    #[track_caller]
    fn stop(&mut self) {
        self.signal(Signal::TERM);
        let mut status = None;
        until(|| {
            status = self.child.try_wait().unwrap();
            status.is_some()
        });
        assert_eq!(status.and_then(|status| status.code()), Some(0));
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn program() -> Command {
    Command::new(Path::new(env!("CARGO_BIN_EXE_choria-provisioner")))
}

#[track_caller]
fn until(mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + SOON;
    while !condition() {
        assert!(Instant::now() < deadline, "it does not happen");
        thread::sleep(Duration::from_millis(10));
    }
}

/// Runs it to its end: exit code, and what it said on standard error. One that does not end is killed.
#[track_caller]
fn end_of(command: &mut Command) -> (Option<i32>, String) {
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let deadline = Instant::now() + SOON;
    while child.try_wait().unwrap().is_none() && Instant::now() < deadline {
        thread::sleep(Duration::from_millis(10));
    }
    // It may have ended long ago.
    let _ = child.kill();
    let output = child.wait_with_output().unwrap();
    (output.status.code(), stderr(&output))
}

fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}
