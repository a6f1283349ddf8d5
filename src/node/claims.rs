//! What a node's server JWT says: the helper's wishes merged with our defaults.
//!
//! | Claim | Taken from, the first there is |
//! | --- | --- |
//! | `identity`, `public_key` | the node, whatever is wished |
//! | `collectives` | the wishes; the setting `collectives`; `choria` for a node with that security provider; `mcollective` |
//! | `ou` | the wishes; our own token; `choria` |
//! | `permissions`, `pub_subjects` | the wishes |
//! | `exp` | the wishes, if that is later than in an hour; the default validity |
//!
//! Wishes are read as Go reads them for the original: keys in any case, `null` as nothing, and a wrong type anywhere, even in a claim that
//! is not used, makes the whole answer undecodable. Pure. How the token is signed, and cut to the life of our own, is for `jwt` to say.
//!
//! Source: `generateServerJWT` in choria-io/provisioner's `host/host.go`.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use serde::Deserialize;
use serde::de::{Deserializer, MapAccess, Visitor};
use serde_json::Number;
use serde_json::value::RawValue;

use super::proof::ProvedKey;
use crate::helper::fold;
use crate::jwt::seconds;
use crate::jwt::server::{Issuer, Permissions, Server};
use crate::protocol::Identity;
use crate::protocol::json::{JsonError, excerpt};

/// What is not wished.
#[derive(Debug, Clone, Copy)]
pub struct Defaults<'a> {
    /// What will sign the token.
    pub issuer: &'a Issuer,
    /// How long a token is valid.
    pub validity: Duration,
    /// Now, in seconds since 1970.
    pub unix_time: i64,
}

/// Describes `identity` as its server JWT shall do; `wishes` are the helper's `server_claims`, as written.
///
/// `warn` hears of what will be different from what was wished, but for an `exp` that can't be used.
///
/// # Errors
///
/// [`Error`]
pub fn merge(
    identity: &Identity,
    key: &ProvedKey,
    wishes: Option<&RawValue>,
    configuration: &BTreeMap<String, String>,
    defaults: &Defaults<'_>,
    warn: &mut dyn FnMut(Warning),
) -> Result<Server, Error> {
    let wishes = wishes.map(Wishes::read).transpose()?.unwrap_or_default();
    let collectives = wishes.collectives(configuration)?;

    let issuer = defaults.issuer;
    let organization = match wishes.ou.as_str() {
        "" => issuer.organization(),
        wished => wished,
    };
    if matches!(issuer, Issuer::Chain(_)) && organization != issuer.organization() {
        let (wished, ours) = (excerpt(organization, 100), issuer.organization().to_owned());
        warn(Warning::OtherOrganization { wished, ours });
    }

    let validity = i64::try_from(defaults.validity.as_secs()).unwrap_or(i64::MAX);
    let expires = match wishes.exp.map(|exp| Expiry::of(exp, defaults.unix_time)) {
        Some(Expiry::At(time) | Expiry::In(time)) => {
            if let Some(ends) = issuer.expires().filter(|&ends| ends < time) {
                warn(Warning::Cut { wished: time, ends });
            }
            time
        }
        Some(Expiry::TooEarly) | None => defaults.unix_time.saturating_add(validity),
    };

    Ok(Server {
        identity: identity.clone(),
        public_key: *key.public_key(),
        collectives,
        organization: organization.to_owned(),
        permissions: wishes.permissions,
        pub_subjects: wishes.pub_subjects,
        expires,
    })
}

/// The `exp` in the helper's `server_claims`, as written, and what it means at `now`, in seconds since 1970.
///
/// Nothing for claims that [`merge`] refuses.
pub fn expiry(wishes: &RawValue, now: i64) -> Option<(i64, Expiry)> {
    let exp = Wishes::read(wishes).ok()?.exp?;
    Some((exp, Expiry::of(exp, now)))
}

