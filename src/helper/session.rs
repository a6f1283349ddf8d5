//! One helper process that is asked about many nodes, one at a time: a line in, a line out.
//!
//! A line that comes late, early or twice must never be taken for another node's, so whatever is not exactly the answer
//! to the question that was asked ends the session, and with it the process.

use std::fmt;
use std::io;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, TryRecvError};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::process::{Cause, Fed, Process, Ready, Stderr};
use super::text::{escape, fault};
use super::{Input, answer};
use crate::protocol::json;
use crate::shutdown::Never;

/// A line for the helper, numbered so that its answer can be told from any other.
#[derive(Debug)]
pub(super) struct Question {
    pub id: String,
    pub line: Vec<u8>,
}

impl Question {
    /// Asks about the node of `input`; `number` belongs to no other question of this process.
    pub fn new(number: u64, input: &Input<'_>) -> serde_json::Result<Question> {
        #[derive(Serialize)]
        struct Line<'a> {
            id: &'a str,
            node: &'a Input<'a>,
        }

        let id = number.to_string();
        let mut line = json::compact(&Line { id: &id, node: input })?.into_bytes();
        // Claims are passed on as they were written. Within a text no line break can stand as it is, elsewhere it is a blank.
        for byte in line.iter_mut().filter(|byte| matches!(byte, b'\n' | b'\r')) {
            *byte = b' ';
        }
        line.push(b'\n');
        Ok(Question { id, line })
    }
}

/// What the helper said about the node it was asked about. Not to be printed: it may hold a private key.
#[derive(PartialEq, Eq)]
pub(super) enum Said {
    /// Its answer, as it would be written to stdout in the other mode.
    Reply(String),
    /// What would be a non-zero exit in the other mode.
    Error(String),
}

impl Said {
    /// Reads the line that answers the question called `id`.
    pub fn read(line: &[u8], id: &str) -> Result<Said, Confusion> {
        #[derive(Deserialize)]
        struct Line<'a> {
            #[serde(borrow)]
            id: Option<&'a RawValue>,
            #[serde(borrow)]
            reply: Option<&'a RawValue>,
            error: Option<String>,
        }

        let text = String::from_utf8_lossy(line);
        let line: Line<'_> = match serde_json::from_str(&text) {
            Ok(line) => line,
            Err(_) if line.trim_ascii().is_empty() => return Err(Confusion::Empty),
            Err(error) => return Err(Confusion::Garbage(error)),
        };
        match (line.id, line.reply, line.error) {
            (None, None, None) if answer::names_a_key(&text) => Err(Confusion::ExecStyle),
            (None, _, _) => Err(Confusion::NoId),
            (Some(other), _, _) if !json::text(other).is_ok_and(|other| other == id) => {
                Err(Confusion::OtherId(other.get().to_owned()))
            }
            (Some(_), Some(reply), None) => Ok(Said::Reply(reply.get().to_owned())),
            (Some(_), None, Some(error)) => Ok(Said::Error(error)),
            (Some(_), None, None) => Err(Confusion::SaysNothing),
            (Some(_), Some(_), Some(_)) => Err(Confusion::SaysBoth),
        }
    }
}

/// A line that is no answer to our question.
#[derive(Debug)]
pub enum Confusion {
    /// Nothing but white space.
    Empty,
    /// No JSON object, or one with wrong types.
    Garbage(serde_json::Error),
    /// What a helper writes that is started for each node.
    ExecStyle,
    /// An object that does not say which question it answers.
    NoId,
    /// The answer to another question.
    OtherId(String),
    /// Neither a reply nor an error.
    SaysNothing,
    /// A reply and an error.
    SaysBoth,
    /// More than the line that was asked for; the beginning of the rest.
    Unasked(String),
}

