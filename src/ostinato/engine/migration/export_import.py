"""Export and import of a request that moves to another engine, with its state.

A request is exported between two steps, when none is in flight.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from pydantic import ValidationError

from ostinato.engine.migration.wire_format import (
    ByteParts,
    RequestSnapshot,
    SampleSnapshot,
    check_identity,
    export_media,
    import_media,
    pack_snapshot,
    params_of,
    unpack_snapshot,
)
from ostinato.engine.output_processor import RequestState
from ostinato.engine.outputs import CompletionOutput, RequestTimes
from ostinato.engine.text.tokenizer import Tokenizer
from ostinato.errors import DamagedExport, MoveError
from ostinato.json_io import JsonObject
from ostinato.kv_cache.manager import CacheManager
from ostinato.kv_cache.marks import MAX_MARKS
from ostinato.kv_cache.request_cache import KVSnapshot, MemoryKind
from ostinato.media.media_prompt import MediaPrompt
from ostinato.sampling.grammar import Grammar
from ostinato.sampling.guide import Guide
from ostinato.scheduler.limits import max_total_tokens
from ostinato.scheduler.request import FinishReason, Request, RequestStatus
from ostinato.scheduler.scheduler import Scheduler

MAX_WAITING_BYTES = 2**30
"""Bytes of imported blocks, window blocks and states that may wait in memory until their requests are admitted.

