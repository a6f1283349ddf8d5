//! Signing and checking JWTs: signature, dates and the claims all of them share.
//!
//! A token is parsed once, and only a verified one leaves this module; our own, whose issuer's key we may not have, is the exception. Order of the checks and their texts are those of Choria's own
//! reader (`ParseToken` in choria-io/tokens over golang-jwt), so that operators find the messages they know. No I/O, no clock: keys and
//! time are arguments.

pub mod chain;
pub mod client;
pub(crate) mod hex;
pub mod provisioning;
pub mod server;

use std::fmt;
use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use ed25519_dalek::{Signature, Signer as _, SigningKey, VerifyingKey};
use openssl::error::ErrorStack;
use openssl::hash::MessageDigest;
use openssl::pkey::{Id, PKey, Private, Public};
use openssl::rsa::Rsa;
use openssl::sign::{Signer, Verifier};
use openssl::x509::X509;
use parking_lot::Mutex;
use serde::de::{DeserializeOwned, Error as _};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Number;
use serde_json::value::RawValue;
use zeroize::Zeroizing;

use self::hex::HexError;
use crate::pki::{pem, x509};
use crate::protocol::json;

/// Longest token we look at, in bytes. Real ones have 500 to 2,000; one that carries a trust chain and policies stays well below.
pub const TOKEN_MAX: usize = 64 * 1024;

/// Longest part of a token's content that an error repeats, in characters.
const QUOTE_MAX: usize = 200;

/// How the issuer of a token begins that the organization issuer signed; its public key follows.
const ORGANIZATION_ISSUER: &str = "I-";
/// How the issuer of a token begins that a chain issuer signed; the id and public key of that one's token follow.
const CHAIN_ISSUER: &str = "C-";
/// The organization of a token that names none.
const DEFAULT_ORGANIZATION: &str = "choria";

/// A token whose signature and dates were checked.
#[derive(Debug, Clone)]
pub struct Token<C> {
    /// The claims of this kind of token.
    pub own: C,
    /// The claims all tokens share.
    pub standard: Standard,
}

/// The claims all tokens share, in the order Choria writes them. Dates are seconds since 1970.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Standard {
    /// What the token is for.
    #[serde(deserialize_with = "null_is_default")]
    pub purpose: String,
    /// Trust chain signature.
    #[serde(deserialize_with = "null_is_default", skip_serializing_if = "String::is_empty")]
    pub tcs: String,
    /// The holder's Ed25519 public key in hex.
    #[serde(deserialize_with = "null_is_default", skip_serializing_if = "String::is_empty")]
    pub public_key: String,
    /// Expiry of the token's issuer.
    #[serde(deserialize_with = "date", skip_serializing_if = "Option::is_none")]
    pub issexp: Option<i64>,
    /// Issuer.
    #[serde(deserialize_with = "null_is_default", skip_serializing_if = "String::is_empty")]
    pub iss: String,
    /// Subject; in provisioning tokens the same as the purpose.
    #[serde(deserialize_with = "null_is_default", skip_serializing_if = "String::is_empty")]
    pub sub: String,
    /// Audience.
    #[serde(deserialize_with = "audience", skip_serializing_if = "Vec::is_empty")]
    pub aud: Vec<String>,
    /// When it stops being valid; a token without never does.
    #[serde(deserialize_with = "date", skip_serializing_if = "Option::is_none")]
    pub exp: Option<i64>,
    /// When it starts being valid.
    #[serde(deserialize_with = "date", skip_serializing_if = "Option::is_none")]
    pub nbf: Option<i64>,
    /// When it was issued.
    #[serde(deserialize_with = "date", skip_serializing_if = "Option::is_none")]
    pub iat: Option<i64>,
    /// The token's id.
    #[serde(deserialize_with = "null_is_default", skip_serializing_if = "String::is_empty")]
    pub jti: String,
}

/// Checks signature and dates of `text` and reads its claims.
///
/// White space around the token is ignored. `now` is in seconds since 1970; there is no leeway. A token without `exp` never expires, `iat` is
/// not looked at, and neither is anything in the header but `alg`.
///
/// # Errors
///
/// [`Error`], the first check that fails.
pub fn verify<C: DeserializeOwned>(
    text: &str,
    key: &VerifyKey,
    now: i64,
) -> Result<Token<C>, Error> {
    let parsed = Parsed::read(text)?;
    parsed.check_signature(key)?;
    parsed.token.standard.check_dates(now)?;
    Ok(parsed.token)
}

/// A token whose parts were read and not checked.
struct Parsed<'a, C> {
    token: Token<C>,
    algorithm: &'static str,
    signed: &'a str,
    signature: Vec<u8>,
}

impl<'a, C: DeserializeOwned> Parsed<'a, C> {
    fn read(text: &'a str) -> Result<Parsed<'a, C>, Error> {
        let text = text.trim();
        if text.len() > TOKEN_MAX {
            return Err(Error::Malformed(format!("token has more than {TOKEN_MAX} bytes")));
        }
        let mut segments = text.split('.');
        let (Some(header), Some(claims), Some(signature), None) =
            (segments.next(), segments.next(), segments.next(), segments.next())
        else {
            return Err(Error::Malformed(
                "token contains an invalid number of segments".to_owned(),
            ));
        };

        let header: Header = object(&decode(header, "header")?, "header")?;
        let claims = decode(claims, "claim")?;
        let token =
            Token { own: object::<C>(&claims, "claim")?, standard: object(&claims, "claim")? };
        let algorithm = header.algorithm()?;
        let signature = decode(signature, "signature")?;
        let signed = text.rsplit_once('.').map_or("", |(signed, _)| signed);
        Ok(Parsed { token, algorithm, signed, signature })
    }

    fn check_signature(&self, key: &VerifyKey) -> Result<(), Error> {
        let algorithm = Algorithm::accepted(self.algorithm)?;
        key.check(algorithm, self.signed.as_bytes(), &self.signature)
    }

    /// Whether `key` is of the kind that the token's algorithm needs, whatever the signature.
    fn check_kind(&self, key: &VerifyKey) -> Result<(), Error> {
        key.fits(Algorithm::accepted(self.algorithm)?)
    }
}

impl Standard {
    /// A token with a trust chain signature is good only as long as its issuer, up to and including that second.
    ///
    /// Source: `IsExpired` of `StandardClaims` in choria-io/tokens.
    fn is_issuer_expired(&self, now: i64) -> bool {
        match self.issexp {
            Some(issuer) if self.iss.starts_with(CHAIN_ISSUER) => {
                now > issuer.min(self.exp.unwrap_or(issuer))
            }
            _ => true,
        }
    }

