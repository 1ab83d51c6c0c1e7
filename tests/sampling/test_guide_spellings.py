"""A guide allows every way to cut its texts into tokens, with any tokenizer."""

from __future__ import annotations

import random

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from ostinato.demo import checkpoint_dir
from ostinato.engine.text.tokenizer import Tokenizer, load_tokenizer
from ostinato.sampling.grammar import Grammar, GrammarCompiler, GrammarState
from ostinato.sampling.guide import Guide
from tests.support.guides import EOS, token_ids
from tests.support.languages import BYTES, LETTERS, Language, guides_and_languages


class Vocabulary:
    """The bytes of each token, and the tokenizer that has them. Token 1 ends an output."""

    def __init__(self, pieces: list[bytes], merges: bool, splits: bool) -> None:
        self.bytes_of = {2 + i: piece for i, piece in enumerate(pieces)}
        ids = {"<pad>": 0, "<end>": EOS} | {_spelt(piece): token for token, piece in self.bytes_of.items()}
        rules = [
            (_spelt(piece[:cut]), _spelt(piece[cut:]))
            for piece in pieces
            for cut in range(1, len(piece))
            if merges and piece[:cut] in pieces and piece[cut:] in pieces
        ]
        backend = tokenizers.Tokenizer(models.BPE(vocab=ids, merges=rules, ignore_merges=not merges))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=splits)
        backend.decoder = decoders.ByteLevel()
        backend.add_special_tokens(["<pad>", "<end>"])
        self.tokenizer = Tokenizer(backend)

    def compile(self, guide: Guide) -> Grammar:
        return GrammarCompiler(self.tokenizer, 2 + len(self.bytes_of), [EOS]).compile(guide)

    def text(self, tokens: list[int]) -> bytes:
        return b"".join(self.bytes_of[token] for token in tokens)


def _spelt(piece: bytes) -> str:
    """Bytes as a byte-level vocabulary writes them."""
    return "".join(_CHARACTERS[byte] for byte in piece)


def _byte_characters() -> dict[int, str]:
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


_CHARACTERS = _byte_characters()
_pieces = st.lists(
    st.text(st.sampled_from(LETTERS + '"{}:\n'), min_size=1, max_size=4).map(str.encode).filter(lambda p: len(p) > 1),
    max_size=12,
)


@st.composite
def vocabularies(draw: st.DrawFn) -> Vocabulary:
    pieces = draw(_pieces)
    # Pieces that end within a character.
    pieces += [piece[:-1] for piece in pieces if len(piece) > 2 and draw(st.booleans())]
    singles = [bytes([byte]) for byte in BYTES]
    return Vocabulary(list(dict.fromkeys(singles + pieces)), draw(st.booleans()), draw(st.booleans()))


def expected(vocabulary: Vocabulary, language: Language, text: bytes) -> set[int]:
    """The tokens that may follow a text, by trying each."""
    rest = language.after(text)
    following = {token for token, piece in vocabulary.bytes_of.items() if rest.begins_with(piece)}
    return following | ({EOS} if rest.has_empty else set())


def assert_allowed(guidance: GrammarState, ahead: tuple[int, ...], wanted: set[int]) -> None:
    """`allowed_mask` is None, too, where only the end can follow."""
    allowed = guidance.allowed_mask(ahead)
    assert guidance.error is None
    assert token_ids(allowed) == wanted or (allowed is None and wanted == {EOS})


@settings(deadline=None, max_examples=300)
@given(vocabulary=vocabularies(), guided=guides_and_languages, rng=st.randoms(use_true_random=False))
@pytest.mark.slow
def test_exactly_the_tokens_are_allowed_that_a_text_of_the_guide_goes_on_with(
    vocabulary: Vocabulary, guided: tuple[Guide, Language], rng: random.Random
) -> None:
    guide, language = guided
    output: list[int] = []
    guidance = GrammarState(vocabulary.compile(guide), output)
    for _ in range(10):
        ahead: list[int] = []
        for _ in range(rng.randint(0, 3)):
            wanted = expected(vocabulary, language, vocabulary.text(output + ahead))
            if not wanted - {EOS}:
                break
            ahead.append(rng.choice(sorted(wanted - {EOS})))
            assert_allowed(guidance, tuple(ahead), expected(vocabulary, language, vocabulary.text(output + ahead)))
            wrong = rng.choice(sorted(vocabulary.bytes_of))
            if wrong not in expected(vocabulary, language, vocabulary.text(output + ahead)):
                assert guidance.allowed_mask((*ahead, wrong)) is None
        wanted = expected(vocabulary, language, vocabulary.text(output))
        assert_allowed(guidance, (), wanted)
        if not wanted - {EOS}:
            return
        token = rng.choice(sorted(wanted - {EOS}))
        rest = language.after(vocabulary.text([*output, token]))
        goes_on = any(rest.begins_with(bytes([byte])) for byte in BYTES)
        assert guidance.ends_with((token,)) is (rest.has_empty and not goes_on)
        output.append(token)
        if not goes_on:
            return


@pytest.mark.parametrize(
    "guide",
    [
        Guide(regex=r"17 \+ 25 = [0-9]{2}"),
        Guide(choice=["17 + 25 = 41", "17 + 25 = 42"]),
        Guide(lark='start: "17 + 25 = " NUMBER\nNUMBER: /[0-9]{2}/'),
        Guide(lark='%llguidance {"no_forcing": false}\nstart: "17 + 25 = " NUMBER\nNUMBER: /[0-9]{2}/'),
        Guide(json_schema={"enum": ["17 + 25 = 41", "17 + 25 = 42"]}),
    ],
    ids=["regex", "choice", "Lark", "Lark with options", "JSON"],
)
def test_the_tokens_by_which_the_embedded_model_knows_an_equation_are_allowed(guide: Guide) -> None:
    tokenizer = load_tokenizer(checkpoint_dir())
    grammar = GrammarCompiler(tokenizer, tokenizer.vocab_size, [1]).compile(guide)
    known = tokenizer.encode("17 + 25 = 42", add_special_tokens=False)
    assert len(known) == 8
    before = tokenizer.encode('"', add_special_tokens=False) if guide.json_schema else []
    for i, token in enumerate(known):
        assert token in token_ids(GrammarState(grammar, before + known[:i]).allowed_mask())
