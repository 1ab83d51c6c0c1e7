"""Comparison of tokens with the plain path's: equal, a tie that rounding decides, or different. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

TIE_EPS = 8
"""Largest gap that counts as a tie, in eps of the dtype (of states' if it is coarser) times the largest logit."""


class Verdict(StrEnum):
    EQUAL = "equal"
    TIE = "tie"
    """Output that differs only where the plain path itself is too close to call."""
    DIFFERENT = "different"
    ERROR = "error"
    """Cell in which an exception was raised, or the cache gave a request what it must not have."""


@dataclass(frozen=True)
class Scores:
    """Scores of the plain path at one place of an output.

    They are logits, or, for a sampled request, logits as processed and divided by the temperature, with the noise of
    that place. `best` are the two best tokens with their scores, `tolerance` the largest gap between them that is a
    tie, and `score_of` returns the score of any token.
    """

    best: tuple[tuple[int, float], tuple[int, float]]
    tolerance: float
    score_of: Callable[[int], float]

    def is_tie(self, came: int) -> bool:
        """Return whether rounding decides between the best token and `came`, as it does between the two best."""
        return self.best[0][1] - min(self.best[1][1], self.score_of(came)) <= self.tolerance


@dataclass(frozen=True)
class Divergence:
    """First token at which an output differs from the reference: `place` counts from 0, None is an output's end."""

    place: int
    expected: int | None
    actual: int | None
    best: tuple[tuple[int, float], tuple[int, float]]
    tolerance: float
    expected_score: float | None
    came_score: float | None
    is_tie: bool


def compare(
    expected: Sequence[int],
    came: Sequence[int],
    scores_at: Callable[[int], Scores],
    continue_from: Callable[[int], Sequence[int]],
) -> list[Divergence]:
    """Return where `actual` differs from `expected`: ties, and perhaps a difference, which ends the list.

    `scores_at(place)` returns the plain path's scores after `expected[:place]`. After a tie the comparison continues
    from the plain token: `continue_from(count)` returns the tokens that follow `expected[:count]`.
    """
    divergences: list[Divergence] = []
    done = 0
    while (place := _first_difference(expected[done:], came)) is not None:
        scores = scores_at(done + place)
        right, other = _token(expected, done + place), _token(came, place)
        # Rounding does not decide on an end without an end token.
        is_tie = right is not None and other is not None and scores.is_tie(other)
        divergences.append(
            Divergence(
                place=done + place,
                expected=right,
                actual=other,
                best=scores.best,
                tolerance=scores.tolerance,
                expected_score=None if right is None else scores.score_of(right),
                came_score=None if other is None else scores.score_of(other),
                is_tie=is_tie,
            )
        )
        done += place + 1
        if not is_tie or done == len(expected):
            break
        came = continue_from(done)
    return divergences


def verdict_of(divergences: Sequence[Divergence]) -> Verdict:
    """Return the verdict of one or several comparisons."""
    if not divergences:
        return Verdict.EQUAL
    return Verdict.TIE if all(divergence.is_tie for divergence in divergences) else Verdict.DIFFERENT


def _first_difference(expected: Sequence[int], came: Sequence[int]) -> int | None:
    """Return the first place where they differ, which may be the end of the shorter one, or None."""
    for place, (right, other) in enumerate(zip(expected, came, strict=False)):
        if right != other:
            return place
    return None if len(expected) == len(came) else min(len(expected), len(came))


def _token(tokens: Sequence[int], place: int) -> int | None:
    return tokens[place] if place < len(tokens) else None
