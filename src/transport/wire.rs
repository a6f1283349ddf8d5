//! NATS protocol lines to and from bytes, as a client speaks them.
//!
//! Pure: bytes in, operations out, no socket and no clock. What a broker says is bounded by the constants below; what
//! another client put into a message (subject, headers) can spoil that message only, never the connection.
//!
//! Source: the NATS client protocol, and the parsers of nats-server 2.9 - 2.14 and nats.go.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Longest line but INFO. A stock broker's own limit for a client's line is 4 KiB, and what it makes of it is hardly longer.
pub const CONTROL_LINE_MAX: usize = 16 * 1024;
/// Longest INFO line; it lists the brokers of a cluster.
pub const INFO_LINE_MAX: usize = 256 * 1024;
/// Largest message we hold, headers included. A stock broker's `max_payload` is 1 MiB, which nodes stay far below.
pub const MESSAGE_MAX: usize = 8 * 1024 * 1024;
/// Largest message we read past; no nats-server can be configured to take a larger one.
pub const SKIPPED_MAX: usize = 64 * 1024 * 1024;
/// Largest header block we read.
pub const HEADER_BLOCK_MAX: usize = 64 * 1024;
/// Most headers of one message.
pub const HEADERS_MAX: usize = 64;

/// The keepalive question, from either side.
pub const PING: &[u8] = b"PING\r\n";
/// Its answer.
pub const PONG: &[u8] = b"PONG\r\n";

/// Capacity the parser keeps between messages; more is given back after a large one.
const BUFFER_KEPT: usize = 256 * 1024;
/// How much of a bad line an error shows, in bytes.
const EXCERPT_MAX: usize = 64;
/// Subject, sid, reply, header size, total size.
const ARGUMENTS_MAX: usize = 5;
const HEADER_VERSION: &[u8] = b"NATS/1.0";

/// One operation of the broker, borrowed from the parser's buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Op<'a> {
    /// What the broker says of itself, JSON for [`Info::parse`]; may come at any time.
    Info(&'a [u8]),
    /// A message for one of our subscriptions.
    Msg(Msg<'a>),
    /// A message above [`MESSAGE_MAX`], read past.
    Skipped {
        /// The subscription it was for.
        sid: u64,
        /// Its size in bytes.
        size: usize,
    },
    /// The broker asks whether we live.
    Ping,
    /// It answers the same question.
    Pong,
    /// Sent in verbose mode only, which we don't ask for.
    Ok,
    /// A complaint, its quotes removed.
    Err(&'a [u8]),
}

/// A message as it came. Subjects are bytes: the broker lets clients publish what is no UTF-8.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Msg<'a> {
    /// Where it was published.
    pub subject: &'a [u8],
    /// The subscription it is for.
    pub sid: u64,
    /// Where an answer is wanted.
    pub reply: Option<&'a [u8]>,
    /// The header block for [`Headers::parse`], which the broker doesn't check.
    pub headers: Option<&'a [u8]>,
    /// The body.
    pub payload: &'a [u8],
}

/// What we can't read on past: the connection must end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ProtocolError {
    /// A line above its bound.
    LineTooLong {
        /// The bound, in bytes.
        max: usize,
    },
    /// A message above [`SKIPPED_MAX`].
    MessageTooLarge {
        /// Its size by its own account.
        size: u64,
    },
    /// A line that is no operation, or has wrong arguments.
    BadLine {
        /// Its beginning.
        excerpt: String,
    },
    /// A message that goes on after its size.
    BadEnd,
    /// An INFO that can't be read.
    BadInfo {
        /// What the JSON parser said.
        reason: String,
    },
}

impl fmt::Display for ProtocolError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ProtocolError::LineTooLong { max } => write!(f, "line of more than {max} bytes"),
            ProtocolError::MessageTooLarge { size } => write!(f, "message of {size} bytes"),
            ProtocolError::BadLine { excerpt } => write!(f, "unexpected line {excerpt:?}"),
            ProtocolError::BadEnd => f.write_str("message is longer than announced"),
            ProtocolError::BadInfo { reason } => write!(f, "unreadable INFO: {reason}"),
        }
    }
}

impl std::error::Error for ProtocolError {}

/// Cuts a stream of bytes, fed in pieces of any size, into operations.
#[derive(Debug, Default)]
pub struct Parser {
    buffer: Vec<u8>,
    /// Where the next operation begins.
    start: usize,
    /// How much of it is known to hold no line end.
    scanned: usize,
    /// How many bytes it needs before another look is worth it.
    needed: usize,
    /// A large message that is being read past.
    skipping: Option<Skipping>,
}

#[derive(Debug, Clone, Copy)]
struct Skipping {
    sid: u64,
    size: usize,
    left: usize,
}

