//! What operators see of us and give us their commands through: the monitor port and the admin socket.

use std::sync::Arc;
use std::time::Duration;

use crate::daemon::cluster::Views;
use crate::daemon::pipeline::Pipeline;
use crate::daemon::reload::Reloading;
use crate::daemon::{RunError, Shared};
use crate::fleet::election;
use crate::ops::command::Operator;
use crate::ops::http::{self, Monitor};
use crate::ops::socket::{self, Socket};
use crate::ops::status::{Observer, Sources};

/// How long a worker may have a node beyond its time. A request that counts whatever the time is tried so often, with
/// `discovery_timeout` for each try.
const WORKER_SLACK: Duration = Duration::from_secs(5 * 60);
const RESTART_TRIES: u32 = 5;

/// Each is served on threads of its own, if there is one.
pub struct Surfaces {
    admin: Option<socket::Running>,
    monitor: Option<http::Running>,
}

impl Surfaces {
    /// Serves what has been bound.
    pub fn serve(
        shared: &Shared,
        observer: &Arc<Observer>,
        election: Option<Arc<election::View>>,
        reloading: &Reloading,
        monitor: Option<Monitor>,
        admin: Option<Socket>,
    ) -> Result<Surfaces, RunError> {
        let serve = |monitor: Monitor| {
            let serving = monitor.serve(shared.metrics.clone(), observer.clone());
            serving.map_err(|error| RunError::Thread { name: "monitor", error })
        };
        let monitor = monitor.map(serve).transpose()?;
        let serve = |socket: Socket| {
            let operator = Operator {
                shown: observer.clone(),
                gate: shared.access.gate.clone(),
                roster: shared.roster.clone(),
                discover: shared.discover.clone(),
                election: election.clone(),
                reload: reloading.asking(),
            };
            let serving = socket.serve(Arc::new(operator));
            serving.map_err(|error| RunError::Thread { name: "admin", error })
        };
        let admin = admin.map(serve).transpose()?;
        Ok(Surfaces { admin, monitor })
    }

    /// Lets go whoever is being served.
    pub fn close(self) {
        drop(self.admin);
        if let Some(monitor) = self.monitor {
            monitor.stop();
        }
    }
}

/// Sees all that we are doing.
pub fn observer(
    shared: &Shared,
    pipeline: &Pipeline,
    views: Views,
    version: &'static str,
) -> Arc<Observer> {
    let access = &shared.access;
    Arc::new(Observer::new(Sources {
        version,
        identity: shared.choria.identity.to_string(),
        instance: access.instance.as_str().to_owned(),
        site: shared.current.config().site.clone(),
        current: shared.current.clone(),
        gate: access.gate.clone(),
        roster: shared.roster.clone(),
        desks: pipeline.desks.clone(),
        history: pipeline.history.clone(),
        metrics: shared.metrics.clone(),
        last_discovery: pipeline.last_discovery.clone(),
        skew: pipeline.skew.clone(),
        uplink: access.uplink.clone(),
        election: views.election,
        peers: views.peers,
        pulses: access.pulses.clone(),
        worker_slack: WORKER_SLACK + shared.choria.discovery_timeout * RESTART_TRIES,
        broker_error: Box::new({
            let connection = access.connection.clone();
            move || connection.last_error()
        }),
    }))
}
