//! A nats-server with the accounts of a Choria Broker and, once it was made, the bucket of an election.

use std::sync::Arc;
use std::time::Duration;

use choria_provisioner::metrics::Metrics;
use choria_provisioner::protocol::subject::Subject;
use choria_provisioner::secret::Secret;
use choria_provisioner::transport::address::ServerAddress;
use choria_provisioner::transport::connection::{Connection, Options};
use choria_provisioner::transport::login::Credentials;
use choria_provisioner::transport::{Publish, Transport};
use crossbeam_channel::unbounded;

use super::{NatsServer, SOON, TempDir, wait_until};

/// The broker, and a connection to the account that has the streams.
pub struct Streams {
    /// The broker.
    pub broker: NatsServer,
    streams: Arc<Connection>,
    _dir: TempDir,
}

impl Streams {
    /// Starts one without a bucket.
    pub fn start() -> Streams {
        let dir = TempDir::new("streams");
        let store = dir.path().join("store");
        let config = dir.write("broker.conf", &CONFIG.replace("STORE", &store.to_string_lossy()));
        let broker = NatsServer::configured(&config);
        let streams = connect(&broker, "choria", "choria");
        Streams { broker, streams, _dir: dir }
    }

    /// Makes the bucket, whose keys live for `ttl`.
    pub fn make_bucket(&self, ttl: Duration) {
        let ttl = ttl.as_nanos();
        let config = format!(
            r#"{{"name":"KV_CHORIA_LEADER_ELECTION","subjects":["$KV.CHORIA_LEADER_ELECTION.>"],"retention":"limits","max_consumers":-1,"max_msgs_per_subject":1,"max_msgs":-1,"max_bytes":-1,"max_age":{ttl},"max_msg_size":1024,"storage":"file","discard":"new","num_replicas":1,"duplicate_window":{},"deny_delete":true,"allow_rollup_hdrs":true,"allow_direct":true}}"#,
            ttl.min(120_000_000_000)
        );
        let made = self.ask("$JS.API.STREAM.CREATE.KV_CHORIA_LEADER_ELECTION", config.as_bytes());
        assert!(!made.contains("\"error\""), "{made}");
    }

    /// Asks for something in the account that has the streams.
    pub fn ask(&self, subject: &str, payload: &[u8]) -> String {
        let subject = Subject::new(subject).expect("a subject");
        let reply = Subject::new(&format!("answer.{}", fastrand::u64(..))).expect("a subject");
        let (sender, answers) = unbounded();
        let _subscription = self.streams.subscribe(
            &reply.clone().into(),
            Arc::new(move |message| drop(sender.send(message.payload))),
        );
        self.streams
            .publish(&Publish { reply: Some(&reply), ..Publish::new(&subject, payload) })
            .expect("the broker is there");
        let answer = answers.recv_timeout(SOON).expect("the broker answers");
        String::from_utf8(answer).expect("JSON is text")
    }
}

/// A connection of this user.
pub fn connect(broker: &NatsServer, user: &'static str, password: &'static str) -> Arc<Connection> {
    let servers = ServerAddress::parse_list(&broker.address()).expect("an address");
    let options = Options::new(servers, "test", Metrics::new("test"));
    let connection = Connection::start(Options {
        credentials: Box::new(move || {
            let user = Some((user.to_owned(), Secret::new(password)));
            Ok(Credentials { user, ..Credentials::default() })
        }),
        ..options
    });
    let connection = connection.expect("there are threads");
    wait_until(SOON, "connected", || connection.is_connected());
    connection
}

/// The two accounts, and what passes between them.
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
