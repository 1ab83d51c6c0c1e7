"""Table of the native micro-kernels: which types, instructions and sizes each takes, and the choice among them.

Plain data without torch. The build writes the rows of `linear` and `moe` for C++ (`cmake/write_constants.py`), where
`native/gemm/select.h` chooses by the same rules. Rows are tried in their order: the first that accepts a product and
takes its m computes it.

Rows of `attention`, `indexed_attention` and `ssd_scan` describe what their kernels do. C++ reads their constants, and
does not choose by them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from ostinato.ops.quant.block_formats import BLOCK_FORMATS, formats_of
from ostinato.ops.sizes import I16_BLOCK_NR_AVX2, INT8_MAX_K

Op = Literal["linear", "moe", "attention", "indexed_attention", "ssd_scan"]

Unit = Literal["tokens", "mean per expert", "queries per key head", "query rows"]
"""Unit of a row's m: tokens of the product, tokens of an expert (the mean), or queries."""

MIN_ROUNDED_TOKENS, MIN_ROUNDED_TOKENS_6_BITS = 3, 5
"""Smallest m for which rounding weights in blocks to bfloat16 costs less than scaling sums, also among experts."""

MIN_AMX_QUERIES = 5
"""Smallest number of a row's queries per key head for which bfloat16 attention runs on matrix units."""

SMALL_Q_ROWS_AVX512, SMALL_Q_ROWS_OTHERS = 12, 4
"""Largest number of query rows whose keys are read in place, with vectors of 512 bits and with shorter ones."""

BF16, F16, F32 = (frozenset({name}) for name in ("bfloat16", "float16", "float32"))
HALVES = BF16 | F16
ALL_TYPES = HALVES | F32
S8 = frozenset({"int8"})
"""Tokens of any type that are quantised to int8, each with a scale of its own."""
PLAIN = frozenset({"same"})
"""Weights in the type of the tokens."""
INT8 = frozenset({"s8_row", "s8_group"})
"""8-bit weights with a scale per row, or per group of a row."""
BLOCKS = frozenset(BLOCK_FORMATS)
INTEGER_BLOCKS = BLOCKS - frozenset((*formats_of("float8"), *formats_of("mxfp4")))
SIX_BITS = frozenset({"Q6_K"})
LOSES_ON_ZEN_4 = frozenset({"Q5_0", "IQ4_NL"})
"""Blocks whose integers are not faster than bfloat16 there, with few tokens."""
ALL_WEIGHTS = PLAIN | INT8 | BLOCKS


class Modules(NamedTuple):
    """Modules that have a row, by their features (`plan/device/isa_table.py`): those needed, and those not allowed."""

    needs: frozenset[str] = frozenset()
    without: frozenset[str] = frozenset()


AVX2, AVX512, AVX512_BF16, AMX = (frozenset({name}) for name in ("avx2", "avx512", "avx512_bf16", "amx"))
VNNI, DOTPROD, I8MM, NEON_BF16 = (frozenset({name}) for name in ("avx512_vnni", "dotprod", "i8mm", "neon_bf16"))

# `WITH_X`: all modules with the feature. `X_ONLY`: those without the next better one, whose kernels take their place.
EVERYWHERE, NO_AVX2 = Modules(), Modules(without=AVX2)
AVX2_ONLY, AVX512_ONLY = Modules(AVX2, without=AVX512), Modules(AVX512, without=AVX512_BF16)
VNNI_ONLY = Modules(VNNI, without=AVX512_BF16)
WITH_AVX512_BF16, AVX512_BF16_ONLY, WITH_AMX = Modules(AVX512_BF16), Modules(AVX512_BF16, without=AMX), Modules(AMX)
DOTPROD_ONLY, WITH_I8MM, WITH_NEON_BF16 = Modules(DOTPROD, without=I8MM), Modules(I8MM), Modules(NEON_BF16)


