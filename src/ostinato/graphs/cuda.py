"""CUDA graphs: a step as one graph, or as one graph per segment between the parts that are left out.

Written from the documentation of torch.cuda.CUDAGraph; not yet run on a GPU.

All graphs of a model share one memory pool. Memory that one capture frees is used again by the next: replays follow one
another on one stream, and no graph needs the results of another. So nothing here keeps a tensor of the pool. Values
that are read or written between replays are reached by address, in memory that the pool keeps while its graphs live.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, Protocol

import torch

from ostinato.errors import CaptureError
from ostinato.graphs.buffers import BufferAddresses, BufferedInputs, eager_part
from ostinato.graphs.recorder import CallRecorder, storage_pointer, tensor_ref
from ostinato.graphs.tensor_refs import ReplayFn, StepForward, TensorRef
from ostinato.ops.arrays import Arrays
from ostinato.ops.dispatch import CallHook, Kernel


class Segment(Protocol):
    """One CUDA graph: calls between `begin` and `end` are not run but recorded."""

    def begin(self) -> None: ...

    def end(self) -> None: ...

    def replay(self) -> None: ...


class Driver(Protocol):
    """Device operations that a capture needs."""

    def capture_stream(self) -> AbstractContextManager[None]:
        """Run the work inside on the stream of captures, ordered after all earlier work and before all later work."""

    def new_segment(self) -> Segment: ...

    def memory_at(self, pointer: int, num_bytes: int) -> torch.Tensor:
        """Return memory at an address as a view that does not own it: [num_bytes] uint8."""

    def reserved_bytes(self) -> int:
        """Return the bytes of device memory that torch has reserved."""


class CudaGraph:
    """A captured step: segments, and the parts left out between them."""

    def __init__(self, plays: list[ReplayFn], result: torch.Tensor, captured: BufferedInputs) -> None:
        self._plays = plays
        self._result = result
        self._addresses = BufferAddresses(captured)

    def replay(self, inputs: BufferedInputs) -> torch.Tensor:
        """Replay the step as `graphs.Graph` does. CaptureError if a step buffer has moved since the capture."""
        self._addresses.check(inputs)
        for play in self._plays:
            play(inputs)
        return self._result


class CudaBackend:
    """Backend that captures CUDA graphs of one model; they share a memory pool.

    `persistent` maps the storage of each buffer that never moves to its name.
    """

    name = "cuda"

    def __init__(
        self, hook: CallHook, persistent: Mapping[int, str], arrays: Arrays, driver: Driver | None = None
    ) -> None:
        self._hook = hook
        self._persistent = persistent
        self._device = torch.device(arrays.device)
        self._driver = driver or CudaDriver(self._device)
        self.num_bytes = 0
        """Bytes of the graphs' memory pool, without the CUDA driver's own memory per graph."""

    def capture(self, forward: StepForward, inputs: BufferedInputs, splits: Collection[str]) -> CudaGraph:
        """Record and warm up `forward(inputs)`, then capture it. CaptureError if that fails or cannot be repeated."""
        with torch.inference_mode(), self._driver.capture_stream():
            shapes = self._record(forward, inputs, splits)
            forward(inputs)  # Kernels that choose among variants do so at their second call at the latest.
            bytes_before = self._driver.reserved_bytes()
            segments = _SegmentRecorder(self._driver, splits, shapes, self._device)
            self._hook.recorder = segments
            try:
                with _no_garbage_collection():
                    segments.begin()
                    result = _device_ref(forward(inputs))
                    segments.end()
            except RuntimeError as error:
                raise CaptureError(f"the step cannot be captured as a CUDA graph: {error}") from error
            finally:
                self._hook.recorder = None
                segments.abandon()
            self.num_bytes += self._driver.reserved_bytes() - bytes_before
            return CudaGraph(segments.plays(inputs), _device_tensor(self._driver, result), inputs)

    def _record(self, forward: StepForward, inputs: BufferedInputs, splits: Collection[str]) -> Iterator[TensorRef]:
        """Refuse what no replay could repeat. Return shapes and dtypes of the results of parts left out, in order."""
        recorder = CallRecorder(self._persistent, splits, kernels_may_read=False)
        recorder.record(self._hook, forward, inputs)
        return iter([ref for call in recorder.calls if call.kind == "split" for ref in call.writes if ref])


class _SegmentRecorder:
    """Recorder in the model's hook during a capture. It ends a segment at each part left out, and begins the next."""

    def __init__(
        self, driver: Driver, splits: Collection[str], shapes: Iterator[TensorRef], device: torch.device
    ) -> None:
        self._driver = driver
        self._splits = splits
        self._shapes = shapes
        self._device = device
        self._open: Segment | None = None
        self._plays: list[Callable[[BufferedInputs], ReplayFn]] = []

    def begin(self) -> None:
        segment = self._driver.new_segment()
        segment.begin()
        self._open = segment

    def end(self) -> None:
        assert self._open is not None, "a segment ends that has not begun"
        segment, self._open = self._open, None
        segment.end()
        self._plays.append(lambda captured: lambda inputs: segment.replay())

    def abandon(self) -> None:
        """Close an open segment after a failure, so that the stream is as it was."""
        if self._open is not None:
            segment, self._open = self._open, None
            # The first error has already reported that the capture is invalid.
            with suppress(RuntimeError):
                segment.end()

    def plays(self, captured: BufferedInputs) -> list[ReplayFn]:
        """Return the calls of a replay, in order. Only valid after the last `end`."""
        return [play(captured) for play in self._plays]

    def kernel(
        self,
        name: str,  # noqa: ARG002
        kernel: Kernel,
        args: tuple[object, ...],
        kwargs: dict[str, object],
    ) -> torch.Tensor:
        """Run the kernel, which the open segment records. Implements `ops.kernels.Recorder`."""
        return kernel(*args, **kwargs)

    def split(
        self, name: str, function: Kernel, tensors: tuple[torch.Tensor, ...], other_args: tuple[object, ...]
    ) -> torch.Tensor:
        """Leave a part out if it is in the splits, else run it. Implements `ops.kernels.Recorder`."""
        if name not in self._splits:
            return function(*tensors, *other_args)
        self.end()
        self.begin()
        # Allocated in the segment that reads it, while the inputs live, so it overlaps neither. The part itself does
        # not run, because its inputs hold no values yet.
        shape = next(self._shapes)
        out = torch.empty(shape.shape, dtype=shape.dtype, device=self._device)
        inputs, output = tuple(map(_device_ref, tensors)), _device_ref(out)

        def play(captured: BufferedInputs) -> ReplayFn:
            reached = tuple(_device_tensor(self._driver, one) for one in inputs)
            return eager_part(function, reached, other_args, _device_tensor(self._driver, output), captured)

        self._plays.append(play)
        return out


