//! A secured network on this machine: an authority, a broker with Choria's accounts, and what gets a provisioner in.
//!
//! Keys, certificates and tokens are made anew each time and open nothing else. The broker is a plain nats-server: it wants user and
//! password, and leaves tokens and certificates to the nodes of the practice fleet, which look at every request.

use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::OnceLock;

use openssl::pkey::{PKey, Private};

use super::certificates::{Certified, Wanted};
use super::issuer::Organization;
use super::{Builder, Fleet, keys, unix_now};

/// How everybody proves who he is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Setup {
    /// By certificates, in protocol v1; nodes are given theirs.
    X509,
    /// By tokens of an organization's issuer, in protocol v2; nodes get server JWTs.
    Issuer,
}

impl FromStr for Setup {
    type Err = String;

    fn from_str(word: &str) -> Result<Setup, String> {
        match word {
            "x509" => Ok(Setup::X509),
            "issuer" => Ok(Setup::Issuer),
            other => Err(format!("{other}: neither x509 nor issuer")),
        }
    }
}

/// The files of a network, in a folder of their own.
pub struct Network {
    folder: PathBuf,
    /// What it is secured by.
    pub setup: Setup,
    /// Whose certificates count.
    pub authority: Certified,
    /// Whose tokens count.
    pub organization: Organization,
}

/// The caller in requests, and the name in our certificate.
pub const CERTNAME: &str = "provisioner.example.net";
/// The password of user `provisioner`.
pub const PASSWORD: &str = "provSecret";

impl Network {
    /// Writes all files into `folder`.
    ///
    /// # Errors
    ///
    /// Of the file system.
    pub fn create(folder: &Path, setup: Setup) -> io::Result<Network> {
        let network = Network {
            folder: folder.to_owned(),
            setup,
            authority: Wanted::new("practice CA").authority().days(30).self_signed(),
            organization: Organization::new(),
        };
        network.write("ca", &network.authority)?;
        network.write("broker", &broker_of(&network.authority))?;
        network.write("own", &wanted().key(key().clone()).signed_by(&network.authority))?;
        network.write_text("jwt-signer.pem", &Fleet::verify_key_pem())?;
        network.renew_token()?;
        network.write_accounts(PASSWORD)?;
        Ok(network)
    }

    /// A certificate as `NAME.pem`, and its key as `NAME.key`, which nobody else can read.
    ///
    /// # Errors
    ///
    /// Of the file system.
    pub fn write(&self, name: &str, certified: &Certified) -> io::Result<()> {
        self.write_text(&format!("{name}.pem"), &certified.certificate_pem())?;
        self.write_text(&format!("{name}.key"), &certified.key_pem())
    }

    /// A new token and seed for the provisioner, as `signer.jwt` and `signer.seed`.
    ///
    /// # Errors
    ///
    /// Of the file system.
    pub fn renew_token(&self) -> io::Result<()> {
        let signer = self.organization.chain_issuer(unix_now());
        self.write_text("signer.seed", &signer.seed)?;
        self.write_text("signer.jwt", &signer.token)
    }

    /// Writes a file that nobody else can read.
    ///
    /// # Errors
    ///
    /// Of the file system.
    pub fn write_text(&self, name: &str, text: &str) -> io::Result<()> {
        let path = self.path(name);
        fs::write(&path, text)?;
        fs::set_permissions(path, Permissions::from_mode(0o600))
    }

