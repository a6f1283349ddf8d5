//! Every NATS subject we use, and the checked types that carry them.
//!
//! Names as in go-choria `choria/connection.go` and `lifecycle/basic.go`. Our reply subjects have one part more, the
//! instance, so that daemons with one caller id don't hear each other's replies; nodes and brokers accept that.

use std::fmt;
use std::sync::Arc;

use openssl::hash::{MessageDigest, hash};

use crate::protocol::election::ELECTION;
use crate::protocol::{COLLECTIVE, Identity, RequestId};

/// A subject to publish to: no wildcard, no white space, no empty part.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Subject(Arc<str>);

/// A subject to subscribe to: wildcards are allowed as whole parts.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Pattern(Arc<str>);

/// The text is no usable subject.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BadSubject {
    /// There is no text.
    Empty,
    /// It is longer than [`SUBJECT_BYTES_MAX`].
    TooLong,
    /// White space or a control character.
    Blank,
    /// A wildcard where none may be.
    Wildcard,
    /// A leading, trailing or doubled dot.
    EmptyPart,
    /// A dot in what must be one part.
    Dot,
}

/// Longest subject taken, in bytes: brokers read control lines of 4 KiB, which hold up to two subjects.
pub const SUBJECT_BYTES_MAX: usize = 1024;

impl Subject {
    /// Takes `text` as a subject to publish to.
    ///
    /// # Errors
    ///
    /// [`BadSubject`].
    pub fn new(text: &str) -> Result<Subject, BadSubject> {
        check(text)?;
        if text.contains(['*', '>']) {
            return Err(BadSubject::Wildcard);
        }
        Ok(Subject(text.into()))
    }

    /// The text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl Pattern {
    /// Takes `text` as a subject to subscribe to: `*` stands for one part, a final `>` for all that follow.
    ///
    /// # Errors
    ///
    /// [`BadSubject`].
    pub fn new(text: &str) -> Result<Pattern, BadSubject> {
        check(text)?;
        let mut parts = text.split('.').peekable();
        while let Some(part) = parts.next() {
            let last = parts.peek().is_none();
            let wildcard = part == "*" || part == ">" && last;
            if part.contains(['*', '>']) && !wildcard {
                return Err(BadSubject::Wildcard);
            }
        }
        Ok(Pattern(text.into()))
    }

    /// The text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl From<Subject> for Pattern {
    fn from(Subject(text): Subject) -> Pattern {
        Pattern(text)
    }
}

fn check(text: &str) -> Result<(), BadSubject> {
    if text.is_empty() {
        return Err(BadSubject::Empty);
    }
    if text.len() > SUBJECT_BYTES_MAX {
        return Err(BadSubject::TooLong);
    }
    if text.chars().any(|c| c.is_whitespace() || c.is_control()) {
        return Err(BadSubject::Blank);
    }
    if text.split('.').any(str::is_empty) {
        return Err(BadSubject::EmptyPart);
    }
    Ok(())
}

/// Where one node listens.
pub fn node(identity: &Identity) -> Subject {
    // Safe without a check: an identity has no wildcard, no blank and no empty part.
    Subject([COLLECTIVE, ".node.", identity.as_str()].concat().into())
}

/// Where all nodes listen for discovery.
pub fn discovery() -> Subject {
    Subject(format!("{COLLECTIVE}.broadcast.agent.discovery").into())
}

/// Where nodes announce that they started, `component` being the kind of node, such as `provision_mode_server`.
///
/// # Errors
///
/// [`BadSubject`] if `component` is not exactly one part without wildcard, as the original demands.
pub fn startup_events(component: &str) -> Result<Pattern, BadSubject> {
    check_part(component)?;
    Pattern::new(&format!("{STARTUP_EVENTS}.{component}"))
}

/// Where we announce that we started.
pub fn own_startup() -> Subject {
    Subject(format!("{STARTUP_EVENTS}.provisioner").into())
}

/// Where brokers tell about the bucket with the election's key.
pub fn election_status() -> Subject {
    Subject(format!("{STREAMS}.STREAM.INFO.KV_{ELECTION_BUCKET}").into())
}

/// Where the election's key is written.
pub fn election_key() -> Subject {
    Subject(format!("{STREAMS}.$KV.{ELECTION_BUCKET}.{ELECTION}").into())
}

