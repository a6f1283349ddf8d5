//! Runs the helper, the operator's own program that decides a node's configuration: JSON in, JSON out, bounded in time and size.
//!
//! Command, input, answer and errors are those of the Go provisioner's `host/helper.go`, so that every helper written
//! for it runs unchanged. What an answer means for the node is decided by `node`.
//!
//! It is started for each node, or stays and is asked about many: `pool` hands out its processes, `session` asks one, `farewell`
//! sees off those that are not needed any more, and `process` is what both ways have in common.

mod answer;
mod farewell;
mod pool;
mod process;
mod session;
mod text;

use std::ffi::OsString;
use std::fmt;
use std::io;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::Receiver;
use serde::Serialize;
use serde_json::value::RawValue;

use crate::metrics::Metrics;
use crate::protocol::Identity;
use crate::secret::PASSWORD_VARIABLE;
use crate::shutdown::Never;

pub(crate) use answer::fold;
pub use answer::{Answer, Undecodable};
pub use session::Confusion;

/// What the helper is told about a node. Its keys and their order are part of the contract with helpers.
#[derive(Debug, Clone, Serialize)]
pub struct Input<'a> {
    /// The node, as discovered.
    #[serde(serialize_with = "identity")]
    pub identity: &'a Identity,
    /// The node's certificate signing request, with feature `pki`.
    pub csr: Option<CsrInput<'a>>,
    /// The node's Ed25519 key, with feature `ed25519`.
    #[serde(rename = "ed25519_pubkey")]
    pub ed25519: Option<Ed25519Input<'a>>,
    /// The JSON of the node's inventory, which the helper gets as a string.
    pub inventory: &'a str,
    /// The verified claims of the provisioning JWT, with feature `jwt`.
    pub jwt: Option<&'a RawValue>,
}

/// A certificate signing request as the node sent it.
#[derive(Debug, Clone, Serialize)]
pub struct CsrInput<'a> {
    /// The request, as PEM.
    pub csr: &'a str,
    /// The public key, as PEM.
    pub public_key: &'a str,
    /// The directory the node keeps it in.
    pub ssldir: &'a str,
}

/// A proved Ed25519 key as the node sent it.
#[derive(Debug, Clone, Serialize)]
pub struct Ed25519Input<'a> {
    /// The public key, in hex.
    pub public_key: &'a str,
    /// The directory the node keeps it in.
    pub directory: &'a str,
    /// The signature of our nonce, in hex.
    pub signature: &'a str,
}

fn identity<S: serde::Serializer>(identity: &Identity, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_str(identity.as_str())
}

/// Bounds of one run.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Time for all of it.
    pub timeout: Duration,
    /// Size of the answer, in bytes.
    pub output_max: usize,
}

/// Runs the helper, for one node or many at a time.
pub struct Helper {
    command: HelperCommand,
    limits: Limits,
    hidden: Vec<OsString>,
    mode: Mode,
    metrics: Arc<Metrics>,
}

/// How the helper is run.
enum Mode {
    /// Started for each node.
    Exec(Arc<process::Strays>),
    /// Started once and asked about many nodes.
    Persistent(Box<pool::Pool>),
}

impl Helper {
    /// A helper that runs `command` within `limits`, once for each node.
    pub fn new(command: HelperCommand, limits: Limits, metrics: Arc<Metrics>) -> Helper {
        let mode = Mode::Exec(Arc::default());
        Helper { command, limits, hidden: hidden(), mode, metrics }
    }

    /// A helper that keeps up to `processes_max` processes of `command`, each of which is asked about one node after another.
    ///
    /// Processes are started as they are needed.
    pub fn persistent(
        command: HelperCommand,
        limits: Limits,
        processes_max: usize,
        metrics: Arc<Metrics>,
    ) -> Helper {
        let pool = pool::Pool::new(command.clone(), processes_max, hidden(), metrics.clone());
        let mode = Mode::Persistent(Box::new(pool));
        Helper { command, limits, hidden: Vec::new(), mode, metrics }
    }

    /// The helper that takes this one's place, run in the same way with other settings. Those that still ask this one are
    /// answered by it; a process that stays is asked nothing more and ends, also if the command is the same: its program may
    /// have been replaced.
    pub fn replaced(&self, command: HelperCommand, limits: Limits, processes_max: usize) -> Helper {
        let mode = match &self.mode {
            Mode::Exec(strays) => Mode::Exec(strays.clone()),
            Mode::Persistent(pool) => {
                Mode::Persistent(Box::new(pool.replaced(command.clone(), processes_max)))
            }
        };
        let (hidden, metrics) = (self.hidden.clone(), self.metrics.clone());
        Helper { command, limits, hidden, mode, metrics }
    }

