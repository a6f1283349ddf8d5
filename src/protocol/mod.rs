//! The messages we send and read, whatever their version.

pub mod subject;
