//! Starts, connects and joins the threads that find and provision nodes.
//!
//! | Thread | Waits for | Ends when |
//! | --- | --- | --- |
//! | main (here) | links, signals, changes of the gate | all others have ended |
//! | `signals` (`shutdown`) | signals | `Signals` is dropped |
//! | `broker-keeper`, one reader for each connection (`transport`) | the socket, timers | the connection is closed, last of all |
//! | `listener` | startup events | drain |
//! | `discoverer` | interval, triggers, late finds | drain |
//! | `prober` | queues, answers, permits, the gate | drain, after its workers |
//! | `worker-N`, started as needed | a node from the prober | the prober has ended and their node too |
//! | `finisher` | outcomes, a tick | prober and workers have ended |
//! | monitor (`ops::http`) | requests | all others have ended |
//!
//! Stopping: *drain* closes the gate and ends listener, discoverer and prober, whose queues are dropped; running nodes
//! finish; when the last outcome is written the connection drains and closes. *Abort*, a second signal or
//! `drain_timeout`, closes the connection at once and ends every wait; a node stops before its next step. A panic
//! anywhere ends the process: half a daemon is worse than none.

pub mod discoverer;
pub mod finisher;
mod keychain;
pub mod listener;
pub mod prober;
pub mod registry;
pub mod roster;
pub mod seldom;
#[cfg(test)]
mod simulation;
pub mod worker;

use std::fmt;
use std::io;
use std::panic;
use std::process;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, at, bounded, never, select_biased, tick};
use parking_lot::Mutex;

use crate::clock::unix_time;
use crate::config::choria::ChoriaConfig;
use crate::config::security::{self, Security};
use crate::config::signing::SigningFiles;
use crate::config::{Config, HelperMode};
use crate::fleet::discoverer::{Discoverer, LastSuccess};
use crate::fleet::finisher::Finisher;
use crate::fleet::keychain::Keychain;
use crate::fleet::listener::Listener;
use crate::fleet::prober::Prober;
use crate::fleet::roster::Roster;
use crate::fleet::seldom::Seldom;
use crate::fleet::worker::Workers;
use crate::fleet::worker::rate::RateLimit;
use crate::gate::{Gate, Reason};
use crate::helper::{self, Helper};
use crate::logging::{Log, chain};
use crate::metrics::Metrics;
use crate::node;
use crate::ops::http::{Monitor, Readiness};
use crate::protocol::subject::{self, BadSubject};
use crate::protocol::{self, RequestId, lifecycle};
use crate::rpc::{self, Rpc};
use crate::shutdown::{Never, Signals};
use crate::transport::connection::{self, Connection, Options};
use crate::transport::{Link, Publish, Transport};

/// Outcomes on their way to the finisher; prober and workers wait when there are more.
const DONE_MAX: usize = 1024;
/// How long the broker may take for what was sent last, when the connection is closed.
const CLOSE_MAX: Duration = Duration::from_secs(5);
/// How long our startup event may take to reach the broker.
const ANNOUNCE_MAX: Duration = Duration::from_secs(2);

/// How often we look at our own token when nobody needs it.
const TOKENS_EVERY: Duration = Duration::from_secs(60);
/// How often an operator hears that it will expire soon.
const EXPIRY_LOG: Duration = Duration::from_secs(24 * 3_600);
/// How often an operator hears that it is no use; each node that comes says so too.
const SIGNING_LOG: Duration = Duration::from_secs(3_600);

/// A discovery may be this late, on top of one that was missed, before we are not ready.
const DISCOVERY_SLACK: Duration = Duration::from_secs(30);

/// What `run` needs; everything in it has been checked.
pub struct Setup {
    /// The provisioner's own settings.
    pub config: Config,
    /// From Choria's client file.
    pub choria: ChoriaConfig,
    /// The port for metrics, bound before any work starts.
    pub monitor: Option<Monitor>,
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
    let Setup { config, choria, monitor, version, log } = setup;
    let config = Arc::new(config);
    let metrics = Metrics::new(&config.site);
    let gate = Arc::new(Gate::new());

    let (links, link_changed) = Links::new(gate.clone());
    let (keychain, codec) = Keychain::open(&choria).map_err(RunError::Keys)?;
    let connection = connect(&choria, &metrics, &keychain, {
        let links = links.clone();
        move |link| links.put(link)
    })?;
    let transport: Arc<dyn Transport> = connection.clone();

    let instance = RequestId::random();
    let rpc =
        Rpc::start(transport.clone(), codec, instance.as_str(), choria.ttl_secs, metrics.clone())
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

