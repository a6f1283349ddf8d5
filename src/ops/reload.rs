//! How an operator asks for a reload, and what came of it.

use std::fmt;
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, TrySendError, after, bounded, select_biased};
use serde::{Deserialize, Serialize};

use crate::shutdown::Never;

/// Why nothing is reloaded any more.
pub const ENDING: &str = "the daemon is shutting down";

/// What holds when the settings were refused.
pub const UNCHANGED: &str = "Settings not reloaded: those of before hold, all of them";

/// How long an operator waits for a reload; whoever asks through the socket has a little more patience.
const PATIENCE: Duration = Duration::from_secs(25);

/// What came of a reload.
pub type Outcome = Result<Reloaded, NotReloaded>;

/// Asks for reloads.
#[derive(Debug, Clone)]
pub struct Asking {
    wishes: Sender<Sender<Outcome>>,
    /// Disconnects when nothing is reloaded any more.
    over: Receiver<Never>,
}

impl Asking {
    /// Has the thread asked that receives `wishes`: each is where its outcome goes, with room for it.
    pub(crate) fn new(wishes: Sender<Sender<Outcome>>, over: Receiver<Never>) -> Asking {
        Asking { wishes, over }
    }

    /// Waits for a reload.
    ///
    /// # Errors
    ///
    /// [`NotReloaded`]; it may yet happen if reading takes long.
    pub fn reload(&self) -> Outcome {
        let (outcome, told) = bounded(1);
        let refuse = |why: &str| Err(NotReloaded(vec![why.to_owned()]));
        match self.wishes.try_send(outcome) {
            Ok(()) => {}
            Err(TrySendError::Full(_)) => return refuse("too many wait for a reload"),
            Err(TrySendError::Disconnected(_)) => return refuse(ENDING),
        }
        select_biased! {
            recv(told) -> outcome => outcome.unwrap_or_else(|_| refuse(ENDING)),
            recv(self.over) -> _ => refuse(ENDING),
            recv(after(PATIENCE)) -> _ => refuse("the settings are still being read: the log will tell"),
        }
    }
}

/// A reload took effect.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reloaded {
    /// The keys whose settings are other than before.
    pub changed: Vec<String>,
    /// What may not be meant as it is written.
    pub warnings: Vec<String>,
}

/// Why a reload did not take effect, for people: every reason, a line each.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NotReloaded(pub Vec<String>);

impl fmt::Display for NotReloaded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.join("\n"))
    }
}

impl std::error::Error for NotReloaded {}
