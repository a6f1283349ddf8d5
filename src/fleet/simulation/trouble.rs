//! What goes wrong around the nodes, and the end of it.

use std::cmp::Reverse;
use std::iter::repeat_n;

use fastrand::Rng;

use crate::fleet::simulation::process::Input;
use crate::fleet::simulation::world::{Event, Phase, RECONNECT_MAX, World};
use crate::fleet::simulation::{MINUTE, MS, SECOND, Time};

/// How long trouble lasts with an election, whose every second costs a lot, and without.
const TROUBLE_MAX: [Time; 2] = [MINUTE, 5 * MINUTE];
/// From one thing that goes wrong to the next.
const GAP_MAX: [Time; 2] = [4 * SECOND, 15 * SECOND];
/// The longest that a broker, the bucket or the way between brokers is gone.
const OUTAGE_MAX: Time = 15 * SECOND;
/// The longest pause of an operator.
const PAUSE_MAX: Time = 10 * SECOND;
/// The longest a node is switched off, or left alone on an operator's wish.
pub const OFF_MAX: Time = 40 * SECOND;
/// When all that is on its way in bad times has arrived.
pub const SETTLED_AFTER: Time = 12 * SECOND;

/// What may go wrong around the nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    BrokerRestart,
    Partition,
    LinkEnds,
    Congestion,
    Freeze,
    Pause,
    StepDown,
    Kill,
    Drain,
    Abort,
    BucketGone,
    BucketMadeAnew,
    ForeignWrite,
    Purge,
    NodeBoots,
    NodeOff,
    NodeLosesBroker,
    Retry,
    Deny,
    Reload,
}

impl Kind {
    /// All of them, and how often each comes up among the others.
    const ALL: [(Kind, usize); 20] = [
        (Kind::BrokerRestart, 4),
        (Kind::Partition, 2),
        (Kind::LinkEnds, 3),
        (Kind::Congestion, 3),
        (Kind::Freeze, 5),
        (Kind::Pause, 1),
        (Kind::StepDown, 2),
        (Kind::Kill, 1),
        (Kind::Drain, 1),
        (Kind::Abort, 1),
        (Kind::BucketGone, 1),
        (Kind::BucketMadeAnew, 1),
        (Kind::ForeignWrite, 1),
        (Kind::Purge, 3),
        (Kind::NodeBoots, 1),
        (Kind::NodeOff, 2),
        (Kind::NodeLosesBroker, 1),
        (Kind::Retry, 1),
        (Kind::Deny, 2),
        (Kind::Reload, 1),
    ];

    /// What goes wrong in one run, each as often as it comes up. Where everything does, nobody leads for long: in most runs
    /// it is a few kinds.
    pub fn some(rng: &mut Rng) -> Vec<Kind> {
        let one_in = rng.u8(1..=4);
        let kinds = Kind::ALL.into_iter().filter(|_| rng.u8(..one_in) == 0);
        kinds.flat_map(|(kind, times)| repeat_n(kind, times)).collect()
    }
}

impl World {
    /// Decides when daemons and nodes begin, and when trouble ends.
    pub fn plan(&mut self) {
        let longest = TROUBLE_MAX[usize::from(self.setup.is_alone())];
        let trouble = self.rng.u64(longest / 4..longest);
        for daemon in 0..self.daemons.len() {
            self.within(5 * SECOND, Event::Start(daemon));
        }
        for node in 0..self.nodes.len() {
            self.within(trouble, Event::NodeBoots(node));
        }
        if !self.setup.is_quiet {
            self.within(5 * SECOND, Event::Trouble);
        }
        self.at(self.now + trouble, Event::Peace);
        self.at(self.now, Event::Look);
    }

