//! Errors in words.

use std::error::Error;

/// An error and all its causes, in one line.
pub fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        next = cause.source();
    }
    text
}

/// Bytes of an error that fits on a line.
pub const BRIEF_BYTES_MAX: usize = 88;

/// Stands for what is not kept of a reason.
const CUT: &str = " … ";

/// Bytes of a word that is dropped rather than cut.
const WORD_MAX: usize = 12;

/// As much of a reason as fits on a line: it begins with what was tried and ends with the cause, so what is between can best be missed.
pub fn without_middle(reason: &str) -> String {
    if reason.len() <= BRIEF_BYTES_MAX {
        return reason.to_owned();
    }
    let half = (BRIEF_BYTES_MAX - CUT.len()) / 2;
    let (mut head, mut tail) = (half, reason.len() - half);
    while !reason.is_char_boundary(head) {
        head -= 1;
    }
    while !reason.is_char_boundary(tail) {
        tail += 1;
    }
    // Between words, where there are any nearby.
    head -= reason[..head]
        .bytes()
        .rev()
        .take(WORD_MAX)
        .position(|byte| byte == b' ')
        .map_or(0, |at| at + 1);
    tail +=
        reason[tail..].bytes().take(WORD_MAX).position(|byte| byte == b' ').map_or(0, |at| at + 1);
    [&reason[..head], CUT, &reason[tail..]].concat()
}
