"""Covering sets: what was asked to occur together does, in few combinations."""

from __future__ import annotations

from itertools import combinations, product
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.verify.matrix import Choice, cover, every_choice

SIZES = {"state": 3, "drafts": 4, "graphs": 4, "step": 3, "preemption": 2}
AXES = {name: range(size) for name, size in SIZES.items()}
PAIRS = list(combinations(AXES, 2))

some_axes = st.lists(st.integers(1, 4), min_size=1, max_size=5).map(
    lambda sizes: {f"axis {i}": range(size) for i, size in enumerate(sizes)}
)


def seen(choices: list[Choice], group: tuple[str, ...]) -> set[tuple[int, ...]]:
    """The combinations of values that occur on the axes of a group."""
    return {tuple(choice[axis] for axis in group) for choice in choices}


@given(some_axes, st.data())
def test_all_combinations_that_occur_anywhere_occur_in_the_set(axes: dict[str, range], data: st.DataObject) -> None:
    everything = every_choice(axes, lambda choice: True)
    choices = data.draw(st.lists(st.sampled_from(everything), min_size=1, unique_by=str))
    groups = [group for size in (1, 2, 3) for group in combinations(axes, size)]
    asked = data.draw(st.lists(st.sampled_from(groups), min_size=1, unique=True))
    taken = cover(choices, asked)
    assert all(choice in choices for choice in taken)
    for group in asked:
        assert seen(taken, group) == seen(choices, group)


@given(some_axes)
def test_no_choice_is_taken_that_adds_nothing(axes: dict[str, range]) -> None:
    choices = every_choice(axes, lambda choice: True)
    groups = list(combinations(axes, min(2, len(axes))))
    taken = cover(choices, groups)
    for count, choice in enumerate(taken):
        assert any(seen([choice], group) - seen(taken[:count], group) for group in groups)


def test_all_pairs_of_five_axes_need_hardly_more_than_the_two_largest_axes_do() -> None:
    taken = cover(every_choice(AXES, lambda choice: True), PAIRS)
    assert SIZES["drafts"] * SIZES["graphs"] <= len(taken) <= 20
    assert len(taken) < prod(SIZES.values()) / 10


def test_a_group_of_all_axes_asks_for_everything() -> None:
    choices = every_choice(AXES, lambda choice: True)
    assert cover(choices, [tuple(AXES)]) == choices


def test_what_is_wished_for_besides_costs_nothing_and_spreads_the_other_axes() -> None:
    choices = every_choice(AXES, lambda choice: True)
    few, spread = cover(choices, [("state", "drafts")]), cover(choices, [("state", "drafts")], also=PAIRS)
    assert len(few) == len(spread) == 12
    assert seen(few, ("graphs",)) == {(0,)}
    assert len(seen(spread, ("graphs",))) == 4
    assert len(seen(spread, ("drafts", "graphs"))) > 8


def test_combinations_that_are_not_allowed_are_left_out() -> None:
    axes = {"mode": ("none", "all"), "k": (0, 1, 2)}
    choices = every_choice(axes, lambda choice: choice["mode"] == "all" or choice["k"] == 0)
    assert [tuple(choice.values()) for choice in choices] == [("none", 0), ("all", 0), ("all", 1), ("all", 2)]


@pytest.mark.parametrize("values", list(product((1, 2), repeat=2)))
def test_every_combination_comes_once(values: tuple[int, int]) -> None:
    choices = every_choice({"a": (1, 2), "b": (1, 2)}, lambda choice: True)
    assert [tuple(choice.values()) for choice in choices].count(values) == 1
