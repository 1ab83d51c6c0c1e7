"""Launches of the state layers' operations.

Scans keep `num_stages` at 1: on devices of capability 9.0, pipelined ones of 4 or more warps and blocks of 64 rows have
been seen to write NaN into other memory.
"""

from __future__ import annotations

from ostinato.ops.launch_tables.launch import SPAN, Launch, power_of_two
from ostinato.ops.sizes import SCAN_CHUNK, chunk_length

FEW_PROGRAMS = 4096
"""Largest number of rows times heads for which a head is split finer, so that each multiprocessor has several blocks.
"""

CONV_TOKENS = 8
"""Tokens of a prompt in a program of the convolution."""

CONV_CHANNELS = 256

MAX_TAPS = 7
"""Most taps of a convolution: the six inputs before a token stay in registers."""

DELTA_TOKENS = 16
"""Tokens of a prompt in a chunk of a delta net's scan. Checkpoints are at multiples of 16, so each ends a chunk."""

MIN_DOT = 16
"""Smallest side of a matmul."""


def token_block(tokens: int) -> int:
    """Return the block size for a row's tokens."""
    return power_of_two(tokens)


def state_update_launches(
    *, rows: int, num_heads: int, head_dim: int, state_size: int, capability: int
) -> tuple[Launch, ...]:
    """Return the launch for decode rows, in which a thread holds 16 or 32 elements of the state.

    Wide states have more warps. A block of one warp would have fewer registers than 16-bit states need that are rounded
    with noise.
    """
    channels = power_of_two(head_dim, most=4 if rows * num_heads <= FEW_PROGRAMS else 16)
    columns = power_of_two(state_size)
    warps = power_of_two(channels * columns // 1024, most=4)
    blocks = {"CHANNELS": channels, "COLUMNS": columns}
    return (Launch("state_update_kernel", blocks, warps, registers=128 if warps == 1 else None),)


def selective_update_launches(*, rows: int, channels: int, state_size: int, capability: int) -> tuple[Launch, ...]:
    """Return the launch for decode rows, in which a thread holds up to 8 elements of the state."""
    columns = power_of_two(state_size)
    most = 32 if rows * channels <= 32 * FEW_PROGRAMS else 64
    block = power_of_two(channels, most=max(1, most * 16 // columns))
    warps = power_of_two(block * columns // 256, most=4)
    return (Launch("selective_update_kernel", {"CHANNELS": block, "COLUMNS": columns}, warps),)


def selective_scan_launches(*, channels: int, state_size: int, capability: int) -> tuple[Launch, ...]:
    """Return the launch for prompts, token by token: few channels for a program, many programs for the GPU."""
    columns = power_of_two(state_size)
    block = power_of_two(channels, most=max(1, 512 // columns))
    warps = power_of_two(block * columns // 256, most=4)
    return (Launch("selective_scan_kernel", {"CHANNELS": block, "COLUMNS": columns}, warps, num_stages=1),)


def causal_conv1d_launches(*, channels: int, capability: int) -> tuple[Launch, ...]:
    """Return the launches for decode rows, for prompts' tokens and their states, each called if there are rows."""
    block = power_of_two(channels, most=CONV_CHANNELS)
    warps = power_of_two(block // 128)
    return (
        Launch("conv_decode_kernel", {"CHANNELS": block}, warps),
        Launch("conv_prefill_kernel", {"CHANNELS": block, "TOKENS": CONV_TOKENS, "SPAN": SPAN}, warps),
        Launch("conv_states_kernel", {"CHANNELS": block}, warps),
    )


def ssd_scan_launches(
    *, chunk_size: int, head_dim: int, state_size: int, element_bytes: int, capability: int
) -> tuple[Launch, ...]:
    """Return the launch for prompts, in which a program holds the states of 16 or 32 channels.

    Inputs have `element_bytes` each. Chunks divide the model's, and have at most `SCAN_CHUNK` tokens: longer ones, or
    more channels, need more registers than there are. The operands of float32 matmuls take twice those of TF32.
    """
    length, columns = chunk_length(chunk_size, SCAN_CHUNK), power_of_two(state_size, least=MIN_DOT)
    is_wide = element_bytes == 4 or columns > 128
    blocks = {
        "LENGTH": length,
        "TOKENS": power_of_two(length, least=MIN_DOT),
        "CHANNELS": power_of_two(head_dim, least=MIN_DOT, most=16 if is_wide else 32),
        "COLUMNS": columns,
    }
    return (Launch("ssd_scan_kernel", blocks, num_warps=8 if is_wide else 4, num_stages=1),)


def delta_update_launches(
    *, rows: int, num_heads: int, key_dim: int, value_dim: int, capability: int
) -> tuple[Launch, ...]:
    """Return the launch for decode rows, in which a thread holds 32 elements of the state."""
    keys = power_of_two(key_dim)
    columns = power_of_two(value_dim, most=16 if rows * num_heads <= FEW_PROGRAMS else 32)
    warps = power_of_two(keys * columns // 1024, most=8)
    return (Launch("delta_update_kernel", {"KEYS": keys, "COLUMNS": columns}, warps),)


def delta_scan_launches(
    *, key_dim: int, value_dim: int, element_bytes: int, capability: int, per_channel: bool = False
) -> tuple[Launch, ...]:
    """Return the launches for prompts: the work of chunks that needs no state, and the pass along rows.

    Inputs have `element_bytes` each. A program of the pass holds the states of 16 value channels; more need more
    registers than there are. Operands of float32 take twice those of TF32. So do decays if each key channel has one
    (`per_channel`).
    """
    chunk = {"TOKENS": DELTA_TOKENS, "KEYS": power_of_two(key_dim, least=MIN_DOT)}
    of_chunk = chunk | {"COLUMNS": power_of_two(value_dim, least=MIN_DOT, most=64)}
    of_row, warps = chunk | {"COLUMNS": MIN_DOT}, 8 if element_bytes == 4 else 4
    registers = 255 if per_channel and warps == 4 else None
    return (
        Launch("delta_chunk_kernel", of_chunk | {"SPAN": SPAN}, warps, num_stages=1, registers=registers),
        Launch("delta_scan_kernel", of_row, warps, num_stages=1),
    )
