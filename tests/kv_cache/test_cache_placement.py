"""At which positions the state of a text is kept."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.kv_cache.checkpoints import CheckpointPositions, PrefixCachePolicy, StateCacheMode, plan_checkpoints
from tests.support.scheduler_steps import (
    BLOCK,
    make_caching_scheduler,
    make_request,
    report_of,
    runner_for,
    serve,
    step,
    text,
)

B = BLOCK


def make_placement(
    mode: StateCacheMode, spacing: int = 16, last: int = 40, branch: int = 0, share: int = 9
) -> CheckpointPositions:
    return CheckpointPositions(mode, spacing, last, branch, share)


def boundaries(scheduler_steps: list[list[tuple[str, int, int]]]) -> list[int]:
    """Where the rows of one request end."""
    return [start + count for rows in scheduler_steps for _, start, count in rows]


# Chunks, in mode align


@pytest.mark.parametrize(
    ("start", "limit", "end"),
    [
        (0, 10, 10),  # reaches no multiple: where the budget ends
        (0, 15, 15),
        (0, 16, 16),
        (0, 20, 16),  # crosses one: ends there
        (0, 39, 32),  # ends at the last one that it reaches
        (16, 17, 17),  # begins at one: no chunk without tokens
        (16, 31, 31),
        (16, 32, 32),
        (20, 40, 32),
        (32, 40, 40),  # the last boundary
        (32, 43, 40),
        (33, 39, 39),
        (40, 43, 43),  # after it, to the end
        (42, 43, 43),
        (40, 49, 48),
    ],
)
def test_a_chunk_ends_at_the_last_multiple_or_boundary_that_it_reaches(start: int, limit: int, end: int) -> None:
    assert make_placement("align").chunk_end(start, limit) == end


@pytest.mark.parametrize(
    ("start", "limit", "end"), [(0, 12, 12), (0, 15, 12), (0, 40, 12), (12, 40, 32), (12, 15, 15), (4, 13, 12)]
)
def test_a_chunk_ends_at_the_branch_too(start: int, limit: int, end: int) -> None:
    assert make_placement("align", branch=12).chunk_end(start, limit) == end


@pytest.mark.parametrize(("start", "limit", "end"), [(0, 39, 39), (0, 43, 40), (40, 43, 43), (12, 20, 20)])
def test_without_a_share_only_the_last_boundary_and_the_branch_cut(start: int, limit: int, end: int) -> None:
    assert make_placement("align", share=0).chunk_end(start, limit) == end


@pytest.mark.parametrize("mode", ["none", "all"])
def test_other_modes_cut_nothing(mode: StateCacheMode) -> None:
    assert make_placement(mode, branch=12).chunk_end(0, 43) == 43


@given(
    start=st.integers(0, 60),
    count=st.integers(1, 60),
    spacing=st.integers(1, 6),
    num_tokens=st.integers(1, 120),
    matched=st.integers(0, 20),
    slots=st.integers(0, 40),
)
def test_a_chunk_is_never_empty_and_never_too_long(
    start: int, count: int, spacing: int, num_tokens: int, matched: int, slots: int
) -> None:
    policy = PrefixCachePolicy(True, "align", spacing * B)
    positions = plan_checkpoints(policy, B, num_tokens, 0, min(matched * B, (num_tokens - 1) // B * B), slots)
    end = positions.chunk_end(start, start + count)
    assert start < end <= start + count
    limit = start + count
    if end < limit:
        assert end in (positions.last, positions.branch) or end % positions.spacing == 0


def test_a_prompt_in_align_is_computed_up_to_each_multiple_then_the_last_boundary_then_the_rest() -> None:
    scheduler = make_caching_scheduler("align", spacing=16, max_num_batched_tokens=20)
    runner = runner_for(scheduler)
    scheduler.add(make_request("a", 43, max_tokens=1))
    steps = []
    while scheduler.has_unfinished:
        steps.append(step(scheduler, runner))
    assert boundaries(steps) == [16, 32, 40, 43]
    assert {each.entry.end for each in scheduler.cache.store.index.checkpoints} == {16, 32, 40}


def test_a_prompt_that_ends_at_a_boundary_has_its_last_checkpoint_a_block_before_and_one_where_it_ends() -> None:
    scheduler = make_caching_scheduler("align", spacing=16)
    runner = runner_for(scheduler)
    scheduler.add(make_request("a", 24, max_tokens=1))
    assert boundaries([step(scheduler, runner) for _ in range(3)]) == [16, 20, 24]
    assert {each.entry.end for each in scheduler.cache.store.index.checkpoints} == {16, 20, 24}


# Inside a chunk, in mode all


@pytest.mark.parametrize(
    ("start", "end", "positions"),
    [
        (0, 43, [16, 32, 40]),
        (0, 40, [16, 32]),  # what stands at the end is written in any case
        (0, 32, [16]),
        (16, 33, [32]),
        (0, 16, []),
        (33, 40, []),
        (39, 41, [40]),
        (40, 43, []),
    ],
)
def test_in_mode_all_a_chunk_writes_out_the_multiples_and_the_last_boundary_inside_it(
    start: int, end: int, positions: list[int]
) -> None:
    assert make_placement("all").claim_inside(start, end) == positions


def test_in_mode_all_a_chunk_writes_out_the_branch_too_and_nothing_twice() -> None:
    assert make_placement("all", branch=12).claim_inside(0, 43) == [12, 16, 32, 40]
    assert make_placement("all", branch=16, last=32).claim_inside(0, 35) == [16, 32]


@pytest.mark.parametrize("mode", ["none", "align"])
def test_other_modes_write_out_nothing_on_the_way(mode: StateCacheMode) -> None:
    assert make_placement(mode, branch=12).claim_inside(0, 43) == []


def test_only_multiples_that_are_neither_the_last_boundary_nor_the_branch_are_interior() -> None:
    positions = make_placement("all", branch=12)
    assert [position for position in (12, 16, 32, 40) if positions.is_interior(position)] == [16, 32]


# How many


@pytest.mark.parametrize(
    ("num_evictable", "share", "spacing"),
    [
        (400, 99, 8),
        (64, 15, 8),  # 12 multiples of 8 lie in 0..100
        (52, 12, 8),
        (48, 11, 16),
        (16, 3, 32),  # 96, 64 and 32
        (12, 2, 64),
        (8, 1, 64),
        (4, 0, 8),  # nothing is left for multiples beside the last boundary
        (0, 0, 8),
    ],
)
def test_a_request_places_at_most_a_quarter_of_the_evictable_slots_and_its_spacing_doubles_until_it_does(
    num_evictable: int, share: int, spacing: int
) -> None:
    positions = plan_checkpoints(PrefixCachePolicy(True, "all", 8), B, 101, 0, 0, num_evictable)
    assert (positions.max_interior, positions.spacing, positions.last) == (share, spacing, 100)
    placed = positions.claim_inside(0, 101)
    assert len([position for position in placed if position != 100]) <= share
    assert len(placed) <= max(1, num_evictable // 4)


def test_a_last_boundary_or_branch_that_is_a_multiple_counts_once() -> None:
    policy = PrefixCachePolicy(True, "all", 8)
    # The multiples are 8 to 96: 96 is the last boundary, and 48 the branch.
    assert plan_checkpoints(policy, B, 97, 0, 0, 48).spacing == 8
    assert plan_checkpoints(policy, B, 97, 0, 48, 48).spacing == 8
    assert plan_checkpoints(policy, B, 97, 0, 0, 44).spacing == 16
    positions = plan_checkpoints(policy, B, 97, 0, 48, 48)
    placed = positions.claim_inside(0, 97)
    assert placed == list(range(8, 97, 8))
    assert len(placed) <= 48 // 4


@pytest.mark.parametrize("mode", ["align", "all"])
def test_a_long_output_gives_up_multiples_but_not_the_prompt_s_last_checkpoint(mode: StateCacheMode) -> None:
    scheduler = make_caching_scheduler(mode, num_slots=17, spacing=8)
    runner = runner_for(scheduler)
    prompt = text(26)
    told = serve(scheduler, runner, prompt, max_tokens=60).cache_report
    taken = {each.entry.end for each in scheduler.cache.store.index.checkpoints}
    assert 24 in taken
    assert told is not None
    spacing = told.checkpoint_spacing
    assert spacing is not None
    assert all(position % spacing == 0 for position in taken - {24, 84})
    assert spacing == (32 if mode == "all" else 8)
    assert report_of(serve(scheduler, runner, prompt))[0] == 24


def test_what_a_hit_covers_takes_no_share() -> None:
    positions = plan_checkpoints(PrefixCachePolicy(True, "all", 8), B, 101, 80, 80, 16)
    assert (positions.max_interior, positions.spacing, positions.branch) == (3, 8, 0)
    assert positions.claim_inside(80, 101) == [88, 96, 100]


def test_a_branch_is_where_the_indexed_blocks_end_beyond_the_hit_if_the_policy_wants_branches() -> None:
    both, neither = PrefixCachePolicy(True, "all", 8), PrefixCachePolicy(True, "all", 8, branches=False)
    assert plan_checkpoints(both, B, 101, 16, 52, 400).branch == 52
    assert plan_checkpoints(neither, B, 101, 16, 52, 400).branch == 0
    assert plan_checkpoints(both, B, 101, 52, 52, 400).branch == 0


def test_a_text_that_outgrows_its_share_doubles_its_spacing_and_gives_up_what_is_off_it() -> None:
    positions = make_placement("all", spacing=4, last=0, share=3)
    assert [position for position in range(4, 100, 4) if positions.claim(position)] == [
        4,
        8,
        12,
        16,
        24,
        32,
        48,
        64,
        96,
    ]
    assert (sorted(positions.interior), positions.spacing) == ([32, 64, 96], 32)


def test_a_multiple_whose_checkpoint_was_not_taken_is_forgotten() -> None:
    positions = make_placement("all", share=3)
    positions.claim_inside(0, 43)
    assert sorted(positions.interior) == [16, 32]
    assert positions.take_dropped() == []
    assert positions.interior == {}


@pytest.mark.parametrize("mode", ["none", "align"])
def test_no_multiple_is_claimed_in_mode_none_or_without_a_share(mode: StateCacheMode) -> None:
    assert not make_placement("none").claim(16)
    assert not make_placement(mode, share=0).claim(16)


@pytest.mark.parametrize("mode", ["align", "all"])
@pytest.mark.parametrize("num_slots", [9, 13, 21, 41])
def test_a_long_text_holds_no_more_checkpoints_than_its_share_and_those_at_its_ends(
    mode: StateCacheMode, num_slots: int
) -> None:
    scheduler = make_caching_scheduler(mode, num_slots=num_slots, spacing=B, max_num_batched_tokens=30)
    runner = runner_for(scheduler)
    request = serve(scheduler, runner, text(90), max_tokens=90)
    taken = list(scheduler.cache.store.index.checkpoints)
    assert len([each for each in taken if each.is_interior]) <= (num_slots - 1) // 4
    # The last boundary of the prompt, and the trailing one.
    assert len(taken) <= (num_slots - 1) // 4 + 1
    assert request.cache_report is not None
    spacing = request.cache_report.checkpoint_spacing
    assert spacing is not None
    assert spacing % B == 0
    assert (spacing > B) == ((num_slots - 1) // 4 - 1 < 89 // B)


def test_the_report_states_the_spacing_and_none_where_no_checkpoint_is_wanted_inside() -> None:
    def spacing(mode: StateCacheMode, num_slots: int) -> int | None:
        scheduler = make_caching_scheduler(mode, num_slots=num_slots, spacing=8)
        report = serve(scheduler, runner_for(scheduler), text(101)).cache_report
        assert report is not None
        return report.checkpoint_spacing

    assert [spacing("all", 401), spacing("align", 17), spacing("all", 9)] == [8, 32, 64]
    assert [spacing("all", 5), spacing("none", 401)] == [None, None]
    scheduler = make_caching_scheduler("none", num_slots=0)
    assert report_of(serve(scheduler, runner_for(scheduler), text(9)))[0] == 0
