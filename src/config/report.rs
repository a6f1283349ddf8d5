//! What is wrong with a configuration: collected, so that all of it can be shown at once.

use std::collections::BTreeSet;
use std::fmt;
use std::io;

/// One error or warning, with its place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// The file as the user named it.
    pub file: String,
    /// Line in that file, from 1; none when nothing is written there.
    pub line: Option<usize>,
    /// The key it is about first, if there is one.
    pub text: String,
    /// A warning that stands for an open door: the daemon starts, as the original does, and `check` does not let it pass.
    pub is_grave: bool,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.line {
            Some(line) => write!(f, "{}:{line}: {}", self.file, self.text),
            None => write!(f, "{}: {}", self.file, self.text),
        }
    }
}

/// All findings about one file, or about several after [`Report::append`].
#[derive(Debug, Default)]
pub struct Report {
    file: String,
    /// What keeps us from starting.
    pub errors: Vec<Finding>,
    /// What may not be meant as it is written.
    pub warnings: Vec<Finding>,
    /// Whether a file could not be read for want of permission.
    pub denied: bool,
}

impl Report {
    /// An empty report about `file`.
    pub fn new(file: impl Into<String>) -> Report {
        Report { file: file.into(), ..Report::default() }
    }

    /// Adds an error about `line`.
    pub fn error(&mut self, line: impl Into<Option<usize>>, text: impl Into<String>) {
        let finding = self.finding(line.into(), text.into());
        self.errors.push(finding);
    }

    /// Adds a warning about `line`.
    pub fn warn(&mut self, line: impl Into<Option<usize>>, text: impl Into<String>) {
        let finding = self.finding(line.into(), text.into());
        self.warnings.push(finding);
    }

    /// Adds a warning about `line` that stands for an open door.
    pub fn warn_gravely(&mut self, line: impl Into<Option<usize>>, text: impl Into<String>) {
        let finding = self.finding(line.into(), text.into());
        self.warnings.push(Finding { is_grave: true, ..finding });
    }

    /// Adds that the file itself can't be read.
    pub fn unreadable(&mut self, error: &io::Error) {
        self.denied |= error.kind() == io::ErrorKind::PermissionDenied;
        self.error(None, format!("cannot be read: {error}"));
    }

    /// Adds what `other` found.
    pub fn append(&mut self, other: Report) {
        self.errors.extend(other.errors);
        self.warnings.extend(other.warnings);
        self.denied |= other.denied;
    }

    /// Says of those findings that they are about another file.
    pub fn move_to(&mut self, file: &str, is_there: impl Fn(&Finding) -> bool) {
        let all = self.errors.iter_mut().chain(&mut self.warnings);
        for finding in all.filter(|finding| is_there(finding)) {
            file.clone_into(&mut finding.file);
        }
    }

    fn finding(&self, line: Option<usize>, text: String) -> Finding {
        Finding { file: self.file.clone(), line, text, is_grave: false }
    }
}

/// The member of `known` that `word` was probably meant to be.
pub fn nearest<'k>(word: &str, known: impl IntoIterator<Item = &'k str>) -> Option<&'k str> {
    let word = word.to_ascii_lowercase();
    let known: Vec<&str> = known.into_iter().collect();
    nearest_by_letters(&word, known.iter().copied()).or_else(|| nearest_by_words(&word, &known))
}

/// The only one that consists of the same words in another order, or of these and more.
fn nearest_by_words<'k>(word: &str, known: &[&'k str]) -> Option<&'k str> {
    let words = |text: &str| {
        let words: BTreeSet<String> = text.split(['_', '-']).map(str::to_owned).collect();
        words
    };
    let wanted = words(word);
    // One word says too little: `port`, `key`.
    if wanted.len() < 2 || word.len() > 100 {
        return None;
    }
    let mut found = known.iter().filter(|candidate| words(candidate).is_superset(&wanted));
    found.next().filter(|_| found.next().is_none()).copied()
}

