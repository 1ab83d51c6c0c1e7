"""The arena: what lives at once lies apart."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from ostinato.graphs.recorder import tensor_ref
from ostinato.graphs.tape import Arena, bind, plan_layout
from ostinato.graphs.tensor_refs import RecordedCall, TensorRef
from ostinato.ops.arrays import TorchArrays
from ostinato.plan.graphs.arena import ALIGNMENT


def place(storage: int, size: int) -> TensorRef:
    return TensorRef(storage, torch.uint8, (size,), (1,), 0)


def call_of(*places: TensorRef) -> RecordedCall:
    """A call that reads all but the last, one of them by keyword, and writes the last."""
    *reads, write = places
    return RecordedCall("torch", "f", None, ([reads[:-1]],), {"x": tuple(reads[-1:])}, (write, None), True)


@st.composite
def lifetimes(draw: st.DrawFn) -> tuple[int, list[tuple[int, int, int]]]:
    """(number of calls, (first, last, bytes) per storage); a `last` beyond the calls is a result."""
    calls = draw(st.integers(1, 12))
    storages = []
    for _ in range(draw(st.integers(0, 14))):
        first = draw(st.integers(0, calls - 1))
        storages.append((first, draw(st.integers(first, calls)), draw(st.integers(0, 400))))
    return calls, storages


@given(lifetimes())
def test_storages_that_live_at_once_never_overlap(case: tuple[int, list[tuple[int, int, int]]]) -> None:
    count, storages = case
    sizes = {number: size for number, (_, _, size) in enumerate(storages)}
    named: list[list[TensorRef]] = [[] for _ in range(count + 1)]
    for number, (first, last, size) in enumerate(storages):
        for at in {first, last}:
            named[at].append(place(number, size))
    calls = [call_of(*places) if places else call_of(place(10_000, 1)) for places in named[:count]]
    layout = plan_layout(calls, sizes | {10_000: 1}, named[count])

    def rounded(size: int) -> int:
        return -(-max(size, 1) // ALIGNMENT) * ALIGNMENT

    peak = 0
    for at in range(count + 1):
        live = sorted(
            (layout.offsets[number], layout.offsets[number] + max(size, 1))
            for number, (first, last, size) in enumerate(storages)
            if first <= at <= last
        )
        assert all(end <= begin for (_, end), (begin, _) in pairwise(live))
        assert all(begin % ALIGNMENT == 0 and end <= layout.size for begin, end in live)
        peak = max(peak, sum(rounded(end - begin) for begin, end in live))
    assert peak <= layout.size <= sum(map(rounded, sizes.values())) + ALIGNMENT


def test_memory_is_used_again_when_what_lay_there_is_gone() -> None:
    chain = [call_of(place(number, 64), place(number + 1, 64)) for number in range(50)]
    assert plan_layout(chain, dict.fromkeys(range(51), 64), [place(50, 64)]).size == 2 * 64


def test_what_a_call_reads_is_kept_until_it_has_written() -> None:
    layout = plan_layout([call_of(place(0, 64), place(1, 64))], {0: 64, 1: 64}, [])
    assert layout.offsets[0] != layout.offsets[1]


def test_a_result_that_an_early_call_computed_is_kept_to_the_end() -> None:
    calls = [call_of(place(0, 64)), call_of(place(1, 64)), call_of(place(2, 64))]
    layout = plan_layout(calls, {0: 64, 1: 64, 2: 64}, [place(0, 64)])
    assert layout.offsets[0] not in (layout.offsets[1], layout.offsets[2])


def test_places_become_views_with_their_shape_stride_offset_and_dtype() -> None:
    arena = Arena(TorchArrays("cpu"))
    arena.reserve(1024)
    whole = torch.empty(6, 4, dtype=torch.float64)
    part = whole[1:5, 1:3].t()
    layout = plan_layout([call_of(tensor_ref(whole, 7), tensor_ref(part, 7))], {7: 192, 3: 100}, [place(3, 100)])
    bound = bind({"a": [tensor_ref(part, 7), (2, None)], "b": tensor_ref(whole, 7)}, layout, arena.memory)
    bound["b"].fill_(1.5)
    bound["a"][0].fill_(2.5)
    assert bound["a"][0].shape == part.shape
    assert bound["a"][0].stride() == part.stride()
    assert bound["a"][1] == (2, None)
    torch.testing.assert_close(bound["b"][1:5, 1:3].t(), torch.full((2, 4), 2.5, dtype=torch.float64))
    assert (bound["b"] == 1.5).sum() == 16


def test_the_arena_grows_only_for_more_than_it_has_and_says_so() -> None:
    arena = Arena(TorchArrays("cpu"))
    assert arena.reserve(640)
    before = arena.memory.data_ptr()
    assert not arena.reserve(64)
    assert (arena.size, arena.memory.data_ptr()) == (640, before)
    assert arena.reserve(1280)
    assert arena.size == 1280


def test_poison_is_nan_in_every_dtype() -> None:
    arena = Arena(TorchArrays("cpu"))
    arena.reserve(64)
    arena.poison()
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        assert arena.memory.view(dtype).isnan().all()
