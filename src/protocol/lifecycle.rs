//! Lifecycle events: ours out, the fleet's in.
//!
//! An event is a small JSON object, plain or as the `data` of a CloudEvent 1.0; nodes send CloudEvents, provisioners the
//! plain form. Rules as in go-choria `lifecycle/lifecycle.go`. Any node of the provisioning account can announce any
//! identity: what comes out of here is still to be checked by `Identity::parse`.

use std::borrow::Cow;
use std::fmt;
use std::io::Write;

use serde::Deserialize;
use serde_json::value::RawValue;

use crate::protocol::Identity;
use crate::protocol::json::{JsonError, Object, push_string};

/// Largest event looked at, in bytes. Real ones have a few hundred.
pub const EVENT_BYTES_MAX: usize = 64 << 10;

/// Our own startup event, in the plain form that provisioners use.
pub fn startup_event(identity: &Identity, version: &str, id: &str, unix_time: i64) -> Vec<u8> {
    let mut out = Vec::with_capacity(256);
    out.extend_from_slice(br#"{"protocol":"io.choria.lifecycle.v1.startup","id":"#);
    push_string(&mut out, id);
    out.extend_from_slice(br#","identity":"#);
    push_string(&mut out, identity.as_str());
    write!(out, r#","component":"provisioner","timestamp":{unix_time},"version":"#)
        .expect("a vector takes all that is written");
    push_string(&mut out, version);
    out.push(b'}');
    out
}

/// What a component said about itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event {
    /// What happened to it.
    pub kind: EventKind,
    /// Names the event; empty if the sender left it out.
    pub id: String,
    /// Whom it happened to, unchecked; empty if the sender left it out.
    pub identity: String,
    /// What kind of component it is; empty if the sender left it out.
    pub component: String,
    /// When, by the sender's clock, as Unix time in seconds; 0 if the sender left it out.
    pub timestamp: i64,
    /// The sender's version, in the events that have one.
    pub version: Option<String>,
}

/// What an event is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EventKind {
    /// The component still runs.
    Alive,
    /// A governor let something run.
    Governor,
    /// A node was given its configuration.
    Provisioned,
    /// The component stops.
    Shutdown,
    /// The component has started and can be reached.
    Startup,
    /// A node replaced its own program.
    Upgraded,
}

impl EventKind {
    fn parse(protocol: &str) -> Option<EventKind> {
        Some(match protocol.strip_prefix("io.choria.lifecycle.v1.")? {
            "alive" => EventKind::Alive,
            "governor" => EventKind::Governor,
            "provisioned" => EventKind::Provisioned,
            "shutdown" => EventKind::Shutdown,
            "startup" => EventKind::Startup,
            "upgraded" => EventKind::Upgraded,
            _ => return None,
        })
    }
}

/// Why bytes are no event.
#[derive(Debug)]
pub enum EventError {
    /// More than [`EVENT_BYTES_MAX`].
    TooLarge {
        /// Size in bytes.
        size: usize,
    },
    /// Neither the plain form nor a CloudEvent of Choria.
    UnsupportedFormat,
    /// An event of another version, or a kind nobody told us of.
    UnknownProtocol,
    /// A field has the wrong type.
    Json(JsonError),
}

impl fmt::Display for EventError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            EventError::TooLarge { size } => {
                write!(f, "event of {size} bytes is over {EVENT_BYTES_MAX}")
            }
            EventError::UnsupportedFormat => f.write_str("unsupported event format"),
            EventError::UnknownProtocol => f.write_str("unknown event protocol"),
            EventError::Json(_) => f.write_str("malformed event"),
        }
    }
}

impl std::error::Error for EventError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            EventError::Json(source) => Some(source),
            EventError::TooLarge { .. }
            | EventError::UnsupportedFormat
            | EventError::UnknownProtocol => None,
        }
    }
}

/// Reads an event in either form.
///
/// # Errors
///
/// [`EventError`]. The original takes CloudEvents within CloudEvents without limit; one is all that anybody sends.
pub fn read_event(payload: &[u8]) -> Result<Event, EventError> {
    if payload.len() > EVENT_BYTES_MAX {
        return Err(EventError::TooLarge { size: payload.len() });
    }
    let Object(form): Object<Form> =
        serde_json::from_slice(payload).map_err(|_| EventError::UnsupportedFormat)?;
    if form.is_plain() {
        return read_plain(payload);
    }
    let Some(data) = form.cloud_event_data() else { return Err(EventError::UnsupportedFormat) };
    let Object(inner): Object<Form> =
        serde_json::from_str(data.get()).map_err(|_| EventError::UnsupportedFormat)?;
    if inner.is_plain() {
        return read_plain(data.get().as_bytes());
    }
    Err(EventError::UnsupportedFormat)
}

