//! A broker in memory, for tests of what stands on [`Transport`].
//!
//! Handlers run on the thread that publishes or delivers, under no lock, so an answer may come before `publish` returns,
//! as it may with a real broker.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;

use crate::clock::BootTime;
use crate::protocol::subject::Pattern;
use crate::transport::{Handler, Message, Publish, PublishError, Subscription, Transport, wire};

/// What somebody published.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Published {
    /// Where.
    pub subject: String,
    /// The NATS reply subject.
    pub reply: Option<String>,
    /// Headers in order.
    pub headers: Vec<(String, String)>,
    /// The body.
    pub payload: Vec<u8>,
}

type Responder = Box<dyn FnMut(&Published) -> Vec<Message> + Send>;

/// A transport without a network.
pub struct Memory {
    state: Arc<Mutex<State>>,
    /// Taken out while it runs: it may publish itself.
    responder: Mutex<Option<Responder>>,
}

struct State {
    is_connected: bool,
    max_payload: usize,
    last_sid: u64,
    subscriptions: BTreeMap<u64, (Pattern, Handler)>,
    nobody_on: HashSet<String>,
    published: Vec<Published>,
}

impl Memory {
    /// Connected, and nobody answers.
    pub fn new() -> Arc<Memory> {
        Arc::new(Memory {
            state: Arc::new(Mutex::new(State {
                is_connected: true,
                max_payload: 1024 * 1024,
                last_sid: 0,
                subscriptions: BTreeMap::new(),
                nobody_on: HashSet::new(),
                published: Vec::new(),
            })),
            responder: Mutex::new(None),
        })
    }

    /// Whether publishing works.
    pub fn set_connected(&self, is_connected: bool) {
        self.state.lock().is_connected = is_connected;
    }

    /// The largest message taken, in bytes.
    pub fn set_max_payload(&self, max_payload: usize) {
        self.state.lock().max_payload = max_payload;
    }

    /// Answers "no responders" to every message on `subject` that wants an answer.
    pub fn no_responders_for(&self, subject: &str) {
        self.state.lock().nobody_on.insert(subject.to_owned());
    }

    /// Undoes [`Memory::no_responders_for`].
    pub fn responders_for(&self, subject: &str) {
        self.state.lock().nobody_on.remove(subject);
    }

    /// Calls `respond` for every message published from now on, and delivers what it returns.
    pub fn on_publish(&self, respond: impl FnMut(&Published) -> Vec<Message> + Send + 'static) {
        *self.responder.lock() = Some(Box::new(respond));
    }

    /// Delivers a body to all who are subscribed to `subject`; the number of subscriptions.
    pub fn deliver(&self, subject: &str, payload: impl Into<Vec<u8>>) -> usize {
        self.deliver_message(Message {
            subject: subject.to_owned(),
            payload: payload.into(),
            ..Message::default()
        })
    }

    /// Delivers a message to all who are subscribed to its subject; the number of subscriptions.
    pub fn deliver_message(&self, message: Message) -> usize {
        let handlers: Vec<Handler> = self
            .state
            .lock()
            .subscriptions
            .values()
            .filter(|(pattern, _)| is_match(pattern.as_str(), &message.subject))
            .map(|(_, handler)| Arc::clone(handler))
            .collect();
        for handler in &handlers {
            handler(message.clone());
        }
        handlers.len()
    }

    /// Everything published so far.
    pub fn published(&self) -> Vec<Published> {
        self.state.lock().published.clone()
    }

    /// Everything published since the last call, forgotten by it.
    pub fn take_published(&self) -> Vec<Published> {
        std::mem::take(&mut self.state.lock().published)
    }

    /// The patterns somebody is subscribed to.
    pub fn patterns(&self) -> Vec<String> {
        let state = self.state.lock();
        state.subscriptions.values().map(|(pattern, _)| pattern.as_str().to_owned()).collect()
    }

