"""Loading of weights from safetensors files into a model, with one error for everything that does not match.

Rows that a checkpoint stores interleaved are put in order after loading.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, cast

import numpy as np

from ostinato.errors import ModelError
from ostinato.formats.checkpoint_json import is_gguf
from ostinato.formats.mapped_files import SafetensorsFile, weight_files
from ostinato.layers.allocation import (
    BlockView,
    QuantizedView,
    WeightAllocator,
    WeightTarget,
    checkpoint_views,
    target_on_host,
)
from ostinato.layers.module import Module
from ostinato.models.base import CausalLM
from ostinato.models.gguf_loader import load_gguf
from ostinato.models.quantized_loader import put_stored
from ostinato.models.registry import make_model
from ostinato.models.tensor_sources import TensorSource, find_sources, names_in
from ostinato.models.weight_shards import tensor_shards
from ostinato.ops import arrays, huge_pages
from ostinato.ops.quant import quantize
from ostinato.ops.quant.quantize import BY_TORCH, WeightQuantizers
from ostinato.os_support import usable_cores
from ostinato.plan.model import ModelSpec
from ostinato.plan.quantization import StoredWeights

if TYPE_CHECKING:
    from ostinato.ops.step_inputs import Array


def deinterleave(model: CausalLM, parts_neighbours: bool = True, in_order: Container[str] = ()) -> None:
    """Reorder the rows of each `row_interleave` weight as its row of the weight table says, and those of `neighbours`.

    A row's scales, or its blocks, move with it. One weight at a time takes its memory twice. `parts_neighbours` is
    False if the loader has done so already, and `in_order` are the first names of weights that need no reordering.
    """
    for module, attribute, row in model.weights():
        if row.names[0] in in_order:
            continue
        if row.row_interleave:
            order = deinterleaved_index(row.shape[0], row.row_interleave)
        elif row.neighbours is not None and parts_neighbours:
            begin, end, size, rotated = row.neighbours
            order = np.arange(row.shape[0])
            heads = order[begin:end].reshape(-1, size)
            pairs = heads[:, size - rotated :].reshape(-1, rotated // 2, 2)
            heads[:, size - rotated :] = pairs.swapaxes(1, 2).reshape(-1, rotated)
        else:
            continue
        for each in (attribute, "weight_scale") if attribute == "weight" else (attribute,):
            array = getattr(module, each, None)
            if array is None:
                continue
            assert array.shape[0] == row.shape[0], "the rows of one tensor of a checkpoint have one format"
            ordered = model.build.arrays.empty(array.shape, arrays.dtype_name(array.dtype))
            own, target = arrays.on_host(array), arrays.on_host(ordered)
            if isinstance(own, np.ndarray):
                np.take(own, order, axis=0, out=cast(np.ndarray, target), mode="clip")  # Other modes make a copy.
            else:
                target[...] = own[order]
            if row.first_part_transposed:
                transpose_first(target, row.row_interleave)
            setattr(module, each, ordered)


def transpose_first(ordered: Array, sizes: Sequence[int]) -> None:
    """Transpose each matrix [sizes[0], columns] of the first part, in place; a matrix stays in its memory."""
    rows = sizes[0]
    for begin in range(0, ordered.shape[0] // sum(sizes) * rows, rows):
        matrix = ordered[begin : begin + rows]
        matrix.reshape(-1)[...] = matrix.T.flatten()


def deinterleaved_index(rows: int, sizes: Sequence[int]) -> np.ndarray:
    """Return the old index of each of `rows` rows when interleaved parts of these `sizes` are grouped, [rows] int64.

    The rows of the first part come first.
    """
    turns = np.arange(rows).reshape(-1, sum(sizes))
    return np.concatenate([part.ravel() for part in np.split(turns, np.cumsum(sizes)[:-1], axis=1)])


COPIED_BYTES = 2**23
"""Bytes that are copied from a mapped file before their pages are dropped."""

Owners: TypeAlias = Mapping[int, Sequence[tuple[Module, str]]]
"""Attributes of modules that hold a weight, by its address."""


def build_model(build: WeightAllocator, spec: ModelSpec) -> CausalLM:
    """Build the model of `spec`, with weights allocated by `build.arrays` and not yet written."""
    assert all(rope.kind not in ("dynamic", "longrope") for rope in spec.ropes), "resolve_ropes comes first"
    if spec.quantization is None:
        return make_model(build, spec)
    model = make_model(build.with_deferred_matrices(), spec)
    build.allocate_matrices(model, spec.quantization)
    return model


@np.errstate(all="ignore")  # A checkpoint may hold infinities.
def load_weights(
    model: CausalLM,
    directory: Path,
    progress: Callable[[int, int], None] = lambda done, total: None,
    quantizers: WeightQuantizers = BY_TORCH,
    threads: int = 0,
) -> None:
    """Load every tensor of the checkpoint, a directory or a GGUF file, into its target, in the target's dtype.

    A tensor is quantised if its target is. On a CPU the memory in use is at any time that of the weights and a few MiB.
    The files must not be changed while the model is in use, since weights may be mapped from them; they may be deleted
    or replaced. `progress` is called with (tensors done, tensors in all). Copies run on `threads` threads, or with 0 on
    all cores. Raises ModelError, before anything is read, that lists all tensors missing, left over or of the wrong
    shape.
    """
    if is_gguf(directory):
        in_order = load_gguf(model, directory, progress, quantizers)
        deinterleave(model, parts_neighbours=False, in_order=in_order)
        return
    files = [SafetensorsFile(path) for path in weight_files(directory)]
    names = names_in(model, files)
    places = {name: target_on_host(view) for name, view in checkpoint_views(model, found=names)}
    shares = tensor_shards(model, names)
    sources, mismatch = find_sources(model, files, places, shares)
    if mismatch:
        raise ModelError(mismatch.message(directory))
    stored = model.spec.stored_quantization
    for file in files:
        for name in file.names:
            expected = model.derived.get(name)
            if expected is not None and not np.array_equal(file.tensor(name).astype(np.int64), expected):
                raise ModelError(f"{name} has other values than follow from config.json: {expected}")
    owners = _owners(model)
    tables = {row.names[0]: (module, attribute) for module, attribute, row in model.weights() if row.stays_on_disk}
    for name, place in places.items():
        if name not in sources:
            assert not isinstance(place, QuantizedView | BlockView), "what a checkpoint may leave out is a vector"
            arrays.write(place, np.full(tuple(place.shape), model.value_if_absent(name), np.float32))
    done = 0
    for file in files:
        if any(source.main[0] is file for name, source in sources.items() if name not in tables):
            huge_pages.read_ahead(file.path)
        as_they_are: list[tuple[np.ndarray, np.ndarray]] = []
        for name, source in sources.items():
            main, source_name = source.main
            if main is not file:
                continue
            tensor, place, share = file.tensor(source_name), places[name], shares.get(name)
            changes = source.is_transposed or source.is_quantised or source.in_turns
            plain = None if changes or isinstance(place, QuantizedView | BlockView) else place
            if name in tables:
                module, attribute = tables[name]
                setattr(module, attribute, model.build.arrays.sharing(tensor))
            elif share is not None and plain is not None:
                arrays.write(plain, share.read(tensor))
            elif share is not None:
                # A row's scale comes from the whole row.
                whole = share.allocate_full(place)
                _put(source, tensor, name, whole, stored, model, owners, quantizers)
                share.copy_shard(whole, place)
            elif plain is not None and _stays_mapped(tensor, plain, model, owners):
                pass
            elif plain is not None and _has_its_bytes(tensor, plain):
                as_they_are.append((tensor, arrays.host_values(plain)))
                continue
            else:
                _put(source, tensor, name, place, stored, model, owners, quantizers)
            done += 1
            progress(done, len(sources))
        for _ in _copied(as_they_are, threads or usable_cores()):
            done += 1
            progress(done, len(sources))
    deinterleave(model)


def _owners(model: CausalLM) -> Owners:
    """Return the attributes that hold each weight; tied weights have several."""
    owners: dict[int, list[tuple[Module, str]]] = {}
    for module in model.modules():
        for attribute, value in module.local_tensors():
            owners.setdefault(arrays.first_address(value), []).append((module, attribute))
    return owners


def _put(
    source: TensorSource,
    tensor: np.ndarray,
    name: str,
    place: WeightTarget,
    stored: StoredWeights | None,
    model: CausalLM,
    owners: Owners,
    quantizers: WeightQuantizers,
) -> None:
    """Load a tensor of a mapped file, the values of a source, into its target, in whatever form the target has."""
    order = None
    if source.in_turns:
        is_bias = len(place.shape) == 2
        order = deinterleaved_index(place.shape[-1 if is_bias else -2], (1, 1))
        if is_bias:
            tensor = tensor[:, order]
    if source.is_transposed:
        _put_transposed(tensor, place, quantizers, order)
    elif stored is None or not source.is_quantised:
        if isinstance(place, QuantizedView | BlockView):
            _quantize(tensor, place, quantizers)
        else:
            _convert(tensor, place)
    elif stored.storage != "int8":
        put_stored(stored, source.tensors(), name, place, quantizers, order)
    else:
        # Scales may be in another file than their weight.
        file, name = source.parts["weight_scale"]
        scale = file.tensor(name).astype(np.float32)
        scale = scale.ravel() if stored.group_size is None else _flat(scale)
        _put_integers(tensor, scale, stored.group_size, place, model, owners)


def _quantize(tensor: np.ndarray, place: QuantizedView | BlockView, quantizers: WeightQuantizers) -> None:
    """Quantise a tensor of a mapped file, or a stack of such, into its target."""
    rows = place.flat()
    for begin, end, source in _pieces(_flat(tensor), COPIED_BYTES):
        rows.rows(begin, end).quantize_into(source, quantizers)


def _convert(tensor: np.ndarray, place: Array) -> None:
    """Copy a tensor of a mapped file into a target of another dtype or dimension order, piece by piece.

    A file that was read completely would take the memory of the weights once more.
    """
    if tensor.nbytes <= COPIED_BYTES:
        arrays.write(place, tensor)
        huge_pages.drop(tensor)
        return
    for begin, end, source in _pieces(tensor, COPIED_BYTES):
        arrays.write(place[begin:end], source)


def _has_its_bytes(tensor: np.ndarray, place: Array) -> bool:
    """Return whether the target is to hold a tensor with the file's bytes."""
    return isinstance(place, np.ndarray) and tensor.dtype == place.dtype and place.flags.c_contiguous


