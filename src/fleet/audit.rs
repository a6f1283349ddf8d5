//! One JSON line for each attempt that has ended: what was given to whom, for those who are asked later.
//!
//! A thread of its own writes, so that a slow or full disk keeps no node waiting: what its queue has no room for, and what
//! the disk does not take, is lost and counted. Never a secret: of keys and configurations there are digests only.

use std::fmt;
use std::fs::File;
use std::io::{self, Write};
use std::mem;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use chrono::{DateTime, SecondsFormat, Utc};
use crossbeam_channel::{Receiver, Sender, TrySendError, at, bounded, never, select_biased};
use openssl::sha::sha256;
use openssl::x509::{X509, X509NameRef, X509Req};
use parking_lot::Mutex;
use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};

use crate::appending;
use crate::errors::chain;
use crate::jwt::hex;
use crate::metrics::Metrics;
use crate::node::Facts;
use crate::protocol::Identity;
use crate::seldom::Seldom;
use crate::shutdown::Never;

/// Lines that wait to be written: some seconds of a fleet that comes up at once, and four megabytes.
const QUEUE_MAX: usize = 4_096;

/// Bytes written at once.
const BATCH_BYTES: usize = 64 << 10;

/// How often a trouble with the disk is logged.
const TROUBLE_LOG: Duration = Duration::from_secs(60);

/// How long the disk may take at the end for what waits.
const END_MAX: Duration = Duration::from_secs(5);

/// Who may read it: it names every node.
const MODE: u32 = 0o640;

/// The file, open and not written to yet.
#[derive(Debug)]
pub struct AuditFile {
    path: PathBuf,
    file: File,
}

impl AuditFile {
    /// Opens the file at `path` to append to it.
    ///
    /// # Errors
    ///
    /// [`OpenError`]
    pub fn open(path: &Path) -> Result<AuditFile, OpenError> {
        let path = path.to_path_buf();
        match appending::open(&path, MODE) {
            Ok(file) => Ok(AuditFile { path, file }),
            Err(source) => Err(OpenError { path, source }),
        }
    }

    /// Starts the thread that writes; `instance` is this process among all that ever wrote there.
    ///
    /// # Errors
    ///
    /// The system's error if it gives us no thread.
    pub fn start(self, instance: &str, metrics: Arc<Metrics>) -> io::Result<(Audit, Running)> {
        let (entries, waiting) = bounded(QUEUE_MAX);
        let (reopen, reopened) = bounded(1);
        let (alive, ended) = bounded(0);
        let writer = Writer {
            path: self.path,
            file: self.file,
            is_torn: false,
            instance: instance.to_owned(),
            entries: waiting,
            reopen: reopened,
            trouble: Seldom::every(TROUBLE_LOG),
            metrics: metrics.clone(),
            _alive: alive,
        };
        thread::Builder::new().name("audit".to_owned()).spawn(move || writer.run())?;
        let full = Mutex::new(Seldom::every(TROUBLE_LOG));
        Ok((Audit { entries, full, metrics }, Running { reopen, ended }))
    }
}

/// Why the audit log can't be opened.
#[derive(Debug)]
pub struct OpenError {
    path: PathBuf,
    source: io::Error,
}

impl fmt::Display for OpenError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "audit_log: cannot open {}", self.path.display())
    }
}

impl std::error::Error for OpenError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.source)
    }
}

/// One attempt that has ended.
#[derive(Debug, Clone)]
pub struct Entry {
    /// When.
    pub time: DateTime<Utc>,
    /// The node.
    pub node: Identity,
    /// The label of the metric `outcomes`.
    pub outcome: &'static str,
    /// Why; empty on success.
    pub reason: String,
    /// Which attempt it was, from 1.
    pub attempt: u32,
    /// How long it took.
    pub took: Duration,
    /// Steps taken, in order.
    pub steps: Vec<(&'static str, Duration)>,
    /// What was learned of the node and made for it.
    pub facts: Facts,
}

/// Where entries go; the thread ends when this is dropped and all is written.
#[derive(Debug)]
pub struct Audit {
    entries: Sender<Entry>,
    full: Mutex<Seldom>,
    metrics: Arc<Metrics>,
}

impl Audit {
    /// Has an entry written, or counts it as lost. Never waits.
    pub fn note(&self, entry: Entry) {
        match self.entries.try_send(entry) {
            Ok(()) => {}
            Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) => {
                self.metrics.audit_lines_lost.inc();
                if let Some(suppressed) = self.full.lock().now(Instant::now()) {
                    log::error!(component = "audit", suppressed; "The audit log is not written fast enough: lines are lost");
                }
            }
        }
    }
}

