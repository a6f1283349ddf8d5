//! What the helper answers, read as Go's `encoding/json` reads it for the original.
//!
//! Keys match whatever their case, unknown ones are ignored, `null` equals absent, and a wrong type anywhere makes the
//! whole answer undecodable. Go's quirks that a helper may rely on are kept: `null` within a table of texts is the empty
//! text, a table given twice is merged, and bytes that are no UTF-8 are replaced.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;

use serde::de::{Deserialize, Deserializer, Error as _, IgnoredAny, MapAccess, Visitor};
use serde_json::value::RawValue;

use super::text::{escape, fault};
use crate::secret::Secret;

/// What the helper wants done with a node. Texts that are absent are empty.
#[derive(Debug, Clone, Default)]
pub struct Answer {
    /// Leave the node alone until it is seen again.
    pub defer: bool,
    /// Shut the node down for good.
    pub shutdown: bool,
    /// Why, for the two above.
    pub msg: String,
    /// The node's settings.
    pub configuration: BTreeMap<String, String>,
    /// The node's certificate, as PEM.
    pub certificate: String,
    /// The CA's certificate, as PEM.
    pub ca: String,
    /// A private key made by the CA, as PEM.
    pub key: Option<Secret>,
    /// Where the node puts certificates and key.
    pub ssldir: String,
    /// File name → content.
    pub action_policies: BTreeMap<String, String>,
    /// File name → content.
    pub opa_policies: BTreeMap<String, String>,
    /// Wishes for the server JWT: the JSON object as written.
    pub server_claims: Option<Box<RawValue>>,
    /// The version of Choria Server the node shall run.
    pub upgrade: String,
}

impl Answer {
    /// Reads all that a helper wrote to stdout.
    ///
    /// # Errors
    ///
    /// [`Undecodable`] if it is not one JSON object, with the types we expect, followed by nothing but white space.
    pub fn read(output: &[u8]) -> Result<Answer, Undecodable> {
        let text = String::from_utf8_lossy(output);
        // Go takes a bare `null` for an object without keys.
        let answer: Option<Answer> = serde_json::from_str(&text).map_err(Undecodable::new)?;
        Ok(answer.unwrap_or_default())
    }
}

/// Whether reading on can't change what `output` means: it holds a whole value, or something no JSON value begins with.
pub(super) fn is_settled(output: &[u8]) -> bool {
    match serde_json::from_slice::<IgnoredAny>(output) {
        Ok(IgnoredAny) => true,
        Err(error) => !error.is_eof(),
    }
}

/// Whether `text` is an object with a key that has a meaning in an answer.
pub(super) fn names_a_key(text: &str) -> bool {
    match serde_json::from_str::<BTreeMap<Cow<'_, str>, IgnoredAny>>(text) {
        Ok(object) => object.keys().any(|key| KEYS.contains(&&*fold(key))),
        Err(_) => false,
    }
}

/// What is wrong with an answer, where, and at which key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Undecodable(String);

impl Undecodable {
    fn new(error: serde_json::Error) -> Undecodable {
        // The message may name a key of any length.
        Undecodable(fault(&error, MESSAGE_CHARS_MAX))
    }
}

impl fmt::Display for Undecodable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Undecodable {}

impl<'de> Deserialize<'de> for Answer {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Answer, D::Error> {
        deserializer.deserialize_map(AnswerVisitor)
    }
}

struct AnswerVisitor;

impl<'de> Visitor<'de> for AnswerVisitor {
    type Value = Answer;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Answer, A::Error> {
        let mut answer = Answer::default();
        while let Some(key) = map.next_key::<Cow<'de, str>>()? {
            read_value(&mut answer, &fold(&key), &mut map).map_err(|error| at(&key, &error))?;
        }
        Ok(answer)
    }
}

