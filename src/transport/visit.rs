//! A connection that is waited for and given up, for commands that look around and end; the daemon's is made again for ever.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, at, bounded, select_biased};

use crate::errors::chain;
use crate::metrics::Metrics;
use crate::shutdown::Never;
use crate::transport::Link;
use crate::transport::address::ServerAddress;
use crate::transport::connection::{Connection, Options};
use crate::transport::errors::{BrokerError, ErrorKind};
use crate::transport::login;

/// Complaints that wait to be read; more say nothing new.
const COMPLAINTS_MAX: usize = 64;

/// How to connect.
pub struct Call<'a> {
    /// Brokers to try, each once.
    pub servers: Vec<ServerAddress>,
    /// Our name in the broker's list of connections.
    pub name: &'a str,
    /// Where our credentials come from.
    pub credentials: login::Source,
    /// For the look-up of a name, and for the connection to each of its addresses.
    pub connect_timeout: Duration,
    /// For all of it.
    pub patience: Duration,
    /// Disconnects when it is not waited for any more.
    pub abort: &'a Receiver<Never>,
}

/// A broker that has let us in; the connection ends with this.
pub struct Visit {
    /// The connection.
    pub connection: Arc<Connection>,
    /// What the broker said against us on the way in, without turning us away.
    pub complaints: Vec<BrokerError>,
    events: Receiver<Event>,
}

/// What happens on the connection.
enum Event {
    Up,
    Error(BrokerError),
}

impl Visit {
    /// Waits until one of the brokers has let us in and has our subscriptions.
    ///
    /// # Errors
    ///
    /// What each of them had against us, at least one.
    pub fn begin(call: Call<'_>) -> Result<Visit, Vec<BrokerError>> {
        let Call { servers, name, credentials, connect_timeout, patience, abort } = call;
        let (shown, tries_max) = (list(&servers), servers.len());
        let (event, events) = bounded(COMPLAINTS_MAX);
        let up = event.clone();
        let options = Options {
            credentials,
            connect_timeout,
            // A full channel holds enough to read.
            on_link: Box::new(move |link| {
                if let Link::Up { .. } = link {
                    let _ = up.try_send(Event::Up);
                }
            }),
            on_error: Box::new(move |error| {
                let _ = event.try_send(Event::Error(error.clone()));
            }),
            ..Options::new(servers, name, Metrics::new(""))
        };
        let failed =
            |text: String| vec![BrokerError { kind: ErrorKind::Connect, text, at: Instant::now() }];
        let connection = Connection::start(options).map_err(|error| failed(chain(&error)))?;
        let mut visit = Visit { connection, complaints: Vec::new(), events };
        let deadline = Instant::now() + patience;
        let mut refusals = Vec::new();
        while refusals.len() < tries_max {
            select_biased! {
                recv(abort) -> _ => return Err(failed("stopped".to_owned())),
                recv(visit.events) -> event => match event {
                    Ok(Event::Up) => return Ok(visit),
                    // The connection goes on.
                    Ok(Event::Error(error)) if error.kind == ErrorKind::Permissions => {
                        visit.complaints.push(error);
                    }
                    Ok(Event::Error(error)) => refusals.push(error),
                    Err(_) => break,
                },
                recv(at(deadline)) -> _ => {
                    refusals.extend(failed(format!("could not connect to {shown} within {patience:?}")));
                    break;
                }
            }
        }
        refusals.append(&mut visit.complaints);
        Err(refusals)
    }

    /// What went wrong since we were let in.
    pub fn errors(&self) -> impl Iterator<Item = BrokerError> {
        self.events.try_iter().filter_map(|event| match event {
            Event::Up => None,
            Event::Error(error) => Some(error),
        })
    }
}

impl Drop for Visit {
    fn drop(&mut self) {
        self.connection.abort();
        self.connection.join();
    }
}

fn list(servers: &[ServerAddress]) -> String {
    let servers: Vec<String> = servers.iter().map(ToString::to_string).collect();
    servers.join(", ")
}
