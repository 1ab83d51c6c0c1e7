"""Patterns that split text before merging, by a GGUF file's name for them. Imports no torch.

The patterns are those of the models' own tokenizers. The meaning of the names, and what follows from a name besides the
pattern, is llama.cpp's (src/llama-vocab.cpp).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ostinato.json_io import JsonObject


@dataclass(frozen=True)
class PreTokenizer:
    """Pre-tokenizer. `steps` are tokenizer.json's, in order."""

    steps: tuple[JsonObject, ...]
    normalizer: str | None = None
    takes_whole_words: bool = False
    """True if a word that is a token is not merged."""
    begins: bool = False
    """True if a text begins with `bos` when the file does not say."""


def byte_level(use_regex: bool) -> JsonObject:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": use_regex}


def _split(pattern: str) -> JsonObject:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _by(*patterns: str, **facts: Any) -> PreTokenizer:
    """Return a pre-tokenizer that splits by one pattern after the other."""
    return PreTokenizer((*map(_split, patterns), byte_level(use_regex=False)), **facts)


_ENDINGS = "'s|'t|'re|'ve|'m|'ll|'d"
_CONTRACTIONS = rf"(?i:{_ENDINGS})"
_WORDS = r"|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_REST_WITH_SLASHES = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LOWER, _UPPER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_GPT2 = rf"{_ENDINGS}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)"


def _by_case(ending: str, digits: str) -> str:
    """Return a pattern for words that end where lower case changes to upper case (tekken, o200k)."""
    words = f"{_BEFORE}{_UPPER}*{_LOWER}+{ending}|{_BEFORE}{_UPPER}+{_LOWER}*{ending}"
    return rf"{words}|{digits}{_REST_WITH_SLASHES}"


_LLAMA3_PATTERN = _CONTRACTIONS + _WORDS + r"\p{N}{1,3}" + _REST
_QWEN2_PATTERN = _CONTRACTIONS + _WORDS + r"\p{N}" + _REST
_QWEN35_PATTERN = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_HAN = "[一-龥ࠀ-一가-퟿]+"
_ASIAN = "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+"
_LLAMA3 = _by(_LLAMA3_PATTERN, takes_whole_words=True, begins=True)
_PLAIN = PreTokenizer((byte_level(use_regex=True),))
_DIGITS = PreTokenizer(({"type": "Digits", "individual_digits": True}, byte_level(use_regex=True)))

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "default": _by(r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
    **dict.fromkeys(("gpt-2", "phi-2", "exaone4", "granite-docling"), _PLAIN),
    **dict.fromkeys(("mpt", "olmo"), replace(_PLAIN, normalizer="NFC")),
    **dict.fromkeys(("smollm", "refact", "starcoder", "codeshell", "exaone", "minerva-7b"), _DIGITS),
    "command-r": replace(_DIGITS, normalizer="NFC"),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe"), _by(_LLAMA3_PATTERN)),
    **dict.fromkeys(("qwen2", "megrez", "stablelm2"), _by(_QWEN2_PATTERN, normalizer="NFC")),
    "deepseek-r1-qwen": _by(_QWEN2_PATTERN),
    "qwen35": _by(_QWEN35_PATTERN, normalizer="NFC"),
    "deepseek-coder": _by(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN, r"\p{N}"),
    "youtu": _by(_ASIAN, _by_case(f"{_CONTRACTIONS}?", r"\p{N}"), takes_whole_words=True),
    "falcon": _by(r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]"),
    "tekken": _by(_by_case("", r"\p{N}"), takes_whole_words=True, begins=True),
    **dict.fromkeys(("gpt-4o", "llama4"), _by(_by_case(f"{_CONTRACTIONS}?", r"\p{N}{1,3}"))),
}
"""Pre-tokenizers by `tokenizer.ggml.pre`.

The models of GPT-NeoX's tokenizer (mpt, olmo), Cohere's, Qwen's and StableLM 2's normalize a text first, which
llama.cpp does not.
"""
