//! Campaigns for leadership, so that of several provisioners in one account one provisions.
//!
//! When to write the election's key and what follows is decided in [`core`]; this thread sends, hears, and tells the gate.
//! A key is handed over with a message to all peers, which takes a candidate two seconds instead of the key's life. The
//! connection and an operator's pause are seen as the gate has them. Of two with one identity and caller the younger stays
//! out, as if it were paused: nodes and brokers can't tell them apart.
//!
//! Whoever loses leadership forgets all nodes but those in hand, which end before their next step: another has them now.

pub mod core;
#[cfg(test)]
mod simulation;

use std::sync::Arc;
use std::time::Instant;

use crossbeam_channel::{Receiver, Sender as Channel, at, bounded, never, select_biased};
use parking_lot::Mutex;

use self::core::{Answer, Core, Input, Loss, Output, Role, Ticket};
use crate::clock::BootTime;
use crate::errors::chain;
use crate::fleet::peers::core::Why;
use crate::fleet::peers::hearing;
use crate::fleet::peers::presence::Presence;
use crate::fleet::standing::{LOOK_FOR_IDLE, News, Setup, Trouble, Watch, Word};
use crate::gate::Reason;
use crate::ops::text::Span;
use crate::protocol::Sender;
use crate::protocol::election::{self, Written};
use crate::protocol::peer::{self, Said};
use crate::protocol::subject::{self, BadSubject, ReplySubjects, Subject};
use crate::pulse;
use crate::transport::{Message, Publish, PublishError, Subscription, Transport};

/// Answers that wait to be looked at: there is one request at a time, and its answer may come twice.
const ANSWERS_MAX: usize = 16;

/// What others may see of the election, and ask of it.
#[derive(Debug)]
pub struct View {
    shown: Mutex<Shown>,
    step_down: Channel<()>,
}

/// The election as it is at the moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shown {
    /// The part we play.
    pub role: Role,
    /// We hold the key, and hand it over when the nodes in work are finished.
    pub is_leaving: bool,
    /// Why the election can't be held, or we stay out of it.
    pub trouble: Option<String>,
    /// When we lead again after we have stepped down, at the latest, unless another does.
    pub takes_back_at: Option<BootTime>,
}

impl Shown {
    /// With nothing wrong.
    pub fn role(role: Role) -> Shown {
        Shown { role, is_leaving: false, trouble: None, takes_back_at: None }
    }
}

impl View {
    /// Before the first step; the other end hears when we are to step down.
    pub fn new() -> (Arc<View>, Receiver<()>) {
        let (step_down, wishes) = bounded(1);
        let shown = Mutex::new(Shown::role(Role::SettingUp));
        (Arc::new(View { shown, step_down }), wishes)
    }

    /// What is shown.
    pub fn get(&self) -> Shown {
        self.shown.lock().clone()
    }

    /// Shows something else.
    pub(crate) fn show(&self, shown: Shown) {
        *self.shown.lock() = shown;
    }

    /// Lets another lead: a leader finishes the nodes in hand and hands its key over. It leads again if nobody takes it.
    pub fn step_down(&self) {
        // A full channel holds the wish already.
        let _ = self.step_down.try_send(());
    }
}

/// The thread.
pub struct Election {
    setup: Setup,
    view: Arc<View>,
    /// Of the view: a message when we are to step down.
    step_down: Receiver<()>,
    core: Core,
    replies: Replies,
    answers: Receiver<(Ticket, Message)>,
    presence: Presence,
    said: Receiver<Said>,
    _said: Subscription,
    watch: Watch,
    /// On an operator's wish.
    is_paused: bool,
    /// What an older process with our identity and caller makes us say; then we stay out.
    twin: Option<String>,
    /// The question for the bucket, if that was the last.
    asked_for_status: Option<Ticket>,
    trouble: Trouble,
}

/// Where answers come.
struct Replies {
    /// Sets them apart from those of nodes.
    instance: String,
    caller: String,
    subjects: Arc<ReplySubjects>,
    sink: Channel<(Ticket, Message)>,
    subscription: Subscription,
}

