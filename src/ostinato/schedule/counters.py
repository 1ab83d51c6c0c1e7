"""What a scheduler counts."""

from __future__ import annotations

from dataclasses import dataclass, field

from ostinato.cache.report import CacheReport, MissCause
from ostinato.schedule.request import FinishReason


@dataclass(slots=True)
class SchedulerCounters:
    """What happened since the scheduler was made."""

    steps: int = 0
    failed_steps: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    """Computed tokens that preemptions threw away."""
    cut_recomputations: int = 0
    """Without chunked prefill: preempted requests that were computed again in more than one step."""
    finished: dict[FinishReason, int] = field(default_factory=lambda: dict.fromkeys(FinishReason, 0))


@dataclass(slots=True)
class PrefixCounters:
    """Sums over the prompts that were admitted, one for each of n samples; they add up to the prompts' tokens."""

    cached_tokens: int = 0
    misses: dict[str, int] = field(default_factory=lambda: dict.fromkeys((cause.value for cause in MissCause), 0))
    restored_tokens: int = 0
    """Tokens that preempted requests found again in the cache."""

    def count(self, report: CacheReport) -> None:
        self.cached_tokens += report.cached_tokens
        for cause, tokens in report.misses.items():
            self.misses[cause] += tokens
