//! Who leads: when to write the election's key, and what follows from the answer. No clock, no I/O.
//!
//! One write at a time. Its success makes us the key's holder, and the next one, with the number it was given, shows that
//! we still are. A holder leads once a write succeeded that was sent [`CONFIRM_AFTER`] after it learned of the first, and for
//! [`LEASE`] from the *sending* of the last that did: whoever held the key before us has stopped by then, however it lost it,
//! and whoever takes it from us has to wait for us as well. So two of us never lead in one instant, whatever happens to
//! messages, broker, bucket and the processes themselves. A leader of the original has no lease, and gives no such promise.
//!
//! A connection that is lost takes the lease and leaves the term: the key outlives a broker's restart. One write with its
//! number then shows whether it was ours all the time, and what was begun in the term goes on; or it was not, and the term
//! ends.
//!
//! A holder that stops offers the key by its number. Whoever takes it does so by that number, and so does the former holder if nobody
//! has after [`TAKE_BACK_AFTER`]: the broker lets one of them have it, who confirms it like every winner.
//!
//! Source: go-choria `providers/election/streams/election.go`, whose keys these are.

use std::fmt;
use std::time::Duration;

use fastrand::Rng;

use crate::clock::BootTime;
use crate::transport::backoff::FIVE_SEC;

/// From one write of a holder to the next, from sending to sending. The original's are a quarter to three quarters of a second apart.
pub const HOLD_EVERY: Duration = Duration::from_millis(500);
/// From one write of a candidate to the next, on average. A refused one costs the broker little: it is not replicated.
pub const CAMPAIGN_EVERY: Duration = Duration::from_secs(1);
/// How long a write that succeeded lets us lead, from its sending.
pub const LEASE: Duration = Duration::from_millis(1_500);
/// From learning that the key is ours to the sending of the write that makes us leader. Longer than [`LEASE`], so that a
/// clock may be a little faster than another, and a step that was allowed has time to begin.
pub const CONFIRM_AFTER: Duration = Duration::from_millis(1_600);
/// How long the broker may take for an answer.
pub const ANSWER_MAX: Duration = Duration::from_secs(2);
/// How long a key that we offered is left to others. They take it within milliseconds if they are there; without them nobody
/// leads meanwhile.
pub const TAKE_BACK_AFTER: Duration = Duration::from_secs(3);
/// Least time between two writes of a candidate: anyone may say that a key is on offer.
const OFFER_EVERY: Duration = Duration::from_millis(100);
/// When something is sent again that could not be, although the connection is said to be there.
const UNSENT_AGAIN: Duration = Duration::from_millis(100);
/// When a holder tries again to find out whether the key is still its own.
const CHECK_AGAIN: Duration = Duration::from_millis(250);

/// Names a request, so that its answer is known.
pub type Ticket = u64;

/// What happened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Input {
    /// Time has passed, see [`Core::wake`].
    Time,
    /// The connection came or went.
    Link(bool),
    /// A request could not be sent.
    Unsent(Ticket),
    /// The broker answered.
    Answer(Ticket, Answer),
    /// A leader offers its key, which has this number.
    Offer(u64),
    /// An operator pauses or resumes us.
    Pause(bool),
    /// An operator wants another to lead.
    StepDown,
    /// The process is ending.
    Drain,
    /// No node is being worked on: a leader that wants to stop may.
    Idle,
}

/// What the broker answered, or its news that nobody would.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answer {
    /// To the question for the bucket: it can be used, and keys live that long.
    Usable(Duration),
    /// It can't, and why.
    Unusable(String),
    /// To a write: the key's number from now on.
    Stored(u64),
    /// To a write: another has the key.
    Contended(String),
    /// To a write: it failed for any other reason.
    Failed(String),
    /// Nobody listens where it was sent.
    NoResponders,
}

/// What to do, in this order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Output {
    /// Ask for the bucket.
    AskStatus(Ticket),
    /// Write our identity if the key has this number.
    Write {
        /// For its answer.
        ticket: Ticket,
        /// 0 for a key that is not there.
        expected: u64,
    },
    /// We lead: nodes may be begun until then.
    Lead(BootTime),
    /// We still lead, until then; while we step down, for what was begun alone.
    Renew(BootTime),
    /// We don't lead for now. What was begun waits for [`Output::Lead`], [`Output::Renew`] or [`Output::Lost`].
    Lapse,
    /// We no longer lead, and what was begun must end.
    Lost(Loss),
    /// Tell the candidates the number of our key.
    HandOver(u64),
}

/// Why we no longer lead.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Loss {
    /// It was our wish.
    SteppedDown,
    /// The key is not ours any more, or nobody says so.
    NotOurs(String),
}

/// How a request ended without an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unanswered {
    /// The connection was lost.
    Disconnected,
    /// The broker said nothing for [`ANSWER_MAX`].
    Silent,
    /// There is nobody who could answer.
    NoResponders,
}

/// The election as one candidate sees it.
#[derive(Debug, Clone)]
pub struct Core {
    stage: Stage,
    flight: Option<Flight>,
    /// The last write nobody waits for any more. If it was stored after all, the key is ours.
    given_up: Option<Ticket>,
    last_ticket: Ticket,
    last_sent: Option<BootTime>,
    /// A key that we may take, by its number.
    offer: Option<u64>,
    /// A key that we have offered, by its number, and nobody has taken as far as we know.
    offered: Option<u64>,
    /// How long a key lives.
    ttl: Duration,
    is_connected: bool,
    is_paused: bool,
    is_stepping_down: bool,
    is_draining: bool,
    trouble: Option<String>,
    random: Rng,
}

/// Where we are.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Stage {
    /// Whether there is a bucket is not known.
    SettingUp { failures: usize, next: BootTime },
    /// Another has the key, or nobody.
    Candidate { next: BootTime },
    /// The key is ours, as far as we know.
    Holder(Holder),
    /// The process is ending.
    Gone,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Holder {
    /// The key's number.
    number: u64,
    /// When we learned that the key is ours; none until a write shows that it still is.
    since: Option<BootTime>,
    /// When the last write that succeeded was sent.
    written: BootTime,
    next: BootTime,
    term: Term,
}

