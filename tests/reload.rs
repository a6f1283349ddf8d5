//! A new configuration while the daemon runs: all of it takes effect or nothing does, and no node is lost over it.

mod common;
mod fleet;

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use common::admin::{builder, fail, run, say, say_json};
use common::{Daemon, NatsServer, SOON, wait_until, waiting_helper, within};
use fleet::Fleet;
use rustix::fs::{CWD, FileType, Mode, mknodat};
use rustix::process::Signal;
use serde_json::{Value, json};

/// A helper that leaves its own name in the configuration.
fn named(name: &str) -> String {
    format!(
        "#!/bin/sh\nread -r node\necho '{{\"configuration\":{{\"name\":\"{name}\",\"plugin.choria.server.provision\":\"0\"}}}}'\n"
    )
}

/// Writes a program beside the daemon's helper.
fn program(daemon: &Daemon, name: &str, text: &str) -> String {
    use std::os::unix::fs::PermissionsExt as _;
    let path = daemon.dir().join(name);
    fs::write(&path, text).expect("the folder is ours");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("the file is ours");
    path.display().to_string()
}

/// Which helpers configured the nodes.
fn names(fleet: &Fleet) -> BTreeSet<String> {
    fleet.iter().filter_map(|node| node.configuration().remove("name")).collect()
}

fn hang_up(daemon: &Daemon) {
    daemon.signal(Signal::HUP);
}

/// Waits for the `number`th reload that took effect.
#[track_caller]
fn wait_reloaded(daemon: &Daemon, number: usize) {
    wait_until(SOON, "the settings are reloaded", || {
        daemon.log().matches("Settings reloaded, changed").count() >= number
    });
}

#[test]
fn workers_helper_and_intervals_change_under_load_and_no_node_is_lost() {
    let broker = NatsServer::start();
    let daemon = builder(&broker).set("workers", 1).set("interval", "1h").helper(&named("first"));
    let daemon = daemon.start();
    let fleet = Fleet::builder(&broker.url()).nodes(200).start();
    fleet.wait_provisioned(10, within(SOON)).expect("it is at work");

    daemon.write_setting("workers", 8);
    daemon.write_setting("helper", program(&daemon, "second", &named("second")));
    daemon.write_setting("interval", "2s");
    daemon.write_setting("probe_timeout", "5s");
    hang_up(&daemon);
    wait_reloaded(&daemon, 1);
    daemon.wait_logged(SOON, &["changed: workers, interval, helper, probe_timeout"]);
    let status = say_json(&daemon, &["status"]);
    assert_eq!(
        (&status["workers_max"], &status["discovery"]["interval_secs"]),
        (&json!(8), &json!(2.0))
    );
    wait_until(SOON, "more are worked on at once", || daemon.metric("busy_workers") > 1.0);

    daemon.write_setting("workers", 2);
    daemon.write_setting("helper", program(&daemon, "third", &named("third")));
    hang_up(&daemon);
    wait_reloaded(&daemon, 2);
    fleet.wait_all_provisioned(within(SOON)).expect("all are provisioned");
    assert_eq!(names(&fleet), ["first", "second", "third"].map(str::to_owned).into());
    for node in fleet.iter() {
        assert_eq!(node.times_configured(), 1, "{}", node.describe());
    }
    assert_eq!(daemon.metric("provision_errors"), 0.0);
    assert!(daemon.metric("busy_workers") <= 2.0);
    let discoveries = daemon.metric("discover_cycles");
    wait_until(SOON, "the fleet is asked again", || {
        daemon.metric("discover_cycles") >= discoveries + 2.0
    });
    assert!(fleet.violations().is_empty(), "{:?}", fleet.violations());
}

