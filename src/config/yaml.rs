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
    let text = match decode(bytes) {
        Ok(text) => text,
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
        let Value::Scalar(Scalar { raw, kind }) = &key.value else {
            report.error(line, format!("a key must be a text, found {}", key.describe(false)));
            continue;
        };
        if *kind == Kind::Null {
            report.error(line, "a key is missing before the colon");
            continue;
        }
        if raw == MERGE_KEY {
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
        let Some(left) = merges_left.checked_sub(1) else { return };
        *merges_left = left;
        collect(pairs, true, merges_left, entries, report);
    }
}

/// UTF-8, or UTF-16 with a byte order mark, to text without one.
fn decode(bytes: &[u8]) -> Result<String, (Option<usize>, String)> {
    let utf16 = |unit: fn([u8; 2]) -> u16| {
        let units = bytes[2..].chunks(2).map(|pair| match pair {
            [a, b] => unit([*a, *b]),
            _ => char::REPLACEMENT_CHARACTER as u16,
        });
        char::decode_utf16(units)
            .collect::<Result<String, _>>()
            .map_err(|_| (None, "is not valid UTF-16".to_string()))
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
                (Some(error.marker().line()), format!("is not valid YAML: {}", error.info()))
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

fn scalar(raw: String, style: ScalarStyle, tag: Option<&Tag>) -> Result<Scalar, String> {
    let plain = style == ScalarStyle::Plain;
    let kind = match tag {
        None if plain => resolve(&raw),
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
                return Ok(Scalar { raw, kind: Kind::Text });
            }
            _ => Kind::Text,
        },
        // The sign "!" alone, and a site's own tags, make a text.
        Some(_) => Kind::Text,
    };
    Ok(Scalar { raw, kind })
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

/// Levels of lists and maps; settings need three.
const NESTING_MAX: usize = 32;

/// Characters of a wrong value that a message shows.
const SHOWN_CHARS_MAX: usize = 60;
