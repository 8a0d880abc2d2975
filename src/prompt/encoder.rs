//! Text to token ids with the model's own tokenizer, and the ids that go around plain text.
//!
//! Two implementations: `tokenizers` is the reference; `fastokens` takes a fiftieth of its time and is used where it
//! loads the model and agrees with the reference on a set of hard texts at start. Only the one in use stays in memory.

use std::cell::Cell;
use std::ops::Range;

use anyhow::{Context, anyhow};
use tokenizers::Tokenizer;

use super::NoBlocks;
use super::model_files::{ModelFiles, TokenizerSource};
use super::{self_check, tiktoken};
use crate::limits::{ENCODER_LEARNS_BYTES_MAX, SHARD_LEARNS_BYTES_MAX};

/// Text whose encoding shows what a tokenizer puts around any text.
const PROBE: &str = "a";

/// Which implementation encodes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EncoderChoice {
    /// The fast one where it agrees with the reference, else the reference.
    #[default]
    Checked,
    /// The reference, always.
    Reference,
}

enum Implementation {
    Reference(Box<Tokenizer>),
    Fast(Box<fastokens::Tokenizer>),
}

/// A loaded tokenizer. `Send + Sync`; one for all threads.
pub struct Encoder {
    implementation: Implementation,
    /// Ids before and after a text that is encoded with special tokens.
    ends: Ends,
    /// The engine cuts long texts where tiktoken's wrapper does.
    has_forced_cuts: bool,
}

#[derive(Debug, Default, PartialEq, Eq)]
struct Ends {
    before: Vec<u32>,
    after: Vec<u32>,
}

impl Encoder {
    /// Loads tokenizer.json and checks the fast implementation against the reference.
    ///
    /// The reference is loaded, asked and dropped on a thread of its own, so that its memory goes with that thread.
    pub fn load(files: &ModelFiles, choice: EncoderChoice) -> anyhow::Result<Self> {
        let (ends, answers) = on_own_thread(|| {
            let reference = reference(&files.tokenizer)?;
            let texts = self_check::texts(&files.tokenizer.json()?);
            let answer = |text: String| anyhow::Ok((reference_ids(&reference, &text)?, text));
            let answers = texts.into_iter().map(answer).collect::<anyhow::Result<Vec<_>>>()?;
            Ok((ends(&reference, files)?, answers))
        })?;
        let fast = match choice {
            EncoderChoice::Reference => None,
            EncoderChoice::Checked => match on_own_thread(|| fast(&files.tokenizer, &answers)) {
                Ok(fast) => Some(fast),
                Err(error) => {
                    tracing::warn!(
                        tokenizer = %files.tokenizer.path().display(), %error,
                        "the fast encoder is not used for this model; long new prompts take about 50 times as long to encode"
                    );
                    None
                }
            },
        };
        let implementation = match fast {
            Some(fast) => Implementation::Fast(Box::new(fast)),
            None => Implementation::Reference(Box::new(reference(&files.tokenizer)?)),
        };
        Ok(Self { implementation, ends, has_forced_cuts: files.tokenizer.is_tiktoken() })
    }

    /// Name of the implementation in use, for the log and `inspect`.
    pub fn name(&self) -> &'static str {
        match self.implementation {
            Implementation::Reference(_) => "tokenizers",
            Implementation::Fast(_) => "fastokens",
        }
    }

    /// Whether long texts take milliseconds, not hundreds of them.
    pub fn is_fast(&self) -> bool {
        matches!(self.implementation, Implementation::Fast(_))
    }

    /// Ids of a text without anything around it.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, NoBlocks> {
        match &self.implementation {
            Implementation::Reference(tokenizer) => reference_ids(tokenizer, text),
            Implementation::Fast(tokenizer) => {
                learn_from(text.len());
                fast_ids(tokenizer, text)
            }
        }
    }

    /// Text of ids, special tokens included; for people to read.
    pub fn decode(&self, ids: &[u32]) -> Option<String> {
        match &self.implementation {
            Implementation::Reference(tokenizer) => tokenizer.decode(ids, false).ok(),
            Implementation::Fast(tokenizer) => tokenizer.decode(ids, false).ok(),
        }
    }

    pub fn has_forced_cuts(&self) -> bool {
        self.has_forced_cuts
    }

    /// Byte offsets inside a text at which two encodings meet, whatever the tokenizer would make of the whole.
    pub fn forced_cuts(&self, text: &str) -> Vec<usize> {
        if self.has_forced_cuts { tiktoken::forced_cuts(text) } else { Vec::new() }
    }

    /// Ids of a part of a text, each side of a cut encoded by itself. `cuts` are byte offsets in the text, in order.
    pub fn encode_range(&self, text: &str, range: Range<usize>, cuts: &[usize]) -> Result<Vec<u32>, NoBlocks> {
        let first = cuts.partition_point(|cut| *cut <= range.start);
        let inside = cuts[first..].iter().copied().take_while(|cut| *cut < range.end);
        let (mut start, mut ids) = (range.start, Vec::new());
        for cut in inside {
            ids.extend(self.encode(&text[start..cut])?);
            start = cut;
        }
        let last = self.encode(&text[start..range.end])?;
        if ids.is_empty() {
            return Ok(last);
        }
        ids.extend(last);
        Ok(ids)
    }

    /// Ids that stand before, and behind, a text that is encoded with special tokens.
    pub fn ends(&self) -> (&[u32], &[u32]) {
        (&self.ends.before, &self.ends.after)
    }
}

