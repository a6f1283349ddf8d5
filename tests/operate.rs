//! What an operator sees and can do: the status page, through the real port, of the real daemon.

mod common;
mod fleet;

use std::time::Instant;

use common::{Daemon, NatsServer, SOON, wait_until, within};
use fleet::{Fault, Fleet};
use serde_json::Value;

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
    let daemon = builder
        .helper(&format!(
            "#!/bin/sh\n: >{}\nwhile [ ! -e {} ]; do sleep 0.05; done\n\
             echo '{{\"configuration\":{{\"plugin.choria.server.provision\":\"0\"}}}}'\n",
            begun.display(),
            go_on.display()
        ))
        .start();
    wait_until(SOON, "the helper runs", || begun.exists());
    let document = status(&daemon, "?state=working");
    let worker = &document["workers"][0];
    assert_eq!(worker["node"], "n0.fleet.example.net");
    assert_eq!((&worker["step"], &worker["attempt"]), (&"helper".into(), &1.into()));
    assert!(worker["step_secs"].as_f64() <= worker["for_secs"].as_f64(), "{worker}");
    assert_eq!(document["nodes"]["nodes"][0]["state"], "working");
    assert!(page(&daemon, "").contains("<td>helper</td>"));
    std::fs::write(&go_on, "").expect("the folder is ours");
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
