//! Versions, ordered as RPM orders them.
//!
//! Pure, and without allocation: nothing here copies the text. Whether a node needs another version is decided in
//! `node::upgrade`.
//!
//! A version is `[epoch:]version[-release]`. Each part is a row of segments, and what stands between them does not count:
//!
//! | Segment | Against another of its kind | Against other kinds |
//! | --- | --- | --- |
//! | `~` | equal | before everything, even the end |
//! | the end | equal | |
//! | `^` | equal | after the end, before any other segment |
//! | letters | as bytes | before digits |
//! | digits | as a number of any size | after everything |
//!
//! Sources: RPM's `rpmvercmp.c`, and `rpmver.c` for the split and the order of the parts. The original's
//! `host/version.go` knows no `^`, splits the release off at the first `-`, and reads the epoch as a machine integer.

use std::cmp::Ordering;
use std::fmt;

/// One version, borrowed from its text. Equal are versions that RPM takes for equal, such as `1.0` and `1_00`.
#[derive(Clone, Copy)]
pub struct Version<'a> {
    text: &'a [u8],
}

impl<'a> Version<'a> {
    /// Reads `text`. Every text is a version; without digits before a colon its epoch is 0.
    pub fn parse(text: &'a str) -> Version<'a> {
        Version::parse_bytes(text.as_bytes())
    }

    /// The same for bytes, which need not be UTF-8: RPM knows ASCII only and skips the rest.
    pub fn parse_bytes(text: &'a [u8]) -> Version<'a> {
        // It is taken apart when compared: mostly, two versions differ in their last part and need not be.
        Version { text }
    }

    fn parts(self) -> Parts<'a> {
        let digits = run(self.text, is_digit);
        let (epoch, rest) = match self.text.get(digits) {
            Some(b':') => (&self.text[..digits], &self.text[digits + 1..]),
            _ => (&self.text[..0], self.text),
        };
        match rest.iter().rposition(|&byte| byte == b'-') {
            Some(at) => Parts { epoch, version: &rest[..at], release: Some(&rest[at + 1..]) },
            None => Parts { epoch, version: rest, release: None },
        }
    }
}

impl Ord for Version<'_> {
    fn cmp(&self, other: &Self) -> Ordering {
        let (one, two) = (self.text, other.text);
        let common = common_length(one, two);
        if common == one.len() && common == two.len() {
            return Ordering::Equal;
        }
        // What is the same in both does not count, but what follows may decide to which part that belongs.
        if has_mark(&one[common..]) || has_mark(&two[common..]) {
            return self.parts().compare(&other.parts());
        }
        compare_after(one, two, common)
    }
}

impl PartialOrd for Version<'_> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Version<'_> {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Version<'_> {}

impl fmt::Debug for Version<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Version({:?})", String::from_utf8_lossy(self.text))
    }
}

/// A version taken apart.
struct Parts<'a> {
    /// Digits.
    epoch: &'a [u8],
    version: &'a [u8],
    release: Option<&'a [u8]>,
}

impl Parts<'_> {
    // Seldom needed, and not worth the registers it would take from the usual way.
    #[inline(never)]
    fn compare(&self, other: &Parts<'_>) -> Ordering {
        compare_numbers(self.epoch, other.epoch)
            .then_with(|| compare(self.version, other.version))
            .then_with(|| match (self.release, other.release) {
                (Some(one), Some(two)) => compare(one, two),
                // No release is before any, an empty one too.
                (one, two) => one.is_some().cmp(&two.is_some()),
            })
    }
}

/// Orders two versions, or two releases.
fn compare(one: &[u8], two: &[u8]) -> Ordering {
    compare_after(one, two, common_length(one, two))
}

/// The same for texts that begin with `common` equal bytes, and no more.
#[inline]
fn compare_after(one: &[u8], two: &[u8], common: usize) -> Ordering {
    match (one.get(common), two.get(common)) {
        (None, None) => Ordering::Equal,
        // The usual case: two numbers whose further digits settle it, since neither is led by zeros from here.
        (Some(first @ b'1'..=b'9'), Some(second @ b'1'..=b'9')) => {
            let one_digits = run(&one[common + 1..], is_digit);
            let two_digits = run(&two[common + 1..], is_digit);
            one_digits.cmp(&two_digits).then(first.cmp(second))
        }
        (first, second) => {
            // The segment in which they part may have begun earlier.
            let goes_on = first.is_some_and(is_alphanumeric) || second.is_some_and(is_alphanumeric);
            let mut begin = common;
            while goes_on && begin > 0 && is_alphanumeric(&one[begin - 1]) {
                begin -= 1;
            }
            compare_segments(&one[begin..], &two[begin..])
        }
    }
}

