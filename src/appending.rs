//! Files that we append to while we run. Any may be a pipe, as long as somebody reads it: nobody waits for that.

use std::fs::{self, File, FileType, OpenOptions};
use std::io;
use std::os::unix::fs::{FileTypeExt as _, OpenOptionsExt as _};
use std::path::Path;

use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::Errno;

use crate::file_kind;

/// Opens the file at `path` to append to it; one that is not there is made, with `mode`.
///
/// # Errors
///
/// The system's; [`io::ErrorKind::BrokenPipe`] for a pipe that nobody reads, and an error for what is nothing to append to.
pub fn open(path: &Path, mode: u32) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.append(true).create(true).mode(mode).custom_flags(OFlags::NONBLOCK.bits() as i32);
    let file = options.open(path).map_err(|error| match fs::metadata(path) {
        // The system only says that there is no such device.
        Ok(there) if is(&error, Errno::NXIO) => match fits(there.file_type()) {
            Ok(()) if there.file_type().is_fifo() => unread_pipe(),
            Ok(()) => error,
            Err(error) => error,
        },
        _ => error,
    })?;
    fits(file.metadata()?.file_type())?;
    // What is written is waited for, as with any other file of ours.
    fcntl_setfl(&file, fcntl_getfl(&file)? - OFlags::NONBLOCK)?;
    Ok(file)
}

/// Whether a file of this kind can be appended to. Terminals and the like can.
///
/// # Errors
///
/// What it is instead.
pub fn fits(kind: FileType) -> io::Result<()> {
    match kind.is_dir() || kind.is_socket() || kind.is_block_device() {
        true => Err(file_kind::refused(kind, "a file")),
        false => Ok(()),
    }
}

fn unread_pipe() -> io::Error {
    let text = "it is a pipe that nobody reads: start its reader first, or name a file";
    io::Error::new(io::ErrorKind::BrokenPipe, text)
}

fn is(error: &io::Error, expected: Errno) -> bool {
    error.raw_os_error() == Some(expected.raw_os_error())
}

#[cfg(test)]
pub(crate) mod testing {
    use rustix::fs::{CWD, FileType, Mode, mknodat};

    use super::*;

    /// Makes a pipe that nobody reads.
    pub fn make_pipe(path: &Path) {
        mknodat(CWD, path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
    }
}

#[cfg(test)]
mod tests {
    use std::env;
    use std::io::{Read as _, Write as _};
    use std::os::unix::net::UnixListener;

    use super::testing::make_pipe;
    use super::*;

    #[test]
    fn a_pipe_that_nobody_reads_is_not_waited_for_and_one_that_is_read_is_written_to() {
        let path = env::temp_dir().join(format!("provisioner-pipe-{}", fastrand::u64(..)));
        make_pipe(&path);
        let error = open(&path, 0o600).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);
        assert!(error.to_string().starts_with("it is a pipe that nobody reads: "), "{error}");
        let flags = OFlags::NONBLOCK.bits() as i32;
        let mut reader = File::options().read(true).custom_flags(flags).open(&path).unwrap();
        let mut file = open(&path, 0o600).unwrap();
        assert!(!fcntl_getfl(&file).unwrap().contains(OFlags::NONBLOCK));
        file.write_all(b"a line").unwrap();
        let mut read = [0; 6];
        reader.read_exact(&mut read).unwrap();
        assert_eq!(&read, b"a line");
        fs::remove_file(&path).unwrap();
    }
    #[test]
    fn says_what_it_is_that_takes_no_lines() {
        let path = env::temp_dir().join(format!("provisioner-socket-{}", fastrand::u64(..)));
        drop(UnixListener::bind(&path).unwrap());
        let refused = |path: &Path| open(path, 0o600).unwrap_err().to_string();
        assert_eq!(refused(&path), "it is a socket, and a file is wanted");
        assert_eq!(refused(Path::new("/")), "Is a directory (os error 21)");
        assert!(refused(Path::new("/nowhere/log")).starts_with("No such file"));
        open(Path::new("/dev/null"), 0o600).unwrap();
        fs::remove_file(&path).unwrap();
    }
}
