//! The states a node passes through, and the checks between them.
//!
//! Each step takes the state before it by value, so nothing can be sent to a node that was not verified, and no setting that was not
//! looked at. No I/O, no clock.

use std::collections::BTreeMap;
use std::fmt;

use regex::Regex;
use serde_json::value::RawValue;

use crate::helper::Answer;
use crate::jwt::VerifyKey;
use crate::jwt::provisioning::{self, ProvisioningToken};
use crate::pki::csr::{self, Csr};
use crate::pki::ecdh::{self, Ephemeral, PrivateKey, Sealed};
use crate::protocol::Identity;
use crate::rpc::actions::{GenCsrReply, InventoryReply, JwtReply};

use super::claims::{self, Warning};
use super::lint::{self, Finding, Severity};
use super::proof::{NotProved, ProvedKey};
use super::server_jwt::{Candidate, Signer, Unsigned};
use super::upgrade::Reported;

/// A node we may talk to: it showed a valid provisioning JWT, or the site does not ask for one.
#[derive(Debug)]
pub struct Verified {
    identity: Identity,
    token: Option<Shown>,
}

/// The verified token, its claims as the helper gets them, and what came beside it.
struct Shown {
    token: ProvisioningToken,
    claims: Box<RawValue>,
    /// The node's half of a key exchange.
    ecdh_public: String,
}

/// The claims hold the provisioning token and the broker's password.
impl fmt::Debug for Shown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.token.fmt(f)
    }
}

impl Verified {
    /// A node of a site that does not ask for a JWT.
    pub fn unasked(identity: Identity) -> Verified {
        Verified { identity, token: None }
    }

    /// Checks the JWT in the node's last answer, with the site's key at `now`, in seconds since 1970.
    ///
    /// # Errors
    ///
    /// [`Refusal::Jwt`]
    pub fn by_jwt(
        identity: Identity,
        reply: JwtReply,
        key: &VerifyKey,
        now: i64,
    ) -> Result<Verified, Refusal> {
        let refused = |source| Refusal::Jwt { identity: identity.clone(), source };
        let token = ProvisioningToken::verify(&reply.jwt, key, now).map_err(refused)?;
        let claims = token
            .claims_json()
            .expect("texts, numbers and objects with text keys can be written as JSON");
        let ecdh_public = reply.ecdh_public;
        Ok(Verified { identity, token: Some(Shown { token, claims, ecdh_public }) })
    }

    /// The token the node showed, if it was asked for one.
    pub fn token(&self) -> Option<&ProvisioningToken> {
        self.token.as_ref().map(|shown| &shown.token)
    }

    /// Takes the key that the node proved to hold, for which `signer` will sign.
    pub fn with_key(self, key: ProvedKey, signer: Signer) -> Keyed {
        Keyed { verified: self, candidate: Some(Candidate { key, signer }) }
    }

    /// A node of a site that signs for no keys.
    pub fn without_key(self) -> Keyed {
        Keyed { verified: self, candidate: None }
    }
}

/// A verified node, with the key that it proved to hold if the site signs for such keys.
#[derive(Debug)]
pub struct Keyed {
    verified: Verified,
    candidate: Option<Candidate>,
}

impl Keyed {
    /// Adds what the node says about itself.
    pub fn described(self, inventory: InventoryReply) -> Described {
        Described { keyed: self, inventory }
    }
}

/// A verified node that told us its inventory.
#[derive(Debug)]
pub struct Described {
    keyed: Keyed,
    inventory: InventoryReply,
}

impl Described {
    /// A node of a site that makes no certificates, or makes them without a request.
    pub fn without_csr(self) -> Ready {
        Ready { described: self, enrollment: None }
    }

