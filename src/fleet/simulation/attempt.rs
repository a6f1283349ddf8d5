//! A worker with a node in hand: every step, its tries, its permit and the gate before each.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crate::fleet::registry::Key;
use crate::fleet::simulation::node::{Answer, Says, Wish};
use crate::fleet::simulation::process::{Id, Process, Registration, Sink};
use crate::fleet::simulation::{Scene, Time, duration};
use crate::fleet::worker::permits::{Answered, Seat};
use crate::gate::{Closed, Reason, Step as Passage, Term};
use crate::node::Outcome;
use crate::rpc::actions::Action;
use crate::rpc::retry::{Failure, Retry, Verdict};

/// What a request is given for the way.
const DISCOVERY_TIMEOUT: Duration = Duration::from_secs(2);
/// A node that takes longer leaves its permit to others.
const REST_AFTER: Duration = Duration::from_millis(10);
/// One that takes longer than this may be given up.
const SILENCE: Duration = Duration::from_secs(3);
/// How long an answer may come after a reconnect, and the same for `restart`.
const LOST_GRACE: Duration = Duration::from_secs(1);
const LEFT_AFTER: Duration = Duration::from_secs(3);
/// Once configured, how long a node waits for the connection to come back.
const WITHOUT_DEADLINE: Duration = Duration::from_secs(24 * 60 * 60);
/// The longest the helper takes.
pub const HELPER_MAX: Time = 3_000_000;

/// One step of the plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    Call(Action),
    Helper,
}

/// A node in hand.
#[derive(Debug)]
pub struct Attempt {
    pub key: Key,
    pub seat: Seat,
    /// The prober wants its place.
    pub is_given_up: bool,
    node: usize,
    term: Term,
    /// The same, by what the election said.
    own_term: u32,
    deadline: Option<Instant>,
    pub started: Time,
    /// The step it is at, and what follows.
    step: Step,
    plan: VecDeque<Step>,
    state: State,
    call: Call,
    /// All its requests.
    sent: Vec<Sent>,
    adopted: Option<(Registration, Answer)>,
    arrivals: VecDeque<(Id, Option<Answer>)>,
    is_contradicted: bool,
    is_configure_sent: bool,
    quiet: Quiet,
    /// What was heard and waits for a permit.
    held: Option<Heard>,
    /// The connection that it began with.
    link: Option<u32>,
    configured_at: Option<Instant>,
}

#[derive(Debug, Clone, Copy)]
enum State {
    /// Before a try, or the helper.
    AtGate,
    Awaiting(Awaiting),
    Pausing(Instant),
    Helping(Instant),
}

#[derive(Debug, Clone, Copy)]
struct Awaiting {
    over: Option<u32>,
    end: Instant,
    rest: Instant,
    silence: Instant,
    is_lost: bool,
}

/// The tries of one step.
#[derive(Debug)]
struct Call {
    retry: Retry,
    first: usize,
    last: Option<Wrong>,
    has_lost: bool,
}

#[derive(Debug)]
struct Sent {
    registration: Registration,
    content: Option<u64>,
    is_superseded: bool,
}

#[derive(Debug, Clone, Copy)]
struct Heard {
    index: usize,
    says: Says,
}

/// Whether it holds its permit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Quiet {
    Awake,
    Resting,
    Silent,
}

/// Why a step failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Wrong {
    Contradicted,
    Stopped(Closed),
    GivenUp,
    Deadline,
    Unreachable,
    Silent,
    Lost,
    Said(Says),
    Unsent,
}

