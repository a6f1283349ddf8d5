//! The practice fleet: thousands of simulated nodes on a few connections to a broker, in the clear or in TLS.
//!
//! Each node has a subscription of its own, so that a broker answers "no responders" for those that are gone.
//! No node has a thread: one thread a connection reads and answers, one more does what is due later.
//! `node` says how one node behaves, `fault` what can be wrong with it, `watch` what a provisioner must not do.

// Each test binary uses its own part of this.
#![allow(dead_code, unused_imports)]

pub mod authority;
pub mod broker;
#[path = "../../src/pki/testing.rs"]
#[allow(clippy::unwrap_used, reason = "what is made for tests is made or the test fails")]
pub mod certificates;
pub mod crowd;
pub mod envelope;
pub mod event;
pub mod fault;
pub mod issuer;
pub mod keys;
pub mod network;
pub mod node;
pub mod socket;
pub mod streams;
pub mod watch;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, HashMap};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use openssl::pkey::{PKey, Private};
use openssl::x509::X509;
use parking_lot::{Condvar, Mutex};

use broker::{Connection, Delivery, Login};
pub use envelope::Protocol;
use envelope::Request;
pub use event::{Encoding, Kind};
pub use fault::{Action, Csr, Damage, Envelope, Expected, Fault, Token};
use issuer::Organization;
use keys::{Said, Tokens};
use node::{Admission, Effect, Node, Now, Site};
pub use node::{Received, State};
use watch::{Checks, Trust, Watch};

/// Which nodes get a fault.
#[derive(Debug, Clone)]
pub enum Which {
    /// As many of those that have none yet, spread over the fleet.
    Count(usize),
    /// Those with these numbers.
    Numbers(Range<usize>),
    /// The one with this name.
    Named(String),
}

impl From<usize> for Which {
    fn from(count: usize) -> Which {
        Which::Count(count)
    }
}

impl From<Range<usize>> for Which {
    fn from(numbers: Range<usize>) -> Which {
        Which::Numbers(numbers)
    }
}

impl From<&str> for Which {
    fn from(name: &str) -> Which {
        Which::Named(name.to_owned())
    }
}

/// What a fleet is made of.
#[derive(Debug)]
pub struct Builder {
    url: String,
    names: Vec<String>,
    faults: Vec<(Which, Fault)>,
    connections: usize,
    token: String,
    component: String,
    encoding: Encoding,
    version: String,
    upgradable: bool,
    facts: String,
    restart_delay: Duration,
    delay: Duration,
    jitter: Duration,
    announce: bool,
    discoverable: bool,
    pki: bool,
    provisioners: usize,
    protocol: Protocol,
    tls: bool,
    user: Option<(String, String)>,
    key: Option<PKey<Private>>,
    admission: Admission,
    trust: Trust,
    checks: Checks,
}

/// How long the start of a fleet may take.
const START_TIMEOUT: Duration = Duration::from_secs(60);

impl Builder {
    /// Adds `count` nodes called `n0.fleet.example.net` and so on.
    pub fn nodes(mut self, count: usize) -> Builder {
        let first = self.names.len();
        self.names.extend((first..first + count).map(|at| format!("n{at}.fleet.example.net")));
        self
    }

    /// Adds one node with this name.
    pub fn node(mut self, name: &str) -> Builder {
        self.names.push(name.to_owned());
        self
    }

    /// Adds one node with this name and fault.
    pub fn broken(self, name: &str, fault: Fault) -> Builder {
        self.node(name).fault(name, fault)
    }

    /// Gives nodes a fault.
    pub fn fault(mut self, which: impl Into<Which>, fault: Fault) -> Builder {
        self.faults.push((which.into(), fault));
        self
    }

    /// How many connections the nodes share; one for each thousand nodes, at most four, by default.
    pub fn connections(mut self, count: usize) -> Builder {
        self.connections = count;
        self
    }

    /// The provisioning token; `s3cret` by default.
    pub fn token(mut self, token: &str) -> Builder {
        self.token = token.to_owned();
        self
    }

    /// How events are written; as CloudEvents by default.
    pub fn events(mut self, encoding: Encoding) -> Builder {
        self.encoding = encoding;
        self
    }

