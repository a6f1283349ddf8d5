//! Our access to the nodes: the connection to the broker, the keys it is made with, and requests over it.
//!
//! All that somebody needs who asks nodes and provisions none.

use std::sync::Arc;

use crossbeam_channel::Receiver;

use crate::clock::unix_time;
use crate::config::choria::ChoriaConfig;
use crate::daemon::RunError;
use crate::daemon::links::Links;
use crate::gate::Gate;
use crate::keychain::Keychain;
use crate::metrics::Metrics;
use crate::ops::status::Uplink;
use crate::protocol::ksuid::Ksuid;
use crate::protocol::random_bytes;
use crate::pulse::Pulses;
use crate::rpc::Rpc;
use crate::transport::Transport;
use crate::transport::connection::{Connection, Options};

/// The connection and what stands on it. The gate is closed until somebody opens it, see `Links::open`.
pub struct Access {
    /// Every reason not to act, at first that we are not connected.
    pub gate: Arc<Gate>,
    /// The connection, to close it.
    pub connection: Arc<Connection>,
    /// The connection, to send and to hear.
    pub transport: Arc<dyn Transport>,
    /// Requests to nodes.
    pub rpc: Arc<Rpc>,
    /// This process among all that ever had its name.
    pub instance: Ksuid,
    /// Reads our keys.
    pub keychain: Arc<Keychain>,
    /// How the connection came and went.
    pub links: Arc<Links>,
    /// A message when it did.
    pub link_changed: Receiver<()>,
    /// The same for people.
    pub uplink: Arc<Uplink>,
    /// Which threads make progress; those of the connection are the first.
    pub pulses: Arc<Pulses>,
}

impl Access {
    /// Begins to connect, and returns at once.
    ///
    /// # Errors
    ///
    /// [`RunError`] if our keys can't be used, or the system refuses us what we need.
    pub fn open(choria: &ChoriaConfig, metrics: &Arc<Metrics>) -> Result<Access, RunError> {
        let gate = Arc::new(Gate::new());
        metrics.lease_from({
            let lease = gate.lease();
            move || lease.left()
        });
        let (links, link_changed) = Links::new(gate.clone());
        let (uplink, pulses) = (Arc::new(Uplink::new()), Arc::new(Pulses::new()));
        let (keychain, codec) = Keychain::open(choria).map_err(RunError::Keys)?;
        let options = Options {
            credentials: Box::new({
                let keychain = keychain.clone();
                move || keychain.credentials()
            }),
            connect_timeout: choria.connect_timeout,
            pulses: pulses.clone(),
            on_link: Box::new({
                let (links, uplink) = (links.clone(), uplink.clone());
                move |link| {
                    uplink.put(&link);
                    links.put(link);
                }
            }),
            ..Options::new(choria.brokers.clone(), &choria.connection_name, metrics.clone())
        };
        let connection = Connection::start(options).map_err(RunError::Connection)?;
        let transport: Arc<dyn Transport> = connection.clone();
        let instance = Ksuid::new(unix_time(), random_bytes());
        let rpc = Rpc::start(
            transport.clone(),
            gate.lease(),
            codec,
            instance.as_str(),
            choria.ttl_secs,
            metrics.clone(),
        )
        .map_err(RunError::Rpc)?;
        Ok(Access {
            gate,
            connection,
            transport,
            rpc,
            instance,
            keychain,
            links,
            link_changed,
            uplink,
            pulses,
        })
    }
}
