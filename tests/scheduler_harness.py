"""Drives a scheduler over the fake runner and checks from outside that each step and each output is right."""

from __future__ import annotations

from dataclasses import dataclass, field

from ostinato.cache.manager import CacheManager
from ostinato.errors import RequestError
from ostinato.schedule.batch import Batch, Row
from ostinato.schedule.limits import SchedulerLimits
from ostinato.schedule.request import FinishReason, Request, RequestUpdate, StopConditions
from ostinato.schedule.scheduler import Scheduler
from tests.fake_runner import FakeRunner, continuation


@dataclass
class Wish:
    """What a request asks for."""

    prompt: list[int]
    stop: StopConditions
    priority: int = 0
    prompt_logprobs: bool = False


@dataclass
class Follower:
    """What is known of a request from outside: what it should get, and what it got."""

    request: Request
    expected: list[int]
    expected_reason: FinishReason
    token_ids: list[int] = field(default_factory=list)
    prompt_logprobs: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    was_ended: bool = False
    """Ended from outside or by a failed step, not by its own stop conditions."""
    num_computed: int = 0


def expected_output(request: Request, max_model_len: int) -> tuple[list[int], FinishReason]:
    """The request's whole output and how it ends, worked out token by token and without a scheduler."""
    stop, prompt = request.stop, request.prompt_token_ids
    output = continuation(prompt, min(stop.max_tokens, max_model_len - len(prompt)))
    for count, token_id in enumerate(output, start=1):
        is_stop = token_id in stop.stop_token_ids
        is_eos = token_id in stop.eos_token_ids and not stop.ignore_eos
        if count >= stop.min_tokens and (is_stop or is_eos):
            return output[:count], FinishReason.STOP
    return output, FinishReason.LENGTH


