//! What a rehearsal takes for the keys a node would make. A node makes others whenever it is asked, also in the middle of somebody's
//! attempt, which would then give it a token or a certificate for keys it has no more; so a rehearsal doesn't ask.
//!
//! Key and request are good ones, so that helper and checks have what they need, and go with the process.

use ed25519_dalek::{Signer as _, SigningKey};
use openssl::error::ErrorStack;
use openssl::hash::MessageDigest;
use openssl::pkey::PKey;
use openssl::rsa::Rsa;
use openssl::x509::{X509Name, X509Req};

use crate::protocol::random_bytes;
use crate::rpc::actions::{Gen25519Reply, GenCsrReply};

/// Where nodes of Choria's packages have their configuration, and so their token and its seed.
///
/// Source: go-choria's `packager/buildspec.yaml`.
pub const DIRECTORY: &str = "/etc/choria";

/// Where such nodes have their certificates while they wait for us.
pub const SSLDIR: &str = "/etc/choria/ssl";

/// Size of the key that nodes make for a certificate, in bits.
const RSA_BITS: u32 = 2048;

/// What a node answers that is asked for an Ed25519 key and to sign `nonce`.
pub fn gen25519(nonce: &str) -> Gen25519Reply {
    let half: [u8; 16] = random_bytes();
    let other: [u8; 16] = random_bytes();
    let mut seed = [0; 32];
    seed[..16].copy_from_slice(&half);
    seed[16..].copy_from_slice(&other);
    let key = SigningKey::from_bytes(&seed);
    Gen25519Reply {
        public_key: key.verifying_key().to_bytes(),
        directory: DIRECTORY.to_owned(),
        signature: key.sign(nonce.as_bytes()).to_bytes(),
    }
}

/// What the node called `name` answers that is asked for a certificate request.
///
/// # Errors
///
/// OpenSSL's, for want of memory or randomness.
pub fn gencsr(name: &str) -> Result<GenCsrReply, ErrorStack> {
    let rsa = Rsa::generate(RSA_BITS)?;
    let public_key = rsa.public_key_to_pem_pkcs1()?;
    let key = PKey::from_rsa(rsa)?;
    let mut subject = X509Name::builder()?;
    subject.append_entry_by_text("CN", name)?;
    let mut request = X509Req::builder()?;
    request.set_subject_name(&subject.build())?;
    request.set_pubkey(&key)?;
    request.sign(&key, MessageDigest::sha256())?;
    let text = |pem: Vec<u8>| String::from_utf8(pem).expect("PEM is ASCII");
    Ok(GenCsrReply {
        csr: text(request.build().to_pem()?),
        // As nodes label it.
        public_key: text(public_key).replace("RSA PUBLIC KEY", "PUBLIC KEY"),
        ssldir: SSLDIR.to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node::proof::ProvedKey;
    use crate::pki::csr::Csr;

    #[test]
    fn stands_every_check_that_a_node_has_to_stand() {
        assert!(ProvedKey::check("nonce", gen25519("nonce")).is_ok());
        let sent = gencsr("n1.example.net").unwrap();
        assert!(sent.public_key.starts_with("-----BEGIN PUBLIC KEY-----\n"), "{}", sent.public_key);
        assert!(Csr::check(sent.csr, "n1.example.net", &[]).is_ok());
    }

    #[test]
    fn a_name_that_no_certificate_takes_is_an_error() {
        assert!(gencsr(&"x".repeat(100)).is_err());
    }
}
