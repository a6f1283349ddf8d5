//! The TLS session over memory.
//!
//! OpenSSL reads from and writes to two buffers here and never sees the socket, so no lock around a session is ever held
//! across a system call: whoever has bytes from the socket puts them in, whoever has the wire takes bytes out. TLS 1.2
//! and 1.3; no renegotiation.
//!
//! What is verified follows go-choria: the authorities of one file are the only ones, each of them is an anchor whether
//! it signed itself or not, and a certificate must name the host among its alternative names. Source: `tls.Config` as
//! set up in go-choria's `providers/security/filesec` and `providers/security/choria`, and Go's `crypto/x509`.

#[cfg(test)]
mod tests;

use std::fmt;
use std::io::{self, Read, Write};
use std::mem;
use std::net::IpAddr;
use std::sync::Arc;

use openssl::asn1::Asn1Time;
use openssl::error::ErrorStack;
use openssl::nid::Nid;
use openssl::pkey::{PKey, Private};
use openssl::ssl::{
    self, ErrorCode, Ssl, SslContext, SslContextBuilder, SslMethod, SslMode, SslOptions,
    SslSessionCacheMode, SslStream, SslVerifyMode, SslVersion,
};
use openssl::x509::store::X509StoreBuilder;
use openssl::x509::verify::{X509CheckFlags, X509VerifyFlags};
use openssl::x509::{X509, X509NameRef, X509Ref, X509StoreContextRef, X509VerifyResult};
use parking_lot::Mutex;

use crate::transport::errors::{Ending, ErrorKind};
use crate::transport::wire::Parser;

/// Plaintext taken out at once: the largest record.
const RECORD_MAX: usize = 16 * 1024;
/// Capacity that the buffer for the frame being encrypted keeps.
const PLAIN_KEPT: usize = 64 * 1024;
/// Names of a certificate shown in an error.
const NAMES_SHOWN_MAX: usize = 5;
/// Characters of a name shown in an error.
const NAME_SHOWN_MAX: usize = 120;

/// Go's names of the suites of TLS 1.2 that it has no objection to, and OpenSSL's, in our order of preference.
///
/// Source: `CipherSuites` in Go's `crypto/tls`.
const SUITES: [(&str, &str); 10] = [
    ("TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256", "ECDHE-ECDSA-AES128-GCM-SHA256"),
    ("TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256", "ECDHE-RSA-AES128-GCM-SHA256"),
    ("TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384", "ECDHE-ECDSA-AES256-GCM-SHA384"),
    ("TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384", "ECDHE-RSA-AES256-GCM-SHA384"),
    ("TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256", "ECDHE-ECDSA-CHACHA20-POLY1305"),
    ("TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256", "ECDHE-RSA-CHACHA20-POLY1305"),
    ("TLS_ECDHE_ECDSA_WITH_AES_128_CBC_SHA", "ECDHE-ECDSA-AES128-SHA"),
    ("TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA", "ECDHE-RSA-AES128-SHA"),
    ("TLS_ECDHE_ECDSA_WITH_AES_256_CBC_SHA", "ECDHE-ECDSA-AES256-SHA"),
    ("TLS_ECDHE_RSA_WITH_AES_256_CBC_SHA", "ECDHE-RSA-AES256-SHA"),
];
/// Suites of TLS 1.2 that must be asked for by name, some of them by two names.
const FURTHER_SUITES: [(&str, &str); 9] = [
    ("TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305", "ECDHE-ECDSA-CHACHA20-POLY1305"),
    ("TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305", "ECDHE-RSA-CHACHA20-POLY1305"),
    ("TLS_ECDHE_ECDSA_WITH_AES_128_CBC_SHA256", "ECDHE-ECDSA-AES128-SHA256"),
    ("TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA256", "ECDHE-RSA-AES128-SHA256"),
    ("TLS_RSA_WITH_AES_128_GCM_SHA256", "AES128-GCM-SHA256"),
    ("TLS_RSA_WITH_AES_256_GCM_SHA384", "AES256-GCM-SHA384"),
    ("TLS_RSA_WITH_AES_128_CBC_SHA256", "AES128-SHA256"),
    ("TLS_RSA_WITH_AES_128_CBC_SHA", "AES128-SHA"),
    ("TLS_RSA_WITH_AES_256_CBC_SHA", "AES256-SHA"),
];
/// Suites of TLS 1.3, which are always on, as in Go.
const SUITES_OF_TLS_1_3: [&str; 3] =
    ["TLS_AES_128_GCM_SHA256", "TLS_AES_256_GCM_SHA384", "TLS_CHACHA20_POLY1305_SHA256"];
