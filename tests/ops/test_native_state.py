"""The native state_update against the recurrence in float64, and its promise of the same bits."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ostinato.ops.reference.stochastic_rounding import rounded
from tests.support.examples import examples
from tests.support.native_kernels import checked_kernel, rounding, same_bits, spaced
from tests.support.native_sets import SETS

pytestmark = pytest.mark.parametrize("isa", SETS)

few = examples(40)
seeds = st.integers(0, 2**31)
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
NO_LIMIT = (0.0, math.inf)


@dataclass
class Case:
    """Inputs of some tokens; tokens lie apart, as in the output of the convolution, of which they are parts."""

    x: torch.Tensor
    dt: torch.Tensor
    A_log: torch.Tensor
    B: torch.Tensor
    C: torch.Tensor
    D: torch.Tensor
    dt_bias: torch.Tensor
    dt_limit: tuple[float, float] = NO_LIMIT

    def run(
        self,
        isa: str,
        states: torch.Tensor,
        reads: list[int],
        writes: list[list[int]],
        positions: list[int] | None = None,
        noise: int | None = None,
    ) -> torch.Tensor:
        at = None if positions is None else torch.tensor(positions, dtype=torch.int32)
        slots = (torch.tensor(reads, dtype=torch.int32), torch.tensor(writes, dtype=torch.int32))
        per_head = (self.D, self.dt_bias, self.dt_limit)
        return checked_kernel(isa, "state_update")(
            self.x, self.dt, self.A_log, self.B, self.C, *per_head, states, *slots, at, noise
        )

    def tokens(self, begin: int, end: int) -> Case:
        parts = {name: getattr(self, name)[begin:end] for name in ("x", "dt", "B", "C")}
        return replace(self, **parts)

    def follow(self, token: int, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The recurrence in float64 -> y [heads, head_dim] of one token, and the state after it."""
        step = torch.log1p((self.dt[token].double() + self.dt_bias.double()).exp()).clamp(*self.dt_limit)
        decay = torch.exp(-step * self.A_log.double().exp())
        heads_per_group = self.x.shape[1] // self.B.shape[1]
        B = self.B[token].double().repeat_interleave(heads_per_group, 0)
        C = self.C[token].double().repeat_interleave(heads_per_group, 0)
        x = self.x[token].double()
        state = decay[:, None, None] * state + (step[:, None] * x)[:, :, None] * B[:, None, :]
        return (state * C[:, None, :]).sum(-1) + self.D.double()[:, None] * x, state


def case_of(
    tokens: int,
    groups: int,
    heads_per_group: int,
    head_dim: int,
    size: int,
    seed: int,
    dtype: torch.dtype = torch.float32,
    dt_limit: tuple[float, float] = NO_LIMIT,
) -> Case:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    heads = groups * heads_per_group
    return Case(
        spaced(normal(tokens, heads, head_dim).to(dtype), 5),
        spaced(normal(tokens, heads).to(dtype), 3),
        normal(heads),
        spaced(normal(tokens, groups, size).to(dtype), 1),
        spaced(normal(tokens, groups, size).to(dtype), 2),
        normal(heads),
        normal(heads) - 1,
        dt_limit,
    )


