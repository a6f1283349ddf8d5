//! YAML text to a tree that remembers lines, and scalars as they are written.
//!
//! Scalars are told apart by the rules of YAML 1.1 as Go's `yaml.v2` has them, since existing files were written for it:
//! `yes` and `on` are booleans, `010` is eight. What a setting makes of a value is up to `config::file`.

use std::collections::HashMap;
use std::rc::Rc;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use saphyr_parser::{Event, Parser, ScalarStyle, Tag};

use crate::config::report::Report;

/// A value and the line it begins on, from 1.
#[derive(Debug)]
pub struct Node {
    /// Where it begins.
    pub line: usize,
    /// What it is.
    pub value: Value,
}

/// What YAML is made of.
#[derive(Debug)]
pub enum Value {
    /// A text, number, boolean or nothing.
    Scalar(Scalar),
    /// A list; aliased members are shared.
    List(Vec<Rc<Node>>),
    /// Keys and values in the order of the file, merge keys included.
    Map(Vec<(Rc<Node>, Rc<Node>)>),
}

/// A scalar as it is written, without quotes.
#[derive(Debug)]
pub struct Scalar {
    /// The characters.
    pub raw: String,
    /// Whether they stand without quotes.
    pub is_plain: bool,
    /// What they mean.
    pub kind: Kind,
}

/// What a scalar means under YAML 1.1.
#[derive(Debug, Clone, PartialEq)]
pub enum Kind {
    /// `null`, `~` or nothing at all.
    Null,
    /// `true`, `no`, `on` ...
    Bool(bool),
    /// `5`, `0x10`, `010`, `0b1`.
    Integer(i128),
    /// `4.0`, `1e2`, `.inf`.
    Float(f64),
    /// Anything else, and everything in quotes.
    Text,
}

/// One setting of a map.
#[derive(Debug)]
pub struct Entry {
    /// The key as written.
    pub key: String,
    /// The line of the key.
    pub line: usize,
    /// The value.
    pub value: Rc<Node>,
    merged: bool,
}

/// Reads the first document of `bytes`; `None` when it is empty or broken, which is then reported.
pub fn parse(bytes: &[u8], report: &mut Report) -> Option<Rc<Node>> {
    let text = match decode(bytes).and_then(without_control_characters) {
        Ok(text) => with_blanks_after_keys(text),
        Err((line, problem)) => {
            report.error(line, problem);
            return None;
        }
    };
    match Builder::default().build(&text, report) {
        Ok(root) => root,
        Err((line, problem)) => {
            report.error(line, problem);
            None
        }
    }
}

impl Node {
    /// What this is, for a message. Texts and numbers are shown unless they may be a `secret`.
    pub fn describe(&self, secret: bool) -> String {
        match &self.value {
            Value::List(_) => "a list".to_string(),
            Value::Map(_) => "a map".to_string(),
            Value::Scalar(scalar) => {
                let kind = match scalar.kind {
                    Kind::Null => return "nothing".to_string(),
                    Kind::Bool(_) => "the boolean",
                    Kind::Integer(_) | Kind::Float(_) => "the number",
                    Kind::Text => "the text",
                };
                let shown: String = scalar.raw.chars().take(SHOWN_CHARS_MAX).collect();
                match (secret, scalar.kind == Kind::Text) {
                    (true, _) => kind.replacen("the", "a", 1),
                    (false, true) => format!("{kind} {shown:?}"),
                    (false, false) => format!("{kind} {shown}"),
                }
            }
        }
    }

    /// The settings of a map, with merge keys (`<<`) resolved; `None` when this is no map.
    ///
    /// Keys that differ only in case are the same key. A merged value replaces one that was written before the merge key,
    /// as in the original's parser.
    pub fn entries(&self, report: &mut Report) -> Option<Vec<Entry>> {
        let Value::Map(pairs) = &self.value else { return None };
        let (mut entries, mut merges_left) = (Vec::new(), MERGES_MAX);
        collect(pairs, false, &mut merges_left, &mut entries, report);
        if merges_left == 0 {
            report.error(self.line, format!("<<: merges {MERGES_MAX} maps or more"));
        }
        Some(entries)
    }
}

