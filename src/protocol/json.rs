//! Small tools for reading JSON that a stranger wrote.
//!
//! A stranger's JSON is read into types that say what is expected, or stays a [`RawValue`] until it is. It is never read
//! into `serde_json::Value`: raw values make that take an object with a certain key for a text that holds JSON, which it
//! reads from nesting level zero again, so that a few kilobytes make a tree of any depth, and reading it ends the process.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;

use serde::de::value::MapAccessDeserializer;
use serde::de::{Deserializer, MapAccess, Visitor};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

/// A `T` written as a JSON object. Derived structs would take a list of their fields as well, which no sender means.
pub(crate) struct Object<T>(pub T);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Object<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ObjectVisitor<T>(PhantomData<T>);

        impl<'de, T: Deserialize<'de>> Visitor<'de> for ObjectVisitor<T> {
            type Value = Object<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Self::Value, A::Error> {
                T::deserialize(MapAccessDeserializer::new(map)).map(Object)
            }
        }

        deserializer.deserialize_map(ObjectVisitor(PhantomData))
    }
}

/// The fields of an object, sorted, their values unread. Of a field given twice the last one counts, as in Go.
pub(crate) type Fields<'a> = BTreeMap<String, &'a RawValue>;

/// Deepest nesting that [`sorted`] follows. Real facts have a handful of levels; a hostile node must not spend our stack.
const DEPTH_MAX: usize = 64;

/// Reads an object.
///
/// # Errors
///
/// serde's, if it is none.
#[inline(never)]
pub(crate) fn fields(value: &RawValue) -> serde_json::Result<Fields<'_>> {
    serde_json::from_str(value.get())
}

#[inline(never)]
fn list(value: &RawValue) -> serde_json::Result<Vec<&RawValue>> {
    serde_json::from_str(value.get())
}

/// Reads a string.
///
/// # Errors
///
/// serde's, if it is none.
#[inline(never)]
pub(crate) fn text(value: &RawValue) -> serde_json::Result<Cow<'_, str>> {
    // A raw value is well-formed, so most texts need no second parser, which would make room for them bit by bit.
    let quoted = value.get().strip_prefix('"').and_then(|text| text.strip_suffix('"'));
    let text = quoted.and_then(|text| match text.contains('\\') {
        false => Some(Cow::Borrowed(text)),
        true => unescaped(text).map(Cow::Owned),
    });
    text.map_or_else(|| serde_json::from_str(value.get()).map(Cow::Owned), Ok)
}

/// What a well-formed text with escapes says; nothing if it holds a half of a pair of surrogates.
fn unescaped(text: &str) -> Option<String> {
    let mut out = String::with_capacity(text.len());
    let mut done = 0;
    // The next one is a few bytes away: whatever is quick on a long search is slower here.
    while let Some(plain) = text.as_bytes()[done..].iter().position(|&byte| byte == b'\\') {
        let at = done + plain;
        out.push_str(&text[done..at]);
        let escape = text.as_bytes().get(at + 1)?;
        out.push(match escape {
            b'b' => '\u{8}',
            b'f' => '\u{c}',
            b'n' => '\n',
            b'r' => '\r',
            b't' => '\t',
            b'u' => char::from_u32(u32::from_str_radix(text.get(at + 2..at + 6)?, 16).ok()?)?,
            // A quote, or one of the two slashes.
            other => char::from(*other),
        });
        done = if *escape == b'u' { at + 6 } else { at + 2 };
    }
    out.push_str(&text[done..]);
    Some(out)
}

/// Writes `fields` as compact JSON with the keys of every object sorted. Numbers keep all their digits.
///
/// # Errors
///
/// [`SortError`].
pub(crate) fn sorted(fields: &Fields<'_>) -> Result<String, SortError> {
    let mut out = Vec::with_capacity(TEXT_ROOM);
    push_object(&mut out, fields, DEPTH_MAX)?;
    Ok(String::from_utf8(out).expect("made of JSON texts"))
}

fn push_object(out: &mut Vec<u8>, fields: &Fields<'_>, depth: usize) -> Result<(), SortError> {
    out.push(b'{');
    for (n, (key, value)) in fields.iter().enumerate() {
        if n > 0 {
            out.push(b',');
        }
        push_string(out, key);
        out.push(b':');
        push_value(out, value, depth)?;
    }
    out.push(b'}');
    Ok(())
}

fn push_value(out: &mut Vec<u8>, value: &RawValue, depth: usize) -> Result<(), SortError> {
    let depth = depth.checked_sub(1).ok_or(SortError::TooDeep)?;
    match value.get().as_bytes().first() {
        Some(b'{') => push_object(out, &fields(value)?, depth),
        Some(b'[') => {
            out.push(b'[');
            for (n, item) in list(value)?.into_iter().enumerate() {
                if n > 0 {
                    out.push(b',');
                }
                push_value(out, item, depth)?;
            }
            out.push(b']');
            Ok(())
        }
        // Read and written again: an unread string may hold half a surrogate pair, which helpers can't read.
        Some(b'"') => {
            push_string(out, &text(value)?);
            Ok(())
        }
        _ => {
            out.extend_from_slice(value.get().as_bytes());
            Ok(())
        }
    }
}

/// Why JSON can't be sorted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SortError {
    /// Some part of it is not what it seemed to be.
    Json(JsonError),
    /// It is nested too deeply.
    TooDeep,
}

