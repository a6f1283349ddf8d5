//! Answers of a helper that would hurt their node, found before anything is sent.
//!
//! Each finding says what is wrong and how to put it right. An error keeps the answer from being sent, since it would leave the
//! node worse off than an attempt that fails; a warning does not. Pure; nothing here is asked of the node or the helper.
//!
//! | Answer | |
//! | --- | --- |
//! | `defer` and `shutdown` both, or one of them beside a configuration | warning |
//! | no configuration; a setting that would write others, or has no name | error |
//! | the node would stay in provisioning mode | error if it says so, else warning |
//! | another identity than the node's | warning; error for a node that gets a server JWT |
//! | server JWT or seed where the node does not write them | warning |
//! | `exp` of the server JWT that is not used as written | warning |
//! | certificate that does not fit key, identity, CA or date; a key that nodes cannot use, or that cannot be encrypted | error |
//! | key, certificate or CA that the node drops because a part is missing | error for a key, else warning |
//! | policies under names that the node refuses, or that lead elsewhere | error |
//! | version that is never reached, or not asked for | warning |
//! | more than a message may hold | error |
//!
//! What nodes do with an answer is in go-choria, `providers/agent/mcorpc/golang/provision/configure_action.go` and
//! `restart_action.go`. The original checks none of this.

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

use openssl::asn1::Asn1Time;
use openssl::error::ErrorStack;
use openssl::nid::Nid;
use openssl::stack::Stack;
use openssl::x509::store::X509StoreBuilder;
use openssl::x509::verify::{X509VerifyFlags, X509VerifyParam};
use openssl::x509::{X509, X509Ref, X509Req, X509StoreContext};

use super::claims::{self, Expiry, Warning};
use crate::config::{Enrollment, Features};
use crate::errors::chain;
use crate::helper::Answer;
use crate::pki::csr::Csr;
use crate::pki::ecdh::{self, PrivateKey};
use crate::protocol::Identity;
use crate::rpc::actions::{Call, Configure};

/// What is known of the node an answer is for.
#[derive(Debug, Clone, Copy)]
pub struct Known<'a> {
    /// Its name.
    pub identity: &'a Identity,
    /// Whether it provisions unless its configuration says otherwise, by its provisioning JWT.
    pub is_provisioning_default: bool,
    /// Its certificate request, if it made one.
    pub csr: Option<&'a Csr>,
    /// Where it keeps its certificates, if it said so; empty if not.
    pub ssldir: &'a str,
    /// Where it keeps its seed and will write its server JWT, if it made a key; empty if not.
    pub directory: &'a str,
    /// The same for all nodes.
    pub site: Site<'a>,
}

/// What is known whatever the node.
#[derive(Debug, Clone, Copy)]
pub struct Site<'a> {
    /// What is done for nodes.
    pub features: Features,
    /// Now, in seconds since 1970.
    pub unix_time: i64,
    /// How much a node can be sent.
    pub room: Room<'a>,
}

/// How large a message may be.
#[derive(Clone, Copy)]
pub struct Room<'a> {
    /// The broker's limit, in bytes.
    pub max_payload: usize,
    /// How many bytes the message with this `configure` request would have.
    pub size_of: &'a dyn Fn(&str) -> usize,
}

impl fmt::Debug for Room<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Room").field("max_payload", &self.max_payload).finish_non_exhaustive()
    }
}

/// One thing that is wrong with an answer. Displays as its text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// How bad it is.
    pub severity: Severity,
    /// What it is, and how to put it right.
    pub text: String,
}

/// Whether an answer can still be sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Severity {
    /// It is sent.
    Warning,
    /// It is not.
    Error,
}

impl Finding {
    /// A private key that cannot be sent.
    pub fn of_key(error: &ecdh::Error) -> Finding {
        Finding { severity: Severity::Error, text: chain(error) }
    }

