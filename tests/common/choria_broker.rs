//! A small broker in the test's own process that lets people in by the rules of a Choria Broker, which a plain nats-server cannot.
//!
//! It speaks as much of the NATS protocol as daemon and practice fleet need, keeps accounts apart, and knows why it refused somebody,
//! which it tells tests but never the one refused. There is no system account. Rules and reasons are those of `Check` in go-choria's
//! `broker/network/choria_auth.go`.

use std::collections::HashMap;
use std::io::{self, BufRead as _, BufReader, Read as _};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use openssl::ssl::{SslAcceptor, SslContext, SslMethod, SslVerifyMode};
use openssl::x509::X509;
use openssl::x509::store::X509StoreBuilder;
use parking_lot::{Condvar, Mutex};
use serde_json::{Value, json};

use super::{Builder, Daemon, SOON, TempDir, within};
use crate::fleet::certificates::Certified;
use crate::fleet::issuer::{is_signed, read_token, read_token_of};
use crate::fleet::keys::hex;
use crate::fleet::network::{Network, PASSWORD, Setup, broker_of};
use crate::fleet::socket::Socket;
use crate::fleet::{self, Fleet, unix_now};

/// What a broker's own configuration says.
#[derive(Clone)]
pub struct Rules {
    /// Its certificate.
    pub certificate: Certified,
    /// Whose client certificates are good; without, it asks for none.
    pub authority: Option<X509>,
    /// `plugin.choria.network.provisioning.client_password`
    pub password: Option<String>,
    /// `plugin.security.issuer.NAME.public`, by name; the key in hex.
    pub issuers: HashMap<String, String>,
    /// `plugin.choria.network.provisioning.signer_cert`, in PEM; issuers come first.
    pub signer: Option<String>,
    /// `plugin.choria.network.provisioning.provisioner_without_token`
    pub without_token: bool,
    /// How far its clock is ahead, in seconds.
    pub ahead: i64,
}

impl Rules {
    /// Those of the documented set-ups.
    pub fn of(network: &Network) -> Rules {
        let rules = Rules {
            certificate: broker_of(&network.authority),
            authority: None,
            password: Some(PASSWORD.to_owned()),
            issuers: HashMap::new(),
            signer: None,
            without_token: false,
            ahead: 0,
        };
        match network.setup {
            Setup::X509 => Rules {
                authority: Some(network.authority.certificate.clone()),
                signer: Some(Fleet::verify_key_pem()),
                ..rules
            },
            Setup::Issuer => Rules {
                issuers: [("choria".to_owned(), network.organization.public_key())].into(),
                ..rules
            },
        }
    }

    /// Whose messages somebody hears who said `connect` to us.
    ///
    /// # Errors
    ///
    /// What a Choria Broker would write into its log.
    fn admit(&self, connect: &Value, nonce: &str, is_verified: bool) -> Result<Account, String> {
        let text = |name: &str| connect[name].as_str().unwrap_or_default();
        let token = text("auth_token");
        if text("user") == "provisioner" {
            self.admit_provisioner(text("pass"), token, is_verified)?;
            return Ok(Account::Provisioning);
        }
        let claims = claims(token);
        match claims["purpose"].as_str() {
            Some(purpose @ ("choria_client_id" | "choria_server")) => {
                let claims = self.check("token", token)?;
                let name = if purpose == "choria_server" { "identity" } else { "callerid" };
                if claims[name].as_str().unwrap_or_default().is_empty() {
                    return Err(format!("no {name} in claims"));
                }
                match proves(token, text("sig"), nonce) {
                    true => Ok(Account::Choria),
                    false => Err("nonce signature verification failed".to_owned()),
                }
            }
            _ if !token.is_empty() && !is_verified => self.admit_node(token),
            _ if is_verified && self.issuers.is_empty() => Ok(Account::Choria),
            _ if is_verified => Err("unknown connection received in issuer mode".to_owned()),
            _ => Err("unverified connection without JWT token".to_owned()),
        }
    }

