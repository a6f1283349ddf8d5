//! The client JWT: what lets us into the broker, what lets us sign for nodes, and our place in the trust chain.
//!
//! One token usually does both: [`Credentials`] is the first use of it, [`ChainIssuer`] the second. Both are checked together with the seed
//! they belong to, from texts read at the same time, so that a rotation never pairs an old key with a new token. Brokers say nothing but
//! "Authorization Violation" and nodes nothing at all, so each fault is named here.

use std::fmt;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use chrono::DateTime;
use ed25519_dalek::{Signer as _, SigningKey, VerifyingKey};
use serde::Deserialize;

use super::hex::{self, HexError};
use super::{
    CHAIN_ISSUER, DEFAULT_ORGANIZATION, ORGANIZATION_ISSUER, Parsed, SignKeyError, Standard, Token,
    VerifyKey, VerifyKind, chain, null_is_default,
};

/// `purpose` of a client JWT.
const PURPOSE: &str = "choria_client_id";

/// How long before its end a token is worth a warning, in seconds: 30 days.
pub const EXPIRY_WARNING_SECS: i64 = 30 * 24 * 3600;

/// Whether a token that ends at `expires` needs to be replaced soon.
pub fn expires_soon(expires: i64, now: i64) -> bool {
    expires.saturating_sub(now) < EXPIRY_WARNING_SECS
}

/// The token and seed we connect with and sign requests of protocol version 2 with.
pub struct Credentials {
    text: String,
    token: Token<Claims>,
    key: SigningKey,
}

impl Credentials {
    /// Takes the contents of token and seed file, at `now`, in seconds since 1970.
    ///
    /// The signature is checked if the token names the key it was made with, an organization issuer's; another issuer's key we don't know.
    ///
    /// # Errors
    ///
    /// [`Error`]: the token can't be used by anybody, or not with this seed.
    pub fn check(token: &str, seed: &str, now: i64) -> Result<Credentials, Error> {
        let parsed = read(token)?;
        let standard = &parsed.token.standard;
        check_dates(standard, now)?;
        if parsed.token.own.callerid.is_empty() {
            return Err(Error::NoCaller);
        }
        let key = holder(standard, seed)?;
        if standard.iss.starts_with(ORGANIZATION_ISSUER) {
            parsed.check_signature(&organization_key(standard)?).map_err(Error::Signature)?;
        }
        let text = token.trim().to_owned();
        Ok(Credentials { text, token: parsed.token, key })
    }

    /// Checks what a broker of an organization issuer wants of the user `provisioner`; others don't look at the token.
    ///
    /// # Errors
    ///
    /// [`Error::NoOrganization`], [`Error::NotProvisioner`]
    ///
    /// Source: `handleProvisioningUserConnectionWithIssuer` in go-choria's `broker/network`.
    pub fn check_admission(&self) -> Result<(), Error> {
        if self.token.own.ou.is_empty() {
            return Err(Error::NoOrganization);
        }
        if !self.token.own.permissions.provisioner {
            return Err(Error::NotProvisioner { caller: self.caller().to_owned() });
        }
        Ok(())
    }

    /// Whether the token lets its holder take part in an election. Where nodes wait no broker asks for it; Choria's
    /// documentation does.
    pub fn is_election_user(&self) -> bool {
        self.token.own.permissions.election_user
    }

    /// The token's text, without white space around it.
    pub fn token(&self) -> &str {
        &self.text
    }

    /// The caller id the token gives us.
    pub fn caller(&self) -> &str {
        &self.token.own.callerid
    }

    /// The organization the token belongs to; it may be none.
    pub fn organization(&self) -> &str {
        &self.token.own.ou
    }

    /// The key of the seed.
    pub fn key(&self) -> &SigningKey {
        &self.key
    }

    /// When the token stops being valid, in seconds since 1970; without, it never does.
    pub fn expires(&self) -> Option<i64> {
        self.token.standard.exp
    }

