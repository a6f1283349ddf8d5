//! In TLS.

use std::env;
use std::fs;
use std::path::PathBuf;
use std::sync::LazyLock;

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use ed25519_dalek::{Signature, Signer, SigningKey};
use openssl::ssl::{SslAcceptor, SslMethod};

use super::*;
use crate::pki::testing::{Certified, Wanted};
use crate::transport::login::{NoCredentials, Token};
use crate::transport::tls::{Connector, Identity, Offer, Trust};

static AUTHORITY: LazyLock<Certified> =
    LazyLock::new(|| Wanted::new("our CA").authority().self_signed());
static OURS: LazyLock<Certified> =
    LazyLock::new(|| Wanted::new("provisioner").signed_by(&AUTHORITY));

const INFO_TLS: &str = "INFO {\"headers\":true,\"max_payload\":1048576,\"tls_required\":true,\"nonce\":\"5Jm9lYq0N2w1xQc\"}\r\n";

// With a real broker.

#[test]
fn everything_goes_through_tls() {
    let site = Site::new();
    let broker = site.broker(&[]);
    let client = Client::with(&broker.url(), |options| options.credentials = secure());
    let (_subscription, messages) = client.subscribe("a.*");
    client.up();
    client.request("a.b", "re.ply", b"body");
    let message = messages.recv_timeout(SOON).unwrap();
    assert_eq!((message.subject.as_str(), message.payload.as_slice()), ("a.b", &b"body"[..]));
    assert_eq!(message.reply.as_deref(), Some("re.ply"));
    client.connection.drain(Instant::now() + SOON, &never());
    client.connection.join();
    assert_eq!(client.link_down(), "closed by us");
    assert_eq!(client.errors(ErrorKind::Tls), 0);
}

#[test]
fn large_messages_go_through_both_ways() {
    let site = Site::new();
    let broker = site.broker(&[]);
    let client = Client::with(&broker.url(), |options| options.credentials = secure());
    let (_subscription, messages) = client.subscribe("a");
    client.up();
    let max = client.connection.max_payload();
    for size in [0, 1, 16_384, 100_000, max] {
        let body: Vec<u8> = (0..size).map(|at| (at % 251) as u8).collect();
        client.publish("a", &body).unwrap();
        assert!(messages.recv_timeout(SOON).unwrap().payload == body, "{size} bytes");
    }
}

#[test]
fn a_broker_that_is_not_who_it_should_be_is_told_nothing() {
    let good = || Wanted::new("broker").name("localhost").address("127.0.0.1");
    let stranger = Wanted::new("their CA").authority().self_signed();
    for (certified, expected) in [
        (good().signed_by(&stranger), "issued by their CA, which the test does not vouch for"),
        (
            Wanted::new("x").name("localhost").signed_by(&AUTHORITY),
            "for localhost, not for 127.0.0.1",
        ),
        (good().valid(-7_200, -3_600).signed_by(&AUTHORITY), "its certificate (broker) expired on"),
    ] {
        let site = Site::new();
        site.write("broker.pem", &certified);
        let broker = site.broker(&[]);
        let client = Client::with(&broker.url(), |options| options.credentials = secure());
        client.until_error(ErrorKind::Tls);
        let error = client.connection.last_error().unwrap();
        assert!(error.text.contains(expected), "{}", error.text);
        assert!(client.links.is_empty());
    }
    // The same one by its name.
    let site = Site::new();
    site.write("broker.pem", &Wanted::new("x").name("localhost").signed_by(&AUTHORITY));
    let broker = site.broker(&[]);
    let url = format!("localhost:{}", broker.port);
    let client = Client::with(&url, |options| options.credentials = secure());
    client.up();
}

#[test]
fn a_broker_that_demands_a_certificate_gets_ours() {
    let site = Site::new();
    let broker = site.broker(&["--tlsverify", "--tlscacert", &site.path("ca.pem")]);
    let client =
        Client::with(&broker.url(), |options| options.credentials = secure_as(Some(&OURS)));
    client.up();

    let client = Client::with(&broker.url(), |options| options.credentials = secure());
    client.until_error(ErrorKind::Tls);
    let error = client.connection.last_error().unwrap();
    assert!(error.text.contains("it demands a certificate, and we have none"), "{}", error.text);

    let expired = Wanted::new("provisioner").valid(-7_200, -3_600).signed_by(&AUTHORITY);
    let client =
        Client::with(&broker.url(), |options| options.credentials = secure_as(Some(&expired)));
    client.until_error(ErrorKind::Tls);
    let error = client.connection.last_error().unwrap();
    assert!(error.text.contains("it refuses our certificate"), "{}", error.text);
}

