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

/// As much of a reason as fits on a line: without what was tried, if all else fits; or its beginning and its end, the cause.
pub fn without_middle(reason: &str) -> String {
    if reason.len() <= BRIEF_BYTES_MAX {
        return reason.to_owned();
    }
    if let Some((_, rest)) = reason.split_once(": ")
        && rest.len() + CUT.trim_start().len() <= BRIEF_BYTES_MAX
    {
        return [CUT.trim_start(), rest].concat();
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_tried_is_left_out_rather_than_the_cause() {
        let cause =
            "status 1 from the node that was asked for it: Incorrect provision token supplied";
        assert_eq!(
            without_middle(&format!("could not fetch and validate JWT: {cause}")),
            format!("… {cause}")
        );
        let long = format!("{cause}, {cause}");
        let brief = without_middle(&format!("could not fetch CSR: {long}"));
        assert!(brief.starts_with("could not fetch CSR: ") && brief.ends_with(" token supplied"));
        assert!(brief.len() <= BRIEF_BYTES_MAX);
    }
}
