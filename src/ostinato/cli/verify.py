"""`ostinato verify`: a check that every fast path of a model gives the tokens of the plain one."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ostinato.cli.options import Model, engine_options, name_model
from ostinato.cli.output import note, piped_progress
from ostinato.cli.requests import read_prompts
from ostinato.cli.verify_tables import print_report
from ostinato.errors import ConfigError

EXIT_DIFFERENT = 1


@engine_options
def verify(
    settings: dict[str, Any],
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
        str | None,
        typer.Option(metavar="PATH", help="A draft model's checkpoint (the model itself drafts)."),
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
