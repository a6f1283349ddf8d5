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

#[cfg(test)]
mod tests {
    use std::thread;

    use serde_json::{Value, json};

    use super::*;
    use crate::gate::Reason;
    use crate::rpc::actions::{
        Configure, Gen25519, GenCsr, Inventory, Jwt, JwtReply, ReleaseUpdate, Restart, Shutdown,
    };
    use crate::rpc::testing::{
        Asked, NODE, Net, good_body, payload, recorded_answers, refusal, tampered,
    };

    /// Time-outs of some milliseconds; a node that answers does so before its request has left.
    const FAST: Timing = Timing {
        silence: Duration::from_millis(5),
        grace: |_| Duration::from_millis(10),
        timeout: |_, _| Duration::from_millis(20),
        pause: |pause| pause / 1000,
    };

    struct Bench {
        net: Net,
        node: Identity,
        gate: Arc<Gate>,
        abort: Option<Channel<Never>>,
        aborted: Receiver<Never>,
    }

    impl Bench {
        fn new() -> Bench {
            let gate = Arc::new(Gate::new());
            gate.open(Reason::Disconnected);
            let (abort, aborted) = bounded(0);
            let node = Identity::parse(NODE).unwrap();
            Bench { net: Net::new(), node, gate, abort: Some(abort), aborted }
        }

        fn attempt<'a>(&'a self, patience: &'a mut Calm) -> Attempt<'a> {
            let deadline = Instant::now() + Duration::from_secs(600);
            let term = self.gate.begin().unwrap();
            let mut attempt = Attempt::new(
                &self.net.rpc,
                &self.node,
                &self.gate,
                term,
                &self.aborted,
                deadline,
                Duration::from_secs(2),
                patience,
            );
            attempt.timing = FAST;
            attempt.random = fastrand::Rng::with_seed(1);
            attempt
        }
    }

    /// A patience that counts.
    struct Calm {
        rested: u32,
        silent: u32,
        answered: u32,
        agrees: bool,
        /// Goes when the node answers: the process aborts while it waits for a permit.
        abort: Option<Channel<Never>>,
        give_up: Option<Channel<Never>>,
        given_up: Receiver<Never>,
    }

    impl Calm {
        fn new() -> Calm {
            let (give_up, given_up) = bounded(0);
            Calm {
                rested: 0,
                silent: 0,
                answered: 0,
                agrees: true,
                abort: None,
                give_up: Some(give_up),
                given_up,
            }
        }
    }

    impl Patience for Calm {
        fn resting(&mut self) {
            self.rested += 1;
        }

        fn silent(&mut self) {
            self.silent += 1;
        }

        fn answered(&mut self) -> bool {
            self.answered += 1;
            self.abort = None;
            self.agrees
        }

        fn given_up(&self) -> &Receiver<Never> {
            &self.given_up
        }
    }

    /// Calls `action` and throws the reply away.
    fn call(attempt: &mut Attempt<'_>, action: Action) -> Result<(), Error> {
        let none = std::collections::BTreeMap::new();
        match action {
            Action::Inventory => plain(attempt, Inventory {}),
            Action::Jwt => plain(attempt, Jwt { token: "s3cret" }),
            Action::Gen25519 => plain(attempt, Gen25519 { nonce: "abc", token: "s3cret" }),
            Action::GenCsr => plain(attempt, GenCsr { cn: NODE, token: "s3cret" }),
            Action::ReleaseUpdate => {
                plain(attempt, ReleaseUpdate { repository: "", token: "s3cret", version: "1" })
            }
            Action::Configure => plain(
                attempt,
                Configure {
                    action_policies: &none,
                    ca: "",
                    certificate: "",
                    config: "{}",
                    ecdh_public: "",
                    key: "",
                    opa_policies: &none,
                    server_jwt: "",
                    ssldir: "",
                    token: "s3cret",
                },
            ),
            Action::Restart => plain(attempt, Restart { splay_secs: 1, token: "s3cret" }),
            Action::Shutdown => plain(attempt, Shutdown { token: "s3cret" }),
        }
    }

    fn plain<C: Call + Copy>(attempt: &mut Attempt<'_>, request: C) -> Result<(), Error> {
        attempt.call(&mut |_| request, &mut |_, _| Checked::Done(()))
    }

    fn jwt(attempt: &mut Attempt<'_>) -> Result<JwtReply, Error> {
        attempt.call(&mut |_| Jwt { token: "s3cret" }, &mut |_, reply| Checked::Done(reply))
    }

    /// The body of a `jwt` reply with this token.
    fn jwt_body(token: &str) -> String {
        let data = json!({"jwt": token, "ecdh_public": ""});
        json!({"action": "jwt", "statuscode": 0, "statusmsg": "OK", "data": data}).to_string()
    }

    fn tries_of(action: Action) -> u32 {
        match action {
            Action::Inventory | Action::Gen25519 | Action::Configure => 5,
            Action::Jwt | Action::Restart | Action::Shutdown => 3,
            Action::GenCsr | Action::ReleaseUpdate => 1,
        }
    }

