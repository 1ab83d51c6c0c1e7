"""What several commands of `ostinato bench` read and say alike."""

from __future__ import annotations

import sys
from collections.abc import Callable

from rich.console import Console

from ostinato.errors import ConfigError


def sizes(text: str, option: str = "--batch-sizes", example: str = "1,8,32") -> tuple[int, ...]:
    """Whole numbers of at least 1, with commas between them; anything else is a ConfigError that names `option`."""
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise ConfigError(f"{option} {text!r} should be whole numbers of at least 1, such as {example}")
    return found


def reporter() -> Callable[[str], None]:
    """Says on a terminal what is being done."""
    if not sys.stderr.isatty():
        return lambda _: None
    console = Console(stderr=True)
    return lambda text: console.print(f"[dim]{text}[/dim]", highlight=False)