    /// Asks the helper about one node; blocks until it has answered, the time limit or `deadline` is reached, or
    /// `abort` disconnects.
    ///
    /// What the helper wrote to stderr is logged with the node's name.
    ///
    /// # Errors
    ///
    /// [`Error`], whose text is complete; it is counted in `helper_errors` unless we are aborting.
    pub fn run(
        &self,
        input: &Input<'_>,
        deadline: Instant,
        abort: &Receiver<Never>,
    ) -> Result<Answer, Error> {
        let started = Instant::now();
        let result = match &self.mode {
            Mode::Exec(strays) => self.execute(input, deadline, abort, strays),
            Mode::Persistent(pool) => {
                let pool::Asked { result, stderr } = pool.ask(input, self.limits, deadline, abort);
                log_errors(&stderr, input.identity, result.is_ok());
                result.map_err(|(failure, run)| self.error(failure, run))
            }
        };
        self.metrics.helper_time.observe(started.elapsed());
        if result.as_ref().is_err_and(|error| !error.is_aborted()) {
            self.metrics.helper_errors.inc();
        }
        result
    }

    /// Starts a process of a helper that stays and ends it again. For `time` it must live and say nothing, since it is asked nothing;
    /// false if it went on when its input had ended, and was killed. One that is started for each node is left alone.
    ///
    /// # Errors
    ///
    /// [`Error`]
    pub fn watch(&self, time: Duration) -> Result<bool, Error> {
        match &self.mode {
            Mode::Exec(_) => Ok(true),
            Mode::Persistent(pool) => {
                pool.watch(self.limits, time).map_err(|(failure, run)| self.error(failure, run))
            }
        }
    }

    /// Ends processes that wait for a next node; to be called when nobody asks any more. Their input is closed, and
    /// those that have not ended within 5 s, or when `abort` disconnects, are killed with all they started.
    pub fn stop(&self, abort: &Receiver<Never>) {
        match &self.mode {
            Mode::Exec(_) => {}
            Mode::Persistent(pool) => pool.stop(farewell::LEAVE_MAX, abort),
        }
    }

    fn execute(
        &self,
        input: &Input<'_>,
        deadline: Instant,
        abort: &Receiver<Never>,
        strays: &process::Strays,
    ) -> Result<Answer, Error> {
        let json = serde_json::to_vec(input)
            .map_err(|error| self.error(Failure::Start(error.into()), None))?;
        let job = process::Job {
            command: &self.command,
            hidden: &self.hidden,
            input: &json,
            output_max: self.limits.output_max,
            deadline: deadline.min(Instant::now() + self.limits.timeout),
            abort,
            is_settled: answer::is_settled,
        };
        let ran = job.run(strays).map_err(|error| self.error(Failure::Start(error), None))?;
        let result = self.judge(&ran);
        log_errors(&ran.stderr, input.identity, result.is_ok());
        result
    }

    /// What a run was worth, in the order in which the original looks.
    fn judge(&self, ran: &process::Ran) -> Result<Answer, Error> {
        let fail = |failure| {
            let end = Some(describe(&ran.end));
            let run = Run { end, took: ran.took, last_line: ran.stderr.last_line() };
            Err(self.error(failure, Some(run)))
        };
        match &ran.end {
            process::End::Aborted => return fail(Failure::Aborted),
            process::End::TooLong => {
                return fail(Failure::TooLong { output_max: self.limits.output_max });
            }
            process::End::Unreadable(error) => {
                return fail(Failure::Read(io::Error::new(error.kind(), error.to_string())));
            }
            _ if ran.stdout.is_empty() => return fail(Failure::Empty),
            process::End::TimedOut | process::End::Misbehaved => return fail(Failure::Ended),
            process::End::Exited { status, .. } if !status.success() => {
                return fail(Failure::Ended);
            }
            process::End::Exited { .. } => {}
        }
        Answer::read(&ran.stdout).or_else(|error| fail(Failure::Undecodable(error)))
    }

    fn error(&self, failure: Failure, run: Option<Run>) -> Error {
        Error { helper: self.command.as_str().to_owned(), failure, run }
    }
}

