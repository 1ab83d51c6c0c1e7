"""Decode steps with and without graphs, by batch size, in one run."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ostinato.bench.drive import with_room
from ostinato.bench.facts import machine_facts, model_facts
from ostinato.bench.floor import decode_bytes, floor_figures, measure_bandwidth
from ostinato.bench.graph_figures import capture_figures, least_steps, overall_figures, step_figures
from ostinato.bench.off_stride import off_stride
from ostinato.errors import ConfigError, Remedy
from ostinato.models.checkpoint import load_spec
from ostinato.plain_data import to_plain
from ostinato.plan.device.detect import detect
from ostinato.plan.graphs.coverage import DecodeRange, StepMode, dispatch
from ostinato.plan.plan import Plan, make_plan

if TYPE_CHECKING:
    from ostinato.config import EngineConfig


@dataclass(frozen=True)
class GraphBench:
    """What is measured: steps of each of `rows` rows, every row with `prompt_len` tokens before it.

    `off_stride` are two or more values of `max_num_batched_tokens` whose prefill is compared; none for no comparison.
    """

    rows: tuple[int, ...]
    prompt_len: int
    rounds: int
    off_stride: tuple[int, ...] = ()


def graphs(settings: dict[str, Any], bench: GraphBench, report: Callable[[str], None]) -> dict[str, Any]:
    """The report: milliseconds of a decode step by batch size, without graphs and with them, and where they go.

    A step is what lies between a batch's tensors and its hidden states: choosing the graph, filling its buffers and
    the replay on one side, the model's forward pass on the other. Scheduling, making the tensors, logits and sampling
    are the same on both, and left out. Both compute the same step again and again, in turns. `least` is made of the
    shortest times in place of the medians.
    """
    config = _config_for(settings, bench)
    _check_measurable(config, bench)
    steps, capture, plan = _measure_decode(config, bench, report)
    gc.collect()  # the engine, which knows itself, so that the next ones find its memory free
    return {
        "command": "graphs",
        "model": model_facts(config, plan),
        "settings": {**to_plain(plan.settings), **asdict(bench)},
        "machine": machine_facts(plan),
        "backend": plan.capture.backend,
        "steps": steps,
        **overall_figures(steps, plan.capture.backend),
        "least": overall_figures(least_steps(steps), plan.capture.backend),
        "capture": capture,
        "off_stride": off_stride(config, bench.off_stride, bench.prompt_len, bench.rounds, report)
        if bench.off_stride
        else None,
    }


def _config_for(settings: dict[str, Any], bench: GraphBench) -> EngineConfig:
    """`settings` with room for the steps. An open `max_num_seqs` stays open where its value is enough, as the sizes of
    graphs depend on it."""
    needed = {"max_model_len": bench.prompt_len + 1}
    config = with_room(settings, **needed)
    if config.is_given("max_num_seqs") or plan_of(config).settings.max_num_seqs < max(bench.rows):
        return with_room(settings, **needed, max_num_seqs=max(bench.rows))
    return config


def _measure_decode(
    config: EngineConfig, bench: GraphBench, report: Callable[[str], None]
) -> tuple[list[dict[str, Any]], dict[str, Any], Plan]:
    """The figures of each batch size, those of capture, and the plan that they are for."""
    from ostinato.bench.decode_steps import make_decode_steps, take_turns
    from ostinato.bench.kernel_time import kernel_shares
    from ostinato.engine.engine import Engine

    report("loading the model and capturing its graphs")
    engine = Engine(config)
    plan, runner = engine.plan, engine.runner
    if "graphs" not in runner.measured:
        runner.capture()
    report("computing the prompts")
    steps = make_decode_steps(runner, bench.rows, bench.prompt_len, engine.spec.vocab_size)
    times = take_turns(runner, steps, bench.rounds, report)
    report("timing the kernels alone")
    shares = kernel_shares(runner, steps) if plan.capture.backend == "tape" else {}
    floors: dict[int, dict[str, Any]] = {}
    if plan.capture.backend == "cuda":
        report("measuring the memory's bandwidth")
        bandwidth = measure_bandwidth(runner.device)
        for each in times:
            needed = decode_bytes(
                engine.spec,
                plan.settings.dtype,
                plan.memory,
                plan.settings.block_size,
                rows=each.rows,
                context=bench.prompt_len + 1,
            )
            if needed is not None:
                floors[each.rows] = floor_figures(needed, bandwidth, each.median("graph"))
    figures = [
        step_figures(
            each, *graph_of(plan, each.rows), plan.capture.backend, shares.get(each.rows), floors.get(each.rows)
        )
        for each in times
    ]
    return figures, capture_figures(runner.measured["graphs"]), plan


def graph_of(plan: Plan, rows: int) -> tuple[StepMode, int | None]:
    """What a decode step of so many rows runs as, and the size that it is padded to; None where it runs eagerly."""
    return dispatch(plan.capture.ladders(), plan.capture.graph_mode, rows, 1, rows)


def _check_measurable(config: EngineConfig, bench: GraphBench) -> None:
    """ConfigError if no step has a graph, or the time of those that have says nothing."""
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


def plan_of(config: EngineConfig) -> Plan:
    """The plan that an engine with these settings would make."""
    spec = load_spec(config)
    return make_plan(config, spec, detect(config.device))
