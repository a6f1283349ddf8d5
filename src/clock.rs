//! The wall clock, for all who put a time into a message or a token, or compare one; and the boot-time clock, for what
//! must not outlive a sleep of the machine.
//!
//! Whatever else waits or measures uses `Instant`; the cores and the pure modules are given their time.

use std::ops::Add;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::time::{ClockId, clock_gettime};

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

/// The clock of `Instant`, for those outside who read it too.
pub fn monotonic() -> Duration {
    Duration::try_from(clock_gettime(ClockId::Monotonic)).expect("no time before the start")
}

/// A time of this machine since it was started, its sleep included, which `Instant` leaves out. Nobody can set this clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct BootTime(Duration);

impl BootTime {
    /// When the machine was started.
    pub const START: BootTime = BootTime(Duration::ZERO);

    /// The present.
    pub fn now() -> BootTime {
        let now = clock_gettime(ClockId::Boottime);
        BootTime(Duration::try_from(now).expect("no time before the start"))
    }

    /// This long after the machine was started.
    pub fn after_boot(time: Duration) -> BootTime {
        BootTime(time)
    }

    /// How long it has been since `earlier`; nothing if that is yet to come.
    pub fn since(self, earlier: BootTime) -> Duration {
        self.0.saturating_sub(earlier.0)
    }
}

impl Add<Duration> for BootTime {
    type Output = BootTime;

    fn add(self, time: Duration) -> BootTime {
        BootTime(self.0.saturating_add(time))
    }
}