/// Choria's names of curves, and OpenSSL's, in Choria's order of preference.
const CURVES: [(&str, &str); 4] =
    [("X25519", "X25519"), ("CurveP256", "P-256"), ("CurveP384", "P-384"), ("CurveP521", "P-521")];

// OpenSSL's verdicts about a certificate, from its `x509_vfy.h`.

/// The certificate is for another host name, or for another address.
const MISMATCHES: [i32; 2] = [62, 64];
const NOT_YET_VALID: i32 = 9;
const EXPIRED: i32 = 10;
/// The issuer is not found, did not sign it, or is one that nobody trusts.
const UNTRACEABLE: [i32; 6] = [2, 7, 18, 19, 20, 21];

/// Which suites and curves are offered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Offer {
    /// OpenSSL's names of suites of TLS 1.2; without any, TLS 1.3 is demanded.
    suites: Vec<&'static str>,
    /// OpenSSL's names of curves.
    curves: Vec<&'static str>,
}

impl Default for Offer {
    fn default() -> Offer {
        let second = |(_, name): &(&str, &'static str)| *name;
        Offer {
            suites: SUITES.iter().map(second).collect(),
            curves: CURVES.iter().map(second).collect(),
        }
    }
}

impl Offer {
    /// Offers these suites of TLS 1.2 and no others; those of TLS 1.3 stay. Returns the names nobody knows.
    pub fn restrict_suites<'n>(&mut self, names: &[&'n str]) -> Vec<&'n str> {
        let known: Vec<_> = SUITES.into_iter().chain(FURTHER_SUITES).collect();
        self.suites.clear();
        let mut unknown = Vec::new();
        for name in names {
            match known.iter().find(|(known, _)| known == name) {
                Some((_, suite)) => self.suites.push(suite),
                None if SUITES_OF_TLS_1_3.contains(name) => {}
                None => unknown.push(*name),
            }
        }
        unknown
    }

    /// Offers these curves and no others, in this order. Returns the names nobody knows.
    pub fn restrict_curves<'n>(&mut self, names: &[&'n str]) -> Vec<&'n str> {
        self.curves.clear();
        let mut unknown = Vec::new();
        for name in names {
            match CURVES.iter().find(|(known, _)| known == name) {
                Some((_, curve)) => self.curves.push(curve),
                None => unknown.push(*name),
            }
        }
        unknown
    }

    /// Whether there is a curve left, without which there is no TLS.
    pub fn has_curves(&self) -> bool {
        !self.curves.is_empty()
    }
}

/// Whose word about the broker's certificate counts.
#[derive(Debug, Clone)]
pub struct Trust {
    /// The authorities.
    pub authorities: Vec<X509>,
    /// Where they come from, for errors.
    pub source: String,
    /// Whether a certificate without any alternative name may name its host as common name.
    pub legacy_names: bool,
}

impl Trust {
    /// The authority that issued `certificate`, if its time is over.
    fn expired_issuer(&self, certificate: &X509Ref) -> Option<&X509> {
        let issuer = certificate.issuer_name().to_der().ok()?;
        let is_it = |authority: &&X509| {
            is_over(authority)
                && authority.subject_name().to_der().is_ok_and(|subject| subject == issuer)
        };
        self.authorities.iter().find(is_it)
    }
}

fn is_over(certificate: &X509Ref) -> bool {
    Asn1Time::days_from_now(0).is_ok_and(|now| certificate.not_after() < now)
}

/// What we show of ourselves when the broker asks.
#[derive(Clone)]
pub struct Identity {
    /// Our certificate, then those between it and its authority.
    pub certificates: Vec<X509>,
    /// Its private key.
    pub key: PKey<Private>,
}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Identity").field("certificates", &self.certificates).finish_non_exhaustive()
    }
}

