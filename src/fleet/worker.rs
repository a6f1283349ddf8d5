//! Takes a node off the prober's hands and provisions it; permits, seats and their threads.
//!
//! `workers` is the number of nodes worked on at once, as permits. A node that takes its time gives its permit back until it
//! answers, so there may be many more nodes in hand ([`SEATS_PER_PERMIT`], [`SEATS_MIN`]), each on a thread of its own; threads are
//! started as they are needed and then kept. The decisions are in [`permits`], this file waits and wakes.
//!
//! A permit belongs to a node, not to a thread: the prober takes it before it lets a node go, so no node in hand waits
//! for one and no idle thread holds one back from a node that has answered.

pub mod desks;
pub mod permits;
pub mod rate;

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, bounded, select_biased};
use parking_lot::Mutex;

use crate::fleet::finisher::Done;
use crate::fleet::registry::Key;
use crate::fleet::roster::gauge;
use crate::fleet::worker::desks::{Desk, Desks};
use crate::fleet::worker::permits::{Answered, Permits, Seat, Verdict};
use crate::metrics::Metrics;
use crate::node::{self, Outcome, Probed, Report};
use crate::protocol::Identity;
use crate::rpc::Patience;
use crate::seldom::Seldom;
use crate::shutdown::Never;

/// Nodes in hand for each permit: with all but one of them silent, the fleet still goes on at full speed.
pub const SEATS_PER_PERMIT: usize = 8;
/// Nodes in hand at least: of a thousand good nodes a second five in a hundred may fall silent, and none is given up before
/// it has been silent for three seconds.
pub const SEATS_MIN: usize = 256;
/// Nodes on their way to a thread. There is one for each of them, so whoever hands out more waits for a thread to wake up and
/// for nothing else; boxed, since memory is taken for all of them.
const JOBS_MAX: usize = 256;
/// JSON nested as deep as the parser allows must fit, also without optimisation; untouched pages cost nothing.
const STACK_BYTES: usize = 1 << 20;
/// How long the system is not asked for another thread after it had none.
const NO_THREAD_WAIT: Duration = Duration::from_secs(1);
/// A fault of ours that stops every node must be seen by an operator, but not once a node.
const OUR_FAULT_LOG: Duration = Duration::from_secs(60);

/// One node to provision.
pub struct Job {
    /// The queue entry it came from.
    pub key: Key,
    /// The attempt's number, from 1.
    pub attempt: u32,
    /// The node and its answer to the probe.
    pub probed: Probed,
    /// The right to work on it.
    pub permit: Permit,
    /// What it is provisioned with, to the end.
    pub context: Arc<node::Context>,
}

/// All workers: their seats, their threads and the way to them. Owned by whoever hands out the nodes.
pub struct Workers {
    seats: Arc<Seats>,
    jobs: Sender<Box<Job>>,
    crew: Crew,
}

impl Workers {
    /// Starts the first thread. `freed` gets a message when a permit may be free, `desks` shows who is at what.
    ///
    /// # Errors
    ///
    /// The system's error if it gives us no thread.
    pub fn start(
        active_max: usize,
        abort: Receiver<Never>,
        done: Sender<Done>,
        freed: Sender<()>,
        metrics: Arc<Metrics>,
        desks: Arc<Desks>,
    ) -> io::Result<Workers> {
        let seats_max = seats_for(active_max);
        let (jobs, waiting) = bounded(JOBS_MAX);
        let seats = Arc::new(Seats::new(active_max, seats_max, freed, abort, metrics.clone()));
        let our_faults = Arc::new(OurFaults::new());
        let worker = Worker { jobs: waiting, done, metrics, our_faults, desks };
        let start = Box::new(move |name| {
            let worker = worker.clone();
            let builder = thread::Builder::new().name(name).stack_size(STACK_BYTES);
            builder.spawn(move || worker.run())
        });
        let mut crew = Crew { threads: Vec::new(), start, seats_max, not_before: None };
        crew.grow()?;
        Ok(Workers { seats, jobs, crew })
    }

    /// A permit and a seat for one more node, if there are any, and a thread for it. When all seats are used up, the
    /// longest silent node is given up for it.
    pub fn permit(&mut self, deadline: Instant) -> Option<Permit> {
        self.crew.meet(&self.seats, Instant::now());
        self.seats.permit(deadline)
    }

    /// Changes how many nodes may be worked on at once. Those in hand beyond that are finished.
    pub fn resize(&mut self, active_max: usize) {
        self.crew.seats_max = seats_for(active_max);
        let mut nodes_max = self.crew.seats_max;
        if self.crew.not_before.is_some() {
            // There is no thread for more.
            nodes_max = nodes_max.min(self.crew.threads.len());
        }
        self.seats.resize(active_max, nodes_max);
    }

    /// Hands a node to the thread that its permit came with.
    pub fn hand(&self, job: Job) {
        // Threads receive for as long as there is a sender.
        drop(self.jobs.send(Box::new(job)));
    }

    /// Waits until all nodes in hand have ended.
    pub fn join(self) {
        drop(self.jobs);
        for thread in self.crew.threads {
            // A panic there has ended the process already.
            drop(thread.join());
        }
    }
}

/// How many nodes may be in hand for so many permits.
fn seats_for(active_max: usize) -> usize {
    active_max.saturating_mul(SEATS_PER_PERMIT).max(SEATS_MIN)
}

/// The threads. There is one for each node in hand, since a node that waited for one would keep its permit from nodes
/// that have a thread and wait for a permit.
struct Crew {
    threads: Vec<JoinHandle<()>>,
    /// Starts one with this name.
    start: Box<dyn FnMut(String) -> io::Result<JoinHandle<()>> + Send>,
    /// Seats when there are threads for all of them.
    seats_max: usize,
    /// The system had no thread for us.
    not_before: Option<Instant>,
}

impl Crew {
    /// Sees to it that there is a thread for the next node. Without one there are no more seats than threads, for a while.
    fn meet(&mut self, seats: &Seats, now: Instant) {
        let (nodes, is_wanted) = {
            let permits = seats.permits.lock();
            (permits.nodes_len(), permits.could_take(self.seats_max))
        };
        if !is_wanted || self.threads.len() > nodes || self.not_before.is_some_and(|at| now < at) {
            return;
        }
        self.not_before = None;
        let limit = match self.grow() {
            Ok(()) => self.seats_max,
            Err(error) => {
                self.not_before = Some(now + NO_THREAD_WAIT);
                let len = self.threads.len();
                log::warn!(component = "workers", threads = len; "Could not start another worker: {error}");
                len
            }
        };
        seats.permits.lock().limit(limit);
    }

    fn grow(&mut self) -> io::Result<()> {
        let name = format!("worker-{}", self.threads.len() + 1);
        self.threads.push((self.start)(name)?);
        Ok(())
    }
}

/// One thread: provisions one node at a time until nobody can hand it another.
#[derive(Clone)]
struct Worker {
    jobs: Receiver<Box<Job>>,
    done: Sender<Done>,
    metrics: Arc<Metrics>,
    our_faults: Arc<OurFaults>,
    desks: Arc<Desks>,
}

impl Worker {
    fn run(self) {
        for job in &self.jobs {
            let Job { key, attempt, probed, mut permit, context } = *job;
            let node = key.identity.as_str();
            log::info!(component = node, node, attempt; "Provisioning {node}");
            let since = Instant::now();
            let (identity, deadline) = (key.identity.clone(), probed.deadline);
            let thread = thread::current().name().unwrap_or_default().to_owned();
            let progress = probed.progress.clone();
            let desk = Desk { identity, attempt, since, deadline, thread, progress };
            let shown = self.desks.show(&key, desk);
            let report = Box::new(node::provision(&context, probed, &mut permit));
            drop(shown);
            drop(permit);
            let took = since.elapsed();
            self.metrics.node_duration_seconds.observe(took.as_secs_f64());
            log_report(&key.identity, attempt, &report, took, &self.our_faults);
            // The finisher outlives all workers; without it nobody needs to know.
            drop(self.done.send(Done { key, attempt, took, report }));
        }
    }
}

