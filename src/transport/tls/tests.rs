//! Two sessions that talk through memory, byte by byte where it matters.

use std::sync::LazyLock;

use openssl::ssl::SslVerifyMode;

use super::*;
use crate::pki::testing::{Certified, Wanted};
use crate::transport::wire::Op;

static AUTHORITY: LazyLock<Certified> =
    LazyLock::new(|| Wanted::new("our CA").authority().self_signed());
static BROKER: LazyLock<Certified> =
    LazyLock::new(|| Wanted::new("broker").name("broker.example.net").signed_by(&AUTHORITY));
static OURS: LazyLock<Certified> =
    LazyLock::new(|| Wanted::new("provisioner").signed_by(&AUTHORITY));

const HOST: &str = "broker.example.net";

#[test]
fn what_one_side_seals_the_other_opens() {
    for version in [SslVersion::TLS1_2, SslVersion::TLS1_3] {
        let mut broker = Broker::new(&BROKER);
        broker.only(version);
        let (mut session, mut server) = agree(&connector(), HOST, broker).unwrap();
        let mut outbox = b"before".to_vec();
        session.seal(&mut outbox, |frame| frame.extend_from_slice(b"PUB a 2\r\nhi\r\n")).unwrap();
        session.seal(&mut outbox, |frame| frame.extend_from_slice(b"PING\r\n")).unwrap();
        assert_eq!(server.open(&outbox[b"before".len()..]), b"PUB a 2\r\nhi\r\nPING\r\n");

        let bytes = server.seal(b"PING\r\n-ERR 'x'\r\n");
        let (mut parser, mut answers) = (Parser::default(), Vec::new());
        session.open(&bytes, &mut answers, &mut parser).unwrap();
        assert_eq!(parser.next(), Ok(Some(Op::Ping)));
        assert_eq!(parser.next(), Ok(Some(Op::Err(b"x"))));
        assert_eq!(parser.next(), Ok(None));
        assert!(answers.is_empty());
    }
}

#[test]
fn a_frame_of_any_size_goes_through() {
    let (mut session, mut server) = agree(&connector(), HOST, Broker::new(&BROKER)).unwrap();
    for size in [0, 1, RECORD_MAX - 1, RECORD_MAX, RECORD_MAX + 1, 3 << 20] {
        let frame = vec![b'x'; size];
        let mut outbox = Vec::new();
        session.seal(&mut outbox, |plain| plain.extend_from_slice(&frame)).unwrap();
        assert_eq!(server.open(&outbox), frame);
        assert!(session.plain.capacity() <= PLAIN_KEPT);
    }
}

#[test]
fn records_may_be_cut_anywhere() {
    let (mut session, mut server) = agree(&connector(), HOST, Broker::new(&BROKER)).unwrap();
    let (mut parser, mut answers) = (Parser::default(), Vec::new());
    let mut pings = |session: &mut Session, pieces: &[&[u8]]| {
        let mut count = 0;
        for piece in pieces {
            session.open(piece, &mut answers, &mut parser).unwrap();
            while parser.next().unwrap().is_some() {
                count += 1;
            }
        }
        count
    };
    let len = server.seal(b"PING\r\n").len() + server.seal(b"PING\r\n").len();
    // What was just sealed was lost on the way, which TLS doesn't forgive: a new pair.
    drop((session, server));
    (session, server) = agree(&connector(), HOST, Broker::new(&BROKER)).unwrap();
    for cut in 0..=len {
        let bytes = [server.seal(b"PING\r\n"), server.seal(b"PING\r\n")].concat();
        assert_eq!(bytes.len(), len);
        assert_eq!(pings(&mut session, &[&bytes[..cut], &bytes[cut..]]), 2, "cut at {cut}");
    }
    let bytes = server.seal(&b"PING\r\n".repeat(100));
    let bytes: Vec<_> = bytes.chunks(1).collect();
    assert_eq!(pings(&mut session, &bytes), 100);
}

