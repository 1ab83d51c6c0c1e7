"""Who is left out of a mode in `make test` has somebody of its kind in its place."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parity import test_parity, test_parity_graphs, test_parity_speculation, test_poison
from tests.support.parity import CACHING
from tests.support.turns import in_turns, memory_kind

MATRICES = {
    "modes": test_parity.CELLS,
    "graph modes": test_parity_graphs.CELLS,
    "poison": test_poison.CELLS,
    "drafts": [pytest.param(*each.values[:3], marks=each.marks) for each in test_parity_speculation.CELLS],
    "caching": in_turns(CACHING, "caching"),
}


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