impl Election {
    /// Closes the gate until leadership is won.
    ///
    /// # Errors
    ///
    /// [`BadSubject`] if `reply_instance` or the caller can't be a part of a subject.
    pub fn new(setup: Setup, reply_instance: String) -> Result<Election, BadSubject> {
        setup.gate.stand_by();
        let watch = Watch::new(setup.gate.clone());
        let (sink, answers) = bounded(ANSWERS_MAX);
        let replies = Replies::new(&*setup.transport, reply_instance, setup.rpc.caller(), sink)?;
        let (said, subscription) = hearing::listen(&*setup.transport, setup.metrics.clone());
        let (view, step_down) = View::new();
        Ok(Election {
            core: Core::new(BootTime::now(), fastrand::Rng::new()),
            presence: Presence::new(setup.instance, setup.us()),
            setup,
            view,
            step_down,
            replies,
            answers,
            said,
            _said: subscription,
            watch,
            is_paused: false,
            twin: None,
            asked_for_status: None,
            trouble: Trouble::new(),
        })
    }

    /// What others may see of it, and ask of it.
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
            let wakes = [self.core.wake(), self.presence.wake(now)];
            let timer = wakes.into_iter().flatten().min();
            let timer = timer.map(|wake| Instant::now() + wake.since(now));
            pulse::waits();
            select_biased! {
                recv(self.setup.abort) -> _ => return,
                recv(self.answers) -> answer => if let Ok((ticket, message)) = answer {
                    let answer = self.read(ticket, &message);
                    self.step(Input::Answer(ticket, answer));
                },
                recv(self.watch.changed) -> _ => self.look(),
                recv(drain) -> _ => {
                    drain = never();
                    self.step(Input::Drain);
                }
                recv(self.step_down) -> wish => if wish.is_ok() {
                    self.step_down();
                },
                recv(timer.map_or_else(never, at)) -> _ => self.step(Input::Time),
                recv(look_for_idle) -> _ => {}
                recv(self.said) -> said => if let Ok(said) = said {
                    self.hear(said);
                },
            }
            self.speak();
            if self.core.is_leaving() && self.setup.hands.are_empty() {
                self.step(Input::Idle);
            }
        }
    }

    /// Takes over what the gate says of connection and operator.
    fn look(&mut self) {
        pulse::works();
        let News { is_lost, is_connected, pause } = self.watch.look();
        let now = BootTime::now();
        if is_lost {
            self.presence.link(None, now);
            self.step(Input::Link(false));
        }
        if is_connected {
            let us = self.setup.us();
            self.replies.follow(&*self.setup.transport, us.caller.clone());
            self.presence.link(Some(us), now);
            self.step(Input::Link(true));
        }
        if let Some(is_paused) = pause {
            self.is_paused = is_paused;
            self.stay_out();
        }
    }

    /// Takes what a peer said.
    fn hear(&mut self, said: Said) {
        pulse::works();
        match said {
            Said::Handover { instance, number } if instance != self.setup.instance => {
                self.step(Input::Offer(number));
            }
            Said::Heartbeat(beat) => {
                if let Some(peer) = self.presence.hear(&beat, BootTime::now()) {
                    let Sender { identity, .. } = &peer.sender;
                    log::warn!(component = "election";
                        "{identity} provisions without an election: set active_active or leader_election on all daemons of an account alike");
                }
            }
            Said::Handover { .. } | Said::Other => {}
        }
    }

    /// Says who we are if that is due, and sees whether another is.
    fn speak(&mut self) {
        let now = BootTime::now();
        self.presence.play(part(self.core.role(now)), now);
        if let Some(beat) = self.presence.advance(now)
            && let Err(error) = self.say(&beat.encode())
        {
            log::debug!(component = "election"; "Could not tell the other instances who we are: {error}");
        }
        let twin = self.presence.older_twin().cloned().map(|peer| Why::Twin(peer).to_string());
        if twin.is_some() != self.twin.is_some() {
            if twin.is_some() {
                // Whoever leads by now gives the key to another, even if the twin is gone soon.
                self.step_down();
            }
            self.twin = twin;
            self.stay_out();
        }
    }

    fn stay_out(&mut self) {
        self.step(Input::Pause(self.is_paused || self.twin.is_some()));
    }

    /// Begins no node more: those in hand finish first.
    fn step_down(&mut self) {
        self.setup.gate.close(Reason::Standby);
        self.step(Input::StepDown);
    }

    fn step(&mut self, input: Input) {
        pulse::works();
        let outputs = self.core.step(BootTime::now(), input);
        let mut unsent = None;
        for output in outputs {
            unsent = unsent.or(self.obey(output));
        }
        self.show();
        if let Some(ticket) = unsent {
            self.step(Input::Unsent(ticket));
        }
    }

    /// Does what the core says; the ticket of what could not be sent.
    fn obey(&mut self, output: Output) -> Option<Ticket> {
        let Setup { gate, metrics, .. } = &self.setup;
        match output {
            Output::AskStatus(ticket) => {
                self.asked_for_status = Some(ticket);
                self.send(ticket, &subject::election_status(), &[], b"")
            }
            Output::Write { ticket, expected } => {
                let state = match self.core.role(BootTime::now()) {
                    Role::Leader | Role::Confirming => "leader",
                    Role::Candidate | Role::SteppedDown | Role::SettingUp | Role::Out => {
                        "candidate"
                    }
                };
                metrics.campaign(self.setup.identity.as_str(), state, self.core.interval());
                let number = expected.to_string();
                let header = (election::EXPECTED_NUMBER, number.as_str());
                let identity = self.setup.identity.as_str().as_bytes();
                self.send(ticket, &subject::election_key(), &[header], identity)
            }
            Output::Lead(until) => {
                gate.lead(until);
                self.lead(true);
                log::warn!(component = "election"; "Became leader after winning election");
                self.setup.discover();
                None
            }
            Output::Renew(until) => {
                gate.renew(until);
                None
            }
            Output::Lapse => {
                gate.lapse();
                self.lead(false);
                log::warn!(component = "election"; "Leadership has to be confirmed");
                None
            }
            Output::Lost(loss) => {
                gate.end_term();
                self.lead(false);
                match loss {
                    Loss::SteppedDown => log::info!(component = "election"; "Gave up leadership"),
                    Loss::NotOurs(why) => {
                        log::warn!(component = "election"; "Lost leadership: {why}");
                    }
                }
                self.setup.hands.drop_queued();
                None
            }
            Output::HandOver(number) => {
                let message = peer::handover(&self.setup.instance, number);
                if let Err(error) = self.say(&message) {
                    log::warn!(component = "election"; "Could not hand over leadership: {error}");
                }
                None
            }
        }
    }

    fn send(
        &self,
        ticket: Ticket,
        subject: &Subject,
        headers: &[(&str, &str)],
        payload: &[u8],
    ) -> Option<Ticket> {
        let reply = self.replies.subjects.for_number(ticket);
        let message = Publish { reply: Some(&reply), headers, ..Publish::new(subject, payload) };
        match self.setup.transport.publish(&message) {
            Ok(()) => None,
            Err(error) => {
                log::debug!(component = "election"; "Could not send: {error}");
                Some(ticket)
            }
        }
    }

    /// What a message answers to the request with `ticket`.
    fn read(&self, ticket: Ticket, message: &Message) -> Answer {
        if message.is_no_responders() {
            return Answer::NoResponders;
        }
        if self.asked_for_status == Some(ticket) {
            return match election::read_status(&message.payload) {
                Ok(bucket) => Answer::Usable(bucket.ttl),
                Err(error) => Answer::Unusable(chain(&error).to_string()),
            };
        }
        match election::read_written(&message.payload) {
            Ok(Written::Stored(number)) => Answer::Stored(number),
            Ok(Written::Refused(refusal)) if refusal.is_contention() => {
                Answer::Contended(refusal.to_string())
            }
            Ok(Written::Refused(refusal)) => Answer::Failed(refusal.to_string()),
            Err(error) => Answer::Failed(format!("unreadable answer: {error}")),
        }
    }

    /// Tells our peers.
    fn say(&self, message: &[u8]) -> Result<(), PublishError> {
        self.setup.transport.publish(&Publish::new(&subject::peers(), message))
    }

    fn lead(&self, leads: bool) {
        self.setup.metrics.lead(self.setup.identity.as_str(), leads);
    }

    /// Lets others see what has changed, and says what goes wrong.
    fn show(&mut self) {
        let trouble = self.twin.clone().or_else(|| self.core.trouble().map(str::to_owned));
        match (self.trouble.note(trouble.as_deref(), Instant::now()), &trouble) {
            (Some(Word::Wrong(suppressed)), Some(why)) if self.twin.is_some() => {
                log::warn!(component = "election", suppressed; "Staying out of the election: {why}");
            }
            (Some(Word::Wrong(suppressed)), Some(why)) => {
                log::warn!(component = "election", suppressed; "The election can't be held: {why}");
            }
            (Some(Word::Over), _) => {
                log::info!(component = "election"; "The election can be held");
            }
            (Some(Word::Wrong(_)) | None, _) => {}
        }
        self.view.show(Shown {
            role: self.core.role(BootTime::now()),
            is_leaving: self.core.is_leaving(),
            trouble,
            takes_back_at: self.core.takes_back_at(),
        });
    }
}

