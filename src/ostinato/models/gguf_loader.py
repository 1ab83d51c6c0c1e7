"""Loading of weights from a GGUF file into a model, in the form that the plan chose.

Blocks stay in the mapped file or are copied; others are dequantized, or quantised anew. `formats.gguf.architectures`
gives the tensors' names. Values of state layers, and rows of queries and keys, have another form in such a file and are
converted.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TypeAlias

import numpy as np

from ostinato.errors import ModelError
from ostinato.formats.checkpoint_json import gguf_header
from ostinato.formats.gguf.architectures import (
    ARCHITECTURES,
    checkpoint_name,
    has_adjacent_rope,
    may_be_absent,
    stores_norm_plus_one,
)
from ostinato.formats.gguf.reader import SUPPORTED, BlockType, GgufTensor, Header
from ostinato.formats.gguf.tensor_names import (
    EACH,
    FRAMES,
    GATE,
    KEYS,
    NO_WEIGHTS,
    OF_ENCODER,
    UP,
    VALUES,
    checkpoint_shape,
    is_changed,
)
from ostinato.layers.allocation import BlockView, QuantizedView, WeightTarget, checkpoint_views, target_on_host
from ostinato.models.base import CausalLM
from ostinato.models.tensor_sources import CheckpointMismatch
from ostinato.models.weight_shards import TensorShard, tensor_shards
from ostinato.ops import huge_pages
from ostinato.ops.arrays import has_memory, numpy_dtype, write
from ostinato.ops.quant import dequantize as block_ops
from ostinato.ops.quant.quantize import BY_TORCH, WeightQuantizers
from ostinato.ops.step_inputs import Array
from ostinato.plan.weights import of_all_experts

PLAIN = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Types that are not blocks."""


def dequantize(kind: BlockType, blocks: np.ndarray) -> np.ndarray:
    """Dequantize `blocks` [..., bytes of a row] uint8 to [..., weights of a row] float32."""
    dtype = PLAIN.get(kind.name)
    return (
        block_ops.dequantize(kind.name, blocks) if dtype is None else blocks.view(numpy_dtype(dtype)).astype(np.float32)
    )


