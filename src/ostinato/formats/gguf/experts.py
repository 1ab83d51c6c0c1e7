"""Sizes and routing of experts from the metadata of a GGUF file. Imports no torch."""

from __future__ import annotations

from ostinato.errors import ModelError
from ostinato.formats.gguf.metadata import Metadata

SOFTMAX, SIGMOID = 1, 2
"""Values of `expert_gating_func` (gguf-py, gguf/constants.py)."""

_NAMES = {SOFTMAX: "softmax", SIGMOID: "sigmoid"}


def expert_size(metadata: Metadata) -> int:
    """Return the size of an expert's inner activations."""
    return metadata.rows("ffn_up_exps.weight") or metadata.integer("expert_feed_forward_length")


def expect_gates(metadata: Metadata, expected: int) -> None:
    """Raise ModelError if the file says that experts' weights come from another function than its models have."""
    found = metadata.integer("expert_gating_func", expected)
    if found != expected:
        raise ModelError(
            f"{metadata.header.path} has {metadata.architecture}.expert_gating_func = {found}; supported for "
            f"{metadata.architecture}: {expected} ({_NAMES[expected]})"
        )
