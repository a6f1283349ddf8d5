//! Who of several provisioners acts: the one that is elected, if there is an election.

use std::sync::Arc;

use crossbeam_channel::{Sender, bounded};

use crate::fleet::election::{self, Election, View};
use crate::fleet::roster::Queues;
use crate::fleet::threads::Threads;
use crate::fleet::{RunError, Shared};
use crate::protocol::RequestId;
use crate::rpc;
use crate::shutdown::Never;

/// Our part among several.
pub struct Cluster {
    /// The thread that campaigns, if there is an election.
    pub candidate: Option<Candidate>,
    /// What others may see of the election.
    pub election: Option<Arc<View>>,
}

/// The thread that campaigns: it ends after all others.
pub struct Candidate {
    /// Dropped when no node is in hand any more and none will be.
    pub busy: Sender<Never>,
    pub thread: Threads,
}

impl Cluster {
    /// Joins the others, if there are any: closes the gate until we may act. Comes before anybody asks the gate.
    pub fn join(shared: &Shared, queues: &Queues) -> Result<Cluster, RunError> {
        if !shared.current.config().leader_election {
            return Ok(Cluster { candidate: None, election: None });
        }
        let access = &shared.access;
        let (busy, idle) = bounded(0);
        let (view, step_down) = View::new();
        let setup = election::Setup {
            transport: access.transport.clone(),
            rpc: access.rpc.clone(),
            identity: shared.choria.identity.clone(),
            instance: access.instance.as_str().to_owned(),
            gate: access.gate.clone(),
            roster: shared.roster.clone(),
            queues: queues.clone(),
            metrics: shared.metrics.clone(),
            discover: shared.discover.clone(),
            view: view.clone(),
            step_down,
            drain: shared.drain.clone(),
            idle,
            abort: shared.abort.clone(),
        };
        let replies = RequestId::random();
        let election = Election::new(setup, replies.as_str().to_owned())
            .map_err(|error| RunError::Rpc(rpc::StartError(error)))?;
        let mut thread = Threads::new();
        thread.start("election", move || election.run())?;
        Ok(Cluster { candidate: Some(Candidate { busy, thread }), election: Some(view) })
    }
}
