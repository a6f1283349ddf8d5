//! A nats-server with the accounts of a Choria Broker and, once it was made, the bucket of an election.

use std::time::Duration;

use super::{NatsServer, TempDir};
use crate::fleet::streams::{self, Member};

/// The broker, and somebody in the account that has the streams.
pub struct Streams {
    /// The broker.
    pub broker: NatsServer,
    member: Member,
    dir: TempDir,
}

impl Streams {
    /// Starts one without a bucket.
    pub fn start() -> Streams {
        let dir = TempDir::new("streams");
        let config = dir.write("broker.conf", &streams::config(&dir.path().join("store")));
        let broker = NatsServer::configured(&config);
        let member = Member::of_streams(&broker.address());
        Streams { broker, member, dir }
    }

    /// Restarts the broker with its usual configuration, edited.
    pub fn edit(&mut self, edit: impl FnOnce(&str) -> String) {
        let config = streams::config(&self.dir.path().join("store"));
        self.dir.write("broker.conf", &edit(&config));
        self.broker.restart();
    }

    /// Makes the bucket, whose keys live for `ttl`.
    pub fn make_bucket(&self, ttl: Duration) {
        self.member.make_bucket(ttl);
    }

    /// Asks for something in the account that has the streams.
    pub fn ask(&self, subject: &str, payload: &[u8]) -> String {
        self.member.ask(subject, payload)
    }
}
