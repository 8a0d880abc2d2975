//! JSON values of one request, as Python's `json.loads` reads them, before they reach a template.
//!
//! Strings borrow from the body; only what a template will see is copied. Integers keep every digit, floats
//! are doubles, a repeated key keeps its first place and its last value.

use std::borrow::Cow;
use std::collections::HashMap;

use minijinja::Value;
use minijinja::value::Object;

use super::json::{JsonError, JsonResult, Reader, Values};

/// One JSON value.
#[derive(Clone, Debug, PartialEq)]
pub enum Tree<'a> {
    Null,
    Bool(bool),
    /// Digits as they were written: any size, never rounded.
    Integer(Cow<'a, str>),
    Float(f64),
    Text(Cow<'a, str>),
    List(Vec<Tree<'a>>),
    Map(Map<'a>),
}

/// An object in the order of its text.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Map<'a>(pub Vec<(Cow<'a, str>, Tree<'a>)>);

/// Above this many members a repeated key is looked for by hash instead of one by one.
const LINEAR_MEMBERS_MAX: usize = 16;

impl<'a> Map<'a> {
    pub fn get(&self, key: &str) -> Option<&Tree<'a>> {
        self.0.iter().find(|(name, _)| name == key).map(|(_, value)| value)
    }

    pub fn get_mut(&mut self, key: &str) -> Option<&mut Tree<'a>> {
        self.0.iter_mut().find(|(name, _)| name == key).map(|(_, value)| value)
    }

    /// The template's view of the object.
    pub fn to_value(&self) -> Value {
        Value::from_pairs(self.0.iter().map(|(key, value)| (key.as_ref(), value.to_value())))
    }

    /// The value of `key`, moved out; later members keep their order.
    pub fn take(&mut self, key: &str) -> Option<Tree<'a>> {
        let at = self.0.iter().position(|(name, _)| name == key)?;
        Some(self.0.remove(at).1)
    }

    /// Sets `key` as Python's `dict[key] = value` does: in place, or at the end.
    pub fn set(&mut self, key: impl Into<Cow<'a, str>>, value: Tree<'a>) {
        let key = key.into();
        match self.get_mut(&key) {
            Some(slot) => *slot = value,
            None => self.0.push((key, value)),
        }
    }

    fn from_members(members: Vec<(Cow<'a, str>, Tree<'a>)>) -> Self {
        if members.len() <= LINEAR_MEMBERS_MAX {
            let mut map = Map(Vec::with_capacity(members.len()));
            members.into_iter().for_each(|(key, value)| map.set(key, value));
            return map;
        }
        let mut places: HashMap<Cow<'a, str>, usize> = HashMap::with_capacity(members.len());
        let mut map = Map(Vec::with_capacity(members.len()));
        for (key, value) in members {
            match places.get(&key) {
                Some(place) => map.0[*place].1 = value,
                None => {
                    places.insert(key.clone(), map.0.len());
                    map.0.push((key, value));
                }
            }
        }
        map
    }
}

impl<'a> Tree<'a> {
    /// Reads the value at the reader.
    pub fn read(reader: &mut Reader<'a>) -> JsonResult<Self> {
        Ok(match reader.peek() {
            Some(b'{') => {
                let mut members = Vec::new();
                reader.object(|reader, key| {
                    members.push((key, Tree::read(reader)?));
                    Ok(())
                })?;
                Tree::Map(Map::from_members(members))
            }
            Some(b'[') => {
                let mut items = Vec::new();
                reader.array(|reader| {
                    items.push(Tree::read(reader)?);
                    Ok(())
                })?;
                Tree::List(items)
            }
            Some(b'"') => Tree::Text(reader.string()?),
            Some(b't' | b'f' | b'n') => reader.word()?.map_or(Tree::Null, Tree::Bool),
            _ => number(reader.number()?),
        })
    }

