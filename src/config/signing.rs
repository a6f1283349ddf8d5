//! The files that server JWTs are signed with: checked at start, and read again for every node, so that they can be replaced.
//!
//! Key and token are read together and checked against each other before either is used: in the middle of a rotation there may be an old key
//! beside a new token for a moment, and no node would be let in with what such a pair signs.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use zeroize::Zeroizing;

use crate::config::duration::words;
use crate::config::file::At;
use crate::config::report::Report;
use crate::config::{VerifyKeySource, is_open_to_all, read_secret};
use crate::errors::chain;
use crate::jwt::client;
use crate::jwt::hex;
use crate::jwt::server::{Issuer, IssuerError};

/// Where the key and the token are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SigningFiles {
    /// `jwt_signing_key`
    pub key: PathBuf,
    /// `jwt_signing_token`; without, the key is one that brokers know itself.
    pub token: Option<PathBuf>,
}

impl SigningFiles {
    /// Reads both, as one pair that was checked at `now`, in seconds since 1970.
    ///
    /// # Errors
    ///
    /// [`SigningError`]: a file can't be read, or nobody would accept what is signed with these two.
    pub fn read(&self, now: i64) -> Result<Issuer, SigningError> {
        self.contents()?.check(self, now)
    }

    /// The same for one of many nodes: what `last` has seen is not checked once more within one second.
    ///
    /// # Errors
    ///
    /// As [`SigningFiles::read`].
    pub fn read_again(&self, now: i64, last: &LastPair) -> Result<Arc<Issuer>, SigningError> {
        let contents = self.contents()?;
        if let Some(checked) = &*last.0.lock()
            && (checked.now, &checked.contents) == (now, &contents)
        {
            return Ok(checked.issuer.clone());
        }
        let issuer = Arc::new(contents.check(self, now)?);
        *last.0.lock() = Some(Checked { contents, now, issuer: issuer.clone() });
        Ok(issuer)
    }

    fn contents(&self) -> Result<Contents, SigningError> {
        let token = self.token.as_deref().map(|path| content(TOKEN, path)).transpose()?;
        Ok(Contents { token, key: content(KEY, &self.key)? })
    }

    /// What an operator has to know of a token that will expire soon.
    pub fn expiry_warning(&self, issuer: &Issuer, now: i64) -> Option<String> {
        let (token, expires) = (self.token.as_ref()?, issuer.expires()?);
        client::expires_soon(expires, now).then(|| {
            let (token, expires) = (token.display(), client::date(expires));
            format!("{TOKEN}: {token} expires on {expires}, and all it signed with it: replace it")
        })
    }

    fn check(&self, key: &str, token: Option<&str>, now: i64) -> Result<Issuer, SigningError> {
        Issuer::check(key, token, now).map_err(|error| {
            let (setting, path) = match (&error, &self.token) {
                (IssuerError::Key(_) | IssuerError::Token(client::Error::Seed(_)), _)
                | (_, None) => (KEY, &self.key),
                (IssuerError::Token(_), Some(token)) => (TOKEN, token),
            };
            SigningError { setting, path: path.clone(), fault: Fault::Unusable(error) }
        })
    }
}

/// The last pair that was found good, and when. To read the files costs little, and to check the signatures in the token
/// as much as all that is signed for a node.
#[derive(Debug, Default)]
pub struct LastPair(Mutex<Option<Checked>>);

struct Checked {
    contents: Contents,
    now: i64,
    issuer: Arc<Issuer>,
}

/// Of both files.
#[derive(PartialEq, Eq)]
struct Contents {
    key: Zeroizing<String>,
    token: Option<Zeroizing<String>>,
}

impl Contents {
    fn check(&self, files: &SigningFiles, now: i64) -> Result<Issuer, SigningError> {
        files.check(&self.key, self.token.as_ref().map(|token| token.as_str()), now)
    }
}

/// It can sign for any node.
impl fmt::Debug for Checked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

const KEY: &str = "jwt_signing_key";
const TOKEN: &str = "jwt_signing_token";

/// Of the file that `setting` names.
fn content(setting: &'static str, path: &Path) -> Result<Zeroizing<String>, SigningError> {
    let fault =
        |error| SigningError { setting, path: path.to_path_buf(), fault: Fault::Unreadable(error) };
    read_secret(path).map_err(fault)
}

/// What is written about signing.
pub(super) struct Written {
    pub key: Option<At<String>>,
    pub token: Option<At<String>>,
    pub validity: Option<At<Duration>>,
}

/// How long a server JWT is valid unless the helper wishes otherwise.
const VALIDITY: Duration = Duration::from_secs(365 * 24 * 3_600);

