//! Words and numbers for people: on a page, on a terminal.
//!
//! Names and reasons come from nodes and helpers, so whatever could act instead of being read is written out: control
//! characters, which steer terminals, and those that turn the direction of writing, which let one name look like another.

use std::fmt::{self, Display, Write};
use std::time::Duration;

/// A text that only shows, on a terminal.
pub struct Plain<'a>(pub &'a str);

impl Display for Plain<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for c in self.0.chars() {
            match c {
                c if acts(c) => write!(f, "{}", c.escape_unicode())?,
                c => f.write_char(c)?,
            }
        }
        Ok(())
    }
}

/// A text that only shows, in HTML: between tags and in quoted attributes.
pub struct Html<'a>(pub &'a str);

impl Display for Html<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for c in self.0.chars() {
            match c {
                '&' => f.write_str("&amp;")?,
                '<' => f.write_str("&lt;")?,
                '>' => f.write_str("&gt;")?,
                '"' => f.write_str("&quot;")?,
                '\'' => f.write_str("&#39;")?,
                c if acts(c) => write!(f, "{}", c.escape_unicode())?,
                c => f.write_char(c)?,
            }
        }
        Ok(())
    }
}

/// Whether a character does something else than to show itself.
fn acts(c: char) -> bool {
    let turns =
        matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    c.is_control() || turns || matches!(c, '\u{2028}' | '\u{2029}' | '\u{feff}')
}

/// Seconds in the two largest units that say something: `0.3 s`, `42 s`, `3 min 20 s`, `4 h 10 min`, `3 d 4 h`.
pub struct Span(pub f64);

impl Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seconds = self.0.max(0.0);
        if seconds < 9.95 {
            // A page full of zeros after the point says nothing more.
            return if seconds < 0.05 { f.write_str("0 s") } else { write!(f, "{seconds:.1} s") };
        }
        let whole = seconds.round() as u64;
        let (large, small) = match whole {
            0..60 => return write!(f, "{whole} s"),
            60..3_600 => ((whole / 60, "min"), (whole % 60, "s")),
            3_600..86_400 => ((whole / 3_600, "h"), (whole % 3_600 / 60, "min")),
            _ => ((whole / 86_400, "d"), (whole % 86_400 / 3_600, "h")),
        };
        write!(f, "{} {}", large.0, large.1)?;
        if small.0 > 0 { write!(f, " {} {}", small.0, small.1) } else { Ok(()) }
    }
}

impl Span {
    /// How long that is.
    pub fn of(time: Duration) -> Span {
        Span(time.as_secs_f64())
    }
}

/// A number with its thousands apart: `12,345`.
pub struct Number(pub u64);

impl Display for Number {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let digits = self.0.to_string();
        for (place, digit) in digits.chars().enumerate() {
            if place > 0 && (digits.len() - place) % 3 == 0 {
                f.write_char(',')?;
            }
            f.write_char(digit)?;
        }
        Ok(())
    }
}

/// A number and what it counts, in the plural where it must be.
pub struct Count<'a>(pub u64, pub &'a str);

impl Display for Count<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Count(number, what) = self;
        write!(f, "{} {what}{}", Number(*number), if *number == 1 { "" } else { "s" })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_in_a_text_acts() {
        let nasty = "<script>alert('x')</script> & \"y\"\u{1b}[2J\u{202e}gnp.exe\r\n\u{0}ü";
        assert_eq!(
            Html(nasty).to_string(),
            "&lt;script&gt;alert(&#39;x&#39;)&lt;/script&gt; &amp; &quot;y&quot;\
             \\u{1b}[2J\\u{202e}gnp.exe\\u{d}\\u{a}\\u{0}ü"
        );
        assert_eq!(
            Plain(nasty).to_string(),
            "<script>alert('x')</script> & \"y\"\\u{1b}[2J\\u{202e}gnp.exe\\u{d}\\u{a}\\u{0}ü"
        );
    }

    #[test]
    fn spans_have_two_units_at_most() {
        for (seconds, expected) in [
            (-1.0, "0 s"),
            (0.0, "0 s"),
            (0.04, "0 s"),
            (0.25, "0.2 s"),
            (9.94, "9.9 s"),
            (9.96, "10 s"),
            (59.4, "59 s"),
            (59.6, "1 min"),
            (200.0, "3 min 20 s"),
            (3_600.0, "1 h"),
            (15_000.0, "4 h 10 min"),
            (86_400.0 * 3.0 + 3_600.0 * 4.0, "3 d 4 h"),
            (86_400.0 * 400.0, "400 d"),
        ] {
            assert_eq!(Span(seconds).to_string(), expected);
        }
    }

    #[test]
    fn one_is_no_plural() {
        let said = [0, 1, 2, 1_000].map(|number| Count(number, "error").to_string());
        assert_eq!(said, ["0 errors", "1 error", "2 errors", "1,000 errors"]);
    }

    #[test]
    fn thousands_stand_apart() {
        for (number, expected) in
            [(0, "0"), (999, "999"), (1_000, "1,000"), (12_345, "12,345"), (1_000_000, "1,000,000")]
        {
            assert_eq!(Number(number).to_string(), expected);
        }
    }
}
