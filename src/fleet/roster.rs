//! The registry behind its lock, with the queues it fills: where every sighting goes, and every node is taken from.
//!
//! Where several provision side by side both are asked whose the node is. Nothing blocks here: a full queue refuses, is
//! counted, and the node is seen again by a later discovery.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, unbounded};
use parking_lot::{Mutex, MutexGuard};

use crate::fleet::peers::shares::Shares;
use crate::fleet::registry::{
    Key, Kind, Limits, Queue, Registry, Returned, Sighted, Sighting, Taken,
};
use crate::metrics::Metrics;
use crate::protocol::Identity;
use crate::seldom::Seldom;

/// Waiting nodes read under one lock.
const RETRIED_AT_ONCE: usize = 500;

/// A full queue refuses thousands of nodes at once; one line tells.
const FULL_LOG: Duration = Duration::from_secs(1);

/// Shared by all threads that see nodes or end their attempts.
pub struct Roster {
    registry: Mutex<Registry>,
    shares: Shares,
    first: Sender<Key>,
    retry: Sender<Key>,
    queue_max: usize,
    full: Mutex<Seldom>,
    metrics: Arc<Metrics>,
}

/// What became of all the nodes that waited.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RetriedAll {
    /// How many were queued.
    pub queued: usize,
    /// The queue had no room for the rest; they are due.
    pub is_full: bool,
}

/// The ends the prober takes nodes from.
#[derive(Debug, Clone)]
pub struct Queues {
    /// The work queue: nodes seen for the first time.
    pub first: Receiver<Key>,
    /// The retry queue.
    pub retry: Receiver<Key>,
}

impl Roster {
    /// Knows nobody; each of the two queues takes `queue_max` entries.
    ///
    /// The bound is kept here, under the registry's lock, and not by the channels: theirs would claim all its memory at
    /// the start, for queues that are empty most of the time.
    pub fn new(limits: Limits, queue_max: usize, metrics: Arc<Metrics>) -> (Roster, Queues) {
        let (first, first_out) = unbounded();
        let (retry, retry_out) = unbounded();
        let registry = Mutex::new(Registry::new(limits));
        let full = Mutex::new(Seldom::every(FULL_LOG));
        let shares = Shares::default();
        let roster = Roster { registry, shares, first, retry, queue_max, full, metrics };
        (roster, Queues { first: first_out, retry: retry_out })
    }

    /// A node was noticed.
    pub fn sight(&self, identity: &Identity, what: Sighting<'_>) -> Sighted {
        let now = Instant::now();
        if !self.is_ours(identity) {
            return Sighted::Others;
        }
        let sighted = self.change(|registry, push| registry.sight(identity, what, now, push));
        match &sighted {
            Sighted::Queued(_) => {
                log::info!(component = "hosts", node = identity.as_str(); "Adding {identity} to the work queue");
            }
            Sighted::QueueFull => {
                if let Some(suppressed) = self.full.lock().now(now) {
                    let (len, max) = (self.longest_queue(), self.queue_max);
                    log::warn!(component = "hosts", node = identity.as_str(), suppressed;
                        "Adding {identity} to the work queue failed with {len} / {max} entries");
                }
            }
            Sighted::Known
            | Sighted::NotDue
            | Sighted::AskAgain(_)
            | Sighted::Denied
            | Sighted::Others => {}
        }
        sighted
    }

    /// Whether `key` still stands for a node to be begun.
    pub fn is_wanted(&self, key: &Key) -> bool {
        self.is_ours(&key.identity) && self.registry.lock().is_current(key)
    }

    /// A worker takes a queued node; nothing if the key's time has passed.
    pub fn take(&self, key: &Key, now: Instant) -> Option<Taken> {
        if self.is_ours(&key.identity) { self.registry.lock().take(key, now) } else { None }
    }

    /// Who provisions which node, if we are not alone.
    pub fn shares(&self) -> &Shares {
        &self.shares
    }

    /// Asks whose a node is, and forgets one that is another's.
    fn is_ours(&self, identity: &Identity) -> bool {
        let is_ours = self.shares.is_ours(identity);
        if !is_ours {
            self.registry.lock().disown(identity);
        }
        is_ours
    }

