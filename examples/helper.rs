//! A helper that answers as fast as a program can start: the same configuration for every node, with its identity.
//!
//! `echo '{"identity":"n1.example.net"}' | cargo run --example helper`

use std::io::{self, Read, Write};
use std::process::ExitCode;

use serde::Deserialize;
use serde_json::json;

/// What we look at of the input.
#[derive(Deserialize)]
struct Node {
    identity: String,
}

fn main() -> ExitCode {
    match answer() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn answer() -> io::Result<()> {
    let mut input = Vec::new();
    io::stdin().lock().read_to_end(&mut input)?;
    let node: Node = serde_json::from_slice(&input)?;
    let answer = json!({
        "configuration": {
            "identity": node.identity,
            "collectives": "choria",
            "loglevel": "info",
            "logfile": "/var/log/choria.log",
            "plugin.choria.middleware_hosts": "nats://broker.example.net:4222",
            "plugin.choria.server.provision": "0",
        }
    });
    io::stdout().lock().write_all(answer.to_string().as_bytes())
}
