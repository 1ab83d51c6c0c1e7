"""Inputs of the native scan, its calls, and the recurrence in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from tests.support.native_kernels import int32
from tests.support.native_sets import native_kernel

NAN = math.nan
NO_LIMIT = (0.0, math.inf)
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Case:
    """Inputs of the scan for some tokens. x, B and C are parts of one tensor, so strided by token."""

    def __init__(
        self,
        tokens: int,
        heads: int,
        head_dim: int,
        groups: int,
        size: int,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        dt_limit: tuple[float, float] = NO_LIMIT,
    ) -> None:
        parts = (heads * head_dim, groups * size, groups * size, heads)
        x, B, C, self.dt = normal(seed, tokens, sum(parts)).to(dtype).split(parts, dim=-1)
        self.x = x.unflatten(-1, (heads, head_dim))
        self.B, self.C = B.unflatten(-1, (groups, size)), C.unflatten(-1, (groups, size))
        self.A_log = torch.linspace(0, math.log(16), heads)
        self.D, self.dt_bias = normal(seed + 1, 2, heads).unbind()
        self.dt_bias -= 2
        self.dt_limit = dt_limit

    def slots(self, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """`count` slots, all NaN."""
        return torch.full((count, *self.x.shape[1:], self.B.shape[-1]), NAN, dtype=dtype)

    def follow(self, begin: int, end: int, state: torch.Tensor | None) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Outputs of tokens `begin` to `end - 1` after `state`, and the state after each, in float64."""
        heads, groups = self.x.shape[1], self.B.shape[1]
        x, dt, B, C = (t[begin:end].double() for t in (self.x, self.dt, self.B, self.C))
        B, C = (t.repeat_interleave(heads // groups, dim=1).unsqueeze(2) for t in (B, C))  # [tokens, heads, 1, size]
        step = F.softplus(dt + self.dt_bias.double()).clamp(*self.dt_limit)
        decay = torch.exp(-step * self.A_log.double().exp())
        h = torch.zeros(self.slots(1).shape[1:], dtype=torch.float64) if state is None else state.double()
        states = []
        for t in range(end - begin):
            h = h * decay[t].view(-1, 1, 1) + (step[t].unsqueeze(-1) * x[t]).unsqueeze(-1) * B[t]
            states.append(h)
        y = (torch.stack(states) * C).sum(-1) + self.D.double().unsqueeze(-1) * x
        return y, states


@dataclass(frozen=True)
class Rows:
    """Rows on adjacent spans of tokens. Row r has read slot r + 1, unless it is at its prompt's begin."""

    positions: list[int]
    lengths: list[int]

    @property
    def starts(self) -> list[int]:
        return [sum(self.lengths[:row]) for row in range(len(self.lengths) + 1)]

    @property
    def reads(self) -> list[int]:
        return [row + 1 if position else 0 for row, position in enumerate(self.positions)]


def run(
    isa: str,
    case: Case,
    states: torch.Tensor,
    rows: Rows,
    writes: list[int],
    chunk_size: int = 64,
    checkpoints: Sequence[tuple[int, int, int]] = (),
    begin: int = 0,
    recurrent: bool = False,
    noise: int | None = None,
) -> torch.Tensor:
    """The scan of the tokens from `begin` on, behind other rows. Write slots are one column of several."""
    part = slice(begin, begin + rows.starts[-1])
    columns = torch.tensor([[write, 99] for write in writes], dtype=torch.int32)
    starts = int32([begin + at for at in rows.starts])
    return native_kernel(isa, "ssd_scan")(
        *(case.x[part], case.dt[part], case.A_log, case.B[part], case.C[part], case.D, case.dt_bias, case.dt_limit),
        *(chunk_size, states, starts, int32(rows.positions), int32(rows.reads), columns[:, 0], checkpoints),
        recurrent=recurrent,
        noise=noise,
    )


def decode(
    isa: str,
    case: Case,
    states: torch.Tensor,
    token: int,
    read: int,
    write: int,
    position: int = 0,
    noise: int | None = None,
) -> torch.Tensor:
    """One token as a decode row."""
    part = slice(token, token + 1)
    return native_kernel(isa, "state_update")(
        *(case.x[part], case.dt[part], case.A_log, case.B[part], case.C[part], case.D, case.dt_bias, case.dt_limit),
        *(states, int32([read]), torch.tensor([[write]], dtype=torch.int32), int32([position]), noise),
    )


def same(given: torch.Tensor, expected: torch.Tensor) -> bool:
    """Bit for bit, NaN being equal to NaN."""
    return torch.equal(given.nan_to_num(1e30), expected.nan_to_num(1e30))


def assert_near(given: torch.Tensor, expected: torch.Tensor, rounding: float) -> None:
    """Each element but for its rounding and that of sums in float32, whose terms are as large as the largest sum."""
    torch.testing.assert_close(given.double(), expected, rtol=rounding, atol=2e-6 * float(expected.abs().max()))
