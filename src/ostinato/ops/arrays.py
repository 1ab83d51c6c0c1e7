"""Arrays that operations compute with: numpy's for native kernels on a CPU, torch's for all other kernels.

Layers and models view them, and operations do all else, so one model runs on both. Here is what remains: making arrays,
and moving their values to the host and back. Nothing here imports torch unless torch's arrays are asked for.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

import ml_dtypes
import numpy as np

from ostinato.ops import huge_pages
from ostinato.ops.seeds import noise_word
from ostinato.ops.step_inputs import Array

if TYPE_CHECKING:
    import torch


AnyArray = TypeVar("AnyArray", np.ndarray, "torch.Tensor")
"""Array of numpy or of torch, where a result is of its argument's kind."""


@cache
def numpy_dtype(name: str) -> np.dtype:
    """Return numpy's dtype of this name, also of the floats that only `ml_dtypes` has."""
    return np.dtype(getattr(ml_dtypes, name, None) or name)


def dtype_name(dtype: object) -> str:
    """Return the name of a dtype of numpy or torch, such as `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def is_floating(dtype: object) -> bool:
    """Return whether a dtype of numpy or torch is one of floats."""
    return "float" in dtype_name(dtype)


class Arrays(Protocol):
    """Maker of the arrays of one device. Dtypes are names; shapes are tuples."""

    device: str
    """Device of the arrays, as torch names it: `cpu`, `cuda`, `cuda:1`."""
    is_on_host: bool

    def dtype(self, name: str) -> Any:
        """Return the dtype of this name that the arrays have."""

    def empty(self, shape: Sequence[int], dtype: str, *, fills_slowly: bool = False) -> Array:
        """Return an unwritten array; see `huge_pages.empty` for `fills_slowly`."""

    def zeros(self, shape: Sequence[int], dtype: str) -> Array: ...

    def without_memory(self, shape: Sequence[int], dtype: str) -> Array:
        """Return a placeholder that has a shape and a dtype, and no memory of its own."""

    def of(self, values: np.ndarray | Sequence[Any] | float, dtype: str | None = None) -> Array:
        """Return a new array of values on the host, in their dtype or in `dtype`."""

    def write(self, array: Array, values: np.ndarray) -> None:
        """Write values of the same shape into an array, in its dtype."""

    def sharing(self, values: np.ndarray) -> Array:
        """Return an array of the same memory, on a CPU."""

    def mirrored_bytes(self, count: int) -> tuple[np.ndarray, Array]:
        """Return `count` zeros as uint8 on the host, and those of the device: the same memory on a CPU."""

    def send(self, values: np.ndarray, to: Array) -> None:
        """Copy a part of mirrored bytes to the device, without waiting; the host's may be written again at once."""

    def inference_mode(self) -> AbstractContextManager[object]:
        """Return the context in which models compute: torch keeps no gradients there."""

    def synchronize(self) -> None:
        """Wait until the device has finished all its work."""


class NumpyArrays:
    """Arrays of numpy, for native kernels."""

    device = "cpu"
    is_on_host = True

    def dtype(self, name: str) -> np.dtype:
        return numpy_dtype(name)

    def empty(self, shape: Sequence[int], dtype: str, *, fills_slowly: bool = False) -> Array:
        return cast("Array", huge_pages.empty(shape, numpy_dtype(dtype), fills_slowly=fills_slowly))

    def zeros(self, shape: Sequence[int], dtype: str) -> Array:
        return cast("Array", on_cache_line(shape, numpy_dtype(dtype), is_zero=True))

    def without_memory(self, shape: Sequence[int], dtype: str) -> Array:
        return cast("Array", np.broadcast_to(np.zeros((), numpy_dtype(dtype)), tuple(shape)))

    def of(self, values: np.ndarray | Sequence[Any] | float, dtype: str | None = None) -> Array:
        return cast("Array", np.array(values, None if dtype is None else numpy_dtype(dtype)))

    def write(self, array: Array, values: np.ndarray) -> None:
        write(array, values)

    def sharing(self, values: np.ndarray) -> Array:
        return cast("Array", values)

    def mirrored_bytes(self, count: int) -> tuple[np.ndarray, Array]:
        made = on_cache_line((count,), np.dtype(np.uint8), is_zero=True)
        return made, cast("Array", made)

    def send(self, values: np.ndarray, to: Array) -> None:  # noqa: ARG002
        raise AssertionError("a CPU's memory is the host's")

    def inference_mode(self) -> AbstractContextManager[object]:
        return _NOTHING

    def synchronize(self) -> None:
        """Do nothing: a CPU's calls end when their work does."""


_NOTHING = nullcontext()
NUMPY = NumpyArrays()


def memory_of(array: np.ndarray) -> np.ndarray:
    """Return the array that owns the memory of a view, or that was made of a buffer of something else."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def like(array: Array, values: np.ndarray) -> Array:
    """Return values of the host as an array of the kind, and on the device, of `array`."""
    return cast("Array", values) if isinstance(array, np.ndarray) else TorchArrays(str(array.device)).of(values)


def like_on_host(array: Array, values: np.ndarray) -> Array:
    """Return values of the host as an array of the kind of `array`, in the host's memory."""
    return cast("Array", values) if isinstance(array, np.ndarray) else TorchArrays("cpu").of(values)


