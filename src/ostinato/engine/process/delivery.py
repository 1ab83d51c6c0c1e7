"""What outputs have gained since they were last handed over, and when the next handing over is due."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from ostinato.engine.outputs import CompletionOutput, RequestOutput, RequestTimes
from ostinato.schedule.batch import TokenLogprobs

SHARE = 0.1
"""The most of a processor's time that handing outputs over may take; waits are as long as that needs."""
LONGEST_WAIT = 0.1
"""Seconds after which outputs are handed over whatever it costs."""


class SampleDelta(NamedTuple):
    """What one of a request's `n` outputs has gained."""

    sample_index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None
    """One per token, if the request asked for them."""
    finish_reason: str | None
    stop_reason: int | str | None

    def then(self, later: SampleDelta) -> SampleDelta:
        """Both gains as one."""
        logprobs = None if self.logprobs is None else self.logprobs + (later.logprobs or ())
        return SampleDelta(
            self.sample_index,
            self.text + later.text,
            self.token_ids + later.token_ids,
            logprobs,
            later.finish_reason,
            later.stop_reason,
        )


class OutputDelta(NamedTuple):
    """What one request has gained; never changed once it is made."""

    request_id: str
    samples: Sequence[SampleDelta]
    """Those of its outputs that gained something or ended, by index."""
    num_cached_tokens: int | None
    times: RequestTimes
    """Of the request so far."""
    output: RequestOutput | None = None
    """The whole output, once the request has ended and nothing changes it any more."""
    prompt_logprobs: Sequence[TokenLogprobs | None] | None = None
    """Of the prompt, if the request asked for them: with the first token of its first output, which scores it."""

    def then(self, later: OutputDelta) -> OutputDelta:
        """Both gains as one."""
        samples = {sample.sample_index: sample for sample in self.samples}
        for sample in later.samples:
            before = samples.get(sample.sample_index)
            samples[sample.sample_index] = sample if before is None else before.then(sample)
        ordered = [samples[index] for index in sorted(samples)]
        scores = self.prompt_logprobs or later.prompt_logprobs
        return OutputDelta(self.request_id, ordered, later.num_cached_tokens, later.times, later.output, scores)


class Gains:
    """Collects, step by step, what outputs have gained since the last `take`. For one thread."""

    def __init__(self) -> None:
        self._changed: dict[str, RequestOutput] = {}
        self._given: dict[str, list[tuple[int, int, bool]]] = {}  # characters, tokens, ended; of each sample
        self.is_urgent = False
        """Whether a request is among them that has begun or ended, and so should not wait."""

    def __bool__(self) -> bool:
        return bool(self._changed)

    @property
    def num_kept(self) -> int:
        """Requests of which anything is remembered."""
        return len(self._given.keys() | self._changed.keys())

    def note(self, outputs: Iterable[RequestOutput]) -> None:
        """Takes in what a step has changed."""
        for output in outputs:
            self._changed[output.request_id] = output
            self.is_urgent = self.is_urgent or output.finished or output.request_id not in self._given

    def take(self) -> list[OutputDelta]:
        """All gains since the last call."""
        deltas = [self._gain(output) for output in self._changed.values()]
        self._changed.clear()
        self.is_urgent = False
        return deltas

    def drop(self, request_id: str) -> None:
        """Forgets a request that nobody waits for any more."""
        self._changed.pop(request_id, None)
        self._given.pop(request_id, None)

    def _gain(self, output: RequestOutput) -> OutputDelta:
        given = self._given.setdefault(output.request_id, [(0, 0, False)] * len(output.outputs))
        scores = output.prompt_logprobs if given[0][1] == 0 < len(output.outputs[0].token_ids) else None
        samples = []
        for index, sample in enumerate(output.outputs):
            state = (len(sample.text), len(sample.token_ids), sample.finished)
            if state != given[index]:
                samples.append(_sample_gain(sample, *given[index][:2]))
                given[index] = state
        if output.finished:
            del self._given[output.request_id]
        ended = output if output.finished else None
        return OutputDelta(output.request_id, samples, output.num_cached_tokens, output.times, ended, scores)


def _sample_gain(sample: CompletionOutput, num_characters: int, num_tokens: int) -> SampleDelta:
    return SampleDelta(
        sample.index,
        sample.text[num_characters:],
        tuple(sample.token_ids[num_tokens:]),
        None if sample.logprobs is None else tuple(sample.logprobs[num_tokens:]),
        sample.finish_reason,
        sample.stop_reason,
    )


class Pace:
    """When gains are handed over to the server's event loop: at once while that is cheap; with many streams so seldom
    that what the loop does with them leaves the engine its processors. Gains that wait are handed over as one."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._next = 0.0
        self._last_cost = 0.0
        self._in_flight = False

    def allows(self, is_urgent: bool) -> bool:
        """Whether gains may be handed over now. Urgent ones need only wait for those before them to be settled."""
        return not self._in_flight and (is_urgent or self._clock() >= self._next)

    def sent(self) -> None:
        """Gains have been handed over."""
        self._in_flight = True

    def settled(self, cost: float) -> None:
        """The loop has worked `cost` seconds on the gains. Of two costs in a row the lower one counts: other
        work of the loop may have come between."""
        wait = min(cost, self._last_cost) * (1 / SHARE - 1)
        self._next = self._clock() + min(wait, LONGEST_WAIT)
        self._last_cost = cost
        self._in_flight = False
