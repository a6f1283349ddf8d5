//! The practice fleet answers as a real Choria Server does: it is held against recorded traffic.

mod common;
mod fleet;

use std::sync::Arc;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use openssl::x509::X509;
use serde_json::{Value, json};

use common::{NatsServer, SOON, within};
use fleet::broker::Connection;
use fleet::certificates::Wanted;
use fleet::envelope::{NANOS_PER_SEC, Proof, Protocol, Reply, Request};
use fleet::event::{Encoding, Event, Kind};
use fleet::fault::{Action, Fault, parse_list};
use fleet::issuer::Organization;
use fleet::keys::{self, Said, Tokens};
use fleet::node::{Admission, Effect, Node, Now, Site};
use fleet::watch::{Checks, Trust, Watch};
use fleet::{Fleet, State, authority};

const NOW: i64 = 1_795_996_000;
const IDENTITY: &str = "n1.fleet.example.net";

#[test]
fn one_node_answers_every_recorded_request_as_the_real_one_did() {
    let mut scene = Scene::new(None);
    for line in include_str!("vectors/captures/node-answers.jsonl").lines() {
        let case: Value = serde_json::from_str(line).expect("the recording is JSON");
        let name = case["case"].as_str().expect("each case has a name");
        let replies = scene.ask(&case);
        let expected = &case["answer"];
        let count = expected["replies"].as_u64().unwrap_or(0);
        assert_eq!(replies.len() as u64, count, "{name}: number of replies");
        if count > 0 {
            compare(name, &expected["body"], &replies[0]);
        }
    }
}

#[test]
fn encodes_replies_byte_for_byte_as_recorded() {
    for set in [INSECURE, CERTIFICATES, ISSUER] {
        let mut seen = 0;
        for message in recorded(set) {
            let subject = text(&message["subject"]);
            let payload = text(&message["payload"]);
            // What streams say goes there too.
            if !subject.starts_with("provisioning.reply.") || !payload.contains(r#""protocol":""#) {
                continue;
            }
            let body;
            let document = document(payload.as_bytes());
            let reply = match set.protocol {
                Protocol::V1 => Reply {
                    protocol: Protocol::V1,
                    id: text(&document["envelope"]["requestid"]),
                    sender: text(&document["envelope"]["senderid"]),
                    transport_sender: text(&document["envelope"]["senderid"]),
                    agent: text(&document["envelope"]["agent"]),
                    nanos: document["envelope"]["time"].as_i64().expect("seconds") * NANOS_PER_SEC,
                    body: text(&document["message"]),
                    broker_url: "nats://broker.example.net:4222",
                    good_hash: true,
                },
                Protocol::V2 => {
                    body = STANDARD.decode(text(&document["message"])).expect("base64");
                    Reply {
                        protocol: Protocol::V2,
                        id: text(&document["request"]),
                        sender: text(&document["sender"]),
                        transport_sender: text(&document["sender"]),
                        agent: text(&document["agent"]),
                        nanos: document["time"].as_i64().expect("nanoseconds"),
                        body: std::str::from_utf8(&body).expect("a text"),
                        broker_url: "nats://broker.example.net:4222",
                        good_hash: true,
                    }
                }
            };
            assert_eq!(String::from_utf8_lossy(&reply.encode()), payload);
            seen += 1;
        }
        assert_eq!(seen, 6, "one discovery and five actions were recorded");
    }
}

#[test]
fn decodes_every_recorded_request() {
    for set in [INSECURE, CERTIFICATES, ISSUER] {
        let mut actions = Vec::new();
        for (_, request) in set.requests() {
            assert_eq!(request.caller, set.caller);
            assert!(
                request.reply_to.ends_with(&request.id),
                "{} for {}",
                request.reply_to,
                request.id
            );
            let body: Value = serde_json::from_slice(&request.body).unwrap_or_default();
            actions.push(body["action"].as_str().unwrap_or("ping").to_owned());
        }
        assert_eq!(actions, set.actions);
    }
}

#[test]
fn recorded_tokens_and_signatures_are_believed_and_no_others() {
    for checks in [Checks::AtOnce, Checks::Later] {
        check_belief(checks);
    }
}

