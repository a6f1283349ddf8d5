//! Against a real `nats-server`, and against listeners that follow a script.

mod secure;

use std::io::{self, BufRead, BufReader, ErrorKind as IoKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, bounded, never};
use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{AddressFamily, SocketType, bind, listen, socket};

use super::{Connection, Options, StartError};
use crate::clock::BootTime;
use crate::dns::{self, Servers};
use crate::metrics::Metrics;
use crate::protocol::subject::{Pattern, Subject};
use crate::secret::Secret;
use crate::shutdown::Never;
use crate::transport::address::ServerAddress;
use crate::transport::backoff::Backoff;
use crate::transport::dial::{self, Slot};
use crate::transport::errors::ErrorKind;
use crate::transport::login::{self, Credentials};
use crate::transport::servers::Brokers;
use crate::transport::srv::Srv;
use crate::transport::{Handler, Link, Message, Publish, PublishError, Subscription, Transport};

/// For what must happen; a test that waits this long has failed.
const SOON: Duration = Duration::from_secs(20);
const INFO: &str = "INFO {\"headers\":true,\"max_payload\":1048576}\r\n";

// With a real broker.

#[test]
fn delivers_what_matches_with_reply_and_headers() {
    let broker = Broker::start(&[]);
    let client = Client::start(&broker.url());
    let (_subscription, messages) = client.subscribe("a.*.c");
    client.up();

    client.publish("a.x.d", b"not for us").unwrap();
    client
        .connection
        .publish(&Publish {
            reply: Some(&subject("re.ply")),
            headers: &[("nAmE", "value"), ("Second", "a:b")],
            ..Publish::new(&subject("a.b.c"), b"body")
        })
        .unwrap();
    let message = messages.recv_timeout(SOON).unwrap();
    assert_eq!(message.subject, "a.b.c");
    assert_eq!(message.reply.as_deref(), Some("re.ply"));
    assert_eq!(message.status, None);
    let headers = [("nAmE", "value"), ("Second", "a:b")].map(|(n, v)| (n.to_owned(), v.to_owned()));
    assert_eq!(message.headers, headers);
    assert_eq!(message.payload, b"body");
    client.connection.flush(Instant::now() + SOON).unwrap();
    assert!(messages.is_empty());
}

#[test]
fn a_broker_says_at_once_when_nobody_listens() {
    let broker = Broker::start(&[]);
    let client = Client::start(&broker.url());
    let (_subscription, messages) = client.subscribe("inbox.*");
    client.up();

    client.request("nobody.there", "inbox.7", b"body");
    let message = messages.recv_timeout(SOON).unwrap();
    assert_eq!((message.subject.as_str(), message.status), ("inbox.7", Some(503)));
    assert!(message.payload.is_empty());
}

#[test]
fn resolves_names() {
    let broker = Broker::start(&[]);
    let client = Client::start(&format!("localhost:{}", broker.port));
    let Link::Up { broker: url, first } = client.link() else { panic!("not up") };
    assert_eq!(url, format!("nats://localhost:{}", broker.port));
    assert!(first);
    assert_eq!(&*client.connection.broker_url(), url);
    client.stop();
    assert_eq!(&*client.connection.broker_url(), "");
}

#[test]
fn a_subscription_ends_with_its_guard() {
    let broker = Broker::start(&[]);
    let client = Client::start(&broker.url());
    client.up();
    let (gone, dropped) = client.subscribe("a");
    let (_kept, messages) = client.subscribe("a");
    drop(gone);
    client.publish("a", b"1").unwrap();
    assert_eq!(messages.recv_timeout(SOON).unwrap().payload, b"1");
    assert!(dropped.is_empty());
}

#[test]
fn a_handler_may_end_its_own_subscription() {
    let broker = Broker::start(&[]);
    let client = Client::start(&broker.url());
    let slot = Arc::new(Mutex::new(None));
    let (sender, called) = bounded(10);
    let handler: Handler = Arc::new({
        let slot = Arc::clone(&slot);
        move |_| {
            drop(slot.lock().take());
            sender.send(()).unwrap();
        }
    });
    *slot.lock() = Some(client.connection.subscribe(&pattern("a"), handler));
    client.up();
    client.publish("a", b"").unwrap();
    called.recv_timeout(SOON).unwrap();
    client.publish("a", b"").unwrap();
    client.connection.flush(Instant::now() + SOON).unwrap();
    assert!(called.is_empty());
}

#[test]
fn a_killed_broker_is_found_again_with_all_subscriptions() {
    let mut broker = Broker::start(&[]);
    let client = Client::start(&broker.url());
    let (_first, before) = client.subscribe("before");
    client.up();
    broker.kill();
    let Link::Down { .. } = client.link() else { panic!("not down") };
    assert_eq!(client.publish("before", b""), Err(PublishError::Disconnected));
    assert_eq!(client.connection.flush(Instant::now() + SOON), Err(PublishError::Disconnected));
    // Made while there is no connection.
    let (_second, meanwhile) = client.subscribe("meanwhile");
    let (third, dropped) = client.subscribe("dropped");
    drop(third);

    broker.restart();
    let Link::Up { first: false, .. } = client.link() else { panic!("not up again") };
    for subject in ["dropped", "before", "meanwhile"] {
        client.publish(subject, b"x").unwrap();
    }
    before.recv_timeout(SOON).unwrap();
    meanwhile.recv_timeout(SOON).unwrap();
    assert!(dropped.is_empty());
    assert_eq!(client.metrics.broker_reconnects.get(), 1);
    assert_eq!(client.metrics.broker_connected.get(), 1);
    assert!(client.connection.last_error().is_none());
}

