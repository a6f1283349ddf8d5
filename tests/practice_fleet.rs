//! The practice fleet answers as a real Choria Server does: it is held against recorded traffic.

mod common;
mod fleet;

use std::sync::Arc;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};

use common::{NatsServer, SOON, within};
use fleet::broker::Connection;
use fleet::envelope::{Reply, Request};
use fleet::event::{Encoding, Event, Kind};
use fleet::fault::{Action, Fault, parse_list};
use fleet::keys::Tokens;
use fleet::node::{Effect, Node, Now, Site};
use fleet::{Fleet, State};

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
    let mut seen = 0;
    for message in recorded() {
        let subject = text(&message["subject"]);
        let Some(id) =
            subject.strip_prefix("provisioning.reply.").and_then(|rest| rest.split('.').nth(1))
        else {
            continue;
        };
        let payload = text(&message["payload"]);
        let document = document(payload.as_bytes());
        let reply = Reply {
            id,
            sender: text(&document["envelope"]["senderid"]),
            transport_sender: text(&document["envelope"]["senderid"]),
            agent: text(&document["envelope"]["agent"]),
            time: document["envelope"]["time"].as_i64().expect("time is a number"),
            body: text(&document["message"]),
            broker_url: "nats://broker.example.net:4222",
            good_hash: true,
        };
        assert_eq!(String::from_utf8_lossy(&reply.encode()), payload);
        seen += 1;
    }
    assert_eq!(seen, 6, "one discovery and five actions were recorded");
}

#[test]
fn decodes_every_recorded_request() {
    let mut actions = Vec::new();
    for message in recorded() {
        let subject = text(&message["subject"]);
        if subject.starts_with("provisioning.node.") || subject.contains(".broadcast.") {
            let request = Request::decode(text(&message["payload"]).as_bytes()).expect(subject);
            assert_eq!(request.caller, "choria=provisioner.example.net");
            assert!(
                request.reply_to.ends_with(&request.id),
                "{} for {}",
                request.reply_to,
                request.id
            );
            let body: Value = serde_json::from_slice(&request.body).unwrap_or_default();
            actions.push(body["action"].as_str().unwrap_or("ping").to_owned());
        }
    }
    assert_eq!(actions, ["ping", "jwt", "inventory", "gencsr", "configure", "restart"]);
}

#[test]
fn writes_events_byte_for_byte_as_recorded() {
    let mut seen = 0;
    for message in recorded() {
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
    assert!(Request::decode(good.as_bytes()).is_ok());
    assert!(Request::decode(b"").is_err());
    assert!(
        Request::decode(good.replace("choria:transport:1", "choria:transport:2").as_bytes())
            .is_err()
    );
    assert!(Request::decode(good.replace("\"reply-to\"", "\"reply_to\"").as_bytes()).is_err());
    let data = good.split('"').nth(7).expect("data is the second value");
    assert!(Request::decode(good.replace(data, "***").as_bytes()).is_err());
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
    let list = "gone=3, silent,silent-from:jwt,silent-after:jwt,gone-after:configure,reboots-after:jwt,deaf:jwt:2,\
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
    let client = Arc::new(Connection::new(&broker.url(), "test"));
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
        let site = Site {
            token: "s3cret".to_owned(),
            tokens: Tokens::new("s3cret", "nats://127.0.0.1:4222", false, NOW),
            component: "provision_mode_server".to_owned(),
            encoding: Encoding::Cloud,
            version: "0.30.2".to_owned(),
            upgradable: false,
            facts: "{}".to_owned(),
            restart_delay: Duration::from_secs(2),
            delay: Duration::ZERO,
            broker_url: "nats://127.0.0.1:4222".to_owned(),
            organization: None,
        };
        Scene { site, node, instant: Instant::now() }
    }

    fn effects(&mut self, case: &Value) -> Vec<Effect> {
        let mut effects = Vec::new();
        if let Ok(request) = Request::decode(&request(case)) {
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

fn recorded() -> impl Iterator<Item = Value> {
    let lines = include_str!("vectors/captures/insecure/messages.jsonl").lines();
    lines.map(|line| serde_json::from_str(line).expect("the recording is JSON"))
}

/// The innermost document of a transport, its hash checked.
fn document(payload: &[u8]) -> Value {
    let transport: Value = serde_json::from_slice(payload).expect("a transport");
    let secure = STANDARD.decode(text(&transport["data"])).expect("base64");
    let secure: Value = serde_json::from_slice(&secure).expect("a secure document");
    let message = text(&secure["message"]);
    if let Some(hash) = secure["hash"].as_str() {
        assert_eq!(hash, STANDARD.encode(openssl::sha::sha256(message.as_bytes())));
    }
    serde_json::from_str(message).expect("a document")
}

#[track_caller]
fn text(value: &Value) -> &str {
    value.as_str().expect("a text")
}