#[test]
fn a_node_keeps_the_settings_it_began_with() {
    let broker = NatsServer::start();
    let fleet = Fleet::builder(&broker.url()).nodes(1).start();
    let builder = builder(&broker).set("workers", 1);
    let (begun, go_on) = (builder.dir().join("begun"), builder.dir().join("go-on"));
    let slow = waiting_helper(&begun, &go_on).replace("{\"plugin", "{\"name\":\"first\",\"plugin");
    let daemon = builder.helper(&slow).start();
    wait_until(SOON, "the helper runs", || begun.exists());
    daemon.write_setting("helper", program(&daemon, "second", &named("second")));
    daemon.write_setting("token", "another");
    let said = say(&daemon, &["reload"]);
    assert_eq!(said.lines().next(), Some("Reloaded; changed: helper, token."));
    // An interval of a second is nothing for a site.
    assert!(said.contains("\nwarning: ") && said.contains(": interval: "), "{said}");
    fs::write(&go_on, "").expect("the folder is ours");
    fleet.wait_all_provisioned(within(SOON)).expect("with the old token and the old helper");
    assert_eq!(names(&fleet), ["first".to_owned()].into());
    // Whoever comes later has to know the other token.
    let later = Fleet::builder(&broker.url()).node("later.example.net").token("another").start();
    later.wait_all_provisioned(within(SOON)).expect("with the new token and the new helper");
    assert_eq!(names(&later), ["second".to_owned()].into());
}

#[test]
fn one_wrong_value_changes_nothing_and_every_error_is_told() {
    let broker = NatsServer::start();
    let daemon = builder(&broker).start();
    let read_at = daemon.metric("config_last_reload_timestamp_seconds");
    assert!(read_at > 0.0 && daemon.metric("config_last_reload_successful") == 1.0);
    daemon.write_setting("workers", 7);
    daemon.write_setting("interval", "never");
    daemon.write_setting("retry_max", "99h");

    let (code, told) = fail(&run(&daemon, &["reload"]));
    assert_eq!(code, Some(1));
    let told: Vec<&str> =
        told.lines().map(|line| line.trim_start_matches("choria-provisioner: error: ")).collect();
    assert_eq!(told.len(), 3, "{told:?}");
    assert!(told.iter().any(|line| line.contains("yaml:2: interval: ")), "{told:?}");
    assert!(told.iter().any(|line| line.contains("yaml:1: retry_max: ")), "{told:?}");
    for line in &told {
        // In the log quotes are escaped.
        let start = line.split('"').next().unwrap_or(line);
        daemon.wait_logged(SOON, &["\"level\":\"error\"", start]);
    }
    hang_up(&daemon);
    wait_until(SOON, "a SIGHUP is refused as well", || {
        daemon.log().matches("Settings not reloaded: those of before hold").count() == 2
    });
    let status = say_json(&daemon, &["status"]);
    assert_eq!(
        (&status["workers_max"], &status["discovery"]["interval_secs"]),
        (&json!(4), &json!(1.0))
    );
    let refused = status["settings"]["refused"]["text"].as_str().unwrap_or_default();
    assert!(refused.contains("interval: "), "{status}");
    assert_eq!(daemon.metric("config_last_reload_successful"), 0.0);
    assert_eq!(daemon.metric("config_last_reload_timestamp_seconds"), read_at);
    let (code, ready) = daemon.get("/readyz").expect("the port answers");
    assert_eq!(code, 200, "it goes on as before: {ready}");
    assert!(ready.contains("the last reload was refused: "), "{ready}");
    let fleet = Fleet::builder(&broker.url()).nodes(3).start();
    fleet.wait_all_provisioned(within(SOON)).expect("it goes on as before");

    daemon.write_setting("interval", "1s");
    daemon.write_setting("retry_max", "1h");
    let reloaded = say_json(&daemon, &["reload"]);
    assert_eq!(
        reloaded,
        json!({
            "changed": true,
            "message": "Reloaded; changed: workers, retry_max.",
            "settings": ["workers", "retry_max"],
            "warnings": reloaded["warnings"],
        })
    );
    assert_eq!(daemon.metric("config_last_reload_successful"), 1.0);
    let status = say_json(&daemon, &["status"]);
    assert_eq!((&status["workers_max"], &status["settings"]["refused"]), (&json!(7), &Value::Null));
    assert_eq!(
        say(&daemon, &["reload"]).lines().next(),
        Some("Reloaded; no setting is other than before.")
    );
}

