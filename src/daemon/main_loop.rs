//! The main thread: opens and closes the gate as the connection comes and goes, and looks after tokens and log until the
//! drain has ended.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, at, never, select_biased, tick};

use crate::clock::unix_time;
use crate::daemon::Shared;
use crate::daemon::cluster::Member;
use crate::daemon::links::Links;
use crate::daemon::threads::Threads;
use crate::daemon::tokens::Tokens;
use crate::errors::chain;
use crate::fleet::audit::Trail;
use crate::fleet::current::Current;
use crate::gate::{Gate, Reason};
use crate::logging::Log;
use crate::metrics::Metrics;
use crate::ops::status::Show;
use crate::ops::systemd::Systemd;
use crate::protocol::{self, lifecycle, subject};
use crate::pulse::{self, PIECE_MAX, Pulses};
use crate::shutdown::{Never, Signals};
use crate::transport::connection::Connection;
use crate::transport::{Link, Publish, Transport};

/// How long the broker may take for what was sent last, when the connection is closed.
const CLOSE_MAX: Duration = Duration::from_secs(5);
/// What the end takes beside the drain at most: the connection, the audit log and helpers have five seconds each.
const END_MAX: Duration = Duration::from_secs(20);
/// How long our startup event may take to reach the broker.
const ANNOUNCE_MAX: Duration = Duration::from_secs(2);

/// The main thread's state.
pub struct MainLoop {
    pub gate: Arc<Gate>,
    pub metrics: Arc<Metrics>,
    pub transport: Arc<dyn Transport>,
    pub trigger: Sender<()>,
    pub links: Arc<Links>,
    pub link_changed: Receiver<()>,
    pub gate_changed: Receiver<()>,
    /// Takes the keys into use that were read for the connection.
    pub renew: Box<dyn Fn()>,
    /// Our startup event, until it is sent.
    pub announcement: Option<Vec<u8>>,
    pub tokens: Tokens,
    /// Told to open its file again together with the log.
    pub audit: Arc<Trail>,
    pub current: Arc<Current>,
    pub settings_changed: Receiver<()>,
    /// Told how we are.
    pub systemd: Arc<Systemd>,
    /// Says how we are.
    pub shown: Arc<dyn Show>,
    /// Which threads make progress; we are one of them.
    pub pulses: Arc<Pulses>,
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

impl MainLoop {
    /// Ready to serve; `version` is ours, for our startup event.
    pub fn new(shared: &Shared, version: &str, shown: Arc<dyn Show>) -> MainLoop {
        let access = &shared.access;
        let (rpc, keychain) = (access.rpc.clone(), access.keychain.clone());
        let renew = move || keychain.renew(&rpc);
        let (rpc, keychain) = (access.rpc.clone(), access.keychain.clone());
        let refresh = move || keychain.refresh(&rpc);
        let (signing, security) =
            (shared.current.config().signing.clone(), shared.choria.security.clone());
        MainLoop {
            gate: access.gate.clone(),
            metrics: shared.metrics.clone(),
            transport: access.transport.clone(),
            trigger: shared.discover.clone(),
            links: access.links.clone(),
            link_changed: access.link_changed.clone(),
            gate_changed: access.gate.watch(),
            renew: Box::new(renew),
            announcement: Some(lifecycle::startup_event(
                &shared.choria.identity,
                version,
                &protocol::event_id(),
                unix_time(),
            )),
            tokens: Tokens::new(signing, security, Box::new(refresh)),
            audit: shared.audit.clone(),
            current: shared.current.clone(),
            settings_changed: shared.current.watch(),
            systemd: shared.systemd.clone(),
            shown,
            pulses: access.pulses.clone(),
        }
    }

    /// Opens and closes the gate until the drain begins.
    pub fn serve(&mut self, signals: &Signals, log: &Log) {
        self.pulses.attend("main", PIECE_MAX);
        self.measure();
        self.tokens.look(&self.metrics);
        self.systemd.ready();
        self.beat();
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
        let mut look = self.tokens.tick();
        let beat = self.systemd.every().map_or_else(never, tick);
        loop {
            pulse::waits();
            select_biased! {
                recv(over) -> _ => return End::Over,
                recv(signals.abort) -> _ => return End::Aborted,
                recv(late) -> _ => return End::Late,
                recv(self.link_changed) -> _ => self.link(),
                recv(self.gate_changed) -> _ => {
                    self.measure();
                    self.beat();
                }
                recv(beat) -> _ => self.beat(),
                recv(look) -> _ => {
                    pulse::works();
                    self.tokens.look(&self.metrics);
                }
                recv(self.settings_changed) -> _ => {
                    pulse::works();
                    self.tokens.adapt(&self.current.config(), &self.metrics);
                    look = self.tokens.tick();
                }
                recv(signals.reopen) -> _ => self.reopen(log),
            }
        }
    }