@dataclass(frozen=True)
class Ukernel:
    """One row: a driver with the types, instructions and sizes that it is used for."""

    name: str
    """Driver, type of the tokens as they are multiplied, weights, and instruction set.

    Rows of one kernel that differ in types, modules or sizes share its name.
    """
    op: Op
    driver: str
    """Name of its function in `native/gemm/table_*.cpp`, or file of a kernel that does not choose by the table."""
    lhs: frozenset[str]
    """Types of tokens in memory; int8 if they are quantised first."""
    rhs: frozenset[str]
    """Kinds of weights: `same`, `s8_row`, `s8_group`, or names of block formats."""
    modules: Modules
    min_m: int = 1
    max_m: int | None = None
    unit: Unit = "tokens"
    min_k: int = 0
    max_k: int | None = None
    k_multiple: int = 1
    fixed_order: bool = False
    """True if a token's bits do not depend on m, or, for experts, if those of the rows that it takes do not.

    `deterministic` may use such rows.
    """
    fallback: str | None = None
    """Row that computes tokens with NaN or infinity, which integers cannot hold."""
    why: str = ""
    """Measurement behind the range, or what is not measured."""

    def runs_on(self, features: Collection[str]) -> bool:
        """Return whether a module with these features has the row. Emulated matrix units count as matrix units."""
        present = {*features, *(("amx",) if "emulated_amx" in features else ())}
        return self.modules.needs <= present and not self.modules.without & present

    def takes(self, m: int) -> bool:
        return self.min_m <= m and (self.max_m is None or m <= self.max_m)

    @property
    def m_range(self) -> str:
        """The range of m in words."""
        if self.max_m is None:
            return f"{self.min_m} or more"
        return f"{self.min_m} to {self.max_m}" if self.max_m > self.min_m else str(self.min_m)


@dataclass(frozen=True)
class Problem:
    """A product before its m is known: types of tokens and of each matrix (a `moe` has two), and inputs of a row."""

    op: Op
    lhs: str
    rhs: tuple[str, ...]
    k: int = 256
    fixed_order: bool = False


@dataclass(frozen=True)
class Choice:
    """Row that computes a product at some m, and why each row before it does not."""

    row: Ukernel
    declined: tuple[tuple[Ukernel, str], ...]


_NOT_MEASURED = "no measurement"


def _by_type(name: str, op: Op, driver: str, rhs: frozenset[str], **others: Any) -> Iterator[Ukernel]:
    """Yield a row of products in float32 with vectors of 512 bits: with bfloat16 instructions others take bfloat16."""
    yield Ukernel(name, op, driver, ALL_TYPES, rhs, AVX512_ONLY, **others)
    yield Ukernel(name, op, driver, F32 | F16, rhs, WITH_AVX512_BF16, **others)


_LARGE_M_WHY = "fewer tokens: packing weights costs as much as the sums across vectors that it saves"