#[test]
fn a_message_above_the_brokers_limit_is_refused() {
    let broker = Broker::start(&[]);
    let client = Client::start(&broker.url());
    client.up();
    let max = client.connection.max_payload();
    assert_eq!(max, 1_048_576);
    let (_subscription, messages) = client.subscribe("a");
    assert_eq!(
        client.publish("a", &vec![b'x'; max + 1]),
        Err(PublishError::TooLarge { size: max + 1, max })
    );
    client.publish("a", &vec![b'x'; max]).unwrap();
    assert_eq!(messages.recv_timeout(SOON).unwrap().payload.len(), max);
}

#[test]
fn a_header_that_leaves_its_line_is_refused() {
    let broker = Broker::start(&[]);
    let client = Client::start(&broker.url());
    client.up();
    let refused = client.connection.publish(&Publish {
        headers: &[("a", "b\r\n\r\nPUB x 0")],
        ..Publish::new(&subject("a"), b"")
    });
    assert_eq!(refused, Err(PublishError::BadHeader));
}

#[test]
fn a_bad_header_spoils_its_message_only() {
    let broker = Broker::start(&[]);
    let client = Client::start(&broker.url());
    let (_subscription, messages) = client.subscribe("a");
    client.up();

    let mut other = Raw::connect(broker.port);
    other.say("CONNECT {\"verbose\":false,\"headers\":true}\r\n");
    other.say("HPUB a 22 24\r\nNATS/1.0\r\nno colon\r\n\r\nhi\r\nPUB a 2\r\nho\r\n");
    let message = messages.recv_timeout(SOON).unwrap();
    assert_eq!((message.payload.as_slice(), message.headers.len()), (&b"hi"[..], 0));
    assert_eq!(messages.recv_timeout(SOON).unwrap().payload, b"ho");
    assert_eq!(client.errors(ErrorKind::BadHeader), 1);
    assert!(client.links.is_empty());
}

#[test]
fn a_subject_that_is_no_text_spoils_nothing() {
    let broker = Broker::start(&[]);
    let client = Client::start(&broker.url());
    let (_subscription, messages) = client.subscribe("a.>");
    client.up();
    let mut other = Raw::connect(broker.port);
    other.say("CONNECT {\"verbose\":false}\r\n");
    other.say_bytes(b"PUB a.\xff\xfe \x01reply 2\r\nhi\r\n");
    let message = messages.recv_timeout(SOON).unwrap();
    assert_eq!(message.subject, "a.\u{fffd}\u{fffd}");
    assert!(client.links.is_empty());
}

#[test]
fn threads_publish_side_by_side_and_each_one_in_order() {
    let broker = Broker::start(&[]);
    let client = Client::start(&broker.url());
    publish_side_by_side(&client, 4, 20_000);
}

fn publish_side_by_side(client: &Client, threads: usize, messages: u32) {
    let (done, all) = bounded(1);
    let next = Arc::new(Mutex::new(vec![0; threads]));
    let handler: Handler = Arc::new({
        let next = Arc::clone(&next);
        move |message: Message| {
            let thread: usize = message.subject.strip_prefix("t.").unwrap().parse().unwrap();
            let number = std::str::from_utf8(&message.payload).unwrap().parse();
            let mut next = next.lock();
            // A message out of order is never counted, so the test fails.
            if number == Ok(next[thread]) {
                next[thread] += 1;
            }
            if next.iter().all(|next| *next == messages) {
                done.send(()).unwrap();
            }
        }
    });
    let _subscription = client.connection.subscribe(&pattern("t.*"), handler);
    client.up();
    thread::scope(|scope| {
        for thread in 0..threads {
            scope.spawn(move || {
                for number in 0..messages {
                    client.publish(&format!("t.{thread}"), number.to_string().as_bytes()).unwrap();
                }
            });
        }
    });
    client.connection.flush(Instant::now() + SOON).unwrap();
    all.recv_timeout(SOON).unwrap_or_else(|_| panic!("got {:?}", next.lock()));
}

#[test]
fn requests_are_answered_one_after_the_other() {
    const TRIPS: u32 = 1_000;
    let broker = Broker::start(&[]);
    let (asker, answerer) = (Client::start(&broker.url()), Client::start(&broker.url()));
    asker.up();
    answerer.up();
    let _service = answerer.echo("service");
    let (_inbox, answers) = asker.subscribe("inbox");
    answerer.connection.flush(Instant::now() + SOON).unwrap();
    for number in 0..TRIPS {
        let question = number.to_string();
        asker.request("service", "inbox", question.as_bytes());
        assert_eq!(answers.recv_timeout(SOON).unwrap().payload, question.as_bytes());
    }
}

#[test]
fn a_wrong_password_is_tried_again_until_it_is_right() {
    let mut broker = Broker::start(&["--user", "provisioner", "--pass", "other"]);
    let client = Client::with(&broker.url(), |options| {
        options.credentials = user("provisioner", "s3cret");
    });
    client.until_error(ErrorKind::Authorization);
    let error = client.connection.last_error().unwrap();
    assert!(error.text.contains("Authorization Violation"), "{error:?}");
    assert!(!format!("{error:?}").contains("s3cret"));

    broker.kill();
    broker.arguments = ["--user", "provisioner", "--pass", "s3cret"].map(str::to_owned).to_vec();
    broker.restart();
    client.up();
    assert!(client.connection.last_error().is_none());
}

#[test]
fn draining_sends_what_was_published_and_closes_for_good() {
    let broker = Broker::start(&[]);
    let client = Client::start(&broker.url());
    let other = Client::start(&broker.url());
    client.up();
    other.up();
    let (_subscription, messages) = other.subscribe("a");
    other.connection.flush(Instant::now() + SOON).unwrap();
    for _ in 0..100 {
        client.publish("a", &[b'x'; 10_000]).unwrap();
    }
    client.connection.drain(Instant::now() + SOON, &never());
    client.connection.join();
    assert_eq!(client.publish("a", b""), Err(PublishError::Closed));
    for _ in 0..100 {
        messages.recv_timeout(SOON).unwrap();
    }
    let Link::Down { .. } = client.link() else { panic!("not down") };
}

