"""Steps of an engine: each is scheduled, computed and finished, one after the other or overlapped."""

from __future__ import annotations

import time

from ostinato.engine.run.order import StepExecutor, StepHandle
from ostinato.engine.speculation import SpeculationMonitor
from ostinato.engine.unfinished import OutputProcessor
from ostinato.errors import RankError
from ostinato.observe.counts import EngineCounts
from ostinato.observe.histograms import EngineHistograms
from ostinato.schedule.batch import StepResult
from ostinato.schedule.scheduler import Scheduler


class Steps:
    """Step loop, which holds the step in flight, if there is one, between two calls."""

    def __init__(
        self,
        order: StepExecutor,
        scheduler: Scheduler,
        unfinished: OutputProcessor,
        counts: EngineCounts,
        meter: EngineHistograms,
        speculation: SpeculationMonitor | None,
    ) -> None:
        self._order, self._scheduler, self._unfinished = order, scheduler, unfinished
        self._counts, self._meter, self._speculation = counts, meter, speculation
        self._running: StepHandle | None = None

    @property
    def is_running(self) -> bool:
        """True while a step is in flight."""
        return self._running is not None

    def run(self) -> None:
        """Run one step. See `EngineCore.step` for the errors raised."""
        begin = time.perf_counter()
        if self._running is None:
            self._running = self._start()
        scheduled = time.perf_counter()
        if self._running is not None:
            self._finish(self._running, begin, scheduled - begin, goes_on=self._order.overlaps)

    def settle(self) -> None:
        """Finish the step in flight, if there is one. The next call of `EngineCore.step` returns what it changed."""
        if self._running is not None:
            self._finish(self._running, time.perf_counter(), 0.0, goes_on=False)

    def close(self) -> None:
        """Close the executor. No step will follow."""
        self._order.close()

    def _start(self) -> StepHandle | None:
        batch = self._scheduler.schedule()
        if not batch.rows:
            return None
        if batch.new_request_ids:
            self._unfinished.note_scheduled(batch.new_request_ids)
        return self._order.submit(batch)

    def _start_ahead(self) -> StepHandle | None:
        batch = self._scheduler.schedule_ahead()
        return None if batch is None else self._order.submit(batch)

    def _finish(self, running: StepHandle, begin: float, bookkeeping: float, *, goes_on: bool) -> None:
        """Start the next step if the executor overlaps (`goes_on`), wait for the running one, and use its result."""
        batch, scheduler = running.batch, self._scheduler
        self._running = None
        following: StepHandle | None = None
        result: StepResult | None = None
        finished = scheduling = time.perf_counter()
        try:
            following = self._start_ahead() if goes_on else None
            bookkeeping += time.perf_counter() - scheduling
            result = running.wait()
            finished = time.perf_counter()
            updates = scheduler.update(result)
        except RankError as error:
            if scheduler.is_in_flight(batch):
                self._unfinished.process_updates(scheduler.fail(batch, error))
            raise
        except Exception as error:
            if not scheduler.is_in_flight(batch):
                raise  # processing the result failed: a bug, not a failed step
            result, following, updates = None, None, scheduler.fail(batch, error)
        except BaseException as error:
            if scheduler.is_in_flight(batch):
                interrupted = RuntimeError(f"the step was interrupted: {error!r}")
                self._unfinished.process_updates(scheduler.fail(batch, interrupted), notify=False)  # the exception reports it
            raise
        self._running = following
        bookkeeping += time.perf_counter() - finished
        self._unfinished.process_updates(updates)
        generated = sum([len(update.token_ids) for update in updates])
        seconds = time.perf_counter() - begin
        computed = batch.num_tokens
        self._counts.count_step(len(batch.rows), batch.num_decode_rows, computed, generated, seconds, bookkeeping)
        self._meter.step.observe(seconds)
        self._meter.step_tokens.observe(computed)
        if self._speculation is not None and result is not None:
            self._speculation.count_step(batch, result, seconds)
