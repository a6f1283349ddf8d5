//! What we are doing, as one value: for the page, the admin socket, scripts and readiness.
//!
//! Nothing is kept for it but what others note anyway: [`Observer`] asks gate, registry, workers, history and metrics when
//! somebody asks it, so that it costs nothing while nobody looks. Times are seconds from the moment of the answer, so that
//! nobody needs our clock to read them.

use std::cmp::Ordering;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use chrono::{DateTime, SecondsFormat, Utc};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use crate::clock::{BootTime, unix_time};
use crate::fleet::current::Current;
use crate::fleet::discoverer::LastSuccess;
use crate::fleet::election::Shown;
use crate::fleet::election::core::Role;
use crate::fleet::history::{Ended, Health, History};
use crate::fleet::peers::core::Part;
use crate::fleet::registry::{Kind, Node, NodeState};
use crate::fleet::roster::Roster;
use crate::fleet::skew::Skew;
use crate::fleet::worker::TOKEN_REMEDY;
use crate::fleet::worker::desks::{Desk, Desks};
use crate::fleet::{election, peers};
use crate::gate::{Gate, Reason};
use crate::metrics::Metrics;
use crate::protocol::Identity;
use crate::pulse::Pulses;
use crate::transport::Link;
use crate::transport::errors::{BrokerError, ErrorKind};

/// A discovery may be this late, on top of one that was missed, before we are not ready.
const DISCOVERY_SLACK: Duration = Duration::from_secs(30);

/// What failed so many times in a row, such as the helper, fails at every node.
const FAILURES_IN_ROW: u32 = 3;

/// How long before its end a token of ours is worth a word.
const EXPIRY_NEAR_SECS: i64 = 7 * 24 * 3_600;

/// Nodes read under one lock of the registry: some ten microseconds. Workers wait for it, and for longer if we lose the processor.
const NODES_AT_ONCE: usize = 64;

/// Nodes listed at most: three megabytes or so.
pub const NODES_MAX: usize = 10_000;

/// Nodes listed unless more are wanted.
const NODES_USUAL: usize = 1_000;

/// Denied nodes shown at most; the listing says how many there are.
const DENIED_SHOWN: usize = 100;

/// All that we are doing.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// When this was true, in RFC 3339.
    pub time: String,
    /// Our version.
    pub version: String,
    /// Our name to nodes and brokers.
    pub identity: String,
    /// This process among all that ever had that name.
    pub instance: String,
    /// The installation's name.
    pub site: String,
    /// The number of the process.
    pub pid: u32,
    /// How long it has been running.
    pub uptime_secs: f64,
    /// What it is doing, in one word.
    pub state: State,
    /// How long it has been doing that.
    pub state_secs: f64,
    /// Every reason not to act.
    pub closed_by: Vec<ClosedBy>,
    /// Whether we may act, or stand by on purpose.
    pub ready: bool,
    /// What an operator may want to look at.
    pub problems: Vec<String>,
    /// The settings in force.
    pub settings: Settings,
    /// The connection.
    pub broker: Broker,
    /// Who provisions, if one of several is elected.
    pub election: Election,
    /// Who else provisions, if several share the nodes.
    pub peers: Option<Peers>,
    /// How the fleet is asked who is there.
    pub discovery: Discovery,
    /// How many nodes are where.
    pub counts: Counts,
    /// How fast it goes.
    pub rates: Vec<RateOver>,
    /// Sums since the start.
    pub totals: Totals,
    /// How many nodes may be worked on at once.
    pub workers_max: usize,
    /// The nodes in hand, the longest first.
    pub workers: Vec<Worker>,
    /// The attempts that ended last, the latest first.
    pub outcomes: Vec<Outcome>,
    /// The site's program.
    pub helper: Helper,
    /// Our own tokens.
    pub tokens: Vec<Token>,
    /// Nodes an operator wants left alone; the first of them, by name.
    pub denied: Vec<Denied>,
}

/// What we are doing, in one word; of several reasons not to provision, the one that an operator meets first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// We provision.
    Provisioning,
    /// An operator paused us.
    Paused,
    /// Another instance provisions.
    Standby,
    /// We listen for others before we act.
    Listening,
    /// There is no connection to a broker.
    Disconnected,
    /// The process is ending.
    Draining,
}

impl State {
    fn of(closed: &[(Reason, Instant)]) -> (State, Option<Instant>) {
        let order = [
            Reason::Draining,
            Reason::Operator,
            Reason::Disconnected,
            Reason::Standby,
            Reason::Listening,
        ];
        let first = order.iter().find_map(|wanted| closed.iter().find(|(why, _)| why == wanted));
        match first {
            None => (State::Provisioning, None),
            Some((reason, since)) => {
                let state = match reason {
                    Reason::Draining => State::Draining,
                    Reason::Operator => State::Paused,
                    Reason::Disconnected => State::Disconnected,
                    Reason::Standby => State::Standby,
                    Reason::Listening => State::Listening,
                };
                (state, Some(*since))
            }
        }
    }

    /// For people.
    pub fn words(self) -> &'static str {
        match self {
            State::Provisioning => "provisioning",
            State::Paused => "paused by an operator",
            State::Standby => "standing by",
            State::Listening => "listening for other instances",
            State::Disconnected => "not connected",
            State::Draining => "shutting down",
        }
    }
}

/// One reason not to act.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ClosedBy {
    /// The label of the metric `gate_closed`.
    pub reason: String,
    /// For people.
    pub text: String,
    /// How long it has held.
    pub for_secs: f64,
}

/// The settings in force.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Settings {
    /// How long ago they were read.
    pub read_secs: f64,
    /// Why the last reload was refused, if it was.
    pub refused: Option<Past>,
}

/// The connection to the broker.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Broker {
    /// The broker's address, while connected.
    pub server: Option<String>,
    /// How long that, or the lack of it, has lasted.
    pub for_secs: f64,
    /// Connections made again.
    pub reconnects: u64,
    /// What went wrong last, and how long ago.
    pub last_error: Option<Past>,
}

/// Something that happened.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Past {
    /// What.
    pub text: String,
    /// How long ago.
    pub ago_secs: f64,
}

/// Who provisions, if one of several is elected.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Election {
    /// There is none: we are alone.
    Off,
    /// There is to be one, and it can't be held.
    SettingUp,
    /// We would lead if the leader did not.
    Candidate,
    /// We have offered the lead to others, and lead again in a moment if nobody wants it.
    SteppedDown,
    /// We have won, or were cut off, and make sure that nobody else leads.
    Confirming,
    /// We lead.
    Leader,
    /// An operator keeps us out of it.
    Out,
}

impl Election {
    /// For people; nothing if there is none.
    pub fn words(self) -> Option<&'static str> {
        Some(match self {
            Election::Off => return None,
            Election::SettingUp => "can't be held yet",
            Election::Candidate => "candidate, another instance has the lead",
            Election::SteppedDown => "has offered the lead to others",
            Election::Confirming => "about to lead",
            Election::Leader => "leader",
            Election::Out => "stays out",
        })
    }
}

