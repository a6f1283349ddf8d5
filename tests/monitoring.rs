//! The dashboard and the alert rules ask for what the program exports, and the alerts fire when they should.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use choria_provisioner::metrics::Metrics;
use serde_json::Value;

#[test]
fn every_alert_fires_when_it_should_and_not_otherwise() {
    let output = Command::new("promtool")
        .args(["test", "rules", "alerts.test.yml"])
        .current_dir(path("dist/prometheus"))
        .output()
        .expect("promtool of the package prometheus");
    assert!(output.status.success(), "{output:#?}");
}

#[test]
fn every_alert_has_a_case_that_fires_and_one_that_does_not() {
    let cases = read("dist/prometheus/alerts.test.yml");
    let of = |after: &str| -> BTreeSet<String> {
        let rest = cases.split("alertname: ").skip(1).filter_map(|case| case.split_once('\n'));
        rest.filter(|(_, rest)| rest.trim_start().starts_with(after))
            .map(|(name, _)| name.to_owned())
            .collect()
    };
    let rules = read("dist/prometheus/alerts.yml");
    let alerts = rules.lines().filter_map(|line| line.trim().strip_prefix("- alert: "));
    let alerts: BTreeSet<String> = alerts.map(str::to_owned).collect();
    assert!(alerts.len() > 10, "{alerts:?}");
    assert_eq!(of("exp_alerts:\n"), alerts);
    assert_eq!(of("exp_alerts: []\n"), alerts);
}

#[test]
fn every_metric_in_the_dashboard_and_the_alerts_exists() {
    let known = exported();
    let alerts = read("dist/prometheus/alerts.yml");
    let dashboard = read(DASHBOARD);
    let asked: BTreeSet<String> = named(&alerts).chain(named(&dashboard)).collect();
    assert!(asked.len() > 30, "{asked:?}");
    let unknown: Vec<_> = asked.difference(&known).collect();
    assert!(unknown.is_empty(), "nobody exports {unknown:?}");
    // One row each is not much, and who looks for a metric in a dashboard expects all.
    let shown: BTreeSet<String> = named(&dashboard).collect();
    let families = known.iter().filter(|name| !SUFFIXES.iter().any(|end| name.ends_with(end)));
    let is_shown = |name: &str| {
        shown.contains(name) || SUFFIXES.iter().any(|end| shown.contains(&format!("{name}{end}")))
    };
    let hidden: Vec<_> = families.filter(|name| !is_shown(name)).collect();
    assert!(hidden.is_empty(), "the dashboard shows nothing of {hidden:?}");
}

#[test]
fn the_dashboard_has_every_panel_of_the_originals() {
    let titles: BTreeSet<String> = panels().iter().map(|panel| text(&panel["title"])).collect();
    for title in [
        "Nodes Provisioned / Hour",
        "Busy Workers",
        "Circuit Breaker",
        "Discovery",
        "Events Processed",
        "RPC and Helper Times",
        "Errors",
    ] {
        assert!(titles.contains(title), "no panel {title}");
    }
    // It finds installations as the original's does, through a series that a standby has, too.
    assert!(read(DASHBOARD).contains("label_values(choria_provisioner_discover_cycles, site)"));
}

#[test]
fn every_query_of_the_dashboard_is_well_formed() {
    let mut rules = String::from("groups:\n  - name: dashboard\n    rules:\n");
    let panels = panels();
    let targets = panels.iter().flat_map(|panel| panel["targets"].as_array().into_iter().flatten());
    for (number, target) in targets.enumerate() {
        let query = text(&target["expr"]).replace("$site", ".*").replace("$__rate_interval", "1m");
        assert!(query.contains(r#"site=~".*""#), "{query} asks for every site");
        rules += &format!("      - record: query{number}\n        expr: '{query}'\n");
    }
    let file = std::env::temp_dir().join(format!("dashboard-{}.yml", std::process::id()));
    fs::write(&file, rules).expect("a file for promtool");
    let output = Command::new("promtool").args(["check", "rules"]).arg(&file).output();
    fs::remove_file(&file).expect("the file is there");
    let output = output.expect("promtool of the package prometheus");
    assert!(output.status.success(), "{output:#?}");
}

#[test]
fn panels_of_the_dashboard_do_not_overlap() {
    let panels = panels();
    let number = |panel: &Value, key: &str| panel["gridPos"][key].as_u64().expect("a number");
    let mut taken = BTreeSet::new();
    for panel in &panels {
        let (left, top) = (number(panel, "x"), number(panel, "y"));
        assert!(left + number(panel, "w") <= 24, "{} is cut off", panel["title"]);
        for x in left..left + number(panel, "w") {
            for y in top..top + number(panel, "h") {
                assert!(taken.insert((x, y)), "{} lies on another panel", panel["title"]);
            }
        }
    }
    let ids: BTreeSet<u64> = panels.iter().filter_map(|panel| panel["id"].as_u64()).collect();
    assert_eq!(ids.len(), panels.len(), "each panel has an id of its own");
}

const DASHBOARD: &str = "dist/grafana/choria-provisioner.json";

/// What the series of a histogram or summary have behind its name.
const SUFFIXES: [&str; 3] = ["_bucket", "_count", "_sum"];

fn panels() -> Vec<Value> {
    let dashboard: Value = serde_json::from_str(&read(DASHBOARD)).expect("the dashboard is JSON");
    dashboard["panels"].as_array().expect("panels").clone()
}

/// Names of our metrics in a text, without their prefix.
fn named(text: &str) -> impl Iterator<Item = String> {
    text.split("choria_provisioner_").skip(1).map(|rest| {
        let end = rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_');
        rest[..end.unwrap_or(rest.len())].to_owned()
    })
}

/// Every series the program can export, without prefix.
fn exported() -> BTreeSet<String> {
    let metrics = Metrics::new("here");
    metrics.rpc_time("rpcutil#inventory", std::time::Duration::ZERO);
    metrics.rpc_error("rpcutil#inventory");
    metrics.token_expires("signing", 0);
    // Those with labels of their own have no series before somebody counts.
    for counts in [
        &metrics.outcomes,
        &metrics.broker_errors,
        &metrics.unexpected_replies,
        &metrics.events_ignored,
        &metrics.queue_refused,
        &metrics.peer_messages_ignored,
        &metrics.monitor_refused,
    ] {
        counts.with_label_values(&["x"]).inc();
    }
    metrics.gate_closed.with_label_values(&["x"]).set(1);
    metrics.step_duration_seconds.with_label_values(&["x"]).observe(1.0);
    let scrape = metrics.render();
    let series = scrape.lines().filter(|line| line.starts_with("choria_")).flat_map(named);
    let families = scrape.lines().filter_map(|line| line.strip_prefix("# TYPE ")).flat_map(named);
    series.chain(families).collect()
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

fn read(file: &str) -> String {
    fs::read_to_string(path(file)).unwrap_or_else(|error| panic!("{file}: {error}"))
}

fn path(file: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(file)
}
