//! `try` shows what the real run then sends, keeps secrets to itself, and leaves the node as it is.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;
mod fleet;

use std::fs;
use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::thread;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use openssl::x509::X509;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use common::admin::{say, with_socket};
use common::{
    Builder, Daemon, NatsServer, SOON, TempDir, free_port, wait_until, waiting_helper, within,
};
use fleet::issuer::Organization;
use fleet::network::{Network, PASSWORD, Setup};
use fleet::{Action, Fault, Fleet, Received, View};

const NODE: &str = "n0.fleet.example.net";

/// What only its receiver may see.
const SECRETS: &str = r#"#!/bin/sh
cat >/dev/null
echo "looking it up" >&2
cat <<ANSWER
{
  "configuration": {
    "identity": "n0.fleet.example.net", "plugin.choria.server.provision": "0", "plugin.nats.pass": "p4ssw0rd",
    "plugin.site.url": "https://u:s3cret@x.example.net/"
  },
  "action_policies": {"site.policy": "policy default deny\n"},
  "opa_policies": {"site.rego": "package site\n"}
}
ANSWER
"#;

#[test]
fn shows_what_the_real_run_then_sends() {
    let broker = NatsServer::start();
    let fleet = Fleet::builder(&broker.url()).nodes(1).start();
    let builder = Daemon::builder(&broker.address()).helper(SECRETS);
    let shown = try_it(&builder, &fleet);
    let received = provision(builder, &fleet);
    assert_eq!(shown["would"], "configure");
    assert_eq!(shown["remarks"], json!([]));
    let data = &shown["requests"][0]["data"];
    let mut settings = json!(received.configuration);
    assert_eq!(settings["plugin.nats.pass"], "p4ssw0rd", "the node gets it");
    settings["plugin.nats.pass"] = "***".into();
    settings["plugin.site.url"] = "https://u:***@x.example.net/".into();
    assert_eq!(data["config"], settings);
    assert_eq!(data["action_policies"], json!(received.action_policies));
    assert_eq!(data["opa_policies"], json!(received.opa_policies));
    assert_eq!((&data["token"], &data["server_jwt"]), (&json!("***"), &json!("")));
    let restart = json!({"action": "restart", "data": {"splay": 1, "token": "***"}});
    assert_eq!(shown["requests"][1], restart);
}

#[test]
fn shows_the_server_jwt_of_an_organization() {
    let dir = TempDir::new("issuer");
    let network = Network::create(dir.path(), Setup::Issuer).unwrap();
    let broker = NatsServer::configured(&network.broker());
    let fleet = network.fleet(&broker.url()).nodes(1).start();
    let builder = Daemon::builder(&broker.address())
        .network(&network)
        .set("helper", sample("issuer.py", &network.organization.public_key()));
    let shown = try_it(&builder, &fleet);
    for secret in ["signer.seed", "signer.jwt"] {
        let secret = fs::read_to_string(network.path(secret)).unwrap();
        assert!(!shown.to_string().contains(&secret));
    }
    let received = provision(builder, &fleet);
    let data = &shown["requests"][0]["data"];
    assert_eq!(data["config"], json!(received.configuration));
    assert!(remarks(&shown).contains("an Ed25519 key of ours"), "{shown}");

    let (mut shown, mut sent) = (data["server_jwt"].clone(), claims(&received.server_jwt));
    for claims in [&mut shown, &mut sent] {
        let claims = claims.as_object_mut().unwrap();
        // Made anew each time, or for the node's own key.
        for anew in ["exp", "iat", "nbf", "jti", "public_key", "tcs"] {
            claims.remove(anew);
        }
    }
    assert_eq!(shown, sent);
    assert_eq!(shown["identity"], NODE);
}