    /// The component of events; `provision_mode_server` by default.
    pub fn component(mut self, component: &str) -> Builder {
        self.component = component.to_owned();
        self
    }

    /// The version nodes report.
    pub fn version(mut self, version: &str) -> Builder {
        self.version = version.to_owned();
        self
    }

    /// Lets nodes be upgraded.
    pub fn upgradable(mut self) -> Builder {
        self.upgradable = true;
        self
    }

    /// The facts of every node, as JSON text.
    pub fn facts(mut self, json: &str) -> Builder {
        self.facts = json.to_owned();
        self
    }

    /// How long a restart with splay 1 takes; 2 s as on a real node by default.
    pub fn restart_delay(mut self, delay: Duration) -> Builder {
        self.restart_delay = delay;
        self
    }

    /// How long each answer takes; no time at all by default.
    pub fn delay(mut self, delay: Duration) -> Builder {
        self.delay = delay;
        self
    }

    /// Over how long answers to discovery are spread; 100 ms by default.
    pub fn jitter(mut self, jitter: Duration) -> Builder {
        self.jitter = jitter;
        self
    }

    /// Whether nodes publish a startup event when the fleet starts; they do by default.
    pub fn announce(mut self, announce: bool) -> Builder {
        self.announce = announce;
        self
    }

    /// Whether nodes answer discovery; they do by default.
    pub fn discoverable(mut self, discoverable: bool) -> Builder {
        self.discoverable = discoverable;
        self
    }

    /// Makes the CSRs ahead of time.
    pub fn pki(mut self) -> Builder {
        self.pki = true;
        self
    }

    /// Lets nodes connect in TLS with their provisioning JWT as the token, as real ones do.
    pub fn tls(mut self) -> Builder {
        self.tls = true;
        self
    }

    /// User and password, which real nodes have from their provisioning JWT; they count in TLS only.
    pub fn user(mut self, user: &str, password: &str) -> Builder {
        self.user = Some((user.to_owned(), password.to_owned()));
        self
    }

    /// The key that signs provisioning JWTs, RSA or Ed25519; an RSA key of this process by default.
    pub fn signing_key(mut self, key: PKey<Private>) -> Builder {
        self.key = Some(key);
        self
    }

    /// What `jwt_verify_cert` has to be for these nodes: a public key, in PEM or hex.
    pub fn verify_key(&self) -> String {
        match &self.key {
            Some(key) => keys::verify_key(key),
            None => keys::verify_key_pem(),
        }
    }

    /// Makes the nodes members of an organization: its issuer signed their provisioning JWTs, and its brokers want server JWTs.
    pub fn organization(mut self, organization: &Organization) -> Builder {
        self.admission = Admission::ServerJwt(organization.clone());
        self.signing_key(organization.key().clone())
    }

    /// Protocol v2 for the nodes of an organization; its issuer, or a chain issuer of it, must have made the provisioner's token.
    pub fn v2(self, organization: &Organization) -> Builder {
        let mut builder = self.organization(organization);
        builder.protocol = Protocol::V2;
        builder.trust = Trust::Issuer(organization.public_key());
        builder
    }

    /// The authority that must have issued the provisioner's certificate, and those that nodes are given.
    pub fn authority(mut self, authority: &X509) -> Builder {
        self.trust = Trust::Authority(authority.clone());
        self.admission = Admission::Certificate(authority.clone());
        self
    }

    /// Puts off what takes long to check until [`Fleet::violations`]: no node that waits to be provisioned looks at the signature
    /// of a request, and what its broker thinks of a server JWT costs another machine.
    pub fn check_later(mut self) -> Builder {
        self.checks = Checks::Later;
        self
    }

    /// How many different provisioners may send requests; one by default.
    pub fn provisioners(mut self, count: usize) -> Builder {
        self.provisioners = count;
        self
    }

    /// Connects, subscribes all nodes, then publishes their startup events.
    ///
    /// # Panics
    ///
    /// When the broker cannot be reached within a minute.
    pub fn start(self) -> Fleet {
        let fleet = self.start_quietly();
        fleet.announce();
        fleet
    }

