//! KV events from the wire to the view: message framing, msgpack payloads, and the sequence rules with the mirror behind.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash, Hasher};

use infera_router::events::decode::{self, Decoder, Summary};
use infera_router::events::frame;
use infera_router::events::msgpack::Cursor;
use infera_router::events::sequence::{Recovered, ReplayStep, Sequence, Step};
use infera_router::events::{CopyKey, EngineHash, Event, Medium, Stored};
use infera_router::fleet::Slot;
use infera_router::hash::{BlockHash, prompt_blocks};
use infera_router::index::{Hits, Mirror, Tree};
use infera_router::inspect::events::Inspector;
use rmp::Marker;

/// A multipart message: number of frames, their lengths as bytes, then their contents; the last takes what is left.
pub fn frames(data: &[u8]) -> u64 {
    let Some((&count, rest)) = data.split_first() else { return 0 };
    let count = usize::from(count % 10).min(rest.len());
    let (lengths, mut contents) = rest.split_at(count);
    let mut frames: Vec<&[u8]> = Vec::with_capacity(count);
    for (at, length) in lengths.iter().enumerate() {
        let length = if at + 1 == count { contents.len() } else { usize::from(*length).min(contents.len()) };
        let (frame, rest) = contents.split_at(length);
        frames.push(frame);
        contents = rest;
    }
    let live = frame::live(&frames);
    if let Ok(live) = live {
        assert!(matches!(frames.len(), 2 | 3));
        assert_eq!(live.payload, *frames.last().expect("frames"));
        assert_eq!(
            live.sequence.map(|number| number.to_be_bytes().to_vec()),
            (frames.len() == 3).then(|| frames[1].to_vec())
        );
    }
    let replay = frame::replay(&frames);
    if let Ok(frame::Replay::Batch { sequence, payload }) = replay {
        assert!(frames[0].is_empty() && sequence != u64::MAX);
        assert_eq!(payload, *frames.last().expect("frames"));
    }
    // The same message twice, as after a repeat: the second changes nothing if it has a number.
    let mut inspector = Inspector::new(false);
    let first = inspector.message(&frames);
    let second = inspector.message(&frames);
    let is_numbered = matches!(live, Ok(live) if live.sequence.is_some_and(|number| number != u64::MAX));
    if is_numbered {
        assert_eq!((second.applied, second.visible_blocks), (0, first.visible_blocks));
    }
    let faults = format!("{:?} {:?} {:?}", live.err(), replay.err(), first.error);
    digest((faults, frames.len(), first.applied.min(9), is_numbered))
}

/// Upper bound of what a payload can make of itself: no event may hold more than was sent for it.
fn check_event(event: &Event<'_>, payload: &[u8]) {
    match event {
        Event::Stored(Stored { hashes, tokens, block_size, identities, parent, .. }) => {
            assert!(*block_size > 0 && !hashes.is_empty());
            assert_eq!(tokens.len(), hashes.len() * block_size);
            assert!(tokens.len() <= payload.len() && hashes.len() <= payload.len());
            assert!(identities.is_empty() || identities.len() == hashes.len());
            let distinct: BTreeSet<_> = hashes.iter().collect();
            assert_eq!(distinct.len(), hashes.len());
            assert!(parent.is_none_or(|parent| !distinct.contains(&parent)));
        }
        Event::Removed { hashes, .. } => assert!(hashes.len() <= payload.len()),
        Event::Cleared => {}
    }
}

