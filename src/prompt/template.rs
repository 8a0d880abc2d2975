//! A model's chat template: compiled once, rendered with Python's semantics under limits.
//!
//! Never reads files and never sees a request's bytes, only values. What it cannot render as Python would, it
//! refuses to compile.

use std::time::SystemTime;

use minijinja::value::Value;
use minijinja::{Environment, Error, ErrorKind};

use super::content_form::{self, ContentForm};
use super::environment::{Refused, environment};
use super::{EngineRules, NoBlocks, spare};
use crate::limits::{RENDERED_BYTES_MAX, REQUEST_TEMPLATE_BYTES_MAX, REQUEST_TEMPLATE_FUEL};

const NAME: &str = "chat_template";

/// Address space, of which a template touches what its depth needs: 4 KiB for each byte of the longest source, and a level
/// takes at least one byte and a few hundred bytes of stack.
const COMPILE_STACK_BYTES: usize = REQUEST_TEMPLATE_BYTES_MAX * 4096;

/// Address space too. A value can be nested about as deep as there is fuel, and is compared, printed and freed level by level.
const RENDER_STACK_BYTES: usize = REQUEST_TEMPLATE_FUEL as usize * 512;

/// One compiled template.
pub struct ChatTemplate {
    environment: Environment<'static>,
    source: String,
    forms: [ContentForm; 2],
}

impl ChatTemplate {
    /// Compiles a template. `now` is the clock of `strftime_now`; `None` reads the machine's.
    pub fn compile(source: &str, now: Option<SystemTime>) -> Result<Self, Error> {
        let source = source.replace("\r\n", "\n").replace('\r', "\n");
        refuse_unlike(&source)?;
        let mut environment = environment(now)?;
        environment.add_template_owned(NAME, without_generation_tags(&source))?;
        let forms = [EngineRules::Vllm, EngineRules::Sglang].map(|rules| content_form::of_template(&source, rules));
        Ok(Self { environment, source, forms })
    }

    /// Compiles a template that somebody else wrote. The compiler recurses once for each level of an expression, and not
    /// all levels are counted (`not not not …`, a sum of many terms): the source is bounded, and the stack is made for
    /// the deepest expression that fits in it.
    pub fn compile_hostile(source: &str, now: Option<SystemTime>) -> Result<Self, NoBlocks> {
        if source.len() > REQUEST_TEMPLATE_BYTES_MAX {
            return Err(NoBlocks::TooLong);
        }
        on_deep_stack(COMPILE_STACK_BYTES, || {
            let mut compiled =
                Self::compile(source, now).map_err(|error| NoBlocks::TemplateFailed(error.to_string()))?;
            compiled.environment.set_fuel(Some(REQUEST_TEMPLATE_FUEL));
            Ok(compiled)
        })
    }

    /// The form in which this template wants message content, as the given engine decides it.
    pub fn content_form(&self, rules: EngineRules) -> ContentForm {
        self.forms[rules as usize]
    }

    pub fn source(&self) -> &str {
        &self.source
    }

    /// Whether a system message between others is rendered where it stands, as this engine finds out: by rendering one,
    /// without the functions that Hugging Face adds. vLLM asks that it is not refused, SGLang that its text appears.
    pub fn takes_late_system(&self, rules: EngineRules) -> bool {
        const LATE: &str = "a system text that stands late";
        let mut environment = self.environment.clone();
        ["raise_exception", "strftime_now"].iter().for_each(|name| environment.remove_global(name));
        let message = |role: &str, text: &str| Value::from_pairs([("role", role), ("content", text)]);
        let turns = [("system", "t"), ("user", "t"), ("system", LATE), ("user", "t")];
        let messages: Vec<Value> = turns.iter().map(|(role, text)| message(role, text)).collect();
        let variables =
            Value::from_pairs([("messages", Value::from(messages)), ("add_generation_prompt", Value::from(false))]);
        let rendered = environment.get_template(NAME).and_then(|template| template.render(variables));
        match (rendered, rules) {
            (Ok(_), EngineRules::Vllm) => true,
            (Ok(text), EngineRules::Sglang) => text.contains(LATE),
            (Err(_), _) => false,
        }
    }

