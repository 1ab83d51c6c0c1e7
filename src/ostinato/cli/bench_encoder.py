"""`ostinato bench encoder`: its command and its tables."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from ostinato.bench.encoder import encoder
from ostinato.bench.encoder_figures import STATISTICS
from ostinato.bench.encoder_plot import plot_encoder
from ostinato.bench.encoder_workload import EncoderBench
from ostinato.bench.graph_plot import check_plot
from ostinato.cli.bench_options import reporter, sizes
from ostinato.cli.bench_tables import columns, milliseconds, show
from ostinato.cli.options import name_model
from ostinato.cli.output import figures_table
from ostinato.errors import ConfigError
from ostinato.units import format_bytes

LENGTHS = "{arrivals} arrivals of one image and {arrivals} of several"


def encoder_command(
    settings: dict[str, Any],
    target: Annotated[str | None, typer.Argument(metavar="MODEL", help="As --model.")] = None,
    arrivals: Annotated[int, typer.Option(min=1, help="Arrivals of one image, and as many of several.")] = 16,
    batch: Annotated[str, typer.Option(metavar="LEAST,MOST", help="Images that come together.")] = "2,4",
    max_pixels: Annotated[
        int | None, typer.Option(min=1, help="Larger images are made smaller. [default: the checkpoint's limit]")
    ] = None,
    image_seed: Annotated[int, typer.Option(help="Of sizes, their order, and patches.")] = 0,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds that are counted, after one to warm up.")] = 3,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Draw latency against tokens (needs matplotlib).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Milliseconds until images are encoded, eagerly and with graphs by token budget, in turns.

    Images of mixed sizes come alone and, a few at once, together. Timed is what lies between an arrival's patches and
    its tokens: eagerly image by image, with graphs in packs. Decoding and resizing, which are the same for both, are
    left out. Then the time to first token of requests with one image each, alone on the engine. Latencies are over all
    arrivals and rounds; the least ones are of each arrival's shortest times, which other work on the machine disturbs
    least.

    Example: ostinato bench encoder demo-vl

    Example: ostinato bench encoder PATH --random-weights --encoder-graph-mode always --plot encoder.png
    """
    name_model(settings, target)
    if plot is not None:
        check_plot(plot)
    bench = EncoderBench(arrivals, _range(batch), rounds, image_seed, max_pixels)
    report = encoder(settings, bench, reporter())
    show(report, as_json, encoder_tables, LENGTHS)
    if plot is not None:
        plot_encoder(report, plot)


def encoder_tables(report: dict[str, Any]) -> list[Table]:
    return [_times(report), _packs(report), _choice(report), _capture(report["capture"])]


def _times(report: Mapping[str, Any]) -> Table:
    """Latencies of encoding, and times to first token."""
    backend = report["backend"]
    table = columns("images", "", "eager", backend, "speed", "least eager", backend, "speed")
    for name, result in (*report["results"].items(), ("first token", report["first_token"])):
        for statistic in STATISTICS:
            table.add_row(
                name if statistic == STATISTICS[0] else "",
                statistic,
                *_latency_cells(result, statistic),
                *_latency_cells(result["least"], statistic),
            )
    return table


def _latency_cells(figures: Mapping[str, Any], statistic: str) -> tuple[str, str, str]:
    eager, graph, speed = (figures[name][statistic] for name in ("eager_ms", "graph_ms", "speed"))
    return milliseconds(eager / 1e3), milliseconds(graph / 1e3), f"{speed:.2f}x"


def _packs(report: Mapping[str, Any]) -> Table:
    """How often each budget's graph, or none, served images of the counted rounds."""
    table = columns("images", "served by", "packs", "images", "tokens", "padding")
    for name, result in report["results"].items():
        counts = result["counts"]
        rows = [(f"graph of {one['budget']} tokens", one) for one in counts["budgets"]]
        rows += [(f"eager: {one['reason']}", one) for one in counts["eager"]]
        for number, (served, one) in enumerate(rows):
            cells = (f"{one[key]:,}" for key in ("packs", "items", "tokens", "padding"))
            table.add_row("" if number else name, served, *cells)
    return table


def _choice(report: Mapping[str, Any]) -> Table:
    table = columns("budget", "eager", report["backend"], "runs")
    for one in report["choice"]:
        cells = (milliseconds(one[name]) for name in ("eager_seconds", "graph_seconds"))
        table.add_row(f"{one['budget']} tokens", *cells, one["runs"])
    return table


def _capture(capture: Mapping[str, Any]) -> Table:
    table = figures_table("capture of the encoder")
    table.add_row("time", f"{capture['capture_seconds']:.2f} s, {capture['captured']} graphs")
    table.add_row("memory planned", format_bytes(capture["planned_bytes"]))
    table.add_row("memory observed", format_bytes(capture["observed_bytes"]))
    return table


def _range(text: str) -> tuple[int, int]:
    found = sizes(text, "--batch", "2,4")
    if len(found) != 2 or found[0] > found[1]:
        raise ConfigError(f"--batch {text!r} should be the least and the most images that come together, such as 2,4")
    return found[0], found[1]
