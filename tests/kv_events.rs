//! Recordings of real engines: every frame decodes, and the view after each equals the reference written beside it.
#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use infera_router::events::decode::Decoder;
use infera_router::events::frame;
use infera_router::index::{Hits, Mirror, Tree};
use infera_router::inspect::events::{Inspector, replay};
use serde_json::Value;

fn captures() -> Vec<PathBuf> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/kv-events");
    let mut paths: Vec<PathBuf> = std::fs::read_dir(directory)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| {
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            name.ends_with(".jsonl") && !name.ends_with(".expected.jsonl")
        })
        .collect();
    paths.sort();
    assert!(paths.len() >= 13, "recordings are missing: {paths:?}");
    paths
}

fn lines(path: &Path) -> Vec<Value> {
    std::fs::read_to_string(path).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn frames(path: &Path, kind: &str) -> Vec<Vec<Vec<u8>>> {
    lines(path)
        .iter()
        .filter(|line| line["kind"] == kind)
        .map(|line| {
            let frames = line["frames"].as_array().unwrap();
            frames.iter().map(|frame| STANDARD.decode(frame.as_str().unwrap()).unwrap()).collect()
        })
        .collect()
}

#[test]
fn every_recording_gives_the_expected_view() {
    for path in captures() {
        let expected = lines(&path.with_extension("expected.jsonl"));
        let messages = frames(&path, "sub");
        assert_eq!(messages.len(), expected.len(), "{}", path.display());
        let mut inspector = Inspector::new(true);
        for (message, expected) in messages.iter().zip(&expected) {
            let line = serde_json::to_value(inspector.message(message)).unwrap();
            let what = format!("{} {}", path.display(), expected["scenario"]);
            assert_eq!(line["error"], Value::Null, "{what}");
            for member in ["seq", "visible_plain_blocks", "hashes"] {
                assert_eq!(line[member], expected[member], "{member} of {what}");
            }
        }
    }
}

#[test]
fn the_inspection_command_prints_the_same_lines() {
    for path in captures() {
        let input = std::io::BufReader::new(std::fs::File::open(&path).unwrap());
        let mut output = Vec::new();
        replay(input, true, &mut output).unwrap();
        let printed: Vec<Value> =
            String::from_utf8(output).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let expected = lines(&path.with_extension("expected.jsonl"));
        assert_eq!(printed.len(), expected.len());
        for (printed, expected) in printed.iter().zip(&expected) {
            assert_eq!(printed["hashes"], expected["hashes"], "{}", path.display());
            assert!(printed["applied"].as_u64().unwrap() + printed["skipped"].as_u64().unwrap() > 0);
        }
    }
}

/// The published snapshot answers what the mirror holds: every visible chain of a recording is a hit to its full depth.
#[test]
fn the_snapshot_credits_what_is_visible() {
    for path in captures() {
        let (mut tree, mut mirror, mut decoder) = (Tree::default(), Mirror::new(4), Decoder::default());
        let mut hits = Hits::new();
        for message in frames(&path, "sub") {
            let live = frame::live(&message).unwrap();
            let mut chains = Vec::new();
            decoder.decode(live.payload, |event| {
                if let infera_router::events::Event::Stored(stored) = &event
                    && stored.parent.is_none()
                    && stored.identities.is_empty()
                {
                    chains.push(infera_router::hash::prompt_blocks(stored.tokens, stored.block_size));
                }
                mirror.apply(&mut tree, &event);
            });
            let visible = mirror.plain_blocks(&tree);
            let snapshot = tree.publish();
            for chain in chains {
                snapshot.query(&chain, &mut hits);
                let expected = chain.iter().take_while(|block| visible.binary_search(block).is_ok()).count();
                assert_eq!(hits.depth(infera_router::fleet::Slot(4)) as usize, expected, "{}", path.display());
            }
        }
    }
}

#[test]
fn every_cut_of_every_payload_is_an_error_or_a_valid_prefix() {
    for path in captures() {
        for message in frames(&path, "sub") {
            let payload = frame::live(&message).unwrap().payload;
            let mut decoder = Decoder::default();
            let whole = decoder.decode(payload, |_| {});
            assert_eq!(whole.error, None);
            for cut in 0..payload.len() {
                let (mut tree, mut mirror) = (Tree::default(), Mirror::new(0));
                let part = decoder.decode(&payload[..cut], |event| {
                    mirror.apply(&mut tree, &event);
                });
                assert!(part.applied <= whole.applied, "{} cut at {cut}", path.display());
                // Only the trailing rank may be missing without notice.
                assert!(part.error.is_some() || part.applied == whole.applied, "{} cut at {cut}", path.display());
            }
        }
    }
}

/// Recordings with bytes changed, cut out and put in: whatever comes of it, no panic, and a clear leaves nothing.
#[test]
fn damaged_recordings_never_panic() {
    let payloads: Vec<Vec<u8>> =
        captures().iter().flat_map(|path| frames(path, "sub")).map(|mut message| message.pop().unwrap()).collect();
    for seed in 0..20 {
        let mut random = fastrand::Rng::with_seed(seed);
        let (mut tree, mut mirror, mut decoder) = (Tree::default(), Mirror::new(0), Decoder::default());
        let mut skipped = 0;
        for _ in 0..1_500 {
            let mut payload = payloads[random.usize(0..payloads.len())].clone();
            for _ in 0..random.usize(0..4) {
                let at = random.usize(0..payload.len());
                match random.u8(0..4) {
                    0 => payload[at] = random.u8(..),
                    1 => payload[at] = [0xdd, 0xdf, 0xc6, 0xdb, 0xc0, 0xc1][random.usize(0..6)],
                    2 => drop(payload.remove(at)),
                    _ => payload.insert(at, random.u8(..)),
                }
                if payload.is_empty() {
                    break;
                }
            }
            let summary = decoder.decode(&payload, |event| {
                mirror.apply(&mut tree, &event);
            });
            skipped += summary.skipped_total() + u32::from(summary.error.is_some());
            if random.u8(0..10) == 0 {
                tree.publish();
            }
            assert!(tree.held_count(0) as usize >= mirror.plain_blocks(&tree).len(), "seed {seed}");
        }
        assert!(skipped > 0);
        mirror.clear(&mut tree);
        assert_eq!((tree.block_count(), tree.run_count(), tree.publish().run_count()), (0, 0, 0), "seed {seed}");
    }
}

#[test]
fn every_replayed_payload_is_the_live_one() {
    let mut replayed = 0;
    for path in captures() {
        let live = frames(&path, "sub");
        let mut ended = false;
        for message in frames(&path, "replay") {
            match frame::replay(&message).unwrap() {
                frame::Replay::End => ended = true,
                frame::Replay::Batch { sequence, payload } => {
                    let mut original = live.iter().map(|frames| frame::live(frames).unwrap());
                    let original = original.rfind(|live| live.sequence == Some(sequence)).unwrap();
                    assert_eq!(original.payload, payload, "{} sequence {sequence}", path.display());
                    replayed += 1;
                }
            }
        }
        assert!(ended, "{} has no end of replay", path.display());
    }
    assert!(replayed > 100);
}
