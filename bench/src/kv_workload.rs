//! The KV-event workload of the index benches: fleets of simulated caches and the messages their engines would publish.
//! Everything follows from seeds, so that nothing has to be kept that would be counted as the index's memory.
//!
//! 64 workers, 16 tokens a block, 16 blocks an event, one event a message (a tagged map, as vLLM sends it since 0.24).
//! Token ids are uniform below 150,000, the hardest case for the decoder. Every worker has its own engine hashes. Every
//! worker holds one conversation of 7,000 blocks and four system prompts of 512 blocks, which the conversation does not
//! share; then suffixes of 160 blocks that nobody shares, each under one of the system prompts on a random worker, until
//! there are as many (worker, block) memberships as wanted.

use std::ops::Range;

use infera_router::hash::{BlockHash, prompt_blocks};
use rmp::encode::{write_array_len, write_f64, write_map_len, write_nil, write_str, write_u64, write_uint};

pub const WORKERS: usize = 64;
pub const BLOCK_TOKENS: usize = 16;
pub const EVENT_BLOCKS: usize = 16;
pub const CONVERSATION_BLOCKS: usize = 7_000;
pub const SYSTEM_PROMPTS: usize = 4;
pub const SYSTEM_BLOCKS: usize = 512;
pub const SUFFIX_BLOCKS: usize = 160;
const VOCABULARY: u32 = 150_000;

/// A suffix under a system prompt on one worker; its tokens follow from the seed.
#[derive(Clone, Copy, Debug)]
pub struct Suffix {
    pub worker: usize,
    pub system: usize,
    pub seed: u64,
}

/// One worker's message for the index: a whole payload, as it comes from the socket.
pub type Payload = Vec<u8>;

/// Engine's names of a prompt's blocks, first to last, by its tokens.
pub type Naming = fn(&[u32]) -> Vec<u64>;

pub struct Workload {
    random: fastrand::Rng,
    salts: Vec<u64>,
    conversation: Vec<u32>,
    systems: Vec<Vec<u32>>,
    naming: Option<Naming>,
}

/// `blocks` blocks of random tokens.
fn tokens(seed: u64, blocks: usize) -> Vec<u32> {
    let mut random = fastrand::Rng::with_seed(seed);
    (0..blocks * BLOCK_TOKENS).map(|_| random.u32(0..VOCABULARY)).collect()
}

impl Workload {
    pub fn new(seed: u64) -> Self {
        let mut random = fastrand::Rng::with_seed(seed);
        Self {
            salts: (0..WORKERS).map(|_| random.u64(..)).collect(),
            conversation: tokens(random.u64(..), CONVERSATION_BLOCKS),
            systems: (0..SYSTEM_PROMPTS).map(|_| tokens(random.u64(..), SYSTEM_BLOCKS)).collect(),
            random,
            naming: None,
        }
    }

    /// The same with names that all workers share: what `naming` calls the blocks of a prompt.
    pub fn with_naming(seed: u64, naming: Naming) -> Self {
        Self { naming: Some(naming), ..Self::new(seed) }
    }

    /// The conversation's router hashes: the query of the benches.
    pub fn conversation(&self) -> Vec<BlockHash> {
        prompt_blocks(&self.conversation, BLOCK_TOKENS)
    }

    pub fn conversation_tokens(&self) -> &[u32] {
        &self.conversation
    }

    /// One message that stores blocks of a prompt, whatever of it is there already.
    pub fn store_blocks(&self, worker: usize, prompt: &[u32], blocks: Range<usize>) -> Payload {
        let names = self.names(worker, prompt);
        let parent = blocks.start.checked_sub(1).map(|at| names[at]);
        let tokens = &prompt[blocks.start * BLOCK_TOKENS..blocks.end * BLOCK_TOKENS];
        stored(&names[blocks], parent, tokens).unwrap_or_default()
    }

    /// One message that removes blocks of a prompt, root first.
    pub fn remove_blocks(&self, worker: usize, prompt: &[u32], blocks: Range<usize>) -> Payload {
        removed(&self.names(worker, prompt)[blocks]).unwrap_or_default()
    }

    pub fn store_conversation(&self, worker: usize) -> Vec<Payload> {
        self.store(worker, &self.conversation, 0)
    }

    pub fn store_system(&self, worker: usize, system: usize) -> Vec<Payload> {
        self.store(worker, &self.systems[system], 0)
    }

    pub fn new_suffix(&mut self) -> Suffix {
        let random = &mut self.random;
        Suffix { worker: random.usize(0..WORKERS), system: random.usize(0..SYSTEM_PROMPTS), seed: random.u64(..) }
    }

