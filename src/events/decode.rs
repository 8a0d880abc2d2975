//! Batches -> events. A batch is `[timestamp, [event…], dp_rank?]`; an event is a tagged array (vLLM before 0.24, SGLang
//! before 0.5.20) or a tagged map (since). A bad event is skipped and counted by reason, the rest of its batch is applied,
//! in order. Owns reusable buffers, so that a batch costs no allocation once they have grown; never trusts a length.
//!
//! Source of the shapes: recordings of 12 vLLM and SGLang releases under `tests/fixtures/kv-events`.

use xxhash_rust::xxh3::Xxh3;

use super::msgpack::{Cursor, Head};
use super::{BatchError, CopyKey, EngineHash, Event, Medium, SkipReason, Stored};
use crate::limits::{BLOCK_TOKENS_MAX, EVENT_BLOCKS_MAX};

/// What became of one batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    /// Events handed to the caller.
    pub applied: u32,
    pub skipped: [u32; SkipReason::COUNT],
    /// Set when the batch could not be read to its end; the events before stay applied.
    pub error: Option<BatchError>,
}

impl Summary {
    pub fn skipped_total(&self) -> u32 {
        self.skipped.iter().sum()
    }
}

/// Gets names that an event is about.
type Announce<'a> = dyn Fn(&[EngineHash]) + 'a;

/// Decodes batches; holds nothing but buffers.
#[derive(Default)]
pub struct Decoder {
    hashes: Vec<EngineHash>,
    sorted: Vec<EngineHash>,
    tokens: Vec<u32>,
    identities: Vec<u64>,
}

/// Fields of one event; slices are raw msgpack values.
#[derive(Default)]
struct Fields<'a> {
    tag: Option<&'a [u8]>,
    has_hashes: bool,
    has_tokens: bool,
    parent: Option<EngineHash>,
    block_size: Option<u64>,
    lora_id: Option<&'a [u8]>,
    lora_name: Option<&'a [u8]>,
    cache_salt: Option<&'a [u8]>,
    extra_keys: Option<&'a [u8]>,
    medium: Option<Medium>,
    group: Option<u16>,
    is_sparse: bool,
    is_map: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Field {
    Hashes,
    Parent,
    Tokens,
    BlockSize,
    LoraId,
    Medium,
    LoraName,
    ExtraKeys,
    CacheSalt,
    Group,
    SpecKind,
    Other,
}

const STORED_FIELDS: [Field; 10] = [
    Field::Hashes,
    Field::Parent,
    Field::Tokens,
    Field::BlockSize,
    Field::LoraId,
    Field::Medium,
    Field::LoraName,
    Field::ExtraKeys,
    Field::Group,
    Field::SpecKind,
];
const REMOVED_FIELDS: [Field; 3] = [Field::Hashes, Field::Medium, Field::Group];

/// A skipped event, or a payload that cannot be read on.
enum Fault {
    Skip(SkipReason),
    Batch(BatchError),
}

impl From<BatchError> for Fault {
    fn from(error: BatchError) -> Self {
        Fault::Batch(error)
    }
}

impl From<SkipReason> for Fault {
    fn from(reason: SkipReason) -> Self {
        Fault::Skip(reason)
    }
}

/// Data-parallel rank named by the batch itself. Costs a walk over the whole payload: only for workers with ranks.
pub fn rank(payload: &[u8]) -> Result<Option<u32>, BatchError> {
    let mut cursor = Cursor::new(payload);
    let Head::Array(length) = cursor.head()? else { return Err(BatchError::NotABatch) };
    if length < 3 {
        return Ok(None);
    }
    cursor.skip()?;
    cursor.skip()?;
    Ok(match cursor.head()? {
        Head::Unsigned(rank) => u32::try_from(rank).ok(),
        _ => None,
    })
}

