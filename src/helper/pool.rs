//! Helper processes that stay: who gets which, when another is started, and how all are ended.
//!
//! There are as many places as nodes may be worked on at once. A place holds a process once it was needed, and rests after
//! that process had to be ended, longer each time until another one has answered. A pool that was replaced serves those that
//! had begun with it, and keeps no process.

#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::ffi::OsString;
use std::io;
use std::mem;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, TryRecvError, never};
use parking_lot::{Condvar, Mutex};

use super::farewell::{Farewell, LEAVE_MAX, log_idle};
use super::process::{Cause, Process, Stderr};
use super::session::{Bounds, Fault, Question, Said, Session};
use super::{Answer, Failure, HelperCommand, Input, Limits, Run, describe};
use crate::metrics::Metrics;
use crate::shutdown::Never;

/// What a helper finds in its environment when it is asked about many nodes.
const ANNOUNCEMENT: (&str, &str) = (super::PROTOCOL_VARIABLE, "persistent/1");

/// The processes of one helper.
pub(super) struct Pool {
    command: HelperCommand,
    hidden: Vec<OsString>,
    metrics: Arc<Metrics>,
    places: Mutex<Places<Session>>,
    /// Notified when a place changes for the better.
    changed: Condvar,
    questions: AtomicU64,
    farewell: Arc<Farewell>,
}

/// What came of one question.
pub(super) struct Asked {
    pub result: Result<Answer, (Failure, Option<Run>)>,
    pub stderr: Stderr,
}

impl Pool {
    /// A pool of at most `processes_max`; none is started yet.
    pub fn new(
        command: HelperCommand,
        processes_max: usize,
        hidden: Vec<OsString>,
        metrics: Arc<Metrics>,
    ) -> Pool {
        let farewell = Farewell::new(metrics.clone());
        Pool::with(command, processes_max, hidden, metrics, farewell)
    }

    fn with(
        command: HelperCommand,
        processes_max: usize,
        hidden: Vec<OsString>,
        metrics: Arc<Metrics>,
        farewell: Arc<Farewell>,
    ) -> Pool {
        Pool {
            command,
            hidden,
            metrics,
            places: Mutex::new(Places::new(processes_max)),
            changed: Condvar::new(),
            questions: AtomicU64::new(0),
            farewell,
        }
    }

    /// The pool that takes this one's place: `command` may be another, or another version of the same. Those that still ask
    /// this one are answered, and each of its processes ends when it is asked nothing.
    pub fn replaced(&self, command: HelperCommand, processes_max: usize) -> Pool {
        let idle = self.places.lock().retire();
        self.farewell.let_go(idle);
        let (hidden, metrics) = (self.hidden.clone(), self.metrics.clone());
        Pool::with(command, processes_max, hidden, metrics, self.farewell.clone())
    }

    /// Asks one process about one node; starts it if none is free.
    pub fn ask(
        &self,
        input: &Input<'_>,
        limits: Limits,
        deadline: Instant,
        abort: &Receiver<Never>,
    ) -> Asked {
        let fail = |failure, run| Asked { result: Err((failure, run)), stderr: Stderr::default() };
        let begun = Instant::now();
        let deadline = deadline.min(begun + limits.timeout);
        let number = self.questions.fetch_add(1, Ordering::Relaxed);
        let question = match Question::new(number, input) {
            Ok(question) => question,
            Err(error) => return fail(Failure::Start(error.into()), None),
        };
        let (mut session, rest) = match self.take(deadline, abort) {
            Ok(taken) => taken,
            Err(failure) => return fail(failure, None),
        };
        let bounds = Bounds { deadline, output_max: limits.output_max, abort };
        match session.ask(&question, &bounds) {
            Ok(said) => {
                let stderr = session.take_errors();
                self.give_back(session);
                let failure = match said {
                    Said::Reply(reply) => match Answer::read(reply.as_bytes()) {
                        Ok(answer) => return Asked { result: Ok(answer), stderr },
                        Err(error) => Failure::Undecodable(error),
                    },
                    Said::Error(text) => Failure::Reported(text),
                };
                let run = Run { end: None, took: begun.elapsed(), last_line: stderr.last_line() };
                Asked { result: Err((failure, Some(run))), stderr }
            }
            Err(fault) => {
                let is_first = session.is_new();
                let (end, stderr) = self.end(session, &fault);
                let failure = failure(fault, is_first, limits.output_max);
                self.lose(rest, matches!(failure, Failure::Aborted));
                let last_line = stderr.last_line();
                let run = Run { end: Some(end), took: begun.elapsed(), last_line };
                Asked { result: Err((failure, Some(run))), stderr }
            }
        }
    }

