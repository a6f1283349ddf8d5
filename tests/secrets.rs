//! What is secret stays with us: nothing that the daemon writes, shows or hands to its helper holds any of it.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;
mod fleet;

use std::collections::BTreeMap;
use std::fs;

use common::choria_broker::Site;
use common::{Daemon, SOON, within};
use fleet::certificates::Wanted;
use fleet::network::{PASSWORD, Setup};
use fleet::{Fault, Fleet};
use serde_json::json;

const TOKEN: &str = "a-provisioning-token-of-its-own";

/// Keeps all it can learn from where it runs, and hands out what was prepared; of a node for which nothing was, it complains.
const CURIOUS: &str = r#"#!/bin/sh
IFS= read -r input
identity=${input#*'"identity":"'}
identity=${identity%%'"'*}
{ env; tr '\0' '\n' </proc/$$/cmdline; tr '\0' '\n' </proc/$PPID/cmdline; } >>"${0%/*}/learned"
exec cat "${0%/*}/answers/$identity"
"#;

#[test]
fn no_secret_leaves_a_daemon_with_certificates() {
    let site = Site::new(Setup::X509);
    let fleet = site.troubled_fleet();
    let key = Wanted::new("x").rsa().signed_by(&site.network.authority).key;
    let pem = String::from_utf8(key.rsa().unwrap().private_key_to_pem().unwrap()).unwrap();
    let answer = |name: &str| {
        let wanted = Wanted::new(name).key(key.clone());
        json!({
            "configuration": {"identity": name, "plugin.choria.server.provision": "0"},
            "certificate": wanted.signed_by(&site.network.authority).certificate_pem(),
            "ca": site.network.authority.certificate_pem(),
            "key": pem,
            "ssldir": "/etc/choria/ssl",
        })
    };
    let mut seen = site.run(&fleet, answer);
    seen.check("a node's private key", &pem);
    seen.check("our private key", &site.read("own.key"));
    assert_eq!(
        fleet.node(0).received().unwrap().key,
        Some(key.rsa().unwrap().private_key_to_der().unwrap())
    );
}

#[test]
fn no_secret_leaves_a_daemon_with_tokens() {
    let site = Site::new(Setup::Issuer);
    let fleet = site.troubled_fleet();
    let answer = |name: &str| {
        json!({
            "configuration": {"identity": name, "plugin.choria.server.provision": "0"},
        })
    };
    let mut seen = site.run(&fleet, answer);
    for name in ["signer.seed", "signer.jwt"] {
        seen.check(name, &site.read(name));
    }
    seen.check("the issuer's seed", &site.network.organization.seed());
    let received = fleet.iter().filter_map(|node| node.received());
    let tokens: Vec<String> = received.map(|received| received.server_jwt).collect();
    assert_eq!(tokens.len(), 5);
    for token in tokens {
        seen.check("a server JWT", &token);
    }
}

impl Site {
    fn read(&self, name: &str) -> String {
        fs::read_to_string(self.network.path(name)).unwrap()
    }

    /// Healthy nodes, and some whose troubles are talked about.
    fn troubled_fleet(&self) -> Fleet {
        let fleet = self.fleet(5).token(TOKEN);
        fleet
            .broken("unprepared.example.net", Fault::ConfigureRefused)
            .broken("token.example.net", Fault::WrongToken)
            .broken("jwt.example.net", "bad-jwt".parse().unwrap())
            .broken("refuses.example.net", Fault::ConfigureRefused)
            .start_quietly()
    }

    fn curious_daemon(&self) -> common::Builder {
        self.daemon()
            .set("token", TOKEN)
            // Where the original has it from, if the client file names a user.
            .env("MCOLLECTIVE_NATS_USERNAME", "provisioner")
            .env("MCOLLECTIVE_NATS_PASSWORD", PASSWORD)
            .helper(CURIOUS)
    }

    /// Lets a daemon go through good and bad times, and looks at all that comes out of it.
    fn run(&self, fleet: &Fleet, answer: impl Fn(&str) -> serde_json::Value) -> Seen {
        self.broker.change(|rules| rules.password = Some("another".to_owned()));
        let builder = self.curious_daemon();
        let answers = builder.dir().join("answers");
        fs::create_dir(&answers).unwrap();
        for node in fleet.iter().filter(|node| node.identity() != "unprepared.example.net") {
            let answer = answer(&node.identity()).to_string();
            fs::write(answers.join(node.identity()), answer).unwrap();
        }
        let mut daemon = builder.start();
        self.broker.refusals(2);
        let mut seen = Seen(BTreeMap::new());
        seen.pages(&daemon, "while refused");
        self.broker.change(|rules| rules.password = Some(PASSWORD.to_owned()));
        daemon.wait_ready();
        fleet.announce();
        fleet.wait_all_provisioned(within(SOON)).expect("provisioned");
        for name in ["unprepared", "token", "jwt", "refuses"] {
            daemon.wait_logged(SOON * 2, &["Could not provision", &format!("{name}.example.net")]);
        }
        // A broken renewal is talked about, too.
        for name in ["own.key", "signer.seed"] {
            let good = self.read(name);
            self.network.write_text(name, &good[..good.len() - 20]).unwrap();
            self.broker.hang_up();
            seen.note(name, good);
        }
        daemon.wait_logged(SOON, &["could not connect", "could not read"]);
        for name in ["own.key", "signer.seed"] {
            let good = seen.0.remove(name).unwrap();
            self.network.write_text(name, &good).unwrap();
        }
        seen.pages(&daemon, "at the end");
        assert!(daemon.stop().success());
        seen.note("the log", daemon.log());
        let learned = fs::read_to_string(daemon.dir().join("learned")).unwrap();
        assert!(learned.contains("PATH=") && learned.contains("--choria-config"), "{learned}");
        seen.note("what the helper learned", learned);
        for (what, secret) in [
            ("the password", PASSWORD),
            ("the provisioning token", TOKEN),
            ("the nodes' provisioning JWT", fleet.provisioning_jwt()),
        ] {
            seen.check(what, secret);
        }
        seen
    }
}

/// Everything that came out, by where.
struct Seen(BTreeMap<String, String>);

impl Seen {
    fn note(&mut self, place: &str, text: String) {
        self.0.insert(place.to_owned(), text);
    }

    fn pages(&mut self, daemon: &Daemon, when: &str) {
        for path in ["/metrics", "/readyz", "/livez", "/status.json", "/"] {
            let (_, body) = daemon.get(path).unwrap();
            self.note(&format!("{path} {when}"), body);
        }
    }

    /// That no line of `secret`, nor the half of it, is anywhere.
    #[track_caller]
    fn check(&mut self, what: &str, secret: &str) {
        let lines: Vec<&str> = secret.lines().filter(|line| !line.starts_with("-----")).collect();
        // All but the end of a key, which may be short enough to stand anywhere.
        for line in &lines[..lines.len().max(2) - 1] {
            let half = &line[..line.len() / 2];
            for (place, text) in &self.0 {
                assert!(!text.contains(half), "{what} is in {place}");
            }
        }
    }
}
