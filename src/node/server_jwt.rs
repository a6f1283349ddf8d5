//! The server JWT for a key that was proved: described when the helper has said how, signed when all else is checked.
//!
//! It is made of a [`ProvedKey`] only, so none can be signed for a key whose holder did not sign a nonce of ours. What it says is in
//! [`claims`]. Pure: randomness and time are arguments.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use serde_json::value::RawValue;

use super::claims::{self, Defaults, Warning};
use super::proof::ProvedKey;
use crate::jwt::server::{IssueError, Issued, Issuer, Server};
use crate::protocol::Identity;

/// What signs server JWTs: as it was when the node was begun, whatever becomes of the files meanwhile.
#[derive(Debug)]
pub struct Signer {
    /// The key, and our place in the trust chain.
    pub issuer: Arc<Issuer>,
    /// How long a token is valid unless something else is wished.
    pub validity: Duration,
}

/// A key that was proved, and what will sign for it once the helper has said how.
#[derive(Debug)]
pub struct Candidate {
    /// The key.
    pub key: ProvedKey,
    /// What will sign.
    pub signer: Signer,
}

impl Candidate {
    /// Describes the node `identity` as its server JWT shall do: see [`claims::merge`].
    ///
    /// # Errors
    ///
    /// [`claims::Error`]
    pub fn described(
        self,
        identity: &Identity,
        wishes: Option<&RawValue>,
        configuration: &BTreeMap<String, String>,
        unix_time: i64,
        warn: &mut dyn FnMut(Warning),
    ) -> Result<Unsigned, claims::Error> {
        let Candidate { key, signer: Signer { issuer, validity } } = self;
        let defaults = Defaults { issuer: &issuer, validity, unix_time };
        let server = claims::merge(identity, &key, wishes, configuration, &defaults, warn)?;
        Ok(Unsigned { server, issuer })
    }
}

/// A server JWT for a key that was proved, before it is signed.
#[derive(Debug)]
pub struct Unsigned {
    server: Server,
    issuer: Arc<Issuer>,
}

impl Unsigned {
    /// The organization it is for.
    pub fn organization(&self) -> &str {
        &self.server.organization
    }

    /// Signs it at `now`, in seconds since 1970, under an id made of these random bytes.
    ///
    /// # Errors
    ///
    /// [`IssueError`]
    pub fn sign(&self, now: i64, random: [u8; 16]) -> Result<Issued, IssueError> {
        self.issuer.issue(&self.server, now, random)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::jwt::testing;
    use crate::node::proof::testing::proved;

    /// When [`testing::SERVER`] was made.
    const MADE: i64 = 1_760_000_000;

    #[test]
    fn signs_for_the_proved_key_under_the_name_of_the_node() {
        let issuer = Issuer::check(testing::SIGNER_SEED, Some(testing::SIGNER), MADE).unwrap();
        let signer = Signer { issuer: issuer.into(), validity: Duration::from_secs(240_000_000) };
        let identity = Identity::parse("n1.example.net").unwrap();
        let candidate = Candidate { key: proved("/etc/choria"), signer };
        let wishes = r#"{"permissions":{"streams":true,"submission":true}}"#.to_owned();
        let wishes = RawValue::from_string(wishes).unwrap();
        let provider = ("plugin.security.provider".to_owned(), "choria".to_owned());
        let settings = BTreeMap::from([provider]);
        let unsigned =
            candidate.described(&identity, Some(&wishes), &settings, MADE, &mut |_| ()).unwrap();
        assert_eq!(unsigned.sign(MADE, [0x22; 16]).unwrap().text, testing::SERVER);
        assert!(!format!("{unsigned:?}").contains(testing::SIGNER_SEED));
        let too_late = unsigned.sign(2_000_000_000, [0x22; 16]).unwrap_err();
        assert_eq!(too_late.to_string(), "the server JWT would have expired already");
    }
}
