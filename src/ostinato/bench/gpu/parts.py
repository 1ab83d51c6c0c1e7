"""Parts of a GPU check as plain data: eight, in the order of their worth, and the checks that each is made of.

A check is one process with a time limit. Its measurements are the data of one benchmark's report, or of a function
here. `faults` in its data are sentences that say what is wrong; a check with faults has failed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ostinato.bench.encoder import EncoderBench, encoder
from ostinato.bench.engine_driver import (
    Workload,
    bench_config,
    plan_of,
    rotated_order,
    run_batch,
    share_cache,
    with_room,
)
from ostinato.bench.graphs import GraphBench, graph_of, graphs
from ostinato.bench.profile import ProfileBench, profile
from ostinato.bench.report import BenchReport, engine_facts
from ostinato.bench.serve.overhead import OverheadBench, overhead
from ostinato.bench.serve.workload import Lengths, LoadSpec
from ostinato.bench.throughput import throughput, throughput_figures
from ostinato.errors import CapacityError
from ostinato.json_io import JsonObject, to_json_data
from ostinato.plan.device.kernel_support import MIN_CAPABILITY

if TYPE_CHECKING:
    from ostinato.engine.core import EngineCore


Settings = dict[str, Any]
Options = Mapping[str, Any]
Keep = Callable[[JsonObject], None]
"""Function that keeps a check's data so far, should its time end."""


def run_job(job: JsonObject) -> JsonObject:
    """Return the data of one check: its `kind`, `settings` and `options` are in the job's `check`."""
    check = job["check"]
    options = {name: tuple(value) if isinstance(value, list) else value for name, value in check["options"].items()}

    def keep(data: JsonObject) -> None:
        print(json.dumps({"data": data}), flush=True)

    if check["kind"] in BENCHES:
        measure, bench = BENCHES[check["kind"]]
        return {"data": measure(check["settings"], bench(**options), _quiet).data}
    return {"data": MEASURES[check["kind"]](check["settings"], options, keep)}


def _server(settings: Settings, options: Options, _: Keep) -> JsonObject:
    output = Lengths("uniform", options["output_len"], options["output_len"])
    load = LoadSpec(options["requests"], output, prompt_tokens=None)
    return overhead(settings, OverheadBench(load, options["concurrency"], rounds=1, ignore_eos=True), _quiet).data


def _recurrences(settings: Settings, options: Options, keep: Keep) -> JsonObject:
    from ostinato.bench.gpu.recurrences import measure_recurrences

    return measure_recurrences(settings["device"], options, keep)


def _verify(settings: Settings, options: Options, keep: Keep) -> JsonObject:
    """Verify every way of the matrix; each that differs is a fault."""
    from ostinato.verify.verify import Trial, has_passed, verify

    report = verify(settings, Trial(**options), lambda stage, done, total: keep({"summary": {"cells": done}}))
    wrong = [cell for cell in report["cells"] if cell["verdict"] in ("different", "error")]
    faults = [f"{len(wrong)} of {len(report['cells'])} ways are different or have an error"] if wrong else []
    if not faults and not has_passed(report):
        faults = ["the plain path contradicts itself"]
    return {**{name: report[name] for name in ("summary", "axes", "extent", "plain", "states")}, "cells": wrong[:8]} | {
        "faults": faults
    }


def start(settings: Settings, options: Options, _: Keep) -> JsonObject:
    """Measure a first start with all graphs, including compilation, and one prompt of `prompt_len` tokens.

    Also return the planned bytes and those that the device reports as in use.
    """
    from ostinato.engine.core import EngineCore

    length = options["prompt_len"]
    config = with_room(settings, max_model_len=length + 2)
    begin = time.perf_counter()
    engine = EngineCore(config)
    ready = time.perf_counter()
    if "graphs" not in engine.runner.measured:
        engine.runner.capture()
    captured = time.perf_counter()
    run_batch(engine, [[2] * length], output_len=2)
    plan = engine.plan
    return {
        **engine_facts("start", config, plan, rounds=1, **options),
        "seconds": {"start": ready - begin, "later_capture": captured - ready},
        "capture": engine.runner.graph_figures(),
        "planned_bytes": {**to_json_data(plan.memory), "used": plan.memory.used},
        "observed_bytes": {"weights": engine.runner.measured["weight_bytes"], **taken_bytes(engine)},
        "versions": versions(engine),
    }


