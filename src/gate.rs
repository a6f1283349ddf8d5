//! Every reason not to act, asked before anything leaves the process.
//!
//! [`Core`] decides and reads no clock; [`Gate`] puts a lock around it and lets threads wait for a change.
//! Connection, election, operators and signals open and close it, each by its own [`Reason`]; nobody looks at
//! their state directly. A node that was begun is stopped by the end of its [`Term`] or by an abort only: an
//! operator's pause and draining let it finish, so that no node stays half configured.
//!
//! With an election, and beside others that share the nodes, there is a lease as well: it says until when we may act,
//! whatever this process hears or does not hear, and while it is over everything waits. [`Lease`] hands it to whoever sends,
//! since a process may be frozen between the question and the sending.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, bounded};
use parking_lot::{Condvar, Mutex};

use crate::clock::BootTime;
use crate::shutdown::Never;

/// After a reconnect, how long "no responders" says nothing about a node: the nodes are still coming back too.
pub const RECONNECT_GRACE: Duration = Duration::from_secs(30);

/// One reason not to act.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    /// An operator paused us.
    Operator,
    /// Another instance provisions.
    Standby,
    /// Others may be there that we have not heard yet, or that have not heard us.
    Listening,
    /// There is no connection to a broker.
    Disconnected,
    /// The process is ending.
    Draining,
}

impl Reason {
    /// All of them, in the order [`Gate::reasons`] lists them.
    pub const ALL: [Reason; 5] = [
        Reason::Operator,
        Reason::Standby,
        Reason::Listening,
        Reason::Disconnected,
        Reason::Draining,
    ];

    /// The value of the `reason` label of `gate_closed`.
    pub fn label(self) -> &'static str {
        match self {
            Reason::Operator => "operator",
            Reason::Standby => "standby",
            Reason::Listening => "listening",
            Reason::Disconnected => "disconnected",
            Reason::Draining => "draining",
        }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Reason::Operator => "paused by an operator",
            Reason::Standby => "standing by while another instance provisions",
            Reason::Listening => "listening for other instances before it acts",
            Reason::Disconnected => "not connected to a broker",
            Reason::Draining => "shutting down",
        })
    }
}

/// A time in which the nodes that we begin are ours; what was begun in one stops when it ends. Alone there is only one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Term(u64);

/// Why a running node must stop before its next step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Closed {
    /// The process is aborting.
    Aborted,
    /// Another has our nodes since the node was begun.
    TermEnded,
    /// The node's own time was up while the gate was closed.
    Deadline,
}

impl fmt::Display for Closed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Closed::Aborted => "the process is aborting",
            Closed::TermEnded => "another instance may have the node now",
            Closed::Deadline => {
                "the node's time was up while we were not connected, or not sure that it is ours"
            }
        })
    }
}

impl std::error::Error for Closed {}

/// The gate shared by all threads.
#[derive(Debug)]
pub struct Gate {
    core: Mutex<Core>,
    changed: Condvar,
    watchers: Mutex<Vec<Sender<()>>>,
    /// Of the connection that there is; locked after `core`.
    stay: Mutex<Option<Stay>>,
    /// For people; locked after `core`.
    since: Mutex<Since>,
    /// The core's, for those who must not wait for its lock.
    lease: Lease,
}

/// When the gate became what it is.
#[derive(Debug, Clone, Copy)]
struct Since {
    /// When each reason of [`Reason::ALL`] came, while it holds.
    reasons: [Option<Instant>; Reason::ALL.len()],
    /// When the last reason went, or we began.
    open: Instant,
}

impl Since {
    fn new(core: &Core, now: Instant) -> Since {
        Since {
            reasons: Reason::ALL.map(|reason| core.is_closed_by(reason).then_some(now)),
            open: now,
        }
    }

    fn note(&mut self, core: &Core, now: Instant) {
        let was_closed = self.reasons.iter().any(Option::is_some);
        for (since, reason) in self.reasons.iter_mut().zip(Reason::ALL) {
            *since = core.is_closed_by(reason).then(|| since.unwrap_or(now));
        }
        if was_closed && self.reasons.iter().all(Option::is_none) {
            self.open = now;
        }
    }
}

/// Until when what is sent may reach the wire, at any moment; all clones tell the same.
#[derive(Debug, Clone)]
pub struct Lease(Arc<AtomicU64>);