#[test]
fn verification_is_not_lost_silently() {
    let broker = NatsServer::start();
    let builder = builder(&broker);
    let daemon = builder.start();
    let yaml = daemon.dir().join("choria-provisioner.yaml");
    let before = fs::read_to_string(&yaml).expect("it was written at the start");
    fs::write(&yaml, before.replace("jwt: true", "jwt: false")).expect("ours");
    let told = say(&daemon, &["reload"]);
    let warning = "features.jwt: was on and is off: nodes show no provisioning JWT any more";
    assert!(told.contains(&format!("yaml: {warning}")), "{told}\n{before}");
    daemon.wait_logged(SOON, &["\"level\":\"warning\"", warning]);
    let told = say(&daemon, &["reload"]);
    assert!(!told.contains(warning), "{told}");
}

#[test]
fn what_is_read_at_start_only_needs_a_restart_and_every_such_key_is_named() {
    let broker = NatsServer::start();
    let daemon = builder(&broker).start();
    daemon.write_setting("workers", 9);
    daemon.write_setting("site", "elsewhere");
    daemon.write_setting("work_queue", 7);
    let client = daemon.dir().join("choria.cfg");
    let before = fs::read_to_string(&client).expect("it was written at the start");
    fs::write(&client, format!("{before}identity = other.example.net\nttl = 90\n")).expect("ours");
    let (code, told) = fail(&run(&daemon, &["reload"]));
    assert_eq!(code, Some(1));
    let yaml = daemon.dir().join("choria-provisioner.yaml");
    let expected = format!(
        "{}: a change needs a restart: site, work_queue\nchoria-provisioner: error: {}: a change needs a restart: identity, ttl\n\
         choria-provisioner: error: Settings not reloaded: those of before hold, all of them",
        yaml.display(),
        client.display()
    );
    assert_eq!(told, expected);
    assert_eq!(say_json(&daemon, &["status"])["workers_max"], 4);

    daemon.write_setting("site", "test");
    daemon.write_setting("work_queue", 50_000);
    // Other words for the same.
    fs::write(&client, format!("# Moved.\n{before}")).expect("ours");
    assert_eq!(say_json(&daemon, &["reload"])["settings"], json!(["workers"]));
    assert_eq!(say_json(&daemon, &["status"])["workers_max"], 9);
}

#[test]
fn a_file_that_vanished_ends_nothing() {
    let broker = NatsServer::start();
    let daemon = builder(&broker).start();
    for name in ["choria-provisioner.yaml", "choria.cfg"] {
        let path = daemon.dir().join(name);
        let away = daemon.dir().join("away");
        fs::rename(&path, &away).expect("the folder is ours");
        let (code, told) = fail(&run(&daemon, &["reload"]));
        let expected = format!("{}: cannot be read: No such file or directory", path.display());
        assert!(code == Some(1) && told.starts_with(&expected), "{told}");
        fs::rename(&away, &path).expect("the folder is ours");
    }
    let (_, told) = {
        let yaml = daemon.dir().join("choria-provisioner.yaml");
        let before = fs::read(&yaml).expect("it was written at the start");
        fs::write(&yaml, b"workers: [\x00\xff").expect("the folder is ours");
        let told = fail(&run(&daemon, &["reload"]));
        fs::write(&yaml, before).expect("the folder is ours");
        told
    };
    assert!(told.contains("choria-provisioner.yaml"), "{told}");
    say(&daemon, &["reload"]);
    let fleet = Fleet::builder(&broker.url()).nodes(3).start();
    fleet.wait_all_provisioned(within(SOON)).expect("it goes on");
}

#[test]
fn names_that_are_denied_now_get_no_certificate_any_more() {
    let broker = NatsServer::start();
    let daemon = builder(&broker).feature("pki", "true").start();
    let fleet = Fleet::builder(&broker.url()).pki().node("web1.example.net").start();
    fleet.wait_all_provisioned(within(SOON)).expect("it may have one");
    daemon.write_setting("cert_deny_list", r"['^web']");
    assert_eq!(say_json(&daemon, &["reload"])["settings"], json!(["cert_deny_list"]));
    let _denied = Fleet::builder(&broker.url()).pki().node("web2.example.net").start();
    daemon
        .wait_logged(SOON, &["Could not provision web2.example.net", "denied certificate pattern"]);
}

