"""`ostinato replay`: a record of an engine, run again and compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from ostinato.cli.flags import engine_options
from ostinato.cli.output import figures_table, piped_progress
from ostinato.cli.verify import EXIT_DIFFERENT, MAX_PLACES, STYLES
from ostinato.errors import ConfigError
from ostinato.files import exists
from ostinato.json_io import JsonObject

if TYPE_CHECKING:
    from ostinato.verify.record_reader import Record
    from ostinato.verify.replay import Replayed


@engine_options
def replay(
    settings: dict[str, Any],
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="As --record had it, or the folder of a run in it.")],
    until: Annotated[int | None, typer.Option(min=1, help="Stop after this step, and show its rows.")] = None,
    segment: Annotated[
        int | None, typer.Option(min=0, help="Begin with this file of the run. [default: the oldest]")
    ] = None,
    mode: Annotated[
        str | None,
        typer.Option(help="`none`: without graphs, prefix cache, drafts and steps ahead: the plain path, in batches."),
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE.json", help="Write the replay's steps as a trace for Perfetto.")
    ] = None,
    minimise: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Drop requests while the first difference stays, and record what is left here."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Run the requests of a record again, step for step, and compare.

    Batches, with their blocks, slots and checkpoints, and tokens are compared; with --deterministic in the record, and
    the same kernels here, the log-probabilities that requests asked for too, to the last bit. Flags change settings of
    the record: where the schedule is then another, only tokens are compared, and the report says so. So does a replay
    that begins with a later file of the run. A token that rounding decides is a tie. A difference ends with status 1.

    --minimise drops requests as long as an output still differs between the record's settings and those with flags, or
    between the record and this machine if there are none.

    Example: ostinato replay records

    Example: ostinato replay records --kernels reference --mode none --minimise smaller
    """
    if mode not in (None, "none"):
        raise ConfigError(f"--mode {mode} is none that there is; give --mode none, or the settings themselves")
    if mode is not None:
        plain = {"graph_mode": "none", "enable_prefix_caching": False, "state_cache_mode": "none", "overlap": "off"}
        settings = {**plain, "speculative": None, **settings}
    from ostinato.bench.profile import check_trace_path, write_trace
    from ostinato.verify.record_reader import Record
    from ostinato.verify.replay import Replay, replay_config
    from ostinato.verify.replay import minimise as minimised

    if trace is not None:
        check_trace_path(trace)
    record = Record(directory, segment)
    kept: list[str] = []
    if minimise is not None:
        if exists(minimise):
            raise ConfigError(f"--minimise {minimise}: there is such a directory already; name another one")
        kept, replayed = minimised(record, settings, minimise, piped_progress())
    else:
        replayed = Replay(record, replay_config(record, settings)).run(until)
    if trace is not None:
        write_trace(trace, trace_of(replayed))
    report = {"command": "replay", "record": str(record.folder), "kept": kept, **replayed.to_json()}
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        _print(record, replayed, kept, until, Console())
    if replayed.verdict == "different":
        raise typer.Exit(EXIT_DIFFERENT)


def trace_of(replayed: Replayed) -> JsonObject:
    """Return the steps as a trace in Chrome's format: a track of steps, and one for each output."""
    tracks: dict[str, int] = {"steps": 1}
    events: list[JsonObject] = []
    for number, step in enumerate(replayed.timeline, start=1):
        span = {"pid": 1, "ph": "X", "ts": step.begin * 1e6, "dur": step.seconds * 1e6}
        events.append({"name": f"step {number}", "tid": 1, **span, "args": {"rows": len(step.rows)}})
        for name, computed, given in step.rows:
            track = tracks.setdefault(name, len(tracks) + 1)
            kind = "prefill" if computed > 1 else "decode"
            events.append({"name": kind, "tid": track, **span, "args": {"computed": computed, "tokens": given}})
    names = [
        {"name": "thread_name", "ph": "M", "pid": 1, "tid": track, "args": {"name": name}}
        for name, track in tracks.items()
    ]
    return {"traceEvents": names + events, "displayTimeUnit": "ms"}


def _print(record: Record, replayed: Replayed, kept: list[str], until: int | None, console: Console) -> None:
    head = replayed.head
    table = figures_table("replay", justify="left")
    table.add_row("record", f"{record.folder.name}, begun {head.created}")
    table.add_row(
        "steps", f"{replayed.steps:,}, of {replayed.requests:,} requests; batches of {replayed.batches:,} equal"
    )
    table.add_row("outcome", Text(replayed.verdict.value, STYLES[replayed.verdict.value]))
    console.print(table)
    lines = [f"tokens alone are compared: {reason}" for reason in replayed.reasons]
    lines += [f"note: {note}" for note in replayed.notes]
    lines += [f"left out: request {request_id}" for request_id in replayed.left_out]
    lines += [each.text for each in replayed.differences[:MAX_PLACES]]
    if len(replayed.differences) > MAX_PLACES:
        lines.append(f"and {len(replayed.differences) - MAX_PLACES} more, which --json lists")
    if kept:
        lines.append(f"kept: {', '.join(kept)}")
    if until is not None or replayed.differences:
        lines += [f"in step {replayed.steps}: {row}" for row in replayed.last_step]
    for line in lines:
        console.print(Text(line), soft_wrap=True)
