//! A broker's address, as people and brokers write it.
//!
//! Source of the accepted forms: `StringHostsToServers` in go-choria's `srvcache`. Unlike there, IPv6 addresses work,
//! and a bad entry is an error that names it.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;

/// Longest host name we take, in bytes; DNS allows no more.
const HOST_LEN_MAX: usize = 253;

/// One broker's address.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ServerAddress {
    tls: bool,
    host: Arc<str>,
    port: u16,
    credentials_dropped: bool,
    /// The name in its certificate, where that is not `host`.
    tls_name: Option<Arc<str>>,
}

/// Why a text is no address of a broker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BadAddress {
    /// The text, without the credentials it may have held.
    pub text: String,
    /// What is wrong with it.
    pub fault: Fault,
}

/// What is wrong with an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// A scheme we can't speak, such as WebSocket's.
    Scheme,
    /// User and password without a scheme before them.
    Credentials,
    /// There is no port.
    NoPort,
    /// The port is not a number from 1 to 65535.
    Port,
    /// The host is no name and no IP address.
    Host,
    /// An IPv6 address without brackets, so that its port can't be told from it.
    Brackets,
    /// Several, and between them something other than a comma.
    Several,
    /// Something follows the port.
    Path,
}

impl ServerAddress {
    /// Reads `host:port` or `scheme://host:port`, an IPv6 address in brackets; `:port` means this machine.
    ///
    /// Schemes are `nats`, `tls`, and `http` and `puppet`, which older SRV records and files hold and which mean `nats`.
    /// User and password after a scheme are dropped, as in the original, see [`ServerAddress::credentials_dropped`];
    /// without a scheme they are refused.
    ///
    /// # Errors
    ///
    /// [`BadAddress`] naming the fault.
    pub fn parse(text: &str) -> Result<ServerAddress, BadAddress> {
        let text = text.trim();
        let (scheme, rest) = match text.split_once("://") {
            Some((scheme, rest)) => (Some(scheme), rest),
            None => (None, text),
        };
        // The last one: a password may hold an `@`.
        let (credentials, place) = match rest.rsplit_once('@') {
            Some((_, place)) => (true, place),
            None => (false, rest),
        };
        let bad = |fault| {
            let text = match scheme {
                Some(scheme) => format!("{scheme}://{place}"),
                None => place.to_owned(),
            };
            BadAddress { text, fault }
        };

        let tls = match scheme.map(str::to_ascii_lowercase).as_deref() {
            None | Some("nats" | "http" | "puppet") => false,
            Some("tls") => true,
            Some(_) => return Err(bad(Fault::Scheme)),
        };
        if credentials && scheme.is_none() {
            return Err(bad(Fault::Credentials));
        }
        let (host, port) = split(place).map_err(bad)?;
        let host = host.into();
        Ok(ServerAddress { tls, host, port, credentials_dropped: credentials, tls_name: None })
    }

    /// Reads addresses separated by commas; empty parts are skipped.
    ///
    /// # Errors
    ///
    /// [`BadAddress`] of the first one that is wrong.
    pub fn parse_list(text: &str) -> Result<Vec<ServerAddress>, BadAddress> {
        text.split(',').filter(|part| !part.trim().is_empty()).map(ServerAddress::parse).collect()
    }

    /// The broker of a network that names none.
    pub fn customary() -> ServerAddress {
        ServerAddress {
            tls: false,
            host: "puppet".into(),
            port: 4222,
            credentials_dropped: false,
            tls_name: None,
        }
    }

    /// The address as a broker at `from` told it: spoken to as that one is.
    ///
    /// Clusters tell of their IP addresses, which are seldom in a certificate: these must prove to have the name of the
    /// broker that told of them. Source: `addURLToPool` in nats.go.
    pub(super) fn told_by(mut self, from: &ServerAddress) -> ServerAddress {
        self.tls |= from.tls;
        let name = from.tls_name.as_ref().unwrap_or(&from.host);
        if is_address(&self.host) && !is_address(name) {
            self.tls_name = Some(Arc::clone(name));
        }
        self
    }