    /// A claim of the server JWT that will not be as wished.
    pub fn of_claims(warning: &Warning) -> Finding {
        Finding { severity: Severity::Warning, text: warning.to_string() }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// Looks at `answer`, in the order of the table above.
pub fn lint(answer: &Answer, known: &Known<'_>) -> Vec<Finding> {
    let mut findings = Findings(Vec::new());
    check_choice(answer, &mut findings);
    if answer.defer || answer.shutdown {
        // Nothing of the rest is used.
        return findings.0;
    }

    check_settings(&answer.configuration, &mut findings);
    if answer.configuration.is_empty() {
        // What it lacks besides would only hide that.
        return findings.0;
    }
    check_provision(answer, known, &mut findings);
    check_identity(answer, known, &mut findings);
    if known.site.features.enrollment == Enrollment::OrganizationIssuer {
        check_credentials(answer, known.directory, &mut findings);
        check_expiry(answer, known.site.unix_time, &mut findings);
    }
    check_certificate(answer, known, &mut findings);
    check_policies("action_policies", ".policy", &answer.action_policies, &mut findings);
    check_policies("opa_policies", ".rego", &answer.opa_policies, &mut findings);
    check_upgrade(&answer.upgrade, known.site.features.upgrades, &mut findings);
    check_size(answer, known, &mut findings);
    findings.0
}

struct Findings(Vec<Finding>);

impl Findings {
    fn warn(&mut self, text: impl Into<String>) {
        self.0.push(Finding { severity: Severity::Warning, text: text.into() });
    }

    fn error(&mut self, text: impl Into<String>) {
        self.0.push(Finding { severity: Severity::Error, text: text.into() });
    }
}

fn check_choice(answer: &Answer, findings: &mut Findings) {
    if answer.defer && answer.shutdown {
        findings.warn("both defer and shutdown are set and the node is deferred: set one of them");
    }
    if (answer.defer || answer.shutdown) && !answer.configuration.is_empty() {
        let which = if answer.defer { "defer" } else { "shutdown" };
        findings.warn(format!(
            "there is a configuration, which is not used because {which} is set: leave out one of them"
        ));
    }
}

/// A node writes each setting as `key=value`, raw: a line break would begin another setting.
fn check_settings(configuration: &BTreeMap<String, String>, findings: &mut Findings) {
    const BREAKS: [char; 2] = ['\n', '\0'];

    if configuration.is_empty() {
        // The original's words, up to the colon.
        findings.error(
            "empty configuration: answer with all settings of the node, or with defer or shutdown",
        );
    }
    for (key, value) in configuration {
        if key.trim().is_empty() {
            findings.error("the configuration has a setting without a name: give it one");
        } else if key.contains(BREAKS) || key.contains('=') {
            findings.error(format!(
                "the name of setting {} holds a line break, a NUL or an equals sign and would write other settings: remove it",
                shown(key)
            ));
        }
        if value.contains(BREAKS) {
            findings.error(format!(
                "the value of setting {} holds a line break or a NUL and would write other settings: remove it",
                shown(key)
            ));
        }
    }
}

/// The settings called `name`; a node trims names, so there may be several.
fn settings<'a>(answer: &'a Answer, name: &str) -> impl Iterator<Item = &'a str> {
    let named = answer.configuration.iter().filter(move |(key, _)| key.trim() == name);
    named.map(|(_, value)| value.trim())
}

/// The words Choria's configuration files have for true; all others are false.
fn is_true(value: &str) -> bool {
    matches!(value.to_ascii_lowercase().as_str(), "1" | "yes" | "true" | "y" | "t")
}

/// A node refuses to restart into provisioning mode; without the setting, its JWT's default decides.
fn check_provision(answer: &Answer, known: &Known<'_>, findings: &mut Findings) {
    const PROVISION: &str = "plugin.choria.server.provision";

    if settings(answer, PROVISION).any(is_true) {
        findings.error(format!(
            "{PROVISION} is true, and the node refuses to restart with it: set it to 0"
        ));
    } else if known.is_provisioning_default && settings(answer, PROVISION).next().is_none() {
        findings.warn(format!(
            "the configuration does not set {PROVISION}, and the node will come back to be provisioned again and again: set it to 0"
        ));
    }
}

/// A server JWT is for one name, and its node cannot connect under another.
fn check_identity(answer: &Answer, known: &Known<'_>, findings: &mut Findings) {
    let identity = known.identity.as_str();
    for configured in settings(answer, "identity").filter(|configured| *configured != identity) {
        let configured = shown(configured);
        if known.site.features.enrollment == Enrollment::OrganizationIssuer {
            findings.error(format!(
                "the configuration sets identity to {configured}, but the server JWT is for {identity} and the node could never connect: set it to {identity} or leave it out"
            ));
        } else {
            findings.warn(format!(
                "the configuration sets identity to {configured} and the node will change its name: set it to {identity} or leave it out"
            ));
        }
    }
}

