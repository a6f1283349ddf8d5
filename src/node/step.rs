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
use crate::protocol::Identity;
use crate::rpc::actions::GenCsrReply;

/// The setting that keeps a node in provisioning mode, or lets it leave.
const PROVISION: &str = "plugin.choria.server.provision";
/// The setting that names a node.
const IDENTITY: &str = "identity";

/// A node we may talk to: it showed a valid provisioning JWT, or the site does not ask for one.
#[derive(Debug)]
pub struct Verified {
    identity: Identity,
    token: Option<Shown>,
}

/// The verified token, and its claims as the helper gets them.
struct Shown {
    token: ProvisioningToken,
    claims: Box<RawValue>,
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

    /// Checks the JWT a node showed, with the site's key at `now`, in seconds since 1970.
    ///
    /// # Errors
    ///
    /// [`Refusal::Jwt`]
    pub fn by_jwt(
        identity: Identity,
        jwt: &str,
        key: &VerifyKey,
        now: i64,
    ) -> Result<Verified, Refusal> {
        let refused = |source| Refusal::Jwt { identity: identity.clone(), source };
        let token = ProvisioningToken::verify(jwt, key, now).map_err(refused)?;
        let claims = token
            .claims_json()
            .expect("texts, numbers and objects with text keys can be written as JSON");
        Ok(Verified { identity, token: Some(Shown { token, claims }) })
    }

    /// The token the node showed, if it was asked for one.
    pub fn token(&self) -> Option<&ProvisioningToken> {
        self.token.as_ref().map(|shown| &shown.token)
    }

    /// Adds what the node says about itself: the JSON text the helper gets.
    pub fn described(self, inventory: String) -> Described {
        Described { verified: self, inventory }
    }
}

/// A verified node that told us its inventory.
#[derive(Debug)]
pub struct Described {
    verified: Verified,
    inventory: String,
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
        let csr =
            Csr::check(sent.csr, self.verified.identity.as_str(), deny).map_err(Refusal::Csr)?;
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
        &self.described.verified.identity
    }

    /// What the node says about itself, as JSON text.
    pub fn inventory(&self) -> &str {
        &self.described.inventory
    }

    /// The verified claims of the node's JWT, if it was asked for one.
    pub fn claims(&self) -> Option<&RawValue> {
        self.described.verified.token.as_ref().map(|shown| &*shown.claims)
    }

    /// The node's certificate request, if it was asked for one.
    pub fn csr(&self) -> Option<&CheckedCsr> {
        self.enrollment.as_ref()
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
        warn: &mut dyn FnMut(Warning),
    ) -> Result<Decision, BadAnswer> {
        if answer.defer && answer.shutdown {
            warn(Warning::DeferAndShutdown);
        }
        if (answer.defer || answer.shutdown) && !answer.configuration.is_empty() {
            warn(Warning::ConfigurationUnused);
        }
        if answer.defer {
            return Ok(Decision::Defer { reason: answer.msg });
        }
        if answer.shutdown {
            return Ok(Decision::ShutDown { reason: answer.msg });
        }
        self.plan(answer, warn).map(Decision::Configure)
    }

    fn plan(self, answer: Answer, warn: &mut dyn FnMut(Warning)) -> Result<Plan, BadAnswer> {
        if !answer.upgrade.is_empty() {
            warn(Warning::UpgradeUnused);
        }
        check_settings(&answer.configuration)?;
        self.check_provision(&answer.configuration, warn)?;
        self.check_identity(&answer.configuration, warn);
        check_policies("action_policies", ".policy", &answer.action_policies)?;
        check_policies("opa_policies", ".rego", &answer.opa_policies)?;
        if answer.key.is_some() {
            return Err(BadAnswer::Key);
        }

        // The directory the node named wins over the helper's, as in the original.
        let ssldir = match self.enrollment {
            Some(CheckedCsr { ssldir, .. }) if !ssldir.is_empty() => ssldir,
            _ => answer.ssldir,
        };
        Ok(Plan {
            configuration: answer.configuration,
            certificate: answer.certificate,
            ca: answer.ca,
            ssldir,
            action_policies: answer.action_policies,
            opa_policies: answer.opa_policies,
        })
    }

    /// A node refuses to restart into provisioning mode; without the setting, the JWT's default decides.
    fn check_provision(
        &self,
        configuration: &BTreeMap<String, String>,
        warn: &mut dyn FnMut(Warning),
    ) -> Result<(), BadAnswer> {
        let mut settings =
            configuration.iter().filter(|(key, _)| key.trim() == PROVISION).peekable();
        if settings.peek().is_none() {
            let token = self.described.verified.token();
            if token.is_some_and(ProvisioningToken::is_provisioning_default) {
                warn(Warning::ProvisionMissing);
            }
        }
        for (_, value) in settings {
            if is_true(value) {
                return Err(BadAnswer::ProvisionsAgain);
            }
        }
        Ok(())
    }

    fn check_identity(
        &self,
        configuration: &BTreeMap<String, String>,
        warn: &mut dyn FnMut(Warning),
    ) {
        if let Some(identity) = configuration.get(IDENTITY)
            && identity.trim() != self.identity().as_str()
        {
            warn(Warning::OtherIdentity { configured: shown(identity) });
        }
    }
}

