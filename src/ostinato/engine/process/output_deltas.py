"""Output deltas since the last message to the server, and the time at which they are sent."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple, cast

from ostinato.engine.outputs import CompletionOutput, RequestOutput, RequestTimes
from ostinato.scheduler.batch import TokenLogprobs
from ostinato.scheduler.request import FinishReason

MAX_SERVER_SHARE = 0.1
"""Largest share of a core's time that the server may spend on receiving outputs; sending waits for it."""
MAX_DELAY_SECONDS = 0.1
"""Longest time in seconds that outputs wait to be sent."""


class PackedLogprobs(Sequence[TokenLogprobs | None]):
    """Log-probabilities in a few arrays. Sending and joining them copies bytes; an entry becomes an object when read.

    An entry takes 20 bytes and 12 for each of its best tokens, a tenth of the object.
    """

    __slots__ = ("_arrays",)

    def __init__(self, *arrays: bytes) -> None:
        """Make it of arrays as bytes: ranks and counts of entries, then ids and values of own and best tokens."""
        self._arrays = arrays or (b"",) * 4

    @classmethod
    def of(cls, logprobs: Iterable[TokenLogprobs | None]) -> PackedLogprobs:
        """Pack log-probabilities; None stands for a token without one."""
        if isinstance(logprobs, cls):
            return logprobs
        ranks, counts, ids, values = array("i"), array("i"), array("i"), array("d")
        for scored in logprobs:
            pairs = () if scored is None else ((scored.token_id, scored.logprob), *scored.top)
            ranks.append(0 if scored is None else scored.rank)
            counts.append(len(pairs))
            ids.extend([token_id for token_id, _ in pairs])
            values.extend([value for _, value in pairs])
        return cls(*(part.tobytes() for part in (ranks, counts, ids, values)))

    @classmethod
    def join(cls, parts: Iterable[Iterable[TokenLogprobs | None]]) -> PackedLogprobs:
        """Return the entries of all parts, in order."""
        return cls(*map(b"".join, zip(*(cls.of(part)._arrays for part in parts), strict=True)))

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self._arrays))

    def __len__(self) -> int:
        return len(self._arrays[0]) // 4

    def __getitem__(self, index: Any) -> Any:
        """Return an entry, or a list of them; it costs as much as reading all."""
        return list(self)[index]

    def __iter__(self) -> Iterator[TokenLogprobs | None]:
        ranks, counts, ids = (memoryview(each).cast("i") for each in self._arrays[:3])
        values = memoryview(self._arrays[3]).cast("d")
        end = 0
        for rank, count in zip(ranks, counts, strict=True):
            begin, end = end, end + count
            pairs = tuple(zip(ids[begin:end], values[begin:end], strict=True))
            yield TokenLogprobs(*pairs[0], rank, pairs[1:]) if pairs else None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    def __reduce__(self) -> tuple[object, ...]:
        return PackedLogprobs, self._arrays


class SampleDelta(NamedTuple):
    """Output delta of one of a request's `n` samples."""

    sample_index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: PackedLogprobs | None
    """Log-probabilities, one entry per token, if the request asked for them."""
    finish_reason: str | None
    stop_reason: int | str | None


def held_bytes(samples: Iterable[SampleDelta | CompletionOutput]) -> int:
    """Return the bytes that samples hold, about; their log-probabilities are packed, or None."""
    num_bytes = 0
    for sample in samples:
        num_bytes += len(sample.text) + 8 * len(sample.token_ids)
        if isinstance(sample.logprobs, PackedLogprobs):
            num_bytes += sample.logprobs.num_bytes
    return num_bytes


def join_samples(deltas: Sequence[SampleDelta]) -> SampleDelta:
    """Return the deltas of one sample as one."""
    last = deltas[-1]
    if len(deltas) == 1:
        return last
    return last._replace(
        text="".join([delta.text for delta in deltas]),
        token_ids=tuple(chain.from_iterable([delta.token_ids for delta in deltas])),
        logprobs=None if last.logprobs is None else PackedLogprobs.join([delta.logprobs or () for delta in deltas]),
    )


class OutputDelta(NamedTuple):
    """Output delta of one request."""

    request_id: str
    samples: Sequence[SampleDelta]
    """Samples with new output or an end, by index."""
    num_cached_tokens: int | None
    times: RequestTimes
    """Times of the request so far."""
    output: RequestOutput | None = None
    """Whole output, once the request has ended."""
    prompt_logprobs: PackedLogprobs | None = None
    """Log-probabilities of the prompt, if asked for. They come with the first token of the first output."""
    num_created_tokens: int = 0
    """Tokens after the hit and up to the last pinned mark."""
    unpinned_marks: tuple[int, ...] = ()
    """Block boundaries of the marks that got no pinned checkpoint."""

    @property
    def num_bytes(self) -> int:
        """Bytes that the samples hold, about."""
        return held_bytes(self.samples)


def join_deltas(deltas: Sequence[OutputDelta]) -> OutputDelta:
    """Return the deltas of one request as one."""
    last = deltas[-1]
    if len(deltas) == 1:
        return last
    samples: dict[int, list[SampleDelta]] = {}
    for delta in deltas:
        for sample in delta.samples:
            samples.setdefault(sample.sample_index, []).append(sample)
    scores = next((delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs is not None), None)
    return last._replace(samples=[join_samples(samples[index]) for index in sorted(samples)], prompt_logprobs=scores)


