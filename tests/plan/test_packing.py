"""Packing of images for the encoder's graphs: nothing is lost, nothing overflows, little is padded."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.plan.encoder.budgets import Pack, pack_items

DOUBLING = (64, 128, 256, 512, 1024)


@pytest.mark.parametrize(
    ("sizes", "max_items", "packs"),
    [
        ([], 8, []),
        ([64], 8, [((0,), 64)]),
        ([1], 8, [((0,), 64)]),
        ([65], 8, [((0,), 128)]),
        # Together in one, smallest first, where that takes no more than apart.
        ([60, 50, 100], 8, [((1, 0, 2), 256)]),
        ([64] * 8, 8, [(tuple(range(8)), 512)]),
        ([3] * 5, 8, [(tuple(range(5)), 64)]),
        # Apart, where together they would be padded further.
        ([64, 1000], 8, [((0,), 64), ((1,), 1024)]),
        ([64, 64, 64], 8, [((0, 1), 128), ((2,), 64)]),
        # No more in one than it may hold.
        ([3] * 5, 2, [((0, 1), 64), ((2, 3), 64), ((4,), 64)]),
        ([64] * 3, 1, [((0,), 64), ((1,), 64), ((2,), 64)]),
        ([1024, 1024], 8, [((0,), 1024), ((1,), 1024)]),
        # Above the largest budget: alone and eagerly.
        ([2000, 10, 1025, 20], 8, [((1, 3), 64), ((2,), None), ((0,), None)]),
    ],
)
def test_images_go_into_the_smallest_budgets_that_hold_them(sizes, max_items, packs) -> None:
    assert [(pack.indices, pack.budget) for pack in pack_items(sizes, DOUBLING, max_items)] == packs


def test_without_budgets_each_image_runs_eagerly_and_alone() -> None:
    assert pack_items([5, 3], (), 8) == [Pack((1,), 3, None), Pack((0,), 5, None)]


@given(
    st.lists(st.integers(1, 2000), max_size=40),
    st.lists(st.integers(1, 1500), max_size=6, unique=True).map(sorted),
    st.integers(1, 20),
)
def test_every_image_is_in_one_pack_whose_budget_is_the_smallest_that_holds_it(sizes, budgets, max_items) -> None:
    packs = pack_items(sizes, budgets, max_items)
    assert sorted(index for pack in packs for index in pack.indices) == list(range(len(sizes)))
    for pack in packs:
        assert pack.tokens == sum(sizes[index] for index in pack.indices)
        if pack.budget is None:
            assert len(pack.indices) == 1
            assert pack.tokens > max(budgets, default=0)
        else:
            assert len(pack.indices) <= max_items
            assert pack.budget == min(budget for budget in budgets if budget >= pack.tokens)
    together = sum(pack.budget for pack in packs if pack.budget is not None)
    alone = sum(min((budget for budget in budgets if budget >= size), default=0) for size in sizes)
    assert together <= alone