impl From<Role> for Election {
    fn from(role: Role) -> Election {
        match role {
            Role::SettingUp => Election::SettingUp,
            Role::Candidate => Election::Candidate,
            Role::SteppedDown => Election::SteppedDown,
            Role::Confirming => Election::Confirming,
            Role::Leader => Election::Leader,
            Role::Out => Election::Out,
        }
    }
}

/// Who else provisions, if several share the nodes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Peers {
    /// Our own part.
    pub part: Sharing,
    /// Our part of the nodes, from 0 to 1.
    pub share: f64,
    /// All that were heard a short while ago, whatever their role.
    pub others: Vec<Peer>,
}

/// The part of one that shares the nodes with others.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Sharing {
    /// It listens before it acts.
    Listening,
    /// It provisions its share.
    Acting,
    /// Another provisions in its place.
    StandingBy,
    /// It has left its share to the others.
    Out,
}

impl Sharing {
    /// For people.
    pub fn words(self) -> &'static str {
        match self {
            Sharing::Listening => "listening for others",
            Sharing::Acting => "provisioning its share",
            Sharing::StandingBy => "standing by",
            Sharing::Out => "has left its share to the others",
        }
    }
}

impl From<Part> for Sharing {
    fn from(part: Part) -> Sharing {
        match part {
            Part::Listening => Sharing::Listening,
            Part::Acting => Sharing::Acting,
            Part::StandingBy => Sharing::StandingBy,
            Part::Out => Sharing::Out,
        }
    }
}

/// Another instance.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Peer {
    /// Which process it is.
    pub instance: String,
    /// Its name to nodes.
    pub identity: String,
    /// Its caller id.
    pub caller: String,
    /// `active`, `leader` or `candidate`.
    pub role: String,
    /// How long ago it was last heard.
    pub heard_secs: f64,
}

/// How the fleet is asked who is there.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Discovery {
    /// How long ago it last succeeded; without, it never did.
    pub last_secs: Option<f64>,
    /// Who answered then.
    pub replies: i64,
    /// Time from one to the next.
    pub interval_secs: f64,
    /// Failed ones since the start.
    pub errors: u64,
}

/// How many nodes are where.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counts {
    /// On a queue, asked, or ready.
    pub queued: usize,
    /// Of these, asked and not answered yet.
    pub asked: usize,
    /// Of these, answered and waiting for a worker.
    pub ready: usize,
    /// In a worker.
    pub working: usize,
    /// Done, and left alone for a while.
    pub settling: usize,
    /// To be taken again later.
    pub waiting: usize,
    /// Left alone on an operator's wish.
    pub denied: usize,
}

/// How fast it went over some minutes.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct RateOver {
    /// How many minutes.
    pub minutes: u32,
    /// Nodes provisioned in each.
    pub provisioned_per_minute: f64,
    /// Attempts that ended with an error in each.
    pub errors_per_minute: f64,
}

/// Sums since the start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Totals {
    /// Attempts ended well.
    pub provisioned: u64,
    /// Attempts ended with an error.
    pub errors: u64,
}

/// One node in hand.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Worker {
    /// The node.
    pub node: String,
    /// Which attempt it is, from 1.
    pub attempt: u32,
    /// How long a worker has had it.
    pub for_secs: f64,
    /// What is being done for it.
    pub step: Option<String>,
    /// How long that has taken so far.
    pub step_secs: f64,
}

/// One attempt that has ended.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Outcome {
    /// How long ago.
    pub ago_secs: f64,
    /// The node.
    pub node: String,
    /// The label of the metric `outcomes_total`.
    pub outcome: String,
    /// Why; empty on success.
    pub reason: String,
    /// Which attempt it was, from 1.
    pub attempt: u32,
    /// How long it took.
    pub took_secs: f64,
}

/// The site's program.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Helper {
    /// How many times it ran.
    pub runs: u64,
    /// How many of these failed.
    pub errors: u64,
    /// Failures since it last answered.
    pub failures_in_row: u32,
    /// The last failure.
    pub last_failure: Option<Past>,
    /// Processes that stay from node to node.
    pub processes: i64,
}

/// One of our own tokens.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Token {
    /// What it is for: the label of the metric `token_expiry_timestamp_seconds`.
    pub token: String,
    /// When it ends, in RFC 3339.
    pub expires: String,
    /// How long it lives; negative when it is dead.
    pub left_secs: i64,
}

/// A node an operator wants left alone.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Denied {
    /// The node.
    pub node: String,
    /// Since when.
    pub for_secs: f64,
}

/// Which nodes are listed, and how.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Query {
    /// Those of one state.
    pub state: Which,
    /// Those with this in their name.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub name: String,
    /// What comes first.
    pub sort: Sort,
    /// How many.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit: Option<Limit>,
}

impl Query {
    fn names(&self, node: &Identity) -> bool {
        node.as_str().contains(&self.name)
    }
}

/// How many nodes are listed: from 1 to [`NODES_MAX`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "usize", into = "usize")]
pub struct Limit(usize);

impl Limit {
    /// As many, or the nearest number that is allowed.
    pub const fn near(number: usize) -> Limit {
        match number {
            0 => Limit(1),
            1..=NODES_MAX => Limit(number),
            _ => Limit(NODES_MAX),
        }
    }

    /// What a text stands for.
    pub fn parse(text: &str) -> Option<Limit> {
        text.parse().ok().and_then(|number: usize| number.try_into().ok())
    }

    /// The number.
    pub fn get(self) -> usize {
        self.0
    }
}

impl TryFrom<usize> for Limit {
    type Error = WrongLimit;

    fn try_from(number: usize) -> Result<Limit, WrongLimit> {
        let limit = Limit::near(number);
        if limit.0 == number { Ok(limit) } else { Err(WrongLimit(number)) }
    }
}

impl From<Limit> for usize {
    fn from(limit: Limit) -> usize {
        limit.0
    }
}

/// A number of nodes that is never listed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WrongLimit(usize);

impl WrongLimit {
    /// What there should be.
    pub fn wanted() -> String {
        format!("a number from 1 to {NODES_MAX}")
    }
}

impl fmt::Display for WrongLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "limit: found {}, wanted {}", self.0, WrongLimit::wanted())
    }
}

impl std::error::Error for WrongLimit {}

/// Nodes of one state, as operators name it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Which {
    /// Whatever their state.
    #[default]
    All,
    /// Waiting with a failure behind them.
    Stuck,
    /// In a worker.
    Working,
    /// On a queue, asked, or ready.
    Queued,
    /// To be taken again later.
    Waiting,
    /// Done, and left alone for a while.
    Settling,
    /// Left alone on an operator's wish.
    Denied,
}

