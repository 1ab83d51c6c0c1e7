"""Capacity estimates: the requests per second that a number of engines serve, and latencies at a given rate.

The seconds of a step are interpolated between predicted steps. A deadline is the latency that users expect of a server.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ostinato.config import EngineConfig
from ostinato.errors import CapacityError, ConfigError, Remedy
from ostinato.ops.kernel_cost import StepShape
from ostinato.plan.capacity.queue import EngineCapacity, StepSeconds, make_arrivals, simulate
from ostinato.plan.device.gpu_catalogue import DeviceSpec
from ostinato.plan.fitting.fit import fit
from ostinato.plan.kernel_costs import LOGITS
from ostinato.plan.limits import smallest
from ostinato.plan.memory.split import sliding_window_spec
from ostinato.plan.model import ModelSpec
from ostinato.plan.plan import Plan
from ostinato.plan.prediction import ENGINE, PredictedStep, StepPredictor, make_machine
from ostinato.plan.traffic import RequestLengths


@dataclass(frozen=True)
class Deadline:
    """Seconds to the first token, and mean seconds between tokens."""

    first_token: float
    between_tokens: float

    def is_met(self, first_token: float, between_tokens: float | None) -> bool:
        """Return whether a request with these times meets it; `between_tokens` is None without a second token."""
        return first_token <= self.first_token and (between_tokens is None or between_tokens <= self.between_tokens)


def parse_deadline(text: str) -> Deadline:
    """Parse `TTFT:ITL`, both in milliseconds; ConfigError for any other text."""
    try:
        first, between = (float(part) for part in text.split(":"))
    except ValueError:
        first = between = 0.0
    if not (0 < first < math.inf and 0 < between < math.inf):
        raise ConfigError(
            f"--deadline {text!r} should be two times in milliseconds, to the first token and between tokens, 500:50"
        )
    return Deadline(first / 1e3, between / 1e3)


OF_ALL_TOKENS = ("linear", "moe", ENGINE)
"""Parts of a step that depend only on its number of tokens: a step of rows and a prompt counts them once."""
MIN_CONTEXT = 256
"""Context up to which one prediction per row count would do: keys and values are a small part of a step."""


class StepTimeTable:
    """Step times, predicted at powers of two and interpolated between, so that thousands cost few predictions."""

    def __init__(self, machine: StepPredictor) -> None:
        self._machine = machine
        self._rows: dict[tuple[int, int], PredictedStep] = {}
        self._prompts: dict[tuple[int, int], PredictedStep] = {}

    def seconds(self, rows: int, context: float, prompt_tokens: int = 0, before: float = 0) -> float:
        """Return the seconds of a step of `rows` decode rows and `prompt_tokens` tokens of prompts.

        Each row has `context` tokens before it in the mean; `before` tokens of the prompts were computed in
        earlier steps. Either part may be missing, not both.
        """
        if not prompt_tokens:
            return sum(share * self._row_step(*shape).seconds for share, shape in _around(rows, context))
        tokens = prompt_tokens + rows
        prompts = [(share, self._prompt_step(*shape)) for share, shape in _around(tokens, before)]
        if not rows:
            return sum(share * step.seconds for share, step in prompts)
        # First the matmuls of all tokens and the prompt's other parts; then the rows' other parts, including logits.
        seconds = sum(share * (step.seconds - step.parts[LOGITS]) for share, step in prompts)
        for share, shape in _around(rows, context):
            parts = self._row_step(*shape).parts
            seconds += share * sum(each for name, each in parts.items() if name not in OF_ALL_TOKENS)
        return seconds

    def _row_step(self, rows: int, context: int) -> PredictedStep:
        step = self._rows.get((rows, context))
        if step is None:
            step = self._rows[rows, context] = self._machine.predict(StepShape(rows, 1, context, decodes=True))
        return step

    def _prompt_step(self, tokens: int, before: int) -> PredictedStep:
        step = self._prompts.get((tokens, before))
        if step is None:
            step = self._prompts[tokens, before] = self._machine.predict(StepShape(1, tokens, before, decodes=False))
        return step


def _around(count: float, context: float) -> list[tuple[float, tuple[int, int]]]:
    """Return up to four predicted shapes around (count, context), each with its weight in the interpolation."""
    return [
        (of_count * of_context, (near_count, near_context))
        for of_count, near_count in _between(count, 1)
        for of_context, near_context in _between(context, MIN_CONTEXT)
        if of_count * of_context
    ]


def _between(value: float, least: int) -> tuple[tuple[float, int], tuple[float, int]]:
    """Return the next smaller and the next larger of 0, `least` and its doubles, each with its weight."""
    low, high = (0, least) if value < least else (least, 2 * least)
    while high <= value:
        low, high = high, 2 * high
    share = (value - low) / (high - low)
    return (1 - share, low), (share, high)


LOADS = (0.5, 0.8, 0.9)
"""Shares of the capacity whose rates are shown if no rate is given."""
REQUESTS = 2000
"""Number of requests simulated for each rate, after those of `WARM_UP`."""
WARM_UP = 200
"""Number of requests at the beginning, which find an empty engine and do not count."""
MAX_REPLICAS = 4096
IN_TIME = 0.99
"""Share of requests that must meet the deadline when the number of replicas is chosen."""
QUANTILES = (0.5, 0.95, 0.99)


@dataclass(frozen=True)
class OfferedLoad:
    """Offered load: request lengths and the arrival rate `per_second`; None shows `LOADS` of the capacity."""

    lengths: RequestLengths
    per_second: float | None
    deadline: Deadline | None


@dataclass(frozen=True)
class LoadPoint:
    """Estimate of one rate on one layout.

    Times are of the quantiles 0.5, 0.95 and 0.99; None if the rate exceeds the capacity, so that the queue keeps
    growing.
    """

    replicas: int
    devices: int
    """Number of devices of all replicas together."""
    per_second: float
    share: float
    """Share of the layout's capacity."""
    first_token: tuple[float, ...] | None = None
    per_token: tuple[float, ...] | None = None
    """Quantiles of the time per token; empty if no request has a second token."""
    rows: float | None = None
    """Mean number of rows of one engine."""
    in_time: float | None = None
    """Share of the requests that meet the deadline; None without one."""


