"""Decode steps with and without graphs, by batch size, in one run."""

from __future__ import annotations

import gc
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from ostinato.bench.engine_driver import check_lone_steps, plan_of, rotated_order, run_batch, share_cache, with_room
from ostinato.bench.measure_rates import machine_of
from ostinato.bench.report import (
    BenchReport,
    Column,
    ProgressCallback,
    Table,
    capture_table,
    engine_facts,
    engine_lines,
    spread_columns,
)
from ostinato.bench.roofline import decode_bytes, floor_figures, measure_bandwidth
from ostinato.bench.statistics import KernelShares, capture_figures, min_steps, overall_figures, spread, step_figures
from ostinato.config import EngineConfig
from ostinato.errors import ConfigError, Remedy
from ostinato.json_io import JsonMapping, JsonObject
from ostinato.ops.kernel_cost import StepShape
from ostinato.plan.graphs.coverage import DecodeRange, StepMode, dispatch
from ostinato.plan.plan import Plan
from ostinato.plan.prediction import StepPredictor

if TYPE_CHECKING:
    from ostinato.engine.core import EngineCore


MAX_CAPTURE_SIZE = 1024
STEPS = 3
"""Steps of a round, all full."""
MILLISECONDS = "{:,.2f} ms"


@dataclass(frozen=True)
class GraphBench:
    """The measured workload: steps of each of `rows` rows, every row with `prompt_len` tokens before it.

    `off_stride` are two or more values of `max_num_batched_tokens` whose prefill is compared; none for no comparison.
    `measure`: steps are predicted from rates that are measured first, not from the plan's.
    """

    rows: tuple[int, ...]
    prompt_len: int
    rounds: int
    off_stride: tuple[int, ...] = ()
    measure: bool = False


def graphs(settings: dict[str, object], bench: GraphBench, say: ProgressCallback) -> BenchReport:
    """Measure milliseconds of a decode step by batch size, without graphs and with them, and split them into parts.

    A step is the work from a batch to its hidden states. Both ways write the batch into the buffers; then one selects
    the graph and replays it, and the other runs the model's forward pass. Scheduling, logits and sampling are the same
    on both, and left out. Both compute the same step again and again, alternating. `least` is made of the shortest
    times in place of the medians.
    """
    config = _config_for(settings, bench)
    _check_measurable(config, bench)
    steps, capture, plan = _measure_decode(config, bench, say)
    gc.collect()  # frees the engine, which has reference cycles, before the next ones start
    backend, prefill = plan.capture.backend, None
    if bench.off_stride:
        prefill = off_stride(config, bench.off_stride, bench.prompt_len, bench.rounds, say)
    data = {
        **engine_facts("graphs", config, plan, **asdict(bench)),
        "backend": backend,
        "steps": steps,
        **overall_figures(steps, backend),
        "least": overall_figures(min_steps(steps), backend),
        "capture": capture,
        "off_stride": prefill,
    }
    lines = engine_lines(data, "{prompt_len} tokens before each row")
    return BenchReport(data, lines, graph_tables(data))


def _config_for(settings: JsonObject, bench: GraphBench) -> EngineConfig:
    """Return `settings` with room for the steps.

    An open `max_num_seqs` stays open if its value is enough, as the sizes of graphs depend on it.
    """
    check_lone_steps(settings, has_drafts=True)
    needed = {"max_model_len": bench.prompt_len + 1}
    config = with_room(settings, **needed)
    if config.is_given("max_num_seqs") or plan_of(config).settings.max_num_seqs < max(bench.rows):
        return with_room(settings, **needed, max_num_seqs=max(bench.rows))
    return config


def _measure_decode(
    config: EngineConfig, bench: GraphBench, say: ProgressCallback
) -> tuple[list[JsonObject], JsonObject, Plan]:
    """Return the measurements of each batch size, those of capture, and the plan that they are for."""
    from ostinato.bench.step_timing import kernel_shares, make_decode_steps, take_turns
    from ostinato.engine.core import EngineCore

    say("loading the model and capturing its graphs")
    engine = EngineCore(config)
    plan, runner = engine.plan, engine.runner
    if "graphs" not in runner.measured:
        runner.capture()
    machine = machine_of(engine.spec, plan, bench.measure, say)
    say("computing the prompts")
    steps = make_decode_steps(runner, bench.rows, bench.prompt_len, engine.spec.vocab_size)
    times_of = take_turns(runner, steps, bench.rounds, say)
    shares: dict[int, KernelShares] = {}
    floors: dict[int, JsonObject] = {}
    if plan.capture.backend == "tape":
        say("timing the kernels alone")
        shares = kernel_shares(runner, steps)
    if plan.capture.backend == "cuda":
        say("measuring the memory's bandwidth")
        bandwidth = measure_bandwidth(runner.arrays.device)
        for result in times_of:
            needed = decode_bytes(engine.spec, plan, result.rows, context=bench.prompt_len + 1, with_logits=False)
            if needed is not None:
                floors[result.rows] = floor_figures(needed, bandwidth, result.median("graph"))
    figures = []
    for result in times_of:
        mode, size = graph_of(plan, result.rows)
        backend, rows = plan.capture.backend, result.rows
        one = step_figures(result, mode, size, backend, shares.get(rows), floors.get(rows))
        figures.append(one | _predicted(machine, rows, bench.prompt_len, one[f"{backend}_ms"]))
    return figures, capture_figures(runner.measured["graphs"]), plan


