"""What a round measured, and the figures made of it: pure functions of moments in time."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any


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
    def decode_step_seconds(self) -> list[float]:
        """Lengths of the steps after every request had its first token."""
        return [end - begin for begin, end in pairwise(self.step_ends) if end > self.prefill_end]


def throughput_figures(traces: Sequence[Trace]) -> dict[str, Any]:
    """Rates in tokens/s, each as median, min and max over the rounds, and the lengths of decode steps.

    `total` counts prompt and output tokens over the whole round, `output` the output tokens alone; `prefill`
    prompt tokens until every request had its first output token; `decode` the tokens after that moment, over
    the time after it, None if there are none.
    """
    decodes = [trace for trace in traces if trace.decode_tokens]
    rates = {
        "total_tokens_per_second": [(t.prompt_tokens + t.output_tokens) / t.end for t in traces],
        "output_tokens_per_second": [t.output_tokens / t.end for t in traces],
        "prefill_tokens_per_second": [t.prompt_tokens / t.prefill_end for t in traces],
        "decode_tokens_per_second": [t.decode_tokens / (t.end - t.prefill_end) for t in decodes],
        "seconds": [t.end for t in traces],
    }
    steps = list(chain.from_iterable(trace.decode_step_seconds for trace in traces))
    return {
        **{name: spread(values) for name, values in rates.items()},
        "steps": len(traces[0].step_ends),
        "decode_steps": len(traces[0].decode_step_seconds),
        "decode_step_seconds": percentiles(steps),
    }


def latency_figures(traces: Sequence[Trace]) -> dict[str, Any]:
    """Seconds to the first token and between tokens, over all requests of all rounds."""
    requests = [times for trace in traces for times in trace.token_times]
    gaps = [later - earlier for times in requests for earlier, later in pairwise(times)]
    return {
        "time_to_first_token": percentiles([times[0] for times in requests]),
        "inter_token_latency": percentiles(gaps),
    }


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
