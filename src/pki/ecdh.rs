//! Key exchange, and encryption of a private key in transit.
//!
//! A helper's CA may make a node's private key. It crosses the broker encrypted under a secret that we agree on with the
//! node: X25519, whose 32 bytes are the password, as they are, of the old PEM encryption of RFC 1423 (AES-256-CBC, a key made
//! by MD5). Nothing authenticates it; a node notices a wrong secret by the padding alone.
//!
//! Pure: random bytes are arguments. Secrets are wiped when dropped, and `Debug` hides them.
//!
//! Sources: `encryptPrivateKey` in choria-io/provisioner's `host/host.go`; go-choria `choria/ecdh.go` and
//! `providers/agent/mcorpc/golang/provision/util.go`; Go's `x509.EncryptPEMBlock`. The original encrypts whatever the first PEM
//! block holds; we send keys that a node can use, and nothing else.

use std::fmt;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use openssl::derive::Deriver;
use openssl::error::ErrorStack;
use openssl::hash::MessageDigest;
use openssl::nid::Nid;
use openssl::pkcs5;
use openssl::pkey::{HasPublic, Id, PKey, PKeyRef, Private};
use openssl::symm::{self, Cipher};
use zeroize::Zeroizing;

use super::pem;

/// The random bytes that one key takes; never to be used for a second.
#[derive(Clone)]
pub struct Ephemeral {
    private: Zeroizing<[u8; 32]>,
    iv: [u8; 16],
}

impl Ephemeral {
    /// Takes our X25519 private key and the initialization vector.
    pub fn new(private: [u8; 32], iv: [u8; 16]) -> Ephemeral {
        Ephemeral { private: Zeroizing::new(private), iv }
    }
}

impl fmt::Debug for Ephemeral {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Ephemeral(***)")
    }
}

/// A private key that only the node can read, as `configure` takes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sealed {
    /// `key`: encrypted PEM.
    pub key: String,
    /// `ecdh_public`: our half of the exchange, in hex.
    pub ecdh_public: String,
}

/// Encrypts `key` for the node whose last `jwt` reply held `node_public`, empty if it was not asked.
///
/// # Errors
///
/// [`Error::NoExchange`], or what is wrong with the node's half.
pub fn seal(key: &PrivateKey, node_public: &str, random: &Ephemeral) -> Result<Sealed, Error> {
    let node_public = node_key(node_public)?;
    let ours = PKey::private_key_from_raw_bytes(&*random.private, Id::X25519)?;
    let secret = agree(&ours, &node_public)?;
    Ok(Sealed {
        key: encrypt(&key.der, &secret, &random.iv)?,
        ecdh_public: hex(&ours.raw_public_key()?),
    })
}

/// The X25519 key in `text`, 64 hex digits.
fn node_key(text: &str) -> Result<[u8; 32], Error> {
    if text.is_empty() {
        return Err(Error::NoExchange);
    }
    let digit = |byte: u8| char::from(byte).to_digit(16).and_then(|digit| u8::try_from(digit).ok());
    let bytes = text
        .as_bytes()
        .chunks(2)
        .map(|pair| match pair {
            &[high, low] => Some(digit(high)? << 4 | digit(low)?),
            _ => None,
        })
        .collect::<Option<Vec<u8>>>()
        .ok_or(Error::NodeKeyHex)?;
    <[u8; 32]>::try_from(bytes).map_err(|bytes| Error::NodeKeyLength { bytes: bytes.len() })
}

/// The secret that both sides of the exchange know.
fn agree(ours: &PKey<Private>, node_public: &[u8; 32]) -> Result<Zeroizing<[u8; 32]>, Error> {
    let theirs = PKey::public_key_from_raw_bytes(node_public, Id::X25519)?;
    let mut deriver = Deriver::new(ours)?;
    deriver.set_peer(&theirs)?;
    let mut secret = Zeroizing::new([0; 32]);
    // With two keys of the right kind, OpenSSL refuses nothing but a secret of zeros, and so do we, whatever OpenSSL.
    match deriver.derive(&mut *secret) {
        Ok(32) if *secret != [0; 32] => Ok(secret),
        _ => Err(Error::NodeKeyLowOrder),
    }
}