/// A node that does not find its server JWT and seed deletes them and comes back to be provisioned.
fn check_credentials(answer: &Answer, directory: &str, findings: &mut Findings) {
    let family = if settings(answer, "plugin.security.provider").any(|name| name == "choria") {
        "plugin.security.choria"
    } else if settings(answer, "plugin.security.server_anon_tls").any(is_true) {
        "plugin.choria.security.server"
    } else {
        // Nothing in this configuration reads them.
        return;
    };
    if directory.is_empty() {
        return;
    }
    for (setting, file) in [("token_file", "server.jwt"), ("seed_file", "server.seed")] {
        let name = format!("{family}.{setting}");
        let expected = joined(directory, file);
        match settings(answer, &name).next() {
            Some(path) if is_same_path(path, &expected) => {}
            Some(path) => findings.warn(format!(
                "the configuration sets {name} to {}, where the node will find nothing and come back to be provisioned: set it to {expected}",
                shown(path)
            )),
            None => findings.warn(format!(
                "the configuration does not set {name}, and the node will come back to be provisioned: set it to {expected}"
            )),
        }
    }
}

/// `file` in a directory of a node, which may run Windows.
fn joined(directory: &str, file: &str) -> String {
    let separator = if directory.contains('\\') && !directory.contains('/') { '\\' } else { '/' };
    format!("{}{separator}{file}", directory.trim_end_matches(['/', '\\']))
}

/// Whether two paths of a node are the same, but for how their separators are written.
fn is_same_path(one: &str, two: &str) -> bool {
    let [one, two] = [one, two].map(|path| path.replace('\\', "/"));
    Path::new(&one) == Path::new(&two)
}

fn check_expiry(answer: &Answer, unix_time: i64, findings: &mut Findings) {
    let wishes = answer.server_claims.as_deref();
    let Some((exp, meaning)) = wishes.and_then(|wishes| claims::expiry(wishes, unix_time)) else {
        return;
    };
    match meaning {
        Expiry::At(_) => {}
        Expiry::In(_) => findings.warn(format!(
            "exp of server_claims is {exp} and is taken as a duration in seconds: give seconds since 1970"
        )),
        Expiry::TooEarly => findings.warn(format!(
            "exp of server_claims is {exp}, which is past or within an hour, and the default validity is used: give seconds since 1970"
        )),
    }
}

fn check_certificate(answer: &Answer, known: &Known<'_>, findings: &mut Findings) {
    check_completeness(answer, known, findings);
    if answer.key.is_some() && !known.site.features.jwt {
        // The original's words, up to the colon.
        findings.error(
            "private key received from helper but server did not start Diffie-Hellman exchange: turn on the feature jwt",
        );
    }
    let key = match answer.key.as_ref().map(|key| PrivateKey::from_pem(key.expose())).transpose() {
        Ok(key) => key,
        Err(error) => return findings.0.push(Finding::of_key(&error)),
    };
    if answer.certificate.is_empty() {
        return;
    }
    let certificates = match certificates("certificate", &answer.certificate) {
        Ok(certificates) => certificates,
        Err(text) => return findings.error(text),
    };
    let Some(certificate) = certificates.first() else { return };
    let openssl =
        |error: ErrorStack| format!("the certificate cannot be checked, {error}: sign another");

    match fits_key(certificate, key.as_ref(), known.csr) {
        Ok(None) => {}
        Ok(Some(other)) => findings.error(format!(
            "the certificate is not for the key of {other}, and the node could not use it: sign that one"
        )),
        Err(error) => findings.error(openssl(error)),
    }
    if !is_for(certificate, known.identity.as_str()) {
        findings.error(format!(
            "the certificate names {} and not {}: sign the request of this node",
            shown(&common_name(certificate)),
            known.identity
        ));
    }
    match is_expired(certificate, known.site.unix_time) {
        Ok(false) => {}
        Ok(true) => {
            return findings.error(format!(
                "the certificate expired on {}: sign a new one",
                certificate.not_after()
            ));
        }
        Err(error) => return findings.error(openssl(error)),
    }
    if answer.ca.is_empty() {
        return;
    }
    match check_chain(&certificates, &answer.ca, known.site.unix_time) {
        Ok(None) => {}
        Ok(Some(text)) => findings.error(text),
        Err(error) => findings.error(openssl(error)),
    }
}

