//! Our own certificate and key, which sign requests of protocol version 1 and identify us in TLS, and authorities.
//!
//! Texts in, values out; reading the files is left to others. To sign and to log in, the certificate's dates and issuer are not looked
//! at: brokers and nodes do that, and theirs is the clock that counts. Who wants to know beforehand what they will say asks [`verify`].

use std::fmt;

use openssl::error::ErrorStack;
use openssl::hash::MessageDigest;
use openssl::pkey::{Id, PKey, Private};
use openssl::sign;
use openssl::stack::Stack;
use openssl::x509::store::X509StoreBuilder;
use openssl::x509::verify::X509VerifyParam;
use openssl::x509::{X509, X509PurposeId, X509StoreContext, X509VerifyResult};

use super::pem;

/// Sizes of RSA keys we accept, in bits; the upper end is OpenSSL's own.
const RSA_BITS: std::ops::RangeInclusive<u32> = 1024..=16_384;

/// Signs requests with the private half of a certificate that goes along.
pub struct Signer {
    /// The whole content of the certificate file, intermediates included.
    certificate: String,
    key: PKey<Private>,
}

impl Signer {
    /// Takes the contents of a certificate file and of its key's file.
    ///
    /// # Errors
    ///
    /// [`Error`] if one of them can't be read, the key is encrypted or not RSA, or the two don't belong together.
    ///
    /// Source: `SignBytes` and `PublicCertTXT` in go-choria's `providers/security/filesec`, which finds out at the first request.
    pub fn new(certificate: String, key: &str) -> Result<Signer, Error> {
        let public = certificate_of(&certificate)?
            .public_key()
            .map_err(|error| Error::Certificate(error.to_string()))?;
        let key = private_key(key)?;
        if !key.public_eq(&public) {
            return Err(Error::Mismatch);
        }
        let signer = Signer { certificate, key };
        // Whatever OpenSSL has against this key, it shall say now and not in the middle of the night.
        signer.try_sign(b"").map_err(|error| Error::Key(error.to_string()))?;
        Ok(signer)
    }

    /// The certificate as it goes into a request.
    pub fn certificate(&self) -> &str {
        &self.certificate
    }

    /// The RSA signature over `message`, PKCS#1 v1.5 with SHA-256.
    pub fn sign(&self, message: &[u8]) -> Vec<u8> {
        self.try_sign(message).expect("the key signed when it was loaded")
    }

    fn try_sign(&self, message: &[u8]) -> Result<Vec<u8>, ErrorStack> {
        sign::Signer::new(MessageDigest::sha256(), &self.key)?.sign_oneshot_to_vec(message)
    }
}

impl fmt::Debug for Signer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Signer").field("key_bits", &self.key.bits()).finish_non_exhaustive()
    }
}

fn certificate_of(text: &str) -> Result<X509, Error> {
    if text.trim().is_empty() {
        return Err(Error::Certificate("it is empty".to_owned()));
    }
    let block = pem::first_block(text).map_err(|error| Error::Certificate(error.to_string()))?;
    if block.label != "CERTIFICATE" {
        let label: String = block.label.chars().take(40).collect();
        return Err(Error::Certificate(format!("the PEM block is a {label:?}")));
    }
    X509::from_der(&block.der).map_err(|error| Error::Certificate(error.to_string()))
}

/// Reads all certificates of a file, in their order: a bundle of authorities, or our own and those between it and its
/// authority.
///
/// What is no certificate is skipped, and one that can't be read as long as there are others, as in Go.
///
/// # Errors
///
/// [`Error::Certificate`] if nothing is left.
pub fn certificates(text: &str) -> Result<Vec<X509>, Error> {
    if text.trim().is_empty() {
        return Err(Error::Certificate("it is empty".to_owned()));
    }
    let mut certificates = Vec::new();
    let mut problem = "there is none in it".to_owned();
    let mut rest = text;
    loop {
        let block = match pem::first_block(rest) {
            Ok(block) => block,
            Err(pem::Error::Missing) => break,
            Err(error) => {
                problem = error.to_string();
                // It goes on behind this block's first line.
                match rest.split_once("-----BEGIN ") {
                    Some((_, after)) => rest = after,
                    None => break,
                }
                continue;
            }
        };
        rest = block.after;
        if block.label == "CERTIFICATE" {
            match X509::from_der(&block.der) {
                Ok(certificate) => certificates.push(certificate),
                Err(error) => problem = error.to_string(),
            }
        }
    }
    if certificates.is_empty() { Err(Error::Certificate(problem)) } else { Ok(certificates) }
}