/// Where the provisioners of one account talk to each other.
pub fn peers() -> Subject {
    Subject("choria.provisioner.peer".into())
}

/// What a provisioning account has instead of `$JS.API`, and before a key's own subject as well.
const STREAMS: &str = "choria.streams";
/// The bucket that has the key of an election.
pub const ELECTION_BUCKET: &str = "CHORIA_LEADER_ELECTION";

const STARTUP_EVENTS: &str = "choria.lifecycle.event.startup";

fn check_part(text: &str) -> Result<(), BadSubject> {
    if text.contains('.') {
        return Err(BadSubject::Dot);
    }
    Subject::new(text).map(|_| ())
}

/// The subjects on which replies come to this process: `provisioning.reply.<md5(caller)>.<instance>.<request id>`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReplySubjects {
    /// All but the request id, with the dot before it.
    prefix: String,
}

impl ReplySubjects {
    /// Those of the process `instance` that calls itself `caller`.
    ///
    /// # Errors
    ///
    /// [`BadSubject`] if `instance` is not exactly one part without wildcard.
    pub fn new(caller: &str, instance: &str) -> Result<ReplySubjects, BadSubject> {
        check_part(instance)?;
        let prefix = format!("{COLLECTIVE}.reply.{}.{instance}.", caller_digest(caller));
        // Room for the request id must remain.
        check(&format!("{prefix}{:032}", 0))?;
        Ok(ReplySubjects { prefix })
    }

    /// What to subscribe to, once, for all replies.
    pub fn pattern(&self) -> Pattern {
        Pattern(format!("{}*", self.prefix).into())
    }

    /// Where the reply to one request comes.
    pub fn for_request(&self, id: RequestId) -> Subject {
        let mut text = String::with_capacity(self.prefix.len() + 32);
        text.push_str(&self.prefix);
        text.push_str(id.as_str());
        Subject(text.into())
    }

    /// Where the answer to the request with this number comes, for those that no node is to answer.
    pub fn for_number(&self, number: u64) -> Subject {
        Subject(format!("{}{number}", self.prefix).into())
    }

    /// The number of the request that a message on `subject` answers, if it can be one of ours.
    pub fn number(&self, subject: &str) -> Option<u64> {
        subject.strip_prefix(self.prefix.as_str())?.parse().ok()
    }

    /// The request that a message on `subject` answers, if it can be one of ours.
    pub fn request_id(&self, subject: &str) -> Option<RequestId> {
        RequestId::parse(subject.strip_prefix(self.prefix.as_str())?)
    }
}

/// Brokers let a client hear `*.reply.<digest>.>` only, with MD5 or SHA-256 of its caller id in lower-case hex.
fn caller_digest(caller: &str) -> String {
    let digest = hash(MessageDigest::md5(), caller.as_bytes())
        // OpenSSL in FIPS mode has no MD5; Choria uses SHA-256 there.
        .or_else(|_| hash(MessageDigest::sha256(), caller.as_bytes()))
        .expect("OpenSSL has SHA-256");
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

impl fmt::Display for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Display for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Display for BadSubject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            BadSubject::Empty => f.write_str("subject is empty"),
            BadSubject::TooLong => write!(f, "subject is longer than {SUBJECT_BYTES_MAX} bytes"),
            BadSubject::Blank => f.write_str("subject holds white space or a control character"),
            BadSubject::Wildcard => f.write_str("subject holds a wildcard where none may be"),
            BadSubject::EmptyPart => f.write_str("subject has an empty part between dots"),
            BadSubject::Dot => f.write_str("part of a subject holds a dot"),
        }
    }
}

impl std::error::Error for BadSubject {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn publishes_to_plain_subjects_only() {
        assert_eq!(
            Subject::new("choria.streams.$KV.A.b").unwrap().as_str(),
            "choria.streams.$KV.A.b"
        );
        for (text, reason) in [
            ("", BadSubject::Empty),
            ("a b", BadSubject::Blank),
            ("a\r\nb", BadSubject::Blank),
            ("a.*", BadSubject::Wildcard),
            ("a.>", BadSubject::Wildcard),
            ("a>b", BadSubject::Wildcard),
            ("a..b", BadSubject::EmptyPart),
            (".a", BadSubject::EmptyPart),
            ("a.", BadSubject::EmptyPart),
        ] {
            assert_eq!(Subject::new(text), Err(reason), "{text:?}");
        }
        assert_eq!(Subject::new(&"a".repeat(1025)), Err(BadSubject::TooLong));
    }