/// Whether there is a term of ours.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Term {
    /// Not yet, or no longer.
    None,
    /// There is, and while the lease lasts we lead.
    Leading,
    /// There is, and until the key is known to be ours we don't lead.
    Lapsed,
}

/// A request without an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Flight {
    ticket: Ticket,
    sent: BootTime,
}

/// For operators: what part we play.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// The election can't be held.
    SettingUp,
    /// We would lead if the leader did not.
    Candidate,
    /// We have offered our key to others, and take it back if nobody wants it.
    SteppedDown,
    /// The key is ours, and we don't lead yet.
    Confirming,
    /// We lead.
    Leader,
    /// We don't take part.
    Out,
}

impl Core {
    /// Not connected, and on nobody's wish to stay out.
    pub fn new(now: BootTime, random: Rng) -> Core {
        Core {
            stage: Stage::SettingUp { failures: 0, next: now },
            flight: None,
            given_up: None,
            last_ticket: 0,
            last_sent: None,
            offer: None,
            offered: None,
            ttl: Duration::ZERO,
            is_connected: false,
            is_paused: false,
            is_stepping_down: false,
            is_draining: false,
            trouble: None,
            random,
        }
    }

    /// Takes what happened at `now`, and says what to do at once.
    pub fn step(&mut self, now: BootTime, input: Input) -> Vec<Output> {
        let mut out = Vec::new();
        match input {
            Input::Time => {}
            Input::Link(is_connected) => self.link(is_connected, now, &mut out),
            Input::Unsent(ticket) => {
                if self.land(ticket, now).is_some() {
                    self.unanswered(Unanswered::Disconnected, now, &mut out);
                }
            }
            Input::Answer(ticket, answer) => self.answer(ticket, answer, now, &mut out),
            Input::Offer(number) => self.offered(number),
            Input::Pause(is_paused) => self.pause(is_paused, now),
            Input::StepDown => self.is_stepping_down = matches!(self.stage, Stage::Holder(_)),
            Input::Drain => self.is_draining = true,
            Input::Idle => self.idle(now, &mut out),
        }
        self.advance(now, &mut out);
        out
    }

    /// When to call [`Core::step`] with [`Input::Time`], whatever else happens.
    pub fn wake(&self) -> Option<BootTime> {
        if let Some(flight) = self.flight {
            return Some(flight.sent + ANSWER_MAX);
        }
        self.due()
    }

    /// The part we play at `now`.
    pub fn role(&self, now: BootTime) -> Role {
        match &self.stage {
            Stage::Holder(Holder { term: Term::Leading, written, .. })
                if now < *written + LEASE =>
            {
                Role::Leader
            }
            Stage::Holder(_) => Role::Confirming,
            Stage::Gone => Role::Out,
            Stage::SettingUp { .. } | Stage::Candidate { .. } if self.is_paused => Role::Out,
            Stage::SettingUp { .. } => Role::SettingUp,
            Stage::Candidate { .. } if self.offered.is_some() => Role::SteppedDown,
            Stage::Candidate { .. } => Role::Candidate,
        }
    }

    /// When we take back the key that we have offered, unless somebody wants it first.
    pub fn takes_back_at(&self) -> Option<BootTime> {
        match self.stage {
            Stage::Candidate { next } if self.offered.is_some() && self.may_campaign() => {
                Some(next)
            }
            _ => None,
        }
    }

    /// Why the election can't be held, by the last answer or the lack of one.
    pub fn trouble(&self) -> Option<&str> {
        self.trouble.as_deref()
    }

    /// Whether nodes of ours must end before we can go: a leader that wants to stop waits for [`Input::Idle`].
    pub fn is_leaving(&self) -> bool {
        matches!(self.stage, Stage::Holder(_)) && self.wants_out()
    }

    /// Whether all is said and done.
    pub fn is_gone(&self) -> bool {
        self.stage == Stage::Gone
    }

    /// How long a holder or candidate waits between two writes, about.
    pub fn interval(&self) -> Duration {
        if matches!(self.stage, Stage::Holder(_)) { HOLD_EVERY } else { CAMPAIGN_EVERY }
    }

    fn link(&mut self, is_connected: bool, now: BootTime, out: &mut Vec<Output>) {
        self.is_connected = is_connected;
        if !is_connected {
            self.offer = None;
            self.offered = None;
            self.lapse(now, out);
            // Nobody knows what became of it, and its answer would come over a connection that is gone.
            self.flight = None;
            self.given_up = None;
            return;
        }
        match &mut self.stage {
            Stage::SettingUp { next, .. } => *next = now,
            // It may be another broker.
            Stage::Candidate { .. } => self.stage = Stage::SettingUp { failures: 0, next: now },
            Stage::Holder(holder) => holder.next = now,
            Stage::Gone => {}
        }
    }

    fn offered(&mut self, number: u64) {
        if matches!(self.stage, Stage::Candidate { .. }) && self.may_campaign() {
            self.offer = Some(number);
        }
    }

    fn pause(&mut self, is_paused: bool, now: BootTime) {
        self.is_paused = is_paused;
        self.offer = None;
        if let (false, Stage::SettingUp { next, .. } | Stage::Candidate { next }) =
            (is_paused, &mut self.stage)
        {
            *next = now;
        }
    }

    /// A holder that wants to stop does. With a write under way its number is not known: that is waited for.
    fn idle(&mut self, now: BootTime, out: &mut Vec<Output>) {
        let Stage::Holder(holder) = &self.stage else { return };
        if !self.wants_out() || self.flight.is_some() {
            return;
        }
        let (number, is_ours) = (holder.number, holder.since.is_some());
        self.end_term(Loss::SteppedDown, out);
        let others_first = if is_ours {
            out.push(Output::HandOver(number));
            self.offered = Some(number);
            TAKE_BACK_AFTER
        } else {
            CAMPAIGN_EVERY
        };
        self.stage = Stage::Candidate { next: now + others_first };
    }