fn read_plain(json: &[u8]) -> Result<Event, EventError> {
    let Object(plain): Object<Plain> =
        serde_json::from_slice(json).map_err(|error| EventError::Json(error.into()))?;
    let kind = EventKind::parse(&plain.protocol).ok_or(EventError::UnknownProtocol)?;
    Ok(Event {
        kind,
        id: plain.id.unwrap_or_default().into_owned(),
        identity: plain.identity.unwrap_or_default().into_owned(),
        component: plain.component.unwrap_or_default().into_owned(),
        timestamp: plain.timestamp.unwrap_or_default(),
        version: plain.version.map(Cow::into_owned),
    })
}

/// The keys by which Choria tells the two forms apart. Values stay unread: one of the wrong type decides nothing here.
#[derive(Deserialize)]
struct Form<'a> {
    #[serde(borrow)]
    protocol: Option<&'a RawValue>,
    #[serde(borrow)]
    specversion: Option<&'a RawValue>,
    #[serde(borrow)]
    source: Option<&'a RawValue>,
    #[serde(borrow)]
    data: Option<&'a RawValue>,
}

impl<'a> Form<'a> {
    fn is_plain(&self) -> bool {
        text(self.protocol).is_some_and(|text| text.starts_with("io.choria.lifecycle"))
    }

    fn cloud_event_data(&self) -> Option<&'a RawValue> {
        let cloud_event = text(self.specversion).is_some_and(|text| text == "1.0")
            && text(self.source).is_some_and(|text| text == "io.choria.lifecycle");
        if cloud_event { self.data } else { None }
    }
}

fn text(value: Option<&RawValue>) -> Option<String> {
    serde_json::from_str(value?.get()).ok()
}

