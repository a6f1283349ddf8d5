//! The server JWT: what we sign for a node, with which it joins the production network.

use std::fmt;

use ed25519_dalek::VerifyingKey;
use openssl::error::ErrorStack;
use serde::{Deserialize, Serialize};

use super::client::{self, ChainIssuer};
use super::hex;
use super::{DEFAULT_ORGANIZATION, SignKey, SignKeyError, Standard, Token, chain, null_is_default};
use crate::protocol::Identity;
use crate::protocol::ksuid::Ksuid;

/// `purpose` of a server JWT.
const PURPOSE: &str = "choria_server";
/// `iss` of a token that hangs on no chain; informational.
const PLAIN_ISSUER: &str = "Choria Provisioner";

/// What signs server JWTs.
#[derive(Debug, Clone)]
pub enum Issuer {
    /// A chain issuer: brokers and nodes know the organization issuer above it.
    Chain(Box<ChainIssuer>),
    /// A key that brokers know itself.
    Plain(SignKey),
}

impl Issuer {
    /// Takes the contents of `jwt_signing_key`, and of `jwt_signing_token` if there is one, at `now`, in seconds since 1970.
    ///
    /// # Errors
    ///
    /// [`IssuerError`]
    pub fn check(key: &str, token: Option<&str>, now: i64) -> Result<Issuer, IssuerError> {
        match token {
            Some(token) => ChainIssuer::check(token, key, now)
                .map(|issuer| Issuer::Chain(Box::new(issuer)))
                .map_err(IssuerError::Token),
            None => SignKey::from_file(key).map(Issuer::Plain).map_err(IssuerError::Key),
        }
    }

    /// The organization servers belong to unless something else is wished.
    pub fn organization(&self) -> &str {
        match self {
            Issuer::Chain(issuer) => issuer.organization(),
            Issuer::Plain(_) => DEFAULT_ORGANIZATION,
        }
    }

    /// When all it signs stops being valid, in seconds since 1970.
    pub fn expires(&self) -> Option<i64> {
        match self {
            Issuer::Chain(issuer) => Some(issuer.expires()),
            Issuer::Plain(_) => None,
        }
    }

    /// Signs a token for `server`, at `now`, in seconds since 1970, whose id is made of random bytes.
    ///
    /// It ends when `server` says, or with the issuer's own token if that is earlier.
    ///
    /// # Errors
    ///
    /// [`IssueError`]
    ///
    /// Source: `NewServerClaims` and `AddChainIssuerData` in choria-io/tokens.
    pub fn issue(&self, server: &Server, now: i64, random: [u8; 16]) -> Result<Issued, IssueError> {
        if server.collectives.is_empty() {
            return Err(IssueError::NoCollectives);
        }
        let id = Ksuid::new(now, random);
        let mut standard = Standard {
            purpose: PURPOSE.to_owned(),
            public_key: hex::encode(server.public_key.as_bytes()),
            iss: PLAIN_ISSUER.to_owned(),
            exp: Some(server.expires),
            // Verifiers demand that the id was made in the very second of `iat`.
            iat: Some(now),
            nbf: Some(now),
            jti: id.to_string(),
            ..Standard::default()
        };
        let mut expires = server.expires;
        if let Issuer::Chain(issuer) = self {
            expires = expires.min(issuer.expires());
            standard.exp = Some(expires);
            standard.issexp = Some(issuer.expires());
            standard.iss = issuer.issuer();
            standard.tcs = chain::extend(issuer.trust_chain(), issuer.key(), id);
        }
        if expires <= now {
            return Err(IssueError::Expired);
        }

        let claims = Claims {
            identity: server.identity.to_string(),
            collectives: server.collectives.clone(),
            permissions: server.permissions.clone(),
            ou: server.organization.clone(),
            pub_subjects: server.pub_subjects.clone(),
        };
        let text = match self {
            Issuer::Chain(issuer) => {
                SignKey::Ed25519(Box::new(issuer.key().clone())).sign(&claims, &standard)
            }
            Issuer::Plain(key) => key.sign(&claims, &standard),
        };
        Ok(Issued { text: text.map_err(IssueError::Key)?, id, expires })
    }
}