/// Reads the value of `key` into its place.
fn read_value<'de, A: MapAccess<'de>>(
    answer: &mut Answer,
    key: &str,
    map: &mut A,
) -> Result<(), A::Error> {
    match key {
        "defer" => flag(&mut answer.defer, map)?,
        "shutdown" => flag(&mut answer.shutdown, map)?,
        "msg" => text(&mut answer.msg, map)?,
        "configuration" => table(&mut answer.configuration, map)?,
        "certificate" => text(&mut answer.certificate, map)?,
        "ca" => text(&mut answer.ca, map)?,
        "key" => {
            if let Some(Text(key)) = map.next_value::<Option<Text>>()? {
                answer.key = (!key.is_empty()).then(|| Secret::new(key));
            }
        }
        "ssldir" => text(&mut answer.ssldir, map)?,
        "action_policies" => table(&mut answer.action_policies, map)?,
        "opa_policies" => table(&mut answer.opa_policies, map)?,
        "server_claims" => {
            let claims = map.next_value::<Option<Box<RawValue>>>()?;
            if claims.as_ref().is_some_and(|claims| !claims.get().starts_with('{')) {
                return Err(A::Error::custom("expected an object"));
            }
            answer.server_claims = claims;
        }
        "upgrade" => text(&mut answer.upgrade, map)?,
        _ => {
            map.next_value::<IgnoredAny>()?;
        }
    }
    Ok(())
}

fn flag<'de, A: MapAccess<'de>>(place: &mut bool, map: &mut A) -> Result<(), A::Error> {
    if let Some(value) = map.next_value::<Option<bool>>()? {
        *place = value;
    }
    Ok(())
}

fn text<'de, A: MapAccess<'de>>(place: &mut String, map: &mut A) -> Result<(), A::Error> {
    if let Some(Text(value)) = map.next_value::<Option<Text>>()? {
        *place = value;
    }
    Ok(())
}

fn table<'de, A: MapAccess<'de>>(
    place: &mut BTreeMap<String, String>,
    map: &mut A,
) -> Result<(), A::Error> {
    match map.next_value::<Option<Table>>()? {
        Some(Table(values)) => place.extend(values),
        None => place.clear(),
    }
    Ok(())
}

/// A string; anything else is told how to become one.
struct Text(String);

impl<'de> Deserialize<'de> for Text {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Text, D::Error> {
        struct TextVisitor;

        impl Visitor<'_> for TextVisitor {
            type Value = Text;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string in quotes")
            }

            fn visit_str<E>(self, text: &str) -> Result<Text, E> {
                Ok(Text(text.to_owned()))
            }

            fn visit_string<E>(self, text: String) -> Result<Text, E> {
                Ok(Text(text))
            }
        }

        deserializer.deserialize_string(TextVisitor)
    }
}

/// An object of strings.
struct Table(BTreeMap<String, String>);

impl<'de> Deserialize<'de> for Table {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Table, D::Error> {
        struct TableVisitor;

        impl<'de> Visitor<'de> for TableVisitor {
            type Value = Table;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of strings")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Table, A::Error> {
                let mut table = BTreeMap::new();
                while let Some(key) = map.next_key::<String>()? {
                    let value =
                        map.next_value::<Option<Text>>().map_err(|error| at(&key, &error))?;
                    table.insert(key, value.map(|Text(text)| text).unwrap_or_default());
                }
                Ok(Table(table))
            }
        }

        deserializer.deserialize_map(TableVisitor)
    }
}

/// `error` with the key it happened at; serde_json finds line and column again at the end of the text.
fn at<E: serde::de::Error>(key: &str, error: &E) -> E {
    E::custom(format_args!("{}: {error}", escape(key.as_bytes(), KEY_CHARS_MAX)))
}

/// `key` in the form in which Go compares keys.
pub(crate) fn fold(key: &str) -> Cow<'_, str> {
    if key.bytes().all(|b| b.is_ascii_lowercase() || b == b'_') {
        return Cow::Borrowed(key);
    }
    // Upper case first: `ſ` becomes `S`. Then lower: the Kelvin sign becomes `k`.
    Cow::Owned(key.chars().flat_map(char::to_uppercase).flat_map(char::to_lowercase).collect())
}