    /// What proves to a broker that we hold the seed: the signature over the text of its nonce.
    pub fn sign_nonce(&self, nonce: &str) -> String {
        URL_SAFE_NO_PAD.encode(self.key.sign(nonce.as_bytes()).to_bytes())
    }
}

/// The token lets its holder into the broker.
impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Credentials").field("caller", &self.caller()).finish_non_exhaustive()
    }
}

/// The token and seed we sign server JWTs with, on behalf of an organization issuer.
#[derive(Clone)]
pub struct ChainIssuer {
    /// Of our token.
    id: String,
    trust_chain: String,
    expires: i64,
    organization: String,
    organization_key: VerifyingKey,
    key: SigningKey,
}

impl ChainIssuer {
    /// Takes the contents of token and seed file, at `now`, in seconds since 1970.
    ///
    /// That the organization's key is the one its brokers know can't be seen from the token: see [`ChainIssuer::organization_key`].
    ///
    /// # Errors
    ///
    /// [`Error`]: no broker or node would accept what is signed with these.
    pub fn check(token: &str, seed: &str, now: i64) -> Result<ChainIssuer, Error> {
        let parsed = read(token)?;
        let standard = &parsed.token.standard;
        check_dates(standard, now)?;
        let expires = standard.exp.ok_or(Error::NoExpiry)?;
        if standard.tcs.is_empty() {
            return Err(Error::NoTrustChain);
        }
        if standard.jti.is_empty() || standard.jti.contains('.') {
            return Err(Error::Id);
        }
        let key = holder(standard, seed)?;
        // What hangs on the chain repeats the key in lower case, and so it must have been signed.
        if !hex::is_lower(&standard.public_key) {
            return Err(Error::UpperCase);
        }

        let issuer = organization_key(standard)?;
        let VerifyKind::Ed25519(organization_key) = issuer.kind() else {
            return Err(Error::Issuer);
        };
        chain::check_vouched(standard, organization_key).map_err(Error::Chain)?;
        parsed.check_signature(&issuer).map_err(Error::Signature)?;

        let ou = &parsed.token.own.ou;
        Ok(ChainIssuer {
            id: standard.jti.clone(),
            trust_chain: standard.tcs.clone(),
            expires,
            organization: if ou.is_empty() { DEFAULT_ORGANIZATION } else { ou }.to_owned(),
            organization_key: **organization_key,
            key,
        })
    }

    /// When our token stops being valid, in seconds since 1970, and all that was signed with it.
    pub fn expires(&self) -> i64 {
        self.expires
    }

    /// The organization our token belongs to.
    pub fn organization(&self) -> &str {
        &self.organization
    }

    /// The key of the organization issuer that vouches for us, as our token names it.
    pub fn organization_key(&self) -> &VerifyingKey {
        &self.organization_key
    }

    /// How tokens we sign name us.
    pub(super) fn issuer(&self) -> String {
        let public_key = hex::encode(self.key.verifying_key().as_bytes());
        format!("{CHAIN_ISSUER}{}.{public_key}", self.id)
    }

    pub(super) fn trust_chain(&self) -> &str {
        &self.trust_chain
    }

    pub(super) fn key(&self) -> &SigningKey {
        &self.key
    }
}

impl fmt::Debug for ChainIssuer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ChainIssuer").field("id", &self.id).finish_non_exhaustive()
    }
}

/// The claims of a client JWT that mean something to us.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct Claims {
    /// The caller id it gives its holder.
    #[serde(deserialize_with = "null_is_default")]
    pub callerid: String,
    /// The organization.
    #[serde(deserialize_with = "null_is_default")]
    pub ou: String,
    /// What its holder may do.
    #[serde(deserialize_with = "null_is_default")]
    pub permissions: Permissions,
}