    /// Name or IP address, without brackets.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// TCP port.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The name or IP address its certificate must be for.
    pub fn tls_name(&self) -> &str {
        self.tls_name.as_ref().unwrap_or(&self.host)
    }

    /// Whether nothing may be sent to it in the clear.
    pub fn is_tls(&self) -> bool {
        self.tls
    }

    /// Whether the text held user and password, which are not used; worth a warning.
    pub fn credentials_dropped(&self) -> bool {
        self.credentials_dropped
    }

    /// Equal for those that [`is_same_place`](ServerAddress::is_same_place): a file may list tens of thousands.
    pub(super) fn place(&self) -> (String, u16) {
        (self.host.to_ascii_lowercase(), self.port)
    }

    pub(super) fn is_same_place(&self, other: &ServerAddress) -> bool {
        self.port == other.port && self.host.eq_ignore_ascii_case(&other.host)
    }
}

/// The address as a URL; an IPv6 address gets its brackets back.
impl fmt::Display for ServerAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = if self.tls { "tls" } else { "nats" };
        if self.host.contains(':') {
            write!(f, "{scheme}://[{}]:{}", self.host, self.port)
        } else {
            write!(f, "{scheme}://{}:{}", self.host, self.port)
        }
    }
}

impl fmt::Display for BadAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let BadAddress { text, fault } = self;
        match fault {
            Fault::Scheme => write!(f, "broker address {text:?} has an unknown scheme"),
            Fault::Credentials => {
                write!(f, "broker address with user and password before {text:?} has no scheme")
            }
            Fault::NoPort => write!(f, "broker address {text:?} has no port"),
            Fault::Port => write!(f, "broker address {text:?} has a port that is not 1 to 65535"),
            Fault::Host => {
                write!(f, "broker address {text:?} has neither a host name nor an IP address")
            }
            Fault::Brackets => {
                write!(f, "broker address {text:?} holds an IPv6 address without brackets")
            }
            Fault::Several => {
                write!(f, "{text:?} is more than one broker address; commas separate them")
            }
            Fault::Path => write!(f, "broker address {text:?} goes on after its port"),
        }
    }
}

impl std::error::Error for BadAddress {}

/// Host without brackets, and port.
fn split(place: &str) -> Result<(&str, u16), Fault> {
    let is_between = |c: char| c == ';' || c.is_whitespace();
    if place.split(is_between).filter(|part| part.contains(':')).count() > 1 {
        return Err(Fault::Several);
    }
    let (place, path) = match place.find(['/', '?', '#']) {
        Some(at) => place.split_at(at),
        None => (place, ""),
    };
    if !matches!(path, "" | "/") {
        return Err(Fault::Path);
    }
    if let Some(rest) = place.strip_prefix('[') {
        let (host, port) = rest.split_once(']').ok_or(Fault::Host)?;
        // An address of one link names its interface after a `%`.
        let (address, zone) = host.split_once('%').unwrap_or((host, "eth0"));
        if address.parse::<Ipv6Addr>().is_err() || !is_name(zone) {
            return Err(Fault::Host);
        }
        let port = port.strip_prefix(':').ok_or(Fault::NoPort)?;
        return Ok((host, parse_port(port)?));
    }
    let (host, port) = place.rsplit_once(':').ok_or(Fault::NoPort)?;
    if host.contains(':') {
        return Err(Fault::Brackets);
    }
    let host = if host.is_empty() { "localhost" } else { host };
    if !is_name(host) {
        return Err(Fault::Host);
    }
    Ok((host, parse_port(port)?))
}

fn parse_port(text: &str) -> Result<u16, Fault> {
    // `parse` alone would take a plus sign.
    if text.is_empty() {
        return Err(Fault::NoPort);
    }
    match text.parse() {
        Ok(port) if port > 0 && text.bytes().all(|byte| byte.is_ascii_digit()) => Ok(port),
        _ => Err(Fault::Port),
    }
}

fn is_address(host: &str) -> bool {
    host.parse::<IpAddr>().is_ok()
}

