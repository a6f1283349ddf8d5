//! The example files load as they are, show every setting, and tell the truth about defaults.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process;
use std::sync::atomic::{AtomicUsize, Ordering};

use choria_provisioner::config::choria::keys::{Fate, KEYS};
use choria_provisioner::config::file::{Features, File};
use choria_provisioner::config::report::Report;
use choria_provisioner::config::surroundings::Surroundings;
use choria_provisioner::config::{self, Config, Settings};

#[test]
fn the_examples_load_without_a_word() {
    let settings =
        load(&yaml_with_a_helper(&example("choria-provisioner.yaml")), &example("choria.cfg"));
    assert!(settings.warnings.is_empty(), "{:?}", settings.warnings);
    assert_eq!(settings.config.monitor_port, 9999);
    assert_eq!(settings.choria.brokers.to_string(), "nats://localhost:4222");
}

#[test]
fn the_examples_show_every_setting() {
    let yaml = uncommented(&example("choria-provisioner.yaml"));
    let shown = |key: &str| {
        yaml.lines().filter(|line| line.trim_start().starts_with(&format!("{key}:"))).count()
    };
    for key in File::KEYS.iter().chain(Features::KEYS) {
        assert_eq!(shown(key), 1, "{key}");
    }
    let client = uncommented(&example("choria.cfg"));
    for (key, _) in KEYS.iter().filter(|(_, fate)| *fate == Fate::Honoured) {
        let count = client.lines().filter(|line| line.starts_with(&format!("{key} ="))).count();
        assert_eq!(count, 1, "{key}");
    }
}

#[test]
fn the_defaults_shown_are_those_in_force() {
    let yaml = uncommented(&yaml_with_a_helper(&example("choria-provisioner.yaml")));
    // What has no default shows an example, which would make a difference.
    let yaml: String = yaml
        .lines()
        .filter(|line| {
            let of_its_own = [
                "jwt_verify_cert:",
                "upgrades_repository:",
                "broker_provisioning_password:",
                "monitor_port:",
                // Its default depends on the machine.
                "admin_socket:",
            ];
            !of_its_own.iter().any(|key| line.starts_with(key))
        })
        .map(|line| format!("{line}\n"))
        .collect();
    let (shown, warnings) = parse(&yaml);
    let (in_force, _) = parse("helper: /bin/true\ntoken: ''\nchoria_insecure: true\n");
    assert_eq!(format!("{shown:#?}"), format!("{in_force:#?}"));
    // Without their features, and the two keys that nobody has ever used.
    let is_idle = |warning: &String| warning.contains(": has no effect");
    assert!(warnings.iter().all(is_idle) && warnings.len() > 2, "{warnings:?}");
}

#[test]
fn the_client_example_shows_the_defaults_in_force() {
    let yaml = yaml_with_a_helper(&example("choria-provisioner.yaml"));
    let client = uncommented(&example("choria.cfg"));
    let client: Vec<_> = client
        .lines()
        .filter(|line| {
            let without_default =
                ["identity", "plugin.nats.", "plugin.choria.srv_domain", "plugin.choria.ssldir"];
            !without_default.iter().any(|key| line.starts_with(key)) && !line.contains("token_file")
        })
        .collect();
    let mut shown = load(&yaml, &client.join("\n"));
    let mut in_force = load(&yaml, "plugin.choria.middleware_hosts = localhost:4222\n");
    // That it is written there is the difference.
    shown.choria.written.clear();
    in_force.choria.written.clear();
    assert_eq!(format!("{:#?}", shown.choria), format!("{:#?}", in_force.choria));
    // Without security none of its settings counts.
    let warnings: Vec<_> = shown.warnings.iter().map(|warning| &warning.text).collect();
    assert!(warnings.len() == 1 && warnings[0].contains(": no effect, since"), "{warnings:?}");
}