/// Begins TLS sessions.
#[derive(Clone)]
pub struct Connector {
    context: SslContext,
    /// Why a broker is not verified, if it is not: nobody said whom to trust.
    trust: Option<Arc<Trust>>,
    has_identity: bool,
}

impl fmt::Debug for Connector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connector")
            .field("verifies", &self.trust.is_some())
            .field("has_identity", &self.has_identity)
            .finish_non_exhaustive()
    }
}

impl Connector {
    /// For brokers that `trust` vouches for, or any at all without it.
    ///
    /// # Errors
    ///
    /// What OpenSSL has against one of these.
    pub fn new(
        trust: Option<Trust>,
        identity: Option<&Identity>,
        offer: &Offer,
    ) -> Result<Connector, ErrorStack> {
        let mut context = SslContextBuilder::new(SslMethod::tls_client())?;
        // As Go: RSA keys from 1,024 bits, no SHA-1. What a distribution prefers must not decide whom we can talk to.
        context.set_security_level(1);
        let has_suites = !offer.suites.is_empty();
        let least = if has_suites { SslVersion::TLS1_2 } else { SslVersion::TLS1_3 };
        context.set_min_proto_version(Some(least))?;
        if has_suites {
            context.set_cipher_list(&offer.suites.join(":"))?;
        }
        context.set_groups_list(&offer.curves.join(":"))?;
        context.set_options(SslOptions::NO_COMPRESSION | SslOptions::NO_RENEGOTIATION);
        // Memory for an idle connection is not worth keeping.
        context.set_mode(SslMode::AUTO_RETRY | SslMode::RELEASE_BUFFERS);
        context.set_session_cache_mode(SslSessionCacheMode::OFF);

        if let Some(trust) = &trust {
            let mut store = X509StoreBuilder::new()?;
            // OpenSSL goes no further than the first one that fits, and would not find its successor.
            for authority in trust.authorities.iter().filter(|authority| !is_over(authority)) {
                store.add_cert(authority.clone())?;
            }
            context.set_cert_store(store.build());
        }
        if let Some(Identity { certificates, key }) = identity
            && let Some((own, between)) = certificates.split_first()
        {
            context.set_certificate(own)?;
            for certificate in between {
                context.add_extra_chain_cert(certificate.clone())?;
            }
            context.set_private_key(key)?;
            context.check_private_key()?;
        }
        let has_identity = identity.is_some();
        Ok(Connector { context: context.build(), trust: trust.map(Arc::new), has_identity })
    }

    /// Whether we have a certificate to show.
    pub fn has_identity(&self) -> bool {
        self.has_identity
    }

    /// A handshake with a broker that must prove to be `host`, a name or an IP address.
    pub(super) fn begin(&self, host: &str) -> Result<Handshake, Ending> {
        let host = ServerName::new(host);
        let distrust = Arc::new(Mutex::new(None));
        let ssl =
            self.prepare(&host, &distrust).and_then(|ssl| SslStream::new(ssl, Memory::default()));
        let stream = ssl.map_err(|error| {
            tls_ending(format!("TLS could not be begun: {}", reason_of(&error)))
        })?;
        Ok(Handshake { stream, host, distrust, has_identity: self.has_identity })
    }

    fn prepare(
        &self,
        host: &ServerName,
        distrust: &Arc<Mutex<Option<String>>>,
    ) -> Result<Ssl, ErrorStack> {
        let mut ssl = Ssl::new(&self.context)?;
        ssl.set_connect_state();
        if let ServerName::Name(name) = host {
            // An IP address is no server name: brokers refuse it.
            ssl.set_hostname(name)?;
        }
        let Some(trust) = &self.trust else {
            ssl.set_verify(SslVerifyMode::NONE);
            return Ok(ssl);
        };
        let parameters = ssl.param_mut();
        parameters.set_flags(X509VerifyFlags::PARTIAL_CHAIN)?;
        parameters.set_hostflags(
            X509CheckFlags::NEVER_CHECK_SUBJECT | X509CheckFlags::NO_PARTIAL_WILDCARDS,
        );
        match host {
            ServerName::Name(name) => parameters.set_host(name)?,
            ServerName::Address(address) => parameters.set_ip(*address)?,
        }
        let (host, trust, distrust) = (host.clone(), Arc::clone(trust), Arc::clone(distrust));
        ssl.set_verify_callback(SslVerifyMode::PEER, move |is_trusted, chain| {
            is_trusted || is_known_otherwise(&trust, &host, chain) || {
                distrust.lock().get_or_insert_with(|| explain(&trust, &host, chain));
                false
            }
        });
        Ok(ssl)
    }
}

