#!/usr/bin/env python3
"""Records what tiktoken makes of texts with the wrapper that Kimi K2 ships (`tokenization_kimi.py`).

    record_tiktoken.py MODEL_DIR COUNT SEED > tests/fixtures/native/tiktoken.jsonl

MODEL_DIR holds `tiktoken.model` (real ranks; any will do) and tokenizer_config.json. Lines: {"text" or "repeat", "ids"}
or, for long ones, {"ids_sha256", "n"} over little-endian u32. Needs tiktoken and transformers.
"""
import base64
import hashlib
import json
import pathlib
import struct
import sys

import tiktoken

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from prompt_reference import Source  # noqa: E402

PATTERN = "|".join([
    r"[\p{Han}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
])


def load(directory):
    ranks = {}
    for line in open(directory / "tiktoken.model", "rb").read().splitlines():
        if line:
            token, rank = line.split()
            ranks[base64.b64decode(token)] = int(rank)
    named = json.load(open(directory / "tokenizer_config.json"))["added_tokens_decoder"]
    named = {int(id): token["content"] for id, token in named.items()}
    special = {named.get(id, f"<|reserved_token_{id}|>"): id for id in range(len(ranks), len(ranks) + 256)}
    return tiktoken.Encoding("kimi", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=special), list(special)


def pieces(text, most):
    """Runs of white space, or of anything else, are cut when they are longer than `most`."""
    start, length, was_space = 0, 0, text[:1].isspace()
    for at, char in enumerate(text):
        if char.isspace() != was_space:
            length, was_space = 1, not was_space
        else:
            length += 1
            if length > most:
                yield text[start:at]
                start, length = at, 1
    yield text[start:]


def encode(encoding, text):
    ids = []
    for at in range(0, len(text), 400_000):
        for piece in pieces(text[at : at + 400_000], 25_000):
            ids.extend(encoding.encode(piece, allowed_special="all"))
    return ids


def main():
    encoding, special = load(pathlib.Path(sys.argv[1]))
    source = Source(int(sys.argv[3]), special[:8])
    for _ in range(int(sys.argv[2])):
        text = source.text(30)
        print(json.dumps({"text": text, "ids": encode(encoding, text)}, ensure_ascii=False))
    tall = [("a", 60_001), ("é", 25_001), (" ", 25_003), ("x y ", 120_000), ("<|im_end|>ab", 40_000), ("你好", 20_000), ("word, ", 70_001)]
    for part, count in tall:
        ids = encode(encoding, part * count)
        digest = hashlib.sha256(struct.pack(f"<{len(ids)}I", *ids)).hexdigest()
        print(json.dumps({"repeat": [part, count], "n": len(ids), "ids_sha256": digest}, ensure_ascii=False))


main()
