//! The running daemon: starts, connects and joins the threads that find and provision nodes, and those that show it.
//!
//! What a thread does is said where it is (`fleet`, `ops`, `transport`); here is who gets which end of which channel.
//!
//! | Thread | Waits for | Ends when |
//! | --- | --- | --- |
//! | main (`main_loop`) | links, signals, changes of the gate | all others have ended |
//! | `signals` (`shutdown`) | signals | `Signals` is dropped |
//! | `reload` | SIGHUP, wishes of operators | all that provision have ended |
//! | `broker-keeper`, a `broker-reader` for each connection, a `resolver` for each look-up (`transport`) | the socket, timers, DNS | the connection is closed, last of all |
//! | `listener` | startup events | drain |
//! | `discoverer` | interval, triggers, late finds | drain |
//! | `prober` | queues, answers, permits, the gate | drain, after its workers |
//! | `worker-N`, started as needed | a node from the prober | the prober has ended and their node too |
//! | `audit` (`fleet::audit`) | outcomes to write down | `finisher` has ended or a reload names another log, and all is written |
//! | `finisher` | outcomes, a tick | prober and workers have ended |
//! | `election` or `peers`, unless we are alone | answers, what peers say, changes of the gate, a timer | drain, after all the above |
//! | `helper-end` for each time that processes of a helper that stays are let go (`helper`) | their end | they have ended, or were killed after 5 s |
//! | monitor (`ops::http`), `admin` and its clients (`ops::socket`) | requests, commands | all others have ended |
//!
//! Stopping: *drain* closes the gate and ends listener, discoverer and prober, whose queues are dropped; running nodes
//! finish; when the last outcome is written leadership is handed over, or our share left to the others, and the connection
//! drains and closes. *Abort*, a second signal or `drain_timeout`, closes the connection at once and ends every wait; a node
//! stops before its next step. A panic anywhere ends the process: half a daemon is worse than none.

mod access;
mod cluster;
mod links;
mod main_loop;
mod pipeline;
mod reload;
mod surfaces;
mod threads;
mod tokens;

use std::fmt;
use std::io;
use std::panic;
use std::process;
use std::sync::Arc;

use crossbeam_channel::{Receiver, Sender, bounded};

use crate::config::choria::ChoriaConfig;
use crate::config::security;
use crate::config::{Config, Source};
use crate::daemon::access::Access;
use crate::daemon::cluster::Cluster;
use crate::daemon::main_loop::MainLoop;
use crate::daemon::pipeline::Pipeline;
use crate::daemon::reload::Reloading;
use crate::daemon::surfaces::Surfaces;
use crate::fleet::audit::{AuditFile, Trail};
use crate::fleet::current::Current;
use crate::fleet::registry;
use crate::fleet::roster::Roster;
use crate::logging::Log;
use crate::metrics::Metrics;
use crate::node;
use crate::ops::http::Monitor;
use crate::ops::socket::Socket;
use crate::ops::systemd::Systemd;
use crate::protocol::subject::BadSubject;
use crate::rpc;
use crate::shutdown::{Never, Signals};
use crate::transport::connection;

/// What `run` needs; everything in it has been checked.
pub struct Setup {
    /// Where settings come from, to read them again.
    pub source: Source,
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

/// What all parts of the running daemon work with.
struct Shared {
    /// The settings, and what nodes are provisioned with.
    current: Arc<Current>,
    choria: ChoriaConfig,
    metrics: Arc<Metrics>,
    access: Access,
    /// What we know of the nodes.
    roster: Arc<Roster>,
    /// Where attempts are written down.
    audit: Arc<Trail>,
    /// A message starts a discovery.
    discover: Sender<()>,
    /// Told how we are.
    systemd: Arc<Systemd>,
    /// Disconnects when nothing new may be begun.
    drain: Receiver<Never>,
    /// Disconnects when every wait must end.
    abort: Receiver<Never>,
}

/// Finds and provisions nodes until the drain has ended or an abort.
///
/// # Errors
///
/// [`RunError`], before any node was touched.
pub fn run(setup: Setup, signals: Signals) -> Result<(), RunError> {
    end_on_panic();
    let Setup { source, config, choria, monitor, admin, audit, version, log } = setup;
    let metrics = Metrics::new(&config.site);
    let access = Access::open(&choria, &metrics)?;
    let (roster, queues) = Roster::new(
        registry::Limits::new(config.interval, config.retry_max),
        config.work_queue,
        metrics.clone(),
    );
    let (discover, triggered) = bounded(1);
    let shared = Shared {
        current: Arc::new(Current::new(node::Context {
            rpc: access.rpc.clone(),
            helper: Arc::new(node::helper(&config, &metrics)),
            gate: access.gate.clone(),
            metrics: metrics.clone(),
            config: Arc::new(config),
            last_key: node::LastKey::default(),
            last_pair: Default::default(),
            discovery_timeout: choria.discovery_timeout,
            abort: signals.abort.clone(),
        })),
        access,
        roster: Arc::new(roster),
        audit: Arc::default(),
        discover,
        systemd: Arc::new(Systemd::of_process()),
        drain: signals.drain.clone(),
        abort: signals.abort.clone(),
        choria,
        metrics,
    };
    if let Some(file) = audit {
        let started = file.start(shared.access.instance.as_str(), shared.metrics.clone());
        let started = started.map_err(|error| RunError::Thread { name: "audit", error })?;
        shared.audit.replace(Some(started));
    }
    let Cluster { member, views } = Cluster::join(&shared, &queues)?;
    let pipeline = Pipeline::start(&shared, queues, triggered, views.election.clone())?;
    let reloading = Reloading::start(&shared, source, &log, signals.hangup.clone())?;
    let observer = surfaces::observer(&shared, &pipeline, views.clone(), version);
    let surfaces = Surfaces::serve(&shared, &observer, views.election, &reloading, monitor, admin)?;

    let mut main = MainLoop::new(&shared, version, observer);
    main.serve(&signals, &log);
    main.stop(&signals, &log, pipeline.threads, member, &shared.access.connection);
    reloading.stop(&signals.abort);
    shared.audit.replace(None);
    shared.current.context().helper.stop(&signals.abort);
    surfaces.close();
    log::info!(component = "provisioner"; "Stopped");
    Ok(())
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