#[derive(Deserialize)]
struct Plain<'a> {
    #[serde(borrow)]
    protocol: Cow<'a, str>,
    #[serde(borrow)]
    id: Option<Cow<'a, str>>,
    #[serde(borrow)]
    identity: Option<Cow<'a, str>>,
    #[serde(borrow)]
    component: Option<Cow<'a, str>>,
    timestamp: Option<i64>,
    #[serde(borrow)]
    version: Option<Cow<'a, str>>,
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::protocol::json::hostile;

    fn recorded() -> Vec<(String, String)> {
        let captures = [
            include_str!("../../tests/vectors/captures/insecure/messages.jsonl"),
            include_str!("../../tests/vectors/captures/x509/messages.jsonl"),
            include_str!("../../tests/vectors/captures/issuer/messages.jsonl"),
        ];
        let lines = captures.iter().flat_map(|capture| capture.lines());
        let messages = lines.map(|line| serde_json::from_str::<Value>(line).unwrap());
        messages
            .map(|message| {
                let text = |key: &str| message[key].as_str().unwrap().to_owned();
                (text("subject"), text("payload"))
            })
            .filter(|(subject, _)| subject.starts_with("choria.lifecycle.event."))
            .collect()
    }

    #[test]
    fn reads_recorded_events() {
        let events = recorded();
        assert!(events.len() > 10, "{} events recorded", events.len());
        for (subject, payload) in events {
            let event = read_event(payload.as_bytes()).unwrap();
            let kind = format!("{:?}", event.kind).to_lowercase();
            assert_eq!(subject, format!("choria.lifecycle.event.{kind}.{}", event.component));
            assert_eq!(event.id.len(), 36);
            assert!(Identity::parse(&event.identity).is_ok(), "{event:?}");
            assert!(event.timestamp > 1_795_000_000, "{event:?}");
            let versioned = matches!(event.kind, EventKind::Startup | EventKind::Alive);
            assert_eq!(event.version.is_some(), versioned, "{event:?}");
        }
    }

    #[test]
    fn writes_our_startup_event_as_the_original_does() {
        let ours = |(subject, _): &&(String, String)| subject.ends_with(".startup.provisioner");
        let events = recorded();
        let mut checked = 0;
        for (_, payload) in events.iter().filter(ours) {
            let event = read_event(payload.as_bytes()).unwrap();
            let identity = Identity::parse(&event.identity).unwrap();
            let version = event.version.as_deref().unwrap();
            let written = startup_event(&identity, version, &event.id, event.timestamp);
            assert_eq!(&String::from_utf8(written).unwrap(), payload);
            checked += 1;
        }
        assert!(checked >= 3, "one of each recording");
    }

    #[test]
    fn takes_events_that_leave_things_out() {
        let event = read_event(br#"{"protocol":"io.choria.lifecycle.v1.startup"}"#).unwrap();
        assert_eq!(
            event,
            Event {
                kind: EventKind::Startup,
                id: String::new(),
                identity: String::new(),
                component: String::new(),
                timestamp: 0,
                version: None,
            }
        );
    }

    #[test]
    fn takes_the_plain_form_first() {
        let event = json!({
            "protocol": "io.choria.lifecycle.v1.startup", "identity": "outer",
            "specversion": "1.0", "source": "io.choria.lifecycle",
            "data": {"protocol": "io.choria.lifecycle.v1.startup", "identity": "inner"},
        });
        assert_eq!(read_event(event.to_string().as_bytes()).unwrap().identity, "outer");
    }

    #[test]
    fn refuses_what_is_no_event() {
        for payload in [
            "",
            "null",
            "[]",
            "{}",
            "startup",
            r#"{"protocol":"choria:lifecycle:startup:1"}"#,
            r#"{"protocol":1}"#,
            r#"["io.choria.lifecycle.v1.startup"]"#,
            r#"{"protocol":"io.choria.lifecycle.v1.startup"} x"#,
            r#"{"specversion":"1.0","source":"io.choria.lifecycle"}"#,
            r#"{"specversion":"0.3","source":"io.choria.lifecycle","data":{"protocol":"io.choria.lifecycle.v1.startup"}}"#,
            r#"{"specversion":"1.0","source":"elsewhere","data":{"protocol":"io.choria.lifecycle.v1.startup"}}"#,
            r#"{"specversion":"1.0","source":"io.choria.lifecycle","data":"io.choria.lifecycle.v1.startup"}"#,
            r#"{"specversion":"1.0","source":"io.choria.lifecycle","data":{"specversion":"1.0","source":"io.choria.lifecycle","data":{"protocol":"io.choria.lifecycle.v1.startup"}}}"#,
        ] {
            let error = read_event(payload.as_bytes()).unwrap_err();
            assert!(matches!(error, EventError::UnsupportedFormat), "{payload}: {error:?}");
        }
    }

    #[test]
    fn refuses_kinds_and_versions_it_does_not_know() {
        for protocol in [
            "io.choria.lifecycle.v2.startup",
            "io.choria.lifecycle.v1.reborn",
            "io.choria.lifecycle.v1.startup.x",
            "io.choria.lifecycle",
            "io.choria.lifecycle.v1.STARTUP",
        ] {
            let payload = json!({"protocol": protocol}).to_string();
            let error = read_event(payload.as_bytes()).unwrap_err();
            assert!(matches!(error, EventError::UnknownProtocol), "{protocol}: {error:?}");
        }
    }

    #[test]
    fn refuses_fields_of_the_wrong_type() {
        for key in ["id", "identity", "component", "timestamp", "version"] {
            for wrong in [json!([]), json!({}), json!(true), json!(1.5)] {
                let mut event = json!({"protocol": "io.choria.lifecycle.v1.startup"});
                event[key] = wrong.clone();
                let error = read_event(event.to_string().as_bytes()).unwrap_err();
                assert!(matches!(error, EventError::Json(_)), "{key}: {wrong}: {error:?}");
            }
        }
    }

    #[test]
    fn survives_events_that_are_too_large_or_too_deep() {
        let error = read_event(&vec![b' '; EVENT_BYTES_MAX + 1]).unwrap_err();
        assert!(matches!(error, EventError::TooLarge { .. }));
        let deep = "[".repeat(EVENT_BYTES_MAX / 2);
        let cloud = r#"{"specversion":"1.0","source":"io.choria.lifecycle","data":"#;
        for payload in [deep.clone(), format!("{cloud}{deep}"), format!(r#"{{"protocol":{deep}"#)] {
            assert!(read_event(payload.as_bytes()).is_err());
        }
    }

    #[test]
    fn answers_flipped_bytes_without_a_panic() {
        let mut random = fastrand::Rng::with_seed(11);
        for (_, payload) in recorded() {
            for _ in 0..200 {
                let mut bytes = payload.clone().into_bytes();
                for _ in 0..random.usize(1..4) {
                    let at = random.usize(..bytes.len());
                    bytes[at] ^= 1 << random.u8(..8);
                }
                let _ = read_event(&bytes);
                bytes.truncate(random.usize(..bytes.len()));
                assert!(read_event(&bytes).is_err(), "cut off");
            }
        }
    }

    #[test]
    fn survives_any_nesting() {
        hostile::on_a_small_stack(|| {
            for value in hostile::values(EVENT_BYTES_MAX - 200) {
                let _ = read_event(value.as_bytes());
                for key in ["protocol", "specversion", "source", "data", "timestamp", "other"] {
                    let plain = format!(
                        r#"{{"id":"a","protocol":"io.choria.lifecycle.v1.startup","{key}":{value}}}"#
                    );
                    let cloud = format!(
                        r#"{{"specversion":"1.0","source":"io.choria.lifecycle","data":{plain}}}"#
                    );
                    let _ = (read_event(plain.as_bytes()), read_event(cloud.as_bytes()));
                }
            }
        });
    }
}
