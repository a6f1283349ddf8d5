//! The status page in a real browser: its policy lets its own style and script work, and nothing else.
//!
//! `CHROMIUM` names another program than `chromium`. `PICTURES` names a folder for pictures of the page; `PICTURES=dist cargo
//! test --test browser` draws those in README again.

mod common;
mod fleet;

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use common::{Daemon, NatsServer, SOON, TempDir, wait_until, within};
use fleet::{Fault, Fleet, Token};

/// The page as the browser has it after `seconds` of its own time, in which it waits for the network. Fails if its policy
/// has forbidden anything.
#[track_caller]
fn dom(profile: &TempDir, url: &str, seconds: u32) -> String {
    let budget = format!("--virtual-time-budget={}", seconds * 1_000);
    let output = browse(profile, &[&budget, "--dump-dom", url]);
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Draws the page, as wide and high as said, into a file of the folder; its name is `name`.
#[track_caller]
fn draw(profile: &TempDir, url: &str, folder: &Path, name: &str, scheme: Scheme, size: (u32, u32)) {
    let file = folder.join(name);
    let (width, height) = size;
    let output = browse(
        profile,
        &[
            &format!("--screenshot={}", file.display()),
            &format!("--window-size={width},{height}"),
            &format!("--blink-settings=preferredColorScheme={}", scheme as u8),
            "--hide-scrollbars",
            "--virtual-time-budget=1000",
            url,
        ],
    );
    let picture = fs::read(&file).unwrap_or_else(|error| panic!("{error}: {output:?}"));
    // The width is the first thing a PNG says.
    assert_eq!(picture[16..20], width.to_be_bytes(), "{}", file.display());
}

/// What a browser calls the schemes of colours.
#[derive(Clone, Copy)]
enum Scheme {
    Dark = 0,
    Light = 1,
}

#[track_caller]
fn browse(profile: &TempDir, arguments: &[&str]) -> Output {
    let output = Command::new(program())
        .args(["--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run"])
        .arg("--enable-logging=stderr")
        .arg(format!("--user-data-dir={}", profile.path().display()))
        .args(arguments)
        .output()
        .expect("chromium of the package chromium");
    let log = String::from_utf8_lossy(&output.stderr);
    assert!(!log.contains("Content Security Policy"), "{log}");
    output
}

fn program() -> String {
    env::var("CHROMIUM").unwrap_or_else(|_| "chromium".to_owned())
}

#[test]
fn a_browser_shows_the_page_and_keeps_it_fresh() {
    let profile = TempDir::new("browser");
    let broker = NatsServer::start();
    let name = "<script/src='http:evil'";
    let fleet =
        Fleet::builder(&broker.url()).nodes(2).broken(name, Fault::ConfigureRefused).start();
    let builder = Daemon::builder(&broker.address());
    let url = format!("http://127.0.0.1:{}/", builder.monitor_port());
    let daemon = builder.start();
    fleet.wait_all_provisioned(within(SOON)).expect("provisioned");
    wait_until(SOON, "it is stuck", || {
        daemon.get("/status.json").is_ok_and(|(_, text)| text.contains("\"matching\":1"))
    });
    let text = dom(&profile, &url, 1);
    assert!(text.contains("<h1>provisioning</h1>"), "{text}");
    // The name is a text of the document, and was none of its own tags.
    assert!(text.contains("&lt;script/src='http:evil'"), "{text}");
    assert_eq!(text.matches("<script").count(), 1, "{text}");
    assert!(text.contains("Refreshes every 5 s."), "its script has run: {text}");
    let as_of = |text: &str| {
        let (_, rest) = text.split_once("As of ").expect("it says of when it is");
        rest.split_once('<').expect("it ends").0.to_owned()
    };
    // A second look after two rounds: the script has put in what the daemon said meanwhile.
    let loaded = dom(&profile, &url, 1);
    let later = dom(&profile, &url, 12);
    assert!(as_of(&later) > as_of(&loaded), "{later}");
    assert!(later.contains("id=\"stale\" class=\"bad\" role=\"alert\" hidden"), "{later}");
}

#[test]
fn a_browser_says_so_when_what_it_shows_is_old() {
    let profile = TempDir::new("browser");
    let broker = NatsServer::start();
    let daemon = Daemon::builder(&broker.address()).start();
    let (_, page) = daemon.get("/").expect("the port answers");
    drop(daemon);
    // The page from a file: nobody answers its script.
    let path = profile.write("page.html", &page);
    let text = dom(&profile, &format!("file://{}", path.display()), 12);
    assert!(text.contains("No answer from the provisioner since"), "{text}");
}

/// A helper that takes its time, so that there is somebody to see at work.
const SLOW_HELPER: &str = r#"#!/bin/sh
sleep 0.3
echo '{"configuration":{"plugin.choria.server.provision":"0"}}'
"#;

#[test]
fn the_page_of_a_busy_daemon_is_drawn_in_light_and_dark_and_on_a_phone() {
    let profile = TempDir::new("browser");
    let broker = NatsServer::start();
    let stuck = [
        ("db-3.lon.example.net", Fault::ConfigureRefused),
        ("db-7.lon.example.net", Fault::Silent),
        ("cache-2.lon.example.net", Fault::WrongToken),
        ("mail-1.lon.example.net", Fault::Token(Token::Expired)),
        ("build-12.lon.example.net", Fault::Locked),
        ("lab-4.lon.example.net", Fault::Token(Token::Foreign)),
    ];
    let mut fleet = Fleet::builder(&broker.url());
    for (name, fault) in &stuck {
        fleet = fleet.broken(name, fault.clone());
    }
    let builder = Daemon::builder(&broker.address()).helper(SLOW_HELPER).set("workers", 4);
    let url = format!("http://127.0.0.1:{}/", builder.monitor_port());
    // Until the next discovery those that are stuck stay so.
    let daemon = builder.set("site", "lon").set("interval", "30s").start();
    daemon.wait_ready();
    let _broken = fleet.start();
    wait_until(SOON, "some are stuck", || daemon.metric("waiting_retry_nodes") >= 6.0);
    let mut fleet = Fleet::builder(&broker.url());
    for number in 1..=500 {
        fleet = fleet.node(&format!("web-{number}.lon.example.net"));
    }
    let fleet = fleet.start();
    fleet.wait_provisioned(50, within(SOON)).expect("it goes on");

    let wanted = env::var_os("PICTURES").map(PathBuf::from);
    let folder = wanted.as_deref().unwrap_or(profile.path());
    draw(&profile, &url, folder, "page.png", Scheme::Light, (1_000, 860));
    draw(&profile, &url, folder, "page-dark.png", Scheme::Dark, (1_000, 860));
    draw(&profile, &url, profile.path(), "phone.png", Scheme::Light, (500, 2_400));
}