    fn check_dates(&self, now: i64) -> Result<(), Error> {
        let expired = self.exp.is_some_and(|exp| now >= exp);
        let early = self.nbf.is_some_and(|nbf| now < nbf);
        match (expired, early) {
            (false, false) => Ok(()),
            (true, false) => Err(Error::Expired),
            (false, true) => Err(Error::NotYetValid),
            (true, true) => Err(Error::NeverValid),
        }
    }
}

/// A public key that tokens are checked with.
///
/// It remembers the last token whose signature it found right, and takes the same bytes again without a calculation: one
/// token usually serves a fleet, and what was signed stays signed. Dates and claims are looked at each time.
#[derive(Debug, Clone)]
pub struct VerifyKey {
    kind: VerifyKind,
    /// Shared by all copies of the key.
    last: Arc<Mutex<Option<Signed>>>,
}

/// Bytes, and a right signature of them.
struct Signed {
    bytes: Box<[u8]>,
    signature: Box<[u8]>,
}

impl fmt::Debug for Signed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

/// What kind of key it is.
#[derive(Debug, Clone)]
pub enum VerifyKind {
    /// For `EdDSA`.
    Ed25519(Box<VerifyingKey>),
    /// For `RS256`, `RS384` and `RS512`.
    Rsa(PKey<Public>),
}

impl VerifyKey {
    /// Reads the content of a key file: a PEM public key or certificate with an RSA key, or an Ed25519 public key in hex.
    ///
    /// A certificate's own dates and issuer are not looked at. White space around the content is ignored, which the original does not do
    /// for hex.
    ///
    /// # Errors
    ///
    /// [`KeyError`], if it is neither.
    ///
    /// Source: `readRSAOrED25519PublicData` in choria-io/tokens.
    pub fn from_file(content: &str) -> Result<VerifyKey, KeyError> {
        let content = content.trim();
        if !content.starts_with("-----BEGIN ") {
            return VerifyKey::from_hex(content);
        }
        let block = pem::first_block(content).map_err(|error| KeyError::Pem(error.to_string()))?;
        let key = PKey::public_key_from_der(&block.der)
            .or_else(|_| {
                X509::from_der(&block.der).and_then(|certificate| certificate.public_key())
            })
            .or_else(|_| Rsa::public_key_from_der_pkcs1(&block.der).and_then(PKey::from_rsa))
            .map_err(|_| KeyError::Pem("neither a public key nor a certificate".to_owned()))?;
        match key.id() {
            Id::RSA => Ok(VerifyKind::Rsa(key).into()),
            _ => Err(KeyError::Pem("key is not a valid RSA public key".to_owned())),
        }
    }

    /// Reads an Ed25519 public key in hex.
    ///
    /// # Errors
    ///
    /// [`KeyError`], if `text` is not 64 hex digits or no point on the curve.
    pub fn from_hex(text: &str) -> Result<VerifyKey, KeyError> {
        let bytes = hex::decode(text.trim()).map_err(|error| match error {
            HexError::Digit(wrong) => KeyError::Hex { wrong },
            HexError::Length => KeyError::Size,
        })?;
        VerifyKey::from_ed25519(&bytes)
    }

    /// Takes the 32 bytes of an Ed25519 public key.
    ///
    /// # Errors
    ///
    /// [`KeyError::Point`], if they are no point on the curve.
    pub fn from_ed25519(
        bytes: &[u8; ed25519_dalek::PUBLIC_KEY_LENGTH],
    ) -> Result<VerifyKey, KeyError> {
        let key = VerifyingKey::from_bytes(bytes).map_err(|_| KeyError::Point)?;
        Ok(VerifyKind::Ed25519(Box::new(key)).into())
    }

    /// The key itself.
    pub fn kind(&self) -> &VerifyKind {
        &self.kind
    }

    fn fits(&self, algorithm: Algorithm) -> Result<(), Error> {
        match (algorithm, &self.kind) {
            (Algorithm::EdDsa, VerifyKind::Ed25519(_))
            | (Algorithm::Rsa(_), VerifyKind::Rsa(_)) => Ok(()),
            (Algorithm::EdDsa, VerifyKind::Rsa(_)) => Err(Error::Unverifiable(
                "error while executing keyfunc: ed25519 public key required",
            )),
            (Algorithm::Rsa(_), VerifyKind::Ed25519(_)) => {
                Err(Error::Unverifiable("error while executing keyfunc: rsa public key required"))
            }
        }
    }