    /// Tells systemd how we are: not that we are alive while a thread makes no progress.
    fn beat(&self) {
        if self.systemd.every().is_none() {
            return;
        }
        pulse::works();
        let stuck = self.shown.stuck();
        for what in &stuck {
            log::error!(component = "provisioner"; "Not alive: {what}");
        }
        self.systemd.beat(&self.shown.status(), stuck.is_empty());
    }

    /// The files we write to were renamed.
    fn reopen(&self, log: &Log) {
        pulse::works();
        match log.reopen() {
            Ok(()) => log::info!(component = "provisioner"; "Opened the log again"),
            Err(error) => {
                log::error!(component = "provisioner"; "Going on with the old log: {}", chain(&error));
            }
        }
        self.audit.reopen();
    }

    /// The connection came or went.
    fn link(&mut self) {
        pulse::works();
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
        let message = Publish::new(&subject, event);
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
        pulse::works();
        let reasons = self.gate.reasons();
        for reason in Reason::ALL {
            let closed = reasons.contains(&reason);
            self.metrics.gate_closed.with_label_values(&[reason.label()]).set(i64::from(closed));
        }
        // The original knew but operators and elections. Whoever listens waits for others, too.
        let is_pause = |reason: &Reason| {
            matches!(reason, Reason::Operator | Reason::Standby | Reason::Listening)
        };
        let paused = reasons.iter().any(is_pause);
        self.metrics.paused.set(i64::from(paused));
    }

    /// Lets running nodes finish, within `drain_timeout`, hands leadership or our share over and closes the connection.
    pub fn stop(
        &mut self,
        signals: &Signals,
        log: &Log,
        mut threads: Threads,
        member: Option<Member>,
        connection: &Connection,
    ) {
        let drain_timeout = self.current.config().drain_timeout;
        self.systemd.stopping(drain_timeout + END_MAX);
        self.gate.close(Reason::Draining);
        self.measure();
        self.beat();
        // Whoever leaves does not say that it has come.
        self.announcement = None;
        log::info!(component = "provisioner"; "Shutting down: running nodes may finish");
        let late = at(Instant::now() + drain_timeout);
        let mut end = self.attend(signals, log, &threads.ended(), &late);
        let last = member.map(|Member { busy, mut thread }| {
            drop(busy);
            if end == End::Over {
                end = self.attend(signals, log, &thread.ended(), &late);
            }
            thread
        });
        match end {
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
        if let Some(last) = last {
            last.join();
        }
        connection.join();
    }
}

#[cfg(test)]
mod tests {
    use crossbeam_channel::bounded;

    use super::*;
    use crate::config::security::Security;
    use crate::ops::status::testing::Still;
    use crate::ops::systemd::testing::Manager;
    use crate::rpc::testing::Net;
    use crate::transport::memory::Memory;

    fn up() -> Link {
        Link::Up { broker: "nats://broker:4222".into(), first: true }
    }

    fn down() -> Link {
        Link::Down { reason: "gone".into() }
    }

    /// A main thread that stands still until the test calls it.
    struct Bench {
        main: MainLoop,
        memory: Arc<Memory>,
        triggered: Receiver<()>,
    }

    impl Bench {
        fn new() -> Bench {
            let memory = Memory::new();
            let gate = Arc::new(Gate::new());
            let current = Current::testing("helper: /bin/true\n", &Net::new(), &gate);
            let (links, link_changed) = Links::new(gate.clone());
            let (trigger, triggered) = bounded(1);
            let main = MainLoop {
                gate_changed: gate.watch(),
                gate,
                metrics: Metrics::new("test"),
                transport: memory.clone(),
                trigger,
                links,
                link_changed,
                renew: Box::new(|| {}),
                announcement: Some(b"we are here".to_vec()),
                tokens: Tokens::new(None, Security::Off, Box::new(|| Ok(None))),
                audit: Arc::default(),
                settings_changed: current.watch(),
                current,
                systemd: Arc::new(Systemd::default()),
                shown: Arc::new(Still::default()),
                pulses: Arc::default(),
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
    fn the_watchdog_is_fed_only_while_every_thread_makes_progress() {
        let (mut bench, manager) = (Bench::new(), Manager::new());
        bench.main.systemd = Arc::new(manager.systemd(&[("WATCHDOG_USEC", "60000000")]));
        bench.main.beat();
        assert!(manager.heard().starts_with("WATCHDOG=1\nSTATUS="));
        bench.main.shown = Arc::new(Still(vec!["thread prober makes no progress".into()]));
        bench.main.beat();
        assert!(manager.heard().starts_with("STATUS="));
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
