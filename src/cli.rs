//! Every flag and its help text.
//!
//! argh knows neither `--flag=value` nor a command between flags, so arguments are put into its form first. The forms
//! accepted are those of the original's parser, fisk; help goes to standard output, as is the custom. `run` is the command
//! when none is named, as in the original; `check` and `try` look at what it would run with and do, and the others talk to a daemon that runs.

mod completion;

use std::ffi::OsString;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use argh::FromArgs;

use self::completion::Shell;
use crate::config::duration::duration;
use crate::config::read_file;
use crate::config::report::nearest;
use crate::ops::command::Command;
use crate::ops::status::{Limit, Query, Sort, Which};
use crate::protocol::Identity;

/// The longest that anybody waits for one node.
const TRY_MAX: Duration = Duration::from_secs(24 * 60 * 60);

/// What the user asked for.
#[derive(Debug, PartialEq, Eq)]
pub enum Invocation {
    /// Run the daemon.
    Run(Run),
    /// Have a running daemon do something.
    Ask(Ask),
    /// Look for what would keep the daemon from working.
    Check(Check),
    /// Look what would be done to a node.
    Try(Try),
    /// Print this and end well.
    Show(String),
}

/// The daemon's flags.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Run {
    /// The YAML file.
    pub config: PathBuf,
    /// Choria's client file; `None` to look where Choria does.
    pub choria_config: Option<PathBuf>,
    /// Where to write our process id.
    pub pid: Option<PathBuf>,
    /// Log from level debug up, whatever the file says.
    pub debug: bool,
}

/// A command for a daemon that runs.
#[derive(Debug, PartialEq, Eq)]
pub struct Ask {
    /// What it shall do.
    pub command: Command,
    /// Its admin socket, if named.
    pub socket: Option<PathBuf>,
    /// The YAML file that names the socket.
    pub config: Option<PathBuf>,
    /// Show the answer as it comes.
    pub json: bool,
}

/// What shall be looked at.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Check {
    /// The files the daemon would have.
    pub files: Files,
    /// Where it would write its process id.
    pub pid: Option<PathBuf>,
    /// Leave brokers out.
    pub offline: bool,
    /// Say what behaves differently from the original.
    pub moving: bool,
    /// Show the findings as JSON.
    pub json: bool,
}

/// Which node, and with what.
#[derive(Debug, PartialEq, Eq)]
pub struct Try {
    /// The node.
    pub node: Identity,
    /// The files the daemon has.
    pub files: Files,
    /// A helper in the place of the site's.
    pub helper: Option<String>,
    /// For all of it.
    pub timeout: Option<Duration>,
    /// Show what was found out as JSON.
    pub json: bool,
}

/// The files of a daemon, as far as they are named.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Files {
    /// The YAML file.
    pub config: Option<PathBuf>,
    /// Choria's client file.
    pub choria_config: Option<PathBuf>,
}

/// Arguments that make no sense; the text ends without a line break.
#[derive(Debug, PartialEq, Eq)]
pub struct UsageError(String);

impl fmt::Display for UsageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for UsageError {}

/// Finds unconfigured Choria Servers, verifies them and gives them their configuration.
///
/// The word "run" may stand before, between or after the flags, or be left out. An argument "@file" stands for
/// the lines of that file.
#[derive(FromArgs)]
struct Flags {
    /// configuration file, in YAML
    #[argh(option, arg_name = "file")]
    config: Option<PathBuf>,
    /// choria client configuration file [default: ~/.choriarc, ~/.mcollective,
    /// /etc/choria/client.conf, ...]
    #[argh(option, arg_name = "file")]
    choria_config: Option<PathBuf>,
    /// write the process id to this file
    #[argh(option, arg_name = "file")]
    pid: Option<PathBuf>,
    /// log from level debug up
    #[argh(switch)]
    debug: bool,
    /// log from the configured level up, the default
    #[argh(switch)]
    no_debug: bool,
    /// write a script to standard output that makes a shell complete
    /// arguments: bash, zsh or fish
    #[argh(option, arg_name = "shell")]
    completion: Option<String>,
    /// show the version
    #[argh(switch)]
    version: bool,
    #[argh(subcommand)]
    command: Option<Commands>,
}

#[derive(FromArgs)]
#[argh(subcommand)]
enum Commands {
    Status(StatusFlags),
    Nodes(NodesFlags),
    Pause(PauseFlags),
    Resume(ResumeFlags),
    Retry(RetryFlags),
    Discover(DiscoverFlags),
    Deny(DenyFlags),
    Allow(AllowFlags),
    Check(CheckFlags),
    Reload(ReloadFlags),
    StepDown(StepDownFlags),
    Try(TryFlags),
}

