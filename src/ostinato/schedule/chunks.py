"""Prefill rows: the number of prompt tokens that a step takes, and the slots and images that they need."""

from __future__ import annotations

from ostinato.cache.manager import CacheManager
from ostinato.schedule.batch import MediaUse, BatchRow
from ostinato.schedule.limits import SchedulerLimits
from ostinato.schedule.media import EncoderScheduler
from ostinato.schedule.queues import RequestQueues
from ostinato.schedule.request import Request, is_decoding, make_row


class PrefillScheduler:
    """Maker of the rows of running requests that compute a prompt, or known outputs after a preemption."""

    def __init__(
        self, limits: SchedulerLimits, cache: CacheManager, queues: RequestQueues, media: EncoderScheduler | None
    ) -> None:
        self._limits = limits
        self._cache = cache
        self._queues = queues
        self._media = media

    def next_row(self, request: Request, budget: int, num_drafts: int, spare_slots: int) -> BatchRow | None:
        """Return the next row of `request`, of at most `budget` tokens; None if it must wait for slots or image cells.

        No checkpoint takes one of the last `spare_slots` slots.
        """
        if not self._cache.allocate_write_slots(request.request_id, spare_slots):
            return None
        assert request.checkpoint_positions is not None, "a running request knows where its checkpoints go"
        start = request.num_computed_tokens
        end = request.checkpoint_positions.chunk_end(start, start + self._chunk_tokens(request, budget, num_drafts))
        media: tuple[MediaUse, ...] = ()
        if self._media is not None and request.media:
            reach = self._media.max_chunk_end(request, start, end)
            if reach == start:
                return None
            end = request.checkpoint_positions.chunk_end(start, reach)
            media = self._media.pin_images(request, start, end)
        positions = request.checkpoint_positions.positions_inside(start, end) if end - start > 1 else []
        if positions:
            self._cache.reserve_checkpoints(request.request_id, positions, spare_slots)
        if self._cache.window_blocks is not None:
            self._cache.allocate_window_blocks(request.request_id, end)
        return make_row(request, self._cache.request_cache(request.request_id), end - start, media=media)

    def _chunk_tokens(self, request: Request, budget: int, num_drafts: int) -> int:
        """Return how many prompt tokens a step with room for `budget` more tokens should take at most.

        The step has `num_drafts` drafts per decode row. A prompt that does not fit fills the step. It stops at a size
        that has a graph if no request waits longer for that: it needs no more steps of such a size than of the full
        one, and no other request has a prompt that could fill the step.
        """
        limits, remaining = self._limits, request.num_tokens - request.num_computed_tokens
        if not limits.graph_tokens or remaining <= budget:
            return min(budget, remaining)
        room = budget - (limits.max_num_batched_tokens - limits.graph_tokens)
        num_later = self._tokens_of_others(request, num_drafts)
        if room <= 0 or num_later is None:
            return budget
        steps_later = -(-(remaining - budget) // limits.max_num_batched_tokens)
        return room if remaining - room <= steps_later * (limits.graph_tokens - num_later) else budget

    def _tokens_of_others(self, request: Request, num_drafts: int) -> int | None:
        """Return the tokens of each later step that other requests take if all of them decode.

        Return None if one of them has a prompt.
        """
        queues = self._queues
        if queues.waiting or not all(other is request or is_decoding(other) for other in queues.running):
            return None
        return (len(queues.running) - 1) * (1 + num_drafts)
