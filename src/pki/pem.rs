//! PEM text to bytes, strictly enough that two readers cannot see different things in one text.
//!
//! OpenSSL's own reader skips whatever it does not look for, so a text with several blocks means something else to each caller.

use std::fmt;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;

/// One block of a PEM text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Block<'a> {
    /// What stands between `-----BEGIN ` and `-----`.
    pub label: &'a str,
    /// The bytes inside.
    pub der: Vec<u8>,
    /// Text before the block.
    pub before: &'a str,
    /// Text after the block.
    pub after: &'a str,
}

/// Why a text holds no usable PEM block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Error {
    /// There is no `-----BEGIN` line.
    Missing,
    /// The first block has no end, or one of another kind.
    Unfinished,
    /// What is inside the first block is not base64.
    Base64,
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Error::Missing => "no PEM block found",
            Error::Unfinished => "the PEM block has no matching end",
            Error::Base64 => "the PEM block does not hold base64 alone",
        })
    }
}

impl std::error::Error for Error {}

/// Reads the first block of `text`; a block with headers, such as an encrypted key, is an error.
///
/// # Errors
///
/// [`Error`], also if only a later block would be readable.
pub fn first_block(text: &str) -> Result<Block<'_>, Error> {
    const BEGIN: &str = "-----BEGIN ";
    const DASHES: &str = "-----";

    let start = text.find(BEGIN).ok_or(Error::Missing)?;
    let (before, rest) = text.split_at(start);
    let rest = &rest[BEGIN.len()..];
    let (label, rest) = rest.split_once(DASHES).ok_or(Error::Unfinished)?;
    if label.contains(['\n', '\r']) {
        return Err(Error::Unfinished);
    }

    let (body, rest) = rest.split_once("-----END ").ok_or(Error::Unfinished)?;
    let after = rest
        .strip_prefix(label)
        .and_then(|rest| rest.strip_prefix(DASHES))
        .ok_or(Error::Unfinished)?;

    let base64: Vec<u8> = body.bytes().filter(|byte| !byte.is_ascii_whitespace()).collect();
    let der = STANDARD.decode(base64).map_err(|_| Error::Base64)?;
    Ok(Block { label, der, before, after })
}

#[cfg(test)]
mod tests {
    use super::{Error, first_block};

    #[test]
    fn reads_the_first_block_and_shows_what_stands_around_it() {
        let text =
            "hello\n-----BEGIN A B-----\r\nAAEC\r\nAw==\r\n-----END A B-----\nrest\n-----BEGIN";
        let block = first_block(text).unwrap();
        assert_eq!(block.label, "A B");
        assert_eq!(block.der, [0, 1, 2, 3]);
        assert_eq!(block.before, "hello\n");
        assert_eq!(block.after, "\nrest\n-----BEGIN");
    }

    #[test]
    fn refuses_what_is_not_one_whole_block() {
        check("", Error::Missing);
        check("-----BEGIN", Error::Missing);
        check("-----BEGIN A", Error::Unfinished);
        check("-----BEGIN A\nB-----\nAA==\n-----END A\nB-----", Error::Unfinished);
        check("-----BEGIN A-----\nAA==", Error::Unfinished);
        check("-----BEGIN A-----\nAA==\n-----END B-----", Error::Unfinished);
        check("-----BEGIN A-----\nAA==\n-----END A----", Error::Unfinished);
        check("-----BEGIN A-----\nA\n-----END A-----", Error::Base64);
        check("-----BEGIN A-----\nProc-Type: 4\n\nAA==\n-----END A-----", Error::Base64);
        // A block inside a block must not be found by skipping the outer one.
        check(
            "-----BEGIN A-----\n-----BEGIN B-----\nAA==\n-----END B-----\n-----END A-----",
            Error::Unfinished,
        );
    }

    #[track_caller]
    fn check(text: &str, expected: Error) {
        assert_eq!(first_block(text).unwrap_err(), expected, "{text:?}");
    }
}
