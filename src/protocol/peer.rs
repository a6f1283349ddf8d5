//! What provisioners of one account tell each other.
//!
//! Our own format: the original never speaks here. Nodes may not either where the broker has Choria's permissions; where
//! it has none anyone may say anything, and what is read here is a claim.

use std::fmt;
use std::io::Write;

use serde::Deserialize;

use crate::protocol::election::ELECTION;
use crate::protocol::json::{JsonError, Object, push_string};
use crate::protocol::ksuid::Ksuid;
use crate::protocol::{Identity, InvalidIdentity, Sender};

/// Largest message looked at, in bytes.
pub const PEER_BYTES_MAX: usize = 4 << 10;

/// Longest caller id of a peer, in bytes: with all else it fits in [`PEER_BYTES_MAX`] however it is written.
pub const CALLER_BYTES_MAX: usize = 1 << 10;

const HEARTBEAT: &str = "io.choria.provisioner.v1.peer";
const HANDOVER: &str = "io.choria.provisioner.v1.handover";

/// What a peer said.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Said {
    /// It is there.
    Heartbeat(Heartbeat),
    /// It no longer leads, and the key of the election has this number: whoever writes it first may follow.
    Handover {
        /// Which process it was.
        instance: Ksuid,
        /// The key's number.
        number: u64,
    },
    /// Something of a later version, or of another election.
    Other,
}

/// Tells the others that we are there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Heartbeat {
    /// Which process it is: of two the one that began earlier has the smaller one.
    pub instance: Ksuid,
    /// Who it is to nodes.
    pub sender: Sender,
    /// Its part.
    pub role: Role,
    /// It provisions nothing any more.
    pub leaving: bool,
    /// Counts what this process has said, so that it knows its own heartbeats when they come back; 0 from others that don't.
    pub number: u64,
}

/// The part of a provisioner among several.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// All provision, each its own nodes.
    Active,
    /// It is elected.
    Leader,
    /// It would be, if the leader were not.
    Candidate,
}

impl Role {
    /// The word for it.
    pub fn word(self) -> &'static str {
        match self {
            Role::Active => "active",
            Role::Leader => "leader",
            Role::Candidate => "candidate",
        }
    }

    fn parse(word: &str) -> Option<Role> {
        [Role::Active, Role::Leader, Role::Candidate].into_iter().find(|role| role.word() == word)
    }
}

