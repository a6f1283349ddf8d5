//! The key a node makes for itself, and the proof that it holds the private half.
//!
//! The node signs a nonce of ours. That binds the key to our question and to nothing else: which node answered is for `rpc` to say. A node
//! makes another key whenever it is asked, so only the last answer's is worth anything. Pure: randomness is an argument.

use std::fmt;

use ed25519_dalek::{Signature, VerifyingKey};
use serde_json::value::RawValue;

use crate::jwt::hex;
use crate::rpc::actions::{Action, BadReply, Call, Gen25519, Gen25519Reply};

/// What a node signs: a text that was never used before.
#[derive(Clone, PartialEq, Eq)]
pub struct Nonce(String);

impl Nonce {
    /// The nonce made of these random bytes: 32 hex digits, as the original's.
    pub fn new(random: [u8; 16]) -> Nonce {
        Nonce(hex::encode(&random))
    }

    /// The text, which is what the signature covers.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// A request for a key, with a nonce of its own.
pub struct Challenge<'a> {
    nonce: Nonce,
    token: &'a str,
}

impl<'a> Challenge<'a> {
    /// One with the nonce made of these random bytes; `token` is the provisioning token.
    pub fn new(random: [u8; 16], token: &'a str) -> Challenge<'a> {
        Challenge { nonce: Nonce::new(random), token }
    }

    /// What the node is to sign.
    pub fn nonce(&self) -> &Nonce {
        &self.nonce
    }

    /// Takes the key in the answer to this request, if it was proved.
    ///
    /// # Errors
    ///
    /// [`NotProved`]
    pub fn check(&self, reply: Gen25519Reply) -> Result<ProvedKey, NotProved> {
        ProvedKey::check(self.nonce.as_str(), reply)
    }
}

impl Call for Challenge<'_> {
    const ACTION: Action = Gen25519::ACTION;
    type Reply = Gen25519Reply;

    fn body(&self) -> String {
        Gen25519 { nonce: self.nonce.as_str(), token: self.token }.body()
    }

    fn read(data: &RawValue) -> Result<Gen25519Reply, BadReply> {
        Gen25519::read(data)
    }
}

/// A public key whose holder signed our nonce.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProvedKey {
    public_key: VerifyingKey,
    directory: String,
    signature: Signature,
}

impl ProvedKey {
    /// Takes the node's key once its signature over `nonce`, the text it was sent, checks out.
    ///
    /// # Errors
    ///
    /// [`NotProved`]. The original takes keys that anybody can sign for, and dies of one that is not 32 bytes.
    pub fn check(nonce: &str, reply: Gen25519Reply) -> Result<ProvedKey, NotProved> {
        let public_key = VerifyingKey::from_bytes(&reply.public_key).map_err(|_| NotProved::Key)?;
        let signature = Signature::from_bytes(&reply.signature);
        public_key.verify_strict(nonce.as_bytes(), &signature).map_err(|_| NotProved::Signature)?;
        Ok(ProvedKey { public_key, directory: reply.directory, signature })
    }

    /// The key.
    pub fn public_key(&self) -> &VerifyingKey {
        &self.public_key
    }

    /// The key in hex, as the helper gets it.
    pub fn public_key_hex(&self) -> String {
        hex::encode(self.public_key.as_bytes())
    }

    /// The signature in hex, as the helper gets it.
    pub fn signature_hex(&self) -> String {
        hex::encode(&self.signature.to_bytes())
    }

    /// Where the node keeps the private half.
    pub fn directory(&self) -> &str {
        &self.directory
    }
}

/// Why a node's key was not taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NotProved {
    /// It is no point on the curve.
    Key,
    /// The signature is not one over our nonce by this key.
    Signature,
}

impl fmt::Display for NotProved {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            NotProved::Key => "invalid public key received",
            NotProved::Signature => "invalid nonce signature",
        })
    }
}

impl std::error::Error for NotProved {}

#[cfg(test)]
pub(super) mod testing {
    use ed25519_dalek::Signer as _;

    use super::ProvedKey;
    use crate::jwt::testing;
    use crate::rpc::actions::Gen25519Reply;

    /// The key of [`testing::node`], which keeps it in `directory`.
    pub(in crate::node) fn proved(directory: &str) -> ProvedKey {
        let (node, nonce) = (testing::node(), "nonce");
        let reply = Gen25519Reply {
            public_key: node.verifying_key().to_bytes(),
            directory: directory.to_owned(),
            signature: node.sign(nonce.as_bytes()).to_bytes(),
        };
        ProvedKey::check(nonce, reply).unwrap()
    }
}

#[cfg(test)]
mod tests {
    use ed25519_dalek::{Signature, Signer as _, Verifier as _, VerifyingKey};
    use serde_json::Value;

