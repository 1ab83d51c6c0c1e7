"""Common parts of the commands of `ostinato bench`: declaration, shared options and printed reports."""

from __future__ import annotations

import inspect
import shlex
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any

import typer
from rich.console import Console

from ostinato.bench.report import BenchReport, ProgressCallback
from ostinato.cli.flags import HelpAll, Model, check_model, engine_options, name_model
from ostinato.cli.help import HelpCommand
from ostinato.cli.output import note
from ostinato.errors import ConfigError

USUAL = "(a minute or two on the embedded model, more on larger ones)"
"""Usual duration of a benchmark."""
Measure = Callable[[ProgressCallback], BenchReport]
BatchSizes = Annotated[
    str, typer.Option("--batch-sizes", "--batch-size", "--num-prompts", metavar="N[,N...]", help="Requests at once.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the report as JSON.")]


def add_command(app: typer.Typer, name: str, command: Callable[..., Measure], *, has_engine: bool = True) -> None:
    """Add `command` to `app`: it reads its options, measures and prints a report.

    `command` returns the function that measures. The command has `--json`. With `has_engine` its `settings`
    receive MODEL and the flags of the engine.
    """

    def run(**arguments: Any) -> None:
        invocation, as_json = arguments.pop("invocation"), arguments.pop("as_json")
        arguments.pop("help_all", None)  # its callback has run already
        if has_engine:
            name_model(arguments["settings"], arguments.pop("target"))
        measure = command(**arguments)
        if has_engine:
            check_model(arguments["settings"], plans=False)
        measured = measure(_say())
        report = replace(measured, data={**measured.data, "command_line": command_line(invocation)})
        if as_json:
            print(report.to_json())
        else:
            report.print(Console())

    own = list(inspect.signature(command, eval_str=True).parameters.values())
    own.append(_parameter("as_json", AsJson, False))
    own.append(_parameter("invocation", typer.Context, inspect.Parameter.empty))
    if has_engine:
        own.append(_parameter("target", Model, None))
    else:
        own.append(_parameter("help_all", HelpAll, False))
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own]
    )
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in own}
    app.command(name, cls=HelpCommand)(engine_options(run) if has_engine else run)


def command_line(context: typer.Context) -> str:
    """Return the command line as it was typed, without the API key."""
    words: list[str] = []
    for parameter in context.command.params:
        source = context.get_parameter_source(str(parameter.name))
        if source is None or source.name != "COMMANDLINE" or parameter.name == "api_key":
            continue
        value = context.params[str(parameter.name)]
        if parameter.param_type_name == "argument":
            words.insert(0, str(value))
        elif isinstance(value, bool):
            words.append((parameter.opts if value else parameter.secondary_opts)[0])
        else:
            words += [parameter.opts[0], str(value)]
    return shlex.join([*context.command_path.split(), *words])


def sizes(text: str, option: str = "--batch-sizes", example: str = "1,8,32") -> tuple[int, ...]:
    """Return whole numbers of at least 1, separated by commas; anything else is a ConfigError that names `option`."""
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise ConfigError(f"{option} {text!r} should be whole numbers of at least 1, such as {example}")
    return found


def names(option: str, text: str, known: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names in `text`, separated by commas, each once. ConfigError for one that is not in `known`."""
    found = tuple(part.strip() for part in text.split(","))
    unknown = [name for name in found if name not in known]
    if unknown:
        raise ConfigError(f"{option} {text!r} has {unknown[0]!r}; the known ones are {', '.join(known)}")
    return tuple(dict.fromkeys(found))


def _say() -> ProgressCallback:
    """Note the usual duration on stderr, and return the function that reports what is being measured."""
    note(USUAL)
    return note


def _parameter(name: str, annotation: object, default: object) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)
