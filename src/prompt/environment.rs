//! The environment that Hugging Face's `apply_chat_template` gives a template: filters, tests, functions,
//! whitespace rules, limits.
//!
//! minijinja's own version stays where it prints what Jinja prints; the rest is replaced here.

use std::fmt;
use std::time::SystemTime;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Value, ValueKind};
use minijinja::{Environment, Error, ErrorKind, State, UndefinedBehavior};

use super::methods;
use super::python::{self, JsonStyle};
use crate::limits::{TEMPLATE_FUEL, TEMPLATE_RECURSION_MAX};

/// What a template said when it refused a conversation; travels inside minijinja's error.
#[derive(Debug)]
pub struct Refused(pub String);

impl fmt::Display for Refused {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

impl std::error::Error for Refused {}

/// The environment for one template. `now` is the clock of `strftime_now`; `None` reads the machine's.
pub fn environment(now: Option<SystemTime>) -> Result<Environment<'static>, Error> {
    let mut environment = Environment::new();
    minijinja_contrib::add_to_environment(&mut environment);
    environment.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
    environment.set_undefined_behavior(UndefinedBehavior::Lenient);
    environment.set_fuel(Some(TEMPLATE_FUEL));
    environment.set_recursion_limit(TEMPLATE_RECURSION_MAX);
    environment.set_unknown_method_callback(methods::call);
    environment.set_formatter(|out, _state, value| python::write_str(out, value));
    environment.add_filter("tojson", tojson);
    environment.add_filter("string", |value: &Value| python::str(value));
    environment.add_filter("trim", trim);
    environment.add_filter("int", |value: &Value, default: Option<Value>| number(value, "int", default));
    environment.add_filter("float", |value: &Value, default: Option<Value>| number(value, "float", default));
    environment.add_filter("escape", escaped);
    environment.add_filter("e", escaped);
    environment.add_filter("center", |state: &mut State, value: &Value, width: Option<i64>| {
        let text = Value::from(methods::text_of(value)?.as_ref());
        methods::call(state, &text, "center", &[Value::from(width.unwrap_or(80))])
    });
    environment.add_filter("attr", attribute);
    environment.add_filter("wordcount", |value: &Value| -> Result<usize, Error> {
        let text = methods::text_of(value)?;
        Ok(text.split(|char: char| !(char.is_alphanumeric() || char == '_')).filter(|word| !word.is_empty()).count())
    });
    environment.add_test("callable", |value: &Value| value.kind() == ValueKind::Plain);
    environment.add_test("sequence", |value: &Value| {
        matches!(value.kind(), ValueKind::Seq | ValueKind::Map | ValueKind::String | ValueKind::Undefined)
    });
    environment.add_test("iterable", |value: &Value| {
        value.kind() == ValueKind::String || value.is_undefined() || (!value.is_none() && value.try_iter().is_ok())
    });
    environment.add_function("raise_exception", raise_exception);
    environment.add_function("strftime_now", move |format: &str| strftime(now, format));
    Ok(environment)
}

fn raise_exception(message: Value) -> Result<Value, Error> {
    let text = python::str(&message)?;
    Err(Error::new(ErrorKind::InvalidOperation, "the template refused").with_source(Refused(text)))
}

/// `tojson(ensure_ascii=False, indent=None, separators=None, sort_keys=False)`: Hugging Face's own filter.
fn tojson(
    value: &Value,
    ensure_ascii: Option<Value>,
    indent: Option<Value>,
    separators: Option<Value>,
    kwargs: Kwargs,
) -> Result<String, Error> {
    let argument = |positional: Option<Value>, name: &str| -> Result<Value, Error> {
        match positional {
            Some(value) => Ok(value),
            None => Ok(kwargs.get::<Option<Value>>(name)?.unwrap_or_default()),
        }
    };
    let ensure_ascii = argument(ensure_ascii, "ensure_ascii")?;
    let indent = argument(indent, "indent")?;
    let separators = argument(separators, "separators")?;
    let sort_keys = argument(None, "sort_keys")?;
    kwargs.assert_all_used()?;

    let mut style = JsonStyle {
        indent: indent_text(&indent)?,
        ensure_ascii: ensure_ascii.is_true(),
        sort_keys: sort_keys.is_true(),
        ..JsonStyle::default()
    };
    if style.indent.is_some() {
        style.item_separator = ",".into();
    }
    if !separators.is_none() && !separators.is_undefined() {
        let pair: Vec<Value> = separators.try_iter()?.collect();
        let [item, key] = &pair[..] else {
            return Err(Error::new(ErrorKind::InvalidOperation, "separators must be a pair"));
        };
        style.item_separator = methods::text_of(item)?.into_owned();
        style.key_separator = methods::text_of(key)?.into_owned();
    }
    python::json(value, &style)
}

