"""Pooling of a checkpoint: one vector per text, as sentence-transformers files next to the weights describe it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ostinato.errors import ModelError
from ostinato.files import find_in_checkpoint
from ostinato.json_io import read_json_value

PoolingKind = Literal["last", "mean"]
_MODES = {"lasttoken": "last", "mean": "mean", "mean_tokens": "mean"}
"""Pooling kinds by the names of the modes in 1_Pooling/config.json."""


@dataclass(frozen=True)
class Pooling:
    """Pooling of the final normed hidden states of a text: the last or the mean, of length 1 if `normalize`."""

    kind: PoolingKind = "last"
    normalize: bool = True


def load_pooling(directory: Path) -> Pooling:
    """Return the pooling of modules.json and the files that it names, or the defaults if a checkpoint has none.

    ModelError for pooling that is not implemented, and for damaged files.
    """
    modules = read_json_value(directory / "modules.json")
    if modules is None:
        return Pooling()
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise ModelError("modules.json should be a list of objects")
    kinds = [str(module.get("type", "")).rpartition(".")[2] for module in modules]
    unknown = [kind for kind in kinds if kind not in ("Transformer", "Pooling", "Normalize")]
    if unknown or kinds[:2] != ["Transformer", "Pooling"] or len(kinds) != len(set(kinds)):
        raise ModelError(
            f"modules.json makes embeddings by {', '.join(kinds)}; implemented are Transformer, Pooling and, behind "
            "them, Normalize"
        )
    name = f"{Path(str(modules[1].get('path', ''))).name}/config.json"
    path = find_in_checkpoint(directory, name)
    if path is None:
        raise ModelError(f"modules.json names {name}, which is not there")
    return Pooling(_kind(read_json_value(path), name), "Normalize" in kinds)


def _kind(config: object, name: str) -> Any:
    if not isinstance(config, dict):
        raise ModelError(f"{name} should be an object")
    # Newer files have one name, older ones a flag for each mode.
    prefix = "pooling_mode_"
    modes = [key.removeprefix(prefix) for key, value in config.items() if key.startswith(prefix) and value is True]
    given = config.get("pooling_mode")
    if given is not None:
        modes = list(map(str, given)) if isinstance(given, list) else [str(given)]
    if len(modes) != 1 or modes[0] not in _MODES:
        asked = " and ".join(modes) or "nothing"
        raise ModelError(f"{name} asks to pool by {asked}; implemented are lasttoken and mean")
    return _MODES[modes[0]]
