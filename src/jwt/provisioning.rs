//! The provisioning JWT: what a node shows us to be let in.
//!
//! One token usually serves a whole fleet, so it proves that a node may ask, not which node it is.

use std::fmt;

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::value::RawValue;

use super::{DEFAULT_ORGANIZATION, Standard, Token, VerifyKey, null_is_default, verify};
use crate::protocol::json;

/// `purpose`, and `sub`, of a provisioning JWT.
const PURPOSE: &str = "choria_provisioning";

/// A provisioning JWT whose signature, dates and purpose were checked.
#[derive(Clone)]
pub struct ProvisioningToken {
    claims: Claims,
    standard: Standard,
}

impl ProvisioningToken {
    /// Checks `text`, the token as a node sent it, with the site's key at `now`, in seconds since 1970.
    ///
    /// # Errors
    ///
    /// [`Error`], the first check that fails. The token must be signed by `key` itself: chain issuers do not count here.
    ///
    /// Source: `ParseProvisioningToken` in choria-io/tokens.
    pub fn verify(text: &str, key: &VerifyKey, now: i64) -> Result<ProvisioningToken, Error> {
        if text.trim().is_empty() {
            return Err(Error::Missing);
        }
        let Token { own: mut claims, standard } =
            verify::<Claims>(text, key, now).map_err(Error::Token)?;

        let purpose = match standard.purpose.as_str() {
            "" => standard.sub.as_str(),
            purpose => purpose,
        };
        if purpose != PURPOSE {
            return Err(Error::Purpose);
        }
        if claims.ou.is_empty() {
            claims.ou = DEFAULT_ORGANIZATION.to_owned();
        }
        if !standard.tcs.is_empty() && standard.is_issuer_expired(now) {
            return Err(Error::IssuerExpired);
        }
        Ok(ProvisioningToken { claims, standard })
    }

    /// The verified claims as one JSON object, for the helper: order and omissions are those of the original, numbers in `extensions` keep
    /// their digits.
    ///
    /// # Errors
    ///
    /// None that a token which was read from JSON can cause; the type says otherwise.
    pub fn claims_json(&self) -> Result<Box<RawValue>, serde_json::Error> {
        #[derive(Serialize)]
        struct Flat<'a> {
            #[serde(flatten)]
            claims: &'a Claims,
            #[serde(flatten)]
            standard: &'a Standard,
        }
        serde_json::value::to_raw_value(&Flat { claims: &self.claims, standard: &self.standard })
    }

    /// The token's id, empty if it has none.
    pub fn id(&self) -> &str {
        &self.standard.jti
    }

    /// When it stops being valid, in seconds since 1970; without, it never does.
    pub fn expires(&self) -> Option<i64> {
        self.standard.exp
    }

    /// The organization the token belongs to.
    pub fn organization(&self) -> &str {
        &self.claims.ou
    }

    /// What is strange about it, when `provisioning_token` is the one we send to nodes.
    pub fn doubts(&self, provisioning_token: &str) -> Vec<Doubt> {
        let mut doubts = Vec::new();
        if self.standard.exp.is_none() {
            doubts.push(Doubt::NeverExpires);
        }
        if !self.claims.cht.is_empty() && self.claims.cht != provisioning_token {
            doubts.push(Doubt::OtherToken);
        }
        doubts
    }

    /// What is strange about it, when its holder gets a server JWT of the organization `ours`.
    pub fn organization_doubt(&self, ours: &str) -> Option<Doubt> {
        (ours != self.claims.ou).then(|| Doubt::OtherOrganization {
            theirs: json::excerpt(&self.claims.ou, 100),
            ours: ours.to_owned(),
        })
    }

    /// Whether nodes that hold this token provision unless their configuration says otherwise.
    pub fn is_provisioning_default(&self) -> bool {
        self.claims.chpd
    }
}

/// The claims hold the provisioning token and the broker's password.
impl fmt::Debug for ProvisioningToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ProvisioningToken").field("id", &self.id()).finish_non_exhaustive()
    }
}

