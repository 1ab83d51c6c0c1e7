"""Times matrix products of every installed instruction set that this machine runs, and torch's, side by side.

    python tools/compare_products.py                  # bfloat16, some shapes, 1 to 512 tokens
    python tools/compare_products.py --int8 --tokens 1,16,32
    python tools/compare_products.py --blocks all --tokens 1,8,32,512    # weights in blocks, over 8 bits
    python tools/compare_products.py --blocks Q4_0,Q4_K --isa x86_64_v3 --dtype float32
    python tools/compare_products.py --blocks all --threads 1 --tokens 1,2 --shapes 2048x256 --cached
    python tools/compare_products.py --blocks all --tokens 1,32 --shapes 1024x512 --experts 48,4

All sides take turns within each round, on as many weights as no cache holds, and the median of the rounds counts. The
first size from which matrix units are ahead of vectors is where `gemm_bf16_any_amx` (ops/ukernels.py) should begin.

With `--blocks` the least of all products counts, as what else the machine does only adds to it, and rates are how many
times as fast as weights of 8 bits with a scale per row; `plain` are weights that are not quantised. With one thread its
own time counts: the machine may be busy. `--cached` multiplies one weight again and again and prints nanoseconds for 32
of its elements, `--experts` microseconds of gated experts: in a fixed order, without integers, and as the engine
multiplies.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.nn.functional as F

from ostinato.ops.dispatch import load_extension, native_kernel
from ostinato.ops.quant.block_formats import BLOCK_FORMATS
from ostinato.plan.device.kernel_support import CPU_FLAGS, installed_modules, runnable_here
from ostinato.plan.device.linux import cpu_model

SHAPES = ((1024, 4096), (4096, 1024), (4096, 4096))
"""Inputs and outputs."""
WEIGHT_BYTES = 96 * 2**20
"""Read before any weight is read again, at the least."""

Side = TypeVar("Side")
Product = Callable[[torch.Tensor, int], torch.Tensor]
"""Of tokens with a weight, by its number."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="1,4,8,16,32,64,128,256,512")
    parser.add_argument("--shapes", default=",".join(f"{i}x{o}" for i, o in SHAPES), help="inputs x outputs")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--int8", action="store_true", help="weights of 8 bits in groups of 128; torch has none")
    parser.add_argument("--blocks", help="formats of weights in blocks, or all: each over 8 bits")
    parser.add_argument("--cached", action="store_true", help="with --blocks: of a weight that a cache holds")
    parser.add_argument(
        "--experts", metavar="EXPERTS,CHOSEN", help="with --blocks: of so many, and so many for a token"
    )
    parser.add_argument("--isa", help="with --blocks: of this instruction set, else of the best")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    if (given.cached or given.experts) and not given.blocks:
        parser.error("--cached and --experts are of weights in blocks: --blocks names them")
    if given.cached and given.experts:
        parser.error("--cached and --experts are two comparisons")
    if given.blocks:
        names = list(BLOCK_FORMATS) if given.blocks == "all" else given.blocks.split(",")
        isa = given.isa or chosen_sets()[-1]
        print(f"{cpu_model()}, {torch.get_num_threads()} threads, {isa}, {given.dtype}", end=": ")
        if given.experts:
            compare_experts(names, isa, given)
        elif given.cached:
            compare_cached(names, isa, given)
        else:
            compare_blocks(names, isa, given)
        return
    print(f"{cpu_model()}, {torch.get_num_threads()} threads, GFLOP/s")
    for shape in given.shapes.split(","):
        inputs, outputs = map(int, shape.split("x"))
        sides, count = make_sides(inputs, outputs, given.int8)
        print(f"\n{shape}  {'':8}" + "".join(f"{name:>26}" for name in sides))
        for tokens in map(int, given.tokens.split(",")):
            x = torch.randn(tokens, inputs).bfloat16()
            seconds = times(sides, x, count, given.rounds)
            rates = (2e-9 * tokens * inputs * outputs / each for each in seconds)
            print(f"{tokens:>10} tokens" + "".join(f"{rate:>26.0f}" for rate in rates), flush=True)


