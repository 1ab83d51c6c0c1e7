"""Memory of graphs: the persistent buffers that they read, and the arena that they compute in."""

from __future__ import annotations

from dataclasses import dataclass

from ostinato.ops.operations import GraphBackend, ops_called_by
from ostinato.ops.sizes import DTYPE_BYTES
from ostinato.ops.step_inputs import step_sizes, step_table, table_bytes
from ostinato.plan.graphs.arena import CallTrace
from ostinato.plan.limits import Limits
from ostinato.plan.memory.activations import Pass, drafter_pass, model_pass, pool_bytes
from ostinato.plan.memory.kernel_scratch import triton_scratch
from ostinato.plan.model import ModelSpec


@dataclass(frozen=True)
class LargestGraphs:
    """Sizes that determine the memory of graphs.

    They are the `tokens` of the largest piecewise graph and the `rows` of the largest full one, whose rows have up to
    `tokens_per_row` tokens; 0 if there is none.
    """

    tokens: int
    rows: int
    tokens_per_row: int

    @property
    def most_tokens(self) -> int:
        """Tokens of the largest graph of all."""
        return max(self.tokens, self.rows * self.tokens_per_row)


@dataclass(frozen=True)
class Capture:
    """Method of capture: the `backend`, and the parts that piecewise graphs leave out (`splits`).

    `gathers_states` is true if graphs of a decode step gather all rows' states. For CUDA graphs `holds_references` is
    true if a reference is among their kernels, and `triton` are those of Triton.
    """

    backend: GraphBackend
    splits: frozenset[str]
    gathers_states: bool = False
    holds_references: bool = True
    triton: frozenset[str] = frozenset()


