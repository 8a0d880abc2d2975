//! A model's chat template: compiled once, rendered with Python's semantics under limits.
//!
//! Owns the environment that Hugging Face's `apply_chat_template` gives a template (filters, functions,
//! whitespace rules). Never reads files and never sees a request's bytes, only values.

use std::fmt;
use std::time::SystemTime;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Value, ValueKind};
use minijinja::{Environment, Error, ErrorKind, State, UndefinedBehavior};

use super::content_form::{self, ContentForm};
use super::python::{self, JsonStyle};
use super::{EngineRules, NoBlocks, methods};
use crate::limits::{RENDERED_BYTES_MAX, TEMPLATE_FUEL, TEMPLATE_RECURSION_MAX};

const NAME: &str = "chat_template";

/// One compiled template.
pub struct ChatTemplate {
    environment: Environment<'static>,
    source: String,
    forms: [ContentForm; 2],
}

/// What a template said when it refused a conversation; travels inside minijinja's error.
#[derive(Debug)]
struct Refused(String);

impl fmt::Display for Refused {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

impl std::error::Error for Refused {}

impl ChatTemplate {
    /// Compiles a template. `now` is the clock of `strftime_now`; `None` reads the machine's.
    pub fn compile(source: &str, now: Option<SystemTime>) -> Result<Self, Error> {
        let source = source.replace("\r\n", "\n").replace('\r', "\n");
        let mut environment = environment(now)?;
        environment.add_template_owned(NAME, without_generation_tags(&source))?;
        let forms = [EngineRules::Vllm, EngineRules::Sglang].map(|rules| content_form::of_template(&source, rules));
        Ok(Self { environment, source, forms })
    }

    /// The form in which this template wants message content, as the given engine decides it.
    pub fn content_form(&self, rules: EngineRules) -> ContentForm {
        self.forms[rules as usize]
    }

    pub fn source(&self) -> &str {
        &self.source
    }

    /// Renders over a map of variables.
    pub fn render(&self, variables: Value) -> Result<String, NoBlocks> {
        let text = self
            .environment
            .get_template(NAME)
            .and_then(|template| template.render(variables))
            .map_err(|error| refusal(&error))?;
        if text.len() > RENDERED_BYTES_MAX { Err(NoBlocks::TooLong) } else { Ok(text) }
    }
}

fn refusal(error: &Error) -> NoBlocks {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(error) = cause {
        if let Some(Refused(text)) = error.downcast_ref() {
            return NoBlocks::TemplateRefused(text.clone());
        }
        if error.downcast_ref::<Error>().is_some_and(|error| error.kind() == ErrorKind::OutOfFuel) {
            return NoBlocks::TooLong;
        }
        cause = error.source();
    }
    NoBlocks::TemplateFailed(error.to_string())
}

fn environment(now: Option<SystemTime>) -> Result<Environment<'static>, Error> {
    let mut environment = Environment::new();
    environment.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
    environment.set_undefined_behavior(UndefinedBehavior::Lenient);
    environment.set_fuel(Some(TEMPLATE_FUEL));
    environment.set_recursion_limit(TEMPLATE_RECURSION_MAX);
    environment.set_unknown_method_callback(methods::call);
    environment.set_formatter(|out, _state, value| {
        python::write_str(out, value).map_err(|_| Error::from(ErrorKind::WriteFailure))
    });
    environment.add_filter("tojson", tojson);
    environment.add_filter("string", |value: &Value| python::str(value));
    environment.add_filter("trim", trim);
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
    let text = python::str(&message);
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
        style.item_separator = methods::text_of(item).into_owned();
        style.key_separator = methods::text_of(key).into_owned();
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

/// `trim(chars=None)`: Python's `strip`.
fn trim(state: &mut State, value: &Value, chars: Option<Value>) -> Result<Value, Error> {
    let text = Value::from(methods::text_of(value).as_ref());
    let arguments: Vec<Value> = chars.into_iter().filter(|chars| !chars.is_none()).collect();
    methods::call(state, &text, "strip", &arguments)
}

fn strftime(now: Option<SystemTime>, format: &str) -> Result<String, Error> {
    let now = now.map_or_else(|| Ok(jiff::Timestamp::now()), jiff::Timestamp::try_from);
    let zoned = now.map(|now| now.to_zoned_datetime(jiff::tz::TimeZone::system()));
    zoned
        .and_then(|zoned| jiff::fmt::strtime::format(format, &zoned))
        .map_err(|error| Error::new(ErrorKind::InvalidOperation, format!("strftime_now: {error}")))
}

/// Hugging Face's `{% generation %}` only marks text for training masks: a plain scope renders the same.
fn without_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let Some(length) = rest[start..].find("%}") else { break };
        let (tag, after) = (&rest[start + 2..start + length], start + length + 2);
        let name = tag.trim_matches(|char: char| char.is_whitespace() || char == '-' || char == '+');
        out.push_str(&rest[..start]);
        match name {
            "generation" => out.push_str(&format!("{{%{}%}}", tag.replace("generation", "with"))),
            "endgeneration" => out.push_str(&format!("{{%{}%}}", tag.replace("endgeneration", "endwith"))),
            _ => {
                // Only the opening mark is consumed: a quoted "%}" must not hide the tag behind it.
                out.push_str("{%");
                rest = &rest[start + 2..];
                continue;
            }
        }
        rest = &rest[after..];
    }
    out.push_str(rest);
    out
}
