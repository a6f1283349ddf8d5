//! The trust chain: an organization issuer vouches for chain issuers, and they sign tokens of servers and clients.
//!
//! We are a chain issuer. What brokers and nodes check is checked here in the same order and with the same words, so that a token they would
//! refuse is not handed out.
//!
//! Source: `standard.go` in choria-io/tokens.

use std::fmt;

use ed25519_dalek::{Signature, Signer as _, SigningKey, VerifyingKey};
use serde::de::DeserializeOwned;

use super::hex::{self, HexError};
use super::{CHAIN_ISSUER, Parsed, Standard, Token, VerifyKey, VerifyKind};
use crate::protocol::ksuid::Ksuid;

/// Checks signature and dates of `text` as brokers and nodes do, for which `issuer` is the organization's issuer.
///
/// The token may be signed by the issuer itself, or by a chain issuer that the issuer vouches for. What it is for, and whether its issuer's own
/// time is over, is left to the caller: it differs from kind to kind.
///
/// # Errors
///
/// [`super::Error`], the first check that fails.
///
/// Source: `ParseToken` in choria-io/tokens.
pub fn verify<C: DeserializeOwned>(
    text: &str,
    issuer: &VerifyingKey,
    now: i64,
) -> Result<Token<C>, super::Error> {
    let parsed = Parsed::read(text)?;
    let mut key: VerifyKey = VerifyKind::Ed25519(Box::new(*issuer)).into();
    parsed.check_kind(&key)?;
    if parsed.token.standard.iss.starts_with(CHAIN_ISSUER) {
        let signer = chain_issuer(&parsed.token.standard, issuer).map_err(super::Error::Chain)?;
        key = VerifyKind::Ed25519(Box::new(signer)).into();
    }
    parsed.check_signature(&key)?;
    parsed.token.standard.check_dates(now)?;
    Ok(parsed.token)
}

/// The key of the chain issuer that `token` names, if `organization` vouches for it and it vouches for the token.
fn chain_issuer(token: &Standard, organization: &VerifyingKey) -> Result<VerifyingKey, Error> {
    check_present(token)?;
    let ksuid = Ksuid::parse(&token.jti).ok_or(Error::IdFormat)?;
    if Some(ksuid.unix_time()) != token.iat {
        return Err(Error::IdTime);
    }
    if token.issexp.is_none() {
        return Err(Error::NoIssuerExpiry);
    }

    let content = token.iss.strip_prefix(CHAIN_ISSUER).ok_or(Error::IssuerContent)?;
    let (id, public_key) = two_parts(content, Error::IssuerContent)?;
    if id.is_empty() {
        return Err(Error::IssuerId);
    }
    if public_key.is_empty() {
        return Err(Error::IssuerKeyMissing);
    }
    let public_key = hex::decode(public_key).map_err(|error| match error {
        HexError::Digit(_) => Error::IssuerKey,
        HexError::Length => Error::ChainKeySize,
    })?;

    let (by_organization, by_chain) = two_parts(&token.tcs, Error::TrustChain)?;
    if by_organization.is_empty() || by_chain.is_empty() {
        return Err(Error::TrustChain);
    }
    let chain_signature = signature(by_chain, Error::ChainEncoding, Error::ChainSignature)?;
    let vouched = signature(by_organization, Error::TrustChainEncoding, Error::NotByOrganization)?;
    // The key in lower case, however it is written: so it was signed.
    organization
        .verify_strict(vouched_data(id, &hex::encode(&public_key)).as_bytes(), &vouched)
        .map_err(|_| Error::NotByOrganization)?;

    let key = VerifyingKey::from_bytes(&public_key).map_err(|_| Error::ChainSignature)?;
    key.verify_strict(chained_data(&token.jti, by_organization).as_bytes(), &chain_signature)
        .map_err(|_| Error::ChainSignature)?;
    Ok(key)
}

fn check_present(token: &Standard) -> Result<(), Error> {
    let has_date = |date: Option<i64>| date.is_some_and(|seconds| seconds != 0);
    for (present, error) in [
        (!token.iss.is_empty(), Error::NoIssuer),
        (!token.public_key.is_empty(), Error::NoPublicKey),
        (!token.tcs.is_empty(), Error::NoTrustChain),
        (!token.jti.is_empty(), Error::NoId),
        (has_date(token.iat), Error::NoIssuedTime),
        (has_date(token.exp), Error::NoExpiry),
    ] {
        if !present {
            return Err(error);
        }
    }
    Ok(())
}

