"""The kernel that only reads: `bench` asks it what the memory gives."""

from __future__ import annotations

import pytest
import torch

from ostinato.ops.dispatch import load_extension
from tests.support.native_sets import SETS, threads


@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(("parts", "steps", "rest"), [(1, 0, 5), (1, 1, 0), (3, 2, 0), (64, 1, 63)])
def test_what_it_reads_is_all_but_what_fills_no_step_of_each_part(
    isa: str, parts: int, steps: int, rest: int, count: int
) -> None:
    whole = parts * steps * 256  # four streams of as many numbers as the widest vectors take at a time
    numbers = torch.randint(-1000, 1000, (whole + rest,), dtype=torch.int32)
    sums = torch.zeros(parts * 16, dtype=torch.int32)
    with threads(count):
        load_extension(isa).read_memory(parts, {"from": numbers, "sums": sums})
    assert sums.sum() == numbers[:whole].sum()