/// `plain` as encrypted PEM. The label is the same for every kind of key, because nodes know no other.
fn encrypt(plain: &[u8], secret: &[u8; 32], iv: &[u8; 16]) -> Result<String, ErrorStack> {
    const LINE: usize = 64;

    let cipher = Cipher::aes_256_cbc();
    let derived = pkcs5::bytes_to_key(cipher, MessageDigest::md5(), secret, Some(&iv[..8]), 1)?;
    let key = Zeroizing::new(derived.key);
    let body = STANDARD.encode(symm::encrypt(cipher, &key, Some(iv), plain)?);

    let mut text = format!(
        "-----BEGIN RSA PRIVATE KEY-----\nProc-Type: 4,ENCRYPTED\nDEK-Info: AES-256-CBC,{}\n\n",
        hex(iv)
    );
    let mut rest = body.as_str();
    while !rest.is_empty() {
        let (line, after) = rest.split_at(rest.len().min(LINE));
        text.push_str(line);
        text.push('\n');
        rest = after;
    }
    text.push_str("-----END RSA PRIVATE KEY-----\n");
    Ok(text)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A private key in clear, of a kind that nodes can use.
pub struct PrivateKey {
    key: PKey<Private>,
    der: Zeroizing<Vec<u8>>,
}

impl PrivateKey {
    /// Takes the first private key in `text`, PEM as a helper gives it. Certificates and curve parameters beside it are skipped.
    ///
    /// RSA keys become PKCS#1, since that is what the label of the encrypted text promises. Others stay as they are: nodes
    /// look at the bytes.
    ///
    /// # Errors
    ///
    /// [`Error::Pem`] to [`Error::Kind`]: it cannot be read, is encrypted already, or is of a kind that nodes cannot use.
    pub fn from_pem(text: &str) -> Result<PrivateKey, Error> {
        let given = Zeroizing::new(key_block(text)?);
        let key = PKey::private_key_from_der(&given).map_err(|_| Error::Unreadable)?;
        let der = match key.id() {
            Id::RSA => Zeroizing::new(key.rsa()?.private_key_to_der()?),
            Id::EC => {
                let curve = key.ec_key()?.group().curve_name();
                if !curve.is_some_and(|curve| CURVES.contains(&curve)) {
                    let name = curve.and_then(|curve| curve.short_name().ok());
                    let name = name.unwrap_or("unnamed curve");
                    return Err(Error::Kind(format!("an EC key on {name}")));
                }
                given
            }
            Id::ED25519 => given,
            other => return Err(Error::Kind(kind(other))),
        };
        Ok(PrivateKey { key, der })
    }

    /// Whether `public` is the other half of this key.
    pub fn fits<T: HasPublic>(&self, public: &PKeyRef<T>) -> bool {
        self.key.public_eq(public)
    }
}

impl fmt::Debug for PrivateKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PrivateKey(***)")
    }
}

/// The curves that Go's TLS knows, and so nodes.
const CURVES: [Nid; 4] = [Nid::SECP224R1, Nid::X9_62_PRIME256V1, Nid::SECP384R1, Nid::SECP521R1];

fn kind(id: Id) -> String {
    let name = Nid::from_raw(id.as_raw()).short_name();
    format!("a key of the kind {}", name.unwrap_or("unknown"))
}

