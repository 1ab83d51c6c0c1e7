"""Loading of a checkpoint's 4-bit and float8 weights into their targets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from ostinato.errors import ModelError, Remedy
from ostinato.formats import unpack
from ostinato.layers.allocation import NO_ORDER, BlockView, QuantizedView, WeightTarget
from ostinato.models.tensor_sources import VALUES, is_as_stored
from ostinato.ops import huge_pages
from ostinato.ops.arrays import host_values, write
from ostinato.ops.quant.block_formats import BLOCK_FORMATS
from ostinato.ops.quant.dequantize import dequantize, pack_float8, pack_int4, pack_mxfp4
from ostinato.ops.quant.quantize import WeightQuantizers
from ostinato.ops.sizes import INT4_ZERO_BITS
from ostinato.plan.quantization import StoredWeights

UNPACKED_WEIGHTS = 2**20
"""Weights that are unpacked at once."""


def put_stored(
    stored: StoredWeights,
    parts: Mapping[str, np.ndarray],
    name: str,
    place: WeightTarget,
    quantizers: WeightQuantizers,
    row_order: np.ndarray | None = None,
) -> None:
    """Load a weight, or a stack of them, into its target; `parts` are its tensors.

    It is unchanged if the target takes such weights, else dequantized, and quantised anew if the target is quantised.
    With `row_order`, row i of a matrix is row `row_order[i]` of its tensors. ModelError as
    `formats.unpack.group_index`.
    """
    if len(place.shape) > 2:
        for i in range(place.shape[0]):
            of_matrix = {part: _of_matrix(tensor, part, i) for part, tensor in parts.items()}
            of_place = place.of(i) if isinstance(place, QuantizedView | BlockView) else place[i]
            put_stored(stored, of_matrix, name, of_place, quantizers, row_order)
        return
    rows, columns = place.shape
    if stored.storage == "mxfp4":
        _put_mxfp4(stored, parts, place, quantizers, row_order)
        return
    stays = is_as_stored(stored, place)
    group_of = None if stored.storage == "float8" else unpack.group_index(stored, parts, name, columns)
    order = None
    if stays and isinstance(place, BlockView):
        order = _put_order(group_of, stored.group_size or columns, place, name)
    for begin, end in _row_ranges(rows, columns):
        if stored.storage == "float8":
            scale = parts.get("weight_scale_inv", parts.get("weight_scale"))
            assert scale is not None, "sources are complete"
            small = parts[VALUES][begin:end]
            if stays and isinstance(place, BlockView):
                elements = BLOCK_FORMATS[place.name].elements
                scales = unpack.scales(stored, scale, begin, end, columns, elements)
                write(place.bytes[begin:end], pack_float8(small, scales))
                continue
            values = unpack.expanded(stored, small, scale, begin, columns)
        else:
            unpacked = unpack.unpack(stored, parts, begin, end, columns)
            if stays and isinstance(place, QuantizedView):
                _put_integers(unpacked, place.rows(begin, end))
                continue
            if stays and isinstance(place, BlockView):
                _put_blocks(unpacked, place.rows(begin, end), stored.group_size or columns, name, order)
                continue
            values = unpacked.dequantized(stored.group_size, group_of)
        if isinstance(place, QuantizedView | BlockView):
            place.rows(begin, end).quantize_into(values, quantizers)
        else:
            write(place[begin:end], values)
    for tensor in parts.values():
        huge_pages.drop(tensor)


def _put_mxfp4(
    stored: StoredWeights,
    parts: Mapping[str, np.ndarray],
    place: WeightTarget,
    quantizers: WeightQuantizers,
    row_order: np.ndarray | None,
) -> None:
    pairs, exponents = (parts[part] if row_order is None else parts[part][row_order] for part in ("blocks", "scales"))
    packed = pack_mxfp4(pairs, exponents)
    if isinstance(place, BlockView) and is_as_stored(stored, place):
        write(place.bytes, packed)
    elif isinstance(place, QuantizedView | BlockView):
        place.quantize_into(dequantize("MXFP4", packed), quantizers)
    else:
        write(place, dequantize("MXFP4", packed))
    for tensor in parts.values():
        huge_pages.drop(tensor)


def _put_order(group_of: np.ndarray | None, group_size: int, place: BlockView, name: str) -> np.ndarray | None:
    """Return the order in which the elements of a row are in their groups, int32 [in], for all tensors of a matmul.

    None means that they are in the order of inputs. ModelError if another tensor of the matmul has another order, or a
    group has more elements than others.
    """
    if place.order is None:
        return None
    columns = np.arange(place.in_size, dtype=np.int32)
    if group_of is None:
        order = columns
    else:
        order = group_of.argsort(kind="stable").astype(np.int32)
        if not np.array_equal(group_of[order], columns // group_size):
            raise ModelError(
                f"groups of {name} have other numbers of elements than {group_size}", [Remedy("quantization", "none")]
            )
    others = host_values(place.order)
    if others[0] == NO_ORDER:
        write(place.order, order)
    elif not np.array_equal(others, order):
        raise ModelError(
            f"{name} is a part of a product whose other parts have their groups in another order (g_idx), and 4-bit "
            "weights of one product share its inputs",
            [Remedy("quantization", "none")],
        )
    return order


def _put_blocks(
    unpacked: unpack.UnpackedInt4, place: BlockView, group_size: int, name: str, order: np.ndarray | None
) -> None:
    """Write the weights in blocks, each with the scale of its group.

    ModelError for scales that leave no room for a zero point, which 16-bit scales do.
    """
    elements = BLOCK_FORMATS[place.name].elements
    groups = place.in_size // elements
    if (unpacked.scale.view(np.int32) & INT4_ZERO_BITS).any():
        raise ModelError(
            f"the scales of {name} are in float32, of which 4-bit weights keep 16 bits",
            [Remedy("quantization", "none")],
        )
    scale, zero = (each.repeat(group_size // elements, axis=1)[:, :groups] for each in (unpacked.scale, unpacked.zero))
    integers = unpacked.integers if order is None else unpacked.integers[:, order]
    write(place.bytes, pack_int4(integers, scale, zero))


def _put_integers(unpacked: unpack.UnpackedInt4, place: QuantizedView) -> None:
    """Write the weights as 8-bit integers with the same scales."""
    columns = place.weight.shape[1]
    size = columns if place.group_size is None else place.group_size
    zero = unpacked.zero.repeat(size, axis=1)[:, :columns]
    write(place.weight, unpacked.integers.view(np.int8) - zero.view(np.int8))
    write(place.scale, unpacked.scale.reshape(place.scale.shape))


def _of_matrix(tensor: np.ndarray, part: str, i: int) -> np.ndarray:
    """Return matrix `i`'s part of a stacked tensor; matrices share their shape and the order of their groups."""
    return tensor if part in ("weight_shape", "weight_g_idx") or tensor.ndim < 2 else tensor[i]


def _row_ranges(rows: int, columns: int) -> Iterator[tuple[int, int]]:
    """Yield (first, end) of rows with about `UNPACKED_WEIGHTS` elements, as `formats.unpack` takes them."""
    step = max(1, UNPACKED_WEIGHTS // max(1, columns) // unpack.ROW_MULTIPLE) * unpack.ROW_MULTIPLE
    for begin in range(0, rows, step):
        yield begin, min(begin + step, rows)
