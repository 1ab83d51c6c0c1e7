"""Places: computed tensors without their memory. Calls name them, so that recording keeps no memory alive."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch

T = TypeVar("T")


@dataclass(frozen=True)
class TensorRef:
    """Description of a view of memory that `storage` names; `offset` and `stride` are in elements."""

    storage: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def bind(self, memory: torch.Tensor, begin: int = 0) -> torch.Tensor:
        """Return the tensor in `memory` (bytes).

        Its storage begins at byte `begin`, a multiple of the element size.
        """
        assert begin % self.dtype.itemsize == 0, "a storage is not aligned to its elements"
        tensor = torch.empty(0, dtype=self.dtype, device=memory.device)
        first = (memory.storage_offset() + begin) // self.dtype.itemsize + self.offset
        return tensor.set_(memory.untyped_storage(), first, self.shape, self.stride)


def tensor_ref(tensor: torch.Tensor, storage: int) -> TensorRef:
    """Return `tensor` as a view of the memory that is called `storage`."""
    return TensorRef(storage, tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))


def storage_pointer(tensor: torch.Tensor) -> int:
    """Return the address of the memory that `tensor` is a view of."""
    return tensor.untyped_storage().data_ptr()


def has_memory(tensor: torch.Tensor) -> bool:
    """Return whether `tensor` has memory. The address of a tensor without elements means nothing."""
    return tensor.untyped_storage().nbytes() > 0


def items_in(value: object, kind: type[T]) -> Iterator[T]:
    """Yield all values of type `kind` in `value`, also those in nested lists, tuples and dicts."""
    if isinstance(value, kind):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from items_in(item, kind)
    elif isinstance(value, dict):
        yield from items_in(tuple(value.values()), kind)


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    return items_in(value, torch.Tensor)


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


def shape_of(tensor: object) -> str:
    return str(list(tensor.shape)) if isinstance(tensor, torch.Tensor) else str(tensor)