def noise_keys(seeds_and_positions: Sequence[tuple[int, int]]) -> np.ndarray:
    """Return the keys of the noise of each (seed, position), [rows, 2] int32: an argument of `sample`."""
    words = [noise_word(seed, position) for seed, position in seeds_and_positions]
    # The low half of each comes first.
    return np.array(words, dtype="<u8").view("<i4").reshape(-1, 2)


def on_cache_line(shape: Sequence[int], dtype: np.dtype, *, is_zero: bool = False) -> np.ndarray:
    """Return an unwritten array, or zeros, that begins at a cache line: numpy's own may not."""
    size = math.prod(shape) * dtype.itemsize
    memory = (np.zeros if is_zero else np.empty)(size + huge_pages.CACHE_LINE, np.uint8)
    begin = -memory.ctypes.data % huge_pages.CACHE_LINE
    return memory[begin : begin + size].view(dtype).reshape(shape)


def copied(array: Array) -> Array:
    """Return a copy of an array of any kind."""
    return cast("Array", array.copy()) if isinstance(array, np.ndarray) else array.clone()


def is_on_host(array: Any) -> bool:
    """Return whether the memory of an array of any kind is the host's."""
    return isinstance(array, np.ndarray) or array.device.type == "cpu"


def is_array(value: object) -> bool:
    """Return whether a value is an array of numpy or of torch."""
    return isinstance(value, np.ndarray) or hasattr(value, "data_ptr")


def first_address(array: Array | np.ndarray) -> int:
    """Return the address of the first element of an array of any kind."""
    return address(array) if isinstance(array, np.ndarray) else array.data_ptr()


def memory_address(array: Any) -> int:
    """Return the address of the memory that an array of any kind is a view of."""
    return address(memory_of(array)) if isinstance(array, np.ndarray) else int(array.untyped_storage().data_ptr())


def address(array: np.ndarray) -> int:
    """Return the address of an array's first element."""
    return int(array.ctypes.data)


class TorchArrays:
    """Arrays of torch, for references, and for kernels of a GPU."""

    def __init__(self, device: str) -> None:
        import torch

        self._torch = torch
        self.device = device
        self.is_on_host = torch.device(device).type == "cpu"

    @staticmethod
    def set_threads(count: int) -> None:
        """Have torch compute with `count` threads."""
        import torch

        torch.set_num_threads(count)

    def dtype(self, name: str) -> Any:
        return getattr(self._torch, name)

    def empty(self, shape: Sequence[int], dtype: str, *, fills_slowly: bool = False) -> Array:
        if not self.is_on_host or math.prod(shape) == 0:
            return self._torch.empty(tuple(shape), dtype=self.dtype(dtype), device=self.device)
        return self.sharing(huge_pages.empty(shape, numpy_dtype(dtype), fills_slowly=fills_slowly))

    def zeros(self, shape: Sequence[int], dtype: str) -> Array:
        return self._torch.zeros(tuple(shape), dtype=self.dtype(dtype), device=self.device)

    def without_memory(self, shape: Sequence[int], dtype: str) -> Array:
        return self._torch.empty(tuple(shape), dtype=self.dtype(dtype), device="meta")

    def of(self, values: np.ndarray | Sequence[Any] | float, dtype: str | None = None) -> Array:
        made = np.array(values, None if dtype is None else numpy_dtype(dtype))
        if self.is_on_host or hasattr(ml_dtypes, str(made.dtype)):
            return self.sharing(made).to(self.device)
        return self._torch.tensor(made, device=self.device)

    def host(self, array: Array) -> np.ndarray:
        kept = array.detach().cpu()
        name = dtype_name(kept.dtype)
        try:
            return kept.numpy()
        except TypeError:  # a dtype of ml_dtypes
            bits = kept.view(self.dtype({1: "uint8", 2: "int16"}[kept.element_size()])).numpy()
            return bits.view(numpy_dtype(name))

    def write(self, array: Array, values: np.ndarray) -> None:
        write(array, values)

    def mirrored_bytes(self, count: int) -> tuple[np.ndarray, Array]:
        if self.is_on_host:
            made = self._torch.zeros(count, dtype=self._torch.uint8)
            return made.numpy(), made
        pinned = self._torch.zeros(count, dtype=self._torch.uint8, pin_memory="cuda" in self.device)
        return pinned.numpy(), self._torch.zeros_like(pinned, device=self.device)

    def send(self, values: np.ndarray, to: Array) -> None:
        # From a staging copy, whose memory torch reuses after the transfer.
        staged = self._torch.empty(len(values), dtype=self._torch.uint8, pin_memory="cuda" in self.device)
        staged.numpy()[:] = values
        to.copy_(staged, non_blocking=True)

    def inference_mode(self) -> AbstractContextManager[object]:
        return self._torch.inference_mode()

    def synchronize(self) -> None:
        if not self.is_on_host:
            self._torch.cuda.synchronize(self.device)

    def sharing(self, values: np.ndarray) -> Array:
        name = str(values.dtype)
        if hasattr(ml_dtypes, name):
            bits = values.view({1: np.uint8, 2: np.int16}[values.itemsize])
            return self._torch.from_numpy(bits).view(self.dtype(name))
        return self._torch.from_numpy(values)


