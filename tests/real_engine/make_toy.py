"""A Qwen3 of ten million random weights with a real tokenizer: make_toy.py OUT TOKENIZER_DIRECTORY."""

import json
import pathlib
import shutil
import sys

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

out, tokenizer = map(pathlib.Path, sys.argv[1:])
torch.manual_seed(0)
config = Qwen3Config(
    vocab_size=151936,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=64,
    max_position_embeddings=131072,
    tie_word_embeddings=True,
    eos_token_id=151645,
    bos_token_id=151643,
)
scratch = out.with_name(out.name + ".part")
shutil.rmtree(scratch, ignore_errors=True)
Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(scratch)
for name in ("tokenizer.json", "tokenizer_config.json"):
    shutil.copy(tokenizer / name, scratch)
sampling = {"eos_token_id": [151645, 151643], "pad_token_id": 151643, "do_sample": True, "temperature": 0.6}
(scratch / "generation_config.json").write_text(json.dumps(sampling))
shutil.rmtree(out, ignore_errors=True)
scratch.rename(out)