/// Says what became of a node, once.
fn log_report(
    identity: &Identity,
    attempt: u32,
    report: &Report,
    took: Duration,
    our_faults: &OurFaults,
) {
    let (node, reason) = (identity.as_str(), report.reason.as_str());
    let ms = u64::try_from(took.as_millis()).unwrap_or(u64::MAX);
    our_faults.log(node, report, Instant::now());
    match &report.outcome {
        Outcome::Provisioned { .. } => {
            log::info!(component = node, node, attempt, ms; "Provisioned {node}");
        }
        Outcome::UpgradeSent { version, .. } => {
            log::info!(component = node, node, attempt, ms; "Provisioned {node}: it updates itself to {version}");
        }
        Outcome::ShutDown => {
            log::info!(component = node, node, attempt, ms; "Provisioned {node}: shut down on the helper's wish");
        }
        Outcome::Deferred => {
            log::info!(component = node, node, attempt, ms; "Deferred {node}: {reason}");
        }
        // No fault of ours or theirs.
        Outcome::Busy | Outcome::NotProvisioning | Outcome::Stopped(_) => {
            log::info!(component = node, node, attempt, ms; "Could not provision {node}: {reason}");
        }
        Outcome::UpgradeStuck { .. }
        | Outcome::WrongToken
        | Outcome::Misconfigured
        | Outcome::HelperFailed
        | Outcome::Unreachable
        | Outcome::Refused
        | Outcome::Failed => {
            log::warn!(component = node, node, attempt, ms; "Could not provision {node}: {reason}");
        }
    }
}

/// What to do when nodes don't know our provisioning token.
pub const TOKEN_REMEDY: &str = "`token` must equal the claim `cht` of their provisioning JWT";

/// Faults of ours that stop every node, not one; each is said once in a while.
struct OurFaults {
    wrong_token: Mutex<Seldom>,
    misconfigured: Mutex<Seldom>,
}

impl OurFaults {
    fn new() -> OurFaults {
        let seldom = || Mutex::new(Seldom::every(OUR_FAULT_LOG));
        OurFaults { wrong_token: seldom(), misconfigured: seldom() }
    }

    fn log(&self, node: &str, report: &Report, now: Instant) {
        match report.outcome {
            Outcome::WrongToken => {
                if let Some(suppressed) = self.wrong_token.lock().now(now) {
                    log::error!(
                        component = "hosts", node, suppressed;
                        "Nodes do not know our provisioning token: {TOKEN_REMEDY}"
                    );
                }
            }
            Outcome::Misconfigured => {
                if let Some(suppressed) = self.misconfigured.lock().now(now) {
                    log::error!(
                        component = "hosts", node, suppressed;
                        "No node can be provisioned: {}", report.reason
                    );
                }
            }
            _ => {}
        }
    }
}

/// What permits and workers share.
struct Seats {
    permits: Mutex<Permits>,
    /// Locked after `permits` only.
    wakers: Mutex<HashMap<Seat, Waker>>,
    freed: Sender<()>,
    abort: Receiver<Never>,
    metrics: Arc<Metrics>,
}

/// How the thread with this seat is reached.
struct Waker {
    go_on: Sender<()>,
    /// Dropped when the node is given up.
    keep: Option<Sender<Never>>,
}

impl Seats {
    fn new(
        active_max: usize,
        nodes_max: usize,
        freed: Sender<()>,
        abort: Receiver<Never>,
        metrics: Arc<Metrics>,
    ) -> Seats {
        let permits = Mutex::new(Permits::new(active_max, nodes_max));
        let wakers = Mutex::new(HashMap::new());
        Seats { permits, wakers, freed, abort, metrics }
    }

    fn permit(self: &Arc<Seats>, deadline: Instant) -> Option<Permit> {
        let (go_on, woken) = bounded(1);
        let (keep, given_up) = bounded(0);
        let mut permits = self.permits.lock();
        let mut wakers = self.wakers.lock();
        match permits.take() {
            Verdict::Taken(seat) => {
                self.measure(&permits);
                wakers.insert(seat, Waker { go_on, keep: Some(keep) });
                Some(Permit { seat, seats: self.clone(), woken, given_up, deadline })
            }
            Verdict::Full => None,
            Verdict::GiveUp(silent) => {
                if let Some(waker) = wakers.get_mut(&silent) {
                    waker.keep = None;
                }
                None
            }
        }
    }

    /// A permit was given back: it goes to a node that waits for one, or the prober hears that there is one.
    fn give_back(&self, change: impl FnOnce(&mut Permits) -> Option<Seat>) {
        let mut permits = self.permits.lock();
        let granted = change(&mut permits);
        self.measure(&permits);
        match granted {
            Some(seat) => self.wake(seat),
            // A full channel holds the news already.
            None => drop(self.freed.try_send(())),
        }
    }

