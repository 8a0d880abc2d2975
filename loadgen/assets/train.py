#!/usr/bin/env python3
"""Trains the demo's byte-level BPE tokenizer: `pip install tokenizers==0.23.3 && python3 loadgen/assets/train.py`.

Input: words.txt (each word weighted, with and without a leading space) and this repository's own Markdown and
Rust text. Output beside this file: tokenizer.json and tokenizer_config.json (chat_template.jinja embedded).
The result depends on the repository's text at the time, so the files are kept in the repository, not rebuilt.
"""
import json
import pathlib
import random

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|tool_call|>"]
VOCABULARY = 4096
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def corpus():
    words = (HERE / "words.txt").read_text().split()
    draw = random.Random(20)
    # Every word must become one token, so each is seen far more often than any fragment of the prose below.
    for _ in range(60):
        draw.shuffle(words)
        yield " ".join(words)
    for _ in range(60):
        for word in words:
            yield word
    for pattern in ("*.md", "*.rs", "*.toml"):
        for path in sorted(ROOT.rglob(pattern)):
            if "target" not in path.parts:
                yield path.read_text(errors="replace")


def main():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    document = json.loads(tokenizer.to_str())
    (HERE / "tokenizer.json").write_text(json.dumps(document, ensure_ascii=False, separators=(",", ":")) + "\n")
    config = {
        "add_bos_token": False,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "additional_special_tokens": SPECIAL[1:],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 131072,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": (HERE / "chat_template.jinja").read_text().rstrip("\n"),
    }
    (HERE / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")


if __name__ == "__main__":
    main()
