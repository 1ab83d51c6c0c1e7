"""The figures of `bench profile`: pure functions of seconds that were measured and of work that is known."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ostinato.plan.memory.kernel_work import KernelWork

Calls = Sequence[tuple[str, float]]
"""(name, seconds) of every call of a step, in order."""

MODEL = ("model", "logits")
"""The phases that are the model; the others are the engine around it."""


@dataclass(frozen=True)
class Roofs:
    """What the machine can do at the most: bytes/s from and to memory, and FLOP/s of matrix products in the model's
    dtype."""

    bytes_per_second: float
    flops_per_second: float

    def floor(self, work: KernelWork) -> float:
        """The least seconds that it takes: moving and computing may go on at the same time."""
        return max(work.num_bytes / self.bytes_per_second, work.flops / self.flops_per_second)


def shortest_pass(passes: Sequence[Calls]) -> Calls:
    """The one of several passes over a step that took the least time in all, as other work makes it longer, never
    shorter. Not of each call the shortest: on a busy machine the thread with the watch may be late for a call, which
    then seems short, and the one before it long."""
    return min(passes, key=lambda calls: sum(seconds for _, seconds in calls))


def kernel_figures(calls: Calls, work: Mapping[str, KernelWork | None], roofs: Roofs) -> list[dict[str, Any]]:
    """The calls of a step by name, longest first: seconds, and their share of all; the floor and the share of it that
    was reached, None for what `work` does not know."""
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


def total_figures(figures: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of all kernels of a step. The floor is None where that of a kernel with experts is."""
    seconds = sum(each["seconds"] for each in figures)
    is_known = all(each["floor_seconds"] is not None for each in figures if each["kernel"] == "moe")
    floor = sum(each["floor_seconds"] or 0.0 for each in figures) if is_known else None
    return {
        "seconds": seconds,
        "floor_seconds": floor,
        "fraction_reached": None if floor is None else floor / seconds,
    }


def phase_figures(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The median seconds of each phase over steps that all have the same ones."""
    return {name: statistics.median(step[name] for step in steps) for name in steps[0]}
