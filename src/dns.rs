//! What only DNS knows: which brokers a domain has (SRV), and what an address is called (PTR).
//!
//! The system's resolver answers neither question, so this asks the servers of `resolv.conf` itself, over UDP, one question
//! at a time and never longer than a deadline. The crate `simple-dns` reads and writes the messages.
//!
//! Whoever can send us packets may try to answer for the server. So an answer counts only if it comes from where the
//! question went, with its random id and the question itself; whatever else arrives is no answer. One that is cut short is
//! an error and not half a list: there is no TCP here, and no list of brokers needs it.

use std::fmt;
use std::fs;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use simple_dns::rdata::{OPT, RData};
use simple_dns::{CLASS, Name, Packet, PacketFlag, Question, RCODE, ResourceRecord, TYPE};

/// Who is asked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Servers {
    /// Those that a file such as `/etc/resolv.conf` names; it is read again for every question.
    File(PathBuf),
    /// These.
    Fixed(Vec<SocketAddr>),
}

/// One place where a service is offered: an SRV record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Service {
    /// The lowest is tried first.
    pub priority: u16,
    /// Share of the work among those with one priority.
    pub weight: u16,
    /// TCP port.
    pub port: u16,
    /// Host name without a dot at its end. Not checked, except that DNS could say it.
    pub host: String,
}

/// Why there is no answer.
#[derive(Debug)]
pub enum Error {
    /// The question is about something that can't be a name.
    Name(String),
    /// No server answered in time.
    Silent,
    /// Packets came, and none was an answer to our question.
    Strange,
    /// The answer did not fit into a packet.
    Truncated,
    /// The answer is not understood.
    Malformed,
    /// A server could not or would not answer.
    Refused(RCODE),
    /// The network, or the file that names the servers.
    Io(io::Error),
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Name(name) => write!(f, "{name:?} is no name that DNS can know"),
            Error::Silent => f.write_str("no DNS server answered in time"),
            Error::Strange => f.write_str("only answers to other questions came from DNS"),
            Error::Truncated => f.write_str("the answer of DNS is too long for one packet"),
            Error::Malformed => f.write_str("the answer of DNS is not understood"),
            Error::Refused(code) => write!(f, "DNS answered with {code:?}"),
            Error::Io(_) => f.write_str("could not ask DNS"),
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Error::Io(error) => Some(error),
            _ => None,
        }
    }
}

impl Servers {
    /// The services called `name`, such as `_nats._tcp.example.net`, in no order; none if there is no such name.
    ///
    /// # Errors
    ///
    /// [`Error`], after every server was asked twice or at `deadline`.
    pub fn services(&self, name: &str, deadline: Instant) -> Result<Vec<Service>, Error> {
        self.ask(name, TYPE::SRV, deadline, |data| match data {
            // A lone dot says that there is no such service here.
            RData::SRV(srv) if srv.port > 0 && !srv.target.get_labels().is_empty() => {
                Some(Service {
                    priority: srv.priority,
                    weight: srv.weight,
                    port: srv.port,
                    host: srv.target.to_string(),
                })
            }
            _ => None,
        })
    }

    /// The names of `address`, without a dot at their end.
    ///
    /// # Errors
    ///
    /// As [`Servers::services`].
    pub fn names(&self, address: Ipv4Addr, deadline: Instant) -> Result<Vec<String>, Error> {
        let [a, b, c, d] = address.octets();
        self.ask(&format!("{d}.{c}.{b}.{a}.in-addr.arpa"), TYPE::PTR, deadline, |data| match data {
            RData::PTR(name) => Some(name.to_string()),
            _ => None,
        })
    }