impl Which {
    /// All of them.
    pub const ALL: [Which; 7] = [
        Which::All,
        Which::Stuck,
        Which::Working,
        Which::Queued,
        Which::Waiting,
        Which::Settling,
        Which::Denied,
    ];

    /// The word for it.
    pub fn word(self) -> &'static str {
        match self {
            Which::All => "all",
            Which::Stuck => "stuck",
            Which::Working => "working",
            Which::Queued => "queued",
            Which::Waiting => "waiting",
            Which::Settling => "settling",
            Which::Denied => "denied",
        }
    }

    /// What a word stands for.
    pub fn parse(word: &str) -> Option<Which> {
        Which::ALL.into_iter().find(|which| which.word() == word)
    }

    /// Where the registry has them; the denied ones have a list of their own.
    fn kinds(self) -> &'static [Kind] {
        match self {
            Which::All => &Kind::ALL,
            Which::Stuck | Which::Waiting => &[Kind::Waiting],
            Which::Working => &[Kind::Working],
            Which::Queued => &[Kind::Queued],
            Which::Settling => &[Kind::Settling],
            Which::Denied => &[],
        }
    }
}

/// What comes first in a list of nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Sort {
    /// By name.
    #[default]
    Name,
    /// The most failures in a row.
    Failures,
    /// The next to be tried, or to change by itself; then the longest in its state.
    Next,
    /// The longest unseen.
    Seen,
}

impl Sort {
    /// All of them.
    pub const ALL: [Sort; 4] = [Sort::Name, Sort::Failures, Sort::Next, Sort::Seen];

    /// The word for it.
    pub fn word(self) -> &'static str {
        match self {
            Sort::Name => "name",
            Sort::Failures => "failures",
            Sort::Next => "next",
            Sort::Seen => "seen",
        }
    }

    /// What a word stands for.
    pub fn parse(word: &str) -> Option<Sort> {
        Sort::ALL.into_iter().find(|sort| sort.word() == word)
    }

    fn order(self, left: &Listed, right: &Listed) -> Ordering {
        let first = match self {
            Sort::Name => Ordering::Equal,
            Sort::Failures => right.failures.cmp(&left.failures),
            Sort::Next => {
                let next = |node: &Listed| node.next_secs.unwrap_or(f64::INFINITY);
                let since = |node: &Listed| -node.for_secs.unwrap_or_default();
                let by_next = next(left).total_cmp(&next(right));
                by_next.then_with(|| since(left).total_cmp(&since(right)))
            }
            Sort::Seen => right.seen_secs.total_cmp(&left.seen_secs),
        };
        first.then_with(|| left.node.cmp(&right.node))
    }
}

/// Some of the nodes we know.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Nodes {
    /// How many there are of the kind asked for, listed or not.
    pub matching: usize,
    /// Those listed. One that changed its state meanwhile may be missing or there twice.
    pub nodes: Vec<Listed>,
}

/// One known node.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Listed {
    /// Its name.
    pub node: String,
    /// Its state.
    pub state: String,
    /// How long it has been queued, worked on or denied.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub for_secs: Option<f64>,
    /// When it may be tried again, or has settled; zero when that is now.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub next_secs: Option<f64>,
    /// How long ago it was last noticed.
    pub seen_secs: f64,
    /// Attempts since it was last provisioned or unknown.
    pub attempts: u32,
    /// Failures in a row.
    pub failures: u16,
    /// Why it was not provisioned the last time, cut short if very many have long reasons; empty if it was not tried.
    pub reason: String,
}

impl Listed {
    /// One that is left alone: nothing else is known of it.
    fn denied(node: &Identity, since: Instant, now: Instant) -> Listed {
        Listed {
            node: node.to_string(),
            state: Which::Denied.word().to_owned(),
            for_secs: Some(past(since, now)),
            next_secs: None,
            seen_secs: past(since, now),
            attempts: 0,
            failures: 0,
            reason: "an operator wants it left alone".to_owned(),
        }
    }

    /// As it is at `now`.
    pub fn new(node: &Node<'_>, now: Instant) -> Listed {
        let (state, since, next) = match node.state {
            NodeState::Working { since } => (Which::Working, Some(since), None),
            NodeState::Queued { since } => (Which::Queued, Some(since), None),
            NodeState::Waiting { due } => (Which::Waiting, None, Some(due)),
            NodeState::Settling { until } => (Which::Settling, None, Some(until)),
        };
        Listed {
            node: node.identity.as_str().to_owned(),
            state: state.word().to_owned(),
            for_secs: since.map(|at| past(at, now)),
            next_secs: next.map(|at| secs(at.saturating_duration_since(now))),
            seen_secs: past(node.seen, now),
            attempts: node.attempts,
            failures: node.failures,
            reason: node.last_error.to_owned(),
        }
    }
}

/// All that is known of one node.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Known {
    /// Its entry; nothing if we don't know it.
    pub listed: Option<Listed>,
    /// What is being done for it.
    pub worker: Option<Worker>,
    /// What became of it last, if it was one of the last hundred.
    pub last: Option<Outcome>,
    /// How long an operator has wanted it left alone.
    pub denied_secs: Option<f64>,
    /// Another instance that provisions it.
    pub owner: Option<String>,
    /// Why we begin nothing.
    pub closed_by: Vec<String>,
}

/// Whether we do our work, and all reasons if not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Readiness {
    /// We may act, or stand by on purpose.
    pub ready: bool,
    /// What keeps us from acting, or will, one line each; a reason may be given though we are ready.
    pub reasons: Vec<String>,
}

/// Whoever can say what we are doing. Asked on the thread that serves all requests to the monitor port: it must be quick and
/// must not block.
pub trait Show: Send + Sync {
    /// What makes no progress and never will, one line each: whoever supervises us had better start us again.
    fn stuck(&self) -> Vec<String>;
    /// Whether we may act, or stand by on purpose, and every reason why not.
    fn readiness(&self) -> Readiness;
    /// All that we are doing.
    fn status(&self) -> Status;
    /// The nodes that `query` asks for.
    fn nodes(&self, query: &Query) -> Nodes;
}

/// The broker we are connected to, noted as the connection comes and goes.
#[derive(Debug)]
pub struct Uplink(Mutex<(Option<String>, Instant)>);

impl Uplink {
    /// Not connected yet.
    pub fn new() -> Uplink {
        Uplink(Mutex::new((None, Instant::now())))
    }

    /// Notes a change.
    pub fn put(&self, link: &Link) {
        let broker = match link {
            Link::Up { broker, .. } => Some(broker.clone()),
            Link::Down { .. } => None,
        };
        let mut uplink = self.0.lock();
        // Each failure to connect is a change to others; it does not begin a new time without.
        if broker.is_some() || uplink.0.is_some() {
            *uplink = (broker, Instant::now());
        }
    }
}

impl Default for Uplink {
    fn default() -> Uplink {
        Uplink::new()
    }
}

