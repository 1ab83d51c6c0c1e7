"""Every row of the table of micro-kernels: where it is chosen, what it computes, and the memory that it takes."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Thread
from typing import Any

import pytest
import torch

from ostinato.ops import ukernels
from ostinato.ops.dispatch import load_extension
from ostinato.ops.quant.block_formats import BLOCK_FORMATS
from ostinato.ops.reference import matmul
from ostinato.ops.scratch import native_linear, native_moe
from ostinato.ops.sizes import MAX_PACKED_ALONE
from ostinato.ops.ukernels import ROWS_OF, Problem, Ukernel, Unit, select
from ostinato.plan.device.kernel_support import features
from tests.support.block_weights import block_rows, expanded
from tests.support.native_kernels import checked_kernel, rounding, spaced
from tests.support.native_sets import PRODUCT_SETS, native_kernel

pytest.importorskip("gguf", reason="the package that says what blocks stand for comes with the test extra")

TYPES = ("float32", "bfloat16", "float16")
LHS_TYPES = (*TYPES, "int8")
"""Those, and tokens that are quantised first, in the order of C++."""
UNITS: tuple[Unit, ...] = ("tokens", "mean per expert")
GROUP = 64


def rows_of_modules(op: str) -> list[Any]:
    """Each row of each built module; a module without rows of its own is skipped with it."""
    cases = []
    for of_isa in PRODUCT_SETS:
        isa = of_isa.values[0]
        rows = [row for row in ROWS_OF[op] if isa and row.runs_on(features(isa))]
        for number, row in enumerate(rows or ROWS_OF[op][:1]):
            cases.append(pytest.param(isa, row, id=f"{of_isa.id}-{number}-{row.name}", marks=of_isa.marks))
    return cases


def edges_of_m(row: Ukernel) -> list[int]:
    """Both ends of a row's range and their neighbours; one beyond a group of tokens where there is no last one."""
    ends = {row.min_m, row.max_m or 515}
    return sorted({m for end in ends for m in (end - 1, end, end + 1)})


def native_choice(isa: str, problem: Problem, *m: int) -> str:
    """The row that C++ chooses at m in each of UNITS; "" if there is none."""
    arguments = (problem.op, LHS_TYPES.index(problem.lhs), list(problem.rhs), problem.k, problem.fixed_order, m)
    return load_extension(isa).ukernel_name(*arguments)


def problems(op: str) -> Iterator[Problem]:
    kinds = [("same",), ("s8_row",), ("s8_group",), *((name,) for name in BLOCK_FORMATS)]
    if op == "moe":
        kinds = [(each, each) for (each,) in kinds] + [("Q4_K", "Q6_K"), ("Q6_K", "Q4_K"), ("fp8_g32", "Q4_0")]
    for rhs in kinds:
        for lhs in LHS_TYPES:
            for k in (31, 256, 511, 512):
                for fixed_order in (False, True):
                    yield Problem(op, lhs, rhs, k, fixed_order)


