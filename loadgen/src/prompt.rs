//! Owns the engine's own view of a prompt: chat normalisation, template, tokenizer, and the answer text that the
//! simulated model gives. Never shares code with the router, so that the two disagree when one of them is wrong.

use std::path::Path;

use anyhow::{Context, Result, bail};
use minijinja::value::{Serde, Value as TemplateValue};
use minijinja::{Environment, Error, ErrorKind};
use rand::Rng;
use serde::Serialize;
use serde_json::{Map, Value};
use tokenizers::Tokenizer;

use crate::{seed, words};

const TOKENIZER: &[u8] = include_bytes!("../assets/tokenizer.json");
const TOKENIZER_CONFIG: &[u8] = include_bytes!("../assets/tokenizer_config.json");

/// Writes the shipped tokenizer (`tokenizer.json`, `tokenizer_config.json`) into `directory`.
pub fn write_shipped_tokenizer(directory: &Path) -> Result<()> {
    std::fs::create_dir_all(directory)?;
    std::fs::write(directory.join("tokenizer.json"), TOKENIZER)?;
    std::fs::write(directory.join("tokenizer_config.json"), TOKENIZER_CONFIG)?;
    Ok(())
}

/// One word of an answer: its token and the text it adds.
#[derive(Clone, Debug)]
struct Word {
    token: u32,
    text: String,
}

/// Tokenizer, chat template and answer vocabulary of one model. Immutable, shared by all engines of a process.
pub struct TextModel {
    tokenizer: Tokenizer,
    environment: Environment<'static>,
    special: Map<String, Value>,
    opening_words: Vec<Word>,
    words: Vec<Word>,
}

impl TextModel {
    /// The shipped tokenizer and template.
    pub fn shipped() -> Result<TextModel> {
        TextModel::from_parts(TOKENIZER, TOKENIZER_CONFIG, None)
    }

    /// A model directory with `tokenizer.json`, `tokenizer_config.json` and, where the configuration holds no
    /// template, `chat_template.jinja`.
    pub fn from_directory(directory: &Path) -> Result<TextModel> {
        let read = |name: &str| std::fs::read(directory.join(name)).with_context(|| format!("{name} in {directory:?}"));
        let template = std::fs::read_to_string(directory.join("chat_template.jinja")).ok();
        TextModel::from_parts(&read("tokenizer.json")?, &read("tokenizer_config.json")?, template)
    }

    fn from_parts(tokenizer: &[u8], config: &[u8], template_file: Option<String>) -> Result<TextModel> {
        let tokenizer = Tokenizer::from_bytes(tokenizer).map_err(|error| anyhow::anyhow!("tokenizer.json: {error}"))?;
        let config: Value = serde_json::from_slice(config).context("tokenizer_config.json")?;
        let template = match (template_file, &config["chat_template"]) {
            (Some(file), _) => file,
            (None, Value::String(inline)) => inline.clone(),
            _ => bail!("no chat template: neither chat_template.jinja nor a string in tokenizer_config.json"),
        };
        let special = ["bos_token", "eos_token", "pad_token", "unk_token"]
            .iter()
            .filter_map(|name| Some((name.to_string(), token_text(&config[*name])?)))
            .collect();
        let environment = environment(template)?;
        let opening_words = answer_words(&tokenizer, "");
        let words = answer_words(&tokenizer, " ");
        if opening_words.is_empty() || words.is_empty() {
            bail!("the tokenizer has no single-token English words to answer with");
        }
        Ok(TextModel { tokenizer, environment, special, opening_words, words })
    }

