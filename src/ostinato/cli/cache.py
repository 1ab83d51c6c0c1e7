"""`ostinato cache`: the files that prefix caches have left in a directory (`--cache-offload`)."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ostinato.cli.help import HelpCommand, HelpGroup
from ostinato.engine.cache_files import CacheFolder, clear_cache_folder, default_cache_directory, list_cache_folders
from ostinato.errors import ConfigError, os_error_text
from ostinato.units import format_bytes

app = typer.Typer(
    cls=HelpGroup,
    help="List or clear the files of prefix caches, which --cache-offload keeps. They hold prompts.\n\n"
    "Example: ostinato cache ls",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)

Where = Annotated[
    Path | None, typer.Argument(metavar="DIR", help="As --cache-dir (~/.cache/ostinato/prefixes).", show_default=False)
]

Named = Annotated[Path | None, typer.Option("--cache-dir", metavar="DIR", help="The same.", show_default=False)]


@app.command("ls", cls=HelpCommand)
def ls(
    directory: Where = None,
    cache_dir: Named = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the list as JSON.")] = False,
) -> None:
    """List each model's files in a directory: number, bytes and last use.

    Example: ostinato cache ls
    """
    found = _folders(directory, cache_dir)
    if as_json:
        rows = [{**vars(each), "path": str(each.path)} for each in found]
        print(json.dumps(rows, indent=2))
        return
    table = Table(box=None)
    for heading in ("id", "model", "dtype", "files", "size", "last used"):
        table.add_column(heading, justify="right" if heading in ("files", "size") else "left", header_style="")
    for each in found:
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(each.used)) if each.files else "never"
        row = (each.path.name[:12], each.model, each.dtype, f"{each.files:,}", format_bytes(each.num_bytes), used)
        # A path may hold what rich takes for its markup.
        table.add_row(*map(Text, row))
    Console().print(table if found else "there are no files")


@app.command("clear", cls=HelpCommand)
def remove(
    directory: Where = None,
    cache_dir: Named = None,
    only: Annotated[
        str | None, typer.Option("--id", metavar="ID", help="Of this model alone, as `ls` names it.")
    ] = None,
) -> None:
    """Remove the files of all models in a directory, or of one. A running engine copes with missing files.

    Example: ostinato cache clear
    """
    found = _folders(directory, cache_dir)
    chosen = [each for each in found if only is None or each.path.name.startswith(only)]
    if only is not None and len(chosen) != 1:
        ids = ", ".join(each.path.name[:12] for each in found) or "none"
        raise ConfigError(f"--id {only}: it is the beginning of {len(chosen)} ids; there are {ids}")
    for each in chosen:
        try:
            clear_cache_folder(each)
        except OSError as error:
            raise ConfigError(f"the files in {each.path} cannot be removed: {os_error_text(error)}") from None
    size = format_bytes(sum(each.num_bytes for each in chosen))
    print(f"{sum(each.files for each in chosen):,} files removed, {size}")


def _folders(directory: Path | None, cache_dir: Path | None) -> list[CacheFolder]:
    if directory is not None and cache_dir is not None:
        raise ConfigError(f"two directories are given: {directory} and {cache_dir}; leave out --cache-dir")
    directory = directory or cache_dir
    where = directory or default_cache_directory()
    try:
        return list_cache_folders(where)
    except FileNotFoundError:
        if directory is None:
            return []
        raise ConfigError(f"there is no directory {where}; --cache-dir names one when an engine starts") from None
    except OSError as error:
        raise ConfigError(f"{where} cannot be read: {os_error_text(error)}") from None