@contextmanager
def single_torch_thread() -> Iterator[None]:
    """Have torch compute with one thread meanwhile."""
    import torch

    usual = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(usual)


def index_on(array: Array, places: Sequence[Any]) -> Array:
    """Return places as an index on the device of `array`, without waiting for it."""
    import torch

    return torch.tensor(places).pin_memory().to(array.device, non_blocking=True)


def host_values(array: Array | np.ndarray) -> np.ndarray:
    """Return the values of an array of any kind on the host; the same memory if it is there."""
    return array if isinstance(array, np.ndarray) else TorchArrays(str(array.device)).host(array)


def on_host(array: Array) -> Array:
    """Return numpy's array of the same memory if that is a CPU's, else the array itself."""
    return cast("Array", host_values(array)) if is_on_host(array) else array


def write(array: Array | np.ndarray, values: np.ndarray) -> None:
    """Write values on the host into an array of any kind, in its dtype. A number out of its range is infinite there."""
    target = on_host(cast("Array", array))
    if isinstance(target, np.ndarray):
        with np.errstate(over="ignore", invalid="ignore"):
            np.copyto(target, values, casting="unsafe")
    else:
        target.copy_(TorchArrays("cpu").sharing(np.ascontiguousarray(values)))


def has_memory(array: Array) -> bool:
    """Return whether an array is not made by `without_memory`."""
    return any(array.strides) if isinstance(array, np.ndarray) else not array.is_meta


def library(array: Array | np.ndarray) -> Any:
    """Return the module, numpy or torch, that an array is of."""
    return np if isinstance(array, np.ndarray) else sys.modules["torch"]


def converted(array: AnyArray, dtype: str) -> AnyArray:
    """Return the values of an array in the dtype of this name; the array itself if it has that."""
    made: Any = array
    if not isinstance(made, np.ndarray):
        made = made.to(getattr(library(made), dtype))
    elif dtype == "float32" and dtype_name(made.dtype) == "float8_e4m3fn":
        made = _from_float8(made)
    else:
        with np.errstate(over="ignore", invalid="ignore"):
            made = made.astype(numpy_dtype(dtype), copy=False)
    return cast(AnyArray, made)


FLOAT8_SLAB = 2**11
"""Values of 8 bits that are looked up in one call."""


def _from_float8(array: np.ndarray) -> np.ndarray:
    """Return the values of float8_e4m3fn as float32, by a table: three times as fast as a cast.

    numpy widens the indices, so it gets few at a time.
    """
    bits, found = np.ascontiguousarray(array).view(np.uint8).ravel(), np.empty(array.size, np.float32)
    for begin in range(0, len(bits), FLOAT8_SLAB):
        _float8_values().take(bits[begin : begin + FLOAT8_SLAB], out=found[begin : begin + FLOAT8_SLAB], mode="clip")
    return found.reshape(array.shape)


@cache
def _float8_values() -> np.ndarray:
    """Return the value of each float8_e4m3fn, float32 [256]."""
    values: np.ndarray = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    return values


def bits_as(array: AnyArray, dtype: str) -> AnyArray:
    """Return the bits of an array as numbers of the dtype of this name; a copy if its rows are not contiguous."""
    made: Any = array
    if not isinstance(made, np.ndarray):
        kind = getattr(library(made), dtype)
        return cast(AnyArray, (made if made.itemsize == kind.itemsize else made.contiguous()).view(kind))
    rows = made if made.strides[-1] == made.itemsize else np.ascontiguousarray(made)
    return cast(AnyArray, rows.view(numpy_dtype(dtype)))


class ShapesOnly(NumpyArrays):
    """Arrays without memory, for a model that only gives the shapes of its weights."""

    def empty(self, shape: Sequence[int], dtype: str, *, fills_slowly: bool = False) -> Array:  # noqa: ARG002
        return self.without_memory(shape, dtype)


class Collectives(Protocol):
    """Connection of rank `number` with the others.

    All ranks make the same calls in the same order, with tensors of one shape and dtype.
    """

    number: int

    def all_reduce(self, x: Array) -> Array:
        """Add the other ranks' tensors to `x`, in place, and return it."""

    def all_gather(self, x: Array) -> list[Array]:
        """Return every rank's `x`, in the order of ranks, on all of them."""

    def gather(self, x: Array) -> list[Array] | None:
        """Return every rank's `x` on the first rank, and None on the others."""


class SingleRankCollectives:
    """Connection of the single rank of a model that is not sharded."""

    number = 0

    def all_reduce(self, x: Array) -> Array:
        return x

    def all_gather(self, x: Array) -> list[Array]:
        return [x]

    def gather(self, x: Array) -> list[Array] | None:
        return [x]


NO_COLLECTIVES = SingleRankCollectives()
