"""Recorded calls, and places: computed arrays without their memory, so that recording keeps no memory alive."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

import numpy as np

from ostinato.ops.step_inputs import Array

if TYPE_CHECKING:
    from ostinato.graphs.buffers import BufferedInputs
    from ostinato.ops.dispatch import CallHook

T = TypeVar("T")

StepForward = Callable[..., "Array"]
"""The forward function of a step, as graphs capture it: the step's inputs -> hidden states."""

Args = tuple[object, ...]
Kwargs = dict[str, object]

ReplayFn = Callable[["BufferedInputs"], None]
"""Replay of one part of a captured step."""

CallKind = Literal["torch", "kernel", "split"]


@dataclass(frozen=True)
class TensorRef:
    """Description of a view of memory that `storage` names; `offset` and `stride` are in elements."""

    storage: int
    dtype: Any
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def bind(self, memory: Array, begin: int = 0) -> Array:
        """Return the array in `memory` (bytes). Its storage begins at byte `begin`, a multiple of the element size."""
        size = self.dtype.itemsize
        assert begin % size == 0, "a storage is not aligned to its elements"
        if isinstance(memory, np.ndarray):
            strides = tuple(step * size for step in self.stride)
            return np.ndarray(self.shape, self.dtype, memory, begin + self.offset * size, strides)
        tensor = memory[:0].view(self.dtype)
        first = (memory.storage_offset() + begin) // size + self.offset
        return tensor.set_(memory.untyped_storage(), first, self.shape, self.stride)


@dataclass(frozen=True)
class RecordedCall:
    """One recorded call. Computed arrays in `args` and `kwargs` are instances of TensorRef; all others are persistent.

    `writes` has one entry per array of the result: its place, or None if it is a view of an argument.
    """

    kind: CallKind
    name: str
    function: Any
    args: Args
    kwargs: Kwargs
    writes: tuple[TensorRef | None, ...]
    returns_tensor: bool


class CallRecord(Protocol):
    """Record of a step: its calls, and the memory that they compute in."""

    calls: list[RecordedCall]
    sizes: dict[int, int]
    """Number of a storage that the step computed -> bytes."""

    def record(self, hook: CallHook, forward: StepForward, inputs: BufferedInputs) -> TensorRef:
        """Run `forward(inputs)` once, and return the place of its result.

        The kernels that it calls report to `hook`. CaptureError if a replay could not repeat the step.
        """


def items_in(value: object, kind: type[T]) -> Iterator[T]:
    """Yield all values of type `kind` in `value`, also those in nested lists, tuples and dicts."""
    if isinstance(value, kind):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from items_in(item, kind)
    elif isinstance(value, dict):
        yield from items_in(tuple(value.values()), kind)


def map_items(value: object, kind: type[T], function: Callable[[T], object]) -> object:
    """Return `value` with `function` applied to every value of type `kind` in it; the search is that of `items_in`."""
    if isinstance(value, kind):
        return function(value)
    if isinstance(value, dict):
        return {name: map_items(item, kind, function) for name, item in value.items()}
    if type(value) is list:
        return [map_items(item, kind, function) for item in value]
    if type(value) is tuple:
        return tuple(map_items(item, kind, function) for item in value)
    return value


def shape_of(array: object) -> str:
    return str(list(array.shape)) if hasattr(array, "shape") else str(array)
