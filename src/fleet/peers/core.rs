//! Whether we may act beside others: when to say that we are there, and what follows from what is heard. No clock, no I/O.
//!
//! We act for [`LEASE`] from the *sending* of the last heartbeat that came back to us from the broker, since the others
//! reckon with us as long as they hear us. Before that we listen for [`LISTEN`] while we are heard ourselves: by then each
//! side knows of the other, and those that had our nodes begin none of them any more. A process that was frozen, asleep or
//! cut off has no lease when it goes on, and listens first.
//!
//! A peer that falls silent is reckoned with for [`HOLD_OFF`](super::table::HOLD_OFF) after it is gone; its share is ours
//! when its own lease has been over for long. One that says that it leaves has ended its last node, and is gone at once.
//!
//! Of two processes that are the same to nodes the younger stands by, and while somebody leads an election all do.

use std::collections::VecDeque;
use std::fmt;
use std::mem;
use std::time::Duration;

use crate::clock::BootTime;
use crate::fleet::peers::shares::Owners;
use crate::fleet::peers::table::{Change, Peer, Table};
use crate::protocol::Sender;
use crate::protocol::ksuid::Ksuid;
use crate::protocol::peer::{Heartbeat, Role};

/// From one heartbeat to the next.
pub const BEAT_EVERY: Duration = Duration::from_secs(2);
/// How long a heartbeat that came back lets us act, from its sending. Shorter than the time after which a peer is gone.
pub const LEASE: Duration = Duration::from_secs(4);
/// How long we listen before we act, from the return of the first heartbeat: by then the others have it, too.
pub const LISTEN: Duration = Duration::from_secs(6);
/// What was begun goes on after a silence of ours shorter than this: nobody serves our nodes within twelve seconds, and
/// what is between is for clocks and messages that are late.
pub const TERM_OUTLIVES: Duration = Duration::from_secs(8);
/// When a heartbeat is sent again that could not be, although the connection is said to be there.
const UNSENT_AGAIN: Duration = Duration::from_millis(100);
/// A heartbeat that has not come back for so long is worth a word.
const UNHEARD_LONG: Duration = Duration::from_secs(3);
/// Heartbeats whose return is waited for; older ones are of no use any more.
const UNHEARD_MAX: usize = 4;

/// What happened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Input {
    /// Time has passed, see [`Core::wake`].
    Time,
    /// There is a connection, and this is who we are, or there is none.
    Link(Option<Sender>),
    /// The heartbeat of this number could not be sent.
    Unsent(u64),
    /// Somebody said that it is there, or we did.
    Heard(Heartbeat),
    /// An operator pauses or resumes us.
    Pause(bool),
    /// The process is ending.
    Drain,
    /// No node is being worked on: one that wants to leave may.
    Idle,
}

/// What to do, in this order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Output {
    /// Say that we are there.
    Beat(Heartbeat),
    /// These share the nodes from now on.
    Owners(Owners),
    /// Nodes of ours may be begun until then.
    Act(BootTime),
    /// They still may, until then.
    Renew(BootTime),
    /// Nothing may be begun; what was begun waits.
    Listen,
    /// Nothing may be begun.
    StandBy(Why),
    /// What was begun must end, and what is queued is others'.
    EndTerm,
    /// Somebody has gone whose nodes are ours now: look for them.
    Gained,
    /// There is one more, or one plays another part.
    Joined(Peer),
    /// One is gone: with a word, or without.
    Gone(Peer, Parting),
    /// What was heard counts for nothing.
    Ignored(Ignored),
}

/// Why we stand by.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Why {
    /// An older process has our identity and caller.
    Twin(Peer),
    /// One leads an election.
    Leader(Peer),
}

/// How a peer went.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Parting {
    /// It said so.
    Left,
    /// It was not heard any more.
    Silent,
}

/// What is wrong with a heartbeat.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ignored {
    /// It has our own instance, and we never said it.
    Forged,
    /// There is no room for one more peer.
    Excess,
}

impl Ignored {
    /// The label of the metric.
    pub fn label(self) -> &'static str {
        match self {
            Ignored::Forged => "forged",
            Ignored::Excess => "excess",
        }
    }
}

/// For operators: what part we play.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// We listen before we act.
    Listening,
    /// We provision our share.
    Acting,
    /// Another provisions in our place.
    StandingBy,
    /// We have left, on an operator's wish or since we end.
    Out,
}

