"""Rules for the number of window blocks that requests and prefixes need.

A window block is to layers with a sliding window what a block is to the others: it holds `block_size` tokens of them,
and a request frees it when no token to come sees any of it.

With B tokens in a block, the first of the tokens that follow `position` may be any of its block: so a request keeps the
last ceil((window - 1) / B) window blocks before that block, which a request that starts at the block's first token
needs as well. A step of t tokens adds at most ceil(t / B) + 1.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SlidingWindowSpec:
    """Sizes that the number of window blocks depends on.

    `window`: positions that a token sees, itself the last, in the layer that sees most of those with a window.
    `step_tokens`: most tokens of a step, of all its batch rows together.
    """

    window: int
    block_size: int
    step_tokens: int

    @property
    def blocks_per_window(self) -> int:
        """Window blocks before a block boundary that a request needs to continue from there."""
        return -(-(self.window - 1) // self.block_size)

    @property
    def blocks_per_request(self) -> int:
        """Window blocks of a request with a step of up to a block's tokens.

        They are its window's, and two that the tokens are in, or the one that they are in and that of the step after
        it.
        """
        return self.blocks_per_window + 2

    @property
    def shared_blocks(self) -> int:
        """Window blocks beyond `own` that the batch rows of a step need together.

        With t tokens, a batch row needs (t - 1) // B more.
        """
        return (self.step_tokens - 1) // self.block_size

    def first_block(self, position: int) -> int:
        """Return the first window block that the tokens from `position` on need, as the number of its block."""
        return max(0, position // self.block_size - self.blocks_per_window)

    def blocks_needed(self, num_blocks: int, num_requests: int = 1) -> int:
        """Return the window blocks that let `num_requests` requests of `num_blocks` blocks each always continue."""
        own = min(num_blocks, self.blocks_per_request)
        return num_requests * own + min(self.shared_blocks, num_requests * (num_blocks - own))
