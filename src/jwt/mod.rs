//! Checking JWTs: signature, dates and the claims all of them share.
//!
//! A token is parsed once, and only a verified one leaves this module. Order of the checks and their texts are those of Choria's own
//! reader (`ParseToken` in choria-io/tokens over golang-jwt), so that operators find the messages they know. No I/O, no clock: keys and
//! time are arguments.

pub mod provisioning;

use std::fmt;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use ed25519_dalek::{Signature, VerifyingKey};
use openssl::hash::MessageDigest;
use openssl::pkey::{Id, PKey, Public};
use openssl::rsa::Rsa;
use openssl::sign::Verifier;
use openssl::x509::X509;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Number, Value};

use crate::pki::pem;

/// Longest token we look at, in bytes. Real ones have 500 to 2,000; one that carries a trust chain and policies stays well below.
pub const TOKEN_MAX: usize = 64 * 1024;

/// Longest part of a token's content that an error repeats, in characters.
const QUOTE_MAX: usize = 200;

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
    let text = text.trim();
    if text.len() > TOKEN_MAX {
        return Err(Error::Malformed(format!("token has more than {TOKEN_MAX} bytes")));
    }
    let mut segments = text.split('.');
    let (Some(header), Some(claims), Some(signature), None) =
        (segments.next(), segments.next(), segments.next(), segments.next())
    else {
        return Err(Error::Malformed("token contains an invalid number of segments".to_owned()));
    };

    let header: Header = object(&decode(header, "header")?, "header")?;
    let claims = decode(claims, "claim")?;
    let token = Token { own: object::<C>(&claims, "claim")?, standard: object(&claims, "claim")? };

    let name = header.algorithm()?;
    let signature = decode(signature, "signature")?;
    let algorithm = Algorithm::accepted(name)?;

    let signed = text.rsplit_once('.').map_or("", |(signed, _)| signed);
    key.check(algorithm, signed.as_bytes(), &signature)?;

    token.standard.check_dates(now)?;
    Ok(token)
}

impl Standard {
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
#[derive(Debug, Clone)]
pub enum VerifyKey {
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
            Id::RSA => Ok(VerifyKey::Rsa(key)),
            _ => Err(KeyError::Pem("key is not a valid RSA public key".to_owned())),
        }
    }

    /// Reads an Ed25519 public key in hex.
    ///
    /// # Errors
    ///
    /// [`KeyError`], if `text` is not 64 hex digits or no point on the curve.
    pub fn from_hex(text: &str) -> Result<VerifyKey, KeyError> {
        let text = text.trim();
        if let Some(wrong) = text.chars().find(|letter| !letter.is_ascii_hexdigit()) {
            return Err(KeyError::Hex { wrong });
        }
        let mut bytes = [0; ed25519_dalek::PUBLIC_KEY_LENGTH];
        if text.len() != 2 * bytes.len() {
            return Err(KeyError::Size);
        }
        for (byte, digits) in bytes.iter_mut().zip(text.as_bytes().chunks_exact(2)) {
            *byte = std::str::from_utf8(digits)
                .ok()
                .and_then(|digits| u8::from_str_radix(digits, 16).ok())
                .ok_or(KeyError::Size)?;
        }
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
        Ok(VerifyKey::Ed25519(Box::new(key)))
    }

    fn check(&self, algorithm: Algorithm, signed: &[u8], signature: &[u8]) -> Result<(), Error> {
        match (algorithm, self) {
            (Algorithm::EdDsa, VerifyKey::Ed25519(key)) => Signature::from_slice(signature)
                .and_then(|signature| key.verify_strict(signed, &signature))
                .map_err(|_| Error::BadSignature("ed25519: verification error".to_owned())),
            (Algorithm::EdDsa, VerifyKey::Rsa(_)) => Err(Error::Unverifiable(
                "error while executing keyfunc: ed25519 public key required",
            )),
            (Algorithm::Rsa(digest), VerifyKey::Rsa(key)) => {
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
            (Algorithm::Rsa(_), VerifyKey::Ed25519(_)) => {
                Err(Error::Unverifiable("error while executing keyfunc: rsa public key required"))
            }
        }
    }
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
    alg: Option<Value>,
}

impl Header {
    /// The algorithm's name, if golang-jwt knows it. Which of them are accepted is decided later, as there.
    fn algorithm(&self) -> Result<&'static str, Error> {
        const KNOWN: [&str; 14] = [
            "RS256", "RS384", "RS512", "EdDSA", "HS256", "HS384", "HS512", "PS256", "PS384",
            "PS512", "ES256", "ES384", "ES512", "none",
        ];
        match &self.alg {
            Some(Value::String(name)) => KNOWN
                .into_iter()
                .find(|known| known == name)
                .ok_or(Error::Unverifiable("signing method (alg) is unavailable")),
            _ => Err(Error::Unverifiable("signing method (alg) is unspecified")),
        }
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

/// A date is a number of seconds; a fraction is dropped.
fn date<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<i64>, D::Error> {
    // Beyond this a float no longer counts seconds.
    const EXACT_MAX: f64 = 9_007_199_254_740_992.0;

    let Some(number) = Option::<Number>::deserialize(deserializer)? else { return Ok(None) };
    if let Some(seconds) = number.as_i64() {
        return Ok(Some(seconds));
    }
    match number.as_f64() {
        #[expect(clippy::cast_possible_truncation, reason = "dropping the fraction is the rule")]
        Some(seconds) if seconds.abs() <= EXACT_MAX => Ok(Some(seconds as i64)),
        _ => Err(serde::de::Error::custom("date is out of range")),
    }
}

/// An audience is one text or a list of texts.
fn audience<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<String>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Audience {
        One(String),
        Many(Vec<String>),
    }
    Ok(match Option::<Audience>::deserialize(deserializer)? {
        None => Vec::new(),
        Some(Audience::One(one)) => vec![one],
        Some(Audience::Many(many)) => many,
    })
}

/// Why a token was not accepted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Error {
    /// It is no JWT, or a part of it does not decode.
    Malformed(String),
    /// Its algorithm is unknown, or our key is of another kind.
    Unverifiable(&'static str),
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

#[cfg(test)]
mod tests {
    use openssl::asn1::Asn1Time;
    use openssl::pkey::PKey;
    use openssl::rsa::Rsa;
    use openssl::x509::X509;
    use serde::Deserialize;

    use super::{Error, KeyError, TOKEN_MAX, Token, VerifyKey, verify};
    use crate::jwt::testing::{self, NOW};

    #[derive(Debug, Deserialize)]
    struct Any {}

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

    use super::VerifyKey;

    /// The time at which the recorded tokens are valid.
    pub const NOW: i64 = 1_795_996_000;
    /// Public half of the key with the seed `00 01 02 … 1f`.
    pub const ISSUER_PUBLIC: &str =
        "03a107bff3ce10be1d70dd18e74bc09967e4d6309ba50d5f1ddc8664125531b8";

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
        let signed = signed(header, claims);
        let key = SigningKey::from_bytes(&std::array::from_fn(|at| at as u8));
        let signature = key.sign(signed.as_bytes()).to_bytes();
        format!("{signed}.{}", URL_SAFE_NO_PAD.encode(signature))
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
