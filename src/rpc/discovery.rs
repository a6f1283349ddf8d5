//! Broadcast discovery on the provisioning collective.
//!
//! One request to all nodes; it ends [`QUIET`] after the last reply and [`DISCOVERY_MAX`] after it was sent, as in the
//! original. The original closes its connections then and finds late nodes an interval later; we keep listening until the
//! next discovery and report them as [`Rpc::late_finds`]. It also takes any sender's word; here hash and request id must
//! be right.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender as Channel, at, bounded, select_biased, unbounded};

use crate::protocol::{Codec, Identity, RequestId, subject};
use crate::rpc::{
    Ask, Entry, NoResponders, Registration, Rpc, SendError, Shared, Sink, Unexpected,
};
use crate::shutdown::Never;

/// Longest time a discovery takes.
pub const DISCOVERY_MAX: Duration = Duration::from_secs(2);

/// A discovery ends when no reply came for this long.
pub const QUIET: Duration = Duration::from_millis(300);

/// Identities of late nodes that may wait to be taken.
pub(super) const LATE_FINDS_MAX: usize = 1024;

/// Replies of one discovery that may wait to be read: more than the largest fleet we aim at.
const BURST_REPLIES_MAX: usize = 200_000;

/// Bytes of the same.
const BURST_BYTES_MAX: usize = 128 << 20;

/// Largest reply looked at, in bytes. Real ones have about 700 and, signed, 2,000.
const DISCOVERY_REPLY_BYTES_MAX: usize = 8 << 10;

/// Late replies read for one discovery; each is decoded on the reader thread.
const LATE_REPLIES_MAX: u32 = 100_000;

/// The agent that answers, and the one a node must have to be asked.
const AGENT: &str = "discovery";
const FILTER_AGENT: &str = "choria_provision";

/// One that no node has.
const NOBODYS_AGENT: &str = "choria_provisioner_check";

/// `ping` in base64. RPC bodies go as they are, but nodes take a body that is base64 for encoded, which `ping` is.
const PING: &str = "cGluZw==";

/// What a discovery saw.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Found {
    /// Replies with a usable identity; a node that answers twice counts twice.
    pub replies: u64,
    /// Replies with an identity that can't be one.
    pub invalid: u64,
}

/// Why a discovery found nothing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DiscoveryError {
    /// The request could not be sent.
    Send(SendError),
    /// The process is aborting.
    Aborted,
}

impl fmt::Display for DiscoveryError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DiscoveryError::Send(_) => f.write_str("could not ask for nodes"),
            DiscoveryError::Aborted => f.write_str("the process is aborting"),
        }
    }
}

impl std::error::Error for DiscoveryError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            DiscoveryError::Send(source) => Some(source),
            DiscoveryError::Aborted => None,
        }
    }
}

/// Asks all nodes to report, and gives every identity that does to `found`, more than once if it answers more than once.
///
/// `window` is how long to wait for the first reply. Bad identities are counted in the metrics as well.
///
/// # Errors
///
/// [`DiscoveryError`].
pub fn discover(
    rpc: &Arc<Rpc>,
    window: Duration,
    abort: &Receiver<Never>,
    found: &mut dyn FnMut(Identity),
) -> Result<Found, DiscoveryError> {
    discover_within(rpc, Limits { window, longest: DISCOVERY_MAX, quiet: QUIET }, abort, found)
}

/// Asks whoever has an agent that nobody has, which shows whether the broker lets such requests pass.
///
/// # Errors
///
/// [`SendError`]; then nothing was sent.
pub fn ask_nobody(rpc: &Arc<Rpc>) -> Result<(), SendError> {
    let (nowhere, _) = bounded(1);
    let registration = rpc.register(Sink::Arrivals(nowhere));
    let subject = subject::discovery();
    let ask = Ask { subject: &subject, agent: AGENT, filter_agent: NOBODYS_AGENT, body: PING };
    rpc.publish(&ask, NoResponders::Unwanted, &registration)
}

/// When a discovery ends.
#[derive(Clone, Copy)]
struct Limits {
    /// Without any reply.
    window: Duration,
    /// In any case.
    longest: Duration,
    /// After the last reply.
    quiet: Duration,
}

