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
#[cfg(test)]
mod tests;
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
            _ if ran.stdout.is_empty() => return fail(Failure::Empty { status: failed(&ran.end) }),
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
    Empty {
        /// How it ended, if it was by itself and not well.
        status: Option<ExitStatus>,
    },
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
            Failure::Empty { status } => {
                if let Some(status) = status {
                    write!(f, "it ran and failed, {}: ", describe_status(*status))?;
                }
                write!(f, "cannot read {helper} output: zero bytes received")?;
            }
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

/// With which status it ended, if by itself and not well.
fn failed(end: &process::End) -> Option<ExitStatus> {
    match end {
        process::End::Exited { status, .. } if !status.success() => Some(*status),
        _ => None,
    }
}

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
        /// It is a file.
        is_file: bool,
    },
    /// We may not even look.
    Denied {
        /// Where it should be.
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
            CommandError::Missing { program } if program.starts_with(['~', '$']) => {
                write!(f, "cannot find helper {program}, since no shell expands it")
            }
            CommandError::Missing { program } if is_assignment(program) => {
                write!(
                    f,
                    "cannot find helper {program}, since no shell sets variables: `env {program} …` does"
                )
            }
            CommandError::Missing { program } if program.contains('/') => {
                write!(f, "cannot find helper {program}")
            }
            CommandError::Missing { program } => write!(f, "cannot find helper {program} in PATH"),
            CommandError::NotExecutable { program, is_file } => {
                let program = program.display();
                write!(f, "helper {program} is not an executable file")?;
                if *is_file { f.write_str(": `chmod +x` makes it one") } else { Ok(()) }
            }
            CommandError::Denied { program } => {
                write!(f, "cannot look for helper {}: permission denied", program.display())
            }
        }
    }
}

impl std::error::Error for CommandError {}

/// Whether a shell would take the word for a variable and its value.
fn is_assignment(word: &str) -> bool {
    word.split_once('=').is_some_and(|(name, _)| {
        !name.starts_with(|c: char| c.is_ascii_digit())
            && !name.is_empty()
            && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
    })
}

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
            Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => {
                Err(CommandError::Denied { program: path })
            }
            Err(_) => Err(missing()),
            Ok(_) if is_executable(&path) => Ok(path),
            Ok(there) => {
                Err(CommandError::NotExecutable { program: path, is_file: there.is_file() })
            }
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

/// Whether it is a program that we may start.
pub(crate) fn is_executable(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|metadata| metadata.is_file())
        && rustix::fs::access(path, rustix::fs::Access::EXEC_OK).is_ok()
}