/// What a broker has to prove to be.
#[derive(Debug, Clone)]
enum ServerName {
    Name(String),
    Address(IpAddr),
}

impl ServerName {
    fn new(host: &str) -> ServerName {
        // The interface an address is reached through is no part of who answers there.
        let address = host.split('%').next().unwrap_or(host);
        match address.parse() {
            Ok(address) => ServerName::Address(address),
            // A dot at the end of a name is for the resolver.
            Err(_) => ServerName::Name(host.strip_suffix('.').unwrap_or(host).to_owned()),
        }
    }
}

impl fmt::Display for ServerName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ServerName::Name(name) => f.write_str(name),
            ServerName::Address(address) => address.fmt(f),
        }
    }
}

/// A certificate that OpenSSL finds right but for its name, and Choria right altogether.
fn is_known_otherwise(trust: &Trust, host: &ServerName, chain: &mut X509StoreContextRef) -> bool {
    if chain.error_depth() != 0 || !MISMATCHES.contains(&chain.error().as_raw()) {
        return false;
    }
    let is_it = chain.current_cert().is_some_and(|certificate| {
        has_wildcard_for(certificate, host)
            || trust.legacy_names && has_legacy_name(certificate, host)
    });
    if is_it {
        chain.set_error(X509VerifyResult::OK);
    }
    is_it
}

/// Whether an alternative name is a wildcard for all of the domain that `host` is in. OpenSSL takes none for a domain of
/// one label, such as `*.lan`, and Go does.
///
/// Source: `matchHostnames` in Go's `crypto/x509`.
fn has_wildcard_for(certificate: &X509Ref, host: &ServerName) -> bool {
    let ServerName::Name(name) = host else { return false };
    let Some((label, domain)) = name.split_once('.') else { return false };
    let names = certificate.subject_alt_names();
    let mut patterns = names.iter().flatten().filter_map(|name| name.dnsname()?.strip_prefix("*."));
    !label.is_empty()
        && !domain.is_empty()
        && patterns.any(|pattern| pattern.eq_ignore_ascii_case(domain))
}

/// Whether the common name is `host`, as in older certificates, which have no alternative names.
///
/// Source: `constructCustomVerifier` in go-choria's `providers/security/filesec`.
fn has_legacy_name(certificate: &X509Ref, host: &ServerName) -> bool {
    let name = common_name(certificate.subject_name());
    certificate.subject_alt_names().is_none()
        && name.is_some_and(|name| name.eq_ignore_ascii_case(&host.to_string()))
}

/// Why a broker's certificate is not accepted, for people.
fn explain(trust: &Trust, host: &ServerName, chain: &X509StoreContextRef) -> String {
    let error = chain.error();
    let Some(certificate) = chain.current_cert() else {
        return format!("its certificate is not accepted: {}", error.error_string());
    };
    let subject = shown(certificate.subject_name());
    let whose = match chain.error_depth() {
        0 => format!("its certificate ({subject})"),
        _ => format!("the certificate of its authority ({subject})"),
    };
    match error.as_raw() {
        code if MISMATCHES.contains(&code) => {
            let names = names_of(certificate);
            let instead = match (names.is_empty(), trust.legacy_names) {
                (false, _) => format!("is for {}, not for {host}", names.join(", ")),
                (true, true) => format!("is not for {host}"),
                (true, false) => {
                    format!(
                        "is not for {host}: it has no alternative names, and its common name does not count"
                    )
                }
            };
            format!("{whose} {instead}")
        }
        EXPIRED => format!("{whose} expired on {}", certificate.not_after()),
        NOT_YET_VALID => {
            format!("{whose} is not valid before {}: is the clock right?", certificate.not_before())
        }
        code if UNTRACEABLE.contains(&code) => {
            let issuer = shown(certificate.issuer_name());
            if let Some(authority) = trust.expired_issuer(certificate) {
                let until = authority.not_after();
                return format!("the certificate of its authority ({issuer}) expired on {until}");
            }
            format!(
                "{whose} was issued by {issuer}, which {} does not vouch for: {}",
                trust.source,
                error.error_string()
            )
        }
        _ => format!("{whose} is not accepted: {}", error.error_string()),
    }
}

