//! What settings mean here that they don't mean to the Go daemon, of those that work with both; for whoever moves from it.

use std::path::Path;

use crate::config::choria::values::setting;
use crate::config::file::File;
use crate::config::report::{Finding, Report};
use crate::config::security::{PROVIDER, SSLDIR};
use crate::config::surroundings::Surroundings;
use crate::config::{read_file, read_yaml};
use crate::secret::PASSWORD_VARIABLE;

/// The original reads nothing behind a line of this length, in bytes.
const LINE_MAX: usize = 64 << 10;

/// What differs in the YAML at `yaml` and Choria's client file at `client`; nothing of a file that can't be read.
pub fn differences(yaml: &Path, client: &Path, surroundings: &Surroundings) -> Vec<Finding> {
    let mut report = Report::new(yaml.display().to_string());
    // What is wrong with it is not the question.
    let file = read_yaml(yaml, &mut Report::default());
    if let Some(file) = &file {
        of_settings(file, surroundings, &mut report);
    }
    let mut client_report = Report::new(client.display().to_string());
    if let Ok(bytes) = read_file(client) {
        let is_insecure = file.as_ref().is_some_and(File::is_insecure);
        of_client(&String::from_utf8_lossy(&bytes), is_insecure, &mut client_report);
    }
    report.append(client_report);
    report.warnings
}

fn of_settings(file: &File, surroundings: &Surroundings, report: &mut Report) {
    let word = |written: &Option<super::At<String>>| {
        written.as_ref().map(|at| (Some(at.line), at.value.clone())).unwrap_or_default()
    };
    let (line, logfile) = word(&file.logfile);
    match logfile.to_ascii_lowercase().as_str() {
        "" if line.is_none() => report.warn(
            None,
            "logfile: not set, so the log goes to standard output; the original writes a file named info where it is started",
        ),
        "stderr" | "discard" => report.warn(
            line,
            format!("logfile: {logfile} is what it says; the original writes to standard output"),
        ),
        _ => {}
    }
    let (line, level) = word(&file.loglevel);
    match level.as_str() {
        "" => report.warn(line, "loglevel: not set, which is info; to the original it is warn"),
        "debug" | "info" | "warn" | "error" | "fatal" => {}
        _ => report
            .warn(line, format!("loglevel: {level} is what it says; to the original it is warn")),
    }
    if let Some(at) = file.monitor_port.as_ref().filter(|at| at.value != 0) {
        report.warn(
            at.line,
            "monitor_port: serves a page with the names of nodes at / as well, and /metrics has none of go_*, process_* and choria_connector_*",
        );
    }
    if surroundings.variable(PASSWORD_VARIABLE).is_some() {
        report.warn(None, format!("helper: does not find {PASSWORD_VARIABLE} in its environment"));
    }
}

fn of_client(text: &str, is_insecure: bool, report: &mut Report) {
    let mut lines = text.split('\n').enumerate();
    if let Some((at, _)) = lines.find(|(_, line)| line.len() >= LINE_MAX)
        && text.split('\n').skip(at).any(|line| setting(line).is_some())
    {
        report.warn(at + 1, "this line and all behind it are read; the original ends here");
    }
    let written = |key: &str| {
        let found = |line| setting(line).filter(|(known, _)| *known == key);
        text.split('\n').filter_map(found).next_back().map(|(_, value)| value)
    };
    let provider = written(PROVIDER);
    let is_puppet = !is_insecure && provider.is_none_or(|provider| provider == "puppet");
    if is_puppet && written(SSLDIR).is_none() {
        report.warn(
            None,
            format!("{SSLDIR}: not set; the original asks Puppet for it, and here it is where Puppet has it by default"),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn says_what_settings_mean_to_the_original() {
        let check = |yaml: &str, expected: &[&str]| {
            let mut report = Report::new("c");
            let file = File::parse(yaml.as_bytes(), &mut Report::default()).unwrap();
            of_settings(&file, &Surroundings::default(), &mut report);
            found(&report, expected, yaml);
        };
        check("logfile: /var/log/p\nloglevel: warn\n", &[]);
        check("logfile: ''\nloglevel: info\n", &[]);
        check("helper: x\n", &["c: logfile: not set", "c: loglevel: not set"]);
        check(
            "loglevel: WARN\nlogfile: Discard\n",
            &["c:2: logfile: Discard", "c:1: loglevel: WARN"],
        );
        check("logfile: stdout\nloglevel: info\nmonitor_port: 9999\n", &["c:3: monitor_port"]);
        check("logfile: stdout\nloglevel: info\nmonitor_port: 0\n", &[]);
    }

    #[test]
    fn says_what_the_client_file_means_to_the_original() {
        let check = |text: &str, expected: &[&str]| {
            let mut report = Report::new("c");
            of_client(text, false, &mut report);
            found(&report, expected, text);
            // Without security there are no such files.
            let mut report = Report::new("c");
            of_client(text, true, &mut report);
            let others: Vec<&str> =
                expected.iter().copied().filter(|text| !text.contains(SSLDIR)).collect();
            found(&report, &others, text);
        };
        check("plugin.security.provider = file\n", &[]);
        check("plugin.choria.ssldir = /x\n", &[]);
        check("identity = x\n", &["c: plugin.choria.ssldir: not set"]);
        check("plugin.security.provider = puppet\n", &["c: plugin.choria.ssldir: not set"]);
        let long = "x".repeat(LINE_MAX);
        check(
            &format!("plugin.security.provider = file\n# {long}\nttl = 60\n"),
            &["c:2: this line and all"],
        );
    }

    #[track_caller]
    fn found(report: &Report, expected: &[&str], text: &str) {
        let found: Vec<String> = report.warnings.iter().map(ToString::to_string).collect();
        assert_eq!(found.len(), expected.len(), "{text}: {found:?}");
        for (found, expected) in found.iter().zip(expected) {
            assert!(found.starts_with(expected), "{text}: {found}");
        }
    }
}
