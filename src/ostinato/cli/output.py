"""Output of the commands: text as it comes, and tables."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Literal

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from ostinato.bench.report import Column, Table
from ostinato.errors import RequestError
from ostinato.files import exists, is_file, why_unwritable
from ostinato.json_io import JsonMapping
from ostinato.units import format_bytes

_ROOM = 4096
"""Bytes that must be free in a directory."""

if TYPE_CHECKING:
    from ostinato.engine.outputs import CompletionOutput, RequestOutput
    from ostinato.sampling.params import SamplingParams


def print_pieces(
    pieces: Generator[str, None, RequestOutput], asked_to_stop: Callable[[], bool] = lambda: False
) -> tuple[str, RequestOutput | None]:
    """Print text as it comes, without its leading white space.

    Returns the text unchanged, and the whole output, or None if it was stopped before the end.
    """
    text = ""
    while not asked_to_stop():
        try:
            piece = next(pieces)
        except StopIteration as end:
            print(flush=True)
            return text, end.value
        print(piece if text.strip() else piece.lstrip(), end="", flush=True)
        text += piece
    pieces.close()
    print(flush=True)
    return text, None


def note_cut(completion: CompletionOutput, params: SamplingParams) -> None:
    """Name, on stderr, the limit that ended an output, if one did."""
    if completion.finish_reason != "length":
        return
    note(f"(cut off at {completion.stop_reason or f'max_tokens ({params.max_tokens})'})")


def note(text: str) -> None:
    """Print a remark on stderr."""
    Console(stderr=True).print(Text(text, style="dim"), soft_wrap=True)


def check_room(path: Path, what: str) -> None:
    """Raise RequestError, before anything is computed, if a file cannot be written there later.

    An existing file stays.
    """
    try:
        if is_file(path):
            with path.open("r+b"):
                pass
        if is_file(path) or not exists(path):
            with TemporaryFile(dir=path.parent) as there:
                there.write(bytes(_ROOM))
        else:  # a device, whose reader ignores an empty line
            with path.open("wb") as there:
                there.write(b"\n")
    except OSError as error:
        raise RequestError(f"{what} cannot be written to {path}: {why_unwritable(path, error)}") from None


def piped_progress() -> Callable[[str, int, int], None]:
    """Return a function of (stage, done, total) that reports progress without a terminal for a bar.

    It prints a line on stderr for each stage, and for each quarter of a stage one with the remaining time at that pace.
    """
    begun: dict[str, float] = {}
    told: dict[str, int] = {}

    def show(what: str, done: int, total: int) -> None:
        if what not in begun:
            begun[what] = time.monotonic()
            if not done:
                note(what)
        quarter = 4 * done // total if total else 0
        if quarter > told.get(what, 0):
            told[what] = quarter
            passed = time.monotonic() - begun[what]
            left = f"; about {passed * (total - done) / done:.0f} s more" if done < total else ""
            note(f"{what}: {done:,} of {total:,} after {passed:.0f} s{left}")

    return show


def _size(graph: JsonMapping) -> str:
    """Return a graph's size as text; empty for steps without a graph."""
    if "size" not in graph:
        return ""
    if graph["mode"] != "full":
        return f"{graph['size']} tokens"
    per_row = graph["tokens_per_row"]
    return f"{graph['size']} rows" + (f" of {per_row} tokens" if per_row > 1 else "")


STEPS = (
    Column("mode", "mode"),
    Column("size", _size),
    *(Column(name, name, "count") for name in ("steps", "tokens", "padding")),
)
PACKS = (
    Column("encoded by", "by"),
    Column("packs", "packs", "count"),
    Column("images", "items", "count"),
    Column("tokens", "tokens", "count"),
    Column("padding", "padding", "count"),
    Column("seconds", "seconds", "{:.3f}"),
)
DRAFTS = (
    Column("position", "position"),
    *(Column(name, name, "count") for name in ("proposed", "reached", "accepted")),
    Column("acceptance", "acceptance", "{:.2f}"),
)


def print_stats(stats: JsonMapping) -> None:
    """Print the engine's counts as tables on stderr; nested ones as `outer.inner`."""
    table = figures_table("stats")
    for name, value in _flat(stats):
        table.add_row(name, f"{value:,.3f}" if isinstance(value, float) else f"{value:,}")
    console = Console(stderr=True)
    console.print(table)
    graphs = stats["graphs"]
    eager = [
        {"mode": f"eager ({reason})", "steps": steps, "tokens": graphs["eager_tokens"][reason], "padding": 0}
        for reason, steps in graphs["eager_reasons"].items()
    ]
    Table(STEPS, [*graphs["graphs"], *eager], "steps").print(console)
    console.print(_captured(graphs))
    if stats["speculation"] is not None:
        _print_speculation(stats["speculation"], console)
    if stats["encoder"] is not None:
        encoder = stats["encoder"]["graphs"]
        packs = [{**one, "by": f"graph of {one['budget']} tokens"} for one in encoder["budgets"]]
        packs += [{**one, "by": f"eager ({one['reason']})"} for one in encoder["eager"]]
        Table(PACKS, packs, "images").print(console)
        console.print(_captured(encoder))


def _print_speculation(speculation: JsonMapping, console: Console) -> None:
    """Print the accepted drafts by position, remarks, and the controller's choices.

    The choices are listed for each batch size, with reasons.
    """
    positions = [{"position": number, **each} for number, each in enumerate(speculation["positions"], start=1)]
    Table(DRAFTS, positions, f"drafts ({speculation['method']})").print(console)
    steps = " and ".join(f"{count:,} with {k}" for k, count in speculation["steps"].items())
    facts = [f"steps with decode rows: {steps} drafts"]
    if speculation["rows_without_draft"]:
        facts.append(f"{speculation['rows_without_draft']:,} rows that asked for drafts had none")
    if speculation["tokens_per_row_with_drafts"] is not None:
        facts.append(f"{speculation['tokens_per_row_with_drafts']:.2f} tokens per row with drafts")
    if speculation["graphs"] is not None and speculation["graphs"]["steps"]["eager"]:
        reasons = ", ".join(speculation["graphs"]["eager_reasons"])
        facts.append(f"{speculation['graphs']['steps']['eager']:,} steps of the drafter ran eagerly ({reasons})")
    console.print(_remark("\n".join(facts)))
    from ostinato.bench.speculative import CONTROLLER  # half of the benchmarks come with it

    Table(CONTROLLER, speculation["controller"]["batch_sizes"], "drafts by batch size").print(console)


def _captured(graphs: JsonMapping) -> Text:
    observed, planned = format_bytes(graphs["observed_bytes"]), format_bytes(graphs["planned_bytes"])
    return _remark(f"{graphs['captured']} graphs in {graphs['capture_seconds']:.1f} s; {observed}, {planned} planned")


def _remark(text: str) -> Text:
    return Text(text, style="dim italic")


def figures_table(title: str, justify: Literal["left", "right"] = "right") -> RichTable:
    """Return an empty table of names and their values."""
    table = RichTable(title=title, title_justify="left", title_style="bold", box=None, show_header=False)
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(justify=justify)
    return table


def _flat(values: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, value in values.items():
        if name in ("graphs", "speculation") or value is None:  # printed in separate tables, or absent
            continue
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
