"""Export of a request, between two steps and with none in flight."""

from __future__ import annotations

import time
from typing import Any

from ostinato.cache.manager import CacheManager
from ostinato.engine.generation import RequestState
from ostinato.engine.move.form import RequestSnapshot, SampleSnapshot, pack_snapshot
from ostinato.engine.move.media import export_media
from ostinato.engine.move.parts import ByteParts
from ostinato.engine.outputs import CompletionOutput
from ostinato.schedule.carry import CopiedBlocks, export_kv
from ostinato.schedule.request import Request, RequestStatus


def make_export(generation: RequestState, cache: CacheManager, identity: dict[str, Any]) -> bytes:
    """Return the export of a request, with blocks, window blocks and states of all its running outputs.

    The request itself is not changed.
    """
    parts, copies = ByteParts(), CopiedBlocks()
    first, output = generation.requests[0], generation.output
    times, now = output.times, time.monotonic()
    ages = [None if each is None else now - each for each in (times.scheduled, times.first_token, times.last_token)]
    samples = [
        _sample(request, each, cache, parts, copies)
        for request, each in zip(generation.requests, output.outputs, strict=True)
    ]
    moved = RequestSnapshot(
        identity=identity,
        request_id=output.request_id,
        prompt=output.prompt,
        prompt_token_ids=output.prompt_token_ids,
        params=generation.params.model_dump(mode="json", exclude_unset=True),
        seed=generation.seed,
        priority=first.priority,
        cache_salt=first.cache_salt,
        client=first.client,
        pooling=generation.pooling,
        arrival=now - times.arrival,
        scheduled=ages[0],
        first_token=ages[1],
        last_token=ages[2],
        prompt_logprobs=output.prompt_logprobs,
        samples=samples,
        media=None if generation.media is None else export_media(generation.media, parts),
    )
    return pack_snapshot(moved, parts.parts)


def _sample(
    request: Request, output: CompletionOutput, cache: CacheManager, parts: ByteParts, copies: CopiedBlocks
) -> SampleSnapshot:
    runs = request.status is RequestStatus.RUNNING
    num_computed = request.num_computed_tokens if runs else request.num_imported_tokens
    carried = None if output.finished else export_kv(request, cache, copies)
    state = None if carried is None or carried.state is None else parts.add(carried.state)
    return SampleSnapshot(
        token_ids=output.token_ids,
        text=output.text,
        logprobs=output.logprobs,
        cumulative_logprob=output.cumulative_logprob,
        finish_reason=output.finish_reason,
        stop_reason=output.stop_reason,
        cache=request.cache_report,
        num_prompt_logprobs=request.num_prompt_logprobs,
        num_preemptions=request.num_preemptions,
        num_computed=0 if output.finished else num_computed,
        has_memory=carried is not None,
        blocks=[] if carried is None else [parts.add_once(each) for each in carried.blocks],
        panes=[] if carried is None else [parts.add_once(each) for each in carried.window_blocks],
        state=state,
    )