/// A node writes nothing at all unless it has certificate, CA and directory.
fn check_completeness(answer: &Answer, known: &Known<'_>, findings: &mut Findings) {
    let has = [
        ("key", answer.key.is_some()),
        ("certificate", !answer.certificate.is_empty()),
        ("ca", !answer.ca.is_empty()),
    ];
    let needs =
        [has[1], has[2], ("ssldir", !(known.ssldir.is_empty() && answer.ssldir.is_empty()))];
    let names = |list: &[(&'static str, bool)], is_there: bool| -> Vec<&str> {
        list.iter().filter(|(_, has)| *has == is_there).map(|(name, _)| *name).collect()
    };
    let (given, missing) = (names(&has, true), names(&needs, false));
    if given.is_empty() || missing.is_empty() {
        return;
    }
    let text = format!(
        "there is {} without {}, and the node drops it silently: give all of certificate, ca and ssldir",
        given.join(" and "),
        missing.join(" and "),
    );
    match answer.key {
        Some(_) => findings.error(text),
        None => findings.warn(text),
    }
}

/// All certificates in `text`.
fn certificates(name: &str, text: &str) -> Result<Vec<X509>, String> {
    match X509::stack_from_pem(text.as_bytes()) {
        Ok(certificates) if !certificates.is_empty() => Ok(certificates),
        _ => Err(format!("{name} holds no readable certificate: give it as PEM")),
    }
}

/// Whose key the certificate must be for, and is not.
fn fits_key(
    certificate: &X509Ref,
    key: Option<&PrivateKey>,
    csr: Option<&Csr>,
) -> Result<Option<&'static str>, ErrorStack> {
    let public = certificate.public_key()?;
    // A key that comes along replaces the one the node made for its request.
    let (owner, fits) = match (key, csr) {
        (Some(key), _) => ("the answer", key.fits(&public)),
        (None, Some(csr)) => {
            let request = X509Req::from_pem(csr.pem().as_bytes())?;
            ("the node's request", request.public_key()?.public_eq(&public))
        }
        (None, None) => return Ok(None),
    };
    Ok((!fits).then_some(owner))
}

fn is_for(certificate: &X509Ref, identity: &str) -> bool {
    let names = certificate.subject_alt_names();
    let mut names = names.iter().flatten().filter_map(|name| name.dnsname());
    common_name(certificate) == identity || names.any(|name| name.eq_ignore_ascii_case(identity))
}

fn common_name(certificate: &X509Ref) -> String {
    let mut entries = certificate.subject_name().entries_by_nid(Nid::COMMONNAME);
    let name = entries.next().and_then(|entry| entry.data().to_string().ok());
    name.unwrap_or_default()
}

fn is_expired(certificate: &X509Ref, unix_time: i64) -> Result<bool, ErrorStack> {
    let now = Asn1Time::from_unix(unix_time)?;
    Ok(certificate.not_after().compare(&now)?.is_le())
}

/// What keeps a node that trusts `ca` from trusting the first of `certificates`; the others may lie between.
fn check_chain(
    certificates: &[X509],
    ca: &str,
    unix_time: i64,
) -> Result<Option<String>, ErrorStack> {
    let (leaf, between) = certificates.split_first().expect("there is at least one");
    let trusted = match self::certificates("ca", ca) {
        Ok(trusted) => trusted,
        Err(text) => return Ok(Some(text)),
    };
    let mut store = X509StoreBuilder::new()?;
    for certificate in trusted {
        store.add_cert(certificate)?;
    }
    let mut rules = X509VerifyParam::new()?;
    // An intermediate CA may be all that a site trusts.
    rules.set_flags(X509VerifyFlags::PARTIAL_CHAIN)?;
    // The CA's clock may be ahead of ours.
    rules.set_time(unix_time.saturating_add(CLOCK_SECS_MAX));
    store.set_param(&rules)?;
    let mut chain = Stack::new()?;
    for certificate in between {
        chain.push(certificate.clone())?;
    }
    X509StoreContext::new()?.init(&store.build(), leaf, &chain, |context| {
        Ok(match context.verify_cert()? {
            true => None,
            false => Some(format!(
                "the certificate is not valid under ca, {}: give the CA that signed it",
                context.error().error_string()
            )),
        })
    })
}

/// How far a CA's clock may be ahead of ours, in seconds.
const CLOCK_SECS_MAX: i64 = 300;

/// A node refuses names without the suffix, and writes others wherever they lead.
fn check_policies(
    kind: &str,
    suffix: &str,
    policies: &BTreeMap<String, String>,
    findings: &mut Findings,
) {
    for name in policies.keys() {
        if !name.ends_with(suffix) || name.contains(['/', '\\', '\0']) || name.contains("..") {
            findings.error(format!(
                "{kind} has the name {}: names must end in {suffix} and hold no path",
                shown(name)
            ));
        }
    }
}

