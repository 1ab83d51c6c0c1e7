"""Streamed text: joined, it is the text of all tokens, and no piece splits a character or goes past a
stop."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from ostinato.engine.text.detokenizer import Detokenizer, StopChecker
from ostinato.engine.text.tokenizer import Tokenizer

CORPUS = [
    "the quick brown fox jumps over the lazy dog, don't they? ",
    "“Ja”, sagt Zoë; naïve 😀😀 👩‍👩‍👧 𝄞 日本語 text. ",
    "def f(x):\n    return x  # 12 + 30 = 42\n\n",
] * 4
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def trained(tokenizer: tokenizers.Tokenizer, trainer: trainers.Trainer) -> tokenizers.Tokenizer:
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.add_tokens(["<tool> "])
    return tokenizer


@cache
def byte_level() -> Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=340, show_progress=False, initial_alphabet=alphabet)
    return Tokenizer(trained(tokenizer, trainer))


@cache
def metaspace() -> Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    trainer = trainers.BpeTrainer(vocab_size=200, show_progress=False, special_tokens=["<unk>"])
    return Tokenizer(trained(tokenizer, trainer))


@cache
def byte_fallback() -> Tokenizer:
    """As the Llama 2 family has it: spaces as `▁`, unknown characters as bytes."""
    pieces = ["▁", "▁the", "▁quick", "ick", "a", "e", "n", "▁a", "▁▁▁", ".", ",", "é", "日"]
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocab |= {piece: 256 + i for i, piece in enumerate(pieces)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    steps = [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens(["<|end|>"])
    return Tokenizer(tokenizer)


@cache
def word_piece() -> Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    trainer = trainers.WordPieceTrainer(vocab_size=150, show_progress=False, special_tokens=["[UNK]"])
    return Tokenizer(trained(tokenizer, trainer))


@cache
def end_of_word() -> Tokenizer:
    """The older BPE that marks the ends of words, not their beginnings."""
    tokenizer = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.BPEDecoder(suffix="</w>")
    trainer = trainers.BpeTrainer(
        vocab_size=200, show_progress=False, special_tokens=["<unk>"], end_of_word_suffix="</w>"
    )
    return Tokenizer(trained(tokenizer, trainer))


TOKENIZERS = [byte_level, metaspace, byte_fallback, word_piece, end_of_word]


def stream(tokenizer: Tokenizer, token_ids: Sequence[int], skip: bool, sizes: Sequence[int]) -> list[str]:
    """The pieces when the tokens come in steps of `sizes`, over and over."""
    detokenizer = Detokenizer(tokenizer, skip)
    pieces, start, step = [], 0, 0
    while start < len(token_ids):
        size = sizes[step % len(sizes)]
        pieces.append(detokenizer.append(token_ids[start : start + size]))
        start, step = start + size, step + 1
    return [*pieces, detokenizer.flush()]


@pytest.mark.parametrize("make", TOKENIZERS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_the_pieces_of_any_tokens_join_to_the_text_of_all(make, data) -> None:  # type: ignore[no-untyped-def]
    tokenizer = make()
    # Two ids beyond the vocabulary, as a padded embedding can give.
    token = st.integers(0, tokenizer.vocab_size + 1)
    token_ids = data.draw(st.lists(token, max_size=80))
    sizes = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    skip = data.draw(st.booleans())
    assert "".join(stream(tokenizer, token_ids, skip, sizes)) == tokenizer.decode(token_ids, skip)


@settings(max_examples=150, deadline=None)
@given(
    data=st.lists(st.sampled_from([0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x98, 0x80, 0x61]), min_size=30, max_size=90),
    steps=st.integers(1, 3),
)
def test_the_pieces_of_a_long_run_of_broken_bytes_join_to_the_text_of_all(data: list[int], steps: int) -> None:
    fallback, level = byte_fallback(), byte_level()
    # How the byte-level alphabet writes these bytes.
    letters = {0xE2: "â", 0x82: "Ĥ", 0xAC: "¬", 0xF0: "ð", 0x9F: "Ł", 0x98: "ĺ", 0x80: "Ģ", 0x61: "a"}
    level_ids = [token for byte in data if (token := level.token_id(letters[byte])) is not None]
    assert level.decode(level_ids) == bytes(data).decode("utf-8", "replace")
    for tokenizer, token_ids in ((level, level_ids), (fallback, data)):
        assert "".join(stream(tokenizer, token_ids, True, [steps])) == tokenizer.decode(token_ids)


def test_a_special_token_that_is_left_out_does_not_part_the_bytes_beside_it() -> None:
    tokenizer = byte_fallback()
    end = tokenizer.token_id("<|end|>")
    assert end is not None
    token_ids = [0xE2, end, 0x82, 0xAC, 257]
    assert stream(tokenizer, token_ids, True, [1]) == ["", "", "", "", "€ the", ""]
    spoilt = [0xE2, 0x82, 0xAC, end, 0xFF, 257]
    assert "".join(stream(tokenizer, spoilt, True, [1])) == tokenizer.decode(spoilt) == 4 * REPLACEMENT + " the"
    pieces = stream(tokenizer, token_ids, False, [1])
    assert "".join(pieces) == tokenizer.decode(token_ids, False)


@pytest.mark.parametrize("make", TOKENIZERS)
@settings(max_examples=100, deadline=None)
@given(text=st.text(alphabet=st.one_of(st.sampled_from("ab .,'é日😀👩\u200d𝄞\n  "), st.characters(codec="utf-8"))))
def test_no_piece_of_a_text_splits_a_character(make, text) -> None:  # type: ignore[no-untyped-def]
    tokenizer = make()
    token_ids = tokenizer.encode(text)
    whole = tokenizer.decode(token_ids)
    pieces = stream(tokenizer, token_ids, True, [1])
    assert "".join(pieces) == whole
    if REPLACEMENT not in whole:
        assert not any(REPLACEMENT in piece for piece in pieces)


def test_text_comes_as_soon_as_it_is_whole() -> None:
    tokenizer = byte_level()
    # The bytes of an emoji as the byte-level alphabet writes them, one token each, then a letter.
    token_ids = [token for char in "ðŁĺĢa" if (token := tokenizer.token_id(char)) is not None]
    assert stream(tokenizer, token_ids, True, [1]) == ["", "", "", "😀", "a", ""]


def test_a_context_keeps_the_space_between_prompt_and_output() -> None:
    tokenizer = byte_fallback()
    prompt, output = [257, 262], [257, 258]
    assert Detokenizer(tokenizer).append(output) == "the quick"
    assert Detokenizer(tokenizer, context=prompt).append(output) == " the quick"


def test_a_context_of_many_byte_tokens_does_not_spoil_the_bytes_after_it() -> None:
    tokenizer = byte_fallback()
    prompt = [257, *"本語本語本語".encode()]
    detokenizer = Detokenizer(tokenizer, context=prompt)
    assert detokenizer.append([*"語".encode()]) + detokenizer.append([257]) == "語 the"


@pytest.mark.parametrize("make", TOKENIZERS)
def test_a_token_costs_the_same_early_and_late(make) -> None:  # type: ignore[no-untyped-def]
    tokenizer = make()
    lengths: list[int] = []

    texts = tokenizer.texts[True]
    decode = texts.decode

    def counted(token_ids: Sequence[int]) -> str:
        lengths.append(len(token_ids))
        return decode(token_ids)

    texts.decode = counted
    detokenizer = Detokenizer(tokenizer)
    # Bytes that never make a character, and every other token in turn.
    bad = [token for token in range(tokenizer.vocab_size) if REPLACEMENT in tokenizer.decode([token])][:3]
    token_ids = [token % tokenizer.vocab_size for token in range(2000)] + bad * 700
    for token in token_ids:
        detokenizer.append([token])
    if make is not byte_fallback:
        assert max(lengths) < 60
    assert sum(lengths) < 40 * len(token_ids)


# Stop strings


def reference(text: str, stop: Sequence[str]) -> tuple[str, str | None]:
    """Letter by letter: the text before the stop string that is complete first, the longest of several."""
    for end in range(len(text) + 1):
        found = [string for string in stop if text[:end].endswith(string)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


def run(checker: StopChecker, pieces: Sequence[str]) -> tuple[list[str], str | None]:
    given_out = []
    for piece in pieces:
        text, found = checker.append(piece)
        given_out.append(text)
        if found is not None:
            return given_out, found
    return [*given_out, checker.flush()], None


@settings(max_examples=200, deadline=None)
@given(
    pieces=st.lists(st.text("ab ", max_size=4), max_size=12),
    stop=st.lists(st.text("ab ", min_size=1, max_size=4), max_size=3, unique=True),
)
def test_the_first_stop_string_is_found_however_the_text_is_cut(pieces: list[str], stop: list[str]) -> None:
    text, found = reference("".join(pieces), stop)
    given_out, actual = run(StopChecker(stop), pieces)
    assert ("".join(given_out), actual) == (text, found)
    given_out, actual = run(StopChecker(stop, include_stop_str=True), pieces)
    assert ("".join(given_out), actual) == (text + (found or ""), found)


def test_only_what_may_begin_a_stop_string_is_held_back() -> None:
    checker = StopChecker(["\n\nQ:", "END"])
    assert checker.append("A: 42\n") == ("A: 42", None)
    assert checker.append("\nE") == ("\n\n", None)
    assert checker.append("N") == ("", None)
    assert checker.append("ough\n\n") == ("ENough", None)
    assert checker.append("Q: next") == ("", "\n\nQ:")


def test_nothing_is_looked_for_before_the_checker_is_armed() -> None:
    checker = StopChecker(["stop"])
    assert checker.append("a stop, st", enabled=False) == ("a stop, st", None)
    assert checker.append("op st") == ("op ", None)
    assert checker.append("op") == ("", "stop")


def test_without_stop_strings_nothing_is_held_back() -> None:
    checker = StopChecker([])
    assert checker.append("text") == ("text", None)
    assert checker.flush() == ""
