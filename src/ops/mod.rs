//! What operators and their tools look at.

pub mod history;
pub mod http;
pub mod page;
pub mod status;
pub mod text;