#[test]
fn what_was_renewed_is_used_by_the_next_connection() {
    let site = Site::new();
    let mut broker = site.broker(&["--tlsverify", "--tlscacert", &site.path("ca.pem")]);
    let files = Arc::new(Mutex::new((AUTHORITY.clone(), OURS.clone())));
    let client = Client::with(&broker.url(), |options| {
        let files = Arc::clone(&files);
        options.credentials = Box::new(move || {
            let (authority, ours) = &*files.lock();
            Ok(credentials(authority, Some(ours)))
        });
    });
    client.up();
    // Everybody gets another authority; nothing of the old one is good for anything.
    let authority = Wanted::new("new CA").authority().self_signed();
    broker.kill();
    site.write("ca.pem", &authority);
    site.write("broker.pem", &broker_of(&authority));
    broker.restart();
    client.link_down();
    client.until_error(ErrorKind::Tls);
    let error = client.connection.last_error().unwrap();
    assert!(error.text.contains("issued by new CA"), "{}", error.text);
    let ours = Wanted::new("provisioner").signed_by(&authority);
    *files.lock() = (authority, ours);
    client.up();
}

#[test]
fn credentials_that_cannot_be_read_are_tried_again() {
    let site = Site::new();
    let broker = site.broker(&[]);
    let readable = Arc::new(Mutex::new(false));
    let client = Client::with(&broker.url(), |options| {
        let readable = Arc::clone(&readable);
        options.credentials = Box::new(move || match *readable.lock() {
            true => secure()(),
            false => Err(NoCredentials("/etc/x.pem: it is empty".to_owned())),
        });
    });
    client.until_error(ErrorKind::Credentials);
    let error = client.connection.last_error().unwrap();
    assert_eq!(error.text, "could not connect: /etc/x.pem: it is empty");
    *readable.lock() = true;
    client.up();
}

#[test]
fn a_broker_that_was_killed_is_found_again_in_tls() {
    let site = Site::new();
    let mut broker = site.broker(&[]);
    let client = Client::with(&broker.url(), |options| options.credentials = secure());
    let (_subscription, messages) = client.subscribe("a");
    client.up();
    for _ in 0..3 {
        broker.kill();
        client.link_down();
        assert_eq!(client.publish("a", b""), Err(PublishError::Disconnected));
        broker.restart();
        client.up();
        client.publish("a", b"x").unwrap();
        messages.recv_timeout(SOON).unwrap();
    }
}

#[test]
fn threads_publish_side_by_side_in_tls_and_each_one_in_order() {
    const THREADS: usize = 4;
    const MESSAGES: u32 = 10_000;
    let site = Site::new();
    let broker = site.broker(&[]);
    let client = Client::with(&broker.url(), |options| options.credentials = secure());
    publish_side_by_side(&client, THREADS, MESSAGES);
}

#[test]
fn requests_are_all_answered_over_one_connection_however_many_threads_ask() {
    let site = Site::new();
    let broker = site.broker(&[]);
    let client = Client::with(&broker.url(), |options| options.credentials = secure());
    let _answerer = Client::start_service(&broker.url(), "service", secure());
    client.up();
    // A wake-up that is lost leaves somebody without an answer.
    for (threads, requests) in [(1, 1_000), (4, 2_000), (16, 8_000)] {
        client.ask(threads, requests);
    }
    assert_eq!(client.metrics.broker_reconnects.get(), 0);
}

