//! What behaves differently from the Go daemon in a set-up that worked with it, as far as it can be seen in its files. All else
//! is in `dist/MOVING.md`; what would not work at all is found with the settings.

use std::fs;
use std::path::Path;

use crate::config;
use crate::config::surroundings::Surroundings;

use super::{Findings, Wanted};

/// Where a package of ours leaves the unit of the one it replaced.
const KEPT_UNIT: &str = "/etc/systemd/system/choria-provisioner.service";

/// How such a unit begins.
const KEPT_UNIT_HEAD: &str = "# Kept from the package that was here before";

/// Where the original logs if nothing else is said.
const USUAL_LOG: &str = "info";

pub(super) fn check(wanted: &Wanted<'_>, surroundings: &Surroundings, findings: &mut Findings) {
    let unit = config::read_file(Path::new(KEPT_UNIT)).unwrap_or_default();
    let unit = String::from_utf8_lossy(&unit);
    let steps = steps_of(&unit);
    if let Some(steps) = &steps {
        findings.warn(format!(
            "{KEPT_UNIT}: kept from the package before, so the daemon runs as root; to move to the user of this package: {}",
            steps.join("; ")
        ));
    }
    if !wanted.is_moving && steps.is_none() {
        return;
    }
    for difference in config::moving::differences(wanted.config, wanted.choria_config, surroundings)
    {
        findings.warn(difference.to_string());
    }
    let log = surroundings.directory.as_deref().unwrap_or(Path::new("/")).join(USUAL_LOG);
    for path in [log.as_path(), Path::new("/info")] {
        if fs::metadata(path).is_ok_and(|metadata| metadata.is_file()) {
            let path = path.display();
            findings.warn(format!(
                "{path}: looks like the original's log without logfile; nobody writes it any more"
            ));
        }
    }
}

/// The commands at the head of a kept unit; nothing for any other.
fn steps_of(unit: &str) -> Option<Vec<&str>> {
    let rest = unit.strip_prefix(KEPT_UNIT_HEAD)?;
    let comments = rest.lines().skip(1).take_while(|line| line.starts_with('#'));
    Some(comments.filter_map(|line| line.strip_prefix("#   ")).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kept_unit_says_how_to_move() {
        let script = include_str!("../../dist/packaging/keep-unit.sh");
        let echoed = script
            .lines()
            .filter_map(|line| line.trim().strip_prefix("echo \"#")?.strip_suffix('"'));
        let unit: String = echoed.map(|line| format!("#{line}\n")).collect();
        let steps = steps_of(&unit).unwrap();
        assert_eq!(steps.len(), 3, "{steps:?}");
        assert!(steps[0].starts_with("chgrp -R choria-provisioner "), "{steps:?}");
        assert_eq!(steps_of("[Unit]\n#   rm\n"), None);
    }
}