fn check_belief(checks: Checks) {
    let issuer = include_str!("vectors/captures/issuer/issuer.public").trim();
    let new = |issuer: &str| {
        let trust = Trust::Issuer(issuer.to_owned());
        Watch::new(1, Protocol::V2, trust, checks)
    };
    let look = |watch: &Watch, subject: &str, request: &Request, now: i64| {
        match subject.strip_prefix("provisioning.node.") {
            Some(identity) => watch.directed(identity, "", request, now),
            None => watch.discovery(request, now),
        }
        watch.violations()
    };
    for (subject, request) in ISSUER.requests() {
        let good = &request;
        assert_eq!(look(&new(issuer), &subject, good, NOW), [""; 0]);
        // It makes no difference that the good one was believed before.
        let refused = |issuer: &str, request: &Request, now: i64, why: &str| {
            let believed = new(issuer);
            look(&believed, &subject, good, NOW);
            for watch in [new(issuer), believed] {
                let violations = look(&watch, &subject, request, now);
                assert!(violations.iter().any(|text| text.contains(why)), "{violations:?}");
            }
        };
        let stranger = Organization::new().public_key();
        refused(&stranger, &request, NOW, "token signature is invalid");
        refused(issuer, &request, NOW + 366 * 86_400, "token is expired");
        let mut changed = request.clone();
        changed.proof.signed[0] ^= 1;
        refused(issuer, &changed, NOW, "the signature is invalid");
        let other = Request { caller: "somebody".to_owned(), ..request.clone() };
        refused(issuer, &other, NOW, "of another caller");
        let old = Request { id: "2yY8AB06KFtlxl7ZvFjl4IXobqb".to_owned(), ..request.clone() };
        refused(issuer, &old, NOW, "is no KSUID of about");
        let token = include_str!("vectors/captures/issuer/server.jwt").to_owned();
        let server = Proof { credential: token, ..request.proof.clone() };
        let server = Request { proof: server, ..request.clone() };
        refused(issuer, &server, NOW, "not a client token");
    }
}

#[test]
fn recorded_certificates_and_signatures_are_believed_and_no_others() {
    let authority = X509::from_pem(include_bytes!("vectors/captures/x509/ca.pem"));
    let authority = authority.expect("it was recorded");
    let stranger = Wanted::new("x").authority().self_signed().certificate;
    for (_, request) in CERTIFICATES.requests() {
        let check = |authority: &X509, proof: &Proof, caller: &str, now: i64| {
            authority::check_request(authority, proof, caller, now)
        };
        let proof = &request.proof;
        // Those who made it did not set the name that its caller goes by.
        let caller = "choria=provisioner.choria";
        assert_eq!(check(&authority, proof, caller, NOW), Ok(()));
        let refused = |result: Result<(), String>, why: &str| {
            let error = result.expect_err(why);
            assert!(error.contains(why), "{error}");
        };
        refused(check(&authority, proof, &request.caller, NOW), "the certificate of");
        refused(check(&stranger, proof, caller, NOW), "the certificate is not good");
        refused(check(&authority, proof, caller, NOW + 366 * 86_400), "expired");
        let mut changed = proof.clone();
        changed.signed[0] ^= 1;
        refused(check(&authority, &changed, caller, NOW), "the signature is invalid");
        let none = Proof { credential: "insecure".to_owned(), ..proof.clone() };
        refused(check(&authority, &none, caller, NOW), "the certificate is none");
    }
}

#[test]
fn writes_events_byte_for_byte_as_recorded() {
    let mut seen = 0;
    for message in recorded(INSECURE) {
        let subject = text(&message["subject"]);
        let Some(rest) = subject.strip_prefix("choria.lifecycle.event.") else { continue };
        let kind = match rest.split_once('.').expect("type and component").0 {
            "startup" => Kind::Startup,
            "shutdown" => Kind::Shutdown,
            "provisioned" => Kind::Provisioned,
            other => panic!("unexpected event {other}"),
        };
        let payload = text(&message["payload"]);
        let value: Value = serde_json::from_str(payload).expect("events are JSON");
        let (data, encoding) = match value.get("data") {
            Some(data) => (data, Encoding::Cloud),
            None => (&value, Encoding::Legacy),
        };
        let event = Event {
            kind,
            identity: text(&data["identity"]),
            component: text(&data["component"]),
            id: text(&data["id"]),
            time: data["timestamp"].as_i64().expect("seconds"),
            version: data["version"].as_str().unwrap_or_default(),
            new_version: None,
        };
        assert_eq!(String::from_utf8_lossy(&event.encode(encoding)), payload);
        assert_eq!(kind.subject(event.component), subject);
        seen += 1;
    }
    assert_eq!(seen, 5);
}