    /// Connects and subscribes all nodes; events wait for [`Fleet::announce`].
    ///
    /// # Panics
    ///
    /// When the broker cannot be reached within a minute.
    pub fn start_quietly(self) -> Fleet {
        let unix = unix_now();
        let said = Said {
            token: &self.token,
            broker_url: &self.url,
            user: self.user.as_ref(),
            upgradable: self.upgradable,
            protocol: self.protocol,
            time: unix,
        };
        let site = Site {
            tokens: Tokens::new(self.key.as_ref().unwrap_or_else(|| keys::signing_key()), &said),
            protocol: self.protocol,
            admission: self.admission,
            checks: self.checks,
            token: self.token,
            component: self.component,
            encoding: self.encoding,
            version: self.version,
            upgradable: self.upgradable,
            facts: self.facts,
            restart_delay: self.restart_delay,
            delay: self.delay,
            broker_url: self.url.clone(),
        };
        let watch = Watch::new(self.provisioners, self.protocol, self.trust, self.checks);
        let mut faults = assign(&self.names, self.faults);
        let mut nodes = Vec::with_capacity(self.names.len());
        for (at, name) in self.names.iter().enumerate() {
            let mut node = Node::new(name.clone(), faults.remove(&at));
            node.online = node.fault != Some(Fault::Gone);
            if self.pki {
                node.prepare_csr();
            }
            nodes.push(Mutex::new(node));
        }
        let by_name = self.names.into_iter().enumerate().map(|(at, name)| (name, at)).collect();
        let count = match self.connections {
            0 => nodes.len().div_ceil(1_000).clamp(1, 4),
            count => count,
        };
        let login =
            self.tls.then(|| Login { token: site.tokens.good.clone(), user: self.user.clone() });
        let connections = (0..count)
            .map(|at| Connection::new(&self.url, &format!("practice-fleet-{at}"), login.clone()))
            .collect();
        let inner = Arc::new(Inner {
            site,
            nodes,
            by_name,
            connections,
            announce: self.announce,
            discoverable: self.discoverable,
            jitter: self.jitter,
            begun: Instant::now(),
            watch,
            due: Mutex::default(),
            first_discovery: Mutex::default(),
            wake: Condvar::new(),
            progress: Mutex::new(0),
            progressed: Condvar::new(),
            provisioned: AtomicUsize::new(0),
            stopped: AtomicBool::new(false),
        });
        let mut threads = Vec::new();
        for at in 0..count {
            let inner = Arc::clone(&inner);
            threads.push(spawn(&format!("fleet-{at}"), move || inner.read(at)));
        }
        let timer = Arc::clone(&inner);
        threads.push(spawn("fleet-timer", move || timer.keep_time()));
        let deadline = Instant::now() + START_TIMEOUT;
        for connection in &inner.connections {
            let settled = connection.settle(deadline);
            assert!(settled, "the fleet did not reach the broker: {:?}", connection.complaint());
        }
        Fleet { inner, threads }
    }
}

/// Spreads faults over the nodes: node number → fault.
fn assign(names: &[String], faults: Vec<(Which, Fault)>) -> HashMap<usize, Fault> {
    let mut assigned = HashMap::new();
    let mut counted = Vec::new();
    for (which, fault) in faults {
        match which {
            Which::Numbers(numbers) => assigned.extend(numbers.map(|at| (at, fault.clone()))),
            Which::Named(name) => {
                let at = names.iter().position(|known| *known == name);
                assigned.insert(at.expect("a fault is for a node of the fleet"), fault);
            }
            Which::Count(count) => counted.extend(std::iter::repeat_n(fault, count)),
        }
    }
    let free: Vec<usize> = (0..names.len()).filter(|at| !assigned.contains_key(at)).collect();
    let counted: Vec<Fault> = counted.into_iter().take(free.len()).collect();
    let total = counted.len();
    for (at, fault) in counted.into_iter().enumerate() {
        assigned.insert(free[at * free.len() / total], fault);
    }
    assigned
}

/// A running fleet; it leaves the broker when dropped.
#[derive(Debug)]
pub struct Fleet {
    inner: Arc<Inner>,
    threads: Vec<JoinHandle<()>>,
}

