//! Answers of helpers, each with one thing wrong or strange, and what is said about it.

use std::cell::Cell;

use openssl::pkey::{PKey, Private};
use serde_json::{Value, json};

use super::testing::{Ca, csr, key};
use super::{Known, Room, Severity, Site, lint};
use crate::config::{Enrollment, Features};
use crate::helper::Answer;
use crate::pki::csr::Csr;
use crate::protocol::Identity;

const NODE: &str = "n1.example.net";
const NOW: i64 = 1_760_000_000;
const DAY: i64 = 86_400;

#[test]
fn finds_nothing_in_healthy_answers() {
    let bench = Bench::new();
    for enrollment in [Enrollment::Off, Enrollment::Pki, Enrollment::OrganizationIssuer] {
        bench.with(enrollment).check(bench.healthy(), &[]);
    }
    bench.check(json!({"defer": true, "msg": "later"}), &[]);
    bench.check(json!({"shutdown": true, "msg": "old"}), &[]);
    bench.check(configured(json!({"identity": NODE})), &[]);
    bench.check(configured(json!({"plugin.choria.server.provision": "false"})), &[]);
    bench.check(configured(json!({"k": "a=b c", "empty": ""})), &[]);
}

#[test]
fn warns_of_a_choice_that_leaves_something_unused() {
    let bench = Bench::new();
    let both = "both defer and shutdown are set and the node is deferred: set one of them";
    let unused = |which: &str| {
        format!(
            "there is a configuration, which is not used because {which} is set: leave out one of them"
        )
    };
    bench.check(json!({"defer": true, "shutdown": true}), &[warning(both)]);
    bench.check(
        json!({"shutdown": true, "configuration": {"a": "b"}}),
        &[warning(&unused("shutdown"))],
    );
    // What is wrong with a configuration that is not used does not matter.
    bench.check(
            json!({"defer": true, "shutdown": true, "configuration": {"": "\n"}, "key": "x", "upgrade": "v1"}),
            &[warning(both), warning(&unused("defer"))],
        );
}

#[test]
fn refuses_settings_that_would_write_others() {
    let bench = Bench::new();
    bench.check(
        json!({}),
        &[error(
            "empty configuration: answer with all settings of the node, or with defer or shutdown",
        )],
    );
    let nameless = "the configuration has a setting without a name: give it one";
    bench.check(configured(json!({"": "a"})), &[error(nameless)]);
    bench.check(configured(json!({" \n": "a"})), &[error(nameless)]);
    for key in ["a\nb", "a\0", "a=b", "=", "\na"] {
        let text = format!(
            "the name of setting {key:?} holds a line break, a NUL or an equals sign and would write other settings: remove it"
        );
        bench.check(configured(json!({key: "x"})), &[error(&text)]);
    }
    for value in ["1\nloglevel=debug", "a\0", "\n", "-----BEGIN\nAAAA"] {
        bench.check(configured(json!({"k": value})), &[error(
                "the value of setting \"k\" holds a line break or a NUL and would write other settings: remove it",
            )]);
    }
}

const MISSING_PROVISION: &str = "the configuration does not set plugin.choria.server.provision, and the node will come back to be provisioned again and again: set it to 0";

#[test]
fn knows_when_a_node_would_stay_in_provisioning_mode() {
    let bench = Bench::new();
    for value in ["1", "true", "yes", "Y", " T "] {
        for name in ["plugin.choria.server.provision", " plugin.choria.server.provision "] {
            bench.check(json!({"configuration": {name: value}}), &[error(
                    "plugin.choria.server.provision is true, and the node refuses to restart with it: set it to 0",
                )]);
        }
    }
    for value in ["0", "false", "no", "n", "F", "maybe", ""] {
        bench.check(json!({"configuration": {"plugin.choria.server.provision": value}}), &[]);
    }
    let missing = json!({"configuration": {"a": "b"}});
    bench.check(missing.clone(), &[warning(MISSING_PROVISION)]);
    Bench { is_provisioning_default: false, ..bench }.check(missing, &[]);
}

#[test]
fn knows_when_a_node_would_have_another_name() {
    let bench = Bench::new();
    let answer = configured(json!({"identity": "n2"}));
    let renamed = "the configuration sets identity to \"n2\" and the node will change its name: set it to n1.example.net or leave it out";
    bench.check(answer.clone(), &[warning(renamed)]);
    bench.with(Enrollment::OrganizationIssuer).check(answer, &[error(
            "the configuration sets identity to \"n2\", but the server JWT is for n1.example.net and the node could never connect: set it to n1.example.net or leave it out",
        )]);
    bench.check(configured(json!({"identity": " n1.example.net "})), &[]);
}

