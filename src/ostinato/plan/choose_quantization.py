"""The settings `quantization` and `activation_dtype`: their effect on a model, and the plan's decisions about them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from ostinato.config import EngineConfig
from ostinato.errors import ConfigError, Remedy
from ostinato.ops.operations import OPERATIONS
from ostinato.ops.quant.block_formats import BLOCK_FORMATS
from ostinato.ops.sizes import DTYPE_BYTES
from ostinato.plan.decision import Decision
from ostinato.plan.kernels import KernelChoice
from ostinato.plan.model import ModelSpec
from ostinato.plan.quantization import (
    ORDER_BYTES,
    AnyQuantization,
    BlockQuantization,
    Quantization,
    StoredWeights,
    weights_alone,
)
from ostinato.units import format_bytes

MIN_ROWS = 128
"""Minimum rows of a matrix that is quantised to 4 bits.

Smaller projections, such as those of time steps, take almost no time and are the first to suffer.
"""

HEAD = "Q8_0"
"""Format of the LM head where other matrices become 4-bit: 8 bits, one scale per 32 elements."""

GIVEN: dict[str, AnyQuantization | None] = {
    "none": None,
    "int8": Quantization(None),
    "int8_g128": Quantization(128),
    "int4": BlockQuantization((), "int4_g128", head=HEAD, least_rows=MIN_ROWS),
    "int4_g64": BlockQuantization((), "int4_g64", head=HEAD, least_rows=MIN_ROWS),
    "int4_g32": BlockQuantization((), "int4_g32", head=HEAD, least_rows=MIN_ROWS),
}
"""Value of the setting -> quantization."""


def with_quantization(config: EngineConfig, model: ModelSpec, device_kind: str = "cpu") -> ModelSpec:
    """Return `model` and its drafter with weights quantised as `config` asks, or as each checkpoint is.

    ConfigError if a checkpoint's weights are already quantised in another way, or if activations cannot be in 8 bits.
    A draft model whose weights do not allow that keeps its activations.
    """
    chosen = _choose(config, model, "the checkpoint", device_kind)
    if config.activation_dtype == "int8":
        _check_activations(config, chosen, device_kind)
        chosen = _with_int8_activations(chosen)
    drafter = model.drafter
    if drafter is not None and drafter.model is None:
        drafter = replace(drafter, quantization=chosen)
    elif drafter is not None and drafter.model is not None:
        of_draft = _choose(config, drafter.model, "the draft model's checkpoint", device_kind)
        if config.activation_dtype == "int8":
            of_draft = _with_int8_activations(of_draft)
        drafter = replace(drafter, model=replace(drafter.model, quantization=of_draft))
    return replace(model, quantization=chosen, drafter=drafter)


def _with_int8_activations(chosen: AnyQuantization | None) -> AnyQuantization | None:
    """Return the same weights with 8-bit activations, if they are int8 with one scale per row."""
    if isinstance(chosen, Quantization) and chosen.group_size is None:
        return replace(chosen, int8_activations=True)
    return chosen


def _check_activations(config: EngineConfig, chosen: AnyQuantization | None, device_kind: str) -> None:
    """Raise ConfigError unless linear layers can take their inputs in 8 bits."""
    plain = Remedy("activation_dtype", "auto")
    if device_kind != "cpu":
        message = "activation_dtype int8: there are kernels for CPUs, and not yet for GPUs; use activation_dtype auto"
        raise ConfigError(message, [plain])
    if config.tensor_parallel_size > 1:
        raise ConfigError(
            f"activation_dtype int8 with tensor_parallel_size {config.tensor_parallel_size}: where ranks share a "
            "token's inputs, each would scale its own part, and results would differ from those of one rank; use "
            "tensor_parallel_size 1, or activation_dtype auto",
            [Remedy("tensor_parallel_size", 1), plain],
        )
    if _with_int8_activations(chosen) == chosen:
        weights = "the model's dtype" if chosen is None else f"{chosen.name}, {chosen.granularity}"
        raise ConfigError(
            f"activation_dtype int8 needs int8 weights with one scale per row, and these are in {weights}; use "
            "quantization int8, or activation_dtype auto",
            [*([Remedy("quantization", "int8")] if config.quantization != "int8" else []), plain],
        )


def _activation_decisions(config: EngineConfig, model: ModelSpec, dtype: str) -> list[Decision]:
    """Return the decision on which activations are quantised, and which are not."""
    chosen = model.quantization
    if not isinstance(chosen, Quantization) or not chosen.int8_activations:
        return []
    linears = list(model.linears)
    num_small = sum(chosen.quantises_inputs(weight) for weight in linears)
    kept = ["the LM head", *(["experts"] if any(model.experts) else []), "attention and states"]
    parts = [
        f"as given: {num_small} of {len(linears)} linear layers take each token rounded to 8 bits, with one scale that "
        f"is the token's own, and multiply integers; {', '.join(kept)} take {dtype}",
        "a token's result does not depend on its batch, so deterministic holds too",
        "what it costs in accuracy depends on the model: ostinato eval --compare-logits measures it",
    ]
    draft = None if model.drafter is None else model.drafter.model
    if draft is not None and weights_alone(draft.quantization) == draft.quantization:
        parts.append(f"the draft model keeps activations in {dtype}, as its weights are not int8 with a scale per row")
    return [Decision("activation_dtype", config.activation_dtype, "int8", "; ".join(parts))]


def quantization_decisions(
    config: EngineConfig, model: ModelSpec, dtype: str, kernels: Mapping[str, KernelChoice], device_kind: str
) -> list[Decision]:
    """Return the decisions on what is quantised and what is not, of the model and of a draft model."""
    decisions = _decisions("quantization", config, model, dtype, kernels, device_kind)
    if model.drafter is not None and model.drafter.model is not None:
        decisions += _decisions("draft.quantization", config, model.drafter.model, dtype, kernels, device_kind)
    return decisions + _activation_decisions(config, model, dtype)


def _choose(config: EngineConfig, model: ModelSpec, whose: str, device_kind: str) -> AnyQuantization | None:
    stored = model.stored_quantization
    runs_as = None if stored is None else stored.quantization(_read_formats(config, model, device_kind))
    if config.quantization == "auto" and model.stored_formats and not _expands_because(config, model, device_kind):
        # A GPU cannot read the file's pages, so runs do not matter.
        return BlockQuantization(
            model.stored_formats, contiguous_tensors=model.stored_runs if device_kind == "cpu" else ()
        )
    if config.quantization == "auto":
        return runs_as
    assert config.quantization is not None, "None leaves it at auto"
    wanted = GIVEN[config.quantization]
    if stored is None or runs_as is None or wanted is None or stored.storage in ("float8", "mxfp4"):
        return wanted
    if wanted.name == runs_as.name:
        return runs_as
    message = (
        f"quantization {config.quantization}: {whose} holds {stored.name} already; they are read as they are (auto), "
        f"or become {config.dtype if config.dtype != 'auto' else model.dtype} again (none)"
    )
    raise ConfigError(message, [Remedy("quantization", "auto"), Remedy("quantization", "none")])


def _read_formats(config: EngineConfig, model: ModelSpec, device_kind: str) -> frozenset[str]:
    """Return the formats of weights in blocks that the kernels of all matmuls read."""
    kind: Literal["reference", "native", "triton"] = "triton" if device_kind == "cuda" else "native"
    if config.kernels == "reference":
        kind = "reference"
    products = [OPERATIONS[op].implementation(kind) for op in ("linear", "moe") if op in model.ops]
    return frozenset(BLOCK_FORMATS).intersection(*(product.block_formats if product else () for product in products))


def _expands_because(config: EngineConfig, model: ModelSpec, device_kind: str) -> str | None:
    """Return why the blocks of a GGUF file are dequantized; None: they run in the file's layout."""
    if config.quantization != "auto":
        return f"quantization is {config.quantization}"
    if config.random_weights:
        return "random weights are made in the model's dtype"
    if device_kind != "cuda":
        return None
    if config.kernels == "reference":
        return "kernels is reference"
    unread = sorted({kind for _, kind in model.stored_formats} - _read_formats(config, model, device_kind))
    return f"no kernel for a GPU reads {', '.join(unread)} as they lie" if unread else None


