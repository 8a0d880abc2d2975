//! Reads what a model directory says about prompts: tokenizer, templates, special tokens, BOS and EOS rules.
//!
//! The only file reader of the prompt side besides the tokenizer itself; runs once, at load.

use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use serde_json::{Map, Value};

use super::tiktoken::TiktokenFiles;

/// Largest companion file that is read, bytes; tokenizer_config.json of large vocabularies takes about 1 MB.
const FILE_BYTES_MAX: u64 = 32 << 20;

/// The named special tokens a template may print; the order is that of transformers.
const SPECIAL_TOKENS: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// Where the tokenizer comes from.
#[derive(Debug)]
pub enum TokenizerSource {
    /// A tokenizer.json.
    File(PathBuf),
    /// Ranks, and what is known about their model.
    Tiktoken(TiktokenFiles),
}

/// What a model directory says about prompts.
#[derive(Debug)]
pub struct ModelFiles {
    pub tokenizer: TokenizerSource,
    /// (name, source); a single unnamed template is called `default`.
    pub templates: Vec<(String, String)>,
    /// (variable, text), only those that are set.
    pub special_tokens: Vec<(String, String)>,
    /// `add_bos_token` and `add_eos_token` where the config states either: they replace the tokenizer's own rule.
    pub adds: Option<AddedEnds>,
    /// First entry of config.json's `architectures`.
    pub architecture: Option<String>,
    /// config.json's `model_type`.
    pub model_type: Option<String>,
    /// The model's own DeepSeek-V4 encoder knows the efforts low, high and max, not high and max alone.
    pub deepseek_v4_has_three_efforts: bool,
}

impl TokenizerSource {
    /// tokenizer.json as a tree; a large one, to be dropped soon.
    pub fn json(&self) -> anyhow::Result<Value> {
        match self {
            TokenizerSource::Tiktoken(files) => files.tokenizer_json(),
            TokenizerSource::File(path) => {
                let bytes = std::fs::read(path).with_context(|| format!("reading {}", path.display()))?;
                serde_json::from_slice(&bytes).with_context(|| format!("reading {}", path.display()))
            }
        }
    }

    /// For the log.
    pub fn path(&self) -> &Path {
        match self {
            TokenizerSource::File(path) => path,
            TokenizerSource::Tiktoken(files) => files.path(),
        }
    }

    pub fn is_tiktoken(&self) -> bool {
        matches!(self, TokenizerSource::Tiktoken(_))
    }
}

/// Whether BOS and EOS go around plain text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AddedEnds {
    pub bos: bool,
    pub eos: bool,
}

impl ModelFiles {
    /// Reads the directory at `path`, or the one around the `tokenizer.json` at `path`.
    pub fn read(path: &Path) -> anyhow::Result<Self> {
        let is_directory = path.is_dir();
        let directory = if is_directory { path } else { path.parent().unwrap_or(Path::new(".")) };
        let file = if is_directory { path.join("tokenizer.json") } else { path.to_owned() };
        let config = json_object(&directory.join("tokenizer_config.json"))?.unwrap_or_default();
        let is_ranks = path.file_name().is_some_and(|name| name == "tiktoken.model");
        let ranks = if file.is_file() && !is_ranks { None } else { TiktokenFiles::read(directory, &config)? };
        let tokenizer = ranks.map_or(TokenizerSource::File(file), TokenizerSource::Tiktoken);
        let map = json_object(&directory.join("special_tokens_map.json"))?.unwrap_or_default();
        let model = json_object(&directory.join("config.json"))?.unwrap_or_default();
        let architectures = model.get("architectures").and_then(|list| list.get(0));
        let flag = |name: &str| config.get(name).and_then(Value::as_bool);
        let adds = match (flag("add_bos_token"), flag("add_eos_token")) {
            (None, None) => None,
            (bos, eos) => Some(AddedEnds { bos: bos.unwrap_or(false), eos: eos.unwrap_or(false) }),
        };
        Ok(Self {
            tokenizer,
            templates: templates(directory, &config)?,
            special_tokens: SPECIAL_TOKENS
                .iter()
                .filter_map(|name| {
                    let text = token_text(config.get(*name)).or_else(|| token_text(map.get(*name)))?;
                    Some(((*name).to_owned(), text))
                })
                .collect(),
            adds,
            architecture: architectures.and_then(Value::as_str).map(str::to_owned),
            model_type: model.get("model_type").and_then(Value::as_str).map(str::to_owned),
            deepseek_v4_has_three_efforts: has_three_efforts(&directory.join("encoding/encoding_dsv4.py"))?,
        })
    }

    /// Text of a special token such as `bos_token`.
    pub fn special_token(&self, name: &str) -> Option<&str> {
        self.special_tokens.iter().find(|(known, _)| known == name).map(|(_, text)| text.as_str())
    }
}

/// As SGLang tells the two kinds of DeepSeek-V4 encoders apart (`chat_encoding.py` of 0.5.18).
fn has_three_efforts(encoder: &Path) -> anyhow::Result<bool> {
    let text = read_text(encoder)?.unwrap_or_default();
    Ok(text.contains("REASONING_EFFORT_PROMPTS") && text.contains("DEFAULT_REASONING_EFFORT"))
}

fn read_text(path: &Path) -> anyhow::Result<Option<String>> {
    let length = match std::fs::metadata(path) {
        Ok(metadata) => metadata.len(),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error).with_context(|| format!("reading {}", path.display())),
    };
    if length > FILE_BYTES_MAX {
        bail!("{} is larger than {FILE_BYTES_MAX} bytes", path.display());
    }
    std::fs::read_to_string(path).map(Some).with_context(|| format!("reading {}", path.display()))
}

fn json_object(path: &Path) -> anyhow::Result<Option<Map<String, Value>>> {
    let Some(text) = read_text(path)? else { return Ok(None) };
    serde_json::from_str(&text).map(Some).with_context(|| format!("reading {}", path.display()))
}

/// A token is a string, or an object with its text in `content`.
fn token_text(value: Option<&Value>) -> Option<String> {
    let value = value?;
    value.as_str().or_else(|| value.get("content")?.as_str()).map(str::to_owned)
}

/// A template file wins over the config's member, as in transformers; further named templates lie in a directory.
fn templates(directory: &Path, config: &Map<String, Value>) -> anyhow::Result<Vec<(String, String)>> {
    let mut found = Vec::new();
    if let Some(source) = read_text(&directory.join("chat_template.jinja"))? {
        found.push(("default".to_owned(), source));
        if let Ok(entries) = std::fs::read_dir(directory.join("additional_chat_templates")) {
            for entry in entries {
                let path = entry?.path();
                let name = path.file_stem().and_then(|stem| stem.to_str()).map(str::to_owned);
                if let (Some(name), Some("jinja")) = (name, path.extension().and_then(|end| end.to_str())) {
                    found.extend(read_text(&path)?.map(|source| (name, source)));
                }
            }
        }
        return Ok(found);
    }
    match config.get("chat_template") {
        Some(Value::String(source)) => found.push(("default".to_owned(), source.clone())),
        Some(Value::Array(entries)) => {
            for entry in entries {
                let member = |name: &str| entry.get(name).and_then(Value::as_str).map(str::to_owned);
                found.extend(member("name").zip(member("template")));
            }
        }
        _ => {}
    }
    Ok(found)
}
