//! How long to wait before the next try.
//!
//! Pure: randomness is an argument.
//!
//! Source: the policies of `backoff` in github.com/choria-io/go-choria.

use std::time::Duration;

/// A table of waits in milliseconds; past its end the last one stays.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Backoff(pub &'static [u64]);

/// For a first connection and for requests: grows to five seconds.
pub const FIVE_SEC: Backoff =
    Backoff(&[500, 750, 1000, 1500, 2000, 2500, 3000, 3500, 4000, 4500, 5000]);

/// For reconnects: grows to twenty seconds.
pub const TWENTY_SEC: Backoff = Backoff(&[
    500, 750, 1000, 1500, 2000, 2500, 3000, 3500, 4000, 4500, 5000, 5500, 5750, 6000, 6500, 7000,
    7500, 8000, 8500, 9000, 9500, 10000, 10500, 10750, 11000, 11500, 12000, 12500, 13000, 13500,
    14000, 14500, 15000, 15500, 15750, 16000, 16500, 17000, 17500, 18000, 18500, 19000, 19500,
    20000,
]);

impl Backoff {
    /// The wait after `failures` tries in a row, from half to one and a half times the table's entry.
    ///
    /// The original counts tries from one and its table from zero, so the first entry is never used; kept.
    pub fn wait(self, failures: usize, random: &mut fastrand::Rng) -> Duration {
        let entry = self.0.get(failures).or(self.0.last()).copied().unwrap_or(0);
        let jitter = if entry == 0 { 0 } else { random.u64(..entry) };
        Duration::from_millis(entry / 2 + jitter)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_stay_around_the_table_and_within_its_end() {
        let mut random = fastrand::Rng::with_seed(1);
        for (failures, entry) in [(1, 750), (10, 5000), (11, 5500), (43, 20_000), (999, 20_000)] {
            let waits: Vec<Duration> =
                (0..1000).map(|_| TWENTY_SEC.wait(failures, &mut random)).collect();
            let (least, most) = (waits.iter().min().unwrap(), waits.iter().max().unwrap());
            assert!(*least >= Duration::from_millis(entry / 2), "{least:?} after {failures}");
            assert!(*most < Duration::from_millis(entry * 3 / 2), "{most:?} after {failures}");
            assert!(*most > Duration::from_millis(entry * 7 / 5), "no jitter after {failures}");
        }
        assert_eq!(FIVE_SEC.0.len(), 11);
        assert_eq!(TWENTY_SEC.0.len(), 44);
    }

    #[test]
    fn nothing_stays_nothing() {
        let mut random = fastrand::Rng::with_seed(1);
        assert_eq!(Backoff(&[0]).wait(5, &mut random), Duration::ZERO);
        assert_eq!(Backoff(&[]).wait(5, &mut random), Duration::ZERO);
    }
}
