"""Gemma 4, its text model: layers with a window, and between them some that see all positions, with larger heads.

The last layers may read the keys and values of earlier ones. Each layer may add a small embedding of its token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ostinato.errors import ModelError
from ostinato.json_io import JsonMapping, JsonObject
from ostinato.models.config_json import (
    FULL,
    SLIDING,
    activation,
    attention_spec,
    flag,
    integer,
    layer_windows,
    number,
    shared_fields,
    sliding_layers,
    soft_cap,
    usual_experts,
    with_defaults,
)
from ostinato.models.lfm3.spec import rope_of_kind
from ostinato.plan.layer_specs import AttentionSpec, ExpertsSpec, LayerSpec
from ostinato.plan.model import ModelSpec

HEADS, KEY_HEADS, HEAD_DIM, GLOBAL_HEAD_DIM, WINDOW, PATTERN, LONGEST = 8, 4, 256, 512, 512, 6, 131072
SMALL_SIZE = 256
"""Defaults of a config.json without these values."""

ROPES: dict[str, JsonObject] = {
    FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
}
"""Rotary embedding of each kind of attention in a config.json without `rope_parameters`."""

LOCAL, GLOBAL = "local", "global"
"""Kinds of layers: with a window and the local rotary embedding, or over the whole context."""

BIDIRECTIONAL = (None, "vision")
"""Values of `use_bidirectional_attention` in which text sees only what is before it."""


@dataclass(frozen=True)
class Gemma4Hyperparameters:
    """Hyperparameters of models/gemma4_text/model.py, besides the layers."""

    intermediate_size: int
    num_layers: int
    small_size: int
    """Size of the embedding that each layer adds of its token; 0 if none does."""
    attention_bias: bool
    norm_eps: float
    widens_shared: bool
    """True if the MLPs of layers that read other layers' keys are twice as wide."""
    values_are_keys: bool
    """True if values are keys before norm and rotation, in layers without a window."""
    logits_cap: float | None
    """Logits x become cap * tanh(x / cap)."""


def model_spec(config: JsonObject) -> ModelSpec:
    """Return the spec of a `gemma4_text` config.json.

    ModelError for attention in both directions, and for heads that differ within a kind of layers.
    """
    activation(config, "hidden_activation", "gelu_pytorch_tanh", ("gelu_pytorch_tanh",))
    directions = config.get("use_bidirectional_attention")
    if directions not in BIDIRECTIONAL:
        raise ModelError(f"config.json has use_bidirectional_attention = {directions!r}; supported: null, 'vision'")
    config = with_defaults(config, max_position_embeddings=LONGEST)
    slides = sliding_layers(config, PATTERN)
    slides[-1:] = [False]  # The last layer sees all positions, whatever its name is.
    layer_types = [SLIDING if slid else FULL for slid in slides]
    config = {**config, "layer_types": layer_types}
    windows = layer_windows(config, slides, WINDOW)
    values_are_keys = flag(config, "attention_k_eq_v", False)
    heads = _heads(config, slides, values_are_keys)
    small_size, vocab_size = integer(config, "hidden_size_per_layer_input", SMALL_SIZE), integer(config, "vocab_size")
    if small_size and integer(config, "vocab_size_per_layer_input", vocab_size) != vocab_size:
        raise ModelError(
            f"config.json has vocab_size_per_layer_input = {config['vocab_size_per_layer_input']}; supported: "
            f"vocab_size, which is {vocab_size}"
        )
    experts = _experts(config)
    layers = tuple(
        LayerSpec(
            (LOCAL if slid else GLOBAL) + ("" if keys_of is None else ", shared keys"),
            replace(heads[slid], rope=int(slid), window=window, keys_of=keys_of),
            experts=experts,
        )
        for slid, window, keys_of in zip(slides, windows, _keys_of(config, slides), strict=True)
    )
    return ModelSpec(
        architecture="gemma4_text",
        **shared_fields(config, default_tied=True),
        layers=layers,
        rope=rope_of_kind(config, FULL, heads[False].head_dim, ROPES),
        other_ropes=(rope_of_kind(config, SLIDING, heads[True].head_dim, ROPES),),
        sharded_dims=("intermediate_size",),
        hyperparameters=Gemma4Hyperparameters(
            intermediate_size=integer(config, "intermediate_size"),
            num_layers=len(layers),
            small_size=small_size,
            attention_bias=flag(config, "attention_bias", False),
            norm_eps=number(config, "rms_norm_eps", 1e-6),
            widens_shared=flag(config, "use_double_wide_mlp", False),
            values_are_keys=values_are_keys,
            logits_cap=soft_cap(config, "final_logit_softcapping"),
        ),
    )


