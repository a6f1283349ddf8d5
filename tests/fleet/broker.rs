//! A small NATS client for many subscriptions on one plain connection.
//!
//! One thread reads and hands each message to the fleet; answers gather in a buffer that goes out in one write.

use std::io::{self, BufRead as _, BufReader, Read as _, Write as _};
use std::net::{Shutdown, TcpStream, ToSocketAddrs as _};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

/// What arrived on a subscription.
#[derive(Debug)]
pub struct Delivery<'a> {
    /// The number the subscription was made with.
    pub sid: u64,
    /// The subject it was published to.
    pub subject: &'a str,
    /// The NATS reply subject, `""` when there is none.
    pub reply: &'a str,
    /// The body.
    pub payload: &'a [u8],
}

/// A connection that comes back when it breaks.
#[derive(Debug)]
pub struct Connection {
    address: String,
    name: String,
    out: Mutex<Out>,
    pongs: Mutex<u64>,
    ponged: Condvar,
    stopped: AtomicBool,
    /// How often the connection was made.
    pub connects: AtomicU64,
    /// Messages that the broker would not have taken.
    pub too_large: AtomicU64,
}

#[derive(Debug, Default)]
struct Out {
    stream: Option<TcpStream>,
    buffer: Vec<u8>,
    pings: u64,
    max_payload: usize,
}

const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
const RECONNECT_PAUSE: Duration = Duration::from_millis(200);
/// Past this much an unsent buffer is written even in the middle of a batch.
const BUFFER: usize = 256 * 1024;

impl Connection {
    /// A connection to `url` that is not made yet; [`Connection::run`] does that.
    pub fn new(url: &str, name: &str) -> Connection {
        let address = url.trim_start_matches("nats://").trim_end_matches('/').to_owned();
        Connection {
            address,
            name: name.to_owned(),
            out: Mutex::default(),
            pongs: Mutex::new(0),
            ponged: Condvar::new(),
            stopped: AtomicBool::new(false),
            connects: AtomicU64::new(0),
            too_large: AtomicU64::new(0),
        }
    }

    /// Connects, reads and reconnects until [`Connection::stop`]; `subscribe` runs after each connect.
    pub fn run(&self, subscribe: &dyn Fn(&Connection), deliver: &mut dyn FnMut(&Delivery<'_>)) {
        while !self.stopped.load(Ordering::Relaxed) {
            let end = self.connect().and_then(|mut reader| {
                subscribe(self);
                self.flush();
                self.connects.fetch_add(1, Ordering::Relaxed);
                self.read(&mut reader, deliver)
            });
            let mut out = self.out.lock();
            out.stream = None;
            out.buffer.clear();
            drop(out);
            if !self.stopped.load(Ordering::Relaxed) {
                drop(end);
                std::thread::sleep(RECONNECT_PAUSE);
            }
        }
    }

    fn connect(&self) -> io::Result<BufReader<TcpStream>> {
        let address = self.address.to_socket_addrs()?.next();
        let address = address.ok_or_else(|| io::Error::other("the broker has no address"))?;
        let stream = TcpStream::connect_timeout(&address, CONNECT_TIMEOUT)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(CONNECT_TIMEOUT))?;
        let mut reader = BufReader::with_capacity(BUFFER, stream.try_clone()?);
        let mut info = String::new();
        reader.read_line(&mut info)?;
        let info: serde_json::Value = info
            .strip_prefix("INFO ")
            .and_then(|info| serde_json::from_str(info).ok())
            .ok_or_else(|| io::Error::other("the broker did not begin with INFO"))?;
        stream.set_read_timeout(None)?;
        let mut out = self.out.lock();
        out.max_payload = info["max_payload"].as_u64().unwrap_or(1 << 20) as usize;
        out.pings = 0;
        out.buffer.clear();
        out.stream = Some(stream);
        *self.pongs.lock() = 0;
        let hello = format!(
            "CONNECT {{\"verbose\":false,\"pedantic\":false,\"tls_required\":false,\"name\":\"{}\",\"lang\":\"rust\",\"version\":\"1\",\"protocol\":1}}\r\n",
            self.name
        );
        out.buffer.extend_from_slice(hello.as_bytes());
        Ok(reader)
    }

