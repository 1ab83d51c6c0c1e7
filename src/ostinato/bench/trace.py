"""When the tokens of a round came, and how figures of many rounds are summed up."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Trace:
    """One round. Moments are in seconds since its requests were handed over, all at once."""

    prompt_tokens: int
    """Of all requests together."""
    token_times: list[list[float]]
    """[requests][output tokens]: when each token was there."""
    step_ends: list[float]

    @property
    def prefill_end(self) -> float:
        """When every request had its first token."""
        return max(times[0] for times in self.token_times)

    @property
    def end(self) -> float:
        return self.step_ends[-1]

    @property
    def output_tokens(self) -> int:
        return sum(len(times) for times in self.token_times)

    @property
    def decode_tokens(self) -> int:
        """Tokens that came after every request had its first one."""
        return sum(time > self.prefill_end for times in self.token_times for time in times)

    @property
    def decode_rate(self) -> float:
        """Tokens per second from the moment on when every request had its first one."""
        return self.decode_tokens / (self.end - self.prefill_end)

    @property
    def decode_step_seconds(self) -> list[float]:
        """Lengths of the steps after every request had its first token."""
        return [end - begin for begin, end in pairwise(self.step_ends) if end > self.prefill_end]


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """Median, least and greatest; None of no values."""
    if not values:
        return None
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """The median, the 99th percentile (nearest rank) and the greatest; None of no values."""
    if not values:
        return None
    ordered = sorted(values)
    rank = math.ceil(0.99 * len(ordered))
    return {"p50": statistics.median(ordered), "p99": ordered[rank - 1], "max": ordered[-1]}


def summary(values: Sequence[float]) -> dict[str, float] | None:
    """Mean, percentiles (nearest rank) and the greatest; None of no values."""
    if not values:
        return None
    ordered = sorted(values)
    ranks = {f"p{percent}": ordered[math.ceil(len(ordered) * percent / 100) - 1] for percent in (50, 90, 99)}
    return {"mean": statistics.fmean(ordered), **ranks, "max": ordered[-1]}
