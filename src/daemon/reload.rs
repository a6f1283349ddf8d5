//! Reads the configuration again while the daemon runs, for a SIGHUP or an operator: all of it takes effect, or nothing does.
//!
//! What a reload accepts is what a start would accept, so both files are read and checked as a whole. Settings that are read
//! at start only must say what they said then. One reload at a time, on a thread of its own: files and names may take their
//! time, and the fleet need not wait for them.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, after, bounded, select_biased};

use crate::clock::unix_time;
use crate::config::choria::ChoriaConfig;
use crate::config::reload::{Changes, client_changes};
use crate::config::{Config, Settings, Source};
use crate::daemon::threads::Threads;
use crate::daemon::{RunError, Shared};
use crate::descriptors;
use crate::errors::chain;
use crate::fleet::audit::{self, Audit, AuditFile, Trail};
use crate::fleet::current::Current;
use crate::fleet::registry;
use crate::fleet::roster::Roster;
use crate::logging::Log;
use crate::metrics::Metrics;
use crate::ops::reload::{Asking, ENDING, NotReloaded, Outcome, Reloaded, UNCHANGED};
use crate::ops::systemd::Systemd;
use crate::shutdown::{Never, is_over};

/// Operators that wait for a reload: as many as can be connected to the admin socket.
const WISHES_MAX: usize = 8;

/// How long the end waits for a reload that reads its files.
const END_MAX: Duration = Duration::from_secs(1);

/// A site without provisioning JWTs is as it was meant to be, so a start says nothing of it; one that had them may have lost a line.
const UNVERIFIED: &str = "features.jwt: was on and is off: nodes show no provisioning JWT any more, and anybody may claim to be one of them";

/// The thread, for as long as the daemon runs.
pub struct Reloading {
    asking: Asking,
    running: Sender<Never>,
    thread: Threads,
}

impl Reloading {
    /// Starts it; `hangup` has a message when there was a SIGHUP.
    pub(super) fn start(
        shared: &Shared,
        source: Source,
        log: &Log,
        hangup: Receiver<()>,
    ) -> Result<Reloading, RunError> {
        let (wishes, wished) = bounded(WISHES_MAX);
        let (running, stop) = bounded(0);
        shared.metrics.config_last_reload_successful.set(1);
        shared.metrics.config_last_reload_timestamp_seconds.set(unix_time());
        let reloader = Reloader {
            source,
            choria: shared.choria.clone(),
            current: shared.current.clone(),
            roster: shared.roster.clone(),
            discover: shared.discover.clone(),
            audit: shared.audit.clone(),
            instance: shared.access.instance.as_str().to_owned(),
            metrics: shared.metrics.clone(),
            log: log.clone(),
            systemd: shared.systemd.clone(),
            hangup,
            wished,
            drain: shared.drain.clone(),
            stop: stop.clone(),
        };
        let mut thread = Threads::new();
        thread.start("reload", move || reloader.run())?;
        Ok(Reloading { asking: Asking::new(wishes, stop), running, thread })
    }

    /// How operators ask for a reload.
    pub fn asking(&self) -> Asking {
        self.asking.clone()
    }

    /// Ends it. A reload that still reads its files is left behind: it takes no effect any more.
    pub fn stop(mut self, abort: &Receiver<Never>) {
        drop(self.running);
        select_biased! {
            recv(self.thread.ended()) -> _ => {}
            recv(abort) -> _ => {}
            recv(after(END_MAX)) -> _ => {}
        }
    }
}

/// What the thread works with.
struct Reloader {
    source: Source,
    /// From Choria's client file, as it was at the start.
    choria: ChoriaConfig,
    current: Arc<Current>,
    roster: Arc<Roster>,
    discover: Sender<()>,
    audit: Arc<Trail>,
    /// This process among all that wrote to the audit log.
    instance: String,
    metrics: Arc<Metrics>,
    log: Log,
    systemd: Arc<Systemd>,
    hangup: Receiver<()>,
    wished: Receiver<Sender<Outcome>>,
    /// Nothing is reloaded when the process is ending.
    drain: Receiver<Never>,
    stop: Receiver<Never>,
}

impl Reloader {
    /// Runs until it is told to stop.
    fn run(self) {
        loop {
            select_biased! {
                recv(self.stop) -> _ => return,
                recv(self.wished) -> wish => if let Ok(outcome) = wish {
                    // Whoever asked may have lost patience.
                    let _ = outcome.try_send(self.reload());
                },
                recv(self.hangup) -> _ => drop(self.reload()),
            }
        }
    }