impl Fleet {
    /// A fleet on the broker at `url`, such as `nats://127.0.0.1:4222`.
    pub fn builder(url: &str) -> Builder {
        Builder {
            url: url.to_owned(),
            names: Vec::new(),
            faults: Vec::new(),
            connections: 0,
            token: "s3cret".to_owned(),
            component: "provision_mode_server".to_owned(),
            encoding: Encoding::Cloud,
            version: "0.30.2".to_owned(),
            upgradable: false,
            facts: "{}".to_owned(),
            restart_delay: Duration::from_secs(2),
            delay: Duration::ZERO,
            jitter: Duration::from_millis(100),
            announce: true,
            discoverable: true,
            pki: false,
            provisioners: 1,
            protocol: Protocol::V1,
            tls: false,
            user: None,
            key: None,
            admission: Admission::Anybody,
            trust: Trust::Anybody,
            checks: Checks::AtOnce,
        }
    }

    /// The public key of the provisioning JWTs, as PEM.
    pub fn verify_key_pem() -> String {
        keys::verify_key_pem()
    }

    /// The provisioning JWT of its healthy nodes.
    pub fn provisioning_jwt(&self) -> &str {
        &self.inner.site.tokens.good
    }

    /// Publishes the startup event of every node that announces itself.
    pub fn announce(&self) {
        let inner = &self.inner;
        for (at, node) in inner.nodes.iter().enumerate() {
            let node = node.lock();
            let times = match node.fault {
                Some(Fault::EventStorm(times)) => times,
                _ => u32::from(inner.announce),
            };
            for _ in 0..times {
                let (subject, payload) = node.event(&inner.site, Kind::Startup, now());
                inner.connection(at).publish(&subject, &payload);
            }
        }
        let deadline = Instant::now() + START_TIMEOUT;
        for connection in &inner.connections {
            connection.settle(deadline);
        }
    }

    /// How many nodes there are.
    pub fn len(&self) -> usize {
        self.inner.nodes.len()
    }

    /// Whether there is no node.
    pub fn is_empty(&self) -> bool {
        self.inner.nodes.is_empty()
    }