    fn read(
        &self,
        reader: &mut BufReader<TcpStream>,
        deliver: &mut dyn FnMut(&Delivery<'_>),
    ) -> io::Result<()> {
        let (mut line, mut payload) = (String::new(), Vec::new());
        loop {
            // Whatever was answered goes out before the thread may have to wait for more.
            if reader.buffer().is_empty() {
                self.flush();
            }
            line.clear();
            if reader.read_line(&mut line)? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            let mut words = line.split_ascii_whitespace();
            match words.next() {
                Some("MSG") => {
                    let words: Vec<&str> = words.collect();
                    let (subject, sid, reply, size) = match words[..] {
                        [subject, sid, size] => (subject, sid, "", size),
                        [subject, sid, reply, size] => (subject, sid, reply, size),
                        _ => return Err(io::Error::other("a message line of another shape")),
                    };
                    let number = |word: &str| word.parse::<usize>().map_err(io::Error::other);
                    payload.resize(number(size)? + 2, 0);
                    reader.read_exact(&mut payload)?;
                    let body = &payload[..payload.len() - 2];
                    deliver(&Delivery { sid: number(sid)? as u64, subject, reply, payload: body });
                }
                Some("PING") => self.write(b"PONG\r\n"),
                Some("PONG") => {
                    *self.pongs.lock() += 1;
                    self.ponged.notify_all();
                }
                _ => {}
            }
        }
    }

    /// Subscribes; sent with the next [`Connection::flush`].
    pub fn subscribe(&self, sid: u64, subject: &str) {
        self.write(format!("SUB {subject} {sid}\r\n").as_bytes());
    }

    /// Ends a subscription; sent with the next [`Connection::flush`].
    pub fn unsubscribe(&self, sid: u64) {
        self.write(format!("UNSUB {sid}\r\n").as_bytes());
    }

    /// Publishes; sent with the next [`Connection::flush`]. What the broker would not take is dropped, as a node does.
    pub fn publish(&self, subject: &str, payload: &[u8]) {
        let mut out = self.out.lock();
        if payload.len() > out.max_payload && out.stream.is_some() {
            self.too_large.fetch_add(1, Ordering::Relaxed);
            return;
        }
        let head = format!("PUB {subject} {}\r\n", payload.len());
        out.buffer.extend_from_slice(head.as_bytes());
        out.buffer.extend_from_slice(payload);
        out.buffer.extend_from_slice(b"\r\n");
        if out.buffer.len() > BUFFER {
            out.send();
        }
    }

    fn write(&self, bytes: &[u8]) {
        self.out.lock().buffer.extend_from_slice(bytes);
    }

    /// Sends what has gathered.
    pub fn flush(&self) {
        self.out.lock().send();
    }

    /// Waits until the broker has taken all that was sent before; `false` when that did not happen in time.
    pub fn settle(&self, deadline: Instant) -> bool {
        while self.connects.load(Ordering::Relaxed) == 0 {
            if Instant::now() > deadline {
                return false;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        let mut out = self.out.lock();
        out.pings += 1;
        let wanted = out.pings;
        out.buffer.extend_from_slice(b"PING\r\n");
        out.send();
        drop(out);
        let mut pongs = self.pongs.lock();
        while *pongs < wanted {
            if self.ponged.wait_until(&mut pongs, deadline).timed_out() {
                return false;
            }
        }
        true
    }

    /// Ends the connection for good.
    pub fn stop(&self) {
        self.stopped.store(true, Ordering::Relaxed);
        let mut out = self.out.lock();
        out.send();
        if let Some(stream) = &out.stream {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

impl Out {
    fn send(&mut self) {
        if self.buffer.is_empty() {
            return;
        }
        // An error shows on the reading side too, and that side reconnects.
        if let Some(stream) = &mut self.stream {
            let _ = stream.write_all(&self.buffer);
        }
        self.buffer.clear();
    }
}
