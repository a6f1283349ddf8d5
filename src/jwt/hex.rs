//! Hexadecimal text, as tokens and Choria's files carry keys and signatures.

use std::fmt::Write as _;

/// Why a text does not stand for so many bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum HexError {
    /// The first character that is no hex digit.
    Digit(char),
    /// Too many or too few of them.
    Length,
}

/// `bytes` in lower case.
pub(crate) fn encode(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(2 * bytes.len());
    for byte in bytes {
        write!(text, "{byte:02x}").expect("a string takes all that is written");
    }
    text
}

/// The `N` bytes that `text` stands for, in either case.
pub(crate) fn decode<const N: usize>(text: &str) -> Result<[u8; N], HexError> {
    if let Some(wrong) = text.chars().find(|letter| !letter.is_ascii_hexdigit()) {
        return Err(HexError::Digit(wrong));
    }
    if text.len() != 2 * N {
        return Err(HexError::Length);
    }
    let mut bytes = [0; N];
    for (byte, pair) in bytes.iter_mut().zip(text.as_bytes().chunks_exact(2)) {
        *byte = value(pair[0]) << 4 | value(pair[1]);
    }
    Ok(bytes)
}

/// Whether `text` is hex with no capitals. Choria compares some texts that others sign, and writes them in lower case.
pub(crate) fn is_lower(text: &str) -> bool {
    text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

fn value(digit: u8) -> u8 {
    match digit {
        b'0'..=b'9' => digit - b'0',
        b'a'..=b'f' => digit - b'a' + 10,
        _ => digit - b'A' + 10,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_it_writes_in_either_case() {
        let bytes: [u8; 256] = std::array::from_fn(|at| at as u8);
        let text = encode(&bytes);
        assert!(text.starts_with("000102") && text.ends_with("fdfeff") && is_lower(&text));
        assert_eq!(decode(&text), Ok(bytes));
        assert_eq!(decode(&text.to_uppercase()), Ok(bytes));
        assert!(!is_lower(&text.to_uppercase()));
    }

    #[test]
    fn refuses_other_characters_and_lengths() {
        assert_eq!(decode::<1>("0g"), Err(HexError::Digit('g')));
        assert_eq!(decode::<2>("ab\u{e9}"), Err(HexError::Digit('\u{e9}')));
        assert_eq!(decode::<1>("+1"), Err(HexError::Digit('+')));
        for text in ["", "0", "000"] {
            assert_eq!(decode::<1>(text), Err(HexError::Length), "{text}");
        }
    }
}
