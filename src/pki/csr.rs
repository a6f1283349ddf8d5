//! Reading a certificate signing request, and the rules for refusing one.
//!
//! Whoever holds a provisioning JWT can ask for any name, and the helper's CA may sign what it is given. So every name in a request is read
//! here, the request must be signed by its own key, and whatever another reader could understand differently (a second block, a second
//! set of extensions, bytes after the end) is refused. The names are read by a small strict DER reader because OpenSSL's safe interface shows
//! only the first set of extensions.

use std::fmt;
use std::net::{Ipv4Addr, Ipv6Addr};

use openssl::pkey::Id;
use openssl::x509::X509Req;
use regex::Regex;

use super::pem;

/// Longest request we read, in bytes of PEM. A real one has 900; one with the largest RSA key OpenSSL takes has 6,000.
pub const CSR_MAX: usize = 64 * 1024;
/// Sizes of RSA keys we accept, in bits. Nodes make 2,048; the upper end is OpenSSL's own.
const RSA_BITS: std::ops::RangeInclusive<u32> = 1024..=16_384;
/// Longest part of a name that an error repeats, in characters.
const QUOTE_MAX: usize = 253;

/// A request that asks for one node's name, signed by the key it is for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Csr {
    pem: String,
}

impl Csr {
    /// Checks `text`, a PEM request as `identity` sent it.
    ///
    /// The common name must be the identity, and so must each alternative name (in any case); no name may match a pattern of `deny`.
    ///
    /// # Errors
    ///
    /// [`Error`], the first rule that is broken.
    ///
    /// Source: `validateCSR` in choria-io/provisioner's `host/host.go`, which looks at the common name and DNS names alone.
    pub fn check(text: String, identity: &str, deny: &[Regex]) -> Result<Csr, Error> {
        if text.trim().is_empty() {
            return Err(Error::Missing);
        }
        if text.len() > CSR_MAX {
            return Err(Error::parse(format!("it has more than {CSR_MAX} bytes")));
        }

        let der = request(&text)?;
        let names = Names::read(&der)?;
        names.check(identity, deny)?;
        check_signature(&der)?;
        Ok(Csr { pem: text })
    }

    /// The request, unchanged.
    pub fn pem(&self) -> &str {
        &self.pem
    }
}

/// The bytes of the only PEM block in `text`.
fn request(text: &str) -> Result<Vec<u8>, Error> {
    let block = pem::first_block(text).map_err(|error| Error::parse(error.to_string()))?;
    if !matches!(block.label, "CERTIFICATE REQUEST" | "NEW CERTIFICATE REQUEST") {
        return Err(Error::parse(format!("the PEM block is a {}", shown(block.label))));
    }
    if !block.before.trim().is_empty() || !block.after.trim().is_empty() {
        return Err(Error::parse("there is text around the PEM block"));
    }
    Ok(block.der)
}

fn check_signature(der: &[u8]) -> Result<(), Error> {
    let openssl = |error: openssl::error::ErrorStack| Error::parse(error.to_string());
    let request = X509Req::from_der(der).map_err(openssl)?;
    let key = request.public_key().map_err(openssl)?;
    match key.id() {
        Id::RSA if !RSA_BITS.contains(&key.bits()) => {
            return Err(Error::Key(format!("RSA key of {} bits", key.bits())));
        }
        Id::RSA | Id::EC | Id::ED25519 | Id::ED448 => {}
        _ => return Err(Error::Key("key is neither RSA nor an elliptic curve's".to_owned())),
    }
    match request.verify(&key) {
        Ok(true) => Ok(()),
        // OpenSSL reports some wrong signatures as an error: both mean the same here.
        Ok(false) | Err(_) => Err(Error::Signature),
    }
}

/// Every name a request asks for.
#[derive(Debug, Default)]
struct Names {
    common: Vec<String>,
    /// E-mail addresses within the subject.
    mail: Vec<String>,
    alternative: Vec<Alternative>,
}

#[derive(Debug)]
enum Alternative {
    Dns(String),
    /// An e-mail address, an IP address or a URI, as text.
    Other(String),
}

impl Alternative {
    fn text(&self) -> &str {
        match self {
            Alternative::Dns(text) | Alternative::Other(text) => text,
        }
    }
}

