"""Mistral: Llama without biases, and in its first version with a window."""

from __future__ import annotations

from typing import Any

from ostinato.errors import ModelError
from ostinato.models.hyperparameters import integer
from ostinato.models.llama.spec import llama_spec
from ostinato.plan.model import ModelSpec


def model_spec(config: dict[str, Any]) -> ModelSpec:
    """The spec of a `mistral` config.json. ModelError if its window is shorter than its context."""
    longest = integer(config, "max_position_embeddings", 131072)
    window = config.get("sliding_window", 4096)
    if window is not None and integer({"sliding_window": window}, "sliding_window") < longest:
        raise ModelError(
            f"config.json has sliding_window = {window} and max_position_embeddings = {longest}; supported: attention "
            f"over the whole context, which for this checkpoint is max_position_embeddings of at most {window}"
        )
    return llama_spec(config, "mistral", qkv_bias=False, out_bias=False, mlp_bias=False)