/// Declares a command that talks to a running daemon: its own arguments, and those that all of them have.
macro_rules! asks {
    ($(#[$about:meta])* $name:ident $word:literal { $($(#[$doc:meta])* $field:ident: $kind:ident $(<$of:ident>)?,)* }) => {
        $(#[$about])*
        #[derive(FromArgs)]
        #[argh(subcommand, name = $word)]
        struct $name {
            $($(#[$doc])* $field: $kind $(<$of>)?,)*
            /// admin socket of the daemon [default: what --config says, else
            /// /run/choria-provisioner/admin.sock]
            #[argh(option, arg_name = "file")]
            socket: Option<PathBuf>,
            /// configuration file of the daemon [default:
            /// /etc/choria-provisioner/choria-provisioner.yaml]
            #[argh(option, arg_name = "file")]
            config: Option<PathBuf>,
            /// show the answer as JSON
            #[argh(switch)]
            json: bool,
        }

        impl $name {
            fn ask(self, command: impl FnOnce(&$name) -> Result<Command, UsageError>) -> Result<Ask, UsageError> {
                must_name_a_file("config", self.config.as_ref())?;
                must_name_a_file("socket", self.socket.as_ref())?;
                let command = command(&self)?;
                Ok(Ask { command, socket: self.socket, config: self.config, json: self.json })
            }
        }
    };
}

asks! {
    /// Says what the daemon does, and what is wrong.
    StatusFlags "status" {}
}

asks! {
    /// Lists nodes.
    NodesFlags "nodes" {
        /// those of one state: stuck, working, queued, waiting, settling,
        /// denied or all [default: all]
        #[argh(option, arg_name = "state")]
        state: Option<String>,
        /// what comes first: name, failures, next or seen [default: name]
        #[argh(option, arg_name = "order")]
        sort: Option<String>,
        /// how many at most, up to 10000 [default: 1000]
        #[argh(option, arg_name = "number")]
        limit: Option<usize>,
        /// those with this in their name
        #[argh(positional)]
        name: Option<String>,
    }
}

asks! {
    /// Has the daemon begin nothing new until it is resumed.
    PauseFlags "pause" {}
}

asks! {
    /// Has a paused daemon begin again.
    ResumeFlags "resume" {}
}

asks! {
    /// Has a node tried now, whatever it waits for.
    RetryFlags "retry" {
        /// every node that waits
        #[argh(switch)]
        all: bool,
        /// the node
        #[argh(positional)]
        node: Option<String>,
    }
}

asks! {
    /// Has the fleet asked now who is there.
    DiscoverFlags "discover" {}
}

asks! {
    /// Has a node left alone until it is allowed again.
    DenyFlags "deny" {
        /// the node
        #[argh(positional)]
        node: String,
    }
}

asks! {
    /// Takes back that a node is left alone.
    AllowFlags "allow" {
        /// the node
        #[argh(positional)]
        node: String,
    }
}

asks! {
    /// Has the daemon read its settings again: all take effect, or none and it says why.
    ReloadFlags "reload" {}
}

asks! {
    /// Has the leader finish its nodes and let another lead.
    StepDownFlags "step-down" {}
}

/// Looks for all that would keep the daemon from working, and changes nothing.
#[derive(FromArgs)]
#[argh(subcommand, name = "check")]
struct CheckFlags {
    /// configuration file [default: /etc/choria-provisioner/choria-provisioner.yaml]
    #[argh(option, arg_name = "file")]
    config: Option<PathBuf>,
    /// choria client configuration file [default: without --config
    /// /etc/choria-provisioner/choria.cfg, else where Choria looks for it]
    #[argh(option, arg_name = "file")]
    choria_config: Option<PathBuf>,
    /// where the process id shall go
    #[argh(option, arg_name = "file")]
    pid: Option<PathBuf>,
    /// leave the brokers out
    #[argh(switch)]
    offline: bool,
    /// also say what behaves differently from the Go daemon
    #[argh(switch)]
    moving: bool,
    /// show the findings as JSON
    #[argh(switch)]
    json: bool,
}

impl CheckFlags {
    fn check(self) -> Result<Check, UsageError> {
        let CheckFlags { config, choria_config, pid, offline, moving, json } = self;
        let pid = pid.filter(|path| !path.as_os_str().is_empty());
        Ok(Check { files: Files::named(config, choria_config)?, pid, offline, moving, json })
    }
}

/// Looks what would be done to a node: verifies it, runs the helper, and sends nothing of what comes out.
#[derive(FromArgs)]
#[argh(subcommand, name = "try")]
struct TryFlags {
    /// configuration file [default: /etc/choria-provisioner/choria-provisioner.yaml]
    #[argh(option, arg_name = "file")]
    config: Option<PathBuf>,
    /// choria client configuration file [default: without --config
    /// /etc/choria-provisioner/choria.cfg, else where Choria looks for it]
    #[argh(option, arg_name = "file")]
    choria_config: Option<PathBuf>,
    /// helper in the place of the one in the configuration, with its arguments
    #[argh(option, arg_name = "command")]
    helper: Option<String>,
    /// time for all of it [default: helper_timeout and 20s]
    #[argh(option, arg_name = "duration")]
    timeout: Option<String>,
    /// show what was found out as JSON
    #[argh(switch)]
    json: bool,
    /// the node
    #[argh(positional)]
    node: String,
}

impl TryFlags {
    fn attempt(self) -> Result<Try, UsageError> {
        let TryFlags { config, choria_config, helper, timeout, json, node } = self;
        let shown = node.escape_debug();
        let node = Identity::parse(&node)
            .map_err(|error| UsageError(format!("\"{shown}\" is no node's name: {error}")))?;
        let timeout = timeout.map(|text| match duration(&text) {
            Ok(Duration::ZERO) => Err(UsageError("--timeout: wanted more than no time".into())),
            Ok(time) => Ok(time.min(TRY_MAX)),
            Err(error) => Err(UsageError(format!("--timeout: {error}"))),
        });
        let (files, timeout) = (Files::named(config, choria_config)?, timeout.transpose()?);
        Ok(Try { node, files, helper, timeout, json })
    }
}

impl Files {
    fn named(config: Option<PathBuf>, choria_config: Option<PathBuf>) -> Result<Files, UsageError> {
        must_name_a_file("config", config.as_ref())?;
        must_name_a_file("choria-config", choria_config.as_ref())?;
        Ok(Files { config, choria_config })
    }
}

impl Commands {
    fn invocation(self) -> Result<Invocation, UsageError> {
        let asked = match self {
            Commands::Check(flags) => return flags.check().map(Invocation::Check),
            Commands::Try(flags) => return flags.attempt().map(Invocation::Try),
            Commands::Status(flags) => flags.ask(|_| Ok(Command::Status {})),
            Commands::Pause(flags) => flags.ask(|_| Ok(Command::Pause {})),
            Commands::Resume(flags) => flags.ask(|_| Ok(Command::Resume {})),
            Commands::Discover(flags) => flags.ask(|_| Ok(Command::Discover {})),
            Commands::Deny(flags) => {
                flags.ask(|flags| Ok(Command::Deny { node: flags.node.clone() }))
            }
            Commands::Allow(flags) => {
                flags.ask(|flags| Ok(Command::Allow { node: flags.node.clone() }))
            }
            Commands::Reload(flags) => flags.ask(|_| Ok(Command::Reload {})),
            Commands::StepDown(flags) => flags.ask(|_| Ok(Command::StepDown {})),
            Commands::Nodes(flags) => flags.ask(|flags| flags.query().map(Command::Nodes)),
            Commands::Retry(flags) => flags.ask(|flags| match (&flags.node, flags.all) {
                (Some(_), true) | (None, false) => {
                    Err(UsageError("retry needs either a node or --all".into()))
                }
                (node, all) => Ok(Command::Retry { node: node.clone(), all }),
            }),
        };
        asked.map(Invocation::Ask)
    }
}

impl NodesFlags {
    fn query(&self) -> Result<Query, UsageError> {
        let state = self.state.as_deref().map(|word| {
            Which::parse(word).ok_or_else(|| no_such("state", word, &Which::ALL.map(Which::word)))
        });
        let sort = self.sort.as_deref().map(|word| {
            Sort::parse(word).ok_or_else(|| no_such("sort", word, &Sort::ALL.map(Sort::word)))
        });
        let limit = self.limit.map(Limit::try_from).transpose();
        let limit = limit.map_err(|error| UsageError(format!("--{error}")))?;
        Ok(Query {
            state: state.transpose()?.unwrap_or_default(),
            sort: sort.transpose()?.unwrap_or_default(),
            name: self.name.clone().unwrap_or_default(),
            limit,
        })
    }
}

fn no_such(flag: &str, word: &str, known: &[&str]) -> UsageError {
    let known = known.join(", ");
    UsageError(format!("--{flag}: found \"{}\", wanted one of {known}", word.escape_debug()))
}

/// Reads the arguments that follow the program's name.
///
/// # Errors
///
/// [`UsageError`], to be shown as it is.
pub fn parse(arguments: impl IntoIterator<Item = OsString>) -> Result<Invocation, UsageError> {
    let plain = separate(arguments)?;
    let plain: Vec<&str> = plain.iter().map(String::as_str).collect();
    let flags = match Flags::from_args(&[PROGRAM], &plain) {
        Ok(flags) => flags,
        Err(exit) if exit.status.is_ok() => return Ok(Invocation::Show(exit.output)),
        Err(exit) => return Err(UsageError(exit.output.trim().to_string())),
    };
    if flags.version {
        return Ok(Invocation::Show(format!("{VERSION}\n")));
    }
    if let Some(word) = flags.completion {
        let shell = Shell::parse(&word)
            .ok_or_else(|| no_such("completion", &word, &Shell::ALL.map(Shell::word)))?;
        return Ok(Invocation::Show(shell.script()));
    }
    if let Some(command) = flags.command {
        return command.invocation();
    }
    let Some(config) = flags.config else {
        return Err(UsageError("required flag --config not provided".into()));
    };
    must_name_a_file("config", Some(&config))?;
    must_name_a_file("choria-config", flags.choria_config.as_ref())?;
    Ok(Invocation::Run(Run {
        config,
        choria_config: flags.choria_config,
        // Empty is none, as in the original.
        pid: flags.pid.filter(|path| !path.as_os_str().is_empty()),
        debug: flags.debug && !flags.no_debug,
    }))
}

/// An empty path is a variable of a shell that is not set, most likely.
fn must_name_a_file(flag: &str, path: Option<&PathBuf>) -> Result<(), UsageError> {
    if path.is_some_and(|path| path.as_os_str().is_empty()) {
        return Err(UsageError(format!("flag --{flag} is empty, and must name a file")));
    }
    Ok(())
}

/// One argument a flag, one a value: the command unless that is to run, then its flags, then what else it is given.
fn separate(arguments: impl IntoIterator<Item = OsString>) -> Result<Vec<String>, UsageError> {
    let mut arguments = Arguments::new(arguments)?;
    let (mut command, mut ends_flags): (Option<&Spec>, bool) = (None, false);
    let (mut flags, mut seen, mut rest) = (Vec::new(), Vec::new(), Vec::new());
    while let Some(argument) = arguments.next()? {
        let flag = argument.strip_prefix("--").filter(|flag| !flag.is_empty() && !ends_flags);
        let Some(flag) = flag else {
            let spec = SPECS.iter().find(|spec| spec.word == argument);
            match (argument.as_str(), command, spec) {
                ("help", ..) if !ends_flags => {
                    flags.push(Flag { name: "help".into(), value: None })
                }
                (_, None, Some(spec)) => command = Some(spec),
                // What follows is no flag, whatever it looks like.
                ("--", Some(known), _) if known.rest_max > 0 => ends_flags = true,
                (_, Some(known), _) if rest.len() < known.rest_max => rest.push(argument),
                (word, None, _) if word.starts_with(|c: char| c.is_ascii_lowercase()) => {
                    return Err(UsageError(unknown_command(word)));
                }
                _ => return Err(UsageError(format!("unexpected argument {argument}"))),
            }
            continue;
        };
        let (name, value) = match flag.split_once('=') {
            Some((name, value)) => (name, Some(value.to_string())),
            None => (flag, None),
        };
        let takes_value = SPECS.iter().any(|spec| spec.with_value.contains(&name));
        if !takes_value && !SPECS.iter().any(|spec| spec.knows(name)) {
            return Err(UsageError(unknown(name, command.unwrap_or(&RUN))));
        }
        // Saying yes and no is saying it twice.
        let subject = name.strip_prefix("no-").unwrap_or(name).to_string();
        if seen.contains(&subject) {
            return Err(UsageError(format!("flag --{subject} cannot be repeated")));
        }
        seen.push(subject);
        let name = name.to_owned();
        if takes_value {
            let value = match value {
                Some(value) => Some(value),
                None => arguments.next()?.filter(|value| !value.starts_with("--")),
            };
            let missing = || UsageError(format!("expected argument for flag --{name}"));
            let value = Some(value.ok_or_else(missing)?);
            flags.push(Flag { name, value });
        } else if value.is_some() {
            return Err(UsageError(format!("flag --{name} takes no argument")));
        } else {
            flags.push(Flag { name, value: None });
        }
    }
    let spec = command.unwrap_or(&RUN);
    if let Some(flag) = flags.iter().find(|flag| !spec.knows(&flag.name)) {
        return Err(UsageError(unknown(&flag.name, spec)));
    }
    let has = |name| flags.iter().any(|flag: &Flag| flag.name == name);
    if has("version") && !has("help") {
        return Ok(vec!["--version".into()]);
    }
    let word = Some(spec.word.to_owned()).filter(|_| spec.word != RUN.word);
    let flags = flags.into_iter().filter(|flag| flag.name != "version").flat_map(Flag::plain);
    let end = Some("--".to_owned()).filter(|_| !rest.is_empty());
    Ok(word.into_iter().chain(flags).chain(end).chain(rest).collect())
}

/// A flag as it was given.
struct Flag {
    name: String,
    value: Option<String>,
}

impl Flag {
    fn plain(self) -> impl Iterator<Item = String> {
        std::iter::once(format!("--{}", self.name)).chain(self.value)
    }
}

/// What a command may be given.
struct Spec {
    word: &'static str,
    with_value: &'static [&'static str],
    switches: &'static [&'static str],
    /// Arguments that are no flags.
    rest_max: usize,
}

impl Spec {
    /// A command that talks to a running daemon and needs nothing else.
    const fn asks(word: &'static str) -> Spec {
        let with_value = &["config", "socket"];
        Spec { word, with_value, switches: &["json", "version", "help"], rest_max: 0 }
    }

    fn flags(&self) -> impl Iterator<Item = &'static str> {
        self.with_value.iter().chain(self.switches).copied()
    }

    fn knows(&self, flag: &str) -> bool {
        self.flags().any(|known| known == flag)
    }
}

/// What is wrong with a flag that is none of ours.
fn unknown(name: &str, spec: &Spec) -> String {
    let shown = name.escape_debug();
    match nearest(name, spec.flags()) {
        Some(meant) => format!("unknown flag --{shown}; did you mean --{meant}?"),
        None => format!("unknown flag --{shown}"),
    }
}

/// What is wrong with a word in the place of a command.
fn unknown_command(word: &str) -> String {
    let words = || SPECS.iter().map(|spec| spec.word);
    let shown = word.escape_debug();
    match nearest(word, words()) {
        Some(meant) => format!("unknown command {shown}; did you mean {meant}?"),
        None => {
            let all: Vec<&str> = words().collect();
            format!("unknown command {shown}; there are {}", all.join(", "))
        }
    }
}

/// Arguments in order; the lines of `file` take the place of one that reads `@file`.
struct Arguments {
    /// Those to come, the next one last.
    stack: Vec<String>,
    files: usize,
}

impl Arguments {
    fn new(arguments: impl IntoIterator<Item = OsString>) -> Result<Arguments, UsageError> {
        let mut stack: Vec<String> =
            arguments.into_iter().map(unicode).collect::<Result<_, _>>()?;
        stack.reverse();
        Ok(Arguments { stack, files: 0 })
    }

    fn next(&mut self) -> Result<Option<String>, UsageError> {
        while let Some(argument) = self.stack.pop() {
            let Some(path) = argument.strip_prefix('@') else { return Ok(Some(argument)) };
            self.files += 1;
            // A file that names itself would never end.
            if self.files > ARGUMENT_FILES_MAX {
                return Err(UsageError(format!("more than {ARGUMENT_FILES_MAX} argument files")));
            }
            let lines = lines_of(path)?;
            self.stack.extend(lines.into_iter().rev());
        }
        Ok(None)
    }
}

/// The lines of an argument file, each as it stands, without comments and empty ones.
///
/// Source: `ExpandArgsFromFile` in choria-io/fisk.
fn lines_of(path: &str) -> Result<Vec<String>, UsageError> {
    if path.is_empty() {
        return Err(UsageError("expected @ file to expand arguments from".into()));
    }
    let text = read_file(Path::new(path)).and_then(|bytes| {
        String::from_utf8(bytes).map_err(|_| io::Error::other("it is not valid UTF-8"))
    });
    let text = text
        .map_err(|error| UsageError(format!("failed to open arguments file {path:?}: {error}")))?;
    let lines = text.lines().filter(|line| !line.starts_with('#') && !line.trim().is_empty());
    Ok(lines.map(str::to_owned).collect())
}

fn unicode(argument: OsString) -> Result<String, UsageError> {
    argument.into_string().map_err(|argument| {
        UsageError(format!("argument {} is not valid UTF-8", argument.to_string_lossy()))
    })
}

/// Our name on the command line.
pub const PROGRAM: &str = "choria-provisioner";

/// Our version.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Argument files that are read; nobody nests them deeper.
const ARGUMENT_FILES_MAX: usize = 100;

const RUN: Spec = Spec {
    word: "run",
    with_value: &["config", "choria-config", "pid", "completion"],
    switches: &["debug", "no-debug", "version", "help"],
    rest_max: 0,
};

const SPECS: &[Spec] = &[
    RUN,
    Spec::asks("status"),
    Spec {
        with_value: &["config", "socket", "state", "sort", "limit"],
        rest_max: 1,
        ..Spec::asks("nodes")
    },
    Spec::asks("pause"),
    Spec::asks("resume"),
    Spec { switches: &["json", "all", "version", "help"], rest_max: 1, ..Spec::asks("retry") },
    Spec::asks("discover"),
    Spec { rest_max: 1, ..Spec::asks("deny") },
    Spec { rest_max: 1, ..Spec::asks("allow") },
    Spec {
        word: "check",
        with_value: &["config", "choria-config", "pid"],
        switches: &["offline", "moving", "json", "version", "help"],
        rest_max: 0,
    },
    Spec::asks("reload"),
    Spec::asks("step-down"),
    Spec {
        word: "try",
        with_value: &["config", "choria-config", "helper", "timeout"],
        switches: &["json", "version", "help"],
        rest_max: 1,
    },
];

/// All commands but `run`.
pub fn commands() -> impl Iterator<Item = &'static str> {
    SPECS.iter().map(|spec| spec.word).filter(|word| *word != RUN.word)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn takes_flags_in_every_form_and_place() {
        let plain = || Run { config: "c.yaml".into(), ..Run::default() };
        check(&["--config", "c.yaml"], plain());
        check(&["--config=c.yaml"], plain());
        check(&["run", "--config", "c.yaml"], plain());
        check(&["--config", "c.yaml", "run"], plain());
        check(&["--config=c.yaml", "--no-debug"], plain());
        check(&["--debug", "run", "--config=c.yaml"], Run { debug: true, ..plain() });
        check(&["--config=c.yaml", "run", "--debug"], Run { debug: true, ..plain() });
        check(&["--config", "run"], Run { config: "run".into(), ..Run::default() });
        check(&["--config=c.yaml", "--pid="], plain());
        check(&["--config=a=b"], Run { config: "a=b".into(), ..Run::default() });
        check(&["--config=--odd"], Run { config: "--odd".into(), ..Run::default() });
        check(
            &["run", "--choria-config", "/etc/c.cfg", "--config=c.yaml", "--pid", "/run/p"],
            Run { choria_config: Some("/etc/c.cfg".into()), pid: Some("/run/p".into()), ..plain() },
        );
    }

    #[test]
    fn takes_commands_for_a_running_daemon() {
        let ask = |command| Ask { command, socket: None, config: None, json: false };
        asks(&["status"], ask(Command::Status {}));
        asks(&["pause"], ask(Command::Pause {}));
        asks(&["resume"], ask(Command::Resume {}));
        asks(&["discover"], ask(Command::Discover {}));
        asks(&["status", "--json"], Ask { json: true, ..ask(Command::Status {}) });
        let (socket, config) = (Some("s".into()), Some("c".into()));
        let both = || Ask { socket, config, ..ask(Command::Status {}) };
        asks(&["--socket=s", "--config", "c", "status"], both());
        asks(&["nodes"], ask(Command::Nodes(Query::default())));
        asks(
            &["nodes", "--state", "stuck", "web", "--sort=failures", "--limit", "7"],
            ask(Command::Nodes(Query {
                state: Which::Stuck,
                name: "web".into(),
                sort: Sort::Failures,
                limit: Some(Limit::near(7)),
            })),
        );
        let node = || "n1.example.net".to_owned();
        asks(&["deny", "n1.example.net"], ask(Command::Deny { node: node() }));
        asks(
            &["allow", "--json", "n1.example.net"],
            Ask { json: true, ..ask(Command::Allow { node: node() }) },
        );
        asks(&["retry", "n1.example.net"], ask(Command::Retry { node: Some(node()), all: false }));
        asks(&["retry", "--all"], ask(Command::Retry { node: None, all: true }));
        // Behind a command its word is a word.
        asks(
            &["nodes", "status"],
            ask(Command::Nodes(Query { name: "status".into(), ..Query::default() })),
        );
        asks(&["deny", "run"], ask(Command::Deny { node: "run".into() }));
        asks(&["deny", "--", "--json"], ask(Command::Deny { node: "--json".into() }));
        asks(&["deny", "--", "help"], ask(Command::Deny { node: "help".into() }));
        asks(&["allow", "-x"], ask(Command::Allow { node: "-x".into() }));
    }

    #[test]
    fn refuses_what_a_command_does_not_take() {
        wrong(&["status", "n1"], "unexpected argument n1");
        wrong(&["run", "status"], "unexpected argument status");
        wrong(&["status", "run"], "unexpected argument run");
        wrong(&["status", "--pid", "p"], "unknown flag --pid");
        wrong(&["status", "--all"], "unknown flag --all");
        wrong(&["--config=c", "--socket=s"], "unknown flag --socket");
        wrong(&["status", "--jsn"], "unknown flag --jsn; did you mean --json?");
        wrong(&["status", "--socket"], "expected argument for flag --socket");
        wrong(&["status", "--json=yes"], "flag --json takes no argument");
        wrong(&["status", "--json", "--json"], "flag --json cannot be repeated");
        wrong(&["status", "--socket="], "flag --socket is empty, and must name a file");
        wrong(&["status", "--", "n1"], "unexpected argument --");
        wrong(&["deny", "--", "n1", "n2"], "unexpected argument n2");
        wrong(&["deny", "n1", "n2"], "unexpected argument n2");
        wrong(&["retry"], "retry needs either a node or --all");
        wrong(&["try", "n1", "--timeout=0s"], "--timeout: wanted more than no time");
        wrong(
            &["try", "n1", "--timeout", "30"],
            "--timeout: a duration needs a unit, such as 90s, 10m, 1h30m or 2d",
        );
        wrong(&["retry", "n1", "--all"], "retry needs either a node or --all");
        wrong(
            &["nodes", "--state=asleep"],
            "--state: found \"asleep\", wanted one of all, stuck, working, queued, waiting, settling, denied",
        );
        wrong(
            &["nodes", "--sort=x"],
            "--sort: found \"x\", wanted one of name, failures, next, seen",
        );
        wrong(&["nodes", "--limit=0"], "--limit: found 0, wanted a number from 1 to 10000");
        for arguments in [&["deny"][..], &["nodes", "--limit=-1"], &["nodes", "--limit", "many"]] {
            assert!(call(arguments).is_err(), "{arguments:?}");
        }
    }

    #[test]
    fn each_command_has_its_help() {
        let Ok(Invocation::Show(all)) = call(&["--help"]) else { panic!("help") };
        for word in commands() {
            assert!(all.contains(&format!("\n  {word}")), "{word} is not in {all}");
            for arguments in [&[word, "--help"][..], &["help", word], &["--help", word]] {
                let Ok(Invocation::Show(text)) = call(arguments) else { panic!("{arguments:?}") };
                let flags = SPECS.iter().find(|spec| spec.word == word).unwrap().flags();
                for flag in flags.filter(|flag| *flag != "version") {
                    assert!(text.contains(&format!("--{flag}")), "{flag} is not in {text}");
                }
            }
            assert_eq!(call(&[word, "--version"]), Ok(Invocation::Show(format!("{VERSION}\n"))));
        }
    }

    #[test]
    fn refuses_arguments_without_meaning() {
        wrong(&[], "required flag --config not provided");
        wrong(&["run"], "required flag --config not provided");
        wrong(&["run", "--debug"], "required flag --config not provided");
        wrong(&["--config"], "expected argument for flag --config");
        wrong(&["--config", "--debug"], "expected argument for flag --config");
        wrong(&["--config="], "flag --config is empty, and must name a file");
        wrong(&["--config", ""], "flag --config is empty, and must name a file");
        wrong(
            &["--config=a", "--choria-config="],
            "flag --choria-config is empty, and must name a file",
        );
        wrong(&["--config=a", "--config", "b"], "flag --config cannot be repeated");
        wrong(&["--debug", "--debug", "--config=a"], "flag --debug cannot be repeated");
        wrong(&["--debug", "--no-debug", "--config=a"], "flag --debug cannot be repeated");
        wrong(&["--debug=true", "--config=a"], "flag --debug takes no argument");
        wrong(&["run", "--config=a", "stray"], "unexpected argument stray");
        wrong(&["--config=a", "statsu"], "unknown command statsu; did you mean status?");
        let Err(UsageError(text)) = call(&["frobnicate"]) else { panic!("it is no command") };
        assert!(text.starts_with("unknown command frobnicate; there are run, status, "), "{text}");
        for word in commands() {
            assert!(text.contains(&format!(", {word}")), "{word} is not in {text}");
        }
        wrong(&["run", "run", "--config=a"], "unexpected argument run");
        wrong(&["-c", "a"], "unexpected argument -c");
        wrong(&["--", "--config=a"], "unexpected argument --");
        wrong(&["--confi", "a"], "unknown flag --confi; did you mean --config?");
        wrong(&["--confi=a"], "unknown flag --confi; did you mean --config?");
        wrong(&["--x", "--config=a"], "unknown flag --x");
    }

    #[test]
    fn shows_help_and_version_whatever_else_is_said() {
        for arguments in [
            &["--help"][..],
            &["help"],
            &["help", "run"],
            &["run", "--help"],
            &["--config=x", "--help"],
        ] {
            let Ok(Invocation::Show(text)) = call(arguments) else { panic!("{arguments:?}") };
            for flag in [
                "--config",
                "--choria-config",
                "--pid",
                "--debug",
                "--no-debug",
                "--version",
                "--help",
            ] {
                assert!(text.contains(flag), "{flag} is not in {text}");
            }
        }
        for arguments in [&["--version"][..], &["run", "--version"], &["--version", "--config=x"]] {
            assert_eq!(call(arguments), Ok(Invocation::Show(format!("{VERSION}\n"))));
        }
    }

    #[test]
    fn shows_what_a_shell_needs() {
        for shell in ["bash", "zsh", "fish"] {
            let Ok(Invocation::Show(script)) = call(&["--completion", shell]) else {
                panic!("{shell}")
            };
            for spec in SPECS {
                assert!(script.contains(spec.word), "{shell}: {}", spec.word);
            }
        }
        wrong(
            &["--completion=tcsh"],
            "--completion: found \"tcsh\", wanted one of bash, zsh, fish",
        );
        wrong(&["status", "--completion=bash"], "unknown flag --completion");
    }

    #[test]
    fn takes_arguments_from_files() {
        let dir = std::env::temp_dir().join(format!("provisioner-args-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let file = |name: &str, text: &str| {
            std::fs::write(dir.join(name), text).unwrap();
            format!("@{}", dir.join(name).display())
        };
        let plain = || Run { config: "c.yaml".into(), ..Run::default() };
        let all = file("all", "# ours\n\n--config\nc.yaml\r\n   \n--debug");
        check(&[&all], Run { debug: true, ..plain() });
        check(&["run", &all, "--pid=p"], Run { debug: true, pid: Some("p".into()), ..plain() });
        // It may stand for a value, but not for a part of an argument.
        let value = file("value", "c.yaml\n");
        check(&["--config", &value], plain());
        check(&["--config=@value"], Run { config: "@value".into(), ..Run::default() });
        let nested = file("nested", &format!("{value}\n--debug\n"));
        check(&["--config", &nested], Run { debug: true, ..plain() });
        check(&["--config=c.yaml", &file("none", "# nothing\n")], plain());
        // A line is one argument, with all its blanks.
        wrong(&[&file("pair", "--config c.yaml")], "unknown flag --config c.yaml");
        wrong(&[&file("blank", "  run")], "unexpected argument   run");

        wrong(&["@"], "expected @ file to expand arguments from");
        wrong(
            &["@/nowhere"],
            "failed to open arguments file \"/nowhere\": No such file or directory (os error 2)",
        );
        let itself = dir.join("itself").display().to_string();
        wrong(&[&file("itself", &format!("@{itself}\n@{itself}"))], "more than 100 argument files");
        std::fs::write(dir.join("bytes"), b"\xff").unwrap();
        let bytes = format!("@{}", dir.join("bytes").display());
        assert!(call(&[&bytes]).unwrap_err().0.ends_with("it is not valid UTF-8"));
        std::fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn refuses_arguments_that_are_no_text() {
        use std::os::unix::ffi::OsStringExt;
        let argument = OsString::from_vec(b"--config=\xff".to_vec());
        assert!(parse([argument]).is_err());
    }

    fn call(arguments: &[&str]) -> Result<Invocation, UsageError> {
        parse(arguments.iter().map(OsString::from))
    }

    #[track_caller]
    fn check(arguments: &[&str], expected: Run) {
        assert_eq!(call(arguments), Ok(Invocation::Run(expected)), "{arguments:?}");
    }

    #[track_caller]
    fn asks(arguments: &[&str], expected: Ask) {
        assert_eq!(call(arguments), Ok(Invocation::Ask(expected)), "{arguments:?}");
    }

    #[track_caller]
    fn wrong(arguments: &[&str], expected: &str) {
        assert_eq!(call(arguments), Err(UsageError(expected.into())), "{arguments:?}");
    }
}
