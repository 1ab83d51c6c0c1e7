"""Cuts: what of a model each rank has where several share it, and which numbers of ranks can."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

from ostinato.config import EngineConfig
from ostinato.errors import ConfigError, Remedy
from ostinato.ops.blocks.formats import BLOCK_FORMATS
from ostinato.ops.facts import BETWEEN_RANKS, Backend
from ostinato.plan.decision import Decision
from ostinato.plan.device.catalogue import DeviceSpec
from ostinato.plan.graphs.coverage import GraphMode
from ostinato.plan.layers import AttentionSpec, LayerSpec
from ostinato.plan.mixers import GatedDeltaSpec, Mamba1Spec, Mamba2Spec, Mixer, ShortConvSpec
from ostinato.plan.model import ModelSpec
from ostinato.plan.quantization import AnyQuantization, BlockQuantization, Quantization
from ostinato.plan.weights import Weight

WIDTHS: dict[str, tuple[str, ...]] = {
    "arcee": ("intermediate_size",),
    "bamba": ("intermediate_size",),
    "falcon_h1": ("intermediate_size",),
    "falcon_mamba": (),
    "gemma3_text": ("intermediate_size",),
    "granitemoehybrid": ("shared_intermediate_size",),
    "jamba": ("intermediate_size",),
    "kimi_linear": ("intermediate_size", "shared_size"),
    "lfm2": ("intermediate_size",),
    "lfm2_moe": ("intermediate_size",),
    "llama": ("intermediate_size",),
    "mamba": (),
    "mamba2": (),
    "mistral": ("intermediate_size",),
    "nemotron_h": ("intermediate_size", "moe.shared_intermediate_size", "moe.experts.intermediate_size"),
    "olmo_hybrid": ("intermediate_size",),
    "qwen2": ("intermediate_size",),
    "qwen3": ("intermediate_size",),
    "qwen3_5": ("text.intermediate_size",),
    "qwen3_5_moe": ("text.intermediate_size", "text.shared_size"),
    "qwen3_5_moe_text": ("intermediate_size", "shared_size"),
    "qwen3_5_text": ("intermediate_size",),
    "qwen3_next": ("intermediate_size", "shared_size"),
    "qwen3_vl": ("text.intermediate_size",),
    "qwen3_vl_moe": ("text.intermediate_size",),
    "smollm3": ("intermediate_size",),
    "zamba2": ("intermediate_size",),
}
"""Architecture -> the hyperparameters that are widths of MLPs and experts, which ranks share. Layers say the rest.
Models of other architectures cannot be shared."""

COUNTS: dict[type, dict[str, str]] = {
    GatedDeltaSpec: {"num_heads": "heads of delta nets", "num_key_heads": "key heads of delta nets"},
    Mamba1Spec: {"channels": "channels of state layers"},
    Mamba2Spec: {"num_heads": "state heads", "num_groups": "groups of state heads"},
    ShortConvSpec: {"channels": "channels of short convolutions"},
}
"""Kind of mixer -> what of it ranks share, and what messages call that. One group of state heads is on every rank."""

METHODS = ("ngram",)
"""Of drafts among ranks: those that need no weights."""

MOST = 64
"""Ranks that are looked for when a number does not work."""


@dataclass(frozen=True)
class Rank:
    """One of the processes that share a model."""

    number: int = 0
    of: int = 1

    @property
    def leads(self) -> bool:
        """Whether it schedules, samples, and adds what is to be added once."""
        return self.number == 0


ALONE = Rank()
"""The one that has all of a model."""


def share_of(spec: ModelSpec, ranks: int) -> ModelSpec:
    """The model as one of `ranks` has it, without its weight table, which is read off it. All have the same sizes; the
    embedding, the LM head, norms and routers are whole on each. ConfigError if it cannot be cut so."""
    found = problems(spec, ranks)
    if found:
        working = [count for count in range(1, MOST + 1) if not problems(spec, count)]
        nearest = [max(c for c in working if c < ranks), *(c for c in working if c > ranks)][:2]
        numbers = ", ".join(map(str, working))
        raise ConfigError(
            f"tensor_parallel_size {ranks}: {'; '.join(found)}; what works is {numbers}",
            [Remedy("tensor_parallel_size", count) for count in nearest],
        )
    hyper = spec.hyperparameters
    for path in WIDTHS[spec.architecture]:
        hyper = _with_part(hyper, path.split("."), ranks)
    layers = {layer: _layer(layer, ranks) for layer in spec.layers}
    return replace(
        spec,
        layers=tuple(layers[layer] for layer in spec.layers),
        hyperparameters=hyper,
        weights=(),
        # Its drafts are not made among ranks.
        head=None,
        ranks=ranks,
        whole=spec,
    )


def problems(spec: ModelSpec, ranks: int) -> list[str]:
    """What keeps `ranks` processes from sharing a model, each as a clause; nothing where there is one."""
    if ranks == 1:
        return []
    if spec.architecture not in WIDTHS:
        known = ", ".join(WIDTHS)
        return [f"the model is {spec.architecture}, and those that ranks can share are {known}"]
    return list(dict.fromkeys(_problems(spec, ranks)))


def _problems(spec: ModelSpec, ranks: int) -> Iterator[str]:
    for layer in dict.fromkeys(spec.layers):
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
    for path in WIDTHS[spec.architecture]:
        width = _value(spec.hyperparameters, path.split("."))
        if width is not None and width % ranks:
            yield f"{path} {width} is no multiple of it"


def _layer(layer: LayerSpec, ranks: int) -> LayerSpec:
    attention, mixer, experts = layer.attention, layer.mixer, layer.experts
    if attention is not None:
        attention = _attention(attention, ranks)
    if mixer is not None:
        mixer = _mixer(mixer, ranks)
    if experts is not None:
        experts = replace(experts, intermediate_size=experts.intermediate_size // ranks)
    return replace(
        layer, attention=attention, mixer=mixer, experts=experts, weights=(), borrowed=(), activation_elements=0
    )


def _attention(spec: AttentionSpec, ranks: int) -> AttentionSpec:
    """Where there are fewer heads of keys and values than ranks, several ranks have the same one."""
    return replace(spec, num_heads=spec.num_heads // ranks, num_kv_heads=max(1, spec.num_kv_heads // ranks))


def _problems_of(mixer: Mixer, ranks: int) -> Iterator[str]:
    for name, what in COUNTS[type(mixer)].items():
        count = getattr(mixer, name)
        if count % ranks and not _is_one_group(mixer, name):
            yield f"{count} {what} are no multiple of it"
    if isinstance(mixer, GatedDeltaSpec) and mixer.keys_take_turns:
        yield "key heads of delta nets take turns (in a GGUF file)"


def _is_one_group(mixer: Mixer, name: str) -> bool:
    return isinstance(mixer, Mamba2Spec) and name == "num_groups" and mixer.num_groups == 1


def _mixer(mixer: Mixer, ranks: int) -> Any:
    """One group is on every rank, with a part of its heads; of all else each rank has its part."""
    names = [name for name in COUNTS[type(mixer)] if not _is_one_group(mixer, name)]
    own: dict[str, Any] = {name: getattr(mixer, name) // ranks for name in names}
    if isinstance(mixer, Mamba2Spec):
        own["norm_spans_ranks"] = mixer.num_groups == 1
    return replace(cast("Any", mixer), **own)


def _value(hyper: Any, path: list[str]) -> int | None:
    """None where the model has no such part."""
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


def check_ranks(asked: EngineConfig, from_gguf: bool) -> None:
    """ConfigError for settings that do not go together with more than one rank."""
    if asked.tensor_parallel_size == 1:
        return
    ranks = f"tensor_parallel_size {asked.tensor_parallel_size}"
    alone = Remedy("tensor_parallel_size", 1)
    if from_gguf:
        raise ConfigError(f"{ranks}: GGUF files cannot be cut yet, safetensors checkpoints can", [alone])
    drafts = asked.speculative
    if drafts is not None and drafts.method not in METHODS:
        message = f"{ranks} goes with drafts of the method ngram alone, and speculative has {drafts.method}"
        raise ConfigError(message, [Remedy("speculative", f"ngram:{drafts.num_speculative_tokens}"), alone])
    if asked.deterministic:
        message = f"{ranks}: the order in which ranks add is not that of one; leave out deterministic"
        raise ConfigError(message, [Remedy("deterministic", False), alone])
    if asked.kernels in ("native", "triton"):
        message = f"{ranks}: what ranks add up is no kernel, so kernels {asked.kernels} cannot be for all operations"
        raise ConfigError(message, [Remedy("kernels", "auto"), alone])


def check_quantized_cut(model: ModelSpec) -> None:
    """ConfigError if a rank's part of a matrix is not quantised as it is in the whole model: the cut must be between
    groups of elements that share a scale."""
    chosen, whole = model.quantization, model.whole
    if chosen is None or whole is None:
        return
    for own, shared in zip(model.table, whole.table, strict=True):
        if own.in_size == shared.in_size and _blocks(chosen, own) == _blocks(chosen, shared):
            continue
        elements = _group_size(chosen, shared)
        name, size = shared.names[0], f"[{shared.out_size}, {shared.in_size}]"
        if chosen.in_order and chosen.quantises(shared):
            raise ConfigError(
                f"tensor_parallel_size {model.ranks} with act-order: the inputs of {name} {size}, which ranks share, "
                "have an order of their own (g_idx), so that each group has some of every rank's",
                [Remedy("quantization", "none"), Remedy("tensor_parallel_size", 1)],
            )
        if _blocks(chosen, own) != _blocks(chosen, shared) or (elements is not None and own.in_size % elements):
            stored = model.stored_quantization
            is_free = stored is None or stored.numbers == "float8"
            per_row = [Remedy("quantization", "int8")] if is_free else []
            raise ConfigError(
                f"tensor_parallel_size {model.ranks} with quantization {chosen.name}: a part of {name} {size}, "
                f"{own.out_size} rows of {own.in_size}, would be quantised in another way than the whole",
                [*per_row, Remedy("quantization", "none"), Remedy("tensor_parallel_size", 1)],
            )


def _blocks(chosen: AnyQuantization, weight: Weight) -> tuple[str, ...] | bool:
    """How a matrix lies: the formats of its blocks, or whether it is quantised."""
    blocks = chosen.blocks_of(weight) if isinstance(chosen, BlockQuantization) else None
    return chosen.quantises(weight) if blocks is None else tuple(name for name, _ in blocks)


def _group_size(chosen: AnyQuantization, weight: Weight) -> int | None:
    """Elements of a row with one scale; None: all."""
    if isinstance(chosen, Quantization):
        return chosen.group_size if chosen.quantises(weight) else None
    blocks = chosen.blocks_of(weight)
    return None if blocks is None else BLOCK_FORMATS[blocks[0][0]].elements


def without_graphs_of_ranks(config: EngineConfig, backend: Backend) -> tuple[GraphMode, list[Decision]] | None:
    """Of several ranks on GPUs: no graphs, whose capture across ranks has not been tried; ConfigError where they were
    asked for. None where that does not apply: a tape calls what is between ranks anew in each replay."""
    if config.tensor_parallel_size == 1 or backend == "tape" or config.graph_mode == "none":
        return None
    reason = f"no graph of backend {backend} holds {' and '.join(BETWEEN_RANKS)} yet"
    if config.is_given("graph_mode"):
        raise ConfigError(
            f"graph_mode {config.graph_mode} with tensor_parallel_size {config.tensor_parallel_size}: {reason}",
            [Remedy("graph_mode", "none"), Remedy("tensor_parallel_size", 1)],
        )
    return "none", [Decision("graph_mode", config.graph_mode, "none", reason)]


def rank_decisions(model: ModelSpec, device: DeviceSpec) -> list[Decision]:
    """What each rank has, as the plan tells it."""
    if model.whole is None:
        return []
    where = "a device each" if device.kind == "cuda" else "all on this machine, whose memory and cores they share"
    parts = ["all figures are those of one rank"]
    for layer in dict.fromkeys(model.layers):
        if layer.attention is not None:
            parts.append(f"{layer.attention.num_heads} attention heads with {layer.attention.num_kv_heads} of keys")
        if layer.mixer is not None:
            counts = COUNTS[type(layer.mixer)].items()
            parts.append(" in ".join(f"{getattr(layer.mixer, name)} {what}" for name, what in counts))
        if layer.experts is not None:
            parts.append(f"every expert, of width {layer.experts.intermediate_size}")
    encoder = "" if model.vision is None else "the encoder of images, "
    parts.append(f"{encoder}embedding, LM head, norms and routers are whole on each")
    reason = f"ranks, {where}: {'; '.join(dict.fromkeys(parts))}. Step times leave out what ranks send each other"
    return [Decision("tensor_parallel_size", model.ranks, model.ranks, reason)]