/// What one look at the unread bytes showed.
enum Look<'a> {
    /// An operation, and its length in bytes.
    Whole(Op<'a>, usize),
    /// The first `scanned` bytes hold no line end, or `needed` bytes make it whole.
    Partial { scanned: usize, needed: usize },
    /// A message that is too large to hold, its body starting at `body`.
    Skip { sid: u64, size: usize, body: usize },
}

impl Parser {
    /// Takes the next bytes of the stream.
    pub fn feed(&mut self, mut bytes: &[u8]) {
        if let Some(skipping) = &mut self.skipping {
            let past = skipping.left.min(bytes.len());
            skipping.left -= past;
            bytes = &bytes[past..];
        }
        self.buffer.drain(..self.start);
        self.start = 0;
        if self.buffer.is_empty() && self.buffer.capacity() > BUFFER_KEPT {
            self.buffer = Vec::new();
        }
        self.buffer.extend_from_slice(bytes);
    }

    /// The next whole operation, `None` when more bytes are needed.
    ///
    /// # Errors
    ///
    /// [`ProtocolError`]; nothing that follows can be understood.
    #[expect(clippy::should_implement_trait, reason = "an iterator can't lend from its buffer")]
    pub fn next(&mut self) -> Result<Option<Op<'_>>, ProtocolError> {
        if let Some(Skipping { sid, size, left }) = self.skipping {
            if left > 0 {
                return Ok(None);
            }
            self.skipping = None;
            return Ok(Some(Op::Skipped { sid, size }));
        }
        let unread = &self.buffer[self.start..];
        if unread.len() < self.needed {
            return Ok(None);
        }
        match look(unread, self.scanned)? {
            Look::Whole(op, len) => {
                self.start += len;
                self.scanned = 0;
                self.needed = 0;
                Ok(Some(op))
            }
            Look::Partial { scanned, needed } => {
                self.scanned = scanned;
                self.needed = needed;
                Ok(None)
            }
            Look::Skip { sid, size, body } => {
                self.scanned = 0;
                self.needed = 0;
                let rest = size + 2;
                let here = rest.min(unread.len() - body);
                self.start += body + here;
                if here == rest {
                    return Ok(Some(Op::Skipped { sid, size }));
                }
                self.skipping = Some(Skipping { sid, size, left: rest - here });
                Ok(None)
            }
        }
    }

    /// Whether everything fed so far came out as operations.
    pub fn is_empty(&self) -> bool {
        self.start == self.buffer.len() && self.skipping.is_none()
    }
}

fn look(input: &[u8], scanned: usize) -> Result<Look<'_>, ProtocolError> {
    let is_info = input.get(..4).is_some_and(|start| start.eq_ignore_ascii_case(b"INFO"));
    let max = if is_info { INFO_LINE_MAX } else { CONTROL_LINE_MAX };
    let end = input[scanned..].iter().position(|byte| *byte == b'\n').map(|at| scanned + at);
    if end.unwrap_or(input.len()) > max {
        return Err(ProtocolError::LineTooLong { max });
    }
    let Some(end) = end else {
        return Ok(Look::Partial { scanned: input.len(), needed: input.len() + 1 });
    };
    let body = end + 1;
    let line = input[..end].strip_suffix(b"\r").unwrap_or(&input[..end]);
    let (keyword, rest) = match line.iter().position(is_blank) {
        Some(at) => line.split_at(at),
        None => (line, &line[line.len()..]),
    };
    let is = |name: &[u8]| keyword.eq_ignore_ascii_case(name);
    let bad = || ProtocolError::BadLine { excerpt: excerpt(line) };

    let op = if is(b"MSG") {
        return message(input, body, rest, false).unwrap_or_else(|| Err(bad()));
    } else if is(b"HMSG") {
        return message(input, body, rest, true).unwrap_or_else(|| Err(bad()));
    } else if is(b"PING") {
        Op::Ping
    } else if is(b"PONG") {
        Op::Pong
    } else if is(b"+OK") {
        Op::Ok
    } else if is(b"-ERR") {
        let text = rest.trim_ascii();
        let unquoted = text.strip_prefix(b"'").and_then(|text| text.strip_suffix(b"'"));
        Op::Err(unquoted.unwrap_or(text))
    } else if is(b"INFO") {
        Op::Info(rest)
    } else {
        return Err(bad());
    };
    Ok(Look::Whole(op, body))
}

