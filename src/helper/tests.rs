//! Commands as a site writes them, run for real.

use std::collections::BTreeMap;

use super::*;

#[test]
fn splits_as_a_shell_without_comments_and_expansion() {
    splits("h a b", &["h", "a", "b"]);
    splits("  h\ta\nb  ", &["h", "a", "b"]);
    splits("h a #b c", &["h", "a", "#b", "c"]);
    splits("h '#a b' \"c # d\" e#f \\#g", &["h", "#a b", "c # d", "e#f", "#g"]);
    splits(r#"h 'a "b"' "c 'd'" "#, &["h", "a \"b\"", "c 'd'"]);
    splits(r#"h a\ b "c\"d\$e\f" '\'"#, &["h", "a b", "c\"d$e\\f", "\\"]);
    splits(
        "h $HOME ~ * `id` $(id) | > x ; &",
        &["h", "$HOME", "~", "*", "`id`", "$(id)", "|", ">", "x", ";", "&"],
    );
    splits("h '' \"\"", &["h", "", ""]);
    splits("h a\\\\", &["h", "a\\"]);
    splits("h \u{e000}#", &["h", "\u{e000}#"]);
}

#[track_caller]
fn splits(text: &str, words: &[&str]) {
    assert_eq!(split(text).unwrap(), words, "{text}");
}

#[test]
fn refuses_commands_that_name_no_program() {
    refuses("", "cannot parse helper command: empty");
    refuses(" \t\n", "cannot parse helper command: empty");
    refuses("/bin/sh 'a", "cannot parse helper command: unterminated quote");
    refuses("/bin/sh \"a", "cannot parse helper command: unterminated quote");
    refuses("/bin/sh \"a\\", "cannot parse helper command: unterminated quote");
    refuses("/bin/sh a\\", "cannot parse helper command: unterminated backslash");
    refuses("/no/such/helper -v", "cannot find helper /no/such/helper");
    refuses("~/helper -v", "cannot find helper ~/helper, since no shell expands it");
    refuses("no-such-helper", "cannot find helper no-such-helper in PATH");
    refuses("'' a", "cannot parse helper command: empty");
    refuses("/etc/passwd", "helper /etc/passwd is not an executable file: `chmod +x` makes it one");
    refuses("/bin", "helper /bin is not an executable file");
}

#[track_caller]
fn refuses(text: &str, error: &str) {
    assert_eq!(HelperCommand::parse(text).unwrap_err().to_string(), error, "{text}");
}

#[test]
fn finds_a_name_without_a_slash_in_path() {
    let command = HelperCommand::parse("sh -c 'exit 0'").unwrap();
    assert!(command.program().is_absolute(), "{command:?}");
    assert_eq!(command.program().file_name().unwrap(), "sh");
    assert_eq!(command.arguments(), ["-c", "exit 0"]);
    assert_eq!(command.as_str(), "sh -c 'exit 0'");
}

#[test]
fn input_is_what_a_helper_of_the_original_receives() {
    for folder in ["insecure", "issuer", "x509"] {
        #[derive(serde::Deserialize)]
        struct Recorded {
            identity: String,
            csr: Option<BTreeMap<String, String>>,
            ed25519_pubkey: Option<BTreeMap<String, String>>,
            inventory: String,
            jwt: Option<Box<RawValue>>,
        }

        let path = format!("tests/vectors/captures/{folder}/helper-input.json");
        let recorded = std::fs::read_to_string(path).unwrap();
        let parsed: Recorded = serde_json::from_str(&recorded).unwrap();
        let identity = Identity::parse(&parsed.identity).unwrap();
        let jwt =
            parsed.jwt.map(|jwt| RawValue::from_string(without_white_space(jwt.get())).unwrap());
        let input = Input {
            identity: &identity,
            csr: parsed.csr.as_ref().map(|csr| CsrInput {
                csr: &csr["csr"],
                public_key: &csr["public_key"],
                ssldir: &csr["ssldir"],
            }),
            ed25519: parsed.ed25519_pubkey.as_ref().map(|key| Ed25519Input {
                public_key: &key["public_key"],
                directory: &key["directory"],
                signature: &key["signature"],
            }),
            inventory: &parsed.inventory,
            jwt: jwt.as_deref(),
        };
        let directory = Directory::new();
        let script = format!("cat >{}/input; echo '{{}}'", directory.0.display());
        let bench = Bench::new(&script);
        bench.helper().run(&input, bench.deadline(), &bench.abort).unwrap();
        let received = std::fs::read_to_string(directory.0.join("input")).unwrap();
        assert_eq!(received, without_white_space(&recorded), "{folder}");
    }
}

/// `json` without white space outside its strings.
fn without_white_space(json: &str) -> String {
    let (mut in_string, mut escaped) = (false, false);
    json.chars()
        .filter(|&c| {
            let keep = in_string || !c.is_whitespace();
            match c {
                '"' if !escaped => in_string = !in_string,
                _ => {}
            }
            escaped = in_string && c == '\\' && !escaped;
            keep
        })
        .collect()
}

#[test]
fn answers_are_used() {
    let answer = Bench::new(r#"echo '{"msg":"hello","configuration":{"a":"1"}}'"#).ask().unwrap();
    assert_eq!(answer.msg, "hello");
    assert_eq!(answer.configuration["a"], "1");
    says("cat >/dev/null; echo '{\"msg\":\"read all\"}'", "read all");
    says("exec <&-; echo '{\"msg\":\"read nothing\"}'", "read nothing");
    says("echo warning >&2; echo '{\"msg\":\"warned\"}'", "warned");
    says("printf '{\"msg\":'; sleep 0.1; printf '\"in parts\"}'", "in parts");
}

#[test]
fn a_helper_that_prints_nothing_is_told_so() {
    fails("exit 0", "cannot read HELPER output: zero bytes received (exit status 0, ran T s)");
    fails(
        "exit 3",
        "it ran and failed, exit status 3: cannot read HELPER output: zero bytes received (exit status 3, ran T s)",
    );
    fails(
        "echo no database >&2; echo >&2; exit 3",
        "it ran and failed, exit status 3: cannot read HELPER output: zero bytes received (exit status 3, ran T s, last line on stderr: no database)",
    );
}

#[test]
fn a_failing_exit_status_spoils_a_good_answer() {
    fails("echo '{}'; exit 1", "could not wait for HELPER: exit status 1 (ran T s)");
    fails(
        "echo '{}'; printf 'a\\nb\\033c' >&2; exit 255",
        "could not wait for HELPER: exit status 255 (ran T s, last line on stderr: b\\u{1b}c)",
    );
    fails("echo '{}'; kill -TERM $$", "could not wait for HELPER: signal: terminated (ran T s)");
    fails("echo '{}'; kill -KILL $$", "could not wait for HELPER: signal: killed (ran T s)");
    fails(
        "kill -SEGV $$",
        "it ran and failed, signal: segmentation fault: cannot read HELPER output: zero bytes received (signal: segmentation fault, ran T s)",
    );
}

#[test]
fn half_an_answer_is_none() {
    fails(
        r#"printf '{"defer":true,"msg":"x'"#,
        "cannot decode output from HELPER: msg: EOF while parsing a string at line 1 column 22 (exit status 0, ran T s)",
    );
    fails(
        "echo '{}'; echo Done",
        "cannot decode output from HELPER: trailing characters at line 2 column 1 (exit status 0, ran T s)",
    );
}

#[test]
fn output_is_bounded() {
    fails(
        "head -c 10000000 /dev/zero",
        "cannot read HELPER output: more than 4194304 bytes (signal: killed, ran T s)",
    );
    // A helper that would write for ever ends with the bound, not with the time.
    let bench = Bench { timeout: LONG, ..Bench::new("cat /dev/zero") };
    let error = bench.ask().unwrap_err();
    assert!(matches!(error.failure(), Failure::TooLong { output_max: 4_194_304 }), "{error}");
    // To the byte.
    let answer = r#"{"msg":"x"}"#;
    for (output_max, fits) in [(answer.len(), true), (answer.len() - 1, false)] {
        let bench = Bench { output_max, ..Bench::new(&format!("printf '{answer}'")) };
        assert_eq!(bench.ask().is_ok(), fits, "{output_max}");
    }
}

#[test]
fn a_helper_that_never_ends_is_killed_with_its_group() {
    for (script, expected) in [
        (
            "sleep 1000",
            "cannot read HELPER output: zero bytes received (signal: killed, at its time limit, ran T s)",
        ),
        (
            "echo '{}'; sleep 1000",
            "could not wait for HELPER: signal: killed, at its time limit (ran T s)",
        ),
        (
            "exec >&- 2>&-; sleep 1000",
            "cannot read HELPER output: zero bytes received (signal: killed, at its time limit, ran T s)",
        ),
        (
            "echo '{}'; trap '' TERM INT HUP; sleep 1000 & wait; wait",
            "could not wait for HELPER: signal: killed, at its time limit (ran T s)",
        ),
    ] {
        let watch = Watch::new();
        let script = format!("exec 9>{}; {script}", watch.fifo());
        let bench = Bench { timeout: SHORT, ..Bench::new(&script) };
        assert_eq!(bench.error(), expected, "{script}");
        watch.all_ended();
    }
}

#[test]
fn the_deadline_of_the_node_counts_as_well() {
    let bench = Bench { timeout: LONG, ..Bench::new("sleep 1000") };
    let identity = Identity::parse("n1.example.net").unwrap();
    let deadline = Instant::now() + SHORT;
    let error = bench.helper().run(&input(&identity, ""), deadline, &bench.abort).unwrap_err();
    assert!(matches!(error.failure(), Failure::Empty { .. }), "{error}");
    assert!(Instant::now() >= deadline);
}

#[test]
fn an_answer_counts_though_a_grandchild_keeps_stdout_open() {
    let watch = Watch::new();
    let script = format!("exec 9>{}; sleep 1000 & echo '{{\"msg\":\"mine\"}}'", watch.fifo());
    let bench = Bench { timeout: LONG, ..Bench::new(&script) };
    assert_eq!(bench.ask().unwrap().msg, "mine");
    watch.all_ended();
}

#[test]
fn a_grandchild_that_keeps_stdout_open_cannot_hold_us() {
    let watch = Watch::new();
    let script = format!("exec 9>{}; sleep 1000 & exit 0", watch.fifo());
    let bench = Bench { timeout: SHORT, ..Bench::new(&script) };
    assert_eq!(
        bench.error(),
        "cannot read HELPER output: zero bytes received (exit status 0, another process kept its output open, ran T s)"
    );
    watch.all_ended();
    // Not for the whole time either, once the helper itself has ended.
    let bench = Bench { timeout: LONG, ..Bench::new("sleep 1000 & printf '{'") };
    let error = bench.ask().unwrap_err();
    assert!(matches!(error.failure(), Failure::Undecodable(_)), "{error}");
}

#[test]
fn a_grandchild_may_finish_the_answer() {
    says("(sleep 0.1; echo '{\"msg\":\"late\"}') & exit 0", "late");
}

#[test]
fn a_background_job_that_lets_go_of_stdout_lives_on() {
    // It does so after it was forked, so the helper may have ended before.
    for before in ["", "sleep 0.1;"] {
        let directory = Directory::new();
        let (go, done) = (directory.fifo("go"), directory.fifo("done"));
        let script = format!(
            "({before} exec >/dev/null 2>&1; read x <{go}; echo alive >{done}) & echo '{{\"msg\":\"started\"}}'"
        );
        says(&script, "started");
        // Open in both directions: that waits for nobody.
        let mut go = std::fs::OpenOptions::new().read(true).write(true).open(go).unwrap();
        std::io::Write::write_all(&mut go, b"now\n").unwrap();
        let (sender, answered) = crossbeam_channel::bounded(1);
        std::thread::spawn(move || sender.send(std::fs::read_to_string(done).unwrap()));
        assert_eq!(answered.recv_timeout(LONG).unwrap(), "alive\n", "{before}");
    }
}

#[test]
fn a_grandchild_that_left_the_group_cannot_hold_us() {
    let directory = Directory::new();
    let fifo = directory.fifo("pid");
    let daemon = format!("setsid sh -c 'echo $$ >{fifo}; exec sleep 1000' & read pid <{fifo}");
    // With an answer it is used; the answer tells whom to end afterwards.
    let bench = Bench {
        timeout: LONG,
        ..Bench::new(&format!("{daemon}; echo \"{{\\\"msg\\\":\\\"$pid\\\"}}\""))
    };
    kill(&bench.ask().unwrap().msg);
    // Without one the run fails at its limit.
    let pid = directory.0.join("kept");
    let script = format!("{daemon}; echo $pid >{}; printf '{{'", pid.display());
    let bench = Bench { timeout: SHORT, ..Bench::new(&script) };
    let error = bench.ask().unwrap_err();
    assert!(matches!(error.failure(), Failure::Undecodable(_)), "{error}");
    kill(std::fs::read_to_string(pid).unwrap().trim());
}

fn kill(pid: &str) {
    let pid = rustix::process::Pid::from_raw(pid.parse().unwrap()).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
}

#[test]
fn a_large_input_blocks_nobody() {
    let large = "x".repeat(1_000_000);
    let ask = |script: &str| {
        let bench = Bench { timeout: LONG, ..Bench::new(script) };
        bench.ask_with(&large).unwrap().msg
    };
    assert_eq!(ask("echo '{\"msg\":\"did not read\"}'"), "did not read");
    assert_eq!(ask("head -c 100000 >/dev/null; echo '{\"msg\":\"read some\"}'"), "read some");
    // Written while it is read: both pipes would be full otherwise.
    assert_eq!(ask("printf '{\"msg\":\"echo\",\"x\":'; cat; printf '}'"), "echo");
}

#[test]
fn floods_of_stderr_are_read_and_bounded() {
    let flood = "head -c 10000000 /dev/zero | tr '\\0' 'x' >&2; echo >&2; echo the last >&2";
    says(&format!("{flood}; echo '{{\"msg\":\"done\"}}'"), "done");
    fails(
        &format!("{flood}; exit 1"),
        "it ran and failed, exit status 1: cannot read HELPER output: zero bytes received (exit status 1, ran T s, last line on stderr: the last)",
    );
}

#[test]
fn an_abort_ends_a_run_at_once_and_counts_no_error() {
    let watch = Watch::new();
    let directory = Directory::new();
    let fifo = directory.fifo("ready");
    let script = format!("exec 9>{}; echo ready >{fifo}; sleep 1000", watch.fifo());
    let (sender, abort) = crossbeam_channel::bounded(0);
    let bench = Bench { timeout: LONG, abort, ..Bench::new(&script) };
    let aborter = std::thread::spawn(move || {
        assert_eq!(std::fs::read_to_string(fifo).unwrap(), "ready\n");
        drop(sender);
    });
    let helper = bench.helper();
    let identity = Identity::parse("n1.example.net").unwrap();
    let error = helper.run(&input(&identity, ""), bench.deadline(), &bench.abort).unwrap_err();
    aborter.join().unwrap();
    assert!(error.is_aborted(), "{error}");
    assert_eq!(
        error.to_string().split(" (").next().unwrap(),
        format!("{} was killed because the provisioner stops", helper.command.as_str())
    );
    assert_eq!(helper.metrics.helper_errors.get(), 0);
    watch.all_ended();
}

#[test]
fn tells_why_a_program_does_not_start() {
    let directory = Directory::new();
    let file = directory.0.join("helper");
    let make = |content: &str| {
        // Through another process: a file still open for writing in one of ours can't be executed.
        let script = format!("printf '{content}' >{0}; chmod 755 {0}", file.display());
        let status = std::process::Command::new("sh").args(["-c", &script]).status().unwrap();
        assert!(status.success());
        Bench::of(HelperCommand::parse(&file.display().to_string()).unwrap())
    };
    let gone = make("#!/bin/sh\\n");
    std::fs::remove_file(&file).unwrap();
    let missing = "cannot start HELPER: No such file or directory (os error 2); it, or the interpreter its first line names, is missing";
    assert_eq!(gone.error(), missing);
    assert_eq!(make("#!/no/such/interpreter\\n").error(), missing);
    assert_eq!(
        make("echo hello\\n").error(),
        "cannot start HELPER: Exec format error (os error 8); a script needs a first line such as #!/bin/sh"
    );
}

#[test]
fn a_run_has_its_own_process_group_and_not_our_variables() {
    let own = r#"set -- $(cat /proc/self/stat); [ $5 = $$ ] && echo '{"msg":"own group"}'"#;
    says(own, "own group");
    let bench = Bench::new(
        r#"env | grep -q ^PATH= && echo '{"msg":"inherited"}' || echo '{"msg":"hidden"}'"#,
    );
    let mut helper = bench.helper();
    let identity = Identity::parse("n1.example.net").unwrap();
    for expected in ["inherited", "hidden"] {
        let answer = helper.run(&input(&identity, ""), bench.deadline(), &bench.abort).unwrap();
        assert_eq!(answer.msg, expected);
        helper.hidden.push("PATH".into());
    }
    for (name, hidden) in [
        ("NOTIFY_SOCKET", true),
        ("WATCHDOG_PID", true),
        ("WATCHDOG_USEC", true),
        ("CREDENTIALS_DIRECTORY", true),
        ("CHORIA_PROVISIONER_HELPER", true),
        ("MCOLLECTIVE_NATS_PASSWORD", true),
        ("MCOLLECTIVE_NATS_USERNAME", false),
        ("PATH", false),
        ("WATCHDOGS", false),
    ] {
        assert_eq!(is_hidden(name.as_ref()), hidden, "{name}");
    }
}

#[test]
fn arguments_arrive_as_written() {
    let command = HelperCommand::parse(
        r#"sh -c 'printf "{\"msg\":\"%s|%s|%s\"}" "$@"' name a '#b c' "$HOME""#,
    )
    .unwrap();
    assert_eq!(Bench::of(command).ask().unwrap().msg, "a|#b c|$HOME");
}

#[test]
fn runs_and_errors_are_counted() {
    let bench = Bench::new("cat");
    let identity = Identity::parse("n1.example.net").unwrap();
    let helper = bench.helper();
    for inventory in ["", "x"] {
        helper.run(&input(&identity, inventory), bench.deadline(), &bench.abort).unwrap();
    }
    assert_eq!((helper.metrics.helper_time.count(), helper.metrics.helper_errors.get()), (2, 0));
    let helper = Bench::new("exit 1").helper();
    helper.run(&input(&identity, ""), bench.deadline(), &bench.abort).unwrap_err();
    assert_eq!((helper.metrics.helper_time.count(), helper.metrics.helper_errors.get()), (1, 1));
}

/// Everything a run needs.
struct Bench {
    command: HelperCommand,
    timeout: Duration,
    output_max: usize,
    abort: Receiver<Never>,
}

impl Bench {
    fn new(script: &str) -> Bench {
        Bench::of(HelperCommand::parse(&shell_words::join(["sh", "-c", script])).unwrap())
    }

    fn of(command: HelperCommand) -> Bench {
        // A receiver that never disconnects.
        let abort = crossbeam_channel::never();
        Bench { command, timeout: LONG, output_max: 4 << 20, abort }
    }

    fn helper(&self) -> Helper {
        let limits = Limits { timeout: self.timeout, output_max: self.output_max };
        Helper::new(self.command.clone(), limits, Metrics::new(""))
    }

    fn deadline(&self) -> Instant {
        Instant::now() + LONG
    }

    fn ask(&self) -> Result<Answer, Error> {
        self.ask_with("{}")
    }

    fn ask_with(&self, inventory: &str) -> Result<Answer, Error> {
        let identity = Identity::parse("n1.example.net").unwrap();
        self.helper().run(&input(&identity, inventory), self.deadline(), &self.abort)
    }

    /// The error's text with placeholders for what differs between runs.
    fn error(&self) -> String {
        let text = self.ask().unwrap_err().to_string();
        let text = text.replace(self.command.as_str(), "HELPER");
        regex::Regex::new(r"ran \d+\.\d{3} s").unwrap().replace(&text, "ran T s").into_owned()
    }
}

pub(super) fn input<'a>(identity: &'a Identity, inventory: &'a str) -> Input<'a> {
    Input { identity, csr: None, ed25519: None, inventory, jwt: None }
}

#[track_caller]
fn says(script: &str, msg: &str) {
    match Bench::new(script).ask() {
        Ok(answer) => assert_eq!(answer.msg, msg, "{script}"),
        Err(error) => panic!("{error}"),
    }
}

#[track_caller]
fn fails(script: &str, expected: &str) {
    assert_eq!(Bench::new(script).error(), expected, "{script}");
}

/// A directory for one test, removed with it.
pub(super) struct Directory(PathBuf);

impl Directory {
    pub fn new() -> Directory {
        let name = format!("helper-test-{}-{:x}", std::process::id(), fastrand::u64(..));
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir(&path).unwrap();
        Directory(path)
    }

    pub fn path(&self, name: &str) -> String {
        self.0.join(name).display().to_string()
    }

    pub fn fifo(&self, name: &str) -> String {
        let path = self.0.join(name);
        let status = std::process::Command::new("mkfifo").arg(&path).status().unwrap();
        assert!(status.success());
        path.display().to_string()
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Notices when every process that holds its fifo open has ended.
pub(super) struct Watch {
    directory: Directory,
    ended: Receiver<()>,
}

impl Watch {
    pub fn new() -> Watch {
        let directory = Directory::new();
        let fifo = directory.fifo("held");
        let (sender, ended) = crossbeam_channel::bounded(1);
        std::thread::spawn(move || {
            std::fs::read(fifo).unwrap();
            sender.send(()).unwrap();
        });
        Watch { directory, ended }
    }

    pub fn fifo(&self) -> String {
        self.directory.0.join("held").display().to_string()
    }

    #[track_caller]
    pub fn all_ended(self) {
        self.ended.recv_timeout(LONG).expect("a process of the run lives on");
    }
}

/// Longer than anything in these tests takes.
pub(super) const LONG: Duration = Duration::from_secs(60);

/// Long enough for a shell to start on a busy machine.
pub(super) const SHORT: Duration = Duration::from_millis(1500);
