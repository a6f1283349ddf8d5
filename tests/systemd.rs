//! What the service manager is told, by the real daemon to a socket that stands in for systemd's.

mod common;
mod fleet;

use std::os::unix::net::UnixDatagram;

use common::admin::{run, say, with_socket};
use common::{Builder, Daemon, NatsServer, SOON, wait_until, waiting_helper, within};
use fleet::Fleet;

/// Where a daemon tells how it is.
struct Manager(UnixDatagram);

impl Manager {
    /// A manager, and a daemon that knows of it.
    fn with_daemon(broker: &NatsServer) -> (Manager, Builder) {
        let builder = with_socket(Daemon::builder(&broker.address()));
        let path = builder.dir().join("notify.sock");
        let socket = UnixDatagram::bind(&path).expect("the folder is ours");
        socket.set_read_timeout(Some(SOON)).expect("the socket is good");
        let builder = builder
            .env("NOTIFY_SOCKET", &path.display().to_string())
            .env("WATCHDOG_USEC", "1000000");
        (Manager(socket), builder)
    }

    /// The next message.
    fn hear(&self) -> String {
        let mut bytes = [0; 4096];
        let length = self.0.recv(&mut bytes).expect("there is another message");
        String::from_utf8_lossy(&bytes[..length]).into_owned()
    }

    /// The next message that is more than how it goes.
    fn hear_news(&self) -> String {
        loop {
            let message = self.hear();
            if !message.contains("STATUS=") {
                return message;
            }
        }
    }
}

#[test]
fn start_watchdog_reload_and_end_are_told() {
    let broker = NatsServer::start();
    let (manager, builder) = Manager::with_daemon(&broker);
    let mut daemon = builder.start();
    assert_eq!(manager.hear(), "READY=1");
    assert!(manager.hear().starts_with("WATCHDOG=1\nSTATUS="));
    let fleet = Fleet::builder(&broker.url()).nodes(3).start();
    fleet.wait_all_provisioned(within(SOON)).expect("provisioned");
    let done = "provisioning: 0 queued, 0 working, 0 to be retried, 3 provisioned";
    wait_until(SOON, "it says what it has done", || {
        manager.hear() == format!("WATCHDOG=1\nSTATUS={done}")
    });
    assert_eq!(daemon.get("/livez").expect("the port answers"), (200, "alive\n".to_owned()));

    daemon.write_setting("workers", 7);
    say(&daemon, &["reload"]);
    assert!(manager.hear_news().starts_with("RELOADING=1\nMONOTONIC_USEC="));
    assert_eq!(manager.hear_news(), "READY=1");
    daemon.write_setting("workers", "many");
    assert_eq!(run(&daemon, &["reload"]).status.code(), Some(1));
    assert!(manager.hear_news().starts_with("RELOADING=1\nMONOTONIC_USEC="));
    assert_eq!(manager.hear_news(), "READY=1", "it goes on, with the settings of before");
    wait_until(SOON, "its status says what is wrong", || {
        manager.hear().contains("; the last reload was refused: ")
    });
    assert!(daemon.stop().success());
    assert_eq!(manager.hear_news(), "STOPPING=1\nEXTEND_TIMEOUT_USEC=50000000");
}

#[test]
fn the_watchdog_is_fed_while_nodes_finish_and_a_long_drain_gets_its_time() {
    let broker = NatsServer::start();
    let (manager, builder) = Manager::with_daemon(&broker);
    let (begun, go_on) = (builder.dir().join("begun"), builder.dir().join("go-on"));
    let builder = builder.set("drain_timeout", "10m").helper(&waiting_helper(&begun, &go_on));
    let mut daemon = builder.start();
    let fleet = Fleet::builder(&broker.url()).nodes(1).start();
    wait_until(SOON, "the helper runs", || begun.exists());
    daemon.terminate();
    assert_eq!(manager.hear_news(), "READY=1");
    assert_eq!(manager.hear_news(), "STOPPING=1\nEXTEND_TIMEOUT_USEC=620000000");
    for _ in 0..3 {
        assert!(manager.hear().starts_with("WATCHDOG=1\nSTATUS=shutting down: "));
    }
    std::fs::write(&go_on, "").expect("the folder is ours");
    assert!(daemon.wait(SOON).success());
    assert!(fleet.node(0).is_provisioned());
}