/// A message whose arguments are `rest` and whose body starts at `body`; `None` if the arguments are wrong.
fn message<'a>(
    input: &'a [u8],
    body: usize,
    rest: &'a [u8],
    with_headers: bool,
) -> Option<Result<Look<'a>, ProtocolError>> {
    let mut arguments = [&rest[..0]; ARGUMENTS_MAX];
    let mut count = 0;
    for argument in rest.split(is_blank).filter(|argument| !argument.is_empty()) {
        *arguments.get_mut(count)? = argument;
        count += 1;
    }
    let (subject, sid, reply, header_size, size) = match (with_headers, &arguments[..count]) {
        (false, [subject, sid, size]) => (subject, sid, None, None, size),
        (false, [subject, sid, reply, size]) => (subject, sid, Some(*reply), None, size),
        (true, [subject, sid, headers, size]) => (subject, sid, None, Some(headers), size),
        (true, [subject, sid, reply, headers, size]) => {
            (subject, sid, Some(*reply), Some(headers), size)
        }
        _ => return None,
    };
    let sid = number(sid)?;
    let claimed = number(size)?;
    let header_size = match header_size {
        Some(size) => Some(number(size).filter(|size| *size <= claimed)?),
        None => None,
    };
    let size = match usize::try_from(claimed) {
        Ok(size) if size <= SKIPPED_MAX => size,
        _ => return Some(Err(ProtocolError::MessageTooLarge { size: claimed })),
    };
    if size > MESSAGE_MAX {
        return Some(Ok(Look::Skip { sid, size, body }));
    }
    let len = body + size + 2;
    if input.len() < len {
        // The line is known to be whole; it is read again, as it is short.
        return Some(Ok(Look::Partial { scanned: 0, needed: len }));
    }
    let (content, end) = input[body..len].split_at(size);
    if end != b"\r\n" {
        return Some(Err(ProtocolError::BadEnd));
    }
    // It is at most `size`, so this holds.
    let header_size = header_size.map(|size| usize::try_from(size).unwrap_or(usize::MAX));
    let (headers, payload) = match header_size {
        Some(at) => content.split_at_checked(at).map(|(headers, rest)| (Some(headers), rest))?,
        None => (None, content),
    };
    let message = Msg { subject, sid, reply, headers, payload };
    Some(Ok(Look::Whole(Op::Msg(message), len)))
}

fn is_blank(byte: &u8) -> bool {
    matches!(byte, b' ' | b'\t')
}

fn number(text: &[u8]) -> Option<u64> {
    if text.is_empty() {
        return None;
    }
    text.iter().try_fold(0u64, |number, byte| {
        let digit = byte.is_ascii_digit().then(|| u64::from(byte - b'0'))?;
        number.checked_mul(10)?.checked_add(digit)
    })
}

fn excerpt(line: &[u8]) -> String {
    String::from_utf8_lossy(&line[..line.len().min(EXCERPT_MAX)]).into_owned()
}

/// The headers of one message.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Headers {
    /// Of the first line, such as 503 for "no responders".
    pub status: Option<u16>,
    /// Names and values in the order received, names as they were written.
    pub list: Vec<(String, String)>,
}

/// A header block that can't be read; the message around it is sound.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BadHeaders;

impl fmt::Display for BadHeaders {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("unreadable headers")
    }
}

impl std::error::Error for BadHeaders {}

impl Headers {
    /// Reads the block of a message.
    ///
    /// # Errors
    ///
    /// [`BadHeaders`] for a wrong version or status, a line without a name and a colon, what is no UTF-8, a missing
    /// last line, or one of the bounds.
    pub fn parse(block: &[u8]) -> Result<Headers, BadHeaders> {
        if block.len() > HEADER_BLOCK_MAX {
            return Err(BadHeaders);
        }
        let mut lines =
            block.split(|byte| *byte == b'\n').map(|line| line.strip_suffix(b"\r").unwrap_or(line));
        let status = lines
            .next()
            .and_then(|line| line.strip_prefix(HEADER_VERSION))
            .ok_or(BadHeaders)
            .and_then(parse_status)?;

        let mut list = Vec::new();
        for line in &mut lines {
            if line.is_empty() {
                // The empty line ends the block, so only the nothing behind its line end may follow.
                return match (lines.next(), lines.next()) {
                    (Some(b""), None) => Ok(Headers { status, list }),
                    _ => Err(BadHeaders),
                };
            }
            let line = std::str::from_utf8(line).map_err(|_| BadHeaders)?;
            let (name, value) = line.split_once(':').ok_or(BadHeaders)?;
            if !is_header(name, value) || list.len() == HEADERS_MAX {
                return Err(BadHeaders);
            }
            list.push((name.to_owned(), value.trim().to_owned()));
        }
        Err(BadHeaders)
    }
}