    /// Checks `signature` of `bytes`, the header of which names the algorithm.
    fn check(&self, algorithm: Algorithm, bytes: &[u8], signature: &[u8]) -> Result<(), Error> {
        self.fits(algorithm)?;
        let is_last = |last: &Signed| *last.bytes == *bytes && *last.signature == *signature;
        if self.last.lock().as_ref().is_some_and(is_last) {
            return Ok(());
        }
        self.kind.check(algorithm, bytes, signature)?;
        *self.last.lock() = Some(Signed { bytes: bytes.into(), signature: signature.into() });
        Ok(())
    }
}

impl From<VerifyKind> for VerifyKey {
    fn from(kind: VerifyKind) -> VerifyKey {
        VerifyKey { kind, last: Arc::default() }
    }
}

impl VerifyKind {
    fn check(&self, algorithm: Algorithm, signed: &[u8], signature: &[u8]) -> Result<(), Error> {
        match (algorithm, self) {
            (Algorithm::EdDsa, VerifyKind::Ed25519(key)) => Signature::from_slice(signature)
                .and_then(|signature| key.verify_strict(signed, &signature))
                .map_err(|_| Error::BadSignature("ed25519: verification error".to_owned())),
            (Algorithm::Rsa(digest), VerifyKind::Rsa(key)) => {
                let verified = Verifier::new(digest, key)
                    .and_then(|mut verifier| verifier.verify_oneshot(signature, signed));
                match verified {
                    Ok(true) => Ok(()),
                    // OpenSSL reports some wrong signatures as an error: both mean the same here.
                    Ok(false) | Err(_) => {
                        Err(Error::BadSignature("crypto/rsa: verification error".to_owned()))
                    }
                }
            }
            (Algorithm::EdDsa, VerifyKind::Rsa(_))
            | (Algorithm::Rsa(_), VerifyKind::Ed25519(_)) => {
                unreachable!("the key fits the algorithm")
            }
        }
    }
}

/// A private key that signs tokens.
#[derive(Debug, Clone)]
pub enum SignKey {
    /// Signs with `EdDSA`.
    Ed25519(Box<SigningKey>),
    /// Signs with `RS256`.
    Rsa(PKey<Private>),
}

impl SignKey {
    /// Reads the content of a key file: an RSA key in PEM, or an Ed25519 seed in hex.
    ///
    /// # Errors
    ///
    /// [`SignKeyError`], if it is neither.
    ///
    /// Source: `SignTokenWithKeyFile` in choria-io/tokens, which wants a seed without a newline behind it.
    pub fn from_file(content: &str) -> Result<SignKey, SignKeyError> {
        if content.contains("-----BEGIN ") {
            return x509::private_key(content).map(SignKey::Rsa).map_err(SignKeyError::Rsa);
        }
        seed(content).map(|key| SignKey::Ed25519(Box::new(key)))
    }

    /// The token that holds `own` and `standard`.
    ///
    /// # Errors
    ///
    /// OpenSSL's, for an RSA key that is too short.
    fn sign<C: Serialize>(&self, own: &C, standard: &Standard) -> Result<String, ErrorStack> {
        #[derive(Serialize)]
        struct Flat<'a, C> {
            #[serde(flatten)]
            own: &'a C,
            #[serde(flatten)]
            standard: &'a Standard,
        }
        let header = match self {
            SignKey::Ed25519(_) => r#"{"alg":"EdDSA","typ":"JWT"}"#,
            SignKey::Rsa(_) => r#"{"alg":"RS256","typ":"JWT"}"#,
        };
        let claims = serde_json::to_vec(&Flat { own, standard })
            .expect("texts, numbers, flags and lists can be written as JSON");
        let mut token = URL_SAFE_NO_PAD.encode(header);
        token.push('.');
        URL_SAFE_NO_PAD.encode_string(claims, &mut token);
        let signature = match self {
            SignKey::Ed25519(key) => key.sign(token.as_bytes()).to_vec(),
            SignKey::Rsa(key) => {
                Signer::new(MessageDigest::sha256(), key)?.sign_oneshot_to_vec(token.as_bytes())?
            }
        };
        token.push('.');
        URL_SAFE_NO_PAD.encode_string(signature, &mut token);
        Ok(token)
    }
}

/// Reads the content of a seed file: 32 bytes in hex. White space around it is ignored, which the original does not do.
///
/// # Errors
///
/// [`SignKeyError`]; what was found is never repeated.
pub fn seed(content: &str) -> Result<SigningKey, SignKeyError> {
    let content = content.trim();
    if content.is_empty() {
        return Err(SignKeyError::Empty);
    }
    if content.starts_with("-----BEGIN ") {
        return Err(SignKeyError::Pem);
    }
    let seed = hex::decode(content).map(Zeroizing::new).map_err(|error| match error {
        HexError::Digit(_) => SignKeyError::Hex,
        HexError::Length => SignKeyError::Size { digits: content.len() },
    })?;
    Ok(SigningKey::from_bytes(&seed))
}

/// The signature algorithms we accept.
#[derive(Clone, Copy)]
enum Algorithm {
    Rsa(MessageDigest),
    EdDsa,
}

impl Algorithm {
    fn accepted(name: &str) -> Result<Algorithm, Error> {
        match name {
            "RS256" => Ok(Algorithm::Rsa(MessageDigest::sha256())),
            "RS384" => Ok(Algorithm::Rsa(MessageDigest::sha384())),
            "RS512" => Ok(Algorithm::Rsa(MessageDigest::sha512())),
            "EdDSA" => Ok(Algorithm::EdDsa),
            _ => Err(Error::BadSignature(format!("signing method {name} is invalid"))),
        }
    }
}

#[derive(Deserialize)]
struct Header {
    alg: Option<Box<RawValue>>,
}

impl Header {
    /// The algorithm's name, if golang-jwt knows it. Which of them are accepted is decided later, as there.
    fn algorithm(&self) -> Result<&'static str, Error> {
        const KNOWN: [&str; 14] = [
            "RS256", "RS384", "RS512", "EdDSA", "HS256", "HS384", "HS512", "PS256", "PS384",
            "PS512", "ES256", "ES384", "ES512", "none",
        ];
        let name = self.alg.as_deref().and_then(|alg| json::text(alg).ok());
        let name = name.ok_or(Error::Unverifiable("signing method (alg) is unspecified"))?;
        KNOWN
            .into_iter()
            .find(|known| *known == name)
            .ok_or(Error::Unverifiable("signing method (alg) is unavailable"))
    }
}

fn decode(segment: &str, what: &str) -> Result<Vec<u8>, Error> {
    URL_SAFE_NO_PAD
        .decode(segment)
        .map_err(|error| Error::Malformed(format!("could not base64 decode {what}: {error}")))
}

