//! Our process id in a file, for as long as we run.

use std::fmt;
use std::fs::{self, File, FileType, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{FileTypeExt as _, OpenOptionsExt as _};
use std::panic;
use std::path::{Path, PathBuf};
use std::process;

use rustix::fs::OFlags;

use crate::file_kind;

/// Longest text with a number that is read, in bytes.
const NUMBER_MAX: u64 = 64;

/// The file; removed when this is dropped, and when the process ends in a panic.
#[derive(Debug)]
pub struct PidFile(PathBuf);

/// Why the file could not be written.
#[derive(Debug)]
pub struct PidError {
    path: PathBuf,
    source: io::Error,
}

impl fmt::Display for PidError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "--pid: cannot write {}", self.path.display())
    }
}

impl std::error::Error for PidError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.source)
    }
}

impl PidFile {
    /// Writes the decimal number without a line break, as the original, over whatever an earlier process left behind.
    ///
    /// # Errors
    ///
    /// [`PidError`] if the file can't be written.
    pub fn write(path: &Path) -> Result<PidFile, PidError> {
        let faulty = |source| PidError { path: path.to_path_buf(), source };
        let mut file = open(path).map_err(faulty)?;
        fill(&mut file, path).map_err(faulty)?;
        Ok(PidFile(path.to_path_buf()))
    }

    /// Also removes the file when a panic ends the process: nothing is dropped then.
    pub fn remove_on_panic(&self) {
        let path = self.0.clone();
        let before = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            remove(&path);
            before(info);
        }));
    }
}

impl Drop for PidFile {
    fn drop(&mut self) {
        remove(&self.0);
    }
}

/// The number in the file at `path`.
pub fn read(path: &Path) -> Option<u32> {
    // To look is not enough: by now it may be something else.
    let file = File::options().read(true).custom_flags(OFlags::NONBLOCK.bits() as i32).open(path);
    let file = file.ok().filter(|file| file.metadata().is_ok_and(|there| there.is_file()))?;
    let mut text = String::new();
    file.take(NUMBER_MAX).read_to_string(&mut text).ok()?;
    text.trim().parse().ok()
}

/// Whether a number can be left in a file of this kind. Who reads a pipe would find it once, and whoever looks later nothing;
/// `/dev/null` is where numbers go that nobody wants.
///
/// # Errors
///
/// What it is instead.
pub fn fits(kind: FileType) -> io::Result<()> {
    match kind.is_file() || kind.is_char_device() {
        true => Ok(()),
        false => Err(file_kind::refused(kind, "a file")),
    }
}

/// Opens the file and empties it.
fn open(path: &Path) -> io::Result<File> {
    // Before it is opened, the system only says that a pipe is no such device.
    if let Ok(there) = fs::metadata(path) {
        fits(there.file_type())?;
    }
    let mut options = OpenOptions::new();
    options.write(true).create(true).mode(0o644).custom_flags(OFlags::NONBLOCK.bits() as i32);
    let file = options.open(path)?;
    let kind = file.metadata()?.file_type();
    fits(kind)?;
    if kind.is_file() {
        file.set_len(0)?;
    }
    Ok(file)
}

fn fill(file: &mut File, path: &Path) -> io::Result<()> {
    file.write_all(process::id().to_string().as_bytes()).inspect_err(|_| {
        // What is left of it names no process, or another one.
        if is_file(path) {
            let _ = fs::remove_file(path);
        }
    })
}

fn is_file(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|there| there.is_file())
}

/// Removes the file unless another process has taken it over.
fn remove(path: &Path) {
    if read(path) == Some(process::id()) {
        // There is nobody left to tell.
        let _ = fs::remove_file(path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::appending::testing::make_pipe;
    use crate::errors::chain;

    #[test]
    fn holds_our_number_for_as_long_as_we_run() {
        let path = std::env::temp_dir().join(format!("provisioner-pid-{}", process::id()));
        fs::write(&path, "4194304000").unwrap();
        let pid = PidFile::write(&path).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), process::id().to_string());
        drop(pid);
        assert!(!path.exists());
    }

    #[test]
    fn leaves_the_file_of_another_process_alone() {
        let path = std::env::temp_dir().join(format!("provisioner-pid2-{}", process::id()));
        let pid = PidFile::write(&path).unwrap();
        fs::write(&path, "1").unwrap();
        drop(pid);
        assert_eq!(fs::read_to_string(&path).unwrap(), "1");
        fs::remove_file(&path).unwrap();
    }

    #[test]
    fn a_full_disk_leaves_no_empty_file() {
        let path = std::env::temp_dir().join(format!("provisioner-pid3-{}", process::id()));
        fs::write(&path, "").unwrap();
        let mut full = OpenOptions::new().write(true).open("/dev/full").unwrap();
        let error = fill(&mut full, &path).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::StorageFull);
        assert!(fs::symlink_metadata(&path).is_err(), "it is still there");
    }

    #[test]
    fn what_is_no_file_is_refused_and_left_alone() {
        let path = std::env::temp_dir().join(format!("provisioner-pid4-{}", process::id()));
        make_pipe(&path);
        let said = |path: &Path| chain(&PidFile::write(path).unwrap_err());
        let shown = path.display();
        assert_eq!(
            said(&path),
            format!("--pid: cannot write {shown}: it is a pipe, and a file is wanted")
        );
        // Not even to see whether it is ours.
        remove(&path);
        assert!(path.exists());
        fs::remove_file(&path).unwrap();
        assert!(said(Path::new("/tmp")).ends_with("/tmp: it is a directory, and a file is wanted"));
        assert!(said(Path::new("/dev/full")).contains("No space left"), "it takes nothing");
        drop(PidFile::write(Path::new("/dev/null")).unwrap());
        assert!(Path::new("/dev/null").exists() && Path::new("/dev/full").exists());
    }

    #[test]
    fn reads_numbers_and_no_more_of_a_file_than_a_number_takes() {
        let path = std::env::temp_dir().join(format!("provisioner-pid5-{}", process::id()));
        let check = |text: &str, expected: Option<u32>| {
            fs::write(&path, text).unwrap();
            assert_eq!(read(&path), expected, "{text:?}");
        };
        check("42", Some(42));
        check(" 42\n", Some(42));
        check(&format!("42{}x", " ".repeat(1 << 20)), Some(42));
        for text in ["", "x", "-1", "4 2", "99999999999", &"9".repeat(1 << 20)] {
            check(text, None);
        }
        fs::remove_file(&path).unwrap();
        assert_eq!(read(&path), None);
        assert_eq!(read(Path::new("/tmp")), None);
    }

    #[test]
    fn names_a_file_that_cannot_be_written() {
        let error = PidFile::write(Path::new("/nowhere/pid")).unwrap_err();
        assert_eq!(error.to_string(), "--pid: cannot write /nowhere/pid");
    }
}
