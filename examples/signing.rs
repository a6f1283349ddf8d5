//! A helper that is an authority too: a node that asks for a certificate gets one. For practice only, since it asks nobody whether
//! the node may have it.
//!
//! `signing FOLDER/ca` signs with the key in `FOLDER/ca.key`, whose own certificate is in `FOLDER/ca.pem`.

use std::error::Error;
use std::fs;
use std::io::{self, Read as _, Write as _};
use std::process::ExitCode;

use openssl::asn1::Asn1Time;
use openssl::bn::{BigNum, MsbOption};
use openssl::error::ErrorStack;
use openssl::hash::MessageDigest;
use openssl::pkey::{PKey, Private};
use openssl::x509::{X509, X509Req};
use serde::Deserialize;
use serde_json::{Value, json};

/// What we look at of a node.
#[derive(Deserialize)]
struct Node {
    identity: String,
    csr: Option<Csr>,
}

/// Its wish for a certificate. Who calls us has verified its signature and its names.
#[derive(Deserialize)]
struct Csr {
    csr: String,
    ssldir: String,
}

fn main() -> ExitCode {
    match answer() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn answer() -> Result<(), Box<dyn Error>> {
    let name = std::env::args().nth(1).ok_or("tell me whose certificates I sign: signing NAME")?;
    let mut input = Vec::new();
    io::stdin().lock().read_to_end(&mut input)?;
    let node: Node = serde_json::from_slice(&input)?;
    let answer = configure(&node, &Authority::read(&name)?)?;
    io::stdout().lock().write_all(answer.to_string().as_bytes())?;
    Ok(())
}

fn configure(node: &Node, authority: &Authority) -> Result<Value, Box<dyn Error>> {
    let Some(Csr { csr, ssldir }) = &node.csr else {
        return Err("there is no request for a certificate: is the feature pki on?".into());
    };
    Ok(json!({
        "configuration": {
            "identity": node.identity,
            "logfile": "/var/log/choria.log",
            "plugin.choria.middleware_hosts": "nats://broker.example.net:4222",
            "plugin.choria.server.provision": "0",
            "plugin.security.provider": "file",
            "plugin.security.file.certificate": format!("{ssldir}/certificate.pem"),
            "plugin.security.file.key": format!("{ssldir}/private.pem"),
            "plugin.security.file.ca": format!("{ssldir}/ca.pem"),
        },
        "certificate": authority.sign(csr)?,
        "ca": authority.pem,
    }))
}

/// Who signs certificates.
struct Authority {
    pem: String,
    certificate: X509,
    key: PKey<Private>,
}

impl Authority {
    fn read(name: &str) -> Result<Authority, Box<dyn Error>> {
        let pem = fs::read_to_string(format!("{name}.pem"))?;
        let certificate = X509::from_pem(pem.as_bytes())?;
        let key = PKey::private_key_from_pem(&fs::read(format!("{name}.key"))?)?;
        Ok(Authority { pem, certificate, key })
    }

    /// A certificate for a month, in PEM, with the names and the key of `request`.
    fn sign(&self, request: &str) -> Result<String, Box<dyn Error>> {
        let certificate = self.certificate_for(&X509Req::from_pem(request.as_bytes())?)?;
        Ok(String::from_utf8(certificate.to_pem()?)?)
    }

    fn certificate_for(&self, request: &X509Req) -> Result<X509, ErrorStack> {
        let mut serial = BigNum::new()?;
        serial.rand(120, MsbOption::ONE, false)?;
        let mut builder = X509::builder()?;
        builder.set_version(2)?;
        builder.set_serial_number(&*serial.to_asn1_integer()?)?;
        builder.set_subject_name(request.subject_name())?;
        builder.set_issuer_name(self.certificate.subject_name())?;
        builder.set_not_before(&*Asn1Time::days_from_now(0)?)?;
        builder.set_not_after(&*Asn1Time::days_from_now(30)?)?;
        builder.set_pubkey(&*request.public_key()?)?;
        builder.sign(&self.key, MessageDigest::sha256())?;
        Ok(builder.build())
    }
}