/// What the holder of a client JWT may do, as far as it means something to us.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct Permissions {
    /// Enter the account in which nodes wait.
    #[serde(deserialize_with = "null_is_default")]
    pub provisioner: bool,
    /// Take part in an election.
    #[serde(deserialize_with = "null_is_default")]
    pub election_user: bool,
}

/// Checks a client JWT as brokers do, for which `issuer` is the organization's issuer.
///
/// # Errors
///
/// [`ParseError`], the first check that fails.
///
/// Source: `ParseClientIDToken` in choria-io/tokens.
pub fn verify(text: &str, issuer: &VerifyingKey, now: i64) -> Result<Token<Claims>, ParseError> {
    let token = chain::verify::<Claims>(text, issuer, now).map_err(ParseError::Token)?;
    if token.standard.purpose != PURPOSE {
        return Err(ParseError::Purpose);
    }
    if token.standard.iss.starts_with(CHAIN_ISSUER) && token.standard.is_issuer_expired(now) {
        return Err(ParseError::IssuerExpired);
    }
    Ok(token)
}

/// The caller id that the token in `text` gives its holder; its signature is not looked at.
///
/// # Errors
///
/// [`Error`]: it is no client token, it names no caller, or it is not valid at `now`, in seconds since 1970.
pub fn caller(text: &str, now: i64) -> Result<String, Error> {
    let parsed = read(text)?;
    check_dates(&parsed.token.standard, now)?;
    match parsed.token.own.callerid {
        none if none.is_empty() => Err(Error::NoCaller),
        caller => Ok(caller),
    }
}

fn read(text: &str) -> Result<Parsed<'_, Claims>, Error> {
    if text.trim().is_empty() {
        return Err(Error::Empty);
    }
    if let Some(found) = other_than_token(text.trim()) {
        return Err(Error::Swapped { found });
    }
    let parsed = Parsed::<Claims>::read(text).map_err(Error::Token)?;
    let purpose = &parsed.token.standard.purpose;
    if purpose != PURPOSE {
        return Err(Error::Purpose { found: quote(purpose) });
    }
    Ok(parsed)
}

/// What the files beside a token hold.
fn other_than_token(text: &str) -> Option<&'static str> {
    if text.len() == 64 && text.bytes().all(|digit| digit.is_ascii_hexdigit()) {
        Some("64 hex digits, as of a seed or a key,")
    } else if text.starts_with("-----BEGIN ") {
        Some("PEM")
    } else {
        None
    }
}

fn check_dates(standard: &Standard, now: i64) -> Result<(), Error> {
    if let Some(at) = standard.exp.filter(|&exp| now >= exp) {
        return Err(Error::Expired { at });
    }
    match standard.nbf {
        Some(from) if now < from => Err(Error::NotYetValid { from }),
        _ => Ok(()),
    }
}

/// The key of `seed`, if it is the one the token was made for.
fn holder(standard: &Standard, seed: &str) -> Result<SigningKey, Error> {
    let key = super::seed(seed).map_err(Error::Seed)?;
    if standard.public_key.is_empty() {
        return Err(Error::NoPublicKey);
    }
    let public_key: [u8; 32] =
        hex::decode(&standard.public_key).map_err(|_| Error::BadPublicKey)?;
    if key.verifying_key().to_bytes() != public_key {
        return Err(Error::SeedMismatch);
    }
    Ok(key)
}

/// The key that an organization issuer's token names.
fn organization_key(standard: &Standard) -> Result<VerifyKey, Error> {
    let public_key = standard.iss.strip_prefix(ORGANIZATION_ISSUER).ok_or(Error::Issuer)?;
    let bytes = hex::decode(public_key).map_err(|error| match error {
        HexError::Digit(_) | HexError::Length => Error::IssuerKey,
    })?;
    VerifyKey::from_ed25519(&bytes).map_err(|_| Error::IssuerKey)
}

fn quote(text: &str) -> String {
    text.chars().take(40).collect()
}

