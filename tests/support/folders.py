"""Folders that several tests of a process share, such as checkpoints; pytest removes them at its end."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from tempfile import mkdtemp

_ROOTS: dict[int, Path] = {}
"""By process, since a forked one must not remove its parent's."""


def shared_folder(name: str) -> Path:
    """A new empty folder, whose name begins so."""
    process = os.getpid()
    if process not in _ROOTS:
        _ROOTS[process] = Path(mkdtemp(prefix=f"ostinato-tests-{process}-"))
    return Path(mkdtemp(prefix=f"{name}-", dir=_ROOTS[process]))


def remove_shared_folders() -> None:
    """Those of this process, if it has any."""
    root = _ROOTS.pop(os.getpid(), None)
    if root is not None:
        shutil.rmtree(root)
