//! Log lines as the original writes them: text for people, JSON for machines, one write a line.
//!
//! `env_logger` filters and hands over records; what a line looks like is fixed by logrus, whose formatters the original
//! uses (`text_formatter.go`, `json_formatter.go`), since sites parse these lines. Beyond logrus, what a terminal would
//! act upon is escaped everywhere: much of what we log was written by a node nobody trusts yet.

use std::collections::BTreeMap;
use std::error::Error;
use std::fmt;
use std::fmt::Write as _;
use std::fs::File;
use std::io::{self, IsTerminal, Write};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use chrono::{Local, SecondsFormat};
use env_logger::{Builder, Target};
use log::kv::{self, Key, VisitSource};
use log::{Level, LevelFilter, Record};
use parking_lot::Mutex;
use serde_json::Value;

use crate::appending;
use crate::config::{LogFormat, LogTarget};

/// Who may read a log that we make; the umask takes from it.
const MODE: u32 = 0o666;

/// The log of this process, once it was started.
#[derive(Clone)]
pub struct Log {
    sink: Sink,
}

/// Why there is no log.
#[derive(Debug)]
pub enum LogError {
    /// The file can't be opened for appending.
    Open {
        /// The file.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// Standard output or error can't be written to.
    Standard(io::Error),
    /// The process has a logger already.
    Twice,
}

impl fmt::Display for LogError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LogError::Open { path, .. } => write!(f, "logfile: cannot open {}", path.display()),
            LogError::Standard(_) => f.write_str("cannot log to standard output or error"),
            LogError::Twice => f.write_str("logging was set up before"),
        }
    }
}

impl Error for LogError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            LogError::Open { source, .. } | LogError::Standard(source) => Some(source),
            LogError::Twice => None,
        }
    }
}

impl Log {
    /// Sends the log of the whole process to `target`, from `level` up.
    ///
    /// # Errors
    ///
    /// [`LogError`] if the target can't be opened.
    pub fn start(
        target: &LogTarget,
        format: LogFormat,
        level: LevelFilter,
    ) -> Result<Log, LogError> {
        let (file, path) = match target {
            LogTarget::Stdout => (Some(duplicate(io::stdout())?), None),
            LogTarget::Stderr => (Some(duplicate(io::stderr())?), None),
            LogTarget::Discard => (None, None),
            LogTarget::File(path) => {
                let file = appending::open(path, MODE).map_err(|error| unopened(path, error))?;
                (Some(file), Some(path.clone()))
            }
        };
        let style = match format {
            LogFormat::Json => Style::Json,
            LogFormat::Auto if path.is_some() => Style::Json,
            LogFormat::Auto | LogFormat::Text
                if file.as_ref().is_some_and(|file| file.is_terminal()) =>
            {
                Style::Terminal { start: Instant::now() }
            }
            LogFormat::Auto | LogFormat::Text => Style::Text,
        };
        let log = Log { sink: Sink { file: Arc::new(Mutex::new(file.map(Lines::new))), path } };
        Builder::new()
            // Libraries speak up only when something is wrong; our own lines are filtered by the maximum below.
            .filter_level(LevelFilter::Warn)
            .filter_module(env!("CARGO_CRATE_NAME"), LevelFilter::Trace)
            .target(Target::Pipe(Box::new(log.sink.clone())))
            .format(move |out, record| out.write_all(style.line(record).as_bytes()))
            .try_init()
            .map_err(|_| LogError::Twice)?;
        log::set_max_level(level);
        Ok(log)
    }

    /// Opens the log file again under its name, after it was renamed or removed; does nothing for other targets.
    ///
    /// # Errors
    ///
    /// [`LogError`]; the old file stays in use.
    pub fn reopen(&self) -> Result<(), LogError> {
        if let Some(path) = &self.sink.path {
            let file = appending::open(path, MODE).map_err(|error| unopened(path, error))?;
            *self.sink.file.lock() = Some(Lines::new(file));
        }
        Ok(())
    }

