//! How Python writes values: `json.dumps`, `repr` and `str`, for what templates print and compare.
//!
//! Source of the rules: CPython's `json.encoder`, `float.__repr__` and `str.__repr__`.

use std::fmt::Write;

use minijinja::value::{ValueIter, ValueKind};
use minijinja::{Error, ErrorKind, Value};

use super::tree::LongInteger;
use crate::limits::{RENDERED_BYTES_MAX, TEMPLATE_VALUE_DEPTH_MAX};

/// The arguments of `json.dumps` that templates use.
#[derive(Clone, Debug)]
pub struct JsonStyle {
    /// Text of one indent level; `None` writes one line.
    pub indent: Option<String>,
    pub item_separator: String,
    pub key_separator: String,
    pub ensure_ascii: bool,
    pub sort_keys: bool,
}

impl Default for JsonStyle {
    fn default() -> Self {
        Self {
            indent: None,
            item_separator: ", ".into(),
            key_separator: ": ".into(),
            ensure_ascii: false,
            sort_keys: false,
        }
    }
}

/// `json.dumps(value)`; fails on what Python cannot serialize, undefined values among it.
pub fn json(value: &Value, style: &JsonStyle) -> Result<String, Error> {
    let mut out = String::new();
    write_json(&mut out, value, style, 0)?;
    Ok(out)
}

/// Refuses what would become too long with `more` bytes, and what is nested too deep. A template can make a few names for
/// one list spell more places than there are bytes.
fn within_bounds(out: &str, more: usize, depth: usize) -> Result<(), Error> {
    if depth > TEMPLATE_VALUE_DEPTH_MAX {
        return Err(Error::new(ErrorKind::InvalidOperation, "a value is nested too deep to be printed"));
    }
    if out.len().saturating_add(more) > RENDERED_BYTES_MAX {
        return Err(Error::new(ErrorKind::OutOfFuel, "a value is too long to be printed"));
    }
    Ok(())
}

fn write_json(out: &mut String, value: &Value, style: &JsonStyle, depth: usize) -> Result<(), Error> {
    within_bounds(out, 0, depth)?;
    match value.kind() {
        ValueKind::None => out.push_str("null"),
        ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
        ValueKind::Number => write_json_number(out, value),
        ValueKind::String => write_json_string(out, value.as_str().unwrap_or_default(), style.ensure_ascii),
        ValueKind::Seq | ValueKind::Iterable => write_json_list(out, value.try_iter()?, style, depth)?,
        ValueKind::Map => write_json_map(out, value, style, depth)?,
        _ => match value.downcast_object_ref::<LongInteger>() {
            Some(integer) => out.push_str(&integer.0),
            None => {
                let what = format!("Object of type {} is not JSON serializable", value.kind());
                return Err(Error::new(ErrorKind::BadSerialization, what));
            }
        },
    }
    Ok(())
}

fn write_json_number(out: &mut String, value: &Value) {
    if value.is_integer() {
        // Display of an integer is its digits in both languages.
        let _ = write!(out, "{value}");
        return;
    }
    let float = f64::try_from(value.clone()).unwrap_or(f64::NAN);
    match float {
        _ if float.is_nan() => out.push_str("NaN"),
        f64::INFINITY => out.push_str("Infinity"),
        f64::NEG_INFINITY => out.push_str("-Infinity"),
        _ => write_float(out, float),
    }
}

fn write_json_list(out: &mut String, items: ValueIter, style: &JsonStyle, depth: usize) -> Result<(), Error> {
    out.push('[');
    let mut empty = true;
    for item in items {
        begin_item(out, style, depth + 1, std::mem::replace(&mut empty, false))?;
        write_json(out, &item, style, depth + 1)?;
    }
    end_container(out, style, depth, empty, ']')
}

fn write_json_map(out: &mut String, value: &Value, style: &JsonStyle, depth: usize) -> Result<(), Error> {
    let mut members: Vec<(Value, Value)> =
        value.as_object().and_then(|object| object.try_iter_pairs()).into_iter().flatten().collect();
    if style.sort_keys {
        members.sort_by(|left, right| left.0.cmp(&right.0));
    }
    out.push('{');
    let empty = members.is_empty();
    for (index, (key, value)) in members.into_iter().enumerate() {
        begin_item(out, style, depth + 1, index == 0)?;
        write_json_key(out, &key, style)?;
        out.push_str(&style.key_separator);
        write_json(out, &value, style, depth + 1)?;
    }
    end_container(out, style, depth, empty, '}')
}

/// A key that is not a string is written as the JSON of its value between quotes.
fn write_json_key(out: &mut String, key: &Value, style: &JsonStyle) -> Result<(), Error> {
    if let Some(text) = key.as_str() {
        write_json_string(out, text, style.ensure_ascii);
        return Ok(());
    }
    match key.kind() {
        ValueKind::None | ValueKind::Bool | ValueKind::Number => {
            out.push('"');
            write_json(out, key, style, 0)?;
            out.push('"');
            Ok(())
        }
        kind => {
            let what = format!("keys must be str, int, float, bool or None, not {kind}");
            Err(Error::new(ErrorKind::BadSerialization, what))
        }
    }
}