    let (done_tx, done) = bounded(DONE_MAX);
    let (freed_tx, freed) = bounded(1);
    let (again_tx, again) = bounded(prober::AGAIN_MAX);
    let (trigger, triggered) = bounded(1);
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
    let workers = Workers::start(
        config.workers,
        context,
        signals.abort.clone(),
        done_tx.clone(),
        freed_tx,
        metrics.clone(),
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
            quick_max: config.workers.saturating_mul(prober::QUICK_PER_WORKER),
            silent_max: config.probe_window,
            timeout: config.probe_timeout,
            held_bytes_max: prober::HELD_BYTES_MAX,
        },
        node_timeout: config.node_timeout,
        stop: signals.drain.clone(),
    });
    threads.start("prober", move || prober.run())?;
    let finisher =
        Finisher { done, roster: roster.clone(), gate: gate.clone(), metrics: metrics.clone() };
    threads.start("finisher", move || finisher.run())?;
    let monitor = match monitor {
        None => None,
        Some(monitor) => {
            let (gate, connection) = (gate.clone(), connection.clone());
            let patience = config.interval * 2 + DISCOVERY_SLACK;
            let check = move || readiness(&gate, &connection, &last_success, patience);
            let serving = monitor.serve(metrics.clone(), Arc::new(check));
            Some(serving.map_err(|error| RunError::Thread { name: "monitor", error })?)
        }
    };

    let mut main = Main {
        gate: gate.clone(),
        metrics,
        transport,
        trigger,
        links,
        link_changed,
        gate_changed: gate.watch(),
        renew: Box::new({
            let rpc = rpc.clone();
            move || keychain.renew(&rpc)
        }),
        announcement: Some(lifecycle::startup_event(
            &choria.identity,
            version,
            &protocol::event_id(),
            unix_time(),
        )),
        tokens: Tokens::new(config.signing.clone(), choria.security),
    };
    main.serve(&signals, &log);
    main.stop(&signals, &log, threads, config.drain_timeout, &connection);
    helper.stop(&signals.abort);
    drop(rpc);
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

/// The main thread.
struct Main {
    gate: Arc<Gate>,
    metrics: Arc<Metrics>,
    transport: Arc<dyn Transport>,
    trigger: Sender<()>,
    links: Arc<Links>,
    link_changed: Receiver<()>,
    gate_changed: Receiver<()>,
    /// Takes the keys into use that were read for the connection.
    renew: Box<dyn Fn()>,
    /// Our startup event, until it is sent.
    announcement: Option<Vec<u8>>,
    tokens: Tokens,
}

/// Why the main thread looks no longer after what comes up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    /// What it waited for has come.
    Over,
    /// Every wait must end.
    Aborted,
    /// Its time was up.
    Late,
}

impl Main {
    /// Opens and closes the gate until the drain begins.
    fn serve(&mut self, signals: &Signals, log: &Log) {
        self.measure();
        self.tokens.look(&self.metrics);
        self.attend(signals, log, &signals.drain, &never());
    }

    /// Looks after connection, gate, tokens and log until `over` disconnects, or `late` says that this takes too long.
    fn attend(
        &mut self,
        signals: &Signals,
        log: &Log,
        over: &Receiver<Never>,
        late: &Receiver<Instant>,
    ) -> End {
        let look = self.tokens.tick();
        loop {
            select_biased! {
                recv(over) -> _ => return End::Over,
                recv(signals.abort) -> _ => return End::Aborted,
                recv(late) -> _ => return End::Late,
                recv(self.link_changed) -> _ => self.link(),
                recv(self.gate_changed) -> _ => self.measure(),
                recv(look) -> _ => self.tokens.look(&self.metrics),
                recv(signals.hangup) -> _ => {
                    log::warn!(component = "provisioner"; "Settings are read at start only: restart to change them");
                }
                recv(signals.reopen) -> _ => match log.reopen() {
                    Ok(()) => log::info!(component = "provisioner"; "Opened the log again"),
                    Err(error) => log::error!(component = "provisioner"; "Going on with the old log: {}", chain(&error)),
                },
            }
        }
    }

    /// The connection came or went.
    fn link(&mut self) {
        if let Some(Link::Up { .. }) = self.links.take() {
            (self.renew)();
            self.announce();
            if self.links.open() {
                // A full channel holds the request already; a closed one has nobody left who discovers.
                let _ = self.trigger.try_send(());
            }
        }
    }

    /// Publishes our startup event, once in the life of the process.
    fn announce(&mut self) {
        let Some(event) = &self.announcement else { return };
        let subject = subject::own_startup();
        let message = Publish { subject: &subject, reply: None, headers: &[], payload: event };
        let sent = self
            .transport
            .publish(&message)
            .and_then(|()| self.transport.flush(Instant::now() + ANNOUNCE_MAX));
        match sent {
            Ok(()) => self.announcement = None,
            Err(error) => {
                log::warn!(component = "provisioner"; "Could not publish startup event: {error}");
            }
        }
    }

