//! The nodes: what we know of them, whose they are, and the threads that find, ask and provision them and write down what
//! became of them.
//!
//! Each thread is a thin shell around a core, and none knows who started it. A node passes through them in this order:
//!
//! | Module | What it does |
//! | --- | --- |
//! | [`listener`], [`discoverer`] | find it: by its startup event, by asking the fleet who is there |
//! | [`registry`], behind the lock of [`roster`] | what we know of it; decides what becomes of a sighting and of an outcome |
//! | [`prober`] | asks it for its inventory, with many others; the silent ones end here |
//! | [`worker`] | provisions it, one node at a time |
//! | [`finisher`] | writes the outcome into the registry, [`history`] and [`audit`] log; [`tally`] says what it counts as |
//!
//! Beside them [`election`] or [`peers`] decides whether it is ours, where there are several daemons ([`standing`] has what the two
//! share); [`current`] holds the settings in force, and [`skew`] notes whether nodes say that our clock is off.

pub mod audit;
pub mod current;
pub mod discoverer;
pub mod election;
pub mod finisher;
pub mod history;
pub mod listener;
pub mod peers;
pub mod prober;
pub mod registry;
pub mod roster;
#[cfg(test)]
mod simulation;
pub mod skew;
pub mod standing;
pub mod tally;
pub mod worker;
