//! A crowd at the monitor port that means no good: idle clients, slow ones and garbage, back a second after they are turned out.

use std::io::{self, Read as _, Write as _};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use rustix::net::{AddressFamily, SocketType};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Clients that connect and say nothing.
pub const IDLE: usize = 2_000;

/// Clients that are slow: one half takes for ever to ask, the other asks for the page and never takes it.
pub const SLOW: usize = 200;

/// Clients that say what is no request.
pub const GARBAGE: usize = 20;

/// How often each of them does something.
const PACE: Duration = Duration::from_millis(100);

/// How many times it does not before it comes again.
const AWAY: u32 = 9;

/// Where they come from: not from where the tests' own requests come.
const HOME: IpAddr = IpAddr::V4(Ipv4Addr::new(127, 0, 0, 2));

/// All of them, for as long as this lives.
pub struct Crowd {
    scattered: Arc<AtomicBool>,
    turned_out: Arc<AtomicU64>,
    thread: Option<JoinHandle<()>>,
}

impl Crowd {
    /// Brings them to `port` of this machine.
    ///
    /// # Errors
    ///
    /// When the process may not have a file descriptor for each.
    pub fn gather(port: u16) -> io::Result<Crowd> {
        let needed = (IDLE + SLOW + GARBAGE + 1_000) as u64;
        let limit = getrlimit(Resource::Nofile);
        if limit.current.is_some_and(|current| current < needed) {
            setrlimit(Resource::Nofile, Rlimit { current: Some(needed), maximum: limit.maximum })?;
        }
        let scattered = Arc::new(AtomicBool::new(false));
        let turned_out = Arc::new(AtomicU64::new(0));
        let (over, count) = (Arc::clone(&scattered), Arc::clone(&turned_out));
        let thread = thread::Builder::new().name("crowd".to_owned()).spawn(move || {
            let manners = [
                (Manner::Idle, IDLE),
                (Manner::Asking, SLOW / 2),
                (Manner::Deaf, SLOW / 2),
                (Manner::Garbage, GARBAGE),
            ];
            let clients =
                |(manner, count)| (0..count).map(move |_| Client { manner, stream: None, away: 0 });
            let mut clients: Vec<Client> = manners.into_iter().flat_map(clients).collect();
            let port = SocketAddr::new(Ipv4Addr::LOCALHOST.into(), port);
            while !over.load(Ordering::Relaxed) {
                for client in &mut clients {
                    if !client.act(port) {
                        count.fetch_add(1, Ordering::Relaxed);
                    }
                }
                thread::sleep(PACE);
            }
        })?;
        Ok(Crowd { scattered, turned_out, thread: Some(thread) })
    }

    /// How often one of them lost its connection so far.
    pub fn turned_out(&self) -> u64 {
        self.turned_out.load(Ordering::Relaxed)
    }
}

impl Drop for Crowd {
    fn drop(&mut self) {
        self.scattered.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// A port where everyone is turned out at once: what a crowd there costs is its own and the kernel's.
pub struct Wall {
    port: u16,
    torn_down: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Wall {
    /// On a free port.
    ///
    /// # Errors
    ///
    /// When there is none.
    pub fn build() -> io::Result<Wall> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let port = listener.local_addr()?.port();
        let torn_down = Arc::new(AtomicBool::new(false));
        let over = Arc::clone(&torn_down);
        let thread = thread::Builder::new().name("wall".to_owned()).spawn(move || {
            while !over.load(Ordering::Relaxed) {
                drop(listener.accept());
            }
        })?;
        Ok(Wall { port, torn_down, thread: Some(thread) })
    }

    pub fn port(&self) -> u16 {
        self.port
    }
}

impl Drop for Wall {
    fn drop(&mut self) {
        self.torn_down.store(true, Ordering::Relaxed);
        // It may wait for one more.
        drop(TcpStream::connect((Ipv4Addr::LOCALHOST, self.port)));
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Manner {
    Idle,
    Asking,
    Deaf,
    Garbage,
}

struct Client {
    manner: Manner,
    stream: Option<TcpStream>,
    /// How many more times it does nothing.
    away: u32,
}

impl Client {
    /// Comes, or does a little more of what it does; false when it was turned out.
    fn act(&mut self, port: SocketAddr) -> bool {
        if self.away > 0 {
            self.away -= 1;
            return true;
        }
        let done = match &mut self.stream {
            None => match connect(port) {
                Ok(mut stream) => {
                    let greeted = stream.write_all(self.manner.greeting());
                    self.stream = Some(stream);
                    greeted
                }
                // As if it had not been let in.
                Err(error) => Err(error),
            },
            Some(stream) => match self.manner {
                // It would read nothing but the end.
                Manner::Idle | Manner::Garbage => match stream.read(&mut [0; 512]) {
                    Ok(0) => Err(io::ErrorKind::ConnectionReset.into()),
                    _ => Ok(()),
                },
                Manner::Asking | Manner::Deaf => stream.write_all(b"A"),
            },
        };
        let stays = !done.is_err_and(|error| error.kind() != io::ErrorKind::WouldBlock);
        if !stays {
            (self.stream, self.away) = (None, AWAY);
        }
        stays
    }
}

impl Manner {
    fn greeting(self) -> &'static [u8] {
        match self {
            Manner::Idle => b"",
            Manner::Asking => b"GET /metrics HTTP/1.1\r\nX-",
            Manner::Deaf => b"GET /status.json?state=all HTTP/1.1\r\n\r\n",
            Manner::Garbage => b"\x16\x03\x01\x02\x00\xff{{{{GET\0\r\n\r\n",
        }
    }
}

fn connect(port: SocketAddr) -> io::Result<TcpStream> {
    let socket = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None)?;
    rustix::net::bind(&socket, &SocketAddr::new(HOME, 0))?;
    rustix::net::connect(&socket, &port)?;
    let stream = TcpStream::from(socket);
    stream.set_nonblocking(true)?;
    Ok(stream)
}
