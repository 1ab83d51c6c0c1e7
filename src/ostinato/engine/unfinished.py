"""Output processor: the unfinished requests of an engine, from their addition to their last output."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

from ostinato.engine.generation import Generation
from ostinato.engine.outputs import RequestOutput
from ostinato.errors import RequestError
from ostinato.observe.histograms import Meter
from ostinato.plan.layouts.requests import RequestLengths
from ostinato.schedule.request import FinishReason, RequestUpdate
from ostinato.schedule.scheduler import Scheduler


class Unfinished:
    """Unfinished requests as their callers made them, with the outputs that changed and were not returned yet."""

    def __init__(self, scheduler: Scheduler, meter: Meter, lengths: RequestLengths) -> None:
        """Create an empty table. `meter` and `lengths` record how long each finished request took and was."""
        self.generations: dict[str, Generation] = {}
        """Request states by request id."""
        self.of_sample: dict[str, Generation] = {}
        """Request states by the id of each of their samples."""
        self._scheduler = scheduler
        self._meter, self._lengths = meter, lengths
        self._changed: dict[str, RequestOutput] = {}
        """Outputs that no call of `take_changed` has returned yet."""

    @property
    def has_changed(self) -> bool:
        """True if an output has changed and was not returned yet."""
        return bool(self._changed)

    def take_changed(self) -> list[RequestOutput]:
        """Return the outputs that have changed since the last call."""
        changed, self._changed = self._changed, {}
        return list(changed.values())

    def free_id(self, number: int) -> str:
        """Return a free id for a request that came without one, with this number or the next free one.

        A caller may already use an id of this form.
        """
        numbered = (f"request-{each}" for each in itertools.count(number))
        return next(name for name in numbered if name not in self.generations)

    def check_id(self, generation: Generation) -> None:
        """Raise RequestError if the id of a request, or that of one of its samples, is in use."""
        # The scheduler forgets a sample that has ended; its id stays in use until its request has ended.
        request_id = generation.output.request_id
        if request_id in self.generations or any(r.request_id in self.of_sample for r in generation.requests):
            raise RequestError(f"a request with the id {request_id!r} is unfinished; choose another id")

    def enter(self, generation: Generation) -> None:
        """Add the unfinished samples of a request, whose id is free, to the scheduler.

        RequestError if one can never be served; nothing is changed then.
        """
        added = []
        try:
            for request, output in zip(generation.requests, generation.output.outputs, strict=True):
                if not output.finished:
                    self._scheduler.add(request)
                    added.append(request.request_id)
        except RequestError:
            for sample_id in added:
                self._scheduler.abort(sample_id)
            raise
        self.generations[generation.output.request_id] = generation
        self.of_sample |= {request.request_id: generation for request in generation.requests}

    def note_first(self, request_ids: Sequence[str]) -> None:
        """Note the time at which a step computes the first part of these samples."""
        now = time.monotonic()
        for request_id in request_ids:
            times = self.of_sample[request_id].output.times
            if times.scheduled is None:
                times.scheduled = now
                self._meter.queue.observe(now - times.arrival)

    def deliver(self, updates: Sequence[RequestUpdate], *, tells: bool = True) -> None:
        """Add a step's results to the outputs, and note which changed unless `tells` is False."""
        ended: dict[str, Generation] = {}
        now = time.monotonic()
        for update in updates:
            generation = self.of_sample[update.request_id]
            is_stopped = generation.take(update, now, self._meter)
            if is_stopped:
                self._scheduler.finish(update.request_id, FinishReason.STOP)
            output = generation.output
            if tells:
                self._changed[output.request_id] = output
            if is_stopped or update.finish_reason is not None:
                ended[output.request_id] = generation
        for generation in ended.values():
            if generation.output.finished:  # all its samples have ended
                generation.measure(now, self._meter)
                generation.count_lengths(self._lengths)
                self._forget(generation)

    def move(self, generation: Generation) -> None:
        """End a request that another engine continues."""
        for request in generation.requests:
            self._scheduler.finish(request.request_id, FinishReason.MOVED)
        generation.move()
        self._forget(generation)
        self._changed[generation.output.request_id] = generation.output

    def abort(self, generation: Generation) -> None:
        """End an abandoned request without returning its output."""
        for request in generation.requests:
            self._scheduler.abort(request.request_id)
        generation.abort()
        self._forget(generation)
        self._changed.pop(generation.output.request_id, None)

    def _forget(self, generation: Generation) -> None:
        del self.generations[generation.output.request_id]
        for request in generation.requests:
            del self.of_sample[request.request_id]