#[test]
fn answers_a_request_for_another_schema_with_silence() {
    let good = request(
        &json!({"agent": "rpcutil", "body": {"agent": "rpcutil", "action": "ping", "data": {}}}),
    );
    let good = String::from_utf8(good).expect("requests are text");
    let is_good = |text: &str| Request::decode(Protocol::V1, text.as_bytes()).is_ok();
    assert!(is_good(&good));
    assert!(!is_good(""));
    assert!(!is_good(&good.replace("choria:transport:1", "choria:transport:2")));
    assert!(!is_good(&good.replace("\"reply-to\"", "\"reply_to\"")));
    let data = good.split('"').nth(7).expect("data is the second value");
    assert!(!is_good(&good.replace(data, "***")));
}

#[test]
fn a_lock_lasts_two_minutes_after_the_last_locked_call() {
    let mut scene = Scene::new(None);
    let jwt = |sender: &str| {
        json!({"agent": "choria_provision", "sender": sender,
        "body": {"agent": "choria_provision", "action": "jwt", "data": {"token": "s3cret"}}})
    };
    assert_eq!(scene.code(&jwt("a.example.net")), 0);
    scene.instant += Duration::from_secs(119);
    assert_eq!(scene.code(&jwt("b.example.net")), 1, "another one within the window");
    assert_eq!(scene.code(&jwt("a.example.net")), 0, "the owner, which renews it");
    scene.instant += Duration::from_secs(119);
    assert_eq!(scene.code(&jwt("b.example.net")), 1, "within the renewed window");
    scene.instant += Duration::from_secs(2);
    assert_eq!(scene.code(&jwt("b.example.net")), 0, "after it");
}

#[test]
fn a_restart_announces_itself_before_its_answer_and_swallows_what_follows() {
    let mut scene = Scene::new(None);
    scene.configure("0");
    let effects = scene.effects(&json!({"agent": "choria_provision",
        "body": {"agent": "choria_provision", "action": "restart", "data": {"token": "s3cret", "splay": 1}}}));
    match &effects[..] {
        [
            Effect::Publish { subject: event, .. },
            Effect::Leave { after, .. },
            Effect::Publish { subject: reply, payload, .. },
        ] => {
            assert_eq!(event, "choria.lifecycle.event.shutdown.provision_mode_server");
            assert_eq!(*after, Duration::from_secs(2));
            assert!(reply.starts_with("provisioning.reply."));
            let body = text(&document(payload)["message"]).to_owned();
            assert!(body.contains("Restarting Choria Server after 2s"), "{body}");
        }
        other => panic!("{other:?}"),
    }
    let again = json!({"agent": "choria_provision",
        "body": {"agent": "choria_provision", "action": "jwt", "data": {"token": "s3cret"}}});
    assert!(scene.ask(&again).is_empty());
    assert!(!scene.node.left(), "its settings end provisioning");
    assert!(scene.node.is_provisioned());
}

#[test]
fn a_node_whose_settings_do_not_end_provisioning_comes_back() {
    let mut scene = Scene::new(None);
    let body = json!({"agent": "choria_provision", "action": "configure",
        "data": {"token": "s3cret", "config": "{\"identity\":\"n1.fleet.example.net\"}"}});
    assert_eq!(scene.code(&json!({"agent": "choria_provision", "body": body})), 0);
    let body = json!({"agent": "choria_provision", "action": "restart", "data": {"token": "s3cret", "splay": 1}});
    assert_eq!(scene.code(&json!({"agent": "choria_provision", "body": body})), 0);
    assert!(scene.node.left());
}

