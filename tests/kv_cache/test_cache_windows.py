"""Block boundaries inside verify windows: which states are kept there, and that the next turn goes on from them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.kv_cache.checkpoints import StateCacheMode
from ostinato.kv_cache.prefix_index import BlockHashes
from ostinato.scheduler.request import FinishReason, Request, StopConditions
from ostinato.scheduler.scheduler import Scheduler
from tests.support.fake_runner import FakeRunner, continuation
from tests.support.scheduler_steps import (
    BLOCK,
    make_caching_scheduler,
    make_request,
    report_of,
    request_of,
    right_guesses,
    run_all,
    runner_for,
    serve,
    step,
    text,
)

B = BLOCK

Kind = Literal["hybrid", "state", "attention"]


def make_roomy(mode: StateCacheMode = "all", kind: Kind = "hybrid", k: int = 3, spacing: int = 100 * B) -> Scheduler:
    """Memory for everything that a test does."""
    return make_caching_scheduler(
        "none" if kind == "attention" else mode,
        num_blocks=0 if kind == "state" else 300,
        num_slots=0 if kind == "attention" else 300,
        spacing=spacing,
        k=k,
        max_model_len=1000,
    )


def hit_of(scheduler: Scheduler, prompt: tuple[int, ...]) -> int:
    """The tokens of this prompt that are cached."""
    block_hashes = BlockHashes(B)
    block_hashes.extend(lambda start, end: prompt[start:end], len(prompt))
    return scheduler.cache.store.match(block_hashes, len(prompt) - 1).hit


def ends(scheduler: Scheduler) -> set[int]:
    """Where checkpoints stand."""
    return {each.entry.end for each in scheduler.cache.store.index.checkpoints}


def prefilled(scheduler: Scheduler, runner: FakeRunner, prompt: int, max_tokens: int = 60) -> Request:
    """A request whose prompt is computed."""
    request = request_of("a", text(prompt), max_tokens)
    scheduler.add(request)
    while not request.output_token_ids:
        step(scheduler, runner)
    return request


# The checkpoints of a window


@pytest.mark.parametrize("mode", ["align", "all"])
@pytest.mark.parametrize("kind", ["hybrid", "state"])
@pytest.mark.parametrize("k", [1, 2, 3, 4, 6, 9])
def test_wherever_the_output_may_turn_out_to_end_in_a_window_the_last_boundary_before_it_is_cached(
    mode: StateCacheMode, kind: Kind, k: int
) -> None:
    """For every number of accepted drafts, and every place of the window beside the (two or three) boundaries in it."""
    for num_accepted, prompt in itertools.product(range(k + 1), range(B + 1, 2 * B + 1)):
        scheduler = make_roomy(mode, kind, k)
        runner = runner_for(scheduler, right_guesses(num_accepted))
        request = prefilled(scheduler, runner, prompt)
        while request.num_tokens < prompt + 5 * B:
            before = request.num_tokens
            step(scheduler, runner)
            assert request.num_tokens == before + 1 + num_accepted
            for end in range(before + 1, request.num_tokens + 1):
                assert hit_of(scheduler, request.tokens(0, end)) == (end - 1) // B * B


@pytest.mark.parametrize("mode", ["align", "all"])
@pytest.mark.parametrize("k", [1, 3, 6])
def test_the_next_turn_goes_on_from_a_boundary_inside_the_window_wherever_that_lies(
    mode: StateCacheMode, k: int
) -> None:
    for num_accepted, prompt in itertools.product(range(k + 1), range(B + 1, 2 * B + 1)):
        scheduler = make_roomy(mode, "hybrid", k)
        runner = runner_for(scheduler, right_guesses(num_accepted))
        request = prefilled(scheduler, runner, prompt)
        while request.num_computed_tokens < 4 * B:
            before = request.num_tokens
            step(scheduler, runner)
        scheduler.finish("a", FinishReason.STOP)
        runner = FakeRunner(B, states=runner.states, keys=runner.keys)
        # A stop string may have ended at any token of the window.
        for end in range(before + 1, request.num_tokens + 1):
            turn = serve(scheduler, runner, (*request.tokens(0, end), 49), max_tokens=9)
            assert report_of(turn)[0] >= (end - 1) // B * B > 0


def test_the_checkpoint_of_a_boundary_is_the_slot_that_the_step_wrote_there_and_is_not_written_again() -> None:
    for num_accepted, prompt in itertools.product(range(7), range(B + 1, 2 * B + 1)):
        scheduler = make_roomy("all", k=6)
        runner = runner_for(scheduler, right_guesses(num_accepted))
        request = prefilled(scheduler, runner, prompt)
        for _ in range(6):
            batch = scheduler.schedule()
            (row,) = batch.rows
            scheduler.update(runner.run(batch))
            placed = {each.entry.end: each.slot for each in scheduler.cache.store.index.checkpoints}
            for end in range(row.end, row.end + num_accepted + 1):
                if end % B == 0:
                    assert placed[end] == row.write_slots[end - row.end]
            assert not set(placed.values()) & set(scheduler.cache.request_cache("a").write_slots)
            scheduler.check_integrity()
        assert request.num_tokens > prompt + 6


@pytest.mark.parametrize(
    ("accepted_counts", "steps"),
    [
        # 8 is the prompt's last boundary. Without drafts at a boundary, the one before it goes at once.
        ((1, 2, 0, 0), [(12, {8, 12}), (15, {8, 12}), (16, {8, 16}), (17, {8, 16})]),
        # So too where the window's first state stands there: that of the last token known before.
        ((1, 2, 3), [(12, {8, 12}), (15, {8, 12}), (19, {8, 16})]),
        # The output may end at 16, and then 12 is the last boundary computed.
        ((1, 2, 2, 2, 0), [(12, {8, 12}), (15, {8, 12}), (18, {8, 16}), (21, {8, 16, 20}), (22, {8, 16, 20})]),
        ((1, 3, 3, 0), [(12, {8, 12}), (16, {8, 12, 16}), (20, {8, 16, 20}), (21, {8, 16, 20})]),
        ((1, 3, 0, 2, 0), [(12, {8, 12}), (16, {8, 12, 16}), (17, {8, 12, 16}), (20, {8, 16, 20}), (21, {8, 16, 20})]),
    ],
)
def test_the_checkpoint_before_one_among_accepted_drafts_stays_until_the_next_boundary(
    accepted_counts: tuple[int, ...], steps: list[tuple[int, set[int]]]
) -> None:
    scheduler = make_roomy()
    runner = runner_for(scheduler, right_guesses(*accepted_counts, 0))
    request = prefilled(scheduler, runner, 3 * B - 2)
    seen = []
    for _ in steps:
        step(scheduler, runner)
        seen.append((request.num_computed_tokens, ends(scheduler)))
    assert seen == steps


def test_a_checkpoint_inside_a_window_that_was_hit_meanwhile_stays() -> None:
    scheduler = make_roomy()
    runner = runner_for(scheduler, right_guesses(1, 2, 3))
    request = prefilled(scheduler, runner, 3 * B - 2)
    step(scheduler, runner)
    other = request_of("b", (*request.tokens(0, 12), 1), max_tokens=1)
    scheduler.add(other)
    step(scheduler, runner)
    assert (report_of(other)[0], request.num_computed_tokens) == (12, 15)
    run_all(scheduler, runner)
    assert {8, 12} <= ends(scheduler)


@pytest.mark.parametrize("k", [1, 2, 3, 4, 6])
def test_in_mode_all_the_multiples_inside_windows_stay_as_they_do_without_speculation(k: int) -> None:
    def standing(mode: StateCacheMode, k: int) -> set[int]:
        scheduler = make_roomy(mode, k=k, spacing=2 * B)
        serve(scheduler, runner_for(scheduler), text(6), max_tokens=50)
        return ends(scheduler)

    assert standing("all", 0) == {4, 8, 16, 24, 32, 40, 48, 52}
    assert standing("align", 0) == {4, 52}
    for mode in ("align", "all"):
        before = range(52 - k - B, 52)
        assert standing(mode, 0) <= standing(mode, k)
        assert all(end in before for end in standing(mode, k) - standing(mode, 0))


@pytest.mark.parametrize("k", [0, 2])
def test_a_text_whose_next_block_cannot_be_indexed_keeps_its_trailing_checkpoint(k: int) -> None:
    scheduler = make_roomy(k=k)
    runner = runner_for(scheduler, right_guesses(k))
    request = request_of("a", text(6), 40)
    # The hash of the fourth block is that of the first.
    request.block_hashes = BlockHashes(B, block_hash=lambda before, content: before + 1 if before < 3 else 1)
    scheduler.add(request)
    run_all(scheduler, runner)
    assert len(scheduler.cache.store.index) == 3
    assert max(ends(scheduler)) == 3 * B
    assert request.output_token_ids == continuation(text(6), 40)


def test_a_window_without_slots_to_spare_takes_its_checkpoints_and_the_next_one_overwrites_them() -> None:
    scheduler = make_caching_scheduler(num_slots=4, k=2, spacing=B)
    runner = runner_for(scheduler, right_guesses(2))
    request = make_request("a", 6, 40)
    scheduler.add(request)
    while scheduler.has_unfinished:
        step(scheduler, runner)
        usage = scheduler.cache.usage()
        assert usage.slots_used + usage.slots_cached <= 3
    counters = scheduler.cache.store.counters
    assert counters.checkpoints_taken == counters.evicted_checkpoints + len(ends(scheduler)) > 8
    assert request.output_token_ids == continuation(request.prompt_token_ids, 40)


# Hits are as long as without speculation


@dataclass(frozen=True)
class Turn:
    """New tokens of a user, and how their answer ends: by its length, by a stop token or, found outside, by a stop
    string, after `end` tokens."""

    length: int
    max_tokens: int
    end: int
    ending: Literal["length", "stop token", "stop string"]


turns = st.builds(
    Turn,
    length=st.integers(1, 9),
    max_tokens=st.integers(1, 25),
    end=st.integers(1, 25),
    ending=st.sampled_from(["length", "stop token", "stop string"]),
)


def converse(scheduler: Scheduler, conversation: list[Turn]) -> list[tuple[int, int]]:
    """(cached tokens, tokens known before it) of each turn."""
    runner = runner_for(scheduler)
    known: tuple[int, ...] = ()
    seen = []
    for number, turn in enumerate(conversation):
        prompt = known + text(turn.length, number)
        output = continuation(prompt, turn.max_tokens)[: turn.end]
        stops = frozenset(output[-1:]) if turn.ending == "stop token" else frozenset()
        request = Request(f"turn {number}", prompt, StopConditions(turn.max_tokens, stop_token_ids=stops))
        scheduler.add(request)
        while scheduler.has_unfinished:
            step(scheduler, runner)
            if turn.ending == "stop string" and len(request.output_token_ids) >= turn.end:
                scheduler.finish(request.request_id, FinishReason.STOP)
        kept = request.output_token_ids[: turn.end if turn.ending == "stop string" else None]
        assert kept == output[: len(kept)] or turn.ending == "length"
        seen.append((report_of(request)[0], len(known)))
        known = prompt + tuple(kept)
    return seen


@pytest.mark.parametrize("mode", ["align", "all"])
@pytest.mark.parametrize("ending", ["length", "stop token", "stop string"])
def test_an_answer_that_ends_inside_a_window_is_hit_at_its_last_boundary(
    mode: StateCacheMode, ending: Literal["length", "stop token", "stop string"]
) -> None:
    for end in range(2, 14):
        conversation = [Turn(7, end if ending == "length" else 30, end, ending), Turn(3, 5, 5, "length")]
        hits = []
        for k in (0, 3):
            scheduler = make_roomy(mode, k=k)
            (_, _), (cached, known) = converse(scheduler, conversation)
            hits.append(cached)
        assert hits[0] == (known - 1) // B * B
        assert hits[1] in ((known - 1) // B * B, known // B * B if ending == "stop string" else hits[0])


@settings(deadline=None, max_examples=80)
@given(
    mode=st.sampled_from(["align", "all"]),
    kind=st.sampled_from(["hybrid", "state", "attention"]),
    k=st.sampled_from([1, 2, 3, 3, 6]),
    spacing=st.sampled_from([B, 2 * B, 100 * B]),
    conversation=st.lists(turns, min_size=2, max_size=5),
)
@pytest.mark.slow
def test_each_turn_hits_as_much_with_speculation_as_without_however_the_one_before_it_ended(
    mode: StateCacheMode, kind: Kind, k: int, spacing: int, conversation: list[Turn]
) -> None:
    plain = converse(make_roomy(mode, kind, 0, spacing), conversation)
    fast = converse(make_roomy(mode, kind, k, spacing), conversation)
    assert [known for _, known in plain] == [known for _, known in fast]
    for before, (least, known), (cached, _) in zip([None, *conversation], plain, fast, strict=False):
        if before is not None and before.ending == "stop string":
            # The last token of such an output is computed if the window went on behind it.
            assert least <= cached <= known // B * B
        else:
            assert cached == least


@settings(deadline=None, max_examples=30)
@given(
    mode=st.sampled_from(["align", "all"]),
    k=st.integers(1, 6),
    common=st.integers(1, 40),
    rests=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=2, max_size=4),
)
def test_requests_that_share_a_beginning_hit_as_much_with_speculation_as_without(
    mode: StateCacheMode, k: int, common: int, rests: list[tuple[int, int]]
) -> None:
    def hits(k: int) -> list[int]:
        scheduler = make_roomy(mode, k=k, spacing=2 * B)
        runner = runner_for(scheduler)
        prompts = [(*text(common), number, *text(rest)) for number, (rest, _) in enumerate(rests)]
        served = [serve(scheduler, runner, prompt, rests[i][1]) for i, prompt in enumerate(prompts)]
        served += [serve(scheduler, runner, prompt) for prompt in prompts]
        return [report_of(request)[0] for request in served]

    assert hits(k) == hits(0)