    /// Token ids of raw text, special tokens in the text recognised, none added.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        let encoding = self.tokenizer.encode_fast(text, false).map_err(|error| anyhow::anyhow!("{error}"))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// Text of token ids, special tokens kept.
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        self.tokenizer.decode(ids, false).map_err(|error| anyhow::anyhow!("{error}"))
    }

    /// Text and token ids of a chat body after the engine's message normalisation.
    pub fn chat(&self, body: &Value) -> Result<(String, Vec<u32>)> {
        let text = self.render(body)?;
        let ids = self.encode(&text)?;
        Ok((text, ids))
    }

    fn render(&self, body: &Value) -> Result<String> {
        let Some(messages) = body["messages"].as_array() else { bail!("`messages` must be an array") };
        let messages: Vec<Value> = messages.iter().map(normalise_message).collect::<Result<_>>()?;
        let mut context = self.special.clone();
        context.insert("messages".into(), Value::Array(messages));
        if let Some(tools) = body.get("tools").filter(|tools| tools.as_array().is_some_and(|list| !list.is_empty())) {
            context.insert("tools".into(), tools.clone());
        }
        let generation_prompt = body.get("add_generation_prompt").and_then(Value::as_bool).unwrap_or(true);
        context.insert("add_generation_prompt".into(), Value::Bool(generation_prompt));
        if let Some(Value::Object(extra)) = body.get("chat_template_kwargs") {
            context.extend(extra.clone());
        }
        let template = self.environment.get_template("chat")?;
        Ok(template.render(TemplateValue::from(Serde(Value::Object(context))))?)
    }

    /// The answer to a prompt: `count` words drawn by a generator seeded with the prompt's ids and `sample`, so that
    /// every engine gives the same answer to the same prompt. Joined, the texts encode back to the same ids.
    pub fn answer(&self, prompt: &[u32], sample: u32, count: usize) -> Vec<(u32, &str)> {
        let bytes: Vec<u8> = prompt.iter().flat_map(|id| id.to_le_bytes()).collect();
        let mut draw = seed::generator(xxhash_rust::xxh3::xxh3_64_with_seed(&bytes, u64::from(sample)), "answer");
        (0..count)
            .map(|position| {
                let from = if position == 0 { &self.opening_words } else { &self.words };
                let word = &from[draw.random_range(0..from.len())];
                (word.token, word.text.as_str())
            })
            .collect()
    }

    /// The whole answer text for a chat body with `count` tokens, first sample: what a client must receive.
    pub fn expected_chat_answer(&self, body: &Value, count: usize) -> Result<String> {
        let (_, ids) = self.chat(body)?;
        Ok(self.answer(&ids, 0, count).into_iter().map(|(_, text)| text).collect())
    }
}

fn token_text(value: &Value) -> Option<Value> {
    match value {
        Value::String(_) => Some(value.clone()),
        Value::Object(token) => token.get("content").cloned(),
        _ => None,
    }
}

/// Words that are one token each after `lead`.
fn answer_words(tokenizer: &Tokenizer, lead: &str) -> Vec<Word> {
    let single = |word: &&str| {
        let text = format!("{lead}{word}");
        let ids = tokenizer.encode_fast(text.as_str(), false).ok()?.get_ids().to_vec();
        (ids.len() == 1).then(|| Word { token: ids[0], text })
    };
    words::words().iter().filter_map(single).collect()
}

/// Tokens that an image takes in a prompt, about those of one megapixel.
pub const IMAGE_TOKENS: usize = 1024;

/// Names of the images that a chat body refers to, in order, by the hash of the reference.
pub fn image_keys(body: &Value) -> Vec<u64> {
    let messages = body["messages"].as_array().into_iter().flatten();
    let parts = messages.filter_map(|message| message["content"].as_array()).flatten();
    parts.filter_map(|part| Some(image_key(image_reference(part)?))).collect()
}

fn image_reference(part: &Value) -> Option<&str> {
    part["image_url"]["url"].as_str().or(part["image_url"].as_str())
}

fn image_key(reference: &str) -> u64 {
    xxhash_rust::xxh3::xxh3_64(reference.as_bytes())
}

/// Words that stand for what the model sees of an image: the same for the same image, different for others, so that an
/// image's KV is found again and never taken for another's.
fn image_text(reference: &str) -> String {
    let (words, mut draw) = (words::words(), seed::generator(image_key(reference), "image"));
    (0..IMAGE_TOKENS).map(|_| words[draw.random_range(0..words.len())]).collect::<Vec<_>>().join(" ")
}

/// vLLM's rules before the template: null content becomes "", text parts are joined by newline, tool-call arguments
/// given as a string are parsed (anything but an object becomes `{}`), an empty `tool_calls` list is dropped.
fn normalise_message(message: &Value) -> Result<Value> {
    let Some(message) = message.as_object() else { bail!("each message must be an object") };
    if !message.get("role").is_some_and(Value::is_string) {
        bail!("each message needs a `role`");
    }
    let mut message = message.clone();
    let content = match message.get("content") {
        None | Some(Value::Null) => String::new(),
        Some(Value::String(text)) => text.clone(),
        Some(Value::Array(parts)) => text_parts(parts)?,
        Some(_) => bail!("`content` must be a string, an array of parts or null"),
    };
    message.insert("content".into(), Value::String(content));
    match message.get_mut("tool_calls") {
        Some(Value::Array(calls)) if !calls.is_empty() => {
            for call in calls {
                if let Some(arguments) = call.pointer_mut("/function/arguments") {
                    *arguments = parsed_arguments(arguments);
                }
            }
        }
        Some(_) => {
            message.shift_remove("tool_calls");
        }
        None => {}
    }
    Ok(Value::Object(message))
}