impl Lease {
    /// One without an end.
    pub fn endless() -> Lease {
        Lease(Arc::new(AtomicU64::new(u64::MAX)))
    }

    /// Its end; none if we are alone.
    pub fn until(&self) -> Option<BootTime> {
        match self.0.load(Ordering::Acquire) {
            u64::MAX => None,
            nanos => Some(BootTime::after_boot(Duration::from_nanos(nanos))),
        }
    }

    /// How much of it is left; nothing if we are alone.
    pub fn left(&self) -> Duration {
        self.until().map_or(Duration::ZERO, |until| until.since(BootTime::now()))
    }

    fn set(&self, until: Option<BootTime>) {
        let nanos = until.map(|until| until.since(BootTime::START).as_nanos());
        let nanos = nanos.map_or(u64::MAX, |nanos| u64::try_from(nanos).unwrap_or(u64::MAX));
        self.0.store(nanos, Ordering::Release);
    }
}

/// One connection from its beginning to its end; dropping it tells all who were given the receiver.
#[derive(Debug)]
struct Stay {
    _connected: Sender<Never>,
    lost: Receiver<Never>,
}

impl Gate {
    /// A gate that is closed because there is no connection yet.
    pub fn new() -> Gate {
        let core = Core::new();
        Gate {
            since: Mutex::new(Since::new(&core, Instant::now())),
            core: Mutex::new(core),
            changed: Condvar::new(),
            watchers: Mutex::new(Vec::new()),
            stay: Mutex::new(None),
            lease: Lease::endless(),
        }
    }

    /// From now on an election says when we lead: closed with [`Reason::Standby`] until then.
    pub fn stand_by(&self) {
        self.change(Core::stand_by);
    }

    /// From now on our peers say when we act: closed with [`Reason::Listening`] until then. What was begun waits.
    pub fn listen(&self) {
        self.change(Core::listen);
    }

    /// We lead, or have our share of the nodes, until `lease` unless there is another word before: opens.
    pub fn lead(&self, lease: BootTime) {
        self.change(|core| core.lead(lease));
    }

    /// We go on leading. Nobody is woken who was not waiting for it.
    pub fn renew(&self, lease: BootTime) {
        let mut core = self.core.lock();
        let was_over = core.is_lease_over(BootTime::now());
        core.renew(lease);
        self.lease.set(core.lease);
        drop(core);
        if was_over {
            self.tell();
        }
    }

    /// We don't lead for now: closes with [`Reason::Standby`], and what was begun waits.
    pub fn lapse(&self) {
        self.change(Core::lapse);
    }

    /// Whether nothing is to be kept for later: another has our nodes, or we drain.
    pub fn is_lost(&self) -> bool {
        self.core.lock().is_lost()
    }

    /// For whoever sends.
    pub fn lease(&self) -> Lease {
        self.lease.clone()
    }

    /// Adds a reason not to act.
    pub fn close(&self, reason: Reason) {
        self.change(|core| core.close(reason));
    }

    /// Takes a reason away. For [`Reason::Disconnected`] this is the moment of a connect or reconnect.
    pub fn open(&self, reason: Reason) {
        self.change(|core| core.open(reason, Instant::now()));
    }

    /// The reasons not to act, in the order of [`Reason::ALL`]; none while the gate is open.
    pub fn reasons(&self) -> Vec<Reason> {
        self.core.lock().reasons(BootTime::now()).collect()
    }

    /// The reasons not to act, each with the time since when it holds. A lease that is over has been for moments.
    pub fn closed_since(&self) -> Vec<(Reason, Instant)> {
        let core = self.core.lock();
        let (since, now) = (self.since.lock().reasons, Instant::now());
        let began = |reason| {
            let known = Reason::ALL.iter().zip(since).find(|(known, _)| **known == reason);
            known.and_then(|(_, at)| at).unwrap_or(now)
        };
        core.reasons(BootTime::now()).map(|reason| (reason, began(reason))).collect()
    }

    /// Since when there is no reason not to act; of use only while there is none.
    pub fn open_since(&self) -> Instant {
        self.since.lock().open
    }

