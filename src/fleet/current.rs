//! What is in force now: whoever begins a node takes it as it is and keeps it to the end, so that a reload never changes the
//! rules for a node halfway.
//!
//! Threads that keep something of it for themselves, such as a timer, hear of each change and look again.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, bounded};
use parking_lot::{Mutex, RwLock};

use crate::config::Config;
use crate::node::Context;

/// Reasons of a refused reload that are shown; the log has all.
const REASONS_KEPT: usize = 3;

/// What nodes are provisioned with, until the next reload.
pub struct Current {
    context: RwLock<Arc<Context>>,
    since: Mutex<Instant>,
    /// When and why the last reload was refused, if it was.
    refused: Mutex<Option<(Instant, String)>>,
    watchers: Mutex<Vec<Sender<()>>>,
}

impl Current {
    /// In force from the start.
    pub fn new(context: Context) -> Current {
        let (context, since) = (RwLock::new(Arc::new(context)), Mutex::new(Instant::now()));
        Current { context, since, refused: Mutex::default(), watchers: Mutex::default() }
    }

    /// How long it has been in force.
    pub fn age(&self) -> Duration {
        self.since.lock().elapsed()
    }

    /// As it is now. The lock is held for the copy of a pointer.
    pub fn context(&self) -> Arc<Context> {
        self.context.read().clone()
    }

    /// The settings as they are now.
    pub fn config(&self) -> Arc<Config> {
        self.context.read().config.clone()
    }

    /// It stays as it is: a reload was refused.
    pub fn refused(&self, reasons: &[String]) {
        let mut text = reasons.iter().take(REASONS_KEPT).cloned().collect::<Vec<_>>().join("; ");
        if let Some(more) = reasons.len().checked_sub(REASONS_KEPT).filter(|more| *more > 0) {
            text += &format!("; and {more} more");
        }
        *self.refused.lock() = Some((Instant::now(), text));
    }

    /// When and why the last reload was refused; nothing if it was not.
    pub fn last_refused(&self) -> Option<(Instant, String)> {
        self.refused.lock().clone()
    }

    /// A channel with a message when it has changed; changes that come faster than they are looked at are one.
    pub fn watch(&self) -> Receiver<()> {
        let (sender, receiver) = bounded(1);
        self.watchers.lock().push(sender);
        receiver
    }

    /// From now on this is in force.
    pub fn put(&self, context: Context) {
        *self.context.write() = Arc::new(context);
        *self.since.lock() = Instant::now();
        *self.refused.lock() = None;
        for watcher in self.watchers.lock().iter() {
            // A full channel holds the news already; one without a receiver has nobody to tell.
            let _ = watcher.try_send(());
        }
    }
}

#[cfg(test)]
mod testing {
    use crossbeam_channel::never;

    use super::*;
    use crate::config::report::Report;
    use crate::gate::Gate;
    use crate::node;
    use crate::rpc::testing::Net;

    impl Current {
        /// As a daemon with the settings in `yaml` begins.
        pub(crate) fn testing(yaml: &str, net: &Net, gate: &Arc<Gate>) -> Arc<Current> {
            let config = Config::parse(yaml.as_bytes(), &mut Report::default()).unwrap();
            let helper = node::helper(&config, &net.metrics);
            Arc::new(Current::new(Context {
                rpc: net.rpc.clone(),
                helper: Arc::new(helper),
                gate: gate.clone(),
                metrics: net.metrics.clone(),
                config: Arc::new(config),
                last_key: Default::default(),
                discovery_timeout: Duration::from_secs(2),
                abort: never(),
            }))
        }
    }
}
