"""Engine settings as command-line flags: one for each field of EngineConfig, in every command that wants
them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from pydantic.fields import FieldInfo

from ostinato.config import ALIASES, EngineConfig
from ostinato.errors import ConfigError


def engine_options(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command a flag for every engine setting, and its other names as hidden flags.

    The command takes `settings: dict[str, Any]`, which receives the flags that were given, ready for
    `EngineConfig(**settings)`. Where the command has a parameter of a setting's own name, that one stands.

        @engine_options
        def generate(settings: dict[str, Any], prompt: str) -> None: ...
    """
    return with_flags(command, "settings", _flags())


def with_flags(command: Callable[..., None], collector: str, flags: Iterable[inspect.Parameter]) -> Callable[..., None]:
    """`command` with more flags; its parameter `collector` receives those that were given, by name.

    Flags default to None, which means not given. Where the command has a parameter of a flag's name, that one
    stands.
    """
    parameters = inspect.signature(command, eval_str=True).parameters
    own = [parameter for parameter in parameters.values() if parameter.name != collector]
    added = [flag for flag in flags if flag.name not in parameters]

    def with_collected(**arguments: Any) -> None:
        values = {flag.name: arguments.pop(flag.name) for flag in added}
        given = {name: value for name, value in values.items() if value is not None}
        command(**{collector: given}, **arguments)

    every = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in (*own, *added)]
    with_collected.__name__, with_collected.__doc__ = command.__name__, command.__doc__
    with_collected.__signature__ = inspect.Signature(every)  # type: ignore[attr-defined]
    with_collected.__annotations__ = {parameter.name: parameter.annotation for parameter in every}
    return with_collected


def name_model(settings: dict[str, Any], target: str | None) -> None:
    """Sets the model to `target`, a command's positional MODEL, if it was given. ConfigError if both were."""
    if target is None:
        return
    if "model" in settings:
        raise ConfigError(f"the model is given twice: {target!r} and --model {settings['model']!r}")
    settings["model"] = target


def _flags() -> Iterator[inspect.Parameter]:
    """Keyword parameters as typer reads them. All default to None, which means not given."""
    for name, field in EngineConfig.model_fields.items():
        aliases = [alias for alias, setting in ALIASES.items() if setting == name]
        also = f" (also {', '.join(_flag_name(alias) for alias in aliases)})" if aliases else ""
        yield _parameter(name, field, f"{field.description}{also}", hidden=False)
        for alias in aliases:
            # A flag of its own, so that giving both names is noticed.
            yield _parameter(alias, field, "", hidden=True)


def _parameter(name: str, field: FieldInfo, text: str, hidden: bool) -> inspect.Parameter:
    kind, metavar = _kind(name, field)
    flag = _flag_name(name)
    default = "" if field.default is None else f" [default: {str(field.default).lower()}]"
    option = typer.Option(
        f"{flag}/--no-{flag[2:]}" if kind is bool else flag,
        help=text + default,
        metavar=metavar,
        hidden=hidden,
        show_default=False,
    )
    annotation = Annotated[kind | None, option]  # type: ignore[valid-type]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _kind(name: str, field: FieldInfo) -> tuple[type, str | None]:
    """The type that typer parses, and what help shows for it. EngineConfig itself checks choices, sizes and short
    forms."""
    if ALIASES.get(name, name) == "cache_memory":
        return str, "SIZE"
    if ALIASES.get(name, name) in ("capture_sizes", "capture_rows", "encoder_token_budgets"):
        return str, "N,N,..."
    if ALIASES.get(name, name) == "speculative":
        return str, "METHOD:K"
    if get_origin(field.annotation) is Literal:
        return str, "|".join(get_args(field.annotation))
    plain = [kind for kind in get_args(field.annotation) or (field.annotation,) if kind is not type(None)]
    return plain[0], None


def _flag_name(setting: str) -> str:
    return "--" + setting.replace("_", "-")
