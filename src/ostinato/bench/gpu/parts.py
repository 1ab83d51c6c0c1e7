"""Parts of a GPU check, as plain data: their limits in seconds, and their measurements.

Each measurement is the data of one benchmark's report, made in a separate process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ostinato.bench.encoder import EncoderBench, encoder
from ostinato.bench.engine_driver import Workload, bench_config, rotated_order, run_batch, share_cache, with_room
from ostinato.bench.graphs import GraphBench, graphs
from ostinato.bench.peers import compare
from ostinato.bench.profile import ProfileBench, profile
from ostinato.bench.report import ProgressCallback, engine_facts
from ostinato.bench.throughput import throughput, throughput_figures
from ostinato.json_io import JsonMapping, JsonObject, to_json_data
from ostinato.plan.device.kernel_support import MIN_CAPABILITY

if TYPE_CHECKING:
    from ostinato.engine.core import EngineCore


Settings = JsonObject
Options = JsonMapping


def run_job(job: JsonObject) -> JsonObject:
    """Return the data of one part: its `kind`, `settings` and `options` are in the job's `part`."""
    part = job["part"]
    options = {name: tuple(value) if isinstance(value, list) else value for name, value in part["options"].items()}
    return {"data": MEASURES[part["kind"]](part["settings"], options, lambda _: None)}


def _throughput(settings: Settings, options: Options, say: ProgressCallback) -> JsonObject:
    return throughput(settings, Workload(**options), say).data


def _profile(settings: Settings, options: Options, say: ProgressCallback) -> JsonObject:
    return profile(settings, ProfileBench(**options), say).data


def _graphs(settings: Settings, options: Options, say: ProgressCallback) -> JsonObject:
    return graphs(settings, GraphBench(**options), say).data


def _encoder(settings: Settings, options: Options, say: ProgressCallback) -> JsonObject:
    return encoder(settings, EncoderBench(**options), say).data


def _transformers(settings: Settings, options: Options, say: ProgressCallback) -> JsonObject:
    return compare(settings, Workload(**options), "transformers", say).data


def start(settings: Settings, options: Options, _: ProgressCallback) -> JsonObject:
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

    versions = {"torch": torch.__version__, "cuda": str(torch.version.cuda)}
    if find_spec("triton") is not None:
        versions["triton"] = version("triton")
    if engine.runner.device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(engine.runner.device)
        versions |= {"device": torch.cuda.get_device_name(engine.runner.device), "capability": f"{major}.{minor}"}
    return versions


def taken_bytes(engine: EngineCore) -> dict[str, int | None]:
    """Return the device bytes that torch held at most, and that all processes use now; None on a CPU.

    The latter include contexts and graphs of the driver.
    """
    import torch

    device = engine.runner.device
    if device.type != "cuda":
        return {"reserved_peak": None, "device_used": None}
    free, total = torch.cuda.mem_get_info(device)
    return {"reserved_peak": torch.cuda.max_memory_reserved(device), "device_used": total - free}


def overlap(settings: Settings, options: Options, say: ProgressCallback, setting: str = "overlap") -> JsonObject:
    """Measure the seconds between steps of decoding requests, with `setting` off and on, by batch size, alternating."""
    from ostinato.engine.core import EngineCore

    workload = Workload(**options)
    config = bench_config(settings, workload)
    configs = share_cache({value: config.with_settings(**{setting: value}) for value in ("off", "on")})
    say("loading and capturing")
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
    plan = engines["off"].plan
    return {**engine_facts(setting, config, plan, **options), "results": results}


MEASURES: Mapping[str, Callable[[Settings, Options, ProgressCallback], dict[str, object]]] = {
    "start": start,
    "throughput": _throughput,
    "profile": _profile,
    "graphs": _graphs,
    "encoder": _encoder,
    "transformers": _transformers,
    "overlap": overlap,
}


BUDGET = 540.0
"""Seconds of a whole check: under nine minutes on an H100, which is rented by the hour."""

MARK = "pytest.mark.gpu"

Kind = Literal["compile", "tests", "start", "throughput", "profile", "graphs", "encoder", "transformers", "overlap"]


@dataclass(frozen=True)
class CheckPart:
    """A part, run in a separate process.

    `seconds` are its share of the plan; the rest of earlier parts comes on top.
    """

    name: str
    kind: Kind
    title: str
    seconds: float
    settings: JsonMapping = field(default_factory=dict)
    """Settings of the engine."""
    options: JsonMapping = field(default_factory=dict)
    """Options of the benchmark, of the tests, or of the compiler."""
    needs_setting: str | None = None
    """A field of `EngineConfig` that it compares; without that field, the part is skipped."""


@dataclass(frozen=True)
class Scale:
    """Amount of measuring, and its shapes."""

    large: JsonMapping
    """Settings that name the large model, with its device."""
    small: JsonMapping
    images: JsonMapping
    rows: tuple[int, ...]
    """Rows of decode steps."""
    kernel_rows: tuple[int, ...]
    """Rows of the decode steps whose kernels are timed."""
    peer_rows: tuple[int, ...]
    """Rows of the decode steps that transformers computes too, which needs far more memory for them."""
    prompt_len: int
    output_len: int
    prefill: int
    rounds: int
    off_stride: tuple[int, ...]
    arrivals: int
    max_pixels: int
    compiled: JsonMapping
    tests: JsonMapping