    fn accept(&self, message: &Publish<'_>) -> Result<(Published, bool), PublishError> {
        let Publish { subject, reply, headers, payload, until } = *message;
        if !headers.iter().all(|(name, value)| wire::is_header(name, value)) {
            return Err(PublishError::BadHeader);
        }
        let mut state = self.state.lock();
        if !state.is_connected {
            return Err(PublishError::Disconnected);
        }
        if until.is_some_and(|until| BootTime::now() >= until) {
            return Err(PublishError::Late);
        }
        let (size, max) = (wire::header_size(headers) + payload.len(), state.max_payload);
        if size > max {
            return Err(PublishError::TooLarge { size, max });
        }
        let owned = |(name, value): &(&str, &str)| ((*name).to_owned(), (*value).to_owned());
        let published = Published {
            subject: subject.as_str().to_owned(),
            reply: reply.map(|reply| reply.as_str().to_owned()),
            headers: headers.iter().map(owned).collect(),
            payload: payload.to_vec(),
        };
        state.published.push(published.clone());
        let is_refused = state.nobody_on.contains(&published.subject);
        Ok((published, is_refused))
    }
}

impl Transport for Memory {
    fn publish(&self, message: &Publish<'_>) -> Result<(), PublishError> {
        let (published, is_refused) = self.accept(message)?;
        if is_refused {
            if let Some(reply) = published.reply {
                self.deliver_message(Message {
                    subject: reply,
                    status: Some(503),
                    ..Message::default()
                });
            }
            return Ok(());
        }
        self.deliver_message(Message {
            subject: published.subject.clone(),
            reply: published.reply.clone(),
            headers: published.headers.clone(),
            payload: published.payload.clone(),
            status: None,
        });
        let responder = self.responder.lock().take();
        if let Some(mut respond) = responder {
            let answers = respond(&published);
            self.responder.lock().get_or_insert(respond);
            for answer in answers {
                self.deliver_message(answer);
            }
        }
        Ok(())
    }

    fn subscribe(&self, pattern: &Pattern, handler: Handler) -> Subscription {
        let mut state = self.state.lock();
        state.last_sid += 1;
        let sid = state.last_sid;
        state.subscriptions.insert(sid, (pattern.clone(), handler));
        let shared = Arc::downgrade(&self.state);
        Subscription::new(move || {
            if let Some(state) = shared.upgrade() {
                let removed = state.lock().subscriptions.remove(&sid);
                drop(removed);
            }
        })
    }

    fn flush(&self, _deadline: Instant) -> Result<(), PublishError> {
        match self.state.lock().is_connected {
            true => Ok(()),
            false => Err(PublishError::Disconnected),
        }
    }

    fn broker_url(&self) -> Arc<str> {
        Arc::from(if self.state.lock().is_connected { "nats://memory:4222" } else { "" })
    }

    fn max_payload(&self) -> usize {
        self.state.lock().max_payload
    }
}

/// Whether a broker would deliver what is published to `subject` to a subscription to `pattern`.
fn is_match(pattern: &str, subject: &str) -> bool {
    let mut parts = subject.split('.');
    for wanted in pattern.split('.') {
        match (wanted, parts.next()) {
            (_, None) => return false,
            (">", Some(_)) => return true,
            ("*", Some(_)) => {}
            (wanted, Some(part)) if wanted == part => {}
            _ => return false,
        }
    }
    parts.next().is_none()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_match_as_the_broker_does() {
        for (pattern, subject, expected) in [
            ("a.b", "a.b", true),
            ("a.b", "a.b.c", false),
            ("a.b.c", "a.b", false),
            ("a.*", "a.b", true),
            ("a.*", "a", false),
            ("a.*", "a.b.c", false),
            ("*.b", "a.b", true),
            ("a.>", "a.b.c", true),
            ("a.>", "a", false),
            (">", "a", true),
        ] {
            assert_eq!(is_match(pattern, subject), expected, "{pattern} {subject}");
        }
    }
}
