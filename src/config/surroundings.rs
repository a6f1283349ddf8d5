//! What settings depend on beside their files: the environment, and who and where this machine is.
//!
//! Source: `normalize` in go-choria's `config/config.go`, `DNSFQDN` in `config/util.go` and `puppet/puppetwrapper.go`.

use std::collections::HashMap;
use std::env;
use std::fs;
use std::net::{IpAddr, Ipv4Addr, ToSocketAddrs};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use crossbeam_channel::bounded;
use rustix::process::{Pid, Signal, kill_process_group};

use crate::dns;
use crate::protocol::Identity;

/// What settings depend on beside their files.
#[derive(Debug, Clone, Default)]
pub struct Surroundings {
    /// The environment.
    pub variables: HashMap<String, String>,
    /// The operating system's name for this machine.
    pub host_name: String,
    /// Whether we run as root.
    pub is_root: bool,
    /// Where we were started.
    pub directory: Option<PathBuf>,
    /// Puppet's program that knows facts about this machine.
    pub facter: Option<PathBuf>,
    /// Who knows names.
    pub names: Option<Names>,
}

/// Who knows names.
#[derive(Debug, Clone)]
pub struct Names {
    /// A file such as `/etc/hosts`, which is asked first.
    pub hosts: PathBuf,
    /// DNS.
    pub dns: dns::Servers,
}

impl Surroundings {
    /// Those of this process.
    pub fn of_process() -> Surroundings {
        let text = |text: std::ffi::OsString| text.into_string().ok();
        Surroundings {
            variables: env::vars_os().filter_map(|(k, v)| Some((text(k)?, text(v)?))).collect(),
            host_name: rustix::system::uname().nodename().to_string_lossy().into_owned(),
            is_root: rustix::process::geteuid().is_root(),
            directory: env::current_dir().ok(),
            facter: facter(env::var_os("PATH").as_deref()),
            names: Some(Names {
                hosts: PathBuf::from("/etc/hosts"),
                dns: dns::Servers::File(PathBuf::from("/etc/resolv.conf")),
            }),
        }
    }

    /// A variable of the environment; an empty one is none.
    pub(super) fn variable(&self, name: &str) -> Option<&str> {
        self.variables.get(name).map(String::as_str).filter(|value| !value.is_empty())
    }

    /// Our name when the file has none, and whether it may be shorter than it should be.
    ///
    /// The host name counts if it has two dots; else the name that its first IPv4 address has; else the one facter knows; and
    /// else the host name all the same.
    pub(super) fn full_name(&self) -> (String, bool) {
        if self.host_name.matches('.').count() >= 2 {
            return (self.host_name.clone(), false);
        }
        // What can't be an identity is no answer.
        let is_good = |name: &String| name != "localhost" && Identity::parse(name).is_ok();
        let found = self.name_of_address().filter(is_good);
        match found.or_else(|| self.fact("networking.fqdn").filter(is_good)) {
            Some(name) => (name, false),
            None => (self.host_name.clone(), true),
        }
    }

    /// A fact about this machine, if facter is there and knows it in time.
    pub(super) fn fact(&self, name: &str) -> Option<String> {
        let mut command = Command::new(self.facter.as_ref()?);
        command.arg(name).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
        // A group of its own: it is a script, and what it has started ends with it.
        let child = command.process_group(0).spawn().ok()?;
        let group = Pid::from_child(&child);
        let (ended, output) = bounded(1);
        thread::Builder::new()
            .name("facter".to_owned())
            .spawn(move || ended.send(child.wait_with_output()))
            .ok()?;
        let Ok(output) = output.recv_timeout(FACTER_MAX) else {
            // It may have ended this moment.
            let _ = kill_process_group(group, Signal::KILL);
            return None;
        };
        let output = output.ok().filter(|output| output.status.success())?;
        let text = String::from_utf8(output.stdout).ok()?.replace(['\n', '\r'], "");
        Some(text).filter(|text| !text.is_empty())
    }

