//! `check` names every fault of a set-up and nothing else, says nothing about one that works, and disturbs nobody.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;
mod fleet;

use std::fs::{self, Permissions};
use std::io::Write as _;
use std::net::TcpListener;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::Duration;

use serde_json::Value;

use common::choria_broker::{Account, Site};
use common::streams::Streams;
use common::{Builder, Daemon, NatsServer, SOON, TempDir, free_port, wait_until};
use fleet::certificates::Wanted;
use fleet::network::{CERTNAME, Network, Setup, broker_of};
use fleet::streams::Member;
use fleet::{Fleet, unix_now};

const MISSING: &str = "No such file or directory";
/// A line that a broker may say first.
const INFO: &str = "INFO {\"server_id\":\"x\",\"max_payload\":1048576,\"headers\":true}\r\n";

#[test]
fn set_ups_that_work_are_no_news() {
    let broker = NatsServer::start();
    good(plain(&broker.address()));
    good(plain(&broker.address()).set("helper_mode", "persistent").helper(PERSISTENT));
    // Without a broker nothing is said of it.
    good(plain("127.0.0.1:1").argument("--offline"));
    for setup in [Setup::X509, Setup::Issuer] {
        let dir = TempDir::new("network");
        let network = Network::create(dir.path(), setup).unwrap();
        let broker = NatsServer::configured(&network.broker());
        good(plain(&broker.address()).network(&network));
        // One that looks at certificates and tokens.
        let site = Site::new(setup);
        good(calm(site.daemon()));
        assert_eq!(site.broker.login(0).account, Account::Provisioning);
    }
    let streams = Streams::start();
    streams.make_bucket(Duration::from_secs(5));
    good(elected(&streams));
}

#[test]
fn the_examples_are_no_news() {
    let dir = TempDir::new("examples");
    let dist = Path::new(env!("CARGO_MANIFEST_DIR")).join("dist");
    let yaml = fs::read_to_string(dist.join("choria-provisioner.yaml")).unwrap();
    let yaml = yaml
        .replace("helper: /etc/choria-provisioner/helper", "helper: /bin/true")
        .replace("monitor_port: 9999", &format!("monitor_port: {}", free_port()));
    let yaml = dir.write("p.yaml", &yaml);
    let client = fs::read_to_string(dist.join("choria.cfg")).unwrap();
    // Its default depends on the machine.
    let client = dir.write("c.cfg", &format!("{client}identity = p.example.net\n"));
    let mut command = program();
    command.args(["check", "--offline", "--config"]).arg(yaml);
    let output = command.arg("--choria-config").arg(client).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert_eq!((output.status.code(), &*said), (Some(0), "Nothing is wrong.\n"));
}

