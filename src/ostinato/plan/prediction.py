"""Prediction of the time of a step, from the work of its kernels and the rates of the machine (a roofline)."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from ostinato.ops.kernel_cost import KernelCost, StepShape
from ostinato.ops.operations import OPERATIONS, prefill_op
from ostinato.ops.sizes import DTYPE_BYTES
from ostinato.plan.device.gpu_catalogue import DeviceSpec
from ostinato.plan.device.measured_rates import KernelRate, Rates, StepKind
from ostinato.plan.kernel_costs import LOGITS, KernelCostPart, kernel_parts
from ostinato.plan.kernels import KernelChoice
from ostinato.plan.launches import LAUNCH_SECONDS, step_launches
from ostinato.plan.limits import Limits
from ostinato.plan.model import ModelSpec

ROWS = {"cpu": (1, 8, 32), "cuda": (1, 8, 32, 128, 256)}
"""Kind of device -> rows of the decode steps that the plan shows, up to its maximum, and the maximum itself."""
CONTEXT = 512
"""Tokens before each row of them, and tokens of the prompt."""
ENGINE = "engine"
"""Name of the part of a step outside kernels."""
PASSES = ("rms_norm", "gated_rms_norm", "rotary")
"""Operations over activations whose rate is measured; others are assumed to be as fast as the first."""
MEASURED = frozenset(
    {
        "attention",
        "causal_conv1d",
        "delta_scan",
        "delta_update",
        "linear",
        "selective_scan",
        "selective_update",
        "ssd_scan",
        "state_update",
    }
)
"""Operations with a rule for their work whose rates are measured; experts have those of `linear`."""
HOW_TO_MEASURE = "`ostinato plan MODEL --measure` measures it, in seconds, and keeps it"

Bound = Literal["memory", "arithmetic"]


@dataclass(frozen=True)
class PredictedStep:
    """A step of `rows` rows, each of `tokens_per_row` tokens after `context` others.

    With more than one token per row it is a prompt's step. `parts` divides `seconds` among kernels by name and the
    `engine` around them.
    """

    rows: int
    tokens_per_row: int
    context: int
    seconds: float
    parts: dict[str, float]
    bound: Bound
    """Bound of the largest part: memory, if moving its bytes alone would take longer than its arithmetic."""
    launches: int | None = None
    """Kernel launches on a GPU, including those of the logits and of sampling; None on a CPU."""

    @property
    def eager_seconds(self) -> float | None:
        """Seconds without graphs: the device waits for the host where launching takes longer than computing."""
        return None if self.launches is None else max(self.seconds, self.launches * LAUNCH_SECONDS)

    @property
    def tokens_per_second(self) -> float:
        return self.rows * self.tokens_per_row / self.seconds

    @property
    def largest(self) -> str:
        """Name of the largest part."""
        return max(self.parts, key=lambda name: self.parts[name])

    @property
    def model_seconds(self) -> float:
        """Seconds up to the hidden states, without logits and without the engine."""
        return self.seconds - self.parts[LOGITS] - self.parts.get(ENGINE, 0.0)


@dataclass(frozen=True)
class Prediction:
    """Predicted steps, none if nothing can be predicted; `reason` says why, or where the rates come from."""

    reason: str
    is_lower_bound: bool = False
    """True if every kernel is assumed to reach the catalogue's rates, with no time between kernels."""
    rates: Rates | None = None
    """Measured rates, if the prediction is based on them."""
    steps: tuple[PredictedStep, ...] = ()