    /// The node with this number.
    pub fn node(&self, at: usize) -> View<'_> {
        View { inner: &self.inner, at }
    }

    /// The node with this name.
    ///
    /// # Panics
    ///
    /// When there is none.
    pub fn named(&self, name: &str) -> View<'_> {
        let at = self.inner.by_name.get(name);
        self.node(*at.unwrap_or_else(|| panic!("no node is called {name}")))
    }

    /// All nodes.
    pub fn iter(&self) -> impl Iterator<Item = View<'_>> {
        (0..self.len()).map(|at| self.node(at))
    }

    /// Lets all nodes go on that keep their answers back, see [`Fault::Holds`]: what they kept is sent.
    pub fn go_on(&self) {
        for (at, node) in self.inner.nodes.iter().enumerate() {
            for (subject, payload) in node.lock().go_on() {
                self.inner.connection(at).publish(&subject, &payload);
            }
        }
        self.settle();
    }

    /// The same, but what they kept is lost: it would have gone over a connection that is no more.
    pub fn go_on_without(&self) {
        for node in &self.inner.nodes {
            node.lock().go_on();
        }
    }

    /// How many nodes are configured and on their way, or there already. Whoever measures asks often, so nobody counts them then.
    pub fn provisioned(&self) -> usize {
        self.inner.provisioned.load(Ordering::Relaxed)
    }

    /// How many nodes are in each state.
    pub fn states(&self) -> BTreeMap<State, usize> {
        let mut states = BTreeMap::new();
        for node in self.iter() {
            *states.entry(node.state()).or_default() += 1;
        }
        states
    }

    /// Waits until every node that a correct provisioner can serve is provisioned.
    ///
    /// # Errors
    ///
    /// Names and states of those that are not when `deadline` has passed.
    pub fn wait_all_provisioned(&self, deadline: Instant) -> Result<(), String> {
        self.wait(deadline, |fleet| {
            let missing: Vec<String> = fleet
                .iter()
                .filter(|node| node.expected() == Expected::Provisioned && !node.is_provisioned())
                .map(|node| node.describe())
                .collect();
            if missing.is_empty() {
                return Ok(());
            }
            let shown = missing[..missing.len().min(10)].join("; ");
            Err(format!("{} nodes are not provisioned: {shown}", missing.len()))
        })
    }

    /// Waits until `count` nodes are provisioned.
    ///
    /// # Errors
    ///
    /// How many there were when `deadline` had passed.
    pub fn wait_provisioned(&self, count: usize, deadline: Instant) -> Result<(), String> {
        self.wait(deadline, |fleet| {
            let done = fleet.provisioned();
            if done >= count { Ok(()) } else { Err(format!("{done} of {count} nodes provisioned")) }
        })
    }

    /// Waits until `check` is content; it runs again whenever a node was asked something.
    ///
    /// # Errors
    ///
    /// What `check` said last when `deadline` has passed.
    pub fn wait(
        &self,
        deadline: Instant,
        check: impl Fn(&Fleet) -> Result<(), String>,
    ) -> Result<(), String> {
        loop {
            let seen = *self.inner.progress.lock();
            let problem = match check(self) {
                Ok(()) => return Ok(()),
                Err(problem) => problem,
            };
            let mut progress = self.inner.progress.lock();
            if *progress == seen
                && self.inner.progressed.wait_until(&mut progress, deadline).timed_out()
            {
                return Err(problem);
            }
            drop(progress);
            // Looking at thousands of nodes after each of thousands of requests would slow both sides down.
            thread::sleep(Duration::from_millis(5));
            if Instant::now() > deadline {
                return Err(problem);
            }
        }
    }

    /// When the first discovery request came, whether the nodes answer it or not.
    pub fn first_discovery(&self) -> Option<Instant> {
        *self.inner.first_discovery.lock()
    }

    /// What was seen that a correct provisioner never does.
    pub fn violations(&self) -> Vec<String> {
        let lockouts = self.inner.nodes.iter().filter_map(|node| {
            let node = node.lock();
            let why = match self.inner.site.checks {
                Checks::AtOnce => node.lockout.clone(),
                Checks::Later => node.check_credentials(&self.inner.site, now()),
            };
            Some(format!("{}: brokers keep it out: {}", node.identity, why?))
        });
        self.inner.watch.violations().into_iter().chain(lockouts).collect()
    }

    /// Publishes anything at all, as an attacker in the account could.
    pub fn publish(&self, subject: &str, payload: &[u8]) {
        self.inner.connections[0].publish(subject, payload);
    }

    /// Publishes startup events for these identities, whatever they are, and waits until the broker has them.
    pub fn announce_identities<'a>(&self, identities: impl IntoIterator<Item = &'a str>) {
        let (site, connection) = (&self.inner.site, &self.inner.connections[0]);
        let subject = Kind::Startup.subject(&site.component);
        for identity in identities {
            let event = event::Event {
                kind: Kind::Startup,
                identity,
                component: &site.component,
                id: &event::uuid(),
                time: unix_now(),
                version: &site.version,
                new_version: None,
            };
            connection.publish(&subject, &event.encode(site.encoding));
        }
        connection.settle(Instant::now() + START_TIMEOUT);
    }

    /// Waits until the broker has all that was published.
    pub fn settle(&self) {
        for connection in &self.inner.connections {
            connection.settle(Instant::now() + START_TIMEOUT);
        }
    }

    /// Messages that were larger than the broker takes and so never left their nodes.
    pub fn too_large(&self) -> u64 {
        let counts = self.inner.connections.iter();
        counts.map(|connection| connection.too_large.load(Ordering::Relaxed)).sum()
    }

    /// What became of each node, as JSON.
    pub fn report(&self) -> String {
        let nodes: Vec<serde_json::Value> = self
            .iter()
            .map(|node| {
                serde_json::json!({
                    "node": node.identity(),
                    "state": node.state().word(),
                    "fault": node.fault().map(|fault| fault.to_string()),
                    "expected": match node.expected() {
                        Expected::Provisioned => "provisioned",
                        Expected::Broken => "broken",
                        Expected::Either => "either",
                    },
                    "provisioned": node.is_provisioned(),
                    "configured": node.times_configured(),
                    "restarted": node.times_restarted(),
                    "requests": Action::ALL
                        .into_iter()
                        .filter(|&action| node.times_asked(action) > 0)
                        .map(|action| (action.name().to_owned(), node.times_asked(action).into()))
                        .collect::<serde_json::Map<_, _>>(),
                })
            })
            .collect();
        let report = serde_json::json!({
            "nodes": nodes,
            "provisioned": self.provisioned(),
            "violations": self.violations(),
        });
        format!("{report:#}\n")
    }
}

