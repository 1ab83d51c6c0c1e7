"""Events of the prefix index: whoever follows them knows what is cached, from whenever on."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.kv_cache.cache_events import (
    AllBlocksCleared,
    BlockStored,
    CacheContents,
    CacheEventLog,
    CheckpointRemoved,
    CheckpointStored,
)
from ostinato.kv_cache.prefix_index import BlockHashes, PrefixIndex
from tests.support.scheduler_steps import BLOCK, make_caching_scheduler, runner_for, serve, text


def check_follows(contents: CacheContents, index: PrefixIndex) -> None:
    """The contents are those of the index, and a replay of them leads to the same."""
    blocks = {e.key: (None if e.parent is None else e.parent.key, list(e.token_ids)) for e in index}
    checkpoints = {each.entry.key: each.entry.end for each in index.checkpoints}
    later = CacheContents()
    parts = list(contents.replay())
    assert [left for left, _ in parts] == list(range(len(parts)))[::-1]
    for _, events in parts:
        for event in events:
            if isinstance(event, BlockStored):
                assert event.parent_block_hash is None or event.parent_block_hash in later.blocks
            later.apply(event)
    for known in (contents, later):
        assert known.blocks == blocks
        assert known.checkpoints == checkpoints


@pytest.mark.parametrize(("num_blocks", "num_slots"), [(24, 6), (24, 0), (0, 6)])
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 50)), max_size=8), st.integers(0, 7), st.integers(0, 7))
def test_a_reader_of_events_knows_the_index_through_evictions_and_resets(
    num_blocks: int, num_slots: int, prompts: list[tuple[int, int]], begin: int, reset: int
) -> None:
    scheduler = make_caching_scheduler(num_blocks=num_blocks, num_slots=num_slots)
    runner, store, contents = runner_for(scheduler), scheduler.cache.store, CacheContents()
    log: CacheEventLog | None = None
    for number, (seed, length) in enumerate(prompts):
        if number == begin:
            log = store.index.publish()
        if number == reset:
            assert store.clear()
        serve(scheduler, runner, text(length, seed), max_tokens=3)
        if log is not None:
            for event in log.take():
                contents.apply(event)
            check_follows(contents, store.index)


def test_blocks_that_follow_each_other_share_an_event_with_hashes_that_others_can_compute() -> None:
    scheduler = make_caching_scheduler()
    log = scheduler.cache.store.index.publish()
    prompt = text(20)
    serve(scheduler, runner_for(scheduler), prompt, max_tokens=1)
    chain = BlockHashes(BLOCK)
    chain.extend(lambda start, end: prompt[start:end], len(prompt))
    events = log.take()
    stored = [event for event in events if isinstance(event, BlockStored)]
    assert [key for event in stored for key in event.block_hashes] == chain.keys
    assert len(stored) < len(chain.keys)
    assert [token for event in stored for token in event.token_ids] == list(prompt)
    checkpoints = [event for event in events if isinstance(event, CheckpointStored)]
    assert checkpoints
    assert all(chain.keys[event.position // BLOCK - 1] == event.block_hash for event in checkpoints)


def test_a_reset_is_one_event_and_a_lost_checkpoint_leaves_its_block() -> None:
    scheduler = make_caching_scheduler(num_slots=4, spacing=BLOCK)
    store, runner = scheduler.cache.store, runner_for(scheduler)
    log = store.index.publish()
    contents = CacheContents()
    for seed in range(4):
        serve(scheduler, runner, text(20, seed), max_tokens=1)
    events = log.take()
    for event in events:
        contents.apply(event)
    lost = [event.block_hash for event in events if isinstance(event, CheckpointRemoved)]
    assert lost
    assert any(key in contents.blocks and key not in contents.checkpoints for key in lost)
    assert store.clear()
    assert log.take() == [AllBlocksCleared()]