@dataclass(frozen=True)
class StepPredictor:
    """Predictor of step times for a model with its dtypes on a machine.

    It uses measured `rates`, or without them only the machine's `bandwidth` (bytes per second) and `product_rate`
    (FLOP/s).
    """

    model: ModelSpec
    dtype: str
    ssm_state_dtype: str
    bandwidth: float
    product_rate: float
    rates: Rates | None = None
    kv_cache_dtype: str | None = None
    """Dtype of keys and values; None: the model's."""

    def predict(self, step: StepShape) -> PredictedStep:
        """Return the predicted time of a step and of its parts."""
        parts: defaultdict[str, float] = defaultdict(float)
        works: dict[str, KernelCost] = {}
        for part in kernel_parts(self.model, self.dtype, self.ssm_state_dtype, step, self.kv_cache_dtype):
            parts[part.name] += self._seconds(part, step)
            works[part.name] = works.get(part.name, KernelCost()) + part.work
        if self.rates is not None:
            way: StepKind = "decode" if step.decodes else "prompt"
            for name, (calls, elements) in self._calls.items():
                # The calls are those of a decode step; in a prompt a scan replaces the recurrence.
                instead = name if step.decodes else prefill_op(name)
                parts[instead] += calls * self.rates.call_seconds
                if OPERATIONS[name].work is None and elements:
                    passed = KernelCost(elements * step.tokens * DTYPE_BYTES[self.dtype])
                    measured = self._points(name if name in PASSES else PASSES[0], self.dtype, way)
                    parts[name] += seconds_at(measured, passed, step.tokens)
            parts[ENGINE] = self.rates.step_seconds + step.rows * self.rates.row_seconds
        largest = works.get(max(parts, key=lambda name: parts[name]), KernelCost())
        waits_for_memory = largest.num_bytes / self.bandwidth >= largest.flops / self.product_rate
        return PredictedStep(
            step.rows,
            step.tokens_per_row,
            step.context,
            sum(parts.values()),
            dict(sorted(parts.items(), key=lambda part: -part[1])),
            "memory" if waits_for_memory else "arithmetic",
        )

    @cached_property
    def _calls(self) -> dict[str, tuple[int, int]]:
        """Operation -> its calls in a decode step, and the elements of their results for one token."""
        by_operation: dict[str, tuple[int, int]] = {}
        for call in self.model.calls.calls:
            if call.operation in OPERATIONS:
                calls, elements = by_operation.get(call.operation, (0, 0))
                by_operation[call.operation] = calls + 1, elements + call.elements
        return by_operation

    def _seconds(self, part: KernelCostPart, step: StepShape) -> float:
        if self.rates is None:
            return max(part.work.num_bytes / self.bandwidth, part.work.flops / self.product_rate)
        if part.operation == "moe":
            # The m of each expert's matmul is the mean number of tokens routed to it.
            elements = part.work.num_bytes / DTYPE_BYTES[part.storage]
            return seconds_at(self._points("linear", part.storage), part.work, part.work.flops / (2 * elements))
        if part.operation == "linear":
            tokens = step.tokens if step.decodes or part.name != LOGITS else step.rows
            return seconds_at(self._points("linear", part.storage), part.work, tokens)
        way: StepKind = "decode" if step.decodes else "prompt"
        return seconds_at(self._points(part.operation, part.storage, way), part.work, step.tokens)

    def _points(self, operation: str, storage: str, way: StepKind | None = None) -> list[KernelRate]:
        """Return the measurements of a kernel, by number of tokens; `way` None: however the tokens belong to rows."""
        assert self.rates is not None, "only what was measured has points"
        points = [
            rate
            for rate in self.rates.rates
            if (rate.operation, rate.storage) == (operation, storage) and way in (None, rate.way)
        ]
        return sorted(points, key=lambda each: each.tokens)


def seconds_at(points: Sequence[KernelRate], work: KernelCost, tokens: float) -> float:
    """Return the time of `work` with `tokens` tokens, interpolated from measurements with other numbers of tokens.

    The result is the larger of the times for its bytes and for its arithmetic. Between two numbers of tokens the time
    per byte is assumed to be linear, and so is the time per operation times tokens, so that one matrix takes the same
    time by both. Outside the measured range rates stay constant.
    """
    assert points, "what the plan predicts with has every kernel"
    at = bisect_left([point.tokens for point in points], tokens)
    one, other = points[max(at - 1, 0)], points[min(at, len(points) - 1)]
    share = 0.0 if one is other else (tokens - one.tokens) / (other.tokens - one.tokens)

    def between(first: float, second: float) -> float:
        return first + share * (second - first)

    per_byte = between(1 / one.bytes_per_second, 1 / other.bytes_per_second)
    seconds = work.num_bytes * per_byte
    if work.flops and one.flops_per_second and other.flops_per_second:
        if one is other:
            per_flop = 1 / one.flops_per_second
        else:
            per_flop = between(one.tokens / one.flops_per_second, other.tokens / other.flops_per_second) / tokens
        seconds = max(seconds, work.flops * per_flop)
    return seconds


