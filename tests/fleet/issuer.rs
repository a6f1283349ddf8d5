//! An organization that issues credentials, and what its brokers and nodes check of them.
//!
//! Nothing here is the daemon's own code, so that a mistake on one side is not made on the other. Format and order of the checks follow
//! `standard.go` and `tokens.go` of choria-io/tokens.

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use openssl::hash::MessageDigest;
use openssl::pkey::{Id, PKey, Private};
use openssl::sign::{Signer as Signing, Verifier};
use serde_json::{Value, json};

use super::keys::{hex, sign, unhex};

/// An organization, by the key of its issuer.
#[derive(Debug, Clone)]
pub struct Organization {
    key: PKey<Private>,
}

/// What makes its holder a chain issuer: contents of `jwt_signing_key` and `jwt_signing_token`.
#[derive(Debug, Clone)]
pub struct ChainIssuer {
    /// The seed in hex.
    pub seed: String,
    /// The client JWT.
    pub token: String,
    /// The public key in hex.
    pub public_key: String,
}

impl Organization {
    /// One with a new key.
    pub fn new() -> Organization {
        Organization { key: new_key() }
    }

    /// One whose issuer has this seed in hex.
    ///
    /// # Errors
    ///
    /// That it is none.
    pub fn from_seed(seed: &str) -> Result<Organization, String> {
        let seed = unhex(seed.trim()).filter(|seed| seed.len() == 32);
        let seed = seed.ok_or("a seed is 64 hex digits")?;
        let key = PKey::private_key_from_raw_bytes(&seed, Id::ED25519);
        Ok(Organization { key: key.map_err(|error| error.to_string())? })
    }

    /// The issuer's key, which signs the provisioning JWTs too.
    pub fn key(&self) -> &PKey<Private> {
        &self.key
    }

    /// The issuer's public key in hex: what `jwt_verify_cert` may be.
    pub fn public_key(&self) -> String {
        public_hex(&self.key)
    }

    /// The issuer's seed in hex.
    pub fn seed(&self) -> String {
        seed_hex(&self.key)
    }

    /// A chain issuer whose token was made at `now`, in seconds since 1970, and ends a year and a day later.
    pub fn chain_issuer(&self, now: i64) -> ChainIssuer {
        self.chain_issuer_but(now, |_| ())
    }

    /// The same with other claims.
    pub fn chain_issuer_but(&self, now: i64, edit: impl FnOnce(&mut Value)) -> ChainIssuer {
        let key = new_key();
        let (public_key, id) = (public_hex(&key), ksuid(now));
        let vouched = hex(&signature(&self.key, &format!("{id}.{public_key}")));
        let mut claims = json!({
            "callerid": "provisioner_signer",
            "ou": "choria",
            "permissions": {"fleet_management": true, "provisioner": true},
            "purpose": "choria_client_id",
            "tcs": vouched,
            "public_key": public_key,
            "iss": format!("I-{}", self.public_key()),
            "exp": now + 366 * 86_400,
            "nbf": now,
            "iat": now,
            "jti": id,
        });
        edit(&mut claims);
        let token = sign(&self.key, &claims.to_string());
        ChainIssuer { seed: seed_hex(&key), token, public_key }
    }
}

/// Checks a server JWT as brokers that know the issuer `organization`, and the node called `identity` whose public key is `public_key`, do
/// at `now`; keys are in hex.
///
/// # Errors
///
/// Why the node would be kept out, in words.
pub fn check_server_jwt(
    organization: &str,
    token: &str,
    identity: &str,
    public_key: &str,
    now: i64,
) -> Result<Value, String> {
    let claims = read_token(organization, token, now)?;
    let text = |name: &str| claims[name].as_str().unwrap_or_default();
    let wrong = [
        (text("purpose") != "choria_server", "not a server token"),
        (text("identity") != identity, "for another identity"),
        (text("public_key") != public_key, "for another key"),
        (text("ou") != "choria", "of another organization"),
        (claims["collectives"].as_array().is_none_or(Vec::is_empty), "without collectives"),
    ];
    match wrong.into_iter().find(|(is_so, _)| *is_so) {
        Some((_, what)) => Err(format!("{what}: {claims}")),
        None => Ok(claims),
    }
}

