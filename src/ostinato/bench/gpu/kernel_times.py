"""The time of each operation in a step on a GPU: all calls of one operation, captured as one graph and replayed.

A stopwatch around a call would time its launch. A graph of one operation has its kernels alone, back to back, over the
weights and states of all layers, so that no cache holds what the next call reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import torch

from ostinato.bench.roofline import best_seconds
from ostinato.bench.statistics import Calls
from ostinato.bench.step_timing import recording, seconds_of
from ostinato.graphs.cuda import CudaDriver, Driver
from ostinato.ops.dispatch import Kernel
from ostinato.runner.inputs import make_step_inputs
from ostinato.runner.model_runner import ModelRunner
from ostinato.scheduler.batch import Batch

Call = Callable[[], object]


class CallLog:
    """Recorder of the calls of a step by operation, to be repeated. Calls that a kernel makes belong to it."""

    def __init__(self) -> None:
        self.calls: dict[str, list[Call]] = {}
        self._is_inside = False

    def kernel(self, name: str, kernel: Kernel, args: tuple[object, ...], kwargs: dict[str, object]) -> torch.Tensor:
        """Record a kernel's call, as `ops.kernels.Recorder` describes."""
        if self._is_inside:
            return kernel(*args, **kwargs)
        self.calls.setdefault(name, []).append(partial(kernel, *args, **kwargs))
        self._is_inside = True
        try:
            return kernel(*args, **kwargs)
        finally:
            self._is_inside = False

    def split(
        self,
        name: str,  # noqa: ARG002
        function: Kernel,
        tensors: tuple[torch.Tensor, ...],
        others: tuple[object, ...],
    ) -> torch.Tensor:
        """Record a function that splits graphs, as `ops.kernels.Recorder` describes."""
        return function(*tensors, *others)


@torch.inference_mode()
def operation_times(
    runner: ModelRunner, step: Batch, rows: int, passes: int, driver: Driver | None = None
) -> tuple[Calls, tuple[str, ...]]:
    """Return (operation, mean seconds of a call) for every call of a step, `logits` of `rows` positions last.

    Also return the operations that no graph could hold; their times include the launches.

    States and caches of the step's slots and blocks are written again and again. `driver` replaces the GPU's own; on a
    CPU without one, calls are timed without a graph.
    """
    inputs = make_step_inputs(step, runner.block_size, runner.arrays, vision=runner.vision)
    log = CallLog()
    with recording(runner.model.build.ops.hook, log):
        hidden = runner.model(inputs, runner.layer_memory)
    log.calls["logits"] = [partial(runner.model.compute_logits, hidden[-rows:])]
    if driver is None and not runner.arrays.is_on_host:
        driver = CudaDriver(torch.device(runner.arrays.device))
    times, eager = [], []
    for name, calls in log.calls.items():
        play = None if driver is None else captured(calls, driver)
        if play is None and driver is not None:
            eager.append(name)
        seconds = best_seconds(play or partial(run_all, calls), runner.arrays.device, passes)
        times += [(name, seconds / len(calls))] * len(calls)
    return times, tuple(eager)


def captured(calls: Sequence[Call], driver: Driver) -> Call | None:
    """Return the replay of `calls` as one graph; None if they cannot be captured."""
    with driver.capture_stream():
        run_all(calls)  # compiles what is compiled at its first call
        segment = driver.new_segment()
        segment.begin()
        try:
            run_all(calls)
            segment.end()
        except RuntimeError:
            # A failed capture must be ended all the same; the first error has reported it.
            with suppress(RuntimeError):
                segment.end()
            return None
    return segment.replay


@torch.inference_mode()
def step_seconds(runner: ModelRunner, step: Batch, passes: int) -> float:
    """Return the shortest time of a step up to its hidden states, as the engine runs it, with writing its inputs."""
    run = partial(runner.execute_model, step)
    return min([seconds_of(runner, run) for _ in range(passes + 1)][1:])


def run_all(calls: Sequence[Call]) -> None:
    for call in calls:
        call()