// Against a script.

#[test]
fn greets_as_the_protocol_demands_and_subscribes_before_it_is_up() {
    let listener = Listener::start();
    let client = Client::start(&listener.url());
    let (_subscription, _messages) = client.subscribe("a.b");
    let mut peer = listener.accept();
    peer.say(INFO);
    let connect = peer.line();
    let json: serde_json::Value =
        serde_json::from_str(connect.strip_prefix("CONNECT ").unwrap()).unwrap();
    for (key, value) in [("verbose", false), ("pedantic", false), ("tls_required", false)] {
        assert_eq!(json[key], value, "{key}");
    }
    for key in ["headers", "no_responders"] {
        assert_eq!(json[key], true, "{key}");
    }
    assert_eq!(json["protocol"], 1);
    assert_eq!(json["name"], "test");
    assert!(json.get("user").is_none());
    assert_eq!(peer.line(), "PING");
    // A second INFO, as Choria's broker sends it, and then everything in two pieces.
    peer.say("INFO {\"connect_info\":true,\"max_payload\":4096}\r\nPO");
    peer.say("NG\r\n");
    assert_eq!(peer.line(), "SUB a.b 1");
    assert_eq!(peer.line(), "PING");
    assert!(client.links.is_empty(), "up before the subscriptions are in place");
    assert_eq!(client.publish("a", b""), Err(PublishError::Disconnected));
    peer.say("PONG\r\n");
    client.up();
    assert_eq!(client.connection.max_payload(), 4096);
}

#[test]
fn answers_a_ping_without_anything_else_to_do() {
    let (_listener, mut peer, client) = Client::connected();
    peer.say("PING\r\n");
    assert_eq!(peer.line(), "PONG");
    client.stop();
    assert_eq!(peer.rest(), "");
    assert_eq!(client.link(), Link::Down { reason: "closed by us".to_owned() });
    assert!(client.connection.last_error().is_none());
}

#[test]
fn a_complaint_is_counted_and_kept_and_ends_nothing() {
    let (_listener, mut peer, client) = Client::connected();
    peer.say("-ERR 'Permissions Violation for Publish to \"authorization.\x07x\"'\r\nPING\r\n");
    assert_eq!(peer.line(), "PONG");
    let error = client.connection.last_error().unwrap();
    assert_eq!(error.kind, ErrorKind::Permissions);
    assert!(error.text.contains("\"authorization.?x\""), "{}", error.text);
    assert_eq!(client.errors(ErrorKind::Permissions), 1);
    assert!(client.links.is_empty());
}

#[test]
fn a_complaint_before_the_end_explains_it() {
    let (listener, mut peer, client) = Client::connected();
    peer.say("-ERR 'Authentication Expired'\r\n");
    drop(peer);
    let Link::Down { reason } = client.link() else { panic!("not down") };
    assert_eq!(reason, "it closed the connection: Authentication Expired");
    assert_eq!(client.errors(ErrorKind::Authorization), 1);
    let _peer = listener.accept().greet();
    client.up();
    // What ended an earlier connection says nothing about this one.
    assert!(client.connection.last_error().is_none());
}

#[test]
fn a_peer_that_never_reads_stops_writers_but_not_the_reading() {
    let (_listener, mut peer, client) = Client::connected_with(|options| {
        options.write_timeout = SOON * 10;
    });
    let (_subscription, messages) = client.subscribe("a");
    assert_eq!(peer.line(), "SUB a 1");
    check_reads_while_stuck(&client, &mut peer, &messages);
}

#[test]
fn a_peer_that_never_reads_ends_the_connection() {
    let (listener, mut peer, client) = Client::connected_with(|options| {
        options.write_timeout = Duration::from_millis(500);
    });
    let (_subscription, _messages) = client.subscribe("a");
    assert_eq!(peer.line(), "SUB a 1");
    check_ends_stuck(&client);
    let _peer = listener.greet_until_up(&client);
}

/// Messages come through while nothing can be sent, and some questions whose answers can't.
#[track_caller]
fn check_reads_while_stuck(client: &Client, peer: &mut Raw, messages: &Receiver<Message>) {
    let published = AtomicUsize::new(0);
    thread::scope(|scope| {
        // Several, so that some wait for the wire while one writes.
        let writers = fill_the_wire(scope, client, &published, 3);
        client.until_stuck(&published);
        for n in 0..200 {
            let question = if n < 100 { "PING\r\n" } else { "" };
            peer.say(&format!("{question}MSG a 1 2\r\nhi\r\n"));
            assert_eq!(messages.recv_timeout(SOON).unwrap().payload, b"hi");
        }
        client.stop();
        for writer in writers {
            assert_eq!(writer.join().unwrap(), PublishError::Closed);
        }
    });
}

/// The write time-out ends the connection.
#[track_caller]
fn check_ends_stuck(client: &Client) {
    let published = AtomicUsize::new(0);
    thread::scope(|scope| {
        for writer in fill_the_wire(scope, client, &published, 3) {
            assert_eq!(writer.join().unwrap(), PublishError::Disconnected);
        }
    });
    let Link::Down { reason } = client.link() else { panic!("not down") };
    assert_eq!(reason, "writing failed: the broker takes nothing");
    assert_eq!(client.errors(ErrorKind::Write), 1);
}

