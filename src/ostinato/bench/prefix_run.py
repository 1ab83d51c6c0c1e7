"""Runs the asks of a prefix workload on an engine, a few at a time, and notes what became of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ostinato.bench.prefix_workloads import Ask

if TYPE_CHECKING:
    from ostinato.engine.engine import Engine
    from ostinato.engine.outputs import RequestOutput

COUNTERS = ("checkpoints_taken", "checkpoints_not_taken", "evicted_checkpoints", "evicted_blocks", "preemptions")
"""Of the engine's statistics: what is counted while asks are served."""


@dataclass(frozen=True)
class Served:
    """What became of one ask. `misses` are tokens by cause; with the cached ones they add up to the prompt."""

    role: str
    prompt_tokens: int
    cached_tokens: int
    misses: dict[str, int]
    first_token_seconds: float
    """From its arrival, which is when it was asked."""


@dataclass(frozen=True)
class Round:
    """All asks of a workload, served once; `counters` are what happened meanwhile."""

    served: tuple[Served, ...]
    counters: dict[str, int]

    def of_role(self, role: str) -> list[Served]:
        return [each for each in self.served if each.role == role]


def run_round(engine: Engine, asks: Sequence[Ask], concurrency: int, number: int) -> Round:
    """Serves `asks`, at most `concurrency` of them at once: the first in line that waits for nobody comes next.

    Those of role `cold` get a cache salt of round `number`, so they find nothing that others have left.
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
    return Round(served, {name: after[name] - before[name] for name in after})


def _add(engine: Engine, ask: Ask, answers: dict[int, list[int]], number: int) -> str:
    from ostinato.sample.params import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=ask.output_len, ignore_eos=True)
    salt = f"cold {number}" if ask.role == "cold" else None
    return engine.add(ask.prompt(answers), params, cache_salt=salt)


def _served(ask: Ask, output: RequestOutput) -> Served:
    times, cache = output.times, output.cache
    assert times.first_token is not None, "a finished request has its first token"
    assert cache is not None, "a finished request knows what it found in the cache"
    return Served(
        role=ask.role,
        prompt_tokens=len(output.prompt_token_ids),
        cached_tokens=cache.cached_tokens,
        misses=dict(cache.misses),
        first_token_seconds=times.first_token - times.arrival,
    )


def _counters(engine: Engine) -> dict[str, int]:
    stats = engine.stats()
    return {name: (stats | stats["prefix_cache"])[name] for name in COUNTERS}
