//! Where to connect: the brokers that were configured or heard of, and the order in which they are tried.
//!
//! Pure, but for [`Brokers::now`]: names are resolved in `dial`, and brokers looked up in DNS in `srv`, each time anew.

use std::collections::HashSet;
use std::fmt;

use crate::errors::chain;
use crate::transport::address::ServerAddress;
use crate::transport::srv::{self, Choice, Srv};

/// Most brokers we remember from INFO; a cluster has a handful.
const DISCOVERED_MAX: usize = 64;

/// Where brokers are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Brokers {
    /// At these addresses.
    Listed(Vec<ServerAddress>),
    /// Where DNS says; it is asked before every round of tries, and `nats://puppet:4222` tried when it knows none.
    Srv(Srv),
}

impl From<Vec<ServerAddress>> for Brokers {
    fn from(servers: Vec<ServerAddress>) -> Brokers {
        Brokers::Listed(servers)
    }
}

/// Brokers as they are named at one moment.
#[derive(Debug, Default)]
pub struct Named {
    /// Where they are, those to be tried first before the others.
    pub found: Vec<ServerAddress>,
    /// What went wrong when they were looked up.
    pub faults: Vec<String>,
}

impl Brokers {
    /// All of them, as a connection would try them now. Asks DNS if that names them, and waits for it.
    pub fn now(&self) -> Named {
        let srv = match self {
            Brokers::Listed(servers) => {
                return Named { found: servers.clone(), faults: Vec::new() };
            }
            Brokers::Srv(srv) => srv,
        };
        let failed = |why: String| format!("no brokers found in DNS for {}: {why}", srv.domain);
        let mut named = Named::default();
        match srv.look_up() {
            Err(error) => named.faults.push(failed(chain(&error))),
            Ok(services) => {
                let (choices, bad) = srv::in_order(services, &mut fastrand::Rng::new());
                named.found.extend(choices.into_iter().map(|choice| choice.server));
                named
                    .faults
                    .extend(bad.iter().map(|error| format!("broker in DNS left out: {error}")));
                if named.found.is_empty() && bad.is_empty() {
                    named.faults.push(failed("there are no SRV records".to_owned()));
                }
            }
        }
        if named.found.is_empty() {
            named.found.push(ServerAddress::customary());
        }
        named
    }
}

/// The addresses, or the domain.
impl fmt::Display for Brokers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Brokers::Listed(servers) => {
                let servers: Vec<String> = servers.iter().map(ToString::to_string).collect();
                f.write_str(&servers.join(", "))
            }
            Brokers::Srv(srv) => write!(f, "SRV records of {}", srv.domain),
        }
    }
}

/// The configured brokers and those they told us of, in the order in which to try them.
#[derive(Debug)]
pub(super) struct Pool {
    configured: Vec<Choice>,
    discovered: Vec<ServerAddress>,
    /// The one we were on last.
    left: Option<ServerAddress>,
}

impl Pool {
    /// `servers` in a random order, so that many clients spread over a cluster.
    pub(super) fn new(servers: Vec<ServerAddress>, random: &mut fastrand::Rng) -> Pool {
        let mut pool = Pool { configured: Vec::new(), discovered: Vec::new(), left: None };
        let mut choices: Vec<Choice> =
            servers.into_iter().map(|server| Choice { priority: 0, server }).collect();
        random.shuffle(&mut choices);
        pool.configure(choices);
        pool
    }

    /// Replaces the configured brokers by `choices`, which are in order; the one we left is the last of its priority.
    ///
    /// True if there are others than before.
    pub(super) fn configure(&mut self, choices: Vec<Choice>) -> bool {
        let mut configured = choices;
        let mut places = HashSet::with_capacity(configured.len());
        configured.retain(|choice| places.insert(choice.server.place()));
        let is_known = |old: &Choice| places.contains(&old.server.place());
        let is_news =
            configured.len() != self.configured.len() || !self.configured.iter().all(is_known);
        self.discovered.retain(|server| !places.contains(&server.place()));
        self.configured = configured;
        if let Some(left) = self.left.take() {
            self.try_last(&left);
        }
        is_news
    }

    /// Whether there is no configured broker.
    pub(super) fn is_empty(&self) -> bool {
        self.configured.is_empty()
    }

    /// Everything worth a try, the configured ones first.
    pub(super) fn round(&self) -> Vec<ServerAddress> {
        let configured = self.configured.iter().map(|choice| &choice.server);
        configured.chain(&self.discovered).cloned().collect()
    }

    /// Puts the broker we are leaving behind the others of its kind and priority.
    pub(super) fn try_last(&mut self, server: &ServerAddress) {
        if let Some(at) = self.configured.iter().position(|c| c.server.is_same_place(server)) {
            let moved = self.configured.remove(at);
            let behind = self.configured.partition_point(|c| c.priority <= moved.priority);
            self.configured.insert(behind, moved);
        }
        if let Some(at) = self.discovered.iter().position(|known| known.is_same_place(server)) {
            let moved = self.discovered.remove(at);
            self.discovered.push(moved);
        }
        self.left = Some(server.clone());
    }