    /// Something goes wrong, and something else a little later.
    pub fn trouble(&mut self) {
        self.within(GAP_MAX[usize::from(self.setup.is_alone())], Event::Trouble);
        let now = self.now;
        // Whoever leads has the most to lose.
        let leader = self.daemons.iter().position(|daemon| daemon.leads(now));
        let any = self.rng.usize(..self.daemons.len());
        let daemon = leader.filter(|_| self.rng.bool()).unwrap_or(any);
        let node = self.rng.usize(..self.nodes.len());
        let Some(kind) = self.rng.choice(&self.setup.troubles).copied() else { return };
        match kind {
            Kind::BrokerRestart => {
                let broker = self.rng.usize(..self.brokers.is_up.len());
                self.disturb(now + OUTAGE_MAX + RECONNECT_MAX);
                self.at(now, Event::BrokerStops(broker));
                self.within(OUTAGE_MAX, Event::BrokerStarts(broker));
            }
            Kind::Partition if self.brokers.is_up.len() > 1 => {
                self.seen.note("partition");
                let broker = self.rng.usize(..self.brokers.is_up.len());
                self.disturb(now + OUTAGE_MAX);
                self.at(now, Event::CutOff(Some(broker)));
                self.within(OUTAGE_MAX, Event::CutOff(None));
            }
            Kind::Partition | Kind::LinkEnds => self.at(now, Event::LinkEnds(daemon)),
            Kind::Congestion => self.at(now, Event::Congestion(daemon)),
            Kind::Freeze => {
                let sleeps = self.rng.bool();
                self.at(now, Event::Freeze { daemon, sleeps });
            }
            Kind::Pause => {
                let lasts = self.rng.u64(..PAUSE_MAX);
                self.disturb(now + lasts);
                self.input(now, daemon, Input::Pause(true));
                self.input(now + lasts, daemon, Input::Pause(false));
            }
            Kind::StepDown => self.input(now, daemon, Input::StepDown),
            Kind::Kill => {
                self.disturb(now);
                self.at(now, Event::Kill(daemon));
            }
            Kind::Drain => self.input(now, daemon, Input::Drain),
            Kind::Abort => {
                let late = self.rng.u64(..5 * SECOND);
                self.input(now, daemon, Input::Drain);
                self.input(now + late, daemon, Input::Abort);
            }
            Kind::BucketGone => {
                self.at(now, Event::BucketGoes);
                self.within(OUTAGE_MAX, Event::BucketComes);
            }
            Kind::BucketMadeAnew => {
                self.brokers.bucket.exists = false;
                self.at(now, Event::BucketComes);
            }
            Kind::ForeignWrite => self.at(now, Event::ForeignWrite),
            Kind::Purge => self.at(now, Event::Purge),
            Kind::NodeBoots => self.at(now, Event::NodeBoots(node)),
            Kind::NodeOff => {
                let boot = self.nodes[node].boot;
                self.at(now, Event::NodeGoesDown { node, boot });
                self.within(OFF_MAX, Event::NodeBoots(node));
            }
            Kind::NodeLosesBroker => self.at(now, Event::NodeLosesBroker(node)),
            Kind::Retry => self.input(now, daemon, Input::Retry(node)),
            Kind::Deny => {
                let lasts = self.rng.u64(..OFF_MAX);
                self.input(now, daemon, Input::Deny(node, true));
                self.input(now + lasts, daemon, Input::Deny(node, false));
            }
            Kind::Reload => self.input(now, daemon, Input::Reload),
        }
    }

    /// From now on nothing goes wrong but what the nodes do.
    pub fn make_peace(&mut self) {
        let is_over = |event: &Event| match event {
            Event::Freeze { .. }
            | Event::Kill(_)
            | Event::BrokerStops(_)
            | Event::BrokerStarts(_)
            | Event::CutOff(_)
            | Event::BucketGoes
            | Event::ForeignWrite
            | Event::Purge
            | Event::LinkEnds(_)
            | Event::Congestion(_)
            | Event::NodeLosesBroker(_)
            | Event::Trouble => true,
            Event::Process { input, .. } => matches!(
                input,
                Input::Pause(_)
                    | Input::StepDown
                    | Input::Drain
                    | Input::Retry(_)
                    | Input::Deny(..)
                    | Input::Reload
            ),
            _ => false,
        };
        self.events.retain(|Reverse(scheduled)| !is_over(&scheduled.event));
        self.brokers.is_up.fill(true);
        self.brokers.cut_off = None;
        self.phase = Phase::Peace { since: self.now, until: Vec::new() };
        self.at(self.now, Event::BucketComes);
        for daemon in 0..self.daemons.len() {
            self.thaw(daemon, 0);
            self.input(self.now + MS, daemon, Input::Pause(false));
            for node in 0..self.nodes.len() {
                self.input(self.now, daemon, Input::Deny(node, false));
            }
        }
        if !self.setup.is_quiet {
            self.disturb(self.now + SETTLED_AFTER + RECONNECT_MAX);
        }
        let until = (0..self.nodes.len()).map(|node| self.must_be_provisioned(node)).collect();
        self.phase = Phase::Peace { since: self.now, until };
    }

    /// All daemons stop, some of them at once.
    pub fn make_an_end(&mut self) {
        self.phase = Phase::Ending { until: self.now + 40 * SECOND };
        for daemon in 0..self.daemons.len() {
            let at = self.now + self.rng.u64(..2 * SECOND);
            self.input(at, daemon, Input::Drain);
            if self.rng.u8(..4) == 0 {
                let late = self.rng.u64(..SECOND);
                self.input(at + late, daemon, Input::Abort);
            }
        }
    }
}
