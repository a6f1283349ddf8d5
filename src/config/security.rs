//! How we prove who we are to brokers and nodes, and whose word about a broker counts: Choria's security providers.
//!
//! [`Security`] says which files these are; [`Security::read`] reads and checks them, at start and again for each
//! connection, so that renewed ones need no restart. They are read together and checked against each other, since in the
//! middle of a rotation an old key may stand beside a new certificate for a moment.
//!
//! Source: go-choria's `providers/security/filesec`, `puppetsec` and `choria`, and `setupSecurity` in
//! `choria/framework.go`. What they find out at the first request is found out here at start.

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::error::Error;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use ed25519_dalek::VerifyingKey;
use openssl::asn1::Asn1Time;
use openssl::x509::X509Ref;
use zeroize::Zeroizing;

use crate::config::choria::keys::{Fate, fate};
use crate::config::choria::values::{boolean, path};
use crate::config::report::Report;
use crate::config::surroundings::Surroundings;
use crate::config::{is_open_to_all, read_file, read_secret};
use crate::errors::chain;
use crate::file_kind;
use crate::jwt::{VerifyKey, VerifyKind, client};
use crate::pki::x509;
use crate::protocol::Identity;
use crate::transport::tls::{self, Connector, Offer, Trust};

/// How we prove who we are, and whom we believe.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Security {
    /// Not at all, and nobody: `choria_insecure`.
    Off,
    /// A certificate, which also signs requests of protocol version 1; providers `file` and `puppet`.
    X509(X509Files),
    /// A token and its seed, which sign requests of protocol version 2; provider `choria`.
    Issuer(IssuerFiles),
}

/// The files of providers `file` and `puppet`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct X509Files {
    /// Our certificate, and those between it and its authority.
    certificate: File,
    /// Its key.
    key: File,
    /// The authorities of brokers.
    ca: File,
    /// Whether a broker's certificate without alternative names may name its host as common name.
    legacy_names: bool,
    offer: Offer,
}

/// The files of provider `choria`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IssuerFiles {
    /// Our client JWT.
    token: File,
    /// The seed of the key it names.
    seed: File,
    /// The authorities of brokers; without, brokers are not verified.
    ca: Option<File>,
    /// Certificate and key, used while both files exist.
    identity: Option<(File, File)>,
    offer: Offer,
}

#[cfg(test)]
impl IssuerFiles {
    /// Names of files that don't exist.
    pub fn nowhere() -> IssuerFiles {
        let file = |setting| File { setting, path: "/nowhere".into(), line: None };
        let offer = Offer::default();
        IssuerFiles { token: file(TOKEN), seed: file(SEED), ca: None, identity: None, offer }
    }
}

/// A file, and the setting that names it.
#[derive(Debug, Clone, PartialEq, Eq)]
struct File {
    setting: &'static str,
    path: PathBuf,
    line: Option<usize>,
}

/// What the files hold, checked.
#[derive(Debug)]
pub struct Keys {
    /// Begins TLS sessions; absent exactly when security is off.
    pub tls: Option<Connector>,
    /// What vouches for our requests.
    pub signer: Signer,
}

/// What vouches for our requests.
#[derive(Debug)]
pub enum Signer {
    /// Nothing.
    Nothing,
    /// A certificate and its key.
    X509(Box<x509::Signer>),
    /// A token and the key it names.
    Token(Box<client::Credentials>),
}

impl Keys {
    /// When the token we log in with expires, in seconds since 1970, if there is one and it does.
    pub fn expires(&self) -> Option<i64> {
        match &self.signer {
            Signer::Token(credentials) => credentials.expires(),
            Signer::Nothing | Signer::X509(_) => None,
        }
    }
}

impl Security {
    /// Reads all files, at `now`, in seconds since 1970.
    ///
    /// # Errors
    ///
    /// [`Problem`], the first one: a file can't be read, or what is in it can't be used, or not with the others.
    pub fn read(&self, now: i64) -> Result<Keys, Problem> {
        let mut problems = Vec::new();
        match (self.read_all(now, &mut problems), problems.into_iter().next()) {
            (Some(keys), None) => Ok(keys),
            (_, Some(problem)) => Err(problem),
            (None, None) => unreachable!("nothing is missing without a reason"),
        }
    }

