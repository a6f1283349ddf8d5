//! Certificates for tests, made on the spot.

use std::net::IpAddr;

use openssl::asn1::Asn1Time;
use openssl::bn::{BigNum, MsbOption};
use openssl::ec::{EcGroup, EcKey};
use openssl::hash::MessageDigest;
use openssl::nid::Nid;
use openssl::pkey::{HasPublic, PKey, PKeyRef, Private, Public};
use openssl::rsa::Rsa;
use openssl::x509::extension::{BasicConstraints, KeyUsage, SubjectAlternativeName};
use openssl::x509::{X509, X509Name, X509Ref};

/// A certificate with its key.
#[derive(Clone)]
pub struct Certified {
    /// The certificate.
    pub certificate: X509,
    /// Its private key.
    pub key: PKey<Private>,
}

impl Certified {
    /// The certificate in PEM.
    pub fn certificate_pem(&self) -> String {
        String::from_utf8(self.certificate.to_pem().unwrap()).unwrap()
    }

    /// The key in PEM, PKCS#8.
    pub fn key_pem(&self) -> String {
        String::from_utf8(self.key.private_key_to_pem_pkcs8().unwrap()).unwrap()
    }
}

/// What a certificate is to say; valid from an hour ago for a day.
pub struct Wanted {
    common_name: String,
    names: Vec<String>,
    addresses: Vec<IpAddr>,
    is_authority: bool,
    key: Option<PKey<Private>>,
    /// Seconds from now.
    valid: (i64, i64),
}

impl Wanted {
    /// With this common name and no other.
    pub fn new(common_name: &str) -> Wanted {
        Wanted {
            common_name: common_name.to_owned(),
            names: Vec::new(),
            addresses: Vec::new(),
            is_authority: false,
            key: None,
            valid: (-3_600, 86_400),
        }
    }

    /// With an alternative name too.
    pub fn name(mut self, name: &str) -> Wanted {
        self.names.push(name.to_owned());
        self
    }

    /// With an IP address too.
    pub fn address(mut self, address: &str) -> Wanted {
        self.addresses.push(address.parse().unwrap());
        self
    }

    /// One that may issue others.
    pub fn authority(mut self) -> Wanted {
        self.is_authority = true;
        self
    }

    /// With a new RSA key, which alone can sign requests; others have one on P-256, which is made faster.
    pub fn rsa(self) -> Wanted {
        self.key(PKey::from_rsa(Rsa::generate(2048).unwrap()).unwrap())
    }

    /// With this key.
    pub fn key(mut self, key: PKey<Private>) -> Wanted {
        self.key = Some(key);
        self
    }

    /// Valid for this many days.
    pub fn days(mut self, days: i64) -> Wanted {
        self.valid.1 = days * 86_400;
        self
    }

    /// Valid from and until these seconds from now.
    pub fn valid(mut self, from: i64, until: i64) -> Wanted {
        self.valid = (from, until);
        self
    }

    /// Signed by itself.
    pub fn self_signed(self) -> Certified {
        self.make(None)
    }

    /// Signed by `issuer`.
    pub fn signed_by(self, issuer: &Certified) -> Certified {
        self.make(Some(issuer))
    }

    /// Signed by `issuer`, for somebody who keeps his key to himself.
    pub fn certificate_for(&self, key: &PKeyRef<Public>, issuer: &Certified) -> X509 {
        self.sign(key, Some(&issuer.certificate), &issuer.key)
    }

    fn make(mut self, issuer: Option<&Certified>) -> Certified {
        let key = self.key.take().unwrap_or_else(|| {
            let group = EcGroup::from_curve_name(Nid::X9_62_PRIME256V1).unwrap();
            PKey::from_ec_key(EcKey::generate(&group).unwrap()).unwrap()
        });
        let signer = issuer.map_or(&key, |issuer| &issuer.key);
        let issuer = issuer.map(|issuer| &*issuer.certificate);
        Certified { certificate: self.sign(&key, issuer, signer), key }
    }

    fn sign<T: HasPublic>(
        &self,
        key: &PKeyRef<T>,
        issuer: Option<&X509Ref>,
        signer: &PKey<Private>,
    ) -> X509 {
        let mut name = X509Name::builder().unwrap();
        name.append_entry_by_nid(Nid::COMMONNAME, &self.common_name).unwrap();
        let name = name.build();
        let mut serial = BigNum::new().unwrap();
        serial.rand(120, MsbOption::ONE, false).unwrap();
        let now = std::time::SystemTime::now();
        let now = now.duration_since(std::time::UNIX_EPOCH).unwrap().as_secs() as i64;
        let at = |seconds: i64| Asn1Time::from_unix(now + seconds).unwrap();

        let mut builder = X509::builder().unwrap();
        builder.set_version(2).unwrap();
        builder.set_serial_number(&serial.to_asn1_integer().unwrap()).unwrap();
        builder.set_subject_name(&name).unwrap();
        let issuer_name = issuer.map_or(&*name, |issuer| issuer.subject_name());
        builder.set_issuer_name(issuer_name).unwrap();
        builder.set_not_before(&at(self.valid.0)).unwrap();
        builder.set_not_after(&at(self.valid.1)).unwrap();
        builder.set_pubkey(key).unwrap();
        if self.is_authority {
            builder
                .append_extension(BasicConstraints::new().critical().ca().build().unwrap())
                .unwrap();
            let usage = KeyUsage::new().critical().key_cert_sign().crl_sign().build().unwrap();
            builder.append_extension(usage).unwrap();
        }
        if !(self.names.is_empty() && self.addresses.is_empty()) {
            let mut names = SubjectAlternativeName::new();
            for name in &self.names {
                names.dns(name);
            }
            for address in &self.addresses {
                names.ip(&address.to_string());
            }
            let extension = names.build(&builder.x509v3_context(issuer, None)).unwrap();
            builder.append_extension(extension).unwrap();
        }
        builder.sign(signer, MessageDigest::sha256()).unwrap();
        builder.build()
    }
}
