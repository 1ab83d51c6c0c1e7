"""Memory of a vision encoder: its cache, the peak while encoding, and its graphs. Pure functions of plain numbers."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from ostinato.ops.operations import GraphBackend
from ostinato.ops.scratch import native_encoder_attention, triton_linear
from ostinato.ops.sizes import DTYPE_BYTES
from ostinato.ops.step_inputs import encoder_sizes, encoder_table, table_bytes
from ostinato.plan.layer_specs import LayerSpec, VisionSpec
from ostinato.plan.memory.activations import pool_bytes
from ostinato.plan.memory.kernel_scratch import native_scratch
from ostinato.units import MiB

HEAP = 64 * MiB
"""Bytes that glibc's heap keeps at its end: twice the largest block that is not a separate mapping."""


@dataclass(frozen=True)
class EncoderMemory:
    """Bytes that a vision encoder keeps in addition to its weights: its graphs with their buffers, and its cache."""

    graphs: int = 0
    cache: int = 0

    @property
    def total(self) -> int:
        return self.graphs + self.cache


def cell_bytes(vision: VisionSpec, dtype: str) -> int:
    """Return the bytes of one cell of the encoder cache: the vectors of one output token."""
    return vision.hidden_rows * vision.out_hidden_size * DTYPE_BYTES[dtype]


def encoding_bytes(
    vision: VisionSpec,
    dtype: str,
    tokens: int,
    *,
    native: Collection[str],
    threads: int,
    sees_all: bool,
    triton: Collection[str] = (),
) -> int:
    """Return the peak bytes of encoding images of `tokens` output tokens in all, their inputs and results included.

    The result includes what allocators keep of freed memory: a quarter, as for steps, and the part of a heap that stays
    free at its end or in pieces (`HEAP`), up to half. `native` are the operations with a native kernel, `triton` those
    with a Triton kernel; if one of the encoder's has neither, everything is counted as a float32 copy too. `sees_all`
    is true if attention is masked over all patches, as the reference does on a GPU in float32.
    """
    inputs = encoder_buffer_bytes(vision, dtype, tokens, tokens)
    peak = inputs + encoder_peak_bytes(vision, dtype, tokens, widens=not {*native, *triton} >= vision.ops)
    held = peak // 4 + min(HEAP, peak // 2)
    return peak + held + _mask_bytes(vision, tokens, sees_all) + _scratch(vision, tokens, native, threads)


def encoder_graph_bytes(
    vision: VisionSpec,
    dtype: str,
    budgets: Collection[int],
    items: int,
    *,
    backend: GraphBackend,
    sees_all: bool,
    triton: Collection[str] = (),
) -> int:
    """Return the bytes of the graphs of all `budgets`, with up to `items` images each, and of their buffers.

    0 if there are none. All graphs share one arena, so the largest determines the size. For tapes the result is exact.
    Memory that kernels allocate while they run is not in a tape, but in a CUDA graph: with Triton's kernels it is that
    of one matmul before its activation and addition. If a kernel is a reference, everything is counted as it may be
    needed at once.
    """
    if not budgets:
        return 0
    largest = max(budgets)
    buffers = encoder_buffer_bytes(vision, dtype, largest, items)
    if backend == "tape":
        return buffers + vision.calls.arena_bytes(DTYPE_BYTES[dtype], vision.rows_of(largest))
    if set(triton) >= vision.ops:
        patches = vision.rows_of(largest)
        widest = max((weight.out_size for weight in vision.weights if weight.role == "linear"), default=0)
        product = triton_linear(tokens=patches, out_size=widest, element_bytes=DTYPE_BYTES[dtype]).shared
        return buffers + pool_bytes(vision.calls.arena_bytes(DTYPE_BYTES[dtype], patches) + product)
    peak = encoder_peak_bytes(vision, dtype, largest, widens=True)
    return buffers + pool_bytes(peak + _mask_bytes(vision, largest, sees_all))


def encoder_buffer_bytes(vision: VisionSpec, dtype: str, tokens: int, items: int) -> int:
    """Return the bytes of the buffers for the inputs of `items` images of `tokens` output tokens in all."""
    sizes = encoder_sizes(vision.rows_of(tokens), vision.segments_of(items), vision.patch_elements, vision.taps)
    return table_bytes(encoder_table(dtype, vision.has_windows), sizes)


def encoder_peak_bytes(vision: VisionSpec, dtype: str, tokens: int, widens: bool) -> int:
    """Return the bytes of the results, and of the residual stream and intermediate results at the peak before them.

    `widens` counts a float32 copy of everything, as references may need.
    """
    patches, width = vision.rows_of(tokens), DTYPE_BYTES[dtype]
    tokens = patches // vision.patches_per_token
    element = width + 4 if widens else width
    size, merged = vision.hidden_size, vision.patches_per_token * vision.hidden_size
    # Position embeddings of a patch are interpolated: weighted and added up in float32, one after the other, for which
    # the memory of four is enough.
    taps = 4 if vision.num_positions else 0
    embedding = patches * ((taps + 1) * size * (width + 4) + vision.patch_elements * width)
    # Counted are the normed input; queries, keys and values, two of them rotated; and two results of attention.
    attention = patches * 8 * size * element
    mlp = patches * (2 * size + 2 * vision.intermediate_size) * element
    of_merger = [weight for weight in vision.weights if weight.role == "linear" and weight.in_size == merged]
    widest = max((weight.out_size for weight in of_merger), default=merged)
    merger = tokens * (2 * merged + max(merged, widest) + vision.out_hidden_size) * element
    # Of a convolution: the normed input, its projection and gates; and of one row of neighbours at a time the inputs,
    # the weights and their products.
    convolution = patches * (6 + 3 * vision.conv_size) * size * element if vision.conv_size else 0
    residual = patches * size * element
    # The results that later calls read, and the inputs that a block and a module in it hold until they return.
    calls = vision.calls.live_bytes(element, patches) + 2 * patches * size * element
    angles = patches * size // vision.num_heads * 4
    # Results are separate tensors first and are then concatenated, so they count twice.
    results = 2 * tokens * vision.hidden_rows * vision.out_hidden_size * width
    return results + angles + max(residual + max(embedding, attention, mlp, merger, convolution), calls)


def _mask_bytes(vision: VisionSpec, tokens: int, sees_all: bool) -> int:
    """Return the bytes of a mask of all patches by all patches, as a bool and as a float32 to be added."""
    return (1 + 4) * vision.rows_of(tokens) ** 2 if sees_all else 0


def _scratch(vision: VisionSpec, tokens: int, native: Collection[str], threads: int) -> int:
    """Return the bytes of scratch memory that native matmuls and attention keep."""
    products = (weight for weight in vision.weights if weight.role == "linear")
    layer = LayerSpec("vision", weights=tuple(replace(weight, can_be_quantised=True) for weight in products))
    size = vision.hidden_size
    patches = vision.rows_of(tokens)
    kept = native_scratch([layer], (size, size), {"linear"} & set(native), patches, 0, 0, threads)
    attends = "encoder_attention" in native
    return kept + (threads * native_encoder_attention(head_dim=size // vision.num_heads).own if attends else 0)
