"""`ostinato serve`: the OpenAI-compatible server."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer
from pydantic.fields import FieldInfo

from ostinato.cli.options import SIZE, Model, described, engine_options, name_model, setting_flag, with_flags
from ostinato.cli.output import note
from ostinato.engine.process.launch import SECRET_VARIABLES
from ostinato.serve.settings import BYTE_SETTINGS, ServeSettings

PANEL = "Server"


def server_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command a flag for each of ServeSettings; `serving: dict[str, Any]` receives the given ones."""
    flags = [_flag(name, field) for name, field in ServeSettings.model_fields.items()]
    return with_flags(command, "serving", flags)


def _flag(name: str, field: FieldInfo) -> inspect.Parameter:
    metavar = SIZE if name in BYTE_SETTINGS else None
    return setting_flag(
        name,
        field,
        described(field, metavar),
        metavar,
        envvar=SECRET_VARIABLES.get(name),
        show_envvar=True,
        rich_help_panel=PANEL,
    )


@engine_options
@server_options
def serve(
    settings: dict[str, Any],
    serving: dict[str, Any],
    target: Model = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print all settings as a file for --config, and exit.")
    ] = False,
) -> None:
    """Serve a model to OpenAI clients, with a page to try it on and to watch it work.

    SIGTERM and Ctrl-C let running requests end, and then exit with status 0.

    Example: ostinato serve demo --port 8000
    """
    name_model(settings, target)
    chosen = ServeSettings(**serving)
    from ostinato.config import EngineConfig
    from ostinato.engine.progress import start_progress
    from ostinato.serve.server import serve as run

    config = EngineConfig(**{"model": "demo", **settings})
    if print_config:
        from ostinato.cli.config_file import print_config as lines

        for each in (config, chosen):
            print("\n".join(lines(each)))
        return
    with start_progress() as progress:
        status = run(config, chosen, progress, lambda url: note(f"listening on {url} (Ctrl-C ends it)"))
    raise typer.Exit(status)