#[test]
fn every_fault_of_the_settings_is_named() {
    let offline = || plain("127.0.0.1:1").argument("--offline");
    // Several at once, in both files and beside them.
    let port = TcpListener::bind("127.0.0.1:0").unwrap();
    let several = offline()
        .set("workers", "many")
        .set("helper", "/nowhere/helper")
        .set("cert_deny_list", "['(']")
        .set("jwt_verify_cert", "/nowhere/key")
        .set("logfile", "/nowhere/log")
        .set("audit_log", "/nowhere/audit")
        .set("monitor_port", port.local_addr().unwrap().port())
        .set("admin_socket", "/nowhere/socket")
        .feature("pki", "true")
        .choria("ttl", "5")
        .choria("plugin.nats.credentials", "/nowhere/creds")
        .argument("--pid=/nowhere/pid");
    check(
        several,
        78,
        &[
            "workers: found the text \"many\"",
            "helper: cannot find helper /nowhere/helper",
            "cert_deny_list: \"(\" is no regular expression",
            "jwt_verify_cert: /nowhere/key is no readable file",
            "choria.cfg:3: plugin.nats.credentials: ",
            "choria.cfg:4: ttl: 5",
            "choria-provisioner.yaml:8: logfile: /nowhere/log: folder /nowhere: No such file",
            "choria-provisioner.yaml:2: audit_log: /nowhere/audit: folder /nowhere: ",
            "--pid: /nowhere/pid: folder /nowhere: ",
            "choria-provisioner.yaml:1: admin_socket: /nowhere/socket: folder /nowhere: ",
            "choria-provisioner.yaml:11: monitor_port: cannot listen on monitor port 127.0.0.1:",
        ],
    );
    check(offline().yaml("no colon"), 78, &["choria-provisioner.yaml"]);
    check(offline().yaml("token: b"), 78, &["token: "]);
    check(offline().without("helper"), 78, &["helper: must be set"]);
    let both = offline().set("active_active", "true").set("leader_election", "true");
    check(both, 78, &["active_active: "]);
    // 192.0.2.0/24 is nobody's.
    let elsewhere = offline().set("monitor_address", "192.0.2.1");
    check(elsewhere, 1, &["choria-provisioner.yaml:7: monitor_address: cannot listen on"]);
    let with_port = offline().set("monitor_address", "127.0.0.1:9100");
    check(with_port, 78, &["its port belongs to `monitor_port`"]);
    check(offline().argument("--pid=/tmp"), 78, &["--pid: /tmp: it is a directory"]);
    check(offline().set("logfile", "/dev/no/log"), 78, &["logfile: /dev/no/log: folder /dev/no: "]);
    check(offline().set("logfile", "/dev/stderr").set("audit_log", "/dev/null"), 0, &[]);
    check(offline().set("logfile", "/tmp"), 78, &["logfile: /tmp: it is a directory, and a file"]);
    check(offline().choria("plugin.choria.middleware_hosts", "a b"), 78, &["middleware_hosts: "]);
    check(
        offline().feature("ed25519", "true"),
        78,
        &["jwt_signing_key: must be set when `features.ed25519` is on"],
    );
    let long = format!("/tmp/{}", "x".repeat(120));
    check(offline().set("admin_socket", long), 78, &["no name for a socket"]);
    let taken = offline();
    let socket = taken.dir().join("socket");
    fs::write(&socket, "").unwrap();
    check(taken.set("admin_socket", socket.display()), 78, &["a file that is no socket"]);
    let linked = offline();
    let link = linked.dir().join("link");
    symlink("/nowhere/audit", &link).unwrap();
    check(linked.set("audit_log", link.display()), 78, &["link: folder /nowhere: "]);
    // Files that are none.
    let pipe = offline();
    let path = pipe.dir().join("pipe");
    assert!(Command::new("mkfifo").arg(&path).status().unwrap().success());
    let pipe = pipe.set("jwt_verify_cert", path.display()).set("helper", path.display());
    check(
        pipe,
        78,
        &[
            "is no readable file (it is a pipe, and a regular file is wanted)",
            "is not an executable file",
        ],
    );
}

/// The daemon starts with them, as the original does.
#[test]
fn a_key_for_provisioning_tokens_that_nobody_uses_is_an_error() {
    let dir = TempDir::new("unused-key");
    let client = dir.write("c.cfg", "identity = p.example.net\n");
    let key =
        concat!(env!("CARGO_MANIFEST_DIR"), "/tests/vectors/captures/insecure/jwt-signer.pem");
    let found = |features: &str| {
        let yaml = dir.write(
            "p.yaml",
            &format!("helper: /bin/true\ntoken: x\nchoria_insecure: true\nadmin_socket: ''\njwt_verify_cert: {key}\n{features}\n"),
        );
        let mut command = program();
        command.args(["check", "--offline", "--json", "--config"]).arg(yaml);
        Found::read(&command.arg("--choria-config").arg(&client).output().unwrap())
    };
    let used = found("features: {jwt: true}");
    assert_eq!((used.code, used.errors.len()), (0, 0), "{used:?}");
    let unused = "p.yaml:5: jwt_verify_cert: has no effect without `features.jwt`: nodes show no provisioning JWT, and anybody may claim to be one of them; `jwt: true` below `features:` verifies them";
    for features in
        ["", "feature: {jwt: true}", "features:\njwt: true", "features: {jwt: false, pki: true}"]
    {
        let found = found(features);
        assert_eq!((found.code, found.errors.len()), (78, 1), "{features}: {found:?}");
        assert!(found.errors[0].ends_with(unused), "{features}: {found:?}");
    }
}

#[test]
fn a_log_that_is_a_pipe_is_a_warning_and_is_not_waited_for() {
    let builder = plain("127.0.0.1:1").argument("--offline");
    let path = builder.dir().join("pipe");
    assert!(Command::new("mkfifo").arg(&path).status().unwrap().success());
    let found = Found::of(builder.set("logfile", path.display()));
    assert_eq!((found.code, found.errors.len()), (0, 0), "{found:?}");
    assert!(found.warnings.len() == 1 && found.warnings[0].contains(" is a pipe"), "{found:?}");
}

