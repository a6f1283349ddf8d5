//! Every reason not to act, asked before anything leaves the process.

/// Why a running node must stop before its next step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Closed {
    /// The process is aborting.
    Aborted,
    /// Leadership was lost since the node was begun.
    TermEnded,
    /// The node's own time was up while the gate was closed.
    Deadline,
}
