"""Compiles the Triton launches of models' steps for GPUs that need not be here, and looks at what the compiler made.

    python tools/check_triton.py benchmarks/models/*          every launch, every architecture and dtype
    python tools/check_triton.py --sample benchmarks/models/nemotron-h-300m

Launches are collected, not written down: models are built on the device `meta`, and steps of several sizes run there
with Triton's wrappers, so a launch is what an engine would start; and operations that these lack are called
(`triton_operations.py`). Operations without a Triton kernel stand aside. A
value read on the host would be an error there. Then each launch must compile without a spill or a stack frame, and its
shared memory must fit the GPU. Triton keeps what it compiled in its cache (TRITON_CACHE_DIR).
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import Pool
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton_operations import call_operations

from ostinato.layers.build import Build
from ostinato.models.checkpoint import model_spec, read_config
from ostinato.models.loader import build_model
from ostinato.ops.facts import OPERATIONS
from ostinato.ops.kernels import Ops, Tap, triton_kernel
from ostinato.ops.launches.table import Launch
from ostinato.ops.step import (
    ENCODER_TABLE,
    EncoderInputs,
    LayerMemory,
    StepInputs,
    encoder_sizes,
    step_sizes,
    step_table,
)
from ostinato.ops.triton import launcher
from ostinato.plan.model import ModelSpec

META = torch.device("meta")
KIB = 1024
SHARED = {80: 163 * KIB, 90: 227 * KIB, 100: 227 * KIB, 120: 99 * KIB}
"""Bytes of shared memory that a block may have, by compute capability (CUDA's programming guide)."""

DTYPES = ("bfloat16", "float16", "float32")
STATE_DTYPES = ("float32", "bfloat16", "float16")
STEPS = ((1, 1, 0), (8, 1, 0), (64, 1, 0), (256, 1, 0), (32, 4, 0), (0, 1, 2048), (4, 3, 512))
"""(decode rows, their tokens, prompt tokens): the launch tables' ranges, with drafts and without."""

ELEMENTS = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "i1",
}


@dataclass(frozen=True)
class Call:
    """One launch with the types of its arguments: what the compiler sees."""

    module: str
    kernel: str
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    aligned: tuple[str, ...]
    """Pointers and whole numbers that are divisible by 16."""
    num_warps: int
    num_stages: int
    capability: int

    def __str__(self) -> str:
        types = " ".join(f"{name}:{kind}" for name, kind in self.signature if kind.startswith("*"))
        blocks = " ".join(f"{name}={value}" for name, value in self.constants)
        return f"sm_{self.capability} {self.kernel} warps={self.num_warps} stages={self.num_stages} {blocks} {types}"


def call_of(kernel: Any, launch: Launch, capability: int, arguments: dict[str, Any]) -> Call:
    """As `kernel[grid](...)` would specialise it: one and None are constants, multiples of 16 are known to be."""
    plain = {parameter.name for parameter in kernel.params if parameter.do_not_specialize}
    constant = {name for name, each in inspect.signature(kernel.fn).parameters.items() if is_constexpr(each)}
    signature, constants, aligned = [], list(launch.blocks.items()), []
    for name, value in arguments.items():
        if name in constant or value is None or (type(value) is int and value == 1 and name not in plain):
            constants.append((name, value))
        elif isinstance(value, torch.Tensor):
            signature.append((name, "*" + ELEMENTS[value.dtype]))
            if value.storage_offset() * value.element_size() % 16 == 0:
                aligned.append(name)
        elif isinstance(value, int):
            signature.append((name, "i32" if -(2**31) <= value < 2**31 else "i64"))
            if value % 16 == 0 and name not in plain:
                aligned.append(name)
        else:
            signature.append((name, "fp32"))
    return Call(
        kernel.fn.__module__,
        kernel.__name__,
        tuple(signature),
        tuple(sorted(constants)),
        tuple(aligned),
        launch.num_warps,
        launch.num_stages,
        capability,
    )


def is_constexpr(parameter: inspect.Parameter) -> bool:
    return "constexpr" in str(parameter.annotation)


def compile_call(call: Call) -> str | None:
    """What is wrong with it, None for nothing."""
    kernel = getattr(importlib.import_module(call.module), call.kernel)
    names = kernel.arg_names
    types, constants = dict(call.signature), dict(call.constants)
    source = ASTSource(
        fn=kernel,
        signature={name: types.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in call.aligned},
    )
    options = {"num_warps": call.num_warps, "num_stages": call.num_stages, "enable_fp_fusion": True}
    try:
        made = triton.compile(source, target=GPUTarget("cuda", call.capability, 32), options=options)
    except Exception as error:  # whatever the compiler says is the finding
        return f"{call}: {error}"[:2000]
    found = []
    if made.metadata.shared > SHARED[call.capability]:
        found.append(f"{made.metadata.shared} bytes of shared memory, and there are {SHARED[call.capability]}")
    usage = resources(made.asm["cubin"])
    found += [f"{name.lower()} {usage[name]} bytes" for name in ("STACK", "LOCAL") if usage[name]]
    return f"{call}: {', '.join(found)} (registers {usage['REG']})" if found else None


