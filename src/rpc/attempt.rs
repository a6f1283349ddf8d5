//! All calls to one node, from its first request to its last.
//!
//! Every request id stays registered until the attempt ends, so that late and second answers are seen. Which answer of
//! several counts:
//!
//! | Answer | Counts |
//! | --- | --- |
//! | first one to the last try | yes |
//! | first one to an earlier try of the same call | yes, if it is a success or ends the call; but for an action that replaces keys only the last try's counts |
//! | first one to an earlier try of a call that replaced keys and has ended | fails the attempt: the node may have made new keys after those we hold |
//! | second one to an id, equal in action, status and data | no; counted |
//! | second one that differs, or answers lost in a flood | fails the attempt: another machine has this name, or somebody forges |
//!
//! A broker that goes takes with it what was under way. When the connection ends under a try, its answer gets a moment
//! once we are connected again, for a node that publishes it when it is back itself; then the node is asked again at once.
//! That try counts for nothing but to be heard late; `release_update` alone is never asked again.
//!
//! What fails the attempt is kept until somebody asks, [`Attempt::contradicted`], and stops further calls; but once
//! `configure` was sent the node is brought to its end.

#[cfg(test)]
mod tests;

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender as Channel, at, bounded, never, select_biased};
use openssl::sha::Sha256;

use crate::gate::{Closed, Gate, Term};
use crate::protocol::Identity;
use crate::protocol::json::excerpt;
use crate::rpc::actions::{Action, BadReply, Body, Call};
use crate::rpc::retry::{Failure, Retry, Verdict};
use crate::rpc::{Answer, Arrival, Registration, Rpc, SendError, Unexpected};
use crate::shutdown::{Never, is_over};
use crate::transport::PublishError;

/// Answers to all requests of one attempt that may wait to be read.
const ARRIVALS_MAX: usize = 16;

/// A node that has not answered for this long gives its permit to another.
const SILENCE: Duration = Duration::from_secs(3);

/// After a reconnect, how long an answer may still come to what was asked before. A node sends what it could not when it is
/// back; one that is later than that hears the question once more.
const LOST_GRACE: Duration = Duration::from_secs(1);

/// The same for `restart`. A node that heard it is deaf for the 2 s until it leaves, so only then can be told who did not
/// hear it.
const LEFT_AFTER: Duration = Duration::from_secs(3);

/// Once configured, how long a node waits for the connection to come back: its restart is owed to it.
const WITHOUT_DEADLINE: Duration = Duration::from_secs(24 * 60 * 60);

/// A node that takes longer than this to answer leaves its permit to others meanwhile: a few slow ones must not hold all
/// permits. Most answers take a few milliseconds.
const REST_AFTER: Duration = Duration::from_millis(10);

/// Characters kept of what a node says about a refusal.
const REFUSAL_CHARS_MAX: usize = 500;

/// What a worker does while its node is silent.
pub trait Patience {
    /// There is nothing to do until the node answers, or until it is asked again: the permit goes to another node.
    fn resting(&mut self);

    /// Nothing was heard for 3 s: the node may be given up when there is no room for another one.
    fn silent(&mut self);

    /// The node answers again: waits for a permit; false to give the node up.
    fn answered(&mut self) -> bool;

    /// Disconnects when this node is given up for want of room.
    fn given_up(&self) -> &Receiver<Never>;
}

/// Of whoever works on this node alone: nobody else waits for its place. Disconnects when it is given up all the same.
pub struct Unhurried(pub Receiver<Never>);

impl Patience for Unhurried {
    fn resting(&mut self) {}

    fn silent(&mut self) {}

    fn answered(&mut self) -> bool {
        true
    }

    fn given_up(&self) -> &Receiver<Never> {
        &self.0
    }
}

/// How long nothing was heard of the node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Quiet {
    /// It has the permit.
    Awake,
    /// Its permit is with another node.
    Resting,
    /// It may be given up.
    Silent,
}

/// What a check says about a well-formed answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Checked<T> {
    /// This is the result of the call.
    Done(T),
    /// This is the result if there are no tries left, or this was said before; else the node is asked once more.
    OnceMore(T),
}