def slots_of(case: Case, count: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """`count` slots with values in all but the null slot, which is NaN."""
    shape = (count, *case.x.shape[1:], case.B.shape[-1])
    states = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    states[0] = torch.nan
    return states


@few
@given(
    pasts=st.lists(st.sampled_from(["none", "own", "other"]), min_size=1, max_size=4),
    per_row=st.integers(1, 4),
    groups=st.integers(1, 3),
    heads_per_group=st.integers(1, 6),
    head_dim=st.sampled_from([1, 3, 16, 20]),
    size=st.sampled_from([1, 4, 7, 8, 16, 32, 37, 64, 128, 256]),
    dt_limit=st.sampled_from([NO_LIMIT, (0.2, 0.7)]),
    dtype=dtypes,
    state_dtype=dtypes,
    padding=st.integers(0, 2),
    seed=seeds,
)
def test_each_row_goes_from_its_read_slot_to_its_write_slots(
    isa: str,
    pasts: list[str],
    per_row: int,
    groups: int,
    heads_per_group: int,
    head_dim: int,
    size: int,
    dt_limit: tuple[float, float],
    dtype: torch.dtype,
    state_dtype: torch.dtype,
    padding: int,
    seed: int,
) -> None:
    """A row starts from zeros, from the first slot that it writes, or from one that it does not. The last token of
    the first row is padding if it has several. Padding rows and unwritten slots keep what they hold."""
    rows = len(pasts)
    case = case_of((rows + padding) * per_row, groups, heads_per_group, head_dim, size, seed, dtype, dt_limit)
    states = slots_of(case, rows * (per_row + 1) + 1, state_dtype, seed)
    writes = [[row * (per_row + 1) + 1 + i for i in range(per_row)] for row in range(rows)]
    if per_row > 1:
        writes[0][-1] = 0
    reads = [
        {"none": 0, "own": own[0], "other": row * (per_row + 1) + per_row + 1}[past]
        for row, (past, own) in enumerate(zip(pasts, writes, strict=True))
    ]
    before = states.clone()
    out = case.run(isa, states, reads + [0] * padding, writes + [[0] * per_row] * padding)
    tolerance = {"atol": 1e-5, "rtol": rounding(dtype)}
    for row in range(rows):
        state = before[reads[row]].double() if reads[row] else torch.zeros(before.shape[1:], dtype=torch.float64)
        for i, write in enumerate(writes[row]):
            token = row * per_row + i
            expected, state = case.follow(token, state)
            scale = float(expected.abs().max())
            torch.testing.assert_close(out[token].double(), expected, rtol=tolerance["rtol"], atol=1e-5 * (1 + scale))
            if write:
                torch.testing.assert_close(states[write].double(), state, rtol=rounding(state_dtype), atol=1e-5)
                state = states[write].double()  # as its storage type rounds it
                before[write] = states[write]
    assert same_bits(states, before), "a slot was written that is nobody's"


@pytest.mark.parametrize("size", [16, 37, 128, 256])
def test_tokens_at_once_have_the_bits_of_tokens_one_by_one(isa: str, size: int) -> None:
    """Whatever else is in the batch, and also where the state goes to memory in between."""
    rows, per_row = 3, 4
    case = case_of(rows * per_row, 2, 3, 20, size, seed=1, dtype=torch.bfloat16)
    states = slots_of(case, 1 + rows * (per_row + 1))
    reads = [0, 6, 12]
    writes = [[1, 2, 3, 4], [6, 7, 8, 9], [11, 13, 14, 15]]
    alone = states.clone()
    together = case.run(isa, states, reads, writes)
    for row in range(rows):
        read = reads[row]
        for i, write in enumerate(writes[row]):
            token = row * per_row + i
            out = case.tokens(token, token + 1).run(isa, alone, [read], [[write]])
            assert same_bits(out[0], together[token])
            read = write
    assert same_bits(alone, states)


@pytest.mark.parametrize("size", [8, 32, 37])
@pytest.mark.parametrize("noise", [None, 4])
@pytest.mark.parametrize("state_dtype", [torch.bfloat16, torch.float16])
def test_a_narrow_state_is_rounded_after_each_token(
    isa: str, state_dtype: torch.dtype, noise: int | None, size: int
) -> None:
    """So tokens at once have the bits of tokens one by one there too, whatever else is in the batch, and a token that
    is not kept rounds as well."""
    case = case_of(6, 1, 2, 8, size, seed=2)
    states = slots_of(case, 7, state_dtype)
    alone = states.clone()
    together = case.run(isa, states, [4, 1], [[4, 5, 6], [1, 0, 3]], [0, 70], noise)
    for token, (read, write) in enumerate([(1, 1), (1, 2), (2, 3)], 3):
        out = case.tokens(token, token + 1).run(isa, alone, [read], [[write]], [67 + token], noise)
        assert same_bits(out[0], together[token])
    assert same_bits(alone[[1, 3]], states[[1, 3]])


@few
@given(
    positions=st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=3),
    noise=st.integers(0, 2**20),
    heads=st.integers(1, 3),
    head_dim=st.sampled_from([1, 3, 20]),
    size=st.sampled_from([1, 7, 16, 37, 128]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    exponent=st.integers(-40, 20),
    seed=seeds,
)
def test_the_noise_of_stochastic_rounding_is_the_references(
    isa: str,
    positions: list[int],
    noise: int,
    heads: int,
    head_dim: int,
    size: int,
    dtype: torch.dtype,
    exponent: int,
    seed: int,
) -> None:
    """States after a first token with a step of 1 are x B, which has one rounding before that to 16 bits; also among
    the denormal ones, beyond the largest, NaN and infinity."""
    rows = len(positions)
    case = case_of(rows, 1, heads, head_dim, size, seed, dt_limit=(1.0, 1.0))
    case.x *= 2.0**exponent
    case.x[0, 0, 0] = torch.inf
    case.x[-1, -1, -1] = torch.nan
    states = slots_of(case, rows + 1, dtype)
    case.run(isa, states, [0] * rows, [[row + 1] for row in range(rows)], positions, noise)
    exact = case.x.unsqueeze(-1) * case.B.unsqueeze(2)
    expected = rounded(exact, dtype, torch.tensor(positions, dtype=torch.int32), noise)
    assert same_bits(states[1:], expected)


def test_padding_cannot_reach_a_real_row(isa: str) -> None:
    """Padding tokens and rows whose inputs are NaN."""
    case = case_of(6, 1, 2, 8, 32, seed=3)
    poisoned = replace(case, **{name: getattr(case, name).clone() for name in ("x", "dt", "B", "C")})
    for name in ("x", "dt", "B", "C"):
        getattr(poisoned, name)[[3, 4, 5]] = torch.nan
    clean, poison = slots_of(case, 4), slots_of(case, 4)
    expected = case.run(isa, clean, [1, 2, 0], [[1, 3], [2, 0], [0, 0]])
    given = poisoned.run(isa, poison, [1, 2, 0], [[1, 3], [2, 0], [0, 0]])
    assert same_bits(given[:3], expected[:3])
    assert same_bits(poison, clean)


def test_time_steps_are_right_from_the_smallest_to_the_largest(isa: str) -> None:
    """softplus of -40 to 40, and decays from 1 to none, seen in a state of ones and its outputs."""
    heads = 81
    case = case_of(1, 1, heads, 1, 1, seed=4)
    case = replace(case, dt=torch.linspace(-40, 40, heads)[None], dt_bias=torch.zeros(heads), A_log=torch.zeros(heads))
    case = replace(case, x=torch.ones(1, heads, 1), B=torch.ones(1, 1, 1), C=torch.ones(1, 1, 1), D=torch.zeros(heads))
    for past in (0.0, 1.0):
        states = torch.full((2, heads, 1, 1), past)
        out = case.run(isa, states, [1], [[1]])
        expected, _ = case.follow(0, torch.full((heads, 1, 1), past, dtype=torch.float64))
        torch.testing.assert_close(out[0].double(), expected, rtol=1e-6, atol=0)


def test_no_rows_are_no_work(isa: str) -> None:
    case = case_of(2, 1, 2, 4, 16, seed=5).tokens(0, 0)
    states = slots_of(case, 2)
    before = states.clone()
    slots = (torch.zeros(0, dtype=torch.int32), torch.zeros(0, 2, dtype=torch.int32))
    per_head = (case.D, case.dt_bias, case.dt_limit)
    update = checked_kernel(isa, "state_update")
    out = update(case.x, case.dt, case.A_log, case.B, case.C, *per_head, states, *slots)
    assert out.shape == (0, 2, 4)
    assert same_bits(states, before)


def test_a_state_that_decayed_to_denormal_numbers_is_zero(isa: str) -> None:
    """Some processors calculate with them a hundred times slower. The caller's own arithmetic keeps them."""
    case = case_of(1, 1, 2, 4, 32, seed=6)
    case = replace(case, x=torch.zeros(1, 2, 4))
    states = torch.full((2, 2, 4, 32), 1e-40)
    case.run(isa, states, [1], [[1]])
    assert not states[1].any()
    assert (torch.full((4,), 1e-40) * 0.5 > 0).all()
