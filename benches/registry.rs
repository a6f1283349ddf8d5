//! What a known node costs the registry: nanoseconds of each operation among 100,000 others, and bytes.
//!
//! `cargo bench --bench registry` prints a table.

#![expect(clippy::print_stdout, reason = "the figures are what it is for")]

mod measure;

use std::time::{Duration, Instant};

use choria_provisioner::fleet::registry::{Key, Limits, Queue, Registry, Sighted, Sighting};
use choria_provisioner::node::{Outcome, Report};
use choria_provisioner::protocol::Identity;
use measure::resident_bytes;

/// Nodes known.
const NODES: usize = 100_000;

/// The best of so many rounds counts: the others were disturbed.
const ROUNDS: usize = 3;

fn main() {
    let best = (0..ROUNDS).map(|_| Costs::measure()).reduce(Costs::min);
    let Some(costs) = best else { return };
    println!("{:<52} {:>10}", format!("with {NODES} nodes"), "ns");
    for (name, nanos) in costs.nanos {
        println!("{name:<52} {nanos:>10.0}");
    }
    println!("{:<52} {:>10}", "", "bytes");
    for (name, bytes) in costs.bytes {
        println!("{name:<52} {bytes:>10.0}");
    }
}

/// The table.
struct Costs {
    nanos: [(&'static str, f64); 7],
    bytes: [(&'static str, f64); 2],
}

impl Costs {
    fn measure() -> Costs {
        let identities: Vec<Identity> = (0..NODES)
            .map(|at| Identity::parse(&format!("n{at}.fleet.example.net")).expect("a valid name"))
            .collect();
        let before = resident_bytes();
        // The registry keeps a copy of the name for each node; so does whoever shows it one.
        let mut registry =
            Registry::new(Limits::new(Duration::from_secs(60), Duration::from_secs(1800)));
        let mut keys: Vec<Key> = Vec::with_capacity(NODES);
        let mut now = Instant::now();
        let mut sight = |registry: &mut Registry, identity: &Identity, now: Instant| {
            let mut push = |_: Queue, key: &Key| {
                keys.push(key.clone());
                true
            };
            let event = Sighting::Event { id: "2yY8AB06KFtlxl7ZvFjl4IXobqb" };
            registry.sight(identity, event, now, &mut push)
        };
        let new = each(&identities, |identity| {
            let sighted = sight(&mut registry, identity, now);
            assert!(matches!(sighted, Sighted::Queued(_)), "{sighted:?}");
        });
        let queued_bytes = resident_bytes().saturating_sub(before);
        let known = each(&identities, |identity| {
            let sighted = registry.sight(identity, Sighting::Discovery, now, &mut |_, _| false);
            assert_eq!(sighted, Sighted::Known);
        });
        now += Duration::from_secs(1);
        let take = each(&keys, |key| assert!(registry.take(key, now).is_some()));
        let failed = Report::new(
            Outcome::Failed,
            "choria_provision#configure failed: no answer, tried 5 times",
        );
        let fail = each(&keys, |key| {
            registry.finish(key, &failed, now, false, false, &mut |_, _| false);
        });
        let waiting_bytes = resident_bytes().saturating_sub(before);
        // Again, for success.
        let mut again: Vec<Key> = Vec::with_capacity(NODES);
        let retry = each(&identities, |identity| {
            registry.sight(identity, Sighting::Operator, now, &mut |_, key| {
                again.push(key.clone());
                true
            });
        });
        for key in &again {
            registry.take(key, now);
        }
        let provisioned =
            Report::new(Outcome::Provisioned { configured_at: now, restarted_at: Some(now) }, "");
        let succeed = each(&again, |key| {
            registry.finish(key, &provisioned, now, false, false, &mut |_, _| false);
        });
        let begun = Instant::now();
        let swept = registry.sweep(now + Duration::from_secs(3600));
        let sweep = begun.elapsed().as_secs_f64() * 1e9 / swept.settled.max(1) as f64;
        Costs {
            nanos: [
                ("a new node is seen", new),
                ("a queued one is seen again", known),
                ("a node is taken", take),
                ("its attempt fails", fail),
                ("it is seen again and queued", retry),
                ("its attempt ends well", succeed),
                ("it has settled and goes", sweep),
            ],
            bytes: [
                ("a queued node, with its queue element", queued_bytes as f64 / NODES as f64),
                ("a failed node, with its reason", waiting_bytes as f64 / NODES as f64),
            ],
        }
    }

    fn min(mut self, other: Costs) -> Costs {
        for (one, other) in self.nanos.iter_mut().zip(other.nanos) {
            one.1 = one.1.min(other.1);
        }
        // The first round counts: later ones find memory that was given back.
        self
    }
}

/// Nanoseconds for one of `items`.
fn each<T>(items: &[T], mut call: impl FnMut(&T)) -> f64 {
    let begun = Instant::now();
    items.iter().for_each(&mut call);
    begun.elapsed().as_secs_f64() * 1e9 / items.len().max(1) as f64
}