fn names_of(certificate: &X509Ref) -> Vec<String> {
    let Some(names) = certificate.subject_alt_names() else { return Vec::new() };
    let shown = names.iter().filter_map(|name| {
        let address = || {
            let bytes = name.ipaddress()?;
            let v4 = <[u8; 4]>::try_from(bytes).map(IpAddr::from);
            v4.or_else(|_| <[u8; 16]>::try_from(bytes).map(IpAddr::from)).ok()
        };
        let text = match name.dnsname() {
            // It looks right, and counts for nothing.
            Some(text) if text.parse::<IpAddr>().is_ok() => {
                format!("{text} (as a name, not as an address)")
            }
            Some(text) => text.to_owned(),
            None => address()?.to_string(),
        };
        Some(printable(&text))
    });
    shown.take(NAMES_SHOWN_MAX).collect()
}

fn common_name(name: &X509NameRef) -> Option<String> {
    let entry = name.entries_by_nid(Nid::COMMONNAME).next()?;
    entry.data().to_string().ok()
}

fn shown(name: &X509NameRef) -> String {
    match common_name(name) {
        Some(name) => printable(&name),
        None => "without a common name".to_owned(),
    }
}

fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '?' } else { c }).take(NAME_SHOWN_MAX).collect()
}

/// A session that is being agreed upon.
pub(super) struct Handshake {
    stream: SslStream<Memory>,
    host: ServerName,
    /// Why the broker's certificate was refused.
    distrust: Arc<Mutex<Option<String>>>,
    has_identity: bool,
}

impl Handshake {
    /// Goes on with `bytes` from the socket, none to begin with; true when it is done.
    ///
    /// Whatever the result, what is in `outbox` then must be sent.
    pub(super) fn go_on(&mut self, bytes: &[u8], outbox: &mut Vec<u8>) -> Result<bool, Ending> {
        self.stream.get_mut().incoming.put(bytes);
        let result = self.stream.do_handshake();
        outbox.append(&mut self.stream.get_mut().outgoing);
        match result {
            Ok(()) => Ok(true),
            Err(error) if error.code() == ErrorCode::WANT_READ => Ok(false),
            Err(error) => Err(self.failure(&error)),
        }
    }

    fn failure(&self, error: &ssl::Error) -> Ending {
        match self.distrust.lock().take() {
            Some(distrust) => tls_ending(distrust),
            None => failure(error, self.has_identity),
        }
    }

    /// The session agreed upon, after [`Handshake::go_on`] was true.
    pub(super) fn into_session(self) -> Session {
        log::debug!(
            component = "broker";
            "TLS with {}: {} {}",
            self.host,
            self.stream.ssl().version_str(),
            self.stream.ssl().current_cipher().map_or("", |cipher| cipher.name())
        );
        Session {
            stream: self.stream,
            has_identity: self.has_identity,
            plain: Vec::new(),
            record: vec![0; RECORD_MAX].into_boxed_slice(),
        }
    }
}

/// A session that was agreed upon.
pub(super) struct Session {
    stream: SslStream<Memory>,
    has_identity: bool,
    /// The frame being encrypted.
    plain: Vec<u8>,
    /// The plaintext being taken out.
    record: Box<[u8]>,
}