#[test]
fn warns_of_credentials_where_the_node_does_not_write_them() {
    let bench = Bench::new().with(Enrollment::OrganizationIssuer);
    let (token, seed) = ("plugin.security.choria.token_file", "plugin.security.choria.seed_file");
    let answer = |token_file: &str, seed_file: &str| {
        configured(json!({
            "plugin.security.provider": "choria", token: token_file, seed: seed_file,
        }))
    };
    let elsewhere = |name: &str, path: &str, expected: &str| {
        format!(
            "the configuration sets {name} to {path:?}, where the node will find nothing and come back to be provisioned: set it to {expected}"
        )
    };
    bench.check(answer("/etc/choria/server.jwt", "/etc/choria//server.seed"), &[]);
    bench.check(
        answer("/etc/choria/server.seed", "/etc/choria/server.jwt"),
        &[
            warning(&elsewhere(token, "/etc/choria/server.seed", "/etc/choria/server.jwt")),
            warning(&elsewhere(seed, "/etc/choria/server.jwt", "/etc/choria/server.seed")),
        ],
    );
    bench.check(
        answer("server.jwt", "/etc/choria/server.seed"),
        &[warning(&elsewhere(token, "server.jwt", "/etc/choria/server.jwt"))],
    );
    bench.check(configured(json!({"plugin.security.provider": "choria"})), &[
            warning(
                "the configuration does not set plugin.security.choria.token_file, and the node will come back to be provisioned: set it to /etc/choria/server.jwt",
            ),
            warning(
                "the configuration does not set plugin.security.choria.seed_file, and the node will come back to be provisioned: set it to /etc/choria/server.seed",
            ),
        ]);
    bench.check(
        configured(json!({
            "plugin.security.server_anon_tls": "true",
            "plugin.choria.security.server.token_file": "/x/server.jwt",
            "plugin.choria.security.server.seed_file": "/etc/choria/server.seed",
        })),
        &[warning(&elsewhere(
            "plugin.choria.security.server.token_file",
            "/x/server.jwt",
            "/etc/choria/server.jwt",
        ))],
    );

    let windows = Bench { directory: r"C:\choria\", ..bench };
    windows.check(answer(r"C:\choria\server.jwt", "C:/choria/server.seed"), &[]);
    windows.check(
        answer(r"D:\server.jwt", r"C:\choria\server.seed"),
        &[warning(&elsewhere(token, r"D:\server.jwt", r"C:\choria\server.jwt"))],
    );
    // Without the node's own word, or a server JWT, nothing is known.
    Bench { directory: "", ..windows }.check(answer("/a", "/b"), &[]);
    Bench::new().check(answer("/a", "/b"), &[]);
}

#[test]
fn warns_of_an_expiry_that_is_not_used_as_written() {
    let bench = Bench::new().with(Enrollment::OrganizationIssuer);
    let answer = |exp: Value| {
        let mut answer = configured(json!({}));
        answer["server_claims"] = json!({"exp": exp, "permissions": {"streams": true}});
        answer
    };
    for exp in [0, -1, 1, 3_600, 1_000_000_000, NOW - 1, NOW, NOW + 3_600] {
        bench.check(answer(json!(exp)), &[warning(&format!(
                "exp of server_claims is {exp}, which is past or within an hour, and the default validity is used: give seconds since 1970"
            ))]);
    }
    for exp in [3_601, 157_680_000, 999_999_999] {
        bench.check(answer(json!(exp)), &[warning(&format!(
                "exp of server_claims is {exp} and is taken as a duration in seconds: give seconds since 1970"
            ))]);
    }
    for exp in [json!(NOW + 3_601), json!(NOW + 365 * DAY), json!(2_000_000_000.5), json!(null)] {
        bench.check(answer(exp), &[]);
    }
    Bench::new().check(answer(json!(1)), &[]);
    // It is found however the claims are read for the token.
    let mut other = configured(json!({}));
    other["server_claims"] = json!({"EXP": "1"});
    bench.check(other, &[warning(
            "exp of server_claims is 1, which is past or within an hour, and the default validity is used: give seconds since 1970"
        )]);
}

#[test]
fn refuses_a_certificate_for_another_key() {
    let bench = Bench::new();
    let fault = |owner: &str| {
        error(&format!(
            "the certificate is not for the key of {owner}, and the node could not use it: sign that one"
        ))
    };
    let other = bench.ca.issue(NODE, &key(), NOW - DAY..NOW + DAY);
    let answer = bench.healthy_but("certificate", json!(other));
    bench.check(answer.clone(), &[fault("the node's request")]);
    // Without a request, the node's key is not known.
    Bench { csr: None, ..Bench::new() }.check(
        {
            let mut answer = answer;
            answer["ca"] = json!(bench.ca.pem());
            answer
        },
        &[],
    );

    // A key that comes along is the one that counts.
    let made = key();
    let pem = |key: &PKey<Private>| {
        json!(String::from_utf8(key.private_key_to_pem_pkcs8().unwrap()).unwrap())
    };
    let mut answer = bench.healthy();
    answer["certificate"] = json!(bench.ca.issue(NODE, &made, NOW - DAY..NOW + DAY));
    answer["key"] = pem(&made);
    bench.check(answer.clone(), &[]);
    answer["key"] = pem(&key());
    bench.check(answer.clone(), &[fault("the answer")]);
    answer["certificate"] = bench.healthy()["certificate"].clone();
    answer["key"] = pem(&made);
    bench.check(answer, &[fault("the answer")]);
}

#[test]
fn refuses_a_certificate_for_another_name() {
    let bench = Bench::new();
    let validity = NOW - DAY..NOW + DAY;
    let other = bench.ca.issue("n2", &bench.key, validity.clone());
    bench.check(
        bench.healthy_but("certificate", json!(other)),
        &[error(
            "the certificate names \"n2\" and not n1.example.net: sign the request of this node",
        )],
    );
    let also = bench.ca.issue_also("anything", "N1.example.net", &bench.key, validity);
    bench.check(bench.healthy_but("certificate", json!(also)), &[]);
}

#[test]
fn refuses_a_certificate_that_has_expired() {
    let bench = Bench::new();
    let expired = bench.ca.issue(NODE, &bench.key, NOW - DAY..NOW);
    bench.check(
        bench.healthy_but("certificate", json!(expired)),
        &[error("the certificate expired on Oct  9 08:53:20 2025 GMT: sign a new one")],
    );
    // A CA's clock may be a bit ahead.
    let ahead = bench.ca.issue(NODE, &bench.key, NOW + 200..NOW + DAY);
    bench.check(bench.healthy_but("certificate", json!(ahead)), &[]);
    let future = bench.ca.issue(NODE, &bench.key, NOW + 400..NOW + DAY);
    bench.check(bench.healthy_but("certificate", json!(future)), &[error(
            "the certificate is not valid under ca, certificate is not yet valid: give the CA that signed it",
        )]);
}

#[test]
fn refuses_a_ca_that_did_not_sign_the_certificate() {
    let bench = Bench::new();
    let validity = NOW - DAY..NOW + DAY;
    let fault = |why: &str| {
        error(&format!("the certificate is not valid under ca, {why}: give the CA that signed it"))
    };
    let stranger = Ca::new("Other CA", validity.clone());
    let namesake = Ca::new("Test CA", validity.clone());
    let old = Ca::new("Old CA", NOW - DAY..NOW - 1);
    bench.check(
        bench.healthy_but("ca", json!(stranger.pem())),
        &[fault("unable to get local issuer certificate")],
    );
    bench.check(
        bench.healthy_but("ca", json!(namesake.pem())),
        &[fault("certificate signature failure")],
    );
    let both = format!("{}{}", stranger.pem(), bench.ca.pem());
    bench.check(bench.healthy_but("ca", json!(both)), &[]);
    let mut answer = bench.healthy_but("ca", json!(old.pem()));
    answer["certificate"] = json!(old.issue(NODE, &bench.key, validity.clone()));
    bench.check(answer, &[fault("certificate has expired")]);

    // A CA between, sent with either.
    let between = bench.ca.below("Site CA", validity.clone());
    let certificate = between.issue(NODE, &bench.key, validity);
    let mut answer = bench.healthy_but("certificate", json!(certificate));
    bench.check(answer.clone(), &[fault("unable to get local issuer certificate")]);
    answer["ca"] = json!(between.pem());
    bench.check(answer.clone(), &[]);
    answer["certificate"] = json!(format!("{certificate}{}", between.pem()));
    answer["ca"] = json!(bench.ca.pem());
    bench.check(answer, &[]);
}

#[test]
fn refuses_what_is_no_certificate_or_key() {
    let bench = Bench::new();
    for text in ["x", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"] {
        bench.check(
            bench.healthy_but("certificate", json!(text)),
            &[error("certificate holds no readable certificate: give it as PEM")],
        );
        bench.check(
            bench.healthy_but("ca", json!(text)),
            &[error("ca holds no readable certificate: give it as PEM")],
        );
    }
    bench.check(
        bench.healthy_but("key", json!("x")),
        &[error("bad key received: no PEM block found")],
    );
    let cut = "-----BEGIN PRIVATE KEY-----\nAAAA";
    bench.check(
        bench.healthy_but("key", json!(cut)),
        &[error("bad key received: the PEM block has no matching end")],
    );
}

#[test]
fn knows_what_a_node_drops_because_a_part_is_missing() {
    let bench = Bench { ssldir: "", ..Bench::new() };
    let made = key();
    let certificate = bench.ca.issue(NODE, &made, NOW - DAY..NOW + DAY);
    let made = String::from_utf8(made.private_key_to_pem_pkcs8().unwrap()).unwrap();
    let whole = [
        ("key", json!(made)),
        ("certificate", json!(certificate)),
        ("ca", json!(bench.ca.pem())),
        ("ssldir", json!("/ssl")),
    ];
    let but = |left_out: &[&str]| {
        let mut answer = configured(json!({}));
        for (name, value) in whole.iter().filter(|(name, _)| !left_out.contains(name)) {
            answer[*name] = value.clone();
        }
        answer
    };
    let text = |given: &str, missing: &str| {
        format!(
            "there is {given} without {missing}, and the node drops it silently: give all of certificate, ca and ssldir"
        )
    };
    bench.check(but(&[]), &[]);
    bench.check(but(&["ssldir"]), &[error(&text("key and certificate and ca", "ssldir"))]);
    bench.check(but(&["ca"]), &[error(&text("key and certificate", "ca"))]);
    bench.check(but(&["certificate"]), &[error(&text("key and ca", "certificate"))]);
    bench.check(
        but(&["certificate", "ca", "ssldir"]),
        &[error(&text("key", "certificate and ca and ssldir"))],
    );
    // The node's own directory will do.
    Bench { ssldir: "/node", ..Bench::new() }.check(
        {
            let mut answer = but(&["ssldir"]);
            answer["ca"] = json!(bench.ca.pem());
            answer
        },
        &[],
    );

    // Without a key the node keeps its own, and is only as it was.
    let no_csr = Bench { csr: None, ..bench };
    no_csr.check(but(&["key", "ca"]), &[warning(&text("certificate", "ca"))]);
    no_csr.check(but(&["key", "certificate"]), &[warning(&text("ca", "certificate"))]);
    no_csr.check(but(&["key", "certificate", "ca"]), &[]);
}

#[test]
fn refuses_policies_under_names_that_the_node_refuses_or_that_lead_elsewhere() {
    let bench = Bench::new();
    for (kind, suffix, names) in [
        (
            "action_policies",
            ".policy",
            ["rpcutil", "a.rego", "../a.policy", "x/a.policy", r"x\a.policy", "..policy"],
        ),
        (
            "opa_policies",
            ".rego",
            ["a.policy", "a.REGO", "/etc/a.rego", "..rego", "a\0.rego", "rego"],
        ),
    ] {
        for name in names {
            let mut answer = configured(json!({}));
            answer[kind] = json!({name: "x"});
            bench.check(
                answer,
                &[error(&format!(
                    "{kind} has the name {name:?}: names must end in {suffix} and hold no path"
                ))],
            );
        }
    }
}

#[test]
fn warns_of_an_upgrade_that_is_never_reached() {
    let bench = Bench::new();
    let answer = |version: &str| {
        let mut answer = configured(json!({}));
        answer["upgrade"] = json!(version);
        answer
    };
    bench.check(answer("0.30.0"), &[]);
    bench.check(answer("0.99.0.20260101"), &[]);
    bench.check(answer("very"), &[]);
    bench.check(answer(" 0.30.0\n"), &[]);
    for (version, fault) in [
        ("0.30.0-1", "a release"),
        ("0.30.0-rc1", "a release"),
        ("v0.30.0", "a leading v"),
        ("V1", "a leading v"),
        ("0.30 .0", "white space"),
        ("0.30.0\n0.31.0", "white space"),
    ] {
        bench.check(answer(version), &[warning(&format!(
                "the upgrade {version:?} holds {fault}, which is in no version that nodes report, so it could never be reached: give the bare version, like 0.30.0"
            ))]);
    }
    let off = Bench { upgrades: false, ..bench };
    off.check(answer(""), &[]);
    off.check(answer("v1"), &[warning(
            "there is an upgrade to \"v1\", but the feature upgrades is off: turn it on or leave it out",
        )]);
}

#[test]
fn refuses_what_is_too_large_for_the_broker() {
    let bench = Bench { max_payload: 200_000, ..Bench::new() };
    let answer = |length: usize| {
        let mut answer = configured(json!({"k": "<".repeat(length)}));
        answer["action_policies"] = json!({"a.policy": "p".repeat(1_000)});
        answer["opa_policies"] = json!({"b.rego": "r".repeat(2_000)});
        answer
    };
    bench.check(answer(100), &[]);
    assert!(!bench.was_measured.get(), "what is small enough in any case is not measured");
    bench.check(answer(60_000), &[]);
    assert!(bench.was_measured.get());
    bench.check(answer(70_000), &[error(
            "the answer makes a message of 220065 bytes and the broker takes 200000: \
             shorten the configuration (70045 bytes), policies (3014) or certificates (0), or raise max_payload of the broker",
        )]);
    // A server JWT is made after this check, and takes its place.
    let near = answer(63_000);
    bench.check(near.clone(), &[]);
    let issuer = bench.with(Enrollment::OrganizationIssuer);
    assert_eq!(issuer.findings(near).len(), 1);
}

/// A node, a CA, and a site.
struct Bench {
    ca: Ca,
    key: PKey<Private>,
    csr: Option<Csr>,
    enrollment: Enrollment,
    upgrades: bool,
    is_provisioning_default: bool,
    ssldir: &'static str,
    directory: &'static str,
    max_payload: usize,
    was_measured: Cell<bool>,
}

impl Bench {
    fn new() -> Bench {
        let key = key();
        Bench {
            ca: Ca::new("Test CA", NOW - DAY..NOW + DAY),
            csr: Some(csr(NODE, &key)),
            key,
            enrollment: Enrollment::Pki,
            upgrades: true,
            is_provisioning_default: true,
            ssldir: "/etc/choria/ssl",
            directory: "/etc/choria",
            max_payload: 1 << 20,
            was_measured: Cell::new(false),
        }
    }

    /// The same site with another way to give credentials.
    fn with(&self, enrollment: Enrollment) -> Bench {
        Bench {
            ca: Ca::new("Test CA", NOW - DAY..NOW + DAY),
            key: self.key.clone(),
            csr: self.csr.clone(),
            enrollment,
            was_measured: Cell::new(false),
            ..*self
        }
    }

    /// An answer that uses all there is.
    fn healthy(&self) -> Value {
        json!({
            "configuration": {
                "identity": NODE,
                "plugin.choria.server.provision": "0",
                "plugin.security.provider": "choria",
                "plugin.security.choria.token_file": "/etc/choria/server.jwt",
                "plugin.security.choria.seed_file": "/etc/choria/server.seed",
            },
            "certificate": self.ca.issue(NODE, &self.key, NOW - DAY..NOW + DAY),
            "ca": self.ca.pem(),
            "action_policies": {"rpcutil.policy": "policy default deny"},
            "opa_policies": {"default.rego": "package io.choria.mcorpc.authpolicy"},
            "server_claims": {"exp": NOW + 365 * DAY, "permissions": {"streams": true}},
            "upgrade": "0.30.0",
        })
    }

    fn healthy_but(&self, name: &str, value: Value) -> Value {
        let mut answer = self.healthy();
        answer[name] = value;
        answer
    }

    #[track_caller]
    fn check(&self, answer: Value, expected: &[(Severity, String)]) {
        let shown: String = answer.to_string().chars().take(500).collect();
        assert_eq!(self.findings(answer), expected, "{shown}");
    }

    fn findings(&self, answer: Value) -> Vec<(Severity, String)> {
        let answer = Answer::read(answer.to_string().as_bytes()).unwrap();
        let size_of = |body: &str| {
            self.was_measured.set(true);
            body.len() * 3
        };
        let features = Features { jwt: true, upgrades: self.upgrades, enrollment: self.enrollment };
        let known = Known {
            identity: &Identity::parse(NODE).unwrap(),
            is_provisioning_default: self.is_provisioning_default,
            csr: self.csr.as_ref(),
            ssldir: self.ssldir,
            directory: self.directory,
            site: Site {
                features,
                unix_time: NOW,
                room: Room { max_payload: self.max_payload, size_of: &size_of },
            },
        };
        let findings = lint(&answer, &known).into_iter();
        findings.map(|finding| (finding.severity, finding.text)).collect()
    }
}

/// A good configuration with `settings` added.
fn configured(settings: Value) -> Value {
    let mut configuration = json!({"plugin.choria.server.provision": "0"});
    for (name, value) in settings.as_object().unwrap() {
        configuration[name] = value.clone();
    }
    json!({"configuration": configuration})
}

fn warning(text: &str) -> (Severity, String) {
    (Severity::Warning, text.to_owned())
}

fn error(text: &str) -> (Severity, String) {
    (Severity::Error, text.to_owned())
}