    fn answer(&mut self, ticket: Ticket, answer: Answer, now: BootTime, out: &mut Vec<Output>) {
        let Some(sent) = self.land(ticket, now) else { return self.late_answer(ticket, &answer) };
        match answer {
            Answer::NoResponders => self.unanswered(Unanswered::NoResponders, now, out),
            Answer::Usable(ttl) => {
                self.trouble = None;
                self.ttl = ttl;
                self.stage = Stage::Candidate { next: now };
            }
            Answer::Unusable(why) => self.set_up_again(why, now),
            Answer::Stored(number) => {
                self.trouble = None;
                self.stored(number, sent, now, out);
            }
            Answer::Contended(why) => {
                self.trouble = None;
                self.contended(why, sent, now, out);
            }
            Answer::Failed(why) => {
                self.offered = None;
                self.failed(why, now, out);
            }
        }
    }

    /// Takes the request with `ticket` for ended and says when it was sent. One that took too long has failed, whatever
    /// its answer is: the process may have been frozen, and what was true then is of no use now.
    fn land(&mut self, ticket: Ticket, now: BootTime) -> Option<BootTime> {
        let flight = self.flight.filter(|flight| flight.ticket == ticket)?;
        if now.since(flight.sent) >= ANSWER_MAX {
            return None;
        }
        self.flight = None;
        Some(flight.sent)
    }

    /// The answer to a write that we gave up: the key is ours, and until it has died nobody else can have it.
    fn late_answer(&mut self, ticket: Ticket, answer: &Answer) {
        let is_flying = self.flight.is_some_and(|flight| flight.ticket == ticket);
        if !is_flying && self.given_up != Some(ticket) {
            return;
        }
        let Answer::Stored(number) = *answer else { return };
        self.given_up = None;
        match &mut self.stage {
            Stage::Holder(holder) if is_flying || holder.since.is_none() => {
                holder.number = number;
                self.offer = Some(number);
            }
            Stage::Candidate { .. } | Stage::SettingUp { .. } => self.offer = Some(number),
            Stage::Holder(_) | Stage::Gone => {}
        }
    }

    fn stored(&mut self, number: u64, sent: BootTime, now: BootTime, out: &mut Vec<Output>) {
        (self.offer, self.offered) = (None, None);
        let (former, term) = match &self.stage {
            // A holder that heard of no success for so long is a new one: meanwhile another may have led.
            Stage::Holder(holder) if now >= holder.written + LEASE => (None, holder.term),
            Stage::Holder(holder) => (holder.since, holder.term),
            Stage::SettingUp { .. } | Stage::Candidate { .. } => (None, Term::None),
            Stage::Gone => return,
        };
        let since = former.unwrap_or(now);
        let lease = sent + LEASE;
        let confirm_at = since + CONFIRM_AFTER;
        // Whoever steps down begins no term, and in the one that it has nothing more: what was begun goes on.
        let begins_none = self.is_stepping_down && term == Term::None;
        let term = if sent >= confirm_at && now < lease && !begins_none {
            out.push(match term {
                Term::Leading => Output::Renew(lease),
                Term::Lapsed if self.is_stepping_down => Output::Renew(lease),
                Term::None | Term::Lapsed => Output::Lead(lease),
            });
            Term::Leading
        } else if term == Term::Leading {
            out.push(Output::Lapse);
            Term::Lapsed
        } else {
            term
        };
        let next = match sent + HOLD_EVERY {
            next if next < confirm_at && confirm_at < next + HOLD_EVERY => confirm_at,
            next => next,
        };
        let holder = Holder { number, since: Some(since), written: sent, next, term };
        self.stage = Stage::Holder(holder);
    }

    /// Another has the key, or nobody.
    fn contended(&mut self, why: String, sent: BootTime, now: BootTime, out: &mut Vec<Output>) {
        self.offered = None;
        let next = match &self.stage {
            Stage::Holder(_) => now,
            Stage::SettingUp { .. } | Stage::Candidate { .. } => sent + self.campaign_pause(),
            Stage::Gone => return,
        };
        self.end_term(Loss::NotOurs(why), out);
        self.stage = Stage::Candidate { next };
    }

    /// Nobody knows whether it was done, or whose the key is.
    fn failed(&mut self, why: String, now: BootTime, out: &mut Vec<Output>) {
        self.end_term(Loss::NotOurs(why.clone()), out);
        self.not_written(why, now, out);
    }

    fn unanswered(&mut self, how: Unanswered, now: BootTime, out: &mut Vec<Output>) {
        match how {
            Unanswered::Disconnected => {
                self.lapse(now, out);
                let again = now + UNSENT_AGAIN;
                match &mut self.stage {
                    Stage::SettingUp { next, .. } | Stage::Candidate { next } => *next = again,
                    Stage::Holder(holder) => holder.next = again,
                    Stage::Gone => {}
                }
            }
            // That came at once, and nothing was written.
            Unanswered::NoResponders => {
                self.lapse(now, out);
                self.not_written(how.to_string(), now, out);
            }
            Unanswered::Silent => self.failed(how.to_string(), now, out),
        }
    }

    /// A holder tries to find out whether the key is still its own, as long as it can be; a candidate, whether there is a
    /// bucket.
    fn not_written(&mut self, why: String, now: BootTime, out: &mut Vec<Output>) {
        match &mut self.stage {
            Stage::Holder(holder) if now < holder.written + self.ttl => {
                holder.since = None;
                holder.next = now + CHECK_AGAIN;
                self.trouble = Some(why);
            }
            _ => {
                self.end_term(Loss::NotOurs(why.clone()), out);
                self.set_up_again(why, now);
            }
        }
    }

