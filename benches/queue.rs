//! How many nodes a second pass from their sighting through registry, work queue, workers and done queue into the finisher,
//! when provisioning itself takes no time: the most that the daemon's own book-keeping allows.
//!
//! `cargo bench --bench queue` prints nodes a second for several numbers of workers.

#![expect(clippy::print_stdout, reason = "the figures are what it is for")]

mod measure;

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use choria_provisioner::fleet::finisher::{Done, Finisher};
use choria_provisioner::fleet::history::History;
use choria_provisioner::fleet::registry::{Key, Limits, Sighting};
use choria_provisioner::fleet::roster::Roster;
use choria_provisioner::gate::{Gate, Reason};
use choria_provisioner::metrics::Metrics;
use choria_provisioner::node::{Outcome, Report};
use choria_provisioner::protocol::Identity;
use choria_provisioner::shutdown::Never;
use crossbeam_channel::{Receiver, bounded, select};
use measure::best_rate;

/// Nodes in one round.
const NODES: usize = 50_000;

/// As in the daemon.
const DONE_MAX: usize = 256;

fn main() {
    let identities: Arc<Vec<Identity>> = Arc::new(
        (0..NODES)
            .map(|at| Identity::parse(&format!("n{at}.fleet.example.net")).expect("a valid name"))
            .collect(),
    );
    println!("{:<10} {:>12}", "workers", "nodes/s");
    for workers in [1, 2, 8, 64] {
        let rate = best_rate(|| round(&identities, workers));
        println!("{workers:<10} {rate:>12.0}");
    }
}

/// Nodes a second.
fn round(identities: &Arc<Vec<Identity>>, workers: usize) -> f64 {
    let metrics = Metrics::new("bench");
    let gate = Arc::new(Gate::new());
    gate.open(Reason::Disconnected);
    let limits = Limits::new(Duration::from_secs(60), Duration::from_secs(1800));
    let (roster, queues) = Roster::new(limits, NODES, metrics.clone());
    let roster = Arc::new(roster);
    let (done, outcomes) = bounded(DONE_MAX);
    let finisher = Finisher {
        done: outcomes,
        roster: roster.clone(),
        gate,
        metrics: metrics.clone(),
        history: Arc::new(History::new(Instant::now())),
        audit: Arc::default(),
    };

    let begun = Instant::now();
    let finisher = thread::spawn(move || finisher.run());
    let sights = thread::spawn({
        let (roster, identities) = (roster.clone(), identities.clone());
        move || {
            for identity in identities.iter() {
                roster.sight(identity, Sighting::Discovery);
            }
        }
    });
    let (stop, stopped) = bounded::<Never>(0);
    let workers: Vec<_> = (0..workers)
        .map(|_| {
            let (roster, done) = (roster.clone(), done.clone());
            let (queue, stopped) = (queues.first.clone(), stopped.clone());
            thread::spawn(move || {
                while let Some(key) = next(&queue, &stopped) {
                    let now = Instant::now();
                    let taken = roster.registry().take(&key, now).expect("each key is somebody's");
                    let outcome =
                        Outcome::Provisioned { configured_at: now, restarted_at: Some(now) };
                    let report = Box::new(Report::new(outcome, ""));
                    if done
                        .send(Done { key, attempt: taken.attempt, took: Duration::ZERO, report })
                        .is_err()
                    {
                        return;
                    }
                }
            })
        })
        .collect();
    while metrics.provisioned.get() < NODES as u64 {
        thread::sleep(Duration::from_micros(100));
    }
    let took = begun.elapsed();
    drop((stop, done));
    for thread in workers.into_iter().chain([sights, finisher]) {
        thread.join().expect("nothing can go wrong");
    }
    NODES as f64 / took.as_secs_f64()
}

/// The next node, as long as there may be one.
fn next(queue: &Receiver<Key>, stopped: &Receiver<Never>) -> Option<Key> {
    select! {
        recv(queue) -> key => key.ok(),
        recv(stopped) -> _ => None,
    }
}