impl Decoder {
    /// Decodes one batch and hands each event to `each`, in the order of the wire.
    pub fn decode(&mut self, payload: &[u8], mut each: impl FnMut(Event<'_>)) -> Summary {
        self.decode_into(payload, &mut (), |(), _| {}, |(), event| each(event))
    }

    /// The same for a receiver that gains by knowing the names of an event early: `announce` gets them as soon as they are
    /// read, before the token ids, which take most of the time. What was announced may still turn out to be a bad event.
    pub fn decode_into<R>(
        &mut self,
        payload: &[u8],
        receiver: &mut R,
        announce: impl Fn(&R, &[EngineHash]),
        mut each: impl FnMut(&mut R, Event<'_>),
    ) -> Summary {
        let mut summary = Summary::default();
        if let Err(error) = self.batch(payload, &mut summary, receiver, &announce, &mut each) {
            summary.error = Some(error);
        }
        summary
    }

    fn batch<R>(
        &mut self,
        payload: &[u8],
        summary: &mut Summary,
        receiver: &mut R,
        announce: &impl Fn(&R, &[EngineHash]),
        each: &mut impl FnMut(&mut R, Event<'_>),
    ) -> Result<(), BatchError> {
        let mut cursor = Cursor::new(payload);
        match cursor.head()? {
            Head::Array(length) if length >= 2 => cursor.skip()?,
            _ => return Err(BatchError::NotABatch),
        }
        let Head::Array(events) = cursor.head()? else { return Err(BatchError::NotABatch) };
        for _ in 0..events {
            // Events are read straight through; only a bad one is walked a second time, to find its end.
            let start = cursor;
            match self.event(&mut cursor, &|names| announce(receiver, names)) {
                Ok(event) => {
                    summary.applied += 1;
                    each(receiver, event);
                }
                Err(Fault::Skip(reason)) => {
                    cursor = start;
                    cursor.skip()?;
                    summary.skipped[reason as usize] += 1;
                }
                Err(Fault::Batch(error)) => return Err(error),
            }
        }
        Ok(())
    }

    fn event(&mut self, cursor: &mut Cursor<'_>, announce: &Announce<'_>) -> Result<Event<'_>, Fault> {
        self.hashes.clear();
        self.tokens.clear();
        self.identities.clear();
        let mut fields = Fields::default();
        match cursor.head()? {
            Head::Array(length) => self.array_event(cursor, length, &mut fields, announce)?,
            Head::Map(length) => self.map_event(cursor, length, &mut fields, announce)?,
            _ => return Err(SkipReason::Malformed.into()),
        }
        match fields.tag {
            Some(b"BlockStored") => self.stored(&fields),
            Some(b"BlockRemoved") => self.removed(&fields),
            Some(b"AllBlocksCleared") => Ok(Event::Cleared),
            _ => Err(SkipReason::UnknownTag.into()),
        }
    }

    fn array_event<'a>(
        &mut self,
        cursor: &mut Cursor<'a>,
        length: usize,
        fields: &mut Fields<'a>,
        announce: &Announce<'_>,
    ) -> Result<(), Fault> {
        if length == 0 {
            return Err(SkipReason::UnknownTag.into());
        }
        let Head::Str(tag) = cursor.head()? else { return Err(SkipReason::UnknownTag.into()) };
        fields.tag = Some(tag);
        let order: &[Field] = match tag {
            b"BlockStored" => &STORED_FIELDS,
            b"BlockRemoved" => &REMOVED_FIELDS,
            _ => &[],
        };
        for position in 0..length - 1 {
            self.field(cursor, order.get(position).copied().unwrap_or(Field::Other), fields, announce)?;
        }
        Ok(())
    }

    fn map_event<'a>(
        &mut self,
        cursor: &mut Cursor<'a>,
        length: usize,
        fields: &mut Fields<'a>,
        announce: &Announce<'_>,
    ) -> Result<(), Fault> {
        fields.is_map = true;
        for _ in 0..length {
            let Head::Str(name) = cursor.head()? else { return Err(SkipReason::Malformed.into()) };
            let field = match name {
                b"type" => {
                    let Head::Str(tag) = cursor.head()? else { return Err(SkipReason::UnknownTag.into()) };
                    fields.tag = Some(tag);
                    continue;
                }
                b"block_hashes" => Field::Hashes,
                b"parent_block_hash" => Field::Parent,
                b"token_ids" => Field::Tokens,
                b"block_size" => Field::BlockSize,
                b"lora_id" => Field::LoraId,
                b"medium" => Field::Medium,
                b"lora_name" => Field::LoraName,
                b"extra_keys" => Field::ExtraKeys,
                b"cache_salt" => Field::CacheSalt,
                b"group_idx" => Field::Group,
                b"kv_cache_spec_kind" => Field::SpecKind,
                _ => Field::Other,
            };
            self.field(cursor, field, fields, announce)?;
        }
        Ok(())
    }

