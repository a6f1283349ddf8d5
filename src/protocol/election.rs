//! What an election says to the broker and hears from it: one key in a key-value bucket of Choria Streams.
//!
//! Whoever's write is the newest owns the key, and the bucket forgets it when its owner stops writing. A write names the
//! key's number as its writer knows it, 0 for a key that is not there, and is refused if that is not the number.
//!
//! Messages as go-choria `providers/election/streams` sends them through nats.go; nothing here may differ, since one bucket
//! may have daemons of both kinds as candidates. Answers are read leniently: a broker adds fields as it likes.

use std::fmt;
use std::time::Duration;

use serde::Deserialize;

use crate::protocol::json::{JsonError, Object, excerpt};
use crate::protocol::subject::ELECTION_BUCKET;

/// The election we take part in, which is the key's name.
pub const ELECTION: &str = "provisioner";

/// The header with the key's number. Brokers know it in this spelling only: under any other they take every write.
pub const EXPECTED_NUMBER: &str = "Nats-Expected-Last-Subject-Sequence";

/// How old a key may become, least and most, as the original has it: both kinds of daemons must judge alike.
const TTL_MIN: Duration = Duration::from_secs(4);
const TTL_MAX: Duration = Duration::from_secs(3_600);

/// A refused write whose number was not the key's, and one that met another write.
const NOT_THE_NUMBER: [u32; 2] = [10071, 10164];

/// There is no bucket.
const NO_STREAM: u32 = 10059;

/// Longest description of an error kept, in characters.
const DESCRIPTION_MAX: usize = 200;

/// A bucket that an election can use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bucket {
    /// How old a key becomes.
    pub ttl: Duration,
}

/// Why there is no usable bucket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NoBucket {
    /// The broker said no.
    Refused(Refusal),
    /// Its answer can't be read.
    Unreadable(JsonError),
    /// Keys become too old, or not old enough.
    Ttl(Duration),
    /// It keeps no key.
    NoHistory,
}

/// What became of a write.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Written {
    /// It is stored: the key's number from now on.
    Stored(u64),
    /// It is not.
    Refused(Refusal),
}

/// What a broker said instead.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// Its number for the error, 0 if it gave none.
    pub code: u32,
    /// Its words.
    pub description: String,
}

impl Refusal {
    /// Whether all that happened is that somebody else has the key, as it must happen to every candidate but one.
    ///
    /// For people only: whatever the reason, nothing was stored.
    pub fn is_contention(&self) -> bool {
        NOT_THE_NUMBER.contains(&self.code)
    }
}

#[derive(Deserialize)]
struct StatusWire {
    config: Option<ConfigWire>,
    error: Option<ErrorWire>,
}

#[derive(Default, Deserialize)]
struct ConfigWire {
    /// Nanoseconds; 0 for keys that never die.
    #[serde(default)]
    max_age: u64,
    #[serde(default)]
    max_msgs_per_subject: i64,
}

#[derive(Deserialize)]
struct WrittenWire {
    seq: Option<u64>,
    error: Option<ErrorWire>,
}

#[derive(Deserialize)]
struct ErrorWire {
    #[serde(default)]
    err_code: u32,
    #[serde(default)]
    description: String,
}

/// Reads a broker's answer to the question for the bucket.
///
/// # Errors
///
/// [`NoBucket`].
pub fn read_status(payload: &[u8]) -> Result<Bucket, NoBucket> {
    let Object(StatusWire { config, error }) =
        serde_json::from_slice(payload).map_err(|error| NoBucket::Unreadable(error.into()))?;
    if let Some(error) = error {
        return Err(NoBucket::Refused(error.into()));
    }
    let ConfigWire { max_age, max_msgs_per_subject } = config.unwrap_or_default();
    let ttl = Duration::from_nanos(max_age);
    if !(TTL_MIN..=TTL_MAX).contains(&ttl) {
        return Err(NoBucket::Ttl(ttl));
    }
    // -1 is no limit.
    if max_msgs_per_subject == 0 {
        return Err(NoBucket::NoHistory);
    }
    Ok(Bucket { ttl })
}

/// Reads a broker's answer to a write. Beside an error there is a number as well, which means nothing.
///
/// # Errors
///
/// [`JsonError`] if nobody can tell what became of it.
pub fn read_written(payload: &[u8]) -> Result<Written, JsonError> {
    let Object(WrittenWire { seq, error }) = serde_json::from_slice(payload)?;
    Ok(match (error, seq) {
        (Some(error), _) => Written::Refused(error.into()),
        (None, Some(number)) if number > 0 => Written::Stored(number),
        (None, _) => Written::Refused(Refusal { code: 0, description: "no number".to_owned() }),
    })
}

impl From<ErrorWire> for Refusal {
    fn from(error: ErrorWire) -> Refusal {
        let description = excerpt(&error.description, DESCRIPTION_MAX);
        Refusal { code: error.err_code, description }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (error {})", self.description, self.code)?;
        if self.code == NO_STREAM {
            write!(
                f,
                "; there is no bucket {ELECTION_BUCKET}: a Choria Broker with Choria Streams makes it a minute or so after its start, on a plain nats-server `nats kv add {ELECTION_BUCKET} --history 1 --ttl 10s` does"
            )?;
        }
        Ok(())
    }
}

impl fmt::Display for NoBucket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NoBucket::Refused(refusal) => write!(f, "the broker says: {refusal}"),
            NoBucket::Unreadable(_) => f.write_str("the broker's answer can't be read"),
            NoBucket::Ttl(ttl) => write!(
                f,
                "its keys live for {ttl:?}; an election needs at least {TTL_MIN:?} and at most {TTL_MAX:?}"
            ),
            NoBucket::NoHistory => f.write_str("it keeps no key"),
        }
    }
}