    /// Reads as much as can be read; `None` only with a problem.
    fn read_all(&self, now: i64, problems: &mut Vec<Problem>) -> Option<Keys> {
        match self {
            Security::Off => Some(Keys { tls: None, signer: Signer::Nothing }),
            Security::X509(files) => files.read(problems),
            Security::Issuer(files) => files.read(now, problems),
        }
    }
}

impl Security {
    /// Reads all files at start, and says all that is wrong with them, and what will be.
    fn check(&self, now: i64, report: &mut Report) -> Option<Keys> {
        let mut problems = Vec::new();
        let keys = self.read_all(now, &mut problems);
        for problem in problems {
            report.denied |= problem.is_denied;
            report.error(problem.file.line, problem.to_string());
        }
        let (secrets, certificates) = match self {
            Security::Off => return keys,
            Security::X509(X509Files { certificate, key, .. }) => (vec![key], Some(certificate)),
            Security::Issuer(IssuerFiles { seed, identity, .. }) => match identity {
                Some((certificate, key)) => (vec![seed, key], Some(certificate)),
                None => (vec![seed], None),
            },
        };
        for File { setting, path, line } in secrets {
            if is_open_to_all(path) {
                let path = path.display();
                report.warn(*line, format!("{setting}: everybody on this machine can read {path}"));
            }
        }
        if let Some(File { setting, path, line }) = certificates
            && let Ok(bytes) = read_file(path)
            && let Ok(certificates) = x509::certificates(&String::from_utf8_lossy(&bytes))
            && let Some(text) = certificates.first().and_then(|own| end_of(own, now))
        {
            report.warn(*line, format!("{setting}: {} {text}", path.display()));
        }
        if let (Security::Issuer(files), Some(keys)) = (self, &keys)
            && let Some(expires) = keys.expires()
            && let Some(text) = self.expiry_warning(expires, now)
        {
            report.warn(files.token.line, text);
        }
        keys
    }

    /// What brokers that believe the same authorities as we do have against our certificate at `now`, in seconds since 1970. That
    /// they do is not known; nothing is said of files that can't be read.
    pub fn chain_fault(&self, now: i64) -> Option<ChainFault> {
        let (own, ca) = match self {
            Security::Off => return None,
            Security::X509(X509Files { certificate, ca, .. }) => (certificate, ca),
            Security::Issuer(files) => (files.existing_identity()?.0, files.ca.as_ref()?),
        };
        let read = |file: &File| x509::certificates(&file.text().ok()?).ok();
        let fault = x509::verify(&read(own)?, &read(ca)?, now).err()?;
        let (File { setting, path, .. }, ca) = (own, ca.path.display());
        let path = path.display();
        Some(ChainFault {
            text: format!("{setting}: {path}: whoever goes by {ca} refuses it: {fault}"),
            is_certain: fault.is_expired(),
        })
    }

    /// What an operator has to know of a token that expires soon, at `expires`.
    pub fn expiry_warning(&self, expires: i64, now: i64) -> Option<String> {
        let Security::Issuer(IssuerFiles { token: File { setting, path, .. }, .. }) = self else {
            return None;
        };
        client::expires_soon(expires, now).then(|| {
            let (path, expires) = (path.display(), client::date(expires));
            format!("{setting}: {path} expires on {expires}: replace it")
        })
    }
}

/// What is wrong with our certificate in the eyes of others.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChainFault {
    /// In words, the setting first.
    pub text: String,
    /// Nobody takes it, whoever they believe.
    pub is_certain: bool,
}

impl X509Files {
    fn read(&self, problems: &mut Vec<Problem>) -> Option<Keys> {
        let mut note = Noted(problems);
        let certificate = note.take(self.certificate.text());
        let key = note.take(self.key.secret());
        let trust = note.take(self.ca.trust(self.legacy_names));
        let (certificate, key) = (certificate?, key?);
        // It is the stricter one, so what it takes is good enough for TLS.
        let signer = x509::Signer::new(certificate.clone(), &key);
        let signer =
            note.take(signer.map_err(|error| fault(&self.certificate, &self.key, error)))?;
        let identity = note.take(identity(&self.certificate, &certificate, &self.key, &key))?;
        let tls = connector(Some(trust?), Some(&identity), &self.offer, &self.certificate);
        let tls = note.take(tls)?;
        Some(Keys { tls: Some(tls), signer: Signer::X509(Box::new(signer)) })
    }
}

