"""Gemma 4's assistant: a small model that makes drafts for Gemma 4 from its hidden state, keys and values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ostinato.errors import ModelError
from ostinato.json_io import JsonObject
from ostinato.models.config_json import flag, flag_is, integer, part, spec_of_text
from ostinato.models.gemma4_text.spec import Gemma4Hyperparameters, gemma4_unified_text_spec
from ostinato.models.gemma4_text.spec import model_spec as text_spec
from ostinato.plan.layer_specs import LayerSpec
from ostinato.plan.model import ModelSpec, TargetSpec

NUM_CLUSTERS, TOP_CLUSTERS = 2048, 32
"""Defaults of a config.json without these values."""


@dataclass(frozen=True)
class Gemma4AssistantHyperparameters(Gemma4Hyperparameters):
    """Hyperparameters of models/gemma4_assistant/model.py, besides those of the text model."""

    num_clusters: int
    """Number of clusters of tokens, each with a centroid; 0 if every draft computes the logits of all tokens."""
    top_clusters: int
    """Number of clusters whose tokens get logits of their own."""


def model_spec(config: JsonObject) -> ModelSpec:
    """Return the spec of a `gemma4_assistant` config.json.

    ModelError as for `gemma4_text`, for small embeddings, experts and wide MLPs, and for layers with keys of their own.
    """
    text = part(config, "text_config")
    for name in ("enable_moe_block", "use_double_wide_mlp"):
        flag_is(text, name, False)
    if integer(text, "hidden_size_per_layer_input", 0):
        raise ModelError(
            f"config.json has hidden_size_per_layer_input = {text['hidden_size_per_layer_input']}; an assistant's is 0"
        )
    return _assistant_spec(config, text_spec, "gemma4_assistant", ("gemma4", "gemma4_text"), 1536)


def gemma4_unified_assistant_spec(config: JsonObject) -> ModelSpec:
    """Return the spec of a `gemma4_unified_assistant` config.json. ModelError for layers with keys of their own."""
    targets = ("gemma4_unified", "gemma4_unified_text")
    return _assistant_spec(config, gemma4_unified_text_spec, "gemma4_unified_assistant", targets, 3840)


def _assistant_spec(
    config: JsonObject,
    text_spec: Callable[[JsonObject], ModelSpec],
    architecture: str,
    targets: tuple[str, ...],
    target_size: int,
) -> ModelSpec:
    """Return the spec of an assistant of `targets`, whose hidden size is `target_size` if config.json has none."""
    text = part(config, "text_config")
    count = integer(text, "num_hidden_layers")
    shared = integer(text, "num_kv_shared_layers", 0) or count
    if shared != count:
        raise ModelError(
            f"config.json has num_kv_shared_layers = {shared} of {count} layers; all of an assistant's layers read the "
            "keys of its target"
        )
    own = {**text, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0}
    spec = spec_of_text({**config, "text_config": own}, text_spec, architecture)
    hyper = _with_clusters(config, spec)
    picked = hyper.top_clusters * spec.vocab_size // hyper.num_clusters if hyper.num_clusters else 0
    return replace(
        spec,
        layers=tuple(map(_reads_target, spec.layers)),
        target=TargetSpec(targets, integer(config, "backbone_hidden_size", target_size), picked),
        hyperparameters=hyper,
    )


def _with_clusters(config: JsonObject, spec: ModelSpec) -> Gemma4AssistantHyperparameters:
    clusters, top = 0, 0
    if flag(config, "use_ordered_embeddings", False):
        clusters = integer(config, "num_centroids", NUM_CLUSTERS)
        top = integer(config, "centroid_intermediate_top_k", TOP_CLUSTERS)
        if not 0 < top <= clusters or spec.vocab_size % clusters:
            raise ModelError(
                f"config.json has num_centroids = {clusters}, centroid_intermediate_top_k = {top} and vocab_size = "
                f"{spec.vocab_size}; the first should divide the last, and the second be from 1 to the first"
            )
    return Gemma4AssistantHyperparameters(**vars(spec.hyperparameters), num_clusters=clusters, top_clusters=top)


def _reads_target(layer: LayerSpec) -> LayerSpec:
    """Return the layer without keys. `with_drafter` chooses the layer of the target to read.

    A draft is made at the last stored key, one position before the token that it follows. So a window is one shorter,
    and reaches no further back than that token's own, whose keys are in memory.
    """
    attention = layer.attention
    assert attention is not None, "every layer has attention"
    if attention.window == 1:
        raise ModelError("config.json has sliding_window = 1, in which an assistant sees no key")
    window = None if attention.window is None else attention.window - 1
    return replace(layer, kind=f"{layer.kind}, target's keys", attention=replace(attention, window=window, keys_of=0))