#[test]
fn shows_the_certificate_that_the_sites_authority_makes() {
    let dir = TempDir::new("x509");
    let network = Network::create(dir.path(), Setup::X509).unwrap();
    let broker = NatsServer::configured(&network.broker());
    let fleet = network.fleet(&broker.url()).nodes(1).start();
    let ca = TempDir::new("ca");
    fs::copy(network.path("ca.pem"), ca.path().join("ca.pem")).unwrap();
    fs::copy(network.path("ca.key"), ca.path().join("ca.key")).unwrap();
    let helper = sample("x509.py", &ca.path().display().to_string());
    let builder = Daemon::builder(&broker.address()).network(&network).set("helper", helper);
    let shown = try_it(&builder, &fleet);
    let received = provision(builder, &fleet);
    let data = &shown["requests"][0]["data"];
    assert_eq!(data["config"], json!(received.configuration));
    assert_eq!(data["ca"], received.ca);
    assert!(remarks(&shown).contains("a certificate request of ours"), "{shown}");
    let subject = |pem: &str| {
        let certificate = X509::from_pem(pem.as_bytes()).unwrap();
        format!("{:?}", certificate.subject_name())
    };
    assert_eq!(subject(data["certificate"].as_str().unwrap()), subject(&received.certificate));
    assert!(!shown.to_string().contains(PASSWORD));
}

