"""Runs requests on an engine to their end, with preemptions now and then."""

from __future__ import annotations

from collections.abc import Sequence

from ostinato.engine.engine import Engine
from ostinato.sample.params import SamplingParams

FIRST_PREEMPTION, GAP = 3, 5
"""Steps before all requests are preempted for the first time, and from there to the second; gaps double, so that every
request gets to its end."""

Request = tuple[Sequence[int], SamplingParams]


def complete(engine: Engine, requests: Sequence[Request], preempts: bool = False) -> list[list[int]]:
    """The tokens of requests that come at once. Raises what ended one of them, AssertionError if memory is left over
    behind them."""
    ids = [engine.add(prompt, params) for prompt, params in requests]
    tokens: dict[str, list[int]] = {}
    step, next_preemption, gap = 0, FIRST_PREEMPTION, GAP
    while engine.has_unfinished:
        for output in engine.step():
            if output.error is not None:
                raise output.error
            if output.finished:
                tokens[output.request_id] = output.outputs[0].token_ids
        step += 1
        if preempts and step == next_preemption:
            for request_id in ids:
                engine.scheduler.preempt(request_id)
            next_preemption, gap = next_preemption + gap, 2 * gap
    engine.scheduler.check_integrity()
    usage = engine.scheduler.cache.usage()
    assert usage.blocks_used == usage.slots_used == 0, "finished requests hold blocks or slots"
    return [tokens[request_id] for request_id in ids]