/// A reason not to act, for people; the gate does not know what the election is about.
pub fn why(reason: Reason, election: Option<&View>) -> String {
    let view = election.filter(|_| reason == Reason::Standby);
    match view.map(View::get) {
        Some(Shown { is_leaving: true, .. }) => {
            "stepping down when the nodes in work are finished".into()
        }
        Some(Shown { role: Role::SteppedDown, takes_back_at, .. }) => match takes_back_at {
            Some(at) => {
                // To the millisecond.
                let left = at.since(BootTime::now()).as_millis() as f64 / 1_000.0;
                format!(
                    "stepped down: takes the lead back in {} unless another takes over",
                    Span(left)
                )
            }
            None => "stepped down: others may take over".into(),
        },
        // The broker takes its time to say that we still lead.
        Some(Shown { role: Role::Leader | Role::Confirming, .. }) => {
            "about to lead, and making sure that no other instance does".into()
        }
        Some(Shown { role: Role::SettingUp, .. }) => {
            "standing by until the election can be held".into()
        }
        Some(Shown { role: Role::Out, .. }) => "staying out of the election".into(),
        Some(Shown { role: Role::Candidate, .. }) | None => reason.to_string(),
    }
}

/// What a role is to peers: whoever has the key leads, or is about to.
pub(crate) fn part(role: Role) -> peer::Role {
    match role {
        Role::Leader | Role::Confirming => peer::Role::Leader,
        Role::SettingUp | Role::Candidate | Role::SteppedDown | Role::Out => peer::Role::Candidate,
    }
}

