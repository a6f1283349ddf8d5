//! Whether the site's helper can be started. That it is there and may be executed was looked at with the settings.
//!
//! One that is started for each node is not run: it may make a certificate or take a name for whatever node it is asked about.
//! `try` does that for a real one. One that stays is started, since it does nothing before it is asked.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::config::{Config, HelperMode, Places};
use crate::helper::{Helper, HelperCommand, is_executable};
use crate::metrics::Metrics;

use super::{Findings, Kind};

/// How long a helper that stays is watched: one that can't start says so within moments, and an interpreter takes its time.
const WATCH: Duration = Duration::from_secs(1);

/// Longest first line of a script that the kernel reads, in bytes.
const FIRST_LINE_MAX: u64 = 256;

pub(super) fn check(config: &Config, places: &Places, findings: &mut Findings) {
    if config.helper.is_nothing() {
        return;
    }
    if let Some(fault) = interpreter_fault(&config.helper) {
        let fault = places.finding("helper", fault);
        return findings.error(Kind::Configuration, fault.to_string());
    }
    if let Some(fault) = script_fault(&config.helper) {
        let fault = places.finding("helper", fault);
        return findings.error(Kind::Configuration, fault.to_string());
    }
    if let Some(word) = shell_word(config.helper.arguments()) {
        let text = format!(
            "the program gets {word:?} as it is, since no shell is started; `/bin/sh -c '…'` starts one"
        );
        findings.warn(places.finding("helper", text).to_string());
    }
    if config.helper_mode == HelperMode::Persistent {
        watch(config, places, findings);
    }
}

fn watch(config: &Config, places: &Places, findings: &mut Findings) {
    let (command, limits) = (config.helper.clone(), config.helper_limits());
    let helper = Helper::persistent(command, limits, 1, Metrics::new(&config.site));
    match helper.watch(WATCH) {
        Ok(true) => {}
        Ok(false) => {
            let helper = config.helper.as_str();
            let text = format!("{helper} goes on when its input has ended, and had to be killed");
            findings.warn(places.finding("helper", text).to_string());
        }
        Err(error) => {
            findings.error(Kind::Surroundings, places.finding("helper", error).to_string());
        }
    }
}

/// What only a shell would understand.
fn shell_word(arguments: &[String]) -> Option<&str> {
    let signs = ["|", "||", "&", "&&", ";", "<", ">", ">>", "2>", "2>&1"];
    let is_one =
        |word: &str| signs.contains(&word) || word.starts_with("$") || word.starts_with("~/");
    // What is for a shell is in its hands.
    let has_shell = arguments.first().is_some_and(|first| first.starts_with("-c"));
    arguments.iter().map(String::as_str).find(|word| is_one(word)).filter(|_| !has_shell)
}

/// The script of a command such as `python3 /x/helper.py`, if it is missing: the interpreter is there, and every run would fail.
fn script_fault(command: &HelperCommand) -> Option<String> {
    let name = command.program().file_name()?.to_str()?;
    let mut words = command.arguments().iter().map(String::as_str);
    let interpreter = match name {
        "env" => words.find(|word| !word.contains('='))?.rsplit('/').next()?,
        name => name,
    };
    let script = words.find(|word| !is_harmless_flag(interpreter, word))?;
    let is_missing = is_script(interpreter, script) && !Path::new(script).try_exists().ok()?;
    is_missing.then(|| format!("cannot find {script}, which {interpreter} is to run"))
}

/// Whether a flag of an interpreter stands alone, and a script may follow. Of others it is not known whether the next word is theirs.
fn is_harmless_flag(interpreter: &str, word: &str) -> bool {
    let known = match family(interpreter) {
        "python" => "BEIOPSsu",
        "sh" | "bash" | "dash" | "ksh" | "zsh" => "eux",
        "ruby" | "perl" => "w",
        _ => "",
    };
    word.strip_prefix('-')
        .is_some_and(|flags| !flags.is_empty() && flags.chars().all(|flag| known.contains(flag)))
}

/// Whether the first word that is no flag is a file for sure.
fn is_script(interpreter: &str, word: &str) -> bool {
    !word.starts_with('-')
        && match family(interpreter) {
            "python" | "ruby" | "perl" => true,
            // What has no folder they look for in PATH.
            "sh" | "bash" | "dash" | "ksh" | "zsh" => word.contains('/'),
            // It completes names, and has commands.
            "node" | "nodejs" => [".js", ".mjs", ".cjs"].iter().any(|end| word.ends_with(end)),
            _ => false,
        }
}

/// An interpreter's name without its version.
fn family(interpreter: &str) -> &str {
    interpreter.trim_end_matches(|c: char| c.is_ascii_digit() || c == '.')
}

