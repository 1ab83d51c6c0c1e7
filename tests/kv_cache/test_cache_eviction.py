"""What leaves the cache first, and that what is needed stays."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest

from ostinato.kv_cache import store as store_module
from ostinato.kv_cache.eviction import EvictionCosts, EvictionPolicy, EvictionQueue, Utility
from ostinato.kv_cache.prefix_index import BlockHashes, IndexEntry, RecentKeys
from ostinato.kv_cache.store import CacheStore
from tests.support.fake_files import FakeMemory
from tests.support.fake_runner import FakeRunner
from tests.support.scheduler_steps import BLOCK, make_caching_scheduler, report_of, runner_for, serve, text

B = BLOCK


def make_store(
    num_blocks: int = 50, num_slots: int = 20, policy: EvictionPolicy = "marconi", **costs: float
) -> CacheStore:
    """Counts are without the null block and the null slot; 0 slots: without state layers."""
    return CacheStore(num_blocks + 1, num_slots and num_slots + 1, policy, EvictionCosts(**costs))


def enter(
    store: CacheStore, tokens: tuple[int, ...], ends: Iterable[int] = (), inside: Iterable[int] = ()
) -> IndexEntry:
    """Index a text as a request that has ended leaves it, with checkpoints at `ends` and `claim_inside`."""
    block_hashes = chain_of(tokens)
    path = store.index.walk(block_hashes, len(block_hashes.keys))
    for number in range(len(path), len(block_hashes.keys)):
        (block,) = store.allocate_blocks(1)
        entry = store.add_block(path[-1] if path else None, block_hashes, number, block)
        assert entry is not None
        path.append(entry)
        store.blocks.release([block])
    for position in (*ends, *inside):
        (slot,) = store.allocate_slots(1)
        store.add_checkpoint(path[position // B - 1], slot, position in inside)
        store.slots.release([slot])
    store.touch(path[-1])
    store.check_integrity()
    return path[-1]


def chain_of(tokens: tuple[int, ...]) -> BlockHashes:
    block_hashes = BlockHashes(B)
    block_hashes.extend(lambda start, end: tokens[start:end], len(tokens))
    return block_hashes


def evict_blocks(store: CacheStore, count: int = 1) -> None:
    """Take blocks until `count` had to be evicted, and hand them back."""
    taken = store.allocate_blocks(store.blocks.num_free + count)
    store.check_integrity()
    store.blocks.release(taken)


def evict_slots(store: CacheStore, count: int = 1) -> None:
    taken = store.allocate_slots(store.slots.num_free + count)
    store.check_integrity()
    store.slots.release(taken)


def checkpoints(store: CacheStore) -> set[int]:
    """Where checkpoints stand, whatever their text."""
    return {checkpoint.entry.end for checkpoint in store.index.checkpoints}


# Packed checkpoints


def test_a_checkpoint_whose_slot_is_needed_is_packed_unless_it_is_worth_less_than_all_packed_ones() -> None:
    store, runner = CacheStore(51, 4, "lru", EvictionCosts(), num_packed=2), FakeRunner(B)
    store.memory = FakeMemory(runner)
    runner.states = dict.fromkeys(range(4), 7)
    first, second = (enter(store, text(3 * B, seed), ends=[3 * B]) for seed in (1, 2))
    evict_slots(store, 2)
    assert [entry.checkpoint is not None and entry.checkpoint.slot < 0 for entry in (first, second)] == [True, True]
    inside = enter(store, text(3 * B, 3), inside=[B])
    evict_slots(store)
    assert inside.parent is not None
    assert checkpoints(store) == {3 * B}
    assert (store.packed.num_idle, store.counters.evicted_checkpoints) == (2, 1)
    third = enter(store, text(3 * B, 4), ends=[3 * B])
    evict_slots(store)
    assert [entry.checkpoint is not None for entry in (first, second, third)] == [False, True, True]
    assert first.lost_checkpoint
    assert (store.counters.packed_checkpoints, store.counters.evicted_checkpoints) == (3, 2)
    evict_blocks(store, store.blocks.num_idle)
    assert store.packed.num_free == 2


# What it costs


def test_flops_of_a_part_are_those_of_the_whole_less_those_of_what_comes_before() -> None:
    costs = EvictionCosts(flops_per_token=3.0, flops_per_pair=2.0)
    assert costs.flops(0, 4) == 3 * 4 + 2 * (1 + 2 + 3 + 4)
    assert costs.flops(4, 6) == 3 * 2 + 2 * (5 + 6)
    assert costs.flops(0, 6) == costs.flops(0, 4) + costs.flops(4, 6)


# Blocks


@pytest.mark.parametrize("policy", ["marconi", "lru"])
def test_a_leaf_without_a_checkpoint_goes_before_an_older_one_that_has_one(policy: EvictionPolicy) -> None:
    store = make_store(policy=policy)
    old, recent = enter(store, text(B, 1), ends=[B]), enter(store, text(B, 2))
    evict_blocks(store)
    assert old in store.index
    assert recent not in store.index


def test_without_state_layers_a_leaf_needs_no_checkpoint_to_be_worth_something() -> None:
    store = make_store(num_slots=0, policy="lru")
    old, recent = enter(store, text(B, 1)), enter(store, text(B, 2))
    evict_blocks(store)
    assert old not in store.index
    assert recent in store.index


@pytest.mark.parametrize("policy", ["marconi", "lru"])
def test_blocks_go_from_the_end_of_a_text_backwards(policy: EvictionPolicy) -> None:
    store = make_store(policy=policy)
    end = enter(store, text(5 * B), ends=[2 * B])
    for count in (1, 2, 3):
        evict_blocks(store)
        assert len(store.index) == 5 - count
    assert end not in store.index
    assert checkpoints(store) == {2 * B}
    assert store.counters.evicted_checkpoints == 0
    evict_blocks(store)
    assert checkpoints(store) == set()
    assert (store.counters.evicted_blocks, store.counters.evicted_checkpoints) == (4, 1)


def test_the_least_recently_used_leaf_goes_first_under_lru_though_it_is_long() -> None:
    store = make_store(policy="lru", flops_per_token=1.0)
    long, short = enter(store, text(10 * B, 1), ends=[10 * B]), enter(store, text(B, 2), ends=[B])
    evict_blocks(store)
    assert (long in store.index, short in store.index) == (False, True)


def test_under_marconi_a_recent_leaf_goes_before_one_that_saves_far_more() -> None:
    store = make_store(policy="marconi")
    long = enter(store, text(10 * B, 1), ends=[10 * B])
    short, last = enter(store, text(B, 2), ends=[B]), enter(store, text(2 * B, 3), ends=[2 * B])
    evict_blocks(store)
    assert [entry in store.index for entry in (long, short, last)] == [True, False, True]


def test_a_leaf_where_a_request_stands_is_not_evicted_and_what_is_left_is_an_error_when_it_runs_out() -> None:
    store = make_store(policy="lru")
    held, other = enter(store, text(B, 1)), enter(store, text(B, 2))
    held.num_holders = 1
    evict_blocks(store)
    assert (held in store.index, other in store.index) == (True, False)
    with pytest.raises(AssertionError, match="no block is free or evictable"):
        evict_blocks(store)


def test_an_evicted_block_takes_its_checkpoint_along_and_both_are_free() -> None:
    store = make_store(num_blocks=2, num_slots=1)
    enter(store, text(2 * B), ends=[2 * B])
    assert (store.blocks.num_free, store.slots.num_free) == (0, 0)
    evict_blocks(store)
    assert (store.blocks.num_free, store.slots.num_free) == (1, 1)


# Checkpoints


@pytest.mark.parametrize("policy", ["marconi", "lru"])
def test_a_checkpoint_inside_a_text_that_was_never_hit_goes_before_an_older_one_at_an_end(
    policy: EvictionPolicy,
) -> None:
    store = make_store(policy=policy, slot_bytes=1)
    enter(store, text(B, 1), ends=[B])
    enter(store, text(9 * B, 2), inside=[8 * B])
    evict_slots(store)
    assert checkpoints(store) == {B}


@pytest.mark.parametrize("policy", ["marconi", "lru"])
def test_a_checkpoint_inside_a_text_that_was_hit_is_like_one_at_an_end(policy: EvictionPolicy) -> None:
    store = make_store(policy=policy)
    enter(store, text(2 * B, 1), ends=[B])
    entry = enter(store, text(9 * B, 2), inside=[8 * B])
    assert entry.parent is not None
    assert entry.parent.checkpoint is not None
    entry.parent.checkpoint.hits = 1
    evict_slots(store)
    assert checkpoints(store) == {8 * B}


def test_marconi_keeps_the_checkpoint_of_a_long_prefix_over_that_of_a_recent_short_one_and_lru_does_not() -> None:
    kept = {}
    for policy in ("marconi", "lru"):
        store = make_store(policy=policy, flops_per_token=100.0, slot_bytes=10)
        enter(store, text(10 * B, 1), ends=[10 * B])
        enter(store, text(B, 2), ends=[B])
        enter(store, text(2 * B, 3), ends=[2 * B])
        evict_slots(store)
        kept[policy] = checkpoints(store)
    assert kept == {"marconi": {10 * B, 2 * B}, "lru": {B, 2 * B}}


def test_of_two_checkpoints_of_one_text_the_one_right_after_the_other_saves_little() -> None:
    store = make_store()
    enter(store, text(10 * B, 1), ends=[8 * B, 9 * B])
    evict_slots(store)
    assert checkpoints(store) == {8 * B}


def test_attention_over_a_long_prefix_makes_its_end_worth_more_than_its_beginning() -> None:
    store = make_store(flops_per_token=1.0, flops_per_pair=1.0)
    enter(store, text(10 * B, 1), ends=[5 * B, 10 * B])
    evict_slots(store)
    assert checkpoints(store) == {10 * B}


def test_the_least_recently_used_checkpoint_goes_first_under_lru() -> None:
    store = make_store(policy="lru")
    for seed in (1, 2, 3):
        enter(store, text(seed * B, seed), ends=[seed * B])
    oldest = next(iter(store.index.checkpoints))
    store.touch(oldest.entry)
    oldest.last_use = store.now
    evict_slots(store)
    assert checkpoints(store) == {B, 3 * B}


def test_a_slot_that_a_request_reads_is_not_evicted() -> None:
    store = make_store(num_slots=2, policy="lru")
    enter(store, text(B, 1), ends=[B])
    enter(store, text(2 * B, 2), ends=[2 * B])
    read = next(checkpoint.slot for checkpoint in store.index.checkpoints)
    store.slots.retain([read])
    assert store.slots.num_available == 1
    evict_slots(store)
    assert store.index.checkpoint_of(read) is not None
    with pytest.raises(AssertionError, match="no slot is free or evictable"):
        evict_slots(store, count=2)


def test_the_block_under_an_evicted_checkpoint_stays_and_remembers_that_it_had_one() -> None:
    store = make_store()
    entry = enter(store, text(B), ends=[B])
    evict_slots(store)
    assert entry in store.index
    assert (entry.checkpoint, entry.lost_checkpoint) == (None, True)
    enter(store, text(B), ends=[B])
    assert not entry.lost_checkpoint


# The queue


class Things:
    """Candidates for a queue: name -> when it was last used. They count how often all are looked at."""

    def __init__(self, names: Iterable[str]) -> None:
        self.uses = {name: number for number, name in enumerate(names)}
        self.looks = 0
        self.queue: EvictionQueue = EvictionQueue(
            "lru", self._all, lambda name: Utility(1, self.uses[name], 0.0), lambda name: name in self.uses
        )

    def pop(self) -> str | None:
        name = self.queue.pop()
        if name is not None:
            del self.uses[name]
        return name

    def _all(self) -> Iterator[str]:
        self.looks += 1
        return iter(list(self.uses))


def test_one_look_at_all_candidates_serves_several_evictions() -> None:
    things = Things(f"{number:03}" for number in range(160))
    assert [things.pop() for _ in range(20)] == [f"{number:03}" for number in range(20)]
    assert things.looks == 1
    things.pop()
    assert things.looks == 2


def test_what_was_used_since_the_look_is_passed_over() -> None:
    things = Things(f"{number:03}" for number in range(160))
    assert things.pop() == "000"
    things.uses["001"] = 1000
    del things.uses["002"]
    assert things.pop() == "003"
    assert things.looks == 1


def test_when_all_that_was_remembered_is_used_or_gone_the_queue_looks_again_and_finds_the_oldest() -> None:
    things = Things(f"{number:03}" for number in range(80))
    assert things.pop() == "000"
    for number in range(1, 10):
        things.uses[f"{number:03}"] = 1000 + number
    assert things.pop() == "010"
    assert things.looks == 2


def test_a_new_candidate_waits_for_the_next_look_unless_it_is_offered_and_goes_before_what_is_remembered() -> None:
    things = Things(f"{number:03}" for number in range(80))
    things.pop()
    things.uses |= {"offered": 3, "not offered": 2, "too good": 99}
    things.queue.push("offered")
    things.queue.push("too good")
    assert [things.pop() for _ in range(4)] == ["001", "002", "003", "offered"]
    assert [things.pop() for _ in range(6)] == [f"{number:03}" for number in range(4, 10)]
    assert things.looks == 1
    assert things.pop() == "not offered"


def test_a_queue_without_candidates_gives_none_and_serves_those_that_come_later() -> None:
    things = Things([])
    assert things.pop() is None
    things.uses["late"] = 1
    assert things.pop() == "late"
    assert things.pop() is None


# Bounds


def test_the_list_of_evicted_blocks_forgets_the_oldest() -> None:
    keys = RecentKeys(max_keys=3)
    for key in (1, 2, 3, 1, 4):
        keys.add(key)
    assert [key for key in range(6) if key in keys] == [1, 3, 4]
    keys.discard(3)
    keys.discard(99)
    keys.add(5)
    assert [key for key in range(6) if key in keys] == [1, 4, 5]


def test_the_index_of_a_model_without_attention_is_bounded_and_keeps_what_was_used_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(store_module, "MAX_ENTRIES_WITHOUT_BLOCKS", 10)
    scheduler = make_caching_scheduler("align", num_blocks=0, num_slots=30, eviction="lru")
    runner = runner_for(scheduler)
    for seed in range(6):
        serve(scheduler, runner, text(4 * B + 1, seed))
        assert len(scheduler.cache.store.index) <= 10
    assert report_of(serve(scheduler, runner, text(4 * B + 1, 5)))[0] == 4 * B
    assert report_of(serve(scheduler, runner, text(4 * B + 1, 1))) == (
        0,
        {"evicted_block": 4 * B, "recomputed_tail": 1},
    )


@pytest.mark.parametrize("mode", ["none", "align", "all"])
def test_a_text_longer_than_the_bound_of_a_model_without_attention_is_served(
    monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.setattr(store_module, "MAX_ENTRIES_WITHOUT_BLOCKS", 3)
    scheduler = make_caching_scheduler(mode, num_blocks=0, num_slots=30, max_num_batched_tokens=7)
    runner = runner_for(scheduler)
    serve(scheduler, runner, text(10 * B), max_tokens=10)
    serve(scheduler, runner, text(9 * B, 2), max_tokens=10)
    serve(scheduler, runner, text(2 * B, 3))
    assert len(scheduler.cache.store.index) <= 3
