"""The gated delta rule (delta_update, delta_scan) against its definition in float64, and against transformers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.kimi_linear import modeling_kimi_linear as kimi_linear
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

from ostinato.ops.kernel_cost import StepShape
from ostinato.ops.operations import OPERATIONS
from ostinato.ops.reference import delta
from tests.support.delta_cases import DeltaCase, delta_case, with_betas
from tests.support.examples import examples
from tests.support.native_kernels import int32

few = examples(25)
seeds = st.integers(0, 2**31)
bounds = st.sampled_from(["least", "largest", "either", "any"])
bounded = st.sampled_from([0.0, -5.0])
strengths = st.sampled_from([-6.0, 0.0, 4.0, 12.0])


def close(given: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-9) -> None:
    """Each element but for the rounding of sums whose terms are as large as the largest element."""
    largest = float(expected.abs().max()) if expected.numel() else 0.0
    torch.testing.assert_close(given.double(), expected, rtol=tolerance, atol=tolerance * (1 + largest))


# delta_update


@few
@given(
    pasts=st.lists(st.sampled_from(["none", "own", "other"]), min_size=1, max_size=4),
    per_row=st.integers(1, 3),
    key_heads=st.integers(1, 2),
    heads_per_key=st.integers(1, 3),
    per_channel=st.booleans(),
    beta_scale=st.sampled_from([1.0, 2.0]),
    decay_bound=bounded,
    strength=strengths,
    dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=seeds,
)
def test_an_update_follows_the_rule_from_read_slot_to_write_slots(
    pasts: list[str],
    per_row: int,
    key_heads: int,
    heads_per_key: int,
    per_channel: bool,
    beta_scale: float,
    decay_bound: float,
    strength: float,
    dtype: torch.dtype,
    seed: int,
) -> None:
    """A row starts from zeros, from the slot that it writes first, or from one that it does not write."""
    rows = len(pasts)
    shape = {
        "key_heads": key_heads,
        "heads_per_key": heads_per_key,
        "per_channel": per_channel,
        "decay_bound": decay_bound,
    }
    case = delta_case(rows * per_row, **shape, beta_scale=beta_scale, strength=strength, seed=seed)
    states = case.slots(1 + rows * (per_row + 1), dtype, seed)
    writes = [[row * (per_row + 1) + 1 + i for i in range(per_row)] for row in range(rows)]
    reads = [
        {"none": 0, "own": own[0], "other": row * (per_row + 1) + per_row + 1}[past]
        for row, (past, own) in enumerate(zip(pasts, writes, strict=True))
    ]
    before = states.clone()
    out = delta.delta_update(*case.args(), states, int32(reads), int32(writes))
    tolerance = 1e-9 if dtype == torch.float64 else 1e-5
    for row in range(rows):
        first = row * per_row
        state = before[reads[row]] if reads[row] else None
        expected, after = case.follow(first, first + per_row, state)
        close(out[first : first + per_row], expected, 1e-5)  # the result is float32
        for write, held in zip(writes[row], after, strict=True):
            close(states[write], held, tolerance)


def test_padding_cannot_reach_a_real_row() -> None:
    """Padding rows, whose slots are null, with inputs of NaN; and slots that nobody writes."""
    case = delta_case(4)
    poisoned = replace(case, q=case.q.clone(), v=case.v.clone())
    poisoned.q[2:], poisoned.v[2:] = torch.nan, torch.nan
    clean, poison = case.slots(4), case.slots(4)
    slots = (int32([1, 0, 0, 0]), int32([[1], [2], [0], [0]]))
    expected = delta.delta_update(*case.args(), clean, *slots)
    given = delta.delta_update(*poisoned.args(), poison, *slots)
    assert torch.equal(given[:2], expected[:2])
    assert not expected[:2].isnan().any()
    assert torch.equal(poison[1:], clean[1:])


# delta_scan


@few
@given(
    rows=st.lists(st.tuples(st.integers(0, 150), st.sampled_from([0, 16, 48, 77])), min_size=1, max_size=3),
    key_heads=st.integers(1, 2),
    heads_per_key=st.integers(1, 2),
    per_channel=st.booleans(),
    beta_scale=st.sampled_from([1.0, 2.0]),
    decay_bound=bounded,
    strength=strengths,
    betas=bounds,
    growth=st.sampled_from([1.0, 1e6]),
    seed=seeds,
)
def test_chunks_give_what_the_rule_gives_token_by_token(
    rows: list[tuple[int, int]],
    key_heads: int,
    heads_per_key: int,
    per_channel: bool,
    beta_scale: float,
    decay_bound: float,
    strength: float,
    betas: str,
    growth: float,
    seed: int,
) -> None:
    """In float64: ragged rows with long and short memories, betas at their bounds, values that make states grow; with
    states written out on the way. A strength of 12 makes decays whose sums would overflow if they were not at most
    0."""
    starts = [sum(length for length, _ in rows[:i]) for i in range(len(rows) + 1)]
    shape = {
        "key_heads": key_heads,
        "heads_per_key": heads_per_key,
        "per_channel": per_channel,
        "decay_bound": decay_bound,
    }
    case = delta_case(starts[-1], **shape, beta_scale=beta_scale, strength=strength, seed=seed)
    case = with_betas(replace(case, v=case.v * growth), betas).exactly()
    states = case.slots(1 + 12 * len(rows), torch.float64, seed)
    before = states.clone()
    reads = [row + 1 if position else 0 for row, (_, position) in enumerate(rows)]
    writes = [len(rows) + 1 + row for row in range(len(rows))]
    marks = [
        (row, offset, 2 * len(rows) + 1 + row * 10 + i)
        for row, (length, position) in enumerate(rows)
        for i, offset in enumerate(range(16 - position % 16, length + 1, 16))
    ]
    positions = int32([position for _, position in rows])
    slots = (int32(starts), positions, int32(reads), int32(writes))
    out = delta.delta_scan(*case.args(), states, *slots, marks)
    for row, (length, _) in enumerate(rows):
        if not length:
            assert torch.equal(states[writes[row]], before[writes[row]])
            continue
        begin = starts[row]
        expected, after = case.follow(begin, begin + length, before[reads[row]] if reads[row] else None)
        close(out[begin : begin + length], expected)
        close(states[writes[row]], after[-1])
        for of_row, offset, slot in marks:
            if of_row == row:
                close(states[slot], after[offset - 1])
    kept = sorted(set(range(1, len(states))) - {*writes, *(slot for _, _, slot in marks)})
    assert torch.equal(states[kept], before[kept])


@pytest.mark.parametrize(("per_channel", "cut"), [(False, 64), (True, 16)])
def test_a_prompt_cut_between_chunks_has_the_same_bits(per_channel: bool, cut: int) -> None:
    case = delta_case(100, per_channel=per_channel, key_dim=16, value_dim=8)
    whole, parts = case.slots(3), case.slots(3)
    expected = delta.delta_scan(*case.args(), whole, int32([0, 100]), int32([0]), int32([0]), int32([1]))
    first = delta.delta_scan(*case.args(0, cut), parts, int32([0, cut]), int32([0]), int32([0]), int32([2]))
    rest = (int32([0, 100 - cut]), int32([cut]), int32([2]), int32([1]))
    second = delta.delta_scan(*case.args(cut), parts, *rest)
    assert torch.equal(torch.cat((first, second)), expected)
    assert torch.equal(parts[1], whole[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_states_of_16_bits_are_refused(dtype: torch.dtype) -> None:
    case = delta_case(1)
    with pytest.raises(AssertionError, match="use float32"):
        delta.delta_update(*case.args(), case.slots(2).to(dtype), int32([0]), int32([[1]]))


# transformers


def prepared(case: DeltaCase) -> tuple[torch.Tensor, torch.Tensor]:
    """Log decays and betas of all tokens, as transformers takes them."""
    tokens = range(len(case.v))
    log_decay = torch.stack([case.log_decay(t) for t in tokens]).float()
    beta = torch.stack([case.beta(t) for t in tokens]).float()
    return (log_decay if case.a.dim() == 3 else log_decay.squeeze(-1))[None], beta[None]


@pytest.mark.parametrize("beta_scale", [1.0, 2.0])
@pytest.mark.parametrize("form", ["torch_recurrent_gated_delta_rule", "torch_chunk_gated_delta_rule"])
def test_a_gated_delta_net_is_that_of_transformers(form: str, beta_scale: float) -> None:
    case = delta_case(90, key_heads=2, heads_per_key=3, key_dim=8, value_dim=5, beta_scale=beta_scale, seed=4)
    states, (log_decay, beta) = case.slots(3), prepared(case)
    expected, state = getattr(qwen3_next, form)(
        *(x[None] for x in (case.q, case.k, case.v)),
        g=log_decay,
        beta=beta,
        initial_state=states[1][None],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    _check(case, states, expected[0], state[0])


@pytest.mark.parametrize("form", ["recurrent_kimi_delta_attention", "chunk_kimi_delta_attention"])
def test_a_decay_per_key_channel_is_that_of_kimi_linear(form: str) -> None:
    case = delta_case(90, key_heads=3, heads_per_key=1, key_dim=8, value_dim=8, per_channel=True, seed=5, strength=-2)
    states, (log_decay, beta) = case.slots(3), prepared(case)
    expected, state = getattr(kimi_linear, form)(
        *(x[None] for x in (case.q, case.k, case.v)),
        g=log_decay,
        beta=beta,
        initial_state=states[1][None],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    _check(case, states, expected[0], state[0])


def _check(case: DeltaCase, states: torch.Tensor, expected: torch.Tensor, state: torch.Tensor) -> None:
    """The scan of all tokens from slot 1 to slot 2, and 90 updates of one token each in slot 1."""
    slots = (int32([0, 90]), int32([7]), int32([1]), int32([2]))
    scanned = delta.delta_scan(*case.args(), states, *slots)
    torch.testing.assert_close(scanned, expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(states[2], state, atol=1e-5, rtol=1e-4)
    updated = [delta.delta_update(*case.args(t, t + 1), states, int32([1]), int32([[1]])) for t in range(len(case.v))]
    torch.testing.assert_close(torch.cat(updated), expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(states[1], state, atol=1e-5, rtol=1e-4)


def test_the_work_of_a_step_counts_states_and_seven_operations_for_each_element() -> None:
    for name, decodes, moved in (("delta_update", True, 2 * (1 + 3)), ("delta_scan", False, 2 * (1 + 1))):
        rule = OPERATIONS[name].work
        assert rule is not None
        found = rule(StepShape(2, 3, 10, decodes), state_elements=100, element_bytes=4, num_heads=5)
        assert (found.num_bytes, found.flops) == (moved * 400 + 40, 7 * 100 * 6)