/// Why our own token, or its seed, is of no use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Error {
    /// The token file is empty.
    Empty,
    /// It is no token.
    Token(super::Error),
    /// It is what stands in another file.
    Swapped {
        /// In words.
        found: &'static str,
    },
    /// It is a token for something else.
    Purpose {
        /// What it is for.
        found: String,
    },
    /// Its time is over.
    Expired {
        /// Since when, in seconds since 1970.
        at: i64,
    },
    /// Its time has not come.
    NotYetValid {
        /// When it will, in seconds since 1970.
        from: i64,
    },
    /// It never ends, and brokers refuse what is signed with such a token.
    NoExpiry,
    /// It names no caller.
    NoCaller,
    /// It names no key.
    NoPublicKey,
    /// It names a key that is none.
    BadPublicKey,
    /// It names its key in upper case, which brokers don't take from a chain issuer.
    UpperCase,
    /// The organization issuer does not vouch for its holder.
    NoTrustChain,
    /// Its id can't be a part of a chain.
    Id,
    /// It was not issued by an organization issuer.
    Issuer,
    /// Its issuer's key is none.
    IssuerKey,
    /// The organization issuer vouches for another token.
    Chain(chain::Error),
    /// The organization issuer did not sign it.
    Signature(super::Error),
    /// The seed can't be read.
    Seed(SignKeyError),
    /// The seed belongs to another token.
    SeedMismatch,
    /// It names no organization.
    NoOrganization,
    /// It does not make its holder a provisioner.
    NotProvisioner {
        /// Whose token it is.
        caller: String,
    },
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Empty => f.write_str("the token file is empty"),
            Error::Token(_) => f.write_str("could not parse client id token"),
            Error::Swapped { found } => {
                write!(f, "it holds {found} and no token: is it swapped with another file?")
            }
            Error::Purpose { found } => {
                write!(f, "not a client token: its purpose is {found:?} and not {PURPOSE:?}")
            }
            Error::Expired { at } => write!(f, "the token expired on {}", date(*at)),
            Error::NotYetValid { from } => {
                write!(f, "the token is not valid before {}: is the clock right?", date(*from))
            }
            Error::NoExpiry => {
                f.write_str("the token has no expiry, and brokers refuse what it signs without one")
            }
            Error::NoCaller => f.write_str("the token has no callerid"),
            Error::NoPublicKey => f.write_str("the token has no public_key"),
            Error::BadPublicKey => f.write_str("the token's public_key is not 64 hex digits"),
            Error::UpperCase => f.write_str(
                "the token's public_key has upper case digits, which brokers refuse in a trust chain",
            ),
            Error::NoTrustChain => f.write_str(
                "no Trust Chain Signature claim in JWT Signing Token: it was not made with --issuer",
            ),
            Error::Id => f.write_str("the token's jti is missing or holds a dot"),
            Error::Issuer => f.write_str(
                "the token was not issued by an organization issuer: its iss does not begin with I-",
            ),
            Error::IssuerKey => f.write_str("the token's iss does not end in a public key"),
            Error::Chain(_) => f.write_str("the token's trust chain signature is not valid"),
            Error::Signature(_) => {
                f.write_str("the token is not signed by the organization issuer it names")
            }
            Error::Seed(_) => f.write_str("could not read the token's seed"),
            Error::SeedMismatch => {
                f.write_str("the seed does not belong to the token: another public_key is in it")
            }
            Error::NoOrganization => {
                f.write_str("the token names no organization (ou), and brokers ask for one")
            }
            Error::NotProvisioner { caller } => write!(
                f,
                "the token of {caller} lacks the provisioner permission, so brokers will refuse it: it was not made with --server-provisioner"
            ),
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Error::Token(source) | Error::Signature(source) => Some(source),
            Error::Chain(source) => Some(source),
            Error::Seed(source) => Some(source),
            _ => None,
        }
    }
}

/// Why a broker refuses a client JWT.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ParseError {
    /// It is no token, or not a valid one.
    Token(super::Error),
    /// It is a token for something else.
    Purpose,
    /// The issuer it hangs on has expired.
    IssuerExpired,
}