/// What follows the version: nothing, or a status of three digits with or without a description.
fn parse_status(rest: &[u8]) -> Result<Option<u16>, BadHeaders> {
    if rest.is_empty() {
        return Ok(None);
    }
    if !is_blank(&rest[0]) {
        return Err(BadHeaders);
    }
    let rest = rest.trim_ascii();
    let status = rest.split(is_blank).next().unwrap_or(rest);
    match (status.len(), number(status)) {
        (0, _) => Ok(None),
        (3, Some(status)) => Ok(u16::try_from(status).ok()),
        _ => Err(BadHeaders),
    }
}

fn is_header_name(name: &str) -> bool {
    !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_graphic() && byte != b':')
}

/// Whether a header can be written: its name is one, and its value stays on its line.
pub fn is_header(name: &str, value: &str) -> bool {
    is_header_name(name) && !value.contains(['\r', '\n'])
}

/// What a broker says of itself, the parts we use.
#[derive(Debug, Clone, Default, Deserialize, PartialEq, Eq)]
#[serde(default)]
pub struct Info {
    /// Largest message it takes; absent or not positive means its default.
    pub max_payload: i64,
    /// Whether it speaks TLS only.
    pub tls_required: bool,
    /// Whether it speaks TLS with those who want to.
    pub tls_available: bool,
    /// To be signed by those who log in with a token.
    pub nonce: Option<String>,
    /// Whether headers, and with them "no responders", are understood.
    pub headers: bool,
    /// Other brokers of its cluster, as `host:port`.
    pub connect_urls: Option<Vec<String>>,
    /// Whether it is about to go away and wants its clients to.
    #[serde(rename = "ldm")]
    pub lame_duck: bool,
    /// The account we are in. Newer brokers say so, in an INFO after our CONNECT.
    pub remote_account: Option<String>,
}

impl Info {
    /// Reads the JSON of an INFO line; fields we don't know are ignored.
    ///
    /// # Errors
    ///
    /// [`ProtocolError::BadInfo`].
    pub fn parse(json: &[u8]) -> Result<Info, ProtocolError> {
        serde_json::from_slice(json)
            .map_err(|error| ProtocolError::BadInfo { reason: error.to_string() })
    }
}

/// What we say of ourselves.
#[derive(Serialize)]
pub struct Connect<'a> {
    /// No `+OK` for everything.
    pub verbose: bool,
    /// No extra checks of subjects; ours are a checked type.
    pub pedantic: bool,
    /// A token, for brokers that look for it here.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub jwt: Option<&'a str>,
    /// The signature of the nonce, by the key the token names.
    #[serde(rename = "sig", skip_serializing_if = "Option::is_none")]
    pub signature: Option<&'a str>,
    /// User name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user: Option<&'a str>,
    /// Its password.
    #[serde(rename = "pass", skip_serializing_if = "Option::is_none")]
    pub password: Option<&'a str>,
    /// The same token, for brokers that look for it here.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub auth_token: Option<&'a str>,
    /// Whether we insist on TLS.
    pub tls_required: bool,
    /// Shown in the broker's list of connections.
    pub name: &'a str,
    /// Language of the client.
    pub lang: &'a str,
    /// Version of the client.
    pub version: &'a str,
    /// 1: INFO may come at any time.
    pub protocol: u8,
    /// We hear ourselves where we listen.
    pub echo: bool,
    /// We read HMSG.
    pub headers: bool,
    /// We want to be told when nobody listens.
    pub no_responders: bool,
}

/// Writes CONNECT.
pub fn connect(out: &mut Vec<u8>, connect: &Connect<'_>) {
    out.extend_from_slice(b"CONNECT ");
    serde_json::to_writer(&mut *out, connect).expect("strings and flags always become JSON");
    out.extend_from_slice(b"\r\n");
}

/// Writes SUB.
pub fn subscribe(out: &mut Vec<u8>, pattern: &str, sid: u64) {
    out.extend_from_slice(b"SUB ");
    out.extend_from_slice(pattern.as_bytes());
    out.push(b' ');
    push_number(out, sid);
    out.extend_from_slice(b"\r\n");
}

/// Writes UNSUB.
pub fn unsubscribe(out: &mut Vec<u8>, sid: u64) {
    out.extend_from_slice(b"UNSUB ");
    push_number(out, sid);
    out.extend_from_slice(b"\r\n");
}