/// What happened.
enum Next {
    GoOn,
    Wait,
    End(Outcome, &'static str),
}

impl Attempt {
    pub fn new(
        key: Key,
        seat: Seat,
        term: Term,
        us: &Process,
        held: Option<(Id, Registration, Answer)>,
        scene: &mut Scene<'_>,
    ) -> Attempt {
        let node = scene.index(&key.identity);
        scene.count_attempt(node);
        let mut plan: VecDeque<Step> = scene.setup.plan.iter().copied().collect();
        let step = plan.pop_front().expect("there is always something to do");
        Attempt {
            key,
            seat,
            is_given_up: false,
            node,
            term,
            own_term: us.term,
            deadline: Some(scene.mono + scene.setup.node_timeout),
            started: scene.now,
            step,
            plan,
            state: State::AtGate,
            call: Call::new(step, 0),
            sent: Vec::new(),
            adopted: held.map(|(_, registration, answer)| (registration, answer)),
            arrivals: VecDeque::new(),
            is_contradicted: false,
            is_configure_sent: false,
            quiet: Quiet::Awake,
            held: None,
            link: us.link,
            configured_at: None,
        }
    }

    /// Takes in what came for one of its requests.
    pub fn arrives(&mut self, id: Id, answer: Option<Answer>) {
        self.arrivals.push_back((id, answer));
    }

    /// Does what can be done; the outcome when that is all.
    pub fn advance(
        &mut self,
        us: &mut Process,
        scene: &mut Scene<'_>,
    ) -> Option<(Outcome, &'static str)> {
        loop {
            match self.go_on(us, scene) {
                Ok(Next::GoOn) => {}
                Ok(Next::Wait) => return None,
                Ok(Next::End(outcome, reason)) => return Some((outcome, reason)),
                Err(wrong) => return Some(self.outcome(wrong, us, scene)),
            }
        }
    }

    /// When it has something to do though nothing comes.
    pub fn wake(&self, now: Instant) -> Option<Instant> {
        let until = match self.state {
            _ if self.held.is_some() => None,
            State::AtGate => None,
            State::Awaiting(awaiting) => Some(awaiting.until(self.quiet)),
            State::Pausing(until) | State::Helping(until) => Some(until),
        };
        // Whatever is past waits for the gate.
        [until, self.deadline].into_iter().flatten().filter(|wake| *wake > now).min()
    }

    /// Whether it uses a permit, and whether it waits for one.
    pub fn permit(&self) -> (bool, bool) {
        (self.quiet == Quiet::Awake, self.held.is_some())
    }

    /// Requests that it keeps registered.
    pub fn requests_len(&self) -> usize {
        self.sent.len() + usize::from(self.adopted.is_some())
    }

    /// An outcome must be somebody's fault.
    pub fn check_blame(&self, outcome: &Outcome, scene: &Scene<'_>) {
        let node = &scene.nodes[self.node];
        let is_explained = match outcome {
            Outcome::Stopped(Closed::TermEnded | Closed::Aborted) => true,
            // The probe came before.
            Outcome::Refused => scene.is_disturbed_since(0) || node.explains(outcome, 0),
            _ => node.explains(outcome, self.started),
        };
        assert!(
            is_explained || scene.is_disturbed_since(self.started),
            "{}: {outcome:?} at {:?} for no reason",
            node.identity,
            self.step
        );
    }

    fn go_on(&mut self, us: &mut Process, scene: &mut Scene<'_>) -> Result<Next, Wrong> {
        if us.is_aborted {
            return Err(Wrong::Stopped(Closed::Aborted));
        }
        if let Some(heard) = self.held {
            return self.wait_for_permit(heard, us, scene);
        }
        match self.state {
            State::AtGate => self.pass_gate(us, scene),
            State::Helping(until) => self.help(until, us, scene),
            State::Awaiting(awaiting) => self.await_answer(awaiting, us, scene),
            State::Pausing(until) => self.pause(until, us, scene),
        }
    }

    fn wait_for_permit(
        &mut self,
        heard: Heard,
        us: &mut Process,
        scene: &mut Scene<'_>,
    ) -> Result<Next, Wrong> {
        if let Some(at) = us.woken.iter().position(|seat| *seat == self.seat) {
            us.woken.swap_remove(at);
            self.quiet = Quiet::Awake;
            self.held = None;
            return self.judge(heard, us, scene);
        }
        self.wait(scene.mono)
    }

