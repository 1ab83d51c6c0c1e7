"""Folders that several tests of a process share, such as checkpoints; pytest removes them at its end."""

from __future__ import annotations

import os
import shutil
from functools import cache
from pathlib import Path
from tempfile import mkdtemp


def shared_folder(name: str) -> Path:
    """A new empty folder, whose name begins so."""
    return Path(mkdtemp(prefix=f"{name}-", dir=_root(os.getpid())))


@cache
def _root(process: int) -> Path:
    """Of a process, since a forked one must not remove its parent's."""
    return Path(mkdtemp(prefix=f"ostinato-tests-{process}-"))


def remove_shared_folders() -> None:
    """Those of this process."""
    shutil.rmtree(_root(os.getpid()))
