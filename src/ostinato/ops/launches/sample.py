"""Launches of `sample`."""

from __future__ import annotations

from ostinato.ops.launches.table import MAX_WARPS, Launch, cdiv, power_of_two

SAMPLE_BLOCK = 1024
"""Logits in a block with one best token."""

THRESHOLD_BLOCK = 4096
"""Logits that the search for one row's threshold takes at a time."""


def sample_launches(*, vocab_size: int, capability: int) -> tuple[Launch, ...]:
    """Return the launches of `sample`.

    If tokens are sampled, a call launches the first two once more after the third.
    """
    blocks = num_blocks(vocab_size)
    return (
        Launch("best_of_blocks", {"BLOCK": SAMPLE_BLOCK}),
        Launch("best_of_rows", {"BLOCKS": power_of_two(blocks)}, num_warps=1),
        Launch("find_thresholds", {"BLOCK": THRESHOLD_BLOCK}, num_warps=MAX_WARPS),
    )


def num_blocks(vocab_size: int) -> int:
    return cdiv(vocab_size, SAMPLE_BLOCK)