impl fmt::Display for Confusion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Confusion::Empty => f.write_str("an empty line"),
            Confusion::Garbage(error) => {
                let error = fault(error, SHOWN_CHARS_MAX);
                write!(f, "a line that is no answer: {error}")?;
                if error.starts_with("EOF") {
                    f.write_str("; an answer must be on one line")?;
                }
                Ok(())
            }
            Confusion::ExecStyle => f.write_str(
                "an answer in the style of helper_mode exec: with persistent it must be \
                 {\"id\":\"...\",\"reply\":{...}}, with the id of the request",
            ),
            Confusion::NoId => f.write_str("an answer without the id of its request"),
            Confusion::OtherId(id) => {
                let id = escape(id.as_bytes(), SHOWN_CHARS_MAX);
                write!(f, "an answer to another request: its id is {id}")
            }
            Confusion::SaysNothing => f.write_str("an answer with neither a reply nor an error"),
            Confusion::SaysBoth => f.write_str("an answer with both a reply and an error"),
            Confusion::Unasked(rest) if rest.is_empty() => {
                f.write_str("an empty line that was not asked for")
            }
            Confusion::Unasked(rest) => write!(f, "a line that was not asked for: {rest}"),
        }
    }
}

/// Why a session had to end.
#[derive(Debug)]
pub(super) enum Fault {
    /// The process ended, or closed its input or output.
    Gone {
        /// What it had written of a line.
        partial: Option<Confusion>,
    },
    TimedOut,
    Aborted,
    TooLong,
    Unreadable(io::Error),
    Confused(Confusion),
}

/// What bounds one question.
pub(super) struct Bounds<'a> {
    pub deadline: Instant,
    pub output_max: usize,
    pub abort: &'a Receiver<Never>,
}

/// A process that takes questions.
pub(super) struct Session {
    process: Process,
    /// Questions answered.
    answered: u64,
    /// Bytes of the output in which no line ends.
    scanned: usize,
}

impl Session {
    /// A session with a process that has just been started.
    pub fn new(process: Process) -> Session {
        Session { process, answered: 0, scanned: 0 }
    }

    /// Whether it has never answered.
    pub fn is_new(&self) -> bool {
        self.answered == 0
    }

    /// The process's number.
    pub fn id(&self) -> u32 {
        self.process.id()
    }

    /// Whether the process waits for a question: it lives, and has said nothing since its last answer.
    pub fn check(&mut self) -> Result<(), Fault> {
        self.process.begin();
        if self.process.wait(Duration::ZERO, false, false) == Ready::default() {
            return Ok(());
        }
        self.process.drain_errors();
        match self.process.read_output(CHECK_MAX) {
            Err(Cause::Unreadable(error)) => Err(Fault::Unreadable(error)),
            Ok(true) | Err(_) => {
                Err(Fault::Confused(Confusion::Unasked(first_line(self.process.output()))))
            }
            Ok(false) if self.process.is_silenced() || self.process.has_ended() => {
                self.linger();
                Err(Fault::Gone { partial: None })
            }
            Ok(false) => Ok(()),
        }
    }

