//! One request to one node, one checked reply back.
//!
//! [`Rpc`] holds one wildcard subscription for all replies and hands each one to whoever registered its request id. A
//! reply counts only if its hash is right, its request id is the one asked under and its sender is the node asked: in
//! the provisioning account every node can read every request and answer it. What doesn't fit is counted and dropped.
//!
//! [`Attempt`] makes all the calls to one node: tries, pauses, late and contradicting answers. Which calls, and what
//! becomes of the node, is for `node` to say; a reply that is well-formed is still unverified.
//!
//! The broker's reader thread runs `Shared::deliver` for each message: it looks up the id and passes the bytes on,
//! unread. Decoding happens on the thread of whoever waits.

pub mod actions;
mod attempt;
mod discovery;
pub mod retry;
#[cfg(test)]
pub(crate) mod testing;

use std::collections::HashMap;
use std::fmt;
use std::mem;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::time::Instant;

use crossbeam_channel::{Receiver, Sender as Channel, bounded};
use parking_lot::{Mutex, RwLock};

pub use self::attempt::{Attempt, Checked, Contradiction, Error, Patience, Unhurried};
pub use self::discovery::{DiscoveryError, Found, ask_nobody, discover};

use self::actions::{Action, BadReply, Body};
use self::discovery::{Burst, LATE_FINDS_MAX};
use crate::clock::unix_nanos;
use crate::gate::Lease;
use crate::metrics::Metrics;
use crate::protocol::json::excerpt;
use crate::protocol::subject::{self, BadSubject, Pattern, ReplySubjects, Subject};
use crate::protocol::{
    self, Codec, DecodeError, Identity, NANOS_PER_SEC, REPLY_BYTES_MAX, Reply, Request, RequestId,
};
use crate::transport::{Message, Publish, PublishError, Subscription, Transport};

/// Answers passed on for one request. There should be one; two are a contradiction, and a flood proves nothing more.
const ANSWERS_MAX: u32 = 8;

/// Largest answer passed on after the first one, in bytes: a flood must not fill the memory.
const FURTHER_ANSWER_BYTES_MAX: usize = 64 << 10;

/// Bytes of all answers that wait to be heard, whoever they are for: thousands of ordinary inventories.
const WAITING_BYTES_MAX: usize = 64 << 20;

/// Bytes of all second answers that are kept. Thousands of requests may be open, and anyone can answer each of them twice.
const SECONDS_BYTES_MAX: usize = 16 << 20;

/// What came for one request.
#[derive(Debug)]
pub struct Arrival {
    /// The request it is addressed to. What is inside may say otherwise.
    pub id: RequestId,
    /// When it came.
    pub at: Instant,
    /// The bytes, or the news that there won't be any.
    pub answer: Answer,
    /// Its part of the bound it was taken in under; given back when it is taken apart.
    _room: Option<Room>,
}

impl Arrival {
    /// One that waits in no queue.
    pub fn new(id: RequestId, at: Instant, answer: Answer) -> Arrival {
        Arrival { id, at, answer, _room: None }
    }
}

/// Something came.
#[derive(Debug, Clone)]
pub enum Answer {
    /// A message, unread.
    Payload(Vec<u8>),
    /// The broker knows nobody who would have heard the request.
    NoResponders,
}

/// Sends requests and takes all replies of the process.
pub struct Rpc {
    transport: Arc<dyn Transport>,
    /// Requests that it does not cover are not sent.
    lease: Lease,
    codec: RwLock<Arc<Codec>>,
    /// Sets this process apart in the subject of replies.
    instance: String,
    ttl_secs: u32,
    shared: Arc<Shared>,
    /// Keeps the last discovery's request alive, for the late ones.
    last_discovery: Mutex<Option<Registration>>,
    late_finds: Receiver<Identity>,
    subscription: Mutex<Subscription>,
}

/// What to send, and where.
struct Ask<'a> {
    subject: &'a Subject,
    agent: &'a str,
    filter_agent: &'a str,
    body: &'a str,
}

/// Whether the broker shall say so when nobody hears a request.
enum NoResponders {
    Wanted,
    Unwanted,
}

