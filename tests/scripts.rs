//! What the scripts in `dist` say of themselves.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

#[test]
fn the_help_of_a_script_names_every_flag_and_needs_no_build() {
    for (name, own) in [
        ("demo", ["daemon", "examples"].as_slice()),
        ("bench", &["daemon", "examples", "other"]),
        ("harm", &["daemon", "helper"]),
    ] {
        let output = Command::new(path(&format!("dist/{name}")))
            .arg("--help")
            // There is no compiler to build with.
            .env("PATH", "/usr/bin:/bin")
            .env("CARGO_TARGET_DIR", "/nonexistent")
            .output()
            .expect("the script is a program");
        let help = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success() && help.contains("dist/"), "{name}: {output:?}");
        for flag in flags(name).iter().filter(|flag| !own.contains(&flag.as_str())) {
            assert!(help.contains(&format!("--{flag} ")), "dist/{name} says nothing of --{flag}");
        }
    }
}

#[test]
fn a_script_explains_itself_and_refuses_what_it_does_not_know_before_it_builds() {
    for name in [
        "bench",
        "build-static",
        "count",
        "demo",
        "failover",
        "harm",
        "install-test",
        "package",
        "test",
    ] {
        let run = |arguments: &[&str]| {
            Command::new(path(&format!("dist/{name}")))
                .args(arguments)
                .env("PATH", "/usr/bin:/bin")
                .env("CARGO_TARGET_DIR", "/nonexistent")
                .output()
                .expect("the script is a program")
        };
        let help = run(&["--help"]);
        let usage = format!("\ndist/{name}");
        let said = String::from_utf8_lossy(&help.stdout).into_owned();
        assert!(help.status.success() && said.contains(&usage), "{name}: {help:?}");
        let refused = run(&["--bogus"]);
        let said = String::from_utf8_lossy(&refused.stderr).into_owned();
        let asked = format!("see dist/{name} --help");
        assert!(refused.status.code() == Some(2) && said.contains(&asked), "{name}: {refused:?}");
        assert!(said.contains("--bogus") && refused.stdout.is_empty(), "{name}: {refused:?}");
    }
}

/// The flags of the program behind a script.
fn flags(name: &str) -> Vec<String> {
    let source = fs::read_to_string(path(&format!("tests/fleet/{name}.rs"))).expect("it is there");
    let (_, rest) = source.split_once("struct Arguments {").expect("it has arguments");
    let (fields, _) = rest.split_once("\n}").expect("they end");
    let names = fields.lines().filter_map(|line| line.trim().split_once(": ")?.0.into());
    let flags: Vec<String> = names
        .filter(|name| name.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_'))
        .map(|name: &str| name.replace('_', "-"))
        .collect();
    assert!(flags.len() > 2, "{flags:?}");
    flags
}

fn path(file: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(file)
}
