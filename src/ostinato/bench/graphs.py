"""Decode steps with and without graphs, by batch size, in one run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ostinato.bench.drive import with_room
from ostinato.bench.facts import machine_facts, model_facts
from ostinato.bench.floor import decode_bytes, floor_figures, measure_bandwidth
from ostinato.bench.graph_figures import capture_figures, least_steps, overall_figures, step_figures
from ostinato.bench.off_stride import off_stride
from ostinato.errors import ConfigError, Remedy
from ostinato.plan.coverage import StepMode, dispatch

if TYPE_CHECKING:
    from ostinato.config import EngineConfig
    from ostinato.plan.plan import Plan


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
    config = with_room(settings, max_num_seqs=max(bench.rows), max_model_len=bench.prompt_len + 1)
    steps, capture, plan = _measure_decode(config, bench, report)
    return {
        "command": "graphs",
        "model": model_facts(config, plan),
        "settings": {**asdict(plan.settings), **asdict(bench)},
        "machine": machine_facts(plan),
        "backend": plan.capture.backend,
        "steps": steps,
        **overall_figures(steps, plan.capture.backend),
        "least": overall_figures(least_steps(steps), plan.capture.backend),
        "capture": capture,
        # The first engine is gone by then, and its memory free.
        "off_stride": off_stride(config, bench.off_stride, bench.prompt_len, bench.rounds, report)
        if bench.off_stride
        else None,
    }


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
    chosen = {rows: graph_of(plan, rows) for rows in bench.rows}
    _check_measurable(config, plan, (size for _, size in chosen.values()))
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
        step_figures(each, *chosen[each.rows], plan.capture.backend, shares.get(each.rows), floors.get(each.rows))
        for each in times
    ]
    return figures, capture_figures(runner.measured["graphs"]), plan


def graph_of(plan: Plan, rows: int) -> tuple[StepMode, int | None]:
    """What a decode step of so many rows runs as, and the size that it is padded to; None where it runs eagerly."""
    return dispatch(plan.capture.ladders(), plan.capture.graph_mode, rows, 1, rows)


def _check_measurable(config: EngineConfig, plan: Plan, sizes: Iterable[int | None]) -> None:
    """ConfigError if no step has a graph, or the time of those that have says nothing."""
    if all(size is None for size in sizes):
        message = f"graph_mode {plan.capture.graph_mode} has no graph for a decode step of the rows asked for"
        raise ConfigError(f"{message}, so there is nothing to compare", [Remedy("graph_mode", "full_and_piecewise")])
    if config.check_replay:
        message = "check_replay runs every step twice, so the time of a step says nothing"
        raise ConfigError(message, [Remedy("check_replay", False)])
