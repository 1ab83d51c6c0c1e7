"""What is counted of requests and steps, by the engine and the scheduler. Each room increments its own counts.

Beside it stand the counts of cached memory, of drafts, of images and of answers, and the histograms. A graph's steps
count beside the graphs that they name (`graphs/graphs.py`). `observe/metrics.py` gives every count its name, and
imports none of those rooms: they hand figures up.
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
    """Tokens that went through the model, including those that a preemption made it compute again."""
    decode_rows: int = 0
    prefill_rows: int = 0
    step_seconds: float = 0.0
    bookkeeping_seconds: float = 0.0
    """The part of step_seconds that the scheduler took: requests, blocks, slots, the prefix index."""

    def count_step(
        self, rows: int, decode_rows: int, computed: int, generated: int, seconds: float, bookkeeping: float
    ) -> None:
        """Adds a step: its rows, the tokens that it computed and generated, and its seconds."""
        self.generated_tokens += generated
        self.computed_tokens += computed
        self.decode_rows += decode_rows
        self.prefill_rows += rows - decode_rows
        self.step_seconds += seconds
        self.bookkeeping_seconds += bookkeeping


@dataclass(slots=True)
class SchedulerCounts:
    """What happened since the scheduler was made."""

    finished: dict[str, int]
    """Reason (a FinishReason) -> outputs that ended for it."""
    steps: int = 0
    failed_steps: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    """Computed tokens that preemptions threw away."""
    cut_recomputations: int = 0
    """Without chunked prefill: preempted requests that were computed again in more than one step."""
    steps_ahead: int = 0
    """The part of `steps` that were scheduled before the step in front of them was over."""
    void_rows: int = 0
    """Rows of steps ahead whose request had ended: they computed nothing that anybody wants."""
    steps_not_ahead: dict[str, int] = field(default_factory=dict)
    """Cause (a WaitCause) -> steps that had to wait, though steps may be scheduled ahead."""


@dataclass(slots=True)
class PrefixCounts:
    """Sums over the prompts that were admitted, one for each of n samples. They add up to the prompts' tokens."""

    misses: dict[str, int]
    """Cause (a MissCause) -> tokens that were computed for it."""
    cached_tokens: int = 0
    restored_tokens: int = 0
    """Tokens that preempted requests found again in the cache."""
    file_tokens: int = 0
    """Of the cached tokens, those that files brought back."""

    def count(self, cached_tokens: int, misses: Mapping[str, int], from_files: int = 0) -> None:
        """Adds one prompt's report."""
        self.cached_tokens += cached_tokens
        self.file_tokens += from_files
        for cause, tokens in misses.items():
            self.misses[cause] += tokens


@dataclass(slots=True)
class MoveCounts:
    """Requests that went to other engines and came from them, since the start. Those that came are not counted among
    `EngineCounts.requests`."""

    exported: int = 0
    exported_bytes: int = 0
    imported: int = 0
    imported_bytes: int = 0
    refused: int = 0
    """Exports of others that could not be taken in."""
    carried_tokens: int = 0
    """Tokens, of all outputs, that were computed elsewhere and are not computed again."""
    carried_bytes: int = 0
    """Blocks and states that came with them."""
    recomputed_tokens: int = 0
    """Tokens that were computed elsewhere and are computed again, since they came without blocks and state."""
