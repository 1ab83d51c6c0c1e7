"""Targets of the tensors of a GGUF file, by the names that `formats.gguf.names` gives them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ostinato.errors import ModelError
from ostinato.formats.gguf.header import Header, GgufTensor
from ostinato.formats.gguf.names import EACH, GATE, ROPE_FACTORS, UP, checkpoint_name, checkpoint_shape
from ostinato.formats.gguf.types import SUPPORTED
from ostinato.layers.build import WeightTarget
from ostinato.models.base import CausalLM
from ostinato.models.shares import TensorShard
from ostinato.models.sources import CheckpointMismatch
from ostinato.plan.weights import of_all_experts

GgufTarget = WeightTarget | list[WeightTarget]
"""A weight, or the weights of all experts, one matrix each."""


def tensors_of_places(
    model: CausalLM, header: Header, views: Mapping[str, WeightTarget], shares: Mapping[str, TensorShard]
) -> tuple[dict[str, GgufTensor], dict[str, GgufTarget], dict[str, TensorShard]]:
    """Return the tensor of each target, the targets, and the shares of sharded ones.

    The share of experts is that of each expert's matrix. `shares` are those of `tensor_shards`. ModelError that lists all
    tensors missing, left over or of the wrong shape, or tensors of types that are not supported.
    """
    unknown = {each.type.name for each in header.tensors.values() if not each.type.is_supported}
    if unknown:
        known = ", ".join(SUPPORTED)
        raise ModelError(f"{header.path} has tensors of type {', '.join(sorted(unknown))}; supported: {known}")
    named = {tensor.name: checkpoint_name(model.spec, tensor.name) for tensor in header.tensors.values()}
    places = _places(views, {name for name in named.values() if name is not None})
    parts = {name: part for name, place in places.items() if (part := _share_of(name, place, shares)) is not None}
    found: dict[str, GgufTensor] = {}
    unexpected, misshapen = [], []
    for tensor in header.tensors.values():
        stored_as = named[tensor.name]
        name = None if stored_as is None else model.checkpoint_name(stored_as)
        if tensor.name == ROPE_FACTORS or (stored_as is not None and name is None):  # It is known, and not loaded.
            continue
        if name is None or name not in places or name in found:
            unexpected.append(tensor.name)
        elif checkpoint_shape(tensor.name, tensor.shape) != (expected := _shape(places[name], parts.get(name))):
            misshapen.append(f"{tensor.name} is {list(tensor.shape)}, expected {list(expected)}")
        else:
            found[name] = tensor
    missing = sorted(name for name in places if name not in found)
    if missing or unexpected or misshapen:
        raise ModelError(CheckpointMismatch(missing, sorted(unexpected), misshapen).message(header.path))
    return found, places, parts


def _places(views: Mapping[str, WeightTarget], names: set[str]) -> dict[str, GgufTarget]:
    """Return the targets, with halves if the file has `names` for them, and experts together."""
    places: dict[str, GgufTarget] = {}
    for name, view in views.items():
        together = of_all_experts(name)
        if together != name:
            matrices = places.setdefault(together, [])
            assert isinstance(matrices, list), "experts stand together"
            matrices.append(view)
        elif {name + GATE, name + UP} & names:
            half = view.shape[-2] // 2
            parts = (name + GATE, slice(0, half)), (name + UP, slice(half, view.shape[-2]))
            places |= {part: _rows_of(view, rows) for part, rows in parts}
        else:
            places[name] = [_of(view, i) for i in range(view.shape[0])] if _is_stack(name, view) else view
    return places


def _is_stack(name: str, view: WeightTarget) -> bool:
    return len(view.shape) == 3 and not name.endswith((".conv1d.weight", ".conv.weight"))


def _rows_of(view: WeightTarget, rows: slice) -> GgufTarget:
    if len(view.shape) == 3:
        return [_rows_of(_of(view, i), rows) for i in range(view.shape[0])]  # type: ignore[misc]
    return view[rows] if isinstance(view, torch.Tensor) else view.rows(rows.start, rows.stop)


def _of(view: WeightTarget, i: int) -> WeightTarget:
    return view[i] if isinstance(view, torch.Tensor) else view.of(i)


def _shape(place: GgufTarget, part: TensorShard | None) -> tuple[int, ...]:
    """Return the shape of the whole tensor; `place` may be one rank's part."""
    first = place[0] if isinstance(place, list) else place
    shape = tuple(first.shape) if part is None else part.shape
    return (len(place), *shape) if isinstance(place, list) else shape


def _share_of(name: str, place: GgufTarget, shares: Mapping[str, TensorShard]) -> TensorShard | None:
    half = next((i for i, end in enumerate((GATE, UP)) if name.endswith(end)), None)
    share = shares.get(name.removesuffix(GATE).removesuffix(UP).replace(EACH, "0"))
    if share is not None and isinstance(place, list) and len(share.shape) == 3:
        share = share.of_one()
    return share if share is None or half is None else share.of_half(half)


def num_heads_of(model: CausalLM, name: str) -> int:
    """Return the number of heads of the queries or keys that a tensor makes."""
    attention = next(layer.attention for layer in model.spec.layers if layer.attention is not None)
    return attention.num_heads if ".q_proj." in name else attention.num_kv_heads
