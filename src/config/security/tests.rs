//! Files as each provider has them, made in a folder of the test's own.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use openssl::pkey::PKey;
use openssl::rsa::Rsa;
use openssl::symm::Cipher;

use super::*;
use crate::config::choria::values::setting;
use crate::jwt::testing::{self, ISSUER_PUBLIC, SIGNER};
use crate::pki::testing::{Certified, Wanted};

const NO_PASSWORD: &str = "broker_provisioning_password: not set";
const NO_CA: &str = "plugin.security.choria.ca: not set, so no broker is verified";
const MISSING: &str = "No such file or directory (os error 2)";

static AUTHORITY: LazyLock<Certified> =
    LazyLock::new(|| Wanted::new("our CA").authority().self_signed());
static OURS: LazyLock<Certified> =
    LazyLock::new(|| Wanted::new("p.example.net").days(90).rsa().signed_by(&AUTHORITY));
static OTHER: LazyLock<Certified> =
    LazyLock::new(|| Wanted::new("other").days(90).rsa().signed_by(&AUTHORITY));

#[test]
fn insecure_means_no_files_at_all() {
    let site = Site::new().insecure();
    let (checked, report) = site.check("plugin.security.provider = no such thing\n");
    assert!(report.errors.is_empty(), "{report:?}");
    let unused = "c.cfg:1: plugin.security.provider: no effect, since `choria_insecure` is on in the YAML file";
    assert_eq!(texts(&report.warnings), [unused]);
    let checked = checked.unwrap();
    assert_eq!((checked.security, checked.caller), (Security::Off, None));
    let keys = Security::Off.read(0).unwrap();
    assert!(keys.tls.is_none() && matches!(keys.signer, Signer::Nothing));
}

#[test]
fn takes_the_files_of_provider_file() {
    let site = Site::new();
    let checked = site.good(&site.file());
    assert_eq!((checked.certname.as_str(), checked.caller), ("p.example.net", None));
    let keys = checked.security.read(now()).unwrap();
    assert!(keys.tls.unwrap().has_identity());
    let Signer::X509(signer) = keys.signer else { panic!("{:?}", keys.signer) };
    assert_eq!(signer.certificate(), OURS.certificate_pem());
    // The last one counts, and home is where it always was.
    site.good(&format!("plugin.security.file.ca = /nowhere\n{}", site.file()));
    let home = site.file().replace(&site.path(""), "~/");
    site.good(&home);
}

#[test]
fn settings_of_another_provider_are_named() {
    let site = Site::new();
    site.warns(
            &format!("plugin.security.choria.ca = x\nplugin.choria.ssldir = y\n{}", site.file()),
            "plugin.choria.ssldir, plugin.security.choria.ca: no effect, since the security provider is file",
        );
}

#[test]
fn takes_the_files_of_provider_puppet() {
    let site = Site::new();
    site.write("certs/root.mcollective.pem", &OURS.certificate_pem());
    site.write("private_keys/root.mcollective.pem", &OURS.key_pem());
    site.write("certs/ca.pem", &AUTHORITY.certificate_pem());
    let ssldir = format!("plugin.choria.ssldir = {}\n", site.path(""));
    let as_root = site.with("USER", "root");
    // It is the default.
    let checked = as_root.good(&ssldir);
    assert_eq!(checked.certname, "root.mcollective");
    let Security::X509(files) = &checked.security else { panic!("{:?}", checked.security) };
    assert!(files.legacy_names);
    checked.security.read(now()).unwrap();

    for name in ["provisioner.example.net", "p.example.net"] {
        as_root.write(&format!("certs/{name}.pem"), &OURS.certificate_pem());
        as_root.write(&format!("private_keys/{name}.pem"), &OURS.key_pem());
    }
    let named = Site::of(&as_root).with("MCOLLECTIVE_CERTNAME", "provisioner.example.net");
    let checked = named.good(&format!("plugin.security.provider = puppet\n{ssldir}"));
    assert_eq!(checked.certname, "provisioner.example.net");
    // A service may have no user; its machine has a certificate of its own.
    let nobody = Site::of(&as_root);
    assert_eq!(nobody.good(&ssldir).certname, "p.example.net");

    let gone = Site::of(&as_root).with("USER", "gone");
    let (_, report) = gone.check(&ssldir);
    let dir = as_root.path("");
    assert_eq!(
        texts(&report.errors),
        [
            format!("c.cfg:1: plugin.choria.ssldir: {dir}certs/gone.mcollective.pem: {MISSING}"),
            format!(
                "c.cfg:1: plugin.choria.ssldir: {dir}private_keys/gone.mcollective.pem: {MISSING}"
            ),
        ]
    );
}

