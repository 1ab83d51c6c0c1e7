"""`ostinato doctor`: plan, answers, proof and speed of a checkpoint on one page, to attach to a report."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from ostinato._version import __version__
from ostinato.bench.report import machine_facts
from ostinato.child_process import child_environment
from ostinato.cli.flags import Model, check_model, engine_options, name_model
from ostinato.cli.output import check_room, note
from ostinato.config_fields import setting_flags
from ostinato.files import write_text
from ostinato.plan.model import ModelSpec

EXIT_FAILED = 1
WIDTH = 120
"""Columns of the page's tables."""
MAX_MINUTES = 10_000.0
"""A week, to which operating systems can count."""

QUESTIONS = (
    ("What is the capital of France?", r"\bParis\b"),
    ("What is 17 plus 25? Answer with the number.", r"\b(42|forty[- ]two)\b"),
    ("Which planet is the largest of our solar system?", r"\bJupiter\b"),
    ("What is the chemical symbol of gold?", r"\bAu\b"),
    ("What is the opposite of cold? Answer with one word.", r"\b(hot|warm)\b"),
    ("How many days has a week?", r"\b(seven|7)\b"),
    ("Wie heißt die Hauptstadt von Italien?", r"\bRom\b"),
    ("¿De qué color es la nieve?", r"\bblanc[ao]\b"),
    ("Write a Python expression for the sum of the list `xs`.", r"\bsum\(xs\)"),
    ("Which comes next: Monday, Tuesday, Wednesday, ...?", r"\bThursday\b"),
)
"""Question -> pattern of the right answer, in any case."""


class Part(NamedTuple):
    """One part of the page: a command of its own process."""

    title: str
    arguments: tuple[str, ...]
    minutes: float
    """Limit of its time."""
    show: Callable[[str], str]
    """Function from the command's output to lines of the page."""


class Outcome(NamedTuple):
    """Outcome of a part: its verdict in a word, and its lines of the page."""

    verdict: str
    text: str


@engine_options
def doctor(
    settings: dict[str, Any],
    target: Model = None,
    output: Annotated[Path, typer.Option(metavar="FILE", help="Where the page goes.")] = Path("doctor.md"),
    minutes: Annotated[
        float, typer.Option(min=0.1, max=MAX_MINUTES, help="Limit of each part, which is then ended and named.")
    ] = 20.0,
) -> None:
    """Run a checkpoint through everything once, and write what happened on one page.

    The parts are the plan, greedy answers to ten questions, `verify --quick`, and the speed of steps beside the
    memory's and the processor's floor. Each is a process of its own: one that fails is reported with its message, and
    the others still run. Read the page before you publish it: messages may name paths. Ends with status 1 if a part
    failed.

    Example: ostinato doctor demo
    """
    name_model(settings, target)
    config, spec = check_model(settings, plans=False)
    settings = {**settings, "model": config.model}
    check_room(output, "the page")
    began = time.monotonic()
    outcomes: dict[str, Outcome] = {}
    for part in make_parts(settings, minutes):
        note(f"{part.title}: ostinato {' '.join(part.arguments[:2])} ...")
        outcomes[part.title] = run_part(part)
        print(f"{part.title}: {outcomes[part.title].verdict}", flush=True)
        # After every part, so that the page has what was done if a later part takes the machine down.
        write_text(output, _page(settings, spec, outcomes, time.monotonic() - began), "the page")
    print(f"the page is {output}")
    if any(outcome.verdict.startswith("failed") for outcome in outcomes.values()):
        raise typer.Exit(EXIT_FAILED)