#[test]
fn a_handshake_may_come_byte_by_byte() {
    let connector = connector();
    let mut server = Broker::new(&BROKER).accept();
    let mut handshake = connector.begin(HOST).unwrap();
    let mut outbox = Vec::new();
    let mut is_done = handshake.go_on(&[], &mut outbox).unwrap();
    for _ in 0..10 {
        let answer = server.handshake(&mem::take(&mut outbox));
        for byte in answer {
            // Not before its last byte, and not twice.
            assert!(!is_done);
            is_done = handshake.go_on(&[byte], &mut outbox).unwrap();
            if is_done {
                break;
            }
        }
        if is_done {
            return;
        }
    }
    panic!("no end");
}

#[test]
fn what_comes_with_the_end_of_the_handshake_is_not_lost() {
    let mut broker = Broker::new(&BROKER);
    broker.only(SslVersion::TLS1_2);
    let connector = connector();
    let mut server = broker.accept();
    let mut handshake = connector.begin(HOST).unwrap();
    let (mut outbox, mut bytes) = (Vec::new(), Vec::new());
    while !handshake.go_on(&bytes, &mut outbox).unwrap() {
        bytes = server.handshake(&mem::take(&mut outbox));
        if server.is_agreed() {
            bytes.extend(server.seal(b"PING\r\n"));
        }
    }
    let (mut session, mut parser) = (handshake.into_session(), Parser::default());
    session.open(&[], &mut Vec::new(), &mut parser).unwrap();
    assert_eq!(parser.next(), Ok(Some(Op::Ping)));
}

#[test]
fn a_broker_must_prove_its_name() {
    let broker = || Wanted::new(HOST).name("broker.example.net").name("*.wild.example.net");
    check_name("broker.example.net", broker(), Ok(()));
    check_name("BROKER.example.NET", broker(), Ok(()));
    check_name("broker.example.net.", broker(), Ok(()));
    check_name("a.wild.example.net", broker(), Ok(()));
    let other = "is for broker.example.net, *.wild.example.net, not for";
    check_name("other.example.net", broker(), Err(other));
    check_name("a.b.wild.example.net", broker(), Err(other));
    check_name("wild.example.net", broker(), Err(other));
    check_name("10.0.0.1", broker(), Err(other));
    check_name("1.example.net", Wanted::new("x").name("1*.example.net"), Err("not for 1.ex"));

    // Of any domain, also one without a dot, as in networks that have a top level of their own.
    let broker = || Wanted::new("x").name("*.lan");
    check_name("broker.lan", broker(), Ok(()));
    check_name("Broker.LAN", broker(), Ok(()));
    check_name("a.broker.lan", broker(), Err("is for *.lan, not for a.broker.lan"));
    check_name("lan", broker(), Err("is for *.lan, not for lan"));
    check_name("broker", Wanted::new("x").name("*"), Err("is for *, not for broker"));
    check_name("broker.lan", Wanted::new("x").name("*.*"), Err("not for broker.lan"));
    check_name("broker.lan", broker().valid(-7_200, -3_600), Err("expired on"));

    let broker = || Wanted::new("x").address("10.0.0.1").address("fe80::1");
    check_name("10.0.0.1", broker(), Ok(()));
    check_name("fe80::1%eth0", broker(), Ok(()));
    check_name("10.0.0.2", broker(), Err("is for 10.0.0.1, fe80::1, not for 10.0.0.2"));
    // An address is no name.
    let broker = Wanted::new("x").name("10.0.0.1");
    let other = "is for 10.0.0.1 (as a name, not as an address), not for 10.0.0.1";
    check_name("10.0.0.1", broker, Err(other));
}

#[test]
fn a_common_name_counts_only_for_legacy_certificates_and_where_it_is_wanted() {
    let bare = || Wanted::new(HOST);
    check_name(HOST, bare(), Err("its common name does not count"));
    check_legacy(HOST, bare(), Ok(()));
    check_legacy("Broker.Example.Net", bare(), Ok(()));
    check_legacy("10.0.0.1", Wanted::new("10.0.0.1"), Ok(()));
    check_legacy("other.example.net", bare(), Err("is not for other.example.net"));
    // With alternative names of any kind only these count.
    check_legacy(HOST, bare().name("other.example.net"), Err("is for other.example.net"));
    check_legacy(HOST, bare().address("10.0.0.1"), Err("is for 10.0.0.1"));
    // The rest of the rules is not relaxed.
    check_legacy(HOST, bare().valid(-7_200, -3_600), Err("expired on"));
}

