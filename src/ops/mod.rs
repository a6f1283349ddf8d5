//! What operators and their tools look at.

pub mod http;
