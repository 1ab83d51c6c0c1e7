"""Tokenizers of GGUF files: SentencePiece as its own package has it, and damage that is an error."""

from __future__ import annotations

import inspect
import io
import json
import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import transformers

import ostinato.engine.text.tokenizer as tokenizer_module
from ostinato.errors import ModelError
from ostinato.formats.gguf.pre_tokenizers import PRE_TOKENIZERS
from ostinato.formats.gguf.reader import Header
from ostinato.formats.gguf.tokenizer import generation_config_of, tokenizer_config_of, tokenizer_of

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
ALPHABET = "abcdefgh tionrs  \n\t()[]=_.:'\"0123456789éß日本語🙂\u200bABCZ▁"
CODE = inspect.getsource(random) + inspect.getsource(json) + inspect.getsource(inspect)


def header(**metadata: Any) -> Header:
    return Header(Path("m.gguf"), 3, {f"tokenizer.ggml.{name}": value for name, value in metadata.items()}, {})


def trained(kind: str, **options: Any) -> tuple[Any, Header]:
    """A model of the sentencepiece package, and what a converter writes of it into a file."""
    package = pytest.importorskip("sentencepiece", reason="the package that trains them comes with the test extra")
    written = io.BytesIO()
    package.SentencePieceTrainer.train(
        sentence_iterator=iter([line for line in CODE.splitlines() if line.strip()]),
        model_writer=written,
        model_type=kind,
        vocab_size=700,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
        **options,
    )
    model = package.SentencePieceProcessor(model_proto=written.getvalue())
    numbers = range(model.vocab_size())
    kinds = [
        UNKNOWN if model.is_unknown(i) else CONTROL if model.is_control(i) else BYTE if model.is_byte(i) else NORMAL
        for i in numbers
    ]
    return model, header(
        model="llama",
        tokens=[model.id_to_piece(i) for i in numbers],
        scores=np.array([model.get_score(i) for i in numbers], dtype="<f4"),
        token_type=np.array(kinds, dtype="<i4"),
        bos_token_id=1,
        eos_token_id=2,
        unknown_token_id=0,
        add_space_prefix=options.get("add_dummy_prefix", True),
    )


def backend(file: Header) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(json.dumps(tokenizer_of(file)))


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("bpe", {}),
        ("bpe", {"add_dummy_prefix": False, "split_digits": True}),
        ("bpe", {"allow_whitespace_only_pieces": True}),
        ("unigram", {}),
        ("unigram", {"add_dummy_prefix": False, "split_digits": True}),
    ],
)
def test_texts_have_the_tokens_that_sentencepiece_gives_them(kind: str, options: dict[str, Any]) -> None:
    theirs, file = trained(kind, **options)
    own, draw = backend(file), random.Random(5)
    for number in range(2000):
        begin = draw.randrange(len(CODE))
        chosen = "".join(draw.choices(ALPHABET, k=draw.randrange(40)))
        text = CODE[begin : begin + draw.randrange(80)] if number % 2 else chosen
        tokens = own.encode(text, add_special_tokens=False).ids
        expected = theirs.encode(text)
        # A line of one character has several orders of the same pieces, all with the same sum of scores.
        assert tokens == expected or (kind == "unigram" and sorted(tokens) == sorted(expected)), json.dumps(text)
        assert own.decode(tokens) == theirs.decode(tokens)