    fn field<'a>(
        &mut self,
        cursor: &mut Cursor<'a>,
        field: Field,
        fields: &mut Fields<'a>,
        announce: &Announce<'_>,
    ) -> Result<(), Fault> {
        match field {
            Field::Hashes => {
                fields.has_hashes = self.read_hashes(cursor)?;
                announce(&self.hashes);
            }
            Field::Tokens => fields.has_tokens = self.read_tokens(cursor)?,
            Field::Parent => {
                fields.parent = optional_hash(cursor)?;
                announce(fields.parent.as_slice());
            }
            Field::BlockSize => match cursor.head()? {
                Head::Unsigned(size) => fields.block_size = Some(size),
                Head::Nil => {}
                Head::Negative(_) => return Err(SkipReason::TokenCount.into()),
                _ => return Err(SkipReason::Malformed.into()),
            },
            Field::LoraId => fields.lora_id = not_nil(cursor.raw()?),
            Field::LoraName => fields.lora_name = not_nil(cursor.raw()?),
            Field::CacheSalt => fields.cache_salt = not_nil(cursor.raw()?),
            Field::ExtraKeys => fields.extra_keys = not_nil(cursor.raw()?),
            Field::Medium => match cursor.head()? {
                // An empty name is what an absent one is: the device.
                Head::Str(name) if !name.is_empty() => fields.medium = Some(Medium::parse(name)),
                Head::Nil | Head::Str(_) => {}
                _ => return Err(SkipReason::Malformed.into()),
            },
            Field::Group => match cursor.head()? {
                Head::Nil => {}
                Head::Unsigned(group) if group < u64::from(CopyKey::NO_GROUP) => fields.group = Some(group as u16),
                _ => return Err(SkipReason::Malformed.into()),
            },
            Field::SpecKind => match cursor.head()? {
                Head::Nil | Head::Str(b"full_attention" | b"mla_attention" | b"sink_full_attention") => {}
                Head::Array(_) | Head::Map(_) => return Err(SkipReason::Malformed.into()),
                _ => fields.is_sparse = true,
            },
            Field::Other => cursor.skip()?,
        }
        Ok(())
    }

    fn read_hashes(&mut self, cursor: &mut Cursor<'_>) -> Result<bool, Fault> {
        let length = match cursor.head()? {
            Head::Nil => return Ok(false),
            Head::Array(length) if length <= EVENT_BLOCKS_MAX => length,
            _ => return Err(SkipReason::Malformed.into()),
        };
        // Every element takes a byte at least, so this allocates by what is there, not by what is claimed.
        self.hashes.clear();
        self.hashes.reserve(length.min(cursor.remaining().len()));
        let read = cursor.wide_numbers(length, |name| self.hashes.push(EngineHash(name)));
        for _ in read..length {
            let hash = optional_hash(cursor)?.ok_or(SkipReason::Malformed)?;
            self.hashes.push(hash);
        }
        Ok(true)
    }

    fn read_tokens(&mut self, cursor: &mut Cursor<'_>) -> Result<bool, Fault> {
        let length = match cursor.head()? {
            Head::Nil => return Ok(false),
            Head::Array(length) => length,
            _ => return Err(SkipReason::Malformed.into()),
        };
        self.tokens.clear();
        self.tokens.reserve(length.min(cursor.remaining().len()));
        cursor.numbers(length, &mut self.tokens);
        for _ in self.tokens.len()..length {
            let token = match cursor.head()? {
                Head::Array(width) if width >= 1 => bigram_token(cursor, width)?,
                head => token(head)?,
            };
            self.tokens.push(token);
        }
        Ok(true)
    }

    fn stored(&mut self, fields: &Fields<'_>) -> Result<Event<'_>, Fault> {
        if fields.is_sparse {
            return Err(SkipReason::SparseGroup.into());
        }
        let (true, true, Some(block_size)) = (fields.has_hashes, fields.has_tokens, fields.block_size) else {
            return Err(SkipReason::MissingField.into());
        };
        let blocks = self.hashes.len();
        if blocks == 0 {
            return Err(SkipReason::NoBlocks.into());
        }
        let block_size = usize::try_from(block_size).unwrap_or(usize::MAX);
        if block_size == 0 || block_size > BLOCK_TOKENS_MAX || blocks * block_size != self.tokens.len() {
            return Err(SkipReason::TokenCount.into());
        }
        if self.has_hash_twice(fields.parent) {
            return Err(SkipReason::HashTwice.into());
        }
        self.read_identities(fields, blocks)?;
        Ok(Event::Stored(Stored {
            hashes: &self.hashes,
            parent: fields.parent,
            tokens: &self.tokens,
            block_size,
            copy: fields.copy(),
            identities: &self.identities,
            may_report_hits: fields.is_map && fields.group.is_some(),
        }))
    }

    fn removed(&mut self, fields: &Fields<'_>) -> Result<Event<'_>, Fault> {
        if !fields.has_hashes {
            return Err(SkipReason::MissingField.into());
        }
        Ok(Event::Removed { hashes: &self.hashes, copy: fields.copy() })
    }

    /// Whether the event names one hash twice, or a block as its own ancestor.
    fn has_hash_twice(&mut self, parent: Option<EngineHash>) -> bool {
        // More names than this would meet in those bits by chance, as often as not.
        if self.hashes.len() <= 64 && !self.may_have_hash_twice(parent) {
            return false;
        }
        if let Some(parent) = parent
            && self.hashes.contains(&parent)
        {
            return true;
        }
        // Short events are the rule, and comparing all pairs of 32 is cheaper than sorting them.
        if self.hashes.len() <= 32 {
            return self.hashes.iter().enumerate().any(|(at, hash)| self.hashes[..at].contains(hash));
        }
        self.sorted.clear();
        self.sorted.extend_from_slice(&self.hashes);
        self.sorted.sort_unstable();
        self.sorted.windows(2).any(|pair| pair[0] == pair[1])
    }

    /// The same by a few bits of each name: says no to nearly every event that has none twice, at the cost of one look at each.
    fn may_have_hash_twice(&self, parent: Option<EngineHash>) -> bool {
        const WORDS: usize = 32;
        let mut seen = [0u64; WORDS];
        let mut is_seen = 0;
        for name in self.hashes.iter().chain(&parent) {
            let bit = (name.0.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 53) as usize;
            let word = &mut seen[bit / 64];
            is_seen |= *word >> (bit % 64) & 1;
            *word |= 1 << (bit % 64);
        }
        is_seen == 1
    }

    /// Digests of adapter, salt and image keys, block by block; leaves the list empty when there are none.
    fn read_identities(&mut self, fields: &Fields<'_>, blocks: usize) -> Result<(), Fault> {
        let adapter = fields.lora_name.or(fields.lora_id);
        let (mut keys, listed) = match fields.extra_keys.map(|raw| (Cursor::new(raw), raw)) {
            None => (None, 0),
            Some((mut cursor, raw)) => match cursor.head()? {
                Head::Array(0) => (None, 0),
                Head::Array(length) => (Some(cursor), length),
                // Not a list: one key for every block, so that it can never pass for none.
                _ => {
                    let digest = identity(adapter, fields.cache_salt, Some(Cursor::new(raw)), 1)?;
                    self.identities.resize(blocks, digest);
                    return Ok(());
                }
            },
        };
        if keys.is_some() && listed < blocks {
            return Err(SkipReason::ExtraKeys.into());
        }
        if keys.is_none() && adapter.is_none() && fields.cache_salt.is_none() {
            return Ok(());
        }
        for _ in 0..blocks {
            let digest = match keys.as_mut() {
                None => identity(adapter, fields.cache_salt, None, 0)?,
                Some(cursor) => block_identity(adapter, fields.cache_salt, cursor.raw()?)?,
            };
            self.identities.push(digest);
        }
        if self.identities.iter().all(|digest| *digest == 0) {
            self.identities.clear();
        }
        Ok(())
    }
}

impl Fields<'_> {
    fn copy(&self) -> CopyKey {
        CopyKey { medium: self.medium.unwrap_or(Medium::DEVICE), group: self.group.unwrap_or(CopyKey::NO_GROUP) }
    }
}

