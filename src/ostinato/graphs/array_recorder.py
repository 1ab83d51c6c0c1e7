"""The recorder of steps on numpy's arrays: it notes each native call, and refuses all that is computed otherwise.

A replay makes the same native calls on the same addresses. So an array that a call reads must be one that another
recorded call wrote, or a buffer that never moves. Arrays that recorded calls write hold no values while a step is
recorded: nothing can be computed with them but by another call, and no value of theirs can be read. Each attempt is an
error that names it.

A recorder does not see two things: what a layer computes of buffers alone, and a Python number that changes from step
to step. `check_replay` finds both.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, NoReturn, cast

import numpy as np

from ostinato.errors import CaptureError
from ostinato.graphs.tensor_refs import (
    Args,
    Kwargs,
    RecordedCall,
    StepForward,
    TensorRef,
    items_in,
    map_items,
    shape_of,
)
from ostinato.ops.arrays import address, memory_of
from ostinato.ops.dispatch import CallHook, Kernel, NativeKernel
from ostinato.ops.step_inputs import Array

if TYPE_CHECKING:
    from ostinato.graphs.buffers import BufferedInputs


def _refuse(what: str, array: object) -> NoReturn:
    raise CaptureError(
        f"{what} needs the values of an array of shape {shape_of(array)} during capture, which has none before the "
        "first replay. Compute it by an operation (ops/), or once, as an attribute of a module"
    )


class RecordedArray(np.ndarray):
    """Result of a recorded call, or a view of one: it has a place, and no values to compute with or to read."""

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: object, **kwargs: object) -> NoReturn:
        _refuse(ufunc.__name__, self)

    def __array_function__(self, func: Any, types: object, args: object, kwargs: object) -> NoReturn:
        _refuse(func.__name__, self)

    def _read(self, *_: object, **__: object) -> NoReturn:
        _refuse("a conversion to Python values", self)

    __bool__ = __int__ = __float__ = __index__ = __complex__ = __iter__ = __contains__ = __array__ = _read
    item = tolist = tobytes = dump = dumps = _read

    def _copy(self, *_: object, **__: object) -> NoReturn:
        _refuse("a copy", self)

    copy = astype = flatten = repeat = take = compress = choose = __deepcopy__ = __copy__ = fill = put = sort = _copy
    sum = prod = mean = std = var = min = max = argmin = argmax = argsort = cumsum = cumprod = all = any = dot = _copy
    clip = round = nonzero = trace = ptp = partition = argpartition = searchsorted = conj = conjugate = _copy

    def reshape(self, *shape: Any, **options: Any) -> Any:
        """Return a view of another shape; an array that has none would be copied."""
        view = super().reshape(*shape, **options)
        if memory_of(view) is not memory_of(self):
            _refuse("a reshape that copies", self)
        return view

    def __getitem__(self, key: Any) -> Any:
        for part in key if isinstance(key, tuple) else (key,):
            if not (part is None or part is Ellipsis or isinstance(part, slice | int)):
                _refuse("indexing by an array", self)
        return super().__getitem__(key)

    def __setitem__(self, key: object, value: object) -> NoReturn:
        _refuse("an assignment", self)


class ArrayRecorder:
    """Recorder of one step's native calls. It listens at the hook of the model's kernels while it records.

    `persistent` maps the memory of each buffer that never moves to its name. Parts of a layer whose name is in `splits`
    are left out: each is one call, which a replay makes with its own step. Results keep address space until the step
    is recorded, and hardly any pages.
    """

    def __init__(self, persistent: Mapping[int, str], splits: Collection[str]) -> None:
        self.calls: list[RecordedCall] = []
        self.sizes: dict[int, int] = {}
        self._persistent, self._splits = persistent, splits
        self._storages: dict[int, int] = {}  # id of a result's own memory -> number
        self._kept: list[np.ndarray] = []  # memory of results: no two have the same id

    def record(self, hook: CallHook, forward: StepForward, inputs: BufferedInputs) -> TensorRef:
        """Run `forward(inputs)` once, and return the place of its result, as `CallRecord.record` does."""
        hook.recorder = self
        try:
            result = forward(inputs)
            place = self._place_of(result) if isinstance(result, np.ndarray) else None
        finally:
            hook.recorder = None
            self._storages.clear()
            self._kept.clear()
        if place is None:
            raise CaptureError("the result of the step is no tensor that the step computed")
        return place

    def kernel(self, name: str, kernel: Kernel, args: Args, kwargs: Kwargs) -> Array:
        """Record a native kernel's call, which does not run. Implements `ops.dispatch.Recorder`."""
        if not isinstance(kernel, NativeKernel):
            raise CaptureError(f"{name} is no native kernel, and a tape of numpy's arrays holds no others")
        placed_args, placed_kwargs = self._placed(name, args), self._placed(name, kwargs)
        result = kernel.empty_result(*args, **kwargs)
        array = cast(np.ndarray, result)
        if any(array is each for each in items_in((args, kwargs), np.ndarray)):
            place = None
        else:
            array = self._new(array)
            place = self._place_of(array)
        self.calls.append(RecordedCall("kernel", name, kernel, placed_args, placed_kwargs, (place,), True))
        return cast("Array", array)

    def split(self, name: str, function: Kernel, tensors: tuple[Array, ...], other_args: Args) -> Array:
        """Record a part in the splits as one call, or run another part. Implements `ops.dispatch.Recorder`."""
        if name not in self._splits:
            return function(*tensors, *other_args)
        for array in items_in(other_args, np.ndarray):
            if self._place_of(array) is not None:
                raise CaptureError(
                    f"{name} gets a computed tensor of shape {shape_of(array)} beside its step; one that has an "
                    "entry per token belongs among the tensors of the part"
                )
        placed = tuple(self._placed(name, each) for each in tensors)
        # Its calls are not recorded, and show the shape of its result.
        calls, sizes, storages = list(self.calls), dict(self.sizes), dict(self._storages)
        result = function(*tensors, *other_args)
        self.calls[:] = calls
        self.sizes, self._storages = sizes, storages
        if not isinstance(result, np.ndarray) or result.shape[:1] != tensors[0].shape[:1]:
            raise CaptureError(f"{name} must return one new tensor with an entry per token, as it is left out")
        out = self._new(np.zeros(result.shape, result.dtype))
        self.calls.append(RecordedCall("split", name, function, (placed, other_args), {}, (self._place_of(out),), True))
        return cast("Array", out)

    def _new(self, array: np.ndarray) -> RecordedArray:
        """Return a new result as an array that has a place."""
        memory = memory_of(array)
        number = len(self.sizes)
        self._storages[id(memory)] = number
        self.sizes[number] = memory.nbytes
        self._kept.append(memory)
        return array.view(RecordedArray)

    def _place_of(self, array: np.ndarray) -> TensorRef | None:
        """Return the place of an array that a recorded call computed, None of any other."""
        memory = memory_of(array)
        number = self._storages.get(id(memory))
        if number is None:
            return None
        size = array.itemsize
        strides = tuple(step // size for step in array.strides)
        return TensorRef(number, array.dtype, array.shape, strides, (address(array) - address(memory)) // size)

    def _placed(self, name: str, value: object) -> Any:
        """Return `value` with the places of computed arrays. CaptureError for one that a replay could not read."""

        def place(array: np.ndarray) -> object:
            found = self._place_of(array)
            if found is None and array.size and address(memory_of(array)) not in self._persistent:
                kinds = ", ".join(sorted({buffer.partition(".")[0] for buffer in self._persistent.values()}))
                raise CaptureError(
                    f"{name} reads a tensor of shape {shape_of(array)} ({array.dtype}) that is no persistent buffer; a "
                    f"replay would read memory that is gone. The persistent ones are {kinds}"
                )
            return array if found is None else found

        return map_items(value, np.ndarray, place)
