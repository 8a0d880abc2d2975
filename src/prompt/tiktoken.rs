//! Models that ship `tiktoken.model` instead of tokenizer.json: Kimi K2 and later.
//!
//! The ranks are turned into the byte-level BPE model of a tokenizer.json, so everything behind the loader is the
//! same for both kinds. Sources: the model's own `tokenization_kimi.py` (pattern, 256 reserved ids behind the ranks,
//! limits on what is encoded at once) and `TikTokenConverter` of transformers (merges from ranks). A directory whose
//! Python file names another pattern or other limits is refused: its ids would differ.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail, ensure};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Map, Value, json};

use super::python::is_space;
use crate::limits::{TIKTOKEN_RANKS_MAX, TIKTOKEN_TOKEN_BYTES_MAX};

/// Ids behind the ranks that are kept for special tokens.
const RESERVED_TOKENS: usize = 256;

/// The pattern's alternatives, each as the model's Python file spells it.
const PATTERN: [&str; 8] = [
    r"[\p{Han}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
];

/// Characters that the engine encodes at once: a cut every so many, whatever is there.
const CHUNK_CHARS: usize = 400_000;

/// Longest run of white space, or of anything else, that the engine encodes at once.
const RUN_CHARS: usize = 25_000;

/// The files of such a model.
#[derive(Clone, Debug)]
pub struct TiktokenFiles {
    ranks: PathBuf,
    /// (id, text) of the named special tokens.
    named: Vec<(usize, String)>,
}

impl TiktokenFiles {
    /// What `directory` holds, given its tokenizer_config.json; `None` if that is no such model.
    pub fn read(directory: &Path, config: &Map<String, Value>) -> anyhow::Result<Option<Self>> {
        let ranks = directory.join("tiktoken.model");
        if !ranks.is_file() {
            return Ok(None);
        }
        let class = config.get("auto_map").and_then(|map| map.get("AutoTokenizer"));
        let class = class.and_then(|class| class.get(0).or(Some(class))).and_then(Value::as_str).unwrap_or_default();
        ensure!(
            class.starts_with("tokenization_kimi."),
            "{}: the pattern of a tiktoken model of class {class:?} is not known here",
            ranks.display()
        );
        refuse_other_rules(&directory.join("tokenization_kimi.py"))?;
        let mut named = Vec::new();
        if let Some(Value::Object(tokens)) = config.get("added_tokens_decoder") {
            for (id, token) in tokens {
                let content = token.get("content").and_then(Value::as_str);
                named.extend(id.parse().ok().zip(content.map(str::to_owned)));
            }
        }
        Ok(Some(Self { ranks, named }))
    }

    /// Path of the ranks, for the log.
    pub fn path(&self) -> &Path {
        &self.ranks
    }

    /// The model as a tokenizer.json would state it.
    pub fn tokenizer_json(&self) -> anyhow::Result<Value> {
        let text = std::fs::read_to_string(&self.ranks).with_context(|| format!("reading {}", self.ranks.display()))?;
        let ranks = parsed(&text).with_context(|| format!("reading {}", self.ranks.display()))?;
        Ok(as_tokenizer(&ranks, &self.special_tokens(ranks.len())))
    }

    fn special_tokens(&self, first: usize) -> Vec<(usize, String)> {
        let named: HashMap<usize, &String> = self.named.iter().map(|(id, text)| (*id, text)).collect();
        let text = |id| named.get(&id).map_or_else(|| format!("<|reserved_token_{id}|>"), |text| (*text).clone());
        (first..first + RESERVED_TOKENS).map(|id| (id, text(id))).collect()
    }
}

/// The model's own Python file, where it is there, must state the rules that are built in here.
fn refuse_other_rules(path: &Path) -> anyhow::Result<()> {
    let text = match std::fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error).with_context(|| format!("reading {}", path.display())),
    };
    let plain = text.replace('_', "");
    let limits = ["= 256", "= 400000", "= 25000"];
    let known = PATTERN.iter().all(|part| text.contains(part)) && limits.iter().all(|limit| plain.contains(limit));
    ensure!(known, "{} states a pattern or limits that are not known here", path.display());
    Ok(())
}

/// Tokens in the order of their ranks, which must be 0 to their number.
fn parsed(text: &str) -> anyhow::Result<Vec<Vec<u8>>> {
    let mut tokens: Vec<Vec<u8>> = Vec::new();
    let mut places: Vec<(usize, Vec<u8>)> = Vec::new();
    for (number, line) in text.lines().enumerate().filter(|(_, line)| !line.is_empty()) {
        let parts = line
            .split_once(' ')
            .and_then(|(token, rank)| Some((STANDARD.decode(token).ok()?, rank.trim_end().parse::<usize>().ok()?)));
        let (token, rank) = parts.with_context(|| format!("line {} is no token and rank", number + 1))?;
        if token.is_empty() || token.len() > TIKTOKEN_TOKEN_BYTES_MAX || places.len() >= TIKTOKEN_RANKS_MAX {
            bail!("line {}: too many or too long tokens", number + 1);
        }
        places.push((rank, token));
    }
    places.sort();
    for (place, (rank, token)) in places.into_iter().enumerate() {
        ensure!(rank == place, "rank {place} is missing or repeated");
        tokens.push(token);
    }
    ensure!(!tokens.is_empty(), "no tokens");
    Ok(tokens)
}