    /// Checks the request for a certificate that the node sent.
    ///
    /// # Errors
    ///
    /// [`Refusal::Csr`]
    pub fn with_csr(self, sent: GenCsrReply, deny: &[Regex]) -> Result<Ready, Refusal> {
        let csr = Csr::check(sent.csr, self.keyed.verified.identity.as_str(), deny)
            .map_err(Refusal::Csr)?;
        let enrollment = CheckedCsr { csr, public_key: sent.public_key, ssldir: sent.ssldir };
        Ok(Ready { described: self, enrollment: Some(enrollment) })
    }
}

/// A request that passed the rules, with what came beside it.
#[derive(Debug)]
pub struct CheckedCsr {
    /// The request.
    pub csr: Csr,
    /// The request's public key, as PEM.
    pub public_key: String,
    /// Where the node keeps its certificates.
    pub ssldir: String,
}

/// A node about which the helper may be asked.
#[derive(Debug)]
pub struct Ready {
    described: Described,
    enrollment: Option<CheckedCsr>,
}

impl Ready {
    /// The node's name.
    pub fn identity(&self) -> &Identity {
        &self.verified().identity
    }

    fn verified(&self) -> &Verified {
        &self.described.keyed.verified
    }

    /// What the node says about itself, as JSON text.
    pub fn inventory(&self) -> &str {
        &self.described.inventory.data
    }

    /// The verified claims of the node's JWT, if it was asked for one.
    pub fn claims(&self) -> Option<&RawValue> {
        self.verified().token.as_ref().map(|shown| &*shown.claims)
    }

    /// The node's certificate request, if it was asked for one.
    pub fn csr(&self) -> Option<&CheckedCsr> {
        self.enrollment.as_ref()
    }

    /// The key the node proved to hold, if it was asked for one.
    pub fn key(&self) -> Option<&ProvedKey> {
        self.described.keyed.candidate.as_ref().map(|candidate| &candidate.key)
    }

    /// Decides what the helper's answer means for the node: `defer` goes before `shutdown`, and both before a configuration.
    ///
    /// `warn` hears of what will hurt without being an error.
    ///
    /// # Errors
    ///
    /// [`BadAnswer`], if sending it would leave the node worse off than not configuring it.
    pub fn decide(
        self,
        answer: Answer,
        site: lint::Site<'_>,
        warn: &mut dyn FnMut(Finding),
    ) -> Result<Decision, BadAnswer> {
        let findings = lint::lint(&answer, &self.known(site));
        let (errors, warnings): (Vec<_>, Vec<_>) =
            findings.into_iter().partition(|finding| finding.severity == Severity::Error);
        warnings.into_iter().for_each(&mut *warn);
        if !errors.is_empty() {
            return Err(BadAnswer::Hurts(errors));
        }
        if answer.defer {
            return Ok(Decision::Defer { reason: answer.msg });
        }
        if answer.shutdown {
            return Ok(Decision::ShutDown { reason: answer.msg });
        }
        self.plan(answer, site.unix_time, warn).map(Box::new).map(Decision::Configure)
    }

    /// What an answer for this node is checked against.
    pub fn known<'a>(&'a self, site: lint::Site<'a>) -> lint::Known<'a> {
        let enrollment = self.enrollment.as_ref();
        lint::Known {
            identity: self.identity(),
            is_provisioning_default: self
                .verified()
                .token()
                .is_some_and(ProvisioningToken::is_provisioning_default),
            csr: enrollment.map(|sent| &sent.csr),
            ssldir: enrollment.map_or("", |sent| &sent.ssldir),
            directory: self.key().map_or("", ProvedKey::directory),
            site,
        }
    }

