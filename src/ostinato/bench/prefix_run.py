"""Runs of the asks of a prefix workload on an engine, a few at a time, and statistics of the results."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ostinato.bench.figures import percentiles, spread
from ostinato.bench.prefix_workloads import PromptRequest
from ostinato.cache.report import MissCause

if TYPE_CHECKING:
    from ostinato.engine.engine import EngineCore
    from ostinato.engine.outputs import RequestOutput

COUNTERS = ("checkpoints_taken", "checkpoints_not_taken", "evicted_checkpoints", "evicted_blocks", "preemptions")
"""Counters of the engine's statistics that are reported per round."""


@dataclass(frozen=True)
class AskResult:
    """Result of one ask. `misses` are tokens by cause; with the cached ones they add up to the prompt."""

    role: str
    prompt_tokens: int
    cached_tokens: int
    misses: dict[str, int]
    first_token_seconds: float
    """Seconds to the first token from its arrival, which is when it was asked."""


@dataclass(frozen=True)
class PrefixRound:
    """All asks of a workload, served once; `counters` are the changes meanwhile."""

    served: tuple[AskResult, ...]
    counters: dict[str, int]

    def of_role(self, role: str) -> list[AskResult]:
        return [each for each in self.served if each.role == role]


def run_round(engine: EngineCore, asks: Sequence[PromptRequest], concurrency: int, number: int) -> PrefixRound:
    """Serve `asks`, at most `concurrency` of them at once: the first in order whose predecessor is done comes next.

    Asks of role `cold` get a cache salt of round `number`, so they find nothing that others have left.
    """
    before = _counters(engine)
    waiting = list(range(len(asks)))
    running: dict[str, int] = {}
    done: dict[int, RequestOutput] = {}
    answers: dict[int, list[int]] = {}
    while waiting or running:
        ready = [each for each in waiting if asks[each].after is None or asks[each].after in done]
        for each in ready[: concurrency - len(running)]:
            waiting.remove(each)
            running[_add(engine, asks[each], answers, number)] = each
        for output in engine.step():
            if output.error is not None:
                raise output.error
            if output.finished:
                each = running.pop(output.request_id)
                done[each], answers[each] = output, output.outputs[0].token_ids
    served = tuple(_served(ask, done[each]) for each, ask in enumerate(asks))
    after = _counters(engine)
    return PrefixRound(served, {name: after[name] - before[name] for name in after})


def _add(engine: EngineCore, ask: PromptRequest, answers: dict[int, list[int]], number: int) -> str:
    from ostinato.sample.params import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=ask.output_len, ignore_eos=True)
    salt = f"cold {number}" if ask.role == "cold" else None
    return engine.add_request(ask.prompt(answers), params, cache_salt=salt)


def _served(ask: PromptRequest, output: RequestOutput) -> AskResult:
    times, cache = output.times, output.cache
    assert times.first_token is not None, "a finished request has its first token"
    assert cache is not None, "a finished request knows what it found in the cache"
    return AskResult(
        role=ask.role,
        prompt_tokens=len(output.prompt_token_ids),
        cached_tokens=cache.cached_tokens,
        misses=dict(cache.misses),
        first_token_seconds=times.first_token - times.arrival,
    )


def _counters(engine: EngineCore) -> dict[str, int]:
    stats = engine.stats()
    return {name: (stats | stats["prefix_cache"])[name] for name in COUNTERS}


def prefix_figures(rounds: Sequence[PrefixRound], baseline: Sequence[PrefixRound] | None) -> dict[str, Any]:
    """Return tokens found and missed, and seconds to the first token, over the counted asks of all rounds.

    `baseline` are the same rounds in a configuration that finds nothing; `first_token_ratio` is the mean time over
    theirs, round by round. None without a baseline.
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


def second_turn_figures(rounds: Sequence[PrefixRound], baseline: Sequence[PrefixRound] | None) -> dict[str, Any] | None:
    """Return the seconds to the first token of one prompt, cold and warm, and the ratio of both.

    Return None for a workload without cold asks. `cold_ratio` is the cold time over that of the baseline: the cost of
    filling the cache.
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


def _counted_seconds(one: PrefixRound) -> float:
    return statistics.mean(each.first_token_seconds for each in one.of_role("counted"))


def _cold_seconds(one: PrefixRound) -> float:
    return statistics.mean(each.first_token_seconds for each in one.of_role("cold"))


def _ratio(
    rounds: Sequence[PrefixRound], baseline: Sequence[PrefixRound] | None, seconds: Callable[[PrefixRound], float]
) -> dict[str, float] | None:
    if baseline is None:
        return None
    return spread([seconds(ours) / seconds(theirs) for ours, theirs in zip(rounds, baseline, strict=True)])


def _round_figures(one: PrefixRound) -> dict[str, Any]:
    counted = one.of_role("counted")
    return {
        "cached_tokens": sum(each.cached_tokens for each in counted),
        "first_token_seconds": [each.first_token_seconds for each in counted],
        "cold_first_token_seconds": [each.first_token_seconds for each in one.of_role("cold")],
        **one.counters,
    }