    fn pass_gate(&mut self, us: &mut Process, scene: &mut Scene<'_>) -> Result<Next, Wrong> {
        self.check_contradictions()?;
        if self.is_late(scene.mono) {
            return Err(Wrong::Deadline);
        }
        if !self.proceeds(us, scene)? {
            return Ok(Next::Wait);
        }
        let identity = &self.key.identity;
        assert!(!us.is_lease_over(scene.boot), "{identity} goes on while nobody says we lead");
        assert_eq!(us.term, self.own_term, "{identity} goes on in another term");
        assert!(us.has_term, "{identity} goes on without a term");
        match self.step {
            Step::Helper => {
                let until = scene.mono + duration(scene.rng.u64(..HELPER_MAX));
                self.state = State::Helping(until);
                Ok(Next::GoOn)
            }
            Step::Call(action) => self.try_once(action, us, scene),
        }
    }

    /// Whether the gate lets the next step pass; if not it waits.
    fn proceeds(&self, us: &Process, scene: &Scene<'_>) -> Result<bool, Wrong> {
        let deadline = self.deadline.unwrap_or(scene.mono + WITHOUT_DEADLINE);
        match us.gate.proceed(self.term, deadline, scene.mono, scene.boot) {
            Passage::Go => Ok(true),
            Passage::Wait => Ok(false),
            Passage::End(Closed::Deadline) => Err(Wrong::Deadline),
            Passage::End(closed) => Err(Wrong::Stopped(closed)),
        }
    }

    fn check_contradictions(&mut self) -> Result<(), Wrong> {
        while let Some((id, answer)) = self.arrivals.pop_front() {
            self.hear(id, answer);
        }
        if self.is_contradicted && !self.is_configure_sent {
            return Err(Wrong::Contradicted);
        }
        Ok(())
    }

    fn try_once(
        &mut self,
        action: Action,
        us: &mut Process,
        scene: &mut Scene<'_>,
    ) -> Result<Next, Wrong> {
        let adopted = if action == Action::Inventory { self.adopted.take() } else { None };
        let registration = match adopted {
            Some((registration, answer)) => {
                self.arrivals.push_front((registration.id, Some(answer)));
                registration
            }
            None => match us.ask(&self.key, action, Sink::Attempt(self.seat), scene) {
                Some(registration) => registration,
                None => return self.failed(Failure::Disconnected, Wrong::Unsent, us, scene),
            },
        };
        self.is_configure_sent |= action == Action::Configure;
        self.sent.push(Sent { registration, content: None, is_superseded: false });
        let now = scene.mono;
        self.state = State::Awaiting(Awaiting {
            over: us.link,
            end: now + action.timeout(DISCOVERY_TIMEOUT),
            rest: now + REST_AFTER,
            silence: now + SILENCE,
            is_lost: false,
        });
        Ok(Next::GoOn)
    }

