//! Starts, connects and joins the threads that find and provision nodes.
//!
//! | Thread | Waits for | Ends when |
//! | --- | --- | --- |
//! | main (`main_loop`) | links, signals, changes of the gate | all others have ended |
//! | `signals` (`shutdown`) | signals | `Signals` is dropped |
//! | `broker-keeper`, a `broker-reader` for each connection, a `resolver` for each look-up (`transport`) | the socket, timers, DNS | the connection is closed, last of all |
//! | `listener` | startup events | drain |
//! | `discoverer` | interval, triggers, late finds | drain |
//! | `prober` | queues, answers, permits, the gate | drain, after its workers |
//! | `worker-N`, started as needed | a node from the prober | the prober has ended and their node too |
//! | `audit` (`ops::audit`) | outcomes to write down | `finisher` has ended and all is written |
//! | `finisher` | outcomes, a tick | prober and workers have ended |
//! | `election`, if there is one | answers, changes of the gate, offers, a timer | drain, after all the above |
//! | monitor (`ops::http`), `admin` and its clients (`ops::socket`) | requests, commands | all others have ended |
//!
//! Stopping: *drain* closes the gate and ends listener, discoverer and prober, whose queues are dropped; running nodes
//! finish; when the last outcome is written leadership is handed over, and the connection drains and closes. *Abort*, a second signal or
//! `drain_timeout`, closes the connection at once and ends every wait; a node stops before its next step. A panic
//! anywhere ends the process: half a daemon is worse than none.

pub mod discoverer;
pub mod election;
pub mod finisher;
mod keychain;
mod links;
pub mod listener;
mod main_loop;
pub mod prober;
pub mod registry;
pub mod roster;
pub mod seldom;
#[cfg(test)]
mod simulation;
mod threads;
mod tokens;
pub mod worker;

use std::fmt;
use std::io;
use std::panic;
use std::process;
use std::sync::Arc;
use std::time::Instant;

use crossbeam_channel::bounded;

use crate::clock::unix_time;
use crate::config::choria::ChoriaConfig;
use crate::config::security;
use crate::config::{Config, HelperMode};
use crate::fleet::discoverer::{Discoverer, LastSuccess};
use crate::fleet::election::Election;
use crate::fleet::finisher::Finisher;
use crate::fleet::keychain::Keychain;
use crate::fleet::links::Links;
use crate::fleet::listener::Listener;
use crate::fleet::main_loop::{Candidate, MainLoop};
use crate::fleet::prober::Prober;
use crate::fleet::roster::Roster;
use crate::fleet::threads::Threads;
use crate::fleet::tokens::Tokens;
use crate::fleet::worker::Workers;
use crate::fleet::worker::desks::Desks;
use crate::fleet::worker::rate::RateLimit;
use crate::gate::Gate;
use crate::helper::{self, Helper};
use crate::logging::Log;
use crate::metrics::Metrics;
use crate::node;
use crate::ops::audit::AuditFile;
use crate::ops::command::Operator;
use crate::ops::history::History;
use crate::ops::http::Monitor;
use crate::ops::socket::Socket;
use crate::ops::status::{Observer, Sources, Uplink};
use crate::protocol::subject::{self, BadSubject};
use crate::protocol::{self, RequestId, lifecycle};
use crate::rpc::{self, Rpc};
use crate::shutdown::Signals;
use crate::transport::connection::{self, Connection, Options};
use crate::transport::{Link, Transport};

/// Outcomes on their way to the finisher; prober and workers wait when there are more. Memory is taken for all of them.
const DONE_MAX: usize = 256;

/// What `run` needs; everything in it has been checked.
pub struct Setup {
    /// The provisioner's own settings.
    pub config: Config,
    /// From Choria's client file.
    pub choria: ChoriaConfig,
    /// The port for metrics, bound before any work starts.
    pub monitor: Option<Monitor>,
    /// The socket for an operator's commands, if there is one.
    pub admin: Option<Socket>,
    /// Where each attempt is written down, if anywhere.
    pub audit: Option<AuditFile>,
    /// Our version, for our startup event.
    pub version: &'static str,
    /// The log, to open its file again on SIGUSR2.
    pub log: Log,
}

/// Why the daemon could not start.
#[derive(Debug)]
pub enum RunError {
    /// One of our keys can't be read or used.
    Keys(security::Problem),
    /// The connection could not be begun.
    Connection(connection::StartError),
    /// The reply subscription could not be made.
    Rpc(rpc::StartError),
    /// `lifecycle_component` makes no subject.
    Component(BadSubject),
    /// The system gave us no thread.
    Thread {
        /// Its name.
        name: &'static str,
        /// What the system said.
        error: io::Error,
    },
}

