"""Texts of single tokens, which together are the text, though characters are cut."""

import json

import tokenizers
from tokenizers import decoders, models

from ostinato.engine.text.tokenizer import Tokenizer
from ostinato.scheduler.batch import TokenLogprobs
from ostinato.serve.chat.text_support import LOWEST, CompletionLogprobs, TokenStrings
from tests.support.text_checkpoint import byte_level_tokenizer

TOKENIZER = Tokenizer(byte_level_tokenizer())
TEXT = "é bad\n漢🙂"


def sentencepiece():
    """Pieces with a mark for spaces, and bytes, as in Llama 2."""
    pieces = ["<unk>", "▁a", "b", *(f"<0x{byte:02X}>" for byte in "é".encode())]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[], byte_fallback=True)
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(backend)


def test_the_bytes_of_all_tokens_are_those_of_the_text():
    texts = TokenStrings(TOKENIZER)
    ids = TOKENIZER.encode(TEXT)
    assert len(ids) > len(TEXT)
    assert b"".join(texts.bytes_of(token) for token in ids) == TEXT.encode()
    assert TokenStrings(sentencepiece()).bytes_of(1) == b" a"
    assert [TokenStrings(sentencepiece()).bytes_of(token) for token in (3, 4)] == [b"\xc3", b"\xa9"]


def test_parts_of_characters_are_told_apart():
    texts = TokenStrings(TOKENIZER)
    names = [json.loads(texts.name_json(token)) for token in TOKENIZER.encode("🙂")]
    assert names == ["bytes:\\xf0", "bytes:\\x9f", "bytes:\\x99", "bytes:\\x82"]


def test_offsets_count_the_characters_of_the_text_before_a_token():
    ids = [*TOKENIZER.encode("a漢b"), TOKENIZER.eos_token_id or 1]
    writer = CompletionLogprobs(TokenStrings(TOKENIZER), TOKENIZER, skip_special_tokens=True)
    first, rest = ids[:2], ids[2:]
    offsets = []
    for part in (first, rest):
        logprobs = [TokenLogprobs(token, -1.0, 1) for token in part]
        offsets += json.loads("".join(writer.parts(part, logprobs)))["text_offset"]
    assert offsets == [0, 1, 1, 1, 2, 3]


def test_what_is_impossible_has_a_number_all_the_same():
    texts = TokenStrings(TOKENIZER)
    [token] = json.loads("".join(texts.chat_parts([TokenLogprobs(5, float("-inf"), 131, ((6, -0.5),))])))
    assert token["logprob"] == LOWEST
    assert token["top_logprobs"] == [
        {"token": texts.text_of(6), "bytes": list(texts.bytes_of(6)), "logprob": -0.5},
    ]


def test_the_better_of_two_tokens_of_one_text_counts():
    twins = TokenStrings(Tokenizer(None))
    twins._names = {0: '"x"', 1: '"x"'}
    writer = CompletionLogprobs(twins, Tokenizer(None), skip_special_tokens=True)
    [top] = json.loads("".join(writer.parts([1], [TokenLogprobs(1, -2.0, 2, ((0, -0.5), (1, -2.0)))])))["top_logprobs"]
    assert top == {"x": -0.5}
