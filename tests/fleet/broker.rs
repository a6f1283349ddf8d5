//! A small NATS client for many subscriptions on one connection.
//!
//! One thread reads and hands each message to the fleet; answers gather in a buffer that goes out in one write.

use std::io::{self, BufRead as _, BufReader, Read as _};
use std::net::{TcpStream, ToSocketAddrs as _};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use serde_json::json;

use super::socket::Socket;

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

/// What a node shows a broker that wants TLS.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Login {
    /// Its provisioning JWT.
    pub token: String,
    /// User and password, if that token names them.
    pub user: Option<(String, String)>,
}

/// A connection that comes back when it breaks.
#[derive(Debug)]
pub struct Connection {
    address: String,
    name: String,
    /// Without, it is in the clear.
    login: Option<Login>,
    out: Mutex<Out>,
    complaint: Mutex<Option<String>>,
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
    socket: Option<Socket>,
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
    pub fn new(url: &str, name: &str, login: Option<Login>) -> Connection {
        let address = url.split_once("://").map_or(url, |(_, address)| address);
        Connection {
            address: address.trim_end_matches('/').to_owned(),
            name: name.to_owned(),
            login,
            out: Mutex::default(),
            complaint: Mutex::default(),
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
            out.socket = None;
            out.buffer.clear();
            drop(out);
            if !self.stopped.load(Ordering::Relaxed) {
                // What the broker said of it says more than that it hung up.
                if let Err(error) = end {
                    self.complaint.lock().get_or_insert_with(|| error.to_string());
                }
                std::thread::sleep(RECONNECT_PAUSE);
            }
        }
    }

    fn connect(&self) -> io::Result<BufReader<Socket>> {
        let address = self.address.to_socket_addrs()?.next();
        let address = address.ok_or_else(|| io::Error::other("the broker has no address"))?;
        let tcp = TcpStream::connect_timeout(&address, CONNECT_TIMEOUT)?;
        tcp.set_nodelay(true)?;
        tcp.set_read_timeout(Some(CONNECT_TIMEOUT))?;
        let mut reader =
            BufReader::with_capacity(BUFFER, Socket::Plain(Arc::new(tcp.try_clone()?)));
        let mut info = String::new();
        reader.read_line(&mut info)?;
        let info: serde_json::Value = info
            .strip_prefix("INFO ")
            .and_then(|info| serde_json::from_str(info).ok())
            .ok_or_else(|| io::Error::other("the broker did not begin with INFO"))?;
        if self.login.is_some() {
            reader = BufReader::with_capacity(BUFFER, Socket::connect(tcp)?);
        }
        reader.get_ref().tcp().set_read_timeout(None)?;
        let mut hello = json!({
            "verbose": false,
            "pedantic": false,
            "tls_required": self.login.is_some(),
            "name": self.name,
            "lang": "rust",
            "version": "1",
            "protocol": 1,
        });
        if let Some(Login { token, user }) = &self.login {
            hello["auth_token"] = json!(token);
            if let Some((user, password)) = user {
                hello["user"] = json!(user);
                hello["pass"] = json!(password);
            }
        }
        let mut out = self.out.lock();
        out.max_payload = info["max_payload"].as_u64().unwrap_or(1 << 20) as usize;
        out.pings = 0;
        out.buffer.clear();
        out.socket = Some(reader.get_ref().clone());
        *self.pongs.lock() = 0;
        out.buffer.extend_from_slice(format!("CONNECT {hello}\r\n").as_bytes());
        Ok(reader)
    }

    fn read(
        &self,
        reader: &mut BufReader<Socket>,
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
                Some("-ERR") => *self.complaint.lock() = Some(line.trim_end().to_owned()),
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
        if payload.len() > out.max_payload && out.socket.is_some() {
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

    /// What the broker, or the system, had against it.
    pub fn complaint(&self) -> Option<String> {
        self.complaint.lock().clone()
    }

    /// Ends the connection for good.
    pub fn stop(&self) {
        self.stopped.store(true, Ordering::Relaxed);
        let mut out = self.out.lock();
        out.send();
        if let Some(socket) = &out.socket {
            socket.close();
        }
    }
}

impl Out {
    fn send(&mut self) {
        if self.buffer.is_empty() {
            return;
        }
        // An error shows on the reading side too, and that side reconnects.
        if let Some(socket) = &self.socket {
            let _ = socket.send(&self.buffer);
        }
        self.buffer.clear();
    }
}
