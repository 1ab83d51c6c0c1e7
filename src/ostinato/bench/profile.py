"""A step's time by kernel, compared with the roofline of each, and the time around the model.

Traces are in Chrome's trace event format, which Perfetto and chrome://tracing show: JSON with a list of events. Each
call is a complete event ("ph": "X") with its start and duration in microseconds (Trace Event Format, Google).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ostinato.bench.engine_driver import check_lone_steps, plan_of, with_room
from ostinato.bench.graphs import graph_of
from ostinato.bench.measure_rates import machine_of
from ostinato.bench.report import BenchReport, Column, ProgressCallback, Table, engine_facts, engine_lines
from ostinato.bench.roofline import measure_bandwidth, measure_flops
from ostinato.bench.statistics import Calls
from ostinato.bench.step_phases import MODEL, decode_phases, phase_figures
from ostinato.config import EngineConfig
from ostinato.errors import ConfigError
from ostinato.files import is_directory, write_text
from ostinato.json_io import JsonMapping, JsonObject
from ostinato.ops.kernel_cost import KernelCost, StepShape
from ostinato.plan.graphs.coverage import dispatch
from ostinato.plan.kernel_costs import kernel_work
from ostinato.plan.plan import Plan
from ostinato.plan.prediction import ENGINE, StepPredictor

if TYPE_CHECKING:
    from ostinato.engine.core import EngineCore
    from ostinato.scheduler.batch import Batch

KERNEL_OF = {"logits": "linear"}
"""Kernels of the rows whose name is not their kernel's."""

LOOP_CONTEXT = 2048
"""Most tokens before a row in the engine's loop, whose prompts are computed; more change nothing around the model."""

_TRACE_PROCESS = 1


@dataclass(frozen=True)
class ProfileBench:
    """The profiled steps: decode steps of `batch_sizes` rows with `context` tokens, and a prompt of `prefill` tokens.

    The best of `rounds` rounds counts. `measure`: the plan's prediction is from rates measured first. `by_operation`:
    the calls of each operation are repeated by themselves, as always on a GPU.
    """

    batch_sizes: tuple[int, ...]
    context: int
    prefill: int
    rounds: int
    measure: bool = False
    by_operation: bool = False


@dataclass(frozen=True)
class Roofline:
    """The machine's roofline: bytes/s from and to memory, and FLOP/s of matmuls in the model's dtype."""

    bytes_per_second: float
    flops_per_second: float

    def floor(self, work: KernelCost) -> float:
        """Return the roofline seconds of `work`: moving and computing may overlap."""
        return max(work.num_bytes / self.bytes_per_second, work.flops / self.flops_per_second)


def profile(
    settings: dict[str, object], bench: ProfileBench, say: ProgressCallback, trace: Path | None = None
) -> BenchReport:
    """Profile steps: kernels with calls, seconds, bytes, FLOPs and roofline, and phases of the engine's loop.

    The phases are of decode steps on a CPU.

    On a CPU, a decode step that has a full graph is replayed as a tape whose calls are timed one by one; other steps
    run eagerly, with a stopwatch at every kernel, and the rest is torch and Python between kernels. On a GPU all calls
    of one operation are replayed as a separate graph. The last of a step's kernels is `logits`, the LM head's matmul.

    With `trace` the calls of the steps are written to that file. ConfigError if they cannot be.
    """
    from ostinato.engine.core import EngineCore

    if trace is not None:
        check_trace_path(trace)
    config = _config_for(settings, bench)
    say("loading the model and capturing its graphs")
    engine = EngineCore(config)
    plan = engine.plan
    say("measuring the memory's bandwidth and the rate of matrix products")
    bandwidth = measure_bandwidth(engine.runner.arrays.device, isa=plan.device.native.isa)
    roofs = Roofline(bandwidth.best, measure_flops(plan.settings.dtype, engine.runner.arrays.device))
    data = engine_facts("profile", config, plan, **asdict(bench))
    data["machine"] |= {**bandwidth.to_json(), "flops_per_second": roofs.flops_per_second}
    data["kernels"] = {name: choice.implementation for name, choice in plan.kernels.items()}
    data["products"] = plan.kernels["linear"].reason
    machine = machine_of(engine.spec, plan, bench.measure, say)
    steps: dict[str, Calls] = {}
    data["decode"] = _decode(engine, bench, roofs, machine, say, steps)
    data["prefill"] = _prefill(engine, bench, roofs, machine, say, steps)
    if trace is not None:
        write_trace(trace, trace_of(steps, f"{config.model} on {plan.device.name}"))
    lines = engine_lines(data, "{context} tokens before each row, {prefill} prompt tokens")
    return BenchReport(data, lines | {"products": data["products"]}, profile_tables(data))


