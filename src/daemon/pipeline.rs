//! The way of a node through the daemon, thread by thread: listener and discoverer find it, the prober asks it, a worker
//! provisions it, the finisher writes down what became of it.

use std::sync::Arc;
use std::time::Instant;

use crossbeam_channel::{Receiver, Sender, bounded};

use crate::daemon::threads::Threads;
use crate::daemon::{RunError, Shared};
use crate::fleet::discoverer::{self, Discoverer, LastSuccess};
use crate::fleet::election;
use crate::fleet::finisher::{Done, Finisher};
use crate::fleet::history::History;
use crate::fleet::listener::{self, Listener};
use crate::fleet::prober::{self, Prober};
use crate::fleet::registry::Key;
use crate::fleet::roster::Queues;
use crate::fleet::skew::Skew;
use crate::fleet::worker::Workers;
use crate::fleet::worker::desks::Desks;
use crate::fleet::worker::rate::RateLimit;
use crate::protocol::subject;
use crate::pulse::PIECE_MAX;

/// Outcomes on their way to the finisher; prober and workers wait when there are more. Memory is taken for all of them.
const DONE_MAX: usize = 64;

/// Its threads, and what can be seen of them.
pub struct Pipeline {
    pub threads: Threads,
    /// Who works on what.
    pub desks: Arc<Desks>,
    /// What became of nodes.
    pub history: Arc<History>,
    /// When the fleet was last asked.
    pub last_discovery: Arc<LastSuccess>,
    /// Whether nodes say that our clock is off.
    pub skew: Arc<Skew>,
}

impl Pipeline {
    /// Starts all threads. `triggered` has a message when a discovery is wanted.
    pub fn start(
        shared: &Shared,
        queues: Queues,
        triggered: Receiver<()>,
        election: Option<Arc<election::View>>,
    ) -> Result<Pipeline, RunError> {
        let (done_tx, done) = bounded(DONE_MAX);
        let (again_tx, again) = bounded(prober::AGAIN_MAX);
        let desks = Arc::new(Desks::default());
        let history = Arc::new(History::new(Instant::now()));
        let last_discovery = Arc::new(LastSuccess::new());

        let skew = Skew::new(shared.choria.ttl_secs);
        let listener = listener(shared, again_tx, skew.clone())?;
        let discoverer = discoverer(shared, triggered, election, last_discovery.clone());
        let prober = prober(shared, queues, again, done_tx, desks.clone())?;
        let finisher = Finisher {
            done,
            roster: shared.roster.clone(),
            gate: shared.access.gate.clone(),
            metrics: shared.metrics.clone(),
            history: history.clone(),
            audit: shared.audit.clone(),
        };

        let mut threads = Threads::new();
        let pulses = &shared.access.pulses;
        threads.start_attended(pulses, "listener", PIECE_MAX, move || listener.run())?;
        // It waits for answers within a piece of work.
        let limit = PIECE_MAX + shared.choria.discovery_timeout * 2;
        threads.start_attended(pulses, "discoverer", limit, move || discoverer.run())?;
        threads.start_attended(pulses, "prober", PIECE_MAX, move || prober.run())?;
        threads.start_attended(pulses, "finisher", PIECE_MAX, move || finisher.run())?;
        Ok(Pipeline { threads, desks, history, last_discovery, skew })
    }
}

fn listener(shared: &Shared, again: Sender<Key>, skew: Arc<Skew>) -> Result<Listener, RunError> {
    let component = &shared.current.config().lifecycle_component;
    let events = subject::startup_events(component).map_err(RunError::Component)?;
    let setup = listener::Setup {
        roster: shared.roster.clone(),
        gate: shared.access.gate.clone(),
        metrics: shared.metrics.clone(),
        again,
        skew,
        stop: shared.drain.clone(),
    };
    Ok(Listener::subscribe(shared.access.transport.as_ref(), &events, setup))
}

fn discoverer(
    shared: &Shared,
    trigger: Receiver<()>,
    election: Option<Arc<election::View>>,
    last: Arc<LastSuccess>,
) -> Discoverer {
    Discoverer::new(discoverer::Setup {
        rpc: shared.access.rpc.clone(),
        roster: shared.roster.clone(),
        gate: shared.access.gate.clone(),
        election,
        metrics: shared.metrics.clone(),
        current: shared.current.clone(),
        window: shared.choria.discovery_timeout,
        trigger,
        stop: shared.drain.clone(),
        last,
    })
}

/// The prober with its workers.
fn prober(
    shared: &Shared,
    queues: Queues,
    again: Receiver<Key>,
    done: Sender<Done>,
    desks: Arc<Desks>,
) -> Result<Prober, RunError> {
    let config = shared.current.config();
    let (freed_tx, freed) = bounded(1);
    let workers = Workers::start(
        config.workers,
        shared.abort.clone(),
        done.clone(),
        freed_tx,
        shared.metrics.clone(),
        desks,
    )
    .map_err(|error| RunError::Thread { name: "worker-1", error })?;
    Ok(Prober::new(prober::Setup {
        rpc: shared.access.rpc.clone(),
        roster: shared.roster.clone(),
        gate: shared.access.gate.clone(),
        metrics: shared.metrics.clone(),
        queues,
        again,
        freed,
        done,
        workers,
        rate: RateLimit::new(config.rate_limit),
        limits: prober::core::Limits::of(&config),
        current: shared.current.clone(),
        stop: shared.drain.clone(),
    }))
}