def _predicted(machine: StepPredictor | None, rows: int, context: int, measured_ms: float | None) -> JsonObject:
    """Return the milliseconds that the plan predicts for a step with a graph, up to its hidden states.

    Also return their ratio to the measured ones.
    """
    if machine is None or measured_ms is None:
        return {"predicted_ms": None, "predicted_ratio": None}
    milliseconds = machine.predict(StepShape(rows, 1, context, decodes=True)).model_seconds * 1e3
    return {"predicted_ms": milliseconds, "predicted_ratio": milliseconds / measured_ms}


def graph_of(plan: Plan, rows: int) -> tuple[StepMode, int | None]:
    """Return the mode of a decode step with `rows` rows, and the size that it is padded to; None if it runs eagerly."""
    return dispatch(plan.capture.ladders(), plan.capture.graph_mode, rows, 1, rows)


def _check_measurable(config: EngineConfig, bench: GraphBench) -> None:
    """Raise ConfigError if no step has a graph, or the time of those that have says nothing."""
    plan = plan_of(config)
    if all(graph_of(plan, rows)[1] is None for rows in bench.rows):
        first = bench.rows[0]
        changes = (
            entry.changes
            for entry in plan.capture.uncovered
            if isinstance(entry.batches, DecodeRange) and entry.batches.from_ <= first <= entry.batches.to
        )
        message = "no decode step of the rows asked for has a graph, so there is nothing to compare"
        raise ConfigError(f"{message} (graph_mode {plan.capture.graph_mode})", next(changes, ()))
    if config.check_replay:
        message = "check_replay runs every step twice, so the time of a step says nothing"
        raise ConfigError(message, [Remedy("check_replay", False)])


def off_stride(
    config: EngineConfig, budgets: Sequence[int], prompt_len: int, rounds: int, say: ProgressCallback
) -> JsonObject:
    """Measure prefill tokens/s with each of `budgets` as `max_num_batched_tokens`, alternating.

    There is one engine for each, strict. `ratio` is the first one's rate over the last one's, round by round. A round
    is prompts of `prompt_len` tokens that fill a few steps, and one token of output for each. Graphs are captured in a
    first round that is not counted.
    """
    from ostinato.engine.core import EngineCore

    engines = {}
    for budget, each in off_stride_configs(config, budgets).items():
        say(f"max_num_batched_tokens {budget}: loading and capturing")
        engines[budget] = EngineCore(each)
        _run(engines[budget], budget, prompt_len, number=-1)
    before = {budget: engine.stats() for budget, engine in engines.items()}
    rates: dict[int, list[float]] = {budget: [] for budget in budgets}
    for number in range(rounds):
        say(f"off stride: round {number + 1} of {rounds}")
        for budget in rotated_order(list(engines), number):
            rates[budget].append(_run(engines[budget], budget, prompt_len, number))
    first, last = rates[budgets[0]], rates[budgets[-1]]
    return {
        "max_capture_size": engines[budgets[0]].plan.capture.max_tokens,
        "strict": True,
        "ratio": spread([one / other for one, other in zip(first, last, strict=True)]),
        "results": [
            {
                "max_num_batched_tokens": budget,
                "prompt_tokens": budget * STEPS,
                "prefill_tokens_per_second": spread(rates[budget]),
                **_steps_since(before[budget]["graphs"], engine.stats()["graphs"]),
            }
            for budget, engine in engines.items()
        ],
    }


def off_stride_configs(config: EngineConfig, budgets: Sequence[int]) -> dict[int, EngineConfig]:
    """Return the settings for each budget: a graph for every step that it allows, and an equal part of cache memory."""
    changes: dict[str, object] = {"strict": True, "capture": "lazy"}
    if not config.is_given("capture_sizes"):
        changes["max_capture_size"] = max(MAX_CAPTURE_SIZE, *budgets)
    return share_cache({budget: config.with_settings(max_num_batched_tokens=budget, **changes) for budget in budgets})