def versions(engine: EngineCore) -> dict[str, str]:
    """Return the versions of the device's software, and the device's name."""
    import torch

    found = {"torch": torch.__version__, "cuda": str(torch.version.cuda)}
    if find_spec("triton") is not None:
        found["triton"] = version("triton")
    if not engine.runner.arrays.is_on_host:
        device = torch.device(engine.runner.arrays.device)
        major, minor = torch.cuda.get_device_capability(device)
        found |= {"device": torch.cuda.get_device_name(device), "capability": f"{major}.{minor}"}
    return found


def taken_bytes(engine: EngineCore) -> dict[str, int | None]:
    """Return the device bytes that torch held at most, and that all processes use now; None on a CPU.

    The latter include contexts and graphs of the driver.
    """
    import torch

    device = torch.device(engine.runner.arrays.device)
    if device.type != "cuda":
        return {"reserved_peak": None, "device_used": None}
    free, total = torch.cuda.mem_get_info(device)
    return {"reserved_peak": torch.cuda.max_memory_reserved(device), "device_used": total - free}


def coverage(settings: Settings, options: Options, keep: Keep) -> JsonObject:
    """Compare the graph of decode steps with the planned one, and a refused `max_num_seqs` with its remedy.

    The steps have each number of `rows`; `capture_rows` of the settings leave some of them without a graph. The refused
    number is `too_many`, whose slots do not fit `slots_memory`: the error must name a number that fits.
    """
    from ostinato.engine.core import EngineCore

    faults: list[str] = []
    slots = _refused(settings, options, faults)
    workload = Workload(prompt_len=4, output_len=3, batch_sizes=options["rows"], rounds=1)
    engine = EngineCore(bench_config(settings, workload))
    results: list[JsonObject] = []
    for rows in workload.batch_sizes:
        mode, size = graph_of(engine.plan, rows)
        before = engine.stats()["graphs"]
        run_batch(engine, workload.prompts(rows, engine.spec.vocab_size, 0), workload.output_len)
        after = engine.stats()["graphs"]
        steps = {name: count - before["steps"][name] for name, count in after["steps"].items()}
        # The prompts may take several steps, in which some rows decode already: the last step is a decode step.
        results.append({"rows": rows, "planned": mode, "graph_rows": size, "steps": steps})
        if not steps[mode] or after["unplanned"] > before["unplanned"]:
            faults.append(f"decode steps of {rows} rows are planned as {mode}, and ran as {steps}")
        keep({"results": results, "slots": slots, "faults": faults})
    return {"results": results, "slots": slots, "faults": faults}


def _refused(settings: Settings, options: Options, faults: list[str]) -> JsonObject:
    """Ask for more rows than slots fit, and plan again with the number that the error names."""
    asked = {**settings, "max_num_seqs": options["too_many"], "cache_memory": options["slots_memory"]}
    try:
        plan_of(with_room(asked))
    except CapacityError as error:
        named = next((each.value for each in error.remedies if each.setting == "max_num_seqs"), None)
        if named is None:
            faults.append(f"the error names no max_num_seqs: {error.message}")
        else:
            plan_of(with_room({**asked, "max_num_seqs": named}))
        return {"asked": options["too_many"], "named": named, "error": error.message}
    faults.append(f"max_num_seqs {options['too_many']} was planned in {options['slots_memory']}")
    return {"asked": options["too_many"], "named": None, "error": None}


