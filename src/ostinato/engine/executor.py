"""Executors of steps: computation and bookkeeping one after the other, or overlapped."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from ostinato.runner.model_runner import ModelRunner
from ostinato.sampling.sampler import SampledTokens
from ostinato.scheduler.batch import Batch, StepResult


class StepHandle(Protocol):
    """A step in flight."""

    @property
    def batch(self) -> Batch: ...

    def wait(self) -> StepResult:
        """Wait for the step, and return its result. Raises the error that ended it."""


class StepExecutor(Protocol):
    """Executor of steps."""

    overlaps: bool
    """True if a step may be started before the previous one is finished."""

    def submit(self, batch: Batch) -> StepHandle:
        """Start a step, which follows the one started last; its rows may need that one's tokens."""

    def close(self) -> None:
        """Free the executor. No step will follow."""


class SyncExecutor:
    """Sync executor: each step is computed when its result is asked for."""

    overlaps = False

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    def submit(self, batch: Batch) -> StepHandle:
        return _DeferredStep(batch, self._runner)

    def close(self) -> None:
        pass


class _DeferredStep:
    """A step that is computed when its result is asked for."""

    def __init__(self, batch: Batch, runner: ModelRunner) -> None:
        self.batch, self._runner = batch, runner

    def wait(self) -> StepResult:
        return self._runner.execute(self.batch)


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
        follows = any(row.previous_row is not None for row in batch.rows)
        self._last = self._thread.submit(_launch, self._runner, batch, self._last if follows else None)
        return _LaunchedStep(batch, self._last)

    def close(self) -> None:
        self._thread.shutdown()


class _LaunchedStep:
    """A step that the thread launches."""

    def __init__(self, batch: Batch, launched: Future[SampledTokens]) -> None:
        self.batch, self._launched = batch, launched

    def wait(self) -> StepResult:
        return StepResult(tuple(self._launched.result().results()))


def _launch(runner: ModelRunner, batch: Batch, previous: Future[SampledTokens] | None) -> SampledTokens:
    """Launch a step. If it follows a failed step, it fails with that one's error."""
    return runner.launch(batch, None if previous is None else previous.result())
