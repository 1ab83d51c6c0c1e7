"""Comparison with the plain path on made-up tokens: equal, ties, differences, and ends that come too soon."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from ostinato.verify.compare import Divergence, Scores, Verdict, compare, verdict_of

PLAIN = (10, 11, 12, 13, 14)
TOLERANCE = 0.5


def scores(place: int, gap: float) -> Scores:
    """The plain token is the best, the one after it the second best, all others have a score of 0."""
    best = ((PLAIN[place], 8.0), (PLAIN[place] + 1, 8.0 - gap))
    return Scores(best, TOLERANCE, lambda token: dict(best).get(token, 0.0))


def compared(
    came: Sequence[int], ties: Sequence[int] = (), onward: dict[int, Sequence[int]] | None = None
) -> list[Divergence]:
    """`ties` are the places where the plain path is too close to call, `onward` what comes behind so many plain
    tokens; asking for anything else is an error."""

    def scores_at(place: int) -> Scores:
        return scores(min(place, len(PLAIN) - 1), TOLERANCE if place in ties else TOLERANCE + 0.01)

    return compare(PLAIN, came, scores_at, (onward or {}).__getitem__)


def test_equal_tokens_are_equal_and_nothing_is_asked_of_the_plain_path() -> None:
    assert compared(PLAIN) == []
    assert verdict_of([]) is Verdict.EQUAL


def test_a_difference_is_told_with_its_place_and_scores_and_ends_the_comparison() -> None:
    [found] = compared((10, 11, 99, 98, 97), ties=(3, 4))
    assert (found.place, found.expected, found.actual) == (2, 12, 99)
    assert found.best == ((12, 8.0), (13, 8.0 - TOLERANCE - 0.01))
    assert (found.expected_score, found.came_score, found.tolerance) == (8.0, 0.0, TOLERANCE)
    assert not found.is_tie
    assert verdict_of([found]) is Verdict.DIFFERENT


def test_a_gap_of_just_the_tolerance_is_a_tie_and_the_comparison_goes_on_from_the_plain_token() -> None:
    [found] = compared((10, 12, 77, 77, 77), ties=(1,), onward={2: (12, 13, 14)})
    assert (found.place, found.expected, found.actual, found.is_tie) == (1, 11, 12, True)
    assert verdict_of([found]) is Verdict.TIE


def test_a_token_that_is_neither_of_the_best_differs_even_at_a_tie() -> None:
    [found] = compared((10, 99, 12, 13, 14), ties=(1,))
    assert (found.place, found.actual, found.is_tie) == (1, 99, False)


def test_a_difference_behind_a_tie_is_found_at_its_place_in_the_whole_output() -> None:
    tie, difference = compared((10, 12, 77, 77, 77), ties=(1,), onward={2: (12, 55, 14)})
    assert (tie.place, tie.is_tie) == (1, True)
    assert (difference.place, difference.expected, difference.actual, difference.is_tie) == (3, 13, 55, False)
    assert verdict_of([tie, difference]) is Verdict.DIFFERENT


def test_several_ties_are_all_listed() -> None:
    found = compared((11, 1, 1, 1, 1), ties=(0, 2), onward={1: (11, 13, 1, 1), 3: (13, 14)})
    assert [(each.place, each.is_tie) for each in found] == [(0, True), (2, True)]


def test_a_tie_at_the_last_token_asks_for_nothing_more() -> None:
    [found] = compared((10, 11, 12, 13, 15), ties=(4,))
    assert found.is_tie


@pytest.mark.parametrize(("came", "place"), [((10, 11, 12), 3), ((*PLAIN, 15), 5), ((), 0)])
def test_an_output_that_ends_elsewhere_differs_even_at_a_tie(came: tuple[int, ...], place: int) -> None:
    [found] = compared(came, ties=range(6))
    assert (found.place, found.is_tie) == (place, False)
    assert (found.actual is None) == (len(came) < len(PLAIN))
    assert (found.expected is None) == (len(came) > len(PLAIN))
