//! From a rendered text to block hashes, through the prefix cache: only pieces behind the deepest known cut are
//! encoded, and each is encoded once however many block sizes are asked for.

use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use super::ahead::{Ahead, Submit};
use super::cache::{Extension, Patience, Prefix, PrefixCache};
use super::encoder::Encoder;
use super::flights::Flights;
use super::segments::{Piece, Splitter};
use super::stopwatch::{Stage, lap};
use super::{NoBlocks, PromptBlocks, PromptStats, spare};
use crate::limits::{LONG_PIECE_BYTES, SHARD_NEW_TEXT_BYTES};

/// From so many new bytes on, in more than one piece, other encoder threads are asked to help.
const SHARED_BYTES_MIN: usize = 64 << 10;

/// Spreads the names of one text's cuts over block sizes.
const BLOCK_SIZE_FACTOR: u128 = 0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835;

/// A text to be encoded.
#[derive(Debug)]
pub struct Text {
    pub text: String,
    /// Put the model's own ids around it.
    pub with_ends: bool,
    /// Text encoded by itself behind it.
    pub suffix: Option<String>,
    /// Byte offsets in `text`, in order, at which two encodings meet.
    pub cuts: Vec<usize>,
}

/// A text whose known beginning was found; what is left to do is encoding.
#[derive(Debug)]
pub struct Pending {
    text: Text,
    pieces: Arc<[Piece]>,
    starts: Vec<Start>,
}

#[derive(Debug)]
struct Start {
    block_size: usize,
    /// First piece that is not part of `prefix`.
    piece: usize,
    prefix: Prefix,
}

impl Pending {
    /// Bytes of text that must be encoded.
    pub fn new_bytes(&self) -> usize {
        let start = match self.starts.iter().map(|start| start.piece).min() {
            Some(piece) if piece > 0 => self.pieces[piece - 1].range.end,
            _ => 0,
        };
        self.text.text.len() - start + self.text.suffix.as_ref().map_or(0, String::len)
    }

    /// Tokens of the beginning that is known for every block size.
    pub fn known_tokens(&self) -> usize {
        self.starts.iter().map(|start| start.prefix.tokens()).min().unwrap_or(0)
    }
}

/// Encoder, cutter and cache of one model.
pub struct BlockMaker {
    pub encoder: Arc<Encoder>,
    /// Other threads that can be asked to encode, and how many there are.
    volunteers: OnceLock<(usize, Submit)>,
    splitter: Option<Splitter>,
    cache: Option<PrefixCache>,
    flights: Flights,
    /// Drawn at start: names of cuts cannot be computed outside.
    seed: u64,
    found: AtomicU64,
    missed: AtomicU64,
    tokens_reused: AtomicU64,
    tokens_encoded: AtomicU64,
}

impl BlockMaker {
    pub fn new(encoder: Encoder, splitter: Option<Splitter>, cache_bytes: usize) -> Self {
        Self {
            encoder: Arc::new(encoder),
            volunteers: OnceLock::new(),
            cache: splitter.as_ref().and_then(|_| PrefixCache::new(cache_bytes)),
            splitter,
            flights: Flights::default(),
            seed: RandomState::new().hash_one("prompt") & !1,
            found: AtomicU64::new(0),
            missed: AtomicU64::new(0),
            tokens_reused: AtomicU64::new(0),
            tokens_encoded: AtomicU64::new(0),
        }
    }

    /// Lets cold long texts be spread over `threads` other threads; the first call counts.
    pub fn set_volunteers(&self, threads: usize, submit: Submit) {
        let _ = self.volunteers.set((threads, submit));
    }

    /// Whether prompts of this model can be cut and remembered.
    pub fn has_cache(&self) -> bool {
        self.cache.is_some()
    }

    /// Ids of a text in one go, without the cache.
    pub fn ids(&self, text: &Text) -> Result<Vec<u32>, NoBlocks> {
        let mut ids = self.encoder.encode_range(&text.text, 0..text.text.len(), &text.cuts)?;
        if text.with_ends {
            let (before, after) = self.encoder.ends();
            ids = [before, &ids, after].concat();
        }
        if let Some(suffix) = &text.suffix {
            ids.extend(self.suffix_ids(suffix)?);
        }
        Ok(ids)
    }

    /// Whether a text spells an added token; `None` where that cannot be told.
    pub fn has_token(&self, text: &str) -> Option<bool> {
        self.splitter.as_ref().map(|splitter| splitter.has_token(text))
    }

