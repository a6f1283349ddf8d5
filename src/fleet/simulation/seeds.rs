//! Runs a simulation with one seed after the other, on all cores.

use std::env;
use std::panic;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use parking_lot::Mutex;

/// So many that fail are enough to look at.
const FAILURES_MAX: usize = 8;

/// Runs the seeds from 0 on, and puts together what they saw: `usual` of them, or as many as `NAME_SEEDS` says. Says how
/// many there were, too. With `NAME_SEED` runs that one alone, traced, and nothing is to be concluded from it.
///
/// # Panics
///
/// If a seed does. `filter` is the test's path, to say how to run it again.
pub fn run<S: Default + Send>(
    name: &str,
    filter: &str,
    usual: u64,
    run: fn(seed: u64, is_traced: bool) -> S,
    add: fn(&mut S, &S),
) -> Option<(u64, S)> {
    if let Some(seed) = number(&format!("{name}_SEED")) {
        run(seed, true);
        return None;
    }
    let seeds = number(&format!("{name}_SEEDS")).unwrap_or(usual);
    // The machine's cores share the seeds.
    let threads = thread::available_parallelism().map_or(2, |cores| cores.get());
    let next = AtomicU64::new(0);
    let failed = Mutex::new(Vec::new());
    let work = || {
        let mut seen = S::default();
        loop {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= seeds || failed.lock().len() >= FAILURES_MAX {
                return seen;
            }
            match panic::catch_unwind(|| run(seed, false)) {
                Ok(more) => add(&mut seen, &more),
                Err(_) => failed.lock().push(seed),
            }
        }
    };
    let mut seen = S::default();
    thread::scope(|scope| {
        let runs: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        for run in runs {
            add(&mut seen, &run.join().expect("panics are caught"));
        }
    });
    let failed = failed.into_inner();
    let command = format!("cargo test --lib {filter} -- --nocapture");
    assert!(
        failed.is_empty(),
        "seeds {failed:?} failed; replay one with: {name}_SEED={} {command}",
        failed[0]
    );
    Some((seeds, seen))
}

fn number(variable: &str) -> Option<u64> {
    let value = env::var(variable).ok()?;
    Some(value.parse().unwrap_or_else(|_| panic!("{variable} is a number")))
}