fn is_name(host: &str) -> bool {
    !host.is_empty()
        && host.len() <= HOST_LEN_MAX
        && host
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_every_form_of_an_address() {
        check("broker:4222", "nats://broker:4222");
        check(" broker.example.net:4222 ", "nats://broker.example.net:4222");
        check("nats://broker:4222", "nats://broker:4222");
        check("NATS://broker:4222/", "nats://broker:4222");
        check("tls://broker:4222", "tls://broker:4222");
        check("http://broker:4222", "nats://broker:4222");
        check("puppet://broker:8142", "nats://broker:8142");
        check("10.0.0.1:1", "nats://10.0.0.1:1");
        check("[::1]:4222", "nats://[::1]:4222");
        check("tls://[2001:db8::7]:65535", "tls://[2001:db8::7]:65535");
        check("[fe80::1%eth0]:4222", "nats://[fe80::1%eth0]:4222");
        check(":4223", "nats://localhost:4223");
        check("my_broker:4222", "nats://my_broker:4222");
    }

    #[test]
    fn drops_credentials_after_a_scheme_and_says_so() {
        check("nats://user:p@ss@broker:4222", "nats://broker:4222");
        assert!(ServerAddress::parse("nats://user:pw@b:1").unwrap().credentials_dropped());
        assert!(!ServerAddress::parse("nats://b:1").unwrap().credentials_dropped());
    }

    #[test]
    fn refuses_what_is_no_address() {
        refuse("", Fault::NoPort);
        refuse("broker", Fault::NoPort);
        refuse("broker:", Fault::NoPort);
        refuse("nats://broker", Fault::NoPort);
        refuse("[::1]", Fault::NoPort);
        refuse("broker:0", Fault::Port);
        refuse("broker:65536", Fault::Port);
        refuse("broker:+1", Fault::Port);
        refuse("broker:nats", Fault::Port);
        refuse("::1:4222", Fault::Brackets);
        refuse("[broker]:4222", Fault::Host);
        refuse("[::1:4222", Fault::Host);
        refuse("[::1%]:4222", Fault::Host);
        refuse("bro ker:4222", Fault::Host);
        refuse("bröker:4222", Fault::Host);
        refuse("10.0.0.1:4222 10.0.0.2:4222", Fault::Several);
        refuse("a:4222;b:4222", Fault::Several);
        refuse("nats://a:4222 ; nats://b:4222", Fault::Several);
        refuse("[::1]:4222\t[::2]:4222", Fault::Several);
        refuse("ws://broker:4222", Fault::Scheme);
        refuse("://broker:4222", Fault::Scheme);
        refuse("user:pw@broker:4222", Fault::Credentials);
        refuse("nats://broker:4222/path", Fault::Path);
        refuse("broker:4222?tls=1", Fault::Path);
        refuse(&format!("{}:4222", "a".repeat(254)), Fault::Host);
    }

    #[test]
    fn an_error_never_shows_a_password() {
        let error = ServerAddress::parse("nats://user:hunter2@broker").unwrap_err();
        assert_eq!(error.to_string(), r#"broker address "nats://broker" has no port"#);
        let error = ServerAddress::parse("user:hunter2@broker:1").unwrap_err();
        assert!(!format!("{error} {error:?}").contains("hunter2"), "{error:?}");
    }

    #[test]
    fn a_list_skips_empty_parts_and_names_the_bad_one() {
        let list = ServerAddress::parse_list(", a:1,, nats://b:2 ,").unwrap();
        let list: Vec<String> = list.iter().map(ToString::to_string).collect();
        assert_eq!(list, ["nats://a:1", "nats://b:2"]);
        assert_eq!(ServerAddress::parse_list("a:1,b").unwrap_err().text, "b");
    }

    #[track_caller]
    fn check(text: &str, url: &str) {
        assert_eq!(ServerAddress::parse(text).map(|server| server.to_string()), Ok(url.into()));
    }

    #[track_caller]
    fn refuse(text: &str, fault: Fault) {
        assert_eq!(ServerAddress::parse(text).map_err(|bad| bad.fault), Err(fault), "{text:?}");
    }
}