/// What an `exp` that was wished means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Expiry {
    /// The time itself, in seconds since 1970.
    At(i64),
    /// A number of seconds from now, as the original's manual shows it; holds the time it leads to.
    In(i64),
    /// The past, or the next hour: the default validity counts.
    TooEarly,
}

impl Expiry {
    /// Reads `exp` at `now`, both in seconds since 1970.
    ///
    /// The original takes it for a time always, so that a duration leads to the default validity.
    pub fn of(exp: i64, now: i64) -> Expiry {
        let is_duration = (1..DURATION_BELOW).contains(&exp);
        let time = if is_duration { now.saturating_add(exp) } else { exp };
        if time.saturating_sub(now) <= VALIDITY_SECS_MIN {
            Expiry::TooEarly
        } else if is_duration {
            Expiry::In(time)
        } else {
            Expiry::At(time)
        }
    }
}

/// Below this, an `exp` is no time of this century.
const DURATION_BELOW: i64 = 1_000_000_000;

/// A server JWT must be valid for longer than this, in seconds.
const VALIDITY_SECS_MIN: i64 = 3_600;

/// What the helper wants in the token.
#[derive(Debug, Default)]
struct Wishes {
    collectives: Vec<String>,
    permissions: Option<Permissions>,
    ou: String,
    pub_subjects: Vec<String>,
    exp: Option<i64>,
}

impl Wishes {
    fn read(json: &RawValue) -> Result<Wishes, Error> {
        let Fields(fields) = serde_json::from_str(json.get())
            .map_err(|error| Error::Undecodable { claim: String::new(), source: error.into() })?;
        let mut wishes = Wishes::default();
        for (claim, value) in fields {
            wishes.read_claim(&fold(&claim), value).map_err(|error| Error::Undecodable {
                claim: excerpt(&claim, 100),
                source: error.into(),
            })?;
        }
        Ok(wishes)
    }

    fn read_claim(&mut self, claim: &str, value: &RawValue) -> Result<(), serde_json::Error> {
        match claim {
            "collectives" => self.collectives = texts(value)?,
            "permissions" => read_permissions(&mut self.permissions, value)?,
            "ou" => {
                if let Some(text) = text(value)? {
                    self.ou = text;
                }
            }
            "pub_subjects" => self.pub_subjects = texts(value)?,
            "exp" => self.exp = date(value)?,
            "issexp" | "nbf" | "iat" => drop(date(value)?),
            "identity" | "purpose" | "tcs" | "public_key" | "iss" | "sub" | "jti" => {
                drop(text(value)?);
            }
            "aud" if value.get().starts_with('"') => drop(text(value)?),
            "aud" => drop(texts(value)?),
            _ => {}
        }
        Ok(())
    }

    /// The collectives, of which there is at least one: brokers deny everything to a node without.
    fn collectives(&self, configuration: &BTreeMap<String, String>) -> Result<Vec<String>, Error> {
        let wished = self.collectives.iter().map(String::as_str);
        let (collectives, source) = if !self.collectives.is_empty() {
            (trimmed(wished), "server_claims")
        } else if let Some(setting) = configuration.get("collectives") {
            (trimmed(setting.split(',')), "configuration")
        } else if configuration.get("plugin.security.provider").is_some_and(|it| it == "choria") {
            return Ok(vec!["choria".to_owned()]);
        } else {
            return Ok(vec!["mcollective".to_owned()]);
        };
        if collectives.is_empty() { Err(Error::NoCollectives { source }) } else { Ok(collectives) }
    }
}

/// The original takes each as it is, blanks and empty texts included, and brokers then know no such collective.
fn trimmed<'a>(names: impl Iterator<Item = &'a str>) -> Vec<String> {
    names.map(str::trim).filter(|name| !name.is_empty()).map(str::to_owned).collect()
}

fn text(value: &RawValue) -> Result<Option<String>, serde_json::Error> {
    serde_json::from_str(value.get())
}

