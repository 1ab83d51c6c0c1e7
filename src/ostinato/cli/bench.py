"""`ostinato bench`: how fast a model runs on this machine."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ostinato.bench.compare import PEERS, RATES, compare
from ostinato.bench.latency import latency
from ostinato.bench.startup import startup
from ostinato.bench.throughput import throughput
from ostinato.bench.workload import Workload
from ostinato.cli.options import engine_options, name_model
from ostinato.cli.output import figures_table
from ostinato.errors import ConfigError
from ostinato.plan.units import format_bytes

app = typer.Typer(
    help="Measure throughput, latency or start-up, on a checkpoint or on random weights.\n\n"
    "Example: ostinato bench latency demo --batch-sizes 1,8",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Model = Annotated[str | None, typer.Argument(metavar="MODEL", help="As --model.")]
BatchSizes = Annotated[
    str,
    typer.Option("--batch-sizes", "--batch-size", "--num-prompts", metavar="N[,N...]", help="Requests at once."),
]
PromptLen = Annotated[int, typer.Option(min=1, help="Random tokens of each prompt.")]
OutputLen = Annotated[int, typer.Option(min=1, help="Tokens generated for each request.")]
Rounds = Annotated[int, typer.Option(min=1, help="Rounds that are counted, after one to warm up.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the report as JSON.")]


def throughput_command(
    settings: dict[str, Any],
    target: Model = None,
    batch_sizes: BatchSizes = "32",
    prompt_len: PromptLen = 128,
    output_len: OutputLen = 64,
    rounds: Rounds = 3,
    peer: Annotated[
        str | None,
        typer.Option("--compare", metavar="|".join(PEERS), help="Another engine to run in turns."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Tokens per second of a batch whose requests all come at once.

    Prefill and decode are told apart by the moment when every request has its first token. The floor is the
    time of a decode step that does nothing but move the bytes that it must (weights once; states,
    keys and values of every row) at the memory's bandwidth, which simple loops measure in the same run.

    Example: ostinato bench throughput benchmarks/models/nemotron-h-300m --random-weights --batch-sizes 1,32
    """
    name_model(settings, target)
    workload = Workload(prompt_len, output_len, _sizes(batch_sizes), rounds)
    if peer is None:
        _show(throughput(settings, workload, _report()), as_json, _throughput_tables)
    else:
        _show(compare(settings, workload, peer, _report()), as_json, _compare_tables)


def latency_command(
    settings: dict[str, Any],
    target: Model = None,
    batch_sizes: BatchSizes = "1,8,32",
    prompt_len: PromptLen = 128,
    output_len: OutputLen = 64,
    rounds: Rounds = 3,
    as_json: AsJson = False,
) -> None:
    """Seconds to a request's first token and between its tokens, alone and in batches that come at once.

    Example: ostinato bench latency demo --batch-sizes 1,8
    """
    name_model(settings, target)
    workload = Workload(prompt_len, output_len, _sizes(batch_sizes), rounds)
    _show(latency(settings, workload, _report()), as_json, _latency_tables)


def startup_command(
    settings: dict[str, Any],
    target: Model = None,
    prompt_len: PromptLen = 128,
    rounds: Annotated[int, typer.Option(min=1, help="How many processes are started.")] = 3,
    as_json: AsJson = False,
) -> None:
    """Seconds from the start of a fresh process to the first token of a first request.

    Example: ostinato bench startup demo --rounds 5
    """
    name_model(settings, target)
    workload = Workload(prompt_len, output_len=1, batch_sizes=(1,), rounds=rounds)
    _show(startup(settings, workload, _report()), as_json, _startup_tables)


app.command("throughput")(engine_options(throughput_command))
app.command("latency")(engine_options(latency_command))
app.command("startup")(engine_options(startup_command))


def _sizes(text: str) -> tuple[int, ...]:
    try:
        sizes = tuple(int(part) for part in text.split(","))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise ConfigError(f"--batch-sizes {text!r} should be whole numbers of at least 1, such as 1,8,32")
    return sizes