ROWS: tuple[Ukernel, ...] = (
    # linear, with matrix units
    Ukernel(
        "gemm_bf16_any_amx", "linear", "LARGE_M_AMX", BF16, ALL_WEIGHTS, WITH_AMX, min_m=6,
        why="Xeon with AMX, 4096 x 4096, GFLOP/s on vectors and tiles: 144 and 110 with 3 tokens, 182 and 184 with 5, "
        "195 and 221 with 6, 165 and 307 with 8; 8-bit weights in groups of 128 are even at 4, and share the minimum",
    ),
    # linear, with tokens in 8-bit integers: sums are exact, so m does not change a token's bits
    Ukernel(
        "gemm_s8_s8_amx", "linear", "INT8_AMX", S8, frozenset({"s8_row"}), WITH_AMX, max_k=INT8_MAX_K,
        fixed_order=True,
        why="Xeon with AMX, a busy machine, one thread, 4096 x 1024, time of tokens in bfloat16 over that in int8, on "
        "vectors and tiles: 1.1 to 1.3 and 1.2 to 1.3 with one token, 1.4 to 1.5 and 1.6 to 1.8 with 8, 0.9 and 1.7 to "
        "2.0 with 32; so tiles take any number",
    ),
    Ukernel(
        "gemm_s8_s8_vnni", "linear", "INT8_VNNI", S8, frozenset({"s8_row"}), Modules(VNNI, AMX), max_k=INT8_MAX_K,
        fixed_order=True, why="the only row of such tokens without matrix units",
    ),
    # linear, in 16-bit integers
    Ukernel(
        "gemv_i16_s8_avx2", "linear", "GEMV_I16", HALVES, frozenset({"s8_row"}), AVX2_ONLY, min_m=2, max_m=8,
        fallback="gemv_f32_any_avx2",
        why="Zen 3, GFLOP/s in rows and in panels: 70 and 51 with 4 tokens, 68 and 66 with 8, 69 and 74 with 12. Speed "
        "over float32, weights in memory: Zen 3 0.90 with one token and 1.33 with two; a Xeon in this module 0.94 to "
        "0.97, 0.90 to 0.94, and 1.4 with 4",
    ),
    Ukernel(
        "gemv_i16_block_avx2", "linear", "GEMV_I16", HALVES, INTEGER_BLOCKS, AVX2_ONLY, max_m=I16_BLOCK_NR_AVX2,
        fallback="gemv_f32_any_avx2",
        why="Zen 3, GFLOP/s in rows and in panels with 4 tokens: Q4_0 43 and 49, Q6_K 32 and 37. Two tokens of Q4_0 "
        "over float32: 1.00; a Xeon in this module, weights in memory, 1.3 to 1.4",
    ),
    Ukernel(
        "gemm_i16_s8_avx2", "linear", "LARGE_M_I16_AVX2", HALVES, frozenset({"s8_row"}), AVX2_ONLY, min_m=9,
        fallback="gemm_f32_any_avx2", why="as gemv_i16_s8_avx2",
    ),
    Ukernel(
        "gemm_i16_block_avx2", "linear", "LARGE_M_I16_AVX2", HALVES, INTEGER_BLOCKS, AVX2_ONLY, min_m=4,
        fallback="gemm_f32_block_avx2", why="as gemv_i16_block_avx2; with 12 tokens Q4_0 42 and 72, Q6_K 32 and 56",
    ),
    Ukernel(
        "gemm_i16_s8_vnni", "linear", "LARGE_M_I16_VNNI", HALVES, frozenset({"s8_row"}), VNNI_ONLY, min_m=8,
        fallback="gemv_f32_any_avx512",
        why="Xeon without AMX, one thread, 1024 x 1024, GFLOP/s of rows, panels of floats and these: 103, - and 108 "
        "with 8 tokens, 149, - and 186 with 16, 106, 81 and 160 with 32, 111 and 207 with 512 in panels; weights in "
        "memory, rows and these: 109 and 129 with 8, 95 and 139 with 12",
    ),
    Ukernel(
        "gemm_i16_block_vnni", "linear", "LARGE_M_I16_VNNI", HALVES, INTEGER_BLOCKS, VNNI_ONLY, min_m=9,
        fallback="gemv_f32_any_avx512",
        why="Xeon without AMX, one thread, 1024 x 1024, speed over rows in integers: Q4_K 1.2 with 8 tokens and 1.5 "
        "with 12, Q6_K 1.1 and 1.4, Q8_0 1.2 and 1.6, weights in memory Q6_K 0.9 with 8 and 1.2 with 10; over panels "
        "of floats with 32 and 512 tokens: Q4_K 2.3 and 1.6, Q5_K 2.2 and 1.5, Q6_K 2.0 and 1.4, Q8_0 1.9 and 1.6, "
        "Q4_0 2.2 and 1.7. 32 inputs of a vector of rows take 20 instructions, in float32 32",
    ),
    Ukernel(
        "gemv_i16_block_avx512", "linear", "GEMV_I16", HALVES, INTEGER_BLOCKS, AVX512_ONLY, max_m=8,
        fallback="gemv_f32_any_avx512",
        why="Zen 4 without its bfloat16, cycles for 32 weights in float32 and i16: Q4_K 11.7 and 4.4 with one token, "
        "37 and 23 with 8; Q5_0 13 and 6, 30 and 27, but 36 and 40 with 12",
    ),
    Ukernel(
        "gemv_i16_block_vnni", "linear", "GEMV_I16", F16, INTEGER_BLOCKS, WITH_AVX512_BF16, max_m=8,
        fallback="gemv_f32_any_avx512", why="as gemv_i16_block_avx512",
    ),
    Ukernel(
        "gemv_i16_block_vnni", "linear", "GEMV_I16", BF16, SIX_BITS, WITH_AVX512_BF16,
        max_m=MIN_ROUNDED_TOKENS_6_BITS - 1, fallback="gemv_bf16_any_avx512bf16",
        why="Zen 4: one token 2.25 ns in bfloat16 and 1.70, two 2.65 and 2.39",
    ),
    Ukernel(
        "gemv_i16_block_vnni", "linear", "GEMV_I16", BF16, INTEGER_BLOCKS - SIX_BITS - LOSES_ON_ZEN_4,
        WITH_AVX512_BF16, max_m=MIN_ROUNDED_TOKENS - 1, fallback="gemv_bf16_any_avx512bf16",
        why="Zen 4, one token, ns for 32 weights in bfloat16 and i16: Q4_0 1.41 and 1.38, Q4_K 1.79 and 1.43, Q8_0 "
        "1.93 and 1.52",
    ),
    Ukernel(
        "gemv_i16_block_vnni", "linear", "GEMV_I16", BF16, LOSES_ON_ZEN_4, Modules(AMX | AVX512_BF16),
        max_m=MIN_ROUNDED_TOKENS - 1, fallback="gemv_bf16_any_avx512bf16",
        why="speed over bfloat16 with one and two tokens: a Xeon in x86_64_v4_bf16 1.2 and 1.3 (Q5_0), 1.3 and 1.5 "
        "(IQ4_NL); Zen 4, which has no matrix units, 0.96 and 0.94, 0.90 and 1.0",
    ),
    Ukernel(
        "gemv_i16_s8_vnni", "linear", "GEMV_I16", HALVES, frozenset({"s8_row"}), VNNI_ONLY, max_m=7,
        fallback="gemv_f32_any_avx512",
        why="Xeon without AMX, one thread, 4096 inputs, speed over float32 with 1, 2, 4 and 8 tokens: weights in "
        "memory 1.1, 1.1, 1.5 and 1.5, in the cache 1.9, 1.8, 1.5 and 1.5; more tokens: as gemm_i16_s8_vnni",
    ),
    Ukernel(
        "gemv_i16_any_sdot", "linear", "GEMV_I16", HALVES, INTEGER_BLOCKS | {"s8_row"}, DOTPROD_ONLY, max_m=8,
        fallback="gemv_f32_any_generic", why=_NOT_MEASURED,
    ),
    Ukernel(
        "gemv_i16_block_smmla", "linear", "GEMV_I16", HALVES, INTEGER_BLOCKS, WITH_I8MM, max_m=8,
        fallback="gemv_f32_any_generic", why=_NOT_MEASURED,
    ),
    *(
        Ukernel(
            "gemv_i16_s8_smmla", "linear", "GEMV_I16", lhs, frozenset({"s8_row"}), WITH_I8MM, max_m=8,
            fallback=fallback, why=_NOT_MEASURED,
        )
        for lhs, fallback in ((BF16, "gemv_bf16_any_bfdot"), (F16, "gemv_f32_any_generic"))
    ),
    # linear, weights made bfloat16
    Ukernel(
        "gemm_bf16_any_avx512bf16", "linear", "LARGE_M", BF16, PLAIN | {"s8_row"} | BLOCKS, AVX512_BF16_ONLY, min_m=32,
        max_k=511,
        why="short rows have more sums across vectors. Xeon without AMX, a busy machine, one thread, time of the next "
        "rows over that in panels with 24, 32, 48 and 64 tokens: bfloat16 with 256 inputs 1.04, 1.06, 1.23, 1.23, with "
        "512 0.94, 0.97, 0.98, 0.93; Q4_K 1.08, 1.10, 1.13, 1.22, and 0.93, 0.98, 1.05, 1.03",
    ),
    Ukernel(
        "gemm_bf16_dequant_avx512bf16", "linear", "MID_M_DEQUANT_BF16", BF16, frozenset({"s8_row"}) | BLOCKS,
        AVX512_BF16_ONLY, min_m=6, max_m=71, min_k=32, k_multiple=32,
        why="Zen 4, ns for 32 weights, converted for each block of tokens and once: int8 2.0 and 2.3 with 3 tokens, "
        "2.9 and 2.6 with 6, 12.6 and 10.7 with 32; Q4_K 2.4 and 2.4, 3.1 and 3.0, 14 and 11.2",
    ),
    # linear, blocked
    Ukernel(
        "gemm_f32_any_avx2", "linear", "LARGE_M_AVX2", ALL_TYPES, PLAIN | INT8, AVX2_ONLY, min_m=8, max_k=511,
        why="short rows have more sums across vectors",
    ),
    Ukernel(
        "gemm_f32_any_avx2", "linear", "LARGE_M_AVX2", ALL_TYPES, PLAIN | INT8, AVX2_ONLY, min_m=10, why=_LARGE_M_WHY
    ),
    Ukernel(
        "gemm_f32_block_avx2", "linear", "LARGE_M_AVX2", ALL_TYPES, BLOCKS, AVX2_ONLY, min_m=3,
        why="blocks are dequantized once, and once per two tokens elsewhere",
    ),
    *_by_type("gemm_f32_plain_avx512", "linear", "LARGE_M", PLAIN, min_m=48, why=_LARGE_M_WHY),
    *_by_type("gemm_f32_s8_avx512", "linear", "LARGE_M", INT8, min_m=24, why=f"{_LARGE_M_WHY}; int8 converts once"),
    *_by_type("gemm_f32_block_avx512", "linear", "LARGE_M", BLOCKS, min_m=20, why=_LARGE_M_WHY),
    Ukernel(
        "gemm_bf16_plain_avx512bf16", "linear", "LARGE_M", BF16, PLAIN, AVX512_BF16_ONLY, min_m=72,
        why="higher than in float32, as pairs are multiplied in less time",
    ),
    Ukernel(
        "gemm_bf16_s8_avx512bf16", "linear", "LARGE_M", BF16, INT8, AVX512_BF16_ONLY, min_m=24, why="converts once"
    ),
    Ukernel(
        "gemm_bf16_block_avx512bf16", "linear", "LARGE_M", BF16, BLOCKS, AVX512_BF16_ONLY, min_m=72,
        why="as gemm_bf16_plain_avx512bf16",
    ),
    Ukernel(
        "gemm_bf16_any_bfmmla", "linear", "LARGE_M", BF16, ALL_WEIGHTS, WITH_NEON_BF16, min_m=20, why=_NOT_MEASURED
    ),
    Ukernel("gemm_f32_plain_generic", "linear", "LARGE_M", ALL_TYPES, PLAIN, NO_AVX2, min_m=48, why=_NOT_MEASURED),
    Ukernel("gemm_f32_s8_generic", "linear", "LARGE_M", ALL_TYPES, INT8, NO_AVX2, min_m=24, why=_NOT_MEASURED),
    Ukernel("gemm_f32_block_generic", "linear", "LARGE_M", ALL_TYPES, BLOCKS, NO_AVX2, min_m=20, why=_NOT_MEASURED),
    # linear, rows of weights in streams
    Ukernel(
        "gemv_bf16_rounded_avx512bf16", "linear", "SMALL_M_ROUNDED", BF16, SIX_BITS, WITH_AVX512_BF16,
        min_m=MIN_ROUNDED_TOKENS_6_BITS, max_m=5, why="fewer tokens: scaling sums costs less than rounding weights",
    ),
    Ukernel(
        "gemv_bf16_rounded_avx512bf16", "linear", "SMALL_M_ROUNDED", BF16, BLOCKS - SIX_BITS, WITH_AVX512_BF16,
        min_m=MIN_ROUNDED_TOKENS, max_m=5, why="fewer tokens: scaling sums costs less than rounding weights",
    ),
    *_by_type(
        "gemv_f32_dequant_avx512", "linear", "SMALL_M_DEQUANT", BLOCKS, min_m=7,
        why="rows are dequantized once for several blocks of 6 tokens",
    ),
    Ukernel(
        "gemv_f32_dequant_generic", "linear", "SMALL_M_DEQUANT", ALL_TYPES, BLOCKS, NO_AVX2, min_m=3,
        why=_NOT_MEASURED,
    ),
    Ukernel("gemv_f32_any_avx2", "linear", "SMALL_M", ALL_TYPES, ALL_WEIGHTS, AVX2_ONLY, fixed_order=True),
    *_by_type("gemv_f32_any_avx512", "linear", "SMALL_M", ALL_WEIGHTS, fixed_order=True),
    Ukernel("gemv_bf16_any_avx512bf16", "linear", "SMALL_M", BF16, ALL_WEIGHTS, WITH_AVX512_BF16, fixed_order=True),
    Ukernel("gemv_bf16_any_bfdot", "linear", "SMALL_M", BF16, PLAIN | INT8, WITH_NEON_BF16, fixed_order=True),
    Ukernel("gemv_f32_any_generic", "linear", "SMALL_M", ALL_TYPES, ALL_WEIGHTS, NO_AVX2, fixed_order=True),
    # moe: both matrices must be accepted
    Ukernel(
        "moe_bf16_any_amx", "moe", "MOE_AMX", BF16, ALL_WEIGHTS, WITH_AMX, min_m=16, unit="mean per expert",
        why="an expert's tokens fill tiles of their own; this bounds the number of tiles that stay half empty",
    ),
    Ukernel(
        "moe_by_expert", "moe", "MOE_BY_EXPERT", ALL_TYPES, ALL_WEIGHTS, EVERYWHERE, fixed_order=True,
        why="the two matrices of an expert take rows of linear, by the tokens that chose it. Xeon without AMX, one "
        "thread, 32 experts of 1024 x 256 and 512 tokens, their rate over that of linear, with rows of their own and "
        "so: bfloat16 1.0 and 1.0, int8 1.0 and 1.0, Q4_K 0.8 and 1.0, MXFP4 0.8 and 1.0; with AVX2 alone 0.7 and 1.0, "
        "0.5 and 0.9, 0.6 and 0.9, 0.4 and 0.9",
    ),
    # attention: weights are keys and values, in the type of the queries or in 8 bits
    Ukernel(
        "attention_bf16_amx", "attention", "attention_amx.h", BF16, PLAIN | {"s8_row"}, Modules(AMX | AVX512_BF16),
        min_m=MIN_AMX_QUERIES, unit="queries per key head",
        why="Xeon with AMX, 8 rows of 128 tokens, 8 key heads of 128, ms on vectors and tiles: 3.6 and 5.0 with 2 "
        "queries, 5.2 and 5.2 with 4, 6.9 and 5.2 with 6, 8.9 and 5.6 with 8",
    ),
    Ukernel(
        "attention_f32_in_place_avx512", "attention", "small_q.h", ALL_TYPES, PLAIN | {"s8_row"}, Modules(AVX512),
        max_m=SMALL_Q_ROWS_AVX512, unit="query rows", fixed_order=True, why="bounded by registers",
    ),
    Ukernel(
        "attention_f32_in_place", "attention", "small_q.h", ALL_TYPES, PLAIN | {"s8_row"}, Modules(without=AVX512),
        max_m=SMALL_Q_ROWS_OTHERS, unit="query rows", fixed_order=True, why="bounded by registers",
    ),
    Ukernel(
        "attention_f32_packed", "attention", "packed.h", ALL_TYPES, PLAIN | {"s8_row"}, EVERYWHERE, unit="query rows",
        fixed_order=True,
    ),
    Ukernel(
        "indexed_attention_f32_in_place", "indexed_attention", "indexed_attention.cpp", ALL_TYPES, PLAIN | {"s8_row"},
        EVERYWHERE, fixed_order=True, why="a token's queries of a key head read its own keys; scores are in float32",
    ),
    # ssd_scan
    Ukernel("ssd_scan_bf16_amx", "ssd_scan", "ssd_chunk_scan_amx.h", BF16, PLAIN, WITH_AMX),
    Ukernel("ssd_scan_f32_chunks", "ssd_scan", "ssd_chunk_scan.h", ALL_TYPES, PLAIN, EVERYWHERE),
    Ukernel("ssd_scan_f32_recurrent", "ssd_scan", "ssd_recurrence.h", ALL_TYPES, PLAIN, EVERYWHERE, fixed_order=True),
)  # fmt: skip