Of a request beyond that, only the tokens are kept, and computed again.
"""

CopiedBlocks = dict[tuple[str, int, int], memoryview]
"""Copies that were made: ("block" or "window_block", its id, its computed tokens) -> contents."""


def restore_request(
    exported: bytes,
    request_id: str | None,
    *,
    identity: JsonObject,
    tokenizer: Tokenizer,
    vocab_size: int,
    eos_token_ids: frozenset[int],
    scheduler: Scheduler,
    max_ttl: float,
    compile_guide: Callable[[Guide], Grammar],
) -> RequestState:
    """Return the request state of an export, for an engine of this `identity`.

    Its id is the old one, unless `request_id` is given. Its marks are pinned for `max_ttl` seconds at most. Raises
    DamagedExport or ForeignExport; RequestError if its guide cannot be compiled.
    """
    snapshot, parts = unpack_snapshot(exported)
    check_identity(snapshot.identity, identity)
    params = params_of(snapshot)
    _check_tokens(snapshot, vocab_size)
    request_state = RequestState(
        snapshot.request_id if request_id is None else request_id,
        snapshot.prompt,
        snapshot.prompt_token_ids,
        params,
        tokenizer,
        eos_token_ids,
        max_model_len=scheduler.limits.max_model_len,
        priority=snapshot.priority,
        cache_salt=snapshot.cache_salt,
        default_seed=snapshot.seed,
        grammar=None if params.guide is None else compile_guide(params.guide),
        media=_media_of(snapshot, parts),
        client=snapshot.client,
        pooling=snapshot.pooling,
        marks=[replace(mark, ttl=min(mark.ttl, max_ttl)) for mark in snapshot.marks],
    )
    _resume(request_state, snapshot, parts, scheduler)
    _limit_imported_bytes(request_state, scheduler.queues.waiting)
    return request_state


@contextmanager
def _checked() -> Iterator[None]:
    """Turn errors from values of an export into DamagedExport."""
    try:
        yield
    except MoveError:
        raise
    except (ValidationError, ValueError, IndexError, KeyError, TypeError, OverflowError) as error:
        raise DamagedExport(f"the exported request does not add up: {error}") from None


def _media_of(snapshot: RequestSnapshot, parts: Sequence[memoryview]) -> MediaPrompt | None:
    """Return the media of an export, if it has any. DamagedExport if images and prompt do not fit each other."""
    with _checked():
        return None if snapshot.media is None else import_media(snapshot.media, snapshot.prompt_token_ids, parts)


def _resume(
    request_state: RequestState, snapshot: RequestSnapshot, parts: Sequence[memoryview], scheduler: Scheduler
) -> None:
    """Bring a new request state to that of the exported one. DamagedExport if that is not possible."""
    now, output = time.monotonic(), request_state.output
    with _checked():
        if len(snapshot.samples) != len(request_state.requests):
            raise ValueError(
                f"it has {len(snapshot.samples)} outputs, and its parameters ask for {request_state.params.n}"
            )
        output.prompt = snapshot.prompt
        ages = (snapshot.scheduled, snapshot.first_token, snapshot.last_token)
        moments = [None if each is None else now - each for each in ages]
        output.times = RequestTimes(now - snapshot.arrival, *moments)
        if (snapshot.prompt_logprobs is None) != (output.prompt_logprobs is None):
            raise ValueError(
                "it has log-probabilities of the prompt that the request did not ask for, or lacks those that it did"
            )
        output.prompt_logprobs = snapshot.prompt_logprobs
        output.cache = snapshot.samples[0].cache
        if len(snapshot.marks) > MAX_MARKS or not all(
            0 < mark.position <= len(snapshot.prompt_token_ids) and mark.ttl > 0 for mark in snapshot.marks
        ):
            raise ValueError("it has marks that no request may have")
        if all(each.finish_reason is not None for each in snapshot.samples):
            raise ValueError("all its outputs have ended")
        for index, (request, sample) in enumerate(zip(request_state.requests, snapshot.samples, strict=True)):
            _resume_sample(request_state, index, sample, snapshot.has_begun)
            if sample.finish_reason is None:
                if request.num_tokens >= max_total_tokens(request, scheduler.limits):
                    raise ValueError("an unfinished output already has all its tokens")
                _attach_kv(request, sample, parts, scheduler.cache)


def _resume_sample(request_state: RequestState, index: int, sample: SampleSnapshot, has_begun: bool) -> None:
    request = request_state.requests[index]
    if sample.finish_reason not in (None, *FinishReason):
        raise ValueError(f"{sample.finish_reason!r} is no reason to end")
    max_logprobs = len(request.prompt_token_ids) - 1
    if not 0 <= sample.num_prompt_logprobs <= (max_logprobs if request.wants_prompt_logprobs else 0):
        raise ValueError("log-probabilities of the prompt were given that it does not have")
    if sample.num_preemptions < 0 or sample.num_computed < 0:
        raise ValueError("a count is below 0")
    done = CompletionOutput(
        index,
        sample.text,
        list(sample.token_ids),
        sample.logprobs,
        sample.cumulative_logprob,
        sample.finish_reason,
        sample.stop_reason,
    )
    request_state.restore_sample(done)
    request.cache_report = sample.cache
    if done.finished:
        return
    request.restore(sample.token_ids, sample.num_prompt_logprobs, sample.num_preemptions)
    request.was_imported, request.num_imported_tokens = has_begun, sample.num_computed


def _attach_kv(request: Request, sample: SampleSnapshot, parts: Sequence[memoryview], cache: CacheManager) -> None:
    """Attach the imported blocks, window blocks and state to an unfinished output, if they came and are usable here."""
    if not sample.has_memory:
        return
    num_tokens, memory = sample.num_computed, cache.memory
    if not 0 < num_tokens < request.num_tokens or sample.cache is None:
        raise ValueError(f"{num_tokens} of {request.num_tokens} tokens are said to be computed")
    if memory is None or request.skips_prefix_cache:
        return
    blocks, window_blocks = (
        tuple(parts[_number(part)] for part in part_ids) for part_ids in (sample.blocks, sample.panes)
    )
    state = None if sample.state is None else parts[_number(sample.state)]
    if len(blocks) != cache.blocks_needed(num_tokens) or any(len(part) != memory.sizes["block"] for part in blocks):
        raise ValueError("its blocks are not those of its tokens")
    if len(window_blocks) != cache.window_blocks_needed(num_tokens) or any(
        len(part) != memory.sizes["window_block"] for part in window_blocks
    ):
        raise ValueError("its window blocks are not those of its last tokens")
    if (state is None) != (cache.state_slots.slots_per_request == 0) or (
        state is not None and len(state) != memory.sizes["slot"]
    ):
        raise ValueError("its state is not that of this model")
    request.kv_snapshot = KVSnapshot(num_tokens, blocks, window_blocks, state)


def _number(number: int) -> int:
    if number < 0:
        raise IndexError("a part has a number below 0")
    return number


def _limit_imported_bytes(request_state: RequestState, waiting: Sequence[Request]) -> None:
    """Drop the imported KV of a request if too much waits already."""
    num_waiting_bytes = sum(other.kv_snapshot.num_bytes for other in waiting if other.kv_snapshot is not None)
    for request in request_state.requests:
        if request.kv_snapshot is None:
            continue
        num_waiting_bytes += request.kv_snapshot.num_bytes
        if num_waiting_bytes > MAX_WAITING_BYTES:
            request.kv_snapshot = None


def _check_tokens(snapshot: RequestSnapshot, vocab_size: int) -> None:
    """Raise DamagedExport if there are tokens that the model does not have."""
    for ids in (snapshot.prompt_token_ids, *(each.token_ids for each in snapshot.samples)):
        if any(not 0 <= token < vocab_size for token in ids):
            raise DamagedExport("the exported request has tokens that the model does not have")


def export_kv(request: Request, cache: CacheManager, copies: CopiedBlocks) -> KVSnapshot | None:
    """Return a KV snapshot of a request between two steps; None if there is nothing that could be used.

    A request that waits since it was imported returns the snapshot that came with it.

    A block or window block that is in `copies`, because several requests share it, is not copied again. Of one that is
    not full, only computed tokens are copied: the rest belongs to a draft or another request. The sum of mean pooling
    (`skips_prefix_cache`) is in none of these: its tokens are computed again, as after a preemption.
    """
    memory, num_tokens, size = cache.memory, request.num_computed_tokens, cache.block_size
    if request.status is not RequestStatus.RUNNING:
        return request.kv_snapshot
    if memory is None or num_tokens == 0 or request.skips_prefix_cache:
        return None
    request_cache = cache.request_cache(request.request_id)

    def copied(kind: MemoryKind, table: tuple[int, ...], first: int) -> tuple[memoryview, ...]:
        """Return copies of the computed tokens, from block `first` of the request on."""
        blocks = []
        for index, id in enumerate(table[first : -(-num_tokens // size)], start=first):
            count = min(size, num_tokens - index * size)
            if (kind, id, count) not in copies:
                copies[kind, id, count] = memory.read(kind, id, None if count == size else count)
            blocks.append(copies[kind, id, count])
        return tuple(blocks)

    blocks, window_blocks = (
        copied("block", request_cache.block_table, 0),
        copied("window_block", request_cache.window_block_table, request_cache.first_window_block),
    )
    if not cache.state_slots.slots_per_request:
        return KVSnapshot(num_tokens, blocks, window_blocks, None)
    assert request_cache.read_slot, "a request with computed tokens has a state"
    return KVSnapshot(num_tokens, blocks, window_blocks, memory.read("slot", request_cache.read_slot))


def make_export(request_state: RequestState, cache: CacheManager, identity: JsonObject) -> bytes:
    """Return the export of a request with the blocks and states of its running outputs; it stays as it is."""
    parts = ByteParts()
    return pack_snapshot(make_snapshot(request_state, identity, parts, cache), parts.parts)


def make_snapshot(
    request_state: RequestState,
    identity: JsonObject,
    parts: ByteParts,
    cache: CacheManager | None = None,
    *,
    has_media: bool = True,
) -> RequestSnapshot:
    """Return the snapshot of a request, and add its bytes to `parts`: images, unless `has_media` is false.

    With `cache`, what was computed for it is added too.
    """
    copies = CopiedBlocks()
    first, output = request_state.requests[0], request_state.output
    times, now = output.times, time.monotonic()
    ages = [None if each is None else now - each for each in (times.scheduled, times.first_token, times.last_token)]
    samples = [
        _sample(request, each, cache, parts, copies)
        for request, each in zip(request_state.requests, output.outputs, strict=True)
    ]
    return RequestSnapshot(
        identity=identity,
        request_id=output.request_id,
        prompt=output.prompt,
        prompt_token_ids=output.prompt_token_ids,
        params=request_state.params.model_dump(mode="json", exclude_unset=True),
        seed=request_state.seed,
        priority=first.priority,
        cache_salt=first.cache_salt,
        client=first.client,
        pooling=request_state.pooling,
        arrival=now - times.arrival,
        scheduled=ages[0],
        first_token=ages[1],
        last_token=ages[2],
        prompt_logprobs=None if output.prompt_logprobs is None else [*output.prompt_logprobs],
        samples=samples,
        media=None if request_state.media is None or not has_media else export_media(request_state.media, parts),
        marks=list(first.marks),
    )


def _sample(
    request: Request, output: CompletionOutput, cache: CacheManager | None, parts: ByteParts, copies: CopiedBlocks
) -> SampleSnapshot:
    runs = request.status is RequestStatus.RUNNING
    num_computed = request.num_computed_tokens if runs else request.num_imported_tokens
    kv = None if output.finished or cache is None else export_kv(request, cache, copies)
    state = None if kv is None or kv.state is None else parts.add(kv.state)
    return SampleSnapshot(
        token_ids=[*output.token_ids],
        text=output.text,
        logprobs=None if output.logprobs is None else [*output.logprobs],
        cumulative_logprob=output.cumulative_logprob,
        finish_reason=output.finish_reason,
        stop_reason=output.stop_reason,
        cache=request.cache_report,
        num_prompt_logprobs=request.num_prompt_logprobs,
        num_preemptions=request.num_preemptions,
        num_computed=0 if output.finished else num_computed,
        has_memory=kv is not None,
        blocks=[] if kv is None else [parts.add_once(each) for each in kv.blocks],
        panes=[] if kv is None else [parts.add_once(each) for each in kv.window_blocks],
        state=state,
    )
