"""Sharding of stored weights: legal splits of a quantised matrix, and tensors that ranks use from the mapped file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from ostinato.errors import ConfigError, Remedy
from ostinato.ops.quant.block_formats import BLOCK_FORMATS
from ostinato.plan.model import ModelSpec
from ostinato.plan.quantization import AnyQuantization, BlockQuantization, Quantization, spellings
from ostinato.plan.tensor_parallel import MOST, sharding_problems
from ostinato.plan.weights import Weight


def check_quantized_cut(model: ModelSpec, cut: Callable[[ModelSpec, int], ModelSpec]) -> None:
    """Raise ConfigError if a rank's part of a matrix is quantised differently from the whole matrix.

    The split must be between groups of elements that share a scale. The error lists numbers of ranks that work. `cut`
    makes one rank's part of a model.
    """
    chosen, whole = model.quantization, model.unsharded
    if chosen is None or whole is None:
        return
    found = _divided(chosen, model)
    if found is None:
        return
    own, shared = found

    def works(ranks: int) -> bool:
        return not sharding_problems(whole, ranks) and (ranks == 1 or _divided(chosen, cut(whole, ranks)) is None)

    name, size = shared.names[0], f"[{shared.out_size}, {shared.in_size}]"
    working = [ranks for ranks in range(1, MOST + 1) if works(ranks)]
    is_file = isinstance(chosen, BlockQuantization) and chosen.format is None
    kinds = chosen.blocks_of(shared) if isinstance(chosen, BlockQuantization) else None
    how = chosen.name if kinds is None else ", ".join(kind for kind, _ in kinds)
    elements = _group_size(chosen, shared)
    groups = "" if elements is None else f" of {elements} elements"
    stored = model.stored_quantization
    is_free = not is_file and (stored is None or stored.storage in ("float8", "mxfp4"))
    per_row = [Remedy("quantization", "int8")] if is_free else []
    nearest = [ranks for ranks in working if 1 < ranks < model.ranks][-1:]
    raise ConfigError(
        f"tensor_parallel_size {model.ranks} with quantization {chosen.name}: a part of {name} {size}, "
        f"{own.out_size} rows of {own.in_size}, would be quantised in another way than the whole, which has {how}"
        f"{groups}; what works is {', '.join(map(str, working))}",
        [*per_row, Remedy("quantization", "none"), *(Remedy("tensor_parallel_size", ranks) for ranks in (*nearest, 1))],
    )


def is_cut_between_groups(model: ModelSpec) -> bool:
    """Return whether a rank's part of each matrix is quantised as in the whole model."""
    return model.quantization is None or model.unsharded is None or _divided(model.quantization, model) is None


def _divided(chosen: AnyQuantization, model: ModelSpec) -> tuple[Weight, Weight] | None:
    """Return the first matrix whose part on a rank is quantised differently from the whole, as (part, whole)."""
    for own, shared in _pairs(model):
        if own.shape == shared.shape and own.segments == shared.segments:
            continue
        if _blocks(chosen, own) != _blocks(chosen, shared):
            return own, shared
        elements = _group_size(chosen, shared)
        if elements is None or own.in_size == shared.in_size:
            continue
        if any(size % elements for each in (own, shared) for size in _of_rows(each)):
            return own, shared
    return None


def _pairs(model: ModelSpec) -> Iterator[tuple[Weight, Weight]]:
    """Yield each matrix of one rank with that of the whole model, those of the prediction head included."""
    assert model.unsharded is not None, "it is one rank's part"
    yield from zip(model.table, model.unsharded.table, strict=True)
    if model.head is not None and model.unsharded.head is not None:
        yield from zip(model.head.table, model.unsharded.head.table, strict=True)


def _of_rows(weight: Weight) -> tuple[int, ...]:
    """Return the lengths of the parts of a row that are split separately, in elements."""
    return weight.segments if sum(weight.segments) == weight.in_size else (weight.in_size,)


def _blocks(chosen: AnyQuantization, weight: Weight) -> tuple[str, ...] | bool:
    """Return the formats of a matrix's blocks, or without blocks whether it is quantised."""
    blocks = chosen.blocks_of(weight) if isinstance(chosen, BlockQuantization) else None
    return chosen.quantises(weight) if blocks is None else tuple(name for name, _ in blocks)


def _group_size(chosen: AnyQuantization, weight: Weight) -> int | None:
    """Return the number of elements of a row with one scale; None for all."""
    if isinstance(chosen, Quantization):
        return chosen.group_size if chosen.quantises(weight) else None
    blocks = chosen.blocks_of(weight)
    return None if blocks is None else BLOCK_FORMATS[blocks[0][0]].elements


def with_runs_of_rank(model: ModelSpec) -> ModelSpec:
    """Return `model` with the runs of its file (`stored_runs`) that a rank uses directly from the mapped file.

    They are the tensors of weights that are whole on each rank, and those whose rows on a rank are contiguous.
    """
    whole: set[str] = set()
    apart: set[str] = set()
    for own, shared in _pairs(model):
        if own.shape == shared.shape:
            whole.update(own.names)
        elif own.in_size == shared.in_size and len(own.names) == 1 and len(own.segments) <= 1:
            apart.update(own.names)
    runs: list[tuple[str, ...]] = []
    for run in model.stored_runs:
        together: list[str] = []
        for name in run:
            if not whole.isdisjoint(spellings(name)):
                together.append(name)
                continue
            runs += [tuple(together)] if together else []
            together = []
            if not apart.isdisjoint(spellings(name)):
                runs.append((name,))
        runs += [tuple(together)] if together else []
    return replace(model, stored_runs=tuple(runs))
