//! What the manual pages say of flags, exit codes, settings and metrics is what the program has.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use choria_provisioner::cli::{self, Invocation};
use choria_provisioner::config::file::{Features, File};
use choria_provisioner::metrics::Metrics;

#[test]
fn the_pages_are_well_formed() {
    for page in ["choria-provisioner.8", "choria-provisioner.yaml.5", "choria-provisioner-helper.7"]
    {
        let output = Command::new("mandoc")
            .args(["-T", "lint", "-W", "all"])
            .arg(path(&format!("dist/man/{page}")))
            .output()
            .expect("mandoc of the package mandoc");
        let said = String::from_utf8_lossy(&output.stdout);
        // Whether other pages are installed here says nothing about this one.
        let elsewhere = ["referenced manual not found", "outdated mandoc.db"];
        let faults: Vec<&str> =
            said.lines().filter(|line| !elsewhere.iter().any(|what| line.contains(what))).collect();
        assert!(faults.is_empty(), "{faults:#?}");
    }
}

#[test]
fn every_command_and_flag_is_in_the_manual_and_no_other() {
    let top = help(&["--help"]);
    let (_, list) = top.split_once("\nCommands:\n").unwrap_or_default();
    // Lines that go on are indented further.
    let entries = list.lines().filter_map(|line| line.strip_prefix("  "));
    let entries = entries.filter(|entry| !entry.starts_with(' '));
    let commands: BTreeSet<String> =
        entries.filter_map(|entry| entry.split_whitespace().next()).map(str::to_owned).collect();
    let said = tags("choria-provisioner.8", ".Cm ");
    let said = said.iter().map(|tag| tag.split(' ').next().unwrap_or_default().to_owned());
    assert_eq!(said.collect::<BTreeSet<_>>(), commands);

    let of_commands = commands.iter().map(|command| help(&[command, "--help"]));
    let helps: Vec<String> = of_commands.chain([top.clone()]).collect();
    let words = helps.iter().flat_map(|help| help.split_whitespace());
    let flags = words.filter_map(|word| word.trim_start_matches('[').strip_prefix("--"));
    let mut flags: BTreeSet<String> =
        flags.map(|flag| flag.trim_end_matches([',', ']', '.']).to_owned()).collect();
    // A macro may be followed by several; the page says "--flag value" where it means any.
    let page = page("choria-provisioner.8");
    let lines = page.lines().filter(|line| line.contains("Fl \\-"));
    let said = lines.flat_map(|line| line.split("\\-").skip(1)).map(|rest| {
        let end = rest.find(|c: char| !c.is_ascii_lowercase() && c != '-');
        rest[..end.unwrap_or(rest.len())].to_owned()
    });
    // A lone -- is no flag.
    flags.remove("");
    assert_eq!(said.filter(|flag| flag != "flag").collect::<BTreeSet<_>>(), flags);
}

fn help(arguments: &[&str]) -> String {
    match cli::parse(arguments.iter().map(|argument| (*argument).into())) {
        Ok(Invocation::Show(help)) => help,
        other => panic!("{arguments:?} shows no help: {other:?}"),
    }
}

#[test]
fn every_exit_code_is_in_the_manual_and_no_other() {
    let page = page("choria-provisioner.8");
    let (_, section) = page.split_once(".Sh EXIT STATUS").expect("a section of exit codes");
    let section = section.split(".Sh ").next().unwrap_or_default();
    let said = section.lines().filter_map(|line| line.strip_prefix(".It "));
    let main = fs::read_to_string(path("src/main.rs")).expect("the program");
    let (_, codes) = main.split_once("enum End {").expect("the program knows its exit codes");
    let codes = codes.split('}').next().unwrap_or_default();
    let codes = codes.lines().filter_map(|line| line.split_once(" = ")?.1.strip_suffix(','));
    assert_eq!(said.collect::<Vec<_>>(), codes.collect::<Vec<_>>());
}

#[test]
fn every_setting_is_in_the_manual_and_no_other() {
    let features = Features::KEYS.iter().map(|key| format!("features.{key}"));
    let keys = File::KEYS.iter().filter(|key| **key != "features").map(|key| key.to_string());
    let tags = tags("choria-provisioner.yaml.5", ".Ic ");
    let said = tags.iter().flat_map(|tag| tag.split(" : ").next().unwrap_or_default().split(" , "));
    assert_eq!(
        said.map(str::to_owned).collect::<BTreeSet<_>>(),
        keys.chain(features).collect::<BTreeSet<_>>()
    );
}

#[test]
fn every_metric_is_in_the_manual_and_no_other() {
    let metrics = Metrics::new("here");
    metrics.rpc_time("rpcutil#inventory", std::time::Duration::ZERO);
    let code = fs::read_to_string(path("src/metrics.rs")).expect("the list of metrics");
    let said: BTreeSet<String> = tags("choria-provisioner.8", ".Va ").into_iter().collect();
    let scrape = metrics.render();
    let families =
        scrape.lines().filter_map(|line| line.strip_prefix("# TYPE choria_provisioner_"));
    let exported: BTreeSet<String> =
        families.filter_map(|rest| rest.split(' ').next()).map(str::to_owned).collect();
    let missing: Vec<_> = exported.difference(&said).collect();
    assert!(missing.is_empty(), "the manual says nothing about the metrics {missing:?}");
    // Those with labels of their own appear in a scrape with their first value only.
    for name in said.difference(&exported) {
        assert!(code.contains(&format!("\"{name}\"")), "the manual has {name}, which is no metric");
    }
}

#[test]
fn every_variable_of_the_readme_is_in_the_manual_and_no_other() {
    let readme = fs::read_to_string(path("README.md")).expect("the readme");
    let (_, table) = readme.split_once("| Variable | Effect |").expect("a table of variables");
    let rows = table.lines().skip(2).take_while(|line| line.starts_with('|'));
    let cells = rows.filter_map(|row| row.strip_prefix("| ")?.split(" | ").next());
    let names = cells.flat_map(|cell| cell.split('`').skip(1).step_by(2)).map(str::to_owned);
    let tags = tags("choria-provisioner.8", ".Ev ");
    let said = tags.iter().flat_map(|tag| tag.split(" , ")).map(str::to_owned);
    assert_eq!(said.collect::<BTreeSet<_>>(), names.collect::<BTreeSet<_>>());
}

#[test]
fn the_helper_shown_in_the_manual_answers() {
    let page = page("choria-provisioner-helper.7");
    let (_, shown) = page.split_once("#!/usr/bin/env python3\n").expect("a helper");
    let program = shown.split("\n.Ed").next().unwrap_or_default();
    let output = Command::new("sh")
        .args(["-c", r#"echo '{"identity":"n1.example.net"}' | python3 -c "$0""#, program])
        .output()
        .expect("python3");
    let answer: serde_json::Value = serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|error| panic!("{error}: {output:?}"));
    assert_eq!(answer["configuration"]["identity"], "n1.example.net");
}

/// What stands behind `macro` in the heads of lists that begin with it.
fn tags(name: &str, start: &str) -> Vec<String> {
    let start = format!(".It {start}").replace("It .", "It ");
    let page = page(name);
    page.lines().filter_map(|line| line.strip_prefix(&start)).map(str::to_owned).collect()
}

fn page(name: &str) -> String {
    fs::read_to_string(path(&format!("dist/man/{name}"))).unwrap_or_else(|e| panic!("{name}: {e}"))
}

fn path(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}
