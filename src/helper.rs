//! Runs the helper, the operator's own program that decides a node's configuration: JSON in, JSON out, bounded in time and size.
//!
//! Command, input, answer and errors are those of the Go provisioner's `host/helper.go`, so that every helper written
//! for it runs unchanged. What an answer means for the node is decided by `node`.

use std::fmt;
use std::path::{Path, PathBuf};

/// The setting `helper`, split and found.
#[derive(Clone, PartialEq, Eq)]
pub struct HelperCommand {
    text: String,
    program: PathBuf,
    arguments: Vec<String>,
}

impl HelperCommand {
    /// Splits `text` as a shell would, without expanding anything, and looks for the program: a name without a
    /// slash in `PATH`, anything else as a path.
    ///
    /// `#` starts no comment: the original's splitter knows none.
    ///
    /// # Errors
    ///
    /// [`CommandError`] if `text` can't be split or its first word is no program that we may execute.
    pub fn parse(text: &str) -> Result<HelperCommand, CommandError> {
        let mut words = split(text)?;
        if words.first().is_none_or(String::is_empty) {
            return Err(CommandError::Empty);
        }
        let name = words.remove(0);
        let program = find(&name)?;
        Ok(HelperCommand { text: text.trim().to_owned(), program, arguments: words })
    }

    /// The command as it was written, for messages.
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// The file that is executed.
    pub fn program(&self) -> &Path {
        &self.program
    }

    /// What the program is given after its name.
    pub fn arguments(&self) -> &[String] {
        &self.arguments
    }
}

impl fmt::Debug for HelperCommand {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HelperCommand({})", self.text)
    }
}

/// Why the setting `helper` can't be used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CommandError {
    /// There is no first word, or it is empty.
    Empty,
    /// A quote is opened and not closed.
    OpenQuote,
    /// The last character is a backslash with nothing to protect.
    OpenEscape,
    /// The program is neither where the path says nor in `PATH`.
    Missing {
        /// The first word of the command.
        program: String,
    },
    /// The program is there, but is no file that we may execute.
    NotExecutable {
        /// The file found.
        program: PathBuf,
    },
}

impl fmt::Display for CommandError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CommandError::Empty => f.write_str("cannot parse helper command: empty"),
            CommandError::OpenQuote => {
                f.write_str("cannot parse helper command: unterminated quote")
            }
            CommandError::OpenEscape => {
                f.write_str("cannot parse helper command: unterminated backslash")
            }
            CommandError::Missing { program } if program.contains('/') => {
                write!(f, "cannot find helper {program}")
            }
            CommandError::Missing { program } => write!(f, "cannot find helper {program} in PATH"),
            CommandError::NotExecutable { program } => {
                write!(f, "helper {} is not an executable file", program.display())
            }
        }
    }
}

impl std::error::Error for CommandError {}

/// Splits a command into words, honouring quotes and backslashes.
fn split(text: &str) -> Result<Vec<String>, CommandError> {
    // A text that ends in an odd number of backslashes is either within a quote or has a last one that protects nothing.
    let backslashes = text.len() - text.trim_end_matches('\\').len();
    // The crate takes a word that begins with `#` for a comment. No other character of its grammar is touched by the replacement.
    let stand_in = ('\u{e000}'..='\u{f8ff}').find(|&c| !text.contains(c)).unwrap_or('#');
    let hidden = text.replace('#', stand_in.encode_utf8(&mut [0; 4]));
    let words = shell_words::split(&hidden).map_err(|_| CommandError::OpenQuote)?;
    if backslashes % 2 == 1 {
        return Err(CommandError::OpenEscape);
    }
    Ok(words.into_iter().map(|word| word.replace(stand_in, "#")).collect())
}

/// The file that the first word of a command names.
fn find(name: &str) -> Result<PathBuf, CommandError> {
    let missing = || CommandError::Missing { program: name.to_owned() };
    if name.contains('/') {
        let path = PathBuf::from(name);
        return match std::fs::metadata(&path) {
            Err(_) => Err(missing()),
            Ok(_) if is_executable(&path) => Ok(path),
            Ok(_) => Err(CommandError::NotExecutable { program: path }),
        };
    }
    let directories = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&directories)
        // An empty part would mean the working directory, from which nothing is run by accident.
        .filter(|directory| directory.is_absolute())
        .map(|directory| directory.join(name))
        .find(|path| is_executable(path))
        .ok_or_else(missing)
}

fn is_executable(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|metadata| metadata.is_file())
        && rustix::fs::access(path, rustix::fs::Access::EXEC_OK).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn splits_as_a_shell_without_comments_and_expansion() {
        splits("h a b", &["h", "a", "b"]);
        splits("  h\ta\nb  ", &["h", "a", "b"]);
        splits("h a #b c", &["h", "a", "#b", "c"]);
        splits("h '#a b' \"c # d\" e#f \\#g", &["h", "#a b", "c # d", "e#f", "#g"]);
        splits(r#"h 'a "b"' "c 'd'" "#, &["h", "a \"b\"", "c 'd'"]);
        splits(r#"h a\ b "c\"d\$e\f" '\'"#, &["h", "a b", "c\"d$e\\f", "\\"]);
        splits(
            "h $HOME ~ * `id` $(id) | > x ; &",
            &["h", "$HOME", "~", "*", "`id`", "$(id)", "|", ">", "x", ";", "&"],
        );
        splits("h '' \"\"", &["h", "", ""]);
        splits("h a\\\\", &["h", "a\\"]);
        splits("h \u{e000}#", &["h", "\u{e000}#"]);
    }

    #[track_caller]
    fn splits(text: &str, words: &[&str]) {
        assert_eq!(split(text).unwrap(), words, "{text}");
    }

    #[test]
    fn refuses_commands_that_name_no_program() {
        refuses("", "cannot parse helper command: empty");
        refuses(" \t\n", "cannot parse helper command: empty");
        refuses("/bin/sh 'a", "cannot parse helper command: unterminated quote");
        refuses("/bin/sh \"a", "cannot parse helper command: unterminated quote");
        refuses("/bin/sh \"a\\", "cannot parse helper command: unterminated quote");
        refuses("/bin/sh a\\", "cannot parse helper command: unterminated backslash");
        refuses("/no/such/helper -v", "cannot find helper /no/such/helper");
        refuses("no-such-helper", "cannot find helper no-such-helper in PATH");
        refuses("'' a", "cannot parse helper command: empty");
        refuses("/etc/passwd", "helper /etc/passwd is not an executable file");
        refuses("/bin", "helper /bin is not an executable file");
    }

    #[track_caller]
    fn refuses(text: &str, error: &str) {
        assert_eq!(HelperCommand::parse(text).unwrap_err().to_string(), error, "{text}");
    }

    #[test]
    fn finds_a_name_without_a_slash_in_path() {
        let command = HelperCommand::parse("sh -c 'exit 0'").unwrap();
        assert!(command.program().is_absolute(), "{command:?}");
        assert_eq!(command.program().file_name().unwrap(), "sh");
        assert_eq!(command.arguments(), ["-c", "exit 0"]);
        assert_eq!(command.as_str(), "sh -c 'exit 0'");
    }
}