/// A node whose token is over is lost: a shorter one helps nobody.
const VALIDITY_SHORT: Duration = Duration::from_secs(3_600);

/// Checks how long server JWTs are valid.
pub(super) fn validity(written: &Written, is_needed: bool, report: &mut Report) -> Duration {
    let Some(At { line, value }) = &written.validity else { return VALIDITY };
    if value.is_zero() {
        report.error(*line, "server_jwt_validity: must not be zero");
    } else if is_needed && *value <= VALIDITY_SHORT {
        let found = words(*value);
        report.warn(
            *line,
            format!("server_jwt_validity: nodes can't connect any more after {found}, until they are provisioned again"),
        );
    }
    *value
}

/// Checks what server JWTs are signed with, at `now`, in seconds since 1970. Files that are not used are not looked at.
pub(super) fn signing(
    written: Written,
    verify: Option<&VerifyKeySource>,
    now: i64,
    report: &mut Report,
) -> Option<SigningFiles> {
    let is_set = |at: &At<String>| !at.value.is_empty();
    let (key, token) = (written.key.filter(is_set), written.token.filter(is_set));
    let Some(key) = key else {
        report.error(None, "jwt_signing_key: must be set when `features.ed25519` is on");
        return None;
    };
    let files = SigningFiles {
        key: PathBuf::from(&key.value),
        token: token.as_ref().map(|token| PathBuf::from(&token.value)),
    };
    let line_of = |error: &SigningError| match &token {
        Some(token) if error.setting == TOKEN => token.line,
        _ => key.line,
    };
    let take = |read: Result<Zeroizing<String>, SigningError>, report: &mut Report| {
        read.map_err(|error| error.report(line_of(&error), report)).ok()
    };
    let key_text = take(content(KEY, &files.key), report);
    let token_text = files.token.as_deref().map(|path| take(content(TOKEN, path), report));
    if key_text.is_some() && is_open_to_all(&files.key) {
        let shown = files.key.display();
        report.warn(key.line, format!("{KEY}: everybody on this machine can read {shown}"));
    }

    let issuer = match (key_text, token_text) {
        (Some(key), None) => files.check(&key, None, now),
        (Some(key), Some(Some(token))) => files.check(&key, Some(&token), now),
        _ => return Some(files),
    };
    match (issuer, &token) {
        (Err(error), _) => error.report(line_of(&error), report),
        (Ok(issuer), Some(token)) => {
            let validity = written.validity.map_or(VALIDITY, |at| at.value);
            let mut warn = |text: String| report.warn(token.line, text);
            match files.expiry_warning(&issuer, now) {
                Some(text) => warn(text),
                None => {
                    if let Some(text) = cut(&files, &issuer, validity, now) {
                        warn(text);
                    }
                }
            }
            if let Some(text) = other_organization(&files, &issuer, verify) {
                warn(text);
            }
        }
        (Ok(_), None) => {}
    }
    Some(files)
}

/// That no server JWT will be valid for as long as the site wants.
fn cut(files: &SigningFiles, issuer: &Issuer, validity: Duration, now: i64) -> Option<String> {
    let (token, expires) = (files.token.as_ref()?.display(), issuer.expires()?);
    let wanted = i64::try_from(validity.as_secs()).unwrap_or(i64::MAX);
    (expires.saturating_sub(now) < wanted).then(|| {
        let (expires, validity) = (client::date(expires), words(validity));
        format!(
            "{TOKEN}: {token} expires on {expires}, so server JWTs will be valid until then and not for {validity}"
        )
    })
}

/// That nodes are from one organization and get tokens of another.
fn other_organization(
    files: &SigningFiles,
    issuer: &Issuer,
    verify: Option<&VerifyKeySource>,
) -> Option<String> {
    let (Issuer::Chain(issuer), Some(VerifyKeySource::Ed25519(key))) = (issuer, verify) else {
        return None;
    };
    let (token, issuer) = (files.token.as_ref()?.display(), issuer.organization_key().as_bytes());
    (key != issuer).then(|| {
        format!(
            "{TOKEN}: {token} was issued by {}, and jwt_verify_cert is another organization's key",
            hex::encode(issuer)
        )
    })
}

/// Why server JWTs can't be signed: the site's files have to be put right, not the node.
#[derive(Debug)]
pub struct SigningError {
    setting: &'static str,
    path: PathBuf,
    fault: Fault,
}

#[derive(Debug)]
enum Fault {
    Unreadable(io::Error),
    Unusable(IssuerError),
}

