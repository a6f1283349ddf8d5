//! A daemon's machine: its clocks, and the process that runs on it.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use fastrand::Rng;

use crate::clock::BootTime;
use crate::fleet::simulation::network::{Network, PEACE};
use crate::fleet::simulation::process::{Input, Process};
use crate::fleet::simulation::{Time, Way, duration, micros};
use crate::protocol::peer::Heartbeat;
use crate::protocol::{Identity, Sender};

/// One of our daemons, whichever process it is at the time.
pub struct Daemon {
    /// Who it is to nodes and peers.
    pub sender: Sender,
    pub way: Way,
    /// What its peers may have heard of it.
    pub voice: Voice,
    /// Its writes to the election's key, by their tickets.
    pub writes: Echo,
    pub clock: Clock,
    network: Network,
    /// Its way to the broker is slow until then.
    pub congested_until: Time,
    /// The numbers that its writes were given, and which bucket gave each last.
    pub numbers: BTreeMap<u64, u32>,
    /// Counts its processes.
    pub incarnation: u32,
    pub process: Option<Process>,
    pub is_frozen: bool,
    /// What came while it was frozen.
    pub waiting: Vec<Input>,
    /// The connection that there really is: its broker, and its number. The process hears of its end later.
    pub connection: Option<(usize, u32)>,
    pub connected_at: Time,
    /// Counts connections.
    pub links: u32,
    pub fleet_wakes: Option<Time>,
    pub election_wakes: Option<Time>,
}

impl Daemon {
    pub fn new(name: usize, way: Way, is_smooth: bool, rng: &mut Rng) -> Daemon {
        let identity = Identity::parse(&format!("p{name}")).expect("an identity");
        let network = Network::new(8..500, 10..300, rng);
        Daemon {
            sender: Sender { identity, caller: format!("choria=p{name}") },
            way,
            voice: Voice::default(),
            writes: Echo::default(),
            clock: Clock::new(rng),
            network: if is_smooth { PEACE } else { network },
            congested_until: 0,
            numbers: BTreeMap::new(),
            incarnation: 0,
            process: None,
            is_frozen: false,
            waiting: Vec::new(),
            connection: None,
            connected_at: 0,
            links: 0,
            fleet_wakes: None,
            election_wakes: None,
        }
    }

    /// The process ends, however that is.
    pub fn ends(&mut self) {
        self.process = None;
        (self.voice, self.writes) = (Voice::default(), Echo::default());
        self.incarnation += 1;
        self.connection = None;
        self.numbers.clear();
        self.is_frozen = false;
        self.waiting.clear();
        (self.fleet_wakes, self.election_wakes) = (None, None);
    }

    /// The way to its broker as it is now.
    pub fn network(&self, now: Time) -> Network {
        if now < self.congested_until { self.network.congested() } else { self.network }
    }

    /// Whether it leads by what it knows itself.
    pub fn leads(&self, now: Time) -> bool {
        let boot = self.clock.boot(now);
        self.process.as_ref().is_some_and(|process| {
            process.election.is_some() && process.has_term && !process.is_lease_over(boot)
        })
    }
}

/// When a daemon said that it is there, by its own clock.
#[derive(Debug, Default)]
pub struct Voice {
    /// Since when without a gap, and the last time.
    spoken: Option<(BootTime, BootTime)>,
    /// Its heartbeats, by their numbers.
    pub beats: Echo,
}

/// When something was sent, and of what is known that it arrived.
#[derive(Debug, Default)]
pub struct Echo {
    sent: BTreeMap<u64, BootTime>,
    /// The last of those that were answered.
    answered: Option<BootTime>,
}

impl Echo {
    pub fn sends(&mut self, number: u64, now: BootTime) {
        self.sent.insert(number, now);
    }

    pub fn comes_back(&mut self, number: u64) {
        self.answered = self.answered.max(self.sent.get(&number).copied());
    }

    /// How long ago the last was sent that came back.
    pub fn age(&self, now: BootTime) -> Option<Duration> {
        self.answered.map(|sent| now.since(sent))
    }
}

impl Voice {
    /// It says that it is there, or that it leaves.
    pub fn speaks(&mut self, now: BootTime, beat: &Heartbeat) {
        self.beats.sends(beat.number, now);
        self.spoken = match self.spoken {
            _ if beat.leaving => None,
            Some((since, last)) if now.since(last) <= GAP_MAX => Some((since, now)),
            _ => Some((now, now)),
        };
    }

    /// For how long it has been saying that it is there.
    pub fn spoken_for(&self, now: BootTime) -> Option<Duration> {
        self.spoken.map(|(since, _)| now.since(since))
    }
}

/// Between two heartbeats, of which the second one may have waited for the socket.
const GAP_MAX: Duration = Duration::from_secs(6);

/// The clocks of a machine: a little too fast or too slow, and one of them stands still while the machine sleeps.
#[derive(Debug, Clone, Copy)]
pub struct Clock {
    /// In parts of 1,000 of the true one.
    rate: u64,
    start: Instant,
    slept: Time,
}

impl Clock {
    fn new(rng: &mut Rng) -> Clock {
        Clock { rate: rng.u64(985..=1_015), start: Instant::now(), slept: 0 }
    }

    pub fn boot(&self, now: Time) -> BootTime {
        BootTime::after_boot(duration(now * self.rate / 1_000))
    }

    pub fn mono(&self, now: Time) -> Instant {
        self.start + duration(now * self.rate / 1_000 - self.slept)
    }

    /// The machine slept for so long.
    pub fn sleeps(&mut self, time: Time) {
        self.slept += time * self.rate / 1_000;
    }

    /// When these clocks show at least this.
    pub fn when_mono(&self, time: Instant) -> Time {
        self.when(micros(time.saturating_duration_since(self.start)) + self.slept)
    }

    pub fn when_boot(&self, time: BootTime) -> Time {
        self.when(micros(time.since(BootTime::START)))
    }

    fn when(&self, local: Time) -> Time {
        // Shown times are cut down to whole microseconds.
        (local + 1) * 1_000 / self.rate + 1
    }
}