impl Names {
    fn check(&self, identity: &str, deny: &[Regex]) -> Result<(), Error> {
        let common = match self.common.as_slice() {
            [] => "",
            [common] => common.as_str(),
            _ => return Err(Error::parse("it has several common names")),
        };
        if common != identity {
            return Err(Error::CommonName { found: shown(common), identity: identity.to_owned() });
        }

        let alternative = self.alternative.iter().map(Alternative::text);
        let all = self.common.iter().chain(&self.mail).map(String::as_str).chain(alternative);
        for name in all {
            if is_denied(name, deny) {
                return Err(Error::Denied { name: shown(name) });
            }
        }

        for name in &self.alternative {
            let fits = match name {
                Alternative::Dns(name) => name.eq_ignore_ascii_case(identity),
                Alternative::Other(_) => false,
            };
            if !fits {
                let (found, identity) = (shown(name.text()), identity.to_owned());
                return Err(Error::AlternativeName { found, identity });
            }
        }
        Ok(())
    }

    /// Reads `CertificationRequest` of RFC 2986.
    fn read(der: &[u8]) -> Result<Names, Error> {
        let mut names = Names::default();

        let mut outer = Der(der);
        let mut request = outer.enter(tag::SEQUENCE)?;
        outer.end()?;
        let mut info = request.enter(tag::SEQUENCE)?;
        request.enter(tag::SEQUENCE)?; // signature algorithm
        request.enter(tag::BIT_STRING)?;
        request.end()?;

        info.enter(tag::INTEGER)?; // version
        let subject = info.enter(tag::SEQUENCE)?;
        info.enter(tag::SEQUENCE)?; // public key
        let attributes = info.enter(tag::CONTEXT_0)?;
        info.end()?;

        names.read_subject(subject)?;
        names.read_attributes(attributes)?;
        Ok(names)
    }

    fn read_subject(&mut self, mut subject: Der<'_>) -> Result<(), Error> {
        while !subject.is_empty() {
            let mut set = subject.enter(tag::SET)?;
            while !set.is_empty() {
                let mut pair = set.enter(tag::SEQUENCE)?;
                let kind = pair.enter(tag::OID)?.0;
                let (tag, value) = pair.next()?;
                pair.end()?;
                match kind {
                    oid::COMMON_NAME => self.common.push(string(tag, value)?),
                    oid::EMAIL_ADDRESS => self.mail.push(string(tag, value)?),
                    _ => {}
                }
            }
        }
        Ok(())
    }

    fn read_attributes(&mut self, mut attributes: Der<'_>) -> Result<(), Error> {
        let mut extensions = None;
        while !attributes.is_empty() {
            let mut attribute = attributes.enter(tag::SEQUENCE)?;
            let kind = attribute.enter(tag::OID)?.0;
            let mut values = attribute.enter(tag::SET)?;
            attribute.end()?;
            if matches!(kind, oid::EXTENSION_REQUEST | oid::MICROSOFT_EXTENSION_REQUEST) {
                let wanted = values.enter(tag::SEQUENCE)?;
                if extensions.replace(wanted).is_some() || !values.is_empty() {
                    return Err(Error::parse("it has several sets of extensions"));
                }
            }
        }
        match extensions {
            Some(extensions) => self.read_extensions(extensions),
            None => Ok(()),
        }
    }

    fn read_extensions(&mut self, mut extensions: Der<'_>) -> Result<(), Error> {
        let mut seen = false;
        while !extensions.is_empty() {
            let mut extension = extensions.enter(tag::SEQUENCE)?;
            let kind = extension.enter(tag::OID)?.0;
            let (mut tag, mut value) = extension.next()?;
            if tag == tag::BOOLEAN {
                (tag, value) = extension.next()?; // that was whether it is critical
            }
            extension.end()?;
            if kind == oid::BASIC_CONSTRAINTS && is_authority(value)? {
                return Err(Error::Authority);
            }
            if kind != oid::SUBJECT_ALTERNATIVE_NAME {
                continue;
            }
            if seen || tag != tag::OCTET_STRING {
                return Err(Error::parse("its alternative names are given twice"));
            }
            seen = true;
            let mut value = Der(value);
            let names = value.enter(tag::SEQUENCE)?;
            value.end()?;
            self.read_alternative(names)?;
        }
        Ok(())
    }

