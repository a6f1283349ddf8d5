//! A node as it stands there: it starts, answers, falls silent, lies, goes and comes back.

use std::collections::VecDeque;

use fastrand::Rng;

use crate::fleet::simulation::{MINUTE, MS, SECOND, Time};
use crate::node::Outcome;
use crate::protocol::Identity;
use crate::rpc::actions::Action;

/// How long a provisioner that called a locked action keeps others out.
pub const LOCK: Time = 2 * MINUTE;
/// The longest a healthy node takes for an answer.
pub const THINKS_MAX: Time = 150 * MS;
/// The longest from a node's going down to its next start.
pub const DOWN_MAX: Time = 10 * SECOND;
/// The longest an upgrade takes.
const UPGRADE_MAX: Time = MINUTE;
/// How often one trouble comes up at most.
const TIMES_MAX: u32 = 5;

/// A simulated node.
#[derive(Debug)]
pub struct Node {
    pub identity: Identity,
    pub is_up: bool,
    /// The broker it is connected to.
    pub broker: Option<usize>,
    /// Counts its starts.
    pub boot: u32,
    /// What goes wrong with it yet; afterwards it is healthy.
    pub troubles: VecDeque<Trouble>,
    /// What goes wrong for ever.
    pub broken: Option<Trouble>,
    /// Some attempts are to end with an upgrade.
    pub upgrades: bool,
    /// Which daemon called a locked action last, and until when others are refused.
    lock: Option<(usize, Time)>,
    is_configured: bool,
    /// It heard `restart` or `release_update` and hears nothing more.
    is_leaving: bool,
    pub is_provisioned: bool,
    pub is_shut_down: bool,
    pub was_configured: bool,
    /// Counts the keys it has made.
    keys: u64,
    causes: [Option<Time>; Cause::ALL],
    /// Attempts since there is peace.
    pub attempts: u64,
}

/// What goes wrong at one action, and how often.
#[derive(Debug, Clone, Copy)]
pub struct Trouble {
    pub kind: Kind,
    pub at: Action,
    pub times: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Gone,
    Silent,
    /// It does what it is told and answers late.
    Slow,
    Fails,
    Garbage,
    /// Two answers that differ.
    Lies,
    Reboots,
    BadJwt,
    WrongToken,
    NotProvisioning,
    HelperFails,
    Misconfigured,
    Deferred,
    ShutsDown,
    Upgrades,
    /// It starts unprovisioned although it was configured.
    ComesBack,
}

impl Kind {
    const ALL: [Kind; 16] = [
        Kind::Gone,
        Kind::Silent,
        Kind::Slow,
        Kind::Fails,
        Kind::Garbage,
        Kind::Lies,
        Kind::Reboots,
        Kind::BadJwt,
        Kind::WrongToken,
        Kind::NotProvisioning,
        Kind::HelperFails,
        Kind::Misconfigured,
        Kind::Deferred,
        Kind::ShutsDown,
        Kind::Upgrades,
        Kind::ComesBack,
    ];

    /// Whether it is the helper's decision.
    fn is_helpers(self) -> bool {
        matches!(
            self,
            Kind::HelperFails
                | Kind::Misconfigured
                | Kind::Deferred
                | Kind::ShutsDown
                | Kind::Upgrades
        )
    }
}

/// What an outcome may be blamed on.
#[derive(Debug, Clone, Copy)]
enum Cause {
    Absent,
    Silent,
    Failing,
    Untrue,
    Token,
    Mode,
    Locked,
}

impl Cause {
    const ALL: usize = 7;
}

/// A request that reached it.
#[derive(Debug, Clone, Copy)]
pub struct Ask {
    /// Whose it is.
    pub daemon: usize,
    pub action: Action,
}

/// What it answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Answer {
    pub says: Says,
    /// Equal answers have equal contents.
    pub content: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Says {
    Yes,
    /// Yes, and a JWT that no check accepts.
    BadJwt,
    Busy,
    WrongToken,
    NotProvisioning,
    No,
    Garbage,
}

/// What follows from a request.
#[derive(Debug, Default)]
pub struct Reaction {
    /// Answers, and how long each takes.
    pub answers: Vec<(Time, Answer)>,
    /// It goes down after this time, and starts again after the other.
    pub goes: Option<(Time, Option<Time>)>,
}

/// What the helper says about it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wish {
    Configure,
    Fail,
    Misconfigured,
    Defer,
    ShutDown,
    Upgrade,
}

