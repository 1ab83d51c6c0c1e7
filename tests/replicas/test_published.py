"""What replicas tell of their index, and what becomes of it on the other side."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.kv_cache.index_snapshot import prefix_hit_keys
from ostinato.kv_cache.prefix_index import BlockHashes
from ostinato.replicas.index_sync import IndexChanges, IndexPublisher, PublishedIndex
from tests.support.scheduler_steps import BLOCK, make_caching_scheduler, runner_for, serve, text


def chain_of(tokens: tuple[int, ...], salt: str | None = None) -> BlockHashes:
    chain = BlockHashes(BLOCK, salt)
    chain.extend(lambda start, end: tokens[start:end], len(tokens))
    return chain


@pytest.mark.parametrize(("num_blocks", "num_slots"), [(100, 100), (100, 0), (0, 100)])
def test_what_is_told_predicts_the_hit_that_the_replica_then_has(num_blocks: int, num_slots: int) -> None:
    scheduler = make_caching_scheduler(num_blocks=num_blocks, num_slots=num_slots)
    runner = runner_for(scheduler)
    publisher, published = IndexPublisher(), PublishedIndex()
    for seed, length in ((0, 30), (1, 9), (0, 50), (2, 3), (1, 41)):
        changes = publisher.changes(prefix_hit_keys(scheduler.cache.store.index, num_slots > 0))
        assert changes is None or published.apply(changes)
        prompt = text(length, seed)
        expected = published.depth(chain_of(prompt).keys[: (length - 1) // BLOCK]) * BLOCK
        request = serve(scheduler, runner, prompt, max_tokens=6)
        assert request.cache_report is not None
        assert request.cache_report.cached_tokens == expected


def test_another_salt_finds_nothing_of_what_was_told() -> None:
    scheduler = make_caching_scheduler()
    serve(scheduler, runner_for(scheduler), text(30), cache_salt="one")
    published = PublishedIndex()
    published.apply(IndexChanges(0, tuple(prefix_hit_keys(scheduler.cache.store.index, True)), is_whole=True))
    assert published.depth(chain_of(text(30), "one").keys) > 0
    assert published.depth(chain_of(text(30), "two").keys) == published.depth(chain_of(text(30)).keys) == 0


def test_a_replica_tells_of_so_many_at_most_those_used_last() -> None:
    scheduler = make_caching_scheduler()
    runner = runner_for(scheduler)
    for seed in range(4):
        serve(scheduler, runner, text(30, seed))
    keys = prefix_hit_keys(scheduler.cache.store.index, True, max_keys=2)
    assert len(keys) == 2
    assert keys <= set(chain_of(text(30, 3)).keys)


KEYS = st.frozensets(st.integers(0, 20))


@given(st.lists(st.tuples(KEYS, st.booleans())))
def test_the_router_knows_what_the_replica_has_whatever_gets_lost(steps: list[tuple[frozenset[int], bool]]) -> None:
    publisher, published = IndexPublisher(), PublishedIndex()
    for keys, arrives in steps:
        changes = publisher.changes(keys)
        if changes is not None and arrives and not published.apply(changes):
            assert not published.is_known
            assert len(published) == 0
            whole = publisher.changes(keys, whole=True)
            assert whole is not None
            assert published.apply(whole)
        if arrives and changes is not None:
            assert {key for key in range(21) if published.depth([key])} == keys


def test_changes_that_come_twice_or_before_all_that_was_told_ask_for_everything() -> None:
    assert not PublishedIndex().apply(IndexChanges(3, (1,)))
    published = PublishedIndex()
    assert published.apply(IndexChanges(0, (1,), is_whole=True))
    assert published.apply(IndexChanges(1, (2,), (1,)))
    assert not published.apply(IndexChanges(1, (2,), (1,)))
    assert published.depth([2]) == 0
    assert published.apply(IndexChanges(7, (5,), is_whole=True))
    assert published.depth([4, 5, 6]) == 2
