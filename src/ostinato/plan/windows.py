"""What the plan says of layers whose attention has a window."""

from __future__ import annotations

from ostinato.plan.decision import Decision
from ostinato.plan.memory.keys_and_values import bytes_per_token
from ostinato.plan.model import ModelSpec
from ostinato.units import format_bytes


def window_decisions(model: ModelSpec, max_model_len: int, dtype: str) -> list[Decision]:
    """That blocks outside windows are kept, where requests may be longer than one, and what that takes at the most."""
    layers = model.attention_layers
    windows = {layer.window for layer in layers if layer.window is not None and layer.window < max_model_len}
    if not windows:
        return []
    count = sum(layer.window in windows for layer in layers)
    sizes = " or ".join(str(window) for window in sorted(windows))
    whole = sum(bytes_per_token(layer, dtype) for layer in layers) * max_model_len
    reason = (
        f"{count} of {len(layers)} attention layers read the last {sizes} tokens alone; blocks of earlier ones stay "
        "until a request ends, for its other layers and for the prefix cache; in one of max_model_len tokens that is "
        f"{format_bytes(bytes_beyond_windows(model, max_model_len, dtype))} of {format_bytes(whole)}"
    )
    return [Decision("sliding windows", None, "all blocks are kept", reason)]


def bytes_beyond_windows(model: ModelSpec, tokens: int, dtype: str) -> int:
    """Of the keys and values of a request of so many tokens, those that no layer will read again."""
    return sum(
        bytes_per_token(layer, dtype) * max(0, tokens - layer.window)
        for layer in model.attention_layers
        if layer.window is not None
    )