def _heads(config: JsonMapping, slides: list[bool], values_are_keys: bool) -> dict[bool, AttentionSpec]:
    """Return the attention of layers with a window (True) and of the others (False).

    The hub's checkpoints have `global_head_dim` and `num_global_key_value_heads`, those that transformers 5.23 writes a
    dict of changes for each layer.
    """
    local = with_defaults(config, num_attention_heads=HEADS, num_key_value_heads=KEY_HEADS, head_dim=HEAD_DIM)
    plain = attention_spec(local)
    given = config.get("per_layer_config")
    if given is None:
        heads = integer(config, "num_global_key_value_heads", plain.num_kv_heads)
        size = integer(config, "global_head_dim", GLOBAL_HEAD_DIM)
        changed = replace(plain, head_dim=size, num_kv_heads=heads if values_are_keys else plain.num_kv_heads)
        return {True: plain, False: changed}
    known = {"head_dim", "num_key_value_heads"}
    full = {str(i) for i, slid in enumerate(slides) if not slid}
    found = [given.get(i) or {} for i in full] if isinstance(given, Mapping) else []
    is_known = isinstance(given, Mapping) and set(given) <= full and all(set(each) <= known for each in found)
    if not is_known or any(each != found[0] for each in found):
        raise ModelError(
            f"config.json has per_layer_config = {given!r:.200}; supported: the same head_dim and "
            f"num_key_value_heads for all layers of {FULL}"
        )
    heads = integer(found[0], "num_key_value_heads", plain.num_kv_heads)
    changed = replace(plain, head_dim=integer(found[0], "head_dim", plain.head_dim), num_kv_heads=heads)
    return {True: plain, False: changed}


def _experts(config: JsonMapping) -> ExpertsSpec | None:
    """Return the experts of every layer, if there are some."""
    if not flag(config, "enable_moe_block", False):
        return None
    count = integer(config, "num_experts")
    config = {**config, "num_experts_per_tok": integer(config, "top_k_experts")}
    return usual_experts(config, count, width="moe_intermediate_size")


def _keys_of(config: JsonMapping, slides: list[bool]) -> list[int | None]:
    """Return for each layer the one whose keys it reads: of the last layers, the last of its kind before them."""
    count = len(slides)
    shared = integer(config, "num_kv_shared_layers", 0)
    own = slides[: max(count - shared, 0)]
    if shared and not set(slides) <= set(own):
        raise ModelError(
            f"config.json has num_kv_shared_layers = {shared} of {count} layers, which leaves no layer of a "
            "kind whose keys they could read"
        )
    last = {kind: len(own) - 1 - own[::-1].index(kind) for kind in set(own)}
    return [None if i < len(own) else last[slid] for i, slid in enumerate(slides)]


def gemma4_unified_text_spec(config: JsonObject) -> ModelSpec:
    """Return the spec of a `gemma4_unified_text` config.json: the same layers without small embeddings and experts.

    ModelError as for `gemma4_text`.
    """
    config = with_defaults(config, max_position_embeddings=262_144, sliding_window=1024)
    # transformers reads no such values.
    absent = {"hidden_size_per_layer_input": 0, "enable_moe_block": False}
    return replace(model_spec({**config, **absent}), architecture="gemma4_unified_text")