impl IssuerFiles {
    fn read(&self, now: i64, problems: &mut Vec<Problem>) -> Option<Keys> {
        let mut note = Noted(problems);
        let token = note.take(self.token.secret());
        let seed = note.take(self.seed.secret());
        let trust = match &self.ca {
            None => Some(None),
            Some(ca) => note.take(ca.trust(false)).map(Some),
        };
        let identity = match self.existing_identity() {
            None => Some(None),
            Some((certificate_file, key_file)) => {
                let certificate = note.take(certificate_file.text());
                let key = note.take(key_file.secret());
                let both = certificate.zip(key);
                both.and_then(|(certificate, key)| {
                    note.take(identity(certificate_file, &certificate, key_file, &key)).map(Some)
                })
            }
        };
        let credentials = token.zip(seed).and_then(|(token, seed)| {
            let credentials = client::Credentials::check(&token, &seed, now);
            note.take(credentials.map_err(|error| {
                let file = match error {
                    client::Error::Seed(_) | client::Error::SeedMismatch => &self.seed,
                    _ => &self.token,
                };
                file.unusable(error)
            }))
        });
        let tls = note.take(connector(trust?, identity?.as_ref(), &self.offer, &self.token))?;
        Some(Keys { tls: Some(tls), signer: Signer::Token(Box::new(credentials?)) })
    }

    /// The original, too, looks whether the two files are there.
    fn existing_identity(&self) -> Option<(&File, &File)> {
        let (certificate, key) = self.identity.as_ref()?;
        (certificate.path.exists() && key.path.exists()).then_some((certificate, key))
    }
}

/// Collects problems, so that all of them can be shown at once.
struct Noted<'p>(&'p mut Vec<Problem>);

impl Noted<'_> {
    fn take<T>(&mut self, result: Result<T, Problem>) -> Option<T> {
        result.map_err(|problem| self.0.push(problem)).ok()
    }
}

impl File {
    fn text(&self) -> Result<String, Problem> {
        let bytes = read_file(&self.path).map_err(|error| self.unreadable(error))?;
        String::from_utf8(bytes).map_err(|_| self.unusable(io::Error::other("it is no text")))
    }

    fn secret(&self) -> Result<Zeroizing<String>, Problem> {
        read_secret(&self.path).map_err(|error| self.unreadable(error))
    }

    fn trust(&self, legacy_names: bool) -> Result<Trust, Problem> {
        let authorities =
            x509::certificates(&self.text()?).map_err(|error| self.unusable(error))?;
        Ok(Trust { authorities, source: self.path.display().to_string(), legacy_names })
    }

    fn unreadable(&self, error: io::Error) -> Problem {
        let is_denied = error.kind() == io::ErrorKind::PermissionDenied;
        Problem { is_denied, ..self.unusable(error) }
    }

    fn unusable(&self, error: impl Error + 'static) -> Problem {
        Problem { file: self.clone(), text: chain(&error), is_denied: false }
    }
}

fn identity(
    certificate_file: &File,
    certificate: &str,
    key_file: &File,
    key: &str,
) -> Result<tls::Identity, Problem> {
    let faulty = |error| fault(certificate_file, key_file, error);
    let certificates = x509::certificates(certificate).map_err(faulty)?;
    let key = x509::tls_key(key).map_err(faulty)?;
    let public = certificates.first().and_then(|own| own.public_key().ok());
    if !public.is_some_and(|public| public.public_eq(&key)) {
        return Err(faulty(x509::Error::Mismatch));
    }
    Ok(tls::Identity { certificates, key })
}

/// A fault of the one file or the other.
fn fault(certificate: &File, key: &File, error: x509::Error) -> Problem {
    match error {
        x509::Error::Certificate(_) => certificate.unusable(error),
        _ => key.unusable(error),
    }
}

fn connector(
    trust: Option<Trust>,
    identity: Option<&tls::Identity>,
    offer: &Offer,
    file: &File,
) -> Result<Connector, Problem> {
    Connector::new(trust, identity, offer).map_err(|error| file.unusable(error))
}

/// What is wrong with one of the files. Holds nothing secret.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    file: File,
    text: String,
    is_denied: bool,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let File { setting, path, .. } = &self.file;
        write!(f, "{setting}: {}: {}", path.display(), self.text)
    }
}