def plan_prediction(
    model: ModelSpec,
    device: DeviceSpec,
    kernels: Mapping[str, KernelChoice],
    *,
    dtype: str,
    ssm_state_dtype: str,
    kv_cache_dtype: str,
    threads: int | None,
    deterministic: bool,
    limits: Limits,
) -> Prediction:
    """Return the plan's prediction of the time of its steps, or the reason why there is none."""
    rates: Rates | None = None
    if device.kind == "cpu":
        rates_or_reason = find_rates(device, kernels, dtype, threads, deterministic)
        if isinstance(rates_or_reason, str):
            return Prediction(f"not predicted: {rates_or_reason}")
        rates = rates_or_reason
        reason = f"kernels as measured on {rates.measured}: {rates.processor}, {rates.threads} threads"
    else:
        reason = (
            "at least, as graphs: every kernel at the catalogue's rates, and nothing between them; no efficiency is "
            f"assumed. Eagerly, no less than {LAUNCH_SECONDS * 1e6:.0f} us for each launch, which is an estimate"
        )
    machine = make_machine(model, device, rates, dtype, ssm_state_dtype, kv_cache_dtype)
    if machine is None:
        return Prediction("not predicted: this device's rates are neither measured nor published")
    context = min(CONTEXT, limits.max_model_len - 1)
    shown = sorted({*(rows for rows in ROWS[device.kind] if rows < limits.max_num_seqs), limits.max_num_seqs})
    steps = [StepShape(rows, 1, context, decodes=True) for rows in shown]
    steps.append(StepShape(1, min(context, limits.max_num_batched_tokens), 0, decodes=False))
    predicted = tuple(machine.predict(step) for step in steps)
    if device.kind == "cuda":
        launches = {way: step_launches(model, kernels, decodes=way) for way in (True, False)}
        predicted = tuple(
            replace(predicted_step, launches=launches[step.decodes])
            for predicted_step, step in zip(predicted, steps, strict=True)
        )
    return Prediction(reason, rates is None, rates, predicted)


def make_machine(
    model: ModelSpec, device: DeviceSpec, rates: Rates | None, dtype: str, ssm_state_dtype: str, kv_cache_dtype: str
) -> StepPredictor | None:
    """Return a predictor with measured rates, or without them with the device's own.

    None if it has none, or if a kernel of the model was not measured.
    """
    if rates is not None:
        operations = {call.operation for call in model.calls.calls if call.operation in OPERATIONS}
        if unmeasured({*operations, *map(prefill_op, operations)}, measured_in(rates)):
            return None
        return StepPredictor(model, dtype, ssm_state_dtype, rates.bandwidth, rates.product_rate, rates, kv_cache_dtype)
    if device.bandwidth is None or device.peak_rates is None:
        return None
    return StepPredictor(
        model, dtype, ssm_state_dtype, device.bandwidth, device.peak_rates[dtype], kv_cache_dtype=kv_cache_dtype
    )


def unmeasured(operations: Iterable[str], measured: Collection[str]) -> list[str]:
    """Return the operations whose times follow from their work, and that are not among the `measured` ones."""
    names = (name for name in operations if OPERATIONS[name].work is not None and name != "moe")
    return sorted(name for name in names if name not in measured)


def measured_in(rates: Rates) -> set[str]:
    """Return the operations that have rates."""
    return {rate.operation for rate in rates.rates}


def find_rates(
    device: DeviceSpec, kernels: Mapping[str, KernelChoice], dtype: str, threads: int | None, deterministic: bool
) -> Rates | str:
    """Return the measured rates of the planned kernels; or a text that says why there are none, and what helps."""
    if device.native.isa is None or any(choice.implementation != "native" for choice in kernels.values()):
        return "only the speed of native kernels is measured"
    if deterministic:
        return "the speed of kernels in a fixed order (deterministic) is not measured"
    if never := unmeasured(kernels, MEASURED):
        return f"the speed of {' and '.join(never)} is not measured"
    if not device.rates:
        return f"nothing was measured with the kernels that are installed; {HOW_TO_MEASURE}"
    for rates in device.rates:
        if (rates.dtype, rates.threads) == (dtype, threads):
            lacking = unmeasured(kernels, measured_in(rates))
            if lacking:
                return f"what was measured lacks {' and '.join(lacking)}; {HOW_TO_MEASURE}"
            return rates
    others = ", ".join(f"{rates.dtype} with {rates.threads} threads" for rates in device.rates)
    return f"what was measured is {others}, and this is {dtype} with {threads} threads; {HOW_TO_MEASURE}"
