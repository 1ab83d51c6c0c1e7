"""What two engines must have in common for the bytes of a block, a pane or a slot to mean the same in both."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ostinato._version import __version__

if TYPE_CHECKING:
    from ostinato.plan.plan import Plan

LAYOUT = 1
"""Of what their bytes mean. A change of a layer's arrays or of their order makes it another one."""


def cache_identity(plan: Plan) -> dict[str, Any]:
    """Of a plan, besides the weights: plain data, ready for `json.dumps`."""
    settings, memory = plan.settings, plan.memory
    return {
        "layout": LAYOUT,
        "version": __version__,
        "dtype": settings.dtype,
        "ssm_state_dtype": settings.ssm_state_dtype,
        "ssm_state_rounding": settings.ssm_state_rounding,
        "kv_cache_dtype": settings.kv_cache_dtype,
        "quantization": str(settings.quantization),
        "block_size": settings.block_size,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "block_bytes": memory.kv_block,
        "pane_bytes": memory.pane,
        "pane_window": memory.pane_window,
        "slot_bytes": memory.state_slot,
        "rope": str(settings.rope),
        "max_model_len": settings.max_model_len if settings.rope is not None else None,
        "speculative": str(settings.speculative),
        "random_weights": settings.seed if settings.random_weights else None,
        "deterministic": settings.deterministic,
        "kernels": sorted({f"{name} {choice.implementation}" for name, choice in plan.kernels.items()}),
        "instructions": plan.device.native.isa,
    }