/// The claims of a provisioning JWT, in the order Choria writes them.
#[derive(Clone, Default, Serialize, Deserialize)]
#[serde(default)]
struct Claims {
    #[serde(deserialize_with = "null_is_default")]
    cht: String,
    #[serde(deserialize_with = "null_is_default")]
    chs: bool,
    #[serde(deserialize_with = "null_is_default", skip_serializing_if = "String::is_empty")]
    chu: String,
    #[serde(deserialize_with = "null_is_default", skip_serializing_if = "String::is_empty")]
    chsrv: String,
    #[serde(deserialize_with = "null_is_default")]
    chpd: bool,
    #[serde(deserialize_with = "null_is_default", skip_serializing_if = "String::is_empty")]
    chrd: String,
    #[serde(deserialize_with = "null_is_default", skip_serializing_if = "String::is_empty")]
    chf: String,
    #[serde(deserialize_with = "null_is_default", skip_serializing_if = "String::is_empty")]
    chusr: String,
    #[serde(deserialize_with = "null_is_default", skip_serializing_if = "String::is_empty")]
    chpwd: String,
    #[serde(deserialize_with = "sorted_object")]
    extensions: Option<Box<RawValue>>,
    #[serde(deserialize_with = "null_is_default", skip_serializing_if = "String::is_empty")]
    ou: String,
    #[serde(deserialize_with = "null_is_default", skip_serializing_if = "is_false")]
    v2: bool,
    #[serde(deserialize_with = "null_is_default", skip_serializing_if = "is_false")]
    update: bool,
}

/// An object as Go would write it again.
fn sorted_object<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<Box<RawValue>>, D::Error> {
    let Some(value) = Option::<Box<RawValue>>::deserialize(deserializer)? else { return Ok(None) };
    let fields = json::fields(&value).map_err(D::Error::custom)?;
    let sorted = json::sorted(&fields).map_err(D::Error::custom)?;
    RawValue::from_string(sorted).map(Some).map_err(D::Error::custom)
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "the signature is serde's")]
fn is_false(flag: &bool) -> bool {
    !flag
}

/// What is strange about a provisioning JWT, and no reason to refuse it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Doubt {
    /// It is valid for ever.
    NeverExpires,
    /// It names another provisioning token than ours, which the node took all the same.
    OtherToken,
    /// It belongs to another organization than the server JWT that the node will get.
    OtherOrganization {
        /// The one it names.
        theirs: String,
        /// The one we sign for.
        ours: String,
    },
}

impl fmt::Display for Doubt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Doubt::NeverExpires => {
                f.write_str("it never expires, so whoever gets hold of it can use it for ever")
            }
            Doubt::OtherToken => f.write_str("it is for another provisioning token than `token`"),
            Doubt::OtherOrganization { theirs, ours } => {
                write!(f, "it is of organization {theirs:?}, and server JWTs are of {ours:?}")
            }
        }
    }
}

