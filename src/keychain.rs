//! Our keys: read anew for each connection, and handed to all who need them.
//!
//! The connection asks for credentials before each round of tries, on its own thread. What vouches for requests comes
//! from the same reading and waits here until the connection is up: while it is down, nothing is signed.

use std::sync::Arc;

use parking_lot::Mutex;

use crate::clock::unix_time;
use crate::config::choria::ChoriaConfig;
use crate::config::security::{Keys, Problem, Security, Signer};
use crate::protocol::{Codec, Sender, v1, v2};
use crate::rpc::Rpc;
use crate::secret::Secret;
use crate::transport::login::{Credentials, NoCredentials, Token};

/// `component` of our log messages.
const COMPONENT: &str = "provisioner";

/// Reads our keys.
pub struct Keychain {
    security: Security,
    user: Option<(String, Secret)>,
    /// Who we are when no token says so.
    sender: Sender,
    /// Read for the last connection, and not in use yet.
    fresh: Mutex<Option<Codec>>,
}

impl Keychain {
    /// Reads the keys that `choria` names for the first time.
    ///
    /// # Errors
    ///
    /// [`Problem`] with one of the files.
    pub fn open(choria: &ChoriaConfig) -> Result<(Arc<Keychain>, Codec), Problem> {
        let sender = Sender { identity: choria.identity.clone(), caller: choria.caller.clone() };
        let (security, user) = (choria.security.clone(), choria.user.clone());
        let keychain = Keychain { security, user, sender, fresh: Mutex::new(None) };
        let (_, codec) = keychain.read()?;
        Ok((Arc::new(keychain), codec))
    }

    /// What the next connection needs.
    ///
    /// # Errors
    ///
    /// [`NoCredentials`] naming the file and what is wrong with it.
    pub fn credentials(&self) -> Result<Credentials, NoCredentials> {
        let (credentials, codec) =
            self.read().map_err(|problem| NoCredentials(problem.to_string()))?;
        *self.fresh.lock() = Some(codec);
        Ok(credentials)
    }

    /// Lets `rpc` use what was read for the connection that was just made.
    pub fn renew(&self, rpc: &Rpc) {
        let Some(codec) = self.fresh.lock().take() else { return };
        let (caller, before) = (codec.sender().caller.clone(), rpc.caller());
        match rpc.renew(codec) {
            Ok(()) if caller == before => {}
            Ok(()) => {
                log::warn!(component = COMPONENT; "Our token names another caller: {caller} in place of {before}; nodes that we had begun refuse us for two minutes")
            }
            Err(error) => log::error!(component = COMPONENT; "Going on with the old keys: {error}"),
        }
    }

    /// Lets `rpc` sign with what is there now: a connection may outlive the keys it was made with, and nodes believe no
    /// token whose time is over. Another caller has to wait for the next connection. For the thread that calls [`Keychain::renew`].
    /// The answer is when the token there expires, in seconds since 1970, if it does.
    ///
    /// # Errors
    ///
    /// [`Problem`] with one of the files; `rpc` goes on with the old keys.
    pub fn refresh(&self, rpc: &Rpc) -> Result<Option<i64>, Problem> {
        let keys = self.security.read(unix_time())?;
        let expires = keys.expires();
        let (_, codec) = self.sort(keys);
        if codec.sender().caller == rpc.caller()
            && let Err(error) = rpc.renew(codec)
        {
            log::error!(component = COMPONENT; "Going on with the old keys: {error}");
        }
        Ok(expires)
    }

    fn read(&self) -> Result<(Credentials, Codec), Problem> {
        Ok(self.sort(self.security.read(unix_time())?))
    }

    /// What a connection needs, and what signs requests.
    fn sort(&self, Keys { tls, signer }: Keys) -> (Credentials, Codec) {
        let sender = self.sender.clone();
        let (token, codec) = match signer {
            Signer::Nothing => (None, Codec::V1(v1::Codec::insecure(sender))),
            Signer::X509(signer) => {
                let signer = v1::Signer::X509(Arc::from(signer));
                (None, Codec::V1(v1::Codec::new(sender, signer)))
            }
            Signer::Token(credentials) => {
                let caller = credentials.caller().to_owned();
                let signer = v2::Signer::new(credentials.token(), credentials.key().clone());
                let codec = v2::Codec::new(Sender { caller: caller.clone(), ..sender }, signer);
                let text = Secret::new(credentials.token());
                let sign = Box::new(move |nonce: &str| credentials.sign_nonce(nonce));
                (Some(Token { text, caller, sign }), Codec::V2(codec))
            }
        };
        (Credentials { user: self.user.clone(), token, tls }, codec)
    }
}

#[cfg(test)]
mod tests {
    use std::env;
    use std::fs;
    use std::path::PathBuf;

    use base64::Engine;
    use base64::engine::general_purpose::STANDARD;
    use crossbeam_channel::bounded;
    use serde_json::Value;