    #[test]
    fn subscribes_to_whole_wildcards_only() {
        for text in ["a", "a.*", "*.a", "*", ">", "a.>", "a.*.b.>"] {
            assert!(Pattern::new(text).is_ok(), "{text:?}");
        }
        for text in ["a*", "a.>.b", ">.a", "a.b>", "**"] {
            assert_eq!(Pattern::new(text), Err(BadSubject::Wildcard), "{text:?}");
        }
    }

    #[test]
    fn names_the_subjects_of_choria() {
        let identity = Identity::parse("n1.fleet.example.net").unwrap();
        assert_eq!(node(&identity).as_str(), "provisioning.node.n1.fleet.example.net");
        assert_eq!(discovery().as_str(), "provisioning.broadcast.agent.discovery");
        assert_eq!(own_startup().as_str(), "choria.lifecycle.event.startup.provisioner");
        assert_eq!(
            startup_events("provision_mode_server").unwrap().as_str(),
            "choria.lifecycle.event.startup.provision_mode_server"
        );
        assert_eq!(
            election_status().as_str(),
            "choria.streams.STREAM.INFO.KV_CHORIA_LEADER_ELECTION"
        );
        assert_eq!(
            election_key().as_str(),
            "choria.streams.$KV.CHORIA_LEADER_ELECTION.provisioner"
        );
        for subject in [election_status(), election_key(), peers()] {
            assert_eq!(Subject::new(subject.as_str()), Ok(subject));
        }
    }

    #[test]
    fn refuses_a_component_that_is_not_one_part() {
        for component in ["", "a.b", "*", ">", "a*", "a b"] {
            assert!(startup_events(component).is_err(), "{component:?}");
        }
    }

    #[test]
    fn finds_the_request_in_a_reply_subject() {
        let subjects = ReplySubjects::new("choria=prov1.example.net", "i7").unwrap();
        let id = RequestId::parse("6c1f0d5e0b8a4f0f9a3d2b7c4e5f6a71").unwrap();
        let subject = subjects.for_request(id);
        assert_eq!(
            subject.as_str(),
            "provisioning.reply.f233e84b1879ff8f207108d2dda253a5.i7.6c1f0d5e0b8a4f0f9a3d2b7c4e5f6a71"
        );
        assert_eq!(
            subjects.pattern().as_str(),
            "provisioning.reply.f233e84b1879ff8f207108d2dda253a5.i7.*"
        );
        assert_eq!(subjects.request_id(subject.as_str()), Some(id));
        for other in [
            "",
            "provisioning.reply.f233e84b1879ff8f207108d2dda253a5.i7.",
            "provisioning.reply.f233e84b1879ff8f207108d2dda253a5.i7.x",
            "provisioning.reply.f233e84b1879ff8f207108d2dda253a5.i8.6c1f0d5e0b8a4f0f9a3d2b7c4e5f6a71",
            "6c1f0d5e0b8a4f0f9a3d2b7c4e5f6a71",
        ] {
            assert_eq!(subjects.request_id(other), None, "{other:?}");
        }
    }

    #[test]
    fn finds_the_number_in_a_reply_subject() {
        let subjects = ReplySubjects::new("choria=prov1.example.net", "i7").unwrap();
        let subject = subjects.for_number(18);
        let prefix = "provisioning.reply.f233e84b1879ff8f207108d2dda253a5.i7.";
        assert_eq!(subject.as_str(), format!("{prefix}18"));
        assert_eq!(subjects.number(subject.as_str()), Some(18));
        for last in ["", "x", "-1", "1.2", "99999999999999999999"] {
            assert_eq!(subjects.number(&format!("{prefix}{last}")), None, "{last:?}");
        }
    }

    #[test]
    fn refuses_an_instance_that_is_not_one_part() {
        for instance in ["", "a.b", "*", ">", "a b", &"x".repeat(1000)] {
            assert!(ReplySubjects::new("choria=prov1", instance).is_err(), "{instance:?}");
        }
    }
}