class CudaDriver:
    """Device operations of torch: one stream and one memory pool for all captures."""

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self._device = torch.device("cuda", index)
        self._stream = torch.cuda.Stream(self._device)
        self._pool = torch.cuda.graph_pool_handle()

    @contextmanager
    def capture_stream(self) -> Iterator[None]:
        # A pool whose graphs are all gone cannot be captured into; after its memory is freed, torch creates it anew.
        torch.cuda.empty_cache()
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            current.wait_stream(self._stream)
            # Memory left from the warm-up is cached for this stream, where no other stream could use it.
            torch.cuda.empty_cache()

    def new_segment(self) -> Segment:
        return _CudaSegment(self._pool)

    def memory_at(self, pointer: int, num_bytes: int) -> torch.Tensor:
        memory = torch.as_tensor(_Address(pointer, num_bytes), device=self._device)
        if memory.data_ptr() != pointer:
            raise CaptureError("torch copied memory of the graphs instead of viewing it")
        return memory

    def reserved_bytes(self) -> int:
        return torch.cuda.memory_reserved(self._device)


class _CudaSegment:
    def __init__(self, pool: Any) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._pool = pool

    def begin(self) -> None:
        # torch.cuda.graph() would collect garbage and empty caches for each of the many segments. `thread_local`:
        # what other threads do on the device does not spoil a capture that is made while an engine serves.
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def end(self) -> None:
        with warnings.catch_warnings():
            # Between two parts that are left out there may be nothing to do.
            warnings.filterwarnings("ignore", message=".*CUDA Graph is empty")
            self._graph.capture_end()

    def replay(self) -> None:
        self._graph.replay()


class _Address:
    """Device memory in the array interface through which torch views memory that it does not own."""

    def __init__(self, pointer: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (pointer, False),
            "strides": None,
            "version": 2,
        }


def _device_ref(tensor: torch.Tensor) -> tuple[TensorRef, int]:
    """Return a tensor's place, with the address as its storage's name, and the bytes of that storage."""
    return tensor_ref(tensor, storage_pointer(tensor)), tensor.untyped_storage().nbytes()


def _device_tensor(driver: Driver, located: tuple[TensorRef, int]) -> torch.Tensor:
    """Return a tensor at a place that `_device_ref` returned. Not to be called during a capture."""
    ref, num_bytes = located
    return ref.bind(driver.memory_at(ref.storage, num_bytes))


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Turn garbage collection off: freeing old tensors and graphs may free device memory, which a capture forbids."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