#[test]
fn a_refusal_says_what_was_shown_and_why_that_may_be_refused() {
    let site = Site::new();
    let broker = site.broker(&["--user", "provisioner", "--pass", "other"]);
    let user = || Some(("provisioner".to_owned(), Secret::new("s3cret")));
    let check = |credentials: fn(Credentials) -> Credentials, ours, shown: &str, reason: &str| {
        let client = Client::with(&broker.url(), |options| {
            options.credentials = Box::new(move || {
                Ok(credentials(Credentials { user: user(), ..self::credentials(&AUTHORITY, ours) }))
            });
        });
        client.until_error(ErrorKind::Authorization);
        let text = client.connection.last_error().unwrap().text;
        assert!(text.contains("Authorization Violation: "), "{text}");
        assert!(text.contains(shown) && text.contains(reason), "{text}");
        assert!(!text.contains("s3cret") && !text.contains("t.o.ken"), "{text}");
    };
    check(
        |all| all,
        Some(&*OURS),
        "it was shown user provisioner with a password, a certificate;",
        "plugin.choria.network.provisioning.client_password",
    );
    check(
        |all| Credentials { token: Some(token()), ..all },
        None,
        "it was shown user provisioner with a password, the token of signer, no certificate;",
        "it offers no nonce, so it takes no tokens",
    );
    check(
        |all| Credentials { user: None, token: Some(token()), ..all },
        None,
        "it was shown the token of signer, no certificate;",
        "is broker_provisioning_password set?",
    );
}

// Against a script.

#[test]
fn user_password_token_and_signature_go_into_one_connect() {
    let listener = Listener::start();
    let _client = Client::with(&listener.url(), |options| {
        options.credentials = Box::new(|| {
            Ok(Credentials {
                user: Some(("provisioner".to_owned(), Secret::new("s3cret"))),
                token: Some(token()),
                ..credentials(&AUTHORITY, None)
            })
        });
    });
    // With a nonce and, as from a broker without issuers, without one.
    for (info, nonce) in
        [(INFO_TLS, "5Jm9lYq0N2w1xQc"), ("INFO {\"headers\":true,\"tls_required\":true}\r\n", "")]
    {
        let mut peer = listener.accept();
        peer.say(info);
        let mut peer = peer.encrypt(&broker_of(&AUTHORITY));
        let connect = peer.line();
        let json: serde_json::Value =
            serde_json::from_str(connect.strip_prefix("CONNECT ").unwrap()).unwrap();
        for (key, value) in [
            ("user", "provisioner"),
            ("pass", "s3cret"),
            ("auth_token", "t.o.ken"),
            ("jwt", "t.o.ken"),
            ("name", "test"),
        ] {
            assert_eq!(json[key], value, "{key}");
        }
        assert_eq!(json["tls_required"], true);
        assert_eq!(json["echo"], true);
        let signature = json["sig"].as_str().unwrap();
        let signature: [u8; 64] = URL_SAFE_NO_PAD.decode(signature).unwrap().try_into().unwrap();
        let signature = Signature::from_bytes(&signature);
        key().verifying_key().verify_strict(nonce.as_bytes(), &signature).unwrap();
        assert_eq!(peer.line(), "PING");
    }
}

#[test]
fn a_connect_without_credentials_holds_none() {
    let listener = Listener::start();
    let client = Client::with(&listener.url(), |options| options.credentials = secure());
    let mut peer = listener.accept();
    peer.say(INFO_TLS);
    let connect = peer.encrypt(&broker_of(&AUTHORITY)).line();
    for key in ["user", "pass", "auth_token", "jwt", "sig"] {
        assert!(!connect.contains(&format!("\"{key}\"")), "{connect}");
    }
    drop(client);
}

#[test]
fn only_what_is_said_in_tls_leads_to_other_brokers() {
    let (first, liar, told) = (Listener::start(), Listener::start(), Listener::start());
    let client = Client::with(&first.url(), |options| options.credentials = secure());
    let mut peer = first.accept();
    peer.say(&format!(
        "INFO {{\"tls_required\":true,\"connect_urls\":[\"127.0.0.1:{}\"]}}\r\n",
        liar.port
    ));
    let mut peer = peer.encrypt(&broker_of(&AUTHORITY));
    assert!(peer.line().starts_with("CONNECT "));
    peer.say(&format!("INFO {{\"connect_urls\":[\"127.0.0.1:{}\"]}}\r\n", told.port));
    assert_eq!(peer.line(), "PING");
    peer.say("PONG\r\n");
    assert_eq!(peer.line(), "PING");
    peer.say("PONG\r\n");
    client.up();
    drop(peer);
    client.link_down();
    drop(first.accept());
    let mut peer = told.accept();
    peer.say(INFO_TLS);
    let _peer = peer.encrypt(&broker_of(&AUTHORITY)).greet_encrypted();
    client.up();
    assert!(liar.accept_within(Duration::ZERO).is_none());
}