fn discover_within(
    rpc: &Arc<Rpc>,
    limits: Limits,
    abort: &Receiver<Never>,
    found: &mut dyn FnMut(Identity),
) -> Result<Found, DiscoveryError> {
    let (burst, replies) = Burst::new();
    let registration = rpc.register(Sink::Discovery(burst.clone()));
    // The one before ends here: from now on its nodes answer this one.
    *rpc.last_discovery.lock() = None;
    let subject = subject::discovery();
    let ask = Ask { subject: &subject, agent: AGENT, filter_agent: FILTER_AGENT, body: PING };
    // That there are no nodes shows at the end of the window.
    rpc.publish(&ask, NoResponders::Unwanted, &registration).map_err(DiscoveryError::Send)?;
    let started = Instant::now();

    let mut search = Search { rpc, id: registration.id(), seen: Found::default(), found };
    let end = started + limits.longest;
    let mut quiet = end.min(started + limits.window);
    loop {
        select_biased! {
            recv(abort) -> _ => return Err(DiscoveryError::Aborted),
            recv(replies) -> reply => {
                let Ok(reply) = reply else { break };
                burst.taken(&reply);
                if search.read(&reply.payload) {
                    quiet = end.min(reply.at + limits.quiet);
                }
                // What is in the channel was in time; what comes now may be late, however busy we are.
                if reply.at >= end {
                    break;
                }
            }
            recv(at(quiet)) -> _ => break,
        }
    }
    registration.listen_for_late_finds(rpc.codec());
    for reply in replies.try_iter() {
        search.read(&reply.payload);
    }
    let seen = search.seen;
    *rpc.last_discovery.lock() = Some(registration);
    Ok(seen)
}

struct Search<'a> {
    rpc: &'a Rpc,
    id: RequestId,
    seen: Found,
    found: &'a mut dyn FnMut(Identity),
}

impl Search<'_> {
    /// Whether it was a reply to this discovery, usable or not.
    fn read(&mut self, payload: &[u8]) -> bool {
        match self.rpc.shared.read_find(&self.rpc.codec(), self.id, payload) {
            Ok(Some(identity)) => {
                self.seen.replies += 1;
                (self.found)(identity);
                true
            }
            Ok(None) => {
                self.seen.invalid += 1;
                true
            }
            Err(kind) => {
                self.rpc.shared.count(kind);
                false
            }
        }
    }
}

impl Shared {
    /// The identity in a discovery reply, or none if it can't be one.
    fn read_find(
        &self,
        codec: &Codec,
        id: RequestId,
        payload: &[u8],
    ) -> Result<Option<Identity>, Unexpected> {
        let reply = codec.decode_reply(payload).map_err(|error| Unexpected::from(&error))?;
        if reply.request_id != id {
            return Err(Unexpected::OtherRequest);
        }
        let identity = Identity::parse(&reply.sender).ok();
        if identity.is_none() {
            self.metrics.invalid_identities.inc();
        }
        Ok(identity)
    }

    /// Runs on the reader thread.
    pub(super) fn deliver_late_find(
        &self,
        id: RequestId,
        entry: &Entry,
        codec: &Codec,
        payload: &[u8],
    ) {
        let before = entry.answers.fetch_add(1, Ordering::Relaxed);
        if before >= LATE_REPLIES_MAX || payload.len() > DISCOVERY_REPLY_BYTES_MAX {
            return self.count(Unexpected::Overflow);
        }
        match self.read_find(codec, id, payload) {
            Ok(Some(identity)) => {
                if self.late_finds.try_send(identity).is_err() {
                    self.count(Unexpected::Overflow);
                }
            }
            Ok(None) => {}
            Err(kind) => self.count(kind),
        }
    }
}

impl Registration {
    fn listen_for_late_finds(&self, codec: Arc<Codec>) {
        self.entry.route.lock().sink = Sink::LateFinds(codec);
    }
}

/// Replies that the reader thread has taken and the discoverer has not read: many, within a moment.
pub(super) struct Burst {
    replies: Channel<BurstReply>,
    waiting: AtomicUsize,
    bytes: AtomicUsize,
}

struct BurstReply {
    at: Instant,
    payload: Vec<u8>,
}

impl Burst {
    /// The channel is unbounded in itself, since a bounded one would take the memory for the largest fleet at once.
    fn new() -> (Arc<Burst>, Receiver<BurstReply>) {
        let (sender, receiver) = unbounded();
        let waiting = AtomicUsize::new(0);
        let bytes = AtomicUsize::new(0);
        (Arc::new(Burst { replies: sender, waiting, bytes }), receiver)
    }

