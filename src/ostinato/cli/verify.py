"""`ostinato verify`: a check that every fast path of a model gives the tokens of the plain one, and its report."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ostinato.cli.flags import Model, check_model, engine_options, name_model, read_prompts
from ostinato.cli.output import figures_table, note, piped_progress
from ostinato.errors import ConfigError
from ostinato.json_io import JsonMapping, JsonObject
from ostinato.models.checkpoint import resolve_model_dir

STYLES = {"equal": "green", "tie": "yellow", "different": "bold red", "error": "bold red"}
WIDEST = 200
"""Largest width of the table of cells, in columns."""
MAX_PLACES = 3
"""Largest number of divergences that are printed for one cell."""
SHORT_GRAPH_MODES = {"full_decode_only": "full", "full_and_piecewise": "full+piecewise"}


def print_report(report: Mapping[str, object], console: Console) -> None:
    """Print the setup, the cells, their missing proofs, and each divergence."""
    console.print(_facts(report))
    cells = _cells(report)
    # Do not limit the width: truncated columns are useless.
    console.width = max(console.width, console.measure(cells, options=console.options.update(width=WIDEST)).maximum)
    console.print(cells)
    for line in _remarks(report):
        console.print(line, soft_wrap=True)
    console.print(_summary(report), soft_wrap=True)


def _facts(report: JsonMapping) -> Table:
    model, settings, extent = report["model"], report["settings"], report["extent"]
    table = figures_table("verify", justify="left")
    size = f"{model['architecture']}, {model['parameters'] / 1e6:,.1f} M"
    table.add_row("model", f"{model['name']} ({size}{', random weights' if model['random_weights'] else ''})")
    run = f"{settings['device']}, {settings['dtype']}, blocks of {settings['block_size']} tokens, checkpoints every "
    table.add_row("run", f"{run}{settings['state_block_size']}, {settings['max_num_seqs']} rows")
    lengths = [length for prompt in report["prompts"] for length in prompt["tokens"].values()]
    asked = f"{len(report['prompts'])} of {min(lengths)} to {max(lengths)} tokens, each greedy and sampled"
    table.add_row("prompts", f"{asked}, up to {settings['max_tokens']} new")
    plain = Text.assemble(_verdict(report["plain"]["verdict"]), " to the whole texts, each computed at once")
    table.add_row("plain path", plain)
    if report["states"]["dtypes"]:
        words = (
            f"{name}, {each['others']:,} of {each['values']:,} others"
            for name, each in report["states"]["dtypes"].items()
        )
        states = Text.assemble(_verdict(report["states"]["verdict"]), f" to the nearest values of {'; '.join(words)}")
        table.add_row("16-bit states", states)
    ways = f"{extent['ways']} of {extent['possible_ways']} ways, each with a cold and then a warm cache"
    table.add_row("cells", ways)
    return table


def _cells(report: JsonMapping) -> Table:
    table = Table(box=None, header_style="bold")
    table.add_column("cell", style="cyan")
    for name in ("state", "drafts", "graphs", "step", "overlap", "preempt", "cache", "greedy", "sampled"):
        table.add_column(name, no_wrap=True)
    for name in ("accepted", "cached", "preempted", "full/piecewise/eager"):
        table.add_column(name, justify="right", no_wrap=True)
    for number, cell in enumerate(report["cells"], start=1):
        table.add_row(
            str(number),
            cell["state_cache_mode"],
            _short_speculation(cell["speculative"]),
            SHORT_GRAPH_MODES.get(cell["graph_mode"], cell["graph_mode"]),
            str(cell["max_num_batched_tokens"]),
            cell["overlap"],
            "yes" if cell["preemption"] else "no",
            cell["cache"],
            *(_verdict(cell[kind]) for kind in ("greedy", "sampled")),
            *_counts(cell),
        )
    return table


def _counts(cell: JsonMapping) -> Iterator[str]:
    counts = cell["counts"]
    if counts is None:
        yield from ("-", "-", "-", "-")
        return
    has_drafts = cell["speculative"] != "none"
    yield f"{counts['drafts_accepted']} of {counts['drafts_proposed']}" if has_drafts else "-"
    yield f"{counts['cached_tokens']:,}"
    yield f"{counts['preemptions']:,}"
    yield "/".join(str(counts[f"{mode}_steps"]) for mode in ("full", "piecewise", "eager"))


def _remarks(report: JsonMapping) -> Iterator[Text]:
    """Yield one line for each divergence, and for each missing proof of a cell."""
    for message in report["left_out"]:
        yield Text(f"left out: {message}", style="dim")
    numbered = list(enumerate(report["cells"], start=1))
    notes = dict.fromkeys(note for _, cell in numbered for note in cell["notes"])
    for remark in notes:
        cells = ", ".join(str(number) for number, cell in numbered if remark in cell["notes"])
        yield Text(f"no proof in cells {cells}: {remark}", style="yellow")
    yield from _places("plain path", report["plain"]["found"], report)
    for number, cell in numbered:
        if cell["error"] is not None:
            yield Text(f"cell {number}: {cell['error']}", style=STYLES["error"])
        yield from _places(f"cell {number}", cell["found"], report)


def _places(where: str, found: Sequence[JsonMapping], report: JsonMapping) -> Iterator[Text]:
    """Yield the first divergences, differences before ties."""
    ordered = sorted(found, key=lambda each: each["is_tie"])
    for each in ordered[:MAX_PLACES]:
        yield _place(where, each, report)
    if len(found) > MAX_PLACES:
        yield Text(f"{where}: and {len(found) - MAX_PLACES} more, which --json lists")


def _place(where: str, found: JsonMapping, report: JsonMapping) -> Text:
    """Return a divergence with its scores."""
    prompt, verdict = report["prompts"][found["prompt"]], "tie" if found["is_tie"] else "different"
    what = "logits" if found["kind"] == "greedy" else "logits with noise"
    best = ", ".join(f"{token}: {score:.6g}" for token, score in found["best"])
    came = "the output's end" if found["actual"] is None else f"{found['actual']}: {found['came_score']:.6g}"
    expected = "the output's end" if found["expected"] is None else str(found["expected"])
    asked = f"{found['kind']}, prompt {found['prompt']} ({prompt['about']}), token {found['place']}"
    scores = f"best two {what} {best}; a gap of {found['tolerance']:.2g} is a tie"
    return Text.assemble(
        (f"{where}: {verdict}", STYLES[verdict]), f", {asked}: expected {expected}, came {came}; {scores}"
    )


def _summary(report: JsonMapping) -> Text:
    summary = report["summary"]
    counts = [(f"{summary[name]} {name}", STYLES[name]) for name in STYLES if summary[name]]
    parts: list[Any] = [f"{summary['cells']} cells: "]
    for number, part in enumerate(counts):
        parts += [", ", part] if number else [part]
    incomplete = sum(bool(cell["notes"]) for cell in report["cells"])
    if incomplete:
        parts.append((f" ({incomplete} without proof of something, see above)", "yellow"))
    return Text.assemble(*parts, f"; {summary['seconds']:.0f} s")


def _short_speculation(speculative: str | Mapping[str, object]) -> str:
    """Return the speculation without a path, which is the same in all rows."""
    if isinstance(speculative, str):
        method, *rest = speculative.split(":")
        return f"{method}:{rest[-1]}" if rest else method
    return f"{speculative['method']}:{speculative['num_speculative_tokens']}"


def _verdict(verdict: str) -> Text:
    return Text(verdict, style=STYLES[verdict])


EXIT_DIFFERENT = 1


@engine_options
def verify(
    settings: JsonObject,
    target: Model = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer cells: of state mode and speculation all pairs, of others some.")
    ] = False,
    full: Annotated[bool, typer.Option("--full", help="Every cell there is.")] = False,
    prompts: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Prompts, one per line, in place of word problems or random tokens."),
    ] = None,
    num_prompts: Annotated[
        int, typer.Option(min=0, help="Word problems, or random prompts, beside those of chosen lengths.")
    ] = 3,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an output.")] = 24,
    draft: Annotated[
        str | None, typer.Option(metavar="PATH", help="A draft model's checkpoint (the model itself drafts).")
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, help="Draws the prompts, the noise of sampled requests and random weights.")
    ] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Compare every fast path of a model with the plain one, token by token.

    The plain path runs eagerly, without prefix cache and speculation, each prompt whole and alone. The cells of the
    matrix are: state cache mode x speculation x graph mode x tokens per step x overlap x preemption x cold or warm
    cache. By default a covering set of them is run, in which every pair of values occurs. Each cell has greedy requests
    and sampled ones. Runs in float32 unless --dtype is given; a setting that is an axis, if given, fixes it. Drafts are
    made right and wrong on purpose.

    It takes half a minute or more on the embedded model and two cores, and minutes on larger ones; --quick takes half.

    A cell is equal; or a tie, if it differs only where the plain path's best two tokens are within rounding of each
    other; or different, which ends with status 1.

    Example: ostinato verify demo --quick
    """
    if quick and full:
        raise ConfigError("--quick asks for fewer cells and --full for all; give one of them")
    name_model(settings, target)
    check_model(settings, plans=False)
    if draft is not None:
        resolve_model_dir(draft)
    lines = () if prompts is None else read_prompts(prompts)
    from ostinato.verify.verify import Trial, has_passed
    from ostinato.verify.verify import verify as run

    trial = Trial(
        extent="quick" if quick else "full" if full else "pairs",
        num_prompts=num_prompts,
        max_tokens=max_tokens,
        seed=seed,
        lines=lines,
        draft=draft,
    )
    with _progress() as progress:
        report = run(settings | {"seed": seed}, trial, progress)
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        print_report(report, Console())
    if not has_passed(report):
        raise typer.Exit(EXIT_DIFFERENT)


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """Show a bar of finished cells on stderr, or lines if stderr is no terminal.

    Yields a function of (stage, done, total).
    """
    if not sys.stderr.isatty():
        note("planning")
        yield piped_progress()
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("planning", total=None)
        yield lambda what, done, total: progress.update(task, description=what, completed=done, total=total)