    /// Reads `GeneralNames` of RFC 5280.
    fn read_alternative(&mut self, mut names: Der<'_>) -> Result<(), Error> {
        while !names.is_empty() {
            let (tag, value) = names.next()?;
            self.alternative.push(match tag {
                0x81 | 0x86 => Alternative::Other(string(tag::IA5_STRING, value)?),
                0x82 => Alternative::Dns(string(tag::IA5_STRING, value)?),
                0x87 => Alternative::Other(address(value)?),
                _ => return Err(Error::NameKind),
            });
        }
        Ok(())
    }
}

/// Whether `BasicConstraints` of RFC 5280 ask for a certificate that can sign others. Anything but a zero is true to some.
fn is_authority(constraints: &[u8]) -> Result<bool, Error> {
    let mut outer = Der(constraints);
    let mut constraints = outer.enter(tag::SEQUENCE)?;
    outer.end()?;
    if constraints.is_empty() {
        return Ok(false);
    }
    let (tag, value) = constraints.next()?;
    Ok(tag == tag::BOOLEAN && value != [0])
}

/// Whether a pattern matches `name`, also in small letters, without a final dot, or within the host of a URI: a CA or a reader of the
/// certificate may take these for the same name.
fn is_denied(name: &str, deny: &[Regex]) -> bool {
    let small = name.to_ascii_lowercase();
    let host = small
        .split_once("://")
        .map(|(_, rest)| rest.split(['/', '?', '#']).next().unwrap_or(rest))
        .map(|authority| authority.rsplit_once('@').map_or(authority, |(_, host)| host))
        .map(|host| host.split_once(':').map_or(host, |(host, _)| host));
    let small = small.as_str();

    [Some(name), Some(small), host]
        .into_iter()
        .flatten()
        .flat_map(|name| [name, name.trim_end_matches('.')])
        .any(|name| deny.iter().any(|pattern| pattern.is_match(name)))
}

/// Reads an ASN.1 text. Those of 16 and 32 bits a letter are refused: no node writes them.
fn string(tag: u8, value: &[u8]) -> Result<String, Error> {
    let is_text = match tag {
        tag::UTF8_STRING => true,
        tag::PRINTABLE_STRING | tag::IA5_STRING | tag::T61_STRING => value.is_ascii(),
        _ => false,
    };
    match std::str::from_utf8(value) {
        Ok(text) if is_text && !text.contains(char::is_control) => Ok(text.to_owned()),
        _ => Err(Error::parse("a name in it is not readable")),
    }
}

fn address(value: &[u8]) -> Result<String, Error> {
    if let Ok(four) = <[u8; 4]>::try_from(value) {
        Ok(Ipv4Addr::from(four).to_string())
    } else if let Ok(sixteen) = <[u8; 16]>::try_from(value) {
        Ok(Ipv6Addr::from(sixteen).to_string())
    } else {
        Err(Error::parse("an IP address in it is not readable"))
    }
}

/// A name as an error shows it: bounded, and on one line.
fn shown(name: &str) -> String {
    name.chars()
        .take(QUOTE_MAX)
        .map(|letter| if letter.is_control() { '?' } else { letter })
        .collect()
}

/// DER yet to be read: one value after the other, each with one byte of tag and a definite length.
#[derive(Clone, Copy)]
struct Der<'a>(&'a [u8]);

impl<'a> Der<'a> {
    fn is_empty(self) -> bool {
        self.0.is_empty()
    }

    /// The next value's tag and content.
    fn next(&mut self) -> Result<(u8, &'a [u8]), Error> {
        let (tag, length, rest) = match *self.0 {
            [tag, length @ 0..=0x7f, ref rest @ ..] => (tag, usize::from(length), rest),
            [tag, 0x81, length @ 0x80..=0xff, ref rest @ ..] => (tag, usize::from(length), rest),
            [tag, 0x82, high @ 1..=0xff, low, ref rest @ ..] => {
                (tag, usize::from(u16::from_be_bytes([high, low])), rest)
            }
            // Longer ones do not fit into CSR_MAX.
            _ => return Err(Error::structure()),
        };
        // A tag whose low bits are all set goes on in the next byte; requests have none.
        if tag & 0x1f == 0x1f {
            return Err(Error::structure());
        }
        let (content, rest) = rest.split_at_checked(length).ok_or_else(Error::structure)?;
        self.0 = rest;
        Ok((tag, content))
    }

