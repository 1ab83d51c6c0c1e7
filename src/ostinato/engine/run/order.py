"""Executors of steps: computation and bookkeeping one after the other, or overlapped."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from ostinato.engine.run.runner import Runner
from ostinato.sample.sampler import Sampled
from ostinato.schedule.batch import Batch, StepResult


@dataclass(frozen=True)
class Started:
    """A step in flight. `result` waits for it, and raises the error that ended it."""

    batch: Batch
    result: Callable[[], StepResult]


class Order(Protocol):
    """Executor of steps."""

    is_ahead: bool
    """True if a step may be started before the previous one is finished."""

    def start(self, batch: Batch) -> Started:
        """Start a step, which follows the one started last; its rows may need that one's tokens."""
        ...

    def close(self) -> None:
        """Free the executor. No step will follow."""
        ...


class InTurn:
    """Sync executor: each step is computed when its result is asked for."""

    is_ahead = False

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def start(self, batch: Batch) -> Started:
        return Started(batch, lambda: self._runner.run(batch))

    def close(self) -> None:
        pass


class OneAhead:
    """Overlap executor: a thread computes the steps, in their order, while others are scheduled and delivered.

    So a step's inputs are written before the next step writes to the same memory, even if that memory was given to
    another request meanwhile: all memory of a step is on the device, and the host only assigns it. Kernels and torch
    release the GIL while they compute. On a GPU the thread only launches: the next step is launched while the device
    computes, and `Started.result` waits for the tokens.
    """

    is_ahead = True

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._thread = ThreadPoolExecutor(1, "ostinato-steps")
        self._last: Future[Sampled] | None = None

    def start(self, batch: Batch) -> Started:
        last = self._last if any(row.follows is not None for row in batch.rows) else None
        future = self._last = self._thread.submit(_launch, self._runner, batch, last)
        return Started(batch, lambda: StepResult(tuple(future.result().results())))

    def close(self) -> None:
        self._thread.shutdown()


def _launch(runner: Runner, batch: Batch, before: Future[Sampled] | None) -> Sampled:
    """Launch a step. If it follows a failed step, it fails with that one's error."""
    return runner.launch(batch, None if before is None else before.result())