#[test]
fn a_broker_must_have_a_valid_certificate_of_our_authority() {
    let good = || Wanted::new("b").name(HOST);
    let check = |certified: &Certified, expected: &str| {
        let ending = agree(&connector(), HOST, Broker::new(certified)).unwrap_err();
        assert_eq!(ending.kind, ErrorKind::Tls);
        assert!(ending.reason.contains(expected), "{}", ending.reason);
    };
    check(&good().valid(-7_200, -3_600).signed_by(&AUTHORITY), "its certificate (b) expired on");
    check(&good().valid(3_600, 7_200).signed_by(&AUTHORITY), "(b) is not valid before");
    let vouches = "which the test does not vouch for";
    check(&good().self_signed(), vouches);
    let stranger = Wanted::new("their CA").authority().self_signed();
    check(&good().signed_by(&stranger), "was issued by their CA, which the test");
    // One of the same name.
    let impostor = Wanted::new("our CA").authority().self_signed();
    check(&good().signed_by(&impostor), "its certificate (b)");
    // Somebody with a certificate of ours is no authority.
    check(&good().signed_by(&BROKER), "which the test does not vouch for");
}

#[test]
fn an_authority_that_expired_hides_its_successor_nowhere() {
    let root = Wanted::new("root").authority().self_signed();
    let between = || Wanted::new("between").authority();
    let new = between().signed_by(&root);
    let old = between().key(new.key.clone()).valid(-7_200, -3_600).signed_by(&root);
    let broker = Wanted::new("b").name(HOST).signed_by(&new);
    let check = |trusted: &[&Certified], sent: &[&Certified]| {
        let authorities = trusted.iter().map(|one| one.certificate.clone()).collect();
        let trust = Trust { authorities, ..trust(&root.certificate, false) };
        let connector = Connector::new(Some(trust), None, &Offer::default()).unwrap();
        let mut server = Broker::new(&broker);
        for one in sent {
            server.context.add_extra_chain_cert(one.certificate.clone()).unwrap();
        }
        agree(&connector, HOST, server).map(drop).map_err(|ending| ending.reason)
    };
    let expired = "the certificate of its authority (between) expired on";
    assert!(check(&[&root], &[&old]).unwrap_err().starts_with(expired));
    assert!(check(&[&old], &[]).unwrap_err().starts_with(expired));
    for (trusted, sent) in [
        (vec![&root], vec![&old, &new]),
        (vec![&root], vec![&new, &old]),
        (vec![&root, &new], vec![&old]),
        (vec![&old, &new], vec![]),
        (vec![&new, &old], vec![]),
        (vec![&old, &root], vec![&new]),
    ] {
        assert_eq!(check(&trusted, &sent), Ok(()), "{} {}", trusted.len(), sent.len());
    }
}

#[test]
fn an_authority_needs_nobody_above_it() {
    let above = Wanted::new("above").authority().self_signed();
    let between = Wanted::new("between").authority().signed_by(&above);
    let broker = Wanted::new("b").name(HOST).signed_by(&between);
    let trust = trust(&between.certificate, false);
    let connector = Connector::new(Some(trust), None, &Offer::default()).unwrap();
    agree(&connector, HOST, Broker::new(&broker)).unwrap();
}

#[test]
fn without_an_authority_nobody_is_verified() {
    let connector = Connector::new(None, None, &Offer::default()).unwrap();
    let stranger = Wanted::new("x").valid(-7_200, -3_600).self_signed();
    agree(&connector, HOST, Broker::new(&stranger)).unwrap();
}

#[test]
fn a_broker_that_wants_a_certificate_gets_ours() {
    for version in [SslVersion::TLS1_2, SslVersion::TLS1_3] {
        let mut broker = Broker::new(&BROKER);
        broker.only(version);
        broker.demand(&AUTHORITY);
        let (mut session, mut server) = agree(&connector_of(&OURS), HOST, broker).unwrap();
        let mut outbox = Vec::new();
        session.seal(&mut outbox, |plain| plain.extend_from_slice(b"hi")).unwrap();
        assert_eq!(server.open(&outbox), b"hi");
        let shown = server.stream.ssl().peer_certificate().unwrap();
        assert_eq!(common_name(shown.subject_name()).unwrap(), "provisioner");
    }
}

