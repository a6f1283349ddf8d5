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
    state: RwLock<State>,
    watchers: Mutex<Vec<Sender<()>>>,
}

/// What changes with a reload, all at once.
struct State {
    context: Arc<Context>,
    since: Instant,
    /// When and why the last reload was refused, if it was.
    refused: Option<(Instant, String)>,
}

impl State {
    fn new(context: Context) -> State {
        State { context: Arc::new(context), since: Instant::now(), refused: None }
    }
}

impl Current {
    /// In force from the start.
    pub fn new(context: Context) -> Current {
        Current { state: RwLock::new(State::new(context)), watchers: Mutex::default() }
    }

    /// How long it has been in force.
    pub fn age(&self) -> Duration {
        self.state.read().since.elapsed()
    }

    /// As it is now. The lock is held for the copy of a pointer.
    pub fn context(&self) -> Arc<Context> {
        self.state.read().context.clone()
    }

    /// The settings as they are now.
    pub fn config(&self) -> Arc<Config> {
        self.state.read().context.config.clone()
    }

    /// It stays as it is: a reload was refused.
    pub fn refused(&self, reasons: &[String]) {
        let mut text = reasons.iter().take(REASONS_KEPT).cloned().collect::<Vec<_>>().join("; ");
        if let Some(more) = reasons.len().checked_sub(REASONS_KEPT).filter(|more| *more > 0) {
            text += &format!("; and {more} more");
        }
        self.state.write().refused = Some((Instant::now(), text));
    }

    /// When and why the last reload was refused; nothing if it was not.
    pub fn last_refused(&self) -> Option<(Instant, String)> {
        self.state.read().refused.clone()
    }

    /// A channel with a message when it has changed; changes that come faster than they are looked at are one.
    pub fn watch(&self) -> Receiver<()> {
        let (sender, receiver) = bounded(1);
        self.watchers.lock().push(sender);
        receiver
    }

    /// From now on this is in force.
    pub fn put(&self, context: Context) {
        *self.state.write() = State::new(context);
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
                last_pair: Default::default(),
                discovery_timeout: Duration::from_secs(2),
                abort: never(),
            }))
        }
    }
}
