"""A pretended GPU: an H100 whose memory is the CPU's, whose kernels run in Triton's interpreter, whose graphs are lists
of calls, and whose clock says how long a device would take that moves bytes at a given rate.

`pretend` puts it in place of the GPU for a whole process, with a planted fault if one is asked for.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ostinato.graphs.recorder import UNWRITTEN, storage_pointer, tensors_in

HOST_READS = ("_local_scalar_dense", "nonzero")
"""torch's operations that a stream refuses while it is captured."""


class PretendedSegment(TorchDispatchMode):
    """Keeps torch's calls and Triton's launches, also those in kernels, and makes them again into the same memory."""

    recording: PretendedSegment | None = None
    """The segment that is being captured, which launches are added to."""

    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self._log = log
        self._calls: list[tuple[Any, Any, Any, list[tuple[int, torch.Tensor]]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in HOST_READS:
            raise RuntimeError("operation not permitted when stream is capturing")
        result = func(*args, **(kwargs or {}))
        given = {storage_pointer(tensor) for tensor in tensors_in((args, kwargs))}
        new = [(i, each) for i, each in enumerate(tensors_in(result)) if storage_pointer(each) not in given]
        self._calls.append((func, args, kwargs or {}, new))
        return result

    def begin(self) -> None:
        self._log.append("begin")
        PretendedSegment.recording = self
        self.__enter__()

    def end(self) -> None:
        self._log.append("end")
        PretendedSegment.recording = None
        self.__exit__(None, None, None)

    def launch(self, start: Callable[[], object]) -> None:
        """Keep a launch, whose arguments stay where they are."""
        self._calls.append((start, (), {}, []))
        with _disable_current_modes():
            start()

    def poison(self) -> None:
        for *_, new in self._calls:
            for _, out in new:
                if out.is_floating_point():
                    out.fill_(float("nan"))

    def replay(self) -> None:
        self._log.append("replay")
        for func, args, kwargs, new in self._calls:
            values = list(tensors_in(func(*args, **kwargs)))
            for index, out in new if new and func.overloadpacket.__name__ not in UNWRITTEN else ():
                out.copy_(values[index])


class PretendedDriver:
    """A device whose graphs are lists of torch's calls."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.segments: list[PretendedSegment] = []

    @contextmanager
    def capture_stream(self) -> Iterator[None]:
        self.log.append("aside")
        yield
        self.log.append("back")

    def new_segment(self) -> PretendedSegment:
        self.segments.append(PretendedSegment(self.log))
        return self.segments[-1]

    def memory_at(self, pointer: int, num_bytes: int) -> torch.Tensor:
        assert self.log[-1] != "begin", "memory is reached during a capture"
        return torch.frombuffer((ctypes.c_uint8 * num_bytes).from_address(pointer), dtype=torch.uint8)

    def reserved_bytes(self) -> int:
        return 1000 * len(self.segments)

    def poison(self) -> None:
        for segment in self.segments:
            segment.poison()


BANDWIDTH = 1e12
"""Bytes per second of the pretended device's memory."""
REACHED = 0.9
"""Part of it that every kernel and every step reach, unless `slow-kernel` is planted."""
SLOWER = 3.0

PLANTS = {
    "wrong-kernel": "kernel-tests",
    "host-read": "memory",
    "over-plan": "memory",
    "stale-graph": "verify-demo",
    "slow-update": "updates",
    "slow-step": "decode-8b",
    "wrong-scan": "prefill",
    "failing-step": "overlap",
    "slow-graph": "predicted-8b",
}
"""Faults that can be planted, each with the check that must show it."""


def pretend(plant: str | None = None) -> None:
    """Puts the pretended GPU in place of a real one, for the rest of this process, with the fault `plant`."""
    from ostinato.bench import encoder, graphs, step_timing, throughput
    from ostinato.bench.gpu import kernel_times, parts, recurrences
    from ostinato.bench.roofline import decode_bytes
    from ostinato.bench.statistics import ArrivalTimes, GraphStepTimes
    from ostinato.engine import core
    from ostinato.graphs import cuda
    from ostinato.ops.kernel_cost import StepShape
    from ostinato.ops.triton import common
    from ostinato.plan.device import detect
    from ostinato.plan.device.gpu_catalogue import CATALOGUE
    from ostinato.plan.prediction import StepPredictor

    def changed(module: Any, name: str, by: Callable[..., Any]) -> None:
        """Replaces a function by one that gets it as its first argument."""
        setattr(module, name, partial(by, getattr(module, name)))

    def slowed(name: str) -> float:
        return SLOWER if plant == name else 1.0

    gpu = replace(CATALOGUE["h100-80gb"], name="pretended", bandwidth=BANDWIDTH, source="pretended")
    changed(detect, "_detect_gpu", lambda real, *_: gpu)
    changed(detect, "_torch_supports_cuda", lambda real: True)

    def in_cpu_memory(real: Callable[..., Any], *args: Any) -> Any:
        plan = real(*args)
        return replace(plan, settings=plan.settings.model_copy(update={"device": "cpu"}))

    changed(core, "make_plan", in_cpu_memory)
    for module in (cuda, kernel_times):
        changed(module, "CudaDriver", lambda real, device: PretendedDriver())
    changed(kernel_times, "operation_times", lambda real, *args: real(*args, driver=PretendedDriver()))

    def run(real: Callable[..., None], *args: Any, **arguments: Any) -> None:
        start = partial(real, *args, **arguments)
        if PretendedSegment.recording is not None:
            PretendedSegment.recording.launch(start)
        else:
            start()

    changed(common, "run", run)

    # The clock.
    def rounds(real: Callable[..., Any], engine: Any, workload: Any, batch_size: int, say: Any) -> list[Any]:
        context = workload.prompt_len + workload.output_len / 2
        needed = decode_bytes(engine.spec, engine.plan, batch_size, context)
        assert needed is not None
        seconds = needed.total / BANDWIDTH / REACHED * slowed("slow-step")
        return [
            replace(
                trace,
                token_times=[[seconds * (i + 1) for i in range(len(times))] for times in trace.token_times],
                step_ends=[seconds * (i + 1) for i in range(len(trace.step_ends))],
            )
            for trace in real(engine, workload, batch_size, say)
        ]

    changed(throughput, "run_rounds", rounds)

    def of_case(real: Callable[..., Any], case: Any, *args: Any) -> tuple[float, bool]:
        _, has_graph = real(case, *args)
        return case.num_bytes / BANDWIDTH / REACHED * slowed("slow-update"), has_graph

    changed(recurrences, "graph_seconds", of_case)
    changed(recurrences, "best_seconds", lambda real, play, *_: play() or 1.0)

    def turns(real: Callable[..., Any], runner: Any, steps: Any, number: int, say: Any) -> list[Any]:
        settings, found = runner.plan.settings, []
        machine = StepPredictor(runner.model.spec, settings.dtype, settings.ssm_state_dtype, BANDWIDTH, 1e15)
        for each in real(runner, steps, number, say):
            shape = StepShape(each.rows, 1, steps[each.rows].rows[0].start, decodes=True)
            seconds = machine.predict(shape).model_seconds * slowed("slow-graph")
            found.append(GraphStepTimes(each.rows, [2 * seconds] * len(each.eager), [seconds] * len(each.graph)))
        return found

    changed(step_timing, "take_turns", turns)
    changed(graphs, "_run", lambda real, *args, **kwargs: real(*args, **kwargs) and 1000.0)
    changed(
        encoder,
        "_in_turns",
        lambda real, *args: [ArrivalTimes([2e-3] * len(each.eager), [1e-3] * len(each.graph)) for each in real(*args)],
    )

    def taken(_: Callable[..., Any], engine: Any) -> dict[str, int]:
        used = engine.plan.memory.used
        return {"reserved_peak": used * 3 // 2 if plant == "over-plan" else used, "device_used": used}

    changed(parts, "taken_bytes", taken)
    if plant is not None:
        _plant(plant, changed)


def _plant(plant: str, changed: Callable[..., None]) -> None:
    from ostinato.bench.gpu import parts
    from ostinato.graphs.tape import Tape
    from ostinato.ops.triton import attention, pointwise, ssd

    def host_read(real: Callable[..., Any], q: Any, *args: Any, **kwargs: Any) -> Any:
        return real(q, *args, **kwargs) if q.sum().item() < float("inf") else q

    def not_finite(real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = real(*args, **kwargs)
        result[-1] = float("nan")
        return result

    replays = [0]

    def stale(real: Callable[..., Any], tape: Any, step: Any) -> Any:
        replays[0] += 1
        return real(tape, step) if replays[0] % 4 else tape._result

    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("a step failed")

    match plant:
        case "wrong-kernel":
            changed(pointwise, "rms_norm", lambda real, *args, **kwargs: real(*args, **kwargs) * 1.01)
        case "host-read":
            changed(attention, "attention", host_read)
        case "stale-graph":
            real = Tape.replay
            Tape.replay = lambda tape, step: stale(real, tape, step)  # type: ignore[method-assign, assignment]
        case "wrong-scan":
            changed(ssd, "ssd_scan", not_finite)
        case "failing-step":
            changed(parts, "run_batch", fails)


def pytest_configure() -> None:
    """With `-p tests.support.pretended_gpu`, tests meet a wrong kernel."""

    def changed(module: Any, name: str, by: Callable[..., Any]) -> None:
        setattr(module, name, partial(by, getattr(module, name)))

    _plant("wrong-kernel", changed)
