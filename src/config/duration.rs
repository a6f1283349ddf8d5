//! Durations as Choria writes them.

use std::fmt;
use std::time::Duration;

/// Why a text is no duration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DurationError {
    /// A word that is no unit; empty where there is none.
    Unit(String),
    /// What stands before the unit is no number.
    Number(String),
    /// Less than nothing.
    Negative,
    /// More than 292 years.
    TooLong,
}

impl fmt::Display for DurationError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DurationError::Unit(unit) if unit.is_empty() => {
                f.write_str("a duration needs a unit, such as 90s, 10m, 1h30m or 2d")
            }
            DurationError::Unit(unit) => {
                write!(f, "invalid time unit {unit:?}, known are ms, s, m, h, d, w, M and y")
            }
            DurationError::Number(text) if text.contains(char::is_whitespace) => {
                f.write_str("a duration holds no white space")
            }
            DurationError::Number(text) => write!(f, "invalid number {text:?} in a duration"),
            DurationError::Negative => f.write_str("a duration must not be negative"),
            DurationError::TooLong => f.write_str("a duration must be less than 292 years"),
        }
    }
}

impl std::error::Error for DurationError {}

/// Reads a duration as Choria writes it: `90s`, `1h30m`, `2d`, `1y`.
///
/// `d`, `w`, `M` and `y` are 24 hours, 7, 30 and 365 days, cut down to whole hours; they stand alone, after one number.
/// The smaller units combine as in Go. Empty text is zero.
///
/// # Errors
///
/// [`DurationError`] if the number is malformed, the unit unknown, or the duration negative or too long. The original
/// takes negative ones and lets long ones overflow; no setting has a use for either.
///
/// Source: `ParseDuration` in go-choria's `internal/util`.
pub fn duration(text: &str) -> Result<Duration, DurationError> {
    let text = text.trim();
    let Some(unit) = text.chars().next_back() else { return Ok(Duration::ZERO) };
    let number = &text[..text.len() - unit.len_utf8()];
    match unit {
        'd' | 'D' => whole_hours(number, 24),
        'w' | 'W' => whole_hours(number, 7 * 24),
        'M' => whole_hours(number, 30 * 24),
        'y' | 'Y' => whole_hours(number, 365 * 24),
        's' | 'm' | 'h' => go_duration(text),
        _ => Err(DurationError::Unit(last_word(text).to_owned())),
    }
}

/// What follows the last number, or nothing.
fn last_word(text: &str) -> &str {
    text.rsplit(|c: char| c.is_ascii_digit() || c == '.' || c.is_whitespace()).next().unwrap_or("")
}

/// A duration as we write it back: `1h30m`, `500ms`, `0s`; what is below a millisecond is left out.
pub fn words(duration: Duration) -> String {
    match duration {
        Duration::ZERO => return "0s".to_string(),
        duration if duration < Duration::from_millis(1) => return "less than 1ms".to_string(),
        _ => {}
    }
    let (secs, ms) = (duration.as_secs(), duration.subsec_millis());
    [(secs / 3600, "h"), (secs / 60 % 60, "m"), (secs % 60, "s"), (u64::from(ms), "ms")]
        .iter()
        .filter(|(count, _)| *count > 0)
        .map(|(count, unit)| format!("{count}{unit}"))
        .collect()
}

fn whole_hours(number: &str, hours_per_unit: u32) -> Result<Duration, DurationError> {
    let invalid = || DurationError::Number(number.to_string());
    // Single precision, as the original; Rust reads the same numbers, and names that make no duration.
    let count: f32 = number.parse().map_err(|_| invalid())?;
    if !count.is_finite() {
        return Err(invalid());
    }
    let hours = (f64::from(count) * f64::from(hours_per_unit)).trunc();
    if hours < 0.0 {
        return Err(DurationError::Negative);
    }
    if hours * 3600e9 >= NANOS_MAX as f64 {
        return Err(DurationError::TooLong);
    }
    Ok(Duration::from_secs(hours as u64 * 3600))
}

/// Go's `time.ParseDuration`: a sign, then one or more numbers with their units.
fn go_duration(text: &str) -> Result<Duration, DurationError> {
    let (negative, mut rest) = match text.strip_prefix('-') {
        Some(rest) => (true, rest),
        None => (false, text.strip_prefix('+').unwrap_or(text)),
    };
    let mut nanos: u128 = 0;
    while !rest.is_empty() {
        let number_len = rest.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(rest.len());
        let (number, after) = rest.split_at(number_len);
        let unit_len = after.find(|c: char| c.is_ascii_digit() || c == '.').unwrap_or(after.len());
        let (unit, after) = after.split_at(unit_len);
        let unit_nanos: u128 = match unit {
            "ns" => 1,
            "us" | "µs" | "μs" => 1_000,
            "ms" => 1_000_000,
            "s" => 1_000_000_000,
            "m" => 60_000_000_000,
            "h" => 3_600_000_000_000,
            "" | "d" | "w" | "M" | "y" => return Err(DurationError::Number(text.to_string())),
            word if number.is_empty() || word.contains(char::is_whitespace) => {
                return Err(DurationError::Number(text.to_string()));
            }
            word => return Err(DurationError::Unit(word.to_string())),
        };
        nanos += decimal(number, unit_nanos).ok_or(DurationError::Number(text.to_string()))?;
        if nanos > NANOS_MAX {
            return Err(DurationError::TooLong);
        }
        rest = after;
    }
    if negative && nanos > 0 {
        return Err(DurationError::Negative);
    }
    // Both parts fit: NANOS_MAX is less than what Duration holds.
    Ok(Duration::new((nanos / 1_000_000_000) as u64, (nanos % 1_000_000_000) as u32))
}