    fn admit_provisioner(
        &self,
        password: &str,
        token: &str,
        is_verified: bool,
    ) -> Result<(), String> {
        let Some(wanted) = &self.password else {
            return Err("provisioning user password not enabled".to_owned());
        };
        if password.is_empty() {
            return Err("password required".to_owned());
        }
        if password != wanted {
            return Err("invalid provisioner password supplied".to_owned());
        }
        if self.issuers.is_empty() {
            return match is_verified {
                true => Ok(()),
                false => {
                    Err("provisioning user is only allowed over verified TLS connections".into())
                }
            };
        }
        if token.is_empty() {
            return match self.without_token {
                true => Ok(()),
                false => Err("no token provided in connection".to_owned()),
            };
        }
        let claims = self.check("client token", token)?;
        match claims["permissions"]["provisioner"] == true {
            true => Ok(()),
            false => {
                let caller = &claims["callerid"];
                Err(format!("provisioner claim is false in token with caller id {caller}"))
            }
        }
    }

    fn admit_node(&self, token: &str) -> Result<Account, String> {
        if self.password.is_none() {
            return Err("provisioning account is not set".to_owned());
        }
        let claims = match (&self.signer, self.issuers.is_empty()) {
            (_, false) => self.check("provisioning token", token)?,
            (Some(signer), true) => read_token_of(signer, token, self.now())?,
            (None, true) => return Err("provisioning is not enabled".to_owned()),
        };
        match claims["purpose"] == "choria_provisioning" {
            true => Ok(Account::Node),
            false => Err(format!("do not know how to handle {} purpose token", claims["purpose"])),
        }
    }

    /// What `token` says if the issuer of its organization stands behind it.
    fn check(&self, what: &str, token: &str) -> Result<Value, String> {
        let claims = claims(token);
        let Some(organization) = claims["ou"].as_str() else {
            return Err("no ou claim in token".to_owned());
        };
        let Some(issuer) = self.issuers.get(organization) else {
            return Err(format!("no issuer configured for ou '{organization}'"));
        };
        read_token(issuer, token, self.now()).map_err(|why| {
            format!("failed to parse {what} issued by the {organization} chain: {why}")
        })
    }

    fn now(&self) -> i64 {
        unix_now() + self.ahead
    }

    fn tls(&self) -> SslContext {
        let make = || {
            let mut acceptor = SslAcceptor::mozilla_intermediate_v5(SslMethod::tls_server())?;
            acceptor.set_certificate(&self.certificate.certificate)?;
            acceptor.set_private_key(&self.certificate.key)?;
            if let Some(authority) = &self.authority {
                let mut store = X509StoreBuilder::new()?;
                store.add_cert(authority.clone())?;
                acceptor.set_verify_cert_store(store.build())?;
                // It need not have one, but what it has must be good.
                acceptor.set_verify(SslVerifyMode::PEER);
            }
            Ok::<_, openssl::error::ErrorStack>(acceptor.build().into_context())
        };
        make().expect("a broker's certificate was made for it")
    }
}

/// Whose messages a connection hears, and what it may do there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Account {
    /// Everything among nodes that wait to be provisioned.
    Provisioning,
    /// The same, as one of these nodes.
    Node,
    /// Everything among those that are.
    Choria,
}

impl Account {
    fn name(self) -> &'static str {
        match self {
            Account::Provisioning | Account::Node => "provisioning",
            Account::Choria => "choria",
        }
    }

    fn may_subscribe(self, subject: &str) -> bool {
        const BROADCASTS: [&str; 4] = ["discovery", "rpcutil", "choria_util", "choria_provision"];
        let broadcast = subject.strip_prefix("provisioning.broadcast.agent.");
        self != Account::Node
            || subject.starts_with("provisioning.node.")
            || broadcast.is_some_and(|agent| BROADCASTS.contains(&agent))
    }

    fn may_publish(self, subject: &str) -> bool {
        const PREFIXES: [&str; 3] =
            ["choria.lifecycle.", "provisioning.reply.", "provisioning.registration."];
        self != Account::Node || PREFIXES.iter().any(|prefix| subject.starts_with(prefix))
    }
}

/// Somebody who was let in.
#[derive(Debug, Clone)]
pub struct Login {
    /// Where to.
    pub account: Account,
    /// What was shown beside the certificate.
    pub connect: Value,
    /// Whether the token is proved to be his, which a Choria Broker doesn't ask of user `provisioner`.
    pub is_proved: bool,
    /// The certificate that was shown.
    pub certificate: Option<X509>,
}