impl Error for Problem {}

/// What the client file says about security.
#[derive(Debug, Default)]
pub(super) struct Written {
    values: BTreeMap<String, (usize, String)>,
}

/// What security depends on beside its own settings.
pub(super) struct Given<'g> {
    /// `choria_insecure`
    pub is_off: bool,
    /// `leader_election`
    pub is_elected: bool,
    /// Our identity.
    pub identity: &'g Identity,
    /// The user we log in as.
    pub user: Option<&'g str>,
    pub surroundings: &'g Surroundings,
    /// In seconds since 1970.
    pub now: i64,
}

/// What was made of it.
pub(super) struct Checked {
    pub security: Security,
    /// The name of our certificate, or the one it would have.
    pub certname: String,
    /// The caller of our requests, if a token names it.
    pub caller: Option<String>,
}

pub(super) const PROVIDER: &str = "plugin.security.provider";
const SUITES: &str = "plugin.security.cipher_suites";
const CURVES: &str = "plugin.security.ecc_curves";
const LEGACY: &str = "plugin.security.support_legacy_certificates";
const FILE_CERTIFICATE: &str = "plugin.security.file.certificate";
const FILE_KEY: &str = "plugin.security.file.key";
const FILE_CA: &str = "plugin.security.file.ca";
pub(super) const SSLDIR: &str = "plugin.choria.ssldir";
const TOKEN: &str = "plugin.security.choria.token_file";
const SEED: &str = "plugin.security.choria.seed_file";
const CA: &str = "plugin.security.choria.ca";
const CERTIFICATE: &str = "plugin.security.choria.certificate";
const KEY: &str = "plugin.security.choria.key";
const TRUSTED_SIGNERS: &str = "plugin.security.choria.trusted_signers";
const ISSUERS: &str = "plugin.security.issuer.names";
const SIGNER_URL: &str = "plugin.choria.security.request_signer.url";
const SIGNER_SERVICE: &str = "plugin.choria.security.request_signer.service";
const SIGNER_TOKEN: &str = "plugin.choria.security.request_signer.token_file";
const SIGNER_SEED: &str = "plugin.choria.security.request_signer.seed_file";
const CLIENT_ANONYMOUS: &str = "plugin.security.client_anon_tls";
const SERVER_ANONYMOUS: &str = "plugin.security.server_anon_tls";
const SERVER_TOKEN: &str = "plugin.choria.security.server.token_file";
const SERVER_SEED: &str = "plugin.choria.security.server.seed_file";

/// The providers with which a setting counts. Tokens are not here: they name the caller, whatever the provider.
const OWNERS: [(&str, &[Provider]); 12] = [
    (PROVIDER, &[Provider::File, Provider::Puppet, Provider::Choria]),
    (SUITES, &[Provider::File, Provider::Puppet, Provider::Choria]),
    (CURVES, &[Provider::File, Provider::Puppet, Provider::Choria]),
    // Always so with Puppet.
    (LEGACY, &[Provider::File, Provider::Puppet]),
    (FILE_CERTIFICATE, &[Provider::File]),
    (FILE_KEY, &[Provider::File]),
    (FILE_CA, &[Provider::File]),
    (SSLDIR, &[Provider::Puppet]),
    (SEED, &[Provider::Choria]),
    (CA, &[Provider::Choria]),
    (CERTIFICATE, &[Provider::Choria]),
    (KEY, &[Provider::Choria]),
];

/// Where Puppet keeps its files, for root and below the home directory of others.
const PUPPET_DIRS: [&str; 2] = ["/etc/puppetlabs/puppet/ssl", "~/.puppetlabs/etc/puppet/ssl"];

impl Written {
    /// Whether `key` is about security.
    pub(super) fn is_about(key: &str) -> bool {
        let families = ["plugin.security.", "plugin.choria.security."];
        key == SSLDIR || families.iter().any(|family| key.starts_with(family))
    }

    /// Takes one setting; the last one of a key counts.
    pub(super) fn take(&mut self, line: usize, key: &str, value: &str) {
        self.values.insert(key.to_owned(), (line, value.to_owned()));
    }