    /// Where a file is.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// The configuration of its nats-server; `password` is that of user `provisioner`.
    ///
    /// The accounts and what may pass between them are those of a Choria Broker: go-choria `broker/network/network_accounts.go` and
    /// `choria_auth.go`.
    ///
    /// # Errors
    ///
    /// Of the file system.
    pub fn write_accounts(&self, password: &str) -> io::Result<()> {
        let path = |name: &str| self.path(name).display().to_string();
        let (certificate, key, ca) = (path("broker.pem"), path("broker.key"), path("ca.pem"));
        let store = path("streams");
        let config = format!(
            r#"
tls {{ cert_file: "{certificate}", key_file: "{key}", ca_file: "{ca}" }}
jetstream {{ store_dir: "{store}" }}
accounts {{
  choria: {{
    jetstream: enabled
    users: [{{user: choria, password: choria}}]
    exports: [
      {{service: "$JS.API.STREAM.INFO.KV_CHORIA_LEADER_ELECTION", accounts: [provisioning]}}
      {{service: "$KV.CHORIA_LEADER_ELECTION.provisioner", accounts: [provisioning]}}
    ]
    imports: [{{stream: {{account: provisioning, subject: "choria.lifecycle.>"}}}}]
  }}
  provisioning: {{
    users: [
      {{user: provisioner, password: "{password}"}}
      {{user: node, password: node, permissions: {{
        subscribe: {{allow: [
          "provisioning.node.>", "provisioning.broadcast.agent.discovery", "provisioning.broadcast.agent.rpcutil",
          "provisioning.broadcast.agent.choria_util", "provisioning.broadcast.agent.choria_provision"
        ]}}
        publish: {{allow: ["choria.lifecycle.>", "provisioning.reply.>", "provisioning.registration.>"]}}
      }}}}
    ]
    exports: [{{stream: "choria.lifecycle.>", accounts: [choria]}}]
    imports: [
      {{service: {{account: choria, subject: "$JS.API.STREAM.INFO.KV_CHORIA_LEADER_ELECTION"}},
        to: "choria.streams.STREAM.INFO.KV_CHORIA_LEADER_ELECTION"}}
      {{service: {{account: choria, subject: "$KV.CHORIA_LEADER_ELECTION.provisioner"}}}}
      {{service: {{account: choria, subject: "$KV.CHORIA_LEADER_ELECTION.provisioner"}},
        to: "choria.streams.$KV.CHORIA_LEADER_ELECTION.provisioner"}}
    ]
  }}
}}
"#
        );
        self.write_text(BROKER, &config)
    }

    /// Where the configuration of its nats-server is.
    pub fn broker(&self) -> PathBuf {
        self.path(BROKER)
    }

    /// Nodes of this network, on the broker at `url`.
    pub fn fleet(&self, url: &str) -> Builder {
        let nodes = Fleet::builder(url).tls().user("node", "node");
        match self.setup {
            Setup::X509 => nodes.authority(&self.authority.certificate).pki(),
            Setup::Issuer => nodes.v2(&self.organization),
        }
    }

    /// Keys of a provisioner's YAML file.
    pub fn settings(&self) -> Vec<(&'static str, String)> {
        let path = |name: &str| self.path(name).display().to_string();
        let mut settings = vec![
            ("choria_insecure", "false".to_owned()),
            ("broker_provisioning_password", PASSWORD.to_owned()),
        ];
        match self.setup {
            Setup::X509 => settings.push(("jwt_verify_cert", path("jwt-signer.pem"))),
            Setup::Issuer => settings.extend([
                ("jwt_verify_cert", self.organization.public_key()),
                ("jwt_signing_key", path("signer.seed")),
                ("jwt_signing_token", path("signer.jwt")),
            ]),
        }
        settings
    }

    /// What a provisioner does for its nodes.
    pub fn features(&self) -> [&'static str; 2] {
        match self.setup {
            Setup::X509 => ["jwt", "pki"],
            Setup::Issuer => ["jwt", "ed25519"],
        }
    }

    /// Keys of a provisioner's client file.
    pub fn client_settings(&self) -> Vec<(String, String)> {
        let (provider, files): (&str, &[_]) = match self.setup {
            Setup::X509 => {
                ("file", &[("certificate", "own.pem"), ("key", "own.key"), ("ca", "ca.pem")])
            }
            Setup::Issuer => (
                "choria",
                &[("token_file", "signer.jwt"), ("seed_file", "signer.seed"), ("ca", "ca.pem")],
            ),
        };
        let files = files.iter().map(|(key, file)| {
            let key = format!("plugin.security.{provider}.{key}");
            (key, self.path(file).display().to_string())
        });
        let provider = ("plugin.security.provider".to_owned(), provider.to_owned());
        [provider].into_iter().chain(files).collect()
    }
}

const BROKER: &str = "broker.conf";

/// A broker's certificate by `authority`, for the names of this machine.
pub fn broker_of(authority: &Certified) -> Certified {
    Wanted::new("broker").name("localhost").address("127.0.0.1").days(30).signed_by(authority)
}

/// A provisioner's certificate by `authority`, with a key that no other has.
pub fn provisioner_of(authority: &Certified) -> Certified {
    wanted().rsa().signed_by(authority)
}

fn wanted() -> Wanted {
    Wanted::new(CERTNAME).days(90)
}

/// An RSA key takes its time, so all networks of a process begin with the same.
fn key() -> &'static PKey<Private> {
    static KEY: OnceLock<PKey<Private>> = OnceLock::new();
    KEY.get_or_init(keys::new_rsa_key)
}