fn nearest_by_letters<'k>(word: &str, known: impl IntoIterator<Item = &'k str>) -> Option<&'k str> {
    let length = word.chars().count();
    // One slip in a short word, more in a long one; beyond that it is another word.
    let slips_max = |candidate: &str| (candidate.len() / 4).clamp(1, 4);
    known
        .into_iter()
        // Each slip changes the length by one letter at most.
        .filter(|candidate| length.abs_diff(candidate.chars().count()) <= slips_max(candidate))
        .map(|candidate| (distance(word, candidate), candidate))
        .filter(|(slips, candidate)| *slips <= slips_max(candidate))
        .min_by_key(|(slips, _)| *slips)
        .map(|(_, candidate)| candidate)
}

/// Letters to insert, remove, replace or swap with their neighbour to get from one word to the other.
fn distance(left: &str, right: &str) -> usize {
    let (left, right): (Vec<char>, Vec<char>) = (left.chars().collect(), right.chars().collect());
    // A longer word is none of ours; the table below must stay small.
    if left.len() > 100 {
        return usize::MAX;
    }
    let mut rows: Vec<Vec<usize>> = vec![(0..=right.len()).collect()];
    for i in 1..=left.len() {
        let mut row = vec![i; right.len() + 1];
        for j in 1..=right.len() {
            let replaced = rows[i - 1][j - 1] + usize::from(left[i - 1] != right[j - 1]);
            row[j] = replaced.min(rows[i - 1][j] + 1).min(row[j - 1] + 1);
            if i > 1 && j > 1 && left[i - 1] == right[j - 2] && left[i - 2] == right[j - 1] {
                row[j] = row[j].min(rows[i - 2][j - 2] + 1);
            }
        }
        rows.push(row);
    }
    rows[left.len()][right.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    const KNOWN: &[&str] = &["workers", "interval", "token", "site", "monitor_port", "pki"];

    #[test]
    fn finds_the_word_that_was_meant() {
        assert_eq!(nearest("worker", KNOWN.iter().copied()), Some("workers"));
        assert_eq!(nearest("intervall", KNOWN.iter().copied()), Some("interval"));
        assert_eq!(nearest("tokne", KNOWN.iter().copied()), Some("token"));
        assert_eq!(nearest("monitor-port", KNOWN.iter().copied()), Some("monitor_port"));
        assert_eq!(nearest("PKi", KNOWN.iter().copied()), Some("pki"));
    }

    #[test]
    fn words_may_be_missing_or_stand_in_another_order() {
        let known = ["cert_deny_list", "retry_max", "jwt_signing_key", "jwt_signing_token"];
        let near = |word| nearest(word, known);
        assert_eq!(near("deny_list"), Some("cert_deny_list"));
        assert_eq!(near("max_retry"), Some("retry_max"));
        assert_eq!(near("Max-Retry"), Some("retry_max"));
        // Which of two, nobody knows; and one word says too little.
        assert_eq!(near("jwt_signing"), None);
        assert_eq!(near("deny"), None);
        assert_eq!(near("cert_list_x"), None);
    }

    #[test]
    fn suggests_nothing_for_another_word() {
        assert_eq!(nearest("defaults", KNOWN.iter().copied()), None);
        assert_eq!(nearest("", KNOWN.iter().copied()), None);
        assert_eq!(nearest(&"x".repeat(100_000), KNOWN.iter().copied()), None);
    }

    #[test]
    fn shows_file_and_line_as_compilers_do() {
        let mut report = Report::new("/etc/p.yaml");
        report.error(3, "workers: wrong");
        report.error(None, "helper: missing");
        assert_eq!(report.errors[0].to_string(), "/etc/p.yaml:3: workers: wrong");
        assert_eq!(report.errors[1].to_string(), "/etc/p.yaml: helper: missing");
    }
}