#[test]
fn a_broker_that_refuses_our_certificate_is_understood() {
    let stranger = Wanted::new("x").self_signed();
    for version in [SslVersion::TLS1_2, SslVersion::TLS1_3] {
        let missing = match version {
            // OpenSSL's way; brokers do it right.
            SslVersion::TLS1_2 => "it accepts none of our cipher suites and curves, or misses",
            _ => "it demands a certificate, and we have none: ",
        };
        check_refusal(&connector(), version, missing);
        check_refusal(&connector_of(&stranger), version, "it refuses our certificate: ");
    }
}

#[test]
fn only_what_is_configured_is_offered() {
    let mut offer = Offer::default();
    let unknown = offer.restrict_suites(&[
        "TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384",
        "TLS_AES_128_GCM_SHA256",
        "TLS_RSA_WITH_RC4_128_SHA",
    ]);
    assert_eq!(unknown, ["TLS_RSA_WITH_RC4_128_SHA"]);
    assert_eq!(offer.restrict_curves(&["CurveP384", "P-256"]), ["P-256"]);
    assert!(offer.has_curves());
    let trust = || trust(&AUTHORITY.certificate, false);
    let connector = Connector::new(Some(trust()), None, &offer).unwrap();
    // A certificate on a curve would need that curve.
    let certified = Wanted::new("b").name(HOST).rsa().signed_by(&AUTHORITY);
    let mut broker = Broker::new(&certified);
    broker.only(SslVersion::TLS1_2);
    let (session, _) = agree(&connector, HOST, broker).unwrap();
    let suite = session.stream.ssl().current_cipher().unwrap().name();
    assert_eq!(suite, "ECDHE-RSA-AES256-GCM-SHA384");

    let mut broker = Broker::new(&certified);
    broker.context.set_groups_list("P-256").unwrap();
    assert!(agree(&connector, HOST, broker).is_err());

    // Names of TLS 1.3 alone leave nothing of TLS 1.2.
    assert!(offer.restrict_suites(&["TLS_AES_128_GCM_SHA256"]).is_empty());
    let connector = Connector::new(Some(trust()), None, &offer).unwrap();
    let mut broker = Broker::new(&certified);
    broker.only(SslVersion::TLS1_2);
    assert!(agree(&connector, HOST, broker).is_err());
    agree(&connector, HOST, Broker::new(&certified)).unwrap();
}

#[test]
fn every_suite_and_curve_on_our_lists_is_known_to_openssl() {
    for (name, _) in SUITES.into_iter().chain(FURTHER_SUITES) {
        let mut offer = Offer::default();
        assert!(offer.restrict_suites(&[name]).is_empty(), "{name}");
        Connector::new(None, None, &offer).unwrap_or_else(|error| panic!("{name}: {error}"));
    }
    for (name, _) in CURVES {
        let mut offer = Offer::default();
        assert!(offer.restrict_curves(&[name]).is_empty(), "{name}");
        Connector::new(None, None, &offer).unwrap_or_else(|error| panic!("{name}: {error}"));
    }
}

#[test]
fn older_versions_are_not_spoken() {
    let mut broker = Broker::new(&BROKER);
    broker.context.set_min_proto_version(Some(SslVersion::TLS1)).unwrap();
    broker.context.set_security_level(0);
    broker.context.set_max_proto_version(Some(SslVersion::TLS1_1)).unwrap();
    let ending = agree(&connector(), HOST, broker).unwrap_err();
    assert!(ending.reason.contains("version"), "{}", ending.reason);
}

#[test]
fn what_is_no_tls_is_called_that() {
    for garbage in ["HTTP/1.1 400 Bad Request\r\n\r\n", "-ERR 'x'\r\n\r\n\r\n", "\0\0\0\0\0\0\0"] {
        let mut handshake = connector().begin(HOST).unwrap();
        handshake.go_on(&[], &mut Vec::new()).unwrap();
        let ending = handshake.go_on(garbage.as_bytes(), &mut Vec::new()).unwrap_err();
        assert_eq!(ending.kind, ErrorKind::Tls);
        assert!(ending.reason.contains("not TLS"), "{garbage:?}: {}", ending.reason);
    }
}