impl Heartbeat {
    /// As it is sent.
    pub fn encode(&self) -> Vec<u8> {
        let Heartbeat { instance, sender: Sender { identity, caller }, role, leaving, number } =
            self;
        let mut out = begin(HEARTBEAT, instance);
        out.extend_from_slice(br#","identity":"#);
        push_string(&mut out, identity.as_str());
        out.extend_from_slice(br#","caller":"#);
        push_string(&mut out, caller);
        let role = role.word();
        write!(out, r#","role":"{role}","leaving":{leaving},"number":{number}}}"#).expect(WRITES);
        out
    }
}

/// Tells the candidates that the key, which has this `number`, is theirs.
pub fn handover(instance: &Ksuid, number: u64) -> Vec<u8> {
    let mut out = begin(HANDOVER, instance);
    write!(out, r#","election":"{ELECTION}","sequence":{number}}}"#).expect(WRITES);
    out
}

const WRITES: &str = "a vector takes all that is written";

fn begin(protocol: &str, instance: &Ksuid) -> Vec<u8> {
    let mut out = Vec::with_capacity(256);
    write!(out, r#"{{"protocol":"{protocol}","instance":"{instance}""#).expect(WRITES);
    out
}

#[derive(Deserialize)]
struct Wire {
    protocol: String,
    #[serde(default)]
    instance: String,
    #[serde(default)]
    identity: String,
    #[serde(default)]
    caller: String,
    #[serde(default)]
    role: String,
    #[serde(default)]
    leaving: bool,
    #[serde(default)]
    number: u64,
    #[serde(default)]
    election: String,
    #[serde(default)]
    sequence: u64,
}

/// Why something is no message of a peer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BadPeer {
    /// It is longer than [`PEER_BYTES_MAX`].
    TooLong,
    /// It can't be read.
    Unreadable(JsonError),
    /// The instance is no KSUID.
    Instance,
    /// Nobody can have this identity.
    Identity(InvalidIdentity),
    /// The caller is empty, too long, or holds a control character.
    Caller,
}

impl fmt::Display for BadPeer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            BadPeer::TooLong => write!(f, "message is longer than {PEER_BYTES_MAX} bytes"),
            BadPeer::Unreadable(error) => error.fmt(f),
            BadPeer::Instance => f.write_str("the instance is no KSUID"),
            BadPeer::Identity(error) => error.fmt(f),
            BadPeer::Caller => {
                f.write_str("the caller is empty, too long or holds a control character")
            }
        }
    }
}

impl std::error::Error for BadPeer {}

/// Reads what a peer said.
///
/// # Errors
///
/// [`BadPeer`].
pub fn read(payload: &[u8]) -> Result<Said, BadPeer> {
    if payload.len() > PEER_BYTES_MAX {
        return Err(BadPeer::TooLong);
    }
    let Object(wire) = serde_json::from_slice::<Object<Wire>>(payload)
        .map_err(|error| BadPeer::Unreadable(error.into()))?;
    match wire.protocol.as_str() {
        HEARTBEAT => heartbeat(wire),
        HANDOVER if wire.election == ELECTION && wire.sequence > 0 => {
            let instance = Ksuid::parse(&wire.instance).ok_or(BadPeer::Instance)?;
            Ok(Said::Handover { instance, number: wire.sequence })
        }
        _ => Ok(Said::Other),
    }
}

fn heartbeat(wire: Wire) -> Result<Said, BadPeer> {
    let Wire { instance, identity, caller, role, leaving, number, .. } = wire;
    let Some(role) = Role::parse(&role) else { return Ok(Said::Other) };
    let instance = Ksuid::parse(&instance).ok_or(BadPeer::Instance)?;
    let identity = Identity::parse(&identity).map_err(BadPeer::Identity)?;
    let is_bad = caller.is_empty() || caller.len() > CALLER_BYTES_MAX;
    if is_bad || caller.chars().any(char::is_control) {
        return Err(BadPeer::Caller);
    }
    let sender = Sender { identity, caller };
    Ok(Said::Heartbeat(Heartbeat { instance, sender, role, leaving, number }))
}

#[cfg(test)]
mod tests {
    use super::*;

    const INSTANCE: &str = "2yY8AB06KFtlxl7ZvFjl4IXobqb";

    fn beat() -> Heartbeat {
        Heartbeat {
            instance: Ksuid::parse(INSTANCE).unwrap(),
            sender: Sender {
                identity: Identity::parse("p1.example.net").unwrap(),
                caller: "choria=p1.example.net".into(),
            },
            role: Role::Active,
            leaving: false,
            number: 7,
        }
    }

    #[test]
    fn says_what_the_format_demands_and_reads_it_back() {
        let instance = Ksuid::parse(INSTANCE).unwrap();
        let message = handover(&instance, 123);
        assert_eq!(
            String::from_utf8(message.clone()).unwrap(),
            r#"{"protocol":"io.choria.provisioner.v1.handover","instance":"2yY8AB06KFtlxl7ZvFjl4IXobqb","election":"provisioner","sequence":123}"#
        );
        assert_eq!(read(&message), Ok(Said::Handover { instance, number: 123 }));

        let message = beat().encode();
        assert_eq!(
            String::from_utf8(message.clone()).unwrap(),
            r#"{"protocol":"io.choria.provisioner.v1.peer","instance":"2yY8AB06KFtlxl7ZvFjl4IXobqb","identity":"p1.example.net","caller":"choria=p1.example.net","role":"active","leaving":false,"number":7}"#
        );
        assert_eq!(read(&message), Ok(Said::Heartbeat(beat())));
        for (role, leaving) in
            [(Role::Leader, false), (Role::Candidate, false), (Role::Active, true)]
        {
            let said = Heartbeat { role, leaving, ..beat() };
            assert_eq!(read(&said.encode()), Ok(Said::Heartbeat(said)));
        }
    }

    #[test]
    fn the_longest_that_may_be_said_fits() {
        let identity = Identity::parse(&"\"".repeat(253)).unwrap();
        let sender = Sender { identity, caller: "\\".repeat(CALLER_BYTES_MAX) };
        let said = Heartbeat { sender, number: u64::MAX, ..beat() };
        assert!(said.encode().len() <= PEER_BYTES_MAX);
        assert_eq!(read(&said.encode()), Ok(Said::Heartbeat(said)));
    }

