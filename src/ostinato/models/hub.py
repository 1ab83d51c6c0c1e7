"""Download of checkpoints from a hub, by its own client and into its own cache. Imports no torch.

The client is huggingface_hub: HF_ENDPOINT, HF_HOME, HF_TOKEN and HF_HUB_OFFLINE have their usual meaning, and its
commands list and remove what it has fetched.
"""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from ostinato.errors import ConfigError, ModelError, Remedy, os_error_text
from ostinato.models.hub_parts import fetch_large

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
            f"there is no directory {model!r}; if it is a hub id, fetching it needs an extra: "
            "pip install 'ostinato[hub]'"
        ) from None

    class Bar(tqdm):  # type: ignore[misc]
        """Progress bar that is shown only on a terminal."""

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options | {"disable": not sys.stderr.isatty()})

    patterns: dict[str, Any] = {"allow_patterns": list(files), "ignore_patterns": list(SECOND_COPIES)}
    cache = None if download_dir is None else str(Path(download_dir).expanduser())
    try:
        if any(pattern.endswith((".safetensors", ".gguf")) for pattern in files):
            fetch_large(model, revision, patterns, cache, Bar)
        return Path(snapshot_download(model, revision=revision, cache_dir=cache, tqdm_class=Bar, **patterns))
    except Exception as error:  # The hub's client raises many kinds, from HTTP errors to failed look-ups.
        raise _explained(error, model, revision, download_dir) from error


def gguf_files(model: str, revision: str | None) -> list[str]:
    """Return the GGUF files of a repository, for a message; none if the hub cannot be asked."""
    with suppress(Exception):
        from huggingface_hub import list_repo_files

        return sorted(file for file in list_repo_files(model, revision=revision) if file.endswith(".gguf"))
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