/// The peers as one of them sees them.
#[derive(Debug, Clone)]
pub struct Core {
    instance: Ksuid,
    us: Sender,
    table: Table,
    stage: Stage,
    /// What was begun may go on; it began to be ours when we last had a lease.
    term: Option<BootTime>,
    is_connected: bool,
    is_paused: bool,
    is_draining: bool,
    /// We have said that we leave.
    has_left: bool,
    is_gone: bool,
    last_number: u64,
    next_beat: BootTime,
    /// Number and sending of those that have not come back yet, oldest first.
    unheard: VecDeque<(u64, BootTime)>,
    stretch: Stretch,
    owners: Owners,
    is_stale: bool,
    has_gained: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Stage {
    Listening,
    StandingBy(Why),
    Acting,
}

/// A time in which we were heard without a gap.
#[derive(Debug, Clone, Copy, Default)]
struct Stretch {
    /// When the first heartbeat was sent that may come back in it.
    begun: Option<BootTime>,
    /// When the first one did.
    first: Option<BootTime>,
    /// When the last one was sent that did.
    last: Option<BootTime>,
}

impl Stretch {
    fn lease(&self) -> Option<BootTime> {
        self.last.map(|last| last + LEASE)
    }
}

impl Core {
    /// Not connected; listens first.
    pub fn new(instance: Ksuid, us: Sender) -> Core {
        Core {
            owners: Owners::new(&us, []),
            instance,
            us,
            table: Table::default(),
            stage: Stage::Listening,
            term: None,
            is_connected: false,
            is_paused: false,
            is_draining: false,
            has_left: false,
            is_gone: false,
            last_number: 0,
            next_beat: BootTime::START,
            unheard: VecDeque::new(),
            stretch: Stretch::default(),
            is_stale: true,
            has_gained: false,
        }
    }

    /// Takes what happened at `now`, and says what to do at once.
    pub fn step(&mut self, now: BootTime, input: Input) -> Vec<Output> {
        let mut out = Vec::new();
        // First of all: whoever wakes up must not take what waited for news.
        if self.stretch.lease().is_some_and(|lease| now >= lease) {
            self.interrupt(now, &mut out);
        }
        match input {
            Input::Time => {}
            Input::Link(sender) => self.link(sender, now, &mut out),
            Input::Unsent(number) => {
                self.unheard.retain(|(unheard, _)| *unheard != number);
                self.next_beat = now + UNSENT_AGAIN;
            }
            Input::Heard(beat) if beat.instance == self.instance => {
                self.hear_us(&beat, now, &mut out)
            }
            Input::Heard(beat) => self.hear(&beat, now, &mut out),
            Input::Pause(is_paused) => {
                self.is_paused = is_paused;
                if !is_paused && mem::take(&mut self.has_left) {
                    self.next_beat = now;
                }
            }
            Input::Drain => self.is_draining = true,
            Input::Idle => self.leave(&mut out),
        }
        self.advance(now, &mut out);
        out
    }

    /// When to call [`Core::step`] with [`Input::Time`], whatever else happens.
    pub fn wake(&self, now: BootTime) -> Option<BootTime> {
        let beat = self.speaks().then_some(self.next_beat);
        let acts = match self.stage {
            Stage::Listening => self.stretch.first.map(|first| first + LISTEN),
            Stage::Acting | Stage::StandingBy(_) => None,
        };
        let ends =
            self.term.filter(|_| self.stage != Stage::Acting && self.stretch.first.is_none());
        let ends = ends.map(|acted| acted + TERM_OUTLIVES);
        let wakes = [beat, acts, ends, self.stretch.lease(), self.table.next_change(now)];
        wakes.into_iter().flatten().min()
    }

    /// The part we play.
    pub fn part(&self) -> Part {
        match self.stage {
            _ if self.has_left => Part::Out,
            Stage::Listening => Part::Listening,
            Stage::StandingBy(_) => Part::StandingBy,
            Stage::Acting => Part::Acting,
        }
    }

    /// Who else is there.
    pub fn peers(&self) -> &[Peer] {
        self.table.peers()
    }

    /// Our part of all nodes while we act: one of so many.
    pub fn sharers(&self) -> Option<usize> {
        (self.stage == Stage::Acting).then(|| self.owners.count())
    }

