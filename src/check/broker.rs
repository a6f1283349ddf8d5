//! Brokers: whether each is found, lets us in, and lets us do there what we must.
//!
//! All are tried at once, each with a connection of its own and within [`PATIENCE_MAX`]. What is sent there concerns nobody: a request to a
//! node whose name no node can have, a discovery that asks for an agent no node has, and with an election the question for its
//! bucket and a write that must be refused, since it names a number that its key can't have. Our own startup event is not sent,
//! so whether we may publish it is not known.

use std::panic;
use std::sync::Arc;
use std::thread::{self, ScopedJoinHandle};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, bounded, never};

use crate::config::choria::{ChoriaConfig, Inspected};
use crate::errors::chain;
use crate::gate::Lease;
use crate::keychain::Keychain;
use crate::metrics::Metrics;
use crate::protocol::election::{self, Written};
use crate::protocol::subject::{self, ReplySubjects, Subject};
use crate::protocol::{Codec, Identity, RequestId};
use crate::rpc::actions::{self, Action, Inventory};
use crate::rpc::{self, Rpc};
use crate::transport::address::ServerAddress;
use crate::transport::errors::{BrokerError, ErrorKind};
use crate::transport::login::{self, Credentials};
use crate::transport::servers::Named;
use crate::transport::visit::{Call, Visit};
use crate::transport::{Message, Publish, Subscription, Transport};

use super::{Findings, Kind};

/// Longest time for one broker: its name, the connection, the log-in and all questions.
pub(super) const PATIENCE_MAX: Duration = Duration::from_secs(60);

/// The configured time for a connection counts up to this.
const CONNECT_MAX: Duration = Duration::from_secs(10);

/// Most brokers that are tried; a cluster has a handful.
const BROKERS_MAX: usize = 16;

/// How long a broker may take for one answer.
const ANSWER_MAX: Duration = Duration::from_secs(5);

/// Answers that wait to be read; there is one question at a time.
const ANSWERS_MAX: usize = 16;

/// A number that no key has: the largest that every reader of JSON takes.
const NOBODYS_NUMBER: &str = "9007199254740991";

/// What the connection is for.
#[derive(Debug, Clone, Copy)]
pub(super) struct Purpose<'a> {
    /// Whose startup events are heard.
    pub component: Option<&'a str>,
    /// Whether peers are heard.
    pub peers: bool,
    /// Whether the election's key is needed.
    pub election: bool,
}

pub(super) fn check(choria: &Inspected, purpose: Purpose<'_>, findings: &mut Findings) {
    let Named { found, faults } = choria.brokers.now();
    if found.len() > BROKERS_MAX {
        let all = found.len();
        findings.warn(format!("of {all} brokers the first {BROKERS_MAX} were tried"));
    }
    let servers = &found[..found.len().min(BROKERS_MAX)];
    let seen: Vec<Seen> = thread::scope(|scope| {
        let look = |server| scope.spawn(move || Seen::of(server, choria, purpose));
        let threads: Vec<_> = servers.iter().map(look).collect();
        // A panic ends the program, here as in its thread.
        let join = |thread: ScopedJoinHandle<'_, Seen>| {
            thread.join().unwrap_or_else(|panic| panic::resume_unwind(panic))
        };
        threads.into_iter().map(join).collect()
    });
    let lets_us_in = seen.iter().any(|seen| seen.is_in);
    let not_found = faults.into_iter().map(|fault| (Kind::OutOfReach, fault));
    for (kind, text) in not_found.chain(seen.into_iter().flat_map(|seen| seen.faults)) {
        match kind {
            // The daemon takes another one.
            Kind::OutOfReach if lets_us_in => findings.warn(text),
            _ => findings.error(kind, text),
        }
    }
}

/// What was seen of one broker.
#[derive(Debug, Default)]
struct Seen {
    is_in: bool,
    faults: Vec<(Kind, String)>,
}

impl Seen {
    fn of(server: &ServerAddress, choria: &Inspected, purpose: Purpose<'_>) -> Seen {
        // What is wrong with our keys has been said. Without them we see how far we get.
        let Some(config) = &choria.config else { return Seen::from_afar(server, choria) };
        let Ok((keychain, codec)) = Keychain::open(config) else {
            return Seen::from_afar(server, choria);
        };
        let mut seen = Seen::default();
        let name = format!("{}-check", config.connection_name);
        match enter(server, choria, &name, Box::new(move || keychain.credentials())) {
            Ok(visit) => {
                seen.is_in = true;
                visit.complaints.iter().for_each(|error| seen.note(error));
                seen.look_around(server, &visit, config, codec, purpose);
            }
            Err(errors) => errors.iter().for_each(|error| seen.note(error)),
        }
        seen
    }

    /// Whether it is there: that it refuses a stranger is no news.
    fn from_afar(server: &ServerAddress, choria: &Inspected) -> Seen {
        let mut seen = Seen::default();
        if let Err(errors) = enter(server, choria, "check", Box::new(|| Ok(Credentials::default())))
        {
            errors.iter().for_each(|error| seen.note(error));
        }
        seen.faults.retain(|(kind, _)| *kind == Kind::OutOfReach);
        seen
    }

    fn fault(&mut self, kind: Kind, text: impl Into<String>) {
        self.faults.push((kind, text.into()));
    }

    fn note(&mut self, error: &BrokerError) {
        if !self.faults.iter().any(|(_, text)| *text == error.text) {
            self.fault(kind(error.kind), error.text.clone());
        }
    }

