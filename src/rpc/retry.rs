//! How many tries an action gets, and the wait between them.
//!
//! A core without clock: it is told how a try failed and says what to do. Tries and pauses are the original's
//! (its `host/rpc.go`, and go-choria `backoff/backoff.go`, policy `FiveSec`), without the pause after the last try.

use std::time::Duration;

use crate::rpc::actions::Action;

/// Pauses in milliseconds; entry `n`, counted from 0, follows the `n`-th failed try.
const PAUSES_MS: [u64; 11] = [500, 750, 1000, 1500, 2000, 2500, 3000, 3500, 4000, 4500, 5000];

/// After "no responders": a node that is restarting, or whose subscription is still on its way, gets this long.
const NO_RESPONDERS_PAUSE: Duration = Duration::from_secs(2);

/// The same while the nodes are still coming back after a reconnect.
const COMING_BACK_PAUSE: Duration = Duration::from_secs(1);

/// How often a call may ask for a node that is still coming back. A reconnect allows it for half a minute, so this is for
/// a broker that comes and goes.
const COMING_BACK_MAX: u32 = 90;

/// Requests of one call that may be lost with the connection: a broker that ends as often is not worth more load.
const LOST_MAX: u32 = 10;

/// How often in a row a request may find no connection although the gate is open; each time is followed by a pause.
const DISCONNECTED_MAX: u32 = 10;

/// How a try failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Failure {
    /// There was no answer in time.
    Silent,
    /// The broker knows nobody who listens on the node's subject.
    NoResponders,
    /// The same, so soon after a reconnect that the node may still be on its way back.
    ComingBack,
    /// The connection ended before the answer came, so that nobody knows what the node did.
    Lost,
    /// The node answered with this status.
    Refused {
        /// Never 0.
        code: u8,
        /// Trying again changes nothing: the refusal is about us or about the node's state.
        settled: bool,
    },
    /// The node's answer was no use.
    BadReply,
    /// A check of ours did not like the answer, and would like to see one more.
    OnceMore,
    /// There was no connection; nothing was sent.
    Disconnected,
}

impl Failure {
    /// Whether trying again changes nothing: an unknown action, data the node can't read, or a settled refusal.
    pub fn is_final(self) -> bool {
        matches!(
            self,
            Failure::Refused { code: 2 | 4, .. } | Failure::Refused { settled: true, .. }
        )
    }
}

/// What to do after a failed try.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Pause, then try again.
    Again(Duration),
    /// Give up.
    Stop,
}

/// Counts the failures of one call.
#[derive(Debug, Clone)]
pub struct Retry {
    tries_max: u32,
    is_sent_once: bool,
    failed: u32,
    no_responders: u32,
    coming_back: u32,
    lost: u32,
    once_more: bool,
    disconnected: u32,
}

impl Retry {
    /// For one call of `action`.
    pub fn new(action: Action) -> Retry {
        Retry {
            tries_max: tries_max(action),
            is_sent_once: action.is_sent_once(),
            failed: 0,
            no_responders: 0,
            coming_back: 0,
            lost: 0,
            once_more: false,
            disconnected: 0,
        }
    }

    /// What to do after `failure`.
    pub fn next(&mut self, failure: Failure, random: &mut fastrand::Rng) -> Verdict {
        match failure {
            // What nobody received was no try. It does not say that the node is gone for good either.
            Failure::NoResponders => {
                self.no_responders += 1;
                if self.no_responders > 1 {
                    return Verdict::Stop;
                }
                Verdict::Again(NO_RESPONDERS_PAUSE)
            }
            Failure::ComingBack => {
                self.coming_back += 1;
                if self.coming_back >= COMING_BACK_MAX {
                    return Verdict::Stop;
                }
                Verdict::Again(COMING_BACK_PAUSE)
            }
            // Whatever its tries are for, a call that lost one has it still to make.
            Failure::Lost => {
                self.lost += 1;
                if self.is_sent_once || self.lost >= LOST_MAX {
                    return Verdict::Stop;
                }
                Verdict::Again(Duration::ZERO)
            }
            Failure::Disconnected => {
                self.disconnected += 1;
                if self.disconnected >= DISCONNECTED_MAX {
                    return Verdict::Stop;
                }
                Verdict::Again(pause(self.disconnected, random))
            }
            _ if failure.is_final() => Verdict::Stop,
            Failure::OnceMore if self.once_more => Verdict::Stop,
            Failure::OnceMore | Failure::Silent | Failure::Refused { .. } | Failure::BadReply => {
                self.once_more |= failure == Failure::OnceMore;
                self.disconnected = 0;
                self.failed += 1;
                if self.failed >= self.tries_max {
                    return Verdict::Stop;
                }
                Verdict::Again(pause(self.failed, random))
            }
        }
    }
}

