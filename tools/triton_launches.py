"""Collect the Triton launches of models' steps, without a GPU.

Models are built on the device `meta`, and steps of several sizes run there with Triton's wrappers. So a launch is what
an engine would start; a value read on the host would be an error. Operations without a Triton kernel are skipped.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature
from triton_operations import call_operations

from ostinato.layers.allocation import WeightAllocator
from ostinato.models.checkpoint import model_spec, read_config
from ostinato.models.loader import build_model
from ostinato.ops.arrays import TorchArrays
from ostinato.ops.dispatch import CallHook, Ops, triton_kernel
from ostinato.ops.launch_tables.launch import Launch
from ostinato.ops.operations import OPERATIONS
from ostinato.ops.step_inputs import (
    EncoderInputs,
    LayerCache,
    StepInputs,
    encoder_sizes,
    encoder_table,
    step_sizes,
    step_table,
)
from ostinato.ops.triton import common
from ostinato.plan.model import ModelSpec

META = torch.device("meta")
CAPABILITIES = (80, 90, 100, 120)
"""Compute capabilities that launches are compiled for."""

DTYPES = ("bfloat16", "float16", "float32")
STATE_DTYPES = ("float32", "bfloat16", "float16")
STEPS = ((1, 1, 0), (8, 1, 0), (64, 1, 0), (256, 1, 0), (32, 4, 0), (0, 1, 2048), (4, 3, 512))
"""(decode rows, their tokens, prompt tokens): the launch tables' ranges, with drafts and without."""

OTHER_SIZES = (((100, 1, 0), (112, 1, 0)), ((0, 1, 1000), (0, 1, 1024)), ((3, 1, 1000), (4, 1, 1024)))
"""Steps that have the same launches, though their sizes differ: one is no multiple of 16, the other is."""


@dataclass(frozen=True)
class Call:
    """One launch as the compiler sees it, and as Triton names it in its cache."""

    module: str
    kernel: str
    signature: tuple[tuple[str, str], ...]
    """Each parameter's type."""
    constants: tuple[tuple[tuple[int, ...], Any], ...]
    """Values of those that are compiled in, by place."""
    attributes: tuple[tuple[tuple[int, ...], bool], ...]
    """Whether those that are looked at are known to be multiples of 16, by place."""
    num_warps: int
    num_stages: int
    capability: int
    registers: int | None = None

    @property
    def options(self) -> dict[str, Any]:
        return common.options_of(Launch(self.kernel, {}, self.num_warps, self.num_stages, self.registers))

    def __str__(self) -> str:
        names = [name for name, _ in self.signature]
        types = " ".join(f"{name}:{kind}" for name, kind in self.signature if kind.startswith("*"))
        blocks = " ".join(f"{names[place[0]]}={value}" for place, value in self.constants)
        how = f"warps={self.num_warps} stages={self.num_stages}"
        how = how if self.registers is None else f"{how} registers={self.registers}"
        return f"sm_{self.capability} {self.kernel} {how} {blocks} {types}"