def _decode(
    engine: EngineCore,
    bench: ProfileBench,
    roofs: Roofline,
    machine: StepPredictor | None,
    say: ProgressCallback,
    traced: dict[str, Calls],
) -> list[JsonObject]:
    """Return the figures of the decode steps, and add their calls to `traced`."""
    from ostinato.bench.gpu.kernel_times import operation_times, step_seconds
    from ostinato.bench.step_timing import TapeClock, make_decode_steps, profile_eagerly, profile_tape

    plan, runner = engine.plan, engine.runner
    by_operation = _by_operation(engine, bench)
    clock: TapeClock | None = None
    figures = []
    say("computing the prompts")
    steps = make_decode_steps(runner, bench.batch_sizes, bench.context, engine.spec.vocab_size)
    for rows, step in steps.items():
        say(f"decoding, batch size {rows}")
        mode, size = graph_of(plan, rows)
        eager: tuple[str, ...] = ()
        if by_operation:
            seconds = step_seconds(runner, step, bench.rounds)
            calls, eager = operation_times(runner, step, rows, bench.rounds)
        elif mode == "full" and size is not None:
            clock = clock or TapeClock(runner)
            calls, seconds = profile_tape(runner, clock, step, bench.rounds)
        else:
            calls, seconds = profile_eagerly(runner, step, rows, bench.rounds)
        shape = StepShape(rows, 1, bench.context, decodes=True)
        one = _step_figures(engine, plan, step, shape, calls, seconds, roofs, machine)
        way = plan.capture.backend if mode == "full" else mode if by_operation else "eager"
        traced[f"decode, batch size {rows} ({way})"] = calls
        figures.append({"batch_size": rows, "way": way, "graph_rows": size, "not_captured": eager, **one})
    # This comes last: requests write to the blocks and slots that the steps above read.
    for one in figures:
        one["phases"] = {}
        if not by_operation:  # a GPU's host does not wait for its results
            say(f"the engine's loop, batch size {one['batch_size']}")
            context = min(bench.context, LOOP_CONTEXT)
            one["phases"] = phase_figures(decode_phases(engine, one["batch_size"], context, _loop_steps(bench)))
    return figures


