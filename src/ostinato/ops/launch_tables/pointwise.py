"""Launches of the operations that pass over activations: norms, embeddings, joins, positions and `sample`.

A program takes whole rows of up to 8192 elements in registers: 16 to 32 elements per thread.
"""

from __future__ import annotations

from typing import Protocol

from ostinato.ops.launch_tables.launch import MAX_WARPS, Launch, cdiv, power_of_two

ELEMENTS_PER_PROGRAM = 2048
"""Elements of the short rows that a program takes together: enough to keep a block of four warps busy."""

COLUMNS = 1024
"""Elements of a row that a copying program takes: 4 to 8 per thread, each loaded at once."""


class SizeRule(Protocol):
    """Rule for the launches of a kernel by the elements of a row."""

    def __call__(self, *, size: int, capability: int) -> tuple[Launch, ...]: ...


def _whole_rows(kernel: str) -> SizeRule:
    """Return the rule of a kernel whose programs take whole rows of `size` elements, several if they are short.

    A launch does not depend on the number of rows, so that a row's sum has one order.
    """

    def rule(*, size: int, capability: int) -> tuple[Launch, ...]:
        columns = power_of_two(size, least=16)
        at_once = max(1, ELEMENTS_PER_PROGRAM // columns)
        warps = power_of_two(columns * at_once // 512, most=16)
        return (Launch(kernel, {"ROWS": at_once, "COLUMNS": columns}, warps),)

    return rule


def _parts_of_rows(kernel: str) -> SizeRule:
    """Return the rule of a kernel whose programs take a part of one row."""

    def rule(*, size: int, capability: int) -> tuple[Launch, ...]:
        columns = power_of_two(size, least=16, most=COLUMNS)
        return (Launch(kernel, {"COLUMNS": columns}, power_of_two(columns // 256, most=4)),)

    return rule


rms_norm_launches = _whole_rows("rms_norm_kernel")
gated_rms_norm_launches = _whole_rows("gated_rms_norm_kernel")
layer_norm_launches = _whole_rows("layer_norm_kernel")

embedding_launches = _parts_of_rows("embedding_kernel")
clip_launches = _parts_of_rows("clip_kernel")
concat_launches = _parts_of_rows("concat_kernel")
gated_activation_launches = _parts_of_rows("gated_activation_kernel")
inject_media_launches = _parts_of_rows("inject_media_kernel")
add_launches = _parts_of_rows("add_kernel")
multiply_launches = _parts_of_rows("multiply_kernel")


ANGLES_BLOCK = 1024
"""Elements of a program."""


def rotary_launches(
    *, num_heads: int, num_kv_heads: int, head_dim: int, rotated: int, capability: int
) -> tuple[Launch, ...]:
    """Return the launch that rotates `rotated` elements of each head; the others pass through."""
    blocks = {**_heads(max(num_heads, num_kv_heads), head_dim, rotated), "WIDTH": power_of_two(head_dim)}
    return (Launch("rotate_and_store", blocks),)


def rotate_launches(*, num_heads: int, head_dim: int, rotated: int, capability: int) -> tuple[Launch, ...]:
    return (Launch("rotate_tokens", _heads(num_heads, head_dim, rotated)),)


def rotary_angles_launches(*, capability: int) -> tuple[Launch, ...]:
    """Return the launch of `axial_angles` and `rotary_angles`, with few elements since float64 takes registers."""
    return (Launch("write_angles", {"BLOCK": 256}),)


def weighted_embedding_launches(*, count: int, capability: int) -> tuple[Launch, ...]:
    """Return the launch for sums of `count` vectors each."""
    return (Launch("add_vectors", {"COUNT": count, "BLOCK": ANGLES_BLOCK}),)


def _heads(num_heads: int, head_dim: int, rotated: int) -> dict[str, int]:
    half = rotated // 2
    return {
        "HEAD_DIM": head_dim,
        "HALF": half,
        "HALF_WIDTH": power_of_two(half),
        "REST_WIDTH": power_of_two(head_dim - rotated),
        "HEADS": power_of_two(num_heads, most=power_of_two(max(ANGLES_BLOCK // head_dim, 1))),
    }


SAMPLE_BLOCK = 1024
"""Logits in a block with one best token."""

THRESHOLD_BLOCK = 4096
"""Logits that the search for one row's threshold takes at a time."""


def sample_launches(*, vocab_size: int, capability: int) -> tuple[Launch, ...]:
    """Return the launches of `sample`. Sampled tokens need the first two once more after the third."""
    blocks = num_blocks(vocab_size)
    return (
        Launch("best_of_blocks", {"BLOCK": SAMPLE_BLOCK}),
        Launch("best_of_rows", {"BLOCKS": power_of_two(blocks)}, num_warps=1),
        Launch("find_thresholds", {"BLOCK": THRESHOLD_BLOCK}, num_warps=MAX_WARPS),
    )


def num_blocks(vocab_size: int) -> int:
    return cdiv(vocab_size, SAMPLE_BLOCK)
