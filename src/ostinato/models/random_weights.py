"""Random weights of a model's real shapes, for benchmarks without a checkpoint."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import numpy as np

from ostinato.layers.allocation import BlockView, QuantizedView, checkpoint_views, target_on_host
from ostinato.models.base import CausalLM
from ostinato.models.loader import deinterleave
from ostinato.models.weight_shards import TensorShard, tensor_shards
from ostinato.ops.arrays import dtype_name, numpy_dtype, write
from ostinato.ops.quant.quantize import BY_TORCH, WeightQuantizers

if TYPE_CHECKING:
    from ostinato.ops.step_inputs import Array

PERIOD = 1_000_003
"""Number of normal values that are generated.

All matrices repeat them, each from another offset, since generating every value would take seconds. It is a prime, so
that no two rows of a matrix are equal.
"""


@np.errstate(all="ignore")
def randomize_weights(model: CausalLM, seed: int, quantizers: WeightQuantizers = BY_TORCH) -> None:
    """Fill every weight so that activations stay finite and of ordinary size at any depth and length.

    Matrices are normal with variance 1 / inputs, norms are 1, biases 0; a state layer's decay and time step are in the
    ranges that Mamba-2 is initialised in (Dao and Gu 2024, appendix D). With a sharded model, each rank has its part of
    the values that a single process would have.
    """
    generator = np.random.default_rng(seed)
    drawn = np.tile(generator.standard_normal(PERIOD, np.float32), 2)
    less_one = {name for _, _, row in model.weights() if row.stored_minus_one for name in row.names}
    shares = tensor_shards(model)
    tables = {row.names[0]: (module, attribute) for module, attribute, row in model.weights() if row.stays_on_disk}
    scaled: dict[int, np.ndarray] = {}

    def uniform(view: Array, share: TensorShard | None, low: float, high: float) -> np.ndarray:
        """Generate values for the whole tensor, so that the random state stays the same on all ranks."""
        values = generator.uniform(low, high, tuple(view.shape) if share is None else share.shape)
        return values if share is None else share.read(values)

    for name, target in checkpoint_views(model):
        view = target_on_host(target)
        kind, share = name.rpartition(".")[2], shares.get(name)
        if name in tables:
            module, attribute = tables[name]
            rows, size = view.shape
            if size not in scaled:
                scaled[size] = (drawn * size**-0.5).astype(numpy_dtype(dtype_name(model.build.dtype)))
            table = _table(scaled[size][int(generator.integers(PERIOD - size)) :], rows, size)
            setattr(module, attribute, model.build.arrays.sharing(table))
        elif isinstance(view, QuantizedView | BlockView):
            _quantize(view, share, drawn, int(generator.integers(PERIOD)), quantizers)
        elif kind == "A_log":
            write(view, np.log(uniform(view, share, 1, 16)))
        elif kind == "dt_bias" or name.endswith("dt_proj.bias"):
            step = uniform(view, share, 0.001, 0.1)
            write(view, step + np.log(-np.expm1(-step)))
        elif name.endswith(model.integers):
            write(view, np.arange(len(view)))
        elif len(view.shape) == 1:
            view[...] = 0.0 if kind.endswith("bias") or name in less_one else 1.0
        else:
            begin = int(generator.integers(PERIOD))
            if share is None:
                _fill(view, drawn[begin : begin + min(PERIOD, prod(view.shape))] * view.shape[-1] ** -0.5)
            else:
                _fill_part(view, share, drawn * share.shape[-1] ** -0.5, begin)
    # The rows are in a checkpoint's order here, as after its loader.
    deinterleave(model)


def _table(values: np.ndarray, rows: int, size: int) -> np.ndarray:
    """Return a table of rows that overlap in `values`, so that it takes no memory; beyond `PERIOD` all are equal."""
    step = values.itemsize if rows <= PERIOD else 0
    return np.lib.stride_tricks.as_strided(values, (rows, size), (step, values.itemsize))


def _quantize(
    place: QuantizedView | BlockView,
    share: TensorShard | None,
    drawn: np.ndarray,
    begin: int,
    quantizers: WeightQuantizers,
) -> None:
    """Fill `place` with the values from offset `begin`, repeated as needed, or with a rank's part of them."""
    whole = place if share is None else share.allocate_full(place)
    assert isinstance(whole, QuantizedView | BlockView), "it is of the same kind"
    if isinstance(whole, BlockView) and whole.order is not None:
        write(whole.order, np.arange(len(whole.order)))
    _quantize_rows(whole.flat(), drawn, begin, quantizers)
    if share is not None:
        share.copy_shard(whole, place)


def _quantize_rows(
    view: QuantizedView | BlockView, drawn: np.ndarray, begin: int, quantizers: WeightQuantizers
) -> None:
    rows, columns = view.shape
    drawn = np.tile(drawn, 1 + columns // PERIOD)  # a row may be longer than the period
    step = max(1, PERIOD // columns // 8)
    for row in range(0, rows, step):
        end = min(rows, row + step)
        first = (begin + row * columns) % PERIOD
        values = drawn[first : first + (end - row) * columns].reshape(-1, columns) * columns**-0.5
        view.rows(row, end).quantize_into(values, quantizers)


def _fill(view: Array, values: np.ndarray) -> None:
    """Fill `view` with `values`, repeated as needed."""
    values, size = values.astype(numpy_dtype(dtype_name(view.dtype))), prod(view.shape)
    is_contiguous = view.flags.c_contiguous if isinstance(view, np.ndarray) else view.is_contiguous()
    if not is_contiguous:
        write(view, np.resize(values, size).reshape(view.shape))
        return
    flat = view.reshape(-1)
    for begin in range(0, size, len(values)):
        end = min(size, begin + len(values))
        write(flat[begin:end], values[: end - begin])


def _fill_part(view: Array, share: TensorShard, drawn: np.ndarray, begin: int) -> None:
    """Fill `view` with its `share` of a tensor that the values from offset `begin` fill.

    It works row by row: a row is an index of the dimensions before the sharded one, with all dimensions after it.
    """
    rows, columns = prod(share.shape[: share.dim]), prod(share.shape[share.dim :])
    inner = columns // share.shape[share.dim]
    own = np.empty((rows, prod(view.shape) // rows), numpy_dtype(dtype_name(view.dtype)))
    at_once = max(1, PERIOD // columns)
    for row in range(0, rows, at_once):
        count, place = min(at_once, rows - row), 0
        for first, end in share.parts:
            for column in range(first * inner, end * inner, PERIOD):
                size = min(PERIOD, end * inner - column)
                start = (begin + row * columns + column) % PERIOD
                strides = (columns * drawn.itemsize, drawn.itemsize)
                values = np.lib.stride_tricks.as_strided(drawn[start:], (count, size), strides)
                own[row : row + count, place : place + size] = values
                place += size
    write(view, own.reshape(view.shape))