/// The words Choria's configuration files have for true.
fn is_true(value: &str) -> bool {
    matches!(value.trim().to_ascii_lowercase().as_str(), "1" | "yes" | "true" | "y" | "t")
}

/// A node writes each setting as `key=value`, raw: a line break would begin another setting.
fn check_settings(configuration: &BTreeMap<String, String>) -> Result<(), BadAnswer> {
    const BREAKS: [char; 2] = ['\n', '\0'];

    if configuration.is_empty() {
        return Err(BadAnswer::Empty);
    }
    for (key, value) in configuration {
        if key.trim().is_empty() {
            return Err(BadAnswer::EmptyKey);
        }
        if key.contains(BREAKS) || key.contains('=') {
            return Err(BadAnswer::KeyText { key: shown(key) });
        }
        if value.contains(BREAKS) {
            return Err(BadAnswer::ValueText { key: shown(key) });
        }
    }
    Ok(())
}

/// A node refuses names without the suffix, and writes others wherever they lead.
fn check_policies(
    kind: &'static str,
    suffix: &'static str,
    policies: &BTreeMap<String, String>,
) -> Result<(), BadAnswer> {
    for name in policies.keys() {
        if !name.ends_with(suffix) || name.contains(['/', '\\', '\0']) || name.contains("..") {
            return Err(BadAnswer::PolicyName { kind, suffix, name: shown(name) });
        }
    }
    Ok(())
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
    Configure(Plan),
}

/// A configuration that was checked, with all that goes with it.
#[derive(Debug, Clone)]
pub struct Plan {
    /// The node's settings.
    pub configuration: BTreeMap<String, String>,
    /// The node's certificate, as PEM.
    pub certificate: String,
    /// The CA's certificate, as PEM.
    pub ca: String,
    /// Where the node puts them.
    pub ssldir: String,
    /// File name → content.
    pub action_policies: BTreeMap<String, String>,
    /// File name → content.
    pub opa_policies: BTreeMap<String, String>,
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
    /// Its certificate request.
    Csr(csr::Error),
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Refusal::Jwt { identity, .. } => write!(f, "could not validate JWT: {identity}"),
            Refusal::Csr(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for Refusal {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Refusal::Jwt { source, .. } => Some(source),
            Refusal::Csr(_) => None,
        }
    }
}

