"""Short forms for tests that take a scheduler through single steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ostinato.cache.manager import CacheManager
from ostinato.schedule.batch import Batch, RowResult, StepResult
from ostinato.schedule.limits import SchedulerLimits
from ostinato.schedule.request import Request, RequestUpdate, StopConditions
from ostinato.schedule.scheduler import Scheduler
from tests.fake_runner import VOCABULARY, FakeRunner

BLOCK = 4


def make_scheduler(num_blocks: int = 100, num_slots: int = 100, **limits: Any) -> Scheduler:
    values = {"max_num_seqs": 8, "max_num_batched_tokens": 32, "max_model_len": 200, **limits}
    return Scheduler(SchedulerLimits(**values), CacheManager(num_blocks, num_slots, BLOCK))


def make_request(name: str, prompt: int = 3, max_tokens: int = 5, **fields: Any) -> Request:
    """A request with a prompt of `prompt` tokens, which differ from those of other names."""
    tokens = tuple((sum(map(ord, name)) * 7 + index * 11) % VOCABULARY for index in range(prompt))
    if fields.get("wants_prompt_logprobs"):
        fields["payload"] = tokens
    return Request(name, tokens, fields.pop("stop", StopConditions(max_tokens)), **fields)


def shape(batch: Batch) -> list[tuple[str, int, int]]:
    """(request, start, tokens) of each row."""
    return [(row.request_id, row.start, len(row.token_ids)) for row in batch.rows]


def step(scheduler: Scheduler, runner: FakeRunner) -> list[tuple[str, int, int]]:
    """Schedule and run a step; returns its shape."""
    batch = scheduler.schedule()
    scheduler.update(runner.run(batch))
    scheduler.check_integrity()
    return shape(batch)


def run_all(scheduler: Scheduler, runner: FakeRunner, limit: int = 1000) -> list[RequestUpdate]:
    """Step until every request has ended."""
    updates: list[RequestUpdate] = []
    for _ in range(limit):
        if not scheduler.has_unfinished:
            return updates
        batch = scheduler.schedule()
        assert batch.num_tokens <= scheduler.limits.max_num_batched_tokens
        updates += scheduler.update(runner.run(batch))
        scheduler.check_integrity()
    raise AssertionError(f"requests are unfinished after {limit} steps")


def give(scheduler: Scheduler, *token_ids: Sequence[int], **fields: Any) -> list[RequestUpdate]:
    """Schedule a step and answer it with these tokens per row."""
    rows = scheduler.schedule().rows
    results = (RowResult(row.request_id, tuple(t), **fields) for row, t in zip(rows, token_ids, strict=True))
    return scheduler.update(StepResult(tuple(results)))


def answer(batch: Batch) -> StepResult:
    """A result in which each row that samples gives token 1."""
    return StepResult(tuple(RowResult(row.request_id, (1,) if row.samples else ()) for row in batch.rows))
