"""Who is left out of a mode in `make test` has somebody of its kind in its place."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parity import test_parity, test_parity_graphs, test_parity_speculation, test_poison
from tests.support.parity import CACHING
from tests.support.selection import chosen_cases
from tests.support.turns import in_turns, memory_kind

MATRICES = {
    "modes": test_parity.CELLS,
    "graph modes": test_parity_graphs.CELLS,
    "poison": test_poison.CELLS,
    "drafts": [pytest.param(*each.values[:3], marks=each.marks) for each in test_parity_speculation.CELLS],
    "caching": in_turns(CACHING, "caching"),
}


NAMES = {f"a.py::test_{test}[{case}]": test == 1 for test in range(3) for case in range(20)} | {"a.py::test_x": True}


def is_long(cell: Any) -> bool:
    return any(mark.name == "long" for mark in cell.marks)


@pytest.mark.parametrize("cells", MATRICES.values(), ids=MATRICES)
def test_every_mode_runs_with_every_kind_of_memory_that_has_it(cells: list[Any]) -> None:
    wanted = {(memory_kind(cell.values[0]), cell.values[1:]) for cell in cells}
    assert wanted == {(memory_kind(cell.values[0]), cell.values[1:]) for cell in cells if not is_long(cell)}
    assert any(is_long(cell) for cell in cells)


def test_with_the_next_number_it_is_the_next_ones_turn() -> None:
    cells = [(name, mode) for name in ("llama", "qwen3", "arcee", "jamba") for mode in range(3)]
    turns = {cell.values for cell in in_turns(cells, "any") if not is_long(cell)}
    assert {("jamba", 0), ("jamba", 1), ("jamba", 2)} < turns
    assert sorted(name for name, _ in turns) == ["arcee", "jamba", "jamba", "jamba", "llama", "qwen3"]
    always = in_turns(cells, "any", always=lambda name, mode: name == "llama")
    assert {cell.values for cell in always if not is_long(cell)} == turns | {("llama", mode) for mode in range(3)}


def test_one_case_that_is_not_slow_and_the_others_are_all() -> None:
    one = chosen_cases(NAMES, "one")
    assert sorted(name.partition("[")[0] for name in one) == ["a.py::test_0", "a.py::test_2"]
    assert one | chosen_cases(NAMES, "others") == set(NAMES)
    assert not one & chosen_cases(NAMES, "others")


def test_each_share_has_every_test_and_all_shares_have_every_case() -> None:
    shares = [chosen_cases(NAMES, f"{share}/3") for share in (1, 2, 3)]
    assert set.union(*shares) == set(NAMES)
    for share in shares:
        assert {name.partition("[")[0] for name in share} == {name.partition("[")[0] for name in NAMES}
        assert 4 + 9 <= len(share) <= 4 + 32  # a third of 60, and one of each


@pytest.mark.parametrize("choice", ["", "some", "0/3", "4/3", "1/", "-1/2", "1/2/3"])
def test_other_choices_are_refused(choice: str) -> None:
    with pytest.raises(ValueError, match="K from 1 to N"):
        chosen_cases(NAMES, choice)