    /// Asked before a discovery, a probe, and taking a node from a queue.
    ///
    /// # Errors
    ///
    /// All the reasons not to.
    pub fn begin(&self) -> Result<Term, Vec<Reason>> {
        let core = self.core.lock();
        let now = BootTime::now();
        core.begin(now).ok_or_else(|| core.reasons(now).collect())
    }

    /// Asked before each next step of a running node: each try of a request, and the helper. Waits out a lost connection
    /// and a lease that is over, at most until `deadline`; an open gate never looks at the deadline.
    ///
    /// # Errors
    ///
    /// [`Closed::TermEnded`], [`Closed::Aborted`] or [`Closed::Deadline`]; draining stops no running node.
    pub fn proceed(&self, term: Term, deadline: Instant) -> Result<(), Closed> {
        let mut core = self.core.lock();
        loop {
            match core.proceed(term, deadline, Instant::now(), BootTime::now()) {
                Step::Go => return Ok(()),
                Step::End(closed) => return Err(closed),
                Step::Wait => {
                    self.changed.wait_until(&mut core, deadline);
                }
            }
        }
    }

    /// Another has our nodes: ends the term for all that was begun in it, and closes with [`Reason::Standby`] in the
    /// same breath, so that nothing begins in the next term before it is won.
    pub fn end_term(&self) {
        self.change(Core::end_term);
    }

    /// Ends every wait, for good.
    pub fn abort(&self) {
        self.change(Core::abort);
    }

    /// When the connection last came back; the first connect is none.
    pub fn reconnected_at(&self) -> Option<Instant> {
        self.core.lock().reconnected_at
    }

    /// Whether `now` is within [`RECONNECT_GRACE`] of a reconnect; the first connect is none.
    pub fn just_reconnected(&self, now: Instant) -> bool {
        self.core.lock().just_reconnected(now)
    }

    /// Disconnects when the connection that there is now ends; without one it is disconnected already. What was asked
    /// before that end may never be answered: a broker that goes keeps nothing.
    pub fn lost(&self) -> Receiver<Never> {
        match &*self.stay.lock() {
            Some(stay) => stay.lost.clone(),
            None => bounded(0).1,
        }
    }

    /// A channel that holds a token after any change since the last was taken, for whoever waits for
    /// [`begin`](Gate::begin) to succeed.
    pub fn watch(&self) -> Receiver<()> {
        let (sender, receiver) = bounded(1);
        self.watchers.lock().push(sender);
        receiver
    }

    fn change(&self, change: impl FnOnce(&mut Core)) {
        {
            let mut core = self.core.lock();
            change(&mut core);
            self.since.lock().note(&core, Instant::now());
            self.lease.set(core.lease);
            let mut stay = self.stay.lock();
            if core.is_closed_by(Reason::Disconnected) {
                *stay = None;
            } else {
                stay.get_or_insert_with(Stay::new);
            }
        }
        self.tell();
    }

    /// Wakes all who wait for a change.
    fn tell(&self) {
        self.changed.notify_all();
        // A full channel holds the news already; a closed one has nobody left to tell.
        self.watchers.lock().retain(|watcher| {
            !matches!(watcher.try_send(()), Err(crossbeam_channel::TrySendError::Disconnected(())))
        });
    }
}

impl Stay {
    fn new() -> Stay {
        let (connected, lost) = bounded(0);
        Stay { _connected: connected, lost }
    }
}

impl Default for Gate {
    fn default() -> Gate {
        Gate::new()
    }
}

/// What the gate decides, without lock and clock.
#[derive(Debug, Clone)]
pub struct Core {
    closed: u8,
    term: Term,
    /// Whether it has begun and not ended; always if we are alone.
    has_term: bool,
    /// Until when we may act; none if we are alone.
    lease: Option<BootTime>,
    /// What a lease that is over means.
    unleased: Reason,
    aborted: bool,
    has_connected: bool,
    reconnected_at: Option<Instant>,
}

/// Whether a running node may take its next step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// Yes.
    Go,
    /// Not before a change, or the deadline.
    Wait,
    /// No: it stops here.
    End(Closed),
}

impl Core {
    /// Closed because there is no connection yet.
    pub fn new() -> Core {
        Core {
            closed: bit(Reason::Disconnected),
            term: Term(0),
            has_term: true,
            lease: None,
            unleased: Reason::Standby,
            aborted: false,
            has_connected: false,
            reconnected_at: None,
        }
    }