#[test]
fn files_that_depend_on_where_it_starts_or_belong_to_two_settings_are_warned_of() {
    let builder = plain("127.0.0.1:1").argument("--offline");
    let key = builder.dir().join("verify.pem");
    fs::copy(&key, builder.dir().join("key.pem")).unwrap();
    let config = builder.dir().join("choria-provisioner.yaml");
    let found = Found::of(
        builder
            .set("logfile", config.display())
            .set("audit_log", "audit.log")
            .set("admin_socket", "~/socket")
            .set("jwt_verify_cert", "./key.pem")
            .argument("--pid=audit.log"),
    );
    assert_eq!((found.code, found.errors.len()), (78, 1), "{found:?}");
    for part in [
        "yaml:2: audit_log: audit.log depends on where the daemon is started",
        "yaml:6: jwt_verify_cert: ./key.pem depends on where",
        "yaml:1: admin_socket: ~/socket: `~` stands for nothing here",
        "choria-provisioner.yaml is the file of --config, too",
        "--pid: audit.log is the file of audit_log, too",
    ] {
        let named = found.warnings.iter().filter(|text| text.contains(part)).count();
        assert_eq!(named, 1, "{part}: {found:#?}");
    }
    assert_eq!(found.warnings.len(), 5, "{found:#?}");
}

#[test]
fn every_fault_of_the_helper_is_named() {
    let offline = || plain("127.0.0.1:1").argument("--offline");
    let bad = |script: &str, expected: &str| check(offline().helper(script), 78, &[expected]);
    bad("\u{feff}#!/bin/sh\n", "begins with a byte order mark");
    // What a shell would do with its arguments nobody does.
    let builder = offline();
    let piped = format!("{} x | sort", builder.dir().join("helper").display());
    let found = Found::of(builder.set("helper", piped));
    assert_eq!((found.code, found.warnings.len()), (0, 1), "{found:?}");
    assert!(found.warnings[0].contains("since no shell is started"), "{found:?}");
    // Its place is that of the setting.
    bad("#!/nowhere/sh\n", "choria-provisioner.yaml:2: helper: /nowhere/sh, which");
    bad("#!/nowhere/python3\n", "/nowhere/python3, which the first line of ");
    bad("#!/usr/bin/env no-such-language\n", "no-such-language, which the first line of ");
    bad("#!/bin/sh\r\n", "carriage return");
    bad("echo '{}'\n", "is a text, and its first line is not one such as #!/bin/sh");
    bad("", "is empty");
    let named =
        |helper: &str, expected: &str| check(offline().set("helper", helper), 78, &[expected]);
    named("sh /nowhere/helper", "helper: cannot find /nowhere/helper, which sh is to run");
    named("A=b /bin/true", "no shell sets variables: `env A=b …` does");

    let stays = |script: &str, expected: &str| {
        check(offline().set("helper_mode", "persistent").helper(script), 1, &[expected]);
    };
    stays("#!/bin/sh\necho no database >&2\nexit 3\n", "last line on stderr: no database");
    stays("#!/bin/sh\necho ready\nexec cat\n", "wrote a line that was not asked for: ready");
    let deaf = offline().set("helper_mode", "persistent");
    let found = Found::of(deaf.helper("#!/bin/sh\nwhile :; do sleep 1000; done\n"));
    assert_eq!((found.code, found.errors.len()), (0, 0), "{found:?}");
    assert!(found.warnings[0].contains("goes on when its input has ended"), "{found:?}");

    // One that is started for each node is not started for none.
    let builder = offline();
    let trace = builder.dir().join("ran");
    good(builder.helper(&format!("#!/bin/sh\ntouch {}\n", trace.display())));
    assert!(!trace.exists());
}