def graph_bytes(
    model: ModelSpec,
    dtype: str,
    largest: LargestGraphs,
    *,
    limits: Limits,
    block_size: int,
    capture: Capture,
    has_window_blocks: bool = False,
) -> int:
    """Return the bytes of all graphs, the drafter's included, with the buffers for any step within `limits`.

    0 if there are none. All graphs of a model share one arena, so the largest determines its size. For tapes the result
    is exact.
    """
    if largest.most_tokens == 0:
        return 0
    # Drafts end at max_model_len as requests do, so no block table is longer for them.
    most = -(-limits.max_model_len // block_size)
    max_blocks = most if any(not has_window_blocks or layer.window is None for layer in model.attention_layers) else 0
    max_window_blocks = most if has_window_blocks else 0
    tokens, takes_images = limits.max_num_batched_tokens, model.vision is not None
    buffers = buffer_bytes(
        tokens,
        limits.max_num_seqs,
        max_blocks,
        largest.tokens_per_row,
        takes_images,
        max_window_blocks,
        is_prefix_lm=model.is_prefix_lm,
    )
    gathered_rows = limits.max_num_seqs if capture.gathers_states else 0
    arena = arena_bytes(model, dtype, largest, capture, gathered_rows)
    return buffers + arena + drafter_graph_bytes(model, dtype, largest, limits, max_blocks, capture, max_window_blocks)


def buffer_bytes(
    tokens: int,
    rows: int,
    max_blocks: int,
    slots_per_request: int,
    takes_images: bool = False,
    max_window_blocks: int = 0,
    is_prefix_lm: bool = False,
) -> int:
    """Return the bytes of the buffers that hold a step's inputs."""
    sizes = step_sizes(rows, tokens, max_blocks, slots_per_request, max_window_blocks)
    return table_bytes(step_table(takes_images, max_window_blocks > 0, is_prefix_lm), sizes)


def arena_bytes(model: ModelSpec, dtype: str, largest: LargestGraphs, capture: Capture, gathered_rows: int = 0) -> int:
    """Return the bytes of the arena of the model's own graphs.

    A prediction head follows the model in its graphs, and so does what keeps the hidden state for an assistant; a draft
    model has separate graphs.
    """
    drafter = model.drafter
    followed_by = drafter if drafter is not None and drafter.starts_from_hidden else None
    if capture.backend == "tape":
        return _tape_bytes(model.calls if followed_by is None else followed_by.step_calls, dtype, largest, capture)
    if not capture.holds_references:
        calls = model.calls if followed_by is None else followed_by.step_calls
        return pool_bytes(_tape_bytes(calls, dtype, largest, capture) + _triton_bytes(model, dtype, largest, capture))
    head = drafter_pass(model) if followed_by is not None and followed_by.method == "mtp" else None
    passes = [model_pass(model)] if head is None else [model_pass(model), head]
    return max(_cuda_bytes(calls_of_pass, dtype, largest.most_tokens, gathered_rows) for calls_of_pass in passes)


def drafter_graph_bytes(
    model: ModelSpec,
    dtype: str,
    largest: LargestGraphs,
    limits: Limits,
    max_blocks: int,
    capture: Capture,
    max_window_blocks: int = 0,
) -> int:
    """Return the bytes of the graphs that make drafts, with their own buffers.

    Full ones have one token per row. Only a draft model has piecewise ones too, for prompts. A prediction head and an
    assistant read one hidden state per row from one more buffer.
    """
    drafter, way = model.drafter, drafter_pass(model)
    if drafter is None or way is None:
        return 0
    is_head = drafter.starts_from_hidden
    graphs = LargestGraphs(0 if is_head else largest.tokens, largest.rows, 1)
    if graphs.most_tokens == 0:
        return 0
    most_tokens = limits.max_num_seqs if is_head else limits.max_num_batched_tokens
    buffers = buffer_bytes(
        most_tokens,
        limits.max_num_seqs,
        max_blocks,
        slots_per_request=1,
        max_window_blocks=max_window_blocks,
        is_prefix_lm=drafter.model is not None and drafter.model.is_prefix_lm,
    )
    buffers += limits.max_num_seqs * drafter.hidden_elements * DTYPE_BYTES[dtype]
    if capture.backend == "tape":
        return buffers + _tape_bytes(drafter.draft_calls, dtype, graphs, capture)
    if not capture.holds_references:
        return buffers + pool_bytes(
            _tape_bytes(drafter.draft_calls, dtype, graphs, capture) + _triton_bytes(model, dtype, graphs, capture)
        )
    gathered_rows = limits.max_num_seqs if capture.gathers_states else 0
    return buffers + _cuda_bytes(way, dtype, graphs.most_tokens, gathered_rows)


def _tape_bytes(calls: CallTrace, dtype: str, largest: LargestGraphs, capture: Capture) -> int:
    """Return the bytes of tapes, which share an arena. It does not hold what kernels allocate while they run.

    The results of the same calls take as much in a CUDA graph.
    """
    width, full_tokens = DTYPE_BYTES[dtype], largest.rows * largest.tokens_per_row
    return max(
        calls.arena_bytes(width, full_tokens), calls.arena_bytes(width, largest.tokens, leaves_out=capture.splits)
    )


def _triton_bytes(model: ModelSpec, dtype: str, largest: LargestGraphs, capture: Capture) -> int:
    """Return the scratch memory of the largest call in a graph of Triton's kernels."""
    drafter = drafter_pass(model)
    return triton_scratch(
        model_pass(model).layers + (() if drafter is None else drafter.layers),
        (model.hidden_size, 0),
        # Graphs leave out a prompt's scan, and graphs of prompts leave out attention.
        capture.triton - ops_called_by("prefill"),
        tokens=largest.most_tokens,
        rows=largest.rows,
        decode_tokens=largest.rows * largest.tokens_per_row,
        positions=0,
        element_bytes=DTYPE_BYTES[dtype],
        in_order=model.is_in_order,
    )


def _cuda_bytes(way: Pass, dtype: str, tokens: int, gathered_rows: int) -> int:
    """Return the bytes of CUDA graphs with references among their kernels.

    The result is an estimate, as references allocate without a rule. As in `activation_bytes` it counts what stays
    alive and the largest layer's intermediate results, each also in float32. It adds the states that a captured
    recurrence gathers of `gathered_rows` rows, three in float32 each; and a quarter more for fragmentation.
    """
    elements = way.kept_elements + way.widest_elements
    state = max((mixer.state.recurrent_elements for mixer in way.state_layers), default=0)
    peak = (
        tokens * elements * (DTYPE_BYTES[dtype] + DTYPE_BYTES["float32"])
        + gathered_rows * 3 * state * DTYPE_BYTES["float32"]
    )
    return peak + peak // 4