#[test]
fn damage_ends_the_session_and_what_came_before_it_counts() {
    let (mut session, mut server) = agree(&connector(), HOST, Broker::new(&BROKER)).unwrap();
    let mut bytes = server.seal(b"PING\r\n");
    let len = bytes.len();
    bytes.extend(server.seal(b"PONG\r\n"));
    bytes[len + 7] ^= 1;
    let (mut parser, mut answers) = (Parser::default(), Vec::new());
    let ending = session.open(&bytes, &mut answers, &mut parser).unwrap_err();
    assert_eq!(ending.kind, ErrorKind::Tls);
    assert_eq!(parser.next(), Ok(Some(Op::Ping)));
    assert_eq!(parser.next(), Ok(None));
    // It stays that way.
    let bytes = server.seal(b"PONG\r\n");
    assert!(session.open(&bytes, &mut answers, &mut parser).is_err());
    assert!(session.seal(&mut answers, |plain| plain.push(b'x')).is_err());
}

#[test]
fn a_session_that_is_closed_says_so_after_its_last_words() {
    let (mut session, mut server) = agree(&connector(), HOST, Broker::new(&BROKER)).unwrap();
    let mut bytes = server.seal(b"-ERR 'Authorization Violation'\r\n");
    server.stream.shutdown().unwrap();
    bytes.append(&mut server.stream.get_mut().outgoing);
    let mut parser = Parser::default();
    let ending = session.open(&bytes, &mut Vec::new(), &mut parser).unwrap_err();
    assert_eq!(ending, Ending::new(ErrorKind::Lost, "it closed the connection"));
    assert_eq!(parser.next(), Ok(Some(Op::Err(b"Authorization Violation"))));
}

#[test]
fn a_record_cannot_pass_for_one_of_another_kind() {
    let mut broker = Broker::new(&BROKER);
    broker.only(SslVersion::TLS1_2);
    let (mut session, mut server) = agree(&connector(), HOST, broker).unwrap();
    let mut bytes = server.seal(b"PING\r\n");
    bytes[0] = 22;
    let mut parser = Parser::default();
    assert!(session.open(&bytes, &mut Vec::new(), &mut parser).is_err());
    assert_eq!(parser.next(), Ok(None));
}

#[test]
fn never_panics_on_damaged_records() {
    let mut random = fastrand::Rng::with_seed(7);
    for _ in 0..200 {
        let (mut session, mut server) = agree(&connector(), HOST, Broker::new(&BROKER)).unwrap();
        let mut parser = Parser::default();
        for _ in 0..5 {
            let mut bytes = server.seal(b"PING\r\n");
            let at = random.usize(..bytes.len());
            bytes[at] = random.u8(..);
            // Either way, it ends.
            let _ = session.open(&bytes, &mut Vec::new(), &mut parser);
        }
    }
}

#[test]
fn debug_output_shows_no_key() {
    let identity = Identity { certificates: Vec::new(), key: OURS.key.clone() };
    assert_eq!(format!("{identity:?}"), "Identity { certificates: [], .. }");
    let connector = format!("{:?}", connector_of(&OURS));
    assert_eq!(connector, "Connector { verifies: true, has_identity: true, .. }");
}

fn trust(authority: &X509, legacy_names: bool) -> Trust {
    Trust { authorities: vec![authority.clone()], source: "the test".to_owned(), legacy_names }
}

fn connector() -> Connector {
    let trust = trust(&AUTHORITY.certificate, false);
    Connector::new(Some(trust), None, &Offer::default()).unwrap()
}

fn connector_of(certified: &Certified) -> Connector {
    let trust = trust(&AUTHORITY.certificate, false);
    let certificates = vec![certified.certificate.clone()];
    let identity = Identity { certificates, key: certified.key.clone() };
    Connector::new(Some(trust), Some(&identity), &Offer::default()).unwrap()
}

#[track_caller]
fn check_name(host: &str, wanted: Wanted, expected: Result<(), &str>) {
    check_trust(host, wanted, false, expected);
}

#[track_caller]
fn check_legacy(host: &str, wanted: Wanted, expected: Result<(), &str>) {
    check_trust(host, wanted, true, expected);
}

