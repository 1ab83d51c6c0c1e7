"""The model of a tokenizer.json for a vocabulary of SentencePiece, which a GGUF file holds with scores.

SentencePiece has two kinds of model (github.com/google/sentencepiece). One joins, again and again, the two neighbours
that make the piece of the highest score; its scores are 0, -1, -2 and so on, the order in which pieces were learnt. The
other finds the pieces whose scores, logarithms of probabilities, have the highest sum. Neither knows words: blanks are
characters like others, written as U+2581. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ostinato.errors import ModelError

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Kinds of tokens, as `tokenizer.ggml.token_type` numbers them."""


def sentencepiece_model(
    tokens: Sequence[str], scores: Sequence[float], kinds: Sequence[int], unknown: int
) -> dict[str, Any]:
    """Return the `model` of a tokenizer.json. Raises ModelError for scores that give no order."""
    normal = [number for number, kind in enumerate(kinds) if kind == NORMAL]
    values = [scores[number] for number in normal]
    longer = {value for number, value in zip(normal, values, strict=True) if len(tokens[number]) > 1}
    if len(longer) < 2 and len(normal) > 2:
        raise ModelError("the scores of its tokens are all the same, so that they say no order of merges")
    has_bytes = BYTE in kinds
    if all(float(value).is_integer() for value in values):
        return {
            "type": "BPE",
            "vocab": {token: number for number, token in enumerate(tokens)},
            "merges": list(_merges(tokens, scores, normal)),
            "unk_token": tokens[unknown],
            "fuse_unk": True,
            "byte_fallback": has_bytes,
            "ignore_merges": False,
        }
    # Bytes encode text without pieces. With the lowest score they are not used for text that reads as their name.
    lowest = min(values, default=0.0)
    chosen = (scores[number] if kinds[number] == NORMAL else lowest for number in range(len(tokens)))
    return {
        "type": "Unigram",
        "vocab": [[token, float(score)] for token, score in zip(tokens, chosen, strict=True)],
        "unk_id": unknown,
        "byte_fallback": has_bytes,
    }


def _merges(tokens: Sequence[str], scores: Sequence[float], normal: Iterable[int]) -> Iterable[list[str]]:
    """Yield every pair of pieces that makes a piece, those of the highest score first."""
    pieces = {tokens[number]: number for number in normal}
    for number in sorted(pieces.values(), key=lambda number: (-scores[number], number)):
        piece = tokens[number]
        pairs = ((piece[:i], piece[i:]) for i in range(1, len(piece)))
        known = [pair for pair in pairs if pair[0] in pieces and pair[1] in pieces]
        yield from (list(pair) for pair in sorted(known, key=lambda pair: (pieces[pair[0]], pieces[pair[1]])))


def normalizer(adds_space: bool) -> dict[str, Any]:
    """Return the normalizer: it adds a blank before the text if asked to, and writes all blanks as pieces have them."""
    replaced = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    steps = [{"type": "Prepend", "prepend": SPACE}, replaced] if adds_space else [replaced]
    return {"type": "Sequence", "normalizers": steps}


def decoder(adds_space: bool) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if adds_space:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {"type": "Sequence", "decoders": steps}
