"""How memory is split between blocks and panes. Pure functions of plain numbers."""

from __future__ import annotations

from dataclasses import dataclass

from ostinato.cache.pane_rules import PaneRules


@dataclass(frozen=True)
class Tables:
    """What requests need: `block` and `pane` are bytes of one of each, `longest` and `expected` the blocks of a request
    of max_model_len tokens and of a prefix of the expected length, and `rows` those of a step."""

    block: int
    pane: int
    rules: PaneRules
    rows: int
    longest: int
    expected: int

    @property
    def prefix_panes(self) -> int:
        """Panes of a prefix that is kept."""
        return min(self.expected, self.rules.of_window)

    def pane_share(self, num_blocks: int) -> float:
        """The part that panes have of the memory of a request of so many blocks."""
        panes = min(num_blocks, self.rules.own) * self.pane
        return panes / (panes + num_blocks * self.block)


def split_tables(tables: Tables, room: int, holds_prefixes: bool) -> tuple[int, int]:
    """(blocks, panes) that `room` bytes are split into, the null ones not among them. There is room for one request of
    max_model_len tokens.

    Long requests have few panes for their blocks, short ones many. How long they will be is not known: with x of the
    memory for panes, and s the part that requests of one length would best have there, x / s of as many such requests
    as there could be run at once where x < s, and (1 - x) / (1 - s) elsewhere. The x that is equally far from the best
    for prefixes of the expected length and for the longest requests is s_short / (s_short + 1 - s_long). Without
    prefixes to hold there are no more panes than `rows` requests can use.
    """
    rules, block, pane = tables.rules, tables.block, tables.pane
    short, long = tables.pane_share(tables.expected), tables.pane_share(tables.longest)
    wanted = int(room * (short / (short + 1 - long))) // pane
    most = wanted if holds_prefixes else rules.needed(tables.longest, tables.rows)
    panes = max(rules.needed(tables.longest), min(wanted, most, (room - tables.longest * block) // pane))
    return ((room - panes * pane) // block, panes) if block else (0, room // pane)


def prefixes_in(tables: Tables, blocks: int, panes: int) -> int:
    """How many distinct prefixes so many blocks and panes hold beside what runs: requests of a prefix's length in all
    rows, but in no more than half of each, and always one of max_model_len."""
    rules, found = tables.rules, []
    if tables.block:
        running = max(min(tables.rows * tables.expected, blocks // 2), tables.longest)
        found.append((blocks - running) // tables.expected)
    if tables.prefix_panes:
        used = max(min(rules.needed(tables.expected, tables.rows), panes // 2), rules.needed(tables.longest))
        found.append((panes - used) // tables.prefix_panes)
    return max(0, min(found, default=0))