/// One msgpack payload: the walk over values agrees with one that is written plainly, decoding is the same each time, what
/// it hands out is whole, and a view that took it can be emptied.
pub fn payload(data: &[u8]) -> u64 {
    let mut cursor = Cursor::new(data);
    let raw = cursor.raw();
    assert_eq!(raw.ok().map(<[u8]>::len), walk(data), "the end of the first value");
    let named_rank = decode::rank(data);

    let (mut tree, mut mirror, mut decoder) = (Tree::default(), Mirror::new(0), Decoder::default());
    let mut kinds = DefaultHasher::new();
    let mut handed_out = 0;
    mirror.begin_batch();
    let summary = decoder.decode(data, |event| {
        check_event(&event, data);
        handed_out += 1;
        let applied = mirror.apply(&mut tree, &event);
        let shape = (std::mem::discriminant(&event), applied.blocks_stored.min(3), applied.orphaned.min(3));
        (shape, applied.joined.min(3), applied.orphans_dropped.min(3)).hash(&mut kinds);
    });
    assert_eq!(summary.applied, handed_out);
    let again: Summary = decoder.decode(data, |_| {});
    assert_eq!(again, summary, "the decoder keeps nothing from one batch to the next");
    // A batch that ends early is what came before its end.
    if let Some(cut) = data.len().checked_sub(1) {
        let part = Decoder::default().decode(&data[..cut], |_| {});
        assert!(part.applied <= summary.applied);
    }
    let visible = mirror.plain_blocks(&tree).len();
    assert!(visible <= tree.held_count(0) as usize);
    tree.publish();
    mirror.clear(&mut tree);
    assert_eq!((tree.block_count(), tree.publish().run_count()), (0, 0), "nothing is left after a clear");
    let skipped = summary.skipped.map(|count| count.min(2));
    digest((format!("{:?} {}", summary.error, named_rank.is_ok()), skipped, kinds.finish()))
}

/// Length of the first value, by a second, plain reading of the format with the markers of `rmp`.
fn walk(data: &[u8]) -> Option<usize> {
    let mut at = 0usize;
    let mut pending = 1u64;
    while pending > 0 {
        pending -= 1;
        let marker = Marker::from_u8(*data.get(at)?);
        at += 1;
        let mut length = |bytes: usize| {
            let read = data.get(at..at + bytes)?.iter().fold(0u64, |sum, byte| sum << 8 | u64::from(*byte));
            at += bytes;
            Some(read)
        };
        // Bytes and values that follow.
        let (bytes, values) = match marker {
            Marker::FixPos(_) | Marker::FixNeg(_) | Marker::Null | Marker::True | Marker::False => (0, 0),
            Marker::U8 | Marker::I8 => (1, 0),
            Marker::U16 | Marker::I16 => (2, 0),
            Marker::U32 | Marker::I32 | Marker::F32 => (4, 0),
            Marker::U64 | Marker::I64 | Marker::F64 => (8, 0),
            Marker::FixStr(bytes) => (u64::from(bytes), 0),
            Marker::Str8 | Marker::Bin8 => (length(1)?, 0),
            Marker::Str16 | Marker::Bin16 => (length(2)?, 0),
            Marker::Str32 | Marker::Bin32 => (length(4)?, 0),
            Marker::Ext8 => (length(1)? + 1, 0),
            Marker::Ext16 => (length(2)? + 1, 0),
            Marker::Ext32 => (length(4)? + 1, 0),
            Marker::FixExt1 => (2, 0),
            Marker::FixExt2 => (3, 0),
            Marker::FixExt4 => (5, 0),
            Marker::FixExt8 => (9, 0),
            Marker::FixExt16 => (17, 0),
            Marker::FixArray(values) => (0, u64::from(values)),
            Marker::Array16 => (0, length(2)?),
            Marker::Array32 => (0, length(4)?),
            Marker::FixMap(pairs) => (0, 2 * u64::from(pairs)),
            Marker::Map16 => (0, 2 * length(2)?),
            Marker::Map32 => (0, 2 * length(4)?),
            Marker::Reserved => return None,
        };
        at = at.checked_add(usize::try_from(bytes).ok()?)?;
        if at > data.len() {
            return None;
        }
        pending += values;
    }
    Some(at)
}

/// One publisher and the view of it, driven as the ingest core does, beside plain sets.
struct Follower {
    sequence: Sequence,
    mirror: Mirror,
    tree: Tree,
    now_ns: u64,
    /// What a reset must have left: events applied since the last one.
    since_reset: Vec<Batch>,
    /// Numbers applied since the last reset, in order.
    numbers: Vec<u64>,
    resets: u32,
}

/// A small batch, spelled by two bytes: what is done with which stretch of which of four prompts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Batch(u8, u8);

const PROMPTS: u8 = 4;
const PROMPT_BLOCKS: u8 = 8;

/// Tokens of a prompt; the first half of all prompts is one.
fn prompt(number: u8) -> Vec<u32> {
    (0..2 * u32::from(PROMPT_BLOCKS))
        .map(|at| if at < u32::from(PROMPT_BLOCKS) { at } else { at + 100 * u32::from(number) })
        .collect()
}