    fn measure(&self) {
        let reasons = self.gate.reasons();
        for reason in Reason::ALL {
            let closed = reasons.contains(&reason);
            self.metrics.gate_closed.with_label_values(&[reason.label()]).set(i64::from(closed));
        }
        // The original knew these two only.
        let paused = reasons.iter().any(|r| matches!(r, Reason::Operator | Reason::Standby));
        self.metrics.paused.set(i64::from(paused));
    }

    /// Lets running nodes finish, within `drain_timeout`, and closes the connection.
    fn stop(
        &mut self,
        signals: &Signals,
        log: &Log,
        mut threads: Threads,
        drain_timeout: Duration,
        connection: &Connection,
    ) {
        self.gate.close(Reason::Draining);
        self.measure();
        // Whoever leaves does not say that it has come.
        self.announcement = None;
        log::info!(component = "provisioner"; "Shutting down: running nodes may finish");
        let late = at(Instant::now() + drain_timeout);
        match self.attend(signals, log, &threads.ended(), &late) {
            End::Over => connection.drain(Instant::now() + CLOSE_MAX, &signals.abort),
            End::Aborted => log::warn!(component = "provisioner"; "Shutting down at once"),
            End::Late => {
                log::warn!(component = "provisioner"; "Running nodes took longer than {drain_timeout:?}: shutting down at once");
                signals.stop().abort();
            }
        }
        self.gate.abort();
        connection.abort();
        threads.join();
        connection.join();
    }
}

/// Looks at the tokens we sign and log in with, also while there is nothing to use them for.
struct Tokens {
    signing: Option<SigningFiles>,
    login: Security,
    warned: Seldom,
    login_warned: Seldom,
    failed: Seldom,
}

impl Tokens {
    fn new(signing: Option<SigningFiles>, login: Security) -> Tokens {
        let said_at_start = || {
            let mut seldom = Seldom::every(EXPIRY_LOG);
            seldom.now(Instant::now());
            seldom
        };
        let (warned, login_warned) = (said_at_start(), said_at_start());
        Tokens { signing, login, warned, login_warned, failed: Seldom::every(SIGNING_LOG) }
    }

    /// When to look again.
    fn tick(&self) -> Receiver<Instant> {
        if self.signing.is_some() { tick(TOKENS_EVERY) } else { never() }
    }

    fn look(&mut self, metrics: &Metrics) {
        self.look_at_login(metrics);
        self.look_at_signing(metrics);
    }

    fn look_at_login(&mut self, metrics: &Metrics) {
        // If it can't be read, the next connection says so; this one has no need of it.
        let now = unix_time();
        let Some(expires) = self.login.expires(now) else { return };
        metrics.token_expires("login", expires);
        if let Some(warning) = self.login.expiry_warning(expires, now)
            && self.login_warned.now(Instant::now()).is_some()
        {
            log::warn!(component = "provisioner"; "{warning}");
        }
    }

    fn look_at_signing(&mut self, metrics: &Metrics) {
        let (Some(files), now) = (&self.signing, unix_time()) else { return };
        match files.read(now) {
            Ok(issuer) => {
                if let Some(expires) = issuer.expires() {
                    metrics.token_expires("signing", expires);
                }
                if let Some(warning) = files.expiry_warning(&issuer, now)
                    && self.warned.now(Instant::now()).is_some()
                {
                    log::warn!(component = "provisioner"; "{warning}");
                }
            }
            Err(error) => {
                if self.failed.now(Instant::now()).is_some() {
                    log::error!(component = "provisioner"; "No node gets a server JWT: {}", chain(&error));
                }
            }
        }
    }
}

/// The last change of the connection, for the main thread, and what it means for the gate.
///
/// Changes that come faster than it wakes up are one: only where we are now matters.
struct Links {
    gate: Arc<Gate>,
    /// Locked while the gate is opened or closed, so that the last change has the last word.
    latest: Mutex<Option<Link>>,
    changed: Sender<()>,
}

impl Links {
    fn new(gate: Arc<Gate>) -> (Arc<Links>, Receiver<()>) {
        let (changed, receiver) = bounded(1);
        (Arc::new(Links { gate, latest: Mutex::new(None), changed }), receiver)
    }

    /// Notes a change. A lost connection closes the gate at once: every request until the main thread wakes up would fail.
    fn put(&self, link: Link) {
        let mut latest = self.latest.lock();
        if let Link::Down { .. } = link {
            self.gate.close(Reason::Disconnected);
        }
        *latest = Some(link);
        drop(latest);
        let _ = self.changed.try_send(());
    }

    fn take(&self) -> Option<Link> {
        self.latest.lock().take()
    }