/// All calls to one node.
pub struct Attempt<'a> {
    rpc: &'a Arc<Rpc>,
    node: &'a Identity,
    gate: &'a Gate,
    term: Term,
    abort: &'a Receiver<Never>,
    deadline: Option<Instant>,
    discovery_timeout: Duration,
    patience: &'a mut dyn Patience,
    timing: Timing,
    random: fastrand::Rng,
    /// Disconnects when the connection that we began with ends.
    connection: Receiver<Never>,

    sink: Channel<Arrival>,
    arrivals: Receiver<Arrival>,
    sent: Vec<Sent>,
    adopted: Option<Adopted>,
    contradiction: Option<Contradiction>,
    configure_sent: bool,
    /// The permit was given back and not taken again.
    quiet: Quiet,
}

/// One request that went out.
struct Sent {
    registration: Registration,
    action: Action,
    answer: Option<Fingerprint>,
    /// A later try of the same call replaced the keys that an answer to this one would be about.
    is_superseded: bool,
}

/// A request for the inventory that somebody else sent, and what has come for it.
struct Adopted {
    registration: Registration,
    /// Few: there are never more than [`ANSWERS_MAX`](crate::rpc) to one id.
    arrivals: Vec<Arrival>,
}

/// Names what an answer said: equal ones have equal fingerprints.
type Fingerprint = [u8; 32];

/// Durations that tests shorten.
#[derive(Clone, Copy)]
struct Timing {
    silence: Duration,
    grace: fn(Action) -> Duration,
    timeout: fn(Action, Duration) -> Duration,
    pause: fn(Duration) -> Duration,
}

const TIMING: Timing =
    Timing { silence: SILENCE, grace: lost_grace, timeout: Action::timeout, pause: |pause| pause };

fn lost_grace(action: Action) -> Duration {
    if action == Action::Restart { LEFT_AFTER } else { LOST_GRACE }
}

/// The first acceptable answer to one of our requests.
struct Heard {
    /// Which request, as an index into `sent`.
    index: usize,
    at: Instant,
    body: Result<Body, BadReply>,
}

/// What an arrival turned out to be.
enum Event {
    Heard(Heard),
    NoResponders { index: usize },
    Nothing,
}

/// What ended a wait.
enum Wake {
    Arrival(Arrival),
    /// The connection ended.
    Lost,
    Time,
}

/// One call with all its tries.
struct Calling<'c, C: Call, T> {
    requests: Vec<C>,
    check: &'c mut dyn FnMut(&C, C::Reply) -> Checked<T>,
    /// Index into `sent` of the first try.
    first: usize,
    tries: u32,
    /// Why the last try that failed did.
    last: Option<Error>,
    /// The connection took a try with it.
    has_lost: bool,
}

/// How a try ended.
enum Ended<T> {
    Done(T),
    Failed(Failed<T>),
}

struct Failed<T> {
    failure: Failure,
    error: Error,
    /// The result that a check would like to see once more.
    result: Option<T>,
}