impl Drop for Fleet {
    fn drop(&mut self) {
        self.inner.stopped.store(true, Ordering::Relaxed);
        self.inner.wake.notify_all();
        for connection in &self.inner.connections {
            connection.stop();
        }
        for thread in self.threads.drain(..) {
            // A panic of a fleet thread must not hide behind the test's own.
            if thread.join().is_err() && !thread::panicking() {
                panic!("a thread of the fleet panicked");
            }
        }
    }
}

/// One node, looked at from outside.
#[derive(Clone, Copy)]
pub struct View<'a> {
    inner: &'a Inner,
    at: usize,
}

impl View<'_> {
    /// Its name.
    pub fn identity(&self) -> String {
        self.lock().identity.clone()
    }

    /// What is wrong with it.
    pub fn fault(&self) -> Option<Fault> {
        self.lock().fault.clone()
    }

    /// What a correct provisioner makes of it.
    pub fn expected(&self) -> Expected {
        self.lock().fault.as_ref().map_or(Expected::Provisioned, Fault::expected)
    }

    /// Where it is in its life.
    pub fn state(&self) -> State {
        self.lock().state
    }

    /// Whether it is configured and on its way, or there already.
    pub fn is_provisioned(&self) -> bool {
        self.lock().is_provisioned()
    }

    /// The request for a certificate that [`Builder::pki`] made ahead, until it was asked for.
    pub fn prepared_csr(&self) -> Option<keys::Request> {
        self.lock().prepared_csr.as_deref().cloned()
    }

    /// The version it reports.
    pub fn version(&self) -> String {
        self.lock().version(&self.inner.site).to_owned()
    }

    /// What `configure` brought last.
    pub fn received(&self) -> Option<Received> {
        self.lock().received.as_deref().cloned()
    }

    /// The settings that `configure` brought last; empty before.
    pub fn configuration(&self) -> BTreeMap<String, String> {
        self.received().map(|received| received.configuration).unwrap_or_default()
    }

    /// How often `configure` succeeded.
    pub fn times_configured(&self) -> u32 {
        self.lock().times_configured
    }

    /// How often `restart` was accepted.
    pub fn times_restarted(&self) -> u32 {
        self.lock().times_restarted
    }

    /// Whether it keeps an answer back.
    pub fn is_holding(&self) -> bool {
        self.lock().is_holding()
    }

    /// How often it was asked for anything, answered or not.
    pub fn times_asked_at_all(&self) -> u32 {
        self.lock().asked.iter().sum()
    }

    /// How often it was asked for `action`, answered or not.
    pub fn times_asked(&self, action: Action) -> u32 {
        self.lock().times_asked(action)
    }

    /// One line for a failed assertion.
    pub fn describe(&self) -> String {
        let node = self.lock();
        let fault = node.fault.as_ref().map_or("healthy".to_owned(), ToString::to_string);
        let asked: Vec<String> = Action::ALL
            .into_iter()
            .filter(|&action| node.times_asked(action) > 0)
            .map(|action| format!("{} {}", action.name(), node.times_asked(action)))
            .collect();
        format!(
            "{} ({fault}) is {}, configured {} times, asked [{}]",
            node.identity,
            node.state.word(),
            node.times_configured,
            asked.join(", ")
        )
    }

    fn lock(&self) -> parking_lot::MutexGuard<'_, Node> {
        self.inner.nodes[self.at].lock()
    }
}