#[test]
fn nodes_that_failed_are_tried_again_at_once() {
    let broker = NatsServer::start();
    let failing = "#!/bin/sh\nexit 1\n";
    let daemon = builder(&broker).set("interval", "1h").helper(failing).start();
    let fleet = Fleet::builder(&broker.url()).nodes(5).start();
    wait_until(SOON, "all wait for their next try", || {
        say_json(&daemon, &["status"])["counts"]["waiting"] == 5
    });
    daemon.write_setting("helper", program(&daemon, "good", &named("good")));
    say(&daemon, &["reload"]);
    fleet.wait_all_provisioned(within(SOON)).expect("they need not wait for an hour");
}

#[test]
fn processes_of_a_helper_that_stays_answer_what_they_were_asked_and_are_replaced() {
    let broker = NatsServer::start();
    let builder = builder(&broker).set("helper_mode", "persistent").set("workers", 1);
    let (begun, go_on) = (builder.dir().join("begun"), builder.dir().join("go-on"));
    let wait =
        format!(": >{}; while [ ! -e {} ]; do sleep 0.05; done", begun.display(), go_on.display());
    let pids = builder.dir().join("pids");
    let daemon = builder.helper(&staying("first", &pids, &wait)).start();
    let fleet = Fleet::builder(&broker.url()).nodes(1).start();
    wait_until(SOON, "it is asked", || begun.exists());
    daemon.write_setting("helper", program(&daemon, "second", &staying("second", &pids, ":")));
    daemon.write_setting("workers", 3);
    say(&daemon, &["reload"]);
    fs::write(&go_on, "").expect("the folder is ours");
    fleet.wait_all_provisioned(within(SOON)).expect("it was answered");
    assert_eq!(names(&fleet), ["first".to_owned()].into());
    wait_until(SOON, "the old process ends", || processes(&pids).is_empty());
    let later = (1..=6).map(|number| format!("later{number}.example.net"));
    let later = later.fold(Fleet::builder(&broker.url()), |fleet, name| fleet.node(&name)).start();
    later.wait_all_provisioned(within(SOON)).expect("by the new one");
    assert_eq!(names(&later), ["second".to_owned()].into());
    // Another version of the same program.
    let before = processes(&pids);
    assert!(!before.is_empty());
    program(&daemon, "second", &staying("third", &pids, ":"));
    assert_eq!(say_json(&daemon, &["reload"])["changed"], false);
    wait_until(SOON, "those of the old version end", || processes(&pids).is_disjoint(&before));
    let last = Fleet::builder(&broker.url()).node("last.example.net").start();
    last.wait_all_provisioned(within(SOON)).expect("by the new version");
    assert_eq!(names(&last), ["third".to_owned()].into());
    assert_eq!(daemon.metric("helper_errors"), 0.0);
    assert_eq!(daemon.metric("helper_restarts_total"), 0.0);
}

