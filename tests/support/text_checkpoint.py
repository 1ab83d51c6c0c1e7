"""A tiny checkpoint with a tokenizer and a chat template, for tests that need text."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from tests.support.checkpoints import EOS, VOCAB_SIZE, checkpoint
from tests.support.folders import shared_folder

RECIPE = "nemotron_h_dense"
SETTINGS = {"max_model_len": 96, "max_num_seqs": 4, "cache_memory": "8MiB", "threads": 1}
"""Of the engines that tests run it in."""
CHARACTERS = [*map(chr, range(32, 127)), "\n", "é", "漢", "🙂"]
"""What the tokenizer can encode. Those of several bytes take several tokens, so text can end inside of them."""
CHAT_TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}answer:"


def byte_level_tokenizer(tags: Sequence[str] = ()) -> tokenizers.Tokenizer:
    """A byte-level BPE of exactly `VOCAB_SIZE` entries: two special ones, bytes, pairs of letters, and `tags`, special
    too."""
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    vocabulary = {"<s>": 0, "</s>": EOS}
    for character in CHARACTERS:
        for byte in bytes_of.pre_tokenize_str(character)[0][0]:
            vocabulary.setdefault(byte, len(vocabulary))
    merges = [(first, second) for first in "abcdefgh" for second in "aeiou"]
    merges = merges[: VOCAB_SIZE - len(vocabulary) - len(tags)]
    for first, second in merges:
        vocabulary[first + second] = len(vocabulary)
    for tag in tags:
        vocabulary[tag] = len(vocabulary)
    assert len(vocabulary) == VOCAB_SIZE
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>", *tags])
    return tokenizer


@cache
def text_checkpoint(name: str = RECIPE, chat_template: str = CHAT_TEMPLATE, tags: tuple[str, ...] = ()) -> Path:
    """A directory with a recipe's weights, tokenizer (with `tags`) and chat template. Treat it as read-only."""
    directory = shared_folder("text")
    shutil.copytree(checkpoint(name), directory, dirs_exist_ok=True)
    byte_level_tokenizer(tags).save(str(directory / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": chat_template}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory
