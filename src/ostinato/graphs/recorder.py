"""The recorder: records every call that a model makes during one step, and refuses what a replay could not repeat.

A replay makes the same calls on the same addresses. So a tensor that a call reads must be one that another recorded
call wrote, or a buffer that never moves. And no value may be read on the host, since every replay would repeat the
decision made by it. Both mistakes are found when the step is captured, and named.

Values read on the host and memory handed to native code are found here. A recorder does not see two things: native code
that gets an address without torch's knowledge and writes to a tensor that a recorded call has written as well; and a
Python number that changes from step to step. `check_replay` finds both.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ostinato.errors import CaptureError
from ostinato.graphs.buffers import BufferedInputs
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
from ostinato.ops.dispatch import CallHook, Kernel, NativeKernel


def tensor_ref(tensor: torch.Tensor, storage: int) -> TensorRef:
    """Return `tensor` as a view of the memory that is called `storage`."""
    return TensorRef(storage, tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))


def storage_pointer(tensor: torch.Tensor) -> int:
    """Return the address of the memory that `tensor` is a view of."""
    return tensor.untyped_storage().data_ptr()


def has_memory(tensor: torch.Tensor) -> bool:
    """Return whether `tensor` has memory. The address of a tensor without elements means nothing."""
    return tensor.untyped_storage().nbytes() > 0


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    return items_in(value, torch.Tensor)


UNTAGGED_READS = frozenset({"is_nonzero", "tensor_split.tensor_indices_or_sections", "where.default"})
"""Operations that read values and that torch does not mark as such, by name or by name and overload."""
CONVERSIONS = frozenset({"resolve_conj", "resolve_neg"})
"""Operations that tolist() and numpy() call first, and that a model of real numbers has no other use for."""
INDEXING = frozenset({"index", "index_put", "index_put_", "_index_put_impl_"})
"""Operations that torch marks as depending on values, although only masks make them depend."""

READS: dict[object, str] = {torch.Tensor.tolist: "tolist", torch.Tensor.numpy: "numpy", torch.Tensor.__array__: "numpy"}
NATIVE: dict[object, str] = {torch.Tensor.data_ptr: "data_ptr", torch.Tensor.__dlpack__: "__dlpack__"}


def reads_on_host(func: OpOverload, args: Args, kwargs: Kwargs) -> bool:
    """Return whether the host must read values to know an operation's result or its shape."""
    name = func.overloadpacket.__name__
    if name in INDEXING:
        return any(tensor.dtype in (torch.bool, torch.uint8) for tensor in tensors_in(args[1]))
    if name in UNTAGGED_READS or f"{name}.{func._overloadname}" in UNTAGGED_READS or name in CONVERSIONS:
        return True
    if torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags:
        # With an explicit size, the shape is known without the values.
        sized = {"one_hot": len(args) > 1 and args[1] != -1, "repeat_interleave": "output_size" in kwargs}
        return not sized.get(name, False)
    return False


def changes_device(arguments: object, result: object) -> bool:
    """Return whether values were copied between device and host, so that one waits for the other."""
    devices = {tensor.device for tensor in tensors_in(arguments)}
    return bool(devices) and any(tensor.device not in devices for tensor in tensors_in(result))


def host_read_error(name: str, tensor: object) -> CaptureError:
    return CaptureError(
        f"{name} reads the values of a tensor of shape {shape_of(tensor)} on the host during capture; a replay would "
        "use the value that was read now. Keep the value on the device, or read it inside a kernel"
    )