    fn await_answer(
        &mut self,
        mut awaiting: Awaiting,
        us: &mut Process,
        scene: &mut Scene<'_>,
    ) -> Result<Next, Wrong> {
        let now = scene.mono;
        let until = awaiting.until(self.quiet);
        if self.is_given_up {
            return Err(Wrong::GivenUp);
        }
        if let Some((id, answer)) = self.arrivals.pop_front() {
            let current = self.sent.len() - 1;
            return match self.hear(id, answer) {
                Some(Arrival::Heard(heard)) => self.resume(heard, us, scene),
                Some(Arrival::NoResponders { index }) if index == current => {
                    let failure = match self.may_be_coming_back(us, now) {
                        true => Failure::ComingBack,
                        false => Failure::NoResponders,
                    };
                    self.failed(failure, Wrong::Unreachable, us, scene)
                }
                Some(Arrival::NoResponders { .. }) | None => Ok(Next::GoOn),
            };
        }
        if !awaiting.is_lost && us.link != awaiting.over {
            if !self.proceeds(us, scene)? {
                return Ok(Next::Wait);
            }
            scene.note("link lost during a step");
            let action = self.action();
            let grace = now + if action == Action::Restart { LEFT_AFTER } else { LOST_GRACE };
            awaiting.is_lost = true;
            awaiting.silence = now + SILENCE;
            awaiting.end = if action.is_sent_once() { awaiting.end.max(grace) } else { grace };
            self.call.has_lost = true;
            self.state = State::Awaiting(awaiting);
            return Ok(Next::GoOn);
        }
        if now >= until {
            if until < awaiting.end {
                self.grow_quiet(us, now);
                return Ok(Next::GoOn);
            }
            let (failure, wrong) = match awaiting.is_lost {
                true => (Failure::Lost, Wrong::Lost),
                false => (Failure::Silent, Wrong::Silent),
            };
            return self.failed(failure, wrong, us, scene);
        }
        self.wait(now)
    }

    fn pause(
        &mut self,
        until: Instant,
        us: &mut Process,
        scene: &mut Scene<'_>,
    ) -> Result<Next, Wrong> {
        if self.is_given_up {
            return Err(Wrong::GivenUp);
        }
        if let Some((id, answer)) = self.arrivals.pop_front() {
            return match self.hear(id, answer) {
                Some(Arrival::Heard(heard)) => self.resume(heard, us, scene),
                _ => Ok(Next::GoOn),
            };
        }
        if scene.mono >= until {
            self.state = State::AtGate;
            return Ok(Next::GoOn);
        }
        self.wait(scene.mono)
    }

    /// What an arrival is, whatever call it belongs to.
    fn hear(&mut self, id: Id, answer: Option<Answer>) -> Option<Arrival> {
        let index = self.sent.iter().position(|sent| sent.registration.id == id);
        let Some(index) = index else {
            // The only other request is the prober's.
            if let (Some((_, first)), Some(answer)) = (&self.adopted, answer) {
                self.is_contradicted |= *first != answer;
            }
            return None;
        };
        let sent = &mut self.sent[index];
        let Some(answer) = answer else {
            return sent.content.is_none().then_some(Arrival::NoResponders { index });
        };
        match sent.content {
            Some(first) => {
                self.is_contradicted |= first != answer.content;
                None
            }
            None => {
                sent.content = Some(answer.content);
                self.is_contradicted |= sent.is_superseded;
                Some(Arrival::Heard(Heard { index, says: answer.says }))
            }
        }
    }

    /// The node has answered: its permit first.
    fn resume(
        &mut self,
        heard: Heard,
        us: &mut Process,
        scene: &mut Scene<'_>,
    ) -> Result<Next, Wrong> {
        let is_last = heard.index + 1 == self.sent.len();
        let is_of_call = heard.index >= self.call.first;
        if !is_of_call || !is_last && self.action().only_last_answer_counts() {
            return Ok(Next::GoOn);
        }
        if self.quiet != Quiet::Awake {
            match us.permits.answered(self.seat) {
                Answered::GoOn => self.quiet = Quiet::Awake,
                Answered::GivenUp => return Err(Wrong::GivenUp),
                Answered::Wait => {
                    scene.note("waited for a permit");
                    self.held = Some(heard);
                    return Ok(Next::GoOn);
                }
            }
        }
        self.judge(heard, us, scene)
    }

