"""Overlap: the batch rows of the next step, scheduled before the tokens of the step in flight are known."""

from __future__ import annotations

from enum import StrEnum

from ostinato.cache.manager import CacheManager
from ostinato.schedule.batch import BatchRow
from ostinato.schedule.flight import InFlightStep
from ostinato.schedule.queues import RequestQueues
from ostinato.schedule.request import Request, make_next_step_row


class OverlapBlocker(StrEnum):
    """Reasons why a step is not scheduled before the one in flight is over."""

    PROMPT = "prompt"
    """A prompt is not computed to its end, or a running request is not in the step in flight."""
    ADMISSION = "admission"
    """A waiting request may find a batch row, tokens and memory in the next step."""
    TOKEN = "token"
    """Sampling a request's next token depends on the one before: a guide, penalties, `min_tokens`."""
    MEMORY = "memory"
    """A request finds no block for the next token, and none is preempted while a step writes to its memory."""


def continuing_requests(
    step: InFlightStep, queues: RequestQueues, max_num_seqs: int, has_refused: bool
) -> list[tuple[int, Request]] | OverlapBlocker:
    """Return the requests that continue after `step`, in order of rank, with the index of their row in it.

    Return the cause instead if the next step has to wait for `step`. The next step has decode rows alone, of the
    requests in `step`: each computes the token that `step` samples for it. Requests whose length `step` is known to
    complete are left out. `is_head_blocked`: the first waiting request finds no memory unless another one ends.
    """
    if not all(row.samples for row in step.batch.rows):
        return OverlapBlocker.PROMPT
    place_of = {row.request_id: place for place, row in enumerate(step.batch.rows)}
    found: list[tuple[int, Request]] = []
    for request in queues.running:
        place = place_of.get(request.request_id)
        if place is None:
            return OverlapBlocker.PROMPT
        if request.num_tokens + 1 < request.max_num_tokens:
            found.append((place, request))
    if queues.waiting:
        somebody_ends = len(found) < len(queues.running)
        if somebody_ends or (len(queues.running) < max_num_seqs and not has_refused):
            return OverlapBlocker.ADMISSION
    if any(len(request.output_token_ids) < request.num_lookback_outputs for _, request in found):
        return OverlapBlocker.TOKEN
    return found


def next_step_row(request: Request, cache: CacheManager, place: int, spare_slots: int) -> BatchRow:
    """Return the row after row `place` of the step in flight. The request has the block of its token.

    No checkpoint takes one of the last `spare_slots` slots.
    """
    id, placement = request.request_id, request.checkpoint_positions
    keeps = request.block_hashes is not None and placement is not None and placement.mode != "none"
    slots = cache.next_step_slots(id, request.num_tokens, keeps, spare_slots)
    if cache.window_blocks is not None:
        cache.allocate_window_blocks(id, request.num_tokens + 1)
    return make_next_step_row(request, place, cache.request_cache(id), slots)