    /// What is inside the next value, which must have `tag`.
    fn enter(&mut self, tag: u8) -> Result<Der<'a>, Error> {
        match self.next()? {
            (found, content) if found == tag => Ok(Der(content)),
            _ => Err(Error::structure()),
        }
    }

    fn end(self) -> Result<(), Error> {
        if self.0.is_empty() { Ok(()) } else { Err(Error::structure()) }
    }
}

mod tag {
    pub const BOOLEAN: u8 = 0x01;
    pub const INTEGER: u8 = 0x02;
    pub const BIT_STRING: u8 = 0x03;
    pub const OCTET_STRING: u8 = 0x04;
    pub const OID: u8 = 0x06;
    pub const UTF8_STRING: u8 = 0x0c;
    pub const PRINTABLE_STRING: u8 = 0x13;
    pub const T61_STRING: u8 = 0x14;
    pub const IA5_STRING: u8 = 0x16;
    pub const SEQUENCE: u8 = 0x30;
    pub const SET: u8 = 0x31;
    pub const CONTEXT_0: u8 = 0xa0;
}

mod oid {
    /// 2.5.4.3
    pub const COMMON_NAME: &[u8] = &[0x55, 0x04, 0x03];
    /// 1.2.840.113549.1.9.1
    pub const EMAIL_ADDRESS: &[u8] = &[0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 0x01, 0x09, 0x01];
    /// 1.2.840.113549.1.9.14
    pub const EXTENSION_REQUEST: &[u8] = &[0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 0x01, 0x09, 0x0e];
    /// 1.3.6.1.4.1.311.2.1.14
    pub const MICROSOFT_EXTENSION_REQUEST: &[u8] =
        &[0x2b, 0x06, 0x01, 0x04, 0x01, 0x82, 0x37, 0x02, 0x01, 0x0e];
    /// 2.5.29.19
    pub const BASIC_CONSTRAINTS: &[u8] = &[0x55, 0x1d, 0x13];
    /// 2.5.29.17
    pub const SUBJECT_ALTERNATIVE_NAME: &[u8] = &[0x55, 0x1d, 0x11];
}

/// Why a request was refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Error {
    /// The node sent none.
    Missing,
    /// It is no request, or not one that all readers understand alike.
    Parse(String),
    /// It asks for another name than the node's.
    CommonName {
        /// The name it asks for.
        found: String,
        /// The node's.
        identity: String,
    },
    /// It asks for an alternative name that is not the node's.
    AlternativeName {
        /// The name it asks for.
        found: String,
        /// The node's.
        identity: String,
    },
    /// It asks for an alternative name of a kind that cannot be checked against patterns.
    NameKind,
    /// It asks for a name of the deny list.
    Denied {
        /// The name it asks for.
        name: String,
    },
    /// It asks for a certificate that can sign others.
    Authority,
    /// Its key is of an absurd size or an unknown kind.
    Key(String),
    /// It is not signed by the key it is for.
    Signature,
}

impl Error {
    fn parse(what: impl Into<String>) -> Error {
        Error::Parse(what.into())
    }

    fn structure() -> Error {
        Error::parse("its structure is not that of a request")
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Missing => f.write_str("no CSR received"),
            Error::Parse(what) => write!(f, "could not parse CSR: {what}"),
            Error::CommonName { found, identity } => {
                write!(f, "common name {found} does not match identity {identity}")
            }
            Error::AlternativeName { found, identity } => {
                write!(f, "alternative name {found} does not match identity {identity}")
            }
            Error::NameKind => f.write_str(
                "CSR has an alternative name that is neither a DNS name, an e-mail or IP address nor a URI",
            ),
            Error::Denied { name } => write!(f, "{name} matches denied certificate pattern"),
            Error::Authority => {
                f.write_str("CSR asks for the certificate of an authority, which no node is")
            }
            Error::Key(what) => write!(f, "CSR has an unusable key: {what}"),
            Error::Signature => f.write_str("CSR is not signed by its own key"),
        }
    }
}

impl std::error::Error for Error {}