    /// An operator wants every node tried that waits.
    pub fn retry_all(&self) -> RetriedAll {
        let started = Instant::now();
        let (mut queued, mut is_full, mut mark) = (0, false, None);
        while !is_full {
            let mut waiting = Vec::new();
            mark =
                self.registry().visit(Kind::Waiting, mark.as_ref(), RETRIED_AT_ONCE, &mut |node| {
                    // The order is that of when they were seen: whoever was seen since has been retried, or failed again.
                    if node.seen < started {
                        waiting.push(node.identity.clone());
                    }
                });
            for identity in &waiting {
                match self.sight(identity, Sighting::Operator) {
                    Sighted::Queued(_) => queued += 1,
                    Sighted::QueueFull => is_full = true,
                    Sighted::Known
                    | Sighted::NotDue
                    | Sighted::AskAgain(_)
                    | Sighted::Denied
                    | Sighted::Others => {}
                }
                if is_full {
                    self.registry().make_due(started);
                    break;
                }
            }
            if mark.is_none() || waiting.is_empty() {
                break;
            }
        }
        RetriedAll { queued, is_full }
    }

    /// Works on the registry with a way to its queues; keep it short, everything else waits.
    pub fn change<T>(
        &self,
        work: impl FnOnce(&mut Registry, &mut dyn FnMut(Queue, &Key) -> bool) -> T,
    ) -> T {
        let mut refused = [0_u64; 2];
        let mut registry = self.registry.lock();
        let done = work(&mut registry, &mut |queue, key| {
            let (sender, refused) = match queue {
                Queue::First => (&self.first, &mut refused[0]),
                Queue::Retry => (&self.retry, &mut refused[1]),
            };
            let fits = sender.len() < self.queue_max && sender.send(key.clone()).is_ok();
            *refused += u64::from(!fits);
            fits
        });
        let returned = registry.take_returned();
        drop(registry);
        if let Some(Returned { identity, times }) = returned {
            self.metrics.returns.inc();
            let node = identity.as_str();
            log::warn!(component = node, node, times;
                "{node} came back unprovisioned after it was configured: does its configuration set plugin.choria.server.provision to 0?");
        }
        for (count, label) in refused.into_iter().zip(["work", "retry"]) {
            if count > 0 {
                self.metrics.queue_refused.with_label_values(&[label]).inc_by(count);
            }
        }
        done
    }

    /// Forgets all nodes but those in hand, and empties the queues; says how many there were.
    ///
    /// Both under one lock: a node that is seen in between would be queued, and lose its place in the queue.
    pub fn forget(&self, queues: &Queues) -> usize {
        let mut registry = self.registry.lock();
        queues.first.try_iter().chain(queues.retry.try_iter()).for_each(drop);
        registry.clear()
    }

    /// Entries of the fuller queue: the one that refuses.
    fn longest_queue(&self) -> usize {
        self.first.len().max(self.retry.len())
    }

    /// The registry itself, for what needs no queue.
    pub fn registry(&self) -> MutexGuard<'_, Registry> {
        self.registry.lock()
    }

    /// Brings the gauges of queues and states up to date.
    pub fn measure(&self) {
        let counts = self.registry.lock().counts();
        let metrics = &self.metrics;
        metrics.waiting_nodes.set(gauge(counts.waiting_nodes()));
        metrics.work_queue_entries.set(gauge(self.first.len() + self.retry.len()));
        metrics.waiting_retry_nodes.set(gauge(counts.waiting));
        metrics.settling_nodes.set(gauge(counts.settling));
    }
}