fn collect(
    pairs: &[(Rc<Node>, Rc<Node>)],
    merged: bool,
    merges_left: &mut usize,
    entries: &mut Vec<Entry>,
    report: &mut Report,
) {
    for (key, value) in pairs {
        let line = key.line;
        let Value::Scalar(Scalar { raw, kind, is_plain }) = &key.value else {
            report.error(line, format!("a key must be a text, found {}", key.describe(false)));
            continue;
        };
        if *kind == Kind::Null {
            report.error(line, "a key is missing before the colon");
            continue;
        }
        if raw == MERGE_KEY && *is_plain {
            merge(line, value, merges_left, entries, report);
            continue;
        }
        let known = entries.iter_mut().find(|entry| entry.key.eq_ignore_ascii_case(raw));
        match known {
            Some(entry) if merged || entry.merged => {
                if merged && !entry.merged {
                    report.warn(
                        entry.line,
                        format!("{raw}: replaced by the value that a later << merges in"),
                    );
                }
                entry.value = value.clone();
                entry.line = line;
                entry.merged &= merged;
            }
            Some(entry) => {
                let also = if entry.key == *raw { "" } else { ", in other letters" };
                report
                    .error(line, format!("{raw}: given twice, first in line {}{also}", entry.line));
            }
            None => {
                entries.push(Entry { key: raw.clone(), line, value: value.clone(), merged });
            }
        }
    }
}

fn merge(
    line: usize,
    value: &Rc<Node>,
    merges_left: &mut usize,
    entries: &mut Vec<Entry>,
    report: &mut Report,
) {
    let sources = match &value.value {
        // The first of a list wins, so it comes last.
        Value::List(list) => list.iter().rev().collect(),
        _ => vec![value],
    };
    for source in sources {
        let Value::Map(pairs) = &source.value else {
            let found = source.describe(false);
            report.error(line, format!("<<: found {found}, wanted a map or a list of maps"));
            continue;
        };
        // Merges of merges of merges could take for ever.
        *merges_left = merges_left.saturating_sub(1);
        if *merges_left == 0 {
            return;
        }
        collect(pairs, true, merges_left, entries, report);
    }
}

/// UTF-8, or UTF-16 with a byte order mark, to text without one.
fn decode(bytes: &[u8]) -> Result<String, (Option<usize>, String)> {
    let utf16 = |unit: fn([u8; 2]) -> u16| {
        let (pairs, odd) = (bytes[2..].chunks_exact(2), bytes.len() % 2 == 1);
        let text: Result<String, _> =
            char::decode_utf16(pairs.map(|pair| unit([pair[0], pair[1]]))).collect();
        text.ok().filter(|_| !odd).ok_or((None, "is not valid UTF-16".to_string()))
    };
    match bytes {
        [0xff, 0xfe, ..] => utf16(u16::from_le_bytes),
        [0xfe, 0xff, ..] => utf16(u16::from_be_bytes),
        _ => {
            let bytes = bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(bytes);
            match std::str::from_utf8(bytes) {
                Ok(text) => Ok(text.to_string()),
                Err(error) => {
                    let line =
                        1 + bytes[..error.valid_up_to()].iter().filter(|b| **b == b'\n').count();
                    Err((Some(line), "is not valid UTF-8".to_string()))
                }
            }
        }
    }
}

/// The parser would take them, but no editor shows them.
fn without_control_characters(text: String) -> Result<String, (Option<usize>, String)> {
    let is_no_text = |c: char| match c {
        '\t' | '\n' | '\r' | '\u{85}' => false,
        c => c.is_control() || matches!(c, '\u{fffe}' | '\u{ffff}'),
    };
    match text.find(is_no_text) {
        None => Ok(text),
        Some(at) => {
            let line = 1 + text[..at].matches('\n').count();
            Err((Some(line), "holds a control character".to_string()))
        }
    }
}

