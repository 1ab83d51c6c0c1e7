"""Llama: attention, and a gated MLP or experts, in every layer. Most dense decoders are the same model.

Behind it are its relatives, which have their own readers of config.json and no model of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from ostinato.errors import ModelError
from ostinato.json_io import JsonMapping, JsonObject
from ostinato.models.config_json import (
    DEFAULT_THETA,
    FULL,
    SLIDING,
    activation,
    attention_spec,
    flag,
    integer,
    layer_kinds,
    layer_windows,
    number,
    parse_rope,
    respelled,
    rope_pair,
    shared_fields,
    sliding_layers,
    sparse_layers,
    usual_experts,
    window_kinds,
    with_defaults,
)
from ostinato.plan.layer_specs import ExpertsSpec, LayerSpec
from ostinato.plan.model import ModelSpec
from ostinato.plan.rope import RopeSpec


@dataclass(frozen=True)
class LlamaHyperparameters:
    """Hyperparameters of models/llama/model.py, besides the layers."""

    intermediate_size: int
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    norm_eps: float
    has_neighbours: bool = False
    """True if the rows of queries and keys that positions rotate together are neighbours in the checkpoint."""
    has_packed_tensors: bool = False
    """True if the checkpoint has queries, keys and values as one tensor, and gates with what they gate."""
    embedding_multiplier: float = 1.0
    attention_multiplier: float | None = None
    """Scale of attention scores, in place of head_dim ** -0.5."""
    query_growth: tuple[float, int] | None = None
    """(beta, length): queries at position p are multiplied by 1 + beta ln(1 + floor(p / length))."""
    residual_multiplier: float = 1.0
    logits_multiplier: float = 1.0
    qk_norms: Literal["of_heads", "of_all"] | None = None
    """Norms of queries and keys: for each head, or for all heads together."""
    norms_results: bool = False
    """True if norms follow attention and MLP, in place of preceding them."""
    is_parallel: bool = False
    """True if attention and MLP have one input, a layer norm of the residual stream; the last norm is one too."""
    normalizes: bool = True
    """True if the weights of the chosen experts add up to 1."""
    experts_in: str = "mlp"
    """Checkpoint's name of a layer's experts and their router."""
    unread: str = ""
    """Prefix of the checkpoint's tensors that are not read, those of a prediction head."""
    expert_names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    """Checkpoint's names of an expert's matrices."""


def model_spec(config: JsonObject) -> ModelSpec:
    """Return the spec of a `llama` config.json."""
    bias = flag(config, "attention_bias", False)
    mlp_bias = flag(config, "mlp_bias", False)
    return llama_spec(config, "llama", qkv_bias=bias, mlp_bias=mlp_bias)


def llama_spec(
    config: JsonMapping,
    architecture: str,
    *,
    qkv_bias: bool = False,
    out_bias: bool | None = None,
    mlp_bias: bool = False,
    head_dim: int | None = None,
    default_tied: bool = False,
    default_theta: float = DEFAULT_THETA,
    local_theta: float | None = None,
    default_partial: float | None = None,
    slides: Sequence[bool] | None = None,
    default_window: int | None = None,
    rotates: Sequence[bool] | None = None,
    windows: Sequence[int | None] | None = None,
    experts: Sequence[ExpertsSpec | None] | None = None,
    default_eps: float = 1e-6,
    **hyperparameters: Any,
) -> ModelSpec:
    """Return the spec of a model like Llama.

    `head_dim` and those that begin with `default` are defaults for a config.json without these values. `out_bias` is as
    `qkv_bias` by default. `rotates` tells for each layer whether it has positions; by default all have. `slides` tells
    which have a window (see `layer_windows`); models with another rule give the `windows` themselves. By default there
    are none, and no `experts`. With `local_theta`, config.json has a rotary embedding of its own for the layers that
    `slides` names, of this theta by default. `default_partial` is that of `parse_rope`. `hyperparameters` are further
    ones of `LlamaHyperparameters`.
    """
    activation(config, "hidden_act", "silu", ("silu",))
    attention, num_layers = attention_spec(config, head_dim), integer(config, "num_hidden_layers")
    nothing = (None,) * num_layers
    experts = experts or nothing
    if local_theta is None:
        ropes: tuple[RopeSpec, ...] = (parse_rope(config, attention.head_dim, default_partial, default_theta),)
    else:
        ropes = rope_pair(config, attention.head_dim, default_theta, local_theta, default_partial=default_partial)
    if slides is not None:
        windows = layer_windows(config, slides, default_window)
    is_local = slides if slides and local_theta is not None else (False,) * num_layers
    places = zip(rotates or (True,) * num_layers, is_local, windows or nothing, experts, strict=True)
    return ModelSpec(
        architecture=architecture,
        **shared_fields(config, default_tied),
        layers=tuple(
            LayerSpec("attention", replace(attention, rotates=turns, rope=int(local), window=window), experts=of_layer)
            for turns, local, window, of_layer in places
        ),
        rope=ropes[0],
        other_ropes=ropes[1:],
        sharded_dims=("intermediate_size",),
        hyperparameters=LlamaHyperparameters(
            # Where all layers have experts, no width of an MLP is shared among ranks.
            intermediate_size=integer(config, "intermediate_size") if None in experts else 0,
            qkv_bias=qkv_bias,
            out_bias=qkv_bias if out_bias is None else out_bias,
            mlp_bias=mlp_bias,
            norm_eps=number(config, "rms_norm_eps", default_eps),
            **hyperparameters,
        ),
    )


