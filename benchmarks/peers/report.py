"""The report of all measurements: medians over the rounds, ratios, and the share of the memory's floor."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ostinato.bench.statistics import spread

GGUF_KINDS = ("q8_0", "q4_0", "q4_1", "q4_k_m")
"""Kinds of quantised GGUF files that Ostinato and llama.cpp both run, as `llama-quantize` calls them. Engines that run
one have its name behind theirs."""
FLOOR = "floor"
"""Stands for an engine in measurements of the memory's bandwidth and of the bytes of a step."""
RIVALS = {
    "ostinato": ("vllm", "llama.cpp"),
    "ostinato-int8": ("llama.cpp-q8_0",),
    **{f"ostinato-{kind}": (f"llama.cpp-{kind}",) for kind in GGUF_KINDS},
}
"""Whom each of ours is compared with, the better one for each figure."""
Q8_0 = 34 / 64
"""Bytes of a weight in llama.cpp's q8_0 beside bf16: a block is 32 bytes of weights and 2 of scale."""


def make_report(
    setup: Mapping[str, Any], measurements: Iterable[Mapping[str, Any]], skipped: Mapping[str, str]
) -> dict[str, Any]:
    """`skipped` says why an engine was not measured at all, by its name."""
    done = list(measurements)
    floors = [each["figures"] for each in done if each["engine"] == FLOOR and "figures" in each]
    models = {}
    for model in dict.fromkeys(each["model"] for each in done):
        mine = [each for each in done if each["model"] == model]
        models[model] = _model_report(mine)
    return {
        "command": "peers",
        "setup": dict(setup),
        "processor": setup["processor"],
        "measured": _dates(done),
        "machine": floors[0]["machine"] if floors else {},
        "busy": statistics.median(each["busy"] for each in done) if done else None,
        "skipped": dict(skipped),
        "models": models,
    }


def _dates(measurements: Sequence[Mapping[str, Any]]) -> list[str]:
    """The first and the last day of them."""
    dates = [each["date"] for each in measurements]
    return [min(dates), max(dates)] if dates else []


def _model_report(measurements: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    floors = [each["figures"] for each in measurements if each["engine"] == FLOOR and "figures" in each]
    # Shared machines have other rates from one minute to the next: a model is held against that of its own rounds.
    bandwidth = statistics.median(max(floor["read"], floor["copy"]) for floor in floors) if floors else None
    engines = {}
    for name in dict.fromkeys(each["engine"] for each in measurements if each["engine"] != FLOOR):
        rounds = [each for each in measurements if each["engine"] == name]
        engines[name] = _engine_report(rounds)
    needed = {}
    for each in measurements:
        if each["engine"] == FLOOR:
            needed.update(each.get("figures", {}).get("decode_bytes", {}))
    for name, engine in engines.items():
        engine["floor_share"] = {
            size: share(rate["median"], int(size), step_bytes(needed, name, size), bandwidth)
            for size, rate in engine.get("decode", {}).items()
        }
    return {
        "bytes_per_second": bandwidth,
        "decode_bytes": needed,
        "engines": engines,
        "ratios": {ours: ratios(engines, ours) for ours in RIVALS if "decode" in engines.get(ours, {})},
    }


def _engine_report(rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    figures = [each["figures"] for each in rounds if "figures" in each]
    errors = list(dict.fromkeys(each["error"] for each in rounds if "error" in each))
    if not figures:
        return {"rounds": 0, "errors": errors}
    report: dict[str, Any] = {"version": figures[0]["version"], "rounds": len(figures), "errors": errors}
    for name in ("prefill", "startup_seconds", "first_start_seconds", "peak_memory_bytes"):
        report[name] = spread([each[name] for each in figures if name in each])
    sizes = figures[0]["decode"]
    report["decode"] = {size: spread([each["decode"][size] for each in figures]) for size in sizes}
    return report


def step_bytes(needed: Mapping[str, Any], engine: str, size: str) -> float | None:
    """What a decode step of `size` rows must move at the least, in bytes, with the weights of `engine`.

    `blocks_needed` is by dtype or kind of file, then by batch size. Every engine keeps states in float32, and keys and
    values in 16 bits.
    """
    suffix = engine.rpartition("-")[2]
    kind = suffix if suffix in ("int8", *GGUF_KINDS) else "bfloat16"
    is_estimate = kind == "q8_0" and kind not in needed
    parts = needed.get("bfloat16" if is_estimate else kind, {}).get(size)
    if parts is None:
        return None
    saved = parts["weights"] * (1 - Q8_0) if is_estimate else 0.0
    return float(parts["total"] - saved)


def share(rate: float, size: int, needed: float | None, bandwidth: float | None) -> float | None:
    """The part of a decode step's time that moving its bytes at full bandwidth takes; `rate` is in tokens/s."""
    return None if needed is None or bandwidth is None else (needed / bandwidth) * (rate / size)


def ratios(engines: Mapping[str, Any], ours: str) -> dict[str, Any]:
    """Above 1 is better for us: rates beside the best of the rivals, start-up and memory beside vLLM."""
    mine = engines[ours]
    rivals = [engines[name] for name in RIVALS[ours] if "decode" in engines.get(name, {})]

    def beside(rate: float, others: Sequence[float]) -> float | None:
        return rate / max(others) if others else None

    result: dict[str, Any] = {
        "prefill": beside(mine["prefill"]["median"], [rival["prefill"]["median"] for rival in rivals]),
        "decode": {
            size: beside(rate["median"], [rival["decode"][size]["median"] for rival in rivals])
            for size, rate in mine["decode"].items()
        },
    }
    vllm = engines.get("vllm", {})
    for name in ("startup_seconds", "peak_memory_bytes"):
        theirs = vllm.get(name) or (vllm.get("first_start_seconds") if name == "startup_seconds" else None)
        result[name] = theirs["median"] / mine[name]["median"] if theirs else None
    return result
