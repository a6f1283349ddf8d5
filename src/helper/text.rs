//! Text of foreign origin, made fit for one log line.

use std::borrow::Cow;

/// `bytes` as one line of at most `chars_max` characters: what is not printable is escaped, and a cut is marked.
pub(super) fn escape(bytes: &[u8], chars_max: usize) -> String {
    // Four bytes a character at most, so that a long text is not decoded in full.
    let within = &bytes[..bytes.len().min(chars_max.saturating_mul(4) + 4)];
    let text = String::from_utf8_lossy(within);
    let mut line = String::with_capacity(text.len().min(chars_max));
    let mut chars = text.chars();
    for c in chars.by_ref().take(chars_max) {
        match c {
            '"' | '\'' | '\\' => line.push(c),
            _ => line.extend(c.escape_debug()),
        }
    }
    if chars.next().is_some() {
        line.push_str(" ...");
    }
    line
}

/// What is wrong with JSON of the helper, as one line like [`escape`]'s. What it found in a place is named by its kind alone: it
/// may be a password that lacks its quotes, and what we say of a node is shown to everybody.
pub(super) fn fault(error: &serde_json::Error, chars_max: usize) -> String {
    escape(without_value(&error.to_string()).as_bytes(), chars_max)
}

/// Serde says `invalid type: string "x", expected a map`.
fn without_value(text: &str) -> Cow<'_, str> {
    let kinds = ["invalid type: ", "invalid value: "];
    let found = kinds.iter().filter_map(|kind| text.find(kind)).min();
    let (Some(start), Some(end)) = (found, text.rfind(", expected ")) else {
        return text.into();
    };
    match text.get(start..end).and_then(|found| found.find(['"', '`'])) {
        Some(quote) => format!("{}{}", text[..start + quote].trim_end(), &text[end..]).into(),
        None => text.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_quotes_no_value() {
        let check = |json: &str, expected: &str| {
            let read = serde_json::from_str::<std::collections::BTreeMap<String, String>>(json);
            assert_eq!(fault(&read.unwrap_err(), 100), expected, "{json}");
        };
        check(r#"{"a":12345}"#, "invalid type: integer, expected a string at line 1 column 10");
        check(r#"{"a":1.5}"#, "invalid type: floating point, expected a string at line 1 column 8");
        check(r#"{"a":[]}"#, "invalid type: sequence, expected a string at line 1 column 5");
        check(r#""x, expected `y`""#, "invalid type: string, expected a map at line 1 column 17");
        check("x", "expected value at line 1 column 1");
    }

    #[test]
    fn escapes_what_could_forge_or_hide_a_log_line() {
        check(b"plain \"text\" it's C:\\x", 100, "plain \"text\" it's C:\\x");
        check("é 😀".as_bytes(), 100, "é 😀");
        check(b"a\nb\r\t\x1b[31mred\0", 100, "a\\nb\\r\\t\\u{1b}[31mred\\0");
        check("a\u{202e}b\u{2028}".as_bytes(), 100, "a\\u{202e}b\\u{2028}");
        check(b"caf\xe9", 100, "caf\u{fffd}");
        check(b"abcdef", 6, "abcdef");
        check(b"abcdefg", 6, "abcdef ...");
        check("ééééééé".as_bytes(), 6, "éééééé ...");
        check("😀".repeat(1000).as_bytes(), 1, "😀 ...");
    }

    #[track_caller]
    fn check(bytes: &[u8], chars_max: usize, expected: &str) {
        assert_eq!(escape(bytes, chars_max), expected);
    }
}