impl<'a> Attempt<'a> {
    /// Sends nothing yet. `deadline` is the end of the node's time; `discovery_timeout` is what every request is given for the way.
    #[expect(
        clippy::too_many_arguments,
        reason = "each is something else a running node depends on"
    )]
    pub fn new(
        rpc: &'a Arc<Rpc>,
        node: &'a Identity,
        gate: &'a Gate,
        term: Term,
        abort: &'a Receiver<Never>,
        deadline: Instant,
        discovery_timeout: Duration,
        patience: &'a mut dyn Patience,
    ) -> Attempt<'a> {
        let (sink, arrivals) = bounded(ARRIVALS_MAX);
        Attempt {
            rpc,
            node,
            gate,
            term,
            abort,
            deadline: Some(deadline),
            discovery_timeout,
            patience,
            timing: TIMING,
            random: fastrand::Rng::new(),
            connection: gate.lost(),
            sink,
            arrivals,
            sent: Vec::new(),
            adopted: None,
            contradiction: None,
            configure_sent: false,
            quiet: Quiet::Awake,
        }
    }

    /// Takes over a request for the inventory that somebody else sent, and its answer, unread: they are the first try of
    /// the next call of that action.
    pub fn adopt(&mut self, registration: Registration, arrival: Arrival) {
        registration.redirect(&self.sink);
        self.adopted = Some(Adopted { registration, arrivals: vec![arrival] });
    }

    /// From now on the node's time is not looked at.
    pub fn ignore_deadline(&mut self) {
        self.deadline = None;
    }

    /// Whether the answers contradict each other, by all that came up to now.
    pub fn contradicted(&mut self) -> Option<&Contradiction> {
        while let Ok(arrival) = self.arrivals.try_recv() {
            self.hear(arrival);
        }
        if self.contradiction.is_none() {
            let flooded = self.sent.iter().find(|sent| sent.registration.is_flooded());
            self.contradiction = flooded.map(|sent| Contradiction::Flood { action: sent.action });
        }
        self.contradiction.as_ref()
    }

    /// Waits for `time` and hears what comes, so that a second answer to a request can show itself.
    ///
    /// # Errors
    ///
    /// [`Error::Stopped`], [`Error::GivenUp`] or [`Error::Deadline`].
    pub fn listen(&mut self, time: Duration) -> Result<(), Error> {
        let until = Instant::now() + time;
        while let Wake::Arrival(arrival) = self.wait(until, &never())? {
            self.hear(arrival);
        }
        Ok(())
    }

    /// Calls one action, as often as its failures allow.
    ///
    /// `request` makes the request for a try, counted from 1; `check` judges a well-formed reply to it.
    ///
    /// # Errors
    ///
    /// [`Error`], the real reason of the last failure.
    pub fn call<C: Call, T>(
        &mut self,
        request: &mut dyn FnMut(u32) -> C,
        check: &mut dyn FnMut(&C, C::Reply) -> Checked<T>,
    ) -> Result<T, Error> {
        let first = self.sent.len();
        let requests = Vec::new();
        let mut calling = Calling { requests, check, first, tries: 0, last: None, has_lost: false };
        let result = self.run(request, &mut calling);
        match &result {
            Ok(_) => self.supersede(C::ACTION, first),
            // Not the node's fault, nor the network's.
            Err(Error::Stopped(_) | Error::Contradicted(_)) => {}
            Err(_) => self.rpc.shared.metrics.rpc_error(C::ACTION.label()),
        }
        result.map_err(|error| error.after(calling.tries, calling.last))
    }

    fn run<C: Call, T>(
        &mut self,
        request: &mut dyn FnMut(u32) -> C,
        calling: &mut Calling<'_, C, T>,
    ) -> Result<T, Error> {
        let mut retry = Retry::new(C::ACTION);
        loop {
            self.may_go_on()?;
            let failed = match self.one_try(request, calling)? {
                Ended::Done(result) => return Ok(result),
                Ended::Failed(failed) => failed,
            };
            let Verdict::Again(pause) = retry.next(failed.failure, &mut self.random) else {
                return failed.result.ok_or(failed.error);
            };
            log::debug!(
                component = self.node.as_str(), node = self.node.as_str();
                "Trying {} again in {} ms: {}", C::ACTION, pause.as_millis(), failed.error
            );
            calling.last = Some(failed.error);
            if let Some(result) = self.pause(calling, pause)? {
                return Ok(result);
            }
        }
    }

    /// The questions before every try.
    fn may_go_on(&mut self) -> Result<(), Error> {
        if !self.configure_sent {
            if let Some(contradiction) = self.contradicted() {
                return Err(Error::Contradicted(*contradiction));
            }
        }
        if self.deadline.is_some_and(|deadline| Instant::now() >= deadline) {
            return Err(Error::Deadline { tries: 0, last: None });
        }
        self.pass_gate()
    }

    /// Waits for the connection if there is none.
    fn pass_gate(&self) -> Result<(), Error> {
        let deadline = self.deadline.unwrap_or_else(|| Instant::now() + WITHOUT_DEADLINE);
        match self.gate.proceed(self.term, deadline) {
            Ok(()) => Ok(()),
            Err(Closed::Deadline) => Err(Error::Deadline { tries: 0, last: None }),
            Err(closed) => Err(Error::Stopped(closed)),
        }
    }

    fn one_try<C: Call, T>(
        &mut self,
        request: &mut dyn FnMut(u32) -> C,
        calling: &mut Calling<'_, C, T>,
    ) -> Result<Ended<T>, Error> {
        let call = request(calling.tries + 1);
        let lost = self.gate.lost();
        let adopted = if C::ACTION == Action::Inventory { self.adopted.take() } else { None };
        let (registration, early) = match adopted {
            Some(adopted) => (adopted.registration, adopted.arrivals),
            None => match self.rpc.send(self.node, C::ACTION, &call.body(), &self.sink) {
                Ok(registration) => (registration, Vec::new()),
                Err(SendError(error @ (PublishError::Disconnected | PublishError::Late))) => {
                    let error = Error::Send(SendError(error));
                    let failure = Failure::Disconnected;
                    return Ok(Ended::Failed(Failed { failure, error, result: None }));
                }
                Err(error) => return Err(Error::Send(error)),
            },
        };
        self.configure_sent |= C::ACTION == Action::Configure;
        calling.tries += 1;
        calling.requests.push(call);
        let sent_at = registration.sent_at();
        self.sent.push(Sent {
            registration,
            action: C::ACTION,
            answer: None,
            is_superseded: false,
        });
        let mut early = early.into_iter();
        let mut answered_at = None;
        let ended = self.await_answer(calling, sent_at, lost, &mut early, &mut answered_at);
        for arrival in early {
            self.hear(arrival);
        }
        if let Ok(Ended::Failed(Failed { failure: Failure::Lost, .. })) = ended {
            // That was the broker's time.
            return ended;
        }
        let end = answered_at.unwrap_or_else(Instant::now);
        let time = end.saturating_duration_since(sent_at);
        self.rpc.shared.metrics.rpc_time(C::ACTION.label(), time);
        ended
    }

    fn await_answer<C: Call, T>(
        &mut self,
        calling: &mut Calling<'_, C, T>,
        sent_at: Instant,
        mut lost: Receiver<Never>,
        early: &mut dyn Iterator<Item = Arrival>,
        answered_at: &mut Option<Instant>,
    ) -> Result<Ended<T>, Error> {
        let current = self.sent.len() - 1;
        let mut end = sent_at + (self.timing.timeout)(C::ACTION, self.discovery_timeout);
        let now = Instant::now();
        let (rest, mut silence) = (now + REST_AFTER, now + self.timing.silence);
        let mut is_lost = false;
        loop {
            let until = match self.quiet {
                Quiet::Awake => end.min(rest),
                Quiet::Resting => end.min(silence),
                Quiet::Silent => end,
            };
            let wake = match early.next() {
                Some(arrival) => Wake::Arrival(arrival),
                None => self.wait(until, &lost)?,
            };
            let event = match wake {
                Wake::Arrival(arrival) => self.hear(arrival),
                Wake::Lost => {
                    self.pass_gate()?;
                    (lost, is_lost) = (never(), true);
                    let back = Instant::now();
                    calling.has_lost = true;
                    silence = back + self.timing.silence;
                    let grace = back + (self.timing.grace)(C::ACTION);
                    // What is not asked again may as well have its time.
                    end = if C::ACTION.is_sent_once() { end.max(grace) } else { grace };
                    continue;
                }
                Wake::Time if until < end => {
                    self.grow_quiet();
                    continue;
                }
                Wake::Time => {
                    let tries = calling.tries;
                    let (failure, error) = match is_lost {
                        true => (Failure::Lost, Error::Lost { tries }),
                        false => (Failure::Silent, Error::Silent { tries }),
                    };
                    return Ok(Ended::Failed(Failed { failure, error, result: None }));
                }
            };
            match event {
                Event::Heard(heard) => {
                    let (index, at) = (heard.index, heard.at);
                    let Some(ended) = self.judge(calling, heard)? else { continue };
                    if index == current || ended.is_final() {
                        *answered_at = Some(at);
                        return Ok(ended);
                    }
                    // An earlier try was refused, and counted as failed when its time was up.
                    calling.remember(ended);
                }
                Event::NoResponders { index } if index == current => {
                    let error = Error::Unreachable { tries: calling.tries };
                    let failure = match self.may_be_coming_back(calling) {
                        true => Failure::ComingBack,
                        false => Failure::NoResponders,
                    };
                    return Ok(Ended::Failed(Failed { failure, error, result: None }));
                }
                Event::NoResponders { .. } | Event::Nothing => {}
            }
        }
    }

    /// Whether the connection has just come back, and so perhaps not yet the node's. One that was found since then was
    /// there already.
    fn may_be_coming_back<C: Call, T>(&self, calling: &Calling<'_, C, T>) -> bool {
        let may_have_left = C::ACTION == Action::Restart && calling.has_lost;
        !may_have_left && is_over(&self.connection) && self.gate.just_reconnected(Instant::now())
    }

    /// The node has been quiet for a while longer.
    fn grow_quiet(&mut self) {
        if self.quiet == Quiet::Awake {
            self.quiet = Quiet::Resting;
            self.patience.resting();
        } else {
            self.quiet = Quiet::Silent;
            self.patience.silent();
        }
    }

    /// Why a node that answered did not get its permit back.
    fn why_not_resumed(&self) -> Error {
        if is_over(self.abort) {
            Error::Stopped(Closed::Aborted)
        } else if self.deadline.is_some_and(|deadline| Instant::now() >= deadline) {
            Error::Deadline { tries: 0, last: None }
        } else {
            Error::GivenUp { tries: 0 }
        }
    }

    /// Waits between two tries; a try whose time was up may still be answered.
    fn pause<C: Call, T>(
        &mut self,
        calling: &mut Calling<'_, C, T>,
        pause: Duration,
    ) -> Result<Option<T>, Error> {
        if self.quiet == Quiet::Awake {
            self.grow_quiet();
        }
        let until = Instant::now() + (self.timing.pause)(pause);
        while let Wake::Arrival(arrival) = self.wait(until, &never())? {
            let Event::Heard(heard) = self.hear(arrival) else { continue };
            match self.judge(calling, heard)? {
                None => {}
                Some(Ended::Done(result)) => return Ok(Some(result)),
                Some(Ended::Failed(failed)) if failed.failure.is_final() => {
                    return failed.result.ok_or(failed.error).map(Some);
                }
                Some(ended) => calling.remember(ended),
            }
        }
        Ok(None)
    }

    /// What an answer means for the call under way; nothing if it is not for it or does not count.
    fn judge<C: Call, T>(
        &mut self,
        calling: &mut Calling<'_, C, T>,
        heard: Heard,
    ) -> Result<Option<Ended<T>>, Error> {
        let is_last = heard.index + 1 == self.sent.len();
        let request = heard.index.checked_sub(calling.first);
        let request = request.and_then(|n| calling.requests.get(n));
        let Some(request) = request.filter(|_| is_last || !C::ACTION.only_last_answer_counts())
        else {
            self.rpc.shared.count(Unexpected::Late);
            return Ok(None);
        };
        if self.quiet != Quiet::Awake {
            if !self.patience.answered() {
                return Err(self.why_not_resumed());
            }
            self.quiet = Quiet::Awake;
        }
        let tries = calling.tries;
        let body = match heard.body {
            Ok(body) if body.code != 0 => {
                return Ok(Some(Ended::Failed(refused(&body, C::ACTION, tries))));
            }
            Ok(body) => body,
            Err(source) => return Ok(Some(Ended::Failed(bad_reply(source, tries, None)))),
        };
        Ok(Some(match body.reply::<C>().map(|reply| (calling.check)(request, reply)) {
            Ok(Checked::Done(result)) => Ended::Done(result),
            Ok(Checked::OnceMore(result)) => {
                Ended::Failed(bad_reply(BadReply::Unconvincing, tries, Some(result)))
            }
            Err(source) => Ended::Failed(bad_reply(source, tries, None)),
        }))
    }

    /// Takes note of an arrival, whatever call it belongs to.
    fn hear(&mut self, arrival: Arrival) -> Event {
        let position = self.sent.iter().position(|sent| sent.registration.id() == arrival.id);
        let Some(index) = position else {
            // The only other id that is sent here.
            if let Some(adopted) = &mut self.adopted {
                adopted.arrivals.push(arrival);
            }
            return Event::Nothing;
        };
        let sent = &mut self.sent[index];
        let Answer::Payload(payload) = arrival.answer else {
            // After an answer it is a lie.
            let answered = sent.answer.is_some();
            return if answered { Event::Nothing } else { Event::NoResponders { index } };
        };
        let Ok(reply) = self.rpc.accept(self.node, arrival.id, &payload) else {
            return Event::Nothing;
        };
        let body = Body::parse(&reply.body);
        let fingerprint = fingerprint(&body, &reply.body);
        match sent.answer {
            Some(first) if first == fingerprint => {
                self.rpc.shared.count(Unexpected::Duplicate);
                Event::Nothing
            }
            Some(_) => {
                let differs = Contradiction::Differs { action: sent.action };
                self.contradiction.get_or_insert(differs);
                Event::Nothing
            }
            None => {
                sent.answer = Some(fingerprint);
                if sent.is_superseded {
                    let replaced = Contradiction::KeysReplaced { action: sent.action };
                    self.contradiction.get_or_insert(replaced);
                }
                Event::Heard(Heard { index, at: arrival.at, body })
            }
        }
    }

    /// A call has ended well: answers to its earlier tries are now about keys that were replaced, or replace ours.
    fn supersede(&mut self, action: Action, first: usize) {
        if action.only_last_answer_counts() {
            let last = self.sent.len() - 1;
            for sent in &mut self.sent[first..last] {
                sent.is_superseded = true;
            }
        }
    }

    /// Waits for the next arrival, at most until `until` or until `lost` disconnects. Aborting must not lose against a steady stream of answers.
    fn wait(&self, until: Instant, lost: &Receiver<Never>) -> Result<Wake, Error> {
        let end = self.deadline.map_or(until, |deadline| deadline.min(until));
        select_biased! {
            recv(self.abort) -> _ => Err(Error::Stopped(Closed::Aborted)),
            recv(self.patience.given_up()) -> _ => Err(Error::GivenUp { tries: 0 }),
            recv(self.arrivals) -> arrival => {
                Ok(Wake::Arrival(arrival.expect("this attempt holds a sender itself")))
            }
            recv(lost) -> _ => Ok(Wake::Lost),
            recv(at(end)) -> _ => {
                if end < until { Err(Error::Deadline { tries: 0, last: None }) } else { Ok(Wake::Time) }
            }
        }
    }
}