/// A node, as its token shall describe it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Server {
    /// Its name.
    pub identity: Identity,
    /// The key it proved to hold.
    pub public_key: VerifyingKey,
    /// The collectives it may join; brokers deny everything to a node without.
    pub collectives: Vec<String>,
    /// The organization, which must be the name of an issuer that brokers know.
    pub organization: String,
    /// What it may do beyond answering requests.
    pub permissions: Option<Permissions>,
    /// Further subjects it may publish to.
    pub pub_subjects: Vec<String>,
    /// When the token shall stop being valid, in seconds since 1970.
    pub expires: i64,
}

/// A signed server JWT.
#[derive(Clone, PartialEq, Eq)]
pub struct Issued {
    /// The token.
    pub text: String,
    /// Its id.
    pub id: Ksuid,
    /// When it stops being valid, in seconds since 1970.
    pub expires: i64,
}

impl fmt::Debug for Issued {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Issued").field("id", &self.id).finish_non_exhaustive()
    }
}

/// What a server may do, in the order Choria writes it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Permissions {
    /// Send messages through Choria Submission.
    #[serde(deserialize_with = "null_is_default", skip_serializing_if = "is_false")]
    pub submission: bool,
    /// Use Choria Streams.
    #[serde(deserialize_with = "null_is_default", skip_serializing_if = "is_false")]
    pub streams: bool,
    /// Use governors, together with `streams`.
    #[serde(deserialize_with = "null_is_default", skip_serializing_if = "is_false")]
    pub governor: bool,
    /// Host services.
    #[serde(deserialize_with = "null_is_default", skip_serializing_if = "is_false")]
    pub service_host: bool,
}

/// The claims of a server JWT, in the order Choria writes them.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Claims {
    /// The node's name.
    #[serde(deserialize_with = "null_is_default")]
    pub identity: String,
    /// The collectives it may join.
    #[serde(deserialize_with = "null_is_default")]
    pub collectives: Vec<String>,
    /// What it may do.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub permissions: Option<Permissions>,
    /// The organization.
    #[serde(deserialize_with = "null_is_default", skip_serializing_if = "String::is_empty")]
    pub ou: String,
    /// Further subjects it may publish to.
    #[serde(deserialize_with = "null_is_default", skip_serializing_if = "Vec::is_empty")]
    pub pub_subjects: Vec<String>,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "the signature is serde's")]
fn is_false(flag: &bool) -> bool {
    !flag
}

/// Checks a server JWT as brokers do, for which `issuer` is the organization's issuer.
///
/// # Errors
///
/// [`ParseError`], the first check that fails.
///
/// Source: `ParseServerToken` in choria-io/tokens.
pub fn verify(text: &str, issuer: &VerifyingKey, now: i64) -> Result<Token<Claims>, ParseError> {
    let token = chain::verify::<Claims>(text, issuer, now).map_err(ParseError::Token)?;
    if token.standard.purpose != PURPOSE {
        return Err(ParseError::Purpose);
    }
    if !token.standard.tcs.is_empty() && token.standard.is_issuer_expired(now) {
        return Err(ParseError::IssuerExpired);
    }
    Ok(token)
}

/// Why server JWTs can't be signed with these files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum IssuerError {
    /// `jwt_signing_token`, or that it doesn't go with the key.
    Token(client::Error),
    /// `jwt_signing_key`.
    Key(SignKeyError),
}

impl fmt::Display for IssuerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            IssuerError::Token(_) => "could not use jwt_signing_token",
            IssuerError::Key(_) => "could not use jwt_signing_key",
        })
    }
}

impl std::error::Error for IssuerError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            IssuerError::Token(source) => Some(source),
            IssuerError::Key(source) => Some(source),
        }
    }
}

/// Why a server JWT was not signed.
#[derive(Debug)]
pub enum IssueError {
    /// The node would be allowed nothing.
    NoCollectives,
    /// It would have expired already.
    Expired,
    /// OpenSSL can't sign with this key.
    Key(ErrorStack),
}

