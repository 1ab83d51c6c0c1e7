"""Coverage: the graph that serves each possible batch, its padding, and the batches that would run eagerly.

`dispatch` is the one rule. The plan builds its ranges with it, and the engine calls it in every step, so they agree.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Annotated, Literal, NamedTuple

from pydantic import Field, computed_field

from ostinato.errors import Remedy
from ostinato.plan.graphs.capture_sizes import CaptureSizes, LadderSettings, make_capture_sizes, widths

GraphMode = Literal["none", "piecewise", "full_decode_only", "full_and_piecewise"]
StepMode = Literal["full", "piecewise", "eager"]

FULL_MODES = ("full_decode_only", "full_and_piecewise")
PIECEWISE_MODES = ("piecewise", "full_and_piecewise")


class GraphShape(NamedTuple):
    """A graph: `size` counts rows of `tokens_per_row` tokens each if the mode is `full`, and tokens if `piecewise`."""

    mode: StepMode
    size: int
    tokens_per_row: int = 1

    @property
    def tokens(self) -> int:
        return self.size * self.tokens_per_row


@dataclass(frozen=True)
class MixedRange:
    """Mixed batches of `from_` to `to` tokens. `size` is the graph's, in tokens; None if they run eagerly."""

    from_: Annotated[int, Field(alias="from")]
    to: int
    mode: StepMode
    size: int | None

    @property
    def most_padding(self) -> int:
        """Tokens of padding in the range's worst batch."""
        return 0 if self.size is None else self.size - self.from_


@dataclass(frozen=True)
class DecodeRange:
    """Uniform decode of `from_` to `to` rows with `tokens_per_row` tokens each.

    `size` is the graph's: in rows if the mode is `full`, in tokens if `piecewise`, None if they run eagerly.
    """

    tokens_per_row: int
    from_: Annotated[int, Field(alias="from")]
    to: int
    mode: StepMode
    size: int | None

    @property
    def most_padding(self) -> int:
        """Tokens of padding in the range's worst batch."""
        if self.size is None:
            return 0
        size = self.size * self.tokens_per_row if self.mode == "full" else self.size
        return size - self.from_ * self.tokens_per_row


@dataclass(frozen=True)
class Coverage:
    """Ascending ranges without gap or overlap: `decode` in rows by tokens per row, `mixed` in tokens."""

    decode: tuple[DecodeRange, ...]
    mixed: tuple[MixedRange, ...]

    def mode_of(self, rows: int, tokens_per_row: int | None, tokens: int) -> StepMode | None:
        """Return the mode promised to a batch, described as for `dispatch`; None if the ranges do not reach it."""
        for decode in self.decode:
            if tokens_per_row == decode.tokens_per_row and decode.from_ <= rows <= decode.to:
                return decode.mode
        for mixed in self.mixed:
            if tokens_per_row is None and mixed.from_ <= tokens <= mixed.to:
                return mixed.mode
        return None


@dataclass(frozen=True)
class Uncovered:
    """Batches that run eagerly, and the settings that would give them a graph.

    `changes` are settings to be changed together. `sizes` are the additional graphs that would be captured, in tokens
    each and ascending; `memory` is their bytes.
    """

    batches: DecodeRange | MixedRange
    changes: tuple[Remedy, ...]
    sizes: tuple[int, ...]
    memory: int

    @computed_field  # type: ignore[prop-decorator]
    @property
    def kind(self) -> Literal["decode", "mixed"]:
        return "decode" if isinstance(self.batches, DecodeRange) else "mixed"


def smallest_holding(ladder: Sequence[int], count: int) -> int | None:
    """Return the smallest size of an ascending ladder that is at least `count`; None if none is."""
    index = bisect_left(ladder, count)
    return ladder[index] if index < len(ladder) else None


def dispatch(
    ladders: CaptureSizes, graph_mode: GraphMode, rows: int, tokens_per_row: int | None, tokens: int
) -> tuple[StepMode, int | None]:
    """Return (mode, size) of the smallest graph that holds a batch, or (`eager`, None) if none does.

    `tokens_per_row` is a number if all rows decode with the same number of tokens, else None. Such a batch takes a full
    graph, whose size is in rows, in a mode with full graphs; else a piecewise one, in tokens, as mixed batches do.
    """
    if tokens_per_row is not None and graph_mode in FULL_MODES:
        size = smallest_holding(ladders.rows, rows)
        if size is not None:
            return "full", size
    if graph_mode in PIECEWISE_MODES:
        size = smallest_holding(ladders.tokens, tokens)
        if size is not None:
            return "piecewise", size
    return "eager", None


