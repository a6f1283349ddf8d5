//! Provisions unconfigured Choria Servers.

pub mod cli;
pub mod config;
pub mod fleet;
pub mod gate;
pub mod helper;
pub mod jwt;
pub mod logging;
pub mod metrics;
pub mod node;
pub mod ops;
pub mod pidfile;
pub mod pki;
pub mod protocol;
pub mod rpc;
pub mod shutdown;
pub mod transport;
pub mod version;