def to_checkpoint_layout(name: str, values: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Return a tensor with `is_changed` in the checkpoint's `shape`; A becomes the logarithm of its negative."""
    # float64, of which the logarithm in float32 is the nearest.
    return (np.log(-values.astype(np.float64)) if name.endswith(".ssm_a") else values).reshape(shape)


def to_half_split(rows: np.ndarray, heads: int, rotated: int | None = None) -> np.ndarray:
    """Reorder the rows of each head, [heads * size, in]: from pairs of neighbours to all firsts, then all seconds.

    With `rotated`, these are only the last `rotated` rows of each head.
    """
    by_head = rows.reshape(heads, -1, *rows.shape[1:])
    first = 0 if rotated is None else by_head.shape[1] - rotated
    turned = by_head[:, first:]
    turned = turned.reshape(heads, -1, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(turned.shape)
    return np.concatenate((by_head[:, :first], turned), 1).reshape(rows.shape)


GgufTarget: TypeAlias = "WeightTarget | list[WeightTarget]"
"""A weight, or the weights of all experts, one matrix each."""


def tensors_of_places(
    model: CausalLM, header: Header, views: Mapping[str, WeightTarget], shares: Mapping[str, TensorShard]
) -> tuple[dict[str, GgufTensor], dict[str, GgufTarget], dict[str, TensorShard]]:
    """Return the tensor of each target, the targets, and the shares of sharded ones.

    The share of experts is that of each expert's matrix. `shares` come from `tensor_shards`. ModelError that lists
    all tensors missing, left over or of the wrong shape, or tensors of types that are not supported. A bias that may be
    absent is set to zero.
    """
    unknown = {info.type.name for info in header.tensors.values() if not info.type.is_supported}
    if unknown:
        known = ", ".join(SUPPORTED)
        raise ModelError(f"{header.path} has tensors of type {', '.join(sorted(unknown))}; supported: {known}")
    named = {tensor.name: checkpoint_name(model.spec, tensor.name) for tensor in header.tensors.values()}
    turns = {row.names[0]: row.row_interleave for _, _, row in model.weights() if row.first_part_transposed}
    places = _places(views, {name for name in named.values() if name is not None}, turns)
    parts = {
        name: part for name, place in places.items() if (part := _share_of(name, place, shares, turns)) is not None
    }
    loaded: dict[str, GgufTensor] = {}
    unexpected, misshapen = [], []
    for tensor in header.tensors.values():
        stored_as = named[tensor.name]
        name = None if stored_as is None else model.checkpoint_name(stored_as)
        if tensor.name in NO_WEIGHTS or (stored_as is not None and name is None):  # It is known, and not loaded.
            continue
        if name is None or name not in places or name in loaded:
            unexpected.append(tensor.name)
        elif checkpoint_shape(tensor.name, tensor.shape, expected := _shape(places[name], parts.get(name))) != expected:
            misshapen.append(f"{tensor.name} is {list(tensor.shape)}, expected {list(expected)}")
        else:
            loaded[name] = tensor
    absent = [name for name in places if name not in loaded]
    missing = sorted(name for name in absent if not may_be_absent(model.spec.architecture, name))
    if missing or unexpected or misshapen:
        paths = [header.path, *([] if header.mmproj is None else [header.mmproj.path])]
        raise ModelError(CheckpointMismatch(missing, sorted(unexpected), misshapen).message(*paths))
    for name in absent:
        bias = places[name]
        assert not isinstance(bias, QuantizedView | BlockView | list), "biases are not quantised"
        bias[...] = 0
    return loaded, places, parts


def _places(
    views: Mapping[str, WeightTarget], names: set[str], turns: Mapping[str, tuple[int, ...]]
) -> dict[str, GgufTarget]:
    """Return the targets, with halves if the file has `names` for them, and experts together.

    `turns` are the rows of keys and of values in the tensors that have them by head.
    """
    places: dict[str, GgufTarget] = {}
    for name, view in views.items():
        together = of_all_experts(name)
        if together != name:
            matrices = places.setdefault(together, [])
            assert isinstance(matrices, list), "experts stand together"
            matrices.append(view)
        elif name in turns and {name + KEYS, name + VALUES} & names:
            assert not isinstance(view, QuantizedView | BlockView), "latents' projections are not quantised"
            (key, value), rank = turns[name], view.shape[1]
            keys = view.shape[0] // (key + value) * key
            places[name + KEYS] = list(view[:keys].reshape(-1, rank, key))
            places[name + VALUES] = list(view[keys:].reshape(-1, value, rank))
        elif {name + frame for frame in FRAMES} & names:
            assert not isinstance(view, QuantizedView | BlockView), "an encoder's weights are not quantised"
            places |= {name + frame: view[:, :, i] for i, frame in enumerate(FRAMES[: view.shape[2]])}
        elif {name + GATE, name + UP} & names:
            if len(view.shape) == 2 and name.endswith("_bias"):  # of all experts
                assert not isinstance(view, QuantizedView | BlockView), "biases are not quantised"
                places |= {name + GATE: view[:, : view.shape[1] // 2], name + UP: view[:, view.shape[1] // 2 :]}
                continue
            half = view.shape[-2] // 2
            parts = (name + GATE, slice(0, half)), (name + UP, slice(half, view.shape[-2]))
            places |= {part: _rows_of(view, rows) for part, rows in parts}
        else:
            places[name] = [_of(view, i) for i in range(view.shape[0])] if _is_stack(name, view) else view
    return places


def _is_stack(name: str, view: WeightTarget) -> bool:
    return len(view.shape) == 3 and not name.endswith(("conv1d.weight", ".conv.weight"))


def _rows_of(view: WeightTarget, rows: slice) -> GgufTarget:
    if len(view.shape) == 3:
        return [_rows_of(_of(view, i), rows) for i in range(view.shape[0])]  # type: ignore[misc]
    return view.rows(rows.start, rows.stop) if isinstance(view, QuantizedView | BlockView) else view[rows]


def _of(view: WeightTarget, i: int) -> WeightTarget:
    return view.of(i) if isinstance(view, QuantizedView | BlockView) else view[i]


def _shape(place: GgufTarget, part: TensorShard | None) -> tuple[int, ...]:
    """Return the shape of the whole tensor; `place` may be one rank's part."""
    first = place[0] if isinstance(place, list) else place
    shape = tuple(first.shape) if part is None else part.shape
    return (len(place), *shape) if isinstance(place, list) and len(shape) == len(first.shape) else shape


def _share_of(
    name: str, place: GgufTarget, shares: Mapping[str, TensorShard], turns: Mapping[str, tuple[int, ...]]
) -> TensorShard | None:
    whole = name.removesuffix(KEYS).removesuffix(VALUES)
    if whole in turns and (share := shares.get(whole)) is not None and isinstance(place, list):
        rows = sum(turns[whole])
        heads = tuple((first // rows, end // rows) for first, end in share.parts)
        return TensorShard((share.shape[0] // rows, *place[0].shape), 0, heads)
    half = next((i for i, end in enumerate((GATE, UP)) if name.endswith(end)), None)
    share = shares.get(name.removesuffix(GATE).removesuffix(UP).replace(EACH, "0"))
    if share is not None and isinstance(place, list) and len(share.shape) == 3:
        share = share.of_one()
    return share if share is None or half is None else share.of_half(half)


@dataclass(frozen=True)
class Heads:
    """Heads of the queries or keys that a tensor makes, in a file whose neighbouring rows are rotated together."""

    number: int
    rotated: int | None
    """Rows of each head that are rotated, its last ones; None if all are."""

    def to_half_split(self, rows: np.ndarray, of_head: int) -> np.ndarray:
        """Return rows of whole heads, of `of_head` rows each, in the order of checkpoints."""
        return to_half_split(rows, len(rows) // of_head, self.rotated)


def heads_of(model: CausalLM, name: str) -> Heads:
    """Return the heads of the queries or keys that a tensor makes."""
    attention = next(layer.attention for layer in model.spec.layers if layer.attention is not None)
    number = attention.num_heads if ".q_proj." in name or ".q_b_proj." in name else attention.num_kv_heads
    rope = model.spec.rope
    return Heads(number, rope.rotary_dim if rope and ARCHITECTURES[model.spec.architecture].rotates_last else None)


DEQUANTIZED_WEIGHTS = 2**21
"""Weights that are dequantized at once."""


def load_gguf(
    model: CausalLM, path: Path, progress: Callable[[int, int], None], quantizers: WeightQuantizers = BY_TORCH
) -> frozenset[str]:
    """Load every tensor of the file, and of the files that it was split into, into its target.

    Returns the names of the weights whose keys and values came as two tensors, and so in the model's order.

    ModelError, before anything is read, as `tensors_of_places`.
    """
    header = gguf_header(path)
    views = {name: target_on_host(view) for name, view in checkpoint_views(model)}
    tensors, places, shares = tensors_of_places(model, header, views, tensor_shards(model))
    files = {file: _mapped(file) for file in {tensor.file for tensor in tensors.values()}}
    _map_matrices(model, tensors, files, shares)
    for done, (name, tensor) in enumerate(tensors.items(), start=1):
        rows, place, share = _rows(files[tensor.file], tensor), places[name], shares.get(name)
        if isinstance(place, BlockView) and not has_memory(place.bytes):
            huge_pages.populate_pages(rows if share is None else share.read(rows))
            progress(done, len(tensors))
            continue
        if isinstance(place, list):
            if share is not None and len(share.shape) == 3:  # of heads, which are here in whole
                own = share.read(rows.reshape(share.shape[0], -1, rows.shape[-1]))
                rows, share = own.reshape(-1, rows.shape[-1]), None
            for of_expert, matrix in zip(np.split(rows, len(place)), place, strict=True):
                _put(of_expert, tensor, matrix, None, quantizers, share)
        elif tensor.name.startswith(OF_ENCODER) and len(tensor.shape) > 2:
            assert not isinstance(place, QuantizedView | BlockView), "an encoder's weights are not quantised"
            values = dequantize(tensor.type, rows).reshape(tensor.shape)
            # As a matrix, patches have their channels last.
            write(place, values if len(place.shape) > 2 else values.transpose(0, 2, 3, 1).reshape(place.shape))
        elif is_changed(tensor.name):
            assert not isinstance(place, QuantizedView | BlockView), "what belongs to heads is not quantised"
            shape = tuple(place.shape) if share is None else share.shape
            values = to_checkpoint_layout(tensor.name, dequantize(tensor.type, rows), shape)
            write(place, values if share is None else share.read(values))
        elif stores_norm_plus_one(model.spec.architecture, tensor.name):
            assert not isinstance(place, QuantizedView | BlockView), "norms are not quantised"
            write(place, dequantize(tensor.type, rows)[0] - 1)
        else:
            heads = heads_of(model, name) if has_adjacent_rope(model.spec.architecture, tensor.name) else None
            _put(rows, tensor, place, heads, quantizers, share)
        huge_pages.drop(rows)
        progress(done, len(tensors))
    return frozenset(name.removesuffix(KEYS) for name in tensors if name.endswith(KEYS))


def _map_matrices(
    model: CausalLM,
    tensors: Mapping[str, GgufTensor],
    files: Mapping[Path, mmap.mmap],
    shares: Mapping[str, TensorShard],
) -> None:
    """Point the weights that the plan left without memory at their mapped tensors.

    The file stays mapped while they are used. With a sharded tensor, a weight gets its rank's rows.
    """
    for module, attribute, row in model.weights():
        weight: Array = getattr(module, attribute)
        if not has_memory(weight):
            first = tensors.get(row.names[0]) or tensors[row.names[0] + GATE]
            share, begin = shares.get(row.names[0]), first.begin
            if share is not None:
                ((first_row, _),) = share.parts
                begin += first_row * (first.num_bytes // share.shape[0])
            mapped = _bytes(files[first.file], begin, prod(weight.shape))
            setattr(module, attribute, model.build.arrays.sharing(mapped.reshape(tuple(weight.shape))))


def _mapped(path: Path) -> mmap.mmap:
    """Map the file; it stays mapped while a tensor uses it. Writes to it stay in this process."""
    huge_pages.read_ahead(path)
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)


def _bytes(data: mmap.mmap, begin: int, count: int) -> np.ndarray:
    """Return [count] uint8 of the mapped file, without a copy; the tensor keeps it mapped."""
    return np.frombuffer(data, np.uint8, count, begin)


def _rows(data: mmap.mmap, tensor: GgufTensor) -> np.ndarray:
    """Return a tensor's rows in the mapped file, [rows, bytes] uint8: one of a vector, those of experts joined."""
    rows = tensor.num_elements // tensor.shape[-1] if len(tensor.shape) > 1 else 1
    return _bytes(data, tensor.begin, tensor.num_bytes).reshape(rows, -1)


def _put(
    rows: np.ndarray,
    tensor: GgufTensor,
    place: WeightTarget,
    heads: Heads | None,
    quantizers: WeightQuantizers,
    share: TensorShard | None,
) -> None:
    """Copy or dequantize rows piece by piece into their target, or only the part of `share`.

    With `heads`, the rows of each head are put in the order of checkpoints.
    """
    if len(tensor.shape) < 2:
        assert not isinstance(place, QuantizedView | BlockView), "vectors are not quantised"
        values = dequantize(tensor.type, rows)[0]
        values = values if share is None else share.read(values)
        write(place, values if heads is None else to_half_split(values, heads.number, heads.rotated))
        return
    if share is not None and not share.cuts_rows:
        rows, share = share.read(rows), None
    stays = isinstance(place, BlockView) and place.name == tensor.type.name
    if share is not None and not stays and isinstance(place, QuantizedView | BlockView):
        # A row's scale comes from the whole row.
        whole = share.allocate_full(place)
        _put(rows, tensor, whole, heads, quantizers, None)
        share.copy_shard(whole, place)
        return
    of_head = 1 if heads is None else len(rows) // heads.number
    step = max(1, DEQUANTIZED_WEIGHTS // tensor.shape[-1] // of_head) * of_head
    of_bytes = share if share is None or not stays else share.of_blocks(tensor.type.name)
    for begin in range(0, len(rows), step):
        if isinstance(place, BlockView) and stays:
            lying = rows[begin : begin + step]
            own = lying if of_bytes is None else of_bytes.read(lying)
            write(place.bytes[begin : begin + step], own if heads is None else heads.to_half_split(own, of_head))
            huge_pages.drop(lying)
            continue
        values = dequantize(tensor.type, rows[begin : begin + step])
        values = values if share is None else share.read(values)
        if heads is not None:
            values = heads.to_half_split(values, of_head)
        if isinstance(place, QuantizedView | BlockView):
            place.rows(begin, begin + step).quantize_into(values, quantizers)
        else:
            write(place[begin : begin + step], values)
