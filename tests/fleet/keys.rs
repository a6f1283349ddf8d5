//! Keys, tokens and CSRs of the practice fleet, made ahead where they are expensive.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use ed25519_dalek::SigningKey;
use openssl::asn1::Asn1Type;
use openssl::derive::Deriver;
use openssl::error::ErrorStack;
use openssl::hash::MessageDigest;
use openssl::nid::Nid;
use openssl::pkey::{Id, PKey, Private};
use openssl::rsa::Rsa;
use openssl::sign::Signer;
use openssl::stack::Stack;
use openssl::symm::{Cipher, decrypt};
use openssl::x509::extension::SubjectAlternativeName;
use openssl::x509::{X509Name, X509ReqBuilder};

use super::envelope::{Protocol, quoted};
use super::event::uuid;
use super::fault::Csr;

/// The provisioning JWTs of one fleet.
#[derive(Debug)]
pub struct Tokens {
    /// What a healthy node shows.
    pub good: String,
    /// Signed by a key nobody trusts.
    pub foreign: OnceLock<String>,
    /// Ended a minute ago.
    pub expired: String,
    /// Right in all but its purpose.
    pub other_purpose: String,
}

/// What the provisioning JWTs of a fleet say.
#[derive(Debug, Clone, Copy)]
pub struct Said<'a> {
    /// The provisioning token.
    pub token: &'a str,
    /// Where the broker is.
    pub broker_url: &'a str,
    /// User and password for it, if it wants them.
    pub user: Option<&'a (String, String)>,
    /// Whether nodes may be upgraded.
    pub upgradable: bool,
    /// What nodes speak.
    pub protocol: Protocol,
    /// When they were made, in Unix seconds; they are valid for a year.
    pub time: i64,
}

impl Tokens {
    /// Signs them.
    pub fn new(key: &PKey<Private>, said: &Said<'_>) -> Tokens {
        let (year, now) = (365 * 86_400, said.time);
        Tokens {
            good: sign(key, &said.claims("choria_provisioning", now + year)),
            foreign: OnceLock::new(),
            expired: sign(key, &said.claims("choria_provisioning", now - 60)),
            other_purpose: sign(key, &said.claims("choria_server", now + year)),
        }
    }

    /// The token of an attacker: the claims of the good one, signed by a key of the same kind, but his own.
    pub fn foreign(&self) -> &str {
        self.foreign.get_or_init(|| {
            let part = |at: usize| {
                let part = self.good.split('.').nth(at).expect("a JWT has three parts");
                let part = URL_SAFE_NO_PAD.decode(part).expect("we encoded it");
                String::from_utf8(part).expect("we wrote it")
            };
            let key = match part(0).contains("EdDSA") {
                true => PKey::generate_ed25519().expect("OpenSSL makes Ed25519 keys"),
                false => new_rsa_key(),
            };
            sign(&key, &part(1))
        })
    }
}