fn begin_item(out: &mut String, style: &JsonStyle, depth: usize, first: bool) -> Result<(), Error> {
    if !first {
        out.push_str(&style.item_separator);
    }
    begin_line(out, style, depth)
}

fn end_container(out: &mut String, style: &JsonStyle, depth: usize, empty: bool, mark: char) -> Result<(), Error> {
    if !empty {
        begin_line(out, style, depth)?;
    }
    out.push(mark);
    Ok(())
}

fn begin_line(out: &mut String, style: &JsonStyle, depth: usize) -> Result<(), Error> {
    let Some(indent) = &style.indent else { return Ok(()) };
    within_bounds(out, indent.len().saturating_mul(depth), depth)?;
    out.push('\n');
    (0..depth).for_each(|_| out.push_str(indent));
    Ok(())
}

fn write_json_string(out: &mut String, text: &str, ensure_ascii: bool) {
    out.push('"');
    let mut plain_from = 0;
    for (at, char) in text.char_indices() {
        let escape = match char {
            '"' => "\\\"",
            '\\' => "\\\\",
            '\n' => "\\n",
            '\r' => "\\r",
            '\t' => "\\t",
            '\u{8}' => "\\b",
            '\u{c}' => "\\f",
            '\0'..='\u{1f}' => "",
            // With ensure_ascii, Python escapes all that is not printable ASCII, DEL included.
            _ if ensure_ascii && !(' '..='~').contains(&char) => "",
            _ => continue,
        };
        out.push_str(&text[plain_from..at]);
        plain_from = at + char.len_utf8();
        if escape.is_empty() {
            for unit in char.encode_utf16(&mut [0; 2]) {
                let _ = write!(out, "\\u{unit:04x}");
            }
        } else {
            out.push_str(escape);
        }
    }
    out.push_str(&text[plain_from..]);
    out.push('"');
}

