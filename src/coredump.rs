//! No core dump, which would leave our keys, tokens and passwords on a disk.
//!
//! Only the limit in force is lowered: whoever needs a core of a running daemon can raise it again with `prlimit`.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Forbids them to us and to the programs we start, unless somebody raises the limit again.
pub fn forbid() {
    let Rlimit { maximum, .. } = getrlimit(Resource::Core);
    // Less than we have can always be asked for.
    let _ = setrlimit(Resource::Core, Rlimit { current: Some(0), maximum });
}