impl Replies {
    fn new(
        transport: &dyn Transport,
        instance: String,
        caller: String,
        sink: Channel<(Ticket, Message)>,
    ) -> Result<Replies, BadSubject> {
        let subjects = Arc::new(ReplySubjects::new(&caller, &instance)?);
        let subscription = listen(transport, &subjects, &sink);
        Ok(Replies { instance, caller, subjects, sink, subscription })
    }

    /// Our caller id is part of the subject, and a renewed token may have another.
    fn follow(&mut self, transport: &dyn Transport, caller: String) {
        if caller == self.caller {
            return;
        }
        match ReplySubjects::new(&caller, &self.instance) {
            Ok(subjects) => {
                self.subjects = Arc::new(subjects);
                self.subscription = listen(transport, &self.subjects, &self.sink);
                self.caller = caller;
            }
            Err(error) => {
                log::error!(component = "election"; "Going on as {}: {error}", self.caller);
            }
        }
    }
}

fn listen(
    transport: &dyn Transport,
    subjects: &Arc<ReplySubjects>,
    sink: &Channel<(Ticket, Message)>,
) -> Subscription {
    let (ours, sink) = (subjects.clone(), sink.clone());
    transport.subscribe(
        &subjects.pattern(),
        Arc::new(move |message: Message| {
            if let Some(ticket) = ours.number(&message.subject) {
                // There is no room for what nobody asked for.
                let _ = sink.try_send((ticket, message));
            }
        }),
    )
}

#[cfg(test)]
mod tests {
    use std::thread::{self, JoinHandle};
    use std::time::Duration;

    use serde::Deserialize;

    use super::*;
    use crate::fleet::peers::table::testing::{beat, instance};
    use crate::fleet::registry::{Key, Limits, Sighted, Sighting};
    use crate::fleet::roster::{Queues, Roster};
    use crate::fleet::standing::Hands;
    use crate::gate::Closed;
    use crate::gate::Gate;
    use crate::node::{Outcome, Report};
    use crate::protocol::Identity;
    use crate::protocol::peer::Heartbeat;
    use crate::rpc::testing::Net;
    use crate::shutdown::Never;
    use crate::transport::memory::Published;

    const SOON: Duration = Duration::from_secs(20);
    const PEERS: &str = "choria.provisioner.peer";
    const RECORDED: &str = include_str!("../../tests/vectors/captures/issuer/messages.jsonl");