    fn end_term(&mut self, why: Loss, out: &mut Vec<Output>) {
        let Stage::Holder(holder) = &mut self.stage else { return };
        if holder.term != Term::None {
            holder.term = Term::None;
            out.push(Output::Lost(why));
        }
        self.is_stepping_down = false;
    }

    /// Without a connection nobody leads, and whose the key is has to be asked.
    fn lapse(&mut self, now: BootTime, out: &mut Vec<Output>) {
        let Stage::Holder(holder) = &mut self.stage else { return };
        holder.since = None;
        holder.next = now;
        if holder.term == Term::Leading {
            holder.term = Term::Lapsed;
            out.push(Output::Lapse);
        }
    }

    fn set_up_again(&mut self, why: String, now: BootTime) {
        self.trouble = Some(why);
        let failures = match self.stage {
            Stage::SettingUp { failures, .. } => failures + 1,
            Stage::Candidate { .. } | Stage::Holder(_) => 1,
            Stage::Gone => return,
        };
        let next = now + FIVE_SEC.wait(failures, &mut self.random);
        self.stage = Stage::SettingUp { failures, next };
    }

    /// What is due at `now`, whatever has happened.
    fn advance(&mut self, now: BootTime, out: &mut Vec<Output>) {
        if let Some(flight) = self.flight.filter(|flight| now.since(flight.sent) >= ANSWER_MAX) {
            self.flight = None;
            self.given_up = Some(flight.ticket);
            self.unanswered(Unanswered::Silent, now, out);
        }
        if self.is_draining && !matches!(self.stage, Stage::Holder(_)) {
            self.stage = Stage::Gone;
        }
        if self.due().is_some_and(|due| due <= now) && self.flight.is_none() {
            self.send(now, out);
        }
    }

    /// When the next request is due, if any.
    fn due(&self) -> Option<BootTime> {
        if !self.is_connected {
            return None;
        }
        match &self.stage {
            Stage::SettingUp { next, .. } => self.may_campaign().then_some(*next),
            Stage::Candidate { next } => {
                let next = match (self.offer, self.last_sent) {
                    (Some(_), Some(last)) => (*next).min(last + OFFER_EVERY),
                    _ => *next,
                };
                self.may_campaign().then_some(next)
            }
            Stage::Holder(holder) => Some(holder.next),
            Stage::Gone => None,
        }
    }

    fn send(&mut self, now: BootTime, out: &mut Vec<Output>) {
        self.last_ticket += 1;
        let ticket = self.last_ticket;
        let output = match &self.stage {
            Stage::SettingUp { .. } => Output::AskStatus(ticket),
            Stage::Candidate { .. } => {
                let offer = self.offer.take();
                if offer.is_some() {
                    // Whoever offers one now has taken ours.
                    self.offered = None;
                }
                Output::Write { ticket, expected: offer.or(self.offered).unwrap_or(0) }
            }
            Stage::Holder(holder) => Output::Write { ticket, expected: holder.number },
            Stage::Gone => return,
        };
        self.flight = Some(Flight { ticket, sent: now });
        self.last_sent = Some(now);
        out.push(output);
    }

    fn may_campaign(&self) -> bool {
        !self.is_paused && !self.is_draining
    }

    fn wants_out(&self) -> bool {
        self.is_paused || self.is_draining || self.is_stepping_down
    }

    /// Three quarters to five quarters of [`CAMPAIGN_EVERY`], so that candidates don't go in step.
    fn campaign_pause(&mut self) -> Duration {
        CAMPAIGN_EVERY.mul_f64(0.75 + self.random.f64() / 2.0)
    }
}

impl fmt::Display for Unanswered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Unanswered::Disconnected => f.write_str("the connection was lost"),
            Unanswered::Silent => write!(f, "the broker did not answer within {ANSWER_MAX:?}"),
            Unanswered::NoResponders => f.write_str(
                "no responders: the broker has no Choria Streams, or does not let this account use its election",
            ),
        }
    }
}