impl fmt::Display for RunError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RunError::Keys(_) => f.write_str("could not use our keys"),
            RunError::Connection(_) => f.write_str("could not start the connection"),
            RunError::Rpc(_) => f.write_str("could not subscribe to replies"),
            RunError::Component(_) => f.write_str("lifecycle_component can't be part of a subject"),
            RunError::Thread { name, .. } => write!(f, "could not start thread {name}"),
        }
    }
}

impl std::error::Error for RunError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            RunError::Keys(error) => Some(error),
            RunError::Connection(error) => Some(error),
            RunError::Rpc(error) => Some(error),
            RunError::Component(error) => Some(error),
            RunError::Thread { error, .. } => Some(error),
        }
    }
}

/// Finds and provisions nodes until the drain has ended or an abort.
///
/// # Errors
///
/// [`RunError`], before any node was touched.
pub fn run(setup: Setup, signals: Signals) -> Result<(), RunError> {
    end_on_panic();
    let Setup { config, choria, monitor, admin, audit, version, log } = setup;
    let config = Arc::new(config);
    let metrics = Metrics::new(&config.site);
    let gate = Arc::new(Gate::new());

    metrics.lease_from({
        let lease = gate.lease();
        move || lease.left()
    });

    let (links, link_changed) = Links::new(gate.clone());
    let uplink = Arc::new(Uplink::new());
    let (keychain, codec) = Keychain::open(&choria).map_err(RunError::Keys)?;
    let connection = connect(&choria, &metrics, &keychain, {
        let (links, uplink) = (links.clone(), uplink.clone());
        move |link| {
            uplink.put(&link);
            links.put(link);
        }
    })?;
    let transport: Arc<dyn Transport> = connection.clone();

    let instance = RequestId::random();
    let rpc = Rpc::start(
        transport.clone(),
        gate.lease(),
        codec,
        instance.as_str(),
        choria.ttl_secs,
        metrics.clone(),
    )
    .map_err(RunError::Rpc)?;

    let limits = registry::Limits::new(config.interval, config.retry_max);
    let (roster, queues) = Roster::new(limits, config.work_queue, metrics.clone());
    let roster = Arc::new(roster);
    let helper = Arc::new(helper(&config, &metrics));
    let context = Arc::new(node::Context {
        rpc: rpc.clone(),
        helper: helper.clone(),
        gate: gate.clone(),
        metrics: metrics.clone(),
        config: config.clone(),
        last_key: Default::default(),
        discovery_timeout: choria.discovery_timeout,
        abort: signals.abort.clone(),
    });

    let (trigger, triggered) = bounded(1);
    // It closes the gate before anybody asks it.
    let (candidate, election) = match config.leader_election {
        false => (None, None),
        true => {
            let (busy, idle) = bounded(0);
            let (view, step_down) = election::View::new();
            let setup = election::Setup {
                transport: transport.clone(),
                rpc: rpc.clone(),
                identity: choria.identity.clone(),
                instance: instance.as_str().to_owned(),
                gate: gate.clone(),
                roster: roster.clone(),
                queues: queues.clone(),
                metrics: metrics.clone(),
                discover: trigger.clone(),
                view: view.clone(),
                step_down,
                drain: signals.drain.clone(),
                idle,
                abort: signals.abort.clone(),
            };
            let replies = RequestId::random();
            let election = Election::new(setup, replies.as_str().to_owned())
                .map_err(|error| RunError::Rpc(rpc::StartError(error)))?;
            let mut thread = Threads::new();
            thread.start("election", move || election.run())?;
            (Some(Candidate { busy, thread }), Some(view))
        }
    };

    let (done_tx, done) = bounded(DONE_MAX);
    let (freed_tx, freed) = bounded(1);
    let (again_tx, again) = bounded(prober::AGAIN_MAX);
    let last_success = Arc::new(LastSuccess::new());
    let mut threads = Threads::new();
    let events =
        subject::startup_events(&config.lifecycle_component).map_err(RunError::Component)?;
    let listener = Listener::subscribe(
        transport.as_ref(),
        &events,
        roster.clone(),
        gate.clone(),
        metrics.clone(),
        again_tx,
        signals.drain.clone(),
    );
    threads.start("listener", move || listener.run())?;
    let discoverer = Discoverer::new(discoverer::Setup {
        rpc: rpc.clone(),
        roster: roster.clone(),
        gate: gate.clone(),
        metrics: metrics.clone(),
        interval: config.interval,
        window: choria.discovery_timeout,
        trigger: triggered,
        stop: signals.drain.clone(),
        last: last_success.clone(),
    });
    threads.start("discoverer", move || discoverer.run())?;
    let desks = Arc::new(Desks::default());
    let workers = Workers::start(
        config.workers,
        context,
        signals.abort.clone(),
        done_tx.clone(),
        freed_tx,
        metrics.clone(),
        desks.clone(),
    )
    .map_err(|error| RunError::Thread { name: "worker-1", error })?;
    let prober = Prober::new(prober::Setup {
        rpc: rpc.clone(),
        roster: roster.clone(),
        gate: gate.clone(),
        metrics: metrics.clone(),
        queues,
        again,
        freed,
        done: done_tx,
        workers,
        rate: RateLimit::new(config.rate_limit),
        limits: prober::core::Limits {
            quick_max: (config.workers * prober::QUICK_PER_WORKER).max(prober::QUICK_MIN),
            silent_max: config.probe_window,
            timeout: config.probe_timeout,
            held_bytes_max: prober::HELD_BYTES_MAX,
        },
        node_timeout: config.node_timeout,
        stop: signals.drain.clone(),
    });
    threads.start("prober", move || prober.run())?;
    let history = Arc::new(History::new(Instant::now()));
    let (audit, audit_running) = match audit {
        None => (None, None),
        Some(file) => {
            let started = file.start(instance.as_str(), metrics.clone());
            let (audit, running) =
                started.map_err(|error| RunError::Thread { name: "audit", error })?;
            (Some(audit), Some(running))
        }
    };
    let finisher = Finisher {
        done,
        roster: roster.clone(),
        gate: gate.clone(),
        metrics: metrics.clone(),
        history: history.clone(),
        audit,
    };
    threads.start("finisher", move || finisher.run())?;
    let observer = Arc::new(Observer::new(Sources {
        version,
        identity: choria.identity.to_string(),
        instance: instance.as_str().to_owned(),
        site: config.site.clone(),
        interval: config.interval,
        workers_max: config.workers,
        gate: gate.clone(),
        roster: roster.clone(),
        desks,
        history,
        metrics: metrics.clone(),
        last_discovery: last_success,
        uplink,
        election,
        broker_error: Box::new({
            let connection = connection.clone();
            move || connection.last_error()
        }),
    }));
    let monitor = match monitor {
        None => None,
        Some(monitor) => {
            let serving = monitor.serve(metrics.clone(), observer.clone());
            Some(serving.map_err(|error| RunError::Thread { name: "monitor", error })?)
        }
    };
    let admin = match admin {
        None => None,
        Some(socket) => {
            let (gate, roster, discover) = (gate.clone(), roster.clone(), trigger.clone());
            let operator = Operator { shown: observer, gate, roster, discover };
            let serving = socket.serve(Arc::new(operator));
            Some(serving.map_err(|error| RunError::Thread { name: "admin", error })?)
        }
    };

    let mut main = MainLoop {
        gate: gate.clone(),
        metrics,
        transport,
        trigger,
        links,
        link_changed,
        gate_changed: gate.watch(),
        renew: Box::new({
            let (rpc, keychain) = (rpc.clone(), Arc::clone(&keychain));
            move || keychain.renew(&rpc)
        }),
        announcement: Some(lifecycle::startup_event(
            &choria.identity,
            version,
            &protocol::event_id(),
            unix_time(),
        )),
        tokens: Tokens::new(config.signing.clone(), choria.security, {
            let rpc = rpc.clone();
            Box::new(move || keychain.refresh(&rpc))
        }),
        audit: audit_running,
    };
    main.serve(&signals, &log);
    main.stop(&signals, &log, threads, candidate, config.drain_timeout, &connection);
    if let Some(audit) = main.audit.take() {
        audit.stop();
    }
    helper.stop(&signals.abort);
    drop((rpc, admin));
    if let Some(monitor) = monitor {
        monitor.stop();
    }
    log::info!(component = "provisioner"; "Stopped");
    Ok(())
}

