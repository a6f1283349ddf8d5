//! As many file descriptors as our settings need.
//!
//! Services begin with a low limit that they may raise themselves: 1,024 by custom, which `workers` beyond a few hundred
//! use up with helpers alone. The original's runtime raises it too.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// For one run of the helper: three pipes of which both ends are open while it starts, and its pidfd.
const PER_WORKER: u64 = 8;
/// For all else: the log, the broker, the monitor port, the admin socket, and the clients of both.
const FIXED: u64 = 96;

/// Raises our limit as far as `workers` need it and the system lets us; says so if that is too little.
pub fn raise(workers: usize) {
    let limit = getrlimit(Resource::Nofile);
    let needed = needed(workers);
    let Some(raised) = raised(limit.current, limit.maximum, needed) else { return };
    if raised < needed {
        log::warn!(component = "provisioner"; "{workers} workers may need {needed} file descriptors and the system allows {raised}: raise the limit (LimitNOFILE), or helpers may fail to start");
    }
    // What we may have at most can be asked for, so this does not fail; if it does, helpers say so.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: Some(raised), maximum: limit.maximum });
}

fn needed(workers: usize) -> u64 {
    let workers = u64::try_from(workers).unwrap_or(u64::MAX);
    workers.saturating_mul(PER_WORKER).saturating_add(FIXED)
}

/// The limit to ask for, if the one we have is too low. `None` stands for no limit.
fn raised(current: Option<u64>, maximum: Option<u64>, needed: u64) -> Option<u64> {
    current.filter(|current| *current < needed)?;
    Some(maximum.map_or(needed, |maximum| maximum.min(needed)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn asks_for_what_is_needed_and_no_more_than_allowed() {
        assert_eq!(needed(0), 96);
        assert_eq!(needed(1_024), 8_288);
        assert_eq!(raised(Some(1_024), Some(524_288), 128), None);
        assert_eq!(raised(Some(1_024), Some(524_288), 8_288), Some(8_288));
        assert_eq!(raised(Some(1_024), Some(4_096), 8_288), Some(4_096));
        assert_eq!(raised(Some(1_024), None, 8_288), Some(8_288));
        assert_eq!(raised(None, None, 8_288), None);
    }
}
