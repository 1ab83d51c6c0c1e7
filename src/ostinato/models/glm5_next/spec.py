"""GLM-5.3 (model_type `glm5_next`), its text: KDA or latent attention to selected blocks, on streams of residuals.

The mixers are those of Kimi Linear, with a lower bound of the log decay; attention has no positions, and an indexer
selects its blocks. The first layers have a gated MLP, the others experts with shared ones.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ostinato.errors import ModelError
from ostinato.json_io import JsonMapping, JsonObject
from ostinato.models.config_json import (
    activation,
    flag,
    integer,
    layer_kinds,
    number,
    respelled,
    shared_fields,
    spec_of_text,
    text_of_kind,
)
from ostinato.models.kimi_linear.spec import KINDS as OF_KIMI
from ostinato.models.kimi_linear.spec import (
    MLP_KINDS,
    KimiLinearHyperparameters,
    kda,
    kimi_fields,
    latent_attention,
    published_part,
    router,
    spelled,
)
from ostinato.models.qwen4_exp_text.spec import IMAGES_LEFT_OUT, MAX_STREAMS, head_left_out
from ostinato.plan.layer_specs import IndexerSpec, LayerSpec
from ostinato.plan.model import ModelSpec

KINDS = {**OF_KIMI, "indexed_attention": "attention"}
"""Kinds of layers by the values of `layer_types`."""
INDEXERS = {"full": "full", "shared": "shared"}
LETTERS = {"F": "full", "S": "shared"}
"""Kinds of indexers by the letters of `index_topk_pattern`."""
PERIOD, NUM_DENSE, SCALING, DECAY_BOUND, LIMIT = 4, 3, 2.5, -5.0, 10.0
DELTA_NET = {"linear_num_heads": 64, "linear_head_dim": 128}
"""Defaults of a config.json without these values; every last layer of a period has attention."""
MAX_ITERATIONS = 1000
"""Largest number of iterations of Sinkhorn's algorithm: each passes over the weights of every token."""


@dataclass(frozen=True)
class Glm5NextHyperparameters(KimiLinearHyperparameters):
    """Hyperparameters of models/glm5_next/model.py, besides the layers."""

    query_rank: int
    attention_bias: bool
    decay_bound: float
    """Number below 0 that no log decay goes below; 0 without one."""
    clamp: tuple[float, float, float]
    """Clamp of all gated activations (`ops.moe`)."""
    streams: int
    """Residual streams of the hyper-connections."""
    stream_eps: float
    """Epsilon of their weights."""
    iterations: int
    """Iterations of Sinkhorn's algorithm."""
    num_layers: int


def model_spec(config: JsonObject) -> ModelSpec:
    """Return the spec of the text of a `glm5_next` config.json, in which that may be all there is."""
    is_flat = config.get("text_config") is None and "hidden_size" in config
    if is_flat:
        config = {**config, "text_config": {name: config[name] for name in config if name != "model_type"}}
    text = text_of_kind(config, "glm5_next_text")
    left_out = "; ".join(filter(None, (None if is_flat else IMAGES_LEFT_OUT, head_left_out(text))))
    return spec_of_text(config, _text_spec, "glm5_next", left_out or None, default_tied=False)