/// Checks that the holder of `token` is a chain issuer: `organization` signed its id and key.
pub(super) fn check_vouched(token: &Standard, organization: &VerifyingKey) -> Result<(), Error> {
    let vouched = signature(&token.tcs, Error::TrustChainEncoding, Error::NotByOrganization)?;
    organization
        .verify_strict(vouched_data(&token.jti, &token.public_key).as_bytes(), &vouched)
        .map_err(|_| Error::NotByOrganization)
}

/// The trust chain signature of the token `id`, made by a chain issuer whose own one is `vouched`.
pub(super) fn extend(vouched: &str, key: &SigningKey, id: Ksuid) -> String {
    let signature = key.sign(chained_data(id.as_str(), vouched).as_bytes());
    format!("{vouched}.{}", hex::encode(&signature.to_bytes()))
}

/// What an organization issuer signs for a chain issuer.
fn vouched_data(id: &str, public_key: &str) -> String {
    format!("{id}.{public_key}")
}

/// What a chain issuer signs for a token of its own.
fn chained_data(id: &str, vouched: &str) -> String {
    format!("{id}.{vouched}")
}

fn two_parts(text: &str, otherwise: Error) -> Result<(&str, &str), Error> {
    match text.split_once('.') {
        Some((first, second)) if !second.contains('.') => Ok((first, second)),
        _ => Err(otherwise),
    }
}

fn signature(text: &str, not_hex: Error, not_64: Error) -> Result<Signature, Error> {
    let bytes = hex::decode(text).map_err(|error| match error {
        HexError::Digit(_) => not_hex,
        // An odd number of digits is no hex either.
        HexError::Length if text.len() % 2 == 1 => not_hex,
        HexError::Length => not_64,
    })?;
    Ok(Signature::from_bytes(&bytes))
}

/// Where a trust chain breaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Error {
    /// No `iss`.
    NoIssuer,
    /// No `public_key`.
    NoPublicKey,
    /// No `tcs`.
    NoTrustChain,
    /// No `jti`.
    NoId,
    /// No `iat`.
    NoIssuedTime,
    /// No `exp`.
    NoExpiry,
    /// No `issexp`.
    NoIssuerExpiry,
    /// The id is no KSUID.
    IdFormat,
    /// The id was made at another time than the token.
    IdTime,
    /// The issuer is not two texts with a dot between.
    IssuerContent,
    /// The issuer names no id.
    IssuerId,
    /// The issuer names no key.
    IssuerKeyMissing,
    /// The issuer's key is not hex.
    IssuerKey,
    /// The issuer's key is not 32 bytes.
    ChainKeySize,
    /// The trust chain signature is not two texts with a dot between.
    TrustChain,
    /// The organization issuer's signature is not hex.
    TrustChainEncoding,
    /// The chain issuer's signature is not hex.
    ChainEncoding,
    /// The organization issuer did not sign for the chain issuer.
    NotByOrganization,
    /// The chain issuer did not sign for the token.
    ChainSignature,
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Error::NoIssuer => "no issuer set",
            Error::NoPublicKey => "no public key set",
            Error::NoTrustChain => "no trust chain signature set",
            Error::NoId => "id not set",
            Error::NoIssuedTime => "no issued time set",
            Error::NoExpiry => "no expires set",
            Error::NoIssuerExpiry => "no issuer expires set",
            Error::IdFormat => "invalid ksuid format",
            Error::IdTime => "id is not based on issued time",
            Error::IssuerContent => "invalid issuer content",
            Error::IssuerId => "invalid id in issuer",
            Error::IssuerKeyMissing => "invalid public key in issuer",
            Error::IssuerKey => "invalid public key in issuer data",
            Error::ChainKeySize => "chain signature validation failed: invalid public key size",
            Error::TrustChain => "invalid trust chain signature",
            Error::TrustChainEncoding => "invalid trust chain signature encoding",
            Error::ChainEncoding => "invalid signature in chain signature",
            Error::NotByOrganization => "chain issuer credentials not signed by org issuer",
            Error::ChainSignature => "invalid chain signature",
        })
    }
}

impl std::error::Error for Error {}
