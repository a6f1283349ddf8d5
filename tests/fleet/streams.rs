//! A broker with the two accounts of a Choria Broker, and Choria Streams with the bucket of an election.

// Each program uses its own part of this.
#![allow(dead_code)]

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use choria_provisioner::metrics::Metrics;
use choria_provisioner::protocol::subject::{Pattern, Subject};
use choria_provisioner::secret::Secret;
use choria_provisioner::transport::address::ServerAddress;
use choria_provisioner::transport::connection::{Connection, Options};
use choria_provisioner::transport::login::Credentials;
use choria_provisioner::transport::{Publish, Subscription, Transport};
use crossbeam_channel::{Receiver, unbounded};

/// The password of user `provisioner`.
pub const PASSWORD: &str = "provSecret";

/// The key of the election.
pub const KEY: &str = "$KV.CHORIA_LEADER_ELECTION.provisioner";

/// How long the broker may take for anything.
const ANSWER_MAX: Duration = Duration::from_secs(20);

/// The broker's configuration, with its streams in this folder.
pub fn config(store: &Path) -> String {
    CONFIG.replace("STORE", &store.to_string_lossy())
}

/// Somebody in one of the accounts.
pub struct Member(Arc<Connection>);

impl Member {
    /// In the account that has the streams, on the broker at `address`.
    pub fn of_streams(address: &str) -> Member {
        Member::enter(address, "choria", "choria")
    }

    /// Where nodes wait, with a provisioner's permissions.
    pub fn of_provisioners(address: &str) -> Member {
        Member::enter(address, "provisioner", PASSWORD)
    }

    fn enter(address: &str, user: &'static str, password: &'static str) -> Member {
        let servers = ServerAddress::parse_list(address).expect("an address");
        let options = Options::new(servers, "test", Metrics::new("test"));
        let connection = Connection::start(Options {
            credentials: Box::new(move || {
                let user = Some((user.to_owned(), Secret::new(password)));
                Ok(Credentials { user, ..Credentials::default() })
            }),
            ..options
        });
        let member = Member(connection.expect("there are threads"));
        member.settle();
        member
    }

    /// Waits until the broker has taken all that was sent.
    pub fn settle(&self) {
        let deadline = Instant::now() + ANSWER_MAX;
        while self.0.flush(deadline).is_err() {
            assert!(Instant::now() < deadline, "the broker does not answer");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Makes the bucket, in which a key lives for `ttl`.
    pub fn make_bucket(&self, ttl: Duration) {
        let ttl = ttl.as_nanos();
        let config = format!(
            r#"{{"name":"KV_CHORIA_LEADER_ELECTION","subjects":["$KV.CHORIA_LEADER_ELECTION.>"],"retention":"limits","max_consumers":-1,"max_msgs_per_subject":1,"max_msgs":-1,"max_bytes":-1,"max_age":{ttl},"max_msg_size":1024,"storage":"file","discard":"new","num_replicas":1,"duplicate_window":{},"deny_delete":true,"allow_rollup_hdrs":true,"allow_direct":true}}"#,
            ttl.min(120_000_000_000)
        );
        let made = self.ask("$JS.API.STREAM.CREATE.KV_CHORIA_LEADER_ELECTION", config.as_bytes());
        assert!(!made.contains("\"error\""), "{made}");
    }

    /// Asks for something and waits for the answer.
    pub fn ask(&self, subject: &str, payload: &[u8]) -> String {
        let subject = Subject::new(subject).expect("a subject");
        let reply = Subject::new(&format!("answer.{}", fastrand::u64(..))).expect("a subject");
        let (sender, answers) = unbounded();
        let _subscription = self.0.subscribe(
            &reply.clone().into(),
            Arc::new(move |message| drop(sender.send(message.payload))),
        );
        self.0
            .publish(&Publish { reply: Some(&reply), ..Publish::new(&subject, payload) })
            .expect("the broker is there");
        let answer = answers.recv_timeout(ANSWER_MAX).expect("the broker answers");
        String::from_utf8(answer).expect("JSON is text")
    }

    /// Says something.
    pub fn publish(&self, subject: &Subject, payload: &[u8]) {
        self.0.publish(&Publish::new(subject, payload)).expect("the broker is there");
    }

    /// What is sent to these subjects from now on, while the first value lives.
    pub fn watch(&self, pattern: &str) -> (Subscription, Receiver<Heard>) {
        let (sender, messages) = unbounded();
        let subscription = self.0.subscribe(
            &Pattern::new(pattern).expect("a pattern"),
            Arc::new(move |message| {
                let (subject, payload) = (message.subject, message.payload);
                drop(sender.send(Heard { at: Instant::now(), subject, payload }));
            }),
        );
        self.settle();
        (subscription, messages)
    }
}

/// A message somebody else sent.
#[derive(Debug)]
pub struct Heard {
    /// When it came here.
    pub at: Instant,
    /// Where it was sent.
    pub subject: String,
    /// What it says.
    pub payload: Vec<u8>,
}

impl Heard {
    /// Who sent it, if it is a request.
    pub fn sender(&self) -> Option<String> {
        let transport: serde_json::Value = serde_json::from_slice(&self.payload).ok()?;
        Some(transport["headers"]["mc_sender"].as_str()?.to_owned())
    }
}

const CONFIG: &str = r#"
jetstream { store_dir: "STORE" }
no_auth_user: node
accounts {
  choria: {
    jetstream: enabled
    users: [ {user: choria, password: choria} ]
    exports: [
      {service: "$JS.API.STREAM.INFO.KV_CHORIA_LEADER_ELECTION", accounts: [provisioning]}
      {service: "$KV.CHORIA_LEADER_ELECTION.provisioner", accounts: [provisioning]}
    ]
    imports: [ {stream: {account: provisioning, subject: "choria.lifecycle.>"}} ]
  }
  provisioning: {
    users: [
      {user: provisioner, password: provSecret}
      {user: node, password: node, permissions: {
        subscribe: {allow: ["provisioning.node.>", "provisioning.broadcast.agent.discovery",
          "provisioning.broadcast.agent.rpcutil", "provisioning.broadcast.agent.choria_util",
          "provisioning.broadcast.agent.choria_provision"]}
        publish: {allow: ["choria.lifecycle.>", "provisioning.reply.>", "provisioning.registration.>"]}
      }}
    ]
    exports: [ {stream: "choria.lifecycle.>", accounts: [choria]} ]
    imports: [
      {service: {account: choria, subject: "$JS.API.STREAM.INFO.KV_CHORIA_LEADER_ELECTION"},
       to: "choria.streams.STREAM.INFO.KV_CHORIA_LEADER_ELECTION"}
      {service: {account: choria, subject: "$KV.CHORIA_LEADER_ELECTION.provisioner"}}
      {service: {account: choria, subject: "$KV.CHORIA_LEADER_ELECTION.provisioner"},
       to: "choria.streams.$KV.CHORIA_LEADER_ELECTION.provisioner"}
    ]
  }
}
"#;