/// Checks the token of somebody who asks, as nodes that look at it do.
///
/// # Errors
///
/// Why they would not listen, in words.
pub fn check_client_jwt(
    organization: &str,
    token: &str,
    caller: &str,
    now: i64,
) -> Result<Value, String> {
    let claims = read_token(organization, token, now)?;
    let wrong = [
        (claims["purpose"] != "choria_client_id", "not a client token"),
        (claims["callerid"] != caller, "of another caller"),
        (claims["permissions"]["fleet_management"] != true, "without fleet management access"),
    ];
    match wrong.into_iter().find(|(is_so, _)| *is_so) {
        Some((_, what)) => Err(format!("{what}: {claims}")),
        None => Ok(claims),
    }
}

/// What a token says that the issuer `organization`, or a chain issuer of it, signed and that is valid at `now`.
///
/// # Errors
///
/// What is wrong with it.
pub fn read_token(organization: &str, token: &str, now: i64) -> Result<Value, String> {
    let parts: Vec<&str> = token.split('.').collect();
    let [header, body, signed] = parts[..] else {
        return Err(format!("{} parts", parts.len()));
    };
    let header = part(header)?;
    if header["alg"] != "EdDSA" {
        return Err(format!("algorithm {}", header["alg"]));
    }
    let claims = part(body)?;
    let text = |name: &str| claims[name].as_str().unwrap_or_default();
    let time = |name: &str| claims[name].as_i64();

    let key = match text("iss").strip_prefix("C-") {
        Some(issuer) => {
            let seconds = ksuid_time(text("jti")).ok_or("invalid ksuid format")?;
            if time("iat") != Some(seconds) {
                return Err("id is not based on issued time".to_owned());
            }
            let (id, chain) = two(issuer).ok_or("invalid issuer content")?;
            let (vouched, chained) = two(text("tcs")).ok_or("invalid trust chain signature")?;
            let by_organization = format!("{id}.{}", chain.to_lowercase());
            if !is_signed(organization, by_organization.as_bytes(), vouched) {
                return Err("chain issuer not signed by organization issuer".to_owned());
            }
            let by_chain = format!("{}.{vouched}", text("jti"));
            if !is_signed(chain, by_chain.as_bytes(), chained) {
                return Err("invalid chain signature".to_owned());
            }
            if time("issexp").is_none_or(|ends| ends < now) {
                return Err("issuer is expired".to_owned());
            }
            if time("exp") > time("issexp") {
                return Err("is valid longer than its issuer".to_owned());
            }
            chain.to_owned()
        }
        // Then a server's must have no trust chain, or brokers refuse it.
        None if text("purpose") == "choria_server" && !text("tcs").is_empty() => {
            return Err("token is expired".to_owned());
        }
        None => organization.to_owned(),
    };
    let signed = URL_SAFE_NO_PAD.decode(signed).map_err(|error| error.to_string())?;
    let signing_input = &token[..token.rfind('.').unwrap_or(0)];
    if !is_signed(&key, signing_input.as_bytes(), &hex(&signed)) {
        return Err("token signature is invalid".to_owned());
    }
    valid_at(claims, now)
}

/// What a token says that was signed by the RSA key whose public half is in `pem` and is valid at `now`.
///
/// # Errors
///
/// What is wrong with it.
pub fn read_token_of(pem: &str, token: &str, now: i64) -> Result<Value, String> {
    let (text, signature) = token.rsplit_once('.').ok_or("no parts")?;
    let (header, body) = text.split_once('.').ok_or("two parts")?;
    let header = part(header)?;
    if header["alg"] != "RS256" {
        return Err(format!("algorithm {}", header["alg"]));
    }
    let signature = URL_SAFE_NO_PAD.decode(signature).map_err(|error| error.to_string())?;
    let is_signed = PKey::public_key_from_pem(pem.as_bytes()).and_then(|key| {
        Verifier::new(MessageDigest::sha256(), &key)?.verify_oneshot(&signature, text.as_bytes())
    });
    match is_signed {
        Ok(true) => valid_at(part(body)?, now),
        _ => Err("token signature is invalid".to_owned()),
    }
}