impl Said<'_> {
    fn claims(&self, purpose: &str, expires: i64) -> String {
        let user = match self.user {
            Some((user, password)) => {
                format!(r#","chusr":{},"chpwd":{}"#, quoted(user), quoted(password))
            }
            None => String::new(),
        };
        let v2 = if self.protocol == Protocol::V2 { r#","v2":true"# } else { "" };
        let update = if self.upgradable { r#","update":true"# } else { "" };
        let made = self.time - 3_600;
        format!(
            r#"{{"cht":{},"chs":false,"chu":{},"chpd":true{user},"extensions":null,"ou":"choria"{v2}{update},"purpose":"{purpose}","iss":"Choria Tokens Package","sub":"{purpose}","exp":{expires},"nbf":{made},"iat":{made},"jti":"{}"}}"#,
            quoted(self.token),
            quoted(self.broker_url),
            uuid().replace('-', ""),
        )
    }
}

/// A token with these claims, signed by an RSA or an Ed25519 key.
pub fn sign(key: &PKey<Private>, claims: &str) -> String {
    let is_ed25519 = key.id() == Id::ED25519;
    let algorithm = if is_ed25519 { "EdDSA" } else { "RS256" };
    let mut text = URL_SAFE_NO_PAD.encode(format!(r#"{{"alg":"{algorithm}","typ":"JWT"}}"#));
    text.push('.');
    URL_SAFE_NO_PAD.encode_string(claims, &mut text);
    let signer = match is_ed25519 {
        true => Signer::new_without_digest(key),
        false => Signer::new(MessageDigest::sha256(), key),
    };
    let signature = signer
        .and_then(|mut signer| signer.sign_oneshot_to_vec(text.as_bytes()))
        .expect("both kinds sign any text");
    text.push('.');
    URL_SAFE_NO_PAD.encode_string(signature, &mut text);
    text
}

/// The key that signs the provisioning JWTs of every fleet in this process that is given no other.
pub fn signing_key() -> &'static PKey<Private> {
    static KEY: OnceLock<PKey<Private>> = OnceLock::new();
    KEY.get_or_init(new_rsa_key)
}

/// The public half of the signing key, as PEM: what `jwt_verify_cert` has to point to.
pub fn verify_key_pem() -> String {
    verify_key(signing_key())
}

/// The public half of a key that signs: hex of an Ed25519 key, else PEM.
pub fn verify_key(key: &PKey<Private>) -> String {
    match key.raw_public_key() {
        Ok(bytes) => hex(&bytes),
        Err(_) => {
            let pem = key.public_key_to_pem().expect("every key has a public half");
            String::from_utf8(pem).expect("PEM is ASCII")
        }
    }
}

/// A new RSA key of the usual size.
pub fn new_rsa_key() -> PKey<Private> {
    Rsa::generate(2048).and_then(PKey::from_rsa).expect("OpenSSL makes RSA keys")
}

/// RSA keys for CSRs. A real node makes a new one for each; here a few are shared by all.
fn csr_key() -> &'static PKey<Private> {
    static KEYS: OnceLock<Vec<PKey<Private>>> = OnceLock::new();
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let keys = KEYS.get_or_init(|| (0..4).map(|_| new_rsa_key()).collect());
    &keys[NEXT.fetch_add(1, Ordering::Relaxed) % keys.len()]
}

/// A key for `gen25519`. A real node makes a new one for each; here a few hundred are shared by all, each request the next one.
pub fn node_key() -> &'static SigningKey {
    static KEYS: OnceLock<Vec<SigningKey>> = OnceLock::new();
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let keys = KEYS.get_or_init(|| {
        let new = || {
            let mut seed = [0; 32];
            fastrand::fill(&mut seed);
            SigningKey::from_bytes(&seed)
        };
        std::iter::repeat_with(new).take(NODE_KEYS).collect()
    });
    &keys[NEXT.fetch_add(1, Ordering::Relaxed) % keys.len()]
}

/// How many keys all nodes share.
const NODE_KEYS: usize = 512;

/// What `gencsr` hands out.
#[derive(Debug, Clone)]
pub struct Request {
    /// The CSR as PEM.
    pub csr: String,
    /// The public key, PKCS#1 under the label `PUBLIC KEY`, as a real node has it.
    pub public_key: String,
}

/// Subject parts of a CSR in the order a node puts them; `ST` is accepted and ignored.
pub type Subject<'a> = [(&'static str, &'a str)];

/// Makes a CSR for `subject`, spoiled as `fault` says.
pub fn csr(subject: &Subject<'_>, fault: Option<Csr>) -> Request {
    let key = csr_key();
    let der = csr_der(key, subject, fault).expect("OpenSSL makes CSRs");
    let public_key =
        key.rsa().and_then(|key| key.public_key_to_der_pkcs1()).expect("it is an RSA key");
    let csr = match fault {
        Some(Csr::NotPem) => "this is no PEM".to_owned(),
        Some(Csr::Empty) => String::new(),
        Some(Csr::NotDer) => pem("CERTIFICATE REQUEST", b"this is no CSR"),
        _ => pem("CERTIFICATE REQUEST", &der),
    };
    Request { csr, public_key: pem("PUBLIC KEY", &public_key) }
}

fn csr_der(
    key: &PKey<Private>,
    subject: &Subject<'_>,
    fault: Option<Csr>,
) -> Result<Vec<u8>, ErrorStack> {
    let mut name = X509Name::builder()?;
    for &(part, value) in subject {
        let (nid, kind) = match part {
            "C" => (Nid::COUNTRYNAME, Asn1Type::PRINTABLESTRING),
            "L" => (Nid::LOCALITYNAME, Asn1Type::PRINTABLESTRING),
            "O" => (Nid::ORGANIZATIONNAME, Asn1Type::PRINTABLESTRING),
            "OU" => (Nid::ORGANIZATIONALUNITNAME, Asn1Type::PRINTABLESTRING),
            _ => (Nid::COMMONNAME, Asn1Type::PRINTABLESTRING),
        };
        let value = match fault {
            Some(Csr::OtherCn) if part == "CN" => "other.example.net",
            _ => value,
        };
        if !value.is_empty() {
            name.append_entry_by_nid_with_type(nid, value, kind)?;
        }
    }
    let mut request = X509ReqBuilder::new()?;
    request.set_version(0)?;
    request.set_subject_name(&name.build())?;
    request.set_pubkey(key)?;
    let mut names = SubjectAlternativeName::new();
    let names = match fault {
        Some(Csr::DeniedDns) => Some(names.dns("admin.privileged.mcollective")),
        Some(Csr::DeniedEmail) => Some(names.email("admin.privileged.mcollective")),
        _ => None,
    };
    if let Some(names) = names {
        let mut extensions = Stack::new()?;
        extensions.push(names.build(&request.x509v3_context(None))?)?;
        request.add_extensions(&extensions)?;
    }
    request.sign(key, MessageDigest::sha256())?;
    let mut der = request.build().to_der()?;
    if fault == Some(Csr::BrokenSignature) {
        // The signature is the last field, so its last byte is the last byte of all.
        *der.last_mut().expect("a CSR is not empty") ^= 1;
    }
    Ok(der)
}

fn pem(label: &str, der: &[u8]) -> String {
    let text = STANDARD.encode(der);
    let mut pem = format!("-----BEGIN {label}-----\n");
    for line in text.as_bytes().chunks(64) {
        pem.push_str(std::str::from_utf8(line).expect("base64 is ASCII"));
        pem.push('\n');
    }
    pem.push_str(&format!("-----END {label}-----\n"));
    pem
}

/// One X25519 pair out of a ring, so that the next call gets another one.
pub struct Exchange {
    key: PKey<Private>,
    /// The public half, in lower-case hex.
    pub public: String,
}

/// The next pair, and where it is in the ring.
pub fn next_exchange() -> (usize, &'static Exchange) {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let at = NEXT.fetch_add(1, Ordering::Relaxed) % exchanges().len();
    (at, &exchanges()[at])
}

/// The pair at `at`.
pub fn exchange(at: usize) -> &'static Exchange {
    &exchanges()[at]
}

