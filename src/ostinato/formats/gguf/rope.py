"""Position scaling from the metadata of a GGUF file. Imports no torch."""

from __future__ import annotations

from typing import Any

from ostinato.errors import ModelError
from ostinato.formats.gguf.metadata import Metadata
from ostinato.formats.gguf.names import ROPE_FACTORS

SCALINGS = ("none", "linear", "yarn")
_YARN = ("beta_fast", "beta_slow")
"""Names in a config.json; in the metadata they have the prefix `yarn_`."""
_REFUSED = tuple(
    f"rope.scaling.{name}" for name in ("attn_factor", "yarn_attn_factor", "yarn_log_multiplier", "yarn_ext_factor")
)
"""Settings that must be 1."""


def rope_scaling(metadata: Metadata) -> dict[str, Any] | None:
    """Return the position scaling, as in a config.json. Raises ModelError for what is not implemented."""
    kind = metadata.optional("rope.scaling.type") or "none"
    path = metadata.header.path
    if kind not in SCALINGS:
        raise ModelError(f"{path} has rope.scaling.type = {kind!r}; supported: {', '.join(SCALINGS)}")
    factors = metadata.header.tensors.get(ROPE_FACTORS)
    if factors is not None:
        if kind != "none":
            raise ModelError(f"{path} scales its positions twice, by {ROPE_FACTORS} and rope.scaling.type = {kind!r}")
        if factors.type.name != "F32" or len(factors.shape) != 1:
            raise ModelError(f"{path} has {ROPE_FACTORS} of type {factors.type.name}; it should be a vector of F32")
        import numpy as np  # imported late: a third of a plan's imports, needed only for such files

        values = np.fromfile(factors.file, "<f4", factors.num_elements, offset=factors.begin)
        return {"rope_type": "factors", "factors": [float(value) for value in values]}
    if kind == "none":
        return None
    scaling = {"rope_type": kind, "factor": metadata.number("rope.scaling.factor")}
    original = metadata.optional("rope.scaling.original_context_length")
    if original is not None:
        scaling["original_max_position_embeddings"] = metadata.integer("rope.scaling.original_context_length")
    if kind == "yarn":
        for name in _REFUSED:
            if metadata.optional(name) not in (None, 1.0):
                raise ModelError(f"{path} has {name} = {metadata.optional(name)!r}; supported: 1")
        given = (name for name in _YARN if metadata.optional(f"rope.scaling.yarn_{name}") is not None)
        scaling |= {name: metadata.number(f"rope.scaling.yarn_{name}") for name in given}
    return scaling
