//! Whether a node needs another version first.
//!
//! The decision alone, pure. Sending it is `provision`'s, and remembering how often one was sent the registry's, since an
//! upgrade ends the attempt: the node comes back by its startup event, with the version it has then.
//!
//! | In this order | Decision |
//! | --- | --- |
//! | feature off, or no version wished | go on |
//! | no repository, and upgrades are not optional | problem |
//! | the node reported no version | problem |
//! | the node takes no upgrades | problem |
//! | reported and wished version equal, as RPM compares | go on |
//! | no repository, and upgrades are optional | problem |
//! | sent often enough to know that it changes nothing | stuck |
//! | otherwise, a lower version too | send |
//!
//! Where upgrades are optional, a problem and a stuck upgrade only cost a warning, and the node is configured as it is.
//!
//! Source: `handleHostUpgrade` in choria-io/provisioner's `host/host.go`. It upgrades for ever a node that never reports
//! the wished version, and sends an upgrade without a repository where upgrades are optional, which every node refuses.

use std::collections::hash_map::DefaultHasher;
use std::fmt;
use std::hash::{Hash, Hasher};

use crate::version::Version;

/// Tries of one upgrade that changed nothing after which it is not sent again.
pub const TRIES_MAX: u8 = 2;

/// What the site says about upgrades.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Policy<'a> {
    /// The feature `upgrades`.
    pub is_on: bool,
    /// `upgrades_optional`: a node that cannot be upgraded is configured as it is.
    pub is_optional: bool,
    /// `upgrades_repository`: where nodes find versions; empty without.
    pub repository: &'a str,
}

/// What a node's inventory says about its version.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reported<'a> {
    /// The version it runs; empty if it said none.
    pub version: &'a str,
    /// Whether it takes upgrades.
    pub is_upgradable: bool,
}

/// What is done about the version of a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Decision {
    /// Nothing: the node is configured next.
    GoOn,
    /// The version is sent, which ends the attempt.
    Send {
        /// The version wished, without white space around it.
        version: String,
    },
    /// It cannot be upgraded and is configured next, after a warning.
    Skip(Skipped),
    /// It cannot be upgraded, which ends the attempt.
    Fail(Problem),
    /// It was upgraded in vain, which ends the attempt.
    Stuck(Stuck),
}

/// Decides for one node. `wish` is the version its helper gave.
///
/// `is_stuck` is asked with the version wished and the version reported, once at most: whether that upgrade was sent often
/// enough to know that it changes nothing.
pub fn decide(
    policy: Policy<'_>,
    reported: Reported<'_>,
    wish: &str,
    is_stuck: impl FnOnce(&str, &str) -> bool,
) -> Decision {
    // A helper that prints the version with its line end means the version.
    let wish = wish.trim();
    if !policy.is_on || wish.is_empty() {
        return Decision::GoOn;
    }
    let fail = |problem| match policy.is_optional {
        true => Decision::Skip(Skipped { wish: wish.to_owned(), cause: Cause::Problem(problem) }),
        false => Decision::Fail(problem),
    };
    if policy.repository.is_empty() && !policy.is_optional {
        return fail(Problem::NoRepository);
    }
    if reported.version.is_empty() {
        return fail(Problem::NoVersion);
    }
    if !reported.is_upgradable {
        return fail(Problem::NotUpgradable);
    }
    if Version::parse(reported.version) == Version::parse(wish) {
        return Decision::GoOn;
    }
    if policy.repository.is_empty() {
        return fail(Problem::NoRepository);
    }
    if is_stuck(wish, reported.version) {
        let stuck = Stuck { version: wish.to_owned(), reported: reported.version.to_owned() };
        return match policy.is_optional {
            true => Decision::Skip(Skipped { wish: wish.to_owned(), cause: Cause::Stuck(stuck) }),
            false => Decision::Stuck(stuck),
        };
    }
    Decision::Send { version: wish.to_owned() }
}

/// The upgrade sent to a node last, and how often in a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tries {
    target: u64,
    from: u64,
    count: u8,
}