/// What the reader thread needs.
struct Shared {
    subjects: RwLock<Arc<ReplySubjects>>,
    pending: Mutex<HashMap<RequestId, Arc<Entry>>>,
    metrics: Arc<Metrics>,
    late_finds: Channel<Identity>,
    /// For answers that wait to be heard.
    waiting: Arc<Bound>,
    /// For second answers that are kept.
    seconds: Arc<Bound>,
}

/// A bound on bytes that many share.
struct Bound {
    used: AtomicUsize,
    max: usize,
}

/// A part of a bound, given back when this is dropped.
struct Room {
    bytes: usize,
    of: Arc<Bound>,
}

/// A request whose answers somebody wants.
struct Entry {
    route: Mutex<Route>,
    answers: AtomicU32,
    flooded: AtomicBool,
}

struct Route {
    sink: Sink,
    /// The second answer: who takes the request over must see it, and whoever has it now looks at the first only.
    second: Option<Second>,
}

enum Second {
    /// A copy of it.
    Kept(Arrival),
    /// There was one, and no room for a copy.
    Lost,
}

/// Where answers go.
enum Sink {
    /// To whoever sent the request.
    Arrivals(Channel<Arrival>),
    /// To the discovery that runs.
    Discovery(Arc<Burst>),
    /// To the late finds, decoded on the spot: there are few and they are small.
    LateFinds(Arc<Codec>),
}

/// Keeps a request's id known; answers that come after this was dropped are counted and dropped too.
pub struct Registration {
    id: RequestId,
    sent_at: Instant,
    entry: Arc<Entry>,
    shared: Arc<Shared>,
}

impl Rpc {
    /// Subscribes to the replies of this process.
    ///
    /// `lease` says until when its requests may be sent, `instance` sets it apart from other processes with the same caller
    /// id, and `ttl_secs` is how far nodes' clocks may be off.
    ///
    /// # Errors
    ///
    /// [`StartError`] if `instance` can't be a part of a subject.
    pub fn start(
        transport: Arc<dyn Transport>,
        lease: Lease,
        codec: Codec,
        instance: &str,
        ttl_secs: u32,
        metrics: Arc<Metrics>,
    ) -> Result<Arc<Rpc>, StartError> {
        let subjects = ReplySubjects::new(&codec.sender().caller, instance).map_err(StartError)?;
        let pattern = subjects.pattern();
        let (late_sender, late_finds) = bounded(LATE_FINDS_MAX);
        let shared = Arc::new(Shared {
            subjects: RwLock::new(Arc::new(subjects)),
            pending: Mutex::new(HashMap::new()),
            metrics,
            late_finds: late_sender,
            waiting: Bound::new(WAITING_BYTES_MAX),
            seconds: Bound::new(SECONDS_BYTES_MAX),
        });
        let subscription = shared.listen(&*transport, &pattern);
        Ok(Arc::new(Rpc {
            transport,
            lease,
            codec: RwLock::new(Arc::new(codec)),
            instance: instance.to_owned(),
            ttl_secs,
            shared,
            last_discovery: Mutex::new(None),
            late_finds,
            subscription: Mutex::new(subscription),
        }))
    }

    /// Wraps requests with `codec` from now on. Another caller gets its replies on another subject, and those to its
    /// former self are lost; so this is for the time between two connections.
    ///
    /// # Errors
    ///
    /// [`StartError`]; then nothing has changed.
    pub fn renew(&self, codec: Codec) -> Result<(), StartError> {
        let caller = &codec.sender().caller;
        if *caller != self.codec().sender().caller {
            let subjects = ReplySubjects::new(caller, &self.instance).map_err(StartError)?;
            let pattern = subjects.pattern();
            *self.shared.subjects.write() = Arc::new(subjects);
            let subscription = self.shared.listen(&*self.transport, &pattern);
            let former = mem::replace(&mut *self.subscription.lock(), subscription);
            drop(former);
        }
        *self.codec.write() = Arc::new(codec);
        Ok(())
    }