fn indent_text(indent: &Value) -> Result<Option<String>, Error> {
    match indent.kind() {
        ValueKind::None | ValueKind::Undefined => Ok(None),
        ValueKind::String => Ok(indent.as_str().map(str::to_owned)),
        ValueKind::Bool => Ok(Some(" ".repeat(usize::from(indent.is_true())))),
        _ => {
            let spaces = i64::try_from(indent.clone())?.clamp(0, 64);
            Ok(Some(" ".repeat(spaces as usize)))
        }
    }
}

/// `int` and `float`: what Python cannot read becomes the default, 0 unless given.
fn number(value: &Value, kind: &str, default: Option<Value>) -> Result<Value, Error> {
    let text = value.as_str().map(|text| text.trim_matches(python::is_space).replace('_', ""));
    let float = match &text {
        Some(text) => text.parse::<f64>().ok(),
        None => f64::try_from(value.clone()).ok(),
    };
    if kind == "float" {
        return Ok(float.map(Value::from).or(default).unwrap_or_else(|| Value::from(0.0)));
    }
    let integer = match &text {
        Some(text) => text.parse::<i128>().ok(),
        None => i128::try_from(value.clone()).ok(),
    };
    let truncated = float.filter(|float| float.is_finite()).map(|float| float.trunc() as i128);
    Ok(integer.or(truncated).map(Value::from).or(default).unwrap_or_else(|| Value::from(0)))
}

/// Markupsafe's spelling of the five characters.
fn escaped(value: &Value) -> Result<String, Error> {
    let text = methods::text_of(value)?;
    let mut out = String::with_capacity(text.len());
    for char in text.chars() {
        match char {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '\'' => out.push_str("&#39;"),
            '"' => out.push_str("&#34;"),
            char => out.push(char),
        }
    }
    Ok(out)
}

/// Jinja's `attr` looks at attributes alone, and a dictionary's members are none.
fn attribute(value: &Value, name: &str) -> Result<Value, Error> {
    const METHODS: [&str; 11] =
        ["clear", "copy", "fromkeys", "get", "items", "keys", "pop", "popitem", "setdefault", "update", "values"];
    match value.kind() {
        ValueKind::Map if !METHODS.contains(&name) && !name.starts_with("__") => Ok(Value::UNDEFINED),
        _ => Err(Error::new(ErrorKind::InvalidOperation, "this use of attr cannot be reproduced here")),
    }
}

/// `trim(chars=None)`: Python's `strip`.
fn trim(state: &mut State, value: &Value, chars: Option<Value>) -> Result<Value, Error> {
    let text = Value::from(methods::text_of(value)?.as_ref());
    let arguments: Vec<Value> = chars.into_iter().filter(|chars| !chars.is_none()).collect();
    methods::call(state, &text, "strip", &arguments)
}

/// The clock as `strftime` of Python prints it, in the time zone of this machine.
pub fn strftime(now: Option<SystemTime>, format: &str) -> Result<String, Error> {
    let now = now.map_or_else(|| Ok(jiff::Timestamp::now()), jiff::Timestamp::try_from);
    let zoned = now.map(|now| now.to_zoned_datetime(jiff::tz::TimeZone::system()));
    zoned
        .and_then(|zoned| jiff::fmt::strtime::format(format, &zoned))
        .map_err(|error| Error::new(ErrorKind::InvalidOperation, format!("strftime_now: {error}")))
}