impl Tries {
    /// What to remember after `before` when an upgrade to `target` was sent to a node that reported version `from`.
    pub fn after(before: Option<Tries>, target: &str, from: &str) -> Tries {
        let (target, from) = (digest(target), digest(from));
        let count = match before {
            Some(tried) if tried.target == target && tried.from == from => {
                tried.count.saturating_add(1)
            }
            _ => 1,
        };
        Tries { target, from, count }
    }

    /// Whether an upgrade to `target` of a node that reports version `from` was tried often enough to know that it
    /// changes nothing.
    pub fn is_stuck(&self, target: &str, from: &str) -> bool {
        self.target == digest(target) && self.from == digest(from) && self.count >= TRIES_MAX
    }
}

/// Stands for a version, so that a remembered node stays small. Whoever finds two with one digest gains nothing by it.
fn digest(version: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    version.hash(&mut hasher);
    hasher.finish()
}

/// Why a node cannot be upgraded, in the original's words.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Problem {
    /// The site names no repository.
    NoRepository,
    /// The node did not say which version it runs.
    NoVersion,
    /// The node takes no upgrades.
    NotUpgradable,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            // The original's name for the setting, which operators search for, then the real one.
            Problem::NoRepository => {
                "updates_repository not configured for upgrades feature: set upgrades_repository"
            }
            Problem::NoVersion => "did not receive a version in inventory",
            Problem::NotUpgradable => "does not support upgrades",
        })
    }
}

impl std::error::Error for Problem {}

/// An upgrade that was sent again and again, and changed nothing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stuck {
    /// The version wished.
    pub version: String,
    /// The version the node still reports.
    pub reported: String,
}

impl fmt::Display for Stuck {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Stuck { version, reported } = self;
        write!(
            f,
            "update to {version} was sent before and the node still reports {reported}: \
             the helper must wish for the version exactly as the node will report it"
        )
    }
}

impl std::error::Error for Stuck {}

/// The warning for a node that is configured with the version it has. Shown as the original words it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Skipped {
    wish: String,
    cause: Cause,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Cause {
    Problem(Problem),
    Stuck(Stuck),
}

