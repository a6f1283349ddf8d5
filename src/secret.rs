//! What nobody may see: not in a log, nor in memory that is free again, nor among the variables of a helper.

use std::fmt;

use zeroize::Zeroizing;

/// Where the password for the broker comes from where the client file leaves it open; helpers don't get it.
pub const PASSWORD_VARIABLE: &str = "MCOLLECTIVE_NATS_PASSWORD";

/// A text that must not be shown: a password, a token, a key. It is wiped from memory when it is no longer needed.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(Zeroizing<String>);

impl Secret {
    /// Takes `text` out of sight.
    pub fn new(text: impl Into<String>) -> Secret {
        Secret(Zeroizing::new(text.into()))
    }

    /// The text itself, for the one place that has to send it.
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shows_nothing_unless_it_is_asked_for() {
        let secret = Secret::new("s3cr3t");
        assert_eq!(format!("{secret:?} {:?}", Some(&secret)), "*** Some(***)");
        assert_eq!(secret.expose(), "s3cr3t");
    }
}