#[test]
fn every_fault_of_keys_and_certificates_is_named() {
    let offline = |network: &Network| plain("127.0.0.1:1").network(network).argument("--offline");
    let dir = TempDir::new("x509");
    let network = Network::create(dir.path(), Setup::X509).unwrap();
    network.write_text("own.key", &network.authority.key_pem()).unwrap();
    network.write_text("jwt-signer.pem", "no key\n").unwrap();
    fs::remove_file(network.path("ca.pem")).unwrap();
    check(
        offline(&network),
        78,
        &["jwt_verify_cert: ", "plugin.security.file.key: ", "plugin.security.file.ca: "],
    );

    let network = Network::create(dir.path(), Setup::X509).unwrap();
    let expired = Wanted::new(CERTNAME).days(-1).rsa().signed_by(&network.authority);
    network.write("own", &expired).unwrap();
    check(offline(&network), 78, &["refuses it: certificate has expired"]);
    let strange = Wanted::new("another CA").authority().self_signed();
    network.write("own", &Wanted::new(CERTNAME).days(90).rsa().signed_by(&strange)).unwrap();
    let found = Found::of(offline(&network));
    assert_eq!((found.code, found.errors.len(), found.warnings.len()), (0, 0, 1), "{found:?}");
    assert!(found.warnings[0].contains("refuses it: unable to get local issuer"), "{found:?}");

    let dir = TempDir::new("issuer");
    let network = Network::create(dir.path(), Setup::Issuer).unwrap();
    network.write_text("signer.seed", "abc").unwrap();
    check(offline(&network), 78, &["jwt_signing_key: ", "plugin.security.choria.seed_file: "]);
    let network = Network::create(dir.path(), Setup::Issuer).unwrap();
    let over = network.organization.chain_issuer_but(unix_now(), |claims| {
        claims["exp"] = (unix_now() - 60).into();
    });
    network.write_text("signer.seed", &over.seed).unwrap();
    network.write_text("signer.jwt", &over.token).unwrap();
    check(offline(&network), 78, &["jwt_signing_token: ", "plugin.security.choria.token_file: "]);
}

#[test]
fn a_file_that_we_may_not_read_or_write_ends_with_77() {
    let dir = TempDir::new("denied");
    fs::set_permissions(dir.path(), Permissions::from_mode(0o755)).unwrap();
    let (key, log) = (dir.write("key", ""), dir.write("log", ""));
    let closed = dir.path().join("closed");
    fs::create_dir(&closed).unwrap();
    for path in [&key, &log, &closed] {
        fs::set_permissions(path, Permissions::from_mode(0o000)).unwrap();
    }
    let builder = plain("127.0.0.1:1")
        .argument("--offline")
        .argument("--json")
        .set("jwt_verify_cert", key.display())
        .set("logfile", log.display())
        .set("admin_socket", closed.join("socket").display())
        .argument(&format!("--pid={}", closed.join("pid").display()));
    let mut command = builder.command("check");
    // Root may do anything.
    if rustix::process::geteuid().is_root() {
        fs::set_permissions(builder.dir(), Permissions::from_mode(0o755)).unwrap();
        let program = dir.path().join("program");
        fs::copy(command.get_program(), &program).unwrap();
        let mut stranger = Command::new("setpriv");
        stranger.args(["--reuid=65534", "--regid=65534", "--clear-groups"]).arg(program);
        stranger.args(command.get_args());
        command = stranger;
    }
    let found = Found::read(&command.output().unwrap());
    assert_eq!(found.code, 77, "{found:?}");
    for part in ["jwt_verify_cert: ", "logfile: ", "admin_socket: ", "--pid: "] {
        let denied = |text: &&String| text.contains(part) && text.contains("ermission denied");
        assert_eq!(found.errors.iter().filter(denied).count(), 1, "{part}: {found:?}");
    }
}

#[test]
fn a_broker_out_of_reach_ends_with_75_and_one_that_is_not_ours_with_78() {
    let closed = format!("127.0.0.1:{}", free_port());
    check(plain(&closed), 75, &["Connection refused"]);
    check(
        plain("no-such-host.invalid:4222"),
        75,
        &["could not connect to nats://no-such-host.invalid"],
    );
    let silent = Answering::with("");
    check(plain(&silent.address), 75, &["it did not greet us in time"]);
    let strange = Answering::with("HTTP/1.1 400 Bad Request\r\n\r\n");
    check(plain(&strange.address), 78, &[&strange.address]);
    // It greets us, and then it says nothing any more.
    let half = Answering::with(INFO);
    check(plain(&half.address), 75, &["it did not greet us in time"]);

    let broker = NatsServer::start();
    let found = Found::of(plain(&format!("{closed},{}", broker.address())));
    assert_eq!((found.code, found.errors.len(), found.warnings.len()), (0, 0, 1), "{found:?}");
    assert!(found.warnings[0].contains("Connection refused"), "{found:?}");
    // What else is wrong weighs more, and hides nothing.
    check(
        plain(&closed).set("helper", "/nowhere").choria("ttl", "5"),
        78,
        &["ttl: 5", "cannot find helper", "Connection refused"],
    );
}

