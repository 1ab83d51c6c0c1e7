"""Summary of a check: measurements of several parts side by side, and the targets. Pure functions of plain data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Found = Mapping[str, Mapping[str, Any]]
"""The data of the parts that have some, by name."""
MODELS = ("8b", "300m")


@dataclass(frozen=True)
class Aim:
    """A target: the least or the greatest value that a measurement should have."""

    name: str
    figure: Callable[[Found, float | None], float | None]
    """Function of the data, and the catalogue's bandwidth in bytes/s; it returns None if the value was not measured."""
    least: float | None = None
    most: float | None = None

    def row(self, found: Found, bandwidth: float | None) -> dict[str, Any]:
        value = self.figure(found, bandwidth)
        is_met = None
        if value is not None:
            is_met = (self.least is None or value >= self.least) and (self.most is None or value <= self.most)
        return {"name": self.name, "least": self.least, "most": self.most, "reached": value, "is_met": is_met}


def decode_rows(found: Found, bandwidth: float | None) -> list[dict[str, Any]]:
    """Return the times of a decode step by model and number of rows.

    They are of the engine, with sampling and all; up to hidden states with a graph and without; the sum of the kernels;
    the plan's prediction of them; and of transformers.

    `reached` is the share of the catalogue's bandwidth (if that is not known, of the measured one) that the bytes of
    the step need in the engine's time for it.
    """
    rows = []
    for model in MODELS:
        steps = _by_rows(found.get(f"decode-{model}", {}).get("results", ()), "batch_size")
        graphs = _by_rows(found.get(f"graphs-{model}", {}).get("steps", ()), "rows")
        kernels = _by_rows(found.get(f"kernels-{model}", {}).get("decode", ()), "batch_size")
        peers = _by_rows(found.get("transformers", {}).get("results", ()) if model == "300m" else (), "batch_size")
        for number in sorted({*steps, *graphs, *kernels}):
            step, graph, kernel, peer = (each.get(number, {}) for each in (steps, graphs, kernels, peers))
            seconds = (step.get("decode_step_seconds") or {}).get("p50")
            of_kernels = (kernel.get("total") or {}).get("seconds")
            predicted = kernel.get("predicted")
            rows.append(
                {
                    "model": model,
                    "rows": number,
                    "step_seconds": seconds,
                    "tokens_per_second": None if seconds is None else number / seconds,
                    "reached": _reached(step.get("floor"), seconds, bandwidth),
                    "graph_seconds": _seconds(graph.get("cuda_ms") or graph.get("tape_ms")),
                    "eager_seconds": _seconds(graph.get("eager_ms")),
                    "kernel_seconds": of_kernels,
                    "predicted_seconds": None if predicted is None else sum(predicted.values()),
                    "transformers_seconds": _p50(peer.get("transformers")),
                }
            )
    return rows


def overlap_rows(found: Found) -> list[dict[str, Any]]:
    """Return the time between steps by number of rows, with and without overlap, and that of the step's kernels."""
    kernels = _by_rows(found.get("kernels-300m", {}).get("decode", ()), "batch_size")
    return [
        {
            "rows": each["batch_size"],
            "off_seconds": _p50(each["off"]),
            "on_seconds": _p50(each["on"]),
            "kernel_seconds": (kernels.get(each["batch_size"], {}).get("total") or {}).get("seconds"),
        }
        for each in found.get("overlap", {}).get("results", ())
    ]


def aims(found: Found, bandwidth: float | None) -> list[dict[str, Any]]:
    """Return the targets and the measured values. `is_met` None: it was not measured."""
    return [aim.row(found, bandwidth) for aim in AIMS]


def _reached_at(rows: int) -> Callable[[Found, float | None], float | None]:
    def figure(found: Found, bandwidth: float | None) -> float | None:
        steps = decode_rows(found, bandwidth)
        return next((each["reached"] for each in steps if (each["model"], each["rows"]) == ("8b", rows)), None)

    return figure


def _of_state_update(found: Found, bandwidth: float | None) -> float | None:
    """Return the least share of the bandwidth that `state_update` reaches from 64 rows on."""
    reached = [
        kernel["bytes"] / bandwidth / kernel["seconds"]
        for step in found.get("kernels-8b", {}).get("decode", ())
        for kernel in step["kernels"]
        if kernel["kernel"] == "state_update" and step["batch_size"] >= 64 and bandwidth and kernel["bytes"]
    ]
    return min(reached, default=None)


def _capture_seconds(found: Found, _: float | None) -> float | None:
    return _at(found, "graphs-8b", "capture", "seconds")


def _off_stride(found: Found, _: float | None) -> float | None:
    return _at(found, "graphs-300m", "off_stride", "ratio", "median")


def _over_kernels(found: Found, _: float | None) -> float | None:
    """Return the greatest ratio of a step with overlap to the sum of its kernels."""
    pairs = [(each["on_seconds"], each["kernel_seconds"]) for each in overlap_rows(found)]
    return max((step / kernels for step, kernels in pairs if step and kernels), default=None)


def _failed_tests(found: Found, _: float | None) -> float | None:
    return _at(found, "tests", "failed")


def _memory(found: Found, _: float | None) -> float | None:
    """Return the most memory that torch held, over what the plan says is used."""
    observed, planned = (
        _at(found, "start", "observed_bytes", "reserved_peak"),
        _at(found, "start", "planned_bytes", "used"),
    )
    return None if observed is None or not planned else observed / planned


AIMS = (
    Aim("tests that failed", _failed_tests, most=0),
    Aim("8B, 1 row: part of bandwidth", _reached_at(1), least=0.65),
    Aim("8B, 256 rows: part of bandwidth", _reached_at(256), least=0.60),
    Aim("8B, state_update from 64 rows on: part of bandwidth", _of_state_update, least=0.80),
    Aim("8B, capture of the default ladders, seconds", _capture_seconds, most=10),
    Aim("prefill, steps off the stride over steps on it", _off_stride, least=0.95),
    Aim("300M, step with overlap over its kernels", _over_kernels, most=1.05),
    Aim("8B, memory held over memory planned", _memory, most=1),
)


def _at(found: Found, *path: str) -> Any:
    value: Any = found
    for name in path:
        value = None if value is None else value.get(name)
    return value


def _by_rows(steps: Sequence[Mapping[str, Any]], name: str) -> dict[int, Mapping[str, Any]]:
    return {step[name]: step for step in steps}


def _p50(figures: Mapping[str, Any] | None) -> float | None:
    return None if figures is None else (figures.get("decode_step_seconds") or {}).get("p50")


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3


def _reached(floor: Mapping[str, Any] | None, seconds: float | None, bandwidth: float | None) -> float | None:
    if floor is None or not seconds:
        return None
    if bandwidth is None:
        reached: float = floor["fraction_reached"]
        return reached
    return float(floor["step_bytes"]["total"] / bandwidth / seconds)


def lines(rows: Sequence[Mapping[str, Any]], figure: str) -> Iterator[tuple[str, list[tuple[float, float]]]]:
    """Yield (model, points) of a measurement against the number of rows, for models that have any."""
    for model in MODELS:
        points = [(each["rows"], each[figure]) for each in rows if each["model"] == model and each[figure] is not None]
        if points:
            yield model, points