def overlap(settings: Settings, options: Options, _: Keep) -> JsonObject:
    """Measure the seconds between steps of decoding requests, one step ahead and not, by batch size, alternating."""
    from ostinato.engine.core import EngineCore

    workload = Workload(**options)
    config = bench_config(settings, workload)
    configs = share_cache({value: config.with_settings(overlap=value) for value in ("off", "on")})
    engines = {value: EngineCore(each) for value, each in configs.items()}
    results = []
    for size in workload.batch_sizes:
        traces: dict[str, list[Any]] = {value: [] for value in engines}
        for number in range(-1, workload.rounds):
            length = workload.output_len if number >= 0 else workload.warm_up().output_len
            for value in rotated_order(list(engines), number + 1):
                engine = engines[value]
                trace = run_batch(engine, workload.prompts(size, engine.spec.vocab_size, number), length)
                traces[value] += [trace] if number >= 0 else []
        results.append({"batch_size": size, **{value: throughput_figures(each) for value, each in traces.items()}})
    return {**engine_facts("overlap", config, engines["off"].plan, **options), "results": results}


def _quiet(_: str) -> None:
    """Report no progress: a check's output is its data."""


BENCHES: Mapping[str, tuple[Callable[..., BenchReport], Callable[..., object]]] = {
    "throughput": (throughput, Workload),
    "profile": (profile, ProfileBench),
    "graphs": (graphs, GraphBench),
    "encoder": (encoder, EncoderBench),
}
"""Kinds that are a benchmark by itself, with its description."""

MEASURES: Mapping[str, Callable[[Settings, Options, Keep], dict[str, object]]] = {
    "start": start,
    "coverage": coverage,
    "verify": _verify,
    "recurrences": _recurrences,
    "overlap": overlap,
    "server": _server,
}


PARTS = {
    "kernels": "every Triton kernel against float32, with NaN in what nobody may read",
    "seeds": "the five changes: ladders, coverage, slots, encoder budgets, drafts with cached states",
    "verify": "tokens of every mode, and of transformers",
    "updates": "state_update and delta_update, as graphs",
    "decode": "8B: a decode step, and the share of each operation",
    "prefill": "scans of a long prompt",
    "gaps": "time between steps, and the server beside `generate`",
    "predictions": "8B: predicted and measured steps",
}
"""The parts in the order of their worth, with what each shows. If time ends, the last ones are left out."""

MINUTES = 10.0
"""Minutes of a whole check, on a GPU that is rented by the hour."""

Kind = Literal[
    "tests", "compile", "start", "coverage", "throughput", "profile", "graphs", "encoder", "verify", "recurrences",
    "overlap", "server",
]  # fmt: skip


@dataclass(frozen=True)
class Check:
    """One process of a part. `seconds` are its share of a check of `MINUTES`; the rest of earlier ones comes on top."""

    name: str
    part: str
    kind: Kind
    title: str
    seconds: float
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the engine."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the benchmark, of the tests, or of the compiler."""


STATE_8B = {"heads": 128, "head_dim": 64, "groups": 8, "state_size": 128, "chunk_size": 128}
"""Sizes of a Mamba-2 layer of Nemotron-H 8B."""
DELTA_80B = {"key_heads": 16, "heads": 32, "key_dim": 128, "value_dim": 128}
"""Sizes of a delta net of Qwen3-Next."""


MARK = "pytest.mark.gpu"


def marked_files(checkout: Path) -> list[str]:
    """Return the files with tests marked `gpu`: collecting all others takes as long as running these."""
    files = sorted((checkout / "tests").rglob("test_*.py"))
    return [str(file.relative_to(checkout)) for file in files if MARK in file.read_text(encoding="utf-8")]