#[test]
fn puppets_usual_folder_is_found() {
    let site = Site::new();
    for dir in ["certs", "private_keys"] {
        let dir = format!(".puppetlabs/etc/puppet/ssl/{dir}");
        let pem = if dir.ends_with("certs") { OURS.certificate_pem() } else { OURS.key_pem() };
        site.write(&format!("{dir}/bob.mcollective.pem"), &pem);
    }
    let ca = ".puppetlabs/etc/puppet/ssl/certs/ca.pem";
    site.write(ca, &AUTHORITY.certificate_pem());
    let bob = Site::of(&site).with("USER", "bob").unprivileged();
    assert_eq!(bob.good("").certname, "bob.mcollective");

    let elsewhere = Site::new().with("USER", "bob").unprivileged();
    elsewhere.fails(
        "",
        "plugin.choria.ssldir: must be set for security provider puppet, since there is no ",
    );
}

#[test]
fn takes_token_and_seed_of_provider_choria() {
    let site = Site::new();
    site.write("ca.pem", &AUTHORITY.certificate_pem());
    let settings =
        site.choria() + &format!("plugin.security.choria.ca = {}\n", site.path("ca.pem"));
    let checked = site.good(&settings);
    assert_eq!(checked.caller.as_deref(), Some("provisioner_signer"));
    assert_eq!(checked.certname, "p.example.net");
    let keys = checked.security.read(now()).unwrap();
    assert!(!keys.tls.unwrap().has_identity());
    let Signer::Token(credentials) = keys.signer else { panic!("{:?}", keys.signer) };
    assert_eq!(credentials.token(), SIGNER);
    // Editors end a file with a line break.
    site.write("token", &format!("{SIGNER}\n"));
    site.write("seed", &format!("{}\n", testing::SIGNER_SEED));
    assert_eq!(site.with("USER", "bob").good(&settings).certname, "bob");
}

#[test]
fn a_client_certificate_counts_while_both_files_exist() {
    let site = Site::new();
    site.write("ca.pem", &AUTHORITY.certificate_pem());
    let path = |name| site.path(name);
    let settings = format!(
        "{}plugin.security.choria.ca = {}\nplugin.security.choria.certificate = {}\nplugin.security.choria.key = {}\n",
        site.choria(),
        path("ca.pem"),
        path("own.pem"),
        path("own-key.pem")
    );
    let checked = site.good(&settings);
    let has_identity = || checked.security.read(now()).unwrap().tls.unwrap().has_identity();
    assert!(!has_identity());
    // One of any kind: it signs nothing.
    let ours = Wanted::new("x").days(90).signed_by(&AUTHORITY);
    site.write("own.pem", &ours.certificate_pem());
    assert!(!has_identity());
    site.write("own-key.pem", &ours.key_pem());
    assert!(has_identity());
    site.good(&settings);
    site.write("own-key.pem", &OTHER.key_pem());
    assert_eq!(
        checked.security.read(now()).unwrap_err().to_string(),
        format!(
            "plugin.security.choria.key: {}: the private key does not belong to the certificate",
            path("own-key.pem")
        )
    );
}

#[test]
fn what_was_renewed_is_read_and_what_was_broken_is_named() {
    let site = Site::new();
    let security = site.good(&site.file()).security;
    let expect = |expected: &str| {
        let problem = security.read(now()).unwrap_err().to_string();
        assert!(problem.contains(expected), "{problem}");
    };
    let (certificate, key) = (site.path("own.pem"), site.path("key.pem"));
    site.write("own.pem", &OTHER.certificate_pem());
    expect(&format!(
        "plugin.security.file.key: {key}: the private key does not belong to the certificate"
    ));
    site.write("key.pem", &OTHER.key_pem());
    let Signer::X509(signer) = security.read(now()).unwrap().signer else { panic!() };
    assert_eq!(signer.certificate(), OTHER.certificate_pem());
    site.write("own.pem", "");
    expect(&format!(
        "plugin.security.file.certificate: {certificate}: could not read the certificate: it is empty"
    ));
    site.write("own.pem", &OTHER.certificate_pem());
    security.read(now()).unwrap();
}

