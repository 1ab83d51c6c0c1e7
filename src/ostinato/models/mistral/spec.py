"""Mistral: Llama without biases, in its first version with a window in every layer."""

from __future__ import annotations

from ostinato.errors import ModelError
from ostinato.json_io import JsonObject
from ostinato.models.config_json import FULL, SLIDING, integer, window_kinds, with_defaults
from ostinato.models.llama.spec import llama_spec
from ostinato.plan.model import ModelSpec

DEFAULT_WINDOW = 4096


def model_spec(config: JsonObject) -> ModelSpec:
    """Return the spec of a `mistral` config.json. ModelError if its `layer_types` contradict its window."""
    config = with_defaults(config, max_position_embeddings=131072)
    num_layers = integer(config, "num_hidden_layers")
    has_windows = config.get("sliding_window", DEFAULT_WINDOW) is not None
    kind = SLIDING if has_windows else FULL
    kinds = window_kinds(config) or (kind,)
    if any(other != kind for other in kinds):
        raise ModelError(
            f"config.json has layer_types {', '.join(sorted(set(kinds)))}, and sliding_window = "
            f"{config.get('sliding_window', DEFAULT_WINDOW)}; supported: all layers {SLIDING} with a window, or all "
            f"{FULL} with null"
        )
    return llama_spec(config, "mistral", slides=(has_windows,) * num_layers, default_window=DEFAULT_WINDOW)
