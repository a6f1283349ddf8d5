//! One request to one node, one checked reply back.
//!
//! [`Rpc`] holds one wildcard subscription for all replies and hands each one to whoever registered its request id. A
//! reply counts only if its hash is right, its request id is the one asked under and its sender is the node asked: in
//! the provisioning account every node can read every request and answer it. What doesn't fit is counted and dropped.
//!
//! [`Attempt`] makes all the calls to one node: tries, pauses, late and contradicting answers. Which calls, and what
//! becomes of the node, is for `node` to say; a reply that is well-formed is still unverified.
//!
//! The broker's reader thread runs [`Shared::deliver`] for each message: it looks up the id and passes the bytes on,
//! unread. Decoding happens on the thread of whoever waits.

pub mod actions;
mod attempt;
mod discovery;
pub mod retry;

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crossbeam_channel::{Receiver, Sender as Channel, bounded};
use parking_lot::Mutex;

pub use self::actions::{Action, BadReply, Body, Call};
pub use self::attempt::{Attempt, Checked, Contradiction, Error, Patience};
pub use self::discovery::{DiscoveryError, Found, discover};

use self::discovery::{Burst, LATE_FINDS_MAX};
use crate::metrics::Metrics;
use crate::protocol::json::excerpt;
use crate::protocol::subject::{self, BadSubject, ReplySubjects, Subject};
use crate::protocol::{
    Codec, DecodeError, Identity, REPLY_BYTES_MAX, Reply, Request, RequestId, Sender,
};
use crate::transport::{Message, Publish, PublishError, Subscription, Transport};

/// Answers passed on for one request. There should be one; two are a contradiction, and a flood proves nothing more.
const ANSWERS_MAX: u32 = 8;

/// Largest answer passed on after the first one, in bytes: a flood must not fill the memory.
const FURTHER_ANSWER_BYTES_MAX: usize = 64 << 10;

/// What came for one request.
#[derive(Debug, Clone)]
pub struct Arrival {
    /// The request it is addressed to. What is inside may say otherwise.
    pub id: RequestId,
    /// When it came.
    pub at: Instant,
    /// The bytes, or the news that there won't be any.
    pub answer: Answer,
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
    codec: Codec,
    ttl_secs: u32,
    shared: Arc<Shared>,
    /// Keeps the last discovery's request alive, for the late ones.
    last_discovery: Mutex<Option<Registration>>,
    late_finds: Receiver<Identity>,
    _subscription: Subscription,
}

/// What the reader thread needs.
struct Shared {
    subjects: ReplySubjects,
    pending: Mutex<HashMap<RequestId, Arc<Entry>>>,
    metrics: Arc<Metrics>,
    late_finds: Channel<Identity>,
}

/// A request whose answers somebody wants.
struct Entry {
    sink: Mutex<Sink>,
    answers: AtomicU32,
    flooded: AtomicBool,
}

/// Where answers go.
enum Sink {
    /// To whoever sent the request.
    Arrivals(Channel<Arrival>),
    /// To the discovery that runs.
    Discovery(Arc<Burst>),
    /// To the late finds, decoded on the spot: there are few and they are small.
    LateFinds(Codec),
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
    /// `instance` sets it apart from other processes with the same caller id, and `ttl_secs` is how far nodes' clocks may
    /// be off.
    ///
    /// # Errors
    ///
    /// [`StartError`] if `instance` can't be a part of a subject.
    pub fn start(
        transport: Arc<dyn Transport>,
        codec: Codec,
        sender: Sender,
        instance: &str,
        ttl_secs: u32,
        metrics: Arc<Metrics>,
    ) -> Result<Arc<Rpc>, StartError> {
        let subjects = ReplySubjects::new(&sender.caller, instance).map_err(StartError)?;
        let (late_sender, late_finds) = bounded(LATE_FINDS_MAX);
        let shared = Arc::new(Shared {
            subjects,
            pending: Mutex::new(HashMap::new()),
            metrics,
            late_finds: late_sender,
        });
        let reader = shared.clone();
        let subscription = transport.subscribe(
            &shared.subjects.pattern(),
            Arc::new(move |message| reader.deliver(message)),
        );
        Ok(Arc::new(Rpc {
            transport,
            codec,
            ttl_secs,
            shared,
            last_discovery: Mutex::new(None),
            late_finds,
            _subscription: subscription,
        }))
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
        self.publish(&subject::node(node), action.agent(), action.agent(), body, &registration)?;
        Ok(registration)
    }