#[test]
fn every_fault_reads_back_as_it_is_written() {
    let list = "gone=3, silent,silent-from:jwt,silent-after:jwt,gone-after:configure,reboots-after:jwt,holds:jwt,deaf:jwt:2,\
        slow:50ms,slow:50ms:jwt,locked,wrong-token,not-provisioning,skewed,bad-jwt,expired-jwt,other-cn,csr-not-pem,\
        nonce-signature,short-key,key-length:31,weak-key,wrong-hash,wrong-hash:jwt,forged-sender:jwt+right,undecodable-body,two-answers:jwt,\
        twice,data-null:jwt,data-missing:jwt.ecdh_public,data-number:inventory.version,status:jwt:5,configure-refused,\
        restart-lost,huge-inventory:1000,deep-inventory:1000,discovered-as:a b,event-storm:5,returns:1,\
        slow-update:50ms,update-in-vain";
    let faults = parse_list(list).expect("all are known");
    assert_eq!(faults[0], (3, Fault::Gone));
    for (_, fault) in faults {
        assert_eq!(fault.to_string().parse(), Ok(fault));
    }
    for action in Action::ALL {
        for fault in Fault::every_damage(action) {
            assert_eq!(fault.to_string().parse(), Ok(fault));
        }
    }
    for wrong in
        ["goner", "gone=x", "status:nope:1", "silent-after", "data-null", "data-null:jwt.nope"]
    {
        assert!(parse_list(wrong).is_err(), "{wrong}");
    }
}

#[test]
fn over_a_broker_a_node_announces_itself_is_found_answers_and_leaves() {
    let broker = NatsServer::start();
    let (sender, received) = mpsc::channel();
    let client = Arc::new(Connection::new(&broker.url(), "test", None));
    let reader = Arc::clone(&client);
    let thread = std::thread::spawn(move || {
        let subscribe = |connection: &Connection| {
            connection.subscribe(1, "choria.lifecycle.event.>");
            connection.subscribe(2, "provisioning.reply.>");
        };
        reader.run(&subscribe, &mut |delivery| {
            let _ = sender.send((delivery.subject.to_owned(), delivery.payload.to_vec()));
        });
    });
    assert!(client.settle(within(SOON)));
    let fleet = Fleet::builder(&broker.url())
        .node(IDENTITY)
        .broken("gone.example.net", Fault::Gone)
        .restart_delay(Duration::from_millis(50))
        .start();
    let next = || received.recv_timeout(SOON).expect("a message");

    let announced = [next().0, next().0];
    assert_eq!(announced, ["choria.lifecycle.event.startup.provision_mode_server"; 2]);
    let filter = json!({"fact": [], "cf_class": [], "agent": ["choria_provision"], "identity": [], "compound": []});
    let now = fleet::unix_now() - NOW;
    let ask = |subject: &str, case: &Value| {
        let mut case = case.clone();
        case["time_offset"] = now.into();
        client.publish(subject, &request(&case));
        client.flush();
    };
    ask(
        "provisioning.broadcast.agent.discovery",
        &json!({"agent": "discovery", "body": "cGluZw==", "filter": filter}),
    );
    let (_, pong) = next();
    assert_eq!(document(&pong)["envelope"]["senderid"], IDENTITY, "the one that is gone is silent");
    let subject = format!("provisioning.node.{IDENTITY}");
    let config = json!({"plugin.choria.server.provision": "0"}).to_string();
    for (action, data) in [
        ("configure", json!({"token": "s3cret", "config": config})),
        ("restart", json!({"token": "s3cret", "splay": 1})),
    ] {
        let body = json!({"agent": "choria_provision", "action": action, "data": data});
        ask(&subject, &json!({"agent": "choria_provision", "body": body}));
    }
    let events = ["provisioned", "", "shutdown", ""].map(|_| next().0);
    let kinds = events.map(|subject| subject.split('.').nth(3).unwrap_or_default().to_owned());
    assert_eq!(kinds[0], "provisioned");
    assert_eq!(kinds[2], "shutdown", "it goes out before the answer");
    let node = fleet.named(IDENTITY);
    let left = fleet.wait(within(SOON), |_| match node.state() {
        State::Provisioned => Ok(()),
        other => Err(other.word().to_owned()),
    });
    assert_eq!(left, Ok(()));
    // The same id twice, no `configure` inputs but two: the watch has seen it all.
    let violations = fleet.violations();
    assert!(violations.iter().any(|text| text.contains("for the second time")), "{violations:?}");
    assert!(violations.iter().any(|text| text.contains("without server_jwt")), "{violations:?}");
    client.stop();
    thread.join().expect("the reader ends");
}

/// One node and its clocks, without a broker.
struct Scene {
    site: Site,
    node: Node,
    instant: Instant,
}