/// Threads that publish until they can't any more, and count.
fn fill_the_wire<'scope>(
    scope: &'scope thread::Scope<'scope, '_>,
    client: &'scope Client,
    published: &'scope AtomicUsize,
    threads: usize,
) -> Vec<thread::ScopedJoinHandle<'scope, PublishError>> {
    let publish = move || {
        let body = vec![b'x'; 100_000];
        loop {
            match client.publish("b", &body) {
                Ok(()) => published.fetch_add(1, Ordering::Relaxed),
                Err(error) => return error,
            };
        }
    };
    (0..threads).map(|_| scope.spawn(publish)).collect()
}

#[test]
fn what_comes_too_late_is_not_sent_and_costs_nothing_else() {
    let (_listener, mut peer, client) = Client::connected();
    let subject = subject("late");
    let late = Publish { until: Some(BootTime::now()), ..Publish::new(&subject, b"late") };
    assert_eq!(client.connection.publish(&late), Err(PublishError::Late));
    client.publish("in.time", b"hi").unwrap();
    assert_eq!(peer.line(), "PUB in.time 2");
}

#[test]
fn what_waits_too_long_ends_the_connection_and_is_never_written() {
    let (listener, mut peer, client) = Client::connected_with(|options| {
        options.write_timeout = SOON * 10;
    });
    let published = AtomicUsize::new(0);
    thread::scope(|scope| {
        let writers = fill_the_wire(scope, &client, &published, 1);
        client.until_stuck(&published);
        let until = BootTime::now() + Duration::from_millis(50);
        let subject = subject("late");
        let late = Publish { until: Some(until), ..Publish::new(&subject, b"late") };
        assert_eq!(client.connection.publish(&late), Ok(()), "the one who writes goes on with it");
        client.until(|| BootTime::now() >= until);
        let rest = peer.rest();
        assert!(rest.contains("PUB b ") && !rest.contains("late"));
        for writer in writers {
            assert_eq!(writer.join().unwrap(), PublishError::Disconnected);
        }
    });
    let Link::Down { reason } = client.link() else { panic!("not down") };
    assert_eq!(reason, "writing failed: it was too late for what waited");
    let _peer = listener.greet_until_up(&client);
}

#[test]
fn a_writer_that_is_stuck_gives_up_when_it_is_too_late() {
    let (_listener, _peer, client) = Client::connected_with(|options| {
        options.write_timeout = SOON * 10;
    });
    let subject = subject("b");
    let body = vec![b'x'; 100_000];
    let until = BootTime::now() + Duration::from_secs(1);
    let stuck = Publish { until: Some(until), ..Publish::new(&subject, &body) };
    let error = loop {
        if let Err(error) = client.connection.publish(&stuck) {
            break error;
        }
    };
    assert!(BootTime::now() >= until);
    assert_eq!(error, PublishError::Disconnected);
    let Link::Down { reason } = client.link() else { panic!("not down") };
    assert_eq!(reason, "writing failed: it was too late for what waited");
}

#[test]
fn a_peer_that_demands_answers_and_reads_none_is_cut_off() {
    let (_listener, mut peer, client) = Client::connected();
    // Far more than all buffers on the way hold.
    let questions = "PING\r\n".repeat(10_000);
    let begun = Instant::now();
    while peer.try_say(&questions) {}
    // What could not be sent does not keep the connection open.
    assert!(begun.elapsed() < SOON / 2, "it took {:?}", begun.elapsed());
    let Link::Down { reason } = client.link() else { panic!("not down") };
    assert!(reason.contains("demands answers") || reason.contains("takes nothing"), "{reason}");
}

#[test]
fn a_peer_that_answers_no_ping_is_dead() {
    let (_listener, mut peer, client) = Client::connected_with(|options| {
        options.ping_interval = Duration::from_millis(50);
    });
    assert_eq!(peer.line(), "PING");
    assert_eq!(peer.line(), "PING");
    let Link::Down { reason } = client.link() else { panic!("not down") };
    assert_eq!(reason, "it does not answer PING");
    assert_eq!(client.errors(ErrorKind::Stale), 1);
    assert_eq!(peer.rest(), "");
}

#[test]
fn answered_pings_keep_the_connection() {
    let (_listener, mut peer, client) = Client::connected_with(|options| {
        options.ping_interval = Duration::from_millis(200);
    });
    for _ in 0..5 {
        assert_eq!(peer.line(), "PING");
        peer.say("PONG\r\n");
    }
    assert!(client.links.is_empty());
    // Answers to questions nobody asked mean nothing.
    peer.say("PONG\r\nPONG\r\nPONG\r\n");
    assert_eq!(peer.line(), "PING");
    assert!(client.links.is_empty());
}

#[test]
fn half_an_info_is_given_up_and_tried_again() {
    let listener = Listener::start();
    let client = Client::with(&listener.url(), |options| {
        options.handshake_timeout = Duration::from_millis(300);
    });
    let mut peer = listener.accept();
    peer.say(&INFO[..10]);
    assert_eq!(peer.rest(), "");
    let _peer = listener.greet_until_up(&client);
    assert!(client.errors(ErrorKind::Handshake) > 0);
}

#[test]
fn a_greeting_that_trickles_for_ever_is_given_up() {
    let listener = Listener::start();
    let client = Client::with(&listener.url(), |options| {
        options.handshake_timeout = Duration::from_millis(200);
    });
    let mut peer = listener.accept();
    let begun = Instant::now();
    let pace = never::<()>();
    peer.say("INFO {\"server_name\":\"");
    while peer.try_say("x") {
        assert!(begun.elapsed() < SOON, "still listening");
        let _ = pace.recv_timeout(Duration::from_millis(10));
    }
    client.until_error(ErrorKind::Handshake);
}

