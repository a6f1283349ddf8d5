//! What README says of settings, metrics and helpers is what the program has.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use choria_provisioner::cli;
use choria_provisioner::config::Config;
use choria_provisioner::config::choria::keys::{Fate, KEYS};
use choria_provisioner::config::file::{Features, File};
use choria_provisioner::config::reload::{self, Follows};
use choria_provisioner::config::report::Report;
use choria_provisioner::metrics::Metrics;

/// The text of a file of the project.
fn read(path: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The names in code quotes in the first column of all tables between the heading `from` and the next of its rank or a
/// higher one.
fn first_column(readme: &str, from: &str) -> BTreeSet<String> {
    let start = readme.find(from).unwrap_or_else(|| panic!("README has no heading {from}"));
    let rank = from.split_whitespace().next().unwrap_or_default();
    let rest = &readme[start + from.len()..];
    let ranks = (2..=rank.len()).map(|length| format!("\n{} ", &rank[..length]));
    let end = ranks.filter_map(|rank| rest.find(&rank)).min().unwrap_or(rest.len());
    let cells = rest[..end].lines().filter_map(|line| line.strip_prefix("| ")?.split(" |").next());
    let names = cells.flat_map(|cell| cell.split('`').skip(1).step_by(2));
    names.map(str::to_owned).collect()
}

#[test]
fn every_setting_is_in_the_readme() {
    let readme = read("README.md");
    let section = &readme[readme.find("### Settings").unwrap()..];
    let section = &section[..section.find("### From the Choria client file").unwrap()];
    let features = Features::KEYS.iter().map(|key| format!("features.{key}"));
    let keys = File::KEYS.iter().filter(|key| **key != "features").map(|key| key.to_string());
    for key in keys.chain(features) {
        let is_said =
            section.contains(&format!("`{key}`")) || section.contains(&format!("`{key}: "));
        assert!(is_said, "README says nothing about the setting {key}");
    }
}

#[test]
fn the_settings_that_follow_a_reload_are_listed_and_no_other() {
    let config = Config::parse(b"helper: /bin/true\n", &mut Report::default()).unwrap();
    let follow = reload::keys(&config).filter(|(_, follows)| *follows == Follows::Reload);
    let follow: BTreeSet<&str> = follow.map(|(key, _)| key).collect();
    for (document, start, quotes) in [
        ("README.md", "These follow a reload: ", &['`', ',', ' ', '\n'][..]),
        ("dist/man/choria-provisioner.yaml.5", "These follow it:\n", &[',', ' ', '\n']),
    ] {
        let text = read(document);
        let (_, list) = text.split_once(start).expect("there is a list");
        let (list, _) = list.split_once(" A change").or(list.split_once("\nA change")).unwrap();
        let words = list.split(quotes).map(|word| word.trim_end_matches('.'));
        let said: BTreeSet<&str> =
            words.filter(|word| !word.is_empty() && *word != ".Li").collect();
        assert_eq!(said, follow, "{document}");
    }
}

#[test]
fn the_readme_lists_no_setting_that_does_not_exist() {
    let readme = read("README.md");
    for name in first_column(&readme, "### Settings") {
        let is_known = match name.strip_prefix("features.") {
            Some(feature) => Features::KEYS.contains(&feature),
            None => File::KEYS.contains(&name.as_str()),
        };
        assert!(is_known, "README has a row for {name}, which is no setting");
    }
}

#[test]
fn the_fate_of_every_key_of_the_client_file_is_in_the_readme() {
    let readme = read("README.md");
    let start = readme.find("### From the Choria client file").unwrap();
    let end = start + readme[start..].find("\n## ").unwrap();
    let mut said = BTreeMap::new();
    for row in readme[start..end].lines().filter_map(|line| line.strip_prefix("| `")) {
        let (keys, rest) = row.split_once(" | ").unwrap();
        let fate = rest.split(" | ").next().unwrap();
        for key in keys.split(['`', ',', ' ']).filter(|key| !key.is_empty()) {
            let before = said.insert(key.to_owned(), fate.to_owned());
            assert!(before.is_none(), "README says twice what becomes of {key}");
        }
    }
    // The environment has a table of its own.
    said.retain(|key, _| !key.starts_with(|c: char| c.is_ascii_uppercase()));
    let known = KEYS.iter().map(|(key, fate)| {
        let word = match fate {
            Fate::Honoured => "honoured",
            Fate::Ignored => "ignored",
            Fate::Dropped(_) => "ignored, with a warning",
            Fate::Refused(_) => "refused",
        };
        (key.to_string(), word.to_owned())
    });
    assert_eq!(said, known.collect());
}

#[test]
fn the_table_of_commands_is_the_list_of_commands() {
    let commands: BTreeSet<String> = cli::commands().map(str::to_owned).collect();
    assert_eq!(first_column(&read("README.md"), "### Commands"), commands);
}

#[test]
fn every_command_for_a_daemon_that_runs_is_where_the_command_line_is_shown() {
    let commands: BTreeSet<&str> =
        cli::commands().filter(|word| !["check", "try"].contains(word)).collect();
    for (document, start, end) in [
        ("README.md", "\nchoria-provisioner status", " ["),
        ("dist/man/choria-provisioner.8", "\n.Cm status", "\n"),
    ] {
        let text = read(document);
        let (_, list) = text.split_once(start).expect("there is a list");
        let (list, _) = list.split_once(end).expect("it ends");
        let shown: BTreeSet<&str> =
            list.split('|').skip(1).map(str::trim).chain(["status"]).collect();
        assert_eq!(shown, commands, "{document}");
    }
}

#[test]
fn every_exit_code_is_in_the_readme() {
    let readme = read("README.md");
    let main = read("src/main.rs");
    let (_, codes) = main.split_once("enum End {").expect("it says how the process ends");
    let (codes, _) = codes.split_once('}').expect("the list ends");
    let codes: Vec<&str> =
        codes.lines().filter_map(|line| line.split_once(" = ")?.1.strip_suffix(',')).collect();
    assert!(codes.len() >= 6, "{codes:?}");
    for code in codes {
        assert!(
            readme.contains(&format!("\n| {code} | ")),
            "README has no row for exit code {code}"
        );
    }
}

#[test]
fn the_table_of_metrics_is_the_list_of_metrics() {
    let metrics = Metrics::new("here");
    metrics.rpc_time("rpcutil#inventory", std::time::Duration::ZERO);
    let scrape = metrics.render();
    let with_labels = read("src/metrics.rs");
    let said = first_column(&read("README.md"), "## Metrics");
    let exported: BTreeSet<String> = scrape
        .lines()
        .filter_map(|line| line.strip_prefix("# TYPE choria_provisioner_")?.split(' ').next())
        .map(str::to_owned)
        .collect();
    let missing: Vec<_> = exported.difference(&said).collect();
    assert!(missing.is_empty(), "README says nothing about the metrics {missing:?}");
    // Those with labels of their own appear in a scrape with their first value only.
    for name in said.difference(&exported) {
        assert!(
            with_labels.contains(&format!("\"{name}\"")),
            "README has a row for {name}, which is no metric"
        );
    }
}

#[test]
fn every_outcome_is_in_the_row_of_its_metric() {
    let readme = read("README.md");
    let row = readme.lines().find(|line| line.starts_with("| `outcomes_total` |"));
    let row = row.expect("the metric has a row");
    let code = read("src/fleet/tally.rs");
    let (_, tally) = code.split_once("match outcome {").expect("it says what each counts as");
    let labels = ["good", "bad", "own"].iter().flat_map(|kind| -> Vec<&str> {
        let call = format!("=> {kind}(\"");
        tally.split(&call).skip(1).map(|rest| rest.split('"').next().unwrap_or_default()).collect()
    });
    let labels: Vec<&str> = labels.chain(["stale"]).collect();
    assert!(labels.len() > 10, "{labels:?}");
    for label in labels {
        assert!(row.contains(label), "README says nothing about the outcome {label}");
    }
}

#[test]
fn every_reason_to_turn_a_client_of_the_monitor_port_away_is_in_the_row_of_its_metric() {
    let readme = read("README.md");
    let row = readme.lines().find(|line| line.starts_with("| `monitor_refused_total` |"));
    let row = row.expect("the metric has a row");
    let code = read("src/ops/http.rs");
    let (_, labels) = code.split_once("fn label(self)").expect("refusals have labels");
    let (labels, _) = labels.split_once("\n    }").expect("they end");
    let labels: Vec<&str> =
        labels.split("=> \"").skip(1).filter_map(|rest| rest.split('"').next()).collect();
    assert!(labels.len() > 5, "{labels:?}");
    for label in labels {
        assert!(row.contains(&format!("`{label}`")), "README says nothing about {label}");
    }
}

#[test]
fn the_helpers_shown_are_the_helpers_shipped() {
    let readme = read("README.md");
    let names = ["sample", "persistent"].into_iter().flat_map(|name| {
        ["sh", "py", "rb"].into_iter().map(move |language| format!("{name}.{language}"))
    });
    for name in names {
        let shipped = read(&format!("dist/helpers/{name}"));
        assert!(readme.contains(&shipped), "README shows another dist/helpers/{name}");
    }
}

#[test]
fn every_dependency_has_its_reason_in_the_readme() {
    let manifest = read("Cargo.toml");
    let readme = read("README.md");
    let start = manifest.find("[dependencies]").unwrap();
    let list = manifest[start..].lines().skip(1).take_while(|line| !line.starts_with('['));
    for name in list.filter_map(|line| line.split_once(" = ").map(|(name, _)| name)) {
        let section = &readme[readme.find("## What we build on").unwrap()..];
        assert!(section.contains(name), "README gives no reason for {name}");
    }
}
