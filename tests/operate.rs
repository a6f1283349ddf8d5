//! What an operator sees and can do: the status page through the real port, and commands through the real socket, of the
//! real daemon.

mod common;
mod fleet;

use std::fs;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::thread;
use std::time::Instant;

use common::admin::{builder, fail, program, run, say, say_json};
use common::{Daemon, NatsServer, SOON, TempDir, wait_until, waiting_helper, within};
use fleet::{Action, Fault, Fleet};
use serde_json::{Value, json};

/// What `/status.json` says, asked with `query`.
#[track_caller]
fn status(daemon: &Daemon, query: &str) -> Value {
    let (code, text) = daemon.get(&format!("/status.json{query}")).expect("the port answers");
    assert_eq!(code, 200, "{text}");
    serde_json::from_str(&text).expect("it is JSON")
}

/// The page, asked with `query`.
#[track_caller]
fn page(daemon: &Daemon, query: &str) -> String {
    let (code, text) = daemon.get(&format!("/{query}")).expect("the port answers");
    assert_eq!(code, 200, "{text}");
    text
}

#[test]
fn the_page_says_what_the_daemon_does_and_which_node_is_stuck_why() {
    let broker = NatsServer::start();
    let fleet = Fleet::builder(&broker.url())
        .nodes(3)
        .broken("<script/src='x'", Fault::WrongToken)
        .broken("full-disk.example.net", Fault::ConfigureRefused)
        .start();
    let daemon = Daemon::builder(&broker.address()).start();
    fleet.wait_all_provisioned(within(SOON)).expect("provisioned");
    wait_until(SOON, "both are stuck", || status(&daemon, "")["nodes"]["matching"] == 2);

    let document = status(&daemon, "");
    assert_eq!(document["state"], "provisioning");
    assert_eq!(document["ready"], true);
    assert_eq!(document["identity"], "provisioner.example.net");
    assert_eq!(document["site"], "test");
    assert_eq!(document["totals"]["provisioned"], 3);
    let server = document["broker"]["server"].as_str().expect("it is connected");
    assert!(server.contains(&broker.address()), "{server}");
    assert!(document["discovery"]["last_secs"].is_number() && document["uptime_secs"].is_number());
    let outcomes = document["outcomes"].as_array().expect("a list");
    assert_eq!(outcomes.iter().filter(|each| each["outcome"] == "provisioned").count(), 3);
    assert!(outcomes.iter().any(|each| each["outcome"] == "wrong_token"));
    let disk = status(&daemon, "?state=all&name=full-disk");
    let disk = &disk["nodes"]["nodes"][0];
    let reason = disk["reason"].as_str().unwrap_or_default();
    assert!(reason.contains("configuration failed"), "{disk}");

    let text = page(&daemon, "");
    assert!(text.contains("<h1>provisioning</h1>"), "{text}");
    assert!(text.contains("full-disk.example.net"), "{text}");
    assert!(text.contains("&lt;script/src=&#39;x&#39;"), "{text}");
    assert!(!text.contains("<script/"), "a node's name is no part of the page");
    let text = page(&daemon, "?state=settling");
    assert!(text.contains("n0.fleet.example.net"), "{text}");
}

#[test]
fn the_page_shows_the_step_each_worker_is_at() {
    let broker = NatsServer::start();
    let fleet = Fleet::builder(&broker.url()).nodes(1).start();
    let builder = Daemon::builder(&broker.address());
    let (begun, go_on) = (builder.dir().join("begun"), builder.dir().join("go-on"));
    let daemon = builder.helper(&waiting_helper(&begun, &go_on)).start();
    wait_until(SOON, "the helper runs", || begun.exists());
    let document = status(&daemon, "?state=working");
    let worker = &document["workers"][0];
    assert_eq!(worker["node"], "n0.fleet.example.net");
    assert_eq!((&worker["step"], &worker["attempt"]), (&"helper".into(), &1.into()));
    assert!(worker["step_secs"].as_f64() <= worker["for_secs"].as_f64(), "{worker}");
    assert_eq!(document["nodes"]["nodes"][0]["state"], "working");
    assert!(page(&daemon, "").contains("<td>helper</td>"));
    fs::write(&go_on, "").expect("the folder is ours");
    fleet.wait_all_provisioned(within(SOON)).expect("provisioned");
    wait_until(SOON, "its desk is free", || status(&daemon, "")["workers"] == Value::Array(vec![]));
}