/// Why a helper's answer is not sent: the site's program has to be put right, not the node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BadAnswer {
    /// No settings at all.
    Empty,
    /// A setting without a name.
    EmptyKey,
    /// A name that would end, or begin another setting.
    KeyText {
        /// The name.
        key: String,
    },
    /// A value that would begin another setting.
    ValueText {
        /// The setting.
        key: String,
    },
    /// The node would stay in provisioning mode, and refuses to restart.
    ProvisionsAgain,
    /// A policy file whose name the node refuses, or that would land elsewhere.
    PolicyName {
        /// Which policies.
        kind: &'static str,
        /// How their names must end.
        suffix: &'static str,
        /// The name.
        name: String,
    },
    /// A private key, which we cannot encrypt for the node.
    Key,
}

impl fmt::Display for BadAnswer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            BadAnswer::Empty => f.write_str("empty configuration"),
            BadAnswer::EmptyKey => f.write_str("the configuration has a setting without a name"),
            BadAnswer::KeyText { key } => write!(
                f,
                "the name of setting {key} holds a line break, a NUL or an equals sign and would write other settings"
            ),
            BadAnswer::ValueText { key } => write!(
                f,
                "the value of setting {key} holds a line break or a NUL and would write other settings"
            ),
            BadAnswer::ProvisionsAgain => {
                write!(
                    f,
                    "{PROVISION} is true, and the node refuses to restart with it: set it to 0"
                )
            }
            BadAnswer::PolicyName { kind, suffix, name } => {
                write!(f, "{kind} has the name {name}: names must end in {suffix} and hold no path")
            }
            BadAnswer::Key => {
                f.write_str("private keys made by the helper are not supported by this version yet")
            }
        }
    }
}

impl std::error::Error for BadAnswer {}

/// What is sent, but will hurt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Warning {
    /// Both were wished; the first counts.
    DeferAndShutdown,
    /// A configuration beside `defer` or `shutdown`.
    ConfigurationUnused,
    /// The node comes back in provisioning mode.
    ProvisionMissing,
    /// The node will have another name.
    OtherIdentity {
        /// The name it will have.
        configured: String,
    },
    /// An upgrade was wished while upgrades are off.
    UpgradeUnused,
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Warning::DeferAndShutdown => {
                f.write_str("The helper wants both defer and shutdown, deferring")
            }
            Warning::ConfigurationUnused => {
                f.write_str("The helper gave a configuration that defer or shutdown leave unused")
            }
            Warning::ProvisionMissing => write!(
                f,
                "The configuration does not set {PROVISION}, the node will provision again: set it to 0"
            ),
            Warning::OtherIdentity { configured } => write!(
                f,
                "The configuration sets identity to {configured}, the node will change its name"
            ),
            Warning::UpgradeUnused => {
                f.write_str("The helper wants an upgrade, but the feature upgrades is off")
            }
        }
    }
}

/// Foreign text as a message shows it: bounded, and on one line.
pub(super) fn shown(text: &str) -> String {
    const QUOTE_MAX: usize = 200;
    format!("{:?}", text.chars().take(QUOTE_MAX).collect::<String>())
}

#[cfg(test)]
mod tests {
    use std::error::Error as _;

    use regex::Regex;
    use serde_json::Value;

    use super::{Decision, Plan, Ready, Verified};
    use crate::helper::Answer;
    use crate::jwt::testing::{self, NOW};
    use crate::protocol::Identity;
    use crate::rpc::actions::GenCsrReply;