#[cfg(test)]
mod tests {
    use openssl::asn1::{Asn1Object, Asn1OctetString};
    use openssl::ec::{EcGroup, EcKey};
    use openssl::hash::MessageDigest;
    use openssl::nid::Nid;
    use openssl::pkey::{PKey, Private};
    use openssl::rsa::Rsa;
    use openssl::stack::Stack;
    use openssl::x509::extension::SubjectAlternativeName;
    use openssl::x509::{X509Extension, X509Name, X509Req, X509ReqBuilder};
    use regex::Regex;
    use serde_json::Value;

    use super::{CSR_MAX, Csr, Error, oid};

    const IDENTITY: &str = "n0.fleet.example.net";

    #[test]
    fn takes_a_recorded_request_and_keeps_its_text() {
        for folder in ["insecure", "x509"] {
            let text = recorded(folder);
            let csr = Csr::check(text.clone(), IDENTITY, &deny_list()).unwrap();
            assert_eq!(csr.pem(), text);
        }
        let renamed = recorded("x509").replace("CERTIFICATE", "NEW CERTIFICATE");
        Csr::check(renamed, IDENTITY, &deny_list()).unwrap();
    }

    #[test]
    fn takes_the_identity_as_its_own_alternative_name() {
        let csr = made(IDENTITY, |san| {
            san.dns("N0.fleet.example.net");
        });
        Csr::check(csr, IDENTITY, &deny_list()).unwrap();
    }

    #[test]
    fn refuses_a_request_for_another_identity() {
        check(
            made("n1.fleet.example.net", |_| ()),
            "common name n1.fleet.example.net does not match identity n0.fleet.example.net",
        );
        check(
            made("N0.fleet.example.net", |_| ()),
            "common name N0.fleet.example.net does not match identity n0.fleet.example.net",
        );
        check(named(&[]), "common name  does not match identity n0.fleet.example.net");
        check(made("evil\nline", |_| ()), "could not parse CSR: a name in it is not readable");
        check(
            named(&[(Nid::COMMONNAME, IDENTITY), (Nid::COMMONNAME, "root.choria")]),
            "could not parse CSR: it has several common names",
        );
    }

    #[test]
    fn refuses_denied_names_wherever_they_stand() {
        let denied = |name: &str| format!("{name} matches denied certificate pattern");

        let csr = made("bob.mcollective", |_| ());
        let error = Csr::check(csr, "bob.mcollective", &deny_list()).unwrap_err();
        assert_eq!(error.to_string(), denied("bob.mcollective"));

        check(
            named(&[(Nid::COMMONNAME, IDENTITY), (Nid::PKCS9_EMAILADDRESS, "a@b.choria")]),
            &denied("a@b.choria"),
        );
        for name in ["rip.mcollective", "RIP.Mcollective", "rip.choria.", "x.privileged.choria"] {
            check(
                made(IDENTITY, |san| {
                    san.dns(IDENTITY).dns(name);
                }),
                &denied(name),
            );
            check(
                made(IDENTITY, |san| {
                    san.email(name);
                }),
                &denied(name),
            );
            for uri in [format!("https://u:p@{name}:443/x"), format!("spiffe://{name}")] {
                check(
                    made(IDENTITY, |san| {
                        san.uri(&uri);
                    }),
                    &denied(&uri),
                );
            }
        }

        let network = [Regex::new("^10\\.").unwrap(), Regex::new("^fd00:").unwrap()];
        for address in ["10.1.2.3", "fd00::1"] {
            let csr = made(IDENTITY, |san| {
                san.ip(address);
            });
            let error = Csr::check(csr, IDENTITY, &network).unwrap_err();
            assert_eq!(error.to_string(), denied(address));
        }
    }

    #[test]
    fn refuses_alternative_names_that_are_not_the_identity() {
        let other = |name: &str| {
            format!("alternative name {name} does not match identity n0.fleet.example.net")
        };
        let kinds: [fn(&mut SubjectAlternativeName, &str); 4] = [
            |san, name| {
                san.dns(name);
            },
            |san, name| {
                san.email(name);
            },
            |san, name| {
                san.uri(name);
            },
            |san, name| {
                san.ip(name);
            },
        ];
        for add in kinds {
            check(made(IDENTITY, |san| add(san, "192.0.2.1")), &other("192.0.2.1"));
        }
        check(
            made(IDENTITY, |san| {
                san.rid("1.2.3.4");
            }),
            "CSR has an alternative name that is neither a DNS name, an e-mail or IP address nor a URI",
        );
    }

