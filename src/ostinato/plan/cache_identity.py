"""Properties that two engines must share to use each other's blocks, window blocks and slots.

Only then do the bytes mean the same in both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ostinato._version import __version__

if TYPE_CHECKING:
    from ostinato.plan.plan import Plan

CACHE_FORMAT_VERSION = 1
"""Version of the meaning of the bytes. It changes with a layer's arrays or their order."""


def cache_fingerprint(plan: Plan) -> dict[str, Any]:
    """Return a plan's part of the identity, besides the weights, as plain data for `json.dumps`."""
    settings, memory = plan.settings, plan.memory
    return {
        "layout": CACHE_FORMAT_VERSION,
        "version": __version__,
        "dtype": settings.dtype,
        "ssm_state_dtype": settings.ssm_state_dtype,
        "ssm_state_rounding": settings.ssm_state_rounding,
        "kv_cache_dtype": settings.kv_cache_dtype,
        "quantization": str(settings.quantization),
        "block_size": settings.block_size,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "block_bytes": memory.kv_block,
        "pane_bytes": memory.window_block,
        "pane_window": memory.sliding_window,
        "slot_bytes": memory.state_slot,
        "rope": str(settings.rope),
        "max_model_len": settings.max_model_len if settings.rope is not None else None,
        "speculative": str(settings.speculative),
        "random_weights": settings.seed if settings.random_weights else None,
        "deterministic": settings.deterministic,
        "kernels": sorted({f"{name} {choice.implementation}" for name, choice in plan.kernels.items()}),
        "instructions": plan.device.native.isa,
    }