impl Session {
    /// Appends the frame that `write` writes, encrypted, to `outbox`.
    pub(super) fn seal(
        &mut self,
        outbox: &mut Vec<u8>,
        write: impl FnOnce(&mut Vec<u8>),
    ) -> Result<(), Ending> {
        let mut plain = mem::take(&mut self.plain);
        write(&mut plain);
        let sealed = self.with_outbox(outbox, |session| {
            let mut rest = plain.as_slice();
            while !rest.is_empty() {
                let len = session.stream.ssl_write(rest)?;
                rest = &rest[len..];
            }
            Ok(())
        });
        plain.clear();
        plain.shrink_to(PLAIN_KEPT);
        self.plain = plain;
        sealed.map_err(|error: ssl::Error| failure(&error, self.has_identity))
    }

    /// Gives what `bytes` from the socket hold to `parser`; what has to be answered goes to `outbox`.
    pub(super) fn open(
        &mut self,
        bytes: &[u8],
        outbox: &mut Vec<u8>,
        parser: &mut Parser,
    ) -> Result<(), Ending> {
        self.stream.get_mut().incoming.put(bytes);
        let result = self.with_outbox(outbox, |session| {
            loop {
                match session.stream.ssl_read(&mut session.record) {
                    Ok(len) => parser.feed(&session.record[..len]),
                    Err(error) => return error,
                }
            }
        });
        match result.code() {
            ErrorCode::WANT_READ => Ok(()),
            ErrorCode::ZERO_RETURN => Err(Ending::new(ErrorKind::Lost, "it closed the connection")),
            _ => Err(failure(&result, self.has_identity)),
        }
    }

    /// Lets OpenSSL write to `outbox` itself, which spares a copy.
    fn with_outbox<T>(&mut self, outbox: &mut Vec<u8>, work: impl FnOnce(&mut Session) -> T) -> T {
        mem::swap(outbox, &mut self.stream.get_mut().outgoing);
        let result = work(self);
        mem::swap(outbox, &mut self.stream.get_mut().outgoing);
        result
    }
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("tls::Session")
    }
}

/// Where OpenSSL reads and writes.
#[derive(Debug, Default)]
struct Memory {
    incoming: Incoming,
    outgoing: Vec<u8>,
}

/// Bytes from the socket that OpenSSL has not taken yet: at most one piece, and a record that is not whole.
#[derive(Debug, Default)]
struct Incoming {
    bytes: Vec<u8>,
    taken: usize,
}

impl Incoming {
    fn put(&mut self, bytes: &[u8]) {
        self.bytes.drain(..self.taken);
        self.taken = 0;
        self.bytes.extend_from_slice(bytes);
    }
}

impl Read for Memory {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let Incoming { bytes, taken } = &mut self.incoming;
        let rest = &bytes[*taken..];
        if rest.is_empty() {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let len = rest.len().min(into.len());
        into[..len].copy_from_slice(&rest[..len]);
        *taken += len;
        Ok(len)
    }
}

impl Write for Memory {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.outgoing.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// What a failed session says, in words that name the one who can do something about it.
fn failure(error: &ssl::Error, has_identity: bool) -> Ending {
    let reason = error.ssl_error().map_or_else(|| error.to_string(), reason_of);
    let is_alert = reason.contains("alert");
    let has = |words: &[&str]| words.iter().any(|word| reason.contains(word));
    // A broker that gets none at all calls it a bad one in TLS 1.2.
    let text = if is_alert && has(&["certificate", "unknown ca"]) {
        match has_identity {
            true => format!("it refuses our certificate: {reason}"),
            false => format!("it demands a certificate, and we have none: {reason}"),
        }
    } else if is_alert && has(&["handshake failure"]) {
        format!(
            "it accepts none of our cipher suites and curves, or misses a certificate: {reason}"
        )
    } else if has(&["wrong version number", "packet length", "record layer", "http request"]) {
        format!("what it says is not TLS: {reason}")
    } else if is_alert {
        format!("it ended TLS: {reason}")
    } else {
        format!("TLS failed: {reason}")
    };
    tls_ending(text)
}

fn reason_of(error: &ErrorStack) -> String {
    // The last one is the outermost, which says least.
    match error.errors().first().and_then(|error| error.reason()) {
        Some(reason) => reason.to_owned(),
        None => error.to_string(),
    }
}

fn tls_ending(reason: String) -> Ending {
    Ending { kind: ErrorKind::Tls, reason }
}
