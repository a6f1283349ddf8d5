//! What the threads have in common that decide whether we act beside others: election and peers.
//!
//! Both see the connection and an operator's pause as the gate has them, wait for the nodes in hand before they leave, and
//! say what is wrong, not each time that they meet it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender as Channel};

use crate::fleet::roster::{Queues, Roster};
use crate::gate::{Gate, Reason};
use crate::metrics::Metrics;
use crate::protocol::ksuid::Ksuid;
use crate::protocol::{Identity, Sender};
use crate::rpc::Rpc;
use crate::seldom::Seldom;
use crate::shutdown::{Never, is_over};
use crate::transport::Transport;

/// How often one that wants to leave looks whether a node is still in hand.
pub const LOOK_FOR_IDLE: Duration = Duration::from_millis(50);
/// How often it is logged what is wrong, while it is the same.
const TROUBLE_LOG: Duration = Duration::from_secs(600);

/// What both work with.
pub struct Setup {
    /// Where it is sent.
    pub transport: Arc<dyn Transport>,
    /// Knows our caller id.
    pub rpc: Arc<Rpc>,
    /// Who we are, with that.
    pub identity: Identity,
    /// This process among its peers.
    pub instance: Ksuid,
    /// Told when we may act.
    pub gate: Arc<Gate>,
    /// The nodes in hand and in the queues.
    pub hands: Hands,
    /// Counts.
    pub metrics: Arc<Metrics>,
    /// Starts a discovery.
    pub discover: Channel<()>,
    /// Disconnects when every wait must end.
    pub abort: Receiver<Never>,
}

impl Setup {
    /// Who we are to nodes and peers now: a renewed token may have another caller.
    pub fn us(&self) -> Sender {
        Sender { identity: self.identity.clone(), caller: self.rpc.caller() }
    }

    /// Has the nodes looked for that are ours from now on.
    pub fn discover(&self) {
        // A full channel holds the request already; a closed one has nobody left who discovers.
        let _ = self.discover.try_send(());
    }
}

/// What others tell by the gate.
#[derive(Debug)]
pub struct Watch {
    gate: Arc<Gate>,
    /// A message after each change.
    pub changed: Receiver<()>,
    /// Disconnects when the connection ends that was told of; none while there is none.
    connection: Option<Receiver<Never>>,
    is_paused: bool,
}

/// What is new since the last look. A connection that was lost and made again is both.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct News {
    /// The connection was lost.
    pub is_lost: bool,
    /// There is a connection, since.
    pub is_connected: bool,
    /// An operator paused or resumed us.
    pub pause: Option<bool>,
}

impl Watch {
    /// Nothing has been told yet.
    pub fn new(gate: Arc<Gate>) -> Watch {
        Watch { changed: gate.watch(), gate, connection: None, is_paused: false }
    }

    /// Says what is new.
    pub fn look(&mut self) -> News {
        let reasons = self.gate.reasons();
        let is_lost = self.connection.as_ref().is_some_and(is_over);
        if is_lost {
            self.connection = None;
        }
        let is_connected = self.connection.is_none() && !reasons.contains(&Reason::Disconnected);
        if is_connected {
            self.connection = Some(self.gate.lost());
        }
        let is_paused = reasons.contains(&Reason::Operator);
        let pause = (is_paused != self.is_paused).then_some(is_paused);
        self.is_paused = is_paused;
        News { is_lost, is_connected, pause }
    }
}

/// The nodes that are ours: those in hand, which are finished before we leave, and those in the queues, which are dropped.
pub struct Hands {
    /// What we know of the nodes.
    pub roster: Arc<Roster>,
    /// Their queues.
    pub queues: Queues,
    /// Disconnects when no new node may be begun.
    pub drain: Receiver<Never>,
    /// Disconnects after that, when the last node has ended.
    pub idle: Receiver<Never>,
}

impl Hands {
    /// Whether no node is in hand.
    pub fn are_empty(&self) -> bool {
        if is_over(&self.drain) {
            return is_over(&self.idle);
        }
        self.roster.registry().counts().working == 0
    }

    /// Another has our nodes now; those in hand end by themselves.
    pub fn drop_queued(&self) {
        let forgotten = self.roster.forget(&self.queues);
        self.roster.measure();
        if forgotten > 0 {
            log::info!(component = "hosts"; "Forgot {forgotten} nodes: they are another's now");
        }
    }
}

/// What is wrong, as it was last said.
#[derive(Debug)]
pub struct Trouble {
    said: Option<String>,
    log: Seldom,
}

/// Something to say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Word {
    /// What is wrong, and how often that was not said since the last time.
    Wrong(u64),
    /// Nothing is any more.
    Over,
}

impl Trouble {
    /// Nothing is wrong yet.
    pub fn new() -> Trouble {
        Trouble { said: None, log: Seldom::every(TROUBLE_LOG) }
    }

    /// Takes what is wrong now. There is something to say when that is new, when it is over, and now and then meanwhile.
    pub fn note(&mut self, trouble: Option<&str>, now: Instant) -> Option<Word> {
        let is_news = trouble != self.said.as_deref();
        if is_news {
            self.said = trouble.map(str::to_owned);
            self.log = Seldom::every(TROUBLE_LOG);
        }
        match trouble {
            Some(_) => self.log.now(now).map(Word::Wrong),
            None => is_news.then_some(Word::Over),
        }
    }
}

impl Default for Trouble {
    fn default() -> Trouble {
        Trouble::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_wrong_is_said_when_it_begins_now_and_then_and_when_it_is_over() {
        let start = Instant::now();
        let mut trouble = Trouble::new();
        assert_eq!(trouble.note(None, start), None);
        assert_eq!(trouble.note(Some("a"), start), Some(Word::Wrong(0)));
        assert_eq!(trouble.note(Some("a"), start + TROUBLE_LOG / 2), None);
        assert_eq!(trouble.note(Some("a"), start + TROUBLE_LOG), Some(Word::Wrong(1)));
        assert_eq!(trouble.note(Some("b"), start + TROUBLE_LOG), Some(Word::Wrong(0)));
        assert_eq!(trouble.note(None, start + TROUBLE_LOG), Some(Word::Over));
        assert_eq!(trouble.note(None, start + TROUBLE_LOG), None);
    }

    #[test]
    fn tells_each_change_once() {
        let gate = Arc::new(Gate::new());
        let mut watch = Watch::new(gate.clone());
        assert_eq!(watch.look(), News::default());
        gate.open(Reason::Disconnected);
        let up = News { is_connected: true, ..News::default() };
        assert_eq!((watch.look(), watch.look()), (up, News::default()));
        gate.close(Reason::Operator);
        let paused = News { pause: Some(true), ..News::default() };
        assert_eq!((watch.look(), watch.look()), (paused, News::default()));
        gate.close(Reason::Disconnected);
        let lost = News { is_lost: true, ..News::default() };
        assert_eq!((watch.look(), watch.look()), (lost, News::default()));
        gate.open(Reason::Operator);
        assert_eq!(watch.look(), News { pause: Some(false), ..News::default() });
    }

    #[test]
    fn a_connection_that_was_lost_and_made_again_unseen_is_both() {
        let gate = Arc::new(Gate::new());
        let mut watch = Watch::new(gate.clone());
        gate.open(Reason::Disconnected);
        watch.look();
        gate.close(Reason::Disconnected);
        gate.open(Reason::Disconnected);
        let both = News { is_lost: true, is_connected: true, pause: None };
        assert_eq!((watch.look(), watch.look()), (both, News::default()));
    }
}