    /// Takes a random one out of the list.
    pub fn pick(&mut self, suffixes: &mut Vec<Suffix>) -> Suffix {
        let at = self.random.usize(0..suffixes.len());
        suffixes.swap_remove(at)
    }

    fn prompt(&self, suffix: Suffix) -> Vec<u32> {
        let mut prompt = self.systems[suffix.system].clone();
        prompt.extend(tokens(suffix.seed, SUFFIX_BLOCKS));
        prompt
    }

    /// Router hashes of a suffix's whole prompt, its system prompt first.
    pub fn prompt_of(&self, suffix: Suffix) -> Vec<BlockHash> {
        prompt_blocks(&self.prompt(suffix), BLOCK_TOKENS)
    }

    pub fn store_suffix(&self, suffix: Suffix) -> Vec<Payload> {
        self.store(suffix.worker, &self.prompt(suffix), SYSTEM_BLOCKS)
    }

    /// Leaf first, as vLLM evicts.
    pub fn remove_suffix(&self, suffix: Suffix) -> Vec<Payload> {
        let mut names = self.names(suffix.worker, &self.prompt(suffix)).split_off(SYSTEM_BLOCKS);
        names.reverse();
        names.chunks(EVENT_BLOCKS).map(|names| removed(names).unwrap_or_default()).collect()
    }

    /// The engine's own names of a prompt's blocks.
    fn names(&self, worker: usize, prompt: &[u32]) -> Vec<u64> {
        if let Some(naming) = self.naming {
            return naming(prompt);
        }
        let name = |block: &BlockHash| block.0.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ self.salts[worker];
        prompt_blocks(prompt, BLOCK_TOKENS).iter().map(name).collect()
    }

    fn store(&self, worker: usize, prompt: &[u32], from: usize) -> Vec<Payload> {
        let names = self.names(worker, prompt);
        let mut payloads = Vec::new();
        for start in (from..names.len()).step_by(EVENT_BLOCKS) {
            let end = (start + EVENT_BLOCKS).min(names.len());
            let parent = start.checked_sub(1).map(|at| names[at]);
            let tokens = &prompt[start * BLOCK_TOKENS..end * BLOCK_TOKENS];
            payloads.push(stored(&names[start..end], parent, tokens).unwrap_or_default());
        }
        payloads
    }
}

type Encoded = Result<Payload, rmp::encode::ValueWriteError>;

fn batch(fields: u32) -> Encoded {
    let mut out = Payload::new();
    write_array_len(&mut out, 3)?;
    write_f64(&mut out, 1_700_000_000.5)?;
    write_array_len(&mut out, 1)?;
    write_map_len(&mut out, fields)?;
    Ok(out)
}

fn hashes(out: &mut Payload, names: &[u64]) -> Result<(), rmp::encode::ValueWriteError> {
    write_str(out, "block_hashes")?;
    write_array_len(out, names.len() as u32)?;
    names.iter().try_for_each(|name| write_u64(out, *name))
}

fn nil(out: &mut Payload) -> Result<(), rmp::encode::ValueWriteError> {
    write_nil(out).map_err(rmp::encode::ValueWriteError::InvalidMarkerWrite)
}

fn stored(names: &[u64], parent: Option<u64>, tokens: &[u32]) -> Encoded {
    let mut out = batch(9)?;
    write_str(&mut out, "type")?;
    write_str(&mut out, "BlockStored")?;
    hashes(&mut out, names)?;
    write_str(&mut out, "parent_block_hash")?;
    match parent {
        Some(parent) => write_u64(&mut out, parent)?,
        None => nil(&mut out)?,
    }
    write_str(&mut out, "token_ids")?;
    write_array_len(&mut out, tokens.len() as u32)?;
    for token in tokens {
        write_uint(&mut out, u64::from(*token))?;
    }
    write_str(&mut out, "block_size")?;
    write_uint(&mut out, BLOCK_TOKENS as u64)?;
    for absent in ["lora_id", "lora_name"] {
        write_str(&mut out, absent)?;
        nil(&mut out)?;
    }
    write_str(&mut out, "medium")?;
    write_str(&mut out, "GPU")?;
    write_str(&mut out, "group_idx")?;
    write_uint(&mut out, 0)?;
    write_uint(&mut out, 0)?;
    Ok(out)
}

fn removed(names: &[u64]) -> Encoded {
    let mut out = batch(4)?;
    write_str(&mut out, "type")?;
    write_str(&mut out, "BlockRemoved")?;
    hashes(&mut out, names)?;
    write_str(&mut out, "medium")?;
    write_str(&mut out, "GPU")?;
    write_str(&mut out, "group_idx")?;
    write_uint(&mut out, 0)?;
    write_uint(&mut out, 0)?;
    Ok(out)
}
