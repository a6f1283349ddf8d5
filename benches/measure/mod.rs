//! How the benches measure: plain wall-clock time, the best of a few rounds, a small table. Nothing here asserts a time.

// Each bench uses its own part of this.
#![allow(dead_code)]

use std::fs;
use std::time::{Duration, Instant};

/// How long each row is measured, in each round.
const ROUND: Duration = Duration::from_millis(100);

/// The best of so many rounds counts: the others were disturbed.
pub const ROUNDS: usize = 7;

/// Nanoseconds a call.
pub fn nanos(mut call: impl FnMut()) -> f64 {
    let mut best = f64::MAX;
    for _ in 0..ROUNDS {
        let (started, mut calls) = (Instant::now(), 0_u64);
        // Looking at the clock must not cost more than a call.
        let mut batch = 1;
        while started.elapsed() < ROUND {
            for _ in 0..batch {
                call();
            }
            calls += batch;
            batch = (batch * 2).min(calls.div_ceil(8).max(1));
        }
        best = best.min(started.elapsed().as_secs_f64() * 1e9 / calls as f64);
    }
    best
}

/// The largest of so many results of `round`: of rates, which a disturbance only lowers.
pub fn best_rate(mut round: impl FnMut() -> f64) -> f64 {
    (0..ROUNDS).map(|_| round()).fold(0.0, f64::max)
}

/// The memory of this process right now, in bytes; zero where the system does not tell.
pub fn resident_bytes() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    kib.unwrap_or_default() * 1024
}

/// The file of recorded traffic or tokens with this name.
pub fn vector(name: &str) -> String {
    let path = format!("{}/tests/vectors/captures/{name}", env!("CARGO_MANIFEST_DIR"));
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// The shortest recorded message of Choria's own protocol whose subject begins with `prefix` and which is longer than
/// `longer_than` bytes.
pub fn recorded(folder: &str, prefix: &str, longer_than: usize) -> String {
    let messages = vector(&format!("{folder}/messages.jsonl"));
    let payloads = messages.lines().filter_map(|line| {
        let message: serde_json::Value = serde_json::from_str(line).ok()?;
        let (subject, payload) = (message["subject"].as_str()?, message["payload"].as_str()?);
        let is_ours = payload.starts_with(r#"{"protocol":"#) && subject.starts_with(prefix);
        (is_ours && payload.len() > longer_than).then(|| payload.to_owned())
    });
    payloads
        .min_by_key(String::len)
        .unwrap_or_else(|| panic!("nothing on {prefix} was recorded in {folder}"))
}
