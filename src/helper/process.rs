//! A program that runs: its pipes, its end and that of all it started; and one whole run, bounded in time and size, with
//! input written while output is read.
//!
//! Everything happens on the calling thread, in one loop around `poll`. Meaning is left to the caller, and how one program
//! is asked many times to `session`.

use std::ffi::OsString;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStderr, ChildStdin, ChildStdout, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, TryRecvError};
use parking_lot::Mutex;
use rustix::buffer::spare_capacity;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, WaitId, WaitIdOptions};

use super::HelperCommand;
use super::text::escape;
use crate::shutdown::Never;

/// What to run, and when to stop.
pub(super) struct Job<'a> {
    pub command: &'a HelperCommand,
    /// Variables of our environment that the program does not inherit.
    pub hidden: &'a [OsString],
    pub input: &'a [u8],
    pub output_max: usize,
    pub deadline: Instant,
    pub abort: &'a Receiver<Never>,
    /// Whether what was written to stdout is all there is to say, asked when the program has ended and another keeps
    /// its stdout open.
    pub is_settled: fn(&[u8]) -> bool,
}

/// What a run left behind.
pub(super) struct Ran {
    pub end: End,
    pub stdout: Vec<u8>,
    pub stderr: Stderr,
    pub took: Duration,
}

/// How a run ended.
#[derive(Debug)]
pub(super) enum End {
    /// By itself.
    Exited {
        status: ExitStatus,
        /// A process it started kept its stdout open.
        held_open: bool,
    },
    /// Killed at the deadline.
    TimedOut,
    /// Killed because we are stopping.
    Aborted,
    /// Killed because it wrote more than `output_max` bytes.
    TooLong,
    /// Killed because its output could not be read.
    Unreadable(io::Error),
    /// Killed because it did what it must not.
    Misbehaved,
}

/// Children that were killed and have not ended yet; a process within a hanging system call can't be hurried.
#[derive(Default)]
pub(super) struct Strays(Mutex<Vec<Child>>);

impl Strays {
    /// Reaps those that have ended.
    ///
    /// # Errors
    ///
    /// When so many are left that nothing more should be started.
    pub fn reap(&self) -> io::Result<()> {
        let mut strays = self.0.lock();
        strays.retain_mut(|child| matches!(child.try_wait(), Ok(None)));
        match strays.len() {
            left if left >= STRAYS_MAX => {
                Err(io::Error::other(format!("{left} killed runs have not ended yet")))
            }
            _ => Ok(()),
        }
    }
}

impl Job<'_> {
    /// Runs the program to its end.
    ///
    /// # Errors
    ///
    /// Only when it could not be started.
    pub fn run(&self, strays: &Strays) -> io::Result<Ran> {
        strays.reap()?;
        let started = Instant::now();
        let mut process = Process::start(self.command, self.hidden, &[])?;
        let cause = process.attend(self);
        let (end, stdout, stderr) = process.end(cause, strays);
        Ok(Ran { end, stdout, stderr, took: started.elapsed() })
    }
}

/// Why we stopped attending to a process.
pub(super) enum Cause {
    /// It ended, and its stdout did too.
    Finished,
    /// It ended, and its stdout did not.
    HeldOpen,
    TimedOut,
    Aborted,
    TooLong,
    Unreadable(io::Error),
    /// It ended, or closed its output, when it should have gone on.
    Gone,
    /// It did what it must not.
    Misbehaved,
}

/// How far the input is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fed {
    /// The pipe is full.
    Partly,
    /// All is written.
    Wholly,
    /// Nobody reads any more.
    Refused,
}

/// What a wait found; what is not known may be.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Ready {
    /// There is something on stdout, or its end.
    pub output: bool,
    /// The same for stderr.
    pub errors: bool,
    /// The child has ended.
    pub ended: bool,
}

/// A running child and our ends of its pipes.
pub(super) struct Process {
    child: Child,
    /// The child's process group, which has its id.
    group: Pid,
    /// Readable once the child has ended; absent on kernels before 5.3.
    pidfd: Option<OwnedFd>,
    stdin: Option<ChildStdin>,
    stdout: Option<ChildStdout>,
    stderr: Option<ChildStderr>,
    written: usize,
    output: Vec<u8>,
    errors: Stderr,
}

