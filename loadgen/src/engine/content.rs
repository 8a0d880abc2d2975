//! Owns what a sequence says, as far as scheduling needs it: lengths, names of full blocks, what events tell of them.
//! Never schedules.

use std::fmt::Debug;
use std::hash::Hash;
use std::ops::Range;

use super::hash::{self, Digest};

/// A prompt and the answer to it.
pub trait Content {
    /// Chained identity of one full block: two sequences share a block exactly if they name it alike.
    type Name: Copy + Eq + Hash + Debug;

    /// At least 1.
    fn prompt_tokens(&self) -> usize;

    /// At least 1.
    fn answer_tokens(&self) -> usize;

    /// Appends the names of the full blocks among the first `tokens` tokens that `known` does not have yet. `root`
    /// stands for the parent of a first block on this engine.
    fn extend_names(&self, known: &mut Vec<Self::Name>, root: &Digest, tokens: usize, block_size: usize);

    /// The token ids that an event tells of these blocks.
    fn block_tokens(&self, blocks: Range<usize>, block_size: usize) -> Vec<u32>;

    /// Separates namespaces of equal tokens.
    fn salt(&self) -> Option<&str>;
}

/// Token ids, named as engines name them.
#[derive(Debug)]
pub struct Spelled {
    /// Prompt, then answer.
    tokens: Vec<u32>,
    prompt_length: usize,
    salt: Option<String>,
}

impl Spelled {
    /// `answer` has at least one token.
    pub fn new(prompt: Vec<u32>, answer: &[u32], salt: Option<String>) -> Spelled {
        let (prompt_length, mut tokens) = (prompt.len(), prompt);
        tokens.extend_from_slice(answer);
        Spelled { tokens, prompt_length, salt }
    }
}

impl Content for Spelled {
    type Name = Digest;

    fn prompt_tokens(&self) -> usize {
        self.prompt_length
    }

    fn answer_tokens(&self) -> usize {
        self.tokens.len() - self.prompt_length
    }

    fn extend_names(&self, known: &mut Vec<Digest>, root: &Digest, tokens: usize, block_size: usize) {
        hash::extend_digests(known, root, &self.tokens[..tokens], block_size, self.salt());
    }

    fn block_tokens(&self, blocks: Range<usize>, block_size: usize) -> Vec<u32> {
        self.tokens[blocks.start * block_size..blocks.end * block_size].to_vec()
    }

    fn salt(&self) -> Option<&str> {
        self.salt.as_deref()
    }
}