impl SigningError {
    /// What is wrong, without our own words around it.
    fn cause(&self) -> &(dyn std::error::Error + 'static) {
        match &self.fault {
            Fault::Unreadable(error) => error,
            Fault::Unusable(IssuerError::Key(error)) => error,
            Fault::Unusable(IssuerError::Token(error)) => error,
        }
    }

    fn report(&self, line: usize, report: &mut Report) {
        if let Fault::Unreadable(error) = &self.fault {
            report.denied |= error.kind() == io::ErrorKind::PermissionDenied;
        }
        let (setting, path) = (self.setting, self.path.display());
        report.error(line, format!("{setting}: {path}: {}", chain(self.cause())));
    }
}

impl fmt::Display for SigningError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = match self.fault {
            Fault::Unreadable(_) => "read",
            Fault::Unusable(_) => "use",
        };
        write!(f, "could not {what} {} {}", self.setting, self.path.display())
    }
}

impl std::error::Error for SigningError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(self.cause())
    }
}

#[cfg(test)]
mod tests {
    use std::fs::Permissions;
    use std::ops::Deref;
    use std::os::unix::fs::PermissionsExt;
    use std::sync::atomic::{AtomicU32, Ordering};

    use serde_json::{Value, json};

    use super::*;
    use crate::jwt::testing::{self, NOW, SIGNER, SIGNER_SEED};

    const DAY: i64 = 24 * 3_600;

    #[test]
    fn takes_a_key_with_its_token_or_alone() {
        let files = Files::new();
        assert_eq!(files.check(json!({})), Found::default());
        let issuer = files.signing(true).read(NOW).unwrap();
        assert_eq!(issuer.expires(), Some(2_051_222_400));
        assert_eq!(issuer.organization(), "choria");

        let alone = json!({"token": null});
        assert_eq!(files.check(alone.clone()), Found::default());
        assert_eq!(files.signing(false).read(NOW).unwrap().expires(), None);
        files.write("key", &testing::recorded("insecure/jwt-signer.key"));
        assert_eq!(files.check(alone), Found::default());
        // Editors end a file with a line break.
        files.write("key", &format!("{SIGNER_SEED}\n"));
        files.write("token", &format!("{SIGNER}\n"));
        assert_eq!(files.check(json!({})), Found::default());
    }

    #[test]
    fn names_each_fault_with_its_line() {
        let files = Files::new();
        let missing = "No such file or directory (os error 2)";
        files.fails(
            json!({"key": null}),
            "t.yaml: jwt_signing_key: must be set when `features.ed25519` is on",
        );
        files.fails(
            json!({"key": ""}),
            "t.yaml: jwt_signing_key: must be set when `features.ed25519` is on",
        );
        files.fails(
            json!({"key": "/nowhere"}),
            &format!("t.yaml:1: jwt_signing_key: /nowhere: {missing}"),
        );
        files.fails(
            json!({"token": "/nowhere"}),
            &format!("t.yaml:2: jwt_signing_token: /nowhere: {missing}"),
        );
        files.fails(
            json!({"key": "/"}),
            "t.yaml:1: jwt_signing_key: /: Is a directory (os error 21)",
        );
        files.fails(
            json!({"token": "/"}),
            "t.yaml:2: jwt_signing_token: /: Is a directory (os error 21)",
        );
        let both = files.check(json!({"key": "/nowhere", "token": "/nowhere"}));
        assert_eq!(both.errors.len(), 2, "{both:?}");

        let (key, token) = (files.name("key"), files.name("token"));
        let key_is = |content: &str, expected: &str| {
            files.write("key", content);
            files.fails(json!({}), &format!("t.yaml:1: jwt_signing_key: {key}: {expected}"));
            files.write("key", SIGNER_SEED);
        };
        key_is("", "could not read the token's seed: the key file is empty");
        key_is(
            "abc",
            "could not read the token's seed: invalid seed length: 3 hex digits instead of 64",
        );
        key_is(
            &testing::recorded("insecure/jwt-signer.key"),
            "could not read the token's seed: the key file holds PEM, and an ed25519 seed of 64 hex digits is wanted here",
        );
        key_is(&"0".repeat(70_000), "larger than 65536 bytes");
        files.write("key", "abc");
        files.fails(
            json!({"token": null}),
            &format!(
                "t.yaml:1: jwt_signing_key: {key}: invalid seed length: 3 hex digits instead of 64"
            ),
        );

        files.write("key", &"ab".repeat(32));
        files.fails(
            json!({}),
            &format!(
                "t.yaml:2: jwt_signing_token: {token}: the seed does not belong to the token: another public_key is in it"
            ),
        );
        files.write("key", SIGNER_SEED);
        let token_is = |content: &str, expected: &str| {
            files.write("token", content);
            files.fails(json!({}), &format!("t.yaml:2: jwt_signing_token: {token}: {expected}"));
        };
        token_is("", "the token file is empty");
        token_is(
            testing::SERVER,
            r#"not a client token: its purpose is "choria_server" and not "choria_client_id""#,
        );
        token_is(
            &edited(|claims| claims["exp"] = json!(NOW)),
            "the token expired on 2026-11-29 23:46:40 UTC",
        );
        token_is(
            &edited(|claims| claims["tcs"] = json!(null)),
            "no Trust Chain Signature claim in JWT Signing Token: it was not made with --issuer",
        );
    }