    /// Byte offsets in a text at which two encodings meet, whatever a tokenizer would make of the whole. `apart`: the
    /// engine takes the added tokens out first and counts anew behind each.
    pub fn forced_cuts(&self, text: &str, apart: bool) -> Vec<usize> {
        match &self.splitter {
            Some(splitter) if apart && self.encoder.has_forced_cuts() => splitter
                .stretches(text)
                .flat_map(|stretch| {
                    let cuts = self.encoder.forced_cuts(&text[stretch.clone()]);
                    cuts.into_iter().map(move |cut| stretch.start + cut)
                })
                .collect(),
            _ => self.encoder.forced_cuts(text),
        }
    }

    fn suffix_ids(&self, suffix: &str) -> Result<Vec<u32>, NoBlocks> {
        self.encoder.encode_range(suffix, 0..suffix.len(), &self.encoder.forced_cuts(suffix))
    }

    /// Looks for the deepest known cut, for each block size (tokens per block, not 0).
    pub fn prepare(&self, text: Text, block_sizes: &[usize]) -> Pending {
        let pieces = match (&self.splitter, &self.cache) {
            // Ends in front of a text shift its blocks, so texts with and without them are named apart.
            (Some(splitter), Some(_)) => splitter.pieces(&text.text, &text.cuts, self.seed | u64::from(text.with_ends)),
            _ => vec![Piece { range: 0..text.text.len(), key_at_end: 0 }],
        };
        let start = |block_size: usize| {
            let known = |piece: &Piece| self.cache.as_ref()?.get(key(piece, block_size));
            let deepest = pieces.iter().enumerate().rev().find_map(|(index, piece)| Some((index, known(piece)?)));
            match deepest {
                Some((index, prefix)) => Start { block_size, piece: index + 1, prefix },
                None => Start { block_size, piece: 0, prefix: Prefix::empty() },
            }
        };
        let starts: Vec<Start> = block_sizes.iter().map(|block_size| start(*block_size)).collect();
        Pending { text, pieces: pieces.into(), starts }
    }

    /// Counts what [`BlockMaker::prepare`] has found.
    pub fn count_lookup(&self, pending: &Pending) {
        if self.cache.is_none() {
            return;
        }
        let Some(first) = pending.starts.first() else { return };
        let counter = if first.piece > 0 { &self.found } else { &self.missed };
        counter.fetch_add(1, Ordering::Relaxed);
        self.tokens_reused.fetch_add(first.prefix.tokens() as u64, Ordering::Relaxed);
    }

    /// Encodes what is new, keeps it, and gives the blocks in the order of the block sizes.
    pub fn finish(&self, pending: Pending) -> Result<Vec<PromptBlocks>, NoBlocks> {
        self.finish_as(pending, true)
    }

    /// The same, and neither counts nor keeps anything.
    pub fn finish_unkept(&self, pending: Pending) -> Result<Vec<PromptBlocks>, NoBlocks> {
        self.finish_as(pending, false)
    }

    fn finish_as(&self, pending: Pending, is_kept: bool) -> Result<Vec<PromptBlocks>, NoBlocks> {
        let mark = Instant::now();
        let new_bytes = pending.new_bytes();
        let Pending { text, pieces, starts } = pending;
        let text = Arc::new(text);
        let (before, after) = if text.with_ends { self.encoder.ends() } else { (&[][..], &[][..]) };
        let mut works: Vec<Work> = starts
            .into_iter()
            .map(|start| {
                let mut extension = Extension::of(start.prefix, start.block_size);
                if start.piece == 0 {
                    extension.push(before);
                }
                Work { block_size: start.block_size, next_piece: start.piece, extension }
            })
            .collect();
        let first = works.iter().map(|work| work.next_piece).min().unwrap_or(pieces.len());
        let ahead = match self.volunteers.get() {
            Some((threads, submit)) if new_bytes >= SHARED_BYTES_MIN && first + 1 < pieces.len() => {
                let volunteers = (*threads).min(pieces.len() - first - 1);
                Some(Ahead::start(&self.encoder, &text, &pieces, first, volunteers, submit))
            }
            _ => None,
        };
        // With so little new text it may be a shard that is at work.
        let patience = if new_bytes <= SHARD_NEW_TEXT_BYTES { Patience::GivesUp } else { Patience::Waits };
        let mut encoding = Encoding { text: &text, ahead: ahead.as_deref(), is_kept, mark };
        for (index, piece) in pieces.iter().enumerate().skip(first) {
            self.encode_piece(&mut encoding, index, piece, &mut works)?;
        }
        let mut mark = encoding.mark;
        drop(ahead);
        let suffix = text.suffix.as_ref().map(|suffix| self.suffix_ids(suffix)).transpose()?;
        if let Ok(text) = Arc::try_unwrap(text) {
            spare::give(text.text.into_bytes());
        }
        let finished = works.into_iter().map(|mut work| {
            if let Some(cache) = self.cache.as_ref().filter(|_| is_kept) {
                cache.keep(&mut work.extension, patience);
            }
            work.extension.push(after);
            work.extension.push(suffix.as_deref().unwrap_or_default());
            let (hashes, tokens) = work.extension.finish();
            PromptBlocks { hashes: hashes.into(), tokens }
        });
        let finished = finished.collect();
        lap(Stage::Hash, &mut mark);
        Ok(finished)
    }