    /// Whether the process lives and says nothing until `until`.
    pub fn watch(&mut self, until: Instant) -> Result<(), Fault> {
        loop {
            self.check()?;
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(());
            }
            self.process.wait(left, false, false);
        }
    }

    /// Asks, and waits for the answer.
    pub fn ask(&mut self, question: &Question, bounds: &Bounds<'_>) -> Result<Said, Fault> {
        self.process.begin();
        self.scanned = 0;
        let mut has_ended = false;
        // Nothing is said before the question.
        let mut ready = Ready::default();
        loop {
            let fed = self.process.feed(&question.line);
            let mut grew = false;
            // Whoever refuses to listen may have said why.
            if ready.output || fed == Fed::Refused {
                // The line's end is not counted.
                grew = match self.process.read_output(bounds.output_max.saturating_add(1)) {
                    Ok(grew) => grew,
                    Err(Cause::Unreadable(error)) => return Err(Fault::Unreadable(error)),
                    Err(_) => return Err(Fault::TooLong),
                };
            }
            if ready.errors {
                self.process.read_errors();
            }
            if fed == Fed::Wholly
                && let Some(end) = self.line_end()
            {
                // What it wrote to stderr before its answer belongs to this node.
                self.process.drain_errors();
                let said = self.said(question, end)?;
                self.answered += 1;
                return Ok(said);
            }
            if self.process.is_silenced() || fed == Fed::Refused || (has_ended && !grew) {
                self.linger();
                return Err(Fault::Gone { partial: self.partial(&question.id) });
            }
            if grew {
                continue;
            }
            // An abort first: it must not lose against a stream of output.
            if matches!(bounds.abort.try_recv(), Err(TryRecvError::Disconnected)) {
                return Err(Fault::Aborted);
            }
            let now = Instant::now();
            if now >= bounds.deadline {
                return Err(Fault::TimedOut);
            }
            ready = self.process.wait(bounds.deadline - now, fed == Fed::Partly, has_ended);
            if ready.ended && self.process.has_ended() {
                has_ended = true;
                // Its last words are read once more before its end counts.
                ready.output = true;
            }
        }
    }

    /// Lets the process end by itself, with no more input; whether it did before `deadline`.
    pub fn let_go(&mut self, deadline: Instant, abort: &Receiver<Never>) -> bool {
        self.process.close_input();
        loop {
            self.process.begin();
            let _ = self.process.read_output(CHECK_MAX);
            self.process.read_errors();
            if self.process.has_ended() {
                return true;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() || matches!(abort.try_recv(), Err(TryRecvError::Disconnected)) {
                return false;
            }
            self.process.wait(left, false, false);
        }
    }

    /// Tells the process that there will be no more questions.
    pub fn close_input(&mut self) {
        self.process.close_input();
    }

    /// What it wrote to stderr since this was asked last.
    pub fn take_errors(&mut self) -> Stderr {
        self.process.take_errors()
    }

    /// The process, to be ended.
    pub fn into_process(self) -> Process {
        self.process
    }

    /// Where the first line of the output ends.
    fn line_end(&mut self) -> Option<usize> {
        let output = self.process.output();
        let found = output[self.scanned..].iter().position(|&byte| byte == b'\n');
        let end = found.map(|at| self.scanned + at);
        self.scanned = output.len();
        end
    }

    fn said(&self, question: &Question, end: usize) -> Result<Said, Fault> {
        let (line, rest) = self.process.output().split_at(end);
        let said = Said::read(line, &question.id).map_err(Fault::Confused)?;
        match &rest[1..] {
            [] => Ok(said),
            rest => Err(Fault::Confused(Confusion::Unasked(first_line(rest)))),
        }
    }

    /// What is wrong with the last words of a process that is gone, if it left any.
    fn partial(&self, id: &str) -> Option<Confusion> {
        let words = self.process.output();
        match words.trim_ascii() {
            [] => None,
            _ => Said::read(words, id).err(),
        }
    }

    /// Waits for the end of a process that has closed one of its pipes, so that its own exit status can be told.
    fn linger(&self) {
        let until = Instant::now() + LINGER;
        while !self.process.has_ended() {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            self.process.wait_for_end(left);
        }
    }
}

/// The first line of `bytes`, for a message; not if it looks like an answer, which may hold a private key.
fn first_line(bytes: &[u8]) -> String {
    let line = bytes.split(|&byte| byte == b'\n').next().unwrap_or_default().trim_ascii();
    match line.starts_with(b"{") {
        true => format!("{{... ({} bytes)", line.len()),
        false => escape(line, SHOWN_CHARS_MAX),
    }
}

/// What is read of a line that was not asked for, at once; more than is shown of it.
const CHECK_MAX: usize = 64 * 1024;

/// Characters shown of what a helper wrote.
const SHOWN_CHARS_MAX: usize = 200;

/// How long a process that closed a pipe may take to end. It is the interval between the closing of files and the end
/// within one system call; whoever needs longer closed the pipe on purpose.
const LINGER: Duration = Duration::from_millis(500);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::json::hostile;

    #[test]
    fn survives_any_nesting() {
        hostile::on_a_small_stack(|| {
            for value in hostile::values(40_000) {
                let _ = Said::read(value.as_bytes(), "1");
                for key in ["id", "reply", "error", "other"] {
                    let line = format!(r#"{{"{key}":{value}}}"#);
                    let _ = Said::read(line.as_bytes(), "1");
                }
            }
        });
    }
}
