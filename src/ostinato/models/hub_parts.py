"""Large files of a hub, whose fetching goes on where an earlier process was interrupted. Imports no torch.

huggingface_hub takes a connection up again where it broke; but since version 2 what a process had fetched of a file is
lost when that process ends. So a large file is fetched here, by the client's own means, into a file of its own in the
client's cache. When it is whole, it becomes the blob that the client then finds. Files of Xet storage are left to the
client's own package for these, where it is used: that fetches pieces in any order.
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
"""bytes; less is fetched anew in a moment"""

_PIECE = 2**20


@dataclass(frozen=True)
class _File:
    name: str
    place: str
    """Its address, which may be another host's than the hub's."""
    is_of_hub: bool
    size: int
    checksum: str
    """SHA-256 of the content, which is the ETag of large files too."""


def fetch_large(model: str, revision: str | None, patterns: dict[str, Any], cache: str | None, bar: type) -> None:
    """Fetches the large files of the hub id `model` that fit the patterns and are not in the cache, with a `bar` for
    each. Where the hub does not tell of them nothing happens: the client, which is asked next, says why. Errors with a
    file are the client's; what was fetched of it stays for the next call."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import http_get, repo_folder_name
    from huggingface_hub.utils import build_hf_headers

    if "tqdm_class" not in inspect.signature(http_get).parameters:
        return  # a client from before version 2, which goes on by itself
    blobs = Path(cache or constants.HF_HUB_CACHE) / repo_folder_name(repo_id=model, repo_type="model") / "blobs"
    headers: dict[str, str] = build_hf_headers()
    elsewhere = {name: value for name, value in headers.items() if name.lower() != "authorization"}
    try:
        files = list(_wanted(model, revision, patterns, blobs))
    except ImportError:
        raise
    except Exception:  # the hub's client raises many kinds, from HTTP errors to failed look-ups
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
                os.unlink(part.name)  # the client fetches it anew


def _wanted(model: str, revision: str | None, patterns: dict[str, Any], blobs: Path) -> Iterator[_File]:
    """The files to be fetched here."""
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
    """The file, locked; None if another process is fetching it."""
    with path.open("ab+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield None
            return
        # Between the two calls another process may have made the blob of it.
        is_there = path.exists() and os.path.samestat(path.stat(), os.fstat(file.fileno()))
        yield file if is_there else None


def _begun(part: BinaryIO, size: int) -> int:
    """Bytes that are there already, at whose end the file then stands; none of a file that is too long."""
    if part.seek(0, os.SEEK_END) > size:
        part.truncate(0)
    return part.seek(0, os.SEEK_END)


def _checksum(file: BinaryIO) -> str:
    digest = hashlib.sha256()
    file.seek(0)
    while piece := file.read(_PIECE):
        digest.update(piece)
    return digest.hexdigest()