fn text_parts(parts: &[Value]) -> Result<String> {
    let text = |part: &Value| match (part["text"].as_str(), image_reference(part)) {
        (Some(text), _) => Ok(text.to_string()),
        (None, Some(reference)) => Ok(image_text(reference)),
        (None, None) => bail!("this simulated model takes text and image_url parts only"),
    };
    Ok(parts.iter().map(text).collect::<Result<Vec<_>>>()?.join("\n"))
}

fn parsed_arguments(arguments: &Value) -> Value {
    let parsed = match arguments {
        Value::String(text) => serde_json::from_str(text).unwrap_or(Value::Null),
        other => other.clone(),
    };
    if parsed.is_object() { parsed } else { Value::Object(Map::new()) }
}

/// A template environment as transformers sets it up: Python methods, `trim_blocks`, `lstrip_blocks`, loop controls,
/// no escaping, `raise_exception` and a `tojson` that spells JSON like Python.
fn environment(template: String) -> Result<Environment<'static>> {
    let mut environment = Environment::new();
    let syntax = minijinja::syntax::SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?;
    environment.set_syntax(syntax);
    environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.set_fuel(Some(20_000_000));
    environment.add_function("raise_exception", |message: String| -> Result<TemplateValue, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, message))
    });
    environment.add_filter("tojson", python_json);
    environment.add_template_owned("chat", template).context("chat template")?;
    Ok(environment)
}

fn python_json(value: TemplateValue) -> Result<TemplateValue, Error> {
    let invalid = |error: serde_json::Error| Error::new(ErrorKind::BadSerialization, error.to_string());
    let mut bytes = Vec::new();
    let mut serializer = serde_json::Serializer::with_formatter(&mut bytes, PythonSpacing);
    value.serialize(&mut serializer).map_err(invalid)?;
    let text = String::from_utf8(bytes).map_err(|error| Error::new(ErrorKind::BadSerialization, error.to_string()))?;
    Ok(TemplateValue::from_safe_string(text))
}

/// `json.dumps` separators: ", " and ": ".
struct PythonSpacing;

impl serde_json::ser::Formatter for PythonSpacing {
    fn begin_array_value<W: ?Sized + std::io::Write>(&mut self, writer: &mut W, first: bool) -> std::io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_key<W: ?Sized + std::io::Write>(&mut self, writer: &mut W, first: bool) -> std::io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_value<W: ?Sized + std::io::Write>(&mut self, writer: &mut W) -> std::io::Result<()> {
        writer.write_all(b": ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn renders_and_encodes_a_chat() {
        let model = TextModel::shipped().unwrap();
        let body = json!({"messages": [{"role": "system", "content": "able about"},
            {"role": "user", "content": [{"type": "text", "text": "above"}, {"type": "text", "text": "zone"}]}]});
        let (text, ids) = model.chat(&body).unwrap();
        assert_eq!(
            text,
            "<|im_start|>system\nable about<|im_end|>\n<|im_start|>user\nabove\nzone<|im_end|>\n<|im_start|>assistant\n"
        );
        assert_eq!(model.decode(&ids).unwrap(), text);
        let special = |text| model.tokenizer.token_to_id(text).unwrap();
        let count = |id| ids.iter().filter(|it| **it == id).count();
        assert_eq!((count(special("<|im_start|>")), count(special("<|im_end|>"))), (3, 2));
    }

    #[test]
    fn answers_encode_back_to_their_own_tokens() {
        let model = TextModel::shipped().unwrap();
        for seed in 0..50u32 {
            let answer = model.answer(&[seed, 7], 0, 40);
            let text: String = answer.iter().map(|(_, text)| *text).collect();
            let ids: Vec<u32> = answer.iter().map(|(id, _)| *id).collect();
            assert_eq!(model.encode(&text).unwrap(), ids, "seed {seed}");
        }
        assert_ne!(model.answer(&[1], 0, 8), model.answer(&[2], 0, 8));
        assert_ne!(model.answer(&[1], 0, 8), model.answer(&[1], 1, 8));
    }

    #[test]
    fn tool_calls_follow_python_spelling() {
        let model = TextModel::shipped().unwrap();
        let body = json!({"messages": [{"role": "assistant", "content": null, "tool_calls": [
            {"type": "function", "function": {"name": "find", "arguments": "{\"a\":[1,2],\"b\":\"<x>\"}"}}]}]});
        let (text, _) = model.chat(&body).unwrap();
        assert!(text.contains("<|tool_call|>find {\"a\": [1, 2], \"b\": \"<x>\"}"), "{text}");
    }
}
