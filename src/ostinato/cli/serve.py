"""`ostinato serve`: the OpenAI-compatible server."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal, get_args, get_origin

import typer

from ostinato.cli.options import engine_options, with_flags
from ostinato.cli.output import note
from ostinato.serve.settings import ServeSettings

PANEL = "Server"


def _flags() -> Iterator[inspect.Parameter]:
    for name, field in ServeSettings.model_fields.items():
        kind = field.annotation
        plain: Any
        if get_origin(kind) is tuple:
            plain = list[get_args(kind)[0]]  # type: ignore[misc]
        elif get_origin(kind) is Literal:
            plain = str
        else:
            plain = next(each for each in get_args(kind) or (kind,) if each is not type(None))
        flag = "--" + name.replace("_", "-")
        default = "" if field.default in (None, ()) else f" [default: {str(field.default).lower()}]"
        option = typer.Option(
            flag,
            metavar="|".join(get_args(kind)) if plain is str and get_origin(kind) is Literal else None,
            help=f"{field.description}{default}",
            envvar="OSTINATO_API_KEY" if name == "api_key" else None,
            show_default=False,
            show_envvar=True,
            rich_help_panel=PANEL,
        )
        yield inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[plain | None, option]
        )


def server_options(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command a flag for each of ServeSettings; it takes those given as `serving: dict[str, Any]`."""
    return with_flags(command, "serving", _flags())


@engine_options
@server_options
def serve(settings: dict[str, Any], serving: dict[str, Any]) -> None:
    """Serve a model to OpenAI clients, with a page to try it on and to watch it work.

    SIGTERM and Ctrl-C let running requests end, and then exit with status 0.

    Example: ostinato serve --model demo --port 8000
    """
    chosen = ServeSettings(**serving)
    from ostinato.config import EngineConfig
    from ostinato.engine.progress import start_progress
    from ostinato.serve.server import serve as run

    config = EngineConfig(**{"model": "demo", **settings})
    with start_progress() as progress:
        status = run(config, chosen, progress, lambda url: note(f"listening on {url} (Ctrl-C ends it)"))
    raise typer.Exit(status)