fn exchanges() -> &'static [Exchange] {
    static PAIRS: OnceLock<Vec<Exchange>> = OnceLock::new();
    PAIRS.get_or_init(|| {
        let make = || {
            let key = PKey::generate_x25519()?;
            let public = hex(&key.raw_public_key()?);
            Ok(Exchange { key, public })
        };
        (0..64).map(|_| make()).collect::<Result<_, ErrorStack>>().expect("OpenSSL knows X25519")
    })
}

impl Exchange {
    /// Decrypts the private key in a `configure` request, as go-choria `provision/util.go` does.
    ///
    /// # Errors
    ///
    /// The node's own words.
    pub fn decrypt(&self, pem: &str, peer: &str) -> Result<Vec<u8>, String> {
        let peer = unhex(peer).ok_or("encoding/hex: invalid byte")?;
        let low_order = "crypto/ecdh: bad X25519 remote ECDH input: low order point";
        let peer = PKey::public_key_from_raw_bytes(&peer, Id::X25519)
            .map_err(|_| "crypto/ecdh: invalid public key")?;
        let mut deriver = Deriver::new(&self.key).map_err(|error| error.to_string())?;
        let secret = deriver
            .set_peer(&peer)
            .and_then(|()| deriver.derive_to_vec())
            .map_err(|_| low_order)?;
        let (iv, sealed) = read_encrypted_pem(pem)?;
        let salt = &iv[..8];
        let first = md5(&[&secret, salt]);
        let second = md5(&[&first, &secret, salt]);
        decrypt(Cipher::aes_256_cbc(), &[first, second].concat(), Some(&iv), &sealed)
            .map_err(|_| "x509: decryption password incorrect".to_owned())
    }
}

fn read_encrypted_pem(pem: &str) -> Result<(Vec<u8>, Vec<u8>), String> {
    let block = pem
        .split_once("-----BEGIN ")
        .and_then(|(_, rest)| rest.split_once("-----\n"))
        .and_then(|(_, rest)| rest.split_once("-----END "))
        .map(|(block, _)| block)
        .ok_or("bad key received")?;
    let (head, body) = block.split_once("\n\n").ok_or("key is not encrypted")?;
    let iv = head
        .lines()
        .find_map(|line| line.strip_prefix("DEK-Info: AES-256-CBC,"))
        .and_then(unhex)
        .filter(|iv| iv.len() == 16)
        .ok_or("key is not encrypted")?;
    let body: String = body.split_whitespace().collect();
    let body = STANDARD.decode(body).map_err(|_| "bad key received")?;
    Ok((iv, body))
}

/// MD5 of all parts in a row.
pub fn md5(parts: &[&[u8]]) -> Vec<u8> {
    openssl::hash::hash(MessageDigest::md5(), &parts.concat()).expect("OpenSSL knows MD5").to_vec()
}

/// Lower-case hex.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// What hex stands for.
pub fn unhex(text: &str) -> Option<Vec<u8>> {
    (0..text.len())
        .step_by(2)
        .map(|at| u8::from_str_radix(text.get(at..at + 2)?, 16).ok())
        .collect()
}