    /// Does what we do there, as far as it concerns nobody.
    fn look_around(
        &mut self,
        server: &ServerAddress,
        visit: &Visit,
        config: &ChoriaConfig,
        codec: Codec,
        purpose: Purpose<'_>,
    ) {
        let caller = codec.sender().caller.clone();
        let transport: &dyn Transport = &*visit.connection;
        let events = purpose.component.and_then(|name| subject::startup_events(name).ok());
        let peers = purpose.peers.then(|| subject::peers().into());
        let heard = events.into_iter().chain(peers);
        let _heard: Vec<Subscription> =
            heard.map(|subjects| transport.subscribe(&subjects, Arc::new(|_| {}))).collect();
        let instance = RequestId::random();
        let rpc = match Rpc::start(
            visit.connection.clone(),
            Lease::endless(),
            codec,
            instance.as_str(),
            config.ttl_secs,
            Metrics::new(""),
        ) {
            Ok(rpc) => rpc,
            Err(error) => return self.fault(Kind::Configuration, chain(&error)),
        };
        let (sink, _answers) = bounded(1);
        let nobody = Identity::parse(&format!("{}.invalid", instance.as_str()))
            .expect("letters and digits make a name");
        // What could not be sent shows in the flush.
        let _asked =
            rpc.send(&nobody, Action::Inventory, &actions::Call::body(&Inventory {}), &sink);
        let _asked_all = rpc::ask_nobody(&rpc);
        let no_election = match purpose.election {
            true => election_fault(server, transport, &caller),
            false => None,
        };
        if transport.flush(Instant::now() + ANSWER_MAX).is_err() {
            self.fault(Kind::OutOfReach, format!("{server} does not answer within {ANSWER_MAX:?}"));
        }
        visit.errors().for_each(|error| self.note(&error));
        // A subject that is not permitted says more than that nobody answers there.
        if let Some(fault) = no_election.filter(|_| self.faults.is_empty()) {
            self.fault(Kind::Surroundings, fault);
        }
    }
}

fn enter(
    server: &ServerAddress,
    choria: &Inspected,
    name: &str,
    credentials: login::Source,
) -> Result<Visit, Vec<BrokerError>> {
    Visit::begin(Call {
        servers: vec![server.clone()],
        name,
        credentials,
        connect_timeout: choria.connect_timeout.min(CONNECT_MAX),
        patience: PATIENCE_MAX,
        abort: &never(),
    })
}

/// What keeps us from an election.
fn election_fault(
    server: &ServerAddress,
    transport: &dyn Transport,
    caller: &str,
) -> Option<String> {
    const BUCKET: &str = "the bucket CHORIA_LEADER_ELECTION";
    let fault = |what: String| Some(format!("leader_election: {server} {what}"));
    let mut booth = match Booth::new(transport, caller) {
        Ok(booth) => booth,
        Err(error) => return fault(chain(&error)),
    };
    let Some(answer) = booth.ask(&subject::election_status(), &[], b"") else {
        return fault(format!("says nothing about {BUCKET}"));
    };
    if answer.is_no_responders() {
        return fault(format!(
            "has nobody who knows {BUCKET}: it needs Choria Streams, and us in its provisioning account"
        ));
    }
    if let Err(error) = election::read_status(&answer.payload) {
        return fault(format!("on {BUCKET}: {}", chain(&error)));
    }
    let header = (election::EXPECTED_NUMBER, NOBODYS_NUMBER);
    let Some(answer) = booth.ask(&subject::election_key(), &[header], b"") else {
        return fault(format!("does not answer a write to {BUCKET}"));
    };
    if answer.is_no_responders() {
        return fault(format!("has nobody who takes a write to {BUCKET}"));
    }
    match election::read_written(&answer.payload) {
        Ok(Written::Refused(refusal)) if refusal.is_contention() => None,
        Ok(Written::Refused(refusal)) => fault(format!("refuses a write to {BUCKET}: {refusal}")),
        Ok(Written::Stored(_)) => fault(format!(
            "took a write to {BUCKET} that it must refuse, so no election can be held there"
        )),
        Err(error) => fault(format!("on a write to {BUCKET}: {error}")),
    }
}

/// Asks for the election's bucket and key.
struct Booth<'a> {
    transport: &'a dyn Transport,
    subjects: ReplySubjects,
    answers: Receiver<Message>,
    _subscription: Subscription,
    asked: u64,
}

impl<'a> Booth<'a> {
    fn new(transport: &'a dyn Transport, caller: &str) -> Result<Booth<'a>, subject::BadSubject> {
        let subjects = ReplySubjects::new(caller, RequestId::random().as_str())?;
        let (answer, answers) = bounded(ANSWERS_MAX);
        let handler = Arc::new(move |message| {
            // One that has no room is none of those asked for.
            let _ = answer.try_send(message);
        });
        let subscription = transport.subscribe(&subjects.pattern(), handler);
        Ok(Booth { transport, subjects, answers, _subscription: subscription, asked: 0 })
    }

    fn ask(&mut self, to: &Subject, headers: &[(&str, &str)], payload: &[u8]) -> Option<Message> {
        self.asked += 1;
        let reply = self.subjects.for_number(self.asked);
        let question = Publish { reply: Some(&reply), headers, ..Publish::new(to, payload) };
        self.transport.publish(&question).ok()?;
        let deadline = Instant::now() + ANSWER_MAX;
        loop {
            let answer = self.answers.recv_deadline(deadline).ok()?;
            if self.subjects.number(&answer.subject) == Some(self.asked) {
                return Some(answer);
            }
        }
    }
}

fn kind(error: ErrorKind) -> Kind {
    if error.is_passing() { Kind::OutOfReach } else { Kind::Configuration }
}