def cohere2_spec(config: JsonObject) -> ModelSpec:
    """Return the spec of a `cohere2` config.json (Command R7B, Command A): attention beside an MLP.

    Layers have a window, or no positions.
    """
    bias, slides = flag(config, "attention_bias", False), sliding_layers(config, 4)
    return llama_spec(
        {**config, "rms_norm_eps": number(config, "layer_norm_eps", 1e-5)},
        "cohere2",
        qkv_bias=bias,
        default_tied=True,
        rotates=slides,
        slides=slides,
        default_window=4096,
        has_neighbours=True,
        is_parallel=True,
        logits_multiplier=number(config, "logit_scale", 0.0625),
    )


def ernie4_5_spec(config: JsonObject) -> ModelSpec:
    """Return the spec of an `ernie4_5` config.json: heads have the rows that positions rotate together side by side."""
    bias = flag(config, "use_bias", False)
    return llama_spec(
        config,
        "ernie4_5",
        qkv_bias=bias,
        mlp_bias=bias,
        head_dim=128,
        default_tied=True,
        default_theta=500_000.0,
        default_eps=1e-5,
        has_neighbours=True,
    )


def exaone4_spec(config: JsonObject) -> ModelSpec:
    """Return the spec of an `exaone4` config.json: norms after attention and MLP.

    Layers have a window, or no positions. If config.json has no window, all layers have positions.
    """
    window = config.get("sliding_window", 4096)
    slides = sliding_layers(config, 1 if window is None else 4)
    return llama_spec(
        config,
        "exaone4",
        default_eps=1e-5,
        rotates=None if window is None else slides,
        slides=slides,
        default_window=window,
        qk_norms="of_heads",
        norms_results=True,
    )


def granite_spec(config: JsonObject) -> ModelSpec:
    """Return the spec of a `granite` config.json: four multipliers."""
    bias = flag(config, "attention_bias", False)
    return llama_spec(
        config,
        "granite",
        qkv_bias=bias,
        mlp_bias=flag(config, "mlp_bias", False),
        embedding_multiplier=number(config, "embedding_multiplier", 1.0),
        attention_multiplier=number(config, "attention_multiplier", 1.0),
        residual_multiplier=number(config, "residual_multiplier", 1.0),
        logits_multiplier=1.0 / number(config, "logits_scaling", 1.0),
    )


def mellum_spec(config: JsonObject) -> ModelSpec:
    """Return the spec of a `mellum` config.json (Mellum 2): Qwen3 with experts, and layers with a window.

    Those have a rotary embedding of their own. The prediction head, if there is one, is not read.
    """
    # Rotary embeddings are read in their newer spelling alone.
    config = {name: value for name, value in config.items() if name not in ("rope_theta", "partial_rotary_factor")}
    num_layers = integer(config, "num_hidden_layers")
    slides = sliding_layers({"layer_types": [FULL] * num_layers, **config}, 1)
    kinds = layer_kinds(config, {"dense": "", "sparse": "experts"}, ("mlp_layer_types",)) or ("experts",) * num_layers
    experts, bias = qwen_experts(config), flag(config, "attention_bias", False)
    return llama_spec(
        config,
        "mellum",
        qkv_bias=bias,
        head_dim=128,
        default_theta=500_000.0,
        local_theta=10_000.0,
        default_partial=1.0,
        slides=slides,
        default_window=1024,
        experts=[experts if kind else None for kind in kinds],
        unread="mtp.",
        qk_norms="of_heads",
        normalizes=flag(config, "norm_topk_prob", True),
    )


