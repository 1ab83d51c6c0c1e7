"""The figures of the speculation benchmark: pure functions of rounds that were measured."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ostinato.bench.trace import Trace, spread


@dataclass(frozen=True)
class Round:
    """One round, and its drafts per position: those whose predecessors were all kept, and of these those that were
    kept too; `()` without speculation."""

    trace: Trace
    reached: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()

    @property
    def decode_rate(self) -> float:
        """Tokens per second from the moment on when every request had its first one."""
        return self.trace.decode_tokens / (self.trace.end - self.trace.prefill_end)


def speculative_figures(rounds: Sequence[Round], plain: Sequence[Round], k: int) -> dict[str, Any]:
    """Figures of one variant with `k` drafts against `plain`, without drafts, whose rounds are of the same prompts.

    `decode_tokens_per_second` is the median, least and greatest over the rounds; `speed` that of a round over that of
    the same round without drafts, and `total_speed` the same of all output tokens over the whole round, prefill
    included. `acceptance` is by position: of the drafts there whose predecessors were all kept, those that were kept.
    `tokens_per_step` is the mean number of tokens that a row with drafts gained. `step_milliseconds` is the median
    length of decode steps before any request ended, and `step_cost` that in steps without drafts.
    """
    speeds = [one.decode_rate / other.decode_rate for one, other in zip(rounds, plain, strict=True)]
    totals = [_total_rate(one) / _total_rate(other) for one, other in zip(rounds, plain, strict=True)]
    reached, accepted = (_sum([getattr(each, name) for each in rounds], k) for name in ("reached", "accepted"))
    seconds, plain_seconds = (statistics.median(_full_steps(each)) for each in (rounds, plain))
    return {
        "decode_tokens_per_second": spread([each.decode_rate for each in rounds]),
        "speed": spread(speeds),
        "total_speed": spread(totals),
        "acceptance": [kept / count if count else None for kept, count in zip(accepted, reached, strict=True)],
        "tokens_per_step": 1 + sum(accepted) / reached[0] if any(reached) else 1.0,
        "step_milliseconds": 1e3 * seconds,
        "step_cost": seconds / plain_seconds,
        "output_tokens": sum(each.trace.output_tokens for each in rounds),
    }


def _full_steps(rounds: Sequence[Round]) -> list[float]:
    """Lengths in seconds of the decode steps in which no request had ended."""
    found = []
    for each in rounds:
        trace = each.trace
        first_end = min(times[-1] for times in trace.token_times)
        steps = pairwise(trace.step_ends)
        found += [end - begin for begin, end in steps if trace.prefill_end < end <= first_end]
    return found or [length for each in rounds for length in each.trace.decode_step_seconds]


def _total_rate(one: Round) -> float:
    return one.trace.output_tokens / one.trace.end


def _sum(counts: Sequence[Sequence[int]], k: int) -> list[int]:
    return [sum(each[i] for each in counts if each) for i in range(k)]