#[test]
fn a_broker_that_turns_us_away_is_named_with_its_reason() {
    let dir = TempDir::new("network");
    let network = Network::create(dir.path(), Setup::X509).unwrap();
    let broker = NatsServer::configured(&network.broker());
    let secured = || plain(&broker.address()).network(&network);
    let wrong = secured().set("broker_provisioning_password", "wrong");
    check(wrong, 78, &["Authorization Violation: it was shown user provisioner"]);
    check(plain(&broker.address()), 78, &["it demands TLS, which choria_insecure turns off"]);
    let strange = Wanted::new("another CA").authority().self_signed();
    network.write("ca", &strange).unwrap();
    let found = Found::of(secured());
    assert_eq!(found.code, 78, "{found:?}");
    assert!(found.errors[0].contains("certificate"), "{found:?}");

    // In the account where no nodes are.
    let site = Site::new(Setup::X509);
    let found = Found::of(calm(site.daemon()).without("broker_provisioning_password"));
    assert_eq!(found.code, 78, "{found:?}");
    assert!(found.errors.iter().any(|e| e.contains("let us into its account choria")), "{found:?}");
    let site = Site::new(Setup::Issuer);
    site.broker.change(|rules| rules.certificate = broker_of(&strange));
    check(calm(site.daemon()), 78, &["certificate"]);
}

#[test]
fn subjects_that_the_broker_does_not_permit_are_named() {
    let dir = TempDir::new("permissions");
    let config = dir.write(
        "broker.conf",
        r#"authorization { users: [ {user: provisioner, password: s, permissions: {
            publish: {deny: ["provisioning.broadcast.>", "provisioning.node.>"]}
            subscribe: {deny: ["provisioning.reply.>", "choria.lifecycle.>", "choria.provisioner.peer"]}
        }} ] }"#,
    );
    let broker = NatsServer::configured(&config);
    let builder = plain(&broker.address()).set("broker_provisioning_password", "s");
    check(
        builder.set("active_active", true),
        78,
        &[
            "Permissions Violation for Subscription to \"provisioning.reply.",
            "Permissions Violation for Subscription to \"choria.lifecycle.event.startup.provision_mode_server\"",
            "Permissions Violation for Subscription to \"choria.provisioner.peer\"",
            "Permissions Violation for Publish to \"provisioning.node.",
            "Permissions Violation for Publish to \"provisioning.broadcast.agent.discovery\"",
        ],
    );
}

#[test]
fn an_election_needs_its_bucket() {
    let broker = NatsServer::start();
    let builder = plain(&broker.address()).set("leader_election", true);
    check(builder, 1, &["has nobody who knows the bucket CHORIA_LEADER_ELECTION"]);
    let streams = Streams::start();
    let missing = "stream not found (error 10059); there is no bucket CHORIA_LEADER_ELECTION: ";
    check(elected(&streams), 1, &[missing]);
    streams.make_bucket(Duration::from_secs(2));
    check(elected(&streams), 1, &["its keys live for 2s"]);
}

#[test]
fn a_daemon_that_runs_is_not_disturbed() {
    let streams = Streams::start();
    streams.make_bucket(Duration::from_secs(5));
    let builder = elected(&streams).set("interval", "1s");
    let socket = builder.dir().join("admin.sock");
    let mut daemon = builder.set("admin_socket", socket.display()).start();
    wait_until(SOON, "it leads", || daemon.metric("leader") > 0.0);
    let provisioners = Member::of_provisioners(&streams.broker.address());
    let (_subscription, heard) = provisioners.watch(">");

    let found = Found::beside(&daemon);
    assert_eq!((found.code, found.errors.len()), (0, 0), "{found:?}");
    assert!(found.warnings.iter().all(|text| text.contains("interval: ")), "{found:?}");
    daemon.assert_alive();
    assert!(socket.exists() && daemon.get("/livez").is_ok());
    assert!(!daemon.logged(&["Lost leadership"]) && daemon.metric("leader") > 0.0);
    let subjects: Vec<String> = heard.try_iter().map(|message| message.subject).collect();
    assert!(subjects.iter().any(|subject| subject.ends_with(".invalid")), "{subjects:?}");
    let announced = |subject: &&String| {
        subject.starts_with("choria.lifecycle.") || subject.starts_with("choria.provisioner.")
    };
    assert_eq!(subjects.iter().find(announced), None);
}

