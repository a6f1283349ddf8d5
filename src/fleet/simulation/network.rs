//! The way of messages between a daemon and its broker.

use std::ops::Range;

use fastrand::Rng;

use crate::fleet::simulation::{MS, SECOND, Time};

/// How bad the way is between one daemon and its broker.
#[derive(Debug, Clone, Copy)]
pub struct Network {
    /// The usual way of a message takes at most this long.
    pub usual: Time,
    /// One in so many takes up to `slow_max`.
    pub slow_one_in: u64,
    pub slow_max: Time,
    pub lost_one_in: u64,
    pub doubled_one_in: u64,
}

impl Network {
    /// One as bad as it happens to be, within these bounds for how seldom a message is lost or doubled.
    pub fn new(lost_one_in: Range<u64>, doubled_one_in: Range<u64>, rng: &mut Rng) -> Network {
        Network {
            usual: [5, 50, 400][rng.usize(..3)] * MS,
            slow_one_in: rng.u64(3..60),
            slow_max: [1, 2, 12][rng.usize(..3)] * SECOND,
            lost_one_in: rng.u64(lost_one_in),
            doubled_one_in: rng.u64(doubled_one_in),
        }
    }

    /// The same with every other message late.
    pub fn congested(self) -> Network {
        Network { slow_one_in: 2, slow_max: 2 * SECOND, ..self }
    }
}

pub const PEACE: Network = Network {
    usual: 20 * MS,
    slow_one_in: u64::MAX,
    slow_max: 1,
    lost_one_in: u64::MAX,
    doubled_one_in: u64::MAX,
};
