"""The JSON files of a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ostinato.errors import ModelError


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, empty if there is no such file. ModelError if it holds anything else."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} should hold an object, not a {type(value).__name__}")
    return value