    #[test]
    fn warns_of_what_will_be_a_fault_or_a_surprise() {
        let files = Files::new();
        let token = files.name("token");
        let ends_in = |days: i64| {
            files.write("token", &edited(|claims| claims["exp"] = json!(NOW + days * DAY)));
        };
        ends_in(29);
        let soon = format!(
            "t.yaml:2: jwt_signing_token: {token} expires on 2026-12-28 23:46:40 UTC, and all it signed with it: replace it"
        );
        files.warns(json!({}), &soon);
        files.warns(json!({"validity": 3_601}), &soon);
        ends_in(364);
        files.warns(
            json!({}),
            &format!(
                "t.yaml:2: jwt_signing_token: {token} expires on 2027-11-28 23:46:40 UTC, so server JWTs will be valid until then and not for 8760h"
            ),
        );
        assert_eq!(files.check(json!({"validity": 364 * DAY})), Found::default());
        ends_in(365);
        assert_eq!(files.check(json!({})), Found::default());

        files.warns(
            json!({"verify": vec![7; 32]}),
            &format!(
                "t.yaml:2: jwt_signing_token: {token} was issued by {}, and jwt_verify_cert is another organization's key",
                testing::ISSUER_PUBLIC
            ),
        );
        let organization = testing::bytes::<32>(testing::ISSUER_PUBLIC);
        assert_eq!(files.check(json!({"verify": organization.to_vec()})), Found::default());

        for (mode, is_open) in [(0o600, false), (0o640, false), (0o644, true), (0o602, true)] {
            std::fs::set_permissions(files.name("key"), Permissions::from_mode(mode)).unwrap();
            let found = files.check(json!({}));
            let expected = format!(
                "t.yaml:1: jwt_signing_key: everybody on this machine can read {}",
                files.name("key")
            );
            let expected = if is_open { vec![expected] } else { Vec::new() };
            assert_eq!(found, Found { warnings: expected, errors: Vec::new() }, "{mode:o}");
        }
    }

    #[test]
    fn a_validity_of_nothing_is_refused_and_a_short_one_gets_a_warning() {
        let check = |secs: u64, is_needed: bool| {
            let mut report = Report::new("t.yaml");
            let validity = At { line: 3, value: Duration::from_secs(secs) };
            let written = Written { key: None, token: None, validity: Some(validity) };
            assert_eq!(super::validity(&written, is_needed, &mut report).as_secs(), secs);
            Found::of(&report)
        };
        let zero = check(0, false).errors;
        assert_eq!(zero, ["t.yaml:3: server_jwt_validity: must not be zero"]);
        assert_eq!(check(3_600, false), Found::default());
        assert_eq!(check(3_601, true), Found::default());
        assert_eq!(
            check(3_600, true).warnings,
            [
                "t.yaml:3: server_jwt_validity: nodes can't connect any more after 1h, until they are provisioned again"
            ]
        );
    }

