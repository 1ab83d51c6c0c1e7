"""A checkpoint of random weights: the shape of a config.json, in the files that every engine reads.

Run as `python -m benchmarks.peers.checkpoint SHAPE TARGET`, in a process of its own: it needs torch and transformers.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

SPECIAL = "<|end|>"
SEED = 0


def make_checkpoint(shape: Path, target: Path) -> None:
    """Writes config.json, bf16 safetensors and a tokenizer for the config.json in `shape` to the directory `target`."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    config = transformers.AutoConfig.from_pretrained(shape)
    torch.manual_seed(SEED)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(target)
    # transformers' own spelling of the config leaves out or renames what other engines read.
    text = (shape / "config.json").read_text(encoding="utf-8")
    (target / "config.json").write_text(text, encoding="utf-8")
    write_tokenizer(target, config.vocab_size)


def write_tokenizer(target: Path, vocab_size: int) -> None:
    """A byte-level tokenizer of `vocab_size` entries that stand for nothing; the converter to GGUF asks for one."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [SPECIAL, *letters]
    words += [f"{first}{second}" for first in letters for second in letters][: vocab_size - len(words)]
    vocab = {word: number for number, word in enumerate(words)}
    merges = [(word[0], word[1]) for word in words[len(letters) + 1 :]]
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([SPECIAL])
    tokenizer.save(str(target / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIAL, "model_max_length": 8192}
    (target / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


if __name__ == "__main__":
    make_checkpoint(Path(sys.argv[1]), Path(sys.argv[2]))
