//! Looks at our own tokens while nobody uses them, so that one that expires is known before a node needs it.

use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, never, tick};

use crate::clock::unix_time;
use crate::config::Config;
use crate::config::security::{Problem, Security};
use crate::config::signing::SigningFiles;
use crate::errors::chain;
use crate::metrics::Metrics;
use crate::seldom::Seldom;

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
    /// Has requests signed with the keys that are there now.
    refresh: Refresh,
    warned: Seldom,
    login_warned: Seldom,
    login_failed: Seldom,
    failed: Seldom,
}

/// Takes up renewed keys and says when their token expires, if it does; fails with what is wrong with one of the files.
pub type Refresh = Box<dyn Fn() -> Result<Option<i64>, Problem>>;

impl Tokens {
    pub fn new(signing: Option<SigningFiles>, login: Security, refresh: Refresh) -> Tokens {
        let said_at_start = || {
            let mut seldom = Seldom::every(EXPIRY_LOG);
            seldom.now(Instant::now());
            seldom
        };
        let (warned, login_warned) = (said_at_start(), said_at_start());
        let failed = || Seldom::every(SIGNING_LOG);
        let (login_failed, failed) = (failed(), failed());
        Tokens { signing, login, refresh, warned, login_warned, login_failed, failed }
    }

    /// Keeps to these settings from now on, and looks at what they name at once.
    pub fn adapt(&mut self, config: &Config, metrics: &Metrics) {
        if self.signing != config.signing {
            self.signing.clone_from(&config.signing);
            // What was said was said about others.
            (self.warned, self.failed) = (Seldom::every(EXPIRY_LOG), Seldom::every(SIGNING_LOG));
        }
        self.look_at_signing(metrics);
    }

    /// When to look again.
    pub fn tick(&self) -> Receiver<Instant> {
        if self.is_empty() { never() } else { tick(TOKENS_EVERY) }
    }

    /// Whether there is nothing that could expire: a certificate does, too.
    fn is_empty(&self) -> bool {
        self.signing.is_none() && self.login == Security::Off
    }

    pub fn look(&mut self, metrics: &Metrics) {
        self.look_at_login(metrics);
        self.look_at_signing(metrics);
    }

    fn look_at_login(&mut self, metrics: &Metrics) {
        let expires = match (self.refresh)() {
            Ok(expires) => expires,
            Err(problem) => {
                if self.login_failed.now(Instant::now()).is_some() {
                    log::error!(component = "provisioner"; "Going on with the keys of before, which nodes believe until they expire: {problem}");
                }
                None
            }
        };
        let Some(expires) = expires else { return };
        metrics.token_expires("login", expires);
        if let Some(warning) = self.login.expiry_warning(expires, unix_time())
            && self.login_warned.now(Instant::now()).is_some()
        {
            log::warn!(component = "provisioner"; "{warning}");
        }
    }

    fn look_at_signing(&mut self, metrics: &Metrics) {
        let now = unix_time();
        let Some(files) = &self.signing else {
            // A node that had begun before may have brought it back.
            metrics.no_token("signing");
            return;
        };
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
        let tokens = |login| Tokens::new(None, login, Box::new(|| Ok(None)));
        assert!(tokens(Security::Off).is_empty());
        assert!(!tokens(Security::Issuer(IssuerFiles::nowhere())).is_empty());
    }
}