/// The audit log there is now, if there is one; after a reload it may be another.
#[derive(Debug, Default)]
pub struct Trail(Mutex<Option<(Arc<Audit>, Running)>>);

impl Trail {
    /// Where an entry goes now. Not to be kept: the log ends when nobody has it any more.
    pub fn current(&self) -> Option<Arc<Audit>> {
        self.0.lock().as_ref().map(|(audit, _)| audit.clone())
    }

    /// Has the file opened again under its name, after it was renamed.
    pub fn reopen(&self) {
        if let Some((_, running)) = &*self.0.lock() {
            running.reopen();
        }
    }

    /// Goes on with another log or with none, and waits until all is written that went to the one before.
    pub fn replace(&self, next: Option<(Audit, Running)>) {
        let next = next.map(|(audit, running)| (Arc::new(audit), running));
        let before = mem::replace(&mut *self.0.lock(), next);
        if let Some((audit, running)) = before {
            drop(audit);
            running.stop();
        }
    }
}

/// The thread that writes.
#[derive(Debug)]
pub struct Running {
    reopen: Sender<()>,
    ended: Receiver<Never>,
}

impl Running {
    /// Has the file opened again under its name, after it was renamed.
    pub fn reopen(&self) {
        // A full channel holds the request already.
        let _ = self.reopen.try_send(());
    }

    /// Waits until all is written; [`Audit`] must be gone. A disk that takes nothing is not waited for.
    pub fn stop(self) {
        select_biased! {
            recv(self.ended) -> _ => {}
            recv(at(Instant::now() + END_MAX)) -> _ => {
                log::error!(component = "audit"; "The end of the audit log could not be written");
            }
        }
    }
}

struct Writer {
    path: PathBuf,
    file: File,
    /// The last line has no end.
    is_torn: bool,
    instance: String,
    entries: Receiver<Entry>,
    reopen: Receiver<()>,
    trouble: Seldom,
    metrics: Arc<Metrics>,
    /// Tells that the thread has ended.
    _alive: Sender<Never>,
}

impl Writer {
    fn run(mut self) {
        loop {
            select_biased! {
                recv(self.reopen) -> asked => match asked {
                    Ok(()) => self.open_again(),
                    Err(_) => self.reopen = never(),
                },
                recv(self.entries) -> entry => match entry {
                    Ok(entry) => self.write(entry),
                    Err(_) => return,
                },
            }
        }
    }

    /// Writes an entry, and those that wait behind it as far as they go with it.
    fn write(&mut self, first: Entry) {
        let mut lines = Vec::new();
        if self.is_torn {
            lines.push(b'\n');
        }
        let mut count = 0;
        let mut next = Some(first);
        while let Some(entry) = next {
            append_line(&mut lines, &self.instance, &entry);
            count += 1;
            next = if lines.len() < BATCH_BYTES { self.entries.try_recv().ok() } else { None };
        }
        let (written, result) = write_all(&mut self.file, &lines);
        if let Some(last) = lines[..written].last() {
            self.is_torn = *last != b'\n';
        }
        match result {
            Ok(()) => {}
            Err(error) => {
                self.metrics.audit_lines_lost.inc_by(count);
                if let Some(suppressed) = self.trouble.now(Instant::now()) {
                    let path = self.path.display();
                    log::error!(component = "audit", suppressed; "Cannot write to audit log {path}: {error}");
                }
            }
        }
    }

    fn open_again(&mut self) {
        match AuditFile::open(&self.path) {
            Ok(AuditFile { file, .. }) => {
                (self.file, self.is_torn) = (file, false);
                log::info!(component = "audit"; "Opened the audit log again");
            }
            Err(error) => {
                log::error!(component = "audit"; "Going on with the old audit log: {}", chain(&error));
            }
        }
    }
}

/// Writes as much as it can, and says how much that was.
fn write_all(file: &mut impl Write, bytes: &[u8]) -> (usize, io::Result<()>) {
    let mut written = 0;
    while written < bytes.len() {
        match file.write(&bytes[written..]) {
            Ok(0) => return (written, Err(io::ErrorKind::WriteZero.into())),
            Ok(length) => written += length,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return (written, Err(error)),
        }
    }
    (written, Ok(()))
}