/// The site's helper, run as configured.
fn helper(config: &Config, metrics: &Arc<Metrics>) -> Helper {
    let limits =
        helper::Limits { timeout: config.helper_timeout, output_max: config.helper_output_max };
    let (command, metrics) = (config.helper.clone(), metrics.clone());
    match config.helper_mode {
        HelperMode::Exec => Helper::new(command, limits, metrics),
        HelperMode::Persistent => Helper::persistent(command, limits, config.workers, metrics),
    }
}

/// The release build aborts on panic by itself; with this, every build does.
fn end_on_panic() {
    let before = panic::take_hook();
    panic::set_hook(Box::new(move |info| {
        before(info);
        log::error!(component = "provisioner"; "{info}");
        process::abort();
    }));
}

/// Begins to connect; `on_link` hears of every change.
fn connect(
    choria: &ChoriaConfig,
    metrics: &Arc<Metrics>,
    keychain: &Arc<Keychain>,
    on_link: impl Fn(Link) + Send + Sync + 'static,
) -> Result<Arc<Connection>, RunError> {
    let keychain = Arc::clone(keychain);
    let options = Options {
        credentials: Box::new(move || keychain.credentials()),
        connect_timeout: choria.connect_timeout,
        on_link: Box::new(on_link),
        ..Options::new(choria.brokers.clone(), &choria.connection_name, metrics.clone())
    };
    Connection::start(options).map_err(RunError::Connection)
}
