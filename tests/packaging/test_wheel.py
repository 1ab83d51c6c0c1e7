"""What is built from a clean copy of the tree installs into a clean environment, and works there without the tree."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HERE_ALONE = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
"""What would lend the clean environment another's packages."""

GIVEN = os.environ.get("WHEEL") or None
"""A wheel of all instruction sets that exists already."""

pytestmark = pytest.mark.long


def run(*command: str | Path, place: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in HERE_ALONE}
    subprocess.run([str(part) for part in command], cwd=place, env=environment, check=True)


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source archive, made from what git tracks, and the wheel made from that archive alone; with the
    wheel that WHEEL names in its place."""
    if GIVEN is not None:
        shutil.copy(GIVEN, folder := tmp_path_factory.mktemp("dist"))
        return folder
    tree, dist = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("dist")
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, tracked.split("\0")):
        if (ROOT / name).is_file():  # one that is deleted and not yet committed is not
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, tree / name)
    for_this_machine = "-Ccmake.define.OSTINATO_ISA=native"
    run(sys.executable, "-m", "build", "--outdir", dist, for_this_machine, tree, place=tree)
    return dist


def test_archives_have_metadata_that_an_index_takes(archives: Path) -> None:
    run(sys.executable, "-m", "twine", "check", "--strict", *archives.iterdir(), place=archives)


def test_a_wheel_works_in_an_environment_of_its_own(archives: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv/bin/python"
    [wheel] = archives.glob("*.whl")
    run(python, "-m", "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt", wheel, place=tmp_path)
    run(python, ROOT / "tools/try_wheel.py", "native" if GIVEN is None else "all", place=tmp_path)
