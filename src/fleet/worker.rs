//! Takes a node off the prober's hands and provisions it; permits and their seats.

pub mod permits;
pub mod rate;