/// `number` times `unit`; what its fraction adds is found in double precision, as in Go: a third of an hour is 20 minutes.
fn decimal(number: &str, unit: u128) -> Option<u128> {
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if whole.is_empty() && fraction.is_empty() || fraction.contains('.') {
        return None;
    }
    // More digits than fit are a number too long for any duration; the caller's bound says so.
    let whole: u64 = if whole.is_empty() { 0 } else { whole.parse().unwrap_or(u64::MAX) };
    let (mut part, mut scale) = (0_u64, 1.0);
    for digit in fraction.bytes() {
        // Digits that don't fit are beyond any precision.
        if part > i64::MAX as u64 / 10 {
            break;
        }
        part = part * 10 + u64::from(digit - b'0');
        scale *= 10.0;
    }
    let part = part as f64 * (unit as f64 / scale);
    Some(u128::from(whole) * unit + part as u128)
}

/// Longest duration, in nanoseconds: what Go can hold.
const NANOS_MAX: u128 = i64::MAX as u128;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_durations_as_choria_does() {
        check("", Ok(0));
        check("1m", Ok(60_000));
        check("90s", Ok(90_000));
        check("1h30m", Ok(5_400_000));
        check("1.5h", Ok(5_400_000));
        check("0.3333333333333333333h", Ok(1_200_000));
        check("500ms", Ok(500));
        check("100ms", Ok(100));
        check("+5m", Ok(300_000));
        check(".5s", Ok(500));
        check("5.s", Ok(5_000));
        check("0s", Ok(0));
        check("-0s", Ok(0));
        check("1s1s", Ok(2_000));
        check("1000000us", Ok(1_000));
        check(" 5m ", Ok(300_000));
        check("1M", Ok(720 * HOUR));
        check("1y", Ok(8760 * HOUR));
        check("1Y", Ok(8760 * HOUR));
        check("2w", Ok(336 * HOUR));
        check("2W", Ok(336 * HOUR));
        check("1d", Ok(24 * HOUR));
        check("1D", Ok(24 * HOUR));
        check("1.5d", Ok(36 * HOUR));
        check("0.1d", Ok(2 * HOUR)); // 2.4 hours, cut to whole ones.
        check("0.01d", Ok(0));
        check("1e1d", Ok(240 * HOUR));
    }

    #[test]
    fn refuses_what_choria_refuses() {
        for text in ["90", "10", "0"] {
            check(text, Err(DurationError::Unit("".into())));
        }
        check("1H", Err(DurationError::Unit("H".into())));
        check("1S", Err(DurationError::Unit("S".into())));
        check("5 min", Err(DurationError::Unit("min".into())));
        check("5 sec", Err(DurationError::Unit("sec".into())));
        check("1year", Err(DurationError::Unit("year".into())));
        check("2days", Err(DurationError::Unit("days".into())));
        check("1:30", Err(DurationError::Unit("".into())));
        check("5µ", Err(DurationError::Unit("µ".into())));
        check("1d12h", Err(DurationError::Number("1d12h".into())));
        check("d", Err(DurationError::Number("".into())));
        check("1 d", Err(DurationError::Number("1 ".into())));
        check("m", Err(DurationError::Number("m".into())));
        check(".s", Err(DurationError::Number(".s".into())));
        check("1..5s", Err(DurationError::Number("1..5s".into())));
        check("1 h", Err(DurationError::Number("1 h".into())));
        check("--1s", Err(DurationError::Number("--1s".into())));
    }

    #[test]
    fn refuses_what_the_original_takes_by_accident() {
        check("-5m", Err(DurationError::Negative));
        check("-1d", Err(DurationError::Negative));
        check("300y", Err(DurationError::TooLong));
        check("99999999h", Err(DurationError::TooLong));
        check("99999999999999999999999999999999999999999h", Err(DurationError::TooLong));
        check("1e30d", Err(DurationError::TooLong));
        check("infd", Err(DurationError::Number("inf".into())));
        check("nand", Err(DurationError::Number("nan".into())));
        check("1e99d", Err(DurationError::Number("1e99".into())));
    }

    #[test]
    fn writes_durations_that_read_the_same() {
        for text in ["0s", "500ms", "1s", "1m", "2m30s", "1h", "26h3m"] {
            assert_eq!(words(duration(text).unwrap()), text);
        }
        assert_eq!(words(duration("999us").unwrap()), "less than 1ms");
        assert_eq!(words(duration("1500us").unwrap()), "1ms");
    }

    const HOUR: u64 = 3_600_000;

    #[track_caller]
    fn check(text: &str, expected: Result<u64, DurationError>) {
        assert_eq!(duration(text), expected.map(Duration::from_millis), "{text:?}");
    }
}