impl fmt::Display for IssueError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            IssueError::NoCollectives => "at least one collective is required",
            IssueError::Expired => "the server JWT would have expired already",
            IssueError::Key(_) => "could not sign the server JWT",
        })
    }
}

impl std::error::Error for IssueError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            IssueError::Key(source) => Some(source),
            IssueError::NoCollectives | IssueError::Expired => None,
        }
    }
}

/// Why a broker refuses a server JWT.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ParseError {
    /// It is no token, or not a valid one.
    Token(super::Error),
    /// It is a token for something else.
    Purpose,
    /// The issuer it hangs on has expired, or is not named.
    IssuerExpired,
}

impl fmt::Display for ParseError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ParseError::Token(_) => "could not parse server id token",
            ParseError::Purpose => "not a server token",
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

#[cfg(test)]
mod tests {
    use ed25519_dalek::{SigningKey, VerifyingKey};
    use serde_json::{Value, json};

    use super::{Claims, IssueError, Issuer, Permissions, Server, verify};
    use crate::jwt::testing::{self, NOW, SERVER, SIGNER, SIGNER_SEED, chain_of};
    use crate::jwt::{Token, VerifyKey, hex};
    use crate::protocol::Identity;
    use crate::protocol::ksuid::Ksuid;

    /// When [`SERVER`] was made.
    const MADE: i64 = 1_760_000_000;

    #[test]
    fn signs_the_same_token_as_another_implementation() {
        let issued = issuer().issue(&server(), MADE, [0x22; 16]).unwrap();
        assert_eq!(issued.text, SERVER);
        assert_eq!(issued.id.as_str(), "33p35A32s2nvG7P1eyW3rzyAYfS");
        assert_eq!(issued.expires, 2_000_000_000);
    }

    #[test]
    fn signs_the_same_token_as_the_original() {
        let recorded = |file: &str| testing::recorded(&format!("issuer/{file}"));
        let token = recorded("signer.jwt");
        let issuer = Issuer::check(&recorded("signer.seed"), Some(&token), NOW).unwrap();
        let node = crate::jwt::seed(&recorded("server.seed")).unwrap();
        let theirs = recorded("server.jwt");
        let claims = testing::claims(&theirs);
        let id = Ksuid::parse(claims["jti"].as_str().unwrap()).unwrap();
        let server = Server {
            identity: Identity::parse("n0.fleet.example.net").unwrap(),
            public_key: node.verifying_key(),
            // A year, which is more than the signer's own token has left.
            expires: id.unix_time() + 365 * 24 * 3600,
            ..server()
        };
        let issued = issuer.issue(&server, id.unix_time(), id.random()).unwrap();
        assert_eq!(testing::claims(&issued.text), claims);
        assert_eq!(issued.text, theirs);
        assert_eq!(Some(issued.expires), issuer.expires());

        let organization = hex::decode(recorded("issuer.public").trim()).unwrap();
        let organization = VerifyingKey::from_bytes(&organization).unwrap();
        let Token { own, standard } = verify(&theirs, &organization, NOW).unwrap();
        assert_eq!(own.identity, "n0.fleet.example.net");
        assert_eq!(own.collectives, ["choria"]);
        assert_eq!(standard.public_key, hex::encode(node.verifying_key().as_bytes()));
    }

    #[test]
    fn ends_no_later_than_the_issuers_token() {
        for (wanted, expected) in [
            (2_051_222_399, 2_051_222_399),
            (2_051_222_400, 2_051_222_400),
            (2_051_222_401, 2_051_222_400),
            (i64::MAX, 2_051_222_400),
        ] {
            let server = Server { expires: wanted, ..server() };
            let issued = issuer().issue(&server, MADE, [1; 16]).unwrap();
            assert_eq!(issued.expires, expected);
            let claims = testing::claims(&issued.text);
            assert_eq!(claims["exp"], json!(expected));
            assert_eq!(claims["issexp"], json!(2_051_222_400));
            read(&issued.text, MADE).unwrap();
        }
    }

