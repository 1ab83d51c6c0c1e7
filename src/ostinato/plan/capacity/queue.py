"""Simulation of an engine as a queue. Only times are computed, so that an hour of traffic takes a second.

Requests arrive, wait for a row, have their prompt computed in chunks while other rows decode, and get a token from each
step.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ostinato.plan.traffic import RequestLengths


class StepSeconds(Protocol):
    """Signature of `StepTimeTable.seconds`."""

    def __call__(self, rows: int, context: float, prompt_tokens: int = 0, before: float = 0) -> float: ...


@dataclass(frozen=True)
class EngineCapacity:
    """Capacity of an engine: rows, tokens of a step, and tokens in blocks of the cache (None: without limit)."""

    rows: int
    step_tokens: int
    cache_tokens: int | None


@dataclass(frozen=True)
class Arrival:
    """A request: arrival time in seconds, prompt length, the part of it that must be computed, and output length."""

    time: float
    prompt: int
    computed: int
    output: int


@dataclass(frozen=True)
class RequestLatency:
    """Seconds from the arrival to the first token, and mean seconds per later token, None with one token."""

    first_token: float
    per_token: float | None


@dataclass(frozen=True)
class SimulationResult:
    """Result of a simulation.

    `served` has all requests in order of arrival; `seconds` is the time until the last has ended, `busy` how much of it
    the engine computed, and `mean_rows` the mean number of rows meanwhile.
    """

    served: tuple[RequestLatency, ...]
    seconds: float
    busy: float
    mean_rows: float


def make_arrivals(lengths: RequestLengths, per_second: float, count: int, seed: int) -> list[Arrival]:
    """Return requests at random times (Poisson), with prompt and output lengths sampled independently from the counts.

    The same share of each prompt is found in the prefix cache, except its last token.
    """
    chance = random.Random(seed)
    prompts, outputs = (_draw(counts, count, chance) for counts in (lengths.prompt_tokens, lengths.output_tokens))
    share, time, made = 1 - lengths.cached_share, 0.0, []
    for prompt, output in zip(prompts, outputs, strict=True):
        time += chance.expovariate(per_second)
        made.append(Arrival(time, prompt, max(1, round(prompt * share)), output))
    return made


def _draw(counts: Counter[int], count: int, chance: random.Random) -> list[int]:
    lengths = sorted(counts)
    return chance.choices(lengths, [counts[length] for length in lengths], k=count)


@dataclass(slots=True)
class _Job:
    place: int
    request: Arrival
    left: int
    first: float = 0.0

    @property
    def tokens(self) -> int:
        return self.request.prompt + self.request.output


def simulate(arrivals: Sequence[Arrival], room: EngineCapacity, step_seconds: StepSeconds) -> SimulationResult:
    """Simulate how long each of `arrivals`, which are in order of time, waits for its tokens.

    As in the scheduler, rows come first, then prompts in order of arrival, with as many tokens as the step has left. A
    request is admitted when a row and blocks for all of its tokens are free; so none is ever preempted.
    """
    waiting: deque[_Job] = deque()
    prompts: deque[_Job] = deque()
    rows: list[tuple[int, int, _Job]] = []
    """Heap of (number of the step that gives the last token, place, job)."""
    served: dict[int, RequestLatency] = {}
    now = busy = row_seconds = 0.0
    step = come = held = context = 0
    while come < len(arrivals) or waiting or prompts or rows:
        while come < len(arrivals) and arrivals[come].time <= now:
            waiting.append(_Job(come, arrivals[come], arrivals[come].computed))
            come += 1
        while waiting and len(rows) + len(prompts) < room.rows and _has_blocks(room, held, waiting[0]):
            held += waiting[0].tokens
            prompts.append(waiting.popleft())
        if not rows and not prompts:
            now = arrivals[come].time
            continue
        before, computed, ended = _compute_prompts(prompts, room.step_tokens - len(rows))
        count, mean_context = 1, context / len(rows) if rows else 0.0
        if not computed:
            # Nothing changes before a row ends or a request arrives, so these steps are simulated as one.
            count = rows[0][0] - step
            if come < len(arrivals):
                until = arrivals[come].time - now
                count = max(1, min(count, math.ceil(until / step_seconds(len(rows), mean_context))))
                # Steps grow longer, so the estimate may be too high.
                while count > 1 and (count - 1) * step_seconds(len(rows), mean_context + (count - 2) / 2) >= until:
                    count -= 1
            mean_context += (count - 1) / 2
        seconds = count * step_seconds(len(rows), mean_context, computed, before)
        now, busy, step = now + seconds, busy + seconds, step + count
        row_seconds += len(rows) * seconds
        context += len(rows) * count
        for job in ended:
            job.first = now
            heapq.heappush(rows, (step + job.request.output - 1, job.place, job))
            context += job.request.prompt + 1
        while rows and rows[0][0] <= step:
            _, _, job = heapq.heappop(rows)
            context -= job.tokens
            held -= job.tokens
            after = job.request.output - 1
            served[job.place] = RequestLatency(
                job.first - job.request.time, (now - job.first) / after if after else None
            )
    return SimulationResult(tuple(served[place] for place in range(len(arrivals))), now, busy, row_seconds / now)


def _has_blocks(room: EngineCapacity, held: int, job: _Job) -> bool:
    return room.cache_tokens is None or not held or held + job.tokens <= room.cache_tokens


def _compute_prompts(prompts: deque[_Job], budget: int) -> tuple[int, int, list[_Job]]:
    """Return (earlier tokens of the first prompt, tokens that this step computes, prompts that end with it)."""
    before = computed = 0
    ended: list[_Job] = []
    while prompts and computed < budget:
        job = prompts[0]
        if not computed:
            before = job.request.prompt - job.left
        taken = min(budget - computed, job.left)
        job.left -= taken
        computed += taken
        if job.left:
            break
        ended.append(prompts.popleft())
    return before, computed, ended
