//! Several daemons on a broker with the accounts of a Choria Broker; in [`Scene`] one of them is elected.

use std::time::Duration;

use super::admin::with_socket;
use super::streams::Streams;
use super::{Builder, Daemon, SOON, wait_until};
use crate::fleet::Fleet;
use crate::fleet::streams::PASSWORD;

/// How many nodes a daemon has in hand.
pub const WORKERS: usize = 4;

/// A helper that gives a stop or a kill something to fall into.
pub const SLOW_HELPER: &str = r#"#!/bin/sh
IFS= read -r input
identity=${input#*'"identity":"'}
identity=${identity%%'"'*}
sleep 0.2
printf '{"configuration":{"identity":"%s","plugin.choria.server.provision":"0"}}\n' "$identity"
"#;

/// One of several daemons, with an identity and a caller of its own.
pub fn member(streams: &Streams, name: &str) -> Builder {
    let identity = format!("{name}.example.net");
    with_socket(Daemon::builder(&streams.broker.address()))
        .set("workers", WORKERS)
        .set("broker_provisioning_password", PASSWORD)
        .choria("identity", &identity)
        .env("MCOLLECTIVE_CERTNAME", &identity)
}

/// A broker with the two accounts of a Choria Broker and Choria Streams.
pub struct Scene {
    /// The broker.
    pub streams: Streams,
}

impl Scene {
    /// With a bucket in which a key lives for `ttl`.
    pub fn start(ttl: Duration) -> Scene {
        let scene = Scene::without_bucket();
        scene.streams.make_bucket(ttl);
        scene
    }

    /// Without the bucket.
    pub fn without_bucket() -> Scene {
        Scene { streams: Streams::start() }
    }

    /// A daemon that takes part in the election.
    pub fn daemon(&self, name: &str) -> Builder {
        member(&self.streams, name).set("leader_election", true)
    }

    /// One that leads.
    pub fn leader(&self, name: &str) -> Daemon {
        self.leader_with(name, |daemon| daemon)
    }

    /// One that leads, with more settings.
    pub fn leader_with(&self, name: &str, more: impl FnOnce(Builder) -> Builder) -> Daemon {
        let daemon = more(self.daemon(name)).start();
        self.wait_leads(&daemon);
        daemon
    }

    /// One that knows that another leads.
    pub fn candidate(&self, name: &str) -> Daemon {
        let daemon = self.daemon(name).start();
        wait_until(SOON, "it is a candidate", || {
            let status = daemon.get("/status.json");
            status.is_ok_and(|(_, status)| status.contains("\"election\":\"candidate\""))
        });
        daemon
    }

    /// Waits until it leads.
    #[track_caller]
    pub fn wait_leads(&self, daemon: &Daemon) {
        wait_until(SOON, "it leads", || daemon.metric("leader") > 0.0);
    }

    /// Nodes that announce themselves.
    pub fn fleet(&self, nodes: usize) -> Fleet {
        let fleet = Fleet::builder(&self.streams.broker.url()).provisioners(2);
        fleet.nodes(nodes).start()
    }
}