#[test]
fn ten_thousand_nodes_are_on_the_page_at_once() {
    const NODES: usize = 10_000;
    let broker = NatsServer::start();
    let daemon =
        Daemon::builder(&broker.address()).set("workers", 1).set("probe_window", 1).start();
    daemon.wait_ready();
    // Nobody is behind them: they are announced, asked, and wait to be seen again.
    let fleet = Fleet::builder(&broker.url()).nodes(1).start_quietly();
    let names: Vec<String> = (0..NODES).map(|number| format!("n{number}.example.net")).collect();
    fleet.announce_identities(names.iter().map(String::as_str));
    wait_until(SOON, "all are queued", || {
        daemon.metric("waiting_nodes") + daemon.metric("waiting_retry_nodes") >= NODES as f64
    });
    let asked = Instant::now();
    let text = page(&daemon, "?state=all&limit=10000");
    let took = asked.elapsed();
    assert!(text.matches("<td class=\"node\">n").count() >= NODES);
    // It takes a hundredth of that; this catches what grows with the square.
    assert!(took < SOON, "{took:?}");
    assert!(page(&daemon, "?state=all&name=n77.").contains("n77.example.net"));
}

#[test]
fn a_paused_daemon_begins_nothing_until_it_is_resumed() {
    let broker = NatsServer::start();
    let daemon = builder(&broker).start();
    assert_eq!(say(&daemon, &["pause"]), "Paused; no node is in work.\n");
    assert_eq!(say_json(&daemon, &["pause"])["changed"], false);
    let fleet = Fleet::builder(&broker.url()).nodes(2).start();
    daemon.wait_logged(SOON, &["Skipping event processing while paused"]);
    let status = say_json(&daemon, &["status"]);
    assert_eq!((&status["state"], &status["ready"]), (&json!("paused"), &json!(false)));
    assert_eq!(status["closed_by"][0]["reason"], "operator");
    let said = say(&daemon, &["status"]);
    assert!(said.starts_with("State       paused by an operator for "), "{said}");
    assert_eq!(said.matches("paused by an operator").count(), 1, "{said}");
    let nobody = "No node with \"zzz\" in its name is known.\nThe daemon begins nothing: paused by an operator.\n";
    assert_eq!(say(&daemon, &["nodes", "zzz"]), nobody);
    assert_eq!(daemon.get("/readyz").expect("the port answers").0, 503);
    assert_eq!(daemon.metric("paused"), 1.0);
    assert_eq!(fleet.provisioned(), 0);
    let refused = fail(&run(&daemon, &["discover"]));
    assert_eq!(refused, (Some(1), "paused by an operator".into()));
    assert_eq!(say(&daemon, &["resume"]), "Resumed; a discovery begins.\n");
    fleet.wait_all_provisioned(within(SOON)).expect("provisioned");
    assert_eq!(say_json(&daemon, &["status"])["state"], "provisioning");
}