def _prefill(
    engine: EngineCore,
    bench: ProfileBench,
    roofs: Roofline,
    machine: StepPredictor | None,
    say: ProgressCallback,
    traced: dict[str, Calls],
) -> JsonObject:
    """Return the figures of the prompt's step, and add its calls to `traced`."""
    from ostinato.bench.gpu.kernel_times import operation_times, step_seconds
    from ostinato.bench.step_timing import profile_eagerly, prompt_step

    say(f"prefill, {bench.prefill} tokens")
    runner, passes = engine.runner, max(3, bench.rounds // 4)
    step = prompt_step(runner, bench.prefill, engine.spec.vocab_size)
    way, eager = "eager", tuple[str, ...]()
    if _by_operation(engine, bench):
        capture = engine.plan.capture
        way = dispatch(capture.ladders(), capture.graph_mode, 1, None, bench.prefill)[0]
        seconds = step_seconds(runner, step, passes)
        calls, eager = operation_times(runner, step, 1, passes)
    else:
        calls, seconds = profile_eagerly(runner, step, 1, passes)
    traced[f"prefill, {bench.prefill} tokens ({way})"] = calls
    shape = StepShape(1, bench.prefill, 0, decodes=False)
    return {
        "tokens": bench.prefill,
        "way": way,
        "not_captured": eager,
        **_step_figures(engine, engine.plan, step, shape, calls, seconds, roofs, machine),
    }


def _by_operation(engine: EngineCore, bench: ProfileBench) -> bool:
    return bench.by_operation or not engine.runner.arrays.is_on_host


def _step_figures(
    engine: EngineCore,
    plan: Plan,
    step: Batch,
    shape: StepShape,
    calls: Calls,
    seconds: float,
    roofs: Roofline,
    machine: StepPredictor | None,
) -> JsonObject:
    from ostinato.bench.step_timing import experts_read

    settings = plan.settings
    dtypes = settings.dtype, settings.ssm_state_dtype
    read = experts_read(engine.runner, step) if "moe" in engine.spec.ops else []
    work = kernel_work(engine.spec, *dtypes, shape, settings.kv_cache_dtype, read)
    kernels = kernel_figures(calls, work, roofs)
    in_model = sum(kernel["seconds"] for kernel in kernels if kernel["kernel"] != "logits")
    return {
        "kernels": kernels,
        "total": total_figures(kernels),
        "predicted": None if machine is None else machine.predict(shape).parts,
        "step_seconds": seconds,
        "between_kernels_seconds": max(0.0, seconds - in_model),
    }


def _config_for(settings: dict[str, object], bench: ProfileBench) -> EngineConfig:
    """Return `settings` with room for the steps. ConfigError if they give less, or ask for what is not profiled."""
    check_lone_steps(settings)
    needed = {
        "max_num_seqs": max(bench.batch_sizes),
        "max_model_len": max(bench.context + _loop_steps(bench) + 4, bench.prefill + 1),
    }
    config = with_room(settings, **needed)
    plan = plan_of(config)
    if plan.settings.max_num_batched_tokens < bench.prefill:
        config = with_room(settings, **needed, max_num_batched_tokens=bench.prefill)
    return config


def _loop_steps(bench: ProfileBench) -> int:
    """Return the number of steps of the engine's loop for a median."""
    return max(bench.rounds, 8)


def kernel_figures(calls: Calls, work: Mapping[str, KernelCost | None], roofs: Roofline) -> list[JsonObject]:
    """Return the calls of a step by name, longest first: seconds, share, roofline, and the share of it reached.

    The last two are None for kernels that `work` does not know.
    """
    total = sum(seconds for _, seconds in calls)
    by_name: dict[str, list[float]] = {}
    for name, seconds in calls:
        by_name.setdefault(name, []).append(seconds)
    figures = []
    for name, each in sorted(by_name.items(), key=lambda item: -sum(item[1])):
        seconds, known = sum(each), work.get(name)
        floor = None if known is None else roofs.floor(known)
        figures.append(
            {
                "kernel": name,
                "calls": len(each),
                "seconds": seconds,
                "share": seconds / total,
                "bytes": None if known is None else known.num_bytes,
                "flops": None if known is None else known.flops,
                "floor_seconds": floor,
                "fraction_reached": None if floor is None else floor / seconds,
            }
        )
    return figures


def total_figures(figures: Sequence[JsonMapping]) -> JsonObject:
    """Return the totals of all kernels of a step."""
    seconds = sum(figure["seconds"] for figure in figures)
    floor = sum(figure["floor_seconds"] or 0.0 for figure in figures)
    return {"seconds": seconds, "floor_seconds": floor, "fraction_reached": floor / seconds}


def profile_tables(data: JsonMapping) -> list[Table]:
    tables = []
    for step in data["decode"]:
        graph = "eager" if step["way"] == "eager" else f"{step['way']}, {step['graph_rows']} rows"
        tables.append(_kernel_table(f"decode, batch size {step['batch_size']} ({graph})", step, data["kernels"]))
    prefill = data["prefill"]
    tables.append(_kernel_table(f"prefill, {prefill['tokens']} tokens ({prefill['way']})", prefill, data["kernels"]))
    phases = [_phase_table(data["decode"], data["settings"]["context"])] if data["decode"][0]["phases"] else []
    return [*tables, *phases]


def _kernel_table(title: str, step: JsonMapping, chosen: Mapping[str, str]) -> Table:
    """Return a table of a step's kernels, longest first, with the sum of all, and the time between them."""
    empty = dict.fromkeys(("calls", "share", "bytes", "flops", "floor_seconds", "fraction_reached"))
    rows = [
        {**kernel, "kind": chosen.get(KERNEL_OF.get(kernel["kernel"], kernel["kernel"]), "torch")}
        for kernel in step["kernels"]
    ]
    rows.append({**empty, "kernel": "all", "kind": "", **step["total"]})
    rows.append({**empty, "kernel": "between them", "kind": "", "seconds": step["between_kernels_seconds"]})
    columns = [
        Column("kernel", "kernel"),
        Column("", "kind"),
        Column("calls", "calls"),
        Column("ms", "seconds", _milliseconds),
        Column("share", "share", "{:.1%}"),
        Column("MB", "bytes", lambda num_bytes: f"{num_bytes / 1e6:,.2f}"),
        Column("GFLOP", "flops", lambda flops: f"{flops / 1e9:,.2f}"),
        Column("floor ms", "floor_seconds", _milliseconds),
        Column("reached", "fraction_reached", "percent"),
    ]
    predicted = step["predicted"]
    if predicted is not None:
        in_all = sum(seconds for name, seconds in predicted.items() if name != ENGINE)
        by_name = {**predicted, "all": in_all}
        columns.append(Column("predicted", lambda row: by_name.get(row["kernel"]), _milliseconds))
    return Table(columns, rows, title)


def _phase_table(steps: Sequence[JsonMapping], context: int) -> Table:
    """Return a table of milliseconds of a decode step in the engine's loop, by batch size."""
    seconds: dict[str, dict[str, float]] = {}
    for step in steps:
        size = str(step["batch_size"])
        for name, each in step["phases"].items():
            seconds.setdefault(name, {})[size] = each
    for step in steps:
        around = sum(each for name, each in step["phases"].items() if name not in MODEL)
        seconds.setdefault("all but model and logits", {})[str(step["batch_size"])] = around
    sizes = [str(step["batch_size"]) for step in steps]
    rows = [{"name": name, **dict.fromkeys(sizes, 0.0), **each} for name, each in seconds.items()]
    columns = [Column(f"batch {size}", size, _milliseconds) for size in sizes]
    place = f", {LOOP_CONTEXT:,} tokens before each row" if context > LOOP_CONTEXT else ""
    return Table((Column(f"a step of the engine, ms{place}", "name"), *columns), rows)


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3f}"