def _copied(tensors: Iterable[tuple[np.ndarray, np.ndarray]], threads: int) -> Iterator[None]:
    """Copy tensors of a mapped file into targets that hold the same bytes, yielding once after each.

    Threads share the pieces: a processor copies faster than one core does.
    """

    def copy(source: np.ndarray, target: np.ndarray) -> None:
        np.copyto(target, source)  # It releases the GIL.
        huge_pages.drop(source)

    with ThreadPoolExecutor(threads) as pool:
        tasks = [
            [
                pool.submit(copy, piece, target[begin : begin + len(piece)])
                for source, target in [(_bytes_of(tensor), _bytes_of(place))]
                for begin, piece in _parts(source, COPIED_BYTES // threads)
            ]
            for tensor, place in tensors
        ]
        for of_tensor in tasks:
            for task in of_tensor:
                task.result()
            yield


def _bytes_of(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1).view(np.uint8)


def _put_transposed(
    tensor: np.ndarray, place: WeightTarget, quantizers: WeightQuantizers, order: np.ndarray | None
) -> None:
    """Load a stack [matrices, columns, rows] of a mapped file into its target [matrices, rows, columns].

    With `order`, row i is column `order[i]` of the file.
    """
    for i, matrix in enumerate(tensor):
        rows = matrix.T if order is None else matrix.T[order]
        if isinstance(place, QuantizedView | BlockView):
            place.of(i).quantize_into(np.ascontiguousarray(rows), quantizers)
        else:
            arrays.write(place[i], rows)
        huge_pages.drop(matrix)


def _put_integers(
    tensor: np.ndarray,
    scale: np.ndarray,
    group_size: int | None,
    place: WeightTarget,
    model: CausalLM,
    owners: Owners,
) -> None:
    """Load a quantised weight of a mapped file into its target, which may be quantised too.

    `tensor` is int8 [rows, in], or int32 [rows, in / 4] of packed ones, or a stack of such; `scale` is that of
    `ops.quant.quantize` for all rows.
    """
    assert not isinstance(place, BlockView), "integers of 8 bits are not made blocks"
    if isinstance(place, QuantizedView):
        arrays.write(place.scale, scale.reshape(place.scale.shape))
        if _stays_mapped(tensor, place.weight, model, owners):
            return
        rows = place.flat().weight
    else:
        rows = place.reshape(-1, place.shape[-1])
    for begin, end, source in _pieces(_flat(tensor), COPIED_BYTES // 8):
        integers = source if source.dtype == np.int8 else _unpack(source, rows.shape[1])
        if not isinstance(place, QuantizedView):
            integers = quantize.dequantize(integers, scale[begin:end], group_size)
        arrays.write(rows[begin:end], integers)


def _flat(stack: np.ndarray) -> np.ndarray:
    """Return a view [rows, in] of [..., in]."""
    return stack.reshape(-1, stack.shape[-1])


def _unpack(packed: np.ndarray, columns: int) -> np.ndarray:
    """Unpack int32 [rows, columns / 4] to int8 [rows, columns].

    Each byte, the lowest first, is a value plus 128; the rest of the last int32 is padding.
    """
    return (packed.view(np.uint8)[:, :columns] ^ 128).view(np.int8)


def _pieces(tensor: np.ndarray, size: int) -> Iterator[tuple[int, int, np.ndarray]]:
    """Yield rows of a mapped tensor, of about `size` bytes: (first, end, values).

    Their pages are dropped before the next rows are yielded.
    """
    for begin, piece in _parts(tensor, size):
        yield begin, begin + len(piece), piece
        huge_pages.drop(piece)


def _parts(tensor: np.ndarray, size: int) -> Iterator[tuple[int, np.ndarray]]:
    """Yield rows of a tensor, of about `size` bytes: (first, values)."""
    rows = max(1, size * len(tensor) // max(1, tensor.nbytes))
    for begin in range(0, len(tensor), rows):
        yield begin, tensor[begin : begin + rows]


def _stays_mapped(tensor: np.ndarray, place: Array, model: CausalLM, owners: Owners) -> bool:
    """Replace a weight by its mapped tensor, if that can serve, and return whether it did."""
    if not isinstance(place, np.ndarray):
        return False
    holders = owners.get(arrays.first_address(place), ())
    if not holders or not all(_serves_as(tensor, place, getattr(*holder)) for holder in holders):
        return False
    for module, attribute in holders:
        setattr(module, attribute, model.build.arrays.sharing(tensor))
    return True


def _serves_as(tensor: np.ndarray, place: np.ndarray, weight: Array) -> bool:
    """Return whether a mapped tensor can be the weight itself.

    Most files align tensors arbitrarily, and decoding reads all weights in every step: across cache lines that takes 5
    to 10 % longer, which one copy saves for good. Small pages cost 1 to 2 %.
    """
    return (
        tensor.dtype == place.dtype
        and place.flags.c_contiguous
        and place.shape == tuple(weight.shape)
        and arrays.first_address(tensor) % huge_pages.CACHE_LINE == 0
    )