    /// Starts a process beside the places, asks it nothing for `time`, and ends it; false if it had to be killed in the end.
    pub fn watch(&self, limits: Limits, time: Duration) -> Result<bool, (Failure, Option<Run>)> {
        let started = Instant::now();
        let mut session = self.start().map_err(|error| (Failure::Start(error), None))?;
        self.metrics.helper_processes.inc();
        if let Err(fault) = session.watch(started + time) {
            let (end, stderr) = self.end(session, &fault);
            let failure = failure(fault, true, limits.output_max);
            let (took, last_line) = (started.elapsed(), stderr.last_line());
            return Err((failure, Some(Run { end: Some(end), took, last_line })));
        }
        let has_ended = session.let_go(Instant::now() + LEAVE_MAX, &never());
        let (..) = session.into_process().end(Cause::Gone, &self.farewell.strays);
        self.metrics.helper_processes.dec();
        Ok(has_ended)
    }

    /// Ends all processes: their input is closed, and those that have not ended after `wait`, or when `abort` disconnects,
    /// are killed. No more are started.
    pub fn stop(&self, wait: Duration, abort: &Receiver<Never>) {
        let sessions = self.places.lock().close();
        self.changed.notify_all();
        self.farewell.see_off(sessions.into(), Instant::now() + wait, abort);
        self.farewell.wait(abort);
    }

    /// A process that waits for a question, and how long its place rests if it fails.
    fn take(
        &self,
        deadline: Instant,
        abort: &Receiver<Never>,
    ) -> Result<(Session, Duration), Failure> {
        loop {
            match self.claim(deadline, abort)? {
                Claim::Idle(mut session) => match session.check() {
                    Ok(()) => {
                        log_idle(session.id(), &session.take_errors());
                        return Ok((session, REST_MIN));
                    }
                    Err(fault) => {
                        let id = session.id();
                        let what = match &fault {
                            Fault::Confused(confusion) => format!("wrote {confusion}"),
                            _ => "ended while it was asked nothing".to_owned(),
                        };
                        let (end, stderr) = self.end(session, &fault);
                        log_idle(id, &stderr);
                        log::warn!(component = "helper"; "Helper process {id} {what} ({end})");
                        self.lose(REST_MIN, false);
                    }
                },
                Claim::Vacant { rest, again } => match self.start() {
                    Ok(session) => {
                        log::debug!(component = "helper"; "Started helper process {}", session.id());
                        self.metrics.helper_processes.inc();
                        if again {
                            self.metrics.helper_restarts.inc();
                        }
                        return Ok((session, rest));
                    }
                    Err(error) => {
                        self.lose(rest, false);
                        return Err(Failure::Start(error));
                    }
                },
            }
        }
    }

    /// A place, as soon as there is one.
    fn claim(&self, deadline: Instant, abort: &Receiver<Never>) -> Result<Claim<Session>, Failure> {
        let mut places = self.places.lock();
        loop {
            let now = Instant::now();
            let until = match places.next(now) {
                Next::Take(claim) => return Ok(claim),
                Next::Closed => return Err(Failure::Aborted),
                Next::Resting(time) => return Err(Failure::Resting(time)),
                Next::Wait(until) => until,
            };
            if matches!(abort.try_recv(), Err(TryRecvError::Disconnected)) {
                return Err(Failure::Aborted);
            }
            if now >= deadline {
                return Err(Failure::Busy);
            }
            // A channel can't be waited for together with the lock.
            let until = until.map_or(deadline, |until| until.min(deadline));
            self.changed.wait_until(&mut places, until.min(now + ABORT_CHECK));
        }
    }

    fn start(&self) -> io::Result<Session> {
        self.farewell.strays.reap()?;
        let process = Process::start(&self.command, &self.hidden, &[ANNOUNCEMENT])?;
        match process.unblock() {
            Ok(()) => Ok(Session::new(process)),
            Err(error) => {
                process.end(Cause::Misbehaved, &self.farewell.strays);
                Err(error)
            }
        }
    }

    fn give_back(&self, session: Session) {
        let (refused, is_closed) = {
            let mut places = self.places.lock();
            (places.give_back(session), places.closed)
        };
        self.changed.notify_one();
        match refused {
            None => {}
            Some(session) if is_closed => self.farewell.kill([session]),
            Some(session) => self.farewell.let_go(vec![session]),
        }
    }

    fn lose(&self, rest: Duration, is_innocent: bool) {
        let now = Instant::now();
        self.places.lock().lose(now, if is_innocent { Duration::ZERO } else { rest });
        self.changed.notify_one();
    }

    /// Ends a session that failed, and says how and what was on stderr.
    fn end(&self, session: Session, fault: &Fault) -> (String, Stderr) {
        let cause = match fault {
            Fault::Gone { .. } => Cause::Gone,
            Fault::TimedOut => Cause::TimedOut,
            Fault::Aborted => Cause::Aborted,
            Fault::TooLong => Cause::TooLong,
            Fault::Unreadable(_) | Fault::Confused(_) => Cause::Misbehaved,
        };
        let (end, _, stderr) = session.into_process().end(cause, &self.farewell.strays);
        self.metrics.helper_processes.dec();
        (describe(&end), stderr)
    }
}