    fn encode_piece(
        &self,
        encoding: &mut Encoding<'_>,
        index: usize,
        piece: &Piece,
        works: &mut [Work],
    ) -> Result<(), NoBlocks> {
        let Encoding { text, ahead, is_kept, .. } = *encoding;
        lap(Stage::Hash, &mut encoding.mark);
        let is_long = piece.range.len() >= LONG_PIECE_BYTES;
        let cache = self.cache.as_ref().filter(|_| is_kept);
        let lead = match cache {
            Some(cache) if is_long => {
                let lead = self.flights.lead_or_wait(piece.key_at_end);
                // Whether this thread waited or not: another may have finished the piece since the look-up.
                works.iter_mut().for_each(|work| work.skip_if_known(cache, index, piece));
                lead
            }
            _ => None,
        };
        if works.iter().all(|work| work.next_piece > index) {
            ahead.inspect(|ahead| ahead.skip(index));
            // It may have waited for the thread that encoded it.
            lap(Stage::Encode, &mut encoding.mark);
            return Ok(());
        }
        let ids = match ahead {
            Some(ahead) => ahead.ids(index)?,
            None => self.encoder.encode_range(&text.text, piece.range.clone(), &text.cuts)?,
        };
        lap(Stage::Encode, &mut encoding.mark);
        if is_kept {
            self.tokens_encoded.fetch_add(ids.len() as u64, Ordering::Relaxed);
        }
        for work in works.iter_mut().filter(|work| work.next_piece == index) {
            work.next_piece += 1;
            work.extension.push(&ids);
            if let Some(cache) = cache {
                work.extension.cut(key(piece, work.block_size));
                if is_long {
                    cache.keep(&mut work.extension, Patience::Waits);
                }
            }
        }
        drop(lead);
        Ok(())
    }

    pub fn stats(&self) -> PromptStats {
        let cache = self.cache.as_ref().map(PrefixCache::stats).unwrap_or_default();
        PromptStats {
            prefixes_found: self.found.load(Ordering::Relaxed),
            prefixes_missed: self.missed.load(Ordering::Relaxed),
            tokens_reused: self.tokens_reused.load(Ordering::Relaxed),
            tokens_encoded: self.tokens_encoded.load(Ordering::Relaxed),
            cache_bytes: cache.bytes,
            cache_entries: cache.entries,
            cache_evictions: cache.evictions,
        }
    }
}

/// One prompt that is being encoded.
struct Encoding<'a> {
    text: &'a Text,
    /// Other threads that encode parts of it.
    ahead: Option<&'a Ahead>,
    /// Whether what is new is counted, and kept for later prompts.
    is_kept: bool,
    /// Where the stage at hand began.
    mark: Instant,
}

struct Work {
    block_size: usize,
    next_piece: usize,
    extension: Extension,
}

impl Work {
    fn skip_if_known(&mut self, cache: &PrefixCache, index: usize, piece: &Piece) {
        if self.next_piece != index {
            return;
        }
        if let Some(prefix) = cache.get(key(piece, self.block_size)) {
            cache.keep(&mut self.extension, Patience::Waits);
            self.extension = Extension::of(prefix, self.block_size);
            self.next_piece = index + 1;
        }
    }
}

fn key(piece: &Piece, block_size: usize) -> u128 {
    piece.key_at_end.wrapping_add((block_size as u128).wrapping_mul(BLOCK_SIZE_FACTOR))
}