fn reference_ids(tokenizer: &Tokenizer, text: &str) -> Result<Vec<u32>, NoBlocks> {
    let encoding = tokenizer.encode_fast(text, false).map_err(|_| NoBlocks::EncodeFailed)?;
    Ok(encoding.get_ids().to_vec())
}

fn fast_ids(tokenizer: &fastokens::Tokenizer, text: &str) -> Result<Vec<u32>, NoBlocks> {
    tokenizer.encode_with_special_tokens(text, false).map_err(|_| NoBlocks::EncodeFailed)
}

thread_local! {
    /// Bytes of text from which this thread has learned words, and of how many it may.
    static LEARNED: Cell<(usize, usize)> = const { Cell::new((0, SHARD_LEARNS_BYTES_MAX)) };
}

/// This thread does nothing but encode, so it may keep more words than one that also relays.
pub fn only_encodes_here() {
    LEARNED.set((LEARNED.get().0, ENCODER_LEARNS_BYTES_MAX));
}

/// To be called before the fast implementation encodes `bytes` of text.
///
/// It keeps the ids of every word that a thread meets, in a table of the thread's own that doubles up to 64 MiB: a shard
/// would grow by most of a tokenizer, and stand still for 70, then 120 ms, while the table is moved. So a thread
/// forgets its words in time; going back to those of the vocabulary takes 2 ms. There is no other way to say so than
/// the crate's benchmarks have.
fn learn_from(bytes: usize) {
    let (learned, most) = LEARNED.get();
    if learned + bytes > most && learned > 0 {
        fastokens::models::bpe::__bench_reset_thread_caches();
        LEARNED.set((bytes, most));
    } else {
        LEARNED.set((learned + bytes, most));
    }
}

fn reference(source: &TokenizerSource) -> anyhow::Result<Tokenizer> {
    let loaded = match source {
        TokenizerSource::File(path) => Tokenizer::from_file(path).map_err(anyhow::Error::from_boxed),
        TokenizerSource::Tiktoken(files) => Ok(serde_json::from_value(files.tokenizer_json()?)?),
    };
    let mut tokenizer = loaded.with_context(|| format!("loading {}", source.path().display()))?;
    // Limits of a training set-up, not of serving: both engines turn them off.
    tokenizer.with_truncation(None).map_err(anyhow::Error::from_boxed)?.with_padding(None);
    Ok(tokenizer)
}

/// The fast implementation, if it loads the model and gives the reference's answer to every text.
fn fast(source: &TokenizerSource, answers: &[(Vec<u32>, String)]) -> anyhow::Result<fastokens::Tokenizer> {
    without_own_threads();
    let mut fast = fastokens::Tokenizer::from_json(source.json()?).map_err(|error| anyhow!("{error}"))?;
    fast.set_truncation(None);
    fast.set_padding(None);
    for (expected, text) in answers {
        anyhow::ensure!(fast_ids(&fast, text)? == *expected, "it encodes {text:?} otherwise than the reference");
    }
    Ok(fast)
}

/// Runs loading work on a thread that ends with it; a panic of a loader is an error like any other.
pub fn on_own_thread<T: Send>(work: impl FnOnce() -> anyhow::Result<T> + Send) -> anyhow::Result<T> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("model-load".into()).spawn_scoped(scope, work)?;
        thread.join().unwrap_or_else(|_| Err(anyhow!("the loader panicked")))
    })
}

/// The fast implementation spreads long texts over threads of its own, as many as the calling thread may use when
/// it first looks. The router has its own encoder threads, so the first look is made from a thread pinned to one
/// core, which leaves it without any.
fn without_own_threads() {
    let pinned = std::thread::Builder::new().name("encoder-load".into()).spawn(|| {
        if let Ok(allowed) = rustix::thread::sched_getaffinity(None)
            && let Some(core) = (0..rustix::thread::CpuSet::MAX_CPU).find(|core| allowed.is_set(*core))
        {
            let mut one = rustix::thread::CpuSet::new();
            one.set(core);
            // Failing to pin costs extra threads, nothing else.
            let _ = rustix::thread::sched_setaffinity(None, &one);
        }
        fastokens::fanout::threads()
    });
    match pinned.map(|thread| thread.join()) {
        Ok(Ok(1)) => {}
        _ => tracing::warn!("the fast encoder keeps threads of its own beside the encoder pool"),
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
        let encoding = tokenizer.encode_fast(PROBE, with_ends).map_err(anyhow::Error::from_boxed)?;
        anyhow::Ok(encoding.get_ids().to_vec())
    };
    let (plain, full) = (encode(false)?, encode(true)?);
    let extra = full.len().saturating_sub(plain.len());
    let before = (0..=extra).find(|before| full[*before..].starts_with(&plain));
    let before = before.context("the tokenizer's special tokens change the text's own tokens")?;
    Ok(Ends { before: full[..before].to_vec(), after: full[before + plain.len()..].to_vec() })
}