#[test]
fn the_port_of_the_daemon_that_runs_with_these_settings_is_no_fault_whatever_else_is_wrong() {
    let broker = NatsServer::start();
    let builder = plain(&broker.address());
    let (socket, pid) = (builder.dir().join("admin.sock"), builder.dir().join("pid"));
    let daemon = builder
        .set("admin_socket", socket.display())
        .argument(&format!("--pid={}", pid.display()))
        .start();
    assert_eq!(Found::beside(&daemon).errors, [""; 0]);

    // One mistake is one error.
    daemon.write_setting("choria_insecure", "ture");
    let found = Found::beside(&daemon);
    assert_eq!((found.code, found.errors.len()), (78, 1), "{found:?}");
    assert!(found.errors[0].contains("choria_insecure: found the text \"ture\""), "{found:?}");
    daemon.write_setting("choria_insecure", "true");

    // A name that is about to change is another daemon's, unless it answers at our socket or has the number in our pid file.
    let client = daemon.dir().join("choria.cfg");
    let written = fs::read_to_string(&client).unwrap();
    let named = |name: &str| fs::write(&client, written.replace("provisioner.example.net", name));
    named("new.example.net").unwrap();
    assert_eq!(Found::beside(&daemon).errors, [""; 0]);
    daemon.write_setting("admin_socket", "''");
    let found = Found::beside(&daemon);
    let pid = daemon.pid();
    let expected =
        format!("by a choria-provisioner that calls itself provisioner.example.net, process {pid}");
    assert_eq!((found.code, found.errors.len()), (1, 1), "{found:?}");
    assert!(found.errors[0].contains(&expected), "{found:?}");
    let with_pid = check_beside(&daemon).arg("--pid").arg(daemon.dir().join("pid")).output();
    assert_eq!(Found::read(&with_pid.unwrap()).errors, [""; 0]);
    // Where nobody knows who we are, it may be.
    named("a b").unwrap();
    let found = Found::beside(&daemon);
    assert_eq!((found.code, found.errors.len()), (78, 1), "{found:?}");
    assert!(found.errors[0].contains("identity: "), "{found:?}");
}

#[test]
fn nodes_do_not_answer_and_another_programs_port_is_a_fault() {
    let broker = NatsServer::start();
    let fleet = Fleet::builder(&broker.url()).nodes(3).start();
    let builder = plain(&broker.address());
    let trespasser = TcpListener::bind(("127.0.0.1", builder.monitor_port())).unwrap();
    check(builder, 1, &["monitor_port: cannot listen on monitor port"]);
    drop(trespasser);
    good(plain(&broker.address()));
    for node in fleet.iter() {
        assert_eq!(node.times_configured(), 0);
    }
    assert_eq!(fleet.violations(), [""; 0]);
    // One whose daemon has died is made anew.
    let builder = plain(&broker.address());
    let socket = builder.dir().join("socket");
    drop(UnixListener::bind(&socket).unwrap());
    good(builder.set("admin_socket", socket.display()));
}

#[test]
fn who_moves_is_told_what_differs() {
    let builder = plain("127.0.0.1:1").argument("--offline").argument("--moving");
    fs::write(builder.dir().join("info"), "").unwrap();
    let builder = builder
        .without("logfile")
        .without("loglevel")
        .set("choria_insecure", "true")
        .env("MCOLLECTIVE_NATS_PASSWORD", "x");
    let found = Found::of(builder);
    assert_eq!((found.code, found.errors.len()), (0, 0), "{found:?}");
    for part in [
        "logfile: not set",
        "loglevel: not set",
        "monitor_port: serves a page",
        "helper: does not find MCOLLECTIVE_NATS_PASSWORD",
        "/info: looks like the original's log",
    ] {
        assert!(found.warnings.iter().any(|text| text.contains(part)), "{part}: {found:?}");
    }
    // Without security there are no such files.
    assert!(!found.warnings.iter().any(|text| text.contains("ssldir")), "{found:?}");
}

