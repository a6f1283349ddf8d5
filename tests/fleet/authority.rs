//! What nodes and brokers check of certificates, with an authority of their own.

use openssl::error::ErrorStack;
use openssl::hash::MessageDigest;
use openssl::nid::Nid;
use openssl::pkey::{PKey, Public};
use openssl::sign::Verifier;
use openssl::stack::Stack;
use openssl::x509::store::X509StoreBuilder;
use openssl::x509::verify::X509VerifyParam;
use openssl::x509::{X509, X509Ref, X509StoreContext};

use super::envelope::Proof;
use super::node::Received;

/// Checks a request in protocol v1 as a node does that looks at who asks: `caller` such as `choria=provisioner.example.net`.
///
/// The names that go-choria's `providers/security/filesec` demands of callers besides are a matter of the site.
///
/// # Errors
///
/// Why it would not listen, in words.
pub fn check_request(
    authority: &X509Ref,
    proof: &Proof,
    caller: &str,
    now: i64,
) -> Result<(), String> {
    let certificate = X509::from_pem(proof.credential.as_bytes())
        .map_err(|_| "the certificate is none".to_owned())?;
    check_chain(authority, &certificate, now)?;
    let name = caller.strip_prefix("choria=").unwrap_or_default();
    if !names(&certificate).iter().any(|known| known == name) {
        return Err(format!("the certificate of {:?} for {caller}", names(&certificate)));
    }
    let is_signed = certificate.public_key().and_then(|key| {
        let mut verifier = Verifier::new(MessageDigest::sha256(), &key)?;
        verifier.verify_oneshot(&proof.signature, &proof.signed)
    });
    match is_signed {
        Ok(true) => Ok(()),
        _ => Err("the signature is invalid".to_owned()),
    }
}

/// Checks what a node was given as brokers and other nodes do; `csr_key` is the key of its last request for a certificate.
///
/// # Errors
///
/// Why nobody would talk to it, in words.
pub fn check_received(
    authority: &X509Ref,
    received: &Received,
    identity: &str,
    csr_key: &str,
    now: i64,
) -> Result<(), String> {
    let certificate = X509::from_pem(received.certificate.as_bytes())
        .map_err(|_| "the certificate is none".to_owned())?;
    check_chain(authority, &certificate, now)?;
    if !names(&certificate).iter().any(|known| known == identity) {
        return Err(format!("a certificate of {:?}", names(&certificate)));
    }
    let ours = match &received.key {
        Some(key) => PKey::private_key_from_der(key)
            .and_then(|key| PKey::public_key_from_pem(&key.public_key_to_pem()?)),
        None => public_key(csr_key),
    };
    let fits = ours.and_then(|ours| Ok(certificate.public_key()?.public_eq(&ours)));
    match fits {
        Ok(true) => Ok(()),
        _ => Err("a certificate for another key".to_owned()),
    }
}

fn check_chain(authority: &X509Ref, certificate: &X509Ref, now: i64) -> Result<(), String> {
    let verified = || {
        let mut at = X509VerifyParam::new()?;
        at.set_time(now);
        let mut store = X509StoreBuilder::new()?;
        store.set_param(&at)?;
        store.add_cert(authority.to_owned())?;
        let mut context = X509StoreContext::new()?;
        context.init(&store.build(), certificate, &*Stack::new()?, |context| {
            Ok::<_, ErrorStack>(context.verify_cert()?.then_some(()).ok_or(context.error()))
        })
    };
    match verified() {
        Ok(Ok(())) => Ok(()),
        Ok(Err(why)) => Err(format!("the certificate is not good: {}", why.error_string())),
        Err(error) => Err(error.to_string()),
    }
}

/// A key as a node writes it: PKCS#1 with the label of another form.
fn public_key(pem: &str) -> Result<PKey<Public>, ErrorStack> {
    PKey::public_key_from_pem(pem.replace("PUBLIC KEY", "RSA PUBLIC KEY").as_bytes())
}

/// Its common name, and all others.
fn names(certificate: &X509Ref) -> Vec<String> {
    let entries = certificate.subject_name().entries_by_nid(Nid::COMMONNAME);
    let common = entries.filter_map(|entry| entry.data().to_string().ok());
    let others = certificate.subject_alt_names();
    let others = others.iter().flatten().filter_map(|name| name.dnsname().map(str::to_owned));
    common.chain(others).collect()
}