    #[test]
    fn a_heartbeat_without_the_last_two_fields_counts() {
        let text = r#"{"protocol":"io.choria.provisioner.v1.peer","instance":"2yY8AB06KFtlxl7ZvFjl4IXobqb","identity":"p1.example.net","caller":"choria=p1.example.net","role":"active","more":[]}"#;
        assert_eq!(read(text.as_bytes()), Ok(Said::Heartbeat(Heartbeat { number: 0, ..beat() })));
    }

    #[test]
    fn ignores_what_is_new_or_not_meant_for_us_and_refuses_what_is_no_message() {
        for other in [
            r#"{"protocol":"io.choria.provisioner.v1.handover","election":"other","sequence":123}"#,
            r#"{"protocol":"io.choria.provisioner.v1.handover","election":"provisioner","sequence":0}"#,
            r#"{"protocol":"io.choria.provisioner.v1.handover","election":"provisioner"}"#,
            r#"{"protocol":"io.choria.provisioner.v2.handover","election":"provisioner","sequence":1}"#,
            r#"{"protocol":"io.choria.provisioner.v1.peer","role":"observer"}"#,
            r#"{"protocol":"x","more":[1,2]}"#,
        ] {
            assert_eq!(read(other.as_bytes()), Ok(Said::Other), "{other}");
        }
        for bad in [
            "",
            "[]",
            "{}",
            r#"{"protocol":1}"#,
            r#"{"protocol":"io.choria.provisioner.v1.handover","sequence":-1}"#,
            r#"{"protocol":"io.choria.provisioner.v1.handover","sequence":"1"}"#,
            r#"{"protocol":"io.choria.provisioner.v1.handover","election":"provisioner","sequence":1,"instance":"us"}"#,
            r#"{"protocol":"io.choria.provisioner.v1.peer","role":"active","leaving":"yes"}"#,
            r#"{"protocol":"io.choria.provisioner.v1.peer","role":"active"}"#,
        ] {
            assert!(read(bad.as_bytes()).is_err(), "{bad}");
        }
    }

    #[test]
    fn refuses_a_heartbeat_of_nobody() {
        let good = String::from_utf8(beat().encode()).unwrap();
        let check = |from: &str, to: &str, error: BadPeer| {
            let bad = good.replace(from, to);
            assert_ne!(bad, good);
            assert_eq!(read(bad.as_bytes()), Err(error), "{bad}");
        };
        check(INSTANCE, "2yY8AB06KFtlxl7ZvFjl4IXobq", BadPeer::Instance);
        check(INSTANCE, "zzzzzzzzzzzzzzzzzzzzzzzzzzz", BadPeer::Instance);
        let identity = r#""identity":"p1.example.net""#;
        check(identity, r#""identity":"""#, BadPeer::Identity(InvalidIdentity::Empty));
        check(identity, r#""identity":"*""#, BadPeer::Identity(InvalidIdentity::Wildcard));
        let long = format!(r#""identity":"{}""#, "x".repeat(254));
        check(identity, &long, BadPeer::Identity(InvalidIdentity::TooLong));
        check("choria=p1.example.net", "", BadPeer::Caller);
        // With it two pairs of caller and identity could look alike.
        check("choria=p1.example.net", r"choria\u0000p1", BadPeer::Caller);
        check("choria=p1.example.net", &"x".repeat(CALLER_BYTES_MAX + 1), BadPeer::Caller);
        check("choria=p1.example.net", &"x".repeat(PEER_BYTES_MAX), BadPeer::TooLong);
    }

    #[test]
    fn survives_flipped_bytes() {
        let mut random = fastrand::Rng::with_seed(11);
        let instance = Ksuid::parse(INSTANCE).unwrap();
        let mut understood = 0;
        for turn in 0..20_000 {
            let mut message =
                if turn % 2 == 0 { beat().encode() } else { handover(&instance, 123) };
            for _ in 0..random.usize(1..4) {
                match random.usize(..4) {
                    0 => message.truncate(random.usize(..=message.len())),
                    1 => message.insert(random.usize(..=message.len()), random.u8(..)),
                    _ if message.is_empty() => {}
                    _ => {
                        let at = random.usize(..message.len());
                        message[at] = random.u8(..);
                    }
                }
            }
            understood += u32::from(read(&message).is_ok());
        }
        assert!(understood > 100, "{understood}");
    }
}