fn check_upgrade(wish: &str, is_on: bool, findings: &mut Findings) {
    if wish.is_empty() {
        return;
    }
    if !is_on {
        return findings.warn(format!(
            "there is an upgrade to {}, but the feature upgrades is off: turn it on or leave it out",
            shown(wish)
        ));
    }
    // Around the version it does no harm: that is cut off.
    let wish = wish.trim();
    let fault = if wish.contains(char::is_whitespace) {
        "white space"
    } else if wish.contains('-') {
        "a release"
    } else if wish.starts_with(['v', 'V']) && wish[1..].starts_with(|c: char| c.is_ascii_digit()) {
        "a leading v"
    } else {
        return;
    };
    findings.warn(format!(
        "the upgrade {} holds {fault}, which is in no version that nodes report, so it could never be reached: give the bare version, like 0.30.0",
        shown(wish)
    ));
}

/// A server JWT has about half of this.
const SERVER_JWT_BYTES: usize = 2_048;

/// What encryption adds to a key, and our half of the exchange.
const SEALED_BYTES: usize = 192;

/// A longer provisioning token is hardly seen.
const TOKEN_BYTES: usize = 64;

/// No byte of a request becomes more than this many on the wire: of all, `<` is escaped worst, and base64 adds a third.
const GROWTH_MAX: usize = 10;

/// More than the layers around a request have, with a certificate or a client JWT.
const ENVELOPE_BYTES_MAX: usize = 32 * 1024;

fn check_size(answer: &Answer, known: &Known<'_>, findings: &mut Findings) {
    let config = serde_json::to_string(&answer.configuration)
        .expect("an object of texts can be written as JSON");
    // What is made after this check, or must not be copied, is here by its length and lines.
    let key = answer.key.as_ref().map(|key| {
        let lines = key.expose().chars().map(|c| if c == '\n' { c } else { ' ' });
        lines.chain(std::iter::repeat_n(' ', SEALED_BYTES)).collect::<String>()
    });
    let server_jwt = match known.site.features.enrollment {
        Enrollment::OrganizationIssuer => " ".repeat(SERVER_JWT_BYTES),
        Enrollment::Off | Enrollment::Pki => String::new(),
    };
    let body = Configure {
        action_policies: &answer.action_policies,
        ca: &answer.ca,
        certificate: &answer.certificate,
        config: &config,
        ecdh_public: "",
        key: key.as_deref().unwrap_or_default(),
        opa_policies: &answer.opa_policies,
        server_jwt: &server_jwt,
        ssldir: if known.ssldir.is_empty() { &answer.ssldir } else { known.ssldir },
        token: &" ".repeat(TOKEN_BYTES),
    }
    .body();

    let Room { max_payload, size_of } = known.site.room;
    if body.len() * GROWTH_MAX + ENVELOPE_BYTES_MAX <= max_payload {
        return;
    }
    let size = size_of(&body);
    if size > max_payload {
        let policies = |policies: &BTreeMap<String, String>| -> usize {
            policies.iter().map(|(name, text)| name.len() + text.len()).sum()
        };
        findings.error(format!(
            "the answer makes a message of {size} bytes and the broker takes {max_payload}: \
             shorten the configuration ({} bytes), policies ({}) or certificates ({}), or raise max_payload of the broker",
            config.len(),
            policies(&answer.action_policies) + policies(&answer.opa_policies),
            answer.certificate.len() + answer.ca.len(),
        ));
    }
}

/// Foreign text as a message shows it: bounded, and on one line.
pub(super) fn shown(text: &str) -> String {
    const QUOTE_MAX: usize = 200;
    format!("{:?}", text.chars().take(QUOTE_MAX).collect::<String>())
}

#[cfg(test)]
pub(super) mod testing {
    //! A CA, and what it signs.

    use openssl::asn1::{Asn1Integer, Asn1Time};
    use openssl::bn::BigNum;
    use openssl::ec::{EcGroup, EcKey};
    use openssl::hash::MessageDigest;
    use openssl::nid::Nid;
    use openssl::pkey::{HasPublic, PKey, PKeyRef, Private};
    use openssl::x509::extension::{BasicConstraints, SubjectAlternativeName};
    use openssl::x509::{X509, X509Builder, X509Name, X509Req, X509ReqBuilder};

