"""The tokenizer reads a checkpoint directory as transformers does, and its generation defaults."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer

from ostinato.engine.text.tokenizer import CHAT_SAMPLING, generation_defaults, load_tokenizer
from ostinato.errors import ModelError, RequestError

TEXT = "Ada läuft 12 km 🎼 <|im_end|> and back.\n\nDone"


def byte_level(post_processor: Any = None) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        show_progress=False,
        special_tokens=["<s>", "</s>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(["and back and forth, then back and done again " * 3], trainer)
    if post_processor is not None:
        tokenizer.post_processor = post_processor
    return tokenizer


def adds_bos() -> Any:
    return processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])


def write(directory: Path, backend: tokenizers.Tokenizer | None, **files: Any) -> Path:
    """A checkpoint directory with these JSON files."""
    if backend is not None:
        backend.save(str(directory / "tokenizer.json"))
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return directory


NAMES = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.mark.parametrize("post_processor", [None, adds_bos(), processors.ByteLevel(trim_offsets=False)])
@pytest.mark.parametrize("flag", [{}, {"add_bos_token": False}])
def test_ids_and_text_are_those_of_transformers(tmp_path: Path, post_processor: Any, flag: Any) -> None:
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **NAMES, **flag}
    write(tmp_path, byte_level(post_processor), tokenizer_config=config)
    ours, theirs = load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    for special in (True, False):
        ids = ours.encode(TEXT, add_special_tokens=special)
        assert ids == theirs.encode(TEXT, add_special_tokens=special)
        for skip in (True, False):
            assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert ours.vocab_size == len(theirs)
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)


def test_end_flags_add_what_the_post_processor_does_not(tmp_path: Path) -> None:
    flags = {**NAMES, "add_bos_token": True, "add_eos_token": True}
    write(tmp_path, byte_level(), tokenizer_config=flags)
    tokenizer = load_tokenizer(tmp_path)
    plain = tokenizer.encode("and back", add_special_tokens=False)
    assert tokenizer.encode("and back") == [0, *plain, 1]
    write(tmp_path, byte_level(adds_bos()), tokenizer_config=flags)
    assert load_tokenizer(tmp_path).encode("and back") == [0, *plain, 1]


def test_a_limit_or_padding_in_the_file_cuts_no_prompt(tmp_path: Path) -> None:
    backend = byte_level()
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    write(tmp_path, backend)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.decode(tokenizer.encode(TEXT), skip_special_tokens=False) == TEXT


def test_special_tokens_are_read_in_both_forms_and_the_config_wins(tmp_path: Path) -> None:
    write(
        tmp_path,
        byte_level(),
        special_tokens_map={"bos_token": "<s>", "eos_token": "</s>", "pad_token": {"content": "</s>"}},
        tokenizer_config={"eos_token": {"content": "<|im_end|>", "lstrip": False}, "unk_token": None},
    )
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.bos_token, tokenizer.bos_token_id) == ("<s>", 0)
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", 2)
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "<|im_end|>", "pad_token": "</s>"}
    assert tokenizer.token_text(2) == "<|im_end|>"
    assert tokenizer.token_id("<|im_end|>") == 2
    assert tokenizer.token_text(10_000) is None


def test_all_end_tokens_count(tmp_path: Path) -> None:
    write(
        tmp_path,
        byte_level(),
        tokenizer_config={"eos_token": "</s>"},
        generation_config={"eos_token_id": [7, 8]},
        config={"eos_token_id": 9, "text_config": {"eos_token_id": [10]}},
    )
    assert generation_defaults(tmp_path).eos_token_ids == {7, 8, 9, 10}
    assert load_tokenizer(tmp_path).eos_token_ids == {1, 7, 8, 9, 10}


@pytest.mark.parametrize(
    ("generation_config", "sampling"),
    [
        (
            {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": None, "max_length": 9},
            {"temperature": 0.6, "top_k": 20},
        ),
        ({"temperature": 0.6, "top_p": 0.9}, {"temperature": 0.0}),
        ({"do_sample": False, "repetition_penalty": 1.1}, {"temperature": 0.0, "repetition_penalty": 1.1}),
        ({}, {"temperature": 0.0}),
    ],
)
def test_sampling_settings_apply_only_where_sampling_is_asked_for(
    tmp_path: Path, generation_config: dict[str, Any], sampling: dict[str, Any]
) -> None:
    write(tmp_path, None, generation_config=generation_config)
    assert generation_defaults(tmp_path).sampling == sampling
    assert load_tokenizer(tmp_path).chat_defaults == ({} if generation_config else CHAT_SAMPLING)
    assert load_tokenizer(tmp_path).sampling_defaults == sampling


def test_without_a_tokenizer_token_ids_still_work_and_text_is_refused(tmp_path: Path) -> None:
    write(tmp_path, None, generation_config={"eos_token_id": 3})
    tokenizer = load_tokenizer(tmp_path)
    assert not tokenizer.has_text
    assert tokenizer.eos_token_ids == {3}
    assert tokenizer.decode([1, 2, 3]) == ""
    with pytest.raises(RequestError, match=r"no tokenizer\.json: give the prompt as token ids"):
        tokenizer.encode("Hello")


def test_text_that_is_not_unicode_is_refused(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write(tmp_path, byte_level()))
    with pytest.raises(RequestError, match="UTF-8"):
        tokenizer.encode("half an emoji: \ud83c")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
def test_a_damaged_file_is_named(tmp_path: Path, name: str) -> None:
    write(tmp_path, byte_level(), tokenizer_config=NAMES)
    (tmp_path / name).write_text('{"version": ')
    with pytest.raises(ModelError, match=name):
        load_tokenizer(tmp_path)
    (tmp_path / name).write_text("[]")
    with pytest.raises(ModelError, match=name):
        load_tokenizer(tmp_path)


def test_tokenizers_agree_where_each_id_that_both_know_has_one_text(tmp_path: Path) -> None:
    own = byte_level()
    longer = byte_level()
    longer.add_special_tokens(["<|tool|>"])
    other = byte_level()
    other.add_special_tokens(["<|call|>"])
    named = {"own": own, "longer": longer, "other": other, "none": None}
    read = {}
    for name, backend in named.items():
        (tmp_path / name).mkdir()
        read[name] = load_tokenizer(write(tmp_path / name, backend))
    agree = {(a, b) for a in read for b in read if read[a].agrees_with(read[b])}
    assert {(a, b) for a in read for b in read} - agree == {("longer", "other"), ("other", "longer")}


def test_a_word_without_a_token_is_an_error_of_the_request(tmp_path: Path) -> None:
    write(tmp_path, tokenizers.Tokenizer(models.WordLevel({"known": 0}, unk_token="[UNK]")))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("known") == [0]
    with pytest.raises(RequestError, match=r"cannot encode this prompt.*UNK"):
        tokenizer.encode("other")
