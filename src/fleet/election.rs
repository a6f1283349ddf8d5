//! Campaigns for leadership, so that of several provisioners one provisions.

pub mod core;
#[cfg(test)]
mod simulation;