    /// There are more permits, or fewer: nodes that wait for one go on, as far as there are any.
    fn resize(&self, active_max: usize, nodes_max: usize) {
        let mut permits = self.permits.lock();
        permits.limit(nodes_max);
        let granted = permits.resize(active_max);
        self.measure(&permits);
        granted.into_iter().for_each(|seat| self.wake(seat));
    }

    /// Tells the thread with this seat that it has a permit.
    fn wake(&self, seat: Seat) {
        if let Some(waker) = self.wakers.lock().get(&seat) {
            // One message a wait, so there is room.
            let _ = waker.go_on.try_send(());
        }
    }

    fn measure(&self, permits: &Permits) {
        self.metrics.busy_workers.set(gauge(permits.active_len()));
    }
}

/// The right to work on one node; given back when dropped.
pub struct Permit {
    seat: Seat,
    seats: Arc<Seats>,
    woken: Receiver<()>,
    given_up: Receiver<Never>,
    deadline: Instant,
}

impl Patience for Permit {
    fn resting(&mut self) {
        self.seats.give_back(|permits| permits.rest(self.seat));
    }

    fn silent(&mut self) {
        let now = Instant::now();
        self.seats.give_back(|permits| permits.silent(self.seat, now));
    }

    fn answered(&mut self) -> bool {
        let answered = {
            let mut permits = self.seats.permits.lock();
            let answered = permits.answered(self.seat);
            self.seats.measure(&permits);
            answered
        };
        match answered {
            Answered::GoOn => true,
            Answered::GivenUp => false,
            Answered::Wait => select_biased! {
                recv(self.seats.abort) -> _ => false,
                recv(self.woken) -> woken => woken.is_ok(),
                recv(crossbeam_channel::at(self.deadline)) -> _ => false,
            },
        }
    }

