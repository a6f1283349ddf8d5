//! No core dump, which would leave our keys, tokens and passwords on a disk.
//!
//! Only the limit in force is lowered: whoever needs a core of a running daemon can raise it again with `prlimit`. Where cores go to a
//! program and not to a file, the kernel asks for no limit, and there is none at all; debuggers need root then.

use std::fs;

use rustix::process::{
    DumpableBehavior, Resource, Rlimit, getrlimit, set_dumpable_behavior, setrlimit,
};

/// Forbids them to us and, unless they go to a program, to the programs we start, until somebody raises the limit again.
pub fn forbid() {
    let Rlimit { maximum, .. } = getrlimit(Resource::Core);
    // Less than we have can always be asked for.
    let _ = setrlimit(Resource::Core, Rlimit { current: Some(0), maximum });
    let pattern = fs::read("/proc/sys/kernel/core_pattern").unwrap_or_default();
    if goes_to_a_program(&pattern) {
        // No kernel that we run on refuses it.
        let _ = set_dumpable_behavior(DumpableBehavior::NotDumpable);
    }
}

/// Source: core(5).
fn goes_to_a_program(pattern: &[u8]) -> bool {
    pattern.starts_with(b"|")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn crash_reporters_are_told_from_files() {
        for (pattern, expected) in [
            ("core\n", false),
            ("/var/crash/core.%p|\n", false),
            ("", false),
            ("|/usr/share/apport/apport -p%p -s%s -c%c\n", true),
            ("|/usr/lib/systemd/systemd-coredump %P %u %g %s %t 9223372036854775808 %h\n", true),
        ] {
            assert_eq!(goes_to_a_program(pattern.as_bytes()), expected, "{pattern}");
        }
    }
}