def compare_blocks(names: list[str], isa: str, given: argparse.Namespace) -> None:
    """Prints how many times as fast as with 8 bits products with weights in blocks are, and the time of those."""
    kernel = native_kernel(load_extension(isa), "linear", deterministic=False)
    print("speed over that of int8")
    for shape in given.shapes.split(","):
        inputs, outputs = map(int, shape.split("x"))
        count = max(2, WEIGHT_BYTES // (inputs * outputs))
        drawn = common_bytes(count * inputs * outputs * 9 // 8)
        scale = torch.rand(outputs)
        sides: dict[str, Product] = {}
        dtype = getattr(torch, given.dtype)
        plain = [torch.randn(outputs, inputs).to(dtype) for _ in range(count)]
        int8 = drawn[: count * inputs * outputs].view(torch.int8).view(count, outputs, inputs)
        sides["int8"] = lambda x, i, w=int8, s=scale: kernel(x, w[i], weight_scale=s)  # type: ignore[misc]
        sides["plain"] = lambda x, i, w=plain: kernel(x, w[i])  # type: ignore[misc]
        for name in names:
            row = BLOCK_FORMATS[name].row_bytes(inputs)
            parts = drawn[: count * outputs * row].view(count, outputs, row)
            sides[name] = lambda x, i, w=parts, b=((name, outputs),): kernel(x, w[i], blocks=b)  # type: ignore[misc]
        print(f"\n{shape}  {'':8}{'int8':>14}" + "".join(f"{name:>10}" for name in [*sides][1:]))
        for tokens in map(int, given.tokens.split(",")):
            x = torch.randn(tokens, inputs).to(dtype)
            base, *others = least_times(sides, x, count if tokens < 256 else 1, given.rounds).values()
            rates = "".join(f"{base / each:>10.2f}" for each in others)
            print(f"{tokens:>10} tokens{1e6 * base:>11.0f} us{rates}", flush=True)


def compare_cached(names: list[str], isa: str, given: argparse.Namespace) -> None:
    """Prints how long products with a weight that a cache holds take, in a fixed order and as the engine multiplies."""
    print("ns for 32 weights, in a fixed order / as the engine multiplies")
    kernels = {
        in_order: native_kernel(load_extension(isa), "linear", deterministic=in_order) for in_order in (True, False)
    }
    for shape in given.shapes.split(","):
        inputs, outputs = map(int, shape.split("x"))
        sides: dict[tuple[str, bool], Product] = {}
        for name in names:
            weight = common_bytes(outputs * BLOCK_FORMATS[name].row_bytes(inputs)).view(outputs, -1)
            for in_order, kernel in kernels.items():
                sides[name, in_order] = lambda x, _, w=weight, b=((name, outputs),), k=kernel: k(x, w, blocks=b)  # type: ignore[misc]
        print(f"\n{shape}  {'':8}" + "".join(f"{name:>16}" for name in names))
        for tokens in map(int, given.tokens.split(",")):
            x = torch.randn(tokens, inputs).to(getattr(torch, given.dtype))
            least = least_times(sides, x, 1, given.rounds, repeats=200)
            each = 1e9 * 32 / (inputs * outputs)
            print(
                f"{tokens:>10} tokens" + pairs(names, {key: value * each for key, value in least.items()}, 2),
                flush=True,
            )


def compare_experts(names: list[str], isa: str, given: argparse.Namespace) -> None:
    """Prints how long gated experts take, in a fixed order and as the engine multiplies."""
    print("us of gated experts, in a fixed order / as the engine multiplies")
    experts, top_k = map(int, given.experts.split(","))
    kernels = {
        in_order: native_kernel(load_extension(isa), "moe", deterministic=in_order) for in_order in (True, False)
    }
    for shape in given.shapes.split(","):
        size, inner = map(int, shape.split("x"))
        print(f"\n{shape}  {'':8}" + "".join(f"{name:>16}" for name in names))
        for tokens in map(int, given.tokens.split(",")):
            chosen = torch.stack([torch.randperm(experts)[:top_k] for _ in range(tokens)]).float()
            choices = torch.stack([chosen, torch.full_like(chosen, 1 / top_k)], dim=1)
            sides: dict[tuple[str, bool], Product] = {}
            for name in names:
                block = BLOCK_FORMATS[name]
                if inner % block.elements or size % block.elements:
                    raise SystemExit(f"{name} needs sizes that {block.elements} divides, which {shape} are not")
                up = common_bytes(experts * 2 * inner * block.row_bytes(size)).view(experts, 2 * inner, -1)
                down = common_bytes(experts * size * block.row_bytes(inner)).view(experts, size, -1)
                blocks = {"up_blocks": ((name, 2 * inner),), "down_blocks": ((name, size),)}
                for in_order, kernel in kernels.items():
                    sides[name, in_order] = lambda x, _, c=choices, u=up, d=down, b=blocks, k=kernel: k(  # type: ignore[misc]
                        x, c, u, d, "swiglu", **b
                    )
            x = torch.randn(tokens, size).to(getattr(torch, given.dtype)) / size
            least = least_times(sides, x, 1, given.rounds, repeats=20)
            micros = {key: 1e6 * value for key, value in least.items()}
            print(f"{tokens:>10} tokens" + pairs(names, micros, 0), flush=True)


def pairs(names: list[str], values: dict[tuple[str, bool], float], digits: int) -> str:
    """Of each format, the value in a fixed order and the other."""
    return "".join(f"{values[name, True]:.{digits}f} / {values[name, False]:.{digits}f}".rjust(16) for name in names)


def common_bytes(count: int) -> torch.Tensor:
    """Random bytes of which each pair is a float16 of common size, so that no sum is denormal or infinite."""
    return torch.randint(0x20, 0x3C, (count,), dtype=torch.uint8)


def make_sides(inputs: int, outputs: int, int8: bool) -> tuple[dict[str, Product], int]:
    """The sides by name, and how many weights they have."""
    count = max(2, WEIGHT_BYTES // (inputs * outputs * (1 if int8 else 2)))
    sides: dict[str, Product] = {}
    scales = torch.rand(outputs, -(-inputs // 128)) / 128
    if int8:
        weights = [torch.randint(-128, 128, (outputs, inputs), dtype=torch.int8) for _ in range(count)]
    else:
        weights = [(torch.randn(outputs, inputs) / inputs**0.5).bfloat16() for _ in range(count)]
        sides["torch"] = lambda x, i: F.linear(x, weights[i])
    for isa in chosen_sets():
        for name, deterministic in ((isa, False), (f"{isa} in order", True)):
            kernel = native_kernel(load_extension(isa), "linear", deterministic=deterministic)
            if int8:
                sides[name] = lambda x, i, k=kernel: k(x, weights[i], weight_scale=scales, group_size=128)  # type: ignore[misc]
            else:
                sides[name] = lambda x, i, k=kernel: k(x, weights[i])  # type: ignore[misc]
    return sides, count


def chosen_sets() -> list[str]:
    """Instruction sets that are installed and run here, the best last; no stand-ins for tests."""
    known = {isa for isas in CPU_FLAGS.values() for isa in isas}
    return [isa for isa in runnable_here() if isa in installed_modules() and isa in known]


def least_times(
    sides: dict[Side, Product], x: torch.Tensor, count: int, rounds: int, repeats: int = 1
) -> dict[Side, float]:
    """Return the least seconds that a product of each side took.

    The sides take turns, weight by weight, with `repeats` products at a time.
    """
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    least = dict.fromkeys(sides, math.inf)
    for i in [*range(count)] * rounds:
        for name, product in sides.items():
            begin = clock()
            for _ in range(repeats):
                product(x, i)
            least[name] = min(least[name], (clock() - begin) / repeats)
    return least


def times(sides: dict[str, Product], x: torch.Tensor, count: int, rounds: int) -> list[float]:
    """The median seconds of a product of each side."""
    taken: dict[str, list[float]] = {name: [] for name in sides}
    for product in sides.values():
        product(x, 0)
    for _ in range(rounds):
        for name, product in sides.items():
            begin = time.perf_counter()
            for i in range(count):
                product(x, i)
            taken[name].append((time.perf_counter() - begin) / count)
    return [statistics.median(each) for each in taken.values()]


if __name__ == "__main__":
    main()