/// Blanks in place of tabs between a key and its value, which the parser refuses and the original takes for white space.
///
/// Only where the parser complains is it certain that a tab is no part of a text.
fn with_blanks_after_keys(mut text: String) -> String {
    for _ in 0..TABS_MAX {
        if !text.contains(":\t") {
            break;
        }
        let error = Parser::new_from_str(&text).find_map(Result::err);
        let Some(error) = error.filter(|error| error.info() == TAB_ERROR) else { break };
        // It complains of what follows the tab.
        let before = error.marker().index().checked_sub(1);
        match before.and_then(|before| text.char_indices().nth(before)) {
            Some((at, '\t')) => text.replace_range(at..at + 1, " "),
            _ => break,
        }
    }
    text
}

/// Turns the parser's events into a tree. A stack instead of recursion: nesting comes from the file.
#[derive(Default)]
struct Builder {
    open: Vec<Open>,
    anchors: HashMap<usize, Rc<Node>>,
    root: Option<Rc<Node>>,
}

struct Open {
    line: usize,
    anchor: usize,
    is_map: bool,
    members: Vec<Rc<Node>>,
}

impl Builder {
    fn build(
        mut self,
        text: &str,
        report: &mut Report,
    ) -> Result<Option<Rc<Node>>, (Option<usize>, String)> {
        let mut documents = 0;
        for event in Parser::new_from_str(text) {
            let (event, span) = event.map_err(|error| {
                // It may be noticed where the file ends, below all that is written.
                let line = error.marker().line().min(1 + text.trim_end().matches('\n').count());
                let (info, remedy) = (error.info(), remedy(error.info()));
                (Some(line), format!("is not valid YAML: {info}{remedy}"))
            })?;
            let line = span.start.line();
            match event {
                Event::DocumentStart(_) => {
                    documents += 1;
                    if documents == 2 {
                        report.warn(line, "more documents follow; only the first is read");
                        return Ok(self.root);
                    }
                }
                Event::Alias(anchor) => {
                    let node = self.anchors.get(&anchor).cloned();
                    let node =
                        node.ok_or((Some(line), "an alias stands inside what it names".into()))?;
                    self.add(node);
                }
                Event::Scalar(raw, style, anchor, tag) => {
                    let scalar = scalar(raw.into_owned(), style, tag.as_deref())
                        .map_err(|problem| (Some(line), problem))?;
                    self.complete(anchor, Node { line, value: Value::Scalar(scalar) });
                }
                Event::SequenceStart(anchor, _) => self.open(line, anchor, false)?,
                Event::MappingStart(anchor, _) => self.open(line, anchor, true)?,
                Event::SequenceEnd | Event::MappingEnd => self.close(),
                Event::Nothing | Event::StreamStart | Event::StreamEnd | Event::DocumentEnd => {}
            }
        }
        Ok(self.root)
    }

    fn open(
        &mut self,
        line: usize,
        anchor: usize,
        is_map: bool,
    ) -> Result<(), (Option<usize>, String)> {
        if self.open.len() == NESTING_MAX {
            return Err((Some(line), format!("is nested more than {NESTING_MAX} levels deep")));
        }
        self.open.push(Open { line, anchor, is_map, members: Vec::new() });
        Ok(())
    }

    fn close(&mut self) {
        let Some(Open { line, anchor, is_map, members }) = self.open.pop() else { return };
        let value = if is_map {
            Value::Map(members.chunks_exact(2).map(|kv| (kv[0].clone(), kv[1].clone())).collect())
        } else {
            Value::List(members)
        };
        self.complete(anchor, Node { line, value });
    }