def coverage(
    ladders: CaptureSizes,
    graph_mode: GraphMode,
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    num_speculative_tokens: int = 0,
    adaptive: bool = False,
) -> Coverage:
    """Return the graphs that serve each batch.

    Batches are decode of 1 to `max_num_seqs` rows with each of `widths`, and mixed ones of 1 to
    `max_num_batched_tokens` tokens.
    """
    decode: list[DecodeRange] = []
    for tokens_per_row in widths(num_speculative_tokens, adaptive):
        # The graph of a batch changes only after a size in rows, or a size in tokens divided by the tokens per row.
        ends = [*ladders.rows, *(size // tokens_per_row for size in ladders.tokens)]
        for first, last in _spans(ends, max_num_seqs):
            mode, size = dispatch(ladders, graph_mode, last, tokens_per_row, last * tokens_per_row)
            before = decode[-1] if decode else None
            if before and (before.tokens_per_row, before.mode, before.size) == (tokens_per_row, mode, size):
                first = decode.pop().from_
            decode.append(DecodeRange(tokens_per_row, first, last, mode, size))
    mixed: list[MixedRange] = []
    for first, last in _spans(ladders.tokens, max_num_batched_tokens):
        # The row count of a mixed batch does not matter.
        mode, size = dispatch(ladders, graph_mode, 1, None, last)
        if mixed and (mixed[-1].mode, mixed[-1].size) == (mode, size):
            first = mixed.pop().from_
        mixed.append(MixedRange(first, last, mode, size))
    return Coverage(tuple(decode), tuple(mixed))


def uncovered(
    ladders: CaptureSizes,
    graph_mode: GraphMode,
    settings: LadderSettings,
    *,
    bytes_for: Callable[[Collection[GraphShape]], int],
    full_graphs_work: bool = True,
) -> tuple[Uncovered, ...]:
    """Return the ranges of `coverage` that run eagerly, each with the settings that would cover it.

    The settings are those that `ladders` came from, and `max_num_batched_tokens` is at least `max_num_seqs * (1 + k)`.
    `bytes_for(graphs)` returns the memory of more graphs. `full_graphs_work` is true if the kernels of a decode step
    can be captured, so that a mode may have full graphs.
    """
    covered = coverage(
        ladders,
        graph_mode,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        num_speculative_tokens=settings.num_speculative_tokens,
        adaptive=settings.adaptive,
    )
    counts = widths(settings.num_speculative_tokens, settings.adaptive)
    present = _graphs(ladders, graph_mode, counts)
    found = []
    ranges: tuple[DecodeRange | MixedRange, ...] = (*covered.decode, *covered.mixed)
    for batches in ranges:
        if batches.mode != "eager":
            continue
        mode, changes = _mode_for(batches, graph_mode, full_graphs_work)
        changed = ladders
        if _serves(ladders, mode, batches)[0] == "eager":
            changes += _size_changes(batches, mode, ladders, settings)
            sizes_changed = {change.setting: change.value for change in changes if change.setting != "graph_mode"}
            changed = make_capture_sizes(replace(settings, **sizes_changed))
        # A default token ladder follows the max_num_seqs asked for, and `condition` the one that fits: its sizes are a
        # subset of the present ones, so none of them counts as added.
        added = _graphs(changed, mode, counts) - present
        sizes = tuple(sorted(graph.tokens for graph in added))
        found.append(Uncovered(batches, tuple(changes), sizes, bytes_for(added)))
    return tuple(found)


def _spans(ends: Iterable[int], last: int) -> list[tuple[int, int]]:
    """Return 1 to `last`, split after each of `ends`, as (first, last) pairs."""
    cuts = sorted({0, last} | {end for end in ends if 0 < end < last})
    return [(before + 1, end) for before, end in pairwise(cuts)]


def _serves(ladders: CaptureSizes, mode: GraphMode, batches: DecodeRange | MixedRange) -> tuple[StepMode, int | None]:
    """Return the graph that serves the largest batch of a range, and so all of them."""
    if isinstance(batches, MixedRange):
        return dispatch(ladders, mode, 1, None, batches.to)
    return dispatch(ladders, mode, batches.to, batches.tokens_per_row, batches.to * batches.tokens_per_row)


def _mode_for(
    batches: DecodeRange | MixedRange, graph_mode: GraphMode, full_graphs_work: bool
) -> tuple[GraphMode, list[Remedy]]:
    """Return a mode that has graphs for such batches, `graph_mode` itself if it has, and the change to it."""
    if graph_mode in PIECEWISE_MODES or (graph_mode in FULL_MODES and isinstance(batches, DecodeRange)):
        return graph_mode, []
    mode: GraphMode = "full_and_piecewise" if full_graphs_work else "piecewise"
    return mode, [Remedy("graph_mode", mode)]


def _size_changes(
    batches: DecodeRange | MixedRange, mode: GraphMode, ladders: CaptureSizes, settings: LadderSettings
) -> list[Remedy]:
    """Return the settings that extend a ladder to the largest batch of a range."""
    if isinstance(batches, DecodeRange) and mode in FULL_MODES:
        return [Remedy("capture_rows", [*ladders.rows, batches.to])]
    tokens = batches.to * batches.tokens_per_row if isinstance(batches, DecodeRange) else batches.to
    if settings.capture_sizes is None:
        return [Remedy("max_capture_size", tokens)]
    sizes = sorted({*settings.capture_sizes, tokens})
    changes = [Remedy("capture_sizes", sizes)]
    if settings.max_capture_size is not None and settings.max_capture_size != sizes[-1]:
        # If max_capture_size is given together with sizes, it must be the largest of them.
        changes.append(Remedy("max_capture_size", sizes[-1]))
    return changes


def _graphs(ladders: CaptureSizes, mode: GraphMode, tokens_per_row: Collection[int]) -> set[GraphShape]:
    """Return every graph that is captured."""
    graphs: set[GraphShape] = set()
    if mode in PIECEWISE_MODES:
        graphs |= {GraphShape("piecewise", size) for size in ladders.tokens}
    if mode in FULL_MODES:
        graphs |= {GraphShape("full", size, count) for size in ladders.rows for count in tokens_per_row}
    return graphs
