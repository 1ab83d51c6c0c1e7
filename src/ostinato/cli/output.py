"""What the commands print: text as it comes, and tables."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ostinato.units import format_bytes

if TYPE_CHECKING:
    from ostinato.engine.outputs import CompletionOutput, RequestOutput
    from ostinato.sample.params import SamplingParams


def print_pieces(
    pieces: Generator[str, None, RequestOutput], asked_to_stop: Callable[[], bool] = lambda: False
) -> tuple[str, RequestOutput | None]:
    """Prints text as it comes, without white space before it; returns it as it came, and the whole output, or None
    if it was stopped before."""
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
    """Names, on stderr, the limit that ended an output, if one did."""
    if completion.finish_reason != "length":
        return
    limit = "max_model_len"
    if params.max_tokens is not None and len(completion.token_ids) >= params.max_tokens:
        limit = f"max_tokens ({params.max_tokens})"
    note(f"(cut off at {limit})")


def note(text: str) -> None:
    """A remark on stderr."""
    Console(stderr=True).print(Text(text, style="dim"), soft_wrap=True)


def print_stats(stats: Mapping[str, Any]) -> None:
    """The engine's counts as a table on stderr; nested ones as `outer.inner`."""
    table = figures_table("stats")
    for name, value in _flat(stats):
        table.add_row(name, f"{value:,.3f}" if isinstance(value, float) else f"{value:,}")
    console = Console(stderr=True)
    console.print(table)
    console.print(steps_table(stats["graphs"]))
    if stats["speculation"] is not None:
        for each in speculation_tables(stats["speculation"]):
            console.print(each)
    if stats["encoder"] is not None:
        console.print(encoder_table(stats["encoder"]["graphs"]))


def steps_table(graphs: Mapping[str, Any]) -> Table:
    """How the steps ran: by graph with their padding, and the eager ones by reason."""
    table = Table(title="steps", title_justify="left", title_style="bold", box=None)
    for name in ("mode", "size", "steps", "tokens", "padding"):
        table.add_column(name, justify="left" if name == "mode" else "right", style="cyan" if name == "mode" else None)
    for graph in graphs["graphs"]:
        size = f"{graph['size']} tokens"
        if graph["mode"] == "full":
            per_row = graph["tokens_per_row"]
            size = f"{graph['size']} rows" + (f" of {per_row} tokens" if per_row > 1 else "")
        table.add_row(graph["mode"], size, f"{graph['steps']:,}", f"{graph['tokens']:,}", f"{graph['padding']:,}")
    for reason, steps in graphs["eager_reasons"].items():
        table.add_row(f"eager ({reason})", "", f"{steps:,}", f"{graphs['eager_tokens'][reason]:,}", "0")
    observed, planned = format_bytes(graphs["observed_bytes"]), format_bytes(graphs["planned_bytes"])
    table.caption = f"{graphs['captured']} graphs in {graphs['capture_seconds']:.1f} s; {observed}, {planned} planned"
    table.caption_justify = "left"
    return table


def encoder_table(encoder: Mapping[str, Any]) -> Table:
    """How images were encoded: by the graph of which budget with its padding, and the eager ones by reason."""
    table = Table(title="images", title_justify="left", title_style="bold", box=None)
    for name in ("encoded by", "packs", "images", "tokens", "padding", "seconds"):
        first = name == "encoded by"
        table.add_column(name, justify="left" if first else "right", style="cyan" if first else None)
    packs = [(f"graph of {one['budget']} tokens", one) for one in encoder["budgets"]]
    packs += [(f"eager ({one['reason']})", one) for one in encoder["eager"]]
    for name, one in packs:
        counts = (f"{one[key]:,}" for key in ("packs", "items", "tokens", "padding"))
        table.add_row(name, *counts, f"{one['seconds']:.3f}")
    observed, planned = format_bytes(encoder["observed_bytes"]), format_bytes(encoder["planned_bytes"])
    table.caption = f"{encoder['captured']} graphs in {encoder['capture_seconds']:.1f} s; {observed}, {planned} planned"
    table.caption_justify = "left"
    return table


def speculation_tables(speculation: Mapping[str, Any]) -> list[Table | Text]:
    """How many drafts were accepted, by position, and a remark on it; and for each batch size what the controller
    chose, and why."""
    drafts = Table(title=f"drafts ({speculation['method']})", title_justify="left", title_style="bold", box=None)
    for name in ("position", "proposed", "reached", "accepted", "acceptance"):
        drafts.add_column(name, justify="right")
    for number, each in enumerate(speculation["positions"], start=1):
        counts = (f"{each[name]:,}" for name in ("proposed", "reached", "accepted"))
        share = each["acceptance"]
        drafts.add_row(str(number), *counts, "-" if share is None else f"{share:.2f}")
    steps = " and ".join(f"{count:,} with {k}" for k, count in speculation["steps"].items())
    facts = [f"steps with decode rows: {steps} drafts"]
    if speculation["rows_without_draft"]:
        facts.append(f"{speculation['rows_without_draft']:,} rows that asked for drafts had none")
    if speculation["tokens_per_row_with_drafts"] is not None:
        facts.append(f"{speculation['tokens_per_row_with_drafts']:.2f} tokens per row with drafts")
    if speculation["graphs"] is not None and speculation["graphs"]["steps"]["eager"]:
        reasons = ", ".join(speculation["graphs"]["eager_reasons"])
        facts.append(f"{speculation['graphs']['steps']['eager']:,} steps of the drafter ran eagerly ({reasons})")
    # Not the table's caption, which would be broken at the table's few columns.
    return [drafts, Text("\n".join(facts), style="dim italic"), controller_table(speculation["controller"])]


def controller_table(controller: Mapping[str, Any]) -> Table:
    """The controller's choices, and their grounds."""
    table = Table(title="drafts by batch size", title_justify="left", title_style="bold", box=None)
    for name in ("rows", "choice", "ground"):
        table.add_column(name, justify="left" if name == "ground" else "right")
    for each in controller["batch_sizes"]:
        fewest, most = each["rows"]
        rows = str(most) if fewest == most else f"{fewest} to {most}"
        table.add_row(rows, f"{each['choice']} drafts", each["ground"])
    return table


def figures_table(title: str, justify: Literal["left", "right"] = "right") -> Table:
    """A table of names and what belongs to them."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None, show_header=False)
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(justify=justify)
    return table


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if name in ("graphs", "speculation") or value is None:  # in tables of their own, or not there
            continue
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