#[test]
fn errors_of_both_files_are_listed_together() {
    let dir = scratch("both");
    let (yaml, client) = (dir.join("p.yaml"), dir.join("c.cfg"));
    fs::write(&yaml, "workers: many\n").unwrap();
    fs::write(&client, "ttl = 5\nplugin.choria.middleware_hosts = a\n").unwrap();
    let report = config::load(&yaml, &client, &Surroundings::of_process()).unwrap_err();
    let errors: Vec<_> = report.errors.iter().map(ToString::to_string).collect();
    for part in [
        "p.yaml:1: workers",
        "p.yaml: helper",
        "c.cfg:1: ttl",
        "c.cfg:2: plugin.choria.middleware_hosts",
    ] {
        assert!(errors.iter().any(|error| error.contains(part)), "{part}: {errors:#?}");
    }
    let report = config::load(&dir.join("no"), &dir, &Surroundings::of_process()).unwrap_err();
    assert_eq!(report.errors.len(), 2, "{:?}", report.errors);
    assert!(!report.denied);

    // An error elsewhere does not make a network insecure.
    fs::write(&yaml, "workers: many\nhelper: /bin/true\n").unwrap();
    fs::write(&client, "plugin.choria.middleware_hosts = a:1\nplugin.security.provider = x\n")
        .unwrap();
    let check = |expected: [&str; 2]| {
        let report = config::load(&yaml, &client, &Surroundings::of_process()).unwrap_err();
        let errors: Vec<_> = report.errors.iter().map(ToString::to_string).collect();
        assert_eq!(errors.len(), 2, "{errors:#?}");
        for (error, part) in errors.iter().zip(expected) {
            assert!(error.contains(part), "{error}");
        }
        let warnings = format!("{:?}", report.warnings);
        assert!(!warnings.contains("choria_insecure"), "{warnings}");
    };
    check(["p.yaml:1: workers", "c.cfg:2: plugin.security.provider: unknown"]);
    // Where it can't be read, the network may be of either kind; one that was misspelt is the only error.
    let one = |yaml_text: &str, client_text: &str, expected: &str| {
        fs::write(&yaml, format!("helper: /bin/true\ntoken: x\n{yaml_text}\n")).unwrap();
        fs::write(&client, client_text).unwrap();
        let report = config::load(&yaml, &client, &Surroundings::default()).unwrap_err();
        let errors: Vec<_> = report.errors.iter().map(ToString::to_string).collect();
        assert!(errors.len() == 1 && report.warnings.is_empty(), "{report:?}");
        assert!(errors[0].contains(expected), "{errors:?}");
    };
    let named = "identity = p\nplugin.choria.middleware_hosts = a:1\n";
    one("choria_insecure: ture", named, "p.yaml:3: choria_insecure: found the text \"ture\"");
    one(
        "choria_insecur: true",
        named,
        "p.yaml:3: choria_insecur: unknown key; did you mean `choria_insecure`? Without that ",
    );
    one(
        "choria_insecure: true\nbroker_provisioning_password: [x]",
        named,
        "p.yaml:4: broker_provisioning_password: found a list",
    );
    fs::write(&client, "ttl = 5\nplugin.security.provider = file\n").unwrap();
    // Nobody knows what it says of security.
    fs::write(&yaml, "- \n").unwrap();
    check(["p.yaml:1: ", "c.cfg:1: ttl"]);
    fs::remove_dir_all(dir).unwrap();
}

