//! What systemd is told: that we have started, what we are doing, that we read our settings again, that we end, and that all
//! threads make progress.
//!
//! Its protocol is lines to a datagram socket whose name it gives us (`sd_notify(3)`), which takes less than a crate for it
//! would. A manager that does not listen is not waited for.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::process;
use std::time::Duration;

use crate::clock::monotonic;
use crate::ops::status::Status;
use crate::ops::text::Plain;

/// How often the status line is brought up to date when there is no watchdog.
const STATUS_EVERY: Duration = Duration::from_secs(10);

/// What fits into a line, and with all its characters written out into a message: systemd takes none of more than 4 KiB.
const PROBLEM_CHARS_MAX: usize = 300;

/// The service manager that started us, if one did; by default none.
#[derive(Debug, Default)]
pub struct Systemd {
    socket: Option<UnixDatagram>,
    watchdog: Option<Duration>,
}

impl Systemd {
    /// As the environment of this process says.
    pub fn of_process() -> Systemd {
        Systemd::of(|name| std::env::var_os(name), process::id())
    }

    fn of(variable: impl Fn(&str) -> Option<OsString>, pid: u32) -> Systemd {
        let name = variable("NOTIFY_SOCKET").filter(|name| !name.is_empty());
        let socket = name.and_then(|name| match connect(&name) {
            Ok(socket) => Some(socket),
            Err(error) => {
                log::warn!(component = "systemd"; "Cannot tell systemd that we have started: {error}");
                None
            }
        });
        let number = |name| variable(name)?.to_str()?.parse::<u64>().ok();
        // A watchdog may be meant for who started us.
        let is_ours = number("WATCHDOG_PID").is_none_or(|wanted| wanted == u64::from(pid));
        let watchdog = number("WATCHDOG_USEC").filter(|usec| *usec > 0 && is_ours);
        let watchdog = watchdog.filter(|_| socket.is_some()).map(Duration::from_micros);
        Systemd { socket, watchdog }
    }

    /// How often to tell that we are alive, and what we do; nothing if nobody wants to know.
    pub fn every(&self) -> Option<Duration> {
        self.socket.as_ref()?;
        // Twice in its time, as systemd asks for.
        Some(self.watchdog.map_or(STATUS_EVERY, |time| time / 2).min(STATUS_EVERY))
    }

    /// We have started.
    pub fn ready(&self) {
        self.tell("READY=1");
    }

    /// Our settings are read again; [`Systemd::ready`] follows, whatever came of it.
    pub fn reloading(&self) {
        let now = monotonic().as_micros();
        self.tell(&format!("RELOADING=1\nMONOTONIC_USEC={now}"));
    }

    /// We end, within `time` from now.
    pub fn stopping(&self, time: Duration) {
        // A manager with less patience kills nodes in work.
        self.tell(&format!("STOPPING=1\nEXTEND_TIMEOUT_USEC={}", time.as_micros()));
    }

    /// What we do; and, if `is_alive`, that all threads make progress.
    pub fn beat(&self, status: &Status, is_alive: bool) {
        let alive = if is_alive && self.watchdog.is_some() { "WATCHDOG=1\n" } else { "" };
        self.tell(&format!("{alive}STATUS={}", line(status)));
    }

    fn tell(&self, message: &str) {
        if let Some(socket) = &self.socket {
            // Whoever does not listen does not want to know.
            let _ = socket.send(message.as_bytes());
        }
    }
}

fn connect(name: &OsStr) -> io::Result<UnixDatagram> {
    let socket = UnixDatagram::unbound()?;
    socket.set_nonblocking(true)?;
    let address = match name.as_bytes() {
        [b'@', rest @ ..] => SocketAddr::from_abstract_name(rest)?,
        _ => SocketAddr::from_pathname(name)?,
    };
    socket.connect_addr(&address)?;
    Ok(socket)
}

/// One line for `systemctl status`.
fn line(status: &Status) -> String {
    let Status { state, counts, totals, problems, .. } = status;
    let mut line = format!(
        "{}: {} queued, {} working, {} to be retried, {} provisioned",
        state.words(),
        counts.queued,
        counts.working,
        counts.waiting,
        totals.provisioned
    );
    if let Some(problem) = problems.first() {
        let problem: String = problem.chars().take(PROBLEM_CHARS_MAX).collect();
        line.push_str("; ");
        line.push_str(&Plain(&problem).to_string());
    }
    line
}