#[test]
fn a_pause_lets_a_node_in_work_finish_and_outlives_a_broken_connection() {
    let mut broker = NatsServer::start();
    let fleet = Fleet::builder(&broker.url()).nodes(1).start();
    let builder = builder(&broker);
    let (begun, go_on) = (builder.dir().join("begun"), builder.dir().join("go-on"));
    let daemon = builder.helper(&waiting_helper(&begun, &go_on)).start();
    wait_until(SOON, "the helper runs", || begun.exists());
    assert_eq!(say(&daemon, &["pause"]), "Paused; 1 in work will be finished.\n");
    fs::write(&go_on, "").expect("the folder is ours");
    fleet.wait_all_provisioned(within(SOON)).expect("it is finished");
    broker.restart();
    wait_until(SOON, "it is connected again", || daemon.metric("broker_reconnects_total") == 1.0);
    wait_until(SOON, "and paused all the same", || {
        say_json(&daemon, &["status"])["closed_by"].as_array().is_some_and(|by| by.len() == 1)
    });
    assert_eq!(say_json(&daemon, &["status"])["state"], "paused");
}

#[test]
fn whoever_is_alone_cannot_step_down() {
    let broker = NatsServer::start();
    let daemon = builder(&broker).start();
    let refused = fail(&run(&daemon, &["step-down"]));
    assert_eq!(refused, (Some(1), "there is no election: leader_election is off".into()));
}

#[test]
fn a_discovery_is_made_when_an_operator_wants_one() {
    let broker = NatsServer::start();
    let fleet = Fleet::builder(&broker.url()).nodes(1).announce(false).start_quietly();
    let daemon = builder(&broker).set("interval", "1h").set("retry_max", "1h").start();
    fleet.wait_all_provisioned(within(SOON)).expect("the first discovery finds it");
    let cycles = daemon.metric("discover_cycles");
    assert_eq!(say(&daemon, &["discover"]), "A discovery begins.\n");
    wait_until(SOON, "there was another", || daemon.metric("discover_cycles") > cycles);
}

#[test]
fn a_waiting_node_is_tried_at_once_when_an_operator_wants_it() {
    let broker = NatsServer::start();
    let fleet = Fleet::builder(&broker.url())
        .broken("locked-1.example.net", Fault::Locked)
        .broken("locked-2.example.net", Fault::Locked)
        .start();
    // A node that is locked is left alone for two minutes.
    let daemon = builder(&broker).start();
    let asked = |name: &str| fleet.named(name).times_asked(Action::Jwt);
    wait_until(SOON, "both wait", || {
        say_json(&daemon, &["nodes", "--state=waiting"])["matching"] == 2
    });
    let (first, second) = (asked("locked-1.example.net"), asked("locked-2.example.net"));
    let said = say(&daemon, &["retry", "locked-1.example.net"]);
    assert_eq!(said, "locked-1.example.net is queued.\n");
    wait_until(SOON, "it is tried", || asked("locked-1.example.net") > first);
    assert_eq!(asked("locked-2.example.net"), second, "the other waits");
    wait_until(SOON, "both wait", || {
        say_json(&daemon, &["nodes", "--state=waiting"])["matching"] == 2
    });
    assert_eq!(say(&daemon, &["retry", "--all"]), "2 are queued.\n");
    wait_until(SOON, "the other is tried", || asked("locked-2.example.net") > second);
    // A name that is nobody's is not stuck from then on.
    let said = say(&daemon, &["retry", "nobody.example.net"]);
    assert!(said.ends_with(" and is forgotten if nobody answers to that name.\n"), "{said}");
    wait_until(SOON, "nobody answers", || daemon.metric("provision_errors") == 1.0);
    wait_until(SOON, "it is forgotten", || {
        say_json(&daemon, &["nodes", "nobody.example.net"])["matching"] == 0
    });
    let (code, error) = fail(&run(&daemon, &["retry", "*"]));
    assert_eq!((code, error.as_str()), (Some(1), "\"*\": identity holds a wildcard"));
}