class HostReadGuard(TorchFunctionMode):
    """Guard against conversions to Python values and reads of a tensor's address, which bypass torch's operations."""

    def __init__(self, is_inside_kernel: Callable[[], bool]) -> None:
        super().__init__()
        self._is_inside_kernel = is_inside_kernel

    def __torch_function__(
        self, func: OpOverload, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        if func in READS and not self._is_inside_kernel():
            raise host_read_error(READS[func], args[0])
        if func in NATIVE and not self._is_inside_kernel():
            raise CaptureError(
                f"{NATIVE[func]} of a tensor of shape {shape_of(args[0])} is taken during capture: a native function "
                "that gets it is called around the recorder and would not be replayed. Call it through ops/"
            )
        return func(*args, **(kwargs or {}))


UNWRITTEN = frozenset({"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted"})
OVERWRITES = frozenset({"copy_", "fill_", "zero_", "index_copy_", "index_fill_", "index_put_", "scatter_"})
"""In-place operations that do not use the old content. One that writes a part counts as writing all."""
READS_SHAPE = UNWRITTEN | {"zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full"}
REPLACES_MEMORY = frozenset({"resize_", "resize_as_", "set_"})


class CallRecorder(TorchDispatchMode):
    """Recorder of the calls made while it is active (`with recorder: ...`).

    It also serves the hook of the model's kernels. `persistent` maps the storage of each buffer that never moves to its
    name. Parts of a layer whose name is in `splits` are left out: each is one call, which a replay makes with its own
    step. With `kernels_may_read` False, a kernel outside of such parts must not read values on the host either.
    """

    def __init__(
        self, persistent: Mapping[int, str], splits: Collection[str], *, kernels_may_read: bool = True
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[RecordedCall] = []
        self.sizes: dict[int, int] = {}
        """Number of a storage that the step computed -> bytes."""
        self._persistent = persistent
        self._splits = splits
        self._kernels_may_read = kernels_may_read
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}  # address -> number; freed addresses are reused
        self._constants: dict[int, torch.Tensor] = {}  # numbers that torch made tensors of, by address
        self._unwritten: set[int] = set()
        self._kernel: str | None = None  # the kernel or part that runs
        self._may_read = False
        self._guard = HostReadGuard(lambda: self._kernel is not None)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: nothing here is compiled, and True would import torch's compiler, which takes two seconds."""
        return False

    def __enter__(self) -> CallRecorder:
        super().__enter__()  # type: ignore[no-untyped-call]
        self._guard.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        self._guard.__exit__(*error)  # type: ignore[no-untyped-call]
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        with torch._C.DisableTorchFunction():  # the guard need not see the recorder's own accesses
            return self._operation(func, func.overloadpacket.__name__, args, kwargs or {})

    def _operation(self, func: OpOverload, name: str, args: Args, kwargs: Kwargs) -> object:
        """Run and record one of torch's operations."""
        if self._kernel is not None:
            return self._call_inside(func, name, args, kwargs)
        if reads_on_host(func, args, kwargs):
            raise host_read_error(name, args[0])
        if name == "lift_fresh" and isinstance(args[0], torch.Tensor) and args[0].ndim == 0 and args[0].is_cpu:
            # A Python number in an operation that takes tensors (`x[1:] = 0`): baked in, like every Python number.
            self._constants[storage_pointer(args[0])] = args[0]
        if torch.Tag.inplace_view in func.tags:
            return self._change_view(func, name, args, kwargs)
        written = list(tensors_in(_written(func, args, kwargs)))
        is_overwritten = name in OVERWRITES or any(argument.is_out for argument in func._schema.arguments)
        self._check_known(name, args, kwargs)
        placed_args, placed_kwargs = self._placed(args), self._placed(kwargs)
        result = func(*args, **kwargs)
        writes = self._place_results(name, (args, kwargs), result)
        if name in UNWRITTEN:
            self._unwritten.update(place.storage for place in writes if place is not None)
        elif written or any(writes):  # else it is a view
            if name not in READS_SHAPE:
                self._check_written(name, (args, kwargs), written if is_overwritten else ())
            self._unwritten.difference_update(map(self._storage_id, written))
            is_tensor = isinstance(result, torch.Tensor)
            self.calls.append(RecordedCall("torch", name, func, placed_args, placed_kwargs, writes, is_tensor))
        return result

    def kernel(self, name: str, kernel: Kernel, args: Args, kwargs: Kwargs) -> torch.Tensor:
        """Record a kernel's call. Implements `ops.kernels.Recorder`.

        A native kernel does not run: it reads nothing on the host that a recorder could see, and its result is not
        needed before the first replay.
        """
        run = kernel.empty_result if isinstance(kernel, NativeKernel) else kernel
        if self._kernel is not None:
            return run(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            self._check_known(name, args, kwargs)
            self._check_written(name, (args, kwargs))
            placed_args, placed_kwargs = self._placed(args), self._placed(kwargs)
            result = self._run_inside(name, self._kernels_may_read, run, args, kwargs)
            writes = self._place_results(name, (args, kwargs), result)
        is_tensor = isinstance(result, torch.Tensor)
        self.calls.append(RecordedCall("kernel", name, kernel, placed_args, placed_kwargs, writes, is_tensor))
        return result

    def split(self, name: str, function: Kernel, tensors: tuple[torch.Tensor, ...], other_args: Args) -> torch.Tensor:
        """Record a part in the splits as one call, or run another part. Implements `ops.kernels.Recorder`."""
        if name not in self._splits or self._kernel is not None:
            return function(*tensors, *other_args)
        self._check_known(name, tensors, {})
        self._check_written(name, tensors)
        for tensor in tensors_in(other_args):
            if self._storage_id(tensor) is not None:
                raise CaptureError(
                    f"{name} gets a computed tensor of shape {shape_of(tensor)} beside its step; one that has an "
                    "entry per token belongs among the tensors of the part"
                )
        placed = tuple(map(self._placed, tensors))
        result = self._run_inside(name, True, function, (*tensors, *other_args), {})
        writes = self._place_results(name, (tensors, other_args), result)
        if not isinstance(result, torch.Tensor) or writes[0] is None or result.shape[:1] != tensors[0].shape[:1]:
            raise CaptureError(f"{name} must return one new tensor with an entry per token, as it is left out")
        self.calls.append(RecordedCall("split", name, function, (placed, other_args), {}, writes, True))
        return result

    def record(self, hook: CallHook, forward: StepForward, inputs: BufferedInputs) -> TensorRef:
        """Run `forward(inputs)` once, and return the place of its result, as `CallRecord.record` does."""
        hook.recorder = self
        try:
            # Outside of inference mode torch takes some operations apart before a recorder sees them.
            with torch.inference_mode(), self:
                return self.result_place(forward(inputs))
        finally:
            hook.recorder = None

    def result_place(self, result: torch.Tensor) -> TensorRef:
        """Return the place of the step's result. CaptureError if the step did not compute it."""
        storage_id = self._storage_id(result)
        if storage_id is None:
            raise CaptureError("the result of the step is no tensor that the step computed")
        return tensor_ref(result, storage_id)

    def _run_inside(self, name: str, may_read: bool, function: Kernel, args: Args, kwargs: Kwargs) -> torch.Tensor:
        self._kernel, self._may_read = name, may_read
        try:
            return function(*args, **kwargs)
        finally:
            self._kernel = None

    def _call_inside(self, func: OpOverload, name: str, args: Args, kwargs: Kwargs) -> object:
        """Run an operation inside a kernel or a part."""
        if self._may_read:
            return func(*args, **kwargs)
        reads = reads_on_host(func, args, kwargs)
        result = None if reads else func(*args, **kwargs)
        if reads or changes_device((args, kwargs), result):
            raise CaptureError(
                f"the kernel {self._kernel} reads values on the host ({name}), which this device cannot capture. "
                "Choose an implementation that is capturable, or graphs that leave it out (piecewise)"
            )
        return result

    def _change_view(self, func: OpOverload, name: str, args: Args, kwargs: Kwargs) -> object:
        """Change the shape of the tensor itself. Later calls see the new shape, so there is nothing to record."""
        if name in REPLACES_MEMORY:
            raise CaptureError(f"{name} gives a tensor of shape {shape_of(args[0])} other memory during capture")
        self._check_known(name, args, kwargs)
        return func(*args, **kwargs)

    def _storage_id(self, tensor: torch.Tensor) -> int | None:
        """Return the number of the computed storage that `tensor` is a view of, None for other tensors."""
        live = self._live.get(storage_pointer(tensor))
        return None if live is None or not has_memory(tensor) or live[0].expired() else live[1]

    def _placed(self, value: object) -> Any:
        def place(tensor: torch.Tensor) -> object:
            storage_id = self._storage_id(tensor)
            return tensor if storage_id is None else tensor_ref(tensor, storage_id)

        return map_items(value, torch.Tensor, place)

    def _place_results(self, name: str, arguments: object, result: object) -> tuple[TensorRef | None, ...]:
        """Assign numbers to new storages, and return the place of each new tensor, None for views of an argument.

        A tensor that is no view of an argument is new, even if a kernel returns the same memory twice: each call's
        result is a separate value.
        """
        if changes_device(arguments, result):
            raise host_read_error(name, result)
        old = {storage_pointer(tensor) for tensor in tensors_in(arguments)}
        new: dict[int, int] = {}
        writes: list[TensorRef | None] = []
        for tensor in tensors_in(result):
            pointer = storage_pointer(tensor)
            if not has_memory(tensor) or pointer in old or pointer in self._persistent:
                writes.append(None)
                continue
            if pointer not in new:
                new[pointer] = len(self.sizes)
                self.sizes[new[pointer]] = tensor.untyped_storage().nbytes()
                self._live[pointer] = (StorageWeakRef(tensor.untyped_storage()), new[pointer])
            writes.append(tensor_ref(tensor, new[pointer]))
        return tuple(writes)

    def _check_known(self, name: str, args: Args, kwargs: Kwargs) -> None:
        """Raise CaptureError for a tensor that is neither computed nor persistent."""
        arguments: list[tuple[int | str, object]] = [*enumerate(args), *kwargs.items()]
        for position, argument in arguments:
            for tensor in tensors_in(argument):
                pointer = storage_pointer(tensor)
                is_known = pointer in self._persistent or pointer in self._constants or not has_memory(tensor)
                if not is_known and self._storage_id(tensor) is None:
                    raise self._refuse_stranger(name, tensor, position)

    def _check_written(self, name: str, arguments: object, overwritten: Iterable[torch.Tensor] = ()) -> None:
        """Raise CaptureError for a tensor that is read and that no recorded call has written."""
        unread = set(map(self._storage_id, overwritten))
        for tensor in tensors_in(arguments):
            storage_id = self._storage_id(tensor)
            if storage_id in self._unwritten and storage_id not in unread:
                raise CaptureError(
                    f"{name} reads a tensor of shape {shape_of(tensor)} that no recorded call has written; something "
                    "wrote to it around the recorder. Call native functions through ops/, and return what they compute"
                )

    def _refuse_stranger(self, name: str, tensor: torch.Tensor, position: int | str) -> CaptureError:
        kinds = ", ".join(sorted({buffer.partition(".")[0] for buffer in self._persistent.values()}))
        if name == "lift_fresh":
            return CaptureError(
                f"a tensor of shape {shape_of(tensor)} ({tensor.dtype}) is made of Python values during capture; a "
                "replay would keep these values. Make it once, as an attribute of a module"
            )
        return CaptureError(
            f"{name} reads a tensor of shape {shape_of(tensor)} ({tensor.dtype}, argument {position}) that is "
            f"no persistent buffer; a replay would read memory that is gone. The persistent ones are {kinds}"
        )


def _written(func: OpOverload, args: Args, kwargs: Kwargs) -> list[object]:
    """Return the arguments that an in-place operation writes."""
    return [
        args[index] if index < len(args) else kwargs.get(argument.name)
        for index, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