class Placed:
    """A tensor without memory, as if its storage began where the allocator lets it begin."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.dtype = tensor.dtype
        self._offset = tensor.storage_offset() * tensor.element_size()

    def data_ptr(self) -> int:
        return self._offset


def call_of(kernel: Any, launch: Launch, capability: int, arguments: dict[str, Any]) -> Call:
    """Return what `kernel[grid](...)` would compile.

    Triton itself says which arguments are constants and what is known of the others.
    """
    backend, binder = binder_of(kernel, capability)
    placed = {name: Placed(each) if isinstance(each, torch.Tensor) else each for name, each in arguments.items()}
    how = {"num_warps": launch.num_warps, "num_stages": launch.num_stages}
    bound, specialization, options = binder(**placed, **launch.blocks, **how, debug=False)
    _, signature, constants, attributes = kernel._pack_args(backend, dict(options), bound, specialization, options)
    return Call(
        kernel.fn.__module__,
        kernel.__name__,
        tuple(signature.items()),
        tuple(constants.items()),
        tuple((place, bool(known)) for place, known in attributes.items()),
        capability=capability,
        registers=launch.registers,
        **how,
    )


@cache
def binder_of(kernel: Any, capability: int) -> tuple[Any, Callable[..., Any]]:
    backend = make_backend(GPUTarget("cuda", capability, 32))
    return backend, create_function_from_signature(kernel.signature, kernel.params, backend)


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
    return Ops(
        {name: triton_kernel(name) if row.triton else stand_in(name) for name, row in OPERATIONS.items()}, CallHook()
    )


def meta_memory(spec: ModelSpec, dtype: torch.dtype, state_dtype: torch.dtype, slots: int) -> list[LayerCache]:
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
        memory.append(LayerCache(**parts))
    if (vision := spec.vision) is not None:
        memory.append(LayerCache(media=empty(64, 1 + len(vision.deepstack_layers), spec.hidden_size)))
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


def meta_images(spec: ModelSpec, tokens: int, dtype: str) -> EncoderInputs:
    """Two images of `tokens` output tokens together."""
    vision = spec.vision
    assert vision is not None
    sizes = encoder_sizes(tokens * vision.merge_size**2, 2, vision.patch_elements)
    return EncoderInputs(
        **{
            name: torch.empty(each.shape(sizes), dtype=getattr(torch, each.dtype), device=META)
            for name, each in encoder_table(dtype).items()
        }
    )


@contextmanager
def noted(capability: int) -> Iterator[list[Call]]:
    """What Triton's wrappers would start meanwhile on a GPU of `capability`."""
    found: list[Call] = []
    was = common.run, common.capability
    common.run = lambda kernel, grid, launch, **given: found.append(call_of(kernel, launch, capability, given))
    common.capability = lambda tensor: capability
    try:
        yield found
    finally:
        common.run, common.capability = was


@torch.inference_mode()
def run_model(directory: Path, dtype: str, state_dtype: str, steps: Sequence[tuple[int, int, int]] = STEPS) -> None:
    """Its steps, and its encoder, on tensors without memory."""
    spec = model_spec(read_config(directory))
    model = build_model(WeightAllocator(meta_ops(), TorchArrays("meta"), dtype), spec)
    memory = meta_memory(spec, getattr(torch, dtype), getattr(torch, state_dtype), slots=1024)
    for step in steps:
        hidden = model(meta_step(*step, takes_images=spec.vision is not None), memory)
        triton_kernel("sample")(model.compute_logits(hidden[: max(step[0] * step[1], 1)]))
    if spec.vision is not None:
        for tokens in (64, 1024):
            model.encode(meta_images(spec, tokens, dtype))


def collected(directories: Sequence[Path], sample: bool, capabilities: Sequence[int]) -> list[Call]:
    """Every launch once; of a sample the first of each kernel, with 8-bit integers, with blocks and without."""
    calls: dict[Any, Call] = {}
    for capability in capabilities:
        with noted(capability) as found:
            for dtype in DTYPES[:1] if sample else DTYPES:
                call_operations(getattr(torch, dtype))
                for state_dtype in STATE_DTYPES[:1] if sample else STATE_DTYPES:
                    for directory in directories:
                        run_model(directory, dtype, state_dtype)
        for call in found:
            quantized = frozenset(dict(call.signature).values()) & {"*i8", "*u8"}
            calls.setdefault((call.kernel, quantized) if sample else call, call)
    return list(calls.values())


def compiled_anew(directories: Sequence[Path]) -> list[Call]:
    """Return launches that only one of two steps of different sizes has.

    An engine would pause while they are compiled.
    """
    found: list[Call] = []
    for directory in directories:
        for pair in OTHER_SIZES:
            both = []
            for step in pair:
                with noted(90) as calls:
                    run_model(directory, DTYPES[0], STATE_DTYPES[0], (step,))
                both.append(set(calls))
            found += both[0] ^ both[1]
    return found


def of_engines(directories: Sequence[Path], dtype: str, capabilities: Sequence[int]) -> list[Call]:
    """Launches of the models' steps in one dtype, each once."""
    found: dict[Call, None] = {}
    for capability in capabilities:
        with noted(capability) as calls:
            for directory in directories:
                run_model(directory, dtype, STATE_DTYPES[0])
        found |= dict.fromkeys(calls)
    return list(found)
