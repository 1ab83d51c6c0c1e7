"""Look-ups in the file system, where what cannot be looked at is absent; and text files that are written whole.

A folder may be another user's (a container with `--user`, whose home is not its own), a name too long, a link that
leads nowhere. `os.path` answers no where `pathlib` raises an OSError or a ValueError.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path

from ostinato.errors import ModelError, OstinatoError, RequestError, os_error_text

is_file, is_directory, exists = os.path.isfile, os.path.isdir, os.path.exists
"""Look-ups that follow links, and never raise."""


def is_stream(path: Path | str) -> bool:
    """Return whether a path is a pipe or a device, which cannot be read again, and may wait for its other end."""
    return exists(path) and not is_file(path) and not is_directory(path)


def matches(directory: Path, pattern: str) -> list[Path]:
    """Return the entries of `directory` whose names match, in the order of names; none if it cannot be read."""
    try:
        names = os.listdir(directory)
    except (OSError, ValueError):
        return []
    return [directory / name for name in sorted(names) if fnmatchcase(name, pattern)]


def expand(path: Path | str) -> Path:
    """Return `path` with a home directory in place of `~` or `~USER`; unchanged if there is no such home."""
    return Path(os.path.expanduser(path))


def home() -> Path:
    """Return the user's home directory; without one, a place where nothing is and nothing can be made."""
    found = expand("~")
    return found if found != Path("~") else Path("/nonexistent")


def why_unreadable(path: Path | str) -> str:
    """Return the system's reason, after a colon, why a path cannot be looked at; nothing for one that is not there."""
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except (OSError, ValueError) as error:
        return f": {os_error_text(error)}"
    return ""


def why_unwritable(path: Path, error: OSError | UnicodeError) -> str:
    """Return why a file could not be written, and what to do if its folder is not there, or takes no more."""
    if isinstance(error, FileNotFoundError) and not is_directory(path.parent):
        return f"{os_error_text(error)}; make its folder first: mkdir -p {path.parent}"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
        return f"{os_error_text(error)}; make room there, or choose another place"
    return os_error_text(error)


def read_text(path: Path) -> str:
    """Return the text of a user's file, without the mark that editors put first. OSError or UnicodeDecodeError."""
    return path.read_text(encoding="utf-8").removeprefix("\ufeff")


def full_lines(text: str) -> list[str]:
    """Return the lines of a text that are not blank. Only a line break ends one: a prompt may hold U+2028."""
    return [line for line in text.split("\n") if line.strip()]


_NO_PART = (errno.EACCES, errno.EPERM, errno.EBUSY, errno.ENAMETOOLONG, errno.EXDEV)
"""Errors of a file beside the one to write, or of its taking that one's place."""


def write_text(path: str | Path, text: str, what: str, error_class: type[OstinatoError] = RequestError) -> None:
    """Write a text file whole, or leave what was there.

    An `error_class`, whose message begins with `what`, if it cannot be written. Devices and pipes stay what they are,
    and a file that none can take the place of (a folder without permission, a mount) is written in place.
    """
    try:
        path = Path(path)
        target = Path(os.path.realpath(path))  # a link stays one
    except (TypeError, ValueError) as error:  # None, a file that is open, a zero byte
        raise error_class(f"{what} cannot be written to {path!r}: {error}") from None
    part = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        content = text.encode()
        if exists(target) and not is_file(target):
            target.write_bytes(content)
            return
        try:
            part.write_bytes(content)
            if is_file(target):
                os.chmod(part, os.stat(target).st_mode)
            part.replace(target)
        except BaseException as error:
            with suppress(OSError):
                part.unlink()
            if not isinstance(error, OSError) or error.errno not in _NO_PART:
                raise
            target.write_bytes(content)
    except (OSError, UnicodeError) as error:
        raise error_class(f"{what} cannot be written to {path}: {why_unwritable(path, error)}") from None


def find_in_checkpoint(directory: Path, name: str, *, may_leave: bool = False) -> Path | None:
    """Return the file `name` of a checkpoint's directory; None if there is none.

    ModelError if it is a link that leads nowhere, or out of the directory: so a checkpoint could have any file of this
    machine published. Links of a hub's cache, to its blobs, are followed. With `may_leave`, all links of a file in the
    directory itself are: weights are never published, and may lie on another disk.
    """
    path = directory / name
    if not os.path.lexists(path):
        return None
    target = Path(os.path.realpath(path))
    is_blob = target.parent.name == "blobs" and target.parent.parent.name.startswith("models--")
    may_leave = may_leave and Path(name).name == name
    if not (may_leave or is_blob or target.is_relative_to(os.path.realpath(directory))):
        raise ModelError(
            f"{path} leads to {target}, out of the checkpoint's directory; if you trust the checkpoint, put a copy of "
            "the file in its place"
        )
    if os.path.islink(path) and not exists(target):
        raise ModelError(f"{path} leads to {target}, which is not there; download the checkpoint again")
    return path if is_file(path) else None
