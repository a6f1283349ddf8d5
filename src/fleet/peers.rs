//! Who else provisions, where several do side by side: each its own share of the nodes.
//!
//! When to say that we are there and when we may act is decided in [`core`], whose a node is in [`shares`]; this thread
//! sends, hears, and tells the gate. The connection and an operator's pause are seen as the gate has them: whoever is paused
//! or drains finishes its nodes and leaves its share to the others. What daemons with an election say to one another is in
//! [`presence`], and what all hear in [`hearing`].

pub mod core;
pub mod hearing;
pub mod presence;
pub mod shares;
pub mod table;

use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, at, never, select_biased};
use parking_lot::Mutex;

use self::core::{Core, Input, Output, Part, Parting};
use self::table::Peer;
use crate::clock::BootTime;
use crate::fleet::roster::gauge;
use crate::fleet::standing::{LOOK_FOR_IDLE, News, Setup, Trouble, Watch, Word};
use crate::protocol::peer::{Heartbeat, Role, Said};
use crate::protocol::{Sender, subject};
use crate::pulse;
use crate::seldom::Seldom;
use crate::transport::{Publish, Subscription};

/// How often it is logged that peers come and go: where anyone may publish anyone can do that as fast as it likes.
const NEWS_LOG: Duration = Duration::from_secs(1);

/// What others may see of the peers.
#[derive(Debug)]
pub struct View(Mutex<Shown>);

/// The peers as they are now.
#[derive(Debug, Clone)]
pub struct Shown {
    /// Our own part.
    pub part: Part,
    /// By how many the nodes are shared, while we have a share.
    pub sharers: Option<usize>,
    /// What is wrong.
    pub trouble: Option<String>,
    /// Who else is there.
    pub peers: Vec<Peer>,
}

impl View {
    /// Before the first step.
    pub fn new() -> View {
        let part = Part::Listening;
        View(Mutex::new(Shown { part, sharers: None, trouble: None, peers: Vec::new() }))
    }

    /// What there is to see.
    pub fn get(&self) -> Shown {
        self.0.lock().clone()
    }
}

impl Default for View {
    fn default() -> View {
        View::new()
    }
}

/// The thread.
pub struct Peers {
    setup: Setup,
    view: Arc<View>,
    core: Core,
    said: Receiver<Said>,
    _subscription: Subscription,
    watch: Watch,
    news: Seldom,
    trouble: Trouble,
}

impl Peers {
    /// Closes the gate until we have listened.
    pub fn new(setup: Setup) -> Peers {
        setup.gate.stand_by();
        setup.gate.listen();
        let watch = Watch::new(setup.gate.clone());
        let (said, subscription) = hearing::listen(&*setup.transport, setup.metrics.clone());
        Peers {
            core: Core::new(setup.instance, setup.us()),
            setup,
            view: Arc::new(View::new()),
            said,
            _subscription: subscription,
            watch,
            news: Seldom::every(NEWS_LOG),
            trouble: Trouble::new(),
        }
    }

    /// What others may see of it.
    pub fn view(&self) -> Arc<View> {
        self.view.clone()
    }

    /// Runs until the drain has ended or an abort.
    pub fn run(mut self) {
        let mut drain = self.setup.hands.drain.clone();
        self.look();
        while !self.core.is_gone() {
            let leaving = self.core.is_leaving();
            let look_for_idle = if leaving { at(Instant::now() + LOOK_FOR_IDLE) } else { never() };
            let now = BootTime::now();
            let timer = self.core.wake(now).map(|wake| Instant::now() + wake.since(now));
            pulse::waits();
            select_biased! {
                recv(self.setup.abort) -> _ => return,
                recv(self.watch.changed) -> _ => self.look(),
                recv(drain) -> _ => {
                    drain = never();
                    self.step(Input::Drain);
                }
                // Before what is said: nobody may keep us from speaking by talking.
                recv(timer.map_or_else(never, at)) -> _ => self.step(Input::Time),
                recv(look_for_idle) -> _ => {}
                recv(self.said) -> said => if let Ok(Said::Heartbeat(beat)) = said {
                    self.step(Input::Heard(beat));
                },
            }
            if self.core.is_leaving() && self.setup.hands.are_empty() {
                self.step(Input::Idle);
            }
        }
    }

