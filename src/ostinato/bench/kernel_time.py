"""How much of a step's time is spent in kernels, on a CPU: a stopwatch where the recorder listens."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from ostinato.bench.decode_steps import Work, run_eagerly, seconds_of
from ostinato.bench.graph_figures import KernelShares
from ostinato.bench.stopwatch import Stopwatch
from ostinato.engine.run.inputs import write_step
from ostinato.engine.run.runner import Runner
from ostinato.graphs.buffers import StepBuffers
from ostinato.graphs.graphs import Graphs, persistent_storages
from ostinato.graphs.tape import Tape, TapeBackend
from ostinato.layers.step import StepInputs
from ostinato.ops.native import NativeKernel
from ostinato.ops.recording import Kernel, Recorder, Tap
from ostinato.schedule.batch import Batch

PASSES = 5


class TimedTap(Tap):
    """A model's tap, for a backend whose tapes are to hold timed kernels: what it records, it records so."""

    def __init__(self, tap: Tap, stopwatch: Stopwatch) -> None:
        self._tap = tap
        self._stopwatch = stopwatch

    @property
    def recorder(self) -> Recorder | None:  # type: ignore[override]
        return self._tap.recorder

    @recorder.setter
    def recorder(self, recorder: Recorder | None) -> None:
        self._tap.recorder = None if recorder is None else _TimedRecorder(recorder, self._stopwatch)


class _TimedBackend(TapeBackend):
    """Tapes whose runs of adjacent native kernels, each one call of the extension, are under the stopwatch too."""

    def __init__(self, tap: Tap, persistent: Mapping[int, str], device: torch.device, stopwatch: Stopwatch) -> None:
        super().__init__(TimedTap(tap, stopwatch), persistent, device)

        class TimedTape(Tape):
            def _add_program(self, program: Any, tokens: int) -> None:
                super()._add_program(program, tokens)
                self._plays[-1] = stopwatch.timed("program", self._plays[-1])

        self.tape_type = TimedTape


class _TimedRecorder:
    def __init__(self, recorder: Recorder, stopwatch: Stopwatch) -> None:
        self._recorder = recorder
        self._stopwatch = stopwatch
        self.split = recorder.split

    def kernel(self, name: str, kernel: Kernel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        timed = kernel if isinstance(kernel, NativeKernel) else self._stopwatch.timed(name, kernel)
        return self._recorder.kernel(name, timed, args, kwargs)


@torch.inference_mode()
def kernel_shares(runner: Runner, steps: Mapping[int, Batch], passes: int = PASSES) -> dict[int, KernelShares]:
    """By number of rows: the part of a step's time that its kernels take, in the shortest of `passes` passes.

    The stopwatch's own time counts as the rest, which it makes larger by about a microsecond per kernel. Tapes are
    captured anew, with timed kernels in them.
    """
    stopwatch = Stopwatch()
    tap = runner.model.build.ops.tap
    graphs = _timed_graphs(runner, steps, stopwatch)

    def replay(step: Batch) -> torch.Tensor:
        return graphs.run(write_step(graphs.buffers, step, runner.block_size))

    for step in steps.values():
        replay(step)  # captured here, as the tap cannot hold two recorders
    shares: dict[int, KernelShares] = {}
    tap.recorder = stopwatch
    try:
        for size, step in steps.items():
            ways = (run_eagerly(runner, step), partial(replay, step))
            passes_of = [[_timed_pass(runner, stopwatch, work) for work in ways] for _ in range(passes)]
            # In the shortest pass the least of other work came between.
            shares[size] = KernelShares(*(min(one)[1] for one in zip(*passes_of, strict=True)))
    finally:
        tap.recorder = None
    return shares


def _timed_pass(runner: Runner, stopwatch: Stopwatch, work: Work) -> tuple[float, float]:
    """Seconds of a step, and the part of them in kernels."""
    stopwatch.calls.clear()
    seconds = seconds_of(runner, work)
    return seconds, stopwatch.seconds / seconds


def _timed_graphs(runner: Runner, steps: Mapping[int, Batch], stopwatch: Stopwatch) -> Graphs:
    """The runner's graphs once more, each captured when first used."""
    plan = runner.plan
    buffers = StepBuffers(
        plan.settings.max_num_seqs,
        plan.settings.max_num_batched_tokens,
        max(len(row.block_table) for step in steps.values() for row in step.rows),
        plan.memory.slots_per_request,
        runner.device,
        runner.takes_images,
    )
    persistent = persistent_storages(buffers, runner.model, runner.memory)
    backend = _TimedBackend(runner.model.build.ops.tap, persistent, runner.device, stopwatch)

    def forward(step: StepInputs) -> torch.Tensor:
        return runner.model(step, runner.memory)

    return Graphs(plan.capture, backend, forward, buffers, runner.memory)
