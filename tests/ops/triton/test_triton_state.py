"""Triton's state_update, causal_conv1d, token_shift and ssd_scan against their references: ragged batches, drafts,
empty rows, checkpoints, states in 16 bits, and NaN wherever nothing may be read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.ops.launch_tables.state import ssd_scan_launches
from tests.support.triton_kernels import DTYPES, assert_close, check, require_triton, run_both

require_triton()

NAN = float("nan")
SLOTS = 36
dtypes = st.sampled_from(DTYPES)


@dataclass(frozen=True)
class Rows:
    """Some rows of a step: their tokens, and which of them begin with a state."""

    lengths: tuple[int, ...]
    starts: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def row_starts(self) -> torch.Tensor:
        return torch.tensor([0, *torch.tensor(self.lengths, dtype=torch.int64).cumsum(0).tolist()], dtype=torch.int32)

    @property
    def read_slots(self) -> torch.Tensor:
        """Slots 1, 2, ... of rows with tokens before them; the null slot of others."""
        return torch.tensor([row + 1 if start else 0 for row, start in enumerate(self.starts)], dtype=torch.int32)


def rows_of(*, most: int, longest: int) -> st.SearchStrategy[Rows]:
    row = st.tuples(st.integers(0, longest), st.sampled_from([0, 3, 16, 29]))
    return st.lists(row, min_size=1, max_size=most).map(lambda rows: Rows(*map(tuple, zip(*rows, strict=True))))


def states(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Of `SLOTS` slots; the null slot is NaN, and so are slots from 8 on, which nobody reads."""
    made = torch.randn(SLOTS, *shape).to(dtype)
    made[0], made[8:] = NAN, NAN
    return made


def checkpoints(rows: Rows, every: int) -> list[tuple[int, int, int]]:
    """At each absolute multiple of `every` within a row."""
    found: list[tuple[int, int, int]] = []
    for row, (length, start) in enumerate(zip(rows.lengths, rows.starts, strict=True)):
        found += [
            (row, at - start, 14 + len(found) + i)
            for i, at in enumerate(range(every, start + length + 1, every))
            if at > start
        ]
    return [(row, offset, 14 + i) for i, (row, offset, _) in enumerate(found[:10])]


def scan_inputs(tokens: int, dtype: torch.dtype, *, heads: int, head_dim: int, groups: int, size: int) -> list[Any]:
    """x, dt, A_log, B, C, D, dt_bias, as views of one projection, as layers hand them over."""
    wide = torch.randn(tokens, heads * head_dim + 2 * groups * size + 5).to(dtype)
    x, B, C, _ = wide.split((heads * head_dim, groups * size, groups * size, 5), dim=1)
    dt = torch.randn(tokens, heads + 3).to(dtype)[:, 2 : heads + 2]
    x = x.unflatten(1, (heads, head_dim))
    B, C = B.unflatten(1, (groups, size)), C.unflatten(1, (groups, size))
    return [x, dt, torch.randn(heads), B, C, torch.randn(heads), torch.randn(heads) - 2]


@settings(max_examples=10)
@given(
    dtype=dtypes,
    kept=dtypes,
    rows=st.integers(1, 3),
    tokens=st.integers(1, 3),
    size=st.sampled_from([8, 12]),
    noise=st.sampled_from([None, 0, 5]),
    limit=st.sampled_from([(0.0, float("inf")), (0.05, 0.3)]),
)
@pytest.mark.slow
def test_state_update(
    dtype: torch.dtype,
    kept: torch.dtype,
    rows: int,
    tokens: int,
    size: int,
    noise: int | None,
    limit: tuple[float, float],
) -> None:
    """The first row begins with nothing, the others where they read or elsewhere."""
    torch.manual_seed(rows * 8 + tokens)
    inputs = scan_inputs(rows * tokens, dtype, heads=2, head_dim=6, groups=1, size=size)
    reads = torch.arange(rows, dtype=torch.int32)
    writes = torch.arange(1, rows * tokens + 1, dtype=torch.int32).view(rows, tokens) + (8 if tokens > 1 else -1)
    writes[0, 0] = 20
    memory = states(2, 6, size, dtype=kept)
    check("state_update", *inputs, limit, memory, reads, writes, torch.arange(rows, dtype=torch.int32) * 7, noise)