#[track_caller]
fn check_trust(host: &str, wanted: Wanted, legacy: bool, expected: Result<(), &str>) {
    let broker = wanted.signed_by(&AUTHORITY);
    let trust = trust(&AUTHORITY.certificate, legacy);
    let connector = Connector::new(Some(trust), None, &Offer::default()).unwrap();
    match (agree(&connector, host, Broker::new(&broker)), expected) {
        (Ok(_), Ok(())) => {}
        (Err(ending), Err(expected)) => {
            assert!(ending.reason.contains(expected), "{host}: {}", ending.reason);
        }
        (Ok(_), Err(_)) => panic!("{host} is accepted"),
        (Err(ending), Ok(())) => panic!("{host}: {}", ending.reason),
    }
}

#[track_caller]
fn check_refusal(connector: &Connector, version: SslVersion, expected: &str) {
    let mut broker = Broker::new(&BROKER);
    broker.only(version);
    broker.demand(&AUTHORITY);
    // With TLS 1.3 the refusal comes after the handshake.
    let ending = match agree(connector, HOST, broker) {
        Err(ending) => ending,
        Ok((mut session, mut server)) => {
            let bytes = server.handshake(&[]);
            session.open(&bytes, &mut Vec::new(), &mut Parser::default()).unwrap_err()
        }
    };
    assert_eq!(ending.kind, ErrorKind::Tls);
    assert!(ending.reason.starts_with(expected), "{}", ending.reason);
}

/// Agrees on a session, or says what our side has against it.
fn agree(connector: &Connector, host: &str, broker: Broker) -> Result<(Session, Server), Ending> {
    let mut server = broker.accept();
    let mut handshake = connector.begin(host)?;
    let (mut outbox, mut bytes) = (Vec::new(), Vec::new());
    loop {
        let is_done = handshake.go_on(&bytes, &mut outbox)?;
        bytes = server.handshake(&mem::take(&mut outbox));
        if is_done {
            let mut session = handshake.into_session();
            if server.is_agreed() {
                // Tickets.
                session.open(&bytes, &mut Vec::new(), &mut Parser::default())?;
            } else {
                server.stream.get_mut().outgoing = bytes;
            }
            return Ok((session, server));
        }
    }
}

/// A broker's side, before anybody connects.
struct Broker {
    context: SslContextBuilder,
}

impl Broker {
    fn new(certified: &Certified) -> Broker {
        let mut context = SslContextBuilder::new(SslMethod::tls_server()).unwrap();
        context.set_certificate(&certified.certificate).unwrap();
        context.set_private_key(&certified.key).unwrap();
        Broker { context }
    }

    fn only(&mut self, version: SslVersion) {
        self.context.set_min_proto_version(Some(version)).unwrap();
        self.context.set_max_proto_version(Some(version)).unwrap();
    }

    fn demand(&mut self, authority: &Certified) {
        self.context.set_verify(SslVerifyMode::PEER | SslVerifyMode::FAIL_IF_NO_PEER_CERT);
        let mut store = X509StoreBuilder::new().unwrap();
        store.add_cert(authority.certificate.clone()).unwrap();
        self.context.set_cert_store(store.build());
    }

    fn accept(self) -> Server {
        let mut ssl = Ssl::new(&self.context.build()).unwrap();
        ssl.set_accept_state();
        Server { stream: SslStream::new(ssl, Memory::default()).unwrap() }
    }
}

/// A broker's side of one session.
#[derive(Debug)]
struct Server {
    stream: SslStream<Memory>,
}

impl Server {
    fn handshake(&mut self, bytes: &[u8]) -> Vec<u8> {
        self.stream.get_mut().incoming.put(bytes);
        // If it fails, what it has to say about it goes to the client.
        let _ = self.stream.do_handshake();
        mem::take(&mut self.stream.get_mut().outgoing)
    }

    fn is_agreed(&self) -> bool {
        self.stream.ssl().is_init_finished()
    }

    fn seal(&mut self, plain: &[u8]) -> Vec<u8> {
        self.stream.write_all(plain).unwrap();
        mem::take(&mut self.stream.get_mut().outgoing)
    }

    fn open(&mut self, bytes: &[u8]) -> Vec<u8> {
        self.stream.get_mut().incoming.put(bytes);
        let (mut plain, mut piece) = (Vec::new(), [0; RECORD_MAX]);
        while let Ok(len) = self.stream.ssl_read(&mut piece) {
            plain.extend_from_slice(&piece[..len]);
        }
        plain
    }
}