#[cfg(test)]
pub(crate) mod testing {
    use super::*;

    /// A manager that listens at a name of its own.
    pub struct Manager {
        socket: UnixDatagram,
        name: String,
    }

    impl Manager {
        /// Nobody has told it anything.
        pub fn new() -> Manager {
            let name = format!("provisioner-notify-{}", fastrand::u64(..));
            let address = SocketAddr::from_abstract_name(&name).unwrap();
            let socket = UnixDatagram::bind_addr(&address).unwrap();
            socket.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
            Manager { socket, name: format!("@{name}") }
        }

        /// As it is known to a process that it started, with other variables of the environment.
        pub fn systemd(&self, others: &[(&str, &str)]) -> Systemd {
            let variable = |name: &str| {
                let own = [("NOTIFY_SOCKET", self.name.as_str())];
                let known = own.iter().chain(others).find(|(known, _)| *known == name);
                known.map(|(_, value)| OsString::from(value))
            };
            Systemd::of(variable, 42)
        }

        /// What it was told next.
        pub fn heard(&self) -> String {
            let mut bytes = [0; 4096];
            let length = self.socket.recv(&mut bytes).unwrap();
            String::from_utf8_lossy(&bytes[..length]).into_owned()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::testing::Manager;
    use super::*;
    use crate::ops::status::testing;

    #[test]
    fn tells_start_and_end_and_what_it_does() {
        let manager = Manager::new();
        let systemd = manager.systemd(&[]);
        systemd.ready();
        assert_eq!(manager.heard(), "READY=1");
        systemd.beat(&testing::status(), true);
        let status = "STATUS=paused by an operator: 1234 queued, 1 working, 5 to be retried, 54321 provisioned; paused by an operator";
        assert_eq!(manager.heard(), status, "there is no watchdog");
        systemd.stopping(Duration::from_secs(40));
        assert_eq!(manager.heard(), "STOPPING=1\nEXTEND_TIMEOUT_USEC=40000000");
        assert_eq!(systemd.every(), Some(STATUS_EVERY));
    }

    #[test]
    fn feeds_the_watchdog_twice_in_its_time_while_all_is_well() {
        let manager = Manager::new();
        let systemd = manager.systemd(&[("WATCHDOG_USEC", "6000000"), ("WATCHDOG_PID", "42")]);
        assert_eq!(systemd.every(), Some(Duration::from_secs(3)));
        systemd.beat(&testing::status(), true);
        assert!(manager.heard().starts_with("WATCHDOG=1\nSTATUS="));
        systemd.beat(&testing::status(), false);
        assert!(manager.heard().starts_with("STATUS="));
        let other = manager.systemd(&[("WATCHDOG_USEC", "6000000"), ("WATCHDOG_PID", "43")]);
        assert_eq!(other.every(), Some(STATUS_EVERY), "it is meant for another process");
    }

    #[test]
    fn no_problem_is_too_long_to_be_told() {
        let manager = Manager::new();
        let problems = vec!["\u{202e}".repeat(100_000)];
        manager.systemd(&[]).beat(&Status { problems, ..testing::status() }, true);
        let heard = manager.heard();
        assert!(heard.ends_with("\\u{202e}") && heard.len() < 4_000, "{}", heard.len());
    }

    #[test]
    fn says_since_when_it_reloads() {
        let manager = Manager::new();
        let before = monotonic().as_micros();
        manager.systemd(&[]).reloading();
        let heard = manager.heard();
        let since: u128 =
            heard.strip_prefix("RELOADING=1\nMONOTONIC_USEC=").unwrap().parse().unwrap();
        assert!((before..=monotonic().as_micros()).contains(&since), "{heard}");
    }

    #[test]
    fn without_a_manager_nothing_is_told() {
        let systemd = Systemd::of(|_| None, 42);
        assert_eq!(systemd.every(), None);
        systemd.ready();
        let gone = Systemd::of(|name| (name == "NOTIFY_SOCKET").then(|| "/nowhere/x".into()), 42);
        assert_eq!(gone.every(), None);
        gone.ready();
    }

    #[test]
    fn a_manager_that_does_not_read_is_not_waited_for() {
        let manager = Manager::new();
        let systemd = manager.systemd(&[]);
        // More than any queue of the system takes.
        for _ in 0..10_000 {
            systemd.ready();
        }
        assert_eq!(manager.heard(), "READY=1");
    }
}
