//! What operators and their tools look at.

pub mod client;
pub mod command;
pub mod http;
pub mod page;
pub mod reload;
pub mod socket;
pub mod status;
mod stop;
pub mod systemd;
pub mod text;
