"""Resumed downloads of large files of a hub, after an earlier process was interrupted. Imports no torch.

huggingface_hub resumes a broken connection. Since version 2, however, the data that a process had fetched of a file is
lost when that process ends. So this module fetches a large file, with the client's functions, into a separate file in
the client's cache. A complete file becomes the blob that the client then finds. Files of Xet storage are left to the
client's own package for these, if it is used: that fetches pieces in any order.
"""

from __future__ import annotations

import fcntl
import hashlib
import inspect
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import urlsplit

LARGE = 2**23
"""Smallest size of a large file in bytes; smaller ones are fetched anew in a moment."""

_PIECE = 2**20


@dataclass(frozen=True)
class _File:
    name: str
    place: str
    """Address of the file, which may be on another host than the hub."""
    is_of_hub: bool
    size: int
    checksum: str
    """SHA-256 of the content, which is the ETag of large files too."""


def fetch_large(model: str, revision: str | None, patterns: dict[str, Any], cache: str | None, bar: type) -> None:
    """Fetch the large files of the hub id `model` that match the patterns and are not in the cache, with a `bar` each.

    If the hub does not list them, it does nothing: the client, which is asked next, raises the error. Errors with a
    file are the client's; the data fetched of it stays for the next call.
    """
    from huggingface_hub import constants
    from huggingface_hub.file_download import http_get, repo_folder_name
    from huggingface_hub.utils import build_hf_headers

    if "tqdm_class" not in inspect.signature(http_get).parameters:
        return  # A client from before version 2 resumes by itself.
    blobs = Path(cache or constants.HF_HUB_CACHE) / repo_folder_name(repo_id=model, repo_type="model") / "blobs"
    headers: dict[str, str] = build_hf_headers()
    elsewhere = {name: value for name, value in headers.items() if name.lower() != "authorization"}
    try:
        files = list(_wanted(model, revision, patterns, blobs))
    except ImportError:
        raise
    except Exception:  # The hub's client raises many kinds, from HTTP errors to failed look-ups.
        return
    for file in files:
        blobs.mkdir(parents=True, exist_ok=True)
        with _part(blobs / f"{file.checksum}.part.incomplete") as part:
            if part is None:
                continue
            http_get(
                file.place,
                part,
                resume_size=_begun(part, file.size),
                headers=headers if file.is_of_hub else elsewhere,
                expected_size=file.size,
                displayed_filename=file.name,
                tqdm_class=bar,
            )
            part.flush()
            if _checksum(part) == file.checksum:
                os.rename(part.name, blobs / file.checksum)
            else:
                os.unlink(part.name)  # The client fetches it anew.


def _wanted(model: str, revision: str | None, patterns: dict[str, Any], blobs: Path) -> Iterator[_File]:
    """Yield the files to fetch."""
    from huggingface_hub import HfApi, get_hf_file_metadata, hf_hub_url
    from huggingface_hub.file_download import is_xet_available
    from huggingface_hub.utils import filter_repo_objects

    info = HfApi().model_info(model, revision=revision, files_metadata=True)
    large = {each.rfilename: each.lfs for each in info.siblings or () if each.lfs and each.lfs.size >= LARGE}
    for name in filter_repo_objects(large, **patterns):
        lfs = large[name]
        if (blobs / lfs.sha256).exists():
            continue
        url = hf_hub_url(model, name, revision=info.sha)
        found = get_hf_file_metadata(url)
        is_of_xet = getattr(found, "xet_file_data", None) is not None and is_xet_available()
        if found.etag == lfs.sha256 and not is_of_xet:
            is_of_hub = urlsplit(found.location).netloc == urlsplit(url).netloc
            yield _File(name, found.location, is_of_hub, lfs.size, lfs.sha256)


@contextmanager
def _part(path: Path) -> Iterator[BinaryIO | None]:
    """Open and lock the file; yield None if another process is fetching it."""
    with path.open("ab+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield None
            return
        # Between the two calls another process may have renamed it to the blob.
        is_there = path.exists() and os.path.samestat(path.stat(), os.fstat(file.fileno()))
        yield file if is_there else None


def _begun(part: BinaryIO, size: int) -> int:
    """Return the number of bytes already fetched, and move to the file's end; a file that is too long is emptied."""
    if part.seek(0, os.SEEK_END) > size:
        part.truncate(0)
    return part.seek(0, os.SEEK_END)


def _checksum(file: BinaryIO) -> str:
    digest = hashlib.sha256()
    file.seek(0)
    while piece := file.read(_PIECE):
        digest.update(piece)
    return digest.hexdigest()