/// Verifies the first of `own` as a client's certificate at `now`, in seconds since 1970; the others may stand between it and one of
/// `authorities`.
///
/// # Errors
///
/// [`Unverified`], what OpenSSL has against it.
pub fn verify(own: &[X509], authorities: &[X509], now: i64) -> Result<(), Unverified> {
    let result = try_verify(own, authorities, now)
        .map_err(|error| Unverified { text: error.to_string(), is_expired: false })?;
    match result {
        X509VerifyResult::OK => Ok(()),
        result => Err(Unverified {
            text: result.error_string().to_owned(),
            is_expired: result.as_raw() == X509_V_ERR_CERT_HAS_EXPIRED,
        }),
    }
}

fn try_verify(
    own: &[X509],
    authorities: &[X509],
    now: i64,
) -> Result<X509VerifyResult, ErrorStack> {
    let mut store = X509StoreBuilder::new()?;
    for authority in authorities {
        store.add_cert(authority.clone())?;
    }
    let mut parameters = X509VerifyParam::new()?;
    parameters.set_time(now);
    parameters.set_purpose(X509PurposeId::SSL_CLIENT)?;
    store.set_param(&parameters)?;
    let store = store.build();
    let mut between = Stack::new()?;
    for certificate in own.iter().skip(1) {
        between.push(certificate.clone())?;
    }
    let Some(own) = own.first() else { return Ok(X509VerifyResult::APPLICATION_VERIFICATION) };
    let mut context = X509StoreContext::new()?;
    context.init(&store, own, &between, |context| {
        context.verify_cert()?;
        Ok(context.error())
    })
}

/// Why a certificate is not believed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unverified {
    text: String,
    is_expired: bool,
}

impl Unverified {
    /// Whether its time is over, which no other authority changes.
    pub fn is_expired(&self) -> bool {
        self.is_expired
    }
}

impl fmt::Display for Unverified {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl std::error::Error for Unverified {}

/// OpenSSL's number for a certificate whose time is over.
const X509_V_ERR_CERT_HAS_EXPIRED: i32 = 10;

/// Reads the content of a key file: one RSA key, unencrypted, in the first PEM block, where the original looks.
///
/// # Errors
///
/// [`Error`], any but the ones about certificates.
pub fn private_key(text: &str) -> Result<PKey<Private>, Error> {
    if let Ok(block) = pem::first_block(text)
        && !block.label.ends_with("PRIVATE KEY")
    {
        return Err(no_key(block.label));
    }
    let key = tls_key(text)?;
    if key.id() != Id::RSA {
        return Err(Error::KeyKind);
    }
    if !RSA_BITS.contains(&key.bits()) {
        return Err(Error::Key(format!("an RSA key of {} bits", key.bits())));
    }
    Ok(key)
}

/// Reads the content of a key file: one key of any kind, unencrypted.
///
/// # Errors
///
/// [`Error::Key`], [`Error::Encrypted`]
pub fn tls_key(text: &str) -> Result<PKey<Private>, Error> {
    if text.trim().is_empty() {
        return Err(Error::Key("it is empty".to_owned()));
    }
    // Before OpenSSL sees it: it would ask for the passphrase on the terminal.
    if text.contains("BEGIN ENCRYPTED PRIVATE KEY") || text.contains("Proc-Type: 4,ENCRYPTED") {
        return Err(Error::Encrypted);
    }
    let block = |text| pem::first_block(text).map_err(|error| Error::Key(error.to_string()));
    let mut found = block(text)?;
    let first = found.label;
    // Certificates may stand in the same file, and OpenSSL's tools write parameters before a key.
    while !found.label.ends_with("PRIVATE KEY") {
        found = block(found.after).map_err(|_| no_key(first))?;
    }
    // PKCS#1, PKCS#8 or SEC 1, whatever the label says, as the original.
    PKey::private_key_from_der(&found.der).map_err(|error| Error::Key(error.to_string()))
}

/// That a PEM block is something else.
fn no_key(label: &str) -> Error {
    let label: String = label.chars().take(40).collect();
    Error::Key(format!("the PEM block is a {label:?}"))
}

/// Why a certificate and a key don't sign requests.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Error {
    /// The certificate can't be read.
    Certificate(String),
    /// The key can't be read or used.
    Key(String),
    /// The key needs a passphrase.
    Encrypted,
    /// The key is not RSA.
    KeyKind,
    /// The key is not the certificate's.
    Mismatch,
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Certificate(what) => write!(f, "could not read the certificate: {what}"),
            Error::Key(what) => write!(f, "could not read the private key: {what}"),
            Error::Encrypted => f.write_str(
                "the private key is encrypted, and a daemon has nobody to ask for its passphrase",
            ),
            Error::KeyKind => {
                f.write_str("the private key is not an RSA key, the only kind that can sign here")
            }
            Error::Mismatch => f.write_str("the private key does not belong to the certificate"),
        }
    }
}