    /// Leaves out what is less severe than `level`, from now on.
    pub fn change_level(&self, level: LevelFilter) {
        log::set_max_level(level);
    }

    /// Whether an error that is logged appears where the process was started.
    pub fn shows_errors(&self) -> bool {
        self.sink.path.is_none()
            && self.sink.file.lock().is_some()
            && log::max_level() >= LevelFilter::Error
    }
}

fn unopened(path: &Path, source: io::Error) -> LogError {
    LogError::Open { path: path.to_path_buf(), source }
}

/// The stream without the standard library's buffer, which would split long lines.
fn duplicate(stream: impl AsFd) -> Result<File, LogError> {
    let descriptor = stream.as_fd().try_clone_to_owned().map_err(LogError::Standard)?;
    Ok(File::from(descriptor))
}

/// Where lines go; nothing when they are discarded.
#[derive(Clone)]
struct Sink {
    file: Arc<Mutex<Option<Lines>>>,
    path: Option<PathBuf>,
}

impl Write for Sink {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        if let Some(lines) = &mut *self.file.lock() {
            lines.write(line)?;
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// An open log.
struct Lines {
    file: File,
    /// The last line was cut off, since the disk is full for instance.
    is_torn: bool,
}

impl Lines {
    fn new(file: File) -> Lines {
        Lines { file, is_torn: false }
    }

