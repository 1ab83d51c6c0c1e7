"""Granite 4: a Mamba-2 mixer or attention, then a shared MLP beside experts (or alone), in every layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ostinato.errors import ModelError
from ostinato.models.checkpoint import checkpoint_dtype
from ostinato.models.hyperparameters import (
    activation,
    attention_linears,
    attention_parameters,
    expanded_mamba2_spec,
    expert_linears,
    flag,
    integer,
    linear_parameters,
    mamba2_linears,
    mamba2_parameters,
    mlp_parameters,
    number,
    time_step_limit,
)
from ostinato.plan.model import AttentionSpec, LayerSpec, Mamba2Spec, ModelSpec, RopeSpec
from ostinato.plan.quantization import LinearSpec
from ostinato.plan.rope import parse_rope

KINDS = {
    "mamba": "mamba2",
    "linear_attention": "mamba2",
    "attention": "attention",
    "full_attention": "attention",
}
POSITIONS = (None, "nope", "rope")
"""Values of `position_embedding_type`; the first two both mean attention without positions."""


@dataclass(frozen=True)
class MoeHyperparameters:
    """The routed experts of a layer."""

    num_experts: int
    top_k: int
    intermediate_size: int


@dataclass(frozen=True)
class GraniteMoeHybridHyperparameters:
    """What models/granitemoehybrid/model.py builds from."""

    kinds: tuple[str, ...]
    attention: AttentionSpec
    mamba2: Mamba2Spec
    moe: MoeHyperparameters | None
    shared_intermediate_size: int
    attention_bias: bool
    mamba_proj_bias: bool
    conv_bias: bool
    dt_limit: tuple[float, float]
    norm_eps: float
    embedding_multiplier: float
    attention_multiplier: float
    """Takes the place of head_dim ** -0.5."""
    residual_multiplier: float
    logits_scaling: float
    """Divides the logits."""


def model_spec(config: dict[str, Any]) -> ModelSpec:
    """The spec of a `granitemoehybrid` config.json."""
    activation(config, "hidden_act", "silu", ("silu",))
    hyper = _hyperparameters(config)
    hidden_size, vocab_size = integer(config, "hidden_size"), integer(config, "vocab_size")
    tied = flag(config, "tie_word_embeddings", False)
    rope = _rope(config, hyper.attention.head_dim) if "attention" in hyper.kinds else None
    ops = {"embedding", "linear", "rms_norm"}
    if "attention" in hyper.kinds:
        ops |= {"attention", "rotary"} if rope is None else {"attention", "rotary", "rotary_angles"}
    if "mamba2" in hyper.kinds:
        ops |= {"causal_conv1d", "gated_rms_norm", "ssd_scan", "state_update"}
    if hyper.moe is not None:
        ops |= {"moe", "route"}
    return ModelSpec(
        architecture="granitemoehybrid",
        dtype=checkpoint_dtype(config),
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        max_position_embeddings=config.get("max_position_embeddings"),
        tied_embeddings=tied,
        layers=tuple(_layer(kind, hyper, hidden_size) for kind in hyper.kinds),
        outer_parameters=vocab_size * hidden_size * (1 if tied else 2) + hidden_size,
        ssm_state_dtype=config.get("mamba_ssm_cache_dtype"),
        rope=rope,
        ops=tuple(sorted(ops)),
        hyperparameters=hyper,
    )


def _hyperparameters(config: dict[str, Any]) -> GraniteMoeHybridHyperparameters:
    num_heads = integer(config, "num_attention_heads")
    num_experts = integer(config, "num_local_experts", 8)
    return GraniteMoeHybridHyperparameters(
        kinds=_kinds(config),
        attention=AttentionSpec(
            num_heads=num_heads,
            num_kv_heads=integer(config, "num_key_value_heads", num_heads),
            head_dim=integer(config, "head_dim", integer(config, "hidden_size") // num_heads),
        ),
        mamba2=expanded_mamba2_spec(config),
        moe=_moe(config, num_experts) if num_experts else None,
        shared_intermediate_size=integer(config, "shared_intermediate_size", 1024),
        attention_bias=flag(config, "attention_bias", False),
        mamba_proj_bias=flag(config, "mamba_proj_bias", False),
        conv_bias=flag(config, "mamba_conv_bias", True),
        dt_limit=time_step_limit(config),
        norm_eps=number(config, "rms_norm_eps", 1e-6),
        embedding_multiplier=number(config, "embedding_multiplier", 1.0),
        attention_multiplier=number(config, "attention_multiplier", 1.0),
        residual_multiplier=number(config, "residual_multiplier", 1.0),
        logits_scaling=number(config, "logits_scaling", 1.0),
    )


def _moe(config: dict[str, Any], num_experts: int) -> MoeHyperparameters:
    top_k = integer(config, "num_experts_per_tok", 2)
    if not 1 <= top_k <= num_experts:
        raise ModelError(f"config.json has num_experts_per_tok = {top_k}, which should be 1 to {num_experts}")
    return MoeHyperparameters(num_experts, top_k, integer(config, "intermediate_size"))


def _kinds(config: dict[str, Any]) -> tuple[str, ...]:
    """Layer kinds, under either name of their list, in either spelling; without one, all are state layers."""
    count = integer(config, "num_hidden_layers")
    words = config.get("layer_types") or config.get("layers_block_type") or ["linear_attention"] * count
    unknown = sorted({str(word) for word in words if word not in KINDS})
    if unknown:
        raise ModelError(f"config.json has unknown layer types {unknown}; known: {', '.join(KINDS)}")
    if len(words) != count:
        raise ModelError(f"config.json has {len(words)} layer types for num_hidden_layers = {count}")
    return tuple(KINDS[word] for word in words)


def _rope(config: dict[str, Any], head_dim: int) -> RopeSpec | None:
    kind = config.get("position_embedding_type")
    if kind not in POSITIONS:
        known = ", ".join(repr(known) if known else "null" for known in POSITIONS)
        raise ModelError(f"config.json has position_embedding_type = {kind!r}; supported: {known}")
    if kind != "rope":
        return None
    rope = parse_rope(config, head_dim)
    if rope.rotary_dim != head_dim:
        raise ModelError(
            f"config.json rotates {rope.rotary_dim} elements of heads of {head_dim}; "
            "a granitemoehybrid model rotates all of them"
        )
    return rope


def _layer(kind: str, hyper: GraniteMoeHybridHyperparameters, hidden_size: int) -> LayerSpec:
    parameters = mlp_parameters(hidden_size, hyper.shared_intermediate_size) + 2 * hidden_size
    mlp_width, inactive = 3 * hyper.shared_intermediate_size, 0
    experts: tuple[LinearSpec, ...] = ()
    mlp = (
        LinearSpec(("shared_mlp.input_linear",), hidden_size, 2 * hyper.shared_intermediate_size),
        LinearSpec(("shared_mlp.output_linear",), hyper.shared_intermediate_size, hidden_size),
    )
    if hyper.moe is not None:
        moe = hyper.moe
        expert = mlp_parameters(hidden_size, moe.intermediate_size)
        names = ("block_sparse_moe.input_linear", "block_sparse_moe.output_linear")
        experts = expert_linears(hidden_size, moe.intermediate_size, moe.num_experts, names, stacked=True)
        inactive = (moe.num_experts - moe.top_k) * expert
        parameters += moe.num_experts * expert
        parameters += linear_parameters(hidden_size, moe.num_experts)
    if kind == "attention":
        attention = hyper.attention
        parameters += attention_parameters(hidden_size, attention, hyper.attention_bias)
        width = 2 * attention.num_heads * attention.head_dim + attention.kv_elements_per_token
        linears = attention_linears(hidden_size, attention, "self_attn") + mlp
        return LayerSpec(kind, attention, None, parameters, 0, max(width, mlp_width), inactive, linears, experts)
    spec = hyper.mamba2
    mixer, float32 = mamba2_parameters(
        hidden_size, spec, proj_bias=hyper.mamba_proj_bias, conv_bias=hyper.conv_bias, norm=True
    )
    width = spec.in_proj_size + spec.conv_dim + 2 * spec.intermediate_size
    linears = mamba2_linears(hidden_size, spec, "mamba") + mlp
    return LayerSpec(kind, None, spec, parameters + mixer, float32, max(width, mlp_width), inactive, linears, experts)
