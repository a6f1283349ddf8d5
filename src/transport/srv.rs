//! Brokers that DNS names: SRV records of a domain, and the order in which to try them.
//!
//! Source: `MiddlewareServers` and `QuerySrvRecords` in go-choria's `choria/framework.go`; the order is RFC 2782's.

use std::time::{Duration, Instant};

use crate::dns::{self, Service};
use crate::transport::address::{BadAddress, ServerAddress};

/// Names under a domain that brokers are looked up by; the first that has records counts.
const NAMES: [&str; 2] = ["_mcollective-server._tcp", "_x-puppet-mcollective._tcp"];
/// How long the servers of DNS may take to answer one question, all together.
const QUESTION_MAX: Duration = Duration::from_secs(6);
/// How long all questions may take.
pub(super) const LOOKUP_MAX: Duration = Duration::from_secs(13);

/// Where in DNS the brokers are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Srv {
    /// The domain.
    pub domain: String,
    /// Who knows it.
    pub dns: dns::Servers,
}

impl Srv {
    /// Asks DNS; no service is found where there are no records.
    pub(super) fn look_up(&self) -> Result<Vec<Service>, dns::Error> {
        for name in NAMES {
            let name = format!("{name}.{}", self.domain);
            let found = self.dns.services(&name, Instant::now() + QUESTION_MAX)?;
            if !found.is_empty() {
                return Ok(found);
            }
        }
        Ok(Vec::new())
    }
}

/// A broker, and how early it is tried.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Choice {
    pub(super) priority: u16,
    pub(super) server: ServerAddress,
}

/// The order in which to try `services`, drawn anew each time, and what of them is no address.
pub(super) fn in_order(
    mut services: Vec<Service>,
    random: &mut fastrand::Rng,
) -> (Vec<Choice>, Vec<BadAddress>) {
    // Those without weight first: they must be able to win, if seldom.
    services.sort_by_key(|service| (service.priority, service.weight > 0));
    let (mut choices, mut bad) = (Vec::with_capacity(services.len()), Vec::new());
    while let Some(first) = services.first() {
        let priority = first.priority;
        let rivals = services.iter().take_while(|service| service.priority == priority);
        let total: u32 = rivals.map(|service| u32::from(service.weight)).sum();
        let draw = random.u32(0..=total);
        let mut sum = 0;
        let winner = services.iter().position(|service| {
            sum += u32::from(service.weight);
            sum >= draw
        });
        let service = services.remove(winner.unwrap_or(0));
        match ServerAddress::parse(&format!("{}:{}", service.host, service.port)) {
            Ok(server) => choices.push(Choice { priority, server }),
            Err(error) => bad.push(error),
        }
    }
    (choices, bad)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::dns::testing::Server;

    #[test]
    fn the_lowest_priority_comes_first_and_weights_share_the_work() {
        let services =
            [(20, 9, 1, "late"), (10, 30, 1, "heavy"), (10, 10, 1, "light"), (10, 0, 1, "idle")];
        let services: Vec<Service> = services.into_iter().map(service).collect();
        let mut random = fastrand::Rng::with_seed(7);
        let mut first: BTreeMap<String, u32> = BTreeMap::new();
        for _ in 0..4_000 {
            let (choices, bad) = in_order(services.clone(), &mut random);
            assert!(bad.is_empty());
            assert_eq!(choices.len(), 4);
            assert_eq!((choices[3].priority, choices[3].server.host()), (20, "late"));
            *first.entry(choices[0].server.host().to_owned()).or_default() += 1;
        }
        // 3 to 1, and hardly ever the one without weight.
        assert!((2_700..3_100).contains(&first["heavy"]), "{first:?}");
        assert!((850..1_150).contains(&first["light"]), "{first:?}");
        assert!((30..250).contains(&first["idle"]), "{first:?}");
    }

    #[test]
    fn what_is_no_address_is_left_out() {
        let services = [(0, 0, 1, "a b"), (0, 0, 2, "good.example.net"), (0, 0, 3, r"a\.b")];
        let (choices, bad) =
            in_order(services.into_iter().map(service).collect(), &mut fastrand::Rng::new());
        assert_eq!(choices.len(), 1);
        assert_eq!(choices[0].server.to_string(), "nats://good.example.net:2");
        assert_eq!(bad.len(), 2);
        assert!(in_order(Vec::new(), &mut fastrand::Rng::new()).0.is_empty());
    }

    #[test]
    fn the_second_name_is_asked_for_when_the_first_has_no_records() {
        let server = Server::with_services(|name| match name.starts_with("_x-puppet") {
            true => vec![(0, 0, 4222, "old.example.net")],
            false => Vec::new(),
        });
        let found = srv(&server).look_up().unwrap();
        assert_eq!(found[0].host, "old.example.net");
        let [first, second] = NAMES.map(|name| format!("{name}.example.net"));
        assert_eq!(server.asked(), [first.clone(), second]);

        let server = Server::with_services(|_| vec![(0, 0, 4222, "new.example.net")]);
        assert_eq!(srv(&server).look_up().unwrap()[0].host, "new.example.net");
        assert_eq!(server.asked(), [first]);

        let server = Server::with_services(|_| Vec::new());
        assert!(srv(&server).look_up().unwrap().is_empty());
    }

    fn srv(server: &Server) -> Srv {
        Srv { domain: "example.net".into(), dns: server.as_servers() }
    }

    fn service((priority, weight, port, host): (u16, u16, u16, &str)) -> Service {
        Service { priority, weight, port, host: host.to_owned() }
    }
}
