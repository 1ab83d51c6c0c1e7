"""Capture sizes: the numbers of tokens, of rows and of drafts that graphs are captured for.

Mixed batches are bound by tokens, decode by rows, so each has its own ladder, and neither shortens the other. Each
number of drafts has separate graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from ostinato.config_fields import ascending, checked_sizes, is_count
from ostinato.errors import ConfigError, Remedy
from ostinato.plan.decision import Decision

PerformanceMode = Literal["balanced", "interactivity"]

PERFORMANCE_MODES: tuple[str, ...] = get_args(PerformanceMode)
FIRST_SIZES = (1, 2, 4)
FINE_STEP, LAST_FINE_SIZE, COARSE_STEP = 8, 256, 16
LAST_INTERACTIVE_SIZE = 32
"""Size up to which `interactivity` captures every size: for few users, none of whose steps is padded."""
LARGEST_DEFAULT_SIZE = 512


@dataclass(frozen=True)
class CaptureSizes:
    """Capture sizes, ascending: `tokens` of piecewise graphs, `rows` of full graphs of uniform decode.

    Each row count is captured for 1 token per row and, with speculation, for every other number that a step may have.
    `decisions` says which given sizes were left out.
    """

    tokens: tuple[int, ...]
    rows: tuple[int, ...]
    decisions: tuple[Decision, ...] = ()

    def most_tokens(self, tokens_per_row: int) -> int:
        """Return the tokens of the largest graph, rows having up to `tokens_per_row` each; 0 if there is none."""
        return max((*self.tokens, *(rows * tokens_per_row for rows in self.rows)), default=0)


@dataclass(frozen=True)
class LadderLimit:
    """Extent of open ladders.

    The token ladder goes as far as the default for `rows` requests; None: for those of the limits that are tried.
    Neither ladder goes beyond graphs of `most_tokens` tokens; None: there is no such bound.
    """

    rows: int | None = None
    most_tokens: int | None = None


@dataclass(frozen=True)
class LadderSettings:
    """Inputs of ladders: limits of a batch, and the settings of `EngineConfig` about capture sizes. None is open."""

    max_num_seqs: int
    max_num_batched_tokens: int
    num_speculative_tokens: int = 0
    max_capture_size: int | None = None
    capture_sizes: Sequence[int] | None = None
    capture_rows: Sequence[int] | None = None
    performance_mode: str = "balanced"
    adaptive: bool = False
    """True if steps with fewer than all drafts occur."""

    @property
    def tokens_per_row(self) -> int:
        """Largest number of tokens of a decode row."""
        return 1 + self.num_speculative_tokens


def make_capture_sizes(settings: LadderSettings) -> CaptureSizes:
    """Return the ladders that result from the settings.

    By default both are 1, 2, 4, steps of 8 up to 256, then steps of 16. Tokens go up to `max_capture_size`, by default
    `min(max_num_seqs * (1 + k) * 2, 512)`, and never above `max_num_batched_tokens`, which is a size itself if it is
    within `max_capture_size`; so is a given `max_capture_size`. Rows go up to `max_num_seqs`, always a size. Given
    `capture_sizes` are the token ladder and, where `1 + k` divides them, the row ladder; given `capture_rows` are the
    row ladder. Nothing is added to them, and sizes that no batch can reach are left out, as a decision.

    ConfigError if a value is no whole number or too small, a list is empty, `max_capture_size` is not the largest of
    `capture_sizes`, the mode is unknown, or `interactivity` should add to given `capture_sizes`.
    """
    max_num_seqs, max_num_batched_tokens = settings.max_num_seqs, settings.max_num_batched_tokens
    mode, largest = settings.performance_mode, settings.max_capture_size
    _check_at_least("max_num_seqs", max_num_seqs, 1)
    _check_at_least("max_num_batched_tokens", max_num_batched_tokens, 1)
    _check_at_least("num_speculative_tokens", settings.num_speculative_tokens, 0)
    if mode not in PERFORMANCE_MODES:
        message = f"performance_mode = {mode!r} is unknown; the modes are {', '.join(PERFORMANCE_MODES)}"
        raise ConfigError(message, [Remedy("performance_mode", "balanced")])
    interactive = mode == "interactivity"
    given = settings.capture_sizes
    sizes = None if given is None else checked_sizes("capture_sizes", given, largest)
    if sizes is not None and interactive:
        raise ConfigError(
            f"performance_mode {mode} adds every size up to {LAST_INTERACTIVE_SIZE}, and nothing is added "
            "to given capture_sizes; set performance_mode to balanced, or leave capture_sizes out",
            [Remedy("performance_mode", "balanced"), Remedy("capture_sizes", None)],
        )
    if sizes is not None:
        tokens, decisions = _reachable("capture_sizes", sizes, max_num_batched_tokens, "max_num_batched_tokens")
    elif largest is not None:
        tokens, decisions = _tokens_up_to(largest, max_num_batched_tokens, interactive)
    else:
        default = min(max_num_seqs * settings.tokens_per_row * 2, LARGEST_DEFAULT_SIZE)
        tokens, decisions = _token_progression(default, max_num_batched_tokens, interactive), []

    if settings.capture_rows is not None:
        given_rows = checked_sizes("capture_rows", settings.capture_rows)
        rows, row_decisions = _reachable("capture_rows", given_rows, max_num_seqs, "max_num_seqs")
    elif sizes is not None:
        rows, row_decisions = _rows_of(sizes, settings.tokens_per_row, max_num_seqs)
    else:
        rows, row_decisions = ascending([*_progression(max_num_seqs, interactive), max_num_seqs]), []
    return CaptureSizes(tokens, rows, (*decisions, *row_decisions))


def _progression(last: int, interactive: bool) -> list[int]:
    """Return the sizes up to `last`, which is not one itself if it is off stride."""
    first = range(1, LAST_INTERACTIVE_SIZE + 1) if interactive else FIRST_SIZES
    fine = range(FINE_STEP, LAST_FINE_SIZE + 1, FINE_STEP)
    coarse = range(LAST_FINE_SIZE + COARSE_STEP, last + 1, COARSE_STEP)
    return [size for size in ascending([*first, *fine, *coarse]) if size <= last]


def _token_progression(last: int, max_num_batched_tokens: int, interactive: bool) -> tuple[int, ...]:
    if max_num_batched_tokens > last:
        return tuple(_progression(last, interactive))
    # A full batch is the most common one while prompts are computed: without this size it would run eagerly.
    return ascending([*_progression(max_num_batched_tokens, interactive), max_num_batched_tokens])


def _tokens_up_to(
    max_capture_size: int, max_num_batched_tokens: int, interactive: bool
) -> tuple[tuple[int, ...], list[Decision]]:
    """Return the token ladder for a given largest size, which is a size itself if a batch can reach it."""
    _check_at_least("max_capture_size", max_capture_size, 1)
    tokens = _token_progression(max_capture_size, max_num_batched_tokens, interactive)
    if max_capture_size <= max_num_batched_tokens:
        return ascending([*tokens, max_capture_size]), []
    reason = f"no batch has more than max_num_batched_tokens {max_num_batched_tokens}"
    return tokens, [Decision("max_capture_size", max_capture_size, max_num_batched_tokens, reason)]


def _rows_of(sizes: tuple[int, ...], tokens_per_row: int, max_num_seqs: int) -> tuple[tuple[int, ...], list[Decision]]:
    """Return the row ladder that results from given token sizes, and a decision if it is empty."""
    counts = (size // tokens_per_row for size in sizes if size % tokens_per_row == 0)
    rows = tuple(count for count in counts if count <= max_num_seqs)
    if rows:
        return rows, []
    times = f"{tokens_per_row} times a row count" if tokens_per_row > 1 else "a row count"
    reason = (
        f"none of capture_sizes is {times} of at most max_num_seqs {max_num_seqs}, so decode has no full graph; "
        "capture_rows would give it some"
    )
    return (), [Decision("capture_rows", None, [], reason)]


def _reachable(
    setting: str, sizes: tuple[int, ...], limit: int, limit_name: str
) -> tuple[tuple[int, ...], list[Decision]]:
    """Return the given sizes that a batch can reach, and the decision that leaves the others out, if there are any."""
    kept = tuple(size for size in sizes if size <= limit)
    if kept == sizes:
        return kept, []
    left_out = ", ".join(str(size) for size in sizes[len(kept) :])
    reason = f"no batch has more than {limit_name} {limit}, so nothing is captured for {left_out}"
    return kept, [Decision(setting, list(sizes), list(kept), reason)]


def _check_at_least(setting: str, value: object, least: int) -> None:
    if not is_count(value, least):
        message = f"{setting} = {value!r}: it is a whole number of at least {least}"
        raise ConfigError(message, [Remedy(setting, least)])


def draft_numbers(num_speculative_tokens: int, adaptive: bool) -> tuple[int, ...]:
    """Return the numbers of drafts per row that a step may have, ascending.

    They are none and all; with `adaptive` also half of them, half of that, and so on. If many rows make a step
    expensive, few drafts pay and many do not.
    """
    numbers = {0, num_speculative_tokens}
    while adaptive and num_speculative_tokens > 1:
        num_speculative_tokens //= 2
        numbers.add(num_speculative_tokens)
    return tuple(sorted(numbers))


def widths(num_speculative_tokens: int, adaptive: bool) -> tuple[int, ...]:
    """Return the numbers of tokens per row of decode steps, ascending."""
    return tuple(1 + number for number in draft_numbers(num_speculative_tokens, adaptive))
