//! Every NATS subject we use, and the checked types that carry them.

use std::sync::Arc;

/// A subject to publish to: no wildcard, no white space, no empty part.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Subject(Arc<str>);

/// A subject to subscribe to: wildcards are allowed as whole parts.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Pattern(Arc<str>);

impl Subject {
    /// The text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl Pattern {
    /// The text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}