    fn register(&self, sink: Sink) -> Registration {
        let id = RequestId::random();
        let entry = Arc::new(Entry {
            sink: Mutex::new(sink),
            answers: AtomicU32::new(0),
            flooded: AtomicBool::new(false),
        });
        self.shared.pending.lock().insert(id, entry.clone());
        Registration { id, sent_at: Instant::now(), entry, shared: self.shared.clone() }
    }

    fn publish(
        &self,
        subject: &Subject,
        agent: &str,
        filter_agent: &str,
        body: &str,
        registration: &Registration,
    ) -> Result<(), SendError> {
        let reply_to = self.shared.subjects.for_request(registration.id);
        let payload = self.codec.encode(&Request {
            id: registration.id,
            agent,
            filter_agent,
            body,
            ttl_secs: self.ttl_secs,
            unix_time: unix_time(),
            reply_to: &reply_to,
            broker_url: &self.transport.broker_url(),
        });
        self.transport
            .publish(&Publish { subject, reply: Some(&reply_to), headers: &[], payload: &payload })
            .map_err(SendError)
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
        let accepted = match self.codec.decode_reply(payload) {
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
    /// Runs on the reader thread: no decoding, no waiting.
    fn deliver(&self, message: Message) {
        let Some(id) = self.subjects.request_id(&message.subject) else {
            return self.count(Unexpected::UnknownRequest);
        };
        let entry = self.pending.lock().get(&id).cloned();
        let Some(entry) = entry else { return self.count(Unexpected::UnknownRequest) };
        match &*entry.sink.lock() {
            Sink::Arrivals(sink) => self.deliver_arrival(id, &entry, sink, message),
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
        message: Message,
    ) {
        let answer = if message.status == Some(NO_RESPONDERS) && message.payload.is_empty() {
            Answer::NoResponders
        } else {
            Answer::Payload(message.payload)
        };
        let bytes = if let Answer::Payload(payload) = &answer { payload.len() } else { 0 };
        let before = entry.answers.fetch_add(1, Ordering::Relaxed);
        let bytes_max = if before == 0 { REPLY_BYTES_MAX } else { FURTHER_ANSWER_BYTES_MAX };
        let fits = before < ANSWERS_MAX && bytes <= bytes_max;
        let arrival = Arrival { id, at: Instant::now(), answer };
        if !fits || sink.try_send(arrival).is_err() {
            // Whoever waits must know that something was said that nobody heard: it may have been the truth.
            entry.flooded.store(true, Ordering::Release);
            self.count(Unexpected::Overflow);
        }
    }

    fn count(&self, kind: Unexpected) {
        self.metrics.unexpected_replies.with_label_values(&[kind.label()]).inc();
    }
}

/// The status with which a broker says that nobody listens.
const NO_RESPONDERS: u16 = 503;

impl Registration {
    /// The request's id.
    pub fn id(&self) -> RequestId {
        self.id
    }

    /// When the request was sent.
    pub fn sent_at(&self) -> Instant {
        self.sent_at
    }

    /// Sends further answers to `sink`.
    pub fn redirect(&self, sink: &Channel<Arrival>) {
        *self.entry.sink.lock() = Sink::Arrivals(sink.clone());
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

fn unix_time() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO);
    i64::try_from(since.as_secs()).unwrap_or(i64::MAX)
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
            | DecodeError::Base64
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
