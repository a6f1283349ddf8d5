//! The wall clock, for all who put a time into a message or a token, or compare one.
//!
//! Whatever waits or measures uses `Instant`; the cores and the pure modules are given their time.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Seconds since 1970; 0 while the clock is set to a time before.
pub fn unix_time() -> i64 {
    i64::try_from(since_1970().as_secs()).unwrap_or(i64::MAX)
}

/// Nanoseconds since 1970; 0 while the clock is set to a time before, and no more after 2262.
pub fn unix_nanos() -> i64 {
    i64::try_from(since_1970().as_nanos()).unwrap_or(i64::MAX)
}

fn since_1970() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}