def trace_of(steps: Mapping[str, Calls], process: str) -> JsonObject:
    """Return the trace of `steps`, calls by the name of a step, as plain data. Each step is a track of its own.

    The calls of a step follow each other without gaps, from time 0 on: their times are measured, the time between them
    is not.
    """
    events = [_name("process_name", process, 0)]
    for track, (step, calls) in enumerate(steps.items(), start=1):
        events.append(_name("thread_name", step, track))
        begin = 0.0
        for place, (operation, seconds) in enumerate(calls):
            duration = seconds * 1e6
            place_and_time = {"pid": _TRACE_PROCESS, "tid": track, "ts": begin, "dur": duration}
            events.append({"name": operation, "cat": "operation", "ph": "X", **place_and_time, "args": {"call": place}})
            begin += duration
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _name(kind: str, name: str, track: int) -> JsonObject:
    return {"name": kind, "ph": "M", "pid": _TRACE_PROCESS, "tid": track, "args": {"name": name}}


def check_trace_path(path: Path) -> None:
    """Raise ConfigError if no trace could be written to `path`; to be called before anything is measured."""
    if is_directory(path) or not is_directory(path.parent):
        raise ConfigError(f"--trace {path} should be a file in a directory that exists")


def write_trace(path: Path, trace: Mapping[str, object]) -> None:
    """Write the trace as JSON. ConfigError if the file cannot be written."""
    write_text(path, json.dumps(trace) + "\n", "the trace", ConfigError)