impl fmt::Display for Skipped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Could not upgrade to {}, continuing: ", self.wish)?;
        match &self.cause {
            Cause::Problem(problem) => problem.fmt(f),
            Cause::Stuck(stuck) => stuck.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Decision, Policy, Reported, Tries, decide};

    const REPOSITORY: &str = "https://repo.example.net";
    const NODE: Reported<'_> = Reported { version: "0.29.4", is_upgradable: true };

    const ON: Policy<'_> = Policy { is_on: true, is_optional: false, repository: REPOSITORY };
    const OFF: Policy<'_> = Policy { is_on: false, ..ON };
    const OPTIONAL: Policy<'_> = Policy { is_optional: true, ..ON };
    const NOWHERE: Policy<'_> = Policy { repository: "", ..ON };
    const OPTIONAL_NOWHERE: Policy<'_> = Policy { is_optional: true, ..NOWHERE };

    const NO_REPOSITORY: &str =
        "updates_repository not configured for upgrades feature: set upgrades_repository";

    #[test]
    fn goes_on_without_the_feature_or_a_wish() {
        check(OFF, NODE, "0.30.0", "go on");
        check(Policy { is_on: false, ..OPTIONAL_NOWHERE }, NODE, "0.30.0", "go on");
        check(ON, NODE, "", "go on");
        check(ON, NODE, " \n", "go on");
        check(NOWHERE, Reported { version: "", is_upgradable: false }, "", "go on");
    }

    #[test]
    fn goes_on_if_the_versions_are_equal_for_rpm() {
        for wish in ["0.29.4", "0.29.4\n", "0:0.29.4", "0.29.04", "0.29_4"] {
            check(ON, NODE, wish, "go on");
            check(OPTIONAL, NODE, wish, "go on");
            check(OPTIONAL_NOWHERE, NODE, wish, "go on");
        }
    }

    #[test]
    fn sends_every_other_version_lower_ones_too() {
        for wish in ["0.30.0", "0.29.10", "0.28.0", "0.29.4.0", "v0.29.4", "0.29.4-1", "0.29.4^"] {
            check(ON, NODE, wish, &format!("send {wish}"));
            check(OPTIONAL, NODE, wish, &format!("send {wish}"));
        }
        check(ON, NODE, " 0.30.0\r\n", "send 0.30.0");
        check(ON, Reported { version: "development", ..NODE }, "0.30.0", "send 0.30.0");
    }

    #[test]
    fn fails_where_no_upgrade_is_possible() {
        let unknown = Reported { version: "", ..NODE };
        let fixed = Reported { is_upgradable: false, ..NODE };
        check(NOWHERE, NODE, "0.30.0", &format!("fail: {NO_REPOSITORY}"));
        check(ON, unknown, "0.30.0", "fail: did not receive a version in inventory");
        check(ON, fixed, "0.30.0", "fail: does not support upgrades");
        // In this order, as in the original: the site's own fault first, and a node that takes no upgrades fails with any wish.
        check(
            NOWHERE,
            Reported { version: "", is_upgradable: false },
            "0.30.0",
            &format!("fail: {NO_REPOSITORY}"),
        );
        check(NOWHERE, NODE, "0.29.4", &format!("fail: {NO_REPOSITORY}"));
        check(
            ON,
            Reported { version: "", is_upgradable: false },
            "0.30.0",
            "fail: did not receive a version in inventory",
        );
        check(ON, fixed, "0.29.4", "fail: does not support upgrades");
    }

    #[test]
    fn skips_what_is_optional_and_not_possible() {
        let skip =
            |problem: &str| format!("skip: Could not upgrade to 0.30.0, continuing: {problem}");
        let unknown = Reported { version: "", ..NODE };
        let fixed = Reported { is_upgradable: false, ..NODE };
        check(OPTIONAL_NOWHERE, NODE, "0.30.0", &skip(NO_REPOSITORY));
        check(OPTIONAL, unknown, "0.30.0", &skip("did not receive a version in inventory"));
        check(OPTIONAL, fixed, "0.30.0", &skip("does not support upgrades"));
    }

    #[test]
    fn does_not_send_for_ever_what_changes_nothing() {
        let why = "update to 0.30.0-1 was sent before and the node still reports 0.30.0: \
                   the helper must wish for the version exactly as the node will report it";
        let node = Reported { version: "0.30.0", ..NODE };
        let tried = |target: &str, from: &str| {
            assert_eq!((target, from), ("0.30.0-1", "0.30.0"));
            true
        };
        let decision = decide(ON, node, "0.30.0-1\n", tried);
        assert_eq!(shown(&decision), format!("stuck: {why}"));
        let decision = decide(OPTIONAL, node, "0.30.0-1", tried);
        assert_eq!(
            shown(&decision),
            format!("skip: Could not upgrade to 0.30.0-1, continuing: {why}")
        );
        // A node that arrived is not stuck, however often it was sent there.
        assert_eq!(decide(ON, node, "0.30.0", |_, _| true), Decision::GoOn);
    }

    #[test]
    fn counts_what_is_sent_in_vain() {
        let once = Tries::after(None, "0.30.0-1", "0.29.4");
        assert!(!once.is_stuck("0.30.0-1", "0.29.4"));
        let twice = Tries::after(Some(once), "0.30.0-1", "0.29.4");
        assert!(twice.is_stuck("0.30.0-1", "0.29.4"));
        // Another wish, or a node that has changed, is another upgrade.
        assert!(!twice.is_stuck("0.30.0", "0.29.4"));
        assert!(!twice.is_stuck("0.30.0-1", "0.30.0"));
        assert!(!Tries::after(Some(twice), "0.30.0-1", "0.30.0").is_stuck("0.30.0-1", "0.30.0"));
    }

    #[track_caller]
    fn check(policy: Policy<'_>, reported: Reported<'_>, wish: &str, expected: &str) {
        let decision = decide(policy, reported, wish, |_, _| false);
        assert_eq!(shown(&decision), expected, "{policy:?} {reported:?} {wish:?}");
    }

    fn shown(decision: &Decision) -> String {
        match decision {
            Decision::GoOn => "go on".to_owned(),
            Decision::Send { version } => format!("send {version}"),
            Decision::Skip(skipped) => format!("skip: {skipped}"),
            Decision::Fail(problem) => format!("fail: {problem}"),
            Decision::Stuck(stuck) => format!("stuck: {stuck}"),
        }
    }
}