#[test]
fn a_slow_greeting_within_its_time_is_taken() {
    let listener = Listener::start();
    let client = Client::start(&listener.url());
    let mut peer = listener.accept();
    for byte in INFO.as_bytes() {
        peer.say_bytes(&[*byte]);
    }
    peer.greet_after_info();
    client.up();
}

#[test]
fn a_subscription_the_broker_does_not_confirm_ends_the_connection() {
    let listener = Listener::start();
    let client = Client::with(&listener.url(), |options| {
        options.handshake_timeout = Duration::from_millis(300);
    });
    let mut peer = listener.accept();
    peer.say(INFO);
    assert!(peer.line().starts_with("CONNECT "));
    assert_eq!(peer.line(), "PING");
    peer.say("PONG\r\n");
    assert_eq!(peer.line(), "PING");
    assert_eq!(peer.rest(), "");
    let _peer = listener.greet_until_up(&client);
}

#[test]
fn nonsense_ends_the_connection_and_the_next_one_is_tried() {
    let (listener, mut peer, client) = Client::connected();
    peer.say("HTTP/1.1 400 Bad Request\r\n");
    let Link::Down { reason } = client.link() else { panic!("not down") };
    assert!(reason.contains("HTTP/1.1 400 Bad Request"), "{reason}");
    let mut peer = listener.accept();
    peer.say("SSH-2.0-OpenSSH\r\n");
    let _peer = listener.accept().greet();
    client.up();
    assert_eq!(client.errors(ErrorKind::Protocol), 2);
}

#[test]
fn a_broker_that_demands_tls_is_told_nothing() {
    let listener = Listener::start();
    let client = Client::with(&listener.url(), |options| {
        options.credentials = user("u", "p");
    });
    let mut peer = listener.accept();
    peer.say("INFO {\"tls_required\":true}\r\n");
    assert_eq!(peer.rest(), "");
    client.until_error(ErrorKind::Tls);

    let client = Client::start(&format!("tls://127.0.0.1:{}", listener.port));
    client.until_error(ErrorKind::Tls);
}

#[test]
fn an_account_where_no_node_waits_is_a_complaint() {
    let listener = Listener::start();
    for (account, errors) in [("provisioning", 0), ("choria", 1)] {
        let client = Client::start(&listener.url());
        let mut peer = listener.accept();
        peer.say(INFO);
        peer.say(&format!("INFO {{\"connect_info\":true,\"remote_account\":\"{account}\"}}\r\n"));
        peer.greet_after_info();
        client.up();
        assert_eq!(client.errors(ErrorKind::Permissions), errors, "{account}");
        let error = client.connection.last_error();
        let is_said = error.is_some_and(|error| error.text.contains("let us into its account"));
        assert_eq!(is_said, errors > 0, "{account}");
    }
}

#[test]
fn all_brokers_of_the_list_and_those_it_hears_of_are_tried() {
    let (left, right, heard) = (Listener::start(), Listener::start(), Listener::start());
    let client = Client::start(&format!("{},{}", left.url(), right.url()));
    let left_is_first = left.is_called_before(&right);
    let (first, other) = if left_is_first { (left, right) } else { (right, left) };
    let mut peer = first.accept();
    peer.say(&format!("INFO {{\"connect_urls\":[\"x\",\"127.0.0.1:{}\"]}}\r\n", heard.port));
    peer.greet_after_info();
    client.up();
    drop(peer);
    let Link::Down { .. } = client.link() else { panic!("not down") };
    drop(other.accept());
    drop(first.accept());
    let _peer = heard.accept().greet();
    let Link::Up { broker, .. } = client.link() else { panic!("not up") };
    assert_eq!(broker, heard.url());
}

#[test]
fn a_broker_that_accepts_and_drops_us_is_not_hammered() {
    let listener = Listener::start();
    let client = Client::with(&listener.url(), |options| {
        options.again_backoff = Backoff(&[60_000]);
    });
    let peer = listener.accept().greet();
    client.up();
    drop(peer);
    let Link::Down { .. } = client.link() else { panic!("not down") };
    assert!(listener.accept_within(Duration::from_millis(300)).is_none());
    client.stop();
}

#[test]
fn an_abort_ends_every_way_of_connecting() {
    // Waiting for INFO.
    let listener = Listener::start();
    let client = Client::with(&listener.url(), |options| options.handshake_timeout = SOON * 10);
    let peer = listener.accept();
    client.stop();
    drop(peer);

    // Waiting for the other side to take the connection.
    let full = FullListener::start();
    let client = Client::with(&full.url(), |options| options.connect_timeout = SOON * 10);
    client.until(|| client.connection.shared.slot.is_held());
    client.stop();

    // Waiting to try again.
    let closed = Bound::start();
    let client = Client::with(&closed.url(), |options| options.first_backoff = Backoff(&[600_000]));
    client.until_error(ErrorKind::Connect);
    client.stop();

    // Connected.
    let (_listener, _peer, client) = Client::connected();
    client.stop();

    // Before anything.
    let client = Client::start(&listener.url());
    client.stop();
    assert_eq!(client.publish("a", b""), Err(PublishError::Closed));
}

#[test]
fn an_abort_ends_a_stuck_publish_and_a_wait() {
    let (_listener, _peer, client) = Client::connected_with(|options| {
        options.write_timeout = SOON * 10;
    });
    let published = AtomicUsize::new(0);
    thread::scope(|scope| {
        let (client, published) = (&client, &published);
        let waiting = scope.spawn(move || client.connection.flush(Instant::now() + SOON * 10));
        let stuck = fill_the_wire(scope, client, published, 2);
        client.until_stuck(published);
        client.stop();
        for stuck in stuck {
            stuck.join().unwrap();
        }
        assert!(waiting.join().unwrap().is_err());
    });
}

