"""Recipes take turns: where modes of an engine meet recipes, each mode runs with one recipe of every kind of memory,
and all recipes come in turn. `make test-long` runs the other cells."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any
from zlib import crc32

import pytest

from ostinato.models.checkpoint import model_spec
from tests.support.checkpoints import recipe


@cache
def memory_kind(name: str) -> tuple[str, ...]:
    """What a recipe's requests hold, which is what the modes of an engine handle: blocks, those that windows free, and
    slots with states of one kind or another."""
    spec = model_spec(recipe(name).to_dict())
    attention = spec.attention_layers
    blocks = "windows" if any(each.window for each in attention) else "blocks"
    if not attention:
        return ("slots alone",)
    return (blocks, *sorted({type(mixer).__name__ for mixer in spec.state_layers}))


def whose_turn(names: Iterable[str], number: int) -> set[str]:
    """One recipe of each kind. With the next number it is the next one's turn."""
    kinds: dict[tuple[str, ...], list[str]] = {}
    for name in names:
        kinds.setdefault(memory_kind(name), []).append(name)
    return {each[number % len(each)] for each in kinds.values()}


def in_turns(
    cells: Sequence[tuple[Any, ...]],
    seed: str,
    always: Callable[..., bool] = lambda *cell: False,
    mode: Callable[..., Any] = lambda name, *mode: mode,
) -> list[Any]:
    """For `pytest.mark.parametrize`: cells that begin with a recipe's name. In each mode, which is all that follows the
    name if nothing else is said, recipes take turns; `seed` says who begins. Cells that have to wait are `long`, unless
    they run `always`."""
    names: dict[Any, dict[str, None]] = {}
    for cell in cells:
        names.setdefault(mode(*cell), {})[cell[0]] = None
    turn = {each: whose_turn(of_mode, crc32(seed.encode()) + i) for i, (each, of_mode) in enumerate(names.items())}
    return [
        pytest.param(*cell, marks=() if always(*cell) or cell[0] in turn[mode(*cell)] else pytest.mark.long)
        for cell in cells
    ]
