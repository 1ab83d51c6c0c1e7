"""Steps on tensors without memory: models on the device `meta`, whose launches of Triton kernels are collected.

What has no memory has no values. So whoever reads one on the host, or makes a tensor of Python values beside it, is
found out without a GPU, the wrappers of Triton's kernels too.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ostinato.graphs.buffers import StepBuffers
from ostinato.graphs.recorder import changes_device, reads_on_host, tensors_in
from ostinato.layers.allocation import WeightAllocator
from ostinato.models.base import CausalLM
from ostinato.models.loader import build_model
from ostinato.ops.arrays import TorchArrays, dtype_name
from ostinato.ops.dispatch import CallHook, Ops, reference_kernel, triton_kernel
from ostinato.ops.launch_tables.launch import Launch
from ostinato.ops.operations import OPERATIONS
from ostinato.ops.step_inputs import LayerCache
from ostinato.plan.kernels import KernelChoice
from ostinato.plan.layer_specs import LayerSpec
from ostinato.plan.mixers import StateSpec
from ostinato.plan.model import ModelSpec

META = torch.device("meta")
BLOCK_SIZE, BLOCKS, SLOTS = 16, 9, 40


class HostRead(AssertionError):
    """A step on the device did what a graph cannot hold."""


class OnDevice(TorchDispatchMode):
    """Refuses reads on the host, copies between devices, and tensors of the host beside those of the device; and counts
    the bytes that are alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.most_bytes = 0
        self.is_aside = False
        """What is done meanwhile is none of a graph's."""
        self._bytes = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        if self.is_aside:
            return func(*args, **kwargs)
        if reads_on_host(func, args, kwargs):
            raise HostRead(f"{name} reads values on the host")
        result = func(*args, **kwargs)
        # A Python number among tensors is one without dimensions.
        if changes_device((args, kwargs), result) or any(
            each.device != META and each.dim() for each in tensors_in((args, kwargs, result))
        ):
            raise HostRead(f"{name} has a tensor on the host")
        for each in tensors_in(result):
            storage = each.untyped_storage()
            if each.device == META and storage._cdata not in self._seen and not _is_given(each, (args, kwargs)):
                self._note(storage)
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        self._seen.add(key)
        self._bytes += size
        self.most_bytes = max(self.most_bytes, self._bytes)

        def free() -> None:
            self._seen.discard(key)
            self._bytes -= size

        weakref.finalize(storage, free)


class LeavesOut:
    """Stands in a hook while a piecewise step runs on `device`: `parts` are no part of the graph."""

    def __init__(self, device: OnDevice, parts: Collection[str]) -> None:
        self.left_out: list[str] = []
        self._device, self._parts = device, parts

    def kernel(self, _: str, kernel: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        result: torch.Tensor = kernel(*args, **kwargs)
        return result

    def split(
        self, name: str, function: Callable[..., Any], tensors: tuple[torch.Tensor, ...], others: tuple[Any, ...]
    ) -> torch.Tensor:
        self._device.is_aside = name in self._parts
        self.left_out += [name] * self._device.is_aside
        result: torch.Tensor = function(*tensors, *others)
        self._device.is_aside = False
        return result


def _is_given(tensor: torch.Tensor, arguments: Any) -> bool:
    return any(each.untyped_storage()._cdata == tensor.untyped_storage()._cdata for each in tensors_in(arguments))


@contextmanager
def collected_launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Launch, Mapping[str, Any]]]]:
    """The launches that wrappers of Triton kernels ask for meanwhile, none of which is started."""
    from ostinato.ops.triton import common

    found: list[tuple[Launch, Mapping[str, Any]]] = []

    def run(kernel: Any, _grid: tuple[int, ...], launch: Launch, **arguments: Any) -> None:
        assert kernel.__name__ == launch.kernel
        for each in tensors_in(tuple(arguments.values())):
            if each.device != META:
                raise HostRead(f"{launch.kernel} gets a tensor of the host")
        found.append((launch, arguments))

    with monkeypatch.context() as patch:
        patch.setattr(common, "run", run)
        yield found


def meta_ops(kernels: Mapping[str, KernelChoice]) -> Ops:
    """The kernels that a plan chose, on tensors without memory."""
    hook = CallHook()

    def made(name: str) -> Callable[..., torch.Tensor]:
        if name in kernels and kernels[name].implementation == "triton":
            return triton_kernel(name)
        function: Callable[..., torch.Tensor] = reference_kernel(name)
        return function

    return Ops({name: hook.wrap(name, made(name)) for name in OPERATIONS}, hook)


def meta_model(spec: ModelSpec, kernels: Mapping[str, KernelChoice], dtype: torch.dtype = torch.bfloat16) -> CausalLM:
    return build_model(WeightAllocator(meta_ops(kernels), TorchArrays("meta"), dtype_name(dtype)), spec)


def meta_memory(spec: ModelSpec, dtype: torch.dtype = torch.bfloat16) -> list[LayerCache]:
    """Of all layers, a drafter's behind them, and of what a prediction head or images need."""
    memory: list[LayerCache] = []
    for layer in spec.cached_layers:
        keys_of = None if layer.attention is None else layer.attention.keys_of
        memory.append(_layer_memory(layer, dtype) if keys_of is None else memory[keys_of])
    if spec.drafter is not None and spec.drafter.hidden_elements:
        memory.append(LayerCache(states=_states(spec.drafter.state, dtype)))
    if spec.vision is not None:
        cells = torch.empty(8, spec.vision.hidden_rows, spec.vision.out_hidden_size, dtype=dtype, device=META)
        memory.append(LayerCache(media=cells))
    return memory


def _layer_memory(layer: LayerSpec, dtype: torch.dtype) -> LayerCache:
    parts: dict[str, torch.Tensor] = {}
    if layer.attention is not None:
        shape = (BLOCKS, BLOCK_SIZE, layer.attention.num_kv_heads, layer.attention.head_dim)
        parts |= {name: torch.empty(shape, dtype=dtype, device=META) for name in ("k_cache", "v_cache")}
        if layer.attention.indexer is not None and layer.attention.indexer.entry_size:
            of_index = (*shape[:2], 1, layer.attention.indexer.entry_size)
            parts["index_cache"] = torch.empty(of_index, dtype=dtype, device=META)
    return LayerCache(**parts, states={} if layer.mixer is None else _states(layer.mixer.state, dtype))


def _states(state: StateSpec, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    dtypes = {"model": dtype, "state": torch.float32}
    return {
        array.name: torch.empty(SLOTS, *array.shape, dtype=dtypes[array.dtype], device=META) for array in state.arrays
    }


def meta_buffers(spec: ModelSpec, rows: int, tokens: int, slots: int) -> StepBuffers:
    return StepBuffers(rows, tokens, BLOCKS - 1, slots, TorchArrays("meta"), takes_images=spec.vision is not None)