    /// Reloads, and tells everybody what came of it.
    fn reload(&self) -> Outcome {
        if let Err(refused) = self.refuse_at_the_end() {
            log::warn!(component = "config"; "Settings not reloaded: {refused}");
            return Err(refused);
        }
        log::info!(component = "config"; "Reading the settings again");
        self.systemd.reloading();
        let mut outcome = self.try_reload();
        self.systemd.ready();
        self.metrics.config_last_reload_successful.set(i64::from(outcome.is_ok()));
        match &mut outcome {
            Ok(Reloaded { changed, warnings }) => {
                self.metrics.config_last_reload_timestamp_seconds.set(unix_time());
                for warning in warnings.iter() {
                    log::warn!(component = "config"; "{warning}");
                }
                let changed =
                    if changed.is_empty() { "nothing".into() } else { changed.join(", ") };
                log::info!(component = "config"; "Settings reloaded, changed: {changed}");
            }
            Err(refused) => {
                for reason in &refused.0 {
                    log::error!(component = "config"; "{reason}");
                }
                log::error!(component = "config"; "{UNCHANGED}");
                self.current.refused(&refused.0);
                // Whoever asked may not see the log.
                refused.0.push(UNCHANGED.to_owned());
            }
        }
        outcome
    }

    fn try_reload(&self) -> Outcome {
        let Settings { config, choria, warnings, .. } = self.source.load().map_err(|report| {
            NotReloaded(report.errors.iter().map(ToString::to_string).collect())
        })?;
        let before = self.current.config();
        let changes = Changes::between(&before, &config);
        self.refuse_what_needs_a_restart(&changes, &choria)?;
        let audit = match changes.followed.contains(&"audit_log") {
            true => AuditChange::To(self.open_audit(&config)?),
            false => AuditChange::None,
        };
        // Reading may have taken a while.
        self.refuse_at_the_end()?;
        let mut warnings: Vec<String> = warnings.iter().map(ToString::to_string).collect();
        if before.features.jwt && !config.features.jwt {
            warnings.push(format!("{}: {UNVERIFIED}", self.source.yaml.display()));
        }
        self.put_in_force(config, audit);
        let changed = changes.followed.into_iter().map(str::to_owned).collect();
        Ok(Reloaded { changed, warnings })
    }

    fn refuse_at_the_end(&self) -> Result<(), NotReloaded> {
        match is_over(&self.drain) {
            true => Err(NotReloaded(vec![ENDING.into()])),
            false => Ok(()),
        }
    }

    fn refuse_what_needs_a_restart(
        &self,
        changes: &Changes,
        choria: &ChoriaConfig,
    ) -> Result<(), NotReloaded> {
        let Source { yaml, client, .. } = &self.source;
        let own: Vec<String> = changes.needs_restart.iter().map(|key| (*key).to_owned()).collect();
        let mut reasons = Vec::new();
        for (file, keys) in [(yaml, own), (client, client_changes(&self.choria, choria))] {
            if !keys.is_empty() {
                let keys = keys.join(", ");
                reasons.push(format!("{}: a change needs a restart: {keys}", file.display()));
            }
        }
        if reasons.is_empty() { Ok(()) } else { Err(NotReloaded(reasons)) }
    }

    /// The audit log of `config`, ready to be written to.
    fn open_audit(&self, config: &Config) -> Result<Option<(Audit, audit::Running)>, NotReloaded> {
        let Some(path) = &config.audit_log else { return Ok(None) };
        let file = AuditFile::open(path).map_err(|error| NotReloaded(vec![chain(&error)]))?;
        let started = file.start(&self.instance, self.metrics.clone());
        started.map(Some).map_err(|error: io::Error| {
            NotReloaded(vec![format!("could not start thread audit: {error}")])
        })
    }

    /// Nothing can go wrong from here on.
    fn put_in_force(&self, config: Config, audit: AuditChange) {
        descriptors::raise(config.workers);
        self.log.change_level(config.loglevel);
        let limits = registry::Limits::new(config.interval, config.retry_max);
        self.current.put(self.current.context().with(config));
        self.roster.registry().reload(limits, Instant::now());
        // What nodes failed of may be what was changed. A full channel holds the request already; without a receiver we are ending.
        let _ = self.discover.try_send(());
        match audit {
            AuditChange::None => {}
            AuditChange::To(next) => self.audit.replace(next),
        }
    }
}

/// What a reload does to the audit log.
enum AuditChange {
    None,
    /// The new one, ready to be written to; or none from now on.
    To(Option<(Audit, audit::Running)>),
}
