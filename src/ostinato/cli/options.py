"""Engine settings as command-line flags: one for each field of EngineConfig."""

from __future__ import annotations

import inspect
import json
import shlex
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from pydantic.fields import FieldInfo

from ostinato.cli.command import show_all
from ostinato.config import BYTE_SETTINGS, EngineConfig
from ostinato.errors import ConfigError
from ostinato.setting_names import ALIASES
from ostinato.units import exact_bytes

SIZE = "SIZE"
"""Placeholder that help shows for bytes, which may be written as 16MiB."""
AS_TEXT = {
    **dict.fromkeys(BYTE_SETTINGS, SIZE),
    "capture_sizes": "N,N,...",
    "capture_rows": "N,N,...",
    "encoder_token_budgets": "N,N,...",
    "speculative": "METHOD:K",
}
"""Settings that EngineConfig reads from a text -> placeholder in help."""


def _read_config_file(ctx: typer.Context, path: Path | None) -> None:
    """Read the file of `--config`: its callback."""
    if path is not None:
        from ostinato.cli.config_file import read_config_file

        read_config_file(ctx, path)


ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE.yaml",
        is_eager=True,
        callback=_read_config_file,
        help="A file of `name: value` lines; flags go before it.",
    ),
]
Model = Annotated[str | None, typer.Argument(metavar="MODEL", help="As --model.")]
"""A command's positional model; see `name_model`."""
HelpAll = Annotated[
    bool,
    typer.Option(
        "--help-all", is_eager=True, callback=show_all, help="Show every flag in full and exit.", show_default=False
    ),
]


def engine_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command a flag for every engine setting, and hidden flags for its other names.

    The command takes `settings: dict[str, Any]`, which receives the given flags, ready for `EngineConfig(**settings)`.
    If the command has a parameter with a setting's name, that parameter is kept.

        @engine_options
        def generate(settings: dict[str, Any], prompt: str) -> None: ...
    """
    return with_flags(command, "settings", _flags(), reads_file=True)


def with_flags(
    command: Callable[..., None],
    collector: str,
    flags: Iterable[inspect.Parameter],
    read: Callable[[dict[str, Any]], dict[str, Any]] = dict,
    *,
    reads_file: bool = False,
) -> Callable[..., None]:
    """Return `command` with more flags; its parameter `collector` receives `read` of the given ones.

    Flags default to None, which means not given. If the command has a parameter with a flag's name, that parameter is
    kept. With `reads_file` the command also has `--config`, for flags of any kind, and `--help-all`.
    """
    parameters = inspect.signature(command, eval_str=True).parameters
    own = [parameter for parameter in parameters.values() if parameter.name != collector]
    added = [flag for flag in flags if flag.name not in parameters]

    def with_collected(**arguments: Any) -> None:
        if reads_file:
            del arguments["config_file"], arguments["help_all"]  # their callbacks have run already
        values = {flag.name: arguments.pop(flag.name) for flag in added}
        given = {name: value for name, value in values.items() if value is not None}
        command(**{collector: read(given)}, **arguments)

    of_all = [*own, *added]
    if reads_file:
        of_all += [_parameter("config_file", ConfigFile, None), _parameter("help_all", HelpAll, False)]
    every = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in of_all]
    with_collected.__name__, with_collected.__doc__ = command.__name__, command.__doc__
    with_collected.__signature__ = inspect.Signature(every)  # type: ignore[attr-defined]
    with_collected.__annotations__ = {parameter.name: parameter.annotation for parameter in every}
    return with_collected


def name_model(settings: dict[str, Any], target: str | None) -> None:
    """Set the model to `target`, a command's positional MODEL, if it was given.

    ConfigError if `--model` is given too.
    """
    if target is None:
        return
    if "model" in settings:
        raise ConfigError(f"the model is given twice: {target!r} and --model {settings['model']!r}")
    settings["model"] = target


def setting_flag(
    name: str, field: FieldInfo, text: str, metavar: str | None = None, **options: Any
) -> inspect.Parameter:
    """Return the flag of a setting as typer reads it; its value is None if it is not given.

    `text` is its help. `metavar` is the placeholder that help shows for its value if the type does not give one.
    """
    kind, shown = _kind(field.annotation)
    if metavar in AS_TEXT.values():
        kind = str
    flag = flag_name(name)
    option = typer.Option(
        f"{flag}/--no-{flag[2:]}" if kind is bool else flag,
        help=text,
        metavar=metavar or shown,
        **{"show_default": False, **options},
    )
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
    )


def described(field: FieldInfo, metavar: str | None = None, also: str = "") -> str:
    """Return a setting's description with its default, if that is a value; `metavar` as for `setting_flag`."""
    shown = exact_bytes(field.default) if metavar == SIZE and field.default else str(field.default).lower()
    default = "" if field.default in (None, ()) else f" [default: {shown}]"
    return f"{' '.join(str(field.description).split())}{also}{default}"


def _flags() -> Iterator[inspect.Parameter]:
    """Yield the flags of EngineConfig, which itself checks choices, and reads sizes and short forms."""
    for name, field in EngineConfig.model_fields.items():
        aliases = [alias for alias, setting in ALIASES.items() if setting == name]
        also = f" (also {', '.join(flag_name(alias) for alias in aliases)})" if aliases else ""
        yield setting_flag(name, field, described(field, AS_TEXT.get(name), also), AS_TEXT.get(name))
        for alias in aliases:
            # A separate flag, so that giving both names is noticed.
            yield setting_flag(alias, field, "", AS_TEXT.get(name), hidden=True)


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _kind(annotation: Any) -> tuple[Any, str | None]:
    """Return the type that typer parses, and the placeholder in help if the type does not give one."""
    if isinstance(annotation, UnionType):
        annotation = next(kind for kind in get_args(annotation) if kind is not type(None))
    origin = get_origin(annotation)
    if origin is Literal:
        return str, "|".join(get_args(annotation))
    if origin is dict:
        return list[str], "ID=BIAS"
    return (list[get_args(annotation)[0]] if origin is tuple else annotation), None  # type: ignore[misc]


def as_typed(value: Any, metavar: str | None) -> str:
    """Return a setting's value as one argument of a command line; `metavar` is its placeholder in help."""
    if isinstance(value, list | tuple):
        text = ",".join(map(str, value))
    elif isinstance(value, dict):
        text = json.dumps(value)
    elif metavar == SIZE and isinstance(value, int):
        text = exact_bytes(value)
    else:
        text = str(value)
    return shlex.quote(text)


def flag_name(setting: str) -> str:
    """Return a setting's flag: `max_num_seqs` is `--max-num-seqs`."""
    return "--" + setting.replace("_", "-")
