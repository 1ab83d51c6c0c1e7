"""Which replica a prompt goes to: the pure choice."""

from __future__ import annotations

import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.kv_cache.eviction import EvictionCosts
from ostinato.replicas.router import (
    MAX_LOAD_SHARE,
    Candidate,
    ChoiceReason,
    PromptTimes,
    choose_replica,
    less_busy_of_two,
)

A_SECOND_FOR_100 = PromptTimes(EvictionCosts(), 100.0)
"""Prompts take a second for each 100 tokens."""


def test_the_longest_hit_is_chosen_where_all_are_idle() -> None:
    choice = choose_replica([Candidate("a", 16), Candidate("b", 64), Candidate("c")], 100, A_SECOND_FOR_100)
    assert (choice.name, choice.hit, choice.reason) == ("b", 64, ChoiceReason.LONGEST_HIT)


@pytest.mark.parametrize(
    ("queue", "name", "reason"),
    [(0.63, "a", ChoiceReason.LONGEST_HIT), (0.65, "b", ChoiceReason.SHORTER_QUEUE)],
)
def test_a_queue_decides_once_it_takes_longer_than_the_hit_saves(queue: float, name: str, reason: ChoiceReason) -> None:
    # The hit of 64 tokens saves 0.64 seconds.
    choice = choose_replica([Candidate("a", 64, queue), Candidate("b")], 100, A_SECOND_FOR_100)
    assert (choice.name, choice.reason) == (name, reason)


def test_a_session_stays_where_it_was_among_equals_and_leaves_for_a_shorter_queue() -> None:
    assert choose_replica([Candidate("a"), Candidate("b", is_own=True)], 9, A_SECOND_FOR_100).name == "b"
    assert choose_replica([Candidate("a"), Candidate("b", queue=0.1, is_own=True)], 9, A_SECOND_FOR_100).name == "a"


def test_a_prompt_that_nobody_knows_goes_where_the_least_was_given() -> None:
    choice = choose_replica([Candidate("a", recent=2.0), Candidate("b", recent=1.0)], 9, A_SECOND_FOR_100)
    assert (choice.name, choice.reason) == ("b", ChoiceReason.NOTHING_CACHED)


def test_a_busy_replica_that_was_given_more_than_its_share_is_passed_over_and_an_idle_one_is_not() -> None:
    busy = [Candidate("a", 90, queue=0.1, recent=10.0), Candidate("b", recent=1.0)]
    assert choose_replica(busy, 100, A_SECOND_FOR_100).reason is ChoiceReason.LESS_LOADED
    idle = [Candidate("a", 90, recent=10.0), Candidate("b", recent=1.0)]
    assert choose_replica(idle, 100, A_SECOND_FOR_100).name == "a"


def test_the_rate_of_a_planned_step_gives_its_time_back_and_pairs_of_tokens_count() -> None:
    times = PromptTimes.of_step(EvictionCosts(flops_per_token=10.0, flops_per_pair=1.0), 512, 0.25)
    assert times.seconds(0, 512) == pytest.approx(0.25)
    assert times.seconds(256, 512) > 0.125


CANDIDATES = st.lists(
    st.builds(
        Candidate,
        name=st.text("abcdef", min_size=1, max_size=3),
        hit=st.integers(0, 100),
        queue=st.floats(0, 3),
        recent=st.floats(0, 30),
        is_own=st.booleans(),
    ),
    min_size=1,
    max_size=6,
    unique_by=lambda each: each.name,
)


@given(CANDIDATES, st.randoms(use_true_random=False))
def test_the_order_of_the_replicas_does_not_matter(candidates: list[Candidate], rng: object) -> None:
    shuffled = list(candidates)
    rng.shuffle(shuffled)  # type: ignore[attr-defined]
    assert choose_replica(shuffled, 101, A_SECOND_FOR_100) == choose_replica(candidates, 101, A_SECOND_FOR_100)


@given(CANDIDATES)
def test_nobody_else_with_a_fair_share_would_be_sooner(candidates: list[Candidate]) -> None:
    choice = choose_replica(candidates, 101, A_SECOND_FOR_100)
    (chosen,) = (each for each in candidates if each.name == choice.name)
    bound = MAX_LOAD_SHARE * sum(each.recent for each in candidates) / len(candidates)
    fair = [each for each in candidates if each.queue == 0 or each.recent <= bound] or candidates
    assert chosen in fair
    assert chosen.hit == choice.hit
    soonest = min(each.queue + (101 - each.hit) / 100 for each in fair)
    assert math.isclose(chosen.queue + (101 - chosen.hit) / 100, soonest)


@given(CANDIDATES)
def test_the_reason_tells_whether_somebody_has_more(candidates: list[Candidate]) -> None:
    choice = choose_replica(candidates, 101, A_SECOND_FOR_100)
    longest = max(each.hit for each in candidates)
    if choice.reason is ChoiceReason.NOTHING_CACHED:
        assert longest == 0
    else:
        assert (choice.reason is ChoiceReason.LONGEST_HIT) == (choice.hit == longest)


def test_of_two_random_ones_the_less_busy_is_chosen_whatever_they_have_cached() -> None:
    busy = [Candidate("a", 90, num_requests=3), Candidate("b", num_requests=1)]
    choice = less_busy_of_two(busy, Random(0))
    assert (choice.name, choice.reason) == ("b", ChoiceReason.TWO_CHOICES)
    draws = Random(1)
    chosen = {less_busy_of_two([Candidate("a"), Candidate("b"), Candidate("c")], draws).name for _ in range(50)}
    assert chosen == {"a", "b", "c"}
    assert less_busy_of_two([Candidate("a")], draws).name == "a"