/// A length as metrics take it.
pub fn gauge(len: usize) -> i64 {
    i64::try_from(len).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fleet::peers::shares::Owners;
    use crate::fleet::peers::table::testing::sender;
    use crate::node::{Outcome, Report};

    #[test]
    fn what_is_forgotten_leaves_the_queues_and_is_queued_when_seen_again() {
        let limits = Limits::new(Duration::from_secs(60), Duration::from_secs(1800));
        let (roster, queues) = Roster::new(limits, 2, Metrics::new("test"));
        let sight = |name: &str| roster.sight(&Identity::parse(name).unwrap(), Sighting::Discovery);
        for name in ["n1", "n2"] {
            assert!(matches!(sight(name), Sighted::Queued(_)));
        }
        assert_eq!(roster.forget(&queues), 2);
        assert!(queues.first.is_empty() && queues.retry.is_empty());
        assert!(matches!(sight("n1"), Sighted::Queued(_)));
        assert_eq!(queues.first.len(), 1);
    }

    #[test]
    fn anothers_node_is_neither_queued_nor_taken_and_is_forgotten() {
        let limits = Limits::new(Duration::from_secs(60), Duration::from_secs(1800));
        let (roster, queues) = Roster::new(limits, 100, Metrics::new("test"));
        let (us, them) = (sender("us"), sender("them"));
        let ours = Owners::new(&us, [&them]);
        let (mut mine, mut theirs) = (0..100)
            .map(|n| Identity::parse(&format!("n{n}.example.net")).unwrap())
            .partition::<Vec<_>, _>(|node| ours.is_ours(node));
        let (mine, theirs) = (mine.pop().unwrap(), theirs.pop().unwrap());
        let sight = |node| roster.sight(node, Sighting::Discovery);
        let Sighted::Queued(key) = sight(&theirs) else { panic!("we are alone yet") };
        assert!(matches!(sight(&mine), Sighted::Queued(_)));
        assert!(roster.is_wanted(&key));

        roster.shares().put(ours);
        let now = Instant::now();
        assert!(roster.registry().is_current(&key), "nobody has asked yet");
        assert_eq!(roster.take(&key, now), None);
        assert!(!roster.is_wanted(&key) && roster.registry().node(&theirs).is_none());
        assert_eq!(sight(&theirs), Sighted::Others);
        assert_eq!(roster.sight(&theirs, Sighting::Operator), Sighted::Others);
        assert_eq!(queues.first.len(), 2, "what is in the queue stands for nobody");
        assert_eq!(sight(&mine), Sighted::Known);

        // One in hand is finished, and settles.
        roster.shares().put(Owners::new(&us, []));
        let Sighted::Queued(key) = sight(&theirs) else { panic!("it is ours again") };
        assert!(roster.take(&key, now).is_some());
        roster.shares().put(Owners::new(&us, [&them]));
        assert_eq!(sight(&theirs), Sighted::Others);
        assert!(roster.registry().is_current(&key));
        let report =
            Report::new(Outcome::Provisioned { configured_at: now, restarted_at: Some(now) }, "");
        roster.change(|registry, push| registry.finish(&key, &report, now, false, false, push));
        assert_eq!(sight(&theirs), Sighted::Others);
        assert_eq!(roster.registry().counts().settling, 1);
    }

    #[test]
    fn each_queue_refuses_what_it_has_no_room_for_and_is_named_in_the_metric() {
        let metrics = Metrics::new("test");
        let limits = Limits::new(Duration::from_secs(60), Duration::from_secs(1800));
        let (roster, queues) = Roster::new(limits, 2, metrics.clone());
        let sight = |name: &str| roster.sight(&Identity::parse(name).unwrap(), Sighting::Discovery);
        let refused = |queue: &str| metrics.queue_refused.with_label_values(&[queue]).get();

        // Three that fail and come again, one after the other.
        for name in ["n1", "n2", "n3"] {
            let Sighted::Queued(key) = sight(name) else { panic!("{name} is new") };
            queues.first.recv().unwrap();
            let report = Report::new(Outcome::Failed, "");
            let now = Instant::now();
            roster.registry().take(&key, now).unwrap();
            roster.change(|registry, push| registry.finish(&key, &report, now, false, false, push));
        }
        assert!(matches!(sight("n1"), Sighted::Queued(_)));
        assert!(matches!(sight("n2"), Sighted::Queued(_)));
        assert_eq!(sight("n3"), Sighted::QueueFull);
        assert_eq!((refused("work"), refused("retry")), (0, 1));
        assert_eq!((roster.first.len(), roster.longest_queue()), (0, 2));

        for name in ["n4", "n5"] {
            assert!(matches!(sight(name), Sighted::Queued(_)));
        }
        assert_eq!(sight("n6"), Sighted::QueueFull);
        assert_eq!((refused("work"), refused("retry")), (1, 1));
        roster.measure();
        assert_eq!(metrics.work_queue_entries.get(), 4);
    }
}
