"""The native operations of n-gram embeddings against their references, which are exact, or float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ostinato.ops.dispatch import reference_kernel
from tests.ops.test_native_conv import convolve, dtypes, few, make_step, seeds, steps
from tests.support.native_kernels import checked_kernel, rounding, same_bits, spaced
from tests.support.native_sets import SETS, native_kernel

pytestmark = pytest.mark.parametrize("isa", SETS)

END = 70_000
MULTIPLIERS = (101, 10_007, 1_000_003, 2**45 + 1)
"""The product of the last with any token below 2**17 takes up to 62 bits."""
SIZES = (11, 13, 17, 19, 1_000_003, 23)


@few
@given(**steps, n=st.integers(2, 4), dtype=dtypes, seed=seeds)
def test_ids_and_kept_tokens_are_those_of_the_reference(
    isa: str,
    per_row: int,
    decode_pasts: list[int],
    prefills: list[tuple[int, int]],
    n: int,
    dtype: torch.dtype,
    seed: int,
) -> None:
    if not decode_pasts and not prefills:
        return
    step = make_step(per_row, decode_pasts, prefills, n - 1, 3, dtype, seed)
    generator = torch.Generator().manual_seed(seed)
    # Digits of any ids in the slots, and the ids that end a text often enough.
    states = torch.randint(0, 256, step.states.shape, generator=generator).to(dtype)
    states[0], states[..., 2] = torch.nan, states[..., 2] % 2
    ends = torch.tensor([END >> 8 * place & 255 for place in range(3)]).to(dtype)
    states[torch.rand(states.shape[:2], generator=generator) < 0.2] = ends
    tokens = torch.randint(0, 2**17, (len(step.x) + 2,), generator=generator)  # the last two are padding
    tokens[torch.rand(len(tokens), generator=generator) < 0.2] = END
    sizes = torch.tensor(SIZES[: (n - 1) * 2])
    tables = (torch.tensor(MULTIPLIERS[:n]), sizes, sizes.cumsum(0) - sizes)
    expected_states = states.clone()
    expected = reference_kernel("ngram_ids")(tokens, *tables, END, expected_states, *step.rows)
    # What is written to slot 0 is not read.
    expected_states[0] = states[0]
    found = checked_kernel(isa, "ngram_ids")(tokens, *tables, END, states, *step.rows)
    assert torch.equal(found, expected)
    assert same_bits(states, expected_states)


@few
@given(
    rows=st.integers(1, 40),
    part_rows=st.integers(1, 12),
    size=st.sampled_from([1, 6, 16, 37]),
    heads=st.integers(1, 5),
    stored=dtypes,
    dtype=dtypes,
    seed=seeds,
)
def test_rows_of_a_table_in_parts_are_those_of_the_whole(
    isa: str, rows: int, part_rows: int, size: int, heads: int, stored: torch.dtype, dtype: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn(rows, size, generator=generator).to(stored)
    ids = torch.randint(0, rows, (7, heads), generator=generator)
    found = checked_kernel(isa, "ngram_embedding")(ids, list(table.split(part_rows)), dtype)
    assert found.dtype == dtype
    assert torch.equal(found, table[ids].flatten(1).to(dtype))


@pytest.mark.parametrize(
    "second", [torch.zeros(2, 3, dtype=torch.float16), torch.zeros(2, 4), torch.zeros(2, 6)[:, ::2]]
)
def test_parts_of_two_kinds_are_refused(isa: str, second: torch.Tensor) -> None:
    with pytest.raises(AssertionError, match="parts of one kind"):
        native_kernel(isa, "ngram_embedding")(
            torch.zeros(1, 1, dtype=torch.int64), [torch.zeros(2, 3), second], torch.float32
        )


def test_a_spoiled_slot_gives_rows_within_the_table(isa: str) -> None:
    states = torch.full((2, 2, 3), torch.nan)
    states[1, 0] = torch.tensor([255.0, -1.0, 1e9])
    tables = (torch.tensor([2**62 + 1, 2**61 + 1, 2**62 - 1]), torch.tensor([11, 13]), torch.tensor([0, 11]))
    rows = (torch.tensor([0, 2], dtype=torch.int32), torch.tensor([1], dtype=torch.int32))
    ids = native_kernel(isa, "ngram_ids")(
        torch.tensor([2**40, -7]), *tables, END, states, *rows, torch.tensor([[1]], dtype=torch.int32), 0, ()
    )
    assert ids.min() >= 0
    assert (ids < torch.tensor([11, 24])).all()


@few
@given(streams=st.integers(1, 5), size=st.sampled_from([1, 4, 20, 64, 100]), dtype=dtypes, seed=seeds)
def test_a_gate_is_the_sigmoid_of_a_signed_root(
    isa: str, streams: int, size: int, dtype: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    keys, queries, values = (
        torch.randn(6, width, generator=generator).to(dtype) for width in (streams * size, streams * size, size)
    )
    keys[0], queries[1], values[2, 0] = 0, 2.0**-24, torch.inf
    scores = (keys.double() * queries.double()).unflatten(1, (streams, size)).sum(dim=-1, keepdim=True) / size**0.5
    gates = (scores.abs().clamp_min(1e-6).sqrt() * scores.sign()).sigmoid()
    expected = (gates * values.double()[:, None]).flatten(1)
    found = checked_kernel(isa, "ngram_gate")(spaced(keys, 3), spaced(queries, 1), spaced(values, 2))
    assert found.dtype == dtype
    # Near zero the root of a score magnifies its error; a gate is within a thousandth of its own there.
    torch.testing.assert_close(found.double(), expected, rtol=rounding(dtype) + 1e-3, atol=1e-6)
    large = (scores.abs() > 0.1).expand(-1, -1, size).flatten(1)
    torch.testing.assert_close(found.double()[large], expected[large], rtol=rounding(dtype), atol=1e-6)


@few
@given(
    **steps,
    width=st.integers(2, 4),
    dilation=st.integers(1, 4),
    channels=st.sampled_from([1, 16, 37, 150]),
    dtype=dtypes,
    seed=seeds,
)
def test_a_convolution_with_gaps_continues_each_row_from_its_read_slot(
    isa: str,
    per_row: int,
    decode_pasts: list[int],
    prefills: list[tuple[int, int]],
    width: int,
    dilation: int,
    channels: int,
    dtype: torch.dtype,
    seed: int,
) -> None:
    if not decode_pasts and not prefills:
        return
    step = make_step(per_row, decode_pasts, prefills, (width - 1) * dilation, channels, dtype, seed)
    weight = torch.randn(width, channels, generator=torch.Generator().manual_seed(seed)).to(dtype)
    taps = torch.zeros((width - 1) * dilation + 1, channels, dtype=dtype)
    taps[::dilation] = weight
    out = checked_kernel(isa, "dilated_conv1d")(step.x, weight, dilation, step.states, *step.rows)
    expected = [convolve(h, taps, None, "silu")[past:] for past, h in zip(step.pasts, step.histories, strict=True)]
    torch.testing.assert_close(out.double(), torch.cat(expected), atol=1e-5, rtol=rounding(dtype))
    assert same_bits(step.states, step.expected_states)