def without_move(delta: OutputDelta) -> OutputDelta | None:
    """Return a moved request's last delta without its end, as the next engine continues it; None if it is empty."""
    moved_reason = FinishReason.MOVED.value
    samples = [
        sample._replace(finish_reason=None) if sample.finish_reason == moved_reason else sample
        for sample in delta.samples
    ]
    kept_samples = [sample for sample in samples if sample.text or sample.token_ids or sample.finish_reason is not None]
    return delta._replace(samples=kept_samples, output=None) if kept_samples else None


class DeltaBuffer:
    """Collects, step by step, the output deltas since the last `take`. For one thread."""

    def __init__(self) -> None:
        self._changed: dict[str, RequestOutput] = {}
        self._sent: dict[str, list[tuple[int, int, bool]]] = {}  # per sample: characters, tokens, ended
        self._whole: set[str] = set()
        self._urgent: set[str] = set()

    def __bool__(self) -> bool:
        return bool(self._changed)

    @property
    def is_urgent(self) -> bool:
        """True if a request has begun or ended, so that its delta should not wait."""
        return bool(self._urgent)

    @property
    def num_kept(self) -> int:
        """Number of requests for which anything is kept."""
        return len(self._sent.keys() | self._changed.keys() | self._whole)

    def hold_until_end(self, request_id: str) -> None:
        """Hold the request's deltas until it has ended, since its reader does not look before."""
        self._whole.add(request_id)

    def resume(self, output: RequestOutput) -> None:
        """Note the state of an imported request, whose output so far the other engine has already sent."""
        self._sent[output.request_id] = [_state(sample) for sample in output.outputs]

    def note(self, outputs: Iterable[RequestOutput]) -> None:
        """Note the outputs that a step has changed."""
        for output in outputs:
            if output.request_id in self._whole and not output.finished:
                continue
            self._changed[output.request_id] = output
            if output.finished or output.request_id not in self._sent:
                self._urgent.add(output.request_id)

    def take(self, urgent_alone: bool = False) -> list[OutputDelta]:
        """Return the deltas since the last call: all, or only of requests that have begun or ended."""
        changed = self._changed
        if urgent_alone:
            changed = {name: output for name, output in self._changed.items() if name in self._urgent}
        self._changed = {name: output for name, output in self._changed.items() if name not in changed}
        self._urgent.clear()
        return [self._delta_of(output) for output in changed.values()]

    def drop(self, request_id: str) -> None:
        """Drop an abandoned request."""
        self._changed.pop(request_id, None)
        self._sent.pop(request_id, None)
        self._whole.discard(request_id)
        self._urgent.discard(request_id)

    def _delta_of(self, output: RequestOutput) -> OutputDelta:
        sent = self._sent.setdefault(output.request_id, [(0, 0, False)] * len(output.outputs))
        scores = output.prompt_logprobs if sent[0][1] == 0 < len(output.outputs[0].token_ids) else None
        packed_scores = None if scores is None else PackedLogprobs.of(scores)
        samples = []
        for index, sample in enumerate(output.outputs):
            state = _state(sample)
            if state != sent[index]:
                samples.append(_sample_delta(sample, *sent[index][:2]))
                sent[index] = state
        if output.finished:
            del self._sent[output.request_id]
            self._whole.discard(output.request_id)
        ended = output if output.finished else None
        created, unpinned = (
            (0, ()) if output.cache is None else (output.cache.created_tokens, output.cache.unpinned_marks)
        )
        return OutputDelta(
            output.request_id, samples, output.num_cached_tokens, output.times, ended, packed_scores, created, unpinned
        )


def packed(output: RequestOutput) -> RequestOutput:
    """Return a whole output whose samples have packed log-probabilities."""
    samples: list[Any] = [
        sample if sample.logprobs is None else replace(sample, logprobs=cast(Any, PackedLogprobs.of(sample.logprobs)))
        for sample in output.outputs
    ]
    return replace(output, outputs=samples)


def _state(sample: CompletionOutput) -> tuple[int, int, bool]:
    """Return the sample's number of characters and of tokens, and whether it has ended."""
    return len(sample.text), len(sample.token_ids), sample.finished


def _sample_delta(sample: CompletionOutput, num_characters: int, num_tokens: int) -> SampleDelta:
    return SampleDelta(
        sample.index,
        sample.text[num_characters:],
        tuple(sample.token_ids[num_tokens:]),
        None if sample.logprobs is None else PackedLogprobs.of(sample.logprobs[num_tokens:]),
        sample.finish_reason,
        sample.stop_reason,
    )


class DeltaPacer:
    """Rate control of the messages to the server: deltas are sent at once while that is cheap.

    With many streams they are sent less often, so that the server's work on them leaves the processors to the engine.
    Deltas that wait are sent as one. Those of requests that begin or end do not wait for the others, and do not delay
    the others.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._next = 0.0
        self._last_cost = 0.0
        self._in_flight = self._are_all = False

    @property
    def allows_urgent(self) -> bool:
        """True if urgent deltas may be sent now: the server is done with the last ones."""
        return not self._in_flight

    @property
    def allows_all(self) -> bool:
        """True if all deltas may be sent now."""
        return not self._in_flight and self._clock() >= self._next

    def sent(self, are_all: bool) -> None:
        """Note that deltas have been sent: all, or only the urgent ones."""
        self._in_flight, self._are_all = True, are_all

    def settled(self, cost: float) -> None:
        """Note that the server's loop is done with the deltas, after `cost` seconds.

        The lower of two costs in a row counts, since one of them may include other work of the loop.
        """
        self._in_flight = False
        if not self._are_all:
            return
        wait = min(cost, self._last_cost) * (1 / MAX_SERVER_SHARE - 1)
        self._next = self._clock() + min(wait, MAX_DELAY_SECONDS)
        self._last_cost = cost
