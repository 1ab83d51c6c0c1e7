"""How many panes requests and prefixes need. A pane is to layers with a sliding window what a block is to the others:
it holds `block_size` tokens of them, and a request lets go of it when no token to come sees any of it.

With B tokens in a block, the first of the tokens that follow `position` may be any of its block: so a request keeps the
last ceil((window - 1) / B) panes before that block, which is also what a text that goes on at the block's beginning
needs. A step of t tokens adds at most ceil(t / B) + 1.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PaneRules:
    """`window`: positions that a token sees, its own the last, in the layer that sees most of those with a window.
    `step_tokens`: most tokens of a step, of all its rows together."""

    window: int
    block_size: int
    step_tokens: int

    @property
    def of_window(self) -> int:
        """Panes before a block boundary that a text needs to go on from there."""
        return -(-(self.window - 1) // self.block_size)

    @property
    def own(self) -> int:
        """Panes of a request with a step of up to a block's tokens: its window's, and two that the tokens are in, or
        the one that they are in and that of a step ahead."""
        return self.of_window + 2

    @property
    def shared(self) -> int:
        """Panes beyond those that all rows of a step need together: of t tokens, a row needs (t - 1) // B more."""
        return (self.step_tokens - 1) // self.block_size

    def first(self, position: int) -> int:
        """The first pane that the tokens from `position` on need, as the number of its block in the text."""
        return max(0, position // self.block_size - self.of_window)

    def needed(self, num_blocks: int, num_requests: int = 1) -> int:
        """Panes with which so many requests of `num_blocks` blocks each can always go on."""
        own = min(num_blocks, self.own)
        return num_requests * own + min(self.shared, num_requests * (num_blocks - own))
