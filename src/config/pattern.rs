//! Regular expressions as Go has them, for the crate `regex`.
//!
//! Both are RE2's and agree about nearly everything. What they read without complaint but otherwise is rewritten here, since
//! an expression of the deny list that finds less than it did is a hole; what the crate does not know at all (`\Q`, octal
//! numbers, a brace alone) is left for it to refuse.
//!
//! Source: Go's `regexp/syntax`.

/// `pattern`, so that the crate finds with it what Go finds with the original.
///
/// In Go `\d`, `\w`, `\s` and `\b` know ASCII only, and `\<`, `\>` and, within brackets, `[`, `&&`, `~~` and `--` have no meaning of their own.
pub fn from_go(pattern: &str) -> String {
    let mut out = String::with_capacity(pattern.len());
    let mut chars = pattern.chars().peekable();
    let mut is_in_brackets = false;
    while let Some(c) = chars.next() {
        match c {
            '\\' => match chars.next() {
                Some('d') => out += "[0-9]",
                Some('D') => out += "[^0-9]",
                Some('w') => out += "[0-9A-Za-z_]",
                Some('W') => out += "[^0-9A-Za-z_]",
                Some('s') => out += r"[\t\n\f\r ]",
                Some('S') => out += r"[^\t\n\f\r ]",
                Some('b') if !is_in_brackets => out += r"(?-u:\b)",
                Some('B') if !is_in_brackets => out += r"(?-u:\B)",
                Some(mark @ ('<' | '>')) => out.push(mark),
                escaped => {
                    out.push('\\');
                    out.extend(escaped);
                }
            },
            '[' if !is_in_brackets => {
                is_in_brackets = true;
                out.push('[');
                out.extend(chars.next_if_eq(&'^'));
                // At the start these two are members.
                if let Some(member) = chars.next_if(|c| matches!(c, ']' | '-')) {
                    out.extend(['\\', member]);
                }
            }
            // A named class such as [:alpha:].
            '[' if chars.peek() == Some(&':') => {
                out.push('[');
                for c in chars.by_ref() {
                    out.push(c);
                    if c == ']' {
                        break;
                    }
                }
            }
            '[' | '&' | '~' if is_in_brackets => out.extend(['\\', c]),
            '-' if is_in_brackets => {
                out.push('-');
                if chars.next_if_eq(&'-').is_some() {
                    out += r"\-";
                }
            }
            ']' => {
                is_in_brackets = false;
                out.push(']');
            }
            _ => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use regex::Regex;

    #[test]
    fn finds_what_go_finds() {
        check(r"^[^\w.-]+$", "é", true);
        check(r"^[^\d]$", "\u{663}", true);
        check(r"^\W$", "é", true);
        check(r"^\w+$", "é", false);
        check(r"^\S$", "\u{a0}", true);
        check(r"\bx", "éx", true);
        check(r"\Bx", "éx", false);
        check("[a&&b]", "&", true);
        check("[a~~b]", "b", true);
        check("[+--]", ",", true);
        check("[--/]", ".", true);
        check("[[a]b]", "[b]", true);
        check("[]a]", "]", true);
        check("[^]a]", "]", false);
        check(r"[\]&]", "&", true);
        check("[[:alpha:]&]", "b", true);
        check(r"[\d-z]", "-", true);
        check(r"\<x", "<x", true);
        check(r"\\<x", "<x", false);
    }

    #[test]
    fn leaves_the_rest_alone() {
        for pattern in
            [r"\.privileged.mcollective$", r"(?i)^n\x2d[a-c]{2,3}(x|\pL)*?$", "\\", "é-&~"]
        {
            assert_eq!(from_go(pattern), pattern);
        }
    }

    #[track_caller]
    fn check(pattern: &str, name: &str, found: bool) {
        let ours = Regex::new(&from_go(pattern)).unwrap();
        assert_eq!(ours.is_match(name), found, "{pattern} as {ours}");
    }
}