#[derive(Debug)]
struct Inner {
    site: Site,
    nodes: Vec<Mutex<Node>>,
    by_name: HashMap<String, usize>,
    connections: Vec<Connection>,
    announce: bool,
    discoverable: bool,
    jitter: Duration,
    begun: Instant,
    watch: Watch,
    due: Mutex<Due>,
    first_discovery: Mutex<Option<Instant>>,
    wake: Condvar,
    progress: Mutex<u64>,
    progressed: Condvar,
    /// How many nodes are.
    provisioned: AtomicUsize,
    stopped: AtomicBool,
}

#[derive(Debug, Default)]
struct Due {
    /// Ordered by time, then by the order of arrival.
    heap: BinaryHeap<Reverse<(Instant, u64)>>,
    tasks: HashMap<u64, Task>,
    next: u64,
}

#[derive(Debug)]
enum Task {
    Publish { at: usize, subject: String, payload: Vec<u8> },
    Leave { at: usize, announced: bool },
    Pong { nodes: Vec<usize>, request: Arc<Request> },
}

/// The broadcasts a node listens to; their subscriptions are numbered from one.
const BROADCASTS: [&str; 4] = ["discovery", "rpcutil", "choria_util", "choria_provision"];
/// Subscriptions of nodes are numbered from here.
const FIRST_SID: u64 = 100;
/// What is due after that long or longer is done in groups, one each [`GROUP`]: real nodes wake threads of other machines.
const GROUPED_FROM: Duration = Duration::from_secs(1);
const GROUP: Duration = Duration::from_millis(20);
/// In how many portions the answers to one discovery go out.
const PORTIONS: usize = 10;

impl Inner {
    fn connection(&self, at: usize) -> &Connection {
        &self.connections[at % self.connections.len()]
    }

    /// The numbers of the nodes on one connection.
    fn on_connection(&self, connection: usize) -> impl Iterator<Item = usize> + use<> {
        (connection..self.nodes.len()).step_by(self.connections.len())
    }

    fn read(&self, connection: usize) {
        let subscribe = |broker: &Connection| {
            for (at, agent) in BROADCASTS.into_iter().enumerate() {
                broker.subscribe(at as u64 + 1, &format!("provisioning.broadcast.agent.{agent}"));
            }
            for at in self.on_connection(connection) {
                let node = self.nodes[at].lock();
                if node.online {
                    let subject = format!("provisioning.node.{}", node.identity);
                    broker.subscribe(FIRST_SID + at as u64, &subject);
                }
            }
        };
        let mut effects = Vec::new();
        self.connections[connection].run(&subscribe, &mut |delivery| {
            self.deliver(connection, delivery, &mut effects);
        });
    }

    fn deliver(&self, connection: usize, delivery: &Delivery<'_>, effects: &mut Vec<Effect>) {
        let request = match Request::decode(self.site.protocol, delivery.payload) {
            Ok(request) => request,
            Err(why) => {
                self.watch.unreadable(delivery.subject, &why);
                return self.note_progress();
            }
        };
        let Some(at) = delivery.sid.checked_sub(FIRST_SID) else {
            return self.broadcast(connection, request);
        };
        let at = at as usize;
        let now = now();
        self.change(at, |node| {
            self.watch.directed(&node.identity, delivery.reply, &request, now.unix);
            node.receive(&self.site, &request, now, effects);
        });
        self.carry_out(at, effects);
        self.note_progress();
    }

    /// Lets something happen to a node.
    fn change<T>(&self, at: usize, happens: impl FnOnce(&mut Node) -> T) -> T {
        let mut node = self.nodes[at].lock();
        let was_provisioned = node.is_provisioned();
        let result = happens(&mut node);
        match (was_provisioned, node.is_provisioned()) {
            (false, true) => self.provisioned.fetch_add(1, Ordering::Relaxed),
            (true, false) => self.provisioned.fetch_sub(1, Ordering::Relaxed),
            _ => 0,
        };
        result
    }

    fn note_progress(&self) {
        *self.progress.lock() += 1;
        self.progressed.notify_all();
    }

