"""Loading of weights from safetensors files into a model, with one error for everything that does not match.

Rows that a checkpoint stores interleaved are put in order after loading.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from ostinato.errors import ModelError
from ostinato.formats.checkpoint_json import is_gguf
from ostinato.formats.mapped_files import check_names, opened, weight_files
from ostinato.layers import huge_pages
from ostinato.layers.allocation import BlockView, QuantizedView, WeightAllocator, WeightTarget, checkpoint_views
from ostinato.layers.module import Module
from ostinato.models.base import CausalLM
from ostinato.models.gguf_loader import load_gguf
from ostinato.models.quantized_loader import put_stored, tensors_of
from ostinato.models.registry import make_model
from ostinato.models.tensor_sources import TensorSource, find_sources, names_in
from ostinato.models.weight_shards import tensor_shards
from ostinato.ops.quant import quantize
from ostinato.ops.quant.quantize import BY_TORCH, WeightQuantizers
from ostinato.plan.model import ModelSpec
from ostinato.plan.quantization import StoredWeights


def deinterleave(model: Module, parts_neighbours: bool = True) -> None:
    """Reorder the rows of each `row_interleave` weight as its row of the weight table says, and those of `neighbours`.

    A row's scales, or its blocks, move with it. One weight at a time takes its memory twice. `parts_neighbours` is
    False if the loader has done so already.
    """
    for module, attribute, row in model.weights():
        if row.row_interleave:
            order = deinterleaved_index(row.shape[0], row.row_interleave)
        elif row.neighbours is not None and parts_neighbours:
            begin, end, size, rotated = row.neighbours
            order = torch.arange(row.shape[0])
            heads = order[begin:end].view(-1, size)
            heads[:, size - rotated :] = heads[:, size - rotated :].view(-1, rotated // 2, 2).mT.flatten(1)
        else:
            continue
        for each in (attribute, "weight_scale") if attribute == "weight" else (attribute,):
            tensor = getattr(module, each, None)
            if tensor is None:
                continue
            assert tensor.shape[0] == row.shape[0], "the rows of one tensor of a checkpoint have one format"
            ordered = huge_pages.empty(*tensor.shape, dtype=tensor.dtype, device=tensor.device)
            torch.index_select(tensor, 0, order.to(tensor.device), out=ordered)
            if row.first_part_transposed:
                transpose_first(ordered, row.row_interleave)
            setattr(module, each, ordered)


def transpose_first(ordered: torch.Tensor, sizes: Sequence[int]) -> None:
    """Transpose each matrix [sizes[0], columns] of the first part, in place; a matrix stays in its memory."""
    turns = ordered.shape[0] // sum(sizes)
    for matrix in ordered[: turns * sizes[0]].split(sizes[0]):
        matrix.view(-1).copy_(matrix.t().flatten())


def deinterleaved_index(rows: int, sizes: Sequence[int]) -> torch.Tensor:
    """Return the old index of each of `rows` rows when interleaved parts of these `sizes` are grouped, [rows] int64.

    The rows of the first part come first.
    """
    turns = torch.arange(rows).view(-1, sum(sizes))
    return torch.cat([part.flatten() for part in turns.split(list(sizes), dim=1)])


COPIED_BYTES = 2**23
"""Bytes that are copied from a mapped file before their pages are dropped."""

Parameters = Mapping[int, torch.Tensor]
"""Weights by their start address."""


def build_model(build: WeightAllocator, spec: ModelSpec) -> CausalLM:
    """Build the model of `spec`, with weights allocated on `build.device` and not yet written."""
    assert spec.rope is None or spec.rope.kind not in ("dynamic", "longrope"), "resolve_rope comes first"
    if spec.quantization is None:
        return make_model(build, spec)
    model = make_model(build.with_deferred_matrices(), spec)
    build.allocate_matrices(model, spec.quantization)
    return model


def load_weights(
    model: CausalLM,
    directory: Path,
    progress: Callable[[int, int], None] = lambda done, total: None,
    quantizers: WeightQuantizers = BY_TORCH,
) -> None:
    """Load every tensor of the checkpoint, a directory or a GGUF file, into its target, in the target's dtype.

    A tensor is quantised if its target is. On a CPU the memory in use is at any time that of the weights and a few MiB.
    The files must not be changed while the model is in use, since weights may be mapped from them; they may be deleted
    or replaced. `progress` is called with (tensors done, tensors in all). Raises ModelError, before anything is read,
    that lists all tensors missing, left over or of the wrong shape.
    """
    if is_gguf(directory):
        load_gguf(model, directory, progress, quantizers)
        deinterleave(model, parts_neighbours=False)
        return
    files = weight_files(directory)
    for file in files:
        check_names(file)
    names = names_in(model, files)
    places, shares = dict(checkpoint_views(model, found=names)), tensor_shards(model, names)
    sources, mismatch = find_sources(model, files, places, shares)
    if mismatch:
        raise ModelError(mismatch.message(directory))
    stored = model.spec.stored_quantization
    parameters = {parameter.data_ptr(): parameter for parameter in model.parameters()}
    done = 0
    for file in files:
        with opened(file) as tensors:
            huge_pages.read_ahead(file)
            as_they_are: list[tuple[torch.Tensor, torch.Tensor]] = []
            for name, source in sources.items():
                main, source_name = source.main
                if main != file:
                    continue
                place, share = places[name], shares.get(name)
                is_plain = not (source.is_transposed or source.is_quantised or source.in_turns)
                if share is not None and is_plain and isinstance(place, torch.Tensor):
                    place.copy_(share.read(tensors.get_slice(source_name)))
                    done += 1
                    progress(done, len(sources))
                    continue
                tensor = tensors.get_tensor(source_name)
                if share is not None:
                    # A row's scale comes from the whole row.
                    whole = share.allocate_full(place)
                    _put(source, tensor, name, whole, stored, parameters, quantizers)
                    share.copy_shard(whole, place)
                elif is_plain and isinstance(place, torch.Tensor) and _stays_mapped(tensor, place, parameters):
                    pass
                elif is_plain and isinstance(place, torch.Tensor) and _has_its_bytes(tensor, place):
                    as_they_are.append((tensor, place))
                    continue
                else:
                    _put(source, tensor, name, place, stored, parameters, quantizers)
                done += 1
                progress(done, len(sources))
            for _ in _copied(as_they_are):
                done += 1
                progress(done, len(sources))
    deinterleave(model)


def _put(
    source: TensorSource,
    tensor: torch.Tensor,
    name: str,
    place: WeightTarget,
    stored: StoredWeights | None,
    parameters: Parameters,
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
        if isinstance(place, torch.Tensor):
            _convert(tensor, place)
        else:
            _quantize(tensor, place, quantizers)
    elif stored.storage != "int8":
        put_stored(stored, tensors_of(source), name, place, quantizers, order)
    else:
        scale = _scale(source.parts["weight_scale"])
        scale = scale.view(-1) if stored.group_size is None else _flat(scale)
        _put_integers(tensor, scale, stored.group_size, place, parameters)


def _quantize(tensor: torch.Tensor, place: QuantizedView | BlockView, quantizers: WeightQuantizers) -> None:
    """Quantise a tensor of a mapped file, or a stack of such, into its target."""
    rows = place.flat()
    for begin, end, source in _pieces(_flat(tensor), COPIED_BYTES):
        rows.rows(begin, end).quantize_into(source, quantizers)


def _convert(tensor: torch.Tensor, place: torch.Tensor) -> None:
    """Copy a tensor of a mapped file into a target of another dtype or dimension order, piece by piece.

    A file that was read completely would take the memory of the weights once more.
    """
    if tensor.nbytes <= COPIED_BYTES:
        place.copy_(tensor)
        huge_pages.drop(tensor)
        return
    for begin, end, source in _pieces(tensor, COPIED_BYTES):
        place[begin:end].copy_(source)


def _has_its_bytes(tensor: torch.Tensor, place: torch.Tensor) -> bool:
    """Return whether the target is to hold a tensor with the file's bytes."""
    return place.device.type == "cpu" and tensor.dtype == place.dtype and place.is_contiguous()


