//! Reads one connection to its end, and calls the handlers.

use std::io::{self, Read};
use std::mem;
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use crossbeam_channel::Sender;

use crate::pulse::{self, PIECE_MAX};
use crate::shutdown::Never;
use crate::transport::Message;
use crate::transport::address::ServerAddress;
use crate::transport::connection::{COMPONENT, Shared};
use crate::transport::errors::{Ending, ErrorKind};
use crate::transport::outbox::Wire;
use crate::transport::wire::{self, Headers, Info, Msg, Op, Parser};

/// Bytes read at once.
const READ_SIZE: usize = 64 * 1024;

/// The thread that reads. It writes nothing itself, and waits for nothing but the socket.
pub(super) struct Reader {
    shared: Arc<Shared>,
    wire: Arc<Wire>,
    server: ServerAddress,
    parser: Parser,
    /// Dropped with the reader, which tells the keeper.
    end: Sender<Never>,
    /// The broker's last word, if it was a complaint: it explains why the connection ends.
    complaint: Option<String>,
    /// The broker has said that it is going away.
    is_leaving: bool,
}

impl Reader {
    /// `parser` may hold what came with the greeting.
    pub(super) fn new(
        shared: Arc<Shared>,
        wire: Arc<Wire>,
        server: ServerAddress,
        parser: Parser,
        end: Sender<Never>,
    ) -> Reader {
        Reader { shared, wire, server, parser, end, complaint: None, is_leaving: false }
    }

    pub(super) fn start(self) -> io::Result<JoinHandle<()>> {
        thread::Builder::new().name("broker-reader".to_owned()).spawn(move || self.run())
    }

    fn run(mut self) {
        self.shared.options.pulses.attend("broker-reader", PIECE_MAX);
        let Ending { kind, reason } = self.read();
        self.wire.end(kind, reason);
        drop(self.end);
    }

    /// Reads until there is nothing more to read, and says why.
    fn read(&mut self) -> Ending {
        let mut parser = mem::take(&mut self.parser);
        let mut piece = vec![0; READ_SIZE];
        loop {
            pulse::works();
            if let Err(ending) = self.take_all(&mut parser) {
                return ending;
            }
            pulse::waits();
            let ending = match self.wire.socket().read(&mut piece) {
                Ok(0) => Ending::new(ErrorKind::Lost, "it closed the connection"),
                Ok(len) => match self.wire.open(&piece[..len], &mut parser) {
                    Ok(()) => continue,
                    Err(ending) => ending,
                },
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => Ending::new(ErrorKind::Lost, format!("reading failed: {error}")),
            };
            // What came before the end still counts, and may explain it.
            return match self.take_all(&mut parser) {
                Ok(()) => self.explained(ending),
                Err(ending) => ending,
            };
        }
    }

    /// An end of the connection, with the broker's last word about it.
    fn explained(&self, ending: Ending) -> Ending {
        match &self.complaint {
            Some(complaint) => {
                Ending { reason: format!("{}: {complaint}", ending.reason), ..ending }
            }
            None => ending,
        }
    }

    fn take_all(&mut self, parser: &mut Parser) -> Result<(), Ending> {
        while let Some(op) = parser.next()? {
            self.complaint = None;
            match op {
                Op::Msg(message) => self.deliver(message),
                Op::Ping => {
                    // If it is gone, the next read says so.
                    let _ = self.wire.leave(|frame| frame.extend_from_slice(wire::PONG));
                }
                Op::Pong => self.wire.pong(),
                Op::Ok => {}
                Op::Info(json) => self.learn(&Info::parse(json)?),
                Op::Err(text) => {
                    // If it is one of those that end the connection, the broker ends it.
                    let Ending { kind, reason } = Ending::complaint(text);
                    self.shared.error(kind, format!("{} says: {reason}", self.server));
                    self.complaint = Some(reason);
                }
                Op::Skipped { size, .. } => {
                    let max = wire::MESSAGE_MAX;
                    let text = format!("a message of {size} bytes exceeds our limit of {max}");
                    self.shared.error(ErrorKind::TooLarge, text);
                }
            }
        }
        Ok(())
    }

    /// Takes what the broker says of itself. It may say so as often as it likes: of its end we speak once.
    fn learn(&mut self, info: &Info) {
        self.shared.learn(info, &self.server);
        if info.lame_duck && !mem::replace(&mut self.is_leaving, true) {
            log::info!(component = COMPONENT; "{} is about to shut down", self.server);
        }
    }

    fn deliver(&self, message: Msg<'_>) {
        // A message that was on its way when its subscription ended has none.
        let Some(handler) = self.shared.subscriptions.lock().handler(message.sid) else { return };
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let subject = text(message.subject);
        let headers = match message.headers.map(Headers::parse) {
            None => Headers::default(),
            Some(Ok(headers)) => headers,
            Some(Err(bad)) => {
                self.shared.error(ErrorKind::BadHeader, format!("{bad} on {subject:?}"));
                Headers::default()
            }
        };
        handler(Message {
            subject,
            reply: message.reply.map(text),
            status: headers.status,
            headers: headers.list,
            payload: message.payload.to_vec(),
        });
    }
}