impl fmt::Display for ParseError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ParseError::Token(_) => "could not parse client id token",
            ParseError::Purpose => "not a client token",
            ParseError::IssuerExpired => "token is expired",
        })
    }
}

impl std::error::Error for ParseError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            ParseError::Token(source) => Some(source),
            ParseError::Purpose | ParseError::IssuerExpired => None,
        }
    }
}

/// A time in seconds since 1970, for people.
pub(crate) fn date(unix_time: i64) -> String {
    match DateTime::from_timestamp(unix_time, 0) {
        Some(time) => time.format("%Y-%m-%d %H:%M:%S UTC").to_string(),
        None => format!("second {unix_time}"),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::{ChainIssuer, Credentials, Error, verify};
    use crate::jwt::testing::{self, NOW, SIGNER, SIGNER_SEED, chain_of};
    use crate::jwt::{chain, hex};

    #[test]
    fn takes_a_token_with_its_seed() {
        let recorded = |file: &str| testing::recorded(&format!("issuer/{file}"));
        let theirs = (recorded("signer.jwt"), recorded("signer.seed"));
        for (token, seed) in [(SIGNER.to_owned(), SIGNER_SEED.to_owned()), theirs] {
            for (token, seed) in
                [(token.clone(), seed.clone()), (format!("\n{token} \n"), format!("{seed}\r\n"))]
            {
                let credentials = Credentials::check(&token, &seed, NOW).unwrap();
                credentials.check_admission().unwrap();
                assert_eq!(credentials.caller(), "provisioner_signer");
                assert_eq!(credentials.token(), token.trim());
                let issuer = ChainIssuer::check(&token, &seed, NOW).unwrap();
                assert_eq!(issuer.organization(), "choria");
                assert_eq!(Some(issuer.expires()), credentials.expires());
                for shown in [format!("{credentials:?}"), format!("{issuer:?}")] {
                    assert!(!shown.contains("eyJ") && !shown.contains("key"), "{shown}");
                }
            }
        }
        let issuer = ChainIssuer::check(SIGNER, SIGNER_SEED, NOW).unwrap();
        assert_eq!(issuer.organization_key(), &testing::issuer().verifying_key());
    }

    #[test]
    fn signs_the_text_of_a_brokers_nonce() {
        let credentials = Credentials::check(SIGNER, SIGNER_SEED, NOW).unwrap();
        assert_eq!(
            credentials.sign_nonce("5Jm9lYq0N2w1xQc"),
            "zm7OZHrj53AfmjMXp3BH-a9yO0GIPQFKJ7z5UWvHmJsPhUXLmEtw1mLxIT0BbA54gGdiquOyalssSzlRwtkzCw"
        );
    }

    #[test]
    fn names_each_fault_of_a_token() {
        check_both("", "the token file is empty");
        let swapped = "and no token: is it swapped with another file?";
        check_both(
            SIGNER_SEED,
            &format!("it holds 64 hex digits, as of a seed or a key, {swapped}"),
        );
        check_both("-----BEGIN PUBLIC KEY-----\n", &format!("it holds PEM {swapped}"));
        check_both(
            "x",
            "could not parse client id token: token is malformed: token contains an invalid number of segments",
        );
        check_both(
            &edited(|claims| claims["purpose"] = json!("choria_server")),
            "not a client token: its purpose is \"choria_server\" and not \"choria_client_id\"",
        );
        check_both(
            &edited(|claims| claims["exp"] = json!(NOW)),
            "the token expired on 2026-11-29 23:46:40 UTC",
        );
        check_both(
            &edited(|claims| claims["nbf"] = json!(NOW + 1)),
            "the token is not valid before 2026-11-29 23:46:41 UTC: is the clock right?",
        );
        check_both(
            &edited(|claims| claims["public_key"] = json!("")),
            "the token has no public_key",
        );
        check_both(
            &edited(|claims| claims["public_key"] = json!("ab")),
            "the token's public_key is not 64 hex digits",
        );
        check_both(
            &edited(|claims| claims["iss"] = json!("I-abc")),
            "the token's iss does not end in a public key",
        );
        // The claims of one token under the signature of another.
        let parts: Vec<&str> = SIGNER.split('.').collect();
        let other = edited(|claims| claims["callerid"] = json!("other"));
        let forged = format!("{}.{}.{}", parts[0], other.split('.').nth(1).unwrap(), parts[2]);
        check_both(
            &forged,
            "the token is not signed by the organization issuer it names: token signature is invalid: ed25519: verification error",
        );
        for alg in ["none", "HS256", "RS256"] {
            let token = testing::signed_by(
                &testing::issuer(),
                &format!(r#"{{"alg":"{alg}"}}"#),
                &testing::claims(SIGNER).to_string(),
            );
            let error = ChainIssuer::check(&token, SIGNER_SEED, NOW).unwrap_err();
            assert!(matches!(error, Error::Signature(_)), "{alg}: {error}");
        }
    }

    #[test]
    fn names_each_fault_of_a_seed() {
        for (seed, expected) in [
            ("", "could not read the token's seed: the key file is empty"),
            (
                "ab",
                "could not read the token's seed: invalid seed length: 2 hex digits instead of 64",
            ),
            (
                SIGNER,
                "could not read the token's seed: invalid ed25519 seed: there is more in it than hex digits",
            ),
            // The public key, which looks the same.
            (
                testing::SIGNER_PUBLIC,
                "the seed does not belong to the token: another public_key is in it",
            ),
        ] {
            assert_eq!(chain_of(&Credentials::check(SIGNER, seed, NOW).unwrap_err()), expected);
            assert_eq!(chain_of(&ChainIssuer::check(SIGNER, seed, NOW).unwrap_err()), expected);
        }
    }

    #[test]
    fn names_each_fault_that_keeps_a_token_from_signing() {
        check_issuer(
            &edited(|claims| claims["exp"] = json!(null)),
            "the token has no expiry, and brokers refuse what it signs without one",
        );
        check_issuer(
            &edited(|claims| claims["tcs"] = json!(null)),
            "no Trust Chain Signature claim in JWT Signing Token: it was not made with --issuer",
        );
        for id in ["", "a.b"] {
            check_issuer(
                &edited(|claims| claims["jti"] = json!(id)),
                "the token's jti is missing or holds a dot",
            );
        }
        for issuer in ["Choria Tokens Package", "", "C-a.b"] {
            check_issuer(
                &edited(|claims| claims["iss"] = json!(issuer)),
                "the token was not issued by an organization issuer: its iss does not begin with I-",
            );
        }
        let upper = |claims: &mut Value| {
            claims["public_key"] = json!(testing::SIGNER_PUBLIC.to_uppercase());
        };
        check_issuer(
            &edited(upper),
            "the token's public_key has upper case digits, which brokers refuse in a trust chain",
        );
        let chain = "the token's trust chain signature is not valid:";
        check_issuer(
            &edited(|claims| claims["tcs"] = json!("xy")),
            &format!("{chain} {}", chain::Error::TrustChainEncoding),
        );
        for tcs in ["abcd".to_owned(), "ab".repeat(64)] {
            check_issuer(
                &edited(|claims| claims["tcs"] = json!(tcs)),
                &format!("{chain} {}", chain::Error::NotByOrganization),
            );
        }
        // The organization vouches for another id.
        check_issuer(
            &edited(|claims| claims["jti"] = json!("33p35A32s2nvG7P1eyW3rzyAYfS")),
            &format!("{chain} {}", chain::Error::NotByOrganization),
        );
        // And an organization issuer that nobody knows is seen by its key.
        let own = testing::key(0x60);
        let public_key = hex::encode(own.verifying_key().as_bytes());
        let own_token = testing::edited(SIGNER, &own, |claims| {
            claims["iss"] = json!(format!("I-{public_key}"));
        });
        check_issuer(&own_token, &format!("{chain} {}", chain::Error::NotByOrganization));
    }

    #[test]
    fn connects_with_a_token_that_can_not_sign() {
        for edit in [
            json!({"tcs": null}),
            json!({"exp": null}),
            json!({"iss": "Choria Tokens Package"}),
            json!({"jti": ""}),
        ] {
            let token = edited(|claims| {
                claims.as_object_mut().unwrap().extend(edit.as_object().unwrap().clone());
            });
            Credentials::check(&token, SIGNER_SEED, NOW).unwrap().check_admission().unwrap();
        }
        let error =
            Credentials::check(&edited(|claims| claims["callerid"] = json!("")), SIGNER_SEED, NOW);
        assert_eq!(error.unwrap_err(), Error::NoCaller);
    }

    #[test]
    fn says_why_a_broker_would_not_let_us_in() {
        let admission = |edit: &dyn Fn(&mut Value)| {
            let token = edited(|claims| edit(claims));
            Credentials::check(&token, SIGNER_SEED, NOW)
                .unwrap()
                .check_admission()
                .unwrap_err()
                .to_string()
        };
        let organization = "the token names no organization (ou), and brokers ask for one";
        assert_eq!(admission(&|claims| claims["ou"] = json!(null)), organization);
        let provisioner = "the token of provisioner_signer lacks the provisioner permission, so brokers will refuse it: it was not made with --server-provisioner";
        assert_eq!(admission(&|claims| claims["permissions"] = json!(null)), provisioner);
        assert_eq!(
            admission(&|claims| claims["permissions"]["provisioner"] = json!(false)),
            provisioner
        );
    }

    #[test]
    fn warns_thirty_days_ahead() {
        for (days, expected) in [(31, false), (30, false), (29, true), (0, true), (-1, true)] {
            assert_eq!(super::expires_soon(NOW + days * 24 * 3600, NOW), expected, "{days} days");
        }
    }

    #[test]
    fn checks_client_tokens_as_brokers_do() {
        let issuer = testing::issuer().verifying_key();
        let token = verify(SIGNER, &issuer, NOW).unwrap();
        assert!(token.own.permissions.provisioner && token.own.permissions.election_user);
        let refused = |token: &str| chain_of(&verify(token, &issuer, NOW).unwrap_err());
        assert_eq!(refused(testing::SERVER), "not a client token");
        let own = testing::edited(SIGNER, &testing::key(0x60), |_| ());
        let parse = "could not parse client id token:";
        let bad = "token signature is invalid: ed25519: verification error";
        assert_eq!(refused(&own), format!("{parse} {bad}"));
        // One that hangs on a chain: of a server's, only the purpose is different.
        let client = |issexp: i64| {
            testing::edited(testing::SERVER, &testing::signer(), |claims| {
                claims["purpose"] = json!("choria_client_id");
                claims["issexp"] = json!(issexp);
            })
        };
        verify(&client(NOW), &issuer, NOW).unwrap();
        assert_eq!(refused(&client(NOW - 1)), "token is expired");
    }

    /// [`SIGNER`] with other claims, signed by the organization issuer.
    fn edited(edit: impl FnOnce(&mut Value)) -> String {
        testing::edited(SIGNER, &testing::issuer(), edit)
    }

    #[track_caller]
    fn check_both(token: &str, expected: &str) {
        assert_eq!(chain_of(&Credentials::check(token, SIGNER_SEED, NOW).unwrap_err()), expected);
        check_issuer(token, expected);
    }

    #[track_caller]
    fn check_issuer(token: &str, expected: &str) {
        assert_eq!(chain_of(&ChainIssuer::check(token, SIGNER_SEED, NOW).unwrap_err()), expected);
    }
}