    #[test]
    fn signs_without_a_chain_with_a_key_that_brokers_know() {
        let rsa = testing::recorded("insecure/jwt-signer.key");
        for (key, public) in [
            (SIGNER_SEED, VerifyKey::from_hex(testing::SIGNER_PUBLIC).unwrap()),
            (&rsa, testing::rsa_key()),
        ] {
            let issuer = Issuer::check(key, None, MADE).unwrap();
            assert_eq!((issuer.organization(), issuer.expires()), ("choria", None));
            let issued = issuer.issue(&server(), MADE, [1; 16]).unwrap();
            let token: Token<Claims> = crate::jwt::verify(&issued.text, &public, MADE).unwrap();
            assert_eq!(token.standard.iss, "Choria Provisioner");
            assert_eq!((&*token.standard.tcs, token.standard.issexp), ("", None));
            assert_eq!(token.standard.exp, Some(2_000_000_000));
            assert_eq!(token.own.permissions, server().permissions);
        }
        // What the organization issuer signs itself, its brokers take.
        let seed = hex::encode(testing::issuer().as_bytes());
        let issuer = Issuer::check(&seed, None, MADE).unwrap();
        read(&issuer.issue(&server(), MADE, [1; 16]).unwrap().text, MADE).unwrap();
    }

    #[test]
    fn leaves_out_what_is_empty() {
        let server = Server {
            permissions: Some(Permissions::default()),
            organization: String::new(),
            pub_subjects: vec!["a.>".to_owned()],
            ..server()
        };
        let claims = testing::claims(&issuer().issue(&server, MADE, [1; 16]).unwrap().text);
        assert_eq!(claims["permissions"], json!({}));
        assert_eq!(claims["pub_subjects"], json!(["a.>"]));
        assert!(claims.get("ou").is_none());
        let server = Server { permissions: None, pub_subjects: Vec::new(), ..server };
        let claims = testing::claims(&issuer().issue(&server, MADE, [1; 16]).unwrap().text);
        assert!(claims.get("permissions").is_none() && claims.get("pub_subjects").is_none());
    }

    #[test]
    fn signs_no_token_that_is_of_no_use() {
        let without = Server { collectives: Vec::new(), ..server() };
        let error = issuer().issue(&without, MADE, [1; 16]).unwrap_err();
        assert!(matches!(error, IssueError::NoCollectives), "{error}");
        for (expires, now) in [(MADE, MADE), (0, MADE), (i64::MAX, 2_051_222_400)] {
            let error = issuer().issue(&Server { expires, ..server() }, now, [1; 16]).unwrap_err();
            assert!(matches!(error, IssueError::Expired), "{error}");
        }
    }

    #[test]
    fn says_which_file_is_wrong() {
        fn check(key: &str, token: Option<&str>, expected: &str) {
            let error = Issuer::check(key, token, MADE).unwrap_err();
            assert_eq!(chain_of(&error), expected);
        }
        let rsa = testing::recorded("insecure/jwt-signer.key");
        check("", None, "could not use jwt_signing_key: the key file is empty");
        check(
            &rsa,
            Some(SIGNER),
            "could not use jwt_signing_token: could not read the token's seed: the key file holds PEM, and an ed25519 seed of 64 hex digits is wanted here",
        );
        check(SIGNER_SEED, Some("\n"), "could not use jwt_signing_token: the token file is empty");
    }

    #[test]
    fn takes_a_token_on_the_chain_as_long_as_all_of_it_is_valid() {
        read(SERVER, MADE).unwrap();
        read(&format!("{SERVER}\n"), 1_999_999_999).unwrap();
        // Exactly as long as the issuer, and not a second longer.
        let ending = chained(|claims| claims["issexp"] = json!(NOW));
        read(&ending, NOW).unwrap();
        check_at(&ending, NOW + 1, "token is expired");
        check_at(
            SERVER,
            MADE - 1,
            "could not parse server id token: token has invalid claims: token is not valid yet",
        );
        check_at(
            SERVER,
            2_000_000_000,
            "could not parse server id token: token has invalid claims: token is expired",
        );
    }

