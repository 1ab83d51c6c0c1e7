"""Sizing: both ladders chosen from traffic, compared with the planned ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pydantic import computed_field

from ostinato.errors import ConfigError
from ostinato.plan.graphs.capture_plan import CapturePlan
from ostinato.plan.graphs.coverage import FULL_MODES, PIECEWISE_MODES
from ostinato.plan.graphs.traffic import Traffic, choose_sizes, expected_padding


@dataclass(frozen=True)
class LadderOutcome:
    """Outcome of a ladder for counted steps.

    `replayed` steps have `padding` tokens of padding in all; `eager` steps are larger than all sizes.
    """

    sizes: tuple[int, ...]
    replayed: int
    eager: int
    padding: int

    @computed_field  # type: ignore[prop-decorator]
    @property
    def mean_padding(self) -> float:
        """Expected tokens of padding of one replayed step."""
        return self.padding / self.replayed if self.replayed else 0.0


@dataclass(frozen=True)
class LadderChoice:
    """The planned ladder and the chosen one, which is the planned one if the traffic has no such steps."""

    planned: LadderOutcome
    chosen: LadderOutcome


@dataclass(frozen=True)
class Sizing:
    """Choices for each ladder that the graph mode has; None for a ladder that it does not have."""

    tokens: LadderChoice | None
    rows: LadderChoice | None

    def choices(self) -> Iterator[tuple[str, LadderChoice]]:
        if self.tokens is not None:
            yield "tokens", self.tokens
        if self.rows is not None:
            yield "rows", self.rows

    @computed_field  # type: ignore[prop-decorator]
    @property
    def flags(self) -> list[str]:
        """Command line flags for the chosen sizes.

        All ladders are named, since an open one would follow from the others.
        """
        names = {"tokens": "--capture-sizes", "rows": "--capture-rows"}
        return [
            f"{names[name]} {','.join(map(str, choice.chosen.sizes))}"
            for name, choice in self.choices()
            if choice.chosen.sizes
        ]


def size_for_traffic(
    traffic: Traffic, capture: CapturePlan, *, max_num_seqs: int, max_num_batched_tokens: int, num_sizes: int | None
) -> Sizing:
    """Return the `num_sizes` best sizes of each ladder for such traffic, by default as many as are planned.

    In a mode with full graphs a uniform decode step takes one of them, else it counts as a step of tokens. ConfigError
    if the mode has no graphs, or `num_sizes` is less than 1.
    """
    mode = capture.graph_mode
    if mode == "none":
        message = "graph_mode none captures nothing, so there are no sizes to choose from traffic"
        changes = (change for entry in capture.uncovered for change in entry.changes)
        raise ConfigError(message, [change for change in changes if change.setting == "graph_mode"][:1])
    rows = tokens = None
    by_tokens = Counter(traffic.mixed)
    if mode in FULL_MODES:
        by_rows = traffic.decode
        chosen = _chosen(traffic.row_weights(), capture.rows, num_sizes, max_num_seqs)
        rows = LadderChoice(_row_outcome(by_rows, capture.rows), _row_outcome(by_rows, chosen))
    else:
        for tokens_per_row, counts in traffic.decode.items():
            by_tokens.update({count * tokens_per_row: steps for count, steps in counts.items()})
    if mode in PIECEWISE_MODES:
        chosen = _chosen(by_tokens, capture.tokens, num_sizes, max_num_batched_tokens)
        tokens = LadderChoice(_token_outcome(by_tokens, capture.tokens), _token_outcome(by_tokens, chosen))
    return Sizing(tokens, rows)


def _chosen(
    counts: Mapping[int, int], planned: tuple[int, ...], num_sizes: int | None, largest: int
) -> tuple[int, ...]:
    return choose_sizes(counts, max(1, len(planned)) if num_sizes is None else num_sizes, largest) or planned


def _token_outcome(counts: Mapping[int, int], sizes: tuple[int, ...]) -> LadderOutcome:
    found = expected_padding(counts, sizes)
    return LadderOutcome(sizes, found.covered, found.uncovered, found.padding)


def _row_outcome(decode: Mapping[int, Mapping[int, int]], sizes: tuple[int, ...]) -> LadderOutcome:
    """Return the outcome of a row ladder. A row of padding counts as many tokens as a row has."""
    found = [(tokens_per_row, expected_padding(counts, sizes)) for tokens_per_row, counts in decode.items()]
    return LadderOutcome(
        sizes,
        sum(padding.covered for _, padding in found),
        sum(padding.uncovered for _, padding in found),
        sum(padding.padding * tokens_per_row for tokens_per_row, padding in found),
    )
