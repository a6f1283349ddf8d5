//! Hears what other provisioners of the account say.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, bounded};
use parking_lot::Mutex;

use crate::metrics::Metrics;
use crate::protocol::peer::{self, BadPeer, Said};
use crate::protocol::subject;
use crate::seldom::Seldom;
use crate::transport::{Message, Subscription, Transport};

/// What was said and waits to be looked at: all peers there may be, over some seconds.
const SAID_MAX: usize = 256;
/// How often something that is no message of a peer is logged, at most.
const BAD_LOG: Duration = Duration::from_secs(60);

/// Everything peers say from now on, and what ends it when it is dropped. What is no message of theirs is counted.
pub fn listen(transport: &dyn Transport, metrics: Arc<Metrics>) -> (Receiver<Said>, Subscription) {
    let (sender, said) = bounded(SAID_MAX);
    let bad = Mutex::new(Seldom::every(BAD_LOG));
    let ignored = move |kind: &str| metrics.peer_messages_ignored.with_label_values(&[kind]).inc();
    let subscription = transport.subscribe(
        &subject::peers().into(),
        Arc::new(move |message: Message| match peer::read(&message.payload) {
            Ok(Said::Other) => {}
            Ok(said) => {
                if sender.try_send(said).is_err() {
                    ignored("overflow");
                }
            }
            Err(error) => {
                ignored(if error == BadPeer::TooLong { "oversized" } else { "malformed" });
                if let Some(suppressed) = bad.lock().now(Instant::now()) {
                    log::warn!(component = "peers", suppressed; "Ignoring what is no message of a provisioner: {error}");
                }
            }
        }),
    );
    (said, subscription)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fleet::peers::table::testing::{beat, instance};
    use crate::protocol::peer::{PEER_BYTES_MAX, Role};
    use crate::transport::memory::Memory;

    #[test]
    fn only_what_peers_may_say_is_heard_and_all_else_is_counted() {
        let transport = Memory::new();
        let metrics = Metrics::new("test");
        let (said, subscription) = listen(transport.as_ref(), metrics.clone());
        let say = |payload: Vec<u8>| transport.deliver("choria.provisioner.peer", payload);
        let ignored = |kind: &str| metrics.peer_messages_ignored.with_label_values(&[kind]).get();

        let heartbeat = beat(1, "a", Role::Active);
        say(heartbeat.encode());
        say(peer::handover(&instance(1), 7));
        say(br#"{"protocol":"io.choria.provisioner.v2.peer"}"#.to_vec());
        assert_eq!(said.try_recv(), Ok(Said::Heartbeat(heartbeat.clone())));
        assert_eq!(said.try_recv(), Ok(Said::Handover { instance: instance(1), number: 7 }));
        assert!(said.is_empty());

        say(b"nonsense".to_vec());
        say(vec![0xff; 100]);
        let mut long = heartbeat.encode();
        long.resize(PEER_BYTES_MAX + 1, b' ');
        say(long);
        assert_eq!((ignored("malformed"), ignored("oversized")), (2, 1));

        for _ in 0..10_000 {
            say(heartbeat.encode());
        }
        assert_eq!(said.try_iter().count(), SAID_MAX);
        assert_eq!(ignored("overflow"), 10_000 - SAID_MAX as u64);
        drop(subscription);
        assert_eq!(say(heartbeat.encode()), 0);
    }
}
