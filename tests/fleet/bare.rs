//! The limit: a loop that sends the requests of a node's cycle one after another and runs the helper, and checks nothing at
//! all. No registry, no tokens verified, no replies read; it knows the nodes and their number beforehand.

use std::io::{self, BufRead as _, BufReader, Read as _, Write as _};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use choria_provisioner::gate::Lease;
use choria_provisioner::metrics::Metrics;
use choria_provisioner::protocol::{Codec, Identity, RequestId, Sender, v1};
use choria_provisioner::rpc::actions::{Call, Configure, Inventory, Jwt, Restart};
use choria_provisioner::rpc::{Arrival, Rpc};
use choria_provisioner::transport::Transport;
use choria_provisioner::transport::address::ServerAddress;
use choria_provisioner::transport::connection::{Connection, Options};
use crossbeam_channel::{Receiver, bounded};
use serde_json::Value;

use crate::rig::text;

/// How long an answer may take.
const SOON: Duration = Duration::from_secs(10);

/// What a loop is told: it is a process of its own, so that its cost can be seen.
pub struct Arguments {
    /// Where the broker listens.
    pub broker: String,
    /// The helper's command line.
    pub helper: String,
    /// Whether the helper stays.
    pub persistent: bool,
    /// How many nodes are worked on at once.
    pub workers: usize,
    /// How many nodes there are.
    pub nodes: usize,
}

/// The first word of a process that is a bare loop.
const WORD: &str = "bare-loop";

impl Arguments {
    /// Those of this process, if it is a bare loop.
    pub fn of_process() -> Option<Result<Arguments, String>> {
        let mut words = std::env::args().skip(1);
        (words.next()? == WORD).then_some(())?;
        let mut next = || words.next().ok_or_else(|| "a word is missing".to_owned());
        Some((|| {
            Ok(Arguments {
                broker: next()?,
                helper: next()?,
                persistent: next()? == "true",
                workers: next()?.parse().map_err(text)?,
                nodes: next()?.parse().map_err(text)?,
            })
        })())
    }

    /// As a command line.
    pub fn to_words(&self) -> Vec<String> {
        vec![
            WORD.to_owned(),
            self.broker.clone(),
            self.helper.clone(),
            self.persistent.to_string(),
            self.workers.to_string(),
            self.nodes.to_string(),
        ]
    }
}

/// Runs the loop until it is ended.
pub fn run(arguments: &Arguments) -> Result<(), String> {
    let server = ServerAddress::parse(&arguments.broker).map_err(text)?;
    let metrics = Metrics::new("bare");
    let connection = Connection::start(Options::new(vec![server], "bare-loop", metrics.clone()))
        .map_err(text)?;
    while !connection.is_connected() {
        thread::sleep(Duration::from_millis(1));
    }
    let transport: Arc<dyn Transport> = connection;
    let sender = Sender {
        identity: Identity::parse("provisioner.example.net").map_err(text)?,
        caller: "choria=provisioner.example.net".to_owned(),
    };
    let codec = Codec::V1(v1::Codec::insecure(sender));
    let instance = RequestId::random();
    let rpc = Rpc::start(transport, Lease::endless(), codec, instance.as_str(), 60, metrics)
        .map_err(text)?;
    let next = AtomicUsize::new(0);
    thread::scope(|scope| {
        let threads: Vec<_> =
            (0..arguments.workers).map(|_| scope.spawn(|| work(arguments, &rpc, &next))).collect();
        threads
            .into_iter()
            .try_for_each(|thread| thread.join().unwrap_or(Err("a panic".to_owned())))
    })?;
    // Whoever measures looks at what we have used, and ends us.
    loop {
        thread::park();
    }
}

fn work(arguments: &Arguments, rpc: &Arc<Rpc>, next: &AtomicUsize) -> Result<(), String> {
    let words = shell_words::split(&arguments.helper).map_err(text)?;
    let mut staying = match arguments.persistent {
        true => Some(Staying::start(&words).map_err(text)?),
        false => None,
    };
    let (sink, answers) = bounded(16);
    let token = "s3cret";
    loop {
        let number = next.fetch_add(1, Ordering::Relaxed);
        if number >= arguments.nodes {
            return Ok(());
        }
        let node = Identity::parse(&format!("n{number}.fleet.example.net")).map_err(text)?;
        let call = |body: &str, action| {
            let asked = rpc.send(&node, action, body, &sink).map_err(text)?;
            let arrival = answer(&answers)?;
            drop(asked);
            Ok::<Arrival, String>(arrival)
        };
        call(&Inventory {}.body(), Inventory::ACTION)?;
        call(&Jwt { token }.body(), Jwt::ACTION)?;
        let input = format!(
            r#"{{"identity":"{node}","csr":null,"ed25519_pubkey":null,"inventory":"{{}}","jwt":null}}"#
        );
        let answer = match &mut staying {
            Some(staying) => staying.ask(&input),
            None => start_once(&words, &input),
        };
        let answer = answer.map_err(text)?;
        let answer: Value = serde_json::from_str(&answer).map_err(text)?;
        let configuration = match answer.get("reply") {
            Some(reply) => &reply["configuration"],
            None => &answer["configuration"],
        };
        let (empty, config) = (Default::default(), configuration.to_string());
        let configure = Configure {
            action_policies: &empty,
            ca: "",
            certificate: "",
            config: &config,
            ecdh_public: "",
            key: "",
            opa_policies: &empty,
            server_jwt: "",
            ssldir: "",
            token,
        };
        call(&configure.body(), Configure::ACTION)?;
        call(&Restart { splay_secs: 1, token }.body(), Restart::ACTION)?;
    }
}

fn answer(answers: &Receiver<Arrival>) -> Result<Arrival, String> {
    answers.recv_deadline(Instant::now() + SOON).map_err(|_| "no answer".to_owned())
}

fn start_once(words: &[String], input: &str) -> io::Result<String> {
    let mut child = Command::new(&words[0])
        .args(&words[1..])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()?;
    if let Some(mut stdin) = child.stdin.take() {
        stdin.write_all(input.as_bytes())?;
    }
    let mut answer = String::new();
    if let Some(mut stdout) = child.stdout.take() {
        stdout.read_to_string(&mut answer)?;
    }
    child.wait()?;
    Ok(answer)
}

/// A helper that stays.
struct Staying {
    _child: Child,
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
}

impl Staying {
    fn start(words: &[String]) -> io::Result<Staying> {
        let mut child = Command::new(&words[0])
            .args(&words[1..])
            .env("CHORIA_PROVISIONER_HELPER", "persistent/1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        match (child.stdin.take(), child.stdout.take()) {
            (Some(stdin), Some(stdout)) => {
                Ok(Staying { _child: child, stdin, stdout: BufReader::new(stdout) })
            }
            _ => Err(io::Error::other("no pipes")),
        }
    }

    fn ask(&mut self, input: &str) -> io::Result<String> {
        self.stdin.write_all(format!("{{\"id\":\"1\",\"node\":{input}}}\n").as_bytes())?;
        let mut line = String::new();
        self.stdout.read_line(&mut line)?;
        Ok(line)
    }
}