/// Logs what the helper wrote to stderr while it was asked about `node`.
fn log_errors(stderr: &process::Stderr, node: &Identity, succeeded: bool) {
    let level = if succeeded { log::Level::Info } else { log::Level::Warn };
    if !log::log_enabled!(level) {
        return;
    }
    for line in stderr.lines() {
        log::log!(level, component = node.as_str(), node = node.as_str(); "Helper for {node} on stderr: {line}");
    }
}

impl fmt::Debug for Helper {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Helper({})", self.command.as_str())
    }
}

/// Tells a helper how it is run; absent when it is started for each node.
const PROTOCOL_VARIABLE: &str = "CHORIA_PROVISIONER_HELPER";

/// The variables of our environment that are kept from the helper.
fn hidden() -> Vec<OsString> {
    std::env::vars_os().map(|(name, _)| name).filter(|name| is_hidden(name)).collect()
}

/// Whether a variable of our environment is kept from the helper: what systemd tells us could speak for us, or let our
/// credentials be read, the password for the broker is ours, and how the helper is run is ours to say.
fn is_hidden(name: &std::ffi::OsStr) -> bool {
    name == "NOTIFY_SOCKET"
        || name == "CREDENTIALS_DIRECTORY"
        || name == PASSWORD_VARIABLE
        || name == PROTOCOL_VARIABLE
        || name.as_encoded_bytes().starts_with(b"WATCHDOG_")
}

/// Why there is no answer.
#[derive(Debug)]
pub struct Error {
    helper: String,
    failure: Failure,
    run: Option<Run>,
}

/// What went wrong, in the order in which it is looked for.
#[derive(Debug)]
pub enum Failure {
    /// The program could not be started.
    Start(io::Error),
    /// It was killed because we are stopping.
    Aborted,
    /// Its output could not be read.
    Read(io::Error),
    /// It wrote more than we take.
    TooLong {
        /// The bound, in bytes.
        output_max: usize,
    },
    /// It wrote nothing.
    Empty,
    /// It was killed at the time limit or by someone else, or ended with another exit status than zero.
    Ended,
    /// Its output is no answer.
    Undecodable(Undecodable),
    /// It stays, and did not answer in its time.
    Silent {
        /// It never has.
        is_first: bool,
    },
    /// It stays, and ended instead of answering.
    Gone,
    /// It stays, and wrote what is no answer to the question asked.
    Confused(Confusion),
    /// It stays, and says that it failed.
    Reported(String),
    /// All its processes were busy with other nodes until the time was up.
    Busy,
    /// Its processes failed, and none is started again for so long.
    Resting(Duration),
}

/// How the run went that failed.
#[derive(Debug)]
struct Run {
    /// `None` if the process goes on.
    end: Option<String>,
    took: Duration,
    last_line: Option<String>,
}

impl Error {
    /// What went wrong.
    pub fn failure(&self) -> &Failure {
        &self.failure
    }

    /// Whether the run ended only because we are stopping, which is no fault of the helper.
    pub fn is_aborted(&self) -> bool {
        matches!(self.failure, Failure::Aborted)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Error { helper, failure, run } = self;
        match failure {
            Failure::Start(error) => {
                write!(f, "cannot start {helper}: {error}")?;
                // The program was there when the configuration was read.
                match error.raw_os_error().map(rustix::io::Errno::from_raw_os_error) {
                    Some(rustix::io::Errno::NOENT) => {
                        f.write_str("; it, or the interpreter its first line names, is missing")?;
                    }
                    Some(rustix::io::Errno::NOEXEC) => {
                        f.write_str("; a script needs a first line such as #!/bin/sh")?;
                    }
                    _ => {}
                }
            }
            Failure::Aborted => write!(f, "{helper} was killed because the provisioner stops")?,
            Failure::Read(error) => write!(f, "cannot read {helper} output: {error}")?,
            Failure::TooLong { output_max } => {
                write!(f, "cannot read {helper} output: more than {output_max} bytes")?;
            }
            Failure::Empty => write!(f, "cannot read {helper} output: zero bytes received")?,
            Failure::Ended => write!(f, "could not wait for {helper}")?,
            Failure::Undecodable(error) => {
                write!(f, "cannot decode output from {helper}: {error}")?
            }
            Failure::Silent { is_first } => {
                write!(f, "no answer from {helper}")?;
                if *is_first {
                    f.write_str(
                        "; with helper_mode persistent it must answer each line of its input, not the end of it",
                    )?;
                }
            }
            Failure::Gone => write!(f, "{helper} ended without an answer")?,
            Failure::Confused(confusion) => write!(f, "{helper} wrote {confusion}")?,
            Failure::Reported(text) => {
                write!(f, "{helper} failed: {}", text::escape(text.as_bytes(), REPORT_CHARS_MAX))?;
            }
            Failure::Busy => write!(f, "all processes of {helper} were busy")?,
            Failure::Resting(time) => write!(
                f,
                "no process of {helper} runs, and none is started for another {:.1} s: see its last errors",
                time.as_secs_f64()
            )?,
        }
        let Some(run) = run else { return Ok(()) };
        match &run.end {
            Some(end) if matches!(failure, Failure::Ended) => write!(f, ": {end} (")?,
            Some(end) => write!(f, " ({end}, ")?,
            None => f.write_str(" (")?,
        }
        write!(f, "ran {:.3} s", run.took.as_secs_f64())?;
        if let Some(line) = &run.last_line {
            write!(f, ", last line on stderr: {line}")?;
        }
        f.write_str(")")
    }
}