    #[test]
    fn refuses_every_broken_link_of_the_chain() {
        let fault = |edit: &dyn Fn(&mut Value), expected: &str| {
            let token = chained(|claims| edit(claims));
            check(
                &token,
                &format!(
                    "could not parse server id token: token is unverifiable: error while executing keyfunc: not signed by issuer: {expected}"
                ),
            );
        };
        for (key, expected) in [
            ("public_key", "no public key set"),
            ("tcs", "no trust chain signature set"),
            ("jti", "id not set"),
            ("iat", "no issued time set"),
            ("exp", "no expires set"),
            ("issexp", "no issuer expires set"),
        ] {
            fault(&|claims| claims[key] = json!(null), expected);
        }
        fault(&|claims| claims["iat"] = json!(0), "no issued time set");
        fault(&|claims| claims["jti"] = json!("x"), "invalid ksuid format");
        fault(&|claims| claims["iat"] = json!(MADE + 1), "id is not based on issued time");
        let issuer = |text: &'static str| move |claims: &mut Value| claims["iss"] = json!(text);
        fault(&issuer("C-"), "invalid issuer content");
        fault(&issuer("C-a.b.c"), "invalid issuer content");
        fault(&issuer("C-.ab"), "invalid id in issuer");
        fault(&issuer("C-a."), "invalid public key in issuer");
        fault(&issuer("C-a.xy"), "invalid public key in issuer data");
        fault(&issuer("C-a.abcd"), "chain signature validation failed: invalid public key size");
        let chain = |text: &'static str| move |claims: &mut Value| claims["tcs"] = json!(text);
        fault(&chain("ab"), "invalid trust chain signature");
        fault(&chain("ab."), "invalid trust chain signature");
        fault(&chain(".ab"), "invalid trust chain signature");
        fault(&chain("ab.ab.ab"), "invalid trust chain signature");
        fault(&chain("ab.xy"), "invalid signature in chain signature");
        fault(&chain("ab.ab"), "invalid chain signature");
        fault(
            &|claims| claims["tcs"] = json!(format!("xy.{}", halves(claims).1)),
            "invalid trust chain signature encoding",
        );
        fault(
            &|claims| claims["tcs"] = json!(format!("{}.{}", "ab".repeat(64), halves(claims).1)),
            "chain issuer credentials not signed by org issuer",
        );
    }

    #[test]
    fn refuses_a_chain_made_for_another_token_or_by_another_issuer() {
        let other = issuer().issue(&server(), MADE, [0x33; 16]).unwrap().text;
        let borrowed = chained(|claims| claims["tcs"] = testing::claims(&other)["tcs"].clone());
        check_chain(&borrowed, "invalid chain signature");

        // A chain issuer that made itself.
        let own = testing::key(0x60);
        let forged = testing::edited(SERVER, &own, |claims| {
            let public_key = hex::encode(own.verifying_key().as_bytes());
            claims["iss"] = json!(format!("C-2yY8AB06KFtlxl7ZvFjl4IXobqb.{public_key}"));
        });
        check_chain(&forged, "chain issuer credentials not signed by org issuer");

        // The right chain, but the token itself signed by somebody else.
        let forged = testing::edited(SERVER, &own, |_| ());
        let bad = "could not parse server id token: token signature is invalid: ed25519: verification error";
        check(&forged, bad);
        // A token of another organization, on a chain and directly.
        let error = verify(SERVER, &own.verifying_key(), MADE).unwrap_err();
        assert!(chain_of(&error).ends_with("chain issuer credentials not signed by org issuer"));
        check(&testing::edited(SERVER, &own, |claims| claims["iss"] = json!("I-ab")), bad);
    }

