"""Qwen3-Next and Qwen3.5 with experts: Qwen3.5 with experts and one shared expert in place of the MLP."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ostinato.json_io import JsonMapping, JsonObject
from ostinato.models.config_json import flag, integer, sparse_layers, usual_experts
from ostinato.models.qwen3_5_text.spec import HEAD_COUNTS, Qwen35Hyperparameters, qwen35_spec
from ostinato.plan.layer_specs import ExpertsSpec
from ostinato.plan.mixers import StoredDeltaNet
from ostinato.plan.model import ModelSpec


@dataclass(frozen=True)
class Qwen3NextHyperparameters(Qwen35Hyperparameters):
    """Hyperparameters of models/qwen3_next/model.py, besides the layers."""

    shared_size: int
    """Number of inner activations of the shared expert."""
    normalizes: bool
    """True if the weights of the chosen experts add up to 1."""


def model_spec(config: JsonObject) -> ModelSpec:
    """Return the spec of a `qwen3_next` config.json.

    No config.json has `linear_projections_apart`; the equivalent from a GGUF file's header may. Published checkpoints
    have a prediction head that their config.json does not mention. So a config.json without its keys means a head, and
    loading reports its tensors as missing if they are absent.
    """
    if all(config.get(name) is None for name in HEAD_COUNTS):
        config = {**config, HEAD_COUNTS[0]: 1}
    is_apart = flag(config, "linear_projections_apart", False)
    return _sparse_spec(config, "qwen3_next", "beta_by_key_head" if is_apart else "by_key_head")


def qwen3_5_moe_text_spec(config: JsonObject) -> ModelSpec:
    """Return the spec of a `qwen3_5_moe_text` config.json: stored as Qwen3.5, with experts in every layer."""
    fixed = {"decoder_sparse_step": 1, "mlp_only_layers": None, "norm_topk_prob": True}
    sizes = {"num_experts": 256, "num_experts_per_tok": 8}
    return _sparse_spec(sizes | config | fixed, "qwen3_5_moe_text", "apart")


def _sparse_spec(config: JsonMapping, architecture: str, stored: StoredDeltaNet) -> ModelSpec:
    """Return the spec of a model with experts."""
    plain = qwen35_spec(config, architecture, integer(config, "intermediate_size", 5632), stored)
    hyper = Qwen3NextHyperparameters(
        **vars(plain.hyperparameters),
        shared_size=integer(config, "shared_expert_intermediate_size", 512),
        normalizes=flag(config, "norm_topk_prob", True),
    )
    experts, has_experts = experts_spec(config), sparse_layers(config, len(plain.layers))
    layers = tuple(
        replace(layer, experts=experts) if sparse else layer
        for layer, sparse in zip(plain.layers, has_experts, strict=True)
    )
    head = plain.head
    if head is not None:
        # Its only layer has experts if the first layer of a model would.
        [of_first] = sparse_layers(config, 1)
        own = tuple(replace(layer, experts=experts if of_first else None) for layer in head.layers)
        head = replace(head, layers=own)
    return replace(
        plain, layers=layers, hyperparameters=hyper, sharded_dims=("intermediate_size", "shared_size"), head=head
    )


def experts_spec(config: JsonMapping) -> ExpertsSpec:
    """Return the experts of a layer, besides the shared one."""
    return usual_experts(config, integer(config, "num_experts", 512), 10, "moe_intermediate_size", 512)
