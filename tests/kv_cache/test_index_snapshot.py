"""A picture of the prefix index: branches, checkpoints and hits, and no more work than a bound allows."""

from __future__ import annotations

from typing import Any

import pytest

from ostinato.kv_cache.index_snapshot import snapshot_index
from ostinato.scheduler.scheduler import Scheduler
from tests.support.fake_runner import FakeRunner
from tests.support.scheduler_steps import make_caching_scheduler, runner_for, serve

SIZE = 4
Cache = tuple[Scheduler, FakeRunner]


@pytest.fixture
def cache() -> Cache:
    scheduler = make_caching_scheduler(
        "align", num_blocks=500, num_slots=100, spacing=SIZE, eviction="lru", block_size=SIZE,
        max_num_batched_tokens=64, max_model_len=200,
    )  # fmt: skip
    return scheduler, runner_for(scheduler)


def draw(cache: Cache, **bounds: int) -> dict[str, Any]:
    return snapshot_index(cache[0].cache.store.index, **bounds)


def prompt(*parts: tuple[int, int]) -> list[int]:
    return [token for token, length in parts for _ in range(length)]


def test_an_empty_index_is_an_empty_picture(cache: Cache) -> None:
    assert draw(cache) == {"texts": 0, "blocks": 0, "checkpoints": 0, "branches": []}


def test_texts_that_begin_alike_are_branches_of_one_tree(cache: Cache) -> None:
    serve(*cache, prompt((1, 12), (2, 9)), 1)
    serve(*cache, prompt((1, 12), (3, 13)), 1)
    serve(*cache, prompt((4, 9)), 1)
    shown = draw(cache)
    index = cache[0].cache.store.index
    assert (shown["texts"], shown["blocks"]) == (3, len(index))
    lines = [(branch["parent"], branch["begin"], branch["end"]) for branch in shown["branches"]]
    assert lines == [(None, 0, 8), (None, 0, 24), (1, 12, 20)]
    assert not any(branch["is_used"] for branch in shown["branches"])
    marked = {mark["at"] for branch in shown["branches"] for mark in branch["marks"] if mark["is_checkpoint"]}
    assert marked == {checkpoint.entry.end for checkpoint in index.checkpoints}
    assert shown["checkpoints"] == len(list(index.checkpoints))


def test_hits_are_counted_where_they_happen(cache: Cache) -> None:
    text = prompt((1, 13))
    for _ in range(3):
        serve(*cache, text, 1)
    [branch] = draw(cache)["branches"]
    assert [(mark["at"], mark["hits"]) for mark in branch["marks"] if mark["hits"]] == [(12, 2)]


def test_hits_of_a_model_without_states_are_counted_too() -> None:
    scheduler = make_caching_scheduler(
        "none", num_blocks=500, num_slots=0, spacing=SIZE, eviction="lru", block_size=SIZE,
        max_num_batched_tokens=64, max_model_len=200,
    )  # fmt: skip
    cache = scheduler, runner_for(scheduler)
    for tail in (2, 3, 3):
        serve(*cache, prompt((1, 8), (tail, 5)), 1)
    marks = [mark for branch in draw(cache)["branches"] for mark in branch["marks"]]
    assert sorted((mark["at"], mark["hits"]) for mark in marks) == [(8, 1), (12, 1)]
    assert not any(mark["is_checkpoint"] for mark in marks)


def test_the_texts_used_last_are_shown_up_to_a_bound(cache: Cache) -> None:
    for token in range(1, 7):
        serve(*cache, prompt((token, 9)), 1)
    serve(*cache, prompt((1, 9)), 1)
    shown = draw(cache, most_texts=2)
    assert (shown["texts"], len(shown["branches"])) == (6, 2)
    assert any(mark["hits"] for mark in shown["branches"][0]["marks"])


def test_no_more_blocks_are_looked_at_than_the_bound_allows(cache: Cache) -> None:
    serve(*cache, prompt((1, 100)), 1)
    serve(*cache, prompt((2, 9)), 1)
    assert [branch["end"] for branch in draw(cache, most_entries=10)["branches"]] == [8]
    assert draw(cache, most_entries=1)["branches"] == []