fn texts(value: &RawValue) -> Result<Vec<String>, serde_json::Error> {
    let texts: Option<Vec<Option<String>>> = serde_json::from_str(value.get())?;
    Ok(texts.unwrap_or_default().into_iter().map(Option::unwrap_or_default).collect())
}

/// A date is a number of seconds, in quotes or not.
fn date(value: &RawValue) -> Result<Option<i64>, serde_json::Error> {
    let number: Option<Number> = match value.get().starts_with('"') {
        true => Some(serde_json::from_str(&serde_json::from_str::<String>(value.get())?)?),
        false => serde_json::from_str(value.get())?,
    };
    let Some(number) = number else { return Ok(None) };
    seconds(&number).map(Some).ok_or_else(|| serde::de::Error::custom("date is out of range"))
}

fn read_permissions(
    place: &mut Option<Permissions>,
    value: &RawValue,
) -> Result<(), serde_json::Error> {
    let Some(Fields(fields)) = serde_json::from_str::<Option<Fields<'_>>>(value.get())? else {
        *place = None;
        return Ok(());
    };
    let permissions = place.get_or_insert_default();
    for (name, value) in fields {
        let flag = match &*fold(&name) {
            "submission" => &mut permissions.submission,
            "streams" => &mut permissions.streams,
            "governor" => &mut permissions.governor,
            "service_host" => &mut permissions.service_host,
            _ => continue,
        };
        if let Some(given) = serde_json::from_str(value.get())? {
            *flag = given;
        }
    }
    Ok(())
}

/// The fields of an object in their order, values unread; the same one may be there several times.
struct Fields<'a>(Vec<(String, &'a RawValue)>);

impl<'de: 'a, 'a> Deserialize<'de> for Fields<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Fields<'a>, D::Error> {
        struct FieldsVisitor;

        impl<'de> Visitor<'de> for FieldsVisitor {
            type Value = Vec<(String, &'de RawValue)>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut fields = Vec::new();
                while let Some(field) = map.next_entry()? {
                    fields.push(field);
                }
                Ok(fields)
            }
        }

        deserializer.deserialize_map(FieldsVisitor).map(Fields)
    }
}

/// Why no token can be made of a helper's answer: the site's program has to be put right, not the node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Error {
    /// A claim has another type than it must have.
    Undecodable {
        /// Which one; empty if it is all of them.
        claim: String,
        /// What is wrong with it.
        source: JsonError,
    },
    /// A list of collectives that holds none.
    NoCollectives {
        /// Where it was given.
        source: &'static str,
    },
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Undecodable { claim, .. } if claim.is_empty() => {
                f.write_str("cannot decode server_claims of the helper")
            }
            Error::Undecodable { claim, .. } => {
                write!(f, "cannot decode {claim} in server_claims of the helper")
            }
            Error::NoCollectives { source } => {
                write!(f, "collectives in {source} of the helper names no collective")
            }
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Error::Undecodable { source, .. } => Some(source),
            Error::NoCollectives { .. } => None,
        }
    }
}