/// `repr(float)` of a finite number: the shortest digits that read back the same, an exponent below 1e-4 and from 1e16 on.
fn write_float(out: &mut String, value: f64) {
    let scientific = format!("{value:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if (-4..16).contains(&exponent) {
        let plain = format!("{value}");
        out.push_str(&plain);
        if !plain.contains('.') {
            out.push_str(".0");
        }
        return;
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    let _ = write!(out, "{digits}e{sign}{:02}", exponent.abs());
}

/// `str(value)` as Jinja prints it; undefined prints nothing. Fails on what is too long or nested too deep.
pub fn write_str(out: &mut impl Write, value: &Value) -> Result<(), Error> {
    let written = match value.as_str() {
        Some(text) => out.write_str(text),
        None if value.is_undefined() => Ok(()),
        None => {
            let mut text = String::new();
            write_repr(&mut text, value, 0)?;
            out.write_str(&text)
        }
    };
    written.map_err(|_| Error::from(ErrorKind::WriteFailure))
}

/// `str(value)` as a string.
pub fn str(value: &Value) -> Result<String, Error> {
    let mut out = String::new();
    write_str(&mut out, value)?;
    Ok(out)
}

fn write_repr(out: &mut String, value: &Value, depth: usize) -> Result<(), Error> {
    within_bounds(out, 0, depth)?;
    match value.kind() {
        ValueKind::Number if !value.is_integer() => {
            let float = f64::try_from(value.clone()).unwrap_or(f64::NAN);
            match float {
                _ if float.is_nan() => out.push_str("nan"),
                f64::INFINITY => out.push_str("inf"),
                f64::NEG_INFINITY => out.push_str("-inf"),
                _ => write_float(out, float),
            }
        }
        ValueKind::String => write_string_repr(out, value.as_str().unwrap_or_default()),
        ValueKind::Seq | ValueKind::Iterable => {
            let (open, close) = if value.is_tuple() { ('(', ')') } else { ('[', ']') };
            out.push(open);
            let mut count = 0;
            for item in value.try_iter().into_iter().flatten() {
                out.push_str(if count > 0 { ", " } else { "" });
                write_repr(out, &item, depth + 1)?;
                count += 1;
            }
            if value.is_tuple() && count == 1 {
                out.push(',');
            }
            out.push(close);
        }
        ValueKind::Map => {
            out.push('{');
            let members = value.as_object().and_then(|object| object.try_iter_pairs());
            for (index, (key, value)) in members.into_iter().flatten().enumerate() {
                out.push_str(if index > 0 { ", " } else { "" });
                write_repr(out, &key, depth + 1)?;
                out.push_str(": ");
                write_repr(out, &value, depth + 1)?;
            }
            out.push('}');
        }
        // None, True, False, integers and objects print themselves.
        _ => {
            let _ = write!(out, "{value}");
        }
    }
    Ok(())
}

/// `repr(str)`: single quotes unless only they occur inside, escapes for what Python calls unprintable.
fn write_string_repr(out: &mut String, text: &str) {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(quote);
    for char in text.chars() {
        match char {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            _ if char == quote => {
                out.push('\\');
                out.push(char);
            }
            _ if is_printable(char) => out.push(char),
            _ if (char as u32) < 0x100 => {
                let _ = write!(out, "\\x{:02x}", char as u32);
            }
            _ if (char as u32) < 0x10000 => {
                let _ = write!(out, "\\u{:04x}", char as u32);
            }
            _ => {
                let _ = write!(out, "\\U{:08x}", char as u32);
            }
        }
    }
    out.push(quote);
}

/// Python's `isprintable` for the characters that occur in text: controls, separators other than the space,
/// format characters and private use are not. Unassigned code points are taken for printable.
fn is_printable(char: char) -> bool {
    !matches!(char,
        '\0'..='\u{1f}' | '\u{7f}'..='\u{a0}' | '\u{ad}' | '\u{600}'..='\u{605}' | '\u{61c}' | '\u{6dd}' | '\u{70f}'
        | '\u{1680}' | '\u{180e}' | '\u{2000}'..='\u{200f}' | '\u{2028}'..='\u{202f}' | '\u{205f}'..='\u{206f}'
        | '\u{3000}' | '\u{e000}'..='\u{f8ff}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{e0001}'..='\u{e007f}'
        | '\u{f0000}'..='\u{10ffff}')
}

/// Python's `str.isspace` for one character: Unicode's White_Space and the four ASCII separators.
pub fn is_space(char: char) -> bool {
    char.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&char)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::prompt::tree::Tree;

    fn value(text: &str) -> Value {
        Tree::parse(text).unwrap().to_value()
    }

    #[test]
    fn floats_print_as_in_python() {
        for (text, expected) in [
            ("1.0", "1.0"),
            ("1e20", "1e+20"),
            ("-0.0", "-0.0"),
            ("1E-7", "1e-07"),
            ("0.1", "0.1"),
            ("1e16", "1e+16"),
            ("1e15", "1000000000000000.0"),
            ("123456789012345680.0", "1.2345678901234568e+17"),
            ("5e-324", "5e-324"),
            ("0.0001", "0.0001"),
            ("0.00001", "1e-05"),
            ("1.7976931348623157e308", "1.7976931348623157e+308"),
            ("1e999", "Infinity"),
            ("NaN", "NaN"),
        ] {
            assert_eq!(json(&value(text), &JsonStyle::default()).unwrap(), expected, "{text}");
        }
        assert_eq!(str(&value("[1e999, NaN, 1e22]")).unwrap(), "[inf, nan, 1e+22]");
    }

    #[test]
    fn json_dumps_in_all_its_styles() {
        let input = value(
            r#"{"b":[1,{"z":null,"a":[]}],"é":"<a&'\"\u0001\u007f😀>","a":{},"n":123456789012345678901234567890}"#,
        );
        let style = |change: fn(&mut JsonStyle)| {
            let mut style = JsonStyle::default();
            change(&mut style);
            json(&input, &style).unwrap()
        };
        assert_eq!(
            style(|_| ()),
            "{\"b\": [1, {\"z\": null, \"a\": []}], \"é\": \"<a&'\\\"\\u0001\u{7f}😀>\", \"a\": {}, \"n\": 123456789012345678901234567890}"
        );
        assert!(
            style(|style| style.ensure_ascii = true).contains("\"\\u00e9\": \"<a&'\\\"\\u0001\\u007f\\ud83d\\ude00>\"")
        );
        assert!(style(|style| style.sort_keys = true).starts_with("{\"a\": {}, \"b\": [1, {\"a\": [], \"z\": null}]"));
        let indented = json(
            &value(r#"{"a":[1,{}],"b":[]}"#),
            &JsonStyle { indent: Some("  ".into()), item_separator: ",".into(), ..JsonStyle::default() },
        );
        assert_eq!(indented.unwrap(), "{\n  \"a\": [\n    1,\n    {}\n  ],\n  \"b\": []\n}");
        assert!(json(&Value::UNDEFINED, &JsonStyle::default()).is_err());
    }

    #[test]
    fn printing_shows_pythons_literals() {
        let input =
            value(r#"[true,false,null,1,2.0,"it's","say \"hi\"","both ' and \"","tab\t\u0000\u00a0é",{"k":["v"]}]"#);
        assert_eq!(
            str(&input).unwrap(),
            r#"[True, False, None, 1, 2.0, "it's", 'say "hi"', 'both \' and "', 'tab\t\x00\xa0é', {'k': ['v']}]"#
        );
        assert_eq!(str(&value("\"plain\"")).unwrap(), "plain");
        assert_eq!(str(&Value::UNDEFINED).unwrap(), "");
    }
}