@dataclass(frozen=True)
class CapacityEstimate:
    """Estimate of all shown layouts.

    `most_per_second` is the capacity of one replica, with `rows` in a step, each `step_seconds`. With `is_lower_bound`,
    step times are lower bounds, and so is each time here; the capacity is an upper bound.
    """

    requests: int
    mean_prompt: float
    mean_output: float
    cached_share: float
    most_per_second: float
    rows: float
    step_seconds: float
    is_lower_bound: bool
    deadline: Deadline | None
    loads: tuple[LoadPoint, ...] = field(default=())


def estimate_layouts(
    config: EngineConfig,
    model: ModelSpec,
    device: DeviceSpec,
    plan: Plan,
    offered: OfferedLoad,
    replicas: Sequence[int] = (),
) -> CapacityEstimate:
    """Estimate how `replicas` engines, each with `plan`, serve the `offered` load.

    Without `replicas` it is the smallest number that does, or one if no rate is given. The function is pure: the same
    arguments give the same result. A router is assumed to send requests at random, so that each replica sees its share
    of a Poisson stream. Preemption and the server's overhead are left out.

    ConfigError if the plan predicts no step, or a request is longer than max_model_len; CapacityError if no number of
    replicas meets the deadline.
    """
    if not plan.prediction.steps:
        raise ConfigError(f"no layout can be estimated without step times: {plan.prediction.reason}")
    lengths = offered.lengths
    longest, most = max(lengths.prompt_tokens) + max(lengths.output_tokens), plan.settings.max_model_len
    if longest > most:
        message = f"the traffic has requests of {longest} tokens, and max_model_len is {most}"
        raise ConfigError(message, [Remedy("max_model_len", longest)])
    settled = fit(config, model, device).settled
    dtypes = (settled.dtype, settled.ssm_state_dtype, settled.kv_cache_dtype)
    machine = make_machine(settled.model, device, plan.prediction.rates, *dtypes)
    assert machine is not None, "the plan predicted with it"
    times, room = StepTimeTable(machine).seconds, room_of(plan)
    rows, step_seconds = full_step(lengths, room, times)
    most_per_second = rows / (lengths.mean_output * step_seconds)

    def at(count: int, per_second: float) -> LoadPoint:
        return _load(count, config.tensor_parallel_size, per_second, most_per_second, offered, room, times)

    per_second = offered.per_second
    if per_second is None:
        loads = [at(count, share * count * most_per_second) for count in replicas or (1,) for share in LOADS]
    else:
        counts = replicas or (_fewest(per_second, most_per_second, offered.deadline, at),)
        loads = [at(count, per_second) for count in counts]
    return CapacityEstimate(
        lengths.num_requests,
        lengths.mean_prompt,
        lengths.mean_output,
        lengths.cached_share,
        most_per_second,
        rows,
        step_seconds,
        plan.prediction.is_lower_bound,
        offered.deadline,
        tuple(loads),
    )