/// What will be different from what was wished.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Warning {
    /// Brokers look for our chain at another organization's issuer.
    OtherOrganization {
        /// The one wished.
        wished: String,
        /// The one of our own token.
        ours: String,
    },
    /// The token will end with our own.
    Cut {
        /// When it was to end, in seconds since 1970.
        wished: i64,
        /// When it will.
        ends: i64,
    },
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Warning::OtherOrganization { wished, ours } => write!(
                f,
                "ou of server_claims is {wished:?}, but jwt_signing_token belongs to {ours:?}, and brokers will refuse the node: leave it out"
            ),
            Warning::Cut { wished, ends } => write!(
                f,
                "exp of server_claims is {wished}, but jwt_signing_token expires at {ends}, and so does all it signs: renew it"
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::time::Duration;

    use serde_json::json;
    use serde_json::value::RawValue;

    use super::{Defaults, Expiry, Warning, merge};
    use crate::jwt::server::{Issuer, Permissions, Server};
    use crate::jwt::testing::{self, SERVER, SIGNER, SIGNER_SEED, chain_of};
    use crate::node::proof::testing::proved;
    use crate::protocol::Identity;
    use crate::protocol::json::hostile;

    const NOW: i64 = 1_760_000_000;
    const YEAR: i64 = 365 * 24 * 3_600;

    #[test]
    fn makes_the_token_of_the_worked_example() {
        let wishes = r#"{"exp":2000000000,"permissions":{"streams":true,"submission":true}}"#;
        let server = merged(wishes, &[("plugin.security.provider", "choria")]);
        let issued = chain_issuer().issue(&server, NOW, [0x22; 16]).unwrap();
        assert_eq!(issued.text, SERVER);
    }

    #[test]
    fn takes_collectives_from_the_wishes_then_from_the_settings() {
        let choria = ("plugin.security.provider", "choria");
        let setting = ("collectives", "one, two");
        check_collectives(r#"["a","b"]"#, &[setting, choria], &["a", "b"]);
        check_collectives(r#"[" a ","",null]"#, &[setting], &["a"]);
        for nothing in ["[]", "null"] {
            check_collectives(nothing, &[setting, choria], &["one", "two"]);
            check_collectives(nothing, &[("collectives", ",one,,")], &["one"]);
            check_collectives(nothing, &[choria], &["choria"]);
            check_collectives(nothing, &[("plugin.security.provider", "file")], &["mcollective"]);
            check_collectives(nothing, &[], &["mcollective"]);
        }
    }

    #[track_caller]
    fn check_collectives(wished: &str, settings: &[(&str, &str)], expected: &[&str]) {
        let server = merged(&format!(r#"{{"collectives":{wished}}}"#), settings);
        assert_eq!(server.collectives, expected);
    }

    #[test]
    fn refuses_a_list_that_names_no_collective() {
        check_error(
            r#"{"collectives":[""," "]}"#,
            &[("collectives", "a")],
            "collectives in server_claims of the helper names no collective",
        );
        for setting in ["", ",", " , "] {
            check_error(
                "{}",
                &[("collectives", setting)],
                "collectives in configuration of the helper names no collective",
            );
        }
    }

    #[test]
    fn takes_the_organization_of_our_token_unless_another_is_wished() {
        let ours = |ou: &str| {
            let token =
                testing::edited(SIGNER, &testing::issuer(), |claims| claims["ou"] = json!(ou));
            Issuer::check(SIGNER_SEED, Some(&token), NOW).unwrap()
        };
        let plain = Issuer::check(SIGNER_SEED, None, NOW).unwrap();
        for (issuer, wishes, expected, warned) in [
            (ours("acme"), "{}", "acme", false),
            (ours("acme"), r#"{"ou":""}"#, "acme", false),
            (ours("acme"), r#"{"ou":null}"#, "acme", false),
            (ours("acme"), r#"{"ou":"acme"}"#, "acme", false),
            (ours("acme"), r#"{"ou":"choria"}"#, "choria", true),
            (ours(""), "{}", "choria", false),
            (ours(""), r#"{"ou":"acme"}"#, "acme", true),
            (plain.clone(), "{}", "choria", false),
            (plain, r#"{"ou":"acme"}"#, "acme", false),
        ] {
            let (server, warnings) = merged_by(&issuer, wishes, &[]);
            assert_eq!(server.organization, expected, "{wishes}");
            assert_eq!(!warnings.is_empty(), warned, "{warnings:?}");
        }
        let (_, warnings) = merged_by(&ours("acme"), r#"{"ou":"choria"}"#, &[]);
        assert_eq!(
            warnings[0].to_string(),
            r#"ou of server_claims is "choria", but jwt_signing_token belongs to "acme", and brokers will refuse the node: leave it out"#
        );
    }

    #[test]
    fn names_and_keys_the_node_whatever_is_wished() {
        let wishes = json!({
            "identity": "other", "public_key": "ab", "iss": "I-x", "jti": "j", "tcs": "t", "sub": "s", "purpose": "p",
            "nbf": 1, "iat": 2.5, "issexp": "3", "aud": ["a"], "unknown": [{}],
        });
        let server = merged(&wishes.to_string(), &[]);
        assert_eq!(server, merged("{}", &[]));
        assert_eq!(server, merged_by(&chain_issuer(), "null", &[]).0);
        assert_eq!(server.identity.as_str(), "n1.example.net");
        assert_eq!(server.public_key, testing::node().verifying_key());
        assert_eq!(server.permissions, None);
        assert_eq!(server.expires, NOW + YEAR);
    }

    #[test]
    fn passes_permissions_and_subjects_on() {
        let permissions = |wishes: &str| merged(wishes, &[]).permissions;
        assert_eq!(permissions(r#"{"permissions":null}"#), None);
        assert_eq!(permissions(r#"{"permissions":{}}"#), Some(Permissions::default()));
        let all =
            Permissions { submission: true, streams: true, governor: true, service_host: true };
        assert_eq!(
            permissions(
                r#"{"Permissions":{"submission":true,"STREAMS":true,"governor":true,"service_host":true,"x":1}}"#
            ),
            Some(all)
        );
        // Twice, as Go merges it.
        assert_eq!(
            permissions(
                r#"{"permissions":{"streams":true},"permissions":{"governor":true,"streams":null}}"#
            ),
            Some(Permissions { streams: true, governor: true, ..Permissions::default() })
        );
        let server = merged(r#"{"pub_subjects":["a.>","b"]}"#, &[]);
        assert_eq!(server.pub_subjects, ["a.>", "b"]);
    }

    #[test]
    fn takes_an_expiry_later_than_in_an_hour() {
        let week = 7 * 24 * 3_600;
        for (exp, expected) in [
            (NOW + 3_601, Expiry::At(NOW + 3_601)),
            (NOW + 3_600, Expiry::TooEarly),
            (NOW, Expiry::TooEarly),
            (0, Expiry::TooEarly),
            (-1, Expiry::TooEarly),
            (i64::MIN, Expiry::TooEarly),
            (i64::MAX, Expiry::At(i64::MAX)),
            (1, Expiry::TooEarly),
            (3_600, Expiry::TooEarly),
            (3_601, Expiry::In(NOW + 3_601)),
            (week, Expiry::In(NOW + week)),
            (999_999_999, Expiry::In(NOW + 999_999_999)),
            (1_000_000_000, Expiry::TooEarly),
        ] {
            assert_eq!(Expiry::of(exp, NOW), expected, "{exp}");
            let expires = match expected {
                Expiry::At(time) | Expiry::In(time) => time,
                Expiry::TooEarly => NOW + YEAR,
            };
            assert_eq!(merged(&format!(r#"{{"exp":{exp}}}"#), &[]).expires, expires, "{exp}");
        }
        assert_eq!(Expiry::of(5, i64::MAX), Expiry::TooEarly);
        for exp in ["2000000000.9", "2e9", r#""2000000000""#] {
            assert_eq!(merged(&format!(r#"{{"exp":{exp}}}"#), &[]).expires, 2_000_000_000, "{exp}");
        }
    }

    #[test]
    fn warns_of_a_wish_beyond_the_end_of_our_own_token() {
        let ends = 2_051_222_400;
        let warned = |wishes: &str| merged_by(&chain_issuer(), wishes, &[]).1;
        assert_eq!(warned(&format!(r#"{{"exp":{ends}}}"#)), []);
        assert_eq!(warned("{}"), []);
        let beyond = warned(&format!(r#"{{"exp":{}}}"#, ends + 1));
        assert_eq!(beyond, [Warning::Cut { wished: ends + 1, ends }]);
        assert_eq!(
            beyond[0].to_string(),
            "exp of server_claims is 2051222401, but jwt_signing_token expires at 2051222400, and so does all it signs: renew it"
        );
    }

    #[test]
    fn refuses_claims_of_the_wrong_type_used_or_not() {
        let claims = [
            ("collectives", r#""choria""#),
            ("collectives", "[1]"),
            ("permissions", "[]"),
            ("permissions", r#"{"streams":"yes"}"#),
            ("ou", "1"),
            ("pub_subjects", "{}"),
            ("exp", r#""tomorrow""#),
            ("exp", r#""""#),
            ("exp", "1e300"),
            ("exp", "true"),
            ("nbf", "[]"),
            ("iat", "{}"),
            ("issexp", "false"),
            ("identity", "1"),
            ("public_key", "[]"),
            ("aud", "1"),
            ("aud", "[1]"),
            ("jti", "{}"),
        ];
        for (claim, value) in claims {
            let error = failed(&format!(r#"{{"{claim}":{value}}}"#), &[]);
            let expected = format!("cannot decode {claim} in server_claims of the helper: ");
            assert!(error.starts_with(&expected), "{claim} {value}: {error}");
            assert!(error.len() < 400, "{error}");
        }
        for wishes in ["[]", "1", r#""x""#] {
            let error = failed(wishes, &[]);
            assert!(error.starts_with("cannot decode server_claims of the helper: "), "{error}");
        }
    }

    fn merged(wishes: &str, settings: &[(&str, &str)]) -> Server {
        merged_by(&chain_issuer(), wishes, settings).0
    }

    fn merged_by(
        issuer: &Issuer,
        wishes: &str,
        settings: &[(&str, &str)],
    ) -> (Server, Vec<Warning>) {
        let mut warnings = Vec::new();
        let server = try_merge(issuer, wishes, settings, &mut |warning| warnings.push(warning));
        (server.unwrap(), warnings)
    }

    #[track_caller]
    fn check_error(wishes: &str, settings: &[(&str, &str)], expected: &str) {
        assert_eq!(failed(wishes, settings), expected);
    }

    fn failed(wishes: &str, settings: &[(&str, &str)]) -> String {
        chain_of(&try_merge(&chain_issuer(), wishes, settings, &mut |_| ()).unwrap_err())
    }

    fn try_merge(
        issuer: &Issuer,
        wishes: &str,
        settings: &[(&str, &str)],
        warn: &mut dyn FnMut(Warning),
    ) -> Result<Server, super::Error> {
        let wishes = (wishes != "null").then(|| RawValue::from_string(wishes.to_owned()).unwrap());
        let text = |(key, value): &(&str, &str)| ((*key).to_owned(), (*value).to_owned());
        let configuration: BTreeMap<String, String> = settings.iter().map(text).collect();
        let validity = Duration::from_secs(YEAR as u64);
        let defaults = Defaults { issuer, validity, unix_time: NOW };
        let identity = Identity::parse("n1.example.net").unwrap();
        merge(&identity, &proved(""), wishes.as_deref(), &configuration, &defaults, warn)
    }

    fn chain_issuer() -> Issuer {
        Issuer::check(SIGNER_SEED, Some(SIGNER), NOW).unwrap()
    }

    #[test]
    fn survives_any_nesting() {
        hostile::on_a_small_stack(|| {
            let issuer = chain_issuer();
            for value in hostile::values(40_000) {
                if RawValue::from_string(value.clone()).is_err() {
                    continue;
                }
                for claim in ["collectives", "permissions", "ou", "exp", "aud", "iss", "other"] {
                    let wishes = format!(r#"{{"{claim}":{value}}}"#);
                    let _ = try_merge(&issuer, &wishes, &[], &mut |_| ());
                }
            }
        });
    }
}