/// Writes PUB, or HPUB when there are headers, each of which [`is_header`].
pub fn publish(
    out: &mut Vec<u8>,
    subject: &str,
    reply: Option<&str>,
    headers: &[(&str, &str)],
    payload: &[u8],
) {
    let header_size = header_size(headers);
    out.extend_from_slice(if header_size > 0 { b"HPUB " } else { b"PUB " });
    out.extend_from_slice(subject.as_bytes());
    out.push(b' ');
    if let Some(reply) = reply {
        out.extend_from_slice(reply.as_bytes());
        out.push(b' ');
    }
    if header_size > 0 {
        push_number(out, header_size as u64);
        out.push(b' ');
    }
    push_number(out, (header_size + payload.len()) as u64);
    out.extend_from_slice(b"\r\n");
    if header_size > 0 {
        out.extend_from_slice(HEADER_VERSION);
        out.extend_from_slice(b"\r\n");
        for (name, value) in headers {
            out.extend_from_slice(name.as_bytes());
            out.extend_from_slice(b": ");
            out.extend_from_slice(value.as_bytes());
            out.extend_from_slice(b"\r\n");
        }
        out.extend_from_slice(b"\r\n");
    }
    out.extend_from_slice(payload);
    out.extend_from_slice(b"\r\n");
}

/// Size of the header block that [`publish`] writes, 0 without headers; the broker counts it as part of the message.
pub fn header_size(headers: &[(&str, &str)]) -> usize {
    if headers.is_empty() {
        return 0;
    }
    let lines: usize = headers.iter().map(|(name, value)| name.len() + value.len() + 4).sum();
    HEADER_VERSION.len() + 2 + lines + 2
}