def resources(cubin: bytes) -> dict[str, int]:
    """Registers, and bytes of stack and of spills, by the tool of Triton's wheel."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    return {name: max(map(int, re.findall(rf"{name}:(\d+)", text.stdout))) for name in ("REG", "STACK", "LOCAL")}


def stand_in(name: str) -> Callable[..., torch.Tensor]:
    """A call of an operation without a Triton kernel: its result, unwritten."""

    def call(*args: Any, **kwargs: Any) -> torch.Tensor:
        result = OPERATIONS[name].result(*args, **kwargs)
        if isinstance(result, torch.Tensor):
            return result
        shape, dtype = result
        return torch.empty(shape, dtype=getattr(torch, dtype) if isinstance(dtype, str) else dtype, device=META)

    return call


def meta_ops() -> Ops:
    return Ops({name: triton_kernel(name) if row.triton else stand_in(name) for name, row in OPERATIONS.items()}, Tap())


def meta_memory(spec: ModelSpec, dtype: torch.dtype, state_dtype: torch.dtype, slots: int) -> list[LayerMemory]:
    """Of a model's layers, with some blocks and slots."""

    def empty(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=of, device=META)

    memory = []
    for layer in spec.layers:
        parts: dict[str, Any] = {}
        if (attention := layer.attention) is not None:
            shape = (4096, 16, attention.num_kv_heads, attention.head_dim)
            parts |= {"k_cache": empty(*shape), "v_cache": empty(*shape)}
        if (mixer := layer.mixer) is not None:
            # States of some layers are float32 always.
            dtypes = {"model": dtype, "state": torch.float32 if mixer.needs_float32 else state_dtype}
            parts["states"] = {
                array.name: empty(slots, *array.shape, of=dtypes[array.dtype]) for array in mixer.state.arrays
            }
            parts["noise"] = None if state_dtype == torch.float32 else len(memory)
        memory.append(LayerMemory(**parts))
    if (vision := spec.vision) is not None:
        memory.append(LayerMemory(media=empty(64, 1 + len(vision.deepstack_layers), spec.hidden_size)))
    return memory


def meta_step(rows: int, tokens_per_row: int, prompt_tokens: int, takes_images: bool) -> StepInputs:
    """Decode rows, and one prefill row of `prompt_tokens` with a checkpoint."""
    tokens, prefill = rows * tokens_per_row + prompt_tokens, int(prompt_tokens > 0)
    sizes = step_sizes(rows + prefill, tokens, blocks=256, slots=tokens_per_row)
    tensors = {
        name: torch.empty(each.shape(sizes), dtype=getattr(torch, each.dtype), device=META)
        for name, each in step_table(takes_images).items()
    }
    checkpoints = ((rows, 256, 1),) if prefill else ()
    return StepInputs(**tensors, num_decode_rows=rows, checkpoints=checkpoints)


def meta_images(spec: ModelSpec, tokens: int) -> EncoderInputs:
    """Two images of `tokens` output tokens together."""
    vision = spec.vision
    assert vision is not None
    sizes = encoder_sizes(tokens * vision.merge_size**2, 2, vision.patch_elements)
    return EncoderInputs(
        **{
            name: torch.empty(each.shape(sizes), dtype=getattr(torch, each.dtype), device=META)
            for name, each in ENCODER_TABLE.items()
        }
    )


@contextmanager
def noted(capability: int) -> Iterator[list[Call]]:
    """What Triton's wrappers would start meanwhile on a GPU of `capability`."""
    found: list[Call] = []
    was = launcher.run, launcher.capability
    launcher.run = lambda kernel, grid, launch, **given: found.append(call_of(kernel, launch, capability, given))
    launcher.capability = lambda tensor: capability
    try:
        yield found
    finally:
        launcher.run, launcher.capability = was


@torch.inference_mode()
def run_model(directory: Path, dtype: str, state_dtype: str) -> None:
    """Its steps, and its encoder, on tensors without memory."""
    spec = model_spec(read_config(directory))
    model = build_model(Build(meta_ops(), getattr(torch, dtype), META), spec)
    memory = meta_memory(spec, getattr(torch, dtype), getattr(torch, state_dtype), slots=1024)
    for step in STEPS:
        hidden = model(meta_step(*step, takes_images=spec.vision is not None), memory)
        model.logits(hidden[: max(step[0] * step[1], 1)])
    if spec.vision is not None:
        for tokens in (64, 1024):
            model.encode(meta_images(spec, tokens))


def collected(directories: list[Path], sample: bool) -> list[Call]:
    """Every launch once; of a sample the first of each kernel, with 8-bit integers and without, for sm_90 alone."""
    calls: dict[Any, Call] = {}
    for capability in (90,) if sample else SHARED:
        with noted(capability) as found:
            for dtype in DTYPES[:1] if sample else DTYPES:
                call_operations(getattr(torch, dtype))
                for state_dtype in STATE_DTYPES[:1] if sample else STATE_DTYPES:
                    for directory in directories:
                        run_model(directory, dtype, state_dtype)
        for call in found:
            calls.setdefault((call.kernel, "*i8" in dict(call.signature).values()) if sample else call, call)
    return list(calls.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path, help="directories with a config.json")
    parser.add_argument("--sample", action="store_true", help="one launch of each kernel, bfloat16, sm_90a")
    parser.add_argument("--kernel", help="only kernels whose name contains this")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    calls = [call for call in collected(options.models, options.sample) if (options.kernel or "") in call.kernel]
    with Pool(options.jobs) as pool:
        wrong = [finding for finding in pool.imap_unordered(compile_call, calls) if finding is not None]
    print(*sorted(wrong), sep="\n", end="\n" if wrong else "")
    kernels = sorted({call.kernel for call in calls})
    print(f"{len(calls)} launches of {len(kernels)} kernels ({', '.join(kernels)}): {len(wrong)} with findings")
    return int(bool(wrong) or not calls)


if __name__ == "__main__":
    sys.exit(main())
