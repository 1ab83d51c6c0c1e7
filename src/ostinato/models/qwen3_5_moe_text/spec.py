"""Qwen3.5 with experts, its text model: stored as Qwen3.5, with the experts of Qwen3-Next in every layer."""

from __future__ import annotations

from ostinato.json_io import JsonObject
from ostinato.models.qwen3_next.spec import sparse_spec
from ostinato.plan.model import ModelSpec


def model_spec(config: JsonObject) -> ModelSpec:
    """Return the spec of a `qwen3_5_moe_text` config.json."""
    fixed = {"decoder_sparse_step": 1, "mlp_only_layers": None, "norm_topk_prob": True}
    sizes = {"num_experts": 256, "num_experts_per_tok": 8}
    return sparse_spec(sizes | config | fixed, "qwen3_5_moe_text", "apart")
