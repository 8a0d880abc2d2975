//! Text to token ids with the model's own tokenizer, and the ids that go around plain text.

use anyhow::Context;
use tokenizers::Tokenizer;

use super::NoBlocks;
use super::model_files::ModelFiles;

/// Text whose encoding shows what a tokenizer puts around any text.
const PROBE: &str = "a";

/// A loaded tokenizer. `Send + Sync`; one for all threads.
pub struct Encoder {
    tokenizer: Tokenizer,
    /// Ids before and after a text that is encoded with special tokens.
    ends: Ends,
}

#[derive(Debug, Default, PartialEq, Eq)]
struct Ends {
    before: Vec<u32>,
    after: Vec<u32>,
}

impl Encoder {
    pub fn load(files: &ModelFiles) -> anyhow::Result<Self> {
        let path = &files.tokenizer;
        let mut tokenizer = Tokenizer::from_file(path)
            .map_err(anyhow::Error::from_boxed)
            .with_context(|| format!("loading {}", path.display()))?;
        // Limits of a training set-up, not of serving: both engines turn them off.
        tokenizer.with_truncation(None).map_err(anyhow::Error::from_boxed)?.with_padding(None);
        let ends = ends(&tokenizer, files)?;
        Ok(Self { tokenizer, ends })
    }

    /// Ids of a text; `with_ends` adds what the model's files put around a plain text.
    pub fn encode(&self, text: &str, with_ends: bool) -> Result<Vec<u32>, NoBlocks> {
        let encoding = self.tokenizer.encode_fast(text, false).map_err(|_| NoBlocks::EncodeFailed)?;
        let ids = encoding.get_ids();
        if !with_ends {
            return Ok(ids.to_vec());
        }
        Ok([&self.ends.before[..], ids, &self.ends.after[..]].concat())
    }
}

/// The config's own words where it has any, else what the tokenizer's post-processor does to a probe.
fn ends(tokenizer: &Tokenizer, files: &ModelFiles) -> anyhow::Result<Ends> {
    if let Some(adds) = files.adds {
        let id = |wanted: bool, name: &str| {
            let text = files.special_token(name).filter(|_| wanted);
            text.and_then(|text| tokenizer.token_to_id(text)).into_iter().collect()
        };
        return Ok(Ends { before: id(adds.bos, "bos_token"), after: id(adds.eos, "eos_token") });
    }
    let encode = |with_ends| {
        tokenizer
            .encode_fast(PROBE, with_ends)
            .map(|encoding| encoding.get_ids().to_vec())
            .map_err(anyhow::Error::from_boxed)
    };
    let (plain, full) = (encode(false)?, encode(true)?);
    let extra = full.len().saturating_sub(plain.len());
    let before = (0..=extra).find(|before| full[*before..].starts_with(&plain));
    let before = before.context("the tokenizer's special tokens change the text's own tokens")?;
    Ok(Ends { before: full[..before].to_vec(), after: full[before + plain.len()..].to_vec() })
}
