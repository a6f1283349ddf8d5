//! KSUIDs: ids that begin with the time they were made, as protocol version 2 and tokens carry them.
//!
//! Twenty bytes, written as 27 digits of base 62: four bytes of seconds since May 2014, sixteen at random. As in segmentio/ksuid.

use std::fmt;

/// Length of the text, in characters.
pub const KSUID_LEN: usize = 27;

/// A KSUID as text.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Ksuid([u8; KSUID_LEN]);

impl Ksuid {
    /// The id made of `unix_time`, in seconds, and sixteen random bytes.
    ///
    /// The time must lie between May 2014 and June 2150: any other is taken for one within, as in Choria.
    pub fn new(unix_time: i64, random: [u8; 16]) -> Ksuid {
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "wraps, as said"
        )]
        let seconds = unix_time.wrapping_sub(EPOCH) as u32;
        let mut words = [seconds, 0, 0, 0, 0];
        for (word, bytes) in words[1..].iter_mut().zip(random.chunks_exact(4)) {
            *word = u32::from_be_bytes(bytes.try_into().expect("chunks of four bytes"));
        }
        let mut text = [0; KSUID_LEN];
        for digit in text.iter_mut().rev() {
            *digit = DIGITS[divide(&mut words)];
        }
        Ksuid(text)
    }

    /// Reads 27 digits of base 62 that stand for twenty bytes.
    pub fn parse(text: &str) -> Option<Ksuid> {
        let text: [u8; KSUID_LEN] = text.as_bytes().try_into().ok()?;
        words(&text).map(|_| Ksuid(text))
    }

    /// When it was made, as Unix time in seconds.
    pub fn unix_time(&self) -> i64 {
        let words = words(&self.0).expect("holds digits that were checked");
        EPOCH + i64::from(words[0])
    }

    /// The random bytes it was made of.
    #[cfg(test)]
    pub fn random(&self) -> [u8; 16] {
        let words = words(&self.0).expect("holds digits that were checked");
        std::array::from_fn(|at| words[1 + at / 4].to_be_bytes()[at % 4])
    }

    /// The text.
    pub fn as_str(&self) -> &str {
        std::str::from_utf8(&self.0).expect("holds ASCII digits only")
    }
}

/// Divides a number of five words, most significant first, by 62; returns the remainder.
fn divide(words: &mut [u32; 5]) -> usize {
    let mut remainder = 0;
    for word in words {
        let value = remainder << 32 | u64::from(*word);
        *word = u32::try_from(value / BASE).expect("the remainder is less than the divisor");
        remainder = value % BASE;
    }
    usize::try_from(remainder).expect("less than 62")
}

/// The number that `text` stands for, unless it has another character than our digits or takes more than twenty bytes.
fn words(text: &[u8; KSUID_LEN]) -> Option<[u32; 5]> {
    let mut words = [0_u32; 5];
    for character in text {
        let mut carry = match character {
            b'0'..=b'9' => u64::from(character - b'0'),
            b'A'..=b'Z' => u64::from(character - b'A') + 10,
            b'a'..=b'z' => u64::from(character - b'a') + 36,
            _ => return None,
        };
        for word in words.iter_mut().rev() {
            let value = u64::from(*word) * BASE + carry;
            *word = u32::try_from(value & u64::from(u32::MAX)).expect("cut to 32 bits");
            carry = value >> 32;
        }
        if carry != 0 {
            return None;
        }
    }
    Some(words)
}

/// Unix time of the first second a KSUID can name.
const EPOCH: i64 = 1_400_000_000;

const BASE: u64 = 62;

const DIGITS: &[u8; 62] = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";

impl fmt::Display for Ksuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl fmt::Debug for Ksuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writes_time_and_random_bytes_as_27_digits() {
        check(1_750_000_000, [0x11; 16], "2yY8AB06KFtlxl7ZvFjl4IXobqb");
        check(1_760_000_000, [0x22; 16], "33p35A32s2nvG7P1eyW3rzyAYfS");
        check(1_750_000_000, [0x33; 16], "2yY8AC2VfDX9ZgoLcbi2m15qhf9");
        check(1_760_000_000, [0x44; 16], "33p35B5SD0RIs35nMKULZiWCeU0");
        check(EPOCH, [0; 16], "000000000000000000000000000");
        check(EPOCH + i64::from(u32::MAX), [0xff; 16], "aWgEPTl1tmebfsQzFP4bxwgy80V");
    }

    #[track_caller]
    fn check(unix_time: i64, random: [u8; 16], expected: &str) {
        let ksuid = Ksuid::new(unix_time, random);
        assert_eq!(ksuid.as_str(), expected);
        assert_eq!((ksuid.unix_time(), ksuid.random()), (unix_time, random));
        assert_eq!(Ksuid::parse(expected), Some(ksuid));
    }

    #[test]
    fn takes_only_27_digits_that_fit_in_twenty_bytes() {
        assert!(Ksuid::parse("3MnolWk8M44MdBHvvLxHYtH5ka9").is_some());
        for text in [
            "",
            "3MnolWk8M44MdBHvvLxHYtH5ka",
            "3MnolWk8M44MdBHvvLxHYtH5ka90",
            "3MnolWk8M44MdBHvvLxHYtH5ka-",
            "3MnolWk8M44MdBHvvLxHYtH5ka ",
            "3MnolWk8M44MdBHvvLxHYtH5kä",
            // One more than the largest, and the largest text there is.
            "aWgEPTl1tmebfsQzFP4bxwgy80W",
            "zzzzzzzzzzzzzzzzzzzzzzzzzzz",
        ] {
            assert_eq!(Ksuid::parse(text), None, "{text}");
        }
    }

    #[test]
    fn sorts_by_time() {
        let mut random = fastrand::Rng::with_seed(11);
        for _ in 0..1_000 {
            let (earlier, later) = (random.i64(EPOCH..EPOCH * 2), random.i64(EPOCH * 2..EPOCH * 3));
            let ids =
                [earlier, later].map(|time| Ksuid::new(time, [0; 16].map(|_: u8| random.u8(..))));
            assert!(ids[0] < ids[1] && ids[0].as_str() < ids[1].as_str(), "{ids:?}");
        }
    }

    #[test]
    fn a_time_out_of_range_wraps() {
        assert_eq!(Ksuid::new(0, [0; 16]).unix_time(), 1 << 32);
        let _ = (Ksuid::new(i64::MIN, [0; 16]), Ksuid::new(i64::MAX, [0; 16]));
    }
}
