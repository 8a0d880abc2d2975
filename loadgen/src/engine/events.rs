//! Owns the msgpack form of KV events in each engine's dialect. Never touches sockets or sequence numbers.
//!
//! A payload is always `[timestamp, [event...], dp_rank]`; the dialects differ in how an event is spelled, and in what is
//! told of host memory: SGLang tells as much as of the device's, vLLM's maps are those of an offloading connector with
//! `self_describing_kv_events` (no extra keys), and vLLM's arrays name the blocks and leave their tokens and parent out, as
//! the connector does without that option.

use rmp::encode::{
    ValueWriteError, write_array_len, write_bin, write_f64, write_map_len, write_sint, write_str, write_uint,
};

use super::hash::{Digest, HashForm, WireHash};
use super::scheduler::{CacheEvent, Memory};

/// Whose events (and whose HTTP extras) an engine imitates.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum EngineStyle {
    /// vLLM 0.24 and later: tagged maps, defaults left out, extra keys per block.
    Vllm,
    /// vLLM 0.10 to 0.11: tagged arrays of seven fields.
    VllmArray,
    /// SGLang 0.5.20 and later: tagged maps, signed hashes, `AllBlocksCleared` at the start.
    Sglang,
}

impl EngineStyle {
    /// The `engine` member of a registration record.
    pub fn engine_name(self) -> &'static str {
        match self {
            EngineStyle::Vllm | EngineStyle::VllmArray => "vllm",
            EngineStyle::Sglang => "sglang",
        }
    }

    pub fn is_vllm(self) -> bool {
        self.engine_name() == "vllm"
    }

    /// What events call a memory.
    pub fn medium(self, memory: Memory) -> &'static str {
        match (memory, self.is_vllm()) {
            (Memory::Device, _) => "GPU",
            (Memory::Host, true) => "CPU",
            (Memory::Host, false) => "CPU_PINNED",
        }
    }

    pub fn hash_form(self, bytes: bool) -> HashForm {
        match (self, bytes) {
            (EngineStyle::Sglang, _) => HashForm::HighSigned,
            (_, true) => HashForm::Bytes,
            (_, false) => HashForm::LowUnsigned,
        }
    }
}

/// How one engine spells its events.
#[derive(Clone, Copy, Debug)]
pub struct Dialect {
    pub style: EngineStyle,
    pub hash_form: HashForm,
    pub block_size: usize,
}

impl Dialect {
    /// One batch. `timestamp_seconds` is Unix time.
    pub fn encode(&self, timestamp_seconds: f64, events: &[CacheEvent], rank: u32) -> Vec<u8> {
        let mut payload = Vec::with_capacity(64 + events.len() * 64);
        self.write(&mut payload, timestamp_seconds, events, rank).expect("writing to memory does not fail");
        payload
    }

    fn write(
        &self,
        out: &mut Vec<u8>,
        timestamp: f64,
        events: &[CacheEvent],
        rank: u32,
    ) -> Result<(), ValueWriteError> {
        write_array_len(out, 3)?;
        write_f64(out, timestamp)?;
        write_array_len(out, events.len() as u32)?;
        for event in events {
            match self.style {
                EngineStyle::VllmArray => self.write_array_event(out, event)?,
                EngineStyle::Vllm | EngineStyle::Sglang => self.write_map_event(out, event)?,
            }
        }
        write_uint(out, u64::from(rank))?;
        Ok(())
    }

    fn write_array_event(&self, out: &mut Vec<u8>, event: &CacheEvent) -> Result<(), ValueWriteError> {
        match event {
            CacheEvent::Stored { memory, digests, parent, tokens, .. } => {
                let is_described = *memory == Memory::Device;
                write_array_len(out, 7)?;
                write_str(out, "BlockStored")?;
                self.write_hashes(out, digests)?;
                self.write_parent(out, parent.as_ref().filter(|_| is_described))?;
                write_tokens(out, if is_described { tokens } else { &[] })?;
                write_uint(out, self.block_size as u64)?;
                write_nil(out)?;
                write_str(out, self.style.medium(*memory))
            }
            CacheEvent::Removed { memory, digests } => {
                write_array_len(out, 3)?;
                write_str(out, "BlockRemoved")?;
                self.write_hashes(out, digests)?;
                write_str(out, self.style.medium(*memory))
            }
            CacheEvent::Cleared => {
                write_array_len(out, 1)?;
                write_str(out, "AllBlocksCleared")
            }
        }
    }

