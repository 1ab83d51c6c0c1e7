"""What graphs take: the persistent buffers that they read, and the arena that they compute in."""

from __future__ import annotations

from dataclasses import dataclass

from ostinato.layers.step import step_sizes, step_table, table_bytes
from ostinato.plan.limits import Limits
from ostinato.plan.memory.passes import Pass, drafter_pass, own_pass
from ostinato.plan.model import DTYPE_BYTES, ModelSpec


@dataclass(frozen=True)
class LargestGraphs:
    """What the memory of graphs depends on: the `tokens` of the largest piecewise graph and the `rows` of the largest
    full one, whose rows have at most `tokens_per_row` tokens; 0 where there is none."""

    tokens: int
    rows: int
    tokens_per_row: int

    @property
    def most_tokens(self) -> int:
        """Tokens of the largest graph of all."""
        return max(self.tokens, self.rows * self.tokens_per_row)


def graph_bytes(
    model: ModelSpec, dtype: str, largest: LargestGraphs, *, limits: Limits, block_size: int, gathers_states: bool
) -> int:
    """Bytes of all graphs together, the drafter's among them, with the buffers for any step within `limits`; 0 if
    there are none.

    One arena serves all graphs of a model, so the largest decides. `gathers_states`: whether those of a decode step
    gather all rows' states.
    """
    if largest.most_tokens == 0:
        return 0
    # Drafts end at max_model_len as requests do, so no block table is longer for them.
    max_blocks = -(-limits.max_model_len // block_size)
    gathered_rows = limits.max_num_seqs if gathers_states else 0
    tokens, takes_images = limits.max_num_batched_tokens, model.vision is not None
    buffers = buffer_bytes(tokens, limits.max_num_seqs, max_blocks, largest.tokens_per_row, takes_images)
    arena = arena_bytes(model, dtype, largest.most_tokens, gathered_rows)
    return buffers + arena + drafter_graph_bytes(model, dtype, largest, limits, max_blocks, gathered_rows)


def buffer_bytes(tokens: int, rows: int, max_blocks: int, slots_per_request: int, takes_images: bool = False) -> int:
    """Bytes of the buffers that hold a step's inputs."""
    return table_bytes(step_table(takes_images), step_sizes(rows, tokens, max_blocks, slots_per_request))


def arena_bytes(model: ModelSpec, dtype: str, tokens: int, gathered_rows: int) -> int:
    """Bytes that a captured step of `tokens` tokens keeps alive at once, at the most.

    A prediction head follows the model in its graphs; a draft model has graphs of its own.
    """
    head = drafter_pass(model) if model.drafter is not None and model.drafter.method == "mtp" else None
    passes = [own_pass(model)] if head is None else [own_pass(model), head]
    return _with_gaps(max(_peak_bytes(each, dtype, tokens, gathered_rows) for each in passes))


def drafter_graph_bytes(
    model: ModelSpec, dtype: str, largest: LargestGraphs, limits: Limits, max_blocks: int, gathered_rows: int
) -> int:
    """Bytes of the graphs that make drafts, with their own buffers.

    Full ones have one token per row. Only a draft model has piecewise ones too, for prompts. A prediction head reads
    one hidden state per row from one more buffer.
    """
    drafter, way = model.drafter, drafter_pass(model)
    if drafter is None or way is None:
        return 0
    is_head = drafter.method == "mtp"
    tokens = largest.rows if is_head else max(largest.rows, largest.tokens)
    if tokens == 0:
        return 0
    most_tokens = limits.max_num_seqs if is_head else limits.max_num_batched_tokens
    buffers = buffer_bytes(most_tokens, limits.max_num_seqs, max_blocks, slots_per_request=1)
    buffers += limits.max_num_seqs * drafter.hidden_elements * DTYPE_BYTES[dtype]
    return buffers + _with_gaps(_peak_bytes(way, dtype, tokens, gathered_rows))


def _peak_bytes(way: Pass, dtype: str, tokens: int, gathered_rows: int) -> int:
    """As in `activation_bytes`: what is kept and the greediest layer's intermediate results, each also in float32.

    Not counted is what kernels allocate while they run, which is no part of a graph, except for states that a captured
    `state_update` gathers of `gathered_rows` rows, three in float32 each.
    """
    elements = way.kept_elements + way.widest_elements
    state = max((mamba2.ssm_state_elements for mamba2 in way.state_layers), default=0)
    return tokens * elements * (DTYPE_BYTES[dtype] + 4) + gathered_rows * 3 * state * 4


def _with_gaps(peak: int) -> int:
    """A quarter more, for what fits into no gap that is free."""
    return peak + peak // 4
