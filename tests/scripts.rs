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
