//! What the packages hold: the unit and its drop-ins.
//!
//! `dist/install-test` installs the packages themselves.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

#[test]
fn the_unit_exposes_little() {
    let output = Command::new("systemd-analyze")
        .args(["security", "--offline=true", "--threshold=20", "--no-pager"])
        .arg(file("dist/choria-provisioner.service"))
        .output()
        .expect("systemd-analyze of the package systemd");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(said.contains("Overall exposure level"), "{said}");
    // The threshold is in tenths.
    assert!(output.status.success(), "{said}");
}

#[test]
fn the_unit_starts_nothing_again_that_would_fail_again() {
    let main = read("src/main.rs");
    let (_, codes) = main.split_once("enum End {").expect("main knows its exit codes");
    let codes = codes.split('}').next().unwrap_or_default();
    let code = |name: &str| {
        let (_, rest) = codes.split_once(&format!("{name} = ")).expect(name);
        rest.split(',').next().unwrap_or_default().to_owned()
    };
    let hopeless = [code("Usage"), code("NotPermitted"), code("BadConfiguration")].join(" ");
    let line = format!("RestartPreventExitStatus={hopeless}");
    // The unit kept from another package gets the same line.
    for path in ["dist/choria-provisioner.service", "dist/packaging/keep-unit.sh"] {
        assert!(read(path).contains(&line), "{path} lacks {line}");
    }
}

#[test]
fn every_drop_in_is_in_the_manual() {
    let manual = read("dist/man/choria-provisioner.8");
    let names: Vec<String> = fs::read_dir(file("dist/packaging/drop-ins"))
        .expect("the folder of drop-ins")
        .map(|entry| entry.expect("a drop-in").file_name().to_string_lossy().into_owned())
        .collect();
    assert!(!names.is_empty());
    for name in names {
        assert!(manual.contains(&format!(".Pa {name}")), "the manual says nothing about {name}");
    }
}

#[test]
fn the_steps_in_a_kept_unit_are_those_of_the_page() {
    let page = read("dist/MOVING.md");
    let shown = page.split("```console\n").nth(1).expect("steps").split("```").next();
    let shown = shown.unwrap_or_default().lines().filter_map(|line| line.strip_prefix("# "));
    let script = read("dist/packaging/keep-unit.sh");
    let echoed =
        script.lines().filter_map(|line| line.split_once("echo \"#   ")?.1.strip_suffix('"'));
    let echoed = echoed
        .map(|step| step.replace("$kept_unit", "/etc/systemd/system/choria-provisioner.service"));
    let echoed: Vec<String> = echoed.collect();
    assert!(!echoed.is_empty());
    assert_eq!(shown.collect::<Vec<_>>(), echoed);
}

#[test]
fn the_page_on_moving_names_only_settings_and_metrics_that_exist() {
    let page = read("dist/MOVING.md");
    let known =
        [read("src/config/file.rs"), read("src/config/choria/keys.rs"), read("src/metrics.rs")]
            .concat();
    let words = page.split('`').skip(1).step_by(2);
    let words =
        words.map(|word| word.split(": ").next().unwrap_or(word).trim_start_matches("features."));
    for word in words.filter(|word| {
        word.contains('_') && word.chars().all(|c| c.is_ascii_lowercase() || c == '_')
    }) {
        assert!(known.contains(word), "{word} is no setting and no metric");
    }
}

fn file(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

fn read(path: &str) -> String {
    fs::read_to_string(file(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}
