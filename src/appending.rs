//! Files that we append to while we run. Any may be a pipe, which opens once somebody reads it.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileTypeExt as _, OpenOptionsExt as _};
use std::path::Path;

use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::Errno;

/// Opens the file at `path` to append to it; one that is not there is made, with `mode`. Waits for the reader of a pipe, as
/// only a start can.
///
/// # Errors
///
/// The system's.
pub fn open(path: &Path, mode: u32) -> io::Result<File> {
    options(mode).open(path)
}

/// The same for those who have other work: a pipe that nobody reads is an error.
///
/// # Errors
///
/// The system's.
pub fn open_at_once(path: &Path, mode: u32) -> io::Result<File> {
    let flags = OFlags::NONBLOCK.bits() as i32;
    let file = options(mode).custom_flags(flags).open(path).map_err(|error| {
        let is_fifo = || fs::metadata(path).is_ok_and(|known| known.file_type().is_fifo());
        match error.raw_os_error() {
            Some(code) if code == Errno::NXIO.raw_os_error() && is_fifo() => {
                io::Error::other("nobody reads this pipe")
            }
            _ => error,
        }
    })?;
    // What is written is waited for, as with any other file of ours.
    fcntl_setfl(&file, fcntl_getfl(&file)? - OFlags::NONBLOCK)?;
    Ok(file)
}

fn options(mode: u32) -> OpenOptions {
    let mut options = OpenOptions::new();
    options.append(true).create(true).mode(mode);
    options
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

    use super::testing::make_pipe;
    use super::*;

    #[test]
    fn a_pipe_that_nobody_reads_is_not_waited_for_and_one_that_is_read_is_written_to() {
        let path = env::temp_dir().join(format!("provisioner-pipe-{}", fastrand::u64(..)));
        make_pipe(&path);
        let error = open_at_once(&path, 0o600).unwrap_err();
        assert_eq!(error.to_string(), "nobody reads this pipe");
        let flags = OFlags::NONBLOCK.bits() as i32;
        let mut reader = File::options().read(true).custom_flags(flags).open(&path).unwrap();
        let mut file = open_at_once(&path, 0o600).unwrap();
        assert!(!fcntl_getfl(&file).unwrap().contains(OFlags::NONBLOCK));
        file.write_all(b"a line").unwrap();
        let mut read = [0; 6];
        reader.read_exact(&mut read).unwrap();
        assert_eq!(&read, b"a line");
        fs::remove_file(&path).unwrap();
    }
}