fn tries_max(action: Action) -> u32 {
    match action {
        Action::Inventory | Action::Gen25519 | Action::Configure => 5,
        Action::Jwt | Action::Restart | Action::Shutdown => 3,
        // The node makes a new private key each time.
        Action::GenCsr => 1,
        Action::ReleaseUpdate => 1,
    }
}

/// Entry `failed` of the table, between half and one and a half times.
fn pause(failed: u32, random: &mut fastrand::Rng) -> Duration {
    let entry = usize::try_from(failed).unwrap_or(usize::MAX).min(PAUSES_MS.len() - 1);
    let middle = PAUSES_MS[entry];
    Duration::from_millis(middle / 2 + random.u64(..middle))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn random() -> fastrand::Rng {
        fastrand::Rng::with_seed(3)
    }

    /// How many tries `action` gets when every one ends in `failure`.
    #[track_caller]
    fn check_tries(action: Action, failure: Failure, expected: u32) {
        let mut retry = Retry::new(action);
        let mut random = random();
        let mut tries = 1;
        while let Verdict::Again(_) = retry.next(failure, &mut random) {
            tries += 1;
        }
        assert_eq!(tries, expected, "{action:?} after {failure:?}");
    }

    #[test]
    fn gives_each_action_its_tries() {
        for (action, tries) in [
            (Action::Inventory, 5),
            (Action::Jwt, 3),
            (Action::Gen25519, 5),
            (Action::GenCsr, 1),
            (Action::ReleaseUpdate, 1),
            (Action::Configure, 5),
            (Action::Restart, 3),
            (Action::Shutdown, 3),
        ] {
            check_tries(action, Failure::Silent, tries);
            check_tries(action, Failure::BadReply, tries);
            for code in [1, 3, 5, 6, 200, 255] {
                check_tries(action, Failure::Refused { code, settled: false }, tries);
            }
            for code in [2, 4] {
                check_tries(action, Failure::Refused { code, settled: false }, 1);
            }
            check_tries(action, Failure::Refused { code: 1, settled: true }, 1);
            check_tries(action, Failure::NoResponders, 2);
            check_tries(action, Failure::OnceMore, tries.min(2));
            check_tries(action, Failure::Disconnected, DISCONNECTED_MAX);
            check_tries(action, Failure::ComingBack, COMING_BACK_MAX);
            let lost_max = if action.is_sent_once() { 1 } else { LOST_MAX };
            check_tries(action, Failure::Lost, lost_max);
        }
    }

    #[test]
    fn pauses_as_the_table_says() {
        let mut random = random();
        let mut retry = Retry::new(Action::Configure);
        for middle in [750, 1000, 1500, 2000] {
            let Verdict::Again(pause) = retry.next(Failure::Silent, &mut random) else {
                panic!("gave up early");
            };
            let pause = pause.as_millis();
            assert!((middle / 2..middle * 3 / 2).contains(&pause), "{pause} around {middle}");
        }
        assert_eq!(retry.next(Failure::Silent, &mut random), Verdict::Stop);
    }

    #[test]
    fn spreads_pauses_over_the_whole_range() {
        let mut random = random();
        let pauses: Vec<u128> = (0..2000).map(|_| pause(1, &mut random).as_millis()).collect();
        assert!(pauses.iter().all(|pause| (375..1125).contains(pause)));
        assert!(pauses.iter().any(|pause| *pause < 400));
        assert!(pauses.iter().any(|pause| *pause > 1100));
        assert!(pause(1000, &mut random) < Duration::from_millis(7500));
    }

    #[test]
    fn what_the_broker_lost_counts_as_no_try_and_is_asked_again_at_once() {
        let mut random = random();
        let mut retry = Retry::new(Action::GenCsr);
        assert_eq!(retry.next(Failure::Lost, &mut random), Verdict::Again(Duration::ZERO));
        assert_eq!(retry.next(Failure::ComingBack, &mut random), Verdict::Again(COMING_BACK_PAUSE));
        assert_eq!(
            retry.next(Failure::NoResponders, &mut random),
            Verdict::Again(NO_RESPONDERS_PAUSE)
        );
        assert_eq!(retry.next(Failure::Silent, &mut random), Verdict::Stop);
    }

    #[test]
    fn does_not_count_no_responders_as_a_try() {
        let mut random = random();
        let mut retry = Retry::new(Action::GenCsr);
        assert_eq!(
            retry.next(Failure::NoResponders, &mut random),
            Verdict::Again(Duration::from_secs(2))
        );
        assert_eq!(retry.next(Failure::Silent, &mut random), Verdict::Stop);
    }
}