#[test]
fn every_fault_of_a_file_is_named_with_its_setting() {
    let site = Site::new();
    let (certificate, key, ca) = (site.path("own.pem"), site.path("key.pem"), site.path("ca.pem"));
    let check = |file: &str, content: &str, expected: &str| {
        let before = fs::read_to_string(site.path(file)).unwrap();
        site.write(file, content);
        site.fails(&site.file(), expected);
        site.write(file, &before);
    };
    let own = format!(
        "c.cfg:2: plugin.security.file.certificate: {certificate}: could not read the certificate: "
    );
    check("own.pem", "", &format!("{own}it is empty"));
    check("own.pem", "hello", &own);
    check("own.pem", &OURS.key_pem(), &own);
    let own = format!("c.cfg:3: plugin.security.file.key: {key}: ");
    check("key.pem", "", &format!("{own}could not read the private key: it is empty"));
    check(
        "key.pem",
        &OURS.certificate_pem(),
        &format!("{own}could not read the private key: the PEM block is a \"CERTIFICATE\""),
    );
    check(
        "key.pem",
        &OTHER.key_pem(),
        &format!("{own}the private key does not belong to the certificate"),
    );
    check("key.pem", &BROKEN_EC.key_pem(), &format!("{own}the private key is not an RSA key"));
    let rsa = PKey::from_rsa(Rsa::generate(2048).unwrap()).unwrap();
    let encrypted = rsa.private_key_to_pem_pkcs8_passphrase(Cipher::aes_256_cbc(), b"x").unwrap();
    check(
        "key.pem",
        std::str::from_utf8(&encrypted).unwrap(),
        &format!("{own}the private key is encrypted"),
    );
    let own = format!("c.cfg:4: plugin.security.file.ca: {ca}: could not read the certificate: ");
    check("ca.pem", "", &format!("{own}it is empty"));
    check("ca.pem", "hello", &format!("{own}there is none in it"));

    let (_, report) = site.check(
        "plugin.security.provider = file\nplugin.security.file.certificate = /nowhere/a\n\
             plugin.security.file.key = /\nplugin.security.file.ca = /nowhere/c\n",
    );
    assert_eq!(
        texts(&report.errors),
        [
            format!("c.cfg:2: plugin.security.file.certificate: /nowhere/a: {MISSING}"),
            "c.cfg:3: plugin.security.file.key: /: Is a directory (os error 21)".to_owned(),
            format!("c.cfg:4: plugin.security.file.ca: /nowhere/c: {MISSING}"),
        ]
    );
    assert!(!report.denied);
    let (_, report) = site.check("plugin.security.provider = file\n");
    assert_eq!(report.errors.len(), 3, "{report:?}");
    assert!(
        report.errors[0]
            .to_string()
            .starts_with("c.cfg: plugin.security.file.certificate: must be set")
    );
}

#[test]
fn every_fault_of_a_token_is_named_with_its_setting() {
    let site = Site::new();
    let (token, seed) = (site.path("token"), site.path("seed"));
    let check = |file: &str, content: &str, expected: &str| {
        let before = fs::read_to_string(site.path(file)).unwrap();
        site.write(file, content);
        site.fails(&site.choria(), expected);
        site.write(file, &before);
    };
    let own = format!("c.cfg:2: plugin.security.choria.token_file: {token}: ");
    check("token", "", &format!("{own}the token file is empty"));
    check("token", "x", &format!("{own}could not parse client id token: "));
    check("token", testing::SERVER, &format!("{own}not a client token"));
    let expired =
        testing::edited(SIGNER, &testing::issuer(), |claims| claims["exp"] = 1_750_000_001.into());
    check("token", &expired, &format!("{own}the token expired on 2025-06-15"));
    let powerless = testing::edited(SIGNER, &testing::issuer(), |claims| {
        claims["permissions"]["provisioner"] = false.into();
    });
    check(
        "token",
        &powerless,
        "c.cfg:2: plugin.security.choria.token_file: the token of provisioner_signer lacks the provisioner permission",
    );
    let own = format!("c.cfg:3: plugin.security.choria.seed_file: {seed}: ");
    check("seed", "", &format!("{own}could not read the token's seed: "));
    check("seed", &"0".repeat(64), &format!("{own}the seed does not belong to the token"));
    site.fails(
        "plugin.security.provider = choria\nplugin.security.choria.seed_file = x\n",
        "c.cfg: plugin.security.choria.token_file: must be set",
    );
    site.fails(
        "plugin.security.provider = choria\nplugin.security.choria.token_file = x\n",
        "c.cfg: plugin.security.choria.seed_file: must be set",
    );
}