    /// Opens the gate after what was taken, unless there was another change since.
    fn open(&self) -> bool {
        let latest = self.latest.lock();
        let is_last = latest.is_none();
        if is_last {
            self.gate.open(Reason::Disconnected);
        }
        is_last
    }
}

/// Threads that end by themselves, and a channel that tells when all have.
struct Threads {
    handles: Vec<JoinHandle<()>>,
    alive: Option<Sender<Never>>,
    ended: Receiver<Never>,
}

impl Threads {
    fn new() -> Threads {
        let (alive, ended) = bounded(0);
        Threads { handles: Vec::new(), alive: Some(alive), ended }
    }

    fn start(
        &mut self,
        name: &'static str,
        work: impl FnOnce() + Send + 'static,
    ) -> Result<(), RunError> {
        let alive = self.alive.clone();
        let run = move || {
            work();
            drop(alive);
        };
        let builder = thread::Builder::new().name(name.to_owned());
        self.handles.push(builder.spawn(run).map_err(|error| RunError::Thread { name, error })?);
        Ok(())
    }

    /// Disconnects when all threads have ended; no other can be started.
    fn ended(&mut self) -> Receiver<Never> {
        self.alive = None;
        self.ended.clone()
    }

    fn join(self) {
        for handle in self.handles {
            // A panic there has ended the process already.
            drop(handle.join());
        }
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

/// Whether we may act, or stand by on purpose, and every reason why not.
fn readiness(
    gate: &Gate,
    connection: &Connection,
    last_success: &LastSuccess,
    patience: Duration,
) -> Readiness {
    let closed = gate.reasons();
    let mut ready = closed.iter().all(|reason| *reason == Reason::Standby);
    let mut reasons: Vec<String> = closed.iter().map(ToString::to_string).collect();
    if closed.contains(&Reason::Disconnected)
        && let Some(error) = connection.last_error()
    {
        reasons.push(format!("broker: {}", error.text));
    }
    let age = last_success.age();
    if closed.is_empty() && age > patience {
        ready = false;
        reasons.push(format!("no discovery has succeeded for {} s", age.as_secs()));
    }
    Readiness { ready, reasons }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transport::memory::Memory;

    fn up() -> Link {
        Link::Up { server: "nats://broker:4222".into(), first: true }
    }

    fn down() -> Link {
        Link::Down { reason: "gone".into() }
    }

    /// A main thread that stands still until the test calls it.
    struct Bench {
        main: Main,
        memory: Arc<Memory>,
        triggered: Receiver<()>,
    }

    impl Bench {
        fn new() -> Bench {
            let memory = Memory::new();
            let gate = Arc::new(Gate::new());
            let (links, link_changed) = Links::new(gate.clone());
            let (trigger, triggered) = bounded(1);
            let main = Main {
                gate_changed: gate.watch(),
                gate,
                metrics: Metrics::new("test"),
                transport: memory.clone(),
                trigger,
                links,
                link_changed,
                renew: Box::new(|| {}),
                announcement: Some(b"we are here".to_vec()),
                tokens: Tokens::new(None, Security::Off),
            };
            Bench { main, memory, triggered }
        }

        fn put(&self, link: Link) {
            self.main.links.put(link);
        }

        /// Takes all the changes that wait.
        fn look(&mut self) {
            while self.main.link_changed.try_recv().is_ok() {
                self.main.link();
            }
        }

        fn is_open(&self) -> bool {
            self.main.gate.begin().is_ok()
        }
    }

    #[test]
    fn a_connection_opens_the_gate_and_starts_a_discovery_and_its_loss_closes_it_at_once() {
        let mut bench = Bench::new();
        bench.put(up());
        bench.look();
        assert!(bench.is_open());
        assert_eq!(bench.triggered.try_iter().count(), 1);
        bench.put(down());
        assert!(!bench.is_open(), "before the main thread has woken up");
        bench.look();
        assert!(!bench.is_open());
        bench.put(up());
        bench.look();
        assert!(bench.is_open());
        assert_eq!(bench.memory.published().len(), 1, "we announce ourselves once");
    }

    #[test]
    fn a_connection_that_is_lost_while_we_announce_ourselves_never_opens_the_gate() {
        let mut bench = Bench::new();
        let links = bench.main.links.clone();
        bench.memory.on_publish(move |_| {
            links.put(down());
            Vec::new()
        });
        bench.put(up());
        bench.main.link_changed.recv().unwrap();
        bench.main.link();
        assert!(!bench.is_open());
        assert!(bench.triggered.is_empty());
        bench.look();
        assert!(!bench.is_open());
        bench.put(down());
        bench.put(up());
        bench.look();
        assert!(bench.is_open(), "the last change counts");
    }
}