/// Orders by one segment after the other.
#[inline(never)] // As above.
fn compare_segments(mut one: &[u8], mut two: &[u8]) -> Ordering {
    loop {
        one = &one[run(one, is_separator)..];
        two = &two[run(two, is_separator)..];
        let order = match (one.first(), two.first()) {
            (None, None) => return Ordering::Equal,
            (Some(b'~'), Some(b'~')) | (Some(b'^'), Some(b'^')) => {
                one = &one[1..];
                two = &two[1..];
                continue;
            }
            (Some(b'~'), _) => Ordering::Less,
            (_, Some(b'~')) => Ordering::Greater,
            (None, Some(_)) => Ordering::Less,
            (Some(_), None) => Ordering::Greater,
            (Some(b'^'), _) => Ordering::Less,
            (_, Some(b'^')) => Ordering::Greater,
            (Some(&first), Some(&second)) => match (is_digit(first), is_digit(second)) {
                (true, true) => {
                    let (number, rest) = one.split_at(run(one, is_digit));
                    let (other, other_rest) = two.split_at(run(two, is_digit));
                    (one, two) = (rest, other_rest);
                    compare_numbers(number, other)
                }
                (false, false) => {
                    let (word, rest) = one.split_at(run(one, is_letter));
                    let (other, other_rest) = two.split_at(run(two, is_letter));
                    (one, two) = (rest, other_rest);
                    word.cmp(other)
                }
                (first_is_digit, second_is_digit) => first_is_digit.cmp(&second_is_digit),
            },
        };
        if order.is_ne() {
            return order;
        }
    }
}

/// Orders numbers by their digits: but for leading zeros, the longer one is greater.
fn compare_numbers(one: &[u8], two: &[u8]) -> Ordering {
    let one = &one[run(one, |byte| byte == b'0')..];
    let two = &two[run(two, |byte| byte == b'0')..];
    one.len().cmp(&two.len()).then_with(|| one.cmp(two))
}

// These two are loops because a chain of iterators takes twice the time for texts this short.

/// How many bytes both texts begin with in common.
#[inline]
fn common_length(one: &[u8], two: &[u8]) -> usize {
    let mut length = 0;
    while length < one.len() && length < two.len() && one[length] == two[length] {
        length += 1;
    }
    length
}

/// How many bytes at the start of `text` are `of_kind`.
#[inline]
fn run(text: &[u8], of_kind: impl Fn(u8) -> bool) -> usize {
    let mut length = 0;
    while length < text.len() && of_kind(text[length]) {
        length += 1;
    }
    length
}

/// Whether `text` holds a byte that may end an epoch or a version.
fn has_mark(text: &[u8]) -> bool {
    run(text, |byte| byte != b':' && byte != b'-') < text.len()
}

fn is_digit(byte: u8) -> bool {
    byte.is_ascii_digit()
}

fn is_letter(byte: u8) -> bool {
    byte.is_ascii_alphabetic()
}

fn is_alphanumeric(byte: &u8) -> bool {
    byte.is_ascii_alphanumeric()
}

fn is_separator(byte: u8) -> bool {
    !is_alphanumeric(&byte) && byte != b'~' && byte != b'^'
}

#[cfg(test)]
mod tests {
    use std::cmp::Ordering;

    use super::Version;

    #[test]
    fn orders_versions_as_rpm_does() {
        check("0.10.0", Ordering::Greater, "0.9.9"); // Numbers, not text.
        check("0.28.0a", Ordering::Greater, "0.28.0"); // The longer one is newer ...
        check("0.28.0~rc1", Ordering::Less, "0.28.0"); // ... unless a tilde starts the rest.
        check("0.28.0^1", Ordering::Greater, "0.28.0"); // A caret is a bit newer ...
        check("0.28.0^1", Ordering::Less, "0.28.0.1"); // ... than the end alone.
        check("1:0.1", Ordering::Greater, "0.99.0"); // The epoch goes first.
    }

    #[test]
    fn agrees_with_every_row_of_rpms_own_suite() {
        let rows = check_table(include_str!("../tests/vectors/rpmvercmp.tsv"));
        assert_eq!(rows, 103);
    }

    #[test]
    fn agrees_with_rpm_on_epochs_releases_and_odd_texts() {
        let rows = check_table(include_str!("../tests/vectors/rpmvercmp_evr_extra.tsv"));
        assert_eq!(rows, 26);
    }

    #[test]
    fn splits_epoch_and_release_as_rpm_does() {
        check("0:1.0", Ordering::Equal, "1.0");
        check(":1.0", Ordering::Equal, "1.0"); // An empty epoch is zero.
        check("007:1.0", Ordering::Equal, "7:1.0");
        check("10:1.0", Ordering::Greater, "9:1.0");
        check("1:2:3", Ordering::Less, "1:2.4"); // The second colon is a separator.
        check("18446744073709551617:1", Ordering::Greater, "18446744073709551616:1");
        check("1.0-", Ordering::Greater, "1.0");
        check("1.0-~", Ordering::Greater, "1.0"); // Any release is after none.
        check("1.0-~", Ordering::Less, "1.0-");
        check("1.0-1", Ordering::Less, "1.0.0"); // The release goes last.
        check("1.0-01", Ordering::Equal, "1_0-1");
        check("-", Ordering::Greater, "");
        check("12", Ordering::Greater, "3"); // Digits without a colon are no epoch.
    }

