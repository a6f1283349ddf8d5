//! Every flag and its help text.
//!
//! argh knows neither `--flag=value` nor a command between flags, so arguments are put into its form first. The forms
//! accepted are those of the original's parser, fisk; help goes to standard output, as is the custom.

use std::ffi::OsString;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use argh::FromArgs;

use crate::config::read_file;
use crate::config::report::nearest;

/// What the user asked for.
#[derive(Debug, PartialEq, Eq)]
pub enum Invocation {
    /// Run the daemon.
    Run(Run),
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
    /// show the version
    #[argh(switch)]
    version: bool,
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
    let Some(config) = flags.config else {
        return Err(UsageError("required flag --config not provided".into()));
    };
    let is_empty = |path: &PathBuf| path.as_os_str().is_empty();
    for (flag, path) in [("config", Some(&config)), ("choria-config", flags.choria_config.as_ref())]
    {
        // A variable of a shell that is not set, most likely.
        if path.is_some_and(is_empty) {
            return Err(UsageError(format!("flag --{flag} is empty, and must name a file")));
        }
    }
    Ok(Invocation::Run(Run {
        config,
        choria_config: flags.choria_config,
        // Empty is none, as in the original.
        pid: flags.pid.filter(|path| !is_empty(path)),
        debug: flags.debug && !flags.no_debug,
    }))
}

/// One argument a flag, one a value, and no command.
fn separate(arguments: impl IntoIterator<Item = OsString>) -> Result<Vec<String>, UsageError> {
    let mut arguments = Arguments::new(arguments)?;
    let (mut plain, mut seen, mut has_command) = (Vec::new(), Vec::new(), false);
    while let Some(argument) = arguments.next()? {
        let Some(flag) = argument.strip_prefix("--").filter(|flag| !flag.is_empty()) else {
            match argument.as_str() {
                "run" if !has_command => has_command = true,
                "help" => plain.push("--help".to_string()),
                _ => return Err(UsageError(format!("unexpected argument {argument}"))),
            }
            continue;
        };
        let (name, value) = match flag.split_once('=') {
            Some((name, value)) => (name, Some(value.to_string())),
            None => (flag, None),
        };
        if !WITH_VALUE.contains(&name) && !SWITCHES.contains(&name) {
            return Err(UsageError(unknown(name)));
        }
        // Saying yes and no is saying it twice.
        let subject = name.strip_prefix("no-").unwrap_or(name).to_string();
        if seen.contains(&subject) {
            return Err(UsageError(format!("flag --{subject} cannot be repeated")));
        }
        seen.push(subject);
        plain.push(format!("--{name}"));
        if WITH_VALUE.contains(&name) {
            let value = match value {
                Some(value) => Some(value),
                None => arguments.next()?.filter(|value| !value.starts_with("--")),
            };
            let missing = || UsageError(format!("expected argument for flag --{name}"));
            plain.push(value.ok_or_else(missing)?);
        } else if value.is_some() {
            return Err(UsageError(format!("flag --{name} takes no argument")));
        }
    }
    Ok(plain)
}

/// What is wrong with a flag that is none of ours.
fn unknown(name: &str) -> String {
    let shown = name.escape_debug();
    match nearest(name, WITH_VALUE.iter().chain(SWITCHES).copied()) {
        Some(meant) => format!("unknown flag --{shown}; did you mean --{meant}?"),
        None => format!("unknown flag --{shown}"),
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

const WITH_VALUE: &[&str] = &["config", "choria-config", "pid"];
const SWITCHES: &[&str] = &["debug", "no-debug", "version", "help"];

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
        wrong(&["--config=a", "stray"], "unexpected argument stray");
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
    fn wrong(arguments: &[&str], expected: &str) {
        assert_eq!(call(arguments), Err(UsageError(expected.into())), "{arguments:?}");
    }
}