def test_texts_have_the_tokens_that_gemmas_own_tokenizer_gives_them() -> None:
    """Merges of characters, that of line breaks among them, and bytes for what the vocabulary does not have."""
    learning = tokenizers.Tokenizer(tokenizers.models.BPE())
    learning.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"[^\n]+|[\n]+"), "isolated")
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=900, special_tokens=special, show_progress=False)
    learning.train_from_iterator([CODE[:20000].replace(" ", "▁")], trainer)
    model = json.loads(learning.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    kinds = [CONTROL if i < 5 else BYTE if i < len(special) else NORMAL for i in range(len(tokens))]
    merges = [" ".join(pair) for pair in model["merges"]]
    file = header(model="gemma4", tokens=tokens, merges=merges, token_type=np.array(kinds, dtype="<i4"), bos_token_id=2)
    theirs = transformers.GemmaTokenizer(vocab=model["vocab"], merges=[tuple(pair) for pair in model["merges"]])
    own, draw = backend(file), random.Random(5)
    for number in range(500):
        begin = draw.randrange(20000)
        chosen = "".join(draw.choices(ALPHABET, k=draw.randrange(40)))
        text = CODE[begin : begin + draw.randrange(80)] if number % 2 else chosen
        expected = theirs.backend_tokenizer.encode(text, add_special_tokens=False).ids
        assert own.encode(text, add_special_tokens=False).ids == expected, json.dumps(text)
        assert own.decode(expected) == theirs.backend_tokenizer.decode(expected)
    assert any("\n\n" in token for token in tokens)
    assert tokenizer_config_of(file)["add_bos_token"] is True
    with pytest.raises(ModelError, match="lacks the merges"):
        tokenizer_of(header(model="gemma4", tokens=["a"]))


def test_control_tokens_are_found_in_texts_and_texts_begin_with_bos() -> None:
    _, file = trained("bpe")
    own = backend(file)
    assert own.encode("<s>a</s>", add_special_tokens=False).ids[::3] == [1]
    assert own.encode("<s>a</s>", add_special_tokens=False).ids[-1] == 2
    assert tokenizer_config_of(file)["add_bos_token"] is True
    assert generation_config_of(file) == {"eos_token_id": [2]}


def test_scores_that_say_no_order_are_refused() -> None:
    file = header(model="llama", tokens=["<unk>", "a", "b", "ab", "ba"], scores=np.full(5, -1000.0, dtype="<f4"))
    with pytest.raises(ModelError, match="scores of its tokens are all the same"):
        tokenizer_of(file)


SMALL = {
    "model": "llama",
    "tokens": ["<unk>", "<s>", "</s>", "▁", "a", "b", "ab", "▁ab"],
    "token_type": np.array([2, 3, 3, 1, 1, 1, 1, 1], dtype="<i4"),
    "scores": np.array([0, 0, 0, -3, -4, -5, -1, -2], dtype="<f4"),
}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        *(({"add_bos_token": value}, "should be true or false") for value in (1, 0, "false", [True])),
        ({"add_eos_token": "false"}, "should be true or false"),
        ({"add_space_prefix": "false"}, "should be true or false"),
        ({"add_bos_token": True, "bos_token_id": 2**32 - 1}, "no bos_token_id to add"),
        *(({"bos_token_id": value}, "bos_token_id = .*, and 8 tokens") for value in (8, -5, "1", 1.0)),
        ({"eot_token_id": 99}, "eot_token_id = 99, and 8 tokens"),
        ({"token_type": np.array([2, 3, 3, 1, 7, 1, 1, 1])}, "a token of type 7; types are 0 to 6"),
        ({"token_type": np.array([2, 3, 3, 1, -1, 1, 1, 1])}, "a token of type -1; types are 0 to 6"),
        ({"tokens": [*SMALL["tokens"][:-1], "a"]}, "the token 'a' twice, as 4 and as 7"),
        ({"scores": np.array([0, 0, 0, np.nan, 0, 0, 0, 0])}, "no finite numbers"),
    ],
)
def test_metadata_that_would_give_other_ids_than_meant_is_refused(given: dict[str, Any], message: str) -> None:
    file = header(**(SMALL | given))
    with pytest.raises(ModelError, match=message):
        _ = tokenizer_of(file), tokenizer_config_of(file), generation_config_of(file)


def test_what_a_file_leaves_out_is_what_sentencepiece_and_llama_cpp_have() -> None:
    config = tokenizer_config_of(header(**SMALL))
    assert (config["bos_token"], config["eos_token"], config["unk_token"]) == ("<s>", "</s>", "<unk>")
    assert (config["add_bos_token"], config["add_eos_token"]) == (True, False)
    assert generation_config_of(header(**SMALL)) == {"eos_token_id": [2]}
    none = header(**SMALL, eos_token_id=2**32 - 1, bos_token_id=-1)
    assert "bos_token" not in tokenizer_config_of(none)
    # A type of 0 is "undefined": text, in llama.cpp.
    undefined = header(**(SMALL | {"token_type": np.array([2, 3, 3, 0, 0, 0, 0, 0])}))
    assert backend(undefined).encode("ab", add_special_tokens=False).ids == [7]


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ({"architecture": "phi3"}, True),
        ({"name": "Phi-3 Mini"}, True),
        ({"name": "Phi3"}, True),
        ({"name": "b"}, False),
    ],
)
def test_added_tokens_of_phi_3_take_the_blanks_behind_them(given: dict[str, str], taken: bool) -> None:
    tokens = [*SMALL["tokens"], "<|end|>"]
    file = header(**(SMALL | {"tokens": tokens, "scores": np.append(SMALL["scores"], 0.0)}), add_space_prefix=True)
    kinds = {"tokenizer.ggml.token_type": np.append(SMALL["token_type"], CONTROL)}
    file.metadata.update(kinds | {f"general.{name}": value for name, value in given.items()})
    # As llama.cpp and the model's own tokenizer.json have it: `<s>` and `<unk>` take none.
    assert backend(file).encode("<|end|>\n ab", add_special_tokens=False).ids == ([8, 7] if taken else [8, 3, 0, 7])
    assert backend(file).encode("<s> ab", add_special_tokens=False).ids == [1, 3, 7]


