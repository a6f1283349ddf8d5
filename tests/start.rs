//! What the daemon says and does when it starts: settings, files, ports.

mod common;
mod fleet;

use std::net::TcpListener;

use common::{Daemon, NatsServer, SOON, wait_until, within};
use fleet::Fleet;

#[test]
fn a_monitor_port_in_use_is_said_before_any_work() {
    let broker = NatsServer::start();
    let fleet = Fleet::builder(&broker.url()).nodes(1).start();
    let daemon = Daemon::builder(&broker.address());
    let port = daemon.monitor_port();
    let _taken = TcpListener::bind(("127.0.0.1", port)).expect("the port was free");
    let (code, log) = daemon.run_to_its_end();
    assert_eq!(code, 1, "{log}");
    assert!(log.contains(&port.to_string()) && log.to_lowercase().contains("in use"), "{log}");
    assert_eq!(fleet.node(0).times_asked(fleet::Action::Inventory), 0, "{log}");
}

#[test]
fn an_unreadable_verification_key_is_a_configuration_error() {
    // A folder cannot be read as a file, whoever runs the tests.
    for make in [|_: &std::path::Path| Ok(()), |path: &std::path::Path| std::fs::create_dir(path)] {
        let daemon = Daemon::builder("127.0.0.1:4222");
        let path = daemon.dir().join("key.pem");
        make(&path).expect("the temporary folder is writable");
        let (code, log) = daemon.set("jwt_verify_cert", path.display()).run_to_its_end();
        assert_eq!(code, 78, "{log}");
        assert!(log.contains("jwt_verify_cert"), "{log}");
        assert!(log.contains("key.pem"), "{log}");
    }
}

#[test]
fn a_verification_key_that_is_none_is_refused_with_the_remedy() {
    let daemon = Daemon::builder("127.0.0.1:4222");
    let path = daemon.dir().join("key.pem");
    std::fs::write(&path, "no key").expect("the temporary folder is writable");
    let (code, log) = daemon.set("jwt_verify_cert", path.display()).run_to_its_end();
    assert_eq!(code, 78, "{log}");
    let expected = format!("jwt_verify_cert: {} holds no key (", path.display());
    assert!(log.contains(&expected) && log.contains("RSA in PEM, or Ed25519 in hex"), "{log}");
}

#[test]
fn a_verification_key_broken_later_fails_nodes_until_it_is_mended() {
    let broker = NatsServer::start();
    let mut daemon = Daemon::builder(&broker.address()).start();
    let path = daemon.dir().join("verify.pem");
    std::fs::write(&path, "no key").expect("the temporary folder is writable");
    let fleet = Fleet::builder(&broker.url()).nodes(1).start();
    let reason = "could not use validation certificate";
    daemon.wait_logged(SOON, &["Could not provision n0.fleet.example.net", reason]);
    assert_eq!(fleet.node(0).times_configured(), 0);
    // The file is read for every node, so nobody has to restart anything.
    std::fs::write(&path, Fleet::verify_key_pem()).expect("the temporary folder is writable");
    fleet.wait_all_provisioned(within(SOON)).expect("provisioned");
    assert!(daemon.stop().success());
}

#[test]
fn a_missing_helper_is_a_configuration_error() {
    for helper in ["/nowhere/helper", "\"'/bin/true\"", "\"\""] {
        let (code, log) = Daemon::builder("127.0.0.1:4222").set("helper", helper).run_to_its_end();
        assert_eq!(code, 78, "{helper}: {log}");
        assert!(log.contains("helper"), "{helper}: {log}");
    }
}

#[test]
fn unknown_and_misspelt_keys_are_named_and_do_not_stop_it() {
    let broker = NatsServer::start();
    let fleet = Fleet::builder(&broker.url()).nodes(1).start();
    let mut daemon = Daemon::builder(&broker.address())
        .without("site")
        .yaml("Site: london\nworkrs: 3\nbroker_port: 4222\ncolour: blue")
        .start();
    fleet.wait_all_provisioned(within(SOON)).expect("provisioned");
    for key in ["workrs", "colour"] {
        assert!(daemon.logged(&[key, "unknown key"]), "{key}: {}", daemon.log());
    }
    wait_until(SOON, "it is counted, and keys match in any case", || {
        daemon.metrics().with("provisioned", "site=\"london\"") == 1.0
    });
    assert!(daemon.stop().success());
}

#[test]
fn yaml_1_1_words_and_numbers_mean_what_they_meant() {
    let broker = NatsServer::start();
    let fleet = Fleet::builder(&broker.url()).nodes(1).start();
    let daemon = Daemon::builder(&broker.address());
    // A leading zero makes a number octal; a wrong reading shows at once, since nothing answers on that port.
    let port = format!("0{:o}", daemon.monitor_port());
    let mut daemon = daemon
        .set("monitor_port", port)
        .set("workers", "010")
        .set("choria_insecure", "on")
        .set("site", "no")
        .feature("jwt", "yes")
        .feature("pki", "off")
        .start();
    fleet.wait_all_provisioned(within(SOON)).expect("provisioned");
    assert_eq!(fleet.node(0).times_asked(fleet::Action::Jwt), 1, "yes switches a feature on");
    assert_eq!(fleet.node(0).times_asked(fleet::Action::GenCsr), 0, "off switches it off");
    wait_until(SOON, "it is counted, and a text stays as written", || {
        daemon.metrics().with("provisioned", "site=\"no\"") == 1.0
    });
    assert!(daemon.stop().success());
}

#[test]
fn every_mistake_in_the_settings_is_listed_at_once() {
    let (code, log) = Daemon::builder("127.0.0.1:4222")
        .set("workers", "many")
        .set("interval", "60")
        .set("cert_deny_list", "['(']")
        .set("choria_insecure", "maybe")
        .set("loglevel", "loud")
        .run_to_its_end();
    assert_eq!(code, 78, "{log}");
    for key in ["workers", "interval", "cert_deny_list", "choria_insecure", "loglevel"] {
        assert!(log.contains(key), "{key} in {log}");
    }
    assert!(log.contains("choria-provisioner.yaml"), "{log}");
}

#[test]
fn a_pid_file_holds_the_process_number() {
    let broker = NatsServer::start();
    let daemon = Daemon::builder(&broker.address());
    let path = daemon.dir().join("pid");
    let mut daemon = daemon.argument(&format!("--pid={}", path.display())).start();
    let pid = std::fs::read_to_string(&path).expect("it was written");
    assert_eq!(pid.trim(), daemon.pid().to_string());
    assert!(daemon.stop().success());
}

#[test]
fn a_log_file_holds_one_json_object_a_line() {
    let broker = NatsServer::start();
    let fleet = Fleet::builder(&broker.url()).nodes(1).start();
    let mut daemon = Daemon::builder(&broker.address()).start();
    fleet.wait_all_provisioned(within(SOON)).expect("provisioned");
    assert!(daemon.stop().success());
    let log =
        std::fs::read_to_string(daemon.dir().join("provisioner.log")).expect("it was written");
    assert!(log.lines().count() > 3, "{log}");
    for line in log.lines() {
        let entry: serde_json::Value = serde_json::from_str(line).expect(line);
        for key in ["component", "level", "msg", "time"] {
            assert!(entry[key].is_string(), "{key} in {line}");
        }
    }
    assert!(!log.contains("s3cret"), "the provisioning token is nobody's business");
}
