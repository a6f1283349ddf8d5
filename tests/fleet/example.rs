//! A practice fleet to rehearse a provisioner and its helper against.
//!
//! ```text
//! cargo run --example fleet -- --nats nats://127.0.0.1:4222 --nodes 50 --faults gone=3,silent=2 --jwt-key-out verify.pem --until-done
//! ```

#[path = "mod.rs"]
mod fleet;

use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use argh::FromArgs;
use fleet::fault::parse_list;
use fleet::issuer::Organization;
use fleet::{Builder, Encoding, Expected, Fleet};
use openssl::pkey::PKey;
use openssl::rsa::Rsa;
use openssl::x509::X509;

/// Thousands of simulated Choria Servers that wait to be provisioned. Every second a line says how many are; the end is
/// SIGTERM, SIGINT, --until-done or --timeout.
#[derive(FromArgs)]
struct Arguments {
    /// the broker, such as nats://127.0.0.1:4222
    #[argh(option)]
    nats: String,

    /// how many nodes, 50 by default
    #[argh(option, default = "50")]
    nodes: usize,

    /// what is wrong with how many of them, such as gone=3,silent=2,status:jwt:5=1
    #[argh(option, default = "String::new()")]
    faults: String,

    /// connect in TLS, each with its provisioning JWT as the token, as real nodes do
    #[argh(switch)]
    tls: bool,

    /// speak protocol version 2; needs the organization issuer's seed as --jwt-signing-key
    #[argh(switch)]
    v2: bool,

    /// what signs the provisioning JWTs: an RSA key in PEM or the seed of an organization issuer; an RSA key of its own by default
    #[argh(option)]
    jwt_signing_key: Option<PathBuf>,

    /// the authority, in PEM, that must have issued the provisioner's certificate and those that nodes are given
    #[argh(option)]
    ca: Option<PathBuf>,

    /// user for the broker, for one without Choria's own checks
    #[argh(option)]
    user: Option<String>,

    /// its password
    #[argh(option, default = "String::new()")]
    password: String,

    /// where to write the public key of the provisioning JWTs, before any node is there
    #[argh(option)]
    jwt_key_out: Option<String>,

    /// the provisioning token, s3cret by default
    #[argh(option, default = "String::from(\"s3cret\")")]
    token: String,

    /// how events are written: cloud (default) or legacy
    #[argh(option, default = "String::from(\"cloud\")")]
    events: String,

    /// facts of every node, as JSON
    #[argh(option, default = "String::from(\"{}\")")]
    facts: String,

    /// version the nodes report, 0.30.2 by default
    #[argh(option, default = "String::from(\"0.30.2\")")]
    version: String,

    /// connections the nodes share, by default one for each thousand, at most four
    #[argh(option, default = "0")]
    connections: usize,

    /// how long each answer takes, in milliseconds, 0 by default
    #[argh(option, default = "0")]
    delay_ms: u64,

    /// make all CSRs before the first node shows up
    #[argh(switch)]
    pki: bool,

    /// let the nodes be upgraded
    #[argh(switch)]
    upgradable: bool,

    /// publish no startup events, so that only discovery finds the nodes
    #[argh(switch)]
    quiet_start: bool,

    /// where to write the report, as JSON; - for stdout
    #[argh(option)]
    report: Option<String>,

    /// end when every node that can be provisioned is
    #[argh(switch)]
    until_done: bool,

    /// end after so many seconds
    #[argh(option)]
    timeout: Option<u64>,
}

fn main() -> ExitCode {
    match run(&argh::from_env()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(problem) => {
            let _ = writeln!(io::stderr(), "fleet: {problem}");
            ExitCode::from(2)
        }
    }
}