def expansion_decisions(
    config: EngineConfig, model: ModelSpec, dtype: str, kernels: Mapping[str, KernelChoice], device_kind: str
) -> list[Decision]:
    """Return the decision on the blocks of a GGUF file: dequantized, or run in the file's layout."""
    if not model.stored_blocks:
        return []
    stored = ", ".join(f"{name} {format_bytes(size)}" for name, size in model.stored_blocks)
    in_file = format_bytes(sum(size for _, size in model.stored_blocks))
    size = format_bytes(model.weight_bytes(dtype))
    chosen = model.quantization
    if not isinstance(chosen, BlockQuantization):
        effective = dtype if chosen is None else f"{chosen.name}, the others {dtype}"
        because = _expands_because(config, model, device_kind)
        because = because or "none of its types has kernels that read it as it lies"
        reason = f"blocks are expanded while loading, since {because}: {size} instead of {in_file}"
        return [Decision("weights", stored, effective, reason)]
    formats = dict(chosen.formats)
    expanded = [
        name
        for weight in model.table
        if not chosen.quantises(weight)
        for name in weight.names_of_all_experts
        if name in formats
    ]
    mapped = model.mapped_bytes
    parts = [f"blocks run as they lie: {size}, the file has {in_file}"]
    if mapped:
        copied = format_bytes(model.weight_bytes(dtype) - mapped)
        parts.append(f"{format_bytes(mapped)} stay in the file's pages, {copied} are copied")
    else:
        parts.append("all are copied while loading, as none lie in the file as products read them")
    if expanded:
        others = f" and {len(expanded) - 3} more" if len(expanded) > 3 else ""
        names = f"{', '.join(expanded[:3])}{others}"
        parts.append(f"expanded to {dtype}, as they share a product with tensors of other types: {names}")
    if model.head is not None:
        of_head = format_bytes(replace(model.head, quantization=chosen).weight_bytes(dtype))
        drafts = model.drafter is not None and model.drafter.method == "mtp"
        parts.append(
            f"its prediction head takes {of_head} beside them"
            if drafts
            else f"its prediction head, {of_head}, is left out: nothing drafts with it (speculative mtp:3 would)"
        )
    products = [op for op in ("linear", "embedding", "moe") if op in kernels]
    lacking = [op for op in products if kernels[op].implementation == "reference"]
    if lacking:
        parts.append(
            f"without a native kernel the reference of {', '.join(lacking)} expands them in every step, which is "
            "slower than to expand them once (quantization none)"
        )
    return [Decision("weights", stored, f"{chosen.name} as they lie, the others {dtype}", "; ".join(parts))]


