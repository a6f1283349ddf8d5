//! Small tools for reading JSON that a stranger wrote.

use std::fmt;
use std::marker::PhantomData;

use serde::Deserialize;
use serde::de::value::MapAccessDeserializer;
use serde::de::{Deserializer, MapAccess, Visitor};

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

#[cfg(test)]
mod tests {
    use super::*;

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
