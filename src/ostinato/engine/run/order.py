"""The order of a step's computation and its bookkeeping: one after the other, or side by side."""

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
    """A step on its way. `result` waits for it, and raises what ended it."""

    batch: Batch
    result: Callable[[], StepResult]


class Order(Protocol):
    """How steps are computed."""

    is_ahead: bool
    """Whether a step may be started before the one in front of it is over."""

    def start(self, batch: Batch) -> Started:
        """The step follows the one started last, whose tokens its rows may need."""
        ...

    def close(self) -> None:
        """No step will follow."""
        ...


class InTurn:
    """Each step is computed when its result is asked for."""

    is_ahead = False

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def start(self, batch: Batch) -> Started:
        return Started(batch, lambda: self._runner.run(batch))

    def close(self) -> None:
        pass


class OneAhead:
    """A thread of its own computes the steps, in their order, while others are scheduled and delivered.

    So whatever a step reads is written before the next one writes there, also to memory that changed hands meanwhile:
    all that a step touches lies on the device, and the host only says what is whose. Kernels and torch let go of
    Python's lock while they compute. On a GPU the thread only launches: the next step is launched while the device
    computes, and waiting for tokens is `Started.result`'s.
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
    """A step ahead of a failed one fails with it."""
    return runner.launch(batch, None if before is None else before.result())