impl<C: Call, T> Calling<'_, C, T> {
    fn remember(&mut self, ended: Ended<T>) {
        if let Ended::Failed(failed) = ended {
            self.last = Some(failed.error);
        }
    }
}

impl<T> Ended<T> {
    fn is_final(&self) -> bool {
        match self {
            Ended::Done(_) => true,
            Ended::Failed(failed) => failed.failure.is_final(),
        }
    }
}

fn refused<T>(body: &Body, action: Action, tries: u32) -> Failed<T> {
    let message = excerpt(&body.message, REFUSAL_CHARS_MAX);
    let error = Error::Refused { code: body.code, message, tries };
    // About us, or about the node's state; and `shutdown` is a wish that a node may decline.
    let settled = error.is_busy()
        || error.is_wrong_token()
        || error.is_not_provisioning()
        || action == Action::Shutdown;
    Failed { failure: Failure::Refused { code: body.code, settled }, error, result: None }
}

fn bad_reply<T>(source: BadReply, tries: u32, result: Option<T>) -> Failed<T> {
    let failure = if result.is_some() { Failure::OnceMore } else { Failure::BadReply };
    Failed { failure, error: Error::BadReply { source, tries }, result }
}

/// Action, code and outputs; for a body that can't be read, all of it. The message is for people and may differ.
fn fingerprint(body: &Result<Body, BadReply>, text: &str) -> Fingerprint {
    let mut hash = Sha256::new();
    match body {
        Ok(body) => {
            hash.update(body.action.as_bytes());
            hash.update(&[0, body.code]);
            hash.update(body.data.as_ref().map_or("", |data| data.get()).as_bytes());
        }
        Err(_) => {
            hash.update(&[1]);
            hash.update(text.as_bytes());
        }
    }
    hash.finish()
}