#[test]
fn with_a_certificate_too_a_token_may_be_without_the_right() {
    let site = Site::new();
    let powerless = testing::edited(SIGNER, &testing::issuer(), |claims| {
        claims["permissions"]["provisioner"] = false.into();
    });
    site.write("token", &powerless);
    let settings = format!(
        "{}plugin.security.choria.certificate = {}\nplugin.security.choria.key = {}\n",
        site.choria(),
        site.path("own.pem"),
        site.path("key.pem")
    );
    site.warns(&settings, "lacks the provisioner permission");
}

#[test]
fn a_token_that_may_take_part_in_no_election_is_worth_a_warning_if_there_is_one() {
    let mut site = Site::new();
    site.is_elected = true;
    site.warns_of_no_ca_only(&site.choria());
    let voteless = testing::edited(SIGNER, &testing::issuer(), |claims| {
        claims["permissions"]["election_user"] = false.into();
    });
    site.write("token", &voteless);
    site.warns(&site.choria(), "provisioner_signer lacks the election_user permission");
    site.is_elected = false;
    site.warns_of_no_ca_only(&site.choria());
}

#[test]
fn a_token_of_another_organization_is_worth_a_warning() {
    let site = Site::new();
    let named = |key: &str| {
        format!(
            "{}plugin.security.issuer.names = a, choria\nplugin.security.issuer.a.public = {ISSUER_PUBLIC}\nplugin.security.issuer.choria.public = {key}\n",
            site.choria()
        )
    };
    let (checked, report) = site.check(&named(ISSUER_PUBLIC));
    assert!(checked.is_some() && report.warnings.len() == 1, "{report:?}");
    site.warns(
        &named(testing::SIGNER_PUBLIC),
        "brokers will refuse it if the key of plugin.security.issuer.choria.public is theirs",
    );
    site.fails(&named("x"), "plugin.security.issuer.choria.public: ");
    let settings = format!("{}plugin.security.issuer.names = b\n", site.choria());
    site.fails(&settings, "names b, but plugin.security.issuer.b.public is not set");
    let settings =
        format!("{}plugin.security.choria.trusted_signers = {ISSUER_PUBLIC},abc\n", site.choria());
    site.fails(&settings, "plugin.security.choria.trusted_signers: ");
}

#[test]
fn providers_and_helpers_we_do_not_have_are_refused_with_a_way_out() {
    let site = Site::new();
    let check = |text: &str, expected: &str| site.fails(text, expected);
    check(
        "plugin.security.provider = pkcs11",
        "c.cfg:1: plugin.security.provider: pkcs11 is not supported; use a certificate of its own",
    );
    check(
        "plugin.security.provider = certmanager",
        "c.cfg:1: plugin.security.provider: certmanager is not supported; have cert-manager write a secret",
    );
    check(
        "plugin.security.provider = x",
        "c.cfg:1: plugin.security.provider: unknown security provider \"x\"; file, puppet and choria are known",
    );
    for (key, value) in [(SIGNER_URL, "https://signer"), (SIGNER_SERVICE, "true")] {
        let settings = site.file() + &format!("{key} = {value}\n");
        check(
            &settings,
            &format!("c.cfg:5: {key}: nobody else signs the requests of a provisioner"),
        );
    }
    check(
        &(site.file() + "plugin.security.client_anon_tls = yes\n"),
        "plugin.security.client_anon_tls: we never connect without knowing the broker",
    );
    site.good(&(site.file() + "plugin.security.client_anon_tls = no\nplugin.choria.security.request_signer.service = 0\n"));
    for key in [SERVER_TOKEN, SERVER_SEED, SIGNER_TOKEN, SIGNER_SEED] {
        let settings = site.choria() + &format!("{key} = 1\n");
        check(
            &settings,
            &format!("c.cfg:4: {key}: can not be set when the choria security provider is used"),
        );
    }
}