    /// Lets all nodes of a connection answer in portions, spread over the jitter.
    fn broadcast(&self, connection: usize, request: Request) {
        self.watch.discovery(&request, unix_now());
        self.first_discovery.lock().get_or_insert_with(Instant::now);
        if !self.discoverable {
            return;
        }
        let request = Arc::new(request);
        let mut nodes: Vec<usize> = self.on_connection(connection).collect();
        fastrand::shuffle(&mut nodes);
        let portion = nodes.len().div_ceil(PORTIONS).max(1);
        for (turn, nodes) in nodes.chunks(portion).enumerate() {
            let after = self.jitter * turn as u32 / PORTIONS as u32;
            let task = Task::Pong { nodes: nodes.to_vec(), request: Arc::clone(&request) };
            self.later(after, task);
        }
    }

    fn carry_out(&self, at: usize, effects: &mut Vec<Effect>) {
        for effect in effects.drain(..) {
            match effect {
                Effect::Publish { subject, payload, after } if after.is_zero() => {
                    self.connection(at).publish(&subject, &payload);
                }
                Effect::Publish { subject, payload, after } => {
                    self.later(after, Task::Publish { at, subject, payload });
                }
                // With the answer before it, so that nothing that is asked after that answer gets one.
                Effect::Leave { after, announced } if after.is_zero() => self.leave(at, announced),
                Effect::Leave { after, announced } => {
                    self.later(after, Task::Leave { at, announced });
                }
            }
        }
    }

    fn later(&self, after: Duration, task: Task) {
        let mut when = Instant::now() + after;
        if after >= GROUPED_FROM {
            let since = when.duration_since(self.begun).as_nanos();
            let wait = GROUP.as_nanos() - since % GROUP.as_nanos();
            when += Duration::from_nanos(u64::try_from(wait).unwrap_or_default());
        }
        let mut due = self.due.lock();
        let number = due.next;
        due.next += 1;
        let is_next = due.heap.peek().is_none_or(|Reverse((first, _))| when < *first);
        due.heap.push(Reverse((when, number)));
        due.tasks.insert(number, task);
        drop(due);
        if is_next {
            self.wake.notify_all();
        }
    }

    fn keep_time(&self) {
        let mut effects = Vec::new();
        while !self.stopped.load(Ordering::Relaxed) {
            let mut due = self.due.lock();
            let now = Instant::now();
            let mut ready = Vec::new();
            while let Some(&Reverse((when, number))) = due.heap.peek() {
                if when > now {
                    break;
                }
                due.heap.pop();
                ready.extend(due.tasks.remove(&number));
            }
            if ready.is_empty() {
                // The stop flag is looked at now and then, however long nothing is due.
                let pause = now + Duration::from_millis(100);
                let until = due.heap.peek().map_or(pause, |Reverse((when, _))| pause.min(*when));
                self.wake.wait_until(&mut due, until);
                continue;
            }
            drop(due);
            for task in ready {
                self.do_now(task, &mut effects);
            }
            for connection in &self.connections {
                connection.flush();
            }
        }
    }

    fn do_now(&self, task: Task, effects: &mut Vec<Effect>) {
        match task {
            Task::Publish { at, subject, payload } => {
                self.connection(at).publish(&subject, &payload);
            }
            Task::Pong { nodes, request } => {
                for at in nodes {
                    self.change(at, |node| node.receive(&self.site, &request, now(), effects));
                    self.carry_out(at, effects);
                }
            }
            Task::Leave { at, announced } => self.leave(at, announced),
        }
    }

    /// The node goes, and may come back at once.
    fn leave(&self, at: usize, announced: bool) {
        let (connection, sid) = (self.connection(at), FIRST_SID + at as u64);
        self.change(at, |node| {
            if announced {
                let (subject, payload) = node.event(&self.site, Kind::Shutdown, now());
                connection.publish(&subject, &payload);
            }
            connection.unsubscribe(sid);
            if node.left() {
                node.online = true;
                connection.subscribe(sid, &format!("provisioning.node.{}", node.identity));
                let (subject, payload) = node.event(&self.site, Kind::Startup, now());
                connection.publish(&subject, &payload);
            }
        });
        self.note_progress();
    }
}

fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> JoinHandle<()> {
    thread::Builder::new().name(name.to_owned()).spawn(body).expect("threads can be started")
}

fn now() -> Now {
    Now { instant: Instant::now(), unix: unix_now() }
}

/// Seconds since 1970.
pub fn unix_now() -> i64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(now.as_secs()).unwrap_or(i64::MAX)
}
