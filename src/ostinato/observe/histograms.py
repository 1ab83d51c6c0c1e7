"""Histograms that the engine keeps of its requests and steps, and the times of the phases of a start.

The phases follow one another, so that they add up to the whole start.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0),
)
TOKENS = tuple(2**power for power in range(18))


class Histogram:
    """Counts of values in buckets: one up to each bound, and one above the last."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0
        """Sum of the values."""

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def cumulative(self) -> list[int]:
        """Return the number of values up to each bound, then of all values, as Prometheus expects."""
        sums, total = [], 0
        for count in self.counts:
            total += count
            sums.append(total)
        return sums

    def quantile(self, share: float) -> float | None:
        """Return the smallest bound that at least `share` of the values do not exceed.

        None if there are no values or no such bound.
        """
        sums = self.cumulative()
        if not sums[-1]:
            return None
        index = bisect_left(sums, share * sums[-1])
        return self.bounds[index] if index < len(self.bounds) else None

    def to_json(self) -> dict[str, Any]:
        """Return the histogram as plain data."""
        return {"bounds": list(self.bounds), "counts": list(self.counts), "sum": self.total}


def _seconds() -> Histogram:
    return Histogram(SECONDS)


def _tokens() -> Histogram:
    return Histogram(TOKENS)


@dataclass(slots=True)
class EngineHistograms:
    """Histograms of an engine's requests and steps. Times are in seconds.

    A request arrives when it is added, or at the server in front of the engine if that is on this machine.
    """

    queue: Histogram = field(default_factory=_seconds)
    """Time from a request's arrival to its first step."""
    first_token: Histogram = field(default_factory=_seconds)
    """Time from the arrival to the first token of the first output."""
    inter_token: Histogram = field(default_factory=_seconds)
    """Time between two tokens of an output. Tokens of one step share the time since the token before them."""
    prefill: Histogram = field(default_factory=_seconds)
    """Time from the first step to the first token."""
    decode: Histogram = field(default_factory=_seconds)
    """Time from the first token to the last."""
    whole: Histogram = field(default_factory=_seconds)
    """Time from the arrival to the end."""
    prompt_tokens: Histogram = field(default_factory=_tokens)
    output_tokens: Histogram = field(default_factory=_tokens)
    """Tokens of all outputs of a request."""
    step_tokens: Histogram = field(default_factory=_tokens)
    """Tokens that a step computes, without padding."""
    step: Histogram = field(default_factory=_seconds)
    """Time of a step, its bookkeeping included."""


class StartupTimer:
    """Seconds of each phase since `begin`, in the order in which they first ended."""

    def __init__(self, begin: float | None = None) -> None:
        """Start at `begin`, a moment of `time.monotonic`; without it, now."""
        self.seconds: dict[str, float] = {}
        self._end = time.monotonic() if begin is None else begin

    def end(self, name: str, ended_at: float | None = None) -> None:
        """Add the time since the last call, up to the moment `ended_at` or now, to phase `name`."""
        now = time.monotonic() if ended_at is None else ended_at
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._end
        self._end = now
