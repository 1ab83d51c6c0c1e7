"""Sliding windows: which layers of a config.json see a part of the context alone. None are implemented."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ostinato.errors import ModelError
from ostinato.models.hyperparameters import flag, integer


def refuse_windows(config: Mapping[str, Any], default_window: int | None) -> None:
    """ModelError if a layer's attention is not over the whole context, as Qwen and SmolLM3 spell it: layers are named
    in `layer_types`, or else those from `max_window_layers` on have a window. `default_window` is that of a config.json
    that names none."""
    others = sorted({str(kind) for kind in config.get("layer_types") or () if kind != "full_attention"})
    if others:
        raise ModelError(f"config.json has layer_types {', '.join(others)}; supported: full_attention")
    windowed = flag(config, "use_sliding_window", False) and config.get("sliding_window", default_window) is not None
    if config.get("layer_types") or not windowed:
        return
    first, num_layers = integer(config, "max_window_layers", 28), integer(config, "num_hidden_layers")
    if first < num_layers:
        raise ModelError(
            f"config.json has use_sliding_window and max_window_layers = {first}, so layers {first} to "
            f"{num_layers - 1} would see a part of the context; supported: attention over all of it"
        )
