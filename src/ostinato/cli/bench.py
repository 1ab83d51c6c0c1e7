"""`ostinato bench`: how fast a model runs on this machine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer
from rich.console import Console

from ostinato.bench.compare import PEERS, compare
from ostinato.bench.latency import latency
from ostinato.bench.startup import startup
from ostinato.bench.throughput import throughput
from ostinato.bench.workload import Workload
from ostinato.cli.bench_tables import compare_tables, latency_tables, show, startup_tables, throughput_tables
from ostinato.cli.options import engine_options, name_model
from ostinato.errors import ConfigError

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
        show(throughput(settings, workload, _report()), as_json, throughput_tables)
    else:
        show(compare(settings, workload, peer, _report()), as_json, compare_tables)


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
    show(latency(settings, workload, _report()), as_json, latency_tables)


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
    show(startup(settings, workload, _report()), as_json, startup_tables)


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