/// Whom an [`Observer`] asks.
pub struct Sources {
    /// Our version.
    pub version: &'static str,
    /// Our name to nodes and brokers.
    pub identity: String,
    /// This process among all that ever had that name.
    pub instance: String,
    /// The installation's name.
    pub site: String,
    /// The settings.
    pub current: Arc<Current>,
    /// Why we may not act.
    pub gate: Arc<Gate>,
    /// What we know of the nodes.
    pub roster: Arc<Roster>,
    /// Who is worked on.
    pub desks: Arc<Desks>,
    /// What became of others.
    pub history: Arc<History>,
    /// Counts.
    pub metrics: Arc<Metrics>,
    /// When the fleet was last asked.
    pub last_discovery: Arc<LastSuccess>,
    /// Whether nodes say that our clock is off.
    pub skew: Arc<Skew>,
    /// The broker we are connected to.
    pub uplink: Arc<Uplink>,
    /// Who leads, if that is decided by an election.
    pub election: Option<Arc<election::View>>,
    /// Who shares the nodes with us, if that is how it is done.
    pub peers: Option<Arc<peers::View>>,
    /// Which threads make progress.
    pub pulses: Arc<Pulses>,
    /// How long a worker may have a node beyond its time, since `restart` is asked for in any case.
    pub worker_slack: Duration,
    /// The broker's last error.
    pub broker_error: Box<dyn Fn() -> Option<BrokerError> + Send + Sync>,
}

/// Says what we are doing, to whoever asks.
pub struct Observer {
    sources: Sources,
    started: Instant,
}

impl Observer {
    /// Asks these; we have been running from now on.
    pub fn new(sources: Sources) -> Observer {
        Observer { sources, started: Instant::now() }
    }

    fn broker(&self, now: Instant) -> Broker {
        let (server, since) = self.sources.uplink.0.lock().clone();
        let error = (self.sources.broker_error)();
        Broker {
            server,
            for_secs: past(since, now),
            reconnects: self.sources.metrics.broker_reconnects.get(),
            last_error: error.map(|error| Past { text: error.text, ago_secs: past(error.at, now) }),
        }
    }

    /// A reason not to act, for people.
    fn why(&self, reason: Reason) -> String {
        election::why(reason, self.sources.election.as_deref())
    }

    fn settings(&self, now: Instant) -> Settings {
        let Sources { current, .. } = &self.sources;
        let refused = current.last_refused();
        let refused = refused.map(|(at, text)| Past { text, ago_secs: past(at, now) });
        Settings { read_secs: secs(current.age()), refused }
    }

    fn discovery(&self) -> Discovery {
        let Sources { metrics, last_discovery, current, .. } = &self.sources;
        // The metric is zero until the first has succeeded.
        let has_been = metrics.last_discovery_timestamp_seconds.get() != 0;
        Discovery {
            last_secs: has_been.then(|| secs(last_discovery.age())),
            replies: metrics.discovery_replies.get(),
            interval_secs: secs(current.config().interval),
            errors: metrics.discovery_errors.get(),
        }
    }

    fn helper(&self, now: Instant) -> Helper {
        let Sources { metrics, history, .. } = &self.sources;
        let health = history.helper();
        Helper {
            runs: metrics.helper_time.count(),
            errors: metrics.helper_errors.get(),
            failures_in_row: health.failures_in_row,
            last_failure: health
                .last_failure
                .map(|(at, text)| Past { text, ago_secs: past(at, now) }),
            processes: metrics.helper_processes.get(),
        }
    }

    fn tokens(&self) -> Vec<Token> {
        let now = unix_time();
        let expiries = self.sources.metrics.token_expiries();
        expiries
            .into_iter()
            .map(|(token, at)| {
                let expires = DateTime::from_timestamp(at, 0).unwrap_or_default();
                let expires = expires.to_rfc3339_opts(SecondsFormat::Secs, true);
                Token { token, expires, left_secs: at.saturating_sub(now) }
            })
            .collect()
    }
}

impl Observer {
    /// Workers that have a node beyond all its time. Whoever waits for the connection, or until it is sure
    /// that the node is ours, waits on purpose.
    fn stuck_workers(&self, now: Instant) -> Vec<String> {
        let Sources { gate, desks, worker_slack, .. } = &self.sources;
        let is_on_purpose = |why: &Reason| {
            matches!(why, Reason::Disconnected | Reason::Standby | Reason::Listening)
        };
        if gate.reasons().iter().any(is_on_purpose) {
            return Vec::new();
        }
        let connected_at = gate.reconnected_at();
        let overdue = |desk: &Desk| {
            let from = connected_at.map_or(desk.deadline, |at| at.max(desk.deadline));
            now.saturating_duration_since(from) > *worker_slack
        };
        let line = |desk: Desk| {
            let (thread, node) = (&desk.thread, &desk.identity);
            let time = now.saturating_duration_since(desk.since).as_secs();
            format!("thread {thread} makes no progress: it has had {node} for {time} s")
        };
        desks.all().into_iter().filter(overdue).map(line).collect()
    }
}

impl Show for Observer {
    fn stuck(&self) -> Vec<String> {
        let now = Instant::now();
        let threads = self.sources.pulses.stuck(now).into_iter().map(|stuck| stuck.to_string());
        threads.chain(self.stuck_workers(now)).collect()
    }

    fn status(&self) -> Status {
        let now = Instant::now();
        let Sources { gate, roster, desks, history, metrics, .. } = &self.sources;
        let closed = gate.closed_since();
        let (state, since) = State::of(&closed);
        let Readiness { ready, reasons } = self.readiness();
        // Nodes can say what they like, so it makes us no less ready.
        let off = self.sources.skew.off().map(|off| off.to_string());
        let (counts, denied) = {
            let registry = roster.registry();
            let denied: Vec<Denied> = registry
                .denied()
                .take(DENIED_SHOWN)
                .map(|(node, since)| Denied { node: node.to_string(), for_secs: past(since, now) })
                .collect();
            let counts = registry.counts();
            let counts = Counts {
                queued: counts.queued,
                asked: count(metrics.probes_outstanding.get()),
                ready: count(metrics.ready_nodes.get()),
                working: counts.working,
                settling: counts.settling,
                waiting: counts.waiting,
                denied: registry.denied().len(),
            };
            (counts, denied)
        };
        Status {
            time: Utc::now().to_rfc3339_opts(SecondsFormat::Millis, true),
            version: self.sources.version.to_owned(),
            identity: self.sources.identity.clone(),
            instance: self.sources.instance.clone(),
            site: self.sources.site.clone(),
            pid: std::process::id(),
            uptime_secs: past(self.started, now),
            state,
            state_secs: past(since.unwrap_or_else(|| gate.open_since()), now),
            closed_by: closed
                .into_iter()
                .map(|(reason, since)| ClosedBy {
                    reason: reason.label().to_owned(),
                    text: self.why(reason),
                    for_secs: past(since, now),
                })
                .collect(),
            ready,
            problems: reasons.into_iter().chain(off).collect(),
            settings: self.settings(now),
            broker: self.broker(now),
            election: match &self.sources.election {
                None => Election::Off,
                Some(view) => view.get().role.into(),
            },
            peers: self.sources.peers.as_ref().map(|view| sharing(view.get())),
            discovery: self.discovery(),
            counts,
            rates: [1, 5, 15].map(|minutes| rate(history, minutes, now)).to_vec(),
            totals: Totals {
                provisioned: metrics.provisioned.get(),
                errors: metrics.provision_errors.get(),
            },
            workers_max: self.sources.current.config().workers,
            workers: desks.all().iter().map(|desk| worker(desk, now)).collect(),
            outcomes: history.outcomes().into_iter().map(|ended| outcome(ended, now)).collect(),
            helper: self.helper(now),
            tokens: self.tokens(),
            denied,
        }
    }