    /// Who we are in requests.
    pub fn caller(&self) -> String {
        self.codec().sender().caller.clone()
    }

    fn codec(&self) -> Arc<Codec> {
        self.codec.read().clone()
    }

    /// Sends one request to `node`; its answers go to `sink` as long as the registration lives. A full sink loses them.
    ///
    /// # Errors
    ///
    /// [`SendError`]; then nothing was sent.
    pub fn send(
        self: &Arc<Self>,
        node: &Identity,
        action: Action,
        body: &str,
        sink: &Channel<Arrival>,
    ) -> Result<Registration, SendError> {
        let registration = self.register(Sink::Arrivals(sink.clone()));
        let agent = action.agent();
        let ask = Ask { subject: &subject::node(node), agent, filter_agent: agent, body };
        self.publish(&ask, NoResponders::Wanted, &registration)?;
        Ok(registration)
    }

    fn register(&self, sink: Sink) -> Registration {
        let id = self.codec().request_id(unix_nanos() / NANOS_PER_SEC, protocol::random_bytes());
        let entry = Arc::new(Entry {
            route: Mutex::new(Route { sink, second: None }),
            answers: AtomicU32::new(0),
            flooded: AtomicBool::new(false),
        });
        self.shared.pending.lock().insert(id, entry.clone());
        Registration { id, sent_at: Instant::now(), entry, shared: self.shared.clone() }
    }

    fn publish(
        &self,
        ask: &Ask<'_>,
        no_responders: NoResponders,
        registration: &Registration,
    ) -> Result<(), SendError> {
        let reply_to = self.shared.subjects().for_request(registration.id);
        let payload = self.encode(ask, registration.id, &reply_to);
        // Nodes answer to the subject within the request; the NATS one is for the broker.
        let reply = match no_responders {
            NoResponders::Wanted => Some(&reply_to),
            NoResponders::Unwanted => None,
        };
        let until = self.lease.until();
        let message = Publish { reply, until, ..Publish::new(ask.subject, &payload) };
        self.transport.publish(&message).map_err(SendError)
    }

    fn encode(&self, ask: &Ask<'_>, id: RequestId, reply_to: &Subject) -> Vec<u8> {
        self.codec().encode(&Request {
            id,
            agent: ask.agent,
            filter_agent: ask.filter_agent,
            body: ask.body,
            ttl_secs: self.ttl_secs,
            unix_nanos: unix_nanos(),
            reply_to,
            broker_url: &self.transport.broker_url(),
        })
    }

    /// How many bytes the message with `body` to `node` would have. Costs as much as making it.
    pub fn message_size(&self, node: &Identity, action: Action, body: &str) -> usize {
        let agent = action.agent();
        let ask = Ask { subject: &subject::node(node), agent, filter_agent: agent, body };
        let id = RequestId::random();
        self.encode(&ask, id, &self.shared.subjects().for_request(id)).len()
    }

    /// The largest message the broker takes now, in bytes.
    pub fn max_payload(&self) -> usize {
        self.transport.max_payload()
    }

    /// Reads an answer to a request that was sent to `node`.
    ///
    /// # Errors
    ///
    /// [`RpcError`]. An unexpected one is counted here, and the answer asked for may still come.
    pub fn read(
        &self,
        node: &Identity,
        action: Action,
        arrival: &Arrival,
    ) -> Result<Body, RpcError> {
        let Answer::Payload(payload) = &arrival.answer else { return Err(RpcError::NoResponders) };
        let reply = self.accept(node, arrival.id, payload).map_err(RpcError::Unexpected)?;
        let body = Body::parse(&reply.body).map_err(RpcError::BadReply)?;
        if body.code == 0 && body.action != action.name() {
            let found = excerpt(&body.action, 40);
            return Err(RpcError::BadReply(BadReply::OtherAction { found }));
        }
        Ok(body)
    }