    use super::{Challenge, Nonce, NotProved, ProvedKey};
    use crate::jwt::testing;
    use crate::rpc::actions::{Call as _, Gen25519Reply};

    const NONCE: &str = "0f6b1c2d3e4f4a5b8c9d0e1f2a3b4c5d";
    const PUBLIC_KEY: &str = "2543b92ff1095511476adc8369db6ddc933665a11978dda1404ee1066ca9559d";
    const SIGNATURE: &str = "8ba2e0b97138e7c26de31ac95f31be5e6bdbe8d29fffd11b1d9a074dcf02af22d4f3913edf075142fb225ffd57fea6cf3d16777e6d0b05f2f844c6b9696c870a";

    #[test]
    fn takes_a_key_whose_holder_signed_the_nonce() {
        let key = ProvedKey::check(NONCE, reply()).unwrap();
        assert_eq!(key.public_key(), &testing::node().verifying_key());
        assert_eq!(key.public_key_hex(), PUBLIC_KEY);
        assert_eq!(key.signature_hex(), SIGNATURE);
        assert_eq!(key.directory(), "/etc/choria");
    }

    #[test]
    fn every_request_has_a_nonce_of_its_own_and_takes_a_signature_over_no_other() {
        let asked = Challenge::new([0xa5; 16], "s3cret");
        let nonce = "a5".repeat(16);
        assert_eq!(
            asked.body(),
            format!(
                r#"{{"agent":"choria_provision","action":"gen25519","data":{{"nonce":"{nonce}","token":"s3cret"}}}}"#
            )
        );
        let signature = testing::node().sign(nonce.as_bytes()).to_bytes();
        let good = Gen25519Reply { signature, ..reply() };
        assert_eq!(asked.check(good.clone()).unwrap().directory(), "/etc/choria");
        let other = Challenge::new([0xa6; 16], "s3cret");
        assert_eq!(other.check(good).unwrap_err(), NotProved::Signature);
    }

    #[test]
    fn takes_the_recorded_key() {
        let input: Value =
            serde_json::from_str(&testing::recorded("issuer/helper-input.json")).unwrap();
        let text = |key: &str| input["ed25519_pubkey"][key].as_str().unwrap();
        let reply = Gen25519Reply {
            public_key: testing::bytes(text("public_key")),
            directory: text("directory").to_owned(),
            signature: testing::bytes(text("signature")),
        };
        // The nonce of the recorded request.
        let key = ProvedKey::check("c40614572f61472d835eeeabef7d472f", reply).unwrap();
        assert_eq!(key.public_key_hex(), text("public_key"));
        assert_eq!(key.signature_hex(), text("signature"));
    }

    #[test]
    fn refuses_a_key_that_was_not_proved() {
        check("0f6b1c2d3e4f4a5b8c9d0e1f2a3b4c5e", reply(), NotProved::Signature);
        check("", reply(), NotProved::Signature);
        // The bytes that the nonce's digits stand for.
        check("\u{f}k", reply(), NotProved::Signature);
        let mut spoilt = reply();
        spoilt.signature[0] ^= 1;
        check(NONCE, spoilt, NotProved::Signature);
        let other = testing::signer().verifying_key().to_bytes();
        check(NONCE, Gen25519Reply { public_key: other, ..reply() }, NotProved::Signature);
        let mut no_point = [0; 32];
        no_point[0] = 2;
        check(NONCE, Gen25519Reply { public_key: no_point, ..reply() }, NotProved::Key);
    }

    #[test]
    fn refuses_a_key_that_anybody_can_sign_for() {
        // The neutral element: with a commitment to it, this signature fits every message.
        let mut neutral = [0; 32];
        neutral[0] = 1;
        let mut signature = [0; 64];
        signature[0] = 1;
        let (key, lenient) =
            (VerifyingKey::from_bytes(&neutral).unwrap(), Signature::from_bytes(&signature));
        key.verify(NONCE.as_bytes(), &lenient).unwrap();
        let weak = Gen25519Reply { public_key: neutral, signature, ..reply() };
        check(NONCE, weak, NotProved::Signature);
    }

    #[test]
    fn makes_nonces_of_32_digits() {
        assert_eq!(Nonce::new([0xa5; 16]).as_str(), "a5".repeat(16));
    }

    #[track_caller]
    fn check(nonce: &str, reply: Gen25519Reply, expected: NotProved) {
        assert_eq!(ProvedKey::check(nonce, reply).unwrap_err(), expected);
    }

    fn reply() -> Gen25519Reply {
        Gen25519Reply {
            public_key: testing::bytes(PUBLIC_KEY),
            directory: "/etc/choria".to_owned(),
            signature: testing::bytes(SIGNATURE),
        }
    }
}