    use super::*;
    use crate::config::choria::Network;
    use crate::config::report::Report;
    use crate::config::surroundings::Surroundings;
    use crate::gate::Lease;
    use crate::jwt::testing::{SIGNER, SIGNER_SEED, edited, issuer};
    use crate::metrics::Metrics;
    use crate::pki::testing::{Certified, Wanted};
    use crate::protocol::Identity;
    use crate::rpc::actions::Action;
    use crate::transport::memory::Memory;

    #[test]
    fn a_certificate_signs_requests_of_version_1_and_identifies_us_in_tls() {
        let site = Site::new("x509");
        let authority = Wanted::new("our CA").authority().self_signed();
        site.write_certified("ca.pem", &authority);
        let ours = Wanted::new("p.example.net").rsa().days(90).signed_by(&authority);
        site.write_certified("own.pem", &ours);
        let (keychain, codec) = Keychain::open(&site.choria(
            "plugin.security.provider = file\nplugin.security.file.certificate = DIR/own.pem\n\
             plugin.security.file.key = DIR/own.pem.key\nplugin.security.file.ca = DIR/ca.pem\n",
        ))
        .unwrap();
        assert!(matches!(codec, Codec::V1(_)));
        assert_eq!(codec.sender().caller, "choria=p.example.net");
        let credentials = keychain.credentials().unwrap();
        assert!(credentials.tls.unwrap().has_identity() && credentials.token.is_none());
        assert_eq!(credentials.user.unwrap().0, "provisioner");

        // A renewed certificate vouches for requests once the connection that was made with it is up.
        let bench = Bench::new(codec);
        assert_eq!(bench.pubcert(), ours.certificate_pem());
        let renewed = Wanted::new("p.example.net").rsa().days(90).signed_by(&authority);
        site.write_certified("own.pem", &renewed);
        keychain.credentials().unwrap();
        assert_eq!(bench.pubcert(), ours.certificate_pem());
        keychain.renew(&bench.rpc);
        assert_eq!(bench.pubcert(), renewed.certificate_pem());
        // Nothing was read since.
        keychain.renew(&bench.rpc);
        assert_eq!(bench.pubcert(), renewed.certificate_pem());

        fs::remove_file(site.dir.join("own.pem")).unwrap();
        let NoCredentials(text) = keychain.credentials().unwrap_err();
        assert!(text.starts_with("plugin.security.file.certificate: "), "{text}");
        assert!(text.ends_with("own.pem: No such file or directory (os error 2)"), "{text}");
    }

    #[test]
    fn a_token_signs_requests_of_version_2_and_logs_in() {
        let site = Site::new("issuer");
        fs::write(site.dir.join("token"), format!("{SIGNER}\n")).unwrap();
        fs::write(site.dir.join("seed"), SIGNER_SEED).unwrap();
        let (keychain, codec) = Keychain::open(&site.choria(
            "plugin.security.provider = choria\nplugin.security.choria.token_file = DIR/token\n\
             plugin.security.choria.seed_file = DIR/seed\n",
        ))
        .unwrap();
        assert!(matches!(codec, Codec::V2(_)));
        let bench = Bench::new(codec);
        assert_eq!(bench.rpc.caller(), "provisioner_signer");
        let pattern = "provisioning.reply.22ec67b1822edddbee1f71725ee3827c.i1.*";
        assert_eq!(bench.memory.patterns(), [pattern]);

        let token = keychain.credentials().unwrap().token.unwrap();
        assert_eq!((token.text.expose(), token.caller.as_str()), (SIGNER, "provisioner_signer"));
        assert_eq!((token.sign)("nonce").len(), 86);
        keychain.renew(&bench.rpc);
        assert_eq!(bench.memory.patterns(), [pattern], "it is the same caller");
        assert_eq!(bench.caller_token(), SIGNER);

        // Another caller with another key: replies come elsewhere.
        let other = edited(SIGNER, &issuer(), |claims| {
            claims["callerid"] = "other".into();
            claims["public_key"] = hex_key().into();
        });
        fs::write(site.dir.join("token"), &other).unwrap();
        let NoCredentials(text) = keychain.credentials().unwrap_err();
        assert!(text.contains("the seed does not belong to the token"), "{text}");
        fs::write(site.dir.join("seed"), "7".repeat(64)).unwrap();
        keychain.credentials().unwrap();
        keychain.renew(&bench.rpc);
        assert_eq!(bench.rpc.caller(), "other");
        assert_eq!(bench.caller_token(), other);
        let patterns = bench.memory.patterns();
        assert!(patterns.len() == 1 && patterns[0] != pattern, "{patterns:?}");
    }

