//! `check`: finds what would keep the daemon from working, before it does; all of it, and without touching anything.
//!
//! Settings and keys are read as at a start, and what is right in them is tried out: the helper if it stays, files and ports we need,
//! and every broker. Nothing is written, no node is asked, and a daemon that runs meanwhile notices nothing: we are another
//! connection with another name, and what listens on its port and socket stays there.
//!
//! What is found out about each broker is in `broker`, what differs from the Go daemon in `moving`.

mod broker;
mod helper;
mod moving;
pub mod places;

use std::fmt;
use std::path::Path;

use serde::Serialize;

use crate::clock::unix_time;
use crate::config::surroundings::Surroundings;
use crate::config::{self, Config, Cooperation, Inspected};
use crate::ops::text::{Count, Plain};

/// What shall be looked at.
#[derive(Debug, Clone, Copy)]
pub struct Wanted<'a> {
    /// The YAML file.
    pub config: &'a Path,
    /// Choria's client file.
    pub choria_config: &'a Path,
    /// Where the process id shall go, if anywhere.
    pub pid: Option<&'a Path>,
    /// Leave the brokers out.
    pub is_offline: bool,
    /// Also say what behaves differently from the original.
    pub is_moving: bool,
}

/// All that was found.
#[derive(Debug, Default, Serialize)]
pub struct Findings {
    /// What keeps the daemon from working.
    pub errors: Vec<Finding>,
    /// What may not be meant as it is.
    pub warnings: Vec<Finding>,
}

/// One thing that was found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// What has to be done about it, roughly; nothing of the kind for a warning.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kind: Option<Kind>,
    /// What it is about first, then what is wrong.
    pub text: String,
}

/// Who can put it right. The worst comes first: it is what the exit code tells.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// We may not do something that we must.
    NotPermitted,
    /// A setting, or a file that one names.
    Configuration,
    /// Something beside us: a port that is in use, a helper that ends, a broker's bucket.
    Surroundings,
    /// A broker that does not answer; it may be there in a minute.
    OutOfReach,
}

impl Findings {
    fn error(&mut self, kind: Kind, text: impl Into<String>) {
        self.errors.push(Finding { kind: Some(kind), text: text.into() });
    }

    fn warn(&mut self, text: impl Into<String>) {
        self.warnings.push(Finding { kind: None, text: text.into() });
    }

    /// The worst of the errors.
    pub fn worst(&self) -> Option<Kind> {
        self.errors.iter().filter_map(|error| error.kind).min()
    }

    /// As JSON, on one line.
    pub fn json(&self) -> String {
        #[derive(Serialize)]
        struct Said<'a> {
            ok: bool,
            #[serde(flatten)]
            findings: &'a Findings,
        }
        let said = Said { ok: self.errors.is_empty(), findings: self };
        let json = serde_json::to_string(&said).expect("texts and words can be written as JSON");
        format!("{json}\n")
    }
}

/// For people.
impl fmt::Display for Findings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (word, findings) in [("warning", &self.warnings), ("error", &self.errors)] {
            for Finding { text, .. } in findings {
                writeln!(f, "{word}: {}", Plain(text))?;
            }
        }
        match (self.errors.len(), self.warnings.len()) {
            (0, 0) => writeln!(f, "Nothing is wrong."),
            (errors, warnings) => {
                let count = |number: usize, what| Count(number as u64, what);
                writeln!(f, "{}, {}.", count(errors, "error"), count(warnings, "warning"))
            }
        }
    }
}

/// Looks at everything. Takes as long as the slowest broker, which has a minute.
pub fn run(wanted: &Wanted<'_>, surroundings: &Surroundings) -> Findings {
    let mut findings = Findings::default();
    let Inspected { config, choria, places, report } =
        config::inspect(wanted.config, wanted.choria_config, surroundings);
    let kind = if report.denied { Kind::NotPermitted } else { Kind::Configuration };
    for error in &report.errors {
        findings.error(kind, error.to_string());
    }
    for warning in &report.warnings {
        match warning.is_grave {
            true => findings.error(Kind::Configuration, warning.to_string()),
            false => findings.warn(warning.to_string()),
        }
    }

    let known = choria.as_ref().and_then(|choria| choria.config.as_ref());
    if let Some(fault) = known.and_then(|choria| choria.security.chain_fault(unix_time())) {
        match fault.is_certain {
            true => findings.error(Kind::Configuration, fault.text),
            false => findings.warn(fault.text),
        }
    }
    if let Some(config) = &config {
        helper::check(config, &places, &mut findings);
        let identity = choria.as_ref().and_then(|choria| choria.identity.as_ref());
        places::check(config, &places, wanted.pid, identity, &mut findings);
    } else if let Some(pid) = wanted.pid {
        places::check_pid(pid, &mut findings);
    }
    if let (false, Some(choria)) = (wanted.is_offline, &choria) {
        let is_alone = |config: &Config| config.cooperation == Cooperation::Alone;
        let peers = config.as_ref().is_some_and(|config| !is_alone(config));
        let election =
            config.as_ref().is_some_and(|config| config.cooperation == Cooperation::Elected);
        let component = config.as_ref().map(|config| config.lifecycle_component.as_str());
        broker::check(choria, broker::Purpose { component, peers, election }, &mut findings);
    }
    moving::check(wanted, surroundings, &mut findings);
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_worst_error_is_what_counts() {
        let mut findings = Findings::default();
        assert_eq!(findings.worst(), None);
        findings.warn("a");
        assert_eq!(findings.worst(), None);
        for kind in [Kind::OutOfReach, Kind::Surroundings, Kind::Configuration, Kind::NotPermitted]
        {
            findings.error(kind, "b");
            assert_eq!(findings.worst(), Some(kind));
        }
        findings.error(Kind::OutOfReach, "c");
        assert_eq!(findings.worst(), Some(Kind::NotPermitted));
    }

    #[test]
    fn says_how_much_was_found_in_both_forms() {
        let mut findings = Findings::default();
        assert_eq!(findings.to_string(), "Nothing is wrong.\n");
        assert_eq!(findings.json(), "{\"ok\":true,\"errors\":[],\"warnings\":[]}\n");
        findings.warn("w\u{1b}");
        findings.error(Kind::OutOfReach, "e");
        assert_eq!(findings.to_string(), "warning: w\\u{1b}\nerror: e\n1 error, 1 warning.\n");
        assert_eq!(
            findings.json(),
            "{\"ok\":false,\"errors\":[{\"kind\":\"out_of_reach\",\"text\":\"e\"}],\"warnings\":[{\"text\":\"w\\u001b\"}]}\n"
        );
        findings.error(Kind::OutOfReach, "e");
        assert!(findings.to_string().ends_with("2 errors, 1 warning.\n"));
    }
}