impl Process {
    /// Starts `command` in our environment without the variables in `hidden`, and with those in `added`.
    pub fn start(
        command: &HelperCommand,
        hidden: &[OsString],
        added: &[(&str, &str)],
    ) -> io::Result<Process> {
        let mut program = Command::new(command.program());
        program
            .args(command.arguments())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            // A group of its own, so that all it starts can be killed with it. No code of ours runs
            // between fork and exec, so that the library may use the much faster posix_spawn.
            .process_group(0);
        for name in hidden {
            program.env_remove(name);
        }
        program.envs(added.iter().copied());
        let mut child = program.spawn()?;
        let group = Pid::from_child(&child);
        Ok(Process {
            group,
            pidfd: rustix::process::pidfd_open(group, PidfdFlags::empty()).ok(),
            stdin: child.stdin.take(),
            stdout: child.stdout.take(),
            stderr: child.stderr.take(),
            child,
            written: 0,
            output: Vec::new(),
            errors: Stderr::default(),
        })
    }

    /// Feeds and reads the child until it has ended or must.
    fn attend(&mut self, job: &Job<'_>) -> Cause {
        if let Err(error) = self.unblock() {
            return Cause::Unreadable(error);
        }
        let mut ended_at: Option<Instant> = None;
        loop {
            // A helper is free not to read what it doesn't need.
            if self.stdin.is_some() && self.feed(job.input) != Fed::Partly {
                self.close_input();
            }
            let grew = match self.read_output(job.output_max) {
                Ok(grew) => grew,
                Err(cause) => return cause,
            };
            self.read_errors();
            let now = Instant::now();
            if ended_at.is_none() && self.has_ended() {
                // Once more: it may have written between our read and its end.
                ended_at = Some(now);
                continue;
            }
            let mut until = job.deadline;
            if let Some(ended_at) = ended_at {
                if self.stdout.is_none() {
                    return Cause::Finished;
                }
                let grace =
                    if !grew && (job.is_settled)(&self.output) { SETTLED_GRACE } else { GRACE };
                until = (ended_at + grace).min(job.deadline);
                if now >= until {
                    return Cause::HeldOpen;
                }
            }
            // An abort first: it must not lose against a stream of output.
            if matches!(job.abort.try_recv(), Err(TryRecvError::Disconnected)) {
                return Cause::Aborted;
            }
            if now >= job.deadline {
                return Cause::TimedOut;
            }
            if !grew {
                let time = until.saturating_duration_since(now);
                self.wait(time, self.stdin.is_some(), ended_at.is_some());
            }
        }
    }

    /// Makes our ends of the pipes non-blocking; the child's ends are not touched by that.
    pub fn unblock(&self) -> io::Result<()> {
        for fd in self.pipes().into_iter().flatten() {
            rustix::io::ioctl_fionbio(fd, true)?;
        }
        Ok(())
    }

    fn pipes(&self) -> [Option<BorrowedFd<'_>>; 3] {
        [
            self.stdin.as_ref().map(AsFd::as_fd),
            self.stdout.as_ref().map(AsFd::as_fd),
            self.stderr.as_ref().map(AsFd::as_fd),
        ]
    }