    /// What an operator should know, if anything: why we stand by or can't begin, or that another is who we are.
    pub fn trouble(&self, now: BootTime) -> Option<Trouble> {
        if let Stage::StandingBy(why) = &self.stage {
            return Some(Trouble::StandingBy(why.clone()));
        }
        let waits =
            self.stretch.begun.filter(|_| self.stretch.first.is_none() && self.is_connected);
        if waits.is_some_and(|begun| now.since(begun) >= UNHEARD_LONG) {
            return Some(Trouble::Unheard);
        }
        let twin = self.table.peers().iter().find(|peer| peer.sender == self.us);
        twin.map(|twin| Trouble::Younger(twin.clone()))
    }

    /// Whether nodes of ours must end before we can go: then [`Input::Idle`] is waited for.
    pub fn is_leaving(&self) -> bool {
        self.is_draining && !self.is_gone || self.is_paused && !self.has_left
    }

    /// Whether all is said and done.
    pub fn is_gone(&self) -> bool {
        self.is_gone
    }

    fn link(&mut self, sender: Option<Sender>, now: BootTime, out: &mut Vec<Output>) {
        self.is_connected = sender.is_some();
        self.interrupt(now, out);
        if let Some(sender) = sender.filter(|sender| *sender != self.us) {
            self.us = sender;
            self.is_stale = true;
        }
    }

    /// We may not have been heard, or may not have heard others: from now on we listen.
    fn interrupt(&mut self, now: BootTime, out: &mut Vec<Output>) {
        self.stretch = Stretch::default();
        // What was sent before says nothing about now.
        self.unheard.clear();
        self.next_beat = now;
        if self.stage == Stage::Acting {
            self.stage = Stage::Listening;
            out.push(Output::Listen);
        }
    }

    /// A heartbeat of ours came back, if it is one.
    fn hear_us(&mut self, beat: &Heartbeat, now: BootTime, out: &mut Vec<Output>) {
        if beat.number > self.last_number || beat.role != Role::Active {
            out.push(Output::Ignored(Ignored::Forged));
            return;
        }
        // It may be of the time before an interruption, or come twice.
        let Some(at) = self.unheard.iter().position(|(number, _)| *number == beat.number) else {
            return;
        };
        let Some((_, sent)) = self.unheard.drain(..=at).next_back() else { return };
        if now >= sent + LEASE || beat.sender != self.us || beat.leaving {
            return;
        }
        // Before that it may have waited for the socket.
        self.stretch.first.get_or_insert(now);
        self.stretch.last = Some(sent);
        if self.stage == Stage::Acting {
            self.term = Some(sent);
            out.push(Output::Renew(sent + LEASE));
        }
    }

    fn hear(&mut self, beat: &Heartbeat, now: BootTime, out: &mut Vec<Output>) {
        match self.table.hear(beat, now) {
            Change::Nothing => {}
            Change::Joined(peer) => {
                self.is_stale = true;
                out.push(Output::Joined(peer));
            }
            Change::Left(peer) => self.lose(peer, Parting::Left, out),
            Change::Full => out.push(Output::Ignored(Ignored::Excess)),
        }
    }

    fn lose(&mut self, peer: Peer, how: Parting, out: &mut Vec<Output>) {
        self.is_stale = true;
        self.has_gained |= peer.role == Role::Active && peer.sender != self.us;
        out.push(Output::Gone(peer, how));
    }

    /// Nobody of ours is worked on any more: gives our share to the others.
    fn leave(&mut self, out: &mut Vec<Output>) {
        if !self.is_leaving() {
            return;
        }
        if self.is_connected && !self.has_left {
            let beat = Heartbeat { leaving: true, ..self.next() };
            out.push(Output::Beat(beat));
        }
        self.has_left = true;
        self.is_gone = self.is_draining;
        self.stretch = Stretch::default();
        self.unheard.clear();
        if self.term.take().is_some() {
            out.push(Output::EndTerm);
        }
        self.stage = Stage::Listening;
        out.push(Output::Listen);
    }

    /// What is due at `now`, whatever has happened.
    fn advance(&mut self, now: BootTime, out: &mut Vec<Output>) {
        for peer in self.table.forget(now) {
            self.lose(peer, Parting::Silent, out);
        }
        if mem::take(&mut self.is_stale) {
            let owners = Owners::new(&self.us, self.table.sharers(&self.us));
            if owners != self.owners {
                self.owners = owners.clone();
                out.push(Output::Owners(owners));
            }
        }
        let was_acting = self.stage == Stage::Acting;
        self.end_term_if_over(now, out);
        self.change_stage(now, out);
        let has_gained = mem::take(&mut self.has_gained);
        if has_gained && was_acting && self.stage == Stage::Acting {
            out.push(Output::Gained);
        }
        if self.speaks() && now >= self.next_beat {
            let beat = self.next();
            self.unheard.push_back((beat.number, now));
            if self.unheard.len() > UNHEARD_MAX {
                self.unheard.pop_front();
            }
            self.stretch.begun.get_or_insert(now);
            self.next_beat = now + BEAT_EVERY;
            out.push(Output::Beat(beat));
        }
    }

