"""Activations: the memory of a step besides weights and cache, which depends on the kernels that run.

It follows from the passes of a token through layers and the width of each, and includes the GPU memory that torch takes
in addition to its tensors. The functions are pure and take plain numbers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from ostinato.ops.operations import ops_called_by
from ostinato.ops.sizes import DTYPE_BYTES
from ostinato.plan.layer_specs import LayerSpec
from ostinato.plan.memory.cache_modes import bytes_while_read
from ostinato.plan.memory.kernel_scratch import native_scratch, reference_scratch, triton_scratch
from ostinato.plan.mixers import Mixer
from ostinato.plan.model import ModelSpec
from ostinato.units import KiB, MiB


@dataclass(frozen=True)
class Pass:
    """One pass through layers.

    `kept_elements` per token are alive from its start to its end, `join_elements` only before the first layer, as
    `LayerSpec.activation_elements` are within one.
    """

    kept_elements: int
    layers: tuple[LayerSpec, ...]
    join_elements: int = 0

    @property
    def widest_elements(self) -> int:
        """Elements per token at the peak between its start and its end, besides `kept_elements`."""
        return max(self.join_elements, *(layer.activation_elements for layer in self.layers), 0)

    @property
    def state_layers(self) -> tuple[Mixer, ...]:
        return tuple(layer.mixer for layer in self.layers if layer.mixer is not None)


def model_pass(model: ModelSpec) -> Pass:
    """Return the pass through the model itself, where its streams and a normed form of one stay alive."""
    return Pass((model.num_streams + 1) * model.hidden_size, model.layers)


def drafter_pass(model: ModelSpec) -> Pass | None:
    """Return the pass through the drafter, or None without one.

    A prediction head also keeps the model's hidden states alive. Before its first layer it joins them with the tokens'
    embeddings: both normed, and side by side. An assistant joins them as they are.
    """
    drafter = model.drafter
    if drafter is None:
        return None
    if drafter.model is not None:
        own = model_pass(drafter.model)
        return replace(own, join_elements=4 * drafter.hidden_elements)
    return Pass(3 * drafter.hidden_elements, drafter.layers, 4 * drafter.hidden_elements)


def with_distinct_layers(model: ModelSpec) -> ModelSpec:
    """Return the model with one of each kind of layer: its peak is the same, and it is quicker to search."""
    drafter = model.drafter
    if drafter is not None:
        draft = None if drafter.model is None else with_distinct_layers(drafter.model)
        drafter = replace(drafter, layers=tuple(dict.fromkeys(drafter.layers)), model=draft)
    return replace(model, layers=tuple(dict.fromkeys(model.layers)), drafter=drafter)


LOGIT_COPIES = 9
"""Floats per logit while sampling: raw, float32 and processed copies, a sort with indices; 8 measured with top-p."""

NATIVE_LOGIT_COPIES = 4
"""Floats per logit if the sampling kernel is no reference: it sorts in its own scratch memory, or not at all."""

SCORE_COPIES = 4
"""Floats per logit for log-probabilities, which need no sort; 4.25 were measured, and a quarter more is counted."""

PROMPT_POSITIONS = 32
"""Positions whose prompt log-probabilities are computed at a time, however few rows there are."""


def activation_bytes(
    model: ModelSpec,
    dtype: str,
    tokens: int,
    rows: int,
    max_model_len: int,
    gathers_states: bool,
    tokens_per_row: int = 1,
    native: Collection[str] = (),
    threads: int = 1,
    triton: Collection[str] = (),
    kv_cache_dtype: str | None = None,
    ukernels: Mapping[str, Collection[str]] | None = None,
) -> int:
    """Return the peak bytes of one step of `tokens` tokens in `rows` rows, besides weights and cache.

    Encoding images is not included. The result counts these as alive at once: the results of the model's calls, as long
    as they are needed; or, after the last layer, the residual stream and its normed form, and the logits with their
    copies while sampling. Logits are those of `tokens_per_row` positions per row, each with its drafts, and at least
    those whose prompt log-probabilities are computed at a time. A quarter more is added, since allocators keep some of
    the freed memory.

    `native` are the operations with a native kernel, whose scratch on `threads` threads is kept from step to step, and
    `triton` those with a Triton kernel, whose scratch is freed with each call. If any of the model's operations has a
    reference, which dequantizes what it reads and allocates more, the layers are counted at their upper bound: the
    residual stream, and of the largest layer all intermediate results, each with a float32 copy, and the allocations of
    its kernels, every token in one expert; or the same of the drafter.

    `ukernels` are the micro-kernels that each operation may choose, None: all of the table. `kv_cache_dtype` is that of
    keys and values, None: the model's. `gathers_states` is true if a decode step gathers
    all rows' states into one tensor, as the references do on a GPU.
    """
    with_kernel = {*native, *triton}
    has_references = bool({*model.ops} - with_kernel - ops_called_by("encoder"))
    width = DTYPE_BYTES[dtype]
    element = width + 4 if has_references else width
    target, drafter = model_pass(model), drafter_pass(model)

    def scratch(layer: LayerSpec) -> int:
        """Return the scratch memory of the largest reference."""
        return reference_scratch(
            layer,
            with_kernel,
            tokens,
            max_model_len,
            kv_bytes=bytes_while_read(kv_cache_dtype or dtype),
            is_quantized=model.quantization is not None,
            states=rows if gathers_states else 1,
            gathering_ranks=model.ranks if model.gathers_inputs else 0,
        )

    def layers_of(way: Pass) -> int:
        widest = max(
            (
                tokens
                * (layer.activation_elements + (0 if "moe" in with_kernel else _expert_elements(layer)))
                * element
                + scratch(layer)
                for layer in way.layers
            ),
            default=0,
        )
        return max(widest, tokens * way.join_elements * element)

    # A drafter's logits are of one position per row, so they determine the peak only if rows of its head are copied.
    copies = NATIVE_LOGIT_COPIES if "sample" in with_kernel else LOGIT_COPIES
    floats = max(min(tokens, rows * tokens_per_row) * copies, min(tokens, PROMPT_POSITIONS) * SCORE_COPIES)
    logits = floats * model.vocab_size * 4
    picked = picked_bytes(model, min(tokens, rows), element, copies)
    peak = max(called_bytes(model, width, tokens), tokens * target.kept_elements * element + logits, picked)
    if has_references:
        passes = [target] if drafter is None else [target, drafter]
        peak = max(
            peak,
            *(tokens * calls_of_pass.kept_elements * element + layers_of(calls_of_pass) for calls_of_pass in passes),
        )
    positions = sampled_positions(tokens, rows, tokens_per_row)
    layers = target.layers + (() if drafter is None else drafter.layers)
    peak += triton_scratch(
        layers,
        (model.hidden_size, model.vocab_size),
        triton,
        tokens=tokens,
        rows=rows,
        decode_tokens=min(tokens, rows * tokens_per_row),
        positions=positions,
        element_bytes=width,
        in_order=model.is_in_order,
    )
    return peak + peak // 4 + scratch_bytes(model, tokens, positions, max_model_len, native, threads, ukernels)


def called_bytes(model: ModelSpec, width: int, tokens: int) -> int:
    """Return the bytes of the results of a step's calls that are alive at once, in a dtype of `width` bytes.

    Two more results as wide as the residual stream are added: Python holds the arguments of the functions on its stack.
    """
    drafter = model.drafter
    calls = [model.calls]
    if drafter is not None:
        calls += [drafter.draft_calls, drafter.step_calls]
    return max(call.arena_bytes(width, tokens) for call in calls) + tokens * 2 * model.hidden_size * width


def picked_bytes(model: ModelSpec, rows: int, element: int, copies: int) -> int:
    """Return the bytes of an assistant's logits if it computes those of some tokens alone; else 0.

    Each row has copies of its tokens' rows of the LM head, their logits and ids, and logits of the whole vocabulary.
    """
    draft = None if model.drafter is None else model.drafter.model
    if draft is None or draft.target is None or not draft.target.picked_tokens:
        return 0
    picked = draft.target.picked_tokens * (draft.hidden_size * element + 4 + 8)
    return rows * (picked + model.vocab_size * (1 + copies) * 4)


def scratch_bytes(
    model: ModelSpec,
    tokens: int,
    positions: int,
    max_model_len: int,
    native: Collection[str],
    threads: int,
    ukernels: Mapping[str, Collection[str]] | None = None,
) -> int:
    """Return the bytes that native kernels keep from step to step.

    The steps have `tokens` tokens and sample `positions`. `ukernels` is as for `activation_bytes`.
    """
    drafter = drafter_pass(model)
    layers = model_pass(model).layers + (() if drafter is None else drafter.layers)
    head = (model.hidden_size, model.vocab_size)
    group_size = None if model.quantization is None else model.quantization.group_size
    return native_scratch(
        layers,
        head,
        native,
        tokens,
        positions,
        max_model_len,
        threads,
        model.is_in_order,
        group_size=group_size or 0,
        ukernels=ukernels or {},
    )


def sampled_positions(tokens: int, rows: int, tokens_per_row: int) -> int:
    """Return the largest number of positions whose logits a step of `tokens` tokens has at once."""
    return min(tokens, max(rows * tokens_per_row, PROMPT_POSITIONS))


def _expert_elements(layer: LayerSpec) -> int:
    return 0 if layer.experts is None else layer.experts.activation_elements


SMALL_SEGMENT, LARGE_SEGMENT = 2 * MiB, 20 * MiB
"""Sizes of the segments that torch's caching allocator takes for tensors of up to 1 MiB, and of 1 to 10 MiB.

Each pool has its own segments, and one of each kind may be nearly empty.
"""

WORKSPACE, HOPPER_WORKSPACE = 8320 * KiB, 32 * MiB
"""Workspace of cuBLAS per stream with matmuls: before compute capability 9.0, and from 9.0 on."""

LT_WORKSPACE = 4 * MiB
"""Workspace of cuBLASLt before 9.0; from 9.0 on it is as large as cuBLAS's."""


def pool_bytes(peak: int) -> int:
    """Return the bytes of a pool for `peak` bytes at once: a quarter more, and a segment of each kind."""
    return peak + peak // 4 + SMALL_SEGMENT + LARGE_SEGMENT if peak else 0


def workspace_bytes(capability: int | None, streams: int) -> int:
    """Return the bytes of workspaces on `streams` streams: where steps run, and where graphs are captured."""
    if capability is not None and capability >= 90:
        return streams * 2 * HOPPER_WORKSPACE
    return streams * (WORKSPACE + LT_WORKSPACE)