/// How a node's answers contradict each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Contradiction {
    /// Two answers to one request say different things.
    Differs {
        /// What was asked.
        action: Action,
    },
    /// An earlier try was answered after the last one, so the node may hold newer keys than we know.
    KeysReplaced {
        /// What was asked.
        action: Action,
    },
    /// So many answers, or such large ones, that they were not all read.
    Flood {
        /// What was asked.
        action: Action,
    },
}

impl fmt::Display for Contradiction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Contradiction::Differs { action } => {
                write!(
                    f,
                    "two different answers to one request for {action}: another machine has this name, or somebody forges"
                )
            }
            Contradiction::KeysReplaced { action } => {
                write!(
                    f,
                    "an earlier request for {action} was answered last, so the node may hold other keys"
                )
            }
            Contradiction::Flood { action } => {
                write!(f, "too many answers to one request for {action}")
            }
        }
    }
}

/// Why a call did not succeed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Error {
    /// The node's answers contradict each other.
    Contradicted(Contradiction),
    /// The gate closed, or the process is aborting.
    Stopped(Closed),
    /// The node was silent, and its place is needed.
    GivenUp {
        /// Requests sent.
        tries: u32,
    },
    /// The node's time is up.
    Deadline {
        /// Requests sent.
        tries: u32,
        /// Why the last of them that failed did.
        last: Option<Box<Error>>,
    },
    /// Nobody listens on the node's subject.
    Unreachable {
        /// Requests sent.
        tries: u32,
    },
    /// There was no answer.
    Silent {
        /// Requests sent.
        tries: u32,
    },
    /// The connection to the broker ended before the answer came.
    Lost {
        /// Requests sent.
        tries: u32,
    },
    /// The node said no.
    Refused {
        /// The status code, never 0.
        code: u8,
        /// Its words, shortened.
        message: String,
        /// Requests sent.
        tries: u32,
    },
    /// The node's answer is no use.
    BadReply {
        /// What is wrong with it.
        source: BadReply,
        /// Requests sent.
        tries: u32,
    },
    /// The request could not be sent.
    Send(SendError),
}