impl Node {
    /// Down, and with a past or future of its own. `actions` are those that it will be asked for.
    pub fn new(index: usize, actions: &[Action], rng: &mut Rng) -> Node {
        let any = |rng: &mut Rng| Trouble {
            kind: Kind::ALL[rng.usize(..Kind::ALL.len())],
            at: actions[rng.usize(..actions.len())],
            times: rng.u32(1..=TIMES_MAX),
        };
        let broken = (rng.u8(..5) == 0).then(|| any(rng));
        // A healthy node may fail a few times, but not in ways that end it.
        let troubles: VecDeque<Trouble> = (0..rng.usize(..3))
            .map(|_| any(rng))
            .filter(|trouble| !matches!(trouble.kind, Kind::Gone | Kind::ShutsDown))
            .collect();
        Node {
            identity: Identity::parse(&format!("n{index}")).expect("an identity"),
            is_up: false,
            broker: None,
            boot: 0,
            upgrades: troubles.iter().any(|trouble| trouble.kind == Kind::Upgrades),
            troubles,
            broken,
            lock: None,
            is_configured: false,
            is_leaving: false,
            is_provisioned: false,
            is_shut_down: false,
            was_configured: false,
            keys: 0,
            causes: [None; Cause::ALL],
            attempts: 0,
        }
    }

    /// It hears requests, unless it is just leaving.
    pub fn is_there(&self) -> bool {
        self.is_up && self.broker.is_some()
    }

    /// Whether it answers a discovery.
    pub fn is_found(&self) -> bool {
        self.is_there() && !self.is_leaving
    }

    /// Whether it is provisioned, or never can be.
    pub fn is_served(&self) -> bool {
        self.is_provisioned || self.is_shut_down || self.broken.is_some()
    }

    /// Starts, in provisioning mode or for good. True if there is something to announce.
    pub fn boots(&mut self, broker: Option<usize>) -> bool {
        if self.is_provisioned || self.is_shut_down {
            return false;
        }
        self.boot += 1;
        (self.lock, self.is_leaving) = (None, false);
        if self.is_configured {
            self.is_configured = false;
            if !self.has_trouble(Kind::ComesBack) {
                (self.is_provisioned, self.is_up) = (true, false);
                return false;
            }
        }
        self.is_up = !self.has_trouble(Kind::Gone);
        self.broker = broker;
        true
    }

    /// Goes down; true if it starts again by itself.
    pub fn goes_down(&mut self, now: Time) {
        self.blame(Cause::Absent, now);
        self.is_up = false;
        self.broker = None;
    }

    pub fn loses_broker(&mut self, now: Time) {
        self.blame(Cause::Absent, now);
        self.broker = None;
    }

    /// Takes a request.
    pub fn hear(&mut self, ask: Ask, now: Time, rng: &mut Rng) -> Reaction {
        if !self.is_found() {
            self.blame(Cause::Absent, now);
            return Reaction::default();
        }
        let trouble = self.trouble_at(ask.action, now);
        if trouble == Some(Kind::Silent) {
            return Reaction::default();
        }
        if trouble == Some(Kind::Reboots) {
            return Reaction { answers: Vec::new(), goes: Some((0, Some(rng.u64(MS..DOWN_MAX)))) };
        }
        let thinks = match trouble {
            Some(Kind::Slow) => rng.u64(2 * SECOND..22 * SECOND),
            _ => rng.u64(MS..THINKS_MAX),
        };
        let says = self.say(ask, trouble, now);
        let mut content = u64::from(self.boot) * 100 + says as u64;
        if ask.action.only_last_answer_counts() {
            self.keys += 1;
            content = self.keys * 10_000;
        }
        let mut reaction = Reaction::default();
        reaction.answers.push((thinks, Answer { says, content }));
        if trouble == Some(Kind::Lies) {
            let lie = Answer { says, content: content + 5_000_000 };
            reaction.answers.push((rng.u64(MS..THINKS_MAX), lie));
        }
        match (ask.action, says) {
            (Action::Configure, Says::Yes) => {
                (self.is_configured, self.was_configured) = (true, true);
            }
            (Action::Restart, Says::Yes) => {
                self.is_leaving = true;
                reaction.goes = Some((2 * SECOND, Some(rng.u64(500 * MS..DOWN_MAX))));
            }
            (Action::ReleaseUpdate, Says::Yes) => {
                self.is_leaving = true;
                let back = rng.u64(5 * SECOND..UPGRADE_MAX);
                reaction.goes = Some((rng.u64(SECOND..5 * SECOND), Some(back)));
            }
            (Action::Shutdown, Says::Yes) => {
                (self.is_leaving, self.is_shut_down) = (true, true);
                reaction.goes = Some((SECOND, None));
            }
            _ => {}
        }
        reaction
    }