    #[test]
    fn refuses_a_request_to_be_an_authority() {
        let asking = |constraints: &[u8]| {
            request(&[(Nid::COMMONNAME, IDENTITY)], &key(), |builder| {
                let mut extensions = Stack::new().unwrap();
                extensions.push(extension("2.5.29.19", constraints)).unwrap();
                builder.add_extensions(&extensions).unwrap();
            })
        };
        let authority = "CSR asks for the certificate of an authority, which no node is";
        check(asking(b"\x30\x03\x01\x01\xff"), authority);
        check(asking(b"\x30\x06\x01\x01\xff\x02\x01\x00"), authority);
        // Not as it must be written, but understood.
        check(asking(b"\x30\x03\x01\x01\x01"), authority);
        check(
            asking(b"\x01\x01\xff"),
            "could not parse CSR: its structure is not that of a request",
        );
        for none in [&b"\x30\x00"[..], b"\x30\x03\x01\x01\x00"] {
            Csr::check(asking(none), IDENTITY, &deny_list()).unwrap();
        }
    }

    #[test]
    fn refuses_what_two_readers_could_understand_differently() {
        let good = recorded("insecure");
        let around = "could not parse CSR: there is text around the PEM block";
        check(format!("{good}{good}"), around);
        check(format!("{good}# see you"), around);
        check(format!("Subject: CN=root\n{good}"), around);
        check(
            good.replace("CERTIFICATE REQUEST", "CERTIFICATE"),
            "could not parse CSR: the PEM block is a CERTIFICATE",
        );

        let structure = "could not parse CSR: its structure is not that of a request";
        let mut der = X509Req::from_pem(good.as_bytes()).unwrap().to_der().unwrap();
        der.push(0);
        check(pem(&der), structure);
        check(pem(b"\x30\x80\x00\x00"), structure);
        check(pem(b""), structure);

        let twice = request(&[(Nid::COMMONNAME, IDENTITY)], &key(), |builder| {
            let mut both = Stack::new().unwrap();
            for name in [IDENTITY, "root.choria"] {
                let content =
                    [&[0x30, name.len() as u8 + 2, 0x82, name.len() as u8], name.as_bytes()];
                both.push(extension("2.5.29.17", &content.concat())).unwrap();
            }
            builder.add_extensions(&both).unwrap();
        });
        check(twice, "could not parse CSR: its alternative names are given twice");

        let value = |tag: u8, content: &[u8]| [&[tag, content.len() as u8], content].concat();
        for oid in [oid::EXTENSION_REQUEST, oid::MICROSOFT_EXTENSION_REQUEST] {
            let set = |sequences: &[u8]| [value(0x06, oid), value(0x31, sequences)].concat();
            let one = value(0x30, &set(&[0x30, 0]));
            let two_in_one = value(0x30, &set(&[0x30, 0, 0x30, 0]));
            for attributes in [[one.clone(), one].concat(), two_in_one] {
                let info = [&[2, 1, 0, 0x30, 0, 0x30, 0], &*value(0xa0, &attributes)].concat();
                let der = value(0x30, &[&*value(0x30, &info), &[0x30, 0, 3, 1, 0]].concat());
                check(pem(&der), "could not parse CSR: it has several sets of extensions");
            }
        }
    }

    #[test]
    fn refuses_a_request_that_its_own_key_did_not_sign() {
        let mut der = X509Req::from_pem(recorded("insecure").as_bytes()).unwrap().to_der().unwrap();
        *der.last_mut().unwrap() ^= 1;
        check(pem(&der), "CSR is not signed by its own key");

        // Somebody else's key under our signature.
        let mut builder = X509ReqBuilder::new().unwrap();
        builder.set_subject_name(&name(&[(Nid::COMMONNAME, IDENTITY)])).unwrap();
        builder.set_pubkey(&key()).unwrap();
        builder.sign(&key(), MessageDigest::sha256()).unwrap();
        let csr = String::from_utf8(builder.build().to_pem().unwrap()).unwrap();
        check(csr, "CSR is not signed by its own key");
    }

    #[test]
    fn refuses_keys_of_absurd_size() {
        let small = PKey::from_rsa(Rsa::generate(768).unwrap()).unwrap();
        check(
            request(&[(Nid::COMMONNAME, IDENTITY)], &small, |_| ()),
            "CSR has an unusable key: RSA key of 768 bits",
        );
    }

