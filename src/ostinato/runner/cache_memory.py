"""Memory of blocks, window blocks, slots and encoder cells: allocation, and bytes for cache files and migration.

A slot may be packed: 8 bits for each element of a state that the kernels rounded for that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from ostinato.kv_cache.request_cache import MemoryKind
from ostinato.ops.arrays import Arrays, host_values, is_on_host
from ostinato.ops.sizes import DTYPE_BYTES, INT8_STATE_BLOCK, MAX_INT8
from ostinato.ops.step_inputs import Array, LayerCache
from ostinato.plan.layer_specs import LayerSpec
from ostinato.plan.memory.cache_modes import INT8
from ostinato.plan.mixers import StateSpec
from ostinato.plan.model import ModelSpec
from ostinato.plan.plan import Plan

SCALE_BYTES = DTYPE_BYTES["float32"]


class StatePart(NamedTuple):
    """One array of a state, in all slots."""

    slots: np.ndarray
    """Float32 [slots, elements] if it is packed, else bytes [slots, bytes]."""
    row_size: int
    """Size of the state's last dimension if it is packed, else 0."""

    @property
    def num_bytes(self) -> int:
        """Bytes of a packed checkpoint's part."""
        elements = int(self.slots.shape[1])
        if not self.row_size:
            return elements
        return elements + elements // self.row_size * num_blocks(self.row_size) * SCALE_BYTES


class PackedRows:
    """Slots on a CPU, whose states are at a block boundary (`MemoryRows`). Packing loses nothing then.

    A packed array has float32 scales [rows, blocks], followed by int8 integers [rows, size]: rows are those of the
    state's last dimension, and a block has up to `INT8_STATE_BLOCK` neighbours in one.
    """

    def __init__(self, parts: Sequence[StatePart]) -> None:
        self._parts = parts
        self.sizes = [part.num_bytes for part in parts]

    def read(self, index: int, into: np.ndarray) -> None:
        for part, packed in self._pieces(into):
            if part.row_size:
                pack(part.slots[index].reshape(-1, part.row_size), packed)
            else:
                packed[:] = part.slots[index]

    def write(self, index: int, contents: memoryview) -> None:
        for part, packed in self._pieces(np.frombuffer(contents, np.uint8)):
            if part.row_size:
                unpack(packed, part.slots[index].reshape(-1, part.row_size))
            else:
                part.slots[index] = packed

    def _pieces(self, contents: np.ndarray) -> Iterator[tuple[StatePart, np.ndarray]]:
        start = 0
        for part, size in zip(self._parts, self.sizes, strict=True):
            yield part, contents[start : start + size]
            start += size


