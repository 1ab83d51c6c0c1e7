"""The report as a picture: for each figure a panel, for each model a group of bars, one for each engine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

COLOURS = {
    "ostinato": "#b5172f",
    "ostinato-int8": "#e8808f",
    "ostinato-q8_0": "#d9a441",
    "ostinato-q4_0": "#c46f1c",
    "ostinato-q4_1": "#aa5c14",
    "ostinato-q4_k_m": "#8f4a0e",
    "vllm": "#2b5c8a",
    "vllm-eager": "#7fa8cc",
    "llama.cpp": "#3f7d4e",
    "llama.cpp-q8_0": "#97c4a1",
    "llama.cpp-q4_0": "#6fae9f",
    "llama.cpp-q4_1": "#4f8a80",
    "llama.cpp-q4_k_m": "#2f6f63",
    "transformers": "#9a9a9a",
}

Panel = dict[str, list[float | None]]
"""By engine: a value per model, None where there is none."""


def panels(report: Mapping[str, Any]) -> dict[str, Panel]:
    """By title: the panel's values."""
    sizes = [str(size) for size in report["setup"]["workload"]["batch_sizes"]]
    engines = [name for name in COLOURS if any(name in model["engines"] for model in report["models"].values())]

    def panel(*path: str, unit: float = 1.0) -> Panel:
        values: Panel = {}
        for name in engines:
            found = [_at(model["engines"].get(name, {}), path) for model in report["models"].values()]
            if any(found):
                values[name] = [None if value is None else value["median"] / unit for value in found]
        return values

    return {
        "prefill, tokens/s": panel("prefill"),
        **{f"decode, batch {size}, tokens/s": panel("decode", size) for size in sizes},
        "start-up to first token, s": panel("startup_seconds"),
        "peak memory, GB": panel("peak_memory_bytes", unit=1e9),
    }


def draw(report: Mapping[str, Any], path: Path) -> None:
    """Writes the picture; needs matplotlib."""
    from matplotlib.figure import Figure

    shown = panels(report)
    columns = 3
    rows = -(-len(shown) // columns)
    figure = Figure(figsize=(13, 3.6 * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False)
    models = list(report["models"])
    handles: dict[str, Any] = {}
    for axes, (title, panel) in zip(grid.flat, shown.items(), strict=False):
        width = 0.8 / max(1, len(panel))
        for number, (name, values) in enumerate(panel.items()):
            places = [index - 0.4 + width * (number + 0.5) for index in range(len(models))]
            heights = [0.0 if value is None else value for value in values]
            handles[name] = axes.bar(places, heights, width * 0.92, color=COLOURS[name])
        axes.set_title(title, fontsize=10)
        axes.set_xticks(range(len(models)), ["\n".join(model.rsplit("-", 1)) for model in models], fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
        if title.startswith("start-up"):
            axes.set_yscale("log")
            axes.set_ylim(bottom=0.1)
            axes.yaxis.set_major_formatter("{x:g}")
    for axes in list(grid.flat)[len(shown) :]:
        axes.set_visible(False)
    names = [name for name in COLOURS if name in handles]
    figure.legend([handles[name] for name in names], names, loc="outside lower center", ncols=len(names), frameon=False)
    machine, setup = report["machine"], report["setup"]
    figure.suptitle(
        f"{machine.get('cpu', '')}, {setup['threads']} threads, median of {setup['rounds']} rounds", fontsize=10
    )
    figure.savefig(path, dpi=110)


def _at(engine: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    for name in path:
        engine = engine.get(name) or {}
    return engine or None