/// A secured network with its broker.
pub struct Site {
    pub network: Network,
    pub broker: ChoriaBroker,
    _dir: TempDir,
}

impl Site {
    /// One that is secured so.
    pub fn new(setup: Setup) -> Site {
        let dir = TempDir::new("site");
        let network = Network::create(dir.path(), setup).expect("the temporary folder is writable");
        let broker = ChoriaBroker::start(Rules::of(&network));
        Site { network, broker, _dir: dir }
    }

    /// A daemon that the broker lets in.
    pub fn daemon(&self) -> Builder {
        Daemon::builder(&self.broker.url()).network(&self.network)
    }

    /// As many nodes that the broker lets in.
    pub fn fleet(&self, nodes: usize) -> fleet::Builder {
        self.network.fleet(&self.broker.url()).nodes(nodes)
    }
}

/// The broker; it hangs up on everybody when dropped.
pub struct ChoriaBroker {
    port: u16,
    inner: Arc<Inner>,
    acceptor: Option<JoinHandle<()>>,
}

impl ChoriaBroker {
    /// Starts one.
    pub fn start(rules: Rules) -> ChoriaBroker {
        let listener = TcpListener::bind(("127.0.0.1", 0)).expect("there are free ports");
        let port = listener.local_addr().expect("it is bound").port();
        let inner = Arc::new(Inner {
            rules: Mutex::new(rules),
            stopped: AtomicBool::new(false),
            numbers: AtomicU64::new(0),
            members: Mutex::default(),
            seen: Mutex::default(),
            changed: Condvar::new(),
        });
        let acceptor = Arc::clone(&inner);
        let acceptor = thread::spawn(move || acceptor.accept(&listener));
        ChoriaBroker { port, inner, acceptor: Some(acceptor) }
    }

    /// Where it listens.
    pub fn url(&self) -> String {
        format!("nats://127.0.0.1:{}", self.port)
    }

    /// Changes the rules for those who come from now on.
    pub fn change(&self, edit: impl FnOnce(&mut Rules)) {
        edit(&mut self.inner.rules.lock());
    }

    /// Hangs up on everybody.
    pub fn hang_up(&self) {
        for member in self.inner.members.lock().values() {
            member.socket.close();
        }
    }

    /// Waits until `count` of those who came were refused in all; the reasons.
    #[track_caller]
    pub fn refusals(&self, count: usize) -> Vec<String> {
        self.wait(&format!("{count} refusals"), |seen| {
            (seen.refusals.len() >= count).then(|| seen.refusals.clone())
        })
    }

    /// Waits until as many as `before` were let in who are no nodes, and one more; that one.
    #[track_caller]
    pub fn login(&self, before: usize) -> Login {
        self.wait("a provisioner", |seen| {
            let mut logins = seen.logins.iter().filter(|login| login.account != Account::Node);
            logins.nth(before).cloned()
        })
    }

    #[track_caller]
    fn wait<T>(&self, what: &str, look: impl Fn(&Seen) -> Option<T>) -> T {
        let deadline = within(SOON);
        let mut seen = self.inner.seen.lock();
        loop {
            if let Some(found) = look(&seen) {
                return found;
            }
            let late = self.inner.changed.wait_until(&mut seen, deadline).timed_out();
            assert!(!late, "not within {SOON:?}: {what}; refusals: {:?}", seen.refusals);
        }
    }
}

impl Drop for ChoriaBroker {
    fn drop(&mut self) {
        self.inner.stopped.store(true, Ordering::Relaxed);
        // It waits for somebody.
        drop(TcpStream::connect(("127.0.0.1", self.port)));
        if let Some(acceptor) = self.acceptor.take() {
            // A panic in there is shown by itself.
            let _ = acceptor.join();
        }
    }
}

struct Inner {
    rules: Mutex<Rules>,
    stopped: AtomicBool,
    numbers: AtomicU64,
    members: Mutex<HashMap<u64, Arc<Member>>>,
    seen: Mutex<Seen>,
    changed: Condvar,
}

#[derive(Default)]
struct Seen {
    logins: Vec<Login>,
    refusals: Vec<String>,
}

