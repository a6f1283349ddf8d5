//! The status page in a real browser: its policy lets its own style and script work, and nothing else.
//!
//! `CHROMIUM` names another program than `chromium`.

mod common;
mod fleet;

use std::env;
use std::process::Command;

use common::{Daemon, NatsServer, SOON, TempDir, wait_until, within};
use fleet::{Fault, Fleet};

/// The page as the browser has it after `seconds` of its own time, in which it waits for the network. Fails if its policy
/// has forbidden anything.
#[track_caller]
fn dom(profile: &TempDir, url: &str, seconds: u32) -> String {
    let output = Command::new(program())
        .args(["--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run"])
        .arg("--enable-logging=stderr")
        .arg(format!("--user-data-dir={}", profile.path().display()))
        .arg(format!("--virtual-time-budget={}", seconds * 1_000))
        .args(["--dump-dom", url])
        .output()
        .expect("chromium of the package chromium");
    let log = String::from_utf8_lossy(&output.stderr);
    assert!(!log.contains("Content Security Policy"), "{log}");
    String::from_utf8_lossy(&output.stdout).into_owned()
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