/// Digest of one block's entry of `extra_keys` together with what the event says for all its blocks.
fn block_identity(adapter: Option<&[u8]>, salt: Option<&[u8]>, raw: &[u8]) -> Result<u64, Fault> {
    let mut cursor = Cursor::new(raw);
    match cursor.head()? {
        Head::Nil | Head::Array(0) => Ok(identity(adapter, salt, None, 0)?),
        Head::Array(length) => Ok(identity(adapter, salt, Some(cursor), length)?),
        _ => Ok(identity(adapter, salt, Some(Cursor::new(raw)), 1)?),
    }
}

/// Digest over the distinct identity keys of a block, each as its msgpack bytes; 0 when there are none. Engines repeat the
/// adapter's name and the salt inside `extra_keys`: each counts once, so both spellings are one identity.
fn identity(
    adapter: Option<&[u8]>,
    salt: Option<&[u8]>,
    keys: Option<Cursor<'_>>,
    length: usize,
) -> Result<u64, BatchError> {
    if adapter.is_none() && salt.is_none() && length == 0 {
        return Ok(0);
    }
    let mut hasher = Xxh3::new();
    for fixed in [adapter, salt].into_iter().flatten() {
        hasher.update(fixed);
    }
    if let Some(mut cursor) = keys {
        for _ in 0..length {
            let key = cursor.raw()?;
            if Some(key) != adapter && Some(key) != salt {
                hasher.update(key);
            }
        }
    }
    // 0 stands for "plain"; a digest that happens to be 0 must not.
    Ok(hasher.digest().max(1))
}