    /// After a long silence of ours others may have our nodes in hand.
    fn end_term_if_over(&mut self, now: BootTime, out: &mut Vec<Output>) {
        let heard_again = self.stretch.first.unwrap_or(now);
        let is_over = |acted: BootTime| heard_again.since(acted) >= TERM_OUTLIVES;
        if self.stage != Stage::Acting && self.term.take_if(|acted| is_over(*acted)).is_some() {
            out.push(Output::EndTerm);
            out.push(Output::Listen);
        }
    }

    fn change_stage(&mut self, now: BootTime, out: &mut Vec<Output>) {
        let twin = self.table.older_twin(&self.instance, &self.us).cloned().map(Why::Twin);
        let why = twin.or_else(|| self.table.leader().cloned().map(Why::Leader));
        match (why, &self.stage) {
            _ if self.has_left => {}
            (Some(why), Stage::StandingBy(former)) if why.is_like(former) => {}
            (Some(why), _) => {
                if self.term.take().is_some() {
                    out.push(Output::EndTerm);
                }
                out.push(Output::StandBy(why.clone()));
                self.stage = Stage::StandingBy(why);
            }
            (None, Stage::StandingBy(_)) => {
                self.stage = Stage::Listening;
                out.push(Output::Listen);
                self.act_if_listened(now, out);
            }
            (None, Stage::Listening) => self.act_if_listened(now, out),
            (None, Stage::Acting) => {}
        }
    }

    fn act_if_listened(&mut self, now: BootTime, out: &mut Vec<Output>) {
        let Stretch { first: Some(first), last: Some(last), .. } = self.stretch else { return };
        if now >= first + LISTEN {
            self.stage = Stage::Acting;
            self.term = Some(last);
            out.push(Output::Act(last + LEASE));
        }
    }

    fn speaks(&self) -> bool {
        self.is_connected && !self.has_left
    }

    fn next(&mut self) -> Heartbeat {
        self.last_number += 1;
        Heartbeat {
            instance: self.instance,
            sender: self.us.clone(),
            role: Role::Active,
            leaving: false,
            number: self.last_number,
        }
    }
}

impl Why {
    /// Whether it is the same, though heard at another time.
    fn is_like(&self, other: &Why) -> bool {
        match (self, other) {
            (Why::Twin(one), Why::Twin(other)) | (Why::Leader(one), Why::Leader(other)) => {
                one.instance == other.instance
            }
            (Why::Twin(_), Why::Leader(_)) | (Why::Leader(_), Why::Twin(_)) => false,
        }
    }
}

/// What an operator should know.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Trouble {
    /// We stand by.
    StandingBy(Why),
    /// Our own heartbeats don't come back.
    Unheard,
    /// Another has our identity and caller, and stands by.
    Younger(Peer),
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Why::Twin(Peer { instance, sender: Sender { identity, caller }, .. }) => write!(
                f,
                "instance {instance} has our identity {identity} and caller {caller} and is older: give each daemon an identity of its own"
            ),
            Why::Leader(Peer { sender: Sender { identity, .. }, .. }) => write!(
                f,
                "{identity} leads an election: set active_active or leader_election on all daemons of an account alike"
            ),
        }
    }
}