    fn given_up(&self) -> &Receiver<Never> {
        &self.given_up
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.seats.give_back(|permits| permits.end(self.seat));
        self.seats.wakers.lock().remove(&self.seat);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shutdown::is_over;

    const SOON: Duration = Duration::from_secs(10);

    struct Bench {
        seats: Arc<Seats>,
        freed: Receiver<()>,
        abort: Option<Sender<Never>>,
    }

    fn bench(active_max: usize, seats_max: usize) -> Bench {
        let (freed_tx, freed) = bounded(1);
        let (abort, aborted) = bounded(0);
        let metrics = Metrics::new("test");
        let seats = Arc::new(Seats::new(active_max, seats_max, freed_tx, aborted, metrics));
        Bench { seats, freed, abort: Some(abort) }
    }

    impl Bench {
        fn permit(&self) -> Option<Permit> {
            self.seats.permit(Instant::now() + 10 * SOON)
        }
    }

    #[test]
    fn a_permit_that_is_dropped_or_silent_can_be_taken_again() {
        let bench = bench(1, 8);
        let mut first = bench.permit().unwrap();
        assert!(bench.permit().is_none());
        assert!(bench.freed.is_empty());
        first.silent();
        bench.freed.recv_timeout(SOON).unwrap();
        let second = bench.permit().unwrap();
        assert!(bench.permit().is_none());
        drop(second);
        bench.freed.recv_timeout(SOON).unwrap();
        assert!(first.answered());
        assert!(bench.permit().is_none());
        assert_eq!(bench.seats.metrics.busy_workers.get(), 1);
        drop(first);
        assert_eq!(bench.seats.metrics.busy_workers.get(), 0);
        assert!(bench.seats.wakers.lock().is_empty());
    }

    /// A node that answers again on a thread that has begun; whether it goes on.
    fn answers(mut permit: Permit) -> JoinHandle<(bool, Permit)> {
        let (begins, begun) = bounded(1);
        let thread = thread::spawn(move || {
            begins.send(()).unwrap();
            let goes_on = permit.answered();
            (goes_on, permit)
        });
        begun.recv_timeout(SOON).unwrap();
        thread
    }

    #[test]
    fn a_node_that_answered_waits_for_the_next_permit_and_goes_before_new_ones() {
        let bench = bench(1, 8);
        let mut slow = bench.permit().unwrap();
        slow.silent();
        let quick = bench.permit().unwrap();
        let thread = answers(slow);
        drop(quick);
        let (goes_on, slow) = thread.join().unwrap();
        assert!(goes_on);
        assert!(bench.permit().is_none());
        drop(slow);
    }

    #[test]
    fn a_node_that_waits_for_a_permit_goes_on_when_there_are_more() {
        let bench = bench(1, 8);
        let mut slow = bench.permit().unwrap();
        slow.silent();
        let quick = bench.permit().unwrap();
        let thread = answers(slow);
        bench.seats.resize(2, 8);
        let (goes_on, _slow) = thread.join().unwrap();
        assert!(goes_on);
        drop(quick);
    }

    #[test]
    fn the_longest_silent_node_hears_that_it_is_given_up() {
        let bench = bench(1, 2);
        let mut first = bench.permit().unwrap();
        first.silent();
        let mut second = bench.permit().unwrap();
        second.silent();
        assert!(!is_over(first.given_up()));
        assert!(bench.permit().is_none());
        assert!(is_over(first.given_up()) && !is_over(second.given_up()));
        assert!(!first.answered());
        drop(first);
        assert!(bench.permit().is_some());
    }

    #[test]
    fn an_abort_and_the_deadline_end_the_wait_for_a_permit() {
        let mut bench = bench(1, 8);
        let mut hasty = bench.seats.permit(Instant::now()).unwrap();
        hasty.silent();
        let mut patient = bench.permit().unwrap();
        patient.silent();
        let holder = bench.permit().unwrap();
        assert!(!hasty.answered());
        bench.abort = None;
        assert!(!patient.answered());
        drop(holder);
    }

    #[test]
    fn no_node_is_taken_without_a_thread_so_that_none_keeps_its_permit_from_another() {
        let bench = bench(4, 32);
        let mut left = 2;
        let start = Box::new(move |_| {
            if left == 0 {
                return Err(io::ErrorKind::WouldBlock.into());
            }
            left -= 1;
            Ok(thread::spawn(|| {}))
        });
        let mut crew = Crew { threads: Vec::new(), start, seats_max: 32, not_before: None };
        let now = Instant::now();
        let permit = |crew: &mut Crew, now| {
            crew.meet(&bench.seats, now);
            bench.permit()
        };
        let mut first = permit(&mut crew, now).unwrap();
        first.resting();
        let mut second = permit(&mut crew, now).unwrap();
        assert!(permit(&mut crew, now).is_none(), "two permits are free, and no thread is");
        assert!(first.answered(), "nobody without a thread holds a permit");
        // A silent node makes room, as when all seats are used.
        second.silent();
        assert!(permit(&mut crew, now).is_none());
        assert!(is_over(second.given_up()));
        drop(second);
        let third = permit(&mut crew, now).unwrap();
        assert_eq!(crew.threads.len(), 2);
        // The system has threads again.
        crew.start = Box::new(|_| Ok(thread::spawn(|| {})));
        assert!(permit(&mut crew, now).is_none(), "it is not asked all the time");
        let later = now + NO_THREAD_WAIT;
        let fourth = permit(&mut crew, later).unwrap();
        let fifth = permit(&mut crew, later).unwrap();
        assert!(permit(&mut crew, later).is_none(), "all permits are in use");
        assert_eq!(crew.threads.len(), 4, "so no thread is started");
        drop((first, third, fourth, fifth));
        drop(permit(&mut crew, later).unwrap());
        assert_eq!(crew.threads.len(), 4, "an idle one is there");
    }

    #[test]
    fn more_permits_are_no_more_seats_while_the_system_has_no_thread() {
        let bench = bench(1, 32);
        let start = Box::new(|_| Err(io::ErrorKind::WouldBlock.into()));
        let crew = Crew { threads: Vec::new(), start, seats_max: 32, not_before: None };
        let mut workers = Workers { seats: bench.seats.clone(), jobs: bounded(1).0, crew };
        let deadline = Instant::now() + SOON;
        assert!(workers.permit(deadline).is_none());
        workers.resize(8);
        assert!(workers.permit(deadline).is_none(), "nobody could work on it");
        let thread = Box::new(|_| Ok(thread::spawn(|| {})));
        (workers.crew.start, workers.crew.not_before) = (thread, None);
        assert!(workers.permit(deadline).is_some());
    }
}