    fn nodes(&self, query: &Query) -> Nodes {
        let limit = query.limit.map_or(NODES_USUAL, Limit::get);
        let now = Instant::now();
        let mut listing = Nodes::default();
        for &kind in query.state.kinds() {
            let mut mark = None;
            loop {
                let registry = self.sources.roster.registry();
                mark = registry.visit(kind, mark.as_ref(), NODES_AT_ONCE, &mut |node| {
                    if is_wanted(&node, query) {
                        listing.matching += 1;
                        listing.nodes.push(Listed::new(&node, now));
                    }
                });
                drop(registry);
                // The last ones can go before all are seen; not each time, since that costs a look at each.
                if listing.nodes.len() >= 2 * limit.max(NODES_AT_ONCE) {
                    keep_first(&mut listing.nodes, query.sort, limit);
                }
                if mark.is_none() {
                    break;
                }
            }
        }
        if matches!(query.state, Which::All | Which::Denied) {
            let registry = self.sources.roster.registry();
            let wanted = registry.denied().filter(|(node, _)| query.names(node));
            for (node, since) in wanted {
                listing.matching += 1;
                listing.nodes.push(Listed::denied(node, since, now));
            }
        }
        keep_first(&mut listing.nodes, query.sort, limit);
        listing
    }

    fn readiness(&self) -> Readiness {
        let Sources { gate, history, current, last_discovery, election, peers, .. } = &self.sources;
        let closed = gate.reasons();
        let mut ready = closed.iter().all(|reason| *reason == Reason::Standby);
        let mut reasons: Vec<String> = closed.iter().map(|reason| self.why(*reason)).collect();
        // Of what is over with the connection only this: what we may not do, we will not do later either.
        if let Some(error) = (self.sources.broker_error)()
            && (closed.contains(&Reason::Disconnected) || error.kind == ErrorKind::Permissions)
        {
            reasons.push(format!("broker: {}", error.text));
        }
        if let Some(view) = election
            && let Shown { role, trouble: Some(why), .. } = view.get()
        {
            // A leader goes on for as long as its lease, whatever else is wrong.
            ready &= role != Role::SettingUp;
            reasons.push(format!("election: {why}"));
        }
        if let Some(why) = peers.as_ref().and_then(|view| view.get().trouble) {
            reasons.push(format!("peers: {why}"));
        }
        // A shorter interval is none that was missed.
        let age = last_discovery.age().min(current.age());
        if closed.is_empty() && age > current.config().interval * 2 + DISCOVERY_SLACK {
            ready = false;
            reasons.push(format!("no discovery has succeeded for {} s", age.as_secs()));
        }
        if let Some((_, why)) = current.last_refused() {
            reasons.push(format!("the last reload was refused: {why}"));
        }
        if let Some((times, why)) = keeps_failing(history.helper()) {
            reasons.push(format!("the helper failed {times} times in a row, the last time: {why}"));
        }
        // Nodes can say so as they like, so this makes us no less ready.
        if let Some((times, _)) = keeps_failing(history.token()) {
            reasons.push(format!(
                "nodes refused our provisioning token {times} times in a row: {TOKEN_REMEDY}"
            ));
        }
        if let Some((times, why)) = keeps_failing(history.own()) {
            reasons.push(format!(
                "nodes failed {times} times in a row by a mistake of ours, the last time: {why}"
            ));
        }
        for Token { token, left_secs, .. } in self.tokens() {
            if left_secs <= 0 {
                // Without it no node gets a server JWT; the connection that there is needs no login token any more.
                ready &= token != "signing";
                reasons.push(format!("the {token} token has expired"));
            } else if left_secs < EXPIRY_NEAR_SECS {
                reasons.push(format!("the {token} token expires in {} h", left_secs / 3_600));
            }
        }
        Readiness { ready, reasons }
    }
}

/// How many times in a row, and why the last time, if it fails at every node.
fn keeps_failing(health: Health) -> Option<(u32, String)> {
    let Health { failures_in_row, last_failure } = health;
    let (_, why) = last_failure.filter(|_| failures_in_row >= FAILURES_IN_ROW)?;
    Some((failures_in_row, why))
}

fn is_wanted(node: &Node<'_>, query: &Query) -> bool {
    if query.state == Which::Stuck && node.failures == 0 && node.last_error.is_empty() {
        return false;
    }
    query.names(node.identity)
}

/// Leaves the first `limit`, in order. Of a large fleet few are shown, so they are chosen before they are sorted.
fn keep_first(nodes: &mut Vec<Listed>, sort: Sort, limit: usize) {
    let order = |left: &Listed, right: &Listed| sort.order(left, right);
    if limit < nodes.len() {
        nodes.select_nth_unstable_by(limit, order);
        nodes.truncate(limit);
    }
    nodes.sort_unstable_by(order);
}

fn rate(history: &History, minutes: u32, now: Instant) -> RateOver {
    let rate = history.rate(Duration::from_secs(60) * minutes, now);
    RateOver {
        minutes,
        provisioned_per_minute: tenths(rate.provisioned_per_minute),
        errors_per_minute: tenths(rate.errors_per_minute),
    }
}

fn sharing(peers::Shown { part, sharers, peers, .. }: peers::Shown) -> Peers {
    let now = BootTime::now();
    let others = peers.into_iter().map(|peer| Peer {
        instance: peer.instance.to_string(),
        identity: peer.sender.identity.to_string(),
        caller: peer.sender.caller,
        role: peer.role.word().to_owned(),
        heard_secs: secs(now.since(peer.heard)),
    });
    let share = sharers.map_or(0.0, |sharers| 1.0 / sharers as f64);
    Peers { part: part.into(), share, others: others.collect() }
}

fn worker(desk: &Desk, now: Instant) -> Worker {
    let step = desk.progress.step();
    Worker {
        node: desk.identity.to_string(),
        attempt: desk.attempt,
        for_secs: past(desk.since, now),
        step: step.map(|(step, _)| step.to_owned()),
        step_secs: past(step.map_or(desk.since, |(_, since)| since), now),
    }
}