    fn complete(&mut self, anchor: usize, node: Node) {
        let node = Rc::new(node);
        // The parser's sign for "no anchor" is 0.
        if anchor != 0 {
            self.anchors.insert(anchor, node.clone());
        }
        self.add(node);
    }

    fn add(&mut self, node: Rc<Node>) {
        match self.open.last_mut() {
            Some(parent) => parent.members.push(node),
            None => self.root = Some(node),
        }
    }
}

/// What is probably to be done about an error of the parser, which says what it looked for and not what was meant.
fn remedy(info: &str) -> &'static str {
    let has = |part: &str| info.contains(part);
    if has("simple key expect") || has("expected key") {
        "; a setting is `key: value`, with a blank behind the colon, and this line or the one above is none"
    } else if has("mapping values are not allowed") {
        "; settings begin in one column, and a text with a colon and a blank in it wants quotes"
    } else if has("tab") {
        "; indent with blanks"
    } else if has("unknown escape character") {
        "; between single quotes a backslash stands for itself"
    } else if has("unknown anchor") || has("an anchor or alias") || has("unexpected character") {
        "; a text that begins with such a character wants quotes"
    } else if has("quoted scalar") {
        "; is a quote closed?"
    } else {
        ""
    }
}

fn scalar(raw: String, style: ScalarStyle, tag: Option<&Tag>) -> Result<Scalar, String> {
    let is_plain = style == ScalarStyle::Plain;
    let kind = match tag {
        None if is_plain => resolve(&raw),
        None => Kind::Text,
        Some(tag) if tag.is_yaml_core_schema() => match tag.suffix.as_str() {
            "null" | "bool" | "int" | "float" => {
                let kind = resolve(&raw);
                let fits = match (tag.suffix.as_str(), &kind) {
                    ("null", kind) => *kind == Kind::Null,
                    ("bool", kind) => matches!(kind, Kind::Bool(_)),
                    ("int", kind) => matches!(kind, Kind::Integer(_)),
                    (_, kind) => matches!(kind, Kind::Integer(_) | Kind::Float(_)),
                };
                if !fits {
                    return Err(format!("does not fit its tag !!{}", tag.suffix));
                }
                kind
            }
            "binary" => {
                let packed: String = raw.split_whitespace().collect();
                let bytes = STANDARD.decode(packed).map_err(|_| "!!binary is not valid base64")?;
                let raw = String::from_utf8(bytes).map_err(|_| "!!binary does not hold a text")?;
                return Ok(Scalar { raw, is_plain, kind: Kind::Text });
            }
            _ => Kind::Text,
        },
        // The sign "!" alone, and a site's own tags, make a text.
        Some(_) => Kind::Text,
    };
    Ok(Scalar { raw, is_plain, kind })
}

/// What a scalar without quotes means.
///
/// Source: `resolve` in `gopkg.in/yaml.v2`, which reads numbers with Go's `strconv.ParseInt(text, 0, 64)`.
fn resolve(raw: &str) -> Kind {
    match raw {
        "" | "~" | "null" | "Null" | "NULL" => return Kind::Null,
        "y" | "Y" | "yes" | "Yes" | "YES" | "true" | "True" | "TRUE" | "on" | "On" | "ON" => {
            return Kind::Bool(true);
        }
        "n" | "N" | "no" | "No" | "NO" | "false" | "False" | "FALSE" | "off" | "Off" | "OFF" => {
            return Kind::Bool(false);
        }
        ".inf" | ".Inf" | ".INF" | "+.inf" | "+.Inf" | "+.INF" => {
            return Kind::Float(f64::INFINITY);
        }
        "-.inf" | "-.Inf" | "-.INF" => return Kind::Float(f64::NEG_INFINITY),
        ".nan" | ".NaN" | ".NAN" => return Kind::Float(f64::NAN),
        _ => {}
    }
    if !raw.starts_with(|c: char| c.is_ascii_digit() || matches!(c, '+' | '-' | '.')) {
        return Kind::Text;
    }
    let digits = raw.replace('_', "");
    if let Some(number) = integer(&digits) {
        return Kind::Integer(number);
    }
    match digits.parse::<f64>() {
        // Rust also reads names such as "inf", which mean nothing in YAML; what overflows is a text.
        Ok(number)
            if number.is_finite()
                && !digits
                    .contains(|c: char| c.is_ascii_alphabetic() && !matches!(c, 'e' | 'E')) =>
        {
            Kind::Float(number)
        }
        _ => Kind::Text,
    }
}

