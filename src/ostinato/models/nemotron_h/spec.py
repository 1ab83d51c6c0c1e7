"""Nemotron-H: Mamba-2, attention, MLP and mixture-of-experts blocks, one mixer each, in any pattern."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ostinato.errors import ModelError
from ostinato.models.checkpoint import checkpoint_dtype
from ostinato.models.hyperparameters import (
    activation,
    attention_linears,
    attention_parameters,
    expert_linears,
    flag,
    integer,
    linear_parameters,
    mamba2_linears,
    mamba2_parameters,
    mlp_linears,
    mlp_parameters,
    number,
    time_step_limit,
)
from ostinato.plan.model import AttentionSpec, DrafterSpec, LayerSpec, Mamba2Spec, ModelSpec
from ostinato.plan.quantization import LinearSpec

KINDS = {
    "M": "mamba2", "mamba": "mamba2", "linear_attention": "mamba2",
    "*": "attention", "attention": "attention", "full_attention": "attention",
    "-": "mlp", "mlp": "mlp",
    "E": "moe", "moe": "moe",
}  # fmt: skip

OPS = {
    "mamba2": {"causal_conv1d", "ssd_scan", "state_update", "gated_rms_norm"},
    "attention": {"attention", "rotary"},
    "mlp": set(),
    "moe": {"moe", "route"},
}
"""The ops/ functions that a layer of each kind calls, beside linear and rms_norm."""


@dataclass(frozen=True)
class MoeHyperparameters:
    """The experts of a Nemotron-H block. They work on `latent_size` channels, projected from and to the hidden size."""

    num_experts: int
    top_k: int
    intermediate_size: int
    shared_intermediate_size: int
    latent_size: int | None
    num_groups: int
    top_groups: int
    normalize: bool
    scaling: float


@dataclass(frozen=True)
class NemotronHHyperparameters:
    """What models/nemotron_h/model.py builds from."""

    kinds: tuple[str, ...]
    attention: AttentionSpec
    mamba2: Mamba2Spec
    moe: MoeHyperparameters | None
    intermediate_size: int
    mlp_activation: str
    mlp_bias: bool
    mamba_proj_bias: bool
    conv_bias: bool
    dt_limit: tuple[float, float]
    norm_eps: float
    mtp_kinds: tuple[str, ...]
    """Layer kinds of the multi-token prediction head; empty where the checkpoint has none."""


def model_spec(config: dict[str, Any]) -> ModelSpec:
    """The spec of a `nemotron_h` config.json, in either spelling of its layer pattern."""
    activation(config, "mamba_hidden_act", "silu", ("silu",))
    hyper = _hyperparameters(config)
    hidden_size, vocab_size = integer(config, "hidden_size"), integer(config, "vocab_size")
    return ModelSpec(
        architecture="nemotron_h",
        dtype=checkpoint_dtype(config),
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        max_position_embeddings=config.get("max_position_embeddings"),
        # The head has its own weights, whatever tie_word_embeddings says; transformers does not tie it either.
        tied_embeddings=False,
        layers=tuple(_layer(kind, hyper, hidden_size) for kind in hyper.kinds),
        outer_parameters=2 * vocab_size * hidden_size + hidden_size,
        ssm_state_dtype=config.get("mamba_ssm_cache_dtype"),
        rope=None,
        ops=_ops(hyper.kinds, "embedding"),
        hyperparameters=hyper,
        head=_head(hyper, hidden_size) if hyper.mtp_kinds else None,
    )


def _head(hyper: NemotronHHyperparameters, hidden_size: int) -> DrafterSpec:
    """The prediction head: layers as the model's, behind two norms and a projection that join a token with the hidden
    state before it, and before a norm of its own."""
    return DrafterSpec(
        method="mtp",
        layers=tuple(_layer(kind, hyper, hidden_size) for kind in hyper.mtp_kinds),
        outer_parameters=3 * hidden_size + linear_parameters(2 * hidden_size, hidden_size),
        hidden_elements=hidden_size,
        ops=_ops(hyper.mtp_kinds, "concat", "token_shift"),
        outer_linears=(LinearSpec(("layers.0.eh_proj",), 2 * hidden_size, hidden_size),),
    )


def _ops(kinds: tuple[str, ...], *others: str) -> tuple[str, ...]:
    return tuple(sorted({"linear", "rms_norm", *others}.union(*(OPS[kind] for kind in kinds))))


def _hyperparameters(config: dict[str, Any]) -> NemotronHHyperparameters:
    kinds = _pattern(config, "hybrid_override_pattern", "layers_block_type")
    if not kinds:
        raise ModelError("config.json has no layer pattern: neither hybrid_override_pattern nor layers_block_type.")
    num_heads = integer(config, "num_attention_heads")
    has_head = integer(config, "num_nextn_predict_layers", 0) > 0
    mtp_kinds = _pattern(config, "mtp_hybrid_override_pattern", "mtp_layers_block_type") if has_head else ()
    return NemotronHHyperparameters(
        kinds=kinds,
        attention=AttentionSpec(
            num_heads=num_heads,
            num_kv_heads=integer(config, "num_key_value_heads", num_heads),
            head_dim=integer(
                config, "head_dim", integer(config, "attention_head_dim", integer(config, "hidden_size") // num_heads)
            ),
        ),
        mamba2=Mamba2Spec(
            num_heads=integer(config, "mamba_num_heads"),
            head_dim=integer(config, "mamba_head_dim"),
            state_size=integer(config, "ssm_state_size"),
            num_groups=integer(config, "n_groups", integer(config, "mamba_n_groups", 8)),
            conv_kernel=integer(config, "conv_kernel", integer(config, "mamba_d_conv", 4)),
            chunk_size=integer(config, "chunk_size", integer(config, "mamba_chunk_size", 128)),
        ),
        moe=_moe(config) if "moe" in (*kinds, *mtp_kinds) else None,
        intermediate_size=integer(config, "intermediate_size"),
        mlp_activation=activation(config, "mlp_hidden_act", "relu2", ("relu2", "silu")),
        mlp_bias=flag(config, "mlp_bias", False),
        mamba_proj_bias=flag(config, "use_bias", False),
        conv_bias=flag(config, "use_conv_bias", flag(config, "mamba_conv_bias", True)),
        dt_limit=time_step_limit(config),
        norm_eps=number(config, "layer_norm_epsilon", 1e-5),
        mtp_kinds=mtp_kinds,
    )


def _moe(config: dict[str, Any]) -> MoeHyperparameters:
    moe = MoeHyperparameters(
        num_experts=integer(config, "n_routed_experts"),
        top_k=integer(config, "num_experts_per_tok"),
        intermediate_size=integer(config, "moe_intermediate_size"),
        shared_intermediate_size=integer(config, "moe_shared_expert_intermediate_size"),
        latent_size=config.get("moe_latent_size"),
        num_groups=integer(config, "n_group", 1),
        top_groups=integer(config, "topk_group", 1),
        normalize=flag(config, "norm_topk_prob", True),
        scaling=number(config, "routed_scaling_factor", 1.0),
    )
    _check_choice(moe)
    return moe


def _check_choice(moe: MoeHyperparameters) -> None:
    """ModelError if a token's router could not choose as many experts as it is to."""
    experts, groups = moe.num_experts, moe.num_groups
    if groups < 1 or experts % groups or (groups > 1 and experts < 2 * groups):
        raise ModelError(
            f"config.json has n_group = {groups}, which should part {experts} experts into groups of 2 or more"
        )
    if not 1 <= moe.top_groups <= groups:
        raise ModelError(f"config.json has topk_group = {moe.top_groups}, which should be 1 to {groups}")
    allowed = experts // groups * moe.top_groups
    if not 1 <= moe.top_k <= allowed:
        raise ModelError(
            f"config.json has num_experts_per_tok = {moe.top_k}, which should be 1 to {allowed}, the experts of "
            f"{moe.top_groups} of {groups} groups"
        )