    /// The rule of acceptance: the hash is right, the id is the one asked under, the sender is the node asked.
    fn accept(&self, node: &Identity, id: RequestId, payload: &[u8]) -> Result<Reply, Unexpected> {
        let accepted = match self.codec().decode_reply(payload) {
            Err(error) => Err(Unexpected::from(&error)),
            Ok(reply) if reply.request_id != id => Err(Unexpected::OtherRequest),
            Ok(reply) if reply.sender != node.as_str() => Err(Unexpected::OtherSender),
            Ok(reply) => Ok(reply),
        };
        if let Err(kind) = &accepted {
            self.shared.count(*kind);
        }
        accepted
    }

    /// Nodes that answered the last discovery after its end.
    pub fn late_finds(&self) -> Receiver<Identity> {
        self.late_finds.clone()
    }

    /// How many requests are registered.
    pub fn pending(&self) -> usize {
        self.shared.pending.lock().len()
    }
}

impl Shared {
    /// Takes replies from now on.
    fn listen(self: &Arc<Self>, transport: &dyn Transport, pattern: &Pattern) -> Subscription {
        let shared = self.clone();
        transport.subscribe(pattern, Arc::new(move |message| shared.deliver(message)))
    }

    fn subjects(&self) -> Arc<ReplySubjects> {
        self.subjects.read().clone()
    }

    /// Runs on the reader thread: no decoding, no waiting.
    fn deliver(&self, message: Message) {
        let Some(id) = self.subjects().request_id(&message.subject) else {
            return self.count(Unexpected::UnknownRequest);
        };
        let entry = self.pending.lock().get(&id).cloned();
        let Some(entry) = entry else { return self.count(Unexpected::UnknownRequest) };
        let Route { sink, second } = &mut *entry.route.lock();
        match sink {
            Sink::Arrivals(sink) => self.deliver_arrival(id, &entry, sink, second, message),
            Sink::Discovery(burst) => {
                if !burst.push(message.payload) {
                    self.count(Unexpected::Overflow);
                }
            }
            Sink::LateFinds(codec) => self.deliver_late_find(id, &entry, codec, &message.payload),
        }
    }

    fn deliver_arrival(
        &self,
        id: RequestId,
        entry: &Entry,
        sink: &Channel<Arrival>,
        second: &mut Option<Second>,
        message: Message,
    ) {
        let answer = if message.is_no_responders() {
            Answer::NoResponders
        } else {
            Answer::Payload(message.payload)
        };
        let bytes = if let Answer::Payload(payload) = &answer { payload.len() } else { 0 };
        let before = entry.answers.fetch_add(1, Ordering::Relaxed);
        let bytes_max = if before == 0 { REPLY_BYTES_MAX } else { FURTHER_ANSWER_BYTES_MAX };
        let fits = before < ANSWERS_MAX && bytes <= bytes_max;
        let at = Instant::now();
        if fits && before == 1 {
            *second = Some(match self.seconds.take(bytes) {
                None => Second::Lost,
                room => Second::Kept(Arrival { id, at, answer: answer.clone(), _room: room }),
            });
        }
        let room = if fits { self.waiting.take(bytes) } else { None };
        if room.is_none() || sink.try_send(Arrival { id, at, answer, _room: room }).is_err() {
            // Whoever waits must know that something was said that nobody heard: it may have been the truth.
            entry.flooded.store(true, Ordering::Release);
            self.count(Unexpected::Overflow);
        }
    }

    fn count(&self, kind: Unexpected) {
        self.metrics.unexpected_replies.with_label_values(&[kind.label()]).inc();
    }
}

impl Bound {
    fn new(max: usize) -> Arc<Bound> {
        Arc::new(Bound { used: AtomicUsize::new(0), max })
    }

    fn take(self: &Arc<Bound>, bytes: usize) -> Option<Room> {
        let room = Room { bytes, of: self.clone() };
        let used = self.used.fetch_add(bytes, Ordering::Relaxed) + bytes;
        // Too much is given back at once.
        (used <= self.max).then_some(room)
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        self.of.used.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

impl fmt::Debug for Room {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Room({} bytes)", self.bytes)
    }
}

impl Registration {
    /// The request's id.
    pub fn id(&self) -> RequestId {
        self.id
    }

    /// When the request was sent.
    pub fn sent_at(&self) -> Instant {
        self.sent_at
    }