impl std::error::Error for NoBucket {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            NoBucket::Unreadable(error) => Some(error),
            NoBucket::Refused(_) | NoBucket::Ttl(_) | NoBucket::NoHistory => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RECORDED: &str = include_str!("../../tests/vectors/captures/issuer/messages.jsonl");

    #[derive(Deserialize)]
    struct Message {
        subject: String,
        reply: String,
        payload: String,
    }

    /// The answers to what was sent to `subject` in the recording.
    fn answers(subject: &str) -> Vec<String> {
        let messages: Vec<Message> =
            RECORDED.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let asked = messages.iter().filter(|message| message.subject == subject);
        let answers = asked.map(|asked| {
            messages.iter().find(|answer| answer.subject == asked.reply).unwrap().payload.clone()
        });
        answers.collect()
    }

    #[test]
    fn reads_what_brokers_said_in_the_recording() {
        let status = answers("choria.streams.STREAM.INFO.KV_CHORIA_LEADER_ELECTION");
        assert_eq!(status.len(), 2);
        for answer in status {
            let bucket = Bucket { ttl: Duration::from_secs(10) };
            assert_eq!(read_status(answer.as_bytes()), Ok(bucket));
        }
        let written = answers("choria.streams.$KV.CHORIA_LEADER_ELECTION.provisioner");
        assert_eq!(written.len(), 18);
        for (number, answer) in (1..).zip(written) {
            assert_eq!(read_written(answer.as_bytes()), Ok(Written::Stored(number)));
        }
    }

    #[test]
    fn takes_a_bucket_whose_keys_live_from_four_seconds_to_an_hour() {
        let second = 1_000_000_000_u64;
        for (max_age, is_usable) in [
            (0, false),
            (second, false),
            (4 * second - 1, false),
            (4 * second, true),
            (60 * second, true),
            (3_600 * second, true),
            (3_601 * second, false),
            (u64::MAX, false),
        ] {
            let status =
                format!(r#"{{"config":{{"max_age":{max_age},"max_msgs_per_subject":1}}}}"#);
            assert_eq!(read_status(status.as_bytes()).is_ok(), is_usable, "{max_age}");
        }
    }

    #[test]
    fn says_why_a_bucket_is_no_use() {
        check(
            r#"{"error":{"code":404,"err_code":10059,"description":"stream not found"}}"#,
            "the broker says: stream not found (error 10059); there is no bucket CHORIA_LEADER_ELECTION: a Choria Broker with Choria Streams makes it a minute or so after its start, on a plain nats-server `nats kv add CHORIA_LEADER_ELECTION --history 1 --ttl 10s` does",
        );
        check(
            r#"{"config":{"max_age":1000000000}}"#,
            "its keys live for 1s; an election needs at least 4s and at most 3600s",
        );
        check(r#"{"config":{"max_age":5000000000}}"#, "it keeps no key");
        check("{}", "its keys live for 0ns; an election needs at least 4s and at most 3600s");
        for unreadable in ["", "[]", "null", r#"{"config":7}"#, r#"{"config":{"max_age":-1}}"#] {
            check(unreadable, "the broker's answer can't be read");
        }
    }

    #[track_caller]
    fn check(answer: &str, expected: &str) {
        assert_eq!(read_status(answer.as_bytes()).unwrap_err().to_string(), expected, "{answer}");
    }

    #[test]
    fn takes_a_write_for_stored_only_without_an_error_and_with_a_number() {
        let stored = |answer: &str| match read_written(answer.as_bytes()) {
            Ok(Written::Stored(number)) => Some(number),
            Ok(Written::Refused(_)) | Err(_) => None,
        };
        assert_eq!(stored(r#"{"stream":"KV_CHORIA_LEADER_ELECTION", "seq":7}"#), Some(7));
        let largest = format!(r#"{{"seq":{},"duplicate":true,"domain":"x"}}"#, u64::MAX);
        assert_eq!(stored(&largest), Some(u64::MAX));
        for answer in [
            r#"{"error":{"code":400,"err_code":10071,"description":"wrong last sequence: 14"},"stream":"KV_CHORIA_LEADER_ELECTION","seq":0}"#,
            r#"{"error":{"code":400,"err_code":10164},"seq":14}"#,
            r#"{"error":{},"seq":14}"#,
            r#"{"seq":0}"#,
            r#"{"seq":-1}"#,
            r#"{"seq":"7"}"#,
            r#"{"seq":7"#,
            "{}",
            "",
        ] {
            assert_eq!(stored(answer), None, "{answer}");
        }
    }

    #[test]
    fn knows_the_ordinary_refusals_of_both_kinds_of_brokers() {
        for (code, expected) in [(10071, true), (10164, true), (10054, false), (0, false)] {
            let refusal = Refusal { code, description: String::new() };
            assert_eq!(refusal.is_contention(), expected, "{code}");
        }
    }

    #[test]
    fn survives_flipped_bytes() {
        let mut random = fastrand::Rng::with_seed(6);
        let mut recorded = answers("choria.streams.STREAM.INFO.KV_CHORIA_LEADER_ELECTION");
        recorded.extend(answers("choria.streams.$KV.CHORIA_LEADER_ELECTION.provisioner"));
        for _ in 0..200 {
            for answer in &recorded {
                let mut bytes = answer.clone().into_bytes();
                let at = random.usize(..bytes.len());
                bytes[at] = random.u8(..);
                drop((read_status(&bytes), read_written(&bytes)));
            }
        }
    }
}