def make_checks(checkout: Path, capability: int | None) -> tuple[Check, ...]:
    """Return the checks of all parts, in the order of `PARTS`, for a GPU of a compute capability.

    Models are the shapes of `benchmarks/models`, with random weights. Tests and tools are those of the `checkout`.
    """
    shapes = [
        str(checkout / "benchmarks/models" / name) for name in ("nemotron-h-8b", "nemotron-h-300m", "qwen3-vl-300m")
    ]
    large, small, images = ({"model": shape, "random_weights": True, "device": "cuda"} for shape in shapes)
    demo = {"model": "demo", "device": "cuda"}
    rows, steps = (1, 32, 128, 256), {"prompt_len": 128, "rounds": 3}
    decode = {"prompt_len": 128, "output_len": 64, "rounds": 2, "batch_sizes": rows}
    trial = {"extent": "quick", "num_prompts": 1, "max_tokens": 12}
    layers = {"state": STATE_8B, "delta": DELTA_80B, "dtype": "bfloat16"}
    engines = ["--engines", "bfloat16", "--capability", str(capability or MIN_CAPABILITY), *shapes]
    kernels = ["tests/ops/triton", "tests/gpu/test_gpu_poison.py"]
    drafts = ["tests/gpu/test_gpu_parity.py", "-k", "drafts or preempted", "-m", "gpu"]
    return (
        _tests("kernel-tests", "kernels", "kernels against float32", 95, kernels),
        Check("compile", "kernels", "compile", "the engines' kernels, compiled", 35, options={"arguments": engines}),
        Check("memory", "seeds", "start", "8B: a start, its memory", 40, large, {"prompt_len": 128}),
        Check(
            "ladder", "seeds", "graphs", "300M: rows and tokens on and off the ladder", 40, {**small, "strict": True},
            {**steps, "rows": (1, 128, 700, 768), "off_stride": (700, 768)},
        ),
        Check(
            "coverage", "seeds", "coverage", "300M: the graphs that the plan names, slots that do not fit", 15,
            {**small, "capture_rows": "1,128,512"},
            {"rows": (1, 100, 512, 700), "too_many": 10_000, "slots_memory": "4GiB"},
        ),
        Check(
            "encoder", "seeds", "encoder", "images with and without graphs", 25,
            {**images, "encoder_graph_mode": "always"},
            {"arrivals": 24, "batch": (2, 4), "rounds": 3, "max_pixels": 1_000_000},
        ),
        _tests("drafts", "seeds", "drafts and cached states", 25, drafts),
        Check("verify-demo", "verify", "verify", "demo: every mode", 40, {**demo, "capture": "lazy"}, trial),
        Check("verify-300m", "verify", "verify", "300M: every mode", 40, {**small, "capture": "lazy"}, trial),
        _tests("gpu-tests", "verify", "tests marked gpu", 45, [*marked_files(checkout), "-m", "gpu"]),
        Check(
            "updates", "updates", "recurrences", "updates of states, beside other projects' kernels", 20, large,
            {**layers, "operations": ("state_update", "delta_update"), "rows": rows},
        ),
        Check("decode-8b", "decode", "throughput", "8B: prompts and decode steps", 40, large, decode),
        Check(
            "operations-8b", "decode", "profile", "8B: operations of a step", 35, large,
            {"context": 128, "prefill": 512, "rounds": 6, "batch_sizes": rows, "by_operation": True},
        ),
        Check(
            "prefill", "prefill", "recurrences", "scans of a prompt, beside other projects' kernels", 20, large,
            {**layers, "operations": ("ssd_scan", "delta_scan"), "tokens": 8192},
        ),
        Check(
            "overlap", "gaps", "overlap", "300M: one step ahead and not", 25, small,
            {**decode, "batch_sizes": rows[:3]},
        ),
        Check(
            "server", "gaps", "server", "demo: the server beside `generate`", 30, demo,
            {"requests": 64, "concurrency": 32, "output_len": 64},
        ),
        Check("predicted-8b", "predictions", "graphs", "8B: predicted steps", 30, large, {**steps, "rows": rows}),
    )  # fmt: skip


def _tests(name: str, part: str, title: str, seconds: float, arguments: Sequence[str]) -> Check:
    """Return a check that runs tests with as many workers as fill a GPU."""
    return Check(name, part, "tests", title, seconds, options={"arguments": arguments, "workers": 12})
