"""HRM-Text (model_type `hrm_text`): two stacks of layers, H (slow) and L (fast), each run several times.

The hierarchical reasoning model is that of arXiv 2506.21734.
"""

from __future__ import annotations

from dataclasses import dataclass

from ostinato.errors import ModelError
from ostinato.json_io import JsonMapping, JsonObject
from ostinato.models.config_json import activation, flag, integer, number, parse_rope, shared_fields
from ostinato.plan.layer_specs import AttentionSpec, LayerSpec
from ostinato.plan.model import ModelSpec

L_CYCLES, H_CYCLES, HEADS, HEAD_DIM = 3, 2, 12, 128
"""Defaults of a config.json without these values."""


@dataclass(frozen=True)
class HrmTextHyperparameters:
    """Hyperparameters of models/hrm_text/model.py, besides the layers."""

    stack_size: int
    """Layers of a stack."""
    low_cycles: int
    """Runs of L before each run of H."""
    intermediate_size: int
    embedding_scale: float
    attention_bias: bool
    mlp_bias: bool
    norm_eps: float

    def first_use(self, use: int) -> int:
        """Return the first use of the layer that is used there."""
        run, place = divmod(use, self.stack_size)
        return self.low_cycles * self.stack_size + place if self.is_high(run) else place

    def is_high(self, run: int) -> bool:
        """Return whether a run of a stack is one of H."""
        return run % (self.low_cycles + 1) == self.low_cycles


def model_spec(config: JsonObject) -> ModelSpec:
    """Return the spec of a `hrm_text` config.json, with one layer for each use of a stack's layer.

    `num_hidden_layers` is the number of uses, beside `num_layers_per_stack`; without that, the layers of a stack.
    """
    activation(config, "hidden_act", "silu", ("silu",))
    is_split = config.get("num_layers_per_stack") is not None
    stack_size = integer(config, "num_layers_per_stack" if is_split else "num_hidden_layers", least=1)
    high_cycles, low_cycles = integer(config, "H_cycles", H_CYCLES, least=1), integer(config, "L_cycles", L_CYCLES)
    num_uses = integer({"num_hidden_layers": stack_size * high_cycles * (low_cycles + 1)}, "num_hidden_layers")
    attention = _attention(config)
    return ModelSpec(
        architecture="hrm_text",
        **shared_fields(config),
        layers=tuple(LayerSpec("attention", attention, use=use) for use in range(num_uses)),
        rope=parse_rope(config, attention.head_dim),
        is_prefix_lm=attention.sees_ahead,
        num_streams=3,  # of a block, and the states of both stacks
        sharded_dims=("intermediate_size",),
        hyperparameters=HrmTextHyperparameters(
            stack_size=stack_size,
            low_cycles=low_cycles,
            intermediate_size=integer(config, "intermediate_size"),
            embedding_scale=_embedding_scale(config),
            attention_bias=flag(config, "attention_bias", False),
            mlp_bias=flag(config, "mlp_bias", False),
            norm_eps=number(config, "rms_norm_eps", 1e-6),
        ),
    )


def _attention(config: JsonMapping) -> AttentionSpec:
    """Return the attention of all layers, whose heads have keys and values of their own.

    ModelError for fewer heads of keys and values, and for heads that do not divide the hidden size.
    """
    num_heads, size = integer(config, "num_attention_heads", HEADS), integer(config, "hidden_size")
    if not num_heads or size % num_heads:
        raise ModelError(f"config.json has num_attention_heads = {num_heads}, which should divide hidden_size = {size}")
    if integer(config, "num_key_value_heads", num_heads) != num_heads:
        raise ModelError(
            f"config.json has num_key_value_heads = {config['num_key_value_heads']}; supported: as many as "
            f"num_attention_heads, {num_heads}"
        )
    head_dim, sees_ahead = integer(config, "head_dim", HEAD_DIM), flag(config, "prefix_lm", True)
    return AttentionSpec(num_heads, num_heads, head_dim, sees_ahead=sees_ahead)


def _embedding_scale(config: JsonMapping) -> float:
    """Return the factor of embeddings; without one, the inverse of the range of their initial values."""
    if config.get("embedding_scale") is not None:
        return number(config, "embedding_scale")
    initial = number(config, "initializer_range", 0.02)
    if not initial > 0:
        raise ModelError(f"config.json has initializer_range = {initial} and no embedding_scale; it should be above 0")
    return 1 / initial