    /// Renders over a map of variables; `bytes_hint` is about how long the text will be.
    pub fn render(&self, variables: Value, bytes_hint: usize) -> Result<String, NoBlocks> {
        let template = self.environment.get_template(NAME).map_err(|error| refusal(&error))?;
        // The spare buffer is empty, so this checks nothing and cannot fail.
        let spare = String::from_utf8(spare::take(bytes_hint.min(RENDERED_BYTES_MAX))).unwrap_or_default();
        let mut output = Bounded(spare);
        match template.render_captured_to(variables, &mut output) {
            Ok(_) => Ok(output.0),
            Err(error) => {
                spare::give(output.0.into_bytes());
                Err(refusal(&error))
            }
        }
    }
}

/// Runs `render`, of a template that somebody else wrote, where its values may be nested as deep as they can be made.
pub fn render_hostile(render: impl FnOnce() -> Result<String, NoBlocks> + Send) -> Result<String, NoBlocks> {
    on_deep_stack(RENDER_STACK_BYTES, render)
}

/// A stack that is used up ends the process, so what recurses by a stranger's word gets one that is long enough.
fn on_deep_stack<T: Send>(bytes: usize, work: impl FnOnce() -> Result<T, NoBlocks> + Send) -> Result<T, NoBlocks> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("template".into()).stack_size(bytes);
        let thread = thread.spawn_scoped(scope, work).map_err(|error| NoBlocks::TemplateFailed(error.to_string()))?;
        thread.join().unwrap_or_else(|_| Err(NoBlocks::TemplateFailed("it made a thread panic".to_owned())))
    })
}

/// Output that refuses to grow beyond the bound on rendered text.
///
/// The template engine writes whole strings, one after another; checked each by itself by vector code, they cost a
/// fraction of what checking the whole text at its end does where it is not ASCII.
struct Bounded(String);

impl std::io::Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        if self.0.len() + bytes.len() > RENDERED_BYTES_MAX {
            return Err(std::io::ErrorKind::FileTooLarge.into());
        }
        self.0.push_str(simdutf8::basic::from_utf8(bytes).map_err(|_| std::io::ErrorKind::InvalidData)?);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
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
        let too_long = |error: &std::io::Error| error.kind() == std::io::ErrorKind::FileTooLarge;
        if error.downcast_ref::<std::io::Error>().is_some_and(too_long) {
            return NoBlocks::TooLong;
        }
        cause = error.source();
    }
    NoBlocks::TemplateFailed(error.to_string())
}

/// Refuses what would render here, but otherwise than in Python: a newline behind `{% raw %}`, which Jinja keeps; a
/// `{% with %}` of several variables, which Jinja evaluates outside of each other; a macro's default that names another
/// parameter; and the escapes `\U` and `\N`.
fn refuse_unlike(source: &str) -> Result<(), Error> {
    if source.contains("\\U") || source.contains("\\N{") {
        return Err(Error::new(ErrorKind::SyntaxError, "the escapes \\U and \\N cannot be reproduced here"));
    }
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        rest = &rest[start + 2..];
        let Some((tag, after)) = rest.split_once("%}") else { break };
        let words = tag.trim_matches(|char: char| char.is_whitespace() || char == '-' || char == '+');
        let raw_line = words == "raw" && !tag.ends_with('-') && after.starts_with('\n');
        let with_several = words.starts_with("with ") && words.contains(',');
        if raw_line || with_several || (words.starts_with("macro ") && has_default_of_parameter(words)) {
            return Err(Error::new(ErrorKind::SyntaxError, format!("{{% {words} %}} cannot be reproduced here")));
        }
    }
    Ok(())
}

/// Whether a macro's parameter has another one as its default.
fn has_default_of_parameter(tag: &str) -> bool {
    let Some((_, parameters)) = tag.split_once('(') else { return false };
    let parts = parameters.trim_end_matches(')').split(',').map(|part| {
        let (name, default) = part.split_once('=').unwrap_or((part, ""));
        (name.trim(), default.trim())
    });
    let parts: Vec<(&str, &str)> = parts.collect();
    parts.iter().any(|(_, default)| !default.is_empty() && parts.iter().any(|(name, _)| name == default))
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