    #[test]
    fn refuses_a_chain_issuer_with_a_key_in_upper_case() {
        let chain = testing::signer();
        let id = "2yY8AB06KFtlxl7ZvFjl4IXobqb";
        let upper = hex::encode(chain.verifying_key().as_bytes()).to_uppercase();
        let vouched = sign(&testing::issuer(), &format!("{id}.{upper}"));
        let token = testing::edited(SERVER, &chain, |claims| {
            let jti = claims["jti"].as_str().unwrap();
            let chained = sign(&chain, &format!("{jti}.{vouched}"));
            claims["iss"] = json!(format!("C-{id}.{upper}"));
            claims["tcs"] = json!(format!("{vouched}.{chained}"));
        });
        check_chain(&token, "chain issuer credentials not signed by org issuer");
    }

    #[test]
    fn refuses_other_kinds_of_tokens_and_other_algorithms() {
        let parse = "could not parse server id token:";
        check(SIGNER, "not a server token");
        check(
            &chained(|claims| claims["purpose"] = json!("choria_client_id")),
            "not a server token",
        );
        check(&chained(|claims| claims["purpose"] = json!(null)), "not a server token");
        // With a chain the issuer must be one of it.
        let direct = testing::edited(SERVER, &testing::issuer(), |claims| {
            claims["iss"] = json!(format!("I-{}", testing::ISSUER_PUBLIC));
        });
        check(&direct, "token is expired");

        let claims = testing::claims(SERVER).to_string();
        let signed = |alg: &str| {
            testing::signed_by(&testing::signer(), &format!(r#"{{"alg":"{alg}"}}"#), &claims)
        };
        for alg in ["none", "HS256"] {
            let invalid = format!("token signature is invalid: signing method {alg} is invalid");
            check(&signed(alg), &format!("{parse} {invalid}"));
        }
        let keyfunc = "token is unverifiable: error while executing keyfunc:";
        check(&signed("RS256"), &format!("{parse} {keyfunc} rsa public key required"));

        let segments = "token is malformed: token contains an invalid number of segments";
        check(&format!("{SERVER}.x"), &format!("{parse} {segments}"));
        check(&SERVER[..SERVER.rfind('.').unwrap()], &format!("{parse} {segments}"));
        check(
            &format!("{SERVER}="),
            &format!(
                "{parse} token is malformed: could not base64 decode signature: Invalid padding"
            ),
        );
        check(
            &SERVER[..SERVER.len() - 2],
            &format!("{parse} token signature is invalid: ed25519: verification error"),
        );
    }

    fn halves(claims: &Value) -> (String, String) {
        let (first, second) = claims["tcs"].as_str().unwrap().split_once('.').unwrap();
        (first.to_owned(), second.to_owned())
    }

    fn sign(key: &SigningKey, text: &str) -> String {
        use ed25519_dalek::Signer as _;
        hex::encode(&key.sign(text.as_bytes()).to_bytes())
    }

    /// [`SERVER`] with other claims, signed by the chain issuer.
    fn chained(edit: impl FnOnce(&mut Value)) -> String {
        testing::edited(SERVER, &testing::signer(), edit)
    }

    fn read(token: &str, now: i64) -> Result<Token<Claims>, super::ParseError> {
        verify(token, &testing::issuer().verifying_key(), now)
    }

    #[track_caller]
    fn check_chain(token: &str, expected: &str) {
        let keyfunc = "could not parse server id token: token is unverifiable: error while executing keyfunc:";
        check(token, &format!("{keyfunc} not signed by issuer: {expected}"));
    }

    #[track_caller]
    fn check(token: &str, expected: &str) {
        check_at(token, MADE, expected);
    }

    #[track_caller]
    fn check_at(token: &str, now: i64, expected: &str) {
        assert_eq!(chain_of(&read(token, now).unwrap_err()), expected);
    }

    fn issuer() -> Issuer {
        Issuer::check(SIGNER_SEED, Some(SIGNER), MADE).unwrap()
    }

    fn server() -> Server {
        Server {
            identity: Identity::parse("n1.example.net").unwrap(),
            public_key: testing::node().verifying_key(),
            collectives: vec!["choria".to_owned()],
            organization: "choria".to_owned(),
            permissions: Some(Permissions {
                submission: true,
                streams: true,
                ..Permissions::default()
            }),
            pub_subjects: Vec::new(),
            expires: 2_000_000_000,
        }
    }
}