#[test]
fn a_drain_ends_at_its_deadline() {
    let (_listener, _peer, client) = Client::connected();
    let begun = Instant::now();
    client.connection.drain(begun + Duration::from_millis(100), &never());
    client.connection.join();
    assert!(begun.elapsed() < SOON);
    assert!(begun.elapsed() >= Duration::from_millis(100));
}

#[test]
fn an_abort_ends_a_drain() {
    let (_listener, _peer, client) = Client::connected();
    let (abort, aborted) = bounded(0);
    drop::<Sender<Never>>(abort);
    let begun = Instant::now();
    client.connection.drain(begun + 10 * SOON, &aborted);
    client.connection.join();
    assert!(begun.elapsed() < SOON);
}

#[test]
fn handlers_are_let_go_when_the_connection_is_closed() {
    let listener = Listener::start();
    let client = Client::start(&listener.url());
    let held = Arc::new(());
    let handler: Handler = Arc::new({
        let held = Arc::clone(&held);
        move |_| drop(Arc::clone(&held))
    });
    let subscription = client.connection.subscribe(&pattern("a"), handler);
    client.stop();
    assert_eq!(Arc::strong_count(&held), 1);
    drop(subscription);
}

#[test]
fn an_empty_list_is_refused() {
    let options = Options::new(Vec::new(), "test", Metrics::new("test"));
    assert!(matches!(Connection::start(options), Err(StartError::NoServers)));
}

#[test]
fn asks_dns_for_its_brokers_before_each_round() {
    let (first, second) = (Listener::start(), Listener::start());
    let mut ports = [first.port, second.port].into_iter().cycle();
    let dns = dns::testing::Server::with_services(move |_| {
        vec![(0, 0, ports.next().unwrap(), "127.0.0.1.")]
    });
    let client = Client::at(srv(dns.as_servers()), |options| options.srv_fresh = Duration::ZERO);
    let peer = first.accept().greet();
    client.up();
    assert_eq!(&*client.connection.broker_url(), first.url());
    drop(peer);
    let Link::Down { .. } = client.link() else { panic!("not down") };
    let _peer = second.accept().greet();
    client.up();
    assert_eq!(&*client.connection.broker_url(), second.url());
    assert_eq!(dns.asked()[0], "_mcollective-server._tcp.example.net");
}

#[test]
fn an_answer_of_dns_is_used_again_for_a_while() {
    let listener = Listener::start();
    let port = listener.port;
    let mut asked = 0;
    let dns = dns::testing::Server::with_services(move |_| {
        asked += 1;
        if asked == 1 { vec![(0, 0, port, "127.0.0.1")] } else { Vec::new() }
    });
    let fresh = Duration::from_secs(3600);
    let client = Client::at(srv(dns.as_servers()), |options| options.srv_fresh = fresh);
    let peer = listener.accept().greet();
    client.up();
    drop(peer);
    let Link::Down { .. } = client.link() else { panic!("not down") };
    let _peer = listener.accept().greet();
    client.up();
    assert_eq!(dns.asked().len(), 1);
}

#[test]
fn without_brokers_in_dns_the_customary_one_is_tried() {
    let dns = dns::testing::Server::with_services(|_| Vec::new());
    let client = Client::at(srv(dns.as_servers()), |_| {});
    client.until(|| {
        let error = client.connection.last_error();
        error.is_some_and(|error| error.text.contains("connect to nats://puppet:4222"))
    });
    assert_eq!(dns.asked()[..2].len(), 2);
}

#[test]
fn brokers_known_before_stay_when_dns_fails() {
    let listener = Listener::start();
    let port = listener.port;
    let mut asked = 0;
    let dns = dns::testing::Server::start(move |name, query| {
        asked += 1;
        if asked > 1 {
            return vec![[&query[..2], &[0xff; 50]].concat()];
        }
        let mut reply = dns::testing::reply(query);
        reply.answers.push(dns::testing::service(name, 0, 0, port, "127.0.0.1"));
        vec![reply.build_bytes_vec().unwrap()]
    });
    let client = Client::at(srv(dns.as_servers()), |options| options.srv_fresh = Duration::ZERO);
    let peer = listener.accept().greet();
    client.up();
    drop(peer);
    let Link::Down { .. } = client.link() else { panic!("not down") };
    let _peer = listener.accept().greet();
    client.up();
    assert!(client.errors(ErrorKind::Connect) > 0);
}

#[test]
fn a_wait_for_dns_ends_at_once_when_the_connection_is_closed() {
    let dns = dns::testing::Server::start(|_, _| Vec::new());
    let client = Client::at(srv(dns.as_servers()), |_| {});
    client.until(|| !dns.asked().is_empty());
    client.stop();
}

/// A connection under test.
struct Client {
    connection: Arc<Connection>,
    links: Receiver<Link>,
    metrics: Arc<Metrics>,
}

impl Client {
    fn start(servers: &str) -> Client {
        Client::with(servers, |_| {})
    }

    fn with(servers: &str, change: impl FnOnce(&mut Options)) -> Client {
        Client::at(ServerAddress::parse_list(servers).unwrap().into(), change)
    }

    fn at(brokers: Brokers, change: impl FnOnce(&mut Options)) -> Client {
        let metrics = Metrics::new("test");
        let (sender, links) = crossbeam_channel::unbounded();
        let mut options = Options::new(brokers, "test", Arc::clone(&metrics));
        options.first_backoff = Backoff(&[20]);
        options.again_backoff = Backoff(&[20]);
        options.on_link = Box::new(move |link| sender.send(link).unwrap_or(()));
        change(&mut options);
        Client { connection: Connection::start(options).unwrap(), links, metrics }
    }

    /// A client that is up, and the peer it talks to; the client goes first, or it would look for others on the port.
    fn connected() -> (Listener, Raw, Client) {
        Client::connected_with(|_| {})
    }