@pytest.mark.parametrize("isa", PRODUCT_SETS)
@pytest.mark.parametrize("op", ["linear", "moe"])
def test_python_and_cpp_choose_the_same_rows(isa: str, op: str) -> None:
    counts = sorted({m for row in ROWS_OF[op] for m in edges_of_m(row) if m > 0})
    for problem in problems(op):
        if not ukernels.candidates(problem, features(isa)):
            assert problem.lhs == "int8"
            assert not native_choice(isa, problem, 1, 1)
            continue
        for m in counts:
            for mean in (m, m // 4):
                at = dict(zip(UNITS, (m, mean), strict=True))
                chosen = select(problem, features(isa), at.__getitem__)
                assert native_choice(isa, problem, m, mean) == chosen.row.name
                assert chosen.row in ukernels.candidates(problem, features(isa))


def weights(kind: str, rows: int, k: int, dtype: torch.dtype, generator: torch.Generator) -> tuple[dict[str, Any], Any]:
    """Arguments of `linear` for weights of a kind, and these as float64."""
    if kind == "same":
        weight = (torch.randn(rows, k, generator=generator) / k**0.5).to(dtype)
        return {"weight": weight}, weight.double()
    if kind in BLOCK_FORMATS:
        weight, blocks = block_rows(kind, rows, k, generator), ((kind, rows),)
        return {"weight": weight, "blocks": blocks}, expanded(weight, blocks, k)
    group = GROUP if kind == "s8_group" else k
    weight = torch.randint(-128, 128, (rows, k), dtype=torch.int8, generator=generator)
    scale = (torch.rand(rows, -(-k // group), generator=generator) + 0.5) / (128 * k**0.5)
    wide = weight.double() * scale.double().repeat_interleave(group, 1)[:, :k]
    grouped = {"weight_scale": scale, "group_size": group} if kind == "s8_group" else {"weight_scale": scale.flatten()}
    return {"weight": weight, **grouped}, wide


def cases_of(row: Ukernel) -> Iterator[tuple[str, str, int]]:
    """A type of tokens, a kind of weights and inputs: each kind once, each type once, and tails where rows may end."""
    types = [name for name in TYPES if name in row.lhs or "int8" in row.lhs]
    for number, kind in enumerate(sorted(row.rhs)):
        unit = BLOCK_FORMATS[kind].elements if kind in BLOCK_FORMATS else row.k_multiple
        sizes = (unit, 5 * unit) if kind in BLOCK_FORMATS else (9 * unit, 333 * unit, 512 * unit)
        longest = min(row.max_k or 10**6, 10**6)
        for k in sizes:
            if row.min_k <= k <= longest:
                yield types[(number + k) % len(types)], kind, k
    yield from ((name, sorted(row.rhs)[0], max(256, row.min_k)) for name in types)


def as_multiplied(row: Ukernel, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, bool]]:
    """float64 tokens as a row multiplies them, rounded if it quantises them; and the argument that asks for that."""
    if "int8" not in row.lhs:
        return x.double(), {}
    integers, scale = matmul.quantize_tokens(x)
    return integers.double() * scale.double()[:, None], {"int8_activations": True}


@pytest.mark.parametrize(("isa", "row"), rows_of_modules("linear"))
def test_each_row_of_linear_computes_its_products(isa: str, row: Ukernel) -> None:
    """From one token that lies apart from others, and outputs that fill no vector, at both ends of the row's range."""
    reached = set()
    generator = torch.Generator().manual_seed(1)
    for number, (lhs, kind, k) in enumerate(cases_of(row)):
        dtype, out_size = getattr(torch, lhs), (1, 17, 67)[number % 3]
        arguments, wide = weights(kind, out_size, k, dtype, generator)
        for fixed_order in {False, row.fixed_order}:
            problem = Problem("linear", lhs if lhs in row.lhs else "int8", (kind,), k, fixed_order)
            kernel = (checked_kernel if number == 0 else native_kernel)(isa, "linear", deterministic=fixed_order)
            for m in edges_of_m(row):
                x = spaced(torch.randn(m, k, generator=generator).to(dtype), 3)
                multiplied, how = as_multiplied(row, x)
                out = kernel(x, **arguments, **how)
                largest = multiplied.abs() @ wide.abs().T + 1
                assert out.shape == (m, out_size)
                assert ((out.double() - multiplied @ wide.T).abs() <= 4 * rounding(dtype) * largest).all(), (kind, m)
                if m:
                    reached.add(select(problem, features(isa), lambda _, m=m: m).row)
    assert row in reached, "no product takes this row"


def run_alone(
    isa: str, kernel: Any, x: torch.Tensor, *args: Any, few: int = 0, num_threads: int = 1, **kwargs: Any
) -> tuple[torch.Tensor, int]:
    """The result of a call in a new thread, and the bytes of scratch memory that this thread has made for it.

    And for a call with a `few` of the tokens before it.
    """
    results = []

    def run() -> None:
        torch.set_num_threads(num_threads)
        load_extension(isa).free_idle_scratch()
        if few:
            kernel(x[:few], *args, **kwargs)
        results.append((kernel(x, *args, **kwargs), load_extension(isa).scratch_bytes()))

    thread = Thread(target=run)
    thread.start()
    thread.join()
    return results[0]


@pytest.mark.parametrize(("isa", "row"), rows_of_modules("linear"))
def test_each_row_of_linear_takes_the_scratch_that_the_plan_counts(isa: str, row: Ukernel) -> None:
    """Never more, and for the greediest type of tokens not much less; a few are packed by each thread for itself."""
    generator = torch.Generator().manual_seed(2)
    for kind in {min(row.rhs), max(row.rhs)}:
        k = 256 if row.max_k and row.max_k < 1024 else 1024
        for m in {row.min_m, row.max_m or 700}:
            greediest, types = 0, set()
            for lhs in row.lhs:
                problem = Problem("linear", lhs, (kind,), k, row.fixed_order)
                if select(problem, features(isa), lambda _, m=m: m).row == row:
                    types.add(lhs)
                    dtype = getattr(torch, "bfloat16" if lhs == "int8" else lhs)
                    arguments, _ = weights(kind, 70, k, dtype, generator)
                    x = torch.randn(m, k, generator=generator).to(dtype)
                    arguments |= as_multiplied(row, x)[1]
                    x[-1, 0] = torch.nan if row.fallback else 0
                    kernel = native_kernel(isa, "linear", deterministic=row.fixed_order)
                    few = min(m, MAX_PACKED_ALONE // k)
                    of_call = run_alone(isa, kernel, x, few=few if row.takes(few) else 0, num_threads=2, **arguments)
                    greediest = max(greediest, of_call[1])
            planned = sum(native_linear(tokens=m, in_size=k, in_order=False, linear_rows=[row], group_size=GROUP))
            assert greediest <= planned, (kind, m)
            # Alone, float32 may be multiplied in place, while the row counts copies of the other types.
            assert types <= {"float32"} or planned <= 4 * greediest + 2**16, (kind, m)


def choices_with(tokens: int, experts: int, most: int) -> torch.Tensor:
    """One choice of each token: `most` choose expert 0, the others as evenly as can be. [tokens, 2, 1]"""
    ids = torch.arange(tokens) % (experts - 1) + 1
    ids[:most] = 0
    return torch.stack((ids.float(), torch.full(ids.shape, 0.5)), dim=1)[:, :, None]


EXPERT_ROWS = [case for op in ("linear", "moe") for case in rows_of_modules(op) if case.values[1].lhs != ukernels.S8]


@pytest.mark.slow
@pytest.mark.parametrize(("isa", "row"), [case for case in EXPERT_ROWS if case.values[1].driver != "MOE_BY_EXPERT"])
def test_each_row_computes_experts_within_the_scratch_that_the_plan_counts(isa: str, row: Ukernel) -> None:
    """A row of `linear` for one crowded expert, others being chosen by one token or none; or a row of whole layers."""
    reached = set()
    generator = torch.Generator().manual_seed(3)
    long = [(lhs, sorted(row.rhs)[-1], 512) for lhs in sorted(row.lhs)]
    for lhs, kind, k in [*cases_of(row), *(long if row.max_k is None else [])]:
        if kind == "s8_group" or k > 512 or (kind in BLOCK_FORMATS and k not in (BLOCK_FORMATS[kind].elements, 512)):
            continue
        dtype = getattr(torch, lhs)
        kernel = native_kernel(isa, "moe", deterministic=row.fixed_order)
        counts = sorted({min(m, 80) for m in edges_of_m(row)})
        experts = 3 if row.op == "moe" else counts[-1] // 16 + 2  # on average fewer tokens than matrix units take
        parts = [[weights(kind, k, k, dtype, generator) for _ in range(experts)] for _ in range(2)]
        stacks = [torch.stack([arguments["weight"] for arguments, _ in part]) for part in parts]
        wide = [torch.stack([each for _, each in part]) for part in parts]
        given: dict[str, Any] = {}
        if kind == "s8_row":
            up, down = (torch.stack([arguments["weight_scale"] for arguments, _ in part]) for part in parts)
            given = {"up_scale": up, "down_scale": down}
        elif kind in BLOCK_FORMATS:
            given = {"up_blocks": ((kind, k),), "down_blocks": ((kind, k),)}
        for m in counts:
            tokens = m * experts if row.op == "moe" else m and m + 1
            choices = choices_with(tokens, experts, 0 if row.op == "moe" else m)
            x = spaced(torch.randn(tokens, k, generator=generator).to(dtype), 3)
            if row.fallback and tokens:
                x[0, 0] = torch.nan
            out, held = run_alone(isa, kernel, x, choices, *stacks, "silu", **given)
            expected = matmul.moe(x.double(), choices, *wide, "silu")
            tolerance = rounding(dtype)
            torch.testing.assert_close(out.double(), expected, rtol=6 * tolerance, atol=16 * tolerance, equal_nan=True)
            if tokens == 0:
                continue
            problem = Problem("moe", lhs, (kind, kind), k, row.fixed_order)
            at = dict(zip(UNITS, (tokens, tokens // experts), strict=True))
            layer = select(problem, features(isa), at.__getitem__).row
            of_expert = Problem("linear", lhs, (kind,), k, row.fixed_order)
            if layer.driver == "MOE_BY_EXPERT":
                reached.add(select(of_expert, features(isa), lambda _, m=m: m).row)
            reached.add(layer)
            planned = native_moe(
                tokens=tokens,
                size=k,
                intermediate_size=k,
                num_experts=experts,
                top_k=1,
                moe_rows=[layer],
                linear_rows=ukernels.candidates(of_expert, features(isa)),
                group_size=0,
            )
            assert held <= planned.shared + planned.own, (kind, m)
    assert row in reached, "no layer takes this row"


@pytest.mark.parametrize("isa", PRODUCT_SETS)
def test_gated_experts_of_two_threads_keep_within_the_scratch_that_the_plan_counts(isa: str) -> None:
    """Each token has two experts, whose intermediate values are more than its own; an expert has few tokens or many."""
    generator = torch.Generator().manual_seed(4)
    size, inner, experts, top_k = 64, 96, 4, 2
    up, down = (torch.randn(experts, *shape, generator=generator) / 8 for shape in ((2 * inner, size), (size, inner)))
    up, down = up.bfloat16(), down.bfloat16()
    for tokens in (1, 7, 40):
        ids = (torch.arange(tokens)[:, None] + torch.arange(top_k)) % experts
        choices = torch.stack((ids.float(), torch.full(ids.shape, 0.5)), dim=1)
        x = torch.randn(tokens, size, generator=generator).bfloat16()
        out, held = run_alone(isa, native_kernel(isa, "moe"), x, choices, up, down, "swiglu", num_threads=2)
        expected = matmul.moe(x.double(), choices, up.double(), down.double(), "swiglu")
        tolerance = rounding(torch.bfloat16)
        torch.testing.assert_close(out.double(), expected, rtol=6 * tolerance, atol=16 * tolerance)
        layers = ukernels.candidates(Problem("moe", "bfloat16", ("same", "same"), size, False), features(isa))
        rows = ukernels.candidates(Problem("linear", "bfloat16", ("same",), size, False), features(isa))
        planned = native_moe(
            tokens=tokens,
            size=size,
            intermediate_size=inner,
            num_experts=experts,
            top_k=top_k,
            moe_rows=layers,
            linear_rows=rows,
            group_size=0,
        )
        assert held <= planned.shared + planned.own, tokens  # the other thread makes its own
