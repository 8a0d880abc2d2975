//! Owns what a sequence's blocks become known as, and when: names that make them prefix hits, copies on the host, and the
//! events of both. Never schedules.

use std::ops::Range;

use super::{CacheEvent, Memory, Scheduler, Sequence};
use crate::engine::content::Content;

impl<C: Content> Scheduler<C> {
    /// vLLM: names the blocks that the step being scheduled will fill. What comes by transfer is named when it is there.
    pub(super) fn name_ahead(&mut self, index: usize) {
        let sequence = &self.running[index];
        if self.pool.keeps_copies() && !(sequence.received && sequence.computed < sequence.content.prompt_tokens()) {
            self.name_full(index, sequence.computed + sequence.scheduled);
        }
    }

    /// Names the full blocks among the first `tokens` tokens.
    pub(super) fn name_full(&mut self, index: usize, tokens: usize) {
        if !self.names_blocks {
            return;
        }
        let sequence = &mut self.running[index];
        sequence.content.extend_names(&mut sequence.digests, &self.root, sequence.length, self.block_size);
        let full = tokens / self.block_size;
        let mut run: Option<usize> = None;
        for position in sequence.named..full {
            if self.pool.name(sequence.blocks[position], sequence.digests[position]) {
                run.get_or_insert(position);
                continue;
            }
            // Somebody else stored it meanwhile: share that copy and give ours back, as SGLang's tree does.
            let shared = self.pool.prefix(&sequence.digests[position..=position]);
            self.pool.hold(&shared);
            self.pool.release(&sequence.blocks[position..=position]);
            sequence.blocks[position] = shared[0];
            if let Some(start) = run.take() {
                self.events.push(stored(sequence, start..position, self.block_size, Memory::Device));
            }
        }
        if let Some(start) = run {
            self.events.push(stored(sequence, start..full, self.block_size, Memory::Device));
        }
        sequence.named = sequence.named.max(full);
    }

    /// Writes what has been computed and named through to the host.
    pub(super) fn offer_to_host(&mut self, index: usize) {
        let (Some(host), sequence) = (&mut self.host, &mut self.running[index]) else { return };
        let full = sequence.named.min(sequence.computed / self.block_size);
        if full <= sequence.offered {
            return;
        }
        let mut evicted = Vec::new();
        let offered = std::mem::replace(&mut sequence.offered, full);
        let fresh = host.store(&sequence.digests[offered..full], &mut evicted);
        if !evicted.is_empty() {
            self.events.push(CacheEvent::Removed { memory: Memory::Host, digests: evicted });
        }
        let mut fresh = fresh.iter().peekable();
        let mut run: Option<usize> = None;
        for position in offered..full {
            if fresh.next_if_eq(&&sequence.digests[position]).is_some() {
                run.get_or_insert(position);
            } else if let Some(start) = run.take() {
                self.events.push(stored(sequence, start..position, self.block_size, Memory::Host));
            }
        }
        if let Some(start) = run {
            self.events.push(stored(sequence, start..full, self.block_size, Memory::Host));
        }
    }

    /// Takes a sequence out and gives its blocks back. SGLang's tree learns now what was generated.
    pub(super) fn retire(&mut self, index: usize) {
        self.name_full(index, self.running[index].computed);
        self.offer_to_host(index);
        let sequence = self.running.remove(index);
        self.pool.release(&sequence.blocks);
    }
}

fn stored<C: Content>(
    sequence: &Sequence<C>,
    blocks: Range<usize>,
    block_size: usize,
    memory: Memory,
) -> CacheEvent<C::Name> {
    CacheEvent::Stored {
        memory,
        digests: sequence.digests[blocks.clone()].to_vec(),
        parent: blocks.start.checked_sub(1).map(|parent| sequence.digests[parent]),
        tokens: sequence.content.block_tokens(blocks, block_size),
        salt: sequence.content.salt().map(str::to_owned),
    }
}