/// What a fault of a session is to whoever asked; `is_first` if it never answered before.
fn failure(fault: Fault, is_first: bool, output_max: usize) -> Failure {
    match fault {
        Fault::Gone { partial: Some(confusion) } => Failure::Confused(confusion),
        Fault::Gone { partial: None } => Failure::Gone,
        Fault::TimedOut => Failure::Silent { is_first },
        Fault::Aborted => Failure::Aborted,
        Fault::TooLong => Failure::TooLong { output_max },
        Fault::Unreadable(error) => Failure::Read(error),
        Fault::Confused(confusion) => Failure::Confused(confusion),
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        // Nobody is left who could wait for them to end by themselves.
        self.farewell.kill(self.places.get_mut().close());
    }
}

/// Places for processes of type `P`, without processes and clock.
#[derive(Debug)]
struct Places<P> {
    /// Places whose process waits for a question. The one that has waited longest is next, so that all are looked at.
    idle: VecDeque<P>,
    /// Places with a process that is being asked, started or ended.
    busy: usize,
    /// Places that never had a process.
    fresh: usize,
    /// Places whose process had to be ended.
    resting: Vec<Rest>,
    /// No process is kept that is asked nothing.
    retired: bool,
    closed: bool,
}

/// A place that is not used for a while.
#[derive(Debug, Clone, Copy)]
struct Rest {
    until: Instant,
    /// How long it was, which is what the next one is twice as long as.
    time: Duration,
}

/// What a request may do.
#[derive(Debug)]
enum Next<P> {
    /// Go on with this.
    Take(Claim<P>),
    /// Wait for a change, until this time at most.
    Wait(Option<Instant>),
    /// Give up: no process runs, and none may be started for so long.
    Resting(Duration),
    /// Give up: all have been ended.
    Closed,
}

/// A place that was taken.
#[derive(Debug)]
enum Claim<P> {
    /// One with a process.
    Idle(P),
    /// One in which a process has to be started.
    Vacant {
        /// How long it rests if that process fails before it has answered.
        rest: Duration,
        /// Whether it has had a process before.
        again: bool,
    },
}

impl<P> Places<P> {
    fn new(count: usize) -> Places<P> {
        let (idle, resting) = (VecDeque::new(), Vec::new());
        Places { idle, busy: 0, fresh: count, resting, retired: false, closed: false }
    }

    /// Keeps no process from now on that is asked nothing; returns those there are.
    fn retire(&mut self) -> Vec<P> {
        self.retired = true;
        self.fresh += self.idle.len();
        mem::take(&mut self.idle).into()
    }

    /// What a request may do at `now`.
    fn next(&mut self, now: Instant) -> Next<P> {
        if self.closed {
            return Next::Closed;
        }
        if let Some(process) = self.idle.pop_front() {
            self.busy += 1;
            return Next::Take(Claim::Idle(process));
        }
        let first = self.resting.iter().enumerate().min_by_key(|(_, rest)| rest.until);
        let first = first.map(|(at, rest)| (at, *rest));
        if let Some((at, rest)) = first
            && rest.until <= now
        {
            self.resting.swap_remove(at);
            self.busy += 1;
            let time = (rest.time * 2).clamp(REST_MIN, REST_MAX);
            return Next::Take(Claim::Vacant { rest: time, again: true });
        }
        if self.fresh > 0 {
            self.fresh -= 1;
            self.busy += 1;
            return Next::Take(Claim::Vacant { rest: REST_MIN, again: false });
        }
        match first.map(|(_, rest)| rest.until) {
            Some(until) if self.busy == 0 && until > now + REST_WAIT => Next::Resting(until - now),
            until => Next::Wait(until),
        }
    }

    /// Takes back a place whose process has answered; the process, if it is to end.
    fn give_back(&mut self, process: P) -> Option<P> {
        self.busy -= 1;
        if self.closed {
            return Some(process);
        }
        if self.retired {
            self.fresh += 1;
            return Some(process);
        }
        self.idle.push_back(process);
        None
    }

    /// Takes back a place whose process is gone; it rests for `time`.
    fn lose(&mut self, now: Instant, time: Duration) {
        self.busy -= 1;
        self.resting.push(Rest { until: now + time, time });
    }

    /// Lets nobody have a place any more.
    fn close(&mut self) -> VecDeque<P> {
        self.closed = true;
        mem::take(&mut self.idle)
    }
}

/// How long a place rests after its process failed; doubled while no process answers there.
const REST_MIN: Duration = Duration::from_millis(100);

/// Longest rest.
const REST_MAX: Duration = Duration::from_secs(30);

/// How long a request waits for a rest to end when no process runs: what ends soon is no reason to let a node down.
const REST_WAIT: Duration = Duration::from_secs(1);

/// How often an abort is looked for.
const ABORT_CHECK: Duration = Duration::from_millis(50);