impl Scene {
    fn new(fault: Option<Fault>) -> Scene {
        let mut node = Node::new(IDENTITY.to_owned(), fault);
        node.online = true;
        let said = Said {
            token: "s3cret",
            broker_url: "nats://127.0.0.1:4222",
            user: None,
            upgradable: false,
            protocol: Protocol::V1,
            time: NOW,
        };
        let site = Site {
            token: "s3cret".to_owned(),
            tokens: Tokens::new(keys::signing_key(), &said),
            component: "provision_mode_server".to_owned(),
            encoding: Encoding::Cloud,
            version: "0.30.2".to_owned(),
            upgradable: false,
            facts: "{}".to_owned(),
            restart_delay: Duration::from_secs(2),
            delay: Duration::ZERO,
            broker_url: "nats://127.0.0.1:4222".to_owned(),
            protocol: Protocol::V1,
            admission: Admission::Anybody,
            checks: Checks::AtOnce,
        };
        Scene { site, node, instant: Instant::now() }
    }

    fn effects(&mut self, case: &Value) -> Vec<Effect> {
        let mut effects = Vec::new();
        if let Ok(request) = Request::decode(Protocol::V1, &request(case)) {
            let now = Now { instant: self.instant, unix: NOW };
            self.node.receive(&self.site, &request, now, &mut effects);
        }
        effects
    }

    /// The bodies of all replies.
    fn ask(&mut self, case: &Value) -> Vec<String> {
        let effects = self.effects(case);
        let replies = effects.iter().filter_map(|effect| match effect {
            Effect::Publish { subject, payload, .. }
                if subject.starts_with("provisioning.reply.") =>
            {
                let document = document(payload);
                assert_eq!(document["envelope"]["senderid"], IDENTITY);
                assert_eq!(document["envelope"]["agent"], case["agent"]);
                Some(text(&document["message"]).to_owned())
            }
            _ => None,
        });
        replies.collect()
    }

    fn code(&mut self, case: &Value) -> u64 {
        let replies = self.ask(case);
        let body: Value = serde_json::from_str(&replies[0]).expect("an RPC reply");
        body["statuscode"].as_u64().expect("a code")
    }

    fn configure(&mut self, provision: &str) {
        let config = json!({"plugin.choria.server.provision": provision}).to_string();
        let body = json!({"agent": "choria_provision", "action": "configure", "data": {"token": "s3cret", "config": config}});
        assert_eq!(self.code(&json!({"agent": "choria_provision", "body": body})), 0);
    }
}