fn outcome(ended: Ended, now: Instant) -> Outcome {
    Outcome {
        ago_secs: past(ended.at, now),
        node: ended.node.to_string(),
        outcome: ended.outcome.to_owned(),
        reason: ended.reason,
        attempt: ended.attempt,
        took_secs: secs(ended.took),
    }
}

/// How long ago `at` was, in seconds.
pub fn past(at: Instant, now: Instant) -> f64 {
    secs(now.saturating_duration_since(at))
}

/// Seconds, to the millisecond.
fn secs(time: Duration) -> f64 {
    time.as_millis() as f64 / 1_000.0
}

fn tenths(number: f64) -> f64 {
    (number * 10.0).round() / 10.0
}

fn count(gauge: i64) -> usize {
    usize::try_from(gauge).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fleet::registry::{Key, Limits, Sighted, Sighting};
    use crate::fleet::roster::Queues;
    use crate::fleet::tally::Tally;
    use crate::node::{Outcome as Ending, Report};
    use crate::rpc::testing::Net;

    /// An observer of things that stand still.
    struct Bench {
        observer: Observer,
        error: Arc<Mutex<Option<BrokerError>>>,
        _queues: Queues,
    }

    impl Bench {
        fn new() -> Bench {
            let (metrics, net, gate) = (Metrics::new("lon"), Net::new(), Arc::new(Gate::new()));
            let limits = Limits::new(Duration::from_secs(60), Duration::from_secs(1800));
            let (roster, queues) = Roster::new(limits, 10_000, metrics.clone());
            let error = Arc::new(Mutex::new(None));
            let broker_error = {
                let error = error.clone();
                Box::new(move || error.lock().clone())
            };
            let observer = Observer::new(Sources {
                version: "0.1.0",
                identity: "provisioner.example.net".into(),
                instance: "instance".into(),
                site: "lon".into(),
                current: Current::testing("helper: /bin/true\nworkers: 8\n", &net, &gate),
                gate,
                roster: Arc::new(roster),
                desks: Arc::default(),
                history: Arc::new(History::new(Instant::now())),
                metrics,
                last_discovery: Arc::new(LastSuccess::new()),
                skew: Skew::new(60),
                uplink: Arc::new(Uplink::new()),
                election: None,
                peers: None,
                pulses: Arc::default(),
                worker_slack: Duration::from_secs(300),
                broker_error,
            });
            Bench { observer, error, _queues: queues }
        }

        fn connect(&self) {
            let link = Link::Up { broker: "nats://broker:4222".into(), first: true };
            self.observer.sources.uplink.put(&link);
            self.observer.sources.gate.open(Reason::Disconnected);
        }

        /// Has nodes fail, each one time more than the one before.
        fn fail(&self, names: &[&str]) {
            let roster = &self.observer.sources.roster;
            for (place, name) in names.iter().enumerate() {
                let identity = Identity::parse(name).unwrap();
                for _ in 0..=place {
                    let Sighted::Queued(key) = roster.sight(&identity, Sighting::Operator) else {
                        panic!("{name} can be queued")
                    };
                    let now = Instant::now();
                    roster.registry().take(&key, now).unwrap();
                    let reason = format!("{name} is broken");
                    let report = Report::new(Ending::Failed, reason);
                    roster.change(|registry, push| {
                        registry.finish(&key, &report, now, false, false, push)
                    });
                }
            }
        }

        fn listed(&self, query: Query) -> (usize, Vec<String>) {
            let Nodes { matching, nodes } = self.observer.nodes(&query);
            (matching, nodes.into_iter().map(|node| node.node).collect())
        }
    }

    #[test]
    fn the_state_is_the_reason_an_operator_meets_first() {
        let bench = Bench::new();
        let state = || bench.observer.status().state;
        let gate = &bench.observer.sources.gate;
        assert_eq!(state(), State::Disconnected);
        bench.connect();
        assert_eq!(state(), State::Provisioning);
        gate.end_term();
        assert_eq!(state(), State::Standby);
        gate.close(Reason::Disconnected);
        assert_eq!(state(), State::Disconnected);
        gate.close(Reason::Operator);
        assert_eq!(state(), State::Paused);
        gate.close(Reason::Draining);
        let status = bench.observer.status();
        assert_eq!(status.state, State::Draining);
        let reasons: Vec<&str> = status.closed_by.iter().map(|by| by.reason.as_str()).collect();
        assert_eq!(reasons, ["operator", "standby", "disconnected", "draining"]);
    }

    #[test]
    fn whoever_stands_by_says_what_the_election_is_about() {
        let mut bench = Bench::new();
        bench.connect();
        let (view, _wishes) = election::View::new();
        bench.observer.sources.election = Some(view.clone());
        bench.observer.sources.gate.end_term();
        let says = |shown: Shown| {
            view.show(shown);
            let Status { closed_by, problems, .. } = bench.observer.status();
            assert!(problems.contains(&closed_by[0].text), "{problems:?}");
            closed_by[0].text.clone()
        };
        assert_eq!(says(Shown::role(Role::Candidate)), Reason::Standby.to_string());
        assert_eq!(
            says(Shown::role(Role::SettingUp)),
            "standing by until the election can be held"
        );
        let stepping = "stepping down when the nodes in work are finished";
        assert_eq!(says(Shown { is_leaving: true, ..Shown::role(Role::Leader) }), stepping);
        let confirming = "about to lead, and making sure that no other instance does";
        assert_eq!(says(Shown::role(Role::Leader)), confirming, "its lease is over");
        assert_eq!(says(Shown::role(Role::Out)), "staying out of the election");
        let at = BootTime::now() + Duration::from_secs(3_600);
        let down = Shown { takes_back_at: Some(at), ..Shown::role(Role::SteppedDown) };
        let said = says(down);
        assert!(said.starts_with("stepped down: takes the lead back in "), "{said}");
        assert_eq!(bench.observer.status().election, Election::SteppedDown);
        assert!(bench.observer.readiness().ready, "it stands by on purpose");
    }

    #[test]
    fn readiness_has_a_reason_for_everything_that_keeps_us_or_soon_will() {
        let bench = Bench::new();
        let Sources { metrics, history, .. } = &bench.observer.sources;
        let text = "nats://broker: refused".to_owned();
        let kind = ErrorKind::Connect;
        *bench.error.lock() = Some(BrokerError { kind, text, at: Instant::now() });
        let ready = || {
            let Readiness { ready, reasons } = bench.observer.readiness();
            (ready, reasons.join("; "))
        };
        let disconnected = "not connected to a broker; broker: nats://broker: refused";
        assert_eq!(ready(), (false, disconnected.into()));
        bench.connect();
        assert_eq!(ready(), (true, String::new()), "the error is of the past");
        let (kind, text) = (ErrorKind::Permissions, "not there".to_owned());
        *bench.error.lock() = Some(BrokerError { kind, text, at: Instant::now() });
        assert_eq!(ready(), (true, "broker: not there".into()), "this one is not");
        *bench.error.lock() = None;
        bench.observer.sources.gate.end_term();
        assert_eq!(ready(), (true, Reason::Standby.to_string()));
        bench.observer.sources.gate.lead(BootTime::now() + Duration::from_secs(3_600));

        metrics.token_expires("login", unix_time() - 5);
        metrics.token_expires("signing", unix_time() + 7_300);
        let tokens = "the login token has expired; the signing token expires in 2 h";
        assert_eq!(ready(), (true, tokens.into()));
        metrics.token_expires("login", unix_time() + 30 * 24 * 3_600);
        metrics.token_expires("signing", unix_time() - 5);
        assert_eq!(ready(), (false, "the signing token has expired".into()));
        metrics.token_expires("signing", unix_time() + 30 * 24 * 3_600);

        let mut said = String::new();
        for (ending, why, reason) in [
            (
                Ending::HelperFailed,
                "exit code 1",
                "the helper failed 3 times in a row, the last time: exit code 1",
            ),
            (
                Ending::WrongToken,
                "Incorrect provision token supplied",
                "nodes refused our provisioning token 3 times in a row: `token` must equal the claim `cht` of their provisioning JWT",
            ),
            (
                Ending::Misconfigured,
                "no key",
                "nodes failed 3 times in a row by a mistake of ours, the last time: no key",
            ),
        ] {
            let report = Report::new(ending, why);
            let tally = Tally::of(&report.outcome);
            for times in 1..=3 {
                assert_eq!(ready(), (true, said.clone()), "{times}");
                let ended = Ended {
                    at: Instant::now(),
                    node: Identity::parse("n1.example.net").unwrap(),
                    outcome: tally.outcome.unwrap(),
                    reason: report.reason.clone(),
                    attempt: times,
                    took: Duration::from_millis(1_500),
                };
                history.note(ended, &tally, &report, Instant::now());
            }
            said = if said.is_empty() { reason.into() } else { format!("{said}; {reason}") };
            assert_eq!(ready(), (true, said.clone()));
        }
        let outcome = &bench.observer.status().outcomes[0];
        assert_eq!((outcome.attempt, outcome.took_secs), (3, 1.5));
    }

    #[test]
    fn a_worker_that_has_a_node_beyond_all_its_time_is_stuck_unless_it_waits_on_purpose() {
        let bench = Bench::new();
        let Sources { gate, desks, .. } = &bench.observer.sources;
        let ago = |secs| Instant::now() - Duration::from_secs(secs);
        let show = |name: &str, generation, deadline| {
            let identity = Identity::parse(name).unwrap();
            let (thread, progress) = (format!("worker-{generation}"), Arc::default());
            let key = Key { identity: identity.clone(), generation };
            let since = ago(900);
            desks.show(&key, Desk { identity, attempt: 1, since, deadline, thread, progress })
        };
        let _late = show("n1", 1, ago(400));
        let _slow = show("n2", 2, ago(200));
        assert_eq!(bench.observer.stuck(), [""; 0], "there is no connection");
        bench.connect();
        let stuck = "thread worker-1 makes no progress: it has had n1 for 900 s";
        assert_eq!(bench.observer.stuck(), [stuck]);
        gate.close(Reason::Disconnected);
        assert_eq!(bench.observer.stuck(), [""; 0]);
        gate.open(Reason::Disconnected);
        assert_eq!(bench.observer.stuck(), [""; 0], "it has only just been connected again");
        gate.close(Reason::Operator);
        assert_eq!(bench.observer.stuck(), [""; 0]);
    }

    #[test]
    fn whoever_waits_until_other_instances_were_heard_is_not_stuck() {
        let bench = Bench::new();
        let Sources { gate, desks, .. } = &bench.observer.sources;
        let identity = Identity::parse("n1").unwrap();
        let deadline = Instant::now() - Duration::from_secs(400);
        let key = Key { identity: identity.clone(), generation: 1 };
        let (thread, progress) = ("worker-1".to_owned(), Arc::default());
        let desk = Desk { identity, attempt: 1, since: deadline, deadline, thread, progress };
        let _late = desks.show(&key, desk);
        bench.connect();
        assert_eq!(bench.observer.stuck().len(), 1);
        gate.listen();
        assert_eq!(bench.observer.stuck(), [""; 0]);
        gate.lead(BootTime::now() + Duration::from_secs(60));
        assert_eq!(bench.observer.stuck().len(), 1);
    }

    #[test]
    fn the_broker_is_told_and_since_when_there_is_none() {
        let bench = Bench::new();
        let uplink = &bench.observer.sources.uplink;
        let since = uplink.0.lock().1;
        uplink.put(&Link::Down { reason: "refused".into() });
        assert_eq!(*uplink.0.lock(), (None, since), "there has been none since the start");
        bench.connect();
        let server = bench.observer.status().broker.server;
        assert_eq!(server.as_deref(), Some("nats://broker:4222"));
        uplink.put(&Link::Down { reason: "gone".into() });
        assert_eq!(bench.observer.status().broker.server, None);
        assert!(uplink.0.lock().1 > since);
    }

    #[test]
    fn nodes_are_listed_by_state_and_name_in_the_order_asked_for() {
        let bench = Bench::new();
        let roster = &bench.observer.sources.roster;
        bench.fail(&["c.example.net", "a.example.net", "b.example.net"]);
        for name in ["q2.example.net", "q1.example.org"] {
            roster.sight(&Identity::parse(name).unwrap(), Sighting::Discovery);
        }
        let stuck = || Query { state: Which::Stuck, ..Query::default() };
        let names =
            |names: &[&str]| names.iter().map(|name| format!("{name}.example.net")).collect();
        assert_eq!(bench.listed(stuck()), (3, names(&["a", "b", "c"])));
        let by = |sort| Query { sort, ..stuck() };
        assert_eq!(bench.listed(by(Sort::Failures)), (3, names(&["b", "a", "c"])));
        // The third failure costs a wait, the others are due; of these the first by name goes first.
        assert_eq!(bench.listed(by(Sort::Next)), (3, names(&["a", "c", "b"])));
        assert_eq!(
            bench.listed(Query { limit: Some(Limit::near(1)), ..by(Sort::Failures) }),
            (3, names(&["b"]))
        );
        let named = Query { name: "q".into(), ..Query::default() };
        assert_eq!(bench.listed(named.clone()).0, 2);
        assert_eq!(bench.listed(Query { name: "q2.".into(), ..named }), (1, names(&["q2"])));
        assert_eq!(bench.listed(Query::default()).0, 5);
        for which in [Which::Working, Which::Settling] {
            assert_eq!(bench.listed(Query { state: which, ..Query::default() }).0, 0);
        }
        // What is left alone is known for that, also where all are listed.
        for name in ["q1.example.org", "d.example.net"] {
            let denied = roster.registry().deny(&Identity::parse(name).unwrap(), Instant::now());
            assert_eq!(denied, Ok(true));
        }
        let denied = Query { state: Which::Denied, ..Query::default() };
        let both = vec!["d.example.net".to_owned(), "q1.example.org".to_owned()];
        assert_eq!(bench.listed(denied.clone()), (2, both));
        assert_eq!(bench.listed(Query { name: "d.".into(), ..denied }).0, 1);
        assert_eq!(bench.listed(Query::default()).0, 6);
        let all = bench.observer.nodes(&stuck());
        let node = &all.nodes[1];
        assert_eq!(
            (node.failures, node.attempts, &*node.reason),
            (3, 3, "b.example.net is broken")
        );
        assert!(node.next_secs.is_some_and(|secs| secs > 50.0) && node.for_secs.is_none());
        // What is denied is not known any more, and said elsewhere.
        let identity = Identity::parse("b.example.net").unwrap();
        roster.registry().deny(&identity, Instant::now()).unwrap();
        assert_eq!(bench.listed(stuck()).0, 2);
        let status = bench.observer.status();
        assert_eq!((status.counts.denied, &*status.denied[0].node), (3, "b.example.net"));
    }

    #[test]
    fn what_is_equal_is_in_the_order_of_names() {
        let node = |name: &str, seen_secs, next_secs, for_secs| Listed {
            seen_secs,
            next_secs,
            for_secs,
            ..testing::stuck(name, "")
        };
        let mut nodes = vec![
            node("d", 1.0, None, Some(5.0)),
            node("c", 1.0, Some(0.0), None),
            node("b", 2.0, None, Some(9.0)),
            node("a", 2.0, Some(7.0), None),
        ];
        for (sort, expected) in [
            (Sort::Name, "abcd"),
            (Sort::Failures, "abcd"),
            (Sort::Next, "cabd"),
            (Sort::Seen, "abcd"),
        ] {
            nodes.reverse();
            keep_first(&mut nodes, sort, 4);
            let names: String = nodes.iter().map(|node| node.node.as_str()).collect();
            assert_eq!(names, expected, "{sort:?}");
        }
        nodes[3].seen_secs = 3.0;
        keep_first(&mut nodes, Sort::Seen, 1);
        assert_eq!(nodes[0].node, "d");
    }

    #[test]
    fn of_thousands_of_nodes_the_first_are_listed_and_all_are_counted() {
        let bench = Bench::new();
        for number in (0..9_000).rev() {
            let identity = Identity::parse(&format!("n{number:05}.example.net")).unwrap();
            bench.observer.sources.roster.sight(&identity, Sighting::Discovery);
        }
        let (matching, names) =
            bench.listed(Query { limit: Some(Limit::near(20)), ..Query::default() });
        assert_eq!(matching, 9_000);
        let expected: Vec<String> = (0..20).map(|n| format!("n{n:05}.example.net")).collect();
        assert_eq!(names, expected);
        assert_eq!(bench.listed(Query::default()).1.len(), NODES_USUAL);
        assert_eq!(
            bench
                .listed(Query { limit: Some(Limit::near(usize::MAX)), ..Query::default() })
                .1
                .len(),
            9_000
        );
    }
}