/// The bytes of the first private key in `text`.
fn key_block(text: &str) -> Result<Vec<u8>, Error> {
    let mut rest = text;
    let mut other = None;
    loop {
        let block = match pem::first_block(rest) {
            Ok(block) => block,
            Err(pem::Error::Missing) => return Err(Error::NoKey { found: other }),
            Err(pem::Error::Base64) if is_encrypted(rest) => return Err(Error::Encrypted),
            Err(error) => return Err(Error::Pem(error)),
        };
        match block.label {
            "RSA PRIVATE KEY" | "EC PRIVATE KEY" | "PRIVATE KEY" => return Ok(block.der),
            "ENCRYPTED PRIVATE KEY" => return Err(Error::Encrypted),
            label if label.ends_with("PRIVATE KEY") => return Err(Error::Kind(quoted(label))),
            label => {
                other.get_or_insert_with(|| quoted(label));
                rest = block.after;
            }
        }
    }
}

/// Whether the first block of `text` has the headers of an encrypted key.
fn is_encrypted(text: &str) -> bool {
    let block = text.find("-----BEGIN ").map_or("", |at| &text[at..]);
    let block = block.split("-----END ").next().unwrap_or_default();
    block.lines().any(|line| line.starts_with("DEK-Info:") || line.starts_with("Proc-Type:"))
}

/// A label for a message; it comes from outside and may have any length.
fn quoted(label: &str) -> String {
    const QUOTE_MAX: usize = 60;
    format!("a block {:?}", label.chars().take(QUOTE_MAX).collect::<String>())
}

/// Why a private key is not sent to a node.
#[derive(Debug)]
pub enum Error {
    /// The node gave no half of an exchange.
    NoExchange,
    /// The node's half is not hex.
    NodeKeyHex,
    /// The node's half has another length than 32 bytes.
    NodeKeyLength {
        /// Bytes it has.
        bytes: usize,
    },
    /// The node's half is a point of low order: with it, everybody knows the secret.
    NodeKeyLowOrder,
    /// The helper's text is damaged.
    Pem(pem::Error),
    /// There is no private key in it.
    NoKey {
        /// What there is instead.
        found: Option<String>,
    },
    /// It is encrypted.
    Encrypted,
    /// What is inside is no private key.
    Unreadable,
    /// It is of a kind that nodes cannot use.
    Kind(String),
    /// OpenSSL failed.
    Crypto(ErrorStack),
}

impl Error {
    /// Whether it is the node's half of the exchange that is no good.
    pub fn is_of_node(&self) -> bool {
        match self {
            Error::NoExchange
            | Error::NodeKeyHex
            | Error::NodeKeyLength { .. }
            | Error::NodeKeyLowOrder => true,
            Error::Pem(_)
            | Error::NoKey { .. }
            | Error::Encrypted
            | Error::Unreadable
            | Error::Kind(_)
            | Error::Crypto(_) => false,
        }
    }
}