MINISTRAL3_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}
"""Rotary embedding of a config.json of Ministral 3 without one."""


def ministral3_spec(config: JsonObject) -> ModelSpec:
    """Return the spec of a `ministral3` config.json: queries grow with the logarithm of their positions."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or MINISTRAL3_ROPE
    config = with_defaults(config, max_position_embeddings=262144)
    beta = number(rope, "llama_4_scaling_beta", 0.0)
    return llama_spec(
        {**config, "rope_scaling": rope},
        "ministral3",
        head_dim=128,
        default_eps=1e-5,
        slides=_all_slide(config),
        query_growth=(beta, integer(rope, "original_max_position_embeddings")) if beta else None,
    )


def _all_slide(config: JsonMapping) -> tuple[bool, ...]:
    """Return for each layer that it has a window, if config.json has a window, else that it has none."""
    return (config.get("sliding_window") is not None,) * integer(config, "num_hidden_layers")


def mistral_spec(config: JsonObject) -> ModelSpec:
    """Return the spec of a `mistral` config.json: no biases, and in the first version a window in every layer.

    ModelError if its `layer_types` contradict its window.
    """
    config = with_defaults(config, max_position_embeddings=131072)
    config = {**config, "sliding_window": config.get("sliding_window", 4096)}
    slides = _all_slide(config)
    kind = SLIDING if any(slides) else FULL
    kinds = window_kinds(config) or (kind,)
    if any(other != kind for other in kinds):
        raise ModelError(
            f"config.json has layer_types {', '.join(sorted(set(kinds)))}, and sliding_window = "
            f"{config['sliding_window']}; supported: all layers {SLIDING} with a window, or all {FULL} with null"
        )
    return llama_spec(config, "mistral", slides=slides)


def mixtral_spec(config: JsonObject) -> ModelSpec:
    """Return the spec of a `mixtral` config.json: Mistral with experts in every layer (arXiv 2401.04088)."""
    config = respelled(config, {"num_experts": "num_local_experts"})
    config = with_defaults(config, max_position_embeddings=131072)
    experts = usual_experts(config, integer(config, "num_local_experts", 8), 2)
    return llama_spec(
        config,
        "mixtral",
        default_theta=1_000_000.0,
        default_eps=1e-5,
        slides=_all_slide(config),
        experts=(experts,) * integer(config, "num_hidden_layers"),
        experts_in="block_sparse_moe",
        expert_names=("w1", "w3", "w2"),
    )


def olmo3_spec(config: JsonObject) -> ModelSpec:
    """Return the spec of an `olmo3` config.json: norms after attention and MLP, and layers with a window.

    Scaled positions are in the other layers alone. As in transformers, `rope_theta` outside of `rope_parameters` is
    those layers' too.
    """
    bias, slides = flag(config, "attention_bias", False), sliding_layers(config, 4)
    return llama_spec(
        config,
        "olmo3",
        qkv_bias=bias,
        default_theta=500_000.0,
        default_eps=1e-5,
        local_theta=500_000.0,
        slides=slides,
        default_window=4096,
        qk_norms="of_all",
        norms_results=True,
    )


def phi3_spec(config: JsonObject) -> ModelSpec:
    """Return the spec of a `phi3` config.json (Phi-3, Phi-4): packed projections, in part rotated heads, and LongRoPE.

    Every layer has a window. Older files name the rope type `longrope` otherwise.
    """
    config = with_defaults(config, max_position_embeddings=4096, original_max_position_embeddings=4096)
    scaling = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    for name in ("type", "rope_type"):
        if scaling.get(name) in ("su", "yarn"):
            scaling[name] = "longrope"
    return llama_spec(
        {**config, "rope_scaling": scaling or None, "layer_types": None},
        "phi3",
        default_eps=1e-5,
        default_partial=1.0,
        slides=_all_slide(config),
        has_packed_tensors=True,
    )


def _switched_windows(config: JsonMapping, slides: Sequence[bool], window: int | None) -> tuple[int | None, ...]:
    """Return `layer_windows` if `use_sliding_window` is true, else none. ModelError if `layer_types` disagrees."""
    is_on = flag(config, "use_sliding_window", False)
    if not is_on and SLIDING in (window_kinds(config) or ()):
        raise ModelError(
            f"config.json has layer_types {SLIDING}, and use_sliding_window = false; make it true, or the layers {FULL}"
        )
    is_on = is_on and config.get("sliding_window", window) is not None
    return layer_windows(config, [is_on and is_on_layer for is_on_layer in slides], window)


def _qwen_windows(config: JsonMapping) -> tuple[int | None, ...]:
    """Return the windows of Qwen2 and Qwen3: without `layer_types`, layers from `max_window_layers` on have them."""
    first, num_layers = integer(config, "max_window_layers", 28), integer(config, "num_hidden_layers")
    return _switched_windows(config, [number >= first for number in range(num_layers)], 4096)


def qwen2_spec(config: JsonObject) -> ModelSpec:
    """Return the spec of a `qwen2` config.json: biases of queries, keys and values."""
    windows = _qwen_windows(config)
    return llama_spec(config, "qwen2", qkv_bias=True, out_bias=False, windows=windows)


def qwen3_spec(config: JsonObject) -> ModelSpec:
    """Return the spec of a `qwen3` config.json: a norm for each query and key."""
    bias, windows = flag(config, "attention_bias", False), _qwen_windows(config)
    return llama_spec(config, "qwen3", qkv_bias=bias, head_dim=128, windows=windows, qk_norms="of_heads")


def qwen3_moe_spec(config: JsonObject) -> ModelSpec:
    """Return the spec of a `qwen3_moe` config.json: Qwen3 with experts in the layers that `sparse_layers` names.

    Either all layers have its window, or none has.
    """
    num_layers, has_windows = integer(config, "num_hidden_layers"), flag(config, "use_sliding_window", False)
    has_windows = has_windows and config.get("sliding_window", 4096) is not None
    bias = flag(config, "attention_bias", False)
    return llama_spec(
        config,
        "qwen3_moe",
        qkv_bias=bias,
        slides=(True,) * num_layers if has_windows else None,
        default_window=4096,
        experts=[qwen_experts(config) if is_sparse else None for is_sparse in sparse_layers(config, num_layers)],
        qk_norms="of_heads",
        normalizes=flag(config, "norm_topk_prob", False),
    )


def qwen_experts(config: JsonMapping) -> ExpertsSpec:
    """Return the experts of a layer, whose number has two spellings."""
    name = "num_local_experts" if config.get("num_local_experts") is not None else "num_experts"
    return usual_experts(config, integer(config, name), width="moe_intermediate_size")


def seed_oss_spec(config: JsonObject) -> ModelSpec:
    """Return the spec of a `seed_oss` config.json: biases of queries, keys and values, and others by config.json."""
    return llama_spec(
        config,
        "seed_oss",
        qkv_bias=flag(config, "attention_bias", True),
        out_bias=flag(config, "attention_out_bias", False),
        mlp_bias=flag(config, "mlp_bias", False),
        head_dim=128,
    )


def smollm3_spec(config: JsonObject) -> ModelSpec:
    """Return the spec of a `smollm3` config.json: some layers, by default every fourth, have no positions."""
    rotates = _rotating_layers(config)
    bias = flag(config, "attention_bias", False)
    return llama_spec(
        config,
        "smollm3",
        qkv_bias=bias,
        mlp_bias=flag(config, "mlp_bias", False),
        default_tied=True,
        default_theta=2_000_000.0,
        rotates=rotates,
        # Without `layer_types`, layers with positions have no window.
        windows=_switched_windows(config, [not is_rotated for is_rotated in rotates], None),
    )


def _rotating_layers(config: JsonObject) -> list[bool]:
    """Return for each layer whether it has positions: 1 in `no_rope_layers` means that it has."""
    num_layers, interval = integer(config, "num_hidden_layers"), integer(config, "no_rope_layer_interval", 4)
    given = config.get("no_rope_layers")
    if given is None:
        return [interval == 0 or (number + 1) % interval != 0 for number in range(num_layers)]
    if not isinstance(given, list) or len(given) < num_layers or any(each not in (0, 1) for each in given):
        raise ModelError(f"config.json has no_rope_layers = {given!r}, which should be 0 or 1 for each of its layers")
    return [each == 1 for each in given[:num_layers]]
