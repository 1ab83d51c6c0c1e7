"""Sequences of similar length side by side."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeVar


class HasIds(Protocol):
    ids: list[int]


S = TypeVar("S", bound=HasIds)


def by_length(sequences: Iterable[S], tokens: int) -> list[list[S]]:
    """Groups of one sequence, or of at most `tokens` tokens with the padding to their longest; the shortest first."""
    groups: list[list[S]] = [[]]
    for sequence in sorted(sequences, key=lambda sequence: len(sequence.ids)):
        if (len(groups[-1]) + 1) * len(sequence.ids) > tokens:
            groups.append([])
        groups[-1].append(sequence)
    return groups
