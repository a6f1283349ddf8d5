//! Fleets, brokers and one to three daemons, and everything that can go wrong with them, under one virtual clock and a
//! seeded generator of trouble.
//!
//! Real are the decisions: registry, prober, permits, retries, rate limit, gate, election and peers run as they are. Models are
//! what is around them: the threads ([`process`], [`probes`], [`attempt`]), the network and the clocks ([`world`],
//! [`network`], [`daemon`]), brokers with the election's bucket ([`broker`]) and the nodes ([`node`]).
//!
//! A time of [`trouble`] is followed by peace, in which every node that can be provisioned must be within a time that is
//! computed for it; then all daemons drain. After every step the invariants of [`checks`] hold.
//!
//! `SIM_SEED=n cargo test --lib fleet::simulation -- --nocapture` replays one seed with a trace, `SIM_SEEDS=n` runs so many.

mod attempt;
pub mod broker;
mod checks;
mod daemon;
pub mod network;
mod node;
mod probes;
mod process;
pub mod seeds;
mod trouble;
mod world;

use std::collections::BTreeSet;
use std::fmt;
use std::time::{Duration, Instant};

use fastrand::Rng;

use crate::clock::BootTime;
use crate::fleet::prober;
use crate::fleet::registry::Limits;
use crate::fleet::simulation::attempt::Step;
use crate::fleet::simulation::node::Node;
use crate::fleet::simulation::process::Sent;
use crate::fleet::simulation::world::World;
use crate::protocol::Identity;
use crate::rpc::actions::Action;

const SEEDS: u64 = 10_000;

/// Microseconds since the beginning.
pub type Time = u64;
pub const MS: Time = 1_000;
pub const SECOND: Time = 1_000 * MS;
const MINUTE: Time = 60 * SECOND;

/// In peace, the longest without a leader but for the key's life: a look for the bucket after a pause, and a win.
pub const LEADERLESS_MAX: Time = 11 * SECOND;

#[test]
fn simulated_daemons_keep_every_invariant_and_provision_their_fleet() {
    let run = |seed, is_traced| World::new(seed, is_traced).run();
    let Some((seeds, seen)) = seeds::run("SIM", "fleet::simulation", SEEDS, run, Seen::add) else {
        return;
    };
    eprintln!("{seeds} seeds, {} steps, {} nodes provisioned", seen.steps, seen.provisioned);
    if seeds >= SEEDS {
        seen.check_that_all_happened();
    }
}

/// What a run is like.
#[derive(Debug)]
struct Setup {
    /// One for each daemon.
    ways: Vec<Way>,
    /// Two of the daemons are one and the same to nodes.
    has_twins: bool,
    limits: Limits,
    /// Whether its registry forgets nodes for want of room.
    forgets: bool,
    queue_max: usize,
    probes: prober::core::Limits,
    permits: usize,
    seats: usize,
    rate: Option<u32>,
    node_timeout: Duration,
    plan: Vec<Step>,
    /// Whether what is sent may wait for the socket.
    stalls: bool,
    /// Nothing happens but what the nodes do.
    is_quiet: bool,
    /// What goes wrong otherwise.
    troubles: Vec<trouble::Kind>,
}

impl Setup {
    fn new(rng: &mut Rng) -> Setup {
        let ways = Way::some(rng);
        let is_alone = ways[0] == Way::Alone;
        let interval = duration(rng.u64(5..if is_alone { 60 } else { 15 }) * SECOND);
        let mut limits = Limits::new(interval, interval * rng.u32(1..4));
        // Small bounds are met by small fleets; forgetting is no fault as long as nodes are found again.
        let forgets = rng.u8(..4) == 0;
        if forgets {
            limits.waiting_max = rng.usize(1..=4);
            limits.settling_max = rng.usize(4..=8);
            limits.kept_max = rng.usize(1..=4);
        }
        let permits = rng.usize(1..=3);
        let mut plan = vec![Step::Call(Action::Jwt)];
        if rng.bool() {
            plan.push(Step::Call(Action::Gen25519));
        }
        plan.push(Step::Call(Action::Inventory));
        if rng.bool() {
            plan.push(Step::Call(Action::GenCsr));
        }
        let end = [Step::Helper, Step::Call(Action::Configure), Step::Call(Action::Restart)];
        plan.extend(end);
        Setup {
            has_twins: !is_alone && ways.len() > 1 && rng.u8(..8) == 0,
            ways,
            limits,
            forgets,
            queue_max: rng.usize(1..=6),
            probes: prober::core::Limits {
                quick_max: rng.usize(1..=4),
                silent_max: rng.usize(1..=3),
                timeout: Duration::from_secs(3),
                held_bytes_max: rng.usize(40..200),
            },
            permits,
            seats: permits + rng.usize(..4),
            rate: (rng.u8(..4) == 0).then(|| rng.u32(1..20)),
            node_timeout: Duration::from_secs(120),
            plan,
            stalls: rng.bool(),
            is_quiet: rng.u8(..5) == 0,
            troubles: trouble::Kind::some(rng),
        }
    }

