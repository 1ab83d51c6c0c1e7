"""token_shift against its definition, token by token."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from ostinato.ops.reference import conv
from tests.support.examples import examples


@examples(40)
@given(
    st.integers(0, 4),
    st.integers(1, 4),
    st.lists(st.tuples(st.integers(1, 9), st.booleans(), st.integers(0, 8)), max_size=3),
    st.integers(0, 2**31),
)
def test_each_token_gets_its_predecessor_and_slots_the_last_token(
    decode_rows: int, tokens_per_row: int, prefill: list[tuple[int, bool, int]], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    lengths = [tokens_per_row] * decode_rows + [length for length, _, _ in prefill]
    if not lengths:
        return
    x = torch.randn(sum(lengths), 3, generator=generator)
    states = torch.randn(40, 1, 3, generator=generator)
    states[0] = torch.nan  # the null slot is never read
    before = states.clone()
    slots = iter((torch.randperm(39, generator=generator) + 1).tolist())
    reads = [next(slots) for _ in range(decode_rows)] + [0 if fresh else next(slots) for _, fresh, _ in prefill]
    writes = [[next(slots) for _ in range(tokens_per_row)] for _ in range(decode_rows)]
    writes += [[next(slots), *[0] * (tokens_per_row - 1)] for _ in prefill]
    checkpoints = [
        (decode_rows + row, offset, next(slots))
        for row, (length, _, offset) in enumerate(prefill)
        if 0 < offset < length
    ]
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    read_slots = torch.tensor(reads, dtype=torch.int32)
    write_slots = torch.tensor(writes, dtype=torch.int32)
    out = conv.token_shift(x, states, starts, read_slots, write_slots, decode_rows, checkpoints)
    expected = before.clone()
    for row, length in enumerate(lengths):
        start = int(starts[row])
        previous = before[reads[row], 0] if reads[row] else torch.zeros(3)
        for i in range(length):
            assert torch.equal(out[start + i], previous)
            previous = x[start + i]
            if row < decode_rows:
                expected[writes[row][i], 0] = previous
        if row >= decode_rows:
            expected[writes[row][0], 0] = previous
    for row, offset, slot in checkpoints:
        expected[slot, 0] = x[int(starts[row]) + offset - 1]
    assert torch.equal(states[1:], expected[1:])