    /// The first name of the first IPv4 address of the host name.
    fn name_of_address(&self) -> Option<String> {
        let names = self.names.as_ref()?;
        let host_name = self.host_name.clone();
        let (found, addresses) = bounded(1);
        // The system's resolver knows no time-out. Left to itself it holds nothing but the name.
        thread::Builder::new()
            .name("resolver".to_owned())
            .spawn(move || {
                let addresses = (host_name.as_str(), 0).to_socket_addrs();
                // Nobody may be waiting any more.
                let _ = found.send(addresses.map(|all| all.collect::<Vec<_>>()));
            })
            .ok()?;
        let addresses = addresses.recv_timeout(NAME_MAX).ok()?.ok()?;
        let address = addresses.iter().find_map(|address| match address.ip() {
            IpAddr::V4(address) => Some(address),
            IpAddr::V6(address) => address.to_ipv4_mapped(),
        })?;
        names.of(address)
    }
}

impl Names {
    fn of(&self, address: Ipv4Addr) -> Option<String> {
        let hosts = fs::read_to_string(&self.hosts).unwrap_or_default();
        in_hosts(&hosts, address).or_else(|| {
            let names = self.dns.names(address, Instant::now() + NAME_MAX).ok()?;
            names.into_iter().next()
        })
    }
}

/// The first name that a `hosts` file has for `address`.
fn in_hosts(text: &str, address: Ipv4Addr) -> Option<String> {
    text.lines().find_map(|line| {
        let mut words = line.split('#').next()?.split_ascii_whitespace();
        let is_it = words.next()?.parse() == Ok(address);
        let name = words.next().filter(|_| is_it)?;
        Some(name.trim_end_matches('.').to_owned())
    })
}

/// Puppet's own facter, or the first on the search path.
fn facter(search_path: Option<&std::ffi::OsStr>) -> Option<PathBuf> {
    let own = Path::new("/opt/puppetlabs/bin/facter");
    if own.exists() {
        return Some(own.to_path_buf());
    }
    // A program of the directory we happen to be in is none of ours.
    let folders = env::split_paths(search_path?).filter(|folder| folder.is_absolute());
    folders.map(|folder| folder.join("facter")).find(|path| path.is_file())
}

