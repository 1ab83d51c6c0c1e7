"""Folders that several tests of a process share, such as checkpoints; pytest removes them at its end."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest

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


def lock(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Have the system refuse to look into `folder`, as it does for another user's; root is refused nothing."""

    def refused(call: Callable[..., Any]) -> Callable[..., Any]:
        def ask(path: Any, *arguments: Any, **options: Any) -> Any:
            if isinstance(path, str | os.PathLike) and Path(path) != folder and folder in Path(path).parents:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            return call(path, *arguments, **options)

        return ask

    for name in ("stat", "lstat", "listdir", "scandir", "open", "mkdir", "readlink"):
        monkeypatch.setattr(os, name, refused(getattr(os, name)))
