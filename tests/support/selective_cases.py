"""Inputs of Mamba-1's operations (selective_update, selective_scan), their recurrence in float64, and what a call of
either must give."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from tests.support.native_kernels import int32, rounding, same_bits, spaced
from tests.support.scan_cases import Rows

Kernel = Callable[..., torch.Tensor]


@dataclass
class Case:
    """Inputs of some tokens. Tokens lie apart, as parts of wider projections do."""

    x: torch.Tensor
    dt: torch.Tensor
    A_log: torch.Tensor
    B: torch.Tensor
    C: torch.Tensor
    D: torch.Tensor
    dt_bias: torch.Tensor

    def tokens(self, begin: int, end: int) -> Case:
        return replace(self, **{name: getattr(self, name)[begin:end] for name in ("x", "dt", "B", "C")})

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        """The first arguments of both operations."""
        return (self.x, self.dt, self.A_log, self.B, self.C, self.D, self.dt_bias)

    def slots(self, count: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
        """`count` slots with values in all but the null slot, which is NaN."""
        generator = torch.Generator().manual_seed(seed)
        states = torch.randn(count, *self.A_log.shape, generator=generator).to(dtype)
        states[0] = torch.nan
        return states

    def follow(self, token: int, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The recurrence in float64 -> y [channels] of one token, and the state after it."""
        step = torch.log1p((self.dt[token].double() + self.dt_bias.double()).exp())
        x = self.x[token].double()
        decay = torch.exp(-step[:, None] * self.A_log.double().exp())
        state = decay * state.double() + (step * x)[:, None] * self.B[token].double()
        return state @ self.C[token].double() + self.D.double() * x, state


def case_of(
    tokens: int, channels: int, size: int, seed: int = 0, dtype: torch.dtype = torch.float32, gap: int = 3
) -> Case:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    def by_token(width: int, more: int) -> torch.Tensor:
        return spaced(normal(tokens, width).to(dtype), gap + more)

    return Case(
        by_token(channels, 2),
        by_token(channels, 0),
        normal(channels, size),
        by_token(size, 1),
        by_token(size, 4),
        normal(channels),
        normal(channels) - 1,
    )


def update(
    kernel: Kernel,
    case: Case,
    states: torch.Tensor,
    reads: list[int],
    writes: list[list[int]],
    positions: list[int] | None = None,
    noise: int | None = None,
) -> torch.Tensor:
    at = None if positions is None else int32(positions)
    return kernel(*case.inputs, states, int32(reads), int32(writes), at, noise)


def scan(
    kernel: Kernel,
    case: Case,
    states: torch.Tensor,
    rows: Rows,
    writes: list[int],
    checkpoints: Sequence[tuple[int, int, int]] = (),
    noise: int | None = None,
) -> torch.Tensor:
    """Other rows come first; write slots are one column of several."""
    columns = int32([[write, 99] for write in writes])
    slots = (int32([at + 3 for at in rows.starts]), int32(rows.positions), int32(rows.reads), columns[:, 0])
    return kernel(*case.inputs, states, *slots, checkpoints, noise=noise)


def check_update(
    kernel: Kernel,
    pasts: list[str],
    per_row: int,
    channels: int,
    size: int,
    dtype: torch.dtype,
    state_dtype: torch.dtype,
    padding: int,
    seed: int,
    keeps_null_slot: bool,
) -> None:
    """A row starts from zeros ("none"), from the first slot that it writes ("own"), or from one that it does not
    ("other"). The last token of the first row is padding if it has several. Other slots keep what they hold, the null
    slot too if `keeps_null_slot`."""
    rows = len(pasts)
    case = case_of((rows + padding) * per_row, channels, size, seed, dtype)
    states = case.slots(rows * (per_row + 1) + 1, state_dtype, seed)
    writes = [[row * (per_row + 1) + 1 + i for i in range(per_row)] for row in range(rows)]
    if per_row > 1:
        writes[0][-1] = 0
    reads = [
        {"none": 0, "own": own[0], "other": row * (per_row + 1) + per_row + 1}[past]
        for row, (past, own) in enumerate(zip(pasts, writes, strict=True))
    ]
    before = states.clone()
    out = update(kernel, case, states, reads + [0] * padding, writes + [[0] * per_row] * padding)
    for row in range(rows):
        state = before[reads[row]] if reads[row] else torch.zeros(channels, size)
        for i, write in enumerate(writes[row]):
            expected, state = case.follow(row * per_row + i, state)
            assert_near(out[row * per_row + i], expected, dtype)
            if write:
                assert_near(states[write], state, state_dtype)
                state = before[write] = states[write]  # as its storage type rounds it
    first = 0 if keeps_null_slot else 1
    assert same_bits(states[first:], before[first:]), "a slot was written that is nobody's"


def check_scan(
    kernel: Kernel,
    spans: list[tuple[int, int]],
    channels: int,
    size: int,
    dtype: torch.dtype,
    seed: int,
) -> None:
    """`spans` are (first position, tokens) of rows. A row leaves checkpoints at a third, at two thirds and at its end;
    one without tokens writes nothing; all slots that nobody writes keep what they hold."""
    rows = Rows([position for position, _ in spans], [length for _, length in spans])
    case = case_of(rows.starts[-1], channels, size, seed, dtype)
    states = case.slots(1 + 5 * len(spans), seed=seed)
    before = states.clone()
    fresh = iter(range(len(spans) + 1, len(states)))
    writes = [next(fresh) for _ in spans]
    checkpoints = [
        (row, offset, next(fresh))
        for row, length in enumerate(rows.lengths)
        for offset in sorted({length // 3, 2 * length // 3, length} - {0})
    ]
    out = scan(kernel, case, states, rows, writes, checkpoints)
    for row, (begin, end) in enumerate(zip(rows.starts, rows.starts[1:], strict=False)):
        state = before[rows.reads[row]] if rows.reads[row] else torch.zeros(channels, size)
        at = [(offset, slot) for of_row, offset, slot in checkpoints if of_row == row] + [(end - begin, writes[row])]
        for token in range(begin, end):
            expected, state = case.follow(token, state)
            assert_near(out[token], expected, dtype)
            for _, slot in (each for each in at if each[0] == token + 1 - begin):
                assert_near(states[slot], state, torch.float32)
                before[slot] = states[slot]
    assert same_bits(states, before), "a slot was written that is nobody's"


def assert_near(given: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """But for the rounding of `dtype` and that of sums in float32, whose terms are as large as the largest sum."""
    atol = 1e-5 * (1 + float(expected.abs().max()))
    torch.testing.assert_close(given.double(), expected.double(), rtol=rounding(dtype), atol=atol)