def test_state_update_of_padding_rows_gives_zeros_and_leaves_other_slots_alone() -> None:
    inputs = scan_inputs(4, torch.float32, heads=2, head_dim=6, groups=2, size=8)
    memory = states(2, 6, 8, dtype=torch.float32)
    reads, writes = torch.tensor([1, 0], dtype=torch.int32), torch.tensor([[1, 9], [0, 0]], dtype=torch.int32)
    y, right, given, expected = run_both("state_update", *inputs, (0.0, float("inf")), memory, reads, writes)
    assert y[2:].abs().max() == 0
    assert_close(y[:2], right[:2])
    assert_close(given[-3][1:], expected[-3][1:])


@settings(max_examples=10)
@given(
    dtype=dtypes,
    prompts=rows_of(most=3, longest=21),
    decode_rows=st.integers(0, 2),
    tokens=st.integers(1, 3),
    width=st.integers(2, 7),
    has_bias=st.booleans(),
    in_place=st.booleans(),
)
@pytest.mark.slow
def test_causal_conv1d_and_token_shift(
    dtype: torch.dtype,
    prompts: Rows,
    decode_rows: int,
    tokens: int,
    width: int,
    has_bias: bool,
    in_place: bool,
) -> None:
    torch.manual_seed(prompts.tokens)
    channels, decode_tokens = 20, decode_rows * tokens
    x = torch.randn(decode_tokens + prompts.tokens, channels + 4).to(dtype)[:, 4:]
    row_starts = torch.cat((torch.arange(decode_rows, dtype=torch.int32) * tokens, prompts.row_starts + decode_tokens))
    reads = torch.cat((torch.arange(4, 4 + decode_rows, dtype=torch.int32), prompts.read_slots))
    writes = torch.arange(len(reads) * tokens, dtype=torch.int32).view(len(reads), tokens) + 8
    if in_place:
        writes[:, 0] = torch.where(reads > 0, reads, writes[:, 0])
    kept = [(row + decode_rows, offset, slot) for row, offset, slot in checkpoints(prompts, 16)]
    kept = [(row, offset, slot + 12) for row, offset, slot in kept]
    rows = (row_starts, reads, writes, decode_rows, kept)
    bias = torch.randn(channels).to(dtype) if has_bias else None
    weight = torch.randn(width, channels).to(dtype)
    check("causal_conv1d", x, weight, bias, states(width - 1, channels, dtype=dtype), *rows)
    plain = states(width - 1, channels, dtype=dtype)
    check("causal_conv1d", x, weight, bias, plain, *rows, None)
    check("token_shift", x, states(1, channels, dtype=dtype), *rows)


@settings(max_examples=12)
@given(
    dtype=dtypes,
    kept=dtypes,
    rows=rows_of(most=2, longest=40),
    groups=st.integers(1, 2),
    chunk=st.sampled_from([16, 32, 24]),
    noise=st.sampled_from([None, 3]),
)
@pytest.mark.slow
def test_ssd_scan(
    dtype: torch.dtype, kept: torch.dtype, rows: Rows, groups: int, chunk: int, noise: int | None
) -> None:
    torch.manual_seed(rows.tokens)
    inputs = scan_inputs(rows.tokens, dtype, heads=2, head_dim=6, groups=groups, size=12)
    limit = (0.0, float("inf")) if chunk == 16 else (0.01, 0.5)
    memory = states(2, 6, 12, dtype=kept)
    writes = torch.arange(len(rows.lengths), dtype=torch.int32) + 1
    positions = torch.tensor(rows.starts, dtype=torch.int32)
    marks = checkpoints(rows, 16)
    check(
        "ssd_scan",
        *inputs,
        limit,
        chunk,
        memory,
        rows.row_starts,
        positions,
        rows.read_slots,
        writes,
        marks,
        noise=noise,
    )


def test_a_scan_has_no_launch_that_is_known_to_write_elsewhere() -> None:
    for state_size in (16, 64, 128, 256):
        for chunk_size in (16, 64, 256):
            sizes = {"chunk_size": chunk_size, "head_dim": 64, "state_size": state_size}
            for launch in ssd_scan_launches(**sizes, element_bytes=4, capability=90):
                assert launch.num_stages == 1 or launch.num_warps % 4 or launch.blocks["TOKENS"] % 64


@pytest.mark.parametrize("length", [0, 1])
def test_a_prompt_without_tokens_leaves_all_slots_as_they_are(length: int) -> None:
    memory = states(3, 20, dtype=torch.float32)
    rows = Rows((0, length), (0, 3))
    x, weight = torch.randn(rows.tokens, 20), torch.randn(4, 20)
    writes = torch.tensor([[1], [2]], dtype=torch.int32)
    check("causal_conv1d", x, weight, None, memory, rows.row_starts, rows.read_slots, writes, 0)
