//! Finds unconfigured Choria Servers in the provisioning account of a broker, verifies them, asks the site's helper what
//! each should become, configures and restarts them.
//!
//! # Bird's-eye view
//!
//! ```text
//!  startup events ──► listener ─┐                        ┌─ discoverer ◄── interval, connect, reconnect
//!                               ▼                        ▼
//!                              registry: one lock, no I/O, no clock
//!                               │ work queue, retry queue
//!                             prober     asks many nodes for their inventory; the silent ones end here
//!                               │ a permit each
//!                             workers    one node at a time: node::provision ──► rpc, helper
//!                               │ done queue
//!                             finisher   outcomes into the registry
//!                             election, or peers   opens and closes the gate for all of them, where there are several daemons
//! ```
//!
//! Synchronous: operating system threads and channels. Every thread is a thin shell (wait, ask the core, do what it says)
//! around a core that takes the time as an argument and touches nothing, so that the cores run under a virtual clock.
//!
//! # Where things are
//!
//! In reading order:
//!
//! * [`cli`], [`config`], [`coredump`], [`descriptors`], [`file_kind`], [`appending`], [`logging`], [`pidfile`], [`shutdown`]: how the process begins and
//!   ends.
//! * [`check`], [`rehearsal`]: the commands that look without touching.
//! * [`daemon`]: all threads: how they are connected, started, reloaded and ended.
//! * [`fleet`]: what each of them does; [`fleet::registry`] is what we know of each node.
//! * [`node`]: everything that happens to one node, on one screen; [`helper`] runs the site's program.
//! * [`rpc`]: one request to one node, one checked reply back, and discovery.
//! * [`protocol`], [`jwt`], [`pki`], [`version`]: bytes in, types out; no I/O, no clock.
//! * [`transport`]: the connection to the broker. [`keychain`]: the keys it is made with. [`dns`]: where brokers are, and who we are, when no file says so.
//! * [`gate`]: every reason not to act. [`pulse`]: which threads make progress. [`clock`]: what time it is. [`errors`]: errors in words. [`seldom`]: not too many
//!   of them. [`secret`]: what nobody may see.
//! * [`metrics`] and [`ops`]: what operators see.
//!
//! Dependencies point one way: `daemon → ops → fleet → node → rpc → transport, protocol`, and `node → helper, jwt, pki, version`.
//! All but the pure modules may count in `metrics`; whatever sends asks `gate`; `transport` takes its checked subjects from
//! `protocol`. `config` reads into types of `helper` and `transport` and checks the site's tokens with `jwt`; below `fleet` only
//! `node`, `keychain` and `logging` look at it. `secret`, `seldom` and `errors` need nothing. Among the pure modules, `jwt` takes ids
//! from `protocol` and keys from `pki`, and `protocol` signs with `pki`. `ops` reads what `fleet` knows when somebody asks, and no
//! thread of `fleet` knows who looks.
//!
//! # What always holds
//!
//! * One identity is in at most one worker. An entry of a queue whose generation is not the registry's current one is skipped.
//! * A node is queued by a sighting only: an event, an answer to discovery, an operator's wish. No message flows back.
//! * Of several daemons of ours with an election, never two act in one instant: the gate's lease goes down to the write. Of
//!   several that share the nodes, none acts that the others do not hear.
//! * Nothing new begins while the gate has a reason against it. A node that was begun goes on in its term only and waits for
//!   the connection; a pause and the drain let it finish.
//! * A node keeps the settings it was begun with; a reload takes effect as a whole or not at all.
//! * A reply counts only if its hash verifies, it answers a request of ours and it comes from the node that was asked.
//! * No server JWT is signed for a key whose holder did not sign a nonce of ours.
//! * Everything from a node, the helper or the broker is bounded, and ends in a value or an error, never in a panic.
//! * No lock is held across a wait, a request or a send that may block; the one exception is the turn to write to the socket.

pub mod appending;
pub mod check;
pub mod cli;
pub mod config;
pub mod coredump;
pub mod descriptors;
pub mod file_kind;
pub mod logging;
pub mod pidfile;
pub mod rehearsal;
pub mod shutdown;

pub mod daemon;
pub mod fleet;
pub mod helper;
pub mod node;

pub mod rpc;

pub mod jwt;
pub mod pki;
pub mod protocol;
pub mod version;

pub mod dns;
pub mod keychain;
pub mod transport;

pub mod clock;
pub mod errors;
pub mod gate;
pub mod metrics;
pub mod ops;
pub mod pulse;
pub mod secret;
pub mod seldom;
