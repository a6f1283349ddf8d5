//! Signals become drain, abort, reload and reopen.

/// The type of a channel that carries no message and only disconnects.
#[derive(Debug)]
pub enum Never {}
