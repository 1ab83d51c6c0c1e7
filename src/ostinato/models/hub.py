"""Download of checkpoints from a hub, by its own client and into its own cache. Imports no torch.

The client is huggingface_hub: HF_ENDPOINT, HF_HOME, HF_TOKEN and HF_HUB_OFFLINE have their usual meaning, and its
commands list and remove what it has fetched.

The client resumes a broken connection. Since version 2, however, the data that a process had fetched of a file is lost
when that process ends. So this module fetches a large file, with the client's functions, into a separate file in the
client's cache. A complete file becomes the blob that the client then finds. Files of Xet storage are left to the
client's own package for these, if it is used: that fetches pieces in any order.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import inspect
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import urlsplit

from ostinato.errors import ConfigError, ModelError, Remedy, os_error_text
from ostinato.files import exists, expand
from ostinato.os_support import extra_command, stderr_is_terminal

HUB_ID = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(:(?P<file>(?:\w[\w.+-]*/)*\w[\w.+-]*\.gguf))?")
"""Hub id OWNER/NAME, or with a file OWNER/NAME:FILE.gguf."""
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
        if exists(blobs / lfs.sha256):
            continue
        url = hf_hub_url(model, name, revision=info.sha)
        metadata = get_hf_file_metadata(url)
        is_of_xet = getattr(metadata, "xet_file_data", None) is not None and is_xet_available()
        if metadata.etag == lfs.sha256 and not is_of_xet:
            is_of_hub = urlsplit(metadata.location).netloc == urlsplit(url).netloc
            yield _File(name, metadata.location, is_of_hub, lfs.size, lfs.sha256)


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
        is_there = exists(path) and os.path.samestat(path.stat(), os.fstat(file.fileno()))
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


SECOND_COPIES = ("original/*", "consolidated*")
"""Patterns of second copies of the weights in their author's own format, which some repositories have."""


def fetch_from_hub(model: str, revision: str | None, files: tuple[str, ...], download_dir: str | None) -> Path:
    """Return the directory with the files of the hub id `model` that match the patterns `files`.

    Files that are not in the cache are fetched from the hub, with progress bars on a terminal. ModelError if that
    fails: the message names the cause (no such model, no permission, no network, no room). ConfigError if the model has
    no such `revision`.
    """
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.utils import tqdm
    except ImportError:
        raise ModelError(
            f"there is no directory {model!r}; if it is a hub id, fetching it needs huggingface_hub, which is missing "
            f"here: {extra_command('hub')}"
        ) from None

    class Bar(tqdm):  # type: ignore[misc]
        """Progress bar that is shown only on a terminal."""

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options | {"disable": not stderr_is_terminal()})

    patterns: dict[str, Any] = {"allow_patterns": list(files), "ignore_patterns": list(SECOND_COPIES)}
    cache = None if download_dir is None else str(expand(download_dir))
    try:
        if any(pattern.endswith((".safetensors", ".gguf")) for pattern in files):
            fetch_large(model, revision, patterns, cache, Bar)
        return Path(snapshot_download(model, revision=revision, cache_dir=cache, tqdm_class=Bar, **patterns))
    except Exception as error:  # The hub's client raises many kinds, from HTTP errors to failed look-ups.
        raise _explained(error, model, revision, download_dir) from error


def gguf_files(model: str, revision: str | None) -> list[str]:
    """Return the GGUF files of text in a repository, for a message; none if the hub cannot be asked."""
    with suppress(Exception):
        from huggingface_hub import list_repo_files

        files = list_repo_files(model, revision=revision)
        return sorted(file for file in files if file.endswith(".gguf") and "mmproj" not in file)
    return []


def _explained(
    error: Exception, model: str, revision: str | None, download_dir: str | None
) -> ModelError | ConfigError:
    """Return the error for a failed fetch, with advice."""
    # They are compared by name, since some of these kinds came with later versions of the client.
    kinds = {kind.__name__ for kind in type(error).__mro__}
    status = getattr(getattr(error, "response", None), "status_code", None)
    in_cache = "hf cache ls" + ("" if download_dir is None else f" --cache-dir {download_dir}")
    begin = f"there is no directory {model!r}, and"
    if "GatedRepoError" in kinds or status == 403:
        return ModelError(
            f"{begin} the hub does not let you have that model: ask for access on its page there, then log in by `hf "
            f"auth login`, or set HF_TOKEN to a token that may read it"
        )
    if "RevisionNotFoundError" in kinds:
        message = f"{model} on the hub has no branch, tag or commit {revision!r}; its page there lists them"
        return ConfigError(message, [Remedy("revision", None)])
    if "RepositoryNotFoundError" in kinds or status in (401, 404):
        return ModelError(
            f"{begin} the hub has no model of that name that you may see; is it spelt OWNER/NAME as on its page? For a "
            f"private one, log in by `hf auth login`, or set HF_TOKEN. `{in_cache}` lists the models that are here"
        )
    if kinds & {"LocalEntryNotFoundError", "OfflineModeIsEnabled", "ConnectError", "ConnectionError", "ProxyError"}:
        return ModelError(
            f"{begin} not all of its files are here; the hub cannot be reached to fetch them: {_root(error)}. "
            f"`{in_cache}` lists the models that are here. The same command, given again with a network, fetches what "
            "is missing"
        )
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return ModelError(
            f"{model} cannot be kept: {os_error_text(error)}. Give another place by --download-dir, or make room: "
            f"`{in_cache}` lists what is here, and `hf cache rm` removes it"
        )
    if isinstance(error, OSError) and error.errno is not None and error.filename is not None:
        return ModelError(
            f"{model} cannot be kept in {error.filename}: {os_error_text(error)}; give another place by --download-dir"
        )
    return ModelError(
        f"{begin} it could not be fetched from the hub: {_root(error)}. The same command, given again, goes on where "
        "this one stopped"
    )


def _root(error: BaseException) -> str:
    """Return the innermost cause in one line, which is more precise than the errors raised from it."""
    *_, last = _causes(error)
    return " ".join(str(last).split()) or type(last).__name__


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: Any = error
    while seen is not None:
        yield seen
        seen = seen.__cause__
