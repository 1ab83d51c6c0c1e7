"""The native kernels of models with images against their definitions in float64."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ostinato.ops.reference.attention import encoder_attention, of_all_segments
from ostinato.ops.reference.pointwise import inject_media as inject_reference
from tests.support.examples import examples
from tests.support.native_kernels import checked_kernel, rounding, same_bits, spaced
from tests.support.native_sets import SETS, native_kernel, record, threads

of_each_set = pytest.mark.parametrize("isa", SETS)
few = examples(40)
seeds = st.integers(0, 2**31)
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


def attention_in_segments(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: list[int]) -> torch.Tensor:
    """softmax(q k^T / sqrt(head_dim)) v in each segment, zeros elsewhere; float64."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    for begin, end in pairwise(starts):
        q_of, k_of, v_of = (each[begin:end].double().transpose(0, 1) for each in (q, k, v))
        weights = (q_of @ k_of.mT * q.shape[-1] ** -0.5).softmax(-1)
        out[begin:end] = (weights @ v_of).transpose(0, 1)
    return out


def heads_of(tokens: int, heads: int, head_dim: int, dtype: torch.dtype, seed: int) -> tuple[torch.Tensor, ...]:
    """Queries, keys and values side by side, as one product gives them."""
    generator = torch.Generator().manual_seed(seed)
    packed = spaced(torch.randn(tokens, 3 * heads * head_dim, generator=generator).to(dtype), 8)
    return packed.unflatten(1, (3 * heads, head_dim)).split(heads, dim=1)


@of_each_set
@few
@given(
    st.lists(st.sampled_from([0, 1, 2, 5, 16, 63, 127, 128, 129, 300]), max_size=4),
    st.integers(0, 3),
    st.integers(1, 3),
    st.sampled_from([1, 4, 12, 16, 24, 33, 64, 72, 80]),
    dtypes,
    seeds,
)
def test_attention_sees_all_of_its_segment_and_nothing_else(
    isa: str, lengths: list[int], padding: int, heads: int, head_dim: int, dtype: torch.dtype, seed: int
) -> None:
    """Padding holds NaN and gets zeros."""
    starts = [0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()]
    q, k, v = heads_of(starts[-1] + padding, heads, head_dim, dtype, seed)
    for each in (q, k, v):
        each[starts[-1] :] = torch.nan
    out = checked_kernel(isa, "encoder_attention")(q, k, v, torch.tensor(starts, dtype=torch.int32))
    expected = attention_in_segments(q, k, v, starts)
    allowed = 1e-5 if dtype == torch.float32 else 2 * rounding(dtype)
    assert out.shape == expected.shape
    assert (out.double() - expected).abs().max().item() <= allowed * 3 if out.numel() else True
    assert bool((out[starts[-1] :] == 0).all())


@of_each_set
def test_an_image_gives_the_same_bits_wherever_it_stands(isa: str) -> None:
    q, k, v = heads_of(700, 2, 72, torch.bfloat16, 3)
    kernel = checked_kernel(isa, "encoder_attention")
    whole = kernel(q, k, v, torch.tensor([0, 100, 500, 700], dtype=torch.int32))
    for begin, end in ((0, 100), (100, 500), (500, 700)):
        alone = kernel(q[begin:end], k[begin:end], v[begin:end], torch.tensor([0, end - begin], dtype=torch.int32))
        assert same_bits(alone, whole[begin:end])


@of_each_set
def test_a_replay_of_fewer_patches_leaves_padding_alone(isa: str) -> None:
    q, k, v = heads_of(64, 2, 16, torch.float32, 4)
    starts = torch.tensor([0, 20, 41], dtype=torch.int32)
    out = torch.full(q.shape, 7.0)
    record(isa, native_kernel(isa, "encoder_attention"), out, q, k, v, starts).run(44)
    torch.testing.assert_close(out[:44].double(), attention_in_segments(q, k, v, [0, 20, 41])[:44], rtol=0, atol=1e-5)
    assert bool((out[44:] == 7).all())


def test_the_form_for_graphs_on_a_gpu_is_the_reference() -> None:
    q, k, v = heads_of(40, 3, 24, torch.float32, 5)
    for each in (q, k, v):
        each[33:] = torch.nan
    starts = torch.tensor([0, 9, 9, 33, 33], dtype=torch.int32)
    torch.testing.assert_close(of_all_segments(q, k, v, starts), encoder_attention(q, k, v, starts))


