"""What graphs take: the persistent buffers that they read, and the arena that they compute in."""

from __future__ import annotations

from ostinato.plan.limits import Limits
from ostinato.plan.model import DTYPE_BYTES, ModelSpec


def graph_bytes(
    model: ModelSpec,
    dtype: str,
    *,
    tokens: int,
    limits: Limits,
    block_size: int,
    slots_per_request: int,
    gathers_states: bool,
) -> int:
    """Bytes of all graphs of up to `tokens` tokens together, with the buffers for any step within `limits`; 0 if
    `tokens` is.

    One arena serves all graphs, so the largest decides.
    """
    if tokens == 0:
        return 0
    max_blocks = -(-limits.max_model_len // block_size)
    buffers = buffer_bytes(limits.max_num_batched_tokens, limits.max_num_seqs, max_blocks, slots_per_request)
    return buffers + arena_bytes(model, dtype, tokens, limits.max_num_seqs if gathers_states else 0)


def buffer_bytes(tokens: int, rows: int, max_blocks: int, slots_per_request: int) -> int:
    """Bytes of the buffers that hold a step's inputs.

    int64 per token: id, position and cell of its key. int32 per row: first token (and one more for the end), first
    position, context length, read slot, write slots and block table.
    """
    return 8 * 3 * tokens + 4 * (rows * (4 + slots_per_request + max(max_blocks, 1)) + 1)


def arena_bytes(model: ModelSpec, dtype: str, tokens: int, gathered_rows: int) -> int:
    """Bytes that a captured step of `tokens` tokens keeps alive at once, at the most.

    As in `activation_bytes`: the residual stream, its normed form and the greediest layer's intermediate results, each
    also in float32, and a quarter more for gaps. Not counted is what kernels allocate while they run, which is no part
    of a graph, except for states that a captured `state_update` gathers of `gathered_rows` rows, three in float32 each.
    """
    elements = 2 * model.hidden_size + max((layer.activation_elements for layer in model.layers), default=0)
    state = max((mamba2.ssm_state_elements for mamba2 in model.state_layers), default=0)
    peak = tokens * elements * (DTYPE_BYTES[dtype] + 4) + gathered_rows * 3 * state * 4
    return peak + peak // 4