    /// Waits until there is something to do, `time` at most, and not longer than an abort may go unnoticed; says what.
    pub fn wait(&self, time: Duration, writes: bool, has_ended: bool) -> Ready {
        let [stdin, stdout, stderr] = self.pipes();
        let stdin = stdin.filter(|_| writes);
        let wake = if self.pidfd.is_some() || has_ended { ABORT_CHECK } else { END_CHECK };
        // Readable for ever after the end, so it is left out then.
        let pidfd = self.pidfd.as_ref().filter(|_| !has_ended).map(AsFd::as_fd);
        let mut fds = Vec::with_capacity(4);
        for fd in [stdout, stderr, pidfd].into_iter().flatten() {
            fds.push(PollFd::from_borrowed_fd(fd, PollFlags::IN));
        }
        fds.extend(stdin.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::OUT)));
        let has_looked = poll(&mut fds, time.min(wake));
        let mut events = fds.iter().map(|fd| !has_looked || !fd.revents().is_empty());
        let mut is_ready = |fd: Option<BorrowedFd<'_>>| fd.is_some() && events.next() == Some(true);
        let (output, errors) = (is_ready(stdout), is_ready(stderr));
        let ended = is_ready(pidfd) || (self.pidfd.is_none() && !has_ended);
        Ready { output, errors, ended }
    }

    /// Writes what the pipe takes of the input.
    pub fn feed(&mut self, input: &[u8]) -> Fed {
        let Some(stdin) = &self.stdin else { return Fed::Refused };
        while self.written < input.len() {
            match rustix::io::write(stdin, &input[self.written..]) {
                Ok(written) => self.written += written,
                Err(Errno::AGAIN) => return Fed::Partly,
                Err(Errno::INTR) => {}
                Err(_) => return Fed::Refused,
            }
        }
        Fed::Wholly
    }

    /// Tells the child that there is no more input.
    pub fn close_input(&mut self) {
        self.stdin = None;
    }

    /// Forgets input and output so far, for the next question; the child is not touched.
    pub fn begin(&mut self) {
        self.written = 0;
        self.output.clear();
    }

    /// What was read from stdout.
    pub fn output(&self) -> &[u8] {
        &self.output
    }

    /// Whether there will be no more from stdout.
    pub fn is_silenced(&self) -> bool {
        self.stdout.is_none()
    }

    /// What was read from stderr since this was asked last.
    pub fn take_errors(&mut self) -> Stderr {
        std::mem::take(&mut self.errors)
    }

    /// The child's number.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Reads once from stdout; whether there was anything.
    pub fn read_output(&mut self, output_max: usize) -> Result<bool, Cause> {
        let Some(stdout) = &self.stdout else { return Ok(false) };
        match read_some(stdout, &mut self.output) {
            Ok(Some(0)) => {
                self.stdout = None;
                Ok(false)
            }
            Ok(Some(_)) if self.output.len() > output_max => Err(Cause::TooLong),
            Ok(Some(_)) => Ok(true),
            Ok(None) => Ok(false),
            Err(error) => Err(Cause::Unreadable(error)),
        }
    }

    /// Reads once from stderr, which is never a reason to fail; whether there was anything.
    pub fn read_errors(&mut self) -> bool {
        let Some(stderr) = &self.stderr else { return false };
        let mut chunk = [const { MaybeUninit::uninit() }; ERRORS_CHUNK];
        match rustix::io::read(stderr, &mut chunk) {
            Ok(([], _)) => {
                self.stderr = None;
                false
            }
            Ok((bytes, _)) => {
                self.errors.take(bytes);
                true
            }
            Err(Errno::AGAIN | Errno::INTR) => false,
            Err(_) => {
                self.stderr = None;
                false
            }
        }
    }

    /// Waits for the child's end, `time` at most; may return early.
    pub fn wait_for_end(&self, time: Duration) {
        match &self.pidfd {
            Some(pidfd) => poll(&mut [PollFd::new(pidfd, PollFlags::IN)], time),
            None => poll(&mut [], time.min(END_CHECK)),
        };
    }

    /// Whether the child has ended. It is not reaped here: until then neither its id nor its group's can belong to another.
    pub fn has_ended(&self) -> bool {
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        // An error can only mean that there is nothing to wait for.
        !matches!(rustix::process::waitid(WaitId::Pid(self.group), options), Ok(None))
    }

    /// Reads what is left on stderr; bounded, since another process may go on writing.
    pub fn drain_errors(&mut self) {
        for _ in 0..DRAIN_READS_MAX {
            if !self.read_errors() {
                return;
            }
        }
    }

    /// Kills what has to be killed, reaps the child and says how it ended.
    pub fn end(mut self, cause: Cause, strays: &Strays) -> (End, Vec<u8>, Stderr) {
        if !matches!(cause, Cause::Finished) {
            // Before the child is reaped, see `has_ended`. It may have left its group, so it is killed by its own id as well.
            let _ = rustix::process::kill_process_group(self.group, Signal::KILL);
            let _ = self.child.kill();
        }
        // Whoever holds the other ends must not hold us.
        (self.stdin, self.stdout) = (None, None);
        let status = self.reap();
        self.drain_errors();
        let end = match (cause, status) {
            (Cause::Finished | Cause::Gone, Some(status)) => {
                End::Exited { status, held_open: false }
            }
            (Cause::HeldOpen, Some(status)) => End::Exited { status, held_open: true },
            (Cause::Aborted, _) => End::Aborted,
            (Cause::TimedOut, _) => End::TimedOut,
            (Cause::TooLong, _) => End::TooLong,
            (Cause::Unreadable(error), _) => End::Unreadable(error),
            (Cause::Misbehaved, _) => End::Misbehaved,
            (Cause::Finished | Cause::HeldOpen | Cause::Gone, None) => {
                End::Unreadable(io::Error::other("the process cannot be waited for"))
            }
        };
        if status.is_none() {
            log::error!(component = "helper"; "Helper process {} was killed and does not end", self.child.id());
            strays.0.lock().push(self.child);
        }
        (end, self.output, self.errors)
    }

    /// Reaps the child, unless it survives being killed for longer than we wait.
    fn reap(&mut self) -> Option<ExitStatus> {
        let until = Instant::now() + KILL_WAIT;
        loop {
            match self.child.try_wait() {
                Ok(Some(status)) => return Some(status),
                Ok(None) => {}
                Err(_) => return None,
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            self.wait_for_end(left);
        }
    }
}