#[test]
fn people_get_text_and_what_it_costs_is_in_the_exit_code() {
    let output = plain("127.0.0.1:1")
        .argument("--offline")
        .set("helper", "/nowhere")
        .set("rego_policy", "x")
        .command("check")
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(78));
    let said = String::from_utf8_lossy(&output.stdout);
    let lines: Vec<&str> = said.lines().collect();
    assert_eq!(lines.len(), 3, "{said}");
    assert!(lines[0].starts_with("warning: ") && lines[1].starts_with("error: "), "{said}");
    assert_eq!(lines[2], "1 error, 1 warning.");
    for missing in [&["check", "--config="][..], &["check", "x"], &["check", "--socket=x"]] {
        assert_eq!(program().args(missing).output().unwrap().status.code(), Some(2));
    }
    let nothing = program().args(["check", "--config", "/nowhere/p.yaml"]).output().unwrap();
    assert_eq!(nothing.status.code(), Some(78));
    assert!(String::from_utf8_lossy(&nothing.stdout).contains(MISSING));
}

/// A helper for many nodes.
const PERSISTENT: &str = "#!/bin/sh\nwhile IFS= read -r line; do :; done\n";

/// A set-up without security that is as it should be.
fn plain(address: &str) -> Builder {
    calm(Daemon::builder(address))
}

/// Without the short interval of tests, which is worth a warning.
fn calm(builder: Builder) -> Builder {
    builder.set("interval", "1m")
}

fn elected(streams: &Streams) -> Builder {
    plain(&streams.broker.address())
        .set("leader_election", true)
        .set("broker_provisioning_password", "provSecret")
        .choria("identity", "p1.example.net")
        .env("MCOLLECTIVE_CERTNAME", "p1.example.net")
}

/// `check` of the files of a daemon that runs.
fn check_beside(daemon: &Daemon) -> Command {
    let mut command = program();
    command.args(["check", "--json", "--config"]);
    command.arg(daemon.dir().join("choria-provisioner.yaml"));
    command.arg("--choria-config").arg(daemon.dir().join("choria.cfg"));
    command.env("MCOLLECTIVE_CERTNAME", "p1.example.net");
    command
}

fn program() -> Command {
    Command::new(env!("CARGO_BIN_EXE_choria-provisioner"))
}

#[track_caller]
fn good(builder: Builder) {
    let found = Found::of(builder);
    let nothing = Found { code: 0, errors: Vec::new(), warnings: Vec::new() };
    assert_eq!(found, nothing);
}

/// Each of these is in one error, and there are no others.
#[track_caller]
fn check(builder: Builder, code: i32, expected: &[&str]) {
    let found = Found::of(builder);
    assert_eq!(found.code, code, "{found:#?}");
    for part in expected {
        let named = found.errors.iter().filter(|text| text.contains(part)).count();
        assert_eq!(named, 1, "{part}: {found:#?}");
    }
    assert_eq!(found.errors.len(), expected.len(), "{found:#?}");
}

/// What was found.
#[derive(Debug, PartialEq, Eq)]
struct Found {
    code: i32,
    errors: Vec<String>,
    warnings: Vec<String>,
}

impl Found {
    #[track_caller]
    fn of(builder: Builder) -> Found {
        Found::read(&builder.command("check").arg("--json").output().unwrap())
    }

    #[track_caller]
    fn beside(daemon: &Daemon) -> Found {
        Found::read(&check_beside(daemon).output().unwrap())
    }

    #[track_caller]
    fn read(output: &std::process::Output) -> Found {
        let said = String::from_utf8_lossy(&output.stdout);
        let json: Value = serde_json::from_str(&said)
            .unwrap_or_else(|_| panic!("{said}{}", String::from_utf8_lossy(&output.stderr)));
        let texts = |key: &str| {
            let list = json[key].as_array().unwrap();
            list.iter().map(|one| one["text"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
        };
        let found = Found {
            code: output.status.code().unwrap(),
            errors: texts("errors"),
            warnings: texts("warnings"),
        };
        assert_eq!(json["ok"].as_bool(), Some(found.errors.is_empty()));
        assert_eq!(output.stderr, b"");
        found
    }
}

/// Somebody who says one thing to everybody, and then nothing.
struct Answering {
    address: String,
}

impl Answering {
    fn with(text: &'static str) -> Answering {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        thread::spawn(move || {
            let mut guests = Vec::new();
            for guest in listener.incoming() {
                let mut guest = guest.unwrap();
                guest.write_all(text.as_bytes()).unwrap();
                guests.push(guest);
            }
        });
        Answering { address }
    }
}