    fn plan(
        self,
        answer: Answer,
        unix_time: i64,
        warn: &mut dyn FnMut(Finding),
    ) -> Result<Plan, BadAnswer> {
        let Described { keyed, inventory } = self.described;
        let Keyed { verified: Verified { identity, token }, candidate } = keyed;
        let mut warn = |warning: Warning| warn(Finding::of_claims(&warning));
        let described = candidate.map(|candidate| {
            let wishes = answer.server_claims.as_deref();
            candidate.described(&identity, wishes, &answer.configuration, unix_time, &mut warn)
        });
        let server_jwt = described.transpose().map_err(BadAnswer::Claims)?;

        let node_public = token.map(|shown| shown.ecdh_public).unwrap_or_default();
        let key = match answer.key.map(|key| PrivateKey::from_pem(key.expose())).transpose() {
            Ok(key) => key.map(|key| Unsealed { key, node_public }),
            Err(error) => return Err(BadAnswer::Hurts(vec![Finding::of_key(&error)])),
        };

        // The directory the node named wins over the helper's, as in the original.
        let ssldir = match self.enrollment {
            Some(CheckedCsr { ssldir, .. }) if !ssldir.is_empty() => ssldir,
            _ => answer.ssldir,
        };
        Ok(Plan {
            configuration: answer.configuration,
            certificate: answer.certificate,
            ca: answer.ca,
            key,
            server_jwt,
            ssldir,
            action_policies: answer.action_policies,
            opa_policies: answer.opa_policies,
            upgrade: answer.upgrade,
            version: inventory.version,
            is_upgradable: inventory.upgradable,
        })
    }
}

/// What shall become of a node.
#[derive(Debug)]
pub enum Decision {
    /// It is left alone until it is seen again.
    Defer {
        /// Why, in the helper's words.
        reason: String,
    },
    /// It is shut down for good.
    ShutDown {
        /// Why, in the helper's words.
        reason: String,
    },
    /// It is configured and restarted.
    Configure(Box<Plan>),
}

/// A configuration that was checked, with all that goes with it.
#[derive(Debug)]
pub struct Plan {
    /// The node's settings.
    pub configuration: BTreeMap<String, String>,
    /// The node's certificate, as PEM.
    pub certificate: String,
    /// The CA's certificate, as PEM.
    pub ca: String,
    /// The node's private key, if the helper's CA made it.
    pub key: Option<Unsealed>,
    /// The server JWT for the key that the node proved to hold.
    pub server_jwt: Option<Unsigned>,
    /// Where the node puts them.
    pub ssldir: String,
    /// File name → content.
    pub action_policies: BTreeMap<String, String>,
    /// File name → content.
    pub opa_policies: BTreeMap<String, String>,
    /// The version the helper wishes the node to have first; empty if any will do.
    pub upgrade: String,
    /// The version the node has; empty if it said none.
    pub version: String,
    /// Whether the node takes another one from us.
    pub is_upgradable: bool,
}

impl Plan {
    /// The node's settings as they are sent.
    pub fn configuration_json(&self) -> String {
        serde_json::to_string(&self.configuration).expect("texts can be written as JSON")
    }

    /// What the node says about its version.
    pub fn reported(&self) -> Reported<'_> {
        Reported { version: &self.version, is_upgradable: self.is_upgradable }
    }
}

/// A private key made by the helper's CA, and the half of an exchange that the node it is for has begun.
#[derive(Debug)]
pub struct Unsealed {
    key: PrivateKey,
    /// Unchecked.
    node_public: String,
}

impl Unsealed {
    /// Encrypts the key so that only its node can read it.
    ///
    /// # Errors
    ///
    /// What is wrong with the node's half, or [`ecdh::Error::Crypto`].
    pub fn seal(&self, random: &Ephemeral) -> Result<Sealed, ecdh::Error> {
        ecdh::seal(&self.key, &self.node_public, random)
    }
}