fn as_tokenizer(ranks: &[Vec<u8>], special: &[(usize, String)]) -> Value {
    let alphabet = alphabet();
    let spelled = |bytes: &[u8]| bytes.iter().map(|byte| alphabet[usize::from(*byte)]).collect::<String>();
    let by_bytes: HashMap<&[u8], usize> = ranks.iter().enumerate().map(|(rank, token)| (&**token, rank)).collect();
    let vocabulary: Map<String, Value> =
        ranks.iter().enumerate().map(|(rank, token)| (spelled(token), rank.into())).collect();
    let mut merges = Vec::with_capacity(ranks.len() * 2);
    for token in ranks {
        // All ways to make this token of two others; which of them happens is decided by what was merged before.
        let mut ways: Vec<(usize, usize, usize)> = (1..token.len())
            .filter_map(|at| Some((*by_bytes.get(&token[..at])?, *by_bytes.get(&token[at..])?, at)))
            .collect();
        ways.sort_unstable();
        merges.extend(ways.iter().map(|(_, _, at)| json!([spelled(&token[..*at]), spelled(&token[*at..])])));
    }
    let added: Vec<Value> = special
        .iter()
        .map(|(id, content)| {
            json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
                   "normalized": false, "special": true})
        })
        .collect();
    json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": added,
        "normalizer": null,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": PATTERN.join("|")}, "behavior": "Isolated", "invert": false},
            {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
        ]},
        "post_processor": null,
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                  "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": true,
                  "vocab": vocabulary, "merges": merges},
    })
}

/// The printable character that stands for each byte in a byte-level vocabulary: itself where it is printable, else
/// the next one from U+0100.
fn alphabet() -> [char; 256] {
    let mut next = 0x100;
    std::array::from_fn(|byte| {
        if matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff) {
            return char::from(byte as u8);
        }
        next += 1;
        char::from_u32(next - 1).unwrap_or(char::REPLACEMENT_CHARACTER)
    })
}

/// Byte offsets at which the engine ends one call of its encoder and begins the next: each is a token boundary.
pub fn forced_cuts(text: &str) -> Vec<usize> {
    cuts_of(text, CHUNK_CHARS, RUN_CHARS)
}

fn cuts_of(text: &str, chunk_chars: usize, run_chars: usize) -> Vec<usize> {
    let mut cuts = Vec::new();
    if text.len() <= run_chars {
        return cuts;
    }
    let (mut in_chunk, mut in_run, mut was_space) = (0, 0, false);
    for (at, char) in text.char_indices() {
        let is_now_space = is_space(char);
        if in_chunk == chunk_chars {
            cuts.push(at);
            (in_chunk, in_run) = (0, 0);
        } else if in_run > 0 && is_now_space == was_space && in_run == run_chars {
            cuts.push(at);
            in_run = 0;
        } else if is_now_space != was_space {
            in_run = 0;
        }
        in_chunk += 1;
        in_run += 1;
        was_space = is_now_space;
    }
    cuts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_runs_and_long_texts_are_cut_where_python_cuts_them() {
        let pieces = |text: &str, chunk, run| {
            let cuts = cuts_of(text, chunk, run);
            let ends = cuts.iter().copied().chain([text.len()]);
            ends.scan(0, |start, end| Some(text[std::mem::replace(start, end)..end].to_owned())).collect::<Vec<_>>()
        };
        assert_eq!(pieces("abcdefgh", 100, 5), ["abcde", "fgh"]);
        assert_eq!(pieces("ééééé", 100, 2), ["éé", "éé", "é"]);
        assert_eq!(pieces("ab  abc", 100, 3), ["ab  abc"]);
        assert_eq!(pieces("abcd    x", 100, 3), ["abc", "d   ", " x"]);
        assert_eq!(pieces("abcabcab", 4, 3), ["abc", "a", "bca", "b"]);
        assert_eq!(pieces("a\u{1f}\u{1f}\u{1f}b", 100, 2), ["a\u{1f}\u{1f}", "\u{1f}b"]);
        assert_eq!(pieces("abc", 100, 5), ["abc"]);
    }

    #[test]
    fn ranks_with_holes_and_other_pythons_are_refused() {
        assert_eq!(parsed("YQ== 0\nYg== 1\n").unwrap(), [b"a".to_vec(), b"b".to_vec()]);
        for text in ["", "YQ== 1\n", "YQ== 0\nYg== 0\n", "YQ== x\n", "!! 0\n", "YQ==0\n"] {
            assert!(parsed(text).is_err(), "{text:?}");
        }
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("tokenization_kimi.py");
        assert!(refuse_other_rules(&path).is_ok());
        std::fs::write(&path, "pat_str = r'\\w+'").unwrap();
        assert!(refuse_other_rules(&path).is_err());
        let known = format!("{}\n x = 256\n y = 400_000\n z = 25_000\n", PATTERN.join("\n"));
        std::fs::write(&path, known).unwrap();
        assert!(refuse_other_rules(&path).is_ok());
    }
}