/// Why a node's provisioning JWT was refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Error {
    /// The node has none.
    Missing,
    /// It is no token, or not a valid one.
    Token(super::Error),
    /// It is a token for something else.
    Purpose,
    /// The issuer it hangs on has expired, or is not named.
    IssuerExpired,
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Error::Missing => "no JWT received",
            Error::Token(_) => "could not parse provisioner token",
            Error::Purpose => "not a provisioning token",
            Error::IssuerExpired => "token is expired",
        })
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Error::Token(source) => Some(source),
            Error::Missing | Error::Purpose | Error::IssuerExpired => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::error::Error as _;

    use base64::Engine as _;
    use base64::engine::general_purpose::URL_SAFE_NO_PAD;

    use super::Doubt;
    use super::ProvisioningToken;
    use crate::jwt::VerifyKey;
    use crate::jwt::testing::{self, NOW};
    use crate::protocol::json::hostile;

    const MINIMAL: &str = r#"{"purpose":"choria_provisioning"}"#;

    #[test]
    fn takes_the_recorded_tokens_and_gives_the_helper_what_the_original_gave() {
        for (folder, key) in [
            ("insecure", "jwt-signer.pem"),
            ("x509", "jwt-signer.pem"),
            ("issuer", "issuer.public"),
        ] {
            let key = VerifyKey::from_file(&testing::recorded(&format!("{folder}/{key}"))).unwrap();
            let text = testing::recorded(&format!("{folder}/provisioning.jwt"));
            for text in [text.clone(), format!("{text}\n"), format!(" \r\n{text}\r\n")] {
                let token = ProvisioningToken::verify(&text, &key, NOW).unwrap();

                let input = testing::recorded(&format!("{folder}/helper-input.json"));
                let input: Input<'_> = serde_json::from_str(&input).unwrap();
                let compact = input.jwt.get().replace("\": ", "\":").replace(", \"", ",\"");
                assert_eq!(token.claims_json().unwrap().get(), compact);
            }
        }
    }

    #[derive(serde::Deserialize)]
    struct Input<'a> {
        #[serde(borrow)]
        jwt: &'a serde_json::value::RawValue,
    }

    #[test]
    fn takes_a_token_signed_by_the_organization_issuer() {
        let token = ProvisioningToken::verify(BY_ISSUER, &testing::ed25519_key(), NOW).unwrap();
        assert_eq!(token.claims_json().unwrap().get(), BY_ISSUER_CLAIMS);
        assert_eq!(token.id(), "2yY8AC2VfDX9ZgoLcbi2m15qhf9");
        assert_eq!(token.organization(), "choria");
        assert_eq!(token.expires(), Some(2_051_222_400));
        assert!(token.is_provisioning_default());
        assert!(!format!("{token:?}").contains("s3cret"));
    }

    #[test]
    fn doubts_what_the_original_takes_without_a_word() {
        let token = ProvisioningToken::verify(BY_ISSUER, &testing::ed25519_key(), NOW).unwrap();
        assert_eq!(token.doubts("s3cret"), []);
        assert_eq!(token.doubts("other"), [Doubt::OtherToken]);
        assert_eq!(token.doubts(""), [Doubt::OtherToken]);
        assert_eq!(token.organization_doubt("choria"), None);
        let (theirs, ours) = ("choria".to_owned(), "acme".to_owned());
        let other = Doubt::OtherOrganization { theirs, ours };
        assert_eq!(token.organization_doubt("acme"), Some(other));
        let bare = testing::ed25519(
            r#"{"alg":"EdDSA","typ":"JWT"}"#,
            r#"{"purpose":"choria_provisioning"}"#,
        );
        let token = ProvisioningToken::verify(&bare, &testing::ed25519_key(), NOW).unwrap();
        assert_eq!(token.doubts("s3cret"), [Doubt::NeverExpires]);
    }

    #[test]
    fn refuses_wrong_keys_and_other_tokens() {
        let chain_issuer = "29acbae141bccaf0b22e1a94d34d0bc7361e526d0bfe12c89794bc9322966dd7";
        check_with(
            BY_ISSUER,
            &VerifyKey::from_hex(chain_issuer).unwrap(),
            "could not parse provisioner token: token signature is invalid: ed25519: verification error",
        );
        check_with(
            BY_ISSUER,
            &testing::rsa_key(),
            "could not parse provisioner token: token is unverifiable: error while executing keyfunc: ed25519 public key required",
        );
        check(testing::SIGNER, "not a provisioning token");
        check("", "no JWT received");
        check("\n", "no JWT received");
        check(
            &format!("{BY_ISSUER}.{BY_ISSUER}"),
            "could not parse provisioner token: token is malformed: token contains an invalid number of segments",
        );
        check(
            "eyJhbGciOiJub25lIn0.e30.",
            "could not parse provisioner token: token signature is invalid: signing method none is invalid",
        );
    }

    #[test]
    fn refuses_tokens_before_and_after_their_time() {
        let key = testing::ed25519_key();
        let at = |now| ProvisioningToken::verify(BY_ISSUER, &key, now).map(|_| ()).map_err(text);
        let claims = "could not parse provisioner token: token has invalid claims:";
        assert_eq!(at(1_749_999_999), Err(format!("{claims} token is not valid yet")));
        assert_eq!(at(1_750_000_000), Ok(()));
        assert_eq!(at(2_051_222_399), Ok(()));
        assert_eq!(at(2_051_222_400), Err(format!("{claims} token is expired")));
    }

    #[test]
    fn takes_the_subject_for_a_purpose_that_is_not_given() {
        read(&signed(r#"{"sub":"choria_provisioning"}"#)).unwrap();
        read(&signed(r#"{"purpose":null,"sub":"choria_provisioning"}"#)).unwrap();
        check(&signed("{}"), "not a provisioning token");
        check(&signed(r#"{"sub":"choria_server"}"#), "not a provisioning token");
        check(
            &signed(r#"{"purpose":"choria_server","sub":"choria_provisioning"}"#),
            "not a provisioning token",
        );
    }

    #[test]
    fn wants_an_unexpired_issuer_for_a_token_on_a_trust_chain() {
        let chained = |more: &str| {
            signed(&format!(r#"{{"purpose":"choria_provisioning","tcs":"aa"{more}}}"#))
        };
        read(&chained(&format!(r#","iss":"C-a.b","issexp":{NOW}"#))).unwrap();
        for more in [
            String::new(),
            r#","iss":"C-a.b""#.to_owned(),
            format!(r#","iss":"C-a.b","issexp":{}"#, NOW - 1),
            format!(r#","iss":"I-ab","issexp":{NOW}"#),
            format!(r#","issexp":{NOW}"#),
        ] {
            check(&chained(&more), "token is expired");
        }
    }

    #[test]
    fn writes_claims_in_order_leaves_out_empty_ones_and_keeps_digits() {
        let json = |claims: &str| read(&signed(claims)).unwrap().claims_json().unwrap().to_string();
        assert_eq!(
            json(MINIMAL),
            r#"{"cht":"","chs":false,"chpd":false,"extensions":null,"ou":"choria","purpose":"choria_provisioning"}"#
        );
        assert_eq!(
            json(
                r#"{"jti":"i","iat":1.5,"nbf":1,"exp":1e10,"aud":"a","sub":"s","iss":"t","issexp":5,"public_key":"p",
                    "purpose":"choria_provisioning","update":true,"v2":true,"ou":"o","unknown":1,
                    "extensions":{"z":12345678901234567890123,"a":{"y":1.00,"b":[null,"\u0041"]}},
                    "chpwd":"w","chusr":"u","chf":"f","chrd":"r","chpd":true,"chsrv":"v","chu":"n","chs":true,"cht":"c"}"#
            ),
            concat!(
                r#"{"cht":"c","chs":true,"chu":"n","chsrv":"v","chpd":true,"chrd":"r","chf":"f","chusr":"u","chpwd":"w","#,
                r#""extensions":{"a":{"b":[null,"A"],"y":1.00},"z":12345678901234567890123},"ou":"o","v2":true,"update":true,"#,
                r#""purpose":"choria_provisioning","public_key":"p","issexp":5,"iss":"t","sub":"s","aud":["a"],"#,
                r#""exp":10000000000,"nbf":1,"iat":1,"jti":"i"}"#
            )
        );
        // Nothing given, whatever way it is written.
        assert_eq!(
            json(
                r#"{"purpose":"choria_provisioning","v2":false,"chu":null,"aud":[],"ou":"","chs":null}"#
            ),
            json(MINIMAL)
        );
    }

    #[test]
    fn refuses_claims_of_the_wrong_type() {
        for claim in [
            r#""cht":1"#,
            r#""chs":"yes""#,
            r#""chpd":0"#,
            r#""v2":"""#,
            r#""extensions":[]"#,
            r#""extensions":"x""#,
            r#""ou":{}"#,
            r#""ou":"a","ou":"b""#,
        ] {
            let error = read(&signed(&format!(r#"{{"purpose":"choria_provisioning",{claim}}}"#)));
            let text = text(error.unwrap_err());
            let expected = "could not parse provisioner token: token is malformed: could not JSON decode claim: ";
            assert!(text.starts_with(expected), "{claim}: {text}");
        }
        let deep =
            format!(r#"{{"extensions":{{"a":{}{}}}}}"#, "[".repeat(10_000), "]".repeat(10_000));
        read(&signed(&deep)).unwrap_err();
    }

    #[test]
    fn a_token_that_was_right_before_still_has_its_time() {
        let token = signed(r#"{"purpose":"choria_provisioning","nbf":1000,"exp":2000}"#);
        let key = testing::ed25519_key();
        for (now, is_taken) in [(1500, true), (2000, false), (1999, true), (999, false)] {
            let result = ProvisioningToken::verify(&token, &key.clone(), now);
            assert_eq!(result.is_ok(), is_taken, "at {now}");
        }
    }

    #[test]
    fn never_takes_a_changed_token() {
        let mut random = fastrand::Rng::with_seed(7);
        for (file, key) in [
            ("insecure/provisioning.jwt", testing::rsa_key()),
            (
                "issuer/provisioning.jwt",
                VerifyKey::from_file(&testing::recorded("issuer/issuer.public")).unwrap(),
            ),
        ] {
            let token = testing::recorded(file);
            for _ in 0..2_000 {
                // The key remembers it, and must not take another one for it.
                ProvisioningToken::verify(&token, &key, NOW).unwrap();
                let mut changed = token.trim().as_bytes().to_vec();
                let at = random.usize(..changed.len());
                changed[at] ^= 1 << random.u8(..8);
                if random.bool() {
                    changed.truncate(random.usize(..changed.len()));
                }
                let changed = String::from_utf8_lossy(&changed);
                let result = ProvisioningToken::verify(&changed, &key, NOW);
                // A last letter that becomes white space and falls away is the only thing a flip may do unseen.
                assert!(result.is_err() || changed.trim() == token.trim(), "{changed}");
            }
        }
    }

    fn signed(claims: &str) -> String {
        testing::ed25519(r#"{"alg":"EdDSA","typ":"JWT"}"#, claims)
    }

    fn read(token: &str) -> Result<ProvisioningToken, super::Error> {
        ProvisioningToken::verify(token, &testing::ed25519_key(), NOW)
    }

    #[track_caller]
    fn check(token: &str, expected: &str) {
        check_with(token, &testing::ed25519_key(), expected);
    }

    #[track_caller]
    fn check_with(token: &str, key: &VerifyKey, expected: &str) {
        assert_eq!(text(ProvisioningToken::verify(token, key, NOW).unwrap_err()), expected);
    }

    fn text(error: super::Error) -> String {
        match error.source() {
            Some(source) => format!("{error}: {source}"),
            None => error.to_string(),
        }
    }

    /// A provisioning JWT signed by the key with the seed `00 01 02 … 1f`.
    const BY_ISSUER: &str = "eyJhbGciOiJFZERTQSIsInR5cCI6IkpXVCJ9.eyJjaHQiOiJzM2NyZXQiLCJjaHMiOmZhbHNlLCJjaHUiOiJuYXRzOi8vYnJva2VyLmV4YW1wbGUubmV0OjQyMjIiLCJjaHBkIjp0cnVlLCJleHRlbnNpb25zIjpudWxsLCJvdSI6ImNob3JpYSIsInYyIjp0cnVlLCJwdXJwb3NlIjoiY2hvcmlhX3Byb3Zpc2lvbmluZyIsImlzcyI6IkNob3JpYSBUb2tlbnMgUGFja2FnZSIsInN1YiI6ImNob3JpYV9wcm92aXNpb25pbmciLCJleHAiOjIwNTEyMjI0MDAsIm5iZiI6MTc1MDAwMDAwMCwiaWF0IjoxNzUwMDAwMDAwLCJqdGkiOiIyeVk4QUMyVmZEWDlaZ29MY2JpMm0xNXFoZjkifQ.ldsXMsAcxaREwfQFmrPyq7etDsKG37shFzsRs8aCmbM0IzRyXIPsDVj8vTPF4Z6FRvGO-HHiHBjObNgBdlBQCg";
    const BY_ISSUER_CLAIMS: &str = r#"{"cht":"s3cret","chs":false,"chu":"nats://broker.example.net:4222","chpd":true,"extensions":null,"ou":"choria","v2":true,"purpose":"choria_provisioning","iss":"Choria Tokens Package","sub":"choria_provisioning","exp":2051222400,"nbf":1750000000,"iat":1750000000,"jti":"2yY8AC2VfDX9ZgoLcbi2m15qhf9"}"#;

    #[test]
    fn survives_any_nesting_before_the_signature_is_checked() {
        hostile::on_a_small_stack(|| {
            let key = VerifyKey::from_hex(testing::ISSUER_PUBLIC).unwrap();
            for value in hostile::values(40_000) {
                let mut parts = vec![(format!(r#"{{"alg":{value}}}"#), MINIMAL.to_owned())];
                for claim in ["extensions", "aud", "exp", "cht", "chs", "other"] {
                    let claims = format!(r#"{{"{claim}":{value}}}"#);
                    parts.push((r#"{"alg":"EdDSA"}"#.to_owned(), claims));
                }
                for (header, claims) in parts {
                    let [header, claims] =
                        [header, claims].map(|part| URL_SAFE_NO_PAD.encode(part));
                    let token = format!("{header}.{claims}.AAAA");
                    ProvisioningToken::verify(&token, &key, NOW).unwrap_err();
                }
            }
        });
    }
}