def _report() -> Callable[[str], None]:
    """Says on a terminal what is being done."""
    if not sys.stderr.isatty():
        return lambda _: None
    console = Console(stderr=True)
    return lambda text: console.print(f"[dim]{text}[/dim]", highlight=False)


def _show(report: dict[str, Any], as_json: bool, tables: Callable[[dict[str, Any]], list[Table]]) -> None:
    if as_json:
        print(json.dumps(report, indent=2))
        return
    console = Console()
    model, machine, settings = report["model"], report["machine"], report["settings"]
    facts = figures_table(report["command"], justify="left")
    size = f"{model['architecture']}, {model['parameters'] / 1e6:,.0f} M"
    facts.add_row("model", f"{model['name']} ({size}{', random weights' if model['random_weights'] else ''})")
    facts.add_row("machine", f"{machine['cpu']}, {machine['threads']} threads, torch {machine['torch']}")
    lengths = f"{settings['prompt_len']} prompt tokens, {settings['output_len']} new"
    facts.add_row("run", f"{settings['device']}, {settings['dtype']}, {lengths}, {settings['rounds']} rounds")
    if "read_bytes_per_second" in machine:
        read, copy = machine["read_bytes_per_second"] / 1e9, machine["copy_bytes_per_second"] / 1e9
        facts.add_row("memory", f"read {read:.1f} GB/s, copy {copy:.1f} GB/s")
    for each in (facts, *tables(report)):
        console.print(each)


def _throughput_tables(report: dict[str, Any]) -> list[Table]:
    rates = _columns("batch", "tokens/s", "median", "min", "max")
    steps = _columns("batch", "decode steps", "p50", "p99", "floor", "reached")
    for result in report["results"]:
        for rate in RATES:
            rates.add_row(str(result["batch_size"]), _name(rate), *_spread(result[rate]))
        seconds, floor = result["decode_step_seconds"], result["floor"]
        steps.add_row(
            str(result["batch_size"]),
            str(result["decode_steps"]),
            *(_milliseconds(seconds and seconds[name]) for name in ("p50", "p99")),
            _milliseconds(floor and floor["step_seconds"]),
            "-" if floor is None else f"{floor['fraction_reached']:.0%}",
        )
    return [rates, steps]


def _compare_tables(report: dict[str, Any]) -> list[Table]:
    peer = report["compare"]["peer"]
    table = _columns("batch", "tokens/s", "engine", "median", "min", "max", "ratio")
    for result in report["results"]:
        for rate in RATES:
            ratio = result["ratio"][rate]
            shown = "-" if ratio is None else f"{ratio:.2f}"
            table.add_row(str(result["batch_size"]), _name(rate), "ostinato", *_spread(result["ostinato"][rate]), shown)
            table.add_row("", "", peer, *_spread(result[peer][rate]), "")
    return [table]


def _latency_tables(report: dict[str, Any]) -> list[Table]:
    table = _columns("batch", "first token p50", "p99", "between tokens p50", "p99")
    for result in report["results"]:
        cells = []
        for figures in (result["time_to_first_token"], result["inter_token_latency"]):
            cells += [_milliseconds(figures and figures[name]) for name in ("p50", "p99")]
        table.add_row(str(result["batch_size"]), *cells)
    return [table]


def _startup_tables(report: dict[str, Any]) -> list[Table]:
    [result] = report["results"]
    table = _columns("seconds", "median", "min", "max")
    for phase, spread in result["seconds"].items():
        table.add_row(phase, *(f"{spread[name]:.2f}" for name in ("median", "min", "max")))
    table.add_row("peak memory", format_bytes(result["peak_memory_bytes"]))
    return [table]


def _columns(first: str, *others: str) -> Table:
    table = Table(box=None, header_style="bold")
    table.add_column(first, style="cyan")
    for name in others:
        table.add_column(name, justify="right")
    return table


def _name(rate: str) -> str:
    return rate.removesuffix("_tokens_per_second")


def _spread(spread: dict[str, float] | None) -> list[str]:
    return ["-"] * 3 if spread is None else [f"{spread[name]:,.0f}" for name in ("median", "min", "max")]


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.1f} ms"
