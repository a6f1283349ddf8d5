//! Looks at our own tokens while nobody uses them, so that one that expires is known before a node needs it.

use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, never, tick};

use crate::clock::unix_time;
use crate::config::security::Security;
use crate::config::signing::SigningFiles;
use crate::fleet::seldom::Seldom;
use crate::logging::chain;
use crate::metrics::Metrics;

/// How often we look at our own token when nobody needs it.
const TOKENS_EVERY: Duration = Duration::from_secs(60);
/// How often an operator hears that it will expire soon.
const EXPIRY_LOG: Duration = Duration::from_secs(24 * 3_600);
/// How often an operator hears that it is no use; each node that comes says so too.
const SIGNING_LOG: Duration = Duration::from_secs(3_600);

/// Looks at the tokens we sign and log in with, also while there is nothing to use them for.
pub struct Tokens {
    signing: Option<SigningFiles>,
    login: Security,
    warned: Seldom,
    login_warned: Seldom,
    failed: Seldom,
}

impl Tokens {
    pub fn new(signing: Option<SigningFiles>, login: Security) -> Tokens {
        let said_at_start = || {
            let mut seldom = Seldom::every(EXPIRY_LOG);
            seldom.now(Instant::now());
            seldom
        };
        let (warned, login_warned) = (said_at_start(), said_at_start());
        Tokens { signing, login, warned, login_warned, failed: Seldom::every(SIGNING_LOG) }
    }

    /// When to look again.
    pub fn tick(&self) -> Receiver<Instant> {
        if self.is_empty() { never() } else { tick(TOKENS_EVERY) }
    }

    /// Whether we have none at all.
    fn is_empty(&self) -> bool {
        self.signing.is_none() && !matches!(self.login, Security::Issuer(_))
    }

    pub fn look(&mut self, metrics: &Metrics) {
        self.look_at_login(metrics);
        self.look_at_signing(metrics);
    }

    fn look_at_login(&mut self, metrics: &Metrics) {
        // If it can't be read, the next connection says so; this one has no need of it.
        let now = unix_time();
        let Some(expires) = self.login.expires(now) else { return };
        metrics.token_expires("login", expires);
        if let Some(warning) = self.login.expiry_warning(expires, now)
            && self.login_warned.now(Instant::now()).is_some()
        {
            log::warn!(component = "provisioner"; "{warning}");
        }
    }

    fn look_at_signing(&mut self, metrics: &Metrics) {
        let (Some(files), now) = (&self.signing, unix_time()) else { return };
        match files.read(now) {
            Ok(issuer) => {
                if let Some(expires) = issuer.expires() {
                    metrics.token_expires("signing", expires);
                }
                if let Some(warning) = files.expiry_warning(&issuer, now)
                    && self.warned.now(Instant::now()).is_some()
                {
                    log::warn!(component = "provisioner"; "{warning}");
                }
            }
            Err(error) => {
                if self.failed.now(Instant::now()).is_some() {
                    log::error!(component = "provisioner"; "No node gets a server JWT: {}", chain(&error));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::security::IssuerFiles;

    #[test]
    fn a_token_that_we_only_log_in_with_is_looked_at_again() {
        assert!(Tokens::new(None, Security::Off).is_empty());
        let login = Security::Issuer(IssuerFiles::nowhere());
        assert!(!Tokens::new(None, login).is_empty());
    }
}
