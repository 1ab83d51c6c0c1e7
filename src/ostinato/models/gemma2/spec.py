"""Gemma 2 (arXiv 2408.00118): every other layer has a window, and scores and logits are capped."""

from __future__ import annotations

from ostinato.json_io import JsonObject
from ostinato.models.config_json import integer, parse_rope, sliding_layers
from ostinato.models.gemma3_text.spec import HEAD_DIM, gemma_spec
from ostinato.plan.model import ModelSpec

DEFAULTS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "max_position_embeddings": 8192}
"""Values of a config.json without them. A cap of null is no cap."""

THETA, PATTERN = 10_000.0, 2
"""Defaults of a config.json without these values."""


def model_spec(config: JsonObject) -> ModelSpec:
    """Return the spec of a `gemma2` config.json. ModelError for attention in both directions."""
    config = {**DEFAULTS, **config}
    rope = parse_rope(config, integer(config, "head_dim", HEAD_DIM), default_theta=THETA)
    return gemma_spec(config, "gemma2", sliding_layers(config, PATTERN), (rope,), has_qk_norms=False)
