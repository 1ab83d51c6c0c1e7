"""Nemotron-H: Mamba-2, attention, MLP and mixture-of-experts blocks, one mixer each, in any pattern."""

from __future__ import annotations

from dataclasses import dataclass

from ostinato.errors import ModelError
from ostinato.json_io import JsonObject
from ostinato.models.config_json import (
    activation,
    attention_spec,
    flag,
    grouped_top_k,
    integer,
    number,
    respelled,
    shared_fields,
    time_step_limit,
)
from ostinato.plan.layer_specs import AttentionSpec, ExpertsSpec, LayerSpec
from ostinato.plan.mixers import Mamba2Spec
from ostinato.plan.model import DrafterSpec, ModelSpec

KINDS = {
    "M": "mamba2", "mamba": "mamba2", "linear_attention": "mamba2",
    "*": "attention", "attention": "attention", "full_attention": "attention",
    "-": "mlp", "mlp": "mlp",
    "E": "moe", "moe": "moe",
}  # fmt: skip


@dataclass(frozen=True)
class MoeHyperparameters:
    """Hyperparameters of a Nemotron-H block with experts.

    The experts work on `latent_size` channels, if that is set, which are projected from and to the hidden size.
    """

    experts: ExpertsSpec
    shared_intermediate_size: int
    latent_size: int | None
    num_groups: int
    top_groups: int
    normalize: bool
    scaling: float


@dataclass(frozen=True)
class NemotronHHyperparameters:
    """Hyperparameters of models/nemotron_h/model.py, besides the layers."""

    moe: MoeHyperparameters | None
    intermediate_size: int
    mlp_activation: str
    mlp_bias: bool
    mamba_proj_bias: bool
    conv_bias: bool
    dt_limit: tuple[float, float]
    norm_eps: float


def model_spec(config: JsonObject) -> ModelSpec:
    """Return the spec of a `nemotron_h` config.json, in either spelling of its layer pattern."""
    config = respelled(config, {"layer_types": "layers_block_type", "num_local_experts": "n_routed_experts"})
    activation(config, "mamba_hidden_act", "silu", ("silu",))
    kinds = _pattern(config, "hybrid_override_pattern", "layers_block_type")
    if not kinds:
        raise ModelError("config.json has no layer pattern: neither hybrid_override_pattern nor layers_block_type.")
    has_head = integer(config, "num_nextn_predict_layers", 0) > 0
    head_kinds = _pattern(config, "mtp_hybrid_override_pattern", "mtp_layers_block_type") if has_head else ()
    hyper = _hyperparameters(config, has_experts="moe" in (*kinds, *head_kinds))
    layers = {
        "mamba2": LayerSpec("mamba2", mixer=_mixer(config)),
        "attention": LayerSpec("attention", _attention(config)),
        "mlp": LayerSpec("mlp"),
        "moe": LayerSpec("moe", experts=None if hyper.moe is None else hyper.moe.experts),
    }
    head_layers, shared = tuple(layers[kind] for kind in head_kinds), shared_fields(config)
    # The head has its own weights, whatever tie_word_embeddings says; transformers does not tie it either.
    shared["tied_embeddings"] = False
    return ModelSpec(
        architecture="nemotron_h",
        **shared,
        layers=tuple(layers[kind] for kind in kinds),
        rope=None,
        sharded_dims=("intermediate_size", "moe.shared_intermediate_size", "moe.experts.intermediate_size"),
        hyperparameters=hyper,
        # The head's layers, of the model's kinds, follow a join of a token with the hidden state before it.
        head=DrafterSpec("mtp", head_layers, hidden_elements=shared["hidden_size"]) if head_layers else None,
    )


def _attention(config: JsonObject) -> AttentionSpec:
    return attention_spec(config, integer(config, "attention_head_dim", 128))


def _mixer(config: JsonObject) -> Mamba2Spec:
    return Mamba2Spec(
        num_heads=integer(config, "mamba_num_heads"),
        head_dim=integer(config, "mamba_head_dim"),
        state_size=integer(config, "ssm_state_size"),
        num_groups=integer(config, "n_groups", integer(config, "mamba_n_groups", 8)),
        conv_kernel=integer(config, "conv_kernel", integer(config, "mamba_d_conv", 4)),
        chunk_size=integer(config, "chunk_size", integer(config, "mamba_chunk_size", 128)),
    )


def _hyperparameters(config: JsonObject, has_experts: bool) -> NemotronHHyperparameters:
    return NemotronHHyperparameters(
        moe=_moe(config) if has_experts else None,
        intermediate_size=integer(config, "intermediate_size"),
        mlp_activation=activation(config, "mlp_hidden_act", "relu2", ("relu2", "silu")),
        mlp_bias=flag(config, "mlp_bias", False),
        mamba_proj_bias=flag(config, "use_bias", False),
        conv_bias=flag(config, "use_conv_bias", flag(config, "mamba_conv_bias", True)),
        dt_limit=time_step_limit(config),
        norm_eps=number(config, "layer_norm_epsilon", 1e-5),
    )


def _moe(config: JsonObject) -> MoeHyperparameters:
    latent_size = integer(config, "moe_latent_size", 0) or None
    num_experts = integer(config, "n_routed_experts")
    chosen, groups, top_groups = grouped_top_k(config, num_experts)
    return MoeHyperparameters(
        experts=ExpertsSpec(
            num_experts=num_experts,
            top_k=chosen,
            size=latent_size or integer(config, "hidden_size"),
            intermediate_size=integer(config, "moe_intermediate_size"),
            is_gated=False,
        ),
        shared_intermediate_size=integer(config, "moe_shared_expert_intermediate_size"),
        latent_size=latent_size,
        num_groups=groups,
        top_groups=top_groups,
        normalize=flag(config, "norm_topk_prob", True),
        scaling=number(config, "routed_scaling_factor", 1.0),
    )


def _pattern(config: JsonObject, characters: str, words: str) -> tuple[str, ...]:
    """Return layer kinds from a string of characters or a list of words; the list wins, as in transformers."""
    pattern = config.get(words) or config.get(characters) or ()
    unknown = sorted({str(kind) for kind in pattern if kind not in KINDS})
    if unknown:
        raise ModelError(f"Unknown layer kinds in the pattern of config.json: {unknown}. Known: {sorted(KINDS)}.")
    return tuple(KINDS[kind] for kind in pattern)