fn name(block: BlockHash) -> EngineHash {
    EngineHash(block.0 ^ 0x1234)
}

impl Batch {
    fn payload(self) -> [u8; 2] {
        [self.0, self.1]
    }

    /// (prompt, from, to), and whether it is a store, a removal or a clear.
    fn parts(self) -> (u8, u8, u8, u8) {
        let from = self.1 % PROMPT_BLOCKS;
        let to = from + 1 + (self.1 / PROMPT_BLOCKS) % (PROMPT_BLOCKS - from);
        ((self.0 >> 3) % PROMPTS, from, to, self.0 % 8)
    }

    fn apply(self, mut each: impl FnMut(&Event<'_>)) {
        let (number, from, to, kind) = self.parts();
        let tokens = prompt(number);
        let blocks = prompt_blocks(&tokens, 2);
        let (from, to) = (usize::from(from), usize::from(to));
        let hashes: Vec<EngineHash> = blocks[from..to].iter().map(|block| name(*block)).collect();
        let copy = CopyKey { medium: Medium::DEVICE, group: CopyKey::NO_GROUP };
        match kind {
            0..5 => each(&Event::Stored(Stored {
                hashes: &hashes,
                parent: from.checked_sub(1).map(|at| name(blocks[at])),
                tokens: &tokens[from * 2..to * 2],
                block_size: 2,
                copy,
                identities: &[],
                may_report_hits: false,
            })),
            5 | 6 => each(&Event::Removed { hashes: &hashes, copy }),
            _ => each(&Event::Cleared),
        }
    }
}

/// Copies that these batches leave, by name.
fn expected(batches: &[Batch]) -> BTreeMap<EngineHash, i64> {
    let mut copies: BTreeMap<EngineHash, i64> = BTreeMap::new();
    for batch in batches {
        batch.apply(|event| match event {
            Event::Stored(stored) => stored.hashes.iter().for_each(|name| *copies.entry(*name).or_default() += 1),
            Event::Removed { hashes, .. } => hashes.iter().for_each(|name| {
                if let Some(count) = copies.get_mut(name)
                    && *count > 0
                {
                    *count -= 1;
                }
            }),
            Event::Cleared => copies.clear(),
        });
    }
    copies.retain(|_, count| *count > 0);
    copies
}

impl Follower {
    fn reset(&mut self) {
        self.mirror.clear(&mut self.tree);
        self.since_reset.clear();
        self.numbers.clear();
        self.resets += 1;
        assert_eq!(self.tree.block_count(), 0, "a reset forgets everything");
    }

    fn apply(&mut self, number: Option<u64>, payload: &[u8]) {
        let [kind, place] = *payload else { return };
        // All ones stand for no number.
        if let Some(number) = number.filter(|number| *number != u64::MAX) {
            assert!(self.numbers.last().is_none_or(|last| *last < number), "{number} after {:?}", self.numbers);
            self.numbers.push(number);
        }
        let batch = Batch(kind, place);
        self.since_reset.push(batch);
        self.mirror.begin_batch();
        let (mirror, tree) = (&mut self.mirror, &mut self.tree);
        batch.apply(|event| {
            mirror.apply(tree, event);
        });
    }

    fn live(&mut self, number: Option<u64>, payload: &[u8]) {
        match self.sequence.on_live(number, payload, self.now_ns) {
            Step::Apply => self.apply(number, payload),
            Step::ResetAndApply { .. } => {
                self.reset();
                self.apply(number, payload);
            }
            Step::AskReplay { reset, start, end } => {
                assert!(start < end && Some(end) == number);
                if reset {
                    self.reset();
                }
            }
            Step::Drop | Step::Held => {}
        }
    }

    fn replayed(&mut self, number: u64, payload: &[u8]) {
        match self.sequence.on_replay(number, payload, self.now_ns) {
            ReplayStep::Ignore => {}
            ReplayStep::BeginAnew => {
                self.reset();
                return;
            }
            ReplayStep::ResetAndApply { .. } => {
                self.reset();
                self.apply(Some(number), payload);
            }
            ReplayStep::Apply => self.apply(Some(number), payload),
        }
        if let Some(recovered) = self.sequence.finished(self.now_ns) {
            self.recovered(recovered);
        }
    }

