//! The helpers in `dist/helpers`, run as they are by the code that runs them for nodes.

use std::path::Path;
use std::time::{Duration, Instant};

use choria_provisioner::helper::{Answer, Helper, HelperCommand, Input, Limits};
use choria_provisioner::metrics::Metrics;
use choria_provisioner::protocol::Identity;

#[test]
fn the_shell_helper_configures_our_nodes_and_defers_others() {
    check("dist/helpers/sample.sh", "choria");
}

#[test]
fn the_python_helper_configures_our_nodes_and_defers_others() {
    check("dist/helpers/sample.py", "choria,lon");
}

#[test]
fn the_ruby_helper_configures_our_nodes_and_defers_others() {
    check("dist/helpers/sample.rb", "choria,lon");
}

#[track_caller]
fn check(helper: &str, collectives: &str) {
    let answer = ask(helper, "n1.fleet.example.net");
    assert!(!answer.defer && !answer.shutdown, "{answer:?}");
    let configuration = &answer.configuration;
    assert_eq!(configuration["identity"], "n1.fleet.example.net");
    assert_eq!(configuration["collectives"], collectives);
    assert_eq!(configuration["plugin.choria.server.provision"], "0");
    assert!(configuration.contains_key("plugin.choria.middleware_hosts"), "{configuration:?}");

    let answer = ask(helper, "n1.example.org");
    assert!(answer.defer, "{answer:?}");
    assert_eq!(answer.msg, "n1.example.org is not in example.net");
    assert!(answer.configuration.is_empty(), "{answer:?}");
}

#[track_caller]
fn ask(helper: &str, identity: &str) -> Answer {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(helper);
    let command = HelperCommand::parse(&shell_words::quote(&path.display().to_string()))
        .expect("a helper that runs as it is");
    let limits = Limits { timeout: Duration::from_secs(60), output_max: 4 << 20 };
    let identity = Identity::parse(identity).expect("a valid identity");
    let input = Input {
        identity: &identity,
        csr: None,
        ed25519: None,
        inventory: r#"{"agents":["rpcutil"],"facts":{"location":"lon","os":{"name":"x"}},"version":"0.30.2"}"#,
        jwt: None,
    };
    let deadline = Instant::now() + limits.timeout;
    let abort = crossbeam_channel::never();
    match Helper::new(command, limits, Metrics::new("")).run(&input, deadline, &abort) {
        Ok(answer) => answer,
        Err(error) => panic!("{error}"),
    }
}