impl std::error::Error for Error {}

#[cfg(test)]
mod tests {
    use std::slice;

    use openssl::ec::{EcGroup, EcKey};
    use openssl::nid::Nid;
    use openssl::pkey::PKey;
    use openssl::rsa::Rsa;
    use openssl::symm::Cipher;

    use super::{Error, Signer, X509, certificates, tls_key, verify};
    use crate::clock::unix_time;
    use crate::pki::testing::{Certified, Wanted};

    const CERTIFICATE: &str = include_str!("../../tests/vectors/captures/x509/prov.pem");
    const CA: &str = include_str!("../../tests/vectors/captures/x509/ca.pem");
    const KEY: &str = include_str!("../../tests/vectors/captures/x509/prov-key.pem");

    #[test]
    fn takes_the_key_in_either_encoding() {
        let rsa = Rsa::private_key_from_pem(KEY.as_bytes()).unwrap();
        let pkcs1 = text(rsa.private_key_to_pem().unwrap());
        let pkcs8 = text(PKey::from_rsa(rsa).unwrap().private_key_to_pem_pkcs8().unwrap());
        assert!(pkcs1.contains("BEGIN RSA PRIVATE KEY") && pkcs8.contains("BEGIN PRIVATE KEY"));
        let expected = signer(CERTIFICATE, KEY).unwrap().sign(b"message");
        for key in [pkcs1, pkcs8, format!("a note\n{KEY}")] {
            assert_eq!(signer(CERTIFICATE, &key).unwrap().sign(b"message"), expected);
        }
    }

    #[test]
    fn keeps_the_certificate_file_as_it_is() {
        let chain = format!("{CERTIFICATE}{CA}\n");
        assert_eq!(signer(&chain, KEY).unwrap().certificate(), chain);
    }

    #[test]
    fn says_what_is_wrong_with_a_certificate() {
        check("", KEY, "could not read the certificate: it is empty");
        check(" \n", KEY, "could not read the certificate: it is empty");
        check("x", KEY, "could not read the certificate: no PEM block found");
        check(KEY, KEY, "could not read the certificate: the PEM block is a \"PRIVATE KEY\"");
        let broken = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----";
        let error = signer(broken, KEY).unwrap_err();
        assert!(matches!(error, Error::Certificate(_)), "{error}");
        check(
            &CERTIFICATE.replace("-----END", ""),
            KEY,
            "could not read the certificate: the PEM block has no matching end",
        );
    }

    #[test]
    fn says_what_is_wrong_with_a_key() {
        check(CERTIFICATE, "", "could not read the private key: it is empty");
        check(CERTIFICATE, "x", "could not read the private key: no PEM block found");
        check(
            CERTIFICATE,
            CERTIFICATE,
            "could not read the private key: the PEM block is a \"CERTIFICATE\"",
        );
        let broken = "-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----";
        let error = signer(CERTIFICATE, broken).unwrap_err();
        assert!(matches!(error, Error::Key(_)), "{error}");
    }

    #[test]
    fn refuses_an_encrypted_key_without_asking_for_its_passphrase() {
        let rsa = Rsa::private_key_from_pem(KEY.as_bytes()).unwrap();
        let old = rsa.private_key_to_pem_passphrase(Cipher::aes_256_cbc(), b"x").unwrap();
        let new = PKey::from_rsa(rsa)
            .unwrap()
            .private_key_to_pem_pkcs8_passphrase(Cipher::aes_256_cbc(), b"x")
            .unwrap();
        let expected =
            "the private key is encrypted, and a daemon has nobody to ask for its passphrase";
        check(CERTIFICATE, &text(old), expected);
        check(CERTIFICATE, &text(new), expected);
    }