    /// Makes up our mind; `None` only with an error.
    pub(super) fn check(&self, given: &Given<'_>, report: &mut Report) -> Option<Checked> {
        let provider = match self.get(PROVIDER) {
            _ if given.is_off => Provider::Off,
            None => Provider::Puppet,
            Some((line, name)) => provider(name).map_err(|why| report.error(line, why)).ok()?,
        };
        let certname = certname(provider, given);
        let security = match provider {
            Provider::Off => Security::Off,
            Provider::File => Security::X509(self.file(given, report)?),
            Provider::Puppet => Security::X509(self.puppet(given, &certname, report)?),
            Provider::Choria => Security::Issuer(self.choria(given, report)?),
        };
        self.check_unsupported(given.is_off, report);
        self.check_unused(provider, report);
        let mut caller = None;
        if provider != Provider::Off {
            let keys = security.check(given.now, report);
            if let Some(Keys { signer: Signer::Token(credentials), tls }) = &keys {
                caller = Some(credentials.caller().to_owned());
                let has_identity = tls.as_ref().is_some_and(Connector::has_identity);
                self.check_token(credentials, has_identity, given.now, report);
                if given.is_elected && !credentials.is_election_user() {
                    let (line, caller) = (self.line(TOKEN), credentials.caller());
                    report.warn(
                        line,
                        format!("{TOKEN}: the token of {caller} lacks the election_user permission, which leader_election should have: it was not made with --elections-user"),
                    );
                }
            }
            if given.user.is_none() {
                report.warn(
                    None,
                    "broker_provisioning_password: not set; Choria Brokers let only user provisioner in where nodes wait, and it has a password",
                );
            }
        }
        Some(Checked { security, certname, caller })
    }

    fn file(&self, given: &Given<'_>, report: &mut Report) -> Option<X509Files> {
        let mut demand = |setting, what| self.demand(setting, what, given, report);
        let certificate = demand(FILE_CERTIFICATE, "our certificate");
        let key = demand(FILE_KEY, "our private key");
        let ca = demand(FILE_CA, "the authorities that issue brokers' certificates");
        let offer = self.offer(report);
        let legacy_names = self.is_on(LEGACY);
        Some(X509Files { certificate: certificate?, key: key?, ca: ca?, legacy_names, offer })
    }

    fn puppet(&self, given: &Given<'_>, certname: &str, report: &mut Report) -> Option<X509Files> {
        // The original asks Puppet, which takes seconds to say one of these two.
        let (dir, line) = match self.path(SSLDIR, given) {
            Some(File { path, line, .. }) => {
                // Once for all that should be in it.
                if let Some(error) = no_folder(&path) {
                    report.denied |= error.kind() == io::ErrorKind::PermissionDenied;
                    report.error(line, format!("{SSLDIR}: {}: {error}", path.display()));
                    return None;
                }
                (path, line)
            }
            None => {
                let usual = PUPPET_DIRS[usize::from(!given.surroundings.is_root)];
                let dir = path(usual, given.surroundings);
                if !dir.is_dir() {
                    let dir = dir.display();
                    report.error(
                        None,
                        format!("{SSLDIR}: must be set for security provider puppet, since there is no {dir}; for other certificates set {PROVIDER} to file, for tokens to choria, and for neither choria_insecure in the YAML file"),
                    );
                    return None;
                }
                (dir, None)
            }
        };
        let file = |name: &str| File { setting: SSLDIR, path: dir.join(name), line };
        Some(X509Files {
            certificate: file(&format!("certs/{certname}.pem")),
            key: file(&format!("private_keys/{certname}.pem")),
            ca: file("certs/ca.pem"),
            // Certificates of older Puppet servers have common names only.
            legacy_names: true,
            offer: self.offer(report),
        })
    }

    fn choria(&self, given: &Given<'_>, report: &mut Report) -> Option<IssuerFiles> {
        for key in [SERVER_TOKEN, SERVER_SEED, SIGNER_TOKEN, SIGNER_SEED] {
            if let Some((line, _)) = self.get(key) {
                report.error(
                    line,
                    format!("{key}: can not be set when the choria security provider is used"),
                );
            }
        }
        self.check_issuers(report);
        let mut demand = |setting, what| self.demand(setting, what, given, report);
        let token = demand(TOKEN, "our client JWT");
        let seed = demand(SEED, "the seed that belongs to our client JWT");
        let ca = self.path(CA, given);
        if ca.is_none() {
            report.warn(
                None,
                format!("{CA}: not set, so no broker is verified, and whoever answers in its place gets our password and token"),
            );
        }
        let (certificate, key) = (self.path(CERTIFICATE, given), self.path(KEY, given));
        let offer = self.offer(report);
        Some(IssuerFiles { token: token?, seed: seed?, ca, identity: certificate.zip(key), offer })
    }