fn push_number(out: &mut Vec<u8>, mut number: u64) {
    let mut digits = [0; 20];
    let mut at = digits.len();
    loop {
        at -= 1;
        digits[at] = b'0' + u8::try_from(number % 10).unwrap_or(0);
        number /= 10;
        if number == 0 {
            break;
        }
    }
    out.extend_from_slice(&digits[at..]);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::json::hostile;

    /// Every operation once, with the odd spellings brokers may use.
    const STREAM: &[u8] = b"INFO {\"server_name\":\"a\",\"max_payload\":1048576} \r\n\
        MSG a.b 7 5\r\nhello\r\n\
        msg a.b 7 reply.to 0\r\n\r\n\
        HMSG inbox 18446744073709551615 16 16\r\nNATS/1.0 503\r\n\r\n\r\n\
        HMSG\tinbox  1 reply 21 23\r\nNATS/1.0\r\nName: x\r\n\r\nhi\r\n\
        PING\r\nPONG \r\n+OK\r\n-ERR 'Authorization Violation'\r\n-ERR\r\nping\n";

    fn expected() -> Vec<String> {
        [
            r#"INFO  {"server_name":"a","max_payload":1048576} "#,
            "MSG a.b 7 None None hello",
            "MSG a.b 7 Some(reply.to) None ",
            "MSG inbox 18446744073709551615 None Some(NATS/1.0 503\r\n\r\n) ",
            "MSG inbox 1 Some(reply) Some(NATS/1.0\r\nName: x\r\n\r\n) hi",
            "PING",
            "PONG",
            "OK",
            "ERR Authorization Violation",
            "ERR ",
            "PING",
        ]
        .map(str::to_owned)
        .to_vec()
    }

    #[test]
    fn reads_every_operation() {
        assert_eq!(read(&[STREAM]), Ok(expected()));
    }

    #[test]
    fn reads_the_same_however_the_stream_is_split() {
        for at in 0..STREAM.len() {
            let (left, right) = STREAM.split_at(at);
            assert_eq!(read(&[left, right]), Ok(expected()), "split at {at}");
        }
        let bytes: Vec<&[u8]> = STREAM.chunks(1).collect();
        assert_eq!(read(&bytes), Ok(expected()));
    }

    #[test]
    fn refuses_nonsense() {
        let bad = |line: &str| ProtocolError::BadLine { excerpt: line.to_owned() };
        check("\r\n", bad(""));
        check("HTTP/1.1 400 Bad Request\r\n", bad("HTTP/1.1 400 Bad Request"));
        check("MSG\r\n", bad("MSG"));
        check("MSG a 1\r\n", bad("MSG a 1"));
        check("MSG a 1 b 2 c\r\n", bad("MSG a 1 b 2 c"));
        check("MSG a 1 2 3 4 5 6\r\n", bad("MSG a 1 2 3 4 5 6"));
        check("MSG a x 1\r\n", bad("MSG a x 1"));
        check("MSG a 1 -1\r\n", bad("MSG a 1 -1"));
        check("MSG a 1 +1\r\n", bad("MSG a 1 +1"));
        check("MSG a 1 99999999999999999999\r\n", bad("MSG a 1 99999999999999999999"));
        check("HMSG a 1 5\r\n", bad("HMSG a 1 5"));
        check("HMSG a 1 6 5\r\n", bad("HMSG a 1 6 5"));
        check("PINGPONG\r\n", bad("PINGPONG"));
        check("MSG a 1 2\r\nabcd", ProtocolError::BadEnd);
        check("MSG a 1 2\r\nab\n\n", ProtocolError::BadEnd);
    }

    #[test]
    fn refuses_what_exceeds_a_bound() {
        let control = ProtocolError::LineTooLong { max: CONTROL_LINE_MAX };
        check(&"x".repeat(CONTROL_LINE_MAX + 1), control.clone());
        check(&format!("MSG {} 1 1\r\n", "x".repeat(CONTROL_LINE_MAX)), control);
        let info = ProtocolError::LineTooLong { max: INFO_LINE_MAX };
        check(&format!("INFO {}", "x".repeat(INFO_LINE_MAX)), info);
        let size = SKIPPED_MAX as u64 + 1;
        check(&format!("MSG a 1 {size}\r\n"), ProtocolError::MessageTooLarge { size });
        check(
            &format!("HMSG a 1 {} {}\r\n", u64::MAX, u64::MAX),
            ProtocolError::MessageTooLarge { size: u64::MAX },
        );
    }

    #[test]
    fn a_long_info_is_taken() {
        let line = format!("INFO {}\r\n", "x".repeat(CONTROL_LINE_MAX * 2));
        assert_eq!(read(&[line.as_bytes()]).map(|ops| ops.len()), Ok(1));
    }

    #[test]
    fn a_message_too_large_to_hold_is_read_past() {
        let size = MESSAGE_MAX + 1;
        let mut stream = format!("MSG big 9 {size}\r\n").into_bytes();
        stream.resize(stream.len() + size, b'x');
        stream.extend_from_slice(b"\r\nPING\r\n");
        let expected = vec![format!("SKIPPED 9 {size}"), "PING".to_owned()];
        for piece in [stream.len(), 65_536, 1_000_001] {
            let pieces: Vec<&[u8]> = stream.chunks(piece).collect();
            assert_eq!(read(&pieces), Ok(expected.clone()), "in pieces of {piece}");
        }
    }

    #[test]
    fn memory_follows_what_came_not_what_was_announced() {
        let mut parser = Parser::default();
        parser.feed(format!("MSG a 1 {MESSAGE_MAX}\r\n").as_bytes());
        assert_eq!(parser.next(), Ok(None));
        assert!(parser.buffer.capacity() < 1024, "{}", parser.buffer.capacity());
    }

    #[test]
    fn memory_of_a_large_message_is_given_back() {
        let mut parser = Parser::default();
        parser.feed(format!("MSG a 1 {MESSAGE_MAX}\r\n").as_bytes());
        parser.feed(&vec![b'x'; MESSAGE_MAX]);
        parser.feed(b"\r\n");
        assert!(matches!(parser.next(), Ok(Some(Op::Msg(_)))));
        parser.feed(b"PING\r\n");
        assert_eq!(parser.next(), Ok(Some(Op::Ping)));
        assert!(parser.buffer.capacity() <= BUFFER_KEPT);
        assert!(parser.is_empty());
    }

    #[test]
    fn reads_headers() {
        let read = |status, list: &[(&str, &str)]| {
            let owned = |(name, value): &(&str, &str)| ((*name).to_owned(), (*value).to_owned());
            Some(Headers { status, list: list.iter().map(owned).collect() })
        };
        headers(b"NATS/1.0\r\n\r\n", read(None, &[]));
        headers(b"NATS/1.0 503\r\n\r\n", read(Some(503), &[]));
        headers(b"NATS/1.0 404 No Messages\r\n\r\n", read(Some(404), &[]));
        headers(b"NATS/1.0 \r\n\r\n", read(None, &[]));
        headers(
            b"NATS/1.0 503\r\nNats-Subject: a.b\r\n\r\n",
            read(Some(503), &[("Nats-Subject", "a.b")]),
        );
        headers(
            b"NATS/1.0\r\nnAmE:a:b \r\nA: c\r\n\r\n",
            read(None, &[("nAmE", "a:b"), ("A", "c")]),
        );
        headers(b"NATS/1.0\r\nEmpty:\r\n\r\n", read(None, &[("Empty", "")]));
        headers(b"NATS/1.0\nA: b\n\n", read(None, &[("A", "b")]));
        headers("NATS/1.0\r\nA: ö\r\n\r\n".as_bytes(), read(None, &[("A", "ö")]));
    }

    #[test]
    fn refuses_bad_headers() {
        headers(b"", None);
        headers(b"\r\n\r\n", None);
        headers(b"NATS/2.0\r\n\r\n", None);
        headers(b"NATS/1.0503\r\n\r\n", None);
        headers(b"NATS/1.0 abc\r\n\r\n", None);
        headers(b"NATS/1.0 5030\r\n\r\n", None);
        headers(b"NATS/1.0 +50\r\n\r\n", None);
        headers(b"NATS/1.0\r\n", None);
        headers(b"NATS/1.0\r\nA: b\r\n", None);
        headers(b"NATS/1.0\r\nA: b", None);
        headers(b"NATS/1.0\r\nno colon\r\n\r\n", None);
        headers(b"NATS/1.0\r\n: b\r\n\r\n", None);
        headers(b"NATS/1.0\r\nA b: c\r\n\r\n", None);
        headers(b"NATS/1.0\r\n folded: c\r\n\r\n", None);
        headers(b"NATS/1.0\r\nA: \xff\r\n\r\n", None);
        headers(b"NATS/1.0\r\nA: b\rc\r\n\r\n", None);
        headers(b"NATS/1.0\r\nA: b\r\n\r\nC: d\r\n\r\n", None);
        headers(format!("NATS/1.0\r\n{}\r\n", "A: b\r\n".repeat(HEADERS_MAX + 1)).as_bytes(), None);
        headers(
            format!("NATS/1.0\r\nA: {}\r\n\r\n", "b".repeat(HEADER_BLOCK_MAX)).as_bytes(),
            None,
        );
    }

    #[test]
    fn only_sound_headers_can_be_written() {
        assert!(is_header("Nats-Expected-Last-Subject-Sequence", "12"));
        assert!(is_header("a", ""));
        assert!(!is_header("", "b"));
        assert!(!is_header("a:b", "c"));
        assert!(!is_header("a b", "c"));
        assert!(!is_header("a\r\nb", "c"));
        assert!(!is_header("a", "b\nPUB c 0"));
        assert!(!is_header("a", "b\r"));
    }

    #[test]
    fn writes_every_operation() {
        let written = |write: &dyn Fn(&mut Vec<u8>)| {
            let mut out = Vec::new();
            write(&mut out);
            String::from_utf8(out).unwrap()
        };
        assert_eq!(written(&|out| subscribe(out, "a.*.>", 12)), "SUB a.*.> 12\r\n");
        assert_eq!(written(&|out| unsubscribe(out, 0)), "UNSUB 0\r\n");
        assert_eq!(written(&|out| publish(out, "a", None, &[], b"hello")), "PUB a 5\r\nhello\r\n");
        assert_eq!(written(&|out| publish(out, "a", Some("r"), &[], b"")), "PUB a r 0\r\n\r\n");
        assert_eq!(
            written(&|out| publish(out, "a", Some("r"), &[("nAmE", "x"), ("b", "")], b"hi")),
            "HPUB a r 26 28\r\nNATS/1.0\r\nnAmE: x\r\nb: \r\n\r\nhi\r\n"
        );
        let hello = Connect {
            verbose: false,
            pedantic: false,
            tls_required: false,
            name: "a \"name\"",
            lang: "rust",
            version: "1",
            protocol: 1,
            echo: true,
            headers: true,
            no_responders: true,
            jwt: None,
            signature: None,
            user: None,
            password: None,
            auth_token: None,
        };
        assert_eq!(
            written(&|out| connect(out, &hello)),
            "CONNECT {\"verbose\":false,\"pedantic\":false,\"tls_required\":false,\"name\":\"a \\\"name\\\"\",\
             \"lang\":\"rust\",\"version\":\"1\",\"protocol\":1,\"echo\":true,\"headers\":true,\"no_responders\":true}\r\n"
        );
        let hello = Connect {
            jwt: Some("t"),
            signature: Some("s"),
            user: Some("u"),
            password: Some("p"),
            auth_token: Some("t"),
            ..hello
        };
        let written = written(&|out| connect(out, &hello));
        let credentials =
            "\"jwt\":\"t\",\"sig\":\"s\",\"user\":\"u\",\"pass\":\"p\",\"auth_token\":\"t\",";
        assert!(written.contains(credentials), "{written}");
    }

    #[test]
    fn what_is_written_with_headers_is_read_back() {
        let sent = [("Nats-Msg-Id", "7"), ("A", "b: c")];
        let mut frame = Vec::new();
        publish(&mut frame, "a.b", Some("r"), &sent, b"body");
        // The broker turns the one into the other.
        let stream = [b"HMSG a.b 1 ", &frame[b"HPUB a.b ".len()..]].concat();
        let mut parser = Parser::default();
        parser.feed(&stream);
        let Ok(Some(Op::Msg(message))) = parser.next() else { panic!("no message") };
        let read = Headers::parse(message.headers.unwrap()).unwrap();
        let sent = sent.map(|(name, value)| (name.to_owned(), value.to_owned()));
        assert_eq!((message.payload, read.list), (&b"body"[..], sent.to_vec()));
        assert_eq!(
            message.headers.unwrap().len(),
            header_size(&[("Nats-Msg-Id", "7"), ("A", "b: c")])
        );
    }

    #[test]
    fn reads_the_info_of_real_brokers() {
        let info = Info::parse(
            br#"{"server_id":"NA","server_name":"b","version":"2.14.2","proto":1,"headers":true,"tls_required":true,
                "max_payload":1048576,"connect_urls":["10.0.0.1:4222","[::1]:4222"],"ldm":true,"xkey":"X","api_lvl":1}"#,
        )
        .unwrap();
        assert_eq!(info.max_payload, 1_048_576);
        assert_eq!(info.connect_urls.unwrap().len(), 2);
        assert!(info.headers && info.tls_required && info.lame_duck);
        assert_eq!(info.remote_account, None);
        let second = br#"{"connect_info":true,"remote_account":"provisioning"}"#;
        assert_eq!(Info::parse(second).unwrap().remote_account.as_deref(), Some("provisioning"));
        assert_eq!(Info::parse(br#"{"connect_urls":null}"#), Ok(Info::default()));
        assert!(Info::parse(b"").is_err());
        assert!(Info::parse(br#"{"max_payload":"much"}"#).is_err());
    }

    #[test]
    fn flipped_bytes_never_panic_and_never_stall() {
        let mut random = fastrand::Rng::with_seed(0x5eed);
        for _ in 0..20_000 {
            let mut stream = STREAM.to_vec();
            for _ in 0..random.usize(1..6) {
                let at = random.usize(..stream.len());
                match random.u8(..3) {
                    0 => stream[at] ^= 1 << random.u8(..8),
                    1 => stream[at] = random.u8(..),
                    _ => drop(stream.remove(at)),
                }
            }
            let at = random.usize(..stream.len());
            let split = read(&[&stream[..at], &stream[at..]]);
            assert_eq!(split, read(&[&stream]), "{:?}", String::from_utf8_lossy(&stream));
        }
    }

    #[test]
    fn flipped_bytes_in_headers_never_panic() {
        let mut random = fastrand::Rng::with_seed(0x5eed);
        for _ in 0..20_000 {
            let mut block =
                b"NATS/1.0 503 No Responders\r\nNats-Subject: a.b\r\nB: c\r\n\r\n".to_vec();
            for _ in 0..random.usize(1..4) {
                let at = random.usize(..block.len());
                block[at] = random.u8(..);
            }
            block.truncate(random.usize(..=block.len()));
            if let Ok(headers) = Headers::parse(&block) {
                assert!(
                    headers.list.iter().all(|(name, value)| is_header(name, value)),
                    "{block:?}"
                );
            }
        }
    }

    /// Every operation of a stream as text.
    fn read(pieces: &[&[u8]]) -> Result<Vec<String>, ProtocolError> {
        let mut parser = Parser::default();
        let mut ops = Vec::new();
        for piece in pieces {
            parser.feed(piece);
            while let Some(op) = parser.next()? {
                ops.push(show(op));
            }
        }
        Ok(ops)
    }

    fn show(op: Op<'_>) -> String {
        let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
        let maybe = |bytes: Option<_>| match bytes {
            Some(bytes) => format!("Some({})", text(bytes)),
            None => "None".to_owned(),
        };
        match op {
            Op::Info(json) => format!("INFO {}", text(json)),
            Op::Msg(message) => format!(
                "MSG {} {} {} {} {}",
                text(message.subject),
                message.sid,
                maybe(message.reply),
                maybe(message.headers),
                text(message.payload)
            ),
            Op::Skipped { sid, size } => format!("SKIPPED {sid} {size}"),
            Op::Ping => "PING".to_owned(),
            Op::Pong => "PONG".to_owned(),
            Op::Ok => "OK".to_owned(),
            Op::Err(reason) => format!("ERR {}", text(reason)),
        }
    }

    #[track_caller]
    fn check(stream: &str, error: ProtocolError) {
        assert_eq!(read(&[stream.as_bytes()]), Err(error));
    }

    #[track_caller]
    fn headers(block: &[u8], expected: Option<Headers>) {
        let expected = expected.ok_or(BadHeaders);
        assert_eq!(Headers::parse(block), expected, "{:?}", String::from_utf8_lossy(block));
    }

    #[test]
    fn survives_any_nesting_in_info() {
        hostile::on_a_small_stack(|| {
            for value in hostile::values(40_000) {
                let _ = Info::parse(value.as_bytes());
                for key in ["remote_account", "max_payload", "headers", "connect_urls", "other"] {
                    let _ = Info::parse(format!(r#"{{"{key}":{value}}}"#).as_bytes());
                }
            }
        });
    }
}