#[test]
fn a_broker_known_by_its_address_must_have_the_name_of_the_one_that_told_of_it() {
    let named = Wanted::new("x").name("localhost").signed_by(&AUTHORITY);
    let (first, told) = (Listener::start(), Listener::start());
    let client = Client::with(&format!("localhost:{}", first.port), |options| {
        options.credentials = secure();
    });
    let mut peer = first.accept();
    peer.say(INFO_TLS);
    let mut peer = peer.encrypt(&named);
    assert!(peer.line().starts_with("CONNECT "));
    peer.say(&format!("INFO {{\"connect_urls\":[\"127.0.0.1:{}\"]}}\r\nPONG\r\n", told.port));
    assert_eq!(peer.line(), "PING");
    assert_eq!(peer.line(), "PING");
    peer.say("PONG\r\n");
    client.up();
    drop(peer);
    client.link_down();
    drop(first.accept());
    let mut peer = told.accept();
    peer.say(INFO_TLS);
    let _peer = peer.encrypt(&named).greet_encrypted();
    let Link::Up { broker, .. } = client.link() else { panic!("not up") };
    assert_eq!(broker, told.url());
}

#[test]
fn nothing_secret_is_said_before_tls() {
    let listener = Listener::start();
    let client = Client::with(&listener.url(), |options| {
        options.credentials =
            Box::new(|| Ok(Credentials { token: Some(token()), ..credentials(&AUTHORITY, None) }));
    });
    // A broker that has none.
    let mut peer = listener.accept();
    peer.say(INFO);
    assert_eq!(peer.rest(), "");
    client.until_error(ErrorKind::Tls);
    let text = client.connection.last_error().unwrap().text;
    assert!(text.contains("it does not offer TLS: set TLS up there, or "), "{text}");

    // Somebody who says more than the broker did, in the clear.
    let mut peer = listener.accept();
    peer.say(&format!("{INFO_TLS}PONG\r\n"));
    assert_eq!(peer.rest(), "");
    client.until(|| {
        client.connection.last_error().is_some_and(|error| error.text.contains("in the clear"))
    });

    // One for whom it is a choice.
    let mut peer = listener.accept();
    peer.say("INFO {\"tls_available\":true}\r\n");
    let _peer = peer.encrypt(&broker_of(&AUTHORITY)).greet_encrypted();
    client.up();
}

#[test]
fn a_handshake_that_takes_too_long_is_given_up() {
    let listener = Listener::start();
    let client = Client::with(&listener.url(), |options| {
        options.credentials = secure();
        options.handshake_timeout = Duration::from_millis(300);
    });
    // One that says nothing.
    let mut peer = listener.accept();
    peer.say(INFO_TLS);
    peer.until_end();
    client.until_error(ErrorKind::Tls);
    let error = client.connection.last_error().unwrap();
    assert!(error.text.contains("it takes too long over the TLS handshake"), "{}", error.text);

    // One that agrees, and then says nothing.
    let mut peer = listener.accept();
    peer.say(INFO_TLS);
    let handshakes = client.errors(ErrorKind::Handshake) + client.errors(ErrorKind::Tls);
    if let Some(mut peer) = peer.try_encrypt(&broker_of(&AUTHORITY)) {
        peer.until_end();
    }
    client
        .until(|| client.errors(ErrorKind::Handshake) + client.errors(ErrorKind::Tls) > handshakes);
    client.stop();
}

#[test]
fn garbage_in_place_of_a_handshake_is_called_that() {
    let listener = Listener::start();
    let client = Client::with(&listener.url(), |options| options.credentials = secure());
    for garbage in ["-ERR 'Secure Connection - TLS Required'\r\n", "\u{16}\u{3}\u{3}xxxxxxxxxxxx"] {
        let before = client.errors(ErrorKind::Tls);
        let mut peer = listener.accept();
        peer.say(INFO_TLS);
        // Not along with INFO.
        let mut hello = [0; 5];
        peer.tcp.read_exact(&mut hello).unwrap();
        assert_eq!(hello[0], 22, "a handshake begins with its kind of record");
        peer.say(garbage);
        peer.until_end();
        client.until(|| client.errors(ErrorKind::Tls) > before);
    }
    let mut peer = listener.accept();
    peer.say(INFO_TLS);
    let _peer = peer.encrypt(&broker_of(&AUTHORITY)).greet_encrypted();
    client.up();
}