    fn judge(
        &mut self,
        heard: Heard,
        us: &mut Process,
        scene: &mut Scene<'_>,
    ) -> Result<Next, Wrong> {
        let wrong = Wrong::Said(heard.says);
        let refused = |settled| Failure::Refused { code: 1, settled };
        let failure = match heard.says {
            Says::Yes => return self.succeeded(scene),
            Says::BadJwt => return Ok(Next::End(Outcome::Refused, "the JWT is none of ours")),
            Says::Busy | Says::WrongToken | Says::NotProvisioning => refused(true),
            Says::No => refused(self.action() == Action::Shutdown),
            Says::Garbage => Failure::BadReply,
        };
        match self.state {
            State::Awaiting(_) if heard.index + 1 == self.sent.len() || failure.is_final() => {
                self.failed(failure, wrong, us, scene)
            }
            _ if failure.is_final() => Err(wrong),
            // An earlier try was refused, and counted as failed when its time was up.
            _ => {
                self.call.last = Some(wrong);
                Ok(Next::GoOn)
            }
        }
    }

    fn failed(
        &mut self,
        failure: Failure,
        wrong: Wrong,
        us: &mut Process,
        scene: &mut Scene<'_>,
    ) -> Result<Next, Wrong> {
        let Verdict::Again(pause) = self.call.retry.next(failure, scene.rng) else {
            return Err(wrong);
        };
        self.call.last = Some(wrong);
        if self.quiet == Quiet::Awake {
            self.grow_quiet(us, scene.mono);
        }
        self.state = State::Pausing(scene.mono + pause);
        Ok(Next::GoOn)
    }

    fn succeeded(&mut self, scene: &Scene<'_>) -> Result<Next, Wrong> {
        let action = self.action();
        if action.only_last_answer_counts() {
            let last = self.sent.len() - 1;
            for sent in &mut self.sent[self.call.first..last] {
                sent.is_superseded = true;
            }
        }
        match action {
            Action::Configure => {
                self.configured_at = Some(scene.mono);
                self.deadline = None;
            }
            Action::Restart => {
                return Ok(Next::End(self.provisioned(Some(scene.mono)), ""));
            }
            Action::Shutdown => return Ok(Next::End(Outcome::ShutDown, "")),
            Action::ReleaseUpdate => return Ok(Next::End(upgrade_sent(scene.mono), "")),
            Action::Inventory | Action::Jwt | Action::Gen25519 | Action::GenCsr => {}
        }
        let next = self.plan.pop_front().expect("restart is the last step");
        self.begin(next);
        Ok(Next::GoOn)
    }

    /// The helper is at work, or done.
    fn help(&mut self, until: Instant, us: &Process, scene: &mut Scene<'_>) -> Result<Next, Wrong> {
        if self.is_late(scene.mono) {
            return Ok(Next::End(Outcome::HelperFailed, "the helper took too long"));
        }
        if scene.mono < until {
            return Ok(Next::Wait);
        }
        debug_assert!(us.permits.nodes_len() > 0);
        match scene.nodes[self.node].wish() {
            Wish::Configure => {
                let next = self.plan.pop_front().expect("the helper is not the last step");
                self.begin(next);
            }
            Wish::Fail => return Ok(Next::End(Outcome::HelperFailed, "the helper failed")),
            Wish::Misconfigured => return Ok(Next::End(Outcome::Misconfigured, "no key")),
            Wish::Defer => return Ok(Next::End(Outcome::Deferred, "later")),
            Wish::ShutDown => self.begin(Step::Call(Action::Shutdown)),
            Wish::Upgrade => self.begin(Step::Call(Action::ReleaseUpdate)),
        }
        Ok(Next::GoOn)
    }

    fn begin(&mut self, step: Step) {
        self.step = step;
        self.state = State::AtGate;
        self.call = Call::new(step, self.sent.len());
    }

    fn grow_quiet(&mut self, us: &mut Process, now: Instant) {
        let woken = if self.quiet == Quiet::Awake {
            self.quiet = Quiet::Resting;
            us.permits.rest(self.seat)
        } else {
            self.quiet = Quiet::Silent;
            us.permits.silent(self.seat, now)
        };
        us.grant(woken);
    }

    fn may_be_coming_back(&self, us: &Process, now: Instant) -> bool {
        let may_have_left = self.action() == Action::Restart && self.call.has_lost;
        !may_have_left && us.link != self.link && us.gate.just_reconnected(now)
    }

