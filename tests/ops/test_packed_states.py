"""Recurrences whose states are rounded at block boundaries to what 8 bits hold, and the packing of such states."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ostinato.ops.dispatch import reference_kernel
from ostinato.ops.reference.stochastic_rounding import packed_values
from ostinato.ops.sizes import INT8_STATE_BLOCK, MAX_INT8
from ostinato.runner.cache_memory import PackedRows, StatePart
from tests.support.delta_cases import delta_case
from tests.support.examples import examples
from tests.support.native_kernels import int32
from tests.support.native_sets import SETS, native_kernel
from tests.support.scan_cases import NO_LIMIT
from tests.support.scan_cases import Case as Mamba2Case
from tests.support.selective_cases import case_of

Inputs = Callable[[int, int], tuple[Any, ...]]
START, TOKENS = 5, 40
BOUNDARY = 16 - START
"""Tokens up to the first boundary, from position `START` on."""


class Family:
    """A recurrence of 40 tokens by one implementation: `update` of decode rows, `scan` of a prompt."""

    def __init__(self, kind: str, isa: str) -> None:
        self.inputs: Inputs
        self.scan_options: tuple[Any, ...] = ()
        self.recurrent: dict[str, bool] = {}
        if kind.startswith("mamba2"):
            mamba2 = Mamba2Case(TOKENS, 4, 20, 2, 40, dtype=torch.bfloat16 if "bfloat16" in kind else torch.float32)
            self.inputs = lambda begin, end: (
                *(mamba2.x[begin:end], mamba2.dt[begin:end], mamba2.A_log, mamba2.B[begin:end], mamba2.C[begin:end]),
                *(mamba2.D, mamba2.dt_bias, NO_LIMIT),
            )
            # A model's chunks need not meet the boundaries.
            self.scan_options, self.recurrent, shape = (24,), {"recurrent": True}, (4, 20, 40)
            names = "state_update", "ssd_scan"
        elif kind == "mamba1":
            mamba1 = case_of(TOKENS, 37, 16)
            self.inputs = lambda begin, end: mamba1.tokens(begin, end).inputs
            names, shape = ("selective_update", "selective_scan"), (37, 16)
        else:
            delta = delta_case(TOKENS, key_heads=2, key_dim=6, value_dim=40, per_channel=kind == "kda")
            self.inputs = delta.args
            names, shape = ("delta_update", "delta_scan"), (4, 6, 40)
        kernels = [native_kernel(isa, name) if isa else reference_kernel(name) for name in names]
        self._update, self._scan = kernels
        self.states = torch.randn(8, *shape, generator=torch.Generator().manual_seed(3))
        self.states[0] = math.nan

    def scan(
        self, begin: int, end: int, read: int, write: int, *taken: tuple[int, int], **options: Any
    ) -> torch.Tensor:
        positions, checkpoints = int32([START + begin]), [(0, offset, slot) for offset, slot in taken]
        slots = (int32([0, end - begin]), positions, int32([read]), int32([[write]])[:, 0], checkpoints)
        options = {"packable": True, **options}
        return self._scan(*self.inputs(begin, end), *self.scan_options, self.states, *slots, **options)

    def update(self, begin: int, end: int, read: int, *writes: int) -> torch.Tensor:
        slots, positions = (int32([read]), int32([list(writes)])), int32([START + begin])
        inputs = self.inputs(begin, end)
        return self._update(*inputs, self.states, *slots, start_positions=positions, packable=True)


@pytest.fixture(params=["mamba2", "mamba2 in bfloat16", "mamba1", "delta", "kda"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


ways = pytest.mark.parametrize("isa", ["", *SETS])


def as_checkpoint(states: torch.Tensor, slot: int) -> memoryview:
    rows = rows_of(states)
    packed = np.empty(sum(rows.sizes), np.uint8)
    rows.read(slot, packed)
    return packed.data


def rows_of(states: torch.Tensor) -> PackedRows:
    return PackedRows([StatePart(states.view(len(states), -1).numpy(), states.shape[-1])])


def scales(state: torch.Tensor) -> torch.Tensor:
    size = state.shape[-1]
    blocks = torch.nn.functional.pad(state, (0, -size % INT8_STATE_BLOCK)).unflatten(-1, (-1, INT8_STATE_BLOCK))
    largest = blocks.abs().amax(-1, keepdim=True).expand_as(blocks).flatten(-2)[..., :size]
    return largest / MAX_INT8


@ways
def test_a_prompt_has_the_same_bits_if_it_continues_from_a_packed_checkpoint(kind: str, isa: str) -> None:
    family = Family(kind, isa)
    whole = family.scan(0, TOKENS, 1, 2, (BOUNDARY, 3))
    kept, last = family.states[3].clone(), family.states[2].clone()
    assert torch.equal(packed_values(kept), kept)
    assert not torch.equal(packed_values(last), last)
    packed = as_checkpoint(family.states, 3)
    family.states[3:] = math.nan
    rows_of(family.states).write(5, packed)
    assert torch.equal(family.states[5], kept)
    assert torch.equal(family.scan(BOUNDARY, TOKENS, 5, 5), whole[BOUNDARY:])
    assert torch.equal(family.states[5], last)


@ways
def test_a_state_at_a_boundary_is_rounded_to_the_nearest(kind: str, isa: str) -> None:
    family = Family(kind, isa)
    family.scan(0, BOUNDARY, 1, 2)
    family.scan(0, BOUNDARY, 1, 3, packable=False)
    rounded, exact = family.states[2], family.states[3]
    assert not torch.equal(rounded, exact)
    assert ((rounded - exact).abs() <= scales(exact) * 0.5001 + 1e-6).all()
    family.scan(0, BOUNDARY - 1, 1, 2)
    family.scan(0, BOUNDARY - 1, 1, 3, packable=False)
    torch.testing.assert_close(family.states[2], family.states[3])


@ways
def test_tokens_of_a_verify_step_have_the_bits_of_tokens_one_by_one(kind: str, isa: str) -> None:
    family = Family(kind, isa)
    begin = BOUNDARY - 2
    together = family.update(begin, begin + 4, 1, 2, 3, 4, 5)
    states, read = family.states.clone(), 1
    assert torch.equal(packed_values(states[3]), states[3])
    assert not torch.equal(packed_values(states[4]), states[4])
    for token in range(4):
        out = family.update(begin + token, begin + token + 1, read, 6)
        # References promise no bits here: torch's functions round the end of a tensor in another way.
        tolerances = {} if isa == "" else {"rtol": 0.0, "atol": 0.0}
        torch.testing.assert_close(out[0], together[token], **tolerances)
        torch.testing.assert_close(family.states[6], states[2 + token], **tolerances)
        read = 6
    # A token whose state is not kept, as padding's, changes nothing before it.
    family.update(begin, begin + 4, 1, 2, 3, 0, 0)
    assert torch.equal(family.states[2:4], states[2:4])


@pytest.mark.parametrize("isa", SETS)
def test_a_prompt_token_by_token_has_the_bits_of_decoding(kind: str, isa: str) -> None:
    family = Family(kind, isa)
    whole = family.scan(0, TOKENS, 1, 2, **family.recurrent)
    family.states[3] = family.states[1]
    for token in range(TOKENS):
        assert torch.equal(family.update(token, token + 1, 3, 3)[0], whole[token])
    assert torch.equal(family.states[3], family.states[2])


@examples(60)
@given(
    size=st.integers(1, 80),
    exponents=st.lists(st.integers(-140, 120), min_size=1, max_size=6),
    seed=st.integers(0, 2**31),
    special=st.sampled_from([None, 0.0, -0.0, math.nan, math.inf, 1e-42]),
)
def test_packing_loses_nothing_of_a_rounded_state(
    size: int, exponents: list[int], seed: int, special: float | None
) -> None:
    values = torch.randn(2, len(exponents), size, generator=torch.Generator().manual_seed(seed))
    values *= torch.tensor(exponents).double().exp2().float().view(1, -1, 1)
    if special is not None:
        values[1, 0, seed % size] = special
    states = packed_values(values).contiguous()
    assert torch.equal(packed_values(states).nan_to_num(7.0), states.nan_to_num(7.0))
    unpacked = torch.full_like(states, math.nan)
    rows_of(unpacked).write(0, as_checkpoint(states, 1))
    assert torch.equal(unpacked[0].nan_to_num(7.0), states[1].nan_to_num(7.0))
    is_broken = special is not None and not math.isfinite(special)
    assert bool(states[1].isnan().any()) == is_broken
    assert states[1].isnan().sum() <= INT8_STATE_BLOCK