/// What is wrong with the first line of a script; the system would only say that there is no such file.
fn interpreter_fault(command: &HelperCommand) -> Option<String> {
    let program = command.program();
    let mut head = Vec::new();
    // A program that we may execute and not read is no script.
    File::open(program).ok()?.take(FIRST_LINE_MAX).read_to_end(&mut head).ok()?;
    let shown = program.display();
    if head.is_empty() {
        return Some(format!("{shown} is empty"));
    }
    if head.starts_with(b"\xef\xbb\xbf") {
        return Some(format!(
            "{shown} begins with a byte order mark, so its first line names no interpreter: save it without"
        ));
    }
    let Some(line) = head.strip_prefix(b"#!") else {
        return head.iter().all(|byte| byte.is_ascii_graphic() || byte.is_ascii_whitespace()).then(
            || format!("{shown} is a text, and its first line is not one such as #!/bin/sh"),
        );
    };
    let line = line.split(|byte| *byte == b'\n').next().unwrap_or_default();
    let line = String::from_utf8_lossy(line);
    if line.ends_with('\r') {
        return Some(format!(
            "the first line of {shown} ends in a carriage return, so no interpreter is found: save it with line ends of Unix"
        ));
    }
    let mut words = line.split([' ', '\t']).filter(|word| !word.is_empty());
    let interpreter = words.next().unwrap_or_default();
    let missing =
        |what: &str| Some(format!("{what}, which the first line of {shown} names, is missing"));
    if interpreter.is_empty() {
        return missing("the interpreter");
    }
    if !interpreter.contains('/') {
        return Some(format!(
            "the first line of {shown} names {interpreter} without its folder: `#!/usr/bin/env {interpreter}` looks for it"
        ));
    }
    if !Path::new(interpreter).exists() {
        return missing(interpreter);
    }
    if !is_executable(Path::new(interpreter)) {
        return Some(format!(
            "{interpreter}, which the first line of {shown} names, is no program that we may start"
        ));
    }
    if interpreter.ends_with("/env") {
        let name = words.find(|word| !word.starts_with('-') && !word.contains('='))?;
        if !name.contains('/') && !is_on_path(name) {
            return missing(name);
        }
    }
    None
}

fn is_on_path(name: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|folder: PathBuf| is_executable(&folder.join(name)))
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn a_script_needs_its_interpreter() {
        let check = |text: &str, expected: Option<&str>| {
            let name = format!("provisioner-check-{}", fastrand::u64(..));
            let path = std::env::temp_dir().join(name);
            fs::write(&path, text).unwrap();
            fs::set_permissions(&path, Permissions::from_mode(0o755)).unwrap();
            let command = HelperCommand::parse(path.to_str().unwrap()).unwrap();
            let found = interpreter_fault(&command);
            fs::remove_file(&path).unwrap();
            match expected {
                None => assert_eq!(found, None, "{text:?}"),
                Some(part) => assert!(
                    found.as_ref().is_some_and(|found| found.contains(part)),
                    "{text:?}: {found:?}"
                ),
            }
        };
        check("#!/bin/sh\n", None);
        check("#! /bin/sh -e\n", None);
        check("#!/usr/bin/env sh\n", None);
        check("#!/usr/bin/env -S sh -e\n", None);
        check("\u{7f}ELF\u{1}", None);
        check("", Some("is empty"));
        check("echo\n", Some("is a text"));
        check("#!\n", Some("the interpreter, which"));
        check("#!/nowhere/python\n", Some("/nowhere/python, which the first line"));
        check("#!/usr/bin/env no-such-interpreter\n", Some("no-such-interpreter, which"));
        check("#!/bin/sh\r\n", Some("carriage return"));
        check("\u{feff}#!/bin/sh\n", Some("begins with a byte order mark"));
        check("#!sh\n", Some("`#!/usr/bin/env sh` looks for it"));
        check("#!/etc/passwd\n", Some("is no program that we may start"));
        check("#!/tmp\n", Some("is no program that we may start"));
    }

    #[test]
    fn a_script_that_its_interpreter_would_not_find_is_named_and_nothing_is_guessed() {
        let check = |program: &str, expected: Option<&str>| {
            // The interpreters need not be on this machine.
            let folder = std::env::temp_dir().join(format!("check-script-{}", fastrand::u64(..)));
            fs::create_dir(&folder).unwrap();
            let (name, arguments) = program.split_once(' ').unwrap();
            let path = folder.join(name);
            fs::write(&path, "#!/bin/sh\n").unwrap();
            fs::set_permissions(&path, Permissions::from_mode(0o755)).unwrap();
            let command = HelperCommand::parse(&format!("{} {arguments}", path.display())).unwrap();
            let found = script_fault(&command);
            fs::remove_dir_all(&folder).unwrap();
            let expected = expected.map(|text| format!("cannot find {text} is to run"));
            assert_eq!(found, expected, "{program}");
        };
        check("python3 /nowhere/x.py", Some("/nowhere/x.py, which python3"));
        check("python3.12 -uB nowhere.py y", Some("nowhere.py, which python3.12"));
        check("bash -eu ./nowhere.sh", Some("./nowhere.sh, which bash"));
        check("node /nowhere/x.js", Some("/nowhere/x.js, which node"));
        check("env A=b /usr/bin/ruby /nowhere/x", Some("/nowhere/x, which ruby"));
        for good in [
            "python3 /bin/sh",
            "python3 -m nowhere",
            "python3 -c 'print(1)' /nowhere",
            "python3 -X /nowhere/x /bin/sh",
            "python3 -",
            "sh -c /nowhere/x",
            "sh nowhere",
            "bash -o pipefail /bin/x",
            "perl -e /nowhere/x",
            "node inspect /nowhere/x.js",
            "env -i python3 /nowhere/x",
            "env A=b helper /nowhere/x",
            "cat /nowhere/x",
            "pythonic /nowhere/x",
            "python3 -u",
        ] {
            check(good, None);
        }
    }

    #[test]
    fn what_only_a_shell_understands_is_found() {
        let check = |command: &str, expected: Option<&str>| {
            let command = HelperCommand::parse(command).unwrap();
            assert_eq!(shell_word(command.arguments()), expected, "{command:?}");
        };
        check("/bin/cat x | sort", Some("|"));
        check("/bin/cat $HOME/x", Some("$HOME/x"));
        check("/bin/cat ~/x", Some("~/x"));
        check("/bin/cat x 2>&1", Some("2>&1"));
        check("/bin/cat 'a|b' x~ a$b --x", None);
        check("/bin/sh -c 'cat $HOME/x | sort' $0", None);
    }
}