def num_blocks(row_size: int) -> int:
    """Return the blocks, and scales, of a row."""
    return -(-row_size // INT8_STATE_BLOCK)


def pack(state: np.ndarray, packed: np.ndarray) -> None:
    """Write `state` [rows, size] float32 to the bytes `packed`.

    Its values are what `packed_values` of `ops/reference/stochastic_rounding.py` returns: integers times a scale, which
    is exactly the largest of them divided by `MAX_INT8`.
    """
    scales, integers = _scales_and_integers(packed, state.shape)
    for number, block in enumerate(_blocks(state)):
        scale = np.abs(block).max(axis=1) / np.float32(MAX_INT8)
        scales[:, number] = scale
        scale[scale == 0] = 1.0
        # A block with NaN is NaN throughout, as its scale says.
        with np.errstate(invalid="ignore"):
            integers[:, number * INT8_STATE_BLOCK : (number + 1) * INT8_STATE_BLOCK] = block / scale[:, None]


def unpack(packed: np.ndarray, state: np.ndarray) -> None:
    """Write the packed state to `state` [rows, size] float32."""
    scales, integers = _scales_and_integers(packed, state.shape)
    for number, block in enumerate(_blocks(state)):
        whole = integers[:, number * INT8_STATE_BLOCK : (number + 1) * INT8_STATE_BLOCK]
        np.multiply(whole, scales[:, number, None], out=block)


def _blocks(state: np.ndarray) -> list[np.ndarray]:
    """Return views [rows, up to INT8_STATE_BLOCK] of the blocks of all rows."""
    return [state[:, start : start + INT8_STATE_BLOCK] for start in range(0, state.shape[1], INT8_STATE_BLOCK)]


def _scales_and_integers(packed: np.ndarray, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Return views of the bytes `packed`: scales [rows, blocks] and integers [rows, size]."""
    rows, size = shape
    end = rows * num_blocks(size) * SCALE_BYTES
    return packed[:end].view(np.float32).reshape(rows, -1), packed[end:].view(np.int8).reshape(rows, size)


def allocate_layers(spec: ModelSpec, plan: Plan, arrays: Arrays) -> list[LayerCache]:
    """Return one LayerCache per layer, the drafter's after the model's.

    A layer that reads the keys and values of another has that layer's; an assistant's layers read the model's. After
    them comes one for the hidden state from which drafts start. The memory is not initialized: on a CPU the operating
    system backs a page when it is first used.
    """
    memory: list[LayerCache] = []
    reads_target = spec.drafter is not None and spec.drafter.method == "assistant"
    for number, layer in enumerate(spec.cached_layers):
        first = 0 if number < spec.num_layers or reads_target else spec.num_layers
        keys_of = None if layer.attention is None else layer.attention.keys_of
        memory.append(_allocate_layer(layer, plan, arrays, number) if keys_of is None else memory[first + keys_of])
    if spec.drafter is not None and spec.drafter.state.arrays:
        memory.append(LayerCache(states=_allocate_states(spec.drafter.state, plan, arrays)))
    return memory


def allocate_encoder_cache(spec: ModelSpec, plan: Plan, arrays: Arrays) -> list[LayerCache]:
    """Return the encoder cache of a model that takes images, uninitialized too. It follows the layers' memory."""
    if plan.encoder is None or spec.vision is None:
        return []
    shape = (plan.encoder.num_cells, spec.vision.hidden_rows, spec.vision.out_hidden_size)
    return [LayerCache(media=arrays.empty(shape, plan.settings.dtype))]


def _allocate_layer(layer: LayerSpec, plan: Plan, arrays: Arrays, number: int) -> LayerCache:
    settings, memory = plan.settings, plan.memory
    parts: dict[str, Array] = {}
    in_window_blocks = False
    noise = number if settings.ssm_state_rounding == "stochastic" else None
    if layer.attention is not None:
        heads = (layer.attention.num_kv_heads, layer.attention.head_dim)
        in_window_blocks = memory.sliding_window > 0 and layer.attention.window is not None
        shape = (memory.num_window_blocks if in_window_blocks else memory.num_blocks, settings.block_size, *heads)
        for name in ("k",) if layer.attention.values_in_keys else ("k", "v"):
            parts[f"{name}_cache"] = arrays.empty(shape, settings.kv_cache_dtype, fills_slowly=True)
            if settings.kv_cache_dtype == INT8:
                parts[f"{name}_scales"] = arrays.empty(shape[:3], "float32", fills_slowly=True)
        if (indexer := layer.attention.indexer) is not None and indexer.entry_size:
            shape = (*shape[:2], 1, indexer.entry_size)
            parts["index_cache"] = arrays.empty(shape, settings.kv_cache_dtype, fills_slowly=True)
            if settings.kv_cache_dtype == INT8:
                parts["index_scales"] = arrays.empty(shape[:3], "float32", fills_slowly=True)
    states = {} if layer.mixer is None else _allocate_states(layer.mixer.state, plan, arrays)
    packed: tuple[str, ...] = ()
    if layer.mixer is not None and memory.packed_state:
        packed = tuple(array.name for array in layer.mixer.state.arrays if array.dtype == "state")
    return LayerCache(**parts, states=states, in_window_blocks=in_window_blocks, noise=noise, packed_states=packed)


def _allocate_states(state: StateSpec, plan: Plan, arrays: Arrays) -> dict[str, Array]:
    dtypes = {"model": plan.settings.dtype, "state": plan.settings.ssm_state_dtype}
    return {
        array.name: arrays.empty((plan.memory.num_slots, *array.shape), dtypes[array.dtype]) for array in state.arrays
    }


class MemoryRows(Protocol):
    """Parts of memory, each with a row for every block, window block or slot. A copy takes one row of every part."""

    sizes: list[int]
    """Bytes of a row, in each part."""

    def read(self, index: int, into: np.ndarray) -> None: ...
    def write(self, index: int, contents: memoryview) -> None: ...


class LayerCacheMemory:
    """Copies blocks, window blocks and slots out of the layers' memory and back (`CacheMemory`), layer after layer."""

    def __init__(
        self,
        memory: Sequence[LayerCache],
        block_size: int,
        rows: Callable[[Sequence[Array]], MemoryRows] | None = None,
    ) -> None:
        """Choose the copy functions and compute the sizes.

        `block_size` is the number of tokens in a block; all have the same number of bytes in each part of it. `rows`
        does the copies; by default the one for the memory's device.
        """
        if rows is None:
            parts = [part for each in memory for part in each.tensors.values()]
            rows = HostRows if all(map(is_on_host, parts)) else DeviceRows
        slots: MemoryRows = rows([part for each in memory for part in each.states.values()])
        checkpoints = slots
        if any(each.packed_states for each in memory):
            assert rows is HostRows, "the plan packs states on CPUs alone"
            checkpoints = PackedRows(_state_parts(memory))
        self._rows: dict[MemoryKind, MemoryRows] = {
            "block": rows(_block_tensors(memory, in_window_blocks=False)),
            "window_block": rows(_block_tensors(memory, in_window_blocks=True)),
            "slot": slots,
            "checkpoint": checkpoints,
        }
        self.sizes: Mapping[MemoryKind, int] = {kind: sum(each.sizes) for kind, each in self._rows.items()}
        self._block_size = block_size

    def read(
        self, kind: MemoryKind, id: int, num_tokens: int | None = None, into: memoryview | None = None
    ) -> memoryview:
        rows = self._rows[kind]
        contents = np.empty(self.sizes[kind], np.uint8) if into is None else np.frombuffer(into, np.uint8)
        rows.read(id, contents)
        if num_tokens is not None:
            _clear(contents, rows.sizes, self._block_size, num_tokens)
        return contents.data

    def write(self, kind: MemoryKind, id: int, contents: memoryview) -> None:
        self._rows[kind].write(id, contents)


class HostRows:
    """Rows of memory on a CPU.

    numpy copies, on the calling thread alone. torch would split a copy among its threads, and on a busy processor these
    wait for each other longer than the copy takes.
    """

    def __init__(self, parts: Sequence[Array]) -> None:
        self._parts = [host_values(part).reshape(len(part), -1).view(np.uint8) for part in parts]
        self.sizes = [part.shape[1] for part in self._parts]

    def read(self, index: int, into: np.ndarray) -> None:
        if self._parts:
            np.concatenate([part[index] for part in self._parts], out=into)

    def write(self, index: int, contents: memoryview) -> None:
        data = np.frombuffer(contents, np.uint8)
        start = 0
        for part in self._parts:
            part[index] = data[start : start + part.shape[1]]
            start += part.shape[1]


class DeviceRows:
    """Rows of memory on a GPU. Written data is there when the call returns, whatever stream reads it."""

    def __init__(self, parts: Sequence[Array]) -> None:
        import torch

        self._torch: Any = torch
        self._parts = [part.detach().view(len(part), -1).view(torch.uint8) for part in parts]
        self.sizes = [part.shape[1] for part in self._parts]

    def read(self, index: int, into: np.ndarray) -> None:
        if self._parts:
            into[:] = self._torch.cat([part[index] for part in self._parts]).cpu().numpy()

    def write(self, index: int, contents: memoryview) -> None:
        data = self._torch.from_numpy(np.array(np.frombuffer(contents, np.uint8)))
        for part, piece in zip(self._parts, data.split(self.sizes), strict=True):
            part[index].copy_(piece)
        if self._parts and self._parts[0].device.type == "cuda":
            self._torch.cuda.synchronize(self._parts[0].device)


def _block_tensors(memory: Sequence[LayerCache], *, in_window_blocks: bool) -> list[Array]:
    """Return the tensors of blocks or window blocks, once each, although several layers may read one."""
    distinct = {id(each): each for each in memory if each.in_window_blocks == in_window_blocks}
    return [part for each in distinct.values() for part in each.block_tensors.values()]


def _state_parts(memory: Sequence[LayerCache]) -> list[StatePart]:
    parts = []
    for layer in memory:
        for name, part in layer.states.items():
            values = host_values(part).reshape(len(part), -1)
            if name in layer.packed_states:
                parts.append(StatePart(values, part.shape[-1]))
            else:
                parts.append(StatePart(values.view(np.uint8), 0))
    return parts


def _clear(contents: np.ndarray, sizes: Sequence[int], block_size: int, num_tokens: int) -> None:
    """Zero the bytes after the first `num_tokens` tokens in each part of a block.

    They may still be another request's.
    """
    end = 0
    for size in sizes:
        start, end = end, end + size
        contents[start + size // block_size * num_tokens : end] = 0
