"""Launches of `attention_launches` and `encoder_attention_launches`."""

from __future__ import annotations

from ostinato.ops.launch_tables.launch import SPAN, Launch, power_of_two

PROGRAMS = 512
"""Programs that keep a GPU of 100 to 150 multiprocessors busy.

If a step's rows fit into a tile each, as in decoding, and it has fewer programs, it splits its keys into segments.
"""

MAX_SEGMENTS = 16
MIN_SEGMENT = 128
"""Fewest keys of a segment, so that combining segments costs little in comparison."""

MAX_COMBINED = 256
"""Elements of a head whose segments a program combines."""

# Most query rows of a tile, keys at a time, warps and stages, by bytes of an element and width of a head. float32 is
# multiplied in three parts, which takes registers. Heads of more than 512 elements have a rest after the first 512.
TILES = {
    (2, 64): (64, 32, 4, 2),
    (2, 128): (64, 32, 4, 2),
    (2, 256): (64, 32, 8, 2),
    (2, 512): (32, 16, 8, 2),
    (4, 64): (32, 32, 4, 1),
    (4, 128): (16, 16, 8, 1),
    (4, 256): (16, 16, 8, 1),
    (4, 512): (32, 16, 8, 1),
}

PARTS = {(4, 128): 64, (4, 256): 64, (4, 512): 32}
"""Elements of keys that are multiplied at a time, if that is not all of them."""

# Tiles for GPUs whose matmuls read operands from shared memory and take no registers for them.
WIDE_TILES = TILES | {(2, 64): (64, 64, 4, 2), (2, 128): (64, 64, 4, 2), (2, 512): (32, 32, 8, 2)}
REGISTERS = {(2, 64): (None, 255), (2, 128): (168, None), (4, 64): (168, 255)}
"""Registers of a thread, in tiles of fewer rows than the most and in the others, for cases in which it would spill."""

MAX_WIDTH = max(width for _, width in TILES)
MAX_REST = 64
"""Elements of a head after the first `MAX_WIDTH`, in a separate tile: latents have a part that heads share."""

MAX_HEAD_DIM = MAX_WIDTH + MAX_REST
"""Largest number of elements of a head that the tiles hold."""

READS_SHARED_MEMORY = (90, 100)
"""Compute capabilities of GPUs whose matmuls read operands from shared memory."""


def attention_launches(
    *,
    tokens: int,
    rows: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    max_context: int,
    block_size: int,
    element_bytes: int,
    capability: int,
    window: int | None = None,
) -> tuple[Launch, ...]:
    """Return the launches of a step of `rows` rows of up to `max_context` tokens.

    `max_context` counts as many keys as their block tables have room for; a token sees those of them in its `window`.
    """
    group = num_heads // num_kv_heads
    width = power_of_two(head_dim, least=16, most=MAX_WIDTH)
    rest = power_of_two(head_dim - width, least=16) if head_dim > width else 0
    most, keys, warps, stages = _tile(width, element_bytes, capability)
    of_smaller, of_largest = _registers(width, element_bytes)
    of_row = -(-tokens // max(rows, 1)) * group
    # All query heads of a token share a tile.
    tile_rows = max(power_of_two(of_row, least=16, most=most), power_of_two(group))
    segments, seen = 1, max_context if window is None else min(max_context, window)
    if of_row <= tile_rows:
        wanted = min(PROGRAMS // (max(rows, 1) * num_kv_heads), seen // MIN_SEGMENT, MAX_SEGMENTS)
        segments = power_of_two(max(wanted, 1) + 1) // 2
    head = {"HEAD_DIM": head_dim, "WIDTH": width, "SEGMENTS": segments}
    blocks = {"REST": rest, "PART": PARTS.get((element_bytes, width), 0), "GROUP": group, "BLOCK_SIZE": block_size}
    blocks |= {"ROWS": tile_rows, "KEYS": keys, "SPAN": SPAN}
    registers = of_smaller if tile_rows < most else of_largest
    launches = (Launch("attend", head | blocks, warps, stages, registers),)
    at_once = head | {"WIDTH": min(width, MAX_COMBINED)}
    return launches if segments == 1 else (*launches, Launch("combine", at_once, num_warps=2))


def segments_of(launches: tuple[Launch, ...]) -> int:
    """Return the number of segments that the keys of a row are split into."""
    return launches[0].blocks["SEGMENTS"]


def encoder_attention_launches(*, head_dim: int, element_bytes: int, capability: int) -> tuple[Launch, ...]:
    width = power_of_two(head_dim, least=16)
    rows, keys, warps, stages = _tile(width, element_bytes, capability)
    blocks = {"HEAD_DIM": head_dim, "WIDTH": width, "ROWS": rows, "KEYS": keys, "SPAN": SPAN}
    return (Launch("attend_in_segment", blocks, warps, stages, _registers(width, element_bytes)[1]),)


def _tile(width: int, element_bytes: int, capability: int) -> tuple[int, int, int, int]:
    tiles = WIDE_TILES if capability in READS_SHARED_MEMORY else TILES
    return tiles[element_bytes, power_of_two(width, least=64)]


def _registers(width: int, element_bytes: int) -> tuple[int | None, int | None]:
    return REGISTERS.get((element_bytes, power_of_two(width, least=64)), (None, None))
