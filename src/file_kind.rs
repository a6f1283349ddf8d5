//! What stands under the name that somebody set for a file. Pipes wait, sockets can't be opened, and of a device nobody knows
//! what reading and writing it does: who names one by mistake is told so, and who opens one must not be held up.

use std::fs::FileType;
use std::io;
use std::os::unix::fs::FileTypeExt as _;

/// In one word, for a message.
pub fn noun(kind: FileType) -> &'static str {
    match kind {
        kind if kind.is_file() => "a file",
        kind if kind.is_dir() => "a directory",
        kind if kind.is_fifo() => "a pipe",
        kind if kind.is_socket() => "a socket",
        _ => "a device",
    }
}

/// That it is something else than it should be.
pub fn refused(kind: FileType, wanted: &str) -> io::Error {
    let error = match kind.is_dir() {
        true => io::ErrorKind::IsADirectory,
        false => io::ErrorKind::InvalidInput,
    };
    io::Error::new(error, format!("it is {}, and {wanted} is wanted", noun(kind)))
}