#[test]
fn shows_what_else_a_helper_may_wish() {
    let broker = NatsServer::start();
    let fleet = Fleet::builder(&broker.url()).version("0.29.4").upgradable().nodes(1).start();
    let builder = Daemon::builder(&broker.address())
        .feature("upgrades", "true")
        .set("upgrades_repository", "https://repo.example.net/choria");
    let wishes = |answer: &str| {
        let helper = format!("#!/bin/sh\ncat >/dev/null\ncat <<'ANSWER'\n{answer}\nANSWER\n");
        fs::write(builder.dir().join("helper"), helper).unwrap();
        try_it(&builder, &fleet)
    };
    let shown = wishes(r#"{"defer": true, "msg": "no \u001b ticket"}"#);
    assert_eq!((&shown["would"], &shown["reason"]), (&json!("defer"), &json!("no \u{1b} ticket")));
    assert_eq!(shown["requests"], json!([]));
    let shown = wishes(r#"{"shutdown": true, "msg": "sold"}"#);
    let request = json!([{"action": "shutdown", "data": {"token": "***"}}]);
    assert_eq!((&shown["would"], &shown["requests"]), (&json!("shut_down"), &request));
    let shown = wishes(
        r#"{"upgrade": "0.30.2", "configuration": {"plugin.choria.server.provision": "0"}}"#,
    );
    assert_eq!(
        (&shown["would"], &shown["reason"]),
        (&json!("upgrade"), &json!("0.29.4 to 0.30.2"))
    );
    let repository = "https://repo.example.net/choria";
    assert_eq!(
        shown["requests"],
        json!([{"action": "release_update", "data": {"repository": repository, "token": "***", "version": "0.30.2"}}])
    );
    // What would hurt is said as it is when it does.
    let shown = wishes(r#"{"configuration": {"identity": "other"}}"#);
    assert_eq!(shown["would"], "configure");
    for part in ["plugin.choria.server.provision", "identity"] {
        assert!(remarks(&shown).contains(part), "{shown}");
    }
}

#[test]
fn says_why_an_attempt_would_fail() {
    let broker = NatsServer::start();
    let fleet = Fleet::builder(&broker.url()).nodes(1).start();
    let builder = Daemon::builder(&broker.address());
    let fails = |builder: &Builder, node: &str, expected: &str| {
        let (code, shown) = run(builder, &[node]);
        assert_eq!((code, &shown["would"]), (1, &json!("fail")), "{shown}");
        let reason = shown["reason"].as_str().unwrap();
        assert!(reason.contains(expected), "{reason}");
    };
    fails(&builder, "nobody.example.net", "nobody listens on the node's subject");
    let (_, shown) = run(&builder, &["nobody.example.net"]);
    assert!(remarks(&shown).contains("No node of this name waits to be provisioned"), "{shown}");
    let wrong_token = Daemon::builder(&broker.address()).set("token", "another");
    fails(&wrong_token, NODE, "Incorrect provision token supplied");
    let (_, shown) = run(&wrong_token, &[NODE]);
    assert!(remarks(&shown).contains("must be the claim `cht`"), "{shown}");
    let other_key =
        Daemon::builder(&broker.address()).set("jwt_verify_cert", Organization::new().public_key());
    fails(&other_key, NODE, "could not validate JWT");
    let (_, shown) = run(&other_key, &[NODE]);
    assert!(remarks(&shown).contains("`jwt_verify_cert` must be of whoever signed"), "{shown}");
    let script = "#!/bin/sh\ncat >/dev/null\necho no database >&2\nexit 3\n";
    let broken = Daemon::builder(&broker.address()).helper(script);
    fails(&broken, NODE, "last line on stderr: no database");
    let hangs = Daemon::builder(&broker.address()).helper("#!/bin/sh\nsleep 1000\n");
    fails(&hangs.set("helper_timeout", "100ms"), NODE, "at its time limit");
    let bad = r#"#!/bin/sh
cat >/dev/null
echo '{"configuration":{"a=b":"c"}}'
"#;
    fails(&Daemon::builder(&broker.address()).helper(bad), NODE, "configuration failed: ");
    untouched(&fleet.node(0));
}

#[test]
fn a_set_up_that_does_not_work_has_the_exit_codes_of_the_daemon() {
    let closed = format!("127.0.0.1:{}", free_port());
    let ends = |builder: &Builder, arguments: &[&str], code: i32, expected: &str| {
        let output = output(builder, arguments);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(code), "{said}");
        assert!(output.stdout.is_empty() && said.contains(expected), "{said}");
    };
    let builder = Daemon::builder(&closed);
    ends(&builder, &[NODE], 75, "Connection refused");
    ends(&builder, &[], 2, "");
    for name in ["n*.example.net", "a.>", "", "a b", "n\u{1b}"] {
        ends(&builder, &[name], 2, "is no node's name");
    }
    ends(&builder, &[NODE, "--helper=/nowhere"], 78, "--helper: cannot find helper /nowhere");
    ends(&Daemon::builder(&closed).set("workers", "many"), &[NODE], 78, "workers: found");
    // Its own helper need not be there for another to be tried.
    let absent = Daemon::builder(&closed).set("helper", "/nowhere");
    ends(&absent, &[NODE], 78, "helper: cannot find");
    ends(&absent, &[NODE, "--helper=/bin/true"], 75, "Connection refused");

    let dir = TempDir::new("x509");
    let network = Network::create(dir.path(), Setup::X509).unwrap();
    let broker = NatsServer::configured(&network.broker());
    let builder = Daemon::builder(&broker.address()).network(&network);
    let wrong = builder.set("broker_provisioning_password", "wrong");
    ends(&wrong, &[NODE], 78, "Authorization Violation");
}

#[test]
fn another_helper_is_tried_beside_the_daemon() {
    let broker = NatsServer::start();
    let fleet = Fleet::builder(&broker.url()).nodes(1).start();
    let builder = Daemon::builder(&broker.address())
        .set("interval", "1m")
        .helper("#!/bin/sh\ncat >/dev/null\necho '{\"defer\":true,\"msg\":\"not yet\"}'\n");
    let other = TempDir::new("helper");
    let other = other.write_program("other", SECRETS).display().to_string();
    let socket = builder.dir().join("admin.sock").display().to_string();
    let builder = builder.set("admin_socket", &socket);
    let (config, client) = builder.write_files();
    let mut daemon = builder.start();
    wait_until(SOON, "it is left alone", || {
        daemon.metrics().with("outcomes_total", "deferred") > 0.0
    });
    let output = Command::new(env!("CARGO_BIN_EXE_choria-provisioner"))
        .args(["try", NODE, "--helper", &other, "--config"])
        .arg(&config)
        .arg("--choria-config")
        .arg(&client)
        .env("MCOLLECTIVE_CERTNAME", "provisioner.example.net")
        .output()
        .unwrap();
    let (said, log) = (text(&output.stdout), text(&output.stderr));
    assert_eq!(output.status.code(), Some(0), "{said}{log}");
    assert!(
        said.starts_with("n0.fleet.example.net would be configured and restarted.\n"),
        "{said}"
    );
    assert!(said.contains("\n    plugin.nats.pass = ***\n"), "{said}");
    assert!(said.ends_with("\nNothing was sent.\n"), "{said}");
    // What a helper writes to standard error is the first thing its author looks for.
    assert!(log.contains("looking it up"), "{log}");
    for part in [
        "the daemon tries it when it is seen next",
        "connecting to ",
        "asking n0.fleet.example.net for its inventory (6.0 s at most)",
        "asking it for its provisioning JWT (",
        &format!("running the helper {other} (10 s at most)"),
    ] {
        assert!(log.contains(part), "{part}: {log}");
    }
    for secret in ["p4ssw0rd", "s3cret"] {
        assert!(!said.contains(secret) && !log.contains(secret), "{said}{log}");
    }
    daemon.assert_alive();
    untouched(&fleet.node(0));
    assert_eq!(fleet.violations(), [""; 0]);
}

#[test]
fn a_node_that_the_daemon_is_at_work_on_is_left_alone() {
    let broker = NatsServer::start();
    let fleet = Fleet::builder(&broker.url()).nodes(1).start();
    let builder = Daemon::builder(&broker.address()).set("interval", "1m");
    let go_on = builder.dir().join("go-on");
    let socket = builder.dir().join("admin.sock").display().to_string();
    let builder = builder.set("admin_socket", &socket).helper(&format!(
        "#!/bin/sh\ncat >/dev/null\nuntil [ -e {} ]; do sleep 0.05; done\n\
         echo '{{\"configuration\":{{\"plugin.choria.server.provision\":\"0\"}}}}'\n",
        go_on.display()
    ));
    let mut again = builder.command("try");
    let daemon = builder.start();
    wait_until(SOON, "it is in work", || daemon.metric("busy_workers") > 0.0);
    let output = again.arg(NODE).output().unwrap();
    let said = text(&output.stderr);
    assert!(
        output.status.code() == Some(1) && said.contains("the daemon is at work on it"),
        "{said}"
    );
    fs::write(go_on, "").unwrap();
    fleet.wait_all_provisioned(within(SOON)).unwrap();
    assert_eq!(fleet.node(0).times_asked(Action::Jwt), 1);
}

#[test]
fn a_node_that_the_daemon_has_just_served_is_not_asked_and_one_that_it_leaves_alone_is() {
    let broker = NatsServer::start();
    let fleet = Fleet::builder(&broker.url()).nodes(1).start();
    let builder = with_socket(Daemon::builder(&broker.address()).set("interval", "1m"));
    let (mut again, mut denied) = (builder.command("try"), builder.command("try"));
    let mut as_json = builder.command("try");
    let daemon = builder.start();
    fleet.wait_all_provisioned(within(SOON)).unwrap();
    wait_until(SOON, "the daemon knows", || daemon.metric("settling_nodes") > 0.0);
    let output = again.arg(NODE).output().unwrap();
    let said = text(&output.stderr);
    assert_eq!((output.status.code(), text(&output.stdout).as_str()), (Some(1), ""), "{said}");
    assert!(said.contains("there is nothing to try: the daemon provisioned it "), "{said}");
    assert!(
        said.contains(" and it restarts; unless it comes back it is left alone for "),
        "{said}"
    );
    let output = as_json.args([NODE, "--json"]).output().unwrap();
    let shown: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((output.status.code(), &shown["would"]), (Some(1), &json!("unknown")), "{shown}");
    assert!(shown["reason"].as_str().unwrap().starts_with("there is nothing to try: "), "{shown}");

    let other = Fleet::builder(&broker.url()).node("other.example.net").start_quietly();
    say(&daemon, &["deny", "other.example.net"]);
    let output = denied.args(["other.example.net", "--json"]).output().unwrap();
    let shown: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(shown["would"], "configure");
    let standing = shown["daemon"].as_str().unwrap();
    assert!(standing.starts_with("leaves it alone, since an operator denied it "), "{standing}");
    untouched(&other.node(0));
}

#[test]
fn a_silent_node_is_given_up_as_the_daemon_does_and_whoever_waits_is_told_for_what() {
    let broker = NatsServer::start();
    let fleet = Fleet::builder(&broker.url())
        .broken("silent.example.net", Fault::Silent)
        .broken("slow.example.net", Fault::SilentFrom(Action::Jwt))
        .start();
    let builder = Daemon::builder(&broker.address()).set("probe_timeout", "200ms");
    let shows = |arguments: &[&str], steps: &[&str]| {
        let output = output(&builder, &[arguments, &["--json"]].concat());
        let log = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{log}");
        for step in steps {
            assert!(log.contains(step), "{step}: {log}");
        }
        serde_json::from_slice::<Value>(&output.stdout).unwrap()
    };
    let shown = shows(
        &["silent.example.net"],
        &["asking silent.example.net for its inventory (0.4 s at most)"],
    );
    assert_eq!(shown["reason"], "no answer to the inventory request, asked twice");
    assert!(
        remarks(&shown).contains("Somebody listens on its subject and says nothing"),
        "{shown}"
    );
    assert_eq!(fleet.named("silent.example.net").times_asked(Action::Jwt), 0);
    // The daemon would have waited for longer.
    let patient = Daemon::builder(&broker.address()).set("probe_timeout", "10s");
    let (_, shown) = run(&patient, &["silent.example.net", "--timeout=2s"]);
    assert!(remarks(&shown).contains("That was all the time there was, 2.0 s: "), "{shown}");
    // It answers the first request, so there is hope.
    let jwt = "asking it for its provisioning JWT (";
    let shown = shows(&["slow.example.net", "--timeout", "2s"], &[jwt]);
    assert!(shown["reason"].as_str().unwrap().contains("the node's time was up"), "{shown}");
    assert!(
        remarks(&shown).contains("That was all the time there was, 2.0 s: --timeout gives"),
        "{shown}"
    );
}

#[test]
fn an_interrupt_is_no_verdict_about_the_node() {
    let broker = NatsServer::start();
    let fleet = Fleet::builder(&broker.url()).nodes(1).start();
    for (signal, code) in [(Signal::INT, 130), (Signal::TERM, 143)] {
        let builder = Daemon::builder(&broker.address());
        let (begun, go_on) = (builder.dir().join("begun"), builder.dir().join("go-on"));
        let builder = builder.helper(&waiting_helper(&begun, &go_on));
        let mut command = builder.command("try");
        command.args([NODE, "--json"]).stdout(Stdio::piped()).stderr(Stdio::piped());
        let child = command.spawn().unwrap();
        wait_until(SOON, "the helper runs", || begun.exists());
        let pid = Pid::from_child(&child);
        kill_process(pid, signal).unwrap();
        let output = child.wait_with_output().unwrap();
        let said = text(&output.stderr);
        assert_eq!(
            (output.status.code(), text(&output.stdout).as_str()),
            (Some(code), ""),
            "{said}"
        );
        let expected = format!("interrupted: what would be done to {NODE} is not known\n");
        assert!(said.ends_with(&expected), "{said}");
    }
    untouched(&fleet.node(0));
}

#[test]
fn an_answer_that_says_nothing_has_one_fault() {
    let broker = NatsServer::start();
    let fleet = Fleet::builder(&broker.url()).nodes(1).start();
    let (code, shown) = run(&Daemon::builder(&broker.address()), &[NODE, "--helper", "echo {}"]);
    assert_eq!((code, &shown["would"]), (1, &json!("fail")));
    let reason = shown["reason"].as_str().unwrap();
    assert!(
        reason.contains("empty configuration: answer with all settings of the node"),
        "{reason}"
    );
    assert_eq!(shown["remarks"], json!([]));
    untouched(&fleet.node(0));
}

#[test]
fn a_daemon_that_does_not_say_what_it_is_at_work_on_is_not_disturbed() {
    let closed = format!("127.0.0.1:{}", free_port());
    let builder = Daemon::builder(&closed);
    let socket = builder.dir().join("admin.sock");
    let daemon = UnixListener::bind(&socket).unwrap();
    let builder = builder.set("admin_socket", socket.display());
    let hangs = self::output(&builder, &[NODE, "--timeout", "1s"]);
    let said = text(&hangs.stderr);
    assert!(hangs.status.code() == Some(1) && said.contains("it took more than 1.0 s"), "{said}");
    let refusing = thread::spawn(move || {
        // The one before waits there still.
        drop(daemon.accept().unwrap());
        let (mut stream, _) = daemon.accept().unwrap();
        stream.write_all(b"{\"ok\":false,\"error\":\"too many clients\"}\n").unwrap();
        // Until it has read that.
        stream.read_to_end(&mut Vec::new()).unwrap();
    });
    let output = output(&builder, &[NODE]);
    let said = text(&output.stderr);
    assert!(output.status.code() == Some(1) && said.contains("too many clients"), "{said}");
    refusing.join().unwrap();
    // Nobody listens there any more.
    assert_eq!(self::output(&builder, &[NODE]).status.code(), Some(75));
}

/// What would be done to the node, which stays what it is.
#[track_caller]
fn try_it(builder: &Builder, fleet: &Fleet) -> Value {
    let (code, shown) = run(builder, &[NODE]);
    assert_eq!(code, 0, "{shown}");
    assert_eq!(shown["node"], NODE);
    untouched(&fleet.node(0));
    shown
}

/// Nothing was asked for that changes it.
#[track_caller]
fn untouched(node: &View<'_>) {
    for action in Action::ALL {
        let may_be_asked = matches!(action, Action::Inventory | Action::Jwt);
        assert!(may_be_asked || node.times_asked(action) == 0, "{}", node.describe());
    }
}

fn run(builder: &Builder, arguments: &[&str]) -> (i32, Value) {
    let output = output(builder, &[arguments, &["--json"]].concat());
    let (said, log) = (text(&output.stdout), text(&output.stderr));
    let shown = serde_json::from_str(&said).unwrap_or_else(|_| panic!("{said}{log}"));
    (output.status.code().unwrap(), shown)
}

fn output(builder: &Builder, arguments: &[&str]) -> Output {
    builder.command("try").args(arguments).output().unwrap()
}

/// What the daemon then sends it.
#[track_caller]
fn provision(builder: Builder, fleet: &Fleet) -> Received {
    let daemon = builder.start();
    fleet
        .wait_all_provisioned(within(SOON))
        .unwrap_or_else(|why| panic!("{why}\n{}", daemon.log()));
    assert_eq!(fleet.violations(), [""; 0]);
    fleet.node(0).received().unwrap()
}

fn remarks(shown: &Value) -> String {
    shown["remarks"].to_string()
}

fn claims(token: &str) -> Value {
    let claims = URL_SAFE_NO_PAD.decode(token.split('.').nth(1).unwrap()).unwrap();
    serde_json::from_slice(&claims).unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// The setting for a helper in the project.
fn sample(name: &str, argument: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("dist/helpers").join(name);
    shell_words::join([path.display().to_string().as_str(), argument])
}