    /// Reads a whole text.
    pub fn parse(text: &'a str) -> JsonResult<Self> {
        let mut reader = Reader::new(text);
        let tree = Tree::read(&mut reader)?;
        reader.end()?;
        Ok(tree)
    }

    pub fn text(text: impl Into<Cow<'a, str>>) -> Self {
        Tree::Text(text.into())
    }

    pub fn as_text(&self) -> Option<&str> {
        match self {
            Tree::Text(text) => Some(text),
            _ => None,
        }
    }

    pub fn is_null(&self) -> bool {
        matches!(self, Tree::Null)
    }

    /// Python's `bool(value)`.
    pub fn is_truthy(&self) -> bool {
        match self {
            Tree::Null => false,
            Tree::Bool(value) => *value,
            Tree::Integer(digits) => digits.trim_start_matches('-') != "0",
            Tree::Float(value) => *value != 0.0,
            Tree::Text(text) => !text.is_empty(),
            Tree::List(items) => !items.is_empty(),
            Tree::Map(map) => !map.0.is_empty(),
        }
    }

    /// The same value without borrows, for parts that came from a string inside the body.
    pub fn into_owned(self) -> Tree<'static> {
        match self {
            Tree::Null => Tree::Null,
            Tree::Bool(value) => Tree::Bool(value),
            Tree::Integer(digits) => Tree::Integer(Cow::Owned(digits.into_owned())),
            Tree::Float(value) => Tree::Float(value),
            Tree::Text(text) => Tree::Text(Cow::Owned(text.into_owned())),
            Tree::List(items) => Tree::List(items.into_iter().map(Tree::into_owned).collect()),
            Tree::Map(map) => Tree::Map(Map(map
                .0
                .into_iter()
                .map(|(key, value)| (Cow::Owned(key.into_owned()), value.into_owned()))
                .collect())),
        }
    }

    /// Appends the value as JSON without spaces. Integers keep their digits; what JSON cannot say of a float is null.
    pub fn write_json(&self, out: &mut Vec<u8>) {
        match self {
            Tree::Null => out.extend_from_slice(b"null"),
            Tree::Bool(value) => out.extend_from_slice(if *value { b"true" } else { b"false" }),
            Tree::Integer(digits) => out.extend_from_slice(digits.as_bytes()),
            Tree::Float(value) => write_with_serde(out, value),
            Tree::Text(text) => write_with_serde(out, text),
            Tree::List(items) => {
                out.push(b'[');
                for (index, item) in items.iter().enumerate() {
                    if index > 0 {
                        out.push(b',');
                    }
                    item.write_json(out);
                }
                out.push(b']');
            }
            Tree::Map(map) => {
                out.push(b'{');
                for (index, (key, value)) in map.0.iter().enumerate() {
                    if index > 0 {
                        out.push(b',');
                    }
                    write_with_serde(out, key);
                    out.push(b':');
                    value.write_json(out);
                }
                out.push(b'}');
            }
        }
    }

    /// The template's view of the value.
    pub fn to_value(&self) -> Value {
        match self {
            Tree::Null => Value::from(()),
            Tree::Bool(value) => Value::from(*value),
            Tree::Integer(digits) => integer(digits),
            Tree::Float(value) => Value::from(*value),
            Tree::Text(text) => Value::from(text.as_ref()),
            Tree::List(items) => items.iter().map(Tree::to_value).collect::<Vec<_>>().into(),
            Tree::Map(map) => map.to_value(),
        }
    }
}

fn write_with_serde(out: &mut Vec<u8>, value: &(impl serde::Serialize + ?Sized)) {
    serde_json::to_writer(out, value).expect("strings and floats are always written to memory");
}

/// A tree looked through as text is.
pub struct Cursor<'t>(pub &'t Tree<'t>);

