"""Drives a scheduler one step ahead over the fake runner, with the checks of `Harness`."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from ostinato.scheduler.batch import Batch, StepResult
from ostinato.scheduler.request import FinishReason
from ostinato.scheduler.scheduler import Scheduler
from tests.support.scheduler_harness import Harness


class AheadHarness(Harness):
    """`update_head_cache` schedules the step behind the one in flight.

    That one may run before the first is updated (`early`), or only then; either way it takes the tokens that the first
    one gave.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.scheduler = Scheduler(self.limits, self.cache, self.policy, None, self.encoder_cache)
        self.following: Batch | None = None
        self.early = False
        self._result: StepResult | None = None
        """Of the step in flight, if it ran early."""

    def follow(self) -> None:
        assert self.batch is not None
        before = {row.request_id: place for place, row in enumerate(self.batch.rows)}
        batch = self.following = self.scheduler.schedule_ahead()
        if batch is None:
            return
        assert batch.num_decode_rows == len(batch.rows)
        assert [row.previous_row for row in batch.rows] == [before[row.request_id] for row in batch.rows]
        for row in batch.rows:
            front = self.batch.rows[before[row.request_id]]
            assert row.end < self._greatest_length(self.followers[row.request_id].request), "known to be void"
            assert (row.start, row.read_slot) == (front.end, front.write_slots[0] if self.runner.has_state else 0)
        self.scheduler.check_integrity()
        self.runner.check_writes(batch, self.cache.store.index)

    def update(self, broken: frozenset[str] = frozenset()) -> None:
        batch, following = self._take_batch(), self.following
        if self._result is not None:
            broken = frozenset()  # it ran before, and was whole
        result = self.runner.run(batch, broken) if self._result is None else self._result
        self.following = self._result = None
        unfinished = {row.request_id for row in batch.rows if not self._is_finished(row.request_id)}
        if following is not None:
            # Whatever row has no token, and so no state, leaves rubbish behind.
            lost = {each.request_id for each in result.rows if each.error is not None}
            following = with_tokens(following, result)
            if self.early:
                self._result = self.runner.run(following, lost)
        updates = self.scheduler.update(result)
        assert {update.request_id for update in updates if update.error is not None} == broken & unfinished
        self._follow(updates)
        self.check()
        if following is not None:
            self.runner.check_writes(following, self.cache.store.index)
            if self._result is None:
                for row in following.rows:
                    if not self._is_finished(row.request_id):
                        self._check_row(row, is_decode=True)
                self._result = self.runner.run(following, lost)
                self.check()
            else:
                for row in following.rows:
                    self.followers[row.request_id].num_computed = row.end
            self.batch = following

    def fail(self) -> None:
        """The step in flight fails, which ends also the one behind it. That may have begun to write."""
        if self._result is not None:
            self.update()  # what ran cannot fail any more
            return
        following, self.following = self.following, None
        if following is not None:
            self.runner.fail(following)
        super().fail()
        assert not self.scheduler.check_integrity()

    def end(self, name: str, reason: FinishReason) -> None:
        super().end(name, reason)
        is_ahead = self.following is not None and any(row.request_id == name for row in self.following.rows)
        assert (name in self.cache.request_ids()) >= is_ahead, "memory was freed while a step ahead writes to it"

    def finish_all(self) -> None:
        """First all one step ahead, then as if nothing had ever been."""
        bound = 2 + len(self.followers) * sum(f.request.max_num_tokens for f in self.followers.values())
        for _ in range(bound):
            if self.batch is None:
                if not self.scheduler.has_unfinished:
                    break
                self.schedule()
            if self.following is None:
                self.follow()
            self.update()
        super().finish_all()


def with_tokens(batch: Batch, before: StepResult) -> Batch:
    """A step ahead with the tokens that the step before it gave."""
    tokens = [each.token_ids[-1] if each.token_ids else 0 for each in before.rows]
    rows = tuple(row._replace(token_ids=(tokens[_place(row.previous_row)],)) for row in batch.rows)
    return replace(batch, rows=rows)


def _place(follows: int | None) -> int:
    assert follows is not None
    return follows


def void_rows(harnesses: Collection[AheadHarness]) -> int:
    return sum(harness.scheduler.counters.void_rows for harness in harnesses)