/// Values for the tests of whoever shows them.
#[cfg(test)]
pub mod testing {
    use super::*;

    /// Shows the same whenever it is asked, and so much that makes no progress.
    #[derive(Default)]
    pub struct Still(pub Vec<String>);

    impl Show for Still {
        fn stuck(&self) -> Vec<String> {
            self.0.clone()
        }

        fn readiness(&self) -> Readiness {
            Readiness { ready: true, reasons: Vec::new() }
        }

        fn status(&self) -> Status {
            status()
        }

        fn nodes(&self, query: &Query) -> Nodes {
            Nodes { matching: 1, nodes: vec![stuck(&query.name, "because")] }
        }
    }

    /// A daemon at work, with something to show everywhere.
    pub fn status() -> Status {
        let past = |text: &str| Past { text: text.into(), ago_secs: 75.0 };
        Status {
            time: "2026-03-01T02:03:04.005Z".into(),
            version: "0.1.0".into(),
            identity: "provisioner.example.net".into(),
            instance: "instance".into(),
            site: "lon".into(),
            pid: 4242,
            uptime_secs: 90_061.0,
            state: State::Paused,
            state_secs: 200.5,
            closed_by: vec![ClosedBy {
                reason: "operator".into(),
                text: "paused by an operator".into(),
                for_secs: 200.5,
            }],
            ready: false,
            problems: vec!["paused by an operator".into()],
            settings: Settings { read_secs: 3_000.0, refused: None },
            broker: Broker {
                server: Some("nats://broker.example.net:4222".into()),
                for_secs: 3_600.0,
                reconnects: 2,
                last_error: Some(past("connection reset")),
            },
            election: Election::Off,
            peers: Some(Peers {
                part: Sharing::Acting,
                share: 0.5,
                others: vec![Peer {
                    instance: "other".into(),
                    identity: "other.example.net".into(),
                    caller: "choria=other".into(),
                    role: "active".into(),
                    heard_secs: 1.5,
                }],
            }),
            discovery: Discovery {
                last_secs: Some(12.0),
                replies: 40,
                interval_secs: 60.0,
                errors: 1,
            },
            counts: Counts {
                queued: 1_234,
                asked: 100,
                ready: 3,
                working: 1,
                settling: 7,
                waiting: 5,
                denied: 1,
            },
            rates: [1, 5, 15]
                .map(|minutes| RateOver {
                    minutes,
                    provisioned_per_minute: 12.5,
                    errors_per_minute: 0.2,
                })
                .to_vec(),
            totals: Totals { provisioned: 54_321, errors: 12 },
            workers_max: 8,
            workers: vec![Worker {
                node: "busy.example.net".into(),
                attempt: 2,
                for_secs: 31.0,
                step: Some("helper".into()),
                step_secs: 30.5,
            }],
            outcomes: vec![Outcome {
                ago_secs: 4.0,
                node: "failed.example.net".into(),
                outcome: "failed".into(),
                reason: "no space left on device".into(),
                attempt: 3,
                took_secs: 1.5,
            }],
            helper: Helper {
                runs: 999,
                errors: 4,
                failures_in_row: 0,
                last_failure: Some(past("exit code 1")),
                processes: 0,
            },
            tokens: vec![Token {
                token: "signing".into(),
                expires: "2026-04-01T00:00:00Z".into(),
                left_secs: 2_671_016,
            }],
            denied: vec![Denied { node: "denied.example.net".into(), for_secs: 60.0 }],
        }
    }

    /// A node that waits after three failures.
    pub fn stuck(node: &str, reason: &str) -> Listed {
        Listed {
            node: node.into(),
            state: "waiting".into(),
            for_secs: None,
            next_secs: Some(200.0),
            seen_secs: 12.0,
            attempts: 3,
            failures: 3,
            reason: reason.into(),
        }
    }
}