impl Error {
    /// Another provisioner holds the node's lock.
    pub fn is_busy(&self) -> bool {
        self.is_refusal("Could not obtain provisioning lock")
    }

    /// The node does not know our provisioning token.
    pub fn is_wrong_token(&self) -> bool {
        self.is_refusal("Incorrect provision token supplied")
    }

    /// The node is not in provisioning mode any more.
    pub fn is_not_provisioning(&self) -> bool {
        // `release_update` has words of its own.
        self.is_refusal("Cannot reconfigure a server that is not in provisioning mode")
            || self.is_refusal("Cannot update a server that is not in provisioning mode")
    }

    fn is_refusal(&self, words: &str) -> bool {
        matches!(self, Error::Refused { code: 1, message, .. } if message == words)
    }

    /// How many requests were sent, where that matters.
    pub fn tries(&self) -> u32 {
        match self {
            Error::GivenUp { tries }
            | Error::Deadline { tries, .. }
            | Error::Unreachable { tries }
            | Error::Silent { tries }
            | Error::Lost { tries }
            | Error::Refused { tries, .. }
            | Error::BadReply { tries, .. } => *tries,
            Error::Contradicted(_) | Error::Stopped(_) | Error::Send(_) => 0,
        }
    }

    /// Fills in what the place of the error did not know.
    fn after(self, sent: u32, failed: Option<Error>) -> Error {
        match self {
            Error::GivenUp { .. } => Error::GivenUp { tries: sent },
            Error::Deadline { .. } => Error::Deadline { tries: sent, last: failed.map(Box::new) },
            other => other,
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Contradicted(contradiction) => write!(f, "{contradiction}"),
            Error::Stopped(_) => f.write_str("stopped before the next request"),
            Error::GivenUp { tries } => {
                write!(f, "given up while the node was silent, after {}", Tries(*tries))
            }
            Error::Deadline { tries, .. } => {
                write!(f, "the node's time was up, after {}", Tries(*tries))
            }
            Error::Unreachable { tries } => {
                write!(f, "nobody listens on the node's subject, after {}", Tries(*tries))
            }
            Error::Silent { tries } => write!(f, "no answer, after {}", Tries(*tries)),
            Error::Lost { tries } => {
                write!(f, "the connection was lost before the answer came, after {}", Tries(*tries))
            }
            Error::Refused { code, message, tries } => {
                write!(f, "refused with status {code}: {message} ({})", Tries(*tries))
            }
            Error::BadReply { tries, .. } => {
                write!(f, "unusable answer, after {}", Tries(*tries))
            }
            Error::Send(_) => f.write_str("request not sent"),
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Error::Stopped(source) => Some(source),
            Error::Deadline { last, .. } => {
                last.as_deref().map(|last| last as &(dyn std::error::Error + 'static))
            }
            Error::BadReply { source, .. } => Some(source),
            Error::Send(source) => Some(source),
            Error::Contradicted(_)
            | Error::GivenUp { .. }
            | Error::Unreachable { .. }
            | Error::Silent { .. }
            | Error::Lost { .. }
            | Error::Refused { .. } => None,
        }
    }
}

struct Tries(u32);

impl fmt::Display for Tries {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            1 => f.write_str("1 try"),
            tries => write!(f, "{tries} tries"),
        }
    }
}