impl fmt::Display for Trouble {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Trouble::StandingBy(why) => why.fmt(f),
            Trouble::Unheard => f.write_str(
                "our own heartbeats don't come back: the broker must let this account publish and subscribe to choria.provisioner.peer",
            ),
            Trouble::Younger(Peer { instance, .. }) => write!(
                f,
                "instance {instance} has our identity and caller too, and stands by: give each daemon an identity of its own"
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fleet::peers::table::testing::{beat, instance, sender};
    use crate::fleet::peers::table::{GONE_AFTER, HOLD_OFF, PEERS_MAX};
    use crate::protocol::Identity;

    const SECOND: u64 = 1_000;

    /// The fifth process of all, and the time in milliseconds. Its heartbeats come back at once unless nobody hears it.
    struct Bench {
        core: Core,
        now: u64,
        is_heard: bool,
    }

    impl Bench {
        fn new() -> Bench {
            let core = Core::new(instance(5), sender("us"));
            Bench { core, now: 1_000_000, is_heard: true }
        }

        /// One that has listened, and acts.
        fn acting() -> Bench {
            let mut bench = Bench::new();
            bench.connect();
            bench.pass(6 * SECOND);
            assert_eq!(bench.core.part(), Part::Acting);
            bench
        }

        fn connect(&mut self) -> Vec<Output> {
            self.step(Input::Link(Some(sender("us"))))
        }

        /// Takes an input, and gives back the heartbeats that follow. Everything else is returned.
        fn step(&mut self, input: Input) -> Vec<Output> {
            let mut seen = Vec::new();
            let mut inputs = VecDeque::from([input]);
            while let Some(input) = inputs.pop_front() {
                for output in self.core.step(time(self.now), input) {
                    match output {
                        Output::Beat(beat) if self.is_heard => inputs.push_back(Input::Heard(beat)),
                        Output::Beat(_) | Output::Renew(_) | Output::Owners(_) => {}
                        other => seen.push(other),
                    }
                }
            }
            seen
        }

        /// Lets time pass; the core is called whenever it wants to be.
        fn pass(&mut self, ms: u64) -> Vec<Output> {
            let end = self.now + ms;
            let mut seen = Vec::new();
            while let Some(wake) = self.core.wake(time(self.now)).filter(|wake| *wake <= time(end))
            {
                let wake = u64::try_from(wake.since(BootTime::START).as_millis()).unwrap();
                assert!(wake >= self.now || wake == 0, "it wakes in the past");
                self.now = self.now.max(wake);
                seen.extend(self.step(Input::Time));
            }
            self.now = end;
            seen
        }

        /// The process stands still.
        fn freeze(&mut self, ms: u64) {
            self.now += ms;
        }

        fn hear(&mut self, number: u8, name: &str, role: Role) -> Vec<Output> {
            self.step(Input::Heard(beat(number, name, role)))
        }

        /// Lets time pass while a peer is heard.
        fn pass_beside(&mut self, number: u8, name: &str, role: Role, ms: u64) -> Vec<Output> {
            let mut seen = Vec::new();
            for _ in 0..ms / SECOND {
                seen.extend(self.hear(number, name, role));
                seen.extend(self.pass(SECOND));
            }
            seen
        }

        fn lease(&self) -> Option<u64> {
            let lease = self.core.stretch.lease()?.since(BootTime::START).as_millis();
            u64::try_from(lease).ok()
        }
    }

    fn time(ms: u64) -> BootTime {
        BootTime::START + Duration::from_millis(ms)
    }

    fn acts(outputs: &[Output]) -> bool {
        outputs.iter().any(|output| matches!(output, Output::Act(_)))
    }

    #[test]
    fn listens_for_six_seconds_after_the_start_and_after_a_reconnect() {
        let mut bench = Bench::new();
        assert_eq!(bench.pass(60 * SECOND), [], "there is no connection");
        bench.connect();
        assert_eq!(bench.pass(6 * SECOND - 1), []);
        let [Output::Act(until)] = bench.pass(1)[..] else { panic!("it acts") };
        assert!(until > time(bench.now) && until <= time(bench.now) + LEASE);
        assert_eq!(bench.step(Input::Link(None)), [Output::Listen]);
        bench.connect();
        assert!(!acts(&bench.pass(6 * SECOND - 1)));
        assert!(acts(&bench.pass(1)));
    }

    #[test]
    fn a_heartbeat_that_came_back_lets_it_act_from_its_sending() {
        let mut bench = Bench::acting();
        bench.is_heard = false;
        let last = bench.lease().unwrap();
        bench.pass(2 * SECOND);
        let sent = bench.core.unheard.back().copied();
        assert_eq!(bench.lease(), Some(last), "it has not come back");
        let Some((number, sent)) = sent else { panic!("it has sent another one") };
        let beat = Heartbeat { number, ..beat(5, "us", Role::Active) };
        let renewed = bench.core.step(time(bench.now), Input::Heard(beat));
        assert_eq!(renewed, [Output::Renew(sent + LEASE)]);
    }

    #[test]
    fn listens_from_the_return_of_the_first_heartbeat_which_may_have_waited_for_the_socket() {
        let mut bench = Bench::new();
        bench.is_heard = false;
        bench.connect();
        let (number, _) = *bench.core.unheard.back().unwrap();
        bench.freeze(3 * SECOND);
        bench.is_heard = true;
        bench.step(Input::Heard(Heartbeat { number, ..beat(5, "us", Role::Active) }));
        assert!(!acts(&bench.pass(6 * SECOND - 1)));
        assert!(acts(&bench.pass(1)));
    }

    #[test]
    fn whoever_is_not_heard_any_more_stops_and_says_why() {
        let mut bench = Bench::acting();
        bench.is_heard = false;
        let left = bench.lease().unwrap() - bench.now;
        assert_eq!(bench.pass(left - 1), []);
        assert_eq!(bench.pass(1), [Output::Listen]);
        assert_eq!(bench.core.part(), Part::Listening);
        assert_eq!(bench.core.trouble(time(bench.now)), None);
        assert_eq!(bench.pass(60 * SECOND), [Output::EndTerm, Output::Listen]);
        assert_eq!(bench.core.trouble(time(bench.now)), Some(Trouble::Unheard));
        bench.is_heard = true;
        assert!(acts(&bench.pass(9 * SECOND)));
        assert_eq!(bench.core.trouble(time(bench.now)), None);
    }

    #[test]
    fn whoever_wakes_up_acts_on_nothing_before_it_has_listened() {
        // However it notices: by time, by a heartbeat that waited, its own or another's.
        let own = |bench: &Bench| {
            let (number, _) = *bench.core.unheard.back().unwrap();
            Input::Heard(Heartbeat { number, ..beat(5, "us", Role::Active) })
        };
        for (waits, frozen) in [(0, 4), (1, 4), (2, 4), (0, 30), (1, 30), (2, 30)] {
            let mut bench = Bench::acting();
            bench.is_heard = false;
            bench.pass(2 * SECOND);
            let first = match waits {
                0 => Input::Time,
                1 => own(&bench),
                _ => Input::Heard(beat(1, "a", Role::Active)),
            };
            bench.is_heard = true;
            bench.freeze(frozen * SECOND);
            let woken = bench.step(first);
            assert_eq!(woken[0], Output::Listen, "{waits} {frozen}");
            assert!(!acts(&woken) && bench.core.part() == Part::Listening);
            assert!(!acts(&bench.pass(6 * SECOND - 1)), "{waits} {frozen}");
            assert!(acts(&bench.pass(SECOND)), "{waits} {frozen}");
        }
    }

    #[test]
    fn one_that_was_frozen_while_it_listened_listens_anew() {
        let mut bench = Bench::new();
        bench.connect();
        bench.pass(3 * SECOND);
        bench.freeze(10 * SECOND);
        assert!(!acts(&bench.step(Input::Time)));
        assert!(!acts(&bench.pass(6 * SECOND - 1)));
        assert!(acts(&bench.pass(1)));
    }

    #[test]
    fn what_was_begun_outlives_a_silence_that_nobody_has_noticed() {
        for (silent, outlives) in [(1, true), (5, true), (7, true), (8, false), (30, false)] {
            let mut bench = Bench::acting();
            // To the moment of a heartbeat.
            bench.pass(2 * SECOND);
            bench.step(Input::Link(None));
            let mut seen = bench.pass(silent * SECOND);
            seen.extend(bench.connect());
            seen.extend(bench.pass(6 * SECOND));
            assert_eq!(seen.contains(&Output::EndTerm), !outlives, "{silent}");
            assert_eq!(bench.core.part(), Part::Acting);
        }
    }

    #[test]
    fn a_newcomer_has_its_share_at_once_and_one_that_is_gone_keeps_it_for_a_while() {
        let mut bench = Bench::acting();
        let of = |bench: &Bench| bench.core.sharers();
        assert_eq!(of(&bench), Some(1));
        assert!(matches!(bench.hear(1, "a", Role::Active)[..], [Output::Joined(_)]));
        assert_eq!(of(&bench), Some(2));
        let silence = u64::try_from((GONE_AFTER + HOLD_OFF).as_millis()).unwrap();
        assert_eq!(bench.pass(silence - 1), []);
        assert_eq!(of(&bench), Some(2));
        let gone = bench.pass(1);
        assert!(matches!(gone[..], [Output::Gone(_, Parting::Silent), Output::Gained]), "{gone:?}");
        assert_eq!(of(&bench), Some(1));
    }

    #[test]
    fn the_share_of_one_that_leaves_is_ours_at_once() {
        let mut bench = Bench::acting();
        bench.hear(1, "a", Role::Active);
        let leaving = Heartbeat { leaving: true, ..beat(1, "a", Role::Active) };
        let left = bench.step(Input::Heard(leaving));
        assert!(matches!(left[..], [Output::Gone(_, Parting::Left), Output::Gained]), "{left:?}");
    }

    #[test]
    fn what_is_gained_while_it_listens_is_found_by_its_first_discovery() {
        let mut bench = Bench::new();
        bench.connect();
        bench.hear(1, "a", Role::Active);
        let leaving = Heartbeat { leaving: true, ..beat(1, "a", Role::Active) };
        let left = bench.step(Input::Heard(leaving));
        assert!(matches!(left[..], [Output::Gone(..)]), "{left:?}");
        assert!(matches!(bench.pass(7 * SECOND)[..], [Output::Act(_)]));
    }

    #[test]
    fn all_know_whose_a_node_is() {
        let names = ["a", "b", "us"];
        let mut owners = Vec::new();
        for (us, name) in names.iter().enumerate() {
            let mut core = Core::new(instance(us as u8), sender(name));
            let mut told = None;
            for (other, name) in names.iter().enumerate().filter(|(other, _)| *other != us) {
                let heard = Input::Heard(beat(other as u8, name, Role::Active));
                for output in core.step(time(SECOND), heard) {
                    if let Output::Owners(owners) = output {
                        told = Some(owners);
                    }
                }
            }
            owners.push(told.expect("it tells who shares"));
        }
        for node in (0..100).map(|n| Identity::parse(&format!("n{n}")).unwrap()) {
            assert_eq!(owners.iter().filter(|owners| owners.is_ours(&node)).count(), 1);
        }
    }

    #[test]
    fn the_younger_of_two_that_are_one_to_nodes_stands_by() {
        let mut bench = Bench::acting();
        let heard = bench.hear(9, "us", Role::Active);
        assert!(matches!(heard[..], [Output::Joined(_)]));
        assert!(matches!(bench.core.trouble(time(bench.now)), Some(Trouble::Younger(_))));
        assert_eq!(bench.core.sharers(), Some(1), "it has no share of its own");
        bench.pass(20 * SECOND);

        let heard = bench.hear(1, "us", Role::Active);
        let [Output::Joined(_), Output::EndTerm, Output::StandBy(Why::Twin(_))] = &heard[..] else {
            panic!("{heard:?}")
        };
        assert_eq!(bench.core.part(), Part::StandingBy);
        let trouble = bench.core.trouble(time(bench.now)).unwrap().to_string();
        assert!(trouble.contains("us.example.net") && trouble.contains("choria=us"), "{trouble}");
        assert_eq!(bench.pass_beside(1, "us", Role::Active, 60 * SECOND), []);
        // It has listened all the time.
        let leaving = Heartbeat { leaving: true, ..beat(1, "us", Role::Active) };
        let left = bench.step(Input::Heard(leaving));
        assert!(matches!(left[..], [Output::Gone(..), Output::Listen, Output::Act(_)]), "{left:?}");
    }

    #[test]
    fn one_that_shares_its_nodes_stands_by_while_somebody_leads() {
        let mut bench = Bench::acting();
        bench.hear(1, "a", Role::Candidate);
        assert_eq!(bench.core.part(), Part::Acting, "nobody leads");
        bench.hear(1, "a", Role::Leader);
        assert_eq!(bench.core.part(), Part::StandingBy);
        assert_eq!(bench.pass_beside(1, "a", Role::Leader, 20 * SECOND), []);
        assert!(!acts(&bench.pass(10 * SECOND)));
        assert!(acts(&bench.pass(2 * SECOND)), "it was not heard for twelve seconds");
    }

    #[test]
    fn whoever_is_paused_leaves_when_its_nodes_are_done_and_listens_when_it_comes_back() {
        let mut bench = Bench::acting();
        assert_eq!(bench.step(Input::Pause(true)), []);
        assert!(bench.core.is_leaving());
        assert_eq!(bench.pass(20 * SECOND), [], "a node is in hand");
        bench.is_heard = false;
        let outputs = bench.core.step(time(bench.now), Input::Idle);
        let [Output::Beat(beat), Output::EndTerm, Output::Listen] = &outputs[..] else {
            panic!("{outputs:?}")
        };
        assert!(beat.leaving && !bench.core.is_leaving() && !bench.core.is_gone());
        assert_eq!(bench.core.part(), Part::Out);
        assert_eq!(bench.core.wake(time(bench.now)), None, "it says nothing any more");
        bench.step(Input::Heard(beat.clone()));
        bench.is_heard = true;
        bench.connect();
        assert_eq!(bench.pass(20 * SECOND), []);
        bench.step(Input::Pause(false));
        assert!(!acts(&bench.pass(6 * SECOND - 1)));
        assert!(acts(&bench.pass(1)));
    }

    #[test]
    fn whoever_ends_leaves_last_of_all_even_if_it_was_paused_or_never_connected() {
        let mut bench = Bench::acting();
        bench.step(Input::Drain);
        assert!(bench.core.is_leaving() && !bench.core.is_gone());
        bench.is_heard = false;
        let outputs = bench.core.step(time(bench.now), Input::Idle);
        assert!(matches!(&outputs[..], [Output::Beat(beat), ..] if beat.leaving));
        assert!(bench.core.is_gone());

        let mut bench = Bench::acting();
        bench.step(Input::Pause(true));
        bench.step(Input::Idle);
        bench.step(Input::Drain);
        assert!(bench.core.is_leaving());
        assert_eq!(bench.step(Input::Idle), [Output::Listen]);
        assert!(bench.core.is_gone());

        let mut bench = Bench::new();
        bench.step(Input::Drain);
        bench.step(Input::Idle);
        assert!(bench.core.is_gone());
    }

    #[test]
    fn a_heartbeat_that_could_not_be_sent_is_sent_again() {
        let mut bench = Bench::new();
        bench.is_heard = false;
        bench.connect();
        let (number, _) = *bench.core.unheard.back().unwrap();
        bench.step(Input::Unsent(number));
        assert!(bench.core.unheard.is_empty());
        assert_eq!(bench.core.wake(time(bench.now)), Some(time(bench.now) + UNSENT_AGAIN));
    }

    #[test]
    fn who_we_are_may_change_with_the_connection() {
        let mut bench = Bench::acting();
        bench.hear(1, "a", Role::Active);
        let outputs = bench.core.step(time(bench.now), Input::Link(Some(sender("new"))));
        let told = outputs.iter().find_map(|output| match output {
            Output::Owners(owners) => Some(owners.clone()),
            _ => None,
        });
        assert_eq!(told, Some(Owners::new(&sender("new"), [&sender("a")])));
        let says =
            |output: &Output| matches!(output, Output::Beat(beat) if beat.sender == sender("new"));
        assert!(outputs.iter().any(says));
    }

    #[test]
    fn nobody_can_say_that_we_were_heard() {
        let mut bench = Bench::new();
        bench.is_heard = false;
        bench.connect();
        let forged = |number| Input::Heard(Heartbeat { number, ..beat(5, "us", Role::Active) });
        for number in 2..1_000 {
            assert_eq!(bench.step(forged(number)), [Output::Ignored(Ignored::Forged)]);
        }
        let leader = Heartbeat { number: 0, ..beat(5, "us", Role::Leader) };
        assert_eq!(bench.step(Input::Heard(leader)), [Output::Ignored(Ignored::Forged)]);
        // One of the past, one under another name, one that leaves.
        for beat in [
            Heartbeat { number: 0, ..beat(5, "us", Role::Active) },
            Heartbeat { number: 1, ..beat(5, "them", Role::Active) },
        ] {
            assert_eq!(bench.step(Input::Heard(beat)), []);
        }
        assert_eq!(bench.core.peers(), []);
        assert!(!acts(&bench.pass(20 * SECOND)));
    }

    #[test]
    fn ten_thousand_peers_that_are_not_there_are_bounded_and_forgotten() {
        let mut bench = Bench::acting();
        let mut excess = 0;
        for number in 0..10_000_i64 {
            let beat = Heartbeat {
                instance: Ksuid::new(1_750_000_000 + number, [9; 16]),
                ..beat(1, &format!("forged{number}"), Role::Active)
            };
            let outputs = bench.step(Input::Heard(beat));
            excess += usize::from(outputs.contains(&Output::Ignored(Ignored::Excess)));
        }
        assert_eq!((bench.core.peers().len(), excess), (PEERS_MAX, 10_000 - PEERS_MAX));
        assert_eq!(bench.core.sharers(), Some(PEERS_MAX + 1));
        bench.pass(12 * SECOND);
        assert_eq!((bench.core.peers().len(), bench.core.sharers()), (0, Some(1)));
    }
}
