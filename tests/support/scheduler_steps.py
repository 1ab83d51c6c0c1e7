"""Short forms for tests that take a scheduler through single steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ostinato.kv_cache.checkpoints import PrefixCachePolicy, StateCacheMode
from ostinato.kv_cache.eviction import EvictionPolicy
from ostinato.kv_cache.manager import CacheManager
from ostinato.kv_cache.sliding_window import SlidingWindowSpec
from ostinato.scheduler.batch import Batch, BatchRow, RowResult, StepResult
from ostinato.scheduler.limits import SchedulerLimits
from ostinato.scheduler.request import Request, RequestUpdate, StopConditions
from ostinato.scheduler.scheduler import Scheduler
from tests.support.fake_runner import VOCABULARY, FakeRunner, Guess, any_guess, continuation

BLOCK = 4


def make_scheduler(num_blocks: int = 100, num_slots: int = 100, k: int = 0, **limits: Any) -> Scheduler:
    """A scheduler without a prefix cache, which gives every decode row `k` drafts."""
    values = {"max_num_seqs": 8, "max_num_batched_tokens": 32 + 8 * k, "max_model_len": 200, **limits}
    cache = CacheManager(num_blocks, num_slots, BLOCK, slots_per_request=1 + k)
    return Scheduler(SchedulerLimits(**values), cache, choose_drafts=lambda num_decoding: k)


def make_caching_scheduler(
    mode: StateCacheMode = "all",
    num_blocks: int = 100,
    num_slots: int = 100,
    spacing: int = 2 * BLOCK,
    branches: bool = True,
    eviction: EvictionPolicy = "marconi",
    block_size: int = BLOCK,
    k: int = 0,
    num_window_blocks: int = 0,
    window: int = 1,
    max_pins: int = 0,
    max_pinned_blocks: int = 1000,
    **limits: Any,
) -> Scheduler:
    """A scheduler with a prefix cache, which gives every decode row `k` drafts. 0 blocks: a model without attention, or
    with windows in all layers; 0 slots: one without state layers; 0 window blocks: one without windows."""
    values = {"max_num_seqs": 8, "max_num_batched_tokens": 200, "max_model_len": 200, **limits}
    rules = SlidingWindowSpec(window, block_size, values["max_num_batched_tokens"]) if num_window_blocks else None
    cache = CacheManager(
        num_blocks,
        num_slots,
        block_size,
        1 + k,
        eviction=eviction,
        num_window_blocks=num_window_blocks,
        window_block_rules=rules,
        max_pins=max_pins,
        max_pinned_blocks=max_pinned_blocks,
    )
    policy = PrefixCachePolicy(True, mode, spacing, branches)
    return Scheduler(SchedulerLimits(**values), cache, policy, choose_drafts=lambda num_decoding: k)


def runner_for(scheduler: Scheduler, guess: Guess = any_guess) -> FakeRunner:
    cache = scheduler.cache
    window = None if cache.window_blocks is None else cache.window_blocks.rules.window
    return FakeRunner(cache.block_size, cache.blocks.count > 0, cache.slots.count > 0, guess, window)


def right_guesses(*num_right: int) -> Guess:
    """All drafts that a row may have; in the row's steps one after the other so many are right, later always the last
    number. For runners of one request."""
    rest = list(num_right)

    def guess(row: BatchRow) -> tuple[int, int]:
        if row.num_drafts == 0:
            return 0, 0
        right = rest.pop(0) if len(rest) > 1 else rest[0]
        return row.num_drafts, min(right, row.num_drafts)

    return guess


def make_request(name: str, prompt: int = 3, max_tokens: int = 5, **fields: Any) -> Request:
    """A request with a prompt of `prompt` tokens, which differ from those of other names."""
    tokens = tuple((sum(map(ord, name)) * 7 + index * 11) % VOCABULARY for index in range(prompt))
    if fields.get("wants_prompt_logprobs"):
        fields["sampling_state"] = tokens
    return Request(name, tokens, fields.pop("stop", StopConditions(max_tokens)), **fields)


def request_of(name: str, prompt: Sequence[int], max_tokens: int = 5, **fields: Any) -> Request:
    """A request with this prompt."""
    return Request(name, tuple(prompt), StopConditions(max_tokens), **fields)


def shape(batch: Batch) -> list[tuple[str, int, int]]:
    """(request, start, tokens) of each row."""
    return [(row.request_id, row.start, len(row.token_ids)) for row in batch.rows]


def step(scheduler: Scheduler, runner: FakeRunner) -> list[tuple[str, int, int]]:
    """Schedule and run a step; returns its shape."""
    batch = scheduler.schedule()
    runner.check_writes(batch, scheduler.cache.store.index)
    scheduler.update(runner.run(batch))
    scheduler.check_integrity()
    runner.check_index(scheduler.cache.store.index)
    return shape(batch)


def run_all(scheduler: Scheduler, runner: FakeRunner, limit: int = 1000) -> list[RequestUpdate]:
    """Step until every request has ended."""
    updates: list[RequestUpdate] = []
    for _ in range(limit):
        if not scheduler.has_unfinished:
            return updates
        batch = scheduler.schedule()
        assert batch.num_tokens <= scheduler.limits.max_num_batched_tokens
        runner.check_writes(batch, scheduler.cache.store.index)
        updates += scheduler.update(runner.run(batch))
        scheduler.check_integrity()
        runner.check_index(scheduler.cache.store.index)
    raise AssertionError(f"requests are unfinished after {limit} steps")


def serve(
    scheduler: Scheduler, runner: FakeRunner, prompt: Sequence[int], max_tokens: int = 1, **fields: Any
) -> Request:
    """Serve a request to its end, which is checked, before the next one."""
    request = request_of(f"request {scheduler.counters.steps}", prompt, max_tokens, **fields)
    scheduler.add(request)
    run_all(scheduler, runner)
    assert request.output_token_ids == continuation(request.prompt_token_ids, max_tokens)
    return request


def report_of(request: Request) -> tuple[int, dict[str, int]]:
    """(cached tokens, {cause: tokens computed}) of a request."""
    assert request.cache_report is not None
    return request.cache_report.cached_tokens, request.cache_report.misses


def text(length: int, seed: int = 0) -> tuple[int, ...]:
    """Tokens that differ from those of other seeds from the first one on."""
    return tuple((seed * 13 + index * 11) % VOCABULARY for index in range(length))


def give(scheduler: Scheduler, *token_ids: Sequence[int], **fields: Any) -> list[RequestUpdate]:
    """Schedule a step and answer it with these tokens per row."""
    rows = scheduler.schedule().rows
    results = (RowResult(row.request_id, tuple(t), **fields) for row, t in zip(rows, token_ids, strict=True))
    return scheduler.update(StepResult(tuple(results)))


def answer(batch: Batch) -> StepResult:
    """A result in which each row that samples gives token 1."""
    return StepResult(tuple(RowResult(row.request_id, (1,) if row.samples else ()) for row in batch.rows))