#[test]
fn a_denied_node_is_left_alone_until_it_is_allowed() {
    let broker = NatsServer::start();
    let daemon = builder(&broker).start();
    daemon.wait_ready();
    let name = "unwanted.example.net";
    let until = "until it is allowed or the daemon ends";
    let said = format!("{name} is left alone {until}; it was not known here.\n");
    assert_eq!(say(&daemon, &["deny", name]), said);
    let listed = say(&daemon, &["nodes", "--state=denied"]);
    assert!(listed.contains(&format!("\n{name}  denied  for ")), "{listed}");
    let fleet = Fleet::builder(&broker.url()).node(name).node("wanted.example.net").start();
    fleet.wait_provisioned(1, within(SOON)).expect("the other one is provisioned");
    let cycles = daemon.metric("discover_cycles");
    wait_until(SOON, "two discoveries saw it", || daemon.metric("discover_cycles") >= cycles + 2.0);
    assert!(daemon.metrics().with("events_ignored_total", "kind=\"denied\"") >= 1.0);
    assert_eq!(fleet.named(name).times_asked(Action::Inventory), 0);
    assert_eq!(say_json(&daemon, &["status"])["denied"][0]["node"], name);
    let refused = fail(&run(&daemon, &["retry", name]));
    assert_eq!(refused, (Some(1), format!("{name} is denied: allow it first")));
    assert_eq!(say(&daemon, &["allow", name]), format!("{name} is taken when it is seen next.\n"));
    fleet.wait_all_provisioned(within(SOON)).expect("it is provisioned");
}

#[test]
fn nodes_are_listed_with_filter_and_order() {
    let broker = NatsServer::start();
    let fleet = Fleet::builder(&broker.url())
        .nodes(3)
        .broken("full-disk.example.net", Fault::ConfigureRefused)
        .start();
    let daemon = builder(&broker).start();
    fleet.wait_all_provisioned(within(SOON)).expect("provisioned");
    let of = |arguments: &[&str]| say_json(&daemon, arguments)["matching"].clone();
    wait_until(SOON, "three settle, one is stuck", || {
        of(&["nodes", "--state", "settling"]) == 3 && of(&["nodes", "--state", "stuck"]) == 1
    });
    assert_eq!(of(&["nodes", "n1."]), 1);
    let said = say(&daemon, &["nodes", "--sort", "failures", "--limit", "1"]);
    let lines: Vec<&str> = said.lines().collect();
    assert!(lines[0].starts_with("NODE ") && lines[0].ends_with(" WHY"), "{said}");
    assert!(lines[1].starts_with("full-disk.example.net  waiting"), "{said}");
    assert!(lines[1].contains("configuration failed"), "{said}");
    assert_eq!(lines[2], "The first 1 of 4.");
    // Nobody is no error.
    assert_eq!(say(&daemon, &["nodes", "zzz"]), "No node with \"zzz\" in its name is known.\n");
    assert_eq!(say(&daemon, &["nodes", "--state=denied"]), "No node is denied.\n");
    assert_eq!(of(&["nodes", "--state", "all"]), 4);
    let too_many = fail(&run(&daemon, &["nodes", "--limit", "10001"]));
    assert_eq!(too_many.0, Some(2));
    let expected = "--limit: found 10001, wanted a number from 1 to 10000";
    assert!(too_many.1.starts_with(expected), "{too_many:?}");
}

#[test]
fn the_socket_is_found_by_the_configuration_and_its_absence_has_exit_codes() {
    let broker = NatsServer::start();
    let mut daemon = builder(&broker).start();
    let config = daemon.dir().join("choria-provisioner.yaml");
    let status = |config: &PathBuf| program().arg("status").arg("--config").arg(config).output();
    let output = status(&config).expect("it can be started");
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    let socket = daemon.dir().join("admin.sock");
    daemon.stop();
    assert!(!socket.exists(), "it goes with the daemon");
    let (code, error) = fail(&status(&config).expect("it can be started"));
    assert_eq!(code, Some(75));
    let expected = format!("no daemon answers on {}: No such file", socket.display());
    assert!(error.starts_with(&expected), "{error}");
    assert!(!error.contains("names another one"), "{error}");
    let (code, error) = fail(&program().arg("status").output().expect("it can be started"));
    assert_eq!(code, Some(75), "{error}");
    assert!(error.contains("--config or --socket names another one"), "{error}");
    let folder = TempDir::new("socket");
    let off = folder.write("off.yaml", "helper: /bin/true\nadmin_socket: ''\n");
    let (code, error) = fail(&status(&off).expect("it can be started"));
    assert_eq!(
        (code, error.as_str()),
        (Some(78), "the daemon has no admin socket: admin_socket is empty")
    );
    let (code, _) = fail(&status(&folder.path().join("none.yaml")).expect("it can be started"));
    assert_eq!(code, Some(78));
    let (code, _) = fail(&program().args(["deny"]).output().expect("it can be started"));
    assert_eq!(code, Some(2));
}

