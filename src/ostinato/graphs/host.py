"""Detection of what a replay could not repeat: values read on the host, and memory handed to native code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ostinato.errors import CaptureError
from ostinato.graphs.places import shape_of, tensors_in

UNTAGGED_READS = frozenset({"is_nonzero", "tensor_split.tensor_indices_or_sections", "where.default"})
"""Operations that read values and that torch does not mark as such, by name or by name and overload."""
CONVERSIONS = frozenset({"resolve_conj", "resolve_neg"})
"""Operations that tolist() and numpy() call first, and that a model of real numbers has no other use for."""
INDEXING = frozenset({"index", "index_put", "index_put_", "_index_put_impl_"})
"""Operations that torch marks as depending on values, although only masks make them depend."""

READS = {torch.Tensor.tolist: "tolist", torch.Tensor.numpy: "numpy", torch.Tensor.__array__: "numpy"}
NATIVE = {torch.Tensor.data_ptr: "data_ptr", torch.Tensor.__dlpack__: "__dlpack__"}


def reads_on_host(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
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


def changes_device(arguments: Any, result: Any) -> bool:
    """Return whether values were copied between device and host, so that one waits for the other."""
    devices = {tensor.device for tensor in tensors_in(arguments)}
    return bool(devices) and any(tensor.device not in devices for tensor in tensors_in(result))


def host_read_error(name: str, tensor: Any) -> CaptureError:
    return CaptureError(
        f"{name} reads the values of a tensor of shape {shape_of(tensor)} on the host during capture; a replay would "
        "go on with what was read now. Keep the value on the device, or read it inside a kernel"
    )


class HostReadGuard(TorchFunctionMode):
    """Guard against conversions to Python values and reads of a tensor's address, which bypass torch's operations."""

    def __init__(self, is_inside_kernel: Callable[[], bool]) -> None:
        super().__init__()
        self._is_inside_kernel = is_inside_kernel

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in READS and not self._is_inside_kernel():
            raise host_read_error(READS[func], args[0])
        if func in NATIVE and not self._is_inside_kernel():
            raise CaptureError(
                f"{NATIVE[func]} of a tensor of shape {shape_of(args[0])} is taken during capture: a native function "
                "that gets it is called around the recorder and would not be replayed. Call it through ops/"
            )
        return func(*args, **(kwargs or {}))
