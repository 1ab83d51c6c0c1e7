"""What ranks give each other through shared memory is what each had, and sums are the same bits wherever they stand."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import pytest
import torch

from ostinato.distributed import shared_memory
from ostinato.distributed.shared_memory import SharedMemoryGroup
from ostinato.errors import RankError
from ostinato.plan.tensor_parallel import Rank

T = TypeVar("T")

pytestmark = pytest.mark.skipif(
    not shared_memory.has_shared_memory(), reason="processes here share no memory without a name"
)


@contextmanager
def groups(ranks: int) -> Iterator[list[SharedMemoryGroup]]:
    fileno = shared_memory.create_shared_memory(ranks)
    try:
        yield [SharedMemoryGroup(Rank(number, ranks), fileno) for number in range(ranks)]
    finally:
        os.close(fileno)


def on_all(ranks: int, call: Callable[[SharedMemoryGroup], T]) -> list[T]:
    """What `call` gives on each of so many ranks, which are threads here."""
    with groups(ranks) as each, ThreadPoolExecutor(ranks) as threads:
        return list(threads.map(call, each))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("ranks", [2, 3])
def test_sums_are_those_of_the_ranks_in_their_order_whatever_the_size(
    ranks: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_memory, "CHUNK_BYTES", 256)  # so that tensors go in pieces
    generator = torch.Generator().manual_seed(1)
    sizes = (1, 3, 63, 64, 65, 1000)
    given = [[torch.randn(size, generator=generator).to(dtype) for size in sizes] for _ in range(ranks)]

    def sums(group: SharedMemoryGroup) -> list[torch.Tensor]:
        return [group.all_reduce(each.clone()) for each in given[group.number]]

    for found in on_all(ranks, sums):
        for total, *parts in zip(found, *given, strict=True):
            expected = parts[0].float().clone()
            for part in parts[1:]:
                expected += part
            assert torch.equal(total, expected.to(dtype))


def test_what_is_not_contiguous_is_added_up_in_its_place() -> None:
    def add(group: SharedMemoryGroup) -> torch.Tensor:
        whole = torch.zeros(4, 6)
        whole[:, ::2] = 1.0 + group.number
        added = group.all_reduce(whole[:, ::2])
        assert added.data_ptr() == whole.data_ptr()
        return whole

    for whole in on_all(3, add):
        assert torch.equal(whole[:, ::2], torch.full((4, 3), 6.0))
        assert not whole[:, 1::2].any()


def test_all_get_what_each_has_or_the_first_alone() -> None:
    def exchange(group: SharedMemoryGroup) -> tuple[list[torch.Tensor], list[torch.Tensor] | None]:
        x = torch.arange(6).view(2, 3).t() + 10 * group.number
        return group.all_gather(x), group.gather(x)

    expected = [torch.arange(6).view(2, 3).t() + 10 * number for number in range(3)]
    for number, (found, gathered) in enumerate(on_all(3, exchange)):
        assert all(map(torch.equal, found, expected))
        if number:
            assert gathered is None
        else:
            assert gathered is not None
            assert all(map(torch.equal, gathered, expected))


def test_a_rank_that_is_ahead_overwrites_nothing_that_another_has_yet_to_read() -> None:
    def many(group: SharedMemoryGroup) -> list[float]:
        found = []
        for turn in range(60):
            if turn % 3 == group.number:
                time.sleep(0.002)
            parts = group.gather(torch.full((50,), float(turn))) if turn % 2 else None
            if parts is not None:
                found += [part.unique().item() - turn for part in parts]
            found.append(group.all_reduce(torch.full((50,), float(turn))).unique().item() - 3 * turn)
        return found

    for found in on_all(3, many):
        assert set(found) == {0.0}


def test_the_first_rank_waits_as_long_as_it_has_patience_and_looks_whether_it_waits_in_vain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ostinato.distributed.rank_messages.RANK_TIMEOUT", 0.3)
    told = r"another of the 2 ranks of this engine lives, and has not answered for 0\.3 s"
    with groups(2) as (first, _), pytest.raises(RankError, match=told):
        first.all_reduce(torch.ones(2))

    def gone() -> None:
        raise RuntimeError("a rank has ended")

    with groups(2) as (_, second):
        second.check = gone
        with pytest.raises(RuntimeError, match="a rank has ended"):
            second.all_reduce(torch.ones(2))