/// Reads one JSON object. serde would also read a struct from a list, and takes a key given twice for an error, which Go does not.
fn object<T: DeserializeOwned>(json: &[u8], what: &str) -> Result<T, Error> {
    let malformed = |error: &dyn fmt::Display| {
        let error: String = error.to_string().chars().take(QUOTE_MAX).collect();
        Error::Malformed(format!("could not JSON decode {what}: {error}"))
    };
    if json.trim_ascii_start().first() != Some(&b'{') {
        return Err(malformed(&"not an object"));
    }
    serde_json::from_slice(json).map_err(|error| malformed(&error))
}

/// Go reads `null` as nothing given.
fn null_is_default<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: Default + Deserialize<'de>,
{
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}

/// A date is a number of seconds.
fn date<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<i64>, D::Error> {
    let Some(number) = Option::<Number>::deserialize(deserializer)? else { return Ok(None) };
    seconds(&number).map(Some).ok_or_else(|| serde::de::Error::custom("date is out of range"))
}

/// The seconds that `number` stands for; a fraction is dropped.
pub(crate) fn seconds(number: &Number) -> Option<i64> {
    // Beyond this a float no longer counts seconds.
    const EXACT_MAX: f64 = 9_007_199_254_740_992.0;

    if let Some(seconds) = number.as_i64() {
        return Some(seconds);
    }
    let seconds = number.as_f64().filter(|seconds| seconds.abs() <= EXACT_MAX)?;
    #[expect(clippy::cast_possible_truncation, reason = "dropping the fraction is the rule")]
    Some(seconds as i64)
}

/// An audience is one text or a list of texts.
fn audience<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<String>, D::Error> {
    let Some(value) = Option::<Box<RawValue>>::deserialize(deserializer)? else {
        return Ok(Vec::new());
    };
    let texts = match value.get().starts_with('"') {
        true => json::text(&value).map(|one| vec![one.into_owned()]),
        false => serde_json::from_str(value.get()),
    };
    texts.map_err(D::Error::custom)
}

/// Why a token was not accepted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Error {
    /// It is no JWT, or a part of it does not decode.
    Malformed(String),
    /// Its algorithm is unknown, or our key is of another kind.
    Unverifiable(&'static str),
    /// It does not hang on the trust chain that starts at our key.
    Chain(chain::Error),
    /// The signature does not fit, or is of a kind we never accept.
    BadSignature(String),
    /// Its time is over.
    Expired,
    /// Its time has not come.
    NotYetValid,
    /// It expired before it became valid.
    NeverValid,
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Malformed(what) => write!(f, "token is malformed: {what}"),
            Error::Unverifiable(what) => write!(f, "token is unverifiable: {what}"),
            Error::Chain(what) => write!(
                f,
                "token is unverifiable: error while executing keyfunc: not signed by issuer: {what}"
            ),
            Error::BadSignature(what) => write!(f, "token signature is invalid: {what}"),
            Error::Expired => f.write_str("token has invalid claims: token is expired"),
            Error::NotYetValid => f.write_str("token has invalid claims: token is not valid yet"),
            Error::NeverValid => {
                f.write_str("token has invalid claims: token is expired, token is not valid yet")
            }
        }
    }
}

impl std::error::Error for Error {}

/// Why a text is no public key for tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum KeyError {
    /// A PEM text without a usable RSA key.
    Pem(String),
    /// Not hex.
    Hex {
        /// The first character that is no hex digit.
        wrong: char,
    },
    /// Hex of another length than 64.
    Size,
    /// 32 bytes that are no point on the curve.
    Point,
}

impl fmt::Display for KeyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            KeyError::Pem(what) => write!(f, "could not parse validation certificate: {what}"),
            KeyError::Hex { wrong } => {
                write!(f, "could not parse ed25519 public data: invalid byte: {wrong:?}")
            }
            KeyError::Size => f.write_str("invalid ed25519 public key size"),
            KeyError::Point => f.write_str("invalid ed25519 public key"),
        }
    }
}

impl std::error::Error for KeyError {}

/// Why a text is no private key for tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SignKeyError {
    /// A PEM text without a usable RSA key.
    Rsa(x509::Error),
    /// Nothing at all.
    Empty,
    /// A PEM text where only a seed will do.
    Pem,
    /// A seed that is not hex.
    Hex,
    /// A seed of another length.
    Size {
        /// How many digits it has; 64 are right.
        digits: usize,
    },
}

impl fmt::Display for SignKeyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SignKeyError::Rsa(_) => f.write_str("could not parse signing key"),
            SignKeyError::Empty => f.write_str("the key file is empty"),
            SignKeyError::Pem => f.write_str(
                "the key file holds PEM, and an ed25519 seed of 64 hex digits is wanted here",
            ),
            SignKeyError::Hex => {
                f.write_str("invalid ed25519 seed: there is more in it than hex digits")
            }
            SignKeyError::Size { digits } => {
                write!(f, "invalid seed length: {digits} hex digits instead of 64")
            }
        }
    }
}