    #[test]
    fn keeps_what_the_helper_needs_of_each_step() {
        let verified = Verified::by_jwt(node(), &jwt(), &testing::rsa_key(), NOW).unwrap();
        let sent = recorded_csr();
        let ready = verified.described("{}".to_owned()).with_csr(sent.clone(), &[]).unwrap();
        assert_eq!(ready.identity(), &node());
        assert_eq!(ready.inventory(), "{}");
        assert!(ready.claims().unwrap().get().starts_with(r#"{"cht":"s3cret","chs":false,"#));
        assert!(!format!("{ready:?}").contains("s3cret"));
        let csr = ready.csr().unwrap();
        assert_eq!(
            (csr.csr.pem(), &*csr.public_key, &*csr.ssldir),
            (&*sent.csr, &*sent.public_key, &*sent.ssldir)
        );

        let unasked = Verified::unasked(node()).described("{}".to_owned()).without_csr();
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
            let refusal = Verified::by_jwt(node(), jwt, &testing::rsa_key(), NOW).unwrap_err();
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
            let described = Verified::unasked(node()).described(String::new());
            assert_eq!(described.with_csr(csr, &deny).unwrap_err().to_string(), expected);
        }
    }

    #[test]
    fn defers_before_it_shuts_down_before_it_configures() {
        fn check(answer: &str, expected: &str, warnings: &[&str]) {
            let mut heard = Vec::new();
            let answer = Answer::read(answer.as_bytes()).unwrap();
            let decision =
                ready().decide(answer, &mut |warning| heard.push(warning.to_string())).unwrap();
            let found = match decision {
                Decision::Defer { reason } => format!("defer {reason}"),
                Decision::ShutDown { reason } => format!("shutdown {reason}"),
                Decision::Configure(plan) => format!("configure {}", plan.configuration.len()),
            };
            assert_eq!(found, expected);
            assert_eq!(heard, warnings);
        }

        let unused = "The helper gave a configuration that defer or shutdown leave unused";
        check(r#"{"defer":true,"msg":"later"}"#, "defer later", &[]);
        check(r#"{"shutdown":true,"msg":"old"}"#, "shutdown old", &[]);
        check(
            r#"{"defer":true,"shutdown":true,"msg":"m","configuration":{"a":"\n"}}"#,
            "defer m",
            &["The helper wants both defer and shutdown, deferring", unused],
        );
        check(r#"{"shutdown":true,"configuration":{"a":"b"}}"#, "shutdown ", &[unused]);
        check(
            r#"{"configuration":{"a":"b","plugin.choria.server.provision":"0"}}"#,
            "configure 2",
            &[],
        );
    }

    #[test]
    fn refuses_answers_that_would_hurt() {
        check("", "empty configuration");
        check(r#""":"a""#, "the configuration has a setting without a name");
        check(r#"" ":"a""#, "the configuration has a setting without a name");
        for key in [r"a\nb", r"a\u0000", "a=b", "=", r"\na"] {
            let named = Answer::read(format!(r#"{{"msg":"{key}"}}"#).as_bytes()).unwrap().msg;
            check(
                &format!(r#""{key}":"x""#),
                &format!(
                    "the name of setting {named:?} holds a line break, a NUL or an equals sign and would write other settings"
                ),
            );
        }
        for value in [r"1\nloglevel=debug", r"a\u0000", r"\n"] {
            check(
                &format!(r#""ok":"a=b","k":"{value}""#),
                r#"the value of setting "k" holds a line break or a NUL and would write other settings"#,
            );
        }
        for value in ["1", "true", "yes", "Y", " T "] {
            check(
                &format!(r#""plugin.choria.server.provision":"{value}""#),
                "plugin.choria.server.provision is true, and the node refuses to restart with it: set it to 0",
            );
        }
        for (kind, name) in [
            ("action_policies", "rpcutil"),
            ("action_policies", "a.rego"),
            ("action_policies", "../a.policy"),
            ("action_policies", "x/a.policy"),
            ("opa_policies", "a.policy"),
            ("opa_policies", r"/etc/a.rego"),
        ] {
            let suffix = if kind == "opa_policies" { ".rego" } else { ".policy" };
            check(
                &format!(r#""a":"b"}},"{kind}":{{"{name}":"x""#),
                &format!(
                    "{kind} has the name {name:?}: names must end in {suffix} and hold no path"
                ),
            );
        }
        check(
            r#""a":"b"},"key":"secret","certificate":"c","ca":"c","ssldir":"/s","opa_policies":{"a.rego":"b""#,
            "private keys made by the helper are not supported by this version yet",
        );
    }

    #[track_caller]
    fn check(configuration: &str, expected: &str) {
        let answer = format!(r#"{{"configuration":{{{configuration}}}}}"#);
        let answer = Answer::read(answer.as_bytes()).unwrap();
        let error = ready().decide(answer, &mut |_| ()).unwrap_err();
        assert_eq!(error.to_string(), expected);
    }

    #[test]
    fn warns_of_what_will_hurt() {
        let provision = "The configuration does not set plugin.choria.server.provision, the node will provision again: set it to 0";
        let verified = || Verified::by_jwt(node(), &jwt(), &testing::rsa_key(), NOW).unwrap();
        let with_jwt = || verified().described(String::new()).without_csr();
        let zero = r#""plugin.choria.server.provision":"0""#;

        assert_eq!(plan(with_jwt(), r#"{"configuration":{"a":"b"}}"#).1, [provision]);
        assert_eq!(plan(ready(), r#"{"configuration":{"a":"b"}}"#).1, [""; 0]);
        for (more, expected) in [
            ("", None),
            (r#","identity":"n0.fleet.example.net""#, None),
            (
                r#","identity":"n1""#,
                Some(r#"The configuration sets identity to "n1", the node will change its name"#),
            ),
        ] {
            let answer = format!(r#"{{"configuration":{{{zero}{more}}}}}"#);
            assert_eq!(plan(with_jwt(), &answer).1, expected.as_slice());
        }
        let answer = format!(r#"{{"configuration":{{{zero}}},"upgrade":"0.30.0"}}"#);
        let expected = "The helper wants an upgrade, but the feature upgrades is off";
        assert_eq!(plan(with_jwt(), &answer).1, [expected]);
    }

    #[test]
    fn the_directory_the_node_named_wins() {
        let answer = r#"{"configuration":{"a":"b"},"ssldir":"/helper","certificate":"c","ca":"d",
            "action_policies":{"a.policy":"p"},"opa_policies":{"b.rego":"r"}}"#;
        let csr = |ssldir: &str| {
            let sent = GenCsrReply { ssldir: ssldir.to_owned(), ..recorded_csr() };
            Verified::unasked(node()).described(String::new()).with_csr(sent, &[]).unwrap()
        };
        assert_eq!(plan(csr("/node"), answer).0.ssldir, "/node");
        assert_eq!(plan(csr(""), answer).0.ssldir, "/helper");

        let (plan, _) = plan(ready(), answer);
        assert_eq!(plan.ssldir, "/helper");
        assert_eq!((&*plan.certificate, &*plan.ca), ("c", "d"));
        assert_eq!(plan.configuration["a"], "b");
        assert_eq!(plan.action_policies["a.policy"], "p");
        assert_eq!(plan.opa_policies["b.rego"], "r");
    }

    fn plan(ready: Ready, answer: &str) -> (Plan, Vec<String>) {
        let mut warnings = Vec::new();
        let answer = Answer::read(answer.as_bytes()).unwrap();
        match ready.decide(answer, &mut |warning| warnings.push(warning.to_string())) {
            Ok(Decision::Configure(plan)) => (plan, warnings),
            other => panic!("{other:?}"),
        }
    }

    fn ready() -> Ready {
        Verified::unasked(node()).described(String::new()).without_csr()
    }

    fn node() -> Identity {
        Identity::parse("n0.fleet.example.net").unwrap()
    }

    fn jwt() -> String {
        testing::recorded("insecure/provisioning.jwt")
    }

    fn recorded_csr() -> GenCsrReply {
        let input: Value =
            serde_json::from_str(&testing::recorded("insecure/helper-input.json")).unwrap();
        let text = |key: &str| input["csr"][key].as_str().unwrap().to_owned();
        GenCsrReply { csr: text("csr"), public_key: text("public_key"), ssldir: text("ssldir") }
    }
}