    #[test]
    fn returns_the_reply_of_a_node_that_agrees() {
        for action in Action::ALL {
            let bench = Bench::new();
            bench.net.answer(move |_, asked| vec![asked.reply(&good_body(action))]);
            let mut calm = Calm::new();
            let mut attempt = bench.attempt(&mut calm);
            assert_eq!(call(&mut attempt, action), Ok(()), "{action}");
            assert_eq!(attempt.contradicted(), None);
            assert_eq!(bench.net.rpc.pending(), 1, "the id stays known until the attempt ends");
            drop(attempt);
            assert_eq!(bench.net.rpc.pending(), 0);
            assert_eq!(calm.silent, 0);
            let asked = bench.net.asked();
            let body: Value = serde_json::from_str(&asked[0].body).unwrap();
            assert_eq!(body["agent"], action.agent());
            assert_eq!(body["action"], action.name());
            assert_eq!(asked.len(), 1);
        }
    }

    /// Every request for `action` is answered by `answer`; checks the error and the number of requests.
    #[track_caller]
    fn check_failure(
        action: Action,
        tries: u32,
        answer: impl FnMut(u32, &Asked) -> Vec<crate::transport::Message> + Send + 'static,
        is_expected: impl Fn(&Error) -> bool,
    ) {
        let bench = Bench::new();
        bench.net.answer(answer);
        let mut calm = Calm::new();
        let error = call(&mut bench.attempt(&mut calm), action).unwrap_err();
        assert!(is_expected(&error), "{action}: {error:?}");
        assert_eq!(error.tries(), tries, "{action}: {error:?}");
        let ids: std::collections::BTreeSet<String> =
            bench.net.asked().iter().map(Asked::id).collect();
        assert_eq!(ids.len(), usize::try_from(tries).unwrap(), "{action}: each try has its own id");
        let labels = format!(r#"{{rpc="{action}",site="testing"}}"#);
        let series = |name: &str| {
            bench.net.series(&format!("choria_provisioner_{name}{labels}")).unwrap_or_default()
        };
        assert_eq!(series("rpc_errors"), "1");
        assert_eq!(series("rpc_time_count"), tries.to_string());
    }

    #[test]
    fn silence_costs_the_tries_of_the_action() {
        for action in Action::ALL {
            let tries = tries_of(action);
            check_failure(action, tries, |_, _| vec![], |error| *error == Error::Silent { tries });
        }
    }

    #[test]
    fn refusals_that_stay_are_not_tried_again() {
        type Question = fn(&Error) -> bool;
        let rows: [(&str, Question); 4] = [
            ("Could not obtain provisioning lock", Error::is_busy),
            ("Incorrect provision token supplied", Error::is_wrong_token),
            (
                "Cannot reconfigure a server that is not in provisioning mode",
                Error::is_not_provisioning,
            ),
            ("Cannot update a server that is not in provisioning mode", Error::is_not_provisioning),
        ];
        for action in Action::ALL {
            for (words, question) in rows {
                let answer = move |_, asked: &Asked| vec![asked.reply(&refusal(action, 1, words))];
                check_failure(action, 1, answer, question);
                // The same words with another status, or more words, are something else.
                let bench = Bench::new();
                bench.net.answer(move |_, asked| vec![asked.reply(&refusal(action, 5, words))]);
                let mut calm = Calm::new();
                let error = call(&mut bench.attempt(&mut calm), action).unwrap_err();
                assert!(!question(&error), "{error:?}");
            }
        }
    }

    #[test]
    fn unknown_actions_and_unreadable_data_are_not_tried_again() {
        for action in Action::ALL {
            for code in [2, 4] {
                let answer = move |_, asked: &Asked| vec![asked.reply(&refusal(action, code, "x"))];
                check_failure(
                    action,
                    1,
                    answer,
                    |error| matches!(error, Error::Refused { code: c, .. } if *c == code),
                );
            }
        }
    }

    #[test]
    fn other_refusals_cost_the_tries_of_the_action() {
        for action in Action::ALL {
            // A node may decline a wish to shut down.
            let tries = if action == Action::Shutdown { 1 } else { tries_of(action) };
            for code in [1, 3, 5, 6, 255] {
                let answer = move |_, asked: &Asked| vec![asked.reply(&refusal(action, code, "x"))];
                check_failure(action, tries, answer, |error| {
                    *error == Error::Refused { code, message: "x".to_owned(), tries }
                });
            }
        }
    }

    #[test]
    fn recorded_refusals_are_understood() {
        for answer in recorded_answers() {
            if answer["statuscode"] == json!(0) {
                continue;
            }
            let bench = Bench::new();
            let body = answer.to_string();
            bench.net.answer(move |_, asked| vec![asked.reply(&body)]);
            let mut calm = Calm::new();
            let error = jwt(&mut bench.attempt(&mut calm)).unwrap_err();
            let Error::Refused { code, message, .. } = &error else { panic!("{error:?}") };
            assert_eq!(u64::from(*code), answer["statuscode"].as_u64().unwrap());
            assert_eq!(message, answer["statusmsg"].as_str().unwrap());
        }
    }

    #[test]
    fn shortens_what_a_node_says_about_a_refusal() {
        let bench = Bench::new();
        bench.net.answer(|_, asked| {
            vec![asked.reply(&refusal(Action::GenCsr, 1, &format!("a\nb{}", "x".repeat(100_000))))]
        });
        let mut calm = Calm::new();
        let error = call(&mut bench.attempt(&mut calm), Action::GenCsr).unwrap_err();
        let Error::Refused { message, .. } = error else { panic!("{error:?}") };
        assert!(message.starts_with("a\\nbx") && message.len() < 600, "{message}");
    }

    #[test]
    fn unusable_answers_cost_the_tries_of_the_action() {
        for action in Action::ALL {
            for body in ["", "pong", "{}", "null", r#"{"action":"x","statuscode":0}"#] {
                check_failure(
                    action,
                    tries_of(action),
                    move |_, asked| vec![asked.reply(body)],
                    |error| matches!(error, Error::BadReply { .. }),
                );
            }
            // Well-formed, and to something else.
            let other = if action == Action::Jwt { Action::Restart } else { Action::Jwt };
            check_failure(
                action,
                tries_of(action),
                move |_, asked| vec![asked.reply(&good_body(other))],
                |error| matches!(error, Error::BadReply { .. }),
            );
        }
    }

    #[test]
    fn nobody_listening_is_tried_once_more() {
        for action in Action::ALL {
            check_failure(
                action,
                2,
                |_, asked| vec![asked.no_responders()],
                |error| *error == Error::Unreachable { tries: 2 },
            );
        }
    }

    #[test]
    fn a_node_that_was_away_for_a_moment_is_reached() {
        let bench = Bench::new();
        bench.net.answer(|n, asked| match n {
            1 => vec![asked.no_responders()],
            _ => vec![asked.reply(&jwt_body("a"))],
        });
        let mut calm = Calm::new();
        assert_eq!(jwt(&mut bench.attempt(&mut calm)).unwrap().jwt, "a");
    }

    #[test]
    fn no_responders_after_an_answer_is_a_lie() {
        let bench = Bench::new();
        bench.net.answer(|_, asked| {
            let bad = asked.reply(&refusal(Action::Jwt, 5, "x"));
            vec![bad, asked.no_responders()]
        });
        let mut calm = Calm::new();
        let error = jwt(&mut bench.attempt(&mut calm)).unwrap_err();
        assert!(matches!(error, Error::Refused { tries: 3, .. }), "{error:?}");
    }

    #[test]
    fn a_check_may_ask_once_more() {
        let bench = Bench::new();
        bench.net.answer(|n, asked| vec![asked.reply(&jwt_body(&n.to_string()))]);
        let mut calm = Calm::new();
        let mut attempt = bench.attempt(&mut calm);
        let result: Result<Result<(), String>, Error> = attempt
            .call(&mut |_| Jwt { token: "" }, &mut |_, reply| Checked::OnceMore(Err(reply.jwt)));
        assert_eq!(result, Ok(Err("2".to_owned())), "the second word is the last");
        let result: Result<Result<(), String>, Error> =
            attempt.call(&mut |_| Jwt { token: "" }, &mut |_, reply| match reply.jwt.as_str() {
                "3" => Checked::OnceMore(Err(reply.jwt)),
                _ => Checked::Done(Ok(())),
            });
        assert_eq!(result, Ok(Ok(())));
        assert_eq!(bench.net.asked().len(), 4);
    }

    #[test]
    fn every_try_makes_its_own_request() {
        let bench = Bench::new();
        bench.net.answer(|n, asked| match n {
            3 => vec![asked.reply(&good_body(Action::Gen25519))],
            _ => vec![asked.reply("x")],
        });
        let mut calm = Calm::new();
        let nonces = ["", "one", "two", "three"];
        let nonce = bench.attempt(&mut calm).call(
            &mut |n| Gen25519 { nonce: nonces[usize::try_from(n).unwrap()], token: "" },
            &mut |request, _| Checked::Done(request.nonce),
        );
        assert_eq!(nonce, Ok("three"));
        let asked = bench.net.asked();
        let sent: Vec<Value> =
            asked.iter().map(|asked| serde_json::from_str(&asked.body).unwrap()).collect();
        assert_eq!(sent[0]["data"]["nonce"], "one");
        assert_eq!(sent[2]["data"]["nonce"], "three");
    }

    #[test]
    fn forged_answers_are_counted_and_the_real_one_still_counts() {
        let bench = Bench::new();
        bench.net.answer(|_, asked| {
            let forged = jwt_body("forged");
            let id = asked.id();
            let other = id.replace(|c: char| c.is_ascii_digit(), "a");
            vec![
                asked.reply_from("n1.fleet.example.net", &id, &forged),
                asked.reply_from(NODE, &other, &forged),
                asked.raw(tampered(NODE, &id, &forged)),
                asked.raw(b"x".to_vec()),
                asked.raw(Vec::new()),
                asked.reply(&jwt_body("real")),
            ]
        });
        let mut calm = Calm::new();
        let mut attempt = bench.attempt(&mut calm);
        assert_eq!(jwt(&mut attempt).unwrap().jwt, "real");
        assert_eq!(attempt.contradicted(), None);
        for (kind, count) in
            [("other_sender", 1), ("other_request", 1), ("hash", 1), ("malformed", 2)]
        {
            assert_eq!(bench.net.unexpected(kind), count, "{kind}");
        }
    }

    #[test]
    fn forged_answers_alone_are_silence() {
        check_failure(
            Action::Jwt,
            3,
            |_, asked| {
                vec![asked.reply_from("n1.fleet.example.net", &asked.id(), &jwt_body("forged"))]
            },
            |error| *error == Error::Silent { tries: 3 },
        );
    }

    /// One request is answered by two bodies; whether the attempt counts as contradicted.
    fn contradicts(first: &Value, second: &Value) -> bool {
        let bench = Bench::new();
        let (first, second) = (first.to_string(), second.to_string());
        bench.net.answer(move |n, asked| match n {
            1 => vec![asked.reply(&first), asked.reply(&second)],
            _ => vec![asked.reply(&jwt_body("a"))],
        });
        let mut calm = Calm::new();
        let mut attempt = bench.attempt(&mut calm);
        let _ = jwt(&mut attempt);
        attempt.contradicted() == Some(&Contradiction::Differs { action: Action::Jwt })
    }

    #[test]
    fn answers_contradict_by_action_status_or_data() {
        let good: Value = serde_json::from_str(&jwt_body("a")).unwrap();
        let with = |key: &str, value: Value| {
            let mut body = good.clone();
            body[key] = value;
            body
        };
        assert!(!contradicts(&good, &good));
        assert!(!contradicts(&good, &with("statusmsg", json!("other words"))));
        assert!(contradicts(&good, &with("action", json!("restart"))));
        assert!(contradicts(&good, &with("statuscode", json!(1))));
        assert!(contradicts(&good, &with("data", json!({"jwt": "b", "ecdh_public": ""}))));
        assert!(contradicts(&good, &json!("no RPC reply")));
        assert!(contradicts(&with("statuscode", json!(1)), &good));
        assert!(contradicts(&json!("no RPC reply"), &good));
        assert!(contradicts(&json!("no RPC reply"), &json!("another")));
        assert!(!contradicts(&json!("no RPC reply"), &json!("no RPC reply")));
    }

    #[test]
    fn counts_an_equal_answer_and_ignores_it() {
        let bench = Bench::new();
        bench.net.answer(|_, asked| vec![asked.reply(&jwt_body("a")), asked.reply(&jwt_body("a"))]);
        let mut calm = Calm::new();
        let mut attempt = bench.attempt(&mut calm);
        assert!(jwt(&mut attempt).is_ok());
        assert_eq!(attempt.contradicted(), None);
        assert_eq!(bench.net.unexpected("duplicate"), 1);
    }

    #[test]
    fn a_contradiction_stops_further_calls_until_configure_was_sent() {
        let bench = Bench::new();
        bench.net.answer(|_, asked| {
            let body: Value = serde_json::from_str(&asked.body).unwrap();
            let action = body["action"].as_str().unwrap().to_owned();
            let action = Action::ALL.into_iter().find(|a| a.name() == action).unwrap();
            let mut answers = vec![asked.reply(&good_body(action))];
            if action != Action::Jwt {
                answers.push(asked.reply("something else"));
            }
            answers
        });
        let mut calm = Calm::new();
        let mut attempt = bench.attempt(&mut calm);
        assert_eq!(call(&mut attempt, Action::Configure), Ok(()));
        assert!(attempt.contradicted().is_some());
        assert_eq!(call(&mut attempt, Action::Restart), Ok(()), "it is owed its restart");
        drop(attempt);

        let mut attempt = bench.attempt(&mut calm);
        assert_eq!(call(&mut attempt, Action::Jwt), Ok(()));
        assert_eq!(call(&mut attempt, Action::GenCsr), Ok(()));
        let sent = bench.net.asked().len();
        let differs = Contradiction::Differs { action: Action::GenCsr };
        let error = call(&mut attempt, Action::Configure).unwrap_err();
        assert_eq!(error, Error::Contradicted(differs));
        assert_eq!(bench.net.asked().len(), sent);
    }

    #[test]
    fn a_flood_is_a_contradiction() {
        let bench = Bench::new();
        bench.net.answer(|_, asked| vec![asked.reply(&jwt_body("a")); 50]);
        let mut calm = Calm::new();
        let mut attempt = bench.attempt(&mut calm);
        assert!(jwt(&mut attempt).is_ok());
        assert_eq!(attempt.contradicted(), Some(&Contradiction::Flood { action: Action::Jwt }));
        assert_eq!(bench.net.unexpected("overflow"), 42);
    }

    #[test]
    fn hears_a_second_answer_that_comes_later() {
        let bench = Bench::new();
        bench.net.answer(|_, asked| vec![asked.reply(&jwt_body("a"))]);
        let mut calm = Calm::new();
        let mut attempt = bench.attempt(&mut calm);
        assert!(jwt(&mut attempt).is_ok());
        assert_eq!(attempt.listen(Duration::from_millis(1)), Ok(()));
        assert_eq!(attempt.contradicted(), None);
        bench.net.memory.deliver_message(bench.net.asked()[0].reply(&jwt_body("b")));
        assert_eq!(attempt.listen(Duration::from_millis(1)), Ok(()));
        assert_eq!(attempt.contradicted(), Some(&Contradiction::Differs { action: Action::Jwt }));
    }

    /// Answers nothing at first; at the second request, answers it and the first in the order that `answer` says.
    fn answer_late(
        net: &Net,
        answer: impl Fn(&Asked, &Asked) -> Vec<crate::transport::Message> + Send + 'static,
    ) {
        let mut first: Option<Asked> = None;
        net.answer(move |_, asked| match &first {
            None => {
                first = Some(asked.clone());
                vec![]
            }
            Some(first) => answer(first, asked),
        });
    }

    #[test]
    fn a_late_answer_counts_for_actions_that_replace_no_keys() {
        for action in [Action::Inventory, Action::Configure, Action::Restart, Action::Shutdown] {
            let bench = Bench::new();
            answer_late(&bench.net, move |first, _| vec![first.reply(&good_body(action))]);
            let mut calm = Calm::new();
            let mut attempt = bench.attempt(&mut calm);
            assert_eq!(call(&mut attempt, action), Ok(()), "{action}");
            assert_eq!(bench.net.asked().len(), 2);
            assert_eq!(attempt.contradicted(), None);
        }
    }

    #[test]
    fn a_late_answer_is_checked_against_its_own_request() {
        let bench = Bench::new();
        answer_late(&bench.net, |first, _| vec![first.reply(&good_body(Action::Restart))]);
        let mut calm = Calm::new();
        let splay = bench
            .attempt(&mut calm)
            .call(&mut |n| Restart { splay_secs: n, token: "" }, &mut |request, _| {
                Checked::Done(request.splay_secs)
            });
        assert_eq!(splay, Ok(1));
    }

    #[test]
    fn only_the_last_answer_counts_for_actions_that_replace_keys() {
        for action in [Action::Jwt, Action::Gen25519] {
            let bench = Bench::new();
            answer_late(&bench.net, move |first, second| {
                vec![first.reply(&good_body(action)), second.reply(&good_body(action))]
            });
            let mut calm = Calm::new();
            let mut attempt = bench.attempt(&mut calm);
            assert_eq!(call(&mut attempt, action), Ok(()), "{action}");
            assert_eq!(attempt.contradicted(), None, "answered in order");
            assert_eq!(bench.net.unexpected("late"), 1);
        }
        let bench = Bench::new();
        answer_late(&bench.net, |first, _| vec![first.reply(&jwt_body("old"))]);
        let mut calm = Calm::new();
        let error = jwt(&mut bench.attempt(&mut calm)).unwrap_err();
        assert_eq!(error, Error::Silent { tries: 3 });
    }

    #[test]
    fn an_earlier_try_answered_after_the_last_fails_the_attempt() {
        for action in [Action::Jwt, Action::Gen25519] {
            let bench = Bench::new();
            answer_late(&bench.net, move |first, second| {
                vec![second.reply(&good_body(action)), first.reply(&good_body(action))]
            });
            let mut calm = Calm::new();
            let mut attempt = bench.attempt(&mut calm);
            assert_eq!(call(&mut attempt, action), Ok(()), "{action}");
            assert_eq!(attempt.contradicted(), Some(&Contradiction::KeysReplaced { action }));
        }
        // The node makes one key for each request it hears, and hears the first one last.
        let bench = Bench::new();
        answer_late(&bench.net, |first, second| {
            if first.body.contains("gencsr") {
                vec![
                    second.reply(&good_body(Action::GenCsr)),
                    first.reply(&good_body(Action::GenCsr)),
                ]
            } else {
                vec![]
            }
        });
        let mut calm = Calm::new();
        let mut attempt = bench.attempt(&mut calm);
        assert!(call(&mut attempt, Action::GenCsr).is_err(), "one try only");
        assert!(call(&mut attempt, Action::GenCsr).is_ok());
        assert_eq!(attempt.contradicted(), None, "two calls, not two tries");
    }

    #[test]
    fn a_late_refusal_that_stays_ends_the_call() {
        let bench = Bench::new();
        answer_late(&bench.net, |first, _| {
            let words = "Could not obtain provisioning lock";
            vec![first.reply(&refusal(Action::Configure, 1, words))]
        });
        let mut calm = Calm::new();
        let error = call(&mut bench.attempt(&mut calm), Action::Configure).unwrap_err();
        assert!(error.is_busy(), "{error:?}");
        assert_eq!(bench.net.asked().len(), 2);
    }

    #[test]
    fn a_late_refusal_that_may_pass_changes_nothing() {
        let bench = Bench::new();
        answer_late(&bench.net, |first, second| {
            let refused = first.reply(&refusal(Action::Configure, 5, "x"));
            vec![refused, second.reply(&good_body(Action::Configure))]
        });
        let mut calm = Calm::new();
        assert_eq!(call(&mut bench.attempt(&mut calm), Action::Configure), Ok(()));
        assert_eq!(bench.net.asked().len(), 2);
    }

    #[test]
    fn an_answer_that_comes_in_the_pause_counts() {
        for action in [Action::Jwt, Action::Restart] {
            let bench = Bench::new();
            let (sent, asked) = bounded(1);
            bench.net.answer(move |_, asked| {
                sent.send(asked.clone()).unwrap();
                vec![]
            });
            let memory = bench.net.memory.clone();
            let node = thread::spawn(move || {
                let asked: Asked = asked.recv().unwrap();
                memory.deliver_message(asked.reply(&good_body(action)));
            });
            let mut calm = Calm::new();
            let mut attempt = bench.attempt(&mut calm);
            attempt.timing.timeout = |_, _| Duration::ZERO;
            attempt.timing.pause = |_| Duration::from_secs(60);
            assert_eq!(call(&mut attempt, action), Ok(()));
            assert_eq!(bench.net.asked().len(), 1);
            node.join().unwrap();
        }
    }

    #[test]
    fn a_silent_node_gives_its_permit_back_until_it_answers() {
        let bench = Bench::new();
        bench.net.answer(|n, asked| match n {
            1 | 2 => vec![],
            _ => vec![asked.reply(&jwt_body("a"))],
        });
        let mut calm = Calm::new();
        let mut attempt = bench.attempt(&mut calm);
        assert!(jwt(&mut attempt).is_ok());
        assert!(jwt(&mut attempt).is_ok());
        drop(attempt);
        assert_eq!((calm.rested, calm.silent, calm.answered), (1, 1, 1));
    }

    #[test]
    fn a_node_to_be_asked_again_leaves_its_permit_to_others_meanwhile() {
        let bench = Bench::new();
        bench.net.answer(|n, asked| match n {
            1 => vec![asked.reply(r#"{"action":"jwt","statuscode":1,"statusmsg":"no","data":{}}"#)],
            _ => vec![asked.reply(&jwt_body("a"))],
        });
        let mut calm = Calm::new();
        let mut attempt = bench.attempt(&mut calm);
        assert!(jwt(&mut attempt).is_ok());
        drop(attempt);
        assert_eq!((calm.rested, calm.silent, calm.answered), (1, 0, 1));
    }

    #[test]
    fn a_silent_node_without_a_permit_is_given_up() {
        let bench = Bench::new();
        bench.net.answer(|n, asked| match n {
            1 => vec![],
            _ => vec![asked.reply(&jwt_body("a"))],
        });
        let mut calm = Calm::new();
        calm.agrees = false;
        let error = jwt(&mut bench.attempt(&mut calm)).unwrap_err();
        assert_eq!(error, Error::GivenUp { tries: 2 });

        let mut calm = Calm::new();
        calm.give_up = None;
        let error = call(&mut bench.attempt(&mut calm), Action::Restart).unwrap_err();
        assert!(matches!(error, Error::GivenUp { tries: 1 }), "{error:?}");
    }

    #[test]
    fn an_abort_while_a_node_waits_for_its_permit_is_called_one() {
        let mut bench = Bench::new();
        bench.net.answer(|n, asked| match n {
            1 => vec![],
            _ => vec![asked.reply(&jwt_body("a"))],
        });
        let mut calm = Calm::new();
        (calm.agrees, calm.abort) = (false, bench.abort.take());
        let error = jwt(&mut bench.attempt(&mut calm)).unwrap_err();
        assert_eq!(error, Error::Stopped(Closed::Aborted));
    }

    #[test]
    fn an_abort_wins_against_answers() {
        let mut bench = Bench::new();
        bench.net.answer(|_, asked| vec![asked.reply(&jwt_body("a"))]);
        bench.abort = None;
        let mut calm = Calm::new();
        let error = jwt(&mut bench.attempt(&mut calm)).unwrap_err();
        assert_eq!(error, Error::Stopped(Closed::Aborted));
        assert_eq!(
            bench.net.series("choria_provisioner_rpc_errors{").as_deref(),
            Some(r#"rpc="choria_provision#jwt",site="testing"} 0"#)
        );
    }

    #[test]
    fn asks_the_gate_before_every_try() {
        let bench = Bench::new();
        let mut calm = Calm::new();
        let mut attempt = bench.attempt(&mut calm);
        bench.gate.end_term();
        let error = jwt(&mut attempt).unwrap_err();
        assert_eq!(error, Error::Stopped(Closed::TermEnded));
        assert!(bench.net.asked().is_empty());
        drop(attempt);

        // Lost between two tries.
        let bench = Arc::new(Bench::new());
        let weak = Arc::downgrade(&bench);
        bench.net.answer(move |_, asked| {
            weak.upgrade().unwrap().gate.end_term();
            vec![asked.reply("x")]
        });
        let error = jwt(&mut bench.attempt(&mut calm)).unwrap_err();
        assert_eq!(error, Error::Stopped(Closed::TermEnded));
        assert_eq!(bench.net.asked().len(), 1);
    }

    impl Bench {
        /// Lets the connection end and come back under the first `lost` requests, which nobody answers; `answer` says
        /// what comes for the later ones, numbered from 1.
        fn lose(
            &self,
            lost: u32,
            mut answer: impl FnMut(u32, &Asked) -> Vec<crate::transport::Message> + Send + 'static,
        ) {
            let gate = self.gate.clone();
            self.net.answer(move |n, asked| {
                if n > lost {
                    return answer(n - lost, asked);
                }
                gate.close(Reason::Disconnected);
                gate.open(Reason::Disconnected);
                vec![]
            });
        }
    }

    /// Nobody waits this long in a test.
    const PATIENT: Timing = Timing { timeout: |_, _| Duration::from_secs(600), ..FAST };

    #[test]
    fn a_request_lost_with_the_connection_is_sent_again_and_counts_as_no_try() {
        for action in Action::ALL.into_iter().filter(|action| !action.is_sent_once()) {
            let bench = Bench::new();
            bench.lose(1, move |_, asked| vec![asked.reply(&good_body(action))]);
            let mut calm = Calm::new();
            let mut attempt = bench.attempt(&mut calm);
            attempt.timing = PATIENT;
            assert_eq!(call(&mut attempt, action), Ok(()), "{action}");
            assert_eq!(attempt.contradicted(), None);
            assert_eq!(bench.net.asked().len(), 2);

            let bench = Bench::new();
            bench.lose(2, |_, _| vec![]);
            let error = call(&mut bench.attempt(&mut calm), action).unwrap_err();
            assert_eq!(error, Error::Silent { tries: 2 + tries_of(action) }, "{action}");
        }
    }

    #[test]
    fn an_update_lost_with_the_connection_is_not_sent_again() {
        let bench = Bench::new();
        bench.lose(1, |_, _| vec![]);
        let mut calm = Calm::new();
        let error = call(&mut bench.attempt(&mut calm), Action::ReleaseUpdate).unwrap_err();
        assert_eq!(error, Error::Lost { tries: 1 });
        assert_eq!(bench.net.asked().len(), 1);
    }

    #[test]
    fn a_connection_that_never_holds_ends_the_call() {
        let bench = Bench::new();
        bench.lose(u32::MAX, |_, _| vec![]);
        let mut calm = Calm::new();
        let mut attempt = bench.attempt(&mut calm);
        attempt.timing = PATIENT;
        let error = call(&mut attempt, Action::Restart).unwrap_err();
        assert_eq!(error, Error::Lost { tries: 10 });
    }

    #[test]
    fn an_answer_that_comes_soon_after_the_reconnect_counts() {
        for action in Action::ALL {
            let bench = Bench::new();
            let (sent, asked) = bounded(1);
            let gate = bench.gate.clone();
            bench.net.answer(move |_, asked| {
                gate.close(Reason::Disconnected);
                sent.send(asked.clone()).unwrap();
                vec![]
            });
            let (memory, gate) = (bench.net.memory.clone(), bench.gate.clone());
            let node = thread::spawn(move || {
                let asked: Asked = asked.recv().unwrap();
                gate.open(Reason::Disconnected);
                memory.deliver_message(asked.reply(&good_body(action)));
            });
            let mut calm = Calm::new();
            let mut attempt = bench.attempt(&mut calm);
            attempt.timing = Timing { grace: |_| Duration::from_secs(600), ..PATIENT };
            assert_eq!(call(&mut attempt, action), Ok(()), "{action}");
            assert_eq!(bench.net.asked().len(), 1);
            node.join().unwrap();
        }
    }

    #[test]
    fn a_lost_request_is_not_given_up_while_there_is_no_connection() {
        let bench = Bench::new();
        let gate = bench.gate.clone();
        bench.net.answer(move |_, _| {
            gate.close(Reason::Disconnected);
            vec![]
        });
        let mut calm = Calm::new();
        let mut attempt = bench.attempt(&mut calm);
        // Both have ended long before the node's own time.
        attempt.timing = FAST;
        attempt.deadline = Some(Instant::now() + Duration::from_millis(200));
        let error = call(&mut attempt, Action::GenCsr).unwrap_err();
        assert_eq!(error, Error::Deadline { tries: 1, last: None });
    }

    #[test]
    fn after_a_reconnect_a_node_that_is_not_back_yet_is_asked_until_it_is() {
        let bench = Bench::new();
        bench.lose(1, |n, asked| match n {
            1..=5 => vec![asked.no_responders()],
            _ => vec![asked.reply(&good_body(Action::Configure))],
        });
        let mut calm = Calm::new();
        assert_eq!(call(&mut bench.attempt(&mut calm), Action::Configure), Ok(()));
        assert_eq!(bench.net.asked().len(), 7);

        // One that may have restarted is not waited for.
        bench.lose(1, |_, asked| vec![asked.no_responders()]);
        let error = call(&mut bench.attempt(&mut calm), Action::Restart).unwrap_err();
        assert_eq!(error, Error::Unreachable { tries: 3 });

        // A node that was found since then was back already.
        bench.net.answer(|_, asked| vec![asked.no_responders()]);
        let error = call(&mut bench.attempt(&mut calm), Action::Configure).unwrap_err();
        assert_eq!(error, Error::Unreachable { tries: 2 });
    }

    #[test]
    fn waits_for_the_connection_within_the_nodes_time() {
        let bench = Bench::new();
        let mut calm = Calm::new();
        let mut attempt = bench.attempt(&mut calm);
        bench.gate.close(Reason::Disconnected);
        attempt.deadline = Some(Instant::now() + Duration::from_millis(10));
        let error = jwt(&mut attempt).unwrap_err();
        assert_eq!(error, Error::Deadline { tries: 0, last: None });
        assert!(bench.net.asked().is_empty());
    }

    #[test]
    fn the_nodes_time_ends_a_wait_and_the_last_failure_is_kept() {
        let bench = Bench::new();
        bench.net.answer(|n, asked| match n {
            1 => vec![asked.reply(&refusal(Action::Jwt, 5, "x"))],
            _ => vec![],
        });
        let mut calm = Calm::new();
        let mut attempt = bench.attempt(&mut calm);
        attempt.timing.timeout = |_, _| Duration::from_secs(60);
        attempt.deadline = Some(Instant::now() + Duration::from_millis(500));
        let Error::Deadline { tries, last } = jwt(&mut attempt).unwrap_err() else {
            panic!("not ended by the deadline");
        };
        assert_eq!(tries, 2);
        assert!(matches!(*last.unwrap(), Error::Refused { code: 5, tries: 1, .. }));
        let error = jwt(&mut attempt).unwrap_err();
        assert_eq!(error, Error::Deadline { tries: 0, last: None });
        assert_eq!(bench.net.asked().len(), 2, "nothing is sent after it");

        attempt.ignore_deadline();
        attempt.timing = FAST;
        let error = call(&mut attempt, Action::Restart).unwrap_err();
        assert_eq!(error, Error::Silent { tries: 3 });
    }

    #[test]
    fn a_request_that_cannot_be_sent_is_tried_again_only_for_want_of_a_connection() {
        let bench = Bench::new();
        bench.net.memory.set_connected(false);
        let mut calm = Calm::new();
        let error = jwt(&mut bench.attempt(&mut calm)).unwrap_err();
        assert_eq!(error, Error::Send(SendError(PublishError::Disconnected)));

        bench.net.memory.set_connected(true);
        bench.net.memory.set_max_payload(10);
        let error = jwt(&mut bench.attempt(&mut calm)).unwrap_err();
        assert!(
            matches!(error, Error::Send(SendError(PublishError::TooLarge { .. }))),
            "{error:?}"
        );
    }

    #[test]
    fn takes_over_what_the_prober_heard() {
        let bench = Bench::new();
        let (sink, heard) = bounded(1);
        let body = Inventory {}.body();
        let registration =
            bench.net.rpc.send(&bench.node, Action::Inventory, &body, &sink).unwrap();
        let asked = bench.net.asked().remove(0);
        bench.net.memory.deliver_message(asked.reply(&good_body(Action::Inventory)));
        bench.net.answer(|_, asked| vec![asked.reply(&jwt_body("a"))]);

        let mut calm = Calm::new();
        let mut attempt = bench.attempt(&mut calm);
        attempt.adopt(registration, heard.try_recv().unwrap());
        assert!(jwt(&mut attempt).is_ok());
        // A second machine with this name was slower.
        bench.net.memory.deliver_message(asked.reply("something else"));
        assert_eq!(attempt.contradicted(), None, "the first answer is not read yet");
        assert_eq!(call(&mut attempt, Action::Inventory), Ok(()));
        assert_eq!(bench.net.asked().len(), 2, "the inventory was asked for once");
        let differs = Contradiction::Differs { action: Action::Inventory };
        assert_eq!(attempt.contradicted(), Some(&differs));
    }

    #[test]
    fn hears_of_a_second_answer_that_came_before_it_took_over() {
        let bench = Bench::new();
        let (sink, heard) = bounded(8);
        let registration = bench.net.rpc.send(&bench.node, Action::Inventory, "{}", &sink).unwrap();
        let asked = bench.net.asked().remove(0);
        bench.net.memory.deliver_message(asked.reply(&good_body(Action::Inventory)));
        bench.net.memory.deliver_message(asked.reply("something else"));

        let mut calm = Calm::new();
        let mut attempt = bench.attempt(&mut calm);
        attempt.adopt(registration, heard.try_recv().unwrap());
        assert_eq!(call(&mut attempt, Action::Inventory), Ok(()));
        let differs = Contradiction::Differs { action: Action::Inventory };
        assert_eq!(attempt.contradicted(), Some(&differs));
    }

    #[test]
    fn asks_again_when_the_prober_heard_nonsense() {
        let bench = Bench::new();
        let (sink, heard) = bounded(1);
        let registration = bench.net.rpc.send(&bench.node, Action::Inventory, "{}", &sink).unwrap();
        let forged = payload("n1.fleet.example.net", registration.id().as_str(), "x");
        bench.net.memory.deliver_message(bench.net.asked()[0].raw(forged));
        bench.net.answer(|_, asked| vec![asked.reply(&good_body(Action::Inventory))]);

        let mut calm = Calm::new();
        let mut attempt = bench.attempt(&mut calm);
        attempt.adopt(registration, heard.try_recv().unwrap());
        assert_eq!(call(&mut attempt, Action::Inventory), Ok(()));
        assert_eq!(bench.net.asked().len(), 2);
        assert_eq!(bench.net.unexpected("other_sender"), 1);
    }

    #[test]
    fn errors_say_what_happened() {
        let deadline = Error::Deadline {
            tries: 2,
            last: Some(Box::new(Error::Refused { code: 5, message: "x".to_owned(), tries: 1 })),
        };
        assert_eq!(deadline.to_string(), "the node's time was up, after 2 tries");
        let cause = std::error::Error::source(&deadline).unwrap();
        assert_eq!(cause.to_string(), "refused with status 5: x (1 try)");
        assert_eq!(Error::Silent { tries: 3 }.to_string(), "no answer, after 3 tries");
    }
}