impl From<ErrorStack> for Error {
    fn from(error: ErrorStack) -> Error {
        Error::Crypto(error)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            // The original's words, up to the colon.
            Error::NoExchange => f.write_str(
                "private key received from helper but server did not start Diffie-Hellman exchange: \
                 its jwt reply holds no ecdh_public",
            ),
            Error::NodeKeyHex => f.write_str("the node's ecdh_public is not hex"),
            Error::NodeKeyLength { bytes } => {
                write!(f, "the node's ecdh_public has {bytes} bytes instead of 32")
            }
            Error::NodeKeyLowOrder => f.write_str(
                "the node's ecdh_public is a low order point, which would make the secret public",
            ),
            Error::Pem(_) => f.write_str("bad key received"),
            Error::NoKey { found: None } => f.write_str("bad key received: no PEM block found"),
            Error::NoKey { found: Some(found) } => {
                write!(f, "bad key received: {found} and no private key")
            }
            Error::Encrypted => f.write_str(
                "bad key received: it is encrypted, and the node has no password for it: \
                 the helper must give it in clear",
            ),
            Error::Unreadable => {
                f.write_str("bad key received: the PEM block does not hold a private key")
            }
            Error::Kind(kind) => write!(
                f,
                "bad key received: {kind}, where nodes can use RSA, Ed25519 and EC keys on P-224, P-256, P-384 or P-521"
            ),
            Error::Crypto(_) => f.write_str("could not encrypt the private key"),
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Error::Pem(source) => Some(source),
            Error::Crypto(source) => Some(source),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::error::Error as _;

    use openssl::ec::{EcGroup, EcKey};
    use openssl::nid::Nid;
    use openssl::pkey::{Id, PKey, Private};
    use openssl::rsa::Rsa;
    use openssl::symm::Cipher;

    use super::{Ephemeral, Error, PrivateKey, Sealed, agree, encrypt, hex, node_key, seal};

    // An example computed apart from this code, and from Choria's.
    const NODE_PRIVATE: &str = "606162636465666768696a6b6c6d6e6f707172737475767778797a7b7c7d7e7f";
    const NODE_PUBLIC: &str = "675dd574ed7789310b3d2e7681f3790b466c773b1521fecf36577958371ea52f";
    const OUR_PRIVATE: &str = "808182838485868788898a8b8c8d8e8f909192939495969798999a9b9c9d9e9f";
    const OUR_PUBLIC: &str = "493e82fc74464a59268817623d2053c5eb8e2cc4a988b4fee179ec6b010d531d";
    const SECRET: &str = "fbfb11adeb1d6f71c0571bc1b5dd87519f9a6620b10a5ebc314cbd420c43ba43";
    const IV: [u8; 16] = [
        0xa0, 0xa1, 0xa2, 0xa3, 0xa4, 0xa5, 0xa6, 0xa7, 0xa8, 0xa9, 0xaa, 0xab, 0xac, 0xad, 0xae,
        0xaf,
    ];
    const SEALED: &str = "-----BEGIN RSA PRIVATE KEY-----
Proc-Type: 4,ENCRYPTED
DEK-Info: AES-256-CBC,a0a1a2a3a4a5a6a7a8a9aaabacadaeaf

xh4qGGJsZQGREJHIkTzndQoUEPxBhZ8/2JO3ICAeO7Y=
-----END RSA PRIVATE KEY-----
";

    #[test]
    fn agrees_and_encrypts_as_the_example_does() {
        let ours = x25519(OUR_PRIVATE);
        assert_eq!(hex(&ours.raw_public_key().unwrap()), OUR_PUBLIC);
        let secret = agree(&ours, &node_key(NODE_PUBLIC).unwrap()).unwrap();
        assert_eq!(hex(&*secret), SECRET);
        assert_eq!(encrypt(b"example DER bytes, not a key", &secret, &IV).unwrap(), SEALED);
    }

    #[test]
    fn both_sides_agree_on_one_secret() {
        let node = x25519(NODE_PRIVATE);
        assert_eq!(hex(&node.raw_public_key().unwrap()), NODE_PUBLIC);
        assert_eq!(hex(&*agree(&node, &node_key(OUR_PUBLIC).unwrap()).unwrap()), SECRET);
        let upper_case = node_key(&NODE_PUBLIC.to_uppercase()).unwrap();
        assert_eq!(hex(&*agree(&x25519(OUR_PRIVATE), &upper_case).unwrap()), SECRET);
    }

    #[test]
    fn pads_what_fills_the_last_block_and_breaks_lines_at_64() {
        let secret = node_key(SECRET).unwrap();
        for (length, lines) in [(0, 1), (15, 1), (16, 1), (32, 1), (33, 1), (47, 1), (48, 2)] {
            let plain = vec![7; length];
            let text = encrypt(&plain, &secret, &IV).unwrap();
            let body: Vec<&str> =
                text.lines().skip(4).take_while(|l| !l.starts_with('-')).collect();
            assert_eq!(body.len(), lines, "{length}: {text}");
            assert!(body.iter().all(|line| line.len() <= 64));
            assert!(text.ends_with("\n-----END RSA PRIVATE KEY-----\n"), "{text}");
            assert_eq!(decrypted(&text, &secret), plain);
        }
    }

    #[test]
    fn openssl_reads_the_key_that_the_node_gets() {
        for (name, key, is_pkcs8) in keys() {
            let given = match is_pkcs8 {
                true => key.private_key_to_pem_pkcs8().unwrap(),
                false => traditional(&key),
            };
            let given = String::from_utf8(given).unwrap();
            for text in [
                given.clone(),
                given.replace('\n', "\r\n"),
                format!("Bag Attributes\n    friendlyName: n1\n{given}"),
                format!("{PARAMETERS}{given}"),
                format!("{CERTIFICATE}{given}{CERTIFICATE}"),
                format!("{given}{}", String::from_utf8(traditional(&rsa(1024))).unwrap()),
                given.trim_end().to_owned(),
            ] {
                let read = PrivateKey::from_pem(&text).unwrap();
                assert!(read.fits(&key), "{name}");
                let (sealed, secret) = sealed(&read);
                assert_eq!(sealed.ecdh_public, OUR_PUBLIC);

                // What a node reads: it knows the secret from our half and its own key.
                let opened = PKey::private_key_from_der(&decrypted(&sealed.key, &secret)).unwrap();
                assert!(opened.public_eq(&key), "{name}");
                // OpenSSL's own reading of the whole text; it goes by the label where nodes go by the bytes.
                let label = match (key.id(), is_pkcs8) {
                    (Id::RSA, _) => "RSA PRIVATE KEY",
                    (Id::EC, false) => "EC PRIVATE KEY",
                    _ => continue,
                };
                let relabelled = sealed.key.replace("RSA PRIVATE KEY", label);
                let opened =
                    PKey::private_key_from_pem_passphrase(relabelled.as_bytes(), &secret).unwrap();
                assert!(opened.public_eq(&key), "{name}");
                let wrong = PKey::private_key_from_pem_passphrase(relabelled.as_bytes(), b"wrong");
                assert!(wrong.is_err(), "{name}");
            }
        }
    }

    #[test]
    fn rsa_keys_are_what_the_label_says() {
        let key = rsa(2048);
        let pkcs1 = key.rsa().unwrap().private_key_to_der().unwrap();
        for given in [key.private_key_to_pem_pkcs8().unwrap(), traditional(&key)] {
            let read = PrivateKey::from_pem(std::str::from_utf8(&given).unwrap()).unwrap();
            let (sealed, secret) = sealed(&read);
            assert_eq!(decrypted(&sealed.key, &secret), pkcs1);
        }
        // Whatever label the helper put on it.
        let pkcs8 = String::from_utf8(key.private_key_to_pem_pkcs8().unwrap()).unwrap();
        PrivateKey::from_pem(&pkcs8.replace("PRIVATE KEY", "RSA PRIVATE KEY")).unwrap();
    }

    #[test]
    fn refuses_halves_of_an_exchange_that_are_none() {
        let short =
            |bytes: usize| format!("the node's ecdh_public has {bytes} bytes instead of 32");
        let no_hex = "the node's ecdh_public is not hex";
        refuses_half(
            "",
            "private key received from helper but server did not start Diffie-Hellman exchange: \
             its jwt reply holds no ecdh_public",
        );
        refuses_half(&NODE_PUBLIC[2..], &short(31));
        refuses_half(&format!("{NODE_PUBLIC}00"), &short(33));
        refuses_half("00", &short(1));
        refuses_half(&NODE_PUBLIC[1..], no_hex);
        refuses_half(&NODE_PUBLIC.replace('f', "g"), no_hex);
        refuses_half(&format!("{NODE_PUBLIC}\n"), no_hex);
        refuses_half("é", no_hex);
        refuses_half("+1", no_hex);
    }

    #[test]
    fn refuses_low_order_points() {
        // All of them: orders 1, 2, 4 and 8, and the encodings that only reduce to these.
        for point in [
            "0000000000000000000000000000000000000000000000000000000000000000",
            "0100000000000000000000000000000000000000000000000000000000000000",
            "e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800",
            "5f9c95bca3508c24b1d0b1559c83ef5b04445cc4581c8e86d8224eddd09f1157",
            "ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
            "edffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
            "eeffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
            "0000000000000000000000000000000000000000000000000000000000000080",
            "0100000000000000000000000000000000000000000000000000000000000080",
        ] {
            refuses_half(
                point,
                "the node's ecdh_public is a low order point, which would make the secret public",
            );
        }
    }

    #[test]
    fn refuses_encrypted_keys() {
        let why = "bad key received: it is encrypted, and the node has no password for it: \
                   the helper must give it in clear";
        let key = rsa(1024);
        let cipher = Cipher::aes_256_cbc();
        let pkcs8 = key.private_key_to_pem_pkcs8_passphrase(cipher, b"x").unwrap();
        let old = key.rsa().unwrap().private_key_to_pem_passphrase(cipher, b"x").unwrap();
        for text in [pkcs8, old].map(|pem| String::from_utf8(pem).unwrap()) {
            refuses_key(&text, why);
            refuses_key(&text.replace('\n', "\r\n"), why);
            refuses_key(&format!("{CERTIFICATE}{text}"), why);
        }
        refuses_key(SEALED, why);
    }

    #[test]
    fn refuses_texts_without_a_private_key() {
        refuses_key("", "bad key received: no PEM block found");
        refuses_key("secret", "bad key received: no PEM block found");
        refuses_key(CERTIFICATE, "bad key received: a block \"CERTIFICATE\" and no private key");
        refuses_key(
            &format!("{PARAMETERS}{CERTIFICATE}"),
            "bad key received: a block \"EC PARAMETERS\" and no private key",
        );
        let unreadable = "bad key received: the PEM block does not hold a private key";
        refuses_key("-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n", unreadable);
        refuses_key("-----BEGIN PRIVATE KEY-----\n-----END PRIVATE KEY-----\n", unreadable);
        let key = rsa(1024);
        let public = String::from_utf8(key.public_key_to_pem().unwrap()).unwrap();
        refuses_key(&public, "bad key received: a block \"PUBLIC KEY\" and no private key");
        refuses_key(&public.replace("PUBLIC", "PRIVATE"), unreadable);

        let text = String::from_utf8(key.private_key_to_pem_pkcs8().unwrap()).unwrap();
        let error = PrivateKey::from_pem(&text[..text.len() - 10]).unwrap_err();
        assert_eq!(error.to_string(), "bad key received");
        let source = error.source().unwrap().to_string();
        assert_eq!(source, "the PEM block has no matching end");
    }

    #[test]
    fn refuses_kinds_of_keys_that_nodes_cannot_use() {
        let why = |kind: &str| {
            format!(
                "bad key received: {kind}, where nodes can use RSA, Ed25519 and EC keys on P-224, P-256, P-384 or P-521"
            )
        };
        let bitcoin = String::from_utf8(traditional(&ec(Nid::SECP256K1))).unwrap();
        refuses_key(&bitcoin, &why("an EC key on secp256k1"));
        let exchange = PKey::generate_x25519().unwrap().private_key_to_pem_pkcs8().unwrap();
        refuses_key(std::str::from_utf8(&exchange).unwrap(), &why("a key of the kind X25519"));
        refuses_key(
            "-----BEGIN OPENSSH PRIVATE KEY-----\nAAAA\n-----END OPENSSH PRIVATE KEY-----\n",
            &why("a block \"OPENSSH PRIVATE KEY\""),
        );
    }

    #[test]
    fn never_fails_otherwise_on_changed_bytes() {
        let mut random = fastrand::Rng::with_seed(6);
        let text = traditional(&ec(Nid::X9_62_PRIME256V1));
        for _ in 0..2_000 {
            let mut changed = text.clone();
            for _ in 0..random.usize(1..4) {
                let at = random.usize(..changed.len());
                changed[at] = random.u8(..);
            }
            changed.truncate(random.usize(..=changed.len()));
            if let Ok(changed) = String::from_utf8(changed) {
                // An error or a key, and no panic.
                let _ = PrivateKey::from_pem(&changed);
            }
        }
    }

    #[test]
    fn debug_shows_no_secret() {
        let ephemeral = Ephemeral::new(node_key(OUR_PRIVATE).unwrap(), IV);
        assert_eq!(format!("{ephemeral:?}"), "Ephemeral(***)");
        let text = String::from_utf8(traditional(&rsa(1024))).unwrap();
        assert_eq!(format!("{:?}", PrivateKey::from_pem(&text).unwrap()), "PrivateKey(***)");
    }

    const PARAMETERS: &str =
        "-----BEGIN EC PARAMETERS-----\nBggqhkjOPQMBBw==\n-----END EC PARAMETERS-----\n";
    const CERTIFICATE: &str = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";

    #[track_caller]
    fn refuses_half(node_public: &str, expected: &str) {
        let text = String::from_utf8(traditional(&ec(Nid::X9_62_PRIME256V1))).unwrap();
        let key = PrivateKey::from_pem(&text).unwrap();
        let error: Error = seal(&key, node_public, &ephemeral()).unwrap_err();
        assert_eq!(error.to_string(), expected, "{node_public}");
    }

    #[track_caller]
    fn refuses_key(text: &str, expected: &str) {
        let error = PrivateKey::from_pem(text).unwrap_err();
        assert_eq!(error.to_string(), expected, "{text}");
    }

    fn ephemeral() -> Ephemeral {
        Ephemeral::new(node_key(OUR_PRIVATE).unwrap(), IV)
    }

    fn sealed(key: &PrivateKey) -> (Sealed, [u8; 32]) {
        (seal(key, NODE_PUBLIC, &ephemeral()).unwrap(), node_key(SECRET).unwrap())
    }

    /// What is inside an encrypted text, by OpenSSL's own key derivation and cipher.
    fn decrypted(text: &str, secret: &[u8; 32]) -> Vec<u8> {
        let lines: Vec<&str> = text.lines().collect();
        let iv = lines[2].strip_prefix("DEK-Info: AES-256-CBC,").unwrap();
        assert_eq!(iv, hex(&IV));
        let body = openssl::base64::decode_block(&lines[4..lines.len() - 1].concat()).unwrap();
        let digest = openssl::hash::MessageDigest::md5();
        let first = openssl::hash::hash(digest, &[&secret[..], &IV[..8]].concat()).unwrap();
        let second =
            openssl::hash::hash(digest, &[&first, &secret[..], &IV[..8]].concat()).unwrap();
        let key = [&*first, &*second].concat();
        openssl::symm::decrypt(Cipher::aes_256_cbc(), &key, Some(&IV), &body).unwrap()
    }

    fn keys() -> Vec<(&'static str, PKey<Private>, bool)> {
        vec![
            ("RSA, PKCS#1", rsa(2048), false),
            ("RSA, PKCS#8", rsa(2048), true),
            ("P-256, SEC1", ec(Nid::X9_62_PRIME256V1), false),
            ("P-256, PKCS#8", ec(Nid::X9_62_PRIME256V1), true),
            ("P-521, SEC1", ec(Nid::SECP521R1), false),
            ("Ed25519, PKCS#8", PKey::generate_ed25519().unwrap(), true),
        ]
    }

    fn rsa(bits: u32) -> PKey<Private> {
        PKey::from_rsa(Rsa::generate(bits).unwrap()).unwrap()
    }

    fn ec(curve: Nid) -> PKey<Private> {
        let group = EcGroup::from_curve_name(curve).unwrap();
        PKey::from_ec_key(EcKey::generate(&group).unwrap()).unwrap()
    }

    /// PKCS#1 or SEC1.
    fn traditional(key: &PKey<Private>) -> Vec<u8> {
        match key.id() {
            Id::RSA => key.rsa().unwrap().private_key_to_pem().unwrap(),
            _ => key.ec_key().unwrap().private_key_to_pem().unwrap(),
        }
    }

    fn x25519(hex: &str) -> PKey<Private> {
        PKey::private_key_from_raw_bytes(&node_key(hex).unwrap(), Id::X25519).unwrap()
    }
}
