//! Shells complete commands and flags with the scripts that are shipped, which are those the program makes.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use choria_provisioner::cli::{self, Invocation};

const SCRIPTS: [(&str, &str); 3] = [
    ("bash", "choria-provisioner.bash"),
    ("zsh", "_choria-provisioner"),
    ("fish", "choria-provisioner.fish"),
];

#[test]
fn the_scripts_shipped_are_those_the_program_makes() {
    for (shell, file) in SCRIPTS {
        let shipped = fs::read_to_string(path(file)).expect(file);
        assert_eq!(
            shipped,
            show(&["--completion", shell]),
            "make it anew: choria-provisioner --completion {shell} >dist/completion/{file}"
        );
    }
}

#[test]
fn bash_completes_what_the_help_says() {
    check_all(&bash);
    // An equals sign is a word of its own.
    assert_eq!(bash(&["nodes", "--state", "=", "st"]), ["stuck"]);
    assert_eq!(
        bash(&["nodes", "--state", "="]),
        ["all", "stuck", "working", "queued", "waiting", "settling", "denied"]
    );
    // Where a value stands no command is looked for.
    assert!(bash(&["--config", "status", "--de"]).contains(&"--debug".to_owned()));
    assert_eq!(bash(&["--config", "Cargo.t"]), ["Cargo.toml"]);
}

#[test]
fn fish_completes_what_the_help_says() {
    check_all(&|words| {
        let script = path("choria-provisioner.fish");
        let line = format!("choria-provisioner {}", words.join(" "));
        let run = format!("source {}; complete -C '{line}'", script.display());
        let said = output(Command::new("fish").args(["--no-config", "-c", &run]), "fish");
        said.lines().map(|line| line.split('\t').next().unwrap_or_default().to_owned()).collect()
    });
}

#[test]
fn zsh_completes_what_the_help_says() {
    // Its own completion shows itself on a terminal only; what it would be told is looked at here.
    let script = r#"
        _arguments() { print -rl -- "$@"; [[ $* == *'->command'* ]] && state=command }
        _describe() { print -rl -- "${(@P)2}" }
        file=$1; shift
        words=(choria-provisioner "$@"); CURRENT=$#words
        source $file
    "#;
    check_all(&|words| {
        let mut command = Command::new("zsh");
        command.args(["-f", "-c", script, "zsh"]).arg(path("_choria-provisioner"));
        let told = output(command.args(words), "zsh");
        let (last, before) = words.split_last().expect("a word is being written");
        let of_flag = before.last().and_then(|flag| {
            let rest = told.lines().find_map(|line| line.strip_prefix(&format!("{flag}=:")))?;
            rest.split_once('(').map(|(_, words)| words.trim_end_matches(')'))
        });
        let offered: Vec<&str> = match of_flag {
            Some(words) => words.split(' ').collect(),
            None => {
                let is_flag = |word: &&str| word.starts_with("--") == last.starts_with("--");
                let words = told.lines().filter_map(|line| line.split([':', '=']).next());
                words.filter(is_flag).collect()
            }
        };
        let fits = |word: &&str| {
            word.starts_with(last) && !word.starts_with(|c: char| c.is_ascii_digit() || c == '*')
        };
        offered.into_iter().filter(fits).map(str::to_owned).collect()
    });
}

/// What a shell offers for the words so far, the last of which is being written.
fn check_all(offer: &dyn Fn(&[&str]) -> Vec<String>) {
    let mut offered = offer(&[""]);
    offered.retain(|word| !word.starts_with('-') && word != "help");
    offered.sort();
    let mut commands: Vec<String> = cli::commands().chain(["run"]).map(str::to_owned).collect();
    commands.sort();
    assert_eq!(offered, commands);
    assert_eq!(offer(&["disc"]), ["discover"]);

    for command in cli::commands().chain(["run"]) {
        let mut offered = offer(&[command, "--"]);
        offered.sort();
        // The help has each flag at the beginning of a line.
        let help = show(&[command, "--help"]);
        let mut flags: Vec<String> = help
            .lines()
            .filter_map(|line| line.strip_prefix("  --")?.split_whitespace().next())
            .map(|flag| format!("--{}", flag.trim_end_matches(',')))
            .collect();
        // Of commands argh doesn't know that it says the version.
        flags.extend(["--version".to_owned(), "--help".to_owned()]);
        flags.sort();
        flags.dedup();
        assert_eq!(offered, flags, "{command}");
    }
    assert_eq!(offer(&["nodes", "--sort", "fa"]), ["failures"]);
    assert_eq!(offer(&["--completion", "z"]), ["zsh"]);
    assert_eq!(offer(&["pause", "no-such-"]), [""; 0]);
}

fn bash(words: &[&str]) -> Vec<String> {
    let script = r#"
        source "$1"; shift
        COMP_WORDS=(choria-provisioner "$@"); COMP_CWORD=$#
        _choria_provisioner
        (( ${#COMPREPLY[@]} )) && printf '%s\n' "${COMPREPLY[@]}"
        exit 0
    "#;
    let mut command = Command::new("bash");
    command.args(["--norc", "-c", script, "bash"]).arg(path("choria-provisioner.bash"));
    output(command.args(words), "bash").lines().map(str::to_owned).collect()
}

fn output(command: &mut Command, package: &str) -> String {
    let output = command
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .unwrap_or_else(|error| panic!("{package} of the package {package}: {error}"));
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && error.is_empty(), "{command:?}: {error}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn show(arguments: &[&str]) -> String {
    match cli::parse(arguments.iter().map(|argument| (*argument).into())) {
        Ok(Invocation::Show(text)) => text,
        other => panic!("{arguments:?}: {other:?}"),
    }
}

fn path(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("dist/completion").join(name)
}
