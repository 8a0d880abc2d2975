//! One model's tokenizer and template, loaded once and shared by all shards.

use std::path::{Path, PathBuf};

use anyhow::Context;
use tokenizers::Tokenizer;

use super::json::{JsonResult, Reader};
use super::{Endpoint, EngineRules, NoBlocks, Prompt, PromptBlocks};

/// How a prompter is to behave; the defaults are those of the command line.
#[derive(Clone, Debug, Default)]
pub struct PrompterOptions {
    /// `--allow-request-chat-template`: let a request bring its own `chat_template`.
    pub allow_request_chat_template: bool,
}

/// Tokenizer and template of one model. Immutable, `Send + Sync`: share it, never clone it.
pub struct Prompter {
    tokenizer: Tokenizer,
    options: PrompterOptions,
}

impl Prompter {
    /// Loads a directory or a `tokenizer.json`; files beside it are read too.
    pub fn load(path: &Path, options: PrompterOptions) -> anyhow::Result<Self> {
        let file: PathBuf = if path.is_dir() { path.join("tokenizer.json") } else { path.to_owned() };
        let tokenizer = Tokenizer::from_file(&file)
            .map_err(anyhow::Error::from_boxed)
            .with_context(|| format!("loading {}", file.display()))?;
        Ok(Self { tokenizer, options })
    }

    /// Text and token ids of a body.
    pub fn tokens(&self, endpoint: Endpoint, _engine: EngineRules, body: &[u8]) -> Result<Prompt, NoBlocks> {
        if let Some(prompt) = token_ids(endpoint, body)? {
            return Ok(prompt);
        }
        let _ = (&self.tokenizer, &self.options);
        Err(NoBlocks::NoTemplate)
    }

    /// Block hashes of a body.
    pub fn blocks(
        &self,
        endpoint: Endpoint,
        engine: EngineRules,
        body: &[u8],
        block_size: usize,
    ) -> Result<PromptBlocks, NoBlocks> {
        self.tokens(endpoint, engine, body).map(|prompt| prompt.blocks(block_size))
    }
}

/// The ids of a body whose `prompt` is a non-empty array of token ids. It wins over `messages`.
pub(super) fn token_ids(_endpoint: Endpoint, body: &[u8]) -> Result<Option<Prompt>, NoBlocks> {
    let text = std::str::from_utf8(body).map_err(|_| NoBlocks::BadJson)?;
    let mut reader = Reader::new(text);
    let mut ids = None;
    if reader.peek() != Some(b'{') {
        return Err(NoBlocks::BadJson);
    }
    reader
        .object(|reader, key| if key == "prompt" { id_array(reader).map(|found| ids = found) } else { reader.skip() })
        .and_then(|()| reader.end())
        .map_err(|_| NoBlocks::BadJson)?;
    Ok(ids.map(|ids| Prompt { text: None, ids }))
}

fn id_array(reader: &mut Reader<'_>) -> JsonResult<Option<Vec<u32>>> {
    if reader.peek() != Some(b'[') {
        return reader.skip().map(|()| None);
    }
    let mut ids = Some(Vec::new());
    reader.array(|reader| {
        let id = match reader.peek() {
            Some(b'0'..=b'9') => reader.number()?.parse().ok(),
            _ => reader.skip().map(|()| None)?,
        };
        ids = match (ids.take(), id) {
            (Some(mut ids), Some(id)) => {
                ids.push(id);
                Some(ids)
            }
            _ => None,
        };
        Ok(())
    })?;
    Ok(ids.filter(|ids| !ids.is_empty()))
}
