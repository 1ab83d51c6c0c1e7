"""What the plan says of layers whose attention has a window."""

from __future__ import annotations

from ostinato.plan.decision import Decision
from ostinato.plan.model import ModelSpec


def window_decisions(model: ModelSpec, max_model_len: int) -> list[Decision]:
    """That blocks outside windows are kept, where requests may be longer than one."""
    layers = model.attention_layers
    windows = {layer.window for layer in layers if layer.window is not None and layer.window < max_model_len}
    if not windows:
        return []
    count = sum(layer.window in windows for layer in layers)
    sizes = " or ".join(str(window) for window in sorted(windows))
    reason = (
        f"{count} of {len(layers)} attention layers read the last {sizes} tokens alone; blocks of earlier ones stay "
        "until a request ends, for its other layers and for the prefix cache"
    )
    return [Decision("sliding windows", None, "all blocks are kept", reason)]
