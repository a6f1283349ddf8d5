//! What goes wrong around the nodes, and the end of it.

use std::cmp::Reverse;

use crate::fleet::simulation::process::Input;
use crate::fleet::simulation::world::{Event, Phase, RECONNECT_MAX, World};
use crate::fleet::simulation::{MINUTE, MS, SECOND, Time};

/// How long trouble lasts with an election, whose every second costs a lot, and without.
const TROUBLE_MAX: [Time; 2] = [MINUTE, 5 * MINUTE];
/// From one thing that goes wrong to the next.
const GAP_MAX: [Time; 2] = [3 * SECOND, 15 * SECOND];
/// The longest that a broker, the bucket or the way between brokers is gone.
const OUTAGE_MAX: Time = 15 * SECOND;
/// The longest pause of an operator.
const PAUSE_MAX: Time = 10 * SECOND;
/// The longest a node is switched off, or left alone on an operator's wish.
pub const OFF_MAX: Time = 40 * SECOND;
/// When all that is on its way in bad times has arrived.
pub const SETTLED_AFTER: Time = 12 * SECOND;

impl World {
    /// Decides when daemons and nodes begin, and when trouble ends.
    pub fn plan(&mut self) {
        let longest = TROUBLE_MAX[usize::from(!self.setup.is_elected)];
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
        self.within(GAP_MAX[usize::from(!self.setup.is_elected)], Event::Trouble);
        let now = self.now;
        // Only a key that changes hands while answers are late shows who counts its time from when.
        if self.setup.is_elected && self.rng.u8(..3) == 0 {
            self.within(2 * SECOND, Event::Purge);
        }
        let daemon = self.rng.usize(..self.daemons.len());
        let node = self.rng.usize(..self.nodes.len());
        match self.rng.u8(..34) {
            0..4 => {
                let broker = self.rng.usize(..self.brokers.is_up.len());
                self.disturb(now + OUTAGE_MAX + RECONNECT_MAX);
                self.at(now, Event::BrokerStops(broker));
                self.within(OUTAGE_MAX, Event::BrokerStarts(broker));
            }
            4..6 if self.brokers.is_up.len() > 1 => {
                self.seen.note("partition");
                let broker = self.rng.usize(..self.brokers.is_up.len());
                self.disturb(now + OUTAGE_MAX);
                self.at(now, Event::CutOff(Some(broker)));
                self.within(OUTAGE_MAX, Event::CutOff(None));
            }
            4..9 => self.at(now, Event::LinkEnds(daemon)),
            9..14 => {
                let sleeps = self.rng.bool();
                self.at(now, Event::Freeze { daemon, sleeps });
            }
            14 => {
                let lasts = self.rng.u64(..PAUSE_MAX);
                self.disturb(now + lasts);
                self.input(now, daemon, Input::Pause(true));
                self.input(now + lasts, daemon, Input::Pause(false));
            }
            15..17 => self.input(now, daemon, Input::StepDown),
            17 => {
                self.disturb(now);
                self.at(now, Event::Kill(daemon));
            }
            18 => self.input(now, daemon, Input::Drain),
            19 => {
                let late = self.rng.u64(..5 * SECOND);
                self.input(now, daemon, Input::Drain);
                self.input(now + late, daemon, Input::Abort);
            }
            20 => {
                self.at(now, Event::BucketGoes);
                self.within(OUTAGE_MAX, Event::BucketComes);
            }
            21 => {
                self.brokers.bucket.exists = false;
                self.at(now, Event::BucketComes);
            }
            22 => self.at(now, Event::ForeignWrite),
            23..26 => self.at(now, Event::Purge),
            26 => self.at(now, Event::NodeBoots(node)),
            27..29 => {
                let boot = self.nodes[node].boot;
                self.at(now, Event::NodeGoesDown { node, boot });
                self.within(OFF_MAX, Event::NodeBoots(node));
            }
            29 => self.at(now, Event::NodeLosesBroker(node)),
            30 => self.input(now, daemon, Input::Retry(node)),
            31..33 => {
                let lasts = self.rng.u64(..OFF_MAX);
                self.input(now, daemon, Input::Deny(node, true));
                self.input(now + lasts, daemon, Input::Deny(node, false));
            }
            _ => self.input(now, daemon, Input::Reload),
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