    #[test]
    fn keys_that_are_renewed_sign_requests_while_the_connection_stands() {
        let site = Site::new("refresh");
        let write = |name: &str, text: &str| fs::write(site.dir.join(name), text).unwrap();
        write("token", SIGNER);
        write("seed", SIGNER_SEED);
        let (keychain, codec) = Keychain::open(&site.choria(
            "plugin.security.provider = choria\nplugin.security.choria.token_file = DIR/token\n\
             plugin.security.choria.seed_file = DIR/seed\n",
        ))
        .unwrap();
        let bench = Bench::new(codec);
        let renewed = edited(SIGNER, &issuer(), |claims| claims["public_key"] = hex_key().into());
        write("token", &renewed);
        let problem = keychain.refresh(&bench.rpc).unwrap_err().to_string();
        assert!(problem.contains("the seed does not belong to the token"), "{problem}");
        assert_eq!(bench.caller_token(), SIGNER, "a rotation that is not done changes nothing");
        write("seed", &"7".repeat(64));
        keychain.refresh(&bench.rpc).unwrap();
        assert_eq!(bench.caller_token(), renewed);

        let other = edited(SIGNER, &issuer(), |claims| {
            claims["callerid"] = "other".into();
            claims["public_key"] = hex_key().into();
        });
        write("token", &other);
        keychain.refresh(&bench.rpc).unwrap();
        assert_eq!(bench.caller_token(), renewed, "replies to another come with a connection");
        keychain.credentials().unwrap();
        keychain.renew(&bench.rpc);
        assert_eq!(bench.caller_token(), other);
    }

    #[test]
    fn without_security_nothing_is_read() {
        let site = Site::new("off");
        let choria = site.load("plugin.security.provider = choria\n", true);
        let (keychain, codec) = Keychain::open(&choria).unwrap();
        assert!(matches!(codec, Codec::V1(_)));
        let credentials = keychain.credentials().unwrap();
        assert!(credentials.tls.is_none() && credentials.token.is_none());
    }

    /// The public half of the seed of sevens.
    fn hex_key() -> String {
        let key = ed25519_dalek::SigningKey::from_bytes(&[0x77; 32]);
        key.verifying_key().as_bytes().iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// A folder with a client file and what it names.
    struct Site {
        dir: PathBuf,
    }

    impl Site {
        fn new(name: &str) -> Site {
            let dir =
                env::temp_dir().join(format!("provisioner-keys-{name}-{}", std::process::id()));
            fs::create_dir_all(&dir).unwrap();
            Site { dir }
        }

        /// The certificate as `name`, and the key beside it.
        fn write_certified(&self, name: &str, certified: &Certified) {
            fs::write(self.dir.join(name), certified.certificate_pem()).unwrap();
            fs::write(self.dir.join(format!("{name}.key")), certified.key_pem()).unwrap();
        }

        fn choria(&self, settings: &str) -> ChoriaConfig {
            self.load(settings, false)
        }

        fn load(&self, settings: &str, is_insecure: bool) -> ChoriaConfig {
            let settings = settings.replace("DIR", self.dir.to_str().unwrap());
            let path = self.dir.join("c.cfg");
            let hosts = "identity = p.example.net\nplugin.choria.middleware_hosts = b:1\n";
            fs::write(&path, format!("{hosts}{settings}")).unwrap();
            let password = Secret::new("s3cret");
            let password = Some(&password);
            let network = Network { is_insecure, password, ..Network::default() };
            let around = Surroundings { is_root: true, ..Surroundings::default() };
            let mut report = Report::new("c.cfg");
            let choria = ChoriaConfig::load(&path, network, &around, &mut report);
            choria.unwrap_or_else(|| panic!("{report:?}"))
        }
    }

    impl Drop for Site {
        fn drop(&mut self) {
            // What is left is in the folder for temporary files.
            let _ = fs::remove_dir_all(&self.dir);
        }
    }

    /// Requests into the void.
    struct Bench {
        memory: Arc<Memory>,
        rpc: Arc<Rpc>,
    }

    impl Bench {
        fn new(codec: Codec) -> Bench {
            let memory = Memory::new();
            let rpc =
                Rpc::start(memory.clone(), Lease::endless(), codec, "i1", 60, Metrics::new("test"))
                    .unwrap();
            Bench { memory, rpc }
        }

        fn pubcert(&self) -> String {
            self.vouched_by("pubcert")
        }

        fn caller_token(&self) -> String {
            self.vouched_by("caller")
        }

        /// Sends a request and reads this of its secure document.
        fn vouched_by(&self, key: &str) -> String {
            let node = Identity::parse("n.example.net").unwrap();
            let (sink, _answers) = bounded(1);
            drop(self.rpc.send(&node, Action::Jwt, "{}", &sink).unwrap());
            let sent = self.memory.take_published().pop().unwrap();
            let transport: Value = serde_json::from_slice(&sent.payload).unwrap();
            let secure = STANDARD.decode(transport["data"].as_str().unwrap()).unwrap();
            let secure: Value = serde_json::from_slice(&secure).unwrap();
            secure[key].as_str().unwrap().to_owned()
        }
    }
}