def _decisions(
    topic: str,
    config: EngineConfig,
    model: ModelSpec,
    dtype: str,
    kernels: Mapping[str, KernelChoice],
    device_kind: str,
) -> list[Decision]:
    chosen, stored = model.quantization, model.stored_quantization
    if isinstance(chosen, BlockQuantization) and chosen.format is None:
        return []  # `expansion_decisions` reports these
    if stored is not None:
        read = _read_formats(config, model, device_kind)
        runs_as, expands_because = stored.quantization(read), stored.expands_because(read)
        is_given = expands_because is None or config.quantization == "none"
        why = "as given" if is_given else f"since {expands_because}"
        if chosen is None:
            return [_expansion(topic, config, model, stored, dtype, why)]
        origin = "as the checkpoint has them"
        if weights_alone(chosen) != runs_as:
            origin = f"made while loading, of the checkpoint's {stored.name}, {why}"
    elif chosen is None:
        return []
    else:
        origin = "made while loading"
    linears = list(model.linears)
    covered = sum(chosen.quantises(linear) for linear in linears)
    shared = "which is the embedding too" if model.tied_embeddings else "the embedding stays"
    head = f"with the LM head ({shared})" if chosen.quantises(linears[-1]) else "without the LM head"
    experts = list(model.experts)[::2]  # a layer's inward matrices; the outward ones are quantised together with them
    of_experts = sum(chosen.quantises(linear) for linear in experts)
    also = f" and the experts of {of_experts} of {len(experts)} layers" if experts else ""
    kept = "routers, norms and convolutions" if experts else "norms and convolutions"
    kept = kept if model.vision is None else f"the encoder of images, {kept}"
    if isinstance(chosen, BlockQuantization):
        if experts and chosen.has_act_order:
            also = f"; experts are expanded to {dtype}, as each would need an order of its inputs (act-order);"
        if chosen.head is not None and chosen.quantises(linears[-1]):
            head += f" in 8 bits ({chosen.head})"
        kept = f"{_too_small(chosen)}, {kept}"
    parts = [
        origin,
        f"{covered} of {len(linears)} linear layers{also}, {head}, have {chosen.granularity}; {kept} stay in {dtype}",
        f"the weights take {format_bytes(model.weight_bytes(dtype))} instead of "
        f"{format_bytes(replace(model, quantization=None).weight_bytes(dtype))}",
    ]
    if chosen.has_act_order:
        orders = sum(ORDER_BYTES * weight.in_size for weight in model.table if chosen.quantises(weight))
        parts.append(
            "the elements of a row are sorted by their groups (act-order), and a product puts its inputs in that order "
            f"first, {format_bytes(orders)} of which are among the weights; matrices of one product must share it"
        )
    linear = kernels.get("linear")
    if linear is not None and linear.implementation == "reference":
        parts.append("without a native kernel they are expanded in every step, which is slower than not to quantise")
    is_small = isinstance(chosen, Quantization) and chosen.int8_activations
    if stored is not None and stored.wants_small_activations and not is_small:
        parts.append(_large_activations(dtype, stored))
    return [Decision(topic, config.quantization, chosen.name, "; ".join(parts))]


def _large_activations(dtype: str, stored: StoredWeights) -> str:
    hint = ": activation_dtype int8 runs them so" if stored.storage == "int8" and stored.group_size is None else ""
    return f"activations stay in {dtype}, though its config has them in 8 bits too{hint}"


def _too_small(chosen: BlockQuantization) -> str:
    of_rows = f"matrices with fewer than {chosen.least_rows} outputs or " if chosen.least_rows else "matrices "
    return f"{of_rows}with rows that no groups fill"


def _expansion(
    topic: str, config: EngineConfig, model: ModelSpec, stored: StoredWeights, dtype: str, why: str
) -> Decision:
    """Return the decision on a checkpoint's quantised weights that are dequantized."""
    whole = model.weight_bytes(dtype)
    in_files = whole - sum(
        weight.num_elements * DTYPE_BYTES[dtype] - stored.num_bytes(weight)
        for weight in model.table
        if stored.covers(weight)
    )
    parts = [
        f"the checkpoint's {stored.name}, become {dtype} while loading, {why}: {format_bytes(whole)} instead of about "
        f"{format_bytes(in_files)}"
    ]
    if stored.wants_small_activations:
        parts.append(_large_activations(dtype, stored))
    return Decision(topic, config.quantization, "none", "; ".join(parts))
