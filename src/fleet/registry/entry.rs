//! What the registry holds of one node.

use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};
use std::time::Instant;

use crate::errors::{BRIEF_BYTES_MAX, without_middle};
use crate::fleet::tally::Tally;
use crate::node::Report;
use crate::node::upgrade::Tries;
use crate::protocol::Identity;

/// All that is known about one node. Times and texts are what makes it big, so it holds few of them.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) generation: u64,
    pub(super) seen: Instant,
    /// It has said something itself; otherwise an operator named it, perhaps by a slip.
    pub(super) is_heard: bool,
    /// Digest of the last event's id, to know a copy that comes late.
    event: Option<u64>,
    pub(super) state: State,
    pub(super) last_error: Option<Box<str>>,
    pub(super) attempts: u32,
    /// In a row, whosever fault they were.
    pub(super) failures: u16,
    /// Of these, its own, which lengthen its wait.
    pub(super) own_failures: u16,
    /// The last failure was explained by a reboot.
    pub(super) is_excused: bool,
}

#[derive(Debug, Clone, Copy)]
pub(super) enum State {
    Queued {
        since: Instant,
        announced: Option<Instant>,
        asks_again: u8,
    },
    Working {
        since: Instant,
        announced: Option<Instant>,
    },
    Settling {
        until: Instant,
        settled: Settled,
    },
    Waiting {
        due: Instant,
        /// No startup event makes it due earlier.
        firm: bool,
    },
}

#[derive(Debug, Clone, Copy)]
pub(super) enum Settled {
    Configured {
        /// An event before this was published before the restart.
        late_until: Option<Instant>,
    },
    Upgraded,
}

impl Entry {
    /// An entry that must be queued next.
    pub(super) fn new(now: Instant) -> Entry {
        Entry {
            generation: 0,
            seen: now,
            is_heard: false,
            event: None,
            state: State::Waiting { due: now, firm: false },
            last_error: None,
            attempts: 0,
            failures: 0,
            own_failures: 0,
            is_excused: false,
        }
    }

    /// Notes an event's id, and says whether it is none of a copy of the last event.
    pub(super) fn hear(&mut self, id: &str) -> bool {
        let event = Some(digest(id));
        let is_copy = self.event == event && !id.is_empty();
        self.event = event;
        !is_copy
    }

    pub(super) fn settle(&mut self, until: Instant, settled: Settled) {
        self.attempts = 0;
        (self.failures, self.own_failures) = (0, 0);
        self.is_excused = false;
        self.state = State::Settling { until, settled };
    }

    /// Bytes of an error that is kept though it is long.
    pub(super) fn long_error_bytes(&self) -> usize {
        let len = self.last_error.as_deref().map_or(0, str::len);
        if len > BRIEF_BYTES_MAX { len } else { 0 }
    }

    pub(super) fn wait(&mut self, due: Instant) {
        self.state = State::Waiting { due, firm: false };
    }
}

/// What outlives an entry.
#[derive(Debug, Clone, Copy)]
pub(super) struct Kept {
    pub(super) changed: Instant,
    pub(super) returns: u32,
    pub(super) upgrade: Option<Tries>,
}

impl Kept {
    pub(super) fn new(now: Instant) -> Kept {
        Kept { changed: now, returns: 0, upgrade: None }
    }
}

/// When the discoveries that count began.
#[derive(Debug, Default)]
pub(super) struct Discoveries {
    pub(super) running: Option<Instant>,
    pub(super) last_completed: Option<Instant>,
}

impl Discoveries {
    /// Ends the running one; says since when a node must have been silent to be missed by it and the one before.
    pub(super) fn complete(&mut self) -> Option<Instant> {
        let started = self.running.take()?;
        self.last_completed.replace(started)
    }
}

/// What is kept of an attempt's reason, in `room` bytes if it is long.
pub(super) fn last_error(report: &Report, identity: &Identity, room: usize) -> Option<Box<str>> {
    let Tally { provisioned, outcome, .. } = Tally::of(&report.outcome);
    if provisioned {
        return None;
    }
    if report.reason.is_empty() {
        return outcome.map(Into::into);
    }
    // Whoever reads it knows of which node it is, and there may be little room.
    let reason = report.reason.replace(&format!(": {identity}: "), ": ");
    match reason.len() <= room {
        true => Some(reason.into()),
        false => Some(without_middle(&reason).into()),
    }
}

/// Stands for a text that is only ever compared. Whoever finds two texts with one digest gains nothing by it.
fn digest(text: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    text.hash(&mut hasher);
    hasher.finish()
}