    /// What others would do for us, or would make us nobody: refused, unless there is no security anyway.
    fn check_unsupported(&self, is_off: bool, report: &mut Report) {
        for key in [SIGNER_URL, SIGNER_SERVICE, CLIENT_ANONYMOUS, SERVER_ANONYMOUS] {
            // Switched off it changes nothing.
            let Some((line, _)) = self.get(key).filter(|(_, value)| boolean(value) != Some(false))
            else {
                continue;
            };
            match fate(key) {
                Ok(Fate::Refused(why)) if is_off => {
                    report.warn(line, format!("{key}: ignored: {why}"))
                }
                Ok(Fate::Refused(why)) => report.error(line, format!("{key}: {why}")),
                Ok(Fate::Dropped(why)) => report.warn(line, format!("{key}: {why}")),
                _ => {}
            }
        }
    }

    /// Says which settings do nothing since they are for another provider, or for security where there is none.
    fn check_unused(&self, provider: Provider, report: &mut Report) {
        let is_unused =
            |key: &str, owners: &[Provider]| self.get(key).is_some() && !owners.contains(&provider);
        let unused = OWNERS.iter().filter(|(key, owners)| is_unused(key, owners));
        let unused: Vec<&str> = unused.map(|(key, _)| *key).collect();
        let reason = match provider {
            Provider::Off => "`choria_insecure` is on in the YAML file",
            Provider::File => "the security provider is file",
            Provider::Puppet => "the security provider is puppet",
            Provider::Choria => "the security provider is choria",
        };
        if let Some(first) = unused.first() {
            let keys = unused.join(", ");
            report.warn(self.line(first), format!("{keys}: no effect, since {reason}"));
        }
    }

    fn offer(&self, report: &mut Report) -> Offer {
        let mut offer = Offer::default();
        if let Some((line, list)) = self.get(SUITES) {
            for name in offer.restrict_suites(&names(list)) {
                report.warn(line, format!("{SUITES}: {name:?} is not known, and left out"));
            }
        }
        if let Some((line, list)) = self.get(CURVES) {
            for name in offer.restrict_curves(&names(list)) {
                report.warn(line, format!("{CURVES}: {name:?} is not known, and left out"));
            }
            if !offer.has_curves() {
                report.error(
                    line,
                    format!("{CURVES}: names none of X25519, CurveP256, CurveP384 and CurveP521"),
                );
            }
        }
        offer
    }

    /// Looks for what brokers and nodes would have against our token, which they keep to themselves.
    fn check_token(
        &self,
        credentials: &client::Credentials,
        has_identity: bool,
        now: i64,
        report: &mut Report,
    ) {
        let line = self.line(TOKEN);
        if let Err(error) = credentials.check_admission() {
            let text = format!("{TOKEN}: {error}");
            // Brokers without an organization issuer look at the certificate instead.
            match has_identity {
                true => report.warn(line, text),
                false => report.error(line, text),
            }
        }
        let organization = credentials.organization();
        if let Some(key) = self.issuer(organization)
            && let Err(error) = client::verify(credentials.token(), &key, now)
        {
            report.warn(
                line,
                format!("{TOKEN}: brokers will refuse it if the key of plugin.security.issuer.{organization}.public is theirs: {error}"),
            );
        }
    }

    /// What would keep the original from starting, though a provisioner has no use for it.
    fn check_issuers(&self, report: &mut Report) {
        let mut keys = Vec::new();
        if let Some((line, list)) = self.get(TRUSTED_SIGNERS) {
            keys.extend(
                names(list).into_iter().map(|text| (line, TRUSTED_SIGNERS.to_owned(), text)),
            );
        }
        if let Some((line, list)) = self.get(ISSUERS) {
            for name in names(list) {
                let key = issuer_key(name);
                match self.get(&key) {
                    Some((line, text)) => keys.push((line, key, text)),
                    None => {
                        report.error(line, format!("{ISSUERS}: names {name}, but {key} is not set"))
                    }
                }
            }
        }
        for (line, key, text) in keys {
            if let Err(error) = VerifyKey::from_hex(text) {
                report.error(line, format!("{key}: {error}"));
            }
        }
    }