/// Builds the request of one recorded case.
fn request(case: &Value) -> Vec<u8> {
    let sender = case["sender"].as_str().unwrap_or("prov1.example.net");
    let body = match &case["body"] {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    let id = match case["case"].as_str() {
        Some("request id of 31 characters") => "0123456789abcdef0123456789abcde",
        _ => "0123456789abcdef0123456789abcdef",
    };
    let filter = case.get("filter").cloned().unwrap_or_else(
        || json!({"fact": [], "cf_class": [], "agent": [case["agent"]], "identity": [], "compound": []}),
    );
    let document = json!({
        "protocol": "choria:request:1",
        "message": body,
        "envelope": {
            "requestid": id,
            "senderid": sender,
            "callerid": case["caller"].as_str().unwrap_or("choria=prov1.example.net"),
            "collective": case["collective"].as_str().unwrap_or("provisioning"),
            "agent": case["agent"],
            "ttl": case["ttl"].as_i64().unwrap_or(60),
            "time": NOW + case["time_offset"].as_i64().unwrap_or(0),
            "filter": filter,
        }
    });
    let secure = json!({"protocol": "choria:secure:request:1", "message": document.to_string(),
        "signature": "insecure", "pubcert": "insecure"});
    let reply_to = format!("provisioning.reply.f233e84b1879ff8f207108d2dda253a5.{id}");
    format!(
        r#"{{"protocol":"choria:transport:1","data":"{}","headers":{{"reply-to":"{reply_to}","mc_sender":"{sender}","seen-by":[]}}}}"#,
        STANDARD.encode(secure.to_string())
    )
    .into_bytes()
}

/// Holds an answer against the recorded one: code and text, and the shape of the data.
fn compare(name: &str, recorded: &Value, answered: &str) {
    if let Value::String(text) = recorded {
        return assert_eq!(answered, text, "{name}");
    }
    let answered: Value = serde_json::from_str(answered).expect(name);
    for key in ["action", "statuscode"] {
        assert_eq!(answered[key], recorded[key], "{name}: {key}");
    }
    let (said, wanted) = (text(&answered["statusmsg"]), text(&recorded["statusmsg"]));
    // Behind these stand the words of Go's own decoder, or a random number.
    let go = ["json: ", "invalid character "].into_iter().find_map(|mark| wanted.find(mark));
    assert_eq!(
        said.get(..go.unwrap_or(said.len())),
        wanted.get(..go.unwrap_or(wanted.len())),
        "{name}"
    );
    shape(name, &recorded["data"], &answered["data"]);
}

fn shape(name: &str, recorded: &Value, answered: &Value) {
    match (recorded, answered) {
        (Value::Object(recorded), Value::Object(answered)) => {
            let keys =
                |map: &serde_json::Map<String, Value>| map.keys().cloned().collect::<Vec<_>>();
            assert_eq!(keys(recorded), keys(answered), "{name}: keys");
            for (key, value) in recorded {
                shape(&format!("{name}: {key}"), value, &answered[key]);
            }
        }
        (Value::String(recorded), Value::String(answered)) => {
            // Hex and PEM keep their length to within the parts that are random; fixed texts are equal.
            let random =
                ["-----BEGIN", "eyJ", "Shutting"].iter().any(|start| recorded.starts_with(start));
            let hex = recorded.len() >= 64 && recorded.bytes().all(|byte| byte.is_ascii_hexdigit());
            if hex {
                assert_eq!(recorded.len(), answered.len(), "{name}");
            } else if random {
                assert_eq!(recorded.get(..3), answered.get(..3), "{name}");
                if recorded.starts_with("-----BEGIN") {
                    assert!(recorded.len().abs_diff(answered.len()) < 9, "{name}: {answered}");
                }
            } else {
                assert_eq!(recorded, answered, "{name}");
            }
        }
        (Value::Number(_), Value::Number(_)) => {}
        (recorded, answered) => assert_eq!(recorded, answered, "{name}"),
    }
}

/// One recording.
#[derive(Clone, Copy)]
struct Recording {
    messages: &'static str,
    protocol: Protocol,
    caller: &'static str,
    actions: [&'static str; 6],
}

const INSECURE: Recording = Recording {
    messages: include_str!("vectors/captures/insecure/messages.jsonl"),
    protocol: Protocol::V1,
    caller: "choria=provisioner.example.net",
    actions: ["ping", "jwt", "inventory", "gencsr", "configure", "restart"],
};

const CERTIFICATES: Recording =
    Recording { messages: include_str!("vectors/captures/x509/messages.jsonl"), ..INSECURE };

const ISSUER: Recording = Recording {
    messages: include_str!("vectors/captures/issuer/messages.jsonl"),
    protocol: Protocol::V2,
    caller: "provisioner_signer",
    actions: ["ping", "jwt", "gen25519", "inventory", "configure", "restart"],
};

impl Recording {
    /// Every request to a node or to all, and its subject.
    fn requests(self) -> impl Iterator<Item = (String, Request)> {
        recorded(self).filter_map(move |message| {
            let subject = text(&message["subject"]);
            let is_one =
                subject.starts_with("provisioning.node.") || subject.contains(".broadcast.");
            let request = is_one.then(|| {
                Request::decode(self.protocol, text(&message["payload"]).as_bytes()).expect(subject)
            });
            Some((subject.to_owned(), request?))
        })
    }
}

fn recorded(recording: Recording) -> impl Iterator<Item = Value> {
    let lines = recording.messages.lines();
    lines.map(|line| serde_json::from_str(line).expect("the recording is JSON"))
}

/// The innermost document of a transport, its hash checked.
fn document(payload: &[u8]) -> Value {
    let transport: Value = serde_json::from_slice(payload).expect("a transport");
    let secure = STANDARD.decode(text(&transport["data"])).expect("base64");
    let secure: Value = serde_json::from_slice(&secure).expect("a secure document");
    let document = match secure["reply"].as_str() {
        Some(reply) => STANDARD.decode(reply).expect("base64"),
        None => text(&secure["message"]).into(),
    };
    if let Some(hash) = secure["hash"].as_str() {
        assert_eq!(hash, STANDARD.encode(openssl::sha::sha256(&document)));
    }
    serde_json::from_slice(&document).expect("a document")
}

#[track_caller]
fn text(value: &Value) -> &str {
    value.as_str().expect("a text")
}
