//! Our process id in a file, for as long as we run.

use std::fmt;
use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::panic;
use std::path::{Path, PathBuf};
use std::process;

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
        write!(f, "cannot write pid file {}", self.path.display())
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
        let mut options = OpenOptions::new();
        options.write(true).create(true).truncate(true).mode(0o644);
        let mut file = options.open(path).map_err(faulty)?;
        file.write_all(process::id().to_string().as_bytes()).map_err(|source| {
            // What is left of it names no process, or another one.
            let _ = fs::remove_file(path);
            faulty(source)
        })?;
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

/// Removes the file unless another process has taken it over.
fn remove(path: &Path) {
    if fs::read_to_string(path).is_ok_and(|pid| pid == process::id().to_string()) {
        // There is nobody left to tell.
        let _ = fs::remove_file(path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
        std::os::unix::fs::symlink("/dev/full", &path).unwrap();
        let error = PidFile::write(&path).unwrap_err();
        assert_eq!(error.source.kind(), io::ErrorKind::StorageFull);
        assert!(fs::symlink_metadata(&path).is_err(), "it is still there");
    }

    #[test]
    fn names_a_file_that_cannot_be_written() {
        let error = PidFile::write(Path::new("/nowhere/pid")).unwrap_err();
        assert_eq!(error.to_string(), "cannot write pid file /nowhere/pid");
    }
}
