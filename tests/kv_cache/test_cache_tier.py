"""What leaves the index comes back from files: hits, misses and their causes, and what stays available meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from ostinato.kv_cache.checkpoints import StateCacheMode
from ostinato.kv_cache.offload.save_restore import save_to_files
from ostinato.scheduler.request import Request
from ostinato.scheduler.scheduler import Scheduler
from tests.support.fake_files import ForgetfulDirectory, fake_tier
from tests.support.fake_runner import FakeRunner
from tests.support.scheduler_steps import (
    make_caching_scheduler,
    report_of,
    request_of,
    run_all,
    runner_for,
    serve,
    text,
)

KINDS = {
    "hybrid": (9, 5, 0),
    "attention": (9, 0, 0),
    "state": (0, 4, 0),
    "windows": (9, 0, 9),
    "windows alone": (0, 0, 9),
    "windows and state": (9, 5, 9),
}
"""Blocks, slots and window blocks of caches that hold one text of 24 tokens and little more."""
WINDOW = 6
"""Of layers whose keys are in window blocks: a text needs the window blocks of two blocks to go on."""


def crowded(
    kind: str, directory: ForgetfulDirectory, mode: StateCacheMode = "all", rate: float = 1e12
) -> tuple[Scheduler, FakeRunner]:
    num_blocks, num_slots, num_window_blocks = KINDS[kind]
    scheduler = make_caching_scheduler(
        mode,
        num_blocks,
        num_slots,
        num_window_blocks=num_window_blocks,
        window=WINDOW,
        max_num_seqs=1,
        max_num_batched_tokens=8,
    )
    runner = runner_for(scheduler)
    scheduler.cache.store.files = fake_tier(runner, directory, rate)
    return scheduler, runner


def turns(scheduler: Scheduler, runner: FakeRunner, seeds: Sequence[int], length: int = 24) -> list[Request]:
    return [serve(scheduler, runner, text(length, seed)) for seed in seeds]


def from_files(request: Request) -> int:
    assert request.cache_report is not None
    return request.cache_report.from_files


@pytest.mark.parametrize("mode", ["all", "align"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_text_that_made_room_for_another_is_hit_again(kind: str, mode: StateCacheMode) -> None:
    scheduler, runner = crowded(kind, ForgetfulDirectory(one_in=0), mode)
    *_, again = turns(scheduler, runner, [1, 2, 3, 1])
    assert (report_of(again), from_files(again)) == ((20, {"recomputed_tail": 4}), 20)
    assert scheduler.prefix_counters.file_tokens == 20


@pytest.mark.parametrize("kind", KINDS)
def test_all_that_can_be_hit_is_kept_at_the_end_and_another_engine_finds_it(kind: str) -> None:
    directory = ForgetfulDirectory(one_in=0)
    scheduler, runner = crowded(kind, directory)
    turns(scheduler, runner, [1])
    save_to_files(scheduler.cache.store)
    assert scheduler.cache.store.files is None
    num_blocks, num_slots, num_window_blocks = (40 if each else 0 for each in KINDS[kind])
    later = make_caching_scheduler("all", num_blocks, num_slots, num_window_blocks=num_window_blocks, window=WINDOW)
    its_runner = runner_for(later)
    later.cache.store.files = fake_tier(its_runner, directory)
    its_runner.copies = runner.copies
    again = serve(later, its_runner, text(24, 1), 6)
    assert (report_of(again)[0], from_files(again)) == (20, 20)
    # And what goes on from it finds it in memory.
    assert from_files(serve(later, its_runner, text(24, 1))) == 0


@pytest.mark.parametrize("kind", ["hybrid", "windows and state"])
def test_blocks_before_a_state_that_went_to_files_alone_are_kept_at_the_end(kind: str) -> None:
    directory = ForgetfulDirectory(one_in=0)
    scheduler, runner = crowded(kind, directory)
    [first] = turns(scheduler, runner, [1])
    store, block_hashes = scheduler.cache.store, first.block_hashes
    assert block_hashes is not None
    for checkpoint in list(store.index.checkpoints):
        store.evict_checkpoint(checkpoint)
    assert not any(directory.has("block", name) for name in block_hashes.file_keys)
    save_to_files(store)
    assert all(directory.has("block", name) for name in block_hashes.file_keys[:5])


def test_at_the_end_no_more_is_written_than_files_may_hold() -> None:
    directory = ForgetfulDirectory(one_in=0)
    scheduler = make_caching_scheduler("all", 60, 20, max_num_seqs=1)
    runner = runner_for(scheduler)
    scheduler.cache.store.files = tier = fake_tier(runner, directory)
    *_, last = turns(scheduler, runner, [1, 2, 3])
    assert last.block_hashes is not None
    entries = list(scheduler.cache.store.index)
    own = [each for each in entries if each.file_key in last.block_hashes.file_keys]
    directory.limit = sum(map(tier.bytes_of, own))
    save_to_files(scheduler.cache.store)
    kept = {name for kind, name in directory._kept if kind == "block"}
    assert {each.file_key for each in own if each.end <= 20} <= kept <= {each.file_key for each in own}
    assert len(own) < len(entries)


def test_in_a_short_time_what_was_used_last_is_kept_from_its_start_on(monkeypatch: pytest.MonkeyPatch) -> None:
    directory = ForgetfulDirectory(one_in=0)
    scheduler = make_caching_scheduler("all", 60, 20, max_num_seqs=1)
    runner = runner_for(scheduler)
    scheduler.cache.store.files = fake_tier(runner, directory)
    *_, last = turns(scheduler, runner, [1, 2, 3])
    assert last.block_hashes is not None
    clock = iter([0.0, *[1.0] * 3, *[99.0] * 9])  # at the begin, then before each entry
    monkeypatch.setattr("ostinato.kv_cache.offload.save_restore.time", SimpleNamespace(monotonic=lambda: next(clock)))
    save_to_files(scheduler.cache.store, patience=60.0)
    kept = {name for kind, name in directory._kept if kind == "block"}
    assert kept == set(last.block_hashes.file_keys[:3])


def test_other_salts_find_no_files() -> None:
    scheduler, runner = crowded("hybrid", ForgetfulDirectory(one_in=0))
    turns(scheduler, runner, [1, 2, 3])
    other = serve(scheduler, runner, text(24, 1), cache_salt="other")
    assert report_of(other)[0] == 0


def test_reading_that_takes_longer_than_computing_is_left_alone() -> None:
    scheduler, runner = crowded("hybrid", ForgetfulDirectory(one_in=0), rate=0.01)
    *_, again = turns(scheduler, runner, [1, 2, 3, 1])
    assert (report_of(again)[0], from_files(again)) == (0, 0)


class Damaged(ForgetfulDirectory):
    """Some files cannot be read."""

    def __init__(self) -> None:
        super().__init__(one_in=0)
        self.bad: set[tuple[str, int | None]] = set()
        """(kind, how many tokens the text up to its end has), of any text."""
        self.ends: dict[bytes, int] = {}

    def read(self, kind: str, name: bytes, token_ids: Sequence[int], size: int) -> memoryview | None:
        if (kind, self.ends.get(name)) in self.bad:
            del self._kept[kind, name]
            return None
        return super().read(kind, name, token_ids, size)


def with_damage(*bad: tuple[str, int]) -> tuple[Request, Request]:
    """A text that comes again after `bad` files of it were damaged, and once more."""
    directory = Damaged()
    # Slots for checkpoints inside a text too, after 8 and 16 tokens.
    scheduler = make_caching_scheduler("all", 9, 13, max_num_seqs=1)
    runner = runner_for(scheduler)
    scheduler.cache.store.files = fake_tier(runner, directory)
    requests = turns(scheduler, runner, [1, 2, 3])
    block_hashes = requests[0].block_hashes
    assert block_hashes is not None
    directory.ends = {name: (index + 1) * 4 for index, name in enumerate(block_hashes.file_keys)}
    directory.bad = {*bad}
    again = serve(scheduler, runner, text(24, 1))
    directory.bad = set()
    return again, serve(scheduler, runner, text(24, 1))


def test_a_damaged_state_is_a_miss_with_its_cause_and_the_one_before_it_is_hit() -> None:
    again, later = with_damage(("state", 20))
    assert report_of(again) == (16, {"damaged": 4, "recomputed_tail": 4})
    assert report_of(later) == (20, {"recomputed_tail": 4})


def test_behind_a_damaged_block_nothing_is_hit() -> None:
    again, later = with_damage(("block", 12))
    cached, misses = report_of(again)
    assert cached == 8
    assert misses == {"damaged": 4, "evicted_block": 8, "recomputed_tail": 4}
    assert report_of(later)[0] == 20


def test_a_damaged_window_block_is_a_miss_with_its_cause_and_is_computed_and_kept_again() -> None:
    directory = Damaged()
    scheduler, runner = crowded("windows", directory)
    requests = turns(scheduler, runner, [1, 2, 3])
    block_hashes = requests[0].block_hashes
    assert block_hashes is not None
    directory.ends = {name: (index + 1) * 4 for index, name in enumerate(block_hashes.file_keys)}
    directory.bad = {("pane", 16)}
    again = serve(scheduler, runner, text(24, 1))
    assert report_of(again) == (0, {"damaged": 20, "recomputed_tail": 4})
    directory.bad = set()
    turns(scheduler, runner, [2, 3])
    later = serve(scheduler, runner, text(24, 1))
    assert (report_of(later)[0], from_files(later)) == (20, 20)


def test_of_window_blocks_those_before_places_where_texts_go_on_are_kept_alone() -> None:
    directory = ForgetfulDirectory(one_in=0)
    scheduler, runner = crowded("windows", directory)
    requests = turns(scheduler, runner, [1, 2, 3])
    block_hashes = requests[0].block_hashes
    assert block_hashes is not None
    kept = [index for index, name in enumerate(block_hashes.file_keys) if directory.has("pane", name)]
    # The prompt's last boundary is behind block 4, the text's end behind block 6: of 28 tokens, or of 29.
    assert set(kept) <= {3, 4, 5, 6}
    assert {3, 4} <= set(kept)
    assert all(directory.has("block", name) for name in block_hashes.file_keys[:5])


def test_a_state_whose_window_is_gone_is_not_written() -> None:
    for lacks in (False, True):
        directory = ForgetfulDirectory(one_in=0)
        scheduler = make_caching_scheduler("all", 40, 20, num_window_blocks=40, window=WINDOW)
        runner = runner_for(scheduler)
        store = scheduler.cache.store
        serve(scheduler, runner, text(24, 1))
        store.files = fake_tier(runner, directory)
        [checkpoint] = [each for each in store.index.checkpoints if each.entry.end == 20]
        window_block = checkpoint.entry.window_block
        assert window_block is not None
        if lacks:
            store.index.remove_window_block(window_block)
            store.window_blocks.unmark_cached(window_block.id)
        name = checkpoint.entry.file_key = b"20"
        checkpoint.entry.parent.file_key = b"16"  # type: ignore[union-attr]
        store.evict_checkpoint(checkpoint)
        kept = [directory.has("state", name), directory.has("pane", name), directory.has("pane", b"16")]
        assert kept == [not lacks] * 3


def test_window_blocks_that_are_in_memory_are_not_read_and_stay_while_the_others_are() -> None:
    directory = ForgetfulDirectory(one_in=0)
    scheduler, runner = crowded("windows", directory)
    [first] = turns(scheduler, runner, [1])
    store, block_hashes = scheduler.cache.store, first.block_hashes
    assert block_hashes is not None
    turns(scheduler, runner, [2, 3, 1])
    entries = store.index.walk(block_hashes, 5)
    assert [entry.window_block is not None for entry in entries[3:]] == [True, True]
    lost = entries[3].window_block
    assert lost is not None
    store.files.save_window_block(entries[3], lost.id)  # type: ignore[union-attr]
    store.index.remove_window_block(lost)
    store.window_blocks.unmark_cached(lost.id)
    before = directory.counts.read
    again = serve(scheduler, runner, text(24, 1))
    assert report_of(again) == (20, {"recomputed_tail": 4})
    assert directory.counts.read == before + 1


def test_what_is_missing_without_damage_keeps_its_cause() -> None:
    directory = ForgetfulDirectory(one_in=0)
    scheduler, runner = crowded("hybrid", directory)
    turns(scheduler, runner, [1, 2, 3])
    directory.clear()
    assert "damaged" not in report_of(serve(scheduler, runner, text(24, 1)))[1]


def test_forgetting_forgets_files_too() -> None:
    scheduler, runner = crowded("hybrid", ForgetfulDirectory(one_in=0))
    turns(scheduler, runner, [1, 2, 3])
    assert scheduler.cache.store.clear()
    assert report_of(serve(scheduler, runner, text(24, 1))) == (0, {"never_seen": 20, "recomputed_tail": 4})


def test_what_runs_keeps_its_memory_while_files_are_read() -> None:
    # Two rows beside each other in a cache that has room for little more: restoring must not evict what they need.
    directory = ForgetfulDirectory(one_in=0)
    scheduler = make_caching_scheduler("all", 14, 7, max_num_seqs=2)
    runner = runner_for(scheduler)
    scheduler.cache.store.files = fake_tier(runner, directory)
    for seeds in ((1, 2), (3, 4), (1, 3), (2, 1), (4, 2)):
        names = [f"{seed} in {seeds}" for seed in seeds]
        for name, seed in zip(names, seeds, strict=True):
            scheduler.add(request_of(name, text(24, seed), 6))
        run_all(scheduler, runner)
    assert scheduler.prefix_counters.file_tokens > 0