def full_scale(checkout: Path, capability: int | None) -> Scale:
    """Return the scale for a GPU of a compute capability: the shapes of `benchmarks/models`, with random weights."""
    shapes = checkout / "benchmarks/models"
    models = ("nemotron-h-8b", "nemotron-h-300m", "qwen3-vl-300m")
    of_engines = ["--engines", "bfloat16", "--capability", str(capability or MIN_CAPABILITY)]

    def on_gpu(name: str) -> JsonObject:
        return {"model": str(shapes / name), "random_weights": True, "device": "cuda"}

    return Scale(
        large=on_gpu(models[0]),
        small=on_gpu(models[1]),
        images=on_gpu(models[2]),
        rows=(1, 8, 32, 128, 256),
        kernel_rows=(1, 8, 32, 64, 128, 256),
        peer_rows=(1, 8),
        prompt_len=128,
        output_len=64,
        prefill=2048,
        rounds=3,
        off_stride=(700, 768),
        arrivals=24,
        max_pixels=1_000_000,
        compiled={"arguments": [*of_engines, *(str(shapes / name) for name in models)]},
        tests={"arguments": marked_files(checkout), "workers": 12},
    )


def marked_files(checkout: Path) -> list[str]:
    """Return the files with tests marked `gpu`: collecting all others takes as long as running these."""
    files = sorted((checkout / "tests").rglob("test_*.py"))
    return [str(file.relative_to(checkout)) for file in files if MARK in file.read_text(encoding="utf-8")]


def toy_scale() -> Scale:
    """Return the scale for a CPU: the embedded models with random weights, few rows and few tokens.

    It shows that every part runs and is reported; its measurements mean nothing.
    """
    common = {"random_weights": True, "device": "cpu", "threads": 1, "dtype": "float32", "cache_memory": "48MiB"}
    sizes = {"max_num_seqs": 2, "max_model_len": 64, "capture_sizes": "8,20,24", "capture_rows": "1,2"}
    text = {"model": "demo", **common, **sizes}
    one_model = ["benchmarks/models/nemotron-h-300m", "--jobs", "1"]
    return Scale(
        large=text,
        small=text,
        images={"model": "demo-vl", **common, "max_num_seqs": 2, "encoder_token_budgets": "16,64"},
        rows=(1, 2),
        kernel_rows=(1, 2),
        peer_rows=(1,),
        prompt_len=16,
        output_len=3,
        prefill=24,
        rounds=1,
        off_stride=(20, 24),
        arrivals=1,
        max_pixels=4096,
        compiled={"arguments": ["--engines", "bfloat16", "--capability", "90", "--kernel", "embedding", *one_model]},
        tests={
            "arguments": ["tests/gpu", "--gpu-device", "cpu", "-k", "nemotron_h_dense and (joins or bfloat16 or none)"],
            "workers": 0,
        },
    )


def make_parts(scale: Scale) -> tuple[CheckPart, ...]:
    """Return all parts, the most informative first: if the budget is too small, the last ones are left out."""
    decode = {"prompt_len": scale.prompt_len, "output_len": scale.output_len, "batch_sizes": scale.rows, "rounds": 2}
    kernels = {"context": scale.prompt_len, "prefill": scale.prefill, "rounds": 2 * scale.rounds, "by_operation": True}
    steps = {"rows": scale.rows, "prompt_len": scale.prompt_len, "rounds": scale.rounds}
    peers = {**decode, "batch_sizes": scale.peer_rows, "rounds": 1}
    images = {"arrivals": scale.arrivals, "batch": (2, 4), "rounds": scale.rounds, "max_pixels": scale.max_pixels}
    in_steps = {**scale.large, "max_num_batched_tokens": max(scale.prefill, 4 * scale.prompt_len)}
    every_image = {**scale.images, "encoder_graph_mode": "always"}
    return (
        CheckPart("compile", "compile", "kernels, compiled by all cores", 40, options=scale.compiled),
        CheckPart("tests", "tests", "tests marked gpu", 140, options=scale.tests),
        CheckPart("start", "start", "8B: a first start, its memory", 40, scale.large, {"prompt_len": scale.prefill}),
        CheckPart("decode-8b", "throughput", "8B: prompts and decode steps", 50, scale.large, decode),
        CheckPart("kernels-8b", "profile", "8B: kernels", 40, in_steps, {**kernels, "batch_sizes": scale.kernel_rows}),
        CheckPart("graphs-8b", "graphs", "8B: graphs beside eager steps", 35, scale.large, steps),
        CheckPart("decode-300m", "throughput", "300M: prompts and decode steps", 30, scale.small, decode),
        CheckPart(
            "graphs-300m",
            "graphs",
            "300M: graphs beside eager steps, and steps off the stride",
            40,
            scale.small,
            {**steps, "off_stride": scale.off_stride},
        ),
        CheckPart("encoder", "encoder", "images with and without graphs", 30, every_image, images),
        CheckPart(
            "overlap",
            "overlap",
            "300M: time between steps, with and without overlap",
            30,
            scale.small,
            {**decode, "batch_sizes": scale.kernel_rows[:3]},
            needs_setting="overlap",
        ),
        CheckPart(
            "kernels-300m", "profile", "300M: kernels", 25, scale.small, {**kernels, "batch_sizes": scale.kernel_rows}
        ),
        CheckPart("transformers", "transformers", "300M: beside transformers", 40, scale.small, peers),
    )