impl std::error::Error for Error {}

/// How a run ended, in the words of the original where it has some.
fn describe(end: &process::End) -> String {
    match end {
        process::End::Exited { status, held_open: false } => describe_status(*status),
        process::End::Exited { status, held_open: true } => {
            format!("{}, another process kept its output open", describe_status(*status))
        }
        process::End::TimedOut => "signal: killed, at its time limit".to_owned(),
        process::End::Aborted
        | process::End::TooLong
        | process::End::Unreadable(_)
        | process::End::Misbehaved => "signal: killed".to_owned(),
    }
}

fn describe_status(status: ExitStatus) -> String {
    if let Some(code) = status.code() {
        return format!("exit status {code}");
    }
    let signal = status.signal().unwrap_or(0);
    let name = match signal {
        1 => "hangup",
        2 => "interrupt",
        3 => "quit",
        4 => "illegal instruction",
        6 => "aborted",
        7 => "bus error",
        8 => "floating point exception",
        9 => "killed",
        11 => "segmentation fault",
        13 => "broken pipe",
        14 => "alarm clock",
        15 => "terminated",
        other => return format!("signal {other}"),
    };
    format!("signal: {name}")
}

/// Enough of an error the helper reports for a log line.
const REPORT_CHARS_MAX: usize = 300;

/// The setting `helper`, split and found.
#[derive(Clone, PartialEq, Eq)]
pub struct HelperCommand {
    text: String,
    program: PathBuf,
    arguments: Vec<String>,
}

impl HelperCommand {
    /// Splits `text` as a shell would, without expanding anything, and looks for the program: a name without a
    /// slash in `PATH`, anything else as a path.
    ///
    /// `#` starts no comment: the original's splitter knows none.
    ///
    /// # Errors
    ///
    /// [`CommandError`] if `text` can't be split or its first word is no program that we may execute.
    pub fn parse(text: &str) -> Result<HelperCommand, CommandError> {
        let mut words = split(text)?;
        if words.first().is_none_or(String::is_empty) {
            return Err(CommandError::Empty);
        }
        let name = words.remove(0);
        let program = find(&name)?;
        Ok(HelperCommand { text: text.trim().to_owned(), program, arguments: words })
    }

    /// What stands in for a command that can't be used: it starts nothing.
    pub fn nothing() -> HelperCommand {
        let (text, program) = (String::new(), PathBuf::new());
        HelperCommand { text, program, arguments: Vec::new() }
    }

    /// Whether there is no command that could be started.
    pub fn is_nothing(&self) -> bool {
        self.program.as_os_str().is_empty()
    }

    /// The command as it was written, for messages.
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// The file that is executed.
    pub fn program(&self) -> &Path {
        &self.program
    }

    /// What the program is given after its name.
    pub fn arguments(&self) -> &[String] {
        &self.arguments
    }
}

impl fmt::Debug for HelperCommand {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HelperCommand({})", self.text)
    }
}

/// Why the setting `helper` can't be used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CommandError {
    /// There is no first word, or it is empty.
    Empty,
    /// A quote is opened and not closed.
    OpenQuote,
    /// The last character is a backslash with nothing to protect.
    OpenEscape,
    /// The program is neither where the path says nor in `PATH`.
    Missing {
        /// The first word of the command.
        program: String,
    },
    /// The program is there, but is no file that we may execute.
    NotExecutable {
        /// The file found.
        program: PathBuf,
    },
}