#[test]
fn what_editors_and_other_formats_put_into_a_client_file_is_named() {
    let dir = scratch("client");
    let (yaml, client) = (dir.join("p.yaml"), dir.join("c.cfg"));
    fs::write(&yaml, "helper: /bin/true\ntoken: x\nchoria_insecure: true\n").unwrap();
    let around = |name: &str, value: &str| Surroundings {
        host_name: "p.example.net".into(),
        variables: [(name.to_owned(), value.to_owned())].into(),
        ..Surroundings::default()
    };
    let check = |text: &[u8], around: Surroundings, errors: &[&str], warnings: &[&str]| {
        fs::write(&client, text).unwrap();
        let inspected = config::inspect(&yaml, &client, &around);
        for (found, expected) in
            [(&inspected.report.errors, errors), (&inspected.report.warnings, warnings)]
        {
            let found: Vec<_> = found.iter().map(ToString::to_string).collect();
            assert_eq!(found.len(), expected.len(), "{found:#?}");
            for (found, expected) in found.iter().zip(expected) {
                assert!(found.contains(expected), "{found}");
            }
        }
        inspected.choria.and_then(|choria| choria.identity).map(|identity| identity.to_string())
    };
    const HOSTS: &str = "plugin.choria.middleware_hosts";
    let bare = || around("", "");
    let marked = format!("\u{feff}identity = a.b.c\n{HOSTS} = b:1\n");
    assert_eq!(check(marked.as_bytes(), bare(), &[], &[]).as_deref(), Some("a.b.c"));
    let wide: Vec<u8> = marked.encode_utf16().flat_map(u16::to_le_bytes).collect();
    check(&wide, bare(), &["c.cfg: is UTF-16"], &[]);
    check(
        format!("{HOSTS} = \"b:1\"\nidentity = 'p'\nttl =\n").as_bytes(),
        bare(),
        &["c.cfg:1: plugin.choria.middleware_hosts: its quotes are a part of the value"],
        &[
            "c.cfg:2: identity: its quotes are a part",
            "c.cfg:3: ttl: ignored, since it has no value",
        ],
    );
    check(
        format!("{HOSTS} = b:1\n").as_bytes(),
        around("MCOLLECTIVE_NATS_USERNAME", "u"),
        &[],
        &["c.cfg: MCOLLECTIVE_NATS_USERNAME: no effect, since plugin.nats.user is not in the file"],
    );
    // Each file has lines of its own.
    fs::create_dir(dir.join("plugin.d")).unwrap();
    let plugins = "# ours\nmiddleware_hosts = b\nsrv_domain = a..b\n";
    fs::write(dir.join("plugin.d/choria.cfg"), plugins).unwrap();
    check(
        b"ttl = 5\n",
        bare(),
        &[
            "plugin.d/choria.cfg:3: plugin.choria.srv_domain",
            "plugin.d/choria.cfg:2: plugin.choria.m",
            "c.cfg:1: ttl",
        ],
        &["plugin.d/choria.cfg:3: plugin.choria.srv_domain: no effect"],
    );
    // A folder that is missing is one fault, not one for each file in it.
    fs::write(&yaml, "helper: /bin/true\ntoken: x\nbroker_provisioning_password: x\n").unwrap();
    fs::remove_dir_all(dir.join("plugin.d")).unwrap();
    let ssldir = format!("{HOSTS} = b:1\nplugin.choria.ssldir = /nowhere\n");
    check(
        ssldir.as_bytes(),
        bare(),
        &["c.cfg:2: plugin.choria.ssldir: /nowhere: No such file"],
        &[],
    );
    fs::remove_dir_all(dir).unwrap();
}

fn example(name: &str) -> String {
    fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("dist").join(name)).unwrap()
}

/// With every setting in force: those after a `#` without a blank, and the members of their lists.
fn uncommented(text: &str) -> String {
    text.lines()
        .map(|line| {
            let indent = line.len() - line.trim_start().len();
            let setting = line[indent..].strip_prefix('#').filter(|rest| {
                rest.starts_with(|c: char| c.is_ascii_lowercase()) || rest.starts_with("  - ")
            });
            match setting {
                Some(setting) => format!("{}{setting}\n", &line[..indent]),
                None => format!("{line}\n"),
            }
        })
        .collect()
}

fn yaml_with_a_helper(yaml: &str) -> String {
    let helper = "helper: /etc/choria-provisioner/helper\n";
    assert!(yaml.contains(helper));
    yaml.replace(helper, "helper: /bin/true\n")
}

fn parse(yaml: &str) -> (Config, Vec<String>) {
    let mut report = Report::new("example");
    let config = Config::parse(yaml.as_bytes(), &mut report);
    assert!(report.errors.is_empty(), "{:#?}", report.errors);
    (config.unwrap(), report.warnings.iter().map(ToString::to_string).collect())
}

#[track_caller]
fn load(yaml: &str, client: &str) -> Settings {
    let dir = scratch("load");
    let (yaml_path, client_path) = (dir.join("p.yaml"), dir.join("c.cfg"));
    fs::write(&yaml_path, yaml).unwrap();
    fs::write(&client_path, client).unwrap();
    let around = Surroundings { host_name: "p.example.net".into(), ..Surroundings::default() };
    let settings = config::load(&yaml_path, &client_path, &around);
    fs::remove_dir_all(dir).unwrap();
    settings.unwrap_or_else(|report| panic!("{:#?}", report.errors))
}

fn scratch(name: &str) -> PathBuf {
    // Tests run side by side.
    static COUNT: AtomicUsize = AtomicUsize::new(0);
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    let dir = std::env::temp_dir().join(format!("provisioner-{}-{name}-{count}", process::id()));
    fs::create_dir_all(&dir).unwrap();
    dir
}
