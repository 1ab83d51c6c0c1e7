"""Sliding windows of the layers of a config.json.

Layers are named in `layer_types`, or each architecture has a rule for the layers with the one `sliding_window`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ostinato.errors import ModelError
from ostinato.models.hyperparameters import flag, integer, layer_kinds

FULL, SLIDING = "full_attention", "sliding_attention"


def layer_windows(config: Mapping[str, Any], slides: Sequence[bool], window: int | None) -> tuple[int | None, ...]:
    """Return the window of each layer, None for layers that see all positions.

    The sliding layers are those that `layer_types` names, or else those of `slides`. They see the last `sliding_window`
    positions, their own included. `window` is the default for a config.json without `sliding_window`. A window that is
    no shorter than the context is None.

    ModelError for other kinds of layers, and for sliding layers without a window.
    """
    kinds = window_kinds(config)
    slides = slides if kinds is None else [kind == SLIDING for kind in kinds]
    if not any(slides):
        return (None,) * len(slides)
    given = config.get("sliding_window", window)
    if given is None:
        raise ModelError(f"config.json names layers with {SLIDING}, and no sliding_window; it should be 1 or more")
    size = integer({"sliding_window": given}, "sliding_window")
    if size < 1:
        raise ModelError(f"config.json has sliding_window = {size}, which should be 1 or more")
    longest = config.get("max_position_embeddings")
    if isinstance(longest, int) and size >= longest:
        return (None,) * len(slides)
    return tuple(size if each else None for each in slides)


def window_kinds(config: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Return `layer_types`, if it is set: `FULL` or `SLIDING` for each layer."""
    return layer_kinds(config, {FULL: FULL, SLIDING: SLIDING})


def switched_windows(config: Mapping[str, Any], slides: Sequence[bool], window: int | None) -> tuple[int | None, ...]:
    """Return `layer_windows` if `use_sliding_window` is true, else no windows (Qwen2, Qwen3, SmolLM3).

    ModelError if `layer_types` contradicts it.
    """
    is_on = flag(config, "use_sliding_window", False)
    if not is_on and SLIDING in (window_kinds(config) or ()):
        raise ModelError(
            f"config.json has layer_types {SLIDING}, and use_sliding_window = false; make it true, or the layers {FULL}"
        )
    is_on = is_on and config.get("sliding_window", window) is not None
    return layer_windows(config, [is_on and each for each in slides], window)


def qwen_windows(config: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Return the windows of Qwen2 and Qwen3: without `layer_types`, layers from `max_window_layers` on have them."""
    first, num_layers = integer(config, "max_window_layers", 28), integer(config, "num_hidden_layers")
    return switched_windows(config, [number >= first for number in range(num_layers)], 4096)
