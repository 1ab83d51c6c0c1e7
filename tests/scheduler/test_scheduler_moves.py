"""Requests that move between two schedulers over tiny caches: nothing leaks, and every output is right."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from ostinato.engine.migration.export_import import export_kv
from ostinato.kv_cache.checkpoints import PrefixCachePolicy
from ostinato.kv_cache.request_cache import KVSnapshot
from ostinato.scheduler.limits import SchedulerLimits, SchedulingPolicy
from ostinato.scheduler.request import FinishReason, Request, StopConditions
from tests.scheduler.test_scheduler_properties import KINDS, WINDOWS, crowd, make_harness, next_turn, random_wish
from tests.support.fake_files import FakeMemory, note_writes
from tests.support.scheduler_harness import Follower, Harness, Sizes, Wish

LIMITS = SchedulerLimits(4, 16, 60)
POLICY = PrefixCachePolicy(prefix_caching=True, mode="all", state_block_size=4)


def joined(*harnesses: Harness) -> tuple[Harness, ...]:
    """Engines whose memory the others can read and write."""
    copies: list[Any] = []
    for harness in harnesses:
        harness.cache.memory = FakeMemory(harness.runner, copies)
    return harnesses


def move(name: str, source: Harness, target: Harness, *, loses: bool = False) -> Follower:
    """A request goes on at another engine; `loses` what was computed of it on the way."""
    left = source.followers[name]
    old = left.request
    carried = export_kv(old, source.cache, {})
    num_computed = old.num_computed_tokens or old.num_imported_tokens
    source.end(name, FinishReason.MOVED)
    new = Request(
        f"{name}+{target.num_arrived}",
        old.prompt_token_ids,
        old.stop,
        old.priority,
        old.wants_prompt_logprobs,
        old.sampling_state,
        old.cache_salt,
    )
    target.num_arrived += 1
    new.restore(left.token_ids, old.num_prompt_logprobs, old.num_preemptions)
    new.cache_report = old.cache_report
    new.was_imported = bool(left.token_ids or old.num_preemptions or num_computed)
    new.num_imported_tokens, new.kv_snapshot = num_computed, None if loses else carried
    target.scheduler.add(new)
    follower = Follower(new, left.prompt, left.expected, left.expected_reason, list(left.token_ids))
    follower.prompt_logprobs = list(left.prompt_logprobs)
    follower.came_with = 0 if new.kv_snapshot is None else new.kv_snapshot.num_tokens
    follower.num_preemptions, follower.was_told = old.num_preemptions, old.cache_report is not None
    target.followers[new.request_id] = follower
    source.check()
    target.check()
    return follower


def run_program(seed: int) -> tuple[Harness, Harness]:
    """Requests arrive at two crowded engines, and move from one to the other at every moment between steps."""
    rng = random.Random(seed)
    policy: SchedulingPolicy = rng.choice(["fcfs", "priority"])
    limits = SchedulerLimits(rng.randint(2, 6), rng.randint(3, 14), 48, rng.random() < 0.7, policy)
    kind, k, size = rng.choice([*KINDS, *WINDOWS]), rng.choice([0, 0, 1, 3]), rng.choice([2, 3, 4])
    state = rng.getstate()
    found = []
    num_blocks, num_window_blocks, window = rng.randint(6, 12), rng.randint(6, 12), rng.randint(1, 12)
    for _ in range(2):
        rng.setstate(state)  # of one plan
        sizes = Sizes(num_blocks, rng.randint(3, 9), size, num_window_blocks, window)
        found.append(make_harness(limits, sizes, kind, k, rng.choice))
    one, other = joined(*found)
    for _ in range(110):
        here, there = rng.sample((one, other), 2)
        chance = rng.random()
        movable = [name for name, each in here.followers.items() if each.finish_reason is None]
        if here.batch is not None:
            crowd(here, rng, chance)
        elif chance < 0.15 and movable:
            move(rng.choice(movable), here, there, loses=rng.random() < 0.1)
        elif chance < 0.7:
            here.num_drafts = rng.choice([0, k])
            here.schedule()
        elif chance < 0.78 and here.followers:
            text = [rng.randrange(50) for _ in range(3)]
            here.arrive(next_turn(here, rng.choice(sorted(here.followers)), text, rng.randint(1, 6)))
        else:
            here.arrive(random_wish(here, rng))
    for each in (one, other):
        each.finish_all()
    return one, other


def one_of(num_blocks: int = 20, num_slots: int = 9) -> Harness:
    return Harness(LIMITS, Sizes(num_blocks, num_slots, 4), POLICY)


def begun(harness: Harness, length: int, steps: int, max_tokens: int = 30) -> str:
    harness.arrive(Wish(list(range(length)), StopConditions(max_tokens)))
    for _ in range(steps):
        harness.step()
    return f"r{harness.num_arrived - 1}"


def test_a_request_goes_on_with_its_next_token_and_computes_none_twice() -> None:
    here, there = joined(one_of(), one_of())
    follower = move(begun(here, 10, 4), here, there)
    there.schedule()
    assert there.batch is not None
    [row] = there.batch.rows
    assert (row.start, len(row.token_ids)) == (13, 1)
    there.update()
    assert len(follower.token_ids) == 5
    here.finish_all()
    there.finish_all()


def test_full_blocks_that_came_are_hits_for_others_at_once_and_the_others_are_not() -> None:
    here, there = joined(Harness(LIMITS, Sizes(20, 0, 4), POLICY), Harness(LIMITS, Sizes(20, 0, 4), POLICY))
    move(begun(here, 10, 4), here, there)  # 13 tokens are computed: three blocks, and one token
    there.schedule()
    assert [entry.end for entry in there.cache.store.index] == [4, 8, 12]
    there.update()
    there.finish_all()


@pytest.mark.parametrize("num_blocks", [20, 0])
def test_window_blocks_that_the_index_has_are_shared_and_the_others_are_written_and_kept(num_blocks: int) -> None:
    def one() -> Harness:
        return Harness(LIMITS, Sizes(num_blocks, 0, 4, 20, 6), POLICY)

    here, there = joined(one(), one())
    begun(there, 10, 20, max_tokens=1)
    follower = move(begun(here, 10, 4), here, there)  # 13 tokens are computed, and two blocks of them are there
    store, memory, written = there.cache.store, there.cache.memory, list[int]()
    assert isinstance(memory, FakeMemory)
    note_writes(memory, "window_block", written)
    there.schedule()
    table = there.cache.request_cache(follower.request.request_id).window_block_table
    assert [bool(each) for each in table] == [False, True, True, True]
    assert written == list(table[2:])
    assert [store.index.window_block_of(each) is not None for each in table[1:]] == [True, True, False]
    there.update()
    there.finish_all()


def test_who_has_begun_stands_before_those_who_wait_and_behind_those_who_run() -> None:
    limits = replace(LIMITS, max_num_seqs=1)
    here, there = joined(*(Harness(limits, Sizes(20, 9, 4), POLICY) for _ in range(2)))
    running, waiting = begun(there, 8, 2), begun(there, 8, 0)
    follower = move(begun(here, 10, 4), here, there)
    new = move(begun(here, 9, 0), here, there)
    ranks = [there.followers[name].request.service_order for name in (running, follower.request.request_id, waiting)]
    ranks.append(new.request.service_order)
    assert ranks == sorted(ranks)
    there.finish_all()


def test_what_has_no_room_waits_with_its_memory_and_can_move_on() -> None:
    here, there, third = joined(one_of(), one_of(num_blocks=15), one_of())
    there.arrive(Wish([49] * 36, StopConditions(8)))
    for _ in range(4):
        there.step()
    follower = move(begun(here, 20, 4), here, there)
    there.step()
    assert follower.request.status == "waiting"
    assert follower.request.kv_snapshot is not None
    last = move(follower.request.request_id, there, third)
    assert last.came_with == follower.came_with > 0
    third.finish_all()
    there.finish_all()
    assert third.scheduler.migration_counts.carried_tokens == follower.came_with


def test_what_the_index_has_more_of_is_taken_from_there() -> None:
    here, there = joined(one_of(), one_of())
    begun(there, 17, 20, max_tokens=2)
    name = begun(here, 17, 0)
    here.limits = replace(LIMITS, max_num_batched_tokens=8)
    here.scheduler.limits = here.scheduler._prefill._limits = here.limits
    here.step()
    follower = move(name, here, there)
    assert follower.came_with == 8
    follower.came_with = 0
    there.schedule()
    assert there.scheduler.migration_counts.carried_tokens == 0
    assert there.batch is not None
    assert there.batch.rows[0].start == 16
    there.update()
    there.finish_all()


def test_what_is_not_full_is_carried_without_what_stands_behind_it() -> None:
    here, _ = joined(one_of(), one_of())
    name = begun(here, 10, 4)
    request = here.followers[name].request
    carried = export_kv(request, here.cache, {})
    assert isinstance(carried, KVSnapshot)
    memory = here.cache.memory
    assert isinstance(memory, FakeMemory)
    assert [len(memory._copy(each)) for each in carried.blocks] == [4, 4, 4, 1]


def test_what_the_index_has_is_shared_and_not_written() -> None:
    here, there = joined(one_of(), one_of())
    begun(there, 10, 20, max_tokens=1)
    follower = move(begun(here, 10, 4), here, there)
    memory, written = there.cache.memory, list[int]()
    assert isinstance(memory, FakeMemory)
    note_writes(memory, "block", written)
    there.schedule()
    table = there.cache.request_cache(follower.request.request_id).block_table
    assert written == list(table[2:4])  # of 13 tokens, without the two blocks of the prompt that stood there
    there.update()
    there.finish_all()


@pytest.mark.parametrize("part", range(6))
def test_programs_that_move_requests_give_each_what_it_would_get_alone(part: int) -> None:
    pairs = [run_program(seed) for seed in range(40 * part, 40 * part + 40)]
    moves = [harness.scheduler.migration_counts for pair in pairs for harness in pair]
    # Else these programs would not test what they are for.
    assert sum(each.carried_tokens > 0 for each in moves) >= 20
    assert sum(each.recomputed_tokens > 0 for each in moves) >= 3