/// A connection that was let in.
struct Member {
    socket: Socket,
    account: Account,
    subscriptions: Mutex<Vec<(String, String)>>,
}

impl Inner {
    fn accept(self: Arc<Inner>, listener: &TcpListener) {
        let mut threads = Vec::new();
        for tcp in listener.incoming() {
            if self.stopped.load(Ordering::Relaxed) {
                break;
            }
            let Ok(tcp) = tcp else { continue };
            let inner = Arc::clone(&self);
            threads.push(thread::spawn(move || {
                // It is over in any case, and why is no matter of ours.
                let _ = inner.serve(tcp);
            }));
        }
        for member in self.members.lock().values() {
            member.socket.close();
        }
        for thread in threads {
            let _ = thread.join();
        }
    }

    fn serve(&self, tcp: TcpStream) -> io::Result<()> {
        tcp.set_nodelay(true)?;
        tcp.set_read_timeout(Some(SOON))?;
        let rules = self.rules.lock().clone();
        let number = self.numbers.fetch_add(1, Ordering::Relaxed);
        let mut info = json!({
            "server_id": "TEST",
            "version": "2.14.2",
            "proto": 1,
            "headers": true,
            "max_payload": 1 << 20,
            "client_id": number,
            "tls_required": true,
        });
        let mut nonce = String::new();
        if !rules.issuers.is_empty() {
            let mut bytes = [0; 11];
            fastrand::fill(&mut bytes);
            nonce = URL_SAFE_NO_PAD.encode(bytes);
            info["nonce"] = json!(nonce);
        }
        Socket::Plain(Arc::new(tcp.try_clone()?)).send(format!("INFO {info}\r\n").as_bytes())?;
        let socket = Socket::accept(tcp, &rules.tls())
            .inspect_err(|error| self.note(|seen| seen.refusals.push(format!("TLS: {error}"))))?;

        let mut reader = BufReader::new(socket.clone());
        let mut line = String::new();
        reader.read_line(&mut line)?;
        let connect =
            line.strip_prefix("CONNECT ").and_then(|text| serde_json::from_str(text).ok());
        let connect: Value = connect.ok_or_else(|| io::Error::other("no CONNECT"))?;
        let account = match rules.admit(&connect, &nonce, socket.is_verified()) {
            Ok(account) => account,
            Err(reason) => {
                socket.send(b"-ERR 'Authorization Violation'\r\n")?;
                socket.close();
                self.note(|seen| seen.refusals.push(reason));
                return Ok(());
            }
        };
        socket.tcp().set_read_timeout(None)?;
        let text = |name: &str| connect[name].as_str().unwrap_or_default();
        let is_proved = proves(text("auth_token"), text("sig"), &nonce);
        let certificate = socket.certificate();
        let subscriptions = Mutex::default();
        let member = Arc::new(Member { socket: socket.clone(), account, subscriptions });
        self.members.lock().insert(number, Arc::clone(&member));

        // What a Choria Broker sends once it knows who is there.
        info["connect_info"] = json!(true);
        info["remote_account"] = json!(account.name());
        info.as_object_mut().expect("it is one").remove("nonce");
        socket.send(format!("INFO {info}\r\n").as_bytes())?;
        self.note(|seen| seen.logins.push(Login { account, connect, is_proved, certificate }));

        let end = self.converse(&member, &mut reader);
        self.members.lock().remove(&number);
        socket.close();
        end
    }

