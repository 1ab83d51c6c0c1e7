"""Runs requests on an engine, with preemptions now and then, and with drafts that are wrong on purpose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ostinato.engine.engine import Engine
from ostinato.sample.noise import mix64
from ostinato.sample.params import SamplingParams
from ostinato.schedule.batch import Batch
from ostinato.speculate.proposer import Proposer

FIRST_PREEMPTION, GAP = 3, 5
"""Steps before all requests are preempted for the first time, and from there to the second; gaps double, so that every
request gets to its end."""
WRONG_SHARE = 5
"""One draft in so many is made wrong."""

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


def mislead(engine: Engine) -> None:
    """Makes some of the engine's drafts wrong, so that they are rejected at every depth, however good the drafter is;
    nothing without speculation."""
    drafting = engine.runner.drafting
    if drafting is not None:
        proposer = _Misleading(drafting.proposer, engine.spec.vocab_size)
        engine.runner.drafting = replace(drafting, proposer=proposer)


class _Misleading:
    """Another proposer's drafts, of which those at some positions are the token after the one proposed."""

    def __init__(self, proposer: Proposer, vocab_size: int) -> None:
        self._proposer = proposer
        self._vocab_size = vocab_size

    def propose(self, batch: Batch) -> list[tuple[int, ...]]:
        proposed = self._proposer.propose(batch)
        return [
            tuple(self._changed(token, row.end + place) for place, token in enumerate(drafts))
            for row, drafts in zip(batch.rows, proposed, strict=True)
        ]

    def _changed(self, token: int, position: int) -> int:
        return (token + 1) % self._vocab_size if mix64(position) % WRONG_SHARE == 0 else token
