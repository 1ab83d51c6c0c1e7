"""The steps in flight, and the memory of requests that ended while such a step writes to it."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from ostinato.kv_cache.encoder_cache import EncoderCache
from ostinato.kv_cache.manager import CacheManager
from ostinato.scheduler.batch import Batch
from ostinato.scheduler.request import Request


@dataclass(frozen=True, slots=True)
class InFlightStep:
    """A step that was scheduled and is not over."""

    batch: Batch
    requests: list[Request]
    is_ahead: bool = False
    """True if it was scheduled before the step before it was over."""


class InFlightSteps:
    """The steps in flight: none, one, or two. It frees what requests hold as soon as no step writes to it."""

    def __init__(self, cache: CacheManager, encoder_cache: EncoderCache | None) -> None:
        self._cache, self._encoder_cache = cache, encoder_cache
        self._steps: list[InFlightStep] = []
        self._ended: dict[str, bool] = {}
        """Requests that hold memory though they have ended, and whether what they hold is suspect."""

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[InFlightStep]:
        return iter(self._steps)

    @property
    def first(self) -> InFlightStep:
        """The step that will be over first."""
        assert self._steps, "there is no step in flight"
        return self._steps[0]

    @property
    def delayed_request_ids(self) -> Collection[str]:
        """The ids of requests that have ended, to whose memory a step in flight still writes."""
        return self._ended.keys()

    def has(self, batch: Batch) -> bool:
        return any(step.batch is batch for step in self._steps)

    def add(self, step: InFlightStep) -> None:
        self._steps.append(step)

    def finish_first(self) -> None:
        """Remove the first step, which is over."""
        del self._steps[0]
        if self._ended:
            written = self._written()
            for request_id in [id for id in self._ended if id not in written]:
                self._give_back(request_id, self._ended.pop(request_id))

    def finish_all(self) -> None:
        """Remove the first step, which is over, and the step after it."""
        del self._steps[1:]
        self.finish_first()

    def free(self, request_id: str, may_be_corrupt: bool = False) -> None:
        """Free all that a request holds: now, or after a step in flight that may write to it.

        `is_suspect`: a step that failed may have written it.
        """
        if request_id in self._written():
            self._ended[request_id] = may_be_corrupt
        else:
            self._give_back(request_id, may_be_corrupt)

    def _written(self) -> set[str]:
        """Return the requests to whose memory steps in flight write."""
        return {row.request_id for step in self._steps for row in step.batch.rows}

    def _give_back(self, request_id: str, is_suspect: bool) -> None:
        self._cache.free(request_id)
        if self._encoder_cache is not None:
            self._encoder_cache.unpin_all(request_id, is_suspect)