/// Runs the fleet to its end; `false` when a node that could be provisioned was not.
fn run(arguments: &Arguments) -> Result<bool, String> {
    let encoding = match arguments.events.as_str() {
        "cloud" => Encoding::Cloud,
        "legacy" => Encoding::Legacy,
        other => return Err(format!("--events {other}: neither cloud nor legacy")),
    };
    let faults = parse_list(&arguments.faults)?;
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [signal_hook::consts::SIGTERM, signal_hook::consts::SIGINT] {
        signal_hook::flag::register(signal, Arc::clone(&stop))
            .map_err(|error| error.to_string())?;
    }
    let mut builder = secured(Fleet::builder(&arguments.nats), arguments)?;
    if let Some(path) = &arguments.jwt_key_out {
        std::fs::write(path, builder.verify_key()).map_err(|error| format!("{path}: {error}"))?;
    }
    builder = builder
        .nodes(arguments.nodes)
        .connections(arguments.connections)
        .token(&arguments.token)
        .events(encoding)
        .facts(&arguments.facts)
        .version(&arguments.version)
        .delay(Duration::from_millis(arguments.delay_ms))
        .announce(!arguments.quiet_start);
    for (count, fault) in faults {
        builder = builder.fault(count, fault);
    }
    if arguments.pki {
        builder = builder.pki();
    }
    if arguments.upgradable {
        builder = builder.upgradable();
    }
    let fleet = builder.start();
    let wanted = fleet.iter().filter(|node| node.expected() == Expected::Provisioned).count();
    say(&format!("ready nodes={} provisionable={wanted}", fleet.len()));

    let begun = Instant::now();
    let deadline = arguments.timeout.map(|secs| begun + Duration::from_secs(secs));
    let (mut first, mut last, mut told) = (None, None, (begun, usize::MAX));
    let done = loop {
        let provisioned = fleet.provisioned();
        let served = fleet
            .iter()
            .filter(|node| node.expected() == Expected::Provisioned && node.is_provisioned())
            .count();
        let now = Instant::now();
        if served > 0 && first.is_none() {
            first = Some(now);
        }
        if served == wanted && last.is_none() {
            last = Some(now);
        }
        let ends = stop.load(Ordering::Relaxed)
            || deadline.is_some_and(|deadline| now >= deadline)
            || (arguments.until_done && served == wanted);
        if (provisioned != told.1 && now >= told.0) || ends {
            let secs = begun.elapsed().as_secs_f64();
            say(&format!(
                "progress provisioned={provisioned} of={} seconds={secs:.1}",
                fleet.len()
            ));
            told = (now + Duration::from_secs(1), provisioned);
        }
        if ends {
            break served == wanted;
        }
        std::thread::sleep(Duration::from_millis(20));
    };

    if let (Some(first), Some(last)) = (first, last) {
        let secs = last.duration_since(first).as_secs_f64();
        say(&format!("done provisioned={wanted} from_first_to_last_seconds={secs:.2}"));
    }
    for violation in fleet.violations() {
        say(&format!("violation {violation}"));
    }
    match arguments.report.as_deref() {
        Some("-") => say(&fleet.report()),
        Some(path) => {
            std::fs::write(path, fleet.report()).map_err(|error| format!("{path}: {error}"))?;
        }
        None => {}
    }
    Ok(done)
}

/// Adds what a secured network is about.
fn secured(mut builder: Builder, arguments: &Arguments) -> Result<Builder, String> {
    if arguments.tls {
        builder = builder.tls();
    }
    if let Some(user) = &arguments.user {
        builder = builder.user(user, &arguments.password);
    }
    let read = |path: &Path| {
        std::fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))
    };
    if let Some(path) = &arguments.ca {
        let authority = X509::from_pem(read(path)?.as_bytes())
            .map_err(|_| format!("{}: no certificate in PEM", path.display()))?;
        builder = builder.authority(&authority);
    }
    let key = arguments.jwt_signing_key.as_deref();
    let text = key.map(read).transpose()?;
    match (text, arguments.v2) {
        (None, false) => Ok(builder),
        (Some(text), false) if text.starts_with("-----BEGIN") => {
            let key = Rsa::private_key_from_pem(text.as_bytes()).and_then(PKey::from_rsa);
            let key = key.map_err(|_| "--jwt-signing-key: no RSA key, and no seed".to_owned());
            Ok(builder.signing_key(key?))
        }
        (Some(seed), v2) => {
            let organization = Organization::from_seed(&seed)?;
            Ok(match v2 {
                true => builder.v2(&organization),
                false => builder.signing_key(organization.key().clone()),
            })
        }
        (None, true) => Err("--v2 needs the issuer's seed as --jwt-signing-key".to_owned()),
    }
}

/// One line on stdout; nobody reading it is no reason to stop.
fn say(line: &str) {
    let mut out = io::stdout().lock();
    let _ = writeln!(out, "{line}").and_then(|()| out.flush());
}
