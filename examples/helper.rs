//! A helper that answers as fast as a program can start, or as fast as it can be asked: the same configuration for every
//! node, with its identity. It knows from its environment whether it is to stay.
//!
//! `echo '{"identity":"n1.example.net"}' | cargo run --example helper`

use std::io::{self, BufRead as _, Read as _, Write as _};
use std::process::ExitCode;

use serde::Deserialize;
use serde_json::json;

/// What we look at of a node.
#[derive(Deserialize)]
struct Node {
    identity: String,
}

/// A line of a provisioner that asks about many nodes.
#[derive(Deserialize)]
struct Request {
    id: String,
    node: Node,
}

fn main() -> ExitCode {
    let stays = std::env::var("CHORIA_PROVISIONER_HELPER").is_ok_and(|mode| mode == "persistent/1");
    match if stays { answer_many() } else { answer_one() } {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

/// All of the input is one node, all of the output its answer.
fn answer_one() -> io::Result<()> {
    let mut input = Vec::new();
    io::stdin().lock().read_to_end(&mut input)?;
    let node: Node = serde_json::from_slice(&input)?;
    io::stdout().lock().write_all(configure(&node).to_string().as_bytes())
}

/// Each line is a node, and its answer is one line.
fn answer_many() -> io::Result<()> {
    let (mut input, mut output) = (io::stdin().lock(), io::stdout().lock());
    let mut line = Vec::new();
    while input.read_until(b'\n', &mut line)? > 0 {
        let request: Request = serde_json::from_slice(&line)?;
        let answer = json!({"id": request.id, "reply": configure(&request.node)});
        output.write_all(format!("{answer}\n").as_bytes())?;
        output.flush()?;
        line.clear();
    }
    Ok(())
}

fn configure(node: &Node) -> serde_json::Value {
    json!({
        "configuration": {
            "identity": node.identity,
            "collectives": "choria",
            "loglevel": "info",
            "logfile": "/var/log/choria.log",
            "plugin.choria.middleware_hosts": "nats://broker.example.net:4222",
            "plugin.choria.server.provision": "0",
        }
    })
}