/// Why a node was refused: it, or what it showed us, failed a check.
#[derive(Debug)]
pub enum Refusal {
    /// Its provisioning JWT.
    Jwt {
        /// The node.
        identity: Identity,
        /// What is wrong.
        source: provisioning::Error,
    },
    /// The key it made.
    Key(NotProved),
    /// Its certificate request.
    Csr(csr::Error),
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Refusal::Jwt { identity, .. } => write!(f, "could not validate JWT: {identity}"),
            // The original's words.
            Refusal::Key(_) => f.write_str("could not fetch ed25519 public key"),
            Refusal::Csr(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for Refusal {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Refusal::Jwt { source, .. } => Some(source),
            Refusal::Key(source) => Some(source),
            Refusal::Csr(_) => None,
        }
    }
}

/// Why a helper's answer is not sent: the site's program has to be put right, not the node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BadAnswer {
    /// What is wrong with it; never empty.
    Hurts(Vec<Finding>),
    /// The claims it wishes in the server JWT.
    Claims(claims::Error),
}

impl fmt::Display for BadAnswer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            BadAnswer::Hurts(findings) => {
                for (at, finding) in findings.iter().enumerate() {
                    if at > 0 {
                        f.write_str("; ")?;
                    }
                    finding.fmt(f)?;
                }
                Ok(())
            }
            BadAnswer::Claims(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for BadAnswer {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            BadAnswer::Hurts(_) => None,
            BadAnswer::Claims(error) => error.source(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::error::Error as _;
    use std::time::Duration;

    use regex::Regex;
    use serde_json::{Value, json};

    use super::{Decision, Plan, Ready, Verified};
    use crate::config::{Enrollment, Features};
    use crate::helper::Answer;
    use crate::jwt::server::{self, Issuer};
    use crate::jwt::testing::{self, NOW};
    use crate::node::lint::testing::{self as certificates, Ca, public_key};
    use crate::node::lint::{Room, Site};
    use crate::node::proof::testing::proved;
    use crate::node::server_jwt::Signer;
    use crate::pki::ecdh::Ephemeral;
    use crate::protocol::Identity;
    use crate::rpc::actions::{GenCsrReply, InventoryReply, JwtReply};

    /// Some node's half of an exchange.
    const NODE_PUBLIC: &str = "675dd574ed7789310b3d2e7681f3790b466c773b1521fecf36577958371ea52f";

    #[test]
    fn keeps_what_the_helper_needs_of_each_step() {
        let verified = Verified::by_jwt(node(), jwt(), &testing::rsa_key(), NOW).unwrap();
        let sent = recorded_csr();
        let ready =
            verified.without_key().described(inventory()).with_csr(sent.clone(), &[]).unwrap();
        assert_eq!(ready.identity(), &node());
        assert_eq!(ready.inventory(), "{}");
        assert!(ready.claims().unwrap().get().starts_with(r#"{"cht":"s3cret","chs":false,"#));
        assert!(!format!("{ready:?}").contains("s3cret"));
        let csr = ready.csr().unwrap();
        assert_eq!(
            (csr.csr.pem(), &*csr.public_key, &*csr.ssldir),
            (&*sent.csr, &*sent.public_key, &*sent.ssldir)
        );

        let unasked = Verified::unasked(node()).without_key().described(inventory()).without_csr();
        assert!(unasked.claims().is_none() && unasked.csr().is_none());
    }

    #[test]
    fn refuses_a_node_without_a_valid_jwt() {
        for (jwt, expected) in [
            ("", "no JWT received"),
            ("x", "could not parse provisioner token"),
            (
                &testing::rsa(r#"{"alg":"RS256"}"#, r#"{"purpose":"choria_server"}"#),
                "not a provisioning token",
            ),
        ] {
            let refusal =
                Verified::by_jwt(node(), shown(jwt), &testing::rsa_key(), NOW).unwrap_err();
            assert_eq!(refusal.to_string(), "could not validate JWT: n0.fleet.example.net");
            assert_eq!(refusal.source().unwrap().to_string(), expected);
        }
    }

    #[test]
    fn refuses_a_csr_that_breaks_a_rule() {
        for (csr, deny, expected) in [
            (GenCsrReply { csr: String::new(), ..recorded_csr() }, None, "no CSR received"),
            (
                recorded_csr(),
                Some("^n0"),
                "n0.fleet.example.net matches denied certificate pattern",
            ),
        ] {
            let deny: Vec<Regex> = deny.into_iter().map(|text| Regex::new(text).unwrap()).collect();
            let described = Verified::unasked(node()).without_key().described(inventory());
            assert_eq!(described.with_csr(csr, &deny).unwrap_err().to_string(), expected);
        }
    }

    #[test]
    fn defers_before_it_shuts_down_before_it_configures() {
        fn check(answer: &str, expected: &str, warnings: &[&str]) {
            let mut heard = Vec::new();
            let answer = Answer::read(answer.as_bytes()).unwrap();
            let decision = ready()
                .decide(answer, site(), &mut |warning| heard.push(warning.to_string()))
                .unwrap();
            let found = match decision {
                Decision::Defer { reason } => format!("defer {reason}"),
                Decision::ShutDown { reason } => format!("shutdown {reason}"),
                Decision::Configure(plan) => format!("configure {}", plan.configuration.len()),
            };
            assert_eq!(found, expected);
            assert_eq!(heard, warnings);
        }

        let unused = |which: &str| {
            format!(
                "there is a configuration, which is not used because {which} is set: leave out one of them"
            )
        };
        check(r#"{"defer":true,"msg":"later"}"#, "defer later", &[]);
        check(r#"{"shutdown":true,"msg":"old"}"#, "shutdown old", &[]);
        check(
            r#"{"defer":true,"shutdown":true,"msg":"m","configuration":{"a":"\n"}}"#,
            "defer m",
            &[
                "both defer and shutdown are set and the node is deferred: set one of them",
                &unused("defer"),
            ],
        );
        check(
            r#"{"shutdown":true,"configuration":{"a":"b"}}"#,
            "shutdown ",
            &[&unused("shutdown")],
        );
        check(
            r#"{"configuration":{"a":"b","plugin.choria.server.provision":"0"}}"#,
            "configure 2",
            &[],
        );
    }

    #[test]
    fn refuses_answers_that_would_hurt_with_all_that_is_wrong() {
        refuses(
            r#"{"configuration":{"":"a","plugin.choria.server.provision":"1"}}"#,
            "the configuration has a setting without a name: give it one; \
             plugin.choria.server.provision is true, and the node refuses to restart with it: set it to 0",
        );
        refuses(
            r#"{"configuration":{"a":"b"},"key":"secret"}"#,
            "there is key without certificate and ca and ssldir, and the node drops it silently: \
             give all of certificate, ca and ssldir; bad key received: no PEM block found",
        );
    }

    #[track_caller]
    fn refuses(answer: &str, expected: &str) {
        let answer = Answer::read(answer.as_bytes()).unwrap();
        let error = ready().decide(answer, site(), &mut |_| ()).unwrap_err();
        assert_eq!(error.to_string(), expected);
    }

    #[test]
    fn an_answer_is_checked_against_what_the_node_showed() {
        let verified = || Verified::by_jwt(node(), jwt(), &testing::rsa_key(), NOW).unwrap();
        let sent = recorded_csr();
        let with_all =
            verified().without_key().described(inventory()).with_csr(sent.clone(), &[]).unwrap();
        let known = with_all.known(site());
        assert_eq!(known.identity, &node());
        assert!(known.is_provisioning_default);
        assert_eq!(known.csr.unwrap().pem(), sent.csr);
        assert_eq!(known.ssldir, sent.ssldir);

        let without = ready();
        let known = without.known(site());
        assert!(!known.is_provisioning_default && known.csr.is_none() && known.ssldir.is_empty());

        let (_, warnings) = plan(with_all, r#"{"configuration":{"a":"b"}}"#);
        assert_eq!(warnings.len(), 1, "{warnings:?}");
        assert_eq!(plan(ready(), r#"{"configuration":{"a":"b"}}"#).1, [""; 0]);
    }

    #[test]
    fn a_node_that_proved_a_key_gets_a_server_jwt_for_it() {
        let issuer = Issuer::check(testing::SIGNER_SEED, Some(testing::SIGNER), NOW).unwrap();
        let keyed = || {
            let signer =
                Signer { issuer: issuer.clone().into(), validity: Duration::from_secs(86_400) };
            let keyed = Verified::unasked(node()).with_key(proved("/etc/choria"), signer);
            keyed.described(inventory()).without_csr()
        };
        let enrollment = Enrollment::OrganizationIssuer;
        let site = || Site { features: Features { enrollment, ..site().features }, ..site() };
        assert_eq!(keyed().key().unwrap().directory(), "/etc/choria");
        assert_eq!(keyed().known(site()).directory, "/etc/choria");
        assert!(ready().key().is_none() && ready().known(site()).directory.is_empty());

        let mut warnings = Vec::new();
        let mut decide = |ready: Ready, answer: &str| {
            let answer = Answer::read(answer.as_bytes()).unwrap();
            ready.decide(answer, site(), &mut |warning| warnings.push(warning.to_string()))
        };
        let answer = r#"{"configuration":{"collectives":"a,b"},"server_claims":{"ou":"acme"}}"#;
        let Ok(Decision::Configure(plan)) = decide(keyed(), answer) else { panic!() };
        let issued = plan.server_jwt.unwrap().sign(NOW, [1; 16]).unwrap();
        assert_eq!(issued.expires, NOW + 86_400);
        let organization = testing::issuer().verifying_key();
        let token = server::verify(&issued.text, &organization, NOW).unwrap();
        assert_eq!(token.own.identity, node().as_str());
        assert_eq!(token.own.collectives, ["a", "b"]);

        let Ok(Decision::Configure(plan)) = decide(ready(), answer) else { panic!() };
        assert!(plan.server_jwt.is_none());
        let answer = r#"{"configuration":{"a":"b"},"server_claims":{"exp":[]}}"#;
        let error = decide(keyed(), answer).unwrap_err();
        assert!(
            testing::chain_of(&error)
                .starts_with("cannot decode exp in server_claims of the helper: ")
        );
        assert_eq!(warnings.len(), 1, "{warnings:?}");
        assert!(warnings[0].starts_with("ou of server_claims is \"acme\""), "{warnings:?}");
    }

    #[test]
    fn a_private_key_is_sealed_for_the_node_that_began_an_exchange() {
        let answer = answer_with_key();
        let with = |ecdh_public: &str| {
            let reply = JwtReply { ecdh_public: ecdh_public.to_owned(), ..jwt() };
            let verified = Verified::by_jwt(node(), reply, &testing::rsa_key(), NOW).unwrap();
            let ready = verified.without_key().described(inventory()).without_csr();
            let (plan, _) = plan(ready, &answer);
            assert!(!format!("{plan:?}").contains("PRIVATE"), "{plan:?}");
            plan.key.unwrap().seal(&Ephemeral::new([1; 32], [2; 16]))
        };
        let sealed = with(NODE_PUBLIC).unwrap();
        assert!(sealed.key.contains("\nProc-Type: 4,ENCRYPTED\n"), "{}", sealed.key);
        let error = with("").unwrap_err();
        assert!(error.is_of_node());
        assert_eq!(
            error.to_string(),
            "private key received from helper but server did not start Diffie-Hellman exchange: \
             its jwt reply holds no ecdh_public"
        );
    }

    #[test]
    fn a_private_key_needs_the_exchange_that_comes_with_the_jwt() {
        let features = Features { jwt: false, ..site().features };
        let answer = Answer::read(answer_with_key().as_bytes()).unwrap();
        let error = ready().decide(answer, Site { features, ..site() }, &mut |_| ()).unwrap_err();
        assert_eq!(
            error.to_string(),
            "private key received from helper but server did not start Diffie-Hellman exchange: \
             turn on the feature jwt"
        );
    }

    /// A certificate with its key, all that a node needs of both.
    fn answer_with_key() -> String {
        let ca = Ca::new("CA", NOW - 10..NOW + 1_000);
        let key = certificates::key();
        let certificate = ca.issue(node().as_str(), &key, NOW - 10..NOW + 1_000);
        let key = String::from_utf8(key.private_key_to_pem_pkcs8().unwrap()).unwrap();
        json!({
            "configuration": {"plugin.choria.server.provision": "0"}, "ssldir": "/ssl",
            "certificate": certificate, "ca": ca.pem(), "key": key,
        })
        .to_string()
    }

    #[test]
    fn the_directory_the_node_named_wins() {
        let ca = Ca::new("CA", NOW - 10..NOW + 1_000);
        let key = public_key(&recorded_csr().csr);
        let certificate = ca.issue(node().as_str(), &key, NOW - 10..NOW + 1_000);
        let answer = json!({
            "configuration": {"a": "b"}, "ssldir": "/helper", "certificate": certificate, "ca": ca.pem(),
            "action_policies": {"a.policy": "p"}, "opa_policies": {"b.rego": "r"},
        })
        .to_string();
        let csr = |ssldir: &str| {
            let sent = GenCsrReply { ssldir: ssldir.to_owned(), ..recorded_csr() };
            Verified::unasked(node())
                .without_key()
                .described(inventory())
                .with_csr(sent, &[])
                .unwrap()
        };
        assert_eq!(plan(csr("/node"), &answer).0.ssldir, "/node");
        assert_eq!(plan(csr(""), &answer).0.ssldir, "/helper");

        let (plan, _) = plan(ready(), &answer);
        assert_eq!(plan.ssldir, "/helper");
        assert_eq!((plan.certificate, plan.ca), (certificate, ca.pem()));
        assert_eq!(plan.configuration["a"], "b");
        assert_eq!(plan.action_policies["a.policy"], "p");
        assert_eq!(plan.opa_policies["b.rego"], "r");
    }

    fn plan(ready: Ready, answer: &str) -> (Plan, Vec<String>) {
        let mut warnings = Vec::new();
        let answer = Answer::read(answer.as_bytes()).unwrap();
        match ready.decide(answer, site(), &mut |warning| warnings.push(warning.to_string())) {
            Ok(Decision::Configure(plan)) => (*plan, warnings),
            other => panic!("{other:?}"),
        }
    }

    fn site() -> Site<'static> {
        let features = Features { jwt: true, upgrades: false, enrollment: Enrollment::Pki };
        let room = Room { max_payload: 1 << 20, size_of: &|body| body.len() };
        Site { features, unix_time: NOW, room }
    }

    fn ready() -> Ready {
        Verified::unasked(node()).without_key().described(inventory()).without_csr()
    }

    fn node() -> Identity {
        Identity::parse("n0.fleet.example.net").unwrap()
    }

    fn jwt() -> JwtReply {
        shown(&testing::recorded("insecure/provisioning.jwt"))
    }

    fn shown(jwt: &str) -> JwtReply {
        JwtReply { jwt: jwt.to_owned(), ecdh_public: NODE_PUBLIC.to_owned() }
    }

    fn inventory() -> InventoryReply {
        let version = "0.29.4".to_owned();
        InventoryReply { data: "{}".to_owned(), version, upgradable: true }
    }

    fn recorded_csr() -> GenCsrReply {
        let input: Value =
            serde_json::from_str(&testing::recorded("insecure/helper-input.json")).unwrap();
        let text = |key: &str| input["csr"][key].as_str().unwrap().to_owned();
        GenCsrReply { csr: text("csr"), public_key: text("public_key"), ssldir: text("ssldir") }
    }
}