impl std::error::Error for SignKeyError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            SignKeyError::Rsa(source) => Some(source),
            SignKeyError::Empty
            | SignKeyError::Pem
            | SignKeyError::Hex
            | SignKeyError::Size { .. } => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use base64::Engine as _;
    use base64::engine::general_purpose::URL_SAFE_NO_PAD;
    use openssl::asn1::Asn1Time;
    use openssl::pkey::PKey;
    use openssl::rsa::Rsa;
    use openssl::x509::X509;
    use serde::Deserialize;

    use super::{
        Error, KeyError, SignKey, SignKeyError, Standard, TOKEN_MAX, Token, VerifyKey, seed, verify,
    };
    use crate::jwt::testing::{self, NOW};

    #[derive(Debug, Deserialize)]
    struct Any {}

    #[test]
    fn a_key_shows_nothing_of_the_token_it_remembers() {
        let token = testing::ed25519(r#"{"alg":"EdDSA"}"#, r#"{"jti":"b"}"#);
        let key = testing::ed25519_key();
        let before = format!("{key:?}");
        read(&token, &key).unwrap();
        let shown = format!("{key:?}");
        assert!(shown != before && shown.contains("Some(***)"), "{shown}");
    }

    #[test]
    fn checks_every_algorithm_we_accept() {
        for alg in ["RS256", "RS384", "RS512"] {
            let token = testing::rsa(&format!(r#"{{"alg":"{alg}"}}"#), r#"{"jti":"a"}"#);
            assert_eq!(read(&token, &testing::rsa_key()).unwrap().standard.jti, "a");
        }
        let token = testing::ed25519(r#"{"alg":"EdDSA"}"#, r#"{"jti":"b"}"#);
        assert_eq!(read(&token, &testing::ed25519_key()).unwrap().standard.jti, "b");
    }

    #[test]
    fn refuses_every_other_algorithm() {
        for alg in ["none", "HS256", "HS512", "PS256", "ES256"] {
            check(
                &testing::ed25519(&format!(r#"{{"alg":"{alg}"}}"#), "{}"),
                &format!("token signature is invalid: signing method {alg} is invalid"),
            );
        }
        // As an attacker would write it: without a signature.
        check(
            "eyJhbGciOiJub25lIn0.e30.",
            "token signature is invalid: signing method none is invalid",
        );
        for header in [r#"{"alg":"None"}"#, r#"{"alg":"eddsa"}"#, r#"{"alg":"RS1"}"#] {
            check(
                &testing::ed25519(header, "{}"),
                "token is unverifiable: signing method (alg) is unavailable",
            );
        }
        for header in ["{}", r#"{"alg":null}"#, r#"{"alg":1}"#, r#"{"ALG":"EdDSA"}"#] {
            check(
                &testing::ed25519(header, "{}"),
                "token is unverifiable: signing method (alg) is unspecified",
            );
        }
    }

    #[test]
    fn wants_the_kind_of_key_the_algorithm_needs() {
        let keyfunc = "token is unverifiable: error while executing keyfunc:";
        let token = testing::ed25519(r#"{"alg":"EdDSA"}"#, "{}");
        let error = read(&token, &testing::rsa_key()).unwrap_err();
        assert_eq!(error.to_string(), format!("{keyfunc} ed25519 public key required"));

        let token = testing::rsa(r#"{"alg":"RS256"}"#, "{}");
        let error = read(&token, &testing::ed25519_key()).unwrap_err();
        assert_eq!(error.to_string(), format!("{keyfunc} rsa public key required"));
    }

    #[test]
    fn refuses_wrong_signatures() {
        let token = testing::rsa(r#"{"alg":"RS256"}"#, "{}");
        let as_384 = token.replace("eyJhbGciOiJSUzI1NiJ9", "eyJhbGciOiJSUzM4NCJ9");
        assert_ne!(token, as_384);
        for token in [as_384, token[..token.rfind('.').unwrap()].to_owned() + ".AAAA"] {
            let error = read(&token, &testing::rsa_key()).unwrap_err();
            let expected = "token signature is invalid: crypto/rsa: verification error";
            assert_eq!(error.to_string(), expected);
        }

        let token = testing::ed25519(r#"{"alg":"EdDSA"}"#, "{}");
        let bad = "token signature is invalid: ed25519: verification error";
        check(&token.replace(".e30.", ".e30K."), bad);
        check(&format!("{}.AAAA", &token[..token.rfind('.').unwrap()]), bad);
    }

    #[test]
    fn refuses_what_is_no_token() {
        let segments = "token is malformed: token contains an invalid number of segments";
        check("", segments);
        check("a.b", segments);
        check(&(testing::ed25519(r#"{"alg":"EdDSA"}"#, "{}") + ".x"), segments);

        check(
            "!.e30.",
            "token is malformed: could not base64 decode header: Invalid symbol 33, offset 0.",
        );
        check("e30=.e30.", "token is malformed: could not base64 decode header: Invalid padding");
        check(
            "e30.e3 0.",
            "token is malformed: could not base64 decode claim: Invalid symbol 32, offset 2.",
        );
        check(
            "eyJhbGciOiJFZERTQSJ9.e30.!",
            "token is malformed: could not base64 decode signature: Invalid symbol 33, offset 0.",
        );
        check("W10.e30.", "token is malformed: could not JSON decode header: not an object");
        check("e30.W10.", "token is malformed: could not JSON decode claim: not an object");
        check(
            &"A".repeat(TOKEN_MAX + 1),
            &format!("token is malformed: token has more than {TOKEN_MAX} bytes"),
        );
    }

    #[test]
    fn refuses_claims_of_the_wrong_type_and_keys_given_twice() {
        for claims in [
            r#"{"exp":"tomorrow"}"#,
            r#"{"exp":1e300}"#,
            r#"{"exp":[1]}"#,
            r#"{"nbf":true}"#,
            r#"{"jti":1}"#,
            r#"{"aud":[1]}"#,
            r#"{"exp":9999999999,"exp":1}"#,
            r#"{"exp":9999999999}{"#,
            r#"{"a":"#,
        ] {
            let token = testing::ed25519(r#"{"alg":"EdDSA"}"#, claims);
            let error = read(&token, &testing::ed25519_key()).unwrap_err();
            assert!(matches!(error, Error::Malformed(_)), "{claims}: {error}");
        }
        let long = testing::ed25519(
            r#"{"alg":"EdDSA"}"#,
            &format!(r#"{{"exp":"{}"}}"#, "x".repeat(9_000)),
        );
        let error = read(&long, &testing::ed25519_key()).unwrap_err();
        assert!(error.to_string().len() < 400, "{error}");
    }

    #[test]
    fn reads_dates_without_leeway_and_without_fraction() {
        let valid = [
            "{}".to_owned(),
            r#"{"exp":null,"nbf":null,"aud":null}"#.to_owned(),
            format!(r#"{{"exp":{}}}"#, NOW + 1),
            format!(r#"{{"exp":{}.0}}"#, NOW + 1),
            format!(r#"{{"nbf":{NOW}}}"#),
            format!(r#"{{"nbf":{NOW}.9}}"#),
            format!(r#"{{"iat":{}}}"#, NOW + 1_000),
            r#"{"exp":2e9,"aud":"one"}"#.to_owned(),
        ];
        for claims in valid {
            let token = testing::ed25519(r#"{"alg":"EdDSA"}"#, &claims);
            assert!(read(&token, &testing::ed25519_key()).is_ok(), "{claims}");
        }

        let invalid = [
            (format!(r#"{{"exp":{NOW}}}"#), Error::Expired),
            (format!(r#"{{"exp":{NOW}.9}}"#), Error::Expired),
            (r#"{"exp":0}"#.to_owned(), Error::Expired),
            (r#"{"exp":-1}"#.to_owned(), Error::Expired),
            (format!(r#"{{"nbf":{}}}"#, NOW + 1), Error::NotYetValid),
            (format!(r#"{{"exp":1,"nbf":{}}}"#, NOW + 1), Error::NeverValid),
        ];
        for (claims, expected) in invalid {
            let token = testing::ed25519(r#"{"alg":"EdDSA"}"#, &claims);
            assert_eq!(read(&token, &testing::ed25519_key()).unwrap_err(), expected, "{claims}");
        }
        assert_eq!(
            Error::NeverValid.to_string(),
            "token has invalid claims: token is expired, token is not valid yet"
        );
    }

    #[test]
    fn reads_keys_of_every_form() {
        let token = testing::rsa(r#"{"alg":"RS256"}"#, "{}");
        let private = testing::rsa_private();
        let mut certificate = X509::builder().unwrap();
        certificate.set_pubkey(&private).unwrap();
        // Long over: a certificate's own dates do not count.
        certificate.set_not_before(&Asn1Time::from_unix(0).unwrap()).unwrap();
        certificate.set_not_after(&Asn1Time::from_unix(1).unwrap()).unwrap();
        certificate.sign(&private, openssl::hash::MessageDigest::sha256()).unwrap();
        for content in [
            private.public_key_to_pem().unwrap(),
            private.rsa().unwrap().public_key_to_pem_pkcs1().unwrap(),
            certificate.build().to_pem().unwrap(),
        ] {
            let content = String::from_utf8(content).unwrap();
            for content in [content.trim_end(), &content, &format!("\n{content}\n")] {
                read(&token, &VerifyKey::from_file(content).unwrap()).unwrap();
            }
        }

        let token = testing::ed25519(r#"{"alg":"EdDSA"}"#, "{}");
        for hex in [
            testing::ISSUER_PUBLIC.to_owned(),
            testing::ISSUER_PUBLIC.to_uppercase(),
            format!("{}\r\n", testing::ISSUER_PUBLIC),
        ] {
            read(&token, &VerifyKey::from_file(&hex).unwrap()).unwrap();
        }
    }

    #[test]
    fn refuses_what_is_no_key() {
        fn check(content: &str, expected: &str) {
            let error: KeyError = VerifyKey::from_file(content).unwrap_err();
            assert_eq!(error.to_string(), expected);
        }
        let pem = "could not parse validation certificate:";
        check("", "invalid ed25519 public key size");
        check("abc", "invalid ed25519 public key size");
        check(&"0".repeat(66), "invalid ed25519 public key size");
        check("/etc/key.pem", "could not parse ed25519 public data: invalid byte: '/'");
        check(&format!("02{}", "0".repeat(62)), "invalid ed25519 public key");
        check("-----BEGIN CERTIFICATE", &format!("{pem} the PEM block has no matching end"));
        check(
            "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----",
            &format!("{pem} neither a public key nor a certificate"),
        );
        let ed25519 = PKey::generate_ed25519().unwrap().public_key_to_pem().unwrap();
        let expected = format!("{pem} key is not a valid RSA public key");
        check(&String::from_utf8(ed25519).unwrap(), &expected);
        // Only the first block counts.
        let rsa = Rsa::generate(1024).unwrap().public_key_to_pem().unwrap();
        let rsa = String::from_utf8(rsa).unwrap();
        check(
            &format!("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n{rsa}"),
            &format!("{pem} neither a public key nor a certificate"),
        );
    }

    #[test]
    fn signs_with_either_kind_of_key() {
        let standard = Standard { jti: "i".to_owned(), exp: Some(NOW + 1), ..Standard::default() };
        let own = serde_json::json!({"b": 1, "a": true});
        for (key, public, header) in [
            (
                testing::SIGNER_SEED.to_owned(),
                testing::SIGNER_PUBLIC.to_owned(),
                r#"{"alg":"EdDSA","typ":"JWT"}"#,
            ),
            (
                testing::recorded("insecure/jwt-signer.key"),
                testing::recorded("insecure/jwt-signer.pem"),
                r#"{"alg":"RS256","typ":"JWT"}"#,
            ),
        ] {
            for key in [key.clone(), format!("\n{key}\n")] {
                let token = SignKey::from_file(&key).unwrap().sign(&own, &standard).unwrap();
                let read = read(&token, &VerifyKey::from_file(&public).unwrap()).unwrap();
                assert_eq!(read.standard, standard);
                let parts: Vec<&str> = token.split('.').collect();
                let text =
                    |part: &str| String::from_utf8(URL_SAFE_NO_PAD.decode(part).unwrap()).unwrap();
                assert_eq!(text(parts[0]), header);
                let claims = r#"{"a":true,"b":1,"purpose":"","exp":1795996001,"jti":"i"}"#;
                assert_eq!(text(parts[1]), claims);
            }
        }
    }

    #[test]
    fn refuses_what_is_no_signing_key_without_repeating_it() {
        fn check(content: &str, expected: &str) {
            let error = SignKey::from_file(content).unwrap_err();
            assert_eq!(testing::chain_of(&error), expected);
        }
        check("", "the key file is empty");
        check(" \n", "the key file is empty");
        check("secret", "invalid ed25519 seed: there is more in it than hex digits");
        check(&testing::SIGNER_SEED[1..], "invalid seed length: 63 hex digits instead of 64");
        let ec = PKey::generate_ed25519().unwrap().private_key_to_pem_pkcs8().unwrap();
        check(
            std::str::from_utf8(&ec).unwrap(),
            "could not parse signing key: the private key is not an RSA key, the only kind that can sign here",
        );
        check(
            &testing::recorded("insecure/jwt-signer.pem"),
            "could not parse signing key: could not read the private key: the PEM block is a \"PUBLIC KEY\"",
        );
        let error = seed(&testing::recorded("insecure/jwt-signer.key")).unwrap_err();
        assert_eq!(error, SignKeyError::Pem);
    }

    #[test]
    fn answers_flipped_bytes_with_an_error() {
        let mut random = fastrand::Rng::with_seed(3);
        for token in
            [testing::SIGNER.to_owned(), testing::rsa(r#"{"alg":"RS256"}"#, r#"{"jti":"a"}"#)]
        {
            let key =
                if token == testing::SIGNER { testing::ed25519_key() } else { testing::rsa_key() };
            read(&token, &key).unwrap();
            for _ in 0..1_000 {
                let mut bytes = token.clone().into_bytes();
                for _ in 0..random.usize(1..4) {
                    let at = random.usize(..bytes.len());
                    bytes[at] ^= 1 << random.u8(..7);
                }
                let text = String::from_utf8(bytes).unwrap();
                assert!(text == token || read(&text, &key).is_err(), "{text}");
                assert!(read(&token[..random.usize(..token.len())], &key).is_err());
            }
        }
    }

    fn read(token: &str, key: &VerifyKey) -> Result<Token<Any>, Error> {
        verify(token, key, NOW)
    }

    #[track_caller]
    fn check(token: &str, expected: &str) {
        let error = read(token, &testing::ed25519_key()).unwrap_err();
        assert_eq!(error.to_string(), expected);
    }
}

/// Keys and tokens for the tests of this module and of those that use it.
#[cfg(test)]
pub(crate) mod testing {
    use base64::Engine as _;
    use base64::engine::general_purpose::URL_SAFE_NO_PAD;
    use ed25519_dalek::{Signer as _, SigningKey};
    use openssl::hash::MessageDigest;
    use openssl::pkey::{PKey, Private};
    use openssl::sign::Signer;
    use serde_json::Value;

    use super::VerifyKey;

    /// The time at which the recorded tokens are valid.
    pub const NOW: i64 = 1_795_996_000;
    /// Public half of the key with the seed `00 01 02 … 1f`.
    pub const ISSUER_PUBLIC: &str =
        "03a107bff3ce10be1d70dd18e74bc09967e4d6309ba50d5f1ddc8664125531b8";

    /// Public half of the key of [`signer`].
    pub const SIGNER_PUBLIC: &str =
        "29acbae141bccaf0b22e1a94d34d0bc7361e526d0bfe12c89794bc9322966dd7";
    /// The seed of the chain issuer that [`SIGNER`] makes of its holder.
    pub const SIGNER_SEED: &str =
        "202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f";
    /// A client JWT of a chain issuer, signed by [`issuer`].
    pub const SIGNER: &str = "eyJhbGciOiJFZERTQSIsInR5cCI6IkpXVCJ9.eyJjYWxsZXJpZCI6InByb3Zpc2lvbmVyX3NpZ25lciIsIm91IjoiY2hvcmlhIiwicGVybWlzc2lvbnMiOnsic3RyZWFtc191c2VyIjp0cnVlLCJlbGVjdGlvbl91c2VyIjp0cnVlLCJmbGVldF9tYW5hZ2VtZW50Ijp0cnVlLCJwcm92aXNpb25lciI6dHJ1ZX0sInB1cnBvc2UiOiJjaG9yaWFfY2xpZW50X2lkIiwidGNzIjoiYmZmZmU0NWMzNTgwMTU3Y2M0YzkyYjc1ZjZiMjM3OTZiNTMzZTc1YmEzZWZmMGRhYzU5MTgxNzVlNzFiYjYwMmZjMTI3NjcwODhjMDM0MTA3Y2Q1NzNlYzM1NzBiMjAzNTI4ZGEyMTFiNmU3NzAzMDEyYjljNGFhM2FiZDNkMDIiLCJwdWJsaWNfa2V5IjoiMjlhY2JhZTE0MWJjY2FmMGIyMmUxYTk0ZDM0ZDBiYzczNjFlNTI2ZDBiZmUxMmM4OTc5NGJjOTMyMjk2NmRkNyIsImlzcyI6IkktMDNhMTA3YmZmM2NlMTBiZTFkNzBkZDE4ZTc0YmMwOTk2N2U0ZDYzMDliYTUwZDVmMWRkYzg2NjQxMjU1MzFiOCIsImV4cCI6MjA1MTIyMjQwMCwibmJmIjoxNzUwMDAwMDAwLCJpYXQiOjE3NTAwMDAwMDAsImp0aSI6IjJ5WThBQjA2S0Z0bHhsN1p2RmpsNElYb2JxYiJ9.Fi2JnupyDI32PyCBHGkbPEVBucsHjNqI-ukgpe_6oCrDtmj28IAWdMnxLc61SfMJ6_rZk6iJdr_qj4VgGgDoCg";
    /// A server JWT signed with [`SIGNER`] at 1760000000.
    pub const SERVER: &str = "eyJhbGciOiJFZERTQSIsInR5cCI6IkpXVCJ9.eyJpZGVudGl0eSI6Im4xLmV4YW1wbGUubmV0IiwiY29sbGVjdGl2ZXMiOlsiY2hvcmlhIl0sInBlcm1pc3Npb25zIjp7InN1Ym1pc3Npb24iOnRydWUsInN0cmVhbXMiOnRydWV9LCJvdSI6ImNob3JpYSIsInB1cnBvc2UiOiJjaG9yaWFfc2VydmVyIiwidGNzIjoiYmZmZmU0NWMzNTgwMTU3Y2M0YzkyYjc1ZjZiMjM3OTZiNTMzZTc1YmEzZWZmMGRhYzU5MTgxNzVlNzFiYjYwMmZjMTI3NjcwODhjMDM0MTA3Y2Q1NzNlYzM1NzBiMjAzNTI4ZGEyMTFiNmU3NzAzMDEyYjljNGFhM2FiZDNkMDIuZjc2YjdjMzY1M2Q3YzNjMzk4MGNmYWUxYzdmZDM1MzIzMTY3MTM4ZDlhZDRiOTdjOWEwZjI3ZDY3MzBmZTM0OWJiOTJjMjQ3YjY2OGUwODBiM2E5ODdmZjRmN2Q3OTg0YjE4MTg0MmFiZTgyODI2OGYwNmUyZTFjOTk3OTYwMDgiLCJwdWJsaWNfa2V5IjoiMjU0M2I5MmZmMTA5NTUxMTQ3NmFkYzgzNjlkYjZkZGM5MzM2NjVhMTE5NzhkZGExNDA0ZWUxMDY2Y2E5NTU5ZCIsImlzc2V4cCI6MjA1MTIyMjQwMCwiaXNzIjoiQy0yeVk4QUIwNktGdGx4bDdadkZqbDRJWG9icWIuMjlhY2JhZTE0MWJjY2FmMGIyMmUxYTk0ZDM0ZDBiYzczNjFlNTI2ZDBiZmUxMmM4OTc5NGJjOTMyMjk2NmRkNyIsImV4cCI6MjAwMDAwMDAwMCwibmJmIjoxNzYwMDAwMDAwLCJpYXQiOjE3NjAwMDAwMDAsImp0aSI6IjMzcDM1QTMyczJudkc3UDFleVczcnp5QVlmUyJ9.LSVVt1BxI6i-s4jpdaXgYJ4pCZCEzxNYiMopugp4XS-x-C7ZjPlT-W9JughNawGGm337GB1ZP9lZWWeHfJejBQ";

    /// The organization issuer of these tokens.
    pub fn issuer() -> SigningKey {
        key(0)
    }

    /// The chain issuer whose token is [`SIGNER`].
    pub fn signer() -> SigningKey {
        key(0x20)
    }

    /// The node whose token is [`SERVER`].
    pub fn node() -> SigningKey {
        key(0x40)
    }

    /// The key whose seed counts up from `first`.
    pub fn key(first: u8) -> SigningKey {
        SigningKey::from_bytes(&std::array::from_fn(|at| first + at as u8))
    }

    /// The bytes that `hex` stands for.
    pub fn bytes<const N: usize>(hex: &str) -> [u8; N] {
        super::hex::decode(hex).unwrap()
    }

    /// The claims of a token.
    pub fn claims(token: &str) -> Value {
        let claims = token.split('.').nth(1).unwrap();
        serde_json::from_slice(&URL_SAFE_NO_PAD.decode(claims).unwrap()).unwrap()
    }

    /// The claims of a token after `edit`, signed anew.
    pub fn edited(token: &str, key: &SigningKey, edit: impl FnOnce(&mut Value)) -> String {
        let mut claims = claims(token);
        edit(&mut claims);
        signed_by(key, r#"{"alg":"EdDSA","typ":"JWT"}"#, &claims.to_string())
    }

    pub fn signed_by(key: &SigningKey, header: &str, claims: &str) -> String {
        let signed = signed(header, claims);
        let signature = key.sign(signed.as_bytes()).to_bytes();
        format!("{signed}.{}", URL_SAFE_NO_PAD.encode(signature))
    }

    /// `error` and all that caused it, on one line.
    pub fn chain_of(error: &dyn std::error::Error) -> String {
        match error.source() {
            Some(source) => format!("{error}: {}", chain_of(source)),
            None => error.to_string(),
        }
    }

    pub fn ed25519_key() -> VerifyKey {
        VerifyKey::from_hex(ISSUER_PUBLIC).unwrap()
    }

    pub fn rsa_key() -> VerifyKey {
        VerifyKey::from_file(&recorded("insecure/jwt-signer.pem")).unwrap()
    }

    pub fn rsa_private() -> PKey<Private> {
        PKey::private_key_from_pem(recorded("insecure/jwt-signer.key").as_bytes()).unwrap()
    }

    pub fn ed25519(header: &str, claims: &str) -> String {
        signed_by(&issuer(), header, claims)
    }

    /// With the digest that the last three letters of the header's `alg` name.
    pub fn rsa(header: &str, claims: &str) -> String {
        let digest = match header {
            _ if header.contains("384") => MessageDigest::sha384(),
            _ if header.contains("512") => MessageDigest::sha512(),
            _ => MessageDigest::sha256(),
        };
        let signed = signed(header, claims);
        let mut signer = Signer::new(digest, &rsa_private()).unwrap();
        let signature = signer.sign_oneshot_to_vec(signed.as_bytes()).unwrap();
        format!("{signed}.{}", URL_SAFE_NO_PAD.encode(signature))
    }

    pub fn recorded(file: &str) -> String {
        std::fs::read_to_string(format!("tests/vectors/captures/{file}")).unwrap()
    }

    fn signed(header: &str, claims: &str) -> String {
        format!("{}.{}", URL_SAFE_NO_PAD.encode(header), URL_SAFE_NO_PAD.encode(claims))
    }
}
