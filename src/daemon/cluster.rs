//! Who of several provisioners acts: the one that is elected, each for its share of the nodes, or we alone.

use std::sync::Arc;

use crossbeam_channel::{Sender, bounded};

use crate::config::Cooperation;
use crate::daemon::threads::Threads;
use crate::daemon::{RunError, Shared};
use crate::fleet::election::{self, Election};
use crate::fleet::peers::{self, Peers};
use crate::fleet::roster::Queues;
use crate::fleet::standing::{Hands, Setup};
use crate::protocol::RequestId;
use crate::pulse::PIECE_MAX;
use crate::rpc;
use crate::shutdown::Never;

/// Our part among several.
pub struct Cluster {
    /// The thread that decides whether we act, unless we are alone.
    pub member: Option<Member>,
    /// What others may see of it.
    pub views: Views,
}

/// What others may see of our part among several.
#[derive(Debug, Clone, Default)]
pub struct Views {
    /// Of the election, if there is one.
    pub election: Option<Arc<election::View>>,
    /// Of those that share the nodes with us, if that is how it is done.
    pub peers: Option<Arc<peers::View>>,
}

/// The thread that decides whether we act: it ends after all others.
pub struct Member {
    /// Dropped when no node is in hand any more and none will be.
    pub busy: Sender<Never>,
    pub thread: Threads,
}

impl Cluster {
    /// Joins the others, if there are any: closes the gate until we may act. Comes before anybody asks the gate.
    pub fn join(shared: &Shared, queues: &Queues) -> Result<Cluster, RunError> {
        let (busy, idle) = bounded(0);
        let hands = Hands {
            roster: shared.roster.clone(),
            queues: queues.clone(),
            drain: shared.drain.clone(),
            idle,
        };
        let mut thread = Threads::new();
        let access = &shared.access;
        let setup = Setup {
            transport: access.transport.clone(),
            rpc: access.rpc.clone(),
            identity: shared.choria.identity.clone(),
            instance: access.instance,
            gate: access.gate.clone(),
            hands,
            metrics: shared.metrics.clone(),
            discover: shared.discover.clone(),
            abort: shared.abort.clone(),
        };
        let pulses = &access.pulses;
        let views = match shared.current.config().cooperation {
            Cooperation::Alone => {
                return Ok(Cluster { member: None, views: Views::default() });
            }
            Cooperation::Elected => {
                let election = Election::new(setup, RequestId::random().as_str().to_owned())
                    .map_err(|error| RunError::Rpc(rpc::StartError(error)))?;
                let view = election.view();
                thread.start_attended(pulses, "election", PIECE_MAX, move || election.run())?;
                Views { election: Some(view), peers: None }
            }
            Cooperation::ActiveActive => {
                let peers = Peers::new(setup);
                let view = peers.view();
                thread.start_attended(pulses, "peers", PIECE_MAX, move || peers.run())?;
                Views { election: None, peers: Some(view) }
            }
        };
        Ok(Cluster { member: Some(Member { busy, thread }), views })
    }
}