#[test]
fn an_abort_ends_a_handshake() {
    let listener = Listener::start();
    let client = Client::with(&listener.url(), |options| {
        options.credentials = secure();
        options.handshake_timeout = SOON * 10;
    });
    let mut peer = listener.accept();
    peer.say(INFO_TLS);
    let mut hello = [0; 5];
    peer.tcp.read_exact(&mut hello).unwrap();
    client.stop();
}

#[test]
fn a_peer_that_never_reads_stops_writers_in_tls_but_not_the_reading() {
    let (_listener, mut peer, client) = connected(SOON * 10);
    let (_subscription, messages) = client.subscribe("a");
    assert_eq!(peer.line(), "SUB a 1");
    check_reads_while_stuck(&client, &mut peer, &messages);
}

#[test]
fn a_peer_that_never_reads_ends_the_connection_in_tls() {
    let (_listener, _peer, client) = connected(Duration::from_millis(500));
    check_ends_stuck(&client);
}

fn connected(write_timeout: Duration) -> (Listener, Raw, Client) {
    let listener = Listener::start();
    let client = Client::with(&listener.url(), |options| {
        options.credentials = secure();
        options.write_timeout = write_timeout;
    });
    let mut peer = listener.accept();
    peer.say(INFO_TLS);
    let peer = peer.encrypt(&broker_of(&AUTHORITY)).greet_encrypted();
    client.up();
    (listener, peer, client)
}

#[test]
fn a_broker_whose_words_come_byte_by_byte_is_understood() {
    let listener = Listener::start();
    let client = Client::with(&listener.url(), |options| options.credentials = secure());
    let (_subscription, messages) = client.subscribe("a");
    let mut peer = listener.accept();
    peer.say(INFO_TLS);
    let drip = Drip(peer.tcp.try_clone().unwrap());
    let mut peer = peer.try_encrypt_over(drip, &broker_of(&AUTHORITY)).unwrap().greet_encrypted();
    client.up();
    for size in [0, 1, 2, 1_000, 20_000] {
        let body = "x".repeat(size);
        peer.say(&format!("MSG a 1 {size}\r\n{body}\r\n"));
        assert_eq!(messages.recv_timeout(SOON).unwrap().payload, body.as_bytes());
    }
    // The other way goes on, too.
    client.publish("b", b"hello").unwrap();
    while !peer.line().starts_with("PUB b 5") {}
    assert_eq!(peer.line(), "hello");
}

/// Every byte goes out by itself.
#[derive(Debug)]
struct Drip(TcpStream);

impl Write for Drip {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write(&bytes[..bytes.len().min(1)])
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Read for Drip {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.0.read(into)
    }
}

#[test]
fn a_complaint_before_the_end_of_tls_explains_it() {
    let listener = Listener::start();
    let client = Client::with(&listener.url(), |options| options.credentials = secure());
    let mut peer = listener.accept();
    peer.say(INFO_TLS);
    let mut peer = peer.encrypt(&broker_of(&AUTHORITY)).greet_encrypted();
    client.up();
    peer.say("-ERR 'Authentication Expired'\r\n");
    drop(peer);
    assert_eq!(client.link_down(), "it closed the connection: Authentication Expired");
    client.stop();
}

/// Files of a broker with TLS, in a folder of its own.
struct Site {
    dir: PathBuf,
}

impl Site {
    fn new() -> Site {
        let dir = env::temp_dir().join(format!("provisioner-tls-{:x}", fastrand::u64(..)));
        fs::create_dir_all(&dir).unwrap();
        let site = Site { dir };
        site.write("ca.pem", &AUTHORITY);
        site.write("broker.pem", &broker_of(&AUTHORITY));
        site
    }

    /// Certificate and key in one file.
    fn write(&self, name: &str, certified: &Certified) {
        let text = certified.certificate_pem() + &certified.key_pem();
        fs::write(self.dir.join(name), text).unwrap();
    }

    fn path(&self, name: &str) -> String {
        self.dir.join(name).to_str().unwrap().to_owned()
    }

