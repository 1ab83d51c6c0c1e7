"""Zamba2 (arXiv 2411.15242): Mamba-2 layers, and before some of them a shared transformer block."""

from __future__ import annotations

from dataclasses import dataclass

from ostinato.errors import ModelError
from ostinato.json_io import JsonMapping, JsonObject
from ostinato.models.config_json import (
    activation,
    flag,
    flag_is,
    integer,
    layer_kinds,
    number,
    parse_rope,
    shared_fields,
    time_step_limit,
)
from ostinato.plan.layer_specs import AttentionSpec, LayerSpec
from ostinato.plan.mixers import Mamba2Spec
from ostinato.plan.model import ModelSpec

KINDS = {"linear_attention": "mamba2", "mamba": "mamba2", "hybrid": "hybrid"}
DEFAULT_LAYERS, DEFAULT_USES = 54, (6, 12, 18, 24, 30, 36, 42, 47, 51)
"""Defaults of a config.json without kinds of layers: their number, and those with a block."""

ACTIVATIONS = ("gelu", "gelu_pytorch_tanh", "silu")


@dataclass(frozen=True)
class Zamba2Hyperparameters:
    """Hyperparameters of models/zamba2/model.py, besides the layers."""

    num_blocks: int
    """Number of transformer blocks, which the layers that use one take in rotation."""
    uses: tuple[int, ...]
    """Layers that use a block."""
    intermediate_size: int
    activation: str
    adapter_rank: int
    adapts_attention: bool
    """True if a use has adapters for queries, keys and values too, not only for its MLP."""
    bias: bool
    dt_limit: tuple[float, float]
    norm_eps: float


def model_spec(config: JsonObject) -> ModelSpec:
    """Return the spec of a `zamba2` config.json."""
    flag_is(config, "use_conv_bias", True)
    flag_is(config, "use_shared_mlp_adapter", True)
    flag_is(config, "use_long_context", False)
    kinds, attention, mixer = _kinds(config), _attention(config), _mixer(config)
    uses = tuple(i for i, kind in enumerate(kinds) if kind == "hybrid")
    mamba = LayerSpec("mamba2", mixer=mixer)
    hybrids = {layer: LayerSpec("hybrid", attention, mixer, use=use) for use, layer in enumerate(uses)}
    num_blocks = integer(config, "num_mem_blocks", 1, least=1)
    return ModelSpec(
        architecture="zamba2",
        **shared_fields(config, default_tied=True),
        layers=tuple(hybrids.get(i, mamba) for i in range(len(kinds))),
        rope=parse_rope(config, attention.head_dim) if uses and flag(config, "use_mem_rope", False) else None,
        sharded_dims=("intermediate_size",),
        hyperparameters=Zamba2Hyperparameters(
            num_blocks=num_blocks,
            uses=uses,
            intermediate_size=integer(config, "intermediate_size", 4 * integer(config, "hidden_size")),
            activation=activation(config, "hidden_act", "gelu", ACTIVATIONS),
            adapter_rank=integer(config, "adapter_rank", 128),
            adapts_attention=flag(config, "use_shared_attention_adapter", False),
            bias=flag(config, "add_bias_linear", False),
            dt_limit=time_step_limit(config),
            norm_eps=number(config, "rms_norm_eps", 1e-5),
        ),
    )


def _kinds(config: JsonMapping) -> tuple[str, ...]:
    """Return the kind of each layer.

    ModelError if a config.json without them does not have the architecture's default number of layers.
    """
    kinds = layer_kinds(config, KINDS, ("layers_block_type", "layer_types"))
    if kinds is not None:
        return kinds
    count = integer(config, "num_hidden_layers", DEFAULT_LAYERS)
    if count != DEFAULT_LAYERS:
        raise ModelError(
            f"config.json has num_hidden_layers = {count} and no layers_block_type; "
            f"a zamba2 model has {DEFAULT_LAYERS} layers where none are named"
        )
    return tuple("hybrid" if i in DEFAULT_USES else "mamba2" for i in range(count))


def _attention(config: JsonMapping) -> AttentionSpec:
    """Return the attention of the blocks, whose heads divide twice the hidden size.

    ModelError for other sizes, and for adapters of keys and values that have fewer heads than queries.
    """
    size = 2 * integer(config, "hidden_size")
    num_heads = integer(config, "num_attention_heads", 32)
    num_kv_heads = integer(config, "num_key_value_heads", num_heads)
    if not num_heads or size % num_heads:
        raise ModelError(
            f"config.json has num_attention_heads = {num_heads}, which should divide 2 * hidden_size = {size}"
        )
    for name, expected in (
        ("attention_hidden_size", size),
        ("attention_head_dim", size // num_heads),
        ("head_dim", size // num_heads),
    ):
        if integer(config, name, expected) != expected:
            raise ModelError(
                f"config.json has {name} = {config[name]}; in a zamba2 model the heads part 2 * hidden_size, so that "
                f"it is {expected}"
            )
    if num_kv_heads != num_heads and flag(config, "use_shared_attention_adapter", False):
        raise ModelError(
            f"config.json has use_shared_attention_adapter = true and num_key_value_heads = {num_kv_heads}; "
            f"supported with adapters: as many as num_attention_heads, {num_heads}"
        )
    return AttentionSpec(num_heads, num_kv_heads, size // num_heads)


def _mixer(config: JsonMapping) -> Mamba2Spec:
    inner_size = integer(config, "mamba_expand", 2) * integer(config, "hidden_size")
    num_heads = integer(config, "n_mamba_heads", 8)
    if not num_heads or inner_size % num_heads:
        raise ModelError(
            f"config.json has n_mamba_heads = {num_heads}, which should divide mamba_expand * hidden_size = "
            f"{inner_size}"
        )
    head_dim = inner_size // num_heads
    if integer(config, "mamba_headdim", head_dim) != head_dim:
        raise ModelError(
            f"config.json has mamba_headdim = {config['mamba_headdim']} and n_mamba_heads = {num_heads}; "
            f"their product should be mamba_expand * hidden_size = {inner_size}"
        )
    return Mamba2Spec(
        num_heads=num_heads,
        head_dim=head_dim,
        state_size=integer(config, "mamba_d_state", 64),
        num_groups=integer(config, "mamba_ngroups", 1),
        conv_kernel=integer(config, "mamba_d_conv", 4),
        chunk_size=integer(config, "chunk_size", 256),
    )