    use crate::pki::csr::Csr;

    pub(in crate::node) struct Ca {
        key: PKey<Private>,
        certificate: X509,
    }

    /// When a certificate is valid, in seconds since 1970.
    pub(in crate::node) type Validity = std::ops::Range<i64>;

    impl Ca {
        pub fn new(name: &str, validity: Validity) -> Ca {
            let key = key();
            let certificate = certificate(name, &key, (name, &key), validity, |builder| {
                let constraints = BasicConstraints::new().critical().ca().build().unwrap();
                builder.append_extension(constraints).unwrap();
            });
            Ca { key, certificate }
        }

        /// A CA below this one.
        pub fn below(&self, name: &str, validity: Validity) -> Ca {
            let key = key();
            let issuer = (self.name(), &*self.key);
            let certificate = certificate(name, &key, (&issuer.0, issuer.1), validity, |builder| {
                let constraints = BasicConstraints::new().critical().ca().build().unwrap();
                builder.append_extension(constraints).unwrap();
            });
            Ca { key, certificate }
        }

        pub fn pem(&self) -> String {
            pem(&self.certificate)
        }

        pub fn issue<T: HasPublic>(
            &self,
            name: &str,
            public: &PKeyRef<T>,
            validity: Validity,
        ) -> String {
            pem(&certificate(name, public, (&self.name(), &self.key), validity, |_| ()))
        }

        /// The same with an alternative name.
        pub fn issue_also<T: HasPublic>(
            &self,
            name: &str,
            also: &str,
            public: &PKeyRef<T>,
            validity: Validity,
        ) -> String {
            let issuer = (self.name(), &*self.key);
            pem(&certificate(name, public, (&issuer.0, issuer.1), validity, |builder| {
                let names = SubjectAlternativeName::new()
                    .dns(also)
                    .build(&builder.x509v3_context(None, None))
                    .unwrap();
                builder.append_extension(names).unwrap();
            }))
        }

        fn name(&self) -> String {
            super::common_name(&self.certificate)
        }
    }

    pub(in crate::node) fn key() -> PKey<Private> {
        let group = EcGroup::from_curve_name(Nid::X9_62_PRIME256V1).unwrap();
        PKey::from_ec_key(EcKey::generate(&group).unwrap()).unwrap()
    }

    pub(in crate::node) fn csr(identity: &str, key: &PKeyRef<Private>) -> Csr {
        let mut builder = X509ReqBuilder::new().unwrap();
        builder.set_subject_name(&named(identity)).unwrap();
        builder.set_pubkey(key).unwrap();
        builder.sign(key, MessageDigest::sha256()).unwrap();
        let pem = String::from_utf8(builder.build().to_pem().unwrap()).unwrap();
        Csr::check(pem, identity, &[]).unwrap()
    }

    /// The key a request is for.
    pub(in crate::node) fn public_key(csr: &str) -> PKey<openssl::pkey::Public> {
        X509Req::from_pem(csr.as_bytes()).unwrap().public_key().unwrap()
    }

    fn certificate<T: HasPublic>(
        name: &str,
        public: &PKeyRef<T>,
        (issuer, issuer_key): (&str, &PKeyRef<Private>),
        validity: Validity,
        extend: impl FnOnce(&mut X509Builder),
    ) -> X509 {
        let mut builder = X509Builder::new().unwrap();
        builder.set_version(2).unwrap();
        let serial = Asn1Integer::from_bn(&BigNum::from_u32(1).unwrap()).unwrap();
        builder.set_serial_number(&serial).unwrap();
        builder.set_subject_name(&named(name)).unwrap();
        builder.set_issuer_name(&named(issuer)).unwrap();
        builder.set_pubkey(public).unwrap();
        builder.set_not_before(&Asn1Time::from_unix(validity.start).unwrap()).unwrap();
        builder.set_not_after(&Asn1Time::from_unix(validity.end).unwrap()).unwrap();
        extend(&mut builder);
        builder.sign(issuer_key, MessageDigest::sha256()).unwrap();
        builder.build()
    }

    fn named(name: &str) -> X509Name {
        let mut builder = X509Name::builder().unwrap();
        builder.append_entry_by_nid(Nid::COMMONNAME, name).unwrap();
        builder.build()
    }

    fn pem(certificate: &X509) -> String {
        String::from_utf8(certificate.to_pem().unwrap()).unwrap()
    }
}