/// Every key of an answer.
const KEYS: [&str; 12] = [
    "defer",
    "shutdown",
    "msg",
    "configuration",
    "certificate",
    "ca",
    "key",
    "ssldir",
    "action_policies",
    "opa_policies",
    "server_claims",
    "upgrade",
];

/// Enough of an error for a log line, whatever value it quotes.
const MESSAGE_CHARS_MAX: usize = 300;

/// Enough of a key to find it again.
const KEY_CHARS_MAX: usize = 100;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::json::hostile;

    #[test]
    fn reads_an_answer_that_uses_every_key() {
        let answer = Answer::read(
            br#"{"defer":true,"shutdown":true,"msg":"m","certificate":"C","ca":"A","key":"K","ssldir":"/s",
                "configuration":{"identity":"n1","x":"1"},"action_policies":{"a.policy":"p"},
                "opa_policies":{"o.rego":"r"},"server_claims":{"exp":1, "permissions":{}},"upgrade":"0.30.0"}
            "#,
        )
        .unwrap();
        assert!(answer.defer && answer.shutdown);
        assert_eq!(answer.msg, "m");
        assert_eq!(answer.configuration["identity"], "n1");
        assert_eq!(answer.configuration["x"], "1");
        assert_eq!((answer.certificate.as_str(), answer.ca.as_str()), ("C", "A"));
        assert_eq!(answer.key.unwrap().expose(), "K");
        assert_eq!(answer.ssldir, "/s");
        assert_eq!(answer.action_policies["a.policy"], "p");
        assert_eq!(answer.opa_policies["o.rego"], "r");
        assert_eq!(answer.server_claims.unwrap().get(), r#"{"exp":1, "permissions":{}}"#);
        assert_eq!(answer.upgrade, "0.30.0");
    }

    #[test]
    fn reads_what_go_reads() {
        reads(r#"{}"#, "");
        reads(r#"null"#, "");
        reads(" \r\n\t{ } \n", "");
        // Any case, as Go folds it.
        reads(r#"{"DEFER":true,"Msg":"a"}"#, "defer msg=a");
        reads(r#"{"Configuration":{"A":"b"}}"#, "A=b");
        reads("{\"defer\":false,\"m\u{17f}g\":\"long s\"}", "msg=long s");
        reads("{\"\u{212a}ey\":\"kelvin\"}", "key=kelvin");
        // `null` equals absent.
        reads(
            r#"{"defer":null,"shutdown":null,"msg":null,"configuration":null,"certificate":null,"ca":null,"key":null,
                "ssldir":null,"action_policies":null,"opa_policies":null,"server_claims":null,"upgrade":null}"#,
            "",
        );
        reads(r#"{"configuration":{"a":null,"b":"c"}}"#, "a= b=c");
        // The last one wins, `null` leaves a text alone, tables are merged.
        reads(r#"{"msg":"a","MSG":"b"}"#, "msg=b");
        reads(r#"{"msg":"a","msg":null}"#, "msg=a");
        reads(r#"{"defer":true,"defer":false}"#, "");
        reads(r#"{"configuration":{"a":"1","a":"2"}}"#, "a=2");
        reads(r#"{"configuration":{"a":"1"},"configuration":{"b":"2"}}"#, "a=1 b=2");
        reads(r#"{"configuration":{"a":"1"},"configuration":null}"#, "");
        // Unknown keys, whatever they hold.
        reads(r#"{"deferred":true,"x":[1,{"y":1e999}],"configurations":1,"":{}}"#, "");
        reads("{\"msg\":\"\\u00e9\\ud83d\\ude00 \\/\"}", "msg=é😀 /");
    }

    #[track_caller]
    fn reads(output: &str, expected: &str) {
        let answer =
            Answer::read(output.as_bytes()).unwrap_or_else(|error| panic!("{output}: {error}"));
        let mut found = Vec::new();
        if answer.defer {
            found.push("defer".to_owned());
        }
        if answer.shutdown {
            found.push("shutdown".to_owned());
        }
        for (name, text) in [
            ("msg", answer.msg.as_str()),
            ("certificate", &answer.certificate),
            ("ca", &answer.ca),
            ("key", answer.key.as_ref().map_or("", Secret::expose)),
            ("ssldir", &answer.ssldir),
            ("upgrade", &answer.upgrade),
        ] {
            if !text.is_empty() {
                found.push(format!("{name}={text}"));
            }
        }
        for table in [&answer.configuration, &answer.action_policies, &answer.opa_policies] {
            found.extend(table.iter().map(|(key, value)| format!("{key}={value}")));
        }
        found.extend(answer.server_claims.map(|claims| claims.get().to_owned()));
        assert_eq!(found.join(" "), expected, "{output}");
    }

    #[test]
    fn replaces_bytes_that_are_no_utf8() {
        let answer = Answer::read(b"{\"msg\":\"caf\xe9\"}").unwrap();
        assert_eq!(answer.msg, "caf\u{fffd}");
    }

    #[test]
    fn refuses_wrong_types_and_names_the_key() {
        let not_text = "invalid type: integer, expected a string in quotes at line 1 column";
        refuses(r#"{"configuration":{"port":1}}"#, &format!("configuration: port: {not_text} 26"));
        refuses_with(
            r#"{"configuration":{"a":"b","tls":true}}"#,
            "configuration: tls: invalid type: boolean, expected a string in quotes",
        );
        refuses_with(
            r#"{"configuration":{"a":["b"]}}"#,
            "configuration: a: invalid type: sequence, expected a string in quotes",
        );
        refuses_with(
            r#"{"configuration":{"a":{}}}"#,
            "configuration: a: invalid type: map, expected a string in quotes",
        );
        refuses_with(
            r#"{"configuration":"a=b"}"#,
            "configuration: invalid type: string, expected an object of strings",
        );
        refuses_with(
            r#"{"configuration":[]}"#,
            "configuration: invalid type: sequence, expected an object of strings",
        );
        refuses_with(
            r#"{"configuration":1}"#,
            "configuration: invalid type: integer, expected an object of strings",
        );
        refuses_with(
            r#"{"action_policies":{"a":1}}"#,
            &format!("action_policies: a: {not_text} 25"),
        );
        refuses_with(r#"{"opa_policies":{"a":1}}"#, &format!("opa_policies: a: {not_text} 22"));
        for key in ["msg", "certificate", "ca", "key", "ssldir", "upgrade"] {
            for (wrong, kind) in
                [("1", "integer"), ("true", "boolean"), ("[]", "sequence"), ("{}", "map")]
            {
                let output = format!("{{\"{key}\":{wrong}}}");
                refuses_with(
                    &output,
                    &format!("{key}: invalid type: {kind}, expected a string in quotes"),
                );
            }
        }
        for key in ["defer", "shutdown"] {
            for (wrong, kind) in
                [("1", "integer"), ("\"true\"", "string"), ("[]", "sequence"), ("{}", "map")]
            {
                let output = format!("{{\"{key}\":{wrong}}}");
                refuses_with(&output, &format!("{key}: invalid type: {kind}, expected a boolean"));
            }
        }
        for wrong in ["1", "\"a\"", "[]", "true"] {
            let output = format!("{{\"server_claims\":{wrong}}}");
            refuses_with(&output, "server_claims: expected an object");
        }
        // A wrong type counts even when a later one is right.
        refuses_with(r#"{"defer":1,"defer":true}"#, "defer: invalid type");
    }

    #[test]
    fn refuses_what_is_no_single_object() {
        refuses("", "EOF while parsing a value at line 1 column 0");
        refuses("  \n", "EOF while parsing a value at line 2 column 0");
        refuses("[]", "invalid type: sequence, expected an object at line 1 column 0");
        refuses("\"a\"", "invalid type: string, expected an object at line 1 column 3");
        refuses("1", "invalid type: integer, expected an object at line 1 column 1");
        refuses("{\"defer\":true", "EOF while parsing an object at line 1 column 13");
        refuses("{\"msg\":\"a", "msg: EOF while parsing a string at line 1 column 9");
        refuses("{}x", "trailing characters at line 1 column 3");
        refuses("{}\n{}", "trailing characters at line 2 column 1");
        refuses("{}\0", "trailing characters at line 1 column 3");
        refuses("\u{feff}{}", "expected value at line 1 column 1");
        refuses("Traceback (most recent call last):", "expected value at line 1 column 1");
        refuses("{'a':1}", "key must be a string at line 1 column 2");
        refuses("{\"a\":1,}", "trailing comma at line 1 column 8");
        refuses(
            "{\"msg\":\"a\nb\"}",
            "msg: control character (\\u0000-\\u001F) found while parsing a string at line 2 column 0",
        );
    }

    #[track_caller]
    fn refuses(output: &str, expected: &str) {
        assert_eq!(Answer::read(output.as_bytes()).unwrap_err().to_string(), expected, "{output}");
    }

    #[track_caller]
    fn refuses_with(output: &str, expected: &str) {
        let error = Answer::read(output.as_bytes()).unwrap_err().to_string();
        assert!(error.starts_with(expected), "{output}: {error}");
    }

    #[test]
    fn deep_nesting_costs_no_stack() {
        for depth in [100, 10_000, 1_000_000] {
            let deep = "[".repeat(depth) + &"]".repeat(depth);
            reads(&format!("{{\"unknown\":{deep}}}"), "");
            refuses_with(
                &format!("{{\"server_claims\":{deep}}}"),
                "server_claims: expected an object",
            );
            refuses_with(&format!("{{\"msg\":{deep}}}"), "msg: invalid type: sequence");
            refuses_with(
                &format!("{{\"configuration\":{{\"a\":{deep}}}}}"),
                "configuration: a: invalid type",
            );
            refuses_with(&deep, "invalid type: sequence");
            refuses_with(&"{\"a\":".repeat(depth), "a: EOF while parsing a value");
        }
    }

    #[test]
    fn any_bytes_are_an_answer_or_an_error() {
        let good = br#"{"defer":true,"msg":"m\u00e9","configuration":{"identity":"n1","x":"1"},"server_claims":{"exp":1e3},"x":[null,-1.5]}"#;
        let mut random = fastrand::Rng::with_seed(7);
        let mut refused = 0;
        for _ in 0..20_000 {
            let mut bytes = good.to_vec();
            for _ in 0..random.usize(1..4) {
                let at = random.usize(..bytes.len());
                match random.u8(..3) {
                    0 => bytes[at] = random.u8(..),
                    1 => bytes.truncate(at),
                    _ => bytes.insert(at, b"{}[]\",:\\0"[random.usize(..9)]),
                }
                if bytes.is_empty() {
                    break;
                }
            }
            is_settled(&bytes);
            refused += usize::from(Answer::read(&bytes).is_err());
        }
        assert!((1000..20_000).contains(&refused), "{refused} refused");
    }

    #[test]
    fn an_error_quotes_little_of_a_long_value() {
        let output = format!("{{\"defer\":\"{}\"}}", "x".repeat(1_000_000));
        let error = Answer::read(output.as_bytes()).unwrap_err().to_string();
        assert!(error.len() < 400, "{} bytes", error.len());
    }

    #[test]
    fn knows_when_more_output_could_change_the_answer() {
        for (output, settled) in [
            ("", false),
            (" \n", false),
            ("{", false),
            ("{\"a\":[1,", false),
            ("{\"a\":\"x", false),
            ("{}", true),
            ("{}\n", true),
            ("{\"a\":1} x", true),
            ("Traceback", true),
        ] {
            assert_eq!(is_settled(output.as_bytes()), settled, "{output}");
        }
    }

    #[test]
    fn survives_any_nesting() {
        hostile::on_a_small_stack(|| {
            for value in hostile::values(40_000) {
                let _ = (Answer::read(value.as_bytes()), is_settled(value.as_bytes()));
                for key in KEYS.into_iter().chain(["other"]) {
                    let answer = format!(r#"{{"{key}":{value}}}"#);
                    let _ = (Answer::read(answer.as_bytes()), names_a_key(&answer));
                }
            }
        });
    }
}