def make_parts(settings: dict[str, Any], minutes: float) -> list[Part]:
    """Return the parts for a model with these settings; each may take `minutes`."""
    model = str(settings["model"])
    flags = _flags(settings)
    questions = [question for question, _ in QUESTIONS]
    greedy = ("--temperature", "0", "--max-tokens", "96", "--json")
    return [
        Part("plan", ("plan", model, *flags), minutes, _as_code),
        Part("answers", ("generate", "--model", model, *questions, *greedy, *flags), minutes, show_answers),
        Part("verify", ("verify", model, "--quick", *flags), minutes, _as_code),
        Part("speed", ("bench", "profile", model, "--batch-sizes", "1,8", "--rounds", "5", *flags), minutes, _as_code),
    ]


def run_part(part: Part) -> Outcome:
    """Run a part in its process, and return its outcome."""
    # Bytes: the questions have letters that a locale such as C cannot encode.
    arguments = [argument.encode("utf-8", "surrogateescape") for argument in part.arguments]
    command: list[str | bytes] = [sys.executable, "-m", "ostinato", *arguments]
    environment = {"COLUMNS": str(WIDTH), "NO_COLOR": "1", "PYTHONUTF8": "1"}
    began = time.monotonic()
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            check=False,
            timeout=part.minutes * 60,
            env={**child_environment(), **environment},
        )
    except subprocess.TimeoutExpired as error:
        printed = error.stdout or b""  # bytes, whatever the encoding
        text = printed if isinstance(printed, str) else printed.decode("utf-8", "replace")
        return Outcome(f"failed: it took more than --minutes {part.minutes:g}", _as_code(text[-6000:]) if text else "")
    seconds = time.monotonic() - began
    if done.returncode:
        said = (done.stdout.strip() + "\n" + done.stderr.strip()).strip()
        return Outcome(f"failed with status {done.returncode} after {seconds:.0f} s", _as_code(said[-6000:]))
    try:
        return Outcome(f"done in {seconds:.0f} s", part.show(done.stdout))
    except (ValueError, LookupError, TypeError):
        return Outcome("failed: its output cannot be read", _as_code(done.stdout[-6000:]))


def show_answers(output: str) -> str:
    """Return the answers as a table, from the JSON of `ostinato generate`, with the number of those that are right."""
    entries = json.loads(output)
    rows, right = [], 0
    for (question, pattern), entry in zip(QUESTIONS, entries, strict=True):
        text = " ".join(str(entry["text"]).split())
        is_right = re.search(pattern, text, re.IGNORECASE) is not None
        right += is_right
        shown = text.replace("|", "\\|").replace("`", "'")
        rows.append(f"| {question} | {shown[:200]} | {'yes' if is_right else 'no'} | {entry['finish_reason']} |")
    head = "| question | answer | has the right word | end |\n|---|---|---|---|\n"
    return f"{right} of {len(QUESTIONS)} answers have the right word.\n\n{head}" + "\n".join(rows)


def _flags(settings: dict[str, Any]) -> list[str]:
    """Return the settings but the model as flags."""
    return setting_flags({name: value for name, value in settings.items() if name != "model"})


def _as_code(text: str) -> str:
    fenced = "\n".join(line.rstrip() for line in text.rstrip().replace("```", "~~~").splitlines())
    return f"```\n{fenced}\n```"


def _page(settings: dict[str, Any], spec: ModelSpec, outcomes: dict[str, Outcome], seconds: float) -> str:
    """Return the page in Markdown."""
    given = " ".join(_flags(settings))
    machine = ", ".join(f"{name} {value}" for name, value in machine_facts().items())
    lines = [
        f"# ostinato doctor {Path(str(settings['model'])).name} {given}".rstrip(),
        "",
        f"- model: {spec.architecture}, {spec.num_parameters / 1e6:,.1f} M parameters, {len(spec.layers)} layers",
        f"- machine: {machine}",
        f"- date: {datetime.now(UTC):%Y-%m-%d %H:%M} UTC, {seconds:.0f} s, ostinato {__version__}",
        *(f"- {title}: {outcome.verdict}" for title, outcome in outcomes.items()),
    ]
    for title, outcome in outcomes.items():
        lines += ["", f"## {title}", "", outcome.text or outcome.verdict]
    return "\n".join(lines) + "\n"