@pytest.mark.parametrize("model", ["t5", "bert", "rwkv", "plamo2", "none", None, 3])
def test_another_kind_of_tokenizer_is_refused_by_name(model: Any) -> None:
    with pytest.raises(
        ModelError, match=r"implemented: 'gpt2' \(byte-level BPE\), 'llama' \(SentencePiece\)"
    ) as caught:
        tokenizer_of(header(model=model, tokens=["a"]))
    assert repr(model) in caught.value.message


def test_how_its_author_samples_and_what_ends_an_output_come_from_the_metadata() -> None:
    file = header(
        tokens=["a", "</s>", "<|eot_id|>", "<|im_end|>", "b"],
        token_type=np.array([1, 3, 3, 1, 1], dtype="<i4"),
        eos_token_id=1,
        eot_token_id=4,
    )
    file.metadata["general.sampling.temp"] = 0.6
    file.metadata["general.sampling.top_k"] = 20
    # Those that are known by their text need no type.
    assert generation_config_of(file) == {
        "eos_token_id": [1, 2, 3, 4],
        "temperature": 0.6,
        "top_k": 20,
        "do_sample": True,
    }


SPLITS = {
    "llama-bpe": ["I", "'LL", " take", " ", "123", "45", " x", "²", "?\n\n", " A"],
    "qwen35": ["I", "'LL", " take", " ", "1", "2", "3", "4", "5", " x", "²", "?\n\n", " A"],
    "smollm": ["I", "'", "LL", " take", " ", "1", "2", "3", "4", "5", " x", "²", "?", "\n\n", " A"],
    "default": ["I", "'", "LL", " take", " ", "123", "45", " x", "²", "?", "\n\n", " A"],
    "tekken": ["I", "'LL", " take", " ", "1", "2", "3", "4", "5", " x", "²", "?\n\n", " A"],
    "deepseek-coder": ["I", "'", "LL", " take", " ", "1", "2", "3", "4", "5", " x", "²", "?", "\n", "\n", " A"],
    "youtu": ["I'LL", " take", " ", "1", "2", "3", "4", "5", " x", "²", "?\n\n", " A"],
    "gpt-4o": ["I'LL", " take", " ", "123", "45", " x", "²", "?\n\n", " A"],
}


@pytest.mark.parametrize("pre", SPLITS)
def test_text_is_cut_as_the_name_of_the_pre_tokenizer_says(pre: str) -> None:
    steps = {"type": "Sequence", "pretokenizers": list(PRE_TOKENIZERS[pre].steps)}
    model = {"type": "BPE", "vocab": {"a": 0}, "merges": []}
    own = tokenizers.Tokenizer.from_str(json.dumps({"version": "1.0", "pre_tokenizer": steps, "model": model}))
    text = "I'LL take 12345 x²?\n\n A"
    cut = own.pre_tokenizer.pre_tokenize_str(text)
    assert [text[begin:end] for _, (begin, end) in cut] == SPLITS[pre]


def test_every_pre_tokenizer_is_one_that_can_be_made() -> None:
    model = {"type": "BPE", "vocab": {"a": 0}, "merges": []}
    for pre in PRE_TOKENIZERS.values():
        steps = {"type": "Sequence", "pretokenizers": list(pre.steps)}
        tokenizers.Tokenizer.from_str(json.dumps({"version": "1.0", "pre_tokenizer": steps, "model": model}))


def test_random_damage_of_a_tokenizer_gives_one_or_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(4)
    whole = {
        "model": "llama",
        "pre": "qwen2",
        "tokens": ["<unk>", "<s>", "▁", "a", "b", "ab"],
        "token_type": np.array([2, 3, 1, 1, 1, 1], dtype="<i4"),
        "scores": np.array([0, 0, -3, -4, -5, -1], dtype="<f4"),
        "merges": ["a b"],
        "unknown_token_id": 0,
        "eos_token_id": 1,
        "add_space_prefix": True,
    }
    values = (None, 0, -1, 10**9, "", "x", [], ["a"], ["a", "a"], np.array([1, 2]), np.zeros(6), 1.5, True, [[1]])
    files: list[Header] = []
    readers = {"tokenizer.json": tokenizer_of, "tokenizer_config.json": tokenizer_config_of}
    readers["generation_config.json"] = generation_config_of
    monkeypatch.setattr(tokenizer_module, "is_gguf", lambda path: True)
    monkeypatch.setattr(
        tokenizer_module, "read_checkpoint_json", lambda path, name: readers[name](files[-1]) if name in readers else {}
    )
    read = 0
    for _ in range(2000):
        damaged = dict(whole) | {"model": draw.choice(("llama", "gpt2"))}
        for name in draw.sample(list(whole), draw.randint(1, 3)):
            damaged[name] = draw.choice(values)
        files.append(header(**{name: value for name, value in damaged.items() if value is not None}))
        with suppress(ModelError):
            assert isinstance(tokenizer_module.load_tokenizer(Path("m.gguf")).encode("ab a"), list)
            read += 1
    assert 100 < read < 1900