    fn connected_with(change: impl FnOnce(&mut Options)) -> (Listener, Raw, Client) {
        let listener = Listener::start();
        let client = Client::with(&listener.url(), change);
        let peer = listener.accept().greet();
        client.up();
        (listener, peer, client)
    }

    fn link(&self) -> Link {
        self.links.recv_timeout(SOON).expect("nothing happened to the connection")
    }

    #[track_caller]
    fn up(&self) {
        let link = self.link();
        assert!(matches!(link, Link::Up { .. }), "{link:?}");
    }

    fn subscribe(&self, text: &str) -> (Subscription, Receiver<Message>) {
        let (sender, messages) = crossbeam_channel::unbounded();
        let handler: Handler = Arc::new(move |message| sender.send(message).unwrap_or(()));
        (self.connection.subscribe(&pattern(text), handler), messages)
    }

    /// Answers on the reader's thread, which only a test may do.
    fn echo(&self, text: &str) -> Subscription {
        let connection = Arc::downgrade(&self.connection);
        let handler: Handler = Arc::new(move |message: Message| {
            let (Some(connection), Some(reply)) = (connection.upgrade(), message.reply) else {
                return;
            };
            let (subject, payload) = (subject(&reply), &message.payload);
            let answer = Publish::new(&subject, payload);
            connection.publish(&answer).unwrap();
        });
        self.connection.subscribe(&pattern(text), handler)
    }

    fn publish(&self, text: &str, payload: &[u8]) -> Result<(), PublishError> {
        let subject = &subject(text);
        self.connection.publish(&Publish::new(subject, payload))
    }

    fn request(&self, to: &str, reply: &str, payload: &[u8]) {
        let (to, reply) = (subject(to), subject(reply));
        self.connection
            .publish(&Publish { reply: Some(&reply), ..Publish::new(&to, payload) })
            .unwrap();
    }

    fn errors(&self, kind: ErrorKind) -> u64 {
        self.metrics.broker_errors.with_label_values(&[kind.label()]).get()
    }

    fn until_error(&self, kind: ErrorKind) {
        self.until(|| self.errors(kind) > 0);
    }

    /// Waits for what raises no event.
    fn until(&self, mut is_so: impl FnMut() -> bool) {
        let deadline = Instant::now() + SOON;
        while !is_so() {
            let error = self.connection.last_error();
            assert!(Instant::now() < deadline, "it did not happen, last error: {error:?}");
            thread::park_timeout(Duration::from_millis(2));
        }
    }

    /// Waits until nobody has published anything for a while.
    fn until_stuck(&self, published: &AtomicUsize) {
        let mut seen = (usize::MAX, Instant::now());
        self.until(|| {
            let now = published.load(Ordering::Relaxed);
            if now != seen.0 {
                seen = (now, Instant::now());
            }
            seen.1.elapsed() > Duration::from_millis(300)
        });
    }

    /// Aborts, and all threads end soon.
    #[track_caller]
    fn stop(&self) {
        let begun = Instant::now();
        self.connection.abort();
        self.connection.join();
        assert!(begun.elapsed() < SOON / 4, "it took {:?}", begun.elapsed());
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.connection.abort();
        self.connection.join();
    }
}

fn srv(dns: Servers) -> Brokers {
    Brokers::Srv(Srv { domain: "example.net".into(), dns })
}

/// Credentials of a user without TLS.
fn user(name: &str, password: &str) -> login::Source {
    let user = (name.to_owned(), Secret::new(password));
    Box::new(move || Ok(Credentials { user: Some(user.clone()), ..Credentials::default() }))
}

fn subject(text: &str) -> Subject {
    Subject::new(text).unwrap()
}

fn pattern(text: &str) -> Pattern {
    Pattern::new(text).unwrap()
}

/// A real broker, killed when dropped.
struct Broker {
    port: u16,
    arguments: Vec<String>,
    process: Child,
}

impl Broker {
    fn start(arguments: &[&str]) -> Broker {
        let arguments: Vec<String> = arguments.iter().map(|text| (*text).to_owned()).collect();
        let port = free_port();
        Broker { port, process: Broker::spawn(port, &arguments), arguments }
    }

    fn spawn(port: u16, arguments: &[String]) -> Child {
        let program = std::env::var("NATS_SERVER").unwrap_or_else(|_| "nats-server".to_owned());
        Command::new(program)
            .args(["--addr", "127.0.0.1", "--port", &port.to_string()])
            .args(arguments)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("nats-server must be installed, or named by NATS_SERVER")
    }

    fn url(&self) -> String {
        format!("nats://127.0.0.1:{}", self.port)
    }

    fn kill(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }

    fn restart(&mut self) {
        self.process = Broker::spawn(self.port, &self.arguments);
    }
}