    /// The records of `kind` for `name`, as far as `take` wants them.
    fn ask<T>(
        &self,
        name: &str,
        kind: TYPE,
        deadline: Instant,
        take: impl Fn(&RData<'_>) -> Option<T>,
    ) -> Result<Vec<T>, Error> {
        let bad_name = || Error::Name(name.to_owned());
        // The crate skips empty parts, so that another name would be asked for.
        let bare = name.strip_suffix('.').unwrap_or(name);
        if bare.is_empty() || bare.split('.').any(str::is_empty) {
            return Err(bad_name());
        }
        let name = Name::new(bare).map_err(|_| bad_name())?;
        let question = Question::new(name, kind.into(), CLASS::IN.into(), false);
        let servers = self.addresses().map_err(Error::Io)?;
        let mut last = Error::Silent;
        for server in servers.iter().cycle().take(servers.len() * ROUNDS) {
            let now = Instant::now();
            if now >= deadline {
                break;
            }
            match exchange(*server, &question, deadline.min(now + TRY_MAX), &take) {
                Ok(records) => return Ok(records),
                // Another server would have to cut it short, too.
                Err(Error::Truncated) => return Err(Error::Truncated),
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    fn addresses(&self) -> io::Result<Vec<SocketAddr>> {
        match self {
            Servers::Fixed(servers) => Ok(servers.clone()),
            Servers::File(path) => match fs::read(path) {
                Ok(text) => Ok(name_servers(&String::from_utf8_lossy(&text))),
                Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(name_servers("")),
                Err(error) => Err(error),
            },
        }
    }
}

/// The servers that a `resolv.conf` names; without any it is this machine, as for everybody else who reads that file.
fn name_servers(text: &str) -> Vec<SocketAddr> {
    let mut servers: Vec<SocketAddr> = Vec::new();
    for line in text.lines() {
        let mut words = line.split_ascii_whitespace();
        if words.next() == Some("nameserver")
            && let Some(address) = words.next().and_then(address)
        {
            servers.push(address);
        }
    }
    if servers.is_empty() {
        servers.push(SocketAddr::from((Ipv4Addr::LOCALHOST, PORT)));
    }
    servers.truncate(SERVERS_MAX);
    servers
}

fn address(text: &str) -> Option<SocketAddr> {
    if let Ok(address) = text.parse::<IpAddr>() {
        return Some(SocketAddr::new(address, PORT));
    }
    // An address of one link names its interface, by name or by number.
    let (address, zone) = text.split_once('%')?;
    let address: Ipv6Addr = address.parse().ok()?;
    let scope = match zone.parse() {
        Ok(number) => number,
        Err(_) => interface(zone)?,
    };
    Some(SocketAddr::V6(std::net::SocketAddrV6::new(address, PORT, 0, scope)))
}

fn interface(name: &str) -> Option<u32> {
    let socket = UdpSocket::bind((Ipv6Addr::UNSPECIFIED, 0)).ok()?;
    rustix::net::netdevice::name_to_index(socket, name).ok()
}

/// Asks one server once.
fn exchange<T>(
    server: SocketAddr,
    question: &Question<'_>,
    deadline: Instant,
    take: &impl Fn(&RData<'_>) -> Option<T>,
) -> Result<Vec<T>, Error> {
    let mut id = [0; 2];
    openssl::rand::rand_bytes(&mut id).map_err(|error| Error::Io(io::Error::other(error)))?;
    let id = u16::from_be_bytes(id);
    let query = query(id, question).map_err(|_| Error::Malformed)?;

    let any: IpAddr = match server {
        SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    // A port of its own for each question is one more thing to guess; a connected socket hears its server only.
    let socket = UdpSocket::bind((any, 0)).map_err(Error::Io)?;
    socket.connect(server).map_err(Error::Io)?;
    socket.send(&query).map_err(Error::Io)?;

    let mut packet = [0; PACKET_MAX];
    let mut strangers = 0;
    while strangers < STRANGERS_MAX {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            break;
        }
        socket.set_read_timeout(Some(left)).map_err(Error::Io)?;
        let len = match socket.recv(&mut packet) {
            Ok(len) => len,
            Err(error) => match error.kind() {
                io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => continue,
                _ => return Err(Error::Io(error)),
            },
        };
        match read(&packet[..len], id, question, take) {
            Some(answer) => return answer,
            None => strangers += 1,
        }
    }
    Err(if strangers > 0 { Error::Strange } else { Error::Silent })
}

/// The packet that asks `question`.
fn query(id: u16, question: &Question<'_>) -> simple_dns::Result<Vec<u8>> {
    let mut query = Packet::new_query(id);
    query.set_flags(PacketFlag::RECURSION_DESIRED);
    query.questions.push(question.clone());
    // Without saying so we would get 512 bytes at most.
    *query.opt_mut() =
        Some(OPT { opt_codes: Vec::new(), udp_packet_size: PACKET_WANTED, version: 0 });
    query.build_bytes_vec()
}

/// What an answer holds; `None` if `bytes` are no answer to this question.
fn read<T>(
    bytes: &[u8],
    id: u16,
    question: &Question<'_>,
    take: &impl Fn(&RData<'_>) -> Option<T>,
) -> Option<Result<Vec<T>, Error>> {
    // The crate makes room for as many records as the header promises, before it looks for the first.
    let header: &[u8; HEADER_LEN] = bytes.first_chunk()?;
    if header[..2] != id.to_be_bytes() {
        return None;
    }
    let promised: usize =
        header[4..].chunks(2).map(|count| usize::from(count[0]) << 8 | usize::from(count[1])).sum();
    if promised > bytes.len() / QUESTION_LEN_LEAST {
        return Some(Err(Error::Malformed));
    }
    let Ok(packet) = Packet::parse(bytes) else { return Some(Err(Error::Malformed)) };
    let is_answer = packet.has_flags(PacketFlag::RESPONSE)
        && packet.questions.len() == 1
        && packet.questions[0].qname == question.qname
        && packet.questions[0].qtype == question.qtype
        && packet.questions[0].qclass == question.qclass;
    if !is_answer {
        return None;
    }
    match packet.rcode() {
        RCODE::NoError => {}
        RCODE::NameError => return Some(Ok(Vec::new())),
        code => return Some(Err(Error::Refused(code))),
    }
    if packet.has_flags(PacketFlag::TRUNCATION) {
        return Some(Err(Error::Truncated));
    }
    let owner = canonical(&question.qname, &packet.answers);
    let records = packet.answers.iter();
    let records = records.filter(|record| record.class == CLASS::IN && record.name == *owner);
    Some(Ok(records.filter_map(|record| take(&record.rdata)).take(RECORDS_MAX).collect()))
}

/// The name that `name` is an alias of, or itself.
fn canonical<'a>(name: &'a Name<'a>, answers: &'a [ResourceRecord<'a>]) -> &'a Name<'a> {
    let mut name = name;
    for _ in 0..ALIASES_MAX {
        let alias = answers.iter().find_map(|record| match &record.rdata {
            RData::CNAME(target) if record.name == *name => Some(&target.0),
            _ => None,
        });
        match alias {
            Some(target) => name = target,
            None => break,
        }
    }
    name
}

/// Where DNS servers listen.
const PORT: u16 = 53;
/// Servers of the file that are asked; nobody reads more of them.
const SERVERS_MAX: usize = 3;
/// How often every server is asked.
const ROUNDS: usize = 2;
/// How long one server has for its answer.
const TRY_MAX: Duration = Duration::from_secs(2);
/// Packets that are no answer, after which we stop listening.
const STRANGERS_MAX: usize = 100;
/// Size of answers that pass every network in one piece, in bytes.
const PACKET_WANTED: u16 = 1232;
/// Size of an answer that we read, in bytes; some servers don't care what we want.
const PACKET_MAX: usize = 4096;
/// Length of a message's header, in bytes.
const HEADER_LEN: usize = 12;
/// Shortest entry of a message, a question about the root, in bytes.
const QUESTION_LEN_LEAST: usize = 5;
/// Records of an answer that we take; a network has a handful of brokers.
const RECORDS_MAX: usize = 64;
/// Aliases of aliases that we follow.
const ALIASES_MAX: usize = 8;

/// A DNS server that follows a script.
#[cfg(test)]
pub(crate) mod testing {
    use std::net::{SocketAddr, UdpSocket};
    use std::sync::Arc;
    use std::thread::{self, JoinHandle};

    use parking_lot::Mutex;
    use simple_dns::rdata::{RData, SRV};
    use simple_dns::{CLASS, Name, Packet, ResourceRecord};

    use super::{PACKET_MAX, Servers};

    /// It listens on a port of this machine until it is dropped.
    pub struct Server {
        pub address: SocketAddr,
        asked: Arc<Mutex<Vec<String>>>,
        thread: Option<JoinHandle<()>>,
    }

    impl Server {
        /// Sends what `script` makes of each question and its message.
        pub fn start(
            mut script: impl FnMut(&str, &[u8]) -> Vec<Vec<u8>> + Send + 'static,
        ) -> Server {
            let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
            let address = socket.local_addr().unwrap();
            let asked = Arc::new(Mutex::new(Vec::new()));
            let thread = thread::spawn({
                let asked = Arc::clone(&asked);
                move || {
                    let mut packet = [0; PACKET_MAX];
                    loop {
                        let (len, client) = socket.recv_from(&mut packet).unwrap();
                        if len == 0 {
                            return;
                        }
                        let query = &packet[..len];
                        let name = Packet::parse(query).unwrap().questions[0].qname.to_string();
                        asked.lock().push(name.clone());
                        for reply in script(&name, query) {
                            // The client may have heard enough.
                            let _ = socket.send_to(&reply, client);
                        }
                    }
                }
            });
            Server { address, asked, thread: Some(thread) }
        }

        /// One that answers with the SRV records that `records` has for the name asked for.
        pub fn with_services(
            mut records: impl FnMut(&str) -> Vec<(u16, u16, u16, &'static str)> + Send + 'static,
        ) -> Server {
            Server::start(move |name, query| {
                let mut reply = reply(query);
                for (priority, weight, port, target) in records(name) {
                    reply.answers.push(service(name, priority, weight, port, target));
                }
                vec![reply.build_bytes_vec_compressed().unwrap()]
            })
        }

        pub fn as_servers(&self) -> Servers {
            Servers::Fixed(vec![self.address])
        }

        /// The names that were asked for so far.
        pub fn asked(&self) -> Vec<String> {
            self.asked.lock().clone()
        }
    }

    impl Drop for Server {
        fn drop(&mut self) {
            let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
            socket.send_to(&[], self.address).unwrap();
            self.thread.take().unwrap().join().unwrap();
        }
    }

    /// An SRV record.
    pub fn service<'a>(
        name: &'a str,
        priority: u16,
        weight: u16,
        port: u16,
        target: &'a str,
    ) -> ResourceRecord<'a> {
        let target = Name::new(target).unwrap();
        let data = RData::SRV(SRV { priority, weight, port, target });
        ResourceRecord::new(Name::new(name).unwrap(), CLASS::IN, 5, data)
    }

    /// A good answer to `query` without any record.
    pub fn reply(query: &[u8]) -> Packet<'_> {
        let query = Packet::parse(query).unwrap();
        let mut reply = Packet::new_reply(query.id());
        reply.questions = query.questions;
        reply
    }
}

#[cfg(test)]
mod tests {
    use simple_dns::rdata::{A, CNAME, PTR, SRV};

    use super::testing::{Server, reply};
    use super::*;

    const NAME: &str = "_mcollective-server._tcp.example.net";

    #[test]
    fn finds_services_without_the_dot_at_their_end() {
        let server = Server::with_services(|_| {
            vec![(10, 5, 4222, "a.example.net."), (20, 0, 4223, "b.example.net")]
        });
        let mut services = server.as_servers().services(NAME, soon()).unwrap();
        services.sort_by_key(|service| service.port);
        let service = |priority, weight, port, host: &str| Service {
            priority,
            weight,
            port,
            host: host.to_owned(),
        };
        assert_eq!(
            services,
            [service(10, 5, 4222, "a.example.net"), service(20, 0, 4223, "b.example.net")]
        );
        server.as_servers().services(&format!("{NAME}."), soon()).unwrap();
        assert_eq!(server.asked(), [NAME, NAME]);
    }

    #[test]
    fn a_lone_dot_and_port_0_are_no_service() {
        let server = Server::with_services(|_| vec![(0, 0, 4222, "."), (0, 0, 0, "a.example.net")]);
        assert!(server.as_servers().services(NAME, soon()).unwrap().is_empty());
    }

    #[test]
    fn finds_the_names_of_an_address() {
        let server = Server::start(|name, query| {
            let mut reply = reply(query);
            for target in ["p.example.net.", "q.example.net"] {
                let data = RData::PTR(PTR(Name::new(target).unwrap()));
                reply.answers.push(record(name, data));
            }
            vec![reply.build_bytes_vec().unwrap()]
        });
        let names = server.as_servers().names(Ipv4Addr::new(10, 1, 2, 3), soon()).unwrap();
        assert_eq!(names, ["p.example.net", "q.example.net"]);
        assert_eq!(server.asked(), ["3.2.1.10.in-addr.arpa"]);
    }

    #[test]
    fn follows_aliases_and_takes_no_records_of_others() {
        let server = Server::start(|name, query| {
            let mut reply = reply(query);
            let alias = |target| RData::CNAME(CNAME(Name::new(target).unwrap()));
            let loud = name.to_ascii_uppercase();
            reply.answers.push(record("other.example.net", srv("evil.example.net")));
            reply.answers.push(record(&loud, alias("alias.example.net")));
            reply.answers.push(record("alias.example.net", alias("end.example.net")));
            reply.answers.push(record("END.example.net", srv("a.example.net")));
            reply.answers.push(record("end.example.net", RData::A(A { address: 1 })));
            vec![reply.build_bytes_vec().unwrap()]
        });
        let services = server.as_servers().services(NAME, soon()).unwrap();
        assert_eq!(services.len(), 1, "{services:?}");
        assert_eq!(services[0].host, "a.example.net");

        let circle = Server::start(|name, query| {
            let mut reply = reply(query);
            let alias = |target| RData::CNAME(CNAME(Name::new(target).unwrap()));
            reply.answers.push(record(name, alias("other.example.net")));
            reply.answers.push(record("other.example.net", alias(name)));
            vec![reply.build_bytes_vec().unwrap()]
        });
        assert!(circle.as_servers().services(NAME, soon()).unwrap().is_empty());
    }

    #[test]
    fn no_such_name_is_no_error() {
        let server = Server::start(|_, query| {
            let mut reply = reply(query);
            *reply.rcode_mut() = RCODE::NameError;
            vec![reply.build_bytes_vec().unwrap()]
        });
        assert!(server.as_servers().services(NAME, soon()).unwrap().is_empty());
        let server = Server::with_services(|_| Vec::new());
        assert!(server.as_servers().services(NAME, soon()).unwrap().is_empty());
    }

    #[test]
    fn what_is_no_answer_to_the_question_is_passed_over() {
        let server = Server::start(|name, query| {
            let good = || {
                let mut reply = reply(query);
                reply.answers.push(record(name, srv("good.example.net")));
                reply
            };
            let evil = |change: fn(&mut Packet<'_>)| {
                let mut packet = reply(query);
                packet.answers.push(record(name, srv("evil.example.net")));
                change(&mut packet);
                packet.build_bytes_vec().unwrap()
            };
            vec![
                Vec::new(),
                b"short".to_vec(),
                evil(|packet| packet.set_id(packet.id() ^ 1)),
                evil(|packet| packet.remove_flags(PacketFlag::RESPONSE)),
                evil(|packet| packet.questions.clear()),
                evil(|packet| packet.questions.push(packet.questions[0].clone())),
                evil(|packet| packet.questions[0].qname = Name::new("example.net").unwrap()),
                evil(|packet| packet.questions[0].qtype = TYPE::A.into()),
                good().build_bytes_vec().unwrap(),
            ]
        });
        let services = server.as_servers().services(NAME, soon()).unwrap();
        assert_eq!(services.len(), 1);
        assert_eq!(services[0].host, "good.example.net");
        assert_eq!(server.asked().len(), 1);
    }

    #[test]
    fn a_flood_of_strange_packets_is_an_error() {
        let server = Server::start(|_, query| {
            let mut strange = reply(query);
            strange.set_id(strange.id() ^ 1);
            vec![strange.build_bytes_vec().unwrap(); STRANGERS_MAX + 10]
        });
        check(server.as_servers(), |error| matches!(error, Error::Strange));
    }

    #[test]
    fn an_answer_cut_short_is_an_error() {
        let server = Server::start(|name, query| {
            let mut reply = reply(query);
            reply.answers.push(record(name, srv("a.example.net")));
            reply.set_flags(PacketFlag::TRUNCATION);
            vec![reply.build_bytes_vec().unwrap()]
        });
        check(server.as_servers(), |error| matches!(error, Error::Truncated));
        assert_eq!(server.asked().len(), 1);
    }

    #[test]
    fn a_server_that_refuses_or_fails_is_followed_by_the_next() {
        let refuse = |code| {
            Server::start(move |_, query| {
                let mut reply = reply(query);
                *reply.rcode_mut() = code;
                vec![reply.build_bytes_vec().unwrap()]
            })
        };
        let (refusing, failing) = (refuse(RCODE::Refused), refuse(RCODE::ServerFailure));
        let garbage = Server::start(|_, query| vec![[&query[..2], &[0xff; 50]].concat()]);
        let good = Server::with_services(|_| vec![(0, 0, 1, "a")]);
        let mut all =
            vec![refusing.address, failing.address, garbage.address, closed(), good.address];
        assert_eq!(Servers::Fixed(all.clone()).services(NAME, soon()).unwrap().len(), 1);
        all.truncate(2);
        check(Servers::Fixed(all), |error| matches!(error, Error::Refused(RCODE::ServerFailure)));
        check(garbage.as_servers(), |error| matches!(error, Error::Malformed));
        check(Servers::Fixed(vec![closed()]), |error| matches!(error, Error::Io(_)));
    }

    #[test]
    fn silence_ends_at_the_deadline() {
        let server = Server::start(|_, _| Vec::new());
        let deadline = Instant::now() + Duration::from_millis(50);
        let error = server.as_servers().services(NAME, deadline).unwrap_err();
        assert!(matches!(error, Error::Silent), "{error:?}");
        assert!(Instant::now() >= deadline);
        check(Servers::Fixed(Vec::new()), |error| matches!(error, Error::Silent));
    }

    #[test]
    fn asks_for_nothing_that_is_no_name() {
        let server = Server::start(|_, _| Vec::new());
        let long = format!("{}.net", "a".repeat(64));
        let deep = "a.".repeat(200);
        for name in ["", ".", "..", "a..b", ".a", &long, &deep] {
            let error = server.as_servers().services(name, soon()).unwrap_err();
            assert!(matches!(error, Error::Name(_)), "{name}: {error:?}");
        }
        assert!(server.asked().is_empty());
    }

    #[test]
    fn takes_no_more_records_than_anybody_needs() {
        let server =
            Server::with_services(|_| (1..=90).map(|port| (0, 0, port, "a.example.net")).collect());
        assert_eq!(server.as_servers().services(NAME, soon()).unwrap().len(), RECORDS_MAX);
    }

    #[test]
    fn a_damaged_answer_never_panics_and_is_bounded() {
        let name = Name::new(NAME).unwrap();
        let question = Question::new(name, TYPE::SRV.into(), CLASS::IN.into(), false);
        let query = query(7, &question).unwrap();
        let mut good = reply(&query);
        for target in ["a.example.net", "b.example.net", "c.example.org"] {
            good.answers.push(record(NAME, srv(target)));
        }
        good.answers.push(record(NAME, RData::CNAME(CNAME(Name::new("x.example.net").unwrap()))));
        let good = good.build_bytes_vec_compressed().unwrap();
        let take = |_: &RData<'_>| Some(());
        assert!(read(&good, 7, &question, &take).unwrap().is_ok());
        let mut random = fastrand::Rng::with_seed(7);
        for _ in 0..100_000 {
            let mut bytes = good.clone();
            for _ in 0..random.usize(1..6) {
                let at = random.usize(..bytes.len());
                bytes[at] = random.u8(..);
            }
            bytes.truncate(random.usize(..=bytes.len()));
            let _ = read(&bytes, 7, &question, &take);
        }
        // A header alone that promises 4 × 65,535 entries.
        let mut header = good[..HEADER_LEN].to_vec();
        header[4..].fill(0xff);
        assert!(matches!(read(&header, 7, &question, &take), Some(Err(Error::Malformed))));
    }

    #[test]
    fn reads_the_servers_of_resolv_conf() {
        let servers = |text: &str| {
            name_servers(text).iter().map(ToString::to_string).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(servers(""), "127.0.0.1:53");
        assert_eq!(servers("# nameserver 10.0.0.1\n;nameserver 10.0.0.2\n"), "127.0.0.1:53");
        assert_eq!(servers("search example.net\nnameserver\t10.0.0.1 \n"), "10.0.0.1:53");
        assert_eq!(servers("nameserver ::1\nnameserver fe80::1%7\n"), "[::1]:53 [fe80::1%7]:53");
        assert_eq!(servers("nameserver fe80::1%lo"), "[fe80::1%1]:53");
        assert_eq!(servers("nameserver fe80::1%no-such-interface"), "127.0.0.1:53");
        assert_eq!(servers("nameserver dns.example.net\nnameserver 1.1.1.1"), "1.1.1.1:53");
        let many: String = (1..9).map(|n| format!("nameserver 10.0.0.{n}\n")).collect();
        assert_eq!(servers(&many), "10.0.0.1:53 10.0.0.2:53 10.0.0.3:53");
    }

    #[test]
    fn a_missing_resolv_conf_means_this_machine() {
        let missing = Servers::File("/nowhere/resolv.conf".into());
        assert_eq!(missing.addresses().unwrap(), name_servers(""));
        assert!(Servers::File("/".into()).addresses().is_err());
    }

    fn record<'a>(name: &'a str, data: RData<'a>) -> ResourceRecord<'a> {
        ResourceRecord::new(Name::new(name).unwrap(), CLASS::IN, 5, data).into_owned()
    }

    fn srv(target: &str) -> RData<'_> {
        RData::SRV(SRV { priority: 0, weight: 0, port: 4222, target: Name::new(target).unwrap() })
    }

    /// A port of this machine on which nobody listens.
    fn closed() -> SocketAddr {
        UdpSocket::bind("127.0.0.1:0").unwrap().local_addr().unwrap()
    }

    /// What must happen has happened by then.
    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(20)
    }

    #[track_caller]
    fn check(servers: Servers, is_expected: impl Fn(&Error) -> bool) {
        let error = servers.services(NAME, soon()).unwrap_err();
        assert!(is_expected(&error), "{error:?}");
    }
}