@of_each_set
@few
@given(st.integers(0, 4), st.integers(1, 3), st.integers(1, 40), st.sampled_from([1, 1000, 200_000]), seeds)
def test_every_angle_is_of_its_own_axis(
    isa: str, tokens: int, num_axes: int, half: int, largest: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    positions = torch.randint(0, largest, (tokens, num_axes), generator=generator)
    axes = torch.randint(0, num_axes, (half,), generator=generator)
    frequencies = torch.rand(half, generator=generator)
    angles = checked_angles(isa, positions, axes, frequencies)
    expected = positions.float()[:, axes] * frequencies
    both = torch.stack((expected.double().cos(), expected.double().sin())) * 1.5
    torch.testing.assert_close(angles.double(), both, rtol=0, atol=1e-6)


def checked_angles(isa: str, positions: torch.Tensor, axes: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    """The first dimension is not that of tokens, so `checked_kernel` does not fit."""
    kernel = native_kernel(isa, "axial_angles")
    with threads(1):
        alone = kernel(positions, axes, frequencies, 1.5)
    with threads(2):
        assert same_bits(kernel(positions, axes, frequencies, 1.5), alone)
    return alone


@of_each_set
@few
@given(st.integers(0, 5), st.integers(1, 3), st.integers(1, 20), st.integers(0, 9), dtypes, seeds)
def test_heads_are_rotated_and_what_is_behind_passes(
    isa: str, tokens: int, heads: int, half: int, behind: int, dtype: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = spaced(torch.randn(tokens, heads, 2 * half + behind, generator=generator).to(dtype), 5)
    angle = torch.rand(tokens, 1, half, generator=generator) * 6
    out = checked_kernel(isa, "rotate")(x, torch.stack((angle[:, 0].cos(), angle[:, 0].sin())))
    first, second, rest = x.double().split((half, half, behind), dim=-1)
    cos, sin = angle.double().cos(), angle.double().sin()
    expected = torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)
    allowed = rounding(dtype) * expected.abs() + 1e-5
    assert bool(((out.double() - expected).abs() <= allowed).all())


@of_each_set
@few
@given(st.integers(0, 5), st.integers(1, 5), st.integers(1, 70), dtypes, seeds)
def test_embeddings_are_added_up_by_weight(
    isa: str, tokens: int, count: int, hidden: int, dtype: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn(9, hidden, generator=generator).to(dtype)
    ids = torch.randint(0, 9, (tokens, count + 2), generator=generator)[:, 1 : count + 1]
    weights = torch.randn(tokens, count + 1, generator=generator)[:, :count]
    out = checked_kernel(isa, "weighted_embedding")(ids, weights, table)
    parts = table.double()[ids] * weights.double().unsqueeze(-1)
    allowed = rounding(dtype) * parts.sum(1).abs() + 1e-5 * parts.abs().sum(1)
    assert bool(((out.double() - parts.sum(1)).abs() <= allowed).all())


@pytest.mark.parametrize("isa", [None, *SETS])
@few
@given(st.integers(0, 6), st.integers(1, 40), st.integers(1, 3), st.booleans(), dtypes, seeds)
def test_media_takes_its_place_and_the_null_cell_reaches_nobody(
    isa: str | None, tokens: int, hidden: int, rows: int, add: bool, dtype: torch.dtype, seed: int
) -> None:
    """The null cell holds NaN, and so do the tokens that are replaced."""
    generator = torch.Generator().manual_seed(seed)
    media = torch.randn(5, rows, hidden, generator=generator).to(dtype)
    media[0] = torch.nan
    cells = torch.randint(0, 5, (tokens,), generator=generator)
    x = torch.randn(tokens, hidden, generator=generator).to(dtype)
    kept = x.clone()
    if not add:
        x[cells > 0] = torch.nan
    row = rows - 1
    for token, cell in enumerate(cells.tolist()):
        if cell:
            own = kept[token].double() if add else 0
            kept[token] = (own + media[cell, row].double()).to(dtype)
    if isa is None:
        out = inject_reference(x, cells, media, row, add)
    else:
        kernel = native_kernel(isa, "inject_media")
        again = x.clone()
        program = record(isa, kernel, None, again, cells, media, row, add)
        out = kernel(x, cells, media, row, add)
        with threads(2):
            program.run(tokens)
        assert same_bits(again, out)
    assert out is x
    assert torch.equal(out, kept)
