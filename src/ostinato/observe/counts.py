"""Counts of requests and steps. The engine and the scheduler increment their own.

The other files of this package hold the counts of cached memory, drafts, images and answers, and the histograms. The
steps of each graph are counted in `graphs/graphs.py`. `observe/metrics.py` names every count. It imports none of the
packages that count: they pass their statistics to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(slots=True)
class EngineCounts:
    """Requests and steps of an engine; times in seconds."""

    requests: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    computed_tokens: int = 0
    """Tokens that went through the model, including those recomputed after a preemption."""
    decode_rows: int = 0
    prefill_rows: int = 0
    step_seconds: float = 0.0
    bookkeeping_seconds: float = 0.0
    """The scheduler's part of step_seconds: requests, blocks, slots and the prefix index."""

    def count_step(
        self, rows: int, decode_rows: int, computed: int, generated: int, seconds: float, bookkeeping: float
    ) -> None:
        """Add a step: its rows, its computed and generated tokens, and its seconds."""
        self.generated_tokens += generated
        self.computed_tokens += computed
        self.decode_rows += decode_rows
        self.prefill_rows += rows - decode_rows
        self.step_seconds += seconds
        self.bookkeeping_seconds += bookkeeping


@dataclass(slots=True)
class SchedulerCounts:
    """Events of the scheduler since it was made."""

    finished: dict[str, int]
    """Reason (a FinishReason) -> outputs that ended for it."""
    steps: int = 0
    failed_steps: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    """Computed tokens that preemptions discarded."""
    cut_recomputations: int = 0
    """Preempted requests that took more than one step to recompute, without chunked prefill."""
    steps_ahead: int = 0
    """The part of `steps` that was scheduled before the preceding step was over."""
    void_rows: int = 0
    """Rows of overlapped steps whose request had already ended, so that their result was discarded."""
    steps_not_ahead: dict[str, int] = field(default_factory=dict)
    """Cause (a WaitCause) -> steps that had to wait for the preceding step although overlap is on."""


@dataclass(slots=True)
class PrefixCounts:
    """Sums over the admitted prompts, one for each of n samples. They add up to the prompts' tokens."""

    misses: dict[str, int]
    """Cause (a MissCause) -> tokens that were computed for it."""
    cached_tokens: int = 0
    restored_tokens: int = 0
    """Tokens that preempted requests found again in the cache."""
    file_tokens: int = 0
    """The part of `cached_tokens` that was read from files."""

    def count(self, cached_tokens: int, misses: Mapping[str, int], from_files: int = 0) -> None:
        """Add one prompt's report."""
        self.cached_tokens += cached_tokens
        self.file_tokens += from_files
        for cause, tokens in misses.items():
            self.misses[cause] += tokens


@dataclass(slots=True)
class MigrationCounts:
    """Requests exported to other engines and imported from them since the start.

    Imported requests are not counted in `EngineCounts.requests`.
    """

    exported: int = 0
    exported_bytes: int = 0
    imported: int = 0
    imported_bytes: int = 0
    refused: int = 0
    """Exports of other engines that could not be imported."""
    carried_tokens: int = 0
    """Tokens of all outputs that were computed elsewhere and are not computed again."""
    carried_bytes: int = 0
    """Bytes of the imported blocks and states."""
    recomputed_tokens: int = 0
    """Tokens computed elsewhere that are computed again, because they came without blocks and state."""
