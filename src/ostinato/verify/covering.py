"""Covering sets: few combinations of settings in which every combination of some of them occurs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from itertools import product
from typing import Any

Choice = dict[str, Any]
"""Axis -> one of its values."""

Part = tuple[tuple[str, ...], tuple[Hashable, ...]]
"""A group of axes, and a value of each."""


def every_choice(axes: Mapping[str, Sequence[Hashable]], allowed: Callable[[Choice], bool]) -> list[Choice]:
    """All combinations of one value of each axis that are allowed, the last axis changing fastest."""
    rows = (dict(zip(axes, values, strict=True)) for values in product(*axes.values()))
    return [row for row in rows if allowed(row)]


def cover(
    choices: Sequence[Choice], groups: Collection[tuple[str, ...]], also: Collection[tuple[str, ...]] = ()
) -> list[Choice]:
    """A small part of `choices` in which, for each group of axes, all values occur together that do so anywhere.

    Greedy: the next one taken adds the most to that; of several, it adds the most to what `also` asks for besides, and
    is the first. Groups of two axes make a pairwise covering array, a group of one axis asks for each of its values.
    """
    parts, others = ([_parts(choice, each) for choice in choices] for each in (groups, also))
    missing, wanted = (frozenset[Part]().union(*each) for each in (parts, others))
    taken: list[Choice] = []
    while missing:
        best = max(range(len(choices)), key=lambda i: (len(parts[i] & missing), len(others[i] & wanted)))
        taken.append(choices[best])
        missing, wanted = missing - parts[best], wanted - others[best]
    return taken


def _parts(choice: Choice, groups: Collection[tuple[str, ...]]) -> frozenset[Part]:
    """What a choice has to show: each group with its values."""
    return frozenset((group, tuple(choice[axis] for axis in group)) for group in groups)