impl Drop for Broker {
    fn drop(&mut self) {
        // It may have been killed before.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// A port below those the system gives to outgoing connections, so that none of them takes it.
fn free_port() -> u16 {
    loop {
        let port = fastrand::u16(15_000..32_000);
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}

/// Accepts connections when the test says so.
struct Listener {
    listener: TcpListener,
    port: u16,
}

impl Listener {
    fn start() -> Listener {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        Listener { listener, port }
    }

    fn url(&self) -> String {
        format!("nats://127.0.0.1:{}", self.port)
    }

    fn accept(&self) -> Raw {
        self.accept_within(SOON).expect("nobody connects")
    }

    fn accept_within(&self, time: Duration) -> Option<Raw> {
        let mut ready = [PollFd::new(&self.listener, PollFlags::IN)];
        let count = poll(&mut ready, Some(&Timespec::try_from(time).unwrap())).unwrap();
        (count > 0).then(|| Raw::new(self.listener.accept().unwrap().0))
    }

    fn is_called_before(&self, other: &Listener) -> bool {
        let listeners = [&self.listener, &other.listener];
        let mut ready = listeners.map(|listener| PollFd::new(listener, PollFlags::IN));
        assert!(poll(&mut ready, Some(&Timespec::try_from(SOON).unwrap())).unwrap() > 0);
        !ready[0].revents().is_empty()
    }

    /// Plays a broker as often as it takes: on a busy machine even this side may be too slow for a short time-out.
    fn greet_until_up(&self, client: &Client) -> Raw {
        let deadline = Instant::now() + SOON;
        while Instant::now() < deadline {
            let mut peer = self.accept();
            if !peer.try_greet() {
                continue;
            }
            // Up, or the end of an attempt that was too slow.
            let mut ready = [PollFd::new(&peer.tcp, PollFlags::IN)];
            loop {
                if let Ok(Link::Up { .. }) = client.links.recv_timeout(Duration::from_millis(20)) {
                    return peer;
                }
                if poll(&mut ready, Some(&Timespec::default())).unwrap() > 0 {
                    break;
                }
            }
        }
        panic!("it is never up");
    }
}

/// A port that is taken, but nobody listens there.
struct Bound {
    port: u16,
    socket: rustix::fd::OwnedFd,
}

impl Bound {
    fn start() -> Bound {
        let socket = socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
        bind(&socket, &SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
        let port = TcpListener::from(socket.try_clone().unwrap()).local_addr().unwrap().port();
        Bound { port, socket }
    }

    fn url(&self) -> String {
        format!("nats://127.0.0.1:{}", self.port)
    }
}

/// Lets nobody in: its queue is full.
struct FullListener {
    bound: Bound,
    _queued: Vec<Arc<TcpStream>>,
}

impl FullListener {
    fn start() -> FullListener {
        let bound = Bound::start();
        listen(&bound.socket, 0).unwrap();
        let address = SocketAddr::from(([127, 0, 0, 1], bound.port));
        let mut queued = Vec::new();
        loop {
            let soon = Instant::now() + Duration::from_millis(300);
            match dial::connect(address, soon, &Slot::default()) {
                Ok(socket) => queued.push(socket),
                Err(error) if error.kind() == IoKind::TimedOut => break,
                Err(error) => panic!("{error}"),
            }
        }
        FullListener { bound, _queued: queued }
    }

    fn url(&self) -> String {
        self.bound.url()
    }
}

/// One end of a connection, spoken by hand.
struct Raw {
    tcp: TcpStream,
    /// The same connection as it is spoken, which may be in TLS.
    stream: BufReader<Box<dyn Stream>>,
}

trait Stream: Read + Write + Send {}

impl<S: Read + Write + Send> Stream for S {}

impl Raw {
    fn new(tcp: TcpStream) -> Raw {
        tcp.set_nodelay(true).unwrap();
        tcp.set_read_timeout(Some(SOON)).unwrap();
        tcp.set_write_timeout(Some(SOON)).unwrap();
        let stream: Box<dyn Stream> = Box::new(tcp.try_clone().unwrap());
        Raw { tcp, stream: BufReader::new(stream) }
    }

    fn connect(port: u16) -> Raw {
        Raw::new(TcpStream::connect(("127.0.0.1", port)).unwrap())
    }

    fn say(&mut self, text: &str) {
        self.say_bytes(text.as_bytes());
    }

    fn say_bytes(&mut self, bytes: &[u8]) {
        self.stream.get_mut().write_all(bytes).unwrap();
    }

    /// Whether the other side still takes it.
    fn try_say(&mut self, text: &str) -> bool {
        self.stream.get_mut().write_all(text.as_bytes()).is_ok()
    }

    fn line(&mut self) -> String {
        self.try_line().expect("the connection ended")
    }

    fn try_line(&mut self) -> Option<String> {
        let mut line = String::new();
        match self.stream.read_line(&mut line) {
            Ok(0) => return None,
            Ok(_) => {}
            Err(error) if is_end(&error) => return None,
            Err(error) => panic!("{error}"),
        }
        assert!(line.ends_with("\r\n"), "{line:?} is no line");
        line.truncate(line.len() - 2);
        Some(line)
    }

    /// Everything to the end of the connection.
    fn rest(&mut self) -> String {
        let mut rest = String::new();
        match self.stream.read_to_string(&mut rest) {
            Ok(_) => rest,
            Err(error) if is_end(&error) => rest,
            Err(error) => panic!("the connection goes on: {error}"),
        }
    }

    /// Plays a broker until the client is up.
    fn greet(mut self) -> Raw {
        self.say(INFO);
        self.greet_after_info();
        self
    }

    fn greet_after_info(&mut self) {
        assert!(self.try_greet_after_info(), "the connection ended");
    }

    fn try_greet(&mut self) -> bool {
        self.try_say(INFO) && self.try_greet_after_info()
    }

    fn try_greet_after_info(&mut self) -> bool {
        let Some(connect) = self.try_line() else { return false };
        assert!(connect.starts_with("CONNECT "), "{connect:?}");
        for _ in 0..2 {
            // Before the second one come the subscriptions.
            loop {
                match self.try_line().as_deref() {
                    Some("PING") => break,
                    Some(_) => {}
                    None => return false,
                }
            }
            if !self.try_say("PONG\r\n") {
                return false;
            }
        }
        true
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        // The other side may have closed it.
        let _ = self.tcp.shutdown(Shutdown::Both);
    }
}

/// Whether the other side is gone, and not just silent.
fn is_end(error: &io::Error) -> bool {
    !matches!(error.kind(), IoKind::WouldBlock | IoKind::TimedOut)
}