impl<'t> Values<'t> for Cursor<'t> {
    fn peek(&mut self) -> Option<u8> {
        Some(match self.0 {
            Tree::Null => b'n',
            Tree::Bool(true) => b't',
            Tree::Bool(false) => b'f',
            Tree::Integer(_) | Tree::Float(_) => b'0',
            Tree::Text(_) => b'"',
            Tree::List(_) => b'[',
            Tree::Map(_) => b'{',
        })
    }

    fn string(&mut self) -> JsonResult<Cow<'t, str>> {
        match self.0 {
            Tree::Text(text) => Ok(Cow::Borrowed(text)),
            _ => Err(JsonError { offset: 0, what: "expected a string" }),
        }
    }

    fn object(&mut self, mut member: impl FnMut(&mut Self, Cow<'t, str>) -> JsonResult<()>) -> JsonResult<()> {
        match self.0 {
            Tree::Map(map) => map.0.iter().try_for_each(|(key, value)| member(&mut Cursor(value), Cow::Borrowed(key))),
            _ => Err(JsonError { offset: 0, what: "expected an object" }),
        }
    }

    fn array(&mut self, mut item: impl FnMut(&mut Self) -> JsonResult<()>) -> JsonResult<()> {
        match self.0 {
            Tree::List(items) => items.iter().try_for_each(|value| item(&mut Cursor(value))),
            _ => Err(JsonError { offset: 0, what: "expected an array" }),
        }
    }

    fn skip(&mut self) -> JsonResult<()> {
        Ok(())
    }
}

/// Python's rule: a fraction or an exponent makes a float, whatever its size; all else is an exact integer.
fn number(spelling: &str) -> Tree<'_> {
    match spelling {
        "NaN" => Tree::Float(f64::NAN),
        "Infinity" => Tree::Float(f64::INFINITY),
        "-Infinity" => Tree::Float(f64::NEG_INFINITY),
        // `-0` is the integer 0 to Python.
        "-0" => Tree::Integer("0".into()),
        _ if spelling.contains(['.', 'e', 'E']) => Tree::Float(spelling.parse().unwrap_or(f64::NAN)),
        _ => Tree::Integer(spelling.into()),
    }
}

fn integer(digits: &str) -> Value {
    if let Ok(value) = digits.parse::<i64>() {
        Value::from(value)
    } else if let Ok(value) = digits.parse::<i128>() {
        Value::from(value)
    } else {
        Value::from_object(LongInteger(digits.to_owned()))
    }
}

/// An integer beyond 128 bits: prints its digits, takes no part in arithmetic.
#[derive(Debug)]
pub struct LongInteger(pub String);

impl Object for LongInteger {
    fn repr(self: &std::sync::Arc<Self>) -> minijinja::value::ObjectRepr {
        minijinja::value::ObjectRepr::Plain
    }

    fn render(self: &std::sync::Arc<Self>, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repeated_keys_keep_the_first_place_and_the_last_value() {
        for pad in [0, 40] {
            let padding: String = (0..pad).map(|number| format!(r#""p{number}":0,"#)).collect();
            let text = format!(r#"{{"a":1,{padding}"b":2,"a":3}}"#);
            let Tree::Map(map) = Tree::parse(&text).unwrap() else { panic!("an object") };
            assert_eq!(map.0[0], ("a".into(), Tree::Integer("3".into())));
            assert_eq!(map.0.len(), pad + 2);
        }
    }

    #[test]
    fn numbers_read_as_python_reads_them() {
        for (text, expected) in [
            ("1.0", Tree::Float(1.0)),
            ("1E2", Tree::Float(100.0)),
            ("1e999", Tree::Float(f64::INFINITY)),
            ("-0", Tree::Integer("0".into())),
            ("-0.0", Tree::Float(-0.0)),
            (
                "123456789012345678901234567890123456789012345",
                Tree::Integer("123456789012345678901234567890123456789012345".into()),
            ),
        ] {
            assert_eq!(Tree::parse(text).unwrap(), expected, "{text}");
        }
        assert!(matches!(Tree::parse("NaN").unwrap(), Tree::Float(value) if value.is_nan()));
    }
}