    fn broker(&self, arguments: &[&str]) -> Broker {
        let file = self.path("broker.pem");
        let tls = ["--tls", "--tlscert", &file, "--tlskey", &file];
        Broker::start(&[&tls[..], arguments].concat())
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        // What is left is in the folder for temporary files.
        let _ = fs::remove_dir_all(&self.dir);
    }
}

fn broker_of(authority: &Certified) -> Certified {
    Wanted::new("broker").name("localhost").address("127.0.0.1").signed_by(authority)
}

fn secure() -> login::Source {
    secure_as(None)
}

fn secure_as(ours: Option<&Certified>) -> login::Source {
    let ours = ours.cloned();
    Box::new(move || Ok(credentials(&AUTHORITY, ours.as_ref())))
}

fn credentials(authority: &Certified, ours: Option<&Certified>) -> Credentials {
    let trust = Trust {
        authorities: vec![authority.certificate.clone()],
        source: "the test".to_owned(),
        legacy_names: false,
    };
    let identity = ours.map(|ours| Identity {
        certificates: vec![ours.certificate.clone()],
        key: ours.key.clone(),
    });
    let tls = Connector::new(Some(trust), identity.as_ref(), &Offer::default()).unwrap();
    Credentials { tls: Some(tls), ..Credentials::default() }
}

fn key() -> SigningKey {
    SigningKey::from_bytes(&[7; 32])
}

fn token() -> Token {
    Token {
        text: Secret::new("t.o.ken"),
        caller: "signer".to_owned(),
        sign: Box::new(|nonce| URL_SAFE_NO_PAD.encode(key().sign(nonce.as_bytes()).to_bytes())),
    }
}

impl Client {
    fn start_service(
        servers: &str,
        subject: &str,
        credentials: login::Source,
    ) -> (Client, Subscription) {
        let client = Client::with(servers, |options| options.credentials = credentials);
        client.up();
        let service = client.echo(subject);
        client.connection.flush(Instant::now() + SOON).unwrap();
        (client, service)
    }

    #[track_caller]
    fn link_down(&self) -> String {
        match self.link() {
            Link::Down { reason } => reason,
            up @ Link::Up { .. } => panic!("{up:?}"),
        }
    }

    /// Asks `service`, from several threads, each waiting for its answer before it asks again.
    fn ask(&self, threads: usize, requests: usize) {
        thread::scope(|scope| {
            for thread in 0..threads {
                scope.spawn(move || {
                    let inbox = format!("inbox.{thread}");
                    let (_subscription, answers) = self.subscribe(&inbox);
                    for number in 0..requests / threads {
                        let question = format!("{thread} {number}");
                        self.request("service", &inbox, question.as_bytes());
                        let answer = answers.recv_timeout(SOON).unwrap();
                        assert_eq!(String::from_utf8(answer.payload).unwrap(), question);
                    }
                });
            }
        });
    }
}

impl Raw {
    /// Goes on in TLS, as the broker.
    fn encrypt(self, certified: &Certified) -> Raw {
        self.try_encrypt(certified).expect("the handshake fails")
    }

    fn try_encrypt(self, certified: &Certified) -> Option<Raw> {
        let tcp = self.tcp.try_clone().unwrap();
        self.try_encrypt_over(tcp, certified)
    }

    fn try_encrypt_over(
        mut self,
        below: impl Stream + std::fmt::Debug + 'static,
        certified: &Certified,
    ) -> Option<Raw> {
        let mut acceptor = SslAcceptor::mozilla_intermediate_v5(SslMethod::tls_server()).unwrap();
        acceptor.set_certificate(&certified.certificate).unwrap();
        acceptor.set_private_key(&certified.key).unwrap();
        let stream = acceptor.build().accept(below).ok()?;
        let stream: Box<dyn Stream> = Box::new(stream);
        self.stream = BufReader::new(stream);
        Some(self)
    }

    fn greet_encrypted(mut self) -> Raw {
        self.greet_after_info();
        self
    }

    /// Reads and forgets everything to the end of the connection.
    fn until_end(&mut self) {
        let mut rest = Vec::new();
        if let Err(error) = self.tcp.read_to_end(&mut rest) {
            assert!(is_end(&error), "the connection goes on: {error}");
        }
    }
}