def prompt_lengths(budget: int, prompt_len: int) -> list[int]:
    """Return the lengths of prompts that fill `STEPS` steps of `budget` tokens exactly; the last may be shorter."""
    whole, rest = divmod(budget * STEPS, prompt_len)
    return [prompt_len] * whole + ([rest] if rest else [])


def _run(engine: EngineCore, budget: int, prompt_len: int, number: int) -> float:
    """Return the tokens/s of a round, whose prompts no other round has."""
    rng, vocab_size = random.Random(f"{number} {budget}"), engine.spec.vocab_size
    prompts = [[rng.randrange(vocab_size) for _ in range(length)] for length in prompt_lengths(budget, prompt_len)]
    trace = run_batch(engine, prompts, output_len=1)
    return trace.prompt_tokens / trace.end


def _steps_since(before: JsonObject, after: JsonObject) -> JsonObject:
    """Return the steps by mode, and the padding, since the statistics `before`."""
    steps = {mode: count - before["steps"][mode] for mode, count in after["steps"].items()}
    return {"steps": steps, "padding": after["padding"] - before["padding"]}


def graph_tables(data: JsonMapping) -> list[Table]:
    steps, backend = data["steps"], data["backend"]
    columns = [
        Column("rows", "rows"),
        Column("graph", lambda step: f"{step['mode']} {step['graph_rows']}" if step["graph_rows"] else "eager"),
        Column("padding", "padding"),
        Column("eager", "eager_ms", MILLISECONDS),
        Column("kernels", "kernel_ms.eager", MILLISECONDS),
        Column(backend, f"{backend}_ms", MILLISECONDS),
        Column("kernels", lambda step: (step["kernel_ms"] or {}).get(backend), MILLISECONDS),
        Column("speed", "speed", "times"),
    ]
    if any(step.get("predicted_ms") is not None for step in steps):
        columns.append(Column("predicted", "predicted_ms", MILLISECONDS))
        columns.append(Column("of measured", "predicted_ratio", "{:.2f}"))
    if any(step["floor"] is not None for step in steps):
        columns.append(Column("floor", "floor.step_seconds", lambda seconds: f"{seconds * 1e3:.2f} ms"))
        columns.append(Column("reached", "floor.fraction_reached", "percent"))
    capture = data["capture"]
    names = ("graphs", "seconds", "planned_bytes", "observed_bytes")
    tables = [Table(columns, steps), _summary(data), capture_table("capture", *(capture[name] for name in names))]
    return tables if data["off_stride"] is None else [*tables, off_stride_table(data["off_stride"])]


def _summary(data: JsonMapping) -> Table:
    """Return the totals over all sizes: by medians, and by shortest times, which other work disturbs least."""
    rows = []
    both = (("medians", data), ("least", data["least"]))
    if data["ratio"] is not None:
        rows.append({"name": "speed, median", **{key: each["ratio"]["median"] for key, each in both}})
        worst = {key: f"{each['ratio']['worst']:.2f}x at {each['ratio']['worst_rows']} rows" for key, each in both}
        rows.append({"name": "speed, worst", **worst})
    for way, cliff in data["cliff"].items():
        if cliff is not None:
            cliffs = {key: each["cliff"][way] for key, each in both}
            said = {key: f"{one['ratio']:.2f}x, {one['from']} to {one['to']} rows" for key, one in cliffs.items()}
            rows.append({"name": f"largest cliff, {way}", **said})
    columns = (Column("by medians", "medians", "times"), Column("by least times", "least", "times"))
    return Table((Column("graphs against eager", "name"), *columns), rows)


def off_stride_table(figures: JsonMapping) -> Table:
    """Return a table of prompt tokens/s by max_num_batched_tokens, and of the modes of the steps."""
    rows = [{"name": result["max_num_batched_tokens"], **result, **result["steps"]} for result in figures["results"]]
    ratio = {name: f"{value:.3f}" for name, value in figures["ratio"].items()}
    counts = dict.fromkeys(("piecewise", "full", "eager", "padding"))
    over = f"{rows[0]['name']} over {rows[-1]['name']}"
    rows.append({"name": over, "prefill_tokens_per_second": ratio, **counts})
    columns = (
        Column("step size", "name"),
        Column("tokens/s", "prefill_tokens_per_second.median", "count"),
        *spread_columns("prefill_tokens_per_second", "count", "min", "max"),
        *(Column(name, name, "count") for name in counts),
    )
    return Table(columns, rows, "prefill by step size")