#[test]
fn a_daemon_that_breaks_off_or_talks_nonsense_is_an_error() {
    let folder = TempDir::new("socket");
    let path = folder.path().join("admin.sock");
    let listener = UnixListener::bind(&path).expect("the folder is ours");
    let answers = [
        &b"{\"ok\":true"[..],
        b"what?\n",
        b"{\"ok\":true,\"result\":7}\n",
        b"{\"ok\":false,\"error\":\"\\u001b[2J\"}\n",
    ];
    let count = answers.len();
    let daemon = thread::spawn(move || {
        for answer in answers {
            let (mut stream, _) = listener.accept().expect("somebody asks");
            let mut line = String::new();
            BufReader::new(&stream).read_line(&mut line).expect("there is a line");
            stream.write_all(answer).expect("it is taken");
        }
    });
    let ask =
        || program().args(["status", "--socket"]).arg(&path).output().expect("it can be started");
    let errors: Vec<_> = (0..count).map(|_| fail(&ask())).collect();
    daemon.join().expect("all have asked");
    assert!(errors.iter().all(|(code, _)| *code == Some(1)), "{errors:?}");
    assert!(errors[0].1.starts_with("the daemon gave no whole answer"), "{errors:?}");
    assert!(errors[1].1.starts_with("the daemon's answer makes no sense"), "{errors:?}");
    assert!(errors[2].1.starts_with("the daemon's answer makes no sense"), "{errors:?}");
    assert_eq!(errors[3].1, "\\u{1b}[2J", "a terminal must not be steered");
}

#[test]
fn hung_clients_hold_up_neither_the_daemon_nor_its_end() {
    let broker = NatsServer::start();
    let mut daemon = builder(&broker).start();
    let socket = daemon.dir().join("admin.sock");
    let mode = fs::metadata(&socket).expect("it is there").permissions().mode();
    assert_eq!(mode & 0o777, 0o660, "no stranger may open it");
    // One silent, one in the middle of a line, and those that never read what they ask for.
    let mut clients: Vec<UnixStream> =
        (0..7).map(|_| UnixStream::connect(&socket).expect("it is open")).collect();
    clients[1].write_all(b"{").expect("it is taken");
    for client in &mut clients[2..] {
        client
            .write_all("{\"command\":\"status\"}\n".repeat(2_000).as_bytes())
            .expect("it is taken");
    }
    // The first bytes are there: they are being answered.
    let mut byte = [0];
    clients[2].read_exact(&mut byte).expect("an answer begins");
    let fleet = Fleet::builder(&broker.url()).nodes(5).start();
    fleet.wait_all_provisioned(within(SOON)).expect("provisioned");
    assert_eq!(say_json(&daemon, &["status"])["state"], "provisioning");
    assert!(daemon.stop().success());
    assert!(!socket.exists());
}

#[test]
fn the_socket_of_a_live_daemon_is_not_taken_and_that_of_a_dead_one_is() {
    let broker = NatsServer::start();
    let daemon = builder(&broker).start();
    let socket = daemon.dir().join("admin.sock");
    let other = Daemon::builder(&broker.address()).set("admin_socket", socket.display());
    let (code, log) = other.run_to_its_end();
    assert_eq!(code, 1, "{log}");
    assert!(log.contains("another process listens there"), "{log}");
    let kept = TempDir::new("socket");
    let stale = kept.path().join("admin.sock");
    drop(UnixListener::bind(&stale).expect("the folder is ours"));
    let third = Daemon::builder(&broker.address()).set("admin_socket", stale.display()).start();
    let output = program().args(["status", "--socket"]).arg(&stale).output().expect("it starts");
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    drop(third);
    drop(daemon);
}