    /// Adds a reason not to act.
    pub fn close(&mut self, reason: Reason) {
        self.closed |= bit(reason);
    }

    /// Takes a reason away, at `now`. [`Reason::Draining`] stays for good.
    pub fn open(&mut self, reason: Reason, now: Instant) {
        if reason == Reason::Draining {
            return;
        }
        if reason == Reason::Disconnected && self.is_closed_by(reason) {
            if self.has_connected {
                self.reconnected_at = Some(now);
            }
            self.has_connected = true;
        }
        self.closed &= !bit(reason);
    }

    /// From now on an election says when we lead.
    pub fn stand_by(&mut self) {
        self.has_term = false;
        self.lapse();
    }

    /// From now on our peers say when we act. The term goes on.
    pub fn listen(&mut self) {
        self.closed = self.closed & !bit(Reason::Standby) | bit(Reason::Listening);
        self.lease = Some(BootTime::START);
        self.unleased = Reason::Listening;
    }

    /// We lead, or have our share, until `lease`.
    pub fn lead(&mut self, lease: BootTime) {
        self.has_term = true;
        self.closed &= !(bit(Reason::Standby) | bit(Reason::Listening));
        self.lease = Some(lease);
    }

    /// We go on leading, until `lease`.
    pub fn renew(&mut self, lease: BootTime) {
        self.lease = Some(lease);
    }

    /// We don't lead for now.
    pub fn lapse(&mut self) {
        self.closed = self.closed & !bit(Reason::Listening) | bit(Reason::Standby);
        self.lease = Some(BootTime::START);
    }

    /// Another has our nodes.
    pub fn end_term(&mut self) {
        self.term.0 += 1;
        self.stand_by();
    }

    /// Every wait ends, and nothing begins any more.
    pub fn abort(&mut self) {
        self.aborted = true;
        self.close(Reason::Draining);
    }

    /// The reasons not to act at `now`. A lease that is over is one, whoever leads now.
    pub fn reasons(&self, now: BootTime) -> impl Iterator<Item = Reason> + '_ {
        Reason::ALL.into_iter().filter(move |reason| {
            // Whoever stands by has no lease, too, and no other reason for that.
            let is_unleased = *reason == self.unleased
                && self.is_lease_over(now)
                && !self.is_closed_by(Reason::Standby);
            self.is_closed_by(*reason) || is_unleased
        })
    }

    /// The term, if there is no reason not to act at `now`.
    pub fn begin(&self, now: BootTime) -> Option<Term> {
        (self.closed == 0 && !self.is_lease_over(now)).then_some(self.term)
    }

    /// Whether a node begun in `term`, with time until `deadline`, may go on at `now`, which is `boot` as well.
    pub fn proceed(&self, term: Term, deadline: Instant, now: Instant, boot: BootTime) -> Step {
        if self.aborted {
            return Step::End(Closed::Aborted);
        }
        if term != self.term {
            return Step::End(Closed::TermEnded);
        }
        if !self.is_closed_by(Reason::Disconnected) && !self.is_lease_over(boot) {
            return Step::Go;
        }
        if now >= deadline { Step::End(Closed::Deadline) } else { Step::Wait }
    }

    /// Whether `now` is within [`RECONNECT_GRACE`] of a reconnect.
    pub fn just_reconnected(&self, now: Instant) -> bool {
        self.reconnected_at.is_some_and(|at| now.saturating_duration_since(at) < RECONNECT_GRACE)
    }

    /// Whether nothing is to be kept for later.
    pub fn is_lost(&self) -> bool {
        !self.has_term || self.is_closed_by(Reason::Draining)
    }

    fn is_closed_by(&self, reason: Reason) -> bool {
        self.closed & bit(reason) != 0
    }

    fn is_lease_over(&self, now: BootTime) -> bool {
        self.lease.is_some_and(|lease| now >= lease)
    }
}

impl Default for Core {
    fn default() -> Core {
        Core::new()
    }
}