    /// Whether any daemon goes this way.
    fn has(&self, way: Way) -> bool {
        self.ways.contains(&way)
    }

    /// Whether there is but one, or the nodes' locks alone keep two apart.
    fn is_alone(&self) -> bool {
        self.has(Way::Alone)
    }

    /// Whether some daemons hold an election and others share the nodes, which is a mistake of whoever set them up.
    fn is_mixed(&self) -> bool {
        self.has(Way::Elected) && self.has(Way::Shares)
    }

    fn actions(&self) -> Vec<Action> {
        let action = |step: &Step| if let Step::Call(action) = *step { Some(action) } else { None };
        self.plan.iter().filter_map(action).collect()
    }

    fn probe_timeout(&self) -> Time {
        micros(self.probes.timeout)
    }
}

/// How a daemon keeps out of the others' way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    /// Not at all.
    Alone,
    /// It provisions while it leads.
    Elected,
    /// It provisions its share of the nodes.
    Shares,
}

impl Way {
    /// Those of one to three daemons.
    fn some(rng: &mut Rng) -> Vec<Way> {
        let all = match rng.u8(..11) {
            0..5 => Way::Elected,
            5..7 => Way::Shares,
            // Without an election the nodes' locks keep them apart.
            7..10 => return vec![Way::Alone; if rng.u8(..8) == 0 { 2 } else { 1 }],
            _ => {
                let third = [None, Some(Way::Elected), Some(Way::Shares)][rng.usize(..3)];
                return [Way::Elected, Way::Shares].into_iter().chain(third).collect();
            }
        };
        let count = match rng.u8(..8) {
            0 => 1,
            1..=2 => 3,
            _ => 2,
        };
        vec![all; count]
    }
}

/// What a process has to do with at one moment.
struct Scene<'a> {
    now: Time,
    /// The same by the machine's own clocks.
    mono: Instant,
    boot: BootTime,
    rng: &'a mut Rng,
    setup: &'a Setup,
    nodes: &'a mut [Node],
    seen: &'a mut Seen,
    sent: &'a mut Vec<Sent>,
    drops_connection: &'a mut bool,
    /// Nothing goes wrong any more but with the nodes.
    peace: bool,
    /// Until when network, brokers, daemons or operators were in anybody's way.
    disturbed_at: &'a mut Time,
    /// The daemon, if all is to be told.
    trace: Option<usize>,
}

impl Scene<'_> {
    fn note(&mut self, thing: &'static str) {
        self.seen.note(thing);
    }

    fn say(&self, what: &fmt::Arguments<'_>) {
        if let Some(daemon) = self.trace {
            say(self.now, &format_args!("  {daemon}: {what}"));
        }
    }

    fn index(&self, identity: &Identity) -> usize {
        let is_it = |node: &Node| node.identity == *identity;
        self.nodes.iter().position(is_it).expect("all keys are of our nodes")
    }

    fn count_attempt(&mut self, node: usize) {
        self.nodes[node].attempts += u64::from(self.peace);
    }

    fn is_disturbed_since(&self, since: Time) -> bool {
        *self.disturbed_at >= since
    }
}

/// What happened at least once, so that a generator that stopped making trouble is noticed.
#[derive(Debug, Default)]
struct Seen {
    steps: u64,
    provisioned: u64,
    things: BTreeSet<&'static str>,
}

impl Seen {
    fn note(&mut self, thing: &'static str) {
        self.things.insert(thing);
    }

    fn add(&mut self, other: &Seen) {
        self.steps += other.steps;
        self.provisioned += other.provisioned;
        self.things.extend(&other.things);
    }

    fn check_that_all_happened(&self) {
        for thing in [
            "provisioned",
            "upgrade_sent",
            "shutdown",
            "deferred",
            "busy",
            "helper_failed",
            "wrong_token",
            "misconfigured",
            "unreachable",
            "refused",
            "failed",
            "not_provisioning",
            "queue full",
            "denied",
            "not due",
            "ask again",
            "came back",
            "term ended",
            "deadline",
            "aborted",
            "excused",
            "not current",
            "answered late",
            "two answers to a probe",
            "given up",
            "waited for a permit",
            "link lost during a step",
            "too late for what waited",
            "elected",
            "leadership lost",
            "handed over",
            "a term outlived a connection",
            "woke up as former leader",
            "a number of another bucket",
            "leader killed",
            "partition",
            "broker restart",
            "another's",
            "provisions its share",
            "a share was gained",
            "left its share",
            "a term outlived a silence",
            "listened after it woke up",
            "answered one without an election",
            "stood by beside a leader",
            "stood by beside an older one",
            "stayed out beside an older one",
        ] {
            assert!(self.things.contains(thing), "no seed saw: {thing}");
        }
        assert!(self.provisioned > SEEDS, "{self:?}");
    }
}

fn say(now: Time, what: &fmt::Arguments<'_>) {
    eprintln!("{:>12.6} {what}", now as f64 / SECOND as f64);
}

pub fn duration(time: Time) -> Duration {
    Duration::from_micros(time)
}

pub fn micros(duration: Duration) -> Time {
    u64::try_from(duration.as_micros()).expect("the simulation is short")
}
