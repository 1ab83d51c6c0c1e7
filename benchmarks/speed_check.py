"""Check of kernels' speed: step times over their floors, beside the stored record of this kind of processor.

    make speed-check
    python benchmarks/speed_check.py --rounds 5 --write

A cell is a step of one model: decoding at 1, 8 or 32 rows, or a prompt of 512 tokens. Each round measures every model
in a process of its own, and each process measures the rates that its floors are made of, so a machine whose clock or
memory changes from minute to minute changes both. A cell's figure is its least time over its least floor.

A figure within 10 % of the record's is "same". Run it on a quiet machine, and put what it prints into the note of a
change to kernels. `--write` stores the figures as the record of this kind of processor.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.peers.processor import processor_here

ROOT = Path(__file__).resolve().parents[1]
MODELS = (("nemotron-h-300m", "none"), ("qwen3-410m", "int8"), ("qwen3-5-moe-450m", "none"))
"""Model and quantisation of each process: state layers in bfloat16, attention in int8, experts."""
ROWS = (1, 8, 32)
NOISE = 0.1
"""Largest change of a figure, as a share of the record's, that is not reported."""

Cells = dict[str, float]
"""Cell -> time over floor."""


def measure(model: str, quantization: str, rounds: int) -> dict[str, tuple[float, float]]:
    """Measure the cells of a model in a process: cell -> (seconds, seconds of its floor)."""
    command = [sys.executable, "-m", "ostinato", "bench", "profile", str(ROOT / "benchmarks/models" / model)]
    command += ["--random-weights", "--batch-sizes", ",".join(map(str, ROWS)), "--rounds", str(rounds), "--json"]
    command += [] if quantization == "none" else ["--quantization", quantization]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command[2:])} failed: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return cells_of(json.loads(done.stdout), model if quantization == "none" else f"{model} {quantization}")


def cells_of(report: Mapping[str, Any], model: str) -> dict[str, tuple[float, float]]:
    """Return the cells of a report of `ostinato bench profile`."""
    steps = {f"{model}, {each['batch_size']} rows": each["total"] for each in report["decode"]}
    steps[f"{model}, prompt of {report['prefill']['tokens']}"] = report["prefill"]["total"]
    return {cell: (total["seconds"], total["floor_seconds"]) for cell, total in steps.items()}


def figures(rounds: list[dict[str, tuple[float, float]]]) -> Cells:
    """Return each cell's least time over its least floor."""
    cells = dict.fromkeys(cell for found in rounds for cell in found)
    times = {cell: [found[cell] for found in rounds if cell in found] for cell in cells}
    return {cell: min(t for t, _ in pairs) / min(floor for _, floor in pairs) for cell, pairs in times.items()}


def verdict(figure: float, recorded: float | None) -> str:
    """Return better, same or worse than the record, or new where it has no such cell."""
    if recorded is None:
        return "new"
    change = figure / recorded - 1
    return "same" if abs(change) <= NOISE else f"{'worse' if change > 0 else 'better'} by {abs(change):.0%}"


def table(found: Cells, record: Cells) -> str:
    """Return the lines to print: each cell, its figure, the record's, and the verdict."""
    width = max(map(len, found))
    lines = [f"{'step':{width}}  time/floor  record  verdict"]
    for cell, figure in found.items():
        recorded = record.get(cell)
        shown = "-" if recorded is None else f"{recorded:.2f}"
        lines.append(f"{cell:{width}}  {figure:10.2f}  {shown:>6}  {verdict(figure, recorded)}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="rounds over all models")
    parser.add_argument("--steps", type=int, default=10, help="steps of each cell in a round")
    parser.add_argument("--write", action="store_true", help="store the figures as this kind of processor's record")
    arguments = parser.parse_args()
    processor = processor_here()
    path = ROOT / "benchmarks/results" / processor.folder / "speed-check.json"
    record = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"cells": {}}
    rounds = []
    for number in range(arguments.rounds):
        for model, quantization in MODELS[number % len(MODELS) :] + MODELS[: number % len(MODELS)]:
            print(f"round {number + 1}: {model}", file=sys.stderr)
            rounds.append(measure(model, quantization, arguments.steps))
    found = figures(rounds)
    print(f"{processor.name} ({processor.kind}); record of {record.get('date', 'none')}")
    print(table(found, record["cells"]))
    if arguments.write:
        path.parent.mkdir(parents=True, exist_ok=True)
        data = {"processor": processor.name, "date": f"{datetime.now(UTC):%Y-%m-%d}", "rounds": arguments.rounds}
        path.write_text(json.dumps({**data, "cells": found}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