#[test]
fn suites_and_curves_are_taken_as_choria_names_them() {
    let site = Site::new();
    site.good(&format!("{}plugin.security.cipher_suites = TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384, TLS_AES_128_GCM_SHA256\nplugin.security.ecc_curves = CurveP256\n", site.file()));
    site.warns(
        &format!("{}plugin.security.cipher_suites = RC4\n", site.file()),
        "c.cfg:5: plugin.security.cipher_suites: \"RC4\" is not known",
    );
    site.warns(
        &format!("{}plugin.security.ecc_curves = P-256,X25519\n", site.file()),
        "c.cfg:5: plugin.security.ecc_curves: \"P-256\" is not known",
    );
    let (_, report) = site.check(&format!("{}plugin.security.ecc_curves = P-256\n", site.file()));
    assert!(report.errors[0].text.contains("names none of X25519"), "{report:?}");
}

#[test]
fn what_an_operator_should_know_is_a_warning() {
    let site = Site::new();
    site.mode("key.pem", 0o644);
    site.warns(
        &site.file(),
        &format!(
            "c.cfg:3: plugin.security.file.key: everybody on this machine can read {}",
            site.path("key.pem")
        ),
    );
    site.mode("key.pem", 0o640);
    site.good(&site.file());
    site.mode("seed", 0o604);
    let (_, report) = site.check(&site.choria());
    let warnings = texts(&report.warnings);
    assert!(
        warnings.iter().any(
            |text| text.contains("plugin.security.choria.seed_file: everybody on this machine")
        ),
        "{warnings:?}"
    );
    assert!(warnings.iter().any(|text| text.contains(NO_CA)), "{warnings:?}");
    site.mode("seed", 0o600);

    let soon = testing::edited(SIGNER, &testing::issuer(), |claims| {
        claims["exp"] = (now() + 86_400).into()
    });
    site.write("token", &soon);
    site.warns(&site.choria(), &format!("{} expires on 20", site.path("token")));

    for (valid, expected) in [((-7_200, -3_600), "expired on"), ((-3_600, 86_400), "expires on")] {
        let ours = Wanted::new("x").rsa().valid(valid.0, valid.1).signed_by(&AUTHORITY);
        site.write("own.pem", &ours.certificate_pem());
        site.write("key.pem", &ours.key_pem());
        site.warns(
            &site.file(),
            &format!(
                "c.cfg:2: plugin.security.file.certificate: {} {expected} ",
                site.path("own.pem")
            ),
        );
    }

    let anybody = Site::of(&site).without_user();
    site.write("own.pem", &OURS.certificate_pem());
    site.write("key.pem", &OURS.key_pem());
    anybody.warns(&site.file(), NO_PASSWORD);
}

#[test]
fn shows_no_secret() {
    let site = Site::new();
    for settings in [site.file(), site.choria()] {
        let (checked, report) = site.check(&settings);
        let security = checked.unwrap().security;
        let keys = security.read(now()).unwrap();
        let shown = format!("{security:?}{keys:?}{report:?}");
        assert!(!shown.contains(testing::SIGNER_SEED) && !shown.contains(SIGNER), "{shown}");
        assert!(!shown.contains("PRIVATE KEY"), "{shown}");
    }
}

static BROKEN_EC: LazyLock<Certified> =
    LazyLock::new(|| Wanted::new("ec").days(90).signed_by(&AUTHORITY));

fn now() -> i64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    now.as_secs() as i64
}

fn texts(findings: &[crate::config::report::Finding]) -> Vec<String> {
    findings.iter().map(ToString::to_string).collect()
}

/// A provisioner's files, and who it is.
struct Site {
    dir: PathBuf,
    is_guest: bool,
    is_off: bool,
    is_elected: bool,
    user: Option<&'static str>,
    surroundings: Surroundings,
}

