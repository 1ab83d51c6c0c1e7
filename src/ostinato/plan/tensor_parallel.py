"""Sharding of models among ranks: each rank's part of a model, and the numbers of ranks that can share it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

from ostinato.config import EngineConfig
from ostinato.errors import ConfigError, Remedy
from ostinato.ops.operations import COLLECTIVE_OPS, GraphBackend
from ostinato.plan.decision import Decision
from ostinato.plan.device.gpu_catalogue import DeviceSpec
from ostinato.plan.graphs.coverage import GraphMode
from ostinato.plan.layer_specs import AttentionSpec, LayerSpec
from ostinato.plan.mixers import GatedDeltaSpec, Mamba1Spec, Mamba2Spec, Mixer, NgramDeltaSpec, ShortConvSpec
from ostinato.plan.model import ModelSpec

HEADS_OF_DELTA_NETS = {"num_heads": "heads of delta nets", "num_key_heads": "key heads of delta nets"}

SHARDED_COUNTS: dict[type, dict[str, str]] = {
    GatedDeltaSpec: HEADS_OF_DELTA_NETS,
    NgramDeltaSpec: HEADS_OF_DELTA_NETS,
    Mamba1Spec: {"channels": "channels of state layers"},
    Mamba2Spec: {"num_heads": "state heads", "num_groups": "groups of state heads"},
    ShortConvSpec: {"channels": "channels of short convolutions"},
}
"""Kind of mixer -> its sharded attributes and their names in messages; a single group of heads is on every rank."""

MOST = 64
"""Largest number of ranks that is tried when a number does not work."""


@dataclass(frozen=True)
class Rank:
    """One rank of a tensor-parallel group."""

    number: int = 0
    of: int = 1

    @property
    def leads(self) -> bool:
        """True if this rank schedules, samples, and adds what is to be added once."""
        return self.number == 0


SINGLE_RANK = Rank()
"""The single rank that has the whole model."""


@dataclass(frozen=True)
class VocabularyPart:
    """A rank's rows of the vocabulary: equally many on all, the last ones overlapping if they do not divide it."""

    first: int
    rows: int
    own: tuple[int, int]
    """The range (first, end) of the tokens whose vectors this rank contributes."""


