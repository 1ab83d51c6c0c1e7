"""Weights in blocks: products, embeddings and experts with them against float64."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ostinato.ops.quant.block_formats import BLOCK_FORMATS, Blocks, merge_adjacent, num_bytes, slice_rows
from ostinato.ops.quant.dequantize import dequantize, pack_float8, pack_int4
from ostinato.ops.reference import matmul, pointwise
from ostinato.plan.device.kernel_support import CPU_FLAGS
from tests.support.block_weights import block_rows, expanded, packed
from tests.support.examples import examples
from tests.support.guarded import guarded
from tests.support.native_kernels import checked_kernel, rounding, same_bits, spaced
from tests.support.native_sets import (
    INTEGER_SETS,
    PRODUCT_SETS,
    SETS,
    first_m,
    has_driver,
    last_m,
    native_kernel,
    threads,
    uses_tiles,
)

pytest.importorskip("gguf", reason="the package that says what blocks stand for comes with the test extra")

few = examples(40)
fewer = examples(15)
seeds = st.integers(0, 2**31)
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
names = st.sampled_from(sorted(BLOCK_FORMATS))
counts = st.sampled_from([1, 2, 3, 8, 11])  # kernels take eight small blocks together
rows_of_weights = st.sampled_from([1, 3, 4, 16, 37, 64, 70])


@given(st.lists(st.tuples(names, st.integers(1, 9)), min_size=1, max_size=4), st.integers(0, 40), st.integers(0, 40))
def test_some_rows_of_parts_are_as_many_as_were_asked_for(parts: list[tuple[str, int]], begin: int, end: int) -> None:
    blocks = merge_adjacent(tuple(parts))
    total = sum(rows for _, rows in parts)
    begin, end = min(begin, total), min(max(begin, end), total)
    each = [name for name, rows in parts for _ in range(rows)]
    assert [name for name, rows in slice_rows(blocks, begin, end) for _ in range(rows)] == each[begin:end]
    assert num_bytes(blocks, 256) == sum(BLOCK_FORMATS[name].row_bytes(256) for name in each)


@few
@given(
    st.sampled_from([32, 64, 128]), st.integers(1, 5), counts, st.sampled_from([torch.bfloat16, torch.float16]), seeds
)
def test_packing_4_bits_loses_nothing(group: int, rows: int, groups: int, dtype: torch.dtype, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randint(16, (rows, groups * group), generator=generator)
    size = 1e30 if dtype == torch.bfloat16 else 1.0  # a range that float16 has not
    scale = (torch.randn(rows, groups, generator=generator) * size).to(dtype).float()
    zero = torch.randint(16, (rows, groups), generator=generator)
    name = f"int4_g{group}"
    raw = pack_int4(whole, scale, zero)
    assert raw.shape == (rows, BLOCK_FORMATS[name].row_bytes(groups * group))
    expected = scale.repeat_interleave(group, 1) * (whole - zero.repeat_interleave(group, 1))
    assert torch.equal(dequantize(name, raw), expected)
    assert torch.equal(dequantize(name, raw).double(), expanded(raw, ((name, rows),), groups * group).float().double())


@few
@given(names, st.integers(0, 9), counts, rows_of_weights, st.booleans(), dtypes, seeds)
def test_a_product_with_blocks_is_as_exact_as_its_input(
    name: str, tokens: int, count: int, rows: int, bias: bool, dtype: torch.dtype, seed: int
) -> None:
    in_size = count * BLOCK_FORMATS[name].elements
    check_product(matmul.linear, tokens, in_size, ((name, rows),), bias, None, dtype, seed)


@pytest.mark.parametrize("name", sorted(BLOCK_FORMATS))
@pytest.mark.parametrize("isa", PRODUCT_SETS)
@few
@given(
    st.integers(0, 40), counts, rows_of_weights, st.booleans(), st.sampled_from([None, "silu", "swiglu"]), dtypes, seeds
)
def test_the_native_product_with_blocks_agrees(
    isa: str,
    name: str,
    tokens: int,
    count: int,
    rows: int,
    bias: bool,
    activation: str | None,
    dtype: torch.dtype,
    seed: int,
) -> None:
    in_size = count * BLOCK_FORMATS[name].elements
    rows += rows % 2 if activation == "swiglu" else 0
    check_product(checked_kernel(isa, "linear"), tokens, in_size, ((name, rows),), bias, activation, dtype, seed)


@few
@given(st.sampled_from([32, 64, 128]), st.integers(1, 5), counts, seeds)
def test_packing_float8_loses_nothing(group: int, rows: int, groups: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(256, (rows, groups * group), generator=generator).to(torch.uint8)
    raw[raw & 0x7F == 0x7F] = 1
    scale = torch.randn(rows, groups, generator=generator) * 2.0 ** (seed % 100 - 50)
    small, name = raw.view(torch.float8_e4m3fn), f"fp8_g{group}"
    packed_rows = pack_float8(small, scale)
    assert packed_rows.shape == (rows, BLOCK_FORMATS[name].row_bytes(groups * group))
    assert torch.equal(dequantize(name, packed_rows), scale.repeat_interleave(group, 1) * small.float())


@pytest.mark.parametrize("isa", PRODUCT_SETS)
@few
@given(st.integers(0, 40), counts, rows_of_weights, st.booleans(), st.booleans(), dtypes, seeds)
def test_inputs_are_brought_into_the_order_of_the_weights(
    isa: str, tokens: int, count: int, rows: int, adds: bool, fixed_order: bool, dtype: torch.dtype, seed: int
) -> None:
    """Also of more tokens than are brought into it at a time."""
    generator = torch.Generator().manual_seed(seed)
    in_size, blocks = 32 * count, (("int4_g32", rows),)
    tokens += 600 if tokens > 30 and count == 1 else 0
    weight = block_rows("int4_g32", rows, in_size, generator)
    x = spaced(torch.randn(tokens, in_size, generator=generator).to(dtype), 5)
    residual = spaced(torch.randn(tokens, rows, generator=generator).to(dtype), 3) if adds else None
    order = torch.randperm(in_size, generator=generator).int()
    w = expanded(weight, blocks, in_size)
    y = x[:, order].double() @ w.T + (0 if residual is None else residual.double())
    largest = x[:, order].double().abs() @ w.abs().T + 1
    for kernel in (matmul.linear, checked_kernel(isa, "linear", deterministic=fixed_order)):
        out = kernel(x, weight, None, residual, None, None, None, None, None, blocks, order)
        assert ((out.double() - y).abs() <= 4 * rounding(dtype) * (largest + y.abs())).all()


@pytest.mark.parametrize("isa", PRODUCT_SETS)
@few
@given(
    st.lists(st.tuples(names, rows_of_weights), min_size=2, max_size=3),
    st.integers(0, 20),
    st.booleans(),
    dtypes,
    seeds,
)
def test_rows_of_several_formats_are_one_product(
    isa: str, parts: list[tuple[str, int]], tokens: int, bias: bool, dtype: torch.dtype, seed: int
) -> None:
    blocks = merge_adjacent(tuple(parts))
    check_product(matmul.linear, tokens, 256, blocks, bias, None, dtype, seed)
    check_product(checked_kernel(isa, "linear"), tokens, 256, blocks, bias, "silu", dtype, seed)


@pytest.mark.parametrize("isa", PRODUCT_SETS)
@pytest.mark.parametrize("name", ["Q4_0", "Q4_K", "Q8_0", "int4_g64"])
def test_tokens_may_be_more_than_are_multiplied_at_a_time(isa: str, name: str) -> None:
    for tokens, dtype in ((513, torch.bfloat16), (1030, torch.float16)):
        check_product(checked_kernel(isa, "linear"), tokens, 256, ((name, 20),), False, None, dtype, tokens)


def check_product(kernel, tokens, in_size, blocks: Blocks, bias, activation, dtype, seed) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = sum(count for _, count in blocks)
    weight = packed(blocks, in_size, generator)
    x = spaced(torch.randn(tokens, in_size, generator=generator).to(dtype), 5)
    added = torch.randn(rows, generator=generator).to(dtype) if bias else None
    factor = torch.rand(rows, generator=generator) + 0.5
    size = rows // 2 if activation == "swiglu" else rows
    residual = spaced(torch.randn(tokens, size, generator=generator).to(dtype), 3)
    out = kernel(x, weight, added, residual, activation, factor, None, None, None, blocks)
    w = expanded(weight, blocks, in_size)
    y = x.double() @ w.T
    largest = x.double().abs() @ w.abs().T + 1
    y = (y + (0 if added is None else added.double())) * factor.double()
    if activation == "silu":
        y = y * y.sigmoid()
    if activation == "swiglu":
        gate, up = y.chunk(2, dim=-1)
        y = gate * gate.sigmoid() * up
        largest = (largest.chunk(2, dim=-1)[0] + 1) * (largest.chunk(2, dim=-1)[1] + 1)
    y = y + residual.double()
    assert out.dtype is dtype
    assert ((out.double() - y).abs() <= 4 * rounding(dtype) * (largest + y.abs())).all()


halves = st.sampled_from([torch.bfloat16, torch.float16])
some_tokens = st.integers(1, 40)


def most_in_rows(isa: str) -> int | None:
    """The most tokens that are multiplied in integers with rows in place, where more are so in panels."""
    of = {"LARGE_M_I16_AVX2": "gemv_i16_block_avx2", "LARGE_M_I16_VNNI": "gemv_i16_block_avx512"}
    return next((last_m(name) for driver, name in of.items() if has_driver(isa, driver)), None)


def as_integers(isa: str, name: str, dtype: torch.dtype, tokens: int) -> int:
    """So many tokens, or fewer, of which all are multiplied in integers."""
    if most_in_rows(isa):
        return tokens
    rounds = dtype == torch.bfloat16 and "avx512_bf16" in CPU_FLAGS["x86_64"].get(isa, ())
    on_tiles = dtype == torch.bfloat16 and uses_tiles(isa)
    few = last_m("gemv_i16_block_avx512") if not on_tiles else first_m("gemm_bf16_any_amx") - 1
    return 1 + tokens % ((4 if name == "Q6_K" else 2) if rounds else few)


in_integers = names.filter(lambda name: not name.startswith("fp8"))


def spans(values: torch.Tensor, name: str) -> torch.Tensor:
    """[rows, spans, elements that share the scale of a token in integers]."""
    return values.abs().view(len(values), -1, min(64, max(32, BLOCK_FORMATS[name].elements)) if "_g" in name else 32)


@pytest.mark.parametrize("isa", INTEGER_SETS)
@few
@given(names, some_tokens, counts, rows_of_weights, halves, st.integers(-100, 100), seeds)
def test_a_token_of_16_bits_loses_at_most_a_part_of_the_largest_number_that_shares_its_scale(
    isa: str, name: str, tokens: int, count: int, rows: int, dtype: torch.dtype, exponent: int, seed: int
) -> None:
    """2^-15 of it, where integers are multiplied; numbers of all sizes, in a result of float32."""
    generator, tokens = torch.Generator().manual_seed(seed), as_integers(isa, name, dtype, tokens)
    in_size = count * BLOCK_FORMATS[name].elements
    weight, blocks = block_rows(name, rows, in_size, generator), ((name, rows),)
    spread = 2.0 ** torch.randint(-12, 3, (tokens, in_size), generator=generator)
    size = 2.0 ** (exponent if dtype == torch.bfloat16 else exponent // 10) / 2**20
    x = (torch.randn(tokens, in_size, generator=generator) * spread * size).to(dtype)
    out = checked_kernel(isa, "linear")(x, weight, None, None, None, None, torch.float32, None, None, blocks)
    w = expanded(weight, blocks, in_size)
    most = spans(x.double(), name).amax(2)
    allowed = 2.0**-15 * (most @ spans(w, name).sum(2).T) + 2.0**-101 * w.abs().sum(1)
    # In float32, what is less than zero by a minimum is added apart: at most the range of 32 weights.
    in_parts = w.view(rows, -1, 32)
    of_part = in_parts.abs().amax(2) + in_parts.amax(2) - in_parts.amin(2)
    allowed += 32e-6 * (x.double().abs().view(tokens, -1, 32).amax(2) @ of_part.T)
    assert ((out.double() - x.double() @ w.T).abs() <= allowed).all()


@pytest.mark.parametrize("isa", INTEGER_SETS)
@few
@given(names, some_tokens, halves, seeds)
def test_numbers_beside_a_huge_one_lose_together_no_more_than_its_own_rounding_to_bfloat16(
    isa: str, name: str, tokens: int, dtype: torch.dtype, seed: int
) -> None:
    """2^-9 of it times the largest weight: one in each span is 2^6 to 2^12 times the others, which have all bits."""
    generator, tokens = torch.Generator().manual_seed(seed), as_integers(isa, name, dtype, tokens)
    weight, blocks = block_rows(name, 21, 512, generator), ((name, 21),)
    x = torch.randn(tokens, 512, generator=generator)
    x.view(tokens, -1, 32)[:, ::2, seed % 32] *= 2.0 ** (6 + seed % 7)
    x = x.to(dtype)
    out = checked_kernel(isa, "linear")(x, weight, None, None, None, None, torch.float32, None, None, blocks)
    w = expanded(weight, blocks, 512)
    allowed = 2.0**-9 * (spans(x.double(), name).amax(2) @ spans(w, name).amax(2).T) + 1e-6
    assert ((out.double() - x.double() @ w.T).abs() <= allowed).all()


@pytest.mark.parametrize("isa", INTEGER_SETS)
@few
@given(in_integers, some_tokens, counts, rows_of_weights, halves, st.data(), seeds)
def test_the_bits_of_a_token_in_integers_are_its_own_whatever_stands_beside_it(
    isa: str, name: str, tokens: int, count: int, rows: int, dtype: torch.dtype, data: st.DataObject, seed: int
) -> None:
    """One of a few has those that it has alone; one of more, those that it has among others, more than a few."""
    generator, tokens = torch.Generator().manual_seed(seed), as_integers(isa, name, dtype, tokens)
    in_size = count * BLOCK_FORMATS[name].elements
    weight, blocks = block_rows(name, rows, in_size, generator), ((name, rows),)
    x = torch.randn(tokens, in_size, generator=generator).to(dtype)
    kernel = native_kernel(isa, "linear")
    call = partial(kernel, weight=weight, blocks=blocks)
    with threads(2):
        together = call(x)
    max_few = most_in_rows(isa)
    least = max_few + 1 if max_few and tokens > max_few else 1
    chosen = data.draw(st.permutations(range(tokens)))[: data.draw(st.integers(least, tokens))]
    with threads(1):
        assert same_bits(call(x[chosen]), together[chosen])


@pytest.mark.parametrize("isa", INTEGER_SETS)
@few
@given(in_integers, some_tokens, counts, rows_of_weights, halves, st.data(), seeds)
def test_the_bits_of_a_row_in_integers_are_its_own_whatever_stands_beside_it(
    isa: str, name: str, tokens: int, count: int, rows: int, dtype: torch.dtype, data: st.DataObject, seed: int
) -> None:
    """Kernels decode the scales of several rows together."""
    generator, tokens = torch.Generator().manual_seed(seed), as_integers(isa, name, dtype, tokens)
    in_size = count * BLOCK_FORMATS[name].elements
    weight = block_rows(name, rows, in_size, generator)
    x = torch.randn(tokens, in_size, generator=generator).to(dtype)
    kernel = native_kernel(isa, "linear")
    chosen = data.draw(st.permutations(range(rows)))[: data.draw(st.integers(1, rows))]
    some = kernel(x, weight=weight[chosen], blocks=((name, len(chosen)),))
    assert same_bits(some, kernel(x, weight=weight, blocks=((name, rows),))[:, chosen])


@pytest.mark.parametrize("isa", PRODUCT_SETS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_token_that_is_not_finite_is_so_in_the_products_with_blocks(isa: str, bad: float) -> None:
    generator = torch.Generator().manual_seed(0)
    for name in ("Q4_0", "Q4_K", "Q8_0", "int4_g128"):
        weight, blocks = block_rows(name, 21, 512, generator), ((name, 21),)
        x = torch.zeros(3, 512, dtype=torch.bfloat16)
        x[1, 300] = bad
        out = checked_kernel(isa, "linear")(x, weight, None, None, None, None, torch.float32, None, None, blocks)
        assert not out[1].isfinite().any()
        assert not out[::2].any()


@pytest.mark.parametrize("isa", PRODUCT_SETS)
@few
@given(names, st.integers(1, 40), counts, rows_of_weights, dtypes, seeds)
def test_in_a_fixed_order_a_token_has_the_bits_that_it_has_alone(
    isa: str, name: str, tokens: int, count: int, rows: int, dtype: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    in_size = count * BLOCK_FORMATS[name].elements
    weight, blocks = block_rows(name, rows, in_size, generator), ((name, rows),)
    x = torch.randn(tokens, in_size, generator=generator).to(dtype)
    kernel = checked_kernel(isa, "linear", deterministic=True)
    together = kernel(x, weight, None, None, None, None, None, None, None, blocks)
    alone = [kernel(x[t : t + 1], weight, None, None, None, None, None, None, None, blocks) for t in range(tokens)]
    assert same_bits(together, torch.cat(alone))


@pytest.mark.parametrize("isa", PRODUCT_SETS)
@few
@given(
    names,
    st.integers(1, 40),
    counts,
    dtypes,
    st.sampled_from([torch.nan, torch.inf]),
    st.sets(st.integers(0, 39), min_size=1, max_size=4),
    st.booleans(),
    seeds,
)
def test_what_is_not_finite_stays_with_its_token(
    isa: str,
    name: str,
    tokens: int,
    count: int,
    dtype: torch.dtype,
    value: float,
    places: set[int],
    fixed_order: bool,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    in_size = count * BLOCK_FORMATS[name].elements
    weight, blocks = block_rows(name, 19, in_size, generator), ((name, 19),)
    x = torch.randn(tokens, in_size, generator=generator).to(dtype)
    residual = spaced(torch.randn(tokens, 19, generator=generator).to(dtype), 3)
    kernel = checked_kernel(isa, "linear", deterministic=fixed_order)
    clean = kernel(x, weight, None, residual, None, None, None, None, None, blocks)
    bad = sorted({place % tokens for place in places})
    others = [t for t in range(tokens) if t not in bad]
    x[bad, seed % in_size] = value
    out = kernel(x, weight, None, residual, None, None, None, None, None, blocks)
    assert same_bits(out[others], clean[others])
    assert not out[bad].isfinite().all(1).any()


@pytest.mark.parametrize("isa", SETS)
@few
@given(names, st.integers(0, 9), counts, st.sampled_from([1.0, 0.3]), dtypes, seeds)
def test_embeddings_in_blocks_are_the_rows_that_they_stand_for(
    isa: str, name: str, tokens: int, count: int, multiplier: float, dtype: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    hidden = count * BLOCK_FORMATS[name].elements * (3 if count == 3 else 1)
    blocks = ((name, 11),)
    weight = block_rows(name, 11, hidden, generator)
    ids = torch.randint(11, (tokens,), generator=generator)
    expected = expanded(weight, blocks, hidden)[ids] * multiplier
    for kernel in (pointwise.embedding, checked_kernel(isa, "embedding")):
        out = kernel(ids, weight, multiplier, None, None, dtype, blocks)
        assert out.dtype is dtype
        torch.testing.assert_close(out.double(), expected, rtol=2 * rounding(dtype), atol=1e-6)


def expert_stacks(of_up, of_down, count, size, inner, activation, generator):  # type: ignore[no-untyped-def]
    """Stacks in blocks with how they lie, and what they stand for, in float64."""
    wide = 2 * inner if activation == "swiglu" else inner
    up = torch.stack([block_rows(of_up, wide, size, generator) for _ in range(count)])
    down = torch.stack([block_rows(of_down, size, inner, generator) for _ in range(count)])
    blocks: tuple[Blocks, Blocks] = ((of_up, wide),), ((of_down, size),)
    exact = [
        torch.stack([expanded(each, of_one, in_size) for each in stack])
        for stack, of_one, in_size in ((up, blocks[0], size), (down, blocks[1], inner))
    ]
    return up, down, blocks, exact


def choices_among(experts: list[int], tokens: int, generator: torch.Generator) -> torch.Tensor:
    """Two different ones for each token."""
    ids = torch.rand(tokens, len(experts), generator=generator).argsort(dim=1)[:, :2]
    weights = torch.rand(tokens, 2, generator=generator) + 0.1
    return torch.stack((torch.tensor(experts)[ids].float(), weights), dim=1)


@pytest.mark.parametrize("isa", PRODUCT_SETS)
@pytest.mark.parametrize("deterministic", [False, True])
@fewer
@given(
    names,
    names,
    st.integers(1, 2),
    st.integers(1, 2),
    st.sampled_from([0, 1, 2, 5, 20, 70]),
    st.integers(2, 6),
    st.sampled_from(["swiglu", "relu2"]),
    st.booleans(),
    dtypes,
    seeds,
)
def test_experts_in_blocks_agree(
    isa: str,
    deterministic: bool,
    of_up: str,
    of_down: str,
    blocks_of_up: int,
    blocks_of_down: int,
    tokens: int,
    chosen: int,
    activation: str,
    adds: bool,
    dtype: torch.dtype,
    seed: int,
) -> None:
    """Both matrices of any format. What nobody chose is not read: all scales there are NaN."""
    generator = torch.Generator().manual_seed(seed)
    size, inner = blocks_of_up * BLOCK_FORMATS[of_up].elements, blocks_of_down * BLOCK_FORMATS[of_down].elements
    up, down, blocks, exact = expert_stacks(of_up, of_down, 7, size, inner, activation, generator)
    experts = torch.randperm(7, generator=generator)[:chosen].tolist()
    for stack in (up, down):
        stack[[i for i in range(7) if i not in experts]] = 0xFF
    x = spaced(torch.randn(tokens, size, generator=generator).to(dtype), 3)
    residual = spaced(torch.randn(tokens, size, generator=generator).to(dtype), 5) if adds else None
    choices = choices_among(experts, tokens, generator)
    wide = None if residual is None else residual.double()
    expected = matmul.moe(x.double(), choices, *exact, activation, wide)
    largest = expected.abs().amax(dim=1, keepdim=True) + 1
    for kernel in (matmul.moe, checked_kernel(isa, "moe", deterministic=deterministic)):
        out = kernel(x, choices, up, down, activation, residual, None, None, None, *blocks)
        assert out.dtype is dtype
        assert ((out.double() - expected).abs() <= 30 * rounding(dtype) * largest).all()


@pytest.mark.parametrize("isa", PRODUCT_SETS)
@fewer
@given(names, names, st.integers(1, 40), dtypes, seeds)
@pytest.mark.slow
def test_in_a_fixed_order_experts_give_a_token_the_bits_that_it_has_alone(
    isa: str, of_up: str, of_down: str, tokens: int, dtype: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    up, down, blocks, _ = expert_stacks(of_up, of_down, 3, 256, 256, "swiglu", generator)
    x, choices = torch.randn(tokens, 256, generator=generator).to(dtype), choices_among([0, 1, 2], tokens, generator)
    kernel = checked_kernel(isa, "moe", deterministic=True)
    how = (up, down, "swiglu", None, None, None, None, *blocks)
    alone = [kernel(x[t : t + 1], choices[t : t + 1], *how) for t in range(tokens)]
    assert same_bits(kernel(x, choices, *how), torch.cat(alone))


@pytest.mark.parametrize("isa", PRODUCT_SETS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@fewer
@given(names, names, st.integers(1, 2), seeds)
def test_a_token_that_is_not_finite_disturbs_no_other_among_experts(
    isa: str, bad: float, of_up: str, of_down: str, others: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    up, down, blocks, _ = expert_stacks(of_up, of_down, 3, 256, 256, "swiglu", generator)
    x = torch.randn(1 + others, 256, generator=generator).bfloat16()
    choices = choices_among([0, 1, 2], 1 + others, generator)
    kernel = checked_kernel(isa, "moe")
    how = (up, down, "swiglu", None, None, None, None, *blocks)
    expected = kernel(x, choices, *how)
    x[others, seed % 256] = bad
    out = kernel(x, choices, *how)
    assert same_bits(out[:others], expected[:others])
    assert not out[others].isfinite().any()


@pytest.mark.parametrize("isa", PRODUCT_SETS)
@pytest.mark.parametrize("name", ["Q4_0", "Q6_K", "fp8_g32"])
def test_more_tokens_choose_an_expert_than_are_multiplied_at_a_time(isa: str, name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    up, down, blocks, exact = expert_stacks(name, name, 2, 1024, 256, "relu2", generator)
    x, choices = torch.randn(700, 1024, generator=generator).bfloat16(), choices_among([0, 1], 700, generator)
    expected = matmul.moe(x.double(), choices, *exact, "relu2", None)
    out = checked_kernel(isa, "moe")(x, choices, up, down, "relu2", None, None, None, None, *blocks)
    largest = expected.abs().amax(dim=1, keepdim=True) + 1
    assert ((out.double() - expected).abs() <= 30 * rounding(x.dtype) * largest).all()


@pytest.mark.parametrize("isa", PRODUCT_SETS)
@pytest.mark.parametrize("name", sorted(BLOCK_FORMATS))
def test_products_read_nothing_behind_their_weights_and_tokens(isa: str, name: str) -> None:
    """Weights may lie at the end of a file that is mapped. Rows are whole groups of blocks, and are not."""
    generator = torch.Generator().manual_seed(0)
    kernel = checked_kernel(isa, "linear")
    for count, rows, tokens in ((1, 1, 1), (3, 37, 2), (8, 4, 3), (9, 64, 7), (16, 3, 1), (11, 70, 30)):
        in_size, blocks = count * BLOCK_FORMATS[name].elements, ((name, rows),)
        weight = guarded(block_rows(name, rows, in_size, generator))
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            x = guarded(torch.randn(tokens, in_size, generator=generator).to(dtype))
            out = kernel(x, weight, None, None, None, None, None, None, None, blocks)
            expected = x.double() @ expanded(weight, blocks, in_size).T
            largest = x.double().abs() @ expanded(weight, blocks, in_size).abs().T + 1
            assert ((out.double() - expected).abs() <= 4 * rounding(dtype) * (largest + expected.abs())).all()