    /// There is nothing to do now, or never any more.
    fn wait(&self, now: Instant) -> Result<Next, Wrong> {
        if self.is_late(now) { Err(Wrong::Deadline) } else { Ok(Next::Wait) }
    }

    fn is_late(&self, now: Instant) -> bool {
        self.deadline.is_some_and(|deadline| now >= deadline)
    }

    fn action(&self) -> Action {
        match self.step {
            Step::Call(action) => action,
            Step::Helper => Action::Inventory,
        }
    }

    /// What became of the node.
    fn outcome(&self, wrong: Wrong, us: &Process, scene: &Scene<'_>) -> (Outcome, &'static str) {
        let is_gone = matches!(
            wrong,
            Wrong::Unreachable
                | Wrong::Silent
                | Wrong::Lost
                | Wrong::GivenUp
                | Wrong::Unsent
                | Wrong::Deadline
        );
        match self.action() {
            Action::Restart if is_gone => return (self.provisioned(None), ""),
            Action::ReleaseUpdate if matches!(wrong, Wrong::Silent | Wrong::Lost) => {
                return (upgrade_sent(scene.mono), "");
            }
            // A wish that a node may decline.
            Action::Shutdown if wrong == Wrong::Said(Says::No) => return (Outcome::ShutDown, ""),
            _ => {}
        }
        let is_stopping = |reason| matches!(reason, Reason::Disconnected | Reason::Standby);
        // Of one whose time went by while the broker or the node was away, that is what went wrong.
        let wrong = match (wrong, self.call.last) {
            (Wrong::Deadline, _) if us.gate.reasons(scene.boot).any(is_stopping) => Wrong::Lost,
            (Wrong::Deadline, Some(last @ (Wrong::Lost | Wrong::Unsent | Wrong::Unreachable))) => {
                last
            }
            _ => wrong,
        };
        match wrong {
            Wrong::Contradicted => (Outcome::Refused, "contradicted"),
            Wrong::Stopped(closed) => (Outcome::Stopped(closed), ""),
            Wrong::Unreachable => (Outcome::Unreachable, "no responders"),
            Wrong::Lost | Wrong::Unsent => (Outcome::Stopped(Closed::Deadline), ""),
            Wrong::Silent | Wrong::GivenUp | Wrong::Deadline => {
                let outcome = match self.action() {
                    Action::Inventory if self.step != Step::Helper => Outcome::Unreachable,
                    _ => Outcome::Failed,
                };
                (outcome, "silent")
            }
            Wrong::Said(Says::Busy) => (Outcome::Busy, "locked"),
            Wrong::Said(Says::WrongToken) => (Outcome::WrongToken, "wrong token"),
            Wrong::Said(Says::NotProvisioning) => {
                (Outcome::NotProvisioning, "not in provisioning mode")
            }
            Wrong::Said(_) => (Outcome::Failed, "refused"),
        }
    }

    fn provisioned(&self, restarted_at: Option<Instant>) -> Outcome {
        let configured_at = self.configured_at.expect("restart follows configure");
        Outcome::Provisioned { configured_at, restarted_at }
    }
}

/// What an arrival turned out to be.
enum Arrival {
    Heard(Heard),
    NoResponders { index: usize },
}

impl Awaiting {
    fn until(&self, quiet: Quiet) -> Instant {
        match quiet {
            Quiet::Awake => self.end.min(self.rest),
            Quiet::Resting => self.end.min(self.silence),
            Quiet::Silent => self.end,
        }
    }
}

impl Call {
    fn new(step: Step, first: usize) -> Call {
        let action = if let Step::Call(action) = step { action } else { Action::Inventory };
        Call { retry: Retry::new(action), first, last: None, has_lost: false }
    }
}

fn upgrade_sent(sent_at: Instant) -> Outcome {
    Outcome::UpgradeSent { version: "0.31.0".into(), from: "0.30.0".into(), sent_at }
}