def _copied(tensors: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> Iterator[None]:
    """Copy tensors of a mapped file into targets that hold the same bytes, yielding once after each.

    Threads share the pieces: a processor copies faster than one core does. torch's threads would do so too, but they
    wait for each other at every piece.
    """
    threads = torch.get_num_threads()

    def copy(source: np.ndarray, target: np.ndarray, piece: torch.Tensor) -> None:
        np.copyto(target, source)  # It releases the GIL.
        huge_pages.drop(piece)

    with ThreadPoolExecutor(threads) as pool:
        tasks = [
            [
                pool.submit(copy, _bytes_of(piece), _bytes_of(place[begin : begin + len(piece)]), piece)
                for begin, piece in _parts(tensor, COPIED_BYTES // threads)
            ]
            for tensor, place in tensors
        ]
        for of_tensor in tasks:
            for task in of_tensor:
                task.result()
            yield


def _bytes_of(tensor: torch.Tensor) -> np.ndarray:
    return tensor.view(-1).view(torch.uint8).numpy()


def _put_transposed(
    tensor: torch.Tensor, place: WeightTarget, quantizers: WeightQuantizers, order: torch.Tensor | None
) -> None:
    """Load a stack [matrices, columns, rows] of a mapped file into its target [matrices, rows, columns].

    With `order`, row i is column `order[i]` of the file.
    """
    for i, matrix in enumerate(tensor):
        rows = matrix.t() if order is None else matrix.t()[order]
        if isinstance(place, torch.Tensor):
            place[i].copy_(rows)
        else:
            place.of(i).quantize_into(rows.contiguous(), quantizers)
        huge_pages.drop(matrix)


def _put_integers(
    tensor: torch.Tensor, scale: torch.Tensor, group_size: int | None, place: WeightTarget, parameters: Parameters
) -> None:
    """Load a quantised weight of a mapped file into its target, which may be quantised too.

    `tensor` is int8 [rows, in], or int32 [rows, in / 4] of packed ones, or a stack of such; `scale` is that of
    `ops.quant.quantize` for all rows.
    """
    assert not isinstance(place, BlockView), "integers of 8 bits are not made blocks"
    if isinstance(place, QuantizedView):
        if _stays_mapped(tensor, place.weight, parameters):
            place.scale.copy_(scale.view(place.scale.shape))
            return
        quantised = place.flat()
        quantised.scale.copy_(scale)
        rows = quantised.weight
    else:
        rows = _flat(place)
    for begin, end, source in _pieces(_flat(tensor), COPIED_BYTES // 8):
        integers = source if source.dtype is torch.int8 else _unpack(source, rows.shape[1])
        if isinstance(place, QuantizedView):
            rows[begin:end].copy_(integers)
        else:
            rows[begin:end].copy_(quantize.dequantize(integers, scale[begin:end], group_size))


def _flat(stack: torch.Tensor) -> torch.Tensor:
    """Return a view [rows, in] of [..., in]."""
    return stack.view(-1, stack.shape[-1])


def _unpack(packed: torch.Tensor, columns: int) -> torch.Tensor:
    """Unpack int32 [rows, columns / 4] to int8 [rows, columns].

    Each byte, the lowest first, is a value plus 128; the rest of the last int32 is padding.
    """
    return (packed.contiguous().view(torch.uint8)[:, :columns] ^ 128).view(torch.int8)


def _scale(source: tuple[Path, str]) -> torch.Tensor:
    """Return scales of a checkpoint as float32, [rows, groups] or a stack of such.

    They may be in another file than their weight.
    """
    file, name = source
    with opened(file) as tensors:
        return tensors.get_tensor(name).float()


def _pieces(tensor: torch.Tensor, size: int) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Yield rows of a mapped tensor, of about `size` bytes: (first, end, values).

    Their pages are dropped before the next rows are yielded.
    """
    for begin, piece in _parts(tensor, size):
        yield begin, begin + len(piece), piece
        huge_pages.drop(piece)


def _parts(tensor: torch.Tensor, size: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield rows of a tensor, of about `size` bytes: (first, values)."""
    rows = max(1, size * len(tensor) // max(1, tensor.nbytes))
    for begin in range(0, len(tensor), rows):
        yield begin, tensor[begin : begin + rows]


def _stays_mapped(tensor: torch.Tensor, place: torch.Tensor, parameters: Parameters) -> bool:
    """Replace a weight by its mapped tensor, if that can serve, and return whether it did."""
    parameter = parameters.get(place.data_ptr())
    if parameter is None or not _serves_as(tensor, place, parameter):
        return False
    parameter.data = tensor
    return True


def _serves_as(tensor: torch.Tensor, place: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Return whether a mapped tensor can be the weight itself.

    Most files align tensors arbitrarily, and decoding reads all weights in every step: across cache lines that takes 5
    to 10 % longer, which one copy saves for good. Small pages cost 1 to 2 %.
    """
    return (
        place.device.type == "cpu"
        and tensor.dtype == place.dtype
        and (place.shape, place.stride()) == (parameter.shape, parameter.stride())
        and tensor.data_ptr() % huge_pages.CACHE_LINE == 0
    )