fn integer(text: &str) -> Option<i128> {
    let (sign, digits) = match text.strip_prefix('-') {
        Some(digits) => (-1, digits),
        None => (1, text.strip_prefix('+').unwrap_or(text)),
    };
    let (radix, digits) = match digits.as_bytes() {
        [b'0', b'x' | b'X', ..] => (16, &digits[2..]),
        [b'0', b'o' | b'O', ..] => (8, &digits[2..]),
        [b'0', b'b' | b'B', ..] => (2, &digits[2..]),
        [b'0', _, ..] => (8, &digits[1..]),
        _ => (10, digits),
    };
    // from_str_radix would take a second sign.
    if !digits.starts_with(|c: char| c.is_digit(radix)) {
        return None;
    }
    let number = u64::from_str_radix(digits, radix).ok()?;
    Some(sign * i128::from(number))
}

/// Key of a map that takes over another map's settings.
const MERGE_KEY: &str = "<<";

/// Maps merged into one; more come only from a file that means harm.
const MERGES_MAX: usize = 1_000;

/// What the parser says to a tab between a key and its value.
const TAB_ERROR: &str = "':' must be followed by a valid YAML whitespace";

/// Keys with a tab behind them. Each costs one more reading of the file.
const TABS_MAX: usize = 200;

/// Levels of lists and maps; settings need three.
const NESTING_MAX: usize = 32;

