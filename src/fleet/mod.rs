//! Starts, connects and joins the threads that find and provision nodes.

pub mod registry;