impl Site {
    /// Run by root, with good files for every provider.
    fn new() -> Site {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let dir = std::env::temp_dir()
            .join(format!("provisioner-security-{}-{count}", std::process::id()));
        let mut surroundings = Surroundings { is_root: true, ..Surroundings::default() };
        surroundings.variables.insert("HOME".to_owned(), dir.display().to_string());
        let site = Site {
            dir,
            is_guest: false,
            is_off: false,
            is_elected: false,
            user: Some("provisioner"),
            surroundings,
        };
        site.write("own.pem", &OURS.certificate_pem());
        site.write("key.pem", &OURS.key_pem());
        site.write("ca.pem", &AUTHORITY.certificate_pem());
        site.write("token", SIGNER);
        site.write("seed", testing::SIGNER_SEED);
        site
    }

    /// The same files, seen by somebody else.
    fn of(other: &Site) -> Site {
        let mut surroundings = other.surroundings.clone();
        surroundings.variables.remove("USER");
        Site {
            dir: other.dir.clone(),
            is_guest: true,
            is_off: false,
            is_elected: false,
            user: other.user,
            surroundings,
        }
    }

    fn with(mut self, variable: &str, value: &str) -> Site {
        self.surroundings.variables.insert(variable.to_owned(), value.to_owned());
        self
    }

    fn unprivileged(mut self) -> Site {
        self.surroundings.is_root = false;
        self
    }

    fn insecure(mut self) -> Site {
        self.is_off = true;
        self
    }

    fn without_user(mut self) -> Site {
        self.user = None;
        self
    }

    fn path(&self, name: &str) -> String {
        self.dir.join(name).display().to_string()
    }

    fn write(&self, name: &str, content: &str) {
        let path = self.dir.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, content).unwrap();
        fs::set_permissions(path, Permissions::from_mode(0o600)).unwrap();
    }

    fn mode(&self, name: &str, mode: u32) {
        fs::set_permissions(self.dir.join(name), Permissions::from_mode(mode)).unwrap();
    }

    fn file(&self) -> String {
        format!(
            "plugin.security.provider = file\nplugin.security.file.certificate = {}\nplugin.security.file.key = {}\nplugin.security.file.ca = {}\n",
            self.path("own.pem"),
            self.path("key.pem"),
            self.path("ca.pem")
        )
    }

    fn choria(&self) -> String {
        format!(
            "plugin.security.provider = choria\nplugin.security.choria.token_file = {}\nplugin.security.choria.seed_file = {}\n",
            self.path("token"),
            self.path("seed")
        )
    }

    fn check(&self, settings: &str) -> (Option<Checked>, Report) {
        let (mut written, mut report) = (Written::default(), Report::new("c.cfg"));
        for (line, text) in settings.lines().enumerate() {
            let (key, value) = setting(text).unwrap();
            assert!(Written::is_about(key), "{key}");
            written.take(line + 1, key, value);
        }
        let identity = Identity::parse("p.example.net").unwrap();
        let checked = written.check(
            &Given {
                is_off: self.is_off,
                is_elected: self.is_elected,
                identity: &identity,
                user: self.user,
                surroundings: &self.surroundings,
                now: now(),
            },
            &mut report,
        );
        (checked, report)
    }

    #[track_caller]
    fn good(&self, settings: &str) -> Checked {
        let (checked, report) = self.check(settings);
        assert!(report.errors.is_empty() && report.warnings.is_empty(), "{report:?}");
        checked.unwrap()
    }

    #[track_caller]
    fn warns_of_no_ca_only(&self, settings: &str) {
        let (_, report) = self.check(settings);
        let warnings = texts(&report.warnings);
        assert!(warnings.len() == 1 && warnings[0].contains(NO_CA), "{warnings:?}");
    }

    #[track_caller]
    fn warns(&self, settings: &str, expected: &str) {
        let (checked, report) = self.check(settings);
        assert!(report.errors.is_empty() && checked.is_some(), "{report:?}");
        let warnings = texts(&report.warnings);
        let others: Vec<_> = warnings.iter().filter(|text| !text.contains(NO_CA)).collect();
        assert!(others.len() == 1 && others[0].contains(expected), "{warnings:?}");
    }

    #[track_caller]
    fn fails(&self, settings: &str, expected: &str) {
        let (_, report) = self.check(settings);
        let errors = texts(&report.errors);
        assert!(errors.len() == 1 && errors[0].contains(expected), "{errors:?}");
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        if !self.is_guest {
            // What is left is in the folder for temporary files.
            let _ = fs::remove_dir_all(&self.dir);
        }
    }
}