#[test]
fn each_attempt_is_a_line_of_the_audit_log_also_after_that_was_rotated() {
    let broker = NatsServer::start();
    let fleet = Fleet::builder(&broker.url())
        .nodes(2)
        .pki()
        .broken("full-disk.example.net", Fault::ConfigureRefused)
        .start();
    let builder = Daemon::builder(&broker.address()).feature("pki", "true");
    let (path, old) = (builder.dir().join("audit.log"), builder.dir().join("audit.log.1"));
    let mut daemon = builder.set("audit_log", path.display()).start();
    let lines = |path: &PathBuf| -> Vec<Value> {
        let text = fs::read_to_string(path).unwrap_or_default();
        text.lines().map(|line| serde_json::from_str(line).expect("each line is whole")).collect()
    };
    fleet.wait_all_provisioned(within(SOON)).expect("provisioned");
    let count = |path: &PathBuf, outcome: &str| {
        lines(path).iter().filter(|line| line["outcome"] == outcome).count()
    };
    wait_until(SOON, "all are written", || {
        count(&path, "provisioned") == 2 && count(&path, "failed") >= 1
    });
    let written = lines(&path);
    let good = written.iter().find(|line| line["outcome"] == "provisioned").expect("it is there");
    let node = good["node"].as_str().expect("a name");
    assert_eq!((&good["reason"], &good["attempt"]), (&json!(""), &json!(1)));
    assert_eq!(good["csr_subject"], format!("CN={node}"));
    assert_eq!(good["config_sha256"].as_str().map(str::len), Some(64));
    assert_ne!((&good["version"], &good["jwt_id"]), (&json!(""), &json!("")));
    let steps = good["steps"].as_object().expect("steps");
    for step in ["jwt", "inventory", "gencsr", "helper", "configure", "restart"] {
        assert!(steps[step].is_number(), "{good}");
    }
    let bad = written.iter().find(|line| line["node"] == "full-disk.example.net").expect("a line");
    assert!(bad["reason"].as_str().is_some_and(|why| why.contains("no space left")), "{bad}");
    assert!(!fs::read_to_string(&path).expect("it is ours").contains("s3cret"));

    fs::rename(&path, &old).expect("the folder is ours");
    daemon.signal(rustix::process::Signal::USR2);
    wait_until(SOON, "it is there again", || path.exists());
    let more = Fleet::builder(&broker.url()).node("late.example.net").pki().start();
    more.wait_all_provisioned(within(SOON)).expect("provisioned");
    assert!(daemon.stop().success());
    assert_eq!(count(&path, "provisioned"), 1, "written before the end");
    assert_eq!(count(&old, "provisioned"), 2);
}

#[test]
fn an_audit_log_that_cannot_be_opened_is_no_start_and_a_full_one_keeps_nobody_waiting() {
    let broker = NatsServer::start();
    let wrong = Daemon::builder(&broker.address()).set("audit_log", "/nowhere/audit.log");
    let (code, log) = wrong.run_to_its_end();
    assert_eq!(code, 78, "{log}");
    assert!(log.contains("audit_log: cannot open /nowhere/audit.log"), "{log}");
    let fleet = Fleet::builder(&broker.url()).nodes(3).start();
    let daemon = Daemon::builder(&broker.address()).set("audit_log", "/dev/full").start();
    fleet.wait_all_provisioned(within(SOON)).expect("provisioned");
    wait_until(SOON, "the loss is counted", || daemon.metric("audit_lines_lost_total") >= 3.0);
    daemon.wait_logged(SOON, &["Cannot write to audit log /dev/full", "No space left"]);
}