fn append_line(lines: &mut Vec<u8>, instance: &str, entry: &Entry) {
    let Entry { time, node, outcome, reason, attempt, took, steps, facts } = entry;
    let digest = |bytes: [u8; 32]| hex::encode(&bytes);
    let line = Line {
        time: time.to_rfc3339_opts(SecondsFormat::Millis, true),
        instance,
        node: node.as_str(),
        outcome,
        reason,
        attempt: *attempt,
        ms: millis(*took),
        steps: Steps(steps),
        version: &facts.version,
        jwt_id: &facts.jwt_id,
        org: &facts.organization,
        key_fingerprint: facts.public_key.map(|key| digest(sha256(&key))).unwrap_or_default(),
        csr_subject: subject_of(&facts.csr).unwrap_or_default(),
        certificate_serial: serial_of(&facts.certificate).unwrap_or_default(),
        server_jwt_id: &facts.server_jwt_id,
        config_sha256: facts.config_sha256.map(digest).unwrap_or_default(),
    };
    let start = lines.len();
    // Texts and numbers can always be written, and to memory.
    if serde_json::to_writer(&mut *lines, &line).is_err() {
        lines.truncate(start);
        return;
    }
    lines.push(b'\n');
}

/// One line, its fields in their order.
#[derive(Serialize)]
struct Line<'a> {
    time: String,
    instance: &'a str,
    node: &'a str,
    outcome: &'a str,
    reason: &'a str,
    attempt: u32,
    ms: u64,
    steps: Steps<'a>,
    version: &'a str,
    jwt_id: &'a str,
    org: &'a str,
    key_fingerprint: String,
    csr_subject: String,
    certificate_serial: String,
    server_jwt_id: &'a str,
    config_sha256: String,
}

/// Milliseconds by step.
struct Steps<'a>(&'a [(&'static str, Duration)]);

impl Serialize for Steps<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.0.len()))?;
        for (step, took) in self.0 {
            map.serialize_entry(step, &millis(*took))?;
        }
        map.end()
    }
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// `CN=n1.example.net, O=Example`.
fn subject_of(csr: &str) -> Option<String> {
    let csr = X509Req::from_pem(csr.as_bytes()).ok()?;
    Some(name_text(csr.subject_name()))
}

fn name_text(name: &X509NameRef) -> String {
    let parts = name.entries().map(|entry| {
        let kind = entry.object().nid().short_name().unwrap_or("?");
        let value = entry.data().to_string().unwrap_or_default();
        format!("{kind}={value}")
    });
    parts.collect::<Vec<_>>().join(", ")
}