class Harness:
    """A scheduler, and a follower for each request that it took in. 0 blocks or 0 slots: none are needed."""

    def __init__(self, limits: SchedulerLimits, num_blocks: int, num_slots: int, block_size: int) -> None:
        self.limits = limits
        self.cache = CacheManager(num_blocks, num_slots, block_size)
        self.capacity = (num_blocks - 1) * block_size if num_blocks > 0 else 1000
        self.scheduler = Scheduler(limits, self.cache)
        self.runner = FakeRunner(block_size, num_blocks > 0, num_slots > 0)
        self.followers: dict[str, Follower] = {}
        self.batch: Batch | None = None
        self.num_arrived = 0

    def arrive(self, wish: Wish) -> None:
        name = f"r{self.num_arrived}"
        self.num_arrived += 1
        payload = wish.prompt if wish.prompt_logprobs else None
        request = Request(name, wish.prompt, wish.stop, wish.priority, wish.prompt_logprobs, payload)
        try:
            self.scheduler.add(request)
        except RequestError:
            assert self._can_never_be_served(request)
        else:
            assert not self._can_never_be_served(request)
            self.followers[name] = Follower(request, *expected_output(request, self.limits.max_model_len))

    def schedule(self) -> None:
        batch = self.scheduler.schedule()
        assert bool(batch.rows) == self.scheduler.has_unfinished
        self._check_batch(batch)
        self.batch = batch if batch.rows else None

    def update(self) -> None:
        batch = self._take_batch()
        self._follow(self.scheduler.update(self.runner.run(batch)))

    def fail(self) -> None:
        batch = self._take_batch()
        unfinished = {row.request_id for row in batch.rows if not self._is_finished(row.request_id)}
        self.runner.fail(batch)
        error = ValueError("the step broke down")
        updates = self.scheduler.fail(batch, error)
        assert {update.request_id for update in updates} == unfinished
        assert all(u.error is error and u.finish_reason == FinishReason.ERROR for u in updates)
        self._follow(updates)

    def end(self, name: str, reason: FinishReason) -> None:
        follower = self.followers[name]
        assert self.scheduler.finish(name, reason) == (not self._is_finished(name))
        if follower.finish_reason is None:
            follower.finish_reason, follower.was_ended = reason, True
        is_in_flight = self.batch is not None and any(row.request_id == name for row in self.batch.rows)
        assert (name in self.cache.holders()) >= is_in_flight, "memory was freed while a step writes to it"

    def preempt(self, name: str) -> None:
        is_running = self.followers[name].request.status == "running"
        assert self.scheduler.preempt(name) == is_running

    def step(self) -> None:
        self.schedule()
        self.scheduler.check_integrity()
        if self.batch is not None:
            self.update()
        self.scheduler.check_integrity()

    def finish_all(self) -> None:
        """Whatever is unfinished ends as it would have ended alone, and then everything is free again."""
        if self.batch is not None:
            self.update()
        # Each step advances the first in rank, or gives some other request a token, which it keeps.
        bound = len(self.followers) * sum(f.request.max_num_tokens for f in self.followers.values())
        for _ in range(bound):
            if not self.scheduler.has_unfinished:
                break
            self.step()
        assert not self.scheduler.has_unfinished, "requests are unfinished after more steps than they need"
        for follower in self.followers.values():
            assert follower.finish_reason == follower.request.finish_reason
            if not follower.was_ended:
                assert follower.token_ids == follower.expected
                assert follower.finish_reason == follower.expected_reason
                if follower.request.wants_prompt_logprobs:
                    assert follower.prompt_logprobs == list(follower.request.prompt_token_ids[1:])
        usage = self.cache.usage()
        assert (usage.blocks_used, usage.slots_used) == (0, 0)

    def _take_batch(self) -> Batch:
        batch, self.batch = self.batch, None
        assert batch is not None
        return batch

    def _is_finished(self, name: str) -> bool:
        return self.followers[name].finish_reason is not None

    def _can_never_be_served(self, request: Request) -> bool:
        num_prompt, limits = len(request.prompt_token_ids), self.limits
        most = min(num_prompt + request.stop.max_tokens, limits.max_model_len)
        return (
            num_prompt == 0
            or num_prompt + 1 > limits.max_model_len
            or (not limits.enable_chunked_prefill and num_prompt > limits.max_num_batched_tokens)
            or most - 1 > self.capacity
        )

    def _check_batch(self, batch: Batch) -> None:
        """The batch keeps the limits, its rows are in order, and nobody was overtaken."""
        assert len(batch.rows) <= self.limits.max_num_seqs
        assert batch.num_tokens <= self.limits.max_num_batched_tokens
        assert len({row.request_id for row in batch.rows}) == len(batch.rows)
        for index, row in enumerate(batch.rows):
            self._check_row(row, is_decode=index < batch.num_decode_rows)
        begun = [self.followers[row.request_id].request.rank for row in batch.rows if row.start == 0]
        waiting = [f.request.rank for f in self.followers.values() if f.request.status == "waiting"]
        assert not begun or not waiting or max(begun) < min(waiting), "a waiting request was overtaken"

    def _check_row(self, row: Row, is_decode: bool) -> None:
        """The row continues where its request stands, or begins again after a preemption."""
        follower = self.followers[row.request_id]
        known = [*follower.request.prompt_token_ids, *follower.token_ids]
        was_preempted = follower.request.num_preemptions > 0
        assert follower.finish_reason is None
        assert len(row.token_ids) > 0
        assert list(row.token_ids) == known[row.start : row.end]
        assert row.start == follower.num_computed or (row.start == 0 and was_preempted)
        assert (row.read_slot == 0) == (row.start == 0 or not self.runner.has_state)
        assert row.samples == (row.end == len(known))
        assert is_decode == (row.start > 0 and row.start == len(known) - 1)
        if not self.limits.enable_chunked_prefill and not row.samples:
            assert was_preempted, "a prompt was cut without chunked prefill"
            assert len(known) > self.limits.max_num_batched_tokens
        follower.num_computed = row.end

    def _follow(self, updates: list[RequestUpdate]) -> None:
        for update in updates:
            follower = self.followers[update.request_id]
            assert follower.finish_reason is None
            follower.token_ids += update.token_ids
            follower.prompt_logprobs += [entry.token_id for entry in update.prompt_logprobs]
            follower.finish_reason = update.finish_reason
            follower.was_ended = update.error is not None
            assert follower.token_ids == follower.expected[: len(follower.token_ids)]
            assert follower.token_ids == follower.request.output_token_ids
