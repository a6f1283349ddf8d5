//! Helpers that say nothing, too much, half of it, never end, or leave others behind.

mod common;
mod fleet;

use common::{Daemon, NatsServer, SOON, processes_in, wait_until, within};
use fleet::Fleet;

/// One helper for all cases: the first word of the node's name says how it behaves.
const HELPER: &str = r#"#!/bin/sh
answer='{"configuration":{"plugin.choria.server.provision":"0"}}'
IFS= read -r input
identity=${input#*'"identity":"'}
identity=${identity%%'"'*}
case $identity in
nothing.*) ;;
fails.*) echo "the database is down" >&2; exit 3 ;;
killed.*) kill -9 $$ ;;
half.*) printf '{"configuration":{"plugin.choria' ;;
twice.*) echo "$answer"; echo "$answer" ;;
number.*) echo '{"configuration":{"plugin.choria.server.provision":0}}' ;;
list.*) echo '[]' ;;
empty.*) echo '{"configuration":{}}' ;;
huge.*) head -c 10000000 /dev/zero | tr '\0' x ;;
huge-stderr.*) head -c 10000000 /dev/zero | tr '\0' x >&2; echo "$answer" ;;
never.*) exec sleep 30 ;;
stubborn.*) trap '' TERM INT HUP; while :; do sleep 30; done ;;
grandchild.*) echo "$answer"; sleep 30 & ;;
escaped.*) echo "$answer"; setsid sleep 30 & ;;
escaped-first.*) setsid sh -c 'sleep 30' & exec sleep 30 ;;
*) echo "$answer" ;;
esac
"#;

#[test]
fn a_misbehaving_helper_costs_its_node_and_no_other() {
    // What the node is called, and what the log says of it.
    let failing = [
        ("nothing", "zero bytes"),
        ("fails", "exit status 3"),
        ("fails", "the database is down"),
        ("killed", "signal"),
        ("half", "cannot decode output"),
        ("twice", "cannot decode output"),
        ("number", "cannot decode output"),
        ("list", "cannot decode output"),
        ("empty", "empty configuration"),
        ("huge", "bytes"),
        ("never", "time limit"),
        ("stubborn", "time limit"),
        ("escaped-first", "time limit"),
    ];
    let working = ["good-1", "huge-stderr", "good-2"];
    // The answer was complete, so it may be used; it was late, so it may be refused.
    let either = ["grandchild", "escaped"];

    let broker = NatsServer::start();
    let mut builder = Fleet::builder(&broker.url());
    let mut names: Vec<&str> = failing.iter().map(|(name, _)| *name).collect();
    names.dedup();
    for name in names.iter().chain(&working).chain(&either) {
        builder = builder.node(&format!("{name}.example.net"));
    }
    let fleet = builder.start();
    let mut daemon =
        Daemon::builder(&broker.address()).helper(HELPER).set("helper_timeout", "1s").start();

    for name in working {
        let node = fleet.named(&format!("{name}.example.net"));
        wait_until(SOON, &format!("{name} is provisioned"), || node.is_provisioned());
    }
    for (name, reason) in failing {
        let node = format!("{name}.example.net");
        daemon.wait_logged(SOON, &["Could not provision", &node, reason]);
        assert_eq!(fleet.named(&node).times_configured(), 0, "{name}");
    }
    for name in either {
        let name = format!("{name}.example.net");
        wait_until(SOON, &format!("{name} has an outcome"), || {
            fleet.named(&name).is_provisioned() || daemon.logged(&[&name, "Could not provision"])
        });
    }
    wait_until(SOON, "failures are counted", || daemon.metric("helper_errors") >= 11.0);
    // A fault of the helper is no fault of the node: it is tried again, with the interval as its wait.
    let again = Fleet::builder(&broker.url()).node("late.example.net").start();
    again.wait_all_provisioned(within(SOON)).expect("a good node that comes later is provisioned");
    assert_eq!(fleet.violations(), [""; 0]);
    daemon.assert_alive();
    assert!(daemon.stop().success());
    // Whatever stayed in its helper's process group was killed with it.
    wait_until(SOON, "no process of a helper's group is left", || survivors(&daemon).is_empty());
    // The others are this test's own to end.
    let dir = daemon.dir().to_owned();
    drop(daemon);
    wait_until(SOON, "no process is left", || processes_in(&dir).is_empty());
}

#[test]
fn a_helper_sees_the_node_and_none_of_our_secrets() {
    let broker = NatsServer::start();
    let fleet = Fleet::builder(&broker.url())
        .nodes(1)
        .facts(r#"{"big":12345678901234567890}"#)
        .pki()
        .start();
    let daemon = Daemon::builder(&broker.address())
        .feature("pki", "true")
        .set("broker_provisioning_password", "pa55")
        .env("NOTIFY_SOCKET", "/nowhere");
    let dir = daemon.dir().display().to_string();
    let daemon = daemon
        .helper(&format!(
            "#!/bin/sh\ncat > {dir}/input\nenv > {dir}/environment\necho '{{\"configuration\":{{\"plugin.choria.server.provision\":\"0\"}}}}'\n"
        ))
        .start();
    fleet.wait_all_provisioned(within(SOON)).expect("provisioned");
    let read =
        |name: &str| std::fs::read_to_string(daemon.dir().join(name)).expect("the helper wrote it");
    let input: serde_json::Value = serde_json::from_str(&read("input")).expect("one JSON object");
    assert_eq!(input["identity"], "n0.fleet.example.net");
    assert_eq!(input["ed25519_pubkey"], serde_json::Value::Null);
    assert_eq!(input["csr"]["ssldir"], "/etc/choria/ssl");
    assert_eq!(input["jwt"]["purpose"], "choria_provisioning");
    let inventory = input["inventory"].as_str().expect("a text");
    assert!(inventory.contains("12345678901234567890"), "{inventory}");
    let environment = read("environment");
    assert!(!environment.contains("NOTIFY_SOCKET"), "{environment}");
    assert!(!environment.contains("pa55"), "{environment}");
}

/// Processes that the daemon's helpers left behind in their process groups: they work in its folder.
///
/// What called `setsid`, and so left for another session, did so on purpose and doesn't count.
fn survivors(daemon: &Daemon) -> Vec<String> {
    // The fields after the name are state, parent, group and session.
    let session = |stat: &str| {
        let fields = stat.rsplit_once(") ").map(|(_, fields)| fields);
        fields.and_then(|fields| fields.split(' ').nth(3)).map(str::to_owned)
    };
    let stat = |process: &str| {
        std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default()
    };
    let ours = session(&stat("self"));
    let processes = processes_in(daemon.dir()).into_iter();
    processes
        .map(|process| stat(&process.to_string()))
        .filter(|stat| session(stat) == ours)
        .collect()
}
