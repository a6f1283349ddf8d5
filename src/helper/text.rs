//! Text of foreign origin, made fit for one log line.

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

#[cfg(test)]
mod tests {
    use super::*;

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