def _text_spec(config: JsonObject) -> ModelSpec:
    bound = _decay_bound(config)
    config = respelled(config, {"num_local_experts": "n_routed_experts"})
    config = spelled({**config, "num_local_experts": integer(config, "n_routed_experts")})
    activation(config, "hidden_act", "silu", ("silu",))
    query_rank, streams = integer(config, "q_lora_rank", least=1), integer(config, "hc_mult", 4, MAX_STREAMS, least=1)
    iterations = integer(config, "hc_sinkhorn_iters", 20, MAX_ITERATIONS, least=1)
    limit = number(config, "swiglu_limit", LIMIT)
    if not limit > 0:
        raise ModelError(f"config.json has swiglu_limit = {limit}, which should be above 0")
    latent, attention = latent_attention({"qk_rope_head_dim": 0, **config}, rotates=False)
    if latent.shared:
        raise ModelError(f"config.json has qk_rope_head_dim = {latent.shared}; supported: 0, keys without positions")
    moe, indexer = router(config, SCALING), _indexer(config)
    layers = []
    for kind, selects, is_sparse in zip(*_kinds(config), strict=True):
        experts = moe.experts if is_sparse else None
        if kind == "attention":
            own = replace(attention, indexer=replace(indexer, is_shared=not selects))
            layers.append(LayerSpec("attention", own, experts=experts))
        else:
            layers.append(LayerSpec("delta_net", mixer=kda({**DELTA_NET, **config}), experts=experts))
    return ModelSpec(
        architecture="glm5_next",
        **shared_fields(config),
        layers=tuple(layers),
        rope=None,
        sharded_dims=("intermediate_size", "shared_size"),
        hyperparameters=Glm5NextHyperparameters(
            **kimi_fields(config, latent, moe, norm_eps=1e-5),
            query_rank=query_rank,
            attention_bias=flag(config, "attention_bias", False),
            decay_bound=bound,
            clamp=(1.0, limit, 0.0),
            streams=streams,
            stream_eps=number(config, "hc_eps", 1e-6),
            iterations=iterations,
            num_layers=len(layers),
        ),
        num_streams=streams,
    )


def _kinds(config: JsonMapping) -> tuple[list[str], list[bool], list[bool]]:
    """Return for each layer its kind, whether it selects blocks itself, and whether it has experts.

    ModelError for attention that shares the choice of a layer that has none: in transformers it is that of the layer
    directly before.
    """
    count = integer(config, "num_hidden_layers")
    kinds = layer_kinds(config, KINDS) or tuple(
        "attention" if i % PERIOD == PERIOD - 1 else "delta_net" for i in range(count)
    )
    of_mlps = layer_kinds(config, MLP_KINDS, ("mlp_layer_types",))
    selects = _selects(config, count)
    for i in range(count):
        if kinds[i] == "attention" and not selects[i] and not (i and kinds[i - 1] == "attention" and selects[i - 1]):
            raise ModelError(
                f"config.json has a shared indexer in layer {i}; supported: directly behind a layer of attention with "
                "a full one"
            )
    is_sparse = [i >= NUM_DENSE for i in range(count)] if of_mlps is None else [kind == "sparse" for kind in of_mlps]
    return list(kinds), selects, is_sparse


def _selects(config: JsonMapping, count: int) -> list[bool]:
    """Return for each layer whether its indexer is a full one: by its kind, a pattern of letters, or a period."""
    pattern = config.get("index_topk_pattern")
    if config.get("indexer_types") is None and pattern is not None:
        words = [LETTERS.get(letter, letter) for letter in pattern] if isinstance(pattern, str) else pattern
        config = {**config, "indexer_types": words}
    kinds = layer_kinds(config, INDEXERS, ("indexer_types",))
    if kinds is not None:
        return [kind == "full" for kind in kinds]
    period = max(integer(config, "index_topk_freq", 1), 1)
    first = integer(config, "index_skip_topk_offset", 2)
    return [max(i - first + 1, 0) % period == 0 for i in range(count)]


def _indexer(config: JsonMapping) -> IndexerSpec:
    heads, size = integer(config, "index_n_heads", 32), integer(config, "index_head_dim", 128)
    budget, ratio = integer(config, "index_topk", 2048), integer(config, "index_kpool", 16)
    if min(heads, size, budget, ratio) < 1 or budget % ratio:
        raise ModelError(
            f"config.json has an indexer of {heads} heads of {size}, which selects index_topk = {budget} tokens in "
            f"blocks of index_kpool = {ratio}; supported: whole blocks"
        )
    tail = flag(config, "index_kpool_always_select_tail", True)
    return IndexerSpec(heads, size, budget, ratio, is_gated=True, has_tail=tail)


def _decay_bound(config: JsonMapping) -> float:
    """Return the lower bound of log decays; null is none, but for a published `safe_gate`."""
    published = published_part(config)
    bound = published.get("gate_lower_bound", config.get("linear_lower_bound", DECAY_BOUND))
    if bound is None:
        return DECAY_BOUND if published and flag(published, "safe_gate", True) else 0.0
    value = number({"linear_lower_bound": bound}, "linear_lower_bound")
    if not value < 0:
        raise ModelError(f"config.json has linear_lower_bound = {value}; it should be below 0, or null for no bound")
    return value