impl From<serde_json::Error> for SortError {
    fn from(error: serde_json::Error) -> SortError {
        SortError::Json(error.into())
    }
}

impl fmt::Display for SortError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SortError::Json(error) => write!(f, "{error}"),
            SortError::TooDeep => f.write_str("nested too deeply"),
        }
    }
}

impl std::error::Error for SortError {}

/// `value` as JSON text, for which most of what we write fits into one piece of memory.
///
/// # Errors
///
/// serde's, if `value` can't be written as JSON.
pub(crate) fn compact(value: &impl Serialize) -> serde_json::Result<String> {
    let mut out = Vec::with_capacity(TEXT_ROOM);
    serde_json::to_writer(&mut out, value)?;
    Ok(String::from_utf8(out).expect("serde writes UTF-8"))
}

/// Bytes that most texts of ours fit into.
const TEXT_ROOM: usize = 1024;

/// Writes `text` as a JSON string, quotes included, to the end of `out`.
pub(crate) fn push_string(out: &mut Vec<u8>, text: &str) {
    serde_json::to_writer(out, text).expect("a string always serialises and a vector takes it");
}

/// What is wrong with a JSON document, short enough for a log line: serde quotes the text it found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JsonError(String);

impl From<serde_json::Error> for JsonError {
    fn from(error: serde_json::Error) -> JsonError {
        JsonError(excerpt(&error.to_string(), 200))
    }
}

impl fmt::Display for JsonError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for JsonError {}

/// At most `chars_max` characters of a stranger's `text`, its control characters escaped.
pub fn excerpt(text: &str, chars_max: usize) -> String {
    let mut out = String::new();
    for c in text.chars().take(chars_max) {
        if c.is_control() { out.extend(c.escape_default()) } else { out.push(c) }
    }
    if text.chars().nth(chars_max).is_some() {
        out.push('…');
    }
    out
}

/// JSON that is meant to use up the stack of whoever reads it.
#[cfg(test)]
pub(crate) mod hostile {
    use std::thread;

    /// Less than any thread of ours has.
    const STACK_BYTES: usize = 256 << 10;

    /// Runs `read` where deep nesting would end the process.
    pub(crate) fn on_a_small_stack(read: impl FnOnce() + Send + 'static) {
        let thread = thread::Builder::new().stack_size(STACK_BYTES).spawn(read).unwrap();
        thread.join().unwrap();
    }

    /// Values of at most `bytes_max` bytes, nested as deep as that allows.
    ///
    /// serde_json's own tree takes an object with one of its private keys for something else, and may read the text in it
    /// as JSON from nesting level zero again.
    pub(crate) fn values(bytes_max: usize) -> Vec<String> {
        let mut values = Vec::new();
        for (open, close) in [("[", "]"), (r#"{"a":"#, "}")] {
            for levels in [60, 120, 10_000] {
                let value = format!("{}1{}", open.repeat(levels), close.repeat(levels));
                values.extend((value.len() <= bytes_max).then_some(value));
            }
            values.push(open.repeat(bytes_max / open.len()));
            for key in ["RawValue", "Number"] {
                for levels in [0, 60, 120] {
                    values.push(text_in_text(key, open, close, levels, bytes_max));
                }
            }
        }
        values
    }

    fn text_in_text(key: &str, open: &str, close: &str, levels: usize, bytes_max: usize) -> String {
        let mut value = "1".to_owned();
        loop {
            let inner = format!("{}{value}{}", open.repeat(levels), close.repeat(levels));
            // Escaped in this way, the next level needs five more characters for each of these and not twice as many.
            let inner = inner.replace('\\', "\\u005c").replace('"', "\\u0022");
            let next = format!(r#"{{"$serde_json::private::{key}":"{inner}"}}"#);
            if next.len() > bytes_max {
                return value;
            }
            value = next;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_texts_as_serde_does() {
        let pieces = [
            "a",
            "ö",
            "\u{1f600}",
            r#"\""#,
            r"\\",
            r"\/",
            r"\b",
            r"\f",
            r"\n",
            r"\r",
            r"\t",
            r"\u0041",
            r"\u003C",
            r"\u00e9",
            r"\u0000",
            r"\ud83d\ude00",
            r"\ud83d",
            r"\ude00",
        ];
        let mut random = fastrand::Rng::with_seed(7);
        for _ in 0..10_000 {
            let parts = (0..random.usize(..6)).map(|_| pieces[random.usize(..pieces.len())]);
            let quoted = format!("\"{}\"", parts.collect::<String>());
            let raw: &RawValue = serde_json::from_str(&quoted).unwrap();
            let expected = serde_json::from_str::<String>(&quoted).ok();
            assert_eq!(text(raw).ok().map(Cow::into_owned), expected, "{quoted}");
        }
        for other in ["1", "null", "true", "[]", "{}"] {
            assert!(text(serde_json::from_str(other).unwrap()).is_err(), "{other}");
        }
    }

    #[test]
    fn shortens_what_strangers_write() {
        assert_eq!(excerpt("a\nb", 10), "a\\nb");
        assert_eq!(excerpt("äöü", 3), "äöü");
        assert_eq!(excerpt("äöüß", 3), "äöü…");
        let long = format!("\"{}\"", "x".repeat(1000));
        let error = JsonError::from(serde_json::from_str::<u8>(&long).unwrap_err());
        assert!(error.to_string().chars().count() <= 201, "{error}");
    }
}