    /// Whether there was room. Only the reader thread pushes, so that the bounds hold without a lock.
    pub(super) fn push(&self, payload: Vec<u8>) -> bool {
        let size = payload.len();
        let fits = size <= DISCOVERY_REPLY_BYTES_MAX
            && self.waiting.load(Ordering::Relaxed) < BURST_REPLIES_MAX
            && self.bytes.load(Ordering::Relaxed) + size <= BURST_BYTES_MAX;
        if !fits {
            return false;
        }
        self.waiting.fetch_add(1, Ordering::Relaxed);
        self.bytes.fetch_add(size, Ordering::Relaxed);
        self.replies.send(BurstReply { at: Instant::now(), payload }).is_ok()
    }

    fn taken(&self, reply: &BurstReply) {
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        self.bytes.fetch_sub(reply.payload.len(), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use crossbeam_channel::bounded;

    use super::*;
    use crate::rpc::testing::{Asked, Net, tampered};
    use crate::transport::Message;

    /// Generous where a test does not mean it.
    const LIMITS: Limits = Limits {
        window: Duration::from_millis(20),
        longest: Duration::from_secs(60),
        quiet: Duration::from_millis(20),
    };

    /// Discovers and returns the names found, in order, with the counts.
    fn run(net: &Net, limits: Limits) -> (Vec<String>, Found) {
        let (_abort, aborted) = bounded(0);
        let mut names = Vec::new();
        let found = discover_within(&net.rpc, limits, &aborted, &mut |identity| {
            names.push(identity.to_string());
        });
        (names, found.unwrap())
    }

    fn pong(asked: &Asked, name: &str) -> Message {
        asked.reply_from(name, &asked.id(), "pong")
    }

    #[test]
    fn asks_the_way_nodes_expect_it() {
        let net = Net::new();
        let (names, found) = run(&net, LIMITS);
        assert_eq!((names.len(), found), (0, Found::default()));
        let asked = net.asked().remove(0);
        assert_eq!(asked.subject, "provisioning.broadcast.agent.discovery");
        assert_eq!(asked.body, "cGluZw==");
        assert_eq!(asked.envelope["agent"], "discovery");
        assert_eq!(asked.envelope["filter"]["agent"][0], "choria_provision");
        assert!(asked.envelope["ttl"].as_u64().unwrap() >= 30);
    }

    #[test]
    fn finds_fifty_thousand_nodes_that_answer_at_once() {
        let net = Net::new();
        net.answer(|_, asked| {
            (0..50_000).map(|n| pong(asked, &format!("n{n}.example.net"))).collect()
        });
        let (names, found) = run(&net, LIMITS);
        assert_eq!(found, Found { replies: 50_000, invalid: 0 });
        assert_eq!(names.iter().collect::<BTreeSet<_>>().len(), 50_000);
        assert_eq!(net.unexpected("overflow"), 0);
    }

    #[test]
    fn reports_a_node_as_often_as_it_answers() {
        let net = Net::new();
        net.answer(|_, asked| vec![pong(asked, "n1"), pong(asked, "n2"), pong(asked, "n1")]);
        let (names, found) = run(&net, LIMITS);
        assert_eq!(names, ["n1", "n2", "n1"]);
        assert_eq!(found.replies, 3);
    }

    #[test]
    fn counts_identities_that_can_be_none() {
        let net = Net::new();
        net.answer(|_, asked| {
            let names = ["", ">", "*", "a b", "a..b", "n1.example.net", "a\r\nPUB x 1", "n.*"];
            names.iter().map(|name| pong(asked, name)).collect()
        });
        let (names, found) = run(&net, LIMITS);
        assert_eq!(names, ["n1.example.net"]);
        assert_eq!(found, Found { replies: 1, invalid: 7 });
        assert_eq!(net.metrics.invalid_identities.get(), 7);
    }

    #[test]
    fn drops_what_is_no_reply_to_it() {
        let net = Net::new();
        net.answer(|_, asked| {
            vec![
                asked.raw(b"x".to_vec()),
                asked.raw(vec![b' '; DISCOVERY_REPLY_BYTES_MAX + 1]),
                asked.raw(tampered("n1", &asked.id(), "pong")),
                asked.reply_from("n1", &RequestId::random().to_string(), "pong"),
                asked.no_responders(),
            ]
        });
        let (names, found) = run(&net, LIMITS);
        assert_eq!((names.len(), found), (0, Found::default()));
        for (kind, count) in [("malformed", 2), ("overflow", 1), ("hash", 1), ("other_request", 1)]
        {
            assert_eq!(net.unexpected(kind), count, "{kind}");
        }
    }

    #[test]
    fn ends_when_nobody_answers_within_the_window() {
        let net = Net::new();
        let long = Duration::from_secs(60);
        let window = Duration::from_millis(50);
        let started = Instant::now();
        run(&net, Limits { window, longest: long, quiet: long });
        assert!((window..long).contains(&started.elapsed()));
        // The window is no longer than the whole.
        run(&net, Limits { window: long, longest: window, quiet: long });
        assert!(started.elapsed() < long);
    }

    #[test]
    fn ends_when_it_has_become_quiet() {
        let net = Net::new();
        net.answer(|_, asked| vec![pong(asked, "n1")]);
        let long = Duration::from_secs(60);
        let started = Instant::now();
        let limits = Limits { window: long, longest: long, quiet: Duration::from_millis(50) };
        assert_eq!(run(&net, limits).0, ["n1"]);
        assert!(started.elapsed() < long);
    }

    #[test]
    fn ends_in_time_although_answers_keep_coming() {
        let net = Net::new();
        net.answer(|_, asked| vec![pong(asked, "n1")]);
        let long = Duration::from_secs(60);
        let longest = Duration::from_millis(50);
        let started = Instant::now();
        run(&net, Limits { window: longest, longest, quiet: long });
        assert!((longest..long).contains(&started.elapsed()));
    }

    #[test]
    fn nonsense_does_not_prolong_it() {
        let net = Net::new();
        net.answer(|_, asked| vec![asked.raw(b"x".to_vec())]);
        let long = Duration::from_secs(60);
        let started = Instant::now();
        let window = Duration::from_millis(20);
        run(&net, Limits { window, longest: long, quiet: long });
        assert!(started.elapsed() < long);
    }

    #[test]
    fn reports_nodes_that_answer_after_its_end_until_the_next_one() {
        let net = Net::new();
        run(&net, LIMITS);
        let first = net.asked().remove(0);
        let late = net.rpc.late_finds();
        net.memory.deliver_message(pong(&first, "n1"));
        net.memory.deliver_message(pong(&first, "a b"));
        net.memory.deliver_message(first.raw(b"x".to_vec()));
        assert_eq!(late.try_recv().unwrap().as_str(), "n1");
        assert!(late.try_recv().is_err());
        assert_eq!(net.metrics.invalid_identities.get(), 1);
        assert_eq!(net.unexpected("malformed"), 1);

        run(&net, LIMITS);
        net.memory.deliver_message(pong(&first, "n2"));
        assert!(late.try_recv().is_err());
        assert_eq!(net.unexpected("unknown_request"), 1);
        net.memory.deliver_message(pong(&net.asked()[1], "n3"));
        assert_eq!(late.try_recv().unwrap().as_str(), "n3");
        assert_eq!(net.rpc.pending(), 1);
    }

    #[test]
    fn holds_a_bounded_number_of_late_nodes() {
        let net = Net::new();
        run(&net, LIMITS);
        let asked = net.asked().remove(0);
        let pong = pong(&asked, "n1");
        for _ in 0..LATE_FINDS_MAX + 5 {
            net.memory.deliver_message(pong.clone());
        }
        assert_eq!(net.rpc.late_finds().len(), LATE_FINDS_MAX);
        assert_eq!(net.unexpected("overflow"), 5);
    }

    #[test]
    fn ends_on_abort_and_without_a_connection() {
        let net = Net::new();
        let (abort, aborted) = bounded(0);
        drop(abort);
        let long = Duration::from_secs(60);
        let limits = Limits { window: long, longest: long, quiet: long };
        let error = discover_within(&net.rpc, limits, &aborted, &mut drop).unwrap_err();
        assert_eq!(error, DiscoveryError::Aborted);

        net.memory.set_connected(false);
        let (_abort, aborted) = bounded(0);
        let error = discover_within(&net.rpc, limits, &aborted, &mut drop).unwrap_err();
        assert!(matches!(error, DiscoveryError::Send(_)), "{error:?}");
        assert_eq!(net.rpc.pending(), 0);
    }
}