    /// Takes the `connect_urls` of an INFO, which replace those of the one before; they are spoken to as `from` is.
    ///
    /// What is no address is skipped: the broker we are on works all the same.
    pub(super) fn learn(&mut self, connect_urls: &[String], from: &ServerAddress) {
        if connect_urls.is_empty() {
            return;
        }
        let mut discovered: Vec<ServerAddress> = Vec::new();
        for url in connect_urls.iter().take(DISCOVERED_MAX) {
            let Ok(server) = ServerAddress::parse(url) else { continue };
            let server = server.told_by(from);
            let is_known = |known: &ServerAddress| known.is_same_place(&server);
            let configured = self.configured.iter().map(|choice| &choice.server);
            if !configured.chain(&discovered).any(is_known) {
                discovered.push(server);
            }
        }
        // Those known before keep their order, so that one just left stays behind the others.
        let place = |server: &ServerAddress| {
            self.discovered.iter().position(|known| known.is_same_place(server))
        };
        discovered.sort_by_key(|server| place(server).unwrap_or(0));
        self.discovered = discovered;
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn the_pool_tries_the_broker_it_left_last() {
        let mut pool = pool("a:1,b:2,c:3,A:1");
        let first = pool.round()[0].clone();
        pool.try_last(&first);
        let round = pool.round();
        assert_eq!(round.len(), 3);
        assert_eq!(round[2], first);
    }

    #[test]
    fn the_pool_takes_other_brokers_and_remembers_which_it_left() {
        let mut pool = pool("");
        assert!(pool.is_empty());
        assert!(pool.configure(choices(&[(1, "a:1"), (1, "b:1"), (1, "A:1"), (2, "c:1")])));
        assert_eq!(urls(&pool.round()), ["nats://a:1", "nats://b:1", "nats://c:1"]);
        let left = pool.round()[0].clone();
        pool.try_last(&left);
        // Behind those of its priority only.
        assert_eq!(urls(&pool.round()), ["nats://b:1", "nats://a:1", "nats://c:1"]);
        assert!(!pool.configure(choices(&[(1, "a:1"), (1, "b:1"), (2, "c:1")])));
        assert_eq!(urls(&pool.round()), ["nats://b:1", "nats://a:1", "nats://c:1"]);

        pool.learn(&["d:1".into(), "e:1".into()], &left);
        assert!(pool.configure(choices(&[(0, "d:1")])));
        assert_eq!(urls(&pool.round()), ["nats://d:1", "nats://e:1"]);
    }

    #[test]
    fn the_pool_learns_brokers_and_forgets_those_no_longer_named() {
        let mut pool = pool("a:1");
        let from = pool.round()[0].clone();
        pool.learn(
            &["10.0.0.1:1".into(), "a:1".into(), "nonsense".into(), "[::1]:2".into()],
            &from,
        );
        assert_eq!(urls(&pool.round()), ["nats://a:1", "nats://10.0.0.1:1", "nats://[::1]:2"]);
        pool.learn(&[], &from);
        assert_eq!(pool.round().len(), 3);
        pool.learn(&["[::1]:2".into()], &from);
        assert_eq!(urls(&pool.round()), ["nats://a:1", "nats://[::1]:2"]);
    }

    #[test]
    fn brokers_learned_over_tls_are_spoken_to_over_tls_only() {
        let mut pool = pool("tls://a:1");
        let from = pool.round()[0].clone();
        pool.learn(&["10.0.0.1:1".into()], &from);
        assert_eq!(urls(&pool.round()), ["tls://a:1", "tls://10.0.0.1:1"]);
    }

    #[test]
    fn a_broker_heard_of_by_its_address_has_the_name_of_the_one_that_told() {
        let configured = ServerAddress::parse_list("a.example.net:1,10.0.0.9:1").unwrap();
        let mut pool = Pool::new(configured.clone(), &mut fastrand::Rng::with_seed(1));
        let urls = ["10.0.0.1:1", "[::1]:1", "b.example.net:1"].map(str::to_owned);
        let names = |pool: &Pool| -> Vec<_> {
            pool.discovered.iter().map(|server| server.tls_name().to_owned()).collect()
        };
        pool.learn(&urls, &configured[0]);
        assert_eq!(names(&pool), ["a.example.net", "a.example.net", "b.example.net"]);
        // Told on by one that is known by its address itself.
        let told = pool.discovered[0].clone();
        pool.learn(&["10.0.0.2:1".to_owned()], &told);
        assert_eq!(names(&pool), ["a.example.net"]);
        // Without any name, each has its own address.
        pool.learn(&["10.0.0.3:1".to_owned()], &configured[1]);
        assert_eq!(names(&pool), ["10.0.0.3"]);
    }

    #[test]
    fn the_pool_is_bounded() {
        let mut pool = pool("a:1");
        let from = pool.round()[0].clone();
        let flood: Vec<String> = (1..1000).map(|port| format!("10.0.0.1:{port}")).collect();
        pool.learn(&flood, &from);
        assert_eq!(pool.round().len(), 1 + DISCOVERED_MAX);
    }

    #[test]
    fn a_list_as_long_as_a_file_can_hold_takes_no_time() {
        let list: Vec<String> = (0..100_000).map(|n| format!("h{n}:1")).collect();
        let begun = Instant::now();
        assert_eq!(pool(&list.join(",")).round().len(), 100_000);
        // Each with each other would take minutes.
        assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
    }

    fn pool(list: &str) -> Pool {
        Pool::new(ServerAddress::parse_list(list).unwrap(), &mut fastrand::Rng::with_seed(7))
    }

    fn choices(list: &[(u16, &str)]) -> Vec<Choice> {
        let choice = |(priority, text): &(u16, &str)| Choice {
            priority: *priority,
            server: ServerAddress::parse(text).unwrap(),
        };
        list.iter().map(choice).collect()
    }

    fn urls(list: &[ServerAddress]) -> Vec<String> {
        list.iter().map(ToString::to_string).collect()
    }
}