    #[test]
    fn compares_segments_that_begin_alike() {
        check("1.09", Ordering::Greater, "1.8");
        check("1.010", Ordering::Greater, "1.01");
        check("1.100", Ordering::Greater, "1.99");
        check("1.10a", Ordering::Less, "1.101");
        check("abc", Ordering::Greater, "ab");
        check("abc", Ordering::Greater, "ab1");
        check("ab~", Ordering::Less, "ab");
        check("0", Ordering::Equal, "000");
        check("0", Ordering::Greater, "");
        check("123456789012345678901234567890", Ordering::Greater, "99999999999999999999999999999");
    }

    #[test]
    fn takes_bytes_that_are_no_text() {
        let (left, right) =
            (Version::parse_bytes(b"1.\xff\0\xfe2"), Version::parse_bytes(b"1\x802"));
        assert_eq!(left, right);
    }

    // The rules of this module's documentation, said with types: slow, and a second opinion.

    #[derive(PartialEq, Eq, PartialOrd, Ord)]
    enum Segment {
        Tilde,
        End,
        Caret,
        Letters(String),
        Number { length: usize, digits: String },
    }

    fn segments(mut text: &str) -> Vec<Segment> {
        let mut segments = Vec::new();
        while let Some(first) = text.chars().next() {
            let is_alike = |c: char| match first {
                '0'..='9' => c.is_ascii_digit(),
                _ => first.is_ascii_alphabetic() && c.is_ascii_alphabetic(),
            };
            let end = text.find(|c| !is_alike(c)).unwrap_or(text.len()).max(first.len_utf8());
            let (segment, rest) = text.split_at(end);
            text = rest;
            segments.push(match first {
                '~' => Segment::Tilde,
                '^' => Segment::Caret,
                '0'..='9' => {
                    let digits = segment.trim_start_matches('0').to_owned();
                    Segment::Number { length: digits.len(), digits }
                }
                'a'..='z' | 'A'..='Z' => Segment::Letters(segment.to_owned()),
                _ => continue,
            });
        }
        segments.push(Segment::End);
        segments
    }

    fn plain(text: &str) -> (u32, Vec<Segment>, Option<Vec<Segment>>) {
        let (epoch, rest) = match text.split_once(':') {
            Some((epoch, rest)) if epoch.bytes().all(|byte| byte.is_ascii_digit()) => {
                (epoch.parse().unwrap_or(0), rest)
            }
            _ => (0, text),
        };
        match rest.rsplit_once('-') {
            Some((version, release)) => (epoch, segments(version), Some(segments(release))),
            None => (epoch, segments(rest), None),
        }
    }

    #[test]
    fn agrees_with_a_plain_reading_of_the_rules_on_random_texts() {
        let mut random = fastrand::Rng::with_seed(4);
        for _ in 0..200_000 {
            let (left, right) = (text(&mut random), text(&mut random));
            check(&left, plain(&left).cmp(&plain(&right)), &right);
        }
    }

    #[test]
    fn is_a_total_order() {
        let mut random = fastrand::Rng::with_seed(5);
        for _ in 0..100_000 {
            let texts: [String; 3] = std::array::from_fn(|_| text(&mut random));
            let [a, b, c] = texts.each_ref().map(|text| Version::parse(text));
            assert_eq!(a, a, "{texts:?}");
            assert_eq!(a.cmp(&b), b.cmp(&a).reverse(), "{texts:?}");
            if a.cmp(&b) == b.cmp(&c) {
                assert_eq!(a.cmp(&c), a.cmp(&b), "{texts:?}");
            }
            // Equal versions stand in the same place.
            if a == b {
                assert_eq!(a.cmp(&c), b.cmp(&c), "{texts:?}");
            }
        }
    }

    /// A text of few different pieces, so that many begin alike.
    fn text(random: &mut fastrand::Rng) -> String {
        const PIECES: [&str; 14] =
            ["0", "1", "2", "10", "a", "b", "Z", ".", "_", "~", "^", "+é", "-", ":"];
        (0..random.usize(..8)).map(|_| PIECES[random.usize(..PIECES.len())]).collect()
    }

    /// Checks the first three columns of each row: two versions, and how RPM orders them.
    fn check_table(table: &str) -> usize {
        let rows = table.lines().skip(1);
        rows.map(|row| {
            let mut columns = row.split('\t');
            let mut column = || columns.next().unwrap();
            let (left, right) = (column(), column());
            let expected = column().parse::<i32>().unwrap().cmp(&0);
            check(left, expected, right);
        })
        .count()
    }

    #[track_caller]
    fn check(left: &str, expected: Ordering, right: &str) {
        let (one, two) = (Version::parse(left), Version::parse(right));
        assert_eq!(one.cmp(&two), expected, "{left:?} against {right:?}");
        assert_eq!(two.cmp(&one), expected.reverse(), "{right:?} against {left:?}");
        assert_eq!(one == two, expected.is_eq(), "{left:?} equals {right:?}");
    }
}
