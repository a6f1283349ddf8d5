//! Starts, connects and joins the threads that find and provision nodes.

pub mod finisher;
pub mod listener;
pub mod prober;
pub mod registry;
pub mod roster;
pub mod seldom;
#[cfg(test)]
mod simulation;
pub mod worker;
