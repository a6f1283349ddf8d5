//! What provisioners of one account tell each other.
//!
//! Our own format: the original never speaks here. Nodes may not either where the broker has Choria's permissions; where
//! it has none anyone may say anything, and what is read here is a claim.

use std::io::Write;

use serde::Deserialize;

use crate::protocol::election::ELECTION;
use crate::protocol::json::{JsonError, Object, push_string};

/// Largest message looked at, in bytes.
pub const PEER_BYTES_MAX: usize = 4 << 10;

const HANDOVER: &str = "io.choria.provisioner.v1.handover";

/// What a peer said.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Said {
    /// It no longer leads, and the key of the election has this number: whoever writes it first may follow.
    Handover {
        /// Which process it was.
        instance: String,
        /// The key's number.
        number: u64,
    },
    /// Something of a later version, or of another election.
    Other,
}

/// Tells the candidates that the key, which has this `number`, is theirs.
pub fn handover(instance: &str, number: u64) -> Vec<u8> {
    let mut out = Vec::with_capacity(160);
    out.extend_from_slice(br#"{"protocol":"#);
    push_string(&mut out, HANDOVER);
    out.extend_from_slice(br#","instance":"#);
    push_string(&mut out, instance);
    out.extend_from_slice(br#","election":"#);
    push_string(&mut out, ELECTION);
    write!(out, r#","sequence":{number}}}"#).expect("a vector takes all that is written");
    out
}

#[derive(Deserialize)]
struct Wire {
    protocol: String,
    #[serde(default)]
    instance: String,
    #[serde(default)]
    election: String,
    #[serde(default)]
    sequence: u64,
}

/// Reads what a peer said. The payload's size has been looked at.
///
/// # Errors
///
/// [`JsonError`] if it is no message at all.
pub fn read(payload: &[u8]) -> Result<Said, JsonError> {
    let Object(Wire { protocol, instance, election, sequence }) = serde_json::from_slice(payload)?;
    if protocol == HANDOVER && election == ELECTION && sequence > 0 {
        return Ok(Said::Handover { instance, number: sequence });
    }
    Ok(Said::Other)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn says_what_the_format_demands_and_reads_it_back() {
        let message = handover("2ABC", 123);
        assert_eq!(
            String::from_utf8(message.clone()).unwrap(),
            r#"{"protocol":"io.choria.provisioner.v1.handover","instance":"2ABC","election":"provisioner","sequence":123}"#
        );
        let said = Said::Handover { instance: "2ABC".into(), number: 123 };
        assert_eq!(read(&message), Ok(said));
    }

    #[test]
    fn ignores_what_is_new_or_not_meant_for_us_and_refuses_what_is_no_message() {
        for other in [
            r#"{"protocol":"io.choria.provisioner.v1.handover","election":"other","sequence":123}"#,
            r#"{"protocol":"io.choria.provisioner.v1.handover","election":"provisioner","sequence":0}"#,
            r#"{"protocol":"io.choria.provisioner.v1.handover","election":"provisioner"}"#,
            r#"{"protocol":"io.choria.provisioner.v2.handover","election":"provisioner","sequence":1}"#,
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
        ] {
            assert!(read(bad.as_bytes()).is_err(), "{bad}");
        }
    }
}