    #[test]
    fn refuses_keys_that_are_not_rsa_or_not_the_certificates() {
        let group = EcGroup::from_curve_name(Nid::X9_62_PRIME256V1).unwrap();
        let ec = EcKey::generate(&group).unwrap();
        let kind = "the private key is not an RSA key, the only kind that can sign here";
        check(CERTIFICATE, &text(ec.private_key_to_pem().unwrap()), kind);
        let ed25519 = PKey::generate_ed25519().unwrap().private_key_to_pem_pkcs8().unwrap();
        check(CERTIFICATE, &text(ed25519), kind);

        let small = Rsa::generate(512).unwrap().private_key_to_pem().unwrap();
        check(CERTIFICATE, &text(small), "could not read the private key: an RSA key of 512 bits");
        let other = Rsa::generate(1024).unwrap().private_key_to_pem().unwrap();
        check(CERTIFICATE, &text(other), "the private key does not belong to the certificate");
        check(CA, KEY, "the private key does not belong to the certificate");
    }

    #[test]
    fn reads_every_certificate_of_a_bundle() {
        let junk = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
        let text = format!("a bundle\n{CA}{KEY}{junk}{CERTIFICATE}-----BEGIN X-----\nnot\n{CA}");
        let subjects: Vec<_> = certificates(&text)
            .unwrap()
            .iter()
            .map(|certificate| {
                let name = certificate.subject_name().entries_by_nid(Nid::COMMONNAME).next();
                name.unwrap().data().to_string().unwrap()
            })
            .collect();
        let [ca, own, again] = &subjects[..] else { panic!("{subjects:?}") };
        assert_eq!(ca, again);
        assert_eq!(own, "provisioner.choria");

        let check = |text: &str, expected: &str| {
            let error = certificates(text).unwrap_err().to_string();
            assert!(error.starts_with("could not read the certificate: "), "{error}");
            assert!(error.contains(expected), "{error}");
        };
        check("", "it is empty");
        check("hello", "there is none in it");
        check(KEY, "there is none in it");
        check("-----BEGIN CERTIFICATE-----", "no matching end");
        check(junk, "asn1");
    }

    #[test]
    fn a_certificate_is_verified_up_to_an_authority() {
        let root = Wanted::new("root").authority().self_signed();
        let between = Wanted::new("between").authority().signed_by(&root);
        let own = Wanted::new("own").signed_by(&between);
        let at = |seconds: i64, chain: &[&Certified]| {
            let chain: Vec<X509> = chain.iter().map(|it| it.certificate.clone()).collect();
            verify(&chain, slice::from_ref(&root.certificate), unix_time() + seconds)
                .map_err(|error| (error.to_string(), error.is_expired()))
        };
        let refused = |why: &str, is_expired| Err((why.to_owned(), is_expired));
        let whole = [&own, &between];
        assert_eq!(at(0, &whole), Ok(()));
        assert_eq!(at(0, &[&own]), refused("unable to get local issuer certificate", false));
        assert_eq!(at(2 * 86_400, &whole), refused("certificate has expired", true));
        assert_eq!(at(-2 * 3_600, &whole), refused("certificate is not yet valid", false));
        let signed_by_no_authority = Wanted::new("x").signed_by(&own);
        let chain = [&signed_by_no_authority, &own, &between];
        assert_eq!(at(0, &chain), refused("invalid CA certificate", false));
    }

    #[test]
    fn takes_keys_of_other_kinds_for_tls_alone() {
        let group = EcGroup::from_curve_name(Nid::X9_62_PRIME256V1).unwrap();
        let ec = EcKey::generate(&group).unwrap();
        let parameters =
            "-----BEGIN EC PARAMETERS-----\nBggqhkjOPQMBBw==\n-----END EC PARAMETERS-----\n";
        let sec1 = parameters.to_owned() + &text(ec.private_key_to_pem().unwrap());
        let pkcs8 = text(PKey::from_ec_key(ec).unwrap().private_key_to_pem_pkcs8().unwrap());
        for key in [sec1, pkcs8, KEY.to_owned(), format!("{CERTIFICATE}{KEY}")] {
            tls_key(&key).unwrap();
        }
        assert_eq!(
            tls_key(CA).unwrap_err().to_string(),
            "could not read the private key: the PEM block is a \"CERTIFICATE\""
        );
    }

    #[test]
    fn shows_no_key_in_debug_output() {
        let shown = format!("{:?}", signer(CERTIFICATE, KEY).unwrap());
        assert_eq!(shown, "Signer { key_bits: 2048, .. }");
    }

    fn signer(certificate: &str, key: &str) -> Result<Signer, Error> {
        Signer::new(certificate.to_owned(), key)
    }

    #[track_caller]
    fn check(certificate: &str, key: &str, expected: &str) {
        assert_eq!(signer(certificate, key).unwrap_err().to_string(), expected);
    }

    fn text(pem: Vec<u8>) -> String {
        String::from_utf8(pem).unwrap()
    }
}