    /// A candidate and a bucket in memory that nobody else wants.
    struct Bench {
        net: Net,
        gate: Arc<Gate>,
        roster: Arc<Roster>,
        queues: Queues,
        discover: Receiver<()>,
        view: Arc<View>,
        handed_over: Receiver<Vec<u8>>,
        _subscription: Subscription,
        refusal: Arc<Mutex<Option<Reaction>>>,
        drain: Option<Channel<Never>>,
        busy: Option<Channel<Never>>,
        _no_abort: Channel<Never>,
        thread: Option<JoinHandle<()>>,
    }

    impl Bench {
        fn start() -> Bench {
            let net = Net::new();
            let refusal = Arc::new(Mutex::new(None));
            net.memory.on_publish({
                let (refusal, mut number) = (refusal.clone(), 0);
                move |asked| serve(asked, refusal.lock().as_ref(), &mut number)
            });
            let gate = Arc::new(Gate::new());
            let limits = Limits::new(Duration::from_secs(60), Duration::from_secs(1800));
            let (roster, queues) = Roster::new(limits, 10, net.metrics.clone());
            let roster = Arc::new(roster);
            let (discover, discovers) = bounded(1);
            let (drain, drained) = bounded(0);
            let (busy, idle) = bounded(0);
            let (no_abort, abort) = bounded(0);
            let setup = Setup {
                transport: net.memory.clone(),
                rpc: net.rpc.clone(),
                identity: Identity::parse("provisioner.example.net").unwrap(),
                instance: instance(2),
                gate: gate.clone(),
                hands: Hands {
                    roster: roster.clone(),
                    queues: queues.clone(),
                    drain: drained,
                    idle,
                },
                metrics: net.metrics.clone(),
                discover,
                abort,
            };
            let election = Election::new(setup, "answers".to_owned()).unwrap();
            let view = election.view();
            let (sink, handed_over) = bounded(1);
            let subscription = net.memory.subscribe(
                &subject::peers().into(),
                Arc::new(move |message| {
                    if let Ok(Said::Handover { .. }) = peer::read(&message.payload) {
                        sink.try_send(message.payload).unwrap_or(());
                    }
                }),
            );
            assert_eq!(gate.reasons(), [Reason::Standby, Reason::Disconnected]);
            gate.open(Reason::Disconnected);
            Bench {
                thread: Some(thread::spawn(move || election.run())),
                net,
                gate,
                roster,
                queues,
                discover: discovers,
                view,
                handed_over,
                _subscription: subscription,
                refusal,
                drain: Some(drain),
                busy: Some(busy),
                _no_abort: no_abort,
            }
        }

        /// A worker has this node in hand.
        fn take(&self, name: &str) -> Key {
            let node = Identity::parse(name).unwrap();
            let Sighted::Queued(key) = self.roster.sight(&node, Sighting::Discovery) else {
                panic!("{name} is new")
            };
            self.roster.registry().take(&key, Instant::now()).unwrap();
            key
        }

        fn finish(&self, key: &Key) {
            let report = Report::new(Outcome::ShutDown, "");
            let now = Instant::now();
            self.roster
                .change(|registry, push| registry.finish(key, &report, now, false, false, push));
        }

        fn say(&self, beat: &Heartbeat) {
            self.net.memory.deliver(PEERS, beat.encode());
        }

        /// How many such heartbeats it has sent.
        fn said(&self, is_such: impl Fn(&Heartbeat) -> bool) -> usize {
            let published = self.net.memory.published();
            let sent = published.iter().filter(|sent| sent.subject == PEERS);
            let beats = sent.filter_map(|sent| match peer::read(&sent.payload) {
                Ok(Said::Heartbeat(beat)) => Some(beat),
                _ => None,
            });
            beats.filter(is_such).count()
        }

        /// Whether it wrote the key in the belief that this is its number.
        fn expects(&self, number: &str) -> bool {
            let published = self.net.memory.published();
            let mut headers = published.iter().flat_map(|sent| &sent.headers);
            headers.any(|(_, value)| value == number)
        }

        #[track_caller]
        fn wait(&self, mut condition: impl FnMut() -> bool) {
            let deadline = Instant::now() + SOON;
            while !condition() {
                assert!(Instant::now() < deadline, "it does not come");
                thread::sleep(Duration::from_millis(5));
            }
        }

