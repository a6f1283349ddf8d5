//! The monitor port when file descriptors run out. Alone in its program: the limit is that of the whole process.

use std::fs::File;
use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, TcpStream};
use std::sync::Arc;

use choria_provisioner::metrics::Metrics;
use choria_provisioner::ops::http::Monitor;
use choria_provisioner::ops::status::{Nodes, Query, Readiness, Show, Status};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

#[test]
fn the_monitor_port_survives_the_end_of_file_descriptors() {
    let metrics = Metrics::new("lon");
    let monitor = Monitor::bind(IpAddr::V4(Ipv4Addr::LOCALHOST), 0).unwrap();
    let running = monitor.serve(Arc::clone(&metrics), Arc::new(Unasked)).unwrap();
    let scrape = || {
        let mut stream = TcpStream::connect(running.address()).unwrap();
        stream.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        assert!(text.starts_with("HTTP/1.1 200 OK\r\n"), "{text}");
    };

    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: Some(64), maximum: limit.maximum }).unwrap();
    let mut files = Vec::new();
    while let Ok(file) = File::open("/dev/null") {
        files.push(file);
    }
    // One for us to connect with; none is left for the port to accept with.
    files.pop().unwrap();
    let refused = metrics.monitor_refused.with_label_values(&["descriptors"]);
    for number in 1..=100 {
        // The port takes our descriptor for a moment when it looks whether there is another connection.
        let mut stream = loop {
            match TcpStream::connect(running.address()) {
                Ok(stream) => break stream,
                Err(error) => assert!(error.to_string().contains("Too many open files"), "{error}"),
            }
        };
        let mut nothing = Vec::new();
        assert!(matches!(stream.read_to_end(&mut nothing), Ok(0) | Err(_)));
        assert_eq!(refused.get(), number);
    }

    drop(files);
    scrape();
    running.stop();
}

/// Only metrics are asked for here.
struct Unasked;

impl Show for Unasked {
    fn stuck(&self) -> Vec<String> {
        unreachable!("nobody asks whether it is alive")
    }

    fn readiness(&self) -> Readiness {
        unreachable!("nobody asks")
    }

    fn status(&self) -> Status {
        unreachable!("nobody asks")
    }

    fn nodes(&self, _: &Query) -> Nodes {
        unreachable!("nobody asks")
    }
}
