"""Executors of steps: computation and bookkeeping one after the other, or overlapped."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from ostinato.runner.model_runner import ModelRunner
from ostinato.sampling.sampler import SampledTokens
from ostinato.scheduler.batch import Batch, StepResult


@dataclass(frozen=True)
class StepHandle:
    """A step in flight. `result` waits for it, and raises the error that ended it."""

    batch: Batch
    wait: Callable[[], StepResult]


class StepExecutor(Protocol):
    """Executor of steps."""

    overlaps: bool
    """True if a step may be started before the previous one is finished."""

    def submit(self, batch: Batch) -> StepHandle:
        """Start a step, which follows the one started last; its rows may need that one's tokens."""
        ...

    def close(self) -> None:
        """Free the executor. No step will follow."""
        ...


class SyncExecutor:
    """Sync executor: each step is computed when its result is asked for."""

    overlaps = False

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    def submit(self, batch: Batch) -> StepHandle:
        return StepHandle(batch, lambda: self._runner.execute(batch))

    def close(self) -> None:
        pass


class OverlapExecutor:
    """Overlap executor: a thread computes the steps, in their order, while others are scheduled and delivered.

    So a step's inputs are written before the next step writes to the same memory, even if that memory was given to
    another request meanwhile: all memory of a step is on the device, and the host only assigns it. Kernels and torch
    release the GIL while they compute. On a GPU the thread only launches: the next step is launched while the device
    computes, and `StepHandle.wait` waits for the tokens.
    """

    overlaps = True

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._thread = ThreadPoolExecutor(1, "ostinato-steps")
        self._last: Future[SampledTokens] | None = None

    def submit(self, batch: Batch) -> StepHandle:
        last = self._last if any(row.previous_row is not None for row in batch.rows) else None
        future = self._last = self._thread.submit(_launch, self._runner, batch, last)
        return StepHandle(batch, lambda: StepResult(tuple(future.result().results())))

    def close(self) -> None:
        self._thread.shutdown()


def _launch(runner: ModelRunner, batch: Batch, before: Future[SampledTokens] | None) -> SampledTokens:
    """Launch a step. If it follows a failed step, it fails with that one's error."""
    return runner.launch(batch, None if before is None else before.result())
