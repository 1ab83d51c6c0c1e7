"""Check of a tokenizer that replaces the checkpoint's against the model. Imports no torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from ostinato.errors import ConfigError, Remedy
from ostinato.formats.parts import is_gguf, read_checkpoint_json
from ostinato.plan.model import ModelSpec


def with_given_tokens(model: ModelSpec, tokenizer: str, place: Path) -> ModelSpec:
    """Return the model with the number of token ids that have a text in `tokenizer`, whose files are in `place`.

    ConfigError if there is no tokenizer, or it has ids that the model does not know; ModelError if it is damaged.
    """
    ids = _ids(read_checkpoint_json(place, "tokenizer.json"))
    if not ids:
        where = place if is_gguf(place) else place / "tokenizer.json"
        raise ConfigError(
            f"tokenizer {tokenizer!r} has no vocabulary: {where} is not there or names no tokens; give a directory "
            "with a tokenizer.json, or a GGUF file",
            [Remedy("tokenizer", None)],
        )
    highest = max(ids)
    if highest >= model.vocab_size:
        raise ConfigError(
            f"tokenizer {tokenizer!r} does not fit the model: it has token ids up to {highest:,}, and the model's are "
            f"from 0 to {model.vocab_size - 1:,}; give the tokenizer that the model was trained with",
            [Remedy("tokenizer", None)],
        )
    return replace(model, given_tokens=len(ids))


def _ids(parts: dict[str, Any]) -> set[int]:
    """Return all token ids of a tokenizer.json.

    Its vocabulary maps text to id, or is a list of (text, score) in the order of the ids.
    """
    vocabulary = (parts.get("model") or {}).get("vocab") or {}
    ids = set(vocabulary.values()) if isinstance(vocabulary, dict) else set(range(len(vocabulary)))
    return ids | {token["id"] for token in parts.get("added_tokens") or ()}
