"""The figures of the prefix benchmark: pure functions of what rounds saw."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from ostinato.bench.prefix_run import Round
from ostinato.bench.trace import percentiles, spread
from ostinato.cache.report import MissCause


def prefix_figures(rounds: Sequence[Round], baseline: Sequence[Round] | None) -> dict[str, Any]:
    """Tokens found and missed, and seconds to the first token, over the counted asks of all rounds.

    `baseline` are the same rounds where nothing can be found; `first_token_ratio` is the mean time over theirs,
    round by round. None without a baseline.
    """
    served = [each for one in rounds for each in one.of_role("counted")]
    seconds = [each.first_token_seconds for each in served]
    prompt_tokens = sum(each.prompt_tokens for each in served)
    cached_tokens = sum(each.cached_tokens for each in served)
    misses: Counter[str] = Counter()
    counters: Counter[str] = Counter()
    for each in served:
        misses.update(each.misses)
    for one in rounds:
        counters.update(one.counters)
    times = percentiles(seconds)
    return {
        "requests": len(served),
        "prompt_tokens": prompt_tokens,
        "cached_tokens": cached_tokens,
        "hit_rate": cached_tokens / prompt_tokens,
        "misses": {cause.value: misses[cause.value] for cause in MissCause if misses[cause.value]},
        "time_to_first_token": times and {"mean": statistics.mean(seconds), **times},
        "first_token_ratio": _ratio(rounds, baseline, _counted_seconds),
        **counters,
        "rounds": [_round_figures(one) for one in rounds],
    }


def second_turn_figures(rounds: Sequence[Round], baseline: Sequence[Round] | None) -> dict[str, Any] | None:
    """Seconds to the first token of one prompt, cold and warm, and how many times sooner the warm one is; None
    for a workload that asks nothing cold.

    `cold_ratio` is the cold time over that of the baseline: what it costs to fill the cache.
    """
    if not rounds[0].of_role("cold"):
        return None
    cold, warm = [_cold_seconds(one) for one in rounds], [_counted_seconds(one) for one in rounds]
    return {
        "cold_seconds": spread(cold),
        "warm_seconds": spread(warm),
        "speedup": spread([slow / fast for slow, fast in zip(cold, warm, strict=True)]),
        "cold_ratio": _ratio(rounds, baseline, _cold_seconds),
    }


def _counted_seconds(one: Round) -> float:
    return statistics.mean(each.first_token_seconds for each in one.of_role("counted"))


def _cold_seconds(one: Round) -> float:
    return statistics.mean(each.first_token_seconds for each in one.of_role("cold"))


def _ratio(
    rounds: Sequence[Round], baseline: Sequence[Round] | None, seconds: Callable[[Round], float]
) -> dict[str, float] | None:
    if baseline is None:
        return None
    return spread([seconds(ours) / seconds(theirs) for ours, theirs in zip(rounds, baseline, strict=True)])


def _round_figures(one: Round) -> dict[str, Any]:
    counted = one.of_role("counted")
    return {
        "cached_tokens": sum(each.cached_tokens for each in counted),
        "first_token_seconds": [each.first_token_seconds for each in counted],
        "cold_first_token_seconds": [each.first_token_seconds for each in one.of_role("cold")],
        **one.counters,
    }