/// How long facter may take; it starts Ruby first.
const FACTER_MAX: Duration = Duration::from_secs(10);
/// How long DNS may take for each of two questions.
const NAME_MAX: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;
    use crate::dns::testing::{Server, reply};

    #[test]
    fn a_host_name_with_two_dots_is_the_full_name() {
        check(Around::named("prov.example.net"), "prov.example.net", false);
        check(Around::named("a.b."), "a.b.", false);
    }

    #[test]
    fn a_short_one_is_looked_up_by_its_address() {
        let around = Around::named("localhost").with_hosts("127.0.0.1 prov.example.net prov\n");
        check(around, "prov.example.net", false);
        let around = Around::named("localhost").with_name_in_dns("prov.example.net");
        check(around, "prov.example.net", false);
        // Even a short one, but never this.
        let around = Around::named("localhost").with_hosts("127.0.0.1 prov\n");
        check(around, "prov", false);
        let around = Around::named("localhost").with_hosts("127.0.0.1 localhost\n");
        check(around, "localhost", true);
        let around = Around::named("localhost").with_hosts("127.0.0.1 a..b\n");
        check(around, "localhost", true);
    }

    #[test]
    fn facter_is_asked_when_dns_knows_nothing() {
        let fqdn = "[ \"$1\" = networking.fqdn ] && echo prov.example.org";
        check(Around::named("localhost").with_facter(fqdn), "prov.example.org", false);
        let around = Around::named("localhost").with_facter(fqdn).with_hosts("127.0.0.1 x.y.z");
        check(around, "x.y.z", false);
        check(Around::named("prov").with_facter("echo"), "prov", true);
        check(Around::named("prov").with_facter("echo half; exit 1"), "prov", true);
        check(Around::named("prov").with_facter("echo no such fact"), "prov", true);
        check(Around::named("prov").with_facter("printf '\\377'"), "prov", true);
        check(Around::named("prov"), "prov", true);
    }

    #[test]
    fn reads_hosts_as_everybody_does() {
        let check = |text: &str, expected: Option<&str>| {
            let found = in_hosts(text, Ipv4Addr::new(10, 0, 0, 1));
            assert_eq!(found.as_deref(), expected, "{text:?}");
        };
        check("10.0.0.1 a.example.net a", Some("a.example.net"));
        check("::1 x\n10.0.0.2 y\n\t10.0.0.1\ta.example.net.\n", Some("a.example.net"));
        check("10.0.0.1 # a\n10.0.0.1 b # c", Some("b"));
        check("# 10.0.0.1 a", None);
        check("10.0.0.1", None);
        check("10.0.0.10 a", None);
        check("", None);
    }

    #[test]
    fn finds_facter_on_the_search_path() {
        let around = Around::named("").with_facter("");
        let path = around.surroundings.facter.clone().unwrap();
        let folder = path.parent().unwrap();
        let search = env::join_paths([Path::new("/nowhere"), Path::new("."), folder]).unwrap();
        // Puppet's own wins where there is one.
        if !Path::new("/opt/puppetlabs/bin/facter").exists() {
            assert_eq!(facter(Some(&search)), Some(path));
            assert_eq!(facter(Some("/nowhere:.".as_ref())), None);
            assert_eq!(facter(None), None);
        }
    }

    /// Surroundings, and what they need to be kept.
    struct Around {
        surroundings: Surroundings,
        dir: PathBuf,
        _dns: Option<Server>,
    }

    impl Around {
        fn named(host_name: &str) -> Around {
            let name = format!("provisioner-around-{}", fastrand::u64(..));
            let dir = env::temp_dir().join(name);
            fs::create_dir_all(&dir).unwrap();
            let surroundings =
                Surroundings { host_name: host_name.into(), ..Surroundings::default() };
            Around { surroundings, dir, _dns: None }
        }

        fn with_hosts(mut self, text: &str) -> Around {
            let hosts = self.dir.join("hosts");
            fs::write(&hosts, text).unwrap();
            let dns = dns::Servers::Fixed(Vec::new());
            self.surroundings.names = Some(Names { hosts, dns });
            self
        }

        fn with_name_in_dns(mut self, name: &'static str) -> Around {
            let server = Server::start(move |_, query| {
                let question = simple_dns::Packet::parse(query).unwrap().questions.remove(0);
                let mut reply = reply(query);
                let data = simple_dns::rdata::PTR(simple_dns::Name::new(name).unwrap());
                reply.answers.push(simple_dns::ResourceRecord::new(
                    question.qname,
                    simple_dns::CLASS::IN,
                    5,
                    simple_dns::rdata::RData::PTR(data),
                ));
                vec![reply.build_bytes_vec().unwrap()]
            });
            let hosts = self.dir.join("no-hosts");
            self.surroundings.names = Some(Names { hosts, dns: server.as_servers() });
            self._dns = Some(server);
            self
        }

        fn with_facter(mut self, script: &str) -> Around {
            let path = self.dir.join("facter");
            fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
            // Another test may have forked while the file was open for writing, and then nobody can run it for a moment.
            while let Err(error) = Command::new(&path).stdout(Stdio::null()).output() {
                assert_eq!(error.kind(), std::io::ErrorKind::ExecutableFileBusy);
            }
            self.surroundings.facter = Some(path);
            self
        }
    }

    impl Drop for Around {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.dir);
        }
    }

    #[track_caller]
    fn check(around: Around, name: &str, may_be_short: bool) {
        let found = around.surroundings.full_name();
        assert_eq!(found, (name.to_owned(), may_be_short));
    }
}
