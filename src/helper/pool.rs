//! Helper processes that stay: who gets which, when another is started, and how all are ended.
//!
//! There are as many places as nodes may be worked on at once. A place holds a process once it was needed, and rests after
//! that process had to be ended, longer each time until another one has answered. A pool that was replaced serves those that
//! had begun with it, and keeps no process.

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

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::io::{Read as _, Write as _};

    use super::super::tests::{Directory, LONG, SHORT, Watch, input};
    use super::*;
    use crate::protocol::Identity;

    #[test]
    fn one_process_answers_for_a_thousand_nodes() {
        let bench = Bench::new(1, "", ANSWER);
        for number in 0..1000 {
            bench.says(&format!("n{number}"));
        }
        assert_eq!(bench.counts(), (1, 0));
    }

    #[test]
    fn each_of_many_threads_gets_the_answer_for_its_own_node() {
        let bench = Bench::new(3, "", ANSWER);
        std::thread::scope(|scope| {
            for thread in 0..8 {
                let bench = &bench;
                scope.spawn(move || {
                    for number in 0..50 {
                        bench.says(&format!("n{thread}-{number}"));
                    }
                });
            }
        });
        let (running, restarts) = bench.counts();
        assert!((1..=3).contains(&running), "{running}");
        assert_eq!(restarts, 0);
    }

    #[test]
    fn processes_are_started_only_as_they_are_needed() {
        let directory = Directory::new();
        let (began, go) = (directory.fifo("began"), directory.fifo("go"));
        let wait = format!("echo $identity >{began}; read x <{go}; {ANSWER}");
        let bench = Bench::new(2, "", &wait);
        std::thread::scope(|scope| {
            let asking: Vec<_> = (0..3)
                .map(|at| {
                    scope.spawn({
                        let bench = &bench;
                        move || bench.says(&format!("n{at}"))
                    })
                })
                .collect();
            // Two are asked, and the third waits for one of them.
            let mut began = std::fs::OpenOptions::new().read(true).write(true).open(began).unwrap();
            let mut seen = BTreeSet::new();
            let mut line = [0; 3];
            for _ in 0..2 {
                began.read_exact(&mut line).unwrap();
                seen.insert(line);
            }
            assert_eq!((seen.len(), bench.counts().0), (2, 2));
            let mut go = std::fs::OpenOptions::new().read(true).write(true).open(go).unwrap();
            go.write_all(b"1\n2\n3\n").unwrap();
            for thread in asking {
                thread.join().unwrap();
            }
        });
        assert_eq!(bench.counts(), (2, 0));
        // One at a time, one is enough.
        let bench = Bench::new(8, "", ANSWER);
        for _ in 0..3 {
            bench.says("n1");
        }
        assert_eq!(bench.counts(), (1, 0));
    }

    #[test]
    fn an_answer_after_its_time_is_never_given_to_another_node() {
        let watch = Watch::new();
        // It answers when it is asked about the next node, or when it has slept for long.
        let late = format!(
            "if [ $identity = n1 ]; then exec 9>{}; late=$id; elif [ $identity = n2 ]; then id=$late; identity=n1; {ANSWER}; \
             else {ANSWER}; fi; [ $identity = n3 ] || sleep 1000",
            watch.fifo()
        );
        let bench = Bench { timeout: SHORT, ..Bench::new(1, "", &late) };
        let pool = bench.pool();
        let error = bench.ask_of(&pool, "n1").unwrap_err();
        assert_eq!(
            error,
            "no answer from HELPER; with helper_mode persistent it must answer each line of its input, not the end of it \
             (signal: killed, at its time limit, ran T s)"
        );
        watch.all_ended();
        let error = bench.ask_of(&pool, "n2").unwrap_err();
        assert!(error.starts_with("HELPER wrote an answer to another request"), "{error}");
        assert_eq!(bench.ask_of(&pool, "n3").unwrap(), "n3");
    }

    #[test]
    fn a_process_that_survives_its_group_speaks_to_nobody() {
        let directory = Directory::new();
        let (go, spoke) = (directory.fifo("go"), directory.fifo("spoke"));
        let survivor = format!(
            "trap '' PIPE; read x <{go}; printf '{{\\\"id\\\":\\\"%s\\\",\\\"reply\\\":{{\\\"msg\\\":\\\"n1\\\"}}}}\n' 0 1; echo $? >{spoke}"
        );
        let script =
            format!("if [ $identity = n1 ]; then setsid sh -c \"{survivor}\" & wait; fi; {ANSWER}");
        let bench = Bench { timeout: SHORT, ..Bench::new(1, "", &script) };
        let pool = bench.pool();
        assert!(bench.ask_of(&pool, "n1").unwrap_err().starts_with("no answer from HELPER"));
        let mut go = std::fs::OpenOptions::new().read(true).write(true).open(go).unwrap();
        go.write_all(b"now\n").unwrap();
        // Whatever became of its words, they were spoken.
        std::fs::read_to_string(spoke).unwrap();
        let bench = Bench { timeout: LONG, ..bench };
        for node in ["n2", "n3"] {
            assert_eq!(bench.ask_of(&pool, node).unwrap(), node);
        }
    }

    #[test]
    fn a_crash_fails_one_node_and_another_process_goes_on() {
        let crash = format!("[ $identity = bad ] && {{ echo no database >&2; exit 3; }}; {ANSWER}");
        let bench = Bench::new(1, "", &crash);
        let pool = bench.pool();
        assert_eq!(bench.ask_of(&pool, "n1").unwrap(), "n1");
        assert_eq!(
            bench.ask_of(&pool, "bad").unwrap_err(),
            "HELPER ended without an answer (exit status 3, ran T s, last line on stderr: no database)"
        );
        assert_eq!(bench.ask_of(&pool, "n2").unwrap(), "n2");
        assert_eq!(bench.counts(), (1, 1));
    }

    #[test]
    fn whatever_is_no_answer_to_the_question_ends_the_process() {
        let unasked = "HELPER wrote a line that was not asked for";
        for (answer, expected) in [
            (
                "echo Hello",
                "HELPER wrote a line that is no answer: expected value at line 1 column 1",
            ),
            ("echo", "HELPER wrote an empty line"),
            (
                "echo '[]'",
                "HELPER wrote a line that is no answer: invalid length 0, expected struct Line with 3 elements at line 1 column 2",
            ),
            (
                "echo '{'",
                "HELPER wrote a line that is no answer: EOF while parsing an object at line 1 column 1; an answer must be on one line",
            ),
            (
                "printf '{\"id\":\"%s\"}\\n' $id",
                "HELPER wrote an answer with neither a reply nor an error",
            ),
            (
                "printf '{\"id\":\"%s\",\"reply\":null}\\n' $id",
                "HELPER wrote an answer with neither a reply nor an error",
            ),
            (
                "printf '{\"id\":\"%s\",\"reply\":{},\"error\":\"x\"}\\n' $id",
                "HELPER wrote an answer with both a reply and an error",
            ),
            (
                "printf '{\"id\":%s,\"reply\":{}}\\n' $id",
                "HELPER wrote an answer to another request: its id is 0",
            ),
            (
                "echo '{\"id\":\"9\",\"reply\":{}}'",
                "HELPER wrote an answer to another request: its id is \"9\"",
            ),
            ("echo '{\"reply\":{}}'", "HELPER wrote an answer without the id of its request"),
            ("echo '{\"Configuration\":{}}'", EXEC_STYLE),
            ("echo '{\"defer\":true,\"msg\":\"x\"}'", EXEC_STYLE),
            ("printf '{\"msg\":\"x\"}'; exit", EXEC_STYLE),
            ("printf '{\"id\":\"%s\",\"reply\":{}}\\nHello\\n' $id", &format!("{unasked}: Hello")),
            (
                "printf '{\"id\":\"%s\",\"reply\":{}}\\n\\n' $id",
                "HELPER wrote an empty line that was not asked for",
            ),
            // Not shown: it may hold a private key.
            (
                "printf '{\"id\":\"%s\",\"reply\":{}}\\n{\"key\":1}\\n' $id",
                &format!("{unasked}: {{... (9 bytes)"),
            ),
            ("printf '{\"id\":\"%s\",\"reply\":{}}' $id; exit", "HELPER ended without an answer"),
            ("exec >&-; read x", "HELPER ended without an answer"),
            ("exec <&- >&-; exec sleep 1000", "HELPER ended without an answer"),
        ] {
            let watch = Watch::new();
            let script = format!(
                "exec 9>{}; if [ $identity = bad ]; then {answer}; else {ANSWER}; fi",
                watch.fifo()
            );
            let bench = Bench::new(1, "", &script);
            let pool = bench.pool();
            let error = bench.ask_of(&pool, "bad").unwrap_err();
            assert_eq!(
                error.split(" (signal: ").next().unwrap().split(" (exit ").next().unwrap(),
                expected,
                "{answer}: {error}"
            );
            watch.all_ended();
            assert_eq!(bench.metrics.helper_processes.get(), 0);
        }
    }

    #[test]
    fn a_line_between_two_questions_costs_no_node_its_attempt() {
        for mischief in ["echo extra", "printf half", "exit 0", "exec >&-"] {
            let (watch, directory) = (Watch::new(), Directory::new());
            let go = directory.fifo("go");
            let script = format!(
                "if [ $identity = n1 ]; then exec 9>{}; {ANSWER}; read x <{go}; {mischief}; exec 9>&-; else {ANSWER}; fi",
                watch.fifo()
            );
            let bench = Bench::new(1, "", &script);
            let pool = bench.pool();
            assert_eq!(bench.ask_of(&pool, "n1").unwrap(), "n1");
            std::fs::write(go, "now\n").unwrap();
            // It lets go of the other fifo when the mischief is done.
            watch.all_ended();
            for node in ["n2", "n3"] {
                assert_eq!(bench.ask_of(&pool, node).unwrap(), node, "{mischief}");
            }
            assert_eq!(bench.counts(), (1, 1), "{mischief}");
        }
    }

    #[test]
    fn a_slow_start_is_waited_for() {
        let directory = Directory::new();
        let (began, ready) = (directory.fifo("began"), directory.fifo("ready"));
        let bench = Bench::new(1, &format!("echo began >{began}; read x <{ready}"), ANSWER);
        std::thread::scope(|scope| {
            let asking = scope.spawn(|| bench.says("n1"));
            assert_eq!(std::fs::read_to_string(began).unwrap(), "began\n");
            assert!(!asking.is_finished());
            std::fs::write(ready, "now\n").unwrap();
            asking.join().unwrap();
        });
    }

    #[test]
    fn a_line_is_bounded_to_the_byte() {
        let padded = "printf '{\"id\":\"%s\",\"reply\":{\"msg\":\"n1\"}}' $id; echo";
        let length = r#"{"id":"0","reply":{"msg":"n1"}}"#.len();
        for (output_max, fits) in [(length, true), (length - 1, false)] {
            let bench = Bench { output_max, ..Bench::new(1, "", padded) };
            let pool = bench.pool();
            let answer = bench.ask_of(&pool, "n1");
            match fits {
                true => assert_eq!(answer.unwrap(), "n1"),
                false => assert_eq!(
                    answer.unwrap_err(),
                    format!(
                        "cannot read HELPER output: more than {output_max} bytes (signal: killed, ran T s)"
                    )
                ),
            }
        }
        // A line without an end meets the bound, not the time.
        let bench = Bench::new(1, "", "cat /dev/zero");
        let error = bench.ask_of(&bench.pool(), "n1").unwrap_err();
        assert!(error.starts_with("cannot read HELPER output: more than 4194304 bytes"), "{error}");
    }

    #[test]
    fn an_error_that_is_reported_does_not_end_the_process() {
        let script = format!(
            "case $identity in e) printf '{{\"id\":\"%s\",\"error\":\"no such node\\\\n\"}}\\n' $id ;; \
             u) printf '{{\"id\":\"%s\",\"reply\":{{\"defer\":1}}}}\\n' $id ;; *) {ANSWER} ;; esac"
        );
        let bench = Bench::new(1, "", &script);
        let pool = bench.pool();
        assert_eq!(
            bench.ask_of(&pool, "e").unwrap_err(),
            "HELPER failed: no such node\\n (ran T s)"
        );
        assert_eq!(
            bench.ask_of(&pool, "u").unwrap_err(),
            "cannot decode output from HELPER: defer: invalid type: integer, expected a boolean at line 1 column 10 (ran T s)"
        );
        assert_eq!(bench.ask_of(&pool, "n1").unwrap(), "n1");
        assert_eq!(bench.counts(), (1, 0));
    }

    #[test]
    fn a_helper_written_for_the_other_mode_is_told_so() {
        // It waits for the end of its input.
        let bench = Bench { timeout: SHORT, ..Bench::of("cat >/dev/null; echo '{}'") };
        let error = bench.ask_of(&bench.pool(), "n1").unwrap_err();
        assert!(
            error.contains("it must answer each line of its input, not the end of it"),
            "{error}"
        );
        // It doesn't.
        let bench = Bench::of("echo '{\"configuration\":{\"a\":\"b\"}}'");
        let error = bench.ask_of(&bench.pool(), "n1").unwrap_err();
        assert!(error.starts_with(EXEC_STYLE), "{error}");
    }

    #[test]
    fn what_it_writes_to_stderr_belongs_to_the_node_it_is_asked_about() {
        let script = format!("echo about $identity >&2; {ANSWER}; echo after >&2");
        let bench = Bench::new(1, "", &script);
        let pool = bench.pool();
        for node in ["n1", "n2", "n3"] {
            let identity = Identity::parse(node).unwrap();
            let asked = bench.put(&pool, &input(&identity, ""));
            assert!(asked.result.is_ok());
            let lines = asked.stderr.lines();
            assert!(lines.iter().any(|line| *line == format!("about {node}")), "{lines:?}");
            // What came between two questions may be seen with the next, but no node hears of another.
            assert!(lines.iter().all(|line| line.ends_with(node) || line == "after"), "{lines:?}");
        }
    }

    #[test]
    fn a_large_question_and_much_to_say_on_stderr_block_nobody() {
        let script = format!(
            "head -c 1000000 /dev/zero | tr '\\0' x >&2; {ANSWER}; head -c 1000000 /dev/zero >&2"
        );
        let bench = Bench::new(1, "", &script);
        let pool = bench.pool();
        let inventory = "x".repeat(300_000);
        for node in ["n1", "n2"] {
            let identity = Identity::parse(node).unwrap();
            let asked = bench.put(&pool, &input(&identity, &inventory));
            assert_eq!(
                asked.result.map(|answer| answer.msg).map_err(|(failure, _)| failure).unwrap(),
                node
            );
        }
    }

    #[test]
    fn it_finds_out_from_its_environment_that_it_stays() {
        let bench = Bench::new(1, "", &ANSWER.replace("$identity", "$CHORIA_PROVISIONER_HELPER"));
        assert_eq!(bench.ask_of(&bench.pool(), "n1").unwrap(), "persistent/1");
    }

    #[test]
    fn an_abort_ends_the_wait_for_an_answer_and_the_process() {
        let watch = Watch::new();
        let directory = Directory::new();
        let began = directory.fifo("began");
        let script = format!("exec 9>{}; echo began >{began}; sleep 1000", watch.fifo());
        let (sender, abort) = crossbeam_channel::bounded(0);
        let bench = Bench { abort, ..Bench::new(1, "", &script) };
        std::thread::scope(|scope| {
            let asking = scope.spawn(|| bench.ask_of(&bench.pool(), "n1"));
            assert_eq!(std::fs::read_to_string(began).unwrap(), "began\n");
            drop(sender);
            let error = asking.join().unwrap().unwrap_err();
            assert!(
                error.starts_with("HELPER was killed because the provisioner stops"),
                "{error}"
            );
        });
        watch.all_ended();
    }

    #[test]
    fn an_abort_ends_the_wait_for_a_process() {
        let (sender, abort) = crossbeam_channel::bounded(0);
        let bench = Bench { abort, ..Bench::new(1, "", ANSWER) };
        let pool = bench.pool();
        let held = pool.take(Instant::now() + LONG, &bench.abort).ok().unwrap();
        drop(sender);
        let error = bench.ask_of(&pool, "n1").unwrap_err();
        assert_eq!(error, "HELPER was killed because the provisioner stops");
        pool.give_back(held.0);
    }

    #[test]
    fn whoever_finds_all_processes_busy_for_too_long_is_told_so() {
        let bench = Bench { timeout: SHORT, ..Bench::new(1, "", ANSWER) };
        let pool = bench.pool();
        let held = pool.take(Instant::now() + LONG, &bench.abort).ok().unwrap();
        assert_eq!(bench.ask_of(&pool, "n1").unwrap_err(), "all processes of HELPER were busy");
        pool.give_back(held.0);
    }

    #[test]
    fn a_helper_that_does_not_start_is_left_alone_for_longer_and_longer() {
        let directory = Directory::new();
        let bench = Bench::of(&format!("echo x >>{}; exit 1", directory.path("starts")));
        let pool = bench.pool();
        let ended = "HELPER ended without an answer (exit status 1, ran T s)";
        // 0.1, 0.2, 0.4 and 0.8 s are waited for, 1.6 s is not.
        for _ in 0..5 {
            assert_eq!(bench.ask_of(&pool, "n1").unwrap_err(), ended);
        }
        let error = bench.ask_of(&pool, "n1").unwrap_err();
        assert!(
            error.starts_with("no process of HELPER runs, and none is started for another 1."),
            "{error}"
        );
        let starts = std::fs::read_to_string(directory.path("starts")).unwrap();
        assert_eq!(starts, "x\n".repeat(5));
        assert_eq!(bench.counts(), (0, 4));
    }

    #[test]
    fn stopping_lets_processes_end_by_themselves() {
        let directory = Directory::new();
        let (watch, last) = (Watch::new(), directory.path("last"));
        let script = format!(
            "exec 9>{}; head -c 1000000 /dev/zero >&2; while read -r line; do {PARSE}; {ANSWER}; done; \
             head -c 1000000 /dev/zero; echo bye >{last}",
            watch.fifo()
        );
        let bench = Bench::of(&script);
        let pool = bench.pool();
        assert_eq!(bench.ask_of(&pool, "n1").unwrap(), "n1");
        pool.stop(LONG, &bench.abort);
        assert_eq!(std::fs::read_to_string(last).unwrap(), "bye\n");
        watch.all_ended();
        assert_eq!(bench.metrics.helper_processes.get(), 0);
        assert_eq!(
            bench.ask_of(&pool, "n1").unwrap_err(),
            "HELPER was killed because the provisioner stops"
        );
    }

    #[test]
    fn stopping_kills_those_that_do_not_end_with_all_they_started() {
        for (wait, aborted) in [(SHORT, false), (LONG, true)] {
            let watch = Watch::new();
            let after = "trap '' TERM HUP; sleep 1000 & wait; wait";
            let script = format!(
                "exec 9>{}; while read -r line; do {PARSE}; {ANSWER}; done; {after}",
                watch.fifo()
            );
            let bench = Bench::of(&script);
            let pool = bench.pool();
            assert_eq!(bench.ask_of(&pool, "n1").unwrap(), "n1");
            let (sender, abort) = crossbeam_channel::bounded(0);
            let sender = Some(sender).filter(|_| !aborted);
            pool.stop(wait, &abort);
            drop(sender);
            watch.all_ended();
            assert_eq!(bench.metrics.helper_processes.get(), 0);
        }
    }

    #[test]
    fn dropping_a_pool_leaves_no_process() {
        let watch = Watch::new();
        let bench = Bench::new(1, &format!("exec 9>{}", watch.fifo()), ANSWER);
        let pool = bench.pool();
        assert_eq!(bench.ask_of(&pool, "n1").unwrap(), "n1");
        drop(pool);
        watch.all_ended();
    }

    #[test]
    fn a_replaced_pool_answers_those_who_began_with_it_and_keeps_no_process() {
        let (watch, directory) = (Watch::new(), Directory::new());
        let held = directory.path("held");
        let first = format!("[ -e {held} ] || {{ touch {held}; exec 9>{}; }}", watch.fifo());
        let old = Bench::new(1, &first, &ANSWER.replace("$identity", "old"));
        let new = Bench::new(1, "", &ANSWER.replace("$identity", "new"));
        let old_pool = old.pool();
        assert_eq!(old.ask_of(&old_pool, "n1").unwrap(), "old");
        let new_pool = old_pool.replaced(new.command(), 1);
        // The one that was asked nothing.
        watch.all_ended();
        assert_eq!(new.ask_of(&new_pool, "n2").unwrap(), "new");
        // Whoever began before goes on so.
        assert_eq!(old.ask_of(&old_pool, "n3").unwrap(), "old");
        assert_eq!(new.ask_of(&new_pool, "n4").unwrap(), "new");
        // Waits for those of the old one as well.
        new_pool.stop(LONG, &new.abort);
        assert_eq!(old.counts(), (0, 0));
    }

    #[test]
    fn a_request_that_runs_when_its_pool_is_replaced_is_answered() {
        let directory = Directory::new();
        let (began, go) = (directory.fifo("began"), directory.fifo("go"));
        let watch = Watch::new();
        let bench = Bench::new(
            1,
            &format!("exec 9>{}", watch.fifo()),
            &format!("echo x >{began}; read x <{go}; {ANSWER}"),
        );
        let pool = bench.pool();
        std::thread::scope(|scope| {
            let asking = scope.spawn(|| bench.ask_of(&pool, "n1"));
            assert_eq!(std::fs::read_to_string(began).unwrap(), "x\n");
            let replaced = pool.replaced(bench.command(), 1);
            std::fs::write(go, "y\n").unwrap();
            assert_eq!(asking.join().unwrap().unwrap(), "n1");
            // Waits for it, though it belongs to the other.
            replaced.stop(LONG, &bench.abort);
        });
        assert_eq!(bench.metrics.helper_processes.get(), 0);
        watch.all_ended();
    }

    #[test]
    fn a_place_rests_longer_each_time_until_a_process_has_answered() {
        let mut now = Instant::now();
        let mut places = Places::<u32>::new(1);
        let mut rests = Vec::new();
        let Next::Take(Claim::Vacant { rest, again: false }) = places.next(now) else {
            panic!("{places:?}")
        };
        places.lose(now, rest);
        for _ in 0..10 {
            let until = places.resting[0].until;
            rests.push((until - now).as_millis());
            assert!(!matches!(places.next(until - Duration::from_millis(1)), Next::Take(_)));
            now = until;
            let Next::Take(Claim::Vacant { rest, again: true }) = places.next(now) else {
                panic!("{places:?}")
            };
            places.lose(now, rest);
        }
        assert_eq!(rests, [100, 200, 400, 800, 1600, 3200, 6400, 12_800, 25_600, 30_000]);
        // One that has answered is as good as new.
        now = places.resting[0].until;
        assert!(matches!(places.next(now), Next::Take(Claim::Vacant { .. })));
        assert_eq!(places.give_back(7), None);
        assert!(matches!(places.next(now), Next::Take(Claim::Idle(7))));
        places.lose(now, REST_MIN);
        assert_eq!(places.resting[0].until - now, REST_MIN);
    }

    #[test]
    fn a_request_waits_for_what_may_come_soon_and_gives_up_otherwise() {
        let now = Instant::now();
        let mut places = Places::<u32>::new(2);
        let take = |places: &mut Places<u32>| {
            assert!(matches!(places.next(now), Next::Take(_)), "{places:?}");
        };
        take(&mut places);
        take(&mut places);
        // Both are busy.
        assert!(matches!(places.next(now), Next::Wait(None)));
        places.lose(now, REST_WAIT * 2);
        // The other one may be given back at any time.
        assert!(
            matches!(places.next(now), Next::Wait(Some(until)) if until == now + REST_WAIT * 2)
        );
        places.lose(now, REST_WAIT * 3);
        assert!(matches!(places.next(now), Next::Resting(time) if time == REST_WAIT * 2));
        assert!(matches!(places.next(now + REST_WAIT), Next::Wait(Some(_))));
        places.close();
        assert!(matches!(places.next(now), Next::Closed));
    }

    #[test]
    fn the_process_that_has_waited_longest_is_next() {
        let now = Instant::now();
        let mut places = Places::<u32>::new(3);
        for _ in 1..=3 {
            assert!(matches!(places.next(now), Next::Take(Claim::Vacant { .. })));
        }
        for process in 1..=3 {
            assert_eq!(places.give_back(process), None);
        }
        for expected in [1, 2, 3, 1, 2] {
            match places.next(now) {
                Next::Take(Claim::Idle(process)) => {
                    assert_eq!(process, expected);
                    places.give_back(process);
                }
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(places.close(), [3, 1, 2]);
        assert_eq!(places.busy, 0);
    }

    /// Sets `id` and `identity` from `line`.
    const PARSE: &str = r#"id=${line#*'"id":"'}; id=${id%%\"*}; identity=${line#*'"identity":"'}; identity=${identity%%\"*}"#;

    /// Answers with the node's name.
    const ANSWER: &str = r#"printf '{"id":"%s","reply":{"msg":"%s"}}\n' "$id" "$identity""#;

    const EXEC_STYLE: &str = "HELPER wrote an answer in the style of helper_mode exec: with persistent it must be \
        {\"id\":\"...\",\"reply\":{...}}, with the id of the request";

    /// Everything a pool needs.
    struct Bench {
        script: String,
        processes_max: usize,
        timeout: Duration,
        output_max: usize,
        abort: Receiver<Never>,
        metrics: Arc<Metrics>,
        kept: Mutex<Option<Arc<Pool>>>,
    }

    impl Bench {
        /// A helper that runs `start` once, and `answer` for each line with `id` and `identity` set.
        fn new(processes_max: usize, start: &str, answer: &str) -> Bench {
            let start = if start.is_empty() { ":" } else { start };
            let script = format!("{start}; while IFS= read -r line; do {PARSE}; {answer}; done");
            Bench { processes_max, ..Bench::of(&script) }
        }

        fn of(script: &str) -> Bench {
            Bench {
                script: script.to_owned(),
                processes_max: 1,
                timeout: LONG,
                output_max: 4 << 20,
                abort: crossbeam_channel::never(),
                metrics: Metrics::new(""),
                kept: Mutex::new(None),
            }
        }

        fn command(&self) -> HelperCommand {
            HelperCommand::parse(&shell_words::join(["sh", "-c", &self.script])).unwrap()
        }

        fn pool(&self) -> Pool {
            Pool::new(self.command(), self.processes_max, Vec::new(), self.metrics.clone())
        }

        fn put(&self, pool: &Pool, input: &Input<'_>) -> Asked {
            let limits = Limits { timeout: self.timeout, output_max: self.output_max };
            pool.ask(input, limits, Instant::now() + LONG, &self.abort)
        }

        /// The `msg` of the answer, or the error's text with placeholders for what differs between runs.
        fn ask_of(&self, pool: &Pool, node: &str) -> Result<String, String> {
            let identity = Identity::parse(node).unwrap();
            let asked = self.put(pool, &input(&identity, ""));
            asked.result.map(|answer| answer.msg).map_err(|(failure, run)| {
                let error = super::super::Error { helper: "HELPER".to_owned(), failure, run };
                let took = regex::Regex::new(r"ran \d+\.\d{3} s").unwrap();
                took.replace(&error.to_string(), "ran T s").into_owned()
            })
        }

        /// Asks a pool that lasts as long as the bench.
        #[track_caller]
        fn says(&self, node: &str) {
            let pool = self.kept.lock().get_or_insert_with(|| Arc::new(self.pool())).clone();
            assert_eq!(self.ask_of(&pool, node).as_deref(), Ok(node));
        }

        /// Processes that run, and how many were started again.
        fn counts(&self) -> (i64, u64) {
            (self.metrics.helper_processes.get(), self.metrics.helper_restarts.get())
        }
    }
}