    /// Sends further answers to `sink`, among them those that came already after the first one.
    pub fn redirect(&self, sink: &Channel<Arrival>) {
        let mut route = self.entry.route.lock();
        let lost = match route.second.take() {
            // The second one is kept; whether a third one said the same, nobody knows.
            Some(Second::Kept(second)) => {
                let answers = self.entry.answers.load(Ordering::Relaxed);
                sink.try_send(second).is_err() || answers > 2
            }
            Some(Second::Lost) => true,
            None => false,
        };
        self.entry.flooded.fetch_or(lost, Ordering::Release);
        route.sink = Sink::Arrivals(sink.clone());
    }

    /// Whether answers were lost for their number or size, so that nobody knows whether they agreed.
    pub fn is_flooded(&self) -> bool {
        self.entry.flooded.load(Ordering::Acquire)
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        self.shared.pending.lock().remove(&self.id);
    }
}

impl fmt::Debug for Registration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Registration({})", self.id)
    }
}

impl fmt::Debug for Rpc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Rpc({} pending)", self.pending())
    }
}

/// Why a reply was dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unexpected {
    /// Nobody waits for it: it came too late, or its id was made up.
    UnknownRequest,
    /// No reply at all.
    Malformed,
    /// The hash does not fit.
    Hash,
    /// It came under one request id and holds another.
    OtherRequest,
    /// It is not from the node that was asked.
    OtherSender,
    /// The same answer once more.
    Duplicate,
    /// An answer to an earlier try that no longer counts.
    Late,
    /// Too many, or too large.
    Overflow,
}

impl Unexpected {
    /// The value of the `kind` label of `unexpected_replies`.
    pub fn label(self) -> &'static str {
        match self {
            Unexpected::UnknownRequest => "unknown_request",
            Unexpected::Malformed => "malformed",
            Unexpected::Hash => "hash",
            Unexpected::OtherRequest => "other_request",
            Unexpected::OtherSender => "other_sender",
            Unexpected::Duplicate => "duplicate",
            Unexpected::Late => "late",
            Unexpected::Overflow => "overflow",
        }
    }
}

impl From<&DecodeError> for Unexpected {
    fn from(error: &DecodeError) -> Unexpected {
        match error {
            DecodeError::Hash => Unexpected::Hash,
            DecodeError::TooLarge { .. }
            | DecodeError::Json { .. }
            | DecodeError::Protocol { .. }
            | DecodeError::Base64 { .. }
            | DecodeError::Body
            | DecodeError::RequestId => Unexpected::Malformed,
        }
    }
}

impl fmt::Display for Unexpected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Unexpected::UnknownRequest => "reply to a request nobody waits for",
            Unexpected::Malformed => "malformed reply",
            Unexpected::Hash => "reply whose hash does not fit",
            Unexpected::OtherRequest => "reply to another request",
            Unexpected::OtherSender => "reply from another node",
            Unexpected::Duplicate => "reply that came before",
            Unexpected::Late => "reply to an earlier try",
            Unexpected::Overflow => "one reply too many",
        })
    }
}

/// Why an arrival is no usable answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RpcError {
    /// Nobody heard the request.
    NoResponders,
    /// It does not come from the node asked, or does not answer the request; another one may.
    Unexpected(Unexpected),
    /// The node answered, and what it said is no use.
    BadReply(BadReply),
}

impl fmt::Display for RpcError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RpcError::NoResponders => f.write_str("nobody listens on the node's subject"),
            RpcError::Unexpected(kind) => write!(f, "{kind}"),
            RpcError::BadReply(_) => f.write_str("unusable reply"),
        }
    }
}

impl std::error::Error for RpcError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            RpcError::BadReply(source) => Some(source),
            RpcError::NoResponders | RpcError::Unexpected(_) => None,
        }
    }
}

/// A request was not sent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SendError(pub PublishError);

impl fmt::Display for SendError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("could not send the request")
    }
}

impl std::error::Error for SendError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.0)
    }
}

/// The instance can't be a part of a subject.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StartError(pub BadSubject);

