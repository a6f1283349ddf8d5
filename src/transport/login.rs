//! What a broker is told about us, and what it may mean when it does not let us in.
//!
//! User, password, token and nonce signature go into one CONNECT, because a Choria Broker with an organization issuer
//! demands them together. It says nothing but "Authorization Violation"; its reasons are in its own log, and the usual
//! ones are listed here.
//!
//! Source: `Connect` in go-choria's `choria/connection.go`, and `Check` in its `broker/network/choria_auth.go`.

use std::fmt;

use crate::config::Secret;
use crate::transport::tls;
use crate::transport::wire::{self, Info};

/// What gets us into a broker. Read anew for each connection, so that what was renewed is used.
#[derive(Debug, Default)]
pub struct Credentials {
    /// User and password.
    pub user: Option<(String, Secret)>,
    /// Our token.
    pub token: Option<Token>,
    /// Sessions that brokers must agree to; without, nothing is encrypted.
    pub tls: Option<tls::Connector>,
}

/// A token and the key that makes it ours.
pub struct Token {
    /// The token itself.
    pub text: Secret,
    /// Whom it names, for errors.
    pub caller: String,
    /// Signs a broker's nonce.
    pub sign: Box<dyn Fn(&str) -> String + Send + Sync>,
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Token").field("caller", &self.caller).finish_non_exhaustive()
    }
}

/// Why there are no credentials to connect with: which file, and what is wrong with it. Holds nothing secret.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NoCredentials(pub String);

impl fmt::Display for NoCredentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for NoCredentials {}

/// Reads [`Credentials`]; called before each connection, by the thread that makes it.
pub type Source = Box<dyn Fn() -> Result<Credentials, NoCredentials> + Send + Sync>;

impl Credentials {
    /// Writes CONNECT, as `name`, to a broker that said `info`.
    pub(super) fn connect(&self, out: &mut Vec<u8>, name: &str, info: &Info) {
        let (user, password) = match &self.user {
            Some((user, password)) => (Some(user.as_str()), Some(password.expose())),
            None => (None, None),
        };
        let token = self.token.as_ref().map(|token| token.text.expose());
        // The text of the nonce is signed as it is. Without one, as the original: over nothing.
        let nonce = info.nonce.as_deref().unwrap_or_default();
        let signature = self.token.as_ref().map(|token| (token.sign)(nonce));
        let connect = wire::Connect {
            verbose: false,
            pedantic: false,
            jwt: token,
            signature: signature.as_deref(),
            user,
            password,
            auth_token: token,
            tls_required: self.tls.is_some(),
            name,
            lang: "rust",
            version: env!("CARGO_PKG_VERSION"),
            protocol: 1,
            echo: true,
            headers: true,
            no_responders: true,
        };
        wire::connect(out, &connect);
    }

    /// A broker's refusal, with what it was shown and why brokers refuse that.
    pub(super) fn refusal(&self, said: &str) -> String {
        format!("{said}: it was shown {}; {}", self.shown(), self.usual_reason())
    }

    fn shown(&self) -> String {
        let mut shown = Vec::new();
        if let Some((user, _)) = &self.user {
            shown.push(format!("user {user} with a password"));
        }
        if let Some(Token { caller, .. }) = &self.token {
            shown.push(format!("the token of {caller}"));
            shown.push("a signature of its nonce".to_owned());
        }
        match &self.tls {
            None => shown.push("no TLS".to_owned()),
            Some(tls) if tls.has_identity() => shown.push("a certificate".to_owned()),
            Some(_) => shown.push("no certificate".to_owned()),
        }
        shown.join(", ")
    }

    fn usual_reason(&self) -> &'static str {
        let has_identity = self.tls.as_ref().is_some_and(tls::Connector::has_identity);
        match (&self.user, &self.token, &self.tls) {
            (None, _, Some(_)) => {
                "a Choria Broker lets only user provisioner into its provisioning account: is broker_provisioning_password set?"
            }
            (_, _, None) => {
                "the password may be wrong, and a Choria Broker refuses everybody without TLS"
            }
            (Some(_), Some(_), Some(_)) => {
                "usually the password is not its plugin.choria.network.provisioning.client_password, or the token lacks the provisioner permission, has expired by the broker's clock, or hangs on an issuer the broker doesn't know"
            }
            (Some(_), None, Some(_)) if has_identity => {
                "usually the password is not its plugin.choria.network.provisioning.client_password, the certificate is not from the broker's authority, or it wants a token (security provider choria)"
            }
            (Some(_), None, Some(_)) => {
                "usually the password is not its plugin.choria.network.provisioning.client_password, or it wants a certificate or a token"
            }
        }
    }
}