        fn join(&mut self) {
            self.thread.take().unwrap().join().unwrap();
        }
    }

    /// What the broker makes of a write that it does not store.
    #[derive(Debug, Clone, Copy)]
    enum Reaction {
        Says(&'static str),
        NoResponders,
        Silence,
    }

    const CONTENDED: &str =
        r#"{"error":{"code":400,"err_code":10071,"description":"wrong last sequence: 7"},"seq":0}"#;

    fn serve(asked: &Published, refusal: Option<&Reaction>, number: &mut u64) -> Vec<Message> {
        let answer = match asked.subject.as_str() {
            "choria.streams.STREAM.INFO.KV_CHORIA_LEADER_ELECTION" => {
                r#"{"config":{"max_age":10000000000,"max_msgs_per_subject":1}}"#.to_owned()
            }
            "choria.streams.$KV.CHORIA_LEADER_ELECTION.provisioner" => match refusal {
                Some(Reaction::Silence) => return Vec::new(),
                Some(Reaction::NoResponders) => String::new(),
                Some(Reaction::Says(answer)) => (*answer).to_owned(),
                None => {
                    *number += 1;
                    format!(r#"{{"stream":"KV_CHORIA_LEADER_ELECTION","seq":{number}}}"#)
                }
            },
            _ => return Vec::new(),
        };
        let subject = asked.reply.clone().expect("an answer is wanted");
        let status = answer.is_empty().then_some(503);
        vec![Message { subject, payload: answer.into_bytes(), status, ..Message::default() }]
    }

    #[derive(Deserialize)]
    struct Recorded {
        subject: String,
        #[serde(default)]
        header: String,
        payload: String,
    }

    #[test]
    fn says_to_the_broker_what_the_original_was_recorded_to_say() {
        let bench = Bench::start();
        bench.discover.recv_timeout(SOON).expect("it leads");
        let sent = bench.net.memory.published();
        let recorded: Vec<Recorded> =
            RECORDED.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        // The original asks for the bucket twice.
        let elections = recorded.iter().filter(|m| m.subject.starts_with("choria.streams."));
        let mut compared = 0;
        // It knows nothing of peers.
        let ours = sent.iter().filter(|sent| sent.subject != PEERS);
        for (ours, theirs) in ours.zip(elections.skip(1)) {
            assert_eq!(ours.subject, theirs.subject);
            assert_eq!(String::from_utf8_lossy(&ours.payload), theirs.payload);
            let header: String =
                ours.headers.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
            let header =
                if header.is_empty() { header } else { format!("NATS/1.0\r\n{header}\r\n") };
            assert_eq!(header, theirs.header);
            compared += 1;
        }
        assert!(compared >= 5, "{compared}");
    }

    #[test]
    fn a_lost_leader_forgets_its_nodes_and_one_that_stops_hands_over() {
        let mut bench = Bench::start();
        bench.discover.recv_timeout(SOON).expect("it leads");
        assert!(bench.gate.begin().is_ok());
        let node = Identity::parse("n1.example.net").unwrap();
        bench.roster.sight(&node, Sighting::Discovery);
        let term = bench.gate.begin().unwrap();

        let changed = bench.gate.watch();
        *bench.refusal.lock() = Some(Reaction::Says(CONTENDED));
        changed.recv_timeout(SOON).expect("the next write is refused");
        let deadline = Instant::now() + SOON;
        assert_eq!(bench.gate.proceed(term, deadline), Err(Closed::TermEnded));

        *bench.refusal.lock() = None;
        bench.discover.recv_timeout(SOON).expect("it leads again");
        assert!(bench.queues.first.is_empty() && bench.roster.registry().node(&node).is_none());
        drop(bench.drain.take());
        drop(bench.busy.take());
        bench.join();
        assert!(bench.gate.begin().is_err());
        assert!(bench.handed_over.try_recv().is_ok());
        let last = bench.net.memory.published().pop().unwrap();
        assert_eq!(last.subject, PEERS);
    }

    #[test]
    fn a_write_that_is_not_stored_ends_acting_at_once_whatever_the_broker_says_or_does_not_say() {
        let says = |answer| Reaction::Says(answer);
        let (lost, lapsed) = (true, false);
        let rows = [
            // Another has the key: so it goes in an election, and nothing is wrong.
            (says(CONTENDED), lost, None),
            (
                says(
                    r#"{"error":{"code":400,"err_code":10164,"description":"wrong last sequence"}}"#,
                ),
                lost,
                None,
            ),
            // Anything else is.
            (
                says(
                    r#"{"error":{"code":400,"err_code":10054,"description":"message size exceeds maximum allowed"}}"#,
                ),
                lost,
                Some("message size exceeds maximum allowed (error 10054)"),
            ),
            (
                says(r#"{"error":{"code":404,"err_code":10059,"description":"stream not found"}}"#),
                lost,
                Some("stream not found (error 10059)"),
            ),
            (
                says(
                    r#"{"error":{"code":503,"err_code":10039,"description":"JetStream not enabled for account"}}"#,
                ),
                lost,
                Some("JetStream not enabled for account (error 10039)"),
            ),
            (says(r#"{"error":{"code":500}}"#), lost, Some(" (error 0)")),
            (says(r#"{"error":{}}"#), lost, Some(" (error 0)")),
            (
                says(r#"{"stream":"KV_CHORIA_LEADER_ELECTION","seq":0}"#),
                lost,
                Some("no number (error 0)"),
            ),
            (says(r#"{"seq":-1}"#), lost, Some("unreadable answer: ")),
            (says("[]"), lost, Some("unreadable answer: ")),
            (says("+OK"), lost, Some("unreadable answer: ")),
            (Reaction::Silence, lost, Some("the broker did not answer within 2s")),
            // Nothing was written, so the key may be ours still: what was begun waits.
            (
                Reaction::NoResponders,
                lapsed,
                Some("no responders: the broker has no Choria Streams"),
            ),
        ];
        // Each takes a leader of its own some seconds.
        thread::scope(|scope| {
            for (reaction, ends_term, trouble) in rows {
                scope.spawn(move || check_not_stored(reaction, ends_term, trouble));
            }
        });
    }

    fn check_not_stored(reaction: Reaction, ends_term: bool, trouble: Option<&str>) {
        let bench = Bench::start();
        bench.discover.recv_timeout(SOON).expect("it leads");
        let term = bench.gate.begin().unwrap();
        let changed = bench.gate.watch();
        *bench.refusal.lock() = Some(reaction);
        changed.recv_timeout(SOON).expect("the next write is not stored");
        assert_eq!(bench.gate.begin(), Err(vec![Reason::Standby]), "{reaction:?}");
        let proceeds = bench.gate.proceed(term, Instant::now());
        let expected = if ends_term { Closed::TermEnded } else { Closed::Deadline };
        assert_eq!(proceeds, Err(expected), "{reaction:?}");
        let shown = || bench.view.get().trouble;
        match trouble {
            None => assert_eq!(shown(), None, "{reaction:?}"),
            Some(part) => {
                let deadline = Instant::now() + SOON;
                while !shown().is_some_and(|why| why.contains(part)) {
                    assert!(Instant::now() < deadline, "{reaction:?}: {:?}", shown());
                    thread::sleep(Duration::from_millis(1));
                }
            }
        }
        *bench.refusal.lock() = None;
        bench.discover.recv_timeout(SOON).expect("it is tried again, and leads");
        assert_eq!(bench.view.get().trouble, None, "{reaction:?}");
    }

    #[test]
    fn a_paused_leader_finishes_its_nodes_hands_over_and_comes_back_when_the_pause_ends() {
        let bench = Bench::start();
        bench.discover.recv_timeout(SOON).expect("it leads");
        let key = bench.take("n1.example.net");
        let term = bench.gate.begin().unwrap();
        bench.gate.close(Reason::Operator);
        assert!(bench.handed_over.recv_timeout(LOOK_FOR_IDLE * 4).is_err(), "a node is in hand");
        assert_eq!(bench.gate.proceed(term, Instant::now() + SOON), Ok(()), "it may finish");
        bench.finish(&key);
        bench.handed_over.recv_timeout(SOON).expect("nobody is in hand any more");
        assert_eq!(bench.gate.reasons(), [Reason::Operator, Reason::Standby]);
        bench.gate.open(Reason::Operator);
        bench.discover.recv_timeout(SOON).expect("it leads again");
    }

    #[test]
    fn whoever_steps_down_begins_nothing_more_and_is_a_candidate_again() {
        let bench = Bench::start();
        bench.discover.recv_timeout(SOON).expect("it leads");
        let key = bench.take("n1.example.net");
        let term = bench.gate.begin().unwrap();
        let changed = bench.gate.watch();
        bench.view.step_down();
        changed.recv_timeout(SOON).expect("the gate closes");
        assert_eq!(bench.gate.begin(), Err(vec![Reason::Standby]));
        assert_eq!(bench.gate.proceed(term, Instant::now() + SOON), Ok(()), "it may finish");
        bench.finish(&key);
        bench.handed_over.recv_timeout(SOON).expect("nobody is in hand any more");
        bench.wait(|| bench.view.get().role == Role::SteppedDown);
        assert!(bench.view.get().takes_back_at.is_some());
        bench.discover.recv_timeout(SOON).expect("nobody else wanted to lead");
    }

    #[test]
    fn whoever_steps_down_begins_nothing_more_when_the_connection_is_lost_and_comes_back() {
        let bench = Bench::start();
        bench.discover.recv_timeout(SOON).expect("it leads");
        let key = bench.take("n1.example.net");
        let term = bench.gate.begin().unwrap();
        bench.view.step_down();
        bench.wait(|| bench.gate.begin().is_err());
        bench.gate.close(Reason::Disconnected);
        let is_confirming = || bench.view.get().role == Role::Confirming;
        bench.wait(is_confirming);
        bench.gate.open(Reason::Disconnected);
        assert_eq!(bench.gate.proceed(term, Instant::now() + SOON), Ok(()), "it may finish");
        assert_eq!(bench.gate.begin(), Err(vec![Reason::Standby]));
        bench.finish(&key);
        bench.handed_over.recv_timeout(SOON).expect("nobody is in hand any more");
    }

    #[test]
    fn only_others_offer_keys() {
        let bench = Bench::start();
        bench.discover.recv_timeout(SOON).expect("it leads");
        *bench.refusal.lock() = Some(Reaction::Says(CONTENDED));
        let is_candidate = || bench.view.get().role == Role::Candidate;
        bench.wait(is_candidate);
        bench.net.memory.deliver(PEERS, peer::handover(&instance(2), 70_000));
        bench.net.memory.deliver(PEERS, "nonsense");
        bench.net.memory.deliver(PEERS, peer::handover(&instance(1), 80_000));
        bench.wait(|| bench.expects("80000"));
        assert!(!bench.expects("70000"), "that was its own");
    }

    #[test]
    fn the_younger_of_two_with_one_identity_stays_out_until_the_older_leaves() {
        let bench = Bench::start();
        bench.discover.recv_timeout(SOON).expect("it leads");
        let key = bench.take("n1.example.net");
        let term = bench.gate.begin().unwrap();
        let identity = Identity::parse("provisioner.example.net").unwrap();
        let sender = Sender { identity, caller: bench.net.rpc.caller() };
        let younger = Heartbeat { sender, ..beat(3, "any", peer::Role::Candidate) };
        bench.say(&younger);
        bench.wait(|| bench.said(|beat| beat.role == peer::Role::Leader) > 1);
        assert!(bench.gate.begin().is_ok(), "the other one is younger");

        let older = Heartbeat { instance: instance(1), ..younger };
        bench.say(&older);
        bench.wait(|| bench.gate.begin().is_err());
        assert_eq!(bench.gate.proceed(term, Instant::now() + SOON), Ok(()), "it may finish");
        bench.finish(&key);
        bench.handed_over.recv_timeout(SOON).expect("nobody is in hand any more");
        bench.wait(|| bench.view.get().role == Role::Out);
        let trouble = bench.view.get().trouble.expect("it says why");
        assert!(trouble.contains("has our identity provisioner.example.net"), "{trouble}");

        bench.say(&Heartbeat { leaving: true, ..older });
        bench.discover.recv_timeout(SOON).expect("it leads again");
        assert_eq!(bench.view.get(), Shown::role(Role::Leader));
    }

    #[test]
    fn whoever_shares_its_nodes_with_others_is_answered_by_the_leader() {
        let bench = Bench::start();
        bench.discover.recv_timeout(SOON).expect("it leads");
        let before = bench.said(|beat| beat.role == peer::Role::Leader);
        bench.say(&beat(1, "active", peer::Role::Active));
        bench.wait(|| bench.said(|beat| beat.role == peer::Role::Leader) > before);
        assert!(bench.gate.begin().is_ok());
    }
}
