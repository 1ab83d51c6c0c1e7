"""The recorder: notes every call that a model makes during one step, and refuses what a replay could not repeat.

A replay makes the same calls on the same addresses. So a tensor that a call reads must be one that another noted call
wrote, or a buffer that stays where it is; and no value may be read on the host, since what was decided by it would be
decided for ever. Both mistakes are found when the step is captured, and named.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ostinato.graphs.errors import CaptureError
from ostinato.ops.recording import Kernel

HOST_READS = frozenset(
    {
        *("_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "masked_select", "_unique2", "unique_dim"),
        # What tolist() and numpy() do first.
        *("resolve_conj", "resolve_neg"),
    }
)
"""Operations whose result depends on values and is known on the host."""

UNWRITTEN = frozenset({"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted"})


@dataclass(frozen=True)
class Call:
    """One noted call. `writes` are the tensors that are filled from its result; none where it writes in place."""

    kind: Literal["torch", "kernel", "split"]
    name: str
    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    writes: tuple[torch.Tensor, ...]


class Recorder(TorchDispatchMode):
    """Notes calls while it is active (`with recorder: ...`) and stands in the tap of the model's kernels.

    `persistent` maps the storage of each buffer that stays where it is to its name. Parts of a layer whose name is
    in `splits` are left out: each is one call, made with the step of the time when it is replayed.
    """

    def __init__(self, persistent: Mapping[int, str], splits: Collection[str]) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.produced: dict[int, torch.UntypedStorage] = {}
        """Storages of what the step computed, kept alive so that no address is given out twice."""
        self._persistent = persistent
        self._splits = splits
        self._unwritten: set[int] = set()
        self._is_inside = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._is_inside:
            return func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if name in HOST_READS:
            raise CaptureError(
                f"{name} reads the values of a tensor of shape {_shape(args[0])} on the host during capture; a replay "
                "would go on with what was read now. Keep the value on the device, or read it inside a kernel"
            )
        reads_in_place = func._schema.is_mutable
        written = _written(func, args, kwargs) if reads_in_place else ()
        self._check_reads(name, args, kwargs, written)
        result = func(*args, **kwargs)
        outputs = tuple(_tensors(result))
        if reads_in_place:
            for tensor in written:
                self._unwritten.discard(_storage(tensor))
            self.calls.append(Call("torch", name, func, args, kwargs, ()))
            return result
        known = self._persistent.keys() | self.produced.keys()
        fresh = tuple(tensor for tensor in outputs if _storage(tensor) not in known)
        self._produce(fresh)
        if name in UNWRITTEN:
            self._unwritten.update(map(_storage, fresh))
        elif fresh:
            self.calls.append(Call("torch", name, func, args, kwargs, outputs))
        return result

    def kernel(self, name: str, kernel: Kernel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        """See `ops.recording.Recorder`."""
        if self._is_inside:
            return kernel(*args, **kwargs)
        return self._note("kernel", name, kernel, args, kwargs)

    def split(
        self, name: str, function: Kernel, tensors: tuple[torch.Tensor, ...], others: tuple[Any, ...]
    ) -> torch.Tensor:
        """See `ops.recording.Recorder`."""
        if name not in self._splits:
            return function(*tensors, *others)
        return self._note("split", name, function, (tensors, others), {})

    def _note(
        self,
        kind: Literal["kernel", "split"],
        name: str,
        function: Kernel,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> torch.Tensor:
        self._check_reads(name, args, kwargs, ())
        self._is_inside = True
        try:
            result = function(*args[0], *args[1]) if kind == "split" else function(*args, **kwargs)
        finally:
            self._is_inside = False
        fresh = _storage(result) not in self._persistent and _storage(result) not in self.produced
        self._produce((result,) if fresh else ())
        self.calls.append(Call(kind, name, function, args, kwargs, (result,) if fresh else ()))
        return result

    def _produce(self, tensors: tuple[torch.Tensor, ...]) -> None:
        for tensor in tensors:
            self.produced[_storage(tensor)] = tensor.untyped_storage()

    def _check_reads(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], written: tuple[torch.Tensor, ...]
    ) -> None:
        fully_written = set(map(_storage, written))
        for place, tensor in enumerate(_tensors((args, tuple(kwargs.values())))):
            storage = _storage(tensor)
            if storage in self._unwritten and storage not in fully_written:
                raise CaptureError(
                    f"{name} reads a tensor of shape {_shape(tensor)} that no recorded call has written; something "
                    "wrote to it around the recorder. Call native functions through ops/"
                )
            if storage not in self.produced and storage not in self._persistent:
                raise CaptureError(
                    f"{name} reads a tensor of shape {_shape(tensor)} ({tensor.dtype}, argument {place}) that is no "
                    f"persistent buffer; a replay would read memory that is gone. The persistent ones are "
                    f"{', '.join(sorted({known.partition('.')[0] for known in self._persistent.values()}))}"
                )


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _shape(tensor: Any) -> str:
    return str(list(tensor.shape)) if isinstance(tensor, torch.Tensor) else str(tensor)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """The tensors that an in-place operation writes without need of what stood there."""
    found: list[torch.Tensor] = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        found.extend(_tensors(value))
    return tuple(found)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in `value`, also in lists and tuples in it."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
