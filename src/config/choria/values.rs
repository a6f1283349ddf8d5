//! How Choria writes its client file: lines, and the values on them.
//!
//! Source: go-choria's `config/config.go` and `confkey/confkey.go`.

use std::path::PathBuf;

use crate::config::surroundings::Surroundings;

/// The lines of a file that are neither empty nor comments, each with its number.
pub fn lines(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let numbered = text.split('\n').enumerate().map(|(at, line)| (at + 1, line));
    numbered.filter(|(_, line)| !matches!(line.trim_start().chars().next(), None | Some('#')))
}

/// One line of the file.
///
/// The original searches it for the regular expression `(.+?)\s*=\s*(.+)`, so the key has at least one character,
/// whatever that is, and so has the value.
pub fn setting(line: &str) -> Option<(&str, &str)> {
    let line = line.trim();
    if line.starts_with('#') {
        return None;
    }
    let is_space = |c: char| matches!(c, ' ' | '\t' | '\x0c' | '\r');
    line.char_indices().skip(1).filter(|(_, c)| *c == '=').find_map(|(at, _)| {
        let value = line[at + 1..].trim_start_matches(is_space);
        (!value.is_empty()).then(|| (line[..at].trim_end_matches(is_space), value))
    })
}

/// A boolean, if it is one.
pub fn boolean(value: &str) -> Option<bool> {
    match value.trim().to_ascii_lowercase().as_str() {
        "1" | "yes" | "true" | "y" | "t" => Some(true),
        "0" | "no" | "false" | "n" | "f" => Some(false),
        _ => None,
    }
}

/// A path; `~` at its beginning is the home directory, whatever follows.
pub fn path(value: &str, surroundings: &Surroundings) -> PathBuf {
    let value = value.trim();
    match (value.strip_prefix('~'), surroundings.variable("HOME")) {
        (Some(rest), Some(home)) => PathBuf::from(format!("{home}{rest}")),
        _ => PathBuf::from(value),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_lines_as_choria_does() {
        check_line("a=b", Some(("a", "b")));
        check_line("a = b", Some(("a", "b")));
        check_line("a\t=\tb", Some(("a", "b")));
        check_line("a = b = c", Some(("a", "b = c")));
        check_line("a==b", Some(("a", "=b")));
        check_line("==b", Some(("=", "b")));
        check_line("a = \"q\"", Some(("a", "\"q\"")));
        check_line("a = b # c", Some(("a", "b # c")));
        check_line("; a=b", Some(("; a", "b")));
        check_line("  a=b  ", Some(("a", "b")));
        check_line("a=b\r", Some(("a", "b")));
        check_line("\u{feff}a = b", Some(("\u{feff}a", "b")));
        check_line("\u{b}a=b\u{85}", Some(("a", "b"))); // Trimmed by Unicode ...
        check_line("a\u{a0}=\u{a0}b", Some(("a\u{a0}", "\u{a0}b"))); // ... but not around the sign.
        check_line("é = b", Some(("é", "b")));
        check_line("= = b", Some(("=", "b")));
        check_line("a =", None);
        check_line("=b", None);
        check_line("==", None);
        check_line("=", None);
        check_line("[x]", None);
        check_line("# a=b", None);
        check_line("   # a=b", None);
        check_line("", None);
        check_line("a", None);
    }

    #[track_caller]
    fn check_line(line: &str, expected: Option<(&str, &str)>) {
        assert_eq!(setting(line), expected, "{line:?}");
    }
}