    #[test]
    fn reads_what_is_there_now_and_only_a_pair_that_fits() {
        let files = Files::new();
        let (signing, last) = (files.signing(true), LastPair::default());
        let first = signing.read_again(NOW, &last).unwrap();
        assert_eq!(first.organization(), "choria");
        // Checked once a second.
        let is_first = |now| Arc::ptr_eq(&first, &signing.read_again(now, &last).unwrap());
        assert_eq!((is_first(NOW), is_first(NOW + 1), is_first(NOW)), (true, false, false));

        // In the middle of a rotation.
        let other = testing::key(0x60);
        files.write("key", &hex::encode(&other.to_bytes()));
        let (key, token) = (files.name("key"), files.name("token"));
        check(
            signing.read_again(NOW, &last),
            &format!(
                "could not use jwt_signing_token {token}: the seed does not belong to the token: another public_key is in it"
            ),
        );
        // After it.
        let id = "33p35A32s2nvG7P1eyW3rzyAYfS";
        let public_key = hex::encode(other.verifying_key().as_bytes());
        let vouched = {
            use ed25519_dalek::Signer as _;
            testing::issuer().sign(format!("{id}.{public_key}").as_bytes())
        };
        files.write(
            "token",
            &edited(|claims| {
                claims["jti"] = json!(id);
                claims["public_key"] = json!(public_key);
                claims["tcs"] = json!(hex::encode(&vouched.to_bytes()));
                claims["exp"] = json!(NOW + 5);
            }),
        );
        assert_eq!(signing.read_again(NOW, &last).unwrap().expires(), Some(NOW + 5));
        check(
            signing.read_again(NOW + 5, &last),
            &format!(
                "could not use jwt_signing_token {token}: the token expired on 2026-11-29 23:46:45 UTC"
            ),
        );

        files.write("key", "");
        check(
            signing.read_again(NOW, &last),
            &format!(
                "could not use jwt_signing_key {key}: could not read the token's seed: the key file is empty"
            ),
        );
        std::fs::remove_file(&key).unwrap();
        check(
            signing.read_again(NOW, &last),
            &format!(
                "could not read jwt_signing_key {key}: No such file or directory (os error 2)"
            ),
        );
    }

    #[track_caller]
    fn check(read: Result<Arc<Issuer>, SigningError>, expected: &str) {
        assert_eq!(testing::chain_of(&read.unwrap_err()), expected);
    }

    /// [`SIGNER`] with other claims.
    fn edited(edit: impl FnOnce(&mut Value)) -> String {
        testing::edited(SIGNER, &testing::issuer(), edit)
    }

    /// What a check had to say.
    #[derive(Debug, Default, PartialEq, Eq)]
    struct Found {
        errors: Vec<String>,
        warnings: Vec<String>,
    }

    impl Found {
        fn of(report: &Report) -> Found {
            let texts = |findings: &[crate::config::report::Finding]| {
                findings.iter().map(|finding| finding.to_string()).collect()
            };
            Found { errors: texts(&report.errors), warnings: texts(&report.warnings) }
        }
    }

    /// A key and its token in a directory of their own.
    struct Files(PathBuf);

    impl Files {
        fn new() -> Files {
            static LAST: AtomicU32 = AtomicU32::new(0);
            let number = LAST.fetch_add(1, Ordering::Relaxed);
            let name = format!("signing-test-{}-{number}", std::process::id());
            let files = Files(std::env::temp_dir().join(name));
            std::fs::create_dir(&files.0).unwrap();
            files.write("key", SIGNER_SEED);
            files.write("token", SIGNER);
            files
        }

        fn write(&self, name: &str, content: &str) {
            let path = self.join(name);
            std::fs::write(&path, content).unwrap();
            std::fs::set_permissions(path, Permissions::from_mode(0o600)).unwrap();
        }

        fn name(&self, name: &str) -> String {
            self.join(name).display().to_string()
        }

        fn signing(&self, has_token: bool) -> SigningFiles {
            SigningFiles { key: self.join("key"), token: has_token.then(|| self.join("token")) }
        }

        /// Checks these files, or what `edit` has in their place.
        fn check(&self, edit: Value) -> Found {
            let path = |setting: &str, line: usize| {
                let path = match edit.get(setting) {
                    None => Some(self.name(setting)),
                    Some(path) => path.as_str().map(str::to_owned),
                };
                path.map(|value| At { line, value })
            };
            let validity = edit["validity"].as_u64().map(Duration::from_secs);
            let written = Written {
                key: path("key", 1),
                token: path("token", 2),
                validity: validity.map(|value| At { line: 3, value }),
            };
            let verify = edit.get("verify").map(|bytes| {
                let bytes: Vec<u8> = serde_json::from_value(bytes.clone()).unwrap();
                VerifyKeySource::Ed25519(bytes.try_into().unwrap())
            });
            let mut report = Report::new("t.yaml");
            signing(written, verify.as_ref(), NOW, &mut report);
            Found::of(&report)
        }

        #[track_caller]
        fn fails(&self, edit: Value, expected: &str) {
            let found = self.check(edit);
            assert_eq!(found, Found { errors: vec![expected.to_owned()], warnings: Vec::new() });
        }

        #[track_caller]
        fn warns(&self, edit: Value, expected: &str) {
            let found = self.check(edit);
            assert_eq!(found, Found { warnings: vec![expected.to_owned()], errors: Vec::new() });
        }
    }

    impl Deref for Files {
        type Target = Path;

        fn deref(&self) -> &Path {
            &self.0
        }
    }

    impl Drop for Files {
        fn drop(&mut self) {
            drop(std::fs::remove_dir_all(&self.0));
        }
    }
}