impl fmt::Display for Loss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Loss::SteppedDown => f.write_str("stepped down"),
            Loss::NotOurs(why) => f.write_str(why),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TTL: Duration = Duration::from_secs(10);

    /// One candidate and the time, in milliseconds.
    struct Bench {
        core: Core,
        now: u64,
    }

    impl Bench {
        fn new() -> Bench {
            let now = 1_000_000;
            Bench { core: Core::new(time(now), Rng::with_seed(7)), now }
        }

        /// A candidate whose first write is refused because another leads.
        fn candidate() -> Bench {
            let mut bench = Bench::new();
            let ticket = bench.asks(Input::Link(true));
            let (ticket, _) = bench.writes(Input::Answer(ticket, Answer::Usable(TTL)));
            assert_eq!(bench.step(contended(ticket)), []);
            bench
        }

        /// Holder of key 5 since now.
        fn holder() -> Bench {
            let mut bench = Bench::new();
            let ticket = bench.asks(Input::Link(true));
            let (ticket, expected) = bench.writes(Input::Answer(ticket, Answer::Usable(TTL)));
            assert_eq!(expected, 0);
            assert_eq!(bench.step(stored(ticket, 5)), []);
            bench
        }

        /// Leader with key 9, its last write sent and answered now.
        fn leader() -> Bench {
            let mut bench = Bench::holder();
            for (after, number) in [(500, 6), (500, 7), (600, 8)] {
                bench.pass(after - 1);
                assert_eq!(bench.step(Input::Time), []);
                bench.pass(1);
                let (ticket, expected) = bench.writes(Input::Time);
                assert_eq!(expected, number - 1);
                let out = bench.step(stored(ticket, number));
                let lead = Output::Lead(time(bench.now + 1_500));
                assert_eq!(out, if number == 8 { vec![lead] } else { vec![] });
            }
            bench.renews(9);
            bench
        }

        /// The same half a second later, when its next write has just been sent.
        fn leader_that_writes() -> (Bench, Ticket) {
            let mut bench = Bench::leader();
            bench.pass(500);
            let (ticket, _) = bench.writes(Input::Time);
            (bench, ticket)
        }

        fn pass(&mut self, ms: u64) {
            self.now += ms;
        }

        fn step(&mut self, input: Input) -> Vec<Output> {
            self.core.step(time(self.now), input)
        }

        /// The next write, after half a second, succeeds at once.
        fn renews(&mut self, number: u64) {
            self.pass(500);
            let (ticket, expected) = self.writes(Input::Time);
            assert_eq!(expected, number - 1);
            let renewed = self.step(stored(ticket, number));
            assert_eq!(renewed, [Output::Renew(time(self.now + 1_500))]);
        }

        #[track_caller]
        fn asks(&mut self, input: Input) -> Ticket {
            match self.step(input).as_slice() {
                [Output::AskStatus(ticket)] => *ticket,
                other => panic!("{other:?}"),
            }
        }

        #[track_caller]
        fn writes(&mut self, input: Input) -> (Ticket, u64) {
            let (out, ticket, expected) = self.does_and_writes(input);
            assert_eq!(out, []);
            (ticket, expected)
        }

        #[track_caller]
        fn does_and_writes(&mut self, input: Input) -> (Vec<Output>, Ticket, u64) {
            let mut out = self.step(input);
            match out.pop() {
                Some(Output::Write { ticket, expected }) => (out, ticket, expected),
                other => panic!("{out:?} {other:?}"),
            }
        }

        /// Lets time pass until the core does something.
        #[track_caller]
        fn wait(&mut self) -> (u64, Vec<Output>) {
            let wake = self.core.wake().expect("there is something to wait for");
            let before = self.now;
            self.now = u64::try_from(wake.since(time(0)).as_millis()).unwrap() + 1;
            (self.now - before, self.step(Input::Time))
        }

        fn role(&self) -> Role {
            self.core.role(time(self.now))
        }
    }

    fn time(ms: u64) -> BootTime {
        BootTime::after_boot(Duration::from_millis(ms))
    }

    fn stored(ticket: Ticket, number: u64) -> Input {
        Input::Answer(ticket, Answer::Stored(number))
    }

    fn contended(ticket: Ticket) -> Input {
        Input::Answer(ticket, Answer::Contended("wrong last sequence: 7".to_owned()))
    }

    fn lost(why: &str) -> Output {
        Output::Lost(Loss::NotOurs(why.to_owned()))
    }

    #[test]
    fn a_winner_leads_after_a_write_that_was_sent_well_after_it_knew_of_its_first() {
        let bench = Bench::leader();
        assert_eq!(bench.role(), Role::Leader);
        assert_eq!(bench.core.trouble(), None);
    }

    #[test]
    fn the_lease_counts_from_the_sending_and_the_first_write_from_its_answer() {
        let mut bench = Bench::new();
        let ticket = bench.asks(Input::Link(true));
        let (ticket, _) = bench.writes(Input::Answer(ticket, Answer::Usable(TTL)));
        bench.pass(300);
        bench.step(stored(ticket, 5));
        let won = bench.now;
        let lead = loop {
            let (_, out) = bench.wait();
            let [Output::Write { ticket, expected }] = out[..] else { panic!("{out:?}") };
            let sent = bench.now;
            bench.pass(300);
            match bench.step(stored(ticket, expected + 1)).pop() {
                None => assert!(sent < won + 1_600),
                Some(lead) => break (sent, lead),
            }
        };
        let (sent, lead) = lead;
        assert!((won + 1_600..won + 1_610).contains(&sent), "{sent} after {won}");
        assert_eq!(lead, Output::Lead(time(sent + 1_500)));
    }

    #[test]
    fn a_candidate_tries_about_once_a_second_and_finds_nothing_wrong() {
        let mut bench = Bench::candidate();
        let mut waits = Vec::new();
        for _ in 0..200 {
            let (waited, out) = bench.wait();
            let [Output::Write { ticket, expected: 0 }] = out[..] else { panic!("{out:?}") };
            bench.step(contended(ticket));
            waits.push(waited);
        }
        assert!(waits.iter().all(|wait| (750..1_252).contains(wait)), "{waits:?}");
        assert!(waits.iter().any(|wait| *wait < 850) && waits.iter().any(|wait| *wait > 1_150));
        assert_eq!((bench.role(), bench.core.trouble()), (Role::Candidate, None));
    }

    #[test]
    fn a_leader_whose_write_is_refused_has_lost_at_once_and_is_a_candidate() {
        let (mut bench, ticket) = Bench::leader_that_writes();
        let (out, ticket, expected) = bench.does_and_writes(contended(ticket));
        assert_eq!((out, expected), (vec![lost("wrong last sequence: 7")], 0));
        assert_eq!(bench.step(contended(ticket)), []);
        assert_eq!(bench.role(), Role::Candidate);
    }

    #[test]
    fn a_leader_whose_write_fails_for_another_reason_has_lost_and_tries_its_number() {
        let (mut bench, ticket) = Bench::leader_that_writes();
        let failed = Answer::Failed("no space (error 10047)".to_owned());
        assert_eq!(bench.step(Input::Answer(ticket, failed)), [lost("no space (error 10047)")]);
        assert_eq!(bench.core.trouble(), Some("no space (error 10047)"));
        let (waited, out) = bench.wait();
        let [Output::Write { ticket, expected: 9 }] = out[..] else { panic!("{out:?}") };
        assert!(waited < 300, "{waited}");
        assert_eq!(bench.step(stored(ticket, 10)), []);
        assert_eq!((bench.role(), bench.core.trouble()), (Role::Confirming, None));
    }

    #[test]
    fn a_leader_without_an_answer_has_lost_after_two_seconds_and_asks_whether_the_key_is_its_own() {
        let (mut bench, _) = Bench::leader_that_writes();
        bench.pass(1_999);
        assert_eq!(bench.step(Input::Time), []);
        assert_eq!(bench.role(), Role::Confirming, "the lease is over long before");
        bench.pass(1);
        let silent = "the broker did not answer within 2s";
        assert_eq!(bench.step(Input::Time), [lost(silent)]);
        assert_eq!(bench.core.trouble(), Some(silent));
        let (_, out) = bench.wait();
        assert!(matches!(out[..], [Output::Write { expected: 9, .. }]), "{out:?}");
    }

    #[test]
    fn the_answer_that_comes_too_late_says_which_number_the_key_has() {
        let (mut bench, ticket) = Bench::leader_that_writes();
        // The process stood still: the answer is there before the time is looked at.
        bench.pass(20_000);
        let out = bench.step(stored(ticket, 10));
        assert_eq!(out, [lost("the broker did not answer within 2s")]);
        let (mut bench, ticket) = Bench::leader_that_writes();
        bench.pass(2_500);
        assert_eq!(bench.step(Input::Time).len(), 1);
        assert_eq!(bench.step(stored(ticket, 10)), []);
        let (_, out) = bench.wait();
        assert!(matches!(out[..], [Output::Write { expected: 10, .. }]), "{out:?}");
    }

    #[test]
    fn a_number_that_turns_up_while_the_former_one_is_tried_is_tried_next() {
        let (mut bench, late) = Bench::leader_that_writes();
        bench.pass(2_000);
        bench.step(Input::Time);
        let (_, out) = bench.wait();
        let [Output::Write { ticket, expected: 9 }] = out[..] else { panic!("{out:?}") };
        assert_eq!(bench.step(stored(late, 10)), []);
        assert_eq!(bench.writes(contended(ticket)).1, 10);
    }

    #[test]
    fn a_term_outlives_a_connection_if_the_key_was_ours_all_the_time() {
        let mut bench = Bench::leader();
        assert_eq!(bench.step(Input::Link(false)), [Output::Lapse]);
        assert_eq!(bench.core.wake(), None);
        bench.pass(3_000);
        let (ticket, expected) = bench.writes(Input::Link(true));
        assert_eq!(expected, 9);
        assert_eq!(bench.step(stored(ticket, 10)), []);
        let back = bench.now;
        let lead = loop {
            let (_, out) = bench.wait();
            let [Output::Write { ticket, expected }] = out[..] else { panic!("{out:?}") };
            if let Some(lead) = bench.step(stored(ticket, expected + 1)).pop() {
                break lead;
            }
        };
        assert_eq!(lead, Output::Lead(time(bench.now + 1_500)));
        assert!((back + 1_600..back + 1_700).contains(&bench.now));
    }

    #[test]
    fn a_term_ends_when_another_took_the_key_while_there_was_no_connection() {
        let mut bench = Bench::leader();
        bench.step(Input::Link(false));
        bench.pass(30_000);
        let (ticket, expected) = bench.writes(Input::Link(true));
        assert_eq!(expected, 9);
        let (out, _, expected) = bench.does_and_writes(contended(ticket));
        assert_eq!((out, expected), (vec![lost("wrong last sequence: 7")], 0));
    }

    #[test]
    fn a_request_that_can_not_be_sent_is_a_lost_connection() {
        let (mut bench, ticket) = Bench::leader_that_writes();
        assert_eq!(bench.step(Input::Unsent(ticket)), [Output::Lapse]);
        let (waited, out) = bench.wait();
        assert!(matches!(out[..], [Output::Write { expected: 9, .. }]), "{out:?}");
        assert!(waited >= 100, "no faster than the connection comes back");
    }

    #[test]
    fn a_broker_without_streams_is_asked_for_the_key_until_it_must_have_died() {
        let (mut bench, mut ticket) = Bench::leader_that_writes();
        assert_eq!(bench.step(Input::Answer(ticket, Answer::NoResponders)), [Output::Lapse]);
        let stopped = bench.now;
        let out = loop {
            let (_, out) = bench.wait();
            let [Output::Write { ticket: next, expected: 9 }] = out[..] else { break out };
            ticket = next;
            let out = bench.step(Input::Answer(ticket, Answer::NoResponders));
            if !out.is_empty() {
                break out;
            }
        };
        assert_eq!(out, [lost(&Unanswered::NoResponders.to_string())]);
        assert!((9_400..10_600).contains(&(bench.now - stopped)), "{}", bench.now - stopped);
        assert_eq!(bench.role(), Role::SettingUp);
    }

    #[test]
    fn a_lease_that_ends_before_its_confirmation_comes_is_confirmed_like_a_new_one() {
        let (mut bench, ticket) = Bench::leader_that_writes();
        bench.pass(1_100);
        assert_eq!(bench.role(), Role::Confirming);
        let (out, mut ticket, mut expected) = bench.does_and_writes(stored(ticket, 10));
        assert_eq!(out, [Output::Lapse]);
        let broken = bench.now;
        let lead = loop {
            if let Some(lead) = bench.step(stored(ticket, expected + 1)).pop() {
                break lead;
            }
            let (_, out) = bench.wait();
            let [Output::Write { ticket: t, expected: e }] = out[..] else { panic!("{out:?}") };
            (ticket, expected) = (t, e);
        };
        assert!(matches!(lead, Output::Lead(_)));
        assert!(bench.now >= broken + 1_600);
    }

    #[test]
    fn whoever_drains_without_the_key_is_gone_and_writes_nothing() {
        for mut bench in [Bench::new(), Bench::candidate()] {
            assert_eq!(bench.step(Input::Drain), []);
            assert!(bench.core.is_gone());
            assert_eq!(bench.step(Input::Offer(7)), []);
            bench.pass(5_000);
            assert_eq!(bench.step(Input::Link(true)), []);
            assert_eq!(bench.core.wake(), None);
        }
    }

    #[test]
    fn a_leader_that_drains_goes_on_until_its_nodes_have_ended_and_hands_over() {
        let mut bench = Bench::leader();
        assert_eq!(bench.step(Input::Drain), []);
        assert!(bench.core.is_leaving());
        bench.renews(10);
        bench.renews(11);
        let out = bench.step(Input::Idle);
        assert_eq!(out, [Output::Lost(Loss::SteppedDown), Output::HandOver(11)]);
        assert!(bench.core.is_gone());
    }

    #[test]
    fn the_number_of_a_write_under_way_is_waited_for_before_the_key_is_handed_over() {
        let mut bench = Bench::leader();
        bench.step(Input::Drain);
        bench.pass(500);
        let (ticket, _) = bench.writes(Input::Time);
        assert_eq!(bench.step(Input::Idle), []);
        assert!(bench.core.is_leaving());
        bench.step(stored(ticket, 10));
        let out = bench.step(Input::Idle);
        assert_eq!(out, [Output::Lost(Loss::SteppedDown), Output::HandOver(10)]);
    }

    #[test]
    fn whoever_drains_and_loses_the_key_never_creates_it() {
        let mut bench = Bench::leader();
        bench.step(Input::Drain);
        bench.pass(500);
        let (ticket, _) = bench.writes(Input::Time);
        assert_eq!(bench.step(contended(ticket)), [lost("wrong last sequence: 7")]);
        assert!(bench.core.is_gone());
        // Without a connection nothing can be handed over.
        let mut bench = Bench::leader();
        bench.step(Input::Drain);
        bench.step(Input::Link(false));
        assert_eq!(bench.step(Input::Idle), [Output::Lost(Loss::SteppedDown)]);
        assert!(bench.core.is_gone());
    }

    #[test]
    fn a_pause_lets_nodes_finish_hands_over_and_stays_out_until_it_ends() {
        let mut bench = Bench::leader();
        assert_eq!(bench.step(Input::Pause(true)), []);
        bench.renews(10);
        let out = bench.step(Input::Idle);
        assert_eq!(out, [Output::Lost(Loss::SteppedDown), Output::HandOver(10)]);
        assert_eq!(bench.role(), Role::Out);
        bench.pass(60_000);
        assert_eq!(bench.step(Input::Offer(12)), []);
        assert_eq!(bench.step(Input::Link(false)), []);
        assert_eq!(bench.step(Input::Link(true)), [], "the pause outlives a connection");
        assert_eq!(bench.core.wake(), None);
        bench.asks(Input::Pause(false));
    }

    #[test]
    fn a_pause_that_ends_before_the_nodes_do_changes_nothing() {
        let mut bench = Bench::leader();
        bench.step(Input::Pause(true));
        bench.renews(10);
        assert_eq!(bench.step(Input::Pause(false)), []);
        assert!(!bench.core.is_leaving());
        assert_eq!(bench.step(Input::Idle), []);
        bench.renews(11);
    }

    #[test]
    fn whoever_steps_down_hands_over_and_is_a_candidate_again() {
        let mut bench = Bench::leader();
        bench.step(Input::StepDown);
        assert!(bench.core.is_leaving());
        let out = bench.step(Input::Idle);
        assert_eq!(out, [Output::Lost(Loss::SteppedDown), Output::HandOver(9)]);
        assert_eq!(bench.role(), Role::SteppedDown);
        assert_eq!(bench.core.takes_back_at(), Some(time(bench.now + 3_000)));
        let (waited, out) = bench.wait();
        let [Output::Write { ticket, expected: 9 }] = out[..] else { panic!("{out:?}") };
        assert!((3_000..3_010).contains(&waited), "others go first: {waited}");
        assert_eq!(bench.step(contended(ticket)), []);
        assert_eq!(bench.role(), Role::Candidate, "another has taken it");
        let (waited, out) = bench.wait();
        let [Output::Write { ticket, expected: 0 }] = out[..] else { panic!("{out:?}") };
        assert!(waited < 1_300, "from now on as every candidate: {waited}");
        bench.step(stored(ticket, 30));
        assert!(!bench.core.is_leaving(), "it was for that one time");
        let mut bench = Bench::candidate();
        bench.step(Input::StepDown);
        let (_, out) = bench.wait();
        let [Output::Write { ticket, .. }] = out[..] else { panic!("{out:?}") };
        bench.step(stored(ticket, 30));
        assert!(!bench.core.is_leaving(), "there was nothing to step down from");
    }

    #[test]
    fn whoever_steps_down_and_loses_the_connection_finishes_what_it_has_and_leads_no_more() {
        let mut bench = Bench::leader();
        bench.step(Input::StepDown);
        assert_eq!(bench.step(Input::Link(false)), [Output::Lapse]);
        let (mut ticket, mut expected) = bench.writes(Input::Link(true));
        let renewed = loop {
            if let Some(said) = bench.step(stored(ticket, expected + 1)).pop() {
                break said;
            }
            let (_, out) = bench.wait();
            let [Output::Write { ticket: next, expected: number }] = out[..] else {
                panic!("{out:?}")
            };
            (ticket, expected) = (next, number);
        };
        assert_eq!(renewed, Output::Renew(time(bench.now + 1_500)));
        let out = bench.step(Input::Idle);
        assert_eq!(out, [Output::Lost(Loss::SteppedDown), Output::HandOver(expected + 1)]);

        // The same before it led: a node of a former term is still in hand.
        let mut bench = Bench::holder();
        bench.step(Input::StepDown);
        for _ in 0..8 {
            let (_, out) = bench.wait();
            let [Output::Write { ticket, expected }] = out[..] else { panic!("{out:?}") };
            assert_eq!(bench.step(stored(ticket, expected + 1)), []);
        }
        assert!(matches!(bench.step(Input::Idle)[..], [Output::HandOver(_)]));
    }

    #[test]
    fn a_key_that_nobody_wanted_is_taken_back_and_confirmed_like_any_other() {
        let mut bench = Bench::leader();
        bench.step(Input::StepDown);
        bench.step(Input::Idle);
        let (_, out) = bench.wait();
        let [Output::Write { ticket, expected: 9 }] = out[..] else { panic!("{out:?}") };
        assert_eq!(bench.step(stored(ticket, 10)), []);
        assert_eq!(bench.role(), Role::Confirming);
        let taken = bench.now;
        let lead = loop {
            let (_, out) = bench.wait();
            let [Output::Write { ticket, expected }] = out[..] else { panic!("{out:?}") };
            if let Some(lead) = bench.step(stored(ticket, expected + 1)).pop() {
                break lead;
            }
        };
        assert!(matches!(lead, Output::Lead(_)) && bench.now >= taken + 1_600);
    }

    #[test]
    fn what_was_not_sent_or_not_answered_is_taken_back_later() {
        let mut bench = Bench::leader();
        bench.step(Input::StepDown);
        bench.step(Input::Idle);
        let (_, out) = bench.wait();
        let [Output::Write { ticket, expected: 9 }] = out[..] else { panic!("{out:?}") };
        assert_eq!(bench.step(Input::Unsent(ticket)), []);
        assert_eq!(bench.role(), Role::SteppedDown);
        let (_, out) = bench.wait();
        assert!(matches!(out[..], [Output::Write { expected: 9, .. }]), "{out:?}");
        // The broker says nothing, neither now nor to the question after that.
        let ticket = loop {
            if let [Output::AskStatus(ticket)] = bench.wait().1[..] {
                break ticket;
            }
        };
        let (ticket, expected) = bench.writes(Input::Answer(ticket, Answer::Usable(TTL)));
        assert_eq!(expected, 9);
        bench.step(contended(ticket));
        let (_, out) = bench.wait();
        assert!(matches!(out[..], [Output::Write { expected: 0, .. }]), "it is another's: {out:?}");
    }

    #[test]
    fn whoever_is_offered_a_key_after_its_own_or_loses_the_connection_takes_no_key_back() {
        let stepped_down = || {
            let mut bench = Bench::leader();
            bench.step(Input::StepDown);
            bench.step(Input::Idle);
            bench.pass(200);
            bench
        };
        let mut bench = stepped_down();
        let (ticket, expected) = bench.writes(Input::Offer(41));
        assert_eq!(expected, 41);
        bench.step(contended(ticket));
        let (_, out) = bench.wait();
        assert!(matches!(out[..], [Output::Write { expected: 0, .. }]), "{out:?}");
        // It may be another broker, and another bucket.
        let mut bench = stepped_down();
        bench.step(Input::Link(false));
        let ticket = bench.asks(Input::Link(true));
        let (_, expected) = bench.writes(Input::Answer(ticket, Answer::Usable(TTL)));
        assert_eq!(expected, 0);
    }

    #[test]
    fn a_pause_that_ends_takes_back_what_nobody_wanted() {
        let mut bench = Bench::leader();
        bench.step(Input::Pause(true));
        bench.step(Input::Idle);
        bench.pass(5_000);
        assert_eq!(bench.writes(Input::Pause(false)).1, 9);
    }

    #[test]
    fn a_candidate_takes_a_key_on_offer_at_once_and_confirms_it_like_any_other() {
        let mut bench = Bench::candidate();
        bench.pass(300);
        let (ticket, expected) = bench.writes(Input::Offer(41));
        assert_eq!(expected, 41);
        assert_eq!(bench.step(stored(ticket, 42)), []);
        assert_eq!(bench.role(), Role::Confirming);
        assert_eq!(bench.core.wake(), Some(time(bench.now + 500)));
    }

    #[test]
    fn offers_of_keys_make_nobody_write_all_the_time_and_holders_ignore_them() {
        let mut bench = Bench::candidate();
        let mut writes = 0;
        for number in 1..=500 {
            bench.pass(1);
            if let [Output::Write { ticket, .. }] = bench.step(Input::Offer(number))[..] {
                writes += 1;
                bench.step(contended(ticket));
            }
        }
        assert!(writes <= 5, "{writes}");
        let mut bench = Bench::leader();
        assert_eq!(bench.step(Input::Offer(41)), []);
        bench.renews(10);
    }

    #[test]
    fn a_bucket_that_can_not_be_used_is_asked_for_again_and_again() {
        let mut bench = Bench::new();
        let mut ticket = bench.asks(Input::Link(true));
        let mut longest = 0;
        for _ in 0..40 {
            let gone = Answer::Unusable("stream not found (error 10059)".to_owned());
            assert_eq!(bench.step(Input::Answer(ticket, gone)), []);
            assert_eq!(bench.core.trouble(), Some("stream not found (error 10059)"));
            assert_eq!(bench.role(), Role::SettingUp);
            let (waited, out) = bench.wait();
            let [Output::AskStatus(next)] = out[..] else { panic!("{out:?}") };
            (ticket, longest) = (next, longest.max(waited));
        }
        assert!((2_500..7_502).contains(&longest), "{longest}");
        bench.writes(Input::Answer(ticket, Answer::Usable(TTL)));
        assert_eq!(bench.core.trouble(), None);
    }

    #[test]
    fn a_candidate_that_gets_no_answer_looks_for_the_bucket_first() {
        for answer in [Some(Answer::NoResponders), Some(Answer::Failed("no".into())), None] {
            let mut bench = Bench::candidate();
            let (_, out) = bench.wait();
            let [Output::Write { ticket, .. }] = out[..] else { panic!("{out:?}") };
            if let Some(answer) = answer {
                assert_eq!(bench.step(Input::Answer(ticket, answer)), []);
            } else {
                assert_eq!(bench.wait(), (2_001, vec![]));
            }
            assert!(bench.core.trouble().is_some());
            let (_, out) = bench.wait();
            assert!(matches!(out[..], [Output::AskStatus(_)]), "{out:?}");
        }
    }

    #[test]
    fn answers_that_nobody_waits_for_change_nothing() {
        let mut bench = Bench::leader();
        let before = bench.core.clone().stage;
        for ticket in 0..20 {
            assert_eq!(bench.step(stored(ticket, 77)), []);
            assert_eq!(bench.step(contended(ticket)), []);
        }
        assert_eq!(bench.core.stage, before);
        bench.renews(10);
    }
}