/// Waits for one of `fds`, `time` at most. False if an interruption ended the wait early: then nothing is known of them.
fn poll(fds: &mut [PollFd<'_>], time: Duration) -> bool {
    // A time that does not fit is longer than any of ours.
    let time = Timespec::try_from(time).ok();
    // Nothing but an interruption or a lack of memory can go wrong, and the caller looks again either way.
    rustix::event::poll(fds, time.as_ref()).is_ok()
}

/// Reads once and appends; nothing if there is nothing yet, zero at the end of the file.
fn read_some(fd: impl AsFd, buffer: &mut Vec<u8>) -> io::Result<Option<usize>> {
    if buffer.capacity() - buffer.len() < OUTPUT_READ_MIN {
        // Doubles, as a vector that is pushed to.
        buffer.reserve(OUTPUT_READ_MIN.max(buffer.len()));
    }
    match rustix::io::read(fd, spare_capacity(buffer)) {
        Ok(length) => Ok(Some(length)),
        Err(Errno::AGAIN | Errno::INTR) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// What a run wrote to stderr: the first part of it, and its end.
#[derive(Debug, Default)]
pub(super) struct Stderr {
    head: Vec<u8>,
    tail: Vec<u8>,
    seen: u64,
}

impl Stderr {
    fn take(&mut self, bytes: &[u8]) {
        self.seen += bytes.len() as u64;
        let (first, rest) = bytes.split_at(bytes.len().min(ERRORS_MAX - self.head.len()));
        self.head.extend_from_slice(first);
        self.tail.extend_from_slice(&rest[rest.len().saturating_sub(TAIL_MAX)..]);
        self.tail.drain(..self.tail.len().saturating_sub(TAIL_MAX));
    }

    /// The lines kept, escaped, at most [`LINES_MAX`], and last a word about what is missing.
    pub fn lines(&self) -> Vec<String> {
        let mut all = self.head.split(|&b| b == b'\n').filter(|line| !is_blank(line));
        let mut lines: Vec<String> = all
            .by_ref()
            .take(LINES_MAX)
            .map(|line| escape(line.trim_ascii_end(), LINE_CHARS_MAX))
            .collect();
        let (more, dropped) = (all.count(), self.seen - self.head.len() as u64);
        if more > 0 || dropped > 0 {
            lines.push(format!("({more} more lines and {dropped} more bytes are not shown)"));
        }
        lines
    }

    /// The last line, escaped.
    pub fn last_line(&self) -> Option<String> {
        let end = if self.tail.is_empty() { &self.head } else { &self.tail };
        let line = end.rsplit(|&b| b == b'\n').find(|line| !is_blank(line))?;
        Some(escape(line.trim_ascii(), LAST_LINE_CHARS_MAX))
    }
}

fn is_blank(line: &[u8]) -> bool {
    line.trim_ascii().is_empty()
}

/// How long a program that has ended may still be spoken for by those it started. A shell's `> >(tee log)` needs
/// milliseconds; whoever needs longer is a daemon that forgot to close its stdout.
const GRACE: Duration = Duration::from_secs(2);

/// The same when the answer is complete: time for a background job to let go of stdout, which it does after it was forked.
const SETTLED_GRACE: Duration = Duration::from_millis(500);

/// How often an abort is looked for: a channel can't be polled together with pipes.
const ABORT_CHECK: Duration = Duration::from_millis(50);

/// How often the end is looked for on a kernel without pidfds.
const END_CHECK: Duration = Duration::from_millis(10);

/// How long a killed process may take to end before it is left to a later run.
const KILL_WAIT: Duration = Duration::from_secs(2);

/// Killed processes that have not ended, in all: enough for every worker to meet one.
const STRAYS_MAX: usize = 64;

/// Smallest read from stdout; an ordinary answer fits.
const OUTPUT_READ_MIN: usize = 8 * 1024;

/// One read from stderr.
const ERRORS_CHUNK: usize = 8 * 1024;

/// What is kept of stderr, in bytes.
const ERRORS_MAX: usize = 64 * 1024;

/// What is kept of the end of a longer stderr, in bytes: more than the last line that is shown.
const TAIL_MAX: usize = 4 * LAST_LINE_CHARS_MAX;

/// Reads from stderr after the end: a pipe holds 64 KiB unless it was enlarged.
const DRAIN_READS_MAX: usize = 32;

/// Log lines for one run.
const LINES_MAX: usize = 100;

/// Characters of one log line.
const LINE_CHARS_MAX: usize = 1000;

/// Characters of the line that stands in an error.
const LAST_LINE_CHARS_MAX: usize = 200;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_old_kernel_without_pidfds_is_enough() {
        let run = |script: &str, time: Duration| {
            let command = HelperCommand::parse(&shell_words::join(["sh", "-c", script])).unwrap();
            let abort = crossbeam_channel::never();
            let job = job(&command, Instant::now() + time, &abort);
            let mut process = Process::start(&command, &[], &[]).unwrap();
            process.pidfd = None;
            let cause = process.attend(&job);
            let (end, output, _) = process.end(cause, &Strays::default());
            (end, String::from_utf8(output).unwrap())
        };
        let long = Duration::from_secs(60);
        let (end, output) = run("echo one; exec >&- 2>&-; sleep 0.05; exit 7", long);
        assert!(
            matches!(end, End::Exited { status, held_open: false } if status.code() == Some(7)),
            "{end:?}"
        );
        assert_eq!(output, "one\n");
        let (end, output) = run("sleep 1000 & printf two", long);
        assert!(matches!(end, End::Exited { held_open: true, .. }), "{end:?}");
        assert_eq!(output, "two");
        let (end, _) = run("sleep 1000", Duration::from_millis(100));
        assert!(matches!(end, End::TimedOut), "{end:?}");
    }

    #[test]
    fn no_run_is_started_while_too_many_killed_ones_live_on() {
        let sleep = || Command::new("sleep").arg("1000").spawn().unwrap();
        let strays = Strays(Mutex::new((0..STRAYS_MAX).map(|_| sleep()).collect()));
        let command = HelperCommand::parse("sh -c 'echo {}'").unwrap();
        let abort = crossbeam_channel::never();
        let job = job(&command, Instant::now() + Duration::from_secs(60), &abort);
        let error = job.run(&strays).err().unwrap();
        assert_eq!(error.to_string(), format!("{STRAYS_MAX} killed runs have not ended yet"));
        for child in strays.0.lock().iter_mut() {
            child.kill().unwrap();
        }
        // Each ends in its own time, and one place is enough.
        let mut last = strays.0.lock().pop().unwrap();
        last.wait().unwrap();
        assert!(job.run(&strays).is_ok());
        for child in strays.0.lock().iter_mut() {
            child.wait().unwrap();
        }
    }

    fn job<'a>(
        command: &'a HelperCommand,
        deadline: Instant,
        abort: &'a Receiver<Never>,
    ) -> Job<'a> {
        Job {
            command,
            hidden: &[],
            input: b"{}",
            output_max: 1 << 20,
            deadline,
            abort,
            is_settled: |output| output == b"two",
        }
    }

    #[test]
    fn stderr_is_cut_into_escaped_lines() {
        lines(b"", &[]);
        lines(b"one\n\n two\r\nthree", &["one", " two", "three"]);
        lines(b"a\x1b[31m\xff\n", &["a\\u{1b}[31m\u{fffd}"]);
        let long = "x".repeat(2 * LINE_CHARS_MAX);
        lines(long.as_bytes(), &[&format!("{} ...", "x".repeat(LINE_CHARS_MAX))]);
    }

    #[track_caller]
    fn lines(bytes: &[u8], expected: &[&str]) {
        let mut stderr = Stderr::default();
        stderr.take(bytes);
        assert_eq!(stderr.lines(), expected);
    }

    #[test]
    fn a_long_stderr_keeps_its_beginning_and_its_last_line() {
        let mut stderr = Stderr::default();
        for number in 0..100_000 {
            stderr.take(format!("line {number}\n").as_bytes());
        }
        let lines = stderr.lines();
        assert_eq!(lines.len(), LINES_MAX + 1);
        assert_eq!(lines[0], "line 0");
        assert_eq!(lines[LINES_MAX - 1], format!("line {}", LINES_MAX - 1));
        assert!(lines[LINES_MAX].contains("more bytes are not shown"), "{}", lines[LINES_MAX]);
        assert_eq!(stderr.last_line().unwrap(), "line 99999");
        assert!(stderr.head.len() + stderr.tail.len() <= ERRORS_MAX + TAIL_MAX);
    }

    #[test]
    fn the_last_line_is_the_last_with_text() {
        let mut stderr = Stderr::default();
        assert_eq!(stderr.last_line(), None);
        stderr.take(b" \n\n");
        assert_eq!(stderr.last_line(), None);
        stderr.take(b"why\n \n");
        assert_eq!(stderr.last_line().unwrap(), "why");
    }
}
