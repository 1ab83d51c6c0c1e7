"""Output processor: the unfinished requests of an engine, from their addition to their last output."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

from ostinato.engine.generation import RequestState
from ostinato.engine.outputs import RequestOutput
from ostinato.errors import RequestError
from ostinato.observe.histograms import EngineHistograms
from ostinato.plan.layouts.requests import RequestLengths
from ostinato.schedule.request import FinishReason, RequestUpdate
from ostinato.schedule.scheduler import Scheduler


class OutputProcessor:
    """Unfinished requests as their callers made them, with the outputs that changed and were not returned yet."""

    def __init__(self, scheduler: Scheduler, meter: EngineHistograms, lengths: RequestLengths) -> None:
        """Create an empty table. `meter` and `lengths` record how long each finished request took and was."""
        self.request_states: dict[str, RequestState] = {}
        """Request states by request id."""
        self.state_by_sample: dict[str, RequestState] = {}
        """Request states by the id of each of their samples."""
        self._scheduler = scheduler
        self._meter, self._lengths = meter, lengths
        self._changed: dict[str, RequestOutput] = {}
        """Outputs that no call of `take_outputs` has returned yet."""

    @property
    def has_outputs(self) -> bool:
        """True if an output has changed and was not returned yet."""
        return bool(self._changed)

    def take_outputs(self) -> list[RequestOutput]:
        """Return the outputs that have changed since the last call."""
        changed, self._changed = self._changed, {}
        return list(changed.values())

    def new_request_id(self, number: int) -> str:
        """Return a free id for a request that came without one, with this number or the next free one.

        A caller may already use an id of this form.
        """
        numbered = (f"request-{each}" for each in itertools.count(number))
        return next(name for name in numbered if name not in self.request_states)

    def check_id(self, generation: RequestState) -> None:
        """Raise RequestError if the id of a request, or that of one of its samples, is in use."""
        # The scheduler forgets a sample that has ended; its id stays in use until its request has ended.
        request_id = generation.output.request_id
        if request_id in self.request_states or any(r.request_id in self.state_by_sample for r in generation.requests):
            raise RequestError(f"a request with the id {request_id!r} is unfinished; choose another id")

    def add(self, generation: RequestState) -> None:
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
        self.request_states[generation.output.request_id] = generation
        self.state_by_sample |= {request.request_id: generation for request in generation.requests}

    def note_scheduled(self, request_ids: Sequence[str]) -> None:
        """Note the time at which a step computes the first part of these samples."""
        now = time.monotonic()
        for request_id in request_ids:
            times = self.state_by_sample[request_id].output.times
            if times.scheduled is None:
                times.scheduled = now
                self._meter.queue.observe(now - times.arrival)

    def process_updates(self, updates: Sequence[RequestUpdate], *, notify: bool = True) -> None:
        """Add a step's results to the outputs, and note which changed unless `tells` is False."""
        ended: dict[str, RequestState] = {}
        now = time.monotonic()
        for update in updates:
            generation = self.state_by_sample[update.request_id]
            is_stopped = generation.apply(update, now, self._meter)
            if is_stopped:
                self._scheduler.finish(update.request_id, FinishReason.STOP)
            output = generation.output
            if notify:
                self._changed[output.request_id] = output
            if is_stopped or update.finish_reason is not None:
                ended[output.request_id] = generation
        for generation in ended.values():
            if generation.output.finished:  # all its samples have ended
                generation.record_latencies(now, self._meter)
                generation.record_lengths(self._lengths)
                self._remove(generation)

    def finish_moved(self, generation: RequestState) -> None:
        """End a request that another engine continues."""
        for request in generation.requests:
            self._scheduler.finish(request.request_id, FinishReason.MOVED)
        generation.mark_moved()
        self._remove(generation)
        self._changed[generation.output.request_id] = generation.output

    def abort(self, generation: RequestState) -> None:
        """End an abandoned request without returning its output."""
        for request in generation.requests:
            self._scheduler.abort(request.request_id)
        generation.mark_aborted()
        self._remove(generation)
        self._changed.pop(generation.output.request_id, None)

    def _remove(self, generation: RequestState) -> None:
        del self.request_states[generation.output.request_id]
        for request in generation.requests:
            del self.state_by_sample[request.request_id]