fn bit(reason: Reason) -> u8 {
    match reason {
        Reason::Operator => 1,
        Reason::Standby => 2,
        Reason::Disconnected => 4,
        Reason::Draining => 8,
        Reason::Listening => 16,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::thread;

    use super::*;
    use crate::shutdown::is_over;

    const LONG: Duration = Duration::from_secs(60);
    const BOOT: BootTime = BootTime::START;

    #[test]
    fn each_reason_stops_what_it_must_and_nothing_else() {
        let term_ended = Step::End(Closed::TermEnded);
        check(|_| (), Some(Term(0)), Step::Go);
        check(|core| core.close(Reason::Operator), None, Step::Go);
        check(|core| core.close(Reason::Standby), None, Step::Go);
        check(|core| core.close(Reason::Disconnected), None, Step::Wait);
        check(|core| core.close(Reason::Draining), None, Step::Go);
        check(Core::end_term, None, term_ended);
        check(Core::abort, None, Step::End(Closed::Aborted));
    }

    /// Applies `change` to an open gate, then asks for something new and for a node begun before.
    #[track_caller]
    fn check(change: impl FnOnce(&mut Core), begins: Option<Term>, step: Step) {
        let now = Instant::now();
        let mut core = connected(now);
        let term = core.begin(BOOT).unwrap();
        change(&mut core);
        assert_eq!(core.begin(BOOT), begins);
        assert_eq!(core.proceed(term, now + LONG, now, BOOT), step);
    }

    fn connected(now: Instant) -> Core {
        let mut core = Core::new();
        core.open(Reason::Disconnected, now);
        core
    }

    #[test]
    fn is_closed_until_the_first_connect() {
        let gate = Gate::new();
        assert_eq!(gate.begin(), Err(vec![Reason::Disconnected]));
        gate.close(Reason::Operator);
        assert_eq!(gate.reasons(), [Reason::Operator, Reason::Disconnected]);
        gate.open(Reason::Disconnected);
        assert_eq!(gate.begin(), Err(vec![Reason::Operator]));
        gate.open(Reason::Operator);
        assert_eq!(gate.begin(), Ok(Term(0)));
    }

    #[test]
    fn every_reason_must_go_before_anything_begins() {
        let now = Instant::now();
        let mut core = connected(now);
        core.close(Reason::Operator);
        core.close(Reason::Standby);
        core.open(Reason::Operator, now);
        assert_eq!(core.begin(BOOT), None);
        core.open(Reason::Standby, now);
        assert_eq!(core.begin(BOOT), Some(Term(0)));
    }

    #[test]
    fn draining_is_for_good() {
        let now = Instant::now();
        let mut core = connected(now);
        core.close(Reason::Draining);
        core.open(Reason::Draining, now);
        assert_eq!(core.begin(BOOT), None);
    }

    #[test]
    fn a_node_of_an_earlier_term_stays_stopped_after_leadership_is_won_again() {
        let now = Instant::now();
        let mut core = connected(now);
        let earlier = core.begin(BOOT).unwrap();
        core.end_term();
        core.lead(BOOT + LONG);
        assert_eq!(core.proceed(earlier, now + LONG, now, BOOT), Step::End(Closed::TermEnded));
        let later = core.begin(BOOT).unwrap();
        assert_eq!(core.proceed(later, now + LONG, now, BOOT), Step::Go);
    }

    #[test]
    fn a_lease_that_is_over_lets_nothing_begin_and_what_was_begun_wait() {
        let now = Instant::now();
        let mut core = connected(now);
        core.lapse();
        assert_eq!(core.begin(BOOT), None);
        assert_eq!(core.reasons(BOOT).collect::<Vec<_>>(), [Reason::Standby]);
        let end = BOOT + LONG;
        core.lead(end);
        let before = BOOT + LONG / 2;
        let term = core.begin(before).unwrap();
        assert_eq!(core.proceed(term, now + LONG, now, before), Step::Go);
        assert_eq!(core.begin(end), None);
        assert_eq!(core.reasons(end).collect::<Vec<_>>(), [Reason::Standby]);
        assert_eq!(core.proceed(term, now + LONG, now, end), Step::Wait);
        assert_eq!(core.proceed(term, now, now, end), Step::End(Closed::Deadline));
        core.renew(end + LONG);
        assert_eq!(core.begin(end), Some(term));
        assert_eq!(core.proceed(term, now + LONG, now, end), Step::Go);
        core.lapse();
        assert_eq!(core.proceed(term, now + LONG, now, before), Step::Wait);
        assert!(!core.is_lost(), "the term goes on");
        core.end_term();
        assert!(core.is_lost());
        assert_eq!(core.proceed(term, now + LONG, now, before), Step::End(Closed::TermEnded));
        core.lead(end);
        assert!(!core.is_lost());
        assert_ne!(core.begin(before), Some(term));
    }

    #[test]
    fn whoever_listens_lets_nothing_begin_and_what_was_begun_wait() {
        let now = Instant::now();
        let mut core = connected(now);
        let reasons = |core: &Core, at| core.reasons(at).collect::<Vec<_>>();
        core.stand_by();
        core.listen();
        assert_eq!(reasons(&core, BOOT), [Reason::Listening]);
        assert!(core.is_lost(), "nothing was begun yet");
        let end = BOOT + LONG;
        core.lead(end);
        let term = core.begin(BOOT).unwrap();
        assert_eq!(reasons(&core, end), [Reason::Listening], "the lease is over");
        assert_eq!(core.begin(end), None);
        core.listen();
        assert_eq!(core.proceed(term, now + LONG, now, BOOT), Step::Wait);
        assert!(!core.is_lost(), "the term goes on");
        core.lead(end);
        assert_eq!(core.proceed(term, now + LONG, now, BOOT), Step::Go);
        core.end_term();
        assert_eq!(reasons(&core, BOOT), [Reason::Standby]);
        core.listen();
        assert_eq!(reasons(&core, BOOT), [Reason::Listening]);
        assert!(core.is_lost());
        core.lapse();
        assert_eq!(reasons(&core, BOOT), [Reason::Standby]);
        core.lead(end);
        assert_ne!(core.begin(BOOT), Some(term));
    }

    #[test]
    fn a_running_node_that_waits_for_the_lease_goes_on_with_it_or_stops() {
        let late = || BootTime::now() + LONG;
        for (then, expected) in [
            ((|gate, late| gate.renew(late)) as fn(&Gate, BootTime), Ok(())),
            (|gate, late| gate.lead(late), Ok(())),
            (|gate, _| gate.end_term(), Err(Closed::TermEnded)),
            (|gate, _| gate.abort(), Err(Closed::Aborted)),
        ] {
            let gate = Arc::new(Gate::new());
            gate.open(Reason::Disconnected);
            gate.lead(BootTime::START);
            let waiting = spawn(&gate, |gate| gate.proceed(Term(0), Instant::now() + LONG));
            then(&gate, late());
            assert_eq!(result(&waiting), expected);
        }
    }

    #[test]
    fn whoever_sends_has_the_lease_of_the_gate() {
        let gate = Gate::new();
        let lease = gate.lease();
        assert_eq!(lease.until(), None, "there is no election");
        gate.stand_by();
        assert_eq!(lease.until(), Some(BootTime::START));
        let end = BootTime::START + LONG;
        gate.lead(end);
        assert_eq!(lease.until(), Some(end));
        gate.renew(end + LONG);
        assert_eq!(lease.until(), Some(end + LONG));
        gate.end_term();
        assert_eq!(lease.until(), Some(BootTime::START));
    }

    #[test]
    fn a_renewal_wakes_nobody_who_does_not_wait_for_it() {
        let gate = Gate::new();
        let watcher = gate.watch();
        gate.lead(BootTime::now() + LONG);
        assert!(watcher.try_recv().is_ok());
        gate.renew(BootTime::now() + LONG);
        assert!(watcher.try_recv().is_err());
        gate.lead(BootTime::START);
        assert!(watcher.try_recv().is_ok());
        gate.renew(BootTime::now() + LONG);
        assert!(watcher.try_recv().is_ok());
    }

    #[test]
    fn a_running_node_waits_for_the_connection_until_its_deadline() {
        let now = Instant::now();
        let mut core = connected(now);
        let term = core.begin(BOOT).unwrap();
        core.close(Reason::Disconnected);
        let deadline = now + LONG;
        assert_eq!(
            core.proceed(term, deadline, deadline - Duration::from_millis(1), BOOT),
            Step::Wait
        );
        assert_eq!(core.proceed(term, deadline, deadline, BOOT), Step::End(Closed::Deadline));
        // Once connected the deadline is the caller's own affair: `restart` goes out after it.
        core.open(Reason::Disconnected, deadline);
        assert_eq!(core.proceed(term, deadline, deadline + LONG, BOOT), Step::Go);
    }

    #[test]
    fn only_a_reconnect_starts_the_grace_and_it_ends() {
        let start = Instant::now();
        let mut core = connected(start);
        assert!(!core.just_reconnected(start));
        // A second "up" without a "down" is none either.
        core.open(Reason::Disconnected, start);
        assert!(!core.just_reconnected(start));
        core.close(Reason::Disconnected);
        let back = start + LONG;
        core.open(Reason::Disconnected, back);
        assert!(core.just_reconnected(back));
        assert!(core.just_reconnected(back + RECONNECT_GRACE - Duration::from_millis(1)));
        assert!(!core.just_reconnected(back + RECONNECT_GRACE));
    }

    #[test]
    fn a_running_node_waits_out_a_lost_connection() {
        let gate = Arc::new(Gate::new());
        let waiting = spawn(&gate, |gate| gate.proceed(Term(0), Instant::now() + LONG));
        gate.close(Reason::Draining);
        gate.open(Reason::Disconnected);
        assert_eq!(result(&waiting), Ok(()));
    }

    #[test]
    fn a_running_node_that_waits_stops_on_abort_and_on_lost_leadership() {
        for (stop, expected) in [
            (Gate::abort as fn(&Gate), Closed::Aborted),
            (Gate::end_term as fn(&Gate), Closed::TermEnded),
        ] {
            let gate = Arc::new(Gate::new());
            let waiting = spawn(&gate, |gate| gate.proceed(Term(0), Instant::now() + LONG));
            stop(&gate);
            assert_eq!(result(&waiting), Err(expected));
        }
    }

    #[test]
    fn only_the_end_of_the_connection_that_there_was_is_told() {
        let gate = Gate::new();
        assert!(is_over(&gate.lost()), "there is none yet");
        gate.open(Reason::Disconnected);
        let first = gate.lost();
        gate.close(Reason::Operator);
        gate.open(Reason::Operator);
        gate.open(Reason::Disconnected);
        gate.end_term();
        assert!(!is_over(&first) && !is_over(&gate.lost()));
        gate.close(Reason::Disconnected);
        assert!(is_over(&first) && is_over(&gate.lost()));
        gate.open(Reason::Disconnected);
        assert!(is_over(&first), "what is lost stays lost");
        assert!(!is_over(&gate.lost()));
    }

    #[test]
    fn tells_since_when_each_reason_holds_and_since_when_it_is_open() {
        let gate = Gate::new();
        let [(Reason::Disconnected, start)] = gate.closed_since()[..] else { panic!("closed") };
        gate.close(Reason::Operator);
        let [(Reason::Operator, paused), (Reason::Disconnected, still)] = gate.closed_since()[..]
        else {
            panic!("two reasons")
        };
        assert_eq!(still, start);
        assert!(paused >= start);
        gate.close(Reason::Operator);
        assert_eq!(gate.closed_since()[0].1, paused, "it holds since the first time");
        gate.open(Reason::Disconnected);
        gate.open(Reason::Operator);
        assert_eq!(gate.closed_since(), []);
        let open = gate.open_since();
        assert!(open >= paused);
        gate.open(Reason::Operator);
        assert_eq!(gate.open_since(), open, "it was open");
    }

    #[test]
    fn a_watcher_gets_one_token_for_any_number_of_changes() {
        let gate = Gate::new();
        let watcher = gate.watch();
        assert!(watcher.try_recv().is_err());
        gate.open(Reason::Disconnected);
        gate.close(Reason::Operator);
        assert!(watcher.try_recv().is_ok());
        assert!(watcher.try_recv().is_err());
        gate.open(Reason::Operator);
        assert!(watcher.try_recv().is_ok());
    }

    fn spawn<T: Send + 'static>(
        gate: &Arc<Gate>,
        wait: impl FnOnce(&Gate) -> T + Send + 'static,
    ) -> Receiver<T> {
        let gate = Arc::clone(gate);
        let (sender, receiver) = bounded(1);
        thread::spawn(move || sender.send(wait(&gate)));
        receiver
    }

    #[track_caller]
    fn result<T>(waiting: &Receiver<T>) -> T {
        waiting.recv_timeout(LONG).expect("the wait ends")
    }
}