fn not_nil(raw: &[u8]) -> Option<&[u8]> {
    (raw != [0xc0]).then_some(raw)
}

fn optional_hash(cursor: &mut Cursor<'_>) -> Result<Option<EngineHash>, Fault> {
    Ok(match cursor.head()? {
        Head::Nil => None,
        Head::Unsigned(value) => Some(EngineHash(value)),
        Head::Negative(value) => Some(EngineHash(value as u64)),
        Head::Bin(bytes) | Head::Str(bytes) => Some(EngineHash::from_bytes(bytes)),
        _ => return Err(SkipReason::Malformed.into()),
    })
}

fn token(head: Head<'_>) -> Result<u32, Fault> {
    match head {
        Head::Unsigned(value) => u32::try_from(value).map_err(|_| SkipReason::TokenRange.into()),
        Head::Negative(_) => Err(SkipReason::TokenRange.into()),
        _ => Err(SkipReason::Malformed.into()),
    }
}

/// Speculative decoding (EAGLE, MTP) reports pairs; the first of each is the prompt's own token.
fn bigram_token(cursor: &mut Cursor<'_>, width: usize) -> Result<u32, Fault> {
    let first = token(cursor.head()?)?;
    for _ in 1..width {
        cursor.skip()?;
    }
    Ok(first)
}

#[cfg(test)]
#[path = "decode_tests.rs"]
mod tests;