    fn write_map_event(&self, out: &mut Vec<u8>, event: &CacheEvent) -> Result<(), ValueWriteError> {
        let vllm = self.style == EngineStyle::Vllm;
        match event {
            CacheEvent::Stored { memory, digests, parent, tokens, salt } => {
                let has_extra_keys = vllm && *memory == Memory::Device;
                write_map_len(out, if vllm { 10 + u32::from(has_extra_keys) } else { 7 + u32::from(salt.is_some()) })?;
                write_tag(out, "BlockStored")?;
                write_str(out, "block_hashes")?;
                self.write_hashes(out, digests)?;
                write_str(out, "parent_block_hash")?;
                self.write_parent(out, parent.as_ref())?;
                write_str(out, "token_ids")?;
                write_tokens(out, tokens)?;
                write_str(out, "block_size")?;
                write_uint(out, self.block_size as u64)?;
                write_str(out, "lora_id")?;
                write_nil(out)?;
                self.write_medium(out, *memory)?;
                if vllm {
                    write_str(out, "lora_name")?;
                    write_nil(out)?;
                    if has_extra_keys {
                        write_extra_keys(out, digests.len(), parent.is_none(), salt.as_deref())?;
                    }
                    write_group(out)?;
                    write_str(out, "kv_cache_spec_kind")?;
                    write_str(out, "full_attention")?;
                } else if let Some(salt) = salt {
                    write_str(out, "cache_salt")?;
                    write_str(out, salt)?;
                }
                Ok(())
            }
            CacheEvent::Removed { memory, digests } => {
                write_map_len(out, if vllm { 4 } else { 3 })?;
                write_tag(out, "BlockRemoved")?;
                write_str(out, "block_hashes")?;
                self.write_hashes(out, digests)?;
                self.write_medium(out, *memory)?;
                if vllm { write_group(out) } else { Ok(()) }
            }
            CacheEvent::Cleared => {
                write_map_len(out, 1)?;
                write_tag(out, "AllBlocksCleared")
            }
        }
    }

    fn write_hashes(&self, out: &mut Vec<u8>, digests: &[Digest]) -> Result<(), ValueWriteError> {
        write_array_len(out, digests.len() as u32)?;
        digests.iter().try_for_each(|digest| write_hash(out, &self.hash_form.spell(digest)))
    }

    fn write_medium(&self, out: &mut Vec<u8>, memory: Memory) -> Result<(), ValueWriteError> {
        write_str(out, "medium")?;
        write_str(out, self.style.medium(memory))
    }

    fn write_parent(&self, out: &mut Vec<u8>, parent: Option<&Digest>) -> Result<(), ValueWriteError> {
        match parent {
            Some(digest) => write_hash(out, &self.hash_form.spell(digest)),
            None => write_nil(out),
        }
    }
}

fn write_nil(out: &mut Vec<u8>) -> Result<(), ValueWriteError> {
    rmp::encode::write_nil(out).map_err(ValueWriteError::InvalidMarkerWrite)
}

fn write_hash(out: &mut Vec<u8>, hash: &WireHash) -> Result<(), ValueWriteError> {
    match hash {
        WireHash::Unsigned(value) => write_uint(out, *value).map(drop),
        WireHash::Signed(value) => write_sint(out, *value).map(drop),
        WireHash::Bytes(bytes) => write_bin(out, bytes),
    }
}

fn write_tag(out: &mut Vec<u8>, tag: &str) -> Result<(), ValueWriteError> {
    write_str(out, "type")?;
    write_str(out, tag)
}

fn write_group(out: &mut Vec<u8>) -> Result<(), ValueWriteError> {
    write_str(out, "group_idx")?;
    write_uint(out, 0).map(drop)
}

/// One list or null per block; a salt is named on the first block of a chain only.
fn write_extra_keys(out: &mut Vec<u8>, blocks: usize, first: bool, salt: Option<&str>) -> Result<(), ValueWriteError> {
    write_str(out, "extra_keys")?;
    write_array_len(out, blocks as u32)?;
    for block in 0..blocks {
        match salt.filter(|_| first && block == 0) {
            Some(salt) => {
                write_array_len(out, 1)?;
                write_str(out, salt)?;
            }
            None => write_nil(out)?,
        }
    }
    Ok(())
}

fn write_tokens(out: &mut Vec<u8>, tokens: &[u32]) -> Result<(), ValueWriteError> {
    write_array_len(out, tokens.len() as u32)?;
    tokens.iter().try_for_each(|token| write_uint(out, u64::from(*token)).map(drop))
}
