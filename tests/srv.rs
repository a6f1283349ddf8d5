//! Brokers that only DNS knows: all of the daemon but its arguments, in this process, so that it asks our DNS server.
//!
//! The program itself always asks the servers of `/etc/resolv.conf`, which no test may change.

mod common;
mod fleet;

use std::net::{SocketAddr, UdpSocket};
use std::sync::Arc;
use std::thread;

use choria_provisioner::check::{self, Wanted};
use choria_provisioner::config::Source;
use choria_provisioner::config::surroundings::{Names, Surroundings};
use choria_provisioner::daemon::Setup;
use choria_provisioner::dns;
use choria_provisioner::logging::Log;
use choria_provisioner::shutdown::Signals;
use parking_lot::Mutex;
use rustix::process::{Signal, getpid, kill_process};
use simple_dns::rdata::{RData, SRV};
use simple_dns::{CLASS, Name, Packet, ResourceRecord};

use common::{HELPER, NatsServer, SOON, TempDir, free_port, tail, wait_until, within};
use fleet::Fleet;

#[test]
fn nodes_are_provisioned_through_the_brokers_of_a_domain() {
    let mut first = NatsServer::start();
    let dns =
        DnsServer::start(vec![(10, "localhost", free_port()), (20, "localhost", port(&first))]);
    let site = TempDir::new("srv");
    let daemon = start(&site, &dns);
    // The one that should be tried first is not there.
    let nodes = Fleet::builder(&first.url()).nodes(3).start();
    nodes.wait_all_provisioned(within(SOON)).unwrap_or_else(|why| panic!("{why}\n{}", log(&site)));

    // Where brokers move, DNS tells.
    let second = NatsServer::start();
    *dns.records.lock() = vec![(10, "localhost", port(&second))];
    first.kill();
    let connected = format!("Connected to nats://localhost:{}", port(&second));
    wait_until(SOON, "it is connected to the other one", || log(&site).contains(&connected));
    let nodes = Fleet::builder(&second.url()).node("later.example.net").start();
    nodes.wait_all_provisioned(within(SOON)).unwrap_or_else(|why| panic!("{why}\n{}", log(&site)));

    assert!(dns.asked.lock().iter().all(|name| name == "_mcollective-server._tcp.example.net"));
    kill_process(getpid(), Signal::TERM).expect("this is our own process");
    daemon.join().expect("it does not panic").expect("it ends well");
}

#[test]
fn a_broker_that_dns_names_badly_is_a_warning_while_another_lets_us_in() {
    let broker = NatsServer::start();
    let dns = DnsServer::start(vec![(10, "bad!host", 4222), (20, "localhost", port(&broker))]);
    let site = TempDir::new("srv");
    let Source { yaml, client, surroundings, .. } = source(&site, &dns);
    let wanted = Wanted {
        config: &yaml,
        choria_config: &client,
        pid: None,
        is_offline: false,
        is_moving: false,
    };
    let found = check::run(&wanted, &surroundings);
    assert_eq!(found.errors, []);
    let named = found.warnings.iter().filter(|warning| warning.text.contains("in DNS left out"));
    assert_eq!(named.count(), 1, "{:?}", found.warnings);
}

/// The daemon, in a thread of its own.
fn start(
    site: &TempDir,
    dns: &DnsServer,
) -> thread::JoinHandle<Result<(), choria_provisioner::daemon::RunError>> {
    let source = source(site, dns);
    let settings = source.load().expect("the files are good");
    let config = settings.config;
    let log = Log::start(&config.logfile, config.log_format, config.loglevel);
    let setup = Setup {
        source,
        config,
        choria: settings.choria,
        monitor: None,
        admin: None,
        audit: None,
        version: "0",
        log: log.expect("the folder is writable"),
    };
    let signals = Signals::install().expect("signals can be handled");
    thread::spawn(move || choria_provisioner::daemon::run(setup, signals))
}

/// Its files, and the DNS server it asks.
fn source(site: &TempDir, dns: &DnsServer) -> Source {
    let helper = site.write_program("helper", HELPER);
    let key = site.write("verify.pem", &Fleet::verify_key_pem());
    let yaml = format!(
        "helper: {}\nfeatures: {{jwt: on}}\njwt_verify_cert: {}\ntoken: s3cret\nchoria_insecure: on\ninterval: 1s\nlogfile: {}\n",
        helper.display(),
        key.display(),
        site.path().join("log").display(),
    );
    let yaml = site.write("provisioner.yaml", &yaml);
    let client = "identity = p.example.net\nplugin.choria.srv_domain = example.net\n";
    let client = site.write("choria.cfg", client);
    let names = Names { hosts: "/etc/hosts".into(), dns: dns::Servers::Fixed(vec![dns.address]) };
    let surroundings = Surroundings { names: Some(names), ..Surroundings::default() };
    Source { yaml, client, surroundings, is_debug: false }
}

fn log(site: &TempDir) -> String {
    tail(&std::fs::read_to_string(site.path().join("log")).unwrap_or_default())
}

fn port(broker: &NatsServer) -> u16 {
    let address: SocketAddr = broker.address().parse().expect("it has an address");
    address.port()
}

/// A broker of a domain: priority, host and port.
type Record = (u16, &'static str, u16);

/// Knows which brokers a domain has.
struct DnsServer {
    address: SocketAddr,
    records: Arc<Mutex<Vec<Record>>>,
    asked: Arc<Mutex<Vec<String>>>,
}

impl DnsServer {
    fn start(records: Vec<Record>) -> DnsServer {
        let socket = UdpSocket::bind("127.0.0.1:0").expect("there is a free port");
        let address = socket.local_addr().expect("it is bound");
        let (records, asked) = (Arc::new(Mutex::new(records)), Arc::<Mutex<Vec<_>>>::default());
        let (known, heard) = (Arc::clone(&records), Arc::clone(&asked));
        // It ends with the process.
        thread::spawn(move || {
            let mut packet = [0; 1_500];
            while let Ok((len, client)) = socket.recv_from(&mut packet) {
                let query = Packet::parse(&packet[..len]).expect("we write what can be read");
                let name = query.questions[0].qname.clone();
                heard.lock().push(name.to_string());
                let mut reply = Packet::new_reply(query.id());
                for &(priority, target, port) in &*known.lock() {
                    let target = Name::new(target).expect("a name");
                    let data = RData::SRV(SRV { priority, weight: 0, port, target });
                    reply.answers.push(ResourceRecord::new(name.clone(), CLASS::IN, 5, data));
                }
                reply.questions = query.questions;
                let reply = reply.build_bytes_vec().expect("a reply can be written");
                let _ = socket.send_to(&reply, client);
            }
        });
        DnsServer { address, records, asked }
    }
}