ROWS_OF: dict[str, tuple[Ukernel, ...]] = {
    op: tuple(row for row in ROWS if row.op == op) for op in dict.fromkeys(row.op for row in ROWS)
}
"""Rows by operation, in their order."""


def why_not(row: Ukernel, problem: Problem, features: Collection[str]) -> str | None:
    """Return why a row cannot compute a problem at any m in a module with `features`; None if it can."""
    if not row.runs_on(features):
        lacking = sorted(row.modules.needs - {*features})
        return f"this CPU's kernels lack {', '.join(lacking)}" if lacking else "this CPU's kernels have better ones"
    if problem.fixed_order and not row.fixed_order:
        return "its order of sums depends on m"
    if problem.lhs not in row.lhs:
        return f"tokens are {problem.lhs}"
    other = next((kind for kind in problem.rhs if kind not in row.rhs), None)
    if other is not None:
        return f"weights are {KIND_TEXT.get(other, other)}"
    if problem.k < row.min_k or (row.max_k is not None and problem.k > row.max_k):
        return f"rows have {problem.k} inputs"
    if problem.k % row.k_multiple:
        return f"{problem.k} inputs are no multiple of {row.k_multiple}"
    return None


KIND_TEXT = {
    "same": "in the type of the tokens",
    "s8_row": "int8 with a scale per row",
    "s8_group": "int8 with a scale per group",
}
"""Kinds of weights that are no block formats, in words."""