/// In hex, as `openssl x509 -serial` shows it.
fn serial_of(certificate: &str) -> Option<String> {
    let certificate = X509::from_pem(certificate.as_bytes()).ok()?;
    let serial = certificate.serial_number().to_bn().ok()?.to_hex_str().ok()?;
    Some(serial.to_string())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use crossbeam_channel::unbounded;

    use super::*;

    fn entry(node: &str) -> Entry {
        Entry {
            time: DateTime::from_timestamp_millis(1_772_330_584_005).unwrap(),
            node: Identity::parse(node).unwrap(),
            outcome: "failed",
            reason: "no \"space\"\n".into(),
            attempt: 2,
            took: Duration::from_micros(1_234_567),
            steps: vec![("jwt", Duration::from_millis(3)), ("helper", Duration::from_millis(41))],
            facts: Facts::default(),
        }
    }

    fn line(entry: &Entry) -> String {
        let mut lines = Vec::new();
        append_line(&mut lines, "instance", entry);
        String::from_utf8(lines).unwrap()
    }

    #[test]
    fn a_line_has_all_fields_in_their_order() {
        let expected = concat!(
            r#"{"time":"2026-03-01T02:03:04.005Z","instance":"instance","node":"n1.example.net","outcome":"failed","#,
            r#""reason":"no \"space\"\n","attempt":2,"ms":1234,"steps":{"jwt":3,"helper":41},"version":"","jwt_id":"","org":"","#,
            r#""key_fingerprint":"","csr_subject":"","certificate_serial":"","server_jwt_id":"","config_sha256":""}"#,
            "\n"
        );
        assert_eq!(line(&entry("n1.example.net")), expected);
    }

    #[test]
    fn keys_certificates_and_configurations_are_named_by_what_tells_them_apart() {
        let facts = Facts {
            public_key: Some([7; 32]),
            config_sha256: Some([0xab; 32]),
            csr: "no request".into(),
            certificate: "no certificate".into(),
            ..Facts::default()
        };
        let line: serde_json::Value =
            serde_json::from_str(&line(&Entry { facts, ..entry("n1") })).unwrap();
        assert_eq!(line["key_fingerprint"], hex::encode(&sha256(&[7; 32])));
        assert_eq!(line["config_sha256"], "ab".repeat(32));
        assert_eq!((&line["csr_subject"], &line["certificate_serial"]), (&"".into(), &"".into()));
    }

    /// A file that takes so many bytes and then no more.
    struct Small(Vec<u8>, usize);

    impl Write for Small {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let room = self.1.saturating_sub(self.0.len()).min(bytes.len());
            self.0.extend_from_slice(&bytes[..room]);
            if room == 0 { Err(io::ErrorKind::StorageFull.into()) } else { Ok(room) }
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn tells_how_much_a_full_disk_has_taken() {
        let mut small = Small(Vec::new(), 5);
        let (written, result) = write_all(&mut small, b"12345678");
        assert_eq!((written, result.unwrap_err().kind()), (5, io::ErrorKind::StorageFull));
        assert_eq!(write_all(&mut small, b"12").0, 0);
    }

    /// An audit log in a folder of its own.
    struct Site {
        folder: PathBuf,
        metrics: Arc<Metrics>,
    }

    impl Site {
        fn new() -> Site {
            let name = format!("provisioner-audit-{}", fastrand::u64(..));
            let folder = std::env::temp_dir().join(name);
            fs::create_dir_all(&folder).unwrap();
            Site { folder, metrics: Metrics::new("test") }
        }

        fn path(&self) -> PathBuf {
            self.folder.join("audit.log")
        }

        fn start(&self, path: &Path) -> (Audit, Running) {
            AuditFile::open(path).unwrap().start("instance", self.metrics.clone()).unwrap()
        }

        fn nodes(&self, path: &Path) -> Vec<String> {
            let text = fs::read_to_string(path).unwrap();
            let node = |line: &str| {
                let line: serde_json::Value = serde_json::from_str(line).unwrap();
                line["node"].as_str().unwrap().to_owned()
            };
            text.lines().map(node).collect()
        }
    }

    impl Drop for Site {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.folder);
        }
    }

    #[test]
    fn everything_is_written_at_the_end_and_appended_to_what_was_there() {
        let site = Site::new();
        for round in 0..2 {
            let (audit, running) = site.start(&site.path());
            for number in 0..500 {
                audit.note(entry(&format!("n{round}-{number}")));
            }
            drop(audit);
            running.stop();
        }
        let nodes = site.nodes(&site.path());
        assert_eq!(
            (nodes.len(), nodes[0].as_str(), nodes[999].as_str()),
            (1_000, "n0-0", "n1-499")
        );
        assert_eq!(site.metrics.audit_lines_lost.get(), 0);
    }

    #[test]
    fn a_file_that_was_renamed_is_opened_again_when_asked() {
        let site = Site::new();
        let (audit, running) = site.start(&site.path());
        let old = site.folder.join("audit.log.1");
        audit.note(entry("before"));
        while fs::read_to_string(site.path()).unwrap().is_empty() {
            thread::yield_now();
        }
        fs::rename(site.path(), &old).unwrap();
        running.reopen();
        while !site.path().exists() {
            thread::yield_now();
        }
        audit.note(entry("after"));
        drop(audit);
        running.stop();
        assert_eq!(site.nodes(&old), ["before"]);
        assert_eq!(site.nodes(&site.path()), ["after"]);
    }

    #[test]
    fn a_log_that_is_replaced_has_all_that_went_there() {
        let site = Site::new();
        let trail = Trail::default();
        assert!(trail.current().is_none());
        let next = site.folder.join("next.log");
        for path in [&site.path(), &next] {
            trail.replace(Some(site.start(path)));
            for number in 0..500 {
                trail.current().unwrap().note(entry(&format!("n{number}")));
            }
        }
        assert_eq!(site.nodes(&site.path()).len(), 500);
        trail.replace(None);
        assert_eq!(site.nodes(&next).len(), 500);
        assert!(trail.current().is_none());
    }

    #[test]
    fn what_a_full_disk_does_not_take_is_counted() {
        let site = Site::new();
        let (audit, running) = site.start(Path::new("/dev/full"));
        for _ in 0..3 {
            audit.note(entry("n1"));
        }
        drop(audit);
        running.stop();
        assert_eq!(site.metrics.audit_lines_lost.get(), 3);
    }

    #[test]
    fn a_queue_that_nobody_empties_keeps_nobody_waiting() {
        let site = Site::new();
        let (entries, _waiting) = bounded(2);
        let full = Mutex::new(Seldom::every(TROUBLE_LOG));
        let audit = Audit { entries, full, metrics: site.metrics.clone() };
        for _ in 0..5 {
            audit.note(entry("n1"));
        }
        assert_eq!(site.metrics.audit_lines_lost.get(), 3);
        let (reopen, _) = unbounded();
        let (_alive, ended) = bounded(0);
        // Nor does the end, for longer than its time.
        Running { reopen, ended }.stop();
    }
}
