"""CUDA graphs: a step as one graph, or as one graph per segment between the parts that are left out.

Written from the documentation of torch.cuda.CUDAGraph; not yet run on a GPU.

All graphs of a model share one memory pool. What a capture frees, the next one uses again: replays follow one another
on one stream, and no graph needs what another one computed. So nothing here keeps a tensor of the pool: what has to be
read or written between replays is reached by its address, in memory that the pool keeps while its graphs live.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, Protocol

import torch

from ostinato.errors import CaptureError
from ostinato.graphs.buffers import Addresses, Inputs
from ostinato.graphs.places import Place, place_of, pointer_of
from ostinato.graphs.recorder import Recorder, left_out
from ostinato.ops.kernels import Kernel, Tap

Forward = Callable[[Any], torch.Tensor]
Play = Callable[[Inputs], None]


class Segment(Protocol):
    """One graph of the device: what is called between `begin` and `end` is not run but kept."""

    def begin(self) -> None: ...

    def end(self) -> None: ...

    def replay(self) -> None: ...


class Driver(Protocol):
    """What is asked of the device."""

    def aside(self) -> AbstractContextManager[None]:
        """Work on the stream of captures, after all that was asked for before, and before all that comes after."""
        ...

    def new_segment(self) -> Segment: ...

    def memory_at(self, pointer: int, num_bytes: int) -> torch.Tensor:
        """[num_bytes] uint8: memory at an address, which it does not own."""
        ...

    def reserved_bytes(self) -> int:
        """What torch holds of the device's memory."""
        ...


class CudaGraph:
    """A captured step: segments, and the parts left out between them."""

    def __init__(self, plays: list[Play], result: torch.Tensor, captured: Inputs) -> None:
        self._plays = plays
        self._result = result
        self._addresses = Addresses(captured)

    def replay(self, step: Inputs) -> torch.Tensor:
        """See `graphs.Graph`. CaptureError if a step buffer has moved since the capture."""
        self._addresses.check(step)
        for play in self._plays:
            play(step)
        return self._result


class CudaBackend:
    """Captures CUDA graphs of one model; they share a memory pool.

    `persistent` maps the storage of each buffer that stays where it is to its name.
    """

    name = "cuda"

    def __init__(
        self, tap: Tap, persistent: Mapping[int, str], device: torch.device, driver: Driver | None = None
    ) -> None:
        self._tap = tap
        self._persistent = persistent
        self._device = device
        self._driver = driver or CudaDriver(device)
        self.num_bytes = 0
        """What the pool of the graphs took. The CUDA driver's own memory per graph is not in it."""

    def capture(self, forward: Forward, step: Inputs, splits: Collection[str]) -> CudaGraph:
        """Runs `forward(step)` to note and to warm up, then captures it. CaptureError if it cannot be captured, or
        if a replay could not repeat it."""
        with torch.inference_mode(), self._driver.aside():
            shapes = self._record(forward, step, splits)
            forward(step)  # Kernels that choose among variants do so at their second call at the latest.
            before = self._driver.reserved_bytes()
            segments = _Segments(self._driver, splits, shapes, self._device)
            self._tap.recorder = segments
            try:
                with _no_garbage_collection():
                    segments.begin()
                    result = _locate(forward(step))
                    segments.end()
            except RuntimeError as error:
                raise CaptureError(f"the step cannot be captured as a CUDA graph: {error}") from error
            finally:
                self._tap.recorder = None
                segments.abandon()
            self.num_bytes += self._driver.reserved_bytes() - before
            return CudaGraph(segments.plays(step), _reach(self._driver, result), step)

    def _record(self, forward: Forward, step: Inputs, splits: Collection[str]) -> Iterator[Place]:
        """Refuses what a replay could not repeat -> shapes and dtypes of what the parts left out return, in order."""
        recorder = Recorder(self._persistent, splits, kernels_may_read=False)
        self._tap.recorder = recorder
        try:
            with recorder:
                recorder.result_place(forward(step))
        finally:
            self._tap.recorder = None
        return iter([place for call in recorder.calls if call.kind == "split" for place in call.writes if place])


class _Segments:
    """Stands in the tap during a capture: ends a segment where a part is left out, and begins the next."""

    def __init__(self, driver: Driver, splits: Collection[str], shapes: Iterator[Place], device: torch.device) -> None:
        self._driver = driver
        self._splits = splits
        self._shapes = shapes
        self._device = device
        self._open: Segment | None = None
        self._plays: list[Callable[[Inputs], Play]] = []

    def begin(self) -> None:
        segment = self._driver.new_segment()
        segment.begin()
        self._open = segment

    def end(self) -> None:
        assert self._open is not None, "a segment ends that has not begun"
        segment, self._open = self._open, None
        segment.end()
        self._plays.append(lambda captured: lambda step: segment.replay())

    def abandon(self) -> None:
        """After a failure: leaves the stream as it was."""
        if self._open is not None:
            segment, self._open = self._open, None
            # That the capture is not valid was said by the first error.
            with suppress(RuntimeError):
                segment.end()

    def plays(self, captured: Inputs) -> list[Play]:
        """What a replay does, in order. Only after the last `end`."""
        return [play(captured) for play in self._plays]

    def kernel(
        self,
        name: str,  # noqa: ARG002
        kernel: Kernel,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> torch.Tensor:
        """See `ops.kernels.Recorder`."""
        return kernel(*args, **kwargs)

    def split(
        self, name: str, function: Kernel, tensors: tuple[torch.Tensor, ...], others: tuple[Any, ...]
    ) -> torch.Tensor:
        """See `ops.kernels.Recorder`."""
        if name not in self._splits:
            return function(*tensors, *others)
        self.end()
        self.begin()
        # Made in the segment that reads it, while the inputs live: so it lies apart from both. The part itself is not
        # run, as its inputs hold nothing yet.
        shape = next(self._shapes)
        out = torch.empty(shape.shape, dtype=shape.dtype, device=self._device)
        inputs, output = tuple(map(_locate, tensors)), _locate(out)

        def play(captured: Inputs) -> Play:
            reached = tuple(_reach(self._driver, one) for one in inputs)
            return left_out(function, reached, others, _reach(self._driver, output), captured)

        self._plays.append(play)
        return out


class CudaDriver:
    """The device as torch gives it: one stream and one memory pool for all captures."""

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self._device = torch.device("cuda", index)
        self._stream = torch.cuda.Stream(self._device)
        self._pool = torch.cuda.graph_pool_handle()

    @contextmanager
    def aside(self) -> Iterator[None]:
        # A pool whose graphs are all gone cannot be captured into; when its memory is given back it is made anew.
        torch.cuda.empty_cache()
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            current.wait_stream(self._stream)
            # What warming up has left is kept for this stream, where nobody else could use it.
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
    """Memory of the device, described in the protocol by which torch views memory that it does not own."""

    def __init__(self, pointer: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (pointer, False),
            "strides": None,
            "version": 2,
        }


def _locate(tensor: torch.Tensor) -> tuple[Place, int]:
    """Where a tensor lies, its storage named by the address, and the bytes of that storage."""
    return place_of(tensor, pointer_of(tensor)), tensor.untyped_storage().nbytes()


def _reach(driver: Driver, located: tuple[Place, int]) -> torch.Tensor:
    """A tensor at a place that `_locate` gave. Not during a capture."""
    place, num_bytes = located
    return place.of(driver.memory_at(place.storage, num_bytes))


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Collecting old tensors and graphs may free device memory, which a capture forbids."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