/// A helper that stays, leaves its name in the configuration and its process number in a file.
fn staying(name: &str, pids: &Path, before_answer: &str) -> String {
    format!(
        r#"#!/bin/sh
echo $$ >>{pids}
while IFS= read -r line; do
    id=${{line#'{{"id":"'}}
    id=${{id%%\"*}}
    {before_answer}
    printf '{{"id":"%s","reply":{{"configuration":{{"name":"{name}","plugin.choria.server.provision":"0"}}}}}}\n' "$id"
done
"#,
        pids = pids.display()
    )
}

/// The processes that left their number there and have not ended.
fn processes(pids: &Path) -> BTreeSet<String> {
    let text = fs::read_to_string(pids).unwrap_or_default();
    let lives = |pid: &&str| Path::new("/proc").join(pid).exists();
    text.lines().filter(lives).map(str::to_owned).collect()
}

#[test]
fn an_audit_log_can_be_moved_begun_and_ended() {
    let broker = NatsServer::start();
    let daemon = builder(&broker).start();
    let path = |name: &str| daemon.dir().join(name);
    let provision = |name: &str| {
        let fleet = Fleet::builder(&broker.url()).node(name).start();
        fleet.wait_all_provisioned(within(SOON)).expect("provisioned");
        wait_until(SOON, "it is counted", || daemon.log().contains(&format!("Provisioned {name}")));
        let settled = || say_json(&daemon, &["nodes", name])["nodes"][0]["state"] == "settling";
        wait_until(SOON, "its outcome is written down", settled);
    };
    let nodes = |name: &str| -> Vec<String> {
        let text = fs::read_to_string(path(name)).unwrap_or_default();
        let node = |line: &str| {
            let line: Value = serde_json::from_str(line).expect("it is JSON");
            line["node"].as_str().unwrap_or_default().to_owned()
        };
        text.lines().map(node).collect()
    };
    provision("n1.example.net");
    daemon.write_setting("audit_log", "/nowhere/audit.log");
    let (_, told) = fail(&run(&daemon, &["reload"]));
    assert!(told.starts_with("audit_log: cannot open /nowhere/audit.log: "), "{told}");
    let pipe = path("pipe");
    mknodat(CWD, &pipe, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).expect("the folder is ours");
    daemon.write_setting("audit_log", pipe.display());
    let (_, told) = fail(&run(&daemon, &["reload"]));
    assert!(told.contains("it is a pipe that nobody reads"), "{told}");
    for (number, name) in [(2, "first.log"), (3, "second.log")] {
        daemon.write_setting("audit_log", path(name).display());
        say(&daemon, &["reload"]);
        provision(&format!("n{number}.example.net"));
    }
    daemon.write_setting("audit_log", "''");
    say(&daemon, &["reload"]);
    provision("n4.example.net");
    // Nothing is left to be written when a log is ended.
    assert_eq!(nodes("first.log"), ["n2.example.net"]);
    assert_eq!(nodes("second.log"), ["n3.example.net"]);
}

#[test]
fn the_level_of_the_log_follows_unless_the_command_line_fixed_it() {
    let broker = NatsServer::start();
    let daemon = builder(&broker).start();
    daemon.write_setting("loglevel", "error");
    say(&daemon, &["reload"]);
    let before = daemon.log();
    daemon.write_setting("loglevel", "debug");
    say(&daemon, &["reload"]);
    let after = daemon.log();
    let lines = after[before.len()..].lines().filter(|line| line.contains("\"info\""));
    let lines: Vec<&str> = lines.filter(|line| line.contains("\"config\"")).collect();
    // What was logged before that was still for errors alone.
    assert!(
        lines.len() == 1 && lines[0].contains("Settings reloaded, changed: loglevel"),
        "{lines:?}"
    );

    let daemon = builder(&broker).argument("--debug").start();
    daemon.write_setting("loglevel", "error");
    assert_eq!(say_json(&daemon, &["reload"])["settings"], json!([]));
}

#[test]
fn whoever_ends_reloads_nothing_and_finishes_its_node() {
    let broker = NatsServer::start();
    let fleet = Fleet::builder(&broker.url()).nodes(1).start();
    let builder = builder(&broker).set("workers", 1).set("drain_timeout", "1m");
    let (begun, go_on) = (builder.dir().join("begun"), builder.dir().join("go-on"));
    let mut daemon = builder.helper(&waiting_helper(&begun, &go_on)).start();
    wait_until(SOON, "the helper runs", || begun.exists());
    daemon.terminate();
    daemon.wait_logged(SOON, &["Shutting down"]);
    daemon.write_setting("workers", 2);
    assert_eq!(fail(&run(&daemon, &["reload"])), (Some(1), "the daemon is shutting down".into()));
    hang_up(&daemon);
    fs::write(&go_on, "").expect("the folder is ours");
    assert!(daemon.wait(SOON).success());
    assert_eq!(fleet.node(0).times_configured(), 1);
}

#[test]
fn a_storm_of_signals_without_a_broker_leaves_the_last_settings_in_force() {
    let mut broker = NatsServer::start();
    let mut daemon = builder(&broker).start();
    broker.kill();
    wait_until(SOON, "the broker is missed", || daemon.metric("broker_connected") == 0.0);
    for number in 1..=50 {
        daemon.write_setting("workers", number);
        hang_up(&daemon);
    }
    wait_until(SOON, "the last settings hold", || {
        say_json(&daemon, &["status"])["workers_max"] == 50
    });
    broker.restart();
    let fleet = Fleet::builder(&broker.url()).nodes(20).start();
    fleet.wait_all_provisioned(within(SOON)).expect("provisioned");
    // The last thing it hears may come before the end, or not.
    hang_up(&daemon);
    daemon.terminate();
    hang_up(&daemon);
    assert!(daemon.wait(SOON).success());
}