def _pattern(config: dict[str, Any], characters: str, words: str) -> tuple[str, ...]:
    """Layer kinds from a string of characters or a list of words; the list wins, as in transformers."""
    pattern = config.get(words) or config.get(characters) or ()
    unknown = sorted({str(kind) for kind in pattern if kind not in KINDS})
    if unknown:
        raise ModelError(f"Unknown layer kinds in the pattern of config.json: {unknown}. Known: {sorted(KINDS)}.")
    return tuple(KINDS[kind] for kind in pattern)


def _layer(kind: str, hyper: NemotronHHyperparameters, hidden_size: int) -> LayerSpec:
    norm = hidden_size
    if kind == "mamba2":
        spec = hyper.mamba2
        parameters, float32 = mamba2_parameters(
            hidden_size, spec, proj_bias=hyper.mamba_proj_bias, conv_bias=hyper.conv_bias, norm=True
        )
        width = spec.in_proj_size + spec.conv_dim + 2 * spec.intermediate_size
        linears = mamba2_linears(hidden_size, spec, "mixer")
        return LayerSpec(kind, None, spec, parameters + norm, float32, width, linears=linears)
    if kind == "attention":
        attention = hyper.attention
        width = 2 * attention.num_heads * attention.head_dim + attention.kv_elements_per_token
        parameters = attention_parameters(hidden_size, attention) + norm
        linears = attention_linears(hidden_size, attention, "mixer")
        return LayerSpec(kind, attention, None, parameters, 0, width, linears=linears)
    if kind == "mlp":
        parameters = mlp_parameters(hidden_size, hyper.intermediate_size, gated=False, bias=hyper.mlp_bias)
        linears = mlp_linears(hidden_size, hyper.intermediate_size, "mixer", gated=False)
        return LayerSpec(kind, None, None, parameters + norm, 0, 2 * hyper.intermediate_size, linears=linears)
    moe = hyper.moe
    assert moe is not None
    inner = moe.latent_size or hidden_size
    expert = mlp_parameters(inner, moe.intermediate_size, gated=False)
    parameters = moe.num_experts * (expert + hidden_size)
    parameters += mlp_parameters(hidden_size, moe.shared_intermediate_size, gated=False, bias=hyper.mlp_bias)
    linears = mlp_linears(hidden_size, moe.shared_intermediate_size, "mixer.shared_experts", gated=False)
    if moe.latent_size is not None:
        linears += (
            LinearSpec(("mixer.fc1_latent_proj",), hidden_size, inner),
            LinearSpec(("mixer.fc2_latent_proj",), inner, hidden_size),
        )
        parameters += linear_parameters(hidden_size, inner, hyper.mlp_bias)
        parameters += linear_parameters(inner, hidden_size, hyper.mlp_bias)
    width = 2 * moe.shared_intermediate_size + inner
    inactive = (moe.num_experts - moe.top_k) * expert
    names = tuple(f"mixer.experts.{i}.{part}" for i in range(moe.num_experts) for part in ("up_proj", "down_proj"))
    experts = expert_linears(inner, moe.intermediate_size, moe.num_experts, names, gated=False)
    return LayerSpec(kind, None, None, parameters + norm, moe.num_experts, width, inactive, linears, experts)