def candidates(problem: Problem, features: Collection[str]) -> tuple[Ukernel, ...]:
    """Return the rows that compute a problem for some m, in their order."""
    found: list[Ukernel] = []
    for row in ROWS_OF[problem.op]:
        if why_not(row, problem, features) is None and _is_reached(row, found):
            found.append(row)
    return tuple(found)


def _is_reached(row: Ukernel, before: Sequence[Ukernel]) -> bool:
    """Return whether some m of a row is taken by none of the rows `before` it that count m in the same unit."""
    same_unit = [other for other in before if other.unit == row.unit or (other.min_m, other.max_m) == (1, None)]
    starts = {row.min_m, *(other.max_m + 1 for other in same_unit if other.max_m is not None)}
    return any(row.takes(m) and not any(other.takes(m) for other in same_unit) for m in starts)


def select(problem: Problem, features: Collection[str], m_of: Callable[[Unit], int]) -> Choice:
    """Return the first row that accepts a problem and takes its m, which `m_of` counts in the row's unit."""
    declined: list[tuple[Ukernel, str]] = []
    for row in ROWS_OF[problem.op]:
        reason = why_not(row, problem, features)
        m = m_of(row.unit)
        if reason is None and not row.takes(m):
            reason = f"it takes {row.m_range} {row.unit}, not {m}"
        if reason is None:
            return Choice(row, tuple(declined))
        declined.append((row, reason))
    raise AssertionError("a row without bounds is last for each pair of types")