    /// Takes over what the gate says of connection and operator.
    fn look(&mut self) {
        pulse::works();
        let News { is_lost, is_connected, pause } = self.watch.look();
        if is_lost {
            self.step(Input::Link(None));
        }
        if is_connected {
            self.step(Input::Link(Some(self.setup.us())));
        }
        if let Some(is_paused) = pause {
            self.step(Input::Pause(is_paused));
        }
    }

    fn step(&mut self, input: Input) {
        pulse::works();
        let outputs = self.core.step(BootTime::now(), input);
        let mut unsent = None;
        for output in outputs {
            unsent = unsent.or(self.obey(output));
        }
        self.show();
        if let Some(number) = unsent {
            self.step(Input::Unsent(number));
        }
    }

    /// Does what the core says; the number of a heartbeat that could not be sent.
    fn obey(&mut self, output: Output) -> Option<u64> {
        let Setup { gate, hands, metrics, .. } = &self.setup;
        match output {
            Output::Beat(beat) => return self.send(&beat),
            Output::Owners(owners) => hands.roster.shares().put(owners),
            Output::Act(until) => {
                gate.lead(until);
                let sharers = self.core.sharers().unwrap_or(1);
                log::info!(component = "peers", sharers; "Provisioning one of {sharers} shares of the nodes");
                self.setup.discover();
            }
            Output::Renew(until) => gate.renew(until),
            Output::Listen => {
                gate.listen();
                log::info!(component = "peers"; "Listening for other instances before anything is begun");
            }
            Output::StandBy(_) => gate.stand_by(),
            Output::EndTerm => {
                gate.end_term();
                hands.drop_queued();
            }
            Output::Gained => {
                log::info!(component = "peers"; "Looking for the nodes of an instance that is gone");
                self.setup.discover();
            }
            Output::Joined(peer) => self.tell(&peer, peer.role.word()),
            Output::Gone(peer, Parting::Left) => self.tell(&peer, "leaving"),
            Output::Gone(peer, Parting::Silent) => self.tell(&peer, "gone without a word"),
            Output::Ignored(why) => {
                metrics.peer_messages_ignored.with_label_values(&[why.label()]).inc();
            }
        }
        None
    }

    fn send(&self, beat: &Heartbeat) -> Option<u64> {
        let sent = self.setup.transport.publish(&Publish::new(&subject::peers(), &beat.encode()));
        let error = sent.err()?;
        log::debug!(component = "peers"; "Could not send a heartbeat: {error}");
        Some(beat.number)
    }

    fn tell(&mut self, peer: &Peer, what: &str) {
        let Peer { instance, sender: Sender { identity, caller }, .. } = peer;
        if let Some(suppressed) = self.news.now(Instant::now()) {
            let (instance, caller) = (instance.as_str(), caller.as_str());
            log::info!(component = "peers", instance, caller, suppressed; "Instance {identity} is {what}");
        }
    }

    /// Lets others see what has changed, and says what goes wrong.
    fn show(&mut self) {
        let now = BootTime::now();
        let trouble = self.core.trouble(now).map(|trouble| trouble.to_string());
        match self.trouble.note(trouble.as_deref(), Instant::now()) {
            Some(Word::Wrong(suppressed)) => {
                let why = trouble.as_deref().unwrap_or_default();
                log::warn!(component = "peers", suppressed; "{why}");
            }
            Some(Word::Over) => log::info!(component = "peers"; "Nothing is in the way any more"),
            None => {}
        }
        let (part, sharers) = (self.core.part(), self.core.sharers());
        let peers = self.core.peers().to_vec();
        let is_sharer = |peer: &&Peer| peer.role == Role::Active && peer.is_heard(now);
        let metrics = &self.setup.metrics;
        metrics.peers.set(gauge(peers.iter().filter(is_sharer).count()));
        metrics.share_ratio.set(sharers.map_or(0.0, |sharers| 1.0 / sharers as f64));
        *self.view.0.lock() = Shown { part, sharers, trouble, peers };
    }
}
