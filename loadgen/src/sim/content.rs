//! Owns contents without token ids: names of blocks, and lengths. Equal names stand for equal tokens and equal beginnings.

use std::ops::Range;
use std::sync::Arc;

use crate::engine::content::Content;
use crate::engine::hash::Digest;
use crate::seed::mixed;

/// A prompt and its answer by the names of their full blocks.
#[derive(Clone, Debug)]
pub struct Named {
    names: Arc<[u64]>,
    prompt_tokens: usize,
    answer_tokens: usize,
}

impl Named {
    /// `names` has one entry for each full block of prompt and answer together.
    pub fn new(names: impl Into<Arc<[u64]>>, prompt_tokens: usize, answer_tokens: usize) -> Named {
        Named { names: names.into(), prompt_tokens, answer_tokens }
    }

    /// Names of the prompt's full blocks.
    pub fn prompt_names(&self, block_size: usize) -> &[u64] {
        &self.names[..self.prompt_tokens / block_size]
    }

    /// The blocks of the prompt that a cache can save: the last token is always computed.
    pub fn reusable_names(&self, block_size: usize) -> &[u64] {
        &self.names[..(self.prompt_tokens - 1) / block_size]
    }

    /// The same prompt answered by one token, as prefill engines do.
    pub fn for_prefill(self) -> Named {
        Named { answer_tokens: 1, ..self }
    }

    /// Names of all blocks, the answer's included.
    pub fn names(&self) -> &[u64] {
        &self.names
    }

    /// Two tokens stand for a block in an event: those who hash tokens get distinct ones for distinct names.
    pub fn spell(names: &[u64]) -> impl Iterator<Item = u32> + '_ {
        names.iter().flat_map(|name| [*name as u32, (*name >> 32) as u32])
    }

    /// Tokens by which [`Named::spell`] stands for a block.
    pub const SPELLED_TOKENS: usize = 2;
}

impl Content for Named {
    type Name = u64;

    fn prompt_tokens(&self) -> usize {
        self.prompt_tokens
    }

    fn answer_tokens(&self) -> usize {
        self.answer_tokens
    }

    fn extend_names(&self, known: &mut Vec<u64>, _: &Digest, tokens: usize, block_size: usize) {
        let wanted = tokens / block_size;
        if wanted > known.len() {
            known.extend_from_slice(&self.names[known.len()..wanted]);
        }
    }

    fn block_tokens(&self, blocks: Range<usize>, _: usize) -> Vec<u32> {
        Named::spell(&self.names[blocks]).collect()
    }

    fn salt(&self) -> Option<&str> {
        None
    }
}

/// A text that grows by segments. Two texts share a block exactly if the same segments fill it at the same offsets and
/// they share everything before it.
#[derive(Clone, Debug)]
pub struct Path {
    block_size: usize,
    tokens: usize,
    names: Vec<u64>,
    /// Digest of what the open block holds so far.
    open: u64,
}

impl Path {
    pub fn new(block_size: usize) -> Path {
        Path { block_size, tokens: 0, names: Vec::new(), open: 0 }
    }

    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Appends a whole segment, named by a number that says its content.
    pub fn append(&mut self, segment: u64, tokens: usize) {
        let mut offset = 0;
        while offset < tokens {
            let room = self.block_size - self.tokens % self.block_size;
            let part = room.min(tokens - offset);
            self.open = mixed(mixed(self.open, segment), (offset as u64) << 32 | part as u64);
            (offset, self.tokens) = (offset + part, self.tokens + part);
            if part == room {
                // The open digest already hangs on the block before: it begins with its name.
                self.names.push(self.open);
            }
        }
    }

    /// The text so far as a prompt, and what it is answered with; the answer becomes part of the text.
    pub fn ask(&mut self, answer_segment: u64, answer_tokens: usize) -> Named {
        let prompt_tokens = self.tokens;
        self.append(answer_segment, answer_tokens);
        Named::new(self.names.clone(), prompt_tokens, answer_tokens)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_share_blocks_up_to_where_they_part_and_never_again() {
        let names = |segments: &[(u64, usize)]| {
            let mut path = Path::new(16);
            segments.iter().for_each(|(segment, tokens)| path.append(*segment, *tokens));
            path.names
        };
        let shared = |left: &[u64], right: &[u64]| left.iter().zip(right).take_while(|(l, r)| l == r).count();
        let (left, right) = (names(&[(1, 40), (2, 40), (9, 64)]), names(&[(1, 40), (3, 40), (9, 64)]));
        assert_eq!((left.len(), shared(&left, &right)), (9, 2));
        assert!(left[2..].iter().all(|name| !right.contains(name)), "equal segments behind a difference share nothing");
        assert_eq!(shared(&left, &names(&[(1, 40), (2, 24)])), 4);
        // The same segment in one piece or reached by appending twice is the same text.
        let mut path = Path::new(16);
        path.append(1, 40);
        let first = path.ask(2, 40);
        assert_eq!((first.prompt_tokens(), first.answer_tokens(), first.prompt_names(16).len()), (40, 40, 2));
        assert_eq!(shared(first.names(), &left), 5);
        path.append(9, 64);
        assert_eq!(path.names, left);
    }

    #[test]
    fn the_last_token_of_a_prompt_is_never_saved() {
        let content = Named::new(vec![1, 2, 3], 32, 16);
        assert_eq!((content.prompt_names(16), content.reusable_names(16)), (&[1, 2][..], &[1][..]));
        assert_eq!(Named::new(vec![1, 2], 33, 1).reusable_names(16), [1, 2]);
    }
}
