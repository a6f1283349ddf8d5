//! A connection that one thread reads while others write, in the clear or in TLS; for nodes and for brokers made for tests.
//!
//! The TLS session works on memory, so that nobody holds it while the socket makes him wait. It is not the daemon's own code, so
//! that a mistake on one side is not made on the other.

use std::fmt;
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;

use openssl::error::ErrorStack;
use openssl::ssl::{
    self, ErrorCode, Ssl, SslConnector, SslContext, SslMethod, SslStream, SslVerifyMode,
};
use openssl::x509::{X509, X509VerifyResult};
use parking_lot::Mutex;

/// One end of a connection; clones share it.
#[derive(Debug, Clone)]
pub enum Socket {
    /// As it is.
    Plain(Arc<TcpStream>),
    /// In TLS.
    Tls(Arc<Session>),
}

impl Socket {
    /// Goes on in TLS as a node does, which asks nobody for his papers.
    ///
    /// # Errors
    ///
    /// Why there is no agreement.
    pub fn connect(tcp: TcpStream) -> io::Result<Socket> {
        let session = Session::agree(tcp, node_session()?, SslStream::connect)?;
        Ok(Socket::Tls(Arc::new(session)))
    }

    /// Goes on in TLS as a broker whose certificate and rules are in `context`.
    ///
    /// # Errors
    ///
    /// Why there is no agreement.
    pub fn accept(tcp: TcpStream, context: &SslContext) -> io::Result<Socket> {
        let session = Session::agree(tcp, Ssl::new(context)?, SslStream::accept)?;
        Ok(Socket::Tls(Arc::new(session)))
    }

    /// Whether it is in TLS, and the other side showed a certificate that our rules find good.
    pub fn is_verified(&self) -> bool {
        match self {
            Socket::Plain(_) => false,
            Socket::Tls(session) => session.is_verified(),
        }
    }

    /// The certificate that the other side showed.
    pub fn certificate(&self) -> Option<X509> {
        match self {
            Socket::Plain(_) => None,
            Socket::Tls(session) => session.ssl.lock().ssl().peer_certificate(),
        }
    }

    /// Sends all of it.
    ///
    /// # Errors
    ///
    /// Of the connection.
    pub fn send(&self, bytes: &[u8]) -> io::Result<()> {
        match self {
            Socket::Plain(tcp) => (&**tcp).write_all(bytes),
            Socket::Tls(session) => session.send(bytes),
        }
    }

    /// Ends it for both sides.
    pub fn close(&self) {
        // The other side may have been first.
        let _ = self.tcp().shutdown(Shutdown::Both);
    }

    /// The connection below.
    pub fn tcp(&self) -> &TcpStream {
        match self {
            Socket::Plain(tcp) => tcp,
            Socket::Tls(session) => &session.tcp,
        }
    }
}

/// For one thread at a time.
impl Read for Socket {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match self {
            Socket::Plain(tcp) => (&**tcp).read(into),
            Socket::Tls(session) => session.read(into),
        }
    }
}

/// TLS over a socket that it does not touch while it is locked.
pub struct Session {
    ssl: Mutex<SslStream<Memory>>,
    /// Records go out in the order in which they were made.
    turn: Mutex<()>,
    tcp: TcpStream,
}

/// What has come and not been read, and what was made and not been sent.
#[derive(Debug, Default)]
struct Memory {
    incoming: Vec<u8>,
    read: usize,
    outgoing: Vec<u8>,
}

/// The most that one record takes, and then some.
const CHUNK: usize = 32 * 1024;

impl Session {
    fn agree(
        tcp: TcpStream,
        ssl: Ssl,
        go_on: fn(&mut SslStream<Memory>) -> Result<(), ssl::Error>,
    ) -> io::Result<Session> {
        let mut stream = SslStream::new(ssl, Memory::default())?;
        let mut chunk = vec![0; CHUNK];
        loop {
            let result = go_on(&mut stream);
            (&tcp).write_all(&std::mem::take(&mut stream.get_mut().outgoing))?;
            match result {
                Ok(()) => break,
                Err(error) if error.code() == ErrorCode::WANT_READ => {}
                Err(error) => return Err(io::Error::other(error)),
            }
            match (&tcp).read(&mut chunk)? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                count => stream.get_mut().incoming.extend_from_slice(&chunk[..count]),
            }
        }
        Ok(Session { ssl: Mutex::new(stream), turn: Mutex::new(()), tcp })
    }

    fn is_verified(&self) -> bool {
        let session = self.ssl.lock();
        let ssl = session.ssl();
        ssl.peer_certificate().is_some() && ssl.verify_result() == X509VerifyResult::OK
    }

    fn send(&self, bytes: &[u8]) -> io::Result<()> {
        let _turn = self.turn.lock();
        let sealed = {
            let mut ssl = self.ssl.lock();
            ssl.write_all(bytes)?;
            std::mem::take(&mut ssl.get_mut().outgoing)
        };
        (&self.tcp).write_all(&sealed)
    }

    fn read(&self, into: &mut [u8]) -> io::Result<usize> {
        let mut chunk = [0; CHUNK];
        loop {
            let mut ssl = self.ssl.lock();
            let result = ssl.ssl_read(into);
            let must_answer = !ssl.get_ref().outgoing.is_empty();
            drop(ssl);
            if must_answer {
                self.send(b"")?;
            }
            match result {
                Ok(count) => return Ok(count),
                Err(error) if error.code() == ErrorCode::WANT_READ => {}
                Err(error) if error.code() == ErrorCode::ZERO_RETURN => return Ok(0),
                Err(error) => return Err(io::Error::other(error)),
            }
            match (&self.tcp).read(&mut chunk)? {
                0 => return Ok(0),
                count => self.ssl.lock().get_mut().incoming.extend_from_slice(&chunk[..count]),
            }
        }
    }
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Session").field("tcp", &self.tcp).finish_non_exhaustive()
    }
}

impl Read for Memory {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let waiting = &self.incoming[self.read..];
        if waiting.is_empty() {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let count = waiting.len().min(into.len());
        into[..count].copy_from_slice(&waiting[..count]);
        self.read += count;
        if self.read == self.incoming.len() {
            self.incoming.clear();
            self.read = 0;
        }
        Ok(count)
    }
}

impl Write for Memory {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.outgoing.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn node_session() -> Result<Ssl, ErrorStack> {
    let mut connector = SslConnector::builder(SslMethod::tls_client())?;
    connector.set_verify(SslVerifyMode::NONE);
    let mut session = connector.build().configure()?;
    session.set_verify_hostname(false);
    session.set_use_server_name_indication(false);
    session.into_ssl("broker")
}