    #[test]
    fn refuses_texts_that_are_no_request() {
        check(String::new(), "no CSR received");
        check(" \n".to_owned(), "no CSR received");
        check("gibberish".to_owned(), "could not parse CSR: no PEM block found");
        check(
            "A".repeat(1 << 20),
            &format!("could not parse CSR: it has more than {CSR_MAX} bytes"),
        );
        check(pem(&[0x30; 40_000]), "could not parse CSR: its structure is not that of a request");
    }

    #[test]
    fn never_takes_a_request_with_a_changed_byte() {
        let mut random = fastrand::Rng::with_seed(3);
        let der = X509Req::from_pem(recorded("x509").as_bytes()).unwrap().to_der().unwrap();
        for _ in 0..2_000 {
            let mut changed = der.clone();
            let at = random.usize(..changed.len());
            changed[at] ^= 1 << random.u8(..8);
            if random.bool() {
                changed.truncate(random.usize(..=changed.len()));
            }
            Csr::check(pem(&changed), IDENTITY, &[]).unwrap_err();
        }
        for length in 0..300 {
            let garbage: Vec<u8> = std::iter::repeat_with(|| random.u8(..)).take(length).collect();
            Csr::check(pem(&garbage), IDENTITY, &[]).unwrap_err();
        }
    }

    #[track_caller]
    fn check(text: String, expected: &str) {
        let error: Error = Csr::check(text, IDENTITY, &deny_list()).unwrap_err();
        assert_eq!(error.to_string(), expected);
    }

    /// The original's default.
    fn deny_list() -> Vec<Regex> {
        [r"\.privileged.mcollective$", r"\.privileged.choria$", r"\.mcollective$", r"\.choria$"]
            .map(|pattern| Regex::new(pattern).unwrap())
            .to_vec()
    }

    fn recorded(folder: &str) -> String {
        let path = format!("tests/vectors/captures/{folder}/helper-input.json");
        let input: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
        input["csr"]["csr"].as_str().unwrap().to_owned()
    }

    fn made(common: &str, fill: impl FnOnce(&mut SubjectAlternativeName)) -> String {
        request(&[(Nid::COMMONNAME, common)], &key(), |builder| {
            let mut san = SubjectAlternativeName::new();
            fill(&mut san);
            // An empty list cannot be built, and stands for no extension.
            let Ok(san) = san.build(&builder.x509v3_context(None)) else { return };
            let mut extensions = Stack::new().unwrap();
            extensions.push(san).unwrap();
            builder.add_extensions(&extensions).unwrap();
        })
    }

    fn named(entries: &[(Nid, &str)]) -> String {
        request(entries, &key(), |_| ())
    }

    fn request(
        entries: &[(Nid, &str)],
        key: &PKey<Private>,
        extend: impl FnOnce(&mut X509ReqBuilder),
    ) -> String {
        let mut builder = X509ReqBuilder::new().unwrap();
        builder.set_subject_name(&name(entries)).unwrap();
        builder.set_pubkey(key).unwrap();
        extend(&mut builder);
        builder.sign(key, MessageDigest::sha256()).unwrap();
        String::from_utf8(builder.build().to_pem().unwrap()).unwrap()
    }

    fn name(entries: &[(Nid, &str)]) -> X509Name {
        let mut name = X509Name::builder().unwrap();
        for (kind, text) in entries {
            name.append_entry_by_nid(*kind, text).unwrap();
        }
        name.build()
    }

    fn extension(oid: &str, content: &[u8]) -> X509Extension {
        let oid = Asn1Object::from_str(oid).unwrap();
        let content = Asn1OctetString::new_from_bytes(content).unwrap();
        X509Extension::new_from_der(&oid, false, &content).unwrap()
    }

    fn key() -> PKey<Private> {
        let group = EcGroup::from_curve_name(Nid::X9_62_PRIME256V1).unwrap();
        PKey::from_ec_key(EcKey::generate(&group).unwrap()).unwrap()
    }

    fn pem(der: &[u8]) -> String {
        let body = openssl::base64::encode_block(der);
        format!("-----BEGIN CERTIFICATE REQUEST-----\n{body}\n-----END CERTIFICATE REQUEST-----\n")
    }
}