    /// Writes a line, at once unless the system takes only a part of it. After one that was cut off it begins a new line:
    /// it must not be lost with it.
    fn write(&mut self, line: &[u8]) -> io::Result<()> {
        let whole;
        let mut rest = line;
        if self.is_torn {
            whole = [b"\n", line].concat();
            rest = &whole;
        }
        while !rest.is_empty() {
            match self.file.write(rest) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(len) => {
                    rest = &rest[len..];
                    self.is_torn = !rest.is_empty();
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

#[derive(Clone, Copy)]
enum Style {
    Text,
    Terminal { start: Instant },
    Json,
}

impl Style {
    /// The line for `record`, with its end.
    fn line(self, record: &Record<'_>) -> String {
        let time = || Local::now().to_rfc3339_opts(SecondsFormat::Secs, true);
        let message = record.args().to_string();
        let fields = Fields::of(record);
        match self {
            Style::Text => text(&time(), record.level(), &message, &fields),
            Style::Json => json(&time(), record.level(), &message, fields),
            Style::Terminal { start } => {
                terminal(start.elapsed().as_secs(), record.level(), &message, &fields)
            }
        }
    }
}

/// `time="…" level=info msg="…" component=hosts`, further fields sorted by name.
fn text(time: &str, level: Level, message: &str, fields: &Fields) -> String {
    let mut line = format!("time={} level={}", quoted(time), name(level));
    if !message.is_empty() {
        let _ = write!(line, " msg={}", quoted(message));
    }
    for (key, value) in &fields.0 {
        let _ = write!(line, " {}={}", bare(key), quoted(&plain(value)));
    }
    line.push('\n');
    line
}

/// `INFO[0012] message   key=value`, the level and the keys in colour, with the seconds since the start.
fn terminal(secs: u64, level: Level, message: &str, fields: &Fields) -> String {
    let (word, colour) = match level {
        Level::Error => ("ERRO", 31),
        Level::Warn => ("WARN", 33),
        Level::Info => ("INFO", 36),
        Level::Debug => ("DEBU", 37),
        Level::Trace => ("TRAC", 37),
    };
    let mut line = format!("\x1b[{colour}m{word}\x1b[0m[{secs:04}] {:<44} ", bare(message));
    for (key, value) in &fields.0 {
        let _ = write!(line, " \x1b[{colour}m{}\x1b[0m={}", bare(key), quoted(&plain(value)));
    }
    line.push('\n');
    line
}

/// One object with sorted keys; numbers and booleans keep their type.
fn json(time: &str, level: Level, message: &str, fields: Fields) -> String {
    let mut object = fields.0;
    object.insert("time".into(), time.into());
    object.insert("level".into(), name(level).into());
    object.insert("msg".into(), message.into());
    // A map of texts and numbers always has a JSON form.
    let object = serde_json::to_string(&object).unwrap_or_default();
    let mut line = String::with_capacity(object.len() + 1);
    for c in object.chars() {
        // Within JSON these stand in texts only. The first five are Go's choice.
        match c {
            '<' | '>' | '&' | '\u{2028}' | '\u{2029}' => {
                let _ = write!(line, "\\u{:04x}", c as u32);
            }
            c if c.is_control() => {
                let _ = write!(line, "\\u{:04x}", c as u32);
            }
            c => line.push(c),
        }
    }
    line.push('\n');
    line
}

/// What a record says beside its message.
struct Fields(BTreeMap<String, Value>);

impl Fields {
    fn of(record: &Record<'_>) -> Fields {
        let mut fields = Fields(BTreeMap::new());
        // This visitor never fails.
        let _ = record.key_values().visit(&mut fields);
        fields
    }
}

impl<'kvs> VisitSource<'kvs> for Fields {
    fn visit_pair(&mut self, key: Key<'kvs>, value: kv::Value<'kvs>) -> Result<(), kv::Error> {
        let typed = if let Some(number) = value.to_u64() {
            number.into()
        } else if let Some(number) = value.to_i64() {
            number.into()
        } else if let Some(flag) = value.to_bool() {
            flag.into()
        } else if let Some(number) = value.to_f64() {
            number.into()
        } else {
            Value::String(value.to_string())
        };
        let key = match key.as_str() {
            // As in logrus: the line's own keys stay what they are.
            key @ ("time" | "level" | "msg") => format!("fields.{key}"),
            key => key.to_string(),
        };
        self.0.insert(key, typed);
        Ok(())
    }
}

fn name(level: Level) -> &'static str {
    match level {
        Level::Error => "error",
        Level::Warn => "warning",
        Level::Info => "info",
        Level::Debug => "debug",
        Level::Trace => "trace",
    }
}

fn plain(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

/// In quotes with Go's escapes, unless all characters are harmless.
fn quoted(text: &str) -> String {
    let is_harmless =
        |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '.' | '_' | '/' | '@' | '^' | '+');
    if text.chars().all(is_harmless) {
        return text.to_string();
    }
    let mut out = String::with_capacity(text.len() + 2);
    out.push('"');
    for c in text.chars() {
        match c {
            '"' | '\\' => out.extend(['\\', c]),
            c => escape(c, &mut out),
        }
    }
    out.push('"');
    out
}

/// Without quotes, but with nothing in it that a terminal acts upon.
fn bare(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        escape(c, &mut out);
    }
    out
}

/// Go's escapes for what can't be printed, other characters as they are.
fn escape(c: char, out: &mut String) {
    match c {
        '\x07' => out.push_str("\\a"),
        '\x08' => out.push_str("\\b"),
        '\x0c' => out.push_str("\\f"),
        '\n' => out.push_str("\\n"),
        '\r' => out.push_str("\\r"),
        '\t' => out.push_str("\\t"),
        '\x0b' => out.push_str("\\v"),
        ' '..='~' => out.push(c),
        '\0'..='\x7f' => {
            let _ = write!(out, "\\x{:02x}", c as u32);
        }
        // The standard library knows what is printable and has no other way to say so.
        c if c.escape_debug().len() == 1 => out.push(c),
        c if (c as u32) < 0x10000 => {
            let _ = write!(out, "\\u{:04x}", c as u32);
        }
        c => {
            let _ = write!(out, "\\U{:08x}", c as u32);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::fd::OwnedFd;
    use std::os::unix::net::UnixStream;

    use super::*;
    use crate::errors::chain;

    const TIME: &str = "2026-06-15T12:00:00+02:00";

    #[test]
    fn writes_text_lines_as_the_original() {
        let component: &[(&str, kv::Value<'_>)] = &[("component", "hosts".into())];
        check_text(
            Level::Info,
            "Adding n1.example.net to the work queue with 3 entries",
            component,
            r#"time="2026-06-15T12:00:00+02:00" level=info msg="Adding n1.example.net to the work queue with 3 entries" component=hosts"#,
        );
        check_text(
            Level::Warn,
            "x",
            &[],
            r#"time="2026-06-15T12:00:00+02:00" level=warning msg=x"#,
        );
        check_text(Level::Error, "", &[], r#"time="2026-06-15T12:00:00+02:00" level=error"#);
        check_text(
            Level::Debug,
            "a-b.c_d/e@f^g+1",
            &[
                ("z", 1.into()),
                ("a", "x y".into()),
                ("b", true.into()),
                ("c", "".into()),
                ("d", 1.5.into()),
            ],
            r#"time="2026-06-15T12:00:00+02:00" level=debug msg=a-b.c_d/e@f^g+1 a="x y" b=true c= d=1.5 z=1"#,
        );
        check_text(
            Level::Info,
            "m",
            &[("msg", "x".into()), ("time", "y".into()), ("level", (-1).into())],
            r#"time="2026-06-15T12:00:00+02:00" level=info msg=m fields.level=-1 fields.msg=x fields.time=y"#,
        );
    }

    #[test]
    fn a_line_that_was_cut_off_does_not_take_the_next_one_with_it() {
        let (file, mut reader) = UnixStream::pair().unwrap();
        file.set_nonblocking(true).unwrap();
        let mut lines = Lines::new(File::from(OwnedFd::from(file)));
        let long = [&[b'x'; 1_000_000][..], b"\n"].concat();
        lines.write(b"first\n").unwrap();
        lines.write(&long).unwrap_err();
        lines.write(&long).unwrap_err();
        let mut read = Vec::new();
        reader.set_nonblocking(true).unwrap();
        let mut chunk = [0; 65_536];
        while let Ok(len) = reader.read(&mut chunk) {
            read.extend_from_slice(&chunk[..len]);
        }
        assert!(read.ends_with(b"x"), "it was not cut off");
        lines.write(b"second\n").unwrap();
        lines.write(b"third\n").unwrap();
        let len = reader.read(&mut chunk).unwrap();
        assert_eq!(&chunk[..len], b"\nsecond\nthird\n");
    }

    #[test]
    fn writes_json_lines_as_the_original() {
        check_json(
            Level::Info,
            "Adding n1.example.net to the work queue with 3 entries",
            &[("component", "hosts".into())],
            r#"{"component":"hosts","level":"info","msg":"Adding n1.example.net to the work queue with 3 entries","time":"2026-06-15T12:00:00+02:00"}"#,
        );
        check_json(
            Level::Warn,
            "<a> & \"b\"",
            &[("n", 3.into()), ("ok", false.into()), ("f", 0.5.into()), ("big", u64::MAX.into())],
            r#"{"big":18446744073709551615,"f":0.5,"level":"warning","msg":"\u003ca\u003e \u0026 \"b\"","n":3,"ok":false,"time":"2026-06-15T12:00:00+02:00"}"#,
        );
        check_json(
            Level::Error,
            "",
            &[],
            r#"{"level":"error","msg":"","time":"2026-06-15T12:00:00+02:00"}"#,
        );
    }

    #[test]
    fn escapes_what_a_node_could_do_to_a_terminal() {
        for (raw, escaped) in [
            ("a\nb", r"a\nb"),
            ("a\r\tb", r"a\r\tb"),
            ("\x1b[2J", r"\x1b[2J"),
            ("\x07\x08\x0b\x0c\0\x7f", r"\a\b\v\f\x00\x7f"),
            ("\u{9b}31m", r"\u009b31m"),
            ("\u{202e}gpj", r"\u202egpj"),
            ("\u{e0001}", r"\U000e0001"),
        ] {
            let line = text(TIME, Level::Info, raw, &fields(&[("k", raw.into())]));
            let expected = format!("msg=\"{escaped}\" k=\"{escaped}\"\n");
            assert!(line.ends_with(&expected), "{raw:?}: {line}");
            let line = terminal(0, Level::Info, raw, &fields(&[]));
            assert_eq!(line.trim_end(), format!("\x1b[36mINFO\x1b[0m[0000] {escaped}"), "{raw:?}");
            let line = json(TIME, Level::Info, raw, fields(&[("k", raw.into())]));
            assert!(!line.trim_end().contains(|c: char| c.is_control()), "{raw:?}: {line}");
            let read: Value = serde_json::from_str(&line).unwrap();
            assert_eq!(read["msg"], raw);
        }
        check_text(
            Level::Info,
            "zażółć \"x\" \\",
            &[],
            r#"time="2026-06-15T12:00:00+02:00" level=info msg="zażółć \"x\" \\""#,
        );
    }

    #[test]
    fn colours_lines_on_a_terminal() {
        let line =
            terminal(12, Level::Warn, "low on nodes", &fields(&[("component", "hosts".into())]));
        let expected = format!(
            "\x1b[33mWARN\x1b[0m[0012] {:<44}  \x1b[33mcomponent\x1b[0m=hosts\n",
            "low on nodes"
        );
        assert_eq!(line, expected);
        for (level, start) in [
            (Level::Error, "\x1b[31mERRO\x1b[0m[0000] "),
            (Level::Info, "\x1b[36mINFO\x1b[0m[0000] "),
            (Level::Debug, "\x1b[37mDEBU\x1b[0m[0000] "),
        ] {
            assert!(terminal(0, level, "m", &fields(&[])).starts_with(start));
        }
    }

    #[test]
    fn writes_local_time_with_whole_seconds() {
        let line = Style::Text.line(&Record::builder().args(format_args!("m")).build());
        let time = line.split('"').nth(1).unwrap();
        let parsed = chrono::DateTime::parse_from_rfc3339(time).unwrap();
        assert!(!time.contains('.'), "{time}");
        assert_eq!(parsed.offset().local_minus_utc(), Local::now().offset().local_minus_utc());
    }

    #[test]
    fn reopens_a_file_that_was_renamed() {
        let dir = std::env::temp_dir().join(format!("provisioner-log-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let (path, old) = (dir.join("log"), dir.join("log.1"));
        let file = Arc::new(Mutex::new(Some(Lines::new(appending::open(&path, MODE).unwrap()))));
        let log = Log { sink: Sink { file, path: Some(path.clone()) } };
        let mut sink = log.sink.clone();
        sink.write_all(b"one\n").unwrap();
        std::fs::rename(&path, &old).unwrap();
        sink.write_all(b"two\n").unwrap();
        log.reopen().unwrap();
        sink.write_all(b"three\n").unwrap();
        assert_eq!(std::fs::read_to_string(&old).unwrap(), "one\ntwo\n");
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "three\n");
        // A directory in its place can't be opened: the old file stays in use.
        std::fs::remove_file(&path).unwrap();
        std::fs::create_dir(&path).unwrap();
        let error = log.reopen().unwrap_err();
        let expected =
            format!("logfile: cannot open {}: Is a directory (os error 21)", path.display());
        assert_eq!(chain(&error), expected);
        sink.write_all(b"four\n").unwrap();
        // So does a pipe, while nobody reads it.
        std::fs::remove_dir(&path).unwrap();
        appending::testing::make_pipe(&path);
        let error = chain(&log.reopen().unwrap_err());
        assert!(error.contains("it is a pipe that nobody reads"), "{error}");
        std::fs::remove_dir_all(&dir).unwrap();
    }

    fn fields(pairs: &[(&str, kv::Value<'_>)]) -> Fields {
        Fields::of(&Record::builder().key_values(&pairs).build())
    }

    #[track_caller]
    fn check_text(level: Level, message: &str, pairs: &[(&str, kv::Value<'_>)], expected: &str) {
        assert_eq!(text(TIME, level, message, &fields(pairs)), format!("{expected}\n"));
    }

    #[track_caller]
    fn check_json(level: Level, message: &str, pairs: &[(&str, kv::Value<'_>)], expected: &str) {
        assert_eq!(json(TIME, level, message, fields(pairs)), format!("{expected}\n"));
    }
}