impl fmt::Display for CommandError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CommandError::Empty => f.write_str("cannot parse helper command: empty"),
            CommandError::OpenQuote => {
                f.write_str("cannot parse helper command: unterminated quote")
            }
            CommandError::OpenEscape => {
                f.write_str("cannot parse helper command: unterminated backslash")
            }
            CommandError::Missing { program } if program.contains('/') => {
                write!(f, "cannot find helper {program}")
            }
            CommandError::Missing { program } => write!(f, "cannot find helper {program} in PATH"),
            CommandError::NotExecutable { program } => {
                write!(f, "helper {} is not an executable file", program.display())
            }
        }
    }
}

impl std::error::Error for CommandError {}

/// Splits a command into words, honouring quotes and backslashes.
pub fn split(text: &str) -> Result<Vec<String>, CommandError> {
    // A text that ends in an odd number of backslashes is either within a quote or has a last one that protects nothing.
    let backslashes = text.len() - text.trim_end_matches('\\').len();
    // The crate takes a word that begins with `#` for a comment. No other character of its grammar is touched by the replacement.
    let stand_in = ('\u{e000}'..='\u{f8ff}').find(|&c| !text.contains(c)).unwrap_or('#');
    let hidden = text.replace('#', stand_in.encode_utf8(&mut [0; 4]));
    let words = shell_words::split(&hidden).map_err(|_| CommandError::OpenQuote)?;
    if backslashes % 2 == 1 {
        return Err(CommandError::OpenEscape);
    }
    Ok(words.into_iter().map(|word| word.replace(stand_in, "#")).collect())
}

/// The file that the first word of a command names.
fn find(name: &str) -> Result<PathBuf, CommandError> {
    let missing = || CommandError::Missing { program: name.to_owned() };
    if name.contains('/') {
        let path = PathBuf::from(name);
        return match std::fs::metadata(&path) {
            Err(_) => Err(missing()),
            Ok(_) if is_executable(&path) => Ok(path),
            Ok(_) => Err(CommandError::NotExecutable { program: path }),
        };
    }
    let directories = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&directories)
        // An empty part would mean the working directory, from which nothing is run by accident.
        .filter(|directory| directory.is_absolute())
        .map(|directory| directory.join(name))
        .find(|path| is_executable(path))
        .ok_or_else(missing)
}

fn is_executable(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|metadata| metadata.is_file())
        && rustix::fs::access(path, rustix::fs::Access::EXEC_OK).is_ok()
}

#[cfg(test)]
mod tests {
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
        refuses("no-such-helper", "cannot find helper no-such-helper in PATH");
        refuses("'' a", "cannot parse helper command: empty");
        refuses("/etc/passwd", "helper /etc/passwd is not an executable file");
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
            let jwt = parsed
                .jwt
                .map(|jwt| RawValue::from_string(without_white_space(jwt.get())).unwrap());
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
        let answer =
            Bench::new(r#"echo '{"msg":"hello","configuration":{"a":"1"}}'"#).ask().unwrap();
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
        fails("exit 3", "cannot read HELPER output: zero bytes received (exit status 3, ran T s)");
        fails(
            "echo no database >&2; echo >&2; exit 3",
            "cannot read HELPER output: zero bytes received (exit status 3, ran T s, last line on stderr: no database)",
        );
    }

    #[test]
    fn a_failing_exit_status_spoils_a_good_answer() {
        fails("echo '{}'; exit 1", "could not wait for HELPER: exit status 1 (ran T s)");
        fails(
            "echo '{}'; printf 'a\\nb\\033c' >&2; exit 255",
            "could not wait for HELPER: exit status 255 (ran T s, last line on stderr: b\\u{1b}c)",
        );
        fails(
            "echo '{}'; kill -TERM $$",
            "could not wait for HELPER: signal: terminated (ran T s)",
        );
        fails("echo '{}'; kill -KILL $$", "could not wait for HELPER: signal: killed (ran T s)");
        fails(
            "kill -SEGV $$",
            "cannot read HELPER output: zero bytes received (signal: segmentation fault, ran T s)",
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
        assert!(matches!(error.failure(), Failure::Empty), "{error}");
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
            "cannot read HELPER output: zero bytes received (exit status 1, ran T s, last line on stderr: the last)",
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
        assert_eq!(
            (helper.metrics.helper_time.count(), helper.metrics.helper_errors.get()),
            (2, 0)
        );
        let helper = Bench::new("exit 1").helper();
        helper.run(&input(&identity, ""), bench.deadline(), &bench.abort).unwrap_err();
        assert_eq!(
            (helper.metrics.helper_time.count(), helper.metrics.helper_errors.get()),
            (1, 1)
        );
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
}
