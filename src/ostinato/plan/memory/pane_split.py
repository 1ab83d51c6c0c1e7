"""Split of memory between blocks and window blocks. Pure functions of plain numbers."""

from __future__ import annotations

from dataclasses import dataclass

from ostinato.cache.pane_rules import SlidingWindowSpec


@dataclass(frozen=True)
class BlockDemand:
    """Needs of requests.

    `block` and `pane` are bytes of one block and one window block; `longest` and `expected` are the blocks of a request
    of max_model_len tokens and of a prefix of the expected length; `rows` are those of a step.
    """

    block: int
    pane: int
    rules: SlidingWindowSpec
    rows: int
    longest: int
    expected: int

    @property
    def prefix_panes(self) -> int:
        """Window blocks of a cached prefix."""
        return min(self.expected, self.rules.blocks_per_window)

    def pane_share(self, num_blocks: int) -> float:
        """Return the share that window blocks have of the memory of a request of `num_blocks` blocks."""
        panes = min(num_blocks, self.rules.blocks_per_request) * self.pane
        return panes / (panes + num_blocks * self.block)


def split_tables(tables: BlockDemand, room: int, holds_prefixes: bool) -> tuple[int, int]:
    """Return (blocks, window blocks) that `room` bytes are split into, without the null ones.

    There is room for one request of max_model_len tokens. Long requests have few window blocks for their blocks, short
    ones many. How long they will be is not known: with x of the memory for window blocks, and s the share that requests
    of one length would best have there, x / s of as many such requests as there could be run at once if x < s, and (1 -
    x) / (1 - s) otherwise. The x that is equally far from the best for prefixes of the expected length and for the
    longest requests is s_short / (s_short + 1 - s_long). Without prefixes to hold there are no more window blocks than
    `rows` requests can use.
    """
    rules, block, pane = tables.rules, tables.block, tables.pane
    short, long = tables.pane_share(tables.expected), tables.pane_share(tables.longest)
    wanted = int(room * (short / (short + 1 - long))) // pane
    most = wanted if holds_prefixes else rules.blocks_needed(tables.longest, tables.rows)
    panes = max(rules.blocks_needed(tables.longest), min(wanted, most, (room - tables.longest * block) // pane))
    return ((room - panes * pane) // block, panes) if block else (0, room // pane)


def prefixes_in(tables: BlockDemand, blocks: int, panes: int) -> int:
    """Return how many distinct prefixes fit in these blocks and window blocks in addition to running requests.

    Running requests have a prefix's length and fill all rows, but no more than half of each pool; one of max_model_len
    always fits.
    """
    rules, found = tables.rules, []
    if tables.block:
        running = max(min(tables.rows * tables.expected, blocks // 2), tables.longest)
        found.append((blocks - running) // tables.expected)
    if tables.prefix_panes:
        used = max(min(rules.blocks_needed(tables.expected, tables.rows), panes // 2), rules.blocks_needed(tables.longest))
        found.append((panes - used) // tables.prefix_panes)
    return max(0, min(found, default=0))
