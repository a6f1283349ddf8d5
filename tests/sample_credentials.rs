//! The helpers in `dist/helpers` that give credentials, run as they are by the daemon for practice nodes.

mod common;
mod fleet;

use std::fs;
use std::path::Path;
use std::process::Command;

use openssl::x509::X509;

use common::{Daemon, NatsServer, SOON, TempDir, wait_until, within};
use fleet::issuer::Organization;
use fleet::{Fleet, State, unix_now};

#[test]
fn nodes_of_an_organization_get_a_server_jwt_as_the_sample_wishes() {
    let (broker, organization) = (NatsServer::start(), Organization::new());
    let signer = organization.chain_issuer(unix_now());
    let fleet = Fleet::builder(&broker.url())
        .nodes(5)
        .organization(&organization)
        .facts(r#"{"location": "lon"}"#)
        .start();
    let builder = Daemon::builder(&broker.address());
    for (name, content) in [("signer.seed", &signer.seed), ("signer.jwt", &signer.token)] {
        fs::write(builder.dir().join(name), content).expect("the daemon's folder is writable");
    }
    let path = |name: &str| builder.dir().join(name).display().to_string();
    let (key, token) = (path("signer.seed"), path("signer.jwt"));
    let daemon = builder
        .feature("jwt", "false")
        .feature("ed25519", "true")
        .set("jwt_verify_cert", organization.public_key())
        .set("jwt_signing_key", key)
        .set("jwt_signing_token", token)
        .set("helper", helper("issuer.py", &organization.public_key()))
        .start();
    check(&fleet, &daemon);
    for node in fleet.iter() {
        let configuration = node.configuration();
        let issuer = &configuration["plugin.security.issuer.choria.public"];
        assert_eq!(*issuer, organization.public_key());
        assert_eq!(configuration["collectives"], "choria,lon");
        let claims = fleet::issuer::read_token(
            &organization.public_key(),
            &node.received().expect("it was configured").server_jwt,
            unix_now(),
        );
        let claims = claims.expect("a token of the organization");
        assert_eq!(claims["collectives"], serde_json::json!(["choria", "lon"]));
        assert_eq!(claims["permissions"]["streams"], true);
    }
}

#[test]
fn nodes_get_a_certificate_from_the_authority_of_the_sample() {
    let ca = TempDir::new("ca");
    make_ca(ca.path());
    let authority = fs::read(ca.path().join("ca.pem")).expect("the command in the sample makes it");
    let authority = X509::from_pem(&authority).expect("a certificate");
    let broker = NatsServer::start();
    let fleet = Fleet::builder(&broker.url()).nodes(5).pki().start();
    let daemon = Daemon::builder(&broker.address())
        .feature("pki", "true")
        .set("helper", helper("x509.py", &ca.path().display().to_string()))
        .start();
    check(&fleet, &daemon);
    let mut serials = std::collections::HashSet::new();
    for node in fleet.iter() {
        let received = node.received().expect("it was configured");
        let certificate = X509::from_pem(received.certificate.as_bytes()).expect("a certificate");
        let key = authority.public_key().expect("the authority has a key");
        assert!(certificate.verify(&key).expect("it can be checked"), "signed by another");
        let names = certificate.subject_alt_names().expect("alternative names");
        assert_eq!(names[0].dnsname(), Some(node.identity().as_str()));
        let serial = certificate.serial_number().to_bn().expect("a number");
        assert!(serials.insert(serial.to_vec()), "two certificates have one number");
    }
}

/// Every node is provisioned and gets into the production network, and nobody has anything to say about the answers.
fn check(fleet: &Fleet, daemon: &Daemon) {
    fleet
        .wait_all_provisioned(within(SOON))
        .unwrap_or_else(|why| panic!("{why}\n{}", daemon.log()));
    wait_until(SOON, "all are on the production network", || {
        fleet.iter().all(|node| node.state() == State::Provisioned)
    });
    assert_eq!(fleet.violations(), [""; 0]);
    assert!(!daemon.logged(&["The helper's answer for"]), "{}", daemon.log());
}

/// The setting for a helper in the project.
fn helper(name: &str, argument: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("dist/helpers").join(name);
    shell_words::join([path.display().to_string().as_str(), argument])
}

/// Makes an authority with the command that the sample shows.
fn make_ca(folder: &Path) {
    let sample = Path::new(env!("CARGO_MANIFEST_DIR")).join("dist/helpers/x509.py");
    let sample = fs::read_to_string(sample).expect("the sample");
    let command = sample.lines().find(|line| line.trim().starts_with("openssl req "));
    let output = Command::new("sh")
        .args(["-c", command.expect("the sample says how to make a CA")])
        .current_dir(folder)
        .output()
        .expect("sh");
    assert!(output.status.success(), "{output:?}");
}
