//! A bare request loop over the connection, against a broker on this machine: requests a second of 1, 4 and 16 threads, each
//! of which waits for its answer before it asks again. What answers is another connection of the same kind.
//!
//! `cargo bench --bench connection` prints a table; it needs `nats-server`, or the program that `NATS_SERVER` names.

#![expect(clippy::print_stdout, reason = "the figures are what it is for")]

#[path = "../tests/fleet/mod.rs"]
mod fleet;
mod measure;
#[path = "../tests/fleet/rig.rs"]
mod rig;

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use choria_provisioner::metrics::Metrics;
use choria_provisioner::protocol::subject::{Pattern, Subject};
use choria_provisioner::transport::address::ServerAddress;
use choria_provisioner::transport::connection::{Connection, Options};
use choria_provisioner::transport::{Publish, Transport};
use crossbeam_channel::bounded;
use parking_lot::Mutex;
use rig::{Broker, Folder};

/// How long each row is measured.
const TIME: Duration = Duration::from_secs(2);

/// About the size of a request to a node.
const REQUEST_BYTES: usize = 1_100;

/// How long an answer may take.
const SOON: Duration = Duration::from_secs(5);

fn main() -> Result<(), String> {
    let folder = Folder::create("choria-bench")?;
    let broker = Broker::start(&folder)?;
    let answering = connect(&broker.url)?;
    let answers = answering.clone();
    let _service = answering.subscribe(
        &Pattern::new("bench.node.*").map_err(|error| error.to_string())?,
        Arc::new(move |message| {
            let reply = message.reply.and_then(|reply| Subject::new(&reply).ok());
            if let Some(subject) = reply {
                // Whoever asked tells that there was no answer.
                let _ = answers.publish(&Publish::new(&subject, &message.payload));
            }
        }),
    );
    answering.flush(Instant::now() + SOON).map_err(|error| error.to_string())?;
    let asking = connect(&broker.url)?;

    println!("{:<10} {:>12} {:>12} {:>16}", "threads", "requests/s", "µs each", "broker, µs each");
    for threads in [1, 4, 16] {
        let broker_before = broker.process.usage().cpu_secs;
        let (count, took) = ask(&asking, threads);
        let broker_secs = broker.process.usage().cpu_secs - broker_before;
        println!(
            "{threads:<10} {:>12.0} {:>12.1} {:>16.1}",
            count as f64 / took.as_secs_f64(),
            took.as_secs_f64() * 1e6 * threads as f64 / count as f64,
            broker_secs * 1e6 / count as f64,
        );
    }
    for connection in [asking, answering] {
        connection.abort();
        connection.join();
    }
    Ok(())
}

fn connect(url: &str) -> Result<Arc<Connection>, String> {
    let server = ServerAddress::parse(url).map_err(|error| error.to_string())?;
    let connection = Connection::start(Options::new(vec![server], "bench", Metrics::new("bench")))
        .map_err(|error| error.to_string())?;
    let deadline = Instant::now() + SOON;
    while !connection.is_connected() {
        if Instant::now() > deadline {
            return Err(format!("no connection to {url}"));
        }
        thread::sleep(Duration::from_millis(1));
    }
    Ok(connection)
}

/// Requests answered, and the time they took.
fn ask(connection: &Arc<Connection>, threads: usize) -> (u64, Duration) {
    let waiting: Arc<Mutex<HashMap<String, crossbeam_channel::Sender<()>>>> = Arc::default();
    let replies = waiting.clone();
    let pattern = Pattern::new("bench.reply.*").expect("a valid pattern");
    let _subscription = connection.subscribe(
        &pattern,
        Arc::new(move |message| {
            let sender = replies.lock().remove(&message.subject);
            if let Some(sender) = sender {
                let _ = sender.send(());
            }
        }),
    );
    connection.flush(Instant::now() + SOON).expect("the broker answers");
    let (count, stop) = (AtomicU64::new(0), AtomicBool::new(false));
    let begun = Instant::now();
    thread::scope(|scope| {
        for thread in 0..threads {
            let (waiting, count, stop) = (&waiting, &count, &stop);
            scope.spawn(move || {
                let subject =
                    Subject::new(&format!("bench.node.n{thread}")).expect("a valid subject");
                let payload = vec![b'x'; REQUEST_BYTES];
                let (answered, answer) = bounded(1);
                for number in 0_u64.. {
                    if stop.load(Ordering::Relaxed) {
                        return;
                    }
                    let reply = Subject::new(&format!("bench.reply.{thread}-{number}"))
                        .expect("a valid subject");
                    waiting.lock().insert(reply.as_str().to_owned(), answered.clone());
                    let request =
                        Publish { reply: Some(&reply), ..Publish::new(&subject, &payload) };
                    connection.publish(&request).expect("the broker is there");
                    answer.recv_timeout(SOON).expect("an answer");
                    count.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        thread::sleep(TIME);
        stop.store(true, Ordering::Relaxed);
    });
    (count.load(Ordering::Relaxed), begun.elapsed())
}