# One vocabulary: bytes, and in it tokens whose types are those of text.
CHARACTERS = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())


def byte_level(pre: str, *more: str, kind: int = NORMAL) -> Header:
    tokens = [*CHARACTERS, *more]
    types = np.array([NORMAL] * len(CHARACTERS) + [kind] * len(more), dtype="<i4")
    return header(model="gpt2", pre=pre, tokens=tokens, token_type=types, merges=[])


@pytest.mark.parametrize("kind", [NORMAL, USER_DEFINED, UNUSED, CONTROL])
@pytest.mark.parametrize("token", ["<|im_end|>", "<end_of_turn>", "</s>", "<｜end▁of▁sentence｜>", "<|fim_pad|>"])
def test_a_token_that_is_known_by_its_text_is_one_and_ends_an_output_whatever_its_type(token: str, kind: int) -> None:
    file = byte_level("llama-bpe", token, kind=kind)
    own, number = backend(file), len(CHARACTERS)
    ids = own.encode(f"a{token}b", add_special_tokens=False).ids
    assert ids[1:-1] == [number]
    assert own.decode([number], skip_special_tokens=True) == ""
    assert generation_config_of(file)["eos_token_id"] == [number]


@pytest.mark.parametrize(("kind", "is_text"), [(NORMAL, True), (CONTROL, False)])
def test_a_token_that_merges_make_is_text_unless_the_file_calls_it_a_control_token(kind: int, is_text: bool) -> None:
    file = byte_level("qwen2", "</", "s>")
    tokens, types = file.metadata["tokenizer.ggml.tokens"], file.metadata["tokenizer.ggml.token_type"]
    merges = ["< /", "s >", "</ s>"]
    file = header(
        model="gpt2", pre="qwen2", tokens=[*tokens, "</s>"], token_type=np.array([*types, kind]), merges=merges
    )
    number = len(tokens)
    # Words are letters, so that the merge of both halves is never reached.
    expected = [number - 2, *backend(file).encode("s>", add_special_tokens=False).ids] if is_text else [number]
    assert backend(file).encode("</s>", add_special_tokens=False).ids == expected
    assert generation_config_of(file) == ({} if is_text else {"eos_token_id": [number]})


def test_what_marks_a_place_to_fill_is_one_token_and_ends_nothing() -> None:
    file = byte_level("llama-bpe", "<|fim_prefix|>", "<|other|>")
    ids = backend(file).encode("<|fim_prefix|><|other|>", add_special_tokens=False).ids
    assert (ids[0], len(ids)) == (len(CHARACTERS), 1 + len("<|other|>"))
    assert generation_config_of(file) == {}


@pytest.mark.parametrize(
    ("tokens", "ends"),
    [
        (["<|end|>", "<|call|>", "<|return|>"], [1, 2]),
        (["<|end|>", "<|calls|>", "<|flush|>"], [1, 2]),
        (["<|end|>", "<|return|>"], [0, 1]),
        (["</s>", "<|tool_response>"], [1]),
    ],
)
def test_beside_some_tokens_others_end_a_message_alone(tokens: list[str], ends: list[int]) -> None:
    found = generation_config_of(byte_level("gpt-2", *tokens))["eos_token_id"]
    assert found == [len(CHARACTERS) + place for place in ends]


@pytest.mark.parametrize(
    ("pre", "theirs"),
    [
        ("qwen35", "Qwen3_5Tokenizer"),
        ("qwen2", "Qwen2Tokenizer"),
        ("mpt", "GPTNeoXTokenizer"),
        ("olmo", "GPTNeoXTokenizer"),
        ("command-r", "CohereTokenizer"),
        ("gpt-2", "GPT2Tokenizer"),
    ],
)
def test_texts_are_normalized_as_by_the_tokenizer_of_transformers(pre: str, theirs: str) -> None:
    import transformers

    vocabulary = {token: number for number, token in enumerate(CHARACTERS)}
    oracle = getattr(transformers, theirs)(vocab=vocabulary, merges=[]).backend_tokenizer
    own, letters = backend(byte_level(pre)), {token: number for number, token in enumerate(CHARACTERS)}
    for text in ("Ca\u0302\u0301 e\u0301te\u0301", "\u1100\u1161", "\ufb01 \u2126 é", "plain"):
        expected = [letters[oracle.id_to_token(each)] for each in oracle.encode(text, add_special_tokens=False).ids]
        assert own.encode(text, add_special_tokens=False).ids == expected