    fn recovered(&mut self, recovered: Recovered) {
        if recovered.lost > 0 || recovered.is_new_life {
            self.reset();
        }
        for batch in recovered.held {
            self.apply(Some(batch.sequence), &batch.payload);
        }
        assert_eq!(self.sequence.is_recovering(), recovered.ask.is_some());
        let is_behind = |start| self.sequence.last().is_none_or(|last| start < last);
        assert!(recovered.ask.is_none_or(is_behind));
    }

    /// The view against plain sets: never more credit than there are copies, all of it where no parent is missing.
    fn check(&mut self) {
        let copies = expected(&self.since_reset);
        let mut hits = Hits::new();
        let snapshot = self.tree.publish();
        for number in 0..PROMPTS {
            let blocks = prompt_blocks(&prompt(number), 2);
            snapshot.query(&blocks, &mut hits);
            let held = blocks.iter().take_while(|block| copies.contains_key(&name(**block))).count();
            assert_eq!(hits.depth(Slot(0)) as usize, held, "prompt {number} after {:?}", self.since_reset);
        }
        assert!(self.tree.held_count(0) as usize <= copies.len());
    }
}

/// Sequence rules and mirror: live batches with gaps, repeats, restarts and stragglers, replays that answer or do not.
pub fn state(data: &[u8]) -> u64 {
    let Some((&first, mut rest)) = data.split_first() else { return 0 };
    let mut follower = Follower {
        sequence: Sequence::new(first & 1 == 1),
        mirror: Mirror::new(0),
        tree: Tree::default(),
        now_ns: 1,
        since_reset: Vec::new(),
        numbers: Vec::new(),
        resets: 0,
    };
    let mut next = u64::from(first >> 4);
    // What the publisher has said, for repeats and replays.
    let mut said: BTreeMap<u64, Batch> = BTreeMap::new();
    let mut kinds = DefaultHasher::new();
    while let [op, a, b, tail @ ..] = rest {
        rest = tail;
        let batch = Batch(*a, *b);
        match op % 16 {
            0..6 => {
                said.insert(next, batch);
                follower.live(Some(next), &batch.payload());
                next += 1;
            }
            6 => {
                // Lost on the way.
                for _ in 0..=op / 64 {
                    said.insert(next, batch);
                    next += 1;
                }
            }
            7 => {
                if let Some((number, batch)) = said.iter().rev().nth(usize::from(*a % 8)) {
                    follower.live(Some(*number), &batch.payload());
                }
            }
            8 => {
                // A new life, over a new connection or not.
                if b & 1 == 1 {
                    follower.sequence.on_disconnect();
                    follower.sequence.on_connect(follower.now_ns);
                }
                said.clear();
                next = u64::from(a % 4);
            }
            9 => follower.live(None, &batch.payload()),
            10 => follower
                .live([Some(u64::MAX), Some(u64::MAX - 1), Some(1 << 63)][usize::from(*a % 3)], &batch.payload()),
            11..14 => {
                let from = u64::from(*b % 16);
                for (number, batch) in
                    said.range(from..).take(usize::from(*a % 32)).map(|(n, b)| (*n, *b)).collect::<Vec<_>>()
                {
                    follower.replayed(number, &batch.payload());
                }
            }
            14 => {
                if let Some(recovered) = follower.sequence.on_replay_end(follower.now_ns) {
                    follower.recovered(recovered);
                }
            }
            _ => {
                follower.now_ns += u64::from(*a) << 24;
                if let Some(recovered) = follower.sequence.on_deadline(follower.now_ns) {
                    follower.recovered(recovered);
                }
                follower.sequence.set_can_replay(b & 1 == 1);
            }
        }
        (op % 16, follower.sequence.is_recovering(), follower.resets.min(4)).hash(&mut kinds);
    }
    follower.check();
    follower.mirror.clear(&mut follower.tree);
    assert_eq!((follower.tree.block_count(), follower.tree.publish().run_count()), (0, 0));
    digest((kinds.finish(), follower.mirror.orphan_count()))
}

fn digest(what: impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    what.hash(&mut hasher);
    hasher.finish()
}