def vocabulary_part(size: int, rank: Rank) -> VocabularyPart:
    """Return the part of `rank` in a vocabulary of `size` tokens."""
    rows = -(-size // rank.of)
    begin, end = (min(number * rows, size) for number in (rank.number, rank.number + 1))
    return VocabularyPart(min(begin, size - rows), rows, (begin, end))


def shard(spec: ModelSpec, ranks: int) -> ModelSpec:
    """Return one rank's part of the model, without a weight table, which is derived from the model.

    All ranks have the same sizes; norms and routers are whole on each. ConfigError if the model cannot be sharded so.
    """
    problems = sharding_problems(spec, ranks)
    if problems:
        working = [count for count in range(1, MOST + 1) if not sharding_problems(spec, count)]
        nearest = [max(c for c in working if c < ranks), *(c for c in working if c > ranks)][:2]
        numbers = ", ".join(map(str, working))
        raise ConfigError(
            f"tensor_parallel_size {ranks}: {'; '.join(problems)}; what works is {numbers}",
            [Remedy("tensor_parallel_size", count) for count in nearest],
        )
    hyper = spec.hyperparameters
    for path in spec.sharded_dims or ():
        hyper = _with_part(hyper, path.split("."), ranks)
    layers = {layer: _layer(layer, ranks) for layer in _layers(spec)}
    head = spec.head
    if head is not None:
        head = replace(head, layers=tuple(layers[layer] for layer in head.layers), weights=())
    return replace(
        spec,
        layers=tuple(layers[layer] for layer in spec.layers),
        hyperparameters=hyper,
        weights=(),
        head=head,
        ranks=ranks,
        unsharded=spec,
    )


def sharding_problems(spec: ModelSpec, ranks: int) -> list[str]:
    """Return the reasons why `ranks` processes cannot share a model, each as a clause; an empty list if they can."""
    if ranks == 1:
        return []
    if spec.sharded_dims is None:
        return [f"the model is {spec.architecture}, whose spec.py names no sharded_dims"]
    return list(dict.fromkeys(_problems(spec, ranks)))


def _problems(spec: ModelSpec, ranks: int) -> Iterator[str]:
    for layer in _layers(spec):
        attention, mixer = layer.attention, layer.mixer
        if attention is not None:
            heads, kv_heads = attention.num_heads, attention.num_kv_heads
            if heads % ranks:
                yield f"{heads} attention heads are no multiple of it"
            elif kv_heads % ranks and ranks % kv_heads:
                yield f"{kv_heads} heads of keys and values neither divide by it nor divide it"
        if mixer is not None:
            yield from _problems_of(mixer, ranks)
        if layer.experts is not None and layer.experts.intermediate_size % ranks:
            yield f"experts of width {layer.experts.intermediate_size} are no multiple of it"
    for path in spec.sharded_dims or ():
        width = _value(spec.hyperparameters, path.split("."))
        if width is not None and width % ranks:
            yield f"{path} {width} is no multiple of it"


def _layers(spec: ModelSpec) -> Iterable[LayerSpec]:
    """Return all kinds of layers, including those of a prediction head."""
    return dict.fromkeys((*spec.layers, *(() if spec.head is None else spec.head.layers)))


def _layer(layer: LayerSpec, ranks: int) -> LayerSpec:
    attention, mixer, experts = layer.attention, layer.mixer, layer.experts
    if attention is not None:
        attention = _attention(attention, ranks)
    if mixer is not None:
        mixer = _mixer(mixer, ranks)
    if experts is not None:
        experts = replace(experts, intermediate_size=experts.intermediate_size // ranks)
    return replace(
        layer, attention=attention, mixer=mixer, experts=experts, weights=(), shared_weights=(), activation_elements=0
    )


def _attention(spec: AttentionSpec, ranks: int) -> AttentionSpec:
    """Return one rank's attention. With fewer KV heads than ranks, several ranks have the same KV head."""
    return replace(spec, num_heads=spec.num_heads // ranks, num_kv_heads=max(1, spec.num_kv_heads // ranks))


def _problems_of(mixer: Mixer, ranks: int) -> Iterator[str]:
    for name, what in SHARDED_COUNTS[type(mixer)].items():
        count = getattr(mixer, name)
        if count % ranks and not _is_one_group(mixer, name):
            yield f"{count} {what} are no multiple of it"


def _is_one_group(mixer: Mixer, name: str) -> bool:
    return isinstance(mixer, Mamba2Spec) and name == "num_groups" and mixer.num_groups == 1


def _mixer(mixer: Mixer, ranks: int) -> Any:
    """Return one rank's mixer. A single group is on every rank, with some of its heads; all else is sharded."""
    names = [name for name in SHARDED_COUNTS[type(mixer)] if not _is_one_group(mixer, name)]
    own: dict[str, Any] = {name: getattr(mixer, name) // ranks for name in names}
    if isinstance(mixer, Mamba2Spec):
        own["norm_spans_ranks"] = mixer.num_groups == 1
    return replace(cast("Any", mixer), **own)


def _value(hyper: Any, path: list[str]) -> int | None:
    """Return the hyperparameter at `path`, or None where the model has no such part."""
    value: int | None = hyper
    for name in path:
        value = None if value is None else getattr(value, name)
    return value


def _with_part(hyper: Any, path: list[str], ranks: int) -> Any:
    name, *inner = path
    value = getattr(hyper, name)
    if value is None:
        return hyper
    return replace(hyper, **{name: _with_part(value, inner, ranks) if inner else value // ranks})


def without_graphs_of_ranks(config: EngineConfig, backend: GraphBackend) -> tuple[GraphMode, list[Decision]] | None:
    """Return graph mode `none` for several ranks on GPUs, since capture across ranks has not been tried.

    ConfigError if graphs were asked for. None where this does not apply: with one rank, without graphs, or for a tape,
    which calls the operations between ranks anew in each replay.
    """
    if config.tensor_parallel_size == 1 or backend == "tape" or config.graph_mode == "none":
        return None
    reason = f"no graph of backend {backend} holds {' and '.join(COLLECTIVE_OPS)} yet"
    if config.is_given("graph_mode"):
        raise ConfigError(
            f"graph_mode {config.graph_mode} with tensor_parallel_size {config.tensor_parallel_size}: {reason}",
            [Remedy("graph_mode", "none"), Remedy("tensor_parallel_size", 1)],
        )
    return "none", [Decision("graph_mode", config.graph_mode, "none", reason)]


def rank_decisions(model: ModelSpec, device: DeviceSpec) -> list[Decision]:
    """Return the decisions that describe each rank's part of the model."""
    if model.unsharded is None:
        return []
    where = "a device each" if device.kind == "cuda" else "all on this machine, whose memory and cores they share"
    parts = ["all figures are those of one rank"]
    for layer in dict.fromkeys(model.layers):
        if layer.attention is not None:
            parts.append(f"{layer.attention.num_heads} attention heads with {layer.attention.num_kv_heads} of keys")
        if layer.mixer is not None:
            counts = SHARDED_COUNTS[type(layer.mixer)].items()
            parts.append(" in ".join(f"{getattr(layer.mixer, name)} {what}" for name, what in counts))
        if layer.experts is not None:
            parts.append(f"every expert, of width {layer.experts.intermediate_size}")
    encoder = "" if model.vision is None else "the encoder of images, "
    rows = vocabulary_part(model.vocab_size, Rank(0, model.ranks)).rows
    parts.append(f"embedding and LM head of {rows:,} tokens")
    parts.append(f"{encoder}norms and routers are whole on each")
    reason = f"ranks, {where}: {'; '.join(dict.fromkeys(parts))}. Step times leave out what ranks send each other"
    return [Decision("tensor_parallel_size", model.ranks, model.ranks, reason), *_whole_drafts(model)]


def _whole_drafts(model: ModelSpec) -> list[Decision]:
    """Return the decision that explains why each rank has the whole draft model, if it has."""
    draft = None if model.drafter is None else model.drafter.model
    if draft is None or draft.ranks == model.ranks:
        return []
    problems = sharding_problems(draft, model.ranks)
    why = "; ".join(problems) or "a part of its matrices would be quantised in another way than the whole"
    reason = f"the draft model is whole on each rank, which computes all of it: {why}"
    return [Decision("draft.tensor_parallel_size", model.ranks, 1, reason)]
