"""The measurements of a check, each the data of a benchmark's report; run in a separate process."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ostinato.bench.comparison import compare
from ostinato.bench.drive import Workload, bench_config, rotated_order, run_batch, share_cache, with_room
from ostinato.bench.encoder_speed import EncoderBench, encoder
from ostinato.bench.graph_speed import GraphBench, graphs
from ostinato.bench.profile import ProfileBench, profile
from ostinato.bench.reports import ProgressCallback, engine_facts
from ostinato.bench.throughput import throughput, throughput_figures
from ostinato.plain_data import to_json_data

if TYPE_CHECKING:
    from ostinato.engine.engine import EngineCore

Settings = dict[str, Any]
Options = Mapping[str, Any]


def run_job(job: dict[str, Any]) -> dict[str, Any]:
    """Return the data of one part: its `kind`, `settings` and `options` are in the job's `part`."""
    part = job["part"]
    options = {name: tuple(value) if isinstance(value, list) else value for name, value in part["options"].items()}
    return {"data": MEASURES[part["kind"]](part["settings"], options, lambda _: None)}


def _throughput(settings: Settings, options: Options, say: ProgressCallback) -> dict[str, Any]:
    return throughput(settings, Workload(**options), say).data


def _profile(settings: Settings, options: Options, say: ProgressCallback) -> dict[str, Any]:
    return profile(settings, ProfileBench(**options), say).data


def _graphs(settings: Settings, options: Options, say: ProgressCallback) -> dict[str, Any]:
    return graphs(settings, GraphBench(**options), say).data


def _encoder(settings: Settings, options: Options, say: ProgressCallback) -> dict[str, Any]:
    return encoder(settings, EncoderBench(**options), say).data


def _transformers(settings: Settings, options: Options, say: ProgressCallback) -> dict[str, Any]:
    return compare(settings, Workload(**options), "transformers", say).data


def start(settings: Settings, options: Options, _: ProgressCallback) -> dict[str, Any]:
    """Measure a first start with all graphs, including compilation, and one prompt of `prompt_len` tokens.

    Also return the planned bytes and those that the device reports as in use.
    """
    from ostinato.engine.engine import EngineCore

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
    if engine.runner.device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(engine.runner.device)
        found |= {"device": torch.cuda.get_device_name(engine.runner.device), "capability": f"{major}.{minor}"}
    return found


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


def overlap(settings: Settings, options: Options, say: ProgressCallback, setting: str = "overlap") -> dict[str, Any]:
    """Measure the seconds between steps of decoding requests, with `setting` off and on, by batch size, alternating."""
    from ostinato.engine.engine import EngineCore

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


MEASURES: Mapping[str, Callable[[Settings, Options, ProgressCallback], dict[str, Any]]] = {
    "start": start,
    "throughput": _throughput,
    "profile": _profile,
    "graphs": _graphs,
    "encoder": _encoder,
    "transformers": _transformers,
    "overlap": overlap,
}