def room_of(plan: Plan) -> EngineCapacity:
    """Return the capacity of an engine with this plan, without the null block."""
    blocks, size = plan.memory.num_blocks, plan.settings.block_size
    rows, rules = (
        plan.settings.max_num_seqs,
        sliding_window_spec(plan.memory, size, plan.settings.max_num_batched_tokens),
    )
    if rules is not None:
        rows = max(1, min(rows, (plan.memory.num_window_blocks - 1 - rules.shared_blocks) // rules.blocks_per_request))
    return EngineCapacity(rows, plan.settings.max_num_batched_tokens, (blocks - 1) * size if blocks else None)


def full_step(lengths: RequestLengths, room: EngineCapacity, times: StepSeconds) -> tuple[float, float]:
    """Return (rows, seconds) of the mean step of an engine that never lacks requests.

    Each row ends after as many steps as its output has tokens, and another's prompt is computed in its place: so a step
    of n rows computes n * prompt / output tokens of prompts. n is what rows, the cache and the step's tokens allow. A
    step contains long outputs more often than they arrive (`output_beside`); each holds blocks for all its tokens from
    the start, and half of its tokens are done in the mean.
    """
    prompt, output, beside = lengths.mean_prompt, lengths.mean_output, lengths.output_beside
    computed = max(1.0, prompt * (1 - lengths.cached_share))
    rows = min(float(room.rows), room.step_tokens / (1 + computed / output))
    if room.cache_tokens is not None:
        rows = min(rows, max(1.0, room.cache_tokens / (prompt + beside)))
    # A number of rows below one means one row in a part of the steps.
    rows = float(math.floor(rows)) if rows > 1 else rows
    return rows, times(max(1, int(rows)), prompt + beside / 2, max(1, round(rows * computed / output)))


def _load(
    replicas: int,
    ranks: int,
    per_second: float,
    most_per_second: float,
    offered: OfferedLoad,
    room: EngineCapacity,
    times: StepSeconds,
) -> LoadPoint:
    share = per_second / (replicas * most_per_second)
    if share >= 1:
        return LoadPoint(replicas, replicas * ranks, per_second, share)
    arrivals = make_arrivals(offered.lengths, per_second / replicas, WARM_UP + REQUESTS, seed=0)
    run = simulate(arrivals, room, times)
    served = run.served[WARM_UP:]
    deadline = offered.deadline
    met = None
    if deadline is not None:
        met = sum(deadline.is_met(request.first_token, request.per_token) for request in served) / len(served)
    return LoadPoint(
        replicas,
        replicas * ranks,
        per_second,
        share,
        _quantiles([request.first_token for request in served]),
        _quantiles([request.per_token for request in served if request.per_token is not None]),
        run.mean_rows,
        met,
    )


def _quantiles(values: list[float]) -> tuple[float, ...]:
    values = sorted(values)
    return tuple(values[min(len(values) - 1, math.floor(share * len(values)))] for share in QUANTILES if values)


def _fewest(
    per_second: float, most_per_second: float, deadline: Deadline | None, at: Callable[[int, float], LoadPoint]
) -> int:
    """Return the smallest number of replicas that carries the rate and nearly always meets the deadline, if any."""
    least = math.floor(per_second / most_per_second) + 1
    if least > MAX_REPLICAS:
        raise CapacityError(f"{per_second:g} requests per second need {least:,} replicas; at most {MAX_REPLICAS:,}")
    if deadline is None:
        return least
    replicas = smallest(least, MAX_REPLICAS, lambda count: (at(count, per_second).in_time or 0.0) >= IN_TIME)
    if replicas is None:
        alone = at(MAX_REPLICAS, per_second)
        assert alone.first_token is not None, "less comes than is carried"
        between = f", {alone.per_token[-1] * 1e3:.0f} ms between tokens" if alone.per_token else ""
        raise CapacityError(
            f"no number of replicas meets the deadline for {IN_TIME:.0%} of the requests: one that is alone waits up "
            f"to {alone.first_token[-1] * 1e3:.0f} ms for its first token{between}"
        )
    return replicas