/// Characters of a wrong value that a message shows.
const SHOWN_CHARS_MAX: usize = 60;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tells_scalars_apart_by_yaml_1_1() {
        for raw in ["y", "Y", "yes", "Yes", "YES", "true", "True", "TRUE", "on", "On", "ON"] {
            check(raw, Kind::Bool(true));
        }
        for raw in ["n", "N", "no", "No", "NO", "false", "False", "FALSE", "off", "Off", "OFF"] {
            check(raw, Kind::Bool(false));
        }
        for raw in ["", "~", "null", "Null", "NULL", "!!null ~"] {
            check(raw, Kind::Null);
        }
        check("4", Kind::Integer(4));
        check("+4", Kind::Integer(4));
        check("-4", Kind::Integer(-4));
        check("0", Kind::Integer(0));
        check("0x10", Kind::Integer(16));
        check("-0x10", Kind::Integer(-16));
        check("010", Kind::Integer(8));
        check("0o23254", Kind::Integer(9900));
        check("0b1010", Kind::Integer(10));
        check("9_900", Kind::Integer(9900));
        check("18446744073709551615", Kind::Integer(i128::from(u64::MAX)));
        check("09900", Kind::Float(9900.0)); // No octal number, so a decimal one.
        check("9900.", Kind::Float(9900.0));
        check("4.0", Kind::Float(4.0));
        check("4.5", Kind::Float(4.5));
        check("1e2", Kind::Float(100.0));
        check(".5", Kind::Float(0.5));
        check(".inf", Kind::Float(f64::INFINITY));
        check("-.Inf", Kind::Float(f64::NEG_INFINITY));
        check("!!int '5'", Kind::Integer(5));
        check("!!float 5", Kind::Integer(5));
        check("!!bool 'on'", Kind::Bool(true));
    }

    #[test]
    fn takes_the_rest_for_text() {
        for raw in ["yEs", "oN", "tRUE", "nULL", "1e400", "1:30", "1.2.3", "0x", "0xg", "+", "--1"]
        {
            check(raw, Kind::Text);
        }
        for raw in [
            "2001-01-01",
            "'4'",
            "\"yes\"",
            "'~'",
            "!!str 5",
            "! 5",
            "!site 5",
            "inf",
            "+nan",
            "1_0x",
        ] {
            check(raw, Kind::Text);
        }
        check_raw("!", "", Kind::Text);
        check_raw("!!binary aGVs bG8=", "hello", Kind::Text);
        check_raw("'it''s'", "it's", Kind::Text);
        check_raw(r#""a\tbA""#, "a\tbA", Kind::Text);
        check_raw("|\n  two\n  lines\n", "two\nlines\n", Kind::Text);
        check_raw(">-\n  two\n  lines\n", "two lines", Kind::Text);
    }

    #[test]
    fn keeps_numbers_as_written() {
        check_raw("010", "010", Kind::Integer(8));
        check_raw("9_900", "9_900", Kind::Integer(9900));
        check_raw("4.50", "4.50", Kind::Float(4.5));
        check_raw("Yes", "Yes", Kind::Bool(true));
    }

    #[test]
    fn knows_the_line_of_each_key() {
        let (entries, _) = entries(b"# one\n\na: 1\nb:\n  - x\n\nc: 'two\n  lines'\nd: 4\n");
        let lines: Vec<_> = entries.iter().map(|entry| (entry.key.as_str(), entry.line)).collect();
        assert_eq!(lines, [("a", 3), ("b", 4), ("c", 7), ("d", 9)]);
    }

    #[test]
    fn reads_what_windows_editors_write() {
        let utf16le: Vec<u8> =
            [0xfeff].into_iter().chain("a: é".encode_utf16()).flat_map(u16::to_le_bytes).collect();
        let utf16be: Vec<u8> =
            [0xfeff].into_iter().chain("a: é".encode_utf16()).flat_map(u16::to_be_bytes).collect();
        for bytes in
            [utf16le.as_slice(), &utf16be, "\u{feff}a: é".as_bytes(), "a: é\r\n".as_bytes()]
        {
            let (entries, report) = entries(bytes);
            assert!(report.errors.is_empty(), "{bytes:?}: {:?}", report.errors);
            assert_eq!(raw(&entries[0].value), "é", "{bytes:?}");
        }
    }

    #[test]
    fn reads_bare_carriage_returns_as_line_ends() {
        let (entries, _) = entries(b"a: 1\rb: 2\r");
        let keys: Vec<_> = entries.iter().map(|entry| entry.key.as_str()).collect();
        assert_eq!(keys, ["a", "b"]);
    }

    #[test]
    fn takes_tabs_behind_keys_for_blanks() {
        let (entries, report) = entries("a:\t1\né:\t\t- x\n\"b\":\t\"c:\td\"\n".as_bytes());
        assert_eq!(report.errors[0].line, Some(2), "{:?}", report.errors);
        assert!(entries.is_empty());
        let (entries, report) =
            self::entries("é:\t1\n\"b\":\t\t\"c:\td\"\ne: |\n  f:\tg\n".as_bytes());
        assert!(report.errors.is_empty(), "{:?}", report.errors);
        let values: Vec<_> = entries.iter().map(|entry| raw(&entry.value)).collect();
        assert_eq!(values, ["1", "c:\td", "f:\tg\n"]);
    }

    #[test]
    fn follows_anchors_and_merge_keys() {
        let merged = |text: &str| {
            let (entries, report) = entries(text.as_bytes());
            assert!(report.errors.is_empty(), "{text}: {:?}", report.errors);
            let entry = entries.iter().find(|entry| entry.key == "t").unwrap();
            let inner = entry.value.entries(&mut Report::new("t")).unwrap();
            inner
                .iter()
                .map(|e| format!("{}={}", e.key, raw(&e.value)))
                .collect::<Vec<_>>()
                .join(" ")
        };
        assert_eq!(merged("d: &d {a: 1, b: 2}\nt: *d\n"), "a=1 b=2");
        assert_eq!(merged("d: &d {a: 1, b: 2}\nt:\n  <<: *d\n  a: 3\n"), "a=3 b=2");
        // After the key the merge wins, as in the original's parser.
        assert_eq!(merged("d: &d {a: 1, b: 2}\nt:\n  a: 3\n  <<: *d\n"), "a=1 b=2");
        assert_eq!(merged("d: &d {a: 1}\ne: &e {a: 2, b: 2}\nt:\n  <<: [*d, *e]\n"), "a=1 b=2");
        assert_eq!(merged("d: &d {a: 1}\ne: &e {<<: *d, b: 2}\nt: {<<: *e}\n"), "a=1 b=2");
        assert_eq!(merged("t: {<<: {a: 1}, A: 2}\n"), "a=2");
        // In quotes it is a key like any other.
        let (entries, _) = entries(b"'<<': {a: 1}\n");
        assert_eq!(entries[0].key, "<<");
    }

    #[test]
    fn warns_when_a_merge_takes_the_place_of_a_written_value() {
        let mut report = Report::new("t");
        let root = parse(b"a: 3\n<<: {a: 1}\n", &mut report).unwrap();
        root.entries(&mut report).unwrap();
        assert_eq!(
            report.warnings[0].to_string(),
            "t:1: a: replaced by the value that a later << merges in"
        );
    }

    #[test]
    fn reports_what_is_no_yaml_with_its_line() {
        check_error(
            "a: 1\n\tb: 2\n",
            "t:1: is not valid YAML: while scanning a plain scalar, found a tab; indent with blanks",
        );
        check_error(
            "a: 1\nb = 2\n",
            "t:2: is not valid YAML: simple key expect ':'; a setting is `key: value`",
        );
        check_error("a: 1\nb:2\n\n\n", "t:2: is not valid YAML: simple key");
        check_error("a: [\"\\.x\"]\n", "between single quotes a backslash stands for itself");
        check_error("a: [*.x]\n", "begins with such a character wants quotes");
        check_error("a: @x\n", "begins with such a character wants quotes");
        check_error("a: 'x\nb: 1\n", "is a quote closed?");
        check_error("a: b: c\n", "a text with a colon and a blank in it wants quotes");
        check_error("a: [1, 2\n", "is not valid YAML");
        check_error("a: 'x\n", "is not valid YAML");
        check_error("a: 1\n b: 2\n", "t:2: is not valid YAML");
        check_error("a: *nowhere\n", "is not valid YAML");
        check_error("a: b: c\n", "is not valid YAML");
        check_error("a: &a [*a]\n", "t:1: an alias stands inside what it names");
        check_error("a: !!int x\n", "t:1: does not fit its tag !!int");
        check_error("a: !!bool 1\n", "t:1: does not fit its tag !!bool");
        check_error("a: !!binary '%'\n", "t:1: !!binary is not valid base64");
        check_error("a: 1\na: 2\n", "t:2: a: given twice, first in line 1");
        check_error("a: 1\nA: 2\n", "t:2: A: given twice, first in line 1, in other letters");
        check_error("? [x]\n: 1\n", "t:1: a key must be a text, found a list");
        check_error("~: 1\n", "t:1: a key is missing");
        check_error("<<: 5\n", "t:1: <<: found the number 5, wanted a map");
        check_error("<<: [{a: 1}, x]\n", "t:1: <<: found the text \"x\", wanted a map");
    }

    #[test]
    fn refuses_bytes_that_are_no_text() {
        let mut report = Report::new("t");
        assert!(parse(b"a: 1\nb: \xff\n", &mut report).is_none());
        assert_eq!(report.errors[0].to_string(), "t:2: is not valid UTF-8");
        for text in ["a: 1\nb: x\u{1}\n", "a: 1\nb: x\u{7f}\n", "a: 1\nb: x\u{fffe}\n"] {
            let mut report = Report::new("t");
            assert!(parse(text.as_bytes(), &mut report).is_none());
            assert_eq!(report.errors[0].to_string(), "t:2: holds a control character");
        }
        for bytes in [b"\xff\xfea\x00:".as_slice(), b"\xfe\xff\xd8\x00"] {
            let mut report = Report::new("t");
            assert!(parse(bytes, &mut report).is_none());
            assert_eq!(report.errors[0].to_string(), "t: is not valid UTF-16");
        }
    }

    #[test]
    fn reads_the_first_document_only() {
        let mut report = Report::new("t");
        let root = parse(b"---\na: 1\n---\nb: 2\n", &mut report).unwrap();
        assert_eq!(root.entries(&mut report).unwrap()[0].key, "a");
        assert_eq!(
            report.warnings[0].to_string(),
            "t:3: more documents follow; only the first is read"
        );
        let mut report = Report::new("t");
        parse(b"%YAML 1.1\n---\na: 1\n...\n", &mut report).unwrap();
        assert!(report.warnings.is_empty(), "{:?}", report.warnings);
    }

    #[test]
    fn survives_files_that_mean_harm() {
        check_error(&"[".repeat(100), "nested more than 32 levels");
        check_error(&"[".repeat(100_000), "recursion limit exceeded");
        let blocks = "- ".repeat(50_000);
        check_error(&blocks, "nested more than 32 levels");
        // Each level doubles the merges of the one before.
        let mut bomb = "a0: &a0 {x: 1}\n".to_string();
        for level in 1..40 {
            let below = level - 1;
            bomb += &format!("a{level}: &a{level} {{<<: [*a{below}, *a{below}]}}\n");
        }
        bomb += "<<: *a39\n";
        check_error(&bomb, "t:1: <<: merges 1000 maps or more");
    }

    #[test]
    fn never_panics_on_damaged_input() {
        let good = b"a: &x {b: [1, 'c', \"d\\n\"], <<: {e: 010}}\nf: *x\n--- |\n  text\n";
        let mut rng = fastrand::Rng::with_seed(7);
        for _ in 0..5_000 {
            let mut bytes = good.to_vec();
            for _ in 0..rng.usize(1..4) {
                let at = rng.usize(..bytes.len());
                bytes[at] = rng.u8(..);
            }
            let mut report = Report::new("t");
            if let Some(root) = parse(&bytes, &mut report) {
                root.entries(&mut report);
            }
        }
    }

    #[track_caller]
    fn check(value: &str, expected: Kind) {
        let (entries, report) = entries(format!("a: {value}\n").as_bytes());
        assert!(report.errors.is_empty(), "{value:?}: {:?}", report.errors);
        let Value::Scalar(scalar) = &entries[0].value.value else { panic!("{value:?}") };
        assert_eq!(scalar.kind, expected, "{value:?}");
    }

    #[track_caller]
    fn check_raw(value: &str, expected: &str, kind: Kind) {
        check(value, kind);
        let (entries, _) = entries(format!("a: {value}\n").as_bytes());
        assert_eq!(raw(&entries[0].value), expected, "{value:?}");
    }

    #[track_caller]
    fn check_error(text: &str, expected: &str) {
        let (_, report) = entries(text.as_bytes());
        let shown: String = text.chars().take(60).collect();
        let errors: Vec<_> = report.errors.iter().map(|error| error.to_string()).collect();
        assert!(errors.iter().any(|error| error.contains(expected)), "{shown:?}: {errors:?}");
    }

    fn entries(bytes: &[u8]) -> (Vec<Entry>, Report) {
        let mut report = Report::new("t");
        let root = parse(bytes, &mut report);
        let entries = root.and_then(|root| root.entries(&mut report)).unwrap_or_default();
        (entries, report)
    }

    fn raw(node: &Node) -> &str {
        let Value::Scalar(scalar) = &node.value else { panic!("{node:?}") };
        &scalar.raw
    }
}