fn valid_at(claims: Value, now: i64) -> Result<Value, String> {
    let time = |name: &str| claims[name].as_i64();
    let is_now = time("exp").is_some_and(|ends| now < ends)
        && time("nbf").is_some_and(|begins| begins <= now);
    match is_now {
        true => Ok(claims),
        false => Err(format!("token is expired or not valid yet: {claims}")),
    }
}

fn two(text: &str) -> Option<(&str, &str)> {
    let (first, second) = text.split_once('.')?;
    let is_good = !first.is_empty() && !second.is_empty() && !second.contains('.');
    is_good.then_some((first, second))
}

fn part(text: &str) -> Result<Value, String> {
    let bytes = URL_SAFE_NO_PAD.decode(text).map_err(|error| error.to_string())?;
    serde_json::from_slice(&bytes).map_err(|error| error.to_string())
}

fn new_key() -> PKey<Private> {
    PKey::generate_ed25519().expect("OpenSSL makes Ed25519 keys")
}

fn seed_hex(key: &PKey<Private>) -> String {
    hex(&key.raw_private_key().expect("it is an Ed25519 key"))
}

fn public_hex(key: &PKey<Private>) -> String {
    hex(&key.raw_public_key().expect("it is an Ed25519 key"))
}

fn signature(key: &PKey<Private>, text: &str) -> Vec<u8> {
    Signing::new_without_digest(key)
        .and_then(|mut signer| signer.sign_oneshot_to_vec(text.as_bytes()))
        .expect("Ed25519 signs any text")
}

/// Whether the holder of this key, in hex, signed `bytes`; the signature is in hex too.
pub fn is_signed(public_key: &str, bytes: &[u8], signature: &str) -> bool {
    let (Some(public_key), Some(signature)) = (unhex(public_key), unhex(signature)) else {
        return false;
    };
    PKey::public_key_from_raw_bytes(&public_key, Id::ED25519)
        .and_then(|key| Verifier::new_without_digest(&key)?.verify_oneshot(&signature, bytes))
        .unwrap_or(false)
}

const DIGITS: &[u8; 62] = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
/// KSUIDs count from here.
const EPOCH: i64 = 1_400_000_000;

/// A new KSUID of the second `now`.
fn ksuid(now: i64) -> String {
    let mut bytes = [0; 20];
    let seconds = u32::try_from(now - EPOCH).expect("a time of this century");
    bytes[..4].copy_from_slice(&seconds.to_be_bytes());
    fastrand::fill(&mut bytes[4..]);
    let mut text = [0; 27];
    for place in text.iter_mut().rev() {
        let mut rest = 0;
        for byte in &mut bytes {
            let value = rest * 256 + u32::from(*byte);
            *byte = (value / 62) as u8;
            rest = value % 62;
        }
        *place = DIGITS[rest as usize];
    }
    String::from_utf8(text.to_vec()).expect("digits are ASCII")
}

/// The second a KSUID was made in.
pub fn ksuid_time(text: &str) -> Option<i64> {
    if text.len() != 27 {
        return None;
    }
    let mut bytes = [0_u8; 20];
    for letter in text.bytes() {
        let mut carry = DIGITS.iter().position(|digit| *digit == letter)? as u32;
        for byte in bytes.iter_mut().rev() {
            let value = u32::from(*byte) * 62 + carry;
            *byte = value as u8;
            carry = value / 256;
        }
        if carry > 0 {
            return None;
        }
    }
    let seconds = u32::from_be_bytes(bytes[..4].try_into().ok()?);
    Some(EPOCH + i64::from(seconds))
}