impl fmt::Display for StartError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("unusable instance name")
    }
}

impl std::error::Error for StartError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::testing::{NODE, Net, good_body, payload, recorded_answers, tampered};
    use super::*;

    fn node() -> Identity {
        Identity::parse(NODE).unwrap()
    }

    #[test]
    fn sends_a_request_the_way_nodes_expect_it() {
        let net = Net::new();
        let (sink, _arrivals) = bounded(1);
        let registration = net.rpc.send(&node(), Action::Jwt, "{}", &sink).unwrap();
        let asked = net.asked().remove(0);
        assert_eq!(asked.subject, "provisioning.node.n0.fleet.example.net");
        assert_eq!(asked.body, "{}");
        let prefix = "provisioning.reply.f233e84b1879ff8f207108d2dda253a5.i1.";
        assert_eq!(asked.reply_to, format!("{prefix}{}", registration.id()));
        assert_eq!(asked.envelope["requestid"], registration.id().as_str());
        assert_eq!(asked.envelope["agent"], "choria_provision");
        assert_eq!(asked.envelope["filter"]["agent"][0], "choria_provision");
        let time = asked.envelope["time"].as_i64().unwrap();
        let now = unix_nanos() / NANOS_PER_SEC;
        assert!((now - 60..=now).contains(&time));
    }

    #[test]
    fn knows_the_size_of_a_message_before_it_is_sent() {
        let net = Net::new();
        let (sink, _arrivals) = bounded(1);
        for body in ["{}", &"<\"\n".repeat(1_000)] {
            let size = net.rpc.message_size(&node(), Action::Configure, body);
            assert!(net.memory.published().is_empty());
            net.rpc.send(&node(), Action::Configure, body, &sink).unwrap();
            assert_eq!(net.memory.take_published().remove(0).payload.len(), size);
        }
        net.memory.set_max_payload(1_234);
        assert_eq!(net.rpc.max_payload(), 1_234);
    }

    #[test]
    fn hands_an_answer_to_whoever_asked() {
        let net = Net::new();
        net.answer(|_, asked| vec![asked.reply(&good_body(Action::Jwt))]);
        let (sink, arrivals) = bounded(1);
        let registration = net.rpc.send(&node(), Action::Jwt, "{}", &sink).unwrap();
        let arrival = arrivals.try_recv().unwrap();
        assert_eq!(arrival.id, registration.id());
        assert_eq!(net.rpc.read(&node(), Action::Jwt, &arrival).unwrap().code, 0);
    }

    #[test]
    fn forgets_a_request_with_its_registration() {
        let net = Net::new();
        let (sink, arrivals) = bounded(8);
        let registration = net.rpc.send(&node(), Action::Jwt, "{}", &sink).unwrap();
        assert_eq!(net.rpc.pending(), 1);
        drop(registration);
        assert_eq!(net.rpc.pending(), 0);
        let asked = net.asked().remove(0);
        net.memory.deliver_message(asked.reply(&good_body(Action::Jwt)));
        assert!(arrivals.is_empty());
        assert_eq!(net.unexpected("unknown_request"), 1);
    }

    #[test]
    fn forgets_a_request_that_was_not_sent() {
        let net = Net::new();
        net.memory.set_connected(false);
        let (sink, _arrivals) = bounded(8);
        let error = net.rpc.send(&node(), Action::Jwt, "{}", &sink).unwrap_err();
        assert_eq!(error, SendError(PublishError::Disconnected));
        assert_eq!(net.rpc.pending(), 0);
    }

    #[test]
    fn drops_what_comes_on_other_subjects() {
        let net = Net::new();
        let prefix = "provisioning.reply.f233e84b1879ff8f207108d2dda253a5.i1";
        for token in ["x", "6C1F0D5E0B8A4F0F9A3D2B7C4E5F6A71", "6c1f0d5e0b8a4f0f9a3d2b7c4e5f6a71"] {
            assert_eq!(net.memory.deliver(&format!("{prefix}.{token}"), "x"), 1);
        }
        assert_eq!(net.unexpected("unknown_request"), 3);
    }

    #[test]
    fn passes_on_that_nobody_listens() {
        let net = Net::new();
        net.memory.no_responders_for("provisioning.node.n0.fleet.example.net");
        let (sink, arrivals) = bounded(1);
        let _registration = net.rpc.send(&node(), Action::Jwt, "{}", &sink).unwrap();
        let arrival = arrivals.try_recv().unwrap();
        let error = net.rpc.read(&node(), Action::Jwt, &arrival).unwrap_err();
        assert_eq!(error, RpcError::NoResponders);
    }

    #[test]
    fn redirects_all_answers_but_the_first() {
        for before in 0..4 {
            let net = Net::new();
            let (first, first_arrivals) = bounded(8);
            let (second, second_arrivals) = bounded(8);
            let registration = net.rpc.send(&node(), Action::Jwt, "{}", &first).unwrap();
            let asked = net.asked().remove(0);
            for n in 0..before {
                net.memory.deliver_message(asked.raw(vec![n]));
            }
            registration.redirect(&second);
            net.memory.deliver_message(asked.raw(vec![before]));
            assert_eq!(first_arrivals.len(), usize::from(before));
            let redirected: Vec<u8> = second_arrivals
                .try_iter()
                .map(|arrival| match arrival.answer {
                    Answer::Payload(payload) => payload[0],
                    Answer::NoResponders => unreachable!("only payloads were sent"),
                })
                .collect();
            let expected = if before < 2 { vec![before] } else { vec![1, before] };
            assert_eq!(redirected, expected);
            assert_eq!(registration.is_flooded(), before > 2, "the third one was seen by nobody");
        }
    }

    #[test]
    fn answers_to_many_requests_fill_a_bounded_part_of_the_memory() {
        let net = Net::new();
        let (sink, arrivals) = bounded(10_000);
        let large = vec![0; FURTHER_ANSWER_BYTES_MAX];
        let ask = || net.rpc.send(&node(), Action::Inventory, "{}", &sink).unwrap();

        let many = WAITING_BYTES_MAX / large.len();
        let registrations: Vec<Registration> = (0..=many).map(|_| ask()).collect();
        let asked = net.asked();
        for asked in &asked {
            net.memory.deliver_message(asked.raw(large.clone()));
        }
        assert_eq!(arrivals.len(), many);
        assert_eq!(net.unexpected("overflow"), 1);
        assert!(registrations[many].is_flooded() && !registrations[many - 1].is_flooded());
        // Whoever hears them makes room.
        arrivals.try_iter().for_each(drop);
        net.memory.deliver_message(asked[many].raw(large.clone()));
        assert_eq!(arrivals.len(), 1);
        arrivals.try_iter().for_each(drop);

        let many = SECONDS_BYTES_MAX / large.len();
        for asked in &asked[..=many] {
            net.memory.deliver_message(asked.raw(large.clone()));
            arrivals.try_iter().for_each(drop);
        }
        let (other, others) = bounded(1);
        registrations[many].redirect(&other);
        assert!(others.is_empty() && registrations[many].is_flooded(), "it was not kept");
        registrations[0].redirect(&other);
        assert!(others.len() == 1 && !registrations[0].is_flooded());
        drop((registrations, other, others));
        assert_eq!(net.rpc.shared.seconds.used.load(Ordering::Relaxed), 0);
        assert_eq!(net.rpc.shared.waiting.used.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn says_so_when_answers_are_lost() {
        let net = Net::new();
        let (sink, arrivals) = bounded(100);
        let registration = net.rpc.send(&node(), Action::Jwt, "{}", &sink).unwrap();
        let asked = net.asked().remove(0);
        for _ in 0..ANSWERS_MAX {
            net.memory.deliver_message(asked.raw(vec![1]));
        }
        assert!(!registration.is_flooded());
        net.memory.deliver_message(asked.raw(vec![1]));
        assert!(registration.is_flooded());
        assert_eq!(arrivals.len(), usize::try_from(ANSWERS_MAX).unwrap());
        assert_eq!(net.unexpected("overflow"), 1);
    }

    #[test]
    fn says_so_when_a_sink_is_full_or_an_answer_too_large() {
        let net = Net::new();
        let (sink, arrivals) = bounded(2);
        let full = net.rpc.send(&node(), Action::Jwt, "{}", &sink).unwrap();
        let large = net.rpc.send(&node(), Action::Jwt, "{}", &sink).unwrap();
        let asked = net.asked();
        net.memory.deliver_message(asked[1].raw(vec![1; FURTHER_ANSWER_BYTES_MAX + 1]));
        assert!(!large.is_flooded(), "the first answer may be large");
        net.memory.deliver_message(asked[1].raw(vec![1; FURTHER_ANSWER_BYTES_MAX + 1]));
        assert!(large.is_flooded());
        net.memory.deliver_message(asked[0].raw(vec![1]));
        assert!(!full.is_flooded());
        net.memory.deliver_message(asked[0].raw(vec![1]));
        assert!(full.is_flooded());
        assert_eq!(arrivals.len(), 2);
    }

    #[test]
    fn accepts_only_the_answer_of_the_node_asked() {
        let net = Net::new();
        let (sink, _arrivals) = bounded(1);
        let registration = net.rpc.send(&node(), Action::Jwt, "{}", &sink).unwrap();
        let id = registration.id();
        let body = good_body(Action::Jwt);
        let good = payload(NODE, id.as_str(), &body);
        let read = |payload: Vec<u8>| {
            let arrival = Arrival::new(id, Instant::now(), Answer::Payload(payload));
            net.rpc.read(&node(), Action::Jwt, &arrival)
        };
        assert!(read(good.clone()).is_ok());

        let other = RequestId::random();
        let forged = read(payload(NODE, other.as_str(), &body)).unwrap_err();
        assert_eq!(forged, RpcError::Unexpected(Unexpected::OtherRequest));
        for sender in ["n1.fleet.example.net", "", "N0.fleet.example.net", "n0.fleet.example.net "]
        {
            let forged = read(payload(sender, id.as_str(), &body)).unwrap_err();
            assert_eq!(forged, RpcError::Unexpected(Unexpected::OtherSender), "{sender:?}");
        }
        let malformed = read(b"x".to_vec()).unwrap_err();
        assert_eq!(malformed, RpcError::Unexpected(Unexpected::Malformed));
        let forged = read(tampered(NODE, id.as_str(), &body)).unwrap_err();
        assert_eq!(forged, RpcError::Unexpected(Unexpected::Hash));
        for (kind, count) in
            [("other_request", 1), ("other_sender", 4), ("malformed", 1), ("hash", 1)]
        {
            assert_eq!(net.unexpected(kind), count, "{kind}");
        }
    }

    #[test]
    fn tells_an_unusable_answer_from_a_foreign_one() {
        let net = Net::new();
        let id = RequestId::random();
        for body in ["", "pong", "[]", "{}", &good_body(Action::Restart)] {
            let payload = payload(NODE, id.as_str(), body);
            let arrival = Arrival::new(id, Instant::now(), Answer::Payload(payload));
            let error = net.rpc.read(&node(), Action::Jwt, &arrival).unwrap_err();
            assert!(matches!(error, RpcError::BadReply(_)), "{body}: {error:?}");
        }
    }

    #[test]
    fn survives_flipped_bytes_in_every_recorded_answer() {
        let net = Net::new();
        let id = RequestId::random();
        let mut random = fastrand::Rng::with_seed(5);
        for answer in recorded_answers() {
            let payload = payload(NODE, id.as_str(), &answer.to_string());
            for _ in 0..50 {
                let mut payload = payload.clone();
                for _ in 0..random.usize(1..4) {
                    let at = random.usize(..payload.len());
                    payload[at] = random.u8(..);
                }
                let arrival = Arrival::new(id, Instant::now(), Answer::Payload(payload));
                if let Ok(body) = net.rpc.read(&node(), Action::Jwt, &arrival) {
                    assert_eq!(answer["statuscode"].as_u64(), Some(u64::from(body.code)));
                }
            }
        }
    }
}
