//! What the tokens of one node cost: the provisioning JWT it shows us, checked with the site's key, and the server JWT we sign
//! for it, on the trust chain or with a key that brokers know itself.
//!
//! `cargo bench --bench jwt` prints microseconds.

#![expect(clippy::print_stdout, reason = "the figures are what it is for")]
#![expect(clippy::unwrap_used, reason = "what is measured works, or there is nothing to measure")]

mod measure;

use std::hint::black_box;

use choria_provisioner::jwt::provisioning::ProvisioningToken;
use choria_provisioner::jwt::server::{Issuer, Server};
use choria_provisioner::jwt::{SignKey, VerifyKey, seed};
use choria_provisioner::protocol::Identity;
use measure::{nanos, vector};

/// A time at which all recorded keys and tokens are valid.
const NOW: i64 = 1_795_996_000;

fn main() {
    println!("{:<44} {:>12}", "one token", "µs");

    let rsa = vector("insecure/jwt-signer.pem");
    let by_rsa = vector("insecure/provisioning.jwt");
    let key = VerifyKey::from_file(&rsa).unwrap();
    report("provisioning JWT, RSA: verify", || verify(&by_rsa, &key));
    report("  read the key, as for every node", || {
        drop(black_box(VerifyKey::from_file(&rsa).unwrap()))
    });
    let token = ProvisioningToken::verify(by_rsa.trim(), &key, NOW).unwrap();
    report("  write the claims for the helper", || drop(black_box(token.claims_json().unwrap())));

    let ed25519 = vector("issuer/issuer.public");
    let by_ed25519 = vector("issuer/provisioning.jwt");
    let key = VerifyKey::from_hex(ed25519.trim()).unwrap();
    report("provisioning JWT, Ed25519: verify", || verify(&by_ed25519, &key));

    let signer_seed = vector("issuer/signer.seed");
    let server = Server {
        identity: Identity::parse("n0.fleet.example.net").unwrap(),
        public_key: seed(&vector("issuer/server.seed")).unwrap().verifying_key(),
        collectives: vec!["choria".to_owned()],
        organization: "choria".to_owned(),
        permissions: None,
        pub_subjects: Vec::new(),
        expires: NOW + 365 * 24 * 3600,
    };
    let chain = Issuer::check(&signer_seed, Some(&vector("issuer/signer.jwt")), NOW).unwrap();
    report("server JWT on the trust chain: sign", || sign(&chain, &server));
    let plain = Issuer::Plain(SignKey::from_file(&signer_seed).unwrap());
    report("server JWT, Ed25519: sign", || sign(&plain, &server));
    let plain = Issuer::Plain(SignKey::from_file(&vector("insecure/jwt-signer.key")).unwrap());
    report("server JWT, RSA: sign", || sign(&plain, &server));
}

fn verify(token: &str, key: &VerifyKey) {
    black_box(ProvisioningToken::verify(black_box(token.trim()), key, NOW).unwrap());
}

fn sign(issuer: &Issuer, server: &Server) {
    black_box(issuer.issue(black_box(server), NOW, [7; 16]).unwrap());
}

fn report(name: &str, call: impl FnMut()) {
    println!("{name:<44} {:>12.2}", nanos(call) / 1e3);
}
