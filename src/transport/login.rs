//! What a broker is told about us, and what it may mean when it does not let us in.
//!
//! User, password, token and nonce signature go into one CONNECT, because a Choria Broker with an organization issuer
//! demands them together. It says nothing but "Authorization Violation"; its reasons are in its own log, and the usual
//! ones are listed here.
//!
//! Source: `Connect` in go-choria's `choria/connection.go`, and `Check` in its `broker/network/choria_auth.go`.

use std::fmt;

use crate::secret::Secret;
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

    /// The refusal of a broker that said `info`, with what it was shown and why brokers refuse that.
    pub(super) fn refusal(&self, said: &str, info: &Info) -> String {
        let is_nonce_offered = info.nonce.is_some();
        let (shown, reason) = (self.shown(is_nonce_offered), self.usual_reason(is_nonce_offered));
        format!("{said}: it was shown {shown}; {reason}")
    }

    fn shown(&self, is_nonce_offered: bool) -> String {
        let mut shown = Vec::new();
        if self.user.is_none() && self.token.is_none() && self.tls.is_none() {
            shown.push("no user and password".to_owned());
        }
        if let Some((user, _)) = &self.user {
            shown.push(format!("user {user} with a password"));
        }
        if let Some(Token { caller, .. }) = &self.token {
            shown.push(format!("the token of {caller}"));
            if is_nonce_offered {
                shown.push("a signature of its nonce".to_owned());
            }
        }
        match &self.tls {
            None => shown.push("no TLS".to_owned()),
            Some(tls) if tls.has_identity() => shown.push("a certificate".to_owned()),
            Some(_) => shown.push("no certificate".to_owned()),
        }
        shown.join(", ")
    }

    /// A Choria Broker offers a nonce exactly when it takes tokens, which it does with an organization issuer.
    fn usual_reason(&self, is_nonce_offered: bool) -> &'static str {
        let has_identity = self.tls.as_ref().is_some_and(tls::Connector::has_identity);
        match (&self.user, &self.token, &self.tls) {
            (None, _, Some(_)) => {
                "a Choria Broker lets only user provisioner into its provisioning account: is broker_provisioning_password set?"
            }
            (None, None, None) => {
                "if it wants a log-in, broker_provisioning_password is that of user provisioner, and plugin.nats.user and plugin.nats.pass in Choria's client file are those of any other; a Choria Broker refuses everybody without TLS, which choria_insecure turns off"
            }
            (_, _, None) => {
                "the password may be wrong, and a Choria Broker refuses everybody without TLS"
            }
            (Some(_), Some(_), Some(_)) if !is_nonce_offered && !has_identity => {
                "it offers no nonce, so it takes no tokens: a Choria Broker without an organization issuer wants a certificate of its authority (security provider file or puppet)"
            }
            (Some(_), Some(_), Some(_)) => {
                "usually the password is not its plugin.choria.network.provisioning.client_password, or the token lacks the provisioner permission, has expired by the broker's clock, or hangs on an issuer the broker doesn't know"
            }
            (Some(_), None, Some(_)) if is_nonce_offered => {
                "it offers a nonce, so it takes tokens: a Choria Broker with an organization issuer wants one (security provider choria); or the password is not its plugin.choria.network.provisioning.client_password"
            }
            (Some(_), None, Some(_)) if has_identity => {
                "usually the password is not its plugin.choria.network.provisioning.client_password, or it has none"
            }
            (Some(_), None, Some(_)) => {
                "usually the password is not its plugin.choria.network.provisioning.client_password, or it wants a certificate of its authority"
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pki::testing::Wanted;
    use crate::transport::tls::{Connector, Identity, Offer};

    /// What Choria Broker 0.29.4 refused, and the reason in its own log.
    #[test]
    fn a_refusal_leads_to_what_a_choria_broker_has_against_us() {
        let (issuer, plain) = (true, false);
        let password = "the password is not its plugin.choria.network.provisioning.client_password";
        // "invalid provisioner password supplied", "provisioner claim is false in token with caller id 'x'", "failed to
        // parse client token issued by the choria chain".
        for part in [password, "lacks the provisioner permission", "expired", "an issuer"] {
            check(issuer, &credentials(true, true, false), part);
        }
        // "no token provided in connection"
        check(issuer, &credentials(true, false, true), "wants one (security provider choria)");
        check(issuer, &credentials(true, false, true), password);
        // "provisioning user is only allowed over verified TLS connections"
        check(plain, &credentials(true, true, false), "wants a certificate of its authority");
        check(plain, &credentials(true, false, false), "wants a certificate of its authority");
        // "provisioning user password not enabled"
        check(plain, &credentials(true, false, true), "or it has none");
        check(plain, &credentials(true, true, true), password);
        // "do not know how to handle x purpose token"
        check(issuer, &credentials(false, true, false), "is broker_provisioning_password set?");
        // "Did not receive any TLS Connection State"
        check(plain, &Credentials { tls: None, ..credentials(true, false, false) }, "without TLS");
    }

    #[test]
    fn a_refusal_lists_what_was_shown_and_none_of_its_values() {
        let all = credentials(true, true, true);
        let text = all.refusal("no", &info(true));
        let shown = "no: it was shown user provisioner with a password, the token of signer, a signature of its nonce, a certificate; ";
        assert!(text.starts_with(shown), "{text}");
        let text = credentials(false, true, false).refusal("no", &info(false));
        assert!(
            text.starts_with("no: it was shown the token of signer, no certificate; "),
            "{text}"
        );
        for text in [text, format!("{all:?}")] {
            assert!(!text.contains("s3cret") && !text.contains("t.o.ken"), "{text}");
        }
    }

    #[test]
    fn who_showed_no_log_in_is_told_which_settings_hold_one() {
        let nothing = Credentials { tls: None, ..credentials(false, false, false) };
        let text = nothing.refusal("no", &info(false));
        assert!(text.starts_with("no: it was shown no user and password, no TLS; "), "{text}");
        for part in ["broker_provisioning_password", "plugin.nats.user", "plugin.nats.pass"] {
            assert!(text.contains(part), "{text}");
        }
        assert!(!text.contains("may be wrong"), "{text}");
        // One that was shown may well be.
        let user = Credentials { tls: None, ..credentials(true, false, false) };
        check(false, &user, "the password may be wrong");
    }

    #[track_caller]
    fn check(is_nonce_offered: bool, shown: &Credentials, expected: &str) {
        let text = shown.refusal("Authorization Violation", &info(is_nonce_offered));
        assert!(text.contains(expected), "{text}");
    }

    fn info(is_nonce_offered: bool) -> Info {
        Info { nonce: is_nonce_offered.then(|| "5Jm9lYq0N2w1xQc".to_owned()), ..Info::default() }
    }

    fn credentials(user: bool, token: bool, certificate: bool) -> Credentials {
        let identity = certificate.then(|| {
            let own = Wanted::new("provisioner").self_signed();
            Identity { certificates: vec![own.certificate], key: own.key }
        });
        let tls = Connector::new(None, identity.as_ref(), &Offer::default()).unwrap();
        Credentials {
            user: user.then(|| ("provisioner".to_owned(), Secret::new("s3cret"))),
            token: token.then(|| Token {
                text: Secret::new("t.o.ken"),
                caller: "signer".to_owned(),
                sign: Box::new(|_| String::new()),
            }),
            tls: Some(tls),
        }
    }
}
