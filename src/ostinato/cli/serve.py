"""`ostinato serve`: the OpenAI-compatible server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer

from ostinato.cli.options import described, engine_options, setting_flag, with_flags
from ostinato.cli.output import note
from ostinato.engine.process.launch import SECRET_VARIABLES
from ostinato.serve.settings import ServeSettings

PANEL = "Server"


def server_options(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command a flag for each of ServeSettings; it takes those given as `serving: dict[str, Any]`."""
    flags = [
        setting_flag(
            name,
            field,
            described(field),
            envvar=SECRET_VARIABLES.get(name),
            show_envvar=True,
            rich_help_panel=PANEL,
        )
        for name, field in ServeSettings.model_fields.items()
    ]
    return with_flags(command, "serving", flags)


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