    /// The node's checks, in its order.
    fn say(&mut self, ask: Ask, trouble: Option<Kind>, now: Time) -> Says {
        if is_locked(ask.action) {
            if self.lock.is_some_and(|(owner, until)| owner != ask.daemon && now < until) {
                self.blame(Cause::Locked, now);
                return Says::Busy;
            }
            self.lock = Some((ask.daemon, now + LOCK));
        }
        match trouble {
            Some(Kind::NotProvisioning) if ask.action != Action::Inventory => Says::NotProvisioning,
            Some(Kind::WrongToken) if ask.action != Action::Inventory => Says::WrongToken,
            Some(Kind::Fails) => Says::No,
            Some(Kind::Garbage) => Says::Garbage,
            Some(Kind::BadJwt) if ask.action == Action::Jwt => Says::BadJwt,
            // It can't leave provisioning mode as long as it has no other configuration.
            _ if ask.action == Action::Restart && !self.is_configured => {
                self.blame(Cause::Failing, now);
                Says::No
            }
            _ => Says::Yes,
        }
    }

    /// What the helper wants, this time.
    pub fn wish(&mut self) -> Wish {
        let Some(kind) = self.next_trouble().map(|trouble| trouble.kind) else {
            return Wish::Configure;
        };
        if kind.is_helpers() {
            self.spend();
        }
        match kind {
            Kind::HelperFails => Wish::Fail,
            Kind::Misconfigured => Wish::Misconfigured,
            Kind::Deferred => Wish::Defer,
            Kind::ShutsDown => Wish::ShutDown,
            Kind::Upgrades => Wish::Upgrade,
            _ => Wish::Configure,
        }
    }

    /// Whether what happened to it since then explains such an outcome.
    pub fn explains(&self, outcome: &Outcome, since: Time) -> bool {
        let did = |cause: Cause| self.causes[cause as usize].is_some_and(|at| at >= since);
        let is_away = !self.is_found() || did(Cause::Absent);
        match outcome {
            Outcome::Unreachable => is_away || did(Cause::Silent),
            Outcome::Failed => is_away || did(Cause::Silent) || did(Cause::Failing),
            Outcome::Refused => did(Cause::Untrue),
            Outcome::WrongToken => did(Cause::Token),
            Outcome::NotProvisioning => did(Cause::Mode),
            Outcome::Busy => did(Cause::Locked),
            Outcome::Stopped(_) => is_away,
            Outcome::Provisioned { restarted_at: None, .. } => is_away || did(Cause::Silent),
            _ => true,
        }
    }

    /// How often its troubles may still fail an attempt.
    pub fn failures_left(&self) -> u64 {
        self.troubles.iter().map(|trouble| u64::from(trouble.times)).sum()
    }

    fn next_trouble(&self) -> Option<Trouble> {
        self.broken.or_else(|| self.troubles.front().copied())
    }

    /// Whether this is what goes wrong next; then it has.
    fn has_trouble(&mut self, kind: Kind) -> bool {
        let is_next = self.next_trouble().is_some_and(|trouble| trouble.kind == kind);
        if is_next {
            self.spend();
        }
        is_next
    }

    /// What goes wrong now that it is asked for `action`.
    fn trouble_at(&mut self, action: Action, now: Time) -> Option<Kind> {
        let trouble = self.next_trouble()?;
        let is_met = match trouble.kind {
            Kind::BadJwt => action == Action::Jwt,
            Kind::Gone | Kind::ComesBack => false,
            kind => trouble.at == action && !kind.is_helpers(),
        };
        if !is_met {
            return None;
        }
        self.spend();
        match trouble.kind {
            Kind::Silent | Kind::Slow => self.blame(Cause::Silent, now),
            Kind::Fails | Kind::Garbage => self.blame(Cause::Failing, now),
            Kind::Lies | Kind::BadJwt => self.blame(Cause::Untrue, now),
            Kind::Reboots => self.blame(Cause::Absent, now),
            Kind::WrongToken => self.blame(Cause::Token, now),
            Kind::NotProvisioning => self.blame(Cause::Mode, now),
            _ => {}
        }
        Some(trouble.kind)
    }

    fn spend(&mut self) {
        if self.broken.is_some() {
            return;
        }
        if let Some(trouble) = self.troubles.front_mut() {
            trouble.times -= 1;
            if trouble.times == 0 {
                self.troubles.pop_front();
            }
        }
    }

    fn blame(&mut self, cause: Cause, now: Time) {
        self.causes[cause as usize] = Some(now);
    }
}

fn is_locked(action: Action) -> bool {
    matches!(
        action,
        Action::Jwt | Action::Gen25519 | Action::GenCsr | Action::ReleaseUpdate | Action::Configure
    )
}
