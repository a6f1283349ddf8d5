//! Asks many nodes for their inventory at once, so that those that are gone or silent cost no worker.

pub mod core;