    /// The key of an organization's issuer, as the file has it for brokers and nodes.
    fn issuer(&self, organization: &str) -> Option<VerifyingKey> {
        let (_, text) = self.get(&issuer_key(organization))?;
        match VerifyKey::from_hex(text).ok()?.kind() {
            VerifyKind::Ed25519(key) => Some(**key),
            VerifyKind::Rsa(_) => None,
        }
    }

    fn get(&self, key: &str) -> Option<(usize, &str)> {
        let (line, value) = self.values.get(key)?;
        Some((*line, value))
    }

    fn line(&self, key: &str) -> Option<usize> {
        Some(self.get(key)?.0)
    }

    fn is_on(&self, key: &str) -> bool {
        self.get(key).is_some_and(|(_, value)| boolean(value) == Some(true))
    }

    /// A file that we can't do without; `what` is in it.
    fn demand(
        &self,
        setting: &'static str,
        what: &str,
        given: &Given<'_>,
        report: &mut Report,
    ) -> Option<File> {
        let file = self.path(setting, given);
        if file.is_none() {
            report.error(None, format!("{setting}: must be set, the path of {what}"));
        }
        file
    }

    fn path(&self, setting: &'static str, given: &Given<'_>) -> Option<File> {
        let (line, value) = self.get(setting)?;
        Some(File { setting, path: path(value, given.surroundings), line: Some(line) })
    }
}

/// Why there is no folder.
fn no_folder(path: &Path) -> Option<io::Error> {
    match path.metadata() {
        Ok(there) if there.is_dir() => None,
        Ok(there) => Some(file_kind::refused(there.file_type(), "a folder")),
        Err(error) => Some(error),
    }
}

/// The provider as it is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Provider {
    Off,
    File,
    Puppet,
    Choria,
}

fn provider(name: &str) -> Result<Provider, String> {
    match name.trim() {
        "file" => Ok(Provider::File),
        "puppet" => Ok(Provider::Puppet),
        "choria" => Ok(Provider::Choria),
        "pkcs11" => Err(format!(
            "{PROVIDER}: pkcs11 is not supported; use a certificate of its own for the provisioner, with security provider file"
        )),
        "certmanager" => Err(format!(
            "{PROVIDER}: certmanager is not supported; have cert-manager write a secret, mount it, and use its files with security provider file"
        )),
        name => Err(format!(
            "{PROVIDER}: unknown security provider {name:?}; file, puppet and choria are known"
        )),
    }
}

/// The name of our certificate, or the one it would have.
///
/// Source: `certname` in go-choria's `providers/security/filesec/option.go` and `puppetsec/option.go`. Where the original
/// can't do without `USER`, our identity stands in for it.
fn certname(provider: Provider, given: &Given<'_>) -> String {
    let Given { identity, surroundings, .. } = given;
    let identity = || identity.as_str().to_owned();
    let user = surroundings.variables.get("USER");
    match (provider, surroundings.variable("MCOLLECTIVE_CERTNAME"), user) {
        (Provider::Choria, _, user) => user.cloned().unwrap_or_else(identity),
        (_, Some(name), _) => name.to_owned(),
        // An empty one counts, too: the original makes ".mcollective" of it.
        (Provider::Puppet, None, Some(user)) => format!("{user}.mcollective"),
        (_, None, Some(user)) if !surroundings.is_root => format!("{user}.mcollective"),
        _ => identity(),
    }
}

/// That a certificate is over, or soon will be.
fn end_of(certificate: &X509Ref, now: i64) -> Option<String> {
    let until = certificate.not_after();
    let is_over_at = |at: i64| Asn1Time::from_unix(at).is_ok_and(|at| until < at);
    if is_over_at(now) {
        return Some(format!("expired on {until}, and brokers will refuse it"));
    }
    is_over_at(now.saturating_add(client::EXPIRY_WARNING_SECS))
        .then(|| format!("expires on {until}: replace it"))
}

fn issuer_key(name: &str) -> String {
    format!("plugin.security.issuer.{name}.public")
}

/// The parts of a list with commas.
fn names(list: &str) -> Vec<&str> {
    list.split(',').map(str::trim).filter(|name| !name.is_empty()).collect()
}