    fn converse(&self, member: &Member, reader: &mut BufReader<Socket>) -> io::Result<()> {
        let wrong = || io::Error::other("not the protocol we know");
        let (mut line, mut payload) = (String::new(), Vec::new());
        loop {
            line.clear();
            if reader.read_line(&mut line)? == 0 || self.stopped.load(Ordering::Relaxed) {
                return Ok(());
            }
            let words: Vec<&str> = line.split_ascii_whitespace().collect();
            match words[..] {
                ["PING"] => member.socket.send(b"PONG\r\n")?,
                ["PONG"] => {}
                ["SUB", subject, .., sid] if member.account.may_subscribe(subject) => {
                    member.subscriptions.lock().push((sid.to_owned(), subject.to_owned()));
                }
                ["SUB", subject, .., _] => member.refuse("Subscription", subject)?,
                ["UNSUB", sid, ..] => member.subscriptions.lock().retain(|(known, _)| known != sid),
                [kind @ ("PUB" | "HPUB"), subject, ref middle @ .., size] => {
                    let size = size.parse::<usize>().map_err(|_| wrong())?;
                    payload.resize(size + 2, 0);
                    reader.read_exact(&mut payload)?;
                    let (reply, head) = match (kind, middle) {
                        ("PUB", []) => ("", ""),
                        ("PUB", &[reply]) => (reply, ""),
                        ("HPUB", &[head]) => ("", head),
                        ("HPUB", &[reply, head]) => (reply, head),
                        _ => return Err(wrong()),
                    };
                    if !member.account.may_publish(subject) {
                        member.refuse("Publish", subject)?;
                        continue;
                    }
                    let delivered = self.deliver(member.account, subject, reply, head, &payload);
                    if !delivered && !reply.is_empty() {
                        let status = format!("NATS/1.0 503\r\nNats-Subject: {subject}\r\n\r\n");
                        let size = status.len().to_string();
                        let status = format!("{status}\r\n");
                        self.deliver(member.account, reply, "", &size, status.as_bytes());
                    }
                }
                _ => return Err(wrong()),
            }
        }
    }

    /// Whether anybody in the account wanted it; `payload` ends in a newline, and `head` is the length of its headers, if there are any.
    fn deliver(
        &self,
        account: Account,
        subject: &str,
        reply: &str,
        head: &str,
        payload: &[u8],
    ) -> bool {
        let members: Vec<Arc<Member>> = self.members.lock().values().cloned().collect();
        let mut delivered = false;
        for member in members.iter().filter(|member| member.account.name() == account.name()) {
            let subscriptions = member.subscriptions.lock();
            let fits = subscriptions.iter().filter(|(_, pattern)| is_match(pattern, subject));
            let sids: Vec<String> = fits.map(|(sid, _)| sid.clone()).collect();
            drop(subscriptions);
            for sid in sids {
                let kind = if head.is_empty() { "MSG" } else { "HMSG" };
                let size = (payload.len() - 2).to_string();
                let words = [kind, subject, &sid, reply, head, &size];
                let words: Vec<&str> = words.into_iter().filter(|word| !word.is_empty()).collect();
                let message = [words.join(" ").as_bytes(), b"\r\n", payload].concat();
                // Who is gone is found out by the one who reads from him.
                let _ = member.socket.send(&message);
                delivered = true;
            }
        }
        delivered
    }

    fn note(&self, what: impl FnOnce(&mut Seen)) {
        what(&mut self.seen.lock());
        self.changed.notify_all();
    }
}

impl Member {
    fn refuse(&self, what: &str, subject: &str) -> io::Result<()> {
        let text = format!("-ERR 'Permissions Violation for {what} to \"{subject}\"'\r\n");
        self.socket.send(text.as_bytes())
    }
}

fn is_match(pattern: &str, subject: &str) -> bool {
    if !pattern.contains(['*', '>']) {
        return pattern == subject;
    }
    let mut tokens = subject.split('.');
    for wanted in pattern.split('.') {
        match (wanted, tokens.next()) {
            (">", Some(_)) => return true,
            ("*", Some(_)) => {}
            (wanted, Some(token)) if wanted == token => {}
            _ => return false,
        }
    }
    tokens.next().is_none()
}

/// Whether the key that `token` names signed the text of `nonce`.
fn proves(token: &str, signature: &str, nonce: &str) -> bool {
    let claims = claims(token);
    let key = claims["public_key"].as_str().unwrap_or_default();
    let signature = URL_SAFE_NO_PAD.decode(signature).unwrap_or_default();
    is_signed(key, nonce.as_bytes(), &hex(&signature))
}

/// What a token says, whoever made it; nothing if it is none.
fn claims(token: &str) -> Value {
    let claims = token.split('.').nth(1).unwrap_or_default();
    let claims = URL_SAFE_NO_PAD.decode(claims).unwrap_or_default();
    serde_json::from_slice(&claims).unwrap_or_default()
}
