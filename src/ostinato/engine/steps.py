"""The steps of an engine: each is scheduled, computed and taken in, one after the other or one ahead."""

from __future__ import annotations

import time

from ostinato.engine.run.order import Order, Started
from ostinato.engine.speculation import Speculation
from ostinato.engine.unfinished import Unfinished
from ostinato.errors import RankError
from ostinato.observe.counts import EngineCounts
from ostinato.observe.histograms import Meter
from ostinato.schedule.batch import StepResult
from ostinato.schedule.scheduler import Scheduler


class Steps:
    """Holds the step that is on its way, if there is one, between two calls."""

    def __init__(
        self,
        order: Order,
        scheduler: Scheduler,
        unfinished: Unfinished,
        counts: EngineCounts,
        meter: Meter,
        speculation: Speculation | None,
    ) -> None:
        self._order, self._scheduler, self._unfinished = order, scheduler, unfinished
        self._counts, self._meter, self._speculation = counts, meter, speculation
        self._running: Started | None = None

    @property
    def is_running(self) -> bool:
        """Whether a step is on its way."""
        return self._running is not None

    def run(self) -> None:
        """Runs one step. See `Engine.step` for what it raises."""
        begin = time.perf_counter()
        if self._running is None:
            self._running = self._start()
        scheduled = time.perf_counter()
        if self._running is not None:
            self._finish(self._running, begin, scheduled - begin, goes_on=self._order.is_ahead)

    def settle(self) -> None:
        """Waits for the step that is on its way, if there is one: then none is in flight. The next call of
        `Engine.step` tells what it changed."""
        if self._running is not None:
            self._finish(self._running, time.perf_counter(), 0.0, goes_on=False)

    def close(self) -> None:
        """No step will follow."""
        self._order.close()

    def _start(self) -> Started | None:
        batch = self._scheduler.schedule()
        if not batch.rows:
            return None
        if batch.first:
            self._unfinished.note_first(batch.first)
        return self._order.start(batch)

    def _start_ahead(self) -> Started | None:
        batch = self._scheduler.schedule_ahead()
        return None if batch is None else self._order.start(batch)

    def _finish(self, running: Started, begin: float, bookkeeping: float, *, goes_on: bool) -> None:
        """Starts the step ahead, if it `goes_on`, waits for the one that is running, and takes in its result."""
        batch, scheduler = running.batch, self._scheduler
        self._running = None
        following: Started | None = None
        result: StepResult | None = None
        finished = scheduling = time.perf_counter()
        try:
            following = self._start_ahead() if goes_on else None
            bookkeeping += time.perf_counter() - scheduling
            result = running.result()
            finished = time.perf_counter()
            updates = scheduler.update(result)
        except RankError as error:
            if scheduler.is_in_flight(batch):
                self._unfinished.deliver(scheduler.fail(batch, error))
            raise
        except Exception as error:
            if not scheduler.is_in_flight(batch):
                raise  # taking the result in went wrong: a bug, and no step to fail
            result, following, updates = None, None, scheduler.fail(batch, error)
        except BaseException as error:
            if scheduler.is_in_flight(batch):
                interrupted = RuntimeError(f"the step was interrupted: {error!r}")
                self._unfinished.deliver(scheduler.fail(batch, interrupted), tells=False)  # the exception does
            raise
        self._running = following
        bookkeeping += time.perf_counter() - finished
        self._unfinished.deliver(updates)
        generated = sum([len(update.token_ids) for update in updates])
        seconds = time.perf_counter() - begin
        computed = batch.num_tokens
        self._counts.count_step(len(batch.rows), batch.num_decode_rows, computed, generated, seconds, bookkeeping)
        self._meter.step.observe(seconds)
        self._meter.step_tokens.observe(computed)
        if self._speculation is not None and result is not None:
            self._speculation.count_step(batch, result, seconds)
