"""What a vision encoder takes: its cache, what encoding needs at once, and its graphs. Pure functions of plain
numbers."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from ostinato.ops.facts import Backend, called_by
from ostinato.ops.scratch import native_encoder_attention
from ostinato.ops.step import ENCODER_TABLE, encoder_sizes, table_bytes
from ostinato.ops.triton_scratch import linear
from ostinato.plan.layers import LayerSpec
from ostinato.plan.memory.kernel_scratch import native_scratch
from ostinato.plan.memory.torch_memory import pool_bytes
from ostinato.plan.model import DTYPE_BYTES
from ostinato.plan.vision import VisionSpec
from ostinato.units import MiB

ENCODER_OPS = called_by("encoder") | {"axial_angles", "linear"}
"""Operations that it calls."""

TAPS = 4
"""Learned position embeddings that a patch's own is made of."""

HEAP = 64 * MiB
"""That glibc's heap keeps at its end: twice the largest block that is not a mapping of its own."""


@dataclass(frozen=True)
class EncoderMemory:
    """Bytes that a vision encoder keeps beside its weights: of its graphs with their buffers, and of its cache."""

    graphs: int = 0
    cache: int = 0

    @property
    def total(self) -> int:
        return self.graphs + self.cache


def cell_bytes(vision: VisionSpec, dtype: str) -> int:
    """Bytes of one cell of the encoder cache: the vectors of one output token."""
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
    """Bytes that encoding images of `tokens` output tokens in all needs at once, their inputs and results among them.

    More is counted, since allocators hold on to some of what was freed: a quarter, as for steps, and as much of a heap
    as lies free at its end, or in pieces (`HEAP`), up to half. `native` are the operations with a native kernel,
    `triton` those with a Triton kernel; where one of the encoder's has neither, all is counted as a float32 copy too.
    `sees_all`: whether attention is masked over all patches, as the reference is on a GPU in float32.
    """
    inputs = encoder_buffer_bytes(vision, tokens, tokens)
    peak = inputs + _peak_bytes(vision, dtype, tokens, widens=not {*native, *triton} >= ENCODER_OPS)
    held = peak // 4 + min(HEAP, peak // 2)
    return peak + held + _mask_bytes(vision, tokens, sees_all) + _scratch(vision, tokens, native, threads)


def encoder_graph_bytes(
    vision: VisionSpec,
    dtype: str,
    budgets: Collection[int],
    items: int,
    *,
    backend: Backend,
    sees_all: bool,
    triton: Collection[str] = (),
) -> int:
    """Bytes of the graphs of all `budgets`, of which each serves at most `items` images, with their buffers; 0 if there
    are none. One arena serves all, so that the greediest decides.

    For tapes it is what they take, to the byte. What kernels allocate while they run is no part of a tape, but of a
    CUDA graph: with Triton's kernels that is what one product needs before it is activated and added. Where one is a
    reference, all is counted as it may be needed at once.
    """
    if not budgets:
        return 0
    largest = max(budgets)
    buffers = encoder_buffer_bytes(vision, largest, items)
    if backend == "tape":
        return buffers + vision.calls.arena_bytes(DTYPE_BYTES[dtype], largest * vision.patches_per_token)
    if set(triton) >= ENCODER_OPS:
        patches = largest * vision.patches_per_token
        widest = max((weight.out_size for weight in vision.weights if weight.role == "linear"), default=0)
        product = linear(tokens=patches, outputs=widest, element_bytes=DTYPE_BYTES[dtype])
        return buffers + pool_bytes(vision.calls.arena_bytes(DTYPE_BYTES[dtype], patches) + product)
    peak = _peak_bytes(vision, dtype, largest, widens=True)
    return buffers + pool_bytes(peak + _mask_bytes(vision, largest, sees_all))


def encoder_buffer_bytes(vision: VisionSpec, tokens: int, items: int) -> int:
    """Bytes of the buffers that hold the inputs of `items` images of `tokens` output tokens in all."""
    patches = tokens * vision.patches_per_token
    return table_bytes(ENCODER_TABLE, encoder_sizes(patches, items, vision.patch_elements))


def _peak_bytes(vision: VisionSpec, dtype: str, tokens: int, widens: bool) -> int:
    """Results, and at the greediest moment before them the residual stream and intermediate results."""
    patches, width = tokens * vision.patches_per_token, DTYPE_BYTES[dtype]
    element = width + 4 if widens else width
    size, merged = vision.hidden_size, vision.patches_per_token * vision.hidden_size
    # The position embeddings that a patch's own is made of, weighted and added up in float32.
    embedding = patches * ((TAPS + 1) * size * (width + 4) + vision.patch_elements * width)
    # What is normed; queries, keys and values, two of them rotated; and what attention gives, twice.
    attention = patches * 8 * size * element
    mlp = patches * (2 * size + 2 * vision.intermediate_size) * element
    merger = tokens * (3 * merged + vision.out_hidden_size) * element
    residual = patches * size * element
    angles = patches * size // vision.num_heads * 4
    # Results lie apart, and then side by side.
    results = 2 * tokens * vision.hidden_rows * vision.out_hidden_size * width
    return results + angles + residual + max(embedding, attention, mlp, merger)


def _mask_bytes(vision: VisionSpec, tokens: int, sees_all: bool) -> int:
    """Of every patch and every other: which it sees, as a bool and as a float32 to be added."""
    return (1 + 4) * (tokens * vision.patches_per_token) ** 2 if sees_all else 0


def _scratch(vision: VisionSpec, tokens: int, native: Collection[str], threads: int) -> int:
    """That native products and attention keep."""
    products = (weight for weight in vision.weights if weight.role == "linear")
    layer = LayerSpec("vision", weights=tuple(replace(weight, can_be_quantised=True) for weight in products))
    size = vision.hidden_size
    patches = tokens * vision.patches_per_token
    kept = native_scratch([layer], (size, size), {"linear"} & set(native), patches, 0, 0, threads)
    attends = "encoder_attention" in native
    return kept + (threads * native_encoder_attention(head_dim=size // vision.num_heads).own if attends else 0)
