"""Gemma 4 Unified, its text model: layers of `gemma4_text` without small embeddings and experts."""

from __future__ import annotations

from dataclasses import replace

from ostinato.json_io import JsonObject
from ostinato.models.config_json import with_defaults
from ostinato.models.gemma4_text.spec import model_spec as gemma4_spec
from ostinato.plan.model import ModelSpec

DIRECTIONS = "vision"
"""Default of `use_bidirectional_attention`: the tokens of an image see each other."""
LONGEST, WINDOW = 262_144, 1024
"""Defaults of a config.json without these values."""


def model_spec(config: JsonObject) -> ModelSpec:
    """Return the spec of a `gemma4_unified_text` config.json. ModelError as for `gemma4_text`."""
    config = with_defaults(config, max_position_embeddings=LONGEST, sliding_window=WINDOW)
    # transformers reads no such values.
    absent = {"hidden_size_per_layer_input": 0, "enable_moe_block": False}
    return replace(gemma4_spec({**config, **absent}), architecture="gemma4_unified_text")
