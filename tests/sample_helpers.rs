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

#[test]
fn the_helpers_that_stay_answer_for_one_node_after_another() {
    for (helper, collectives) in [
        ("persistent.sh", "choria"),
        ("persistent.py", "choria,lon"),
        ("persistent.rb", "choria,lon"),
    ] {
        let metrics = Metrics::new("");
        let helper = format!("dist/helpers/{helper}");
        let staying = Helper::persistent(command(&helper), LIMITS, 1, metrics.clone());
        for _ in 0..3 {
            check_with(&staying, collectives);
        }
        // What it can't read fails that node only.
        let error = ask_about(&staying, "n1.fleet.example.net", "no JSON").err();
        assert_eq!(error.is_some(), collectives.contains("lon"), "{helper}: {error:?}");
        check_with(&staying, collectives);
        assert_eq!((metrics.helper_processes.get(), metrics.helper_restarts.get()), (1, 0));
        staying.stop(&crossbeam_channel::never());
        // In the other mode it would wait for the end of its input, without a word.
        let error = ask_about(&started(&helper), "n1.fleet.example.net", "{}").unwrap_err();
        assert!(error.contains("this helper needs helper_mode: persistent"), "{helper}: {error}");
    }
}

#[track_caller]
fn check(helper: &str, collectives: &str) {
    check_with(&started(helper), collectives);
}

#[track_caller]
fn check_with(helper: &Helper, collectives: &str) {
    let inventory =
        r#"{"agents":["rpcutil"],"facts":{"location":"lon","os":{"name":"x"}},"version":"0.30.2"}"#;
    let ask = |identity: &str| match ask_about(helper, identity, inventory) {
        Ok(answer) => answer,
        Err(error) => panic!("{error}"),
    };
    let answer = ask("n1.fleet.example.net");
    assert!(!answer.defer && !answer.shutdown, "{answer:?}");
    let configuration = &answer.configuration;
    assert_eq!(configuration["identity"], "n1.fleet.example.net");
    assert_eq!(configuration["collectives"], collectives);
    assert_eq!(configuration["plugin.choria.server.provision"], "0");
    assert!(configuration.contains_key("plugin.choria.middleware_hosts"), "{configuration:?}");

    let answer = ask("n1.example.org");
    assert!(answer.defer, "{answer:?}");
    assert_eq!(answer.msg, "n1.example.org is not in example.net");
    assert!(answer.configuration.is_empty(), "{answer:?}");
}

const LIMITS: Limits = Limits { timeout: Duration::from_secs(60), output_max: 4 << 20 };

/// The helper in this file, started for each node.
fn started(helper: &str) -> Helper {
    Helper::new(command(helper), LIMITS, Metrics::new(""))
}

fn command(helper: &str) -> HelperCommand {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(helper);
    HelperCommand::parse(&shell_words::quote(&path.display().to_string()))
        .expect("a helper that runs as it is")
}

fn ask_about(helper: &Helper, identity: &str, inventory: &str) -> Result<Answer, String> {
    let identity = Identity::parse(identity).expect("a valid identity");
    let input = Input { identity: &identity, csr: None, ed25519: None, inventory, jwt: None };
    let deadline = Instant::now() + LIMITS.timeout;
    helper.run(&input, deadline, &crossbeam_channel::never()).map_err(|error| error.to_string())
}
